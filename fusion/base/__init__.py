"""The ground floor: errors and notices in words, the interface of a family of models, and which
ComfyUI and which cards the pack runs with. Nothing here knows a model or a file."""

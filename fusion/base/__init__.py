"""What every floor above stands on: errors and notices in words, what a family of models is to the rest, which ComfyUI and which
cards the pack runs with. Nothing here knows a model or a file.
"""

"""A model's layers in RAM: read from the file or pinned, registered pages, the ring that they pass through."""

"""Backends that bring a layer's bytes to the card: into slots, into managed memory, or from the
host (`host/`)."""

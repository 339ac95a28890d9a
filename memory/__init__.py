"""Where a weight lives: file -> host pages -> device window. Knows tensors, not models."""

from .file import BadFile, Extent, WeightFile, read_header

__all__ = ["BadFile", "Extent", "WeightFile", "read_header"]

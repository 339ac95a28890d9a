"""Where a weight lives: file -> host pages -> device window. Knows tensors, not models."""

from .backend import Backend, Convert, Copy, HostBackend, Source
from .budget import DeviceBudget
from .checkpoint import Checkpoint
from .file import BadFile, Extent, WeightFile, read_header
from .layer import Layer, Weight, staging_bytes
from .ledger import Ledger
from .open_file import FileChanged
from .pager import Pager, PagerError
from .plan import OverBudget, Plan, Prediction, Rates, make_plan, simulate

__all__ = [
    "Backend",
    "BadFile",
    "Checkpoint",
    "Convert",
    "Copy",
    "DeviceBudget",
    "Extent",
    "FileChanged",
    "HostBackend",
    "Layer",
    "Ledger",
    "OverBudget",
    "Pager",
    "PagerError",
    "Plan",
    "Prediction",
    "Rates",
    "Source",
    "Weight",
    "WeightFile",
    "make_plan",
    "read_header",
    "simulate",
    "staging_bytes",
]

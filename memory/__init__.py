"""Where a weight lives: file -> host pages -> device window. Knows tensors, not models."""

from .file import BadFile, Extent, WeightFile, read_header
from .plan import OverBudget, Plan, Prediction, Rates, make_plan, simulate

__all__ = [
    "BadFile",
    "Extent",
    "OverBudget",
    "Plan",
    "Prediction",
    "Rates",
    "WeightFile",
    "make_plan",
    "read_header",
    "simulate",
]

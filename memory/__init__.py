"""Where a weight lives: file -> host pages -> device window. Knows tensors, not models."""

from ..gpu import CudaError, NoDriver
from .backend import Along, Backend, Convert, Copy, HostBackend, Source, Weights
from .budget import DeviceBudget
from .checkpoint import Checkpoint
from .cuda_managed import NoManagedMemory
from .encoding import ENCODINGS, Encoding
from .file import BadFile, Extent, WeightFile
from .formats import read_header
from .kept_pages import KeptPages
from .layer import Layer, Weight, staging_bytes
from .ledger import Ledger
from .open_file import FileChanged
from .opening import bounds, open_pager, plan_of
from .pager import Pager, PagerError
from .parcels import Parcels, open_parcels
from .plan import OverBudget, Plan, Prediction, Rates, least_budget, make_plan, most_budget, simulate
from .ram import RamBudget
from .rates import BusRates

__all__ = [
    "ENCODINGS",
    "Along",
    "Backend",
    "BadFile",
    "BusRates",
    "Checkpoint",
    "Convert",
    "Copy",
    "CudaError",
    "DeviceBudget",
    "Encoding",
    "Extent",
    "FileChanged",
    "HostBackend",
    "KeptPages",
    "Layer",
    "Ledger",
    "NoDriver",
    "NoManagedMemory",
    "OverBudget",
    "Pager",
    "PagerError",
    "Parcels",
    "Plan",
    "Prediction",
    "RamBudget",
    "Rates",
    "Source",
    "Weight",
    "WeightFile",
    "Weights",
    "bounds",
    "least_budget",
    "make_plan",
    "most_budget",
    "open_pager",
    "open_parcels",
    "plan_of",
    "read_header",
    "simulate",
    "staging_bytes",
]

"""Home of a weight's bytes: file -> host pages -> device window. Knows tensors, not models."""

from ..gpu import CudaError, NoDriver
from .backends.backend import (
    Along,
    Backend,
    Convert,
    Copy,
    HostBackend,
    Source,
    Weights,
)
from .backends.cuda_managed import NoManagedMemory
from .budget import DeviceBudget
from .checkpoint import Checkpoint
from .encoding import ENCODINGS, Encoding
from .file import BadFile, Extent, WeightFile
from .formats import read_header
from .host.kept_pages import KeptPages
from .host.ram import RamBudget
from .joined import JoinedCheckpoint
from .layer import Layer, Weight, staging_bytes
from .ledger import Ledger
from .open_file import FileChanged
from .opening import bounds, open_pager, plan_of
from .pager import Pager, PagerError
from .plan import OverBudget, Plan, Prediction, Rates, least_budget, make_plan, most_budget, simulate
from .rates import BusRates
from .side_copies import Parcels, open_parcels

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
    "JoinedCheckpoint",
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

"""The ground floor: the CUDA driver of this machine, opened once, and CUDA graphs. Other driver
calls stand where they are used.

This package itself and `cuda` need only the standard library, because the kernels are built without
torch. The other modules import torch.
"""

from .cuda import CudaError, Driver, NoDriver, driver

__all__ = ["CudaError", "Driver", "NoDriver", "driver"]

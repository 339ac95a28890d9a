"""The ground floor: the CUDA driver of this machine, opened once. What is asked of it beyond that stands where it is used.

Standard library only, but for `capture` and `nvidia`: whoever builds the kernels needs no torch.
"""

from .cuda import CudaError, Driver, NoDriver, driver

__all__ = ["CudaError", "Driver", "NoDriver", "driver"]

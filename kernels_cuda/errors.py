"""The exceptions of the kernel system. Every message names the operation and says what to do or what was found."""

from __future__ import annotations

from ..gpu import CudaError


class KernelError(CudaError):
    """The driver refused a call: the message names kernel, shape and the driver's own error."""

    __module__ = "fusestream"  # what ComfyUI shows before the message


class KernelRefused(RuntimeError):
    """A forced kernel (`on`) cannot serve this input: the message holds the reason of every candidate."""

    __module__ = "fusestream"  # what ComfyUI shows before the message


class CodeUnavailable(RuntimeError):
    """No machine code for this device: no archive, a stale or damaged one, or a card that is too old."""


class ArchiveError(CodeUnavailable):
    """The prebuilt archive is missing, damaged or built from other sources."""


class BuildError(RuntimeError):
    """A unit did not compile, or the compiler is not there."""

"""What a kernel policy says of many ops at once. Of one op `KernelPolicy.mode` says it."""

from __future__ import annotations

from collections.abc import Iterable

from ..kernels_cuda import KernelPolicy


def all_off(policy: KernelPolicy, ops: Iterable[str] | None = None) -> bool:
    """Whether all of these ops are off; None: every op there is, by the default and without an exception."""
    modes = (policy.default, *(mode for _, mode in policy.ops)) if ops is None else map(policy.mode, ops)
    return all(mode == "off" for mode in modes)

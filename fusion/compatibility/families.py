"""Families as the loaders may use them: as they are, or with nothing fused if ComfyUI's code has
changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch

from ...kernels_cuda import KernelPolicy, KernelRefused
from ..base.family import Family
from ..base.other_cards import lacks
from ..base.policy import all_off
from .aside import Raised, step_aside
from .verdicts import verdict

Known = TypeVar("Known", Family, Family | None)


def checked(family: Known, device: torch.device, policy: KernelPolicy) -> Known:
    """The family, if there is one, after comparison with ComfyUI's code on this device. If that
    differs, the family with nothing fused, or `KernelRefused` if the policy insists."""
    if family is None or family.specimens is None or family.aside is not None or all_off(policy, family.ops):
        return family
    if lacks(device) is not None:  # our kernels do not run there
        return family
    reason = difference_of(family, device)
    if reason is None:
        return family
    said = step_aside(f"{family.name} {family.role.words}", reason)
    if policy.default == "on":
        raise KernelRefused(
            f"kernels is 'on' for this {family.words}, and FuseStream cannot compute it. {said.words} Choose 'auto', or update "
            "FuseStream."
        )
    return unfused(family, said.words)


def concerns(family: Family, model: Any) -> bool:
    """Whether a network has a part that the family would compute; True if that cannot be told.
    model: any of stock's networks."""
    try:
        every = [kind for specimen in (family.specimens or tuple)() for kind in specimen.replaces.values()]
    except Exception:  # the code of another ComfyUI
        return True
    # all networks have those of comfy.ops
    kinds = {kind for kind in every if kind.__module__ != "comfy.ops"}
    return any(type(module) in kinds for module in model.modules())


def difference_of(family: Family, device: torch.device) -> str | None:
    """The first difference found by the family's specimens on a device, in words; None: there is
    none."""
    assert family.specimens is not None
    try:
        specimens = list(family.specimens())
    except Exception as error:  # a class that they use has another name
        return Raised.of(error)
    for specimen in specimens:
        for dtype in specimen.dtypes:
            found = verdict(specimen, device, getattr(torch, dtype)).difference
            if found is not None:
                return type(found)(f"{specimen.name}: {found}")
    return None


def unfused(family: Family, why: str) -> Family:
    """The family with its files known, and its models left to ComfyUI."""
    return replace(family, fuse=_nothing, types=(), need=None, in_pieces=False, idle=None, aside=why)


def _nothing(_model: Any, _policy: KernelPolicy) -> int:
    return 0

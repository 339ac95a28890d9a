"""A family as the loaders may use it: as it is, or with nothing fused where ComfyUI's code is not what ours was written after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch

from ...kernels_cuda import KernelPolicy, KernelRefused
from ..base.family import Family
from ..base.other_cards import lacks
from ..fused.block import all_off
from .aside import Raised, step_aside
from .verdicts import verdict

Known = TypeVar("Known", Family, Family | None)


def checked(family: Known, device: torch.device, policy: KernelPolicy) -> Known:
    """The family, if there is one, held against ComfyUI's code on this device. Where that differs, one with nothing fused, or
    `KernelRefused` if the policy insists."""
    if family is None or family.specimens is None or family.aside is not None or all_off(policy, family.ops):
        return family
    if lacks(device) is not None:  # no kernel of ours runs there
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
    """Whether a network has a part that the family would compute, or nobody can tell. model: any of stock's networks."""
    try:
        every = [kind for specimen in (family.specimens or tuple)() for kind in specimen.replaces.values()]
    except Exception:  # it is another ComfyUI's
        return True
    kinds = {kind for kind in every if kind.__module__ != "comfy.ops"}  # or all networks have them
    return any(type(module) in kinds for module in model.modules())


def difference_of(family: Family, device: torch.device) -> str | None:
    """What of the family's specimens is not as it was, on a device."""
    assert family.specimens is not None
    try:
        specimens = list(family.specimens())
    except Exception as error:  # a class that they are made of has another name
        return Raised.of(error)
    for specimen in specimens:
        for dtype in specimen.dtypes:
            found = verdict(specimen, device, getattr(torch, dtype)).difference
            if found is not None:
                return type(found)(f"{specimen.name}: {found}")
    return None


def unfused(family: Family, why: str) -> Family:
    """One whose files are known, and whose models ComfyUI computes as any other's."""
    return replace(family, fuse=_nothing, types=(), need=None, in_pieces=False, idle=None, aside=why)


def _nothing(_model: Any, _policy: KernelPolicy) -> int:
    return 0

"""The same model under another kernel policy, for one branch of a graph, while the other branch is
unchanged.

Weights, stream and memory are shared with the given model; nothing about that one changes.

    MODEL   the policy is in `model_options`, of which every clone has its own
    CLIP    } the policy is an attribute of the network. A clone carries another one as an object
    VAE     } patch: ComfyUI sets it when it loads this clone, and resets it for another

A VAE of ComfyUI has no `clone`. A shallow copy with a clone of its patcher serves as one.
"""

from __future__ import annotations

import copy
from typing import Any

import comfy.model_management
import torch
from comfy.utils import set_attr

from ...kernels_cuda import STANDARD, KernelPolicy, check_policy
from ..base.family import Family, Role
from ..base.policy import places_in
from ..compatibility import families as compatibility
from ..families import FAMILIES
from ..fused import attention
from ..sparse.model import reinstalled
from ..vae import pixel_range
from ..weights.fp32_residual import TORCHS


class NotOurs(ValueError):
    """A model whose computation cannot be switched by this node."""

    __module__ = "fusestream"


def model_under(model: Any, policy: KernelPolicy) -> Any:
    """A clone of a stock MODEL that computes under this policy. If FuseStream did not load it, only
    its attention is switched."""
    check_policy(policy)
    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    held = options.get(attention.HOOK)
    attention.install(clone, policy)
    options[attention.HOOK] = reinstalled(held, options[attention.HOOK])
    return clone


def text_encoder_under(clip: Any, policy: KernelPolicy) -> Any:
    """A clone of a stock CLIP whose encoders compute under this policy. Encoders that were left to
    stock when they were loaded are fused first, with a policy that computes as stock; only the
    clone differs."""
    check_policy(policy)
    model = clip.cond_stage_model
    found: list[Family] = []
    if not list(places_in(model)):
        found = _concerned(Role.TEXT, model, comfy.model_management.text_encoder_device())
        for family in found:
            family.fuse(model, STANDARD)
        for name in places_in(model):
            set_attr(model, name, TORCHS)
    if not list(places_in(model)) and not _all_aside(found, policy):
        known = " or ".join(family.name for family in FAMILIES if family.role is Role.TEXT)
        raise NotOurs(
            f"This CLIP has no {known} encoder, and FuseStream has kernels for no other. Connect one that has."
        )
    return _switched_to(policy, clip.clone(), model)


def vae_under(vae: Any, policy: KernelPolicy) -> Any:
    """A copy of a stock VAE, over the same weights, that computes under this policy."""
    check_policy(policy)
    model = vae.first_stage_model
    if not list(places_in(model)):
        found = _concerned(Role.VAE, model, comfy.model_management.vae_device())
        if not _all_aside(found, policy):
            raise NotOurs(
                "This VAE computes as ComfyUI's: it was loaded by another node, with kernels 'off', or is of a kind that "
                "FuseStream has no kernels for. Load it with the FuseStream VAE Loader and kernels 'auto'; this node can "
                "switch off from there."
            )
    clone = copy.copy(vae)
    clone.patcher = vae.patcher.clone()
    pixel_range.copied(clone)
    return _switched_to(policy, clone, model)


def _switched_to(policy: KernelPolicy, clone: Any, model: Any) -> Any:
    """A clone of a CLIP or VAE, switched to this policy. model: shared by the clone and the
    original."""
    for name in places_in(model):
        clone.patcher.add_object_patch(name, policy)
    return clone


def _concerned(role: Role, model: Any, device: torch.device) -> list[Family]:
    """The families of this role that concern a network, set aside if ComfyUI's code changed."""
    families = (family for family in FAMILIES if family.role is role and compatibility.concerns(family, model))
    return [compatibility.checked(family, device, STANDARD) for family in families]


def _all_aside(families: list[Family], policy: KernelPolicy) -> bool:
    """Whether a network is ComfyUI's because its code changed. Then the graph goes on without us,
    unless the policy insists."""
    return policy.default != "on" and bool(families) and all(family.aside is not None for family in families)

"""The same model under another kernel policy: for one branch of a graph, while the other goes on as it was loaded.

Weights, stream and memory are shared with the model that is given; nothing about that one changes.

    MODEL   the policy travels in `model_options`, of which every clone has its own
    CLIP    } the policy stands on the network. A clone carries another one as an object patch: ComfyUI puts it in when it
    VAE     } loads this clone, and takes it out when it loads another one

A VAE of ComfyUI has no `clone`; a shallow copy of the object over a clone of its patcher is one.
"""

from __future__ import annotations

import copy
from typing import Any

from ..kernels_cuda import KernelPolicy, check_policy
from . import attention, t5
from .wan_vae import POLICY, Fused


class NotOurs(ValueError):
    """A model whose computation cannot be switched here."""

    __module__ = "fusestream"


def model_under(model: Any, policy: KernelPolicy) -> Any:
    """A clone of a stock MODEL that computes under this policy. One that FuseStream did not load has its attention switched,
    and nothing else."""
    check_policy(policy)
    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    held = options.get(attention.HOOK)
    attention.install(clone, policy)
    if held is not None and not isinstance(held, attention.AttentionOverride):
        options[attention.HOOK] = held  # another node's: what the user put there stays
    return clone


def text_encoder_under(clip: Any, policy: KernelPolicy) -> Any:
    """A clone of a stock CLIP whose T5 encoders compute under this policy."""
    check_policy(policy)
    found = t5.ways(clip.cond_stage_model, policy)
    if not found:
        raise NotOurs("This CLIP has no T5 or UMT5 encoder, and FuseStream has kernels for no other. Connect Wan's.")
    clone = clip.clone()
    for name, how in found.items():
        clone.patcher.add_object_patch(name, how)
    return clone


def vae_under(vae: Any, policy: KernelPolicy) -> Any:
    """A copy of a stock VAE, over the same weights, that computes under this policy."""
    check_policy(policy)
    if not isinstance(vae.first_stage_model, Fused):
        raise NotOurs(
            "This VAE computes as ComfyUI's: it was loaded by another node, with kernels 'off', or is not Wan's. Load it with "
            "the FuseStream VAE Loader and kernels 'auto'; this node can switch off from there."
        )
    clone = copy.copy(vae)
    clone.patcher = vae.patcher.clone()
    clone.patcher.add_object_patch(POLICY, policy)
    return clone

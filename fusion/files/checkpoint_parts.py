"""Which tensors of a whole checkpoint are whose, by stock's rules: it tells the diffusion model, and that knows what is beside it.

What goes in and comes out are tensors by name, of a file or standing in for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import comfy.model_detection
import comfy.sd
import comfy.utils
import torch

Tensors = dict[str, torch.Tensor]
NETWORK = "transformer."  # of a text encoder's tensors: behind the encoder's name, before the names that a file of its own has
SCALED = "scaled_fp8"  # beside the layers that are stored so


def config_of(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Any:
    """Stock's configuration of the model; None: it is no checkpoint to stock, at most a diffusion model by itself."""
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    plain, told = comfy.utils.convert_old_quants(dict(tensors), prefix, metadata=dict(metadata))
    return comfy.model_detection.model_config_from_unet(plain, prefix, metadata=told)


def text_tensors(tensors: Mapping[str, torch.Tensor], config: Any) -> Tensors:
    """Those of its text encoders, as stock calls them: clip_l.transformer.text_model..; none where it has none."""
    found: Tensors = config.process_clip_state_dict(_without_old_scales(dict(tensors)))
    return found


def vae_tensors(tensors: Mapping[str, torch.Tensor], config: Any) -> Tensors:
    """Those of its VAE, as a file of its own has them; none where it has none."""
    inner = comfy.utils.state_dict_prefix_replace(
        dict(tensors), dict.fromkeys(config.vae_key_prefix, ""), filter_keys=True
    )
    found: Tensors = config.process_vae_state_dict(inner)
    return found


def clip_of(
    tensors: Tensors,
    config: Any,
    all_tensors: Mapping[str, torch.Tensor],
    embedding_folders: Sequence[str],
    options: Mapping[str, Any],
    *,
    disable_dynamic: bool = False,
) -> Any:
    """Stock's CLIP of `text_tensors`. all_tensors: those of the file, which tell some of the encoders."""
    target = config.clip_target(state_dict=_without_old_scales(dict(all_tensors)))
    return comfy.sd.CLIP(
        target,
        embedding_directory=embedding_folders,
        tokenizer_data=tensors,
        parameters=comfy.utils.calculate_parameters(tensors),
        state_dict=tensors,
        model_options=dict(options),
        disable_dynamic=disable_dynamic,
    )


def has_text(tensors: Mapping[str, torch.Tensor], config: Any) -> bool:
    """Whether stock would make a CLIP of it."""
    return config.clip_target(state_dict=dict(tensors)) is not None and bool(text_tensors(tensors, config))


def encoders(tensors: Mapping[str, torch.Tensor]) -> Sequence[Tensors]:
    """Of `text_tensors` each encoder's, as a file of its own has them."""
    heads = (name.partition(NETWORK) for name in tensors if NETWORK in name)
    found = dict.fromkeys(before + network for before, network, _ in heads)
    return [
        {name.removeprefix(head): tensor for name, tensor in tensors.items() if name.startswith(head)} for head in found
    ]


def _without_old_scales(tensors: Tensors) -> Tensors:
    """Text encoders in scaled fp8 as older files have it, in stock's way of today."""
    for prefix in [name.removesuffix(SCALED) for name in tensors if name.endswith(f".{SCALED}")]:
        plain, _ = comfy.utils.convert_old_quants(tensors, prefix, metadata={})
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)} | plain
    return tensors

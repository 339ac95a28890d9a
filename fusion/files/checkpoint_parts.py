"""The parts of a whole checkpoint and their tensors, by stock's rules: stock's configuration of the
diffusion model knows the prefixes of the other parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import comfy.model_detection
import comfy.sd
import comfy.utils
import torch

from .completeness import naming

Tensors = dict[str, torch.Tensor]
# In the name of a text encoder's tensor: after the encoder's name, before the name that a file of
# its own has.
NETWORK = "transformer."
SCALED = "scaled_fp8"  # marks a part whose layers are in scaled fp8


class CheckpointParts:
    """The parts of one checkpoint, from its tensors by name: read, or stand-ins
    (`weights/meta_tensor.py`)."""

    def __init__(
        self, path: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        """path: of the file, for messages. metadata: the file's, if any."""
        self._path, self._tensors = path, dict(tensors)
        with naming(path):
            prefix = comfy.model_detection.unet_prefix_from_state_dict(self._tensors)
            plain, told = comfy.utils.convert_old_quants(dict(tensors), prefix, metadata=dict(metadata or {}))
            # None: to stock it is not a checkpoint, at most a diffusion model by itself.
            self._config: Any = comfy.model_detection.model_config_from_unet(plain, prefix, metadata=told)

    @cached_property
    def text(self) -> Tensors:
        """The tensors of its text encoders under stock's names, such as
        clip_l.transformer.text_model.*; empty if stock would make no CLIP of the file."""
        with naming(self._path):
            if self._config is None or self._config.clip_target(state_dict=dict(self._tensors)) is None:
                return {}
            found: Tensors = self._config.process_clip_state_dict(_without_old_scales(dict(self._tensors)))
            return found

    @cached_property
    def vae(self) -> Tensors:
        """The tensors of its VAE under the names of a VAE file; empty if it has none."""
        if self._config is None:
            return {}
        prefixes = dict.fromkeys(self._config.vae_key_prefix, "")
        with naming(self._path):
            inner = comfy.utils.state_dict_prefix_replace(dict(self._tensors), prefixes, filter_keys=True)
            found: Tensors = self._config.process_vae_state_dict(inner)
            return found

    def clip(
        self,
        text: Tensors,
        embedding_folders: Sequence[str],
        options: Mapping[str, Any],
        *,
        disable_dynamic: bool = False,
    ) -> Any:
        """Stock's CLIP of the text encoders.

        text     the tensors of `text`, read or not
        options  stock's model_options
        """
        # From all tensors of the file, because some encoders are told by those of other parts.
        target = self._config.clip_target(state_dict=_without_old_scales(dict(self._tensors)))
        return comfy.sd.CLIP(
            target,
            embedding_directory=embedding_folders,
            tokenizer_data=text,
            parameters=comfy.utils.calculate_parameters(text),
            state_dict=text,
            model_options=dict(options),
            disable_dynamic=disable_dynamic,
        )

    def encoders(self) -> Sequence[Tensors]:
        """The tensors of each text encoder, under the names of a file of its own."""
        heads = (name.partition(NETWORK) for name in self.text if NETWORK in name)
        found = dict.fromkeys(before + network for before, network, _ in heads)
        return [
            {name.removeprefix(head): tensor for name, tensor in self.text.items() if name.startswith(head)}
            for head in found
        ]


def _without_old_scales(tensors: Tensors) -> Tensors:
    """The tensors with text encoders in the older form of scaled fp8 converted to stock's present
    one."""
    for prefix in [name.removesuffix(SCALED) for name in tensors if name.endswith(f".{SCALED}")]:
        plain, _ = comfy.utils.convert_old_quants(tensors, prefix, metadata={})
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)} | plain
    return tensors

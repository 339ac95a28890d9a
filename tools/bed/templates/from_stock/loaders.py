"""Which of our loaders stands for which of ComfyUI's, and how their inputs are called: as in the menu of the page
(`nodes/web/js/swap.js`), which has those of other packs too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..signatures import signature

AUTOMATIC = -1  # a budget: what is free


class NotSwappable(ValueError):
    """A loader of a template has what ours has no input for."""


@dataclass(frozen=True)
class Swap:
    """One loader's. widgets: of ComfyUI's node in the order of storage, each with the name that ours has for it, or None. asked:
    the values that those without a name must have."""

    ours: str
    widgets: Mapping[str, str | None]
    asked: Mapping[str, Any] = field(default_factory=dict)

    def values(self, node: dict[str, Any]) -> list[Any]:
        """The values of our node's widgets, for this node of ComfyUI's. Raises NotSwappable."""
        stored = dict(zip(self.widgets, node["widgets_values"], strict=False))
        for name, value in self.asked.items():
            if stored.get(name, value) != value:
                raise NotSwappable(f"{node['type']}, node {node['id']}: {name} is {stored[name]!r}")
        signed = signature(self.ours)
        known = signed.defaults | ({"vram_budget": AUTOMATIC} if "vram_budget" in signed.widgets else {})
        told = {ours: stored[stocks] for stocks, ours in self.widgets.items() if ours is not None}
        values = known | told
        return [values[name] for name in signed.widgets]


TEXT = "FuseStreamTextEncoderLoader"
LOADERS: Mapping[str, Swap] = {
    "UNETLoader": Swap(
        "FuseStreamDiffusionModelLoader",
        {"unet_name": "model_name", "weight_dtype": None},
        {"weight_dtype": "default"},
    ),
    "CLIPLoader": Swap(TEXT, {"clip_name": "text_encoder_name", "type": "type", "device": None}, {"device": "default"}),
    "VAELoader": Swap("FuseStreamVAELoader", {"vae_name": "vae_name"}),
    "CheckpointLoaderSimple": Swap("FuseStreamCheckpointLoader", {"ckpt_name": "ckpt_name"}),
    "LTXAVTextEncoderLoader": Swap(
        TEXT,
        {"text_encoder": "text_encoder_name", "ckpt_name": "second_file", "device": None},
        {"device": "default"},
    ),
    "DualCLIPLoader": Swap(
        TEXT,
        {"clip_name1": "text_encoder_name", "clip_name2": "second_file", "type": "type", "device": None},
        {"device": "default"},
    ),
}

"""The Sparse Attention node: MODEL in, the same out, whose attention visits only some of the key blocks of a long video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io

from ..fusion.sparse.settings import LEAST_SHARE, METHODS, Method, Settings
from . import declare, gains
from .declare import Node, declared


class SparseAttentionNode(Node):
    """Off unless it is there: no loader makes attention sparse."""

    @dataclass(frozen=True)
    class Inputs:
        model: Any = declared(
            io.Model, tooltip="From any loader; LoRAs and model patches may come before or after this node."
        )
        method: Method = declared(
            io.Combo,
            options=METHODS,
            default=Settings.method,
            optional=True,
            tooltip="top-k: in every attention anew, the blocks that fit best, and averages in place of the others. "
            "radial: always the same, fewer the further apart two frames are; for Wan, and for models that tell how "
            "their tokens lie. Others stay dense with radial.",
        )
        share: float = declared(
            io.Float,
            default=Settings.share,
            min=LEAST_SHARE,
            max=1.0,
            step=0.05,
            optional=True,
            tooltip="Of the key blocks, how much top-k visits, neighbours among them. Less is faster and changes the video "
            f"more: {gains.SPARSE_ERRORS}. 1: dense. radial does not ask for it: its share follows from the size of the "
            "video.",
        )
        dense_steps: float = declared(
            io.Float,
            default=Settings.dense_steps,
            min=0.0,
            max=1.0,
            step=0.05,
            optional=True,
            tooltip="Share of the sampler's steps that stay dense, the first ones: they decide what is where. A second "
            "sampler has first steps of its own.",
        )
        dense_layers: int = declared(
            io.Int,
            default=Settings.dense_layers,
            min=0,
            max=1000,
            optional=True,
            advanced=True,
            tooltip="How many attentions of each model call stay dense, the first ones.",
        )
        least_tokens: int = declared(
            io.Int,
            default=Settings.least_tokens,
            min=0,
            max=10000000,
            step=1000,
            optional=True,
            advanced=True,
            tooltip="Attention over fewer tokens stays dense: there is little to gain. 81 frames of 832x480 are 32760 "
            "tokens in Wan 2.1, one picture is 1560.",
        )

    @classmethod
    def define_schema(cls) -> io.Schema:
        return cls.schema(
            "Sparse Attention",
            "Makes the attention of long videos sparse: each part of the video looks at the parts that matter most to "
            "it, and at the rest in less detail or not at all. Faster, and the video changes. Nothing is sparse without "
            "this node. Real weights were not tried yet: look at your own videos.",
            aliases=["radial attention", "block sparse", "top-k attention", "sliding tile"],
            outputs=[
                io.Model.Output(
                    tooltip="The same model with sparse attention, for a sampler. The one that came in stays dense."
                )
            ],
        )

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion.sparse.model import sparse  # noqa: PLC0415 - the server starts without it

        return io.NodeOutput(sparse(inputs.model, declare.settings_of(Settings, inputs)))

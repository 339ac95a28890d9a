"""The Sparse Attention node: the same MODEL, whose attention visits only some of the key blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io

from ..fusion.sparse.settings import LEAST_SHARE, METHODS, Method, Settings
from . import declare, gains
from .declare import About, Node, linked, widget


class SparseAttentionNode(Node):
    """The only way to sparse attention for models that were trained dense: no loader makes it sparse."""

    about = About(
        "Sparse Attention",
        declare.SAMPLING,
        "Makes the attention of long videos sparse: each part of the video looks at the parts that matter most to "
        "it, and at the rest in less detail or not at all. Faster, and the video changes. Without this node only "
        "models are sparse that were trained so. Real weights were not tried yet: look at your own videos.",
        aliases=["radial attention", "block sparse", "top-k attention", "sliding tile"],
        outputs=[
            io.Model.Output(
                tooltip="The same model with sparse attention, for a sampler. The one that came in stays dense."
            )
        ],
    )

    @dataclass(frozen=True)
    class Inputs:
        model: Any = linked(io.Model, "From any loader; LoRAs and model patches may come before or after this node.")
        method: Method = widget(
            "top-k: in every attention anew, the blocks that fit best, and averages in place of the others. "
            "radial: always the same, fewer the further apart two frames are; for Wan, and for models that tell how "
            "their tokens lie. Others stay dense with radial. bounded: as top-k, but as many blocks as each part needs.",
            default=Settings.method,
            options=METHODS,
        )
        share: float = widget(
            "Of the key blocks, how much top-k visits, neighbours among them. Less is faster and changes the video "
            f"more: {gains.SPARSE_ERRORS}. 1: dense. radial does not ask for it: its share follows from the size of the "
            "video. Nor does bounded, whose share follows from left_out. A model that was trained sparse takes it from "
            "top-k, and nothing else of this node.",
            default=Settings.share,
            between=(LEAST_SHARE, 1.0, 0.05),
        )
        dense_steps: float = widget(
            "Share of the sampler's steps that stay dense, the first ones: they decide what is where. A second "
            "sampler has first steps of its own.",
            default=Settings.dense_steps,
            between=(0.0, 1.0, 0.05),
        )
        dense_layers: int = widget(
            "How many attentions of each model call stay dense, the first ones.",
            default=Settings.dense_layers,
            between=(0, 1000),
            is_advanced=True,
        )
        least_tokens: int = widget(
            "Attention over fewer tokens stays dense: there is little to gain. 81 frames of 832x480 are 32760 "
            "tokens in Wan 2.1, one picture is 1560.",
            default=Settings.least_tokens,
            between=(0, 10000000, 1000),
            is_advanced=True,
        )
        left_out: float = widget(
            "With bounded: how much of what each part looks at may be seen as averages alone, as the averages "
            "themselves tell it. It visits the best blocks until no more is left. Less is nearer to dense, which 0 is: "
            f"{gains.BOUNDED_ERRORS}.",
            default=Settings.left_out,
            between=(0.0, 1.0, 0.01),
        )

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion.sparse.model import sparse  # noqa: PLC0415 - the server starts without it

        return io.NodeOutput(sparse(inputs.model, declare.settings_of(Settings, inputs)))

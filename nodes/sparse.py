"""The Sparse Attention node: the same MODEL, whose attention visits only some of the key blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io

from ..fusion.sparse.settings import LEAST_SHARE, METHODS, Method, Settings
from . import declare
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
            "top-k: the best blocks, averages for the rest. radial: fewer the further apart. bounded: as many as each part needs.",
            default=Settings.method,
            options=METHODS,
        )
        share: float = widget(
            "With top-k: how much of the key blocks it visits. Less is faster and changes the video more. 1: dense.",
            default=Settings.share,
            between=(LEAST_SHARE, 1.0, 0.05),
        )
        dense_steps: float = widget(
            "Share of the sampler's steps that stay dense, the first ones: they decide what is where.",
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
            "Attention over fewer tokens stays dense. In Wan 2.1, 81 frames of 832x480 are 32760 tokens, one picture is 1560.",
            default=Settings.least_tokens,
            between=(0, 10000000, 1000),
            is_advanced=True,
        )
        left_out: float = widget(
            "With bounded: how much of what each part looks at may be seen as averages alone. Less is nearer to dense; 0 is dense.",
            default=Settings.left_out,
            between=(0.0, 1.0, 0.01),
        )

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion.sparse.model import sparse  # noqa: PLC0415 - the server starts without it

        return io.NodeOutput(sparse(inputs.model, declare.settings_of(Settings, inputs)))

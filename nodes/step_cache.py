"""The Step Cache node: the same MODEL, some of whose steps are foretold instead of computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io

from ..fusion.step_cache.settings import MOST_ERROR, Settings
from . import declare
from .declare import About, Node, linked, widget


class StepCacheNode(Node):
    """The only way to a step cache: no loader has one."""

    about = About(
        "Step Cache",
        declare.SAMPLING,
        "Leaves out steps whose result can be foretold from the steps before, for any model and with most samplers at "
        "20 steps and more. The network does not run in such a step, and no weights are brought for it. Faster, and the "
        "picture changes a little. Real weights were not tried yet: look at your own pictures.",
        aliases=["easycache", "teacache", "magcache", "lazycache", "skip steps"],
        outputs=[
            io.Model.Output(
                tooltip="The same model with a step cache, for a sampler. The one that came in computes all steps."
            )
        ],
    )

    @dataclass(frozen=True)
    class Inputs:
        model: Any = linked(io.Model, "From any loader; LoRAs and model patches may come before or after this node.")
        error: float = widget(
            "The estimated error up to which a step is foretold. More is faster and changes the picture more. 0: off.",
            default=Settings.error,
            between=(0.0, MOST_ERROR, 0.005),
        )
        first_steps: float = widget(
            "Share of the sampler's steps that are always computed, the first ones: they decide what is where. The last is, too.",
            default=Settings.first_steps,
            between=(0.0, 1.0, 0.05),
            is_advanced=True,
        )

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        from ..fusion.step_cache.model import step_cached  # noqa: PLC0415 - the server starts without it

        return io.NodeOutput(step_cached(inputs.model, declare.settings_of(Settings, inputs)))

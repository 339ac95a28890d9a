"""A language model that is watched while it writes: when each token was known, and of which logits the first.

Both sides choose by stock's `sample_token`, and move ComfyUI's bar when they have a token's number. Nobody waits for the card in
between: it may have begun with the next token.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WORDS = 32


class Seen:
    """ticks: when the number of each token was known. logits: of the first one."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.logits: Any = None
        self.chosen = 0


def network(clip: Any) -> Any:
    model = clip.cond_stage_model
    return getattr(model, model.clip).transformer


@contextmanager
def watched(clip: Any, clock: Callable[[], float]) -> Iterator[Seen]:
    """For this time no token ends the text either."""
    net, seen = network(clip), Seen()
    choose, stops = net.sample_token, net.model.config.stop_tokens
    bar: Any = importlib.import_module("comfy.utils").ProgressBar
    move = bar.update

    def chosen(logits: Any, *given: Any, **more: Any) -> Any:
        if seen.logits is None:
            seen.logits = logits.float().clone()
        seen.chosen += 1
        return choose(logits, *given, **more)

    def moved(self: Any, value: int) -> None:
        if seen.chosen > len(seen.ticks):  # other bars move before the first token is chosen
            seen.ticks.append(clock())
        move(self, value)

    net.sample_token, net.model.config.stop_tokens, bar.update = chosen, [], moved
    try:
        yield seen
    finally:
        del net.sample_token
        net.model.config.stop_tokens, bar.update = stops, move


def prompt(clip: Any, *pictures: Any) -> dict[str, Any]:
    """Pictures, and ids that every vocabulary has."""
    words = [(3 * i + 1) % 200 for i in range(WORDS)]
    return {clip.cond_stage_model.clip: [[(part, 1.0) for part in (*pictures, *words)]]}


def picture(height: int, width: int, number: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    made = torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(number))
    return {"type": "image", "data": made, "original_type": "image"}


def sizes_of(path: str) -> dict[str, Any]:
    """Options that tell stock the sizes of a model that it has none for."""
    sizes = importlib.import_module("fusestream.fusion.families.qwen3_vl.sizes")
    header = importlib.import_module("fusestream.memory").read_header(path)
    return dict(sizes.options(header))

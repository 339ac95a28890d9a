"""The models that have kernels here, because a report is not always about one of them."""

from __future__ import annotations

from collections.abc import Iterator


def known() -> Iterator[str]:
    from ..families import FAMILIES  # noqa: PLC0415 - a family that does not import is a line of the report too

    for family in FAMILIES:
        yield f"{family.words}: {', '.join(family.ops)}"
    yield "every other diffusion model streams; ComfyUI runs its blocks, and integers are multiplied here"
    yield "every other text encoder streams, and ComfyUI computes it"

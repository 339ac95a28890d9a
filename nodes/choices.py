"""The inputs that several nodes have in common: one type, one set of values, a tooltip of each node's own."""

from __future__ import annotations

import importlib
from typing import Any

import folder_paths
from comfy_api.latest import io

from ..fusion.base import file_formats
from ..fusion.base.family import Role
from ..fusion.base.format import QUALITIES
from ..fusion.base.vram_budget import AUTO, MOST, refusal
from ..fusion.families import FAMILIES
from . import queued

ANY = "auto"  # of a text encoder's type: what the file tells
QUALITY = next(iter(QUALITIES))  # of a new loader
BY_PRECISION = (
    "by precision"  # of the quality: what the input precision says, as workflows have it from before there was one
)


def fused(role: Role) -> str:
    """The families that have kernels, as words: Wan, Flux.2 and Qwen3."""
    names = [family.name for family in FAMILIES if family.role is role]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def text_encoder_type(tooltip: str) -> Any:
    """Stock's types, those of its own loader."""
    stock = importlib.import_module("nodes").CLIPLoader.INPUT_TYPES()["required"]["type"][0]
    return io.Combo.Input("type", options=[ANY, *stock], default=ANY, optional=True, tooltip=tooltip)


def text_encoder_paths() -> tuple[str, ...]:
    """All that the user has: one may have what another lacks, such as a tokenizer."""
    found = (
        folder_paths.get_full_path("text_encoders", name) for name in folder_paths.get_filename_list("text_encoders")
    )
    return tuple(path for path in found if path is not None)


def kernels(tooltip: str, *, is_advanced: bool = False) -> Any:
    return io.Combo.Input(
        "kernels",
        options=["auto", "on", "off"],
        default="auto",
        optional=True,
        advanced=is_advanced or None,
        tooltip=tooltip,
    )


def precision(tooltip: str, *, is_advanced: bool = False, has_auto: bool = False) -> Any:
    """has_auto: of a node without an input for the quality. A workflow that has no value is from before, and precise."""
    return io.Combo.Input(
        "precision",
        options=["precise", "fast", "turbo", *(["auto"] if has_auto else [])],
        default="auto" if has_auto else "precise",
        optional=True,
        advanced=is_advanced or None,
        tooltip=tooltip,
    )


def quality(tooltip: str) -> Any:
    """What a loader asks first. Behind the inputs that were there before: a workflow that has none goes by its precision."""
    return io.Combo.Input(
        "quality", options=[*QUALITIES, BY_PRECISION], default=QUALITY, optional=True, tooltip=tooltip
    )


def precision_of(quality: str, precision: Any) -> Any:
    """Of these two inputs."""
    return QUALITIES.get(quality, precision)


def vram_budget(tooltip: str) -> Any:
    """GiB; 0 and AUTO have meanings of their own. The front end rounds to the step, and shows as many digits as it has."""
    return io.Float.Input(
        "vram_budget",
        display_name="vram_budget (-1: auto)",
        default=AUTO,
        min=AUTO,
        max=MOST,
        step=0.05,
        optional=True,
        tooltip=tooltip,
    )


def odd_budget(node: str | None, name: str | None = None) -> str | None:
    """Why the vram_budget that this node is queued with is none, or not for the file of this name: stock's check lets -0.5 and
    what is no number pass."""
    given = queued.value(node, "vram_budget")
    if not isinstance(given, (int, float)):  # it comes by a link
        return None
    reason = None if name is None else file_formats.refusal(name, given)
    return refusal(given) or (reason and f"{name} {reason}")

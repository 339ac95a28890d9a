"""What all loaders do: whether a model streams or is stock's, and whether every weight of it came from the file."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import comfy.model_management
import torch

from ...kernels_cuda import LEDGER, KernelPolicy, unpack_soon
from ...memory import Checkpoint
from ..base import file_formats, other_cards
from ..base.errors import NotStreamable
from ..base.family import Family, Role
from ..base.vram_budget import refuse_odd
from ..compatibility import streaming
from ..compatibility.aside import step_aside
from ..files.completeness import refuse_lacking, say_leftovers
from ..identify import inspection, recognise
from ..patcher import saving
from ..patcher.streaming_patcher import attach
from ..stream.stream import Stream
from . import build


def prepare(policy: KernelPolicy) -> None:
    """The kernels are unpacked while the model loads."""
    if policy.default != "off":
        unpack_soon(comfy.model_management.get_torch_device())


def streamed_or_stock(path: str, stream: Any, stock: Any, vram_budget: float, device: torch.device) -> Any:
    """The model that streams within the budget; with 0 stock's, and with an automatic budget where it cannot stream."""
    refuse_odd(vram_budget)
    if other_cards.must_fall_back(device, vram_budget, path):
        return stock()
    if vram_budget > 0:
        return stream(vram_budget)
    if vram_budget < 0:
        try:
            return stream(None)
        except NotStreamable as reason:  # and nobody insisted on it
            if file_formats.is_ours_alone(path):
                raise
            LEDGER.say_once(f"{reason} It is loaded as stock does now.", logging.INFO)
    return stock()


def let_stream(model: Any, stream: Stream, path: str, family: Family | None, fused: int) -> None:
    """Give a model its stream. Who computes its blocks stands in the report, and in the log where that is ComfyUI."""
    if family is not None and fused:
        stream.family = family.name
    elif family is None or family.aside is None:  # or that was said
        LEDGER.say_once(f"{path} streams; no fused kernels for this family: ComfyUI computes its blocks.", logging.INFO)
    attach(model, stream)
    saving.attach()


def open_to_stream(path: str, kind: type[Checkpoint] = Checkpoint) -> Checkpoint:
    if not file_formats.has_header(path):
        raise NotStreamable(
            f"{path}: only .safetensors and .gguf files can be streamed. {file_formats.without_streaming(path)}"
        )
    if (changed := streaming.obstacle()) is not None:
        said = step_aside("Streaming", changed, "Models load as ComfyUI loads them").words
        raise NotStreamable(f"{path}: {said} {file_formats.without_streaming(path)}")
    return kind.open(path)


def in_bytes(vram_budget: float | None) -> int | None:
    if vram_budget is None:
        return None
    refuse_odd(vram_budget)
    return int(vram_budget * 2**30)


def checked(path: str, role: Role) -> tuple[Family | None, Collection[str]]:
    """The family of a file that stock will load, if one knows it, and the names of the file's tensors."""
    recognise.require_stocks(path)
    if not file_formats.has_header(path):
        return None, ()
    with Checkpoint.open(path) as source:
        family = inspection.look_at(source, role)
        inspection.say_doubts(source.files[0], family)
        return family, source.extents.keys()


def require_all_weights(
    path: str, names: Collection[str], model: torch.nn.Module, prefix: str = "", *, is_part: bool = False
) -> None:
    """Raise `WrongFile` if a parameter of a model that stock loaded is none of the file's tensors, by these names; warn of tensors
    that it has no place for. is_part: the names are those within some part of the model."""
    present = {name.removeprefix(prefix) for name in names}
    # The scales of quantised layers have gone by several names, and stock makes those that a file may omit.
    wanted = [name for name, _ in model.named_parameters() if not name.endswith(("_scale", *build.MAY_LACK))]
    own = [*wanted, *(name for name, _ in model.named_buffers())]
    if is_part:
        wanted, own = (
            [inner for name in names if (inner := name.partition(build.NETWORK)[2])] for names in (wanted, own)
        )
    if any(name in present for name in wanted):  # or stock translated a foreign layout: there is nothing to compare by
        refuse_lacking(path, sorted(name for name in wanted if name not in present))
        say_leftovers(path, present - set(own), own)

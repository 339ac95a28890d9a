"""The way of all loaders: whether a model streams or is stock's, by its request and its file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.model_management

from ...kernels_cuda import LEDGER, unpack_soon
from ...memory import Checkpoint
from ..base import file_formats, other_cards
from ..base.errors import NotStreamable, WrongFile
from ..base.family import Family
from ..compatibility import streaming
from ..compatibility.aside import step_aside
from ..fused import input_activation
from ..identify.checkpoint_info import CheckpointInfo
from ..patcher import saving
from ..patcher.streaming_patcher import attach
from ..stream.block_stream import BlockStream
from . import lora_fit
from .request import Load, LoadRequest


def prepare(request: LoadRequest) -> None:
    """Before a model is loaded: start unpacking the kernels, and let LoRAs that do not fit it be told."""
    lora_fit.attach()
    if request.kernels.default != "off":
        unpack_soon(comfy.model_management.get_torch_device())


def streamed_or_stock(request: LoadRequest, stream: Load, stock: Load) -> Any:
    """The model, streamed within the budget; or stock's, if the budget is 0, or if it is automatic
    and the model cannot stream."""
    budget = request.vram_budget
    # The file that decides is one that ComfyUI cannot read.
    path = next(filter(file_formats.is_ours_alone, request.paths), request.path)
    if budget == 0 or other_cards.must_fall_back(request.device, budget, path):
        return stock(request)
    try:
        return stream(request)
    except NotStreamable as reason:
        # The user set a budget, or ComfyUI cannot read the file.
        if budget > 0 or file_formats.is_ours_alone(path):
            raise
        LEDGER.say_once(f"{reason} It is loaded as stock does now.", logging.INFO)
    return stock(request)


def open_to_stream(path: str, kind: type[Checkpoint] = Checkpoint, part: int = 0) -> Checkpoint:
    """The open file. Raises `NotStreamable` if files of its format, or any files, cannot be
    streamed. part: its number among several that are one source."""
    if not file_formats.has_header(path):
        raise NotStreamable(
            f"{path}: only .safetensors and .gguf files can be streamed. {file_formats.without_streaming(path)}"
        )
    if (changed := streaming.obstacle()) is not None:
        said = step_aside("Streaming", changed, "Models load as ComfyUI loads them").words
        raise NotStreamable(f"{path}: {said} {file_formats.without_streaming(path)}")
    return kind.open(path, part)


@contextmanager
def looked_at(path: str, look: Callable[[Checkpoint], CheckpointInfo]) -> Iterator[CheckpointInfo | None]:
    """The contents of a file that stock will load, while it is open; None: it has no header.

    look: `look_at` or the like. Raises `WrongFile` if stock does not read files of this format, and
    as `look` does.
    """
    reason = file_formats.refusal(path, vram_budget=0)
    if reason is not None:
        raise WrongFile(f"{path} {reason}")
    if not file_formats.has_header(path):
        yield None
        return
    with Checkpoint.open(path) as source:
        info = look(source)
        info.say_doubts()
        yield info


def let_stream(model: Any, stream: BlockStream, path: str, family: Family | None, fused: int) -> None:
    """Attach a stream to its model. The report says who computes the blocks, and so does the log if
    it is ComfyUI."""
    if family is not None and fused:
        stream.arrivals.family = family.name
    elif family is None or family.aside is None:  # otherwise that was said
        LEDGER.say_once(
            f"{path} streams; no fused blocks for this family: ComfyUI's run, and FuseStream multiplies what it can.",
            logging.INFO,
        )
    attach(model, stream)
    saving.attach()
    input_activation.attach()

"""Saving a streamed model by stock's nodes, weight by weight, so that the 28 GB that a LoRA changed
are never all in RAM.

Stock's nodes ask the patcher for parameters that are patched on demand, and pass them to
`comfy.utils.save_torch_file`, which holds all of them in memory before it writes the first. There
is no other place between asking and writing, so this function is wrapped, once: it writes weights
from streaming patchers itself, and leaves all else to stock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import comfy.utils
from comfy.model_patcher import LazyCastingParam, LazyCastingParamPiece

from ...memory.written import WeightWriter
from ..base.hooks import SAVES
from ..stream.progress import Bar
from .streaming_patcher import StreamingModelPatcher


def attach() -> None:
    """Let streamed models be saved weight by weight from now on."""
    stock = comfy.utils.save_torch_file
    if hasattr(stock, SAVES):
        return

    def save_torch_file(sd: Any, ckpt: Any, metadata: Any = None) -> Any:
        if not any(streams(value) for value in sd.values()):
            return stock(sd, ckpt, metadata)
        return write(ckpt, sd, metadata)

    setattr(save_torch_file, SAVES, stock)
    comfy.utils.save_torch_file = save_torch_file


def streams(value: Any) -> bool:
    """Whether it is a parameter that a streaming patcher makes on demand."""
    return isinstance(_patcher_of(value), StreamingModelPatcher)


def _patcher_of(value: Any) -> Any:
    if isinstance(value, LazyCastingParamPiece):
        return getattr(getattr(value, "caster", None), "model", None)
    return value.model if isinstance(value, LazyCastingParam) else None


def write(path: Any, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> None:
    """Write stock's state dict to a file: one weight is made while the one before is written. Can
    be interrupted."""
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with WeightWriter(path, layout, metadata) as writer, ThreadPoolExecutor(1, "fusestream writes") as behind:
        bar = Bar(writer.nbytes)
        written: Future[None] | None = None
        try:
            for names in _in_order(tensors):
                for name in names:
                    made = tensors[name].detach() if _patcher_of(tensors[name]) is None else tensors[name]
                    made = made.to("cpu").reshape(
                        layout[name][1]
                    )  # a scale that was a row of numbers may have become a single one
                    if written is not None:
                        written.result()
                    written = behind.submit(writer.write, name, made)
                    bar.add(made.nbytes)
            if written is not None:
                written.result()
        except BaseException:
            if written is not None:
                written.exception()  # wait for the write, before the file is removed
            raise


def _in_order(tensors: Mapping[str, Any]) -> Iterator[list[str]]:
    """The names, grouped by quantised weight, because stock keeps such a weight until it has handed
    out all its parts."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        whole = tensor.caster if isinstance(tensor, LazyCastingParamPiece) else tensor
        groups.setdefault(id(whole), []).append(name)
    yield from groups.values()

"""The models that ComfyUI has loaded, ours and others: the memory of each, and its release."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import comfy.model_management as management

from ...fusion.base.hooks import STREAM

# A ledger's names for memory that cannot be swapped out.
RAM = "pinned RAM", "registered RAM", "managed RAM"
ALL = 1e30  # stock's number for all there is

# Where ComfyUI has the classes of a role: parts of their modules' names.
HOMES = {
    "text": (".text_encoders.", ".sd1_clip.", ".sdxl_clip."),
    "vae": ("vae", "autoencoder", "taesd", "taehv", ".stage_a.", ".stage_c_coder."),
}

_numbers = itertools.count(1)
_ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class InMemory:
    """A loaded model. name: its file's, or its class's if no file is known. Figures are bytes.

    kind      its class
    role      diffusion, text or vae; empty: another one, such as a ControlNet
    family    ours that computes it; empty: none
    vram      on its device
    window    of these, what blocks pass through
    resident  of these, blocks that stay
    pinned    RAM that the device reads by itself
    """

    id: int
    name: str
    kind: str
    device: str
    streams: bool
    vram: int
    window: int = 0
    resident: int = 0
    pinned: int = 0
    role: str = ""
    family: str = ""


def models() -> list[InMemory]:
    """Each model once, the last loaded first. Clones count once, because they share weights."""
    return [_described(loaded.model, str(loaded.device)) for loaded in _each().values()]


def is_there(id: int) -> bool:
    return any(_id(loaded.model) == id for loaded in _each().values())


def release(id: int) -> None:
    """Unload it as ComfyUI does when another model needs the memory, and keep no RAM for it.

    A prompt that uses it loads it again. No prompt may run meanwhile.
    """
    going = [
        loaded for loaded in management.current_loaded_models if loaded.model is not None and _id(loaded.model) == id
    ]
    staying = [loaded for loaded in management.current_loaded_models if loaded not in going]
    streams = [getattr(loaded.model.model, STREAM, None) for loaded in going]
    for device in dict.fromkeys(loaded.device for loaded in going):
        management.free_memory(ALL, device, staying)
    for stream in streams:
        if stream is not None:
            stream.residency.give_ram_back()


def patchers() -> Iterator[Any]:
    """The patcher of each loaded model."""
    return (loaded.model for loaded in _each().values())


def _each() -> dict[int, Any]:
    found: dict[int, Any] = {}
    for loaded in list(management.current_loaded_models):
        patcher = loaded.model
        if patcher is not None:
            found.setdefault(_id(patcher), loaded)
    return found


def _id(patcher: Any) -> int:
    if patcher.model not in _ids:
        _ids[patcher.model] = next(_numbers)
    return _ids[patcher.model]


def _described(patcher: Any, device: str) -> InMemory:
    stream = getattr(patcher.model, STREAM, None)
    kind = type(patcher.model).__name__
    name, role = _file(patcher, stream) or kind, _role(patcher.model)
    told = InMemory(_id(patcher), name, kind, device, stream is not None, _vram(patcher), role=role)
    if stream is None:
        return told
    held, pager = stream.residency.ledger.summary()["held bytes"], stream.residency.pager
    pinned = sum(held.get(name, 0) for name in RAM)
    plan = None if pager is None else pager.plan
    window, resident = (0, 0) if plan is None else (plan.window_bytes, plan.resident_bytes)
    return replace(told, window=window, resident=resident, pinned=pinned, family=stream.arrivals.family or "")


def _role(model: Any) -> str:
    """What a stock model is for, by its network or by the modules of its class and its bases."""
    if hasattr(model, "diffusion_model"):
        return "diffusion"
    homes = [f"{kind.__module__}." for kind in type(model).__mro__]
    return next((role for role, parts in HOMES.items() if any(part in home for home in homes for part in parts)), "")


def _file(patcher: Any, stream: Any) -> str | None:
    """The name of the file that a model came from; of several files, the first."""
    if stream is not None:
        return str(stream.path.name)
    source = getattr(patcher, "cached_patcher_init", None)
    given = source[1][0] if source and source[1] else None
    first = given[0] if isinstance(given, (list, tuple)) and given else given
    return Path(first).name if isinstance(first, str) else None


def _vram(patcher: Any) -> int:
    """Bytes on its device; if the running thread is just changing the model, the bytes before."""
    try:
        return int(patcher.loaded_size())
    except RuntimeError:  # a dictionary of its modules has changed under the count
        return int(patcher.model.model_loaded_weight_memory)

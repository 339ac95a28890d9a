"""How many of a LoRA's layers fit the model that it is put on.

ComfyUI applies what fits. It writes a line into its log for each tensor whose name is no layer's,
and one for each layer of another size, at every step. The run goes on, and its picture is that
without a LoRA. Here ComfyUI's functions are wrapped, once: a LoRA for a model of ours that fits in
part, or not at all, is told in a sentence, and in a line on the node that brought it.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import comfy.lora
import comfy.sd
import comfy.utils
from comfy.weight_adapter.lora import LoRAAdapter
from torch import Tensor

from ..base.format import counted
from ..base.hooks import FITS
from ..base.notices import warn, write
from ..base.policy import policy_on
from ..compatibility.aside import step_aside
from ..identify.checkpoint_info import LORA_PART
from ..patcher.streaming_patcher import StreamingModelPatcher

# ComfyUI's functions that put a LoRA's tensors on a MODEL and a CLIP, either of which may be None.
# The second leaves the weights as they are, and adds to what the layers return.
PUT = ("load_lora_for_models", "load_bypass_lora_for_models")
# Layers of text encoders, in all spellings that ComfyUI takes.
OF_TEXT = re.compile(r"(lora_te|lora_prior_te|text_encoder)")

# What `comfy.lora.load_lora` was given, and what it made of that, while a function of PUT runs.
_loaded: ContextVar[list[tuple[Mapping[str, Tensor], Mapping[Any, Any]]] | None] = ContextVar("_loaded", default=None)


def attach() -> None:
    """Let LoRAs on models of ours be told from now on, if they do not fit."""
    if hasattr(comfy.lora.load_lora, FITS):
        return
    if (changed := _changed()) is not None:
        step_aside("Words on LoRAs that do not fit", changed, "ComfyUI's log alone tells of them")
        return
    comfy.lora.load_lora = _noting(comfy.lora.load_lora)
    for name in PUT:
        if hasattr(comfy.sd, name):
            setattr(comfy.sd, name, _telling(getattr(comfy.sd, name)))


def _changed() -> str | None:
    """The difference of ComfyUI's functions from those that this code knows; None: there is none."""
    for function, names in (
        (comfy.lora.load_lora, ["lora", "to_load"]),
        (comfy.sd.load_lora_for_models, ["model", "clip"]),
    ):
        if [*inspect.signature(function).parameters][:2] != names:
            return f"{function.__name__} takes other arguments"
    return None


def _noting(stock: Callable[..., Any]) -> Callable[..., Any]:
    def load_lora(lora: Any, to_load: Any, *args: Any, **kwargs: Any) -> Any:
        made = stock(lora, to_load, *args, **kwargs)
        notes = _loaded.get()
        if notes is not None:
            notes.append((lora, made))
        return made

    setattr(load_lora, FITS, stock)
    return load_lora


def _telling(stock: Callable[..., Any]) -> Callable[..., Any]:
    def load_lora_for_models(model: Any, clip: Any, *args: Any, **kwargs: Any) -> Any:
        notes: list[tuple[Mapping[str, Tensor], Mapping[Any, Any]]] = []
        token = _loaded.set(notes)
        try:
            out = stock(model, clip, *args, **kwargs)
        finally:
            _loaded.reset(token)
        patchers = [one for one in (model, getattr(clip, "patcher", None)) if one is not None]
        if any(_is_ours(one) for one in patchers):
            for lora, made in notes:
                tell(Fit.of(lora, made, patchers, of_model=model is not None, of_text=clip is not None))
        return out

    return load_lora_for_models


def _is_ours(patcher: Any) -> bool:
    return isinstance(patcher, StreamingModelPatcher) or policy_on(patcher) is not None


@dataclass(frozen=True)
class Fit:
    """
    layers   number of a LoRA's layers, of those parts (model, text encoder) that it was put on
    fitting  how many of them are the model's, and of its sizes
    unknown  the first whose name is no layer's of the model
    resized  the first whose sizes are others: its name, its sizes, the model's
    """

    layers: int
    fitting: int
    unknown: str | None
    resized: tuple[str, Sequence[int], Sequence[int]] | None

    @classmethod
    def of(
        cls,
        lora: Mapping[str, Tensor],
        made: Mapping[Any, Any],
        patchers: Sequence[Any],
        *,
        of_model: bool,
        of_text: bool,
    ) -> Fit:
        """The fit of a file's tensors. made: ComfyUI's patches of them, by the key of a weight;
        patchers: the models that have these weights."""
        layers: dict[str, list[Tensor]] = {}
        for name, tensor in lora.items():
            part = LORA_PART.search(name)
            if part is not None and (of_text if OF_TEXT.match(name) else of_model):
                layers.setdefault(name[: part.start()], []).append(tensor)
        used = {id(tensor): key for key, patch in made.items() for tensor in _tensors(patch)}
        fitting, unknown, resized = 0, None, None
        for layer, tensors in layers.items():
            key = next((used[id(tensor)] for tensor in tensors if id(tensor) in used), None)
            if key is None:
                unknown = unknown or layer
                continue
            sizes = _other_sizes(made[key], key, patchers)
            fitting += sizes is None
            if sizes is not None and resized is None:
                resized = layer, *sizes
        return cls(len(layers), fitting, unknown, resized)

    def words(self) -> tuple[str, str] | None:
        """A sentence for the user, and a line for the node; None: every layer fits."""
        if self.fitting == self.layers and self.layers:
            return None
        layers = counted(self.layers, "layer")
        line = f"LoRA: {self.fitting} of {layers} fit"
        if not self.layers:
            return (
                "This LoRA does nothing: it has no layers of what it is put on. It may be for the text encoder alone, which "
                "ComfyUI's Load LoRA (Model and CLIP) takes, or in a form that ComfyUI does not know."
            ), "LoRA: no layer fits"
        if self.fitting:
            why = f"the first is {self.unknown}" if self.resized is None else f"{self.resized[0]} has other sizes"
            return (
                f"{self.fitting} of this LoRA's {layers} fit this model. The others do nothing: {why}. LoRAs of a sister model "
                "are often used so; if the result disappoints, choose one that was made for this model."
            ), line
        if self.resized is not None:
            layer, own, models = self.resized
            why = f"it is for a model of another size ({layer}: {_product(own)} in the LoRA, {_product(models)} in the model)"
        else:
            why = f"none of its {layers} is in this model (the first is {self.unknown})"
        return f"This LoRA does nothing: {why}. Choose one that was made for this model.", line


def tell(fit: Fit) -> None:
    """Warn of a LoRA that does not fit, and write on the node that put it."""
    words = fit.words()
    if words is not None:
        warn(words[0])
        write(words[1])


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in one of ComfyUI's patches, as the file's tensors were handed to it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "weights"):
        yield from _tensors(value.weights)


def _other_sizes(patch: Any, key: Any, patchers: Sequence[Any]) -> tuple[Sequence[int], Sequence[int]] | None:
    """The sizes of a plain LoRA or of a difference, and of its weight, where they do not agree.

    Other patches are taken to fit. key: a weight's, or that with a range of one dimension.
    """
    name, place = (key, None) if isinstance(key, str) else key[:2]
    weight = next((found for patcher in patchers if (found := _weight(patcher, name)) is not None), None)
    own = _sizes(patch)
    if weight is None or own is None:
        return None
    sizes = list(weight.shape)
    if place is not None:
        sizes[place[0]] = place[2]
    fits = math.prod(own) == math.prod(sizes) and own[0] == sizes[0]
    return None if fits else (own, sizes)


def _sizes(patch: Any) -> Sequence[int] | None:
    if type(patch) is LoRAAdapter and patch.weights[3] is None and patch.weights[5] is None:
        up, down = patch.weights[:2]
        return (up.shape[0], *down.shape[1:])
    if isinstance(patch, tuple) and patch[0] == "diff" and len(patch[1]) == 1:
        return tuple(patch[1][0].shape)
    return None


def _weight(patcher: Any, key: str) -> Any:
    try:
        return comfy.utils.get_attr(patcher.model, key)
    except AttributeError:
        return None


def _product(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))

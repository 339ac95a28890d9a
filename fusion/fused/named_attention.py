"""The attention that a layer's file names, in versions of ComfyUI that support it.

A file may have a tensor `<layer>.comfy_attention.config`, text as bytes. By it stock gives the
layer a `comfy_attention` with the named function, if this machine can run it, and passes that to
its attention function as `preferred_attention`. Stock prefers any override to it, and does not tell
the override. So

- fused blocks pass on what the layer names, as stock's do (`told`);
- our override is removed for calls of a network in which a layer names a function, unless the
  policy insists (`attach`).

A LoRA may bring such a tensor, too: stock then replaces the layer's `comfy_attention`, so the layer
is asked at each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import comfy.ldm.modules.attention
import comfy.patcher_extension
from torch import nn

from ..base.hooks import NAMED_ATTENTION
from ..stream.model_call import PLACES

NAME = "comfy_attention"  # name of a layer's module
PLACE = PLACES.index("transformer_options")  # of the argument in a call by position
IS_KNOWN = hasattr(comfy.ldm.modules.attention, "ComfyAttention")

_layers: weakref.WeakKeyDictionary[nn.Module, list[dict[str, Any]]] = weakref.WeakKeyDictionary()


def another_is_preferred(modules: Mapping[str, Any], before: Sequence[Any]) -> bool:
    """Whether a module's children are the same as before, except for the attention that they ask
    for."""
    pairs = zip(modules.items(), before, strict=False)
    return len(modules) == len(before) and all(
        now is was or (name == NAME and type(now) is type(was) and not now._parameters and not now._modules)
        for (name, now), was in pairs
    )


def told(module: Any) -> Mapping[str, Any]:
    """Keyword arguments that tell an attention function about the calling layer; empty if ComfyUI's
    layers name no attention."""
    named = module._modules.get(NAME)
    return {} if named is None else {"preferred_attention": named}


def is_named(net: nn.Module) -> bool:
    """Whether a layer of a network names an attention that this machine can run."""
    found = _layers.get(net)
    if found is None:
        found = _layers[net] = [module._modules for module in net.modules() if NAME in module._modules]
    return any(getattr(layer.get(NAME), "function", None) is not None for layer in found)


def attach(options: dict[str, Any], hook: str) -> None:
    """Let our override step back where layers name their own attention. options: the
    transformer_options of a stock MODEL."""
    if IS_KNOWN:
        kind = comfy.patcher_extension.WrappersMP.APPLY_MODEL
        options.setdefault("wrappers", {}).setdefault(kind, {})[NAMED_ATTENTION] = [_Around(hook)]


class _Around:
    """Wraps one call of the model, as stock's wrappers do."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        options = args[PLACE] if len(args) > PLACE else kwargs.get("transformer_options")
        override = None if options is None else options.get(self._hook)
        if (
            options is None
            or not getattr(override, "yields", False)
            or not is_named(executor.class_obj.diffusion_model)
        ):
            return executor(*args, **kwargs)
        others = {name: value for name, value in options.items() if name != self._hook}
        if len(args) > PLACE:
            return executor(*args[:PLACE], others, *args[PLACE + 1 :], **kwargs)
        return executor(*args, **{**kwargs, "transformer_options": others})

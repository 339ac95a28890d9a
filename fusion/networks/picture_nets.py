"""Networks that stock's nodes use and that are no diffusion models, over our kernels: upscale
models, BiRefNet, RT-DETR and Depth Anything 3. The result is a fused copy, which the same stock
nodes take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import comfy.model_management as management
import comfy.model_patcher
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...kernels_cuda import KernelPolicy
from ...kernels_cuda.modules import Table, fuse
from ...kernels_cuda.modules.graphs import attach
from ..base.errors import WrongFile
from . import giving_back
from .plain_layers import OF_DYNAMIC, copied

TAKEN = "take an UPSCALE_MODEL, a BACKGROUND_REMOVAL, or a MODEL that is RT-DETR or Depth Anything 3"
# Networks of a MODEL that take pictures and are called by themselves, with the parts whose calls
# may be captured. RT-DETR's input is in RAM, and its decoder mixes types. BiRefNet is not captured
# at all, because torchvision computes in each block of its decoder, on another stream than torch's.
OF_MODELS = {
    "comfy.ldm.rt_detr.rtdetr_v4.RTv4": ("backbone", "encoder"),
    "comfy.ldm.depth_anything_3.model.DepthAnything3Net": ("",),
}

# What stock's patchers note on the network that they hold, which is the outermost.
OF_PATCHERS = {
    "device", "model_loaded_weight_memory", "lowvram_patch_counter", "model_lowvram", "current_weight_patches_uuid",
    "model_offload_buffer_memory", "current_patcher", *OF_DYNAMIC,
}  # fmt: skip


class InHalf(nn.Module):
    """A network that computes in its own type, channels-last, as our kernels want it. Outputs have
    the inputs' type, and are contiguous where these are.

    The network's attributes are found in it, too, because spandrel asks some for mode or scale.
    """

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = net, dtype

    def forward(self, x: Any) -> Any:
        """x: a tensor, or a list of tensors. Returns a tensor, or several as the network does, of
        which spandrel takes the picture."""
        first = x if isinstance(x, Tensor) else x[0]
        made = self.net(self._inward(x) if isinstance(x, Tensor) else [self._inward(t) for t in x])
        format = torch.contiguous_format if first.is_contiguous() else torch.preserve_format
        return tree_map_only(
            Tensor, lambda t: t.to(first.dtype if t.is_floating_point() else t.dtype, memory_format=format), made
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "net" or name in OF_PATCHERS or name.startswith("_"):
                raise
            return getattr(super().__getattr__("net"), name)

    def _inward(self, t: Tensor) -> Tensor:
        format = torch.channels_last if t.ndim == 4 else torch.preserve_format
        return t.to(self.dtype, memory_format=format)


def fused(model: Any, policy: KernelPolicy) -> tuple[Any, Table]:
    """A fused copy of a model, with weights of its own. model: an UPSCALE_MODEL, BACKGROUND_REMOVAL
    or MODEL of stock's, which is not changed.

    Raises WrongFile if it has no network that can be fused.
    """
    # Outside of inference mode, so that the copied weights count their writes.
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(model, comfy.model_patcher.ModelPatcher):
            return _of_model(model, policy)
        net, patcher = getattr(model, "model", None), getattr(model, "patcher", None)
        if not isinstance(net, nn.Module) or patcher is None:
            raise WrongFile(f"this is a {type(model).__name__} without a torch network: {TAKEN}")
        _check_patches(patcher)
        parts = PARTS.get(_class(net))
        if parts is not None:
            own, table = _in_parts(net, parts, patcher.load_device, policy)
        else:
            halves = bool(getattr(model, "supports_half", False)) and management.should_use_fp16(patcher.load_device)
            dtype = torch.float16 if halves else torch.float32
            inner = _ready(copied(net, dtype).to(dtype))
            table = fuse(inner, policy, graphs=True)
            own = InHalf(inner, dtype).eval()
        own = own.to(patcher.offload_device)
        made = copy.copy(model)
        vars(made)["_model" if "_model" in vars(model) else "model"] = own
        made.patcher = _patcher(own, patcher)
        return made, table


def _of_model(model: Any, policy: KernelPolicy) -> tuple[Any, Table]:
    """A MODEL's copy, whose network computes in the type that it was loaded in."""
    base = model.model
    net = getattr(base, "diffusion_model", None)
    if not isinstance(net, nn.Module) or _class(net) not in OF_MODELS:
        raise WrongFile(f"this MODEL is a {type(base).__name__}, which FuseStream's own loaders are for: {TAKEN}")
    _check_patches(model)
    own = _ready(copied(net, None))
    table = fuse(own, policy)
    for name in OF_MODELS[_class(net)]:
        _capture(own.get_submodule(name))
    made: Any = copy.copy(base)  # with the same settings, which are not written to
    vars(made)["_modules"] = {**base._modules, "diffusion_model": own.to(model.offload_device)}
    for name in OF_DYNAMIC:
        vars(made).pop(name, None)
    made.device, made.model_loaded_weight_memory, made.model_offload_buffer_memory = model.offload_device, 0, 0
    made.lowvram_patch_counter, made.model_lowvram, made.current_weight_patches_uuid = 0, False, None
    patcher = _patcher(made, model)
    patcher.model_options = copy.deepcopy(model.model_options)
    return patcher, table


def _in_parts(
    net: nn.Module, parts: Callable[[nn.Module], Iterator[str]], device: torch.device, policy: KernelPolicy
) -> tuple[nn.Module, Table]:
    """Only some parts in halves, each with casts around it, because the others mix types. The
    others stay ComfyUI's, with their own casts."""
    names = list(parts(net))
    within = {id(part) for name in names for part in net.get_submodule(name).modules()}
    dtype = torch.float16 if management.should_use_fp16(device) else torch.float32
    own = copied(net, dtype, lambda part: id(part) in within).eval().requires_grad_(False)
    for name in names:
        part = _ready(own.get_submodule(name).to(dtype))
        above, _, last = name.rpartition(".")
        setattr(own.get_submodule(above), last, InHalf(part, dtype).eval())
    return own, fuse(own, policy)


def _of_birefnet(net: nn.Module) -> Iterator[str]:
    """Names of its decoder's parts, and of the feed-forwards of its Swin transformer, whose
    attention adds masks in FP32."""
    yield from ("squeeze_module", "decoder")
    for name, part in net.named_modules():
        if _class(part) == "comfy.background_removal.birefnet.Mlp":
            yield name


PARTS = {"comfy.background_removal.birefnet.BiRefNet": _of_birefnet}


def _capture(net: nn.Module) -> None:
    """Let the calls of a network be captured, unless stock copies weights of it at each call,
    because these have no fixed address."""
    if not any(hasattr(part, "comfy_cast_weights") for part in net.modules()):
        attach(net)


def _ready(net: nn.Module) -> nn.Module:
    """Lay out weights channels-last, as the kernels read them, so that no second copy is kept."""
    for part in net.modules():
        for t in part.parameters(recurse=False):
            if t.ndim == 4:  # torch's own conversion of a network fails at five dimensions
                t.data = t.data.contiguous(memory_format=torch.channels_last)
    return net.eval().requires_grad_(False)


def _patcher(net: nn.Module, like: Any) -> Any:
    return giving_back.patcher_of(net, like.load_device, like.offload_device)


def _check_patches(patcher: Any) -> None:
    if patcher.patches or patcher.object_patches:
        raise WrongFile(
            "this model carries patches (a LoRA, or another node's): put FuseStream Fuse before what patches it"
        )


def _class(net: Any) -> str:
    return f"{type(net).__module__}.{type(net).__qualname__}"

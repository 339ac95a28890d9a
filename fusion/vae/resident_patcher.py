"""A patcher for models that are small and used whole, as VAEs are: their weights lie on the card
until ComfyUI wants the room.

Stock's dynamic patcher is for models that may not fit. Each time one is asked for, it brings anew
what is small, a copy for each bias and norm that the host waits for, and looks up everything else
at each product: half of the time that a picture's decoding takes. Stock's plain patcher does
neither, but it moves weights: those of a file, which are memory that the system can drop and read
again, become a copy in RAM when they come back from the card. Here what the file gave stays where
it is, and what lies on the card is forgotten.

A card without room for all of it has stock's plain way: some modules there, the others brought for
each use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...kernels_cuda.ops.conv.conv_operands import last_format
from ..base.hooks import HELD, POLICY


class Held(NamedTuple):
    """A parameter or buffer. origin: what the file gave. here: what the model computes with."""

    origin: Tensor
    here: Tensor


class HeldPatcher(ModelPatcher):
    """Stock's plain patcher over a model whose weights stay where they were beside those on the
    card.
    """

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: int = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
        **others: Any,
    ) -> None:
        if full_load:
            hold(self.model, device_to)
        super().load(device_to, lowvram_model_memory, force_patch_weights, full_load, **others)

    def partially_unload(self, device_to: Any, memory_to_free: int = 0, *args: Any, **others: Any) -> int:
        """Nothing of what is held: whoever wants room gets all of it, by `detach`."""
        if HELD in self.model.__dict__:
            return 0
        freed: int = super().partially_unload(device_to, memory_to_free, *args, **others)
        return freed

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True, **others: Any) -> None:
        if unpatch_weights:
            # First the patches go, without anything being moved; what they had changed was a copy
            # too.
            super().unpatch_model(None, unpatch_weights, **others)
            give_back(self.model)
        super().unpatch_model(device_to, unpatch_weights, **others)


def patcher_of(model: nn.Module, load_device: torch.device, offload_device: torch.device) -> HeldPatcher:
    """One for a model as stock builds it: what its weights become on a device is noted in its
    modules, whatever the file has.
    """
    nbytes = sum(tensor.numel() * kind.itemsize for _, _, tensor, kind in _tensors(model))
    model._register_state_dict_hook(_as_the_file_has_it)  # type: ignore[no-untyped-call]
    return HeldPatcher(model, load_device=load_device, offload_device=offload_device, size=nbytes)


def hold(model: nn.Module, device: torch.device, parts: tuple[str, ...] = ("",)) -> None:
    """Let all that the model computes with lie on the device, in the types in which it computes;
    where the kernels are ours, the weights of convolutions as they are read. parts: how the names
    of what is meant begin.
    """
    held: dict[str, Held] = model.__dict__.setdefault(HELD, {})
    is_ours = hasattr(model, POLICY) and device.type == "cuda"
    for module, name, tensor, kind in list(_tensors(model)):
        if name.startswith(parts) and (tensor.device != device or tensor.dtype is not kind):
            form = last_format(tensor) if is_ours and tensor.ndim in (4, 5) else torch.preserve_format
            held[name] = Held(tensor, _put(module, name, tensor.to(device, kind, memory_format=form)))


def hold_alone(model: nn.Module, device: torch.device, parts: tuple[str, ...], others: tuple[str, ...]) -> None:
    """Of a model that is held these parts lie on the device, and others wait where the file put
    them: what is computed now has no use for them. A model that is not held stays as it is.
    """
    held: dict[str, Held] | None = model.__dict__.get(HELD)
    if held:
        for name in [name for name in held if name.startswith(others)]:
            _put(model.get_submodule(name.rpartition(".")[0]), name, held.pop(name).origin)
        hold(model, device, parts)


def bytes_beside(model: nn.Module, others: tuple[str, ...]) -> int:
    """Of the weights that lie on a card while others wait, if they can."""
    held = model.__dict__.get(HELD, {})
    return sum(
        tensor.nbytes
        for name, tensor in model.named_parameters()
        if not (name.startswith(others) and (name in held or tensor.device.type != "cuda"))
    )


def give_back(model: nn.Module) -> None:
    """Nothing of it lies on a device any more: everything is what it was."""
    for name, one in model.__dict__.pop(HELD, {}).items():
        _put(model.get_submodule(name.rpartition(".")[0]), name, one.origin)


def _as_the_file_has_it(model: Any, found: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Who saves a model, or looks at its weights, gets all of their digits; what was patched stays
    patched.
    """
    for name, one in model.__dict__.get(HELD, {}).items():
        key = prefix + name
        if key in found and found[key].data_ptr() == one.here.data_ptr():
            found[key] = one.origin.detach()


def _put(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """In the place of a parameter or buffer of the module, the last part of whose name is its own."""
    own = name.rpartition(".")[2]
    if own in module._buffers:
        module._buffers[own] = tensor
    else:
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        module._parameters[own] = parameter
    return tensor


def _tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, torch.dtype]]:
    """Parameters and buffers: the module, the name from the model on, and the type in which the
    model computes with it.
    """
    for path, module in model.named_modules():
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                kind: torch.dtype = getattr(module, f"{own}_comfy_model_dtype", None) or tensor.dtype
                yield module, f"{path}.{own}" if path else own, tensor, kind

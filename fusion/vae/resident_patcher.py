"""A patcher for models that are small and used whole, such as VAEs: their weights stay on the card
until ComfyUI needs the room.

Stock's dynamic patcher is for models that may not fit. Each time a model is requested, it copies
small tensors anew, one copy for each bias and norm that the host waits for, and looks up all else
at each product: half of the time of a picture's decoding. Stock's plain patcher does neither, but
it moves weights: those of a file, which are memory that the system can drop and read again, become
a copy in RAM when they come back from the card. Here the file's tensors stay where they are, and
copies on the card are dropped.

On a card without room for all weights, stock's plain way is taken: some modules stay there, the
others are brought for each use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...kernels_cuda.ops.conv.conv_operands import last_format
from ..base.hooks import HELD, STAYS
from ..base.policy import network_policy


class Held(NamedTuple):
    """A parameter or buffer. origin: from the file. here: the copy that the model computes with."""

    origin: Tensor
    here: Tensor


class HeldPatcher(ModelPatcher):
    """Stock's plain patcher for a model whose weights stay in their place in addition to those on
    the card."""

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
        """Frees nothing of a held model, whose memory is freed as a whole by `detach`."""
        if HELD in self.model.__dict__:
            return 0
        freed: int = super().partially_unload(device_to, memory_to_free, *args, **others)
        return freed

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True, **others: Any) -> None:
        if unpatch_weights:
            # Remove the patches first, without moving anything; patched weights were copies, too.
            super().unpatch_model(None, unpatch_weights, **others)
            give_back(self.model)
        super().unpatch_model(device_to, unpatch_weights, **others)


def patcher_of(model: nn.Module, load_device: torch.device, offload_device: torch.device) -> HeldPatcher:
    """A patcher for a model as stock builds it. The size counts the types in which its modules note
    that they compute, which may differ from the file's."""
    nbytes = sum(tensor.numel() * kind.itemsize for _, _, tensor, kind in tensors_and_types(model))
    model._register_state_dict_hook(_as_the_file_has_it)  # type: ignore[no-untyped-call]
    return HeldPatcher(model, load_device=load_device, offload_device=offload_device, size=nbytes)


class Missing(NamedTuple):
    """A tensor that a device lacks, and in which type and layout the model computes with it there."""

    module: nn.Module
    name: str
    tensor: Tensor
    dtype: torch.dtype
    form: torch.memory_format

    def on(self, device: torch.device) -> Tensor:
        """A copy on the device. torch converts before the copy, on the host; where that saves no bytes, the
        device does it."""
        crosses = self.tensor.dtype if self.tensor.itemsize <= self.dtype.itemsize else self.dtype
        return self.tensor.to(device, crosses).to(self.dtype, memory_format=self.form)

    def place(self, device: torch.device) -> Tensor:
        """Memory for one on the device, with any numbers."""
        return torch.empty_like(self.tensor, dtype=self.dtype, device=device, memory_format=self.form)


def missing(model: nn.Module, device: torch.device, parts: tuple[str, ...] = ("",)) -> list[Missing]:
    """The tensors of these parts of the model that are not on the device as it computes with them.
    If the kernels are ours, convolution weights are laid out for them. parts: prefixes of the names."""
    is_ours = network_policy(model) is not None and device.type == "cuda"
    return [
        Missing(
            module,
            name,
            tensor,
            kind,
            last_format(tensor) if is_ours and tensor.ndim in (4, 5) else torch.preserve_format,
        )
        for module, name, tensor, kind in tensors_and_types(model)
        if name.startswith(parts) and (tensor.device != device or tensor.dtype is not kind)
    ]


def hold(
    model: nn.Module,
    device: torch.device,
    parts: tuple[str, ...] = ("",),
    brought: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Put all tensors of these parts of the model on the device. brought: those that are there
    already, by name."""
    held: dict[str, Held] = model.__dict__.setdefault(HELD, {})
    for one in missing(model, device, parts):
        there = brought.get(one.name)
        held[one.name] = Held(one.tensor, _put(one.module, one.name, one.on(device) if there is None else there))


def hold_alone(model: nn.Module, device: torch.device, parts: tuple[str, ...], others: tuple[str, ...]) -> None:
    """Keep only these parts of a held model on the device, and return others to the file's tensors,
    because the present work does not use them. A model that is not held stays as it is."""
    if model.__dict__.get(HELD) and STAYS not in model.__dict__:
        let_go(model, others)
    hold_too(model, device, parts)


def stay(model: nn.Module, device: torch.device) -> None:
    """Keep all of a held model on the device from now on, because its parts are called in turn, by graphs with
    their addresses and on several streams."""
    model.__dict__[STAYS] = True
    hold_too(model, device, ("",))


def may_go(model: nn.Module) -> None:
    """Let calls of one part return others to the file's tensors again."""
    model.__dict__.pop(STAYS, None)


def hold_too(model: nn.Module, device: torch.device, parts: tuple[str, ...]) -> None:
    """Bring these parts of a held model back to the device, and leave the others where they are."""
    if model.__dict__.get(HELD):
        hold(model, device, parts)


def let_go(model: nn.Module, parts: tuple[str, ...]) -> None:
    """Return these parts of a held model to the file's tensors. parts: prefixes of the names."""
    held: dict[str, Held] = model.__dict__.get(HELD, {})
    for name in [name for name in held if name.startswith(parts)]:
        _put(model.get_submodule(name.rpartition(".")[0]), name, held.pop(name).origin)


def bytes_beside(model: nn.Module, others: tuple[str, ...]) -> int:
    """Bytes of the weights that stay on a card while others wait, if they can."""
    held, others = model.__dict__.get(HELD, {}), () if STAYS in model.__dict__ else others
    return sum(
        tensor.nbytes
        for name, tensor in model.named_parameters()
        if not (name.startswith(others) and (name in held or tensor.device.type != "cuda"))
    )


def give_back(model: nn.Module) -> None:
    """Restore all original tensors, and drop the copies on the device."""
    for name, one in model.__dict__.pop(HELD, {}).items():
        _put(model.get_submodule(name.rpartition(".")[0]), name, one.origin)


def _as_the_file_has_it(model: Any, found: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Return the file's weights, in full precision, from `state_dict`. Patched weights stay
    patched."""
    for name, one in model.__dict__.get(HELD, {}).items():
        key = prefix + name
        if key in found and found[key].data_ptr() == one.here.data_ptr():
            found[key] = one.origin.detach()


def _put(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Replace a parameter or buffer of the module; the last part of the name is its own."""
    own = name.rpartition(".")[2]
    if own in module._buffers:
        module._buffers[own] = tensor
    else:
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        module._parameters[own] = parameter
    return tensor


def tensors_and_types(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, torch.dtype]]:
    """Parameters and buffers: the module, the name within the model, and the type in which the
    model computes with it."""
    for path, module in model.named_modules():
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                kind: torch.dtype = getattr(module, f"{own}_comfy_model_dtype", None) or tensor.dtype
                yield module, f"{path}.{own}" if path else own, tensor, kind

"""The ModelPatcher of a model whose blocks stream. To every other node it is a stock MODEL.

All that is not a block's weight (embeddings, head, modulations, scales) is stock's: loaded, patched
and moved by the base class. The blocks' weights belong to the stream, which the model has and all
clones share. They are hidden from the base class, because it would move or overwrite stand-ins
without bytes.

It is a plain patcher (`is_dynamic()` is False), because only those are asked to give memory back.
It answers with what it really holds: the window and the residents, not the file.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch
from torch import nn

from ..base.errors import NotWhileStreaming
from ..base.hooks import RECKONING, REST, STREAM
from ..base.policy import policy_on
from ..stream.block_stream import BlockStream
from ..weights import channels_last
from ..weights.patches import with_hooked
from ..weights.storage import is_quantised, storage_of, stored

ALL = 1e32  # stock's number for all there is
# Why calls are not captured: see `Changes.disturbed`.
WRAPPED = "another node changes its weights at each call"
INJECTED = "another node has changed the model while it is loaded"


class Rest(NamedTuple):
    """The places of parameters and buffers that do not stream. put: by name, the objects that
    replace the model's own modules."""

    put: list[tuple[str, Any]]
    places: list[tuple[dict[str, Any], str]]

    def is_for(self, put: list[tuple[str, Any]]) -> bool:
        return len(put) == len(self.put) and all(
            name == known and thing is same for (name, thing), (known, same) in zip(put, self.put, strict=True)
        )


def attach(model: Any, stream: BlockStream) -> None:
    """Give a model its stream, which is closed with the model."""
    setattr(model, STREAM, stream)
    weakref.finalize(model, _end, stream)


def _end(stream: BlockStream) -> None:
    """Close the stream. The garbage collector may run this in one of the pager's own threads, where
    closing would wait for itself."""
    if threading.current_thread().name.startswith("fusestream"):
        threading.Thread(target=stream.close, name="closing").start()
    else:
        stream.close()


class StreamingModelPatcher(comfy.model_patcher.ModelPatcher):
    """Takes the arguments of the base class, with which `clone` makes new ones. The model already
    has its stream."""

    def __init__(
        self,
        model: Any,
        load_device: torch.device,
        offload_device: torch.device,
        size: int = 0,
        weight_inplace_update: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, load_device, offload_device, size, weight_inplace_update, **kwargs)
        self._is_hooking = False
        self._hooked: dict[str, Any] = {}  # hooks' patches of streamed weights, now

    @property
    def stream(self) -> BlockStream:
        found: BlockStream = getattr(self.model, STREAM)
        return found

    # ------------------------------------------------------------------------------------- what stock asks about it

    def is_dynamic(self) -> bool:
        return False

    def model_size(self) -> int:
        """Device bytes when loaded within the budget; never less than what is loaded."""
        return (
            self._rest_size()
            + max(self.stream.residency.wanted, self.stream.residency.held)
            + self.stream.residency.beside
        )

    def loaded_size(self) -> int:
        """Device bytes now."""
        loaded = (
            self.stream.residency.held + self.stream.residency.beside + (self._rest_size() if self._is_loaded() else 0)
        )
        self.model.model_loaded_weight_memory = loaded  # some nodes read this
        return loaded

    def get_free_memory(self, device: torch.device) -> int:
        """Bytes that are really free. The base class adds what stock's own paging could still give,
        and batches by the sum; and memory that graphs hold in torch's pools looks free to it. While
        stock asks which prompts to batch, memory that streamed weights can do without counts as
        free: a step that runs out of VRAM takes it, and a batch of prompts is worth more."""
        reckoning = getattr(self.model, RECKONING, None)
        yielding = self.stream.residency.yielding if reckoning is not None and reckoning.is_batching else 0
        return self._free(device) + yielding

    def _free(self, device: torch.device) -> int:
        free: int = comfy.model_management.get_free_memory(device)
        return max(0, free - self.stream.residency.beside)

    def _is_loaded(self) -> bool:
        return self.model.current_weight_patches_uuid is not None

    def _rest_size(self) -> int:
        """Bytes of everything except the blocks' weights."""
        return sum(stored(tensor).nbytes for tensor in self._rest())

    def _rest(self) -> list[torch.Tensor]:
        """Parameters and buffers that do not stream, each once. Stock asks ten times in each
        encoding, so their places are looked up once for each set of modules that nodes have put
        into the model. Most nodes put other objects there: our policy, a way of sampling."""
        put = self._modules_put()
        known: Rest | None = self.model.__dict__.get(REST)
        if known is None or not known.is_for(put):
            streamed, places = self.stream.keys, list[tuple[dict[str, Any], str]]()
            for prefix, module in self.model.named_modules():
                for held in (module._parameters, module._buffers):
                    names = (name for name in held if f"{prefix}.{name}".lstrip(".") not in streamed)
                    places.extend((held, name) for name in names)
            known = self.model.__dict__[REST] = Rest(put, places)
        found = (held.get(name) for held, name in known.places)
        return list({id(tensor): tensor for tensor in found if tensor is not None}.values())

    def _modules_put(self) -> list[tuple[str, Any]]:
        now = ((name, was, comfy.utils.get_attr(self.model, name)) for name, was in self.object_patches_backup.items())
        return [(name, thing) for name, was, thing in now if isinstance(thing, nn.Module) or isinstance(was, nn.Module)]

    # ------------------------------------------------------------------------------------------- loading, unloading

    def partially_load(
        self, device_to: torch.device, extra_memory: float = 0, force_patch_weights: bool = False, **kwargs: Any
    ) -> int:
        """Hold `extra_memory` bytes more than now, or fewer, and take up this patcher's patches.
        Returns the bytes added."""
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            try:
                self.stream.residency.refresh()
            except Exception:
                self.detach()
                raise
            before = self.loaded_size()
            is_stale = self._is_loaded() and (
                self.model.current_weight_patches_uuid != self.patches_uuid or force_patch_weights
            )
            self.unpatch_model(self.offload_device, unpatch_weights=is_stale)
            self.patch_model(load_weights=False)
            if self._is_loaded():
                self._set_patches()  # the same patches, but perhaps for a clone with other kernels
            if extra_memory < 0 and self._is_loaded():
                # It is about to run, and what its blocks need to pass through would have to come
                # back at once.
                self.stream.residency.shrink(
                    min(-int(extra_memory), self.stream.residency.held - self.stream.residency.least)
                )
                return 0
            try:
                if self._is_loaded() and self.model.device == device_to:
                    self.stream.residency.load(device_to, self._room(self.stream.residency.held + extra_memory))
                    self.apply_hooks(self.forced_hooks, force_apply=True)
                else:
                    room = self._room(before + extra_memory - self._rest_size())
                    self.load(device_to, room, force_patch_weights=force_patch_weights, **kwargs)
            except Exception:
                self.detach()
                raise
            return self.loaded_size() - before

    def _room(self, room: float) -> float:
        """Bytes for the blocks' weights, of the `room` that stock has for them: see
        `Reckoning.room`."""
        reckoning = getattr(self.model, RECKONING, None)
        if reckoning is None:
            return room
        free = self._free(self.load_device) + self.loaded_size() - self._rest_size()
        allowed: float = reckoning.room(
            room, free, self.stream.residency.narrow, self.stream.residency.whole, self.stream.residency.most
        )
        return allowed

    def load(
        self,
        device_to: torch.device | None = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
        **kwargs: Any,
    ) -> None:
        """lowvram_model_memory: bytes for the blocks' weights; with `full_load` all of them."""
        device = device_to or self.load_device
        self.stream.residency.changes.disturbed(
            WRAPPED, bool(self.weight_wrapper_patches)
        )  # weights that do not stream move, too
        with self.use_ejected():
            self.unpatch_hooks()
            self._prepare_operations()
            self._set_patches()
            self.stream.residency.load(device, ALL if full_load else lowvram_model_memory)
            # All of the rest. Never a full load, in which stock calls `to` on the whole model.
            super().load(device, ALL, force_patch_weights=force_patch_weights, full_load=False, **kwargs)
            self._move_rest(device)
            if channels_last.serves(device):
                channels_last.as_kernels_want(self.model)
            self.loaded_size()

    def _set_patches(self) -> None:
        """Give the stream this patcher's patches. If `linear`, or all kernels, are off, LoRAs are
        added in stock's steps, too."""
        policy = policy_on(self)
        one_pass = policy is not None and policy.mode("linear") != "off"
        patches = with_hooked(self.patches, self._hooked)
        self.stream.set_patches(patches, one_pass=one_pass, uuid=self.patches_uuid)

    def _load_list(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Stock's list of modules to load, without those whose weights stream. The module is the
        last but one element of an entry."""
        streamed = {id(paged.module) for paged in self.stream.without_bytes()}
        return [entry for entry in super()._load_list(*args, **kwargs) if id(entry[-2]) not in streamed]

    def _prepare_operations(self) -> None:
        """Set what stock sets on each operation that it loads: weight wrappers, and whether it must
        cast."""
        for block in self.stream.blocks:
            modules: dict[int, Any] = {id(paged.module): paged.module for paged in block.paged}
            for module in modules.values():
                comfy.model_patcher.wipe_lowvram_weight(module)
                module.comfy_force_cast_weights = self.force_cast_weights
                if self.force_cast_weights:
                    module.prev_comfy_cast_weights = module.comfy_cast_weights
                    module.comfy_cast_weights = True
            for paged in block.paged:
                wrappers = self.weight_wrapper_patches.get(paged.key)
                if wrappers:
                    getattr(paged.module, f"{paged.attribute}_function").extend(wrappers)

    def _move_rest(self, device: torch.device) -> None:
        """Move what stock moves only with the whole model: parameters of modules that contain
        modules, and of operations that stream."""
        for tensor in self._rest():
            if not is_quantised(tensor) and tensor.device != device:
                tensor.data = tensor.data.to(device)

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True, **kwargs: Any) -> None:
        """Like the base class, which with a device would move the whole model with its
        stand-ins."""
        if unpatch_weights:
            self.stream.residency.changes.moved()
        super().unpatch_model(None, unpatch_weights, **kwargs)
        if unpatch_weights and device_to is not None:
            for entry in self._load_list():
                entry[-2].to(device_to)
            self._move_rest(device_to)
            self.model.device = device_to
        if unpatch_weights:
            channels_last.as_in_file(self.model)  # the file's order is what later patching expects

    def partially_unload(
        self,
        device_to: torch.device,  # noqa: ARG002 - weights stay in the file
        memory_to_free: float = 0,
        **_kwargs: Any,
    ) -> int:
        """Free residents first, then the window. Returns the bytes really freed."""
        with self.use_ejected():
            freed = self.stream.residency.shrink(int(min(memory_to_free, self.stream.residency.most)))
            self.loaded_size()
            return freed

    def detach(self, unpatch_all: bool = True, **kwargs: Any) -> Any:
        """With `unpatch_all` the memory is given back. Without it, which is also the case whenever
        a clone is collected, the weights stay for the others."""
        model = super().detach(unpatch_all, **kwargs)
        if unpatch_all:
            self.stream.residency.unload()
            self.loaded_size()
        return model

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Like the base class, which detaches; not where the process ends, because ComfyUI's modules
        are emptied by then. is_ending: held here, because this module is emptied, too."""
        if not is_ending():
            super().__del__()

    def cleanup(self) -> None:
        """Called after sampling, also after a failed one. Waits for another thread that still
        computes for a failed sampling on several cards, and raises if the file changed while the
        result was computed."""
        with self.stream.calling:
            self.stream.together = None
            self.stream.residency.texts.sampling_ended()
        super().cleanup()
        try:
            if sys.exc_info()[0] is None:
                self.stream.residency.check()
        finally:
            # After an unload during the run, weights that came back for the rest of it are unknown
            # to stock, which would never ask for their memory.
            if not self._is_loaded():
                self.stream.residency.unload()

    # ----------------------------------------------------------------------------------------- the weights themselves

    def patch_weight_to_device(
        self, key: str, device_to: torch.device | None = None, *args: Any, return_weight: bool = False, **kwargs: Any
    ) -> Any:
        """Like the base class. A streamed weight is read from the file, and cannot be patched in
        its place."""
        if key not in self.stream.keys:
            return super().patch_weight_to_device(key, device_to, *args, return_weight=return_weight, **kwargs)
        if not return_weight:
            raise NotWhileStreaming(f"{key} streams, and cannot be patched in place.", self.stream.path)
        return self.stream.in_file.weight(key, self.patches.get(key, ()), device_to)

    def get_key_patches(self, filter_prefix: str | None = None) -> Any:
        """Like the base class, for merging into another model: streamed weights are promises, read
        when their numbers are needed. Scales of quantised weights, on which the base class fails,
        are no weights and have no patches; neither are other things that a module saves, such as
        the attention that a layer asks for."""
        found: dict[str, list[Any]] = {}
        for key in self.model_state_dict(filter_prefix):
            if key in self.stream.keys:
                weight, convert = self.stream.in_file.promised(key, self.model), None
            else:
                try:
                    weight, _, convert = comfy.model_patcher.get_key_weight(self.model, key)
                except AttributeError:
                    continue
                if not isinstance(weight, torch.Tensor):
                    continue
                if key in self.backup:
                    weight = self.backup[key].weight
                if key in self.hook_backup:
                    weight = self.hook_backup[key][0]
            found[key] = [(weight, convert or _as_it_is), *self.patches.get(key, ())]
        return found

    def model_state_dict_for_saving(self, *args: Any, **kwargs: Any) -> Any:
        """Like the base class: stock's parameters that are patched on demand. See `saving.py`."""
        self.stream.residency.unload()  # its memory is needed for what is saved
        with _pieces_of_any_type():
            found = super().model_state_dict_for_saving(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name, tensor in found.items():
            # ComfyUI's own lazy parameter would be quantised, and never ask.
            if storage_of(tensor).is_own_layout:
                numbers = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                found[name] = comfy.model_patcher.LazyCastingParam(self, prefix + name, numbers)
        return found

    def clone(self, disable_dynamic: bool = False, model_override: Any = None, force_deepcopy: bool = False) -> Any:
        """Like the base class. Only training needs a copy of the weights themselves."""
        if force_deepcopy:
            raise NotWhileStreaming(
                "Training needs all of a model's weights, and gradients through them.", self.stream.path
            )
        return super().clone(disable_dynamic, model_override)

    # ------------------------------------------------------------------------------------------ what others do to it

    def patch_model(self, *args: Any, **kwargs: Any) -> Any:
        self.stream.residency.changes.has_objects(self.object_patches)
        return super().patch_model(*args, **kwargs)

    def inject_model(self) -> None:
        super().inject_model()
        if self.is_injected:
            self.stream.residency.changes.disturbed(INJECTED, True)

    def eject_model(self) -> None:
        was = self.is_injected
        super().eject_model()
        if was:
            self.stream.residency.changes.disturbed(INJECTED, False)

    # ----------------------------------------------------------------------------------------------------------- hooks

    def patch_hooks(self, hooks: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the base class for weights that do not stream; streamed ones are used with the
        hooks' patches."""
        if hooks is not None:
            self.stream.residency.changes.moved()
        self._is_hooking = True
        try:
            found = super().patch_hooks(hooks, *args, **kwargs)
        finally:
            self._is_hooking = False
        self._hook(self.get_combined_hook_patches(hooks))
        return found

    def unpatch_hooks(self, *args: Any, **kwargs: Any) -> None:
        if self.hook_backup:
            self.stream.residency.changes.moved()
        super().unpatch_hooks(*args, **kwargs)
        if not self._is_hooking:  # otherwise other hooks follow
            self._hook({})

    def _hook(self, patches: dict[str, Any]) -> None:
        before, self._hooked = self._hooked, {key: patches[key] for key in self.stream.keys & patches.keys()}
        if before or self._hooked:
            self._set_patches()

    def patch_hook_weight_to_device(
        self, hooks: Any, combined_patches: Any, key: str, *args: Any, **kwargs: Any
    ) -> None:
        if key not in self.stream.keys:
            super().patch_hook_weight_to_device(hooks, combined_patches, key, *args, **kwargs)


class Piece(comfy.model_patcher.LazyCastingParamPiece):
    """Stock's part of a quantised weight that is made on demand, also of integers, which cannot
    have a gradient."""

    def __new__(cls, caster: Any, key: str, tensor: torch.Tensor) -> Any:
        if tensor.is_floating_point():
            return super().__new__(cls, caster, key, tensor)
        return torch.Tensor._make_subclass(cls, tensor, require_grad=False)


@contextlib.contextmanager
def _pieces_of_any_type() -> Iterator[None]:
    """Replace the class by which stock's functions make parts of quantised weights. They look it up
    under that name."""
    before = comfy.model_patcher.LazyCastingParamPiece
    comfy.model_patcher.LazyCastingParamPiece = Piece
    try:
        yield
    finally:
        comfy.model_patcher.LazyCastingParamPiece = before


def _as_it_is(weight: torch.Tensor, **_kwargs: Any) -> torch.Tensor:
    return weight

"""What families say of a step, its VRAM and its operations, against a forward of stock's network at its published width, on the
meta device: nothing is computed there, and every tensor has its size.

The network has two of its blocks. Inputs count as part of a step, weights do not. Of our ops the results count: their references
need more, and what a kernel needs beside its result is a tuner's.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_detection
import comfy.sd
import comfy.utils
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fusestream.bench.end_to_end import weights
from fusestream.bench.end_to_end.row_types import Model
from fusestream.fusion import KernelPolicy
from fusestream.fusion.base.family import Family
from fusestream.fusion.families.ltx2 import LTX_2
from fusestream.fusion.families.minimax_h3 import MINIMAX_H3
from fusestream.fusion.families.qwen_image import QWEN_IMAGE
from fusestream.fusion.fused import attention
from fusestream.kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from fusestream.kernels_cuda.registry import Op

BLOCKS = 2
HALF, SINGLE, FP8 = torch.float16, torch.float32, torch.float8_e4m3fn
SMALL = 64 * 2**20  # bytes of hidden values


class LiveBytes(TorchDispatchMode):
    """now, most: bytes of what was made since it began and is still there, and of what it was told to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def hold(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tensors_of((args, kwargs))}
        self.hold([one for one in tensors_of(made) if one.untyped_storage()._cdata not in given])
        return made


def tensors_of(tree: Any) -> list[Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, Tensor)]


@dataclass(frozen=True)
class Case:
    """A published model, and a latent of it: of a video, and of its sound if it has one. prompt: its tokens and their width.
    in_pieces: whether the hidden values of this latent are cut."""

    family: Family
    model: Model
    latents: tuple[tuple[int, ...], ...]
    prompt: tuple[int, int]
    in_pieces: bool

    def network(self, stored: torch.dtype, dtype: torch.dtype) -> Any:
        table = weights.table(self.model)
        kinds = {name: HALF if len(spec.shape) < 2 else stored for name, spec in table.items()}
        file = {name: torch.empty(spec.shape, dtype=kinds[name], device="meta") for name, spec in table.items()}
        metadata = weights.METADATA.get(self.model, {})
        config = comfy.model_detection.model_config_from_unet(file, "", metadata=dict(metadata))
        config.set_inference_dtype(stored, dtype)
        net = config.get_model(file, "", device="meta").diffusion_model.requires_grad_(False)
        lists = "blocks" if hasattr(net, "blocks") else "transformer_blocks"
        setattr(net, lists, getattr(net, lists)[:BLOCKS])
        return net

    def inputs(self, dtype: torch.dtype, words: int | None = None) -> tuple[list[Tensor], Tensor]:
        """words: tokens of the prompt, where they are not the case's."""
        found = [torch.empty(shape, dtype=dtype, device="meta") for shape in self.latents]
        return found, torch.empty(1, words or self.prompt[0], self.prompt[1], dtype=dtype, device="meta")

    @property
    def asked(self) -> Sequence[int]:
        """The shape about which stock asks: where there is sound, of both packed."""
        latents, _ = self.inputs(HALF)
        return self.latents[0] if len(latents) == 1 else comfy.utils.pack_latents(latents)[0].shape

    def forward(self, net: Any, latents: list[Tensor], prompt: Tensor, options: dict[str, Any]) -> None:
        when = torch.full((1,), 500.0)  # which stock reads, of MiniMax H3
        timestep = when if self.family is MINIMAX_H3 else when.to("meta")
        masks = () if self.family is MINIMAX_H3 else (None,)
        net(latents if len(latents) > 1 else latents[0], timestep, prompt, *masks, transformer_options=options)


CASES = {
    "Qwen-Image 1328x1328": Case(QWEN_IMAGE, "qwen_image", ((1, 16, 1, 166, 166),), (512, 3584), False),
    "Qwen-Image 2048x2048": Case(QWEN_IMAGE, "qwen_image", ((1, 16, 1, 256, 256),), (512, 3584), True),
    "LTX-2.3 768x512x121": Case(LTX_2, "ltx23", ((1, 128, 16, 16, 24), (1, 8, 126, 16)), (1024, 6144), False),
    "LTX-2.3 1280x704x121": Case(LTX_2, "ltx23", ((1, 128, 16, 22, 40), (1, 8, 126, 16)), (1024, 6144), True),
    "MiniMax H3 832x480x124": Case(MINIMAX_H3, "minimax_h3", ((1, 24, 37, 30, 52), (1, 32, 2, 207)), (512, 5376), True),
    "MiniMax H3 640x480x5": Case(MINIMAX_H3, "minimax_h3", ((1, 24, 2, 30, 40), (1, 32, 2, 8)), (512, 5376), False),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@each_case
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=["fp16", "fp32 stream"])
@pytest.mark.parametrize("stored", [HALF, FP8], ids=["fp16 file", "fp8 file"])
def test_a_steps_vram_is_what_its_tensors_take(
    case: Case, dtype: torch.dtype, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = case.network(stored, dtype)
    assert case.family.fuse(net, KernelPolicy()) == BLOCKS and case.family.need is not None
    model: Any = type("Model", (), {"model_options": {"transformer_options": {}}})
    attention.install(model, KernelPolicy())
    monkeypatch.setattr(attention, "wrong_tensor", lambda *_: None)  # as on a card
    monkeypatch.setattr(Op, "__call__", lambda op, tensors, options, _policy: op.fake(*tensors, *options))
    latents, prompt = case.inputs(dtype)
    with torch.inference_mode(), LiveBytes() as counted:
        counted.hold([*latents, prompt])
        case.forward(net, latents, prompt, model.model_options["transformer_options"])
    assert case.family.need(net, case.asked, dtype, CHUNK_BYTES) == pytest.approx(1.05 * counted.most, rel=0.1)


@each_case
def test_what_smaller_pieces_save_is_the_feed_forwards(case: Case) -> None:
    net, need = case.network(FP8, HALF), case.family.need
    assert need is not None
    whole, cut, small = (need(net, case.asked, HALF, pieces) or 0 for pieces in (1 << 60, CHUNK_BYTES, SMALL))
    assert small <= cut <= whole and (cut < whole or not case.in_pieces)
    assert cut - small <= 1.05 * (CHUNK_BYTES - SMALL)


@each_case
def test_a_forwards_operations_are_those_of_its_products(case: Case) -> None:
    net, words = case.network(HALF, HALF), None if case.family is LTX_2 else 256
    with torch.inference_mode(), FlopCounterMode(display=False) as counted:
        case.forward(net, *case.inputs(HALF, words), {})
    assert case.family.cost is not None
    found = case.family.cost(net, case.asked)
    assert found is not None
    assert found.gemm + found.attention == pytest.approx(counted.get_total_flops(), rel=0.1)

"""Models that no family knows, on the card: a file's integers by our ops, FP32 networks in halves, attention of bf16 and FP32.

Also RoPE, where comfy-kitchen's own would be eager torch.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.support import error

from fusestream import checkpoints
from fusestream.kernels_cuda import LEDGER, KernelPolicy

pytestmark = [
    pytest.mark.usefixtures("as_comfyui_runs"),
    pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI"),
]

STRANGERS = ("krea2", "hunyuan_video_15", "sd3")
OFF = KernelPolicy.of("off")
BF16, FP32 = torch.bfloat16, torch.float32


def policy(isa: Any, precision: Any = "auto") -> KernelPolicy:
    return KernelPolicy.of("auto", precision=precision, isa=isa, linear_int8="on", linear_int4="on")


def latents(kind: str, path: Path, asked: KernelPolicy, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """What it paints, streamed through the smallest window, and its network's account of the last call."""
    import comfy
    import family_scenes
    import in_halves
    from scenes import sample

    from fusestream.fusion.base.hooks import RUNNING

    with checkpoints.narrow.opened(comfy):
        model = in_halves.load(path, asked, dtype)
    found = sample(model, family_scenes.inputs(kind))
    found = found.tensors[0] if hasattr(found, "tensors") else found
    return found.float().cpu(), model.model.diffusion_model.__dict__[RUNNING]


@functools.cache
def stocks(kind: str, path: Path, dtype: torch.dtype) -> torch.Tensor:
    """What ComfyUI's own code paints; several tests are held against it."""
    return latents(kind, path, OFF, dtype)[0]


def files(kind: str, folder: Path, storage: str) -> tuple[Path, Path]:
    import int8_files

    return int8_files.write(checkpoints.write(kind, folder, "fp16"), folder, storage)


@pytest.mark.parametrize("storage", ["convrot", "convrot_w4a4"])
@pytest.mark.parametrize("kind", STRANGERS)
def test_integers_are_as_near_as_stocks(isa, kind, storage, folder):
    from fusestream.fusion.fused.operations import NO_INTEGERS

    of_integers, of_halves = files(kind, folder, storage)
    exact = stocks(kind, of_halves, FP32)
    theirs = stocks(kind, of_integers, BF16)
    ours, running = latents(kind, of_integers, policy(isa), BF16)
    assert running.ours and set(running.left) <= {NO_INTEGERS}, "stock multiplies what the file has in halves"
    assert ours.isfinite().all() and error(ours, exact) <= 1.25 * error(theirs, exact)


@pytest.fixture
def without_bf16(monkeypatch):
    """As on an RTX 20, where stock computes a model without FP16 in FP32."""
    from fusestream.fusion.fused import attention, operations

    for module in (attention, operations):
        monkeypatch.setattr(module, "narrows", lambda x: x.dtype is FP32)


@pytest.mark.parametrize("precision", ["auto", "turbo"])
@pytest.mark.parametrize("storage", ["bf16", "convrot"])
@pytest.mark.parametrize("kind", STRANGERS)
def test_fp32_networks_have_halves_or_integers(isa, kind, storage, precision, folder, without_bf16):
    """Under `turbo` a weight of halves is rounded, too, where rows are enough."""
    if storage == "bf16":
        path = of_halves = checkpoints.write(kind, folder, "bf16")
    else:
        path, of_halves = files(kind, folder, storage)
    exact, theirs = stocks(kind, of_halves, FP32), stocks(kind, path, BF16)
    asked = KernelPolicy.of("auto", precision=precision, isa=isa)
    ours, running = latents(kind, path, asked, FP32)
    assert running.ours > 9 * running.stocks
    most = 1.25 * error(theirs, exact) if storage == "convrot" else 0.5 * error(theirs, exact)
    assert error(ours, exact) <= (most if precision == "auto" else 0.05)


def handed_back() -> bool:
    """Whether the hook left a call to stock."""
    return any(one.candidate == "the hook" for one in LEDGER.refusals)


@pytest.mark.parametrize("d", [64, 128])
def test_attention_of_fp32_and_bf16(isa, d, without_bf16):
    """By stock's hook. FP32 as halves are, values of any size; bf16 under turbo as 8 bits are."""
    from comfy.ldm.modules.attention import attention_pytorch

    from fusestream.fusion.fused.attention import AttentionOverride

    heads, tokens = 4, 1300
    q, k, v = (torch.randn(1, tokens, heads * d, device="cuda") for _ in range(3))
    v[..., :d] *= 1e8
    apart = [one.view(1, tokens, heads, d).transpose(1, 2).double() for one in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*apart).transpose(1, 2)
    for precision, within in (("precise", 1e-3), ("turbo", 0.03)):
        LEDGER.clear()
        hook = AttentionOverride(KernelPolicy.of("on", precision=precision, isa=isa))
        found = hook(attention_pytorch, q, k, v, heads).view(1, tokens, heads, d)
        assert found.dtype is FP32 and not handed_back()
        assert all(error(found[:, :, head], exact[:, :, head]) < within for head in range(heads))
    in_bf16 = [one.to(BF16) for one in (q, k, v)]
    found = hook(attention_pytorch, *in_bf16, heads).view(1, tokens, heads, d)
    assert found.dtype is BF16 and not handed_back()
    assert all(error(found[:, :, head], exact[:, :, head]) < 0.03 for head in range(heads))


@pytest.fixture
def without_kitchens_kernels():
    """As where torch's CUDA is older than 13: comfy-kitchen turns q and k by eager torch."""
    kitchen = pytest.importorskip("comfy_kitchen")
    was_there = kitchen.registry.is_available("cuda")
    kitchen.disable_backend("cuda")
    yield
    if was_there:
        kitchen.enable_backend("cuda")


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in STRANGERS if kind != "sd3"])
def test_q_and_k_turn_as_near_as_in_eager_torch(isa, kind, dtype, folder, without_kitchens_kernels):
    """SD3 turns nothing."""
    import in_halves

    path = checkpoints.write(kind, folder, "bf16")
    exact = stocks(kind, path, FP32)
    theirs, _ = latents(kind, path, OFF, dtype)
    with in_halves.modes() as asked:
        ours, _ = latents(kind, path, KernelPolicy.of("off", isa=isa, rms_rope_="on"), dtype)
    assert asked["rms_rope_"] == {"on"}
    assert ours.isfinite().all() and error(ours, exact) <= 1.25 * error(theirs, exact)


def test_where_kitchens_own_kernels_serve_they_stay(folder):
    import in_halves

    kitchen = pytest.importorskip("comfy_kitchen")
    if not kitchen.registry.is_available("cuda"):
        pytest.skip("comfy-kitchen's CUDA kernels are not available here")
    path, asked_for = checkpoints.write("krea2", folder, "bf16"), KernelPolicy.of("off", rms_rope_="on")
    theirs, _ = latents("krea2", path, OFF, BF16)
    with in_halves.modes() as asked:
        ours, _ = latents("krea2", path, asked_for, BF16)
    assert "rms_rope_" not in asked and error(ours, theirs) < 1e-3


@pytest.mark.parametrize("kind", ["krea2", "hunyuan_video_15"])
def test_feed_forwards_in_pieces_paint_the_same(isa, kind, folder, monkeypatch):
    """Of a file's integers, whose rows have scales of their own."""
    from fusestream.fusion.fused import feed_forward, operations
    from fusestream.kernels_cuda.ops.matmul import mlp

    path, _ = files(kind, folder, "convrot")
    whole, _ = latents(kind, path, policy(isa), BF16)
    counts = []
    pieces = feed_forward.Cutting.pieces

    def noted(self, x):
        found = pieces(self, x)
        counts.append(len(found))
        return found

    monkeypatch.setattr(mlp, "CHUNK_ROWS", 4)
    monkeypatch.setattr(operations, "room_for_hidden", lambda _: 1)
    monkeypatch.setattr(feed_forward.Cutting, "pieces", noted)
    cut, _ = latents(kind, path, policy(isa), BF16)
    assert max(counts) > 2 and error(cut, whole) < 0.01


@pytest.mark.parametrize("folds", [True, False], ids=["kitchen folds it", "ours"])
def test_an_activation_with_its_product(isa, folds, folder, monkeypatch):
    """MiniMax H3's. Where kitchen has no kernel for both, the pass and the product are ours."""
    import in_halves

    from fusestream.fusion.fused import input_activation
    from fusestream.fusion.identify import checkpoint_info

    monkeypatch.setattr(checkpoint_info, "family_of", lambda _header: None)  # as a model that nobody knows
    monkeypatch.setattr(input_activation, "folded_by_kitchen", lambda *_: folds)
    path, of_halves = files("minimax_h3", folder, "convrot")
    exact = stocks("minimax_h3", of_halves, FP32)
    theirs = stocks("minimax_h3", path, BF16)
    with in_halves.modes() as asked:
        ours, running = latents("minimax_h3", path, policy(isa), BF16)
    assert ("silu_mul" in asked) is not folds and running.ours > running.stocks
    assert ours.isfinite().all() and error(ours, exact) <= 1.25 * error(theirs, exact)


def test_hidden_values_may_take_half_of_what_is_free():
    from fusestream.fusion.fused.operations import room_for_hidden
    from fusestream.fusion.stream import vram_pool

    card = torch.device("cuda", 0)
    assert room_for_hidden(card) == pytest.approx(vram_pool.free(card) // 2, rel=0.1)

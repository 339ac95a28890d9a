"""Qwen2.5-VL's vision tower over our ops, with the references on the CPU, beside stock's FP32: stock's class with the published
heads of 80 and 3420 hidden values' ragged size, in three layers, of which the second sees whole pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.ops
import pytest
import torch
from comfy.text_encoders import llama, qwen_vl
from text_models import close

from bed.depth import is_thorough
from fusestream.fusion.text.encoder import block as encoder_block
from fusestream.fusion.text.vision import patches, qwen2_vl, towers
from fusestream.kernels_cuda import LEDGER, KernelPolicy, KernelRefused

ALLOWED = {"precise": 1e-3, "fast": 3e-3, "turbo": 3e-3}
WIDTH, HEADS, FFN, LAYERS, OUT = 160, 2, 84, 3, 48
# Patches down and across: one window; cut at the right, below, at both; several pictures, and one of two frames.
GRIDS = {
    "a window": [(1, 8, 8)],
    "less than a window": [(1, 2, 6)],
    "whole windows": [(1, 16, 24)],
    "cut at the right": [(1, 8, 20)],
    "cut below": [(1, 18, 8)],
    "cut at both": [(1, 18, 22)],
    "pictures": [(1, 10, 14), (1, 4, 4), (1, 16, 8)],
    "frames": [(2, 10, 12), (1, 6, 6)],
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None) -> Iterator[None]:
    LEDGER.clear()
    with torch.inference_mode():
        yield


class Network(llama.Qwen25_7BVLI):
    """Stock's class around a small tower, without the language model."""

    def __init__(self, dtype: torch.dtype, operations: Any) -> None:
        torch.nn.Module.__init__(self)
        self.visual = qwen_vl.Qwen2VLVisionTransformer(
            WIDTH, OUT, FFN, HEADS, LAYERS, device=CPU, dtype=dtype, ops=operations
        )
        self.visual.fullatt_block_indexes = [1]


def build(dtype: torch.dtype = torch.float16, operations: Any = comfy.ops.manual_cast) -> Network:
    network, draw = Network(torch.float32, operations).requires_grad_(False), torch.Generator().manual_seed(4)
    for name, weight in network.named_parameters():
        if weight.ndim > 1:
            weight.normal_(0, weight[0].numel() ** -0.5, generator=draw)
        else:
            is_gain = "norm" in name or "ln_q" in name
            weight.normal_(1 if is_gain else 0, 0.1, generator=draw)
        weight.data = weight.to(dtype)
    return network


def rows(grid: list[tuple[int, int, int]], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    count = sum(t * h * w for t, h, w in grid)
    return torch.randn(count, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(seed)), torch.tensor(grid)


def both(network: Network, grid: list[tuple[int, int, int]], precision: str = "precise", **policy: Any) -> Any:
    """(ours, stock's)."""
    given = rows(grid)
    wanted = network.visual(*given)
    assert towers.fuse(network, KernelPolicy.of(precision=precision, **policy), on_cpu=True) == LAYERS
    return network.visual(*given), wanted


@pytest.mark.parametrize("precision", ALLOWED)
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_pictures_of_every_size(grid: list[tuple[int, int, int]], precision: str) -> None:
    got, wanted = both(build(), grid, precision)
    close(got, wanted, ALLOWED[precision])


@pytest.mark.parametrize("precision", ALLOWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_weights_of_every_type(dtype: torch.dtype, precision: str) -> None:
    got, wanted = both(build(dtype), GRIDS["cut at both"], precision)
    close(got, wanted, max(ALLOWED[precision], 2e-3) if dtype is torch.float32 else ALLOWED[precision])


def test_windows_of_one_size_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 x 22 patches are 4 whole windows, 2 cut at the right, 2 cut below and a corner; heads of 80 pass as 96."""
    asked: list[tuple[int, ...]] = []
    attention = encoder_block.attention
    monkeypatch.setattr(
        encoder_block, "attention", lambda q, *rest, **more: asked.append(q.shape) or attention(q, *rest, **more)
    )
    both(build(), GRIDS["cut at both"])
    near = [(4, 64), (2, 48), (2, 16), (1, 12)]
    assert asked == [(*shape, HEADS, 96) for shape in (*near, (1, 396), *near)]


def test_large_pictures_pass_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "CHUNK", 60)
    for precision, allowed in ALLOWED.items():
        got, wanted = both(build(), GRIDS["pictures"], precision)
        close(got, wanted, allowed)


@pytest.mark.parametrize("precision", ALLOWED)
def test_hidden_values_beyond_fp16_do_not_overflow(precision: str) -> None:
    network = build()
    for block in network.visual.blocks[:1]:
        for part in (block.mlp.gate_proj, block.mlp.up_proj):
            part.weight[:2] *= 300
        block.mlp.down_proj.weight[:, :2] *= 1e-3
    got, wanted = both(network, GRIDS["a window"], precision)
    assert got.isfinite().all()
    close(got, wanted, 2 * ALLOWED[precision])


@pytest.mark.parametrize("op", [*qwen2_vl.OPS, "to_half"])
def test_each_op_can_be_switched_off(op: str) -> None:
    for precision in ALLOWED if is_thorough() else ("precise", "fast"):
        got, wanted = both(build(torch.bfloat16), GRIDS["cut at both"], precision, **{op: "off"})
        close(got, wanted, 3e-3)


def test_all_off_and_the_cpu_are_stocks() -> None:
    given, network = rows(GRIDS["cut below"]), build()
    wanted, plain = network.visual(*given), {type(module) for module in network.modules()}
    assert towers.fuse(network, KernelPolicy.of("off"), on_cpu=True) == 0
    assert {type(module) for module in network.modules()} == plain
    assert towers.fuse(network) == LAYERS
    assert torch.equal(network.visual(*given), wanted)
    towers.fuse(network, KernelPolicy.of("on"))
    with pytest.raises(KernelRefused, match=r"'on' for this text encoder.*runs on the CPU.*'auto'"):
        network.visual(*given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_no_kernel_refuses_what_it_is_handed(dtype: torch.dtype, refused_by_kernels: list[tuple[str, str]]) -> None:
    for precision in ALLOWED:
        both(build(dtype), GRIDS["cut at both"], precision)
    assert not refused_by_kernels


def test_patches_of_other_nodes_count() -> None:
    """Functions on weights, those of norms too."""
    network = build()
    for module in network.visual.blocks[2].modules():
        if hasattr(module, "weight_function"):
            module.weight_function = [lambda weight: weight * 1.25]
    got, wanted = both(network, GRIDS["pictures"])
    close(got, wanted, ALLOWED["precise"])
    for function in network.visual.blocks[2].norm1.weight_function, []:
        network.visual.blocks[2].norm1.weight_function = function
    assert (network.visual(*rows(GRIDS["pictures"])) - got).norm() > 0.01 * got.norm()


def replaced(part: Any) -> None:
    plain = part.forward
    part.forward = lambda x: plain(x) * 1.5


def hooked(part: Any) -> None:
    part.register_forward_hook(lambda _module, _given, found: found * 1.5)


@pytest.mark.parametrize("change", [replaced, hooked])
@pytest.mark.parametrize("name", ["blocks.1.attn.qkv", "blocks.2.mlp.act_fn", "merger.mlp.0", "patch_embed.proj"])
def test_what_others_did_to_it_is_stocks(name: str, change: Any) -> None:
    network, given = build(), rows(GRIDS["cut below"])
    change(network.visual.get_submodule(name))
    wanted = network.visual(*given)
    towers.fuse(network, KernelPolicy(), on_cpu=True)
    assert torch.equal(network.visual(*given), wanted)
    towers.fuse(network, KernelPolicy.of("on"), on_cpu=True)
    with pytest.raises(KernelRefused, match=r"another node has changed how a \w+ of the text encoder computes"):
        network.visual(*given)


def another_activation(network: Network) -> None:
    network.visual.blocks[2].mlp.act_fn = torch.nn.GELU()


def larger_heads(network: Network) -> None:
    for block in network.visual.blocks:
        block.attn.num_heads, block.attn.head_dim = 1, WIDTH
    network.visual.rotary_pos_emb.dim = WIDTH // 2


@pytest.mark.parametrize(
    ("change", "said"),
    [(another_activation, "an activation that is not known here"), (larger_heads, "heads of 160, which no kernel")],
)
def test_what_is_not_known_here_is_stocks(change: Any, said: str) -> None:
    network, given = build(), rows(GRIDS["a window"])
    change(network)
    wanted = network.visual(*given)
    towers.fuse(network, KernelPolicy(), on_cpu=True)
    assert torch.equal(network.visual(*given), wanted)
    towers.fuse(network, KernelPolicy.of("on"), on_cpu=True)
    with pytest.raises(KernelRefused, match=said):
        network.visual(*given)


def picture(height: int, width: int) -> dict[str, Any]:
    drawn = torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(height))
    return {"type": "image", "data": drawn, "original_type": "image"}


def test_a_picture_is_cut_where_the_tower_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into what stock makes of it on the CPU. How many patches there are stays with the host."""
    network = build()
    wanted = [network.preprocess_embed(picture(*size), CPU) for size in ((64, 96), (113, 211))]
    towers.fuse(network, KernelPolicy(), on_cpu=True)
    for size, (theirs, grid) in zip(((64, 96), (113, 211)), wanted, strict=True):
        got, own_grid = network.preprocess_embed(picture(*size), CPU)
        close(got, theirs, ALLOWED["precise"])
        assert torch.equal(own_grid, grid)
    assert network.preprocess_embed({"type": "sound"}, CPU) == (None, None), "what is no picture is stock's"
    one, other, makes = picture(64, 96), torch.device("meta"), patches.process_qwen2vl_images

    def on_the_device(images: torch.Tensor, **options: Any) -> Any:
        assert images.device == other
        found, grid = makes(one["data"], **options)
        return found.to(other), grid

    monkeypatch.setattr(patches, "process_qwen2vl_images", on_the_device)
    monkeypatch.setattr(qwen2_vl.FusedTower, "forward", lambda _, x, grid: (x, grid))
    (x, given), grid = network.preprocess_embed(one, other)
    assert x.device == other and given.device == grid.device == CPU and grid.tolist() == [[1, 4, 6]]

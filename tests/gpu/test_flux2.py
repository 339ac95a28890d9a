"""Stock's Flux blocks at klein's and Flux.1's widths, with random weights, over our kernels. Needs a ComfyUI.

What is exact is stock in FP32 with the same weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu.support import until_chosen

from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

DIM, HEADS = 3072, 24
TEXT = 512
AXES = {"flux2": ([32, 32, 32, 32], 2000), "flux1": ([16, 56, 56], 10000)}
Streams = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Blocks:
    """A double and a single block, what goes into them, and stock's of the same weights."""

    def __init__(self, kind: str, side: int, batch: int = 1) -> None:
        import comfy.ldm.flux.layers as stock
        import comfy.ops

        from fusestream.fusion.families.flux2 import fused

        self.kind, shared = kind, kind == "flux2"
        ops: Any = comfy.ops.manual_cast
        args = {
            "mlp_ratio": 3.0 if shared else 4.0,
            "modulation": not shared,
            "mlp_silu_act": shared,
            "operations": ops,
        }
        args |= {"dtype": torch.float16, "device": "cuda"}
        self.double: Any = stock.DoubleStreamBlock(DIM, HEADS, **args, qkv_bias=not shared, proj_bias=not shared)
        self.single: Any = stock.SingleStreamBlock(DIM, HEADS, **args, bias=not shared)
        generator = torch.Generator(device="cuda").manual_seed(3)
        for parameter in (*self.double.parameters(), *self.single.parameters()):
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
            parameter.normal_(0.0 if parameter.ndim == 2 else 0.5, scale, generator=generator)
        fused.fuse(torch.nn.ModuleList([self.double, self.single]))

        def half(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, device="cuda", generator=generator) * scale).half()

        def modulation(count: int) -> Any:
            parts = half(batch, 1, count * DIM, scale=0.5).chunk(count, -1)
            return [stock.ModulationOut(*parts[at : at + 3]) for at in range(0, count, 3)]

        self.img, self.txt = half(batch, side * side, DIM), half(batch, TEXT, DIM)
        self.mods: Any = (modulation(6), modulation(6)) if shared else half(batch, DIM)
        self.mod: Any = modulation(3)[0] if shared else half(batch, DIM)
        axes, theta = AXES[kind]
        ids = torch.zeros(batch, TEXT + side * side, len(axes), device="cuda")
        ids[:, TEXT:, 1] = torch.arange(side, device="cuda").repeat_interleave(side)
        ids[:, TEXT:, 2] = torch.arange(side, device="cuda").repeat(side)
        self.pe = stock.EmbedND(dim=DIM // HEADS, theta=theta, axes_dim=axes)(ids)

    def run(self, policy: KernelPolicy | None, dtype: torch.dtype = torch.float16, **more: Any) -> Streams:
        """Both streams behind the double block, and the one behind the single block. policy None: stock's own."""
        from fusestream.fusion.fused import attention

        options: dict[str, Any] = {}
        if policy is not None:
            model: Any = type("Model", (), {"model_options": {"transformer_options": options}})
            attention.install(model, policy)

        def to(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(dtype, copy=True)
            if isinstance(value, (list, tuple)):
                return [to(one) for one in value]
            return type(value)(*(to(getattr(value, name)) for name in ("shift", "scale", "gate")))

        given = {"pe": self.pe, "transformer_options": options}
        img, txt = self.double(img=to(self.img), txt=to(self.txt), vec=to(self.mods), **given, **more)
        x = self.single(torch.cat((to(self.txt), to(self.img)), 1), vec=to(self.mod), **given)
        return img, txt, x


@pytest.fixture(scope="module")
def klein() -> Blocks:
    with torch.inference_mode():
        return Blocks("flux2", 32)


def errors(found: Streams, exact: Streams) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs]


def forgotten() -> None:
    for op in OPS.values():
        op.forget()  # or nothing is chosen, and nothing noted
    LEDGER.clear()


@pytest.mark.parametrize("kind", ["flux2", "flux1"])
@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_as_near_as_fp16_gets(isa, kind, precision):
    """In a batch of two, of a side that leaves tiles half empty."""
    blocks = Blocks(kind, 25, batch=2)
    exact, theirs = blocks.run(None, torch.float32), blocks.run(None)
    forgotten()
    found = blocks.run(KernelPolicy.of("on", isa=isa, precision=precision))
    ours, stocks = errors(found, exact), errors(theirs, exact)
    print(f"{kind} {isa or 'native'} {precision}: picture, text, both: {ours}, stock's {stocks}")
    assert {choice.winner.split()[0] for choice in LEDGER.choices} == {"cuda"}
    assert not [refusal for refusal in LEDGER.refusals if refusal.candidate == "cuda" or refusal.op == "flux block"]
    most = 1.1 if precision == "precise" else 1.9  # what half sums may cost, as linear.cu has it
    assert all(mine <= most * theirs for mine, theirs in zip(ours, stocks, strict=True))


def test_what_is_fastest_is_as_near(klein):
    exact, theirs = klein.run(None, torch.float32), klein.run(None)
    forgotten()
    for _ in range(2):  # chosen, and then served
        ours = errors(until_chosen(lambda: klein.run(KernelPolicy())), exact)
    print("chosen:", sorted({f"{choice.op}: {choice.winner}" for choice in LEDGER.choices}))
    assert all(mine <= 1.1 * theirs for mine, theirs in zip(ours, errors(theirs, exact), strict=True))


def test_turbo(klein, isa):
    exact = klein.run(None, torch.float32)
    ours = errors(klein.run(KernelPolicy.of("on", isa=isa, precision="turbo")), exact)
    print(f"turbo {isa or 'native'}: {ours}")
    assert max(ours) < 0.05


@pytest.mark.parametrize("default", ["on", "auto"])
def test_what_overflows_is_the_largest_number(isa, default):
    """By our product's epilogue, and by the pass behind cuBLAS'."""
    blocks = Blocks("flux2", 16)
    for matrix in (
        blocks.double.img_mlp[2],
        blocks.double.txt_mlp[2],
        blocks.double.txt_attn.proj,
        blocks.single.linear2,
    ):
        matrix.weight[3], matrix.weight[5] = 60000, -60000
    for stream in blocks.run(KernelPolicy.of(default, isa=isa)):
        assert bool(stream.isfinite().all()) and float(stream.abs().max()) == 65504


def test_segments_have_modulation_of_their_own(klein, isa):
    """Both rows the same: as if there were one."""
    policy = KernelPolicy.of("on", isa=isa)
    whole = klein.run(policy)
    tokens = klein.img.shape[1]
    apart = klein.run(policy, modulation_dims_img=[(0, 600, 0), (600, tokens, 0)])
    assert max(errors(apart, whole)) < 1e-3


def test_memory():
    """Of a single block at 1024x1024: nine tensors of the size of x, the caller's among them, and a chunk."""
    from fusestream.fusion.families.flux2.need import SLACK
    from fusestream.fusion.fused import attention
    from fusestream.kernels_cuda.ops.matmul.mlp import CHUNK_BYTES

    blocks = Blocks("flux2", 64)
    policy = KernelPolicy()
    blocks.run(policy)
    blocks.run(policy)
    x = torch.cat((blocks.txt, blocks.img), 1)
    unit = x.nbytes
    options: dict[str, Any] = {}
    attention.install(type("Model", (), {"model_options": {"transformer_options": options}}), policy)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - unit
    blocks.single(x, vec=blocks.mod, pe=blocks.pe, transformer_options=options)
    taken = torch.cuda.max_memory_allocated() - before
    print(f"a single block at 1024x1024: {taken / unit:.2f} units of x, {taken / 2**30:.2f} GiB")
    assert taken <= SLACK * (9 * unit + CHUNK_BYTES)


@pytest.mark.timed
def test_faster_than_stock():
    """Milliseconds of both blocks at 1024x1024, their weights on the card."""
    blocks = Blocks("flux2", 64)
    found = {}
    for name, policy in (("stock", None), ("auto", KernelPolicy()), ("on", KernelPolicy.of("on"))):
        until_chosen(lambda policy=policy: blocks.run(policy))
        for _ in range(3):
            blocks.run(policy)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            blocks.run(policy)
        end.record()
        end.synchronize()
        found[name] = start.elapsed_time(end) / 5
    print(f"ms: {found}")
    assert found["auto"] < found["stock"]

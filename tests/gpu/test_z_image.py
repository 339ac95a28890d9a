"""Stock's Z-Image block at its width, with random weights, over our kernels, in an fp16 stream and an fp32 one. Needs a ComfyUI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu.support import compared, error, in_turns, ratio

from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

DIM, HEADS, AXES = 3840, 30, (32, 48, 48)


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Block:
    """A block, what goes into it, and stock's of the same weights."""

    def __init__(self, side: int, batch: int = 1) -> None:
        import comfy.ldm.lumina.model as stock
        import comfy.ops
        from comfy.ldm.flux.layers import EmbedND

        from fusestream.fusion.families.z_image import block as z_image

        settings = {"operations": comfy.ops.manual_cast, "device": "cuda", "dtype": torch.float16}
        self.module: Any = stock.JointTransformerBlock(
            0, DIM, HEADS, HEADS, 256, 8 / 3, 1e-5, True, True, z_image_modulation=True, operation_settings=settings
        )
        generator = torch.Generator(device="cuda").manual_seed(3)
        for parameter in self.module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
            parameter.normal_(0.0 if parameter.ndim == 2 else 0.5, scale, generator=generator)
        z_image.fuse(torch.nn.ModuleList([self.module]))
        tokens = 96 + side * side
        self.x = torch.randn(batch, tokens, DIM, device="cuda", generator=generator)
        self.adaln = torch.randn(batch, 256, device="cuda", generator=generator)
        ids = torch.zeros(1, tokens, 3, device="cuda")
        ids[:, :96, 0] = torch.arange(96, device="cuda") + 1
        ids[:, 96:, 1] = torch.arange(side, device="cuda").repeat_interleave(side)
        ids[:, 96:, 2] = torch.arange(side, device="cuda").repeat(side)
        self.freqs = EmbedND(dim=DIM // HEADS, theta=256.0, axes_dim=list(AXES))(ids).movedim(1, 2)

    def run(self, policy: KernelPolicy | None, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        """policy None: stock's own."""
        from fusestream.fusion.fused import attention

        options: dict[str, Any] = {}
        if policy is not None:
            attention.install(type("Model", (), {"model_options": {"transformer_options": options}}), policy)
        found: torch.Tensor = self.module(
            self.x.to(dtype), None, self.freqs, self.adaln.to(dtype), transformer_options=options
        )
        return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32 stream"])
@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_as_near_as_fp16_gets(isa, dtype, precision):
    block = Block(25, batch=2)
    exact, theirs = block.run(None, torch.float32), error(block.run(None), block.run(None, torch.float32))
    for op in OPS.values():
        op.forget()  # or nothing is chosen, and nothing noted
    LEDGER.clear()
    found = block.run(KernelPolicy.of("on", isa=isa, precision=precision), dtype)
    ours = error(found, exact)
    print(f"{isa or 'native'} {precision} {dtype}: error {ours:.3g}, stock fp16 {theirs:.3g}")
    assert found.dtype is dtype and {choice.winner.split()[0] for choice in LEDGER.choices} == {"cuda"}
    assert not [refusal for refusal in LEDGER.refusals if refusal.candidate == "cuda" or "block" in refusal.op]
    assert ours <= theirs * (1.1 if precision == "precise" else 1.9)


def test_turbo(isa):
    block = Block(40)
    ours = error(block.run(KernelPolicy.of("on", isa=isa, precision="turbo")), block.run(None, torch.float32))
    print(f"turbo {isa or 'native'}: {ours:.3g}")
    assert ours < 0.05


@pytest.mark.parametrize("default", ["on", "auto"])
def test_what_overflows_stays_finite(isa, default):
    block = Block(16)
    for matrix in (block.module.attention.out, block.module.feed_forward.w2):
        matrix.weight[3], matrix.weight[5] = 60000, -60000
    assert bool(block.run(KernelPolicy.of(default, isa=isa)).isfinite().all())


@pytest.mark.timed
def test_faster_than_stock():
    """Milliseconds of a block at 1024x1024, its weights on the card."""
    block = Block(64)
    found = in_turns(
        stock=lambda: block.run(None),
        on=lambda: block.run(KernelPolicy.of("on")),
        auto=lambda: block.run(KernelPolicy()),
    )
    print(f"ms: {compared(found, 1)}")
    assert ratio(found) < 1

"""A Wan block over 8-bit numbers on the card: `turbo` forced, in both instruction classes, against the same block of halves."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from fusestream.kernels_cuda import KernelPolicy

pytestmark = [
    pytest.mark.usefixtures("as_comfyui_runs"),
    pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI"),
]

DIM, HEADS, TOKENS = 512, 4, 1500  # more tokens than a weight must be rounded for, and no multiple of a tile
KINDS = ("one scale", "rows", "convrot")


def block_of(tensors: dict[str, torch.Tensor], *, quantised: bool) -> Any:
    import comfy.ldm.wan.model
    import comfy.ops

    from fusestream.fusion.families.wan import block as wan

    operations: Any = (
        comfy.ops.mixed_precision_ops({}, torch.float16) if quantised else comfy.ops.disable_weight_init
    )  # fmt: skip
    settings = {"operations": operations, "device": "cuda", "dtype": torch.float16}
    made: Any = comfy.ldm.wan.model.WanAttentionBlock(
        "t2v_cross_attn", DIM, 2 * DIM, HEADS, (-1, -1), True, True, operation_settings=settings
    )
    made.load_state_dict(tensors)
    wan.fuse(made)
    return made


def weights(kind: str | None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A block's, stored in 8 bits, and what they stand for as halves; kind None: of halves both."""
    import comfy.ldm.wan.model
    import comfy.ops
    import int8_files

    operations: Any = comfy.ops.disable_weight_init
    settings = {"operations": operations, "device": "cpu", "dtype": torch.float16}
    plain = comfy.ldm.wan.model.WanAttentionBlock(
        "t2v_cross_attn", DIM, 2 * DIM, HEADS, (-1, -1), True, True, operation_settings=settings
    )
    stored, halves = {}, {}
    for name, parameter in plain.state_dict().items():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
        value = (torch.randn(parameter.shape) * scale + (0 if parameter.ndim == 2 else 0.5)).half()
        stored[name] = halves[name] = value
        if kind is not None and name.endswith(".weight") and value.ndim == 2:
            one = int8_files.quantised(value, int8_files.KINDS[kind])
            stored |= int8_files.state_dict(one, name.removesuffix(".weight"))
            halves[name] = int8_files.numbers(one)
    return stored, halves


class Inputs:
    """Of a batch of two."""

    def __init__(self) -> None:
        self.x, self.context = (torch.randn(2, count, DIM, device="cuda").half() for count in (TOKENS, 77))
        self.e = torch.randn(2, 6, DIM, device="cuda").half() * 0.3
        angle = torch.randn(1, TOKENS, 1, DIM // HEADS // 2, device="cuda")
        self.freqs = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), -1).unflatten(-1, (2, 2))

    def run(self, block: Any, policy: KernelPolicy) -> torch.Tensor:
        from fusestream.fusion.fused import attention

        model: Any = type("Model", (), {"model_options": {"transformer_options": {}}})
        attention.install(model, policy)
        given = {"e": self.e, "freqs": self.freqs, "context": self.context, "context_img_len": None}
        out: torch.Tensor = block(self.x, **given, transformer_options=model.model_options["transformer_options"])
        return out


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other).norm() / other.double().norm())


@pytest.mark.parametrize("isa", ["sm_75", "sm_80"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_8_bit_numbers(kind: str, isa: Any) -> None:
    """Precise: the halves are the same bits, and so are the kernels. Turbo: 0.7 % for each of four products in a row, and what
    attention rounds; a rotation that was not undone would be off by more than half."""
    stored, halves = weights(kind)
    of_int8, of_halves, inputs = block_of(stored, quantised=True), block_of(halves, quantised=False), Inputs()
    precise = inputs.run(of_int8, KernelPolicy.of("on", isa=isa))
    assert torch.equal(precise, inputs.run(of_halves, KernelPolicy.of("on", isa=isa)))
    turbo = inputs.run(of_int8, KernelPolicy.of("on", precision="turbo", isa=isa))
    assert 0.002 < distance(turbo, precise) < 0.04
    # Auto multiplies the same bytes, and attention rounds nothing.
    auto = inputs.run(of_int8, KernelPolicy.of("on", precision="auto", isa=isa))
    assert 0.002 < distance(auto, precise) < 1.05 * distance(turbo, precise)
    assert torch.equal(inputs.run(of_halves, KernelPolicy.of("on", precision="auto", isa=isa)), precise)


@pytest.mark.parametrize("isa", ["sm_75", "sm_80"])
def test_halves_are_rounded_as_they_are_used(isa: Any) -> None:
    block, inputs = block_of(weights(None)[1], quantised=False), Inputs()
    precise, turbo = (
        inputs.run(block, KernelPolicy.of("on", precision=tier, isa=isa)) for tier in ("precise", "turbo")
    )
    assert 0.002 < distance(turbo, precise) < 0.04


@pytest.mark.parametrize("isa", ["sm_75", "sm_80"])
def test_a_long_x_is_rounded_in_pieces(monkeypatch: pytest.MonkeyPatch, isa: Any) -> None:
    """Sums of whole numbers are exact: the same bits."""
    from fusestream.fusion.weights import products

    block, inputs = block_of(weights("convrot")[0], quantised=True), Inputs()
    policy = KernelPolicy.of("on", precision="turbo", isa=isa)
    wanted = inputs.run(block, policy)
    monkeypatch.setattr(products, "ROUNDED_BYTES", 768 * DIM)
    assert torch.equal(inputs.run(block, policy), wanted)


def test_auto_takes_what_the_rule_allows() -> None:
    """On a card that gains nothing, products stay in FP16, and only attention rounds."""
    from fusestream.kernels_cuda.binary.arch import int8_pays
    from fusestream.kernels_cuda.ledger import LEDGER

    LEDGER.clear()
    stored, _ = weights("convrot")
    block, inputs = block_of(stored, quantised=True), Inputs()
    precise, turbo = (inputs.run(block, KernelPolicy.of(precision=tier)) for tier in ("precise", "turbo"))
    assert distance(turbo, precise) < 0.04
    chosen = {choice.op for choice in LEDGER.choices}
    assert ("linear_int8" in chosen) is int8_pays(torch.cuda.get_device_capability(), is_stored=True)

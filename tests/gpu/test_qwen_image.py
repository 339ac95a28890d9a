"""Two of stock's Qwen-Image blocks at the published width, with random weights, over our kernels, around an fp32 stream. Needs a
ComfyUI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu.support import compared, error, in_turns, ratio
from torch import Tensor

from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

DEVICE, DIM, HEADS, AXES, COUNT = "cuda", 3072, 24, (16, 56, 56), 2
TEXT = 77
BF16, SINGLE, EXACT = torch.bfloat16, torch.float32, torch.float64
LARGE = 3e5  # of some channels of both streams, as those of published weights: fp16 ends at 65504
STORAGES = pytest.mark.parametrize("storage", ["halves", "convrot"])
Streams = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Network:
    """Blocks, what goes into them, and stock's of the same weights. storage: "halves", or a kind of integers."""

    def __init__(self, side: int, storage: str = "halves", batch: int = 1) -> None:
        from comfy.ldm.flux.layers import EmbedND

        from fusestream.fusion.families.qwen_image import block as qwen_image

        generator = torch.Generator(device=DEVICE).manual_seed(3)
        self.stored, self.numbers = weights(storage, generator)
        self.is_quantised = storage != "halves"
        self.ours = self.stocks(SINGLE)
        qwen_image.fuse(self.ours)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, generator=generator)

        tokens = TEXT + side * side
        self.text, self.picture, self.temb = drawn(batch, TEXT, DIM), drawn(batch, side * side, DIM), drawn(batch, DIM)
        self.text[:, :, 5], self.picture[:, ::3, 9] = LARGE, -LARGE
        ids = torch.zeros(1, tokens, 3, device=DEVICE)
        ids[:, :TEXT] = torch.arange(TEXT, device=DEVICE)[:, None] + side // 2
        ids[:, TEXT:, 1] = torch.arange(side, device=DEVICE).repeat_interleave(side) - side // 2
        ids[:, TEXT:, 2] = torch.arange(side, device=DEVICE).repeat(side) - side // 2
        self.pe = EmbedND(dim=DIM // HEADS, theta=10000, axes_dim=list(AXES))(ids)

    def stocks(self, dtype: torch.dtype) -> Any:
        """Stock's blocks of the file's weights, for a stream of this type."""
        import comfy.ops

        quantised: Any = comfy.ops.mixed_precision_ops({}, dtype) if self.is_quantised else comfy.ops.manual_cast
        made = torch.nn.ModuleList([built(quantised) for _ in range(COUNT)])
        made.load_state_dict(self.stored, assign=True)
        return made.to(DEVICE)

    def exact(self, zero: int | None = None) -> Streams:
        """By stock in fp64, a block at a time, of the numbers that the file's are."""
        import comfy.ldm.qwen_image.model as stock
        import comfy.ops

        found = self.text.double(), self.picture.double()
        for i in range(COUNT):
            block = built(comfy.ops.disable_weight_init).to(EXACT)
            of_it = {name.removeprefix(f"{i}."): t for name, t in self.numbers.items() if name.startswith(f"{i}.")}
            block.load_state_dict(of_it)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(stock, "apply_rope1", turned)  # comfy-kitchen's takes no fp64
                found = self._passed([block.to(DEVICE)], found, {}, zero)
        return found

    def run(
        self, blocks: Any, policy: KernelPolicy | None, dtype: torch.dtype = SINGLE, zero: int | None = None
    ) -> Streams:
        """policy None: stock's own."""
        from fusestream.fusion.fused import attention

        options: dict[str, Any] = {}
        if policy is not None:
            attention.install(type("Model", (), {"model_options": {"transformer_options": options}}), policy)
        return self._passed(blocks, (self.text.to(dtype), self.picture.to(dtype)), options, zero)

    def _passed(self, blocks: Any, streams: Streams, options: dict[str, Any], zero: int | None) -> Streams:
        text, picture = streams
        temb = self.temb if zero is None else torch.cat((self.temb, self.temb.flip(-1)))
        for block in blocks:
            given = temb.to(text.dtype), self.pe.to(text.dtype), zero
            text, picture = block(picture, text, None, *given, transformer_options=options)
        return text, picture


def turned(x: Tensor, freqs: Tensor) -> Tensor:
    """RoPE of x [batch, heads, tokens, d], in its type."""
    pairs = x.unflatten(-1, (-1, 1, 2))
    return (freqs[..., 0] * pairs[..., 0] + freqs[..., 1] * pairs[..., 1]).flatten(-2)


def built(operations: Any) -> Any:
    import comfy.ldm.qwen_image.model as stock

    return stock.QwenImageTransformerBlock(
        DIM, HEADS, DIM // HEADS, dtype=torch.float16, device="cpu", operations=operations
    )


def weights(storage: str, generator: torch.Generator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As a file has them, and the numbers that they are. Halves are such as bf16 has, too, so that stock's bf16 rounds none."""
    import comfy.ops
    import int8_files

    plain = torch.nn.ModuleList([built(comfy.ops.disable_weight_init) for _ in range(COUNT)])
    stored, numbers = {}, {}
    for name, parameter in plain.state_dict().items():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
        drawn = torch.randn(parameter.shape, device=DEVICE, generator=generator) * scale
        value = (drawn + (0 if parameter.ndim == 2 or name.endswith("bias") else 1)).to(BF16).half().cpu()
        stored[name] = numbers[name] = value
        if storage != "halves" and value.ndim == 2 and "_mod." not in name:
            one = int8_files.quantised(value, int8_files.KINDS[storage])
            stored |= int8_files.state_dict(one, name.removesuffix(".weight"))
            numbers[name] = int8_files.numbers(one)
    return stored, numbers


def errors(found: Streams, exact: Streams) -> tuple[float, ...]:
    """Of each stream, without the large channels, beside which no error of the others would show."""
    kept = torch.ones(DIM, dtype=torch.bool, device=DEVICE)
    kept[5] = kept[9] = False
    return tuple(error(one[..., kept], other[..., kept]) for one, other in zip(found, exact, strict=True))


@STORAGES
@pytest.mark.parametrize("zero", [None, 400], ids=["", "references at timestep zero"])
def test_nearer_than_bf16_gets(isa: Any, storage: str, zero: int | None) -> None:
    """With integers as near: the same numbers are multiplied, and those that are rounded are nearer."""
    net = Network(25, storage, batch=2)
    exact, theirs = net.exact(zero), net.run(net.stocks(BF16), None, BF16, zero)
    for op in OPS.values():
        op.forget()  # or nothing is chosen, and nothing noted
    LEDGER.clear()
    found = net.run(net.ours, KernelPolicy.of("on", isa=isa, precision="auto"), SINGLE, zero)
    ours, bf16 = errors(found, exact), errors(theirs, exact)
    print(f"{isa or 'native'} {storage}: errors of text and picture {ours}, stock bf16 {bf16}")
    assert all(one.dtype is SINGLE for one in found)
    assert {choice.winner.split()[0] for choice in LEDGER.choices} == {"cuda"}
    assert not [refusal for refusal in LEDGER.refusals if refusal.candidate == "cuda" or "block" in refusal.op]
    most = 0.5 if storage == "halves" else 1.1
    assert all(one <= most * other for one, other in zip(ours, bf16, strict=True))


@STORAGES
def test_what_is_too_large_for_fp16_passes(isa: Any, storage: str) -> None:
    net = Network(16, storage)
    before = net.text.clone(), net.picture.clone()
    found = net.run(net.ours, KernelPolicy.of("on", isa=isa, precision="auto"))
    assert all(error(one, other) < 1e-3 for one, other in zip(found, net.exact(), strict=True))
    assert torch.equal(net.text, before[0]) and torch.equal(net.picture, before[1])


@pytest.mark.parametrize("default", ["on", "auto"])
def test_what_overflows_between_products_stays_finite(isa: Any, default: Any) -> None:
    net = Network(16)
    for name in ("attn.to_v", "attn.to_out.0", "img_mlp.net.0.proj", "txt_mlp.net.2"):
        matrix = net.ours[0].get_submodule(name).weight
        matrix[3], matrix[5] = 60000, -60000
    assert all(bool(one.isfinite().all()) for one in net.run(net.ours, KernelPolicy.of(default, isa=isa)))


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an RTX 20, where stock computes a model without FP16 in FP32."""
    from fusestream.fusion.fused import attention, operations

    for module in (attention, operations):
        monkeypatch.setattr(module, "narrows", lambda x: x.dtype is SINGLE)


def by_operations(net: Network, policy: KernelPolicy) -> Callable[[], Streams]:
    """The way of any model: stock's blocks in fp32, whose products and attention alone are ours."""
    from fusestream.fusion.base.hooks import RUNNING
    from fusestream.fusion.fused import operations

    blocks = net.stocks(SINGLE)
    operations.fuse(blocks)
    blocks.__dict__[RUNNING].policy = policy
    return lambda: net.run(blocks, policy)


@pytest.mark.timed
@STORAGES
def test_faster_than_the_way_of_any_model(storage: str, without_bf16: None) -> None:
    """Milliseconds of a block at 1024x1024, its weights on the card."""
    net, policy = Network(64, storage), KernelPolicy.of(precision="auto")
    in_bf16 = net.stocks(BF16)
    found = in_turns(
        operations=by_operations(net, policy),
        stock_bf16=lambda: net.run(in_bf16, None, BF16),
        on=lambda: net.run(net.ours, KernelPolicy.of("on", precision="auto")),
        auto=lambda: net.run(net.ours, policy),
    )
    print(f"{storage}, ms: {compared(found, COUNT)}")
    assert ratio(found) < 1

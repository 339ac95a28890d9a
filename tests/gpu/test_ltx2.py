"""Stock's LTX-2.3 blocks at their widths, with random weights, over our kernels: in an fp32 stream, as on a card without
BF16. Needs a ComfyUI."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu.support import compared, error, in_turns, until_chosen

from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

BLOCKS = 2
DIM, SOUND, HEADS = 4096, 2048, 32
FRAMES, PIXELS, STEPS, TEXT = 16, 384, 126, 1024  # 512x768, 121 frames
FP32, BF16 = torch.float32, torch.bfloat16
Streams = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Net:
    """Two blocks with what goes into them. frames: of the video."""

    def __init__(self, frames: int, storage: str = "fp16") -> None:
        self.generator = torch.Generator(device="cuda").manual_seed(3)
        self.frames, self.tokens = frames, frames * PIXELS
        self.plain = self.built(torch.float16)
        for name, parameter in self.plain.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
            parameter.normal_(1.0 if "norm" in name else 0.0, scale, generator=self.generator)
        if storage == "fp16":
            self.fused = copy.deepcopy(self.plain)
        else:  # of which torch makes no copies
            self.plain, self.fused = (self.of_integers(storage) for _ in range(2))
        from fusestream.fusion.families.ltx2 import block as ltx2

        assert ltx2.fuse(self.fused) == BLOCKS
        self.streams = self.drawn(1, self.tokens, DIM), self.drawn(1, STEPS, SOUND)
        self.given = {
            name: self.drawn(*shape)
            for name, shape in {
                "v_context": (1, TEXT, DIM),
                "a_context": (1, TEXT, SOUND),
                "a_timestep": (1, 1, 9 * SOUND),
                "a_cross_scale_shift_timestep": (1, 1, 4 * SOUND),
                "a_cross_gate_timestep": (1, 1, SOUND),
                "v_prompt_timestep": (1, 1, 2 * DIM),
                "a_prompt_timestep": (1, 1, 2 * SOUND),
            }.items()
        }
        self.of_frames = {
            "v_timestep": self.drawn(1, frames, 9 * DIM),
            "v_cross_scale_shift_timestep": self.drawn(1, frames, 4 * DIM),
            "v_cross_gate_timestep": self.drawn(1, frames, DIM),
        }
        self.angles = {
            "v_pe": self.drawn(1, self.tokens, DIM // 2),
            "a_pe": self.drawn(1, STEPS, SOUND // 2),
            "v_cross_pe": self.drawn(1, self.tokens, SOUND // 2),
            "a_cross_pe": self.drawn(1, STEPS, SOUND // 2),
        }

    @staticmethod
    def built(dtype: torch.dtype, operations: Any = None) -> Any:
        import comfy.ldm.lightricks.av_model as stock
        import comfy.ops

        settings = {"operations": operations or comfy.ops.manual_cast, "device": "cuda", "dtype": dtype}
        kind = {"apply_gated_attention": True, "cross_attention_adaln": True}
        made = (
            stock.BasicAVTransformerBlock(DIM, SOUND, HEADS, HEADS, 128, 64, DIM, SOUND, **kind, **settings)
            for _ in range(BLOCKS)
        )
        return torch.nn.ModuleList(made)

    def of_integers(self, storage: str) -> Any:
        """The same blocks with their matrices in 8 bits, as a file has them."""
        import comfy.ops
        import int8_files

        tensors = dict(self.plain.state_dict())
        for name, value in list(tensors.items()):
            if name.endswith(".weight") and value.ndim == 2:
                one = int8_files.quantised(value.cpu(), int8_files.KINDS[storage])
                tensors |= int8_files.state_dict(one, name.removesuffix(".weight"))
        made = self.built(torch.float16, comfy.ops.mixed_precision_ops({}, FP32))
        made.load_state_dict(tensors)
        return made.cuda()

    def drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=self.generator)

    def run(self, policy: KernelPolicy | None, dtype: torch.dtype = FP32, net: Any = None) -> Streams:
        """policy None: stock's own, or what `net` is."""
        import comfy.ldm.lightricks.av_model as stock
        import comfy.ldm.lightricks.model as layers

        from fusestream.fusion.fused import attention

        options: dict[str, Any] = {}
        if policy is not None:
            attention.install(type("Model", (), {"model_options": {"transformer_options": options}}), policy)
        given: dict[str, Any] = {name: value.to(dtype) for name, value in self.given.items()}
        for name, value in self.of_frames.items():
            given[name] = stock.CompressedTimestep(value.to(dtype), PIXELS, per_frame=True)
        for name, value in self.angles.items():
            given[name] = layers.freqs_cis_matrix(3 * value, 0, True, HEADS, dtype)
        streams: Streams = tuple(one.to(dtype, copy=True) for one in self.streams)  # type: ignore[assignment]
        for block in net or (self.plain if policy is None else self.fused):
            streams = block(streams, transformer_options=options, **given)
        return streams


def changes(net: Net, found: Streams) -> Streams:
    """What was added to the streams."""
    return tuple(one.double() - before for one, before in zip(found, net.streams, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_as_near_as_stocks_bf16(isa, precision):
    net = Net(4)
    exact, theirs = (changes(net, net.run(None, dtype)) for dtype in (FP32, BF16))
    for op in OPS.values():
        op.forget()  # or nothing is chosen, and nothing noted
    LEDGER.clear()
    found = net.run(KernelPolicy.of("on", isa=isa, precision=precision))
    for one, other, wanted in zip(changes(net, found), theirs, exact, strict=True):
        ours, stocks = error(one, wanted), error(other, wanted)
        print(f"{isa or 'native'} {precision}: error {ours:.3g}, stock bf16 {stocks:.3g}")
        assert ours <= stocks
    assert {choice.winner.split()[0] for choice in LEDGER.choices} == {"cuda"}
    assert not [refusal for refusal in LEDGER.refusals if refusal.candidate == "cuda" or "block" in refusal.op]


def test_a_file_of_8_bit_numbers(isa):
    """No further from the numbers of the file than stock's products of it in BF16."""
    net = Net(2, "convrot")
    exact, theirs = changes(net, net.run(KernelPolicy.of("on", isa=isa))), changes(net, net.run(None, BF16))
    found = changes(net, net.run(KernelPolicy.of("on", isa=isa, precision="auto")))
    for one, other, wanted in zip(found, theirs, exact, strict=True):
        ours, stocks = error(one, wanted), error(other, wanted)
        print(f"int8 {isa or 'native'}: error {ours:.3g}, stock bf16 {stocks:.3g}")
        assert 0 < ours <= 1.25 * stocks


def test_numbers_that_fp16_does_not_hold(isa):
    net = Net(2)
    net.streams[0][:, ::97] *= 1e5
    found = net.run(KernelPolicy.of("on", isa=isa))
    assert all(bool(one.isfinite().all()) for one in found) and float(found[0].abs().max()) > 1e5


@pytest.mark.timed
@pytest.mark.parametrize("storage", ["fp16", "convrot"])
def test_how_long_blocks_take(storage, monkeypatch):
    """Milliseconds of two blocks, weights on the card: stock's BF16, the operations of a model without a family in FP32 as
    on a card without BF16, and ours."""
    from fusestream.fusion.base.hooks import RUNNING
    from fusestream.fusion.fused import attention, operations

    net = Net(FRAMES, storage)
    general = copy.deepcopy(net.plain)
    operations.fuse(general)
    for module in (attention, operations):
        monkeypatch.setattr(module, "narrows", lambda x: x.dtype is FP32)

    def by_operations() -> Streams:
        policy = KernelPolicy.of(precision="auto")
        general.__dict__[RUNNING].policy = policy
        with operations.turning(policy):
            return net.run(policy, net=general)

    def ours() -> Streams:
        return net.run(KernelPolicy.of(precision="auto"))

    for run in (by_operations, ours):
        until_chosen(run)
    found = in_turns(stock_bf16=lambda: net.run(None, BF16), operations=by_operations, ours=ours)
    print(f"{storage} ms: {compared(found, 1)}")
    assert min(found["ours"]) < min(found["operations"])

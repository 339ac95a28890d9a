"""Stock's MiniMax H3 blocks at their width, with random weights, over our kernels: in an fp32 stream, as on a card without
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
DIM, HEADS, HEAD, FFN, TIME = 5376, 56, 128, 14336, 8  # a pruned file's
TEXT, SOUND, FRAME = 256, 414, 390  # tokens; a frame's of 480x832
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Net:
    """Two blocks with what goes into them. frames: of the video's latent."""

    def __init__(self, frames: int, storage: str = "fp16") -> None:
        import comfy.ldm.minimax.model as stock

        from fusestream.fusion.families.minimax_h3 import block as minimax_h3

        generator = torch.Generator(device="cuda").manual_seed(3)
        self.plain = self.built(torch.float16)
        for name, parameter in self.plain.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
            parameter.normal_(1.0 if "norm" in name else 0.0, scale, generator=generator)
        if storage == "fp16":
            self.fused = copy.deepcopy(self.plain)
        else:  # of which torch makes no copies
            self.plain, self.fused = (self.of_integers(storage) for _ in range(2))
        for each in (self.plain, self.fused):
            each.requires_grad_(False)
        assert minimax_h3.fuse(self.fused) == BLOCKS
        sound = TEXT + SOUND
        tokens = sound + frames * FRAME
        self.segments = [(0, 100, 1), (100, 140, 0), (140, TEXT, 1), (TEXT, sound, 5), (sound, tokens, 0)]
        self.x = torch.randn(tokens, DIM, device="cuda", generator=generator)
        self.t_emb = torch.randn(2, TIME, device="cuda", generator=generator)
        angles = torch.randn(tokens, 48, device="cuda", generator=generator).repeat(1, 2)
        self.freqs = stock.rope_rotation_table(3 * angles, FP32)

    @staticmethod
    def built(dtype: torch.dtype, operations: Any = None) -> Any:
        import comfy.ldm.minimax.model as stock
        import comfy.ops

        settings = {"operations": operations or comfy.ops.manual_cast, "device": "cuda", "dtype": dtype}
        kind = {"apply_silu": False, "adaln_dtype": FP32}
        blocks = (stock.DiTBlock(DIM, HEADS, HEAD, FFN, TIME, 1e-5, 1e-5, **kind, **settings) for _ in range(BLOCKS))
        return torch.nn.ModuleList(blocks)

    def of_integers(self, storage: str) -> Any:
        """The same blocks with their matrices in 8 bits, as a file has them."""
        import comfy.ops
        import int8_files

        tensors = dict(self.plain.state_dict())
        for name, value in list(tensors.items()):
            if name.endswith(".weight") and value.ndim == 2 and "adaln" not in name:
                one = int8_files.quantised(value.cpu(), int8_files.KINDS[storage])
                tensors |= int8_files.state_dict(one, name.removesuffix(".weight"))
        made = self.built(torch.float16, comfy.ops.mixed_precision_ops({}, FP32))
        made.load_state_dict(tensors)
        return made.cuda()

    def run(self, policy: KernelPolicy | None, dtype: torch.dtype = FP32, net: Any = None) -> torch.Tensor:
        """What is added to the stream. policy None: stock's own, or what `net` is."""
        from fusestream.fusion.fused import attention

        options: dict[str, Any] = {}
        if policy is not None:
            attention.install(type("Model", (), {"model_options": {"transformer_options": options}}), policy)
        x = self.x.to(dtype, copy=True)  # blocks write to it
        t_emb, freqs = self.t_emb.to(torch.promote_types(dtype, FP32)), self.freqs.to(dtype)
        for block in net or (self.plain if policy is None else self.fused):
            x = block(x, t_emb, self.segments, freqs, transformer_options=options)
        return x.double() - self.x

    def exact(self) -> torch.Tensor:
        """Stock's in fp64, of halves."""
        wide = copy.deepcopy(self.plain).double()
        for block in wide:  # kitchen turns no fp64
            block.attn.forward = _attention.__get__(block.attn)
        return self.run(None, torch.float64, wide)


def _attention(attn: Any, x: torch.Tensor, rope_freqs: Any = None, transformer_options: Any = None) -> torch.Tensor:
    """Stock's Attention in torch alone."""
    q, k, v = (one.unflatten(-1, (attn.heads, -1)) for one in attn.qkv_proj(x).chunk(3, -1))
    turned = []
    for one, norm in ((q, attn.q_norm), (k, attn.k_norm)):
        normed = torch.nn.functional.rms_norm(one, one.shape[-1:], norm.weight, norm.eps)
        half = rope_freqs.shape[-3]
        first, second, rest = normed.split((half, half, normed.shape[-1] - 2 * half), -1)
        table = rope_freqs[0]  # [tokens, 1, half, 2, 2]
        turn = [table[..., row, 0] * first + table[..., row, 1] * second for row in (0, 1)]
        turned.append(torch.cat((*turn, rest), -1))
    out = torch.empty_like(v)
    for head in range(attn.heads):  # all scores at once would fill a card
        scores = (turned[0][:, head] @ turned[1][:, head].T) * attn.head_dim**-0.5
        out[:, head] = scores.softmax(-1) @ v[:, head]
    return attn.out_proj(out.flatten(1))


@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_as_near_as_stocks_bf16(isa, precision):
    net = Net(4)
    exact, theirs = net.exact(), net.run(None, BF16)
    for op in OPS.values():
        op.forget()  # or nothing is chosen, and nothing noted
    LEDGER.clear()
    ours, stocks = error(net.run(KernelPolicy.of("on", isa=isa, precision=precision)), exact), error(theirs, exact)
    print(f"{isa or 'native'} {precision}: error {ours:.3g}, stock bf16 {stocks:.3g}")
    assert ours <= stocks
    assert {choice.winner.split()[0] for choice in LEDGER.choices} == {"cuda"}
    assert not [refusal for refusal in LEDGER.refusals if refusal.candidate == "cuda" or "block" in refusal.op]


def test_a_file_of_8_bit_numbers(isa):
    """No further from the numbers of the file than stock's products of it in BF16."""
    net = Net(2, "convrot")
    exact, theirs = net.run(KernelPolicy.of("on", isa=isa)), net.run(None, BF16)
    ours = error(net.run(KernelPolicy.of("on", isa=isa, precision="auto")), exact)
    print(f"int8 {isa or 'native'}: error {ours:.3g}, stock bf16 {error(theirs, exact):.3g}")
    assert 0 < ours <= 1.25 * error(theirs, exact)


def test_numbers_that_fp16_does_not_hold(isa):
    net = Net(2)
    net.x[:, ::97] *= 1e5
    found = net.run(KernelPolicy.of("on", isa=isa)) + net.x
    assert bool(found.isfinite().all()) and float(found.abs().max()) > 1e5


@pytest.mark.timed
@pytest.mark.parametrize("storage", ["fp16", "convrot"])
def test_how_long_blocks_take(storage):
    """Milliseconds of two blocks at 480x832x124, weights on the card, beside stock's in BF16."""
    net = Net(37, storage)

    def ours() -> torch.Tensor:
        return net.run(KernelPolicy.of(precision="auto"))

    until_chosen(ours)
    found = in_turns(stock_bf16=lambda: net.run(None, BF16), ours=ours)
    print(f"{storage} ms: {compared(found, 1)}")

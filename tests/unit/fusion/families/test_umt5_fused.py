"""T5 encoders over our ops, with the references on the CPU: what they make of prompts, beside stock's FP32."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import comfy.model_management
import comfy.ops
import comfy.sd1_clip
import comfy.text_encoders.t5
import comfy.utils
import pytest
import torch
from live_memory import no_collector

from fusestream.fusion.base.hooks import STREAMED
from fusestream.fusion.families.t5 import encoder as t5
from fusestream.fusion.text.common import FusedEmbedding, gather
from fusestream.fusion.weights import fp32_residual, operands
from fusestream.fusion.weights.fp32_residual import Wide
from fusestream.kernels_cuda import KernelPolicy, KernelRefused

WIDTH, HEADS, FFN, LAYERS = 64, 2, 160, 3
PRECISIONS = ("precise", "fast", "turbo")
# Relative error of the encoding beside stock's, which computes the same fp16 weights in FP32.
ALLOWED = {"precise": 4e-4, "fast": 1.5e-3, "turbo": 1.5e-3}


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


def build(kind: str = "umt5", dtype: torch.dtype = torch.float16, *, gated: bool = True, **options: Any) -> Any:
    """Stock's text encoder model around a small T5, as stock's UMT5XXlModel makes it."""
    config = {
        "num_layers": LAYERS, "d_model": WIDTH, "d_kv": 64, "num_heads": HEADS, "d_ff": FFN, "vocab_size": 50,
        "dense_act_fn": "gelu_pytorch_tanh" if gated else "relu", "is_gated_act": gated, "model_type": kind,
    }  # fmt: skip
    model = comfy.sd1_clip.SDClipModel(
        textmodel_json_config=config,
        dtype=dtype,
        special_tokens={"end": 1, "pad": 0},
        model_class=comfy.text_encoders.t5.T5,
        **{"enable_attention_masks": True, "zero_out_masked": True, **options},
    )
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.transformer.named_parameters():
        fresh = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            fresh = 1 + 0.1 * fresh
        elif "relative" not in name and "shared" not in name:
            fresh *= weight.shape[1] ** -0.5 * (0.125 if name.endswith(".q.weight") else 1)
        weight.copy_(fresh)
    model.set_clip_options({"execution_device": torch.device("cpu")})
    return model


def tokens(words: int, length: int = 96, seed: int = 0) -> list[int]:
    """A prompt of so many tokens, its end among them, padded."""
    drawn = torch.randint(2, 50, (words - 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [*drawn, 1, *[0] * (length - words)]


def both(model: Any, prompts: list[list[Any]], precision: str = "precise", **policy: Any) -> tuple[Any, Any]:
    """(ours, stock's)."""
    wanted = model(prompts)
    t5.fuse(model, KernelPolicy.of(precision=precision, **policy), on_cpu=True)
    assert isinstance(model.transformer.encoder, t5.FusedStack)
    return model(prompts), wanted


def close(got: torch.Tensor, wanted: torch.Tensor, allowed: float) -> None:
    assert got.dtype is wanted.dtype is torch.float32 and got.shape == wanted.shape
    assert torch.equal(got == 0, wanted == 0) or not (wanted == 0).any()
    assert (got - wanted).norm() <= allowed * wanted.norm()
    cosine = torch.nn.functional.cosine_similarity(got.double().flatten(), wanted.double().flatten(), 0)
    assert cosine >= 1 - allowed**2
    assert (got - wanted).abs().max() <= 5 * allowed * wanted.abs().max()


@pytest.mark.every_other
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", ["umt5", "t5"])
@pytest.mark.parametrize("lengths", [[1], [40], [64], [65], [96], [40, 1], [3, 90, 17]])
def test_prompts_encode_as_stocks(kind: str, lengths: list[int], precision: str) -> None:
    got, wanted = both(build(kind), [tokens(words, seed=i) for i, words in enumerate(lengths)], precision)
    close(got[0], wanted[0], ALLOWED[precision])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_of_every_type(dtype: torch.dtype, precision: str) -> None:
    """What fp16 cannot hold of fp32 weights is lost; of the others it holds all."""
    got, wanted = both(build(dtype=dtype), [tokens(20)], precision)
    close(got[0], wanted[0], 1e-3 if dtype is torch.float32 else ALLOWED[precision])


@pytest.mark.parametrize(("precision", "factor"), [("precise", 1.1), ("fast", 1.5), ("turbo", 1.5)])
@pytest.mark.parametrize("kind", ["umt5", "t5"])
def test_the_error_is_that_of_fp16_weights(kind: str, precision: str, factor: float) -> None:
    """Against fp32 weights: stock's with the fp16 file, which computes in FP32, and ours with the same file."""
    full, half = build(kind, torch.float32), build(kind)
    prompts = [tokens(words, seed=words) for words in (90, 70, 50, 30)]
    exact = full(prompts)[0]
    got, stocks = both(half, prompts, precision)
    ours, theirs = (float((encoding[0] - exact).norm()) for encoding in (got, stocks))
    print(f"{ours / theirs:.3f}")
    assert 0 < ours <= factor * theirs


@pytest.mark.parametrize("precision", PRECISIONS)
def test_long_prompts_pass_in_chunks(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32_residual, "CHUNK_ROWS", 256)
    got, wanted = both(build(), [tokens(300, 330), tokens(7, 330)], precision)
    close(got[0], wanted[0], ALLOWED[precision])


def test_the_first_form_of_the_feed_forward() -> None:
    for precision in PRECISIONS:
        got, wanted = both(build("t5", gated=False), [tokens(20)], precision)
        close(got[0], wanted[0], ALLOWED[precision])


def test_without_masks_and_without_zeroing() -> None:
    """As stock's other T5 models ask for it: every token counts, or masked ones do not count but come out."""
    for options in ({"enable_attention_masks": False, "zero_out_masked": False}, {"zero_out_masked": False}):
        got, wanted = both(build(**options), [tokens(20), tokens(70)])
        assert (wanted[0] != 0).all()
        close(got[0], wanted[0], ALLOWED["precise"])


def test_embeddings_and_scattered_padding() -> None:
    """`embedding:name` puts vectors among the tokens; behind the end they are seen, though padding before them is not."""
    vectors = torch.randn(3, WIDTH)
    inside = [*tokens(9)[:4], vectors, *tokens(9)[4:80]]
    behind = [*tokens(9)[:30], vectors, *tokens(9)[30:80]]
    for prompt in (inside, behind):
        got, wanted = both(build(), [prompt])
        close(got[0], wanted[0], ALLOWED["precise"])


def test_nothing_to_see() -> None:
    """Padding alone: zeros where masked tokens are zeroed; elsewhere stock's average over all."""
    for zeroed in (True, False):
        got, wanted = both(build(zero_out_masked=zeroed), [[0] * 80])
        assert torch.equal(got[0], wanted[0]) and (wanted[0] == 0).all() == zeroed


def test_a_middle_layers_output() -> None:
    for norm in (True, False):
        for layer in (1, -2):
            model = build(layer="hidden", layer_idx=layer, layer_norm_hidden_state=norm)
            got, wanted = both(model, [tokens(30)])
            close(got[0], wanted[0], ALLOWED["precise"])


def test_masked_tokens_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    attend = t5.attend
    monkeypatch.setattr(t5, "attend", lambda layer, x, *rest: seen.append(x.shape[1]) or attend(layer, x, *rest))
    both(build(), [tokens(70, 300), tokens(10, 300)])
    assert set(seen) == {128} and len(seen) == LAYERS


@pytest.mark.parametrize("precision", PRECISIONS)
def test_outliers_do_not_overflow(precision: str) -> None:
    """A stream with numbers of a hundred thousand, feed-forwards that add as much, hidden values beyond fp16."""
    model = build()
    net = model.transformer
    net.shared.weight[5, 7] = 6e4
    for block in net.encoder.block[:2]:
        dense = block.layer[1].DenseReluDense
        for name in ("wi_0", "wi_1"):
            getattr(dense, name).weight[:2] *= 300
        dense.wo.weight[3] *= 2000
        block.layer[0].SelfAttention.o.weight[9] *= 60000
    stream: list[float] = []
    net.encoder.block[-1].register_forward_pre_hook(lambda _, args: stream.append(float(args[0].abs().max())))
    prompts = [[5, 9, 5, 30, *tokens(20)]]
    in_half = net.encoder(net.shared(torch.tensor(prompts), out_dtype=torch.float16))[0]
    assert not in_half.isfinite().all(), "nothing would overflow"
    wanted = model(prompts)[0]
    t5.fuse(model, KernelPolicy.of(precision=precision), on_cpu=True)
    got = model(prompts)[0]
    assert got.isfinite().all() and min(stream[1:]) > 1e5
    assert (got - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.parametrize("op", [*t5.OPS, "to_half"])
def test_each_kernel_may_be_off(op: str) -> None:
    """On the CPU `off` is torch's own fp16 computation, else the reference."""
    for precision in PRECISIONS:
        got, wanted = both(build(dtype=torch.bfloat16), [tokens(30)], precision, **{op: "off"})
        close(got[0], wanted[0], 3e-3)


def test_all_off_is_stock() -> None:
    model = build()
    t5.fuse(model, KernelPolicy.of("off"), on_cpu=True)
    assert not any(isinstance(module, (t5.FusedStack, t5.FusedBlock, FusedEmbedding)) for module in model.modules())


def test_blocks_move_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, *_, **__: seen.append((value, total)))
    model = build()
    t5.fuse(model, KernelPolicy.of("auto"), on_cpu=True)
    model([tokens(6)])
    count = len(model.transformer.encoder.block)
    assert seen[0][0] <= count and seen[-1] == (count, count)


def test_on_the_cpu_stock_computes() -> None:
    model = build()
    wanted = model([tokens(30)])[0]
    t5.fuse(model, KernelPolicy.of("auto"))
    assert torch.equal(model([tokens(30)])[0], wanted)
    t5.fuse(model, KernelPolicy.of("on"))
    with pytest.raises(KernelRefused, match=r"kernels is 'on' for this text encoder.*runs on the CPU.*Choose 'auto'"):
        model([tokens(30)])


def test_weights_that_are_elsewhere_are_stocks() -> None:
    """Neither streamed nor on the card: ComfyUI brings them. `on` takes them from it."""
    model = build()
    stack = model.transformer.encoder
    x, mask = torch.zeros(1, 8, WIDTH), torch.ones(1, 8)

    def reason(mode: Any) -> str | None:
        stack.__dict__ |= {"fusestream_policy": KernelPolicy.of(mode), "fusestream_on_cpu": True}
        return t5.obstacle(stack, x, mask)

    assert reason("auto") is None
    stack.block[2].layer[1].to("meta")
    assert "give its loader a vram_budget" in str(reason("auto")) and reason("on") is None
    stack.block[2].__dict__[STREAMED] = None
    assert reason("auto") is None


def test_what_others_did_to_a_block_is_honoured() -> None:
    """A LoRA in bypass mode replaces the forward of Linears: stock computes then."""
    model = build()
    part = model.transformer.encoder.block[1].layer[0].SelfAttention.v
    plain = part.forward
    part.forward = lambda x: plain(x) * 1.5
    got, wanted = both(model, [tokens(30)])
    assert torch.equal(got[0], wanted[0])


def test_weights_patched_on_their_way() -> None:
    """Functions of other nodes see the weight in FP32, as in stock's T5."""
    model, kinds = build(), []
    for part in model.transformer.encoder.block[1].modules():
        if isinstance(part, torch.nn.Linear):
            part.weight_function = [lambda weight: kinds.append(weight.dtype) or weight * 1.25]
    got, wanted = both(model, [tokens(30)])
    assert set(kinds) == {torch.float32} and len(kinds) == 14
    close(got[0], wanted[0], 1e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_brought_through_one_buffer(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock brings offloaded weights through a few buffers, which the next weight may get while one is still wanted."""
    buffer = torch.empty(WIDTH * FFN, dtype=torch.float16)

    @contextlib.contextmanager
    def brought(module: Any, _device: torch.device) -> Iterator[operands.Weights]:
        weight = module.weight
        yield operands.Weights(buffer[: weight.numel()].view(weight.shape).copy_(weight), None)

    model = build()
    want = model([tokens(30)])[0]
    monkeypatch.setattr(operands, "_lie_as_wanted", lambda *_: False)
    monkeypatch.setattr(operands, "is_here", lambda *_: False)
    monkeypatch.setattr(operands, "_brought", brought)
    t5.fuse(model, KernelPolicy.of(precision=precision), on_cpu=True)
    close(model([tokens(30)])[0], want, ALLOWED[precision])


def test_the_embedding_is_gathered_as_stock_does() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model = build(dtype=dtype)
        ids = torch.tensor([tokens(30)])
        wanted = model.transformer.shared(ids, out_dtype=torch.float32)
        assert torch.equal(gather(model.transformer.shared.weight, ids, torch.float32), wanted)


def test_a_dropped_encoder_goes_without_a_garbage_collection() -> None:
    model = build()
    both(model, [tokens(5)])
    parts = [
        weakref.ref(model),
        *(weakref.ref(part) for part in (model.transformer.shared, model.transformer.encoder.block[0])),
    ]
    with no_collector():
        del model
        assert [part() for part in parts] == [None] * 3


def test_an_interrupt_is_heard() -> None:
    model = build()
    t5.fuse(model, on_cpu=True)
    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        model([tokens(30)])
    model([tokens(30)])


def test_packed_weights_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v that lie one behind the other, as in a streamed block."""
    model = build()
    shapes: list[Any] = []
    product = Wide.product
    monkeypatch.setattr(
        Wide, "product", lambda own, h, weight, *bias: shapes.append(weight.shape[0]) or product(own, h, weight, *bias)
    )
    for block in model.transformer.encoder.block:
        parts = [getattr(block.layer[0].SelfAttention, name) for name in "qkv"]
        room = torch.cat([part.weight for part in parts])
        for part, weight in zip(parts, room.chunk(3), strict=True):
            part.weight = torch.nn.Parameter(weight, requires_grad=False)
    got, wanted = both(model, [tokens(30)])
    close(got[0], wanted[0], ALLOWED["precise"])
    assert shapes == [3 * HEADS * 64, FFN, FFN] * LAYERS

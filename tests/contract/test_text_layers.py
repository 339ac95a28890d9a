"""What the layers of every fused text encoder keep to, at small sizes, with the references on the CPU: what they make of prompts
is near stock's, which computes in FP32; and what another node did to them counts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import comfy.model_management
import comfy.utils
import pytest
import torch
from live_memory import no_collector
from text_models import ALLOWED, KINDS, PRECISIONS, Kind, close

from bed.depth import is_thorough
from fusestream.fusion.weights import fp32_residual
from fusestream.kernels_cuda import KernelPolicy, KernelRefused

EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
FAMILIES = {name: KINDS[name] for name in ("umt5", "qwen3", "gemma3", "clip_l")}
FEW = pytest.mark.parametrize("kind", FAMILIES.values(), ids=FAMILIES)
# Which stream in FP32, and pass in chunks; CLIP's 77 tokens do neither.
WIDE = {name: FAMILIES[name] for name in ("umt5", "qwen3")}
OF_WIDE = pytest.mark.parametrize("kind", WIDE.values(), ids=WIDE)
TIERS = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


def numbers(out: Any) -> list[torch.Tensor]:
    """The encoding, and what is pooled where there is any."""
    return [one for one in out if isinstance(one, torch.Tensor)]


@pytest.mark.every_other
@TIERS
@EACH
@pytest.mark.parametrize("lengths", [[1], [64], [65], [40, 1], [3, 75, 17]], ids=str)
def test_prompts_encode_as_stocks(kind: Kind, lengths: list[int], precision: str) -> None:
    got, wanted = kind.both(kind.build(), [kind.tokens(words, seed=i) for i, words in enumerate(lengths)], precision)
    for ours, theirs in zip(numbers(got), numbers(wanted), strict=True):
        close(ours, theirs, ALLOWED[precision])


@TIERS
@FEW
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_weights_of_every_type(kind: Kind, dtype: torch.dtype, precision: str) -> None:
    """What fp16 cannot hold of fp32 weights is lost; of the others it holds all."""
    got, wanted = kind.both(kind.build(dtype), [kind.tokens(20)], precision)
    close(got[0], wanted[0], max(ALLOWED[precision], 1e-3) if dtype is torch.float32 else ALLOWED[precision])


@TIERS
@EACH
def test_the_error_is_that_of_fp16_weights(kind: Kind, precision: str) -> None:
    """Against fp32 weights: stock's with the fp16 file, which computes in FP32, and ours with the same file."""
    prompts = [kind.tokens(words, seed=words) for words in (70, 50, 30, 10)]
    if kind in WIDE.values():
        prompts.append(kind.tokens(90, seed=90))
    exact = kind.build(torch.float32)(prompts)[0]
    got, stocks = kind.both(kind.build(), prompts, precision)
    ours, theirs = (float((encoding[0] - exact).norm()) for encoding in (got, stocks))
    assert 0 < ours <= kind.worse[precision != "precise"] * theirs


@TIERS
@OF_WIDE
def test_long_prompts_pass_in_chunks(kind: Kind, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32_residual, "CHUNK_ROWS", 256)
    got, wanted = kind.both(kind.build(), [kind.tokens(300, 330), kind.tokens(7, 330)], precision)
    close(got[0], wanted[0], ALLOWED[precision])


@OF_WIDE
def test_embeddings_and_scattered_padding(kind: Kind) -> None:
    """`embedding:name` puts vectors among the tokens; behind the end they are seen, though padding before them is not."""
    vectors = torch.randn(3, kind.embedding(kind.build()).weight.shape[1])
    for prompt in (
        [*kind.tokens(9)[:4], vectors, *kind.tokens(9)[4:80]],
        [*kind.tokens(9)[:30], vectors, *kind.tokens(9)[30:80]],
    ):
        got, wanted = kind.both(kind.build(), [prompt])
        close(got[0], wanted[0], ALLOWED["precise"])


@TIERS
@OF_WIDE
def test_outliers_do_not_overflow(kind: Kind, precision: str) -> None:
    """A stream with numbers of a hundred thousand, feed-forwards that add as much, hidden values beyond fp16: as Qwen3 has them."""
    model = kind.build()
    kind.embedding(model).weight[5, 7] = 6e4
    for layer in kind.layers(model)[:2]:
        for matrix in layer.wide:
            matrix.weight[:2] *= 300
        layer.narrow.weight[3] *= 2000
        layer.out.weight[9] *= 60000
    stream: list[float] = []

    def seen(_: Any, args: Any, named: dict[str, Any]) -> None:
        stream.append(float((args[0] if args else named["x"]).abs().max()))

    kind.blocks(model)[-1].register_forward_pre_hook(seen, with_kwargs=True)
    prompts = [[5, 9, 5, 30, *kind.tokens(20)]]
    wanted = model(prompts)[0]
    got = kind.fused(model, precision)(prompts)[0]
    assert got.isfinite().all() and min(stream) > 1e5, "which fp16 cannot hold"
    assert (got - wanted).norm() <= 2e-3 * wanted.norm()


@FEW
def test_each_kernel_may_be_off(kind: Kind) -> None:
    """On the CPU `off` is torch's own fp16 computation, else the reference."""
    for i, op in enumerate((*kind.module.OPS, "to_half")):
        for precision in PRECISIONS if is_thorough() else PRECISIONS[i % 3 :][:1]:
            got, wanted = kind.both(kind.build(torch.bfloat16), [kind.tokens(30)], precision, **{op: "off"})
            close(got[0], wanted[0], 3e-3)


@EACH
def test_all_off_and_the_cpu_are_stocks(kind: Kind) -> None:
    model, prompts = kind.build(), [kind.tokens(30)]
    wanted, plain = model(prompts)[0], {type(module) for module in model.modules()}
    assert kind.module.fuse(model, KernelPolicy.of("off"), on_cpu=True) == 0
    assert {type(module) for module in model.modules()} == plain
    kind.module.fuse(model)
    assert torch.equal(model(prompts)[0], wanted)
    model = kind.build()
    kind.module.fuse(model, KernelPolicy.of("on"))
    with pytest.raises(KernelRefused, match=r"'on' for this text encoder.*runs on the CPU.*'auto'"):
        model(prompts)


@FEW
def test_what_others_did_to_a_layer_is_honoured(kind: Kind) -> None:
    """A LoRA in bypass mode replaces the forward of Linears: stock computes then."""
    model = kind.build()
    part = kind.layers(model)[1].qkv[2]
    plain = part.forward
    part.forward = lambda x: plain(x) * 1.5
    got, wanted = kind.both(model, [kind.tokens(30)])
    assert torch.equal(got[0], wanted[0])


@OF_WIDE
def test_weights_patched_on_their_way(kind: Kind) -> None:
    """Functions of other nodes see the weight in FP32, as in stock's."""
    model, kinds = kind.build(), []
    for part in kind.blocks(model)[1].modules():
        if isinstance(part, torch.nn.Linear):
            part.weight_function = [lambda weight: kinds.append(weight.dtype) or weight * 1.25]
    got, wanted = kind.both(model, [kind.tokens(30)])
    assert set(kinds) == {torch.float32} and len(kinds) == 14
    close(got[0], wanted[0], 1e-3)


@OF_WIDE
def test_packed_weights_are_one_product(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v that lie one behind the other, as in a streamed block."""
    model, shapes, product = kind.build(), list[int](), fp32_residual.Wide.product

    def noted(own: Any, h: Any, weight: Any, *bias: Any) -> Any:
        shapes.append(weight.shape[0])
        return product(own, h, weight, *bias)

    monkeypatch.setattr(fp32_residual.Wide, "product", noted)
    wanted = []
    for layer in kind.layers(model):
        room = torch.cat([part.weight for part in layer.qkv])
        rows = [len(part.weight) for part in layer.qkv]
        for part, weight in zip(layer.qkv, room.split(rows), strict=True):
            part.weight = torch.nn.Parameter(weight, requires_grad=False)
        wanted += [sum(rows), *(len(part.weight) for part in layer.wide)]
    got, stocks = kind.both(model, [kind.tokens(30)])
    close(got[0], stocks[0], ALLOWED["precise"])
    assert shapes == wanted


@OF_WIDE
def test_a_dropped_encoder_goes_without_a_garbage_collection(kind: Kind) -> None:
    model = kind.build()
    kind.both(model, [kind.tokens(5)])
    parts = [weakref.ref(part) for part in (model, kind.embedding(model), kind.blocks(model)[0])]
    with no_collector():
        del model
        assert [part() for part in parts] == [None] * 3


@OF_WIDE
def test_it_moves_the_progress_bar_and_hears_an_interrupt(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda value, total, *_, **__: seen.append((value, total)))
    model = kind.fused(kind.build())
    model([kind.tokens(6)])
    assert seen[-1] == (len(kind.blocks(model)),) * 2
    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        model([kind.tokens(30)])
    model([kind.tokens(30)])


@TIERS
@EACH
def test_no_kernel_refuses_what_it_is_handed(
    kind: Kind, precision: str, refused_by_kernels: list[tuple[str, str]]
) -> None:
    model = kind.build(**({"heads": 1} if kind.module is KINDS["clip_l"].module else {}))
    kind.fused(model, precision)([kind.tokens(5), kind.tokens(75)])
    refused = [why for op, why in refused_by_kernels if op != "attention" or "heads of 256" not in why]  # Gemma's
    assert not refused

"""Stock's Qwen3 encoders at the 4B's widths, with random weights, over our kernels. Needs a ComfyUI.

What is exact is an fp64 run of stock with FP32 weights. Stock's own error is that of the FP16 weights of the same file, with
which it computes in FP32.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gpu.support import compared, error, in_turns, ratio

from fusestream.fusion.base.hooks import READS_LAST
from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

WIDTH, HEADS, KEY_HEADS, FFN, LAYERS = 2560, 32, 8, 9728, 6
TOKENS = 512
TAPS = [1, 3, 5]  # as klein takes three, and nothing behind the last
# Of stock's error with the same file. What `fast` keeps is one fp16 number of each operand.
FACTORS = {"precise": 1.05, "fast": 1.5, "turbo": 1.5}


def build(dtype: torch.dtype = torch.float16, layers: int = LAYERS) -> Any:
    """Stock's encoder around a Qwen3 of a few layers, as klein has it: the same numbers, rounded to the type."""
    import comfy.sd1_clip
    from comfy.text_encoders import llama

    config = {
        "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
    }  # fmt: skip
    model = comfy.sd1_clip.SDClipModel(
        device="cuda",
        layer=[i for i in TAPS if i < layers],
        textmodel_json_config=config,
        dtype=torch.float32,
        special_tokens={"pad": 63},
        model_class=llama.Qwen3_4B,
        layer_norm_hidden_state=False,
        enable_attention_masks=True,
    ).requires_grad_(False)
    generator = torch.Generator(device="cuda").manual_seed(5)
    for name, weight in model.transformer.named_parameters():
        if "norm" in name:
            weight.normal_(1, 0.1, generator=generator)
        else:
            weight.normal_(std=1.0 if "embed" in name else weight.shape[1] ** -0.5, generator=generator)
    model.transformer.to(dtype)
    model.set_clip_options({"execution_device": torch.device("cuda")})
    return model


@pytest.fixture(scope="module")
def models() -> dict[torch.dtype, Any]:
    with torch.inference_mode():
        return {dtype: build(dtype) for dtype in (torch.float16, torch.float32)}


def prompt(words: int, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings [batch, 512, width] and the mask of prompts of so many tokens, each next a third as long."""
    x = torch.randn(batch, TOKENS, WIDTH, device="cuda", generator=torch.Generator(device="cuda").manual_seed(words))
    mask = torch.zeros(batch, TOKENS, dtype=torch.long, device="cuda")
    for row in range(batch):
        mask[row, : max(1, words // 3**row)] = 1
    return x, mask


def stock_of(model: Any, x: torch.Tensor, mask: torch.Tensor | None = None, taps: Any = None) -> torch.Tensor:
    """Stock's computation, in the type of x, of an encoder that may be fused: what it taps."""
    from comfy.text_encoders import llama

    found: torch.Tensor = llama.Llama2_.forward(
        model.transformer.model, None, mask, x.clone(), None, taps or TAPS, final_layer_norm_intermediate=False
    )[1]
    return found


def ours_of(
    model: Any, policy: KernelPolicy, x: torch.Tensor, mask: torch.Tensor | None = None, taps: Any = None
) -> torch.Tensor:
    from fusestream.fusion.text import stack as encoder

    encoder.fuse(model, policy)
    stack = model.transformer.model
    stack.__dict__[READS_LAST] = False
    last, found = stack(None, mask, embeds=x, intermediate_output=taps or TAPS, final_layer_norm_intermediate=False)
    assert last is None
    tapped: torch.Tensor = found
    return tapped


@torch.inference_mode()
@pytest.mark.parametrize("precision", FACTORS)
def test_as_near_as_fp16_gets(models, isa, precision):
    half, wide = models[torch.float16], models[torch.float32]
    x, mask = prompt(200, 2)
    exact = stock_of(wide, x.double(), mask)
    theirs = error(stock_of(half, x, mask), exact)
    for op in OPS.values():
        op.forget()  # or nothing is chosen, and nothing noted
    LEDGER.clear()
    got = ours_of(half, KernelPolicy.of("on", isa=isa, precision=precision), x, mask)
    ours = error(got, exact)
    print(
        f"{isa or 'native'} {precision}: error {ours:.3g}, {ours / theirs:.3f} of stock's with the same file, {theirs:.3g}"
    )
    assert got.dtype is torch.float32
    assert {choice.winner.split()[0] for choice in LEDGER.choices} == {"cuda"}
    assert not [refusal for refusal in LEDGER.refusals if refusal.candidate == "cuda"]
    assert ours <= theirs * FACTORS[precision]


@torch.inference_mode()
@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_outliers_pass(isa, precision):
    """A stream with numbers of a hundred thousand, and feed-forwards that add as much: fp16 cannot hold either."""
    model = build(layers=2)
    model.transformer.model.layers[0].mlp.down_proj.weight[:4].mul_(50000.0).clamp_(-65504, 65504)
    x, mask = prompt(77)
    x[:, ::5, 11] = 1e5
    x[:, 3] *= 3e4
    exact = stock_of(model, x.double(), mask, "all")
    assert not stock_of(model, x.half(), mask, "all").isfinite().all(), "nothing would overflow"
    ours = error(ours_of(model, KernelPolicy.of("on", isa=isa, precision=precision), x, mask, "all"), exact)
    auto = error(ours_of(model, KernelPolicy.of("auto", isa=isa, precision=precision), x, mask, "all"), exact)
    print(f"outliers {isa or 'native'} {precision}: error {ours:.3g}, auto {auto:.3g}")
    assert max(ours, auto) < (2e-3 if precision == "precise" else 4e-3)


@torch.inference_mode()
def test_masks_and_lengths(models):
    """Scattered masks, none, prompts without padding, and lengths that are no multiples of anything."""
    half = models[torch.float16]
    x, mask = prompt(130)
    mask[:, 5:60:3] = 0
    cases = [(x, mask), (x, None)]
    cases += [(x[:, :n], torch.ones(1, n, dtype=torch.long, device="cuda")) for n in (1, 37, 130)]
    for embeds, given in cases:
        exact = stock_of(half, embeds.double(), given)
        for mode in ("on", "auto"):
            assert error(ours_of(half, KernelPolicy.of(mode), embeds, given), exact) < 2e-3, (embeds.shape, mode)


@torch.inference_mode()
@pytest.mark.parametrize(
    "op",
    [
        "attention", "join_sums", "linear", "linear_", "linear_pair", "norm_modulate", "rms_parts", "rms_rope_",
        "rms_rope_sums",
    ],
)  # fmt: skip
def test_each_kernel_may_be_off(models, op):
    half = models[torch.float16]
    x, mask = prompt(200)
    exact = stock_of(half, x.double(), mask)
    for precision in ("precise", "fast"):
        got = ours_of(half, KernelPolicy.of("auto", precision=precision, **{op: "off"}), x, mask)
        assert error(got, exact) < 4e-3


@torch.inference_mode()
def test_text_is_written(models, monkeypatch):
    """As stock's FP32 writes it."""
    import comfy.model_management

    from fusestream.fusion.text import stack as encoder

    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda *_, **__: False)
    model = models[torch.float16]
    options = {"do_sample": False, "max_length": 12, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
    texts = []
    for policy in (KernelPolicy.of("off"), KernelPolicy.of("on")):
        encoder.fuse(model)
        model.transformer.model.__dict__["fusestream_policy"] = policy
        texts.append(model.generate([[(5, 1.0), (7, 1.0)]], repetition_penalty=1.0, seed=0, **options))
    assert texts[0] == texts[1] and len(texts[0]) == 12


# Of stock's time. A short prompt's is the host's, which whatever runs beside this takes from both, but not alike.
MOST = {60: 1.15, TOKENS: 1.0}


@pytest.mark.timed
@torch.inference_mode()
def test_faster_than_stock(models):
    """Milliseconds a layer of the encoder alone, its weights on the card: stock's, ours, for a short prompt and for klein's."""
    from fusestream.fusion.text import stack as encoder

    half, layers = models[torch.float16], max(TAPS)
    encoder.fuse(half, KernelPolicy.of("auto"))
    stack = half.transformer.model
    stack.__dict__[READS_LAST] = False
    options = {"intermediate_output": TAPS, "final_layer_norm_intermediate": False}
    for words, most in MOST.items():
        x, mask = (t[:, :words] for t in prompt(words))
        found = in_turns(
            stock=lambda x=x, mask=mask: stock_of(half, x, mask),
            ours=lambda x=x, mask=mask: stack(None, mask, embeds=x, **options),
        )
        print(f"{words} tokens, {layers} of {LAYERS} layers, ms a layer: {compared(found, layers)}")
        assert ratio(found) < most

"""Stock's language models other than Qwen3 at their published widths, a few layers of random weights, over our kernels; and the
vision towers of Qwen2.5-VL and Gemma 3. Needs a ComfyUI.

What is exact is an fp64 run of stock with FP32 weights, for text its FP32 run. Stock's own error is that of the FP16 weights of
the same file, with which it computes in FP32.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from gpu.support import error

from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

LAYERS, WORDS, PAD = 6, 512, 0
TOKENS = 300
# Of stock's error with the same file. What `fast` keeps is one fp16 number of each operand: keys that
# a large bias moves away from zero are rounded more coarsely (Qwen2.5's, measured 2.06).
FACTORS = {"precise": 1.1, "fast": 1.6}
OF_LARGE_KEYS = {"precise": 1.1, "fast": 2.5}


class Size(NamedTuple):
    """network: stock's class of it, by name. window: keys that its layers with one see."""

    network: str
    width: int
    ffn: int
    heads: int
    key_heads: int
    window: int | None = None


SIZES = {
    "Llama 3.1 8B": Size("Llama2", 4096, 14336, 32, 8),
    "Mistral Small 3": Size("Mistral3Small24B", 5120, 32768, 32, 8),
    "Ministral 3 3B": Size("Ministral3_3B", 3072, 9216, 32, 8),
    "Qwen2.5-VL 7B": Size("Qwen25_3B", 3584, 18944, 28, 4),
    "Gemma 2 2B": Size("Gemma2_2B", 2304, 9216, 8, 4),
    "Gemma 3 12B": Size("Gemma3_4B", 3840, 15360, 16, 8, window=128),
}
WRITERS = ("Ministral 3 3B", "Gemma 2 2B", "Gemma 3 12B")
EACH = pytest.mark.parametrize("name", SIZES)


def build(name: str, dtype: torch.dtype = torch.float16) -> Any:
    """Stock's encoder around a language model of a few layers: the same numbers, rounded to the type."""
    import comfy.sd1_clip
    from comfy.text_encoders import llama

    size = SIZES[name]
    config = {
        "vocab_size": WORDS, "hidden_size": size.width, "intermediate_size": size.ffn, "num_hidden_layers": LAYERS,
        "num_attention_heads": size.heads, "num_key_value_heads": size.key_heads,
    }  # fmt: skip
    model = comfy.sd1_clip.SDClipModel(
        device="cuda",
        layer="last",
        textmodel_json_config=config,
        dtype=torch.float32,
        special_tokens={"pad": PAD},
        model_class=getattr(llama, size.network),
        layer_norm_hidden_state=False,
        enable_attention_masks=True,
        return_attention_masks=True,
    ).requires_grad_(False)
    generator = torch.Generator(device="cuda").manual_seed(5)
    adds_one = model.transformer.model.config.rms_norm_add
    for key, weight in model.transformer.named_parameters():
        if "norm" in key:
            weight.normal_(0 if adds_one else 1, 0.1, generator=generator)
        elif key.endswith("bias"):
            weight.normal_(std=20.0 if "k_proj" in key else 1.0, generator=generator)  # published ones are large
        else:
            weight.normal_(std=0.05 if "embed" in key else weight.shape[1] ** -0.5, generator=generator)
    model.transformer.to(dtype)
    for layer in model.transformer.model.layers:
        if size.window is not None and layer.sliding_attention:
            layer.sliding_attention = size.window
    model.set_clip_options({"execution_device": torch.device("cuda")})
    return model


def prompts(*lengths: int, before: bool = False) -> list[list[int]]:
    make = torch.Generator().manual_seed(sum(lengths))
    drawn = [torch.randint(1, WORDS, (length,), generator=make).tolist() for length in lengths]
    return [[PAD] * (TOKENS - len(one)) + one if before else one + [PAD] * (TOKENS - len(one)) for one in drawn]


def exactly(model: Any, given: list[list[int]]) -> torch.Tensor:
    """Stock's last output in fp64, of a model that is not fused."""
    from comfy.text_encoders import llama

    embeds, mask, *_ = model.process_tokens(given, torch.device("cuda"))
    wide = model.transformer.model.double()
    found: torch.Tensor = llama.Llama2_.forward(wide, None, mask, embeds.double())[0]
    return found


def fuse(model: Any, policy: KernelPolicy) -> Any:
    from fusestream.fusion.text import stack

    assert stack.fuse(model, policy) == LAYERS
    for op in OPS.values():
        op.forget()  # or nothing is chosen, and nothing noted
    LEDGER.clear()
    return model


@torch.inference_mode()
@pytest.mark.parametrize("precision", FACTORS)
@EACH
def test_as_near_as_fp16_gets(name: str, precision: str) -> None:
    """A prompt and one that is padded behind; Gemma's before, beyond the window of most of its layers."""
    given = prompts(TOKENS, 200, before=name.startswith("Gemma 3"))
    exact = exactly(build(name, torch.float32), given)
    half = build(name)
    theirs = error(half(given)[0], exact)
    got = fuse(half, KernelPolicy.of("auto", precision=precision))(given)[0]
    ours = error(got, exact)
    print(f"{name} {precision}: error {ours:.3g}, {ours / theirs:.3f} of stock's with the same file, {theirs:.3g}")
    assert got.dtype is torch.float32 and got.isfinite().all()
    assert not [one for one in LEDGER.refusals if one.op == "text encoder"]
    factors = OF_LARGE_KEYS if name.startswith("Qwen2.5") else FACTORS
    assert ours <= theirs * factors[precision]


@torch.inference_mode()
@EACH
def test_padding_before_a_prompt(name: str) -> None:
    given = prompts(TOKENS, 40, 150, before=True)
    half = build(name)
    wanted = half(given)[0]
    got = fuse(half, KernelPolicy())(given)[0]
    print(f"{name} padded before: {error(got, wanted):.3g} from stock's")
    assert error(got, wanted) < 2e-3


@torch.inference_mode()
@pytest.mark.parametrize("name", WRITERS)
def test_writes_what_stock_writes(name: str) -> None:
    """The likeliest that is not there yet, far beyond the window, in buffers that grow."""
    from fusestream.fusion.text import cache

    options = {"do_sample": True, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    prompt = [[(token, 1.0) for token in prompts(TOKENS)[0]]]
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "AT_FIRST", 32)
        for ours in (False, True):
            model = build(name, torch.float32)
            patch.setattr(type(model.transformer.model.config), "stop_tokens", [])
            if ours:
                fuse(model, KernelPolicy())
            patch.setattr("comfy.model_management.should_use_bf16", lambda *_, **__: False)
            texts.append(
                model.generate(prompt, max_length=60, repetition_penalty=1.3, presence_penalty=20.0, **options)
            )
    assert texts[0] == texts[1] and len(texts[0]) == 60


@torch.inference_mode()
@pytest.mark.parametrize("tower", ["Qwen2.5-VL", "SigLIP"])
@pytest.mark.parametrize("precision", FACTORS)
def test_vision_towers_see_as_stocks(tower: str, precision: str) -> None:
    import comfy.clip_model
    import comfy.ops
    from comfy.text_encoders import llama, qwen_vl

    from fusestream.fusion.text.vision import towers

    placed = {"device": "cuda", "dtype": torch.float16}
    make = torch.Generator(device="cuda").manual_seed(3)
    if tower == "SigLIP":
        config = {**llama.GEMMA3_VISION_CONFIG, "num_hidden_layers": 4}
        model = comfy.clip_model.CLIPVision(config, torch.float16, "cuda", comfy.ops.manual_cast).cuda()
        given = (torch.randn(1, 3, 896, 896, device="cuda", generator=make),)
    else:
        visual = qwen_vl.Qwen2VLVisionTransformer(1280, 3584, 3420, 16, 8, **placed, ops=comfy.ops.manual_cast)
        model = torch.nn.ModuleDict({"visual": visual})
        grid = torch.tensor([[1, 30, 46], [1, 16, 16]], device="cuda")
        patches = int(grid.prod(1).sum())
        given = (torch.randn(patches, 3 * 2 * 14 * 14, device="cuda", generator=make), grid)
    for key, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.normal_(std=weight[0].numel() ** -0.5, generator=make)
        else:
            weight.normal_(1 if "norm" in key and key.endswith("weight") else 0, 0.1, generator=make)
    model.requires_grad_(False)

    def seen() -> torch.Tensor:
        found = (model if tower == "SigLIP" else model["visual"])(*given)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.float()

    wanted = seen()
    LEDGER.clear()
    assert towers.fuse(model, KernelPolicy.of("auto", precision=precision)) > 3
    got = seen()
    print(f"{tower} {precision}: {error(got, wanted):.3g} from stock's")
    assert not [one for one in LEDGER.refusals if one.op == "text encoder"]
    assert 0 < error(got, wanted) < {"precise": 2e-3, "fast": 6e-3}[precision]

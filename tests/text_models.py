"""Stock's text encoders at small sizes, with seeded weights: for the suite of fused layers, and for what each has of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import comfy.sd1_clip
import comfy.sdxl_clip
import comfy.text_encoders.t5
import torch
from comfy.text_encoders import llama

from fusestream.fusion.families.clip import encoder as clip_encoder
from fusestream.fusion.families.t5 import encoder as t5_encoder
from fusestream.fusion.text import stack
from fusestream.kernels_cuda import KernelPolicy

HALF = torch.float16
PRECISIONS = ("precise", "fast", "turbo")
# Relative error of the encoding beside stock's, which computes the same fp16 weights in FP32.
ALLOWED = {"precise": 4e-4, "fast": 1.5e-3, "turbo": 1.5e-3}
T5_WIDTH, T5_HEADS, T5_FFN, T5_LAYERS = 64, 2, 160, 3
QWEN_WIDTH, QWEN_HEADS, QWEN_KEY_HEADS, QWEN_HEAD, QWEN_FFN, QWEN_LAYERS = 128, 4, 2, 128, 192, 5
CLIP_WIDTH, CLIP_LAYERS = 64, 4
QWEN_PAD = 49  # of the vocabulary the last


def seeded(model: Any, seed: int, scales: Callable[[str, torch.Tensor], float], norm: str = "norm") -> Any:
    """With drawn weights, norms around one, each scaled by its name; on the CPU, as stock is told."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.transformer.named_parameters():
        fresh = torch.randn(weight.shape, generator=generator)
        if norm in name:
            fresh = (1 if name.endswith("weight") else 0) + 0.1 * fresh
        weight.copy_(fresh * scales(name, weight))
    model.set_clip_options({"execution_device": torch.device("cpu")})
    return model


def t5(kind: str = "umt5", dtype: torch.dtype = HALF, *, gated: bool = True, **options: Any) -> Any:
    """As stock's UMT5XXlModel makes it."""
    config = {
        "num_layers": T5_LAYERS, "d_model": T5_WIDTH, "d_kv": 64, "num_heads": T5_HEADS, "d_ff": T5_FFN, "vocab_size": 50,
        "dense_act_fn": "gelu_pytorch_tanh" if gated else "relu", "is_gated_act": gated, "model_type": kind,
    }  # fmt: skip
    model = comfy.sd1_clip.SDClipModel(
        textmodel_json_config=config,
        dtype=dtype,
        special_tokens={"end": 1, "pad": 0},
        model_class=comfy.text_encoders.t5.T5,
        **{"enable_attention_masks": True, "zero_out_masked": True, **options},
    )

    def scale(name: str, weight: torch.Tensor) -> float:
        is_matrix = not any(part in name for part in ("norm.weight", "relative", "shared"))
        return float(weight.shape[1]) ** -0.5 * (0.125 if name.endswith(".q.weight") else 1) if is_matrix else 1

    return seeded(model, 3, scale, "norm.weight")


def t5_tokens(words: int, length: int = 96, seed: int = 0) -> list[Any]:
    """A prompt of so many tokens, its end among them, padded."""
    drawn = torch.randint(2, 50, (words - 1,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [*drawn, 1, *[0] * (length - words)]


def decoder(network: Any, dtype: torch.dtype = HALF, window: int | None = None, **options: Any) -> Any:
    """One of stock's language models in the encoder that stock puts around it. window: keys that layers with a window see."""
    config = {
        "vocab_size": 50, "hidden_size": QWEN_WIDTH, "intermediate_size": QWEN_FFN, "num_hidden_layers": QWEN_LAYERS,
        "num_attention_heads": QWEN_HEADS, "num_key_value_heads": QWEN_KEY_HEADS,
    }  # fmt: skip
    model = comfy.sd1_clip.SDClipModel(
        textmodel_json_config=config,
        dtype=dtype,
        special_tokens={"pad": QWEN_PAD},
        model_class=network,
        **{"layer_norm_hidden_state": False, "enable_attention_masks": True, "return_attention_masks": True, **options},
    )
    stack = model.transformer.model
    adds_one = stack.config.rms_norm_add
    for layer in stack.layers:
        if window is not None and layer.sliding_attention:
            layer.sliding_attention = window

    def scale(name: str, weight: torch.Tensor) -> float:
        if "norm" in name:
            return 1
        if name.endswith("bias"):
            return 3  # published ones are large
        return 0.3 if "embed" in name and adds_one else 1 if "embed" in name else float(weight.shape[1]) ** -0.5

    model = seeded(model, 3, scale)
    for name, weight in model.transformer.named_parameters() if adds_one else ():
        if "norm" in name:
            weight.copy_(weight.float() - 1)
    return model


def qwen3(dtype: torch.dtype = HALF, **options: Any) -> Any:
    """As stock's Qwen3_4BModel makes it."""
    return decoder(llama.Qwen3_4B, dtype, **options)


def qwen3_tokens(words: int, length: int = 96, seed: int = 0) -> list[Any]:
    """A prompt of so many tokens, padded behind."""
    drawn = torch.randint(0, QWEN_PAD, (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [*drawn, *[QWEN_PAD] * (length - words)]


def gemma3_tokens(words: int, length: int = 96, seed: int = 0) -> list[Any]:
    """The same, padded before."""
    return [*[QWEN_PAD] * (length - words), *qwen3_tokens(words, words, seed)]


CLIPS = {
    "clip_l": comfy.sd1_clip.SDClipModel,
    "clip_g": comfy.sdxl_clip.SDXLClipG,
    "masked": comfy.sdxl_clip.StableCascadeClipG,
}


def clip(kind: str = "clip_l", dtype: torch.dtype = HALF, heads: int = 2) -> Any:
    sizes = {"hidden_size": CLIP_WIDTH, "intermediate_size": 160, "num_hidden_layers": CLIP_LAYERS}
    name = "clip_l" if kind == "clip_l" else "clip_g"
    options = {f"{name}_model_config": {**sizes, "num_attention_heads": heads}}

    def scale(name: str, weight: torch.Tensor) -> float:
        if "norm" in name or "embedding" in name:
            return 1
        return 0.1 if name.endswith("bias") else float(weight.shape[1]) ** -0.5

    return seeded(CLIPS[kind](dtype=dtype, model_options=options), 5, scale)


def clip_tokens(words: int, length: int = 77, seed: int = 0) -> list[Any]:
    """Of so many words, begun, ended and padded to 77 tokens."""
    drawn = torch.randint(300, 40000, (words,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [49406, *drawn, 49407, *[49407] * (75 - words)]


class Layer(NamedTuple):
    """What the layers of all have, by the family's names."""

    qkv: tuple[Any, Any, Any]
    out: Any
    wide: tuple[Any, ...]  # into the feed-forward
    narrow: Any  # out of it


def _t5_layer(block: Any) -> Layer:
    attend, dense = block.layer[0].SelfAttention, block.layer[1].DenseReluDense
    return Layer((attend.q, attend.k, attend.v), attend.o, (dense.wi_0, dense.wi_1), dense.wo)


def _qwen3_layer(layer: Any) -> Layer:
    attend, mlp = layer.self_attn, layer.mlp
    return Layer(
        (attend.q_proj, attend.k_proj, attend.v_proj), attend.o_proj, (mlp.gate_proj, mlp.up_proj), mlp.down_proj
    )


def _clip_layer(layer: Any) -> Layer:
    attend = layer.self_attn
    return Layer((attend.q_proj, attend.k_proj, attend.v_proj), attend.out_proj, (layer.mlp.fc1,), layer.mlp.fc2)


class Kind(NamedTuple):
    """build(dtype=..) makes stock's text encoder model, tokens(words, length, seed) a prompt of it."""

    build: Callable[..., Any]
    tokens: Callable[..., list[Any]]
    module: Any  # with `fuse` and `OPS`
    blocks: Callable[[Any], Any]
    parts: Callable[[Any], Layer]
    embedding: Callable[[Any], Any]
    worse: tuple[float, float]  # than stock's fp16: how much the error may be, in tier precise and the others

    def layers(self, model: Any) -> list[Layer]:
        return [self.parts(block) for block in self.blocks(model)]

    def fused(self, model: Any, precision: str = "precise", **policy: Any) -> Any:
        found = self.module.fuse(model, KernelPolicy.of(precision=precision, **policy), on_cpu=True)
        assert found == len(self.blocks(model))
        return model

    def both(self, model: Any, prompts: list[list[Any]], precision: str = "precise", **policy: Any) -> tuple[Any, Any]:
        """(ours, stock's). Stock adds one to Gemma's norms in the weights' type: what it makes of them in FP32 is right."""
        config = getattr(getattr(model.transformer, "model", None), "config", None)
        exact = copy.deepcopy(model).float() if getattr(config, "rms_norm_add", False) else model
        wanted = exact(prompts)
        return self.fused(model, precision, **policy)(prompts), wanted


def _of_t5(kind: str) -> Kind:
    return Kind(
        lambda dtype=HALF, **options: t5(kind, dtype, **options), t5_tokens, t5_encoder,
        lambda model: model.transformer.encoder.block, _t5_layer, lambda model: model.transformer.shared, (1.1, 1.5),
    )  # fmt: skip


def _of_clip(kind: str) -> Kind:
    return Kind(
        lambda dtype=HALF, **options: clip(kind, dtype, **options), clip_tokens, clip_encoder,
        lambda model: model.transformer.text_model.encoder.layers, _clip_layer,
        lambda model: model.transformer.text_model.embeddings.token_embedding, (1.1, 1.6),
    )  # fmt: skip


QWEN3 = Kind(
    qwen3, qwen3_tokens, stack, lambda model: model.transformer.model.layers, _qwen3_layer,
    lambda model: model.transformer.model.embed_tokens, (1.05, 1.5),
)  # fmt: skip


def of_decoder(network: Any, **options: Any) -> Kind:
    return QWEN3._replace(build=lambda dtype=HALF, **others: decoder(network, dtype, **options, **others))


DECODERS = {
    "qwen3": QWEN3,
    "qwen25": of_decoder(llama.Qwen25_3B),
    "llama3": of_decoder(llama.Llama2),
    "mistral3": of_decoder(llama.Mistral3Small24B),
    "gemma2": of_decoder(llama.Gemma2_2B),
    "gemma3": of_decoder(llama.Gemma3_4B, window=24)._replace(tokens=gemma3_tokens),
}
KINDS = {"umt5": _of_t5("umt5"), "t5": _of_t5("t5"), **DECODERS, **{kind: _of_clip(kind) for kind in CLIPS}}
UMT5, T5 = KINDS["umt5"], KINDS["t5"]


def close(got: torch.Tensor, wanted: torch.Tensor, allowed: float) -> None:
    """Near stock's, and not stock's: something of ours computed it."""
    assert got.dtype is wanted.dtype is torch.float32 and got.shape == wanted.shape
    assert torch.equal(got == 0, wanted == 0) or not (wanted == 0).any()
    assert 0 < (got - wanted).norm() <= allowed * wanted.norm()
    assert (got - wanted).abs().max() <= 5 * allowed * wanted.abs().max()

"""Language models that read prompts: a table of their families. Qwen3-VL has a folder of its own,
because its files tell sizes that stock has no class for.

A row is a name, what it covers, which file is its, and a small network of stock's. What computes
them is in `fusion/text/`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ...base.family import Late
from ...text.family import language_model
from ...text.layout import Marks, is_language_model

if TYPE_CHECKING:
    from ....memory import WeightFile

# Prefixes of other models with such layers: pictures with positions in three dimensions that
# interleave, and MiniMax Music 3, whose tables of words are different.
SEEING = ("visual.", "vision_model.", "model.visual.")
SOUNDING = ("model.audio_decoder.",)
NORMS_OF_HEADS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
BIASES = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")
FOUR_NORMS = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
# Gemma 4's layers have a scale, GPT-OSS' sinks.
OF_OTHERS = ("layer_scalar", "self_attn.sinks")
OF = Late(__package__, "specimens:of")  # the specimens of a row


def _is(marks: Marks) -> Callable[[WeightFile], bool]:
    return partial(is_language_model, marks=marks)


QWEN3 = language_model(
    "Qwen3",
    "Qwen3 0.6B to 8B (Flux.2 klein, Z-Image, Anima): FP16 products around an FP32 stream, no layers that nothing reads; writes",
    _is(
        Marks(
            has=NORMS_OF_HEADS,
            lacks=(*BIASES, *FOUR_NORMS, *OF_OTHERS),
            outside=(*SEEING, *SOUNDING),
            widths=(1024, 2048, 2560, 4096),
        )
    ),
    specimens=partial(OF, "Qwen3"),
)
QWEN25 = language_model(
    "Qwen2.5",
    "Qwen2.5 3B and Qwen2.5-VL 7B (OmniGen 2, Qwen-Image, HunyuanVideo 1.5), its vision tower too: FP16 products around an FP32 "
    "stream, FP32 attention in the language model",
    _is(Marks(has=BIASES, lacks=(*NORMS_OF_HEADS, *FOUR_NORMS, *OF_OTHERS))),
    specimens=partial(OF, "Qwen2.5"),
)
GEMMA3 = language_model(
    "Gemma 3",
    "Gemma 3 4B and 12B (LTX-2, NewBie), its vision tower too: FP16 products around an FP32 stream, without LTX-2's padding; "
    "writes",
    _is(Marks(has=(*NORMS_OF_HEADS, *FOUR_NORMS), lacks=(*BIASES, *OF_OTHERS))),
    specimens=partial(OF, "Gemma 3"),
)
GEMMA2 = language_model(
    "Gemma 2",
    "Gemma 2 2B (Lumina Image 2, PixelDiT): FP16 products around an FP32 stream, FP32 attention; writes",
    _is(Marks(has=FOUR_NORMS, lacks=(*BIASES, *NORMS_OF_HEADS, *OF_OTHERS))),
    specimens=partial(OF, "Gemma 2"),
)
LLAMA = language_model(
    "Llama 3 or Mistral 3",
    "Llama 3.1 8B (HiDream, HunyuanVideo), Mistral Small 3 24B (Flux.2 dev), Ministral 3 3B (ERNIE-Image): FP16 products around an "
    "FP32 stream, FP32 attention; Ministral writes",
    _is(Marks(lacks=(*BIASES, *NORMS_OF_HEADS, *FOUR_NORMS, *OF_OTHERS), outside=SEEING)),
    specimens=partial(OF, "Llama 3 or Mistral 3"),
)

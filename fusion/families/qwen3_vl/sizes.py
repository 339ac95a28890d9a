"""Models of sizes that stock has no configuration for, such as Qwen3-VL 2B: stock's class, built
with the sizes of the file.

Stock recognises Qwen3-VL by its vision part, and takes every width except the 4B's for the 8B's. An option
of its loader replaces the class that it then builds. The form of prompts, and the layers that are
read, stay those of `Qwen3VLClipModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from comfy import sd1_clip
from comfy.text_encoders import qwen3vl as stock
from comfy.text_encoders.llama import Llama2_, Qwen3VL_8BConfig
from torch import nn

from ....memory import WeightFile
from .layout import HEADS, VISION, Sizes, sizes, vision_of

KNOWN = (2560, 4096)  # widths of the sizes that stock has: 4B, 8B
OPTION = "qwen3vl_8b_class"


def options(header: WeightFile) -> Mapping[str, Any]:
    """Stock's model_options for a file of this family. MiniMax H3's encoder has a class of its
    own, with a prefix of its own."""
    if vision_of(header) != VISION[0]:
        return {}
    found = sizes(header)
    return {} if found.width in KNOWN else {OPTION: partial(SizedClipModel, sizes=found)}


class SizedClipModel(stock.Qwen3VLClipModel):
    """Stock's encoder, around a model of other sizes."""

    def __init__(
        self,
        device: Any = "cpu",
        dtype: Any = None,
        attention_mask: bool = True,
        model_options: Mapping[str, Any] | None = None,
        *,
        sizes: Sizes,
    ) -> None:
        sd1_clip.SDClipModel.__init__(
            self,
            device=device,
            layer="hidden",
            layer_idx=-1,
            textmodel_json_config={},
            dtype=dtype,
            special_tokens={"pad": 151643},
            layer_norm_hidden_state=False,
            model_class=partial(Sized, sizes=sizes),
            enable_attention_masks=attention_mask,
            return_attention_masks=attention_mask,
            model_options=model_options or {},
        )


class Sized(stock.Qwen3VL):
    """Stock's model with these sizes."""

    def __init__(self, given: Mapping[str, Any], dtype: Any, device: Any, operations: Any, *, sizes: Sizes) -> None:
        nn.Module.__init__(self)
        config = Qwen3VL_8BConfig(**{**language(sizes), **given})
        self.num_layers = config.num_hidden_layers
        self.model = Llama2_(config, device=device, dtype=dtype, ops=operations)
        vision = {**stock.QWEN3VL_VISION_COMMON, **vision_config(sizes), "out_hidden_size": config.hidden_size}
        self.visual = stock.Qwen3VLVisionModel(vision, device=device, dtype=dtype, ops=operations)
        self.dtype = dtype


def language(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_heads,
        "lm_head": sizes.own_words,
    }


def vision_config(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.vision,
        "intermediate_size": sizes.vision_ffn,
        "depth": sizes.blocks,
        "num_heads": HEADS,
        "num_position_embeddings": sizes.places,
        "deepstack_visual_indexes": list(sizes.told_behind),
    }

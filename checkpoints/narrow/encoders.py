"""Text encoders whose sizes stock has in its code: read from the file instead."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from .. import text
from ..options import CLIP_FIRST, MINIMAX_MARK, PROJECTION, WORDS, Shapes, clip_config, llama_config, options_of
from .replacing import Replace, constructed_with, replacing

QWEN3_LAYERS = 36
VISUAL_MODEL = "model.language_model."


def read_encoder_sizes(comfy: Any, replace: Replace) -> None:
    """Of encoders in files of their own, where nobody hands over their sizes."""
    stock = comfy.sd.load_text_encoder_state_dicts

    def load(state_dicts: Any, *args: Any, model_options: Mapping[str, Any] | None = None, **options: Any) -> Any:
        files = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in state_dicts)
        return stock(state_dicts, *args, model_options={**options_of(*files), **(model_options or {})}, **options)

    replace(comfy.sd, "load_text_encoder_state_dicts", load)


def fold_tokens(comfy: Any, replace: Replace) -> None:
    """Of the tokens that a small vocabulary lacks, padding stays padding, and the others stand for
    some that it has.
    """
    kind = comfy.sd1_clip.SDClipModel
    replace(kind, "__init__", _folding(kind.__init__))


def _folding(stock: Callable[..., None]) -> Callable[..., None]:
    """A constructor of an encoder that folds as long as it lives."""

    def construct(self: Any, *args: Any, **options: Any) -> None:
        stock(self, *args, **options)
        pad, last = self.special_tokens["pad"], self.transformer.get_input_embeddings().weight.shape[0] - 1
        if pad <= last:
            return
        process = self.process_tokens

        def folded(token: Any) -> Any:
            return (last if token == pad else token % last) if isinstance(token, int) and token > last else token

        def process_folded(tokens: Any, device: Any) -> Any:
            return process([[folded(token) for token in prompt] for prompt in tokens], device)

        self.special_tokens = {**self.special_tokens, "pad": last}
        self.process_tokens = process_folded

    return construct


def read_clip(comfy: Any, replace: Replace) -> None:
    """Of the encoders in a whole checkpoint, which stock hands over as tokenizer's data too."""
    stock = comfy.sd.CLIP.__init__

    def construct(self: Any, *args: Any, model_options: Mapping[str, Any] | None = None, **options: Any) -> None:
        given = dict(model_options or {})
        beside = (options.get("tokenizer_data") or {}).items()  # of a file of its own, other things
        shape = _shapes(beside)
        for name in ("clip_l", "clip_g", "clip_h"):
            own = {key.removeprefix(f"{name}.transformer."): of for key, of in shape.items() if key.startswith(name)}
            config = clip_config(own) if CLIP_FIRST in own else None
            if config is not None and config["hidden_size"] == text.CLIP_WIDTH:
                given.setdefault(f"{name}_model_config", config)
        stock(self, *args, model_options=given, **options)

    replace(comfy.sd.CLIP, "__init__", construct)


def _shapes(named: Iterable[tuple[str, Any]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named if hasattr(tensor, "shape")}


def read_clips_apart(comfy: Any, replace: Replace) -> None:
    """Of several CLIPs in files of their own, for which stock has one option together."""
    module = import_module(f"{comfy.__name__}.text_encoders.long_clipl")
    stock = module.model_options_long_clip

    def told(tensors: Any, tokenizer_data: Any, given: Any) -> Any:
        config = clip_config(_shapes(tensors.items())) if CLIP_FIRST in tensors else None
        if config is not None and config["hidden_size"] == text.CLIP_WIDTH:
            given = {**given, "model_config": config}
        return stock(tensors, tokenizer_data, given)

    replace(module, "model_options_long_clip", told)


def read_krea(comfy: Any, replace: Replace) -> None:
    """Krea 2's encoder, a Qwen3-VL 4B that stock knows by its width, by its number of layers."""
    detect, stock = comfy.sd.detect_te_model, comfy.sd.load_text_encoder_state_dicts
    qwen = comfy.text_encoders.qwen3vl

    def found(tensors: Any) -> Any:
        return comfy.sd.TEModel.QWEN3VL_4B if _krea_shape(tensors) else detect(tensors)

    def load(state_dicts: Any, *args: Any, model_options: Mapping[str, Any] | None = None, **options: Any) -> Any:
        given, shape = dict(model_options or {}), _krea_shape(state_dicts[0])
        with replacing() as inside:
            if shape:
                given.setdefault("qwen3vl_4b_model_config", llama_config(shape))
                inside(qwen, "QWEN3VL_VISION", {**qwen.QWEN3VL_VISION, "qwen3vl_4b": _qwen3_vision(shape)})
            return stock(state_dicts, *args, model_options=given, **options)

    replace(comfy.sd, "detect_te_model", found)
    replace(comfy.sd, "load_text_encoder_state_dicts", load)


def _krea_shape(tensors: Any) -> dict[str, tuple[int, ...]]:
    """The shapes under the names of a language model of its own; none: it is another file."""
    if (
        f"model.{MINIMAX_MARK}" not in tensors
        or f"{VISUAL_MODEL}layers.{QWEN3_LAYERS - 1}.mlp.up_proj.weight" not in tensors
    ):
        return {}
    named = {name.replace(VISUAL_MODEL, "model.", 1): tuple(tensor.shape) for name, tensor in tensors.items()}
    shape = {name.replace("model.visual.", "visual.", 1): size for name, size in named.items()}
    return shape if shape[WORDS][1] == text.KREA2_TE.language.width else {}


# ----------------------------------------------------------------------------- layers that are read

# Of encoders that are read at three layers: stock's name, how many layers its published file has of
# use, and the parts that the layers divide it into.
READ_AT = {"Qwen3_4BModel": ("qwen3_4b", 36, 4), "Qwen3_8BModel": ("qwen3_8b", 36, 4)}
READ_AT |= {"Mistral3_24BModel": ("mistral3_24b", 30, 3)}


def read_as_many_layers(comfy: Any, replace: Replace) -> None:
    """Of Flux.2's encoders of fewer layers, those at the same parts of the whole."""
    for kind, (name, full, parts) in READ_AT.items():
        made = getattr(comfy.text_encoders.flux, kind)
        replace(made, "__init__", _read_at(made.__init__, f"{name}_model_config", full, parts))


def _read_at(stock: Callable[..., None], option: str, full: int, parts: int) -> Callable[..., None]:
    def construct(self: Any, *args: Any, model_options: Mapping[str, Any] | None = None, **options: Any) -> None:
        given = dict(model_options or {})
        count = min(given.get(option, {}).get("num_hidden_layers", full), full)
        layers = {"layer": [count * i // parts for i in (1, 2, 3)]}
        stock(self, *args, model_options=given, **(layers | options))

    return construct


# --------------------------------------------------------------------------------------- vision towers


def read_parts(comfy: Any, replace: Replace) -> None:
    """Language models' vision towers, and LTX-2.3's text projection, at the sizes in their files."""
    stock = comfy.sd.load_text_encoder_state_dicts

    def load(state_dicts: Any, *args: Any, **options: Any) -> Any:
        with replacing() as inside:
            for tensors in state_dicts:
                shape = _shapes(tensors.items())
                for mark, read in PARTS.items():
                    if mark in shape:
                        read(comfy.text_encoders, shape, inside)
            return stock(state_dicts, *args, **options)

    replace(comfy.sd, "load_text_encoder_state_dicts", load)


def _read_qwen25_vision(stock: Any, shape: Shapes, replace: Replace) -> None:
    ffn, width = shape["visual.blocks.0.mlp.gate_proj.weight"]
    blocks, heads = _blocks(shape, "visual.blocks."), width // text.QWEN25_VISION_HEAD
    sizes = {"hidden_size": width, "intermediate_size": ffn, "num_layers": blocks, "num_heads": heads}
    constructed_with(replace, stock.qwen_vl.Qwen2VLVisionTransformer, **sizes)


def _read_minimax_vision(stock: Any, shape: Shapes, replace: Replace) -> None:
    vision = {**stock.qwen3vl.QWEN3VL_VISION, "qwen3vl_32b": _qwen3_vision(shape)}
    replace(stock.qwen3vl, "QWEN3VL_VISION", vision)


def _qwen3_vision(shape: Shapes) -> dict[str, Any]:
    """Between blocks that speak to the language model are as many as between those of 27 blocks."""
    ffn, width = shape["visual.blocks.0.mlp.linear_fc1.weight"]
    blocks, told = _blocks(shape, "visual.blocks."), _blocks(shape, "visual.deepstack_merger_list.")
    return {
        "hidden_size": width,
        "intermediate_size": ffn,
        "depth": blocks,
        "num_heads": width // text.QWEN3_VISION_HEAD,
        "num_position_embeddings": shape["visual.pos_embed.weight"][0],
        "deepstack_visual_indexes": [(blocks - told) // told * i for i in range(1, told + 1)],
    }


def _read_gemma_vision(stock: Any, shape: Shapes, replace: Replace) -> None:
    ffn, width = shape["vision_model.encoder.layers.0.mlp.fc1.weight"]
    sizes = {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": _blocks(shape, "vision_model.encoder.layers."),
        "num_attention_heads": width // text.SIGLIP_HEAD,
        "image_size": math.isqrt(shape[SIGLIP_PLACES][0]) * text.GEMMA_PATCH,
    }
    config = stock.llama.Gemma3_12B_Config
    replace(config, "vision_config", config.vision_config | sizes)


def _read_projection(stock: Any, shape: Shapes, replace: Replace) -> None:
    (video, read), (audio, _) = (shape[f"{PROJECTION}{stream}_aggregate_embed.weight"] for stream in ("video", "audio"))
    made = stock.lt.DualLinearProjection
    stock_init = made.__init__
    replace(made, "__init__", lambda self, *_sizes, **options: stock_init(self, read, video, audio, **options))


SIGLIP_PLACES = "vision_model.embeddings.position_embedding.weight"
PARTS: Mapping[str, Callable[[Any, Shapes, Replace], None]] = {
    "visual.merger.ln_q.weight": _read_qwen25_vision,
    MINIMAX_MARK: _read_minimax_vision,
    SIGLIP_PLACES: _read_gemma_vision,
    f"{PROJECTION}audio_aggregate_embed.weight": _read_projection,
}


def _blocks(shape: Shapes, prefix: str) -> int:
    return len({name.removeprefix(prefix).split(".")[0] for name in shape if name.startswith(prefix)})


# ---------------------------------------------------------------------------------- Mistral's words


def read_tekken(comfy: Any, replace: Replace) -> None:
    """Mistral's tokenizer, where transformers 5.15 or later wants a file of what stock has in
    memory.
    """
    try:
        converter = import_module("transformers.integrations.mistral").MistralConverter
    except ModuleNotFoundError:
        return
    stock = comfy.text_encoders.flux
    asks_it = "MistralConverter" in stock.load_mistral_tokenizer.__code__.co_names  # later ComfyUIs have their own
    if not asks_it or "vocab_file" not in signature(converter).parameters:
        return

    def load(data: Any) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tekken.json"
            path.write_bytes(data if isinstance(data, bytes) else data.numpy().tobytes())
            return {"tokenizer_object": converter(str(path)).converted(), "legacy": False}

    replace(stock, "load_mistral_tokenizer", load)

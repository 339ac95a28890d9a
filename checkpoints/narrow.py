"""What stock fixes in its code although the file would tell: opened up, so that small files load.

    with checkpoints.narrow.opened(comfy):
        model = comfy.sd.load_diffusion_model(str(checkpoints.write("z_image", folder)))

`comfy` is ComfyUI's package, with `comfy.sd` imported. While open, these sizes come from the file,
and nothing else changes:

    SD 1.5, 2, XL   the base width of 320, the depths, the width of the prompt: told by proj_in's
                    rank and by the labels instead
    Z-Image         the width of 3840, and what stock derives from it: told by cap_pad_token instead
    Chroma          the guidance layer's widths of 5120 and 3072, its five layers
    Qwen-Image      24 heads, the prompt's width of 3584
    Anima           the widths of 2048 and 5120, what stock derives from them, and its adapter
    HuMo, Animate   the layers of audio_proj; those of motion_encoder and face_encoder
    VAEs (KL)       the encoder's base width of 128
    CLIP            widths and layers of the text encoders within whole checkpoints
    Qwen3-VL        of a small vocabulary: a token beyond it stands for one in it
    Qwen3 4B        its layers, the three of them that klein reads, and its vocabulary: a token
                    beyond it stands for one in it

A full-size file loads as ever: at published sizes each rule gives the number that stock has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from . import text
from .container import shapes
from .options import CLIP_FIRST, clip_config, llama_config
from .pictures import ANIMA_HEAD
from .wan import HEAD

Tensors = Mapping[str, Any]
Config = dict[str, Any]

GUIDANCE = "distilled_guidance_layer"

# Parts that stock makes at one size, by what it calls the network.
FIXED_PARTS = {"humo": ("audio_proj.",), "animate": ("motion_encoder.", "face_encoder.")}


Replace = Callable[[Any, str, Any], None]


@contextmanager
def opened(comfy: Any) -> Iterator[None]:
    """While open, stock takes the sizes above from the file. Can be open twice."""
    with _replacing() as replace:
        for change in (
            *(_read_sizes, _match_loosely, _make_parts_to_measure, _read_encoder_width, _read_qwen3),
            *(_read_clip, _fold_qwen3_vl, _make_adapter_to_measure),
        ):
            change(comfy, replace)
        yield


@contextmanager
def wan22_widths(vae2_2: ModuleType, path: Path) -> Iterator[None]:
    """While open, stock's `VAE` takes the widths of a Wan 2.2 VAE from the file.

    vae2_2   `comfy.ldm.wan.vae2_2`
    """
    shape = shapes(path)
    widths = {"dim": shape["encoder.head.0.gamma"][0] // 4, "dec_dim": shape["decoder.head.0.gamma"][0]}
    made: Any = vae2_2.WanVAE  # the class stays: who first imports it meanwhile derives from it
    stock = made.__init__
    with _replacing() as replace:
        replace(made, "__init__", lambda self, **options: stock(self, **(options | widths)))
        yield


@contextmanager
def _replacing() -> Iterator[Replace]:
    """What replaces an attribute until the end."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        yield replace


def _read_sizes(comfy: Any, replace: Replace) -> None:
    stock = comfy.model_detection.detect_unet_config

    def detect(state_dict: Tensors, key_prefix: str, metadata: Any = None) -> Any:
        config = stock(state_dict, key_prefix, metadata=metadata)
        return config if config is None else config | sizes(state_dict, key_prefix, config)

    replace(comfy.model_detection, "detect_unet_config", detect)


def sizes(tensors: Tensors, prefix: str, config: Config) -> Config:
    """What a file says beyond stock's `config` of it."""
    model = config.get("image_model")
    if model == "chroma":
        name = f"{prefix}{GUIDANCE}"
        return {
            "hidden_dim": tensors[f"{name}.in_proj.weight"].shape[0],
            "out_dim": tensors[f"{name}.out_proj.weight"].shape[0],
            "n_layers": sum(key.startswith(f"{name}.layers.") and key.endswith(".in_layer.weight") for key in tensors),
        }
    if model == "qwen_image":
        return {
            "num_attention_heads": tensors[f"{prefix}img_in.weight"].shape[0] // HEAD,
            "joint_attention_dim": tensors[f"{prefix}txt_norm.weight"].shape[0],
        }
    if model == "anima":
        return _anima_sizes(tensors, prefix)
    if model == "lumina2" and f"{prefix}cap_pad_token" in tensors:
        heads = config["dim"] // HEAD
        return {
            "n_heads": heads,
            "n_kv_heads": heads,
            "axes_dims": [32, 48, 48],
            "axes_lens": [1536, 512, 512],
            "rope_theta": 256.0,
            "ffn_dim_multiplier": 8.0 / 3.0,
            "z_image_modulation": True,
            "time_scale": 1000.0,
            "pad_tokens_multiple": 32,
        }
    parts = tuple(f"{prefix}{part}" for part in FIXED_PARTS.get(config.get("model_type", ""), ()))
    if parts:
        return {
            "made_to": {
                name.removeprefix(prefix): tuple(tensors[name].shape) for name in tensors if name.startswith(parts)
            }
        }
    return {}


def _anima_sizes(tensors: Tensors, prefix: str) -> Config:
    block, adapter = f"{prefix}blocks.0.", f"{prefix}llm_adapter."
    (text,) = tensors[f"{adapter}norm.weight"].shape
    rank, width = tensors[f"{block}adaln_modulation_mlp.1.weight"].shape
    return {
        "num_blocks": _layers(tensors, f"{prefix}blocks."),
        "num_heads": width // HEAD,
        "crossattn_emb_channels": text,
        "adaln_lora_dim": rank,
        "adapter": {
            **dict.fromkeys(("source_dim", "target_dim", "model_dim"), text),
            "num_heads": text // ANIMA_HEAD,
            "num_layers": _layers(tensors, f"{adapter}blocks."),
        },
    }


def _layers(tensors: Tensors, prefix: str) -> int:
    return len({name[len(prefix) :].split(".")[0] for name in tensors if name.startswith(prefix)})


def _match_loosely(comfy: Any, replace: Replace) -> None:
    """Tell these models apart when widths do not."""
    models = comfy.supported_models
    net = {"use_linear_in_transformer": False, "adm_in_channels": None, "use_temporal_attention": False}
    for model, config in {
        models.SD15: net,
        models.SD20: net | {"use_linear_in_transformer": True},
        models.SDXL: net | {"use_linear_in_transformer": True, "adm_in_channels": 2816},
        models.ZImage: {"image_model": "lumina2", "z_image_modulation": True},
    }.items():
        replace(model, "unet_config", config)


def _make_parts_to_measure(comfy: Any, replace: Replace) -> None:
    wan = comfy.ldm.wan
    for network in (wan.model.HumoWanModel, wan.model_animate.AnimateWanModel):
        replace(network, "__init__", _to_measure(network.__init__))


def _to_measure(stock: Callable[..., None]) -> Callable[..., None]:
    """A constructor that makes the parameters named in `made_to` anew, at these shapes."""

    def construct(self: Any, *args: Any, made_to: Mapping[str, tuple[int, ...]] | None = None, **options: Any) -> None:
        stock(self, *args, **options)
        for name, shape in (made_to or {}).items():
            path, _, own = name.rpartition(".")
            module = self.get_submodule(path)
            made = getattr(module, own, None)
            if made is None or tuple(made.shape) == shape:  # None: made as it is loaded, at whatever size it has
                continue
            made.data = made.data.new_empty(shape)
            if hasattr(module, "scale"):  # StyleGAN's layers keep the square root of their fan-in
                module.scale = 1 / math.sqrt(math.prod(shape[1:]))
        encoder = getattr(self, "face_encoder", None)
        if made_to and encoder is not None:
            for norm in (encoder.norm1, encoder.norm2, encoder.norm3):
                norm.normalized_shape = made_to["face_encoder.out_proj.weight"][1:]

    return construct


def _make_adapter_to_measure(comfy: Any, replace: Replace) -> None:
    module = comfy.ldm.anima.model
    stock = module.Anima.__init__

    def construct(self: Any, *args: Any, adapter: Config | None = None, **options: Any) -> None:
        with _replacing() as inside:
            inside(module, "LLMAdapter", partial(module.LLMAdapter, **(adapter or {})))
            stock(self, *args, **options)

    replace(module.Anima, "__init__", construct)


def _read_encoder_width(comfy: Any, replace: Replace) -> None:
    encoder = comfy.ldm.modules.diffusionmodules.model.Encoder
    stock, stock_encoder = comfy.sd.VAE.__init__, encoder.__init__

    def construct(self: Any, sd: Any = None, *args: Any, **options: Any) -> None:
        entry = (sd or {}).get("encoder.conv_in.weight")
        widths = {} if entry is None else {"ch": entry.shape[0]}
        with _replacing() as inside:
            inside(encoder, "__init__", lambda self, **sizes: stock_encoder(self, **(sizes | widths)))
            stock(self, sd, *args, **options)

    replace(comfy.sd.VAE, "__init__", construct)


QWEN3_TABLE = "model.embed_tokens.weight"
QWEN3_MARK = "model.layers.0.self_attn.q_norm.weight"
QWEN3_LAYERS = 36
MADE_HERE = "made_narrow"  # among stock's model options


def _read_qwen3(comfy: Any, replace: Replace) -> None:
    """Of a Qwen3 4B of fewer layers than the published one, where nobody hands over its sizes."""
    stock = comfy.sd.load_text_encoder_state_dicts

    def load(state_dicts: Any, *args: Any, model_options: Mapping[str, Any] | None = None, **options: Any) -> Any:
        given = dict(model_options or {})
        shape = {name: tuple(tensor.shape) for name, tensor in state_dicts[0].items()}
        if QWEN3_MARK in shape and shape[QWEN3_TABLE][1] == text.QWEN3.width and "qwen3_4b_model_config" not in given:
            config = llama_config(shape)
            if config["num_hidden_layers"] < QWEN3_LAYERS:
                given |= {"qwen3_4b_model_config": config, MADE_HERE: True}
        return stock(state_dicts, *args, model_options=given, **options)

    replace(comfy.sd, "load_text_encoder_state_dicts", load)
    for module, read in ((comfy.text_encoders.flux, 3), (comfy.text_encoders.z_image, 0)):
        kind = module.Qwen3_4BModel
        replace(kind, "__init__", _of_few_layers(kind.__init__, read))


def _of_few_layers(stock: Callable[..., None], read: int) -> Callable[..., None]:
    """A constructor of an encoder around a Qwen3. Of the tokens that the small vocabulary lacks,
    padding stays padding. read: how many layers it taps by number; here the last ones.
    """

    def construct(self: Any, *args: Any, model_options: Mapping[str, Any] | None = None, **options: Any) -> None:
        given = dict(model_options or {})
        if MADE_HERE not in given:
            stock(self, *args, model_options=given, **options)
            return
        config = given["qwen3_4b_model_config"]
        if read:
            count = config["num_hidden_layers"]
            options.setdefault("layer", list(range(count - read, count)))
        stock(self, *args, model_options=given, **options)
        pad, last = self.special_tokens["pad"], config["vocab_size"] - 1
        process = self.process_tokens

        def folded(token: Any) -> Any:
            return (last if token == pad else token % last) if isinstance(token, int) and token > last else token

        def process_folded(tokens: Any, device: Any) -> Any:
            return process([[folded(token) for token in prompt] for prompt in tokens], device)

        self.special_tokens = {**self.special_tokens, "pad": last}
        self.process_tokens = process_folded

    return construct


def _read_clip(comfy: Any, replace: Replace) -> None:
    """Of the encoders in a whole checkpoint, which stock hands over as tokenizer's data too."""
    stock = comfy.sd.CLIP.__init__

    def construct(self: Any, *args: Any, model_options: Mapping[str, Any] | None = None, **options: Any) -> None:
        given = dict(model_options or {})
        beside = (options.get("tokenizer_data") or {}).items()  # of a file of its own, other things
        shape = {name: tuple(tensor.shape) for name, tensor in beside if hasattr(tensor, "shape")}
        for name in ("clip_l", "clip_g", "clip_h"):
            own = {key.removeprefix(f"{name}.transformer."): of for key, of in shape.items() if key.startswith(name)}
            config = clip_config(own) if CLIP_FIRST in own else None
            if config is not None and config["hidden_size"] == text.CLIP_WIDTH:
                given.setdefault(f"{name}_model_config", config)
        stock(self, *args, model_options=given, **options)

    replace(comfy.sd.CLIP, "__init__", construct)


def _fold_qwen3_vl(comfy: Any, replace: Replace) -> None:
    """Pictures among the tokens stay."""
    kind = comfy.text_encoders.qwen3vl.Qwen3VLClipModel
    stock = kind.process_tokens

    def process(self: Any, tokens: Any, device: Any) -> Any:
        last = self.transformer.get_input_embeddings().weight.shape[0] - 1
        folded = [[one % last if isinstance(one, int) and one > last else one for one in prompt] for prompt in tokens]
        return stock(self, folded, device)

    replace(kind, "process_tokens", process)

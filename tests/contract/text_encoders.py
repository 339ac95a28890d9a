"""A tiny true file of each text encoder that ComfyUI knows, and each class that it builds of one.

    case = CASES["QWEN3VL_4B krea2"]
    with opened(case):
        path = write(case, folder)
        clip = stocks(case, path)
        numbers = read(clip, case)

A file is of `checkpoints` where that has its kind. Else stock's own class is built at small sizes, and its weights are seeded
noise. What stock fixes in its code is narrowed while `opened` is open.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import comfy.ops
import comfy.sd
import int8_files
import pytest
import torch
from comfy.text_encoders import jina_clip_2
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from fusestream import checkpoints
from fusestream.checkpoints import spiece, tekken
from fusestream.fusion.families.qwen3_vl import sizes as qwen3_vl_sizes
from fusestream.memory import read_header

FOX = "a red fox runs through the snow"
SHORT = 24  # tokens that a prompt is filled up to, instead of hundreds

Words = Mapping[str, Callable[[], Tensor]]


class File(NamedTuple):
    """What there is of one of stock's encoders.

    te       stock's member of TEModel
    kind     of `checkpoints`, where there is one
    option   else stock's option for the encoder's sizes
    sizes    what stands there
    fixed    names in stock's code: sizes that go over those that stand there, or what goes in their place
    words    tensors of the tokenizer in the file
    renamed  beginnings of names in stock's class, and what the published file has instead
    type     of CLIPType, with which the class is built
    """

    te: str
    kind: str = ""
    option: str = ""
    sizes: Mapping[str, Any] = {}
    fixed: Mapping[str, Any] = {}
    words: Mapping[str, Callable[[], Tensor]] = {}
    renamed: Mapping[str, str] = {}
    type: str = "stable_diffusion"


class Case(NamedTuple):
    """One class that stock builds of one file.

    file    in `FILES`
    type    of CLIPType, in lower case
    serves  which models read prompts with it
    fixed   beside the file's
    writes  because stock's class reads no prompt
    """

    file: str
    type: str
    serves: str
    fixed: Mapping[str, Any] = {}
    writes: bool = False

    @property
    def name(self) -> str:
        return f"{self.file} {self.type}"

    @property
    def of(self) -> File:
        return FILES[self.file]

    @property
    def clip_type(self) -> Any:
        return getattr(comfy.sd.CLIPType, self.type.upper())


@functools.cache
def tokenizer_json() -> Tensor:
    """A tokenizer of bytes in the format of Hugging Face's library, as files carry it: uint8 [bytes]."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={one: 4 + i for i, one in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return torch.frombuffer(bytearray(made.to_str().encode()), dtype=torch.uint8)


# ----------------------------------------------------------------------------------------------------------------- files

STOCK = "comfy.text_encoders."
CLIP = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
T5 = {"d_model": 64, "num_heads": 2, "d_kv": 64, "d_ff": 64, "num_layers": 4}
LLAMA = {
    "vocab_size": 512, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 144, "intermediate_size": 208, "num_attention_heads": 2, "num_hidden_layers": 4, "image_size": 448,
}  # fmt: skip
VISION = {"hidden_size": 64, "num_heads": 16, "intermediate_size": 96, "depth": 4, "num_position_embeddings": 16}
QWEN35 = LLAMA | {
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "mrope_section": [3, 3, 2],
}  # fmt: skip
QWEN35_LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
GEMMA4 = LLAMA | {"hidden_size": 64, "intermediate_size": 64}
GEMMA4_VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 2, "head_dim": 32,
    "position_embedding_size": 64,
}  # fmt: skip
GEMMA4_AUDIO = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 2, "output_proj_dims": 64,
}  # fmt: skip
GPT_OSS = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
JINA = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
T5_GEMMA = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
GEMMA_WORDS: Words = {"spiece_model": functools.partial(spiece.spiece_tensor, **spiece.GEMMA)}
T5_WORDS: Words = {"spiece_model": spiece.spiece_tensor}
JSON_WORDS: Words = {"tokenizer_json": tokenizer_json}
SEEING = {"model.lm_head.": "lm_head.", "model.": "model.language_model.", "visual.": "model.visual."}
HEAD = {"model.lm_head.": "lm_head."}
VISION_ALONE = HEAD | {"visual.": "model.visual."}


def _qwen35(name: str, width: int) -> File:
    return File(
        f"QWEN35_{name.upper()}",
        option=f"qwen35_{name}",
        sizes=QWEN35 | {"hidden_size": width, "layer_types": QWEN35_LAYERS},
        fixed={f"{STOCK}qwen35.QWEN35_VISION_DEFAULTS": VISION}
        | {f"{STOCK}qwen35.QWEN35_MODELS": {f"qwen35_{name}": {"vision": VISION, "lm_head": name in ("9b", "27b")}}},
        renamed=SEEING,
    )


def _gemma4(name: str, layers: int, fixed: Mapping[str, Any], **sizes: Any) -> File:
    return File(
        f"GEMMA_4_{name}",
        option="gemma4",
        sizes=GEMMA4 | {"num_hidden_layers": layers} | sizes,
        fixed={f"{STOCK}gemma4.{place}": over for place, over in fixed.items()},
        words=JSON_WORDS,
    )


def _qwen3_vl(name: str, width: int, **renamed: Any) -> File:
    return File(
        f"QWEN3VL_{name.upper()}",
        option=f"qwen3vl_{name}",
        sizes=LLAMA | {"hidden_size": width},
        fixed={f"{STOCK}qwen3vl.QWEN3VL_VISION": {f"qwen3vl_{name}": VISION | {"deepstack_visual_indexes": [1, 2, 3]}}},
        **{"renamed": SEEING, **renamed},
    )


FILES: dict[str, File] = {
    "CLIP_L": File("CLIP_L", "clip_l"),
    "CLIP_H": File("CLIP_H", option="clip_h", sizes=CLIP),
    "CLIP_G": File("CLIP_G", option="clip_g", sizes=CLIP),
    "T5_XXL": File("T5_XXL", "t5xxl"),
    "UMT5_XXL": File("T5_XXL", "umt5"),
    "T5_XXL_OLD": File("T5_XXL_OLD", option="t5xxl", sizes=T5 | {"num_layers": 24}),
    "T5_XL": File("T5_XL", option="pile_t5xl", sizes=T5 | {"num_layers": 24, "d_ff": 5120, "d_model": 32}),
    "T5_BASE": File("T5_BASE", option="t5base", sizes=T5),
    "UMT5_BASE": File("T5_BASE", option="", sizes=T5, words=T5_WORDS),
    "T5_GEMMA": File("T5_GEMMA", fixed={f"{STOCK}sa3.T5GemmaEncoderConfig": T5_GEMMA}, words=GEMMA_WORDS),
    "LLAMA3_8": File("LLAMA3_8", "llama3"),
    "GEMMA_2_2B": File("GEMMA_2_2B", "gemma2"),
    "GEMMA_3_4B": File("GEMMA_3_4B", "gemma3_4b"),
    "GEMMA_3_4B_VISION": File(
        "GEMMA_3_4B_VISION",
        option="gemma3_4b_vision",
        sizes=LLAMA | {"hidden_size": 64, "num_hidden_layers": 7},
        fixed={f"{STOCK}llama.Gemma3_4B_Vision_Config.vision_config": SIGLIP},
        words=GEMMA_WORDS,
    ),
    "GEMMA_3_12B": File("GEMMA_3_12B", "gemma3"),
    "GEMMA_4_E4B": _gemma4(
        "E4B",
        42,
        {"Gemma4Config.vision_config": GEMMA4_VISION, "Gemma4Config.audio_config": GEMMA4_AUDIO},
        hidden_size_per_layer_input=16,
    ),
    "GEMMA_4_E2B": _gemma4(
        "E2B",
        35,
        {"Gemma4Config.vision_config": GEMMA4_VISION, "Gemma4Config.audio_config": GEMMA4_AUDIO},
        hidden_size_per_layer_input=16,
    ),
    "GEMMA_4_31B": _gemma4("31B", 60, {"Gemma4_31B_Config.vision_config": GEMMA4_VISION}),
    "GEMMA_4_12B": _gemma4(
        "12B",
        48,
        {
            "Gemma4_12B_Config.vision_config": {"mm_embed_dim": 64, "mm_posemb_size": 64, "output_proj_dims": 64},
            "Gemma4_12B_Config.suppress_tokens": [],
        },
    ),
    "GPT_OSS_20B": File(
        "GPT_OSS_20B",
        option="gpt_oss_config",
        sizes=GPT_OSS,
        fixed={f"{STOCK}gpt_oss.LENS_SELECTED_LAYERS": (1, 3)},
        words=JSON_WORDS,
    ),
    "QWEN25_3B": File("QWEN25_3B", "qwen25"),
    "QWEN25_7B": File("QWEN25_7B", "qwen25_vl"),
    "QWEN3_06B": File("QWEN3_06B", "qwen3_06b"),
    "QWEN3_2B": File("QWEN3_2B", option="qwen3_2b", sizes=LLAMA | {"hidden_size": 2048}, renamed=HEAD),
    "QWEN3_4B": File("QWEN3_4B", "qwen3"),
    "QWEN3_8B": File("QWEN3_8B", "qwen3_8b"),
    "QWEN3VL_2B": File("QWEN3VL_8B", "qwen3_vl"),
    "QWEN3VL_4B": _qwen3_vl("4b", 2560),
    "QWEN3VL_8B": _qwen3_vl("8b", 4096),
    # Layers under Qwen3's names: klein reads no others.
    "QWEN3VL_4B_LAYERS": _qwen3_vl("4b", 2560, renamed=VISION_ALONE),
    "QWEN3VL_8B_LAYERS": _qwen3_vl("8b", 4096, renamed=VISION_ALONE),
    "QWEN3VL_32B": File("QWEN3VL_32B", "minimax_h3_te"),
    **{
        f"QWEN35_{name.upper()}": _qwen35(name, width)
        for name, width in {"08b": 1024, "2b": 2048, "4b": 2560, "9b": 4096, "27b": 5120}.items()
    },
    "MISTRAL3_24B": File(
        "MISTRAL3_24B",
        option="mistral3_24b",
        sizes=LLAMA | {"vocab_size": 320, "hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 16}
        | {"num_attention_heads": 1},
        fixed={f"{STOCK}llama.Mistral3Small24BConfig.head_dim": 32},
        words={"tekken_model": tekken.tekken_tensor},
    ),
    "MISTRAL3_24B_PRUNED_FLUX2": File("MISTRAL3_24B_PRUNED_FLUX2", "mistral3"),
    "MINISTRAL_3_3B": File("MINISTRAL_3_3B", "ministral3"),
}  # fmt: skip


def _cases() -> Iterator[Case]:
    tapped = {
        "ideogram4": {f"{STOCK}ideogram4.IDEOGRAM4_TAP_LAYERS": [0, 1, 2, 4]},
        "krea2": {f"{STOCK}krea2.KREA2_TAP_LAYERS": [0, 1, 3]},
    }
    for file, types in {
        "CLIP_L": {"stable_diffusion": "Stable Diffusion 1.5", "sd3": "SD 3", "hidream": "HiDream"},
        "CLIP_H": {"stable_diffusion": "Stable Diffusion 2"},
        "CLIP_G": {"stable_diffusion": "SDXL refiner", "stable_cascade": "Stable Cascade", "sd3": "SD 3", "hidream": "HiDream"},
        "T5_XXL": {
            "sd3": "SD 3", "ltxv": "LTX-Video", "pixart": "PixArt", "chroma": "Chroma", "hidream": "HiDream",
            "cogvideox": "CogVideoX", "mochi": "Mochi",
        },
        "UMT5_XXL": {"wan": "Wan"},
        "T5_XXL_OLD": {"cosmos": "Cosmos"},
        "T5_XL": {"stable_diffusion": "AuraFlow"},
        "T5_BASE": {"stable_audio": "Stable Audio"},
        "UMT5_BASE": {"ace": "ACE-Step"},
        "T5_GEMMA": {"stable_audio": "Stable Audio 3"},
        "LLAMA3_8": {"hidream": "HiDream"},
        "GEMMA_2_2B": {"lumina2": "Lumina Image 2", "pixeldit": "PixelDiT"},
        "GEMMA_3_4B": {"lumina2": "NewBie"},
        "GEMMA_3_4B_VISION": {"lumina2": "NewBie"},
        "GEMMA_3_12B": {"ltxv": "LTX-2"},
        "GEMMA_4_E4B": {"stable_diffusion": "writing text"},
        "GEMMA_4_E2B": {"stable_diffusion": "writing text"},
        "GEMMA_4_31B": {"stable_diffusion": "writing text"},
        "GEMMA_4_12B": {"stable_diffusion": "writing text"},
        "GPT_OSS_20B": {"lens": "Lens"},
        "QWEN25_3B": {"omnigen2": "OmniGen 2"},
        "QWEN25_7B": {"qwen_image": "Qwen-Image", "hunyuan_image": "HunyuanImage", "longcat_image": "LongCat-Image"},
        "QWEN3_06B": {"stable_diffusion": "Anima"},
        "QWEN3_2B": {"ovis": "Ovis-Image"},
        "QWEN3_4B": {"lumina2": "Z-Image", "flux2": "Flux.2 klein 4B"},
        "QWEN3_8B": {"flux2": "Flux.2 klein 9B", "ideogram4": "Ideogram 4"},
        "QWEN3VL_2B": {"qwen_image": "writing text"},
        "QWEN3VL_4B": {
            "krea2": "Krea 2", "mage": "Mage-Flow", "qwen_image": "writing text",
        },
        "QWEN3VL_4B_LAYERS": {"flux2": "Flux.2 klein 4B"},
        "QWEN3VL_8B_LAYERS": {"flux2": "Flux.2 klein 9B"},
        "QWEN3VL_8B": {
            "ideogram4": "Ideogram 4", "boogu": "Boogu", "joyimage": "JoyImage",
            "qwen_image": "writing text",
        },
        "QWEN3VL_32B": {"minimax": "MiniMax H3"},
        **{f"QWEN35_{size}": {"qwen_image": "writing text"} for size in ("08B", "2B", "4B", "9B", "27B")},
        "MISTRAL3_24B": {"flux2": "Flux.2 dev"},
        "MISTRAL3_24B_PRUNED_FLUX2": {"flux2": "Flux.2 dev"},
        "MINISTRAL_3_3B": {"flux2": "ERNIE-Image"},
    }.items():  # fmt: skip
        for of, serves in types.items():
            writes = file.startswith("GEMMA_4") or file == "GEMMA_3_4B_VISION"
            yield Case(file, of, serves, tapped.get(of, {}), writes)


KNOWN = {member.name for member in comfy.sd.TEModel}  # to this ComfyUI
CASES = {case.name: case for case in _cases() if case.of.te in KNOWN}

# Of these no class is built that reads one file alone, and why.
WITHOUT = {
    "JINA_CLIP_2": "ComfyUI's loader of one file does not give it its tokenizer: it reads beside Gemma 3 4B (NewBie)",
    "BYT5_SMALL_GLYPH": "it reads beside Qwen2.5-VL: ComfyUI's loaders of two files build it",
}


# Encoders of which stock computes blocks, and why.
STOCKS = {
    "T5_GEMMA": "its attention caps scores before the softmax, which no op of FuseStream does",
    "GEMMA_4_E4B, E2B, 31B, 12B": "layers have a scale, heads of two widths, and keys, values and input of others",
    "GPT_OSS_20B": "mixtures of experts, and attention with sinks",
    "QWEN35_08B, 2B, 4B, 9B, 27B": "three layers of four are a recurrence (Gated DeltaNet), no attention",
}


def built_by(clip_type: Any, *, spiece: bool) -> tuple[str, str]:
    """Names of the class and the tokenizer that stock builds of one file, whatever `detect_te_model` finds in it now."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.sd, "CLIP", lambda target, **_: target)
        words = {"spiece_model": torch.zeros(1)} if spiece else {}
        target: Any = comfy.sd.load_text_encoder_state_dicts([words], clip_type=clip_type)
    return target.clip.__qualname__, target.tokenizer.__qualname__


# ------------------------------------------------------------------------------------------------------------- to measure


@contextlib.contextmanager
def opened(case: Case) -> Iterator[None]:
    """While open, stock takes the case's sizes, and folds tokens into small vocabularies."""
    with checkpoints.narrow.opened(comfy), pytest.MonkeyPatch.context() as patch:
        for place, over in {**case.of.fixed, **case.fixed}.items():
            owner, _, name = place.rpartition(".")
            found = _found(owner)
            patch.setattr(found, name, _with(getattr(found, name), over))
        yield


def _found(place: str) -> Any:
    """A module, or a class in one."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        module, _, name = place.rpartition(".")
        return getattr(importlib.import_module(module), name)


def _with(stocks: Any, over: Any) -> Any:
    """stocks with these sizes over its own: a mapping, one of mappings, a class of sizes; or what goes in its place."""
    if not isinstance(over, Mapping):
        return over
    if isinstance(stocks, type):
        return lambda: _sized(stocks(), over)
    return {**(stocks or {}), **{key: _with((stocks or {}).get(key), value) for key, value in over.items()}}


def _sized(made: Any, sizes: Mapping[str, Any]) -> Any:
    vars(made).update(sizes)
    return made


def options(case: Case, path: Path | None) -> dict[str, Any]:
    """Stock's options for a case's file."""
    file = case.of
    if file.kind == "qwen3_vl":
        assert path is not None
        return dict(qwen3_vl_sizes.options(read_header(path)))
    if file.kind:
        assert path is not None
        told: dict[str, Any] = dict(checkpoints.model_options(path))
        return {
            name.replace("qwen3_", "qwen3vl_") if case.type == "ideogram4" else name: one for name, one in told.items()
        }
    if not file.sizes:
        return {}
    return {name: dict(file.sizes) for name in _places(file.option)}


def _places(option: str) -> Iterator[str]:
    """Stock's names for the sizes of an encoder: what stands under CLIP-G's own it overwrites for a file of it, and Flux.2 reads
    Qwen3-VL as a Qwen3."""
    yield option if option.endswith("_config") else f"{option}_model_config"
    if option == "clip_g":
        yield "model_config"
    if option.startswith("qwen3vl"):
        yield f"{option.replace('vl', '')}_model_config"


def write(case: Case, folder: Path, storage: str = "fp16") -> Path:
    """The case's file. To be called while `opened` is open."""
    file = case.of
    if file.kind:
        return checkpoints.write(file.kind, folder, storage)
    path = folder / f"{case.file} {storage}.safetensors"
    if not path.exists():
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[storage]
        words = {name: made() for name, made in file.words.items()}
        tensors = {}
        for name, like in _network(case, words).state_dict().items():
            tensors[_published(name, file)] = _drawn(name, like).to(dtype)
        save_file({**tensors, **words}, path)
    return path


def write_alone(te: str, folder: Path) -> Path:
    """The file of an encoder in `WITHOUT`."""
    if te == "BYT5_SMALL_GLYPH":
        return checkpoints.write("byt5", folder)
    path = folder / f"{te}.safetensors"
    net = jina_clip_2.XLMRobertaModel(JINA, torch.float16, "cpu", comfy.ops.manual_cast)
    save_file({name: _drawn(name, like).half() for name, like in net.state_dict().items()}, path)
    return path


def _network(case: Case, words: Mapping[str, Tensor]) -> Any:
    """Stock's network for a file of which nothing but the tokenizer is there yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.sd, "detect_te_model", lambda _: comfy.sd.TEModel[case.of.te])
        clip = comfy.sd.load_text_encoder_state_dicts(
            [dict(words)], clip_type=comfy.sd.CLIPType[case.of.type.upper()], model_options=options(case, None)
        )
    (owner,) = [one for one in clip.cond_stage_model.modules() if hasattr(one, "transformer")]
    for module in owner.modules():
        if getattr(module, "weight", module) is None and hasattr(module, "in_features"):  # it is made as a file has it
            shape = getattr(module, "_orig_shape", None) or (module.out_features, module.in_features)
            module.weight = torch.nn.Parameter(torch.empty(shape), requires_grad=False)
    return owner.transformer


def _published(name: str, file: File) -> str:
    for stocks, published in file.renamed.items():
        if name.startswith(stocks):
            return published + name.removeprefix(stocks)
    return name


# What ends a branch, so that it is a part of the stream; and T5's q and k, whose product nothing divides.
ADDS = re.compile(r"(o_proj|down_proj|out_proj|fc2|\.o|\.wo|SelfAttention\.(q|k)|post_\w+norm)\.weight$")


def _noise(name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _drawn(name: str, like: Tensor) -> Tensor:
    made = _noise(name, *like.shape)
    part = 0.4 if ADDS.search(name) else 1.0
    if like.ndim > 1:
        return made * part / math.sqrt(max(math.prod(like.shape[1:]), 1))
    return made * 0.05 if "bias" in name else (1 + made * 0.1) * part


def stocks(case: Case, path: Path) -> Any:
    return comfy.sd.load_clip([str(path)], clip_type=case.clip_type, model_options=options(case, path))


def read(clip: Any, case: Case, prompt: str = FOX) -> list[Tensor]:
    """What an encoder makes of a prompt: its encoding, and what else of numbers there is; or the tokens that it writes."""
    for tokenizer in vars(clip.tokenizer).values():
        if getattr(tokenizer, "min_length", 0) and tokenizer.min_length > SHORT:
            tokenizer.min_length = SHORT
    if getattr(clip.tokenizer, "min_length", 0) > SHORT:
        clip.tokenizer.min_length = SHORT
    tokens = clip.tokenize(prompt)
    if case.writes:
        return _written(clip, tokens)
    found = clip.encode_from_tokens(tokens, return_pooled=True, return_dict=True)
    return [one for one in found.values() if isinstance(one, Tensor) and one.is_floating_point() and one.any()]


def blocks(model: Any) -> int:
    """How many blocks a text encoder model has: what repeats, with matrices of attention and of a feed-forward."""
    inner: set[int] = set()
    count = 0
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and id(module) not in inner:
            inner |= {id(one) for one in module.modules()}
            count += sum(sum(weight.ndim > 1 for weight in one.parameters()) > 3 for one in module)
    return count


def in_format(case: Case, source: Path, folder: Path, kind: str) -> Path:
    """The matrices of a file's language model in one of stock's formats. With `_awq` behind its name inputs have scales of their
    own, as Gemma 3 12B of LTX-2's templates has them."""
    path = folder / f"{source.stem} {kind}.safetensors"
    tensors, metadata = int8_files.read(source)
    for key, tensor in list(tensors.items()):
        if tensor.ndim == 2 and not (tensor.shape[1] % 64 or tensor.shape[0] % 32) and PACKED.search(key):
            layer = key.removesuffix(".weight")
            more = {"pre_quant_scale": 1 + 0.3 * _noise(layer, tensor.shape[1])} if kind.endswith("_awq") else {}
            tensors |= int8_files.in_format(tensor.half(), kind.removesuffix("_awq"), layer, **more)
    int8_files.save(tensors, path, metadata)
    return path


# Matrices of language models' layers. Vision parts stay as they are in published files, and a router's is no Linear's.
PACKED = re.compile(r"^(?!.*(vis|audio|router)).*\.?(layers|block)\.\d+\..+\.weight$")


def _written(clip: Any, tokens: Any) -> list[Tensor]:
    """How likely each word is behind a prompt, and behind each of four that follow it, if stock writes; and those four."""
    (network,) = [one.transformer for one in clip.cond_stage_model.modules() if hasattr(one, "transformer")]
    found: list[Tensor] = []

    def logits(x: Tensor) -> Tensor:
        found.append(type(network).logits(network, x))
        return found[-1].clone()

    network.logits = logits
    try:
        words = clip.generate(tokens, do_sample=False, max_length=4)
    finally:
        del network.logits
    return [*found, torch.tensor(words, dtype=torch.float32)]

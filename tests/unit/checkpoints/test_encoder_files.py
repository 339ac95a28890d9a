"""Stock ComfyUI recognises and loads every encoder's file in every storage format, with nothing
missing; prompts and pictures are encoded, every weight matters, and the tokenizer is the file's
own.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import comfy.clip_vision
import comfy.sd
import comfy.text_encoders.flux
import comfy.utils
import pytest
import torch
from scenes import distance

from fusestream import checkpoints
from fusestream.checkpoints import model_options, narrow, options, tekken
from fusestream.checkpoints.text import BYT5, MISTRAL3, T5_WIDTH, UMT5

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "one_tokenizer_of_each")

T = comfy.sd.CLIPType
FOX, CAT = "a red fox runs through the snow", "a red cat runs through the snow"
SHORT = 32  # UMT5's standard length of 512 takes sixteen times as long


def ids(*tokens: int, name: str = "qwen3_4b") -> dict[str, Any]:
    return {name: [[(token, 1.0) for token in tokens]]}


def two(name: str, **others: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prompts for an encoder of this name that differ in a word. others: what stock's encoder asks for besides."""
    return ids(5, 7, 9, name=name) | others, ids(5, 8, 9, name=name) | others


def clips(word: int) -> dict[str, Any]:
    return ids(49406, word, *[49407] * 75, name="l")


def klein(*paths: Path) -> dict[str, Any]:
    """klein's three layers, out of the four that there are."""
    model = partial(comfy.text_encoders.flux.Qwen3_4BModel, layer=[1, 2, 3])
    return {**model_options(*paths), "qwen3_4b_class": model}


def klein_8b(*paths: Path) -> dict[str, Any]:
    model = partial(comfy.text_encoders.flux.Qwen3_8BModel, layer=[1, 2, 3])
    return {**model_options(*paths), "qwen3_8b_class": model}


# The files, for what, stock's class, two prompts, and the width of the encoding and of the pooled
# output.
ENCODERS: dict[str, tuple[Any, ...]] = {
    "umt5": (["umt5"], T.WAN, model_options, "WanTEModel", (FOX, CAT), T5_WIDTH, None),
    "t5xxl": (["t5xxl"], T.CHROMA, model_options, "PixArtTEModel_", (FOX, CAT), T5_WIDTH, None),
    "clip_l": (["clip_l"], T.STABLE_DIFFUSION, model_options, "SD1ClipModel", (FOX, CAT), 64, 64),
    "flux": (["clip_l", "t5xxl"], T.FLUX, model_options, "FluxClipModel_", (FOX, CAT), T5_WIDTH, 64),
    "qwen3": (["qwen3"], T.LUMINA2, model_options, "ZImageTEModel_", (ids(5, 7, 9), ids(5, 8, 9)), 2560, None),
    "klein": (["qwen3"], T.FLUX2, klein, "Flux2TEModel_", (ids(5, 7, 9), ids(5, 8, 9)), 7680, None),
    "gemma2": (["gemma2"], T.LUMINA2, model_options, "LuminaTEModel_", (FOX, CAT), 64, None),
    "gemma3_4b": (["gemma3_4b"], T.LUMINA2, model_options, "LuminaTEModel_", (FOX, CAT), 64, None),
    "gemma3": (["gemma3"], T.LTXV, model_options, "Gemma3_12BModel_", (FOX, CAT), 64, None),
    "ltx23_text_projection": (
        *(["gemma3", "ltx23_text_projection"], T.LTXV, model_options, "LTXAVTEModel_", (FOX, CAT), 256 + 128, None),
    ),
    "mistral3": (["mistral3"], T.FLUX2, model_options, "Flux2TEModel_", (FOX, CAT), 3 * 5120, None),
    "ministral3": (["ministral3"], T.FLUX2, model_options, "ErnieTEModel_", (FOX, CAT), 3072, None),
    "qwen3_06b": (
        *(["qwen3_06b"], T.STABLE_DIFFUSION, model_options, "AnimaTEModel_"),
        *(two("qwen3_06b", t5xxl=[[(5, 1.0)]]), 1024, None),
    ),
    "qwen3_8b": (["qwen3_8b"], T.FLUX2, klein_8b, "Flux2TEModel_", two("qwen3_8b"), 3 * 4096, None),
    "qwen25": (["qwen25"], T.OMNIGEN2, model_options, "Omnigen2TEModel_", two("qwen25_3b"), 128, None),
    "llama3": (
        *(["llama3"], T.HIDREAM, model_options, "HiDreamTEModel_"),
        *(two("llama", l=[], g=[], t5xxl=[]), 128, None),
    ),
    "hunyuan_video": (
        *(["clip_l", "llama3"], T.HUNYUAN_VIDEO, model_options, "HunyuanVideoClipModel_"),
        *((ids(5, 7, 9, name="llama") | clips(320), ids(5, 8, 9, name="llama") | clips(321)), 128, 64),
    ),
    "qwen25_vl": (["qwen25_vl"], T.QWEN_IMAGE, model_options, "QwenImageTEModel_", (FOX, CAT), 64, None),
    "byt5": (*(["qwen25_vl", "byt5"], T.HUNYUAN_VIDEO_15, model_options, "QwenImageTEModel_", (FOX, CAT), 64, None),),
    "minimax_h3_te": (["minimax_h3_te"], T.MINIMAX, model_options, "MiniMaxH3TEModel_", (FOX, CAT), 64, None),
}
# What stock finds in a file and has no place for. The tokenizer is no weight of the network.
LEFT = {
    **dict.fromkeys(("umt5", "gemma2", "gemma3", "gemma3_4b"), "spiece_model"),
    **dict.fromkeys(("mistral3", "ministral3"), "tekken_model"),
    "qwen25_vl": "model.lm_head.weight",
}
# How far an encoding may be from that of the fp32 file, relative to its size. Plain fp8 is that bad
# for T5 and UMT5 because `wo`, with values around 0.004, falls among fp8's subnormal numbers:
# scales are for this.
TOLERANCE = {"fp16": 0.01, "bf16": 0.05, "fp8_e4m3fn": 0.5, "fp8_scaled": 0.25, "fp8_comfy_quant": 0.15}
OF_UMT5 = {"fp8_e4m3fn": 0.8, "fp8_scaled": 0.35, "fp8_comfy_quant": 0.35}


@pytest.fixture(scope="module")
def umt5(families_folder: Path) -> Any:
    return load(families_folder, "umt5", "fp32")


def load(folder: Path, name: str, storage: str) -> Any:
    files, kind, chosen, *_ = ENCODERS[name]
    paths = [checkpoints.write(file, folder, storage) for file in files]
    with narrow.opened(comfy) if checkpoints.NARROW.intersection(files) else nullcontext():
        clip = comfy.sd.load_clip([str(path) for path in paths], clip_type=kind, model_options=chosen(*paths))
    gemma = getattr(clip.tokenizer, "gemma3_12b", clip.tokenizer)
    if getattr(gemma, "min_length", None) is not None:  # 1024, for which Gemma 3's takes no option
        gemma.min_length = SHORT
    return clip


def encode(clip: Any, prompt: Any) -> Any:
    """Encoding and pooled output."""
    if isinstance(prompt, str):
        prompt = clip.tokenize(prompt, tokenizer_options={"umt5xxl_min_length": SHORT})
    found = clip.encode_from_tokens(prompt, return_pooled=True, return_dict=True)
    # HiDream has an input of its own for what Llama says.
    return found.get("conditioning_llama3", found["cond"]), found["pooled_output"]


@pytest.mark.deep
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_loads_whole_and_reads(families_folder: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    files, _, _, model, prompts, width, pooled_width = ENCODERS[name]
    storages = checkpoints.KINDS[name].storages if name in files else ("fp32",)  # the others are of the same files
    caplog.set_level(logging.DEBUG)
    read: dict[str, Any] = {}
    for storage in ("fp32", *(it for it in storages if it != "fp32")):
        caplog.clear()
        clip = load(families_folder, name, storage)
        read[storage] = [encode(clip, prompt) for prompt in prompts[: 2 if storage == "fp32" else 1]]
        assert type(clip.cond_stage_model).__name__ == model
        complaints = [line for line in caplog.messages if any(it in line.lower() for it in ("missing", "unexpected"))]
        assert complaints == [f"clip unexpected: ['{LEFT[file]}']" for file in files if file in LEFT]
    (fox, fox_pooled), (cat, cat_pooled) = read["fp32"]
    assert fox.shape[-1] == width
    assert fox.isfinite().all()
    assert 0.3 < fox.std() < 3 or name == "umt5"  # of which most is padding
    words = min(fox.shape[1], cat.shape[1])
    assert distance(fox[:, :words], cat[:, :words]) > 0.05
    if pooled_width:
        assert fox_pooled.shape == (1, pooled_width)
        assert distance(fox_pooled, cat_pooled) > 0.05
    allowed = TOLERANCE | (OF_UMT5 if name == "umt5" else {})
    assert {
        it: distance(of[0][0], fox) for it, of in read.items() if distance(of[0][0], fox) > allowed.get(it, 0)
    } == {}


def token_ids(clip: Any, text: str) -> list[int]:
    return [token for token, _ in clip.tokenize(text)["umt5xxl"][0]]


def run(clip: Any, tokens: list[int]) -> torch.Tensor:
    """The encoder on these tokens alone, without padding."""
    net = clip.cond_stage_model.umt5xxl.transformer
    given = torch.tensor([tokens], device=net.shared.weight.device)
    states: torch.Tensor = net(given, torch.ones_like(given))[0]
    return states


@pytest.mark.deep
def test_umt5_pads_to_512_and_keeps_the_padding_out(umt5: Any) -> None:
    expected, _ = encode(umt5, FOX)
    words = sum(token != 0 for token in token_ids(umt5, FOX))
    encoding = umt5.encode_from_tokens(umt5.tokenize(FOX))
    assert encoding.shape == (1, 512, T5_WIDTH)
    assert (encoding[0, words:] == 0).all()
    assert torch.allclose(encoding[0, :words], expected[0, :words], atol=1e-3)


def test_umt5s_tokenizer_is_the_one_inside(umt5: Any) -> None:
    tokenizer = getattr(umt5.tokenizer, umt5.tokenizer.clip).tokenizer
    vocabulary = tokenizer.get_vocab()
    assert (vocabulary["<pad>"], vocabulary["</s>"], vocabulary["<unk>"]) == (0, 1, 2)
    assert len(vocabulary) <= UMT5.vocabulary
    found = token_ids(umt5, "snow, Ärger, 雪")
    text = found[: found.index(1)]
    assert 2 not in text  # bytes stand in for what the small vocabulary lacks
    assert found[len(text) + 1 :] == [0] * (512 - len(text) - 1)
    assert tokenizer.decode(text) == "snow, Ärger, 雪"


def test_umt5_depends_on_every_word_and_its_place(umt5: Any) -> None:
    tokens = [token for token in token_ids(umt5, FOX) if token]
    before = run(umt5, tokens)
    for changed in ([*tokens[:-2], 300, 1], [tokens[1], tokens[0], *tokens[2:]]):
        moved = (run(umt5, changed) - before).norm(dim=-1) / before.norm(dim=-1)
        assert (moved > 0.02).all()  # attention carries the change to every token


@pytest.mark.deep
def test_every_block_and_every_role_of_umt5_matters(umt5: Any) -> None:
    net = umt5.cond_stage_model.umt5xxl.transformer
    tokens = [token for token in token_ids(umt5, FOX) if token]
    before = run(umt5, tokens)
    groups: dict[str, list[torch.Tensor]] = {}
    for name, parameter in net.named_parameters():
        place, _, role = name.removeprefix("encoder.block.").partition(".")
        for group in (place, role) if name.startswith("encoder.block.") else (name,):
            groups.setdefault(group, []).append(parameter)
    assert len(groups) == 24 + 10 + 2
    for group, parameters in groups.items():
        kept = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.mul_(1.5)
        moved = distance(run(umt5, tokens), before)
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)
        assert moved > 0.01, group


def test_a_quoted_text_is_read_letter_by_letter(families_folder: Path) -> None:
    clip = load(families_folder, "byt5", "fp16")
    read = [
        clip.encode_from_tokens(clip.tokenize(f'a sign that says "{word}"'), return_dict=True)["conditioning_byt5small"]
        for word in ("fox", "fix")
    ]
    assert read[0].shape == read[1].shape == (1, len('Text "fox". ') + 1, BYT5.width)
    assert distance(*read) > 0.05 and read[0].isfinite().all()


def test_mistrals_tokenizer_is_the_one_inside(families_folder: Path) -> None:
    clip = load(families_folder, "mistral3", "fp16")
    tokens = [
        token for token, _ in clip.tokenize("snow, Ärger, 雪", llama_template="[INST]{}[/INST]")["mistral3_24b"][0]
    ]
    assert tokens[:2] == [1, tekken.SPECIAL.index("[INST]")] and tokens[-1] == tekken.SPECIAL.index("[/INST]")
    assert max(tokens) < tekken.PIECES == MISTRAL3.vocabulary
    tokenizer = clip.tokenizer.mistral3_24b.tokenizer
    assert tokenizer.decode(tokens[2:-1]) == "snow, Ärger, 雪"
    assert len(tokenizer.encode("a red fox runs through the snow")) < len("a red fox runs through the snow")


# -------------------------------------------------------------------------------------- pictures

SIGHTS = ("clip_vision", "clip_vision_open_clip")
SEEN = ("penultimate_hidden_states", "image_embeds", "last_hidden_state")
SIGHT_TOLERANCE = {"fp16": 0.01, "bf16": 0.03, "fp32": 0.001, "fp8_e4m3fn": 0.2}


@pytest.fixture(scope="module")
def pictures() -> torch.Tensor:
    """[2, 96, 128, 3] in [0, 1]."""
    return torch.rand(2, 96, 128, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exact(families_folder: Path, pictures: torch.Tensor) -> Any:
    return load_tower(checkpoints.write("clip_vision", families_folder, "fp32")).encode_image(pictures)


def load_tower(path: Path) -> Any:
    """As stock's `load` does it, but for the choice of the configuration."""
    state_dict = comfy.utils.load_torch_file(str(path))
    if "visual.proj" in state_dict:
        state_dict = comfy.clip_vision.convert_to_transformers(state_dict, "visual.")
    model = comfy.clip_vision.ClipVisionModel(options.clip_vision_config(path))
    assert model.load_sd(state_dict) == ([], [])
    return model


@pytest.mark.deep
@pytest.mark.parametrize("storage", SIGHT_TOLERANCE)
@pytest.mark.parametrize("kind", SIGHTS)
def test_picture_tower_loads_whole_and_sees(
    families_folder: Path, pictures: torch.Tensor, exact: Any, kind: str, storage: str
) -> None:
    seen = load_tower(checkpoints.write(kind, families_folder, storage)).encode_image(pictures)
    states = seen.penultimate_hidden_states
    assert states.shape == (2, 257, 1280)
    assert distance(states[0], states[1]) > 0.1
    for name in SEEN:
        assert seen[name].isfinite().all() and seen[name].std() > 0.1
        assert distance(seen[name], exact[name]) <= SIGHT_TOLERANCE[storage], name


@pytest.mark.deep
def test_every_weight_of_the_picture_tower_matters(families_folder: Path, pictures: torch.Tensor, exact: Any) -> None:
    model = load_tower(checkpoints.write("clip_vision", families_folder, "fp32"))
    for name, parameter in model.model.named_parameters():
        if name.endswith("bias"):
            continue
        kept = parameter.clone()
        parameter.mul_(1.5)
        seen = model.encode_image(pictures)
        parameter.copy_(kept)
        assert max(distance(seen[key], exact[key]) for key in SEEN[:2]) > 0.01, name


# How stock's tokenizers are given a picture, and the parts of the vision tower that one passes.
VISION: dict[str, tuple[Any, tuple[str, ...]]] = {
    "qwen25_vl": (lambda one: {"images": [one]}, ("visual.patch_embed", "visual.blocks.7.attn", "visual.merger")),
    "gemma3": (
        lambda one: {"image": one, "skip_template": False},
        ("vision_model.embeddings", "vision_model.encoder.layers.3", "multi_modal_projector"),
    ),
    "minimax_h3_te": (
        lambda one: {"images": [one]},
        ("visual.patch_embed", "visual.pos_embed", "visual.merger", "visual.deepstack_merger_list.2"),
    ),
}


@pytest.mark.parametrize("name", VISION)
def test_a_prompts_picture_is_seen(families_folder: Path, pictures: torch.Tensor, name: str) -> None:
    shown, parts = VISION[name]
    clip = load(families_folder, name, "fp32")

    def see(number: int) -> torch.Tensor:
        tokens = clip.tokenize(FOX, **shown(pictures[number : number + 1]))
        seen: torch.Tensor = clip.encode_from_tokens(tokens)
        return seen

    before = see(0)
    assert before.isfinite().all()
    assert distance(see(1), before) > 0.001
    parameters = dict(clip.cond_stage_model.named_parameters())
    for part in parts:
        within = [
            one for name, one in parameters.items() if f"transformer.{part}" in name and not name.endswith("bias")
        ]
        kept = [one.clone() for one in within]
        for one in within:
            one.mul_(1.5)
        assert within and distance(see(0), before) > 1e-4, part
        for one, old in zip(within, kept, strict=True):
            one.copy_(old)


@pytest.mark.parametrize("kind", SIGHTS)
def test_stock_alone_does_not_know_a_small_picture_tower(families_folder: Path, kind: str) -> None:
    assert comfy.clip_vision.load(str(checkpoints.write(kind, families_folder, "fp16"))) is None

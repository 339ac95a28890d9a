"""What every family of text encoders keeps to, in every storage, with a LoRA and without, in every room; and encoders in files of
their own that make one model.

With kernels off the encoding is stock's bit for bit, whatever streams; on the CPU it is that in any case. Fused for the CPU all
the same, it is as near to stock's, which computes in fp32 there, as the tier allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import comfy.sd
import comfy.text_encoders.flux
import pytest
import torch
from comfy.weight_adapter.lora import LoRAAdapter
from contract.family_cases import far, pairwise, same
from in_halves import OFF
from torch import Tensor

from bed.depth import is_thorough
from fusestream import checkpoints, fusion
from fusestream.fusion.base.family import Family
from fusestream.fusion.families import family_of
from fusestream.fusion.families.clip import encoder as clip_encoder
from fusestream.fusion.families.qwen3_vl import sizes
from fusestream.fusion.families.t5 import encoder as t5_encoder
from fusestream.fusion.load.text import load_streamed_text_encoder
from fusestream.fusion.text import stack
from fusestream.fusion.text.vision import towers
from fusestream.kernels_cuda import LEDGER, KernelPolicy
from fusestream.memory import Checkpoint, read_header

FOX = "a red (fox:1.2) runs through the snow"
# Of a published vocabulary of 150 000 the tiny files have the first few hundred.
WORDS = [[(token, 1.0) for token in (5, 7, 9, 200, 7)]]
CLIPS_WORDS = [[(token, 1.0) for token in (49406, 320, 736, *[49407] * 74)]]
GLYPHS = 'a sign that says "FOX" in the snow'  # what is in quotes is ByT5's to read
SHORT = {"umt5xxl_min_length": 24, "t5xxl_min_length": 24}  # instead of the hundreds that stock fills prompts up to
# How far from stock's an encoding may be: `fast` rounds sums to fp16, too.
ALLOWED = {"precise": 2e-3, "fast": 4e-3}


class Encoder(NamedTuple):
    """Its file, or a word for each of its files; its family, or those of its files; stock's type and options for them; a prompt."""

    file: str
    family: str | None
    type: str
    options: Callable[..., dict[str, Any]]
    prompt: Any

    @property
    def files(self) -> list[str]:
        return self.file.split()


def klein(path: Path) -> dict[str, Any]:
    """klein's three layers, out of the four that there are."""
    taps = partial(comfy.text_encoders.flux.Qwen3_4BModel, layer=[0, 1, 2])
    return {**checkpoints.model_options(path), "qwen3_4b_class": taps}


ENCODERS = {
    "umt5": Encoder("umt5", "T5 or UMT5", "wan", checkpoints.model_options, FOX),
    "t5xxl": Encoder("t5xxl", "T5 or UMT5", "chroma", checkpoints.model_options, FOX),
    "qwen3": Encoder("qwen3", "Qwen3", "lumina2", checkpoints.model_options, {"qwen3_4b": WORDS}),
    "klein": Encoder("qwen3", "Qwen3", "flux2", klein, {"qwen3_4b": WORDS}),
    "qwen3_vl": Encoder(
        "qwen3_vl", "Qwen3-VL", "qwen_image", lambda path: dict(sizes.options(read_header(path))), {"qwen3vl_8b": WORDS}
    ),
    "clip_l": Encoder("clip_l", "CLIP", "stable_diffusion", checkpoints.model_options, FOX),
    "gemma2": Encoder("gemma2", "Gemma 2", "lumina2", checkpoints.model_options, FOX),
    "gemma3": Encoder("gemma3", "Gemma 3", "ltxv", checkpoints.model_options, FOX),
    "mistral3": Encoder("mistral3", "Llama 3 or Mistral 3", "flux2", checkpoints.model_options, FOX),
    "llama3": Encoder(
        "llama3",
        "Llama 3 or Mistral 3",
        "hidream",
        checkpoints.model_options,
        {"llama": WORDS, "l": [], "g": [], "t5xxl": []},
    ),
    "qwen25": Encoder("qwen25", "Qwen2.5", "omnigen2", checkpoints.model_options, {"qwen25_3b": WORDS}),
    "qwen25_vl": Encoder("qwen25_vl", "Qwen2.5", "qwen_image", checkpoints.model_options, FOX),
    "minimax_h3_te": Encoder("minimax_h3_te", "Qwen3-VL", "minimax", checkpoints.model_options, FOX),
    "flux": Encoder("clip_l t5xxl", "CLIP, T5 or UMT5", "flux", checkpoints.model_options, FOX),
    "hidream": Encoder("t5xxl clip_l", "CLIP, T5 or UMT5", "hidream", checkpoints.model_options, FOX),
    "sdxl": Encoder("clip_l clip_g", "CLIP", "sdxl", checkpoints.model_options, FOX),
    "sd3": Encoder("clip_g clip_l", "CLIP", "sd3", checkpoints.model_options, FOX),
    "ltx23": Encoder("gemma3 ltx23_text_projection", "Gemma 3", "ltxv", checkpoints.model_options, FOX),
    "hunyuan_video": Encoder(
        *("clip_l llama3", "CLIP, Llama 3 or Mistral 3", "hunyuan_video", checkpoints.model_options),
        {"llama": WORDS, "l": CLIPS_WORDS},
    ),
    "hunyuan_video_15": Encoder(
        "qwen25_vl byt5", "Qwen2.5, T5 or UMT5", "hunyuan_video_15", checkpoints.model_options, GLYPHS
    ),
}
STORAGES = ("fp16", "bf16", "fp32", "fp8_e4m3fn", "fp8_scaled", "fp8_comfy_quant")
EACH = pytest.mark.parametrize("name", ENCODERS)
FUSED = pytest.mark.parametrize("name", [name for name, encoder in ENCODERS.items() if encoder.family])


class Case(NamedTuple):
    name: str
    storage: str
    patch: str = "no LoRA"
    room: str = "least"
    tier: str = "precise"

    def __str__(self) -> str:
        return ", ".join(self)


def cases() -> list[Case]:
    storages = STORAGES if is_thorough() else tuple(one for one in STORAGES if one not in ("bf16", "fp8_e4m3fn"))
    axes = tuple(ENCODERS), storages, ("no LoRA", "LoRA"), ("least", "all", "stock's"), tuple(ALLOWED)
    return [
        Case(*one)
        for one in pairwise(
            axes, lambda one: all(one[1] in checkpoints.KINDS[file].storages for file in ENCODERS[one[0]].files)
        )
    ]


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None, one_tokenizer_of_each: None) -> Iterator[None]:
    LEDGER.clear()
    with torch.inference_mode(), checkpoints.narrow.opened(comfy):
        yield


@pytest.fixture
def for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is fused for the CPU too."""
    for module in (t5_encoder, clip_encoder, stack, towers):
        monkeypatch.setattr(module, "fuse", partial(_on_cpu, module.fuse))


def _on_cpu(fuse: Any, model: Any, policy: KernelPolicy, **_: Any) -> int:
    found: int = fuse(model, policy, on_cpu=True)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


def written(folder: Path, name: str, storage: str = "fp16") -> list[Path]:
    return [checkpoints.write(file, folder, storage) for file in ENCODERS[name].files]


def ours(folder: Path, name: str, storage: str, policy: KernelPolicy, room: str = "least") -> Any:
    encoder, paths = ENCODERS[name], written(folder, name, storage)
    first, *further = map(str, paths)
    given = {"policy": policy, "kind": encoder.type, "options": encoder.options(*paths), "further": further}
    if room == "stock's":
        return fusion.load_text_encoder(first, [], vram_budget=0.0, **given)
    clip = load_streamed_text_encoder(first, [], **given)
    residency = clip.patcher.stream.residency
    residency.ceiling = residency.least if room == "least" else None
    return clip


def stocks(folder: Path, name: str, storage: str = "fp16") -> Any:
    encoder, paths = ENCODERS[name], written(folder, name, storage)
    kind = getattr(comfy.sd.CLIPType, encoder.type.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION)  # as its nodes do
    return comfy.sd.load_clip([str(path) for path in paths], clip_type=kind, model_options=encoder.options(*paths))


def patched(clip: Any, case: Case) -> Any:
    """With a LoRA for every fourth matrix of its layers."""
    if case.patch == "no LoRA":
        return clip
    patches, generator = {}, torch.Generator().manual_seed(3)
    layers = {
        key: value for key, value in clip.patcher.model_state_dict().items() if ".layer" in key or ".block." in key
    }
    for key, value in [(key, value) for key, value in sorted(layers.items()) if len(value.shape) == 2][::4]:
        up = torch.randn(value.shape[0], 2, generator=generator) * 0.1
        down = torch.randn(2, value.shape[1], generator=generator) * value.shape[1] ** -0.5
        patches[key] = LoRAAdapter(set(), (up, down, 2.0, None, None, None))
    found = clip.clone()
    assert len(found.add_patches(patches, 0.7)) == len(patches) > 3
    return found


def encoded(clip: Any, prompt: Any) -> list[Tensor]:
    """The encoding, and what else of numbers there is."""
    for tokenizer in (clip.tokenizer, getattr(clip.tokenizer, "gemma3_12b", None)):
        if hasattr(tokenizer, "min_length"):  # Gemma 3's has no option for its 1024
            tokenizer.min_length = 24
    tokens = clip.tokenize(prompt, tokenizer_options=SHORT) if isinstance(prompt, str) else prompt
    found = clip.encode_from_tokens(tokens, return_pooled=True, return_dict=True)
    numbers = [one for one in found.values() if isinstance(one, Tensor) and one.is_floating_point()]
    return [one for one in numbers if one.any()]  # of an encoder that is not there HiDream takes zeros


@pytest.mark.usefixtures("for_the_cpu")
@pytest.mark.parametrize("case", cases(), ids=str)
def test_encodings_are_stocks_and_with_kernels_as_near_as_the_tier_allows(folder: Path, case: Case) -> None:
    prompt, given = ENCODERS[case.name].prompt, (folder, case.name, case.storage)
    plain = stocks(*given)
    wanted = encoded(patched(plain, case), prompt)
    assert case.patch == "no LoRA" or far(encoded(plain, prompt), wanted) > 0.01
    off = ours(*given, OFF, case.room)
    assert same(encoded(patched(off, case), prompt), wanted), "with kernels off to the bit"
    if case.room == "least":
        residency = off.patcher.stream.residency
        assert residency.ledger.peak("VRAM") <= residency.ceiling
        assert len(residency.pager.plan.streamed) > residency.pager.plan.slots, "otherwise nothing was streamed"
    clip = patched(ours(*given, KernelPolicy.of(precision=case.tier), case.room), case)
    found = encoded(clip, prompt)
    assert same(encoded(clip, prompt), found), "the second time in the order that the first has shown"
    if ENCODERS[case.name].family is None:
        assert same(found, wanted)
        return
    # Stock rounds the sum of a quantised weight and a LoRA anew; ours is added on the way.
    allowed = 0.05 if case.patch == "LoRA" and case.storage.startswith("fp8") else ALLOWED[case.tier]
    assert not [one for one in LEDGER.refusals if one.op == "text encoder"]
    assert 0 < far(found, wanted) <= allowed


@EACH
def test_on_the_cpu_stock_computes(folder: Path, name: str) -> None:
    prompt, wanted = ENCODERS[name].prompt, encoded(stocks(folder, name), ENCODERS[name].prompt)
    for room in ("least", "stock's"):
        assert same(encoded(ours(folder, name, "fp16", KernelPolicy(), room), prompt), wanted)


def families(folder: Path, name: str) -> list[Family]:
    """Those of its files, each once."""
    found = {}
    for path in written(folder, name):
        with Checkpoint.open(path) as source:
            if (family := family_of(source.files[0])) is not None:
                found[family.name] = family
    return list(found.values())


@EACH
def test_a_file_is_known_by_its_family_alone(folder: Path, name: str) -> None:
    assert ", ".join(sorted(family.name for family in families(folder, name))) == (ENCODERS[name].family or "")


@pytest.mark.deep(
    *(name for name in ENCODERS if name not in ("qwen3_vl", "qwen25"))
)  # `test_text_layers.py` tells it of their layers
@pytest.mark.usefixtures("for_the_cpu")
@FUSED
def test_each_op_can_be_switched_off(folder: Path, name: str) -> None:
    ops = sorted({op for family in families(folder, name) for op in family.ops})
    prompt, fused = ENCODERS[name].prompt, encoded(ours(folder, name, "fp16", KernelPolicy()), ENCODERS[name].prompt)
    for op in ops[:: 1 if is_thorough() else 3]:
        without = encoded(ours(folder, name, "fp16", KernelPolicy.of(**{op: "off"})), prompt)
        assert far(without, fused) <= 2 * ALLOWED["fast"], op
    all_off = KernelPolicy.of(**dict.fromkeys(ops, "off"))
    assert same(encoded(ours(folder, name, "fp16", all_off), prompt), encoded(stocks(folder, name), prompt))


@pytest.mark.usefixtures("for_the_cpu")
@FUSED
def test_no_kernel_refuses_what_the_layers_hand_it(
    folder: Path, name: str, refused_by_kernels: list[tuple[str, str]]
) -> None:
    encoded(ours(folder, name, "fp16", KernelPolicy()), ENCODERS[name].prompt)
    assert not [one for one in refused_by_kernels if one[0] != "attention"], "which has no heads as small as these"

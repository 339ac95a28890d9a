"""What every family of text encoders keeps to, in every storage, with a LoRA and without, in every room.

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
SHORT = {"umt5xxl_min_length": 24, "t5xxl_min_length": 24}  # instead of the hundreds that stock fills prompts up to
# How far from stock's an encoding may be: `fast` rounds sums to fp16, too.
ALLOWED = {"precise": 2e-3, "fast": 4e-3}


class Encoder(NamedTuple):
    """A file, its family, stock's type and options for it, and a prompt."""

    file: str
    family: str | None
    type: str
    options: Callable[[Path], dict[str, Any]]
    prompt: Any


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
        Case(*one) for one in pairwise(axes, lambda one: one[1] in checkpoints.KINDS[ENCODERS[one[0]].file].storages)
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


def written(folder: Path, name: str, storage: str = "fp16") -> Path:
    return checkpoints.write(ENCODERS[name].file, folder, storage)


def ours(folder: Path, name: str, storage: str, policy: KernelPolicy, room: str = "least") -> Any:
    encoder, path = ENCODERS[name], written(folder, name, storage)
    given = {"policy": policy, "kind": encoder.type, "options": encoder.options(path)}
    if room == "stock's":
        return fusion.load_text_encoder(str(path), [], vram_budget=0.0, **given)
    clip = load_streamed_text_encoder(str(path), [], **given)
    residency = clip.patcher.stream.residency
    residency.ceiling = residency.least if room == "least" else None
    return clip


def stocks(folder: Path, name: str, storage: str = "fp16") -> Any:
    encoder, path = ENCODERS[name], written(folder, name, storage)
    kind = getattr(comfy.sd.CLIPType, encoder.type.upper())
    return comfy.sd.load_clip([str(path)], clip_type=kind, model_options=encoder.options(path))


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
    if hasattr(clip.tokenizer, "min_length"):  # Gemma 3's has no option for its 1024
        clip.tokenizer.min_length = 24
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


@EACH
def test_a_file_is_known_by_its_family_alone(folder: Path, name: str) -> None:
    with Checkpoint.open(written(folder, name)) as source:
        found = family_of(source.files[0])
    assert (None if found is None else found.name) == ENCODERS[name].family


@pytest.mark.deep(
    *(name for name in ENCODERS if name not in ("qwen3_vl", "qwen25"))
)  # `test_text_layers.py` tells it of their layers
@pytest.mark.usefixtures("for_the_cpu")
@FUSED
def test_each_op_can_be_switched_off(folder: Path, name: str) -> None:
    with Checkpoint.open(written(folder, name)) as source:
        family = family_of(source.files[0])
    assert family is not None
    prompt, fused = ENCODERS[name].prompt, encoded(ours(folder, name, "fp16", KernelPolicy()), ENCODERS[name].prompt)
    for op in family.ops[:: 1 if is_thorough() else 3]:
        without = encoded(ours(folder, name, "fp16", KernelPolicy.of(**{op: "off"})), prompt)
        assert far(without, fused) <= 2 * ALLOWED["fast"], op
    all_off = KernelPolicy.of(**dict.fromkeys(family.ops, "off"))
    assert same(encoded(ours(folder, name, "fp16", all_off), prompt), encoded(stocks(folder, name), prompt))


@pytest.mark.usefixtures("for_the_cpu")
@FUSED
def test_no_kernel_refuses_what_the_layers_hand_it(
    folder: Path, name: str, refused_by_kernels: list[tuple[str, str]]
) -> None:
    encoded(ours(folder, name, "fp16", KernelPolicy()), ENCODERS[name].prompt)
    assert not [one for one in refused_by_kernels if one[0] != "attention"], "which has no heads as small as these"

"""VRAM of a streamed text encoder's encodings: what ComfyUI leaves for one, and what runs out of it runs again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
import torch

from fusestream import checkpoints, fusion
from fusestream.checkpoints.quantise import quantise
from fusestream.fusion.stream import vram_pool
from fusestream.fusion.stream.text_encoding import halves_at_a_time

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "one_tokenizer_of_each")

OFF = fusion.KernelPolicy.of("off")
WORDS = "CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 8.00 GiB.\nSee the manual."


def load(path: Path, kind: str = "lumina2") -> Any:
    return fusion.load_text_encoder(str(path), [], OFF, -1.0, kind, options=checkpoints.model_options(path))


def encode(clip: Any) -> torch.Tensor:
    found: torch.Tensor = clip.encode_from_tokens({"qwen3_4b": [[(token, 1.0) for token in (5, 7, 9, 200)]]})
    return found


@pytest.fixture
def clip(families_folder: Path) -> Any:
    return load(checkpoints.write("qwen3", families_folder))


def running_out(clip: Any, above: int) -> list[int]:
    """Let its last block run out of VRAM while the weights hold more; what they held when it was called."""
    stream, held = clip.patcher.stream, list[int]()

    def look(*_: Any) -> None:
        held.append(stream.residency.held)
        if held[-1] > above:
            raise torch.OutOfMemoryError(WORDS)

    stream.blocks[-1].module.register_forward_pre_hook(look)
    return held


def test_an_encoding_runs_again_with_fewer_weights(clip: Any, caplog: pytest.LogCaptureFixture) -> None:
    wanted, residency = encode(clip), clip.patcher.stream.residency
    assert residency.held > residency.least
    held = running_out(clip, residency.least)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(encode(clip), wanted)
    assert held[0] > residency.least and held[1:] == [residency.held] == [residency.least]
    assert [line for line in caplog.messages if "250.00 MiB" in line and "the encoding runs again" in line]
    assert torch.equal(encode(clip), wanted)


def test_what_has_no_room_at_all_says_what_helps(clip: Any) -> None:
    encode(clip)
    running_out(clip, 0)
    with pytest.raises(vram_pool.OutOfVram, match=r"too little for the encoding.*250\.00 MiB.*Make the text shorter"):
        encode(clip)
    assert not clip.patcher.stream.residency.in_use


def test_unloaded_and_interrupted_within_a_block(clip: Any) -> None:
    """No block ends any more for which the unload could wait."""
    wanted, stream = encode(clip), clip.patcher.stream

    def end(_layer: int) -> None:
        stream.watcher = None
        raise comfy.model_management.InterruptProcessingException

    def unload(*_: Any) -> None:
        hook.remove()
        assert stream.residency.in_use
        comfy.model_management.unload_all_models()
        stream.watcher = end

    hook = stream.blocks[1].module.mlp.register_forward_pre_hook(unload)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        encode(clip)
    assert stream.residency.held == 0 and not stream.residency.in_use
    assert torch.equal(encode(clip), wanted)


def test_a_lack_of_room_for_weights_keeps_its_words(clip: Any) -> None:
    clip.patcher.stream.blocks[0].module.register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(vram_pool.OutOfVram("Raise vram_budget"))
    )
    with pytest.raises(vram_pool.OutOfVram, match=r"^Raise vram_budget$"):
        encode(clip)


@pytest.mark.parametrize(("storage", "makes_halves"), [("fp16", False), ("bf16", True), ("fp8_scaled", True)])
def test_comfyui_leaves_room_for_halves(
    families_folder: Path, monkeypatch: pytest.MonkeyPatch, storage: str, makes_halves: bool
) -> None:
    """On a card, in addition to what it leaves for every model; it asks before it loads."""
    asked: list[float] = []
    management = comfy.model_management
    known = management.load_models_gpu

    def noted(models: Any, memory_required: float = 0, *args: Any, **named: Any) -> Any:
        asked.append(memory_required)
        return known(models, memory_required, *args, **named)

    monkeypatch.setattr(management, "load_models_gpu", noted)
    clip = load(checkpoints.write("qwen3", families_folder, storage))
    encode(clip)
    assert asked == [0], "there is nothing to be left on the CPU"
    stream, least = clip.patcher.stream, management.minimum_inference_memory() - management.extra_reserved_memory()
    halves = halves_at_a_time(stream)
    assert clip.cond_stage_model.memory_estimation_function({}, device=torch.device("cuda", 0)) == least + halves
    largest = max(paged.stand_in.numel() for block in stream.blocks for paged in block.paged)
    assert (4 * 2 * largest >= halves >= 3 * 2 * largest) if makes_halves else not halves


def test_integers_are_multiplied_as_they_are(families_folder: Path, tmp_path: Path) -> None:
    source = checkpoints.write("qwen3", families_folder)
    quantise(source, path := tmp_path / "int8.safetensors", "int8_convrot")
    assert not halves_at_a_time(load(path).patcher.stream)

"""Blocks of every family that takes them apart, paged in parts: the same bits, and more of the model stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.sd
import family_scenes
import pytest
import torch
from in_halves import load
from scenes import sample

from fusestream import checkpoints
from fusestream.fusion import KernelPolicy
from fusestream.fusion.stream import segments
from fusestream.kernels_cuda import LEDGER

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")
OURS, OFF = KernelPolicy(), KernelPolicy.of("off")
# Of a block in the order in which they are used.
PARTS = {
    "flux2": {"double_blocks": 3, "single_blocks": 2},
    "flux1": {"double_blocks": 3, "single_blocks": 2},
    "chroma": {"double_blocks": 3, "single_blocks": 2},
    "z_image": {"layers": 2, "context_refiner": 2, "noise_refiner": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(autouse=True)
def a_clean_ledger() -> Any:
    LEDGER.clear()
    yield
    mm.unload_all_models()


def with_lora(model: Any) -> Any:
    keys = [
        key
        for key, value in model.model_state_dict().items()
        if key.endswith(".weight") and value.ndim == 2 and "blocks" in key + "layers"
    ]
    found, generator = {}, torch.Generator().manual_seed(3)
    for key in sorted(keys)[::5]:
        rows, columns = model.model_state_dict()[key].shape
        name = key.removesuffix(".weight")
        found[f"{name}.lora_up.weight"] = torch.randn(rows, 2, generator=generator) * 0.1
        found[f"{name}.lora_down.weight"] = torch.randn(2, columns, generator=generator) * columns**-0.5
    return comfy.sd.load_lora_for_models(model, None, found, 0.8, 0.0)[0]


@pytest.mark.every_other
@pytest.mark.usefixtures("whole_blocks")
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "with a LoRA"])
@pytest.mark.parametrize("policy", [OURS, OFF], ids=["ours", "stock's"])
@pytest.mark.parametrize("kind", [kind for kind in PARTS if kind != "flux2"])
def test_parts_are_the_same_to_the_bit(folder: Path, kind: str, policy: KernelPolicy, lora: bool) -> None:
    """Whoever computes: our blocks say which part they are at, stock's own forward calls its doors."""
    path, scene = checkpoints.write(kind, folder, "fp16"), family_scenes.inputs(kind)
    make = with_lora if lora else lambda model: model
    whole = load(path, policy)
    want = sample(make(whole), scene)
    assert not whole.stream.residency.is_in_parts
    parts = load(path, policy)
    parts.stream.residency.ceiling = parts.stream.residency.narrow
    assert parts.stream.residency.narrow < 0.75 * parts.stream.residency.whole
    assert torch.equal(sample(make(parts), scene), want)
    assert (
        parts.stream.residency.is_in_parts
        and parts.stream.residency.ledger.peak("VRAM") <= parts.stream.residency.narrow
    )
    assert not [refusal for refusal in LEDGER.refusals if refusal.op.endswith("block")]


@pytest.mark.parametrize("kind", PARTS)
def test_each_block_has_as_many(folder: Path, kind: str) -> None:
    """Together they have what the block has, each of it once."""
    model = load(checkpoints.write(kind, folder, "fp16"))
    stream = model.stream
    whole, parts = stream.residency.segmentations
    blocks = [block.name.rpartition(".")[0] for block in whole.blocks]
    counts = [PARTS[kind].get(name.rpartition(".")[2], 1) for name in blocks]
    assert len(parts.blocks) == sum(counts) and max(counts) > 1
    assert {one.key for part in parts.blocks for one in part.paged} == stream.keys
    assert sum(layer.stored_bytes for layer in parts.layers) == sum(layer.stored_bytes for layer in whole.layers)


def test_they_are_taken_apart_where_more_stays_so(folder: Path) -> None:
    """And not where half of it stays anyway."""
    model = load(checkpoints.write("flux1", folder, "fp16"))
    stream = model.stream
    whole, parts = stream.residency.segmentations
    for budget in range(
        stream.residency.narrow,
        stream.residency.most + (1 << 20),
        (stream.residency.most - stream.residency.narrow) // 20,
    ):
        found = segments.chosen(stream.residency.segmentations, stream.residency.device, budget)
        by_whole, by_parts = (one.passing(stream.residency.device, budget) for one in (whole, parts))
        assert by_parts is not None
        most = by_whole is not None and by_whole > segments.MOST * whole.bounds(stream.residency.device)[1]
        pays = by_whole is None or (most and by_parts < (1 - segments.WORTH_IT) * by_whole)
        assert found is (parts if pays else whole)
    assert segments.chosen(stream.residency.segmentations, stream.residency.device, stream.residency.narrow) is parts
    assert (
        segments.chosen(stream.residency.segmentations, stream.residency.device, stream.residency.most + (1 << 20))
        is whole
    )

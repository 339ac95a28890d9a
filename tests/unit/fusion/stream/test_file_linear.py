"""A large product outside of a text encoder's blocks, as LTX-2.3's projection is: its weight stays in the file, and comes in
slices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import folder_paths
import pytest
import torch
from comfy.weight_adapter.lora import LoRAAdapter
from comfy_extras import nodes_model_merging
from safetensors.torch import load_file

from fusestream import checkpoints, fusion
from fusestream.fusion.stream import file_linear
from fusestream.fusion.stream.file_linear import FileLinear
from fusestream.memory import Checkpoint

FILES = ("gemma3", "ltx23_text_projection")
PROJECTIONS = "text_embedding_projection.video_aggregate_embed", "text_embedding_projection.audio_aggregate_embed"
OFF = fusion.KernelPolicy.of("off")

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "one_tokenizer_of_each")


@pytest.fixture(autouse=True)
def in_slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of 10 rows, and the tiny projection is large."""
    monkeypatch.setattr(file_linear, "LEAST", 1 << 18)
    monkeypatch.setattr(file_linear, "PIECE", 10 * 49 * 64 * 2)
    with checkpoints.narrow.opened(comfy):
        yield


def paths(folder: Path) -> list[Path]:
    return [checkpoints.write(name, folder) for name in FILES]


def ours(folder: Path, policy: fusion.KernelPolicy = OFF) -> Any:
    first, *further = map(str, paths(folder))
    options = checkpoints.model_options(*paths(folder))
    return fusion.load_text_encoder(first, [], policy, -1.0, "ltxv", options=options, further=further)


def stocks(folder: Path) -> Any:
    options = checkpoints.model_options(*paths(folder))
    names = [str(path) for path in paths(folder)]
    return comfy.sd.load_clip(names, clip_type=comfy.sd.CLIPType.LTXV, model_options=options)


def encode(clip: Any) -> torch.Tensor:
    tokens = clip.tokenize("a red fox runs through the snow")
    tokens["gemma3_12b"][0] = tokens["gemma3_12b"][0][-32:]
    found: torch.Tensor = clip.encode_from_tokens(tokens)
    return found


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """But for the order in which a product of other sizes adds."""
    assert found.shape == wanted.shape and (found - wanted).norm() <= 1e-5 * wanted.norm()


def both(clip: Any, patches: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoding with these patches, all of which it takes, and without."""
    patched = clip.clone()
    assert patched.add_patches(patches, 0.7) == list(patches)
    return encode(patched), encode(clip)


def test_its_encoding_is_stocks_and_its_weight_is_nowhere(families_folder: Path) -> None:
    clip = ours(families_folder)
    modules = dict(clip.cond_stage_model.named_modules())
    for name in PROJECTIONS:
        assert isinstance(modules[name], FileLinear) and modules[name].weight.is_meta
    near(encode(clip), encode(stocks(families_folder)))
    assert all(modules[name].weight.is_meta for name in PROJECTIONS)


def test_it_is_read_in_slices_of_rows(families_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip, read = ours(families_folder), list[tuple[str, int]]()
    known = Checkpoint.read_into

    def noted(source: Any, extent: Any, buffer: Any, start: int | None = None) -> None:
        if "aggregate_embed" in extent.name:
            read.append((extent.name, len(buffer)))
        known(source, extent, buffer, start)

    monkeypatch.setattr(Checkpoint, "read_into", noted)
    encode(clip)
    stored = load_file(paths(families_folder)[1])
    for name in PROJECTIONS:
        pieces = [nbytes for found, nbytes in read if found == f"{name}.weight"]
        assert len(pieces) > 1 and sum(pieces) == stored[f"{name}.weight"].nbytes
        assert max(pieces) <= file_linear.PIECE


def test_a_lora_and_a_saved_copy_see_it(families_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = f"{PROJECTIONS[0]}.weight"
    weight = load_file(paths(families_folder)[1])[key]
    draw = torch.Generator().manual_seed(2)
    up, down = torch.randn(weight.shape[0], 2, generator=draw), torch.randn(2, weight.shape[1], generator=draw)
    patches = {key: LoRAAdapter(set(), (up * 0.1, down * 0.1, 2.0, None, None, None))}
    (found, plain), (wanted, wanted_plain) = (both(make(families_folder), patches) for make in (ours, stocks))
    assert (found - wanted).norm() <= 2e-3 * wanted.norm() < 0.5 * (wanted - wanted_plain).norm()
    near(plain, wanted_plain)
    monkeypatch.setattr(folder_paths, "get_output_directory", lambda: str(tmp_path))
    saver = nodes_model_merging.CLIPSave()
    saver.output_dir = str(tmp_path)
    # Stock alone cannot say how much room no prompt takes.
    saver.save(ours(families_folder, fusion.KernelPolicy()), "saved")
    saved = {name: tensor for file in tmp_path.glob("saved*") for name, tensor in load_file(file).items()}
    assert torch.equal(saved[key].to(weight.dtype), weight)


def test_a_difference_of_its_bias_counts(families_folder: Path) -> None:
    key = f"{PROJECTIONS[0]}.bias"
    bias = load_file(paths(families_folder)[1])[key]
    patches = {key: ("diff", (torch.randn(bias.shape, generator=torch.Generator().manual_seed(3)),))}
    (found, plain), (wanted, wanted_plain) = (both(make(families_folder), patches) for make in (ours, stocks))
    assert (wanted - wanted_plain).norm() > 0.1 * wanted.norm()
    near(found, wanted)
    near(plain, wanted_plain)


def test_an_interrupt_ends_it(families_folder: Path) -> None:
    clip = ours(families_folder)
    module = dict(clip.cond_stage_model.named_modules())[PROJECTIONS[0]]
    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        module(torch.zeros(1, 3, module.in_features))
    assert module(torch.zeros(1, 3, module.in_features)).shape == (1, 3, module.out_features)

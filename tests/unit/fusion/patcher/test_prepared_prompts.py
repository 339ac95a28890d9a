"""Prompts that a network prepares before a sampling: an unchanged one is prepared once, of real models of stock's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import family_scenes
import pytest
import torch
from scenes import sample

from fusestream import checkpoints
from fusestream.fusion.base.hooks import PREPARED
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.patcher import prepared_prompts
from fusestream.fusion.patcher.prepared_prompts import sum_of_bits

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")
KINDS = {"ltx2": "video_embeddings_connector", "minimax_h3": "token_refiner"}  # the part that prepares


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared")


class Sampled:
    """A streamed model, and how often it prepared a prompt in a sampling."""

    def __init__(self, kind: str, folder: Path) -> None:
        import comfy

        self.kind, self.calls = kind, 0
        path = checkpoints.write(kind, folder)
        with checkpoints.narrow.opened(comfy):
            self.model = load_streamed_diffusion_model(str(path))
        self.net = self.model.model.diffusion_model
        getattr(self.net, KINDS[kind]).register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def latents(self, prompt: int = 0, model: Any = None) -> tuple[torch.Tensor, int]:
        before = self.calls
        found = sample(model or self.model, family_scenes.inputs(self.kind, prompt))
        return torch.cat([part.flatten() for part in family_scenes.parts(found)]), self.calls - before


@pytest.mark.parametrize("kind", KINDS)
def test_an_unchanged_prompt_is_prepared_once(kind: str, folder: Path) -> None:
    one = Sampled(kind, folder)
    first, prepared = one.latents()
    again, no_more = one.latents()
    assert (prepared, no_more) == (2, 0) and torch.equal(again, first), "both prompts of guidance"
    other, anew = one.latents(prompt=1)
    assert anew == 1 and not torch.equal(other, first), "the negative one is as before"
    assert torch.equal(one.latents()[0], first)


def test_patched_weights_prepare_anew(folder: Path) -> None:
    one = Sampled("minimax_h3", folder)
    first, _ = one.latents()
    name = next(key for key in one.model.model_state_dict() if KINDS["minimax_h3"] in key and key.endswith(".weight"))
    clone = one.model.clone()
    clone.add_patches({name: (torch.ones(one.model.model_state_dict()[name].shape),)}, 0.5)
    changed, prepared = one.latents(model=clone)
    assert prepared == 2 and not torch.equal(changed, first)
    assert torch.equal(one.latents()[0], first)


def test_other_numbers_in_the_file_prepare_anew(tmp_path: Path) -> None:
    """A file in which only streamed weights changed is gone on with."""
    one = Sampled("minimax_h3", tmp_path)
    first, _ = one.latents()
    source = one.model.stream.residency.source
    of_prompts = next(
        weight.extent
        for layer in one.model.stream.residency.segmentation.layers
        if KINDS["minimax_h3"] in layer.name
        for weight in layer.weights
    )
    content = bytearray(source.files[0].path.read_bytes())
    content[of_prompts.begin : of_prompts.end] = bytes(of_prompts.nbytes)
    source.files[0].path.write_bytes(content)
    changed, prepared = one.latents()
    assert prepared == 2 and not torch.equal(changed, first)


def test_another_nodes_module_prepares_each_time(folder: Path) -> None:
    one = Sampled("minimax_h3", folder)
    first, _ = one.latents()
    clone, calls = one.model.clone(), list[int]()

    refiner = one.net.token_refiner

    class Doubled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return 2 * refiner(x)

    clone.add_object_patch("diffusion_model.token_refiner", Doubled())
    changed = [one.latents(model=clone)[0] for _ in range(2)]
    assert len(calls) == 4 and torch.equal(*changed) and not torch.equal(changed[0], first)
    assert torch.equal(one.latents()[0], first)


def test_what_is_kept_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Sampled("minimax_h3", folder)
    one.latents()
    kept = one.net.__dict__[PREPARED]._kept
    nbytes = max(found.made.nbytes for found in kept.values())
    monkeypatch.setattr(prepared_prompts, "MOST_BYTES", 2 * nbytes)
    for prompt in range(1, 4):
        one.latents(prompt)
    assert len(kept) == 2 and one.latents(3)[1] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 7), (3, 8), (prepared_prompts.CHUNK + 5,)], ids=str)
def test_the_sum_tells_tensors_apart(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 2, shape).to(dtype)
    behind = torch.empty(x.numel() + 1, dtype=dtype)[1:].view(shape).copy_(x)
    assert sum_of_bits(x) == sum_of_bits(x.clone()) == sum_of_bits(behind)
    for place in {0, x.numel() // 2, x.numel() - 1} if x.numel() else ():
        changed = x.clone().flatten()
        changed[place] = 1 - changed[place].int()
        assert sum_of_bits(changed) != sum_of_bits(x)
    if x.numel() > 2 and x.flatten()[0] != x.flatten()[1]:
        swapped = x.flatten().clone()
        swapped[:2] = swapped[:2].flip(0)
        assert sum_of_bits(swapped) != sum_of_bits(x), "the order counts"

"""The quality Draft: a loader's MODEL with the settings of the nodes that it stands for, sampled for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy
import folder_paths
import pytest
from scenes import Scene, Studio, sample

from fusestream import checkpoints
from fusestream.fusion.base.format import DRAFT, QUALITIES
from fusestream.fusion.load import draft_quality
from fusestream.fusion.report.gathering import gather
from fusestream.fusion.sparse.model import sparse_of
from fusestream.fusion.sparse.settings import Settings
from fusestream.fusion.step_cache.model import step_cache_of
from fusestream.nodes.loaders import CheckpointLoader, DiffusionModelLoader
from fusestream.nodes.sparse import SparseAttentionNode
from fusestream.nodes.step_cache import StepCacheNode

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture
def name(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a tiny Wan in ComfyUI's folder."""
    path: Path = checkpoints.write("wan_t2v", studio.folder)
    folders = ([str(path.parent)], {".safetensors"})
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", folders)
    folder_paths.filename_list_cache.clear()
    return path.name


def loaded(name: str, quality: str) -> Any:
    return DiffusionModelLoader.execute(name, "auto", "precise", -1.0, quality).result[0]


def settings(model: Any) -> tuple[Any, Any]:
    """Of the sparse attention and the step cache of a MODEL."""
    found = sparse_of(model.model_options["transformer_options"]), step_cache_of(model)
    return found[0] and found[0].settings, found[1] and found[1].settings


def test_draft_is_fastest_with_less_work(name: str) -> None:
    model = loaded(name, DRAFT)
    assert settings(model) == (draft_quality.SPARSE, draft_quality.STEP_CACHE)
    assert gather(model).policy == gather(loaded(name, "Fastest")).policy == "kernels auto, turbo"
    for quality in (*QUALITIES, "by precision"):
        assert settings(loaded(name, quality)) == (None, None)


def test_it_samples_and_the_report_tells_what_was_left_out(name: str, scenes: dict[str, Scene]) -> None:
    model = loaded(name, DRAFT)
    assert sample(model, scenes["wan_t2v"]).isfinite().all()
    told = gather(model)
    assert told.foretold is not None and "computed" in str(told.foretold)
    assert told.sparsity is not None and told.sparsity.attentions == 0, "the video is too short"


def test_nodes_behind_the_loader_win(name: str) -> None:
    model = StepCacheNode.execute(SparseAttentionNode.execute(loaded(name, DRAFT)).result[0], 0.0).result[0]
    assert settings(model) == (Settings(), None)


def test_a_checkpoints_model_is_a_draft_too(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    path: Path = checkpoints.write("sd15", studio.folder)
    folders = ([str(path.parent)], {".safetensors"})
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "checkpoints", folders)
    folder_paths.filename_list_cache.clear()
    with checkpoints.narrow.opened(comfy):
        parts = CheckpointLoader.execute(path.name, "auto", "precise", -1.0, DRAFT).result
    assert settings(parts[0]) == (draft_quality.SPARSE, draft_quality.STEP_CACHE)

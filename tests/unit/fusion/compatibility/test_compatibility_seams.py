"""What stands between ComfyUI and us beside blocks: where it changes, models load, sample and run as ComfyUI has them."""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy
import comfy.k_diffusion.sampling
import comfy.model_base
import comfy.model_patcher
import comfy.ops
import comfy.samplers
import comfy.sd
import comfy.text_encoders.wan
import latent_preview
import pytest
import torch
from stock_mutations import mutated

from fusestream import checkpoints
from fusestream.checkpoints import narrow
from fusestream.fusion.base.errors import NotStreamable, WrongFile
from fusestream.fusion.compatibility import aside, streaming
from fusestream.fusion.families.t5 import tokenizer
from fusestream.fusion.files.sentencepiece import TENSOR
from fusestream.fusion.live.settings import Settings
from fusestream.fusion.live.steps import are_stocks
from fusestream.fusion.load import diffusion
from fusestream.fusion.patcher.streaming_patcher import StreamingModelPatcher
from fusestream.memory import Checkpoint
from fusestream.nodes.page import moving_preview

Patcher = comfy.model_patcher.ModelPatcher

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("comfyui_version.__version__", "0.98.0")  # that nobody has tried
    aside.forget()
    yield
    aside.forget()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.write("z_image", tmp_path_factory.mktemp("seams"), "fp16"))


def test_this_comfyui_is_as_known() -> None:
    assert streaming.obstacle() is None


def test_every_method_that_ours_stands_in_for_is_looked_at() -> None:
    ours = {name for name in vars(StreamingModelPatcher) if hasattr(Patcher, name) and not name.startswith("__")}
    assert ours == set(streaming.OVERRIDES)


def test_a_module_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comfy.sampler_helpers", None)
    assert streaming.obstacle() == "there is no comfy.sampler_helpers.prepare_sampling"


# Ours hand on whatever they are given.
PASS_ALL_ON = {"_load_list", "model_state_dict_for_saving", "patch_model", "unpatch_hooks"}


@pytest.mark.parametrize("name", streaming.OVERRIDES)
def test_a_patchers_method_with_a_new_parameter(monkeypatch: pytest.MonkeyPatch, path: str, name: str) -> None:
    """By place, as ComfyUI hands most: the model is loaded as ComfyUI loads it, which is said; asked for, it is an error."""
    others = [*inspect.signature(getattr(Patcher, name)).parameters.values()][1:]
    must_be_given = any(other.default is inspect.Parameter.empty for other in others)
    new = "clock" if must_be_given else "clock=None"
    mutated(monkeypatch, Patcher, name, f"def {name}(self", f"def {name}(self, {new}")
    if name in PASS_ALL_ON:
        assert streaming.obstacle() is None
    else:
        falls_back(path, name)


@pytest.mark.parametrize("name", streaming.OVERRIDES)
def test_a_patchers_method_that_has_another_name(monkeypatch: pytest.MonkeyPatch, path: str, name: str) -> None:
    """Then ours is never called."""
    monkeypatch.delattr(Patcher, name)
    falls_back(path, name, loads=False)


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (comfy.model_base.BaseModel, "apply_model", "x, t, c_concat=None,", "x, t, guidance=None, c_concat=None,"),
        (comfy.samplers, "calc_cond_batch", "conds: list[list[dict]], x_in", "x_in, conds"),
        (comfy.samplers.CFGGuider, "outer_sample", "noise, latent_image,", "latent_image, noise,"),
    ],
)
def test_a_function_that_wrappers_stand_around(
    monkeypatch: pytest.MonkeyPatch, path: str, owner: Any, name: str, old: str, new: str
) -> None:
    mutated(monkeypatch, owner, name, old, new)
    falls_back(path, name, loads=False)


@pytest.mark.parametrize("at", range(len(streaming.CALLED)), ids=[name for name, *_ in streaming.CALLED])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_function_that_is_called_and_takes_less(
    monkeypatch: pytest.MonkeyPatch, path: str, at: int, is_there: bool
) -> None:
    name, places, names = streaming.CALLED[at]
    found = streaming._found(name)

    def other(only: Any, /) -> None: ...

    def none_at_all() -> None: ...

    stand_in = none_at_all if places == 1 and not names else other
    stand_in.__qualname__ = found.__qualname__
    others = streaming._found
    monkeypatch.setattr(
        streaming, "_found", lambda asked: others(asked) if asked != name else stand_in if is_there else None
    )
    falls_back(path, found.__qualname__ if is_there else f"there is no {name}", loads=False)


def falls_back(path: str, told: str, *, loads: bool = True) -> None:
    """loads: whether ComfyUI's own loading works as it is changed."""
    with narrow.opened(comfy):
        if loads:
            model = diffusion.load_diffusion_model(path, vram_budget=-1)
            assert not isinstance(model, StreamingModelPatcher)
            assert [one.what for one in aside.stepped_aside()] == ["Streaming"]
        with pytest.raises(NotStreamable, match=rf"{told}(.|\n)*until the pack is updated.*vram_budget"):
            diffusion.load_diffusion_model(path, vram_budget=1)


# ------------------------------------------------------------------------------------------------------- live video

SAMPLINGS = comfy.k_diffusion.sampling


@pytest.mark.parametrize("sampler", ["euler", "lcm"])
def test_live_videos_steps_are_comfyuis(sampler: Any) -> None:
    assert are_stocks(Settings(sampler=sampler)) and not aside.stepped_aside()


@pytest.mark.parametrize(
    ("sampler", "owner", "name", "old", "new", "told"),
    [
        ("euler", SAMPLINGS, "sample_euler", "x = x + d * dt", "x = x + d * dt * 0.9", "makes another latent"),
        ("lcm", SAMPLINGS, "sample_lcm", "x = denoised", "x = 0.9 * denoised", "makes another latent"),
        ("lcm", SAMPLINGS, "sample_lcm", "s_noise=1.0,", "s_noise=0.5,", "makes another latent"),
        ("euler", comfy.samplers, "cfg_function", "* cond_scale", "* cond_scale ** 0.5", "another sum"),
        ("euler", comfy.samplers, "cfg_function", '"sampler_cfg_function" in', '"sampler_apg" in', "sampler_apg"),
        (
            "euler",
            comfy.samplers.KSAMPLER,
            "sample",
            "noise, latent_image=None",
            "device, noise, latent_image=None",
            "otherwise",
        ),
    ],
)
def test_live_video_steps_aside(
    monkeypatch: pytest.MonkeyPatch, sampler: Any, owner: Any, name: str, old: str, new: str, told: str
) -> None:
    mutated(monkeypatch, owner, name, old, new)
    assert not are_stocks(Settings(sampler=sampler))
    [found] = aside.stepped_aside()
    assert told in found.reason and "goes through ComfyUI's sampler" in found.words


# ------------------------------------------------------------------------------------------------------------ others


def test_operations_without_what_streaming_asks_of_them(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    class Linear(torch.nn.Linear):
        comfy_cast_weights = True

    monkeypatch.setattr(comfy.ops.manual_cast, "Linear", Linear)
    falls_back(path, "manual_cast.Linear has no weight_function", loads=False)


def test_a_tokenizer_that_comfyui_reads_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file without a tokenizer would be read with none, or another."""
    path = checkpoints.write("umt5", tmp_path)
    with Checkpoint.open(path) as source:
        header = source.files[0]
        bare = SimpleNamespace(
            path=header.path, extents={k: v for k, v in header.extents.items() if k != TENSOR}, values={}
        )
        assert TENSOR in tokenizer.borrowed(bare, [str(_copied(path))])
        mutated(monkeypatch, comfy.text_encoders.wan.UMT5XXlTokenizer, "__init__", '"spiece_model"', '"sentencepiece"')
        with pytest.raises(WrongFile, match=r"no tokenizer inside.*until the pack is updated.*umt5_xxl"):
            tokenizer.borrowed(bare, [str(_copied(path))])


def _copied(path: Path) -> Path:
    return Path(shutil.copy(path, path.with_name(f"other_{path.name}")))


@pytest.mark.parametrize("change", ["another name", "another place"])
def test_previews_that_are_made_otherwise(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    stocks = latent_preview.get_previewer
    if change == "another name":
        monkeypatch.delattr(latent_preview, "Latent2RGBPreviewer")
    else:
        monkeypatch.setattr(
            latent_preview, "get_previewer", lambda latent_format, device: stocks(device, latent_format)
        )
    before = latent_preview.get_previewer
    moving_preview.attach()
    assert latent_preview.get_previewer is before
    assert [one.what for one in aside.stepped_aside()] == ["Moving previews"]

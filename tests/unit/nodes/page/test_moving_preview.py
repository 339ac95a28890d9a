"""Previews of videos: what is made of latents, when, what it looks like to the server, and that it cannot spoil a run."""

from __future__ import annotations

import io
import itertools
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.latent_formats
import folder_paths
import latent_preview
import pytest
import torch
from comfy.taesd.taehv import TAEHV
from PIL import Image
from safetensors.torch import save_file

from fusestream.nodes.page import moving_preview, preview_method
from fusestream.nodes.page.moving_preview import MovingPreviewer
from fusestream.nodes.page.preview_method import Previewers

METHODS = latent_preview.LatentPreviewMethod
FORMATS = [comfy.latent_formats.Wan21, comfy.latent_formats.Wan22]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving_preview, "is_wanted", lambda: True)
    monkeypatch.setattr(latent_preview, "get_previewer", latent_preview.get_previewer)
    moving_preview.attach()
    monkeypatch.setattr(latent_preview.args, "preview_method", METHODS.Latent2RGB)


@pytest.fixture
def decoder_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A tiny decoder of random weights, under the name that ComfyUI looks for: its class."""
    torch.manual_seed(0)
    weights = {name: torch.randn_like(one) * 0.05 for name, one in TAEHV(latent_channels=16).state_dict().items()}
    save_file(weights, tmp_path / "lighttaew2_1.safetensors")
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "vae_approx", ([str(tmp_path)], {".safetensors"}))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    return latent_preview.TAEHVPreviewerImpl


def latents(form: Any, frames: int = 5) -> torch.Tensor:
    return torch.randn(1, form.latent_channels, frames, 6, 10, generator=torch.Generator().manual_seed(0))


def ours(form: Any) -> Any:
    """A previewer as ComfyUI hands it out for a model of ours."""
    moving_preview.watch(SimpleNamespace(model=SimpleNamespace(latent_format=form)))
    return latent_preview.get_previewer(CPU, form)


def saved(picture: Any) -> Image.Image:
    """As the server does."""
    file = io.BytesIO()
    picture.save(file, format="WEBP", quality=95, compress_level=1)
    return Image.open(file)


@pytest.mark.parametrize("kind", FORMATS)
def test_each_latent_frame_is_the_picture_that_stock_makes_of_it(kind: Any) -> None:
    form = kind()
    x0, stocks = latents(form), latent_preview.get_previewer(CPU, form)
    frames, took = moving_preview.frames_of(stocks, x0, lambda: 0.0)
    assert len(frames) == 5 and took == 0
    for i, frame in enumerate(frames):
        assert frame.tobytes() == stocks.decode_latent_to_preview(x0[:, :, i : i + 1]).tobytes()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_server_saves_all_of_them_and_others_see_one(kind: Any) -> None:
    form = kind()
    previewer = ours(form)
    assert isinstance(previewer, MovingPreviewer)
    name, picture, most = previewer.decode_latent_to_preview_image("JPEG", latents(form))
    assert (name, most) == ("WEBP", None) and isinstance(picture, Image.Image) and picture.size == (10, 6)
    moving: Any = saved(picture)
    assert (moving.format, moving.n_frames, moving.info["loop"]) == ("WEBP", 5, 0)
    assert moving.size == (moving_preview.LONGEST, round(moving_preview.LONGEST * 6 / 10))
    seen = []
    for i in range(5):
        moving.seek(i)
        seen.append(moving.convert("RGB").tobytes())
        assert moving.info["duration"] == 125
    assert len(set(seen)) == 5


def test_it_goes_on_where_the_one_before_has_come_to() -> None:
    frames = [Image.new("L", (2, 2), i) for i in range(4)]
    assert moving_preview.animation(frames, 3).getpixel((0, 0)) == 3
    now = [0.0]
    form = comfy.latent_formats.Wan21()
    stocks = latent_preview.get_previewer(CPU, form)
    previewer = MovingPreviewer(Previewers(stocks), lambda: now[0])
    x0 = latents(form)
    frames = [frame.tobytes() for frame in moving_preview.frames_of(stocks, x0, lambda: 0.0)[0]]
    # 2 and 8 frames of 0.125 s after the beginning, of 5 in turn; half a second is between two of them.
    for now[0], first in ((0.25, 2), (0.74, None), (1.0, 3), (1.4, None), (1.5, 2)):
        shown = previewer.decode_latent_to_preview_image("JPEG", x0)
        assert (shown and frames.index(shown[1].tobytes())) == first


def test_a_decoder_takes_a_twentieth_of_the_time_at_most() -> None:
    now = [100.0]

    class Slow:
        taesd = object()

        def decode_latent_to_preview(self, x0: torch.Tensor) -> Image.Image:
            assert x0.shape[2] == 1, "no more memory than ComfyUI takes"
            now[0] += 50.0 if now[0] == 100 else 1.0  # the first waits for the step itself
            return Image.new("RGB", (4, 4), (int(x0[0, 0, 0, 0, 0]), 0, 0))

    x0 = torch.zeros(2, 16, 5, 2, 2)
    x0[:, :] = torch.arange(5.0)[:, None, None]
    previewer = MovingPreviewer(Previewers(Slow()), lambda: now[0])
    assert previewer.decode_latent_to_preview_image("JPEG", x0) is not None
    assert now[0] == 154
    for later, is_shown in ((253.9, False), (254.1, True)):  # five seconds, twenty times
        now[0] = later
        assert (previewer.decode_latent_to_preview_image("JPEG", x0) is not None) == is_shown


@pytest.mark.usefixtures("decoder_there")
def test_the_video_decoder_of_vae_approx_makes_each_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ComfyUI calls it, on random weights."""
    form = comfy.latent_formats.Wan21()
    monkeypatch.setattr(latent_preview.args, "preview_method", METHODS.TAESD)
    stocks = latent_preview.get_previewer(CPU, form)
    x0 = latents(form, 3)
    frames, took = moving_preview.frames_of(stocks, x0, itertools.count().__next__)
    assert [frame.size for frame in frames] == [(80, 48)] * 3 and took == 1.5
    assert frames[0].tobytes() == stocks.decode_latent_to_preview(x0).tobytes() != frames[1].tobytes()
    _, picture, _ = ours(form).decode_latent_to_preview_image("JPEG", x0)
    assert saved(picture).n_frames == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", [METHODS.NoPreviews, METHODS.Auto])
def test_where_nobody_chose_a_decoder_it_is_the_tiny_one_if_memory_is_free(
    monkeypatch: pytest.MonkeyPatch, decoder_there: Any, method: Any
) -> None:
    import comfy.model_management

    form = comfy.latent_formats.Wan21()
    monkeypatch.setattr(latent_preview.args, "preview_method", method)
    for free, size in ((1 << 40, (80, 48)), (1 << 20, (10, 6))):  # the decoder's pixels, or a latent's
        monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *_, free=free: free)
        previewer = ours(form)
        _, picture, _ = previewer.decode_latent_to_preview_image("JPEG", latents(form))
        assert picture.size == size and saved(picture).n_frames == 5  # type: ignore[attr-defined]
        assert isinstance(previewer._makes, decoder_there) == (size == (80, 48))
    assert latent_preview.args.preview_method is method, "as it was"


def test_a_video_moves_where_nobody_chose_and_nothing_else_has_a_preview(monkeypatch: pytest.MonkeyPatch) -> None:
    form, other = comfy.latent_formats.Wan21(), comfy.latent_formats.Wan21()
    running: dict[str, Any] = {}
    server = SimpleNamespace(prompt_queue=SimpleNamespace(currently_running={7: (0, "id", {}, running, [])}))
    monkeypatch.setattr(preview_method, "running_server", lambda: server)
    monkeypatch.setattr(latent_preview.args, "preview_method", METHODS.NoPreviews)
    for running["preview_method"] in ("default", ""):
        previewer = ours(form)
        assert saved(previewer.decode_latent_to_preview_image("JPEG", latents(form))[1]).n_frames == 5  # type: ignore[attr-defined]
        assert previewer.decode_latent_to_preview_image("JPEG", latents(form, 1)) is None
    assert latent_preview.get_previewer(CPU, other) is None, "another loader's model"
    running["preview_method"] = "none"
    assert ours(form) is None, "chosen by the user"
    running.clear()
    monkeypatch.setattr(sys, "argv", ["main.py", "--preview-method", "none"])
    assert ours(form) is None, "chosen by who starts ComfyUI"


def test_what_is_no_video_or_not_ours_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    form, other = comfy.latent_formats.Wan21(), comfy.latent_formats.Wan21()
    assert ours(form).decode_latent_to_preview_image("JPEG", latents(form, 1))[0] == "JPEG"
    assert type(latent_preview.get_previewer(CPU, other)) is latent_preview.Latent2RGBPreviewer

    class AnotherPacks(latent_preview.Latent2RGBPreviewer):  # type: ignore[misc]
        pass

    theirs = AnotherPacks(form.latent_rgb_factors)
    assert moving_preview.moving(Previewers(theirs)) is theirs
    assert ours(form).latent_rgb_factors.shape == (3, 16), "packs that wrap ours look for it"
    monkeypatch.setattr(moving_preview, "is_wanted", lambda: False)
    assert type(ours(form)) is latent_preview.Latent2RGBPreviewer


def test_a_fault_costs_the_movement_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    form = comfy.latent_formats.Wan21()
    previewer = ours(form)
    monkeypatch.setattr(moving_preview, "frames_of", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING, "fusestream.moving_preview"):
        for _ in range(2):
            assert previewer.decode_latent_to_preview_image("JPEG", latents(form))[0] == "JPEG"
        assert len(caplog.records) == 1
    odd = Image.new("RGB", (0, 4))  # which cannot be made larger
    picture = moving_preview.animation([Image.new("RGB", (4, 4)), odd], 0)
    assert saved(picture).format == "JPEG"

"""Style networks of the published widths on the GPU, in halves: whole pictures, bands, and what both take of the memory."""

from __future__ import annotations

import pytest
import torch
from gpu.support import until_chosen
from torch.nn import functional


@pytest.mark.usefixtures("as_comfyui_runs")
def test_frames_are_captured_with_the_same_bits_and_given_back_when_comfyui_unloads(tmp_path):
    management = pytest.importorskip("comfy.model_management", reason="ComfyUI is not on the path")
    from safetensors.torch import save_file

    from fusestream.checkpoints import style as made
    from fusestream.fusion.networks.style.apply import Settings, apply
    from fusestream.fusion.networks.style.load import load
    from fusestream.kernels_cuda.modules.graphs import captures_of, launch_after_launch

    save_file(made.transformer(made.PUBLISHED, 5), tmp_path / "net.safetensors")
    model = load(str(tmp_path / "net.safetensors"))
    film = functional.interpolate(torch.rand(7, 3, 20, 30), (128, 192), mode="bicubic").clamp(0, 1).movedim(1, -1)

    def plain():
        with launch_after_launch():
            return apply(model, film, None, Settings())

    want = until_chosen(plain)
    (captures,) = captures_of(model.net)
    recorder = type("Pays", (type(captures._recorder),), {})()  # poisoned outputs are the card's time
    timed = captures._recorder.timed
    recorder.timed = lambda device, work: timed(device, work)._replace(host=1.0, whole=1.0)
    captures._recorder = recorder
    for _ in range(2):
        assert torch.equal(apply(model, film, None, Settings()), want)
    assert captures.captured >= 1 and captures.replayed >= 4
    if not model.patcher.is_dynamic():
        assert captures.nbytes > 0
    management.unload_all_models()
    assert captures.nbytes == 0 and captures.count == 0
    assert torch.equal(apply(model, film, None, Settings()), want)


@pytest.mark.usefixtures("as_comfyui_runs")
def test_a_picture_in_another_look_as_a_whole_and_in_bands(tmp_path):
    """The published widths, in halves, at 1080p: the same picture, and bands need a part of the memory."""
    pytest.importorskip("comfy.model_management", reason="ComfyUI is not on the path")
    from safetensors.torch import save_file

    from fusestream.checkpoints import style as made
    from fusestream.fusion.networks.style.apply import Settings, apply
    from fusestream.fusion.networks.style.load import load

    save_file(made.transformer(made.PUBLISHED, 5), tmp_path / "net.safetensors")
    model = load(str(tmp_path / "net.safetensors"))
    assert model.dtype is torch.float16
    picture = functional.interpolate(torch.rand(1, 3, 30, 40), (1080, 1920), mode="bicubic").clamp(0, 1).movedim(1, -1)
    results, peaks = [], []
    for rows in (None, 128):
        apply(model, picture, None, Settings(rows=rows))  # kernels are chosen
        torch.cuda.reset_peak_memory_stats()
        results.append(apply(model, picture, None, Settings(rows=rows)))
        peaks.append(torch.cuda.max_memory_allocated())
    torch.testing.assert_close(*results, atol=0.02, rtol=0.02)
    print(f"peaks, MiB: {[peak >> 20 for peak in peaks]}")
    assert peaks[1] < 0.75 * peaks[0]

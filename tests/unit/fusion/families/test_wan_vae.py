"""What the Wan VAEs have of their own: features between bands and the attention, and the type in which they compute."""

from __future__ import annotations

import comfy.model_management
import torch
from vae_scenes import KINDS

from fusestream.fusion.families.wan.vae import fused as wan_vae
from fusestream.fusion.load import vae as loader
from fusestream.fusion.vae import video_plan
from fusestream.kernels_cuda import obstacle


def test_features_stay_on_the_card_unless_fewer_bands_fit_without(monkeypatch):
    with torch.device("meta"):
        net = KINDS["wan22_vae"].full()
    job = wan_vae.work(net, True, (1, 48, 31, 44, 80))
    rooms = [job.peak(count) for count in (4, 6)]
    for room in rooms:
        cut = job.cut(room)
        assert cut.kept == 0 and job.peak(cut.bands) <= room, "there is no room beside the bands"
        assert job.cut(room + job.features()).kept in (0, job.features())
    assert job.cut(job.peak(6) + job.features()) == (6, job.features()) or job.peak(5) <= job.peak(6) + job.features()
    assert job.cut(job.peak(1)) == (1, 0)
    monkeypatch.setattr(video_plan, "KEPT", job.features() - 1)
    assert job.cut(job.peak(6) + 2 * job.features()).kept == 0


def test_the_type_is_fp16_where_kernels_run_and_the_flags_decide(monkeypatch):
    card, management = torch.device("cuda", 0), comfy.model_management
    monkeypatch.setattr(management, "should_use_fp16", lambda *_: True)
    monkeypatch.setattr(management, "should_use_bf16", lambda *_: True)
    monkeypatch.setattr(loader, "obstacle", lambda _: None)
    assert loader.vae_dtype(card) is torch.float16
    monkeypatch.setattr(management.args, "bf16_vae", True)
    assert loader.vae_dtype(card) is torch.bfloat16
    monkeypatch.setattr(loader, "obstacle", lambda _: "it is too old")
    assert loader.vae_dtype(card) is None
    assert obstacle(torch.device("cpu")) == "cpu is no NVIDIA card"

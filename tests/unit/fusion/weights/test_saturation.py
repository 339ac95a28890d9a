"""What is too large for an FP16 stream is counted behind the last block, and the report says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.model_management
import family_scenes
import pytest
import torch
from safetensors.torch import load_file, save_file
from scenes import sample
from taped import Model, TapingRecorder
from torch import nn

from fusestream import checkpoints
from fusestream.fusion import report
from fusestream.fusion.graphs.calls import Graphs
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.weights import saturation

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")
LAST = {"flux2": "single_blocks.{}.linear2.weight", "z_image": "layers.{}.ffn_norm2.weight"}


def painted(path: Path, kind: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.model_management, "unet_manual_cast", lambda *_: None)
        model = load_streamed_diffusion_model(str(path), dtype=torch.float16)
    sample(model, family_scenes.inputs(kind))
    return model


@pytest.mark.deep("flux2")
@pytest.mark.every_other
@pytest.mark.parametrize("kind", LAST)
def test_the_report_counts_what_was_too_large(tmp_path: Path, kind: str) -> None:
    path = checkpoints.write(kind, tmp_path, "fp16")
    assert "too large for FP16" not in report.gather(painted(path, kind)).state
    tensors = load_file(path)
    prefix, _, suffix = LAST[kind].partition("{}")
    last = max(int(name.removeprefix(prefix).split(".")[0]) for name in tensors if name.startswith(prefix))
    name = f"{prefix}{last}{suffix}"
    tensors[name] = (tensors[name] * 1e5).clamp(-6e4, 6e4)
    path = path.with_name("too_large.safetensors")  # the first is mapped, and Windows writes no such file anew
    save_file(tensors, path)
    state = report.gather(painted(path, kind)).state
    assert "too large for FP16 and held at 65504" in state and "--bf16-unet" in state


def test_numbers_of_all_passes_are_counted_and_those_of_fp32_are_none() -> None:
    block = nn.Linear(2, 2)
    net = nn.Sequential(nn.Linear(2, 2), block)
    saturation.watch(list(net))
    x = torch.tensor([[65504.0, -65504.0], [1.0, float("inf")]])
    assert saturation.look(block, x) is x and not saturation.words(net)
    for _ in range(2):
        saturation.look(block, x.half())
    saturation.look(net[0], x.half())
    assert "6 numbers in 2 passes" in saturation.words(net)


def test_a_replay_that_only_compares_is_no_pass() -> None:
    model, net = Model(), nn.Sequential(nn.Linear(2, 2))
    saturation.watch(list(net))
    graphs = Graphs(model, model.net, TapingRecorder(), lambda: 0)
    for _ in range(5):
        graphs.call(lambda x: saturation.look(net[0], x + 1), (torch.full((1, 3), 65504.0).half(),))
    assert graphs.captured == 1 and graphs.replayed == 2
    assert "15 numbers in 5 passes" in saturation.words(net)

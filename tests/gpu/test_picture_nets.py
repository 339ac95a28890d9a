"""Stock's networks for pictures on the GPU, in halves, over our kernels, and as near to FP32 as stock."""

from __future__ import annotations

import copy

import pytest
import torch
from gpu.support import until_chosen

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture
def nets():
    pytest.importorskip("comfy.model_management", reason="ComfyUI is not on the path")
    from bed import picture_nets

    return picture_nets


def error(got, exact):
    return float((got.float() - exact).norm() / exact.norm())


def test_what_a_detector_sees(nets, monkeypatch):
    from fusestream.fusion import picture_nets
    from fusestream.kernels_cuda import KernelPolicy

    model = nets.detector(monkeypatch, torch.float16, "cuda")
    made, table = picture_nets.fused(model, KernelPolicy())
    assert len(table.replaced) == 91
    stock, ours = model.model.diffusion_model, made.model.diffusion_model
    exact = copy.deepcopy(stock).float()
    x = torch.rand(2, 3, 64, 96, device="cuda")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        wanted = exact.encoder(exact.backbone(x))
    found = until_chosen(lambda: ours.encoder(ours.backbone(x.half())))
    for got, theirs, want in zip(found, stock.encoder(stock.backbone(x.half())), wanted, strict=True):
        assert error(got, want) < 1.5 * error(theirs, want) + 2e-4


def test_a_background_is_removed_as_by_stock(nets, monkeypatch):
    from comfy_extras.nodes_bg_removal import RemoveBackground

    from fusestream.fusion import picture_nets
    from fusestream.kernels_cuda import LEDGER, KernelPolicy

    model = nets.remover(monkeypatch, 256)
    image = torch.rand(1, 200, 260, 3)
    before = RemoveBackground.execute(model, image).args[0]
    made, _ = picture_nets.fused(model, KernelPolicy())
    LEDGER.clear()
    got = until_chosen(lambda: RemoveBackground.execute(made, image).args[0])
    assert {"conv", "linear"} <= {choice.op for choice in LEDGER.choices}
    assert made.model.decoder.net.decoder_block1.conv_in.weight.dtype is torch.float16
    assert float(before.std()) > 0.001
    torch.testing.assert_close(got, before, atol=0.005, rtol=0.01)
    torch.testing.assert_close(RemoveBackground.execute(model, image).args[0], before, atol=1e-3, rtol=1e-3)

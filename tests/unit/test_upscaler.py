"""The Fuse node on stock's upscale models: as spandrel gives them, through stock's own nodes, and what is said of it."""

from __future__ import annotations

import copy

import comfy.model_management as management
import pytest
import torch
from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel
from spandrel import ModelLoader
from torch import nn

from fusestream.fusion import upscaler
from fusestream.fusion.errors import WrongFile
from fusestream.kernels_cuda import LEDGER, KernelPolicy
from fusestream.kernels_cuda.modules import handing_back
from fusestream.nodes.fuse import FuseNode

pytestmark = pytest.mark.usefixtures("one_thread")


def esrgan(width=8, grow=32, blocks=1):
    """An old ESRGAN's state dict, x4, narrower than any that was published but where spandrel has one width."""
    weights = {}

    def conv(name, c, n):
        weights[f"{name}.weight"] = torch.randn(n, c, 3, 3) * (1 / (9 * c)) ** 0.5
        weights[f"{name}.bias"] = torch.randn(n) * 0.05

    conv("model.0", 3, width)
    for block in range(blocks):
        for dense in (1, 2, 3):
            for layer in range(5):
                out = width if layer == 4 else grow
                conv(f"model.1.sub.{block}.RDB{dense}.conv{layer + 1}.0", width + layer * grow, out)
    conv(f"model.1.sub.{blocks}", width, width)
    for name, n in (("model.3", width), ("model.6", width), ("model.8", width), ("model.10", 3)):
        conv(name, width, n)
    return weights


@pytest.fixture(scope="module")
def stocks():
    """As Load Upscale Model gives it."""
    import comfy.model_patcher

    torch.manual_seed(7)
    with torch.inference_mode():
        model = ModelLoader().load_from_state_dict(esrgan()).eval()
        device = management.get_torch_device()
        model.patcher = comfy.model_patcher.CoreModelPatcher(model.model, load_device=device, offload_device=device)
        return model


@pytest.fixture(autouse=True)
def _as_comfyui_runs():
    LEDGER.clear()
    with torch.inference_mode():
        yield


def upscaled(model, image):
    return ImageUpscaleWithModel.execute(model, image).args[0]


@pytest.fixture
def halves(monkeypatch):
    """As on a card of ours, where the CPU computes the ops' references."""
    monkeypatch.setattr(management, "should_use_fp16", lambda *_: True)
    monkeypatch.setattr(handing_back, "DEVICES", ("cuda", "cpu"))


def test_an_upscaled_picture_is_stocks(stocks, halves):
    image = torch.rand(1, 20, 24, 3)
    before, keys = upscaled(stocks, image), list(stocks.model.state_dict())
    made, table = upscaler.fused(stocks, KernelPolicy())
    got = upscaled(made, image)
    assert got.shape == (1, 80, 96, 3) and made.scale == stocks.scale == 4 and made.supports_half
    torch.testing.assert_close(got, before, atol=0.01, rtol=0.01)
    assert "conv" in {told.op for told in LEDGER.refusals}  # there is no card: the op was asked
    assert len(table.replaced) == 21 and not table.left
    ours = [t for t in made.model.parameters() if t.ndim == 4]
    assert {t.dtype for t in ours} == {torch.float16}
    # What went in is as it was, and shares nothing with the copy.
    assert torch.equal(upscaled(stocks, image), before) and list(stocks.model.state_dict()) == keys
    assert {t.dtype for t in stocks.model.parameters()} == {torch.float32}


def test_where_halves_are_not_wanted_it_computes_as_stock_does(stocks):
    image = torch.rand(1, 12, 9, 3)
    made, _ = upscaler.fused(stocks, KernelPolicy())
    torch.testing.assert_close(upscaled(made, image), upscaled(stocks, image), atol=1e-5, rtol=1e-4)
    overflows = copy.copy(stocks)
    overflows.supports_half = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(management, "should_use_fp16", lambda *_: True)
        made, _ = upscaler.fused(overflows, KernelPolicy())
    assert {t.dtype for t in made.model.parameters()} == {torch.float32}


def test_the_node_gives_model_and_report(stocks, halves):
    made = FuseNode.execute(stocks, kernels="auto", precision="fast")
    model, report = made.args
    assert "model.0: Conv2d -> FusedConvNormAct2d" in report and made.ui is not None
    assert upscaled(model, torch.rand(1, 8, 8, 3)).shape == (1, 32, 32, 3)


def test_what_carries_no_network_is_refused():
    class Other:
        model = nn.Identity()

    with pytest.raises(WrongFile, match="this UPSCALE_MODEL is a Other without a torch network: take one from Load"):
        upscaler.fused(Other(), KernelPolicy())

"""The Fuse node on networks that stock's nodes carry: as stock builds them, through stock's own nodes, and what is said of it."""

from __future__ import annotations

import copy

import comfy.ldm.depth_anything_3.model as depth
import comfy.model_management as management
import comfy.model_patcher
import comfy.ops
import comfy.supported_models
import pytest
import torch
from comfy_extras import nodes_depth_anything_3
from comfy_extras.nodes_bg_removal import RemoveBackground
from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel
from spandrel import ModelLoader
from spandrel.architectures.DnCNN import DnCNN
from spandrel.architectures.FBCNN import FBCNN
from spandrel.architectures.FFTformer import FFTformer
from spandrel.architectures.IPT import IPT
from taped import TapingRecorder
from torch import nn

from bed import picture_nets as nets
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.networks import giving_back, picture_nets, plain_layers
from fusestream.kernels_cuda import LEDGER, KernelPolicy
from fusestream.kernels_cuda.modules import fallback
from fusestream.kernels_cuda.modules.graphs import attach, captures_of
from fusestream.nodes import pictures
from fusestream.nodes.pictures import FuseNode

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
    monkeypatch.setattr(fallback, "DEVICES", ("cuda", "cpu"))


def test_an_upscaled_picture_is_stocks(stocks, halves):
    image = torch.rand(1, 20, 24, 3)
    before, keys = upscaled(stocks, image), list(stocks.model.state_dict())
    made, table = picture_nets.fused(stocks, KernelPolicy())
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
    made, _ = picture_nets.fused(stocks, KernelPolicy())
    torch.testing.assert_close(upscaled(made, image), upscaled(stocks, image), atol=1e-5, rtol=1e-4)
    overflows = copy.copy(stocks)
    overflows.supports_half = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(management, "should_use_fp16", lambda *_: True)
        made, _ = picture_nets.fused(overflows, KernelPolicy())
    assert {t.dtype for t in made.model.parameters()} == {torch.float32}


# What spandrel does with a network besides calling it with a picture, and weights that are no convolution's.
OTHERS = {
    "asked for its mode": lambda: DnCNN(in_nc=4, out_nc=3, nc=8, act_mode="R", mode="FDnCNN"),
    "returns several": lambda: FBCNN(nc=[8, 8, 8, 512]),
    "has weights of five dimensions": lambda: FFTformer(dim=8, num_blocks=[1, 1, 1], num_refinement_blocks=1),
    "told its scale": lambda: IPT(
        patch_size=48, patch_dim=3, num_heads=4, num_layers=1, n_feats=4, scale=[2], num_queries=1
    ),
}


@pytest.mark.parametrize("of", OTHERS)
def test_a_network_that_is_more_than_called_is_stocks(of, halves):
    torch.manual_seed(5)
    stocks = ModelLoader().load_from_state_dict(OTHERS[of]().state_dict()).eval()
    cpu = torch.device("cpu")
    stocks.patcher = comfy.model_patcher.CoreModelPatcher(stocks.model, load_device=cpu, offload_device=cpu)
    stocks.model.model_loaded_weight_memory = 5  # noted by stock's patcher while it is loaded
    made, table = picture_nets.fused(stocks, KernelPolicy())
    assert table.replaced and made.patcher.loaded_size() == 0
    image = torch.rand(1, 52, 49, 3)
    torch.testing.assert_close(upscaled(made, image), upscaled(stocks, image), atol=0.01, rtol=0.01)


def test_the_node_gives_model_and_report(stocks, halves):
    made = FuseNode.execute(stocks, kernels="auto", precision="fast")
    model, report = made.args
    assert "model.0: Conv2d -> FusedConvNormAct2d" in report and made.ui is not None
    assert upscaled(model, torch.rand(1, 8, 8, 3)).shape == (1, 32, 32, 3)


def test_what_carries_no_network_is_refused():
    class Other:
        model = nn.Identity()

    with pytest.raises(
        WrongFile, match="this is a Other without a torch network: take an UPSCALE_MODEL, a BACKGROUND_REMOVAL, or"
    ):
        picture_nets.fused(Other(), KernelPolicy())


# ------------------------------------------------------------------------------- what is made of ComfyUI's own operations


def counted(table):
    return {kind: sum(line.by == kind for line in table.lines) for kind in {line.by for line in table.replaced}}


@pytest.fixture(scope="module")
def remover():
    """Seventy million weights; what is made of it shares none of them, and it stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        return nets.remover(patch)


@pytest.mark.deep
def test_a_background_is_removed_as_by_stock(remover, halves):
    """The decoder and the feed-forwards in halves; the rest of the backbone is ComfyUI's, and casts."""
    image = torch.rand(1, 40, 50, 3)
    before, keys = RemoveBackground.execute(remover, image).args[0], list(remover.model.state_dict())
    made, table = picture_nets.fused(remover, KernelPolicy())
    got = RemoveBackground.execute(made, image).args[0]
    assert got.shape == before.shape == (1, 40, 50)
    assert float(before.std()) > 0.001
    torch.testing.assert_close(got, before, atol=0.003, rtol=0.01)
    assert made.model.decoder.net.decoder_block1.conv_in.weight.dtype is torch.float16
    assert type(made.model.bb.layers[0].blocks[0].attn.qkv) is comfy.ops.manual_cast.Linear
    found = counted(table)
    assert found["FusedFeedForward"] == 5 and found["FusedConvNormAct2d"] > 50
    chain = next(line for line in table.replaced if line.name == "squeeze_module.net.0.conv_in")
    assert chain.of == ("Conv2d", "BatchNorm2d", "ReLU")
    told = {line.reason for line in table.left}
    assert "it is a comfy.ops.manual_cast.Linear, not torch's Linear" in told  # of the backbone's attention
    # What went in is as it was.
    assert list(remover.model.state_dict()) == keys
    assert torch.equal(RemoveBackground.execute(remover, image).args[0], before)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_objects_are_detected_as_by_stock(monkeypatch, dtype):
    """RT-DETR with narrow stages; backbone and encoder on a small picture."""
    monkeypatch.setattr(fallback, "DEVICES", ("cuda", "cpu"))
    model = nets.detector(monkeypatch, dtype)
    net = model.model.diffusion_model
    made, table = picture_nets.fused(model, KernelPolicy())
    ours = made.model.diffusion_model
    x = torch.rand(1, 3, 64, 96).to(dtype)
    error = 1e-5 if dtype is torch.float32 else 0.02
    for got, want in zip(ours.encoder(ours.backbone(x)), net.encoder(net.backbone(x)), strict=True):
        assert float((got.float() - want.float()).norm() / want.float().norm()) < error
    assert counted(table) == {"FusedConvNormAct2d": 84, "FusedFeedForward": 7}
    chains = {line.of for line in table.replaced}
    assert {("Conv2d", "BatchNorm2d", "ReLU"), ("Conv2d", "SiLU"), ("Linear", "GELU", "Linear")} <= chains
    assert ours.dtype is dtype and type(ours.backbone.stem.pool) is nn.MaxPool2d
    # Two models to stock's memory management, and nothing is shared.
    assert made.model is not model.model and not made.is_clone(model)
    theirs = {t.data_ptr() for t in net.parameters()}
    assert not theirs & {t.data_ptr() for t in ours.parameters()}
    assert list(ours.state_dict()) == list(net.state_dict())
    assert type(net.backbone.stem.stem1.conv) is comfy.ops.disable_weight_init.Conv2d


def test_depth_is_estimated_as_by_stock(monkeypatch):
    monkeypatch.setattr(fallback, "DEVICES", ("cuda", "cpu"))
    small = {**depth._BACKBONE_PRESETS["vits"], "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 4}
    monkeypatch.setitem(depth._BACKBONE_PRESETS, "vits", small)
    config = {"backbone_name": "vits", "out_layers": [0, 1, 2, 3], "head_dim_in": 32, "head_features": 16}
    config["head_out_channels"] = [8, 16, 24, 32]
    model = nets.model_of(comfy.supported_models.DepthAnything3, config, torch.float32)
    made, table = picture_nets.fused(model, KernelPolicy())
    image = torch.rand(1, 60, 80, 3)
    want, _, sky = nodes_depth_anything_3._run_da3(model, image, 56)
    got, _, our_sky = nodes_depth_anything_3._run_da3(made, image, 56)
    assert got.shape == (1, 60, 80) and float(want.std()) > 1e-4
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(our_sky, sky, atol=1e-4, rtol=1e-4)
    assert len(captures_of(made.model)) == 1, "no weight of it is brought by stock at each call"
    assert len(captures_of(made.model)) == 1, "no weight of it is brought by stock at each call"
    assert {line.by for line in table.replaced} == {"FusedConvNormAct2d"}
    assert any(line.of == ("Conv2d", "ReLU") for line in table.replaced)


def taped(model):
    """What is captured of a model, over a recorder for the CPU."""
    recorder = TapingRecorder()
    found = captures_of(model)
    for captures in found:
        captures._recorder = recorder
    return found, recorder


def test_tiles_of_one_size_are_captured_and_what_was_is_given_back(stocks, halves):
    image = torch.rand(1, 20, 24, 3)
    made, _ = picture_nets.fused(stocks, KernelPolicy())
    (captures,), recorder = taped(made.model)
    want = upscaled(made, image)
    for _ in range(5):
        assert torch.equal(upscaled(made, image), want)
    assert captures.replayed == 3
    made.patcher.detach()
    assert not recorder.tapes
    for _ in range(4):  # ComfyUI moves it to and fro
        management.load_models_gpu([made.patcher])
        assert torch.equal(upscaled(made, image), want)
    assert captures.replayed > 3


@pytest.mark.deep
def test_nothing_of_a_background_remover_is_captured(remover, halves):
    """Who tries is told why: in each block of its decoder torchvision computes, where a recording does not look."""
    made, _ = picture_nets.fused(remover, KernelPolicy())
    assert not captures_of(made.model)
    attach(made.model.decoder.net)
    found, _ = taped(made.model)
    image = torch.rand(1, 40, 50, 3)
    want = RemoveBackground.execute(made, image).args[0]
    for _ in range(4):
        assert torch.equal(RemoveBackground.execute(made, image).args[0], want)
    assert [captures.captured for captures in found] == [0]
    assert any("torchvision::deform_conv2d" in told.reason for told in LEDGER.refusals)


@pytest.mark.deep
def test_of_a_detector_both_parts_that_lie_on_the_card_are(monkeypatch):
    monkeypatch.setattr(fallback, "DEVICES", ("cuda", "cpu"))
    made, _ = picture_nets.fused(nets.detector(monkeypatch, torch.float16), KernelPolicy())
    ours = made.model.diffusion_model
    found, recorder = taped(made.model)
    x = torch.rand(1, 3, 64, 96).half()
    want = ours.encoder(ours.backbone(x))
    for _ in range(4):
        for got, wanted in zip(ours.encoder(ours.backbone(x)), want, strict=True):
            assert torch.equal(got, wanted)
    assert [captures.replayed for captures in found] == [2, 2] and len(recorder.tapes) == 2
    made.detach()
    assert not recorder.tapes


def elsewhere(net):
    """A device that weights can go to, if not back: what is on it has no values."""
    return giving_back.patcher_of(net, torch.device("meta"), torch.device("cpu"))


def places(net):
    return {t.device.type for t in [*net.parameters(), *net.buffers()]}


def test_where_little_is_free_none_of_torchs_layers_is_left_in_ram(stocks, halves):
    """An upscale model's node asks for 4.8 GB, a style network's for a whole picture: stock then leaves weights where they are, and
    brings those of its own operations at each call. torch's layers would be given pixels on the card and weights in RAM."""
    made, _ = picture_nets.fused(stocks, KernelPolicy())
    theirs = comfy.model_patcher.ModelPatcher(
        copy.deepcopy(made.model), load_device=torch.device("meta"), offload_device=torch.device("cpu")
    )
    theirs.partially_load(torch.device("meta"), 0.1)
    assert "cpu" in places(theirs.model), "or stock has changed, and this needs no care"
    for room in (0.1, -1.0):
        patcher = elsewhere(copy.deepcopy(made.model))
        patcher.partially_load(torch.device("meta"), room)
        assert places(patcher.model) == {"meta"} and patcher.loaded_size() == patcher.model_size()


def test_a_network_of_comfyuis_operations_alone_is_loaded_as_far_as_there_is_room():
    net = nn.Sequential(*(comfy.ops.disable_weight_init.Linear(64, 64) for _ in range(8)))
    patcher = elsewhere(net)
    patcher.partially_load(torch.device("meta"), patcher.model_size() / 2)
    assert places(net) == {"cpu", "meta"} and 0 < patcher.loaded_size() < patcher.model_size()


def test_what_was_captured_is_given_back_behind_each_prompt(monkeypatch):
    """The node finds the module by its name, so as not to import it for a graph that fuses nothing."""
    called = []
    monkeypatch.setattr(giving_back, "after_prompt", lambda: called.append(True))
    pictures._give_back()
    assert called


class OfTheDriver:
    """As what stock's pager of VRAM keeps on a network: whoever copies it gives its memory back twice."""

    def __deepcopy__(self, memo):
        raise AssertionError("it was copied")


def test_what_stocks_pager_of_vram_keeps_on_a_network_is_not_copied(stocks):
    kept = {"dynamic_pins": {"cuda": {"weights": (OfTheDriver(),)}}, "dynamic_vbars": {"cuda": OfTheDriver()}}
    vars(stocks.model).update(kept)
    try:
        made, _ = picture_nets.fused(stocks, KernelPolicy())
        assert vars(stocks.model)["dynamic_vbars"] is kept["dynamic_vbars"]
    finally:
        for name in kept:
            del vars(stocks.model)[name]
    for part in made.model.modules():
        assert not vars(part).keys() & {*plain_layers.OF_DYNAMIC}


def test_which_models_are_none_of_this_nodes(stocks):
    model = nets.model_of(comfy.supported_models.DepthAnything3, {"backbone_name": "vits"}, torch.float32)
    patched = model.clone()
    patched.add_object_patch("diffusion_model", nn.Identity())
    with pytest.raises(WrongFile, match="carries patches"):
        picture_nets.fused(patched, KernelPolicy())
    model.model.diffusion_model = nn.Identity()
    with pytest.raises(
        WrongFile, match="this MODEL is a DepthAnything3, which FuseStream's own loaders are for: take an"
    ):
        picture_nets.fused(model, KernelPolicy())


def test_an_operation_that_does_more_than_torchs_is_left_as_it_is():
    """What patches at each call, or has hooks; and of the others nothing of what stock noted on them is taken along."""
    with torch.inference_mode(False):
        ops = comfy.ops.manual_cast
        net = nets.filled(
            nn.Sequential(*(ops.Linear(3, 3) for _ in range(3)), ops.LayerNorm(3), ops.Conv2d(2, 4, 3, padding=1))
        )
        net[1].weight_function = [lambda t: t * 2]
        net[2].register_forward_hook(lambda *_: None)
        net[0]._v = object()
        made = plain_layers.copied(net, torch.float16)
    assert [type(part) for part in made] == [nn.Linear, ops.Linear, ops.Linear, nn.LayerNorm, nn.Conv2d]
    assert (
        not hasattr(made[0], "_v") and made[0].weight.dtype is torch.float16 and made[1].weight.dtype is torch.float32
    )
    x = torch.rand(1, 2, 5, 5).half()
    torch.testing.assert_close(made[4](x), net[4](x), atol=1e-2, rtol=1e-2)
    weight, bias, _ = comfy.ops.cast_bias_weight(made[4], x, offloadable=True)
    assert torch.equal(weight, made[4].weight) and torch.equal(bias, made[4].bias)
    assert plain_layers.kind_of(comfy.ops.fp8_ops.Linear(3, 3)) is None

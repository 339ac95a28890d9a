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
    from fusestream.fusion.networks import picture_nets
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

    from fusestream.fusion.networks import picture_nets
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


def test_where_little_is_free_networks_are_brought_whole(nets, monkeypatch, tmp_path):
    """Stock's nodes ask for more than there is, and its patcher would leave torch's layers in RAM. What ComfyUI has unloaded in
    part is brought again."""
    import comfy.model_management as management
    import comfy.model_patcher
    from comfy_extras.nodes_bg_removal import RemoveBackground
    from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel
    from safetensors.torch import save_file
    from spandrel import ModelLoader
    from spandrel.architectures.ESRGAN import ESRGAN

    from fusestream.checkpoints import style
    from fusestream.fusion.networks import picture_nets
    from fusestream.fusion.networks.style.apply import Settings, apply
    from fusestream.fusion.networks.style.load import load
    from fusestream.kernels_cuda import KernelPolicy

    image = torch.rand(1, 200, 260, 3)
    upscaler = ModelLoader().load_from_state_dict(ESRGAN(num_blocks=1, scale=4).state_dict()).eval()
    places = management.get_torch_device(), management.unet_offload_device()
    upscaler.patcher = comfy.model_patcher.CoreModelPatcher(
        upscaler.model, load_device=places[0], offload_device=places[1]
    )
    save_file(style.transformer(style.PUBLISHED, 5), tmp_path / "net.safetensors")
    styled = load(str(tmp_path / "net.safetensors"))
    upscaler = picture_nets.fused(upscaler, KernelPolicy())[0]
    remover = picture_nets.fused(nets.remover(monkeypatch, 256), KernelPolicy())[0]
    calls = {
        upscaler.patcher: lambda: ImageUpscaleWithModel.execute(upscaler, image).args[0],
        remover.patcher: lambda: RemoveBackground.execute(remover, image).args[0],
        styled.patcher: lambda: apply(styled, image, None, Settings()),
    }
    wanted = [until_chosen(call) for call in calls.values()]
    management.unload_all_models()
    free = management.get_free_memory
    little = 64 << 20
    monkeypatch.setattr(
        management,
        "get_free_memory",
        lambda *given, torch_free_too=False: (little, little) if torch_free_too else min(little, free(*given)),
    )
    for _ in range(2):
        for (patcher, call), want in zip(calls.items(), wanted, strict=True):
            torch.testing.assert_close(call(), want, atol=0.02, rtol=0.02)
            assert patcher.loaded_size() == patcher.model_size()
            while patcher.loaded_size() == patcher.model_size():  # what was captured goes first
                assert patcher.partially_unload(patcher.offload_device, patcher.model_size() // 2)

"""VAEs whose tensors have Wan's names and other shapes: told by these, and left to stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.sd
import pytest
import torch
from safetensors.torch import load_file, save_file

from fusestream import checkpoints, fusion
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.base.family import Role
from fusestream.fusion.families import family_of
from fusestream.fusion.families.wan import WAN_VAE
from fusestream.fusion.families.wan.vae.fused import is_wan
from fusestream.fusion.identify.checkpoint_info import header_of
from fusestream.fusion.load.request import LoadRequest
from fusestream.fusion.load.vae import of_tensors
from fusestream.kernels_cuda import LEDGER

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

WanVAE22 = comfy.ldm.wan.vae2_2.WanVAE
CausalConv3d = comfy.ldm.wan.vae.CausalConv3d


class QwenImage21VAE(WanVAE22):  # type: ignore[misc]
    """Stock's Wan 2.2 with the numbers of Qwen-Image 2.1's, as ComfyUI has built it since it knows that one: five stages,
    convolutions over one frame, pixels as they are. Of few channels, and of latents of 48, as Wan 2.2's."""

    def __init__(self, **_given: Any) -> None:
        sizes = {"dim": 4, "z_dim": 48, "dim_mult": [1, 2, 4, 8, 8], "num_res_blocks": 2, "attn_scales": []}
        super().__init__(**sizes, dec_dim=4, temperal_downsample=[False, True, True, True], dropout=0.0)
        self.patch_size = 1
        for module in list(self.modules()):
            for name, conv in module.named_children():
                if isinstance(conv, CausalConv3d) and conv.kernel_size[0] > 1:
                    channels = {"conv1": (3, conv.out_channels)} if module is self.encoder else {}
                    _, *sides = conv.kernel_size
                    into, out = channels.get(name, (conv.in_channels, conv.out_channels))
                    padding = (0, *(side // 2 for side in sides))
                    setattr(module, name, CausalConv3d(into, out, (1, *sides), stride=conv.stride, padding=padding))
        self.decoder.head[2] = CausalConv3d(4, 3, (1, 3, 3), padding=(0, 1, 1))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv1(self.encoder(x[:, :, :1])).chunk(2, dim=1)[0]  # type: ignore[no-any-return]

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        frame, caches = self.conv2(z[:, :, :1]), [None] * comfy.ldm.wan.vae2_2.count_conv3d(self.decoder)
        return self.decoder(frame, feat_cache=caches, feat_idx=[0], first_chunk=True)  # type: ignore[no-any-return]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of such a VAE, which stock makes of it."""
    monkeypatch.setattr(comfy.ldm.wan.vae2_2, "WanVAE", QwenImage21VAE)
    torch.manual_seed(0)
    path = tmp_path / "qwen_image_2.1_vae.safetensors"
    net = QwenImage21VAE()
    save_file({name: torch.randn(tensor.shape) * 0.05 for name, tensor in net.state_dict().items()}, path)
    LEDGER.clear()
    return path


def test_qwen_images_is_left_to_stock_and_that_is_said(file: Path) -> None:
    ours, stock = fusion.load_vae(str(file)), comfy.sd.VAE(sd=load_file(file))
    assert isinstance(ours.first_stage_model, QwenImage21VAE) and ours.vae_dtype is stock.vae_dtype
    latents = torch.randn(1, 48, 1, 2, 3)
    assert torch.equal(ours.decode(latents), stock.decode(latents))
    pixels = torch.rand(1, 64, 32, 3)
    assert torch.equal(ours.encode(pixels), stock.encode(pixels))
    lines = [line for line in LEDGER.messages if str(file) in line]
    (said,) = lines
    assert said.startswith(
        f"{file}: this VAE is of a kind without fused kernels: ComfyUI's code computes it, in bands where"
    )


def test_off_says_nothing(file: Path) -> None:
    fusion.load_vae(str(file), fusion.KernelPolicy.of("off"))
    assert not LEDGER.messages


def test_one_within_a_checkpoint_is_left_to_stock(file: Path) -> None:
    vae = of_tensors(LoadRequest("a checkpoint", Role.VAE), load_file(file))
    assert isinstance(vae.first_stage_model, QwenImage21VAE)


def test_it_is_built_otherwise_than_wans() -> None:
    """A ComfyUI that takes such a file by another way builds it of Wan's class all the same."""
    assert not is_wan(QwenImage21VAE())
    wan = WanVAE22(dim=4, dec_dim=4, z_dim=8, dim_mult=[1, 2, 4, 4])
    assert is_wan(wan)
    wan.patch_size = 1  # which newer ones note
    assert not is_wan(wan)
    wan.patch_size = 2
    assert is_wan(wan)


@pytest.mark.parametrize("kind", ["wan_vae", "wan22_vae"])
def test_wans_own_are_told_by_what_is_left_of_them(kind: str, tmp_path: Path) -> None:
    """Whatever one tensor a file lacks, it is said of a Wan VAE that it does."""
    tensors = load_file(checkpoints.write(kind, tmp_path, "fp16"))
    assert family_of(header_of(tensors)) is WAN_VAE
    for lacking in ("decoder.head.2.weight", "decoder.middle.0.residual.2.weight", "encoder.conv1.weight"):
        left = {name: tensor for name, tensor in tensors.items() if name != lacking}
        assert family_of(header_of(left)) is WAN_VAE
        path = tmp_path / f"{lacking}.safetensors"
        save_file(left, path)
        with pytest.raises(WrongFile, match=f"lacks .*{lacking}"):
            fusion.load_vae(str(path))


@pytest.mark.parametrize("change", ["a frame", "a stage more", "pictures"])
def test_other_shapes_are_another_vae(change: str, tmp_path: Path) -> None:
    tensors = load_file(checkpoints.write("wan22_vae", tmp_path, "fp16"))
    if change == "a stage more":
        tensors["decoder.upsamples.4.upsamples.0.residual.2.bias"] = torch.zeros(1)
    else:
        head = tensors["decoder.head.2.weight"]
        tensors["decoder.head.2.weight"] = head[:, :, :1] if change == "a frame" else head[:, :, 0]
    assert family_of(header_of(tensors)) is not WAN_VAE

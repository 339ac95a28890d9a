"""What the VAEs of pictures have of their own: norms over all of a picture, numbers beyond fp16, and their files."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace

import comfy
import comfy.diffusers_convert
import comfy.ldm.models.autoencoder
import comfy.utils
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from vae_scenes import KINDS, OFF, Files

from bed.depth import is_thorough
from fusestream import checkpoints, fusion
from fusestream.checkpoints import container, narrow
from fusestream.fusion.families import family_of
from fusestream.fusion.families.image_vae import IMAGE_VAE, fused
from fusestream.fusion.families.image_vae import layers as image_layers
from fusestream.fusion.vae import picture_planner as plan
from fusestream.fusion.vae.memory_limits import LIMIT
from fusestream.kernels_cuda import KernelPolicy
from fusestream.memory import Checkpoint

SD = KINDS["sd_vae"]

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture(scope="module", autouse=True)
def small_ones_too() -> Iterator[None]:
    with narrow.opened(comfy):
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, small_ones_too: None) -> Files:
    return Files(tmp_path_factory.mktemp("vae"))


def close(got, want):
    torch.testing.assert_close(got, want, atol=2e-4 * float(want.abs().max()), rtol=1e-3)


@pytest.mark.skipif(not is_thorough(), reason="what no size chooses: --thorough")
def test_every_way_of_keeping_is_exact(files):
    """All that could be chosen, not only what some sizes choose."""
    net = SD.fused(files.net("sd_vae"))
    z = torch.randn(1, 4, 7, 2)
    whole = net.decode(z.clone())
    journey, _ = fused.planned(net.decoder, 7, 2, 4, 1)
    assert journey.way is not None
    with pytest.MonkeyPatch.context() as patch:
        for keeps in plan.DECODING:
            for last in plan.DECODING:
                stages = 1 + max(p.stage for p in journey.way.pictures)
                kept = plan._kept(journey.way, [*[keeps] * (stages - 1), last])
                made = plan.planned(plan.Outline(journey.way, *kept), 100 << 10)
                patch.setattr(fused, "planned", lambda *_, found=(journey, made): found)
                close(net.decode(z.clone()), whole)


def large(files):
    """A VAE with numbers between its norms as large as in SDXL's."""
    net = copy.deepcopy(files.net("sd_vae"))
    for block in [*net.decoder.up[0].block, *net.decoder.up[1].block]:
        for conv in (block.conv1, block.conv2):
            conv.weight *= 2**12
            conv.bias *= 2**12
    net.decoder.up[1].upsample.conv.weight *= 2**3
    return net


def test_numbers_beyond_fp16_stay_in_range(files):
    """Stock's fp16 is lost."""
    net, z = large(files), torch.randn(1, 4, 4, 4)
    exact = net.decode(z.clone())
    half = net.half()
    assert not half.decode(z.half()).isfinite().all()
    got = SD.fused(half, KernelPolicy()).decode(z.half()).float()
    assert (got - exact).norm() <= 0.01 * exact.norm()


def test_what_is_stocks_for_another_nodes_sake_does_not_overflow(files):
    half = SD.fused(large(files).half(), KernelPolicy())
    exact, z = large(files), torch.randn(1, 4, 4, 4)
    for net in (half, exact):
        net.decoder.conv_in.padding_mode = "circular"
    got, want = half.decode(z.half()).float(), exact.decode(z.clone())
    assert (got - want).norm() <= 0.02 * want.norm()


def test_where_kernels_are_on_the_attention_that_none_serves_is_torchs(monkeypatch):
    asked, attention = [], image_layers.attention

    def noted(*given, policy):
        asked.append(policy)
        return attention(*given, policy=OFF)

    monkeypatch.setattr(image_layers, "attention", noted)
    forced = KernelPolicy.of("on", precision="fast")
    layers = image_layers.Layers(forced)
    layers._mixed(*(torch.randn(1, 6, 1, 64 * 8).half() for _ in range(3)))
    assert asked == [KernelPolicy.of("on", precision="fast", attention="auto")]


@pytest.mark.parametrize("policy", [OFF, KernelPolicy()], ids=["stock's ops", "references"])
def test_the_attention_of_some_queries_at_a_time_is_that_of_all(files, monkeypatch, policy):
    net, z = SD.fused(files.net("sd_vae"), policy), torch.randn(1, 4, 7, 5)
    whole, lengths, attention = net.decode(z.clone()), [], image_layers.attention
    monkeypatch.setattr(image_layers, "QUERIES", 8)
    monkeypatch.setattr(
        image_layers, "attention", lambda q, *a, **k: lengths.append(q.shape[1]) or attention(q, *a, **k)
    )
    close(net.decode(z.clone()), whole)
    assert lengths == [8, 8, 8, 8, 3]


# ------------------------------------------------------------------------------------------------------------- memory


def test_the_larger_a_picture_the_less_is_kept():
    """And what is made again for it costs less than stock's tiles, which compute all three times, and their margins."""
    with FakeTensorMode():
        net = KINDS["flux_vae"].full()
    least = None
    for side in (2048, 3072, 4096):
        journey, made = fused.planned(net.decoder, side // 8, side // 8, 2, fused.room_for(net, LIMIT))
        assert made is not None and journey.way is not None
        once = plan.Outline(journey.way, frozenset(range(len(journey.way.pictures))))
        ratio = made.products / once.products
        assert ratio >= (least or 1)
        least = ratio
    assert least is not None and least < 3 * (64 / 48) ** 2 * 1.5


# ---------------------------------------------------------------------------------------------------- as ComfyUI's VAE


def in_diffusers_names(tensors):
    """The inverse of stock's conversion."""
    renamed = {}
    for original, tensor in tensors.items():
        name, is_attention = original, ".mid.attn_1." in original
        if is_attention:
            for ours, theirs in (
                ("norm", "group_norm"),
                ("q", "to_q"),
                ("k", "to_k"),
                ("v", "to_v"),
                ("proj_out", "to_out.0"),
            ):
                name = name.replace(f"attn_1.{ours}.", f"attn_1.{theirs}.")
        for ours, theirs in reversed(comfy.diffusers_convert.vae_conversion_map):
            name = name.replace(ours, theirs)
        renamed[name] = tensor[..., 0, 0] if is_attention and tensor.ndim == 4 else tensor
    return renamed


def test_files_with_diffusers_names(files, tmp_path):
    tensors = in_diffusers_names(comfy.utils.load_torch_file(str(files.path("sd_vae"))))
    path = tmp_path / "diffusers.safetensors"
    container.save(path, {name: tensor.contiguous() for name, tensor in tensors.items()}, {})
    with Checkpoint.open(path) as source:
        assert family_of(source.files[0]) is IMAGE_VAE
    z = torch.randn(1, 4, 4, 4)
    close(fusion.load_vae(str(path)).decode(z), files.stocks("sd_vae").decode(z))


def test_a_file_that_lacks_a_weight_is_refused(files, tmp_path):
    tensors = dict(comfy.utils.load_torch_file(str(files.path("flux_vae"))))
    del tensors["decoder.up.1.block.1.conv2.weight"]
    path = tmp_path / "cut.safetensors"
    container.save(path, tensors, {})
    with pytest.raises(fusion.WrongFile, match=r"decoder\.up\.1\.block\.1\.conv2\.weight"):
        fusion.load_vae(str(path))


@pytest.mark.parametrize(
    ("kind", "known"), [(name, name != "wan_vae") for name in ("sd_vae", "flux_vae", "flux2_vae", "wan_vae")]
)
def test_which_files_are_known(tmp_path, kind, known):
    with Checkpoint.open(checkpoints.write(kind, tmp_path)) as source:
        assert (family_of(source.files[0]) is IMAGE_VAE) == known


def test_what_is_of_another_kind_stays_stocks():
    """A VAE for videos out of the same classes."""
    sizes = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32}
    sizes |= {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0, "conv3d": True}
    net = comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=sizes, embed_dim=16)
    assert fused.unserved(net) is not None
    assert fused.install(SimpleNamespace(first_stage_model=net), OFF) == 0

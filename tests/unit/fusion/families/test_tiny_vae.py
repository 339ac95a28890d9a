"""Stock's TAESD over our ops: what it makes of pictures and latents, with the references on the CPU."""

from __future__ import annotations

import asyncio
import copy

import comfy.sd
import comfy.taesd.taesd
import comfy.utils
import folder_paths
import pytest
import torch
from live_memory import LiveBytes
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_allocator import Allocator, HeldBytes

import nodes
from bed.depth import is_thorough
from fusestream import fusion
from fusestream.fusion.base.family import Role
from fusestream.fusion.families import family_of
from fusestream.fusion.families.image_vae import TINY_VAE, tiny
from fusestream.fusion.vae import memory_limits
from fusestream.fusion.vae.memory_limits import LIMIT
from fusestream.kernels_cuda import KernelPolicy
from fusestream.memory import Checkpoint
from fusestream.nodes import files
from fusestream.nodes.loaders import VAELoader

OFF = KernelPolicy.of("off")
KINDS = {"taesd": 4, "taef1": 16, "taef2": 128}  # channels of the latents

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture(scope="module")
def nets():
    """Stock's module of each kind in fp32, with weights that keep the size of what passes through."""
    torch.manual_seed(0)
    found = {}
    for kind, channels in KINDS.items():
        net = comfy.taesd.taesd.TAESD(latent_channels=channels).requires_grad_(False)
        for name, parameter in net.named_parameters():
            if parameter.ndim == 4:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            elif ".pool.1." in name or "vae_" in name:
                parameter.normal_(1, 0.1)
            else:
                parameter.normal_(std=0.1)
        found[kind] = net
    return found


def ours(net, policy=OFF):
    net = copy.deepcopy(net)
    tiny.fuse(net, policy)
    return net


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=1e-4)


def given(kind, way, height=6, width=4, batch=2):
    """For a decoding latents of this size, for an encoding pixels of as many."""
    ratio = 16 if kind == "taef2" else 8
    return (
        torch.randn(batch, KINDS[kind], height, width)
        if way == "decode"
        else torch.rand(batch, 3, ratio * height, ratio * width)
    )


@pytest.mark.parametrize("policy", [OFF, KernelPolicy()], ids=["stock's ops", "references"])
@pytest.mark.parametrize("way", ["decode", "encode"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_stock_whole_and_in_bands(nets, monkeypatch, kind, way, policy):
    """Down to bands of a row of the latent, which are mostly what others look at."""
    net, x = ours(nets[kind], policy), given(kind, way, height=24, width=2, batch=1)
    want = getattr(nets[kind], way)(x.clone())
    for count in (1, 2, 5, 24):
        monkeypatch.setattr(tiny, "count_for", lambda *_, count=count: count)
        close(getattr(net, way)(x.clone()), want)


def test_less_room_makes_more_bands(nets):
    counts = [tiny.count_for(nets["taesd"], True, 256, 256, 2, room << 20) for room in (4096, 1024, 512, 256, 1)]
    assert counts == sorted(counts)
    assert counts[0] == 1 < counts[1] < counts[2] < counts[3]
    assert counts[4] == 256
    assert tiny.most(nets["taesd"], True, 256, 256, 2, counts[2]) <= 512 << 20


@pytest.mark.parametrize("size", [(37, 27), (8, 8), (16, 41)])
def test_odd_sizes(nets, size):
    x = torch.rand(1, 3, *size)
    for room in (1 << 40, 1):
        close(ours(nets["taesd"]).encode(x.clone(), room=room), nets["taesd"].encode(x.clone()))


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_as_near_as_stocks(nets, kind):
    if kind == "taef2" and not is_thorough():
        pytest.skip("half a minute of half precision on the CPU: --thorough")
    half = copy.deepcopy(nets[kind]).half()
    for way in ("decode", "encode"):
        x = given(kind, way, batch=6)
        exact = getattr(nets[kind], way)(x.clone())
        theirs = (getattr(half, way)(x.half()).float() - exact).norm()
        got = getattr(ours(half, KernelPolicy()), way)(x.half())
        assert got.dtype is torch.float16
        assert (got.float() - exact).norm() <= 1.1 * theirs


def test_each_op_can_be_switched_off(nets):
    x = given("taef2", "decode")
    whole = ours(nets["taef2"], KernelPolicy()).decode(x)
    for op in TINY_VAE.ops:
        close(ours(nets["taef2"], KernelPolicy.of(**{op: "off"})).decode(x), whole)


def test_nothing_is_left_behind(nets):
    net = ours(nets["taesd"])
    for way in ("decode", "encode"):
        x = given("taesd", way, batch=1)
        with LiveBytes(*net.parameters(), x) as live:
            out = getattr(net, way)(x, room=1)  # bands of a row of the latent
            assert live.now == out.untyped_storage().nbytes() < live.most


LIBRARIES = 160 << 20  # as in test_image_vae.py


@pytest.mark.parametrize("side", [1024, 4096])
@pytest.mark.parametrize("way", ["decode", "encode"])
@pytest.mark.parametrize("kind", ["taesd", "taef2"])
def test_what_was_foretold_is_kept_and_is_within_3_gib(monkeypatch, kind, way, side):
    """The real sizes in fp16, counted without being computed."""
    standard = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with FakeTensorMode():
            net = comfy.taesd.taesd.TAESD(latent_channels=KINDS[kind]).requires_grad_(False)
            tiny.fuse(net)
            ratio = 8 * tiny.fold(net)
            latent = (1, KINDS[kind], side // ratio, side // ratio)
            x = torch.empty(latent if way == "decode" else (1, 3, side, side))
            out = torch.empty(net.decode_output_shape(latent))
            options = {"output_buffer": out} if way == "decode" else {"device": torch.device("cpu")}
            allocator = Allocator()
            monkeypatch.setattr(torch.cuda, "empty_cache", allocator.give_back)
            monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: allocator.held)
            monkeypatch.setattr(memory_limits, "held_in_pieces", lambda _: allocator.held)
            monkeypatch.setattr(memory_limits, "products_have_their_room", lambda _: None)
            monkeypatch.setattr(tiny, "on_card", lambda _: True)
            with HeldBytes(allocator, x, out, *net.parameters()) as live:
                getattr(net, way)(x, **options)
            foretold = tiny.memory_used(net, LIMIT, way == "decode", x.shape, torch.float16)
            print(f"{live.most / 2**30:.2f} in use, {allocator.most / 2**30:.2f} held, {foretold / 2**30:.2f} foretold")
            assert live.most <= foretold
            assert max(allocator.most, foretold) + LIBRARIES <= 3 << 30
    finally:
        torch.set_default_dtype(standard)


# ---------------------------------------------------------------------------------------------------- as ComfyUI's VAE


@pytest.fixture(scope="module")
def path(nets, tmp_path_factory):
    path = tmp_path_factory.mktemp("vae") / "taesd.safetensors"
    save_file({name: t.contiguous() for name, t in nets["taesd"].state_dict().items()}, path)
    return str(path)


def test_the_nodes_get_what_stock_gives(path):
    mine, stock = fusion.load_vae(path, KernelPolicy()), comfy.sd.VAE(sd=comfy.utils.load_torch_file(path))
    assert mine.first_stage_model.comfy_has_chunked_io
    z = torch.randn(2, 4, 5, 6)
    close(mine.decode(z), stock.decode(z))
    close(mine.decode_tiled(z, tile_x=4, tile_y=4, overlap=1), stock.decode_tiled(z, tile_x=4, tile_y=4, overlap=1))
    pixels = torch.rand(2, 43, 48, 3)
    close(mine.encode(pixels), stock.encode(pixels))


def test_off_is_stock(path):
    mine, stock = fusion.load_vae(path, OFF), comfy.sd.VAE(sd=comfy.utils.load_torch_file(path))
    assert type(mine.first_stage_model) is comfy.taesd.taesd.TAESD
    z = torch.randn(1, 4, 4, 6)
    assert torch.equal(mine.decode(z), stock.decode(z))


def test_files_are_known_and_may_lack_the_scale(nets, path, tmp_path):
    with Checkpoint.open(path) as source:
        assert family_of(source.files[0]) is TINY_VAE
    bare = {name: t.contiguous() for name, t in nets["taef1"].state_dict().items() if "vae_" not in name}
    save_file(bare, tmp_path / "bare.safetensors")
    fusion.load_vae(str(tmp_path / "bare.safetensors"))
    del bare["taesd_decoder.3.conv.2.weight"]
    save_file(bare, tmp_path / "cut.safetensors")
    with pytest.raises(fusion.WrongFile, match=r"taesd_decoder\.3\.conv\.2\.weight"):
        fusion.load_vae(str(tmp_path / "cut.safetensors"))


@pytest.fixture
def in_parts(nets, tmp_path, monkeypatch):
    """The folder where stock has them, with both halves of two and one of a third."""
    for kind in ("taesd", "taef2"):
        for half in files.HALVES:
            weights = getattr(nets[kind], f"taesd_{half}").state_dict()
            save_file({name: t.contiguous() for name, t in weights.items()}, tmp_path / f"{kind}_{half}.safetensors")
    (tmp_path / "taef1_decoder.safetensors").touch()
    known = {files.HALVES_FOLDER: ([str(tmp_path)], folder_paths.supported_pt_extensions)}
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", {**folder_paths.folder_names_and_paths, **known})
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    return tmp_path


@pytest.mark.parametrize("kind", ["taesd", "taef2"])
def test_the_loader_takes_them_by_stocks_names(in_parts, kind):
    assert [name for name in files.listed(Role.VAE) if name in KINDS] == ["taesd", "taef2"]
    assert asyncio.run(VAELoader.validate_inputs(vae_name=kind)) is True
    mine, stock = VAELoader.execute(kind).result[0], nodes.VAELoader().load_vae(kind)[0]
    assert isinstance(mine.first_stage_model, tiny.FusedTiny)
    z = torch.randn(1, KINDS[kind], 4, 6)
    want = stock.first_stage_model.decode(z.to(stock.vae_dtype))
    close(mine.first_stage_model.decode(z.to(mine.vae_dtype)), want)


def test_another_half_is_another_fingerprint(in_parts):
    before = VAELoader.fingerprint_inputs(vae_name="taesd")
    assert before and before != VAELoader.fingerprint_inputs(vae_name="taef2")
    (in_parts / "taesd_decoder.safetensors").touch()
    assert VAELoader.fingerprint_inputs(vae_name="taesd") != before
    (in_parts / "taesd_encoder.safetensors").unlink()
    folder_paths.filename_list_cache.clear()
    assert VAELoader.fingerprint_inputs(vae_name="taesd") == ""
    assert "not in list" in asyncio.run(VAELoader.validate_inputs(vae_name="taesd"))

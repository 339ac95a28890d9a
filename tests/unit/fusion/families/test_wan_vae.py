"""Stock's Wan VAEs over our ops: what they make of video and latents, with the references on the CPU."""

from __future__ import annotations

import contextlib
import copy
import weakref

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_management
import comfy.sd
import comfy.utils
import pytest
import torch
from live_memory import LiveBytes, no_collector
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_allocator import Allocator, HeldBytes
from vae_scenes import interrupted

from fusestream import checkpoints, fusion
from fusestream.fusion.families.wan.vae import fused as wan_vae
from fusestream.fusion.families.wan.vae import layers as wan_vae_layers
from fusestream.fusion.families.wan.vae.passage import Passage
from fusestream.fusion.load import vae as loader
from fusestream.fusion.vae import memory_limits
from fusestream.kernels_cuda import KernelPolicy, obstacle

KINDS = {"wan_vae": (16, 8, 3), "wan22_vae": (48, 16, 12)}
OFF = KernelPolicy.of("off")


@pytest.fixture(autouse=True)
def as_comfyui_runs():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    """Stock's module of each kind in fp32, with the weights of the tiny file."""
    folder, found = tmp_path_factory.mktemp("vae"), {}
    for kind in KINDS:
        path = checkpoints.write(kind, folder, "fp32")
        state_dict, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
        fixed = kind == "wan22_vae"
        with checkpoints.narrow.wan22_widths(comfy.ldm.wan.vae2_2, path) if fixed else contextlib.nullcontext():
            found[kind] = comfy.sd.VAE(sd=state_dict, metadata=metadata).first_stage_model.float()
    return found


def fused(net, policy=OFF):
    """A copy that computes through our ops; on the CPU `off` is stock's computation, else the references."""
    net = copy.deepcopy(net)
    wan_vae.fuse(net, policy)
    return net


def close(got, want):
    torch.testing.assert_close(got, want, atol=2e-4 * float(want.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("policy", [OFF, KernelPolicy()], ids=["stock's ops", "references"])
@pytest.mark.parametrize("frames", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_latents_become_the_same_frames(nets, kind, frames, policy):
    channels, _, _ = KINDS[kind]
    z = torch.randn(1, channels, frames, 4, 6)
    close(fused(nets[kind], policy).decode(z.clone()), nets[kind].decode(z.clone()))


@pytest.mark.parametrize("policy", [OFF, KernelPolicy()], ids=["stock's ops", "references"])
@pytest.mark.parametrize("frames", [1, 5, 9, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_frames_become_the_same_latents(nets, kind, frames, policy):
    _, ratio, _ = KINDS[kind]
    x = torch.randn(1, 3, frames, 4 * ratio, 2 * ratio)
    close(fused(nets[kind], policy).encode(x.clone()), nets[kind].encode(x.clone()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_its_members(nets, kind):
    channels, _, _ = KINDS[kind]
    net, z = fused(nets[kind]), torch.randn(2, channels, 3, 4, 4)
    close(net.decode(z), torch.cat([net.decode(each) for each in z.split(1)]))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_bands_make_what_the_whole_makes(nets, kind, count):
    """Their edges lie further apart than the convolutions look, so the bands differ from the whole where they can."""
    channels, ratio, _ = KINDS[kind]
    net, width = fused(nets[kind]), 41
    wide, high = torch.randn(1, channels, 2, 2, width), torch.randn(1, channels, 2, width, 2)
    for z in (wide, high):
        close(net.decode(z, bands=count), net.decode(z, bands=1))
    x = torch.randn(1, 3, 5, 2 * ratio, width * ratio)
    for pixels in (x, x.transpose(3, 4)):
        close(net.encode(pixels, bands=count), net.encode(pixels, bands=1))


@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_computes_is_ours(nets, kind):
    """No layer of stock's runs, but for the means of Wan 2.2's shortcuts."""
    net = fused(nets[kind])
    called = []
    for module in net.modules():
        module.register_forward_pre_hook(lambda m, _: called.append(type(m).__name__))
    channels, ratio, _ = KINDS[kind]
    net.decode(torch.randn(1, channels, 3, 4, 4))
    net.encode(torch.randn(1, 3, 5, 4 * ratio, 4 * ratio))
    assert set(called) <= {"AvgDown3D"}


def test_the_two_policies_of_one_file_do_not_meet(nets, monkeypatch):
    one, other = fused(nets["wan_vae"], OFF), fused(nets["wan_vae"], KernelPolicy.of("auto"))
    seen, conv3d = [], wan_vae_layers.conv3d
    monkeypatch.setattr(
        wan_vae_layers, "conv3d", lambda *a, policy, **k: seen.append(policy) or conv3d(*a, policy=policy, **k)
    )
    for net, policy in ((one, OFF), (other, KernelPolicy.of("auto")), (one, OFF)):
        seen.clear()
        net.decode(torch.randn(1, 16, 1, 2, 2))
        assert set(seen) == {policy}


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind(nets, kind):
    channels, ratio, _ = KINDS[kind]
    net = fused(nets[kind])
    z, x = torch.randn(1, channels, 3, 1, 32), torch.randn(1, 3, 5, ratio, 32 * ratio)
    for compute, given in ((net.decode, z), (net.encode, x)):
        for bands in (1, 2):
            with LiveBytes(*net.parameters(), z, x) as live:
                out = compute(given, bands=bands)
                assert live.now == out.untyped_storage().nbytes() < live.most


def test_a_dropped_vae_goes_without_a_garbage_collection(nets):
    net = fused(nets["wan_vae"])
    net.decode(torch.randn(1, 16, 3, 2, 2))
    gone = weakref.ref(net)
    with no_collector():
        del net
        assert gone() is None


@pytest.mark.parametrize("bands", [1, 2])
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_an_interrupt_between_two_pieces_frees_all(nets, monkeypatch, way, bands):
    net = fused(nets["wan_vae"])
    given = torch.randn(1, 16, 9, 1, 32) if way == "decode" else torch.randn(1, 3, 33, 8, 256)
    interrupted(monkeypatch, net, way, given, bands=bands)
    close(getattr(net, way)(given[:, :, :1]), getattr(nets["wan_vae"], way)(given[:, :, :1]))


FULL = {
    "wan_vae": lambda **shape: comfy.ldm.wan.vae.WanVAE(dim=96, z_dim=16, **shape),
    "wan22_vae": lambda **shape: comfy.ldm.wan.vae2_2.WanVAE(dim=160, z_dim=48, **shape),
}


PAGES = 2 << 20  # in steps of which memory is asked of the card
LIBRARIES = 160 << 20  # what the driver counts beside the allocator's, measured


@pytest.mark.parametrize("way", ["decode", "encode"])
@pytest.mark.parametrize("kind", KINDS)
def test_720p_keeps_within_what_was_foretold_and_3_gib(monkeypatch, kind, way):
    """The real sizes in fp16, counted without being computed. More frames need no more: only features, counted apart."""
    channels, ratio, _ = KINDS[kind]
    standard = torch.get_default_dtype()
    monkeypatch.setattr(Passage, "tidies", True)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.no_grad(), FakeTensorMode():
            net = FULL[kind](dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True])
            wan_vae.fuse(net)
            weights = sum(p.numel() * 2 for p in net.parameters())
            there = wan_vae.weights_there(net, way == "decode")
            assert 0 < there < weights, "the other half's wait"
            frames, long = 9, (1, channels, 21, 720 // ratio, 1280 // ratio)
            latent = (1, channels, 3, *long[3:])
            given = torch.empty(latent if way == "decode" else (1, 3, frames, 720, 1280))
            out = torch.empty(net.decode_output_shape(latent))
            options = {"output_buffer": out} if way == "decode" else {"device": torch.device("cpu")}
            count, kept = wan_vae.cutting_for(full_length(net, way, long), net, wan_vae.LIMIT, given.device)
            allocator = Allocator()
            monkeypatch.setattr(torch.cuda, "empty_cache", allocator.give_back)
            monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: allocator.held)
            monkeypatch.setattr(memory_limits, "held_in_pieces", lambda _: allocator.held)
            monkeypatch.setattr(memory_limits, "products_have_their_room", lambda _: None)
            monkeypatch.setattr(memory_limits, "one_piece", lambda nbytes, _: allocator.hold(nbytes))
            monkeypatch.setattr(memory_limits, "bounded", lambda *_: contextlib.nullcontext())
            segments = []
            for _ in range(2):  # what the first left lies there when the second begins
                with HeldBytes(allocator, given, out, *net.parameters()) as live:
                    getattr(net, way)(given, bands=count, **options)
                segments.append(allocator.segments)
            assert segments == [1, 1], "all that passes finds its place in one piece"
            job = wan_vae.work(net, way == "decode", given.shape)
            foretold = job.peak(count) + job.features()
            assert 0.75 * foretold < live.most <= foretold
            assert allocator.most <= wan_vae.IN_ONE_PIECE * foretold + PAGES
            more = kept - job.features() if kept else 0
            beside = wan_vae.IN_ONE_PIECE * more + wan_vae.BESIDE
            assert there + allocator.most + beside + LIBRARIES <= 3 << 30
            assert (
                there + wan_vae.memory_used(net, wan_vae.LIMIT, way == "decode", given.shape, torch.float16) <= 3 << 30
            )
    finally:
        torch.set_default_dtype(standard)


def test_features_stay_on_the_card_unless_fewer_bands_fit_without(monkeypatch):
    with torch.device("meta"):
        net = FULL["wan22_vae"](dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True])
    job = wan_vae.work(net, True, (1, 48, 31, 44, 80))
    rooms = [job.peak(count) for count in (4, 6)]
    for room in rooms:
        cut = wan_vae.cutting(job, room)
        assert cut.kept == 0 and job.peak(cut.bands) <= room, "there is no room beside the bands"
        assert wan_vae.cutting(job, room + job.features()).kept in (0, job.features())
    assert (
        wan_vae.cutting(job, job.peak(6) + job.features()) == (6, job.features())
        or job.peak(5) <= job.peak(6) + job.features()
    )
    assert wan_vae.cutting(job, job.peak(1)) == (1, 0)
    monkeypatch.setattr(wan_vae, "KEPT", job.features() - 1)
    assert wan_vae.cutting(job, job.peak(6) + 2 * job.features()).kept == 0


def full_length(net, way, latent):
    """The work of 81 frames."""
    shape = latent if way == "decode" else (1, 3, 81, 720, 1280)
    return wan_vae.work(net, way == "decode", shape)


# ---------------------------------------------------------------------------------------------------- as ComfyUI's VAE


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return {kind: checkpoints.write(kind, folder, "fp32") for kind in KINDS}


@contextlib.contextmanager
def loaded(files, kind, policy=OFF):
    """The VAE of a file, by our loader and by stock."""
    path = files[kind]
    with (
        checkpoints.narrow.wan22_widths(comfy.ldm.wan.vae2_2, path) if kind == "wan22_vae" else contextlib.nullcontext()
    ):
        weights, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
        yield fusion.load_vae(str(path), policy), comfy.sd.VAE(sd=weights, metadata=metadata)


@pytest.mark.parametrize("kind", KINDS)
def test_the_nodes_get_what_stock_gives(files, kind):
    """VAE Decode and Encode, tiled or not: a batch, an image, a video."""
    channels, ratio, _ = KINDS[kind]
    with loaded(files, kind, KernelPolicy()) as (ours, stock):
        for latents in (torch.randn(2, channels, 3, 4, 6), torch.randn(1, channels, 1, 4, 4)):
            got, want = ours.decode(latents), stock.decode(latents)
            assert got.shape == want.shape and got.device == want.device and got.dtype is want.dtype
            close(got, want)
        z = torch.randn(1, channels, 3, 12, 10)
        tiles = {"tile_x": 8, "tile_y": 8, "overlap": 2, "tile_t": 2, "overlap_t": 1}
        close(ours.decode_tiled(z, **tiles), stock.decode_tiled(z, **tiles))
        for pixels in (torch.rand(5, 3 * ratio, 5 * ratio + 3, 3), torch.rand(1, 2 * ratio, 2 * ratio, 3)):
            close(ours.encode(pixels), stock.encode(pixels))
        x = torch.rand(9, 12 * ratio, 10 * ratio, 3)
        tiles = {"tile_x": 8 * ratio, "tile_y": 8 * ratio, "overlap": 2 * ratio}
        close(ours.encode_tiled(x, **tiles), stock.encode_tiled(x, **tiles))


def test_off_is_stock(files):
    with loaded(files, "wan_vae", OFF) as (ours, stock):
        assert ours.vae_dtype is stock.vae_dtype
        assert not hasattr(ours.first_stage_model, "comfy_has_chunked_io")
        z = torch.randn(1, 16, 3, 4, 6)
        assert torch.equal(ours.decode(z), stock.decode(z))
        assert ours.memory_used_decode(z.shape, torch.float16) == stock.memory_used_decode(z.shape, torch.float16)


def test_comfyui_is_asked_for_less_than_stock_would(files):
    shape, pixels = (1, 16, 21, 90, 160), (1, 3, 81, 720, 1280)
    with loaded(files, "wan_vae", KernelPolicy()) as (ours, stock):
        assert ours.memory_used_decode(shape, torch.float16) < stock.memory_used_decode(shape, torch.float16)
        assert ours.memory_used_encode(pixels, torch.float16) < stock.memory_used_encode(pixels, torch.float16)


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

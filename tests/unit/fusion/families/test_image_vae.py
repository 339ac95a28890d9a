"""Stock's VAEs of pictures over our ops: what they make of pictures and latents, with the references on the CPU."""

from __future__ import annotations

import contextlib
import copy
import weakref
from types import SimpleNamespace

import comfy
import comfy.diffusers_convert
import comfy.ldm.models.autoencoder
import comfy.model_management
import comfy.sd
import comfy.utils
import pytest
import torch
from live_memory import LiveBytes, no_collector
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_allocator import Allocator, HeldBytes
from vae_scenes import interrupted

from bed.depth import is_thorough
from fusestream import checkpoints, fusion
from fusestream.checkpoints import container, narrow
from fusestream.fusion.families import family_of
from fusestream.fusion.families.image_vae import IMAGE_VAE, fused, plan
from fusestream.fusion.families.image_vae import layers as image_layers
from fusestream.fusion.vae import memory_limits
from fusestream.fusion.vae.memory_limits import LIMIT
from fusestream.kernels_cuda import KernelPolicy
from fusestream.memory import Checkpoint

# Channels of the latents, and pixels that one of them stands for.
KINDS = {"sd_vae": (4, 8), "flux_vae": (16, 8), "flux2_vae": (128, 16)}
OFF = KernelPolicy.of("off")

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    return {kind: checkpoints.write(kind, folder, "fp32") for kind in KINDS}


@pytest.fixture(scope="module", autouse=True)
def small_ones_too():
    with narrow.opened(comfy):
        yield


def stocks(path, **options):
    weights, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    return comfy.sd.VAE(sd=weights, metadata=metadata, **options)


@pytest.fixture(scope="module")
def nets(files, small_ones_too):
    """Stock's module of each kind in fp32."""
    return {kind: stocks(path).first_stage_model.float() for kind, path in files.items()}


def ours(net, policy=OFF):
    """A copy that computes through our ops; on the CPU `off` is stock's computation, else the references."""
    net = copy.deepcopy(net)
    fused.fuse(net, policy)
    return net


def close(got, want):
    torch.testing.assert_close(got, want, atol=2e-4 * float(want.abs().max()), rtol=1e-3)


# ---------------------------------------------------------------------------------------------------------- as stock's


@pytest.mark.parametrize("policy", [OFF, KernelPolicy()], ids=["stock's ops", "references"])
@pytest.mark.parametrize("size", [(4, 6), (5, 3), (1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_latents_become_the_same_picture(nets, kind, size, policy):
    z = torch.randn(2, KINDS[kind][0], *size)
    close(ours(nets[kind], policy).decode(z.clone()), nets[kind].decode(z.clone()))


@pytest.mark.parametrize("policy", [OFF, KernelPolicy()], ids=["stock's ops", "references"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_becomes_the_same_latents(nets, kind, policy):
    _, ratio = KINDS[kind]
    # Sizes that are no multiple of 8 are stock's, too; it folds only even ones.
    for height, width in ((4 * ratio, 2 * ratio), *(((37, 27), (16, 41)) if ratio == 8 else ())):
        x = torch.randn(2, 3, height, width)
        close(ours(nets[kind], policy).encode(x.clone()), nets[kind].encode(x.clone()))


def ways(half, height, width):
    """Rooms in which a picture of this size passes in different ways."""
    found = {}
    for kib in (1, 120, 250, 500, 1000, 2000):
        journey, made = fused.planned(half, height, width, 4, kib << 10)
        if made is not None:
            found.setdefault((len(journey.whole), made.kept), kib << 10)
    return list(found.values())


BANDS = [pytest.param(kind, KernelPolicy(), id=f"{kind}-references") for kind in KINDS]
BANDS += [pytest.param(kind, OFF, id=f"{kind}-stock's ops") for kind in (KINDS if is_thorough() else ["flux2_vae"])]


@pytest.mark.parametrize(("kind", "policy"), BANDS)
def test_bands_make_what_the_whole_makes(nets, kind, policy):
    """Whatever is kept and whatever is made again, decoding and encoding."""
    channels, ratio = KINDS[kind]
    net = ours(nets[kind], policy)
    z, x = torch.randn(1, channels, 80 // ratio, 24 // ratio), torch.randn(1, 3, 80, 32)
    for way, given in (("decode", z), ("encode", x)):
        whole = getattr(net, way)(given.clone())
        fold = ratio // 8 if way == "decode" else 1
        half = net.decoder if way == "decode" else net.encoder
        rooms = ways(half, given.shape[2] * fold, given.shape[3] * fold)
        assert len(rooms) >= 3, "bands are to differ in what they keep"
        for room in rooms:
            close(getattr(net, way)(given.clone(), room=room), whole)


@pytest.mark.skipif(not is_thorough(), reason="what no size chooses: --thorough")
def test_every_way_of_keeping_is_exact(nets):
    """All that could be chosen, not only what some sizes choose."""
    net = ours(nets["sd_vae"])
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


@pytest.mark.parametrize("kind", KINDS if is_thorough() else ["flux2_vae"])
def test_half_precision_is_as_near_as_stocks(nets, kind):
    """Against fp32, as stock's module is in fp16."""
    channels, ratio = KINDS[kind]
    # Several: the error of one small picture is chance.
    z, x = torch.randn(12, channels, 48 // ratio, 24 // ratio), torch.randn(12, 3, 32, 32)
    half = copy.deepcopy(nets[kind]).half()
    fused_nets = [ours(half, policy) for policy in (KernelPolicy(), KernelPolicy.of(precision="fast"))]
    for way, given in (("decode", z), ("encode", x)):
        exact = getattr(nets[kind], way)(given.clone())
        theirs = (getattr(half, way)(given.half()).float() - exact).norm()
        for net in fused_nets:
            got = getattr(net, way)(given.half())
            assert got.dtype is torch.float16
            assert (got.float() - exact).norm() <= 1.1 * theirs


def test_numbers_beyond_fp16_stay_in_range(nets):
    """What passes between norms as large as in SDXL's VAE: stock's fp16 is lost."""
    large = copy.deepcopy(nets["sd_vae"])
    for block in [*large.decoder.up[0].block, *large.decoder.up[1].block]:
        for conv in (block.conv1, block.conv2):
            conv.weight *= 2**12
            conv.bias *= 2**12
    large.decoder.up[1].upsample.conv.weight *= 2**3
    z = torch.randn(1, 4, 4, 4)
    exact = large.decode(z.clone())
    half = copy.deepcopy(large).half()
    assert not half.decode(z.half()).isfinite().all()
    got = ours(half, KernelPolicy()).decode(z.half()).float()
    assert (got - exact).norm() <= 0.01 * exact.norm()


def test_each_op_can_be_switched_off(nets):
    half = copy.deepcopy(nets["sd_vae"]).half()
    z = torch.randn(1, 4, 6, 4).half()
    whole = ours(half, KernelPolicy()).decode(z.clone()).float()
    for op in IMAGE_VAE.ops:
        other = ours(half, KernelPolicy.of(**{op: "off"})).decode(z.clone()).float()
        assert (other - whole).norm() < 0.02 * whole.norm()


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


def test_the_two_policies_of_one_file_do_not_meet(nets, monkeypatch):
    one, other = ours(nets["sd_vae"], OFF), ours(nets["sd_vae"], KernelPolicy.of("auto"))
    seen, conv2d = [], image_layers.conv2d
    monkeypatch.setattr(
        image_layers, "conv2d", lambda *a, policy, **k: seen.append(policy) or conv2d(*a, policy=policy, **k)
    )
    for net, policy in ((one, OFF), (other, KernelPolicy.of("auto")), (one, OFF)):
        seen.clear()
        net.decode(torch.randn(1, 4, 2, 2))
        assert set(seen) == {policy}


def test_everything_that_computes_is_ours(nets):
    """But for the convolutions beside the latents."""
    net = ours(nets["sd_vae"])
    called = []
    for name, module in net.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    net.decode(torch.randn(1, 4, 4, 4))
    net.encode(torch.randn(1, 3, 32, 32))
    assert set(called) == {"decoder", "encoder", "quant_conv", "post_quant_conv", "regularization"}


@pytest.mark.parametrize("policy", [OFF, KernelPolicy()], ids=["stock's ops", "references"])
def test_the_attention_of_some_queries_at_a_time_is_that_of_all(nets, monkeypatch, policy):
    net, z = ours(nets["sd_vae"], policy), torch.randn(1, 4, 7, 5)
    whole, lengths, attention = net.decode(z.clone()), [], image_layers.attention
    monkeypatch.setattr(image_layers, "QUERIES", 8)
    monkeypatch.setattr(
        image_layers, "attention", lambda q, *a, **k: lengths.append(q.shape[1]) or attention(q, *a, **k)
    )
    close(net.decode(z.clone()), whole)
    assert lengths == [8, 8, 8, 8, 3]


# ------------------------------------------------------------------------------------------------------------- memory


def test_nothing_is_left_behind(nets):
    net = ours(nets["sd_vae"])
    z, x = torch.randn(1, 4, 5, 3), torch.randn(1, 3, 40, 24)
    for compute, given in ((net.decode, z), (net.encode, x)):
        for room in (1 << 40, 1):
            with LiveBytes(*net.parameters(), z, x) as live:
                out = compute(given, room=room)
                assert live.now == out.untyped_storage().nbytes() < live.most


def test_a_dropped_vae_goes_without_a_garbage_collection(nets):
    net = ours(nets["sd_vae"])
    net.decode(torch.randn(1, 4, 4, 2), room=1)
    gone = weakref.ref(net)
    with no_collector():
        del net
        assert gone() is None


@pytest.mark.parametrize("way", ["decode", "encode"])
def test_an_interrupt_between_two_bands_frees_all(nets, monkeypatch, way):
    net = ours(nets["sd_vae"])
    given = torch.randn(1, 4, 12, 4) if way == "decode" else torch.randn(1, 3, 96, 32)
    interrupted(monkeypatch, net, way, given, room=1)


def full_size(decoder=128):
    sizes = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128}
    sizes |= {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    model = "comfy.ldm.modules.diffusionmodules.model"
    return comfy.ldm.models.autoencoder.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{model}.Encoder", "params": sizes},
        decoder_config={"target": f"{model}.Decoder", "params": sizes | {"ch": decoder}},
    )


SIZES = [(1024, 1024), (1536, 1024), (2048, 2048), (3072, 2048), (4096, 4096)]
LIBRARIES = 160 << 20  # what the driver counts beside the allocator's, measured


@pytest.mark.parametrize("size", SIZES if is_thorough() else SIZES[:4:3])
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_what_was_foretold_is_kept_and_is_within_3_gib(monkeypatch, way, size):
    """The real sizes in fp16, counted without being computed. Kernels that need more lose their place while one is chosen."""
    standard = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    height, width = size
    try:
        with torch.no_grad(), FakeTensorMode():
            net = full_size()
            fused.fuse(net)
            weights = sum(p.numel() * 2 for p in net.parameters())
            latent = (1, 16, height // 8, width // 8)
            given = torch.empty(latent if way == "decode" else (1, 3, height, width))
            out = torch.empty(net.decode_output_shape(latent))
            options = {"output_buffer": out} if way == "decode" else {"device": torch.device("cpu")}
            allocator = Allocator()
            monkeypatch.setattr(torch.cuda, "empty_cache", allocator.give_back)
            monkeypatch.setattr(fused, "on_card", lambda _: True)
            monkeypatch.setattr(memory_limits, "bounded", lambda *_: contextlib.nullcontext())
            monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: allocator.held)
            monkeypatch.setattr(memory_limits, "held_in_pieces", lambda _: allocator.held)
            monkeypatch.setattr(memory_limits, "products_have_their_room", lambda _: None)
            segments = []
            for _ in range(2):  # what the first left lies there when the second begins
                with HeldBytes(allocator, given, out, *net.parameters()) as live:
                    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_, live=live: live.now)
                    getattr(net, way)(given, **options)
                segments.append(allocator.segments)
            print(f"{live.most / 2**30:.2f} in use, {allocator.most / 2**30:.2f} held, {segments} segments")
            if size == (1024, 1024):
                assert segments == [1, 1], "a picture of this size passes through one piece, and the next finds it"
            foretold = fused.memory_used(net, LIMIT, way == "decode", given.shape, torch.float16)
            assert live.most <= foretold
            assert weights + max(allocator.most, foretold) + LIBRARIES <= 3 << 30
    finally:
        torch.set_default_dtype(standard)


def test_the_larger_a_picture_the_less_is_kept():
    """And what is made again for it costs less than stock's tiles, which compute all three times, and their margins."""
    with FakeTensorMode():
        net = full_size()
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_nodes_get_what_stock_gives(files, kind):
    """VAE Decode and Encode, tiled or not: a batch, an odd size."""
    channels, ratio = KINDS[kind]
    mine, stock = fusion.load_vae(str(files[kind]), KernelPolicy()), stocks(files[kind])
    assert mine.first_stage_model.comfy_has_chunked_io
    for latents in (torch.randn(2, channels, 4, 6), torch.randn(1, channels, 3, 5)):
        got, want = mine.decode(latents), stock.decode(latents)
        assert got.shape == want.shape and got.device == want.device and got.dtype is want.dtype
        close(got, want)
    z = torch.randn(1, channels, 12, 10)
    tiles = {"tile_x": 8, "tile_y": 8, "overlap": 2}
    close(mine.decode_tiled(z, **tiles), stock.decode_tiled(z, **tiles))
    for pixels in (torch.rand(2, 3 * ratio, 5 * ratio + 3, 3), torch.rand(1, 2 * ratio, 2 * ratio, 4)):
        close(mine.encode(pixels), stock.encode(pixels))
    x = torch.rand(1, 12 * ratio, 10 * ratio, 3)
    tiles = {"tile_x": 8 * ratio, "tile_y": 8 * ratio, "overlap": 2 * ratio}
    close(mine.encode_tiled(x, **tiles), stock.encode_tiled(x, **tiles))


def test_off_is_stock(files):
    mine, stock = fusion.load_vae(str(files["flux_vae"]), OFF), stocks(files["flux_vae"])
    assert mine.vae_dtype is stock.vae_dtype
    assert not hasattr(mine.first_stage_model, "comfy_has_chunked_io")
    z = torch.randn(1, 16, 4, 6)
    assert torch.equal(mine.decode(z), stock.decode(z))
    assert mine.memory_used_decode(z.shape, torch.float16) == stock.memory_used_decode(z.shape, torch.float16)


def test_comfyui_is_asked_for_less_than_stock_would():
    with FakeTensorMode():
        net = full_size()
    stock = stock_reckoning()
    for side in (1024, 2048, 4096):
        shape = (1, 16, side // 8, side // 8)
        assert fused.memory_used(net, LIMIT, True, shape, torch.float16) < stock(shape)


def stock_reckoning():
    return lambda shape: 2178 * shape[2] * shape[3] * 64 * 2


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
    tensors = in_diffusers_names(comfy.utils.load_torch_file(str(files["sd_vae"])))
    path = tmp_path / "diffusers.safetensors"
    container.save(path, {name: tensor.contiguous() for name, tensor in tensors.items()}, {})
    with Checkpoint.open(path) as source:
        assert family_of(source.files[0]) is IMAGE_VAE
    z = torch.randn(1, 4, 4, 4)
    close(fusion.load_vae(str(path)).decode(z), stocks(files["sd_vae"]).decode(z))


def test_a_file_that_lacks_a_weight_is_refused(files, tmp_path):
    tensors = dict(comfy.utils.load_torch_file(str(files["flux_vae"])))
    del tensors["decoder.up.1.block.1.conv2.weight"]
    path = tmp_path / "cut.safetensors"
    container.save(path, tensors, {})
    with pytest.raises(fusion.WrongFile, match=r"decoder\.up\.1\.block\.1\.conv2\.weight"):
        fusion.load_vae(str(path))


@pytest.mark.parametrize(("kind", "known"), [(kind, True) for kind in KINDS] + [("wan_vae", False)])
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

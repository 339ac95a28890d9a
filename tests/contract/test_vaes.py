"""What every VAE that is fused keeps to: stock's numbers in one piece or in bands, its plan's bytes, and nothing left behind.

On the CPU: `off` is stock's computation, else the references.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any

import comfy.model_management
import pytest
import torch
from live_memory import LiveBytes, no_collector
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_allocator import Allocator, HeldBytes
from vae_scenes import KINDS, OFF, Files, Kind, interrupted

from bed.depth import is_thorough
from fusestream import fusion
from fusestream.fusion.families.image_vae import layers as image_layers
from fusestream.fusion.families.image_vae import tiny
from fusestream.fusion.families.wan.vae import layers as wan_layers
from fusestream.fusion.vae import memory_limits, request
from fusestream.fusion.vae.memory_limits import LIMIT
from fusestream.kernels_cuda import LEDGER, KernelPolicy, KernelRefused

# One of each code: what others have of their own is the widths, and with --thorough.
MOST = (
    KINDS
    if is_thorough()
    else {name: KINDS[name] for name in ("sd_vae", "flux2_vae", "taesd", "taef2", "wan_vae", "wan22_vae")}
)
FEW = KINDS if is_thorough() else {name: KINDS[name] for name in ("sd_vae", "taesd", "wan_vae")}
WAYS = pytest.mark.parametrize("way", ["decode", "encode"])
POLICIES = pytest.mark.parametrize("policy", [OFF, KernelPolicy()], ids=["stock's ops", "references"])
EACH = pytest.mark.parametrize("kind", MOST.values(), ids=MOST)
SOME = pytest.mark.parametrize("kind", FEW.values(), ids=FEW)
# Stock takes a whole TAEF2 by its name alone (`test_tiny_vae.py`): a file of both halves it reads as another one.
IN_A_FILE = pytest.mark.parametrize(
    "kind", [kind for name, kind in FEW.items() if name != "taef2"], ids=lambda k: k.name
)


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("vaes"))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-4 * float(want.abs().max()), rtol=1e-3)


def call(net: Any, way: str, given: torch.Tensor, **options: Any) -> torch.Tensor:
    """given: as it is, whatever stock writes into it."""
    made: torch.Tensor = getattr(net, way)(given.clone(), **options)
    return made


# ---------------------------------------------------------------------------------------------------------- as stock's


@pytest.mark.every_other
@POLICIES
@WAYS
@EACH
def test_as_stock_of_all_sizes(files: Files, kind: Kind, way: str, policy: KernelPolicy) -> None:
    """A batch, odd sides, a latent of one pixel; of videos one frame and some."""
    net, stock = kind.fused(files.net(kind.name), policy), files.net(kind.name)
    for batch, height, width, frames in ((2, 3, 2, 1), (1, 1, 1, 2), (1, 4, 5, 3)):
        given = kind.given(way, height, width, 1 if kind.frames and way == "encode" else batch, frames)
        close(call(net, way, given), call(stock, way, given))


@pytest.mark.parametrize("name", ["sd_vae", "taesd"])
def test_pixels_that_are_no_whole_latents(files: Files, name: str) -> None:
    kind, stock = KINDS[name], files.net(name)
    for size in ((37, 27), (16, 41)):
        x = torch.randn(2, 3, *size)
        for options in (kind.budgets[0], kind.budgets[-2]):
            close(call(kind.fused(stock), "encode", x, **options), call(stock, "encode", x))


def around(conv: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1), mode="circular")
    return torch.nn.functional.conv2d(padded, weight, bias, conv.stride)


@pytest.mark.parametrize("attribute", ["padding_mode", "_conv_forward"])
@pytest.mark.parametrize("name", ["sd_vae", "taef2", "wan_vae"])
def test_what_another_node_does_to_a_convolution_is_done(files: Files, name: str, attribute: str) -> None:
    """As nodes for seamless pictures do it, to the VAE or to a copy that they make; and when they take it back, it is
    ours again."""
    kind, plain = KINDS[name], files.net(name)
    ours, stock = copy.deepcopy(kind.fused(plain, KernelPolicy())), copy.deepcopy(plain)
    latents, pixels = (kind.given(way, 3, 2, batch=1 if kind.frames else 2) for way in ("decode", "encode"))
    before = call(ours, "decode", latents)
    convs: list[Any] = [one for net in (ours, stock) for one in net.modules() if getattr(one, "padding", 0) == (1, 1)]
    for conv in convs:
        setattr(conv, attribute, "circular" if attribute == "padding_mode" else around.__get__(conv))
    LEDGER.clear()
    want = call(stock, "decode", latents)
    buffer = torch.zeros_like(want)
    call(ours, "decode", latents, output_buffer=buffer)
    close(buffer, want)
    close(call(ours, "encode", pixels), call(stock, "encode", pixels))
    assert float((before - want).norm() / want.norm()) > 0.05, "it does something"
    assert any(one.op == "vae" and "another node has replaced " in one.reason for one in LEDGER.refusals)
    ours.fusestream_policy = KernelPolicy.of("on")
    with pytest.raises(KernelRefused, match="this VAE"):
        call(ours, "decode", latents)
    ours.fusestream_policy = KernelPolicy()
    for conv in convs:
        conv.__dict__.pop("_conv_forward", None)
        conv.padding_mode = "zeros"
    assert torch.equal(call(ours, "decode", latents), before)


@pytest.mark.every_other
@WAYS
@SOME
def test_a_batch_is_its_members(files: Files, kind: Kind, way: str) -> None:
    net, given = kind.fused(files.net(kind.name)), kind.given(way, 2, 3, batch=2)
    close(call(net, way, given), torch.cat([call(net, way, each) for each in given.split(1)]))


@pytest.mark.deep("flux2_vae-*")  # the code of sd_vae, folded
@pytest.mark.every_other
@WAYS
@EACH
def test_bands_make_what_the_whole_makes(files: Files, monkeypatch: pytest.MonkeyPatch, kind: Kind, way: str) -> None:
    """Of a picture that is longer than convolutions look, so that bands differ from the whole where they can."""
    net, polls = kind.fused(files.net(kind.name), KernelPolicy()), [0]
    monkeypatch.setattr(
        comfy.model_management, "throw_exception_if_processing_interrupted", lambda: polls.append(polls.pop() + 1)
    )
    sides = [(2, 30), (30, 1)] if kind.frames else [(64 // kind.ratio, 1)]
    for height, width in sides:
        given, looks, whole = kind.given(way, height, width, frames=2), [], None
        for options in kind.budgets:
            polls[:] = [0]
            made = call(net, way, given, **options)
            looks.append(polls[0])
            whole = made if whole is None else whole
            close(made, whole)
        assert looks == sorted(looks) and looks[0] < looks[-1], "the less there is, the more bands"


@pytest.mark.deep
@WAYS
@SOME
def test_half_precision_is_as_near_as_stocks(files: Files, kind: Kind, way: str) -> None:
    """Against fp32, as stock's module is in fp16. Of several: the error of one small picture is chance."""
    exact, half = files.net(kind.name), copy.deepcopy(files.net(kind.name)).half()
    given = kind.given(way, 6, 3, batch=2 if kind.frames else 8, frames=2)
    want = call(exact, way, given)
    theirs = (call(half, way, given.half()).float() - want).norm()
    for policy in (KernelPolicy(), KernelPolicy.of(precision="fast")):
        got = call(kind.fused(half, policy), way, given.half())
        assert got.dtype is torch.float16
        assert (got.float() - want).norm() <= 1.1 * theirs


@pytest.mark.deep
@SOME
def test_each_op_can_be_switched_off(files: Files, kind: Kind) -> None:
    half, given = copy.deepcopy(files.net(kind.name)).half(), kind.given("decode", 4, 3).half()
    whole = call(kind.fused(half, KernelPolicy()), "decode", given).float()
    for op in kind.family.ops:
        other = call(kind.fused(half, KernelPolicy.of(**{op: "off"})), "decode", given).float()
        assert (other - whole).norm() < 0.02 * whole.norm()


# Of stock's modules: the convolutions beside the latents, and the means of Wan 2.2's shortcuts.
STOCKS = {
    "Decoder",
    "Encoder",
    "Conv2d",
    "DiagonalGaussianRegularizer",
    "AvgDown3D",
    "Clamp",
    "Identity",
    "BatchNorm2d",
}


@EACH
def test_everything_that_computes_is_ours(files: Files, kind: Kind) -> None:
    net, called = kind.fused(files.net(kind.name)), []
    names = {id(module): name for name, module in net.named_modules()}
    # A hook for all modules: where one of the VAE's has a hook, it is stock's.
    seeing = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: called.append((names[id(module)], type(module).__name__))
    )
    with seeing:
        for way in ("decode", "encode"):
            call(net, way, kind.given(way, 4, 4))
    assert {one for _, one in called} <= STOCKS
    assert not [name for name, one in called if one == "Conv2d" and "quant_conv" not in name]


CONVOLUTIONS = {"sd_vae": (image_layers, "conv2d"), "taesd": (tiny, "conv2d"), "wan_vae": (wan_layers, "conv3d")}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_two_policies_of_one_file_do_not_meet(files: Files, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    auto, (module, op), seen = KernelPolicy.of("auto"), CONVOLUTIONS[name], list[KernelPolicy]()
    one, other = (KINDS[name].fused(files.net(name), policy) for policy in (OFF, auto))
    run = getattr(module, op)
    monkeypatch.setattr(module, op, lambda *a, policy, **k: seen.append(policy) or run(*a, policy=policy, **k))
    for net, policy in ((one, OFF), (other, auto), (one, OFF)):
        seen.clear()
        call(net, "decode", KINDS[name].given("decode", 2, 2, frames=1))
        assert set(seen) == {policy}


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.every_other
@WAYS
@SOME
def test_nothing_is_left_behind(files: Files, kind: Kind, way: str) -> None:
    net, given = kind.fused(files.net(kind.name)), kind.given(way, 8, 2)
    for options in (kind.budgets[0], kind.budgets[1]):
        with LiveBytes(*net.parameters(), *net.buffers(), given) as live:
            out = getattr(net, way)(given, **options)
            assert live.now == out.untyped_storage().nbytes() < live.most


@pytest.mark.deep
@SOME
def test_a_dropped_one_goes_without_a_garbage_collection(files: Files, kind: Kind) -> None:
    net = kind.fused(files.net(kind.name))
    call(net, "decode", kind.given("decode", 8, 2), **kind.budgets[-1])
    gone = weakref.ref(net)
    with no_collector():
        del net
        assert gone() is None


@pytest.mark.deep
@WAYS
@SOME
def test_an_interrupt_on_the_way_frees_all(files: Files, monkeypatch: pytest.MonkeyPatch, kind: Kind, way: str) -> None:
    net = kind.fused(files.net(kind.name))
    options: tuple[dict[str, int], ...] = kind.budgets[:2] if kind.frames else kind.budgets[-1:]
    for each in options:
        interrupted(
            monkeypatch, net, way, kind.given(way, 1 if kind.frames else 20, 16 if kind.frames else 2, frames=9), **each
        )
    given = kind.given(way, 2, 2, frames=1)
    close(call(net, way, given), call(files.net(kind.name), way, given))


LIBRARIES = 160 << 20  # what the driver counts beside the allocator's, measured
REAL = [("flux_vae", 1024, 1024), ("flux_vae", 3072, 2048), ("taesd", 4096, 4096), ("wan_vae", 720, 1280)]
if is_thorough():
    REAL += [("flux_vae", 1536, 1024), ("flux_vae", 2048, 2048), ("flux_vae", 4096, 4096), ("wan22_vae", 704, 1280)]
    REAL += [("taesd", 1024, 1024), ("taef2", 1024, 1024), ("taef2", 4096, 4096)]
ONE_PIECE = {("flux_vae", 1024), ("wan_vae", 720), ("wan22_vae", 704)}


@pytest.mark.deep("flux_vae-3072*", "taesd*")
@WAYS
@pytest.mark.parametrize(("name", "height", "width"), REAL)
def test_what_was_foretold_is_kept_and_is_within_3_gib(
    monkeypatch: pytest.MonkeyPatch, name: str, height: int, width: int, way: str
) -> None:
    """The real sizes in fp16, counted without being computed. Kernels that need more lose their place while one is chosen."""
    kind, standard, allocator = KINDS[name], torch.get_default_dtype(), Allocator()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.no_grad(), FakeTensorMode():
            assert kind.full is not None
            net = kind.full()
            kind.module.fuse(net)
            given = kind.given(way, height // kind.ratio, width // kind.ratio)
            latent = kind.given("decode", height // kind.ratio, width // kind.ratio)
            out = torch.empty(net.decode_output_shape(latent.shape))
            options = {"output_buffer": out} if way == "decode" else {"device": torch.device("cpu")}
            monkeypatch.setattr(request, "on_card", lambda _: True)
            monkeypatch.setattr(torch.cuda, "empty_cache", allocator.give_back)
            monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: allocator.held)
            monkeypatch.setattr(memory_limits, "held_in_pieces", lambda _: allocator.held)
            monkeypatch.setattr(memory_limits, "products_have_their_room", lambda _: None)
            monkeypatch.setattr(memory_limits, "bounded", lambda *_: contextlib.nullcontext())
            # That of a picture that passes whole is dropped at once; a band's slab is there while pictures are placed around it.
            monkeypatch.setattr(memory_limits, "one_piece", lambda nbytes, _: allocator.hold(nbytes))
            segments = []
            for _ in range(2):  # what the first left lies there when the second begins
                with HeldBytes(allocator, given, out, *net.parameters()) as live:
                    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_, live=live: live.now)
                    getattr(net, way)(given, **options)
                segments.append(allocator.segments)
            weights = sum(p.numel() * 2 for p in net.parameters())
            if kind.frames:
                there = kind.module.weights_there(net, way == "decode")
                assert 0 < there < weights, "the other half's wait"
                weights = there
            foretold = kind.module.memory_used(net, LIMIT, way == "decode", given.shape, torch.float16)
    finally:
        torch.set_default_dtype(standard)
    print(f"{live.most / 2**30:.2f} in use, {allocator.most / 2**30:.2f} held, {segments} segments")
    if (name, height) in ONE_PIECE:
        assert segments == [1, 1], "all that passes finds its place in one piece, and the next finds that"
    assert live.most <= foretold
    assert not kind.frames or live.most > 0.5 * (foretold - kind.module.BESIDE), "and not much more is planned for"
    assert weights + max(allocator.most, foretold) + (0 if kind.frames else LIBRARIES) <= 3 << 30


# ---------------------------------------------------------------------------------------------------- as ComfyUI's VAE


@contextlib.contextmanager
def loaded(files: Files, kind: Kind, policy: KernelPolicy) -> Iterator[tuple[Any, Any]]:
    """The VAE of a file, by our loader and by stock."""
    with files.opened(kind.name) as path:
        yield fusion.load_vae(path, policy), files.stocks(kind.name)


@pytest.mark.deep("wan*")
@IN_A_FILE
def test_the_nodes_get_what_stock_gives(files: Files, kind: Kind) -> None:
    """VAE Decode and Encode, tiled or not: a batch, an odd size, an alpha channel, a video."""
    with loaded(files, kind, KernelPolicy()) as (ours, stock):
        assert ours.first_stage_model.comfy_has_chunked_io
        for given in (kind.given("decode", 4, 6, batch=2), kind.given("decode", 3, 5, frames=1)):
            got, want = ours.decode(given), stock.decode(given)
            assert got.shape == want.shape and got.device == want.device and got.dtype is want.dtype
            close(got, want)
        time = {"tile_t": 2, "overlap_t": 1} if kind.frames else {}
        z, tiles = kind.given("decode", 12, 10), {"tile_x": 8, "tile_y": 8, "overlap": 2}
        close(ours.decode_tiled(z, **tiles, **time), stock.decode_tiled(z, **tiles, **time))
        side, count = kind.ratio, 5 if kind.frames else 2
        for pixels in (torch.rand(count, 3 * side, 5 * side + 3, 3), torch.rand(1, 2 * side, 2 * side, 4)):
            close(ours.encode(pixels), stock.encode(pixels))
        x = torch.rand(9 if kind.frames else 1, 12 * side, 10 * side, 3)
        tiles = {"tile_x": 8 * side, "tile_y": 8 * side, "overlap": 2 * side}
        close(ours.encode_tiled(x, **tiles), stock.encode_tiled(x, **tiles))


@IN_A_FILE
def test_off_is_stock_to_the_bit(files: Files, kind: Kind) -> None:
    with loaded(files, kind, OFF) as (ours, stock):
        assert ours.vae_dtype is stock.vae_dtype
        assert type(ours.first_stage_model) is type(stock.first_stage_model)
        assert not hasattr(ours.first_stage_model, "comfy_has_chunked_io")
        z = kind.given("decode", 4, 6)
        assert torch.equal(ours.decode(z), stock.decode(z))
        assert ours.memory_used_decode(z.shape, torch.float16) == stock.memory_used_decode(z.shape, torch.float16)


@SOME
def test_comfyui_is_asked_for_less_than_stock_would(files: Files, kind: Kind) -> None:
    z, pixels = ((1, kind.channels, *(21,) * kind.frames, 90, 160), (1, 3, *(81,) * kind.frames, 720, 1280))
    with loaded(files, kind, KernelPolicy()) as (ours, stock):
        assert ours.memory_used_decode(z, torch.float16) < stock.memory_used_decode(z, torch.float16)
        assert ours.memory_used_encode(pixels, torch.float16) < stock.memory_used_encode(pixels, torch.float16)

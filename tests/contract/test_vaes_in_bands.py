"""What the VAEs that no family knows keep to in bands: stock's numbers, the plan's bytes, and nothing left behind."""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import comfy.ldm.lightricks.vae.causal_video_autoencoder as ltx
import comfy.model_management
import comfy.sd
import comfy.utils
import pytest
import torch
from any_vaes import GLOBAL, LOCAL, AnyVae, interrupt_at
from live_memory import LiveBytes, no_collector
from safetensors.torch import save_file
from torch.utils._pytree import tree_leaves

from bed.depth import is_thorough
from fusestream import fusion
from fusestream.fusion.vae.banded import install
from fusestream.fusion.vae.banded.plan import Band, Plan
from fusestream.fusion.vae.banded.rehearsal import Job
from fusestream.fusion.vae.banded.tensor import Banded
from fusestream.kernels_cuda import LEDGER, KernelPolicy

CPU = torch.device("cpu")
WAYS = pytest.mark.parametrize("way", ["decode", "encode"])
EACH = pytest.mark.parametrize("kind", LOCAL.values(), ids=LOCAL)
FEW = LOCAL if is_thorough() else {name: LOCAL[name] for name in ("LTX-2", "HunyuanVideo 1.5")}
SOME = pytest.mark.parametrize("kind", FEW.values(), ids=FEW)


class BytesOfBands(LiveBytes):
    """What bands hold, which look whole, and everything else that has numbers."""

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                held = tensor.held if isinstance(tensor, Banded) else tensor
                if not held.is_meta:
                    self._count(held.untyped_storage())
        return out


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # LTX's decoder divides frames by bytes: so that it does with small ones.
    monkeypatch.setattr(ltx, "MIN_CHUNK_SIZE", 1 << 15)
    monkeypatch.setattr(ltx, "MAX_CHUNK_SIZE", 1 << 15)
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def nets() -> dict[str, Any]:
    return {}


def net_of(nets: dict[str, Any], kind: AnyVae) -> Any:
    if kind.name not in nets:
        with torch.inference_mode():
            nets[kind.name] = kind.net()
    return nets[kind.name]


def fused(nets: dict[str, Any], kind: AnyVae) -> Any:
    net = copy.deepcopy(net_of(nets, kind))
    install.fuse(net)
    return net


def plan_of(net: Any, way: str, given: torch.Tensor, room: int) -> Plan | str:
    job = Job(tuple(given.shape), given.dtype, CPU, CPU)
    return net.fusestream_plans.find(net._call(way == "decode"), job, room)  # type: ignore[no-any-return]


def peak_of(net: Any, way: str, given: torch.Tensor) -> int:
    plan = plan_of(net, way, given, 1 << 60)
    assert isinstance(plan, Plan) and not plan.bands
    return plan.peak


def call(net: Any, way: str, given: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    made: torch.Tensor = getattr(net, way)(given.clone(), **options)
    return made


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-5 * float(want.abs().max()), rtol=1e-4)


@WAYS
@pytest.mark.parametrize("of_inference", [True, False])
def test_a_plan_is_of_the_type_in_which_the_network_computes(
    nets: dict[str, Any], way: str, of_inference: bool
) -> None:
    """ComfyUI asks for it while weights are in RAM in the file's type; they become another one as they are loaded.
    A server's thread may have loaded them outside of inference."""
    net = fused(nets, LOCAL["LTX-2"])
    if not of_inference:
        with torch.inference_mode(False):
            for module in net.modules():
                for own, tensor in (*module._parameters.items(), *module._buffers.items()):
                    if tensor is not None:
                        plain = torch.tensor(tensor.numpy())
                        setattr(module, own, torch.nn.Parameter(plain) if own in module._parameters else plain)
    given = LOCAL["LTX-2"].given(way, 4, 8, 2)
    whole = peak_of(net, way, given)
    comfy.model_management.archive_model_dtypes(net)  # as stock does before it takes a file's weights
    net.half()
    net.fusestream_plans._found.clear()
    assert peak_of(net, way, given) == whole
    assert all(tensor.dtype is torch.float16 for tensor in net.parameters())


@WAYS
@EACH
def test_bands_make_what_one_pass_makes(nets: dict[str, Any], kind: AnyVae, way: str) -> None:
    """A wide video of several frames and a high one of a single frame, in ever less room; to rounding, because a
    convolution may sum in another order for another width. Numbers drawn by chance are stock's, too."""
    net, stock, most = fused(nets, kind), net_of(nets, kind), []
    for height, width, frames in ((2, 8, 2), (9, 2, 1)):
        given = kind.given(way, height, width, frames)
        want, after = call(stock, way, given), torch.get_rng_state()
        whole = peak_of(net, way, given)
        assert torch.equal(call(net, way, given, room=whole), want), "what fits is stock's own call"
        for share in (0.6,):
            room = int(share * whole)
            close(call(net, way, given, room=room), want)
            assert torch.equal(torch.get_rng_state(), after)
            plan = plan_of(net, way, given, room)
            most.append(plan if isinstance(plan, str) else len(plan.bands))
    assert any(isinstance(count, int) and count >= 2 for count in most), most


def test_fewer_frames_at_a_time_come_before_bands(nets: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's code takes as many as the card in all allows. With few of its bytes free it is told of a small card, which
    repeats no work; and again of the real one behind that."""
    monkeypatch.setattr(ltx, "MAX_CHUNK_SIZE", 1 << 20)
    monkeypatch.setattr(comfy.model_management, "get_total_memory", lambda *_args, **_options: 24 << 30)
    kind = LOCAL["LTX-2"]
    net, given = fused(nets, kind), kind.given("decode", 2, 8, 3)
    want, whole = call(net_of(nets, kind), "decode", given), peak_of(net, "decode", given)
    few = plan_of(net, "decode", given, int(0.8 * whole))
    assert isinstance(few, Plan) and not few.bands and few.peak < 0.8 * whole and few.products == few.least
    for room, counts in ((whole, {0}), (few.peak, {0}), (int(0.7 * few.peak), range(2, 65))):
        plan = plan_of(net, "decode", given, room)
        assert isinstance(plan, Plan) and len(plan.bands) in counts and bool(plan.card) is (room < whole)
        with BytesOfBands(*net.parameters(), *net.buffers(), given) as live:
            made = call(net, "decode", given, room=room)
        assert live.most - made.nbytes <= 1.15 * plan.peak
        close(made, want)
        assert comfy.model_management.get_total_memory() == 24 << 30


@WAYS
@SOME
def test_the_plan_keeps_its_bytes(nets: dict[str, Any], kind: AnyVae, way: str) -> None:
    net, given = fused(nets, kind), kind.given(way, 2, 8)
    whole = peak_of(net, way, given)
    for room in (whole, int(0.75 * whole)):
        plan = plan_of(net, way, given, room)
        assert isinstance(plan, Plan)
        assert plan.peak <= room and plan.products >= 0.9 * plan.least
        out = torch.empty(0)
        with BytesOfBands(*net.parameters(), *net.buffers(), given) as live:
            out = getattr(net, way)(given, room=room)
            beside = out.nbytes if way == "decode" else 0  # on a host otherwise
            assert live.now == out.untyped_storage().nbytes()
        # Stock's own temporaries within an operation are not the plan's: a copy here and there.
        assert live.most - beside <= 1.15 * plan.peak


@WAYS
@SOME
def test_an_interrupt_on_the_way_leaves_nothing(
    nets: dict[str, Any], monkeypatch: pytest.MonkeyPatch, kind: AnyVae, way: str
) -> None:
    net, given = fused(nets, kind), kind.given(way, 2, 8)
    room = int(0.6 * peak_of(net, way, given))
    plan = plan_of(net, way, given, room)
    assert isinstance(plan, Plan) and len(plan.bands) > 1
    interrupt_at(3, monkeypatch)
    with BytesOfBands(*net.parameters(), *net.buffers(), given) as live:
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            getattr(net, way)(given, room=room)
        assert live.most > live.now == 0
    monkeypatch.undo()
    assert not any(module._forward_pre_hooks for module in net.modules())
    close(call(net, way, given, room=room), call(net_of(nets, kind), way, given))


@SOME
def test_a_batch_is_its_members(nets: dict[str, Any], kind: AnyVae) -> None:
    net, given = fused(nets, kind), kind.given("decode", 2, 6, batch=2, frames=2)
    room = int(0.6 * peak_of(net, "decode", given))
    plan = plan_of(net, "decode", given, room)
    assert isinstance(plan, Plan) and len(plan.bands) > 1
    close(call(net, "decode", given, room=room), call(net_of(nets, kind), "decode", given))


def test_frames_that_are_samples_are_mixed_as_stock_mixes_them(nets: dict[str, Any]) -> None:
    kind = GLOBAL["Stable Video Diffusion"]
    net, given = fused(nets, kind), kind.given("decode", 2, 2, batch=3)
    want = call(net_of(nets, kind), "decode", given)
    out = torch.empty(net.decode_output_shape(given.shape))
    assert torch.equal(call(net, "decode", given, output_buffer=out), want) and torch.equal(out, want)
    assert not torch.equal(call(net, "decode", given[:1], room=1 << 60), want[:1])


def tiled(net: Any, kind: AnyVae, given: torch.Tensor) -> torch.Tensor:
    """As ComfyUI decodes where one pass has no room: tiles of half the height, a quarter of a tile in common."""
    side = given.shape[-2]
    tile, overlap, many = (side // 2,) * 2, side // 8, {"out_channels": 3}
    if given.ndim == 4:
        return comfy.utils.tiled_scale_multidim(given, net.decode, tile, overlap, kind.ratio, **many)  # type: ignore[no-any-return]
    frames = partial(lambda step, length: max(1, step * (length - 1) + 1), kind.frames)
    many |= {
        "upscale_amount": (frames, kind.ratio, kind.ratio),
        "index_formulas": (kind.frames, kind.ratio, kind.ratio),
    }
    return comfy.utils.tiled_scale_multidim(given, net.decode, (99, *tile), (1, overlap, overlap), **many)  # type: ignore[no-any-return]


def in_one_band(net: Any, plan: Plan) -> None:
    """Let the plan have a single band, of the whole picture."""
    first, last = plan.bands[0], plan.bands[-1]
    one = Band((first.enters[0], last.enters[1]), (first.makes[0], last.makes[1]))
    found = net.fusestream_plans._found
    found |= {key: replace(plan, bands=(one,)) for key, each in found.items() if each is plan}


def test_an_encoder_with_norms_over_pictures_makes_no_seams(nets: dict[str, Any]) -> None:
    kind = GLOBAL["HunyuanVideo"]
    net, given = fused(nets, kind), kind.given("encode", 6, 12, frames=2)
    room = int(0.5 * peak_of(net, "encode", given))
    plan = plan_of(net, "encode", given, room)
    assert isinstance(plan, Plan) and len(plan.bands) > 1 and plan.peak <= room
    assert plan.norms and plan.end and plan.unit > 1
    got, want = call(net, "encode", given, room=room), call(net_of(nets, kind), "encode", given)
    assert (got - want).norm() < 0.1 * want.norm()
    in_one_band(net, plan)
    close(got, call(net, "encode", given, room=room))


@pytest.mark.deep("CogVideoX", "Mochi", "HunyuanImage*", "Stable*")
@pytest.mark.parametrize("kind", GLOBAL.values(), ids=GLOBAL)
def test_norms_over_pictures_make_no_seams(nets: dict[str, Any], kind: AnyVae) -> None:
    """Where a band would have to know all others, all bands take the statistics of a smaller picture: it does not
    matter where the bands are cut, and the numbers are nearer to one pass's than those of ComfyUI's tiles."""
    net, stock, batch = fused(nets, kind), net_of(nets, kind), 2 if kind.name == "Stable Video Diffusion" else 1
    frames = 3 if kind.name == "CogVideoX" else 2  # of an even number it makes others than ComfyUI's tiles expect
    given = kind.given("decode", *((4, 8) if kind.ratio > 8 else (8, 12)), frames=frames, batch=batch)
    room = int(0.6 * peak_of(net, "decode", given))
    plan = plan_of(net, "decode", given, room)
    assert isinstance(plan, Plan) and len(plan.bands) > 1 and plan.peak <= room
    LEDGER.clear()
    want = call(stock, "decode", given)
    with BytesOfBands(*net.parameters(), *net.buffers(), given) as live:
        got = call(net, "decode", given, room=room)
    assert live.most - got.nbytes <= 1.15 * plan.peak
    said = any("smaller version of the picture" in str(line) for line in LEDGER.messages)
    assert said is bool(plan.norms)
    if not plan.norms:
        close(got, want)
        return
    in_one_band(net, plan)
    close(got, call(net, "decode", given, room=room))
    if batch == 1:  # frames that are samples would be tiled one by one
        assert (got - want).norm() < 0.7 * (tiled(stock, kind, given) - want).norm()


def test_what_another_node_does_to_a_module_is_done(nets: dict[str, Any]) -> None:
    """A hook runs on bands, too; one that reads all of a picture lets stock compute."""
    kind = LOCAL["HunyuanVideo 1.5"]
    given = kind.given("decode", 2, 6, frames=2)
    for change, in_bands in ((lambda x: x * 1.5, True), (lambda x: x - x.mean((-1, -2), keepdim=True), False)):
        net, stock = fused(nets, kind), copy.deepcopy(net_of(nets, kind))
        for each in (net, stock):
            module = each.decoder.up[4].block[1]
            module.register_forward_hook(lambda _module, _args, made, change=change: change(made))
        room = int(0.6 * peak_of(net, "decode", given))
        assert isinstance(plan_of(net, "decode", given, room), Plan) is in_bands
        LEDGER.clear()
        close(call(net, "decode", given, room=room), call(stock, "decode", given))
        assert any("all at once" in str(line) for line in LEDGER.messages) is not in_bands


def test_bands_begin_before_nearest_values_of_either_kind(nets: dict[str, Any]) -> None:
    """Most of Wan's work, and of its bytes, is around its upsamplings, which are "nearest-exact"."""
    kind = LOCAL["Wan"]
    net, given = fused(nets, kind), kind.given("decode", 4, 24)
    room = int(0.6 * peak_of(net, "decode", given))
    plan = plan_of(net, "decode", given, room)
    assert isinstance(plan, Plan) and len(plan.bands) > 1 and plan.peak <= room
    close(call(net, "decode", given, room=room), call(net_of(nets, kind), "decode", given))


def test_a_tile_is_stocks_call(nets: dict[str, Any]) -> None:
    kind = LOCAL["LTX-2"]
    net, stock = fused(nets, kind), net_of(nets, kind)
    z = kind.given("decode", 2, 2)
    assert torch.equal(call(net, "decode", z), call(stock, "decode", z))
    assert not net.fusestream_plans._found


def test_a_dropped_one_goes_without_a_garbage_collection(nets: dict[str, Any]) -> None:
    kind = LOCAL["HunyuanVideo 1.5"]
    net, given = fused(nets, kind), kind.given("decode", 2, 6, frames=2)
    call(net, "decode", given, room=int(0.6 * peak_of(net, "decode", given)))
    gone = weakref.ref(net)
    with no_collector():
        del net
        assert gone() is None


@pytest.fixture(scope="module")
def path(nets: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of LTX-2's, whose metadata say how it is built."""
    net = net_of(nets, LOCAL["LTX-2"])
    made = tmp_path_factory.mktemp("ltx") / "ltx.safetensors"
    config = {"config": json.dumps({"vae": net.config})}
    save_file({name: each.clone() for name, each in net.state_dict().items()}, made, metadata=config)
    return str(made)


@pytest.mark.parametrize("limit", [install.LIMIT, 1 << 20], ids=["at once", "in bands"])
def test_the_nodes_get_what_stock_gives(path: str, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """VAE Decode and Encode, of a loaded file; and ComfyUI frees less memory for it than for stock's."""
    monkeypatch.setattr(install, "GRAIN", 1)
    weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    ours, stock = fusion.load_vae(path, KernelPolicy()), comfy.sd.VAE(sd=weights, metadata=metadata)
    net = ours.first_stage_model
    net.fusestream_plans.limit = limit + install.weights_there(net, True)
    z = LOCAL["LTX-2"].given("decode", 2, 8, 2)
    got, want = ours.decode(z), stock.decode(z)
    assert got.shape == want.shape and got.device == want.device and got.dtype is want.dtype
    close(got, want)
    assert any(bool(plan.bands) is (limit < install.LIMIT) for plan in net.fusestream_plans._found.values())
    pixels = torch.rand(9, 64, 96, 3)
    close(ours.encode(pixels), stock.encode(pixels))
    tiles = {"tile_x": 4, "tile_y": 4, "overlap": 1}
    close(ours.decode_tiled(z, **tiles), stock.decode_tiled(z, **tiles))
    if limit == install.LIMIT:
        plan = plan_of(net, "decode", z, 1 << 60)
        assert isinstance(plan, Plan) and ours.memory_used_decode(z.shape, torch.float16) >= plan.peak


@WAYS
def test_a_tile_has_its_weights_behind_a_call_of_the_other_half(path: str, way: str) -> None:
    """VAE Encode lets the decoder's weights go, and VAE Decode (Tiled) calls the network without asking for a plan.
    What the card is to the file's tensors, fp32 is here to fp64."""
    ours = fusion.load_vae(path, KernelPolicy())
    net, z, pixels = ours.first_stage_model, LOCAL["LTX-2"].given("decode", 2, 8, 2), torch.rand(9, 64, 96, 3)
    tiles = {"tile_x": 4, "tile_y": 4, "overlap": 1}
    calls = [partial(ours.encode, pixels), partial(ours.decode_tiled, z, **tiles)]
    if way == "encode":
        tiles = {name: 32 * size for name, size in tiles.items()}
        calls = [partial(ours.decode, z), partial(ours.encode_tiled, pixels, **tiles)]
    before, tiled = calls
    want = tiled()
    net.double()
    comfy.model_management.unload_all_models()
    before()
    assert torch.float64 in {each.dtype for each in net.parameters()}, "of the half that has nothing to do"
    close(tiled(), want)
    comfy.model_management.unload_all_models()


def test_off_is_stocks(path: str) -> None:
    ours = fusion.load_vae(path, KernelPolicy.of("off"))
    assert type(ours.first_stage_model) is ltx.VideoVAE
    assert not hasattr(ours.first_stage_model, "fusestream_plans")

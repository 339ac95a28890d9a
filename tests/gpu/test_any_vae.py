"""VAEs that no family knows, on a card: in bands and block by block, against ComfyUI's own passes. Needs a ComfyUI.

Networks of the published widths, where that is small enough; weights are random.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.support import error

from fusestream import checkpoints
from fusestream.kernels_cuda import LEDGER, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

# Of the plan's bytes, in which a convolution's workspace is not counted: measured 1.00 to 1.36. A limit
# has as much for these (`HELD` in fusion/vae/memory_limits.py).
BESIDE = 1.4
HALF_ERROR = 4e-3  # a convolution of another width may sum in another order, in fp16
# Of ComfyUI's tiles' distance from one pass: what statistics of a smaller picture may have. On the CPU, of small
# networks, it was 0.02 to 0.34.
OF_TILES = 0.7


def published(name: str) -> Any:
    import comfy.ldm.lightricks.vae.causal_video_autoencoder as ltx
    from any_vaes import drawn, hunyuan

    if name == "LTX-2":
        config = ltx.VideoVAE.get_default_config(None, 2)  # type: ignore[arg-type]
        net = ltx.VideoVAE(2, {**config, "timestep_conditioning": False})
    else:
        widths, matched = (
            [128, 256, 512, 1024, 1024],
            {"downsample_match_channel": True, "upsample_match_channel": True},
        )
        sizes = {"block_out_channels": widths, "num_res_blocks": 2, "z_channels": 32, **matched}
        net = hunyuan("vae_refiner", **sizes, ffactor_spatial=16, ffactor_temporal=4)
    return drawn(net.cuda()).half()


@pytest.fixture(scope="module", params=["LTX-2", "HunyuanVideo 1.5"])
def net(request: Any) -> Iterator[Any]:
    torch.manual_seed(3)
    with torch.inference_mode():
        yield published(request.param)
    torch.cuda.empty_cache()


def latent(net: Any, way: str) -> torch.Tensor:
    is_ltx = type(net).__name__.endswith("VideoVAE")
    channels, side, frames = (128, 32, 8) if is_ltx else (32, 16, 4)
    height, width, length = 512 // side, 768 // side, 4
    if way == "decode":
        return torch.randn(1, channels, length, height, width, device="cuda").half()
    shape = 1, 3, 1 + frames * (length - 1), side * height, side * width
    return torch.randn(shape, device="cuda").half().clamp(-1, 1)


@torch.inference_mode()
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_bands_are_stocks_numbers_within_the_plans_bytes(
    net: Any, way: str, record_property: Callable[[str, object], None]
) -> None:
    from fusestream.fusion.vae.banded import install
    from fusestream.fusion.vae.banded.plan import Plan
    from fusestream.fusion.vae.banded.rehearsal import Job

    given = latent(net, way)
    if not hasattr(net, "fusestream_plans"):
        install.fuse(net)
    call, plans = net._call(way == "decode"), net.fusestream_plans
    want = call.stocks(given)
    job = Job(tuple(given.shape), given.dtype, given.device, given.device)
    whole = plans.find(call, job, 1 << 60)
    assert isinstance(whole, Plan) and not whole.bands
    room = int(0.6 * whole.peak)
    plan = plans.find(call, job, room)
    assert isinstance(plan, Plan) and len(plan.bands) > 1

    def made(allowed: int) -> torch.Tensor:
        if way == "encode":
            return net.encode(given, room=allowed)  # type: ignore[no-any-return]
        return net.decode(given, output_buffer=torch.empty(want.shape), room=allowed)  # type: ignore[no-any-return]

    found = {}
    for name, allowed in (("at once", 1 << 60), ("in bands", room)):
        made(allowed)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        got = made(allowed)
        torch.cuda.synchronize()
        found[name] = time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 2**30
    apart = error(got.to(want), want)
    planned = f"planned {plan.peak / 2**30:.3f} GiB in {len(plan.bands)} bands, work x {plan.products / plan.least:.3f}"
    told = {name: f"{seconds:.3f} s, {gib:.3f} GiB" for name, (seconds, gib) in found.items()}
    record_property(f"{type(net).__name__} {way}", f"{apart:.3g} apart; {told}; {planned}")
    print(f"{type(net).__name__} {way}: {apart:.3g} apart; {told}; {planned}")
    assert apart < HALF_ERROR
    assert found["in bands"][1] * 2**30 <= BESIDE * plan.peak


def with_group_norms(name: str) -> Any:
    import comfy.ldm.cogvideo.vae
    from any_vaes import drawn
    from comfy.ldm.models import autoencoder

    if name == "CogVideoX":
        return drawn(comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX().cuda()).half()
    sizes = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128}
    sizes |= {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    net = autoencoder.AutoencoderKL(ddconfig=sizes | {"conv3d": True, "time_compress": 4}, embed_dim=16)
    return drawn(net.cuda()).half()


@torch.inference_mode()
@pytest.mark.parametrize("name", ["HunyuanVideo", "CogVideoX"])
def test_group_norms_of_bands_have_no_seams(name: str, record_property: Callable[[str, object], None]) -> None:
    """Wherever bands are cut the numbers are the same, and nearer to one pass's than those of ComfyUI's tiles."""
    import comfy.utils

    from fusestream.fusion.vae.banded import install
    from fusestream.fusion.vae.banded.plan import Band, Plan
    from fusestream.fusion.vae.banded.rehearsal import Job

    torch.manual_seed(4)
    net = with_group_norms(name)
    z = torch.randn(1, 16, 5, 48, 72, device="cuda").half()
    want = net.decode(z).float().cpu()
    shape = {"upscale_amount": (lambda t: 4 * t - 3, 8, 8), "index_formulas": (4, 8, 8), "out_channels": 3}
    tiles = comfy.utils.tiled_scale_multidim(z, net.decode, (99, 32, 32), (1, 8, 8), output_device="cpu", **shape)
    install.fuse(net)
    job = Job(tuple(z.shape), z.dtype, z.device, z.device)
    plans, call = net.fusestream_plans, net._call(True)
    whole = plans.find(call, job, 1 << 60)
    assert isinstance(whole, Plan) and not whole.bands
    room = int(0.6 * whole.peak)
    plan = plans.find(call, job, room)
    assert isinstance(plan, Plan) and len(plan.bands) > 1 and plan.norms
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    got = net.decode(z, output_buffer=torch.empty(want.shape), room=room)
    taken = torch.cuda.max_memory_allocated() - before
    first, last = plan.bands[0], plan.bands[-1]
    one = Band((first.enters[0], last.enters[1]), (first.makes[0], last.makes[1]))
    plans._found |= {key: replace(plan, bands=(one,)) for key, each in plans._found.items() if each is plan}
    in_one = net.decode(z, output_buffer=torch.empty(want.shape), room=room)
    apart, seams, tiled = error(got, want), error(got, in_one), error(tiles.float(), want)
    planned = f"planned {plan.peak / 2**30:.3f} GiB in {len(plan.bands)} bands, taken {taken / 2**30:.3f}"
    told = f"{apart:.3g} from one pass, tiles {tiled:.3g}; {seams:.3g} from one band; {planned}"
    record_property(f"{name} with group norms", told)
    print(f"{name}: {told}, smaller picture {plan.smaller}, begins at {plan.begin}")
    assert seams < HALF_ERROR and apart < OF_TILES * tiled
    assert taken <= 1.02 * plan.worst, "with a workspace of every convolution"


@torch.inference_mode()
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_block_by_block_through_the_loader_is_stocks(tmp_path: Path, kernels: Any) -> None:
    """A small file of MiniMax H3's, on the card as the nodes have it: the pixels are ComfyUI's, and no weight stays."""
    import comfy
    import comfy.model_management
    import comfy.sd
    import comfy.utils

    from fusestream import fusion

    path = checkpoints.write("minimax_video_vae", tmp_path)
    LEDGER.clear()
    with checkpoints.narrow.opened(comfy):
        weights, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
        stock = comfy.sd.VAE(sd=weights, metadata=metadata)
        ours = fusion.load_vae(str(path), KernelPolicy.of(kernels))
    z = torch.randn(1, 24, 7, 17, 9)
    want, got = stock.decode(z), ours.decode(z)
    apart = error(got, want)
    print(f"MiniMax H3 {kernels}: {apart:.3g} apart")
    assert got.shape == want.shape and apart < HALF_ERROR
    comfy.model_management.unload_all_models()
    assert all(tensor.device.type == "cpu" for tensor in ours.first_stage_model.parameters())


@torch.inference_mode()
@pytest.mark.parametrize("computed", [torch.float16, torch.bfloat16], ids=str)
def test_a_plan_is_found_while_the_weights_are_in_ram(computed: torch.dtype) -> None:
    """As ComfyUI asks for it, before it loads them, in the file's type; and none of its buffers for weights is made meanwhile."""
    import comfy.model_management
    from any_vaes import LOCAL

    from fusestream.fusion.vae.banded import install
    from fusestream.fusion.vae.banded.plan import Plan
    from fusestream.fusion.vae.banded.rehearsal import Job

    kind, card = LOCAL["LTX-2"], torch.device("cuda", torch.cuda.current_device())
    net, z = kind.net().to(computed), kind.given("decode", 4, 8, 3)
    comfy.model_management.archive_model_dtypes(net)
    net.half()
    install.fuse(net)
    buffers = dict(comfy.model_management.STREAM_CAST_BUFFERS)
    job = Job(tuple(z.shape), computed, card, card)
    plan = net.fusestream_plans.within(net._call(True), job, 1 << 40, 0)
    assert isinstance(plan, Plan) and plan.worst >= plan.peak > 0, plan
    assert buffers == comfy.model_management.STREAM_CAST_BUFFERS


@torch.inference_mode()
def test_the_next_block_comes_into_the_room_of_the_last() -> None:
    """Many blocks pass through the memory of two, in the order of the computation, and the products are theirs."""
    from fusestream.fusion.vae.block_by_block.weights import BlocksAhead

    side, count, card = 4096, 12, torch.device("cuda", torch.cuda.current_device())
    net = torch.nn.Module()
    net.blocks = torch.nn.ModuleList(torch.nn.Linear(side, side, bias=False).half() for _ in range(count))
    x = torch.randn(2048, side, device=card).half()
    want = [x @ block.weight.cuda().T for block in net.blocks]
    want = [each.float().norm().item() for each in want]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = []
    ahead = BlocksAhead(net, "blocks", count, card)
    for number, block in enumerate(net.blocks):
        with ahead.on_card(number):
            for _ in range(4):  # computes longer than a copy takes
                made = block(x)
            found.append(made.float().norm())
    ahead.close()
    assert [each.item() for each in found] == pytest.approx(want, rel=1e-3)
    block, beside = 2 * side * side, 4 * 2048 * side * 4
    assert torch.cuda.max_memory_allocated() - before <= 2 * block + beside
    assert all(each.weight.device.type == "cpu" for each in net.blocks)

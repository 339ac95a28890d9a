"""Stock's VAE of pictures, at its real size with random weights, over our kernels: against itself in fp32. Needs a ComfyUI."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from gpu.support import compared, error, in_half, in_turns, ratio, room_of, until_chosen

from fusestream.kernels_cuda import LEDGER, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")


@pytest.fixture(scope="module")
def net() -> Any:
    """Flux' in fp32, with weights that keep the size of what passes through."""
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    sizes = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128}
    sizes |= {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    model = "comfy.ldm.modules.diffusionmodules.model"
    vae = AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{model}.Encoder", "params": sizes},
        decoder_config={"target": f"{model}.Decoder", "params": sizes},
    )
    vae = vae.cuda().eval()
    generator = torch.Generator(device="cuda").manual_seed(7)
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            parameter.normal_(std=max(1, parameter[0].numel()) ** -0.5, generator=generator)
            if "norm" in name:
                parameter.fill_(float(name.endswith("weight")))
    return vae


def halved(net: Any, policy: KernelPolicy | None = None) -> Any:
    from fusestream.fusion.families.image_vae import fused

    return in_half(net, policy, fused.fuse)


@torch.inference_mode()
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_as_near_to_fp32_as_stock(net, isa, way):
    x = torch.randn((1, 16, 40, 56) if way == "decode" else (1, 3, 320, 448), device="cuda")
    exact = getattr(net, way)(x)
    theirs = error(getattr(halved(net), way)(x.half()), exact)
    for precision in ("precise", "fast"):
        LEDGER.clear()
        half = halved(net, KernelPolicy.of("on", isa=isa, precision=precision))
        ours = error(getattr(half, way)(x.half()), exact)
        print(f"{way} {isa or 'native'} {precision}: error {ours:.3g}, stock's fp16 {theirs:.3g}")
        assert not [refusal for refusal in LEDGER.refusals if refusal.candidate == "cuda" and refusal.op != "attention"]
        assert ours <= theirs * (1.05 if precision == "precise" else 2.0)


@torch.inference_mode()
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_bands_make_what_the_whole_makes(net, isa, way):
    """From and to the host, as ComfyUI asks, with less and less room."""
    half = halved(net, KernelPolicy.of("on", isa=isa))
    z, x = torch.randn(1, 16, 64, 24, device="cuda").half(), torch.randn(1, 3, 512, 192).half()
    whole = half.decode(z) if way == "decode" else half.encode(x.cuda())
    for room in (128 << 20, 48 << 20, 16 << 20):
        if way == "decode":
            parts = torch.empty(half.decode_output_shape(z.shape))
            half.decode(z, output_buffer=parts, room=room)
        else:
            parts = half.encode(x, device=whole.device, room=room)
        difference = error(parts.to(whole), whole)
        print(f"{way} in {room >> 20} MiB: {difference:.3g} from the whole")
        assert difference < 2e-3


@pytest.mark.timed
@torch.inference_mode()
@pytest.mark.parametrize("size", [(1024, 1024), (2048, 2048)], ids=["1024", "2048"])
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_faster_than_stock_and_within_3_gib(net, way, size):
    """Seconds beside stock's once each is warm, and what the allocator holds, weights included."""
    h, w = size
    given = torch.randn((1, 16, h // 8, w // 8) if way == "decode" else (1, 3, h, w)).half()
    held, runs = {}, {}
    for name, half in (("stock", halved(net)), ("ours", halved(net, KernelPolicy.of("auto")))):
        out = torch.empty(half.decode_output_shape(given.shape)) if name == "ours" and way == "decode" else None

        def run(half=half, name=name, out=out):
            if name == "stock":
                return getattr(half, way)(given.cuda()).cpu()
            if way == "decode":
                return half.decode(given.cuda(), output_buffer=out)
            return half.encode(given, device=torch.device("cuda"))

        until_chosen(run)
        torch.cuda.empty_cache()
        weights = sum(p.numel() * 2 for p in half.parameters())
        others = torch.cuda.memory_reserved() - weights
        torch.cuda.reset_peak_memory_stats()
        run()
        held[name], runs[name] = (torch.cuda.max_memory_reserved() - others) / 2**30, run
        torch.cuda.empty_cache()
    found = in_turns(**runs)
    print(f"{way} {h}x{w}, ms: {compared(found, 1)}; GiB: {held}")
    assert ratio(found) < 1
    assert held["ours"] <= 3.0


def held_by(half: Any, way: str, given: torch.Tensor) -> tuple[torch.Tensor, float]:
    """What it makes, and GiB that torch's allocator holds for it at most, weights included."""
    weights = sum(p.numel() * p.element_size() for p in half.parameters())
    options: dict[str, Any] = {"device": torch.device("cuda")}
    if way == "decode":
        options = {"output_buffer": torch.empty(half.decode_output_shape(given.shape), dtype=torch.float16)}
    torch.cuda.empty_cache()
    others = torch.cuda.memory_reserved() - weights
    torch.cuda.reset_peak_memory_stats()
    out = getattr(half, way)(given.cuda() if way == "decode" else given, **options)
    return out, (torch.cuda.max_memory_reserved() - others) / 2**30


@torch.inference_mode()
@pytest.mark.parametrize("way", ["decode", "encode"])
@pytest.mark.parametrize(("side", "asks"), [(1024, False), (2048, True)])
def test_one_picture_after_another(net, way, side, asks):
    """What the first left serves the second, without an allocation where all fits side by side; else it is given back."""
    half = halved(net, KernelPolicy.of("auto"))
    given = torch.randn((1, 16, side // 8, side // 8) if way == "decode" else (1, 3, side, side)).half()
    options: dict[str, Any] = {"device": torch.device("cuda")}
    if way == "decode":
        options = {"output_buffer": torch.empty(half.decode_output_shape(given.shape), dtype=torch.float16)}
        given = given.cuda()
    until_chosen(lambda: getattr(half, way)(given, **options))
    torch.cuda.empty_cache()
    weights = sum(p.numel() * p.element_size() for p in half.parameters())
    others = torch.cuda.memory_reserved() - weights
    getattr(half, way)(given, **options)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["segment.all.allocated"]
    getattr(half, way)(given, **options)
    held = (torch.cuda.max_memory_reserved() - others) / 2**30
    made = torch.cuda.memory_stats()["segment.all.allocated"] - before
    print(f"{way} {side}x{side} again: {made} new segments, {held:.2f} GiB held, weights included")
    assert made == 0 or asks
    assert held <= 3.0


@torch.inference_mode()
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_the_largest_picture_within_3_gib(net, way):
    """From the first use on: candidates that need more lose their place, and nobody notices."""
    half = halved(net, KernelPolicy.of("auto"))
    given = torch.randn((1, 16, 512, 512) if way == "decode" else (1, 3, 4096, 4096)).half()
    with room_of((3 << 30) - sum(p.numel() * p.element_size() for p in half.parameters())):
        out, held = held_by(half, way, given)
    print(f"{way} 4096x4096: {held:.2f} GiB held, weights included")
    assert out.isfinite().all()
    assert held <= 3.0


# ------------------------------------------------------------------------------------------------------- the small ones


@pytest.fixture(scope="module")
def small() -> Any:
    """TAESD for Flux in fp32, with weights that keep the size of what passes through."""
    from comfy.taesd.taesd import TAESD

    vae = TAESD(latent_channels=16).cuda().requires_grad_(False)
    generator = torch.Generator(device="cuda").manual_seed(7)
    for parameter in vae.parameters():
        if parameter.ndim == 4:
            parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
        elif parameter.ndim == 1:
            parameter.normal_(std=0.1, generator=generator)
    return vae


def small_halved(small: Any, policy: KernelPolicy | None = None) -> Any:
    from fusestream.fusion.families.image_vae import tiny

    return in_half(small, policy, tiny.fuse)


@torch.inference_mode()
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_a_small_one_is_as_near_to_fp32_as_stock(small, isa, way):
    x = torch.randn((1, 16, 40, 56) if way == "decode" else (1, 3, 320, 448), device="cuda")
    exact = getattr(small, way)(x)
    theirs = error(getattr(small_halved(small), way)(x.half()), exact)
    LEDGER.clear()
    half = small_halved(small, KernelPolicy.of("on", isa=isa))
    for room in (None, 1):  # whole, and in bands of a row of the latent
        ours = error(getattr(half, way)(x.half(), room=room), exact)
        print(f"TAESD {way} {isa or 'native'} room {room}: error {ours:.3g}, stock's fp16 {theirs:.3g}")
        assert ours <= 1.05 * theirs
    assert not [refusal for refusal in LEDGER.refusals if refusal.candidate == "cuda"]


@pytest.mark.timed
@torch.inference_mode()
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_a_small_one_is_faster_than_stock_and_within_3_gib(small, way):
    halves = {"stock": small_halved(small), "ours": small_halved(small, KernelPolicy.of("auto"))}
    given = torch.randn((1, 16, 128, 128) if way == "decode" else (1, 3, 1024, 1024), device="cuda").half()
    found = in_turns(on_card=True, **{name: partial(getattr(half, way), given) for name, half in halves.items()})
    half = small_halved(small, KernelPolicy.of("auto"))
    large = torch.randn((1, 16, 512, 512) if way == "decode" else (1, 3, 4096, 4096)).half()
    out, held = held_by(half, way, large)
    print(f"TAESD {way} 1024x1024, ms: {compared(found, 1)}; 4096x4096: {held:.2f} GiB held")
    assert out.isfinite().all()
    assert ratio(found) < 1
    assert held <= 3.0

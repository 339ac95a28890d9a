"""Stock's Wan VAEs, at their real sizes with random weights, over our kernels: against themselves in fp32. Needs a ComfyUI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu.support import error, in_half, room_of, until_chosen

from fusestream.kernels_cuda import LEDGER, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")


SIZES = {"2.1": [(480, 832), (720, 1280)], "2.2": [(704, 1280)]}
CHANNELS, PIXELS = {"2.1": 16, "2.2": 48}, {"2.1": 8, "2.2": 16}  # of the latents, and that one of them stands for


@pytest.fixture(scope="module", params=SIZES)
def version(request: Any) -> Iterator[str]:
    yield request.param
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def net(version: str) -> Any:
    """In fp32, with weights that keep the size of what passes through."""
    import comfy.ldm.wan.vae
    import comfy.ldm.wan.vae2_2

    shape = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
    if version == "2.1":
        made = comfy.ldm.wan.vae.WanVAE(dim=96, z_dim=16, image_channels=3, conv_out_channels=3, **shape)
    else:
        made = comfy.ldm.wan.vae2_2.WanVAE(dim=160, dec_dim=256, z_dim=48, **shape)
    vae = made.cuda().eval()
    generator = torch.Generator(device="cuda").manual_seed(7)
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.normal_(std=max(1, parameter[0].numel()) ** -0.5, generator=generator)
        for name, parameter in vae.named_parameters():
            if name.endswith("gamma"):
                parameter.fill_(1)
    return vae


def halved(net: Any, policy: KernelPolicy | None = None) -> Any:
    from fusestream.fusion.families.wan.vae import fused as wan_vae

    return in_half(net, policy, wan_vae.fuse)


@torch.inference_mode()
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_as_near_to_fp32_as_stock(net, version, isa, way):
    side = PIXELS[version]
    shape = (1, CHANNELS[version], 3, 240 // side, 416 // side) if way == "decode" else (1, 3, 9, 240, 416)
    x = torch.randn(shape, device="cuda")
    exact = getattr(net, way)(x)
    theirs = error(getattr(halved(net), way)(x.half()), exact)
    for precision in ("precise", "fast"):
        LEDGER.clear()
        half = halved(net, KernelPolicy.of("on", isa=isa, precision=precision))
        ours = error(getattr(half, way)(x.half()), exact)
        print(f"{way} {isa or 'native'} {precision}: error {ours:.3g}, stock's fp16 {theirs:.3g}")
        # Heads of Wan 2.2 are wider than those of our kernels: its attention is others'.
        choices = [choice for choice in LEDGER.choices if version == "2.1" or choice.op != "attention"]
        refusals = [one for one in LEDGER.refusals if version == "2.1" or one.op != "attention"]
        assert {choice.winner.split()[0] for choice in choices} == {"cuda"}
        assert not [refusal for refusal in refusals if refusal.candidate == "cuda"]
        assert ours <= theirs * (1.2 if precision == "precise" else 2.0)


@torch.inference_mode()
def test_faster_and_smaller_than_stock(net, version):
    """480x832, one chunk after another: seconds and peak beside stock's, once each is warm. As ComfyUI holds ours only the half at
    work lies on the card, which leaves more room for the picture: fewer bands."""
    side = PIXELS[version]
    z = torch.randn(1, CHANNELS[version], 5, 480 // side, 832 // side, device="cuda").half()
    found = {}
    for name, half in (("stock", halved(net)), ("ours", halved(net, KernelPolicy.of("auto")))):
        half.encoder.cpu()
        until_chosen(lambda half=half: half.decode(z))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        half.decode(z)
        end.record()
        end.synchronize()
        found[name] = start.elapsed_time(end) / 1e3, (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"decode 17 frames of 480x832, seconds and GiB: {found}")
    assert found["ours"][0] < found["stock"][0]


@torch.inference_mode()
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_bands_make_what_the_whole_makes(net, version, isa, way):
    """From and to the host, as ComfyUI asks; the edges lie further apart than the convolutions look."""
    half = halved(net, KernelPolicy.of("on", isa=isa))
    if way == "decode":
        z = torch.randn(1, CHANNELS[version], 5, 6, 64, device="cuda").half()
        whole = half.decode(z, bands=1)
        parts = torch.empty(half.decode_output_shape(z.shape))
        half.decode(z, output_buffer=parts, bands=3)
    else:
        x = torch.randn(1, 3, 17, 6 * PIXELS[version], 64 * PIXELS[version]).half()
        whole = half.encode(x.cuda(), bands=1)
        parts = half.encode(x, device=whole.device, bands=3)
    difference = error(parts.to(whole), whole)
    print(f"{way} in three bands: {difference:.3g} from the whole")
    assert difference < 1e-3


@torch.inference_mode()
@pytest.mark.parametrize("size", [0, 1], ids=["least", "largest"])
@pytest.mark.parametrize("way", ["decode", "encode"])
def test_within_3_gib(net, version, way, size):
    """What the allocator holds, weights included. From the first use on: candidates that need more lose their place."""
    from fusestream.fusion.families.wan.vae import fused as wan_vae

    if size == len(SIZES[version]):
        pytest.skip("there is one")
    half = halved(net, KernelPolicy.of("auto"))
    weights = sum(p.numel() * 2 for p in half.parameters())
    (h, w), side = SIZES[version][size], PIXELS[version]
    given = torch.randn((1, CHANNELS[version], 5, h // side, w // side) if way == "decode" else (1, 3, 17, h, w)).half()
    out = torch.empty(half.decode_output_shape(given.shape)) if way == "decode" else None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated() - weights, torch.cuda.memory_reserved() - weights

    def run() -> Any:
        if way == "decode":
            return half.decode(given.cuda(), output_buffer=out)
        return half.encode(given, device=torch.device("cuda"))

    for turn in ("choosing kernels", "once they are chosen"):
        with room_of((3 << 30) - weights):
            until_chosen(run) if turn == "choosing kernels" else run()
        peak, held = torch.cuda.max_memory_allocated() - allocated, torch.cuda.max_memory_reserved() - reserved
        print(f"{way} {h}x{w}x17, {turn}: {peak / 2**30:.2f} GiB at most, {held / 2**30:.2f} held by the allocator")
        assert held <= 3 << 30
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    foretold = wan_vae.memory_used(half, wan_vae.LIMIT, way == "decode", given.shape, torch.float16)
    assert peak <= weights + foretold
    assert torch.cuda.memory_allocated() <= allocated + weights + given.numel() * 2

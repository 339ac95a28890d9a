"""Stock's Wan VAEs over our ops: what they make of video and latents, with the references on the CPU."""

from __future__ import annotations

import contextlib
import copy

import comfy.ldm.wan.vae2_2
import comfy.sd
import comfy.utils
import pytest
import torch

import checkpoints
from fusestream.fusion import wan_vae
from fusestream.kernels_cuda import KernelPolicy

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
        with checkpoints.wan_vae.wan22_widths(comfy.ldm.wan.vae2_2, path) if fixed else contextlib.nullcontext():
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


@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_computes_is_ours(nets, kind):
    """No convolution, norm or upsampling of the two halves is left to stock."""
    net = fused(nets[kind])
    called = []

    def watch(module):
        module.register_forward_pre_hook(lambda m, _: called.append(type(m).__name__))

    for module in net.modules():
        if "forward" not in module.__dict__:
            watch(module)
    channels, ratio, _ = KINDS[kind]
    net.decode(torch.randn(1, channels, 3, 4, 4))
    net.encode(torch.randn(1, 3, 5, 4 * ratio, 4 * ratio))
    left = {name for name in called if name not in ("Encoder3d", "Decoder3d", "Resample")}
    assert not left & {"Conv2d", "Conv3d", "CausalConv3d", "RMS_norm", "SiLU", "Upsample", "AttentionBlock"}, left


def test_the_two_policies_of_one_file_do_not_meet(nets):
    one, other = fused(nets["wan_vae"], KernelPolicy.of("off")), fused(nets["wan_vae"], KernelPolicy.of("auto"))
    policies = [
        {m.forward.args[1].mode("conv") for m in net.modules() if "forward" in m.__dict__} for net in (one, other)
    ]
    assert policies == [{"off"}, {"auto"}]

"""Each module beside torch's own layers on the GPU, in both instruction classes, and fused networks."""

from __future__ import annotations

import copy

import pytest
import torch
from gpu.support import on
from module_twins import TWINS, Twins, attending, layer, parts, two
from torch import nn
from torch.nn import functional

from fusestream.kernels_cuda import LEDGER, KernelPolicy
from fusestream.kernels_cuda.modules import (
    FusedAttention,
    FusedConvNormAct2d,
    FusedFeedForward,
    FusedGroupNormSiLU,
    FusedInstanceNorm2d,
    FusedMultiheadAttention,
    FusedOutputProjection,
    FusedTransformerEncoderLayer,
    FusedUpsampleConv2d,
    fuse,
    unfuse,
)

LAST = torch.channels_last


def compared(twins: Twins, policy: KernelPolicy, last: bool = False) -> nn.Module:
    """The module after a call on the card, whose result was held to torch's in float64."""
    ours, theirs = twins.pair()
    halves = [t.half().cuda() for t in twins.inputs()]
    if last:
        halves = [t.contiguous(memory_format=LAST) if t.ndim == 4 else t for t in halves]
    ours.half().cuda().policy = policy
    for part in ours.modules():
        if hasattr(part, "policy"):
            part.policy = policy
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        want = twins.want(theirs.double().cuda(), *(t.double() for t in halves))
        got = twins.call(ours, *halves)
    assert got.dtype is torch.float16 and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, atol=0.015, rtol=0.015)
    return ours


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("name", TWINS)
def test_torchs_results_under_auto(name, last):
    """Whoever computes: among these sizes are some that no kernel of ours serves."""
    if last and not any(len(shape) == 4 for shape in TWINS[name].shapes):
        pytest.skip("no picture")
    compared(TWINS[name], KernelPolicy.of("auto"), last)


# At sizes that our kernels serve, forced.
SERVED = {
    "instance norm": Twins(lambda: FusedInstanceNorm2d(40), lambda: nn.InstanceNorm2d(40), ((2, 40, 33, 47),)),
    "instance norm, relu": Twins(
        lambda: FusedInstanceNorm2d(32, affine=True, activation="relu"),
        lambda: nn.InstanceNorm2d(32, affine=True),
        ((1, 32, 64, 48),),
        lambda theirs, x: theirs(x).relu(),
    ),
    "group norm, silu": Twins(
        lambda: FusedGroupNormSiLU(8, 64),
        lambda: nn.GroupNorm(8, 64),
        ((2, 64, 21, 30),),
        lambda theirs, x: functional.silu(theirs(x)),
    ),
    "conv, instance norm, reflect": Twins(
        lambda: FusedConvNormAct2d(16, 24, 3, 2, 1, padding_mode="reflect", norm="instance"),
        lambda: parts(conv=nn.Conv2d(16, 24, 3, 2, 1, padding_mode="reflect"), norm=nn.InstanceNorm2d(24, affine=True)),
        ((1, 16, 41, 38),),
        lambda theirs, x: theirs["norm"](theirs["conv"](x)).relu(),
    ),
    "upsampled": Twins(
        lambda: FusedUpsampleConv2d(32, 40, activation="silu"),
        lambda: parts(conv=nn.Conv2d(32, 40, 3, 1, 1)),
        ((2, 32, 19, 23),),
        lambda theirs, x: functional.silu(theirs["conv"](functional.interpolate(x, scale_factor=2.0))),
    ),
    "upsampled, reflect": Twins(
        lambda: FusedUpsampleConv2d(32, 8, padding_mode="reflect"),
        lambda: parts(conv=nn.Conv2d(32, 8, 3, 1, 1, padding_mode="reflect")),
        ((1, 32, 20, 17),),
        lambda theirs, x: theirs["conv"](functional.interpolate(x, scale_factor=2.0)),
    ),
    "projection": Twins(
        lambda: FusedOutputProjection(128),
        lambda: nn.Linear(128, 128),
        ((2, 77, 128), (2, 77, 128)),
        lambda theirs, x, residual: theirs(x) + residual,
    ),
    "feed-forward": Twins(
        lambda: FusedFeedForward(128, residual=True),
        lambda: two(128, 512, 512),
        ((3, 65, 128),),
        lambda theirs, x: theirs["fc2"](functional.gelu(theirs["fc1"](x))) + x,
    ),
    "swiglu": Twins(
        lambda: FusedFeedForward(128, 192, False, activation="swiglu"),
        lambda: two(128, 384, 192, False),
        ((2, 50, 128),),
        lambda theirs, x: theirs["fc2"](
            functional.silu(theirs["fc1"](x).chunk(2, -1)[0]) * theirs["fc1"](x).chunk(2, -1)[1]
        ),
    ),
    "attention": Twins(
        lambda: FusedAttention(256, 4),
        lambda: nn.MultiheadAttention(256, 4, batch_first=True),
        ((2, 131, 256),),
        attending,
    ),
    "attention, tokens first": Twins(
        lambda: FusedMultiheadAttention(128, 2),
        lambda: nn.MultiheadAttention(128, 2),
        ((70, 2, 128), (90, 2, 128), (90, 2, 128)),
        attending,
        attending,
    ),
    "encoder layer": Twins(
        lambda: FusedTransformerEncoderLayer(128, 2, 256, batch_first=True, norm_first=True, activation="gelu"),
        lambda: nn.TransformerEncoderLayer(128, 2, 256, batch_first=True, norm_first=True, activation="gelu"),
        ((2, 99, 128),),
        layer,
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_our_kernels_alone(isa, name):
    LEDGER.clear()
    ours = compared(SERVED[name], on(isa), last="conv" in name or "upsampled" in name)
    assert not [told for told in LEDGER.refusals if told.op.startswith("Fused")]
    halves = [t.half().cuda() for t in SERVED[name].inputs()]
    assert ours.obstacle(*halves) is None


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(c, c, 3, 1, 1), nn.BatchNorm2d(c), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, 1, 1), nn.InstanceNorm2d(c, affine=True)

    def forward(self, x):
        return self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x))))) + x


def test_a_fused_network_is_torchs_and_goes_back():
    with torch.device("cuda"):
        net = nn.Sequential(
            nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 32, 3), nn.InstanceNorm2d(32), nn.ReLU()),
            Block(32),
            nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(32, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.SiLU()),
        )
    net = net.eval().half().requires_grad_(False)
    x = torch.randn(2, 3, 37, 50, device="cuda").half()
    want = copy.deepcopy(net).double()(x.double())
    table = fuse(net, on(None))
    assert not table.left
    for _ in range(2):
        torch.testing.assert_close(net(x).double(), want, atol=0.02, rtol=0.02)
    graph, out = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        out = net(x)
    x.copy_(x.flip(0))
    graph.replay()
    torch.testing.assert_close(out.double(), want.flip(0), atol=0.02, rtol=0.02)
    assert unfuse(net)
    torch.testing.assert_close(net(x).double(), want.flip(0), atol=0.02, rtol=0.02)

"""The nn.Modules over the ops on the GPU, in both instruction classes: against float64, and against torch where torch computes."""

from __future__ import annotations

import os

import pytest
import torch
from conv_norm_oracle import ACTIVATIONS, check, exactly, half_module, torchs
from gpu.support import HALF_STEP, SUM_STEP, on, padded_rows, shifted
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from fusestream.kernels_cuda import LEDGER, KernelPolicy, KernelRefused
from fusestream.kernels_cuda.modules import FusedConvNormAct2d

EXAMPLES = int(os.environ.get("FUSESTREAM_EXAMPLES") or 2500) // 16
LAST = torch.channels_last
# taps, stride, padding
KINDS = [(3, 1, 1), (3, 1, 0), (3, 1, (1, 2)), (3, 1, "same"), (3, 2, 1), (3, 2, (2, 0)), (1, 1, 0), (1, 1, "valid")]


def made(*arguments, policy, **options) -> FusedConvNormAct2d:
    """Drawn on the card, where nothing wants a gradient of it."""
    with torch.device("cuda"):
        return half_module(*arguments, policy=policy, **options).requires_grad_(False)


def image(*shape, last=True):
    x = torch.randn(*shape, device="cuda").half()
    return x.contiguous(memory_format=LAST) if last else x


def placed(x, layout):
    """The same values elsewhere, with NaN wherever a kernel has no business."""
    b, c, h, w = x.shape
    if layout == "first":
        return x.contiguous()
    if layout == "shifted":
        return shifted(x.movedim(1, -1).contiguous()).movedim(-1, 1)
    if layout == "channels":  # of a wider image
        return padded_rows(x.movedim(1, -1).contiguous(), 3).movedim(-1, 1)
    if layout == "rows":  # of a taller one
        room = torch.full((b, c, h + 3, w), torch.nan, device="cuda").half().contiguous(memory_format=LAST)
        return room[:, :, 2:-1].copy_(x)
    return x.contiguous(memory_format=LAST)


@st.composite
def configurations(draw):
    taps, stride, padding = draw(st.sampled_from(KINDS))
    return {
        "arguments": (
            draw(st.one_of(st.sampled_from([3, 8, 16, 40, 64, 96]), st.integers(1, 12))),
            draw(st.one_of(st.sampled_from([1, 3, 16, 24, 96, 104, 192]), st.integers(1, 40))),
            taps,
            stride,
            padding,
        ),
        "bias": draw(st.booleans()),
        "norm": draw(st.sampled_from(["batch", "batch", None])),
        "activation": draw(st.sampled_from(list(ACTIVATIONS))),
        "sizes": (draw(st.integers(1, 3)), draw(st.integers(3, 40)), draw(st.integers(3, 40))),
        "layout": draw(st.sampled_from(["last", "first", "shifted", "channels", "rows"])),
        "statistics": draw(st.sampled_from([torch.float16, torch.float32])),
    }


@given(configurations())
@seed(int(os.environ.get("FUSESTREAM_SEED") or 0))
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_random_configurations(isa, c):
    module = made(*c["arguments"], bias=c["bias"], norm=c["norm"], activation=c["activation"], policy=on(isa))
    if module.norm is not None:
        module.norm.to(c["statistics"])
    b, h, w = c["sizes"]
    x = placed(image(b, c["arguments"][0], h, w), c["layout"])
    assert module.obstacle(x) is None, c
    got = module(x)
    assert got.is_contiguous(memory_format=LAST), c
    check(got, module, x, SUM_STEP["precise"], str(c))


@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ends_and_corners(isa, kind, activation):
    """Small: what the sanitizers see."""
    module = made(40, 104, *kind, activation=activation, policy=on(isa))
    x = image(1, 40, 9, 19)
    check(module(x), module, x, SUM_STEP["precise"])


# (channels in, out, rows, columns, stride): a U-Net's convolutions at 64x64 latents, a style network's at 512x512.
REAL = [
    (320, 320, 64, 64, 1),
    (320, 640, 32, 32, 1),
    (640, 640, 32, 32, 2),
    (1280, 1280, 16, 16, 1),
    (32, 64, 512, 512, 2),
    (64, 128, 256, 256, 2),
    (128, 128, 128, 128, 1),
]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_real_shapes(isa, sizes, batch):
    c, n, h, w, stride = sizes
    module, x = made(c, n, 3, stride, 1, activation="silu", policy=on(isa)), image(batch, c, h, w)
    check(module(x), module, x, SUM_STEP["precise"])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_sums(isa, activation):
    module = made(96, 96, 3, padding=1, activation=activation, policy=KernelPolicy.of("on", isa=isa, precision="fast"))
    x = image(2, 96, 17, 33)
    check(module(x), module, x, SUM_STEP["fast"])


def test_auto_computes_the_same():
    module, x = made(64, 64, 3, padding=1, activation="silu", policy=KernelPolicy.of("auto")), image(2, 64, 33, 40)
    LEDGER.clear()
    check(module(x), module, x, 2 * HALF_STEP)  # torch's own operations round between them
    assert module.obstacle(x) is None and not LEDGER.refusals
    module.policy = KernelPolicy.of("off")
    torch.testing.assert_close(module(x), torchs(module)(x))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(isa, value, activation):
    """They stand where float64 has them."""
    module, x = made(32, 96, 3, padding=1, activation=activation, policy=on(isa)), image(1, 32, 12, 20)
    x[0, 5, 6, 9] = value
    got, exact = module(x), exactly(module.cpu(), x.cpu())[0].cuda()
    for seen in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(seen(got), seen(exact))


# ------------------------------------------------------------------------------------------------ where torch computes


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_trains_as_torch_does(activation, dtype):
    """Statistics of the batch, gradients, running statistics; then eval mode without them is ours."""
    with torch.device("cuda"):
        module = FusedConvNormAct2d(16, 24, 3, 2, 1, activation=activation, dtype=dtype)
    theirs, x = torchs(module), torch.randn(4, 16, 12, 12, device="cuda", dtype=dtype)
    close = {"atol": 0.01, "rtol": 0.01} if dtype is torch.float16 else {"atol": 1e-4, "rtol": 1e-3}
    for _ in range(2):
        for each in (module, theirs):
            seen = x.clone().requires_grad_()
            each.zero_grad()
            each(seen).float().square().mean().backward()
            each.gradient = seen.grad
        torch.testing.assert_close(module.gradient, theirs.gradient, **close)
        for ours, other in zip(module.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, other.grad, **close)
    for ours, other in zip(module.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(ours, other, **close)
    module.eval()
    assert "a gradient is wanted" in module.obstacle(x.half())
    with torch.inference_mode():
        reason = module.obstacle(x)
        assert reason is None if dtype is torch.float16 else "x is float32" in reason
        if dtype is torch.float16:
            check(module(x), module, x, 2 * HALF_STEP)


def test_what_is_not_served_is_torchs():
    x, auto = image(2, 16, 15, 17), KernelPolicy.of("auto")
    others = {
        "5x5 taps": made(16, 8, 5, policy=auto),
        "2 groups": made(16, 8, 3, groups=2, policy=auto),
        "a dilation": made(16, 8, 3, dilation=2, policy=auto),
    }
    for words, module in others.items():
        assert words in module.obstacle(x)
        torch.testing.assert_close(module(x), torchs(module)(x), atol=0.02, rtol=0.01)  # of taps by folded weights
        module.policy = on(None)
        with pytest.raises(KernelRefused, match=words):
            module(x)
    module = made(16, 8, 3, policy=auto)
    with torch.autocast("cuda"):
        assert "autocast is on" in module.obstacle(x)
        torch.testing.assert_close(module(x), torchs(module)(x))
    assert "x is on the CPU" in module.obstacle(x.cpu())
    assert "the weights are on cpu" in module.cpu().obstacle(x)
    with pytest.raises(RuntimeError):
        module(x)
    assert module.cuda().obstacle(x) is None


# ------------------------------------------------------------------------------------------------------------- folding

CHANGES = {
    "weight": lambda m: m.conv.weight.mul_(2),
    "statistics": lambda m: m.norm.running_var.mul_(4),
    "eps": lambda m: setattr(m.norm, "eps", 3.0),
    "a batch": lambda m: m.train()(torch.randn(4, 32, 6, 6, device="cuda").half()),
    "a state dict": lambda m: m.load_state_dict(made(32, 32, 3, padding=1, policy=on(None)).state_dict()),
    "there and back": lambda m: m.cpu().cuda().conv.weight.mul_(2),
    "through data, and told": lambda m: (m.conv.weight.data.mul_(2), m.refold()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_changed_is_folded_anew(change, mode):
    module, x = made(32, 32, 3, padding=1, policy=KernelPolicy.of("auto", conv="on")), image(2, 32, 9, 11)
    with mode():
        before = module(x)
        assert torch.equal(module(x), before)
        module.policy = KernelPolicy.of("auto")  # torch computes the batch
        CHANGES[change](module)
        module.eval().policy = on(None)
        got = module(x)
        assert not torch.equal(got, before)
        check(got, module, x, SUM_STEP["precise"])


def test_of_a_network_of_torchs(isa):
    """A network's own layers, shared: in its format torch's results and ours have the same strides."""
    with torch.device("cuda"):
        net = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU()).half().eval()
    net = net.to(memory_format=LAST).requires_grad_(False)
    net[1].running_mean.normal_(), net[1].running_var.uniform_(0.25, 2)
    module, x = FusedConvNormAct2d.of(*net, policy=on(isa)), image(1, 3, 31, 45, last=False)
    got, want = module(x), net(x)
    check(got, module, x, SUM_STEP["precise"])
    assert got.stride() == want.stride()
    net[0].weight.mul_(0.5)
    check(module(x), module, x, SUM_STEP["precise"])


def test_cuda_graph(isa):
    """A graph reads the folded weights where they are, and sees the next ones there."""
    module, x = made(32, 48, 3, padding=1, policy=on(isa)), image(2, 32, 9, 11)
    module(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x)
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, module(x))
    module.conv.weight.mul_(2)
    want = module(x)
    graph.replay()
    assert torch.equal(out, want)
    module.conv.weight.mul_(2)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        reason = module.obstacle(x + 1)
    assert reason is not None and "a CUDA graph is being recorded" in reason


def test_a_busy_stream_is_followed(isa):
    module, x = made(32, 32, 3, padding=1, policy=on(isa)), image(2, 32, 33, 40)
    want = module(x * 2)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        got = module(x * 2)
    side.synchronize()
    assert torch.equal(got, want)


def test_nothing_is_allocated_but_the_result(isa):
    module, x = made(96, 96, 3, padding=1, policy=on(isa)), image(2, 96, 64, 64)
    size = module(x).numel() * 2
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    module(x)
    poison = 2 * size if os.environ.get("FUSESTREAM_POISON") else 0  # the tests' own poison makes copies
    assert torch.cuda.max_memory_allocated() - before <= size + poison

"""FusedLinearAttention without a GPU: torch's parameters, torch's results, who computes.

Where a test says `fused`, the CPU counts as a device of ours and the ops run their references.
"""

from __future__ import annotations

import copy

import pytest
import torch
from linear_attention_oracle import exactly
from torch import nn
from torch.nn import functional

from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy, KernelRefused
from fusestream.kernels_cuda.modules import FusedLinearAttention, fallback
from fusestream.kernels_cuda.modules.linear_attention import orthogonal_features

MAPS = ["elu", "relu", "softmax", "rbf"]


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr(fallback, "DEVICES", ("cuda", "cpu"))


@pytest.fixture(autouse=True)
def _an_empty_ledger():
    LEDGER.clear()
    yield
    LEDGER.clear()


def definition(module, x, context=None):
    """By every weight, in float64."""
    wide = copy.deepcopy(module).double()
    parts = [x.double(), *[(x if context is None else context).double()] * 2]
    biases = [None] * 3 if wide.in_proj_bias is None else wide.in_proj_bias.chunk(3)
    heads = [
        functional.linear(part, weight, bias).unflatten(-1, (module.num_heads, -1))
        for part, weight, bias in zip(parts, wide.in_proj_weight.chunk(3), biases, strict=True)
    ]
    options = {"feature_map": module.feature_map, "causal": module.causal, "scale": module.scale, "eps": module.eps}
    return wide.out_proj(exactly(*heads, wide.features, **options)[0].flatten(2))


def made(feature_map="elu", dtype=torch.float32, **options):
    module = FusedLinearAttention(12, 3, feature_map=feature_map, **options)
    if module.in_proj_bias is not None:
        nn.init.normal_(module.in_proj_bias, std=0.3)
        nn.init.normal_(module.out_proj.bias, std=0.3)
    return module.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", MAPS)
def test_on_the_cpu_torch_computes(feature_map, causal):
    module = made(feature_map, causal=causal)
    x, context = torch.randn(2, 9, 12), torch.randn(2, 14, 12)
    for other in (None, context):
        torch.testing.assert_close(module(x, other).double(), definition(module, x, other), atol=1e-5, rtol=1e-4)
    assert module.obstacle(x) == "x is on the CPU"
    [told] = LEDGER.refusals
    assert (told.op, told.candidate, told.served_by) == ("FusedLinearAttention", "linear_attention", "torch")


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("feature_map", MAPS)
def test_through_the_ops(feature_map):
    module = made(feature_map, torch.float16, bias=feature_map != "relu")
    x, context = torch.randn(2, 9, 12).half(), torch.randn(2, 14, 12).half()
    for name in ("linear", "linear_attention"):
        OPS[name].forget()  # a plan that is known tells nothing
    for other in (None, context):
        got = module(x, other)
        torch.testing.assert_close(got.double(), definition(module, x, other), atol=6e-3, rtol=6e-3)
        assert module.obstacle(x, other) == "tensor is on the CPU"  # what is left is the op's
    assert {told.op for told in LEDGER.refusals} == {"linear", "linear_attention"}


@pytest.mark.parametrize("bias", [True, False])
def test_the_state_dict_is_multihead_attentions(bias):
    theirs, ours = nn.MultiheadAttention(12, 3, bias=bias), FusedLinearAttention(12, 3, bias)
    assert {name: t.shape for name, t in ours.state_dict().items()} == {
        name: t.shape for name, t in theirs.state_dict().items()
    }
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    random = FusedLinearAttention(12, 3, feature_map="rbf", num_features=40)
    assert set(random.state_dict()) - set(theirs.state_dict()) == {"features"} | (
        set() if bias else {"in_proj_bias", "out_proj.bias"}
    )
    again = FusedLinearAttention(12, 3, feature_map="rbf", num_features=40)
    again.load_state_dict(random.state_dict())
    x = torch.randn(1, 5, 12)
    assert torch.equal(again(x), random(x))


@pytest.mark.usefixtures("fused")
def test_gradients_are_torchs():
    module, x = made("softmax", torch.float16).requires_grad_(), torch.randn(1, 6, 12).half()
    assert "a gradient is wanted" in module.obstacle(x)
    module(x).float().square().sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() and grad.any() for grad in grads.values())


@pytest.mark.usefixtures("fused")
def test_who_computes():
    module, x = made(dtype=torch.float16), torch.randn(1, 6, 12).half()
    module.policy = KernelPolicy.of("off")
    assert module.obstacle(x) == "the kernels of linear_attention are off"
    module(x)
    assert not LEDGER.refusals
    module.policy = KernelPolicy.of("on")
    with pytest.raises(KernelRefused, match="on the CPU"):
        module(x)
    with pytest.raises(KernelRefused, match=r"FusedLinearAttention is forced on .* x is float32"):
        module(x.float())
    module.policy = KernelPolicy()
    module.out_proj.register_forward_hook(lambda *_: None)
    assert "out_proj has hooks" in module.obstacle(x)
    mixed = made(dtype=torch.float32)
    assert "the weights are torch.float32" in mixed.obstacle(x)


def test_compiled_it_is_torchs():
    module, x = made("relu", causal=True), torch.randn(2, 7, 12)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    assert copy.deepcopy(module)(x).equal(module(x))


def test_orthogonal_features():
    torch.manual_seed(3)
    found = orthogonal_features(40, 16)
    assert found.shape == (40, 16)
    for block in found.split(16):
        products = block @ block.t()
        assert (products - products.diag().diag()).abs().max() < 1e-4
    lengths = orthogonal_features(4000, 16).square().sum(1)
    assert abs(lengths.mean() - 16) < 0.6 and abs(lengths.std() - 32**0.5) < 0.6


def test_what_cannot_be_is_an_error():
    for words, arguments, options in (
        ("embed_dim is 10", (10, 3), {}),
        ("feature_map is 'cos'", (12, 3), {"feature_map": "cos"}),
        ("num_features is 32 with feature_map 'elu'", (12, 3), {"num_features": 32}),
        ("num_features is 0", (12, 3), {"feature_map": "rbf", "num_features": 0}),
    ):
        with pytest.raises(ValueError, match=words):
            FusedLinearAttention(*arguments, **options)
    module = FusedLinearAttention(12, 3, device="meta", dtype=torch.float16, feature_map="softmax")
    assert module.features.device.type == "meta" and module.features.shape == (256, 4)
    assert "feature_map='softmax'" in repr(module) and "policy" not in repr(module)
    with pytest.raises(ValueError, match=r"x: \[5, 12\] is not \[batch, tokens, 12\]"):
        FusedLinearAttention(12, 3)(torch.randn(5, 12))
    with pytest.raises(ValueError, match="context: "):
        FusedLinearAttention(12, 3)(torch.randn(1, 5, 12), torch.randn(1, 5, 13))

"""The hook that gives a stock model our attention: the same answer as stock's attention_pytorch, or stock itself."""

from __future__ import annotations

import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch

from fusestream.fusion.fused import attention as hook
from fusestream.kernels_cuda import LEDGER, KernelPolicy, KernelRefused


class Watched(hook.AttentionOverride):
    """The override on a machine without a GPU: what it would hand to our op goes to the op's reference."""

    def _obstacle(self, stock, call):
        return None


@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("mask", [None, "2d", "3d", "4d", "keys", "bias"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_the_answer_is_stocks(skip_reshape, skip_output_reshape, mask, grouped, scale):
    b, s, t, h, d = 2, 6, 5, 4, 8
    heads = (h, 2, 2) if grouped else (h, h, h)
    parts = [torch.randn(b, n, each, d) for n, each in zip((s, t, t), heads, strict=True)]
    q, k, v = (p.transpose(1, 2) for p in parts) if skip_reshape else (p.flatten(2) for p in parts)
    masks = {
        None: None,
        "2d": torch.rand(s, t) > 0.3,
        "3d": torch.rand(b, s, t) > 0.3,
        "4d": torch.rand(b, h, s, t) > 0.3,
        "keys": torch.rand(b, 1, t) > 0.3,
        "bias": torch.randn(b, 1, 1, t),
    }
    options = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape, "mask": masks[mask]}
    options |= ({"scale": scale} if scale else {}) | ({"enable_gqa": True} if grouped else {})
    if mask not in (None, "bias"):
        masks[mask][..., 0] = True  # no row without keys: torch's answer there depends on the backend
    want = attention_pytorch(q, k, v, h, **options)
    got = Watched(KernelPolicy())(attention_pytorch, q, k, v, h, **options)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_without_a_gpu_stock_serves_with_the_arguments_as_they_came():
    seen = []

    def attention_pytorch(*arguments, **options):
        seen.append((arguments, options))
        return arguments[0]

    q = torch.randn(1, 4, 8)
    out = hook.AttentionOverride(KernelPolicy())(
        attention_pytorch, q, q, q, 2, None, None, transformer_options={"a": 1}
    )
    assert out is q
    assert seen == [((q, q, q, 2, None, None), {"transformer_options": {"a": 1}})]


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU: for the reasons that are given there only."""

    is_cuda = True


def test_every_refusal_is_spoken():
    q = torch.zeros(1, 4, 8, dtype=torch.float16).as_subclass(OnGpu)

    def attention_sage(q, k, v, heads, **options):
        return q

    def reasons(policy, stock, q, **others):
        LEDGER.clear()
        hook.AttentionOverride(policy)(stock, q, q, q, 2, **others)
        return [refusal.reason for refusal in LEDGER.refusals]

    auto = KernelPolicy()
    assert reasons(KernelPolicy.of("off"), attention_pytorch, q) == ["attention is switched off for this model"]
    assert reasons(auto, attention_pytorch, q.bfloat16()) == ["the model computes in bfloat16, the kernels in float16"]
    # Numbers of 8 bits are made of either type: the op is asked, and has reasons of its own.
    asked = reasons(KernelPolicy.of(precision="turbo"), attention_pytorch, q.bfloat16())
    assert not any("the model computes in" in reason for reason in asked)
    assert reasons(auto, attention_sage, q) == [
        "ComfyUI was started with another attention (attention_sage), and that is kept"
    ]
    assert reasons(auto, attention_pytorch, q, dropout=1, sinks=2)[0].startswith("the model passes dropout, sinks")


def test_forced_on_it_says_why_not_instead_of_handing_over():
    q, on = torch.zeros(1, 4, 8), hook.AttentionOverride(KernelPolicy.of("on"))
    with pytest.raises(KernelRefused, match=r"cannot serve it: tensor is on the CPU\. Choose 'auto'"):
        on(attention_pytorch, q, q, q, 2)
    with pytest.raises(KernelRefused, match="the model computes in bfloat16"):
        gpu = q.bfloat16().as_subclass(OnGpu)
        on(attention_pytorch, gpu, gpu, gpu, 2)


def test_each_model_has_its_own():
    class Model:
        def __init__(self):
            self.model_options = {"transformer_options": {}}

    one, other = Model(), Model()
    hook.install(one, KernelPolicy.of("off"))
    hook.install(other, KernelPolicy.of("on"))
    first, second = (m.model_options["transformer_options"][hook.HOOK] for m in (one, other))
    assert first.policy.default == "off" and second.policy.default == "on"

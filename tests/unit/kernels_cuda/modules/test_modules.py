"""The nn.Modules over the ops, without a GPU: torch's results and torch's state dicts, who computes, and what is folded when.

Where a test says `fused`, the CPU counts as a device of ours and the op runs its reference: folding, layouts and the choice are
those of a card.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import io
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conv_norm_oracle import ACTIVATIONS, check, exactly, half_module, kept, lived_in, result, torchs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from bed.depth import examples
from fusestream.kernels_cuda import LEDGER, KernelPolicy, KernelRefused
from fusestream.kernels_cuda.modules import FusedConvNormAct2d, conv_norm_act, fallback
from fusestream.kernels_cuda.modules.derived_weights import Kept, marks_of
from fusestream.kernels_cuda.modules.folding import Own

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr(fallback, "DEVICES", ("cuda", "cpu"))


@pytest.fixture(autouse=True)
def _an_empty_ledger():
    LEDGER.clear()
    yield
    LEDGER.clear()


# ------------------------------------------------------------------------------------------------------------- results


@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(3, 9), st.integers(3, 9)),
    c=st.integers(1, 9),
    n=st.integers(1, 9),
    kind=st.sampled_from([(3, 1, 1), (3, 1, 0), (3, 2, 1), (3, 2, (2, 1)), (3, 1, "same"), (3, 1, "valid"), (1, 1, 0)]),
    bias=st.booleans(),
    norm=st.sampled_from(["batch", None]),
    activation=st.sampled_from(list(ACTIVATIONS)),
    layout=st.sampled_from(["first", "last", "channels", "columns", "expanded"]),
)
@settings(max_examples=examples(120), deadline=None)
def test_folded_results_are_torchs(sizes, c, n, kind, bias, norm, activation, layout):
    """Against float64: a rounding of the weights, one of the result."""
    b, h, w = sizes
    taps, stride, padding = kind
    options = {"bias": bias, "norm": norm, "activation": activation}
    module = half_module(c, n, taps, stride, padding, **options)
    x = torch.randn(b, c, h, w).half()
    if layout == "last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "channels":
        room = torch.full((b, c + 4, h, w), torch.nan).half().contiguous(memory_format=torch.channels_last)
        x = room[:, 4:].copy_(x)
    elif layout == "columns":
        x = torch.full((b, c, h, 2 * w), torch.nan).half()[..., ::2].copy_(x)
    elif layout == "expanded":
        x = x[:1].expand(b, -1, -1, -1)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(fallback, "DEVICES", ("cuda", "cpu"))
        got = module(x)
        assert kept(module) is not None
    check(got, module, x)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    "pad", [nn.ZeroPad2d((-1, 0, 2, -2)), nn.ReflectionPad2d((1, -1, 1, 1)), nn.ReplicationPad2d((-1, -1, 0, 0))]
)
def test_a_pad_that_cuts_the_picture_is_torchs(pad):
    conv = nn.Conv2d(8, 8, 3).half()
    module = FusedConvNormAct2d.of(conv, pad=pad).eval()
    x = torch.randn(1, 8, 9, 9).half()
    with torch.no_grad():
        assert torch.equal(module(x), conv(pad(x)))
        assert "cuts" in module.obstacle(x)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("own", [{"affine": False}, {"eps": 0.5}])
def test_norms_of_other_kinds_are_folded(own):
    made = lived_in(FusedConvNormAct2d.of(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, **own), nn.SiLU())).half()
    x = torch.randn(1, 8, 6, 6).half()
    got = result(made, x)
    assert kept(made) is not None
    torch.testing.assert_close(got.double(), exactly(made, x)[0], atol=0.02, rtol=0.01)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("statistics", [torch.float16, torch.float32])
def test_a_norm_may_stay_in_float32(statistics):
    module = half_module(8, 16, 3, padding=1)
    module.norm.to(statistics)
    x = torch.randn(2, 8, 5, 5).half()
    torch.testing.assert_close(result(module, x).double(), exactly(module, x)[0], atol=0.03, rtol=0.01)
    assert kept(module).bias.dtype is torch.float32


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values_come_through(value, activation):
    module = half_module(8, 8, 3, padding=1, activation=activation)
    x = torch.randn(1, 8, 7, 7).half()
    x[0, 3, 2, 4] = value
    got, want = result(module, x), result(torchs(module), x)
    for seen in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(seen(got), seen(want))
    module.norm.bias.data[2] = value
    module.refold()
    got, want = result(module, x), result(torchs(module), x)
    assert torch.equal(got.isnan(), want.isnan()) and not got[0, 2].isfinite().all()


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("shape", [(0, 8, 6, 6), (0, 8, 0, 6), (8, 6, 6)])
def test_what_the_op_has_no_word_for_is_torchs(shape):
    for norm in ("batch", None) if len(shape) == 4 else (None,):
        module = half_module(8, 4, 3, padding=1, norm=norm)
        x = torch.randn(shape).half()
        try:
            want = result(torchs(module), x)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
                result(module, x)
        else:
            assert torch.equal(result(module, x), want)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("shape", [(1, 5, 6, 6), (1, 8, 2, 6), (2, 2, 8, 6, 6)])
def test_impossible_images_are_torchs_errors(shape):
    module = half_module(8, 4, 3)
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        result(torchs(module), torch.randn(shape).half())
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value).splitlines()[0])):
        result(module, torch.randn(shape).half())


@pytest.mark.usefixtures("fused")
def test_results_are_channels_last():
    module = half_module(8, 16, 3, padding=1)
    first = result(module, torch.randn(2, 8, 6, 6).half())
    assert first.is_contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_trains_as_torch_does(activation, momentum):
    torch.manual_seed(2)
    module = FusedConvNormAct2d(3, 4, 3, 2, 1, activation=activation, momentum=momentum)
    theirs = torchs(module)
    steps = [torch.optim.SGD(each.parameters(), 0.1) for each in (module, theirs)]
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8)
        for each, step in zip((module, theirs), steps, strict=True):
            seen = x.clone().requires_grad_()
            step.zero_grad()
            each(seen).square().mean().backward()
            each.gradient = seen.grad
            step.step()
        assert torch.equal(module.gradient, theirs.gradient)
    theirs_now = dict(zip(module.state_dict(), theirs.state_dict().values(), strict=True))
    assert all(torch.equal(t, theirs_now[name]) for name, t in module.state_dict().items())
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(module.eval()(x), theirs.eval()(x))  # in eval mode with gradients, too


@pytest.mark.usefixtures("fused")
def test_gradients_are_torchs():
    module, x = half_module(8, 8, 3, padding=1), torch.randn(1, 8, 6, 6).half()
    assert "a gradient is wanted" in module.obstacle(x)  # of the parameters
    module(x).float().square().sum().backward()
    assert module.conv.weight.grad is not None and module.norm.weight.grad is not None
    module.requires_grad_(False)
    assert "a gradient is wanted" in module.obstacle(x.requires_grad_())
    assert module.obstacle(x.detach()) == "tensor is on the CPU"  # what is left is the op's
    with forward_ad.dual_level():
        assert "a gradient is wanted" in module.obstacle(x.detach())
        dual = forward_ad.make_dual(x.detach().float(), torch.ones(1, 8, 6, 6))
        assert forward_ad.unpack_dual(module.float()(dual)).tangent is not None


# ----------------------------------------------------------------------------------------------------- being made


def test_of_shares_what_it_is_given():
    conv, norm = nn.Conv2d(3, 5, 3, bias=False), nn.BatchNorm2d(5).eval()
    made = FusedConvNormAct2d.of(*nn.Sequential(conv, norm, nn.ReLU(inplace=True)))
    assert made.conv is conv and made.norm is norm and made.activation == "relu" and not made.training
    assert FusedConvNormAct2d.of(conv).training and FusedConvNormAct2d.of(conv).norm is None
    assert FusedConvNormAct2d.of(conv, None, "silu").activation == "silu"
    assert {id(p) for p in made.parameters()} == {id(p) for part in (conv, norm) for p in part.parameters()}


def test_what_cannot_be_is_an_error():
    conv, norm = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(4)
    with pytest.raises(ValueError, match="norm is of 4 channels, conv's result has 5"):
        FusedConvNormAct2d.of(conv, norm, "relu")
    with pytest.raises(TypeError, match="conv is a ConvTranspose2d"):
        FusedConvNormAct2d.of(nn.ConvTranspose2d(3, 5, 3), None, None)
    with pytest.raises(TypeError, match="norm is a GroupNorm"):
        FusedConvNormAct2d.of(conv, nn.GroupNorm(1, 5), None)
    with pytest.raises(TypeError, match="activation is a GELU"):
        FusedConvNormAct2d.of(conv, None, nn.GELU())
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        FusedConvNormAct2d(3, 5, 3, activation="gelu")
    with pytest.raises(ValueError, match="norm is 'group'"):
        FusedConvNormAct2d(3, 5, 3, norm="group")


def test_constructs_as_torch_does():
    module = FusedConvNormAct2d(
        4, 8, (3, 1), (2, 1), "valid", 2, 2, False, "zeros", eps=0.1, momentum=None, device="meta"
    )
    assert (module.conv.kernel_size, module.conv.stride, module.conv.padding) == ((3, 1), (2, 1), "valid")
    assert (module.conv.dilation, module.conv.groups, module.conv.bias) == ((2, 2), 2, None)
    assert (module.norm.eps, module.norm.momentum, module.norm.weight.device.type) == (0.1, None, "meta")
    assert FusedConvNormAct2d(3, 5, 3, dtype=torch.float16).norm.weight.dtype is torch.float16
    assert "activation='relu'" in repr(module) and "policy" not in repr(module)
    assert "policy" in repr(FusedConvNormAct2d(3, 5, 3, policy=KernelPolicy.of("off")))


# ------------------------------------------------------------------------------------------------------------- folding

CHANGES = {
    "weight": lambda m: m.conv.weight.mul_(2),
    "bias": lambda m: m.conv.bias.add_(1),
    "scale": lambda m: m.norm.weight.neg_(),
    "shift": lambda m: m.norm.bias.add_(1),
    "mean": lambda m: m.norm.running_mean.add_(1),
    "variance": lambda m: m.norm.running_var.mul_(4),
    "another parameter": lambda m: setattr(m.conv, "weight", nn.Parameter(m.conv.weight * 2)),
    "other data": lambda m: setattr(m.conv.weight, "data", m.conv.weight * 2),
    "eps": lambda m: setattr(m.norm, "eps", 3.0),
    "a batch": lambda m: m.train()(torch.randn(4, 8, 6, 6).half()),
    "a state dict": lambda m: m.load_state_dict(half_module(8, 8, 3, padding=1).state_dict()),
    "an assigned state dict": lambda m: m.load_state_dict(half_module(8, 8, 3, padding=1).state_dict(), assign=True),
    "another module": lambda m: setattr(m, "norm", half_module(8, 8, 3).norm),
    "another type and back": lambda m: m.float().half().conv.weight.mul_(2),
    "through data, and told": lambda m: (m.conv.weight.data.mul_(2), m.refold()),
}


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_folded_anew(change, mode):
    module, x = half_module(8, 8, 3, padding=1), torch.randn(1, 8, 6, 6).half()
    before = result(module, x)
    folded = kept(module).weight.clone()
    assert torch.equal(result(module, x), before)
    with mode():
        CHANGES[change](module)
    module.eval()
    after = result(module, x)
    assert not torch.equal(after, before), "nothing changed"
    with mode():
        fresh = copy.deepcopy(module)(x)
    assert torch.equal(after, fresh)
    assert change in ("bias", "shift", "mean") or not torch.equal(kept(module).weight, folded)


@pytest.mark.usefixtures("fused")
def test_folds_once(monkeypatch):
    folds = []
    real = conv_norm_act.fold
    monkeypatch.setattr(conv_norm_act, "fold", lambda *given: folds.append(1) or real(*given))
    module = half_module(8, 8, 3, padding=1)
    for size in (6, 7, 8):
        result(module, torch.randn(1, 8, size, 6).half())
    with torch.inference_mode():
        module(torch.randn(1, 8, 6, 6).half())
    assert len(folds) == 1
    nn.Sequential(module).load_state_dict(nn.Sequential(module).state_dict())
    result(module, torch.randn(1, 8, 6, 6).half())
    assert len(folds) == 2


@pytest.mark.usefixtures("fused")
def test_is_folded_into_the_same_memory():
    """What was recorded in a CUDA graph reads the addresses it was recorded with."""
    module, x = half_module(8, 8, 3, padding=1), torch.randn(1, 8, 6, 6).half()
    result(module, x)
    addresses = kept(module).weight.data_ptr(), kept(module).bias.data_ptr()
    for change in ("weight", "mean", "a state dict", "through data, and told"):
        with torch.no_grad():
            CHANGES[change](module)
        with torch.inference_mode():  # writes there as well
            module(x)
        assert (kept(module).weight.data_ptr(), kept(module).bias.data_ptr()) == addresses
        assert not kept(module).weight.is_inference()


@pytest.mark.usefixtures("fused")
def test_parameters_of_inference_mode():
    """They count no writes; a state dict is seen all the same."""
    with torch.inference_mode():
        module = half_module(8, 8, 3, padding=1)
        x = torch.randn(1, 8, 6, 6).half()
        before = module(x)
        assert kept(module) is not None
        other = half_module(8, 8, 3, padding=1)
        nn.ModuleDict({"it": module}).load_state_dict(nn.ModuleDict({"it": other}).state_dict())
        assert torch.equal(module(x), other(x)) and not torch.equal(module(x), before)
    assert torch.equal(result(module, x), result(other, x))


@pytest.mark.usefixtures("fused")
def test_without_a_norm_nothing_is_copied_that_lies_as_the_op_wants():
    module = half_module(8, 8, 3, padding=1, norm=None).to(memory_format=torch.channels_last)
    result(module, torch.randn(1, 8, 6, 6).half())
    assert kept(module) is Own.WEIGHTS
    held = StorageWeakRef(module.conv.weight.untyped_storage())
    module.conv.weight.data = torch.zeros(1).half()
    gc.collect()
    assert held.expired()  # who moves the weights away frees their memory
    plain, x = half_module(8, 8, 3, padding=1, norm=None), torch.randn(1, 8, 6, 6).half()
    before = result(plain, x)
    assert kept(plain).weight.data_ptr() != plain.conv.weight.data_ptr()
    with torch.no_grad():
        plain.conv.weight.mul_(2), plain.conv.bias.mul_(2)
    assert not torch.equal(result(plain, x), before)
    torch.testing.assert_close(result(plain, x).double(), exactly(plain, x)[0], atol=0.01, rtol=0.01)


@pytest.mark.usefixtures("fused")
def test_what_does_not_fit_float16_is_torchs():
    module, x = half_module(8, 8, 3, padding=1), torch.randn(1, 8, 6, 6).half()
    module.requires_grad_(False)
    module.norm.running_var[3] = 0
    module.norm.eps = 1e-14
    assert "the weights of channel 3 do not fit float16" in module.obstacle(x)
    assert torch.equal(result(module, x), result(torchs(module), x))
    module.norm.running_var[3] = 1
    assert "float16" not in module.obstacle(x)
    # A channel that is off has a tiny scale, and weights below fp16's range do no harm beside its offset.
    module.norm.weight[5] = 6e-8
    assert "float16" not in module.obstacle(x)
    torch.testing.assert_close(result(module, x).double(), exactly(module, x)[0], atol=0.02, rtol=0.01)
    # Small weights that are all there is would be lost.
    module.norm.weight[5], module.norm.bias[5], module.norm.running_mean[5], module.conv.bias[5] = 1e-5, 0, 0, 0
    assert "the weights of channel 5 do not fit float16" in module.obstacle(x)


@pytest.mark.usefixtures("fused")
def test_moves_leave_nothing_behind():
    module = half_module(8, 8, 3)
    result(module, torch.randn(1, 8, 6, 6).half())
    module.to("cpu")
    assert kept(module) is None
    wide = module.float()
    assert torch.equal(result(wide, torch.ones(1, 8, 6, 6)), result(torchs(wide), torch.ones(1, 8, 6, 6)))


@pytest.mark.usefixtures("fused")
def test_a_tensor_in_a_parameter_s_place_is_folded():
    module, x = half_module(8, 8, 3).requires_grad_(False), torch.randn(1, 8, 6, 6).half()
    for part, name in ((module.conv, "weight"), (module.norm, "running_var")):
        value = 2 * getattr(part, name).detach()
        delattr(part, name)
        setattr(part, name, value)
        for _ in range(2):
            torch.testing.assert_close(module(x), torchs(module)(x), atol=0.03, rtol=0.01)
            assert kept(module) is not None
            value.mul_(2)


def test_kept_things_are_found_while_nothing_changes():
    held: Kept[str] = Kept()
    t = torch.zeros(3)
    assert held.keep(marks_of((t, None), 1), (t, None), "made") == held.find(marks_of((t, None), 1)) == "made"
    assert held.find(marks_of((t, None), 2)) is None and held.find(marks_of((t[1:], None), 1)) is None
    held.outdate()
    assert held.find(marks_of((t, None), 1)) is None and held.latest == "made"
    held.forget()
    assert held.latest is None
    held.outdate()


def test_a_freed_address_is_not_taken_for_what_lay_there():
    held: Kept[str] = Kept()
    parameter = nn.Parameter(torch.zeros(1 << 16))
    address = parameter.data_ptr()
    held.keep(marks_of((parameter,)), (parameter,), "made")
    parameter.data = torch.empty(0)
    gc.collect()
    for _ in range(20):  # the allocator may give the address again
        parameter.data = torch.ones(1 << 16)
        assert held.find(marks_of((parameter,))) is None
        if parameter.data_ptr() == address:
            return
        parameter.data = torch.empty(0)
    pytest.skip("the allocator never gave the address again")


@pytest.mark.usefixtures("fused")
def test_copies_and_pickles_begin_anew():
    module, x = (
        half_module(8, 8, 3, padding=1, policy=KernelPolicy.of("auto", precision="fast")),
        torch.randn(1, 8, 6, 6),
    )
    before = result(module, x.half())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert kept(made) is None and made.policy == module.policy
        assert torch.equal(result(made, x.half()), before)
        with torch.no_grad():
            made.conv.weight.zero_()
        assert not torch.equal(result(made, x.half()), before)
        assert torch.equal(result(module, x.half()), before)


# ----------------------------------------------------------------------------------------------------------- obstacles


class Other(nn.Conv2d):
    """A convolution that is not torch's."""


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized(module):
    parametrize.register_parametrization(module.conv, "weight", Twice())


OBSTACLES = {
    "in training mode": lambda m: m.train(),
    "3x3 taps with stride 1x2": lambda m: setattr(m.conv, "stride", (1, 2)),
    "4x4 taps and padding 'same'": lambda m: setattr(m, "conv", nn.Conv2d(8, 8, 4, padding="same").half()),
    "a dilation of (2, 2)": lambda m: setattr(m.conv, "dilation", (2, 2)),
    "2 groups": lambda m: setattr(m, "conv", nn.Conv2d(8, 8, 3, groups=2).half()),
    "test_modules.Other, not torch's Conv2d": lambda m: setattr(m, "conv", Other(8, 8, 3).half()),
    "not torch's BatchNorm2d": lambda m: setattr(m, "norm", nn.GroupNorm(2, 8).half()),
    "ParametrizedConv2d, not torch's": parametrized,
    "conv has hooks": lambda m: m.conv.register_forward_hook(lambda *_: None),
    "norm has hooks": lambda m: m.norm.register_forward_pre_hook(lambda *_: None),
    "the forward of conv was replaced": lambda m: setattr(m.conv, "forward", m.conv.forward),
    "keeps no running statistics": lambda m: setattr(
        m, "norm", nn.BatchNorm2d(8, track_running_stats=False).eval().half()
    ),
    "the kernels of conv are off": lambda m: setattr(m, "policy", KernelPolicy.of("off")),
}


@pytest.mark.usefixtures("fused")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("words", OBSTACLES)
def test_obstacles_are_words_and_torch_computes(words):
    module, x = half_module(8, 8, 3), torch.randn(2, 8, 9, 9).half()
    OBSTACLES[words](module)
    with torch.no_grad():
        assert words in module.obstacle(x)
        theirs = copy.deepcopy(module) if "forward" not in module.conv.__dict__ else module
        assert torch.equal(module(x), theirs.norm(theirs.conv(x)).relu())
        told = [refusal.reason for refusal in LEDGER.refusals]
        assert [words in reason for reason in told] == ([] if module.policy.is_off else [True])
        if not module.policy.is_off:
            module.policy = KernelPolicy.of("auto", conv="on")
            with pytest.raises(KernelRefused, match=f"FusedConvNormAct2d is forced on .*{re.escape(words)}"):
                module(x)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("taps", "stride", "padding"), [(5, 1, 2), (3, 3, 1), (1, 2, 0), (7, 2, 3), (4, 2, 1)])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_of_other_taps_torch_computes_the_folded_product(taps, stride, padding, mode):
    module = half_module(8, 8, taps, stride, padding, padding_mode=mode).requires_grad_(False)
    x = torch.randn(2, 8, 9, 11).half()
    assert module.obstacle(x) == "tensor is on the CPU"  # what is left is the op's
    torch.testing.assert_close(module(x).double(), exactly(module, x)[0], atol=0.03, rtol=0.01)
    assert kept(module) is not None and "FusedConvNormAct2d" not in {told.op for told in LEDGER.refusals}
    module.policy = KernelPolicy.of("on")
    with pytest.raises(KernelRefused, match="conv is forced on"):
        module(x)


@pytest.mark.usefixtures("fused")
def test_obstacles_of_the_input_and_of_types():
    module, x = half_module(8, 8, 3).requires_grad_(False), torch.randn(2, 8, 9, 9).half()
    assert "x is float32, the kernels take float16" in module.obstacle(x.float())
    assert "x is on the META" in module.obstacle(x.to("meta"))
    assert "x is a Twin, not a plain tensor" in module.obstacle(x.as_subclass(type("Twin", (torch.Tensor,), {})))
    assert "conv.weight is float32" in half_module(8, 8, 3).float().requires_grad_(False).obstacle(x)
    module.norm.double()
    assert "norm.weight is float64, the kernels take float16 and float32" in module.obstacle(x)
    assert "tensor is on the CPU" in half_module(8, 8, 3).requires_grad_(False).obstacle(x)  # the op's own


@pytest.mark.usefixtures("fused")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_torchs_other_ways_to_run_a_module():
    """Compiled, traced, mapped over: torch computes, and torch's tools see torch's operations."""
    module, x = half_module(8, 8, 3, padding=1), torch.randn(2, 8, 6, 6).half()
    want = result(torchs(module), x)
    with torch.no_grad():
        assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(x), want)
        assert torch.equal(torch.jit.trace(module, x, check_trace=False)(x), want)
        assert torch.equal(fx.symbolic_trace(module)(x), want)
        mapped = torch.func.vmap(module)(x.unsqueeze(1))
        torch.testing.assert_close(mapped.squeeze(1), want, atol=2e-3, rtol=2e-3)
        swapped = {name: 2 * t for name, t in module.named_parameters()}
        once = torch.func.functional_call(module, swapped, (x,))
        assert not torch.allclose(once, want) and torch.allclose(result(module, x), want, atol=0.02, rtol=0.02)
    assert not [r for r in LEDGER.refusals if "tracing" in r.reason]


# ------------------------------------------------------------------------------------------------------------ importing


def snippets() -> list[str]:
    """What README says under Modules."""
    text = (
        (ROOT / "kernels_cuda" / "README.md").read_text(encoding="utf-8").split("\n## Modules\n")[1].split("\n## ")[0]
    )
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


COMPUTES = """
import torch
module = FusedConvNormAct2d(3, 5, 3).eval()
assert module(torch.ones(1, 3, 6, 6)).shape == (1, 5, 4, 4)
"""
NO_COMFYUI = """
import sys
found = [name for name in sys.modules if name.split(".")[0] in ("comfy", "comfy_api", "folder_paths", "execution")]
assert not found, found
"""


def run(code: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.deep
def test_a_program_imports_it_by_path(tmp_path):
    """As README says it, with no ComfyUI on the path, and the pack's folder under any name."""
    (tmp_path / "ComfyUI-FuseStream.2").symlink_to(ROOT)
    path = next(part for part in snippets() if "/path/to/" in part)
    code = path.replace("/path/to/ComfyUI-FuseStream", str(tmp_path / "ComfyUI-FuseStream.2"))
    run(code + COMPUTES + NO_COMFYUI + "assert 'fusestream.nodes' not in sys.modules", tmp_path)


def test_gpu_tests_of_modules_run_again_when_a_module_changes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "gpu"))  # run.py is a script beside its parts
    spec = importlib.util.spec_from_file_location("gpu_run", ROOT / "tests" / "gpu" / "run.py")
    gpu_run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_run)
    for name in ("kernels_cuda/modules/a.py", "tests/gpu/test_modules.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(gpu_run, "ROOT", tmp_path)
    before = gpu_run.sources_of("tests/gpu/test_modules.py")
    (tmp_path / "kernels_cuda/modules/a.py").write_text("two")
    assert gpu_run.sources_of("tests/gpu/test_modules.py") != before

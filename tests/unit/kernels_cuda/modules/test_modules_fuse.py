"""fuse and unfuse on networks of every make: what is replaced and what not and why, the same results, the network as it was.

The CPU counts as a device of ours, and the ops run their references.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from bed.depth import examples
from fusestream.kernels_cuda import LEDGER, KernelPolicy
from fusestream.kernels_cuda.modules import (
    FusedMultiheadAttention,
    fallback,
    fuse,
    unfuse,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _fused(monkeypatch):
    monkeypatch.setattr(fallback, "DEVICES", ("cuda", "cpu"))
    torch.manual_seed(1)
    LEDGER.clear()
    yield
    LEDGER.clear()


class Residual(nn.Module):
    """One ReLU called twice, as torchvision's blocks have it."""

    def __init__(self, c):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c, 3, 1, 1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, 1, 1), nn.InstanceNorm2d(c, affine=True)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + x)


class Tapped(nn.Module):
    """What comes out of the convolution is used twice."""

    def __init__(self, c):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(c, c, 3, 1, 1), nn.BatchNorm2d(c), nn.ReLU()

    def forward(self, x):
        value = self.conv(x)
        return self.act(self.bn(value)) + value


class Asking(nn.Module):
    """What it does depends on numbers: torch.fx cannot follow."""

    def __init__(self, c):
        super().__init__()
        self.conv, self.bn, self.norm = nn.Conv2d(c, c, 1), nn.BatchNorm2d(c), nn.GroupNorm(2, c)

    def forward(self, x):
        return self.norm(self.bn(self.conv(x))) if x.float().mean() > -100 else x


class Net(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.head = nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(3, c, 3),
            nn.InstanceNorm2d(c),
            nn.ReLU(),
            nn.Conv2d(c, c, 3, 2, 1),
            nn.SiLU(),
        )
        self.body = nn.Sequential(Residual(c), Tapped(c), Asking(c))
        self.tail = nn.Sequential(
            nn.Upsample(scale_factor=2), nn.Conv2d(c, c, 3, 1, 1), nn.ReLU(), nn.GroupNorm(2, c), nn.SiLU(),
            nn.Upsample(scale_factor=2), nn.ReflectionPad2d(1), nn.Conv2d(c, c, 3), nn.SiLU(),
        )  # fmt: skip
        self.end = nn.Conv2d(c, 4, 5, padding=2, groups=2)

    def forward(self, x):
        return self.end(self.tail(self.body(self.head(x))))


WHAT = {
    "head.0": (("ReflectionPad2d", "Conv2d", "InstanceNorm2d", "ReLU"), "FusedConvNormAct2d"),
    "head.4": (("Conv2d", "SiLU"), "FusedConvNormAct2d"),
    "body.0.conv1": (("Conv2d", "BatchNorm2d"), "FusedConvNormAct2d"),
    "body.0.conv2": (("Conv2d", "InstanceNorm2d"), "FusedConvNormAct2d"),
    "body.1.conv": (("Conv2d",), "FusedConvNormAct2d"),
    "body.2.conv": (("Conv2d",), "FusedConvNormAct2d"),
    "body.2.norm": (("GroupNorm",), "FusedGroupNormSiLU"),
    "tail.0": (("Upsample", "Conv2d", "ReLU"), "FusedUpsampleConv2d"),
    "tail.3": (("GroupNorm", "SiLU"), "FusedGroupNormSiLU"),
    "tail.5": (("Upsample", "ReflectionPad2d", "Conv2d", "SiLU"), "FusedUpsampleConv2d"),
}


def net():
    made = Net().eval().requires_grad_(False)
    for part in made.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(), part.running_var.uniform_(0.5, 2)
    return made.half()


def picture(c=3):
    return torch.randn(2, c, 8, 10).half()


def near(got, want):
    torch.testing.assert_close(got.float(), want.float(), atol=0.02, rtol=0.02)


def test_a_network_is_fused_in_place_and_put_back():
    module, x = net(), picture()
    parts, keys, want = list(module.modules()), list(module.state_dict()), module(x)
    table = fuse(module)
    assert {line.name: (line.of, line.by) for line in table.replaced} == WHAT
    assert [line.name for line in table.lines] == sorted(
        (line.name for line in table.lines), key=[*names(module)].index
    )
    left = {line.name: line.reason for line in table.left}
    assert set(left) == {"body.1.bn", "body.2.bn", "end"}
    assert "2 groups" in left["end"] and "only before it" in left["body.1.bn"]
    assert "head.0: ReflectionPad2d, Conv2d, InstanceNorm2d, ReLU -> FusedConvNormAct2d" in str(table)
    assert "left: 1 x Conv2d: 2 groups" in str(table)
    near(module(x), want)
    assert {"conv", "instance_norm", "group_norm_silu", "upsample_conv2d"} <= {told.op for told in LEDGER.refusals}
    assert not [told for told in LEDGER.refusals if told.op.startswith("Fused")]
    assert list(module.state_dict()) == keys
    assert not fuse(module).replaced  # it is done already
    assert unfuse(module) == 2 + 2 + 2 + 1 + 2  # two Sequentials, four places of chains, one and two by themselves
    assert list(module.modules()) == parts and torch.equal(module(x), want)
    assert unfuse(module) == 0


def names(module):
    return dict(module.named_modules(remove_duplicate=False))


def test_what_a_network_does_with_itself_goes_on():
    """Copies, pickles, other types, state dicts, training: of a fused network as of the one it was."""
    module, x = net(), picture()
    want = module(x)
    fuse(module)
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        near(made(x), want)
        made.load_state_dict({name: torch.zeros_like(t) for name, t in made.state_dict().items()})
        assert not made(x).any()
        assert unfuse(made) and not made(x).any()
    near(module(x), want)
    near(module.float()(x.float()), want)
    near(module.half()(x), want)
    assert module.body[0].conv1.out_channels == 8  # a network reads its layers
    assert module.train().body[0].bn1._original.training
    assert unfuse(module.eval()) and torch.equal(module(x), want)


def test_training_after_fusing_is_torchs():
    torch.manual_seed(0)
    module = nn.Sequential(Residual(4), Residual(4))
    theirs = copy.deepcopy(module)
    assert fuse(module.eval()).replaced
    module.train(), theirs.train()
    for each in (module, theirs):
        step = torch.optim.SGD(each.parameters(), 0.1)
        generator = torch.Generator().manual_seed(2)
        for _ in range(2):
            step.zero_grad()
            each(torch.randn(2, 4, 6, 6, generator=generator)).square().mean().backward()
            step.step()
    mine = module.state_dict()
    assert list(mine) == list(theirs.state_dict())
    for name, t in theirs.state_dict().items():
        torch.testing.assert_close(mine[name], t)


def test_parts_of_a_sequential_are_plain_for_who_takes_them():
    """Networks that look at layers on the way go through a Sequential by themselves."""

    class Looking(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()
            )

        def forward(self, x):
            seen = []
            for layer in self.features:
                x = layer(x)
                seen.append(x)
            return torch.cat([t.flatten() for t in seen])

    module, x = Looking().eval().requires_grad_(False).half(), picture()
    want, cut = module(x), module.features[:2](x)
    assert len(fuse(module).replaced) == 2
    assert torch.equal(module(x), want) and torch.equal(module.features[:2](x), cut)
    near(module.features(x), module.features[:](x))


def test_what_was_made_of_weights_goes_with_them():
    """A module that computes here is no child: `.to()` and `load_state_dict` reach it all the same."""
    module, x = net(), picture()
    fuse(module)
    module(x)
    kept = [step.fused._kept for step in module.head._steps + module.tail._steps if hasattr(step.fused, "_kept")]
    kept += [part._fused._kept for part in (module.body[0].conv1, module.body[1].conv)]
    assert len(kept) == 6 and all(one.latest is not None for one in kept)
    module.float()
    assert all(one.latest is None for one in kept)
    module.half()(x)
    state = {name: 2 * t if t.is_floating_point() else t for name, t in module.state_dict().items()}
    with torch.inference_mode():
        module.load_state_dict(state)
        again = net()
        again.load_state_dict(state)
        near(module(x), again(x))


def test_what_a_forward_notes_while_it_is_traced_is_not_kept():
    class Noting(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act, self.last, self.calls = nn.Conv2d(8, 8, 1), nn.ReLU(), None, 0

        def forward(self, x):
            self.calls += 1
            self.last = self.act(self.conv(x))
            self.new = 1
            return self.last

    module = Noting().eval().half().requires_grad_(False)
    assert fuse(module).replaced and module.last is None and module.calls == 0 and not hasattr(module, "new")
    module(picture(8))
    assert module.calls == 1


def changed(parts):
    return nn.Sequential(nn.Sequential(*parts)).eval().requires_grad_(False).half()


def hooked(net):
    net[0][0].register_forward_hook(lambda *_: None)


def tied(net):
    net.append(net[0][0])


def old_weight_norm(net):
    net[0][0].weight.requires_grad_()
    weight_norm(net[0][0])


LEFT_ALONE = {
    "hooks": (hooked, "it has hooks"),
    "old weight norm": (old_weight_norm, "it has hooks"),
    "weight norm": (lambda net: parametrizations.weight_norm(net[0][0]), "its weights are parametrised"),
    "replaced forward": (lambda net: setattr(net[0][0], "forward", net[0][0].forward), "its forward was replaced"),
    "several places": (tied, "it stands in several places of the network"),
    "training": (lambda net: net[0][0].train(), "it is in training mode: call eval() before"),
    "another class": (
        lambda net: setattr(net[0][0], "__class__", type("Mine", (nn.Conv2d,), {})),
        "not torch's Conv2d",
    ),
    "geometry": (lambda net: setattr(net[0][0], "dilation", (2, 2)), "a dilation of (2, 2)"),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_left_alone_and_why(case):
    change, words = LEFT_ALONE[case]
    module, x = changed([nn.Conv2d(8, 8, 3, padding=2), nn.BatchNorm2d(8), nn.ReLU()]), picture(8)
    change(module)
    want = module(x)
    table = fuse(module)
    assert not table.replaced
    reasons = {line.name: line.reason for line in table.left}
    assert words in reasons["0.0"] and "no convolution of ours" in reasons["0.1"]
    assert torch.equal(module(x), want)


def test_a_hook_that_comes_later_is_called():
    module, x, seen = changed([nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]), picture(8), []
    want = module(x)
    fuse(module)
    for place in (0, 1, 2):
        module[0][place].register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(module(x), want) and len(seen) == 3


def test_a_hook_on_a_place_of_a_chain_sees_what_torch_would_show_it():
    module, x, seen = nn.ModuleList([Residual(8)]).eval().requires_grad_(False).half(), picture(8), []
    block = module[0]
    want, before = block(x), [block.conv1(x), block.bn1(block.conv1(x)).relu()]  # which is in place
    fuse(module)
    block.conv1.register_forward_hook(lambda _, given, made: seen.append(made))
    block.bn1.register_forward_hook(lambda _, given, made: seen.append(made))
    near(block(x), want)
    assert all(torch.equal(one, two) for one, two in zip(seen, before, strict=True))


def test_a_dropout_that_comes_alive_works():
    module = changed([nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8)])
    x = torch.randn(4, 8).half()
    want = module(x)
    assert [line.of for line in fuse(module).replaced] == [("Linear", "GELU", "Dropout", "Linear")]
    near(module(x), want)
    module[0][2].train()
    assert not torch.allclose(module(x), module(x))


def test_transformers():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.cross = nn.MultiheadAttention(16, 2, add_bias_kv=True, batch_first=True)
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
            self.out = nn.Linear(16, 4)

        def forward(self, x):
            x = x + self.attention(x, x, x, need_weights=False)[0]
            x = x + self.cross(x, x, x, need_weights=False)[0]
            return self.out(self.encoder(x + self.mlp(x)))

    module = Block().eval().requires_grad_(False).half()
    x = torch.randn(2, 5, 16).half()
    want = module(x)
    table = fuse(module, KernelPolicy.of("auto", precision="fast"))
    assert {line.name: line.by for line in table.replaced} == {
        "attention": "FusedMultiheadAttention",
        "mlp.0": "FusedFeedForward",
        "encoder.layers.0": "FusedTransformerEncoderLayer",
        "encoder.layers.1": "FusedTransformerEncoderLayer",
    }
    assert {line.name: line.reason for line in table.left} == {
        "cross": "add_bias_kv and add_zero_attn append a key",
        "out": "a product alone is torch's: no second one is proven to stand behind it and an activation",
    }
    near(module(x), want)
    assert type(module.attention) is FusedMultiheadAttention and module.attention.policy.precision == "fast"
    assert unfuse(module) == 4 and type(module.attention) is nn.MultiheadAttention
    assert torch.equal(module(x), want)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_and_compiled_it_is_torchs():
    module, x = net(), picture()
    module.body = module.body[:2]  # of which torch can trace all
    want = module(x)
    fuse(module)
    assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(x), want)
    assert torch.equal(torch.jit.trace(module, x, check_trace=False)(x), want)


LAYERS = {
    "conv": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "narrow": lambda: nn.Conv2d(8, 8, 1, bias=False),
    "wide": lambda: nn.Conv2d(8, 8, 5, padding=2, padding_mode="reflect"),
    "groups": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=2),
    "padded": lambda: nn.Sequential(nn.ReplicationPad2d(1), nn.Conv2d(8, 8, 3)),
    "reflected": lambda: nn.Sequential(nn.ReflectionPad2d((1, 1, 1, 1)), nn.Conv2d(8, 8, 3)),
    "pad": lambda: nn.ZeroPad2d((0, 1, 1, 0)),
    "up": lambda: nn.Upsample(scale_factor=2),
    "pool": lambda: nn.AvgPool2d(3, 1, 1),
    "batch": lambda: nn.BatchNorm2d(8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "group": lambda: nn.GroupNorm(2, 8),
    "relu": lambda: nn.ReLU(inplace=True),
    "silu": nn.SiLU,
    "dropout": nn.Dropout,
    "residual": lambda: Residual(8),
    "tapped": lambda: Tapped(8),
    "asking": lambda: Asking(8),
}


@given(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=9), st.integers(0, 3), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_any_network_computes_what_it_did(names, nested, last):
    """Whatever stands behind whatever, in one Sequential or in one within another."""
    assume(names.count("up") < 3)
    torch.manual_seed(len(names))
    parts = [LAYERS[name]() for name in names]
    inner = nn.Sequential(*parts[:nested], nn.Sequential(*parts[nested:])) if nested else nn.Sequential(*parts)
    module = nn.ModuleDict({"net": inner}).eval().requires_grad_(False).half()
    x = picture(8).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fallback, "DEVICES", ("cuda", "cpu"))
        want, keys = module["net"](x.clone()), list(module.state_dict())
        table = fuse(module)
        got = module["net"](x.clone())
        scale = want.float().abs().amax() + 1
        torch.testing.assert_close(got.float() / scale, want.float() / scale, atol=0.02, rtol=0.02)
        assert list(module.state_dict()) == keys and not fuse(module).replaced
        assert (unfuse(module) > 0) == bool(table.replaced)
        assert torch.equal(module["net"](x.clone()), want)


def test_a_network_without_anything_for_us():
    table = fuse(nn.Sequential(nn.Tanh(), nn.Conv1d(3, 3, 3)))
    assert not table.lines and str(table) == "nothing here is of a kind that FuseStream has"

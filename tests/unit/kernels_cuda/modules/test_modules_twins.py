"""Each module beside torch's own layers, without a GPU: results, state dicts, who computes.

Where a test says `fused`, the CPU counts as a device of ours and the ops run their references.
"""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from module_twins import CONVOLUTIONS, NORMS, TWINS, attending, hidden
from torch import nn

from fusestream.kernels_cuda import LEDGER, KernelPolicy, KernelRefused, modules
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
    fallback,
)

pytestmark = pytest.mark.usefixtures("one_thread")
LAST = torch.channels_last
of_all = pytest.mark.parametrize("name", TWINS)
OFF_CARD = "tensor is on the CPU"  # what an op says, when the module has nothing against a call


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setattr(fallback, "DEVICES", ("cuda", "cpu"))


@pytest.fixture(autouse=True)
def _seeded_and_an_empty_ledger():
    torch.manual_seed(4)
    LEDGER.clear()
    yield
    LEDGER.clear()


def asked(module, *inputs):
    """The obstacle of a plain call."""
    if isinstance(module, FusedAttention):
        return module.obstacle(*inputs, need_weights=False)
    return module.obstacle(*inputs)


@of_all
def test_on_the_cpu_torch_computes(name):
    twins = TWINS[name]
    (ours, theirs), inputs = twins.pair(), twins.inputs()
    torch.testing.assert_close(twins.call(ours, *inputs), twins.want(theirs, *inputs), atol=1e-6, rtol=1e-5)
    assert "x is on the CPU" in asked(ours, *inputs)
    assert {told.reason for told in LEDGER.refusals} == {"x is on the CPU"}


@of_all
@pytest.mark.usefixtures("fused")
def test_through_the_ops_it_is_torchs_result(name):
    """Against float64: the roundings of halves, of which there are a few one behind the other."""
    twins = TWINS[name]
    (ours, theirs), inputs = twins.pair(), twins.inputs()
    halves = [t.half() for t in inputs]
    ours.half()
    theirs.load_state_dict(ours.state_dict())  # rounded
    want = twins.want(theirs.double(), *(t.double() for t in halves))
    images = [
        t.contiguous(memory_format=LAST) if t.ndim == 4 and name in (*NORMS, *CONVOLUTIONS) else t for t in halves
    ]
    for given in (halves, images):
        got = twins.call(ours, *given)
        assert got.dtype is torch.float16 and got.shape == want.shape
        torch.testing.assert_close(got.double(), want, atol=0.012, rtol=0.012)
    handed_back = [told.reason for told in LEDGER.refusals if told.op.startswith("Fused")]
    found = asked(ours, *halves)
    assert found == OFF_CARD and not handed_back


@of_all
def test_state_dicts_are_torchs(name):
    ours, theirs = TWINS[name].ours(), TWINS[name].theirs()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    again = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    assert all(torch.equal(t, theirs.state_dict()[key]) for key, t in again.state_dict().items())
    assert again.policy == ours.policy and "policy" not in repr(ours)
    ours.policy = KernelPolicy.of("off")
    assert "policy=KernelPolicy(default='off'" in repr(ours)


EACH = {
    type(twins.ours()).__name__: name
    for name, twins in TWINS.items()
    if name not in ("instance, 9x9", "geglu, bias", "circular, batch norm")
}


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("kind", EACH)
def test_who_computes(kind):
    twins = TWINS[EACH[kind]]
    (ours, theirs), halves = twins.pair(), [t.half() for t in twins.inputs()]
    ours.half(), theirs.half()
    want = twins.want(theirs, *halves)
    if any(True for _ in ours.parameters()):
        ours.requires_grad_()
        assert "a gradient is wanted" in asked(ours, *halves)
        ours.requires_grad_(False)
    assert "x is float32" in asked(ours, *(t.float() for t in halves))
    ours.policy = KernelPolicy.of("off")
    LEDGER.clear()
    assert re.search(r"the kernels of \w+ are off", asked(ours, *halves))
    torch.testing.assert_close(twins.call(ours, *halves), want, atol=4e-3, rtol=4e-3)
    assert not LEDGER.refusals
    ours.policy = KernelPolicy.of("on")
    with pytest.raises(KernelRefused, match="on the CPU"):  # an op: there is no card
        twins.call(ours, *halves)
    with pytest.raises(KernelRefused, match=rf"{kind} is forced on .* x is float32"):
        twins.call(ours.float(), *(t.float() for t in halves))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", ["instance norm, affine, relu", "upsampled", "ffn", "alone", "encoder layer"])
def test_gradients_are_torchs(name):
    twins = TWINS[name]
    ours, theirs = twins.pair()
    inputs = twins.inputs()
    for module, run in ((ours, twins.call), (theirs, twins.want)):
        run(module.requires_grad_(), *inputs).square().sum().backward()
    wanted = dict(theirs.named_parameters())
    for key, t in ours.named_parameters():
        torch.testing.assert_close(t.grad, wanted[key].grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["group norm, silu", "upsampled, reflect, relu", "swiglu", "mask", "encoder layer"])
def test_compiled_it_is_torchs(name):
    twins = TWINS[name]
    (ours, theirs), inputs = twins.pair(), twins.inputs()

    def run(*given):
        return twins.call(ours, *given)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*inputs), twins.want(theirs, *inputs), atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------- each its own words


def test_of_shares_what_it_is_given():
    attention = nn.MultiheadAttention(16, 2)
    encoder = nn.TransformerEncoderLayer(16, 2, 32)
    pairs = [
        (FusedInstanceNorm2d.of(norm := nn.InstanceNorm2d(8, affine=True), "relu"), norm),
        (FusedGroupNormSiLU.of(groups := nn.GroupNorm(2, 8)), groups),
        (FusedOutputProjection.of(linear := nn.Linear(8, 8)), linear),
        (FusedMultiheadAttention.of(attention), attention),
        (FusedTransformerEncoderLayer.of(encoder), encoder),
    ]
    for ours, theirs in pairs:
        assert [id(t) for t in ours.parameters()] == [id(t) for t in theirs.parameters()]
        theirs.half()
        assert all(t.dtype is torch.float16 for t in ours.parameters())
        assert type(ours).of(ours).policy == ours.policy
        with pytest.raises(TypeError, match="not a Tanh"):
            type(ours).of(nn.Tanh())
    first, second = nn.Linear(8, 16), nn.Linear(16, 8)
    made = FusedFeedForward.of(*nn.Sequential(first, nn.GELU("tanh"), second), residual=True)
    assert made.fc1 is first and made.fc2 is second and made.activation == "gelu_tanh"
    conv = nn.Conv2d(3, 4, 3, padding=1)
    up = FusedUpsampleConv2d.of(*nn.Sequential(nn.Upsample(scale_factor=2), conv, nn.SiLU()))
    assert up.conv is conv and up.activation == "silu" and up.scale_factor == 2
    instance = nn.InstanceNorm2d(4, affine=True)
    assert FusedConvNormAct2d.of(conv, instance, nn.ReLU()).norm.weight is instance.weight


WRONG = {
    "two names of one number": lambda: FusedInstanceNorm2d(3, num_channels=3),
    "activation is 'silu', expected 'relu' or None": lambda: FusedInstanceNorm2d(3, activation="silu"),
    "norm is 'layer', expected 'batch', 'instance' or None": lambda: FusedConvNormAct2d(3, 3, 3, norm="layer"),
    "activation is 'tanh', expected one of": lambda: FusedFeedForward(8, activation="tanh"),
    "first gives 16 elements, second with relu takes 8": lambda: FusedFeedForward.of(
        nn.Linear(8, 16), "relu", nn.Linear(8, 8)
    ),
    "8 elements cannot be added to 4": lambda: FusedFeedForward.of(
        nn.Linear(8, 16), "relu", nn.Linear(16, 4), residual=True
    ),
    "activation is 'gelu', expected 'relu', 'silu' or None": lambda: FusedUpsampleConv2d(3, 3, activation="gelu"),
    "scale_factor is 0": lambda: FusedUpsampleConv2d(3, 3, scale_factor=0),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_is_an_error(words):
    with pytest.raises(ValueError, match=re.escape(words)):
        WRONG[words]()


def test_other_modules_are_refused_by_name():
    linear, conv = nn.Linear(8, 8), nn.Conv2d(3, 3, 3)
    for make, words in (
        (lambda: FusedFeedForward.of(linear, nn.Tanh(), linear), "activation is a Tanh"),
        (lambda: FusedFeedForward.of(conv, "relu", linear), "first is a Conv2d"),
        (lambda: FusedUpsampleConv2d.of(nn.Upsample(scale_factor=2, mode="bilinear"), conv), "expected a nearest"),
        (lambda: FusedUpsampleConv2d.of(nn.Upsample(scale_factor=1.5), conv), "whole number"),
        (lambda: FusedUpsampleConv2d.of(nn.Upsample(scale_factor=2), linear), "conv is a Linear"),
        (lambda: FusedUpsampleConv2d.of(nn.Upsample(scale_factor=2), conv, nn.Tanh()), "activation is a Tanh"),
        (lambda: FusedConvNormAct2d.of(conv, nn.GroupNorm(1, 3)), "norm is a GroupNorm"),
    ):
        with pytest.raises(TypeError, match=words):
            make()


# A call that only torch can serve, by the words for it: the module in halves, its inputs and options.
def half(made):
    return made.half().eval().requires_grad_(False)


def image(*shape):
    return torch.randn(shape).half()


ATTENTION = {"embed_dim": 16, "num_heads": 2}
HANDED_BACK = {
    "running statistics are kept": (lambda: FusedInstanceNorm2d(4, track_running_stats=True), (image(1, 4, 3, 3),), {}),
    "is not [batch, 4, height, width]": (lambda: FusedInstanceNorm2d(4), (image(4, 3, 3),), {}),
    "x [0, 4] is not [batch, 4, ...]": (lambda: FusedGroupNormSiLU(2, 4), (image(0, 4),), {}),
    "the residual [1, 8] is not of": (lambda: FusedOutputProjection(8), (image(3, 8), image(1, 8)), {}),
    "x [8] is not [.., 8]": (lambda: FusedFeedForward(8), (image(8),), {}),
    "scale_factor is 3": (lambda: FusedUpsampleConv2d(4, 4, scale_factor=3), (image(1, 4, 3, 3),), {}),
    "the kernels are 3x3": (lambda: FusedUpsampleConv2d(4, 4, 5), (image(1, 4, 3, 3),), {}),
    "a border of (0, 0), zeros": (lambda: FusedUpsampleConv2d(4, 4, padding=0), (image(1, 4, 3, 3),), {}),
    "x [4, 3, 3] is not [batch, 4, height, width]": (lambda: FusedUpsampleConv2d(4, 4), (image(4, 3, 3),), {}),
    "the attention weights are asked for": (lambda: FusedMultiheadAttention(**ATTENTION), (image(5, 1, 16),) * 3, {}),
    "append a key": (
        lambda: FusedMultiheadAttention(**ATTENTION, add_zero_attn=True),
        (image(5, 1, 16),) * 3,
        {"need_weights": False},
    ),
    "src [5, 16] is not of three dimensions": (lambda: FusedTransformerEncoderLayer(16, 2, 8), (image(5, 16),), {}),
    "the kernels have relu, gelu and silu": (
        lambda: FusedTransformerEncoderLayer(16, 2, 8, activation=torch.tanh),
        (image(5, 1, 16),),
        {},
    ),
}


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("words", HANDED_BACK)
def test_what_the_ops_have_no_word_for_is_torchs(words):
    make, inputs, options = HANDED_BACK[words]
    ours = half(make())
    got = ours(*inputs, **options)
    assert [words in told.reason for told in LEDGER.refusals] == [True]
    asked_for = {"need_weights": True} if "asked for" in words else options
    assert words in ours.obstacle(*inputs, **asked_for)
    ours.policy = KernelPolicy.of("off")
    for mine, theirs in zip(got if isinstance(got, tuple) else (got,), _tuple(ours(*inputs, **options)), strict=True):
        torch.testing.assert_close(mine, theirs)


def _tuple(made):
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.usefixtures("fused")
def test_a_border_larger_than_the_picture_is_torchs_error():
    module, x = half(FusedConvNormAct2d(4, 4, 3, padding=1, padding_mode="reflect", norm=None)), image(1, 4, 1, 5)
    assert "too small for a border" in module.obstacle(x)
    with pytest.raises(RuntimeError, match="Padding size should be less"):
        module(x)


@pytest.mark.usefixtures("fused")
def test_attention_in_training_mode():
    x = image(2, 5, 16)
    attention = half(FusedAttention(16, 2, dropout=0.5)).train()
    assert attention.obstacle(x) == "dropout is at work"
    attention.dropout = 0.0
    assert attention.obstacle(x) == OFF_CARD
    layer = half(FusedTransformerEncoderLayer(16, 2, 32)).train()
    assert layer.obstacle(x) == "the layer is in training mode"


@pytest.mark.usefixtures("fused")
def test_masks_of_other_shapes_and_types_are_torchs():
    attention, x = half(FusedMultiheadAttention(16, 2)), image(5, 1, 16)
    assert "attn_mask [4, 5]" in attention.obstacle(x, attn_mask=hidden(4, 5))
    assert "key_padding_mask is torch.float32" in attention.obstacle(x, key_padding_mask=torch.zeros(1, 5))
    assert "is_causal is a hint" in attention.obstacle(x, is_causal=True)
    assert "do not go together" in attention.obstacle(x, image(5, 2, 16))
    with pytest.raises(RuntimeError, match="shape of the 2D attn_mask"):
        attending(attention, x, attn_mask=hidden(4, 5))


@pytest.mark.usefixtures("fused")
def test_a_query_that_sees_nothing_is_the_bias():
    attention, x = half(FusedMultiheadAttention(16, 2)), image(5, 1, 16)
    nothing = torch.zeros(5, 5).bool()
    nothing[2] = True
    nn.init.normal_(attention.out_proj.bias)
    assert torch.equal(attending(attention, x, attn_mask=nothing)[2, 0], attention.out_proj.bias)


@pytest.mark.usefixtures("fused")
def test_in_torchs_own_encoder():
    """Ours in every place of nn.TransformerEncoder, which looks into its layers."""
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    ours = nn.TransformerEncoder(FusedTransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 16)
    with torch.no_grad():
        want = theirs(x)
        torch.testing.assert_close(ours(x), want)
        torch.testing.assert_close(ours.half()(x.half()).float(), want, atol=0.01, rtol=0.01)
    assert {told.op for told in LEDGER.refusals} >= {"attention", "linear", "norm_modulate"}


@pytest.mark.usefixtures("fused")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_torchs():
    """nn.TransformerEncoder makes them of what is padded."""
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    ours = nn.TransformerEncoder(FusedTransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    ours.load_state_dict(theirs.state_dict())
    x, padding = torch.randn(2, 6, 16), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    with torch.no_grad():
        want = theirs(x, src_key_padding_mask=padding)
        torch.testing.assert_close(ours(x, src_key_padding_mask=padding), want, atol=1e-5, rtol=1e-5)
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)]).half()
    assert FusedOutputProjection(16).half().obstacle(nested) == "x is nested, or sparse"
    assert ours.layers[0].half().obstacle(nested) == "x is nested, or sparse"


@pytest.mark.usefixtures("fused")
def test_upsampling_folds_again_when_the_weight_has_changed():
    module, x = half(FusedUpsampleConv2d(8, 8)), image(1, 8, 3, 3)
    before = module(x)
    kept = module._kept.latest
    assert torch.equal(module(x), before) and module._kept.latest is kept
    with torch.no_grad():
        module.conv.weight.zero_()
    assert not torch.equal(module(x), before) and module._kept.latest is not kept


def test_the_names_are_those_of_the_documentation():
    named = {name for name in modules.__all__ if name.startswith("Fused")}
    assert named == {type(twins.ours()).__name__ for twins in TWINS.values()} | {"FusedLinearAttention"}


def test_attention_asks_all_its_products_by_its_policy(fused, monkeypatch):
    """The one behind it too."""
    from fusestream.kernels_cuda.modules import attending, multihead_attention

    asked_with = []
    for module in (attending, multihead_attention):
        true = module.linear
        monkeypatch.setattr(
            module, "linear", lambda *a, true=true, **o: asked_with.append(o.get("policy")) or true(*a, **o)
        )
    policy = KernelPolicy(precision="fast")
    made = half(FusedAttention(16, 2, policy=policy)).eval()
    with torch.no_grad():
        made(torch.randn(1, 4, 16).half())
    assert asked_with == [policy] * 2  # one for queries, keys and values


def test_an_instance_norm_takes_the_mean_of_all_batches():
    """`momentum=None`, as torch's does."""
    ours, theirs = (
        kind(3, momentum=None, track_running_stats=True) for kind in (FusedInstanceNorm2d, nn.InstanceNorm2d)
    )
    for x in torch.randn(3, 2, 3, 8, 8):
        assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.running_mean, theirs.running_mean) and ours.momentum is None

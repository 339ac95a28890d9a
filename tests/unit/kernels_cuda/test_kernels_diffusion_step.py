"""diffusion_step without a GPU: the reference against the samplers' formulas in float64, shapes, compile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import OPS, KernelPolicy, KernelRefused, diffusion_step

OFF = KernelPolicy.of("off")
METHODS = [(method, p) for method in ("euler", "ddim") for p in ("velocity", "eps", "denoised")]


def by_hand(x, cond, uncond, now, then, cfg, prediction, method):
    """Through the denoised latent, as k-diffusion does it; DDIM through x0 and eps."""
    x, cond = x.double(), cond.double()
    if method == "euler":
        to_denoised = (lambda m: m) if prediction == "denoised" else (lambda m: x - now * m)
        denoised = to_denoised(cond)
        if uncond is not None:
            other = to_denoised(uncond.double())
            denoised = other + (denoised - other) * cfg
        return x + (x - denoised) / now * (then - now)
    m = cond if uncond is None else uncond.double() + cfg * (cond - uncond.double())
    a, s = now**0.5, (1 - now) ** 0.5
    x0 = {"velocity": a * x - s * m, "eps": (x - s * m) / a, "denoised": m}[prediction]
    eps = (x - a * x0) / s
    return then**0.5 * x0 + (1 - then) ** 0.5 * eps


@settings(max_examples=examples(80), deadline=None)
@given(
    b=st.integers(1, 3),
    c=st.integers(1, 4),
    n=st.integers(1, 17),
    way=st.sampled_from(METHODS),
    types=st.sampled_from(["ff", "fh", "hh", "hf"]),
    guided=st.booleans(),
    cfg=st.floats(0.5, 8),
    seed=st.integers(0, 2**31),
    blended=st.sampled_from(["no", "scalar", "mask", "channels"]),
    clamp=st.booleans(),
)
def test_reference_is_the_definition(b, c, n, way, types, guided, cfg, seed, blended, clamp):
    torch.manual_seed(seed)
    (method, prediction), (x_type, m_type) = way, ({"h": torch.float16, "f": torch.float32}[t] for t in types)
    x, previous = torch.randn(b, c, n).to(x_type), torch.randn(b, c, n).to(x_type)
    cond = torch.randn(b, c, n).to(m_type)
    uncond = torch.randn(b, c, n).to(m_type) if guided else None
    now, then = torch.rand(2).mul(0.8).add(0.1).double().tolist()
    mask = {"mask": torch.rand(b, c, n), "channels": torch.rand(b, 1, n)}.get(blended)
    blend = 0.25 if blended == "scalar" else 1.0
    low, high = (-0.5, 0.75) if clamp else (None, None)
    arguments = (x, cond, torch.tensor([now, then]), uncond, None if blended == "no" else previous, mask)
    got = diffusion_step(*arguments, cfg=cfg, prediction=prediction, method=method, blend=blend, low=low, high=high)
    want = by_hand(x, cond, uncond, now, then, cfg, prediction, method)
    if blended == "scalar":
        want = 0.75 * want + 0.25 * previous.double()
    elif blended != "no":
        want = want * mask.double() + previous.double() * (1 - mask.double())
    want = want.clamp(low, high) if clamp else want
    assert got.dtype is x_type
    torch.testing.assert_close(got.double(), want, rtol=1e-3 if x_type is torch.float16 else 1e-5, atol=5e-5)
    eager = diffusion_step(
        *arguments, cfg=cfg, prediction=prediction, method=method, blend=blend, low=low, high=high, policy=OFF
    )
    torch.testing.assert_close(eager.double(), want, rtol=2e-2, atol=8e-2)


def test_a_pair_for_each_batch():
    x, cond, sigmas = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.rand(3, 2)
    got = diffusion_step(x, cond, sigmas)
    for i in range(3):
        torch.testing.assert_close(got[i], diffusion_step(x[i], cond[i], sigmas[i]))


def test_wrong_arguments_are_value_errors():
    x, pair = torch.zeros(2, 4, 5), torch.tensor([1.0, 0.5])
    for arguments, options, words in (
        ((x, x[:1], pair), {}, "cond: "),
        ((x, x, pair, x[:, :1]), {}, "uncond: "),
        ((x, x, x), {}, "pair: "),
        ((x, x, pair, None, None, x), {}, r"mask: .* without previous"),
        ((x, x, pair, None, x, x[:, :, :2]), {}, "mask: "),
        ((x, x, pair), {"prediction": "score"}, "prediction is"),
        ((x, x, pair), {"method": "heun"}, "method is"),
    ):
        with pytest.raises(ValueError, match=words):
            diffusion_step(*arguments, **options)


@pytest.mark.parametrize(
    ("operand", "given", "options"),
    [
        ("cond", {"cond": (4, 5)}, {}),
        ("cond", {"cond": (2, 4, 1)}, {}),
        ("cond", {"x": (0, 4, 5), "cond": (0, 4, 6)}, {}),
        ("uncond", {"uncond": (1, 4, 5)}, {}),
        ("previous", {"previous": (2, 4)}, {}),
        ("mask", {"mask": (2, 4, 5)}, {}),
        ("mask", {"previous": (2, 4, 5), "mask": (3, 1, 1)}, {}),
        ("mask", {"previous": (2, 4, 5), "mask": (2, 4, 6)}, {}),
        ("mask", {"previous": (2, 4, 5), "mask": (2,)}, {}),
        ("mask", {"previous": (2, 4, 5), "mask": (1, 2, 4, 5)}, {}),
        ("pair", {"pair": ()}, {}),
        ("pair", {"pair": (1,)}, {}),
        ("pair", {"pair": (3,)}, {}),
        ("pair", {"pair": (3, 2)}, {}),
        ("pair", {"pair": (2, 1)}, {}),
        ("pair", {"pair": (1, 2, 2)}, {}),
        ("pair", {"x": (), "cond": (), "pair": (1, 2)}, {}),
        ("prediction", {}, {"prediction": "score"}),
        ("method", {}, {"method": "heun"}),
    ],
)
def test_wrong_operands_are_named(operand, given, options):
    shapes = {"x": (2, 4, 5), "cond": (2, 4, 5), "pair": (2,), **given}
    for policy in (KernelPolicy(), OFF):
        with pytest.raises(ValueError, match=rf"^diffusion_step: {operand}\b"):
            diffusion_step(**{name: torch.ones(shape) for name, shape in shapes.items()}, **options, policy=policy)


@pytest.mark.parametrize("mask", [None, (), (1,), (5,), (4, 1), (1, 4, 5), (2, 1, 1), (2, 4, 5)])
@pytest.mark.parametrize("pair", [(2,), (1, 2), (2, 2)])
def test_forms_that_broadcast(mask, pair):
    x = torch.ones(2, 4, 5)
    mask = None if mask is None else torch.ones(mask)
    for policy in (KernelPolicy(), OFF):
        assert diffusion_step(x, x, torch.ones(pair), x, x, mask, policy=policy).shape == x.shape
        assert diffusion_step(x[:, :0], x[:, :0], torch.ones(pair), policy=policy).shape == (2, 0, 5)


def test_special_values_and_empty():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    for prediction in ("velocity", "denoised"):
        for a, b in ((x, x.flip(0)), (x.flip(0), x)):
            got = diffusion_step(a, b, torch.tensor([1.0, 0.5]), prediction=prediction, low=-2.0, high=2.0)
            like = diffusion_step(a, b, torch.tensor([1.0, 0.5]), prediction=prediction, low=-2.0, high=2.0, policy=OFF)
            torch.testing.assert_close(got, like, equal_nan=True)
    assert diffusion_step(x[:0], x[:0], torch.tensor([1.0, 0.5])).shape == (0,)


def test_modes_and_compile():
    x, cond, sigmas = torch.randn(2, 4, 6), torch.randn(2, 4, 6), torch.tensor([1.0, 0.7, 0.2])
    compiled = torch.compile(
        lambda x, m, pair: diffusion_step(x, m, pair, m, cfg=3.0), fullgraph=True, backend="aot_eager"
    )
    for i in range(2):
        pair = sigmas[i : i + 2]
        torch.testing.assert_close(compiled(x, cond, pair), diffusion_step(x, cond, pair, cond, cfg=3.0))
    with pytest.raises(KernelRefused, match=r"forced on but cannot serve .*on the CPU"):
        diffusion_step(x, cond, sigmas[:2], policy=KernelPolicy.of("on"))


def test_registration_is_sound():
    """torch's own checks of the schema and the fake."""
    x = torch.randn(2, 4, 6)
    options = (3.0, "eps", "ddim", 0.5, None, 1.0, KernelPolicy().token)
    torch.library.opcheck(OPS["diffusion_step"].traced, (x, x, x, x, x[:, :1], torch.tensor([0.5, 0.7]), *options))

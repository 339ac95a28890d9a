"""diffusion_step on the GPU, in both instruction classes."""

from __future__ import annotations

import pytest
import torch
from gpu.support import WAYS, assert_rounded_once, assert_same_special, on

from fusestream.kernels_cuda import KernelPolicy, diffusion_step
from fusestream.kernels_cuda.ops.elementwise.diffusion_step import reference

OFF = KernelPolicy.of("off")
SHAPES = ((2, 16, 3, 10, 12), (1, 16, 21, 60, 104), (3, 4, 7, 9), (1,), (5, 1), (2, 3, 127))
STEPS = [(method, prediction) for method in ("euler", "ddim") for prediction in ("velocity", "eps", "denoised")]
KINDS = {"h": torch.float16, "f": torch.float32}


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, device="cuda").to(dtype)


def pair_of(method, batches=None):
    pair = torch.rand(2 if batches is None else (batches, 2), device="cuda") * 0.8 + 0.1
    return pair.sort(descending=method == "euler").values


def check(got, tensors, options, what=""):
    x, cond, pair, uncond, previous, mask = tensors
    wide = [None if t is None else t.double() for t in (x, cond, uncond, previous, mask, pair)]
    full = {"cfg": 1.0, "prediction": "velocity", "method": "euler", "blend": 1.0, "low": None, "high": None, **options}
    want = reference(*wide, *full.values())
    assert got.shape == x.shape and got.dtype is x.dtype and got.is_contiguous()
    if x.dtype is torch.float16:
        assert_rounded_once(got.reshape(1, -1), want.reshape(1, -1), slack=1e-5, what=what)
    else:
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5, msg=lambda m: f"{what}: {m}")


@pytest.mark.sanitize
@pytest.mark.parametrize("types", ["ff", "fh", "hh", "hf"])
@pytest.mark.parametrize(("method", "prediction"), STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps(isa, shape, method, prediction, types):
    x_type, m_type = (KINDS[t] for t in types)
    x, previous = randn(*shape, dtype=x_type), randn(*shape, dtype=x_type)
    cond, uncond = randn(*shape, dtype=m_type), randn(*shape, dtype=m_type)
    for pair in (pair_of(method), pair_of(method, shape[0])):
        for tensors, more in (
            ((x, cond, pair, None, None, None), {}),
            ((x, cond, pair, uncond, None, None), {"cfg": 5.0}),
            ((x, cond, pair, uncond, previous, None), {"cfg": 5.0, "blend": 0.3, "low": -1.0}),
            ((x, cond, pair, None, previous, torch.rand(shape, device="cuda")), {"low": -0.5, "high": 2.0}),
        ):
            options = {"prediction": prediction, "method": method, **more}
            got = diffusion_step(*tensors, **options, policy=on(isa))
            check(got, tensors, options, f"{shape} {options}")


@pytest.mark.parametrize("mask_type", ["h", "f"])
def test_masks(isa, mask_type):
    """Broadcast over channels, batch and time; 1 keeps the new value, 0 the previous one, to the bit."""
    x, cond, previous = (randn(2, 4, 3, 8, 8) for _ in range(3))
    pair = pair_of("euler")
    for shape in ((2, 1, 3, 8, 8), (1, 1, 3, 8, 8), (8, 8), (1,), (2, 1, 1, 1, 1), (2, 4, 3, 8, 8)):
        mask = torch.rand(shape, device="cuda").to(KINDS[mask_type])
        got = diffusion_step(x, cond, pair, None, previous, mask, policy=on(isa))
        check(got, (x, cond, pair, None, previous, mask), {}, f"mask {shape}")
        plain = diffusion_step(x, cond, pair, policy=on(isa))
        for value, want in ((1.0, plain), (0.0, previous)):
            edge = torch.full_like(mask, value)
            assert torch.equal(diffusion_step(x, cond, pair, None, previous, edge, policy=on(isa)), want)


@pytest.mark.parametrize("layout", ["shifted", "odd gaps", "gaps", "halves of a batch", "transposed batch"])
def test_layouts(isa, layout):
    ways = {**WAYS, "halves of a batch": lambda t: torch.cat((t, t)).chunk(2)[1]}
    x, cond, uncond = (ways[layout](randn(2, 6, 16)) for _ in range(3))
    tensors = (x, cond, pair_of("euler"), uncond, None, None)
    check(diffusion_step(*tensors, cfg=4.0, policy=on(isa)), tensors, {"cfg": 4.0}, layout)


def test_slices_of_the_samplers_sigmas(isa):
    """Any two neighbours of the schedule, down to zero: a pair needs no alignment."""
    sigmas = torch.linspace(1, 0, 8, device="cuda")
    x, cond = randn(1, 4, 32), randn(1, 4, 32)
    for prediction in ("velocity", "denoised"):
        for i in range(7):
            tensors = (x, cond, sigmas[i : i + 2], None, None, None)
            options = {"prediction": prediction}
            check(diffusion_step(*tensors, **options, policy=on(isa)), tensors, options, f"{prediction} {i}")


@pytest.mark.parametrize("size", [64, 65])
@pytest.mark.parametrize("prediction", ["velocity", "denoised"])
def test_special_values(isa, size, prediction):
    x, cond, uncond, previous = (randn(2, size) for _ in range(4))
    for i, t in enumerate((x, cond, uncond, previous)):
        t[0, 3 * i : 3 * i + 3] = torch.tensor([torch.nan, torch.inf, -torch.inf], device="cuda")
    for tensors, options in (
        ((x, cond, pair_of("euler"), uncond, None, None), {"cfg": 2.0}),
        ((x, cond, pair_of("euler"), uncond, previous, None), {"cfg": 2.0, "blend": 0.5, "low": -1.0, "high": 1.0}),
    ):
        got = diffusion_step(*tensors, prediction=prediction, **options, policy=on(isa))
        assert_same_special(got, diffusion_step(*tensors, prediction=prediction, **options, policy=OFF), prediction)


def test_outliers(isa):
    """fp16 latents near the largest: the intermediate values exist only in fp32."""
    x, cond = randn(1, 64, dtype=torch.float16), randn(1, 64, dtype=torch.float16)
    x[0, ::5], cond[0, ::7] = 65504, -65504
    tensors = (x, cond, torch.tensor([1.0, 0.5], device="cuda"), x.clone(), None, None)
    got = diffusion_step(*tensors, cfg=8.0, low=-60000.0, high=60000.0, policy=on(isa))
    assert got.isfinite().all()
    check(got, tensors, {"cfg": 8.0, "low": -60000.0, "high": 60000.0})


def test_graph_and_compile(isa):
    """One captured step serves every sigma; a compiled one too. Runs are bitwise repeatable."""
    sigmas, pair = torch.linspace(1, 0, 5, device="cuda"), torch.empty(2, device="cuda")

    def step(x, cond, uncond, pair):
        return diffusion_step(x, cond, pair, uncond, cfg=5.0, policy=on(isa))

    x, cond, uncond = randn(1, 16, 999), randn(1, 16, 999).half(), randn(1, 16, 999).half()
    step(x, cond, uncond, pair.copy_(sigmas[:2]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(x, cond, uncond, pair)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for i in range(4):
        pair.copy_(sigmas[i : i + 2])
        graph.replay()
        want = step(x, cond, uncond, sigmas[i : i + 2])
        assert torch.equal(captured, want) and torch.equal(compiled(x, cond, uncond, pair), want)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 24 * 2**30, reason="needs 24 GB")
def test_products_beyond_32_bits():
    x = torch.zeros(2**31 + 8, device="cuda", dtype=torch.float16)
    x[-3:] = 4
    got = diffusion_step(x, x, torch.tensor([1.0, 0.5], device="cuda"), policy=on(None))
    assert (got[-3:] == 2).all() and not got[:-3].any()

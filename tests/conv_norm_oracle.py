"""FusedConvNormAct2d as training leaves it, and what it must compute: for tests with a GPU and without."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fusestream.kernels_cuda.modules import FusedConvNormAct2d

ACTIVATIONS = {None: nn.Identity, "relu": nn.ReLU, "silu": nn.SiLU}
HALF_STEP = 2.0**-11  # half a unit in the last place of fp16, relative
SMALLEST = 2.0**-25  # half of fp16's smallest step, absolute


def lived_in(module: FusedConvNormAct2d) -> FusedConvNormAct2d:
    """With statistics and weights as training leaves them, in eval mode."""
    norm = module.norm
    with torch.no_grad():
        if norm is not None:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.25, 2.25)
            if norm.affine:
                norm.weight.normal_()
                norm.bias.normal_()
    return module.eval()


def half_module(*arguments, **options) -> FusedConvNormAct2d:
    return lived_in(FusedConvNormAct2d(*arguments, **options)).half()


def torchs(module: FusedConvNormAct2d) -> nn.Sequential:
    """The same layers, copied, as torch has them."""
    norm = nn.Identity() if module.norm is None else copy.deepcopy(module.norm)
    return nn.Sequential(copy.deepcopy(module.conv), norm, ACTIVATIONS[module.activation]())


@torch.no_grad()
def exactly(module: FusedConvNormAct2d, x):
    """float64, and the sum of magnitudes behind each element: what rounding errors grow with."""
    wide = torchs(module).double()
    sizes, norm = copy.deepcopy(wide[0]), wide[1]
    for t in sizes.parameters():
        t.abs_()
    magnitudes = sizes(x.double().abs())
    if module.norm is not None:
        factor = (norm.running_var + norm.eps).rsqrt() * (1 if norm.weight is None else norm.weight.abs())
        shift = 0 if norm.bias is None else norm.bias.abs().reshape(-1, 1, 1)
        magnitudes = (magnitudes + norm.running_mean.abs().reshape(-1, 1, 1)) * factor.reshape(-1, 1, 1) + shift
    return wide(x.double()), magnitudes


def check(got, module: FusedConvNormAct2d, x, sums: float = 1e-6, what: str = "") -> None:
    """Against float64: one rounding of the folded weights, one of the result, and `sums` of the magnitudes for adding up in
    fp32. SiLU magnifies an error by 1.1 at most."""
    exact, magnitudes = exactly(module, x)
    assert got.shape == exact.shape and got.dtype is torch.float16, what
    allowed = 1.15 * (1.01 * HALF_STEP + sums) * magnitudes + 1.01 * HALF_STEP * exact.abs() + SMALLEST + 1e-7
    over = (got.double() - exact).abs() - allowed
    assert bool((over <= 0).all()), f"{what}: {float(over.max()):.3g} over the allowed error"


@torch.no_grad()
def result(module, x):
    return module(x)


def kept(module: FusedConvNormAct2d):
    """What is folded now."""
    return module._kept.latest

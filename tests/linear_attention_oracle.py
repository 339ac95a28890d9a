"""linear_attention by its definition, every weight by itself in float64: for tests with a GPU and without."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_STEP = 2.0**-11  # half a unit in the last place of fp16, relative
SMALLEST = 2.0**-25  # half of fp16's smallest step, absolute
SQUARES = {"softmax": 0.5, "rbf": 1.0}


def phi(x: Tensor, features: Tensor | None, feature_map: str, scale: float, eps: float) -> Tensor:
    if feature_map == "elu":
        return torch.where(x > 0, x + 1, x.exp())
    if feature_map == "relu":
        return torch.relu(x) + eps
    assert features is not None
    squares = SQUARES[feature_map] * scale * x.square().sum(-1, keepdim=True)
    return (scale**0.5 * x @ features.double().t() - squares).exp()


def exactly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    features: Tensor | None = None,
    *,
    feature_map: str = "elu",
    causal: bool = False,
    scale: float | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """float64, and the weighted magnitudes behind each element: what rounding errors grow with."""
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    q, k = (phi(t, features, feature_map, scale, eps) for t in (q, k))
    weights = torch.einsum("bshm,bthm->bhst", q, k)
    if causal:
        s, t = weights.shape[-2:]
        weights = weights.masked_fill(~torch.ones(s, t, dtype=torch.bool, device=q.device).tril(t - s), 0)
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total == 0, 0, weights / total)
    exact, sizes = (torch.einsum("bhst,bthd->bshd", weights, t) for t in (v, v.abs()))
    return exact, sizes


def check(got: Tensor, exact: Tensor, sizes: Tensor, what: str = "", *, steps: float = 4.0, sums: float = 1e-5) -> None:
    """Rounding the result costs half a step of it; `steps` more of the magnitudes, and `sums`, for fp32 on the way."""
    assert got.dtype is torch.float16 and got.shape == exact.shape, what
    finite = exact.isfinite()
    assert got.double()[finite].isfinite().all(), f"{what}: not finite where the exact value is"
    allowed = HALF_STEP * (1.001 * exact.abs() + steps * sizes) + sums * sizes + SMALLEST
    over = ((got.double() - exact).abs() - allowed)[finite]
    assert not over.numel() or float(over.max()) <= 0, f"{what}: {float(over.max()):.3g} over the allowed error"


def adversaries(q: Tensor, k: Tensor, v: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Magnitudes at the ends of fp16, and features that hardly meet; q, k, v of heads of 32 or more."""
    half = q.shape[-1] // 2
    outlier = k.clone()
    outlier[:, k.shape[1] // 7] = outlier[:, k.shape[1] // 7].sign() * 65504
    low, high = (torch.arange(half, device=q.device) + at for at in (0, half))
    return {
        "large v": (q, k, v.sign() * 65000),
        "largest v, all equal": (q, k, torch.full_like(v, 65504)),
        "large k": (q, k.sign() * 65504, v),
        "large q": (q.sign() * 65504, k, v),
        "one key stands out": (q, outlier, v),
        "k far below zero": (q, k.abs() * -8 - 10, v),
        "one column": (torch.zeros_like(q).index_fill(3, low[3:4], 30000), k, v),
        "features apart": (q.abs().index_fill(3, low, 0), k.abs().index_fill(3, high, 0), v),
    }

"""What ops hold when they are first used, counted without a card: stock's ways, which `auto` measures beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.registry import Op, StockCandidate

BY_TORCH = "attention"  # none of ours has the wide heads of a VAE; torch's kernel adds up in fp32 for such


def measuring(tidy: Callable[[], None]) -> Callable[..., Any]:
    """`Op.__call__` as on a card whose kernels serve every op but that attention: measured once for each class of shapes.

    tidy: what follows each measurement
    """
    known: set[tuple[str, str]] = set()

    def call(op: Op, tensors: Any, options: Any, policy: Any) -> Any:
        asked = Call(op.name, tensors, options, policy)
        if op.name == BY_TORCH:
            sums = torch.empty(tensors[0].shape, dtype=torch.float32)
            out = op.fake(*tensors, *options)
            del sums
            return out
        key = op.name, op.shape_class(asked)
        if key not in known:
            known.add(key)
            for candidate in op.candidates:
                if isinstance(candidate, StockCandidate) and candidate.refuse(asked) is None:
                    candidate.run(*op.sample(asked), *options)
            tidy()
        return op.fake(*tensors, *options)

    return call

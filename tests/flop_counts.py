"""Operations that torch counts on the CPU: those of matrix products and of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def operations(run: Callable[[], Any]) -> float:
    """Of a call, attention's too, which torch counts on a card alone."""
    of_the_cpu = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
    with FlopCounterMode(display=False, custom_mapping=of_the_cpu) as counter, torch.no_grad():
        run()
    return float(counter.get_total_flops())


def _attention(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))

"""decode_attention and rms_rope_keep without a GPU: what their kernels take, and how keys are dealt out."""

from __future__ import annotations

import pytest
import torch

from fusestream.kernels_cuda import rms_rope_keep
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.attention import decode_attention as decode
from fusestream.kernels_cuda.ops.norm import rms_rope_keep as keep

Q, KEYS, AT = torch.zeros(1, 1, 4, 64).half(), torch.zeros(1, 8, 2, 64).half(), torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("given_", "scale", "reason"),
    [
        ((Q.float(), KEYS, KEYS, AT), None, "q is float32"),
        ((Q[..., :32], KEYS[..., :32], KEYS[..., :32], AT), None, "heads have 32 elements, the kernels serve 64, 128"),
        ((Q, KEYS, KEYS, AT), -1.0, "scale is -1.0"),
        ((Q, torch.zeros(1, 8, 2, 65).half()[..., 1:], KEYS, AT), None, "keys: rows do not start at multiples of 16"),
    ],
)
def test_what_the_attention_does_not_take(given_, scale, reason):
    assert next(decode.obstacles(Call("decode_attention", given_, (scale,)))).startswith(reason)


def test_keys_are_dealt_to_about_as_many_blocks_as_run_at_once():
    assert decode.parts_for(32768, 8, 132) == 33 and decode.parts_for(256, 8, 132) == 4
    assert decode.parts_for(1, 8, 132) == 1 and decode.parts_for(2**20, 1, 200) == decode.MOST_PARTS
    assert [decode.together(group) for group in (1, 2, 3, 4, 7)] == [1, 2, 4, 4, 4]


# ----------------------------------------------------------------------------------------------------- rms_rope_keep


def test_it_saturates():
    q = torch.full((1, 1, 1, 1, 8), 1e15)
    keys, values = (torch.zeros(1, 2, 1, 8).half() for _ in range(2))
    large, angle = torch.full((8,), 1e30), torch.zeros(2, 4)
    at = torch.ones(1, dtype=torch.int32)
    got = rms_rope_keep(q, q, q, large, large, angle.cos(), angle.sin(), keys, values, at, eps=1e-6)
    assert {float(t.max()) for t in (got, keys, values)} == {65504.0} and not keys[:, 0].any()


X, W, TABLE = torch.zeros(2, 1, 1, 2, 64), torch.ones(64), torch.zeros(8, 32)
ROOM = torch.zeros(1, 8, 2, 64).half()
WHOLE = (X, X, X, W, W, TABLE, TABLE, ROOM, ROOM.clone(), AT)


def but(**changed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(keep.Operands(*WHOLE)._replace(**changed))


@pytest.mark.parametrize(
    ("given_", "reason"),
    [
        (but(q=X.half()), "q is float16"),
        (but(k_weight=W.half()), "q_weight is float32, k_weight is float16"),
        (but(keys=ROOM.float()), "keys is float32"),
        (but(cos=torch.zeros(8, 64)[:, ::2]), "cos is not contiguous"),
    ],
)
def test_what_the_kernel_does_not_take(given_, reason):
    assert next(keep.obstacles(Call("rms_rope_keep", given_, (1e-6,)))).startswith(reason)


def test_what_they_take():
    assert not list(keep.obstacles(Call("rms_rope_keep", WHOLE, (1e-6,))))
    assert not list(decode.obstacles(Call("decode_attention", (Q, KEYS, KEYS, AT), (None,))))

"""Random numbers as files pack them: bytes drawn as they are, with the scales that give the numbers their size.

Nothing is quantised: a file of 9 GB is made as quickly as it is written. Of ggml's blocks the quants are drawn evenly; where a
block has minimums they are its scales' own, and stand in the middle of what quants reach, so that the numbers have no mean.
"""

from __future__ import annotations

import math

import torch

from ...memory import ENCODINGS

# Of a number of four bits that is drawn evenly: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
FOURS = math.sqrt(8.5625)
BYTES = 73.9  # the standard deviation of a byte that is drawn evenly, -128 to 127
SIX_BITS = 1333.5  # the mean square of 0 to 63
# Standard deviation of a number whose scale d is 1.
_Q4, _Q5, _Q6 = math.sqrt(SIX_BITS * 21.25), math.sqrt(SIX_BITS * 85.25), BYTES * math.sqrt(341.5)


def draw(kind: str, count: int, std: float, device: str, generator: torch.Generator) -> torch.Tensor:
    """`count` numbers of about this spread in an encoding of `memory`, or in I8 or U8, whose scales lie elsewhere.
    Returns uint8 [bytes]."""
    encoding = ENCODINGS[kind]
    shape = (count // encoding.elements, encoding.nbytes)
    found = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    if kind == "Q8_0":
        found[:, :2] = _half(std / BYTES, device)
    elif kind in ("Q4_K", "Q5_K"):
        middle, spread = (7.5, _Q4) if kind == "Q4_K" else (15.5, _Q5)
        found[:, :2] = _half(std / spread, device)
        found[:, 2:4] = _half(middle * std / spread, device)
        # Twelve bytes of six-bit scales and minimums: 4 scales, 4 minimums, then the low halves of 4 more of either.
        found[:, 8:12] = found[:, 4:8]
        found[:, 12:16] = (found[:, 12:16] & 15) * 17
    elif kind == "Q6_K":
        found[:, 208:] = _half(std / _Q6, device)
    elif kind not in ("I8", "U8"):
        raise ValueError(f"no numbers are drawn in {kind}")
    return found.view(-1)


def _half(value: float, device: str) -> torch.Tensor:
    """An fp16 number's two bytes."""
    return torch.tensor([value], dtype=torch.float16, device=device).view(torch.uint8)

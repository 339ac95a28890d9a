"""Encodings of a stored tensor's numbers: a torch type, or blocks in which a few numbers share
their scales.

An encoding says how many elements and bytes a block has, and so how many bytes a shape takes. The
meaning of a block's bytes is not known here: that is arithmetic, and `memory` moves bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Encoding:
    """
    name              as an extent has it: safetensors' name, or ggml's
    elements, nbytes  of a block; a plain type has blocks of one element
    ggml              its number in a GGUF file; None: ggml does not have it
    is_safetensors    whether a safetensors file may have it
    """

    name: str
    elements: int
    nbytes: int
    ggml: int | None = None
    is_safetensors: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether its numbers come in ggml's blocks. To torch such a tensor is bytes until it is
        dequantised."""
        return self.elements > 1 and self.ggml is not None

    def nbytes_of(self, shape: Sequence[int]) -> int | None:
        """Bytes of all elements in a row; None if they do not fill whole blocks."""
        blocks, rest = divmod(math.prod(shape), self.elements)
        return None if rest else blocks * self.nbytes

    def row_bytes(self, shape: Sequence[int]) -> int | None:
        """Bytes of one row (the last dimension); None if a row does not fill whole blocks, and so
        cannot be read by itself."""
        return self.nbytes_of(shape[-1:])


def _plain(name: str, nbytes: int, ggml: int | None = None) -> Encoding:
    return Encoding(name, 1, nbytes, ggml, is_safetensors=True)


_ALL = (
    _plain("F64", 8, 28), _plain("F32", 4, 0), _plain("F16", 2, 1), _plain("BF16", 2, 30),
    _plain("I64", 8, 27), _plain("I32", 4, 26), _plain("I16", 2, 25), _plain("I8", 1, 24),
    _plain("U64", 8), _plain("U32", 4), _plain("U16", 2), _plain("U8", 1), _plain("BOOL", 1), _plain("C64", 8),
    _plain("F8_E4M3", 1), _plain("F8_E5M2", 1), _plain("F8_E8M0", 1), _plain("F8_E4M3FNUZ", 1), _plain("F8_E5M2FNUZ", 1),
    # Several numbers in a byte, without scales.
    Encoding("F4", 2, 1, is_safetensors=True),
    Encoding("F6_E2M3", 4, 3, is_safetensors=True), Encoding("F6_E3M2", 4, 3, is_safetensors=True),
    # ggml's blocks.
    Encoding("Q4_0", 32, 18, 2), Encoding("Q4_1", 32, 20, 3), Encoding("Q5_0", 32, 22, 6), Encoding("Q5_1", 32, 24, 7),
    Encoding("Q8_0", 32, 34, 8),
    Encoding("Q2_K", 256, 84, 10), Encoding("Q3_K", 256, 110, 11), Encoding("Q4_K", 256, 144, 12),
    Encoding("Q5_K", 256, 176, 13), Encoding("Q6_K", 256, 210, 14),
    Encoding("IQ4_NL", 32, 18, 20), Encoding("IQ4_XS", 256, 136, 23),
)  # fmt: skip

ENCODINGS: Mapping[str, Encoding] = MappingProxyType({one.name: one for one in _ALL})
SAFETENSORS: Mapping[str, Encoding] = MappingProxyType({one.name: one for one in _ALL if one.is_safetensors})
GGML: Mapping[int, Encoding] = MappingProxyType({one.ggml: one for one in _ALL if one.ggml is not None})

# ggml's other types by number, for messages, those that ggml has given up included.
GGML_OTHERS: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
        22: "IQ2_S", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
        36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
    }
)  # fmt: skip

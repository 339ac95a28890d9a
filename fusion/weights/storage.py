"""How a weight is stored, one class for each storage. A new format of ComfyUI's is a class here and
its layout in `LAYOUTS`. One that ComfyUI does not have also needs its bytes in a file
(`memory/encoding.py`) and the way to halves (the ops `to_half` or `dequantise`, and `few_rows` for
products of a few rows); `fused/quality.py` tells whether products keep its numbers.

    Numbers        bf16, fp32, fp16: the numbers themselves
    Float8         fp8 without a scale, as a file has it or as `--fp8_e4m3fn-unet` asks for it
    ScaledFloat8   fp8 data and one fp32 scale
    Int8           8-bit numbers with a scale for each row or for all, rows rotated or not (ConvRot)
    ConvRotInt4    4-bit numbers with a scale for each row, rows rotated (ConvRot W4A4)
    Ggml           the blocks of a GGUF file, unchanged
    GroupedCodes   codes of 4 or 6 bits that become 8-bit rows (W4A8), by a scale for each group
    Awq            4-bit codes with a scale and a zero for each group, calibrated with samples
    SvdQuant       4-bit codes with a scale for each group and two narrow matrices, likewise
    Quantised      any other layout of ComfyUI's (NVFP4, MXFP8), which ComfyUI's own functions read

`storage_of(weight)` gives the object that answers for a weight. The answers are the operands that
our ops take: the matrix in fp16 (`matrix`), rows of integers (`integers`), bytes for the product of a few
rows (`few_rows`), rows of a table (`rows`). Which of them multiplies depends on x, the tier and the
card as well, so `products.py` decides that.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from comfy.quant_ops import QuantizedTensor
from torch import Tensor, nn

from ...kernels_cuda import IntegerMatrix, KernelPolicy, codes_to_half, codes_to_int8, int8_to_half, to_half
from ...kernels_cuda.binary.arch import has_int4
from ...kernels_cuda.ops.quant.codes import untiled_codes, untiled_of_rows
from ...kernels_cuda.ops.quant.integer_rows import unpacked
from ...kernels_cuda.ops.quant.rotation import GROUPS
from . import ggml_tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
READ_BY_TO_HALF = (torch.bfloat16, torch.float32, *FP8)
READ_BY_FEW_ROWS = {
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
# Types of tables whose rows `index_select` picks.
LOOKED_UP = (torch.float16, torch.bfloat16, torch.float32)


class StoredRows(NamedTuple):
    """A weight as the op `few_rows` reads it. numbers: [n, k], or [n, bytes of a row] of ggml's
    blocks."""

    numbers: Tensor
    encoding: str
    scale: Tensor | None = None  # one fp32 element, or one for each row


class Storage:
    """One weight, as it is stored. This class answers for plain numbers."""

    __slots__ = ("weight",)

    # Whether patches can be written back. If not, they are applied to the copy that each product
    # makes.
    is_writable: ClassVar[bool] = True
    # Whether rows of a table can be read without the rest of it.
    has_rows: ClassVar[bool] = True
    # Whether the layout is ours: ComfyUI's code for saving and merging does not know it.
    is_own_layout: ClassVar[bool] = False

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    @property
    def data(self) -> Tensor:
        """The tensor that holds the bytes, without scales."""
        found: Tensor = self.weight
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.data.nbytes

    def matrix(self, policy: KernelPolicy) -> Tensor:
        """The weight as fp16 in its own shape, on its device; numbers beyond +-65504 saturate."""
        return _halves(self.weight, policy)

    def wide(self, policy: KernelPolicy) -> Tensor:  # noqa: ARG002 - other storages need it
        """The weight as fp32, for functions of other nodes that round nothing in between."""
        found: Tensor = self.weight.float()
        return found

    def integers(self) -> IntegerMatrix | None:
        """The weight [n, k] as rows of 8 or 4 bits; None: it is stored otherwise."""
        return None

    @property
    def is_of_integers(self) -> bool:
        """Whether it is stored as such rows, or as codes of them."""
        return self.integers() is not None

    def multiplied(self) -> IntegerMatrix | None:
        """The integers as a product takes them; None: it is stored otherwise."""
        return self.integers()

    def few_rows(self) -> StoredRows | None:
        """The weight as `few_rows` reads it, not copied; None: that op cannot read it."""
        weight = self.weight
        plain = type(weight) is nn.Parameter and weight.dtype in READ_BY_FEW_ROWS and weight.is_contiguous()
        return StoredRows(weight, READ_BY_FEW_ROWS[weight.dtype]) if plain else None

    def rows(self, ids: Tensor) -> Tensor | None:
        """Rows [n, width] of a table by their numbers, ids [n] on the table's device; None:
        ComfyUI's embedding reads them."""
        weight = self.weight
        return weight.index_select(0, ids) if type(weight) is nn.Parameter and weight.dtype in LOOKED_UP else None

    def holding(self, data: Tensor, params: Any = None) -> Any:  # noqa: ARG002 - of quantised storages
        """A weight of the same storage with other bytes, and other scales if it is quantised."""
        return data

    def write(self, weight: Any) -> Any:
        """Copy the bytes of another weight of the same storage into this one's memory; returns the
        weight that results."""
        return self.weight.data.copy_(weight)

    def for_comfyui(self) -> Any:
        """The weight as ComfyUI's code that changes or saves weights takes it."""
        return self.weight

    def is_converted_for_products(self, *, by_us: bool, full_precision: bool) -> bool:  # noqa: ARG002 - see subclasses
        """Whether each product makes halves of the weight, to which a LoRA can be added on the way.

        by_us           whether our code computes the block
        full_precision  whether the file asks for products in full precision for this layer
        """
        return False


class Numbers(Storage):
    """bf16, fp16 or fp32."""

    __slots__ = ()


class Float8(Storage):
    """fp8 without a scale."""

    __slots__ = ()

    def is_converted_for_products(self, *, by_us: bool, full_precision: bool) -> bool:  # noqa: ARG002
        """True, because a sum rounded to fp8 would lose most of a small LoRA."""
        return True


class Quantised(Storage):
    """Data and scales, in a layout that only ComfyUI's own functions read."""

    __slots__ = ()
    has_rows = False

    @property
    def data(self) -> Tensor:
        found: Tensor = self.weight._qdata
        return found

    def matrix(self, policy: KernelPolicy) -> Tensor:
        return _halves(self.weight.dequantize(), policy)

    def wide(self, policy: KernelPolicy) -> Tensor:  # noqa: ARG002
        found: Tensor = self.weight.dequantize().float()
        return found

    def few_rows(self) -> StoredRows | None:
        return None

    def rows(self, ids: Tensor) -> Tensor | None:  # noqa: ARG002
        return None

    def holding(self, data: Tensor, params: Any = None) -> Any:
        weight = self.weight
        return type(weight)(data, weight._layout_cls, weight._params if params is None else params)

    def write(self, weight: Any) -> Any:
        self.weight._qdata.copy_(weight._qdata)
        return type(weight)(self.weight._qdata, weight._layout_cls, weight._params)

    def is_converted_for_products(self, *, by_us: bool, full_precision: bool) -> bool:  # noqa: ARG002
        """True if the file asks for full precision; otherwise the card may multiply the numbers as
        stored."""
        return full_precision


class ScaledFloat8(Quantised):
    """fp8 data and one scale."""

    __slots__ = ()

    def matrix(self, policy: KernelPolicy) -> Tensor:
        scale = self.weight._params.scale
        if scale.numel() != 1:
            return super().matrix(policy)
        return to_half(self.weight._qdata, scale.reshape(1).float(), policy=policy)

    def few_rows(self) -> StoredRows | None:
        data, scale = self.weight._qdata, self.weight._params.scale
        if scale is None or scale.numel() != 1 or data.dtype not in READ_BY_FEW_ROWS:
            return None
        return StoredRows(data, READ_BY_FEW_ROWS[data.dtype], scale.reshape(1).float())


class Integers(Quantised):
    """Integers with scales for rows, which products may take as they are."""

    __slots__ = ()

    def matrix(self, policy: KernelPolicy) -> Tensor:
        found = self.integers()
        if found is None:
            return super().matrix(policy)
        numbers = found.numbers if found.bits == 8 else unpacked(found.numbers)
        return int8_to_half(numbers, found.scales, rotation=found.rotation, policy=policy)

    def wide(self, policy: KernelPolicy) -> Tensor:
        """fp32 of the fp16 matrix, because 8-bit numbers have no more digits and one pass makes
        it."""
        return self.matrix(policy).float() if self.is_of_integers else super().wide(policy)

    def is_converted_for_products(self, *, by_us: bool, full_precision: bool) -> bool:
        return by_us or full_precision

    def _of(self, rotation: int, bits: int) -> IntegerMatrix | None:
        """The rows, if our ops turn in such groups and the scales are those of rows."""
        numbers, params = self.weight._qdata, self.weight._params
        if numbers.ndim != 2 or getattr(params, "transposed", False):
            return None
        found = IntegerMatrix(numbers, params.scale.reshape(-1).float(), rotation, bits)
        n, k = found.shape
        rotates = rotation == 0 or (rotation in GROUPS and k % rotation == 0)
        return found if rotates and params.scale.numel() in (1, n) else None


class Int8(Integers):
    """8-bit numbers as `int8_tensorwise` files have them."""

    __slots__ = ()

    def integers(self) -> IntegerMatrix | None:
        params = self.weight._params
        return self._of(params.convrot_groupsize if params.convrot else 0, 8)

    def few_rows(self) -> StoredRows | None:
        found = self.integers()
        return StoredRows(found.numbers, "I8", found.scales) if found is not None and found.rotation == 0 else None


class ConvRotInt4(Integers):
    """4-bit numbers as `convrot_w4a4` files have them, two to a byte. Where the file asks for inputs
    of 8 bits (`linear_dtype`), or the card multiplies 8 bits as fast as 4, they become bytes for each
    product, because both sides have one size. ComfyUI rounds inputs to as many bits."""

    __slots__ = ()

    def integers(self) -> IntegerMatrix | None:
        return self._of(self.weight._params.convrot_groupsize, 4)

    def multiplied(self) -> IntegerMatrix | None:
        found = self.integers()
        if found is None or product_bits_of(self.weight, found.numbers.device) == 4:
            return found
        return found._replace(numbers=unpacked(found.numbers), bits=8)


class GroupedCodes(Integers):
    """Codes of 4 or 6 bits as `asym_w4a8_int8` files have them. They become rows of 8 bits for each
    product, which ComfyUI multiplies too. Files whose groups have an offset as well are no such rows."""

    __slots__ = ()

    def integers(self) -> IntegerMatrix | None:
        if not self.is_of_integers:
            return None
        codes, params = self.weight._qdata, self.weight._params
        bits = codes.shape[1] * 8 // self._columns
        numbers = codes_to_int8(codes, params.scale, params.codebook, bits=bits, group=params.group_size)
        return IntegerMatrix(numbers, params.s_channel.reshape(-1).float(), params.convrot_groupsize)

    @property
    def is_of_integers(self) -> bool:
        params = self.weight._params
        if params.transposed or params.correction is not None or self.weight._qdata.ndim != 2 or params.scale.ndim != 2:
            return False
        return params.convrot_groupsize in GROUPS and self._columns % params.convrot_groupsize == 0

    @property
    def _columns(self) -> int:
        columns: int = self.weight._params.scale.shape[1] * self.weight._params.group_size
        return columns


class Calibrated(Quantised):
    """4-bit codes that were calibrated with samples, so that no sum can be written back into them."""

    __slots__ = ()
    is_writable = False

    def is_converted_for_products(self, *, by_us: bool, full_precision: bool) -> bool:  # noqa: ARG002
        return True


class Awq(Calibrated):
    """Codes with a scale and a zero for each group, as `awq_w4a16` files have them."""

    __slots__ = ()

    def matrix(self, policy: KernelPolicy) -> Tensor:
        params = self.weight._params
        if params.transposed:
            return super().matrix(policy)
        return codes_to_half(
            self.weight._qdata, params.scale, params.zeros, signed=False, group=params.group_size, policy=policy
        )


class SvdQuant(Calibrated):
    """Codes with a scale for each group and two narrow matrices, whose product is added, as
    `svdquant_w4a4` files have them. One dense matrix of all that is multiplied in 16 or 8 bits, which
    rounds activations less than 4 bits do."""

    __slots__ = ()

    def matrix(self, policy: KernelPolicy) -> Tensor:
        codes, params = self.weight._qdata, self.weight._params
        # Activations that are shifted before they are rounded ask for more than a matrix.
        if params.transposed or params.act_unsigned:
            return super().matrix(policy)
        scales, up = params.scale, params.proj_up
        if codes.ndim > 2:
            codes, scales, up = untiled_codes(codes), untiled_of_rows(scales), untiled_of_rows(up).t()
        group = codes.shape[1] * 2 // scales.shape[0]
        made = codes_to_half(codes, scales, columns=params.smooth_factor, signed=True, group=group, policy=policy)
        narrow = _halves(up.contiguous(), policy), _halves(params.proj_down, policy)
        return made.addmm_(narrow[0], narrow[1].t())


class Ggml(Quantised):
    """Blocks of a GGUF file."""

    __slots__ = ()
    is_writable = False
    has_rows = True
    is_own_layout = True

    def matrix(self, policy: KernelPolicy) -> Tensor:  # noqa: ARG002 - the policy of their own kernel is fixed
        return ggml_tensor.half(self.weight)

    def few_rows(self) -> StoredRows | None:
        blocks = ggml_tensor.in_rows(self.weight)
        return None if blocks is None else StoredRows(blocks, self.weight._params.encoding)

    def rows(self, ids: Tensor) -> Tensor | None:
        return ggml_tensor.rows(self.weight, ids).to(self.weight.dtype)

    def for_comfyui(self) -> Any:
        return nn.Parameter(ggml_tensor.half(self.weight).to(self.weight.dtype), requires_grad=False)

    def is_converted_for_products(self, *, by_us: bool, full_precision: bool) -> bool:  # noqa: ARG002
        return True


INT8_LAYOUT = "TensorWiseINT8Layout"
INT4_LAYOUT = "TensorCoreConvRotW4A4Layout"
GROUPED_LAYOUT = "AsymW4A8Int8Layout"
INTEGER_LAYOUTS = {INT8_LAYOUT: 8, INT4_LAYOUT: 4, GROUPED_LAYOUT: 8}  # bits
# Storages by the name of ComfyUI's layout class.
LAYOUTS: Mapping[str, type[Quantised]] = {
    "TensorCoreFP8Layout": ScaledFloat8,
    "TensorCoreFP8E4M3Layout": ScaledFloat8,
    "TensorCoreFP8E5M2Layout": ScaledFloat8,
    INT8_LAYOUT: Int8,
    INT4_LAYOUT: ConvRotInt4,
    GROUPED_LAYOUT: GroupedCodes,
    "TensorCoreAWQW4A16Layout": Awq,
    "TensorCoreSVDQuantW4A4Layout": SvdQuant,
    ggml_tensor.NAME: Ggml,
}


def product_bits(module: Any, device: Any = None) -> int | None:
    """Bits of the integers that a Linear's product takes on a device; None: its file has none. device:
    the weight's, if not given."""
    bits = INTEGER_LAYOUTS.get(getattr(module, "layout_type", None) or "")
    weight = module.weight
    return product_bits_of(weight, stored(weight).device if device is None else device) if bits == 4 else bits


def product_bits_of(weight: Any, device: Any) -> int:
    """The same of a weight of 4 bits."""
    asked = getattr(getattr(weight, "_params", None), "linear_dtype", None)
    return 8 if asked == "int8" or not _multiplies_4_bits(torch.device(device)) else 4


@cache
def _multiplies_4_bits(device: torch.device) -> bool:
    return device.type != "cuda" or has_int4(torch.cuda.get_device_capability(device))


def input_width(module: Any) -> int:
    """Numbers of a Linear's input. Its own `in_features` may be the bytes of a row of 4-bit numbers,
    because ComfyUI reads some sizes of a network off its file."""
    found = storage_of(module.weight).integers()
    width: int = module.in_features if found is None else found.shape[1]
    return width


def storage_of(weight: Any) -> Storage:
    """The object that answers for this weight."""
    if isinstance(weight, QuantizedTensor):
        return LAYOUTS.get(layout_of(weight), Quantised)(weight)
    return Float8(weight) if weight.dtype in FP8 else Numbers(weight)


def is_quantised(weight: Any) -> bool:
    """Whether a weight is data and scales rather than numbers."""
    return isinstance(weight, QuantizedTensor)


def stored(tensor: Any) -> Tensor:
    """The tensor itself, or the data of a quantised one. Makes no object, because it is called for
    each parameter of a model."""
    data: Tensor = tensor._qdata if isinstance(tensor, QuantizedTensor) else tensor
    return data


def layout_of(quantised: Any) -> str:
    """The name of ComfyUI's class for how data and scales lie."""
    layout = quantised._layout_cls
    return layout if isinstance(layout, str) else str(layout.__name__)


def in_file_order(weight: Tensor) -> Tensor:
    """A contiguous weight: a copy of one that is laid out channels-last."""
    return weight if is_quantised(weight) else weight.contiguous()


def _halves(weight: Tensor, policy: KernelPolicy) -> Tensor:
    """Numbers on the device as fp16."""
    if weight.dtype not in READ_BY_TO_HALF:
        return weight.half()
    if weight.ndim < 3 or weight.is_contiguous():
        return to_half(weight, policy=policy)
    # A convolution's weight that lies channels-last.
    return to_half(weight.movedim(1, -1), policy=policy).movedim(-1, 1)


def bytes_of_halves(*weights: Tensor) -> int:
    """Bytes of the halves that products make of these weights, if the file has them in another
    type."""
    others = (weight for weight in weights if is_quantised(weight) or weight.dtype is not torch.float16)
    return sum(weight.numel() * torch.float16.itemsize for weight in others)

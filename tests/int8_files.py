"""Files of 8-bit and 4-bit numbers as stock writes and reads them, and what their numbers are: for the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import comfy.ops
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

LAYOUT, INT4_LAYOUT = "TensorWiseINT8Layout", "TensorCoreConvRotW4A4Layout"


class Kind(NamedTuple):
    """How the weights of a file are stored. rows: a scale for each row. rotation: in groups of so many at most, 0: not turned.
    multiple: of which k must be one."""

    rows: bool
    rotation: int = 0
    bits: int = 8
    multiple: int = 1


BLOCKS = (
    "blocks.", "double_blocks.", "single_blocks.", "layers.", "input_blocks.", "middle_block.", "output_blocks.", "joint_blocks.",
    "transformer_blocks.",
)  # fmt: skip
COLUMNS_OF_A_TABLE = 8
KINDS = {
    "one scale": Kind(False),
    "rows": Kind(True),
    "convrot": Kind(True, 256),
    "convrot_w4a4": Kind(True, 256, 4, 64),
}


def quantised(weight: Tensor, kind: Kind) -> Any:
    """By stock's own function. What does not divide into the groups is turned in the largest that it divides into."""
    if not kind.rotation:
        return QuantizedTensor.from_float(weight, LAYOUT, per_channel=kind.rows)
    group = next(one for one in (256, 64, 16, 4) if one <= kind.rotation and weight.shape[1] % one == 0)
    if kind.bits == 4:
        return QuantizedTensor.from_float(weight, INT4_LAYOUT, convrot_groupsize=group)
    return QuantizedTensor.from_float(weight, LAYOUT, per_channel=True, convrot=True, convrot_groupsize=group)


def numbers(weight: Any) -> Tensor:
    """What a quantised weight stands for, as halves: exact but for the product with the scale in fp32, and the rounding to half."""
    data, params = weight._qdata, weight._params
    if weight._layout_cls == INT4_LAYOUT:  # of two neighbours the first has the lower bits
        data = torch.stack(((data << 4) >> 4, data >> 4), -1).flatten(1)
    data, scale = data.double(), params.scale.reshape(-1, 1).float()
    if getattr(params, "convrot", True):
        group = params.convrot_groupsize
        data = (data.view(len(data), -1, group) @ hadamard(group)).flatten(1)
        scale = scale / group**0.5  # a power of two
    return (data.float() * scale).half()


def hadamard(size: int) -> Tensor:
    """ConvRot's, of whole numbers: it lacks its root. Symmetric, so it turns back what it turned."""
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
    made = torch.ones(1, 1, dtype=torch.float64)
    while len(made) < size:
        made = torch.kron(made, four)
    return made


def state_dict(weight: Any, name: str) -> dict[str, Tensor]:
    """A quantised weight as a file has it. name: of its layer."""
    note: dict[str, Any] = {"format": "int8_tensorwise"}
    if weight._layout_cls == INT4_LAYOUT:
        note = {"format": "convrot_w4a4", "convrot_groupsize": weight._params.convrot_groupsize}
    elif weight._params.convrot:
        note |= {"convrot": True, "convrot_groupsize": weight._params.convrot_groupsize}
    told = torch.frombuffer(bytearray(json.dumps(note).encode()), dtype=torch.uint8)
    return {f"{name}.weight": weight._qdata, f"{name}.weight_scale": weight._params.scale, f"{name}.comfy_quant": told}


def in_format(weight: Tensor, kind: str, layer: str, **more: Tensor) -> dict[str, Tensor]:
    """A layer [n, k] of a file in one of stock's formats, rounded and written by stock's own code. more: parameters beside the
    weight."""
    if kind == "convrot_w4a4":
        rounded = quantised(weight, KINDS[kind])
    else:
        rounded = QuantizedTensor.from_float(weight, QUANT_ALGOS[kind]["comfy_tensor_layout"], scale="recalculate")
    operation: Any = comfy.ops.mixed_precision_ops({}, torch.float16).Linear(
        weight.shape[1], weight.shape[0], bias=False
    )
    operation.quant_format = kind
    for name, value in {"weight": rounded, **more}.items():
        setattr(operation, name, nn.Parameter(value, requires_grad=False))
    return {f"{layer}.{name}": value.detach() for name, value in operation.state_dict().items()}


def blocks_in_format(source: Path, folder: Path, kind: str) -> Path:
    """The same file with the matrices of its blocks in one of stock's formats."""
    tensors, metadata = read(source)
    for name, tensor in list(tensors.items()):
        if is_a_blocks(name, tensor):
            tensors |= in_format(tensor.half(), kind, name.removesuffix(".weight"))
    path = folder / f"{source.stem} {kind}.safetensors"
    save(tensors, path, metadata)
    return path


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """A file's tensors and what it says of itself."""
    with safe_open(path, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118


def save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)


def in_integers(
    tensors: dict[str, Tensor], kind: str, chosen: Callable[[str, Tensor], bool]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A file with the chosen matrices as integers, and the same with what those stand for in fp16."""
    stored, halves = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(".weight") and tensor.ndim == 2 and chosen(name, tensor):
            one = quantised(tensor, KINDS[kind])
            stored |= state_dict(one, name.removesuffix(".weight"))
            halves[name] = numbers(one)
    return stored, halves


def write(source: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """An fp16 file with its blocks' matrices in 8 bits, and the same with what those stand for in fp16."""
    of_int8, of_halves = (folder / f"{source.stem} {kind} {form}.safetensors" for form in ("int8", "halves"))
    if not of_int8.exists():
        tensors, metadata = read(source)
        stored, halves = in_integers(tensors, kind, lambda *one: is_a_blocks(*one, KINDS[kind].multiple))
        save(halves, of_halves, metadata)
        save(stored, of_int8, metadata)
    return of_int8, of_halves


def is_a_blocks(name: str, tensor: Tensor, multiple: int = 1) -> bool:
    """Whether it is a matrix that files of 8 bits have in 8 bits: in a block, and no modulation that stock multiplies, as that of
    a pruned MiniMax H3 with its few columns."""
    is_stocks = "mod" in name.lower() or tensor.shape[-1] <= COLUMNS_OF_A_TABLE
    return name.startswith(BLOCKS) and tensor.ndim == 2 and not is_stocks and tensor.shape[1] % multiple == 0


def linear_of_file(
    kind: Kind, n: int, k: int, dtype: torch.dtype = torch.float16, seed: int = 1, *, bias: bool = True
) -> Any:
    """One of stock's Linears [n, k] with a weight of this kind, as its loader makes it of a file."""
    made = comfy.ops.mixed_precision_ops({}, dtype).Linear(k, n, bias=bias, device="cpu", dtype=dtype)
    tensors = state_dict(quantised((drawn(n, k, seed=seed) / k**0.5).to(dtype), kind), "x")
    tensors |= {"x.bias": drawn(n, seed=seed + 1).to(dtype)} if bias else {}
    made.load_state_dict({name.removeprefix("x."): tensor for name, tensor in tensors.items()})
    return made


def linear_of_numbers(n: int, k: int, dtype: torch.dtype = torch.float16, seed: int = 1) -> Any:
    """The same with a weight of plain numbers."""
    made: Any = comfy.ops.manual_cast.Linear(k, n, dtype=dtype)
    made.weight = nn.Parameter((drawn(n, k, seed=seed) / k**0.5).to(dtype), requires_grad=False)
    made.bias = nn.Parameter(drawn(n, seed=seed + 1).to(dtype), requires_grad=False)
    return made


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()

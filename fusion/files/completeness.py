"""Whether a file holds the whole of its model, told from names and shapes alone.

Stock counts blocks until a number is missing and builds a model of so many: a file that lacks its
second block becomes a model of one block, and gives noise. So gaps in the numbering are looked for
in every model. A family knows which other tensors must be there (`Family.expects`). A fault that
only shows when stock builds the network is reported by `naming` with the file, the tensor and both
shapes.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...memory import BadFile, Extent, WeightFile
from ..base.errors import WrongFile
from ..base.family import Expected, Shape
from ..base.notices import warn

AGAIN = "Download it again."
# End of the name of a tensor with the settings of a layer's attention, as text.
ATTENTION_SETTINGS = "comfy_attention.config"
# Tensors that go with a quantised weight, in the spellings in use. Not every layer has them.
BESIDE_A_WEIGHT = (
    "scale_weight",
    "scale_input",
    "weight_scale",
    "weight_scale_2",
    "weight_s_rel",
    "weight_s_channel",
    "weight_codebook",
    "weight_correction",
    "weight_zero",
    "weight_zeros",
    "input_scale",
    "comfy_quant",
    "pre_quant_scale",
)
# Types in which a tensor has the shape that the network has; so have packed ones. In other types
# the file's writer may have packed several numbers into one.
AS_SHAPED = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
# Least number of tensors in a block. An entry with fewer may be an operation in a sequence, where
# some numbers have no tensors.
RICH = 4
SHOWN, LONGEST = 3, 120  # names in a message, characters of one
MISFIT = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\((\[[^]]*\])\) from checkpoint, "
    r"the shape in current model is torch\.Size\((\[[^]]*\])\)"
)
# Torch's words for a file that it cannot read, or that holds more than weights, because the type of
# the error does not tell.
UNREADABLE = ("weights_only", "inline_container", "PytorchStreamReader")
# The errors in stock's code when tensors are not what it takes them to be.
ODD = (KeyError, IndexError, AttributeError, TypeError, ValueError, ArithmeticError, AssertionError, NameError)


def listed(names: Sequence[str]) -> str:
    """The first names, shortened because a stranger may have made them long, and how many more
    there are."""
    return ", ".join(name if len(name) <= LONGEST else f"{name[:LONGEST]}..." for name in names[:SHOWN]) + (
        f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )


# ------------------------------------------------------------------------------------------------------------ numbering


def refuse_gaps(path: Path | str, names: Iterable[str]) -> None:
    """Raise `WrongFile` if a block is missing in between, in any model."""
    for name, members in sorted(_lists(names).items(), key=lambda item: item[0].count(".")):
        blocks = [inner for inner in members.values() if len(inner) >= RICH]
        if len(blocks) < 2 or len(set.intersection(*blocks)) < RICH:
            continue
        # A single tensor is only a mark.
        numbers = sorted(number for number, inner in members.items() if len(inner) > 1)
        spans = [(before + 1, after - 1) for before, after in pairwise([-1, *numbers]) if after > before + 1]
        if spans:
            missing = [f"{name}.{a}" if a == b else f"{name}.{a} to {b}" for a, b in spans]
            raise WrongFile(f"{path} lacks {listed(missing)}: its numbers go on to {name}.{numbers[-1]}. {AGAIN}")


def _lists(names: Iterable[str]) -> Mapping[str, Mapping[int, set[str]]]:
    """The numbered parts of these names: list -> number -> the names inside."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        parts = name.split(".")
        if parts[-1] in BESIDE_A_WEIGHT:
            continue
        for place, part in enumerate(parts[:-1]):
            if part.isascii() and part.isdigit() and len(part) <= 4:
                found[".".join(parts[:place])][int(part)].add(".".join(parts[place + 1 :]))
    return found


# -------------------------------------------------------------------------------------------------------------- tensors


def require(header: WeightFile, expected: Expected) -> None:
    """Raise `WrongFile` if a file is not as its family expects."""
    refuse_lacking(header.path, sorted(name for name in expected.tensors if name not in header.extents))
    wrong = [
        (name, extent.shape, shape)
        for name, shape in expected.tensors.items()
        if shape is not None and not _fits(extent := header.extents[name], shape)
    ]
    refuse_misfits(header.path, wrong)
    if expected.faults:
        raise WrongFile(f"{header.path} {expected.faults[0]} {AGAIN}")


def _fits(extent: Extent, shape: Shape) -> bool:
    if extent.dtype not in AS_SHAPED and not extent.is_packed:
        return True
    return len(extent.shape) == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(extent.shape, shape, strict=True)
    )


def refuse_lacking(path: Any, lacking: Sequence[str]) -> None:
    """Raise `WrongFile` if the file lacks these of its model's weights."""
    if lacking:
        raise WrongFile(f"{path} lacks {len(lacking)} of the model's weights: {listed(lacking)}. {AGAIN}")


def refuse_misfits(path: Any, misfits: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise `WrongFile` if tensors of the file do not have the model's shapes. misfits: name,
    shape, the model's shape."""
    wrong = list(misfits)
    if wrong:
        told = [
            f"{name} has the shape {_told(found)}, the model needs {_told(needed)}" for name, found, needed in wrong
        ]
        raise WrongFile(
            f"{path} does not fit together: {'; '.join(told[:SHOWN])}{_more(told)}. It is damaged, put together from "
            f"different models, or newer than this ComfyUI. {AGAIN}"
        )


def _told(shape: Any) -> str:
    if isinstance(shape, str):
        return shape
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def _more(told: Sequence[str]) -> str:
    return f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""


def odd_layers(net: Any) -> Iterator[tuple[str, Any, Any]]:
    """Weights whose shape is not that of their layer: name, shape, the layer's. Stock's operations
    for quantised models accept any shape."""
    for name, module in net.named_modules():
        needed, weight = getattr(module, "_orig_shape", None), getattr(module, "weight", None)
        packed = getattr(module, "quant_format", None) not in (None, "float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
        if needed is None or weight is None or packed:
            continue
        found = tuple(getattr(weight, "_qdata", weight).shape)
        if found != tuple(needed):
            yield f"{name}.weight", found, needed


def is_attention_settings(name: str) -> bool:
    """Whether a tensor of this name is the text with the settings of a layer's attention, in any
    version of ComfyUI."""
    return name == ATTENTION_SETTINGS or name.endswith(f".{ATTENTION_SETTINGS}")


def _leftovers(names: Iterable[str], taken: Iterable[str]) -> list[str]:
    blocks = {block for name in taken if (block := _block_of(name))}
    left = (
        name for name in names if name.rpartition(".")[2] not in BESIDE_A_WEIGHT and not is_attention_settings(name)
    )
    return sorted(name for name in left if _block_of(name) in blocks)


def say_leftovers(path: Path | str, unexpected: Iterable[str], taken: Iterable[str]) -> None:
    """Warn of tensors that have names of the model's blocks, but no place in the model. taken: the
    model's names."""
    left = _leftovers(unexpected, taken)
    if left:
        warn(
            f"{path} has tensors in the model's blocks for which the model has no place: {listed(left)}. They are left out; if "
            "the result is not what it should be, the file is of another model, or damaged."
        )


def _block_of(name: str) -> str:
    """`blocks.3` of blocks.3.ffn.0.weight; empty if there is no number in the name."""
    found = re.match(r"(?:[^.]+\.)*?[^.]+\.\d+(?=\.)", name)
    return found[0] if found else ""


# -------------------------------------------------------------------------------------------------------- stock's words


def _unreadable(path: Path | str) -> WrongFile:
    """The error for a file without a header. It replaces torch's words, which name no file and tell
    how to run the code in it."""
    return WrongFile(
        f"{path}: torch reads no weights from it: it is damaged or no model, or holds code beside the weights, which is never run. "
        "Get the .safetensors version of the model."
    )


@contextmanager
def naming_each(headers: Sequence[WeightFile]) -> Iterator[None]:
    """`naming` for files that make one model: a tensor of a wrong shape is said of the file that it
    is in, anything else of all of them."""
    with naming(" and ".join(str(header.path) for header in headers)):
        try:
            yield
        except RuntimeError as error:
            misfits = [(found[1], found[2], found[3]) for found in MISFIT.finditer(str(error))]
            for header in headers:
                if misfits and all(_has(header, name, shape) for name, shape, _ in misfits):
                    refuse_misfits(header.path, misfits)
            raise


def _has(header: WeightFile, name: str, shape: str) -> bool:
    """Whether a file has a tensor of this name and shape, in torch's words."""
    return name in header.extents and str(list(header.extents[name].shape)) == shape


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Turn the errors of stock's functions on a file's tensors into a `WrongFile` that names the
    file."""
    try:
        yield
    except (WrongFile, BadFile):
        raise
    except (pickle.UnpicklingError, EOFError) as error:
        raise _unreadable(path) from error
    except RuntimeError as error:
        if any(words in str(error) for words in UNREADABLE):
            raise _unreadable(path) from error
        refuse_misfits(path, [(found[1], found[2], found[3]) for found in MISFIT.finditer(str(error))])
        raise
    except ODD as error:
        if isinstance(error, KeyError) and error.args and "." in str(error.args[0]):
            raise WrongFile(
                f"{path} lacks {error.args[0]}, without which ComfyUI cannot tell what model it is. {AGAIN}"
            ) from error
        raise WrongFile(
            f"{path}: ComfyUI cannot build a model from it ({type(error).__name__}: {error}). It is damaged or incomplete, what it "
            "says in its metadata does not fit, or it is of a kind that this ComfyUI does not know."
        ) from error

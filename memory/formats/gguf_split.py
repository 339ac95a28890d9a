"""A GGUF model in several files. Each is a GGUF file with some of the tensors, and its name says
which part it is.

model-00001-of-00003.gguf    split.no 0, split.count 3, split.tensors.count of all parts together,
                             and all other metadata
model-00002-of-00003.gguf    split.no 1, ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..file import BadFile, WeightFile

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>(?i:\.gguf))", re.DOTALL)
MOST = 1000  # parts: with these a model of 2 TB still has 2 GB in each


@dataclass(frozen=True)
class Part:
    """The place of a file among the parts of a model. number: from 0 on."""

    number: int
    count: int
    tensors: int | None


def part_of(header: WeightFile) -> Part | None:
    """The file's part; None if it is a model by itself. Raises `BadFile` if it says impossible
    things of that."""
    if COUNT not in header.values:
        return None
    number, count, tensors = (header.values.get(name) for name in (NUMBER, COUNT, TENSORS))
    if (
        not isinstance(number, int)
        or not isinstance(count, int)
        or not isinstance(tensors, int | None)
        or not 0 <= number < count <= MOST
    ):
        raise BadFile(f"{header.path}: says impossible things of which part of a model it is. Download it again.")
    return None if count == 1 else Part(number, count, tensors)


def parts(header: WeightFile) -> tuple[Path, ...]:
    """All files of the model that this file is a part of, in order; only this file if it is the
    whole model."""
    part, path = part_of(header), header.path
    if part is None:
        return (path,)
    found = NAME.fullmatch(path.name)
    if found is None or (int(found["number"]), int(found["count"])) != (part.number + 1, part.count):
        wanted = _name("model", part.number, part.count, ".gguf")
        raise BadFile(
            f"{path}: is part {part.number + 1} of a model in {part.count} files, and its name must say so, as {wanted} does, for "
            "the others to be found. Give all of them their names back."
        )
    files = named_alike(path)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise BadFile(
            f"{path}: is part {part.number + 1} of {part.count}, and beside it lacks {shown}. Download all parts."
        )
    return files


def named_alike(path: Path) -> tuple[Path, ...]:
    """All files of one model by this file's name, in order, whether they exist or not; only this
    file if its name has no part number."""
    found = NAME.fullmatch(path.name)
    count = 0 if found is None else int(found["count"])
    if found is None or not 1 <= count <= MOST:
        return (path,)
    return tuple(path.with_name(_name(found["stem"], i, count, found["suffix"])) for i in range(count))


def check_together(headers: Sequence[WeightFile]) -> None:
    """Raise `BadFile` unless these files, in this order, are all parts of one model."""
    first = part_of(headers[0])
    for i, header in enumerate(headers):
        part = part_of(header)
        if (
            first is None
            or part is None
            or (part.number, part.count) != (i, len(headers))
            or part.tensors != first.tensors
        ):
            raise BadFile(
                f"{header.path}: is not part {i + 1} of {len(headers)} of the model of which {headers[0].path.name} is one. "
                "Download all parts of one model."
            )
    held = sum(len(header.extents) for header in headers)
    if first is not None and first.tensors not in (None, held):
        raise BadFile(
            f"{headers[0].path}: says that all parts together have {first.tensors} tensors, and they have {held}. Download "
            "all parts of one model."
        )


def _name(stem: str, number: int, count: int, suffix: str) -> str:
    return f"{stem}-{number + 1:05}-of-{count:05}{suffix}"

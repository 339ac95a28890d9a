"""The safetensors header: true files read exactly, every malformed one refused with one clear error."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bed.depth import examples
from fusestream.memory import BadFile, read_header, strict_json
from fusestream.memory.encoding import SAFETENSORS

NAMES = {
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}


def file_of(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def tensor(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=6),
    dtype=st.sampled_from(sorted(NAMES, key=str)),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reads_what_the_library_writes(
    tmp_path: Path, shapes: list[list[int]], dtype: torch.dtype, metadata: dict[str, str]
) -> None:
    weights = {f"t{i}": (torch.rand(shape) * 200).to(dtype) for i, shape in enumerate(shapes)}
    path = tmp_path / "x.safetensors"
    save_file(weights, path, metadata=metadata)
    header = read_header(path)
    raw = path.read_bytes()
    assert dict(header.metadata) == metadata
    assert header.extents.keys() == weights.keys()
    for name, weight in weights.items():
        extent = header.extents[name]
        assert (extent.dtype, list(extent.shape)) == (NAMES[dtype], list(weight.shape))
        assert raw[extent.begin : extent.end] == weight.reshape(-1).view(torch.uint8).numpy().tobytes()


BAD_HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "overlap": ({"a": tensor(0, 4), "b": tensor(2, 6)}, b"123456", "'b' .* overlaps 'a'"),
    "hole": ({"a": tensor(0, 2), "b": tensor(3, 6)}, b"123456", "'b' .* leaves a hole after 'a'"),
    "late start": ({"a": tensor(1, 2)}, b"12", "leaves a hole after the header"),
    "beyond the end": ({"a": tensor(0, 9)}, b"12", "is cut short: it has"),
    "backwards": ({"a": tensor(2, 1, [1])}, b"12", "'a' ends before it begins"),
    "left over": ({"a": tensor(0, 1)}, b"12", "1 bytes after its last tensor"),
    "size": ({"a": tensor(0, 2, [2], "F16")}, b"12", "'a' of dtype F16 .* needs 4 bytes, the header gives it 2"),
    "odd bits": ({"a": tensor(0, 1, [1], "F4")}, b"1", "'a' of dtype F4"),
    "no bytes, huge shape": ({"a": tensor(0, 0, [0, 2**40, 2**40], "F16")}, b"", None),
    "overflowing shape": ({"a": tensor(0, 1, [2**62, 2**62])}, b"1", "impossible shape"),
    "negative": ({"a": tensor(0, 1, [-1])}, b"1", "impossible shape"),
    "boolean size": ({"a": tensor(0, 1, [True])}, b"1", "impossible shape"),  # type: ignore[list-item]
    "float offset": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0.0, 1]}}, b"1", "impossible data_offsets"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, b"1", "impossible data_offsets"),
    "dtype": ({"a": tensor(0, 1, None, "F12")}, b"1", "unknown dtype 'F12'"),
    "dtype list": ({"a": {"dtype": [], "shape": [], "data_offsets": [0, 1]}}, b"1", "unknown dtype"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"1", "lacks its dtype, shape"),
    "entry": ({"a": 3}, b"", "lacks its dtype"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__ is not a table of texts"),
    "list": ([], b"", "it is a list, not an object"),
    "not json": (b"{nope", b"", "is not sound JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", "is not sound JSON"),
    "deep": (b"[" * 100_000, b"", "is not sound JSON"),
    "twice": (b'{"a": 1, "a": 1}', b"", "the name 'a' comes twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_refuses_a_malformed_header(tmp_path: Path, case: str) -> None:
    header, data, message = BAD_HEADERS[case]
    path = file_of(tmp_path / "bad.safetensors", header, data)
    if message is None:  # a zero before they multiply: the library agrees
        assert read_header(path).extents["a"].nbytes == 0
        return
    with pytest.raises(BadFile, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x01\x00", "has only 2 bytes"),
        (b"version https://git-lfs.example/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"GGUF\x03\x00\x00\x00\x00", "cut short: its header alone needs 16 bytes"),
        (b"PK\x03\x04\x00\x00\x00\x00\x00", "zip or .pt"),
        (struct.pack("<Q", 50) + b"{}", "cut short: its header alone needs 50 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "more than any safetensors file"),
    ],
)
def test_says_what_the_file_is_instead(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadFile, match=message):
        read_header(path)


def test_names_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"absent\.safetensors: cannot be read \(.+\)\. Check the path"):
        read_header(tmp_path / "absent.safetensors")


@given(cut=st.integers(0, 400), flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4))
@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_a_bad_file_or_harmless(tmp_path: Path, cut: int, flips: list[tuple[int, int]]) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"first": torch.ones(3, 4, dtype=torch.float16), "second": torch.ones(7)}, path, metadata={"k": "v"})
    raw = bytearray(path.read_bytes())
    for at, value in flips:
        raw[at % len(raw)] = value
    path.write_bytes(raw[: max(0, len(raw) - cut)] if cut < 200 else raw)
    try:
        header = read_header(path)
    except BadFile:
        return
    assert all(0 <= e.begin <= e.end <= header.size for e in header.extents.values())


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS))
def test_a_types_name_says_its_bits(tmp_path: Path, dtype: str) -> None:
    """Of a BOOL, which names none, there are eight. Eight elements of any type are whole bytes."""
    digits = re.search(r"\d+", dtype)
    bits = int(digits[0]) if digits else 8
    assert (
        read_header(file_of(tmp_path / "x", {"t": tensor(0, bits, [8], dtype)}, bytes(bits))).extents["t"].nbytes
        == bits
    )
    for wrong in (bits - 1, bits + 1):
        with pytest.raises(BadFile, match=rf"of dtype {dtype} and shape \[8\] needs {bits} bytes, .* gives it {wrong}"):
            read_header(file_of(tmp_path / "x", {"t": tensor(0, wrong, [8], dtype)}, bytes(wrong)))


def test_bytes_that_are_not_whole_are_rounded_up_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"needs 2 bytes, the header gives it 1"):
        read_header(file_of(tmp_path / "x", {"t": tensor(0, 1, [3], "F4")}, bytes(1)))


@pytest.mark.parametrize(
    ("text", "most", "fits"),
    [
        ('{"a":[1,2,3]}', 6, True),  # four brackets, two commas
        ('{"a":[1,2,3]}', 5, False),
        ('{"a":"","b":""}', 8, True),  # eight quotes
        ('{"a":"","b":""}', 7, False),
    ],
)
def test_a_header_has_so_many_parts_and_no_more(
    monkeypatch: pytest.MonkeyPatch, text: str, most: int, fits: bool
) -> None:
    monkeypatch.setattr(strict_json, "MAX_PARTS", most)
    if fits:
        assert strict_json.parse(text.encode()) == json.loads(text)
    else:
        with pytest.raises(ValueError, match="more than"):
            strict_json.parse(text.encode())


def test_a_header_is_so_deep_and_no_deeper() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)

    strict_json.parse(nested(strict_json.MAX_DEPTH))
    with pytest.raises(ValueError, match=f"more than {strict_json.MAX_DEPTH} deep"):
        strict_json.parse(nested(strict_json.MAX_DEPTH + 1))


@pytest.mark.parametrize(
    ("text", "is_integer"),
    [("18446744073709551615", True), ("99999999999999999999", True), ("100000000000000000000", False), ("-0", False)],
)
def test_a_number_that_no_size_could_be_is_no_integer(text: str, is_integer: bool) -> None:
    number = strict_json.parse(b'{"n":' + text.encode() + b"}")["n"]
    assert type(number) is (int if is_integer else float) and number == type(number)(text)


@pytest.mark.parametrize(("size", "length"), [(8, 0), (8, 5), (9, 2), (20, 13)])
def test_a_header_must_lie_in_its_file(tmp_path: Path, size: int, length: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", length) + b"{}".ljust(size)[: size - 8])
    with pytest.raises(
        BadFile, match="not sound JSON" if size - 8 >= length else f"needs {length} bytes, .* has {size}"
    ):
        read_header(path)


def test_a_hole_and_an_overlap_are_told_apart(tmp_path: Path) -> None:
    """And which tensor it is behind."""
    hole, overlap = {"a": tensor(0, 4), "b": tensor(5, 8)}, {"a": tensor(0, 4), "b": tensor(3, 8)}
    with pytest.raises(BadFile, match=r"'b' at byte \d+ leaves a hole after 'a', which ends"):
        read_header(file_of(tmp_path / "x", hole, bytes(8)))
    with pytest.raises(BadFile, match=r"'b' at byte \d+ overlaps 'a', which ends"):
        read_header(file_of(tmp_path / "x", overlap, bytes(8)))
    with pytest.raises(BadFile, match=r"'a' at byte \d+ leaves a hole after the header"):
        read_header(file_of(tmp_path / "x", {"a": tensor(1, 4)}, bytes(4)))
    with pytest.raises(BadFile, match="has 3 bytes after its last tensor"):
        read_header(file_of(tmp_path / "x", {"a": tensor(0, 4)}, bytes(7)))

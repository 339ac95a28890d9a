"""The safetensors header: true files read exactly, every malformed one refused with one clear error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bed.depth import examples
from fusestream.memory import BadFile, read_header

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
    "beyond the end": ({"a": tensor(0, 9)}, b"12", "is cut short: tensor 'a' ends at byte"),
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
        (b"GGUF\x03\x00\x00\x00\x00", "GGUF"),
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
    with pytest.raises(BadFile, match=r"absent\.safetensors: cannot be read \(No such file"):
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

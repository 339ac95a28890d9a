"""GGUF headers: what the `gguf` package writes is read exactly, every malformed file is refused with one clear error."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files as files
import numpy as np
import pytest
import torch
from gguf_files import TYPES, Tensor, Typed, file_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.memory import BadFile, Checkpoint, WeightFile, read_header
from fusestream.memory.encoding import ENCODINGS, GGML, GGML_OTHERS, SAFETENSORS
from fusestream.memory.formats.gguf_values import FIRST_READ, MAX_TEXTS, Listed

# --------------------------------------------------------------------------------------------------------- encodings


def test_the_table_is_ggmls() -> None:
    """Every number, name and size, and nothing of ggml's is left out."""
    theirs = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    ours = {number: (one.name, one.elements, one.nbytes) for number, one in GGML.items()}
    assert ours.items() <= theirs.items()
    assert {
        number: name for number, (name, _, _) in theirs.items() if number not in ours
    }.items() <= GGML_OTHERS.items()
    assert not GGML.keys() & GGML_OTHERS.keys()
    assert {
        name: (one.ggml, one.elements, one.nbytes) for name, one in ENCODINGS.items() if one.ggml is not None
    } == TYPES


def test_what_is_packed() -> None:
    packed = {name for name, one in ENCODINGS.items() if one.is_packed}
    assert packed == {name for name, (_, elements, _) in TYPES.items() if elements > 1}
    assert not packed & SAFETENSORS.keys()
    assert {name for name, one in SAFETENSORS.items() if one.ggml is None} == {
        "U64", "U32", "U16", "U8", "BOOL", "C64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
        "F4", "F6_E2M3", "F6_E3M2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape", "nbytes", "row"),
    [
        ("Q4_K", (3, 512), 864, 288), ("Q4_K", (256, 3), 432, None), ("Q4_K", (3, 100), None, None), ("Q4_K", (), None, None),
        ("Q8_0", (0, 32), 0, 34), ("F16", (2, 3), 12, 6), ("F16", (), 2, 2), ("F4", (3,), None, None), ("F4", (2, 3), 3, None),
        ("F6_E2M3", (4,), 3, 3),
    ],
)  # fmt: skip
def test_bytes_of_a_shape(name: str, shape: tuple[int, ...], nbytes: int | None, row: int | None) -> None:
    assert (ENCODINGS[name].nbytes_of(shape), ENCODINGS[name].row_bytes(shape)) == (nbytes, row)


# ------------------------------------------------------------------------------------------------------- sound files


def written(path: Path, fill: Callable[[gguf.GGUFWriter], None], **options: Any) -> Path:
    """What the package writes."""
    writer = gguf.GGUFWriter(path, "wan", **options)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(sorted(TYPES)), st.lists(st.integers(1, 4), max_size=4)), min_size=1, max_size=6
    ),
    texts=st.dictionaries(st.text(min_size=1, max_size=5), st.text(min_size=1, max_size=5), max_size=3),
    alignment=st.sampled_from([8, 32, 64, 4096]),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reads_what_the_package_writes(
    tmp_path: Path, tensors: list[tuple[str, list[int]]], texts: dict[str, str], alignment: int
) -> None:
    """Of every type: names, shapes, bytes."""
    stored: dict[str, tuple[str, list[int], bytes]] = {}

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(alignment)
        for name, text in texts.items():
            writer.add_string(f"x.{name}", text)
        for i, (kind, sizes) in enumerate(tensors):
            number, elements, size = TYPES[kind]
            *rows, width = sizes or [1]
            raw = np.random.default_rng(i).integers(0, 256, (*rows, width * size), np.uint8)
            stored[f"t{i}"] = kind, [*rows, width * elements], raw.tobytes()
            writer.add_tensor(f"t{i}", raw, raw_dtype=gguf.GGMLQuantizationType(number))

    path = written(tmp_path / "x.gguf", fill)
    header, raw = read_header(path), path.read_bytes()
    assert header.metadata == {"general.architecture": "wan", **{f"x.{name}": text for name, text in texts.items()}}
    assert header.values["general.alignment"] == alignment
    assert header.size == len(raw) and header.path == path
    found = {
        name: (extent.dtype, list(extent.shape), raw[extent.begin : extent.end])
        for name, extent in header.extents.items()
    }
    assert found == stored


def test_a_file_by_hand(tmp_path: Path) -> None:
    """Every byte of it stands here."""
    raw = (
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
        + struct.pack("<Q", 4) + b"name" + struct.pack("<I", 8) + struct.pack("<Q", 2) + "é".encode()
        + struct.pack("<Q", 1) + b"w" + struct.pack("<IQQIQ", 2, 32, 2, 8, 0)
    )  # fmt: skip
    data_begin = 96
    assert 64 < len(raw) <= data_begin
    path = tmp_path / "x.gguf"
    path.write_bytes(raw.ljust(data_begin, b"\x00") + bytes(range(68)))
    header = read_header(path)
    (extent,) = header.extents.values()
    assert (extent.name, extent.dtype, extent.shape, extent.begin, extent.end) == ("w", "Q8_0", (2, 32), 96, 164)
    assert extent.encoding is ENCODINGS["Q8_0"]
    assert dict(header.metadata) == {"name": "é"}
    with Checkpoint.open(path) as source:
        assert bytes(source.read(source.extents["w"]).numpy()) == bytes(range(68))


VALUES = {
    "u8": Typed("u8", 255), "i8": Typed("i8", -1), "u16": Typed("u16", 65535), "i16": Typed("i16", -2), "u32": 7,
    "i32": Typed("i32", -(2**31)), "f32": 0.5, "f64": Typed("f64", 1e300), "yes": True, "no": False, "u64": Typed("u64", 2**64 - 1),
    "i64": Typed("i64", -(2**63)), "text": "a\x00b \U0001f600", "none": [], "bytes": [Typed("u8", n) for n in (0, 9, 255)],
    "truths": [True, False], "sizes": [Typed("i32", -1), Typed("i32", 5)], "texts": ["", "b", "é" * 9], "scores": [0.5, -2.0],
}  # fmt: skip


def test_values_of_every_kind(tmp_path: Path) -> None:
    header = read_header(file_of(tmp_path / "x.gguf", VALUES))
    found = {
        name: (value.texts if value.kind == files.TEXT else value.numbers) if isinstance(value, Listed) else value
        for name, value in header.values.items()
    }
    plain = {name: value.value if isinstance(value, Typed) else value for name, value in VALUES.items()}
    assert found == plain | {
        "none": (), "bytes": (0, 9, 255), "truths": (True, False), "sizes": (-1, 5), "texts": ("", "b", "é" * 9),
        "scores": (0.5, -2.0),
    }  # fmt: skip
    assert [type(found[name]) for name in ("yes", "u8", "f32")] == [bool, int, float]
    assert header.metadata == {"text": "a\x00b \U0001f600"}
    assert len(header.values["bytes"]) == 3


def test_a_list_is_asked_for_what_it_is(tmp_path: Path) -> None:
    header = read_header(file_of(tmp_path / "x.gguf", {"a": ["b"], "c": [1]}))
    with pytest.raises(BadFile, match="'a' is a list of texts, where numbers"):
        _ = header.values["a"].numbers
    with pytest.raises(BadFile, match="'c' is a list of numbers, where texts"):
        _ = header.values["c"].texts


def test_a_text_of_a_list_that_is_no_text_is_told_when_it_is_wanted(tmp_path: Path) -> None:
    header = read_header(file_of(tmp_path / "x.gguf", {"a": ["b", b"\xff"]}))
    with pytest.raises(BadFile, match=r"x\.gguf: the metadata entry 'a' has a text that is no UTF-8"):
        _ = header.values["a"].texts


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("padded", [True, False])
def test_versions_and_ends(tmp_path: Path, version: int, padded: bool) -> None:
    tensors = [Tensor("a", "F16", (3,)), Tensor("b", "I8", (33,))]
    path = file_of(tmp_path / "x.gguf", {}, tensors, version=version, padded=padded)
    header = read_header(path)
    a, b = header.extents.values()
    assert (a.name, b.name, b.begin - a.begin, a.nbytes, b.nbytes) == ("a", "b", 32, 6, 33)
    assert (path.stat().st_size == b.end) is not padded


def test_five_dimensions_and_none(tmp_path: Path) -> None:
    """llama.cpp has four at most; the patch embeddings of video models have five."""
    tensors = [Tensor("patch", "F16", (8, 4, 1, 2, 2)), Tensor("scale", "F32", ()), Tensor("empty", "F16", (0, 5))]
    extents = read_header(file_of(tmp_path / "x.gguf", {}, tensors)).extents
    assert [one.shape for one in extents.values()] == [(8, 4, 1, 2, 2), (), (0, 5)]
    assert [one.nbytes for one in extents.values()] == [256, 4, 0]


def test_the_shape_that_a_tensor_was_made_of(tmp_path: Path) -> None:
    """Whose rows are no whole blocks: only the whole of it can be read."""
    key = "comfy.gguf.orig_shape.conv"
    tensors = [Tensor("conv", "Q4_K", (9, 256))]
    shape = [Typed("i32", n) for n in (64, 4, 3, 3)]
    extent = read_header(file_of(tmp_path / "x.gguf", {key: shape}, tensors)).extents["conv"]
    assert (extent.shape, extent.nbytes, extent.encoding.row_bytes(extent.shape)) == ((64, 4, 3, 3), 9 * 144, None)
    for bad in ([Typed("i32", n) for n in (64, 4, 3)], [Typed("i32", n) for n in (-64, -4, 3, 3)], 5, ["a"], [1] * 9):
        with pytest.raises(BadFile, match=r"tensor 'conv' has the shape .* that it was made of"):
            read_header(file_of(tmp_path / "x.gguf", {key: bad}, tensors))


def test_a_long_header_is_read_in_pieces(tmp_path: Path) -> None:
    words = [f"word {i}" for i in range(40_000)]
    path = file_of(tmp_path / "x.gguf", {"words": words, "scores": [1.0] * 40_000, "z": 1}, [Tensor("a", "F16", (4,))])
    assert path.stat().st_size > 8 * FIRST_READ
    start = time.thread_time()
    header = read_header(path)
    assert time.thread_time() - start < 1
    assert header.values["words"].texts == tuple(words) and header.values["z"] == 1
    assert header.extents["a"].nbytes == 8


# ----------------------------------------------------------------------------------------------------- malformed files

A, B = Tensor("a", "F16", (4,)), Tensor("b", "F16", (4,))
BAD: dict[str, tuple[dict[str, Any], list[Tensor], str]] = {
    "overlap": ({}, [A, Tensor("b", "F16", (4,), offset=0)], r"'b' at byte \d+ overlaps 'a'"),
    "hole": ({}, [A, Tensor("b", "F16", (4,), bytes(64), offset=64)], r"'b' at byte \d+ leaves a hole after 'a'"),
    "late start": ({}, [Tensor("a", "F16", (4,), bytes(64), offset=32)], "leaves a hole after the header"),
    "odd offset": ({}, [A, Tensor("b", "F16", (4,), offset=16)], "begins at byte 16 of the data, which is no multiple of 32"),
    "far offset": ({}, [Tensor("a", "F16", (4,), offset=2**64 - 32)], "is cut short: it has"),
    "no whole blocks": ({}, [Tensor("a", "Q4_K", (256, 3), b"")], "'a' of type Q4_K .* no whole blocks of 256"),
    "a number in blocks": ({}, [Tensor("a", "Q8_0", (), b"")], "no whole blocks of 32"),
    "overflow": ({}, [Tensor("a", "I8", (2**32, 2**32), b"")], "'a' has the impossible shape"),
    "overflow beside a zero": ({}, [Tensor("a", "I8", (0, 2**63), b"")], "'a' has the impossible shape"),
    "dimensions": ({}, [Tensor("a", "I8", (1,) * 9)], "'a' has 9 dimensions"),
    "unknown type": ({}, [Tensor("a", 99, (4,))], "'a' is of type 99, which ggml does not have"),
    "a type given up": ({}, [Tensor("a", 4, (4,))], "'a' is of type Q4_2, which FuseStream does not read. Get"),
    "a type of others": ({}, [Tensor("a", 16, (4,))], "'a' is of type IQ2_XXS, which FuseStream does not read. Get"),
    "alignment 0": ({"general.alignment": 0}, [A], "general.alignment is 0, which is no power of two"),
    "alignment 24": ({"general.alignment": 24}, [A], "general.alignment is 24, which is no power of two"),
    "alignment -8": ({"general.alignment": Typed("i32", -8)}, [A], "general.alignment is -8"),
    "alignment true": ({"general.alignment": True}, [A], "general.alignment is True"),
    "alignment list": ({"general.alignment": [32]}, [A], "general.alignment is a list"),
    "alignment text": ({"general.alignment": "32"}, [A], "general.alignment is '32'"),
    "lists of lists": ({"a": [[1]]}, [], "'a' is a list of lists"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refuses_a_malformed_header(tmp_path: Path, case: str) -> None:
    values, tensors, message = BAD[case]
    path = file_of(tmp_path / "bad.gguf", values, tensors)
    with pytest.raises(BadFile, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def changed(path: Path, change: dict[tuple[str, int], bytes | int], values: Any = None, tensors: Any = None) -> Path:
    """A sound file with other numbers or bytes in some pieces of its header: by role, and which one of that role."""
    header = files.pieces(values or {"k": "v", "n": 1}, tensors or [A, B])
    seen: dict[str, int] = {}
    raw = b""
    for piece in header:
        at = seen[piece.role] = seen.get(piece.role, -1) + 1
        new = change.get((piece.role, at))
        raw += piece.raw if new is None else new if isinstance(new, bytes) else piece.holding(new).raw
    path.write_bytes(raw.ljust(-(-len(raw) // 32) * 32, b"\x00") + bytes(64))
    return path


CHANGED: dict[str, tuple[dict[tuple[str, int], bytes | int], str]] = {
    "version 0": ({("version", 0): 0}, "of version 0; versions 2 and 3 are known"),
    "version 1": ({("version", 0): 1}, "of version 1, of 2023"),
    "version 4": ({("version", 0): 4}, "of version 4; versions 2 and 3"),
    "big endian": ({("version", 0): 3 << 24}, "is a big-endian GGUF file. Get the little-endian"),
    "big endian 2": ({("version", 0): 2 << 24}, "is a big-endian GGUF file"),
    "many tensors": ({("tensors", 0): 2**64 - 1}, "says it has 18446744073709551615 tensors"),
    "more tensors than fit": ({("tensors", 0): 20}, "says it has 20 tensors"),
    "many entries": ({("entries", 0): 2**63}, "says it has 9223372036854775808 metadata entries"),
    "another entry": ({("entries", 0): 3}, "file is damaged|is cut short"),
    "long key": ({("length", 0): 2**16}, "its metadata entry 0 has a name of 65536 bytes"),
    "endless text": ({("length", 1): 2**63}, "is cut short: its header alone needs"),
    "long name": ({("length", 3): 2**64 - 1}, "tensor 0 has a name of 18446744073709551615 bytes"),
    "key twice": ({("text", 2): b"k"}, "its metadata entry 'k' comes twice"),
    "tensor twice": ({("text", 4): b"a"}, "the name 'a' comes twice among its tensors"),
    "key no text": ({("text", 0): b"\xff"}, "the name of its metadata entry 0 is no UTF-8 text"),
    "half a character": ({("text", 3): b"\xed\xa0\x80", ("length", 3): 3}, "the name of tensor 0 is no UTF-8 text"),
    "value no text": ({("text", 1): b"\xc0"}, "the metadata entry 'k' is no UTF-8 text"),
    "kind": ({("kind", 0): 13}, "its metadata entry 'k' is of the unknown kind 13"),
    "huge shape": ({("size", 0): 2**63}, "'a' has the impossible shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_refuses_a_changed_header(tmp_path: Path, case: str) -> None:
    change, message = CHANGED[case]
    assert len(read_header(changed(tmp_path / "x.gguf", {})).extents) == 2
    if case == "key twice":
        change = {**change, ("length", 2): 1}
    path = changed(tmp_path / "x.gguf", change)
    with pytest.raises(BadFile, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "count", "message"),
    [
        (0, 2**64 - 1, "is cut short: its header alone needs"), (12, 2**61, "is cut short"), (8, 5, "is cut short"),
        (8, MAX_TEXTS + 1, "more than any vocabulary"), (9, 1, "is a list of lists"), (13, 1, "a list of the unknown kind 13"),
    ],
)  # fmt: skip
def test_refuses_a_list_that_cannot_be(tmp_path: Path, kind: int, count: int, message: str) -> None:
    path = changed(tmp_path / "x.gguf", {("kind", 1): kind, ("count", 0): count}, {"l": [1, 2]})
    with pytest.raises(BadFile, match=message):
        read_header(path)


def test_a_truth_is_one_or_none(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="'k' is neither true nor false"):
        read_header(changed(tmp_path / "x.gguf", {("number", 0): 2}, {"k": True}))
    with pytest.raises(BadFile, match="'k' is neither true nor false"):
        read_header(changed(tmp_path / "x.gguf", {("number", 1): 255}, {"k": [True, True]}))


def test_every_cut_is_told(tmp_path: Path) -> None:
    """Wherever the download ended."""
    path = file_of(tmp_path / "x.gguf", VALUES, [A, B], padded=False)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(BadFile, match=r"x\.gguf: .*([Dd]ownload|Get )"):
            read_header(path)


def test_empty_lists_of_texts_take_no_time(tmp_path: Path) -> None:
    """The longest loop that a header can ask for."""
    path = tmp_path / "x.gguf"
    head = files.joined(files.pieces({"l": ["x"]}, []))
    head = head[: -8 - 8 - 1] + struct.pack("<Q", MAX_TEXTS)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + 8 * MAX_TEXTS)
    start = time.thread_time()
    assert len(read_header(path).values["l"]) == MAX_TEXTS
    assert time.thread_time() - start < 2


# --------------------------------------------------------------------------------------------------------- split files


def parts_of(folder: Path, count: int = 3) -> list[Path]:
    """A model of five tensors in files, by the package."""

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_string("name", "model")
        for i in range(5):
            writer.add_tensor(f"t{i}", np.full(8, i, np.float16))

    written(folder / "model.gguf", fill, split_max_tensors=-(-5 // count))
    return sorted(folder.glob("model-*.gguf"))


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_any_part_opens_the_whole_model(tmp_path: Path, chosen: int) -> None:
    paths = parts_of(tmp_path)
    assert [path.name for path in paths] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with Checkpoint.open(paths[chosen]) as source:
        assert [header.path for header in source.files] == paths
        header = source.files[0]
        assert header.extents.keys() == source.extents.keys() == {f"t{i}" for i in range(5)}
        assert header.metadata["name"] == "model"
        for i in range(5):
            read = source.read(source.extents[f"t{i}"]).view(torch.float16)
            assert read.tolist() == [i] * 8
        assert source.file_of(source.extents["t4"]).path == paths[2]
        assert {source.home(one).path for one in source.extents.values()} == set(paths)


def test_parts_that_are_missing_or_others(tmp_path: Path) -> None:
    paths = parts_of(tmp_path)
    paths[2].rename(tmp_path / "away")
    with pytest.raises(BadFile, match=r"is part 1 of 3, and beside it lacks model-00003-of-00003\.gguf"):
        Checkpoint.open(paths[0])
    (tmp_path / "other").mkdir()
    two = parts_of(tmp_path / "other", 2)
    two[1].rename(paths[2])
    with pytest.raises(BadFile, match=r"00003-of-00003\.gguf: is not part 3 of 3 of the model of which model-00001"):
        Checkpoint.open(paths[1])
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(BadFile, match="is not part 3 of 3"):
        Checkpoint.open(paths[0])


def test_a_part_under_another_name(tmp_path: Path) -> None:
    paths = parts_of(tmp_path)
    lost = paths[0].rename(tmp_path / "wan.gguf")
    with pytest.raises(BadFile, match=r"is part 1 of a model in 3 files, .* as model-00001-of-00003\.gguf does"):
        Checkpoint.open(lost)
    swapped = lost.rename(tmp_path / "model-00002-of-00004.gguf")
    with pytest.raises(BadFile, match="is part 1 of a model in 3 files"):
        Checkpoint.open(swapped)


def split(no: Any, count: Any, tensors: Any = None) -> dict[str, Any]:
    told = {"split.no": no, "split.count": count}
    return told if tensors is None else {**told, "split.tensors.count": tensors}


@pytest.mark.parametrize(
    "values",
    [split(0, 0), split(1, 1), split(2, 2), split("0", 2), split(0, "2"), split(0, 2, "1"), split(0, 5000), {"split.count": 2}],
)  # fmt: skip
def test_a_part_that_cannot_be(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(BadFile, match="says impossible things of which part"):
        Checkpoint.open(file_of(tmp_path / "a-00001-of-00002.gguf", values, [A]))


def test_one_part_is_a_model(tmp_path: Path) -> None:
    with Checkpoint.open(file_of(tmp_path / "a.gguf", split(0, 1, 7), [A])) as source:
        assert len(source.files) == 1 and source.extents.keys() == {"a"}


def test_parts_must_hold_what_they_say(tmp_path: Path) -> None:
    one = file_of(tmp_path / "a-00001-of-00002.gguf", split(0, 2, 3), [A])
    file_of(tmp_path / "a-00002-of-00002.gguf", split(1, 2, 3), [B])
    with pytest.raises(BadFile, match="says that all parts together have 3 tensors, and they have 2"):
        Checkpoint.open(one)
    file_of(tmp_path / "a-00002-of-00002.gguf", split(1, 2, 2), [B])
    with pytest.raises(BadFile, match="is not part 2 of 2"):
        Checkpoint.open(one)
    for number, tensors in ((0, [A]), (1, [A])):
        file_of(tmp_path / f"a-0000{number + 1}-of-00002.gguf", split(number, 2), tensors)
    with pytest.raises(BadFile, match="has a tensor 'a', and so has"):
        Checkpoint.open(one)


def test_which_reader_is_told_by_the_first_bytes(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.safetensors", {}, [A])
    header: WeightFile = read_header(path)
    assert header.extents["a"].dtype == "F16"

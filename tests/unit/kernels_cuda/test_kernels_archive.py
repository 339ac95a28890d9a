"""The archive: what is written comes back; truncated, altered, foreign and stale ones are refused in words."""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.kernels_cuda import device_code
from fusestream.kernels_cuda.binary import archive, unpacked
from fusestream.kernels_cuda.binary.arch import preference
from fusestream.kernels_cuda.build import matrix
from fusestream.kernels_cuda.errors import ArchiveError, BuildError, CodeUnavailable
from fusestream.kernels_cuda.ledger import LEDGER

FACTS = {"k": {"parameters": 8, "registers": 32}}
BUILT = {
    "sm_75": {"a": (b"turing a", FACTS), "b": (b"turing b" * 100, FACTS)},
    "sm_90": {"a": (b"hopper a", FACTS), "b": (b"hopper b", FACTS)},
    "sm_90a": {"b": (b"hopper own b", FACTS)},
    "compute_80": {"a": (b"// ptx a", FACTS), "b": (b"// ptx b", FACTS)},
}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "kernels.tar.xz"
    archive.write(file, BUILT, source_hash="abc", compiler="NVRTC 12.9")
    return file


def test_what_is_written_comes_back(path):
    manifest, units = archive.read_units(path, ["sm_75"])
    assert (manifest.source_hash, manifest.compiler, list(manifest.variants)) == ("abc", "NVRTC 12.9", list(BUILT))
    assert {name: (unit.variant, unit.code, unit.kernels) for name, unit in units.items()} == {
        "a": ("sm_75", b"turing a", FACTS),
        "b": ("sm_75", b"turing b" * 100, FACTS),
    }


def test_each_unit_comes_in_its_best_variant(path):
    _, units = archive.read_units(path, ["sm_90a", "sm_90", "compute_80"])
    assert {name: unit.code for name, unit in units.items()} == {"a": b"hopper a", "b": b"hopper own b"}
    _, units = archive.read_units(path, ["sm_120", "compute_80"])
    assert {unit.variant for unit in units.values()} == {"compute_80"}
    assert archive.read_units(path, ["sm_61"])[1] == {}


def test_all_of_it_comes_back(path):
    manifest, built = archive.read_all(path)
    assert built == BUILT and manifest.units == {}
    repack(path, lambda members: [(n, b"evil" if n == "sm_90a/b.cubin" else body) for n, body in members])
    with pytest.raises(ArchiveError, match=r"sm_90a/b.cubin is not what the manifest says"):
        archive.read_all(path)


def test_the_same_code_gives_the_same_bytes(path, tmp_path):
    again = tmp_path / "again.tar.xz"
    archive.write(again, BUILT, source_hash="abc", compiler="NVRTC 12.9")
    assert again.read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.tar.xz", "kernels.tar.xz"]


def test_an_archive_that_cannot_take_its_place_leaves_nothing(tmp_path):
    (tmp_path / "kernels.tar.xz").mkdir()
    with pytest.raises(OSError):
        archive.write(tmp_path / "kernels.tar.xz", BUILT, source_hash="abc", compiler="NVRTC 12.9", filters=None)
    assert [p.name for p in tmp_path.iterdir()] == ["kernels.tar.xz"]


def test_any_tar_can_list_it(path):
    with tarfile.open(path) as tar:
        assert tar.getnames()[:3] == ["manifest.json", "sm_75/a.cubin", "sm_75/b.cubin"]
        assert tar.getnames()[-1] == "compute_80/b.ptx"


def test_missing():
    from pathlib import Path

    with pytest.raises(ArchiveError, match=r"none.tar.xz does not exist"):
        archive.read_manifest(Path("/nowhere/none.tar.xz"))


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_no_truncation_passes(tmp_path_factory, data):
    """Cut anywhere: either the fault is found, or the cut was behind all the code there is."""
    file = tmp_path_factory.mktemp("archive") / "kernels.tar.xz"
    archive.write(file, BUILT, source_hash="abc", compiler="NVRTC 12.9")
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    check_found_or_whole(file)


def check_found_or_whole(file):
    try:
        _, units = archive.read_units(file, ["compute_80"])
    except ArchiveError:
        return
    assert {name: unit.code for name, unit in units.items()} == {"a": b"// ptx a", "b": b"// ptx b"}


def test_half_an_archive_is_damaged(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ArchiveError, match=r"kernels.tar.xz is damaged"):
        archive.read_manifest(path)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_no_flipped_bit_passes(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("archive") / "kernels.tar.xz"
    archive.write(file, BUILT, source_hash="abc", compiler="NVRTC 12.9")
    whole = bytearray(file.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(whole)
    check_found_or_whole(file)


def repack(path, change):
    """The archive with its members changed by hand, and a valid xz around them."""
    with tarfile.open(path) as tar:
        members = [(info.name, tar.extractfile(info).read()) for info in tar]
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, body in change(members):
            info = tarfile.TarInfo(name)
            info.size = len(body)
            tar.addfile(info, io.BytesIO(body))
    path.write_bytes(lzma.compress(raw.getvalue()))


def test_altered_code_is_refused(path):
    repack(path, lambda members: [(n, b"evil" if n == "sm_75/b.cubin" else body) for n, body in members])
    with pytest.raises(ArchiveError, match=r"sm_75/b.cubin is not what the manifest says"):
        archive.read_units(path, ["sm_75"])
    assert archive.read_units(path, ["sm_90"])[1]  # what was not touched still serves


def test_a_missing_member_is_named(path):
    repack(path, lambda members: [m for m in members if m[0] != "sm_75/b.cubin"])
    with pytest.raises(ArchiveError, match=r"lacks sm_75/b.cubin"):
        archive.read_units(path, ["sm_75"])


def manifest_with(variants):
    return json.dumps({"format": 1, "source_hash": "", "compiler": "", "variants": variants}).encode()


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (b"{", "manifest cannot be read"),
        (b"{}", "manifest cannot be read"),
        (b"[]", "manifest cannot be read"),
        (json.dumps({"format": 2}).encode(), "has format 2, this version reads 1"),
        (manifest_with({"sm_75": {"a": {}}}), "cannot be read"),
        (manifest_with({"sm_75": 3}), "cannot be read"),
        (manifest_with({"sm_75": {"a": {"sha256": "", "size": 1, "kernels": {"k": 3}}}}), "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
    ],
)
def test_a_bad_manifest(path, manifest, words):
    repack(path, lambda members: [("manifest.json", manifest), *members[1:]])
    with pytest.raises(ArchiveError, match=words):
        archive.read_manifest(path)


def test_the_manifest_must_come_first(path):
    repack(path, lambda members: members[::-1])
    with pytest.raises(ArchiveError, match=r"begins with compute_80/b.ptx"):
        archive.read_manifest(path)


HOPPER = ["sm_90a", "sm_90", "compute_80"]


def test_a_cards_code_is_unpacked_once(path, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = unpacked.read_units(path, HOPPER, cache)
    assert first[1] == archive.read_units(path, HOPPER)[1]
    assert first[0] == archive.read_manifest(path)
    read, files = archive.read_units, []
    monkeypatch.setattr(archive, "read_units", lambda file, preference: files.append(file) or read(file, preference))
    again = unpacked.read_units(path, HOPPER, cache)
    assert again[1] == first[1] and again[0].source_hash == "abc" and again[0].compiler == "NVRTC 12.9"
    assert [file.parent for file in files] == [cache]
    assert unpacked.read_units(path, ["sm_75"], cache)[1]["a"].code == b"turing a", "another card has its own"


def test_a_damaged_copy_is_not_used(path, tmp_path):
    want = unpacked.read_units(path, HOPPER, tmp_path)[1]
    kept = next(tmp_path.glob("unpacked-*.tar"))
    whole = kept.read_bytes()
    at = whole.index(b"hopper a")
    for bad in (b"", whole[:at], whole.replace(b"hopper a", b"copper a"), b"no tar at all" * 100):
        LEDGER.clear()
        kept.write_bytes(bad)
        assert unpacked.read_units(path, HOPPER, tmp_path)[1] == want
        assert kept.read_bytes() == whole, "and it is made anew"
        (said,) = LEDGER.messages
        assert str(kept) in said and "unpacked again" in said


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes that have a path")
def test_a_pipe_in_the_place_of_a_copy_keeps_nobody_waiting(path, tmp_path):
    want = unpacked.read_units(path, HOPPER, tmp_path)[1]
    kept = next(tmp_path.glob("unpacked-*.tar"))
    kept.unlink()
    os.mkfifo(kept)
    assert unpacked.read_units(path, HOPPER, tmp_path)[1] == want
    assert kept.is_file()


def test_copies_of_an_earlier_archive_go(path, tmp_path):
    unpacked.read_units(path, HOPPER, tmp_path)
    old = set(tmp_path.glob("unpacked-*.tar"))
    archive.write(path, BUILT, source_hash="def", compiler="NVRTC 12.9")
    unpacked.read_units(path, HOPPER, tmp_path)
    assert not old & set(tmp_path.glob("unpacked-*.tar")) and len(set(tmp_path.glob("unpacked-*.tar"))) == 1


def test_a_folder_that_cannot_be_written_is_no_error(path, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert unpacked.read_units(path, HOPPER, tmp_path / "file" / "cache")[1]["a"].code == b"hopper a"


def no_compiler():
    raise BuildError("NVRTC is not installed")


def test_a_stale_archive_is_never_run(path, monkeypatch, tmp_path):
    """It says so, and with no compiler it says what is then left."""
    monkeypatch.setattr(device_code, "nvrtc", no_compiler)
    LEDGER.clear()
    with pytest.raises(CodeUnavailable, match=r"is stale: it was built from sources abc.*NVRTC is not installed"):
        device_code.load(["sm_75"], prebuilt=path, cache=tmp_path)
    assert [m.split(":")[0] for m in LEDGER.messages] == ["No kernels", "Prebuilt kernels are not used"]


def test_a_current_archive_is_used(tmp_path):
    file = tmp_path / "kernels.tar.xz"
    archive.write(file, BUILT, source_hash=matrix.source_hash(), compiler="NVRTC 12.9")
    code = device_code.load(["sm_75"], prebuilt=file, cache=tmp_path)
    assert code.origin == "prebuilt archive, NVRTC 12.9"
    assert code.units["a"].code == b"turing a"


def test_an_archive_without_this_card_is_no_use(tmp_path, monkeypatch):
    monkeypatch.setattr(device_code, "nvrtc", no_compiler)
    file = tmp_path / "kernels.tar.xz"
    archive.write(file, {"sm_75": BUILT["sm_75"]}, source_hash=matrix.source_hash(), compiler="NVRTC 12.9")
    with pytest.raises(CodeUnavailable, match="holds none of sm_90, compute_80"):
        device_code.load(["sm_90", "compute_80"], prebuilt=file, cache=tmp_path)


@pytest.mark.skipif(not archive.PREBUILT.exists(), reason="no archive in this tree: kernels_cuda/build")
def test_the_archive_in_the_tree_is_current():
    """Built from the sources beside it, by the compiler whose cubins load from driver 525 on, for every card."""
    manifest = archive.read_manifest(archive.PREBUILT)
    assert manifest.source_hash == matrix.source_hash(), "stale: run kernels_cuda/build"
    assert manifest.compiler.startswith("NVRTC 12.")
    for capability in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0)):
        assert archive.read_units(archive.PREBUILT, preference(capability))[1].keys() == set(matrix.units())


@pytest.mark.parametrize("isa", ["sm_75", "sm_80"])
def test_what_is_forced_is_there_too(isa, tmp_path, monkeypatch):
    """Turing's code on a newer card lies in an archive of its own: no card takes it by itself."""
    monkeypatch.delenv("FUSESTREAM_ARCHIVE", raising=False)
    monkeypatch.setattr(device_code, "_compiled_here", lambda *_: pytest.fail("it is not there"))
    code = device_code.load(preference((9, 0), isa), cache=tmp_path)
    assert code.units.keys() == set(matrix.units()) and code.origin.startswith("prebuilt archive")
    assert {unit.variant for unit in code.units.values()} == {f"compute_{isa[3:]}"}


def test_the_source_hash_sees_every_change(tmp_path):
    for path in (*matrix.SOURCES.glob("*.cu"), *matrix.SOURCES.glob("*.cuh")):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = matrix.hash_sources(tmp_path)
    assert first == matrix.source_hash()
    one = tmp_path / "vector.cuh"
    text = one.read_bytes()
    one.write_bytes(text.replace(b"\n", b"\r\n"))
    assert matrix.hash_sources(tmp_path) == first, "line endings are the checkout's, not the source's"
    one.write_bytes(text + b"\n")
    assert matrix.hash_sources(tmp_path) != first
    one.write_bytes(text)
    (tmp_path / "more.cuh").write_bytes(b"")
    assert matrix.hash_sources(tmp_path) != first


def test_a_units_hash_sees_what_it_is_made_from_and_nothing_else(tmp_path):
    for path in (*matrix.SOURCES.glob("*.cu"), *matrix.SOURCES.glob("*.cuh")):
        (tmp_path / path.name).write_bytes(path.read_bytes())

    def hashes():
        return {unit: matrix.unit_hash(unit, tmp_path) for unit in matrix.units(tmp_path)}

    def changed(name):
        before, path = hashes(), tmp_path / name
        path.write_bytes(path.read_bytes() + b"// more\n")
        return {unit for unit, own in hashes().items() if own != before[unit]}

    assert hashes() == {unit: matrix.unit_hash(unit) for unit in matrix.units()}
    assert changed("to_half.cu") == {"to_half"}
    of_linear = {unit for unit in matrix.units() if any(h.name == "linear_core.cuh" for h in matrix.headers(unit))}
    assert changed("linear_core.cuh") == of_linear and 0 < len(of_linear) < len(matrix.units())

"""Damaged GGUF headers: one kept case of every answer, and some fresh damage on every run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fuzz.gguf_headers
from fusestream.memory import BadFile, WeightFile, read_header
from fuzz.campaign import Finding, write
from fuzz.gguf_headers import corpus, judge, run, seeds
from fuzz.mutate_gguf import mutate

KEPT = {name: (case, says) for name, case, says in corpus()}


@pytest.mark.parametrize("name", KEPT)
def test_kept_case(tmp_path: Path, name: str) -> None:
    case, says = KEPT[name]
    path = write(tmp_path / "case.gguf", case)
    assert judge(path).removeprefix(f"{path}: ").startswith(says)


def test_the_corpus_is_small_and_names_are_unique() -> None:
    assert fuzz.gguf_headers.CORPUS.stat().st_size < 100_000
    assert len(KEPT) == len(list(corpus())) > 30


def test_fresh_damage(tmp_path: Path) -> None:
    """Other damage every time; a failure prints the seed that repeats it."""
    seed = random.SystemRandom().getrandbits(32)
    start = time.perf_counter()
    total = 0
    while total < 2000 and time.perf_counter() - start < 4:
        answers, findings = run(seed + total, 100, seeds(), tmp_path)
        assert not findings, findings
        assert sum(answers.values()) == 100
        total += 100
    assert total >= 100


def test_sound_files_are_accepted(tmp_path: Path) -> None:
    for sound in seeds():
        assert judge(write(tmp_path / "x.gguf", sound.case())) == "accepted"


def test_damage_is_repeatable_and_of_every_kind() -> None:
    sound = seeds()[2]
    first = [mutate(random.Random(i), sound) for i in range(300)]
    assert first == [mutate(random.Random(i), sound) for i in range(300)]
    assert len(set(first)) > 200
    assert sound.case() in first  # some of it none, so that sound files are seen too


def overlooking(path: Path) -> WeightFile:
    """A reader with a fault: of a file that is wrong it tells what is in another one."""
    try:
        return read_header(path)
    except BadFile:
        return read_header(write(path.with_name("fine"), seeds()[1].case()))


def crash(path: Path) -> WeightFile:
    raise KeyError(str(path))


def refuse(path: Path) -> WeightFile:
    raise BadFile(f"{path}: the name 'a' comes twice among its tensors")


@pytest.mark.parametrize(
    ("reader", "is_sound", "finding"),
    [(overlooking, False, "wrong path"), (crash, True, "KeyError"), (refuse, True, "the package reads it")],
)
def test_the_fuzzer_sees_a_faulty_reader(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reader: Callable[[Path], WeightFile],
    is_sound: bool,
    finding: str,
) -> None:
    monkeypatch.setattr(fuzz.gguf_headers, "read_header", reader)
    case = seeds()[1].case() if is_sound else KEPT["its metadata entry comes twice the file is"][0]
    with pytest.raises(Finding, match=finding):
        judge(write(tmp_path / "x.gguf", case))

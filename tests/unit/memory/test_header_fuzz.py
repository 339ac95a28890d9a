"""What the fuzzer once found or should never find, again; and some fresh damage on every run."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

import fuzz.headers
from fusestream.memory import BadFile, read_header
from fuzz.campaign import Finding, write
from fuzz.headers import build, corpus, judge, run, seeds
from fuzz.mutate import mutate

KEPT = {name: (case, says) for name, case, says in corpus()}


@pytest.mark.parametrize("name", KEPT)
def test_kept_case(tmp_path: Path, name: str) -> None:
    case, says = KEPT[name]
    path = write(tmp_path / "case.safetensors", case)
    assert judge(path).removeprefix(f"{path}: ").startswith(says)


def test_the_corpus_is_small_and_names_are_unique() -> None:
    assert fuzz.headers.CORPUS.stat().st_size < 100_000
    assert len(KEPT) == len(list(corpus())) > 50


def test_fresh_damage(tmp_path: Path) -> None:
    """Other damage every time; a failure prints the seed that repeats it."""
    seed = random.SystemRandom().getrandbits(32)
    sound = seeds() + [
        (case.head[8:], case.size - len(case.head)) for case, _ in KEPT.values() if len(case.head) < 2000
    ]
    start = time.perf_counter()
    total = 0
    while total < 2000 and time.perf_counter() - start < 4:
        answers, findings = run(seed + total, 100, sound, tmp_path)
        assert not findings, findings
        assert sum(answers.values()) == 100
        total += 100
    assert total >= 100


def test_damage_is_repeatable_and_of_every_kind() -> None:
    first = [mutate(random.Random(i), *seeds()[3]) for i in range(300)]
    assert first == [mutate(random.Random(i), *seeds()[3]) for i in range(300)]
    assert len(set(first)) > 200
    assert build(*seeds()[3]) in first  # some of it none, so that sound files are seen too


def blind(path: Path) -> Any:
    """A reader with a fault: it does not look whether anything is wrong."""
    try:
        return read_header(path)
    except BadFile:
        return read_header(write(path.with_name("fine"), build(b"{}", 0)))


def crash(path: Path) -> Any:
    raise KeyError(str(path))


def nameless(path: Path) -> Any:
    raise BadFile("something is wrong")


def chatty(path: Path) -> Any:
    raise BadFile(str(path) + "!" * 2000)


def refuse(path: Path) -> Any:
    raise BadFile(f"{path}: no")


def slow(path: Path) -> Any:
    start = time.thread_time()
    while time.thread_time() - start < 0.05:
        pass
    return read_header(path)


@pytest.mark.parametrize(
    ("reader", "header", "finding"),
    [
        (blind, b'{"a":1}', "wrong path or size"),
        (crash, b"{}", "KeyError"),
        (nameless, b"{}", "does not name the file"),
        (chatty, b"{}", "a message of 20"),
        (refuse, b"{}", "the library reads it"),
        (slow, b"{}", "took"),
    ],
)
def test_the_fuzzer_sees_a_faulty_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Any, header: bytes, finding: str
) -> None:
    monkeypatch.setattr(fuzz.headers, "read_header", reader)
    monkeypatch.setattr(fuzz.headers, "SLOW", 0.01)
    with pytest.raises(Finding, match=finding):
        judge(write(tmp_path / "x.safetensors", build(header, 0)))

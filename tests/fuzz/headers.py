"""Hands damaged safetensors headers to `read_header` and watches what it does.

    python tests/fuzz/headers.py --count 1000000 --seed 1 --jobs 2

The rule: a header whose promises hold, checked again here by other code, or `BadFile` with the file's name in a short
message. Never another exception, never a second, never much memory. The safetensors library is the second opinion: where
the two differ, the reason must stand in `STRICTER` or `LAXER`.

What it found: the first reader failed 324 of 20 000 cases. It took shapes that overflow before a zero or that torch cannot
hold, names and metadata with half a character, NaN and numbers out of range, nesting as deep as the process allowed, and it
answered with messages as long as the header. By hand, beside it: quadratic time for a name twice among many (2 s for 0.2 MB)
and for the product of many sizes (2 s for 0.6 MB), 420 MB of memory for 18 MB of empty lists. All of it is in the corpus.
Since then 1 250 000 cases (seeds 11 to 15, 250 000 each) and 450 000 (21 to 23) with the safetensors library 0.8.0 beside
it: nothing.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import math
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).resolve().parent / "corpus" / "headers.jsonl"
if __name__ == "__main__":  # called as a script: nobody has loaded the pack or put `tests` on the path
    sys.path.insert(0, str(ROOT / "tests"))
    from bed import pack

    pack.load()

from fusestream.memory import BadFile, WeightFile, read_header  # noqa: E402
from fuzz.mutate import Case, build, mutate  # noqa: E402

SLOW = 1.0
LONGEST_MESSAGE = 1000
# Written out again on purpose: the fuzzer must not believe the table it tests.
BYTES_OF_8 = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

# The library takes these, we do not.
STRICTER = {
    "the name .* comes twice": "which of the two would be meant",
    "lacks its dtype, shape or data_offsets": "the library also reads an entry written as a list",
    "unknown dtype {": 'the library also reads {"F16": null}',
    "nested more than": "a header is three levels deep; 128 of them are somebody's trick",
    "impossible shape": "torch counts in signed 64 bits, the library in unsigned ones",
}
# We take these, the library does not: all of it lies in fields that nobody reads.
LAXER = {
    "hex escape|surrogate": "half of a character, inside a list",
}


class Finding(AssertionError):
    """`read_header` did what it must never do."""


def write(path: Path, case: Case) -> Path:
    with path.open("wb", buffering=0) as file:
        file.write(case.head[: case.size])
        file.truncate(case.size)
    return path


def judge(path: Path) -> str:
    """`read_header`'s answer, held to the rule: "accepted", or the message it refused with."""
    start = time.thread_time()  # its own work: a busy machine is no finding
    verdict = "accepted"
    try:
        header = read_header(path)
    except BadFile as error:
        verdict = str(error)
        if str(path) not in verdict:
            raise Finding(f"the message does not name the file: {verdict[:200]!r}") from error
        if len(verdict) > LONGEST_MESSAGE:
            raise Finding(f"a message of {len(verdict)} characters: {verdict[:100]!r}") from error
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {str(error)[:200]}") from error
    if (took := time.thread_time() - start) > SLOW:
        raise Finding(f"took {took:.1f} s")
    if verdict == "accepted":
        check_promises(path, header)
    compare(path, verdict)
    return verdict


def need(truth: bool, what: str) -> None:
    if not truth:
        raise Finding(what)


def check_promises(path: Path, header: WeightFile) -> None:
    """What an accepted header promises, told anew from the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        pairs = json.loads(file.read(length), object_pairs_hook=lambda pairs: pairs)
    size = path.stat().st_size
    entries = {name: entry for name, entry in pairs if name != "__metadata__"}
    need(header.path == path and header.size == size, "wrong path or size")
    need(len({name for name, _ in pairs}) == len(pairs), "a name comes twice")
    need(set(header.extents) == set(entries), "other names than in the file")
    at = 8 + length
    for name, extent in header.extents.items():
        fields = dict(entries[name])
        need(name == extent.name and is_text(name), "a name that is no text")
        need(extent.dtype == fields["dtype"] and list(extent.shape) == fields["shape"], "another dtype or shape")
        need(all(type(n) is int and 0 <= n < 2**63 for n in extent.shape), "a size that torch cannot hold")
        need([extent.begin - 8 - length, extent.end - 8 - length] == fields["data_offsets"], "other offsets")
        need(extent.begin == at <= extent.end <= size, "extents that do not lie back to back")
        elements = 0 if 0 in extent.shape else math.prod(extent.shape)
        need(extent.nbytes * 8 == elements * BYTES_OF_8[extent.dtype], "a size that dtype and shape do not give")
        at = extent.end
    need(at == size, "bytes after the last extent")
    need(all(map(is_text, (*header.metadata, *header.metadata.values()))), "metadata that is no text")


def is_text(value: object) -> bool:
    """Text that can be shown and written: JSON can spell half a character, which no encoding can."""
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode()


def compare(path: Path, verdict: str) -> None:
    """The library's opinion on the same file."""
    try:
        with safe_open(path, framework="np") as file:
            file.keys()
    except SafetensorError as error:
        if verdict == "accepted" and not any(re.search(why, str(error)) for why in LAXER):
            raise Finding(f"accepted, but the library says {str(error)[:200]}") from error
        return
    except OSError:  # nothing to map: an empty file
        return
    if verdict != "accepted" and not any(re.search(why, verdict) for why in STRICTER):
        raise Finding(f"the library reads it; refused with {verdict[:200]}")


def tensor(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def seeds() -> list[tuple[bytes, int]]:
    """Sound headers made by hand, with the size of what follows them."""
    tables: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({"__metadata__": {"format": "pt"}}, 0),
        ({"a": tensor(0, 4)}, 4),
        ({"a": tensor(0, 4, [2], "F16"), "b": tensor(4, 28, [2, 3], "F32"), "__metadata__": {"format": "pt"}}, 28),
        ({"b": tensor(4, 6, [1], "BF16"), "a": tensor(0, 4, [2, 2], "F8_E4M3"), "s": tensor(6, 10, [], "F32")}, 10),
        ({"a": tensor(0, 0, [0]), "b": tensor(0, 3), "c": tensor(3, 3, [5, 0], "F16")}, 3),
        (
            {"big": tensor(0, 2**33, [2**16, 2**16], "F16"), "é\U0001f600": tensor(2**33, 2**33 + 1, [2], "F4")},
            2**33 + 1,
        ),
    ]
    return [(json.dumps(table, ensure_ascii=i % 2 == 0).encode(), body) for i, (table, body) in enumerate(tables)]


def real_seeds(folder: Path) -> list[tuple[bytes, int]]:
    """The headers of the tiny checkpoints, each as far as its first few tensors, and some of them whole."""
    from fusestream import checkpoints

    found = []
    for name, kind in checkpoints.KINDS.items():
        for storage in kind.storages:
            if storage in ("bf16", "fp32") or (name.startswith("wan_") and name not in ("wan_t2v", "wan_vae")):
                continue
            header = read_header(checkpoints.write(name, folder, storage))
            start = min(extent.begin for extent in header.extents.values())
            for keep in (2, 5, len(header.extents)) if name in ("lora_conv", "wan_t2v") else (2, 5):
                some = list(header.extents.values())[:keep]
                table: dict[str, Any] = {"__metadata__": dict(header.metadata)} if header.metadata else {}
                table |= {e.name: tensor(e.begin - start, e.end - start, list(e.shape), e.dtype) for e in some}
                found.append((json.dumps(table, separators=(",", ":")).encode(), some[-1].end - start))
    return found


def corpus() -> Iterator[tuple[str, Case, str]]:
    """The kept cases: a name, the file, and how the answer must begin."""
    for line in CORPUS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        head = base64.b64decode(row["head"]) if "head" in row else None
        if head is None:  # long and dull: a piece, so many times, between two ends
            header = (row["begin"] + row["piece"] * row["times"] + row["end"]).encode()
            yield row["name"], build(header, row["body"]), row["says"]
        else:
            yield row["name"], Case(head, row["size"]), row["says"]


def reason(path: Path, verdict: str) -> str:
    """The message without what changes from case to case, to count by."""
    text = verdict.replace(str(path), "FILE")
    text = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[.*\]|\{.*\}|\(.*\)|-?\d+", "_", text)
    return text[:90]


def run(
    seed: int, count: int, sound: list[tuple[bytes, int]], folder: Path
) -> tuple[Counter[str], list[dict[str, Any]]]:
    rng = random.Random(seed)
    path = folder / f"case{seed}.safetensors"
    answers: Counter[str] = Counter()
    findings: list[dict[str, Any]] = []
    for i in range(count):
        case = mutate(rng, *rng.choice(sound))
        write(path, case)
        watch = i % 500 == 0
        if watch:
            tracemalloc.start()
        try:
            answers[reason(path, judge(path))] += 1
            if watch and (peak := tracemalloc.get_traced_memory()[1]) > 1_000_000 + 100 * len(case.head):
                raise Finding(f"{peak} bytes of memory for a header of {len(case.head)}")
        except Finding as finding:
            head = base64.b64encode(case.head).decode() if len(case.head) < 200_000 else None
            findings.append({"seed": seed, "case": i, "why": str(finding), "size": case.size, "head": head})
            answers[f"FINDING {reason(path, str(finding))}"] += 1
        finally:
            if watch:
                tracemalloc.stop()
    path.unlink(missing_ok=True)
    return answers, findings


def limit_memory(extra: int = 2 << 30) -> None:
    """No case may make this process grow by more: where the system can enforce it, it does."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        # sparse files of 8 GiB are mapped by the library: address space that costs nothing
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (now + extra + (9 << 30),) * 2)


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--count", type=int, default=100_000)
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--jobs", type=int, default=1)
    cli.add_argument("--keep", type=Path, help="write what was found here, one JSON row each")
    options = cli.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        folder = Path(name)
        sound = seeds() * 6 + real_seeds(folder)
        limit_memory()
        each = 10_000
        jobs = [
            (options.seed * 1_000_000 + i, min(each, options.count - i * each), sound, folder)
            for i in range(-(-options.count // each))
        ]
        answers: Counter[str] = Counter()
        findings: list[dict[str, Any]] = []
        start = time.perf_counter()
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            for part, found in pool.starmap(run, jobs, chunksize=1):
                answers += part
                findings += found
        took = time.perf_counter() - start
    for answer, times in answers.most_common():
        print(f"{times:9} {answer}")
    print(f"{options.count} cases in {took:.0f} s, {len(findings)} findings")
    if options.keep and findings:
        options.keep.write_text("".join(json.dumps(row) + "\n" for row in findings), encoding="utf-8")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())

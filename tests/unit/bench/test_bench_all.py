"""All rows of the bench in parts: every row once, no part too long, nothing lost, and a try of every group on the CPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import comfy.cli_args
import pytest

from bed.depth import is_thorough
from fusestream.bench import all as bench_all
from fusestream.bench import kernels, pager, report, sources
from fusestream.bench.end_to_end import disk, files, machine, parts, real, results, rows, runner, weights
from fusestream.bench.end_to_end.rows import Row

ROOT = Path(__file__).resolve().parents[3]


# -------------------------------------------------------------------------------------------------------------- the cut


def test_every_row_is_in_one_part_and_every_part_fits_into_a_call() -> None:
    cut = bench_all.planned(is_quick=False)
    names = [row.name for part in cut for row in part.rows]
    assert sorted(names) == sorted(row.name for row in rows.all_rows())
    assert all(part.seconds < 8.8 * 60 for part in cut), "minutes of a part"
    assert sum(part.seconds for part in cut) <= 57 * 60, "minutes of the whole"
    assert [part.kind for part in cut[-2:]] == ["kernels", "pager"]


def test_what_is_promised_can_be_measured_alone(tmp_path: Path) -> None:
    """In parts of their own, so that none is nearly empty."""
    cut = bench_all.planned(is_quick=False, promised=True)
    names = {row.name for part in cut for row in part.rows}
    assert names == {row.name for row in rows.all_rows() if row.is_promised}
    assert {"1.3B 480x832x81", "14B 480x480x17, 3 GiB free", "14B 720x1280x81", "Qwen3-VL 2B write a token"} <= names
    assert not {"1.3B 480x832x33", "1.3B 480x832x81, fast", "14B 480x480x17, 4 GiB of RAM"} & names
    assert sum(part.seconds for part in cut) < 36 * 60
    assert not rows.unpromised(next(row for row in rows.all_rows() if row.is_promised)).is_promised


def test_what_a_user_asks_first_comes_first() -> None:
    firsts = [row.group for part in parts.parts_of(rows.all_rows()) for row in part.rows]
    places = {group: firsts.index(group) for group in parts.ORDER}
    assert set(firsts) == set(parts.ORDER), "a group that has no place is never measured"
    assert places["table"] == 0 and places["budget"] < places["switches"]


def test_rows_of_one_file_lie_together() -> None:
    for part in parts.parts_of(rows.all_rows()):
        files = [parts.by_file(row) for row in part.rows]
        assert files == sorted(files)


def test_a_row_costs_more_with_more_of_everything() -> None:
    small, large = rows.sampling("wan13", 480, 480, 17, 3), rows.sampling("wan14", 480, 832, 81, 3)
    assert parts.row_seconds(small) < parts.row_seconds(large)
    off = rows.Side(kernels="off")
    assert parts.turn_seconds(large, "ours", off) > parts.turn_seconds(large, "ours", rows.OURS)
    assert parts.turn_seconds(large, "exact", rows.Side()) > parts.turn_seconds(large, "stock", rows.STOCK)
    picture = Row("klein4", "picture", 1024, 1024, steps=4, kind="flux2")
    assert parts.row_seconds(picture) > parts.row_seconds(Row("klein4", "sample", 1024, 1024, steps=4))
    video = Row("wan13", "video", 480, 832, 81, 10)
    assert parts.row_seconds(video) > parts.row_seconds(rows.sampling("wan13", 480, 832, 81, 10))


def test_parts_are_asked_for_by_number() -> None:
    cut = bench_all.planned(is_quick=False)
    assert bench_all.chosen(cut, []) == cut
    assert bench_all.chosen(cut, ["2", f"1/{len(cut)}"]) == [cut[1], cut[0]]
    assert bench_all.chosen(cut, ["left"]) == []
    for wrong, said in (("0", "no part '0'"), ("99", "no part '99'"), ("x", "no part 'x'"), ("1/99", "not 99")):
        with pytest.raises(ValueError, match=said):
            bench_all.chosen(cut, [wrong])
    assert "part 1/" in bench_all.listed(cut, {}) and "14B 480x832x81" in bench_all.listed(cut, {})


def test_rows_that_the_file_has_can_be_left_out(tmp_path: Path) -> None:
    cut, into = bench_all.planned(is_quick=False), tmp_path / "card.json"
    assert bench_all.without_measured(cut, into) == cut
    gone = cut[0].rows[1]
    results.merge(into, {"name": gone.name})
    left = bench_all.without_measured(cut, into)
    assert len(left) == len(cut) and left[1:] == cut[1:]
    assert set(cut[0].rows) - set(left[0].rows) == {gone} and left[0].seconds < cut[0].seconds


def test_rows_of_other_sources_are_stale_and_can_be_measured_again(tmp_path: Path) -> None:
    cut, into = bench_all.planned(is_quick=False), tmp_path / "card.json"
    current, stale, unknown = cut[0].rows[:3]
    now = sources.of_models((model for model, _ in current.files), current.work)
    for row, environment in ((current, {"sources": now}), (stale, {"sources": "0" * 16}), (unknown, {})):
        results.merge(into, {"name": row.name, "environment": environment})
    rows_of_kernels = [{"environment": {"sources": digest}} for digest in (sources.of_folders(sources.KERNELS), "1")]
    results.write(into, results.read(into) | {"kernels": {"rows": rows_of_kernels}})
    states = bench_all.states_of(cut, into)
    assert [states[row.name].name for row in (current, stale, unknown, cut[0].rows[3])] == [
        "CURRENT", "STALE", "UNKNOWN", "MISSING",
    ]  # fmt: skip
    assert (states["kernels"].name, states["pager"].name) == ("STALE", "MISSING"), "as their worst row"
    whole = [row for row in rows_of_kernels if row["environment"]["sources"] != "1"]
    for left, state in ((0, "CURRENT"), (7, "MISSING")):
        results.write(into, results.read(into) | {"kernels": {"left": left, "rows": whole}})
        assert bench_all.states_of(cut, into)["kernels"].name == state
        after = bench_all.without_measured(cut, into, is_stale_too=True)
        assert [part.kind for part in after] == [part.kind for part in cut]
        assert (next(part for part in after if part.kind == "kernels").own_s == 0) == (not left)
    results.write(into, results.read(into) | {"kernels": {"rows": rows_of_kernels}})
    told = bench_all.listed(cut, states).splitlines()
    assert [line for line in told if line.endswith(f" s  {current.name}")]
    assert [line for line in told if line.endswith(f" s  {stale.name}  (measured with other sources)")]
    assert "rows measured with other sources: 1 of " in "\n".join(told)
    again = bench_all.without_measured(cut, into, is_stale_too=True)
    assert set(cut[0].rows) - set(again[0].rows) == {current} and again[1:] == cut[1:]
    assert set(cut[0].rows) - set(bench_all.without_measured(cut, into)[0].rows) == {current, stale, unknown}


def test_a_row_rests_on_its_own_family_and_what_all_share(tmp_path: Path) -> None:
    assert {model for row in rows.all_rows() for model, _ in row.files} <= sources.FAMILY.keys() == rows.TITLES.keys()
    assert all((ROOT / sources.FAMILIES / family).is_dir() for family in sources.FAMILY.values())
    names = ("wan/block.py", "wan/vae/x.py", "flux2/single.py", "unet/net.py", "image_vae/tiny.py")
    shared = ("gpu/a.py", "kernels_cuda/src/a.cu", "fusion/b.py", "fusion/networks/style/net.py")
    for name in (*shared, *(f"{sources.FAMILIES}/{name}" for name in names)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")

    def changed(name: str) -> set[str]:
        """Whose rows are stale behind a change of this file."""
        asked = {"wan": ("t5", "wan13", "vae"), "flux": ("klein4",), "both": ("klein9", "vae"), "live": ("sd15",)}
        before = {who: sources.of_models(models, who, tmp_path) for who, models in asked.items()}
        (tmp_path / name).write_text("two")
        return {who for who, models in asked.items() if sources.of_models(models, who, tmp_path) != before[who]}

    assert changed("kernels_cuda/src/a.cu") == changed("fusion/b.py") == {"wan", "flux", "both", "live"}
    assert not changed("fusion/networks/style/net.py"), "no row of whole models has a style network"
    assert changed("fusion/families/wan/vae/x.py") == {"wan", "both"}
    assert changed("fusion/families/flux2/single.py") == {"flux", "both"}
    assert changed("fusion/families/unet/net.py") == changed("fusion/families/image_vae/tiny.py") == {"live"}
    assert changed("kernels_cuda/README.md") == set()


PYTHON = '''"""A module."""

import os  # for nothing


def of(x: str) -> str:
    """Doc # string."""
    return x + "# no comment"  # a comment
'''
CUDA = """// head
__global__ void f(float* x) {  /* one
   and two */ x[0] = 1'000;  // a line
    printf("// no comment");
}
"""


@pytest.mark.parametrize(
    ("name", "text", "explained", "other"),
    [
        (
            "a.py",
            PYTHON,
            PYTHON.replace("a comment", "another\n\n").replace("Doc", "Longer\n    doc"),
            ("x + ", "x * "),
        ),
        (
            "a.cu",
            CUDA,
            CUDA.replace("head", "other").replace("one\n", "1\n\n").replace("a line", ""),
            ("1'000", "2'000"),
        ),
        ("b.py", PYTHON, PYTHON.replace("\n", "\r\n"), ("# no comment", "# none")),
        ("b.cu", CUDA, CUDA.replace("\n", "\r\n"), ("// no comment", "// none")),
    ],
)
def test_explaining_a_file_makes_no_measurement_old(
    name: str, text: str, explained: str, other: tuple[str, str], tmp_path: Path
) -> None:
    found = []
    for one in (text, explained, text.replace(*other)):
        (tmp_path / "gpu").mkdir(exist_ok=True)
        (tmp_path / "gpu" / name).write_bytes(one.encode())
        found.append(sources.digest("gpu", tmp_path))
    assert found[0] == found[1] != found[2]


def test_quick_tries_every_group_and_storage() -> None:
    (part,) = bench_all.planned(is_quick=True)
    assert {row.group for row in part.rows} | {"table"} == set(parts.ORDER)
    assert {row.work for row in part.rows} == {row.work for row in rows.all_rows()}
    assert {row.storage for row in part.rows} == {row.storage for row in rows.all_rows()}
    assert all(row.frames <= 5 for row in part.rows)


def test_stock_knows_the_switches_that_rows_give_it() -> None:
    """Tries on the CPU start stock without them: one process for all rows."""
    for row in rows.all_rows():
        for _, side in row.sides:
            comfy.cli_args.parser.parse_args(list(side.comfy))


# ------------------------------------------------------------------------------------------------------ what a part does


class Clock:
    """Time that only work takes."""

    def __init__(self) -> None:
        self.now = 0.0


class Made(runner.Bench):
    """A bench whose processes take as long as they are told to, and find nothing but that."""

    def __init__(self, folder: Path, clock: Clock, slower: float) -> None:
        options = Namespace(
            folder=folder, ahead=4, quick=False, shared=False, side="both", repeats=1, accuracy=False, free=8.0, limit=9.0,
            keep=True, results=folder / "results.json", tail=3, real=None, within=0.0,
        )  # fmt: skip
        super().__init__(options)
        self.clock, self.slower = clock, slower
        self.files.make = lambda model, storage: str(folder / f"{model}_{storage}.safetensors")
        self.worked: list[str] = []
        self.dropped = 0

    def process_of(self, turn: runner.Turn) -> Any:
        return turn_process(turn)

    def finish(self, process: Any, word: dict[str, Any]) -> dict[str, Any]:
        turn = process.turn
        self.clock.now += self.slower * parts.turn_seconds(turn.row, turn.who, turn.side)
        self.worked.append(f"{turn.row.name}: {turn.who}")
        self.sample_of(turn.who).write_bytes(b"\0\0\x80?")
        return {"s": [2.0, 1.0], "load s": 0.1, "peak GiB": 6.0, "finite": True, "took s": 1.0}

    def drop(self, process: Any) -> None:
        self.dropped += 1


def turn_process(turn: runner.Turn) -> Any:
    return Namespace(turn=turn, wait_ready=lambda seconds: None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(runner.time, "perf_counter", lambda: made.now)
    return made


def some_rows() -> list[Row]:
    return [row for row in rows.all_rows() if row.group == "table"][:5]


def test_rows_that_do_not_fit_are_left_and_none_is_begun_that_must_be_killed(tmp_path: Path, clock: Clock) -> None:
    some = some_rows()
    cost = {row.name: parts.row_seconds(row) for row in some}
    bench = Made(tmp_path, clock, slower=1.0)
    limit = sum(sorted(cost.values())[:3]) + 1.0
    found = bench.measure(some, limit)
    assert clock.now <= limit
    assert {one["name"] for one in found} | {row.name for row in bench.left} == set(cost)
    assert found and bench.left and bench.dropped, "a process that waited is not kept waiting"
    assert all(len([one for one in bench.worked if one.startswith(f"{row['name']}: ")]) == 2 for row in found)
    later = bench.measure(bench.left, None)
    assert not bench.left and {one["name"] for one in (*found, *later)} == set(cost)


def test_a_slower_card_is_noticed(tmp_path: Path, clock: Clock) -> None:
    some = [row for row in rows.all_rows() if row.group in ("switches", "budget")]
    each = [parts.row_seconds(row) for row in some]
    whole = sum(each)
    assert whole > 2 * (runner.LEARNED_S + max(each)), "it is noticed before the time is up"
    bench = Made(tmp_path, clock, slower=2.0)
    bench.measure(some, whole)
    assert bench.left and clock.now <= whole


def test_what_is_left_is_the_next_parts_and_is_known_in_the_file(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    some = some_rows()
    bench = Made(tmp_path, clock, slower=1.0)
    into = bench.options.results
    bench.options.minutes = (sum(map(parts.row_seconds, some[:2])) + 1) / 60
    bench.options.part = ["1"]
    everything = bench_all.All(bench.options, into)
    everything.models(bench, parts.Part("models", tuple(some)))
    left = results.rows_left(into)
    assert 0 < len(left) < len(some) and "no time for" in capsys.readouterr().out
    bench.options.minutes = 0.0
    everything.models(bench, parts.Part("models", ()))
    assert results.rows_left(into) == []
    assert {row["name"] for row in results.read(into)["models"]["rows"]} == {row.name for row in some}


def test_a_call_ends_within_the_minutes_it_was_given(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its parts are given: rows that would not fit are left, and a bench of its own is not begun."""
    some = some_rows()
    bench = Made(tmp_path, clock, slower=1.0)
    bench.options.minutes, bench.options.part = 8.8, ["1", "2", "3"]
    bench.options.within = (sum(map(parts.row_seconds, some[:3])) + 1) / 60
    everything = bench_all.All(bench.options, bench.options.results)
    cut = [
        parts.Part("models", tuple(some[:2])),
        parts.Part("models", tuple(some[2:])),
        parts.Part("pager", own_s=190.0),
    ]
    everything.run([*cut], bench)
    assert clock.now <= bench.options.within * 60
    done = {row["name"] for row in results.read(bench.options.results)["models"]["rows"]}
    left = set(results.rows_left(bench.options.results))
    assert {row.name for row in some[:2]} <= done and left and done | left == {row.name for row in some}
    assert "no time for pager" in capsys.readouterr().out and not everything.failed


def test_an_interrupted_part_keeps_what_it_has(tmp_path: Path, clock: Clock) -> None:
    some = some_rows()
    bench = Made(tmp_path, clock, slower=1.0)
    bench.options.minutes, bench.options.part = 0.0, []
    finish = bench.finish

    def interrupted(process: Any, word: dict[str, Any]) -> dict[str, Any]:
        if len(bench.worked) == 5:
            raise SystemExit(143)
        return finish(process, word)

    bench.finish = interrupted  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        bench_all.All(bench.options, bench.options.results).models(bench, parts.Part("models", tuple(some)))
    kept = results.read(bench.options.results)["models"]
    assert len(kept["rows"]) == 2 and len(kept["left"]) == len(some) - 2


def test_files_of_parts_measured_elsewhere_merge(tmp_path: Path) -> None:
    card, one, other = (tmp_path / f"{name}.json" for name in ("card", "one", "other"))
    measured = json.loads((ROOT / "bench" / "results" / "nvidia-h200.json").read_text(encoding="utf-8"))
    results.write(card, {"kernels": measured["kernels"], "pager": measured["pager"]})
    side = {"s": 1.0, "peak GiB": 6.0}
    results.merge(one, {"name": "1.3B 480x832x81", "ours": side, "environment": {"card": "NVIDIA H200"}})
    results.note_left(one, [], ["VAE decode 480x832x81", "VAE encode 480x832x81"])
    results.merge(other, {"name": "VAE decode 480x832x81", "ours": side})
    assert results.merge_file(card, one) == 1 and results.merge_file(card, other) == 1
    assert results.rows_left(card) == ["VAE encode 480x832x81"]
    first, _ = results.read(card)["models"]["rows"]
    assert first["ours"]["share of bound"] > 0, "bounds are of the card's own rates"
    assert machine.card_results(one).name == "nvidia-h200.json"
    with pytest.raises(SystemExit, match="does not tell its card"):
        machine.card_results(other)


# -------------------------------------------------------------------------------------------------------- own checkpoints


def checkpoint(path: Path, shapes: dict[str, tuple[int, ...]], storage: str = "F16") -> Path:
    """A file with a true header and a hole for its tensors."""
    size = {"F16": 2, "BF16": 2, "F8_E4M3": 1}[storage]
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + size * math.prod(shape)
        header[name] = {"dtype": storage, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return path


def shapes_of(model: str) -> dict[str, tuple[int, ...]]:
    """Without most of the blocks: holes too take room on some systems."""
    kept = {name: tuple(spec.shape) for name, spec in weights.table(model).items()}
    return {name: shape for name, shape in kept.items() if not name.startswith("blocks.") or name[7:9] == "0."}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    checkpoint(folder / "a finetune.safetensors", shapes_of("wan14"), "BF16")
    checkpoint(folder / "wan2.1_t2v_14B_fp8_e4m3fn.safetensors", shapes_of("wan14"), "F8_E4M3")
    checkpoint(folder / "wan2.1_t2v_14B_fp16.safetensors", shapes_of("wan14"))
    checkpoint(folder / "vae" / "any name.safetensors", shapes_of("vae"))
    checkpoint(folder / "i2v.safetensors", shapes_of("wan14") | {"patch_embedding.weight": (5120, 36, 1, 2, 2)})
    (folder / "broken.safetensors").write_bytes(b"<html>not found</html>")
    return folder


def test_own_checkpoints_are_told_by_their_tensors(own: Path) -> None:
    said: list[str] = []
    found = real.find(own, said.append)
    assert {(one.model, one.storage) for one in found} == {
        ("wan14", "fp16"), ("wan14", "bf16"), ("wan14", "fp8_e4m3fn"), ("vae", "fp16"),
    }  # fmt: skip
    assert len(said) == 2 and all("not used" in one for one in said)
    exact, other = real.chosen(found, "wan14", "fp8_e4m3fn"), real.chosen(found, "vae", "fp16")
    assert exact is not None and exact.path.name == "wan2.1_t2v_14B_fp8_e4m3fn.safetensors"
    assert other is not None and other.path.name == "any name.safetensors"
    with pytest.raises(NotADirectoryError, match="is no folder"):
        real.find(own / "none", said.append)


def test_a_row_of_fp16_takes_what_there_is_and_a_published_name_first(own: Path) -> None:
    (own / "wan2.1_t2v_14B_fp16.safetensors").unlink()
    found = real.find(own, lambda text: None)
    taken = real.chosen(found, "wan14", "fp16")
    assert taken is not None and taken.path.name == "wan2.1_t2v_14B_fp8_e4m3fn.safetensors"
    assert real.chosen(found, "wan13", "fp16") is None and real.chosen(found, "vae", "fp8_e4m3fn") is None


def test_rows_are_never_half_real_and_own_files_are_left_alone(own: Path, tmp_path: Path, clock: Clock) -> None:
    bench = Made(tmp_path, clock, slower=1.0)
    bench.files.own_folder, bench.files.keep = own, False
    served = bench.files.served_by_own(rows.all_rows())
    assert served and {row.model for row in served} == {"wan14", "vae"}
    assert not any(row.work == "video" for row in served), "there is no text encoder"
    row = next(row for row in served if row.storage == "fp8_e4m3fn")
    paths = bench.files.of(row)
    assert paths == {"wan14": str(own / "wan2.1_t2v_14B_fp8_e4m3fn.safetensors")}
    before = sorted(own.rglob("*"))
    bench.files.drop(())
    assert bench.files.paths == {} and sorted(own.rglob("*")) == before
    (found,) = bench.measure([row])
    assert found["weights"] == {"wan14": "wan2.1_t2v_14B_fp8_e4m3fn.safetensors"}
    assert machine.real_results(Path("results/a.json")) == Path("results/real/a.json")


@pytest.mark.parametrize(
    ("named", "is_quick", "real", "wanted"),
    [
        (None, False, None, "results/card.json"),
        (None, False, "files", "results/real/card.json"),
        (None, True, None, str(runner.QUICK_RESULTS)),
        ("mine.json", False, "files", "mine.json"),
    ],
)
def test_figures_go_where_the_options_say(named: str | None, is_quick: bool, real: str | None, wanted: str) -> None:
    options = Namespace(results=named and Path(named), quick=is_quick, real=real and Path(real))
    assert runner.results_file(options, lambda: Path("results/card.json")) == Path(wanted)


# ---------------------------------------------------------------------------------------------------------- smaller parts


def test_files_are_made_once_and_go_when_nobody_needs_them(tmp_path: Path) -> None:
    made: list[str] = []

    def make(model: str, storage: str) -> str:
        path = tmp_path / f"{model}_{storage}.safetensors"
        path.write_text("weights")
        made.append(path.name)
        return str(path)

    few = [row for row in rows.all_rows() if row.model in ("wan13", "vae")]
    plain, video = few[0], next(row for row in few if row.work == "video")
    held = files.Files(tmp_path, make, print)  # type: ignore[arg-type]
    held.of(plain), held.of(plain), held.of(video)
    assert sorted(made) == ["t5_fp16.safetensors", "vae_fp16.safetensors", "wan13_fp16.safetensors"]
    held.drop([plain])
    assert [path.name for path in tmp_path.iterdir()] == ["wan13_fp16.safetensors"]
    held.drop([])
    assert not list(tmp_path.iterdir())
    keeping = files.Files(tmp_path, make, print, keep=True)  # type: ignore[arg-type]
    keeping.of(plain)
    keeping.drop([])
    later = files.Files(tmp_path, make, print)  # type: ignore[arg-type]
    assert later.of(plain) and len(made) == 4, "what a call kept the next one uses"


def test_a_cold_file_is_copied_to_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, elsewhere = tmp_path / "shm", tmp_path / "disk"
    source.mkdir(), elsewhere.mkdir()
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(elsewhere))
    monkeypatch.setattr(files, "is_in_ram", lambda path: path.is_relative_to(source))
    (source / "wan13_fp16.safetensors").write_text("weights")
    held = files.Files(source, lambda model, storage: "", print, keep=True)
    cold = next(row for row in rows.all_rows() if row.cold)
    path = Path(held.of(cold)["wan13"])
    assert path.parent.parent == elsewhere and path.read_text() == "weights"
    held.drop([])
    assert not path.exists() and (source / "wan13_fp16.safetensors").exists()
    monkeypatch.setattr(files, "is_in_ram", lambda path: True)
    with pytest.raises(SystemExit, match="set TMPDIR"):
        held.of(cold)


def test_without_a_card_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.ask_card("name") == "" and machine.processes_ahead(False) == 1
    with pytest.raises(SystemExit, match="by --results"):
        machine.card_results()


def test_a_disk_is_told_from_memory(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("dev / ext4 rw 0 0\nshm /dev/shm tmpfs rw 0 0\nd /dev/shm/disk ext4 rw 0 0\n")
    assert disk.is_in_ram(Path("/dev/shm/a/b"), str(mounts))
    assert not disk.is_in_ram(Path("/dev/shm/disk/b"), str(mounts)) and not disk.is_in_ram(Path("/tmp"), str(mounts))
    assert not disk.is_in_ram(Path("/tmp"), str(tmp_path / "none"))


def test_torch_compile_is_timed_where_readme_shows_it() -> None:
    every = kernels.all_rows(None)
    shown = [row for row in every if kernels.compiles(row, "readme")]
    assert len(report.CHOSEN) <= len(shown) < len(every) / 3
    assert not any(kernels.compiles(row, "none") for row in every)


# ------------------------------------------------------------------------------------------------------------- in earnest


def test_every_group_runs_on_the_cpu(tmp_path: Path) -> None:
    """Stock and ours on tiny checkpoints, one process for each side, with the results of both compared."""
    into = tmp_path / "results.json"
    (part,) = bench_all.planned(is_quick=True)
    tried = ("pictures", "windows", *(("peers",) if is_thorough() else ()))  # torch.compile takes a minute
    last = {row.group: row.name for row in part.rows if row.group in tried}
    (asked,) = bench_all.with_rows([part], list(last.values()))
    wanted = part.rows if is_thorough() else asked.rows
    only = [] if is_thorough() else [word for row in wanted for word in ("--only", row.name)]
    command = [sys.executable, str(ROOT / "bench"), "all", *only, "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--results", str(into)], check=False, capture_output=True, text=True, env=os.environ,
        timeout=600 if is_thorough() else 300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["name"]: row for row in results.read(into)["models"]["rows"]}
    assert found.keys() == {row.name for row in wanted} and all(row["quick"] for row in found.values())
    for row in wanted:
        for who, _ in row.sides:
            side = found[row.name][who]
            if who == "SageAttention":  # the row is there, and tells why this one is not
                assert side["error"] == "Unavailable: SageAttention runs on NVIDIA cards alone"
                continue
            assert "error" not in side and side["finite"] and side["s"] > 0 and side["spread"] > 0, (row.name, who)
            if who != "ours":
                assert "pager" not in side
            elif row.model.startswith(("wan", "klein", "z_image", "sd15", "sdxl")):
                assert side["pager"]["backend"].startswith("host"), row.name
        if {"stock", "ours"} <= dict(row.sides).keys():
            # A stream in fp32, as stock has it here, Z-Image surrounds by products in fp16.
            allowed = 1e-3 if row.model == "z_image" else 1e-5
            if row.model == "z_image" and row.storage == "int8_convrot":
                allowed = 2e-2  # which is rounded to 8 bits on the way
            if row.needs_pack:
                allowed = 1e-2  # it unpacks in another type
            assert found[row.name]["accuracy"]["ours against stock"] < allowed, row.name
    assert "these figures mean nothing" in done.stdout and not list(tmp_path.glob("*.safetensors"))


def test_nothing_is_called_cold_where_there_is_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Asked(Exception):
        pass

    def read_seconds(*_: Any) -> float:
        raise Asked

    file: Any = Namespace(path=tmp_path / "weights", layer_bytes=1, read_seconds=read_seconds)
    empty: Any = None
    monkeypatch.setattr(pager, "is_in_ram", lambda _: False)
    with pytest.raises(Asked):
        pager.cold(empty, file, 1, 1)
    monkeypatch.setattr(pager, "is_in_ram", lambda path: path == file.path)
    pager.cold(empty, file, 1, 1)
    assert "left out" in capsys.readouterr().out

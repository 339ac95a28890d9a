"""The lab without a card: its device code compiles, what it multiplies sparse is what was dense, and what it tells of a run."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusestream.bench.lab import barrier, chain, cli, device, norm_linear, sparse, table
from fusestream.bench.lab.case import Found
from fusestream.kernels_cuda.build.nvrtc import find
from fusestream.kernels_cuda.errors import BuildError

README = Path(device.__file__).with_name("README.md")
# The kernels of a unit that the lab launches, and the struct that each is given.
LAUNCHED: dict[str, dict[str, Any]] = {
    "chain": {"chain_step": chain.CHAIN},
    "chain_from_device": {
        "chain_by_one": chain.CHAIN_OF_STEPS,
        "chain_by_next": chain.CHAIN_OF_STEPS,
        "chain_again": chain.AGAIN,
    },
    "decode_barrier": {f"decode_at_once_128_{g}": barrier.BARRIER_DECODE for g in (1, 2, 4)},
    "group_norm_barrier": dict.fromkeys(("group_norm_at_once", "group_norm_held"), barrier.BARRIER_NORM),
    "norm_linear": {
        **{f"norm_linear_{cut.rows}x{cut.columns}": norm_linear.NORM_LINEAR for cut in norm_linear.TILES},
        **{f"row_{what}_{v}": norm_linear.ROWS for what in ("factors", "largest") for v in norm_linear.PACKS},
        "folded_weights": norm_linear.FOLD,
    },
    "sparse_rows": {f"sparse_rows_{m}": sparse.SPARSE for m in sparse.TOGETHER},
}
AROUND_SHIPPED = ("decode_barrier", "group_norm_barrier", "norm_linear")  # whose machine code takes seconds
needs_nvrtc = pytest.mark.skipif(find() is None, reason="NVRTC is not installed")
on_linux = pytest.mark.skipif(sys.platform == "win32", reason="the device runtime's archive is Linux'")


def takes(unit: str, variant: str) -> None:
    """The unit compiles, and its kernels take what the lab gives them."""
    kernels = device.built(unit, variant).kernels
    for name, struct in LAUNCHED[unit].items():
        assert kernels[name]["parameters"] == ctypes.sizeof(struct), name


def test_every_unit_is_launched_from() -> None:
    assert set(LAUNCHED) == set(device.units())
    assert {unit for case in cli.ALL for unit in case.units} == set(device.units())


@needs_nvrtc
@on_linux
@pytest.mark.parametrize("unit", LAUNCHED)
def test_a_unit_compiles_and_takes_what_it_is_given(unit: str) -> None:
    takes(unit, "compute_90" if unit in AROUND_SHIPPED else "sm_90")


@needs_nvrtc
@on_linux
def test_code_is_kept_for_a_machine_without_a_compiler_and_taken_for_these_sources_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "units", lambda: ["chain", "chain_from_device"])
    assert cli.main([f"--build={tmp_path}"]) == 0
    compiled = device.built("chain", "sm_90")
    monkeypatch.setattr(device, "build", None)
    kept = device.built("chain", "sm_90", tmp_path)
    assert (kept.code, kept.kernels) == (compiled.code, compiled.kernels)
    assert "chain_again" in device.built("chain_from_device", "sm_90", tmp_path).kernels
    monkeypatch.setattr(device, "source_hash", lambda: "others")
    with pytest.raises(BuildError, match="other sources"):
        device.built("chain", "sm_90", tmp_path)


@needs_nvrtc
@pytest.mark.deep
@pytest.mark.parametrize("unit", AROUND_SHIPPED)
def test_machine_code_around_shipped_code_keeps_its_registers(unit: str) -> None:
    takes(unit, "sm_90")
    kernels = device.built(unit, "sm_90").kernels
    # The barrier takes the room of some registers from a kernel that has none left.
    assert all(kernels[name]["stack"] <= 64 for name in LAUNCHED[unit])


def test_a_weight_in_eights_is_the_weight() -> None:
    torch.manual_seed(0)
    weight = sparse.with_zeros(9, 72, 0.7, "cpu")
    weight[4] = 0
    eights = sparse.Eights.of(weight)
    found = torch.zeros_like(weight)
    for row, (first, last) in enumerate(zip(eights.starts[:-1].tolist(), eights.starts[1:].tolist(), strict=True)):
        part = slice(8 * first, 8 * last)
        found[row].index_add_(0, eights.columns[part].long(), eights.values[part])
        assert last - first == -(-int((weight[row] != 0).sum()) // 8)
    assert torch.equal(found, weight)
    assert len(eights.values) == len(eights.columns) == 8 * int(eights.starts[-1])


def test_two_of_four_keeps_the_two_largest() -> None:
    weight = torch.tensor([[3.0, -4.0, 1.0, 2.0, 0.5, 0.0, -0.25, 1.0]])
    assert sparse.two_of_four(weight).tolist() == [[3.0, -4.0, 0.0, 0.0, 0.5, 0.0, 0.0, 1.0]]


def test_compressed_weights_are_the_weight_with_short_indices() -> None:
    weight = sparse.with_zeros(16, 24, 0.5, "cpu")
    rows, columns = sparse.csr(weight), sparse.csc(weight)
    assert torch.equal(rows.to_dense(), weight) and torch.equal(columns.to_dense(), weight)
    assert rows.col_indices().dtype is columns.row_indices().dtype is torch.int32


def test_a_chain_notices_an_order() -> None:
    before, sums = torch.tensor([3, 2**32 - 1]), torch.tensor([[5, 6], [2**40 + 7, -8]])
    one_way, other_way = (chain.mixed(chain.mixed(before, first), then) for first, then in (sums, sums.flip(0)))
    assert not torch.equal(one_way, other_way)
    by_hand = [
        (value * 1664525 + 1013904223 + added) % 2**32 for value, added in zip([3, 2**32 - 1], [5, 6], strict=True)
    ]
    assert chain.mixed(before, sums[0]).tolist() == by_hand


def found(**more: Any) -> Found:
    made = Found(("shipped one", "shipped two"), bounds=("a bound",), parts=("a part",), **more)
    made.seconds |= {"shipped one": 30e-6, "shipped two": 20e-6, "a part": 1e-6}
    return made


def test_the_ratio_is_of_the_quickest_on_either_side() -> None:
    made = found()
    assert made.ratio() is None
    made.seconds |= {"technique": 10e-6, "slower technique": 40e-6, "a bound": 5e-6}
    assert made.ratio() == pytest.approx(2) and made.ratio("bound") == pytest.approx(4)


def test_a_way_that_fails_or_is_wrong_has_no_time_and_the_others_go_on() -> None:
    made, exact = found(), torch.ones(4, dtype=torch.float64)

    def refused(*_: Any) -> torch.Tensor:
        raise RuntimeError("not supported\nin detail")

    assert not made.check("refused", refused, (), exact)
    assert not made.check("wrong", lambda: torch.full((4,), 1.1), (), exact)
    assert not made.check("infinite", lambda: torch.full((4,), float("inf")), (), exact)
    for name in ("refused", "wrong", "infinite"):
        made.time(name, lambda: None, [()], by=lambda *_: 1.0)
    assert made.check("right", lambda: torch.ones(4), (), exact)
    made.time("right", lambda: None, [()], by=lambda *_: 10e-6)
    assert made.ratio() == pytest.approx(2)
    assert set(made.failed) == {"refused", "wrong", "infinite"} and not set(made.failed) & set(made.seconds)


def row(label: str, made: Found) -> dict[str, Any]:
    case = next(case for case in cli.ALL if case.label == label)
    return {
        "technique": case.technique,
        "label": label,
        "predicted": {"ratio": case.predicted.ratio, "why": case.predicted.why},
        **made.as_json(),
        "environment": {"card": "NVIDIA H200"},
    }


def test_tables_say_what_was_measured_and_what_is_a_bound(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured, bounded = found(errors={"technique": 2e-4}, failed={"refused": "RuntimeError: a | b\nin detail"}), found()
    measured.seconds |= {"technique": 10e-6, "a bound": 5e-6}
    bounded.seconds["a bound"] = 16e-6
    path, labels = tmp_path / "lab.json", [barrier.CASES[0].label, norm_linear.CASES[-1].label]
    for label, made in reversed(list(zip(labels, (measured, bounded), strict=True))):
        cli.keep(path, row(label, made))
    assert [one["label"] for one in json.loads(path.read_text())["rows"]] == labels, "in the lab's order"
    assert cli.main(["--markdown", f"--results={path}"]) == 0
    text = capsys.readouterr().out
    assert text.count("(NVIDIA H200)") == 2 and "**Grid barrier**" in text
    first = next(line for line in text.splitlines() if line.startswith(f"| {labels[0]}"))
    assert first.split(" | ")[1:5] == ["20 (shipped two)", "10 (technique)", "2x", "1.1x"]
    assert "refused: RuntimeError: a / b" in first and "in detail" not in first and "2.0e-04" in first
    last = next(line for line in text.splitlines() if line.startswith(f"| {labels[1]}"))
    assert "at most 1.25x, a bound" in last and last.split(" | ")[2] == "-" and "a bound 16 (bound)" in last
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    assert [
        label for label, line in zip(labels, table.short(cli.read(path)["rows"]), strict=True) if label[:50] in line
    ] == labels


def test_the_page_has_every_prediction_as_the_lab_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(cli.ALL) == len({case.label for case in cli.ALL})
    page = README.read_text(encoding="utf-8").splitlines()
    assert [one for one in rows if one not in page] == []


def test_cases_are_chosen_by_words_and_each_label_chooses_itself_alone() -> None:
    assert {case.technique for case in cli.chosen(["grid barrier"])} == {barrier.NAME}
    for case in cli.ALL:
        assert cli.chosen([case.label]) == [case]
    assert cli.chosen(None) == cli.ALL and not cli.chosen(["nothing of this name"])

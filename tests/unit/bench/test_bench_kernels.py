"""The bench of kernels without a card: which rows there are, other libraries beside ours, and errors against float64."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusestream.bench import kernels, kitchen
from fusestream.bench.report.chosen import CHOSEN
from fusestream.bench.row import Row
from fusestream.bench.rows import attention, linear_int8, sparse_attention
from fusestream.kernels_cuda import OPS, KernelPolicy, rows_to_int8
from fusestream.kernels_cuda.ops.attention.attention import SHORT, WIDE
from fusestream.kernels_cuda.policy import PRECISIONS

Q, K, V = (torch.randn(2, 130, 5, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
EXAMPLE = (Q, K, V, *attention.NOTHING_ELSE)


def small(**more: Any) -> Row:
    return replace(attention.ROWS[0], inputs=lambda: EXAMPLE, **more)


class WithoutACard(TorchFunctionMode):
    """What would be made on the card is made without values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = {**(kwargs or {})}
        if str(asked.get("device", "")).startswith("cuda"):
            asked["device"] = "meta"
        return func(*("meta" if str(arg).startswith("cuda") else arg for arg in args), **asked)


def test_every_row_can_be_called_as_it_is_written() -> None:
    """A row whose options its op does not take ends a bench of minutes at that row."""
    for row in kernels.all_rows(None):
        with WithoutACard():
            tensors = row.inputs()
        inspect.signature(row.stock).bind(*tensors, *row.options)
        if row.ours is None:
            inspect.signature(OPS[row.op].reference).bind(*tensors, *row.options)


def test_what_an_error_kept_from_being_measured_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    into = tmp_path / "card.json"
    found = {"op": "gelu", "label": "one"}
    monkeypatch.setattr(kernels, "environment", dict)
    for results, left, wanted in (([found], 3, 3), ([{**found, "label": "two"}], None, 3), ([found], 0, None)):
        kernels.save(into, "kernels", results, {}, left)
        assert json.loads(into.read_text())["kernels"].get("left") == wanted
    assert [row["label"] for row in json.loads(into.read_text())["kernels"]["rows"]] == ["one", "two"]


def test_attention_has_a_row_of_every_tier_that_rounds_differently() -> None:
    found: dict[str, list[str]] = {}
    for row in attention.ROWS:
        label, _, tier = row.label.rpartition(" ")
        assert tier == row.precision
        found.setdefault(label, []).append(tier)
    assert any(label.endswith(": 1x24x4608x4608x128") for label in found)
    for label, tiers in found.items():
        keys, d = (int(size) for size in label.split("x")[-2:])
        wanted = attention.TIERS if keys > SHORT and d < WIDE else attention.AS_FAST
        assert tuple(tiers) == wanted, label


def test_sparse_rows_have_both_shares_and_tiers() -> None:
    labels = [row.label for row in sparse_attention.ROWS]
    assert len(set(labels)) == len(labels) == 12
    for size in ("1x12x32760x32760x128", "2x40x8190x8190x128"):
        for share in ("50% of the blocks", "30% of the blocks", "10% left to means"):
            assert {label.split()[-1] for label in labels if size in label and share in label} == {"precise", "turbo"}


def test_sparse_attention_of_all_blocks_is_attention() -> None:
    run = sparse_attention.sparse(1.0)(KernelPolicy.of("off"))
    exact = attention.exactly(*EXAMPLE)
    torch.testing.assert_close(run(*EXAMPLE)[attention.SAMPLED].double(), exact, atol=1e-5, rtol=1e-5)
    longer = (*torch.randn(3, 1, 1100, 4, 16).unbind(0), *attention.NOTHING_ELSE)
    some = sparse_attention.sparse(0.3)(KernelPolicy.of("off"))(*longer)[attention.SAMPLED].double()
    assert not torch.allclose(some, attention.exactly(*longer), atol=1e-3)
    nearer = sparse_attention.bounded(KernelPolicy.of("off"))(*longer)[attention.SAMPLED].double()
    far = [float((each - attention.exactly(*longer)).norm()) for each in (some, nearer)]
    assert 0 < far[1] < far[0]


def test_errors_are_of_the_part_that_was_computed_exactly() -> None:
    def off(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        found: Tensor = attention.stock(q, k, v, *others) * 1.01
        found[1:] = torch.nan  # not looked at
        return found

    row = small()
    ours = lambda *t: row.stock(*t, *row.options)  # noqa: E731
    found = kernels.errors(row, EXAMPLE, ours, {"theirs": off})
    assert list(found) == ["ours", "stock", "theirs"]
    assert found["ours"] == found["stock"] < 1e-6 and found["theirs"] == pytest.approx(0.01, rel=1e-3)


def test_another_library_that_fails_does_not_take_the_row_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("no kernel")

    monkeypatch.setattr(kernels, "eager_seconds", lambda run, inputs: [run(*one) for one in inputs] and 3e-3)
    row = small(rivals=lambda: {"good": attention.stock, "bad": fails})
    assert kernels.rival_figures(row, [EXAMPLE], 1.5e-3) == {
        "good us": 3e3,
        "good / ours": 2.0,
        "bad failed": "ZeroDivisionError: no kernel",
    }


def test_comfy_kitchen_is_asked_where_it_serves_this_card(monkeypatch: pytest.MonkeyPatch) -> None:
    rivals = (kitchen.int8_attention, kitchen.sparse_attention(0.3))
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    assert [found() for found in rivals] == [{}, {}], "not installed"
    monkeypatch.setitem(sys.modules, "comfy_kitchen", SimpleNamespace())
    assert [found() for found in rivals] == [{}, {}], "an older version"
    shares: list[float] = []

    def int8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def sol(q: Tensor, k: Tensor, v: Tensor, topk_ratio: float) -> Tensor:
        shares.append(topk_ratio)
        return int8(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    has = {"int8_attention_is_available": lambda: True, "sol_attn_is_available": lambda: False}
    library = SimpleNamespace(int8_attention=int8, sol_attn=sol, **has)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", library)
    assert [list(found()) for found in rivals] == [[kitchen.INT8], []], "not on this card"
    library.sol_attn_is_available = lambda: True
    exact = attention.exactly(*EXAMPLE)
    for found in rivals:
        (run,) = found().values()
        got = run(*EXAMPLE, *attention.PLAIN)[attention.SAMPLED]
        torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)
    assert shares == [0.3]


def test_products_in_8_bits_stand_beside_the_other_library() -> None:
    """On small operands of each row's kind: errors are those of rounding activations, and the other library computes the same."""
    pytest.importorskip("comfy_kitchen")
    rivals = kitchen.int8_linear()
    for row in linear_int8.ROWS:
        assert row.op in OPS and row.precision in PRECISIONS
        if row.exact is None:
            continue
        rotation = row.options[3]
        x, bias = torch.randn(1, 130, 512).half(), torch.randn(48).half()
        weight, scales = rows_to_int8(torch.randn(48, 512).half() / 22, rotation=rotation)
        example = (x, None, weight, scales, bias, None, None)
        ours = lambda *t, row=row: OPS[row.op].reference(*t, *row.options)  # noqa: E731
        found = kernels.errors(row, example, ours, rivals)
        assert list(found) == ["ours", "stock", kitchen.INT8]
        assert all(0.002 < error < 0.02 for error in found.values()), found
        assert found["ours"] <= 1.25 * found[kitchen.INT8], "the same arithmetic, on operands this small"
    labels = [(row.op, row.label) for row in linear_int8.ROWS]
    assert len(set(labels)) == len(labels) and any("32760x5120x13824 rotation 256" in label for _, label in labels)


def test_bytes_are_not_held_to_the_ceiling_of_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    row = small(flops=1e12)
    assert kernels.matrix_figures(row, None, 1.0, 2.0)["share of ceiling"] == pytest.approx(1e12 / 645e12)
    assert "share of ceiling" not in kernels.matrix_figures(replace(row, in_bytes=True), None, 1.0, 2.0)


def test_torch_compile_is_timed_where_the_pages_show_it() -> None:
    every = kernels.all_rows(None)
    shown = [row for row in every if kernels.compiles(row, "pages")]
    assert len(CHOSEN) <= len(shown) < len(every) / 3
    assert not any(kernels.compiles(row, "none") for row in every)

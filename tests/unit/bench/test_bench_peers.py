"""Rows beside stock with its users' switches: its own node compiles, what does not serve is not timed as if it had, and a peer that
cannot run or that wins is told."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ldm.modules.attention
import comfy.sd
import pytest
import torch

from fusestream import checkpoints
from fusestream.bench.end_to_end import peers, results, row_types, rows, run, runner, worker
from fusestream.bench.end_to_end.row_types import Row, Side
from fusestream.bench.report import beside, groups, tables

RESULTS = sorted((Path(__file__).resolve().parents[3] / "bench" / "results").glob("nvidia-*.json"))
COMPILED, WITH_SAGE = Side(compiled=True), Side(comfy=(row_types.SAGE,))
RESULT = {"load s": 1.0, "peak GiB": 6.5, "finite": True, "free GiB": 8.0}


def some_row() -> Row:
    return next(row for row in rows.peers() if row.model == "wan13")


# ------------------------------------------------------------------------------------------------------------------ rows


def test_peers_stand_beside_stock_and_ours_in_one_row() -> None:
    found = {row.name: [who for who, _ in row.sides] for row in rows.peers()}
    both = ["stock", "ours", "torch.compile", "SageAttention"]
    assert found == {
        "1.3B 480x832x81, beside torch.compile and SageAttention": both,
        "klein 4B 1024x1024, beside torch.compile and SageAttention": both,
        "SDXL 1024x1024, beside torch.compile and SageAttention": both,
        "14B 480x480x17, beside SageAttention": ["stock", "ours", "SageAttention"],
    }
    names = {row.name for row in rows.all_rows()}
    for row in rows.peers():
        assert row.plain in names and not row.is_promised
        assert all(peers.name_of(side) == who for who, side in row.peers)
    assert peers.name_of(row_types.STOCK) is None and peers.name_of(row_types.OURS) is None


def test_a_job_has_its_own_side_alone() -> None:
    row = some_row()
    bench: Any = SimpleNamespace(
        options=SimpleNamespace(free=8.0, quick=True), free=lambda row: 8.0, sample_of=lambda who: Path(f"{who}.f32")
    )
    turn = runner.Turn(row, "torch.compile", COMPILED, 0)
    job = json.loads(json.dumps(runner.Bench.job(bench, turn)))
    assert not {"stock", "ours", "peers"} & job["row"].keys()
    assert run.row_of(job).name == row.name and run.side_of(job).compiled


# ------------------------------------------------------------------------------------------------------ what may be missing


def test_a_peer_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"sageattention", "triton"}
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name if name in there else None)
    for side in (row_types.STOCK, COMPILED, WITH_SAGE):
        assert peers.obstacle(side, on_cpu=False) is None
    there.remove("sageattention")
    with pytest.raises(peers.Unavailable, match=r"not installed: pip install --no-deps sageattention==1\.0\.6"):
        peers.require(WITH_SAGE, on_cpu=False)
    assert peers.obstacle(COMPILED, on_cpu=False) is None
    there.clear()
    assert peers.obstacle(COMPILED, on_cpu=False) == "torch.compile needs Triton, which is not installed"
    assert peers.obstacle(row_types.STOCK, on_cpu=False) is None and peers.obstacle(COMPILED, on_cpu=True) is None
    assert peers.obstacle(WITH_SAGE, on_cpu=True) == "SageAttention runs on NVIDIA cards alone"


def test_a_process_says_so_before_stock_would_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sageattention", None)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "sageattention" else name)
    begun: list[object] = []
    monkeypatch.setattr(worker, "begin", begun.append)
    with pytest.raises(peers.Unavailable, match="not installed"):
        worker.work({"side": asdict(WITH_SAGE), "quick": False})
    assert not begun


def test_nothing_is_compiled_when_a_peer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (worker.REMEMBERED, *peers.CACHES.values())
    for name in names:
        monkeypatch.setenv(name, "before")
    for side, own in ((COMPILED, "TORCHINDUCTOR_CACHE_DIR"), (WITH_SAGE, "TRITON_CACHE_DIR")):
        with worker.machine(side):
            assert [name for name in names if os.environ[name] != "before"] == [own]
            empty = Path(os.environ[own])
            assert empty.is_dir() and not list(empty.iterdir())
        assert not empty.exists() and {os.environ[name] for name in names} == {"before"}


# ---------------------------------------------------------------------------------------------------------- what served


def attend(fn: Any, monkeypatch: pytest.MonkeyPatch, calls: int = 2) -> tuple[peers.Peer, torch.Tensor]:
    """Stock's attention, with this as the package's function."""
    attention: Any = comfy.ldm.modules.attention
    monkeypatch.setattr(attention, "sageattn", fn, raising=False)
    monkeypatch.setattr(peers, "require", lambda side, on_cpu: None)
    peer = peers.Peer(WITH_SAGE, on_cpu=True)
    q, k, v = torch.randn(3, 1, 5, 2 * 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    for _ in range(calls):
        out = attention.attention_sage(q, k, v, 2)
    return peer, out - attention.attention_pytorch(q, k, v, 2)


def test_calls_that_sage_attention_serves_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(q: Any, k: Any, v: Any, tensor_layout: str, **_: Any) -> Any:
        assert tensor_layout == "NHD"
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    peer, error = attend(plain, monkeypatch)
    assert error.abs().max() < 1e-5
    assert peer.told()["calls"] == 2 and peer.told()["versions"].startswith("sageattention ")
    assert peer.failure() is None
    unasked, _ = attend(plain, monkeypatch, calls=1)
    unasked.served = 0
    assert unasked.failure() == "SageAttention was asked for no call of this model"


def test_what_stock_serves_in_its_place_is_no_figure_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock takes torch's attention where the package raises, and goes on."""

    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("PassManager::run failed\nand so on")

    peer, error = attend(refuses, monkeypatch)
    assert error.abs().max() < 1e-5
    reason = "RuntimeError: PassManager::run failed"
    assert peer.failure() == f"SageAttention refused 2 of 2 calls, which torch served: {reason}"
    assert peer.told()["calls"] == 0 and peer.told()["refused"] == {reason: 2}


@pytest.mark.deep
def test_the_model_is_compiled_by_stocks_own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node: Any = importlib.import_module("comfy_extras.nodes_torch_compile").TorchCompileModel
    asked: list[str] = []
    execute = node.execute
    monkeypatch.setattr(node, "execute", lambda model, backend: asked.append(backend) or execute(model, backend))
    peer = peers.Peer(COMPILED, on_cpu=True)
    assert peer.failure() == "torch.compile compiled no graph of this model"
    model = peer.model(comfy.sd.load_diffusion_model(str(checkpoints.write("wan_t2v", tmp_path))))
    assert asked == ["eager"] and "torch_compile_kwargs" in model.model_options
    monkeypatch.setattr(peer, "on_cpu", False)
    peer.model(model)
    assert asked == ["eager", "inductor"]
    peers.Peer._graphs()["stats"]["unique_graphs"] = 3
    peers.Peer._graphs()["graph_break"] = Counter({"a call\n of open": 2})
    assert peer.failure() is None and peer.told()["graphs"] == 3 and peer.told()["graph breaks"] == 2
    assert peer.told()["break reasons"] == {"a call of open": 2}
    plain = peers.Peer(row_types.STOCK, on_cpu=True)
    assert plain.model(model) is model and plain.told() == {} and plain.failure() is None


# --------------------------------------------------------------------------------------------------------------- results


def runs(*seconds: float, **others: Any) -> list[dict[str, Any]]:
    return [{"s": list(seconds), **RESULT, **others}]


def result(ours: float = 1.0, **sides: Any) -> dict[str, Any]:
    told = {"versions": "torch 2.11.0, triton 3.6.0", "graphs": 1, "graph breaks": 0}
    plain = {"stock": runs(2.0, 1.5), "ours": runs(1.2, ours), "torch.compile": runs(70.0, 1.1, peer=told)}
    missing = {"SageAttention": [{"error": "Unavailable: SageAttention is not installed: a | b\nc"}]}
    return results.row_result(some_row(), {**plain, **missing, **sides}, {}, 8.0, quick=False)


def test_a_peer_that_failed_is_told_and_fails_no_row() -> None:
    found = result()
    assert (
        found["met"] is None and found["stock / ours"] == 1.5 and found["peers"] == ["torch.compile", "SageAttention"]
    )
    assert found["SageAttention"]["error"].startswith("Unavailable") and found["torch.compile"]["first s"] == 70.0
    assert found["torch.compile"]["side"]["compiled"] is True
    shown = results.line(found)
    assert "torch.compile: 1.1 s, first 70 s" in shown and "SageAttention: Unavailable" in shown
    table = groups.group("peers", {found["name"]: found})
    assert "| ComfyUI, SageAttention | Unavailable: SageAttention is not installed: a / b c | - |" in table
    assert "| ComfyUI, torch.compile | 1.1 s | 1.10x | 70 s | 6.50 GiB | - |" in table
    assert "torch 2.11.0, triton 3.6.0; 1 graphs, 0 breaks between them" in table
    assert "Not measured yet: 3 of 4 rows" in table and "**" not in table
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {8} and "FuseStream | 1 s" in lines[-1]


def test_a_peer_that_wins_is_bold_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(ours=1.2) | {"accuracy": {"torch.compile against stock": 0.00123}}
    key = (found["name"], "torch.compile")
    assert beside.won([some_row()], {found["name"]: found}) == [key]
    table = groups.group("peers", {found["name"]: found})
    assert "| **ComfyUI, torch.compile** | **1.1 s** | **0.92x** | 70 s | 6.50 GiB | 0.0012 |" in table
    assert f"**{found['name']}: ComfyUI, torch.compile is faster**: {beside.UNEXPLAINED}" in table
    monkeypatch.setitem(beside.WHY, key, "it is a test")
    assert "is faster**: it is a test" in groups.group("peers", {found["name"]: found})
    assert not beside.won([some_row()], {found["name"]: result(ours=1.11)}), "a tie within the noise"


def test_stock_that_wins_is_bold_in_every_table() -> None:
    slow = result(ours=1.6)
    assert groups.cells(slow).stock == "**1.5 s**" and groups.cells(result()).stock == "1.5 s"
    assert tables.peer("9 us", 9.0, 10.0) == "**9 us**" and tables.peer("9.9 us", 9.9, 10.0) == "9.9 us"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_peer_that_wins_is_explained(path: Path) -> None:
    found = groups.by_name(json.loads(path.read_text(encoding="utf-8")))
    measured = [row for row in rows.peers() if row.name in found]
    assert set(beside.won(measured, found)) <= beside.WHY.keys(), "say why in bench/report/beside.py, WHY"

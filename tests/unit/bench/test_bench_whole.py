"""Rows from a text to a picture or a video, of VAEs that no family knows, and of the text encoders around: which files they need,
what is asked of them, and how stock decodes in tiles."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sd
import comfy.text_encoders.llama
import comfy.text_encoders.lt
import comfy.text_encoders.minimax
import pytest
import torch

import nodes
from fusestream.bench.end_to_end import (
    bounds,
    packing,
    peers,
    results,
    row_types,
    rows,
    run,
    runner,
    weights,
    worker,
    workflows,
)
from fusestream.bench.end_to_end.row_types import Model, Row, Side
from fusestream.bench.report import groups

WHOLE, VAES, TEXTS = rows.whole(), rows.vaes(), rows.texts()
LARGE = [row for row in WHOLE if row.is_alone]
RESULT = {"load s": 1.0, "peak GiB": 2.5, "finite": True, "free GiB": 8.0}
OPS = comfy.ops.disable_weight_init
HALF = torch.float16


def gigabytes(model: Model, storage: str) -> float:
    return sum(tensor.entry.nbytes for tensor in packing.safetensors(weights.table(model), storage)) / 1e9


# ----------------------------------------------------------------------------------------------------------------- files


def test_a_row_has_the_files_around_its_model() -> None:
    assert {row.model: [model for model, _ in row.files] for row in WHOLE} == {
        "sdxl": ["clip_l", "clip_g", "sdxl", "sdxl_vae"],
        "z_image": ["qwen3", "z_image", "flux_vae"],
        "krea2": ["krea2_te", "krea2", "vae"],
        "qwen_image": ["qwen25_vl", "qwen_image", "vae"],
        "wan14": ["t5", "wan14", "wan14_low", "vae"],
        "ltx23": ["gemma3", "ltx_projection", "ltx23", "ltx_vae"],
        "minimax_h3": ["h3_te", "minimax_h3", "h3_vae"],
    }
    assert {row.model: row.prompts for row in WHOLE if row.prompts > 1} == {"sdxl": 2, "qwen_image": 2}
    assert [len(row.files) for row in TEXTS] == [1, 2, 1], "Gemma 3 has its projection"
    assert [row.model for row in WHOLE if row.around.short] == ["sdxl"]
    video, picture = (next(row for row in rows.all_rows() if row.work == work) for work in ("video", "picture"))
    assert video.files == (("t5", "fp16"), ("wan13", "fp16"), ("vae", "fp16")) and video.prompts == 2
    assert picture.files[0] == ("qwen3", "fp16") and picture.around.takes == 4 and picture.prompts == 1


@pytest.mark.parametrize(
    ("model", "storage", "gb"),
    [
        ("qwen25_vl", "fp8_scaled", 9.38),  # as qwen_2.5_vl_7b_fp8_scaled.safetensors
        ("gemma3", "fp8_scaled", 13.2),  # as gemma_3_12B_it_fp8_scaled.safetensors
        ("h3_te", "nvfp4", 16.4),  # by hand: 24.4e9 in 9 / 16 bytes, the words and the vision tower in halves
        ("t5", "fp8_scaled", 6.73),  # as umt5_xxl_fp8_e4m3fn_scaled.safetensors
    ],
)
def test_files_of_text_encoders_have_the_size_of_published_ones(model: Model, storage: str, gb: float) -> None:
    assert gigabytes(model, storage) == pytest.approx(gb, rel=0.02)


@pytest.mark.parametrize("row", WHOLE, ids=lambda row: row.model)
def test_a_rows_files_fit_a_small_disk(row: Row) -> None:
    assert sum(gigabytes(model, storage) for model, storage in row.files) < 50


@pytest.mark.parametrize("model", bounds.READERS)
def test_encoders_have_the_names_and_shapes_of_stocks(model: Model) -> None:
    with torch.device("meta"):
        net = {
            "qwen25_vl": lambda: comfy.text_encoders.llama.Qwen25_7BVLI({}, HALF, "meta", OPS),
            "gemma3": lambda: comfy.text_encoders.llama.Gemma3_12B({}, HALF, "meta", OPS),
            "h3_te": lambda: comfy.text_encoders.minimax.MiniMaxQwen3VL({}, HALF, "meta", OPS),
        }[model]()
    unread = "lm_head.weight"  # which is in Qwen2.5-VL's file
    found = {name: spec.shape for name, spec in weights.table(model).items() if name != unread}
    assert found == {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    held = sum(
        math.prod(spec.shape)
        for name, spec in weights.table(model).items()
        if name.startswith("model.layers.") and len(spec.shape) > 1
    )
    assert bounds.cost_of(Row(model, "text")).weights == pytest.approx(2 * held, rel=0.01)


def test_words_and_positions_stay_in_halves() -> None:
    for model in ("t5", "qwen25_vl"):
        table: Any = weights.table(model)
        wide = {name for name, spec in table.items() if packing.is_matrix(spec) and not packing.is_in_bytes(name, spec)}
        words = {"t5": "shared.weight", "qwen25_vl": "model.embed_tokens.weight"}[model]
        assert words in wide and not any("_proj" in name or "SelfAttention.q" in name for name in wide)


def test_large_files_are_written_for_their_row_alone() -> None:
    """Few turns start at once else, too; and what a later row needs again lies next to it."""

    def turns(some: list[Row]) -> Iterator[runner.Turn]:
        return (
            runner.Turn(row, who, side, 0) for row in sorted(some, key=row_types.by_file) for who, side in row.sides
        )

    small = [row for row in rows.table() if row.model == "wan13"]
    found = list(runner.batches(turns([*LARGE, *TEXTS, *small]), 20))
    names = [{turn.row.name for turn in batch} for batch in found]
    alone = {row.name for row in (*LARGE, *TEXTS)}
    assert sum(len(batch) for batch in found) == 2 * len(alone) + 2 * len(small)
    assert all(len(batch) == 1 for batch in names if batch & alone) and {row.name for row in small} in names
    of_wan = [row for row in rows.small_machines() if row.model == "wan14"]
    assert [len(batch) for batch in runner.batches(turns(of_wan), 20)] == [3 * len(workflows.FREE)], "of the same files"
    assert [len(batch) for batch in runner.batches(turns(small), 2)] == [2] * len(small)
    order = [row.model for row in sorted([*LARGE, *TEXTS], key=row_types.by_file)]
    for encoder, owner in row_types.OWNERS.items():
        assert abs(order.index(encoder) - order.index(owner)) == 1, encoder


def test_whole_work_that_was_never_measured_is_expected_to_take_longer() -> None:
    whole, part = (runner.expected_seconds(row, {}) for row in (WHOLE[0], rows.table()[0]))
    assert whole == 2 * runner.UNKNOWN_WHOLE_S > part


# --------------------------------------------------------------------------------------------------------------- results


def measured(row: Row, ours: dict[str, Any], tiled: dict[str, Any] | None = None) -> dict[str, Any]:
    sides: dict[str, Any] = {"stock": [{**RESULT, "s": [9.0, 8.0]}], "ours": [ours]}
    if tiled is not None:
        sides["stock in tiles"] = [tiled]
    return results.row_result(row, sides, {}, 8.0, quick=False)


@pytest.mark.parametrize(
    ("seconds", "peak", "tiled", "is_met"),
    [
        (2.0, 2.5, {**RESULT, "s": [4.0, 3.1]}, True),
        (2.0, 3.1, {**RESULT, "s": [4.0, 3.1]}, False),
        (2.0, 2.5, {**RESULT, "s": [4.0, 2.9]}, False),
        (2.0, 2.5, {"error": "out of memory", "peak GiB": 7.9}, True),
    ],
)
def test_a_vae_is_held_against_stock_in_tiles(seconds: float, peak: float, tiled: dict[str, Any], is_met: bool) -> None:
    row = VAES[0]
    found = measured(row, {**RESULT, "s": [3.0, seconds], "peak GiB": peak}, tiled)
    assert found["met"] is is_met and "bounds s" not in found
    assert groups.promised(found) == "1.5x over stock in tiles, peak < 3 GiB"
    page = groups.group("vaes", {row.name: found})
    told = f"{tiled['s'][1] / seconds:.2f}x as fast" if "s" in tiled else "out of memory"
    assert f"- {row.name}, stock in tiles: " in page and told in page


def test_a_side_that_fails_leaves_the_others_figures() -> None:
    parts = [{"text": 1.0, "sampling": 2.0, "frames": 3.0}] * 2
    ours = {**RESULT, "s": [6.0, 5.0], "parts s": parts, "RAM held GiB": 9.5}
    row = WHOLE[-1]
    lost = {"error": "out of memory", "peak GiB": 7.9}
    found = results.row_result(row, {"stock": [lost], "ours": [ours]}, {}, 8.0, quick=False)
    page = groups.group("whole", {row.name: found})
    assert found["ours"]["s"] == 5.0 and found["stock"]["error"] == "out of memory"
    assert "sampling 2 s" in page and "RAM held: FuseStream 9.5 GiB" in page and "out of memory" in page


# ------------------------------------------------------------------------------------------------------------------ runs


def test_tiles_are_those_of_stocks_node(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, int]] = []

    class Vae:
        def temporal_compression_decode(self) -> int:
            return 8

        def spacial_compression_decode(self) -> int:
            return 32

        def decode_tiled(self, latent: Any, **given: int) -> torch.Tensor:
            asked.append(given)
            return torch.zeros(1, 9, 64, 64, 3)

    assert peers.decode_in_tiles(Vae(), torch.zeros(1)).shape == (9, 64, 64, 3)
    assert asked == [{"tile_x": 16, "tile_y": 16, "overlap": 2, "tile_t": 8, "overlap_t": 1}]
    given = nodes.VAEDecodeTiled.INPUT_TYPES()["required"]
    defaults = {name: told[1]["default"] for name, told in given.items() if len(told) > 1}
    assert defaults == {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}


def job(row: Row, who: str, side: Side) -> dict[str, Any]:
    plain = {name: value for name, value in asdict(row).items() if name not in ("stock", "ours", "peers")}
    told: dict[str, Any] = json.loads(json.dumps({"row": plain, "side": asdict(side), "who": who, "quick": False}))
    return told


@pytest.mark.parametrize(
    ("row", "halves"), [(VAES[0], False), (VAES[1], True), (WHOLE[-2], False), (WHOLE[-1], True)], ids=str
)
def test_a_vae_is_in_halves_where_stock_computes_it_so(row: Row, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def start(arguments: list[str], attention: str | None) -> None:
        started.extend(arguments)
        raise InterruptedError

    monkeypatch.setattr("fusestream.bench.end_to_end.start.start_comfyui", start)
    with pytest.raises(InterruptedError):
        worker.begin(job(row, "stock", Side()))
    assert ("--fp16-vae" in started) is halves


def test_the_pair_shares_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later half is another model's, without noise of its own, as in stock's template."""
    asked: list[tuple[str, Any, Any, bool]] = []

    def sample(model: str, noise: Any, steps: int, *_: Any, **given: Any) -> Any:
        for _step in range(given.get("start_step", 0), given.get("last_step", steps)):
            given["callback"]()
        asked.append((model, given.get("start_step"), given.get("last_step"), bool(noise.any())))
        return noise

    row = next(row for row in WHOLE if row.model == "wan14")
    monkeypatch.setattr("comfy.sample.sample", sample)
    monkeypatch.setattr("comfy.sample.fix_empty_latent_channels", lambda model, latent: latent)
    one: Any = Namespace(row=row, clock=lambda: 0.0, noise=lambda: torch.ones(1))
    _, seconds = run.Run.sampled(one, "high", None, None, "low")
    assert asked == [("high", None, 2, True), ("low", 2, None, False)] and len(seconds) == row.steps

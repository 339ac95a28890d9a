"""How near to FP32: the maths of errors, a small run of what a CPU can tell apart, the tables, and the figures of help pages."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bed.depth import is_thorough
from fusestream.bench import single
from fusestream.bench.fidelity import cli, errors, long, pipeline, table
from fusestream.bench.fidelity.variants import (
    FP16,
    LONG,
    MATRIX,
    OFFERED,
    OURS_FAST,
    OURS_FP8,
    OURS_PRECISE,
    OURS_TURBO,
    REFERENCE,
    SHORT,
    STOCK_FP8,
    STOCK_FP16,
    STORAGES,
    VARIANTS,
    Computing,
    Variant,
    for_cpu,
)
from fusestream.bench.report import pages
from fusestream.checkpoints import container, toys, trained
from fusestream.checkpoints.train import model_stage
from fusestream.fusion.sparse.model import sparse_of

ROOT = Path(__file__).resolve().parents[3]
RESULTS = sorted((ROOT / "bench" / "results").glob("nvidia-*.json"))

# -------------------------------------------------------------------------------------------------------------- the maths


def test_relative_errors_are_of_each_video() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    found = torch.tensor([[3.0, 4.5], [0.0, 2.0]])
    assert errors.relative(found, exact) == pytest.approx([0.1, 0.0])
    assert errors.errors_of([0.1, 0.0, 0.3]) == {"median": 0.1, "worst": 0.3}


def test_decibels_are_of_a_peak_and_none_where_nothing_differs() -> None:
    exact = torch.tensor([[0.0, 10.0], [0.0, 1.0]])
    found = torch.tensor([[1.0, 9.0], [0.0, 1.0]])
    assert errors.decibels(found, exact) == pytest.approx([20.0, math.inf])
    assert errors.decibels(found, exact, 100.0) == pytest.approx([40.0, math.inf])
    assert errors.decibels_of([20.0, math.inf, math.inf]) == {"median": None, "worst": 20.0}
    assert table.decibels({"median": None, "worst": 20.0}) == "same / 20"


def test_what_is_not_finite_or_of_another_shape_is_no_result() -> None:
    with pytest.raises(ArithmeticError, match="not finite"):
        errors.relative(torch.tensor([[math.nan]]), torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"\[1, 2\] is not of the shape \[2, 1\]"):
        errors.decibels(torch.ones(1, 2), torch.ones(2, 1))


def test_the_reference_has_no_tf32_and_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    matmul = torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(RuntimeError), pipeline.exactly():
        assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
        raise RuntimeError
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32 == matmul


# --------------------------------------------------------------------------------------------------------------- the run

WORK = pipeline.Work(tuple(toys.held_back_scenes()[:2]), seeds=1, steps=2, latent=(2, 8, 8))
SHAKEN = {"shaken": 0.01, "shaken more": 0.1}  # by how much of each weight's spread
MISSING = Variant("no such file", FP16, "nowhere")


def shaken(path: Path, folder: Path, name: str) -> Path:
    noise = torch.Generator().manual_seed(5)
    tensors = {
        key: (wide + SHAKEN[name] * wide.std(correction=0) * torch.randn(wide.shape, generator=noise)).half()
        for key, tensor in pipeline.read(path).items()
        for wide in (tensor.float(),)
    }
    made = folder / f"{name}.safetensors"
    container.save(made, tensors, pipeline.wan.metadata(pipeline.size_of(path)))
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Rows of everything, and which there were whenever they were kept."""
    folder = tmp_path_factory.mktemp("fidelity")
    files = pipeline.trained_files(folder, STORAGES)
    more = {name: shaken(files.models["fp16"], folder, name) for name in SHAKEN}
    files = replace(files, models={**files.models, **more})
    variants = [*VARIANTS, *(Variant(name, FP16, name) for name in SHAKEN), MISSING]
    kept: list[list[str]] = []

    def keep(rows: Sequence[dict[str, Any]]) -> None:
        kept.append([row["name"] for row in rows])

    with torch.inference_mode():
        return cli.measured(files, WORK, variants, keep), kept


def named(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


@pytest.mark.deep
def test_all_that_a_cpu_can_tell_apart_is_measured(run: tuple[list[dict[str, Any]], list[list[str]]]) -> None:
    rows, kept = run
    names = [row["name"] for row in rows]
    assert names == [REFERENCE.name, *(one.name for one in for_cpu(VARIANTS)), *SHAKEN, MISSING.name]
    assert kept == [names[:count] for count in range(2, len(names) + 1)], "after each, not at the end"
    found = named(rows)
    assert "KeyError" in found[MISSING.name]["error"]
    assert all(0 <= share <= 1 for row in rows if "right" in row for share in row["right"].values())
    assert found[STOCK_FP16.name]["call"] == {"median": 0, "worst": 0}, "FP16 weights, computed in FP32"
    assert found[STOCK_FP16.name]["frames dB"] == {"median": None, "worst": None}
    ours = found[OURS_PRECISE.name]
    assert ours["ours"] and ours["text"]["worst"] < 1e-5 and ours["call"]["worst"] < 1e-5
    for name in (STOCK_FP8.name, OURS_FP8.name):
        assert found[name]["call"]["median"] > 1e-4 < found[name]["latents"]["median"]
        assert found[name]["frames alone dB"]["worst"] in (None, pytest.approx(140, abs=30)), "the VAE is the same"


@pytest.mark.deep
def test_fewer_bits_are_farther_from_fp32(run: tuple[list[dict[str, Any]], list[list[str]]]) -> None:
    found = named(run[0])
    assert not [name for name, row in found.items() if "error" in row and name != MISSING.name]
    kinds = [f"FuseStream, {kind} file" for kind in ("Q8_0", "Q5_K", "Q4_K")]
    fine, middle, coarse = (found[name]["call"]["median"] for name in kinds)
    assert 1e-4 < fine < middle / 2 < coarse / 3 and coarse < 0.2
    for whose in ("ComfyUI", "FuseStream"):
        assert 1e-4 < found[f"{whose}, int8_convrot file"]["call"]["median"] < middle, whose


@pytest.mark.deep
def test_disturbed_weights_show(run: tuple[list[dict[str, Any]], list[list[str]]]) -> None:
    found = named(run[0])
    little, much = (found[name] for name in SHAKEN)
    for what in ("call", "latents"):
        assert 1e-4 < little[what]["median"] <= little[what]["worst"] < much[what]["median"], what
    assert little["latents dB"]["worst"] > much["latents dB"]["median"]
    assert little["frames dB"]["median"] > much["frames dB"]["median"]
    assert little["text"]["worst"] == 0, "only the diffusion model is another one"


@pytest.mark.deep
def test_what_is_kept_is_json_and_leaves_the_rest(
    run: tuple[list[dict[str, Any]], list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusestream.bench.kernels.environment", lambda: {"torch": "2.11"})
    path = tmp_path / "card.json"
    path.write_text(json.dumps({"models": {"rows": []}, "fidelity": {"rows": [{"name": "old"}]}}))
    single.leave("fidelity", {"prompts": 2, "seeds": 1, "steps": 2, "rows": run[0]}, path)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    data = json.loads(path.read_text(), parse_constant=refuse)
    assert data["models"] == {"rows": []} and data["fidelity"]["steps"] == 2
    assert [row["name"] for row in data["fidelity"]["rows"]] == [row["name"] for row in run[0]]
    assert table.table(data).count("\n") == len(run[0]) + 1


def test_what_a_machine_cannot_compute_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management

    bf16, cached = (next(one for one in VARIANTS if word in one.name) for word in ("BF16", "EasyCache"))
    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda: False)
    assert cli.lacking(bf16) == "this card has no BF16"
    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda: True)
    assert [cli.lacking(one) for one in (bf16, STOCK_FP16, cached)] == [None] * 3
    monkeypatch.setitem(sys.modules, "comfy_extras.nodes_easycache", None)
    assert str(cli.lacking(cached)).startswith("stock's node cannot be imported: ")


# ------------------------------------------------------------------------------------------------------- longer videos


def test_longer_videos_have_the_sizes_that_were_learned() -> None:
    assert [size.tokens for size in long.SIZES] == [2304, 14040]
    pools = {(pool.frame.width, pool.frame.height, pool.frame.frames) for pool in model_stage.SIZES["large"].pools}
    assert {(size.width, size.height, size.frames) for size in long.SIZES} < pools
    assert long.sizes([14040]) == long.SIZES[1:] and long.sizes(None) == long.SIZES
    with pytest.raises(SystemExit, match="no video has 7 tokens; there are 2304, 14040"):
        long.sizes([7])
    assert all(size.tokens > pipeline.LEAST_TOKENS for size in long.SIZES), "sparse attention is to serve"


@pytest.mark.skipif(not is_thorough(), reason="the other test of a whole run says most: --thorough")
def test_another_training_is_measured_at_every_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """The small one, with videos of two sizes that a CPU makes in seconds. What was measured before of these weights stays."""
    tiny = (long.Size(64, 64, 5, prompts=2), long.Size(64, 80, 5, prompts=1))
    monkeypatch.setattr(long, "SIZES", tiny)
    monkeypatch.setattr("fusestream.bench.kernels.environment", lambda: {"torch": "2.11", "date": "today"})
    monkeypatch.setattr(cli.single, "begin", lambda _: True)
    into = tmp_path / "card.json"
    into.write_text(json.dumps({"fidelity": {"rows": []}}))
    asked = ["--model", str(trained.FOLDER), "--results", str(into), "--steps", "1"]
    assert cli.main([*asked, "--tokens", "32"]) == 0
    first = json.loads(into.read_text())
    assert first["fidelity"] == {"rows": []}, "the small model's section"
    assert [one["tokens"] for one in first[long.LONG_SECTION]["sizes"]] == [32]
    assert cli.main([*asked, "--tokens", "40", "--prompts", "2", "--seeds", "2"]) == 0
    both = json.loads(into.read_text())[long.LONG_SECTION]
    assert [(one["tokens"], one["prompts"], one["seeds"]) for one in both["sizes"]] == [(32, 2, 1), (40, 2, 2)]
    assert (
        both["sizes"][0] == first[long.LONG_SECTION]["sizes"][0]
        and both["weights"] == first[long.LONG_SECTION]["weights"]
    )
    names = [row["name"] for row in both["sizes"][0]["rows"]]
    assert names == [REFERENCE.name, *(one.name for one in for_cpu(LONG))]
    both_in = {long.LONG_SECTION: both}
    assert long.text(both_in).count(REFERENCE.name) == 2
    assert "which is 40 tokens; 4 videos" in long.text(both_in)
    changed = both | {"weights": "others"}
    into.write_text(json.dumps({long.LONG_SECTION: changed}))
    assert long.beside({"tokens": 1}, both["weights"], into) == [{"tokens": 1}], "of other weights"


def test_a_folder_without_a_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"is not there: `python -m checkpoints\.train` writes it"):
        pipeline.files_in(tmp_path)


def test_what_is_for_long_videos_stands_behind_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    files = pipeline.files_in(trained.FOLDER)
    for variant in LONG:
        if variant.sparse is None or variant.storage != "fp16":
            continue
        model = pipeline.diffusion_model(files, replace(variant, computing=Computing(kernels="auto")))
        for early, how in ((0.25, {}), (0.0, {"dense_steps": 0.0})):
            used = pipeline.with_sparse(model, variant.sparse, **how)
            settings = sparse_of(used.model_options["transformer_options"]).settings  # type: ignore[union-attr]
            assert (settings.method, settings.share) == (variant.sparse.method, variant.sparse.share)
            assert settings.dense_steps == early and settings.least_tokens == pipeline.LEAST_TOKENS
        assert sparse_of(model.model_options["transformer_options"]) is None, "what went in stays dense"
    assert pipeline.with_sparse(model, None) is model


def test_the_other_librarys_attention_goes_through_stocks_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def int8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append(q.shape)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    variant = next(one for one in LONG if one.kitchen)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", None)
    assert "no comfy-kitchen with INT8 attention" in str(cli.lacking(variant))
    library = SimpleNamespace(int8_attention=int8, int8_attention_is_available=lambda: True)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", library)
    assert cli.lacking(variant) is None
    files, words = pipeline.files_in(trained.FOLDER), torch.randn(2, 512, 64)
    said = pipeline.Words(words, words[:1])
    calls = [pipeline.first_call(pipeline.diffusion_model(files, one), WORK, said, 2) for one in (STOCK_FP16, variant)]
    torch.testing.assert_close(calls[1], calls[0], atol=1e-4, rtol=1e-4)
    assert seen and all(len(shape) == 4 and shape[1] == 2 and shape[3] == 128 for shape in seen), "heads of 128"
    assert not any(one.kitchen or one.sparse for one in for_cpu(LONG))


# ------------------------------------------------------------------------------------------------------------- the tables


def row(name: str, call: float, **others: Any) -> dict[str, Any]:
    shares = {"colour and direction": 0.95, "shape": 0.9, "background": 1.0}
    pair = {"median": 40.0, "worst": 20.4}
    off = {"median": call, "worst": 3 * call}
    same = {"median": None, "worst": None}
    told = {"text": off, "call": off, "frames alone dB": same, "latents": off, "latents dB": pair, "frames dB": pair}
    told["flicker dB"] = {"median": 39.0, "worst": 21.0}
    return {"name": name, "ours": not name.startswith("ComfyUI"), "right": shares, "seconds": 1.0, **told, **others}


def results(*rows: dict[str, Any]) -> dict[str, Any]:
    reference = {
        name: value for name, value in row(REFERENCE.name, 0.0).items() if name in ("name", "right", "seconds")
    }
    about = {"environment": {"torch": "2.11", "date": "today"}, "weights": "w", "prompts": 30, "seeds": 2, "steps": 20}
    return {"fidelity": {**about, "rows": [reference, *rows]}}


def test_what_is_promised_is_held_against_stock_in_fp16() -> None:
    stock, near, far = row(STOCK_FP16.name, 1e-3), row(OURS_PRECISE.name, 1.04e-3), row(OURS_PRECISE.name, 1.06e-3)
    fast = row(OURS_FAST.name, 5e-3)
    assert table.missed([stock, near, fast]) == [] and table.missed([stock, far, fast]) == [OURS_PRECISE.name]
    assert table.missed([far]) == [] and "was not measured" in table.verdict([far])
    assert table.verdict([stock, near]).startswith("kept: ") and table.verdict([stock, far]).startswith("missed: ")
    assert "| **missed** 0.11 % |" in table.table(results(stock, far)) and "**" not in table.table(results(stock, near))


def test_the_tables_tell_medians_worst_videos_and_what_failed() -> None:
    found = results(row(STOCK_FP16.name, 5.24e-4), {"name": "BF16", "error": "KernelRefused: no"}, row("x", 0.0))
    whole = table.table(found)
    assert (
        f"| {STOCK_FP16.name} | 0.052 % | 0.052 % | same / same | 0.052 % / 0.16 % | 40 / 20 | 40 / 20 | 39 / 21 | 95% |"
        in whole
    )
    assert "| BF16 | fails: KernelRefused: no |" in whole and "| x | 0 | 0 |" in whole
    assert f"| {REFERENCE.name}, the reference | - |" in whole
    assert len({line.count("|") for line in whole.splitlines()}) == 1
    few = table.short(found)
    assert REFERENCE.name not in few and f"| {STOCK_FP16.name} | 0.052 % | 40 / 20 | 95% |" in few
    assert "BF16" not in few and "| x |" not in few
    assert "KernelRefused" in table.line(found["fidelity"]["rows"][2]) and "95%" in table.line(
        found["fidelity"]["rows"][1]
    )
    assert [table.percent(error) for error in (0.0, 1e-6, 1.23e-5, 1e-3, 0.118)] == [
        *("0", "< 0.001 %", "0.0012 %", "0.10 %", "12 %")
    ]


@pytest.mark.deep
def test_the_pages_show_it_where_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    empty = "<!-- fidelity:begin -->\n<!-- fidelity:end -->\n"
    card = tmp_path / "nvidia-card.json"
    card.write_text(json.dumps({"models": {"rows": []}}))
    for render in (pages.rendered, pages.rendered_page):
        assert "Not measured yet." in render(empty)
    card.write_text(json.dumps(results(row(STOCK_FP16.name, 1e-3), row("x", 2e-3))))
    readme, page = pages.rendered(empty), pages.rendered_page(empty)
    for shown in (readme, page):
        assert "Measured on nvidia card with torch 2.11 (today), 60 videos of 20 steps:" in shown
        assert f"| {STOCK_FP16.name} | 0.10 % |" in shown and "Not measured" not in shown
    assert "| x |" in page and "| x |" not in readme
    assert pages.rendered(readme) == readme and pages.rendered_page(page) == page


def test_variants_have_names_of_their_own_and_readme_has_the_tiers() -> None:
    for names in ([one.name for one in VARIANTS], [one.name for one in LONG]):
        assert len(names) == len(set(names)) and REFERENCE.name not in names
    names = [one.name for one in VARIANTS]
    assert set(SHORT) <= {REFERENCE.name, *names}
    assert {one.name for one in VARIANTS if one.promised} == table.PROMISED > {OURS_PRECISE.name}
    cpu = for_cpu((*VARIANTS, *MATRIX))
    assert not any(one.computing.isa or one.computing.kernels == "on" for one in cpu if one.computing.stock is None)
    assert {one.storage for one in cpu} == {"fp16", *STORAGES}


def test_every_quality_stands_beside_every_file() -> None:
    names = [one.name for one in (*VARIANTS, *MATRIX)]
    assert len(names) == len(set(names)) and {one.name for one in OFFERED.values()} <= set(names)
    assert {storage for _, storage in OFFERED} == {"fp16", *STORAGES}
    for (quality, storage), one in OFFERED.items():
        precision = {"Draft": "turbo"}.get(quality, quality)
        assert (one.storage, one.computing.precision, one.is_draft) == (storage, precision, quality == "Draft")
    known = {one.name: one for one in VARIANTS}
    assert all(
        known.get(one.name, one) == replace(one, promised=known.get(one.name, one).promised) for one in OFFERED.values()
    )
    found = results(row(STOCK_FP16.name, 1e-3), row(OURS_TURBO.name, 5e-3), {"name": "FuseStream fast", "error": "no"})
    grid = table.grid(found).splitlines()
    assert grid[0] == "| File | ComfyUI | *auto* | *precise* | *fast* | *turbo* | *Draft* |"
    of_halves = "| FP16 | 0.10 % / 40 / 39 | not measured | not measured | fails | 0.50 % / 40 / 39 | not measured |"
    assert of_halves in grid and len(grid) == 2 + len(STORAGES) + 1
    assert next(line for line in grid if line.startswith("| Q4_K file")).startswith("| Q4_K file | - |"), (
        "stock reads none"
    )
    assert not table.has_grid(found), "of a card on which the other qualities were not tried there is none on the page"
    assert table.has_grid(results(row(OFFERED["Draft", "fp16"].name, 5e-3)))


def test_rows_are_put_among_those_of_the_same_work() -> None:
    about = {"weights": "a", "steps": 20}
    before = [{"name": name, "old": True} for name in (REFERENCE.name, STOCK_FP16.name, OURS_FP8.name)]
    new = [{"name": name} for name in (REFERENCE.name, OURS_FP8.name, OURS_PRECISE.name)]
    section = {**about, "rows": before}
    found = cli.among(new, cli.rows_before(about, section), VARIANTS)
    assert [row["name"] for row in found] == [REFERENCE.name, STOCK_FP16.name, OURS_PRECISE.name, OURS_FP8.name]
    assert [row["name"] for row in found if "old" in row] == [STOCK_FP16.name]
    assert cli.rows_before({**about, "weights": "b"}, section) == [] == cli.rows_before(about, {})


def test_what_is_missing_is_what_the_file_has_not() -> None:
    failed = [{"name": STOCK_FP16.name}, {"name": OURS_FAST.name, "error": "no"}]
    for missing, wanted in ((True, [OURS_PRECISE.name, OURS_FAST.name]), (False, [STOCK_FP16.name, *TIERS[1:3]])):
        options = SimpleNamespace(missing=missing, only=["FP16", "precise", "fast"])
        found = [one.name for one in cli.wanted((STOCK_FP16, OURS_PRECISE, OURS_FAST), options, failed)]
        assert found == wanted
    for wrong in (["--quick", "--add"], ["--quick", "--missing"], ["--dry", "--missing"]):
        with pytest.raises(SystemExit):
            cli.main(wrong)


def test_nothing_is_begun_when_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Measured:
        reference = row(REFERENCE.name, 0.0)

        def __init__(self, *_: Any) -> None: ...

        def row(self, variant: Variant) -> dict[str, Any]:
            monkeypatch.setattr(cli.time, "perf_counter", lambda: 100.0)
            return row(variant.name, 1e-3)

    monkeypatch.setattr("fusestream.bench.fidelity.measure.Fidelity", Measured)
    monkeypatch.setattr(cli.time, "perf_counter", lambda: 1.0)
    until = cli.until(SimpleNamespace(within=1.0))
    assert until == 61.0 and cli.until(SimpleNamespace(within=None)) == math.inf
    found = cli.measured(None, None, [STOCK_FP16, OURS_PRECISE], lambda rows: None, until)  # type: ignore[arg-type]
    assert [one["name"] for one in found] == [REFERENCE.name, STOCK_FP16.name]
    assert f"{OURS_PRECISE.name} is left for another call" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- the pages

TIERS = (STOCK_FP16.name, OURS_PRECISE.name, OURS_FAST.name, OURS_TURBO.name)
PAGES = ROOT / "nodes" / "web" / "docs"


def help_pages(node: str) -> dict[str, str]:
    """The node's help page in each language."""
    paths = (PAGES / f"{node}.md", *sorted((PAGES / node).glob("*.md")))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def untold(text: str, rows: list[dict[str, Any]], tiers: Sequence[str] = TIERS) -> list[str]:
    """The tiers whose measured error a text does not quote."""
    calls = {one["name"]: one["call"]["median"] for one in rows if "call" in one}
    return [name for name in tiers if table.percent(calls[name]) not in text]


def test_the_loaders_page_quotes_the_measured_errors() -> None:
    measured = [data for path in RESULTS if "fidelity" in (data := json.loads(path.read_text(encoding="utf-8")))]
    if not measured:
        pytest.skip("bench/results has no figures of `dev.py bench models fidelity` yet")
    rows = measured[0]["fidelity"]["rows"]
    told = {where: untold(text, rows) for where, text in help_pages("FuseStreamDiffusionModelLoader").items()}
    assert not any(told.values()), f"write the figures of bench/results into {told}"


def test_the_sparse_node_quotes_what_was_measured() -> None:
    sections = [json.loads(path.read_text(encoding="utf-8")).get(long.LONG_SECTION) for path in RESULTS]
    measured = [section["sizes"][-1]["rows"] for section in sections if section]
    if not measured:
        pytest.skip("bench/results has no figures of `dev.py bench models fidelity --model` yet")
    rows = {row["name"] for row in measured[0]}
    precise = [one for one in LONG if one.sparse and one.computing.precision == "precise" and one.name in rows]
    bounded = [one.name for one in precise if one.sparse.method == "bounded"]
    others = [one.name for one in precise if one.name not in bounded]
    told = {
        where: untold(text, measured[0], others + bounded)
        for where, text in help_pages("FuseStreamSparseAttention").items()
    }
    assert len(others) >= 3 and len(bounded) >= 3
    assert not any(told.values()), f"write the figures of bench/results into {told}"


def test_a_text_with_another_figure_is_noticed() -> None:
    rows = [row(name, error) for name, error in zip(TIERS, (5.2e-4, 4.9e-4, 1.3e-3, 5.5e-3), strict=True)]
    assert untold("precise 0.049 %, fast 0.13 %, turbo 0.55 %, stock in FP16 0.052 %", rows) == []
    assert untold("precise 0.049 %, fast 0.15 %, turbo 0.55 %, stock in FP16 0.052 %", rows) == [OURS_FAST.name]
    changed = copy.deepcopy(rows)
    changed[1]["call"]["median"] = 6e-4
    assert untold("precise 0.049 %, fast 0.13 %, turbo 0.55 %, stock in FP16 0.052 %", changed) == [OURS_PRECISE.name]
    assert len(help_pages("FuseStreamSparseAttention")) == 3

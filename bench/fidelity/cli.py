"""Measure how near stock's types and our qualities are to stock in FP32, on trained weights: errors, and whether videos obey.

    python bench models fidelity                60 prompts on the card; writes bench/results/<gpu>.json as it goes
    python bench models fidelity --quick        6 prompts on the CPU: what files lose; nothing is written
    python bench models fidelity --only fp8     ways whose name contains this, beside the reference; nothing is written
    python bench models fidelity --only file --add   the same, put beside the rows that the file has of these weights
    python bench models fidelity --missing --within 9   ways that the file has not yet, as many as nine minutes hold
    python bench models fidelity --dry          nothing is written
    python bench models fidelity --model DIR    a training of `--size large`: longer videos, in a section of their own

Exits with 1 where `precise` is farther from FP32 than stock in FP16, by more than a twentieth, or a way fails.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import kitchen, single
from ..end_to_end.results import read
from .long import LONG_SECTION, beside, of_size, sizes
from .table import HEAD, SECTION, Rows, line, missed, verdict
from .variants import BF16, LONG, LONG_STORAGES, MATRIX, REFERENCE, STORAGES, VARIANTS, Variant, for_cpu

if TYPE_CHECKING:
    from .pipeline import Files, Work

FEW, FEWEST = 6, 1  # prompts on the CPU, of usual and of long videos


def main(arguments: list[str] | None = None) -> int:
    cli = single.command_line(__doc__, quick="a few prompts on the CPU; nothing is written")
    cli.add_argument("--prompts", type=int, help="how many of the 60 that the model was not trained on")
    cli.add_argument("--seeds", type=int, default=1, help="videos of each")
    cli.add_argument("--steps", type=int, help="of the sampler, instead of 20")
    cli.add_argument("--only", action="append", help="ways to compute whose name contains this; nothing is written")
    cli.add_argument("--add", action="store_true", help="with --only: put these rows beside those that the file has")
    cli.add_argument("--missing", action="store_true", help="only ways that the file does not have of these weights")
    cli.add_argument("--within", type=float, metavar="MINUTES", help="begin nothing after that many")
    cli.add_argument("--results", type=Path, help="the file to write into; bench/results/<gpu>.json by default")
    cli.add_argument(
        "--model", type=Path, metavar="DIR", help="a large training: longer videos, turbo, sparse attention"
    )
    cli.add_argument("--tokens", type=int, action="append", help="with --model: only videos of so many tokens")
    options = cli.parse_args(arguments)
    into = None
    if options.add and not options.only:
        cli.error("--add goes with --only")
    is_shown = options.quick or options.dry or (options.only and not (options.add or options.missing))
    if options.missing and is_shown:
        cli.error("--missing goes by the file of results, which --quick and --dry leave alone")
    if not single.begin(options):
        return 1
    import torch  # noqa: PLC0415

    if not is_shown:
        into = options.results or single.results_file()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        runs = long_rows(options, into, Path(folder)) if options.model else [usual_rows(options, into, Path(folder))]
    if into is not None:
        print(f"written to {into}")
    return int(any(missed(rows) or any("error" in row for row in rows) for rows in runs))


def usual_rows(options: argparse.Namespace, into: Path | None, folder: Path) -> list[dict[str, Any]]:
    """Of the small model, with its files stored in other ways in this folder."""
    from .pipeline import STEPS, Work, trained_files  # noqa: PLC0415

    scenes = some_scenes(options.prompts or (FEW if options.quick else None))
    work = Work(scenes, options.seeds, options.steps or STEPS)
    files = trained_files(folder, STORAGES)
    about = {} if into is None else described(files, work)
    before = rows_before(about, read(into).get(SECTION, {})) if into is not None and is_added(options) else []

    def keep(found: Rows) -> None:
        if into is not None:
            single.leave(SECTION, {**about, "rows": among(found, before, (*VARIANTS, *MATRIX))}, into)

    rows = measured(files, work, wanted((*VARIANTS, *MATRIX), options, before), keep, until(options))
    print(f"\n{len(work.videos)} videos of {work.steps} steps; errors are medians, or the median and the worst")
    if options.quick:
        print("on the CPU, which computes in FP32 whatever the type: only what files hold makes a difference")
    print("\n".join([HEAD, *map(line, rows), verdict(rows)]))
    return rows


def is_added(options: argparse.Namespace) -> bool:
    """Whether rows that the file has stay."""
    return bool(options.add or options.missing)


def rows_before(about: Mapping[str, Any], section: Mapping[str, Any]) -> Rows:
    """The rows of a section, if they are of the same work with the same weights."""
    return section.get("rows", []) if all(section.get(name) == value for name, value in about.items()) else []


def among(found: Rows, before: Rows, order: Sequence[Variant]) -> list[Mapping[str, Any]]:
    """These rows and those from before, in the table's order."""
    every = {row["name"]: row for row in (*before, *found)}
    return [every[name] for name in (REFERENCE.name, *(one.name for one in order)) if name in every]


def wanted(variants: Sequence[Variant], options: argparse.Namespace, before: Rows) -> list[Variant]:
    """The ways that the options choose. before: the rows that the file has."""
    names = {row["name"] for row in before if "error" not in row} if options.missing else set()
    return [one for one in chosen(variants, options.only) if one.name not in names]


def until(options: argparse.Namespace) -> float:
    """When no way is begun any more, by the clock of `time.perf_counter`."""
    return math.inf if options.within is None else time.perf_counter() + 60 * options.within


def long_rows(options: argparse.Namespace, into: Path | None, folder: Path) -> list[list[dict[str, Any]]]:
    """Of a large training, at every size that is asked for. Sizes that were measured before, with these weights, stay."""
    from .pipeline import STEPS, Work, files_in, stored  # noqa: PLC0415

    files = stored(files_in(options.model), folder, LONG_STORAGES)
    weights = fingerprint((files.models["fp16"], files.text, files.vae))
    every: list[list[dict[str, Any]]] = []
    last = until(options)
    for size in sizes(options.tokens):
        scenes = some_scenes(options.prompts or (FEWEST if options.quick else size.prompts))
        work = Work(scenes, options.seeds, options.steps or STEPS, size.latent)
        print(f"\n{size.tokens} tokens: {len(work.videos)} videos of {work.steps} steps, {size.name}", flush=True)

        about = {"tokens": size.tokens, "size": size.name, **told(work)}
        section = {} if into is None else of_size(read(into), weights, size)
        before = rows_before(about, section) if is_added(options) else []

        def keep(found: Rows, about: dict[str, Any] = about, before: Rows = before) -> None:
            if into is not None:
                here = {**about, "rows": among(found, before, LONG)}
                single.leave(LONG_SECTION, {"weights": weights, "sizes": beside(here, weights, into)}, into)

        rows = measured(files, work, wanted(LONG, options, before), keep, last)
        print("\n".join([HEAD, *map(line, rows), verdict(rows)]))
        every.append(rows)
    return every


def some_scenes(count: int | None) -> tuple[Any, ...]:
    """Of those that no model was trained on, spread over all."""
    from ...checkpoints.toys import held_back_scenes  # noqa: PLC0415

    scenes = held_back_scenes()
    count = min(len(scenes), count or len(scenes))
    return tuple(scenes[i * len(scenes) // count] for i in range(count))


def chosen(variants: Sequence[Variant], only: Sequence[str] | None) -> list[Variant]:
    return [one for one in variants if any(text in one.name for text in only or ("",))]


def measured(
    files: Files, work: Work, variants: Sequence[Variant], keep: Callable[[Rows], None], until: float = math.inf
) -> list[dict[str, Any]]:
    """The reference's row and those of all that this machine can compute. keep: is given what there is after each. until: when no
    other is begun."""
    from .measure import Fidelity  # noqa: PLC0415
    from .pipeline import forget, on_card  # noqa: PLC0415

    fidelity = Fidelity(files, work)
    rows = [fidelity.reference]
    print(line(rows[0]), flush=True)
    for variant in variants if on_card() else for_cpu(variants):
        if reason := lacking(variant):
            print(f"{variant.name} is left out: {reason}")
            continue
        if time.perf_counter() > until:
            print(f"{variant.name} is left for another call")
            continue
        try:
            rows.append(fidelity.row(variant))
        except Exception as error:  # the others are measured all the same
            traceback.print_exc()
            rows.append({"name": variant.name, "error": f"{type(error).__name__}: {error}"[:200]})
            forget()
        print(line(rows[-1]), flush=True)
        keep(rows)
    return rows


def lacking(variant: Variant) -> str | None:
    """Why this machine cannot compute so."""
    import comfy.model_management  # noqa: PLC0415

    if variant.computing == BF16 and not comfy.model_management.should_use_bf16():
        return "this card has no BF16"
    if variant.kitchen and not kitchen.int8_attention():
        return "no comfy-kitchen with INT8 attention for this card is installed"
    if variant.easy_cache:
        try:
            importlib.import_module("comfy_extras.nodes_easycache")
        except ImportError as error:
            return f"stock's node cannot be imported: {error}"
    return None


def described(files: Files, work: Work) -> dict[str, Any]:
    """Of what the rows were measured."""
    return {"weights": fingerprint((files.models["fp16"], files.text, files.vae)), **told(work)}


def told(work: Work) -> dict[str, int]:
    return {"prompts": len(work.scenes), "seeds": work.seeds, "steps": work.steps}


def fingerprint(paths: Sequence[Path]) -> str:
    """Results of other weights are not to be compared."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]

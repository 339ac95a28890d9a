"""Measure what leaving out steps costs: ComfyUI's caches, fewer steps and our Step Cache, on the trained small model.

    python bench models steps                20 and 50 steps, in FP32 on the CPU; writes bench/results/step-cache.json
    python bench models steps --quick        one video; nothing is written
    python bench models steps --only Step    ways whose name contains this; nothing is written

Each way is held against the same video with all steps computed. Decisions are a video's own: one is sampled at a time.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import single
from ..end_to_end.start import start_comfyui
from ..report.tables import markdown

if TYPE_CHECKING:
    from .pipeline import Words, Work

FILE = Path(__file__).resolve().parents[1] / "results" / "step-cache.json"
VIDEOS = {20: 60, 50: 4}  # by the number of steps
HEADS = ("Way", "Setting", "Steps left out", "Frames, dB", "Latents, dB", "Videos as their prompts say")
ALL = "All steps"
Row = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A way to leave out steps. apply: gives a MODEL with it; None: it takes so many steps instead."""

    name: str
    setting: float
    apply: Callable[[Any, float], Any] | None


def core(node: str) -> Callable[[Any, float], Any]:
    """ComfyUI's node, with another threshold. EasyCache writes into the network's input, which in FP32 is the sampler's latents:
    it gets a copy, as in other types."""

    def copied(executor: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(x.clone(), *args, **kwargs)

    def apply(model: Any, threshold: float) -> Any:
        from comfy.patcher_extension import WrappersMP  # noqa: PLC0415

        from .pipeline import with_stock_cache  # noqa: PLC0415

        clone = model.clone()
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "copied", copied)
        return with_stock_cache(clone, node, reuse_threshold=threshold)

    return apply


def ours(least: float = 0.0, most: float = 1.0) -> Callable[[Any, float], Any]:
    """The Step Cache; with bounds of the share of the slope, which otherwise is measured."""

    def apply(model: Any, error: float) -> Any:
        from ...fusion.step_cache.forecast import Forecast  # noqa: PLC0415
        from ...fusion.step_cache.model import step_cached  # noqa: PLC0415
        from ...fusion.step_cache.settings import Settings  # noqa: PLC0415

        return step_cached(model, Settings(error), type("Bounded", (Forecast,), {"LEAST": least, "MOST": most}))

    return apply


def ways(steps: int) -> list[Way]:
    few = (12, 10, 8, 6) if steps <= 20 else (20, 16, 12, 8)
    return [
        Way(ALL, steps, None),
        *(Way("Fewer steps", one, None) for one in few),
        Way("ComfyUI's LazyCache", 0.1, core("LazyCacheNode")),
        *(Way("ComfyUI's EasyCache", one, core("EasyCacheNode")) for one in (0.05, 0.1, 0.2, 0.4, 0.8)),
        Way("Step Cache, last result held", 0.05, ours(most=0.0)),
        Way("Step Cache, whole slope", 0.05, ours(least=1.0)),
        *(Way("Step Cache", one, ours()) for one in (0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4)),
    ]


def main(arguments: list[str] | None = None) -> int:
    cli = single.command_line(__doc__, quick="one video of each; nothing is written")
    cli.add_argument("--only", action="append", help="ways whose name contains this; nothing is written")
    options = cli.parse_args(arguments)
    start_comfyui(["--cpu", "--use-pytorch-cross-attention"])
    import torch  # noqa: PLC0415

    with torch.inference_mode():
        found = {
            str(steps): {
                "videos": 1 if options.quick else count,
                "rows": measured(steps, 1 if options.quick else count, options.only),
            }
            for steps, count in VIDEOS.items()
        }
    if not (options.quick or options.dry or options.only):
        from ..kernels import environment  # noqa: PLC0415

        FILE.write_text(json.dumps({"environment": environment(), "steps": found}, indent=1) + "\n", encoding="utf-8")
    return 0


def measured(steps: int, videos: int, only: Sequence[str] | None) -> list[Row]:
    """A row of each way, at so many steps."""
    from ...checkpoints import trained  # noqa: PLC0415
    from . import errors, pipeline  # noqa: PLC0415
    from .cli import some_scenes  # noqa: PLC0415
    from .measure import right  # noqa: PLC0415
    from .variants import REFERENCE  # noqa: PLC0415

    files = pipeline.files_in(trained.FOLDER)
    work = pipeline.Work(some_scenes(videos), 1, steps)
    said = pipeline.words(pipeline.text_encoder(files.text, REFERENCE.computing), work.scenes)
    model, vae = pipeline.diffusion_model(files, REFERENCE), pipeline.vae(files.vae, REFERENCE.computing)
    every, calls = counted(model, work, said)
    films, rows = pipeline.decoded(vae, every), []
    for way in ways(steps):
        if not any(text in way.name for text in only or ("",)):
            continue
        begun = time.perf_counter()
        if way.name == ALL:
            latents, ran = every, calls
        elif way.apply is None:
            latents, ran = counted(model, replace(work, steps=int(way.setting)), said)
        else:
            latents, ran = counted(way.apply(model, way.setting), work, said)
        row: Row = {"way": way.name, "setting": way.setting, "left out": round(steps * (1 - ran / calls), 2)}
        found = films if latents is every else pipeline.decoded(vae, latents)
        row["right"] = round(right(found, work)["colour and direction"] * len(work.videos))
        if latents is not every:
            frames = errors.decibels(found, films, 1.0)
            row["frames dB"] = [mean(frames), round(min(frames), 1)]
            row["latents dB"] = mean(errors.decibels(latents, every))
        rows.append(row)
        print(steps, json.dumps(row), f"{time.perf_counter() - begun:.0f} s", flush=True)
    return rows


def mean(decibels: Sequence[float]) -> float:
    """Of the videos that changed."""
    return round(statistics.mean(one for one in decibels if math.isfinite(one)), 1)


def counted(model: Any, work: Work, said: Words) -> tuple[Any, int]:
    """The latents of all videos, and how often the network ran for them."""
    from . import pipeline  # noqa: PLC0415

    ran = 0

    def count(*_: Any) -> None:
        nonlocal ran
        ran += 1

    hook = model.model.diffusion_model.blocks[0].register_forward_pre_hook(count)
    try:
        return pipeline.sampled(model, work, said, together=1), ran
    finally:
        hook.remove()


def measured_before() -> dict[str, Any]:
    """The results that the file has."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def table(results: Mapping[str, Any]) -> str:
    """Markdown: what it was measured with, and a table of each number of steps."""
    with_what = results["environment"]
    told = [f"Measured with torch {with_what['torch']} ({with_what['date']}).\n"]
    for steps, one in results["steps"].items():
        rows = [
            (
                row["way"],
                f"{row['setting']:g}",
                f"{row['left out']:g}",
                f"{row['frames dB'][0]:.1f} / {row['frames dB'][1]:.1f}" if "frames dB" in row else "-",
                f"{row['latents dB']:.1f}" if "latents dB" in row else "-",
                f"{row['right']} of {one['videos']}",
            )
            for row in one["rows"]
        ]
        told.append(f"{steps} steps, {one['videos']} videos:\n\n{markdown(HEADS, rows)}\n")
    return "\n".join(told)

"""Measure what a streamed, fused block costs the host: Python and the driver's calls, while the card has less to do than they take.

    python bench rows host               14B's widths, a few blocks; writes bench/results/<gpu>.json
    python bench rows host --dry         nothing is written
    python bench rows host --profile     also where the time goes, by function
    python bench rows host --quick       tiny widths on the CPU: that it runs, not how fast

The card's queue is empty when a step begins and never full, or the host would wait in whatever call it makes next. Rows:

    the pager: acquire + release    a layer's weights, from the pager and back
    weights in and out              what stands around a block's call, with the row above
    a fused block                   the block itself: kernels and products asked for, nothing waited for
    stock's block                   the same with kernels off
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import single

if TYPE_CHECKING:
    from ..kernels_cuda.policy import Mode

BLOCKS = 6
STEPS = 12
WARM = 4  # steps that are left out: kernels are compared in the first, and the order is learnt
LATENT = (1, 60, 104)  # 480x832: 1560 tokens
SMALL = (1, 8, 8)
AIMS = {"the pager: acquire + release": 250.0, "a fused block": 700.0}  # microseconds

Seconds = dict[str, list[float]]


class Clocked:
    """The host's time in some functions of the pack, and between entering a block and leaving it."""

    def __init__(self, pager: Any, stream: Any) -> None:
        self.seconds: Seconds = defaultdict(list)
        self._entered = 0.0
        self._around = [(pager, "acquire"), (pager, "release"), (stream, "enter"), (stream, "leave")]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = [getattr(owner, name) for owner, name in self._around]
        try:
            for (owner, name), function in zip(self._around, before, strict=True):
                setattr(owner, name, self._timed(name, function))
            yield
        finally:
            for (owner, name), function in zip(self._around, before, strict=True):
                setattr(owner, name, function)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            if name == "leave":
                self.seconds["block"].append(start - self._entered)
            try:
                return function(*given, **named)
            finally:
                self._entered = time.perf_counter()
                self.seconds[name].append(self._entered - start)

        return timed

    def rows(self, whose: str) -> dict[str, float]:
        """Microseconds, medians of all blocks of all steps."""
        middle = {name: statistics.median(found) * 1e6 for name, found in self.seconds.items()}
        return {
            "the pager: acquire + release": middle["acquire"] + middle["release"],
            "weights in and out": middle["enter"] + middle["leave"],
            whose: middle["block"],
        }


def measured(path: Path, mode: Mode, latent: tuple[int, int, int], profile: bool) -> dict[str, float]:
    """The rows of one way to compute, streamed through the least window."""
    import comfy.model_management  # noqa: PLC0415
    import comfy.sample  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from ..fusion.load.diffusion import load_streamed_diffusion_model  # noqa: PLC0415
    from ..fusion.stream.block_stream import BlockStream  # noqa: PLC0415
    from ..kernels_cuda import KernelPolicy  # noqa: PLC0415
    from ..memory import Pager  # noqa: PLC0415

    model = load_streamed_diffusion_model(str(path), None, KernelPolicy.of(mode))
    model.stream.residency.ceiling = model.stream.residency.least
    clocked = Clocked(Pager, BlockStream)
    profiler = cProfile.Profile()
    width = model.model.diffusion_model.text_embedding[0].in_features
    words = [[torch.randn(1, 512, width, generator=torch.Generator().manual_seed(1)), {}]]
    noise = torch.randn(1, 16, *latent, generator=torch.Generator().manual_seed(0))

    def over(step: int, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if step == WARM:
            clocked.seconds.clear()
            if profile:
                profiler.enable()

    run = ("euler", "simple", words, words, torch.zeros_like(noise))
    with torch.inference_mode(), clocked():
        comfy.sample.sample(model, noise, STEPS, 1.0, *run, seed=0, disable_pbar=True, callback=over)
        profiler.disable()
        model.stream.residency.check()
    comfy.model_management.unload_all_models()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    return clocked.rows("stock's block" if mode == "off" else "a fused block")


def written(folder: Path, quick: bool) -> Path:
    """A file of a few blocks."""
    import torch  # noqa: PLC0415

    from .. import checkpoints  # noqa: PLC0415
    from .end_to_end import weights  # noqa: PLC0415

    if quick:
        return checkpoints.write("wan_t2v", folder)
    path = folder / "blocks.safetensors"
    size = checkpoints.wan.WanSize(dim=5120, ffn=13824, layers=BLOCKS, text=4096)
    weights.write_table(path, checkpoints.wan.table(size), "fp16", "cuda" if torch.cuda.is_available() else "cpu")
    return path


def main(arguments: list[str] | None = None) -> int:
    cli = single.command_line(__doc__, quick="tiny widths on the CPU")
    cli.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    cli.add_argument("--profile", action="store_true", help="also show where the time goes")
    options = cli.parse_args(arguments)
    if not single.begin(options):
        return 1
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = written(Path(folder), options.quick)
        latent = SMALL if options.quick else LATENT
        found = measured(path, "off", latent, profile=False) | measured(path, "auto", latent, options.profile)
    for label, microseconds in found.items():
        aim = AIMS.get(label)
        print(f"{label:32} {microseconds:8.0f} us" + (f"   aim: at most {aim:.0f}" if aim is not None else ""))
    if not (options.quick or options.dry):
        rows = [{"label": label, "us": us, "bound": AIMS.get(label)} for label, us in found.items()]
        single.leave("host", {"rows": rows})
    return 0

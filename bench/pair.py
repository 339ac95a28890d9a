"""Measure a pair of 14B models that take turns on a machine with little RAM, as Wan 2.2's do: what each step reads from the disk.

    python bench pair               2 x 9.7 GB (Q4_K_M) and 2 x 14.8 GB (int8) on the disk; writes bench/results/<gpu>.json
    python bench pair --dry         nothing is written to the results
    python bench pair --quick       tiny models on the CPU: that it runs, not what it takes

All but --ram GiB of the RAM is taken before, so the page cache is as small as there. The first model samples, then the second, and
both once more. What should be read: each file once as its model comes, since a pair of them does not fit; in later steps of a model
nothing, as long as its own file does.
"""

from __future__ import annotations

import itertools
import mmap
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from . import single
from .end_to_end.storages import shown

GIB = 2**30
STORAGES = ("q4_k_m", "int8_convrot")
STEPS, TURNS = 4, 2  # steps of one model in a row, and how often each is called
SIZE = (480, 480, 17)


class LittleRam:
    """Takes memory until so many GiB are left to programs and page cache together, and keeps it."""

    def __init__(self, left: float | None) -> None:
        self.left = left
        self._taken: mmap.mmap | None = None

    def __enter__(self) -> LittleRam:
        if self.left is not None:
            nbytes = available() - int(self.left * GIB)
            if nbytes > 0:
                import torch  # noqa: PLC0415

                self._taken = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                self._taken.madvise(mmap.MADV_HUGEPAGE)
                torch.frombuffer(self._taken, dtype=torch.uint8).fill_(1)  # on all cores
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._taken is not None:
            self._taken.close()


def available(root: Path = Path("/")) -> int:
    """Bytes that programs could still have: of the system, or of the group of processes that this one is in, if that is less."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    told = {name: int(value.split()[0]) * 1024 for name, value in (line.split(":") for line in lines)}
    if told.get("SwapTotal"):
        raise SystemExit("this system swaps: memory that is taken would go there, and nothing would be short")
    left = told["MemAvailable"]
    for most, used, inactive in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        group = root / "sys/fs/cgroup"
        if not (group / most).exists() or not (limit := (group / most).read_text().strip()).isdigit():
            continue
        files = [line.split() for line in (group / inactive).read_text().splitlines()]
        cache = sum(int(value) for name, value in files if name in ("inactive_file", "active_file"))
        left = min(left, int(limit) - int((group / used).read_text()) + cache)
    return left


def read_from_disk() -> int:
    """Bytes that this process had read from a disk so far: what came from the page cache is none of them."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def sampled(model: Any, steps: int, size: tuple[int, int, int]) -> tuple[list[float], list[float], bool]:
    """Seconds and GB from the disk of each step; whether the latent is finite."""
    import comfy.sample  # noqa: PLC0415
    import torch  # noqa: PLC0415

    height, width, frames = size
    generator = torch.Generator().manual_seed(1)
    text = model.model.diffusion_model.text_embedding[0].in_features
    prompts = [[[torch.randn(1, 512, text, generator=generator), {}]] for _ in range(2)]
    noise = torch.randn(1, 16, (frames - 1) // 4 + 1, height // 8, width // 8, generator=generator)

    def now() -> tuple[float, int]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter(), read_from_disk()

    ticks = [now()]
    out = comfy.sample.sample(
        model, noise, steps, 6.0, "euler", "simple", *prompts, torch.zeros_like(noise), seed=0, disable_pbar=True,
        callback=lambda *_: ticks.append(now()),
    )  # fmt: skip
    pairs = list(itertools.pairwise(ticks))
    seconds, read = [b[0] - a[0] for a, b in pairs], [(b[1] - a[1]) / 1e9 for a, b in pairs]
    return seconds, read, bool(torch.isfinite(out).all())


def measured(folder: Path, storage: str, ram: float, quick: bool, free: float = 8.0) -> list[dict[str, Any]]:
    """A row for each turn of each model: seconds and GB from the disk of its first step, and the most of its later ones."""
    import comfy.model_management  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from ..fusion import load_diffusion_model  # noqa: PLC0415
    from ..fusion.stream import vram_pool  # noqa: PLC0415
    from .end_to_end import weights  # noqa: PLC0415
    from .end_to_end.card import Card  # noqa: PLC0415
    from .end_to_end.worker import drop_from_cache  # noqa: PLC0415

    made = weights.write_tiny("wan13", folder, storage) if quick else weights.write("wan14", folder, storage, "cuda")
    first = Path(str(made["path"]))
    second = first.with_stem(f"{first.stem}-low")
    shutil.copy(first, second)
    for path in (first, second):
        drop_from_cache(str(path))
    before = vram_pool.__dict__["_ram"]
    vram_pool.__dict__["_ram"] = vram_pool.CountedRam(int(ram * GIB))
    rows: list[dict[str, Any]] = []
    try:
        with LittleRam(None if quick else ram), Card(None if quick else free) as card, torch.inference_mode():
            models = [load_diffusion_model(str(path), vram_budget=-1.0) for path in (first, second)]
            for turn in range(TURNS):
                for name, model in zip(("first", "second"), models, strict=True):
                    card.restart()
                    seconds, read, finite = sampled(model, STEPS, (64, 64, 5) if quick else SIZE)
                    rows.append({
                        "label": f"{shown(storage)}, {name} model, turn {turn + 1}",
                        "first s": seconds[0], "first GB": read[0],
                        "s": sorted(seconds[1:])[len(seconds) // 2 - 1], "later GB": max(read[1:]),
                        "finite": finite, "peak GiB": card.peak,
                        "file GB": first.stat().st_size / 1e9,
                        "notes": {k: str(v)[:200] for k, v in model.stream.ledger.summary()["notes"].items()},
                    })  # fmt: skip
                    print(told(rows[-1]), flush=True)
            del models, model
        comfy.model_management.unload_all_models()
    finally:
        vram_pool.__dict__["_ram"] = before
        second.unlink()
        first.unlink()
    return rows


def told(row: dict[str, Any]) -> str:
    """A line for who watches."""
    return (
        f"{row['label']:40} first {row['first s']:6.2f} s, {row['first GB']:5.2f} GB; "
        f"later {row['s']:6.3f} s, {row['later GB']:5.2f} GB"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    cli = single.command_line(__doc__, quick="tiny models on the CPU")
    cli.add_argument("--ram", type=float, default=12.0, help="GiB that are left, and that may be pinned or registered")
    cli.add_argument("--only", choices=STORAGES, action="append", help="only files of this storage")
    cli.add_argument("--results", type=Path, help="the file to merge into; bench/results/<gpu>.json by default")
    cli.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for weights: on a disk")
    options = cli.parse_args(arguments)
    if not single.begin(options):
        return 1
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for storage in options.only or STORAGES:
            rows += measured(Path(folder), storage, options.ram, options.quick)
            if not (options.quick or options.dry):
                single.leave("pair", {"RAM GiB": options.ram, "rows": rows}, options.results)
    return 0 if all(row["finite"] for row in rows) else 1

"""Measure what it takes to save a 14B model with two LoRAs in it: memory, time, and whether each tensor is stock's own.

    python bench saving             28.6 GB and as much again on the disk; writes bench/results/<gpu>.json
    python bench saving --dry       nothing is written to the results
    python bench saving --quick     a tiny model on the CPU: that it runs, not what it takes

ComfyUI saves by having the whole patched model in RAM first: 28.6 GB and what it is made of. Bounds for ours: less than 3 GiB of
RAM that is nobody else's (the page cache is not counted) and less than 2 GiB of VRAM. Stock's merge of the same weights, the
oracle, is made one weight at a time, since there is no room for a third file.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from . import single

GIB = 2**30
BUDGET = 1.5  # GiB, the loader's vram_budget
RANK = 32
STRENGTHS = (0.8, -0.4)
HELD_WIDE = "patch_embedding."  # stock's Wan has it in fp32, whatever the file has
AIMS = {"RAM of its own, at most": 3.0, "VRAM, at most": 2.0}  # GiB


class Watched:
    """RAM that is nobody else's, and what is pinned, and VRAM: the most while it is entered, in GiB."""

    EVERY = 0.02  # seconds

    def __init__(self) -> None:
        self.ram = self.vram = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watched:
        import torch  # noqa: PLC0415

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch  # noqa: PLC0415

        self._over.set()
        self._thread.join()
        if torch.cuda.is_available():
            self.vram = torch.cuda.max_memory_reserved() / GIB

    def _watch(self) -> None:
        import comfy.model_management  # noqa: PLC0415

        while not self._over.wait(self.EVERY):
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
            anonymous = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
            pinned = comfy.model_management.TOTAL_PINNED_MEMORY  # registered pages of the file, and pinned buffers
            self.ram = max(self.ram, (anonymous + pinned) / GIB)


def written(folder: Path, quick: bool) -> tuple[Path, list[Path]]:
    """A model and two LoRAs for all matrices of its blocks."""
    from safetensors.torch import save_file  # noqa: PLC0415

    from .. import checkpoints  # noqa: PLC0415
    from ..memory import read_header  # noqa: PLC0415
    from .end_to_end import weights  # noqa: PLC0415

    if quick:
        path = checkpoints.write("wan_t2v", folder, "fp32")  # as the CPU holds it
    else:
        path = Path(str(weights.write("wan14", folder, "fp16", "cuda")["path"]))
    import torch  # noqa: PLC0415

    loras = []
    for seed in (1, 2):
        source = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, extent in read_header(path).extents.items():
            if len(extent.shape) == 2 and ".blocks." in f".{name}":
                module = "diffusion_model." + name.removesuffix(".weight")
                n, k = extent.shape
                tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, k, generator=source).div_(k**0.5).half()
                tensors[f"{module}.lora_B.weight"] = torch.randn(n, RANK, generator=source).mul_(0.02).half()
        loras.append(folder / f"lora_{seed}.safetensors")
        save_file(tensors, loras[-1])
    return path, loras


def odd(path: Path, saved: Path, patches: Any, device: Any) -> list[str]:
    """The tensors of the saved file that differ from what stock's patcher makes of the weight, one weight in memory at a time."""
    import comfy.model_patcher  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from safetensors import safe_open  # noqa: PLC0415

    found = []
    with safe_open(path, "pt") as source, safe_open(saved, "pt") as ours:
        names = {name.removeprefix("model."): name for name in ours.keys()}  # noqa: SIM118 - not a dictionary
        for name in source.keys():  # noqa: SIM118
            key = f"diffusion_model.{name}"
            if key not in names:
                found.append(f"{name} is missing")
                continue
            holder = torch.nn.Module()
            *parents, last = key.split(".")
            inner = holder
            for parent in parents:
                inner.add_module(parent, torch.nn.Module())
                inner = getattr(inner, parent)
            stored = source.get_tensor(name)
            held = stored.float() if name.startswith(HELD_WIDE) else stored
            inner.register_parameter(last, torch.nn.Parameter(held, requires_grad=False))
            stock = comfy.model_patcher.ModelPatcher(holder, device, torch.device("cpu"))
            stock.patches = {key: list(patches[key])} if key in patches else {}
            wanted = stock.patch_weight_to_device(key, device_to=device, return_weight=True)
            got = ours.get_tensor(names.pop(key)).to(wanted.device)
            if got.dtype != wanted.dtype or not torch.equal(got, wanted):
                found.append(name)
    return found + [f"{name} is nothing of the model's" for name in names]


def measured(folder: Path, quick: bool) -> tuple[dict[str, float], list[str]]:
    """GiB and seconds by label; and what is not as stock would have it."""
    import comfy.model_management  # noqa: PLC0415
    import comfy.sd  # noqa: PLC0415
    import comfy.utils  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from ..fusion.load.diffusion import load_streamed_diffusion_model  # noqa: PLC0415

    path, loras = written(folder, quick)
    saved = folder / "saved.safetensors"
    with torch.inference_mode():
        with Watched() as watched:
            model: Any = load_streamed_diffusion_model(str(path), None if quick else BUDGET)
            for lora, strength in zip(loras, STRENGTHS, strict=True):
                file = comfy.utils.load_torch_file(str(lora))
                model, _ = comfy.sd.load_lora_for_models(model, None, file, strength, 0.0)
            begun = time.perf_counter()
            comfy.sd.save_checkpoint(str(saved), model)
            seconds = time.perf_counter() - begun
        patches, device = model.patches, model.load_device
        del model
        comfy.model_management.unload_all_models()
        faults = odd(path, saved, patches, device)
    size = saved.stat().st_size / 1e9
    rows = {
        "RAM of its own, at most": watched.ram,
        "VRAM, at most": watched.vram,
        "seconds": seconds,
        "GB a second": size / seconds,
    }
    return rows, faults


def main(arguments: list[str] | None = None) -> int:
    cli = single.command_line(__doc__, quick="a tiny model on the CPU")
    cli.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = cli.parse_args(arguments)
    if not single.begin(options):
        return 1
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found, faults = measured(Path(folder), options.quick)
    for label, value in found.items():
        aim = AIMS.get(label)
        print(f"{label:32} {value:8.2f}" + (f"   aim: below {aim:.0f} GiB" if aim is not None else ""))
    for fault in faults[:10]:
        print(f"not as stock merges it: {fault}")
    print("every tensor is stock's own merge" if not faults else f"{len(faults)} tensors are not stock's merge")
    if not (options.quick or options.dry or faults):
        rows = [{"label": label, "value": value, "bound": AIMS.get(label)} for label, value in found.items()]
        single.leave("saving", {"rows": rows})
    return 1 if faults else 0

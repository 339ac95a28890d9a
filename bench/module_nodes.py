"""Rows of modules that go through ComfyUI's nodes, as a user's graph does: from RAM to RAM."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels_cuda import KernelPolicy
from . import kernels
from .end_to_end.card import Card
from .module_cases import esrgan

GIB = 2**30
TURNS = 7
LEAST_SECONDS = 0.5  # of turns, after the first two
MOST_GIB = 3.0  # that a picture of 4K may take


def seconds(run: Callable[[], Any]) -> float:
    """Median seconds of a call that ends with its result in RAM; the first two are for what is made once."""
    taken: list[float] = []
    while len(taken) < TURNS + 2 and (len(taken) < 3 or sum(taken[2:]) < LEAST_SECONDS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def upscaled(side: int, small: bool, on_card: bool) -> dict[str, Any]:
    """Upscale Image (using Model) with what Load Upscale Model gives, and with what FuseStream Fuse makes of it.

    Stock computes in FP32 with whatever PyTorch has switched on (TF32 in convolutions); that is what the promise is about. `--fast
    autotune` has cuDNN try its ways first: measured too.
    """
    import comfy.model_management as management  # noqa: PLC0415
    import comfy.model_patcher  # noqa: PLC0415
    from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel  # noqa: PLC0415
    from spandrel import ModelLoader  # noqa: PLC0415

    from ..fusion.networks import picture_nets  # noqa: PLC0415

    torch.manual_seed(0)
    # As the node that loads does it, which wants a file's name.
    stock: Any = ModelLoader().load_from_state_dict(esrgan(small).state_dict()).eval()
    places = management.get_torch_device(), management.unet_offload_device()
    stock.patcher = comfy.model_patcher.CoreModelPatcher(stock.model, load_device=places[0], offload_device=places[1])
    image = torch.rand(1, side, side, 3)

    def through(model: Any) -> Tensor:
        made: Tensor = ImageUpscaleWithModel.execute(model, image).args[0]
        return made

    ours, table = picture_nets.fused(stock, KernelPolicy())
    result: dict[str, Any] = {"op": "modules", "asked": {"stock": 1.5}, "replaced": len(table.replaced)}
    exact = through(stock)
    result["errors"] = {"ours": float((through(ours) - exact).norm() / exact.norm())}
    result["right"] = result["errors"]["ours"] < 0.01
    if not on_card:
        return result
    kernels.choose(lambda: through(ours), ())
    before = torch.backends.cudnn.benchmark
    first = seconds(lambda: through(ours))
    result["stock ms"] = seconds(lambda: through(stock)) * 1e3
    torch.backends.cudnn.benchmark = True
    try:
        result["stock, --fast autotune ms"] = seconds(lambda: through(stock)) * 1e3
    finally:
        torch.backends.cudnn.benchmark = before
    result["ours ms"] = min(first, seconds(lambda: through(ours))) * 1e3
    result["stock is"] = f"FP32, TF32 in convolutions {'on' if torch.backends.cudnn.allow_tf32 else 'off'}"
    return result


def styled(side: tuple[int, int], small: bool, on_card: bool) -> dict[str, Any]:
    """FuseStream Apply Style with a large picture on a card of which 3 GiB are free; and torch's layers, whole, in as much."""
    import comfy.model_management as management  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    from ..checkpoints import style as files  # noqa: PLC0415
    from ..fusion.networks.style import apply, load  # noqa: PLC0415
    from ..kernels_cuda.modules import unfuse  # noqa: PLC0415

    height, width = side
    result: dict[str, Any] = {"op": "modules", "asked": {"GiB": MOST_GIB}}
    image = torch.rand(1, height, width, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "style.safetensors"
        save_file(files.transformer() if small else files.transformer(files.PUBLISHED, 5), path)
        model = load.load(str(path))

    def run(rows: int | None = None) -> Tensor:
        return apply.apply(model, image, None, apply.Settings(rows=rows))

    if not on_card:
        error = run(32) - run()
        result |= {"errors": {"ours": float(error.norm())}, "right": bool(error.abs().max() < 0.01)}
        return result
    management.unload_all_models()  # those of other rows would be given up for this one, and their memory used
    management.soft_empty_cache()
    with Card(MOST_GIB) as card:
        kernels.choose(run, ())
        card.restart()
        result["ours ms"] = seconds(run) * 1e3
        result["ours GiB"] = card.peak
        unfuse(model.net)
        torch.cuda.empty_cache()
        card.restart()
        x = image.movedim(-1, 1).cuda().half().mul(255)
        try:
            result["eager ms"] = seconds(lambda: model.net(x).cpu()) * 1e3
            result["eager GiB"] = card.peak
        except torch.OutOfMemoryError:
            result["eager failed"] = "out of memory"
    return result

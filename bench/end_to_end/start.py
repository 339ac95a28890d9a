"""Starts ComfyUI without its server, as its main.py does: the command line, the paging of VRAM, then the rest.

Nothing here may import torch before `comfy_aimdo` is ready, and nothing may import ComfyUI before its command line is known.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence


def start_comfyui(arguments: Sequence[str], attention: str | None = None) -> None:
    """From here on `comfy` can be imported. attention: torch's only kernel that it may use."""
    folder = os.environ.get("COMFYUI_PATH")
    if not folder:
        raise RuntimeError(
            "COMFYUI_PATH is not set: call `python3 dev.py bench models`, which finds or fetches ComfyUI."
        )
    sys.path.insert(0, folder)
    sys.argv = ["main.py", *arguments]
    import comfy.options  # noqa: PLC0415

    comfy.options.enable_args_parsing()
    from comfy.cli_args import args, enables_dynamic_vram  # noqa: PLC0415

    sys.argv = sys.argv[:1]
    paging = importlib.import_module("comfy_aimdo.control")
    dynamic = enables_dynamic_vram() and not args.cpu
    if dynamic:
        headroom = None if args.reserve_vram is None else int(args.reserve_vram * 2**30)
        paging.init(simple_vram_headroom=headroom, nvml_pressure=not args.disable_nvml_pressure)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    import comfy.memory_management  # noqa: PLC0415
    import comfy.model_management  # noqa: PLC0415
    import comfy.model_patcher  # noqa: PLC0415

    if dynamic:
        devices = comfy.model_management.get_all_torch_devices()
        if paging.init_devices((d.index, int(args.vram_headroom * 2**30)) for d in devices):
            paging.set_log_warning()
            comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
            comfy.memory_management.aimdo_enabled = True
    if attention and not args.cpu:
        import comfy.ops  # noqa: PLC0415
        from torch.nn.attention import SDPBackend  # noqa: PLC0415

        only = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[attention]
        comfy.ops.SDPA_BACKEND_PRIORITY[:] = [only]

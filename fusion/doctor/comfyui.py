"""The surrounding ComfyUI: its version, switches that matter here, and packs known to touch the
same things."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..base import needed_comfyui
from ..base.format import counted
from .findings import ADVICE, STOPS

# Switches that change which memory or attention serves. Others are not told, because some name
# people's folders.
SWITCHES = (
    "cpu", "lowvram", "novram", "highvram", "gpu_only", "normalvram", "reserve_vram", "vram_headroom", "disable_dynamic_vram",
    "enable_dynamic_vram", "disable_pinned_memory", "disable_async_offload", "async_offload", "disable_smart_memory",
    "force_fp32", "force_fp16", "fp32_unet", "fp16_unet", "bf16_unet", "fp32_vae", "fp16_vae", "bf16_vae", "cpu_vae", "fast",
    "use_split_cross_attention", "use_quad_cross_attention", "use_pytorch_cross_attention", "use_sage_attention",
    "use_flash_attention", "disable_xformers", "deterministic", "cache_none", "cache_classic", "cache_lru", "cache_ram",
)  # fmt: skip
OTHER_ATTENTION = ("use_sage_attention", "use_flash_attention", "use_split_cross_attention", "use_quad_cross_attention")
# Known packs by a part of their folder's name, with their relation to this one.
PACKS = {
    "multigpu": "its loaders place models by themselves and replace parts of ComfyUI's memory management; not tested together",
    "wanvideowrapper": "its models are of a type of their own: its samplers do not take ours, nor ComfyUI's samplers its models",
    "kjnodes": "its node that patches in Sage Attention takes the place of FuseStream's attention on that model",
    "gguf": "its models are of a kind of their own, which FuseStream leaves alone; our loaders stream GGUF files too",
    "teacache": "skips steps by replacing the model's forward; not tested together",
    "wavespeed": "skips blocks by replacing the model's forward; not tested together",
    "raylight": "spreads models over cards with patchers of its own; not tested together",
    "nunchaku": "quantised models with loaders of its own; no conflict is known",
}


def version(folder: Path | None) -> Iterator[str]:
    """The versions of ComfyUI and its packages. folder: of a ComfyUI that is not running; None: the
    one that we run in."""
    if folder is None and importlib.util.find_spec("comfyui_version") is None:
        yield "no ComfyUI here: give its folder with --comfyui PATH"
        return
    if folder is None:
        found = needed_comfyui.version() or "of unknown version"
    else:
        found = needed_comfyui.version_of(folder) or "of unknown version"
    yield f"ComfyUI {found}"
    if needed_comfyui.is_too_old(found):
        yield f"{STOPS}FuseStream needs ComfyUI {needed_comfyui.OLDEST} or newer. Update ComfyUI."
    for package in ("comfy-aimdo", "comfy-kitchen"):
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:  # noqa: PERF203
            yield f"{package} is not installed"


def switches() -> Iterator[str]:
    """The running server's switches that differ from their defaults."""
    module = sys.modules.get("comfy.cli_args")
    if module is None:
        yield "ComfyUI is not running in this process: its command line is not known"
        return
    default = vars(module.parser.parse_args([]))
    given = vars(module.args)
    changed = {name: given[name] for name in SWITCHES if name in given and given[name] != default.get(name)}
    yield "command line: " + (
        ", ".join(f"--{k.replace('_', '-')}={v}" for k, v in changed.items() if v) or "nothing of note"
    )
    for name in OTHER_ATTENTION:
        if changed.get(name):
            yield f"{ADVICE}--{name.replace('_', '-')}: this attention is kept, and FuseStream's runs only with kernels set to 'on'"
    if changed.get("force_fp32") or changed.get("fp32_unet"):
        yield f"{ADVICE}the model computes in FP32: the FP16 kernels are not asked"


def memory_management() -> Iterator[str]:
    """ComfyUI's own use of VRAM in this process."""
    if "comfy.model_management" not in sys.modules:
        yield "ComfyUI is not running in this process"
        return
    management = sys.modules["comfy.model_management"]
    state = getattr(getattr(management, "vram_state", None), "name", "unknown")
    paging = getattr(sys.modules.get("comfy.memory_management"), "aimdo_enabled", False)
    yield f"state {state}, dynamic VRAM {'on' if paging else 'off'}, device {management.get_torch_device()}"
    yield f"kept for the desktop: {management.extra_reserved_memory() / 2**30:.2f} GiB"
    loaded = getattr(management, "current_loaded_models", [])
    names = [type(one.model.model).__name__ for one in loaded if one.model is not None]
    yield f"models loaded: {', '.join(names) or 'none'}"


def other_packs(folders: Sequence[Path]) -> Iterator[str]:
    """Known packs among the installed ones. The names of others are private."""
    installed = [
        entry for folder in folders if folder.is_dir() for entry in sorted(folder.iterdir())
        if entry.is_dir() and not entry.name.startswith((".", "__")) and not entry.name.endswith(".disabled")
    ]  # fmt: skip
    if not folders:
        yield "the folder of custom nodes is not known here"
        return
    yield f"{counted(len(installed), 'pack')} installed"
    ours = [entry for entry in installed if (entry / "nodes" / "web" / "docs" / "FuseStreamDoctor.md").exists()]
    if len(ours) > 1:
        yield f"{ADVICE}FuseStream is installed {len(ours)} times: remove all but one"
    for entry in (entry for entry in installed if entry not in ours):  # whatever its folder's name is
        plain = re.sub(r"[^a-z]", "", entry.name.lower())
        for part, known in PACKS.items():
            if part in plain:
                yield f"{entry.name}: {known}"

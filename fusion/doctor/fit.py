"""Fit of this pack and this ComfyUI: whether they ran together, what has stepped aside, and what is
left to ComfyUI.

Verdicts of trials are kept on disk (`compatibility/verdicts.py`), so that a doctor without ComfyUI
tells them too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from ...kernels_cuda import device_code
from ..base import needed_comfyui
from ..compatibility.aside import stepped_aside
from ..compatibility.verdicts_file import FILE, VerdictsFile
from .findings import ADVICE

DOCUMENT = "docs/comfyui-versions.md"
# Features of newer ComfyUIs that this pack does not use, by module: how to tell, and what serves
# instead.
UNUSED: tuple[tuple[str, Callable[[ModuleType], bool], str], ...] = (
    (
        "comfy.ldm.modules.attention",
        lambda module: hasattr(module, "attention_comfy_kitchen_int8"),
        "comfy-kitchen's INT8 attention: ComfyUI serves it where it, or a file, asks for it; ours is the quality Fastest",
    ),
    (
        "comfy.model_prefetch",
        lambda module: hasattr(module, "pause_malloc_graph"),
        "the Comfy Compiler: models that stream pause its recording while weights arrive, and are not captured by it",
    ),
    (
        "comfy.ops",
        lambda module: hasattr(module, "linear_input_act_"),
        "linear layers with a prologue and an epilogue: ComfyUI's own blocks use them, fused blocks have kernels of ours",
    ),
    (
        "comfy.quant_ops",
        lambda module: "awq_w4a16" in getattr(module, "QUANT_ALGOS", {}),
        "4-bit products (awq_w4a16 and its like): ComfyUI computes layers that are stored so",
    ),
)


def fit(folder: Path | None) -> Iterator[str]:
    """Whether this ComfyUI was tested, what has stepped aside, and what is not used. folder: of a
    ComfyUI that is not running; None: the one that we run in."""
    found = needed_comfyui.version_of(folder) if folder is not None else needed_comfyui.version()
    known = " and ".join(needed_comfyui.RUN_WITH)
    if found is None:
        yield f"FuseStream was run with ComfyUI {known}; which one is here is not known"
    elif found in needed_comfyui.RUN_WITH:
        yield f"FuseStream was run with ComfyUI {known}, of which this is one"
    else:
        yield (
            f"FuseStream was run with ComfyUI {known}, not with {found}: each part is held against ComfyUI's own code before it "
            f"takes over, and what was read of newer versions stands in {DOCUMENT}"
        )
    yield from _aside(found)
    for name, has, words in UNUSED:
        module = sys.modules.get(name)
        if module is not None and has(module):
            yield f"not used by FuseStream: {words}"


def _aside(version: str | None) -> Iterator[str]:
    now = stepped_aside()
    for one in now:
        yield f"{ADVICE}{one.words}"
    file = VerdictsFile(device_code.cache_folder() / FILE)
    file.get("")
    said = {str(one.reason) for one in now}
    newest = {}  # by specimen, card and type; later verdicts stand later in the file
    for key, verdict in file.entries:
        name, comfyui, torch, pack, where, dtype, *_ = key.split("|")
        if comfyui == f"ComfyUI {version}" and pack == needed_comfyui.pack_version():
            newest[name, where, dtype] = torch, verdict.difference
    for (name, *_), (torch, difference) in newest.items():
        reason = f"{name}: {difference}"
        if difference is not None and reason not in said:
            said.add(reason)
            yield f"{ADVICE}at an earlier start, with {torch}, ComfyUI computed this itself, since its code is another: {reason}"
    if not said:
        yield "nothing has stepped aside"

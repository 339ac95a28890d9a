"""The example workflow at a size for two CPU cores, on the tiny checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from . import pack
from .client import Workflow
from .paths import ROOT
from .templates import files as published
from .templates.from_stock import stand_ins
from .templates.from_stock.swap import Json

pack.load()

from fusestream import checkpoints  # noqa: E402 - the line above makes it importable
from fusestream.checkpoints.quantise import quantise  # noqa: E402

WORKFLOW = ROOT / "workflows" / "api" / "wan2.1_t2v_1.3B.json"
# Our loaders in the order model, text encoder, VAE: the widget that names the file, and its folder below `models`.
LOADERS = {
    "FuseStreamDiffusionModelLoader": ("model_name", "diffusion_models"),
    "FuseStreamTextEncoderLoader": ("text_encoder_name", "text_encoders"),
    "FuseStreamVAELoader": ("vae_name", "vae"),
}
KINDS = ("wan_t2v", "umt5", "wan_vae")
# Seconds of work, yet long enough to cross the VAE's frame cache several times.
SIZE = {"width": 128, "height": 128, "length": 17, "steps": 6}


def write_checkpoints(models: Path) -> list[Path]:
    """Write the three files below the folder `models`: diffusion model, text encoder, VAE."""
    return [checkpoints.write(kind, models / checkpoints.KINDS[kind].folder) for kind in KINDS]


def write_published(models: Path, names: Collection[str] | None = None) -> None:
    """Write a stand-in below the folder `models` for every file that an example names, or for these, under the published
    name."""
    for seed, file in enumerate(published.FILES):
        if names is not None and file.name not in names:
            continue
        target = models / file.folder / file.name
        if file.tiny in checkpoints.HOLLOW:
            checkpoints.write_hollow(file.tiny, target)
        elif not target.exists():
            making = target.parent / "making"  # beside it a file of the tiny model's own name may lie already
            write = checkpoints.whole.write if file.folder == "checkpoints" else checkpoints.write
            written = write(file.tiny, making, file.storage, seed=seed)
            if file.packed:
                quantise(written, target, file.packed)
            else:
                written.rename(target)
            shutil.rmtree(making)


def write_stand_ins(models: Path, workflow: Json) -> None:
    """The same for the files of one of ComfyUI's templates."""
    for seed, (folder, name) in enumerate(stand_ins.named(workflow)):
        target = models / folder / name
        if not target.exists():
            one = stand_ins.LORA if folder == "loras" else stand_ins.STAND_INS[name]
            making = target.parent / "making"
            written = checkpoints.write(one.kind, making, one.storage, seed=seed)
            if one.packed:
                quantise(written, target, one.packed)
            else:
                written.rename(target)
            shutil.rmtree(making)


def write_int8(target: Path) -> None:
    """A tiny Wan in INT8 with ConvRot, as most files of ComfyUI's own templates are stored."""
    plain = checkpoints.write("wan_t2v", target.parent / "making", "fp16")
    quantise(plain, target, "int8_convrot")
    shutil.rmtree(plain.parent)


def load_workflow() -> Workflow:
    """The example workflow as it ships, in API format."""
    workflow: Workflow = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    return workflow


def node_of(workflow: Workflow, class_type: str) -> dict[str, Any]:
    """The first node of this type."""
    return next(node for node in workflow.values() if node["class_type"] == class_type)


def use_files(workflow: Workflow, files: list[Path]) -> None:
    """Put the names of `files` (diffusion model, text encoder, VAE) into the loaders."""
    for file, (class_type, (widget, _)) in zip(files, LOADERS.items(), strict=True):
        node_of(workflow, class_type)["inputs"][widget] = file.name


def shrink(workflow: Workflow, **sizes: int) -> None:
    """Set width, height, length and steps wherever a node has them; a sampler of some of the steps keeps its share."""
    for node in workflow.values():
        inputs = node["inputs"]
        before = inputs.get("steps")
        given = {**SIZE, **sizes}
        inputs.update({key: value for key, value in given.items() if not isinstance(inputs.get(key, []), list)})
        for key in ("start_at_step", "end_at_step"):
            if inputs.get(key, 0) in range(1, before or 0):
                inputs[key] = max(1, inputs[key] * inputs["steps"] // before)

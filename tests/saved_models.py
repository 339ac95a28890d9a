"""A model that stock's node has saved, as its file has it. Where to, says the fixture `output`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from comfy_extras import nodes_model_merging
from safetensors.torch import load_file


def saved(model: Any, output: Path, name: str) -> dict[str, torch.Tensor]:
    nodes_model_merging.ModelSave().save(model, name)
    (path,) = output.glob(f"{name}*.safetensors")
    assert len(list(output.iterdir())) == len(list(output.glob("*.safetensors"))), "and nothing beside it"
    return load_file(path)

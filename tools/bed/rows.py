"""The rows of the test matrix: on which versions the tests run besides the pinned ones, and which tests.

Each row names the packages that it has in another version. What those ask for is pinned here too, so that a row is the
same on every day; all other packages are the pinned ones of `tests/constraints.txt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

UNIT, CONTRACT = "tests/unit", "tests/contract"
SERVER, BROWSER = "tests/server", "tests/browser"


@dataclass(frozen=True)
class Row:
    """A row: what it is called and stands for, its packages by name and version, its folders of tests."""

    name: str
    what: str
    parts: tuple[str, ...]
    pins: Mapping[str, str] = field(default_factory=dict)
    own_torch: bool = False  # then all packages are installed anew; else the pinned environment lies below
    thorough: bool = False


ROWS = {
    row.name: row
    for row in (
        Row("pinned", "pinned packages, --thorough", (UNIT, CONTRACT, SERVER, BROWSER), thorough=True),
        Row("tree", "the packages that the tree asks for", (UNIT, CONTRACT, SERVER)),
        Row(
            "kitchen",
            "newest comfy-kitchen and comfy-aimdo",
            (UNIT, CONTRACT, SERVER),
            {"comfy-kitchen": "0.2.40", "comfy-aimdo": "0.6.0"},
        ),
        Row(
            "front-end",
            "newest front end and templates, --thorough",
            (BROWSER, SERVER),
            {
                "comfyui-frontend-package": "1.58.1",
                "comfyui-workflow-templates": "0.11.97",
                "comfyui-workflow-templates-core": "0.3.388",
                "comfyui-workflow-templates-json": "0.1.123",
                "comfyui-workflow-templates-media-assets-01": "0.1.48",
                "comfyui-workflow-templates-media-assets-02": "0.1.24",
            },
            thorough=True,
        ),
        # ComfyUI asks for torch 2.5, kornia, which it installs, for 2.5.1. That has its own compiler for kernels.
        Row(
            "torch-oldest",
            "oldest torch",
            (UNIT, CONTRACT, SERVER),
            {
                "torch": "2.5.1",
                "torchvision": "0.20.1",
                "torchaudio": "2.5.1",
                "sympy": "1.13.1",
                "nvidia-cuda-nvrtc-cu12": "12.4.127",
                "nvidia-cuda-runtime-cu12": "12.4.127",
            },
            own_torch=True,
        ),
        # Torch 2.15 is built for CUDA 13.2, the last torchaudio for 13.0: importing that fails, and with it ComfyUI.
        Row(
            "torch-newest",
            "newest torch that torchaudio, which ComfyUI imports, still goes with",
            (UNIT, CONTRACT, SERVER),
            {"torch": "2.14.1", "torchvision": "0.29.1", "torchaudio": "2.11.0"},
            own_torch=True,
        ),
    )
}
# Whose versions a result tells.
TOLD = ("torch", "comfy-kitchen", "comfy-aimdo", "comfyui-frontend-package", "comfyui-workflow-templates")

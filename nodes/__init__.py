"""What a user sees in the graph."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import (
    alias,
    between_prompts,
    camera_route,
    doctor_route,
    estimate_route,
    fuse,
    moving_preview,
    panel_routes,
    queued,
    step_times,
    user_settings,
)
from .doctor import Doctor
from .fuse import FuseNode
from .kernels import ModelKernels, TextEncoderKernels, VAEKernels
from .live import LiveVideo
from .loaders import CheckpointLoader, DiffusionModelLoader, TextEncoderLoader, VAELoader
from .plan import Plan
from .report import Compare, ReportNode
from .sparse import SparseAttentionNode
from .style import ApplyStyle, LoadStyleModel

NODES: list[type[io.ComfyNode]] = [
    DiffusionModelLoader,
    TextEncoderLoader,
    VAELoader,
    CheckpointLoader,
    ModelKernels,
    TextEncoderKernels,
    VAEKernels,
    SparseAttentionNode,
    LiveVideo,
    LoadStyleModel,
    ApplyStyle,
    FuseNode,
    Plan,
    ReportNode,
    Compare,
    Doctor,
]


class FuseStream(ComfyExtension):
    """The pack, as ComfyUI's V3 node API asks for it."""

    async def on_load(self) -> None:
        alias.attach()
        queued.attach()
        doctor_route.attach()
        estimate_route.attach()
        between_prompts.attach()
        panel_routes.attach()
        step_times.attach()
        user_settings.attach()
        camera_route.attach()
        moving_preview.attach()
        fuse.attach()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> FuseStream:
    return FuseStream()

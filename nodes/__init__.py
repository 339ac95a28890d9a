"""The nodes that a user sees in the graph.

declare.py   a node and its inputs, declared once    graph/   a graph, read before it runs
loaders.py   and their files: files.py               page/    between the server and the page
kernels.py, sparse.py, step_cache.py, live.py and camera.py, pictures.py, reports.py, doctor.py: the
other nodes
"""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import alias, camera, doctor, estimate_route, pictures
from .doctor import Doctor
from .graph import queued
from .kernels import ModelKernels, TextEncoderKernels, VAEKernels
from .live import LiveVideo
from .loaders import CheckpointLoader, DiffusionModelLoader, TextEncoderLoader, VAELoader
from .page import between_prompts, example_inputs, moving_preview, node_times, panel, user_files
from .pictures import ApplyStyle, FuseNode, LoadStyleModel
from .reports import Compare, Plan, ReportNode
from .sparse import SparseAttentionNode
from .step_cache import StepCacheNode

NODES: list[type[io.ComfyNode]] = [
    DiffusionModelLoader,
    TextEncoderLoader,
    VAELoader,
    CheckpointLoader,
    ModelKernels,
    TextEncoderKernels,
    VAEKernels,
    SparseAttentionNode,
    StepCacheNode,
    LiveVideo,
    LoadStyleModel,
    ApplyStyle,
    FuseNode,
    Plan,
    ReportNode,
    Compare,
    Doctor,
]
# Modules that listen to the server, or attach to it, from its start on; in this order.
ATTACHED = (
    alias, queued, doctor, estimate_route, between_prompts, node_times, panel, user_files, camera, moving_preview,
    pictures, example_inputs,
)  # fmt: skip


class FuseStream(ComfyExtension):
    """The pack, as ComfyUI's V3 node API asks for it."""

    async def on_load(self) -> None:
        for module in ATTACHED:
            module.attach()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES


async def comfy_entrypoint() -> FuseStream:
    return FuseStream()

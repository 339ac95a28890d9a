"""Examples of live video: a file and a camera through SD-Turbo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import files
from ..graph import Column, Graph
from ..inputs import CLIP
from .parts import METER, columns_of, prompt_nodes, put_note


def live_video(graph: Graph) -> None:
    columns = columns_of(330, 330, 330, 400)
    about = "Choose your video in **The video to change**."
    _live(graph, columns, "Live video with SD-Turbo", about, file=CLIP, blend=0.5)


def live_camera(graph: Graph) -> None:
    columns = columns_of(330, 330, 330, 400)
    about = (
        "Press **Run** and allow the camera; **Stop the camera** saves the video. Browsers ask for localhost or https."
    )
    _live(graph, columns, "Live camera with SD-Turbo", about, blend=0.3, skip=0.005)


def _live(
    graph: Graph, columns: Sequence[Column], title: str, about: str, file: str | None = None, **more: Any
) -> None:
    """What both have in common. file: of a video; None: the camera."""
    weights = files.SD_TURBO
    loader = graph.add(columns[0], "FuseStreamCheckpointLoader", ckpt_name=weights.name, files=(weights,))
    columns[0].y += METER
    if file is not None:
        video = graph.add(columns[0], "LoadVideo", "The video to change", tall=420, file=file, upload="image")
        more["video"] = video[0]
    model, encoder, vae = (loader[slot] for slot in range(3))
    positive, negative = prompt_nodes(graph, columns[1], encoder, "a painting of toys, thick strokes of oil on canvas")
    links: dict[str, Any] = {"model": model, "positive": positive[0], "negative": negative[0], "vae": vae}
    # Higher by the camera's button, and by the newest frame, which is drawn on the node while it runs.
    live = graph.add(columns[2], "FuseStreamLiveVideo", tall=760, scheduler="sd_turbo", **links, **more)
    saved: dict[str, Any] = {"filename_prefix": "video/FuseStream-live", "format": "auto", "codec": "auto"}
    graph.add(columns[3], "SaveVideo", tall=480, video=live[1], **saved)
    advice = "Faster with **taesd** as the VAE."
    put_note(graph, columns[1:2], title, about, None, advice)

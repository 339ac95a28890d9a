"""What example workflows share: loaders, prompts, sampling, saving, notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import files
from ..files import File
from ..graph import GREEN, OLIVE, RED, Column, Graph, Node, Output
from ..note import Work, note, room

AVOID = (
    "static, blurred details, overexposed, subtitles, watermark, low quality, JPEG artifacts, deformed limbs, "
    "cluttered background"
)
# Streams what does not fit through what is free: right on any card, so every example says it.
AUTOMATIC = -1
METER = 68  # more room below a loader that streams: its live meter is drawn there
PREVIEW = 220  # by which the sampler of a video grows as it samples


def columns_of(*widths: int, gap: int = 30) -> list[Column]:
    x, out = 40, []
    for width in widths:
        out.append(Column(x, width))
        x += width + gap
    return out


def loaders_of(
    graph: Graph,
    column: Column,
    model: File,
    vae: File = files.VAE21,
    encoder: File = files.UMT5,
    type_: str = "auto",
) -> tuple[Node, Node, Node]:
    loaders = model_loader(graph, column, model), encoder_loader(graph, column, encoder, type_)
    return *loaders, vae_loader(graph, column, vae)


def model_loader(graph: Graph, column: Column, file: File, title: str | None = None, **more: Any) -> Node:
    values = {"vram_budget": AUTOMATIC, "quality": "auto", **more}
    type_ = "FuseStreamDiffusionModelLoader"
    loader = graph.add(column, type_, title, model_name=file.name, files=(file,), **values)
    column.y += METER
    return loader


def encoder_loader(
    graph: Graph, column: Column, file: File = files.UMT5, type_: str = "auto", title: str | None = None, **more: Any
) -> Node:
    values: dict[str, Any] = {"text_encoder_name": file.name, "vram_budget": AUTOMATIC, "type": type_, **more}
    loader = graph.add(column, "FuseStreamTextEncoderLoader", title, files=(file,), **values)
    column.y += METER
    return loader


def vae_loader(graph: Graph, column: Column, file: File, title: str | None = None, **more: Any) -> Node:
    return graph.add(column, "FuseStreamVAELoader", title, vae_name=file.name, files=(file,), **more)


def vision_loader(graph: Graph, column: Column) -> Node:
    return graph.add(column, "CLIPVisionLoader", clip_name=files.VISION.name, files=(files.VISION,))


def shift_node(graph: Graph, column: Column, model: Output, shift: float) -> Node:
    return graph.add(column, "ModelSamplingSD3", model=model, shift=shift)


def prompt_nodes(graph: Graph, column: Column, clip: Output, text: str, tall: int = 150) -> tuple[Node, Node]:
    return (
        graph.add(column, "CLIPTextEncode", "What to show", tall, GREEN, clip=clip, text=text),
        graph.add(column, "CLIPTextEncode", "What to avoid", tall, RED, clip=clip, text=AVOID),
    )


def sizes(work: Work) -> dict[str, Any]:
    return {"width": work.width, "height": work.height, "length": work.length, "batch_size": 1}


def size_node(graph: Graph, column: Column, work: Work) -> Node:
    return graph.add(column, "EmptyHunyuanLatentVideo", "Size and length", **sizes(work))


def sample(
    graph: Graph,
    column: Column,
    model: Output,
    positive: Output,
    negative: Output,
    latent: Output,
    work: Work,
    cfg: float,
    sampler: str = "uni_pc",
    title: str | None = None,
    after: str = "randomize",
) -> Node:
    node = graph.add(
        column,
        "KSampler",
        title,
        model=model,
        positive=positive,
        negative=negative,
        latent_image=latent,
        seed=42,
        control_after_generate=after,
        steps=work.steps,
        cfg=cfg,
        sampler_name=sampler,
        scheduler="simple",
        denoise=1.0,
    )
    if work.length > 1:
        column.grows = PREVIEW
    return node


def sample_klein(
    graph: Graph, columns: Sequence[Column], model: Output, prompt: Output, width: Output, height: Output, work: Work
) -> Node:
    """In two columns. With Flux.2's own schedule, which goes by the size."""
    first, second = columns
    size: dict[str, Any] = {"width": width, "height": height}
    latent = graph.add(first, "EmptyFlux2LatentImage", batch_size=1, **size)
    noise = graph.add(first, "RandomNoise", noise_seed=42, control_after_generate="randomize")
    sampler = graph.add(first, "KSamplerSelect", sampler_name="euler")
    sigmas = graph.add(second, "Flux2Scheduler", steps=work.steps, **size)
    guider = graph.add(second, "BasicGuider", model=model, conditioning=prompt)
    inputs = {"noise": noise, "guider": guider, "sampler": sampler, "sigmas": sigmas, "latent_image": latent}
    links: dict[str, Any] = {name: node[0] for name, node in inputs.items()}
    return graph.add(second, "SamplerCustomAdvanced", **links)


def save_picture(graph: Graph, column: Column, latent: Output, vae: Output, last: Column, tall: int = 480) -> None:
    """Decode in `column`, save in `last`."""
    images = graph.add(column, "VAEDecode", samples=latent, vae=vae)
    graph.add(last, "SaveImage", tall=tall, images=images[0], filename_prefix="FuseStream")


def save(
    graph: Graph,
    column: Column,
    latent: Output,
    vae: Output,
    work: Work,
    last: Column | None = None,
    tall: int = 300,
) -> None:
    """Decode and put the frames together in `column`, save in `last`."""
    images = graph.add(column, "VAEDecode", samples=latent, vae=vae)
    write_video(graph, column, images[0], work, last or column, "FuseStream", None, tall)


def write_video(
    graph: Graph, column: Column, images: Output, work: Work, last: Column, name: str, title: str | None, tall: int
) -> None:
    """Put the frames together in `column`, save the video in `last`."""
    video = graph.add(column, "CreateVideo", images=images, fps=float(work.fps), bit_depth=8)
    saved: dict[str, Any] = {"filename_prefix": f"video/{name}", "format": "auto", "codec": "auto"}
    graph.add(last, "SaveVideo", title, tall, video=video[0], **saved)


def put_note(graph: Graph, span: Sequence[Column], title: str, about: str, work: Work | None, advice: str) -> None:
    """Across the columns of `span`, below what they have so far; what comes later goes below the note."""
    text = note(title, about, graph.files(), work, advice)
    put_text(graph, span, "Which file goes where, what to expect", text)


def put_text(graph: Graph, span: Sequence[Column], heading: str, text: str) -> None:
    first, last = span[0], span[-1]
    below = Column(first.x, last.x + last.width - first.x, max(column.y + column.grows for column in span))
    graph.add(below, "MarkdownNote", heading, room(text, below.width), OLIVE, text=text)
    for column in span:
        column.y = below.y

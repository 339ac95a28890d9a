"""Examples of pictures: klein, Z-Image, a style."""

from __future__ import annotations

from typing import Any

from .. import files, prediction
from ..graph import GREEN, Graph
from ..inputs import PICTURE
from ..note import Work, plain
from .parts import (
    columns_of,
    loaders_of,
    put_note,
    put_text,
    sample,
    sample_klein,
    save_picture,
)

PORTRAIT = (
    "a red fox sits in a snowy pine forest and looks into the camera, morning light, sharp fur, shallow depth of field"
)
SMALLER = "Smaller files, GGUF too, work as well."


def klein(graph: Graph) -> None:
    columns = columns_of(330, 310, 270, 260, 320)
    work = Work(prediction.KLEIN, 1024, 1024, 1, 4, prompts=1)
    model, encoder, vae = loaders_of(graph, columns[0], files.KLEIN, files.FLUX2_VAE, files.QWEN3, "flux2")
    prompt = graph.add(columns[1], "CLIPTextEncode", "What to show", 150, GREEN, clip=encoder[0], text=PORTRAIT)
    width, height = (
        graph.add(columns[1], "PrimitiveInt", title, value=value, control_after_generate="fixed")
        for title, value in (("Width", work.width), ("Height", work.height))
    )
    sampled = sample_klein(graph, columns[2:4], model[0], prompt[0], width[0], height[0], work)
    save_picture(graph, columns[3], sampled[0], vae[0], columns[4])
    about = "Distilled: there is no guidance, and so nothing to avoid. The text encoder's **type** is *flux2*."
    put_note(graph, columns[1:3], "Flux.2 klein, 4B", about, work, SMALLER)


def klein_edit(graph: Graph) -> None:
    """The reference is brought to a megapixel, in sides of which tokens come out whole; the picture gets its size."""
    columns = columns_of(330, 280, 290, 270, 310)
    work = Work(prediction.KLEIN, 1024, 1024, 1, 4, prompts=1, references=1)
    model, encoder, vae = loaders_of(graph, columns[0], files.KLEIN, files.FLUX2_VAE, files.QWEN3, "flux2")
    image = graph.add(columns[1], "LoadImage", "Picture to change", tall=314, image=PICTURE, upload="image")
    scaled = graph.add(
        columns[1],
        "ImageScaleToTotalPixels",
        image=image[0],
        upscale_method="lanczos",
        megapixels=1.0,
        resolution_steps=prediction.SIDE,
    )
    text = "the same picture as a watercolour painting"
    prompt = graph.add(columns[2], "CLIPTextEncode", "What to change", 150, GREEN, clip=encoder[0], text=text)
    encoded = graph.add(columns[2], "VAEEncode", pixels=scaled[0], vae=vae[0])
    referred = graph.add(columns[2], "ReferenceLatent", conditioning=prompt[0], latent=encoded[0])
    size = graph.add(columns[2], "GetImageSize", image=scaled[0])
    sampled = sample_klein(graph, columns[3:5], model[0], referred[0], size[0], size[1], work)
    save_picture(graph, columns[4], sampled[0], vae[0], columns[4], tall=260)
    about = "Choose yours in **Picture to change**; the result has its shape."
    put_note(graph, columns[1:4], "Flux.2 klein, 4B: change a picture", about, work, SMALLER)


def z_image(graph: Graph) -> None:
    columns = columns_of(340, 360, 320, 460)
    work = Work(prediction.Z_IMAGE, 1024, 1024, 1, 8, prompts=1)
    model, encoder, vae = loaders_of(graph, columns[0], files.Z_IMAGE, files.FLUX_VAE, files.QWEN3, "lumina2")
    shifted = graph.add(columns[1], "ModelSamplingAuraFlow", model=model[0], shift=3.0)
    prompt = graph.add(columns[1], "CLIPTextEncode", "What to show", 170, GREEN, clip=encoder[0], text=PORTRAIT)
    nothing = graph.add(columns[1], "ConditioningZeroOut", conditioning=prompt[0])
    size: dict[str, Any] = {"width": work.width, "height": work.height, "batch_size": 1}
    latent = graph.add(columns[2], "EmptySD3LatentImage", "Size", **size)
    sampled = sample(graph, columns[2], shifted[0], prompt[0], nothing[0], latent[0], work, 1.0, "res_multistep")
    save_picture(graph, columns[3], sampled[0], vae[0], columns[3])
    about = "Distilled: **cfg** stays at 1, and so there is nothing to avoid. The text encoder's **type** is *lumina2*."
    put_note(graph, columns[1:3], "Z-Image Turbo", about, work, SMALLER)


def style_transfer(graph: Graph) -> None:
    """A picture as it is, and the network that has the look."""
    columns = columns_of(340, 340, 480)
    image = graph.add(columns[0], "LoadImage", "Picture or frames", tall=314, image=PICTURE, upload="image")
    style = graph.add(columns[1], "FuseStreamLoadStyleModel", style_name="ink and wash (example)")
    made = graph.add(columns[1], "FuseStreamApplyStyle", style=style[0], image=image[0])
    graph.add(columns[2], "SaveImage", tall=480, images=made[0], filename_prefix="FuseStream")
    about = (
        "Another look for a picture, in one pass of a small network, which comes with FuseStream. Others go into "
        "*models/style_models*."
    )
    advice = "For a video connect its frames, and set **smooth** to 0.5 against flicker."
    put_text(graph, columns[:2], "How it works, what to expect", plain("Style transfer", about, advice))

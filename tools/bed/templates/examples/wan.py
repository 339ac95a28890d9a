"""Examples of Wan: videos from texts, pictures and frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import files, prediction
from ..files import File
from ..graph import GREEN, RED, Column, Graph, Node, Output
from ..inputs import LAST, PICTURE
from ..note import Work
from .parts import (
    AVOID,
    columns_of,
    encoder_loader,
    loaders_of,
    model_loader,
    prompt_nodes,
    put_note,
    sample,
    save,
    shift_node,
    size_node,
    sizes,
    vae_loader,
    vision_loader,
    write_video,
)

FOX = "a red fox runs through a snowy pine forest, morning light, the camera follows at its side"
MOVE = "the scene comes alive: a gentle wind, slow natural movement, the camera moves in a little"
TURNS = "one scene turns slowly into the other"
FRAMES = {"First frame": PICTURE, "Last frame": LAST}
LONGER = "Set **length** to 81 once it works."
CHOOSE = "Choose your picture in **First frame**."
CHOOSE_BOTH = "Choose **First frame** and **Last frame**."
UNGUIDED = "**cfg** stays 1; **What to avoid** has no effect."
PACKED = "No pack for GGUF is needed."
TOGETHER = 7.0  # GiB of VRAM for all models of an example that share a budget
ASK = (
    "Describe this picture as the first frame of a video, and what happens next: who moves and how, and how the camera moves. One "
    "paragraph, nothing else."
)
# How narrow a column may be with a text encoder or a picture to load in it: in Japanese, whose titles and labels are the longest,
# an element takes 22 more, which the gap has.
ENCODER, PICTURED = 296, 264


def text_to_video_small(graph: Graph) -> None:
    work = Work(prediction.SMALL, 832, 480, 33, 30)
    _text_to_video(graph, files.T2V_SMALL, work, cfg=6.0, about="Text to video: the small model, to begin with.")


def text_to_video(graph: Graph) -> None:
    work = Work(prediction.LARGE, 832, 480, 33, 20)
    _text_to_video(
        graph, files.T2V, work, cfg=6.0, about="Text to video: the large model, for better pictures and more time."
    )


def four_steps(graph: Graph) -> None:
    _four_steps(graph, "Wan 2.1 text to video, 14B in 4 steps", UNGUIDED, LONGER, files.T2V, files.UMT5)


def four_steps_gguf(graph: Graph) -> None:
    title = "Wan 2.1 text to video, 14B in 4 steps, GGUF"
    _four_steps(graph, title, UNGUIDED, PACKED, files.T2V_GGUF, files.UMT5_GGUF)


def _four_steps(graph: Graph, title: str, about: str, advice: str, file: File, encoder_file: File) -> None:
    """As stock does it: the LoRA between loader and sampling, guidance off."""
    columns = columns_of(340, 360, 320, 440)
    work = Work(prediction.LARGE, 832, 480, 33, 4, prompts=1)
    model, encoder, vae = loaders_of(graph, columns[0], file, encoder=encoder_file)
    lora = graph.add(
        columns[1],
        "LoraLoaderModelOnly",
        model=model[0],
        lora_name=files.FOUR_STEPS.name,
        strength_model=1.0,
        files=(files.FOUR_STEPS,),
    )
    shifted = shift_node(graph, columns[1], lora[0], 5.0)
    positive, negative = prompt_nodes(graph, columns[1], encoder[0], FOX, tall=110)
    latent = size_node(graph, columns[2], work)
    sampled = sample(graph, columns[2], shifted[0], positive[0], negative[0], latent[0], work, 1.0, "lcm")
    save(graph, columns[3], sampled[0], vae[0], work)
    put_note(graph, columns[1:3], title, about, work, advice)


def image_to_video(graph: Graph) -> None:
    columns = columns_of(300, 300, 270, 270, 330)
    work = Work(prediction.LARGE, 832, 480, 33, 20)
    model, encoder, vae = loaders_of(graph, columns[0], files.I2V)
    vision = vision_loader(graph, columns[1])
    shifted = shift_node(graph, columns[1], model[0], 8.0)
    positive, negative = prompt_nodes(graph, columns[1], encoder[0], MOVE)
    image = graph.add(columns[2], "LoadImage", "First frame", tall=314, image=PICTURE, upload="image")
    links = {"positive": positive[0], "negative": negative[0], "vae": vae[0]}
    put_note(
        graph, columns[3:], "Wan 2.1 image to video, 14B", CHOOSE, work, LONGER
    )  # above: see `_pair_in_four_steps`
    _animate(graph, columns[2:], shifted[0], vision[0], image[0], links, work)


def _animate(
    graph: Graph,
    columns: Sequence[Column],
    model: Output,
    vision: Output,
    image: Output,
    links: dict[str, Output],
    work: Work,
) -> None:
    """From a first frame and its prompts to a saved video, in three columns. links: prompts and VAE."""
    seen = graph.add(columns[0], "CLIPVisionEncode", clip_vision=vision, image=image, crop="none")
    more: dict[str, Any] = {**links, "clip_vision_output": seen[0], "start_image": image, **sizes(work)}
    made = graph.add(columns[0], "WanImageToVideo", "Size and length", **more)
    sampled = sample(graph, columns[1], model, made[0], made[1], made[2], work, 6.0)
    save(graph, columns[1], sampled[0], links["vae"], work, columns[2])


def caption_and_animate(graph: Graph) -> None:
    """A language model sees the picture and writes what will happen; both models, and the text encoder, share one budget."""
    columns = columns_of(300, 300, 270, 270, 330)
    work = Work(prediction.LARGE, 832, 480, 33, 20)
    budget: dict[str, Any] = {"vram_budget": TOGETHER}
    model = model_loader(graph, columns[0], files.I2V, **budget)
    writer = encoder_loader(graph, columns[0], files.QWEN3_VL, title="What sees and writes", **budget)
    encoder = encoder_loader(graph, columns[0], **budget)
    vision = vision_loader(graph, columns[1])
    image = graph.add(columns[1], "LoadImage", "First frame", tall=314, image=PICTURE, upload="image")
    told = graph.add(
        columns[1],
        "TextGenerate",
        "What happens next",
        310,
        clip=writer[0],
        image=image[0],
        prompt=ASK,
        max_length=160,
        sampling_mode="off",
        thinking=False,
        use_default_template=True,
    )
    vae = vae_loader(graph, columns[1], files.VAE21)
    shifted = shift_node(graph, columns[2], model[0], 8.0)
    positive = graph.add(columns[2], "CLIPTextEncode", "As it was written", 80, GREEN, clip=encoder[0], text=told[0])
    negative = graph.add(columns[2], "CLIPTextEncode", "What to avoid", 150, RED, clip=encoder[0], text=AVOID)
    links = {"positive": positive[0], "negative": negative[0], "vae": vae[0]}
    about = "Qwen3-VL sees the picture in **First frame** and writes what happens next; Wan makes a video of both."
    advice = "**qwen3_vl_2b_instruct.safetensors** is *model.safetensors* there."
    put_note(graph, columns[3:], "Caption and animate: Qwen3-VL and Wan 2.1", about, work, advice)
    _animate(graph, columns[2:], shifted[0], vision[0], image[0], links, work)


def first_and_last_frame(graph: Graph) -> None:
    columns = columns_of(300, PICTURED, 300, 290, 290)
    work = Work(prediction.LARGE, 832, 480, 33, 20)
    model, encoder, vae = loaders_of(graph, columns[0], files.FLF2V)
    vision = vision_loader(graph, columns[2])
    shifted = shift_node(graph, columns[2], model[0], 8.0)
    positive, negative = prompt_nodes(graph, columns[2], encoder[0], TURNS)
    images = [
        graph.add(columns[1], "LoadImage", title, tall=314, image=picture, upload="image")
        for title, picture in FRAMES.items()
    ]
    seen = [
        graph.add(columns[3], "CLIPVisionEncode", clip_vision=vision[0], image=image[0], crop="none")
        for image in images
    ]
    made = graph.add(
        columns[3],
        "WanFirstLastFrameToVideo",
        "Size and length",
        positive=positive[0],
        negative=negative[0],
        vae=vae[0],
        clip_vision_start_image=seen[0][0],
        clip_vision_end_image=seen[1][0],
        start_image=images[0][0],
        end_image=images[1][0],
        **sizes(work),
    )
    sampled = sample(graph, columns[4], shifted[0], made[0], made[1], made[2], work, 3.0)
    save(graph, columns[4], sampled[0], vae[0], work)
    title = "Wan 2.1 first and last frame to video, 14B"
    put_note(graph, columns[2:4], title, CHOOSE_BOTH, work, LONGER)


def vace(graph: Graph) -> None:
    columns = columns_of(300, 300, 270, 270, 330)
    work = Work(prediction.SMALL_VACE, 832, 480, 33, 20)
    model, encoder, vae = loaders_of(graph, columns[0], files.VACE)
    shifted = shift_node(graph, columns[1], model[0], 8.0)
    positive, negative = prompt_nodes(graph, columns[1], encoder[0], f"the subject of the picture, in motion; {MOVE}")
    image = graph.add(columns[2], "LoadImage", "Who or what to show", tall=314, image=PICTURE, upload="image")
    made = graph.add(
        columns[2],
        "WanVaceToVideo",
        "Size and length",
        positive=positive[0],
        negative=negative[0],
        vae=vae[0],
        reference_image=image[0],
        strength=1.0,
        **sizes(work),
    )
    sampled = sample(graph, columns[3], shifted[0], made[0], made[1], made[2], work, 5.0)
    trimmed = graph.add(columns[3], "TrimVideoLatent", samples=sampled[0], trim_amount=made[3])
    save(graph, columns[3], trimmed[0], vae[0], work, columns[4])
    about = "A control video goes into **control_video** and **control_masks**."
    advice = "**wan2.1_vace_14B_fp16.safetensors** works here too: better, and five times the work."
    put_note(graph, columns[1:3], "Wan 2.1 VACE, 1.3B", about, work, advice)


def pair(graph: Graph) -> None:
    """Wan 2.2's two experts: one for the first steps, one for the others, each with its own loader."""
    columns = columns_of(310, 310, 290, 580)
    work = Work(prediction.LARGE, 832, 480, 33, 20)
    high = model_loader(graph, columns[0], files.HIGH, "First steps: high noise")
    low = model_loader(graph, columns[0], files.LOW, "Other steps: low noise")
    encoder, vae = encoder_loader(graph, columns[0]), vae_loader(graph, columns[1], files.VAE21)
    about = "**steps** must be the same in both samplers. The VAE is Wan 2.1's."
    put_note(graph, columns[3:], "Wan 2.2 text to video, the 14B pair", about, work, LONGER)
    shifted = [shift_node(graph, columns[1], loader[0], 8.0) for loader in (high, low)]
    positive, negative = prompt_nodes(graph, columns[1], encoder[0], FOX, tall=110)
    latent = size_node(graph, columns[1], work)
    last = _take_turns(graph, (columns[2], columns[2]), shifted, positive[0], negative[0], latent[0], work, 3.5)
    save(graph, columns[3], last, vae[0], work, tall=230)


def image_to_video_pair(graph: Graph) -> None:
    _pair_in_four_steps(graph, "Wan 2.2 image to video, 14B in 4 steps", MOVE, CHOOSE, ("First frame",))


def image_to_video_pair_gguf(graph: Graph) -> None:
    title, packed = "Wan 2.2 image to video, 14B in 4 steps, GGUF", (files.I2V_HIGH_GGUF, files.I2V_LOW_GGUF)
    _pair_in_four_steps(graph, title, MOVE, CHOOSE, ("First frame",), packed, files.UMT5_GGUF)


def first_and_last_pair(graph: Graph) -> None:
    title = "Wan 2.2 first and last frame to video, 14B in 4 steps"
    _pair_in_four_steps(graph, title, TURNS, CHOOSE_BOTH, tuple(FRAMES))


def _pair_in_four_steps(
    graph: Graph,
    title: str,
    text: str,
    about: str,
    frames: Sequence[str],
    pair: tuple[File, File] = (files.I2V_HIGH, files.I2V_LOW),
    encoder_file: File = files.UMT5,
) -> None:
    """From a first frame, or from a first one and a last one."""
    columns = columns_of(ENCODER, 240, PICTURED, 240, 240, 240, gap=24)
    work = Work(prediction.LARGE, 832, 480, 33, 4, prompts=1)
    high = model_loader(graph, columns[0], pair[0], "First steps: high noise")
    low = model_loader(graph, columns[0], pair[1], "Other steps: low noise")
    encoder = encoder_loader(graph, columns[0], encoder_file)
    shifted = []
    for loader, lora in ((high, files.FOUR_STEPS_HIGH), (low, files.FOUR_STEPS_LOW)):
        named: dict[str, Any] = {"model": loader[0], "lora_name": lora.name, "strength_model": 1.0}
        patched = graph.add(columns[1], "LoraLoaderModelOnly", files=(lora,), **named)
        shifted.append(shift_node(graph, columns[1], patched[0], 5.0))
    vae = vae_loader(graph, columns[1], files.VAE21)
    positive, negative = prompt_nodes(graph, columns[1], encoder[0], text, tall=90)
    images = [
        graph.add(columns[2], "LoadImage", frame, tall=314, image=FRAMES[frame], upload="image")[0] for frame in frames
    ]
    put_note(graph, columns[3:], title, about, work, UNGUIDED)  # above: the minimap lies on what is below at the right
    given: dict[str, Any] = {"positive": positive[0], "negative": negative[0], "vae": vae[0], **sizes(work)}
    type_ = "WanImageToVideo" if len(images) == 1 else "WanFirstLastFrameToVideo"
    links: dict[str, Any] = dict(zip(("start_image", "end_image"), images, strict=False))
    made = graph.add(columns[3], type_, "Size and length", **given, **links)
    last = _take_turns(graph, columns[3:5], shifted, made[0], made[1], made[2], work, 1.0)
    save(graph, columns[5], last, vae[0], work, tall=230)


def _take_turns(
    graph: Graph,
    columns: Sequence[Column],
    models: Sequence[Node],
    positive: Output,
    negative: Output,
    latent: Output,
    work: Work,
    cfg: float,
) -> Output:
    """Two samplers, each in its column: one for the first half of the steps, one for the others."""
    switch, last = work.steps // 2, latent
    for index, (noise, seed, after, start, end, left) in enumerate(
        (("enable", 42, "randomize", 0, switch, "enable"), ("disable", 0, "fixed", switch, 10000, "disable"))
    ):
        last = graph.add(
            columns[index],
            "KSamplerAdvanced",
            ("First steps", "Other steps")[index],
            model=models[index][0],
            positive=positive,
            negative=negative,
            latent_image=last,
            add_noise=noise,
            noise_seed=seed,
            control_after_generate=after,
            steps=work.steps,
            cfg=cfg,
            sampler_name="euler",
            scheduler="simple",
            start_at_step=start,
            end_at_step=end,
            return_with_leftover_noise=left,
        )[0]
    return last


def five(graph: Graph) -> None:
    columns = columns_of(340, 360, 320, 440)
    work = Work(prediction.FIVE, 1280, 704, 49, 20, fps=24)
    model, encoder, vae = loaders_of(graph, columns[0], files.TI2V, files.VAE22)
    shifted = shift_node(graph, columns[1], model[0], 8.0)
    positive, negative = prompt_nodes(graph, columns[1], encoder[0], FOX)
    latent = graph.add(columns[2], "Wan22ImageToVideoLatent", "Size and length", vae=vae[0], **sizes(work))
    sampled = sample(graph, columns[2], shifted[0], positive[0], negative[0], latent[0], work, 5.0)
    save(graph, columns[3], sampled[0], vae[0], work)
    about = "For image to video connect a *Load Image* with **start_image** of **Size and length**."
    advice = "Set **length** to 121 once it works."
    put_note(graph, columns[1:3], "Wan 2.2 text or image to video, 5B", about, work, advice)


def side_by_side(graph: Graph) -> None:
    """One loader, two branches over the same weights: its kernels as they are, and a Kernels node that switches them off."""
    columns = columns_of(300, 300, 250, 270, 290)
    work = Work(prediction.SMALL, 832, 480, 33, 20)
    model, encoder = model_loader(graph, columns[0], files.T2V_SMALL), encoder_loader(graph, columns[0])
    positive, negative = prompt_nodes(graph, columns[1], encoder[0], FOX, tall=80)
    latent = size_node(graph, columns[1], work)
    vae = vae_loader(graph, columns[1], files.VAE21)
    about = "**A** with FuseStream's kernels, **B** with ComfyUI's. Compare times from the second run on."
    advice = "That is for each of the two videos."
    put_note(graph, columns[:2], "A and B: kernels on and off", about, work, advice)
    off = graph.add(columns[2], "FuseStreamKernels", "B: kernels off", model=model[0], kernels="off")
    prompts = positive[0], negative[0], latent[0], work, 6.0
    reports, frames = [], []
    for letter, branch in (("A", model), ("B", off)):
        sampled = sample(graph, columns[2], branch[0], *prompts, title=letter, after="fixed")
        run: dict[str, Any] = {"after": sampled[0], "model": branch[0]}
        reports.append(graph.add(columns[3], "FuseStreamReport", f"{letter}: report", collapsed=True, **run))
        column = columns[4]
        frames.append(
            graph.add(column, "VAEDecode", f"{letter}: frames", samples=sampled[0], vae=vae[0], collapsed=True)
        )
    both = Column(columns[3].x, columns[4].x + columns[4].width - columns[3].x, columns[3].y)
    graph.add(both, "FuseStreamCompare", "A and B", 480, first=reports[0][1], second=reports[1][1])
    columns[3].y = columns[4].y = both.y
    beside: dict[str, Any] = {
        "direction": "right",
        "match_image_size": True,
        "spacing_width": 4,
        "spacing_color": "black",
    }
    images = graph.add(columns[3], "ImageStitch", image1=frames[0][0], image2=frames[1][0], **beside)
    write_video(graph, columns[3], images[0], work, columns[4], "FuseStream-A-B", "Left A, right B", 320)


def _text_to_video(graph: Graph, file: File, work: Work, cfg: float, about: str) -> None:
    columns = columns_of(340, 360, 320, 440)
    model, encoder, vae = loaders_of(graph, columns[0], file)
    shifted = shift_node(graph, columns[1], model[0], 8.0)
    positive, negative = prompt_nodes(graph, columns[1], encoder[0], FOX)
    latent = size_node(graph, columns[2], work)
    sampled = sample(graph, columns[2], shifted[0], positive[0], negative[0], latent[0], work, cfg)
    save(graph, columns[3], sampled[0], vae[0], work)
    size = "1.3B" if file is files.T2V_SMALL else "14B"
    put_note(graph, columns[1:3], f"Wan 2.1 text to video, {size}", about, work, LONGER)

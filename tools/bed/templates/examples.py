"""The example workflows, one function each, with what they share below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import files, prediction
from .files import File
from .graph import BROWN, GREEN, RED, Column, Graph, Node, Output
from .note import Work, note, plain

FOX = "a red fox runs through a snowy pine forest, morning light, the camera follows at its side"
AVOID = (
    "static, blurred details, overexposed, subtitles, watermark, low quality, JPEG artifacts, deformed limbs, "
    "cluttered background"
)
PORTRAIT = (
    "a red fox sits in a snowy pine forest and looks into the camera, morning light, sharp fur, shallow depth of field"
)
MOVE = "the scene comes alive: a gentle wind, slow natural movement, the camera moves in a little"
# Streams what does not fit through what is free: right on any card, so every example says it.
AUTOMATIC = -1
STREAMS = "The weights stream through the VRAM that is free (**vram_budget** -1)."
LONGER = "The model was trained on 81 frames: set **length** to 81 once the first video works."
PACKED = (
    f"{STREAMS} They are unpacked for each product, which the prediction leaves out. No pack for GGUF is needed. Files from Q2_K "
    "to Q8_0 work: the larger the number in the name, the nearer to the original, and the more to bring."
)
# What the notes on klein have in common: which files are smaller, and in which type it computes.
SMALLER_ENCODER = "**qwen_3_4b_fp8_mixed.safetensors** (5.6 GB)"
KLEIN_FILES = (
    "Smaller: **flux-2-klein-4b-fp8.safetensors** (4.1 GB, in *black-forest-labs/FLUX.2-klein-4b-fp8*), "
    f"{SMALLER_ENCODER}, and GGUF files of both. **flux-2-klein-9b** works here too, with **qwen_3_8b** as its text encoder."
)
FP16 = "It computes in FP16 on every card; *--bf16-unet* keeps ComfyUI's own operations and bf16."
PICTURE = "example.png"
TOGETHER = 7.0  # GiB of VRAM for all models of an example that share a budget
ASK = (
    "Describe this picture as the first frame of a video, and what happens next: who moves and how, and how the camera moves. One "
    "paragraph, nothing else."
)
CLIP = "live_clip.mp4"  # made by clip.py
# How narrow a column may be with a text encoder or a picture to load in it: in Japanese, whose titles and labels are the longest,
# an element takes 22 more, which the gap has.
ENCODER, PICTURED = 296, 264
METER = 68  # more room below a loader that streams: its live meter is drawn there


@dataclass(frozen=True)
class Example:
    """A workflow by a short name, with the two lines of its picture in the template browser. There it stands under its title, the
    name of its file, and can be found by that."""

    name: str
    headline: str
    subline: str
    build: Callable[[Graph], None]
    is_picture: bool = False
    samples: bool = True  # whether a diffusion model does the work

    @property
    def title(self) -> str:
        """Numbered, since the browser goes by the letters: what to begin with comes first."""
        return f"FuseStream {EXAMPLES.index(self) + 1:02} - {self.headline} ({self.subline})"

    is_live: bool = False

    def graph(self) -> Graph:
        graph = Graph(self.name)
        self.build(graph)
        return graph


def text_to_video_small(graph: Graph) -> None:
    work = Work(prediction.SMALL, 832, 480, 33, 30)
    _text_to_video(graph, files.T2V_SMALL, work, cfg=6.0, about="Text to video: the small model, to begin with.")


def text_to_video(graph: Graph) -> None:
    work = Work(prediction.LARGE, 832, 480, 33, 20)
    _text_to_video(
        graph, files.T2V, work, cfg=6.0, about="Text to video: the large model, for better pictures and more time."
    )


def four_steps(graph: Graph) -> None:
    about = (
        "Text to video in 4 steps: a distilled LoRA stands for most of the steps and for the guidance. **cfg** stays at 1, and "
        "**What to avoid** has no effect."
    )
    _four_steps(graph, "Wan 2.1 text to video, 14B in 4 steps", about, f"{STREAMS} {LONGER}", files.T2V, files.UMT5)


def four_steps_gguf(graph: Graph) -> None:
    about = (
        "Text to video in 4 steps out of GGUF files: about two thirds of the bytes of fp8, over the bus and of RAM. A distilled "
        "LoRA stands for most of the steps and for the guidance. **cfg** stays at 1, and **What to avoid** has no effect."
    )
    advice = f"{PACKED} {LONGER}"
    _four_steps(
        graph, "Wan 2.1 text to video, 14B in 4 steps, GGUF", about, advice, files.T2V_GGUF, files.UMT5_GGUF, tall=360
    )


def _four_steps(
    graph: Graph, title: str, about: str, advice: str, file: File, encoder_file: File, tall: int = 310
) -> None:
    """As stock does it: the LoRA between loader and sampling, guidance off."""
    columns = _columns(340, 360, 320, 440)
    work = Work(prediction.LARGE, 832, 480, 33, 4, prompts=1)
    model, encoder, vae = _loaders(graph, columns[0], file, encoder=encoder_file)
    lora = graph.add(
        columns[1],
        "LoraLoaderModelOnly",
        model=model[0],
        lora_name=files.FOUR_STEPS.name,
        strength_model=1.0,
        files=(files.FOUR_STEPS,),
    )
    shifted = _shift(graph, columns[1], lora[0], 5.0)
    positive, negative = _prompts(graph, columns[1], encoder[0], FOX, tall=110)
    latent = _size(graph, columns[2], work)
    sampled = _sample(graph, columns[2], shifted[0], positive[0], negative[0], latent[0], work, 1.0, "lcm")
    _save(graph, columns[3], sampled[0], vae[0], work)
    _note(graph, columns[1:3], title, about, work, advice, tall)


def image_to_video(graph: Graph) -> None:
    columns = _columns(300, 300, 270, 270, 330)
    work = Work(prediction.LARGE, 832, 480, 33, 20)
    model, encoder, vae = _loaders(graph, columns[0], files.I2V)
    vision = _vision(graph, columns[1])
    shifted = _shift(graph, columns[1], model[0], 8.0)
    positive, negative = _prompts(graph, columns[1], encoder[0], MOVE)
    image = graph.add(columns[2], "LoadImage", "First frame", tall=314, image=PICTURE, upload="image")
    seen = graph.add(columns[2], "CLIPVisionEncode", clip_vision=vision[0], image=image[0], crop="none")
    made = graph.add(
        columns[2],
        "WanImageToVideo",
        "Size and length",
        positive=positive[0],
        negative=negative[0],
        vae=vae[0],
        clip_vision_output=seen[0],
        start_image=image[0],
        **_sizes(work),
    )
    sampled = _sample(graph, columns[3], shifted[0], made[0], made[1], made[2], work, 6.0)
    _save(graph, columns[3], sampled[0], vae[0], work, columns[4])
    about = "Image to video: the picture becomes the first frame, the text says what happens. Choose yours in **First frame**."
    _note(graph, columns[3:], "Wan 2.1 image to video, 14B", about, work, f"{STREAMS} {LONGER}")


def caption_and_animate(graph: Graph) -> None:
    """A language model sees the picture and writes what will happen; both models, and the text encoder, share one budget."""
    columns = _columns(300, 300, 270, 270, 330)
    work = Work(prediction.LARGE, 832, 480, 33, 20)
    budget: dict[str, Any] = {"vram_budget": TOGETHER}
    model = _model_loader(graph, columns[0], files.I2V, **budget)
    writer = _encoder_loader(graph, columns[0], files.QWEN3_VL, title="What sees and writes", **budget)
    encoder = _encoder_loader(graph, columns[0], **budget)
    vision = _vision(graph, columns[1])
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
    vae = _vae_loader(graph, columns[1], files.VAE21)
    shifted = _shift(graph, columns[2], model[0], 8.0)
    positive = graph.add(columns[2], "CLIPTextEncode", "As it was written", 80, GREEN, clip=encoder[0], text=told[0])
    negative = graph.add(columns[2], "CLIPTextEncode", "What to avoid", 150, RED, clip=encoder[0], text=AVOID)
    seen = graph.add(columns[2], "CLIPVisionEncode", clip_vision=vision[0], image=image[0], crop="none")
    made = graph.add(
        columns[2],
        "WanImageToVideo",
        "Size and length",
        positive=positive[0],
        negative=negative[0],
        vae=vae[0],
        clip_vision_output=seen[0],
        start_image=image[0],
        **_sizes(work),
    )
    sampled = _sample(graph, columns[3], shifted[0], made[0], made[1], made[2], work, 6.0)
    _save(graph, columns[3], sampled[0], vae[0], work, columns[4])
    about = (
        "Qwen3-VL sees the picture in **First frame** and writes what may happen next; Wan makes a video of both. Say in **What "
        "happens next** what you want to have told, or turn its **sampling_mode** on for another text each time."
    )
    advice = (
        f"All loaders share **vram_budget** {TOGETHER:g}: what one of them needs, the others give back. {LONGER} "
        "**qwen3_vl_2b_instruct.safetensors** is *model.safetensors* there. The 4B and 8B of Qwen3-VL, with type *qwen_image*, "
        "write better and slower."
    )
    _note(graph, columns[3:], "Caption and animate: Qwen3-VL and Wan 2.1", about, work, advice, tall=390)


def first_and_last_frame(graph: Graph) -> None:
    columns = _columns(300, PICTURED, 300, 290, 290)
    work = Work(prediction.LARGE, 832, 480, 33, 20)
    model, encoder, vae = _loaders(graph, columns[0], files.FLF2V)
    vision = _vision(graph, columns[2])
    shifted = _shift(graph, columns[2], model[0], 8.0)
    positive, negative = _prompts(graph, columns[2], encoder[0], "one scene turns slowly into the other")
    images = [
        graph.add(columns[1], "LoadImage", title, tall=314, image=PICTURE, upload="image")
        for title in ("First frame", "Last frame")
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
        **_sizes(work),
    )
    sampled = _sample(graph, columns[4], shifted[0], made[0], made[1], made[2], work, 3.0)
    _save(graph, columns[4], sampled[0], vae[0], work)
    about = (
        "First and last frame to video: two pictures, and the model finds the way from one to the other. Choose yours in **First "
        "frame** and **Last frame**. The model is made for 720p and takes smaller sizes."
    )
    title = "Wan 2.1 first and last frame to video, 14B"
    _note(graph, columns[2:4], title, about, work, f"{STREAMS} {LONGER}", tall=340)


def vace(graph: Graph) -> None:
    columns = _columns(300, 300, 270, 270, 330)
    work = Work(prediction.SMALL_VACE, 832, 480, 33, 20)
    model, encoder, vae = _loaders(graph, columns[0], files.VACE)
    shifted = _shift(graph, columns[1], model[0], 8.0)
    positive, negative = _prompts(graph, columns[1], encoder[0], f"the subject of the picture, in motion; {MOVE}")
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
        **_sizes(work),
    )
    sampled = _sample(graph, columns[3], shifted[0], made[0], made[1], made[2], work, 5.0)
    trimmed = graph.add(columns[3], "TrimVideoLatent", samples=sampled[0], trim_amount=made[3])
    _save(graph, columns[3], trimmed[0], vae[0], work, columns[4])
    about = (
        "VACE: video from a reference picture. A control video (poses, edges, depth, or a clip with masked parts) goes into "
        "**control_video** and **control_masks**; *Trim Video Latent* takes the reference's own frames off again."
    )
    advice = f"{STREAMS} **wan2.1_vace_14B_fp16.safetensors** works here too: better, and five times the work."
    _note(graph, columns[1:3], "Wan 2.1 VACE, 1.3B", about, work, advice)


def pair(graph: Graph) -> None:
    """Wan 2.2's two experts: one for the first steps, one for the others, each with its own loader."""
    columns = _columns(310, 310, 290, 580)
    work = Work(prediction.LARGE, 832, 480, 33, 20)
    high = _model_loader(graph, columns[0], files.HIGH, "First steps: high noise")
    low = _model_loader(graph, columns[0], files.LOW, "Other steps: low noise")
    encoder, vae = _encoder_loader(graph, columns[0]), _vae_loader(graph, columns[1], files.VAE21)
    about = (
        "Text to video with Wan 2.2: two models of 14B, one for the first half of the steps, one for the second. "
        "**steps** must be the same in both samplers, and one ends where the other begins. The VAE is Wan 2.1's."
    )
    advice = f"{STREAMS} Both loaders share the larger of their budgets: only one samples at a time."
    _note(graph, columns[3:], "Wan 2.2 text to video, the 14B pair", about, work, advice, tall=370)
    shifted = [_shift(graph, columns[1], loader[0], 8.0) for loader in (high, low)]
    positive, negative = _prompts(graph, columns[1], encoder[0], FOX, tall=110)
    latent = _size(graph, columns[1], work)
    last = _take_turns(graph, (columns[2], columns[2]), shifted, positive[0], negative[0], latent[0], work, 3.5)
    _save(graph, columns[3], last, vae[0], work, tall=230)


def image_to_video_pair(graph: Graph) -> None:
    about = (
        "Image to video with Wan 2.2 in 4 steps: two models of 14B, each with its LoRA, two steps each. The picture becomes the "
        "first frame, the text says what happens. Choose yours in **First frame**. **cfg** stays at 1, and **What to avoid** has "
        "no effect."
    )
    _pair_in_four_steps(graph, "Wan 2.2 image to video, 14B in 4 steps", MOVE, about, ("First frame",))


def image_to_video_pair_gguf(graph: Graph) -> None:
    about = (
        "Image to video with Wan 2.2 in 4 steps out of GGUF files: about two thirds of the bytes of fp8, over the bus and of RAM. "
        "Two models of 14B, each with its LoRA, two steps each. Choose your picture in **First frame**. **cfg** stays at 1, and "
        "**What to avoid** has no effect."
    )
    title, packed = "Wan 2.2 image to video, 14B in 4 steps, GGUF", (files.I2V_HIGH_GGUF, files.I2V_LOW_GGUF)
    _pair_in_four_steps(graph, title, MOVE, about, ("First frame",), packed, files.UMT5_GGUF, PACKED)


def first_and_last_pair(graph: Graph) -> None:
    about = (
        "First and last frame to video with Wan 2.2 in 4 steps: the model finds the way from one picture to the other. Choose "
        "yours in **First frame** and **Last frame**. Two models of 14B, each with its LoRA, two steps each. **cfg** stays at "
        "1, and **What to avoid** has no effect."
    )
    text, frames = "one scene turns slowly into the other", ("First frame", "Last frame")
    _pair_in_four_steps(graph, "Wan 2.2 first and last frame to video, 14B in 4 steps", text, about, frames)


def _pair_in_four_steps(
    graph: Graph,
    title: str,
    text: str,
    about: str,
    frames: Sequence[str],
    pair: tuple[File, File] = (files.I2V_HIGH, files.I2V_LOW),
    encoder_file: File = files.UMT5,
    streams: str = STREAMS,
) -> None:
    """From a first frame, or from a first one and a last one."""
    columns = _columns(ENCODER, 240, PICTURED, 240, 240, 240, gap=24)
    work = Work(prediction.LARGE, 832, 480, 33, 4, prompts=1)
    high = _model_loader(graph, columns[0], pair[0], "First steps: high noise")
    low = _model_loader(graph, columns[0], pair[1], "Other steps: low noise")
    encoder = _encoder_loader(graph, columns[0], encoder_file)
    shifted = []
    for loader, lora in ((high, files.FOUR_STEPS_HIGH), (low, files.FOUR_STEPS_LOW)):
        named: dict[str, Any] = {"model": loader[0], "lora_name": lora.name, "strength_model": 1.0}
        patched = graph.add(columns[1], "LoraLoaderModelOnly", files=(lora,), **named)
        shifted.append(_shift(graph, columns[1], patched[0], 5.0))
    vae = _vae_loader(graph, columns[1], files.VAE21)
    positive, negative = _prompts(graph, columns[1], encoder[0], text, tall=90)
    images = [graph.add(columns[2], "LoadImage", frame, tall=314, image=PICTURE, upload="image")[0] for frame in frames]
    given: dict[str, Any] = {"positive": positive[0], "negative": negative[0], "vae": vae[0], **_sizes(work)}
    type_ = "WanImageToVideo" if len(images) == 1 else "WanFirstLastFrameToVideo"
    links: dict[str, Any] = dict(zip(("start_image", "end_image"), images, strict=False))
    made = graph.add(columns[3], type_, "Size and length", **given, **links)
    last = _take_turns(graph, columns[3:5], shifted, made[0], made[1], made[2], work, 1.0)
    _save(graph, columns[5], last, vae[0], work, tall=230)
    advice = f"{streams} Both loaders share the larger of their budgets: only one samples at a time. {LONGER}"
    _note(graph, columns[3:], title, about, work, advice, tall=270)


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
    columns = _columns(340, 360, 320, 440)
    work = Work(prediction.FIVE, 1280, 704, 49, 20, fps=24)
    model, encoder, vae = _loaders(graph, columns[0], files.TI2V, files.VAE22)
    shifted = _shift(graph, columns[1], model[0], 8.0)
    positive, negative = _prompts(graph, columns[1], encoder[0], FOX)
    latent = graph.add(columns[2], "Wan22ImageToVideoLatent", "Size and length", vae=vae[0], **_sizes(work))
    sampled = _sample(graph, columns[2], shifted[0], positive[0], negative[0], latent[0], work, 5.0)
    _save(graph, columns[3], sampled[0], vae[0], work)
    about = (
        "Text or image to video with Wan 2.2's 5B model, at 24 frames a second. For image to video connect a *Load Image* with "
        "**start_image** of **Size and length**. It has a VAE of its own: **wan2.2_vae**."
    )
    advice = (
        f"{STREAMS} The model was trained on 121 frames of 1280x704: set **length** to 121 once the first video works. "
        "Its VAE was not measured on a GPU yet."
    )
    _note(graph, columns[1:3], "Wan 2.2 text or image to video, 5B", about, work, advice)


def side_by_side(graph: Graph) -> None:
    """One loader, two branches over the same weights: its kernels as they are, and a Kernels node that switches them off."""
    columns = _columns(300, 300, 250, 270, 290)
    work = Work(prediction.SMALL, 832, 480, 33, 20)
    model, encoder = _model_loader(graph, columns[0], files.T2V_SMALL), _encoder_loader(graph, columns[0])
    positive, negative = _prompts(graph, columns[1], encoder[0], FOX, tall=80)
    latent = _size(graph, columns[1], work)
    vae = _vae_loader(graph, columns[1], files.VAE21)
    about = (
        "The same video twice, from one seed and one loader: **A** with FuseStream's kernels, **B** behind a *Kernels* node that "
        "switches them off. Both stream the same weights. Switch a single kernel there to see what it alone does. **A and B** "
        "says who computed what and where the time went. Run it twice before you compare times: the first run also chooses "
        "kernels and reads the file."
    )
    advice = (
        "That is for each of the two videos. To compare with ComfyUI's own memory management too, give B a loader of its own: "
        "**kernels** *off*, **vram_budget** 0."
    )
    _note(graph, columns[:2], "A and B: kernels on and off", about, work, advice, tall=325)
    off = graph.add(columns[2], "FuseStreamKernels", "B: kernels off", model=model[0], kernels="off")
    prompts = positive[0], negative[0], latent[0], work, 6.0
    reports, frames = [], []
    for letter, branch in (("A", model), ("B", off)):
        sampled = _sample(graph, columns[2], branch[0], *prompts, title=letter, after="fixed")
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
    _write(graph, columns[3], images[0], work, columns[4], "FuseStream-A-B", "Left A, right B", 320)


def klein(graph: Graph) -> None:
    columns = _columns(330, 310, 270, 260, 320)
    work = Work(prediction.KLEIN, 1024, 1024, 1, 4, prompts=1)
    model, encoder, vae = _loaders(graph, columns[0], files.KLEIN, files.FLUX2_VAE, files.QWEN3, "flux2")
    prompt = graph.add(columns[1], "CLIPTextEncode", "What to show", 150, GREEN, clip=encoder[0], text=PORTRAIT)
    width, height = (
        graph.add(columns[1], "PrimitiveInt", title, value=value, control_after_generate="fixed")
        for title, value in (("Width", work.width), ("Height", work.height))
    )
    sampled = _sample_klein(graph, columns[2:4], model[0], prompt[0], width[0], height[0], work)
    _save_picture(graph, columns[3], sampled[0], vae[0], columns[4])
    about = (
        "Text to picture in 4 steps with Flux.2 klein 4B. It is distilled: there is no guidance, and so nothing to avoid. The text "
        "encoder's **type** is *flux2*."
    )
    _note(graph, columns[1:3], "Flux.2 klein, 4B", about, work, f"{STREAMS} {KLEIN_FILES} {FP16}", tall=380)


def klein_edit(graph: Graph) -> None:
    """The reference is brought to a megapixel, in sides of which tokens come out whole; the picture gets its size."""
    columns = _columns(330, 280, 290, 270, 310)
    work = Work(prediction.KLEIN, 1024, 1024, 1, 4, prompts=1, references=1)
    model, encoder, vae = _loaders(graph, columns[0], files.KLEIN, files.FLUX2_VAE, files.QWEN3, "flux2")
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
    sampled = _sample_klein(graph, columns[3:5], model[0], referred[0], size[0], size[1], work)
    _save_picture(graph, columns[4], sampled[0], vae[0], columns[4], tall=260)
    about = (
        "A picture changed by words, in 4 steps. Choose yours in **Picture to change**; it is scaled to about a megapixel, and the "
        "result has its shape. For a second reference put another *VAE Encode* and *Set Reference Latent* behind the first: "
        "each adds as many tokens as the picture has."
    )
    advice = f"{STREAMS} {KLEIN_FILES} {FP16}"
    _note(graph, columns[1:4], "Flux.2 klein, 4B: change a picture", about, work, advice, tall=310)


def z_image(graph: Graph) -> None:
    columns = _columns(340, 360, 320, 460)
    work = Work(prediction.Z_IMAGE, 1024, 1024, 1, 8, prompts=1)
    model, encoder, vae = _loaders(graph, columns[0], files.Z_IMAGE, files.FLUX_VAE, files.QWEN3, "lumina2")
    shifted = graph.add(columns[1], "ModelSamplingAuraFlow", model=model[0], shift=3.0)
    prompt = graph.add(columns[1], "CLIPTextEncode", "What to show", 170, GREEN, clip=encoder[0], text=PORTRAIT)
    nothing = graph.add(columns[1], "ConditioningZeroOut", conditioning=prompt[0])
    size: dict[str, Any] = {"width": work.width, "height": work.height, "batch_size": 1}
    latent = graph.add(columns[2], "EmptySD3LatentImage", "Size", **size)
    sampled = _sample(graph, columns[2], shifted[0], prompt[0], nothing[0], latent[0], work, 1.0, "res_multistep")
    _save_picture(graph, columns[3], sampled[0], vae[0], columns[3])
    about = (
        "Text to picture in 8 steps with Z-Image Turbo. It is distilled: **cfg** stays at 1, and so there is nothing to avoid. The "
        "text encoder's **type** is *lumina2*."
    )
    advice = (
        f"{STREAMS} Smaller: **z_image_turbo_int8_convrot.safetensors** (6.2 GB) and {SMALLER_ENCODER} of the same release, and "
        "GGUF files. Where ComfyUI takes FP32 (RTX 20) or bf16 for this model, FuseStream multiplies in FP16 and adds in FP32 or "
        "FP16, as the file allows."
    )
    _note(graph, columns[1:3], "Z-Image Turbo", about, work, advice, tall=360)


def style_transfer(graph: Graph) -> None:
    """A picture as it is, and the network that has the look."""
    columns = _columns(340, 340, 480)
    image = graph.add(columns[0], "LoadImage", "Picture or frames", tall=314, image=PICTURE, upload="image")
    style = graph.add(columns[1], "FuseStreamLoadStyleModel", style_name="ink and wash (example)")
    made = graph.add(columns[1], "FuseStreamApplyStyle", style=style[0], image=image[0])
    graph.add(columns[2], "SaveImage", tall=480, images=made[0], filename_prefix="FuseStream")
    about = (
        "Another look for a picture, in one pass of a small network. The one that is chosen comes with FuseStream: a tiny net that "
        "was trained on made pictures. Published ones go into *models/style_models*: transformer nets of PyTorch's "
        "*fast_neural_style* (.pth or .safetensors), or an AdaIN decoder with *vgg_normalised.pth* as **encoder_name** and a "
        "picture of the look at **style_image**. Press **R** after putting them there."
    )
    advice = (
        "Pictures that are too large for the VRAM go in bands, with the same result. For a video connect its frames, and set "
        "**smooth** to 0.5 against flicker."
    )
    _put_note(graph, columns[:2], "How it works, what to expect", plain("Style transfer", about, advice), 330)


def _columns(*widths: int, gap: int = 30) -> list[Column]:
    x, out = 40, []
    for width in widths:
        out.append(Column(x, width))
        x += width + gap
    return out


def _text_to_video(graph: Graph, file: File, work: Work, cfg: float, about: str) -> None:
    columns = _columns(340, 360, 320, 440)
    model, encoder, vae = _loaders(graph, columns[0], file)
    shifted = _shift(graph, columns[1], model[0], 8.0)
    positive, negative = _prompts(graph, columns[1], encoder[0], FOX)
    latent = _size(graph, columns[2], work)
    sampled = _sample(graph, columns[2], shifted[0], positive[0], negative[0], latent[0], work, cfg)
    _save(graph, columns[3], sampled[0], vae[0], work)
    size = "1.3B" if file is files.T2V_SMALL else "14B"
    _note(graph, columns[1:3], f"Wan 2.1 text to video, {size}", about, work, f"{STREAMS} {LONGER}")


def _loaders(
    graph: Graph,
    column: Column,
    model: File,
    vae: File = files.VAE21,
    encoder: File = files.UMT5,
    type_: str = "auto",
) -> tuple[Node, Node, Node]:
    loaders = _model_loader(graph, column, model), _encoder_loader(graph, column, encoder, type_)
    return *loaders, _vae_loader(graph, column, vae)


def _model_loader(graph: Graph, column: Column, file: File, title: str | None = None, **more: Any) -> Node:
    values = {"vram_budget": AUTOMATIC, "quality": "auto", **more}
    type_ = "FuseStreamDiffusionModelLoader"
    loader = graph.add(column, type_, title, model_name=file.name, files=(file,), **values)
    column.y += METER
    return loader


def _encoder_loader(
    graph: Graph, column: Column, file: File = files.UMT5, type_: str = "auto", title: str | None = None, **more: Any
) -> Node:
    values: dict[str, Any] = {"text_encoder_name": file.name, "vram_budget": AUTOMATIC, "type": type_, **more}
    loader = graph.add(column, "FuseStreamTextEncoderLoader", title, files=(file,), **values)
    column.y += METER
    return loader


def _vae_loader(graph: Graph, column: Column, file: File, title: str | None = None, **more: Any) -> Node:
    return graph.add(column, "FuseStreamVAELoader", title, vae_name=file.name, files=(file,), **more)


def _vision(graph: Graph, column: Column) -> Node:
    return graph.add(column, "CLIPVisionLoader", clip_name=files.VISION.name, files=(files.VISION,))


def _shift(graph: Graph, column: Column, model: Output, shift: float) -> Node:
    return graph.add(column, "ModelSamplingSD3", model=model, shift=shift)


def _prompts(graph: Graph, column: Column, clip: Output, text: str, tall: int = 150) -> tuple[Node, Node]:
    return (
        graph.add(column, "CLIPTextEncode", "What to show", tall, GREEN, clip=clip, text=text),
        graph.add(column, "CLIPTextEncode", "What to avoid", tall, RED, clip=clip, text=AVOID),
    )


def _sizes(work: Work) -> dict[str, Any]:
    return {"width": work.width, "height": work.height, "length": work.length, "batch_size": 1}


def _size(graph: Graph, column: Column, work: Work) -> Node:
    return graph.add(column, "EmptyHunyuanLatentVideo", "Size and length", **_sizes(work))


def _sample(
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
    return graph.add(
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


def _sample_klein(
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


def _save_picture(graph: Graph, column: Column, latent: Output, vae: Output, last: Column, tall: int = 480) -> None:
    """Decode in `column`, save in `last`."""
    images = graph.add(column, "VAEDecode", samples=latent, vae=vae)
    graph.add(last, "SaveImage", tall=tall, images=images[0], filename_prefix="FuseStream")


def _save(
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
    _write(graph, column, images[0], work, last or column, "FuseStream", None, tall)


def _write(
    graph: Graph, column: Column, images: Output, work: Work, last: Column, name: str, title: str | None, tall: int
) -> None:
    """Put the frames together in `column`, save the video in `last`."""
    video = graph.add(column, "CreateVideo", images=images, fps=float(work.fps), bit_depth=8)
    saved: dict[str, Any] = {"filename_prefix": f"video/{name}", "format": "auto", "codec": "auto"}
    graph.add(last, "SaveVideo", title, tall, video=video[0], **saved)


def _note(
    graph: Graph, span: Sequence[Column], title: str, about: str, work: Work | None, advice: str, tall: int = 310
) -> None:
    """Across the columns of `span`, below what they have so far; what comes later goes below the note."""
    text = note(title, about, graph.files(), work, advice)
    _put_note(graph, span, "Which file goes where, what to expect", text, tall)


def _put_note(graph: Graph, span: Sequence[Column], heading: str, text: str, tall: int) -> None:
    first, last = span[0], span[-1]
    below = Column(first.x, last.x + last.width - first.x, max(column.y for column in span))
    graph.add(below, "MarkdownNote", heading, tall, BROWN, text=text)
    for column in span:
        column.y = below.y


def live_video(graph: Graph) -> None:
    columns = _columns(330, 330, 330, 400)
    about = (
        "A video through SD-Turbo, frame by frame: one step for each, and the frame before is blended in where nothing moves. "
        f"**{CLIP}** is in the *workflows* folder of this pack: put it into ComfyUI's *input* folder, or choose one of yours in "
        "**The video to change**. **strength** says how much of it is made anew."
    )
    _live(graph, columns, "Live video with SD-Turbo", about, file=CLIP, blend=0.5)


def live_camera(graph: Graph) -> None:
    columns = _columns(330, 330, 330, 400)
    about = (
        "Your camera through SD-Turbo: press **Run**, allow the camera, look at the node; **Stop the camera** ends the video, and "
        "it is saved. Browsers give cameras only to pages on this machine (localhost) or with https. **skip** leaves out frames "
        "in which nothing happens."
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
    positive, negative = _prompts(graph, columns[1], encoder, "a painting of toys, thick strokes of oil on canvas")
    links: dict[str, Any] = {"model": model, "positive": positive[0], "negative": negative[0], "vae": vae}
    # Higher by the camera's button, and by the newest frame, which is drawn on the node while it runs.
    live = graph.add(columns[2], "FuseStreamLiveVideo", tall=760, scheduler="sd_turbo", **links, **more)
    saved: dict[str, Any] = {"filename_prefix": "video/FuseStream-live", "format": "auto", "codec": "auto"}
    graph.add(columns[3], "SaveVideo", tall=480, video=live[1], **saved)
    advice = (
        "For more frames a second connect a *FuseStream VAE Loader* with **taesd** in place of the checkpoint's VAE: put "
        "taesd_encoder and taesd_decoder, 5 MB each, from *madebyollin/taesd* on github.com, into *vae_approx*. It computes in "
        "FP16."
    )
    _note(graph, columns[1:2], title, about, None, advice, tall=400)


# In the order in which somebody gets to know them.
EXAMPLES = (
    Example("wan2.1_t2v_1.3B", "Start here, text to video", "Wan 2.1, 1.3B", text_to_video_small),
    Example("flux2_klein_4B", "Text to picture", "Flux.2 klein 4B, 4 steps", klein, is_picture=True),
    Example("wan2.1_t2v_14B_4_steps", "Text to video", "Wan 2.1, 14B, 4 steps", four_steps),
    Example("wan2.2_i2v_14B_4_steps", "Image to video", "Wan 2.2, 14B, 4 steps", image_to_video_pair),
    Example("wan2.2_flf2v_14B_4_steps", "First and last frame", "Wan 2.2, 14B, 4 steps", first_and_last_pair),
    Example("wan2.1_t2v_14B_4_steps_gguf", "Text to video, GGUF", "Wan 2.1, 14B, 4 steps", four_steps_gguf),
    Example("wan2.2_i2v_14B_4_steps_gguf", "Image to video, GGUF", "Wan 2.2, 14B, 4 steps", image_to_video_pair_gguf),
    Example("wan2.2_ti2v_5B", "Text or image to video", "Wan 2.2, 5B", five),
    Example("wan2.1_t2v_14B", "Text to video", "Wan 2.1, 14B", text_to_video),
    Example("wan2.2_t2v_14B", "Text to video", "Wan 2.2, the 14B pair", pair),
    Example("wan2.1_i2v_14B", "Image to video", "Wan 2.1, 14B", image_to_video),
    Example("wan2.1_flf2v_14B", "First and last frame", "Wan 2.1, 14B", first_and_last_frame),
    Example("wan2.1_vace_1.3B", "Reference to video", "Wan 2.1 VACE, 1.3B", vace),
    Example("caption_and_animate", "Caption and animate", "Qwen3-VL, Wan 2.1, 14B", caption_and_animate),
    Example("flux2_klein_edit", "Change a picture", "Flux.2 klein 4B, 4 steps", klein_edit, is_picture=True),
    Example("z_image_turbo", "Text to picture", "Z-Image Turbo, 8 steps", z_image, is_picture=True),
    Example(
        "style_transfer", "Another look", "one pass of a small net", style_transfer, is_picture=True, samples=False
    ),
    Example("live_video_sd_turbo", "Live video", "SD-Turbo, 1 step a frame", live_video, is_live=True),
    Example("live_camera", "Live camera", "SD-Turbo, 1 step a frame", live_camera, is_live=True),
    Example("with_and_without", "A and B", "with and without our kernels", side_by_side),
)
TITLES = {example.name: example.title for example in EXAMPLES}

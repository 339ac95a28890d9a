"""What each kind of the other families is asked to paint in the tests: random prompts, and all that such a model can be told.

    model = comfy.sd.load_diffusion_model(str(checkpoints.write("flux1", folder)))
    latents = parts(sample(model, inputs("flux1")))

Kinds in `checkpoints.NARROW` load while `checkpoints.narrow.opened(comfy)` is open; sampling does not need it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import comfy.nested_tensor
import torch
from scenes import Scene

from fusestream import checkpoints

TOKENS = 12
SIDE = 8
FRAMES = 2
STEPS = 6  # of audio

T5_WIDTH = checkpoints.T5_WIDTH
CLIP_WIDTH = checkpoints.text.CLIP_WIDTH
WAN_LATENTS = (1, 16, FRAMES, SIDE, SIDE)

# Tokens and width of a prompt, and the shapes of the latents: two of them where there is sound.
PROMPTS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("flux1", "chroma", "sd3", *checkpoints.wan.RELATIVES), (TOKENS, T5_WIDTH)),
    # Stock fills it up to 512 tokens.
    "flux2": (128, 3 * checkpoints.text.QWEN3.width),
    "z_image": (TOKENS, checkpoints.text.QWEN3.width),
    "qwen_image": (TOKENS, checkpoints.pictures.QWEN_IMAGE.text),
    "krea2": (TOKENS, checkpoints.pictures.KREA.text * checkpoints.pictures.KREA.read),
    "anima": (TOKENS, checkpoints.pictures.ANIMA.text),
    "hunyuan_video_15": (TOKENS, checkpoints.video.HUNYUAN_VIDEO.text),
    # Of the 1024 tokens that the model makes of it, at least a part should be the prompt.
    "ltx2": (128, checkpoints.video.LTX["ltx2"].caption),
    "ltx23": (128, checkpoints.video.LTX["ltx23"].video + checkpoints.video.LTX["ltx23"].audio),
    **{kind: (TOKENS, size.text) for kind, size in checkpoints.video.MINIMAX.items()},
    **{kind: (TOKENS, size.context) for kind, size in checkpoints.pictures.UNETS.items()},
}
LATENTS: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(("flux1", "chroma", "z_image", "krea2", "sd3"), ((1, 16, SIDE, SIDE),)),
    "flux2": ((1, 128, SIDE, SIDE),),
    **dict.fromkeys(("qwen_image", "anima"), ((1, 16, 1, SIDE, SIDE),)),
    "hunyuan_video_15": ((1, 32, FRAMES, SIDE, SIDE),),
    **dict.fromkeys(checkpoints.video.LTX, ((1, 128, FRAMES, SIDE, SIDE), (1, 8, STEPS, 16))),
    **dict.fromkeys(checkpoints.video.MINIMAX, ((1, 24, FRAMES, SIDE, SIDE), (1, 32, 2, STEPS))),
    **dict.fromkeys(checkpoints.pictures.UNETS, ((1, 4, SIDE, SIDE),)),
    **dict.fromkeys(checkpoints.wan.RELATIVES, (WAN_LATENTS,)),
}
KINDS = tuple(PROMPTS)


def inputs(kind: str, prompt: int = 0) -> Scene:
    """What a sampler takes beside the model. Another number is another positive prompt; all else stays the same."""
    latents = [torch.zeros(shape) for shape in LATENTS[kind]]
    samples = latents[0] if len(latents) == 1 else comfy.nested_tensor.NestedTensor(latents)
    sides = [[[_noise(100 + seed, 1, *PROMPTS[kind]), _extras(kind, seed)]] for seed in (1 + prompt, 0)]
    return Scene(*sides, {"samples": samples})


def parts(samples: Any) -> list[torch.Tensor]:
    """What the sampler gave: one tensor, or one for the video and one for the audio."""
    return list(samples.unbind()) if isinstance(samples, comfy.nested_tensor.NestedTensor) else [samples]


def _noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _extras(kind: str, seed: int) -> dict[str, Any]:
    """What goes with a prompt. `seed` is for what comes from the prompt as well; pictures and sounds are always the same."""
    picture = [_noise(1, *LATENTS[kind][0])]
    mask = torch.ones(1, TOKENS, dtype=torch.long)
    if kind == "flux1":
        return {"pooled_output": _noise(seed, 1, CLIP_WIDTH), "guidance": 3.5, "reference_latents": picture}
    if kind == "flux2":
        return {"reference_latents": picture}
    if kind == "z_image":
        return {"attention_mask": mask}
    if kind == "qwen_image":
        mask[:, -3:] = 0
        return {"attention_mask": mask, "reference_latents": picture}
    if kind == "krea2":
        return {"reference_latents": picture}
    if kind == "anima":
        return {"t5xxl_ids": torch.arange(TOKENS), "t5xxl_weights": torch.linspace(0.5, 1.5, TOKENS)}
    if kind == "hunyuan_video_15":
        return {
            "pooled_output": None,
            "conditioning_byt5small": _noise(seed, 1, 5, checkpoints.video.GLYPHS),
            "clip_vision_output": SimpleNamespace(last_hidden_state=_noise(2, 1, 9, checkpoints.video.VISION)),
            "concat_latent_image": picture[0],
            "concat_mask": torch.ones(1, 1, FRAMES, SIDE, SIDE),
        }
    if kind in checkpoints.video.LTX:
        return {"unprocessed_ltxav_embeds": True, "frame_rate": 25}
    if kind in checkpoints.video.MINIMAX:
        mask[:, 4:8] = 0  # the places of a picture in the prompt
        return {"minimax_token_tags": mask}
    if kind == "sd3":
        return {"pooled_output": _noise(seed, 1, checkpoints.pictures.SD3_POOLED)}
    if kind == "sdxl":
        return {"pooled_output": _noise(seed, 1, 1280), "width": 512, "height": 512}
    return _wan_extras(kind, picture)


def _wan_extras(kind: str, picture: list[torch.Tensor]) -> dict[str, Any]:
    first = [picture[0][:, :, :1]]
    size = checkpoints.wan.RELATIVES.get(kind)
    if kind == "wan_s2v":
        assert size is not None
        return {
            "audio_embed": _noise(2, 1, checkpoints.wan.AUDIO_LAYERS, size.speech, 4 * FRAMES),
            "reference_latents": first,
            "reference_motion": _noise(3, 1, 16, 19, SIDE, SIDE),
            "control_video": _noise(4, *WAN_LATENTS),
        }
    if kind == "wan_humo":
        assert size is not None
        return {"audio_embed": _noise(2, 1, FRAMES, 8, 5, size.humo), "reference_latents": first}
    if kind == "wan_animate":
        return {
            "clip_vision_output": SimpleNamespace(penultimate_hidden_states=_noise(2, 1, 257, 1280)),
            "concat_latent_image": picture[0],
            "concat_mask": torch.ones(1, 4, FRAMES, SIDE, SIDE),
            "pose_video_latent": first[0],
            "face_video_pixels": _noise(3, 1, 3, 1, 512, 512).clamp(-1, 1),
        }
    return {}

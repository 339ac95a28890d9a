"""What stock fixes in its code although the file would tell: opened up, so that small files load.

    with checkpoints.narrow.opened(comfy):
        model = comfy.sd.load_diffusion_model(str(checkpoints.write("z_image", folder)))

`comfy` is ComfyUI's package, with `comfy.sd` imported. While open, these sizes come from the file,
and nothing else changes:

    SD 1.5, 2, XL   the base width of 320, the depths, the width of the prompt: told by proj_in's
                    rank and by the labels instead
    Z-Image         the width of 3840, and what stock derives from it: told by cap_pad_token instead
    Chroma          the guidance layer's widths of 5120 and 3072, its five layers
    Qwen-Image      24 heads, the prompt's width of 3584
    Anima           the widths of 2048 and 5120, what stock derives from them, and its adapter
    HuMo, Animate   the layers of audio_proj; those of motion_encoder and face_encoder
    VAEs (KL)       the encoder's base width of 128
    VAEs (MiniMax)  all sizes
    VAE (HunyuanVideo 1.5) its widths
    CLIP            widths and layers of the text encoders, within whole checkpoints and of each file
    Qwen2.5-VL, Gemma 3 12B, MiniMax H3's Qwen3-VL   the sizes of their vision towers
    Qwen3, Mistral  which three layers Flux.2 reads, where an option tells that there are fewer
    LTX-2.3         the sizes of its text projection
    Text encoders   their sizes, where nobody hands them over; of a small vocabulary, a token
                    beyond it stands for one in it
    Krea 2's encoder all sizes

Mistral's tokenizer is read with transformers 5.15 and later, too, for which ComfyUI 0.30 is too old.
A full-size file loads as ever: at published sizes each rule gives the number that stock has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..container import shapes
from . import encoders, networks
from .networks import sizes
from .replacing import constructed_with, replacing

__all__ = ["opened", "sizes", "wan22_widths"]


@contextmanager
def opened(comfy: Any) -> Iterator[None]:
    """While open, stock takes the sizes above from the file. Can be open twice."""
    with replacing() as replace:
        for change in (
            *(networks.read_sizes, networks.match_loosely, networks.make_parts_to_measure),
            *(networks.read_vae_sizes, networks.make_adapter_to_measure),
            *(encoders.read_as_many_layers, encoders.read_encoder_sizes, encoders.read_clip, encoders.read_parts),
            *(encoders.read_clips_apart, encoders.read_krea, encoders.fold_tokens, encoders.read_tekken),
        ):
            change(comfy, replace)
        yield


@contextmanager
def wan22_widths(vae2_2: ModuleType, path: Path) -> Iterator[None]:
    """While open, stock's `VAE` takes the widths of a Wan 2.2 VAE from the file.

    vae2_2   `comfy.ldm.wan.vae2_2`
    """
    shape = shapes(path)
    widths = {"dim": shape["encoder.head.0.gamma"][0] // 4, "dec_dim": shape["decoder.head.0.gamma"][0]}
    with replacing() as replace:
        constructed_with(replace, vae2_2.WanVAE, **widths)
        yield

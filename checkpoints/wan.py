"""Wan 2.1 and 2.2 video transformers, and their relatives, with the tensor names of the original
and of all ComfyUI files.

A table is the format's documentation: the names as they stand in a file, and the shapes. Sizes are
small; what stock ComfyUI fixes in its code stays as it is, or is opened up by `narrow.py`. Stock
takes the width of the text embedding for 4096 unless the file's metadata says another, as these
files do, to go with a tiny UMT5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from .text import T5_WIDTH
from .weights import Rows, Spec, Table, Tree, conv, gain, linear, norm, normal, tree

FREQUENCIES = 256  # the sinusoid of a timestep
HEAD = 128
PATCH = (1, 2, 2)

# Trained cross attention is sharp. Gains of one would average 512 tokens, nearly all of them
# padding, and hide the text.
SHARP = 2.0

CLIP_WIDTH, CLIP_TOKENS = 1280, 257


@dataclass(frozen=True)
class WanSize:
    """The sizes of one transformer; what is zero is not there."""

    dim: int = 256
    ffn: int = 640
    layers: int = 4
    text: int = T5_WIDTH
    channels_in: int = 16
    channels_out: int = 16
    image: bool = False
    image_positions: int = 0
    vace_layers: int = 0
    vace_channels: int = 96
    reference_channels: int = 0
    sparse: str = ""


# in: 16 of noise; 4 of a mask and 16 of a picture for I2V; 16 of a control video. The 5B is for the
# Wan 2.2 VAE.
SIZES: dict[str, WanSize] = {
    "wan_t2v": WanSize(),
    "wan_i2v": WanSize(channels_in=36, image=True),
    "wan_flf2v": WanSize(channels_in=36, image=True, image_positions=2 * CLIP_TOKENS),
    "wan_vace": WanSize(vace_layers=2),
    "wan_fun_control": WanSize(channels_in=48, image=True, reference_channels=16),
    "wan22_i2v": WanSize(channels_in=36),  # no CLIP any more: stock takes it for a T2V
    "wan22_fun_control": WanSize(channels_in=52, reference_channels=16),
    "wan22_5b": WanSize(channels_in=48, channels_out=48),
}

# Text to video, trained with sparse attention: TurboDiffusion's; FastVideo's FastWan.
SPARSE: dict[str, WanSize] = {"wan_sla": WanSize(sparse="SLA"), "wan_vsa": WanSize(sparse="VSA")}


def table(size: WanSize) -> Table:
    """Wan 2.1 and 2.2. Heads are 128 wide; gains of q and k span the full width."""
    dim, image = size.dim, size.image
    block: Tree = {
        "modulation": normal(0.05, 1, 6, dim),
        "self_attn": _attention(dim),
        "norm3": norm(dim),  # norm1 and norm2 have no weights
        "cross_attn": _attention(dim, mean=SHARP)
        | {"(k|v)_img": linear(dim, dim) if image else None, "norm_k_img.weight": gain(dim) if image else None},
        "ffn.0": linear(size.ffn, dim),
        "ffn.2": linear(dim, size.ffn),
        "self_attn.attn_op.local_attn.proj_l": linear(HEAD, HEAD) if size.sparse == "SLA" else None,
        "to_gate_compress": linear(dim, dim) if size.sparse == "VSA" else None,
    }
    side = conv(dim, size.vace_channels, *PATCH, fp8=False) if size.vace_layers else None
    return tree(
        {
            "patch_embedding": conv(dim, size.channels_in, *PATCH, fp8=False),
            "text_embedding": {"0": linear(dim, size.text), "2": linear(dim, dim)},
            "time_embedding": {"0": linear(dim, FREQUENCIES), "2": linear(dim, dim)},
            "time_projection.1": linear(6 * dim, dim),  # shift, scale, gate for attention and for the FFN
            "img_emb": _image(size) if image else None,
            "ref_conv": conv(dim, size.reference_channels, *PATCH[1:], fp8=False) if size.reference_channels else None,
            f"blocks.[{size.layers}]": block,
            "vace_patch_embedding": side,  # block j feeds main block j * (layers // vace_layers)
            "vace_blocks.0": {**block, "before_proj": linear(dim, dim)} if size.vace_layers else None,
            f"vace_blocks.[{size.vace_layers}]": {**block, "after_proj": linear(dim, dim)},
            "head": {"head": linear(4 * size.channels_out, dim), "modulation": normal(0.05, 1, 2, dim)},
        }
    )


def _attention(dim: int, source: int = 0, mean: float = 1.0) -> Rows:
    """source: the width of what keys and values come from, where it is another."""
    return {
        "q": linear(dim, dim),
        "(k|v)": linear(dim, source or dim),
        "o": linear(dim, dim),
        "norm_(q|k).weight": gain(dim, mean=mean),
    }


def _image(size: WanSize) -> Tree:
    """CLIP's states [*, 1280] -> [*, dim]; FLF2V has positions for two pictures."""
    places = size.image_positions
    return {
        "proj.0": norm(CLIP_WIDTH),
        "proj.1": linear(CLIP_WIDTH, CLIP_WIDTH),
        "proj.3": linear(size.dim, CLIP_WIDTH),
        "proj.4": norm(size.dim),
        "emb_pos": normal(0.5, 1, places, CLIP_WIDTH) if places else None,
    }


# ----------------------------------------------------------------- relatives: networks of their own

AUDIO_LAYERS = 25  # of wav2vec
HUMO_WIDTH, HUMO_TOKENS = 1536, 16
HUMO_WINDOW = 8 * 5  # steps before and after, times layers of Whisper
MOTIONS, MOTION_WIDTH = 20, 512
FACE_HEADS = 4
FACE_STAGES = (32, 64, 128, 256, 512, 512, 512, 512)  # of StyleGAN's encoder


@dataclass(frozen=True)
class Relative:
    """What a relative has beside a Wan's sizes; what is zero is not there."""

    base: WanSize = field(default_factory=WanSize)
    causal: bool = False
    speech: int = 0  # the width of wav2vec
    hears: tuple[int, ...] = ()  # the blocks with an attention to it
    humo: int = 0  # the width of Whisper
    humo_between: int = 512
    face: int = 0  # the width of face_encoder
    shrink: int = 1  # by how much the StyleGAN encoder is narrower


# Fixed are HuMo's audio_proj (78 MB) and Animate's encoders for faces (71 MB): smaller ones load
# while `narrow` is open.
RELATIVES: dict[str, Relative] = {
    "wan_causal": Relative(causal=True),  # a T2V's tensors; the metadata asks for the other network
    "wan_s2v": Relative(speech=64, hears=(0, 2)),
    "wan_humo": Relative(WanSize(channels_in=36), humo=16, humo_between=64),
    "wan_animate": Relative(WanSize(channels_in=36, image=True, layers=5, ffn=256), face=64, shrink=16),
}


def relative_table(size: Relative) -> Table:
    """Causal Wan 2.1, which paints block after block of frames; S2V, HuMo and Animate."""
    out = table(size.base)
    for there, more in ((size.speech, _speech), (size.humo, _humo), (size.face, _animate)):
        out |= tree(more(size)) if there else {}
    return out


def _speech(size: Relative) -> Tree:
    dim, count = size.base.dim, len(size.hears)

    def steps(out: int, into: int) -> Tree:
        return {"conv": conv(out, into, 3)}

    return {
        "casual_audio_encoder": {  # sic
            "weights": normal(0.1, 1, AUDIO_LAYERS, 1, 1, mean=1.0),  # mixes wav2vec's layers
            "encoder.conv1_local": steps(dim, size.speech),
            "encoder.conv1_global": steps(dim // 4, size.speech),
            "encoder.conv2": steps(dim // 2, dim // 4),
            "encoder.conv3": steps(dim, dim // 2),
            "encoder.final_linear": linear(dim, dim),
            "encoder.padding_tokens": normal(1.0, 1, 1, 1, dim),
        },
        f"audio_injector.injector.[{count}]": _attention(dim),
        f"audio_injector.injector_adain_layers.[{count}].linear": linear(2 * dim, dim),
        "cond_encoder": conv(dim, 16, *PATCH, fp8=False),  # for the pose
        "frame_packer.proj": conv(dim, 16, 1, 2, 2, fp8=False),  # for earlier frames
        "frame_packer.proj_2x": conv(dim, 16, 2, 4, 4, fp8=False),
        "frame_packer.proj_4x": conv(dim, 16, 4, 8, 8, fp8=False),
        "trainable_cond_mask.weight": normal(0.5, 3, dim),  # for what is painted, the reference, the earlier frames
    }


def _humo(size: Relative) -> Tree:
    dim, between = size.base.dim, size.humo_between
    return {
        "audio_proj.audio_proj_glob_1.layer": linear(between, HUMO_WINDOW * size.humo),
        "audio_proj.audio_proj_glob_2.layer": linear(between, between),
        "audio_proj.audio_proj_glob_3.layer": linear(HUMO_TOKENS * HUMO_WIDTH, between),
        "audio_proj.audio_proj_glob_norm.layer": norm(HUMO_WIDTH),
        f"blocks.[{size.base.layers}].audio_cross_attn_wrapper": {
            "audio_cross_attn": _attention(dim, HUMO_WIDTH),
            "norm1_audio": norm(dim),
        },
    }


def _animate(size: Relative) -> Tree:
    dim, face = size.base.dim, size.face
    return {
        "pose_patch_embedding": conv(dim, 16, *PATCH, fp8=False),
        "motion_encoder": _motion_encoder(size.shrink),
        "face_encoder": {
            "conv1_local.conv": conv(FACE_HEADS * face, MOTION_WIDTH, 3),
            "(conv2|conv3).conv": conv(face, face, 3),
            "out_proj": linear(dim, face),
            "padding_tokens": normal(1.0, 1, 1, 1, dim),
        },
        f"face_adapter.fuser_blocks.[{size.base.layers // 5}]": {  # behind every fifth block
            "linear1_kv": linear(2 * dim, dim),
            "(linear1_q|linear2)": linear(dim, dim),
            "(q|k)_norm.weight": gain(HEAD),
        },
    }


def _motion_encoder(shrink: int) -> Tree:
    """StyleGAN's. It divides by the fan-in's root as it runs: weights are of size one."""
    widths, style = [width // shrink for width in FACE_STAGES], MOTION_WIDTH // shrink

    def equal(width: int, into: int, *kernel: int) -> Spec:
        return Spec((width, into, *kernel), 1.0, fp8=True)

    def bias(width: int) -> Spec:
        return normal(0.05, 1, width, 1, 1)

    blur = normal(0.02, 4, 4, mean=1 / 16)  # sums to about one, as [1, 3, 3, 1] in either direction does
    blocks: Rows = {
        str(place): {
            "conv1.0.weight": equal(into, into, 3, 3),
            "conv1.1.bias": bias(into),
            "(conv2|skip).0.kernel": blur,
            "conv2.1.weight": equal(width, into, 3, 3),
            "conv2.2.bias": bias(width),
            "skip.1.weight": equal(width, into, 1, 1),
        }
        for place, (into, width) in enumerate(pairwise(widths), start=1)
    }
    return {
        "enc.net_app.convs": {
            "0": {"0.weight": equal(widths[0], 3, 1, 1), "1.bias": bias(widths[0])},
            **blocks,
            str(len(widths)): {"weight": equal(style, widths[-1], 4, 4)},
        },
        "enc.fc.[4]": {"weight": equal(style, style), "bias": normal(0.05, style)},
        "enc.fc.4": {"weight": equal(MOTIONS, style), "bias": normal(0.05, MOTIONS)},
        "dec.direction.weight": normal(1.0, MOTION_WIDTH, MOTIONS),
    }


def metadata(size: WanSize | Relative) -> Mapping[str, str]:
    """What overrides stock's own sizes: the text's width, and what the relatives have."""
    config: dict[str, object] = {"text_dim": (size if isinstance(size, WanSize) else size.base).text}
    if isinstance(size, Relative):
        config |= {"causal_ar": True} if size.causal else {}
        config |= {"audio_dim": size.speech, "audio_inject_layers": list(size.hears)} if size.speech else {}
    return {"config": json.dumps({"transformer": config})}

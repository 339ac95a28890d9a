"""Wan's relatives, for which stock has networks of their own: a model of `wan`, and more to it.

    wan_causal    Wan 2.1 T2V, made to paint one block of frames after the other. The tensors are a T2V's; files ask for the other
                  network in their metadata, in `config`
    wan_s2v       Wan 2.2 S2V, which hears speech. A T2V, and:
                  casual_audio_encoder [sic]   .weights [1, 25, 1, 1] mixes wav2vec's layers; .encoder has conv1_local,
                                               conv1_global, conv2, conv3 (Conv1d of 3, under .conv), final_linear, padding_tokens
                  audio_injector               .injector.{k}, an attention, and .injector_adain_layers.{k}.linear, for every
                                               block that hears
                  cond_encoder                 Conv3d, for the pose
                  frame_packer                 .proj, .proj_2x, .proj_4x, Conv3d, for earlier frames
                  trainable_cond_mask          [3, dim], added to what is painted, to the reference, to the earlier frames
    wan_humo      HuMo, in = 16 + 4 + 16. A T2V, and:
                  audio_proj                   .audio_proj_glob_{1,2,3}.layer, .audio_proj_glob_norm.layer
                  blocks.{i}                   .audio_cross_attn_wrapper.audio_cross_attn, an attention whose k and v come from
                                               1536, and .audio_cross_attn_wrapper.norm1_audio
    wan_animate   Wan 2.2 Animate. An I2V, and:
                  pose_patch_embedding         Conv3d
                  motion_encoder               .enc: StyleGAN's encoder, for faces of 512x512, with its blurs' kernels;
                                               .dec.direction [512, 20]
                  face_encoder                 conv1_local, conv2, conv3, out_proj, padding_tokens
                  face_adapter.fuser_blocks    .{k} for every fifth block: linear1_kv, linear1_q, linear2, q_norm, k_norm (RMS
                                               per head)

Stock takes from the metadata which blocks hear, and how wide wav2vec is. Fixed are HuMo's audio_proj (51200 -> 512 -> 512 ->
16*1536: 78 MB) and Animate's encoders for faces (up to 512 and 1024 wide: 71 MB): smaller files load while `narrow` is open.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from . import wan
from .storage import PLAIN, Cast, Storage
from .wan import PATCH, WanSize
from .weights import Spec, Table, conv, layer_norm, linear, scale, shift

CHANNELS = 16
AUDIO_LAYERS = 25
AUDIO_TOKENS = 4
HUMO_WIDTH = 1536
HUMO_TOKENS = 16
HUMO_WINDOW = 8 * 5  # steps before and after, times layers of Whisper
MOTIONS = 20
MOTION_WIDTH = 512
FACE_HEADS = 4
FACE_STAGES = (32, 64, 128, 256, 512, 512, 512, 512)
HEAD = 128


@dataclass(frozen=True)
class More:
    """What a relative has beside the sizes that all have; what is zero is not there."""

    base: WanSize
    causal: bool = False
    speech: int = 0  # the width of wav2vec
    hears: tuple[int, ...] = ()
    humo: int = 0  # the width of Whisper
    humo_between: int = 512
    face: int = 0  # the width of face_encoder
    shrink: int = 1  # by how much the StyleGAN encoder is narrower


SIZES: dict[str, More] = {
    "wan_causal": More(WanSize(), causal=True),
    "wan_s2v": More(WanSize(), speech=64, hears=(0, 2)),
    "wan_humo": More(WanSize(channels_in=36), humo=16, humo_between=64),
    "wan_animate": More(WanSize(channels_in=36, image=True, layers=5, ffn=256), face=64, shrink=16),
}


def table(size: More) -> Table:
    """Every tensor of one transformer."""
    out = wan.table(size.base)
    if size.speech:
        out |= _speech(size)
    if size.humo:
        out |= _humo(size)
    if size.face:
        out |= _animate(size)
    return out


def _attention(name: str, dim: int, source: int, gain: float = 1.0) -> Table:
    out: Table = {}
    for part, into in (("q", dim), ("k", source), ("v", source), ("o", dim)):
        out |= linear(f"{name}.{part}", dim, into)
    return out | scale(f"{name}.norm_q.weight", dim, mean=gain) | scale(f"{name}.norm_k.weight", dim, mean=gain)


def _steps(name: str, out: int, into: int) -> Table:
    """A Conv1d over three steps of time."""
    return conv(f"{name}.conv", out, into, (3,))


def _speech(size: More) -> Table:
    dim = size.base.dim
    name = "casual_audio_encoder"
    out = {f"{name}.weights": Spec((1, AUDIO_LAYERS, 1, 1), 0.1, 1.0)}
    out |= _steps(f"{name}.encoder.conv1_local", AUDIO_TOKENS * dim // 4, size.speech)
    out |= _steps(f"{name}.encoder.conv1_global", dim // 4, size.speech)
    out |= _steps(f"{name}.encoder.conv2", dim // 2, dim // 4) | _steps(f"{name}.encoder.conv3", dim, dim // 2)
    out |= linear(f"{name}.encoder.final_linear", dim, dim)
    out[f"{name}.encoder.padding_tokens"] = Spec((1, 1, 1, dim), 1.0)
    for index in range(len(size.hears)):
        out |= _attention(f"audio_injector.injector.{index}", dim, dim)
        out |= linear(f"audio_injector.injector_adain_layers.{index}.linear", 2 * dim, dim)
    out |= conv("cond_encoder", dim, CHANNELS, PATCH, fp8=False)
    for times, part in ((1, "proj"), (2, "proj_2x"), (4, "proj_4x")):
        out |= conv(f"frame_packer.{part}", dim, CHANNELS, (times, 2 * times, 2 * times), fp8=False)
    out["trainable_cond_mask.weight"] = Spec((3, dim), 0.5)
    return out


def _humo(size: More) -> Table:
    dim, between, name = size.base.dim, size.humo_between, "audio_proj.audio_proj_glob"
    out = linear(f"{name}_1.layer", between, HUMO_WINDOW * size.humo) | linear(f"{name}_2.layer", between, between)
    out |= linear(f"{name}_3.layer", HUMO_TOKENS * HUMO_WIDTH, between) | layer_norm(f"{name}_norm.layer", HUMO_WIDTH)
    for index in range(size.base.layers):
        wrapper = f"blocks.{index}.audio_cross_attn_wrapper"
        out |= _attention(f"{wrapper}.audio_cross_attn", dim, HUMO_WIDTH) | layer_norm(f"{wrapper}.norm1_audio", dim)
    return out


def _animate(size: More) -> Table:
    dim = size.base.dim
    out = conv("pose_patch_embedding", dim, CHANNELS, PATCH, fp8=False) | _motion_encoder(size.shrink)
    out |= _steps("face_encoder.conv1_local", FACE_HEADS * size.face, MOTION_WIDTH)
    out |= _steps("face_encoder.conv2", size.face, size.face) | _steps("face_encoder.conv3", size.face, size.face)
    out |= linear("face_encoder.out_proj", dim, size.face)
    out["face_encoder.padding_tokens"] = Spec((1, 1, 1, dim), 1.0)
    for index in range(size.base.layers // 5):
        name = f"face_adapter.fuser_blocks.{index}"
        out |= linear(f"{name}.linear1_kv", 2 * dim, dim) | linear(f"{name}.linear1_q", dim, dim)
        out |= linear(f"{name}.linear2", dim, dim)
        out |= scale(f"{name}.q_norm.weight", HEAD) | scale(f"{name}.k_norm.weight", HEAD)
    return out


def _motion_encoder(shrink: int) -> Table:
    """StyleGAN divides by the square root of the fan-in as it runs, so all weights are of size one."""
    widths = [width // shrink for width in FACE_STAGES]
    name = "motion_encoder.enc.net_app.convs"
    out = _equal(f"{name}.0.0", widths[0], 3, 1) | {f"{name}.0.1.bias": Spec((1, widths[0], 1, 1), 0.05)}
    for place, (into, width) in enumerate(pairwise(widths), start=1):
        block = f"{name}.{place}"
        out |= _equal(f"{block}.conv1.0", into, into, 3) | {f"{block}.conv1.1.bias": Spec((1, into, 1, 1), 0.05)}
        out |= _blur(f"{block}.conv2.0") | _equal(f"{block}.conv2.1", width, into, 3)
        out |= {f"{block}.conv2.2.bias": Spec((1, width, 1, 1), 0.05)}
        out |= _blur(f"{block}.skip.0") | _equal(f"{block}.skip.1", width, into, 1)
    style = MOTION_WIDTH // shrink
    out |= _equal(f"{name}.{len(widths)}", style, widths[-1], 4)
    for place in range(5):
        rows = MOTIONS if place == 4 else style
        out |= {f"motion_encoder.enc.fc.{place}.weight": Spec((rows, style), 1.0, fp8=True)}
        out |= shift(f"motion_encoder.enc.fc.{place}", rows)
    return out | {"motion_encoder.dec.direction.weight": Spec((MOTION_WIDTH, MOTIONS), 1.0)}


def _equal(name: str, width: int, into: int, kernel: int) -> Table:
    return {f"{name}.weight": Spec((width, into, kernel, kernel), 1.0, fp8=True)}


def _blur(name: str) -> Table:
    """Sums to about one, as [1, 3, 3, 1] in either direction does."""
    return {f"{name}.kernel": Spec((4, 4), 0.02, 1 / 16)}


def metadata(size: More) -> Mapping[str, str]:
    """The overrides that stock reads: the width of the text embedding for all, and what these models have of their own."""
    config: dict[str, object] = {"text_dim": size.base.text}
    if size.causal:
        config["causal_ar"] = True
    if size.speech:
        config |= {"audio_dim": size.speech, "audio_inject_layers": list(size.hears)}
    return {"config": json.dumps({"transformer": config})}


STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}

"""LTX-2: video and audio in two streams of tokens that listen to each other, with Lightricks' tensor names.

For the video, `v` wide; the same names with `audio_` before them for the audio, `a` wide:

    patchify_proj         Linear  128 -> v   one token per latent pixel; of audio one per step, 8 channels of 16 frequencies
    adaln_single          .emb.timestep_embedder.linear_1, .linear_2 (256 -> v -> v, after a sinusoid), .linear (v -> 6*v)
    caption_projection    .linear_1, .linear_2: caption -> v -> v; LTX-2.0 only
    prompt_adaln_single   as adaln_single, but v -> 2*v; LTX-2.3 only
    scale_shift_table     [2, v], for the last norm
    proj_out              Linear  v -> 128

    av_ca_{video_scale_shift,a2v_gate,audio_scale_shift,v2a_gate}_adaln_single
                          as adaln_single, to 4*v, v, 4*a, a: for the attentions between the streams
    {video,audio}_embeddings_connector
                          .learnable_registers [128, c] fill the prompt up to 1024 tokens, .transformer_1d_blocks.{i} with attn1
                          and ff refine it. c is `caption` in LTX-2.0; v or a in LTX-2.3, which has no caption_projection

    transformer_blocks.{i}    attn1 within, attn2 to the prompt, audio_attn1, audio_attn2; audio_to_video_attn and
                          video_to_audio_attn, both `a` wide inside; ff.net.0.proj, ff.net.2 (4*v, GELU), audio_ff;
                          scale_shift_table [6, v], audio_scale_shift_table, scale_shift_table_a2v_ca_video [5, v],
                          scale_shift_table_a2v_ca_audio [5, a]. LTX-2.3: 9 rows for 6, prompt_scale_shift_table [2, v],
                          audio_prompt_scale_shift_table

An attention has to_q, to_k, to_v, to_out.0 with biases, and RMS gains q_norm, k_norm over the full width; in LTX-2.3 also
to_gate_logits, a number per head. Other RMS norms have no weights.

Stock counts the blocks, and takes every other size from the metadata, from `config`, which published files have too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from .storage import PLAIN, Cast, Storage
from .wan import SHARP
from .weights import Spec, Table, linear, scale

FREQUENCIES = 256
CHANNELS = 128
REGISTERS = 128


@dataclass(frozen=True)
class LtxSize:
    """The sizes of one transformer. `gated` is LTX-2.3."""

    heads: int = 2
    video_head: int = 128
    audio_head: int = 64
    layers: int = 4
    caption: int = 128
    connector_layers: int = 2
    gated: bool = False

    @property
    def video(self) -> int:
        return self.heads * self.video_head

    @property
    def audio(self) -> int:
        return self.heads * self.audio_head


SIZES = {"ltx2": LtxSize(), "ltx23": LtxSize(gated=True)}


def table(size: LtxSize) -> Table:
    """Every tensor of one transformer."""
    video, audio = size.video, size.audio
    out: Table = {}
    for stream, width in (("", video), ("audio_", audio)):
        out |= linear(f"{stream}patchify_proj", width, CHANNELS) | _timestep(
            f"{stream}adaln_single", width, _rows(size)
        )
        if size.gated:
            out |= _timestep(f"{stream}prompt_adaln_single", width, 2)
        else:
            out |= linear(f"{stream}caption_projection.linear_1", width, size.caption)
            out |= linear(f"{stream}caption_projection.linear_2", width, width)
        out |= _connector(f"{stream or 'video_'}embeddings_connector", size, width if size.gated else size.caption)
        out[f"{stream}scale_shift_table"] = Spec((2, width), 0.05)
        out |= linear(f"{stream}proj_out", CHANNELS, width)
    for name, width, rows in (
        ("video_scale_shift", video, 4),
        ("a2v_gate", video, 1),
        ("audio_scale_shift", audio, 4),
        ("v2a_gate", audio, 1),
    ):
        out |= _timestep(f"av_ca_{name}_adaln_single", width, rows)
    for index in range(size.layers):
        out |= _block(f"transformer_blocks.{index}", size)
    return out


def _rows(size: LtxSize) -> int:
    return 9 if size.gated else 6


def _timestep(name: str, width: int, rows: int) -> Table:
    out = linear(f"{name}.emb.timestep_embedder.linear_1", width, FREQUENCIES)
    return (
        out
        | linear(f"{name}.emb.timestep_embedder.linear_2", width, width)
        | linear(f"{name}.linear", rows * width, width)
    )


def _connector(name: str, size: LtxSize, width: int) -> Table:
    out = {f"{name}.learnable_registers": Spec((REGISTERS, width), 1.0)}
    for index in range(size.connector_layers):
        block = f"{name}.transformer_1d_blocks.{index}"
        out |= _attention(f"{block}.attn1", size, width, width, width) | _ffn(f"{block}.ff", width)
    return out


def _block(name: str, size: LtxSize) -> Table:
    video, audio = size.video, size.audio
    out: Table = {}
    for stream, width in (("", video), ("audio_", audio)):
        out |= _attention(f"{name}.{stream}attn1", size, width, width, width)
        # As in Wan: the prompt is a few tokens among a thousand
        out |= _attention(f"{name}.{stream}attn2", size, width, width, width, gain=SHARP)
        out |= _ffn(f"{name}.{stream}ff", width)
        out[f"{name}.{stream}scale_shift_table"] = Spec((_rows(size), width), 0.05)
        if size.gated:
            out[f"{name}.{stream}prompt_scale_shift_table"] = Spec((2, width), 0.05)
    out |= _attention(f"{name}.audio_to_video_attn", size, video, audio, audio)
    out |= _attention(f"{name}.video_to_audio_attn", size, audio, audio, video)
    out[f"{name}.scale_shift_table_a2v_ca_video"] = Spec((5, video), 0.05)
    out[f"{name}.scale_shift_table_a2v_ca_audio"] = Spec((5, audio), 0.05)
    return out


def _attention(name: str, size: LtxSize, width: int, inner: int, source: int, gain: float = 1.0) -> Table:
    """From `width` channels, over `inner` for all heads, to `width`; keys and values come from `source` channels."""
    out = linear(f"{name}.to_q", inner, width) | linear(f"{name}.to_k", inner, source)
    out |= linear(f"{name}.to_v", inner, source) | linear(f"{name}.to_out.0", width, inner)
    out |= scale(f"{name}.q_norm.weight", inner, mean=gain) | scale(f"{name}.k_norm.weight", inner, mean=gain)
    return out | linear(f"{name}.to_gate_logits", size.heads, width) if size.gated else out


def _ffn(name: str, width: int) -> Table:
    return linear(f"{name}.net.0.proj", 4 * width, width) | linear(f"{name}.net.2", width, 4 * width)


def metadata(size: LtxSize) -> dict[str, str]:
    """The configuration that stock reads, under the names of the published files."""
    config: dict[str, object] = {
        "attention_head_dim": size.video_head,
        "audio_attention_head_dim": size.audio_head,
        "audio_cross_attention_dim": size.audio,
        "audio_num_attention_heads": size.heads,
        "caption_channels": size.caption,
        "connector_attention_head_dim": (size.video if size.gated else size.caption) // size.heads,
        "connector_num_attention_heads": size.heads,
        "connector_num_layers": size.connector_layers,
        "cross_attention_dim": size.video,
        "frequencies_precision": "float64",
        "num_attention_heads": size.heads,
        "rope_type": "split",
        "use_middle_indices_grid": True,
    }
    if size.gated:
        config |= {
            "apply_gated_attention": True,
            "audio_connector_attention_head_dim": size.audio_head,
            "audio_connector_num_attention_heads": size.heads,
            "caption_proj_before_connector": True,
            "caption_projection_first_linear": False,
            "connector_apply_gated_attention": True,
            "cross_attention_adaln": True,
        }
    return {"config": json.dumps({"transformer": config})}


STORAGES: dict[str, Storage] = PLAIN | {"fp8_e4m3fn": Cast()}

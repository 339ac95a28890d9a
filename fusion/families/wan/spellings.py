"""Wan transformers as others publish them.

diffusers       FastVideo's FastWan is published with these names alone:

    condition_embedder.{time,text}_embedder.linear_{1,2}   {time,text}_embedding.{0,2}
    condition_embedder.time_proj                           time_projection.1
    condition_embedder.image_embedder.*                    img_emb.*
    scale_shift_table, proj_out                            head.modulation, head.head
    blocks.{i}.scale_shift_table, .norm2                   blocks.{i}.modulation, .norm3
    blocks.{i}.attn1, .attn2                               blocks.{i}.self_attn, .cross_attn
    blocks.{i}.ffn.net.{0.proj,2}                          blocks.{i}.ffn.{0,2}

TurboDiffusion  a Linear of patches in place of the convolution of a patch: the same numbers, in
                the same order, as [dim, channels * 1 * 2 * 2]
"""

from __future__ import annotations

from collections.abc import Mapping

from ....memory import WeightFile
from ...files.repeated_blocks import renamed
from .layout import EMBEDDING, PATCH, SLA

OUTSIDE = {
    "condition_embedder.time_embedder.linear_1.": "time_embedding.0.",
    "condition_embedder.time_embedder.linear_2.": "time_embedding.2.",
    "condition_embedder.text_embedder.linear_1.": "text_embedding.0.",
    "condition_embedder.text_embedder.linear_2.": "text_embedding.2.",
    "condition_embedder.time_proj.": "time_projection.1.",
    "condition_embedder.image_embedder.norm1.": "img_emb.proj.0.",
    "condition_embedder.image_embedder.ff.net.0.proj.": "img_emb.proj.1.",
    "condition_embedder.image_embedder.ff.net.2.": "img_emb.proj.3.",
    "condition_embedder.image_embedder.norm2.": "img_emb.proj.4.",
    "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
    "scale_shift_table": "head.modulation",
    "proj_out.": "head.head.",
}
ATTENTION = {
    "to_q.": "q.",
    "to_k.": "k.",
    "to_v.": "v.",
    "to_out.0.": "o.",
    "add_k_proj.": "k_img.",
    "add_v_proj.": "v_img.",
    "norm_added_k.": "norm_k_img.",
    "norm_q.": "norm_q.",
    "norm_k.": "norm_k.",
}
INSIDE = {
    "scale_shift_table": "modulation",
    "norm2.": "norm3.",
    "ffn.net.0.proj.": "ffn.0.",
    "ffn.net.2.": "ffn.2.",
    "attn1.attn_impl.proj_l.": f"{SLA}.",
    **{f"attn1.{theirs}": f"self_attn.{stocks}" for theirs, stocks in ATTENTION.items()},
    **{f"attn2.{theirs}": f"cross_attn.{stocks}" for theirs, stocks in ATTENTION.items()},
}
LANDMARKS = ("condition_embedder.time_proj.weight", "scale_shift_table")


def is_diffusers(header: WeightFile) -> bool:
    """Whether a file has diffusers' names of a Wan transformer; its relatives have blocks of their
    own."""
    names = header.extents.keys()
    own = all(name in names for name in LANDMARKS) and "blocks.0.attn1.to_q.weight" in names
    return own and not any(name.startswith(("vace_", "motion_", "face_")) for name in names)


def rename(name: str) -> str:
    """Stock's name of a tensor, or of one that goes with it, such as a scale."""
    return renamed(name, OUTSIDE, INSIDE, "blocks.{}.")


def reshaped(header: WeightFile, prefix: str) -> Mapping[str, tuple[int, ...]]:
    """The shapes that stock wants of tensors that the file has flat. prefix: of the transformer's
    names."""
    found = header.extents.get(prefix + EMBEDDING)
    if found is None or found.is_packed or len(found.shape) != 2 or found.shape[1] % 4:
        return {}
    return {prefix + EMBEDDING: (found.shape[0], found.shape[1] // 4, *PATCH)}

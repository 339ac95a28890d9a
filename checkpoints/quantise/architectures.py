"""What GGUF files of models say that they are, in `general.architecture`: the words that other packs know, by tensors that only
such a model has. Packs that read these files find the model by its tensors; of the word they ask that it is one of theirs."""

from __future__ import annotations

import re

from ...memory import Checkpoint
from .errors import CannotQuantise

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
T5 = "t5encoder"
# The first that fits; hence the special before the usual.
LANDMARKS: tuple[tuple[str, str], ...] = (
    (T5, r"encoder\.block\.\d+\.layer\.0\.SelfAttention\.q\.weight"),
    ("wan", r"blocks\.\d+\.self_attn\.norm_q\.weight"),
    ("hyvid", r"double_blocks\.\d+\.img_attn_proj\.weight"),
    ("flux", r"double_blocks\.\d+\.img_attn\.proj\.weight"),
    ("sd3", r"joint_blocks\.\d+\.x_block\.attn\.qkv\.weight"),
    ("aura", r"double_layers\.\d+\.attn\.w2q\.weight"),
    ("hidream", r"double_stream_blocks\.\d+\.block\.ff_i\.shared_experts\.w1\.weight"),
    ("cosmos", r"blocks\.\d+\.mlp\.layer1\.weight"),
    ("qwen_image", r"transformer_blocks\.\d+\.attn\.add_k_proj\.weight"),
    ("ltxv", r"adaln_single\.emb\.timestep_embedder\.linear_2\.weight"),
    ("lumina2", r"context_refiner\.\d+\.attention\.qkv\.weight"),
    ("sdxl", r"label_emb\.0\.0\.weight"),
    ("sd1", r"(input_blocks|down_blocks)\.\d+\.\d+\.transformer_blocks\.0\.attn2\.to_k\.weight"),
    ("qwen3", r"model\.layers\.\d+\.self_attn\.q_norm\.weight"),
)


def prefix(source: Checkpoint) -> str:
    """What stands before every name of a diffusion model that ComfyUI saved; GGUF files have the names without it."""
    return next((one for one in PREFIXES if all(name.startswith(one) for name in source.extents)), "")


def of(source: Checkpoint) -> str:
    """The word for a file. Raises `CannotQuantise` where none is known."""
    before = prefix(source)
    names = [name.removeprefix(before) for name in source.extents]
    for word, landmark in LANDMARKS:
        if any(re.fullmatch(landmark, name) for name in names):
            return word
    raise CannotQuantise(
        f"{source.files[0].path}: is of no model whose word for GGUF files is known. Give it with --architecture WORD; FuseStream "
        "takes any."
    )

"""Language models as llama.cpp writes them into GGUF files: their names differ from ComfyUI's, and
in some models the numbers do.

    token_embd, output_norm, output    model.embed_tokens, model.norm, lm_head
    blk.{i}.attn_norm, ffn_norm        model.layers.{i}.input_layernorm, post_attention_layernorm
    blk.{i}.attn_q, _k, _v, _output    model.layers.{i}.self_attn.q_proj, k_proj, v_proj, o_proj
    blk.{i}.attn_q_norm, _k_norm       model.layers.{i}.self_attn.q_norm, k_norm
    blk.{i}.ffn_gate, _up, _down       model.layers.{i}.mlp.gate_proj, up_proj, down_proj

`general.architecture` names the model. The converter keeps all numbers of Qwen. It reorders the
rows of q and k of Llama and Mistral, adds one to the norms of Gemma, and writes a vision part to a
file of its own (mmproj). Those would load and encode nonsense, so they are refused. T5 has its
names in its family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..base.errors import WrongFile

if TYPE_CHECKING:
    from ...memory import WeightFile

ARCHITECTURE = "general.architecture"
# Architectures whose numbers are ComfyUI's, in llama.cpp's words: Qwen2.5, Qwen2.5-VL, Qwen3.
AS_THEY_ARE = ("qwen2", "qwen2vl", "qwen3")
BLOCK = re.compile(r"blk\.\d+\.(attn|ffn)_norm\.weight")
VISION, VISION_BLOCK = "clip", re.compile(r"v\.blk\.\d+\..*", re.DOTALL)


@dataclass(frozen=True)
class Names:
    """A model's names, from llama.cpp's to stock's. Other names stay.

    blocks           the beginning of a block's name, in both
    inside, outside  names of a block's tensors, and of all others, without the last part: weight,
                     bias
    """

    blocks: tuple[str, str]
    inside: Mapping[str, str]
    outside: Mapping[str, str]

    def __call__(self, name: str) -> str:
        theirs, ours = self.blocks
        found = re.fullmatch(rf"{re.escape(theirs)}\.(\d+)\.([^.]+)(\..*)?", name, re.DOTALL)
        if found is not None:
            number, part, rest = found.groups()
            return f"{ours}.{number}.{self.inside[part]}{rest or ''}" if part in self.inside else name
        outer, _, rest = name.rpartition(".")
        return f"{self.outside[outer]}.{rest}" if outer in self.outside else name


QWEN = Names(
    ("blk", "model.layers"),
    {
        "attn_norm": "input_layernorm",
        **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
        "attn_output": "self_attn.o_proj",
        **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
        "ffn_norm": "post_attention_layernorm",
        **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    },
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
)


def renaming(header: WeightFile) -> Callable[[str], str] | None:
    """The renaming from a language model's names to stock's; None: the file is not llama.cpp's, or
    a family knows its names. Raises `WrongFile` if more than names differs."""
    if not header.values:  # no GGUF file
        return None
    architecture = header.values.get(ARCHITECTURE)
    if architecture == VISION or any(VISION_BLOCK.fullmatch(name) for name in header.extents):
        raise WrongFile(
            f"{header.path} is the vision part of a language model (an mmproj file), which ComfyUI has inside of the text encoder. "
            "For prompts with pictures get the text encoder as a .safetensors file; for others this file is not needed."
        )
    if not any(BLOCK.fullmatch(name) for name in header.extents):
        return None
    if architecture not in AS_THEY_ARE:
        told = (
            f"a model of the architecture {architecture[:80]!r}"
            if isinstance(architecture, str)
            else "a language model"
        )
        raise WrongFile(
            f"{header.path} is {told} from llama.cpp. Of those FuseStream reads Qwen2.5, Qwen3, T5 and UMT5; the numbers of others "
            "are not as ComfyUI needs them. Get the text encoder as a .safetensors file."
        )
    return QWEN


def has_no_vision(header: WeightFile) -> bool:
    """Whether llama.cpp left the vision part out of a file whose model may have one in ComfyUI."""
    named = header.values.get(ARCHITECTURE) in AS_THEY_ARE
    return named and not any(name.startswith("visual.") for name in header.extents)

"""T5 v1.1 XXL's encoder, as t5xxl_fp16.safetensors has it: UMT5's names, with three differences.

    relative_attention_bias   in block 0 only; the others reuse what it gives
    shared.weight             32128 rows: T5's own vocabulary, for which stock has the tokenizer, so prompts can be tokenized
    spiece_model              not there

For CLIPType.CHROMA, SD3 or LTXV alone, and with CLIP-L for FLUX. What must stay is as with UMT5: 24 layers, an FFN of 10240.
"""

from __future__ import annotations

from pathlib import Path

from . import umt5
from .container import shapes
from .storage import PLAIN, Cast, Scaled, Storage
from .weights import Table

SIZE = umt5.Umt5Size(vocabulary=32128)


def table(size: umt5.Umt5Size) -> Table:
    """Every tensor of one encoder."""
    return {
        name: spec
        for name, spec in umt5.table(size).items()
        if "relative_attention_bias" not in name or name.startswith("encoder.block.0.")
    }


def model_options(path: Path) -> dict[str, dict[str, int]]:
    """What to give stock's `load_clip(..., model_options=...)` for a file that is not full size."""
    layers = sum(name.endswith("SelfAttention.q.weight") for name in shapes(path))
    return {"t5xxl_model_config": umt5.model_config(path) | {"num_layers": layers}}


STORAGES: dict[str, Storage] = PLAIN | {
    # t5xxl_fp8_e4m3fn.safetensors
    "fp8_e4m3fn": Cast(),
    # t5xxl_fp8_e4m3fn_scaled.safetensors
    "fp8_scaled": Scaled(marker=0),
}

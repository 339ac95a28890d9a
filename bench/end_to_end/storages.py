"""The ways in which files of the bench store their weights. Standard library only."""

from __future__ import annotations

# Bytes of a block's matrices, against FP16's. Of Q4_K_M: v and the feed-forward's second matrix of a Wan block are Q6_K.
STORED = {
    "fp16": 1.0,
    "fp8_e4m3fn": 0.5,
    "fp8_scaled": 0.5,
    "int8_convrot": 0.5,
    "nvfp4": 9 / 32,
    "q8_0": 34 / 64,
    "q4_k_m": 0.326,
}
# Of others' Q4_K_M, whose mix is another one (packing.py); of those that write with the words, all of which a token reads.
MIXED = {
    **{"t5": 0.3009, "qwen3": 0.2988, "vl2": 0.32, "vl4": 0.3096},
    **{"klein4": 0.286, "z_image": 0.403, "sdxl": 0.316},
}
GGUF = ("q8_0", "q4_k_m")
BY_FILE = (
    "fp8_scaled",
    "int8_convrot",
)  # what `auto` may multiply as it is stored: of other files it computes as `precise`
SHOWN = {"q8_0": "Q8_0", "q4_k_m": "Q4_K_M"}  # as the files' names have it, where that differs


def stored(model: str, storage: str) -> float:
    """Bytes of what a forward reads of a model's weights, against FP16's."""
    return MIXED.get(model, STORED[storage]) if storage == "q4_k_m" else STORED[storage]


def shown(storage: str) -> str:
    return SHOWN.get(storage, storage)


def computed(precision: str, storage: str) -> str:
    """How ours compute with weights of a storage: of most `auto` is another word for `precise`."""
    return "precise" if precision == "auto" and storage not in BY_FILE else precision


def file_name(model: str, storage: str) -> str:
    return f"{model}_{storage}.{'gguf' if storage in GGUF else 'safetensors'}"


def heading(storage: str) -> str:
    """Of a table's column."""
    return "FP16" if storage == "fp16" else shown(storage)

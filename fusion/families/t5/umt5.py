"""UMT5, the text encoder of Wan: its configuration, read from its own file.

Stock builds every UMT5 like the published UMT5-XXL. The tensors' shapes give the same sizes, and
the right ones for trimmed encoders, too, so they are used instead.
"""

from __future__ import annotations

from ....memory import WeightFile
from ...base.errors import WrongFile

# Stock lets a text encoder's model_options override its built-in configuration under this key.
CONFIG_OPTION = "umt5xxl_model_config"


def config(header: WeightFile) -> dict[str, int]:
    """The T5 configuration that fits the tensors of `header`, under the names stock's T5 uses."""
    embedding = _shape(header, "shared.weight")
    query = _shape(header, "encoder.block.0.layer.0.SelfAttention.q.weight")
    bias = _shape(header, "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    hidden = _shape(header, "encoder.block.0.layer.1.DenseReluDense.wi_0.weight")
    layers = sum(name.endswith(".layer.0.SelfAttention.q.weight") for name in header.extents)
    buckets, heads = bias
    if heads == 0 or query[0] % heads:
        raise WrongFile(f"{header.path}: a query of {query[0]} rows does not divide into {heads} heads.")
    return {
        "vocab_size": embedding[0],
        "d_model": embedding[1],
        "d_ff": hidden[0],
        "d_kv": query[0] // heads,
        "num_heads": heads,
        "num_layers": layers,
        "relative_attention_num_buckets": buckets,
    }


def _shape(header: WeightFile, name: str) -> tuple[int, int]:
    extent = header.extents.get(name)
    if extent is None or len(extent.shape) != 2:
        raise WrongFile(f"{header.path} lacks the matrix {name!r} of a UMT5 text encoder.")
    return extent.shape[0], extent.shape[1]

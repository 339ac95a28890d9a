"""A weight: how it is stored, how it is taken, and how it is multiplied.

storage.py        as numbers or quantised            meta_tensor.py      a tensor of a file that nobody has read
ggml_blocks.py    GGUF's packed numbers              lazy_weight.py      read when its numbers are asked for
ggml_tensor.py    a packed matrix as a tensor        channels_last.py    convolutions' weights as kernels want them
int8_matrix.py    stock's 8-bit files                lora.py, patches.py what other nodes add to a weight
operands.py       the one way to take a weight       int8_weights.py     weights for products in 8 bits
products.py       the one way to multiply            few_rows.py         products of a token that is being written
fp32_residual.py  FP32 around FP16 products          saturation.py       what was too large for FP16
"""

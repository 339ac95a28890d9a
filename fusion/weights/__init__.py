"""A weight: how it is stored, how it is taken, and how it is multiplied.

storage.py         the storages: numbers, or quantised
ggml_blocks.py     GGUF's packed numbers
ggml_tensor.py     a packed matrix as a tensor
paged.py           a parameter that the pager has
meta_tensor.py     a tensor of a file that is not read yet
lazy_weight.py     a streamed weight that is read when its numbers are asked for
operands.py        the one way to take a weight
integer_weights.py weights for products of integers
products.py        the one way to multiply
few_rows.py        products of a token that is being written
fp32_residual.py   FP32 around FP16 products
channels_last.py   weights of convolutions as kernels want them
lora.py            plain LoRA in one pass
patches.py         other patches, by stock's functions
saturation.py      how much was too large for FP16
"""

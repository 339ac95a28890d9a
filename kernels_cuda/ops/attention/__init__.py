"""Attention: dense, by lists of blocks, of one token, linear; and the INT8 heads."""

"""Our code in the place of a block's forward, and the cases in which stock computes it.

block.py            who computes a block, and handing it back to stock
attention.py        stock's attention, by stock's hook
named_attention.py  the attention that a layer's file asks for
quality.py          what the quality `auto` means for a model on its card
"""

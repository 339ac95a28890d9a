"""Our code in the place of a block's forward, and when it is stock's all the same.

block.py     whose a block is, and handing it back     named_attention.py  the attention that a layer's file asks for
attention.py stock's attention, by stock's hook        quality.py          what the quality `auto` comes to
"""

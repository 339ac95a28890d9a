"""A VAE whose decoder is a transformer over tiles: each block serves all tiles before the next
block's weights come.

MiniMax H3's has 36 blocks, 4.5 GiB in fp16, and its tiles and clips belong to the model. ComfyUI
takes tile after tile through all blocks, so all weights have to be on the card, or to come anew for
each tile. Here a block's weights come once for many tiles, and 3 GiB are enough.

calls.py    the calls of a decoder within a decoding: noted, and answered later
blocks.py   many calls of a decoder, its blocks outermost
install.py  a stock VAE object whose network decodes so, and the patcher of its weights
"""

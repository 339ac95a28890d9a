"""Shared code of the families of VAEs: a planner of bands and a passage through them. A family
gives its layers as a table.

bands.py             the table's layers: which rows of the input a part of the output needs
picture_stages.py    the table of a VAE of pictures, and which of its stages pass whole
picture_plan.py      a plan of bands as data
picture_planner.py   makes the plan if norms need a whole picture: what is kept, what is recomputed
picture_layers.py    the functions that a family gives of its modules
picture_passage.py   runs a plan over them
picture_route.py     a whole decoding or encoding of pictures
video_plan.py        the table of a causal VAE of videos, the memory of its stages, and its bands
video_passage.py     runs a video through it, two frames at a time
request.py           the arguments of a call of a VAE, and code that is the same in all of them
memory_limits.py     how much memory they may take, and a convolution's weights (of U-Nets, too)
resident_patcher.py  the patcher of a model that is small and used whole
pixel_range.py       between the pixels of pictures and those of VAEs
banded/              VAEs without a family in bands: stock's code on tensors of which a part is there
block_by_block/      a decoder that is a transformer over tiles: a block serves all of them
transfer.py          pixels between the host and the card
"""

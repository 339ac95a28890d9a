"""What the families of VAEs share: a planner of bands and a passage through them. A family gives
its layers as a table.

bands.py             the table's layers: which rows of its input some of its output need, how many
                     bands fit
picture_stages.py    the table of a VAE of pictures, and which of its stages pass whole
picture_plan.py      bands where norms look at all of a picture: what is kept, and what is made
                     again
picture_layers.py    what a family gives of its modules; picture_passage.py runs a plan over them
picture_route.py     a whole decoding or encoding of pictures
video_plan.py        the table of a causal VAE of videos, what its stages hold, and its bands
video_passage.py     a video on its way, two frames at a time
request.py           what is asked of a VAE, and what is the same in all answers
memory_limits.py     how much they may take, and a convolution's weights (of U-Nets, too)
resident_patcher.py  the patcher of a model that is small and used whole
pixel_range.py       between the pixels of pictures and those of VAEs
transfer.py          pixels between the host and the card
"""

"""What the families of VAEs share.

memory_limits.py     how much they may take, and a convolution's weights (of U-Nets, too)
resident_patcher.py  the patcher of a model that is small and used whole
pixel_range.py       between the pixels of pictures and those of VAEs
transfer.py          pixels between the host and the card
"""

"""The family and the kind of a file, told before anything is loaded.

checkpoint_info.py  all that its header tells          latents.py  the latents of models and VAEs
clip_types.py       for which model a text encoder is
"""

"""The family and the kind of a file, told before anything is loaded.

checkpoint_info.py  all that its header tells          latents.py  the latents of models and VAEs
clip_types.py       for which model a text encoder is
encoder_sets.py     which text encoders make one model
ltx_projection.py   what LTX-2's text encoder takes of a second file
"""

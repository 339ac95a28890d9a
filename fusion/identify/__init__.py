"""Which family a file is of, before anything is loaded.

recognise.py   by its names and shapes            inspection.py  all that its header tells
clip_types.py  what a text encoder is for         latents.py     which latents a model and a VAE have
"""

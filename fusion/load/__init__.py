"""From a file to stock's MODEL, CLIP and VAE.

diffusion.py   a diffusion model or a VAE       text.py          text encoders
checkpoint.py  all three out of one file        common.py        what all loaders do
build.py       a network without its weights    other_policy.py  the same model under another kernel policy
"""

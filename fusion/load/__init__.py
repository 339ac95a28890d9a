"""The loaders: from a file to stock's MODEL, CLIP and VAE.

request.py       file and settings
common.py        whether it streams or is stock's
diffusion.py     a diffusion model
text.py          text encoders
vae.py           a VAE
checkpoint.py    all three out of one file
build.py         a network without its weights
encoders.py      text encoders without their weights
filling.py       the file's tensors in a network
missing.py       whether every weight came
lora_fit.py      whether a LoRA fits what was loaded
other_policy.py  the same model under another kernel policy
"""

"""Models whose calls are captured as CUDA graphs and replayed (`gpu/graphed_calls/`).

calls.py      a model that streams             guard.py     whether its network is unchanged
diffusion.py  networks that sample             resident.py  a model on the card, such as a VAE
"""

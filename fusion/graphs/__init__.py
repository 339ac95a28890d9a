"""Models as owners of calls that are captured as CUDA graphs and replayed (`gpu/graphed_calls/`).

calls.py      a model that streams             guard.py     whether its network is what it was
diffusion.py  networks that sample             resident.py  a model that lies on the card, as VAEs do
"""

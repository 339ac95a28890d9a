"""Calls of a model that are captured as CUDA graphs and replayed.

calls.py  one machine for them     guard.py     whether a network is what it was when it was captured
diffusion.py  networks that sample     resident.py  models that lie on the card whole, as VAEs do
"""

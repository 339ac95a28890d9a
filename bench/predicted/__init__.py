"""Predicted times of every fused family on cards that nobody measured.

load.py       what a call of a network does, in operations and bytes; how long that is, at given speeds
passes.py     bytes that a pass over memory moves for each element, from the rows of the card that was measured
families.py   Wan, Flux, Z-Image and Qwen3 as loads      unets.py   U-Nets and TAESD
works.py      what the tables tell: a model, a size, how many calls
speeds.py     what a card does in a second, by who computes      held.py   the same sums on the card that was measured
kitchen.py    the newest ComfyUI, whose products and passes depend on shapes
told.py       the tables                                         faster.py    where the newest ComfyUI is faster
"""

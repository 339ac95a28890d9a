"""Networks that give a picture another look: their files, the networks, and passing pictures of any
size through them.

recognise.py    the kind of a file, by its names and shapes
load.py         its network, in stock's memory management
transformer.py  a network with one look of its own
adain.py        a network with any look, taken from a picture
bands.py        exact results from some rows at a time
apply.py        a batch of pictures: strength, colours, flicker
"""

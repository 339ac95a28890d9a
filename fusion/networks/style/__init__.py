"""Networks that give a picture the look of another: what their files hold, the networks, and pictures of any size through them.

recognise.py     what a file is, by its names and shapes    load.py    ... and the network of it, in the hands of stock's memory
transformer.py   one look in one network                    adain.py   any look, told by a picture
bands.py         whole-picture results from rows at a time  apply.py   a batch of pictures, strength, colours, one after another
"""

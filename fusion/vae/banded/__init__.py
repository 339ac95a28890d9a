"""Any VAE of stock's in bands: its own code runs, on tensors of which only a band is there.

tensor.py      a tensor that looks whole to stock's code, and has a band, or no numbers at all
rules.py       the table of torch's operations: what each makes of a band
convolving.py  the operations that look sideways: convolutions, padding, upsampling
shaping.py     those that move values only: views, permutations, slices, concatenations
norms.py       the group norms of bands, by the statistics of a smaller picture
reduced.py     that smaller version of a picture
meter.py       counts the bytes and products of a call without computing it
seam.py        where in a network bands begin and end: at the call of one of its modules
plan.py        the bands, and where they begin, such that a call keeps within so many bytes
passage.py     a decoding or an encoding by a plan
install.py     a stock VAE object whose network does so
"""

"""Sparse attention without training: each attention over a long video visits only some of the key
blocks.

    settings.py    what a user asks for
    schedule.py    which calls of a run stay dense
    order.py       tokens in tiles of space and time
    radial.py      fixed lists, for the method without scores
    attention.py   the override that does it
    tally.py       what it did, for the report
    model.py       a MODEL with it

The kernels are `choose_blocks` and `attention` with a block list, in `kernels_cuda`.
"""

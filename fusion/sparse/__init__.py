"""Sparse attention that needs no training: of each attention over a long video only some of the key blocks are visited.

    settings.py    what a user asks for                  schedule.py    which calls of a run stay dense
    order.py       tokens in tiles of space and time     radial.py      the fixed lists of the method that needs no scores
    attention.py   the override that does it             tally.py       what it did, for the report
    model.py       a MODEL with it

The kernels are `choose_blocks` and `attention` with a block list, in `kernels_cuda`.
"""

"""Sparse attention: each attention over a long video visits only some of the key blocks.

    override.py    an override of stock's attention around another one
    order.py       tokens in tiles of space and time
    tally.py       what an override did, for the report
    model.py       a MODEL with one

Without training, if a node asks for it:

    settings.py    what a user asks for
    schedule.py    which calls of a run stay dense
    radial.py      fixed lists, for the method without scores
    attention.py   the override that does it

As a checkpoint was trained:

    sla.py, vsa.py the methods
    trained.py     the override that does it, with what a block has learned

The kernels are `choose_blocks` and `attention` with a block list, in `kernels_cuda`.
"""

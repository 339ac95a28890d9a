"""Before anything is sampled: will it fit, how long does it take, and what would change it.

found = estimate(model, shape, steps, guidance)      # what could not be found out stands in `found.gaps`
as_text(found), draw(found, "dark")

`plan.py` makes it, of three things: `fit.py`, the reckoning that the loaders go by; `measured.py`,
how long steps took here before; and where they took none, `sums.py`, operations and bytes at the
rates of `base/card_rates.py`. While a workflow is only open there is no MODEL: `unread.py` makes
one of the file's header. Nothing is imported from here but by its module: `base/card_rates.py` and
the words of it are read beside no torch.
"""

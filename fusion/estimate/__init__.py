"""An estimate before anything is sampled: whether it fits, how long it takes, and what would change
it.

found = estimate(model, shape, steps, prompts)      # gaps are listed in `found.gaps`
as_text(found), draw(found, "dark")

`plan.py` makes it from three sources: `fit.py`, the memory estimate that the loaders use;
`measured.py`, how long steps took here before; and, if none was timed, `sums.py`, operations and
bytes at the rates of `base/card_rates.py`. `telling.py` chooses the changes that are told where there
is room for few. While a workflow is only open there is no MODEL, and
`unread.py` makes one from the file's header. This package imports nothing, because
`base/card_rates.py` and the words of it are read without torch.
"""

"""Fidelity: each way to compute against stock ComfyUI in FP32, on trained weights (`checkpoints/trained`).

variants.py   the ways to compute: a table, to which one more is one line
pipeline.py   prompts, noise, and the three networks as stock's and our loaders make them
errors.py     how far two results lie apart
measure.py    a variant's row: each network alone, and all of them after twenty steps
table.py      the pages' tables, from the results alone
cli.py        the command
"""

"""Whether ComfyUI's code is still what ours was written after, and what ComfyUI computes itself where it is not.

    specimen.py    a small network of stock's by which a family's code is judged, and what is drawn for it
    trial.py       the same call by stock's code and by ours: results, attention, options (recorded_options.py)
    signatures.py  parameters by name and default, of methods that ours stand in for
    source.py      a fingerprint of stock's code, so that a verdict is kept as long as that is the same
    verdicts.py    what was found, on disk (verdicts_file.py): one trial for each version, card and type
    variants.py    blocks of a network that stock built otherwise than any specimen
    families.py    a family as the loaders may use it: as it is, or with nothing fused
    streaming.py   what streaming needs of stock: methods, functions, operations
    aside.py       what has stepped aside in this process, for the log, the report and the doctor

Nothing here knows a family: each names its specimens itself (`family.Family.specimens`).
"""

"""Whether ComfyUI's code is still what ours was written after. If it is not, ComfyUI computes.

    specimen.py    a small network of stock's by which a family is judged, and its random draws
    trial.py       the same call by stock's code and ours: results, attention, options
                   (recorded_options.py)
    signatures.py  parameters by name and default, of methods that ours stand in for
    source.py      a fingerprint of stock's code; a verdict is kept as long as it is the same
    verdicts.py    verdicts on disk (verdicts_file.py): one trial per version, card and type
    variants.py    blocks of a network that stock built otherwise than any specimen
    families.py    a family as the loaders may use it: as it is, or with nothing fused
    streaming.py   what streaming needs of stock: methods, functions, operations
    aside.py       what has stepped aside in this process, for the log, report and doctor

Nothing here knows a family: each names its specimens itself (`family.Family.specimens`).
"""

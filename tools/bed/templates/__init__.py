"""The example workflows, written by one script: `python3 dev.py workflows` makes every file in `workflows/`.

    files.py       the published weight files: name, size, folder, address
    signatures.py  which inputs, widgets and outputs a node has, in the order in which a workflow stores them
    graph.py       a graph: laid out for a person, as an API prompt for a machine
    examples/      the graphs, and the titles under which they are found
    listed.py      how they stand in the template browser: the names of their files, and `nodes/web/templates/index.json`
    from_stock/    ComfyUI's own templates with our loaders
    blueprints.py  of some of them, one node for all of it: `subgraphs/`
    said.py        the notes in Chinese and Japanese: `nodes/web/notes/`
    note.py        the note on each: which file goes where, what an 8 GB card should expect
    prediction.py  the arithmetic behind that expectation
    card.py        the pictures in the template browser
    frames.py      what they show: videos of the trained small model, with `--pictures` made anew
    inputs.py      the pictures and the clip that they load: `workflows/inputs`; scenery.py and clip.py make them

Our own nodes' inputs come from the published schema (`tests/unit/nodes/schema.json`): after an input was added, run it again.
"""

from __future__ import annotations

from .examples import EXAMPLES, Example
from .from_stock import SWAPPED, Swapped

# Of all workflows by their short names: what the template browser calls them, and the names of their files.
TITLES = {one.name: one.listed.title for one in (*EXAMPLES, *SWAPPED)}
STEMS = {one.name: one.listed.stem for one in (*EXAMPLES, *SWAPPED)}

__all__ = ["EXAMPLES", "STEMS", "SWAPPED", "TITLES", "Example", "Swapped"]

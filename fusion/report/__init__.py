"""A report on a run, for a person: gathered once, then written as text, drawn as a picture, kept as
JSON.

found = gather(model)              # never raises; gaps in the report are listed in `found.gaps`
as_text(found), draw(found, "dark"), as_json(found)
"""

from .compare import compare_text, draw_pair
from .data import Report, as_json
from .gathering import gather
from .picture import draw
from .text import as_text

__all__ = ["Report", "as_json", "as_text", "compare_text", "draw", "draw_pair", "gather"]

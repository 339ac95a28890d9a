"""Templates of ComfyUI's own with our loaders in them: `workflows/FuseStream 21 ..` and on.

loaders.py  which loader of ours stands for which of ComfyUI's
swap.py     a template with our loaders
note.py     the note that comes beside ComfyUI's
catalogue.py  which templates, under which titles
prompt.py   a workflow with subgraphs as a server is sent it
"""

from __future__ import annotations

from .catalogue import SWAPPED, Swapped

__all__ = ["SWAPPED", "Swapped"]

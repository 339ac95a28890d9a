"""The note beside ComfyUI's own: which template it is, and what is ours in it."""

from __future__ import annotations

from ..graph import OLIVE
from ..note import room
from .swap import Json, graphs, nodes

HEADING = "With FuseStream"
WIDTH, GAP = 360, 40
# Nodes of ComfyUI's that load what no loader of ours does, and what they are called.
STAYS = {"LTXVAudioVAELoader": "Load LTXV Audio VAE", "LatentUpscaleModelLoader": "Load Latent Upscale Model"}


def note(workflow: Json, template: str) -> str:
    """The Markdown. template: the name of ComfyUI's file."""
    staying = [f"*{STAYS[type_]}*" for type_ in sorted({node["type"] for node in nodes(workflow)} & STAYS.keys())]
    about = f"ComfyUI's template *{template}* with FuseStream's loaders, which are inside the node of the subgraph."
    if staying:
        about += f" {' and '.join(staying)} stay ComfyUI's."
    if any(node["type"] == "LoadImage" for node in nodes(workflow)):
        about += " Choose yours in *Load Image*."
    licence = "The template is by Comfy Org, under the MIT licence."
    return "\n".join(
        [
            "# ComfyUI's template with FuseStream",
            "",
            about,
            "",
            "ComfyUI offers to download files that are missing.",
            "",
            "**On an 8 GB card.** Not measured yet.",
            "",
            licence,
            "",
        ]
    )


def add_note(workflow: Json, template: str) -> None:
    """To the left of all that is there."""
    text = note(workflow, template)
    left = min(node["pos"][0] for node in workflow["nodes"])
    top = min(node["pos"][1] for node in workflow["nodes"])
    id_ = max(node["id"] for graph in graphs(workflow) for node in graph["nodes"]) + 1
    workflow["last_node_id"] = id_
    workflow["nodes"].append(
        {
            "id": id_,
            "type": "MarkdownNote",
            "pos": [left - WIDTH - GAP, top],
            "size": [WIDTH, room(text, WIDTH)],
            "flags": {},
            "order": len(workflow["nodes"]),
            "mode": 0,
            "inputs": [],
            "outputs": [],
            "title": HEADING,
            "properties": {},
            "widgets_values": [text],
            **OLIVE,
        }
    )


def note_of(workflow: Json) -> str:
    """What the note says that `add_note` put there."""
    (found,) = (node for node in workflow["nodes"] if node.get("title") == HEADING)
    text: str = found["widgets_values"][0]
    return text

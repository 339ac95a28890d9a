"""A graph in ComfyUI's API form: a table of nodes, with subgraphs expanded.

{"77:8": {"class_type": ..., "inputs": {name: value or [node, output]}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

MODEL, GUIDER, LATENT, VAE, IMAGE, ANY = "MODEL", "GUIDER", "LATENT", "VAE", "IMAGE", "*"
MODELS = (MODEL, GUIDER)  # a model, and a model with its prompts

Prompt = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Kind:
    """A class of nodes.

    outputs   types of its outputs
    is_end    whether a run is made for such nodes: they save, or show
    is_plain  whether its latents and its VAE are of the kind that it takes: stock's nodes, and ours
    code      the class itself, for those whose results are worked out beforehand
    """

    outputs: tuple[str, ...]
    is_end: bool = False
    is_plain: bool = True
    code: Any = None


class Output(NamedTuple):
    """An output of a node, by its place."""

    node: str
    place: int


class Unknown(Exception):
    """What is not known before the graph runs.

    key: of the reason, among the page's words. node: its subject. sampler: the node of its sampling."""

    def __init__(self, key: str, node: str = "", **values: Any) -> None:
        super().__init__(key)
        self.key, self.node, self.values = key, node, values
        self.sampler = ""


def is_link(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and isinstance(value[1], int) and isinstance(value[0], (str, int))
    )


def output_of(link: Any) -> Output:
    return Output(str(link[0]), link[1])

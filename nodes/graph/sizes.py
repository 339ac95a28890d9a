"""Sizes of latents in a graph, read before anything runs: from the node that makes them empty, from the picture that is
encoded, or from the latents that were sampled before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from .prompt import LATENT, MODELS, Output, Prompt, Unknown, is_link
from .values import Values

PIXELS = "pixels"  # the input of nodes that encode a picture
SAME_SIZE = ("SetLatentNoiseMask",)  # latents of their input's size
# Nodes that put a frame of latents before those of the video, and the input that adds it.
ADDS_A_FRAME = {"WanVaceToVideo": "reference_image"}
# Empty latents of sound: their shape behind the batch, for so many seconds.
SOUNDS: Mapping[str, Callable[[float], tuple[int, ...]]] = {
    "EmptyAceStepLatentAudio": lambda seconds: (8, 16, int(seconds * 44100 / 512 / 8)),
    "EmptyAceStep1.5LatentAudio": lambda seconds: (64, round(seconds * 48000 / 1920)),
}


class Linked(Protocol):
    """A graph whose links are typed."""

    prompt: Prompt
    values: Values

    def links_of(self, node: str, *types: str) -> Sequence[Output]: ...

    def is_plain(self, node: str) -> bool: ...


class Size(NamedTuple):
    """Of a latent.

    pixels  frames, height and width; 0 frames: of a picture
    batch   how many at once
    more    frames of the latent, in addition to those of the pixels
    sound   instead of pixels: the latent's shape behind the batch; empty: it is no sound
    """

    pixels: tuple[int, int, int]
    batch: int = 1
    more: int = 0
    sound: tuple[int, ...] = ()


def size_of(graph: Linked, sampler: str) -> Size:
    """Of the latents that this node takes. Raises `Unknown`."""
    node, seen = sampler, set[str]()
    while node not in seen:
        seen.add(node)
        inputs = graph.prompt[node]["inputs"]
        if node != sampler and graph.is_plain(node):
            if {"width", "height"} <= inputs.keys():
                return _made_here(graph, node)
            if PIXELS in inputs:
                return _encoded_here(graph, node)
            if graph.prompt[node]["class_type"] in SOUNDS:
                return _sound(graph, node)
        latents = graph.links_of(node, LATENT)
        passes = graph.links_of(node, *MODELS) or graph.prompt[node]["class_type"] in SAME_SIZE
        if not latents:
            raise Unknown("noLatent" if node == sampler else "sizeOf", node)
        if len(latents) > 1 or not (passes or node == sampler) or not graph.is_plain(node):
            raise Unknown("sizeOf", node)
        node = latents[0].node
    raise Unknown("sizeOf", node)


def _made_here(graph: Linked, node: str) -> Size:
    inputs = graph.prompt[node]["inputs"]
    width, height = (int(graph.values.number(node, name)) for name in ("width", "height"))
    frames = int(graph.values.number(node, "length")) if "length" in inputs else 0
    batch = int(graph.values.number(node, "batch_size", 1))
    # An upscaler takes its other side from the picture.
    if min(width, height, batch) < 1 or frames < 0:
        raise Unknown("sizeOf", node)
    adds = ADDS_A_FRAME.get(graph.prompt[node]["class_type"])
    return Size((frames, height, width), batch, int(adds is not None and is_link(inputs.get(adds))))


def _encoded_here(graph: Linked, node: str) -> Size:
    """Of pictures that a VAE encodes: several are a video, or a batch to a model of pictures."""
    count, height, width = graph.values.size(node, PIXELS)
    return Size((count if count > 1 else 0, height, width))


def _sound(graph: Linked, node: str) -> Size:
    shape = SOUNDS[graph.prompt[node]["class_type"]](graph.values.number(node, "seconds"))
    batch = int(graph.values.number(node, "batch_size", 1))
    if min(*shape, batch) < 1:
        raise Unknown("sizeOf", node)
    return Size((0, 0, 0), batch, sound=shape)

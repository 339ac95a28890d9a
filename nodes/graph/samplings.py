"""The samplings of a loader's model in a graph that is open, read before anything runs.

The search goes from the loader's MODEL over the nodes that change it to each node that samples, and
from there to the nodes that have steps, guidance and size. Nothing is guessed: a value that is
computed when the graph runs, or that only another pack's node knows, is `Unknown`, with the node
that it is about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .links import Graph
from .prompt import GUIDER, IMAGE, LATENT, MODELS, Output, Unknown, is_link
from .values import SWITCHES

SIGMAS, CONDITIONING = "SIGMAS", "CONDITIONING"
SAME_SIGMAS = ("FlipSigmas", "SetFirstSigma")  # the same number of sigmas as their input
PIXELS = "pixels"  # the input of nodes that encode a picture
SAME_SIZE = ("SetLatentNoiseMask",)  # latents of their input's size
# Nodes that put a frame of latents before those of the video, and the input that adds it.
ADDS_A_FRAME = {"WanVaceToVideo": "reference_image"}
ONE_PROMPT, THREE_PROMPTS = "BasicGuider", "DualCFGGuider"
# Empty latents of sound: their shape behind the batch, for so many seconds.
SOUNDS: Mapping[str, Callable[[float], tuple[int, ...]]] = {
    "EmptyAceStepLatentAudio": lambda seconds: (8, 16, int(seconds * 44100 / 512 / 8)),
    "EmptyAceStep1.5LatentAudio": lambda seconds: (64, round(seconds * 48000 / 1920)),
}


@dataclass(frozen=True)
class Sampling:
    """A sampling in a graph.

    sampler   the node that samples
    between   nodes that the model passes on its way there, in order
    pixels    frames, height and width; 0 frames: of a picture
    sound     instead of pixels: the latent's shape behind the batch; empty: it is no sound
    batch     how many at once
    more      frames of the latent, in addition to those of the pixels
    prompts   of each step
    """

    sampler: str
    between: tuple[str, ...]
    pixels: tuple[int, int, int]
    batch: int
    more: int
    steps: int
    prompts: int
    sound: tuple[int, ...] = ()


def samplings(graph: Graph, loader: str) -> Iterator[Sampling | Unknown]:
    """The samplings that the loader's first output goes to, the nearest first: those that will run, or
    where nothing of this model is saved yet, all."""
    takers: dict[Output, list[str]] = {}
    for name in graph.prompt if loader not in graph.running else graph.running:
        for output in dict.fromkeys(graph.links(name)):
            takers.setdefault(output, []).append(name)
    waiting: deque[tuple[Output, tuple[str, ...]]] = deque([(Output(loader, 0), ())])
    seen: set[str] = set()
    while waiting:
        output, between = waiting.popleft()
        for node in takers.get(output, ()):
            if node in seen:
                continue
            seen.add(node)
            made = graph.made(node)
            if graph.prompt[node]["class_type"] in SWITCHES:
                yield _undecided(graph, node)
            elif LATENT in made and not (graph.is_plain(node) and set(MODELS) & set(made)):
                yield _sampling(graph, node, between)
            elif len(set(graph.links_of(node, *MODELS))) > 1:
                yield Unknown("twoModels", node)
            elif IMAGE in made and graph.links_of(node, CONDITIONING):
                yield Unknown("samplesItself", node)
            else:
                goes_on = [Output(node, place) for place, type in enumerate(made) if type in MODELS]
                waiting += [(one, (*between, node)) for one in goes_on]


def number(graph: Graph, node: str, name: str, default: float | None = None) -> float:
    """The value that this input of a node will have. Raises `Unknown`."""
    value = graph.values.input(node, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unknown("noValue", node, what=name)
    return value


def _undecided(graph: Graph, switch: str) -> Unknown:
    """Why a switch is still in the graph."""
    try:
        graph.values.chosen(switch)
    except Unknown as reason:
        return reason
    raise AssertionError("a switch that is known is followed")


# --------------------------------------------------------------------------------------------------------- one sampling


def _sampling(graph: Graph, sampler: str, between: tuple[str, ...]) -> Sampling | Unknown:
    try:
        if not graph.is_plain(sampler):
            raise Unknown("samplesItself", sampler)
        size = _size(graph, sampler)
        steps, prompts = _steps(graph, sampler), _prompts(graph, sampler)
        return Sampling(sampler, between, size.pixels, size.batch, size.more, steps, prompts, size.sound)
    except Unknown as reason:
        reason.sampler = sampler
        return reason


class _Size(NamedTuple):
    """Of a latent: as in `Sampling`."""

    pixels: tuple[int, int, int]
    batch: int = 1
    more: int = 0
    sound: tuple[int, ...] = ()


def _size(graph: Graph, sampler: str) -> _Size:
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
        if len(latents) > 1 or not passes or not graph.is_plain(node):
            raise Unknown("sizeOf", node)
        node = latents[0].node
    raise Unknown("sizeOf", node)


def _made_here(graph: Graph, node: str) -> _Size:
    inputs = graph.prompt[node]["inputs"]
    width, height = (int(number(graph, node, name)) for name in ("width", "height"))
    frames = int(number(graph, node, "length")) if "length" in inputs else 0
    batch = int(number(graph, node, "batch_size", 1))
    # An upscaler takes its other side from the picture.
    if min(width, height, batch) < 1 or frames < 0:
        raise Unknown("sizeOf", node)
    adds = ADDS_A_FRAME.get(graph.prompt[node]["class_type"])
    return _Size((frames, height, width), batch, int(adds is not None and is_link(inputs.get(adds))))


def _encoded_here(graph: Graph, node: str) -> _Size:
    """Of a picture that a VAE encodes. Of several it depends on the VAE whether they are a video."""
    count, height, width = graph.values.size(node, PIXELS)
    if count != 1:
        raise Unknown("sizeOf", node)
    return _Size((0, height, width))


def _sound(graph: Graph, node: str) -> _Size:
    shape = SOUNDS[graph.prompt[node]["class_type"]](number(graph, node, "seconds"))
    batch = int(number(graph, node, "batch_size", 1))
    if min(*shape, batch) < 1:
        raise Unknown("sizeOf", node)
    return _Size((0, 0, 0), batch, sound=shape)


def _steps(graph: Graph, sampler: str) -> int:
    """Number of computed steps: those between a first and a last one, if they are given."""
    inputs = graph.prompt[sampler]["inputs"]
    if "steps" in inputs:
        steps = number(graph, sampler, "steps")
        first = number(graph, sampler, "start_at_step", 0)
        last = min(steps, number(graph, sampler, "end_at_step", steps))
        found = int(max(0, last - first))
    else:
        found = _sigmas(graph, sampler)
    if found < 1:
        raise Unknown("noSteps", sampler)
    return found


def _sigmas(graph: Graph, node: str, depth: int = 0) -> int:
    """Number of steps, from the sigmas that a node takes."""
    found = graph.links_of(node, SIGMAS)
    if len(found) != 1 or depth > len(graph.prompt):
        raise Unknown("stepsOf", node)
    origin, place = found[0]
    class_type, inputs = graph.prompt[origin]["class_type"], graph.prompt[origin]["inputs"]
    if class_type == "SplitSigmas":
        whole, first = _sigmas(graph, origin, depth + 1), int(number(graph, origin, "step"))
        return min(first, whole) if place == 0 else max(0, whole - first)
    if class_type in SAME_SIGMAS:
        return _sigmas(graph, origin, depth + 1)
    if "steps" not in inputs or not graph.is_plain(origin) or graph.links_of(origin, SIGMAS):
        raise Unknown("stepsOf", origin)
    return int(number(graph, origin, "steps"))


def _prompts(graph: Graph, sampler: str) -> int:
    """How many prompts a step computes: with a guidance of 1 stock leaves the others out."""
    guiders = graph.links_of(sampler, GUIDER)
    node = guiders[0].node if guiders else sampler
    inputs = graph.prompt[node]["inputs"]
    if "cfg" in inputs:
        return 1 if number(graph, node, "cfg") == 1.0 else 2
    if graph.prompt[node]["class_type"] == ONE_PROMPT:
        return 1
    if graph.prompt[node]["class_type"] == THREE_PROMPTS:
        between, negative = (number(graph, node, name) for name in ("cfg_conds", "cfg_cond2_negative"))
        return 3 if negative != 1.0 else 2 if between != 1.0 else 1
    raise Unknown("guidanceOf", node)

"""The samplings of a loader's model in a graph that is open, read before anything runs.

The search goes from the loader's MODEL over the nodes that change it to each node that samples, and
from there to the nodes that have steps, guidance and size. Nothing is guessed: a value that is
computed when the graph runs, or that only another pack's node knows, is `Unknown`, with the node
that it is about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .links import Graph
from .prompt import GUIDER, IMAGE, LATENT, MODELS, Output, Unknown
from .sizes import size_of
from .values import DEEP, SWITCHES

SIGMAS, CONDITIONING = "SIGMAS", "CONDITIONING"
SAME_SIGMAS = ("FlipSigmas", "SetFirstSigma")  # the same number of sigmas as their input
LIVE = "FuseStreamLiveVideo"
ONE_PROMPT, THREE_PROMPTS = "BasicGuider", "DualCFGGuider"


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
    among = graph.prompt if loader not in graph.running else graph.running
    for met in samplers(graph, Output(loader, 0), among):
        yield met if isinstance(met, Unknown) else _sampling(graph, *met)


def samplers(graph: Graph, model: Output, among: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]] | Unknown]:
    """Each node that samples with this model, and the nodes that the model passes on its way there;
    or why that cannot be said. among: the nodes that are looked at."""
    takers: dict[Output, list[str]] = {}
    for name in among:
        for output in dict.fromkeys(graph.links(name)):
            takers.setdefault(output, []).append(name)
    waiting = deque([model])
    before = {model.node: model.node}  # of each node that was met, the one that it was met from
    while waiting:
        output = waiting.popleft()
        for node in takers.get(output, ()):
            if node in before:
                continue
            before[node] = output.node
            made = graph.made(node)
            if graph.prompt[node]["class_type"] in SWITCHES:
                yield _undecided(graph, node)
            elif LATENT in made and not (graph.is_plain(node) and set(MODELS) & set(made)):
                yield node, _way(before, model.node, node)
            elif len(set(graph.links_of(node, *MODELS))) > 1:
                yield Unknown("twoModels", node)
            elif IMAGE in made and graph.links_of(node, CONDITIONING):
                is_live = graph.prompt[node]["class_type"] == LIVE
                yield Unknown("frameByFrame" if is_live else "samplesItself", node)
            else:
                waiting += [Output(node, place) for place, type in enumerate(made) if type in MODELS]


def _way(before: dict[str, str], loader: str, node: str) -> tuple[str, ...]:
    """The nodes from the loader to this one, without both."""
    found: list[str] = []
    while (node := before[node]) != loader:
        found.append(node)
    return tuple(reversed(found))


def _undecided(graph: Graph, switch: str) -> Unknown:
    """Why a switch is still in the graph."""
    try:
        graph.values.chosen(switch)
    except Unknown as reason:
        return reason
    return Unknown("computed", switch, what=SWITCHES[graph.prompt[switch]["class_type"]][0])


# --------------------------------------------------------------------------------------------------------- one sampling


def _sampling(graph: Graph, sampler: str, between: tuple[str, ...]) -> Sampling | Unknown:
    try:
        if not graph.is_plain(sampler):
            raise Unknown("samplesItself", sampler)
        size = size_of(graph, sampler)
        steps, prompts = steps_at(graph, sampler), prompts_at(graph, sampler)
        return Sampling(sampler, between, size.pixels, size.batch, size.more, steps, prompts, size.sound)
    except Unknown as reason:
        reason.sampler = sampler
        return reason


def steps_at(graph: Graph, sampler: str) -> int:
    """Number of computed steps: those between a first and a last one, if they are given."""
    inputs = graph.prompt[sampler]["inputs"]
    if "steps" in inputs:
        steps = graph.values.number(sampler, "steps")
        first = graph.values.number(sampler, "start_at_step", 0)
        last = min(steps, graph.values.number(sampler, "end_at_step", steps))
        found = int(max(0, last - first))
    else:
        found = _sigmas(graph, sampler)
    if found < 1:
        raise Unknown("noSteps", sampler)
    return found


def _sigmas(graph: Graph, node: str, depth: int = 0) -> int:
    """Number of steps, from the sigmas that a node takes."""
    found = graph.links_of(node, SIGMAS)
    if len(found) != 1 or depth > DEEP:
        raise Unknown("stepsOf", node)
    origin, place = found[0]
    class_type, inputs = graph.prompt[origin]["class_type"], graph.prompt[origin]["inputs"]
    if class_type == "SplitSigmas":
        whole, first = _sigmas(graph, origin, depth + 1), int(graph.values.number(origin, "step"))
        return min(first, whole) if place == 0 else max(0, whole - first)
    if class_type in SAME_SIGMAS:
        return _sigmas(graph, origin, depth + 1)
    if "steps" not in inputs or not graph.is_plain(origin) or graph.links_of(origin, SIGMAS):
        raise Unknown("stepsOf", origin)
    return int(graph.values.number(origin, "steps"))


def prompts_at(graph: Graph, sampler: str) -> int:
    """How many prompts a step computes: with a guidance of 1 stock leaves the others out."""
    guiders = graph.links_of(sampler, GUIDER)
    node = guiders[0].node if guiders else sampler
    inputs = graph.prompt[node]["inputs"]
    if "cfg" in inputs:
        return 1 if graph.values.number(node, "cfg") == 1.0 else 2
    if graph.prompt[node]["class_type"] == ONE_PROMPT:
        return 1
    if graph.prompt[node]["class_type"] == THREE_PROMPTS:
        between, negative = (graph.values.number(node, name) for name in ("cfg_conds", "cfg_cond2_negative"))
        return 3 if negative != 1.0 else 2 if between != 1.0 else 1
    raise Unknown("guidanceOf", node)

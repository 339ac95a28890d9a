"""Steps and prompts as the sampler beside a node has them: of a graph that runs, for a node that
takes the same MODEL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from .links import Graph
from .prompt import MODEL, Unknown
from .samplings import prompts_at, samplers, steps_at

NO_SAMPLER, SEVERAL = "no sampler takes this MODEL", "several samplers take this MODEL"
OF_ITS_OWN = "this MODEL's sampler belongs to another pack"
AS_IT_RUNS = "they are worked out as the graph runs"


@dataclass(frozen=True)
class AsSampler:
    """None: it cannot be read. why: the reason then, in words."""

    steps: int | None
    prompts: int | None
    why: str = ""


def as_sampler(graph: Graph, node: str) -> AsSampler:
    """Of the one sampler that takes the MODEL that this node takes, over any nodes between. Those
    that will run count; if there are none, all in the graph."""
    models = graph.links_of(node, MODEL)
    if len(models) != 1:
        return AsSampler(None, None, NO_SAMPLER)
    for among in (graph.running, graph.prompt):
        met = list(islice(samplers(graph, models[0], among), 2))
        if met:
            break
    else:
        return AsSampler(None, None, NO_SAMPLER)
    if len(met) > 1:
        return AsSampler(None, None, SEVERAL)
    (sampler,) = met
    if isinstance(sampler, Unknown) or not graph.is_plain(sampler[0]):
        return AsSampler(None, None, OF_ITS_OWN)
    steps, prompts = _known(steps_at, graph, sampler[0]), _known(prompts_at, graph, sampler[0])
    return AsSampler(steps, prompts, AS_IT_RUNS if None in (steps, prompts) else "")


def _known(read: Callable[[Graph, str], int], graph: Graph, sampler: str) -> int | None:
    try:
        return read(graph, sampler)
    except Unknown:
        return None

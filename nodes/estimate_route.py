"""Estimates for each model loader in the workflow that is open.

The page asks for them while the workflow is edited, before anything is queued. Only the header of a
model's file is read, and kept until the file changes. While a prompt runs nothing is estimated,
because the free memory is that prompt's. The answer names no folder.

A question takes two seconds, and what it takes to read one model's file. What could not be answered
until then is said to be too large, or to come later.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..fusion.base.family import Role
from ..fusion.base.vram_budget import AUTO
from . import declare, files
from .graph import queued
from .graph.links import Graph
from .graph.prompt import Unknown, is_link
from .graph.samplings import Sampling, samplings
from .graph.time_limit import OutOfTime, TimeLimit
from .kernels import ModelKernels
from .loaders import CheckpointLoader, DiffusionModelLoader, Loader
from .model_files import model_files
from .page import user_files
from .page.front_end import answered, is_busy, running_server
from .page.one_at_a_time import NoTurn, OneAtATime
from .page.request_body import Refused, body_of
from .sparse import SparseAttentionNode
from .step_cache import StepCacheNode

if TYPE_CHECKING:
    from aiohttp import web

    from ..fusion.estimate.plan import Change, Estimate
    from ..fusion.estimate.ram import RamFit

PATH = "/fusestream/estimate"
ASKS = '{"prompt": a graph in API form}'
# Limits of a request, of loaders that are answered for, and of samplings of each; the page shows three.
MOST_NODES, MOST_LOADERS, MOST_SAMPLINGS = 10000, 16, 8
MOST_SECONDS = 2.0  # for a graph, without the reading of files; and for other questions to end
LOADERS: dict[str, type[Loader]] = {
    "FuseStreamDiffusionModelLoader": DiffusionModelLoader,
    "FuseStreamCheckpointLoader": CheckpointLoader,
}
# Nodes between loader and sampler that change an estimate: they run on a model that was not read.
RUN: dict[str, Any] = {
    "FuseStreamKernels": ModelKernels,
    "FuseStreamSparseAttention": SparseAttentionNode,
    "FuseStreamStepCache": StepCacheNode,
}

log = logging.getLogger("fusestream.estimate")

_reckoning: OneAtATime[dict[str, Any]] = OneAtATime()


def attach() -> None:
    """Let the server answer at the address. Called once, before it starts to listen."""
    server = running_server()
    if server is not None:
        server.routes.post(PATH)(answer)


async def answer(request: web.Request) -> web.Response:
    """Answers {"prompt": a graph in API form}. Only numbers and our own nodes' values are used."""
    try:
        prompt = _checked((await body_of(request, ASKS)).get("prompt"))
    except Refused as why:
        return why.answer()
    if is_busy():
        return answered({"busy": True})
    try:
        found = await _reckoning.do(request, lambda is_over: estimates(prompt, is_over), MOST_SECONDS)
    except NoTurn:
        found = {name: [_unknown(Unknown("later"))] for name in _loaders(prompt)}
    return answered({"loaders": found})


def estimates(prompt: Mapping[str, Any], is_over: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """The page's answer for each sampling with a loader's model, by the loader's id. is_over: whether
    nobody waits for it any more."""
    # The server starts without torch, and its import takes longer than a graph may.
    importlib.import_module("..fusion.estimate.plan", __package__)
    limit, loaders = TimeLimit(MOST_SECONDS, is_over), _loaders(prompt)
    try:
        asked = _Asked(Graph(prompt, queued.kind_of, go_on=limit), limit)
    except Exception as error:
        return {name: [_unknown(_why(error))] for name in loaders}
    found: dict[str, Any] = {}
    for name in loaders:
        limit.share(len(loaders) - len(found))
        found[name] = _of_loader(asked, name)
    return found


def _loaders(prompt: Mapping[str, Any]) -> list[str]:
    return [name for name, node in prompt.items() if node["class_type"] in LOADERS][:MOST_LOADERS]


class _Asked:
    """A question: a graph, and how long it may take."""

    def __init__(self, graph: Graph, limit: TimeLimit) -> None:
        self.graph, self.limit = graph, limit

    @cached_property
    def files(self) -> dict[str, int]:
        return model_files(self.graph.prompt)


def _of_loader(asked: _Asked, loader: str) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    try:
        found = list(islice(samplings(asked.graph, loader), MOST_SAMPLINGS)) or [Unknown("noSampler")]
        with asked.limit.aside():
            model = None
            if any(isinstance(one, Sampling) for one in found):
                model = _model(asked, loader)
            else:
                _require_file(asked.graph, loader)
        for one in found:
            asked.limit()
            told.append(_of_sampling(asked, model, one))
    except Exception as error:  # an estimate is not worth a failed page, and those before it stay
        told.append(_unknown(_why(error)))
    return told


def _why(error: Exception) -> Unknown:
    if isinstance(error, Unknown):
        return error
    if isinstance(error, OutOfTime):
        return Unknown("tooMuch")
    log.warning("no estimate", exc_info=error)
    return Unknown("said", sentence=f"{type(error).__name__}. The place is in ComfyUI's log.")


def _of_sampling(asked: _Asked, model: Any, one: Sampling | Unknown) -> dict[str, Any]:
    from ..fusion.estimate.plan import estimate, shape_of  # noqa: PLC0415 - the server starts without it

    try:
        if isinstance(one, Unknown):
            raise one
        for node in one.between:
            if asked.graph.prompt[node]["class_type"] in RUN:
                asked.limit()
                model = _run(asked.graph, node, model)
        shape = (one.batch, *one.sound) if one.sound else shape_of(model, one.pixels, one.batch, one.more)
        found = estimate(model, shape, one.steps, one.prompts, asked.files)
        return {"sampler": one.sampler, **_described(found)}
    except Unknown as reason:
        return _unknown(reason)


def _run(graph: Graph, node: str, model: Any) -> Any:
    """The model after a node of ours, run as in the graph."""
    kind, given = RUN[graph.prompt[node]["class_type"]], graph.prompt[node]["inputs"]
    values = {name: given[name] for name in kind.names() if name in given and name != "model"}
    for name, value in values.items():
        if is_link(value):
            raise Unknown("computed", str(value[0]), what=name)
    return kind.execute(model, **values).args[0]


# ---------------------------------------------------------------------------------------------------------------- models


def _model(asked: _Asked, loader: str) -> Any:
    """The model that this loader would return, unread. Raises `Unknown`."""
    from .. import fusion  # noqa: PLC0415 - the server starts without it
    from ..memory import BadFile  # noqa: PLC0415

    graph, is_late = asked.graph, asked.limit.is_late
    role, widget, name = _named(graph, loader)
    inputs = graph.prompt[loader]["inputs"]
    for one in (widget, "kernels", "precision", "quality"):
        if is_link(inputs.get(one)):
            raise Unknown("computed", str(inputs[one][0]), what=one)
    path = files.where(role, name) if isinstance(name, str) else None
    if path is None:
        raise Unknown("noFile", file=str(name), folder=f"models/{role.folder}")
    precision = declare.precision_of(inputs.get("quality", declare.BY_PRECISION), inputs.get("precision", "precise"))
    budget = float(graph.values.number(loader, "vram_budget", AUTO))
    if is_late:  # another file was read, and this one will be when the page asks again
        raise Unknown("later")
    user_files.apply()
    user_files.read_step_times()
    try:
        model = _unread(path, files.state(path), inputs.get("kernels", "auto"), precision, budget, role)
    except (ValueError, RuntimeError) as error:
        log.debug("no estimate for %s", name, exc_info=True)
        is_told = isinstance(error, (fusion.WrongFile, fusion.WrongInput, BadFile))  # when it runs, too
        raise Unknown("fails" if is_told else "said", sentence=files.without_folders(str(error), path)) from error
    if model is None:
        raise Unknown("whole")
    return fusion.at_quality(model, inputs.get("quality", declare.BY_PRECISION))


def _named(graph: Graph, loader: str) -> tuple[Role, str, Any]:
    """A loader's role, its widget for the file, and what that says."""
    node = graph.prompt[loader]
    kind = LOADERS[node["class_type"]]
    widget = kind.names()[0]
    return kind.ROLE, widget, node["inputs"].get(widget)


def _require_file(graph: Graph, loader: str) -> None:
    """Raises `Unknown` if the loader names a file that is not there: that comes before whatever else
    is not known."""
    role, _, name = _named(graph, loader)
    if isinstance(name, str) and files.where(role, name) is None:
        raise Unknown("noFile", file=name, folder=f"models/{role.folder}")


@lru_cache(maxsize=MOST_LOADERS)
def _unread(path: str, _state: str, kernels: Any, precision: Any, budget: float, role: Role) -> Any:
    from .. import fusion  # noqa: PLC0415
    from ..fusion.estimate.unread import unread_model  # noqa: PLC0415

    policy = fusion.policy_for_card(fusion.KernelPolicy.of(kernels, precision=precision))
    return unread_model(path, policy, budget, is_checkpoint=role is Role.CHECKPOINT)


# ---------------------------------------------------------------------------------------------------- what the page shows


def _described(found: Estimate) -> dict[str, Any]:
    """The page's answer: bytes as numbers, times in words."""
    from ..fusion.base.format import took  # noqa: PLC0415
    from ..fusion.estimate.telling import telling  # noqa: PLC0415

    fit = found.fit
    if fit is None:
        raise Unknown("said", sentence=" ".join(found.gaps))
    times = (
        {} if found.seconds is None or found.total is None else {"step": took(found.seconds), "all": took(found.total)}
    )
    return {
        "verdict": fit.verdict.name,
        "taken": fit.taken,
        "free": fit.free,
        "lacks": fit.lacks,
        "activations": fit.activations,
        "window": fit.window,
        "steps": found.work.steps,
        "source": None if found.source is None else found.source.name,
        "isMost": found.is_most,
        "auto": None if found.auto is None else found.auto.name,
        "ram": None if found.ram is None else _ram(found.ram),
        **times,
        "changes": [_change(one) for one in telling(found)],
    }


def _ram(found: RamFit) -> dict[str, int]:
    return {
        "files": found.files,
        "eachStep": found.read_each_step,
        "eachPrompt": found.read_each_prompt,
    }


def _change(one: Change) -> dict[str, Any]:
    from ..fusion.base.format import quality, took  # noqa: PLC0415

    values = [quality(one.values[0])] if one.what == "quality" else list(one.values)
    time = None if one.total is None else took(one.total)
    return {"what": one.what, "values": values, "all": time, "isMost": one.is_most}


def _unknown(reason: Unknown) -> dict[str, Any]:
    return {"sampler": reason.sampler, "unknown": reason.key, "node": reason.node, "values": reason.values}


def _checked(prompt: Any) -> dict[str, Any]:
    """The graph; raises `Refused` if it is none."""
    if not isinstance(prompt, dict) or not all(
        isinstance(node, dict) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)
        for node in prompt.values()
    ):
        raise Refused(f"This asks for {ASKS}: each node with its class_type and its inputs.")
    if len(prompt) > MOST_NODES:
        raise Refused(f"This takes {MOST_NODES} nodes at most.", 413)
    return prompt

"""How long steps have taken on this machine, by model, kernels and size; kept in a file between two
starts of ComfyUI.

The file is replaced as a whole. If two servers share it, the later one's samplings stay, and the
other's are measured again.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ...kernels_cuda.atomic_file import read_small, retrying, write_atomically
from ..base.policy import policy_on
from ..fused.quality import policy_words, rates_of_policy
from ..sparse.model import sparse_of
from ..step_cache.model import step_cache_of
from . import step_timer
from .step_timer import Sampled

FORMAT = 1
MOST_BYTES = 1 << 20

log = logging.getLogger("fusestream.estimate")


def describe(model: Any) -> tuple[str, str, str, int]:
    """Card, file and kernels of a streamed MODEL, and the bytes that its blocks hold."""
    return card_name(model.load_device), model.stream.path.name, kernels_key(model), model.stream.residency.held


def card_name(device: Any) -> str:
    device = torch.device(device)
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type.upper()


def kernels_words(model: Any) -> str:
    """The settings of the nodes after a loader that a step's time depends on, in words."""
    policy = policy_on(model)
    return _with_nodes(model, "none" if policy is None else policy_words(policy, model))


def kernels_key(model: Any) -> str:
    """The words under which times are kept. If `auto` computes as another quality does, both share
    their times."""
    policy = policy_on(model)
    if policy is not None and rates_of_policy(model, policy) == "precise":
        policy = replace(policy, precision="precise")
    return _with_nodes(model, "none" if policy is None else policy_words(policy))


def _with_nodes(model: Any, words: str) -> str:
    nodes = (sparse_of(model.model_options.get("transformer_options", {})), step_cache_of(model))
    return "; ".join((words, *(node.settings.words() for node in nodes if node is not None)))


def find(card: str, file: str, kernels: str, shape: Sequence[int], prompts: int) -> Sampled | None:
    """The newest sampling of this model here: of this size if there is one, else of another one."""
    found = [one for one in reversed(step_timer.kept()) if (one.card, one.file, one.policy) == (card, file, kernels)]
    same = (one for one in found if one.shape == tuple(shape) and one.prompts == prompts)
    return next(same, next(iter(found), None))


# ---------------------------------------------------------------------------------------------------------- the file


def read(path: Path) -> None:
    """Read what an earlier start has kept. Times that cannot be read are measured again."""
    try:
        told = json.loads(retrying(lambda: read_small(path, MOST_BYTES)).decode("utf-8"))
        found = [_checked(entry) for entry in told["samplings"]] if told["format"] == FORMAT else []
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("%s cannot be read (%s): times of steps are measured again", path.name, type(error).__name__)
        return
    for sampled in found:
        step_timer.keep(sampled)


def write(path: Path) -> None:
    """Write all kept samplings, unless the file has them already."""
    told = json.dumps({"format": FORMAT, "samplings": [asdict(one) for one in step_timer.kept()]}) + "\n"
    content = told.encode()
    try:
        if not _holds(path, content):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content, path.with_name(f"{path.name}.{os.getpid()}"))
    except OSError as error:
        _warn_once(f"times of steps are not kept: {error.strerror or type(error).__name__}")


def _holds(path: Path, content: bytes) -> bool:
    """Whether the file is this already. What is no file of ours is replaced."""
    try:
        return retrying(lambda: read_small(path, MOST_BYTES)) == content
    except PermissionError:
        raise
    except OSError:
        return False


@functools.cache
def _warn_once(sentence: str) -> None:
    log.warning("%s", sentence)


def _checked(entry: dict[str, Any]) -> Sampled:
    """The sampling; raises if the entry is not one."""
    sampled = Sampled(**{**entry, "shape": tuple(entry["shape"])})
    words, counts = (sampled.card, sampled.file, sampled.policy), (*sampled.shape, sampled.prompts, sampled.steps)
    seconds = (sampled.seconds, sampled.first, sampled.spent, sampled.held)
    if not all(isinstance(word, str) for word in words) or not all(isinstance(count, int) for count in counts):
        raise TypeError("words and counts are not what they should be")
    if not all(isinstance(figure, (int, float)) and 0 <= figure < 1e15 for figure in seconds) or sampled.prompts < 1:
        raise ValueError("a figure is out of range")
    return sampled

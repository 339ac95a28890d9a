"""A graph as it will run: where a switch is known beforehand, what it passes on stands in its place.

A switch that something decides as the graph runs stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .prompt import Prompt, Unknown, is_link
from .values import DEEP, SWITCHES, Values


def followed(prompt: Prompt, values: Values, go_on: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """The graph without the switches that are known, nor any trace of what they do not pass on."""
    taken: dict[str, str] = {}
    for name, node in prompt.items():
        go_on()
        if node.get("class_type") in SWITCHES:
            try:
                taken[name] = values.chosen(name)
            except Unknown:
                continue
    return {name: _behind(prompt, taken, name, go_on) for name in prompt if name not in taken}


def _behind(prompt: Prompt, taken: dict[str, str], node: str, go_on: Callable[[], None]) -> dict[str, Any]:
    """A node whose links come from behind the switches."""
    inputs: dict[str, Any] = {}
    for name, value in prompt[node].get("inputs", {}).items():
        go_on()
        through = _through(prompt, taken, value)
        if through is not None or value is None:
            inputs[name] = through
    return {**prompt[node], "inputs": inputs}


def _through(prompt: Prompt, taken: dict[str, str], value: Any) -> Any:
    """What comes by a link, from behind the switches on its way; None: nothing."""
    for _ in range(DEEP):
        if not is_link(value) or str(value[0]) not in taken:
            return value
        switch = str(value[0])
        value = prompt[switch]["inputs"].get(taken[switch])
    return None

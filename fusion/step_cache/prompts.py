"""Which prompts, ControlNets and hooks take part at a noise level.

Stock has ranges of noise levels for them. Where one comes or goes, what the model gives leaps, and
nothing from before foretells it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Conds = Mapping[str, Sequence[Mapping[str, Any]]]


def taking_part(conds: Conds, level: float) -> tuple[int, ...]:
    """The state of each of a guider's prompts at this noise level. Equal: the same take part."""
    return tuple(state for prompts in conds.values() for prompt in prompts for state in _states(prompt, level))


def _states(prompt: Mapping[str, Any], level: float) -> Iterator[int]:
    yield _is_within(prompt.get("timestep_start"), prompt.get("timestep_end"), level)
    control = prompt.get("control")
    while control is not None:
        start, end = control.timestep_range or (None, None)
        yield _is_within(start, end, level)
        control = control.previous_controlnet
    hooks = prompt.get("hooks")
    for hook in () if hooks is None else hooks.hooks:
        yield sum(float(frame.start_t) >= level for frame in hook.hook_keyframe.keyframes)


def _is_within(start: Any, end: Any, level: float) -> bool:
    return (start is None or level <= float(start)) and (end is None or level >= float(end))

"""Plans made of prepared launches: which tensor of a call goes into which pointer of a struct.

`plan_of` is given the pointers' names in the order of the call's tensors, and makers of what the call
returns or needs on the way. Which operands are absent is known by then, because that is part of a
call's signature: their pointers stay null, and a call does not look at them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Plan, Tensors
from .launcher import Filler, Launch

Maker = Callable[[], Tensor]
MOST_SHORT = 2  # results


def plan_of(
    launches: Launch | Sequence[Launch],
    names: str,
    tensors: Tensors,
    *,
    scratch: Mapping[str, Maker] | None = None,
    behind: Mapping[str, tuple[str, int]] | None = None,
    **results: Maker,
) -> Plan:
    """A plan that makes its results, launches all of these in turn and returns the results.

    launches  with the same pointers each, which are written once where they share a struct;
              none where there is nothing to compute
    names     pointers of the struct in the order of the call's tensors. `x=out` is both, where a
              tensor is written in place; `-` is none. There may be more than tensors, and fewer
    tensors   the call's own: the pointer of an absent one stays null
    scratch   makers of memory that is not returned, by their pointers
    behind    pointers into memory whose start another pointer has: its name, and bytes between
    results   makers of what is returned, by their pointers. A result among the operands is
              written where that lies
    """
    launches = launches if isinstance(launches, Sequence) else [launches]
    given = names.split()[: len(tensors)]
    made = [(name, maker) for name, maker in results.items() if name not in given]
    count = len(made)
    made += (scratch or {}).items()
    present = {name: i for i, name in enumerate(given) if tensors[i] is not None}
    places = {pointer: i for name, i in present.items() for pointer in name.split("=") if pointer != "-"}
    places |= {name: i for i, (name, _) in enumerate(made, len(tensors))}
    places |= {name: places[start] for name, (start, _) in (behind or {}).items()}
    moved = {name: size for name, (_, size) in (behind or {}).items()}
    fills = [launch.filler(places, moved) for launch in {id(launch.params): launch for launch in launches}.values()]
    sends = [launch.send for launch in launches]
    makers = [maker for _, maker in made]
    if len(sends) == 1 and len(makers) == count <= MOST_SHORT:
        return _short(fills[0], sends[0], *makers)

    def run(*tensors: Tensor | None) -> Any:
        made = [make() for make in makers]
        everything = (*tensors, *made)
        for fill in fills:
            fill(everything)
        for send in sends:
            send()
        return made[0] if count == 1 else tuple(made[:count]) or None

    return run


def _short(fill: Filler, send: Callable[[], None], make: Maker | None = None, make_other: Maker | None = None) -> Plan:
    """The usual plan, of one launch and at most two results, in the fewest steps."""
    if make is None:

        def into(*tensors: Tensor | None) -> None:
            fill(tensors)
            send()

        return into

    if make_other is not None:

        def run_both(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
            one, other = make(), make_other()
            fill((*tensors, one, other))
            send()
            return one, other

        return run_both

    def run(*tensors: Tensor | None) -> Tensor:
        out = make()
        fill((*tensors, out))
        send()
        return out

    return run


# ------------------------------------------------------------ fields of a struct, by operands' names


def floats(**tensors: Tensor | None) -> dict[str, bool]:
    """`x_is_float` of each operand: whether it is fp32."""
    return {f"{name}_is_float": t is not None and t.dtype is torch.float32 for name, t in tensors.items()}


def strides(dimensions: str, *, used: bool = False, **tensors: Tensor | None) -> dict[str, int]:
    """`x_batch`, `x_token` and so on: strides of each operand's first dimensions, by their names.

    dimensions  the names; `-` where a dimension has no field
    used        0 instead of the stride of a dimension of one, where torch leaves anything
    """
    return {
        f"{name}_{dimension}": stride if size > 1 or not used else 0
        for name, t in tensors.items()
        if t is not None
        for dimension, size, stride in zip(dimensions.split(), t.shape, t.stride(), strict=False)
        if dimension != "-"
    }

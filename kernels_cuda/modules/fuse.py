"""fuse and unfuse: put our modules in the places of torch's in an existing network, and put torch's
back.

A module may be computed together with the next one only if its result has no other use. For
neighbours in an nn.Sequential that is known. For others torch.fx is asked, one module's own forward
at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ..policy import STANDARD, KernelPolicy
from .chains import find, left_reason, reason_of
from .graphs import attach, detach
from .slots import (
    Beginning,
    Covered,
    FusedSequential,
    Step,
)

Named = tuple[str, nn.Module]
SEVERAL = "it stands in several places of the network"


@dataclass(frozen=True)
class Line:
    """The outcome for one module or chain. by: our module's name, or None and a reason. of: the
    kinds, first to last."""

    name: str
    of: tuple[str, ...]
    by: str | None
    reason: str | None = None


@dataclass(frozen=True)
class Table:
    """The outcome of `fuse`, in the network's order."""

    lines: tuple[Line, ...]

    @property
    def replaced(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.by is not None)

    @property
    def left(self) -> tuple[Line, ...]:
        """Modules that could be ours by their kind, and are not."""
        return tuple(line for line in self.lines if line.by is None)

    def __str__(self) -> str:
        """Text for people: each replacement in a line, and how many modules were left for which
        reason."""
        told = [f"{line.name}: {', '.join(line.of)} -> {line.by}" for line in self.replaced]
        left = Counter((", ".join(line.of), line.reason) for line in self.left)
        told += [f"left: {count} x {kind}: {reason}" for (kind, reason), count in left.items()]
        return "\n".join(told) or "nothing here is of a kind that FuseStream has"


def fuse(module: nn.Module, policy: KernelPolicy = STANDARD, *, graphs: bool = False) -> Table:
    """Replace a network's modules by ours, in place. Returns what was replaced, what was not, and
    why.

    The state dict keeps its names, and parameters stay the network's own. A module that trains, has
    hooks, is parametrised (weight norm) or stands in several places is left alone. Call it again
    after a change: modules fused already stay so.

    graphs: let the network's calls be captured as CUDA graphs if they wait for the host's launches
    (graphs.py). Only for a network whose results depend on its arguments, its tensors and its
    attributes alone.
    """
    was = detach(module)
    try:
        return _fused(module, policy)
    finally:
        if graphs or was:
            attach(module)


def _fused(module: nn.Module, policy: KernelPolicy) -> Table:
    again = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    work = _Work(policy, {one for one, count in again.items() if count > 1})
    work.inside(module, "")
    return Table(tuple(sorted(work.lines, key=_order(module))))


def unfuse(module: nn.Module) -> int:
    """Put back the modules from before `fuse`. Returns how many places were ours. No graph of the
    network stays."""
    count = 0
    detach(module)
    for name, part in list(module._modules.items()):
        if part is None:
            continue
        detach(part)
        original = part.__dict__.get("_original")
        if original is not None:
            module._modules[name] = original
            original.training = part.training
            count += 1
        count += unfuse(original or part)
    return count


def _order(module: nn.Module) -> Any:
    places = {name: place for place, (name, _) in enumerate(module.named_modules(remove_duplicate=False))}
    return lambda line: places.get(line.name, -1)


class _Work:
    """One call of `fuse`."""

    def __init__(self, policy: KernelPolicy, several: set[int]) -> None:
        self.policy, self.several = policy, several
        self.lines: list[Line] = []
        self.seen: set[int] = set()

    def inside(self, parent: nn.Module, prefix: str) -> None:
        """Fuse everything below a module."""
        if id(parent) in self.seen:
            return
        self.seen.add(id(parent))
        taken = self._chains(parent, prefix)
        for name, part in list(parent._modules.items()):
            if part is not None and name not in taken:
                self._part(parent, name, part, prefix + name)

    def _part(self, parent: nn.Module, name: str, part: nn.Module, whole: str) -> None:
        """Fuse a part that belongs to no chain of its parent."""
        if type(part).__module__.startswith(f"{__package__}."):
            return  # ours already
        if type(part) is nn.Sequential and self._reason(part) is None:
            self._sequential(parent, name, part, whole)
        elif not self._alone(parent, name, part, whole):
            self.inside(part, f"{whole}.")

    def _sequential(self, parent: nn.Module, name: str, part: nn.Sequential, whole: str) -> None:
        """Fuse neighbours within a Sequential, and everything below its other parts."""
        row = [(other, child) for other, child in part._modules.items() if child is not None]
        steps = [Step(dict(chain), fused) for chain, fused in self._matches(row, f"{whole}.")]
        covered = {other for step in steps for other in step.parts}
        for other, child in row:
            if other not in covered:
                self._part(part, other, child, f"{whole}.{other}")
        if steps:
            parent._modules[name] = FusedSequential.over(part, steps)

    def _alone(self, parent: nn.Module, name: str, part: nn.Module, whole: str) -> bool:
        """Fuse one module by itself, if ours is torch's with another forward. True: there is
        nothing to look for below it."""
        reason = self._reason(part)
        match = None if reason is not None else find([part])
        if match is not None:
            fused = match.make(self.policy)
            kind = type(fused).__name__
            # ours holds the convolution, so its parameters would get other names
            if type(part) is nn.Conv2d:
                fused = Beginning(part, [part], fused)
            fused.__dict__["_original"] = part
            parent._modules[name] = fused
            self.lines.append(Line(whole, (type(part).__name__,), kind))
            return True
        left = left_reason(part, reason)
        if left is not None:
            self.lines.append(Line(whole, (type(part).__name__,), None, left))
        return left is not None

    def _chains(self, parent: nn.Module, prefix: str) -> set[str]:
        """Fuse chains of a module's own forward. Returns the names of the parts in them."""
        taken: set[str] = set()
        for row in runs(parent, is_root=not prefix):
            for chain, fused in self._matches(row, prefix):
                (first, begins), *rest = chain
                place = Beginning(begins, [part for _, part in chain], fused)
                parent._modules[first] = place
                for name, part in rest:
                    parent._modules[name] = Covered(part, place)
                taken |= {name for name, _ in chain}
        return taken

    def _matches(self, row: list[Named], prefix: str) -> Iterator[tuple[list[Named], nn.Module]]:
        """Chains along a row of neighbours, with the modules that replace them."""
        at = 0
        while at < len(row):
            free = []
            for _, part in row[at:]:
                if self._reason(part) is not None:
                    break
                free.append(part)
            match = find(free) if free else None
            if match is None or type(free[0]) in OTHER_CALLS:
                at += 1
                continue
            chain = row[at : at + match.count]
            fused = match.make(self.policy)
            self.lines.append(
                Line(prefix + chain[0][0], tuple(type(part).__name__ for _, part in chain), type(fused).__name__)
            )
            yield chain, fused
            at += match.count

    def _reason(self, part: nn.Module) -> str | None:
        return SEVERAL if id(part) in self.several else reason_of(part)


# these take, or give, more than one tensor
OTHER_CALLS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class _Leaves(fx.Tracer):
    """Traces one module's own forward and does not look into what it calls."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002 - fx calls it so
        return True


def runs(parent: nn.Module, is_root: bool) -> list[list[Named]]:
    """Rows of a module's own parts. Each part is called once, with the result of the one before,
    which has no other use.

    is_root: whether no other module holds it; a Sequential cannot be replaced then, but its parts
    can.
    """
    if type(parent) is nn.Sequential and is_root:
        return [[(name, part) for name, part in parent._modules.items() if part is not None]]
    if type(parent).__module__.startswith("torch.nn."):
        return []
    if not parent._modules or reason_of(parent) is not None or type(parent).forward is nn.Module.forward:
        return []
    before = dict(parent.__dict__)
    try:
        graph = _Leaves().trace(parent)
    except Exception:  # a traced forward may do anything; without a trace nothing is proven
        return []
    finally:  # undoes what the forward noted on its module while it was traced
        parent.__dict__.clear()
        parent.__dict__.update(before)
    calls = [node for node in graph.nodes if node.op == "call_module"]
    often = Counter(node.target for node in calls)
    found: list[list[Named]] = []
    done: set[fx.Node] = set()
    for node in calls:
        row, now = [], node
        while _is_own(parent, now, often) and now not in done:
            done.add(now)
            row.append((str(now.target), parent._modules[str(now.target)]))
            if len(now.users) != 1:
                break
            after = next(iter(now.users))
            if after.op != "call_module" or after.args != (now,) or after.kwargs:
                break
            now = after
        if row:
            found.append(row)  # type: ignore[arg-type]
    return found


def _is_own(parent: nn.Module, node: fx.Node, often: Counter[Any]) -> bool:
    """Whether it is a part that is called once, with one input."""
    plain = node.op == "call_module" and len(node.args) == 1 and not node.kwargs
    return plain and often[node.target] == 1 and parent._modules.get(str(node.target)) is not None

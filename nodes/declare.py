"""A node's inputs, each declared once: its name, type, default, choices and tooltip.

A node has a dataclass `Inputs`. ComfyUI's schema is made of its fields, and `run` receives one of it. Workflows store the widgets
of a node by position, so fields are appended, never reordered. Inputs that several nodes have stand here, each with one type and
one set of values, and with a tooltip of each node's own.

Nothing of `fusion` but its light floor is imported before a node runs: the server starts without waiting for kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from comfy_api.latest import io

from ..fusion.base.family import Role
from ..fusion.base.format import QUALITIES
from ..fusion.base.vram_budget import AUTO, MOST
from ..fusion.families import FAMILIES
from .page import front_end

if TYPE_CHECKING:
    from ..fusion import KernelPolicy

CATEGORY = "FuseStream"
QUALITY = next(iter(QUALITIES))  # of a new loader
BY_PRECISION = (
    "by precision"  # of the quality: the input precision decides, as in workflows that are older than the quality
)

Options = Sequence[str] | Callable[[], Sequence[str]]
Settings = TypeVar("Settings")


class Node(io.ComfyNode):
    """A node of this pack."""

    Inputs: ClassVar[type]  # a dataclass with a field for each input

    @classmethod
    def names(cls) -> list[str]:
        """Of the inputs, in order."""
        return [one.name for one in fields(cls.Inputs)]

    @classmethod
    def schema(
        cls, words: str, description: str, aliases: Sequence[str], outputs: Sequence[Any], **others: Any
    ) -> io.Schema:
        """words: the node's name behind the pack's. others: what `io.Schema` takes besides."""
        return io.Schema(
            node_id="FuseStream" + words.replace(" ", ""),
            display_name=f"FuseStream {words}",
            category=CATEGORY,
            description=description,
            search_aliases=[*aliases, "fusestream"],
            inputs=[one.metadata["input"](one.name) for one in fields(cls.Inputs)],
            outputs=list(outputs),
            **others,
        )

    @classmethod
    def execute(cls, *values: Any, **named: Any) -> io.NodeOutput:
        """Called by ComfyUI, with what a workflow has."""
        front_end.hear_notices()
        return cls.run(cls.Inputs(*values, **named))

    @classmethod
    def run(cls, inputs: Any) -> io.NodeOutput:
        """inputs: of the class `Inputs`."""
        raise NotImplementedError


def declared(kind: Any, *, absent: Any = MISSING, options: Options | None = None, **told: Any) -> Any:
    """A field for an input of this type of `io`. told: what its `Input` takes besides.

    absent   the field's value for a workflow that has none, if that is not the default of a new node
    options  of a combo. A function is asked whenever ComfyUI lists the nodes
    """
    if absent is MISSING:
        absent = told.get("default", None if told.get("optional") else MISSING)

    def input(name: str) -> Any:
        if options is None:
            return kind.Input(name, **told)
        return kind.Input(name, options=list(options() if callable(options) else options), **told)

    return field(default=absent, metadata={"input": input})


def settings_of(kind: type[Settings], inputs: Any) -> Settings:
    """A dataclass whose fields are called as inputs are."""
    return kind(**{one.name: getattr(inputs, one.name) for one in fields(kind)})  # type: ignore[arg-type]


def fused(role: Role) -> str:
    """The families that have kernels, as words: Wan, Flux.2 and Qwen3."""
    names = [family.name for family in FAMILIES if family.role is role]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# -------------------------------------------------------------------------------------------------------- shared inputs


def kernels(tooltip: str, *, is_advanced: bool = False) -> Any:
    return declared(
        io.Combo,
        options=["auto", "on", "off"],
        default="auto",
        optional=True,
        advanced=is_advanced or None,
        tooltip=tooltip,
    )


def precision(tooltip: str, *, is_advanced: bool = False, has_auto: bool = False) -> Any:
    """has_auto: of a node without a quality. A workflow that has no value is older than the choice, and precise."""
    return declared(
        io.Combo,
        options=["precise", "fast", "turbo", *(["auto"] if has_auto else [])],
        default="auto" if has_auto else "precise",
        absent="precise",
        optional=True,
        advanced=is_advanced or None,
        tooltip=tooltip,
    )


def quality(tooltip: str) -> Any:
    """The first choice that a loader shows, behind the inputs that are older: a workflow that has none goes by its precision."""
    return declared(
        io.Combo,
        options=[*QUALITIES, BY_PRECISION],
        default=QUALITY,
        absent=BY_PRECISION,
        optional=True,
        tooltip=tooltip,
    )


def vram_budget(tooltip: str) -> Any:
    """GiB; 0 and AUTO have meanings of their own. The front end rounds to the step, and shows as many digits as it has."""
    return declared(
        io.Float,
        display_name="vram_budget (-1: auto)",
        default=AUTO,
        min=AUTO,
        max=MOST,
        step=0.05,
        optional=True,
        tooltip=tooltip,
    )


def theme() -> Any:
    return declared(
        io.Combo, options=["dark", "light"], default="dark", optional=True, tooltip="Colours of the picture."
    )


# ------------------------------------------------------------------------------------------------------ what they ask for


def precision_of(quality: str, precision: Any) -> Any:
    """The precision of a policy, by these two inputs."""
    return QUALITIES.get(quality, precision)


def policy_of(inputs: Any) -> KernelPolicy:
    """By the inputs `kernels`, `precision` and, where a node has it, `quality`."""
    from .. import fusion  # noqa: PLC0415 - the server starts without it

    precision = precision_of(getattr(inputs, "quality", BY_PRECISION), inputs.precision)
    return fusion.KernelPolicy.of(inputs.kernels, precision=precision)

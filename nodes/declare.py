"""A node, declared: its names, and its inputs, each with its name, type, default and tooltip once.

A node has a dataclass `Inputs`. ComfyUI's schema is made of its fields, and `run` receives an
instance. Workflows store a node's widgets by position, so fields are appended, never reordered.
Inputs that several nodes share are declared here, each with one type and one set of values, and
with tooltips given by the nodes.

Only the ground floor of `fusion` is imported, so that the server starts without kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from comfy_api.latest import io

from ..fusion.base.family import Role
from ..fusion.base.format import OF_MODELS, QUALITIES
from ..fusion.base.vram_budget import AUTO, MOST
from ..fusion.families import FAMILIES
from .page import front_end

if TYPE_CHECKING:
    from ..fusion import KernelPolicy

CATEGORY = "FuseStream"
# Its folders in the menu; ComfyUI translates the names that it has itself.
LOADERS, SAMPLING, IMAGE, REPORTS, ADVANCED = "loaders", "sampling", "image", "reports", "advanced"
QUALITY = next(iter(QUALITIES))  # of a new loader
# A quality that leaves the choice to the input precision, for workflows from before there was a
# quality.
BY_PRECISION = "by precision"
KINDS = {"bool": io.Boolean, "int": io.Int, "float": io.Float, "str": io.String}

Options = Sequence[str] | Callable[[], Sequence[str]]
Settings = TypeVar("Settings")


@dataclass(frozen=True)
class About:
    """A node's names, description and outputs.

    words           its name after the pack's
    group           its folder in the menu
    aliases         other words by which it is found
    hidden          values that ComfyUI passes in addition
    is_output_node  whether a graph may be run for it
    """

    words: str
    group: str
    description: str
    aliases: Sequence[str]
    outputs: Sequence[Any]
    hidden: Sequence[Any] = ()
    is_output_node: bool = False


class Node(io.ComfyNode):
    """A node of this pack."""

    about: ClassVar[About]
    Inputs: ClassVar[type]  # a dataclass with a field for each input

    @classmethod
    def names(cls) -> list[str]:
        """The names of the inputs, in order."""
        return [one.name for one in fields(cls.Inputs)]

    @classmethod
    def define_schema(cls) -> io.Schema:
        about = cls.about
        return io.Schema(
            node_id="FuseStream" + about.words.replace(" ", ""),
            display_name=f"FuseStream {about.words}",
            category=f"{CATEGORY}/{about.group}",
            description=about.description,
            search_aliases=[*about.aliases, "fusestream"],
            hidden=list(about.hidden),
            is_output_node=about.is_output_node,
            inputs=[one.metadata["declared"](one) for one in fields(cls.Inputs)],
            outputs=list(about.outputs),
        )

    @classmethod
    def execute(cls, *values: Any, **named: Any) -> io.NodeOutput:
        """Called by ComfyUI with a workflow's values."""
        front_end.hear_notices()
        return cls.run(cls.Inputs(*values, **named))

    @classmethod
    def run(cls, inputs: Any) -> io.NodeOutput:
        """inputs: of the class `Inputs`."""
        raise NotImplementedError


def linked(kind: Any, tooltip: str, *, optional: bool = False, **others: Any) -> Any:
    """A field for an input that takes another node's output of this type of `io`.

    others: further arguments of the type's `Input`.
    """

    def declared(one: Field[Any]) -> Any:
        return kind.Input(one.name, optional=optional, tooltip=tooltip, **others)

    return field(default=None if optional else MISSING, metadata={"declared": declared})


def widget(
    tooltip: str,
    *,
    default: Any = None,
    absent: Any = None,
    options: Options | None = None,
    between: Sequence[float] = (),
    is_required: bool = False,
    is_advanced: bool = False,
    **others: Any,
) -> Any:
    """A field for an input that the user sets on the node, of the field's type.

    default      of a new node; None: the user has to choose
    absent       the value for a workflow that has none, if it is not the default
    options      of a combo. A function is called whenever ComfyUI lists the nodes
    between      the least and the greatest number, and the step if there is one
    is_required  whether ComfyUI asks for a value although there is a default
    others       further arguments of the type's `Input`
    """
    others |= dict(zip(("min", "max", "step"), between, strict=False))
    others |= {"default": default, "tooltip": tooltip, "optional": default is not None and not is_required}
    if is_advanced:
        others["advanced"] = True

    def declared(one: Field[Any]) -> Any:
        if options is not None:
            return io.Combo.Input(one.name, options=list(options() if callable(options) else options), **others)
        return KINDS[str(one.type)].Input(one.name, **others)

    value = default if absent is None else absent
    return field(default=MISSING if value is None else value, metadata={"declared": declared})


def settings_of(kind: type[Settings], inputs: Any) -> Settings:
    """An instance of a dataclass whose fields have the names of inputs."""
    return kind(**{one.name: getattr(inputs, one.name) for one in fields(kind)})  # type: ignore[arg-type]


def fused(role: Role) -> str:
    """The families that have kernels, as words: Wan, Flux.2 and Qwen3."""
    names = [family.name for family in FAMILIES if family.role is role]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# -------------------------------------------------------------------------------------------------------- shared inputs


def kernels(tooltip: str, *, is_advanced: bool = False) -> Any:
    return widget(tooltip, default="auto", options=("auto", "on", "off"), is_advanced=is_advanced)


def precision(tooltip: str, *, is_advanced: bool = False, has_auto: bool = False) -> Any:
    """has_auto: for a node without a quality. A workflow without a value is older, and means
    precise."""
    options = ("precise", "fast", "turbo", *(["auto"] if has_auto else []))
    default = "auto" if has_auto else "precise"
    return widget(tooltip, default=default, absent="precise", options=options, is_advanced=is_advanced)


def quality(tooltip: str, *, of_models: bool = False) -> Any:
    """The choice that a loader shows first, appended after older inputs.

    A workflow without it goes by its precision. of_models: for loaders of diffusion models.
    """
    options = (*QUALITIES, *(OF_MODELS if of_models else ()), BY_PRECISION)
    return widget(tooltip, default=QUALITY, absent=BY_PRECISION, options=options)


def vram_budget(tooltip: str) -> Any:
    """An amount in GiB; 0 and AUTO have meanings of their own.

    The front end rounds to the step, and shows as many digits as the step has.
    """
    return widget(tooltip, default=AUTO, between=(AUTO, MOST, 0.05), display_name="vram_budget (-1: auto)")


def theme() -> Any:
    return widget("Colours of the picture.", default="dark", options=("dark", "light"))


# ------------------------------------------------------------------------------------------------------ what they ask for


def precision_of(quality: str, precision: Any) -> Any:
    """The precision of a policy, by these two inputs."""
    return {**QUALITIES, **OF_MODELS}.get(quality, precision)


def policy_of(inputs: Any) -> KernelPolicy:
    """The policy by the inputs `kernels`, `precision` and, if the node has it, `quality`."""
    from .. import fusion  # noqa: PLC0415 - the server starts without it

    precision = precision_of(getattr(inputs, "quality", BY_PRECISION), inputs.precision)
    return fusion.policy_for_card(fusion.KernelPolicy.of(inputs.kernels, precision=precision))

"""Whether every weight of a model came from its file. Stock only logs a missing weight, and
computes with the old content of memory: the picture is noise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ...memory import Checkpoint
from ..base.errors import NotStreamable
from ..base.file_formats import without_streaming
from ..files.completeness import odd_layers, refuse_lacking, refuse_misfits, say_leftovers
from ..stream import no_head
from ..stream.blocks import Block
from ..weights.meta_tensor import StandIn
from ..weights.storage import stored

# Weights that stock can do without, too: CLIP's logit scale and text projection, which keep their
# initial values, and the output matrix of a language model that writes nothing.
MAY_LACK = (".logit_scale", "logit_scale", "text_projection.weight", no_head.WEIGHT)


def names_of(net: nn.Module) -> Iterator[str]:
    """All names of tensors that a file can give to a network."""
    yield from (name for name, _ in net.named_parameters())
    yield from (name for name, _ in net.named_buffers())


class Missing(NamedTuple):
    """The parameters that stock found no tensor for when it loaded a file.

    path      of the file
    names     the parameters; those of a text encoder within a part of the model
    is_known  whether a sound file has every weight of such a model
    """

    path: Path
    names: Sequence[str]
    is_known: bool


def require_streamable(net: nn.Module, blocks: Sequence[Block], missing: Sequence[Missing], source: Checkpoint) -> None:
    """Raise `NotStreamable` if the weights of the blocks are no tensors of the files, and
    `WrongFile` if one lacks a weight.

    net      made of stand-ins for the files' tensors
    missing  of each file
    """
    remedy = without_streaming(*(file.path for file in source.files))
    if not blocks:
        raise NotStreamable(f"{source.label} is a model without transformer blocks. {remedy}")
    for block in blocks:
        for paged in block.paged:
            data: Any = paged.storage
            if data.extent is None:
                raise NotStreamable(
                    f"{source.label}: ComfyUI makes {paged.key} of {', '.join(sorted(data.sources))} when it loads the file, so "
                    f"that it cannot stream. {remedy}"
                )
    for one in missing:
        # A weight that no file was asked for is the last one's.
        lacking = sorted({*_named_in(net, one.names), *(_bare(net) if one is missing[-1] else ())})
        if not one.is_known:
            starts = dict(net.named_parameters())
            lacking = [name for name in lacking if name not in starts or stored(starts[name]).is_meta]
        refuse_lacking(one.path, lacking)
    refuse_misfits(source.label, odd_layers(net))


def _named_in(net: nn.Module, missing: Iterable[str]) -> Iterator[str]:
    """Full names of the parameters that stock found no tensor for. For text encoders `missing` has
    the names within a part of the model; another part may have got its own."""
    ends = tuple(f".{name}" for name in missing)
    for name, tensor in net.named_parameters():
        is_filled = isinstance(stored(tensor), StandIn)
        if f".{name}".endswith(ends) and not is_filled and not name.endswith(MAY_LACK):
            yield name


def _bare(net: nn.Module) -> Iterator[str]:
    """The tensors that have no bytes and are no stand-ins, and the weights of operations that
    stayed empty."""
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        data = stored(tensor)
        if data.is_meta and not isinstance(data, StandIn) and not name.endswith(MAY_LACK):
            yield name
    for path, module in net.named_modules():
        if hasattr(module, "factory_kwargs") and module.weight is None:
            yield f"{path}.weight"


def require_whole(path: str, names: Collection[str] | None, net: nn.Module, prefix: str = "") -> None:
    """Raise `WrongFile` if a parameter of a model that stock loaded is not among the file's
    tensors, or has another shape; warn of tensors that the model has no place for.

    names   of the file's tensors; None: no family knows the model, so a sound file's weights are
            not known
    prefix  of these names, which the network's own do not have
    """
    refuse_misfits(path, odd_layers(net))
    if names is None:
        return
    present = {name.removeprefix(prefix) for name in names}
    wanted = _wanted(net)
    # Otherwise stock translated a foreign layout, and names cannot be compared.
    if any(name in present for name in wanted):
        refuse_lacking(path, sorted(name for name in wanted if name not in present))
        say_leftovers(path, present - set(names_of(net)), names_of(net))


def encoder_from(model: nn.Module, names: Collection[str]) -> nn.Module:
    """The network in a stock text encoder model that a file's tensors are for: the one that takes
    most of them, and among equals the one that lacks fewest. names: of the tensors.

    A small network's names are also those of the first layers of a larger one, as CLIP-L's in CLIP-G.
    """
    inner = [one for part in model.modules() if isinstance(one := getattr(part, "transformer", None), nn.Module)]

    def fit(net: nn.Module) -> tuple[int, int]:
        taken = [name in names for name in _wanted(net)]
        return sum(taken), -taken.count(False)

    return max(inner, key=fit, default=model)


def _wanted(net: nn.Module) -> list[str]:
    """The parameters that a network needs from its file. The scales of quantised layers have had
    several names, and stock makes those that a file may omit."""
    return [name for name, _ in net.named_parameters() if not name.endswith(("_scale", *MAY_LACK))]

"""The kind of a style network's file, by its names and shapes: a transformer net, an AdaIN decoder,
or the VGG that goes with it.

Files of PyTorch's example have stray `running_mean` and `running_var`, which its instance norms
once kept. Some have all names below `module.`, or everything below `state_dict`. Any other unknown
name is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...base.errors import WrongFile
from .adain import ENCODER
from .transformer import Sizes

Weights = dict[str, Tensor]

WRAPPERS = ("state_dict", "model_state_dict", "params", "model")
STRAY = re.compile(r"\.(running_mean|running_var|num_batches_tracked)$")
BLOCK = re.compile(r"res(\d+)\.conv1\.conv2d\.weight")
# Convolutions of a transformer net outside of its blocks. All but the last are followed by norms.
CONVOLUTIONS = ("conv1", "conv2", "conv3", "deconv1", "deconv2", "deconv3")
KNOWN = (
    "a transformer net as PyTorch's fast_neural_style has it (conv1.conv2d.weight, in1.weight, res1.., deconv1..), or an AdaIN "
    "decoder (1.weight, 5.weight, .. 28.weight)"
)


def weights_of(found: Any, path: str) -> Weights:
    """The tensors by name, without wrappers around them and without strays."""
    for wrapper in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping) or not all(isinstance(t, Tensor) for t in found.values()):
        raise WrongFile(f"{path} holds no state dict: save `net.state_dict()`, as .pth or .safetensors")
    prefix = "module." if found and all(name.startswith("module.") for name in found) else ""
    return {name.removeprefix(prefix): t for name, t in found.items() if not STRAY.search(name)}


def is_transformer(weights: Weights) -> bool:
    return "conv1.conv2d.weight" in weights and "deconv3.conv2d.weight" in weights


def is_decoder(weights: Weights) -> bool:
    """Whether the file has an AdaIN decoder: numbered convolutions from the features' to a
    picture's."""
    return "1.weight" in weights and "28.weight" in weights and "0.weight" not in weights


def is_encoder(weights: Weights) -> bool:
    first = weights.get("0.weight")
    return first is not None and tuple(first.shape[1:]) == (3, 1, 1) and "29.weight" in weights


def transformer_sizes(weights: Weights, path: str) -> Sizes:
    """Sizes of the network; raises WrongFile if the shapes do not make one."""
    blocks = sorted(int(found[1]) for name in weights if (found := BLOCK.fullmatch(name)))
    if blocks != list(range(1, len(blocks) + 1)):
        raise WrongFile(f"{path} has residual blocks {blocks}, expected them from 1 on without a gap")
    shapes = {name: _shape(weights, f"{name}.conv2d.weight", path) for name in CONVOLUTIONS}
    inner = _shape(weights, "res1.conv1.conv2d.weight", path) if blocks else (0, 0, 3, 3)
    widths = tuple(shapes[name][0] for name in CONVOLUTIONS[:-1])
    into = (3, *widths)
    for name, channels in zip(CONVOLUTIONS, into, strict=True):
        n, c, down, across = shapes[name]
        if c != channels or down != across or not down % 2 or (name == "deconv3" and n != 3):
            raise WrongFile(
                f"{path}: {name}.conv2d.weight is {list(shapes[name])}, expected {channels} channels and odd taps"
            )
    taps = tuple(shapes[name][2] for name in CONVOLUTIONS)
    return Sizes(widths, taps, inner[2], len(blocks))  # type: ignore[arg-type]


def convolutions(weights: Weights, numbers: tuple[int, ...], path: str) -> tuple[int, ...]:
    """Output channels of the convolutions with these numbers, of a Sequential."""
    return tuple(_shape(weights, f"{number}.weight", path)[0] for number in numbers)


def encoder_part(weights: Weights) -> Weights:
    """The part of a VGG that is used; a file has more."""
    return {name: t for name, t in weights.items() if int(name.partition(".")[0]) in ENCODER}


def check(net: torch.nn.Module, weights: Weights, path: str) -> None:
    """Raise WrongFile for names and shapes that are not the network's."""
    wanted = net.state_dict()
    missing = [name for name in wanted if name not in weights]
    beyond = [name for name in weights if name not in wanted]
    if missing or beyond:
        told = [f"lacks {_some(missing)}"] * bool(missing) + [f"has {_some(beyond)}, which is no part of it"] * bool(
            beyond
        )
        raise WrongFile(f"{path} looks like {_kind(net)}, but {' and '.join(told)}")
    for name, t in wanted.items():
        if weights[name].shape != t.shape:
            raise WrongFile(f"{path}: {name} is {list(weights[name].shape)}, expected {list(t.shape)}")


def unknown(weights: Weights, path: str) -> WrongFile:
    return WrongFile(f"{path} is no style network that FuseStream knows: {KNOWN}. It has {_some(list(weights))}.")


def _shape(weights: Weights, name: str, path: str) -> tuple[int, int, int, int]:
    t = weights.get(name)
    if t is None or t.ndim != 4:
        raise WrongFile(f"{path} {'lacks ' + name if t is None else f'has {name} of shape {list(t.shape)}'}")
    return tuple(t.shape)  # type: ignore[return-value]


def _kind(net: torch.nn.Module) -> str:
    return (
        "a transformer net"
        if hasattr(net, "deconv3")
        else f"an AdaIN network of {len(net.state_dict()) // 2} convolutions"
    )


def _some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

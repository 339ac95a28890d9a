"""A style network from its file, in stock's memory management."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management as management
import comfy.utils
import torch
from torch import nn

from ....kernels_cuda import STANDARD, KernelPolicy
from ....kernels_cuda.modules import Table
from ...base.errors import WrongFile
from .. import giving_back
from . import recognise
from .adain import DECODER, ENCODER, AdaIN
from .recognise import Weights
from .transformer import TransformerNet

SUFFIXES = (".safetensors", ".pth", ".pt")
EXAMPLES = Path(__file__).resolve().parents[3] / "checkpoints" / "trained"
EXAMPLE = "style_ink_fp16.safetensors"


@dataclass(frozen=True)
class StyleModel:
    """A network, its patcher for stock, and the table of its fused layers. name: of its file,
    without folders."""

    name: str
    net: TransformerNet | AdaIN
    patcher: Any
    table: Table
    dtype: torch.dtype
    policy: KernelPolicy

    @property
    def takes_a_look(self) -> bool:
        """Whether the look is taken from a picture."""
        return isinstance(self.net, AdaIN)


def load(path: str, encoder: str | None = None, policy: KernelPolicy = STANDARD) -> StyleModel:
    """Load a style network. Raises WrongFile if the file is none, or lacks what it needs. encoder:
    for an AdaIN decoder, the file of its VGG."""
    weights = read(path)
    if recognise.is_transformer(weights):
        net: TransformerNet | AdaIN = TransformerNet(recognise.transformer_sizes(weights, path))
        fill(net, weights, path)
    elif recognise.is_decoder(weights):
        net = adain(weights, path, encoder)
    elif recognise.is_encoder(weights):
        raise WrongFile(
            f"{path} is the VGG that goes with an AdaIN decoder: choose it as encoder_name, the decoder as style_name"
        )
    else:
        raise recognise.unknown(weights, path)
    device = management.get_torch_device()
    # Sums stay within FP16's range, because each convolution is followed by a norm, or reads the
    # output of one.
    dtype = torch.float16 if management.should_use_fp16(device) else torch.float32
    # As the kernels read weights, so that no second copy is kept.
    net = net.eval().requires_grad_(False).to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    table = net.fused(policy)
    patcher = giving_back.patcher_of(net, device, management.unet_offload_device())
    return StyleModel(Path(path).name, net, patcher, table, dtype, policy)


def read(path: str) -> Weights:
    """Read weights only: no code in the file is run."""
    try:
        found = comfy.utils.load_torch_file(path, safe_load=True)
    except Exception as error:
        raise WrongFile(
            f"{path} cannot be read as weights alone ({type(error).__name__}). A .pth of a whole network runs code when it is "
            "opened: save `net.state_dict()` in its place, best as .safetensors."
        ) from error
    return recognise.weights_of(found, path)


def adain(weights: Weights, path: str, encoder: str | None) -> AdaIN:
    """The AdaIN network of a decoder and its encoder, of one width."""
    if encoder is None:
        raise WrongFile(
            f"{path} is an AdaIN decoder: choose the VGG that it was trained with (vgg_normalised) as encoder_name"
        )
    seen = read(encoder)
    if not recognise.is_encoder(seen):
        raise WrongFile(f"{encoder} is no VGG of an AdaIN network: expected 0.weight [3, 3, 1, 1] to 29.weight")
    net = AdaIN(recognise.convolutions(seen, ENCODER, encoder), recognise.convolutions(weights, DECODER, path))
    fill(net.encoder, recognise.encoder_part(seen), encoder)
    fill(net.decoder, weights, path)
    return net


def fill(net: nn.Module, weights: Weights, path: str) -> None:
    recognise.check(net, weights, path)
    net.load_state_dict(weights)

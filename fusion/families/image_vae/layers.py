"""The layers of stock's image VAEs, over our ops. Stock's modules hold their weights.

Everything is channels-last, one sample at a time. A norm and its SiLU are one pass, a block's skip
is added by its last convolution, an upsampled picture is never stored.

**What passes between norms is kept 32 times smaller than stock has it.** SDXL's VAE makes numbers
beyond fp16's range there, which is why ComfyUI computes these VAEs in bf16, and where a card has
none, in fp32. A group norm does not see how large its input is, if only eps is scaled along. So the
convolutions in front of norms make 1/32 of what they would: their weights, where their input was
normed, and their biases are multiplied by it. It is a power of two, so nothing is rounded but the
smallest weights, and what leaves the VAE is as large as ever.
"""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch
from comfy.ldm.modules.diffusionmodules.model import Downsample, Upsample
from torch import Tensor

from ....kernels_cuda import (
    attention,
    conv2d,
    fold_upsample,
    group_moments,
    group_norm_silu,
    linear,
    upsample_conv2d,
)
from ...fused.attention import for_heads
from ...vae.picture_layers import PictureLayers
from ...vae.picture_stages import QUERIES
from ...weights.operands import operands

SCALE = 2.0**-5
Weights = tuple[Tensor, Tensor | None]


class Layers(PictureLayers):
    """Stock's modules as functions of pictures [1, c, rows, width]."""

    # ----------------------------------------------------------------------------------------------------- convolutions

    def make(self, module: Any, x: Tensor, above: int = 1, below: int = 1) -> Tensor:
        """A stage's first picture, of so many zeros around the rows of x: what its resampling
        makes, or the first convolution.
        """
        if isinstance(module, Upsample):
            return self.up(module, x)
        if isinstance(module, Downsample):
            return self.down(module, x, below > 0)
        return self.first(module, x, above > 0, below > 0)

    def first(self, module: Any, x: Tensor, above: bool = True, below: bool = True) -> Tensor:
        """A 3x3 convolution of what was normed, or of pixels or latents: its result is scaled.
        above, below: whether the picture ends there, and zeros follow.
        """
        weight, bias = self._weights(module, x, SCALE, SCALE)
        return conv2d(x, weight, bias, padding=(1, 1, int(above), int(below)), policy=self.policy)

    def second(self, module: Any, x: Tensor, skip: Tensor, above: bool = True, below: bool = True) -> Tensor:
        """The same, and on top of it a block's skip."""
        weight, bias = self._weights(module, x, SCALE, SCALE)
        padding = (1, 1, int(above), int(below))
        return conv2d(x, weight, bias, padding=padding, residual=skip, policy=self.policy)

    def last(self, module: Any, x: Tensor, above: bool = True, below: bool = True) -> Tensor:
        """The convolution behind the last norm, whose result leaves."""
        weight, bias = self._weights(module, x, 1, 1)
        return conv2d(x, weight, bias, padding=(1, 1, int(above), int(below)), policy=self.policy)

    def shortcut(self, block: Any, x: Tensor) -> Tensor:
        """What a block adds to its own result."""
        if block.in_channels == block.out_channels:
            return x
        weight, bias = self._weights(block.nin_shortcut, x, 1, SCALE)
        return conv2d(x, weight, bias, policy=self.policy)

    def down(self, module: Any, x: Tensor, below: bool = True) -> Tensor:
        weight, bias = self._weights(module.conv, x, 1, SCALE)
        return conv2d(x, weight, bias, stride=2, padding=(0, 1, 0, int(below)), policy=self.policy)

    def up(self, module: Any, x: Tensor) -> Tensor:
        """[1, c, rows, width] -> [1, c, 2 rows, 2 width]; with zeros around x."""
        weight, bias = self._weights(module.conv, x, 1, SCALE)
        found = self._kept.get(module)
        if found is None:
            found = self._keep(module, (fold_upsample(weight),))
        return upsample_conv2d(x, weight, bias, folded=found[0], policy=self.policy)

    def _weights(self, module: Any, x: Tensor, scale: float, bias_scale: float) -> Weights:
        found = self._kept.get(module)
        if found is None:
            with operands(x, self.policy, module) as [own]:
                # Copies in any case: what lies there may have been brought for the time of the
                # `with`. Scaled as they are laid out.
                weight = torch.empty_like(own.matrix, memory_format=torch.channels_last)
                torch.mul(own.matrix, scale, out=weight)
                found = (weight,) if own.bias is None else (weight, own.bias * bias_scale)
            found = self._keep(module, found)
        return found[0], found[1] if len(found) > 1 else None

    # ------------------------------------------------------------------------------------------------------------ norms

    def norm(self, module: Any, x: Tensor, moments: Tensor | None = None, *, silu: bool = True) -> Tensor:
        """Stock's GroupNorm of a scaled picture, or of a part of one with the whole's moments, and
        SiLU behind it.
        """
        with operands(x, self.policy, module) as [own]:
            return group_norm_silu(
                x,
                module.num_groups,
                own.weight,
                own.bias,
                eps=module.eps * SCALE**2,
                silu=silu,
                moments=moments,
                policy=self.policy,
            )

    def moments(self, module: Any, x: Tensor) -> Tensor:
        """What that norm would need of this part of a picture."""
        return group_moments(x, module.num_groups, policy=self.policy)

    # ----------------------------------------------------------------------------------------------------------- blocks

    def block(self, module: Any, x: Tensor) -> Tensor:
        """Stock's ResnetBlock: norm, SiLU, convolution, twice, and the skip."""
        between = self.first(module.conv1, self.norm(module.norm1, x))
        seen = self.norm(module.norm2, between)
        del between
        skip = self.shortcut(module, x)
        del x
        return self.second(module.conv2, seen, skip)

    def attend(self, module: Any, x: Tensor) -> Tensor:
        """Stock's AttnBlock: one head over all pixels, between two products of pixels."""
        _, c, h, w = x.shape
        seen = self.norm(module.norm, x, silu=False).movedim(1, -1).reshape(1, h * w, c)
        with operands(x, self.policy, module.q, module.k, module.v) as parts:
            weight = torch.cat([part.matrix for part in parts]).reshape(3 * c, c)
            biases = [part.bias for part in parts if part.bias is not None]
            qkv = linear(seen, weight, torch.cat(biases) if biases else None, policy=self.policy)
        del seen, weight
        q, k, v = qkv.reshape(1, h * w, 3, 1, c).unbind(2)
        del qkv
        mixed = self._mixed(q, k, v)
        del q, k, v
        skip = x.movedim(1, -1).reshape(1, h * w, c)
        with operands(x, self.policy, module.proj_out) as [own]:
            bias = None if own.bias is None else own.bias * SCALE
            matrix = own.matrix.reshape(c, c)
            out = linear(mixed, matrix, bias, scale=SCALE, residual=skip, policy=self.policy)
        return out.reshape(1, h, w, c).movedim(-1, 1)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of [1, tokens, 1, c], without the dimension of heads. Some queries at a time:
        torch's kernel for heads this wide adds up in a tensor in fp32, and for a large picture
        takes seconds, in which nobody could interrupt.
        """
        mixed, policy = torch.empty_like(q, memory_format=torch.contiguous_format), for_heads(self.policy, q.shape[-1])
        for some, place in zip(torch.split(q, QUERIES, 1), torch.split(mixed, QUERIES, 1), strict=True):
            comfy.model_management.throw_exception_if_processing_interrupted()
            place.copy_(attention(some, k, v, policy=policy))
        return mixed.flatten(2)

    def middle(self, module: Any, x: Tensor) -> Tensor:
        return self.block(module.block_2, self.attend(module.attn_1, self.block(module.block_1, x)))

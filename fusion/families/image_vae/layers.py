"""The layers of stock's image VAEs, over our ops. Stock's modules hold their weights.

Everything is channels-last, one sample at a time. A norm and its SiLU are one pass, a block's skip
is added by its last convolution, an upsampled picture is never stored.

**Pictures between norms are kept 32 times smaller than stock has them.** In SDXL's VAE they exceed
fp16's range, so ComfyUI computes these VAEs in bf16, and in fp32 on cards without it. The output of
a group norm does not depend on the size of its input if eps is scaled along. So the convolutions
before norms make 1/32 of their output: biases are multiplied by it, and weights too if their input
was normed. It is a power of two, so only the smallest weights are rounded, and the output of the
VAE has its full size.
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
        """A stage's first picture, by a resampling or by the first convolution. above, below: rows
        of zeros around x."""
        if isinstance(module, Upsample):
            return self.up(module, x)
        if isinstance(module, Downsample):
            return self.down(module, x, below > 0)
        return self.first(module, x, above > 0, below > 0)

    def first(self, module: Any, x: Tensor, above: bool = True, below: bool = True) -> Tensor:
        """A 3x3 convolution of normed values, pixels or latents, with a scaled result. above,
        below: whether the picture ends there, so that zeros follow."""
        weight, bias = self._weights(module, x, SCALE, SCALE)
        return conv2d(x, weight, bias, padding=(1, 1, int(above), int(below)), policy=self.policy)

    def second(self, module: Any, x: Tensor, skip: Tensor, above: bool = True, below: bool = True) -> Tensor:
        """A 3x3 convolution of normed values, plus a block's skip."""
        weight, bias = self._weights(module, x, SCALE, SCALE)
        padding = (1, 1, int(above), int(below))
        return conv2d(x, weight, bias, padding=padding, residual=skip, policy=self.policy)

    def last(self, module: Any, x: Tensor, above: bool = True, below: bool = True) -> Tensor:
        """The convolution after the last norm, whose output is not scaled."""
        weight, bias = self._weights(module, x, 1, 1)
        return conv2d(x, weight, bias, padding=(1, 1, int(above), int(below)), policy=self.policy)

    def shortcut(self, block: Any, x: Tensor) -> Tensor:
        """The skip of a block, which is added to its result."""
        if block.in_channels == block.out_channels:
            return x
        weight, bias = self._weights(block.nin_shortcut, x, 1, SCALE)
        return conv2d(x, weight, bias, policy=self.policy)

    def down(self, module: Any, x: Tensor, below: bool = True) -> Tensor:
        weight, bias = self._weights(module.conv, x, 1, SCALE)
        return conv2d(x, weight, bias, stride=2, padding=(0, 1, 0, int(below)), policy=self.policy)

    def up(self, module: Any, x: Tensor) -> Tensor:
        """[1, c, rows, width] -> [1, c, 2 rows, 2 width], with zeros around x."""
        weight, bias = self._weights(module.conv, x, 1, SCALE)
        found = self._kept.get(module)
        if found is None:
            found = self._keep(module, (fold_upsample(weight),))
        return upsample_conv2d(x, weight, bias, folded=found[0], policy=self.policy)

    def _weights(self, module: Any, x: Tensor, scale: float, bias_scale: float) -> Weights:
        found = self._kept.get(module)
        if found is None:
            with operands(x, self.policy, module) as [own]:
                # Copies in any case, because the weight may only be there for the duration of the
                # `with`. Scaling and layout are one pass.
                weight = torch.empty_like(own.matrix, memory_format=torch.channels_last)
                torch.mul(own.matrix, scale, out=weight)
                found = (weight,) if own.bias is None else (weight, own.bias * bias_scale)
            found = self._keep(module, found)
        return found[0], found[1] if len(found) > 1 else None

    # ------------------------------------------------------------------------------------------------------------ norms

    def norm(self, module: Any, x: Tensor, moments: Tensor | None = None, *, silu: bool = True) -> Tensor:
        """Stock's GroupNorm of a scaled picture, or of a part of one with the moments of the whole,
        then SiLU."""
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
        """The moments of this part of a picture, for `norm`."""
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
        """Attention of [1, tokens, 1, c], without the dimension of heads. A few queries at a time,
        because torch's kernel for heads this wide sums in an fp32 tensor, and takes seconds for a
        large picture, in which the user could not interrupt."""
        mixed, policy = torch.empty_like(q, memory_format=torch.contiguous_format), for_heads(self.policy, q.shape[-1])
        for some, place in zip(torch.split(q, QUERIES, 1), torch.split(mixed, QUERIES, 1), strict=True):
            comfy.model_management.throw_exception_if_processing_interrupted()
            place.copy_(attention(some, k, v, policy=policy))
        return mixed.flatten(2)

    def middle(self, module: Any, x: Tensor) -> Tensor:
        return self.block(module.block_2, self.attend(module.attn_1, self.block(module.block_1, x)))

"""Language models that read prompts over our kernels: stock's modules (`layer.py`), run as far as
their output is read.

Stock computes them in FP32 and widens every weight at every use.

Layers whose output is not read are not computed. Flux.2 klein takes the inputs of layers 9, 18 and
27 of 36, Z-Image the output of the last but one. Stock's stack does not know that its last output
is not read, so the encoder around it says so (`TellsWhatIsRead`). In a streamed encoder those
layers are not copied either until one of them is called (`idle`).

Padding. Tokens after the end are not seen by those before them, but they see. Their output is as
much a part of the encoding as the rest (Flux.2 klein pads a prompt to 512 tokens, and its model
looks at all of them), so they are computed, unless the caller zeroes them (`zero_out_masked`:
Ovis). For padding before the prompt stock averages over masked tokens; such calls are left to
stock, where the output counts.

Pictures. A prompt with pictures has positions in three dimensions, which share the pairs of a head
as stock's table has it, and the first layers add to the stream what the vision tower saw early
(`Pictures`).

`writing.py` writes text with the same layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.sd1_clip
import comfy.text_encoders.lt
import comfy.utils
import torch
from torch import Tensor, nn

from ...kernels_cuda import STANDARD, KernelPolicy
from ..base.hooks import LAYER_KIND, READS_LAST, STREAMED
from ..base.policy import all_off, standing
from ..base.subclassing import mix
from ..graphs.calls import replayed
from ..weights.fp32_residual import Wide
from .common import HAND_BACK, FusedEmbedding
from .layer import FusedLayer, Prompt
from .layer_kind import embedding_scale, encoders, factor_of, kinds_of
from .padding import Seen, padded
from .prompt import Taps, needed, prompt_of
from .room import AsksForRoom
from .writing import Writes

OPS = (
    "norm_modulate", "rms_parts", "rms_rope_", "rms_rope_sums", "linear", "linear_", "linear_pair", "join_sums", "attention",
)  # fmt: skip


def fuse(model: nn.Module, policy: KernelPolicy = STANDARD, *, on_cpu: bool = False) -> int:
    """Let all language models in a stock text encoder model whose layers are known here compute
    through our ops, in place. Returns how many layers, 0 if all is left to stock.

    on_cpu: on the CPU too, where the ops run their references: slower than stock, for tests.
    """
    fused = 0
    dropping = list(drops_padding(model))
    for owner, net in () if all_off(policy, OPS) else encoders(model):
        mix(
            net.model,
            FusedStack,
            **standing(policy),
            **{READS_LAST: True},
            fusestream_trims=owner in dropping or bool(getattr(owner, "zero_out_masked", False)),
            fusestream_keeps_padding=owner not in dropping,
            fusestream_on_cpu=on_cpu,
        )
        if reads_as_stock(owner):
            mix(owner, TellsWhatIsRead)
        if hasattr(net, "generate"):
            mix(net, Writes)
        for layer, kind in zip(net.model.layers, kinds_of(net.model) or (), strict=True):
            mix(layer, FusedLayer, **{LAYER_KIND: kind})
            fused += 1
        table = net.model.embed_tokens
        if not table.weight.is_meta:  # a streamed encoder's table stays in the file
            scale = embedding_scale(net.model.config)
            mix(table, FusedEmbedding, **standing(policy), fusestream_scale=scale)
        mix(model, AsksForRoom)
    return fused


# ------------------------------------------------------------------------------------------------------------ what is read


def drops_padding(model: nn.Module) -> Iterator[Any]:
    """Encoders of a text encoder model whose output is cut to the tokens that are seen, from the
    last one back, before anybody reads it: LTX-2's. Of its 1024 tokens most are padding."""
    for one in model.modules():
        if isinstance(one, comfy.text_encoders.lt.LTXAVTEModel):
            yield one.gemma3_12b


def reads_as_stock(owner: Any) -> bool:
    """Whether an encoder reads the same outputs of its stack as stock's class."""
    forward = next(vars(kind)["forward"] for kind in type(owner).__mro__ if "forward" in vars(kind))
    return forward in (comfy.sd1_clip.SDClipModel.forward, TellsWhatIsRead.forward)


class TellsWhatIsRead:
    """Mixed into the class of stock's encoder around a fused stack."""

    transformer: Any
    layer: Any
    layer_idx: Any

    def forward(self, tokens: Any) -> Any:
        """Stock's forward, which reads the stack's last output or its taps, but not both."""
        told = self.transformer.model.__dict__
        told[READS_LAST] = self.layer == "last"
        try:
            return super().forward(tokens)  # type: ignore[misc]
        finally:
            told[READS_LAST] = True


def idle(model: nn.Module, device: torch.device) -> int:
    """Number of last layers that no encoding runs with the model's default taps on this device."""
    found = list(encoders(model))
    if len(found) != 1:
        return 0
    owner, stack = found[0][0], found[0][1].model
    ours = isinstance(stack, FusedStack) and (device.type != "cpu" or stack.fusestream_on_cpu)
    if not ours or not isinstance(owner, TellsWhatIsRead):
        return 0
    taps: Taps = owner.layer if isinstance(owner.layer, list) or owner.layer == "all" else owner.layer_idx
    count = len(stack.layers)
    return count - needed(count, taps, reads_last=owner.layer == "last")


# --------------------------------------------------------------------------------------------------------------- the stack


class FusedStack:
    """Mixed into the class of a fused stack, stock's `Llama2_`.

    fusestream_trims           the caller zeroes or drops masked tokens
    fusestream_keeps_padding   it wants as many tokens as it gave
    fusestream_on_cpu          also computes on the CPU, over the references
    fusestream_reads_last      the caller reads the last output
    """

    fusestream_policy: KernelPolicy
    fusestream_trims: bool
    fusestream_keeps_padding: bool
    fusestream_on_cpu: bool
    fusestream_reads_last: bool

    def forward(
        self,
        x: Tensor | None,
        attention_mask: Tensor | None = None,
        embeds: Tensor | None = None,
        num_tokens: Sequence[int] | None = None,
        intermediate_output: Taps = None,
        final_layer_norm_intermediate: bool = True,
        **others: Any,
    ) -> Any:
        """Stock's Llama2_, for embeds [batch, tokens, width] fp32 under a mask [batch, tokens].
        Returns the encoding, or None if the caller does not read it, and the taps: [batch, tokens,
        width] of one layer or [batch, taps, tokens, width] of several."""
        policy = self.fusestream_policy
        if not all_off(policy, OPS):
            found = prompt_of(self, embeds, attention_mask, intermediate_output, others)
            if isinstance(found, Prompt):
                assert embeds is not None, "or it is stock's"
                return encoded(self, found, embeds, intermediate_output, final_layer_norm_intermediate)
            like = embeds if embeds is not None else torch.as_tensor(x)
            HAND_BACK(found, like, forced=policy.default == "on", quietly=not like.is_cuda)
        return super().forward(  # type: ignore[misc]
            x,
            attention_mask=attention_mask,
            embeds=embeds,
            num_tokens=num_tokens,
            intermediate_output=intermediate_output,
            final_layer_norm_intermediate=final_layer_norm_intermediate,
            **others,
        )


def encoded(stack: Any, prompt: Prompt, x: Tensor, taps: Taps, norms_taps: bool) -> tuple[Tensor | None, Tensor | None]:
    """The result of `encode`, replayed as a graph where that pays."""

    def body(prompt: Prompt, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return encode(stack, prompt, x, taps, norms_taps)

    key = str(taps), norms_taps, stack.fusestream_reads_last
    found: tuple[Tensor | None, Tensor | None] = replayed(
        stack.layers[0], body, (replace(prompt, seen=prompt.seen.on_the_device), x), key
    )
    return found


def encode(stack: Any, prompt: Prompt, x: Tensor, taps: Taps, norms_taps: bool) -> tuple[Tensor | None, Tensor | None]:
    """Run the layers one after the other over a copy of x, as far as their output is read."""
    count, norm, seen = len(stack.layers), stack.norm, prompt.seen
    all_tokens = x.shape[1] if stack.fusestream_keeps_padding else seen.tokens
    runs = needed(count, taps, reads_last=stack.fusestream_reads_last)
    before, behind = places(count, taps)
    x = x[:, seen.first : seen.last].clone(memory_format=torch.contiguous_format)
    tapped = x.new_empty(len(x), len(before) if behind is None else 1, *x.shape[1:])
    bar: Any = comfy.utils.ProgressBar
    # The blocks of a streamed model have a progress bar already.
    progress = None if STREAMED in stack.layers[0].__dict__ else bar(runs)
    for i in range(runs):
        if i in before:
            tapped[:, before.index(i)] = x
        x, _ = stack.layers[i](x=x, attention_mask=prompt)
        if prompt.pictures is not None:
            prompt.pictures.add(x, i)
        if progress is not None:
            progress.update(1)
        if i == behind:
            tapped[:, 0] = x
    if runs == count and norm is not None:
        x = normed(prompt.wide, x, norm)
    if runs in before:
        tapped[:, before.index(runs)] = x
    found = None
    if before or behind is not None:
        found = tapped if behind is None else tapped[:, 0]
        if norms_taps and norm is not None:
            found = normed(prompt.wide, found, norm)
        found = _as_given(found, seen, all_tokens)
    return (_as_given(x, seen, all_tokens) if stack.fusestream_reads_last else None), found


def _as_given(x: Tensor, seen: Seen, tokens: int) -> Tensor:
    """x for so many tokens, those that were not computed among them."""
    return x if tokens == seen.tokens else padded(x, seen, tokens)


def places(count: int, taps: Taps) -> tuple[Sequence[int], int | None]:
    """The places where the stream is tapped: before these layers (`count`: after the last norm), or
    after one."""
    if taps is None:
        return (), None
    if isinstance(taps, str):
        return range(count + 1), None
    if isinstance(taps, list):
        return sorted({i for i in taps if 0 <= i <= count}), None
    at = taps + count if taps < 0 else taps
    return (), at if 0 <= at < count else None


def normed(wide: Wide, x: Tensor, norm: Any) -> Tensor:
    """A stream [..., tokens, width] fp32 after the last norm."""
    return wide.rms(x.flatten(0, -3), factor_of(norm, x), norm.eps, torch.float32).view(x.shape)

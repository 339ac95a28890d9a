"""Arguments shared by the layers of a language model for one prompt, or why stock computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..weights.fp32_residual import Wide
from . import common
from .common import seen
from .layer import Pictures, Prompt

# Arguments of a stack that change nothing here.
UNUSED = frozenset(("dtype", "embeds_info", "input_ids"))
OF_PICTURES = frozenset(("position_ids", "visual_pos_masks", "deepstack_embeds"))
WRITES = "past_key_values"

Taps = int | list[int] | str | None  # stock's `intermediate_output`


def prompt_of(
    stack: Any, x: Tensor | None, attention_mask: Tensor | None, taps: Taps, others: Mapping[str, Any]
) -> Prompt | str:
    """The shared arguments, or why stock must compute this call, in words a user understands."""
    asked = sorted(name for name, value in others.items() if value is not None and name not in UNUSED | OF_PICTURES)
    if WRITES in asked:
        return "it writes text, word by word, in a way that is not known here"
    if asked:
        return f"ComfyUI asks for {', '.join(asked)}, which only its own computation knows"
    if x is None:
        return "it is called with tokens, not with their embeddings"
    policy, count = stack.fusestream_policy, len(stack.layers)
    runs = needed(count, taps, reads_last=stack.fusestream_reads_last)
    reason = common.obstacle(stack.layers, x, attention_mask, policy, on_cpu=stack.fusestream_on_cpu, runs=runs)
    if reason is not None:
        return reason
    # A single token sees itself, masked or not, because the prompt is empty then.
    found = seen(x, attention_mask if x.shape[1] > 1 else None, trims=stack.fusestream_trims)
    if found.visible is not None and not stack.fusestream_trims and not bool(found.visible[:, :1].all()):
        return "a prompt begins with padding"
    turns = table_of(stack, others.get("position_ids"), x, found.tokens)
    pictures = pictures_of(x, others.get("visual_pos_masks"), others.get("deepstack_embeds"))
    if isinstance(turns, str):
        return turns
    if isinstance(pictures, str):
        return pictures
    twice = None if found.lengths is None or len(x) > 1 else found.lengths.repeat(2)
    return Prompt(Wide(policy), found, twice, *turns, pictures)


def table_of(stack: Any, positions: Tensor | None, x: Tensor, tokens: int) -> tuple[Tensor, Tensor] | str:
    """Cosines and sines of the first so many tokens, [1 or batch, 1, tokens, head / 2] fp32 each,
    or a reason why not.

    positions: of all tokens, [1 or batch, tokens], or in three dimensions [1 or 3, tokens]; None:
    0, 1, ..
    """
    if positions is None:
        positions = torch.arange(tokens, device=x.device)[None]
    rows = (3,) if stack.config.rope_dims else (len(x),)
    if positions.ndim != 2 or positions.shape[0] not in (1, *rows) or positions.shape[1] < tokens:
        return f"the positions {list(positions.shape)} are not those of {list(x.shape[:2])} tokens"
    cos, sin, _ = stack.compute_freqs_cis(positions[:, :tokens], x.device)
    half = sin.shape[-1]
    return cos[..., :half].view(-1, 1, tokens, half), sin.view(-1, 1, tokens, half)


def pictures_of(x: Tensor, marks: Tensor | None, seen: Sequence[Tensor] | None) -> Pictures | str | None:
    """The features of a prompt's pictures, or why that is left to stock. marks: [1, tokens] bool,
    true where a token stands for a picture."""
    if marks is None or not seen:
        return None
    if len(x) > 1 or marks.shape != x.shape[:2]:
        return "several prompts at once have pictures"
    return Pictures(marks[0].nonzero()[:, 0], seen)


def needed(count: int, taps: Taps, *, reads_last: bool) -> int:
    """How many of so many layers have to run. A list of taps means the input of layer i, a single
    number the output of layer i."""
    if reads_last or taps is None or isinstance(taps, str):
        return count
    if isinstance(taps, list):
        return max((i for i in taps if 0 <= i <= count), default=0)
    at = taps + count if taps < 0 else taps
    return at + 1 if 0 <= at < count else count

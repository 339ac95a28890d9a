"""Arguments shared by the layers of a language model for one prompt, or why stock computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..weights.fp32_residual import Wide
from . import common
from .layer import CHUNK, Pictures, Prompt, Table
from .layer_kind import kind_of
from .padding import Seen, seen

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
    mask = attention_mask if x.shape[1] > 1 else None
    found = seen(x, mask, trims=stack.fusestream_trims, is_causal=True)
    if (reason := _too_long(stack, found)) is not None:
        return reason
    tables = tables_of(stack, others.get("position_ids"), x, found)
    pictures = pictures_of(x, others.get("visual_pos_masks"), others.get("deepstack_embeds"), found)
    if isinstance(tables, str):
        return tables
    if isinstance(pictures, str):
        return pictures
    twice = None if found.lengths is None or len(x) > 1 else found.lengths.repeat(2)
    return Prompt(Wide(policy), found, twice, tables, pictures)


def _too_long(stack: Any, found: Seen) -> str | None:
    """Why stock must compute a prompt of this length, in words a user understands."""
    if found.blind is not None and found.tokens > CHUNK:
        return f"a prompt of more than {CHUNK} tokens begins with padding"
    windows = [one for layer in stack.layers if (one := kind_of(layer).window) is not None]
    if found.visible is None or stack.fusestream_trims or not windows or found.tokens <= min(windows):
        return None
    counts = found.visible.cumsum(1)
    within = counts.clone()
    within[:, min(windows) :] -= counts[:, : -min(windows)]
    return "a prompt has more padding than its layers look back" if bool(((within == 0) & (counts > 0)).any()) else None


def tables_of(stack: Any, positions: Tensor | None, x: Tensor, found: Seen) -> tuple[Table, ...] | str:
    """Cosines and sines of the computed tokens, [1 or batch, 1, tokens, head / 2] fp32 each, for
    each of the stack's tables of angles, or a reason why not.

    positions: of all tokens, [1 or batch, tokens], or in three dimensions [1 or 3, tokens]; None:
    0, 1, ..
    """
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)[None]
    rows = (3,) if stack.config.rope_dims else (len(x),)
    if positions.ndim != 2 or positions.shape[0] not in (1, *rows) or positions.shape[1] < found.last:
        return f"the positions {list(positions.shape)} are not those of {list(x.shape[:2])} tokens"
    return angles(stack, positions[:, found.first : found.last], x.device)


def angles(stack: Any, positions: Tensor, device: torch.device) -> tuple[Table, ...]:
    """The same of any positions."""
    made = stack.compute_freqs_cis(positions, device)
    tokens = positions.shape[1]
    found = []
    for cos, sin, _ in made if isinstance(made, list) else [made]:
        half = sin.shape[-1]
        found.append((cos[..., :half].view(-1, 1, tokens, half), sin.view(-1, 1, tokens, half)))
    return tuple(found)


def pictures_of(
    x: Tensor, marks: Tensor | None, features: Sequence[Tensor] | None, found: Seen
) -> Pictures | str | None:
    """The features of a prompt's pictures, or why that is left to stock. marks: [1, tokens] bool,
    true where a token stands for a picture."""
    if marks is None or not features:
        return None
    if len(x) > 1 or marks.shape != x.shape[:2]:
        return "several prompts at once have pictures"
    return Pictures(marks[0].nonzero()[:, 0] - found.first, features)


def needed(count: int, taps: Taps, *, reads_last: bool) -> int:
    """How many of so many layers have to run. A list of taps means the input of layer i, a single
    number the output of layer i."""
    if reads_last or taps is None or isinstance(taps, str):
        return count
    if isinstance(taps, list):
        return max((i for i in taps if 0 <= i <= count), default=0)
    at = taps + count if taps < 0 else taps
    return at + 1 if 0 <= at < count else count

"""Which tokens of a padded prompt a text encoder computes, and which of them are seen.

Tokens behind the end do not matter to those before them, but they see, and their output is as much
a part of the encoding as the rest (Flux.2 klein pads a prompt to 512 tokens, and its model looks at
all of them). So they are computed, unless the caller drops or zeroes them (`trims`: Ovis, LTX-2).

Padding before a prompt (Flux.2 dev, LTX-2) sees no token in a causal stack. To stock a key that is
masked and one that comes later are equally impossible, and a score is lost beside either; so such a
token gets the mean of the values of the padding up to itself and of all tokens that may be seen.
Here its query is zero (`blind`), and the mask has those keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..weights.fp32_residual import TILE


@dataclass(frozen=True)
class Seen:
    """Which tokens of a call are computed, and which of them are seen.

    tokens   how many are computed
    first    the first of them
    visible  [batch, tokens] bool, on the CPU; None: all are
    lengths  [batch] int32: the number of keys that are seen. None: all are, or `mask` says it
    mask     [batch, 1, 1 or tokens, tokens] bool, where the visible keys do not come first. One for
             each query leaves nothing to be said about the order of tokens
    blind    [batch, tokens, 1, 1] bool: queries that see no key; None: there are none
    """

    tokens: int
    first: int = 0
    visible: Tensor | None = None
    lengths: Tensor | None = None
    mask: Tensor | None = None
    blind: Tensor | None = None

    @property
    def on_the_device(self) -> Seen:
        """The part that blocks read: without `visible`, which is on the CPU."""
        return replace(self, visible=None)

    @property
    def last(self) -> int:
        """The token behind those that are computed."""
        return self.first + self.tokens


def seen(x: Tensor, attention_mask: Tensor | None, *, trims: bool, is_causal: bool = False) -> Seen:
    """Which tokens of x [batch, tokens, width] are computed and seen under a mask [batch, tokens].

    trims      the caller does not read masked tokens, so those after the last visible one need not
               be computed; nor, in a causal stack, those before the first
    is_causal  whether a token sees those up to itself only
    """
    tokens = x.shape[1]
    if attention_mask is None:
        return Seen(tokens)
    # The comparison is stock's. `cpu()` waits for nothing, because the device has no work yet.
    visible = (attention_mask == 1).cpu()
    first, last = _ends(visible, is_causal=is_causal) if trims and visible.numel() else (0, tokens)
    visible = visible[:, first:last]
    found = Seen(last - first, first, visible)
    if bool(visible.all()):
        return found
    counts, places = visible.sum(1), torch.arange(found.tokens)
    blind = visible.cumsum(1) == 0
    if is_causal and not trims and bool(blind.any()):
        before, keys = places <= places[:, None], visible[:, None]
        pairs = torch.where(blind[..., None], before | keys, before & keys)
        return replace(found, mask=pairs.to(x.device)[:, None], blind=blind.to(x.device)[..., None, None])
    if torch.equal(visible, places < counts[:, None]):
        return replace(found, lengths=counts.to(x.device, torch.int32))
    return replace(found, mask=visible.to(x.device)[:, None, None])


def _ends(visible: Tensor, *, is_causal: bool) -> tuple[int, int]:
    """The first computed token and the one behind the last, in multiples of a tile, such that all
    visible ones are among them."""
    tokens = visible.shape[1]
    at = visible.any(0).nonzero()[:, 0]
    first, last = (int(at[0]), int(at[-1]) + 1) if at.numel() else (0, 1)
    if not is_causal:
        return 0, min(tokens, _tiled(last))
    first = max(0, last - _tiled(last - first))
    return first, min(tokens, first + _tiled(last - first))


def _tiled(tokens: int) -> int:
    return -(-tokens // TILE) * TILE


def padded(x: Tensor, seen: Seen, tokens: int) -> Tensor:
    """x [..., computed, width] with zeros for those of so many tokens that were not computed."""
    if x.shape[-2] == tokens:
        return x
    return nn.functional.pad(x, (0, 0, seen.first, tokens - seen.last))

"""The memory that ComfyUI has to keep free for a language model that reads or writes.

ComfyUI keeps the same amount for any computation, and does not foresee the keys and values of a
text. They would lie in what it keeps for the desktop, or weights would have to leave for them at
each text, which takes half a second. Nor does it foresee what reading a long prompt or a picture
takes: a third of a GiB for a picture of 768x768, which two networks take one after the other in
pieces of different sizes. Of LTX-2's encoder it foresees 2 to 4 GB, for padding that is not
computed here; the diffusion model would leave the card for it at each prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import comfy.model_management
import torch

from ..weights.fp32_residual import CHUNK_ROWS
from .cache import AT_FIRST, kept_bytes, rounded
from .encoder.block import PATCHES
from .encoder.described import described
from .layer_kind import encoders

PIXELS = 28 * 28  # pixels of a picture for each of its tokens, at the least
OF_A_TOKEN = 4
# Bytes of the feed-forward for each of a token's hidden values: two parts of two sums in fp32, two
# parts of what follows in fp16. The rest, a sixth, is for everything else of a token.
READ = 24
SEEN = 16  # the same for a patch in a vision tower with one sum; with two it is READ
# Bytes of a patch for each number of its width, throughout: the stream in fp32; queries, keys and
# values in fp16.
STREAM = 12
# Bytes of a token for each number of each layer that is read: as it is, and what its reader makes of
# it in half the bits.
TAPPED = 10


# Prompts by the name of their encoder, or those of a model that is one encoder (Gemma 3 12B).
Tokens = Mapping[str, Any] | Sequence[Any]


class AsksForRoom:
    """Mixed into the class of stock's text encoder model."""

    def memory_estimation_function(self, token_weight_pairs: Tokens, device: torch.device | None = None) -> float:
        """Bytes for these tokens as a tokenizer gives them. ComfyUI adds what it reserves for the
        desktop."""
        pairs = list(encoders(self))  # type: ignore[arg-type]
        drops = not any(net.model.fusestream_keeps_padding for _, net in pairs)
        stocks = None if drops else getattr(super(), "memory_estimation_function", None)
        known: float = 0 if stocks is None else stocks(token_weight_pairs, device=device)
        if device is None or device.type == "cpu":
            return known
        management: Any = comfy.model_management
        computing: float = management.minimum_inference_memory() - management.extra_reserved_memory()
        longest = max(lengths(token_weight_pairs), default=0) - (_padding(token_weight_pairs) if drops else 0)
        seen = OF_A_TOKEN * max(lengths(token_weight_pairs, _seen), default=0)
        return max(known, computing + max(_beside(owner, net, longest, seen) for owner, net in pairs))


def _beside(owner: Any, net: Any, tokens: int, patches: int) -> int:
    """Bytes that a prompt of so many tokens, with so many patches in its pictures, takes in
    addition to a network's weights."""
    stack: Any = net.model
    read: int = READ * stack.config.intermediate_size * min(tokens, CHUNK_ROWS)
    layers = {"all": len(stack.layers) + 1}.get(owner.layer, 0) if isinstance(owner.layer, str) else len(owner.layer)
    tapped: int = TAPPED * layers * tokens * stack.config.hidden_size
    seen = _in_tower(net, patches) if patches else 0
    kept = kept_bytes(stack, rounded(tokens + AT_FIRST)) if hasattr(net, "generate") else 0
    return kept + read + tapped + seen


def _in_tower(net: Any, patches: int) -> int:
    """Bytes that so many patches take in a network's vision tower. SigLIP gets each picture in as
    many patches as it has places."""
    blocks: Any = getattr(getattr(net, "visual", None), "blocks", ())
    if hasattr(net, "vision_model"):
        blocks = net.vision_model.encoder.layers
        patches = net.vision_model.embeddings.position_embedding.weight.shape[0]
    if not blocks:
        return 0
    block = described(blocks[0])
    of_hidden = READ if len(block.inner) > 1 else SEEN
    hidden: int = of_hidden * block.inner[0].out_features * min(patches, PATCHES)
    stream: int = STREAM * block.outer.out_features * patches
    return hidden + stream


def _prompts(tokens: Tokens) -> Iterator[Sequence[Any]]:
    return itertools.chain.from_iterable(tokens.values() if isinstance(tokens, Mapping) else (tokens,))


def _padding(tokens: Tokens) -> int:
    """Tokens before the prompts that are padding in all of them."""
    return min((sum(1 for _ in itertools.takewhile(_is_padding, prompt)) for prompt in _prompts(tokens)), default=0)


def _is_padding(entry: Sequence[Any]) -> bool:
    """As LTX-2's encoder has it."""
    return not isinstance(entry[0], (Mapping, torch.Tensor)) and entry[0] == 0


def lengths(tokens: Tokens, of: Callable[[Sequence[Any]], int] | None = None) -> Iterator[int]:
    """The length of each prompt. of: what an entry counts; by default its tokens."""
    for prompt in _prompts(tokens):
        yield sum((of or _places)(entry) for entry in prompt)


def _seen(entry: Sequence[Any]) -> int:
    """Tokens of a picture; 0 for other entries."""
    return _places(entry) if isinstance(entry[0], Mapping) and entry[0].get("type") == "image" else 0


def _places(entry: Sequence[Any]) -> int:
    """Tokens of an entry: a token, an embedding of several, or a picture."""
    token = entry[0]
    is_named = isinstance(token, Mapping)
    data = token.get("data") if is_named else token
    if not isinstance(data, torch.Tensor):
        return 1
    if is_named and token.get("type") == "image":
        return -(-data.shape[-3] * data.shape[-2] // PIXELS) * max(1, data.shape[0])
    return data.shape[:-1].numel()

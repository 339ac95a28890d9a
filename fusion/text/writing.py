"""Text, written token by token by a language model whose layers are ours: stock's `generate`, with
the same arguments.

    prompt     all layers, one after the other, in chunks of tokens; keys and values are kept
               (`cache.py`)
    a token    all layers of one row (`layer.Next`), the output matrix, and the choice
               (`sampler.py`); its number crosses to the host, which is the only wait

Between two tokens the device needs nothing from the host: the token's row of the embedding is taken
on the device, and its place is counted there. So where a token is replayed, the device starts the
next one before the host has read the number of this one, and never waits for the host. One unwanted
token may follow the last one of a text; its keys and values are never read. An embedding that stays
in the file is read by the host, which needs the number first.

A token's way through the layers, and the output matrix if that stays in its place, is one CUDA
graph if the card would wait for the host (`graphs/calls.py`). The graph reads and writes keys and
values at their addresses, so it is captured anew when they move, and dropped with the text. The
first tokens are launched kernel by kernel, because many texts end there.

Stock widens weights to bf16 or FP32 at each use, once for each token. The written text is the same
where the arithmetic is: greedy text equals that of stock in FP32. Calls that are not ours are left
to stock's `generate`, and the ledger has the reason.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import comfy.model_management
import comfy.utils
import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from ...kernels_cuda import rms_parts
from ..base.policy import all_off
from ..graphs.calls import let_go, replayed, stays
from ..stream.block_hooks import generation_of
from ..stream.no_head import NoHead
from ..stream.text_encoding import begin_writing, words_held
from ..weights.few_rows import few_products, read_in_place
from ..weights.fp32_residual import Wide
from ..weights.storage import storage_of
from . import token_rate
from .cache import Cache
from .common import HAND_BACK
from .layer import Next, Prompt
from .layer_kind import embedding_scale, factor_of
from .number import Number
from .prompt import angles, prompt_of
from .sampler import Sampler, Wish
from .token_rate import Pace

OPS = (
    "attention",
    "decode_attention",
    "few_rows",
    "join_sums",
    "linear",
    "rms_parts",
    "rms_rope_keep",
    "rms_rope_sums",
)
# Number of first tokens that are launched kernel by kernel, because a capture takes as long as
# several tokens.
EARLY = 4
# Number of tokens after which the weights that a text does not use give their room to those that it
# does, where a model streams.
LONG = 32


class Writes:
    """Mixed into the class of a network that can write, around a fused stack."""

    model: Any

    def generate(
        self,
        embeds: Tensor | None = None,
        do_sample: bool = True,
        max_length: int = 256,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 0.9,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = 42,
        stop_tokens: Sequence[int] | None = None,
        initial_tokens: Sequence[int] = (),
        execution_dtype: torch.dtype | None = None,
        min_tokens: int = 0,
        presence_penalty: float | None = 0.0,
        **others: Any,
    ) -> list[int]:
        """Stock's generate, for embeds [1, tokens, width]: the tokens that follow, up to and with
        one that ends the text."""
        wish = Wish(do_sample, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, seed)
        stack, policy = self.model, self.model.fusestream_policy
        if not all_off(policy, OPS) and embeds is not None:
            x = embeds if embeds.ndim == 3 else embeds[None]
            found = _prompt_of(self, x, execution_dtype, others)
            if isinstance(found, Prompt):
                stops = stack.config.stop_tokens if stop_tokens is None else stop_tokens
                positions = others.get("position_ids")
                first = x.shape[1] if positions is None else int(positions[:, -1].max()) + 1
                text = Text(self, found, x.float(), max_length, first)
                sampler = Sampler(self, wish, stack.config.vocab_size, initial_tokens, x.device)
                with contextlib.closing(text):
                    return written(text, sampler, max_length, stops)
            HAND_BACK(found, x, forced=policy.default == "on", quietly=not x.is_cuda)
        tokens: list[int] = super().generate(  # type: ignore[misc]
            embeds,
            do_sample,
            max_length,
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            seed,
            stop_tokens=stop_tokens,
            initial_tokens=list(initial_tokens),
            execution_dtype=execution_dtype,
            min_tokens=min_tokens,
            presence_penalty=presence_penalty,
            **others,
        )
        return tokens


def _prompt_of(network: Any, x: Tensor, dtype: torch.dtype | None, others: Mapping[str, Any]) -> Prompt | str:
    """The layers' arguments for the prompt, or why stock must write, in words a user
    understands."""
    if len(x) > 1:
        return "several texts are written at once"
    if dtype is not None:
        return f"the text is wanted in {str(dtype).removeprefix('torch.')}"
    if network.model.norm is None:
        return "its last norm is not in the file"
    found: Prompt | str = prompt_of(network.model, x.float(), None, None, others)
    return found


def written(text: Text, sampler: Sampler, most: int, stops: Sequence[int]) -> list[int]:
    """The tokens up to and with one of `stops`, `most` at most."""
    bar: Any = comfy.utils.ProgressBar(most)
    tokens: list[int] = []
    times = [time.monotonic()]
    for _ in tqdm(range(most), desc="Generating tokens"):
        comfy.model_management.throw_exception_if_processing_interrupted()
        tokens.append(text.next(sampler))
        times.append(time.monotonic())
        bar.update(1)
        if tokens[-1] in stops:
            break
    if tokens:
        token_rate.tell(Pace(len(tokens), times[1] - times[0], times[-1] - times[1], *text.bound(len(tokens))))
    return tokens


class _Ahead(NamedTuple):
    """The outcome of a token that was started early: `Text._pass`, and the generation of the
    weights."""

    found: tuple[Tensor, bool]
    generation: Hashable


class Text:
    """A text that is being written."""

    def __init__(self, network: Any, prompt: Prompt, x: Tensor, most: int, position: int) -> None:
        """x: the prompt's embeddings [1, tokens, width] fp32. most: tokens to write. position: of
        the first of them."""
        self._network, self._stack, self._prompt = network, network.model, prompt
        self._x = x
        self._count, self._most, self._position = x.shape[1], x.shape[1] + most, position
        self._number, self._wanted = Number(x.device), most
        self._ahead: _Ahead | None = None
        self._cache: Cache | None = None
        self._next: Next | None = None
        self._written = 0
        # Whether the output matrix is read as it is stored; None: not looked at yet.
        self._words_in_place: bool | None = None
        head: Any = getattr(self._stack, "lm_head", None)
        self._head: Any = self._stack.embed_tokens if head is None else head
        if isinstance(head, NoHead):
            head()  # raises, and says what the file lacks

    def next(self, sampler: Sampler) -> int:
        """One more token."""
        x, are_logits = self._passed()
        with words_held(self._network):
            token = sampler(x if are_logits else self._logits(x))
            row = self._row(token)
        self._number.send(token)
        self._written += 1
        if row is not None:
            self._x = row
            if self._goes_on():
                self._ahead = _Ahead(self._pass(), generation_of(self._stack.layers[0]))
        found = self._number.read()  # the only wait of the host
        if row is None:
            self._x = self._embedded(found)
        return found

    def _passed(self) -> tuple[Tensor, bool]:
        """The layers' output for the next token, as `_pass` returns it: from the prompt, or the
        last token."""
        if self._cache is None:
            begin_writing(self._network, self._stack.layers)
            self._cache = Cache(self._stack, self._count, self._most, self._x.device)
            x = self._read()
            self._look_ahead()
            return x, False
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead.generation == generation_of(self._stack.layers[0]):
                return ahead.found
            self._again()  # the weights changed
        if self._written == LONG:
            begin_writing(self._network, self._stack.layers, at_last=True)
        if self._count == self._cache.places:
            self._let_go()
            self._cache.grow()
            self._look_ahead()
        return self._pass()

    def _goes_on(self) -> bool:
        """Whether the next token may start before the host knows this one: if it is replayed, and
        if the cache need not grow and no weights need to be arranged first."""
        assert self._cache is not None
        is_due = self._written == LONG or self._count == self._cache.places
        return EARLY < self._written < self._wanted and not is_due and stays(self._stack.layers[0])

    def _again(self) -> None:
        """Let the last token pass once more, to the same place."""
        assert self._next is not None
        self._next.at.sub_(1)
        self._count -= 1

    def close(self) -> None:
        """Drop the graphs: no token follows."""
        self._let_go()

    def bound(self, written: int) -> tuple[int, float | None]:
        """Mean bytes that a token reads in a text of so many, and the card's bytes a second."""
        kept = 0 if self._cache is None else self._cache.nbytes(self._count - written // 2)
        return token_rate.weight_bytes((*self._stack.layers, self._head)) + kept, token_rate.memory_of(self._x.device)

    def _read(self) -> Tensor:
        """Run the prompt through all layers: the output for its last token, [1, 1, width]."""
        prompt, cache = self._prompt, self._cache
        assert cache is not None, "there is room"
        x = self._x.clone(memory_format=torch.contiguous_format)
        for i, layer in enumerate(self._stack.layers):
            x, _ = layer(x=x, attention_mask=prompt, past_key_value=cache.of(i))
            if prompt.pictures is not None:
                prompt.pictures.add(x, i)
        return x[:, -1:].contiguous()

    def _pass(self) -> tuple[Tensor, bool]:
        """Run the last token through all layers: its output [1, 1, width], or its logits, and
        whether it is the logits."""
        assert self._next is not None, "the prompt was read"
        if self._written < EARLY:
            x, with_words = self._through(self._x, with_words=False), False
        else:
            with_words, first = self._words_stay(), self._stack.layers[0]
            body, key = partial(self._through, with_words=with_words), ("a token", with_words, self._prompt.wide)
            x = replayed(first, body, (self._x,), key, memory=self._next)
        # Only now, because a capture may run a token twice, and each run belongs to the same place.
        self._next.at.add_(1)
        self._count += 1
        return x, with_words

    def _through(self, x: Tensor, *, with_words: bool) -> Tensor:
        """A token through all layers, and the output matrix if asked. Writes only its keys and
        values."""
        assert self._cache is not None
        for i, layer in enumerate(self._stack.layers):
            x, _ = layer(x=x, attention_mask=self._next, past_key_value=self._cache.of(i))
        if not with_words:
            return x
        with words_held(self._network):
            return self._logits(x)

    def _words_stay(self) -> bool:
        """Whether a graph may hold the product with the output matrix. A streamed matrix would be
        copied twice for a token, because its row is read too; and of a matrix that is not read as
        it is stored the graph would hold a copy."""
        if not stays(self._stack.layers[0]):
            return False
        if self._words_in_place is None:
            with words_held(self._network):
                self._words_in_place = read_in_place(self._head, self._x, self._prompt.wide.ops)
        return self._words_in_place

    def _let_go(self) -> None:
        """Drop the graphs, because they use keys and values that are about to move."""
        if self._next is not None:
            let_go(self._stack.layers[0], self._next)

    def _look_ahead(self) -> None:
        """Put the angles of all places in the cache and the next token's place on the device."""
        assert self._cache is not None
        prompt, places, device = self._prompt, self._cache.places, self._x.device
        read = prompt.seen.tokens
        ahead = torch.arange(self._position, self._position + places - read, device=device)[None]
        tables = tuple(
            (_lengthened(cos, more_cos), _lengthened(sin, more_sin))
            for (cos, sin), (more_cos, more_sin) in zip(prompt.tables, angles(self._stack, ahead, device), strict=True)
        )
        place = torch.tensor([self._count], dtype=torch.int32, device=device)
        self._next = Next(prompt.wide, tables, place)

    def _logits(self, x: Tensor) -> Tensor:
        """Logits [1, words] fp32 from a layer output [1, 1, width]."""
        wide: Wide = self._prompt.wide
        norm = self._stack.norm
        h = rms_parts(x, factor_of(norm, x), eps=norm.eps, policy=wide.ops)
        [logits] = few_products(h, (self._head,), wide.ops, joined=True)
        return logits[:, -1]

    def _row(self, token: Tensor) -> Tensor | None:
        """A token's embedding [1, 1, width] fp32, if the table is on its device; None: the host has
        to look it up."""
        table: Any = self._stack.embed_tokens
        weight = table._parameters["weight"]
        if table.weight_function or weight.device != token.device:
            return None
        rows = storage_of(weight).rows(token.view(-1))
        return None if rows is None else rows.float()[None] * embedding_scale(self._stack.config)

    def _embedded(self, token: int) -> Tensor:
        found: Tensor = self._stack.embed_tokens(torch.tensor([[token]]), out_dtype=torch.float32)
        return found.to(self._x.device, torch.float32)


def _lengthened(read: Tensor, ahead: Tensor) -> Tensor:
    """A prompt's table [1, 1, tokens, d / 2] and that of places ahead as one [places, d / 2]."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in (read, ahead)])

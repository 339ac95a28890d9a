"""The work of a call of a network, whatever computes it, and its time. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...fusion.base.cost import Cost


@dataclass(frozen=True)
class Linear:
    """Products of one shape: so many rows, multiplied by [into, out] so many times. after: the pass
    over memory that makes what they read, if it is one that can be done while that is rounded."""

    rows: int
    into: int
    out: int
    times: float = 1.0
    after: str = ""

    @property
    def operations(self) -> float:
        return 2.0 * self.times * self.rows * self.into * self.out


@dataclass(frozen=True)
class Load:
    """One call, for one prompt.

    products, convolutions  operations; convolutions are those that look at more than one pixel
    in_halves               of the products, those that *turbo* leaves in FP16
    own, to_prompt          operations of attention by the size of heads: of tokens among themselves, and with a prompt's
    passes                  elements by the name of a pass over memory: `passes.py`
    weights                 bytes of the weights that stream, in FP16
    held                    bytes of activations beside them
    linears                 nearly all of the products, by shape, for whoever chooses by shape; of U-Nets and language models none
    tokens                  that look at each other
    """

    products: float = 0.0
    convolutions: float = 0.0
    in_halves: float = 0.0
    own: Mapping[int, float] = field(default_factory=dict)
    to_prompt: Mapping[int, float] = field(default_factory=dict)
    passes: Mapping[str, float] = field(default_factory=dict)
    weights: float = 0.0
    held: float = 0.0
    linears: tuple[Linear, ...] = ()
    tokens: int = 0

    @property
    def cost(self) -> Cost:
        attention = sum(self.own.values()) + sum(self.to_prompt.values())
        return Cost(self.products + self.convolutions, attention, self.weights)

    def __add__(self, other: Load) -> Load:
        """One after the other."""
        return Load(
            self.products + other.products,
            self.convolutions + other.convolutions,
            self.in_halves + other.in_halves,
            Counter(self.own) + Counter(other.own),
            Counter(self.to_prompt) + Counter(other.to_prompt),
            Counter(self.passes) + Counter(other.passes),
            self.weights + other.weights,
            max(self.held, other.held),
            self.linears + other.linears,
            max(self.tokens, other.tokens),
        )


@dataclass(frozen=True)
class Speeds:
    """Operations and bytes per second.

    in_halves       of products that *turbo* leaves in FP16
    own, to_prompt  by the size of heads, as a load has them
    pass_bytes      by the name of a pass: bytes for each element
    stored          bytes of the weights in the file, against FP16's
    """

    products: float
    convolutions: float
    in_halves: float
    own: Mapping[int, float]
    to_prompt: Mapping[int, float]
    memory: float
    bus: float
    pass_bytes: Mapping[str, float]
    stored: float = 1.0


def compute_seconds(load: Load, speeds: Speeds) -> float:
    """With all weights in their place."""
    seconds = (load.products - load.in_halves) / speeds.products + load.in_halves / speeds.in_halves
    seconds += load.convolutions / speeds.convolutions
    seconds += sum(operations / speeds.own[head] for head, operations in load.own.items())
    seconds += sum(operations / speeds.to_prompt[head] for head, operations in load.to_prompt.items())
    return seconds + sum(n * speeds.pass_bytes[name] for name, n in load.passes.items()) / speeds.memory


def step_seconds(load: Load, speeds: Speeds, gib: float, prompts: int = 1, forwards: int = 1) -> float:
    """Of so many prompts in so many forwards, each of which brings the weights that do not stay beside it.

    gib: of the card, for weights and activations
    """
    held = max(0.0, gib * 2**30 - load.held)
    copies = max(0.0, speeds.stored * load.weights - held) / speeds.bus
    return forwards * max(prompts / forwards * compute_seconds(load, speeds), copies)

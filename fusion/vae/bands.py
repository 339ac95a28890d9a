"""The table of a VAE's layers, for cutting pictures into bands: which rows of a layer's input are
needed for some rows of its output.

A family reads its modules into `Layer`s, one for each convolution or for several in a row at one
size. All code that plans or runs bands takes its numbers from there: how far a band reaches beyond
its edge, how much is cut off on the way, how large a picture becomes. A `Layer` describes the side
that is cut, rows or columns; the other side stays whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Span = tuple[int, int]  # first pixel, and the one after the last


@dataclass(frozen=True)
class Layer:
    """A convolution, after an upsampling by repetition if `scale` is not 1.

    kernel  input pixels of one output pixel. `kernel // 2` zeros follow the last pixel of the input
    stride  pixels from one window to the next
    before  zeros before the first pixel of the input
    scale   pixels that each input pixel becomes before the convolution
    """

    kernel: int = 3
    stride: int = 1
    before: int = 1
    scale: int = 1

    def _window(self, made: Span) -> Span:
        """The part of the input, zeros included, that this part of the output is made of."""
        first, last = made
        low = first * self.stride - self.before
        return low // self.scale, -(-(low + (last - first - 1) * self.stride + self.kernel) // self.scale)

    def needs(self, made: Span, size: int) -> Span:
        """The part of the input, which has `size` pixels, that this part of the output is made
        of."""
        low, high = self._window(made)
        return max(0, low), min(size, high)

    def zeros(self, made: Span, size: int) -> tuple[int, int]:
        """How many zeros lie before and after that part: at the edges of the picture, not of a
        band."""
        low, high = self._window(made)
        return max(0, -low), max(0, high - size)

    def makes(self, given: Span, size: int) -> Span:
        """The part of the output that can be made of this part of the input, which has `size`
        pixels."""
        low, high = (edge * self.scale + self.before for edge in given)
        first = 0 if given[0] == 0 else -(-low // self.stride)
        return first, self.size(size) if given[1] == size else (high - self.kernel) // self.stride + 1

    def most(self, pixels: int) -> int:
        """Most input pixels that so many output pixels are made of."""
        return ((pixels - 1) * self.stride + self.kernel + self.scale - 2) // self.scale + 1

    def size(self, given: int) -> int:
        """Number of output pixels."""
        return (given * self.scale + self.before + self.kernel // 2 - self.kernel) // self.stride + 1

    @property
    def taps(self) -> int:
        """Multiplications in two dimensions for an output pixel and a pair of channels. After an
        upsampling some input pixels are equal and count once."""
        return self.most(1) ** 2


CONV = Layer()
UP = Layer(scale=2)
DOWN = Layer(stride=2, before=0)


def convolutions(count: int) -> Layer:
    """So many 3x3 convolutions as one layer."""
    return Layer(kernel=2 * count + 1, before=count)


def entering(layers: Sequence[Layer], sizes: Sequence[int], made: Span) -> Span:
    """The part of the first layer's input that this part of the last one's output is made of.
    sizes: of the layers' inputs."""
    for layer, size in zip(reversed(layers), reversed(sizes), strict=True):
        made = layer.needs(made, size)
    return made


# ------------------------------------------------------------------------------------------------------------- dividing


def by_rows(height: int, rows: int) -> Iterator[Span]:
    """Bands of so many rows; the last may have fewer."""
    for first in range(0, height, rows):
        yield first, min(first + rows, height)


def by_count(side: int, count: int) -> list[Span]:
    """So many bands, as equal as possible."""
    return list(itertools.pairwise(side * i // count for i in range(count + 1)))


def fewest(taken: Callable[[int], int], most: int, room: int) -> int:
    """The least number of bands, `most` at most, that takes at most `room` bytes; `most` if there
    is none.

    taken  bytes for a number of bands
    """
    return next((count for count in range(1, most + 1) if taken(count) <= room), max(1, most))

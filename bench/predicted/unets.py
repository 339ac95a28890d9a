"""U-Nets and TAESD as loads. Pixels are those of the latent, or of what a level has of it."""

from __future__ import annotations

from collections import Counter

from ..end_to_end.pictures import HALF, Unet
from .load import Load

LEAST_ROWS = 1024  # of a product whose weights *turbo* has to round first: kernels_cuda/ops/matmul/integer_rule.py
TAESD_WIDTH = 64
TAESD_LATENT = 4  # channels
TAESD_BLOCKS = (1, 3, 3, 3)  # by level, pixels first
HEADS = 8  # of SD 1.5's attention, whatever its width


class Tally:
    """Counts what is done, layer by layer."""

    def __init__(self) -> None:
        self.products = self.convolutions = self.in_halves = self.weights = 0.0
        self.own: Counter[int] = Counter()
        self.to_prompt: Counter[int] = Counter()
        self.passes: Counter[str] = Counter()

    def convolve(self, into: int, out: int, pixels: float, *, is_block: bool = False) -> None:
        """3x3. pixels: of the result. is_block: its weights are a block's, which are all that count."""
        self.convolutions += 18.0 * pixels * into * out
        self.add("layout", pixels * (into + out))
        self.weights += HALF * 9.0 * into * out * is_block

    def multiply(self, into: int, out: float, rows: float, *, is_block: bool = True, in_bytes: bool = False) -> None:
        """in_bytes: under *turbo*, too."""
        self.products += 2.0 * rows * into * out
        self.in_halves += 2.0 * rows * into * out * (not in_bytes)
        self.weights += HALF * into * out * is_block

    def add(self, name: str, elements: float) -> None:
        self.passes[name] += elements  # type: ignore[assignment]

    def load(self, held: float = 0.0) -> Load:
        return Load(
            self.products, self.convolutions, self.in_halves, self.own, self.to_prompt, self.passes, self.weights, held
        )


def unet(size: Unet, pixels: float, prompts: int = 1) -> Load:
    """One prompt's part of a forward of so many. Weights are those of residual and transformer blocks: nearly all."""
    tally, first, handed = Tally(), size.width, [size.width]
    widest = first * pixels
    for into, out in ((size.channels, first), (first, size.channels)):
        tally.convolve(into, out, pixels)
    tally.add("group norm", first * pixels)

    def pass_through(into: int, out: int, depth: int) -> None:
        _residual(tally, size, into, out, pixels)
        if depth:
            _transformer(tally, size, out, depth, pixels, prompts)

    for level, mult in enumerate(size.mult):
        for _ in range(size.residuals):
            pass_through(handed[-1], mult * first, size.depth[level])
            handed.append(mult * first)
        if level < len(size.mult) - 1:
            pixels /= 4
            tally.convolve(handed[-1], handed[-1], pixels)
            handed.append(handed[-1])
    into = handed[-1]
    pass_through(into, into, size.middle)
    pass_through(into, into, 0)
    for level, mult in reversed(list(enumerate(size.mult))):
        for _ in range(size.residuals + 1):
            beside = handed.pop()
            tally.add("concat", (into + beside) * pixels)
            pass_through(into + beside, mult * first, size.depth[level])
            into = mult * first
        if level:
            pixels *= 4
            tally.add("layout", into * pixels)  # enlarged before the convolution
            tally.convolve(into, into, pixels)
    return tally.load(held=20 * HALF * widest)


def _residual(tally: Tally, size: Unet, into: int, out: int, pixels: float) -> None:
    """Norm, SiLU, convolution, twice; the time's embedding in the middle, and the input added at the end."""
    tally.add("group norm", (into + out) * pixels)
    tally.convolve(into, out, pixels, is_block=True)
    tally.convolve(out, out, pixels, is_block=True)
    tally.multiply(4 * size.width, out, 1)  # the embedding's, of one row
    tally.add("relu", out * pixels)  # the embedding is added in a pass of stock's own
    tally.add("add in product", out * pixels)
    if into != out:
        tally.multiply(into, out, pixels)
        tally.add("layout", (into + out) * pixels)


def _transformer(tally: Tally, size: Unet, width: int, depth: int, pixels: float, prompts: int) -> None:
    head = 64 if size.linear else width // HEADS
    in_bytes = prompts * pixels >= LEAST_ROWS
    tally.add("group norm", width * pixels)
    tally.add("layout", 2 * width * pixels)  # to tokens and back
    tally.multiply(width, 2 * width, pixels, is_block=False)  # its ends
    tally.add("add in product", width * pixels)
    # q, k, v and o; q and o of the second attention; GEGLU's both halves, four times as wide, and its way back
    tally.multiply(width, depth * (4 + 2 + 8 + 4) * width, pixels, in_bytes=in_bytes)
    tally.multiply(size.text, depth * 2.0 * width, size.tokens)
    x = float(depth * width * pixels)
    tally.own[head] += 4.0 * pixels * x  # type: ignore[assignment]
    tally.to_prompt[head] += 4.0 * size.tokens * x  # type: ignore[assignment]
    tally.add("norm", 3 * x)
    tally.add("add in product", 3 * x)
    tally.add("geglu", 4 * x)
    tally.add("round heads", x)
    if in_bytes:
        tally.add("round", (3 + 2 + 4) * x)
        tally.add("round weights", depth * 18.0 * width * width / prompts)


# ---------------------------------------------------------------------------------------------------------------- TAESD


def taesd(pixels: float) -> Load:
    """A picture to its latent and back. pixels: of the picture."""
    tally = Tally()
    for decodes in (False, True):
        side = pixels
        tally.convolve(3, TAESD_WIDTH, side)
        for level, blocks in enumerate(TAESD_BLOCKS):
            if (
                level
            ):  # one convolution between two levels: of the smaller size on the way down, of the larger on the way up
                tally.convolve(TAESD_WIDTH, TAESD_WIDTH, side if decodes else side / 4)
                side /= 4
            for _ in range(blocks):
                _taesd_block(tally, side)
        tally.convolve(TAESD_LATENT, TAESD_WIDTH, side)
    return tally.load(held=4 * HALF * TAESD_WIDTH * pixels)


def _taesd_block(tally: Tally, pixels: float) -> None:
    for _ in range(3):
        tally.convolve(TAESD_WIDTH, TAESD_WIDTH, pixels)
        tally.add("relu", TAESD_WIDTH * pixels)
    tally.add("add in product", TAESD_WIDTH * pixels)

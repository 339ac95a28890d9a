"""What colour something on the page has, and whether it can be read on its ground."""

from __future__ import annotations

# For a script on the page: `pixel(colour)` is red, green, blue and opacity of a colour, however the style sheet says it.
PIXEL = """const context = new OffscreenCanvas(1, 1).getContext('2d')
    const pixel = colour => {
        context.clearRect(0, 0, 1, 1)
        context.fillStyle = colour
        context.fillRect(0, 0, 1, 1)
        return [...context.getImageData(0, 0, 1, 1).data]
    }"""


def contrast(one: list[int], other: list[int]) -> float:
    """As WCAG reckons it; both are opaque."""
    assert one[3] == other[3] == 255

    def light(colour: list[int]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour[:3])]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    lights = sorted((light(one), light(other)))
    return lights[1] / lights[0]

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

# Of an element each piece of text that is in sight, and its contrast with what is behind it by WCAG's formula. A colour that is not
# opaque lies over the one behind it. The label in a text box is the front end's own, on its own ground.
CONTRASTS = """root => {
    %s
    const of = colour => pixel(colour).map((value, i) => i === 3 ? value / 255 : value)
    const over = (top, below, opacity) => [0, 1, 2].map(i => top[3] * opacity * top[i] + (1 - top[3] * opacity) * below[i])
    const light = rgb => rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0.05)
    const opacity = one => one ? Number(getComputedStyle(one).opacity) * opacity(one.parentElement) : 1
    const behind = one => one
        ? over(of(getComputedStyle(one).backgroundColor), behind(one.parentElement), opacity(one)) : [0, 0, 0]
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), found = []
    const look = (text, one) => {
        if (!text.trim() || (one.localName !== 'textarea' && one.parentElement.querySelector(':scope > textarea'))) return
        if (!one.checkVisibility({ visibilityProperty: true, opacityProperty: true })) return
        const ground = behind(one), ink = over(of(getComputedStyle(one).color), ground, opacity(one))
        const [less, more] = [light(ground), light(ink)].sort((a, b) => a - b)
        found.push([text.trim(), more / less])
    }
    while (walker.nextNode()) look(walker.currentNode.textContent, walker.currentNode.parentElement)
    for (const area of root.querySelectorAll('textarea')) look(area.value || area.placeholder, area)
    return found
}""".replace("%s", PIXEL)


def contrast(one: list[int], other: list[int]) -> float:
    """As WCAG reckons it; both are opaque."""
    assert one[3] == other[3] == 255

    def light(colour: list[int]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour[:3])]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    lights = sorted((light(one), light(other)))
    return lights[1] / lights[0]

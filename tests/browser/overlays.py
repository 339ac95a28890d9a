"""What the pack draws at nodes while a graph runs, told to the page as the server does."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator

from browser.front_end import FrontEnd

GIB = 2**30
READING = {
    "memory": "VRAM",
    "held": int(6.41 * GIB),
    "limit": 7 * GIB,
    "block": 1,
    "blocks": 40,
    "resident": [0, 5],
    "rate": 12.14e9,
    "waiting": 0.1,
}
HEAR = "([event, told]) => app.api.dispatchEvent(new CustomEvent(`fusestream.${event}`, { detail: told }))"
# Its words are wider or higher than it lets them be, or stick out of it.
CLIPPED = """meter => {
    const out = meter.getBoundingClientRect()
    return [...meter.querySelectorAll('.fusestream-line, .fusestream-line *, .fusestream-words')].filter(one => {
        const box = one.getBoundingClientRect()
        return one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1
            || box.left < out.left || box.right > out.right + 1 || box.bottom > out.bottom
    }).map(one => one.textContent)
}"""


def hear(front: FrontEnd, node: str, reading: dict[str, Any], event: str = "meter") -> Locator:
    """The element that shows this, where it lies now."""
    shown = front.page.locator(f'[data-fusestream-{event}="{node}"]')
    for _ in range(50):  # told again and again as by the server: the page may just be loading its graph anew
        front.page.evaluate(HEAR, [event, {**reading, "node": node}])
        front.page.wait_for_timeout(100)
        if shown.is_visible():
            return shown
    raise AssertionError(f"{event} of {node} is not to be seen")


def texts(shown: Locator) -> list[str]:
    return shown.locator(".fusestream-line > div").all_inner_texts()

"""A node's widgets in ComfyUI's two ways to draw a node: on one canvas (the default), or as elements of the page.

Both have the same methods. Nodes are named by id, widgets by name.
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from playwright.sync_api import Locator, Page, TimeoutError, expect

# The middle of a widget's box, in page coordinates.
MIDDLE = """([id, name]) => {
    const node = app.graph.getNodeById(id), widget = node.widgets.find(w => w.name === name)
    const y = node.pos[1] + widget.last_y + LiteGraph.NODE_WIDGET_HEIGHT / 2
    return app.canvasPosToClientPos([node.pos[0] + node.size[0] / 2, y])
}"""
VALUE = "([id, name]) => app.graph.getNodeById(id).widgets.find(w => w.name === name).value"
# A text box on a canvas node floats above the canvas: it is found by the widget it belongs to.
ELEMENT = "([id, name]) => app.graph.getNodeById(id).widgets.find(w => w.name === name).element"
HAS_VIDEO = "id => app.graph.getNodeById(id).widgets.some(w => w.element?.querySelector?.('video'))"


class Canvas:
    """Nodes drawn by LiteGraph."""

    SETTINGS: ClassVar[dict[str, Any]] = {"Comfy.VueNodes.Enabled": False, "Comfy.Minimap.Visible": False}

    def __init__(self, page: Page) -> None:
        self.page = page

    def number(self, node: str, widget: str, value: float) -> None:
        self.page.mouse.click(*self.page.evaluate(MIDDLE, [node, widget]))
        box = self.page.locator(".graphdialog input")
        box.fill(str(value))
        box.press("Enter")
        expect(box).to_be_hidden()
        assert self.page.evaluate(VALUE, [node, widget]) == value

    def text(self, node: str, widget: str, value: str) -> None:
        box = self.page.evaluate_handle(ELEMENT, [node, widget]).as_element()
        assert box is not None
        box.click()
        self.page.keyboard.press("ControlOrMeta+A")
        self.page.keyboard.insert_text(value)
        assert self.page.evaluate(VALUE, [node, widget]) == value

    def choose(self, node: str, widget: str, value: str) -> None:
        menu = self.page.locator(".litecontextmenu")
        for _ in range(3):  # a node may still move, or grow, under the click
            self.page.mouse.click(*self.page.evaluate(MIDDLE, [node, widget]))
            with contextlib.suppress(TimeoutError):
                menu.wait_for(timeout=5000)
                break
        menu.get_by_role("menuitem").filter(has_text=value).click()
        assert self.page.evaluate(VALUE, [node, widget]) == value

    def video(self, node: str) -> Locator:
        """The video on the node. It floats too, and no other is on the page."""
        self.page.wait_for_function(HAS_VIDEO, arg=node)
        return self.page.locator("video")


class Elements:
    """Nodes 2.0: every node a part of the page."""

    SETTINGS: ClassVar[dict[str, Any]] = {"Comfy.VueNodes.Enabled": True, "Comfy.Minimap.Visible": False}

    def __init__(self, page: Page) -> None:
        self.page = page

    def _node(self, node: str) -> Locator:
        return self.page.locator(f'[data-node-id="{node}"]')

    def number(self, node: str, widget: str, value: float) -> None:
        # A layer for dragging lies over the number; its click hands the keyboard on.
        box = self._node(node).get_by_label(widget, exact=True).get_by_role("spinbutton")
        box.click(force=True)
        expect(box).to_be_focused()
        self.page.keyboard.press("ControlOrMeta+A")
        self.page.keyboard.type(str(value))
        self.page.keyboard.press("Enter")
        assert self.page.evaluate(VALUE, [node, widget]) == value

    def text(self, node: str, widget: str, value: str) -> None:
        box = self._node(node).get_by_role("textbox")
        box.click()
        self.page.keyboard.press("ControlOrMeta+A")
        self.page.keyboard.insert_text(value)
        assert self.page.evaluate(VALUE, [node, widget]) == value

    def choose(self, node: str, widget: str, value: str) -> None:
        self._node(node).get_by_role("combobox", name=widget).click()
        self.page.get_by_role("option", name=value).click()
        assert self.page.evaluate(VALUE, [node, widget]) == value

    def video(self, node: str) -> Locator:
        return self._node(node).locator("video")

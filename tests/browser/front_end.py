"""ComfyUI's front end as a user handles it: open a template, look at a node, press Run, watch.

What a user sees is asked of the page. Only where a node lies on the canvas, which is one picture to the browser, is
asked of the front end's own `app`, and the click then goes to that spot.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import ConsoleMessage, Error, Locator, Page, Request, Response, TimeoutError, expect

from bed import templates
from bed.depth import is_thorough
from bed.server import PACK

# Asked for by the front end whether they are there or not: what a new user has none of, a translated help page.
MAY_BE_MISSING = re.compile(
    r"/user\.css$|/userdata\?dir=(workflows|subgraphs)|/userdata/comfy\.templates\.json$|/docs/\w+/en\.md$"
)
# The front end's own complaints. `--disable-api-nodes` makes the browser refuse its calls to comfy.org.
NOT_OURS = re.compile(
    r"^Failed to load resource"  # said again, and with the address, as a response
    r"|^ComfyApp graph accessed before initialization"
    r"|Content Security Policy"
)
# The cards of our workflows in the template browser, by the names of their files.
CARDS = re.compile("^template-workflow-.+, FuseStream$")
TITLES = """() => {
    window.seenTitles = []
    new MutationObserver(() => window.seenTitles.push(document.title))
        .observe(document.querySelector('title'), {childList: true, characterData: true, subtree: true})
}"""
# While it works, the front end has the progress at the head of the title.
IDLE = "window.seenTitles.some(title => title.startsWith('[')) && !document.title.startsWith('[')"
# A widget on the canvas has a place only once it was drawn.
DRAWN = """() => app.graph.nodes.every(n =>
    n.flags.collapsed || !n.widgets?.length || n.widgets[0].last_y != null || document.querySelector(`[data-node-id="${n.id}"]`))"""
# A click on the canvas goes to the nodes of the last frame, where they were then.
IN_FRAME = """id => {
    const node = app.graph.getNodeById(id)
    return app.canvas.visible_nodes.includes(node) && Math.abs(node.getBounding()[0] - node.pos[0]) < 1
}"""
TITLE_BAR = """id => {
    const node = app.graph.getNodeById(id)
    return app.canvasPosToClientPos([node.pos[0] + node.size[0] / 2, node.pos[1] - LiteGraph.NODE_TITLE_HEIGHT / 2])
}"""


PICTURES = os.environ.get("FUSESTREAM_LOOK")  # a folder for them
THEME = "theme => app.extensionManager.setting.set('Comfy.ColorPalette', theme)"
# Whether the front end draws nodes as elements, as new installs do; the canvas too where time does not count.
RENDERERS = {True: "elements", **({False: "canvas"} if is_thorough() else {})}


class FrontEnd:
    """One page. `problems` collects what it complains of, one line each."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.problems: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", self._on_page_error)
        page.on("response", self._on_response)
        page.on("requestfailed", self._on_request_failed)

    def open(self) -> None:
        """Load the page and wait until its start-up is over, the first workflow drawn."""
        self.page.goto(self.url)
        self.page.wait_for_function("window.app?.vueAppReady && app.graph?.nodes.length > 0", timeout=60_000)
        # Until the very end of its start-up an invisible mask swallows every click.
        expect(self.page.locator("#splash-loader, .p-blockui-mask")).to_have_count(0)

    def browse_templates(self) -> Locator:
        """Open the template browser at this pack's section; the dialog."""
        self.page.get_by_role("button", name="Templates").click()
        dialog = self.page.get_by_role("dialog")
        dialog.get_by_role("button", name=PACK, exact=True).click()
        title = dialog.get_by_role(
            "heading", name=PACK, exact=True
        )  # of front end 1.58; before, a text in the main part
        expect(title.or_(dialog.get_by_role("main").get_by_text(PACK, exact=True)).first).to_be_visible()
        return dialog

    def search_templates(self, word: str) -> Locator:
        """Open the template browser and type what is searched for; the dialog."""
        self.page.get_by_role("button", name="Templates").click()
        dialog = self.page.get_by_role("dialog")
        dialog.get_by_role("searchbox").or_(dialog.get_by_placeholder("Search")).first.fill(word)
        return dialog

    def load_cards(self, dialog: Locator, count: int) -> None:
        """Scroll the template browser until so many of ours are there: the front end puts them in as they come into sight."""
        cards = dialog.get_by_test_id(CARDS)
        expect(cards.first).to_be_visible()
        before = 0
        while before < (now := cards.count()) < count:
            before = now
            cards.last.scroll_into_view_if_needed()
            with contextlib.suppress(AssertionError):
                expect(cards).not_to_have_count(now, timeout=5_000)

    def open_template(self, name: str) -> None:
        """By its short name."""
        name = templates.STEMS[name]
        dialog = self.browse_templates()
        self.load_cards(dialog, len(templates.TITLES))
        template = dialog.get_by_test_id(f"template-workflow-{name}")
        template.click()
        try:
            expect(dialog).to_be_hidden(timeout=10_000)
        except AssertionError:  # on a busy machine the front end has been seen to let a click go by
            template.click()
            expect(dialog).to_be_hidden()
        expect(self.page.get_by_test_id("topbar-workflow-tabs")).to_contain_text(name)
        self.page.wait_for_function(DRAWN)

    def look(self, name: str, *themes: str) -> None:
        """A picture of the page, of each theme if any is named, where somebody asks for what is worth looking at."""
        if not PICTURES:
            return
        for theme in themes:
            self.page.evaluate(THEME, theme)
            self.page.wait_for_timeout(800)
            self.page.screenshot(path=Path(PICTURES) / f"{name}-{theme}.png")
        if not themes:
            self.page.screenshot(path=Path(PICTURES) / f"{name}.png")

    def nodes(self) -> list[dict[str, Any]]:
        """Id, title, type, box (x, y, width, height with the title bar) and state of every node."""
        nodes: list[dict[str, Any]] = self.page.evaluate(
            """app.graph.nodes.map(n => ({
                id: String(n.id), title: n.getTitle(), type: n.type, box: [...n.getBounding()], error: Boolean(n.has_errors),
                known: n.type in LiteGraph.registered_node_types,
                lost: (n.widgets ?? []).filter(w => w.type === 'combo' && !w.options.values.includes(w.value))
                    .map(w => w.value)
            }))"""
        )
        return nodes

    def node(self, title: str) -> str:
        """The id of the node with this title."""
        (id_,) = (node["id"] for node in self.nodes() if node["title"] == title)
        return str(id_)

    def select(self, node: str) -> None:
        self.page.wait_for_function(IN_FRAME, arg=node)
        self.page.mouse.click(*self.page.evaluate(TITLE_BAR, node))

    def open_search(self, spot: tuple[int, int]) -> Locator:
        """Double-click on an empty spot of the canvas; the node search that opens."""
        search = self.page.get_by_role("search")
        for _ in range(5):
            self.page.mouse.dblclick(*spot)
            # Two clicks that a busy machine delivers 300 ms apart are no double click: do it again, as one would.
            with contextlib.suppress(TimeoutError):
                search.wait_for(timeout=2000)
                break
        expect(search).to_be_visible()
        return search

    def choose_in_menu(self, label: str) -> None:
        """In ComfyUI's own menu, at our entry."""
        self.page.locator(".comfy-menu-button-wrapper, [data-testid=comfy-menu-button]").click()
        menu = self.page.locator(".comfy-command-menu")
        for _ in range(5):
            menu.get_by_text(PACK, exact=True).hover()
            # An entry that slides in below the pointer does not open; then again from outside.
            with contextlib.suppress(TimeoutError):
                self.page.get_by_role("menuitem", name=label).click(timeout=3000)
                break
            self.page.mouse.move(640, 700)
        expect(menu).to_be_hidden()

    def prompt(self) -> dict[str, Any]:
        """What Run would send to the server, in API format."""
        prompt: dict[str, Any] = self.page.evaluate("app.graphToPrompt().then(p => p.output)")
        return prompt

    def run(self) -> None:
        """Press Run and wait for the end, good or bad."""
        self.page.evaluate(TITLES)
        self.page.get_by_test_id("queue-button").click()
        self.page.wait_for_function(IDLE, timeout=90_000)

    def titles(self) -> list[str]:
        """What the browser's tab said during the last run."""
        titles: list[str] = self.page.evaluate("window.seenTitles")
        return titles

    @property
    def error(self) -> Locator:
        """The note that something is wrong with the workflow or went wrong in it."""
        return self.page.get_by_test_id("error-overlay")

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not NOT_OURS.search(message.text):
            self.problems.append(f"console: {message.text}")

    def _on_page_error(self, error: Error) -> None:
        self.problems.append(f"uncaught: {error}")

    def _on_response(self, response: Response) -> None:
        ours = response.url.startswith(self.url)
        if ours and response.status >= 400 and not (response.status == 404 and MAY_BE_MISSING.search(response.url)):
            self.problems.append(f"{response.status} {response.request.method} {response.url}")

    def _on_request_failed(self, request: Request) -> None:
        # The front end itself aborts what it no longer needs.
        if request.url.startswith(self.url) and request.failure != "net::ERR_ABORTED":
            self.problems.append(f"{request.failure} {request.method} {request.url}")

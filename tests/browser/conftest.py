"""A server, a browser and a page for the tests that take the same settings; a picture of the page for every test that fails.

Server and browser live as long as this package. Playwright keeps an event loop in the main thread while it is up, and
tests elsewhere that start one of their own must not find it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import BrowserContext, Error, ViewportSize, expect, sync_playwright

import bed.browser
from bed import tiny
from bed.paths import ROOT
from bed.server import Server
from bed.templates.clip import write_clip
from bed.templates.inputs import CLIP, PICTURES
from browser.front_end import FrontEnd

FAILURES = ROOT / "output" / "test-failures"
BAD_FILE = "not_a_model.safetensors"
INT8_FILE = "wan2.1_t2v_1.3B_int8_convrot.safetensors"
# A test machine may have no way out: the third line keeps a browser from calling home.
CHROMIUM = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--process-per-site",  # see `keep_process`
    "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",  # a camera that shows a test picture, and is allowed
]  # fmt: skip
VIEWPORT: ViewportSize = {"width": 1280, "height": 800}
FAILED = pytest.StashKey[bool]()
# Two cores that also run the model: generous, and reached only by a test that fails.
expect.set_options(timeout=20_000)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, with a stand-in under every name that the example workflows have in their loaders."""
    base = tmp_path_factory.mktemp("comfyui")
    keeps = base / "custom_nodes" / "KeptScripts"
    keeps.mkdir(parents=True)
    shutil.copyfile(Path(__file__).with_name("kept_scripts.py"), keeps / "__init__.py")
    tiny.write_published(base / "models")
    tiny.write_int8(base / "models" / "diffusion_models" / INT8_FILE)
    (base / "input").mkdir()
    for name in PICTURES:
        Image.radial_gradient("L").convert("RGB").save(base / "input" / name)
    write_clip(base / "input" / CLIP, side=64, frames=5)
    (base / "models" / "diffusion_models" / BAD_FILE).write_text("<html>404: no such model</html>", encoding="utf-8")
    with Server(Path(sys.executable), Path(os.environ["COMFYUI_PATH"]), base) as server:
        yield server


@pytest.fixture(scope="package")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    """One for all tests: it keeps the front end's scripts, which are megabytes, as it has compiled them."""
    path = bed.browser.find()
    assert path, "no browser found: `python3 dev.py setup` installs one, or set FUSESTREAM_BROWSER to the path of one"
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("browser"),
            executable_path=path,
            args=CHROMIUM,
            viewport=VIEWPORT,
            locale="en-US",
        )
        yield context
        context.close()


@pytest.fixture
def settings() -> dict[str, Any]:
    """The user's settings when the page opens. A module that needs others has a fixture of this name."""
    return {}


class OnePage:
    """The page that tests with the same settings, on the same server, have after each other, because one takes as long to open as
    many a test. What a test leaves in it but for its workflow, its window's size and its routes, the next must not mind; a module
    whose tests do says `OWN_PAGE = True`."""

    def __init__(self) -> None:
        self.owner: Any = None
        self.front: FrontEnd | None = None

    def again(self, owner: Any) -> FrontEnd | None:
        """As it was opened, if it is this one's."""
        if owner is None or owner != self.owner or self.front is None:
            self.close()
            return None
        self.front.page.unroute_all()
        self.front.page.set_viewport_size(VIEWPORT)
        self.front.page.evaluate("app.loadGraphData()")
        return self.front

    def close(self) -> None:
        if self.front is not None:
            self.front.page.close()
        self.owner = self.front = None


@pytest.fixture(scope="package")
def one_page(chromium: BrowserContext) -> Iterator[OnePage]:
    found = OnePage()
    yield found
    found.close()


@pytest.fixture
def front(
    request: pytest.FixtureRequest,
    server: Server,
    chromium: BrowserContext,
    settings: dict[str, Any],
    one_page: OnePage,
) -> Iterator[FrontEnd]:
    """The front end, opened by a user who has seen it before, in a browser that remembers nothing of it but its scripts."""
    owner = (server.url, settings) if not getattr(request.module, "OWN_PAGE", False) else None
    front = one_page.again(owner)
    if front is None:
        front = opened(request, server, chromium, settings)
    one_page.owner, one_page.front = owner, front
    try:
        yield front
        problems = list(front.problems)  # before the page goes: closing it aborts requests
        stop_work(front)
    finally:
        if owner is None or front.problems or request.node.stash.get(FAILED, False):
            one_page.close()
    assert not problems, "the page complained"


def opened(
    request: pytest.FixtureRequest, server: Server, chromium: BrowserContext, settings: dict[str, Any]
) -> FrontEnd:
    # The front end stores settings on the server as it is used: without this a test would inherit the last one's.
    path = server.base / "user" / "default" / "comfy.settings.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"Comfy.TutorialCompleted": True, **settings}), encoding="utf-8")
    keep_process(chromium, server)
    page = chromium.new_page()
    forget = {"origin": server.url, "storageTypes": "cookies,local_storage,indexeddb,service_workers,cache_storage"}
    chromium.new_cdp_session(page).send("Storage.clearDataForOrigin", forget)
    front = FrontEnd(page, server.url)
    try:
        front.open()
    except Exception:
        print(keep(request.node.name, front, server))  # the hook below sees only fixtures that were made
        page.close()
        raise
    return front


def keep_process(chromium: BrowserContext, server: Server) -> None:
    """One small page stays, and with it the process that all pages of this machine's servers share: the front end opens in three
    quarters of the time, since most of its scripts are there as they ran."""
    if not any(page.url.startswith("http") for page in chromium.pages):
        chromium.new_page().goto(f"{server.url}/system_stats")


def stop_work(front: FrontEnd) -> None:
    """Take away what a failed test has left running, so that the next one need not wait for it."""
    request, url = front.page.request, front.url
    if any(request.get(f"{url}/queue").json().values()):
        request.post(f"{url}/queue", data={"clear": True})
        request.post(f"{url}/interrupt")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    fixtures: dict[str, Any] = getattr(item, "funcargs", {})
    front, server = fixtures.get("front"), fixtures.get("server")
    if report.failed and front and server and not front.page.is_closed():
        report.sections.append(("what the browser showed", keep(item.name, front, server)))
    return report


def keep(test: str, front: FrontEnd, server: Server) -> str:
    """Save what a human needs to understand the failure of `test`; a text that says where."""
    FAILURES.mkdir(parents=True, exist_ok=True)
    stem = FAILURES / re.sub(r"[^\w.-]+", "_", test).strip("_")
    picture, log = Path(f"{stem}.png"), Path(f"{stem}.log")
    log.write_text(server.log(), encoding="utf-8")
    try:
        front.page.screenshot(path=picture)
        shown = f"screenshot: {picture}"
    except Error as error:
        shown = f"no screenshot: {error}"
    complaints = "\n".join(front.problems) or "none"
    tail = "\n".join(server.log().splitlines()[-15:])
    return f"{shown}\nserver log: {log}\n\ncomplaints of the page: {complaints}\n\nend of the server log:\n{tail}"

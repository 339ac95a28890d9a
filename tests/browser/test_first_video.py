"""A newcomer's walk: what README says from the installation to the first video, and nothing else, on a server of its own.

Small files of random weights stand in for the published ones, and the video is made small, by clicks that do not count: two cores
have to do it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from bed import tiny
from bed.paths import ROOT
from bed.server import MODEL_FOLDERS, PACK, Server
from browser.front_end import DRAWN, FrontEnd
from browser.widgets import Canvas

README = (ROOT / "README.md").read_text(encoding="utf-8")
WALK = README[README.index("## Install") : README.index("[Twenty examples]")]
MOST_CLICKS = 5
COUNT_CLICKS = "() => { window.clicks = 0; document.addEventListener('click', () => window.clicks++, true) }"
FILES = re.findall(r"\| `(\S+\.safetensors)` \| [\d.]+ GB \| `models/(\w+)` \|", WALK)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As README has it: the pack's files, as a zip would have them, in `custom_nodes`; three files among the models."""
    base = tmp_path_factory.mktemp("newcomer")
    assert "`ComfyUI/custom_nodes/FuseStream`" in WALK
    unpack(base / "custom_nodes" / PACK)
    tiny.write_published(base / "published", [name for name, _ in FILES])
    for name, folder in FILES:
        (base / "models" / folder).mkdir(parents=True)
        (made,) = (base / "published").rglob(name)
        made.rename(base / "models" / folder / name)
    with Server(Path(sys.executable), Path(os.environ["COMFYUI_PATH"]), base) as server:
        yield server


def unpack(target: Path) -> None:
    """Every file that is in git, as it is now, and no other."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # and not deleted a moment ago
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


@pytest.mark.deep
def test_from_the_readme_to_the_first_video(front: FrontEnd, server: Server) -> None:
    assert len(FILES) == 3
    there = {path.name for folder in MODEL_FOLDERS for path in (server.base / "models" / folder).glob("*.safetensors")}
    assert there == {name for name, _ in FILES}
    front.page.evaluate(COUNT_CLICKS)
    ((word, title),) = re.findall(r"search for \*(\w+)\*, and open \*\*(.+?)\*\*", WALK)
    dialog = front.search_templates(word)
    dialog.get_by_test_id(re.compile("^template-workflow-")).filter(has_text=title).click()
    expect(dialog).to_be_hidden()
    front.page.wait_for_function(DRAWN)
    expect(front.error).to_be_hidden()
    opened = front.page.evaluate("window.clicks")
    widgets = Canvas(front.page)
    for name, value in {"width": 64, "height": 64, "length": 5}.items():
        widgets.number(front.node("Size and length"), name, value)
    widgets.number(front.node("KSampler"), "steps", 2)
    before = front.page.evaluate("window.clicks")
    front.run()
    run = front.page.evaluate("window.clicks") - before
    assert opened > 1 and run == 1 and opened + run <= MOST_CLICKS
    expect(front.error).to_be_hidden()
    assert "The video appears on the *Save Video* node and in `output/video`" in WALK
    expect(widgets.video(front.node("Save Video"))).to_be_visible()
    assert list((server.base / "output" / "video").glob("*.mp4"))

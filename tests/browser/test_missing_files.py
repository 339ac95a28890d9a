"""A user opens an example whose files are not there yet: the front end names what is missing and where to get it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from bed.server import Server
from bed.templates import files
from browser.front_end import FrontEnd

MISSING = files.FOUR_STEPS
OWN_PAGE = True  # it has to open after the file went


@pytest.fixture
def settings(server: Server) -> Iterator[dict[str, Any]]:
    """The usual ones; before the page opens, the file goes."""
    path = server.base / "models" / MISSING.folder / MISSING.name
    away = path.rename(path.with_suffix(".away"))
    yield {}
    away.rename(path)


@pytest.mark.deep
def test_a_missing_file_is_named_and_offered(front: FrontEnd) -> None:
    front.open_template("wan2.1_t2v_14B_4_steps")
    expect(front.error).to_contain_text(MISSING.name)
    front.error.get_by_role("button", name="View details").click()
    panel = front.page.get_by_test_id("properties-panel")
    expect(panel).to_contain_text(MISSING.name)
    expect(panel.get_by_role("button", name=f"Download {MISSING.name}").first).to_be_visible()

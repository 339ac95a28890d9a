"""Our templates in ComfyUI's template browser: in order, by their titles, and found by what somebody looks for."""

from __future__ import annotations

import pytest
from playwright.sync_api import Locator, Route, expect

from bed.templates import EXAMPLES, STEMS, SWAPPED, TITLES
from browser.front_end import CARDS, FrontEnd

OWN_PAGE = True  # the front end asks for templates once
ALL = (*EXAMPLES, *SWAPPED)
WORDS = (
    *("fusestream", "8 GB", "gguf", "int8", "fp8"),
    *("wan", "flux", "klein", "qwen", "z-image", "ltx", "krea", "minimax", "sd-turbo"),
)
OUT_OF_REACH = ("fusestream", "qwen")  # of the names of files: the pack's, and who writes a caption
NOTHING = "zzzzzzzz"  # is found by this
# The names of the files of those that are shown, in order; whether all of these are among them.
NAMES = """() => [...document.querySelectorAll('[data-testid^="template-workflow-"]')]
    .map(card => card.dataset.testid.replace('template-workflow-', ''))"""
ARE_FOUND = f"names => {{ const shown = ({NAMES})(); return names.every(one => shown.includes(one)) }}"


def names(front: FrontEnd) -> list[str]:
    shown: list[str] = front.page.evaluate(NAMES)
    return shown


def meant(word: str) -> list[str]:
    """The files of those whose title, storage or models have the word."""
    told = {one.listed.stem: " ".join((one.listed.title, one.listed.storage, *one.listed.models)) for one in ALL}
    return [stem for stem, text in told.items() if word in ("fusestream", "8 GB") or word in text.lower()]


def search(front: FrontEnd, dialog: Locator, word: str) -> list[str]:
    """Those of ours that are found, once all that are meant are."""
    box = dialog.get_by_role("searchbox").or_(dialog.get_by_placeholder("Search")).first
    box.fill(NOTHING)
    expect(dialog.get_by_test_id(CARDS)).to_have_count(0)
    box.fill(word)
    front.page.wait_for_function(ARE_FOUND, arg=meant(word))
    return [stem for stem in names(front) if stem in STEMS.values()]


def test_they_are_there_in_order_and_found(front: FrontEnd) -> None:
    dialog = front.browse_templates()
    expect(dialog.get_by_test_id(CARDS).first).to_be_visible()
    shown = names(front)
    assert len(shown) > 8 and shown == list(STEMS.values())[: len(shown)]
    for example in EXAMPLES[:3]:
        card = dialog.get_by_test_id(f"template-workflow-{example.listed.stem}")
        for text in (example.listed.title, example.listed.tag, "FuseStream for 8 GB cards"):
            expect(card.get_by_text(text, exact=False).first).to_be_visible()
    assert sorted(search(front, dialog, "fusestream")) == sorted(STEMS.values())
    assert search(front, dialog, "gguf") == meant("gguf")


@pytest.mark.deep
@pytest.mark.parametrize("by", ["index", "file"])
def test_every_word_that_tells_a_model_or_a_format_finds_them(front: FrontEnd, by: str) -> None:
    """By the names of the files alone, too, where the index cannot be read."""
    if by == "file":
        front.page.route("**/extensions/*/templates/index.json", unreadable)
        front.open()
    dialog = front.browse_templates()
    card = dialog.get_by_test_id(f"template-workflow-{STEMS['flux2_klein_4B']}")
    expect(card).to_contain_text(STEMS["flux2_klein_4B"] if by == "file" else TITLES["flux2_klein_4B"])
    for word in WORDS:
        if by == "index" or word not in OUT_OF_REACH:
            assert search(front, dialog, word)


def unreadable(route: Route) -> None:
    route.fulfill(body="no JSON")

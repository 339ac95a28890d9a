"""The front end's toasts as a user reads them: title, sentence, kind. In 1.58 they are made of other elements."""

from __future__ import annotations

from playwright.sync_api import Locator, expect

from browser.front_end import FrontEnd

KINDS = {"warn": "warning"}  # as front end 1.58 calls them
CUT_OFF = "one => one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1"


def toasts(front: FrontEnd) -> Locator:
    return front.page.locator(".p-toast-message").or_(front.page.get_by_test_id("toast"))


def title(toast: Locator) -> Locator:
    return toast.locator(".p-toast-summary, .font-medium.row-start-1:not(button)")


def sentence(toast: Locator) -> Locator:
    return toast.locator(".p-toast-detail, .row-start-2")


def is_kind(toast: Locator, kind: str) -> bool:
    """Whether it is an `error`, a `warn`, a `success`, an `info`."""
    by_class = f"p-toast-message-{kind}" in (toast.get_attribute("class") or "")
    return by_class or toast.get_attribute("data-toast-kind") == KINDS.get(kind, kind)


def check(front: FrontEnd, kind: str, heading: str, said: str) -> None:
    """The one toast is of that kind, and all of its words are to be seen."""
    toast = toasts(front).filter(has_text=said)
    expect(toast).to_have_count(1)
    expect(title(toast)).to_have_text(heading)
    expect(sentence(toast)).to_have_text(said)
    assert is_kind(toast, kind)
    assert not sentence(toast).evaluate(CUT_OFF)


def close(toast: Locator) -> None:
    """Press its cross; it goes."""
    toast.get_by_role("button").click()
    expect(toast).to_have_count(0)

"""What a user is warned of: in the log and on the page, once in a run, and never at the price of the run."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from fusestream.fusion.base import notices
from fusestream.fusion.text import token_rate
from fusestream.nodes.page import front_end

SENTENCE = "This model does not look at the image. Load one for image to video."


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_listeners", [])
    monkeypatch.setattr(notices, "_writers", [])
    monkeypatch.setattr(notices, "_said", set())


def in_run(prompt: str, node: str = "9") -> Any:
    from comfy_execution.utils import CurrentNodeContext

    return CurrentNodeContext(prompt, node)


def test_a_sentence_is_said_once_in_a_run(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    notices.listen(heard.append)
    with caplog.at_level(logging.WARNING, "fusestream"):
        with in_run("first"):
            notices.warn(SENTENCE)
            notices.warn(SENTENCE)
            notices.warn("another 100%")
        with in_run("first", "12"):
            notices.warn(SENTENCE)
        assert heard == [SENTENCE, "another 100%"]
        with in_run("second"):
            notices.warn(SENTENCE)
        notices.warn(SENTENCE)  # without a server
        notices.warn(SENTENCE)
    assert heard == [SENTENCE, "another 100%", SENTENCE, SENTENCE]
    assert [record.getMessage() for record in caplog.records] == heard
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_who_listens_twice_hears_once_and_who_fails_stops_nobody() -> None:
    heard: list[str] = []
    add = heard.append

    def broken(sentence: str) -> None:
        raise OSError(sentence)

    for listener in (broken, add, add):
        notices.listen(listener)
    notices.warn(SENTENCE)
    assert heard == [SENTENCE]


def test_the_page_of_who_queued_the_prompt_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    server = SimpleNamespace(
        client_id="me", last_prompt_id="p", last_node_id="4", send_sync=lambda *message: sent.append(message)
    )
    monkeypatch.setattr(front_end, "running_server", lambda: server)
    front_end.hear_notices()  # as every loader does
    front_end.hear_notices()
    with in_run("p"):
        notices.warn(SENTENCE)
    assert sent == [(front_end.NOTICE, {"node": "9", "sentence": SENTENCE, "prompt_id": "p"}, "me")]
    server.client_id = None  # queued by a program
    notices.warn("another")
    monkeypatch.setattr(front_end, "running_server", lambda: None)
    notices.warn("and another")
    assert len(sent) == 1


def test_the_pace_of_a_text_stands_on_the_node_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    told: list[Any] = []
    server = SimpleNamespace(
        client_id="someone",
        send_progress_text=lambda *given: sent.append(given),
        send_sync=lambda *given: told.append(given),
    )
    monkeypatch.setattr(front_end, "running_server", lambda: server)
    front_end.hear_notices()
    front_end.hear_notices()
    with in_run("first"):
        token_rate.tell(token_rate.Pace(3, 0.25, 0.5, 2 * 10**9))
    words = "3 tokens, the first after 0.25 s, then 4.0 a second: 2.00 GB a token, 8 GB/s"
    assert sent == [(words, "9", "someone")]
    assert told == [(front_end.WORDS, {"node": "9", "words": words}, "someone")], "the page may keep it"
    server.client_id = None
    with in_run("first"):
        token_rate.tell(token_rate.Pace(3, 0.25, 0.5, 2 * 10**9))
    assert len(sent) == 1, "nobody is there to see it"

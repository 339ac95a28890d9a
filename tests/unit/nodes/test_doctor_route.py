"""The doctor for the page's menu: its text as the node gives it, a server that goes on meanwhile, a sentence where it fails."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from fusestream.nodes import doctor
from fusestream.nodes.doctor import Doctor
from fusestream.nodes.page import front_end
from fusestream.nodes.page.one_at_a_time import OneAtATime

LONG = 10.0  # seconds: reached only where the test fails


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As much of ComfyUI's as the route asks for. `at_work`: prompts that run or wait."""
    made = SimpleNamespace(at_work=0, routes=web.RouteTableDef())
    made.prompt_queue = SimpleNamespace(get_tasks_remaining=lambda: made.at_work)
    for module in (doctor, front_end):
        monkeypatch.setattr(module, "running_server", lambda: made)
    return made


class Client:
    """Of a request, as much as says whether it is there still."""

    has_left = False

    def is_closing(self) -> bool:
        return self.has_left


def request_of(client: Client) -> Any:
    return SimpleNamespace(transport=client)


def ask() -> web.Response:
    return asyncio.run(doctor.answer(request_of(Client())))


def test_it_has_an_address_of_the_server(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor.attach()
    (route,) = server.routes
    assert (route.method, route.path, route.handler) == ("GET", "/fusestream/doctor", doctor.answer)
    monkeypatch.setattr(doctor, "running_server", lambda: None)
    doctor.attach()  # a graph that is run without a server


def test_it_says_what_the_node_says_and_nothing_else(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(doctor, "examined", lambda measure: asked.append(measure) or "all of it\n")
    answer = ask()
    assert (answer.status, answer.text) == (200, Doctor.execute(measure=True).args[0])
    assert asked == [True, True] and not server.at_work


def test_it_measures_nothing_while_a_graph_runs(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(doctor, "examined", lambda measure: asked.append(measure) or "all of it\n")
    server.at_work = 1
    text = ask().text
    assert asked == [False] and text is not None
    assert text.startswith("all of it\n\nRates were not measured") and "Ask again" in text


def test_a_failure_is_a_sentence(server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(measure: bool) -> str:
        raise OSError(f"the disk is gone ({measure=})")

    monkeypatch.setattr(doctor, "examined", fail)
    answer = ask()
    assert answer.status == 500 and not server.at_work
    assert answer.text is not None
    assert answer.text.startswith("The doctor stopped: OSError: the disk is gone (measure=True).")


def test_the_server_goes_on_meanwhile_and_two_do_not_measure_at_once(
    server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop lets the examination end: one that ran in it would wait for itself."""
    running, ran, go_on = [], [], threading.Event()

    def wait(measure: bool) -> str:
        running.append(measure)
        ran.append(measure)
        assert go_on.wait(LONG) and len(running) == 1, "in the event loop, or two at once"
        running.pop()
        return "all of it\n"

    async def both() -> list[web.Response]:
        left = Client()
        asked = [asyncio.create_task(doctor.answer(request_of(one))) for one in (Client(), Client(), left)]
        while not running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # room for the second one to start, if it may
        left.has_left = True
        assert (await asyncio.wait_for(asked.pop(), LONG)).status == 400, "it waits no longer"
        go_on.set()
        return await asyncio.wait_for(asyncio.gather(*asked), LONG)

    monkeypatch.setattr(doctor, "examined", wait)
    monkeypatch.setattr(doctor, "_examining", OneAtATime())
    answers = asyncio.run(both())
    assert [answer.text for answer in answers] == ["all of it\n"] * 2 and not server.at_work
    assert len(ran) == 2, "nothing is examined for a client that has left"

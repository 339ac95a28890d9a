"""The estimate of an open workflow from a real server: asked before anything was queued, and again when it has run."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from bed import tiny
from bed.client import Client, Workflow
from bed.outcome import BUDGET, LOADER, name_of, streamed
from bed.server import Server

PATH = "/fusestream/estimate"


def asked(server: Server, workflow: Workflow, **headers: str) -> list[dict[str, Any]]:
    """Of the model's loader. While a prompt is still being taken from the queue the server is busy, and the page asks again."""
    body, told = json.dumps({"prompt": workflow}).encode(), {"busy": True}
    until = time.monotonic() + 20
    while told.get("busy") and time.monotonic() < until:
        time.sleep(0.05)
        request = urllib.request.Request(server.url + PATH, body, {"Content-Type": "application/json", **headers})
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.loads(answer.read())
    found: list[dict[str, Any]] = told["loaders"][name_of(workflow, LOADER)]
    return found


@pytest.mark.deep
def test_before_and_after_a_run(server: Server, client: Client, workflow: Workflow) -> None:
    edited = streamed(workflow, BUDGET + 0.0007)  # a budget of its own: nobody else has sampled with it
    tiny.node_of(edited, "KSampler")["inputs"].update(steps=4, seed=31)
    (told,) = asked(server, edited)
    assert told["sampler"] == name_of(edited, "KSampler") and told["steps"] == 4
    assert told["verdict"] == "STREAMS" and 0 < told["window"] < told["taken"] < told["free"]
    queue = json.loads(urllib.request.urlopen(server.url + "/queue").read())
    assert not any(queue.values()), "nothing was queued"
    run = client.run(edited)
    assert run.error is None, run.error
    (told,) = asked(server, edited)
    assert told["source"] == "MEASURED" and told["step"] and told["all"]


def test_a_page_of_another_site_is_told_nothing(server: Server, workflow: Workflow) -> None:
    """ComfyUI's own check, which stands before all of its addresses."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        asked(server, workflow, Origin="http://example.com", Host="127.0.0.1:8188")
    assert refused.value.code == 403

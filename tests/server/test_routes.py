"""Every address of ours on a real server, against whatever somebody may send: a sentence for what is wrong, never a fault of the
server's. The addresses are those of the server's own table: one that is new is tried as well, and one that takes a body has to say
here what a sound one is.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bed.server import Server

LOADER = "FuseStreamDiffusionModelLoader"
GRAPH = {
    "1": {"class_type": LOADER, "inputs": {"model_name": "none.safetensors", "kernels": "auto", "vram_budget": 1.0}},
    "2": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
    "3": {
        "class_type": "KSampler",
        "inputs": {"model": ["1", 0], "latent_image": ["2", 0], "steps": 4, "cfg": 1.0, "seed": 0},
    },
}
# A sound body for each address that takes one.
BODIES: dict[str, dict[str, Any]] = {
    "/fusestream/estimate": {"prompt": GRAPH},
    "/fusestream/models/release": {"id": 10**6},
}
BY_ADDRESS = ("/fusestream/example_inputs/{name}",)  # asked without a body
# Values in the place of another one; the last ones are no JSON, or no number that anybody could mean.
WRONG = (
    "null", "true", "-1", "1.5", '"x"', '"\\ud800"', "[]", "{}", "[[]]", '["1", 0]', '["3", 0]', '["1", -7]', '{"a": {"b": []}}',
    '"\\u0000"', '"../../x"', "1e308", "1e999", "NaN", "Infinity", "-Infinity", "9" * 400, "9" * 100_000, "[" * 100_000,
)  # fmt: skip
ODD_QUERY = "?theme=%3Cscript%3E&theme=&word=%00%ff&id=..%2f..&" + "x" * 500
PLACE = re.compile(r"{\w+}")  # in an address
ODD_PARTS = ("0", "-1", "9" * 400, "%00", "%ff", "..%2f..", "%3Cscript%3E", "x" * 500)

# What aiohttp, asyncio and the estimate note of what nobody had thought of.
FAULTS = ("Error handling request", "never retrieved", "no estimate")

Answer = tuple[int, str, str]  # status, type of content, text


@pytest.fixture(scope="module")
def routes(server: Server) -> list[tuple[str, str]]:
    """Of the server's table: method and path of each of ours."""
    told: Any = server.get("/tests/routes")
    return [(method, path) for method, path in told if method != "HEAD"]


@pytest.fixture(autouse=True)
def nothing_is_said(server: Server) -> Iterator[None]:
    """Whatever was sent, the server notes no fault of its own, and goes on."""
    before = len(server.log())
    yield
    log = server.log()[before:]
    assert not any(fault in log for fault in FAULTS), log[-4000:]
    assert server.get("/queue")


def all_of(server: Server, asked: list[Callable[[aiohttp.ClientSession], Awaitable[Answer]]]) -> list[Answer]:
    async def ask() -> list[Answer]:
        async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(60)) as session:
            return await asyncio.gather(*(one(session) for one in asked))

    return asyncio.run(ask())


def sent(
    method: str, path: str, body: bytes | None = None, **headers: str
) -> Callable[[aiohttp.ClientSession], Awaitable[Answer]]:
    async def ask(session: aiohttp.ClientSession) -> Answer:
        from yarl import URL

        named = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        async with session.request(method, URL(path, encoded=True), data=body, headers=named) as answer:
            return answer.status, answer.content_type, await answer.text(errors="replace")

    return ask


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def read(answer: Answer) -> Any:
    return json.loads(answer[2], parse_constant=refuse_constant)


def is_refused(answer: Answer, *statuses: int) -> bool:
    """With one plain sentence."""
    status, kind, _ = answer
    if status not in statuses or kind != "application/json":
        return False
    sentence = read(answer)["error"]
    return isinstance(sentence, str) and sentence.endswith(".") and "\n" not in sentence and len(sentence) < 400


def posts(routes: list[tuple[str, str]]) -> list[str]:
    found = [path for method, path in routes if method == "POST" and path not in BY_ADDRESS]
    assert sorted(found) == sorted(BODIES), "each has a sound body above"
    return found


def test_a_sound_body_is_taken(server: Server, routes: list[tuple[str, str]]) -> None:
    paths = posts(routes)
    answers = all_of(server, [sent("POST", path, json.dumps(BODIES[path]).encode()) for path in paths])
    assert {path: answer[0] for path, answer in zip(paths, answers, strict=True)} == {
        "/fusestream/estimate": 200,
        "/fusestream/models/release": 404,  # there is no such model
    }


def bomb() -> bytes:
    return gzip.compress(bytes(64 << 20), 1, mtime=0)


SOUND = "a sound body"
# What is sent, its headers, and the statuses of its refusal.
NO_BODIES: dict[str, tuple[Callable[[], bytes | str], dict[str, str], tuple[int, ...]]] = {
    "nothing": (lambda: b"", {}, (400,)),
    "words": (lambda: b"no json", {}, (400,)),
    "no UTF-8": (lambda: b"\xff\xfe", {}, (400,)),
    "deep objects": (lambda: b'{"a":' * 100_000, {}, (400, 413)),
    "a name twice": (lambda: b'{"prompt": {}, "id": 1, "prompt": {}, "id": 1}', {}, (400,)),
    **{f"{text[:20]}, {len(text)}": (text.encode, {}, (400, 413)) for text in WRONG if text != "{}"},
    "unknown charset": (lambda: SOUND, {"Content_Type": "application/json; charset=klingon"}, (400,)),
    "other charset": (lambda: SOUND, {"Content_Type": "application/json; charset=utf-16"}, (400,)),
    "long charset": (lambda: SOUND, {"Content_Type": "application/json; charset=" + "x" * 2000}, (400,)),
    "no gzip": (lambda: SOUND, {"Content_Encoding": "gzip"}, (400,)),
    "bomb": (bomb, {"Content_Encoding": "gzip"}, (413,)),
    "gzip as it is": (bomb, {}, (400, 413)),
    "50 MB": (lambda: b" " * (50 << 20), {}, (413,)),
}


@pytest.mark.parametrize("what", NO_BODIES)
def test_what_is_no_body(server: Server, routes: list[tuple[str, str]], what: str) -> None:
    make, headers, statuses = NO_BODIES[what]
    body, paths = make(), posts(routes)
    bodies = [json.dumps(BODIES[path]).encode() if isinstance(body, str) else body for path in paths]
    answers = all_of(server, [sent("POST", path, one, **headers) for path, one in zip(paths, bodies, strict=True)])
    for path, answer in zip(paths, answers, strict=True):
        assert is_refused(answer, *statuses), (path, answer)


def with_wrong_values(body: Any) -> Iterator[str]:
    """The body as JSON, with a wrong value in each place in turn."""
    if isinstance(body, dict):
        for key, value in body.items():
            others = "".join(f"{json.dumps(name)}: {json.dumps(one)}, " for name, one in body.items() if name != key)
            for wrong in with_wrong_values(value):
                yield f"{{{others}{json.dumps(key)}: {wrong}}}"
    yield from WRONG


@pytest.mark.parametrize("path", sorted(BODIES))
def test_wrong_values_in_each_place(server: Server, path: str) -> None:
    bodies = list(with_wrong_values(BODIES[path]))
    assert len(bodies) >= 2 * len(WRONG)
    start = time.monotonic()
    for body, answer in zip(
        bodies, all_of(server, [sent("POST", path, body.encode()) for body in bodies]), strict=True
    ):
        assert answer[0] in (200, 404) or is_refused(answer, 400, 413), (body[-200:], answer)
        read(answer)
    assert time.monotonic() - start < 60


def test_odd_addresses(server: Server, routes: list[tuple[str, str]]) -> None:
    paths = [path for method, path in routes if method == "GET"]
    assert len(paths) >= 5
    odd = [f"{PLACE.sub(part, path)}{ODD_QUERY}" for path in paths if "{" in path for part in ODD_PARTS]
    odd += [f"{path}{ODD_QUERY}" for path in paths if "{" not in path]
    for path, answer in zip(odd, all_of(server, [sent("GET", path, b"[" * 5000) for path in odd]), strict=True):
        assert answer[0] == 200 or is_refused(answer, 400, 403, 404), (path, answer)
    assert set(BY_ADDRESS) <= {path for _, path in routes}
    named = [f"{PLACE.sub(part, path)}{ODD_QUERY}" for path in BY_ADDRESS for part in ODD_PARTS]
    for path, answer in zip(named, all_of(server, [sent("POST", path, b"[" * 5000) for path in named]), strict=True):
        assert is_refused(answer, 400, 403, 404), (path, answer)


def large(name: str) -> dict[str, Any]:
    """A loader with a long row of nodes behind it and samplers of what comes out; another loader with a sampler of its own."""
    graph: dict[str, Any] = json.loads(json.dumps(GRAPH))
    graph["1"]["inputs"] = {"model_name": name}
    before = "long"
    graph[before] = graph["1"]
    for i in range(1490):  # which hand anything on
        graph[f"n{i}"] = {"class_type": "FuseStreamReport", "inputs": {"after": [before, 0]}}
        before = f"n{i}"
    for i in range(300):
        inputs = {**graph["3"]["inputs"], "model": [before, 0], "latent_image": [f"s{i - 1}" if i else "2", 0]}
        graph[f"s{i}"] = {"class_type": "KSampler", "inputs": inputs}
    return graph | {
        f"of {node}": {"class_type": "SaveLatent", "inputs": {"samples": [node, 0]}} for node in ("3", "s299")
    }


def told(answer: Answer) -> dict[str, list[str]]:
    """Of each loader the verdicts, or the reasons why there are none."""
    assert answer[0] == 200, answer
    loaders = read(answer)["loaders"].items()
    return {name: [one.get("unknown") or one["verdict"] for one in found] for name, found in loaders}


def test_a_large_graph_takes_two_seconds_and_a_client_that_leaves_none(
    server: Server, routes: list[tuple[str, str]], files: list[Path]
) -> None:
    """A body that ends in the middle, a client that does not wait for the answer: many of them, and the next one waits for none."""
    body = json.dumps({"prompt": large(files[0].name)}).encode()
    ask = sent("POST", "/fusestream/estimate", body)
    all_of(server, [ask])  # torch is there now, and the file was read
    start = time.monotonic()
    (answer,) = all_of(server, [ask])
    assert time.monotonic() - start < 10, "of which two are its own; the machine may be busy"
    found = told(answer)
    assert found["1"] == ["WHOLE"] and set(found["long"]) <= {"WHOLE", "tooMuch"}
    for path in posts(routes):
        for sent_body, claimed in ((b'{"prompt": {', 1000), *((body, len(body)),) * 10):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {claimed}\r\n\r\n"
                client.sendall(head.encode() + sent_body)
    start = time.monotonic()
    small = {**GRAPH, "1": {"class_type": LOADER, "inputs": {"model_name": files[0].name}}}
    (answer,) = all_of(server, [sent("POST", "/fusestream/estimate", json.dumps({"prompt": small}).encode())])
    assert told(answer) == {"1": ["WHOLE"]} and time.monotonic() - start < 10

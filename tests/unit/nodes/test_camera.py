"""A page's camera: who may send frames, how many are held, and how a run with one ends."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from PIL import Image

from fusestream.fusion.base import notices
from fusestream.nodes import camera, live
from fusestream.nodes.page import between_prompts

LONG = 10.0  # seconds: reached only where the test fails


def jpeg(grey: int, width: int = 16, height: int = 8) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", (width, height), (grey, grey, grey)).save(written, "JPEG")
    return written.getvalue()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What the page hears."""
    heard: list[dict[str, Any]] = []
    server = SimpleNamespace(client_id="page", routes=web.RouteTableDef(), prompt_queue=SimpleNamespace())
    monkeypatch.setattr(camera, "running_server", lambda: server)
    monkeypatch.setattr(camera, "tell", lambda _event, said: heard.append(said))
    monkeypatch.setattr(camera, "_open", {})
    monkeypatch.setattr(between_prompts, "_always", [])
    yield heard
    camera.close_all()


class Clock:
    """Time that passes as it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def made(clock: Any = None, fps: float = 10.0) -> camera.Camera:
    return camera.Camera("7", 32, 16, fps, clock or Clock())


def greys(frames: list[torch.Tensor]) -> list[int]:
    return [round(float(frame.float().mean())) for frame in frames]


def test_it_asks_its_page_until_that_answers_and_says_when_it_ends(told: list[dict[str, Any]]) -> None:
    clock = Clock()
    one = made(clock)
    frames = one.frames()
    for clock.now in (0.0, 0.5, 1.0, 1.5):
        assert next(frames) is None
    assert told == 2 * [{"node": "7", "width": 32, "height": 16, "fps": 10.0, "word": one.word}]
    assert camera.of(one.word) is one and camera.of("") is None
    one.hang_up = lambda: told.append({"hung": "up"})
    clock.now = 9.0
    assert next(frames) is None and len(told) == 2, "it is there now"
    one.stop()
    assert list(frames) == [] and told[2:] == [{"node": "7", "word": None}, {"hung": "up"}]
    assert camera.of(one.word) is None
    assert made().word != one.word


def test_the_oldest_go_and_so_do_those_that_come_too_fast(told: list[dict[str, Any]]) -> None:
    clock = Clock()
    one = made(clock)
    for i in range(10):
        clock.now = i * 0.1
        one.put(jpeg(20 * i))
        one.put(jpeg(255))  # at once
    one.stop()
    found = list(one.frames())
    assert greys(found) == [160, 180] and found[0].shape == (8, 16, 3) and found[0].dtype is torch.uint8


def test_a_camera_that_stops_ends_the_video_with_a_word(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(notices, "warn", said.append)
    clock = Clock()
    one = made(clock)
    frames = one.frames()
    one.put(jpeg(3))
    assert next(frames) is not None
    clock.now = camera.LATER
    assert next(frames) is None
    clock.now += 0.1
    assert list(frames) == []
    assert said == ["The camera stopped after 1 frames: nothing came for 5 s. The video ends there."]
    none = made(Clock()).frames()
    assert next(none) is None
    late = Clock()
    never = made(late).frames()
    assert next(never) is None
    late.now = camera.FIRST + 0.1
    with pytest.raises(camera.NoCamera, match="No frame came from a camera in 60 s"):
        next(never)


def test_a_page_without_a_camera_ends_the_run_at_once(told: list[dict[str, Any]]) -> None:
    one = made()
    frames = one.frames()
    assert next(frames) is None
    one.refuse("No camera: Permission denied" + 1000 * "!")
    with pytest.raises(camera.NoCamera, match=r"^No camera: Permission denied!{272}\. Or connect frames or video\.$"):
        next(frames)
    assert told[-1] == {"node": "7", "word": None}


def test_without_a_page_there_is_no_camera(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for server in (None, SimpleNamespace(client_id=None)):
        monkeypatch.setattr(camera, "running_server", lambda server=server: server)
        with pytest.raises(camera.NoCamera, match="Connect frames or video"):
            made()
    assert not camera._open


def test_a_run_with_a_camera_is_never_taken_from_the_cache() -> None:
    once, again = (live.LiveVideo.fingerprint_inputs(steps=1) for _ in range(2))
    assert [once] != [again]
    assert live.LiveVideo.fingerprint_inputs(frames=None) == live.LiveVideo.fingerprint_inputs(video=None, steps=1)


def test_what_is_no_picture_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gif = io.BytesIO()
    Image.new("RGB", (4, 4)).save(gif, "GIF")
    for sent in (b"", b"<html>", jpeg(1)[:200], gif.getvalue()):
        with pytest.raises(camera.WrongPicture, match="is no picture"):
            camera.pixels_of(sent)
    bomb = bytearray(jpeg(1))
    at = bomb.index(b"\xff\xc0") + 5  # of its header: height and width
    bomb[at : at + 4] = 2 * (65500).to_bytes(2, "big")
    with pytest.raises(camera.WrongPicture, match=r"a picture of 65500x65500\. Choose a smaller width and height\."):
        camera.pixels_of(bytes(bomb))
    monkeypatch.setattr(camera, "MOST_PIXELS", 100)
    with pytest.raises(camera.WrongPicture, match="a picture of 16x8"):
        camera.pixels_of(jpeg(1))


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://127.0.0.1:8188", "127.0.0.1:8188", True),
        ("https://Example.org", "example.org", True),
        ("http://127.0.0.1:8189", "127.0.0.1:8188", False),
        ("http://evil.example", "127.0.0.1:8188", False),
        ("http://127.0.0.1:8188.evil.example", "127.0.0.1:8188", False),
        ("null", "127.0.0.1:8188", False),
        ("http://[", "127.0.0.1:8188", False),
        (None, "127.0.0.1:8188", False),
        ("http://127.0.0.1:8188", None, False),
    ],
)
def test_only_pages_of_this_server(origin: str | None, host: str | None, own: bool) -> None:
    assert camera.is_own_page(origin, host) is own


def test_frames_come_over_the_address_and_nobody_elses(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(camera, "MOST_BYTES", 4096)

    async def play() -> None:
        app = web.Application()
        camera.attach()
        app.add_routes(camera.running_server().routes)
        async with TestClient(TestServer(app)) as client:
            own = {"Origin": f"http://{client.host}:{client.port}"}
            one = camera.Camera("7", 0, 0, 1000.0)
            address = f"{camera.PATH}?word={one.word}"
            for headers, path, status in (
                ({"Origin": "http://evil.example"}, address, 403),
                ({}, address, 403),
                (own, f"{camera.PATH}?word=guessed", 404),
                (own, camera.PATH, 404),
            ):
                assert (await client.get(path, headers=headers)).status == status
            taken: list[torch.Tensor] = []
            taker = threading.Thread(target=lambda: taken.extend(f for f in one.frames() if f is not None))
            taker.start()
            async with client.ws_connect(address, headers=own) as socket:
                assert (await client.get(address, headers=own)).status == 409
                for grey in (10, 20, 30):
                    await socket.send_bytes(jpeg(grey))
                    while len(taken) < grey // 10:
                        await asyncio.sleep(0.005)
                await socket.send_str("nothing that is known")
                await socket.send_str(camera.STOP)
                message = await socket.receive(timeout=LONG)
                assert message.type is aiohttp.WSMsgType.CLOSE, "the run is over"
            taker.join(LONG)
            assert greys(taken) == [10, 20, 30]
            assert (await client.get(address, headers=own)).status == 404, "closed with its run"
            large = camera.Camera("7", 0, 0, 1000.0)
            async with client.ws_connect(f"{camera.PATH}?word={large.word}", headers=own) as socket:
                await socket.send_bytes(bytes(camera.MOST_BYTES + 1))
                message = await socket.receive(timeout=LONG)
                assert message.type is aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
            while large.hang_up is not None:
                await asyncio.sleep(0.005)
            async with client.ws_connect(f"{camera.PATH}?word={large.word}", headers=own) as socket:
                (end,) = between_prompts._always
                await asyncio.to_thread(end)  # the prompt is over, whatever its node did
                assert (await socket.receive(timeout=LONG)).type is aiohttp.WSMsgType.CLOSE

    asyncio.run(asyncio.wait_for(play(), 3 * LONG))

"""The panel's side of the server: models in memory by name alone, letting go of one now or after the prompt, the last reports."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_management as mm
import comfy.model_patcher
import execution
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from comfy_execution.graph import DynamicPrompt
from comfy_execution.progress import ProgressRegistry
from PIL import Image

from fusestream import checkpoints
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.report.data import NodeTime, Report, Sampling
from fusestream.nodes.page import between_prompts, front_end, in_memory, kept_reports, node_times, panel
from fusestream.nodes.page.node_times import NodeTimes

LONG = 10.0  # seconds: reached only where the test fails


class Server(SimpleNamespace):
    """As much of ComfyUI's as is asked for, with its real queue. told: what was sent to all pages."""

    def __init__(self) -> None:
        super().__init__(routes=web.RouteTableDef(), told=[])
        self.prompt_queue: Any = execution.PromptQueue(self)

    def queue_updated(self) -> None:
        pass

    def send_sync(self, event: str, told: Any, sid: str | None = None) -> None:
        assert sid is None, "to all pages"
        self.told.append(event)

    def begin(self) -> int:
        """A prompt runs now; its number in the queue."""
        self.prompt_queue.put((0, "prompt", {}, {}, [], {}))
        number: int = self.prompt_queue.get()[1]
        return number

    def end(self, number: int) -> None:
        self.prompt_queue.task_done(number, {}, None)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    for module in (between_prompts, panel):
        monkeypatch.setattr(module, "running_server", lambda: made)
    for module, name, value in (
        (between_prompts, "_waiting", []),
        (between_prompts, "_always", []),
        (panel, "_asked", set()),
    ):
        monkeypatch.setattr(module, name, value)
    kept_reports._kept.clear()
    monkeypatch.setattr(kept_reports, "_since", 0.0)
    between_prompts.attach()
    panel.attach()
    return made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("wan_t2v", tmp_path_factory.mktemp("models"))


@pytest.fixture
def loaded(path: Path) -> Iterator[tuple[Any, Any]]:
    """A streamed model and one of stock's, both in memory."""
    mm.current_loaded_models.clear()
    streamed = load_streamed_diffusion_model(str(path), 1.0)
    weights = torch.nn.Linear(64, 64)
    stocks = comfy.model_patcher.ModelPatcher(weights, torch.device("cpu"), torch.device("cpu"))
    mm.load_models_gpu([streamed, stocks])
    yield streamed, stocks
    mm.unload_all_models()


def get(handler: Any, **request: Any) -> web.Response:
    asked: Any = SimpleNamespace(**request)
    answer: web.Response = asyncio.run(handler(asked))
    return answer


def told(answer: web.Response) -> Any:
    assert answer.text is not None
    return json.loads(answer.text)


def models() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = told(get(panel.models))["models"]
    return found


def release(body: bytes) -> tuple[int, Any]:
    async def asked() -> tuple[int, Any]:
        app = web.Application()
        app.router.add_post(panel.RELEASE, panel.release)
        async with TestClient(TestServer(app)) as client:
            answer = await client.post(panel.RELEASE, data=body)
            return answer.status, await answer.json()

    return asyncio.run(asked())


def let_go(id: Any) -> tuple[int, Any]:
    return release(json.dumps({"id": id}).encode())


def named(name: str) -> dict[str, Any]:
    (found,) = (model for model in models() if model["name"] == name)
    return found


def test_the_addresses_are_the_servers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(route.method, route.path) for route in server.routes] == [
        ("GET", "/fusestream/models"),
        ("POST", "/fusestream/models/release"),
        ("GET", "/fusestream/reports"),
        ("GET", "/fusestream/reports/{id}/picture"),
        ("GET", "/fusestream/reports/{id}/{other}"),
        ("GET", "/fusestream/reports/{id}/{other}/picture"),
    ]
    monkeypatch.setattr(panel, "running_server", lambda: None)
    monkeypatch.setattr(between_prompts, "running_server", lambda: None)
    panel.attach()  # a graph that is run without a server
    between_prompts.attach()
    done: list[int] = []
    assert between_prompts.do(lambda: done.append(1)) and done == [1]
    assert front_end.running_server() is None


def test_each_model_is_told_of_once_and_without_its_folder(server: Server, loaded: tuple[Any, Any], path: Path) -> None:
    streamed, stocks = loaded
    mm.load_models_gpu([streamed.clone()])  # which has the same weights
    assert sorted(model["name"] for model in models()) == sorted([path.name, "Linear"])
    ours, theirs = named(path.name), named("Linear")
    stream = streamed.stream
    assert ours["streams"] and ours["kind"] == "WAN21" and ours["device"] == "cpu"
    assert (ours["role"], ours["family"]) == ("diffusion", "Wan")
    assert ours["vram"] == streamed.loaded_size() > ours["resident"] + ours["window"] > 0
    assert (ours["resident"], ours["window"]) == (
        stream.residency.pager.plan.resident_bytes,
        stream.residency.pager.plan.window_bytes,
    )
    assert (
        not theirs["streams"]
        and theirs["role"] == theirs["family"] == ""
        and theirs["vram"] == stocks.loaded_size() > 0
        and theirs["pinned"] == 0
    )
    assert not any(model["waiting"] for model in models())
    assert str(path.parent) not in json.dumps(models())
    assert get(panel.models).headers["Cache-Control"] == "no-store"


def test_files_of_all_kinds_of_models_are_named(server: Server, loaded: tuple[Any, Any]) -> None:
    _, stocks = loaded
    for given, name in (
        (("/home/somebody/models/unet.safetensors", {}), "unet.safetensors"),
        ((["/home/somebody/models/clip_l.safetensors", "/x/t5.safetensors"], []), "clip_l.safetensors"),
        (({"sd": 1}, {}), "Linear"),
        ((), "Linear"),
    ):
        stocks.cached_patcher_init = (None, given)
        assert named(name)["kind"] == "Linear"


def test_what_is_pinned_is_counted(server: Server, loaded: tuple[Any, Any], path: Path) -> None:
    for what, nbytes in (("pinned RAM", 100), ("registered RAM", 20), ("managed RAM", 3), ("VRAM", 4000)):
        loaded[0].stream.residency.ledger.hold(what, nbytes)
    assert named(path.name)["pinned"] == 123


def test_a_model_that_is_changed_meanwhile_has_what_it_held_before(
    server: Server, loaded: tuple[Any, Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = named(path.name)["vram"]

    def change() -> int:
        raise RuntimeError("dictionary changed size during iteration")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(loaded[0], "loaded_size", change)
        assert named(path.name)["vram"] == before


def test_one_is_let_go_of_and_comes_back(server: Server, loaded: tuple[Any, Any], path: Path) -> None:
    streamed, stocks = loaded
    id = named(path.name)["id"]
    assert let_go(id) == (200, {"state": "released"})
    assert streamed.stream.residency.held == 0 and [model["name"] for model in models()] == ["Linear"]
    assert server.told == ["fusestream.panel"]
    assert let_go(id) == (404, {"state": "gone"})
    assert let_go(named("Linear")["id"] + 1000) == (404, {"state": "gone"})
    assert server.told == ["fusestream.panel"] and stocks.loaded_size() > 0
    mm.load_models_gpu([streamed])
    assert named(path.name)["id"] == id and named(path.name)["vram"] > 0


def test_while_a_prompt_runs_it_waits_for_its_end(server: Server, loaded: tuple[Any, Any], path: Path) -> None:
    streamed, stocks = loaded
    running = server.begin()
    id = named(path.name)["id"]
    assert let_go(id) == let_go(id) == (200, {"state": "waiting"})
    assert streamed.stream.residency.held > 0 and named(path.name)["waiting"] and not named("Linear")["waiting"]
    server.prompt_queue.put((1, "next", {}, {}, [], {}))  # which does not keep it from going
    server.end(running)
    assert streamed.stream.residency.held == 0 and [model["name"] for model in models()] == ["Linear"]
    assert server.told[-1] == "fusestream.panel" and stocks.loaded_size() > 0
    mm.load_models_gpu([streamed])
    assert not named(path.name)["waiting"]
    server.end(server.begin())
    assert named(path.name)["vram"] > 0, "it was asked for once"


def test_no_prompt_begins_meanwhile(server: Server) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        assert go_on.wait(LONG)

    server.prompt_queue.put((0, "prompt", {}, {}, [], {}))
    begun: list[Any] = []
    working = threading.Thread(target=between_prompts.do, args=(work,))
    working.start()
    assert inside.wait(LONG)
    beginning = threading.Thread(target=lambda: begun.append(server.prompt_queue.get()))
    beginning.start()
    beginning.join(0.2)
    assert not begun
    go_on.set()
    for thread in (working, beginning):
        thread.join(LONG)
    assert begun


def test_what_fails_after_a_prompt_ends_nothing_else(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def fail() -> None:
        raise OSError("the disk is gone")

    running = server.begin()
    for work in (fail, lambda: done.append(1)):
        assert not between_prompts.do(work)
    server.end(running)
    assert done == [1] and "the disk is gone" in caplog.text and server.prompt_queue.history


@pytest.mark.parametrize(
    "body",
    [b"", b"no json", b"\xff", b"[]", b"3", b"{}", b'{"id": "1"}', b'{"id": null}', b'{"id": true}', b'{"id": 1.5}'],
)
def test_bad_input_is_refused(server: Server, loaded: tuple[Any, Any], body: bytes) -> None:
    before = models()
    status, answer = release(body)
    assert status == 400 and "number of a model" in answer["error"]
    assert models() == before


def report(title: str) -> Report:
    return Report(title, "Its blocks stream.", policy="kernels auto, precise")


def test_the_last_reports_are_kept_the_newest_first(server: Server) -> None:
    for i in range(kept_reports.MOST + 2):
        kept_reports.keep(report(f"model {i}"))
    found = told(get(panel.reports))["reports"]
    assert [one["title"] for one in found] == [f"model {i}" for i in reversed(range(2, kept_reports.MOST + 2))]
    assert all(one["policy"] == "kernels auto, precise" and "Its blocks stream." in one["text"] for one in found)
    assert all(one["seconds"] == one["stall"] == 0 and one["run"] is None for one in found)
    ids = [one["id"] for one in found]
    for theme, id in itertools.product(("dark", "light"), (ids[0], ids[-1])):
        drawn = get(panel.picture, query={"theme": theme}, match_info={"id": str(id)})
        assert drawn.status == 200 and drawn.content_type == "image/png" and isinstance(drawn.body, bytes)
        picture = Image.open(BytesIO(drawn.body)).convert("L")
        ground = picture.getpixel((2, 2))
        assert picture.width > 500 and isinstance(ground, int) and (ground < 80) == (theme == "dark")


@pytest.mark.parametrize(("pixels", "size"), [((81, 480, 832), "832x480"), ((0, 0, 0), "")])
def test_of_a_sampling_size_and_times_are_told(server: Server, pixels: tuple[int, int, int], size: str) -> None:
    kept_reports.keep(replace(report("model"), sampling=Sampling(30, 0.8, 24.0, pixels=pixels)))
    (found,) = told(get(panel.reports))["reports"]
    assert found["run"] == {"frames": pixels[0], "size": size, "steps": 30, "all": "24 s", "step": "0.8 s"}


def test_a_nodes_report_gets_the_times_of_what_runs_after_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the prompt's end, once; the next prompt leaves it as it is."""
    ran = NodeTimes(clock=iter(range(100)).__next__)
    monkeypatch.setattr(node_times, "_times", ran)
    progress = ProgressRegistry("prompt", DynamicPrompt({"1": {"class_type": "VAEDecode"}, "2": {"class_type": "Odd"}}))
    running = server.begin()
    ran.begin(progress, "1")
    ran.begin(progress, "2")
    ran.end(progress, "2")
    assert node_times.so_far() == (NodeTime("Odd", 1.0),), "the other one still runs"
    kept_reports.keep(replace(report("by a node"), nodes=node_times.so_far()))
    ran.end(progress, "1")
    server.end(running)
    (found,) = kept_reports.kept()
    assert found.report.nodes == (NodeTime("VAE Decode", 3.0), NodeTime("Odd", 1.0)) and "VAE Decode 3 s" in found.text
    assert node_times.so_far() == ()
    running = server.begin()
    other = ProgressRegistry("next", progress.dynprompt)
    ran.begin(other, "2")
    ran.end(progress, "2")  # of a prompt that is over
    ran.end(other, "1")  # which ComfyUI still had
    server.end(running)
    assert kept_reports.kept() == [found]


def test_comfyuis_progress_tells_of_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    class Registry(ProgressRegistry):
        pass

    ran = NodeTimes()
    node_times._watch(Registry, ran)
    progress = Registry("prompt", DynamicPrompt({name: {"class_type": "VAEDecode"} for name in "123"}))
    for name in "12":
        progress.start_progress(name)
        progress.finish_progress(name)
    progress.finish_progress("3")
    assert progress.nodes.keys() == set("123"), "ComfyUI's own"
    (found,) = ran.so_far(str.lower)
    assert found.name == "vaedecode" and found.count == 2 and 0 <= found.seconds < LONG


@pytest.mark.parametrize(
    ("id", "theme", "status"), [("0", "dark", 404), ("x", "dark", 404), ("../1", "dark", 404), ("1", "pink", 400)]
)
def test_a_picture_that_is_none_is_refused(server: Server, id: str, theme: str, status: int) -> None:
    kept_reports.keep(report("model"))
    answer = get(panel.picture, query={"theme": theme}, match_info={"id": id})
    assert answer.status == status and told(answer)["error"]


def test_two_reports_are_told_and_drawn_side_by_side(server: Server) -> None:
    for name in ("before", "now"):
        kept_reports.keep(report(name))
    now, before = (str(one["id"]) for one in told(get(panel.reports))["reports"])
    both = {"id": before, "other": now}
    said = told(get(panel.pair, match_info=both))["text"]
    assert said.startswith("A: before | kernels auto, precise\nB: now | ")
    one = get(panel.picture, query={}, match_info={"id": now})
    two = get(panel.picture, query={"theme": "light"}, match_info=both)
    assert isinstance(one.body, bytes) and isinstance(two.body, bytes)
    assert Image.open(BytesIO(two.body)).width == 2 * Image.open(BytesIO(one.body)).width
    for answer in (panel.pair, panel.picture):
        gone = get(answer, query={}, match_info={**both, "other": "0"})
        assert gone.status == 404 and told(gone)["error"]


def test_a_prompt_leaves_a_report_of_each_model_that_streamed(
    server: Server, loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed, _ = loaded
    stream = streamed.stream

    def prompt(uses: bool, told: bool = False) -> list[str]:
        running = server.begin()
        if uses:
            with stream.bound(0):
                pass
        if told:
            kept_reports.keep(report("by a node"), streamed)
        server.end(running)
        return [one.report.title.split()[0] for one in kept_reports.kept()]

    ours = stream.path.name
    assert prompt(uses=True) == [ours]
    assert prompt(uses=False) == [ours]
    assert prompt(uses=True, told=True) == ["by", ours], "one of a model is enough"
    assert prompt(uses=True) == [ours, "by", ours]
    assert stream.residency.held > 0 and kept_reports.kept()[0].report.streams
    assert server.told == ["fusestream.panel"] * 4
    assert in_memory.is_there(named(ours)["id"])


def test_a_comfyui_whose_progress_tells_of_no_nodes_costs_their_times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy_execution import progress

    told: list[str] = []
    monkeypatch.setattr(node_times, "step_aside", lambda what, reason, instead: told.append(what))
    for without in (SimpleNamespace(start_progress=print), None):
        monkeypatch.setattr(progress, "ProgressRegistry", without)
        node_times.attach()
    assert told == ["Times of nodes in reports"] * 2

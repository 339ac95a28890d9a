"""The estimate that the page asks for while a workflow is open: of every example, of files that are not there, of odd questions."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import folder_paths
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from bed import tiny
from bed.client import Workflow
from bed.templates import EXAMPLES
from bed.templates.__main__ import WORKFLOWS
from fusestream import checkpoints, fusion
from fusestream.fusion.base.card_rates import Card
from fusestream.fusion.estimate import unread
from fusestream.fusion.estimate.plan import estimate, shape_of
from fusestream.fusion.estimate.unread import SMALL, unread_model
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.patcher.vram_estimate import RESERVE
from fusestream.fusion.report.gathering import pixels_of
from fusestream.memory.host.ram import Ram
from fusestream.nodes import estimate_route
from fusestream.nodes.graph.prompt import Kind
from fusestream.nodes.page import front_end, request_body
from fusestream.nodes.page.one_at_a_time import OneAtATime

LOADER = "FuseStreamDiffusionModelLoader"
MAY = {
    "FuseStreamLiveVideo": "frameByFrame",
    "ImageScaleToTotalPixels": "computed",
    "LoadImage": "noFile",
}  # reasons, by the node that is named
WORDS = Path(__file__).resolve().parents[3] / "nodes" / "web" / "js" / "words.js"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models")
    tiny.write_published(base)
    return base


@pytest.fixture(autouse=True)
def there(models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folders that ComfyUI looks into."""
    before = {name: folder_paths.folder_names_and_paths[name] for name in ("diffusion_models", "checkpoints")}
    for name, (_, endings) in before.items():
        monkeypatch.setitem(folder_paths.folder_names_and_paths, name, ([str(models / name)], endings))
    folder_paths.filename_list_cache.clear()
    estimate_route._unread.cache_clear()
    yield
    folder_paths.filename_list_cache.clear()


def api(name: str) -> Workflow:
    found: Workflow = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module", autouse=True)
def nodes_are_known() -> Iterator[None]:
    """Stock's own, those of comfy_extras, and ours, by the signatures that the examples are written from."""
    from bed.templates.signatures import signature

    def kind_of(class_type: str) -> Kind | None:
        try:
            told = signature(class_type)
        except KeyError:
            return None
        outputs = tuple(type for _, type in told.outputs)
        return Kind(outputs, class_type.startswith("Save"), not class_type.startswith("FuseStream"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate_route.queued, "kind_of", kind_of)
        yield


@pytest.mark.every_other
@pytest.mark.parametrize("name", [example.name for example in EXAMPLES])
def test_every_example_gets_an_estimate_or_a_reason(name: str, small_ones_too: None) -> None:
    prompt = api(name)
    found = estimate_route.estimates(prompt)
    loaders = {name for name, node in prompt.items() if node["class_type"] in estimate_route.LOADERS}
    assert found.keys() == loaders and (loaders or name == "style_transfer")
    for told in (told for of_one in found.values() for told in of_one):
        if "unknown" in told:
            assert MAY.get(prompt[told["node"]]["class_type"]) == told["unknown"], told
        else:
            assert told["verdict"] in ("WHOLE", "STREAMS") and 0 < told["taken"] <= told["free"]
            assert told["activations"] > 0 and told["steps"] > 0 and told["source"] is None, "of a CPU nobody knows"
    assert json.loads(json.dumps(found)) == found


def test_two_samplers_of_one_loader_are_told_apart() -> None:
    (told,) = estimate_route.estimates(api("with_and_without")).values()
    assert len({one["sampler"] for one in told}) == len(told) == 2


def test_on_a_card_that_is_predicted_it_tells_times_and_what_would_change_them(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card("NVIDIA GeForce RTX 2060 SUPER", (7, 5), 34, 1.65e9, 448e9)
    monkeypatch.setattr("fusestream.fusion.estimate.plan.card_of", lambda _device: card)
    prompt = api("wan2.1_t2v_1.3B")
    told = only(prompt)
    assert told["source"] == "PREDICTED" and told["step"].endswith("s") and told["all"]
    assert [one["what"] for one in told["changes"]] == ["quality", "few steps"], "the quality first, and one other"
    assert told["changes"][0]["values"] == ["Fastest"] and not told["changes"][0]["isMost"]
    tiny.node_of(prompt, LOADER)["inputs"]["quality"] = "Fastest"
    tiny.node_of(prompt, "EmptyHunyuanLatentVideo")["inputs"].update(length=81, width=832, height=480)
    assert only(prompt)["changes"][0] == {
        "what": "quality",
        "values": ["Draft"],
        "all": only(prompt)["all"],
        "isMost": True,
    }


def test_what_does_not_fit_names_the_most_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = api("wan2.1_t2v_1.3B")
    size = tiny.node_of(prompt, "EmptyHunyuanLatentVideo")["inputs"]
    size.update(length=161, width=1280, height=720)
    assert only(prompt)["verdict"] == "WHOLE"
    free = 1 << 28
    monkeypatch.setattr(
        "fusestream.fusion.patcher.streaming_patcher.StreamingModelPatcher.get_free_memory", lambda *_: free
    )
    monkeypatch.setattr("fusestream.fusion.estimate.fit._others", lambda *_: 0)
    told = only(prompt)
    assert told["verdict"] == "NOT" and told["changes"] == [], "what would not fit either is not told"
    needed = free + told["lacks"]
    names = {"frames": ("length",), "size": ("height", "width"), "frames and size": ("length", "height", "width")}
    found = []
    for share in (0.9, 0.5, 0.15):
        free = int(share * needed) + RESERVE
        (change,) = only(prompt)["changes"]
        found.append((change["what"], change["values"]))
        smaller = {**size, **dict(zip(names[change["what"]], change["values"], strict=True))}
        tiny.node_of(prompt, "EmptyHunyuanLatentVideo")["inputs"] = smaller
        assert only(prompt)["verdict"] in ("WHOLE", "STREAMS"), "as it says"
        tiny.node_of(prompt, "EmptyHunyuanLatentVideo")["inputs"] = size
    assert len({str(one) for one in found}) == 3, found


def only(prompt: Workflow) -> dict[str, Any]:
    ((told,),) = estimate_route.estimates(prompt).values()
    return dict(told)


def test_it_follows_what_is_edited() -> None:
    prompt = api("wan2.1_t2v_1.3B")
    before = only(prompt)
    tiny.node_of(prompt, "EmptyHunyuanLatentVideo")["inputs"]["length"] = 161
    assert only(prompt)["activations"] > before["activations"]
    tiny.node_of(prompt, "KSampler")["inputs"]["steps"] = 7
    assert only(prompt)["steps"] == 7
    tiny.node_of(prompt, LOADER)["inputs"]["vram_budget"] = 0.006
    assert only(prompt)["verdict"] == "STREAMS" and only(prompt)["window"] > 0
    tiny.node_of(prompt, LOADER)["inputs"]["vram_budget"] = 0.0
    assert only(prompt)["unknown"] == "whole"


def test_what_is_missing_is_named(models: Path) -> None:
    prompt = api("wan2.1_t2v_1.3B")
    loader = tiny.node_of(prompt, LOADER)["inputs"]
    loader["model_name"] = "not_there.safetensors"
    told = only(prompt)
    assert told["unknown"] == "noFile"
    assert told["values"] == {"file": "not_there.safetensors", "folder": "models/diffusion_models"}
    alone = {"1": tiny.node_of(prompt, LOADER)}
    assert only(alone)["unknown"] == "noFile", "before that no sampler takes it"
    (models / "diffusion_models" / "page.safetensors").write_text("<html>404</html>", encoding="utf-8")
    folder_paths.filename_list_cache.clear()
    loader["model_name"] = "page.safetensors"
    told = only(prompt)
    assert told["unknown"] == "fails" and "page.safetensors is a web page" in told["values"]["sentence"]
    assert str(models) not in json.dumps(told), "no folder is told"
    loader["model_name"] = ["4711", 0]
    assert only(prompt)["unknown"] == "computed"
    loader.update(model_name="wan2.1_t2v_1.3B_fp16.safetensors", vram_budget=0.0001)
    told = only(prompt)
    assert told["unknown"] == "fails"
    least = re.search(r"at least ([\d.]+) GiB of VRAM", told["values"]["sentence"])
    assert least is not None
    loader["vram_budget"] = float(least[1])
    assert only(prompt)["verdict"] == "STREAMS", "the budget that it names is enough"
    for odd in ("much", None, [], {"a": 1}, -0.5, float("nan")):
        loader["vram_budget"] = odd
        assert only(prompt)["unknown"] in ("said", "noValue"), odd


def test_the_other_files_of_a_workflow_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever node names them, once; not what is no file of a model, or is not there."""
    prompt = api("with_and_without")
    before = only_ram(prompt)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "text_encoders", ([str(tmp_path)], {".safetensors"}))
    other = checkpoints.write("clip_l", tmp_path)
    for node in ("a", "b"):
        prompt[node] = {"class_type": "CLIPLoader", "inputs": {"clip_name": other.name, "type": "wan"}}
    prompt["c"] = {"class_type": "LoadImage", "inputs": {"image": "none.safetensors", "upload": "image"}}
    assert only_ram(prompt)["files"] == before["files"] + other.stat().st_size
    monkeypatch.setattr("fusestream.fusion.estimate.ram.measure_ram", lambda: Ram(2**20, 2**19))
    told = only_ram(prompt)
    assert told["eachStep"] == 0 < told["eachPrompt"], "on the CPU all of a model stays"


def only_ram(prompt: dict[str, Any]) -> dict[str, int]:
    told: dict[str, int] = next(iter(estimate_route.estimates(prompt).values()))[0]["ram"]
    return told


def test_a_node_of_ours_on_the_way_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = estimate
    monkeypatch.setattr(
        "fusestream.fusion.estimate.plan.estimate",
        lambda model, *args: seen.append(found.kernels if (found := real(model, *args)) else "") or found,
    )
    estimate_route.estimates(api("with_and_without"))
    assert len(seen) == 2 and seen[0] != seen[1]


# ------------------------------------------------------------------------------------------------------ the unread model


@pytest.mark.parametrize("kind", ["wan_t2v", "wan_i2v", "wan_vace", "flux2", "z_image", "sd15", "sdxl"])
def test_an_unread_model_is_told_of_as_the_loaded_one(kind: str, tmp_path: Path, small_ones_too: None) -> None:
    path = str(checkpoints.write(kind, tmp_path))
    policy = fusion.KernelPolicy.of("off")
    loaded = load_streamed_diffusion_model(path, None, policy)
    unread = unread_model(path, policy, -1.0)
    shape = shape_of(loaded, (9, 128, 128))
    assert shape == shape_of(unread, (9, 128, 128)) and pixels_of(loaded, shape)[1:] == (128, 128)
    one, other = (estimate(model, shape, 20, 5.0) for model in (loaded, unread))
    assert one.gaps == other.gaps == () and one.kernels == other.kernels
    assert one.fit is not None and other.fit is not None
    for what in ("rest", "sizes", "stored", "held", "window", "activations", "least", "forwards", "verdict"):
        assert getattr(one.fit, what) == getattr(other.fit, what), what


def test_it_reads_no_weights_and_lets_go_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.write("wan_t2v", tmp_path)
    read: list[int] = []
    from fusestream.memory import Checkpoint

    real = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, extent: read.append(extent.nbytes) or real(self, extent))
    model = unread_model(str(path), fusion.KernelPolicy.of("auto"), -1.0)
    assert max(read) <= SMALL and sum(read) < 0.1 * path.stat().st_size
    assert path not in open_files()
    assert model.stream.residency.held == 0 and model.loaded_size() == 0


def open_files() -> list[Path]:
    """Of this process, where the system tells."""
    links = Path("/proc/self/fd")
    return [one.readlink() for one in links.iterdir() if one.exists()] if links.is_dir() else []


def test_it_moves_no_bar_and_takes_no_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.model_management as mm
    import comfy.utils

    def moved(*_: Any, **__: Any) -> None:
        raise AssertionError("a bar moved")

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", moved)
    path = str(checkpoints.write("wan_t2v", tmp_path))
    mm.interrupt_current_processing()
    try:
        assert unread_model(path, fusion.KernelPolicy.of("auto"), -1.0) is not None
        assert mm.processing_interrupted()
    finally:
        mm.interrupt_current_processing(False)


def test_a_file_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    real = unread.unread_model
    monkeypatch.setattr(unread, "unread_model", lambda path, *a, **k: built.append(path) or real(path, *a, **k))
    prompt = api("wan2.1_t2v_1.3B")
    for length in (33, 49, 81):
        tiny.node_of(prompt, "EmptyHunyuanLatentVideo")["inputs"]["length"] = length
        only(prompt)
    assert len(built) == 1
    Path(built[0]).touch()
    only(prompt)
    assert len(built) == 2


# -------------------------------------------------------------------------------------------------------------- the route


def ask(body: Any, *, tasks: int = 0, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Any]:
    queue = SimpleNamespace(get_tasks_remaining=lambda: tasks)
    monkeypatch.setattr(front_end, "running_server", lambda: SimpleNamespace(prompt_queue=queue))
    monkeypatch.setattr(estimate_route, "_reckoning", OneAtATime())

    async def asked() -> tuple[int, Any]:
        app = web.Application(client_max_size=1 << 27)
        app.router.add_post(estimate_route.PATH, estimate_route.answer)
        async with TestClient(TestServer(app)) as client:
            answer = await client.post(estimate_route.PATH, data=body, headers={"Content-Type": "application/json"})
            return answer.status, await answer.json()

    return asyncio.run(asked())


def test_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = api("wan2.1_t2v_1.3B")
    status, told = ask(json.dumps({"prompt": prompt}), monkeypatch=monkeypatch)
    assert status == 200 and len(told["loaders"]) == 1
    assert ask(json.dumps({"prompt": prompt}), tasks=1, monkeypatch=monkeypatch) == (200, {"busy": True})


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "7", '{"prompt": 3}', '{"prompt": {"1": 3}}', '{"prompt": {"1": {"class_type": 3, "inputs": {}}}}',
     '{"prompt": {"1": {"class_type": "KSampler"}}}', b"\xff\xfe", "[" * 100_000],
)  # fmt: skip
def test_what_is_no_graph(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, told = ask(body, monkeypatch=monkeypatch)
    assert status == 400 and "prompt" in told["error"]


def test_what_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    status, _ = ask(" " * (request_body.MOST_BYTES + 1), monkeypatch=monkeypatch)
    assert status == 413
    many = {str(i): {"class_type": LOADER, "inputs": {}} for i in range(estimate_route.MOST_LOADERS + 5)}
    status, told = ask(json.dumps({"prompt": many}), monkeypatch=monkeypatch)
    assert status == 200 and len(told["loaders"]) == estimate_route.MOST_LOADERS
    more = {str(i): {"class_type": "X", "inputs": {}} for i in range(estimate_route.MOST_NODES + 1)}
    assert ask(json.dumps({"prompt": more}), monkeypatch=monkeypatch)[0] == 413


def test_a_fault_of_ours_is_no_error_of_the_page(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(estimate_route, "_unread", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        told = only(api("wan2.1_t2v_1.3B"))
    assert told["unknown"] == "said" and "ZeroDivisionError" in told["values"]["sentence"]
    assert "no estimate" in caplog.text


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan"), 10**300, 1e300])
def test_what_is_no_number_is_said_of_its_node(wrong: float) -> None:
    for kind, name in (
        ("EmptyHunyuanLatentVideo", "width"),
        ("EmptyHunyuanLatentVideo", "length"),
        ("KSampler", "steps"),
        ("KSampler", "cfg"),
        (LOADER, "vram_budget"),
    ):
        prompt = api("wan2.1_t2v_1.3B")
        tiny.node_of(prompt, kind)["inputs"][name] = wrong
        told = only(prompt)
        assert told["unknown"] == "noValue" and told["values"] == {"what": name}
        assert prompt[told["node"]]["class_type"] == kind


def test_links_that_go_round_in_a_circle_end() -> None:
    prompt = api("wan2.1_t2v_1.3B")
    for name, node in prompt.items():
        for given in node["inputs"]:
            ringed: Workflow = json.loads(json.dumps(prompt))
            ringed[name]["inputs"][given] = [name, 0]
            json.dumps(estimate_route.estimates(ringed), allow_nan=False)


def two_loaders() -> tuple[Workflow, str, str]:
    """Each with a sampler of its own; and the ids of the loaders."""
    prompt = api("wan2.1_t2v_1.3B")
    other = {f"other{name}": json.loads(json.dumps(node)) for name, node in prompt.items()}
    for node in other.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list):
                node["inputs"][name] = [f"other{value[0]}", value[1]]
    first = next(name for name, node in prompt.items() if node["class_type"] == LOADER)
    return {**prompt, **other}, first, f"other{first}"


def test_a_fault_at_one_loader_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, first, second = two_loaders()
    real = estimate_route._model
    monkeypatch.setattr(estimate_route, "_model", lambda asked, name: 1 / 0 if name == first else real(asked, name))
    found = estimate_route.estimates(prompt)
    assert [one["unknown"] for one in found[first]] == ["said"] and found[second][0]["verdict"] == "WHOLE"


def test_a_graph_that_takes_too_long_takes_no_time_of_another_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, first, second = two_loaders()
    sampler = next(node for node in prompt.values() if node["inputs"].get("model") == [first, 0])
    for i in range(9000):  # each makes a clone
        prompt[f"k{i}"] = {"class_type": "FuseStreamKernels", "inputs": {"model": [f"k{i - 1}" if i else first, 0]}}
    sampler["inputs"]["model"] = ["k8999", 0]
    estimate_route.estimates(two_loaders()[0])  # reads the file
    monkeypatch.setattr(estimate_route, "MOST_SECONDS", 0.6)
    start = time.monotonic()
    found = estimate_route.estimates(prompt)
    assert time.monotonic() - start < 5
    assert [one["unknown"] for one in found[first]] == ["tooMuch"] and found[second][0]["verdict"] == "WHOLE"
    gone = estimate_route.estimates(prompt, lambda: True)
    assert [told[0]["unknown"] for told in gone.values()] == ["tooMuch"] * 2, "nobody waits for it"


def test_of_many_samplings_the_nearest_are_told() -> None:
    prompt = api("wan2.1_t2v_1.3B")
    sampler = next(node for node in prompt.values() if node["class_type"] == "KSampler")
    prompt = {name: node for name, node in prompt.items() if not node["class_type"].startswith("Save")}
    prompt |= {f"s{i}": json.loads(json.dumps(sampler)) for i in range(300)}
    (told,) = estimate_route.estimates(prompt).values()
    assert [one["verdict"] for one in told] == ["WHOLE"] * estimate_route.MOST_SAMPLINGS


def test_the_file_of_another_loader_is_read_when_the_page_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk: one file a question, however many there are."""
    prompt, first, second = two_loaders()
    prompt[second]["inputs"]["quality"] = "Fastest"  # which is another model
    estimate_route.estimates(prompt)
    estimate_route._unread.cache_clear()
    monkeypatch.setattr(estimate_route, "MOST_SECONDS", 0.5)
    real = unread_model
    monkeypatch.setattr(unread, "unread_model", lambda *a, **k: time.sleep(0.6) or real(*a, **k))
    answers = [estimate_route.estimates(prompt) for _ in range(2)]
    assert [found[first][0].get("verdict") for found in answers] == ["WHOLE"] * 2
    assert answers[0][second][0]["unknown"] == "later" and answers[1][second][0]["verdict"] == "WHOLE"


def test_a_question_behind_a_long_one_is_told_to_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, left = threading.Event(), []

    def wait(_prompt: Any, is_over: Any) -> dict[str, Any]:
        assert go_on.wait(10)
        left.append(is_over())
        return {}

    queue = SimpleNamespace(get_tasks_remaining=lambda: 0)
    monkeypatch.setattr(front_end, "running_server", lambda: SimpleNamespace(prompt_queue=queue))
    monkeypatch.setattr(estimate_route, "_reckoning", OneAtATime())
    monkeypatch.setattr(estimate_route, "estimates", wait)
    monkeypatch.setattr(estimate_route, "MOST_SECONDS", 0.3)
    prompt = api("wan2.1_t2v_1.3B")

    async def asked() -> Any:
        app = web.Application()
        app.router.add_post(estimate_route.PATH, estimate_route.answer)
        async with TestClient(TestServer(app)) as client:
            first = asyncio.create_task(client.post(estimate_route.PATH, json={"prompt": prompt}))
            await asyncio.sleep(0.1)
            told = await (await client.post(estimate_route.PATH, json={"prompt": prompt})).json()
            first.cancel()  # the client leaves
            await asyncio.sleep(0.3)
            go_on.set()
            assert await (await client.post(estimate_route.PATH, json={"prompt": prompt})).json() == {"loaders": {}}
            return told

    told = asyncio.run(asked())["loaders"]
    assert [one["unknown"] for of_one in told.values() for one in of_one] == ["later"]
    assert left == [True, False], "the first was told to stop"


def test_the_page_has_words_for_every_reason_and_source() -> None:
    from fusestream.fusion.base.card_rates import Source

    words = WORDS.read_text(encoding="utf-8")
    places = [*Path(str(estimate_route.__file__)).parent.glob("graph/*.py"), Path(str(estimate_route.__file__))]
    said = "".join(path.read_text(encoding="utf-8") for path in places)
    keys = set(re.findall(r'Unknown\("(\w+)"', said)) | {"noLatent", "sizeOf"}
    assert len(keys) >= 12 and all(f"unknown_{key}: " in words for key in keys)
    assert {f"unknown_{key}" for key in keys} == set(re.findall(r"(unknown_\w+): ", words)), "and no more"
    assert all(f"source{source.name}: " in words for source in Source)


def test_a_draft_takes_at_most_as_long_as_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many steps are foretold, and how sparse attention becomes, is not known beforehand."""
    card = Card("NVIDIA GeForce RTX 2060 SUPER", (7, 5), 34, 1.65e9, 448e9)
    monkeypatch.setattr("fusestream.fusion.estimate.plan.card_of", lambda _device: card)
    prompt = api("wan2.1_t2v_1.3B")
    times, most = {}, {}
    for quality in ("Exact", "Fastest", "Draft"):
        tiny.node_of(prompt, LOADER)["inputs"]["quality"] = quality
        for frames in (17, 81):
            tiny.node_of(prompt, "EmptyHunyuanLatentVideo")["inputs"].update(length=frames, width=832, height=480)
            told = only(prompt)
            times[quality, frames], most[quality] = told["all"], told["isMost"]
    assert times["Draft", 17] == times["Fastest", 17] != times["Exact", 17]
    assert times["Draft", 81] == times["Fastest", 81] != times["Exact", 81]
    assert most == {"Exact": False, "Fastest": False, "Draft": True}

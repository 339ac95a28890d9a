"""Every example workflow, as shipped, on stand-ins under the published names: small, but the whole graph."""

from __future__ import annotations

import io
import json
from typing import Any

import av
import pytest
from PIL import Image

from bed import tiny
from bed.client import Client, Workflow
from bed.paths import ROOT
from bed.server import Server
from bed.templates import EXAMPLES
from bed.templates.examples import PICTURE

SIZE = {"width": 64, "height": 64, "length": 5, "steps": 2}
# Its VAE is a hollow one of the real width: heavy for two cores, so the frames are smaller still.
SMALLER = {"wan2.2_ti2v_5B": {"width": 32, "height": 32}}
NAMES = [example.name for example in EXAMPLES]


@pytest.fixture(scope="module")
def stocked(server: Server) -> Server:
    """The server with a file under every name that the examples have, and the picture that every ComfyUI comes with."""
    tiny.write_published(server.base / "models")
    Image.radial_gradient("L").convert("RGB").save(server.base / "input" / PICTURE)
    server.get("/object_info")  # as the browser's R key: the server lists its folders again
    return server


def twin(name: str) -> Workflow:
    workflow: Workflow = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
    return workflow


@pytest.mark.parametrize("name", NAMES)
def test_example_makes_its_video(stocked: Server, name: str) -> None:
    workflow = twin(name)
    size = {**SIZE, **SMALLER.get(name, {})}
    tiny.shrink(workflow, **size)
    run = Client(stocked.url).run(workflow, timeout=120)
    assert not run.interrupted and run.error is None, run.error and run.error["exception_message"][:2000]
    saved = {node for node, content in workflow.items() if content["class_type"] == "SaveVideo"}
    assert set(run.outputs) == saved
    # A node that is not on the way to a video would not have been executed.
    assert {*run.executed, *run.cached} == set(workflow)
    for output in run.outputs.values():
        shape = frames(Client(stocked.url).fetch(output["images"][0]))
        assert shape == (size["length"], size["width"], size["height"])


def test_the_comparison_compares_ours_with_stock() -> None:
    """Two loaders of the same file with opposite toggles, one seed that stays."""
    workflow = twin("with_and_without")
    for type_ in ("FuseStreamDiffusionModelLoader", "FuseStreamVAELoader"):
        one, other = (node["inputs"] for node in workflow.values() if node["class_type"] == type_)
        assert (one["kernels"], other["kernels"]) == ("auto", "off")
        name = next(key for key in one if key.endswith("_name"))
        assert one[name] == other[name]
        if "vram_budget" in one:
            assert (one["vram_budget"], other["vram_budget"]) == (-1, 0)
    first, second = (settings(node) for node in workflow.values() if node["class_type"] == "KSampler")
    assert first == second


def settings(node: dict[str, Any]) -> dict[str, Any]:
    """Its inputs but those that come from another node."""
    return {name: value for name, value in node["inputs"].items() if not isinstance(value, list)}


def frames(video: bytes) -> tuple[int, int, int]:
    """Number, width and height."""
    with av.open(io.BytesIO(video)) as container:
        pictures = list(container.decode(video=0))
    return len(pictures), pictures[0].width, pictures[0].height

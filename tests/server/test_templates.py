"""Every example of a video, as shipped, on stand-ins under the published names: small, but the whole graph."""

from __future__ import annotations

import io
import json

import av
import pytest
from PIL import Image

from bed import tiny
from bed.client import Client, Workflow
from bed.paths import ROOT
from bed.server import Server
from bed.templates import EXAMPLES
from bed.templates.inputs import PICTURES

SIZE = {"width": 64, "height": 64, "length": 5, "steps": 2}
# Its VAE is a hollow one of the real width: heavy for two cores, so the frames are smaller still.
SMALLER = {"wan2.2_ti2v_5B": {"width": 32, "height": 32}}
# Of a vocabulary that stock's tokenizer goes beyond: where stock takes smaller files (`test_picture_templates.py`).
ELSEWHERE = ("caption_and_animate",)
NAMES = [
    example.name for example in EXAMPLES if not (example.is_picture or example.is_live or example.name in ELSEWHERE)
]


@pytest.fixture(scope="module")
def stocked(server: Server) -> Server:
    """The server with a file under every name that the examples have, and the picture that every ComfyUI comes with."""
    tiny.write_published(server.base / "models")
    for name in PICTURES:
        Image.radial_gradient("L").convert("RGB").save(server.base / "input" / name)
    server.get("/object_info")  # as the browser's R key: the server lists its folders again
    return server


def twin(name: str) -> Workflow:
    workflow: Workflow = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
    return workflow


@pytest.mark.deep(
    "wan2.2_ti2v_5B",
    "wan2.1_flf2v_14B",
    "wan2.2_flf2v_14B_4_steps",
    "wan2.2_i2v_14B_4_steps_gguf",
    "wan2.1_i2v_14B",
    "wan2.1_t2v_14B",
    "wan2.2_i2v_14B_4_steps",
    "wan2.2_t2v_14B",
    "wan2.1_vace_1.3B",
    "with_and_without",
    "wan2.1_t2v_14B_4_steps_gguf",
)
@pytest.mark.parametrize("name", NAMES)
def test_example_makes_its_video(stocked: Server, name: str) -> None:
    workflow = twin(name)
    size = {**SIZE, **SMALLER.get(name, {})}
    tiny.shrink(workflow, **size)
    run = Client(stocked.url).run(workflow, timeout=120)
    assert not run.interrupted and run.error is None, run.error and run.error["exception_message"][:2000]
    saved, told = (
        {node for node, content in workflow.items() if content["class_type"] in types}
        for types in (("SaveVideo",), ("FuseStreamReport", "FuseStreamCompare"))
    )
    assert set(run.outputs) == saved | told
    # A node that is not on the way to a video would not have been executed.
    assert {*run.executed, *run.cached} == set(workflow)
    for node in saved:
        shape = frames(Client(stocked.url).fetch(run.outputs[node]["images"][0]))
        width = 2 * size["width"] + 4 if name == "with_and_without" else size["width"]  # its two beside each other
        assert shape == (size["length"], width, size["height"])


def test_the_comparison_compares_kernels_on_and_off() -> None:
    """Two samplers of one seed over one loader, the second one behind a node that switches all kernels off."""
    workflow = twin("with_and_without")
    (loader,) = (name for name, node in workflow.items() if node["class_type"] == "FuseStreamDiffusionModelLoader")
    first, second = (node["inputs"] for node in workflow.values() if node["class_type"] == "KSampler")
    assert first.pop("model") == [loader, 0] and workflow[loader]["inputs"]["kernels"] == "auto"
    off = workflow[second.pop("model")[0]]
    assert off["class_type"] == "FuseStreamKernels" and off["inputs"]["model"] == [loader, 0]
    assert off["inputs"]["kernels"] == "off" and {off["inputs"][one] for one in ("attention", "norms")} == {"as above"}
    assert first == second, "the same seed, steps, prompts and size"


@pytest.mark.deep
def test_the_comparisons_reports_say_what_ran(stocked: Server) -> None:
    """Each of its own branch, and the comparison of both."""
    workflow = twin("with_and_without")
    tiny.shrink(workflow, **SIZE)
    tiny.node_of(workflow, "KSampler")["inputs"]["seed"] = 77
    run = Client(stocked.url).run(workflow, timeout=120)
    assert run.error is None
    texts = {
        workflow[node].get("_meta", {}).get("title"): output["text"][0]
        for node, output in run.outputs.items()
        if "text" in output
    }
    assert "kernels auto, auto: as stored, FP16 products, FP32 sums" in texts["A: report"]
    assert "kernels off" in texts["B: report"]
    assert "B / A" in texts["A and B"]


def frames(video: bytes) -> tuple[int, int, int]:
    """Number, width and height."""
    with av.open(io.BytesIO(video)) as container:
        pictures = list(container.decode(video=0))
    return len(pictures), pictures[0].width, pictures[0].height

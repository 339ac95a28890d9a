"""The loaders' quality in the page: workflows from before there was one go on as they were, new loaders ask it first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from bed.templates import files
from browser.front_end import RENDERERS, FrontEnd

OWN_PAGE = True  # settings of the page are what is asked for

DIFFUSION, TEXT, VAE = (f"FuseStream{kind}Loader" for kind in ("DiffusionModel", "TextEncoder", "VAE"))
KERNELS = "FuseStreamKernels"
CHECKPOINT = "FuseStreamCheckpointLoader"
OLD = Path(__file__).resolve().parents[1] / "fixtures" / "templates-0.1"
# Of each loader the values that some version has saved, the oldest first, and what a prompt of them has to say.
NAMES = {DIFFUSION: files.T2V_SMALL.name, TEXT: files.UMT5.name, VAE: files.VAE21.name}
SAVED: dict[str, list[list[Any]]] = {
    DIFFUSION: [
        [],
        ["on"],
        ["on", "turbo"],
        ["auto", "fast", 0],
        ["off", "turbo", 1.5],
        ["auto", "fast", -1, "Fastest"],
    ],
    TEXT: [[], ["auto", "fast", -1], ["on", "precise", 0.75, "wan"], ["auto", "fast", -1, "wan", "auto"]],
    VAE: [[], ["on", "fast"], ["on", "fast", "Exact"]],
    KERNELS: [[], ["auto"], ["auto", "fast"], ["on", "auto"]],
}
NO_MORE_FILES = dict.fromkeys(("second_file", "third_file", "fourth_file"), "none")
INPUTS: dict[str, dict[str, Any]] = {
    DIFFUSION: {"kernels": "auto", "precision": "precise", "vram_budget": -1, "quality": "by precision"},
    TEXT: {
        "kernels": "auto",
        "precision": "precise",
        "vram_budget": -1,
        "type": "auto",
        "quality": "by precision",
        **NO_MORE_FILES,
    },
    VAE: {"kernels": "auto", "precision": "precise", "quality": "by precision"},
    KERNELS: {"kernels": "auto", "precision": "precise"},
}
# A workflow of these nodes as a file has it, each with the values that it was saved with.
OPEN = """async saved => {
    const node = ([type, values], i) => ({
        id: i + 1, type, pos: [400 * (i % 4), 300 * Math.floor(i / 4)], size: [340, 136], flags: {}, order: i, mode: 0, inputs: [],
        outputs: [], properties: {}, widgets_values: values,
    })
    const nodes = saved.map(node)
    await app.loadGraphData({ nodes, links: [], groups: [], last_node_id: nodes.length, last_link_id: 0, version: 0.4 })
}"""
VALUES = "() => app.graph.nodes.map(n => Object.fromEntries(n.widgets.map(w => [w.name, w.value])))"
ADD = """type => {
    const node = LiteGraph.createNode(type)
    app.graph.add(node)
    return Object.fromEntries(node.widgets.map(w => [w.name, w.value]))
}"""


@pytest.fixture(params=RENDERERS, ids=RENDERERS.get)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"Comfy.VueNodes.Enabled": request.param, "FuseStream.Defaults.Quality": "Balanced"}


def expected(type_: str, values: list[Any]) -> dict[str, Any]:
    widgets = {DIFFUSION: "model_name", TEXT: "text_encoder_name", VAE: "vae_name"}
    file = {widgets[type_]: NAMES[type_]} if type_ in widgets else {}
    return {**file, **INPUTS[type_], **dict(zip(INPUTS[type_], values, strict=False))}


def test_workflows_from_before_go_on_as_they_were(front: FrontEnd) -> None:
    saved = [(type_, values) for type_, every in SAVED.items() for values in every]
    front.page.evaluate(
        OPEN, [[type_, [*([NAMES[type_]] if type_ in NAMES else []), *values]] for type_, values in saved]
    )
    found = front.page.evaluate(VALUES)
    for (type_, values), told in zip(saved, found, strict=True):
        wanted = expected(type_, values)
        assert {name: told[name] for name in wanted} == wanted
        assert type_ == KERNELS or told == wanted
    # As a prompt, by names.
    old = {"model_name": NAMES[DIFFUSION], "kernels": "auto", "precision": "turbo", "vram_budget": -1}
    prompt = {
        str(i): {"class_type": DIFFUSION, "inputs": one} for i, one in ((1, old), (2, {**old, "quality": "Exact"}))
    }
    front.page.evaluate("api => app.loadApiJson(api, 'old')", prompt)
    found = front.page.evaluate(VALUES)
    assert [one["quality"] for one in found] == ["by precision", "Exact"]
    assert [one["precision"] for one in found] == ["turbo", "turbo"]


@pytest.mark.deep
def test_templates_of_the_last_release_ask_for_what_they_asked_for(front: FrontEnd) -> None:
    """The page of today makes a prompt of each file with its values of then. Where it had no quality, that is by precision."""
    for path in sorted(OLD.glob("*.json")):
        front.page.evaluate("saved => app.loadGraphData(saved)", json.loads(path.read_text(encoding="utf-8")))
        loaders = [node for node in front.prompt().values() if node["class_type"] in (DIFFUSION, CHECKPOINT, TEXT, VAE)]
        assert loaders or "Another look" in path.stem
        saved = {
            node["type"]: node["widgets_values"] for node in nodes_of(json.loads(path.read_text(encoding="utf-8")))
        }
        for node in loaders:
            values, inputs = saved[node["class_type"]], node["inputs"]
            had_one = node["class_type"] in (DIFFUSION, CHECKPOINT)
            assert inputs["quality"] == (values[4] if had_one else "by precision"), path.stem
            assert inputs["precision"] == values[2], path.stem


def nodes_of(workflow: Any) -> list[Any]:
    """Those in subgraphs too."""
    inner = workflow.get("definitions", {}).get("subgraphs", [])
    return [node for graph in (workflow, *inner) for node in graph["nodes"]]


def test_a_new_one_asks_for_quality_and_hides_the_rest(front: FrontEnd, settings: dict[str, Any]) -> None:
    front.page.evaluate("app.graph.clear()")
    values = front.page.evaluate(ADD, DIFFUSION)
    assert (values["quality"], values["precision"]) == ("Balanced", "precise")
    front.page.evaluate(
        "app.graph.nodes[0].pos = [100, 100]; app.canvas.ds.offset = [100, 100]; app.canvas.setDirty(true, true)"
    )
    if settings["Comfy.VueNodes.Enabled"]:
        node = front.page.locator("[data-node-id]").first
        expect(node.get_by_role("combobox", name="quality")).to_be_visible()
        expect(node.get_by_role("combobox", name="kernels")).to_be_hidden()
        node.get_by_role("button", name="Show advanced inputs").click()
        expect(node.get_by_role("combobox", name="kernels")).to_be_visible()
    # Who chooses a precision means it.
    front.page.evaluate(
        """() => {
            const widget = app.graph.nodes[0].widgets.find(w => w.name === 'precision')
            widget.value = 'turbo'
            widget.callback('turbo')
        }"""
    )
    assert front.page.evaluate(VALUES)[0]["quality"] == "by precision"
    assert front.page.evaluate(ADD, KERNELS)["precision"] == "auto", "it takes the place of the loader's quality"

"""Every node: its inputs reach it, its texts are there, and wrong values are refused."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import execution
import pytest
from comfy_api.internal import make_locked_method_func
from comfy_api.latest import io

import fusestream.nodes
from fusestream.fusion.base.format import DRAFT
from fusestream.nodes.kernels import KernelsNode
from fusestream.nodes.loaders import Loader

ROOT = Path(__file__).resolve().parents[2]
HELP = ROOT / "nodes" / "web" / "docs"
LANGUAGES = ("ja", "zh")
LONGEST = 120  # letters of a tooltip: what more there is to say, the help page says
NODES: dict[str, Any] = {node.GET_SCHEMA().node_id: node for node in fusestream.nodes.NODES}
# What a saved workflow without a value means, where a new node is given another one.
OLDER = {"precision": (KernelsNode, "precise"), "quality": (Loader, "by precision")}
# Read by what several nodes share.
SHARED = {"policy_of(inputs)": {"kernels", "precision", "quality"}, "cls.policy(inputs)": {"kernels", "precision"}}
# The front end's message format gives these a meaning of their own.
RESERVED = re.compile(r"[{}@|]")

each_node = pytest.mark.parametrize("name", NODES)
each_language = pytest.mark.parametrize("language", LANGUAGES)


def inputs_of(name: str) -> list[Any]:
    found: list[Any] = NODES[name].GET_SCHEMA().inputs
    return found


def translated(language: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))
    return found


# ---------------------------------------------------------------------------------------------------------------- inputs


@each_node
def test_every_input_reaches_the_node(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the way that ComfyUI calls it: in a locked copy of the class, by name."""
    node, received = NODES[name], []
    given = {item.id: object() for item in inputs_of(name)}
    monkeypatch.setattr(node, "run", classmethod(lambda _cls, inputs: received.append(inputs) or io.NodeOutput()))
    clone = node.PREPARE_CLASS_CLONE({"hidden_inputs": {}})
    make_locked_method_func(node, node.FUNCTION, clone)(**given)
    (inputs,) = received
    assert type(inputs) is node.Inputs and vars(inputs) == given and list(vars(inputs)) == node.names()
    with pytest.raises(TypeError, match="unheard_of"):
        node.execute(**given, unheard_of=1)


@each_node
def test_no_input_is_declared_for_nothing(name: str) -> None:
    node = NODES[name]
    source = Path(str(importlib.import_module(node.__module__).__file__)).read_text(encoding="utf-8")
    read = set(re.findall(r"\binputs\.(\w+)", source))
    read |= {one for call, names in SHARED.items() if call in source for one in names}
    if "settings_of(Settings, inputs)" in source:
        read |= {one.name for one in dataclasses.fields(importlib.import_module(node.__module__).Settings)}
    read |= {switch.id for switch in getattr(node, "SWITCHES", ())}
    assert set(node.names()) <= read


@each_node
def test_defaults_are_said_once(name: str) -> None:
    """A required input without a default has none here; older workflows keep their meaning."""
    node = NODES[name]
    for item, field in zip(inputs_of(name), dataclasses.fields(node.Inputs), strict=True):
        kind, older = OLDER.get(item.id, (type(None), None))
        wanted = older if issubclass(node, kind) else getattr(item, "default", None)
        if wanted is None and not item.optional:
            wanted = dataclasses.MISSING
        assert item.id == field.name and field.default == wanted, item.id
    assert node.Inputs(**{item.id: item for item in inputs_of(name) if not item.optional})


def test_inputs_of_one_name_are_of_one_kind() -> None:
    found: dict[str, set[Any]] = {}
    for name in NODES:
        for item in inputs_of(name):
            told = {
                key: value for key, value in item.as_dict().items() if key not in ("tooltip", "advanced", "optional")
            }
            if item.id == "quality":
                told["options"] = [option for option in told["options"] if option != DRAFT]  # of models alone
            if item.id in ("kernels", "quality", "vram_budget", "theme"):
                found.setdefault(item.id, set()).add(repr((item.get_io_type(), sorted(told.items(), key=str))))
    assert {name: len(kinds) for name, kinds in found.items()} == dict.fromkeys(found, 1)


# ---------------------------------------------------------------------------------------------------------- wrong values


class Anything:
    """A node that gives whatever is asked for."""

    RETURN_TYPES = ("*",)
    FUNCTION = "run"
    INPUT_TYPES = staticmethod(lambda: {})


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our nodes among ComfyUI's, where a server would put them."""
    mine = {**NODES, "Anything": Anything}
    monkeypatch.setattr(execution.nodes, "NODE_CLASS_MAPPINGS", {**execution.nodes.NODE_CLASS_MAPPINGS, **mine})


def refused(name: str, **values: Any) -> set[tuple[str, str]]:
    """The kinds of errors and the inputs that they name; other values are a new node's."""
    given = {item.id: default for item in inputs_of(name) if (default := getattr(item, "default", None)) is not None}
    links = {item.id: ["2", 0] for item in inputs_of(name) if not item.optional and item.id not in given}
    entry = {"class_type": name, "inputs": {**links, **given, **values}}
    prompt = {"1": entry, "2": {"class_type": "Anything", "inputs": {}}}
    _, errors, _ = asyncio.run(execution.validate_inputs("p", prompt, "1", {}))
    return {(error["type"], error["extra_info"].get("input_name", "")) for error in errors}


def wrong_values() -> Iterator[tuple[str, str, Any, str]]:
    for name, node in NODES.items():
        for item in inputs_of(name):
            kind = item.get_io_type()
            if kind in ("INT", "FLOAT"):
                yield name, item.id, item.min - 1, "value_smaller_than_min"
                yield name, item.id, item.max + 1, "value_bigger_than_max"
                yield name, item.id, "many", "invalid_input_type"
            elif kind == "COMBO" and not (issubclass(node, Loader) and item.id == node.names()[0]):
                yield name, item.id, "unheard of", "value_not_in_list"


@pytest.mark.parametrize(("name", "id", "value", "error"), list(wrong_values()))
def test_a_wrong_value_is_refused_by_its_name(known: None, name: str, id: str, value: Any, error: str) -> None:
    assert (error, id) in refused(name, **{id: value})


@each_node
def test_what_a_new_node_has_is_right(known: None, name: str) -> None:
    """Once what it needs is connected. A file is chosen by the user."""
    if not issubclass(NODES[name], Loader):
        assert refused(name) == set()


@pytest.mark.parametrize("name", [name for name, node in NODES.items() if issubclass(node, Loader)])
def test_a_loader_refuses_a_file_that_is_not_listed(known: None, name: str) -> None:
    widget = NODES[name].names()[0]
    assert ("custom_validation_failed", widget) in refused(name, **{widget: "unheard_of.safetensors"})
    assert NODES[name].fingerprint_inputs(**{widget: "unheard_of.safetensors"}) == ""


# ----------------------------------------------------------------------------------------------------------------- texts


@each_node
def test_it_explains_itself(name: str) -> None:
    schema = NODES[name].GET_SCHEMA()
    assert name.startswith("FuseStream") and schema.display_name.startswith("FuseStream ")
    wanted = (
        "advanced" if issubclass(NODES[name], KernelsNode) else "loaders" if issubclass(NODES[name], Loader) else None
    )
    assert re.fullmatch(rf"FuseStream/{wanted or '[a-z]+'}", schema.category) and len(schema.description) > 30
    for item in (*schema.inputs, *schema.outputs):
        assert item.tooltip and 20 < len(item.tooltip) <= LONGEST, item.id
    page = (HELP / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {schema.display_name}\n")
    assert [item.id for item in schema.inputs if f"**{item.id}**" not in page] == []


def test_every_help_page_is_there_in_each_language_and_no_other() -> None:
    wanted = {HELP / f"{name}.md" for name in NODES}
    wanted |= {HELP / name / f"{language}.md" for name in NODES for language in LANGUAGES}
    assert set(HELP.rglob("*.md")) == wanted


@each_language
def test_every_node_and_input_is_translated_and_nothing_else(language: str) -> None:
    found = translated(language)
    assert found.keys() == NODES.keys()
    for name, node in found.items():
        schema = NODES[name].GET_SCHEMA()
        assert list(node["inputs"]) == [item.id for item in schema.inputs], name
        assert list(node["outputs"]) == [str(slot) for slot in range(len(schema.outputs))], name
        texts = [node["description"], *(item["name"] for item in node["inputs"].values())]
        tooltips = [item["tooltip"] for item in (*node["inputs"].values(), *node["outputs"].values())]
        texts += tooltips
        assert not [tooltip for tooltip in tooltips if len(tooltip) > LONGEST], name
        assert node["display_name"].startswith("FuseStream ") and all(texts), name
        assert not [text for text in texts if RESERVED.search(text)], name


# ---------------------------------------------------------------------------------------------------------------- search


@pytest.mark.parametrize("word", ["gguf", "low vram", "8gb", "turing", "fast", "int8"])
def test_the_loaders_are_found_by_what_a_user_has_or_wants(word: str) -> None:
    """The front end searches ids, names and aliases; it lists whole aliases before parts of one."""
    found = {name for name in NODES if word in NODES[name].GET_SCHEMA().search_aliases}
    assert found == {name for name, node in NODES.items() if issubclass(node, Loader)}

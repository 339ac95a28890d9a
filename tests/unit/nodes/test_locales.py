"""The translations: no figure is stale, and the words of the page are there. That each node has one is in the contract."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fusestream.nodes

LOCALES = Path(__file__).resolve().parents[3] / "locales"
JS = LOCALES.parent / "nodes" / "web" / "js"
LANGUAGES = ("ja", "zh")
SCHEMAS = {node.GET_SCHEMA().node_id: node.GET_SCHEMA() for node in fusestream.nodes.NODES}
STOCKS = {"loaders", "sampling", "image", "advanced"}  # folders of the menu that ComfyUI has, and translates
FIGURE = re.compile(r"\d+(?:\.\d+)?")
VALUE = re.compile(r"{\w+}")

each_language = pytest.mark.parametrize("language", LANGUAGES)


def translated(language: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))
    return found


def test_the_languages_are_those() -> None:
    assert sorted(path.name for path in LOCALES.iterdir()) == list(LANGUAGES)


@each_language
def test_no_figure_is_told_that_the_original_does_not_tell(language: str) -> None:
    for name, node in translated(language).items():
        schema = SCHEMAS[name]
        pairs = [(node["inputs"][item.id]["tooltip"], item.tooltip) for item in schema.inputs]
        pairs += [(node["outputs"][str(slot)]["tooltip"], item.tooltip) for slot, item in enumerate(schema.outputs)]
        for translation, original in (*pairs, (node["description"], schema.description)):
            assert set(FIGURE.findall(translation)) <= set(FIGURE.findall(original)), (name, translation)


@each_language
def test_the_words_of_the_page_are_translated(language: str) -> None:
    """What the pack's scripts say by themselves, with the same values filled in; and the settings."""
    english = dict(re.findall(r'^    (\w+): "(.+)",$', (JS / "words.js").read_text(encoding="utf-8"), re.MULTILINE))
    said = json.loads((LOCALES / language / "main.json").read_text(encoding="utf-8"))
    assert list(said) == ["fuseStream", "menuLabels", "nodeCategories", "settingsCategories"]
    assert list(said["fuseStream"]) == list(english) and english
    assert set(said["nodeCategories"]) == {schema.category.partition("/")[2] for schema in SCHEMAS.values()} - STOCKS
    for key, text in said["fuseStream"].items():
        assert sorted(VALUE.findall(text)) == sorted(VALUE.findall(english[key])), key
        assert text != english[key] or not re.sub(VALUE, "", text).strip(" /")
    settings = json.loads((LOCALES / language / "settings.json").read_text(encoding="utf-8"))
    scripts = "".join(path.read_text(encoding="utf-8") for path in JS.glob("*.js"))
    assert set(settings) == {name.replace(".", "_") for name in re.findall(r'SETTING = "(.+)"', scripts)}
    assert all(one["name"] and one["tooltip"] for one in settings.values())
    automatic = re.findall(r'name: ".+ \(0: automatic\)"', scripts)
    assert len(automatic) == sum("0：" in one["name"] for one in settings.values()) == 2
    assert set(said["settingsCategories"]) == set(re.findall(r'category: \["FuseStream", "(.+)", ".+"\]', scripts))


@each_language
def test_the_commands_of_the_menu_are_translated(language: str) -> None:
    said = json.loads((LOCALES / language / "commands.json").read_text(encoding="utf-8"))
    scripts = "".join(path.read_text(encoding="utf-8") for path in JS.glob("*.js"))
    assert set(said) == {name.replace(".", "_") for name in re.findall(r'COMMAND = "(.+)"', scripts)} and said
    assert all(one["label"].startswith("FuseStream") for one in said.values())
    labels = json.loads((LOCALES / language / "main.json").read_text(encoding="utf-8"))["menuLabels"]
    assert sorted(labels) == sorted(re.findall(r'MENU_LABEL = "(.+)"', scripts)) and all(
        key != said for key, said in labels.items()
    )

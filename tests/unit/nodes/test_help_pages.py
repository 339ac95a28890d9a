"""The help pages in Chinese and Japanese say what the English ones say: block for block, the same figures, names and choices.

What a test cannot read is the sense of a sentence. So each translation ends with the mark of the English text that it was made
from: whoever changes an English page comes to both others, and writes the new mark.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from typing import Any

import pytest

import fusestream.nodes
from bed.covers import COVERS, HEADS
from bed.families import BLOCK, HELP
from fusestream.fusion.families import FAMILIES

LOCALES = HELP.parents[2] / "locales"
LANGUAGES = tuple(HEADS)
SCHEMAS = {node.GET_SCHEMA().node_id: node.GET_SCHEMA() for node in fusestream.nodes.NODES}
INPUTS = {item.id for schema in SCHEMAS.values() for item in schema.inputs}
CHOICES = {
    str(one) for schema in SCHEMAS.values() for item in schema.inputs for one in getattr(item, "options", None) or ()
}
TITLES = {schema.display_name: node for node, schema in SCHEMAS.items()}

FIGURE = re.compile(r"\d+(?:\.\d+)?")
CODE = re.compile(r"`[^`]+`")
PICTURE = re.compile(r"!\[[^]]+\]\(([^)]+)\)")
LINK = re.compile(r"\]\(([^)]+)\)")
BOLD = re.compile(r"\*\*([^*]+)\*\*")
ITALIC = re.compile(r"(?<!\*)\*([^*]+)\*(?!\*)")
MARK = re.compile(r"\n<!-- of: (\w+) -->\n$")

each_page = pytest.mark.parametrize("node", SCHEMAS)
each_language = pytest.mark.parametrize("language", LANGUAGES)


def read(node: str, language: str | None = None) -> str:
    path = HELP / f"{node}.md" if language is None else HELP / node / f"{language}.md"
    return path.read_text(encoding="utf-8")


def written(text: str) -> str:
    """What a person wrote of it: without what a command fills in, and without the mark."""
    return BLOCK.sub(r"\1\2", MARK.sub("\n", text))


def mark(english: str) -> str:
    return hashlib.sha256(written(english).encode()).hexdigest()[:8]


def blocks(text: str) -> list[tuple[str, str]]:
    """Headings, rows, items and paragraphs, each by its kind and as one line. English goes on in the next line, others do not."""
    found: list[tuple[str, str]] = []
    goes_on = False
    for line in written(text).splitlines():
        begins = re.match(r"(#+ |\||- |<!--|!\[)", line)
        if begins or not goes_on:
            found += [((begins[0].strip() if begins else "text"), line)] if line else []
        else:
            kind, before = found.pop()
            found.append((kind, f"{before} {line.strip()}"))
        goes_on = bool(line) and not line.startswith(("#", "|", "<!--"))
    return found


def pairs(node: str, language: str) -> list[tuple[str, str]]:
    ours, theirs = blocks(read(node)), blocks(read(node, language))
    assert [kind for kind, _ in theirs] == [kind for kind, _ in ours]
    return [(one, other) for (_, one), (_, other) in zip(ours, theirs, strict=True)]


def names(language: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))
    return found


@each_language
@each_page
def test_it_was_made_from_the_english_page_as_it_is(node: str, language: str) -> None:
    found = MARK.search(read(node, language))
    now = mark(read(node))
    assert found and found[1] == now, (
        f"{node}.md has changed: bring that into {node}/{language}.md, and end it with <!-- of: {now} -->"
    )


@each_language
@each_page
def test_it_has_the_same_figures_code_and_links(node: str, language: str) -> None:
    for english, translated in pairs(node, language):
        for what in (FIGURE, CODE, PICTURE, LINK):
            assert Counter(what.findall(translated)) == Counter(what.findall(english)), (what.pattern, translated)


@each_language
@each_page
def test_pictures_are_where_the_front_end_looks_for_them(node: str, language: str) -> None:
    """It goes by the folder of the English pages in every language."""
    for path in LINK.findall(read(node, language)):
        assert (HELP / path).is_file()


@each_language
@each_page
def test_nodes_inputs_and_choices_are_called_as_on_the_nodes(node: str, language: str) -> None:
    known = names(language)
    own = known[node]["inputs"]
    said = {key: item["name"] for one in (*known.values(), known[node]) for key, item in one["inputs"].items()}
    in_outputs = False
    for english, translated in pairs(node, language):
        if english.startswith("# "):
            assert translated == f"# {known[node]['display_name']}"
        in_outputs = english.startswith("## Output") or (in_outputs and not english.startswith("#"))
        bold, italic = BOLD.findall(translated), ITALIC.findall(translated)
        for name in set() if in_outputs else set(BOLD.findall(english)) & INPUTS:
            assert said[name] in bold, (name, translated)
        for title in set(ITALIC.findall(english)) & TITLES.keys():
            assert known[TITLES[title]]["display_name"] in italic, (title, translated)
        for choice in set(ITALIC.findall(english)) & CHOICES:
            assert choice in italic, (choice, translated)
        head = None if in_outputs else re.match(r"- ((?:\*\*\w+\*\*(?:, )?)+):", english)
        if head and set(listed := BOLD.findall(head[1])) <= own.keys():
            told = re.findall(r"\*\*([^*]+)\*\*（(\w+)）", translated)
            assert told[: len(listed)] == [(own[name]["name"], name) for name in listed], translated


@each_language
@each_page
def test_messages_are_quoted_as_they_are_said(node: str, language: str) -> None:
    """In English, which no translation changes, with the sense behind them."""
    for english, translated in pairs(node, language):
        if head := re.match(r"- (\*[a-zT].*?\*)(?: \([^)]*\))?:", english):
            quoted = ITALIC.findall(head[1])
            assert [one for one in quoted if one not in ITALIC.findall(translated)] == [], translated


@each_language
def test_the_words_of_every_family_are_translated_and_no_others(language: str) -> None:
    """The tables are written by a command, of these."""
    assert COVERS.keys() == {family.covers for family in FAMILIES}, "tools/bed/covers.py"
    for english, translations in COVERS.items():
        assert Counter(FIGURE.findall(translations[language])) == Counter(FIGURE.findall(english)), english

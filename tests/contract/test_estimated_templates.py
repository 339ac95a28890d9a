"""How many of ComfyUI's own templates get an estimate, and why the others get none: docs/templates.md says it, a part is tried
each time, and all with --thorough."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from contract.estimated_templates import ESTIMATE, NOT_RUN, NOT_SWAPPED, PARTLY, Stand, nodes_of_comfyui
from contract.page_table import rows_of, table

from bed.depth import is_thorough
from bed.paths import ROOT

PAGE = ROOT / "docs" / "templates.md"
BLOCK = re.compile(r"(<!-- estimates:begin -->\n).*?(<!-- estimates:end -->)", re.DOTALL)
HEADS = ("What the loader shows", "Templates", "Which")
PACKAGE = "comfyui-workflow-templates"
# Switches, sizes of pictures, bypassed nodes, several loaders; and two that get none.
SAMPLE = (
    "basic_switch_node",
    "flux_kontext_dev_basic",
    "image_z_image_turbo",
    "templates-6-key-frames",
    "image_ideogram4_t2i",
    "utility_z_image_turbo_2k_upscaler.app",
)
AIM = 0.94  # share of those in which FuseStream's loader stands, and its model is sampled


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with nodes_of_comfyui() as known, Stand(tmp_path_factory.mktemp("stand"), known) as stand:
        yield stand


def rows() -> list[tuple[str, int, str]]:
    """Of the table; the page has another one of three columns."""
    return [(words, int(count), names) for words, count, names in rows_of(PAGE, HEADS) if count.isdecimal()]


def told_by_the_page() -> dict[str, str]:
    """By template what the page says; those that it does not name get an estimate."""
    return {name: words for words, _, names in rows() for name in re.findall(r"\*([^*]+)\*", names)}


@pytest.fixture
def of_this_package() -> None:
    if f"{PACKAGE} {version(PACKAGE)}" not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("the page is of other templates")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_template_gets_what_the_page_says(name: str, stand: Stand, of_this_package: None) -> None:
    assert stand.outcome(name) == told_by_the_page().get(name, ESTIMATE)


def test_most_of_the_templates_get_an_estimate(of_this_package: None) -> None:
    counts = {words: count for words, count, _ in rows()}
    apart = sum(counts.get(words, 0) for words in (NOT_SWAPPED, NOT_RUN, "no sampler takes this model yet"))
    told = sum(count for words, count in counts.items() if words.startswith((ESTIMATE, PARTLY)))
    assert told >= AIM * (sum(counts.values()) - apart)


@pytest.mark.skipif(not is_thorough(), reason="a minute for all templates")
def test_all_templates(stand: Stand, request: pytest.FixtureRequest) -> None:
    found = defaultdict(list)
    for name in stand.templates:
        found[stand.outcome(name)].append(name)
    ordered = sorted(found.items(), key=lambda one: (one[0] != ESTIMATE, -len(one[1]), one[0]))
    cells = [(words, str(len(names)), "" if words == ESTIMATE else _listed(names)) for words, names in ordered]
    text = "\n".join([f"Of {PACKAGE} {version(PACKAGE)}:", "", *table(HEADS, cells), ""])
    if request.config.getoption("--update-estimates"):
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(BLOCK.sub(lambda block: block[1] + text + block[2], page), encoding="utf-8", newline="\n")
    request.getfixturevalue("of_this_package")
    assert text in PAGE.read_text(encoding="utf-8"), "call this with --update-estimates"


def _listed(names: list[str]) -> str:
    return ", ".join(f"*{name}*" for name in sorted(names))


def test_the_page_is_written_by_a_test() -> None:
    assert BLOCK.search(PAGE.read_text(encoding="utf-8")) and Path(__file__).name in PAGE.read_text(encoding="utf-8")

"""README: a page that works in one minute. What it promises is there, and it is what continuous integration runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = ("python3 dev.py demo", "python3 dev.py test")
MOST_WORDS = 250  # of the first screen
WIDEST = 132  # columns of a table's row, which a screen shows without scrolling
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)


def test_the_two_commands_stand_there_each_in_a_block_of_its_own() -> None:
    blocks = re.findall(r"^```\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL)
    assert blocks == list(COMMANDS)


def test_continuous_integration_calls_the_second() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    called = [line for line in script.splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert called == [COMMANDS[1]]


def test_the_first_screen_is_short_and_has_one_picture() -> None:
    screen = README[: README.index("## Try it")]
    assert len(re.sub(r"[#*`\[\]()!|-]", " ", screen).split()) <= MOST_WORDS
    assert len(re.findall(r"!\[", screen)) == 1
    assert "## Install" in screen


def test_no_table_is_wider_than_a_screen_and_no_line_of_prose_than_a_page() -> None:
    lines = README.splitlines()
    assert max(len(line) for line in lines if line.lstrip().startswith("|")) <= WIDEST
    assert [line for line in GENERATED.sub("", README).splitlines() if len(line) > 100] == []


def test_ways_to_install_are_true_before_the_pack_is_published() -> None:
    """What will be true then stands in docs/install.md."""
    install = README[README.index("## Install") : README.index("## Try it")]
    assert not re.search(r"Manager|comfy node|git clone", install)
    assert "Manager" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")

"""The notes in Chinese and Japanese, sentence by sentence: one that `said.json` does not have is an error, so none can go stale.

ComfyUI has no translations of notes. `nodes/web/js/notes.js` puts these in place of the English ones while a workflow opens. What
a note has in bold is as the example has it; inputs of ours go by their names in `locales/` too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

LANGUAGES = ("zh", "ja")
SAID = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# In each language; a {word} stands for whatever is there, and comes back as it is.
SENTENCES: list[dict[str, str]] = SAID["sentences"]
TITLES: dict[str, dict[str, str]] = {title["en"]: title for title in SAID["titles"]}  # of the notes' nodes


def pattern(english: str) -> re.Pattern[str]:
    """A sentence with its places as groups."""
    pieces = re.split(r"{(\w+)}", english)
    places = [f"(?P<{piece}>.+?)" if index % 2 else re.escape(piece) for index, piece in enumerate(pieces)]
    return re.compile("".join(places) + r"(?= |$)")


PATTERNS = [(pattern(sentence["en"]), sentence) for sentence in SENTENCES]


class NotSaid(ValueError):
    """A sentence of a note is not in `SENTENCES`."""


def translated(note: str, language: str) -> str:
    """A note's Markdown in this language."""
    return "\n".join(_line(line, language) for line in note.split("\n"))


def _line(line: str, language: str) -> str:
    """Sentence by sentence, the longest that fits. Where sentences end with a full-width stop there is no space between them."""
    out, place = "", 0
    while place < len(line):
        fitting = [(found, sentence) for known, sentence in PATTERNS if (found := known.match(line, place))]
        if not fitting:
            raise NotSaid(f"tools/bed/templates/said.json has no sentence for {line[place:]!r}")
        found, sentence = max(fitting, key=lambda one: one[0].end())
        values = {name: _value(name, value, language) for name, value in found.groupdict().items()}
        out += sentence[language].format_map(values)
        place = found.end() + 1
    return out


def _value(name: str, value: str, language: str) -> str:
    """What stands at a place: as it is, but for a list's words and the size of a video."""
    if name in ("releases", "loaders"):
        return value.replace(" and ", "、").replace(", ", "、")
    return _line(value, language) if name == "size" and " frames" in value else value

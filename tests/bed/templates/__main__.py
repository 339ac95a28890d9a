"""Write every file in `workflows/` and `subgraphs/` and the notes in other languages, and take away what no example makes any
more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..paths import ROOT
from . import EXAMPLES
from .blueprints import BLUEPRINTS, blueprint
from .card import card
from .clip import write_clip
from .examples import CLIP
from .said import LANGUAGES, TITLES, translated

SHOWN = 384  # pixels of a side of a picture in the template browser: users download them all
WORKFLOWS, SUBGRAPHS = ROOT / "workflows", ROOT / "subgraphs"
NOTES = ROOT / "nodes" / "web" / "notes"


def texts() -> dict[Path, str]:
    """The JSON files by path, as they should be."""
    out = {}
    for example in EXAMPLES:
        graph = example.graph()
        out[WORKFLOWS / f"{example.title}.json"] = _text(graph.ui())
        out[WORKFLOWS / "api" / f"{example.name}.json"] = _text(graph.api())
    out |= {NOTES / f"{language}.json": _text(_notes(language)) for language in LANGUAGES}
    return out | {SUBGRAPHS / f"{task.name}.json": _text(blueprint(task)) for task in BLUEPRINTS}


def _notes(language: str) -> dict[str, dict[str, str]]:
    """By the English text what a note says in this language, and what its node is called."""
    notes = [node for example in EXAMPLES for node in example.graph().nodes if node.type == "MarkdownNote"]
    return {
        node.values["text"]: {
            "title": TITLES[str(node.title)][language],
            "text": translated(node.values["text"], language),
        }
        for node in notes
    }


def _text(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    wanted = texts()
    pictures = {WORKFLOWS / f"{example.title}.jpg": example for example in EXAMPLES}
    SUBGRAPHS.mkdir(exist_ok=True)
    NOTES.mkdir(exist_ok=True)
    for folder in (WORKFLOWS, WORKFLOWS / "api", SUBGRAPHS, NOTES):
        for path in folder.iterdir():
            if path.suffix in (".json", ".jpg") and path not in wanted and path not in pictures:
                path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    write_clip(WORKFLOWS / CLIP)
    for path, example in pictures.items():
        card(example).resize((SHOWN, SHOWN)).save(path, quality=70, optimize=True, progressive=True)
    print(f"{len(EXAMPLES)} workflows in {WORKFLOWS}, {len(BLUEPRINTS)} blueprints in {SUBGRAPHS}")


if __name__ == "__main__":
    main()

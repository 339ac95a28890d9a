"""Write every file in `workflows/` and `subgraphs/` and the notes in other languages, and take away what nothing makes any
more. Pictures that are there stay: a title that changes is another file. `--pictures` makes them anew.
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from ..paths import ROOT
from . import EXAMPLES, SWAPPED, Example, Swapped
from .blueprints import BLUEPRINTS, blueprint
from .card import card
from .from_stock.note import HEADING
from .inputs import write_inputs
from .listed import index
from .said import LANGUAGES, TITLES, translated

# Pixels of a side of a picture in the template browser, and bytes of its file: users download them all.
SHOWN, LARGEST = 320, 12_000
WORKFLOWS, SUBGRAPHS = ROOT / "workflows", ROOT / "subgraphs"
INPUTS = WORKFLOWS / "inputs"
WEB = ROOT / "nodes" / "web"
NOTES, INDEX = WEB / "notes", WEB / "templates" / "index.json"


def texts() -> dict[Path, str]:
    """The JSON files by path, as they should be."""
    out = {}
    for example in EXAMPLES:
        graph = example.graph()
        out[WORKFLOWS / f"{example.listed.stem}.json"] = _text(graph.ui())
        out[WORKFLOWS / "api" / f"{example.name}.json"] = _text(graph.api())
    out[INDEX] = _text(index([one.listed.entry(one.gigabytes) for one in (*EXAMPLES, *SWAPPED)]))
    out |= {NOTES / f"{language}.json": _text(_notes(language)) for language in LANGUAGES}
    return out | {SUBGRAPHS / f"{task.name}.json": _text(blueprint(task)) for task in BLUEPRINTS}


def swapped_texts() -> dict[Path, str]:
    """The same of ComfyUI's templates with our loaders, of those that are installed here."""
    return {one.path: _text(one.made()) for one in SWAPPED}


def _notes(language: str) -> dict[str, dict[str, str]]:
    """By the English text what a note says in this language, and what its node is called."""
    nodes = [node for example in EXAMPLES for node in example.graph().nodes if node.type == "MarkdownNote"]
    notes = {node.values["text"]: str(node.title) for node in nodes} | {one.note(): HEADING for one in SWAPPED}
    return {
        text: {"title": TITLES[title][language], "text": translated(text, language)} for text, title in notes.items()
    }


def _text(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    cli = argparse.ArgumentParser(prog="dev.py workflows")
    cli.add_argument("--pictures", action="store_true")
    options = cli.parse_args()
    ours = swapped_texts()
    for path, text in ours.items():  # whose notes the next line reads
        path.write_text(text, encoding="utf-8")
    wanted = texts() | ours
    pictures = {WORKFLOWS / f"{one.listed.stem}.jpg": one for one in (*EXAMPLES, *SWAPPED)}
    SUBGRAPHS.mkdir(exist_ok=True)
    NOTES.mkdir(exist_ok=True)
    INDEX.parent.mkdir(exist_ok=True)
    for folder in (WORKFLOWS, WORKFLOWS / "api", SUBGRAPHS, NOTES):
        for path in folder.iterdir():
            if path.suffix in (".json", ".jpg") and path not in wanted and path not in pictures:
                path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    write_inputs(INPUTS)
    draw({path: example for path, example in pictures.items() if options.pictures or not path.exists()})
    print(f"{len(EXAMPLES) + len(SWAPPED)} workflows in {WORKFLOWS}, {len(BLUEPRINTS)} blueprints in {SUBGRAPHS}")


def draw(pictures: dict[Path, Example | Swapped]) -> None:
    """Those that are named, with what their examples make."""
    from .frames import shown  # needs ComfyUI and the trained small model

    made = shown([example.name for example in pictures.values()]) if pictures else {}
    for path, example in pictures.items():
        picture = card(example, made.get(example.name)).resize((SHOWN, SHOWN))
        path.write_bytes(_pressed(picture))


def _pressed(picture: Image.Image) -> bytes:
    """As a JPEG that is no larger than it may be; stripes and checks take more of it than anything else."""
    for quality in range(70, 30, -4):
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality, optimize=True, progressive=True)
        if file.tell() <= LARGEST:
            break
    return file.getvalue()


if __name__ == "__main__":
    main()

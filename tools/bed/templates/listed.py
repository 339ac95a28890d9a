"""How a template stands in the template browser: by the name of its file, or as `nodes/web/templates/index.json` has it.

ComfyUI lists a pack's templates by the names of their files alone, in the order of the file system; a name is title, description
and all that is searched. An entry of the index has what ComfyUI's own have: `nodes/web/js/templates.js` gives them to the browser.
Where that does not work any more the names still say it all, and the first one comes first in the order of letters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOLD = 20  # letters of a title that every card shows
REACH = 33  # front end 1.47 finds no word of a text that begins behind this letter
CARD = "8 GB"


@dataclass(frozen=True)
class Listed:
    """title: its first letters tell it from all others. task, storage: what it does, and what its file's numbers are, for what the
    title leaves out. tag, models: of the words by which ComfyUI's own are filtered."""

    title: str
    task: str
    storage: str
    tag: str
    models: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The name of the file."""
        words = (self.title, "" if self.storage in self.title else self.storage, CARD, self.task, "FuseStream")
        return ", ".join(filter(None, words))

    @property
    def description(self) -> str:
        """What is searched for stands within reach."""
        return f"FuseStream for {CARD} cards, {self.storage}: {self.task}"

    def entry(self, gigabytes: float) -> dict[str, Any]:
        """In the words of ComfyUI's own index; its size is that of all files, in bytes."""
        return {
            "name": self.stem,
            "title": self.title,
            "description": self.description,
            "mediaType": "image",
            "mediaSubtype": "jpg",
            "tags": [self.tag],
            "models": list(self.models),
            "size": round(gigabytes * 1e9),
        }


def index(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The index, of one category, in the order in which they are shown."""
    return [{"moduleName": "FuseStream", "title": "FuseStream", "templates": entries}]

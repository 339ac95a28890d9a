"""The tables of supported models in README and on the nodes' help pages, made from the families: `python3 dev.py docs`."""

from __future__ import annotations

import re
from pathlib import Path

from . import pack
from .paths import ROOT

pack.load()

from fusestream.fusion.families import FAMILIES  # noqa: E402 - the line above makes it importable
from fusestream.fusion.family import Role  # noqa: E402

BLOCK = re.compile(r"(<!-- families:begin -->\n).*?(<!-- families:end -->)", re.DOTALL)
HELP = ROOT / "nodes" / "web" / "docs"
PAGES = {
    ROOT / "README.md": tuple(Role),
    HELP / "FuseStreamDiffusionModelLoader.md": (Role.DIFFUSION,),
    HELP / "FuseStreamTextEncoderLoader.md": (Role.TEXT,),
    HELP / "FuseStreamVAELoader.md": (Role.VAE,),
}


def table(roles: tuple[Role, ...]) -> str:
    """A row for each family of these roles."""
    lines = ["| Family | Computed by FuseStream |", "| --- | --- |"]
    lines += [
        f"| {family.name}{f' ({family.role.words})' if len(roles) > 1 else ''} | {family.covers} |"
        for role in roles
        for family in FAMILIES
        if family.role is role
    ]
    return "\n".join(lines)


def rendered(page: Path) -> str:
    """The page with its table."""
    text = page.read_text(encoding="utf-8")
    return BLOCK.sub(lambda found: f"{found[1]}\n{table(PAGES[page])}\n\n{found[2]}", text)


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()

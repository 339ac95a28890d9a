"""The rows from a text to a picture or a video, as ComfyUI's templates do it: text encoder, sampling and VAE one after another, and
again with another prompt. On a card of which 8 GiB are free, and on the whole of a small machine. Sound stays a latent.

Standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from .row_types import Row, Side, Work, unpromised

SMALL_RAM = 16.0  # GiB
FREE = (8.0, 6.0, 4.0)  # GiB of the card
FASTEST = "Fastest"


def whole() -> list[Row]:
    """Of models of today in the files that ComfyUI's templates name."""

    def row(model: str, work: Work, height: int, width: int, frames: int, steps: int, note: str) -> Row:
        told = f"int8_convrot, {note}"
        return Row(
            model,  # type: ignore[arg-type]
            work,
            height,
            width,
            frames,
            steps,
            asked=1.3,
            group="whole",
            note=told,
            storage="int8_convrot",
        )

    return [
        Row("sdxl", "picture", 1024, 1024, steps=20, asked=1.3, group="whole", note="20 steps"),
        row("z_image", "picture", 1024, 1024, 0, 8, "8 steps"),
        row("krea2", "picture", 1024, 1024, 0, 8, "8 steps"),
        row("qwen_image", "picture", 1024, 1024, 0, 4, "4 steps"),
        row("wan14", "video", 480, 832, 81, 4, "2 steps of each of two models"),
        row("ltx23", "video", 512, 768, 121, 8, "8 steps, sound not decoded"),
        row("minimax_h3", "video", 480, 832, 124, 4, "4 steps, sound not decoded"),
    ]


def small_machines() -> list[Row]:
    """The same and two more on a machine of 16 GB with a card in a PCIe 3 slot, of which 8, 6 and 4 GiB are free; what a user gets
    who changes nothing, and *Fastest*. Little VRAM first, because there it is told who fits."""
    plain = [unpromised(row) for row in whole()]
    klein = Row("klein4", "picture", 1024, 1024, steps=4, kind="flux2")
    wan = Row("wan13", "video", 480, 832, 81, 10, note="10 steps")
    return [found for row in (*plain, klein, wan) for gib in reversed(FREE) for found in _on_a_small_machine(row, gib)]


def _on_a_small_machine(row: Row, gib: float) -> list[Row]:
    machine = Side(windows=True)
    told = ", ".join(part for part in (row.note, f"{SMALL_RAM:g} GiB of RAM", f"{gib:g} GiB free") if part)
    auto = replace(row, group="machine", note=told, over=row.note, free=gib, ram=SMALL_RAM, stock=machine, ours=machine)
    fastest = replace(machine, precision="turbo")
    return [
        replace(auto, asked=1.0),
        replace(auto, note=f"{told}, {FASTEST}", over=told, stock=None, ours=fastest),
    ]

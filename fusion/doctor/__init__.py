"""A report on this machine, for its owner or for a bug report: a verdict, what to do, and why.

    text = as_text(examine())

Probes cannot raise: errors become lines of the report. Nothing here imports ComfyUI, so that the
doctor also helps if ComfyUI does not start. A running ComfyUI is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from . import bus, card, comfyui, families, fit, machine, model_file
from .findings import Finding, Probe, ask
from .verdict import Colour, Verdict, as_text, verdict

__all__ = ["Colour", "Finding", "Verdict", "as_text", "ask", "examine", "probes", "verdict"]


def probes(
    comfyui_folder: Path | None = None,
    pack_folders: Sequence[Path] = (),
    model: Path | None = None,
    *,
    measure: bool = True,
) -> list[tuple[str, Probe]]:
    """Titles and probes, in the order of the report.

    comfyui_folder: of a ComfyUI that does not run here. model: a file whose types are told and
    whose disk is measured. measure: also measure the rates, which takes seconds.
    """
    rates: list[tuple[str, Probe]] = [("Pager and bus", bus.pager), ("Disk", partial(bus.disk, model))]
    return [
        ("Pack", partial(machine.pack, pack_folders)),
        ("System", machine.system),
        ("RAM", machine.memory),
        ("torch", machine.versions),
        ("Driver", card.graphics_driver),
        ("Cards", card.cards),
        ("Prebuilt kernels", card.prebuilt),
        ("Kernels", card.kernels),
        ("Families", families.known),
        ("Largest diffusion model", partial(model_file.stored, model)),
        *(rates if measure else []),
        ("ComfyUI", partial(comfyui.version, comfyui_folder)),
        ("ComfyUI and FuseStream", partial(fit.fit, comfyui_folder)),
        ("ComfyUI's switches", comfyui.switches),
        ("ComfyUI's memory", comfyui.memory_management),
        ("Other packs", partial(comfyui.other_packs, pack_folders)),
    ]


def examine(
    comfyui_folder: Path | None = None,
    pack_folders: Sequence[Path] = (),
    model: Path | None = None,
    *,
    measure: bool = True,
) -> list[Finding]:
    """Ask all probes."""
    return [ask(title, probe) for title, probe in probes(comfyui_folder, pack_folders, model, measure=measure)]

"""The doctor: a report on this machine, to read and to paste.

It is a node, and an address of the server for the page's menu, which needs no graph.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_api.latest import io, ui

from ..fusion.base.family import Role
from . import declare, files
from .declare import About, Node, widget
from .page.front_end import answered, is_busy, running_server
from .page.one_at_a_time import NoTurn, OneAtATime

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

PATH = "/fusestream/doctor"
BUSY = "\nRates were not measured: ComfyUI is at work, and both would be slower for it. Ask again when it is idle.\n"

_examining: OneAtATime[str] = OneAtATime()


class Doctor(Node):
    """An output node, so that a graph may consist of it alone."""

    about = About(
        "Doctor",
        declare.REPORTS,
        "Looks at driver, card, kernels, pager, disk and ComfyUI, and writes what it finds: for a bug report, or "
        "to see why something is slow.",
        aliases=["diagnose", "system info", "bug report"],
        is_output_node=True,
        outputs=[
            io.String.Output(
                display_name="text",
                tooltip="The report as plain text, without folder names of yours. Connect it to Preview Any.",
            )
        ],
    )

    @dataclass(frozen=True)
    class Inputs:
        measure: bool = widget(
            "Also measures how fast weights reach the card and how fast the disk is: a few seconds, 256 MB read.",
            default=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_inputs: Any) -> float:  # the machine changes, the inputs do not
        return time.time()

    @classmethod
    def run(cls, inputs: Inputs) -> io.NodeOutput:
        text = examined(inputs.measure)
        return io.NodeOutput(text, ui=ui.PreviewText(text))


def examined(measure: bool) -> str:
    """The whole report. Takes seconds if it measures."""
    from ..fusion.doctor import as_text, examine  # noqa: PLC0415 - the server starts without it

    return as_text(examine(None, pack_folders(), largest_model(), measure=measure))


def pack_folders() -> list[Path]:
    return [Path(folder) for folder in folder_paths.get_folder_paths("custom_nodes")]


def largest_model() -> Path | None:
    """The file that the disk is measured with: the largest model."""
    roles = (Role.DIFFUSION, Role.CHECKPOINT)
    paths = (path for role in roles for name in files.listed(role) if (path := files.where(role, name)))
    sizes = {Path(path): Path(path).stat().st_size for path in paths if Path(path).is_file()}
    return max(sizes, key=sizes.__getitem__, default=None)


# ----------------------------------------------------------------------------------------------------- for the page's menu


def attach() -> None:
    """Let the server answer at the address. Called once, before the server starts to listen."""
    server = running_server()
    if server is not None:
        server.routes.get(PATH)(answer)


async def answer(request: web.Request) -> web.Response:
    """The report as text, or why there is none.

    It is made in another thread, because examining takes seconds and the server goes on meanwhile.
    """
    from aiohttp import web  # noqa: PLC0415 - only a server has it

    try:
        text = await _examining.do(request, lambda _is_over: report())
    except NoTurn:  # nobody hears it
        return answered({"error": "Whoever asked has left."}, 400)
    except Exception as error:
        log.exception("the doctor stopped")
        text = f"The doctor stopped: {type(error).__name__}: {error}. The place is in ComfyUI's log; please report it."
        return web.Response(text=text, status=500)
    return web.Response(text=text)


def report() -> str:
    """The node's text, without rates while a graph runs."""
    busy = is_busy()
    return examined(measure=not busy) + (BUSY if busy else "")

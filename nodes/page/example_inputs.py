"""The pictures and the clip that our examples load.

They come with the pack, in `workflows/inputs`, and ComfyUI's loaders see its input folder alone. So
the page asks for one when a workflow that names it opens, as ComfyUI's newer pages fetch what its
own templates load. Nothing is written for who opens none, and a file that is there stays as it is.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import folder_paths

from .front_end import answered, running_server

if TYPE_CHECKING:
    from aiohttp import web

PATH = "/fusestream/example_inputs/{name}"
FOLDER = Path(__file__).parents[2] / "workflows" / "inputs"

log = logging.getLogger("fusestream.example_inputs")


def attach() -> None:
    """Let the server answer at the address. Called once, before it starts to listen."""
    server = running_server()
    if server is not None:
        server.routes.post(PATH)(answer)


async def answer(request: web.Request) -> web.Response:
    """Answers {"is_new": whether the file was not there}; 404 for a name that is none of ours."""
    name = request.match_info["name"]
    if name not in (path.name for path in FOLDER.iterdir()):
        return answered({"error": "This is no input of an example."}, 404)
    try:
        return answered({"is_new": put(name)})
    except OSError as error:
        log.warning("%s could not be put into the input folder: %s", name, error)
        return answered({"error": "It could not be written."}, 500)


def put(name: str) -> bool:
    """Copy one of ours into the input folder; False: a file of this name is there."""
    content = (FOLDER / name).read_bytes()
    target = Path(folder_paths.get_input_directory()) / name
    try:
        file = target.open("xb")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(content)
    except OSError:
        target.unlink()  # half of it would be taken for all of it
        raise
    return True

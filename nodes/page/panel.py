"""Answers to the page's panel: the models in memory, the release of one, and the last reports.

No answer names a folder: models are named by their files, and reports name none.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from . import between_prompts, kept_reports
from .front_end import answered, running_server
from .request_body import Refused, body_of

if TYPE_CHECKING:
    from aiohttp import web

    from ...fusion.report import Report

MODELS, RELEASE = "/fusestream/models", "/fusestream/models/release"
REPORTS, PICTURE = "/fusestream/reports", "/fusestream/reports/{id}/picture"
PAIR, PAIR_PICTURE = "/fusestream/reports/{id}/{other}", "/fusestream/reports/{id}/{other}/picture"
EVENT = "fusestream.panel"  # a change of one of these
THEMES = "dark", "light"
ASKS, MOST_BYTES = '{"id": the number of a model}', 4096

_asked: set[int] = set()  # models that are released when the prompt is done


def attach() -> None:
    """Let the server answer at these addresses. Called once, before it starts to listen."""
    server = running_server()
    if server is not None:
        server.routes.get(MODELS)(models)
        server.routes.post(RELEASE)(release)
        server.routes.get(REPORTS)(reports)
        for path, answer in ((PICTURE, picture), (PAIR, pair), (PAIR_PICTURE, picture)):
            server.routes.get(path)(answer)
        between_prompts.always(kept_reports.keep_those_of_the_prompt)
        between_prompts.always(tell)


def tell() -> None:
    """Tell every open page that something changed."""
    server = running_server()
    if server is not None:
        server.send_sync(EVENT, {})


async def models(_request: web.Request) -> web.Response:
    """The models in memory, each with whether it is about to be released."""
    found = await asyncio.get_running_loop().run_in_executor(None, _models)
    return answered({"models": found})


async def release(request: web.Request) -> web.Response:
    """Answers {"id": a model's}. Releases it now, or after the prompt. 404: it is gone."""
    try:
        id = (await body_of(request, ASKS, MOST_BYTES)).get("id")
        if not isinstance(id, int) or isinstance(id, bool):
            raise Refused(f"This asks for {ASKS}.")
    except Refused as why:
        return why.answer()
    state = await asyncio.get_running_loop().run_in_executor(None, partial(_release, id))
    return answered({"state": state}, 404 if state == "gone" else 200)


async def reports(_request: web.Request) -> web.Response:
    """The reports, newest first. seconds, stall: of a typical pass, and of waiting in it. run: of the
    last sampling, its times in words; None: nothing was sampled."""
    found = [
        {
            "id": one.id,
            "when": one.when,
            "title": one.report.title,
            "policy": one.report.policy,
            "seconds": one.report.pass_seconds,
            "stall": one.report.stall_seconds,
            "run": _run(one.report),
            "text": one.text,
        }
        for one in kept_reports.kept()
    ]
    return answered({"reports": found})


def _run(report: Report) -> dict[str, Any] | None:
    from ...fusion.base.format import took  # noqa: PLC0415

    found = report.sampling
    if found is None:
        return None
    frames, height, width = found.pixels
    return {
        "frames": frames,
        "size": f"{width}x{height}" if width else "",
        "steps": found.steps,
        "all": took(found.spent),
        "step": took(found.seconds),
    }


async def pair(request: web.Request) -> web.Response:
    """What differs between two reports, as text: the first is A, the second B. 404: one is gone."""
    from ...fusion.report import compare_text  # noqa: PLC0415

    found = _asked_for(request)
    return _gone() if found is None else answered({"text": compare_text(*found)})


async def picture(request: web.Request) -> web.Response:
    """The picture of a report, or of two side by side, as PNG. theme: dark or light."""
    from aiohttp import web  # noqa: PLC0415

    theme = request.query.get("theme", THEMES[0])
    if theme not in THEMES:
        return answered({"error": f"theme is one of {', '.join(THEMES)}."}, 400)
    found = _asked_for(request)
    if found is None:
        return _gone()
    drawn = await asyncio.get_running_loop().run_in_executor(None, partial(_drawn, found, theme))
    return web.Response(body=drawn, content_type="image/png")


def _asked_for(request: web.Request) -> list[Report] | None:
    """The reports that an address names; None: one is not kept any more."""
    kept = {str(one.id): one.report for one in kept_reports.kept()}
    names = request.match_info.values()
    return [kept[name] for name in names] if all(name in kept for name in names) else None


def _gone() -> web.Response:
    return answered({"error": "There is no such report any more."}, 404)


def _models() -> list[dict[str, Any]]:
    from . import in_memory  # noqa: PLC0415

    return [{**asdict(one), "waiting": one.id in _asked} for one in in_memory.models()]


def _release(id: int) -> str:
    """released, or waiting for the running prompt, or gone before."""
    from . import in_memory  # noqa: PLC0415

    if not in_memory.is_there(id):
        return "gone"
    if id in _asked:
        return "waiting"

    def now() -> None:
        _asked.discard(id)
        in_memory.release(id)
        tell()

    _asked.add(id)
    return "released" if between_prompts.do(now) else "waiting"


def _drawn(reports: list[Report], theme: Any) -> bytes:
    from ...fusion.report import draw, draw_pair  # noqa: PLC0415

    written = BytesIO()
    first, *others = reports
    (draw_pair(first, others[0], theme) if others else draw(first, theme)).save(written, "PNG")
    return written.getvalue()

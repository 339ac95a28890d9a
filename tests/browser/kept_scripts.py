"""A pack of the test server's own: the browser may keep the front end's scripts, whose names change with what is in them.

ComfyUI forbids it for all scripts alike. Kept ones need not be sent and compiled anew for every page, half a second each.
"""

from aiohttp import web
from server import PromptServer

NODE_CLASS_MAPPINGS = {}


async def may_be_kept(request: web.Request, response: web.StreamResponse) -> None:
    if request.path.startswith("/assets/"):
        response.headers["Cache-Control"] = "public, max-age=86400, immutable"


PromptServer.instance.app.on_response_prepare.append(may_be_kept)

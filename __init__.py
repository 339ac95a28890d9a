"""FuseStream: Wan video on 8 GB NVIDIA cards.

ComfyUI imports this file and asks it two things: `comfy_entrypoint` for the nodes, `WEB_DIRECTORY` for their help
pages. Nothing here touches CUDA, a file or the network.
"""

from .fusion.base import needed_comfyui

# Before an older ComfyUI has got anything of ours: it goes on as if the pack were not there.
needed_comfyui.refuse_older()

# Only ComfyUI's own absence may hide the nodes (a type checker or a test collector reads this file without it).
# An import that fails inside the pack must stay loud, so the pack's own import stands outside the guard.
try:
    import comfy_api.latest  # noqa: F401
except ImportError:
    __all__: list[str] = []
else:
    from .nodes import comfy_entrypoint

    WEB_DIRECTORY = "./nodes/web"
    __all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]

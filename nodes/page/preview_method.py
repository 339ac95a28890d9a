"""Which of ComfyUI's previewers makes the moving previews of a sampling.

A user's choice counts: ComfyUI's *Live preview method*, or `--preview-method`. Where there is none
ComfyUI shows nothing. A video of a model of ours then has previews by *latent2rgb*, which cost next
to nothing. There, and with *auto*, a tiny decoder (`taew2_1` and the like in `models/vae_approx`)
makes them instead, if its file is there and memory is free for it: no weight makes room for a
preview.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import folder_paths

from .front_end import running_server

OPTION = "--preview-method"
LEFT_OPEN = None, "", "default"  # what a page queues with, where its user has not chosen
FOLDER = "vae_approx"
OF_A_PROMPT = 3  # what a page says beside its prompt, in an entry of ComfyUI's queue


class Previewers(NamedTuple):
    """
    stocks       ComfyUI's previewer; None: there are no previews
    tiny         makes the previewer by a tiny decoder; None: it is `stocks`, or there is none
    for_videos   whether only videos have previews, because the user has not asked for any
    """

    stocks: Any
    tiny: Callable[[], Any] | None = None
    for_videos: bool = False


def previewers(latent_preview: Any, latent_format: Any, make: Callable[[], Any]) -> Previewers:
    """The previewers for a model of ours. make: ComfyUI's function, by the method of the moment."""
    methods = latent_preview.LatentPreviewMethod
    is_open = is_left_open(latent_preview)
    is_ours = is_open or latent_preview.args.preview_method is methods.Auto

    def tiny() -> Any:
        with _method(latent_preview, methods.TAESD):
            return make()

    with _method(latent_preview, methods.Latent2RGB) if is_open else contextlib.nullcontext():
        stocks = make()
    return Previewers(stocks, tiny if is_ours and has_decoder(latent_preview, latent_format) else None, is_open)


def is_left_open(latent_preview: Any) -> bool:
    """Whether neither the page nor the command line says which previews, so that ComfyUI shows
    none."""
    none = latent_preview.LatentPreviewMethod.NoPreviews
    if latent_preview.args.preview_method is not none or any(word.startswith(OPTION) for word in sys.argv):
        return False
    return _asked() in LEFT_OPEN


def has_decoder(latent_preview: Any, latent_format: Any) -> bool:
    """Whether the tiny decoder of this latent format's videos is there."""
    name = latent_format.taesd_decoder_name
    if name is None or name not in getattr(latent_preview, "VIDEO_TAES", ()):
        return False
    return any(file.startswith(name) for file in folder_paths.get_filename_list(FOLDER))


def has_room(decoder: Any, x0: Any) -> bool:
    """Whether memory is free to decode a latent frame of x0 [1, c, t, h, w], as ComfyUI reckons:
    no weight would be unloaded for it. decoder: ComfyUI's VAE of it."""
    import comfy.model_management as memory  # noqa: PLC0415 - the server starts without it

    frame = (1, x0.shape[1], 1, *x0.shape[3:])
    needed = decoder.memory_used_decode(frame, decoder.vae_dtype) + memory.extra_reserved_memory()
    weights = 1.1 * decoder.patcher.model_size()
    free: float = memory.get_free_memory(decoder.device)
    return bool(max(needed, memory.minimum_inference_memory()) + weights <= free)


def _asked() -> Any:
    """The method that the running prompt was queued with."""
    server = running_server()
    running = [] if server is None else list(server.prompt_queue.currently_running.values())
    told = running[0][OF_A_PROMPT] if running and len(running[0]) > OF_A_PROMPT else {}
    return told.get("preview_method") if isinstance(told, dict) else None


@contextlib.contextmanager
def _method(latent_preview: Any, method: Any) -> Iterator[None]:
    """Let ComfyUI make previewers by this method."""
    before, latent_preview.args.preview_method = latent_preview.args.preview_method, method
    try:
        yield
    finally:
        latent_preview.args.preview_method = before

"""Checks of a loader's file that ComfyUI asks for before anything runs: whether it is right, and
whether it is the same.

Both are asked at every click on Run, so the result for a sound file is remembered until the file
changes. Headers are read in another thread, because the server would answer no other request
meanwhile, and a disk may have to wake up first.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import importlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import folder_paths

from ..fusion.base.family import Role
from ..memory.formats import gguf_split
from .graph import queued

if TYPE_CHECKING:
    from ..fusion.load.checkpoint import Beside

# Names of other packs' folders for GGUF files: stock's folders, and others that a user has named
# so.
GGUF_FOLDERS = {Role.DIFFUSION: "unet_gguf", Role.TEXT: "clip_gguf"}
GGUF = ".gguf"  # not listed by stock
# The nodes that load a VAE file, and the widgets that name it.
VAE_LOADERS = {"FuseStreamVAELoader": "vae_name", "VAELoader": "vae_name"}
OUR_VAE_LOADER = "FuseStreamVAELoader"  # which is asked about its file itself; stock's is not
# Our nodes that load a model whose latents a VAE decodes, with the widgets that name it.
MODEL_LOADERS = {
    "FuseStreamDiffusionModelLoader": (Role.DIFFUSION, "model_name"),
    "FuseStreamCheckpointLoader": (Role.CHECKPOINT, "ckpt_name"),
}
# The outputs of a checkpoint's loader other than the model.
PLACES = {1: Role.TEXT, 2: Role.VAE}
MOST_ALIKE = 2  # names in a message
# TAESD, as stock's Load VAE offers it: by a name, from one encoder and one decoder file in this
# folder.
HALVES_FOLDER, HALVES = "vae_approx", ("encoder", "decoder")
FOLDED = {"taef2": 128}  # channels of the latents, if the files do not tell


def listed(role: Role) -> list[str]:
    """The names that a loader offers: stock's, and GGUF files, also those in other packs' folders.

    For a model in several files the first, and for VAEs also the small ones made of two files.
    """
    names = folder_paths.get_filename_list(role.folder)
    if role is Role.VAE:
        return [*names, *_listed_in_halves()]
    if role not in GGUF_FOLDERS:
        return list(names)
    return sorted({*names, *_ggufs(role)})


def path_of(role: Role, name: str) -> str:
    """The path of the file with this name. Raises `FileNotFoundError` as stock does."""
    here = where(role, name)
    if here is not None:
        return here
    path: str = folder_paths.get_full_path_or_raise(role.folder, name)
    return path


def halves_of(role: Role, name: str | None) -> tuple[str, str] | None:
    """The two files of a small VAE; None: the name is not of one, or there is a file of this
    name."""
    return _halves_named(name) if role is Role.VAE and where(role, name) is None else None


def read_halves(name: str) -> tuple[Any, dict[str, int] | None]:
    """Weights under stock's names with the latents' scale, and metadata for stock."""
    channels = FOLDED.get(name)
    return _stocks_vae_loader().load_taesd(name), None if channels is None else {"tae_latent_channels": channels}


def text_encoder_paths() -> tuple[str, ...]:
    """The paths of all the user's text encoders, because one may have what another lacks, such as a
    tokenizer."""
    folder = Role.TEXT.folder
    found = (folder_paths.get_full_path(folder, name) for name in folder_paths.get_filename_list(folder))
    return tuple(path for path in found if path is not None)


def _stocks_vae_loader() -> Any:
    return importlib.import_module("nodes").VAELoader  # ComfyUI's own


def _listed_in_halves() -> list[str]:
    """The names of small VAEs of which both halves exist."""
    return [name for name in _stocks_vae_loader().image_taes if _halves_named(name) is not None]


def _halves_named(name: str | None) -> tuple[str, str] | None:
    """The paths of the halves, as stock finds them. None: no such name, or a half is missing."""
    if name not in _stocks_vae_loader().image_taes:
        return None
    names = folder_paths.get_filename_list(HALVES_FOLDER)
    encoder, decoder = (next((one for one in names if one.startswith(f"{name}_{half}.")), None) for half in HALVES)
    if encoder is None or decoder is None:
        return None
    path = folder_paths.get_full_path_or_raise
    return path(HALVES_FOLDER, encoder), path(HALVES_FOLDER, decoder)


def _ggufs(role: Role) -> dict[str, str]:
    """Paths of GGUF files by name."""
    found: dict[str, str] = {}
    keys = (key for key in (role.folder, GGUF_FOLDERS[role]) if key in folder_paths.folder_names_and_paths)
    for folder in dict.fromkeys(folder for key in keys for folder in folder_paths.get_folder_paths(key)):
        for name in folder_paths.recursive_search(folder, excluded_dir_names=[".git"])[0]:
            part = gguf_split.NAME.fullmatch(name)
            if name.lower().endswith(GGUF) and (part is None or int(part["number"]) == 1):
                found.setdefault(name, str(Path(folder) / name))
    return found


def fingerprint(role: Role, name: str | None) -> str:
    """A mark of the file, which changes when it is replaced, written to or touched.

    So ComfyUI does not reuse an older model. It is short and discloses nothing, because it is saved
    with every picture. A name from a link is not known yet.
    """
    path = where(role, name)
    return "".join(map(state, halves_of(role, name) or ())) if path is None else state(path)


async def fault(role: Role, name: str | None) -> str | None:
    """The fault of the file of this name, in a sentence. None: its header is sound."""
    if name is None:  # it comes from a link
        return None
    if (unlisted := not_in_list(role, name)) is not None:
        return unlisted
    path = where(role, name)
    if path is None and halves_of(role, name) is not None:
        return None
    if path is None:
        return f"{name} is not in models/{role.folder} any more. Press R, and choose a file that is there."
    return await asyncio.to_thread(refused_by, _look_at, path, state(path), role)


async def missing_part(node: str | None, widget: str, name: str | None) -> str | None:
    """The part that the queued graph takes of this checkpoint and the file lacks, in a sentence."""
    graph = None if node is None or name is None else queued.graph(node, {widget: name})
    path = where(Role.CHECKPOINT, name)
    if graph is None or path is None:
        return None
    taken = [role for place, role in PLACES.items() if graph.is_taken(str(node), place)]
    beside = await asyncio.to_thread(_beside, path, state(path)) if taken else None
    if beside is None:
        return None
    for role in taken:
        if not (beside.text if role is Role.TEXT else beside.vae):
            here = f"{Path(path).name} has no {role.words} inside"
            return f"{here}: connect one from the {role.loader}, or get a checkpoint that has one."
    return None


async def wrong_vae(node: str | None, widget: str, name: str | None, role: Role = Role.DIFFUSION) -> str | None:
    """Why the VAE of a stock loader in the queued graph does not go with this model. node: the
    id of the model's loader."""
    graph = None if node is None or name is None else queued.graph(node, {widget: name})
    model = where(role, name)
    if graph is None or model is None:
        return None
    for loader in dict.fromkeys(graph.vaes(str(node))):
        entry = graph.prompt[loader]
        if entry["class_type"] == OUR_VAE_LOADER:
            continue  # the fault is shown there
        vae_name = entry["inputs"].get(VAE_LOADERS.get(entry["class_type"], ""))
        vae = where(Role.VAE, vae_name) if isinstance(vae_name, str) else None
        if vae is not None:
            found = await asyncio.to_thread(_mismatch, model, state(model), vae, state(vae))
            if found is not None:
                return without_folders(found, model, vae)
    return None


async def wrong_model(node: str | None, name: str | None) -> str | None:
    """Why this VAE does not go with a model in the queued graph whose latents it meets. node: the
    id of the VAE's loader."""
    graph = None if node is None or name is None else queued.graph(node, {VAE_LOADERS[OUR_VAE_LOADER]: name})
    vae = where(Role.VAE, name)
    if graph is None or vae is None:
        return None
    for loader in sorted(graph.running):
        entry = graph.prompt[loader]
        role, widget = MODEL_LOADERS.get(entry["class_type"], (None, ""))
        model_name = entry["inputs"].get(widget)
        if role is None or not isinstance(model_name, str) or str(node) not in graph.vaes(loader):
            continue
        model = where(role, model_name)
        if model is not None:
            found = await asyncio.to_thread(_mismatch, model, state(model), vae, state(vae))
            if found is not None:
                return without_folders(found, model, vae)
    return None


def where(role: Role, name: str | None) -> str | None:
    """The path of the file with this name; None: there is none."""
    if name is None:
        return None
    path: str | None = folder_paths.get_full_path(role.folder, name)
    if path is None and role in GGUF_FOLDERS and name.lower().endswith(GGUF):
        path = _ggufs(role).get(name)
    return path


def not_in_list(role: Role, name: str) -> str | None:
    """Stock's own check, because a node that checks an input itself replaces it, in words that say
    where the file may have gone."""
    names = listed(role)
    if name in names:
        return None
    here = f"{name} is not in models/{role.folder}"
    base = PurePosixPath(name.replace("\\", "/")).name
    moved = next((one for one in names if PurePosixPath(one.replace("\\", "/")).name == base), None)
    if moved is not None:
        return f"{here} any more: {moved} has its name. Choose that."
    other = next((one for one in Role if one is not role and name in listed(one)), None)
    if other is not None:
        return f"{here}: it is in models/{other.folder}. Move it, and press R."
    near = difflib.get_close_matches(name, names, MOST_ALIKE)
    alike = f" Names like it are {' and '.join(near)}." if near else ""
    return f"{here}: it was renamed or removed, or was never there.{alike} Choose another, or put it there and press R."


def state(path: str) -> str:
    """A mark of the file, and of the others if a model has several."""
    told = [_told(file) for file in gguf_split.named_alike(Path(path))]
    if isinstance(told[0], str) and len(told) == 1:  # the loader reports the error
        return told[0]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _told(file: Path) -> tuple[int, ...] | str:
    """The numbers by which `memory` tells two states of a file apart; or why there are none."""
    try:
        now = file.stat()
    except OSError as error:
        return error.strerror or type(error).__name__
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns


def refused_by(look: Callable[..., None], *args: Any) -> str | None:
    """The fault of headers, in a sentence; None: they are sound. look: at them, by these arguments,
    of which the first is a path, or several. What is refused is checked again, because another file
    may supply what one lacks by now."""
    from .. import fusion  # noqa: PLC0415 - the server starts without it
    from ..memory import BadFile  # noqa: PLC0415

    try:
        look(*args)
    except (fusion.WrongFile, BadFile) as error:
        return without_folders(str(error), *([args[0]] if isinstance(args[0], str) else args[0]))
    return None


def without_folders(sentence: str, *paths: str) -> str:
    """A sentence for the page, which names a file without its folder."""
    for path in paths:
        name = Path(path).name
        sentence = sentence.replace(f"{path}: ", f"{name} ").replace(path, name)
    return sentence


@lru_cache(maxsize=256)
def _look_at(path: str, _state: str, role: Role) -> None:
    from .. import fusion  # noqa: PLC0415

    fusion.inspect_file(path, role, text_encoder_paths() if role is Role.TEXT else ())


@lru_cache(maxsize=256)
def _beside(path: str, _state: str) -> Beside | None:
    from .. import fusion  # noqa: PLC0415

    return fusion.beside_the_model(path)


@lru_cache(maxsize=256)
def _mismatch(model: str, _model_state: str, vae: str, _vae_state: str) -> str | None:
    from ..fusion.identify import latents  # noqa: PLC0415
    from ..memory import BadFile  # noqa: PLC0415

    with contextlib.suppress(BadFile):  # its own loader reports that
        return latents.mismatch(model, vae)
    return None

"""What the estimate says of ComfyUI's own templates with our loader in the place of *Load Diffusion Model*.

    with nodes_of_comfyui() as kinds, Stand(folder, kinds) as stand:
        stand.outcome("image_z_image")      # "an estimate", or why there is none

The templates are those of the package that is installed, as the front end sends them. Their files
are not there: a tiny network of the same class stands in for each model, a drawn one for each
picture and video.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import contract.model_classes as classes
import folder_paths
import pytest
from PIL import Image

import nodes
from bed.paths import ROOT
from bed.templates.clip import write_clip
from bed.templates.from_stock.loaders import LOADERS, NotSwappable
from bed.templates.from_stock.prompt import prompt
from bed.templates.from_stock.swap import Json
from bed.templates.from_stock.swap import nodes as nodes_in
from bed.templates.signatures import signature
from fusestream.nodes import estimate_route
from fusestream.nodes.graph.prompt import Kind

WORDS = ROOT / "nodes" / "web" / "js" / "words.js"
REASONS = dict(re.findall(r'unknown_(\w+): "(.+)",', WORDS.read_text(encoding="utf-8")))
STOCKS, OURS = "UNETLoader", "FuseStreamDiffusionModelLoader"
ESTIMATE, PARTLY = "an estimate", "an estimate of some of its samplings"
NOT_SWAPPED = "*Load Diffusion Model* stays, because FuseStream's loader has no `weight_dtype`"
NOT_RUN = "*Load Diffusion Model* is in what is bypassed"
SIZE, FRAMES, SIDE = (1248, 832), 81, 64
PICTURES, VIDEOS = {"LoadImage": "image"}, {"LoadVideo": "file"}
# Which class of models a file has, by its name; the first that is found in it.
CLASSES: Mapping[str, str] = {
    "rt_detr": "",
    "vace": "WAN21_Vace",
    "wan2.1_fun_camera": "WAN21_Camera",
    "wan2.2_fun_camera": "WAN22_Camera",
    "fun_control_5B|fun_inpaint_5B|ti2v_5B": "WAN22_T2V",
    "fun_control": "WAN21_FunControl2V",
    "scail": "WAN21_SCAIL2",
    "dancer": "WAN22_WanDancer",
    "s2v": "WAN22_S2V",
    "humo": "WAN21_HuMo",
    "causal_forcing": "WAN21_CausalAR_T2V",
    "void": "CogVideoX_Inpaint",
    "hunyuanvideo1.5_1080p_sr": "HunyuanVideo15_SR_Distilled",
    "hunyuanvideo1.5|capybara": "HunyuanVideo15",
    "hunyuan_video": "HunyuanVideo",
    "kandinsky5lite_t2i": "Kandinsky5Image",
    "kandinsky": "Kandinsky5",
    "(wan|chrono).*(i2v|flf2v|fun_inp|ati|move|edit)": "WAN21_I2V",
    "wan|bernini": "WAN21_T2V",
    "flux.?2": "Flux2",
    "pid_": "PiD",
    "flux1-schnell": "FluxSchnell",
    "flux.1-fill|flux1-fill": "FluxInpaint",
    "flux1|flux.1": "Flux",
    "radiance": "ChromaRadiance",
    "chroma": "Chroma",
    "qwen|firered": "QwenImage",
    "z_image": "ZImage",
    "hidream": "HiDream",
    "acestep_v1.5": "ACEStep15",
    "anima": "Anima",
    "boogu": "Boogu",
    "ernie": "ErnieImage",
    "ideogram": "Ideogram4",
    "joyai": "JoyImage",
    "krea2": "Krea2",
    "lens": "Lens",
    "longcat|ovis": "LongCatImage",
    "lotus": "LotusD",
    "mage_flow": "MageFlow",
    "minimax": "MiniMaxH3",
    "newbie": "Lumina2",
    "omnigen2": "Omnigen2",
    "pixeldit": "PixelDiTT2I",
    "seedvr2": "SeedVR2",
    "triposplat": "TripoSplat",
    "ltx": "LTXAV",
}


def class_of(file: str) -> str:
    """The class that stands in for this file; empty: no sampler takes what is in it."""
    return next(found for pattern, found in CLASSES.items() if re.search(pattern, file, re.IGNORECASE))


def templates() -> dict[str, Path]:
    """The files of the templates that load a diffusion model by stock's node, by name."""
    from comfyui_workflow_templates import get_asset_path, iter_templates

    names = [entry.template_id for entry in iter_templates()]
    paths = {name: Path(get_asset_path(name, f"{name}.json")) for name in names}
    return {name: path for name, path in paths.items() if f'"{STOCKS}"' in path.read_text(encoding="utf-8")}


@contextlib.contextmanager
def nodes_of_comfyui() -> Iterator[dict[str, Any]]:
    """All classes of stock's nodes by name, as a server has them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "NODE_CLASS_MAPPINGS", dict(nodes.NODE_CLASS_MAPPINGS))
        patch.setattr(nodes, "NODE_DISPLAY_NAME_MAPPINGS", dict(nodes.NODE_DISPLAY_NAME_MAPPINGS))
        asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
        yield nodes.NODE_CLASS_MAPPINGS


class Stand:
    """A ComfyUI whose files are stand-ins, for as long as it is open."""

    def __init__(self, folder: Path, known: Mapping[str, Any]) -> None:
        self.folder, self.templates = folder, templates()
        self._info = {name: {"input": _inputs_of(kind)} for name, kind in known.items()}
        self._info[OURS] = {"input": {"required": dict.fromkeys(signature(OURS).widgets, ("COMBO",))}}
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Stand:
        _, endings = folder_paths.folder_names_and_paths["diffusion_models"]
        models = self.folder / "diffusion_models"
        models.mkdir(parents=True, exist_ok=True)
        place = ([str(models)], endings)
        self._patch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", place)
        self._patch.setattr(folder_paths, "input_directory", str(self.folder / "input"))
        stocks = estimate_route.queued.kind_of
        ours = Kind(tuple(kind for _, kind in signature(OURS).outputs), is_plain=False)
        self._patch.setattr(estimate_route.queued, "kind_of", lambda name: ours if name == OURS else stocks(name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch.undo()
        estimate_route._unread.cache_clear()
        folder_paths.filename_list_cache.clear()

    def outcome(self, name: str) -> str:
        """In the words of the page."""
        workflow: Json = json.loads(self.templates[name].read_text(encoding="utf-8"))
        swapped = [_swap(node) for node in nodes_in(workflow) if node["type"] == STOCKS]
        sent = prompt(workflow, self._info)
        loaders = [node for node in sent.values() if node["class_type"] == OURS]
        if not loaders:
            return NOT_RUN if any(swapped) else NOT_SWAPPED
        self._draw(sent)
        told = [one for wanted in self._classes(loaders) for one in self._asked(sent, wanted)]
        reasons = sorted({_words(one, sent) for one in told if "unknown" in one})
        if not reasons:
            return ESTIMATE if all(swapped) else PARTLY
        return "; ".join(reasons) if all("unknown" in one for one in told) else f"{PARTLY}: {'; '.join(reasons)}"

    def _classes(self, loaders: list[Json]) -> list[str]:
        return sorted({class_of(node["inputs"]["model_name"]) for node in loaders})

    def _asked(self, sent: dict[str, Json], wanted: str) -> Iterator[dict[str, Any]]:
        """The answer for the loaders of files of this class."""
        files = {node["inputs"]["model_name"] for node in sent.values() if node["class_type"] == OURS}
        ours = {name for name in files if class_of(name) == wanted}
        with classes.opened(wanted) if wanted else contextlib.nullcontext():
            for name in ours:
                self._model(name, wanted or "WAN21_T2V")
            estimate_route._unread.cache_clear()
            for loader, told in estimate_route.estimates(sent).items():
                if sent[loader]["inputs"]["model_name"] in ours:
                    yield from told

    def _model(self, name: str, of_class: str) -> None:
        target = self.folder / "diffusion_models" / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(classes.write(of_class, self.folder / "classes"), target)
            folder_paths.filename_list_cache.clear()

    def _draw(self, sent: dict[str, Json]) -> None:
        """The pictures and videos that a prompt loads."""
        (self.folder / "input").mkdir(exist_ok=True)
        for node in sent.values():
            widget = {**PICTURES, **VIDEOS}.get(node["class_type"])
            target = self.folder / "input" / str(node["inputs"].get(widget))
            if widget is None or target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if node["class_type"] in PICTURES:
                Image.new("RGB", SIZE).save(target, "PNG")
            else:
                write_clip(target.with_suffix(".mp4"), side=SIDE, frames=FRAMES)
                target.with_suffix(".mp4").rename(target)


def _inputs_of(kind: Any) -> Json:
    """As a server tells them."""
    told: Json = kind.GET_NODE_INFO_V1()["input"] if hasattr(kind, "define_schema") else kind.INPUT_TYPES()
    return told


def _swap(node: Json) -> bool:
    """Put our loader in a loader's place. False: it stays, as by the menu of the page."""
    swap = LOADERS[STOCKS]
    linked = {one["name"] for one in node["inputs"] if one.get("link") is not None}
    try:
        values = swap.values(node)
    except NotSwappable:
        return False
    if linked & swap.asked.keys():
        return False
    inputs = [{**one, "name": swap.widgets[one["name"]]} for one in node["inputs"] if swap.widgets.get(one["name"])]
    node.update(type=swap.ours, inputs=inputs, widgets_values=values)
    return True


def _words(told: dict[str, Any], sent: Mapping[str, Json]) -> str:
    """The reason as the page shows it, with the node's type for its title."""
    node = sent[told["node"]]["class_type"] if told["node"] in sent else ""
    text = REASONS[told["unknown"]].removesuffix(".")
    return re.sub(r"{(\w+)}", lambda found: str({**told["values"], "node": node}.get(found[1], "")), text)

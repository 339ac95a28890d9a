"""Which of ComfyUI's templates come with our loaders, in the order of the template browser, behind the examples."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ...paths import ROOT
from ..examples import EDIT, I2V, T2I, T2V, WAN22, Z_IMAGE
from ..graph import NAMESPACE
from ..listed import Listed
from .note import add_note, note_of
from .swap import Json, load_ours, swapped

PACKAGE = "comfyui-workflow-templates"


@dataclass(frozen=True)
class Swapped:
    """One by a short name, and by the name of ComfyUI's file; with what the template browser says of it. gigabytes: of
    its files together, by ComfyUI's own index."""

    name: str
    stocks: str
    listed: Listed
    gigabytes: float
    is_picture: bool = False
    is_live: bool = False

    @property
    def path(self) -> Path:
        return ROOT / "workflows" / f"{self.listed.stem}.json"

    def template(self) -> Json:
        """ComfyUI's, as it is installed here."""
        # Not everywhere where titles are read.
        from comfyui_workflow_templates import get_asset_path  # type: ignore[import-untyped, unused-ignore]

        text = Path(get_asset_path(self.stocks, f"{self.stocks}.json")).read_text(encoding="utf-8")
        workflow: Json = json.loads(text)
        return workflow

    def made(self) -> Json:
        """The workflow file, which says what it was made of."""
        workflow = swapped(self.template())
        load_ours(workflow)
        add_note(workflow, self.stocks)
        made_of = {"template": self.stocks, PACKAGE: version(PACKAGE)}
        name = str(uuid.uuid5(NAMESPACE, self.name))
        return {**workflow, "id": name, "extra": {"ds": workflow["extra"].get("ds"), "made_of": made_of}}

    def shipped(self) -> Json:
        """The same as it is in `workflows/`."""
        workflow: Json = json.loads(self.path.read_text(encoding="utf-8"))
        return workflow

    def is_of_these_templates(self) -> bool:
        """Whether those that are installed are those that it was made of."""
        made_of: dict[str, str] = self.shipped()["extra"]["made_of"]
        return made_of[PACKAGE] == version(PACKAGE)

    def note(self) -> str:
        return note_of(self.shipped())


H3, LTX, KREA = ("MiniMax H3",), ("LTX-2.3", "Lightricks"), ("Krea 2",)
SWAPPED = (
    Swapped(
        "minimax_h3_t2v",
        "video_minimax_h3_t2v",
        Listed("MiniMax H3 text to video", "text to video with sound", "INT8", T2V, H3),
        56.9,
    ),
    Swapped(
        "minimax_h3_i2v",
        "video_minimax_h3_i2v",
        Listed("MiniMax H3 image to video", "image to video with sound", "INT8", I2V, H3),
        57.3,
    ),
    Swapped(
        "qwen_image_2512",
        "image_qwen_Image_2512",
        Listed("Qwen-Image 2512", "text to picture", "fp8", T2I, ("Qwen-Image", "Qwen")),
        31.8,
        is_picture=True,
    ),
    Swapped(
        "qwen_image_edit_2511_int8",
        "image_qwen_image_edit_2511_int8",
        Listed("Qwen-Image Edit 2511", "change a picture", "INT8", EDIT, ("Qwen Image Edit 2511",)),
        31.0,
        is_picture=True,
    ),
    Swapped(
        "ltx2.3_t2v",
        "video_ltx2_3_t2v",
        Listed("LTX-2.3 text to video", "text to video with sound", "fp8", T2V, LTX),
        47.2,
    ),
    Swapped(
        "ltx2.3_i2v",
        "video_ltx2_3_i2v",
        Listed("LTX-2.3 image to video", "image to video with sound", "fp8", I2V, LTX),
        47.2,
    ),
    Swapped(
        "krea2_turbo_int8",
        "image_krea2_turbo_t2i_int8",
        Listed("Krea 2 Turbo, 8 steps", "text to picture", "INT8", T2I, KREA),
        19.1,
        is_picture=True,
    ),
    Swapped(
        "z_image_turbo_int8",
        "image_z_image_turbo_int8",
        Listed("Z-Image Turbo INT8", "text to picture in 8 steps", "INT8", T2I, Z_IMAGE),
        12.1,
        is_picture=True,
    ),
    Swapped(
        "wan2.2_t2v_14B_swapped",
        "video_wan2_2_14B_t2v",
        Listed("Wan 2.2 one node, text", "text to video, 14B", "fp8", T2V, WAN22),
        38.0,
    ),
    Swapped(
        "wan2.2_i2v_14B_swapped",
        "video_wan2_2_14B_i2v",
        Listed("Wan 2.2 one node, image", "image to video, 14B", "fp8", I2V, WAN22),
        38.0,
    ),
)

"""Which of ComfyUI's templates come with our loaders, in the order of the template browser, behind the examples."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ...paths import ROOT
from ..examples import EXAMPLES
from ..graph import NAMESPACE
from .note import add_note, note_of
from .swap import Json, swapped

PACKAGE = "comfyui-workflow-templates"


@dataclass(frozen=True)
class Swapped:
    """One by a short name, and by the name of ComfyUI's file; with the two lines of its picture in the template browser."""

    name: str
    stocks: str
    headline: str
    subline: str
    is_picture: bool = False
    is_live: bool = False

    @property
    def title(self) -> str:
        """Numbered on from the examples."""
        return f"FuseStream {len(EXAMPLES) + SWAPPED.index(self) + 1} - {self.headline} ({self.subline})"

    @property
    def path(self) -> Path:
        return ROOT / "workflows" / f"{self.title}.json"

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


SWAPPED = (
    Swapped("minimax_h3_t2v", "video_minimax_h3_t2v", "Text to video with sound", "MiniMax H3"),
    Swapped("minimax_h3_i2v", "video_minimax_h3_i2v", "Image to video with sound", "MiniMax H3"),
    Swapped("qwen_image_2512", "image_qwen_Image_2512", "Text to picture", "Qwen-Image 2512", is_picture=True),
    Swapped(
        "qwen_image_edit_2511_int8",
        "image_qwen_image_edit_2511_int8",
        "Change a picture",
        "Qwen-Image Edit 2511, INT8",
        is_picture=True,
    ),
    Swapped("ltx2.3_t2v", "video_ltx2_3_t2v", "Text to video with sound", "LTX-2.3"),
    Swapped("ltx2.3_i2v", "video_ltx2_3_i2v", "Image to video with sound", "LTX-2.3"),
    Swapped(
        "krea2_turbo_int8",
        "image_krea2_turbo_t2i_int8",
        "Text to picture",
        "Krea 2 Turbo, 8 steps, INT8",
        is_picture=True,
    ),
    Swapped(
        "z_image_turbo_int8", "image_z_image_turbo_int8", "Text to picture", "Z-Image Turbo, INT8", is_picture=True
    ),
    Swapped("wan2.2_t2v_14B_swapped", "video_wan2_2_14B_t2v", "Text to video", "Wan 2.2, 14B, one node"),
    Swapped("wan2.2_i2v_14B_swapped", "video_wan2_2_14B_i2v", "Image to video", "Wan 2.2, 14B, one node"),
)

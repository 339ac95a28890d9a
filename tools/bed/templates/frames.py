"""The frames on the pictures in the template browser: of videos that the trained small model makes (`checkpoints/trained`).

`python3 dev.py workflows --pictures` has a real server make them: 15 videos in a minute and a half of two CPU cores. Each has a
scene of the toy world, whose caption is its prompt, and a seed; the judge looks at the video, and one that does not show its scene
is refused. The model knows text to video alone. Where an example begins with a picture, the sampler is given latent frames of a
drawn film and keeps them. The examples of GGUF files have it in one. The example of a style runs as it ships, and that of live
video shows the clip that comes along.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from PIL import Image

from .. import demo, pack, tiny, toybox
from ..client import Client, Workflow
from ..paths import ROOT
from ..server import Server
from .card import SIZE, Shown
from .inputs import CLIP, PICTURE
from .scenery import scenery

pack.load()

from fusestream.checkpoints import toys  # noqa: E402 - the line above makes it importable
from fusestream.checkpoints.quantise import quantise  # noqa: E402
from fusestream.checkpoints.toys import Relation, Scene, Toy  # noqa: E402

WORKFLOWS = ROOT / "workflows"
FIRST, LAST = 0, 4  # of the latent frames
LATENTS, SIDE = 5, 16  # frames and side of a latent
LOADER, VAE = "FuseStreamDiffusionModelLoader", "FuseStreamVAELoader"


class NotShown(RuntimeError):
    """The video does not show its scene: another seed may."""


@dataclass(frozen=True)
class Asked:
    """A video: its scene, the seed, and the latent frames that are given. packed: out of a GGUF file. twice: without kernels
    too."""

    scene: Scene
    seed: int
    given: tuple[int, ...] = ()
    packed: bool = False
    twice: bool = False

    @property
    def prompt(self) -> str:
        return toys.caption(self.scene)


def _one(colour: str, shape: str, direction: str, background: str) -> Scene:
    return Scene((Toy(colour, shape, direction),), background)


def _two(relation: Relation, first: Toy, second: Toy, background: str) -> Scene:
    return Scene((first, second), background, relation)


# By the example's name.
ASKED = {
    "wan2.1_t2v_1.3B": Asked(
        _two(Relation.AND, Toy("red", "ball", "left"), Toy("blue", "box", "right"), "striped"), 42
    ),
    "wan2.1_t2v_14B_4_steps": Asked(_one("green", "triangle", "up right", "black"), 3),
    "wan2.2_i2v_14B_4_steps": Asked(_one("yellow", "box", "right", "gray"), 5, (FIRST,)),
    "wan2.2_flf2v_14B_4_steps": Asked(_one("orange", "ball", "up left", "black"), 5, (FIRST, LAST)),
    "wan2.1_t2v_14B_4_steps_gguf": Asked(
        _two(Relation.AND, Toy("purple", "ball", "down right"), Toy("orange", "box", "left"), "white"), 5, packed=True
    ),
    "wan2.2_i2v_14B_4_steps_gguf": Asked(_one("blue", "triangle", "left", "white"), 6, (FIRST,), packed=True),
    "wan2.2_ti2v_5B": Asked(_one("green", "ball", "down", "striped"), 6),
    "wan2.1_t2v_14B": Asked(Scene((Toy("purple", "triangle", None),), "checkered", pan="right"), 7),
    "wan2.2_t2v_14B": Asked(
        _two(Relation.WHILE, Toy("red", "triangle", "right"), Toy("yellow", "ball", None), "gray"), 8
    ),
    "wan2.1_i2v_14B": Asked(_one("red", "box", "up", "white"), 14, (FIRST,)),
    "wan2.1_flf2v_14B": Asked(_one("blue", "ball", "down right", "gray"), 10, (FIRST, LAST)),
    "wan2.1_vace_1.3B": Asked(
        _two(Relation.WHILE, Toy("orange", "triangle", "left"), Toy("green", "box", None), "white"), 11
    ),
    "caption_and_animate": Asked(_one("yellow", "ball", "down left", "black"), 12, (FIRST,)),
    "with_and_without": Asked(_one("purple", "box", "right", "black"), 13, twice=True),
}
STYLED, LIVE = "style_transfer", "live_video_sd_turbo"


def shown(names: Collection[str]) -> dict[str, Shown]:
    """What the pictures of these examples show, of those that show more than a drawing."""
    out = {LIVE: _live()} if LIVE in names else {}
    if not set(names) & {*ASKED, STYLED}:
        return out
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        files = [base / "packed.gguf", *toybox.files()]
        quantise(files[1], files[0], "q4_k_m")
        for path, kind in zip(files, ("diffusion_models", "diffusion_models", "text_encoders", "vae"), strict=True):
            (base / "models" / kind).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, base / "models" / kind)
        (base / "input").mkdir()
        with Server(Path(sys.executable), Path(os.environ["COMFYUI_PATH"]), base) as server:
            for name in names:
                if name == STYLED:
                    out[name] = _styled(server)
                elif name in ASKED:
                    out[name] = _made(server, ASKED[name])
                    print(name, flush=True)
    return out


def _made(server: Server, asked: Asked) -> Shown:
    """Raises NotShown."""
    rows = []
    for kernels in ("auto", "off") if asked.twice else ("auto",):
        made = toybox.workflow(asked.prompt, asked.seed)
        loader = tiny.node_of(made, LOADER)["inputs"]
        loader["kernels"] = kernels
        if asked.packed:
            loader["model_name"] = "packed.gguf"
        if asked.given:
            _give(made, asked, server.base / "input")
        frames = demo.decode(_run(server, made)).frames
        rows.append(spread(frames))
        for part in (frames, rows[-1]):
            verdict = toys.judge(toybox.film_of(part), asked.scene)
            if not all((verdict.colour, verdict.shape, verdict.direction, verdict.background)):
                raise NotShown(f"{asked.prompt!r}, seed {asked.seed}: {toybox.described(part)}")
    given = {FIRST: 0, LAST: 2}
    return Shown(rows, tuple(given[place] for place in asked.given))


def _give(made: Workflow, asked: Asked, inputs: Path) -> None:
    """Frames of a film of the same scene: what the sampler must not change has a mask of 0."""
    shot = toys.stage(asked.scene, random.Random(asked.seed))
    pixels = toys.film([shot], toys.Frame(128, 128, 17))[0].add(1).mul(127.5).clamp(0, 255).round().byte().numpy()
    mask = np.full((LATENTS, SIDE, SIDE, 3), 255, np.uint8)
    mask[list(asked.given)] = 0
    names = [f"{part}-{asked.seed}.png" for part in ("film", "mask")]
    for name, frames in zip(names, (pixels, mask), strict=True):
        first, *others = (Image.fromarray(frame) for frame in frames)
        first.save(inputs / name, save_all=True, append_images=others)
    vae = next(id_ for id_, node in made.items() if node["class_type"] == VAE)
    made["901"] = {"class_type": "LoadImage", "inputs": {"image": names[0]}}
    made["902"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["901", 0], "vae": [vae, 0]}}
    made["903"] = {"class_type": "LoadImage", "inputs": {"image": names[1]}}
    made["904"] = {"class_type": "ImageToMask", "inputs": {"image": ["903", 0], "channel": "red"}}
    made["905"] = {"class_type": "SetLatentNoiseMask", "inputs": {"samples": ["902", 0], "mask": ["904", 0]}}
    tiny.node_of(made, "KSampler")["inputs"]["latent_image"] = ["905", 0]


def _styled(server: Server) -> Shown:
    """A landscape that is drawn, and what the net that comes along makes of it."""
    before = scenery(SIZE, SIZE)
    before.save(server.base / "input" / PICTURE)
    made: Workflow = json.loads((WORKFLOWS / "api" / f"{STYLED}.json").read_text(encoding="utf-8"))
    with Image.open(_run(server, made)) as after:
        return Shown([[before, after.convert("RGB")]])


def _live() -> Shown:
    with av.open(str(WORKFLOWS / "inputs" / CLIP)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    return Shown([spread(frames)])


def _run(server: Server, workflow: Workflow) -> Path:
    """The file that it saves."""
    run = Client(server.url).run(workflow)
    if run.error:
        raise RuntimeError(f"node {run.error['node_type']}: {run.error['exception_message']}")
    saved = next(output["images"][0] for output in run.outputs.values() if "images" in output)
    path: Path = server.base / "output" / saved["subfolder"] / saved["filename"]
    return path


def spread(frames: list[Image.Image]) -> list[Image.Image]:
    """The first, the middle and the last one."""
    return [frames[0], frames[len(frames) // 2], frames[-1]]

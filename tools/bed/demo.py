"""The demo: the example workflow through the real server, from files to a video, a contact sheet and a report.

Runs inside the test bed's environment (`dev.py demo` sets it up). Without files of the user's own it takes the small model that
was trained on the toy world: its video shows what the prompt says, and the demo looks at it and says what it sees.

It prints a line for each thing that it does, then the paths of the video and the contact sheet.
The rest is in the report.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
from PIL import Image

from . import comfyui, tiny, toybox
from .client import Client, Run, Workflow
from .server import Server


@dataclass(frozen=True)
class Video:
    """What a decoder says about the file: it has been played to its end."""

    frames: list[Image.Image]
    fps: float
    codec: str

    @property
    def line(self) -> str:
        width, height = self.frames[0].size
        return f"{len(self.frames)} frames of {width}x{height} at {self.fps:g} fps, {self.codec}"


def main() -> None:
    options = parser().parse_args()
    own = [options.model, options.clip, options.vae]
    if any(own) and not all(own):
        sys.exit("The demo needs --model, --clip and --vae together, or none of them.")
    started = time.monotonic()
    base, out = options.base.resolve(), options.output.resolve()
    shutil.rmtree(base, ignore_errors=True)  # what an earlier demo left there
    base.mkdir(parents=True)
    out.mkdir(parents=True, exist_ok=True)
    if all(own):
        files = [file.expanduser().resolve() for file in own]
        workflow = tiny.load_workflow()
        tiny.use_files(workflow, files)
        if options.prompt:
            toybox.ask(workflow, options.prompt)
    else:
        files = toybox.files()
        if not all(file.is_file() for file in files):
            sys.exit(
                "This copy lacks the small model in checkpoints/trained. Take a git clone, or name --model, --clip and --vae."
            )
        workflow = toybox.workflow(options.prompt or toybox.PROMPT)
    arguments = search_paths(files, base)
    say("starting ComfyUI")
    with Server(Path(sys.executable), options.comfyui, base, arguments) as server:
        latent = tiny.node_of(workflow, "EmptyHunyuanLatentVideo")["inputs"]
        text = " ".join(asked(workflow).split())  # of any number of lines
        say(f'making the video: {latent["length"]} frames of {latent["width"]}x{latent["height"]}, "{text}"')
        client = Client(server.url)
        run = client.run(workflow, timeout=24 * 3600)
        if run.error:
            sys.exit(f"The workflow failed in node {run.error['node_type']}: {run.error['exception_message']}")
        saved = next(iter(run.outputs.values()))["images"][0]
        video_path = out / f"demo{Path(saved['filename']).suffix}"
        video_path.write_bytes(client.fetch(saved))
        system: Any = server.get("/system_stats")
    video = decode(video_path)
    sheet_path, report_path = out / "demo-contact-sheet.png", out / "demo-report.txt"
    contact_sheet(video.frames).save(sheet_path)
    seen = None if all(own) else toybox.described(video.frames)
    say(f"looking at it: seen {seen}" if seen else f"looking at it: {video.line}")
    report = write_report(files, workflow, run, video, system, time.monotonic() - started, seen)
    report_path.write_text(report, encoding="utf-8")
    say(f"video: {video_path}\nsheet: {sheet_path}")


def say(text: str) -> None:
    print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    """The demo's options; `dev.py` fills in the folders."""
    cli = argparse.ArgumentParser(prog="dev.py demo")
    cli.add_argument("--comfyui", type=Path, required=True)
    cli.add_argument("--base", type=Path, required=True)
    cli.add_argument("--output", type=Path, required=True)
    for name in ("model", "clip", "vae"):
        cli.add_argument(f"--{name}", type=Path)
    cli.add_argument("--prompt")
    return cli


def search_paths(files: list[Path], base: Path) -> list[str]:
    """The server arguments that let ComfyUI find `files` where they lie."""
    folders = {}
    for file, (_, kind) in zip(files, tiny.LOADERS.values(), strict=True):
        if not file.is_file():
            sys.exit(f"{file} does not exist.")
        folders[kind] = str(file.parent)
    config = base / "extra_model_paths.yaml"
    config.write_text(json.dumps({"demo": folders}), encoding="utf-8")  # JSON is YAML, and quotes any path rightly
    return ["--extra-model-paths-config", str(config)]


def asked(workflow: Workflow) -> str:
    """The prompt."""
    text: str = tiny.node_of(workflow, "CLIPTextEncode")["inputs"]["text"]
    return text


def decode(path: Path) -> Video:
    """Play the file at `path` to its end."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_image() for frame in container.decode(stream)]
        return Video(frames, float(stream.average_rate or 0), stream.codec_context.name)


def contact_sheet(frames: list[Image.Image], width: int = 1200, gap: int = 8) -> Image.Image:
    """Up to 16 frames, evenly spread, as one picture, row by row."""
    count = min(16, len(frames))
    chosen = [frames[round(i * (len(frames) - 1) / max(1, count - 1))] for i in range(count)]
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    wide = width // columns - gap
    high = wide * chosen[0].height // chosen[0].width
    sheet = Image.new("RGB", (columns * (wide + gap) - gap, rows * (high + gap) - gap), "white")
    for i, frame in enumerate(chosen):
        sheet.paste(frame.resize((wide, high)), (i % columns * (wide + gap), i // columns * (high + gap)))
    return sheet


def write_report(
    files: list[Path], workflow: Workflow, run: Run, video: Video, system: Any, total: float, seen: str | None
) -> str:
    """A page of plain text: with what, from what, how long, what came out."""
    device = system["devices"][0]["name"]
    lines = [
        "FuseStream demo",
        f"ComfyUI {comfyui_version(system)}, torch {system['system']['pytorch_version']}, device {device}",
        "",
        *(f"{file.stat().st_size / 2**20:10.1f} MiB  {file}" for file in files),
        "",
        *(f"{seconds:10.2f} s    {workflow[node]['class_type']}" for node, seconds in run.seconds.items()),
        f"{total:10.2f} s    in all, with the start of the server",
        "",
        f"video: {video.line}",
        f"asked: {asked(workflow)}",
        *([f"seen:  {seen}"] if seen else []),
    ]
    return "\n".join(lines) + "\n"


def comfyui_version(system: Any) -> str:
    return str(system["system"].get("comfyui_version", comfyui.VERSION))


if __name__ == "__main__":
    main()

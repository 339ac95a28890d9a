"""Many prompts of mixed families in one server: with LoRAs, interrupts, wrong files and other budgets in between. What it holds is
the same whenever the same work comes round again, and no error is one that was not asked for.
"""

from __future__ import annotations

import copy
import json
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from PIL import Image

from . import opened, outcome, pack, tiny
from .client import Client, Listener, Rejected, Workflow
from .paths import ROOT
from .server import Server
from .templates import EXAMPLES
from .templates.clip import write_clip
from .templates.inputs import CLIP, PICTURE

pack.load()

from fusestream import checkpoints  # noqa: E402 - the line above makes it importable
from fusestream.checkpoints.quantise import SUFFIXES, quantise  # noqa: E402

SIDE = 64
FRAMES = 9  # of the clip that is changed live
MANY = 500  # steps of what is interrupted in one of the first
FREE = {"unload_models": True, "free_memory": True}
WAN, KLEIN, EDIT = "wan2.1_t2v_1.3B", "flux2_klein_4B", "flux2_klein_edit"
Z_IMAGE, LIVE = "z_image_turbo", "live_video_sd_turbo"
LORA, CUT = "lora.safetensors", "cut.safetensors"
PROVOKED = ("wrong file", "cut file", "too little")  # what has to fail
TOO_LITTLE = 0.0001  # GiB
BUDGETS = {WAN: outcome.BUDGET, KLEIN: 0.05, Z_IMAGE: 0.0}  # GiB: a part streams; stock's own memory
INT8, W4A4, FP8, Q8_0, Q5_K, Q4_K_M = "int8_convrot", "convrot_w4a4", "fp8", "q8_0", "q5_k", "q4_k_m"
# One round. (example, trouble, storage of the diffusion model where it is not as published): text encoders T5 and Qwen3, CLIP,
# networks of four families, video's and pictures' VAEs.
ROUND = (
    (WAN, "", ""), (KLEIN, "", INT8), (LIVE, "", ""), (WAN, "interrupt", Q4_K_M), (Z_IMAGE, "", Q8_0), (WAN, "lora", INT8),
    (KLEIN, "wrong file", ""), (WAN, "too little", ""), (EDIT, "", FP8), (WAN, "budget", W4A4), (Z_IMAGE, "interrupt", INT8),
    (LIVE, "", ""), (KLEIN, "budget", Q5_K), (WAN, "cut file", ""), (WAN, "lora", Q8_0), (Z_IMAGE, "budget", ""),
    (KLEIN, "free", W4A4), (WAN, "", FP8), (EDIT, "", Q4_K_M), (LIVE, "", ""),
)  # fmt: skip
Turn = tuple[str, str, str]
FEW = 8  # of them have every family and every kind of trouble but the memory's
SETTLED = 1  # rounds, after which nothing may grow
# MiB that the same work may hold more than it did when all had settled: an allocator's, of what the driver has for a thread.
ALLOWED = {"VRAM": 32.0, "pinned": 32.0, "RSS": 200.0, "threads": 6.0}
HELD = "/fusestream_soak/held"
# A custom node of the server's own that tells what its process holds.
TELLS = """
import contextlib
import ctypes
import gc
import sys
from pathlib import Path

import torch
from aiohttp import web
from server import PromptServer


@PromptServer.instance.routes.get({path!r})
async def held(_request):
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the allocator keeps of freed memory is nobody's
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    status = dict(line.split(":", 1) for line in lines)
    found = {{"RSS": int(status["RssAnon"].split()[0]) / 1024, "threads": int(status["Threads"])}}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        vram = next(module for name, module in sys.modules.items() if name.endswith(".fusion.stream.vram"))
        pinned = 0 if vram._ram is None else vram._ram.taken
        found |= {{"VRAM": (total - free) / 2**20, "pinned": pinned / 2**20}}
    return web.json_response(found)


NODE_CLASS_MAPPINGS = {{}}
"""


def prepare(base: Path) -> None:
    """The base folder of a server that has not started: stand-ins under the examples' names, a LoRA, a file that is cut."""
    opened.install(base)
    (base / "custom_nodes" / "tells.py").write_text(TELLS.format(path=HELD), encoding="utf-8")
    wanted = {name for name, _, _ in ROUND}
    graphs = [example.graph() for example in EXAMPLES if example.name in wanted]
    tiny.write_published(base / "models", {file.name for graph in graphs for file in graph.files()})
    (base / "input").mkdir(exist_ok=True)
    Image.radial_gradient("L").convert("RGB").resize((2 * SIDE, SIDE)).save(base / "input" / PICTURE)
    write_clip(base / "input" / CLIP, side=128, frames=FRAMES)
    loras = base / "models" / "loras"
    checkpoints.write("lora_ab", loras).rename(loras / LORA)
    whole = (base / "models" / "diffusion_models" / loaded(example(WAN))["model_name"]).read_bytes()
    (base / "models" / "diffusion_models" / CUT).write_bytes(whole[: len(whole) // 2])
    for name, storage in {(loaded(example(name))["model_name"], storage) for name, _, storage in ROUND if storage}:
        folder = base / "models" / "diffusion_models"
        quantise(folder / name, folder / stored(name, storage), storage)


def example(name: str) -> Workflow:
    """At a size for two CPU cores."""
    workflow: Workflow = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
    tiny.shrink(workflow, width=SIDE, height=SIDE, length=5, steps=2)
    for node in workflow.values():
        if node["class_type"] == "PrimitiveInt":
            node["inputs"]["value"] = SIDE
        if node["class_type"] == "ImageScaleToTotalPixels":  # of packages that a bare machine does not have
            inputs = {"upscale_method": "bilinear", "width": SIDE, "height": SIDE, "crop": "disabled"}
            node.update(class_type="ImageScale", inputs={"image": node["inputs"]["image"], **inputs})
    return workflow


def loaded(workflow: Workflow) -> dict[str, Any]:
    """What its diffusion model's loader is told."""
    told: dict[str, Any] = tiny.node_of(workflow, outcome.LOADER)["inputs"]
    return told


def stored(name: str, storage: str) -> str:
    """What the file of this name is called in another storage."""
    return f"{Path(name).stem}_{storage}{SUFFIXES[storage][0]}"


def with_lora(workflow: Workflow, strength: float) -> Workflow:
    workflow = copy.deepcopy(workflow)
    model = [outcome.name_of(workflow, outcome.LOADER), 0]
    for node in workflow.values():
        node["inputs"] = {key: ["lora", 0] if value == model else value for key, value in node["inputs"].items()}
    inputs = {"model": model, "lora_name": LORA, "strength_model": strength}
    workflow["lora"] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
    return workflow


def turned(turn: Turn, number: int) -> Workflow:
    """The number-th prompt: with a seed of its own, or the server would hand out what it has."""
    name, trouble, storage = turn
    workflow = example(name)
    if storage:
        loaded(workflow)["model_name"] = stored(loaded(workflow)["model_name"], storage)
    for node in workflow.values():
        for seed in ("seed", "noise_seed"):
            if seed in node["inputs"]:
                node["inputs"][seed] = number
    if trouble == "lora":
        workflow = with_lora(workflow, 0.1 + 0.05 * (number % 7))
    elif trouble == "interrupt":
        tiny.shrink(workflow, width=SIDE, height=SIDE, length=5, steps=MANY)
    elif trouble == "wrong file":
        loaded(workflow)["model_name"] = loaded(example(WAN))["model_name"]  # whose prompts are another text encoder's
    elif trouble == "cut file":
        loaded(workflow)["model_name"] = CUT
    elif trouble == "too little":
        loaded(workflow)["vram_budget"] = TOO_LITTLE
    elif trouble == "budget":
        loaded(workflow)["vram_budget"] = BUDGETS[name]
    return workflow


def once_it_samples(client: Client, workflow: Workflow) -> Listener:
    """Interrupts at the first step of a sampler."""
    sent = threading.Event()

    def listen(kind: str, data: dict[str, Any]) -> None:
        node = data.get("node")
        if kind == "progress" and node in workflow and workflow[node]["class_type"] == "KSampler" and not sent.is_set():
            sent.set()
            threading.Thread(target=client.post, args=("/interrupt", {})).start()

    return listen


@dataclass
class Story:
    """What the server held after each prompt, and what went wrong in between. told: prompts by how they ended."""

    length: int  # prompts of a round
    held: list[dict[str, float]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)

    def ended(self, how: str) -> None:
        self.told[how] = self.told.get(how, 0) + 1

    def grown(self) -> list[str]:
        """Where the same prompt held more than in the round after which all has settled."""
        found = []
        for number in range((SETTLED + 1) * self.length, len(self.held)):
            before, now = self.held[SETTLED * self.length + number % self.length], self.held[number]
            found += [
                f"prompt {number}, {name}: {before[name]:.0f} became {now[name]:.0f}"
                for name in now
                if now[name] > before[name] + ALLOWED[name]
            ]
        return found

    def figures(self) -> dict[str, dict[str, float]]:
        """By what is held: middles of the first round, of the middle one and of the last; and what 100 prompts add, by a line
        through the rounds since all had settled."""
        rounds = [self.held[at : at + self.length] for at in range(0, len(self.held), self.length)]
        found = {}
        for name in self.held[0]:
            middles = [statistics.median(one[name] for one in each) for each in rounds]
            later = middles[SETTLED:]
            slope = statistics.linear_regression(range(len(later)), later).slope if len(later) > 1 else 0.0
            found[name] = {
                "start": middles[0],
                "middle": middles[len(middles) // 2],
                "end": middles[-1],
                "per 100 prompts": slope * 100 / self.length,
            }
        return {name: {key: round(value, 1) for key, value in row.items()} for name, row in found.items()}


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """For who watches."""
    lines = [f"{'MiB; threads':14} {'start':>9} {'middle':>9} {'end':>9} {'per 100 prompts':>16}"]
    lines += [
        f"{name:14} {row['start']:9.1f} {row['middle']:9.1f} {row['end']:9.1f} {row['per 100 prompts']:+16.1f}"
        for name, row in figures.items()
    ]
    return "\n".join(lines)


def soak(server: Server, turns: Sequence[Turn], rounds: int) -> Iterator[Story]:
    """So many rounds of these turns; the story so far after each prompt."""
    client, story = Client(server.url), Story(len(turns))
    numbers = count()
    for _ in range(rounds):
        for turn in turns:
            _prompt(server, client, story, turn, next(numbers))
            held: Any = server.get(HELD)
            story.held.append(held)
            yield story


def _prompt(server: Server, client: Client, story: Story, turn: Turn, number: int) -> None:
    _, trouble, _ = turn
    workflow, what = turned(turn, number), f"prompt {number}, {', '.join(part for part in turn if part)}"
    listener = once_it_samples(client, workflow) if trouble == "interrupt" else None
    if trouble == "free":
        client.post("/free", FREE)
    is_wrong = trouble in PROVOKED
    try:
        run = client.run(workflow, listener)
    except Rejected as refusal:
        story.ended("refused before the queue")
        if not is_wrong:
            story.faults.append(f"{what}: refused: {str(refusal)[:300]}")
        return
    if run.error is not None:
        story.ended("failed")
        if not is_wrong:
            story.faults.append(f"{what}: {run.error['exception_type']}: {run.error['exception_message'][:300]}")
    elif run.interrupted:
        story.ended("interrupted")
        if trouble != "interrupt":
            story.faults.append(f"{what}: was interrupted")
    else:
        story.ended("done")
        if is_wrong or trouble == "interrupt":
            story.faults.append(f"{what}: ended well")
        elif len(run.executed) < 2:
            story.faults.append(f"{what}: nothing was executed")
    log = server.log()
    if (raised := log.count("!!! Exception during processing !!!")) > story.told.get("failed", 0):
        story.faults.append(f"{what}: the log has {raised} errors, {story.told.get('failed', 0)} were told")

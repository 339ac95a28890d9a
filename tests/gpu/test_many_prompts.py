"""Thirty prompts in a row at full size, two models and a LoRA in turns: what they hold is flat after the third.

Random weights of Wan 1.3B's shapes, 480x480x17, through 1 GiB of VRAM each. FUSESTREAM_MANY=wan14 takes 14B for the first.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusestream.kernels_cuda import KernelPolicy

pytestmark = [
    pytest.mark.usefixtures("as_comfyui_runs"),
    pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI"),
]

PROMPTS = 30
TURNS = 4  # the LoRA is on one of them, and needs some more
SETTLED = 3  # prompts after which nothing may grow: all three ways were gone once, the first of them twice
MIB = 2**20
FIRST = os.environ.get("FUSESTREAM_MANY", "wan13")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    from fusestream.bench.end_to_end import weights

    folder = tmp_path_factory.mktemp("many")
    torch.manual_seed(0)
    first, second = (Path(str(weights.write(model, folder, "fp16", "cuda")["path"])) for model in (FIRST, "wan13"))
    if second == first:
        second = Path(shutil.copy(first, folder / "another.safetensors"))
    yield first, second
    shutil.rmtree(folder)


def held() -> dict[str, float]:
    """MiB: of the card by the driver's count, of pinned and registered RAM by ours, of anonymous RAM by the system's."""
    from fusestream.fusion.stream import vram_pool

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    anonymous = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
    pinned = vram_pool._ram.taken if vram_pool._ram is not None else 0
    return {"VRAM": (total - free) / MIB, "pinned": pinned / MIB, "RSS": anonymous / 1024}


def test_thirty_prompts(files: tuple[Path, Path]) -> None:
    import comfy.sample
    import comfy.sd

    from fusestream.bench.end_to_end.inputs import random_lora
    from fusestream.fusion.load.diffusion import load_streamed_diffusion_model

    models: list[Any] = []
    for path in files:
        model = load_streamed_diffusion_model(str(path), policy=KernelPolicy())
        model.stream.residency.ceiling = max(model.stream.residency.least, 2**30)
        models.append(model)
    lora = random_lora(models[1], 16)
    story = []
    for turn in range(PROMPTS):
        model = models[turn % 2]
        if turn % TURNS == 1:
            model = comfy.sd.load_lora_for_models(model, None, lora, 0.1 * (1 + turn % 5), 0.0)[0]
        words, others = ([[torch.randn(1, 512, 4096), {}]] for _ in range(2))
        noise = torch.randn(1, 16, 5, 60, 60)
        run = ("euler", "simple", words, others, torch.zeros_like(noise))
        out = comfy.sample.sample(model, noise, 2, 3.0, *run, disable_pbar=True, seed=turn)
        assert out.isfinite().all()
        del model, out, words, others, run
        story.append(held())
    print("\n".join(f"{turn:2} " + ", ".join(f"{n} {v:.0f}" for n, v in one.items()) for turn, one in enumerate(story)))
    for name, allowed in (("VRAM", 16), ("pinned", 0), ("RSS", 96)):
        grown = [
            story[turn][name] - story[SETTLED + (turn - SETTLED) % TURNS][name] for turn in range(SETTLED, PROMPTS)
        ]
        assert max(grown) <= allowed, (name, story)  # beside the first of the same model, with or without the LoRA
    assert story[-1]["pinned"] > 0, "otherwise nothing was streamed from pinned or registered RAM"

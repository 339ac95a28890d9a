"""The stages on the command line: `python -m checkpoints.train vae --out DIR`, then `model`. See
this package's own words.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from .. import container, spellings, toys, trained, wan
from . import model_stage, vae_stage
from .tensors import Tensors
from .vae import Vae

Say = Callable[[str], None]


def main() -> None:
    options = parser().parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f}] {line}", flush=True)

    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    say(f"torch {torch.__version__} on {torch.cuda.get_device_name() if options.device == 'cuda' else 'the CPU'}")
    (train_vae if options.stage == "vae" else train_model)(options, say)


def parser() -> argparse.ArgumentParser:
    """The options of both stages."""
    cli = argparse.ArgumentParser(prog="python -m checkpoints.train", description=__doc__)
    cli.add_argument("stage", choices=("vae", "model"))
    cli.add_argument(
        "--out", type=Path, required=True, help="where files, logs and states go; `model` finds its VAE there"
    )
    cli.add_argument(
        "--seconds", type=float, default=450, help="of training; setting up and examining take about 100 more"
    )
    cli.add_argument(
        "--stop", type=float, help="leave the state after so many seconds of it, to go on later with --resume"
    )
    cli.add_argument("--resume", type=Path, help="the folder of a state to go on from")
    cli.add_argument("--size", choices=tuple(model_stage.SIZES), default="small")
    cli.add_argument("--width", type=int, default=12, help="of the VAE")
    cli.add_argument("--seed", type=int, default=19)
    cli.add_argument("--films", type=int, help="in a pool, instead of as many as the size has")
    cli.add_argument("--examined", type=int, default=300, help="films to examine the VAE with")
    cli.add_argument("--batch", type=int, help="instead of the size's own; for trying the script")
    cli.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return cli


def train_vae(options: argparse.Namespace, say: Say) -> None:
    batches = (options.batch or 16, options.batch or 8)
    training, choose = vae_stage.train(options.width, options.seconds, options.seed, options.device, batches)
    if not run(training, choose, options, say):
        return
    rng = Random(options.seed + 1)
    weights = training.average
    weights = vae_stage.as_stock_expects(
        weights, *vae_stage.statistics(weights, options.films or 1024, rng, options.device)
    )
    half = {name: tensor.half() for name, tensor in weights.items()}
    container.save(options.out / trained.VAE, {name: tensor.cpu() for name, tensor in half.items()}, {})
    frame = toys.Frame(vae_stage.WHOLE_SIZE, vae_stage.WHOLE_SIZE, vae_stage.FRAMES)
    wide = {name: tensor.float() for name, tensor in half.items()}
    report, films = vae_stage.examine(wide, options.examined, Random(options.seed + 2), options.device, frame)
    say(f"fp16 weights keep: {report}")
    leave_log(options, "vae", training, vae_stage.CURVES, report)
    leave_films(options.out / "vae-films.npz", films.flatten(0, 1), ["film", "kept"] * len(films))


def train_model(options: argparse.Namespace, say: Say) -> None:
    size = model_stage.SIZES[options.size]
    if options.films or options.batch:
        size = model_stage.lessened(size, options.films, options.batch)
    stored = load_file(options.out / trained.VAE, device=options.device)
    vae = Vae({name: tensor.float() for name, tensor in stored.items()}, vae_stage.activation_for(options.device))
    training, choose = model_stage.train(size, vae, options.seconds, options.seed, options.device, say)
    if not run(training, choose, options, say):
        return
    half = {name: tensor.half() for name, tensor in training.average.items()}
    leave_model(options, size, half)
    wide = {name: tensor.float() for name, tensor in half.items()}
    report = examine_model(options, size, wide, vae, say)
    stage = "model" if options.size == "small" else options.size
    leave_log(options, stage, training, model_stage.CURVES, report)


def run(training: Any, choose: Any, options: argparse.Namespace, say: Say) -> bool:
    """Whether it came to its end; either way its state is left."""
    if options.resume:
        training.resume(options.resume)
        say(f"going on after {training.used:.0f} s and {training.steps} steps")
    say(f"{sum(tensor.numel() for tensor in training.weights.values())} parameters")
    training.run(choose, say, options.stop)
    training.save(options.out / f"{options.stage}-state")
    return bool(training.used >= training.seconds)


def examine_model(options: argparse.Namespace, size: Any, weights: Tensors, vae: Vae, say: Say) -> dict[str, Any]:
    """Prompts held back, of two toys, and sampled otherwise; some films of them to look at."""
    held = toys.held_back_scenes()
    rng = Random(options.seed + 3)
    pairs = [scene for scene in (toys.draw_scene(rng) for _ in range(400)) if len(scene.toys) == 2][:60]
    pans = [scene for scene in (toys.draw_scene(rng) for _ in range(800)) if scene.pan is not None][:30]
    if options.device == "cpu":
        held, pairs, pans = held[:2], pairs[:2], pans[:1]
    frame = size.pools[0].frame
    report = {}
    for name, scenes, seeds, how in (
        ("held back", held, 3, {}),
        ("two toys", pairs, 2, {}),
        ("pans", pans, 1, {}),
        ("held back, guidance 4", held, 1, {"guidance": 4.0}),
        ("two toys, guidance 4", pairs, 1, {"guidance": 4.0}),
        ("held back, shift 8", held, 1, {"shift": 8.0}),
        ("held back, 10 steps", held, 1, {"steps": 10}),
    ):
        films, shown = [], []
        for seed in range(seeds):
            captions = [toys.caption(scene, rng if seed else None) for scene in scenes]
            z = model_stage.make(weights, captions, frame, 100 + seed, options.device, **how)
            films.append(model_stage.decoded(vae, z))
            shown += captions
        report[name] = model_stage.obeyed(torch.cat(films), list(scenes) * seeds)
        say(f"{name}: {report[name]}")
        if name in ("held back", "two toys"):
            some = slice(0, len(scenes), max(1, len(scenes) // 12))
            leave_films(options.out / f"{name.replace(' ', '-')}.npz", films[0][some], shown[some])
    return report


def leave_model(options: argparse.Namespace, size: Any, half: Tensors) -> None:
    """The transformer and the text encoder as stock loads them."""
    tensors = {name: tensor.cpu() for name, tensor in half.items() if not name.startswith(model_stage.TEXT)}
    container.save(options.out / trained.MODEL, tensors, wan.metadata(size.transformer))
    tensors = {
        name.removeprefix(model_stage.TEXT): tensor.cpu()
        for name, tensor in half.items()
        if name.startswith(model_stage.TEXT)
    }
    spiece = torch.frombuffer(bytearray(toys.tokenizer()), dtype=torch.uint8)
    container.save(options.out / trained.TEXT, tensors | spellings.umt5_mark() | {"spiece_model": spiece}, {})


def leave_log(
    options: argparse.Namespace, stage: str, training: Any, curves: tuple[str, ...], report: dict[str, Any]
) -> None:
    """What was learned how: added to the log that the files travel with."""
    path = options.out / trained.LOG
    log = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    log[stage] = {
        "seed": options.seed,
        "seconds": round(training.used, 1),
        "steps": training.steps,
        "parameters": sum(tensor.numel() for tensor in training.weights.values()),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        "seen": report,
        "columns": ["seconds", "step", *curves, "gradients"],
        "curve": training.curve,
    }
    path.write_text(json.dumps(log).replace("], [", "],\n[").replace(', "', ',\n"') + "\n", encoding="utf-8")


def leave_films(path: Path, films: torch.Tensor, captions: list[str]) -> None:
    """Films [n, T, H, W, 3] in [-1, 1] as bytes, to look at."""
    pixels = ((films.clamp(-1, 1) + 1) * 127.5).round().byte().cpu().numpy()
    np.savez_compressed(path, films=pixels, captions=np.array(captions[: len(pixels)]))


if __name__ == "__main__":
    main()

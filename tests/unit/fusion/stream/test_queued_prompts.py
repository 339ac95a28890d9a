"""Prompts one after the other in a queue: what each brings from the files, and what is left of it."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.model_management
import execution
import folder_paths
import pytest
import torch
from comfy_extras.nodes_hunyuan import EmptyHunyuanLatentVideo

import fusestream.nodes
from fusestream import checkpoints, fusion
from fusestream.memory.open_file import OpenFile

pytestmark = pytest.mark.usefixtures("one_thread", "one_tokenizer_of_each")


class Keeps:
    """The end of a workflow."""

    RETURN_TYPES: tuple[str, ...] = ()
    FUNCTION, OUTPUT_NODE = "run", True
    INPUT_TYPES = staticmethod(lambda: {"required": {"latent": ("LATENT",)}})

    def run(self, latent: Any) -> tuple[()]:
        KEPT.append(latent["samples"])
        return ()


KEPT: list[Any] = []


class Page:
    """A server that nobody listens to."""

    client_id = last_node_id = None
    last_prompt_id = "1"

    def send_sync(self, *_: Any) -> None: ...


class Seen:
    """What is done with the encoder's file and its weights: reads, blocks that run, and models that are brought to the card."""

    def __init__(self) -> None:
        self.clips: list[Any] = []
        self.models: list[Any] = []
        self.reads: list[Path] = []
        self.brought: list[Any] = []

    def forget(self) -> None:
        self.reads.clear()
        self.brought.clear()

    @property
    def clip(self) -> Any:
        (found,) = self.clips
        return found

    @property
    def model(self) -> Any:
        (found,) = self.models
        return found

    @property
    def runs(self) -> int:
        """Of blocks, since the file was loaded."""
        ledger = self.clip.patcher.stream.residency.ledger
        return sum(entry.kind in ("use", "copy") for entry in ledger.entries)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()

    def reading(stock: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, *args: Any) -> Any:
            found.reads.append(self.path)
            return stock(self, *args)

        return read

    def noting(loads: Callable[..., Any], loaded: list[Any]) -> Callable[..., Any]:
        def load(*args: Any, **options: Any) -> Any:
            loaded.append(loads(*args, **options))
            return loaded[-1]

        return load

    def bring(models: Any, *args: Any, **options: Any) -> Any:
        found.brought += models
        return brings(models, *args, **options)

    brings = comfy.model_management.load_models_gpu
    monkeypatch.setattr(fusion, "load_text_encoder", noting(fusion.load_text_encoder, found.clips), raising=False)
    monkeypatch.setattr(
        fusion, "load_diffusion_model", noting(fusion.load_diffusion_model, found.models), raising=False
    )
    monkeypatch.setattr(comfy.model_management, "load_models_gpu", bring)
    for name in ("read_into", "read_rows", "view", "map_pages"):
        monkeypatch.setattr(OpenFile, name, reading(getattr(OpenFile, name)))
    return found


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs a workflow as ComfyUI does: a prompt, and a seed."""
    files = {kind: checkpoints.write(kind, tmp_path) for kind in ("umt5", "wan_t2v")}
    # Listings of a folder that is gone are errors in the next test.
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    for folder in ("text_encoders", "diffusion_models"):
        monkeypatch.setitem(folder_paths.folder_names_and_paths, folder, ([str(tmp_path)], {".safetensors"}))
    mine = {node.GET_SCHEMA().node_id: node for node in fusestream.nodes.NODES}
    mine |= {"Keeps": Keeps, "EmptyHunyuanLatentVideo": EmptyHunyuanLatentVideo}
    monkeypatch.setattr(execution.nodes, "NODE_CLASS_MAPPINGS", {**execution.nodes.NODE_CLASS_MAPPINGS, **mine})
    executor = execution.PromptExecutor(
        Page(), execution.CacheType.CLASSIC, {"lru": 0, "ram": 0.0, "ram_inactive": 0.0}
    )
    KEPT.clear()

    def run(text: str, seed: int) -> None:
        nodes: dict[str, tuple[str, dict[str, Any]]] = {
            "encoder": ("FuseStreamTextEncoderLoader", {"text_encoder_name": files["umt5"].name, "vram_budget": -1.0}),
            "model": ("FuseStreamDiffusionModelLoader", {"model_name": files["wan_t2v"].name, "vram_budget": -1.0}),
            "prompt": ("CLIPTextEncode", {"clip": ["encoder", 0], "text": text}),
            "not": ("CLIPTextEncode", {"clip": ["encoder", 0], "text": "blurred"}),
            "latent": ("EmptyHunyuanLatentVideo", {"width": 64, "height": 64, "length": 5, "batch_size": 1}),
            "sampler": (
                "KSampler",
                {
                    **{"model": ["model", 0], "positive": ["prompt", 0], "negative": ["not", 0]},
                    **{"latent_image": ["latent", 0], "seed": seed, "steps": 1, "cfg": 2.0, "denoise": 1.0},
                    **{"sampler_name": "euler", "scheduler": "simple"},
                },
            ),
            "end": ("Keeps", {"latent": ["sampler", 0]}),
        }
        prompt = {name: {"class_type": kind, "inputs": inputs} for name, (kind, inputs) in nodes.items()}
        executor.execute(prompt, f"{text} {seed}", execute_outputs=["end"])
        assert executor.success, executor.status_messages

    yield run
    executor.reset()
    KEPT.clear()


def test_the_encoder_brings_nothing(queue: Callable[..., None], seen: Seen) -> None:
    """No byte of its file is read, no block of it is called, and it asks for no VRAM that the diffusion model holds."""
    queue("a red fox", 1)
    encoder = seen.clip.patcher
    residency = encoder.stream.residency
    file, runs, pager = residency.source.files[0].path, seen.runs, residency.pager
    assert runs and file in seen.reads and any(one.model is encoder.model for one in seen.brought)
    seen.forget()
    queue("a red fox", 2)
    assert file not in seen.reads and seen.runs == runs
    assert seen.brought and not [one for one in seen.brought if one.model is encoder.model]
    assert residency.pager is pager
    assert len(KEPT) == 2 and not KEPT[0].equal(KEPT[1])
    queue("two cats", 2)
    assert file in seen.reads and seen.runs > runs and any(one.model is encoder.model for one in seen.brought)


def test_the_last_of_twenty_prompts_takes_what_the_second_does(queue: Callable[..., None], seen: Seen) -> None:
    """As many bytes by each way, as many calls of blocks, and no tensor more is left."""
    texts = map(" ".join, itertools.permutations(("one", "two", "three", "four")))
    told, left = [], []
    for seed, text in enumerate(itertools.islice(texts, 20)):
        queue(text, seed)
        KEPT.clear()
        seen.forget()
        told.append([_figures(one) for one in (seen.clip.patcher, seen.model)])
        if seed in (1, 19):
            left.append(_bytes_of_tensors())
    for figures in zip(*told, strict=True):
        took = [Counter(after) - Counter(before) for before, after in itertools.pairwise(figures)]
        assert took[0]["use"], "the CPU reads weights where they lie, so nothing is copied"
        assert took == [took[0]] * 19
    assert left[0] == left[1]


def _figures(model: Any) -> dict[str, int]:
    """What a model's weights were used and brought for, since it was loaded."""
    told = model.stream.residency.ledger.summary()
    return {**told["counts"], **{f"bytes {way}": nbytes for way, nbytes in told["bytes by route"].items()}}


def _bytes_of_tensors() -> int:
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return sum(one.untyped_storage().nbytes() for one in tensors if one.layout is torch.strided)

"""The vision towers of whole text encoders, loaded from files and streamed, over our ops with the references on the CPU: what a
prompt with a picture encodes to, beside stock's FP32. The language model is stock's here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import comfy
import comfy.sd
import pytest
import torch
from comfy.weight_adapter.lora import LoRAAdapter

from fusestream import checkpoints
from fusestream.fusion.load.text import load_streamed_text_encoder
from fusestream.fusion.text import layer_kind, room, stack
from fusestream.fusion.text.encoder.described import described
from fusestream.fusion.text.vision import towers
from fusestream.kernels_cuda import LEDGER, KernelPolicy

FOX = "a red fox runs through the snow"
ALLOWED = {"precise": 1e-3, "fast": 3e-3}
STORAGES = ("fp16", "bf16", "fp8_e4m3fn", "fp8_scaled")


class Tower(NamedTuple):
    """A file's kind, stock's type for it, how its tokenizer is given a picture, blocks of its tower."""

    file: str
    type: str
    shown: Any
    blocks: int


TOWERS = {
    "Qwen2.5-VL": Tower("qwen25_vl", "qwen_image", lambda one: {"images": [one]}, 8),
    "Gemma 3": Tower("gemma3", "ltxv", lambda one: {"image": one, "skip_template": False}, 4),
    "MiniMax H3": Tower("minimax_h3_te", "minimax", lambda one: {"images": [one]}, 6),
}
EACH = pytest.mark.parametrize("tower", TOWERS.values(), ids=TOWERS)


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None, one_tokenizer_of_each: None) -> Iterator[None]:
    LEDGER.clear()
    with torch.inference_mode(), checkpoints.narrow.opened(comfy):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tower")


def both(folder: Path, tower: Tower, storage: str) -> tuple[Any, Any]:
    """(ours, all of whose blocks stream, with nothing fused as yet; stock's)."""
    path = checkpoints.write(tower.file, folder, storage)
    options = checkpoints.model_options(path)
    ours = load_streamed_text_encoder(
        str(path), [], policy=KernelPolicy.of("off"), kind=tower.type, options=dict(options)
    )
    residency = ours.patcher.stream.residency
    residency.ceiling = residency.least
    kind = getattr(comfy.sd.CLIPType, tower.type.upper())
    return ours, comfy.sd.load_clip([str(path)], clip_type=kind, model_options=dict(options))


def encoded(clip: Any, tower: Tower, height: int = 100, width: int = 260) -> torch.Tensor:
    if hasattr(clip.tokenizer, "min_length"):  # Gemma 3's has no option for its 1024
        clip.tokenizer.min_length = 24
    one = torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(height))
    found: torch.Tensor = clip.encode_from_tokens(clip.tokenize(FOX, **tower.shown(one)))
    return found


def near(got: torch.Tensor, wanted: torch.Tensor, allowed: float) -> None:
    assert got.shape == wanted.shape and 0 < (got - wanted).norm() <= allowed * wanted.norm()


@pytest.mark.parametrize("storage", STORAGES)
@EACH
def test_a_prompts_picture_is_seen_as_by_stock(folder: Path, tower: Tower, storage: str) -> None:
    ours, stock = both(folder, tower, storage)
    wanted = encoded(stock, tower)
    assert torch.equal(encoded(ours, tower), wanted), "nothing is fused"
    for precision, allowed in ALLOWED.items():
        policy = KernelPolicy.of(precision=precision)
        assert towers.fuse(ours.cond_stage_model, policy, on_cpu=True) == tower.blocks
        near(encoded(ours, tower), wanted, allowed)
    assert len(ours.patcher.stream.residency.pager.plan.streamed) > tower.blocks, "otherwise nothing was streamed"
    assert not [one for one in LEDGER.refusals if one.op == "text encoder"], "nothing is handed back unnoticed"


@EACH
def test_loras_count(folder: Path, tower: Tower) -> None:
    ours, stock = both(folder, tower, "fp16")
    before, draw, patches = encoded(stock, tower), torch.Generator().manual_seed(3), {}
    for key, value in sorted(stock.patcher.model_state_dict().items()):
        if (".visual.blocks" in key or ".vision_model.encoder" in key) and value.ndim == 2:
            up = torch.randn(value.shape[0], 2, generator=draw) * 0.3
            down = torch.randn(2, value.shape[1], generator=draw) * value.shape[1] ** -0.5
            patches[key] = LoRAAdapter(set(), (up, down, 2.0, None, None, None))
    for clip in (ours, stock):
        assert len(clip.add_patches(patches, 0.7)) == len(patches) > 3 * tower.blocks
    towers.fuse(ours.cond_stage_model, KernelPolicy(), on_cpu=True)
    wanted = encoded(stock, tower)
    near(encoded(ours, tower), wanted, 2e-3)
    assert (wanted - before).norm() > 5e-3 * before.norm()


@pytest.mark.parametrize(
    ("tower", "patches", "of_hidden"),
    [
        (TOWERS["Qwen2.5-VL"], 4 * 37, room.READ),
        (TOWERS["Gemma 3"], 32 * 32, room.SEEN),
        (TOWERS["MiniMax H3"], 4 * 37, room.SEEN),
    ],
    ids=TOWERS,
)
def test_comfyui_is_asked_to_keep_room_for_a_picture(folder: Path, tower: Tower, patches: int, of_hidden: int) -> None:
    """SigLIP gets any picture in as many patches as it has places; the others as many as it has of 14x14 or 16x16."""
    clip, card = both(folder, tower, "fp16")[0], torch.device("cuda", 0)
    model = clip.cond_stage_model
    stack.fuse(model, KernelPolicy(), on_cpu=True)
    [(owner, net)] = layer_kind.encoders(model)
    block = described(net.visual.blocks[0] if hasattr(net, "visual") else net.vision_model.encoder.layers[0])
    prompt = [(5, 1.0), ({"type": "image", "data": torch.zeros(1, 112, 256, 3)}, 1.0)]
    words = [(5, 1.0)] * 38  # as many tokens as the picture and the word before it
    asked, alone = (model.memory_estimation_function({"x": [one]}, device=card) for one in (prompt, words))
    seen = of_hidden * block.inner[0].out_features * patches + room.STREAM * block.outer.out_features * patches
    assert owner is not None and asked - alone == pytest.approx(seen, abs=1)

"""Rows of models that no family computes: costs held against stock's own networks, latents against stock's own nodes."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.nested_tensor
import comfy.sample
import comfy.sd
import pytest
import torch
from comfy_extras import nodes_hunyuan, nodes_lt, nodes_minimax_h3
from flop_counts import operations
from safetensors.torch import save_file

from fusestream import checkpoints
from fusestream.bench import prediction
from fusestream.bench.card_rates import CARDS
from fusestream.bench.end_to_end import bounds, latents, rows, weights
from fusestream.bench.end_to_end.row_types import Model
from fusestream.bench.end_to_end.without_family import NETWORKS, Network, anima, krea, ltx, minimax, two_streams
from fusestream.bench.predicted import without_family as predicted
from fusestream.bench.predicted.passes import pass_bytes
from fusestream.checkpoints import pictures, video
from fusestream.checkpoints.weights import Table, draw
from fusestream.fusion.families.qwen_image import cost

MODELS: list[Model] = [model for model in rows.BY_DEFAULT if model in NETWORKS]
IN_BLOCKS = re.compile(r"(double_blocks|transformer_blocks|blocks)\.\d+\.")
WORDS = 24
LTX = video.LtxSize(heads=4, layers=8, gated=True)
KREA = pictures.KreaSize(layers=8, text=8 * pictures.KREA_HEADS, read=2)
MINIMAX = video.MiniMaxSize(layers=8, steps=65, time=8)
SMALL: dict[Model, tuple[Network, Table]] = {
    "qwen_image": (two_streams(256, 8, side=2, ends=128), pictures.qwen_image(pictures.QwenImageSize(layers=8))),
    "krea2": (krea(256, 768, 8), pictures.krea(KREA)),
    "anima": (anima(256, 128, 64, 8), pictures.anima(pictures.AnimaSize(layers=8))),
    "hunyuan_video_15": (
        two_streams(256, 8, side=1, ends=65 + 32),
        video.hunyuan_video(video.HunyuanVideoSize(layers=8)),
    ),
    "ltx23": (ltx(LTX.video, LTX.audio, 8), video.ltx(LTX)),
    "minimax_h3": (minimax(192, 256, 384, 8), video.minimax(MINIMAX)),
}
# Of a prompt of WORDS tokens: its width, and what goes with it. LTX' is one whose registers are in it already.
PROMPTS: dict[Model, tuple[int, dict[str, Any]]] = {
    "qwen_image": (64, {}),
    "krea2": (KREA.text * KREA.read, {}),
    "anima": (128, {}),
    "hunyuan_video_15": (64, {"pooled_output": None}),
    "ltx23": (LTX.video + LTX.audio, {"frame_rate": 25}),
    "minimax_h3": (64, {}),
}


@pytest.mark.parametrize("model", MODELS)
def test_blocks_weigh_what_the_published_ones_do(model: Model) -> None:
    held = sum(math.prod(spec.shape) for name, spec in weights.table(model).items() if IN_BLOCKS.match(name))
    row = rows.by_default(model, "int8_convrot")
    assert row is not None
    assert bounds.cost_of(row).weights == pytest.approx(2 * held, rel=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_a_forward_costs_what_stock_computes(model: Model, tmp_path: Path) -> None:
    """Small networks of eight blocks: what is before and behind the blocks is a larger part of these than of published ones."""
    network, table = SMALL[model]
    metadata = video.ltx_metadata(LTX) if model == "ltx23" else None
    path = tmp_path / "x.safetensors"
    save_file(draw(table, model, 0), path, metadata)
    with checkpoints.narrow.opened(comfy):
        loaded = comfy.sd.load_diffusion_model(str(path))
    width, beside = PROMPTS[model]
    prompt = [[torch.randn(1, WORDS, width), beside]]
    is_picture = model in latents.PICTURES
    kind = latents.PICTURES[model] if is_picture else latents.VIDEOS[model]
    size = (*((1,) if kind.is_of_videos else ()), 24, 32) if is_picture else (5, 12, 16)
    picture = torch.zeros(1, kind.channels, *size)
    sound = None if kind.sound is None else torch.zeros(1, *kind.sound.shape(1))
    latent = picture if sound is None else comfy.nested_tensor.NestedTensor([picture, sound])
    run = ("euler", "simple", prompt, prompt, latent)
    counted = operations(lambda: comfy.sample.sample(loaded, latent, 1, 1.0, *run, disable_pbar=True, seed=1))
    made = replace(network, words=WORDS).forward((kind.channels, *size))
    assert made.gemm + made.attention == pytest.approx(counted, rel=0.08)


def test_qwen_images_forward_costs_what_its_family_says() -> None:
    network = NETWORKS["qwen_image"]
    found = network.forward((16, 1, 128, 128))
    familys = cost.forward(network.dim, network.layers, 64 * 64, 64, 3584, network.words)
    assert familys.gemm == pytest.approx(found.gemm, rel=0.001)
    assert (familys.attention, familys.weights) == (found.attention, found.weights)


def test_latents_are_those_of_stocks_nodes() -> None:
    found = nodes_hunyuan.EmptyHunyuanVideo15Latent.execute(832, 480, 33).result[0]["samples"]
    assert shape("hunyuan_video_15") == tuple(found.shape[1:])
    found = nodes_lt.EmptyLTXVLatentVideo.execute(768, 512, 121).result[0]["samples"]
    assert shape("ltx23") == tuple(found.shape[1:])
    both = nodes_minimax_h3.EmptyMiniMaxH3LatentAV.execute(832, 480, 124).result[0]["samples"].unbind()
    row = rows.by_default("minimax_h3", "int8_convrot")
    assert row is not None
    assert [row.latent_shape, row.sound_shape] == [tuple(one.shape[1:]) for one in both]


def shape(model: Model) -> tuple[int, ...]:
    row = rows.by_default(model, "int8_convrot")
    assert row is not None
    return row.latent_shape


# ---------------------------------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize("model", MODELS)
def test_a_load_is_what_the_bound_counts(model: Model) -> None:
    row = rows.by_default(model, "int8_convrot")
    assert row is not None
    load, bound = predicted.load_of(model), bounds.cost_of(row)
    assert load.cost.gemm == pytest.approx(bound.gemm) and load.cost.attention == pytest.approx(bound.attention)
    assert load.weights == bound.weights
    assert sum(one.operations for one in load.linears) == pytest.approx(load.products, rel=0.02)


def test_ours_are_predicted_no_slower_with_any_file() -> None:
    results = prediction.load()
    passes = pass_bytes(results, "stock"), pass_bytes(results, "ours")
    for card in CARDS:
        for model in MODELS:
            for files in ("halves", "int8"):
                found = predicted.seconds(card, model, files, *passes)  # type: ignore[arg-type]
                assert found.ours <= 1.01 * found.stock, (card.name, model, files)
                is_wide = card.turing and not NETWORKS[model].has_fp16
                assert not is_wide or found.ours < 0.7 * found.stock, (card.name, model, files)


def test_the_table_has_every_model_and_card() -> None:
    lines = predicted.table(prediction.load()).splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[-len(MODELS) :]] == list(
        map(predicted.title, MODELS)
    )
    assert lines[2].count("halves") == lines[2].count("INT8") == 3
    assert "Qwen-Image, LTX-2.3, MiniMax H3" in lines[0] and "Krea" not in lines[0]

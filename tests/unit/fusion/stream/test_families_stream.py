"""Whatever stock loads, streams: models that no family of ours knows sample, encode and decode what stock's do, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy
import comfy.model_management
import comfy.sd
import comfy.taesd.taesd
import comfy.text_encoders.flux
import comfy.utils
import pytest
import torch
from family_scenes import inputs, parts
from safetensors.torch import load_file, save_file
from scenes import sample

from fusestream import checkpoints, fusion
from fusestream.fusion.base.errors import NotStreamable, WrongFile
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.load.text import load_streamed_text_encoder
from fusestream.fusion.patcher.streaming_patcher import StreamingModelPatcher
from fusestream.kernels_cuda import LEDGER

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")


def least(model: Any) -> Any:
    """The same model, streamed through the smallest window there is."""
    patcher = getattr(model, "patcher", model)
    patcher.stream.residency.ceiling = patcher.stream.residency.least
    return model


def same(ours: Any, stocks: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(parts(ours), parts(stocks), strict=True))


# ----------------------------------------------------------------------------------------------------- diffusion models


@pytest.mark.deep("ltx23")
@pytest.mark.usefixtures("whole_blocks")
@pytest.mark.parametrize("kind", ["flux1", "ltx23", "sd15_wide", "minimax_h3"])
def test_blocks_stream_in_the_order_in_which_they_run(families_folder: Path, kind: str) -> None:
    ours = least(load_streamed_diffusion_model(str(checkpoints.write(kind, families_folder, "fp16"))))
    sample(ours, inputs(kind))
    sample(ours, inputs(kind))
    stream = ours.stream
    names = [layer.name for layer in stream.layers]
    uses = [entry.layer for entry in stream.residency.ledger.entries if entry.kind == "use"]
    assert uses[-len(names) :] == names


def test_any_model_is_loaded_by_the_loader(families_folder: Path) -> None:
    path = str(checkpoints.write("flux1", families_folder, "fp16"))
    for budget, streams in ((0.0, False), (-1.0, True), (0.5, True)):
        model = fusion.load_diffusion_model(path, vram_budget=budget)
        assert isinstance(model, StreamingModelPatcher) == streams
        assert type(model.model).__name__ == "Flux"


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    tensors = load_file(path)
    change(tensors)
    found = path.with_stem(f"{path.stem}-changed")
    save_file(tensors, found)
    return str(found)


def test_what_is_joined_on_load_is_named_and_left_to_stock(families_folder: Path) -> None:
    """Z-Image in the layout of diffusers has q, k and v apart; stock joins them."""

    def apart(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("attention.qkv.weight")]:
            heads = tensors.pop(name).chunk(3)
            for part, tensor in zip(("to_q", "to_k", "to_v"), heads, strict=True):
                tensors[name.replace("qkv", part)] = tensor.contiguous()
        for name in [name for name in tensors if ".attention." in name]:
            for ours, theirs in ((".out.", ".to_out.0."), ("q_norm", "norm_q"), ("k_norm", "norm_k")):
                if ours in name:
                    tensors[name.replace(ours, theirs)] = tensors.pop(name)
        for ours, theirs in (("final_layer.", "all_final_layer.2-1."), ("x_embedder.", "all_x_embedder.2-1.")):
            for name in [name for name in tensors if name.startswith(ours)]:
                tensors[name.replace(ours, theirs)] = tensors.pop(name)

    path = changed(checkpoints.write("z_image", families_folder, "fp16"), apart)
    with pytest.raises(NotStreamable, match=r"layers\.0\.attention\.to_.\.weight .* cannot stream.*vram_budget to 0"):
        load_streamed_diffusion_model(path)
    LEDGER.clear()
    model = fusion.load_diffusion_model(path, vram_budget=-1.0)
    assert not isinstance(model, StreamingModelPatcher)
    assert any("cannot stream" in line and "loaded as stock does" in line for line in LEDGER.messages)
    whole = comfy.sd.load_diffusion_model(str(checkpoints.write("z_image", families_folder, "fp16")))
    assert same(sample(model, inputs("z_image")), sample(whole, inputs("z_image")))


def test_a_weight_that_is_not_in_the_file_is_named(families_folder: Path) -> None:
    name = "double_blocks.1.img_attn.proj.weight"
    path = changed(checkpoints.write("flux1", families_folder, "fp16"), lambda tensors: tensors.__delitem__(name))
    with pytest.raises(WrongFile, match=rf"lacks 1 of the model's weights: {name}\. Download it again"):
        load_streamed_diffusion_model(path)


# -------------------------------------------------------------------------------------------------------- text encoders


def test_a_language_model_writes(families_folder: Path) -> None:
    """Its words come from the table of its tokens, which stock looks up without calling it."""
    path = checkpoints.write("qwen3", families_folder, "fp16")
    options, prompt = checkpoints.model_options(path), {"qwen3_4b": [[(token, 1.0) for token in (5, 7, 9, 200)]]}
    ours = least(load_streamed_text_encoder(str(path), [], kind="lumina2", options=options))
    stock = comfy.sd.load_clip([str(path)], clip_type=comfy.sd.CLIPType.LUMINA2, model_options=options)
    written = [
        clip.generate(prompt, do_sample=True, max_length=8, temperature=1.0, seed=5, top_k=0) for clip in (ours, stock)
    ]
    assert written[0] == written[1] and len(written[0]) > 0
    stream = ours.patcher.stream
    assert len(stream.layers) == 5, "the table is paged like a block, from now on"
    assert torch.equal(*(clip.encode_from_tokens(prompt) for clip in (ours, stock)))


LANGUAGE_MODELS = {
    "qwen25": "omnigen2",
    "llama3": "hidream",
    "gemma3_4b": "lumina2",
    "gemma3": "ltxv",
    "mistral3": "flux2",
    "ministral3": "flux2",
    "qwen25_vl": "qwen_image",
    "minimax_h3_te": "minimax",
}


@pytest.mark.usefixtures("one_tokenizer_of_each")
@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_a_language_model_reads(families_folder: Path, kind: str) -> None:
    path, of = checkpoints.write(kind, families_folder, "fp16"), LANGUAGE_MODELS[kind]
    options: Any = checkpoints.model_options(path)
    with checkpoints.narrow.opened(comfy):
        ours = least(load_streamed_text_encoder(str(path), [], kind=of, options=options))
        stock = comfy.sd.load_clip([str(path)], clip_type=getattr(comfy.sd.CLIPType, of.upper()), model_options=options)
    if kind == "gemma3":
        stock.tokenizer.min_length = 32  # in place of 1024
    tokens = stock.tokenize("a red fox runs through the snow")
    read, wanted = (clip.encode_from_tokens(tokens, return_dict=True) for clip in (ours, stock))
    said = "conditioning_llama3" if of == "hidream" else "cond"
    assert torch.equal(read[said], wanted[said]) and wanted[said].std() > 0
    plan = ours.patcher.stream.residency.pager.plan
    assert len(plan.streamed) > plan.slots


def test_a_file_that_serves_several_models_asks_for_the_type(families_folder: Path) -> None:
    path = str(checkpoints.write("t5xxl", families_folder, "fp16"))
    with pytest.raises(WrongFile, match=r"choose a type \(sd3 for SD 3, chroma for Chroma"):
        fusion.load_text_encoder(path, [], vram_budget=-1.0)
    with pytest.raises(WrongFile, match="no text encoder type 'chorma'"):
        fusion.load_text_encoder(path, [], vram_budget=-1.0, kind="chorma")


# ----------------------------------------------------------------------------------------------------------------- VAEs


@pytest.mark.parametrize("kind", ["sd_vae", "taesd"])
def test_any_vae_is_loaded(families_folder: Path, kind: str) -> None:
    """As stock has it where kernels are off."""
    if kind == "taesd":
        make, path = torch.Generator().manual_seed(0), str(families_folder / "taesd.safetensors")
        empty = comfy.taesd.taesd.TAESD().half().state_dict()
        save_file({name: 0.05 * torch.randn(t.shape, generator=make).half() for name, t in empty.items()}, path)
    else:
        path = str(checkpoints.write(kind, families_folder, "fp16"))
    ours = fusion.load_vae(path, fusion.KernelPolicy.of("off"))
    stock = comfy.sd.VAE(sd=comfy.utils.load_torch_file(path))
    pixels = torch.rand(1, 64, 64, 3)
    latents = stock.encode(pixels)
    assert torch.equal(ours.encode(pixels), latents)
    assert torch.equal(ours.decode(latents), stock.decode(latents))

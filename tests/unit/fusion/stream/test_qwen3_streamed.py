"""A Qwen3 that streams and is fused: it encodes what stock's does, and brings no layer that nothing reads."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.text_encoders.flux
import gguf
import pytest
import torch
from comfy.weight_adapter.lora import LoRAAdapter
from packed_files import packed_file
from safetensors.torch import load_file, save_file

from fusestream import checkpoints, fusion
from fusestream.checkpoints import text
from fusestream.checkpoints.options import qwen3_options
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.base.family import Role
from fusestream.fusion.families import family_of
from fusestream.fusion.families.language_models import QWEN3
from fusestream.fusion.load.text import load_streamed_text_encoder
from fusestream.fusion.text import stack as encoder
from fusestream.kernels_cuda import LEDGER
from fusestream.memory import Checkpoint, read_header

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

T = comfy.sd.CLIPType
IDS = (5, 7, 9, 200, 7)
ALLOWED = {"precise": 4e-4, "fast": 1.5e-3}


@pytest.fixture(scope="module")
def folder(families_folder: Path) -> Path:
    return families_folder


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is fused for the CPU too."""
    monkeypatch.setattr(encoder, "fuse", partial(encoder.fuse, on_cpu=True))


def klein(path: Path) -> dict[str, Any]:
    """Three taps as klein has them: what comes behind the second layer of four is not read."""
    return {
        **checkpoints.model_options(path),
        "qwen3_4b_class": partial(comfy.text_encoders.flux.Qwen3_4BModel, layer=[0, 1, 2]),
    }


# The type, stock's options, and the layers that are read.
USES: dict[str, tuple[str, Any, int]] = {
    "z_image": ("lumina2", checkpoints.model_options, 3),
    "klein": ("flux2", klein, 2),
}


def prompts(*lengths: int) -> dict[str, Any]:
    """Tokens of prompts of these lengths, padded to the longest and two more."""
    longest = max(lengths) + 2
    padded = [[*range(3, 3 + n), *[200] * (longest - n)] for n in lengths]
    return {"qwen3_4b": [[(token, 1.0) for token in row] for row in padded]}


def plain(*ids: Any) -> dict[str, Any]:
    return {"qwen3_4b": [[(token, 1.0) for token in ids]]}


def load(path: Path, use: str, **policy: Any) -> Any:
    """Streamed, through the smallest window."""
    kind, options, _ = USES[use]
    of = fusion.KernelPolicy.of(**policy)
    clip = load_streamed_text_encoder(str(path), [], policy=of, kind=kind, options=options(path))
    clip.patcher.stream.residency.ceiling = clip.patcher.stream.residency.least
    return clip


def stocks(path: Path, use: str) -> Any:
    kind, options, _ = USES[use]
    return comfy.sd.load_clip([str(path)], clip_type=getattr(T, kind.upper()), model_options=options(path))


def encode(clip: Any, tokens: Any = None) -> torch.Tensor:
    encoding: torch.Tensor = clip.encode_from_tokens(tokens or plain(*IDS))
    return encoding


def near(got: torch.Tensor, wanted: torch.Tensor, allowed: float = ALLOWED["precise"]) -> None:
    assert got.shape == wanted.shape and 0 < (got - wanted).norm() <= allowed * wanted.norm()


def brought(stream: Any) -> set[str]:
    """The layers that the pager had anything to do with."""
    return {entry.layer for entry in stream.residency.ledger.entries}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("window", ["least", "all"])
@pytest.mark.parametrize("use", USES)
def test_layers_that_nothing_reads_are_not_brought(folder: Path, use: str, window: str) -> None:
    path = checkpoints.write("qwen3", folder)
    clip, count = load(path, use), USES[use][2]
    stream = clip.patcher.stream
    if window == "all":
        stream.residency.ceiling = None
    wanted = {f"model.layers.{i}" for i in range(count)}
    assert {layer.name for layer in stream.layers} == wanted, "and they take no part in what it wants of the card"
    for _ in range(3):
        encode(clip)
    time.sleep(0.05)  # for what is read ahead
    assert brought(stream) == wanted
    if window == "all":
        file = {layer.name: layer.stored_bytes for layer in stream.layers}
        copied = sum(entry.nbytes for entry in stream.residency.ledger.entries if entry.kind == "copy")
        assert copied == sum(file.values()), "each once"


@pytest.mark.usefixtures("here")
def test_they_come_when_they_are_called(folder: Path) -> None:
    """For another last layer, by stock's computation, for text: all at once, and they stay."""
    path = checkpoints.write("qwen3", folder)
    for call in (
        lambda clip: clip.clip_layer(-1),
        lambda clip: setattr(
            clip.cond_stage_model.qwen3_4b.transformer.model, "fusestream_policy", fusion.KernelPolicy.of("off")
        ),
    ):
        ours, stock = load(path, "z_image"), stocks(path, "z_image")
        near(encode(ours), encode(stock))
        call(ours)
        if call.__code__.co_names[0] == "clip_layer":
            call(stock)
        got, wanted = encode(ours), encode(stock)
        assert (got - wanted).norm() <= ALLOWED["precise"] * wanted.norm()
        assert len(ours.patcher.stream.layers) == 4 and torch.equal(encode(ours), got)
    ours, stock = load(path, "klein"), stocks(path, "klein")
    texts = [one.generate(plain(*IDS), do_sample=True, max_length=8, seed=5, top_k=0) for one in (ours, stock)]
    assert texts[0] == texts[1] and texts[0]
    layers = [layer.name.removeprefix("model.") for layer in ours.patcher.stream.layers]
    assert layers == ["embed_tokens", *(f"layers.{i}" for i in range(4))], "before anything is brought for the layers"
    near(encode(ours), encode(stock))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("use", USES)
def test_a_batch_of_prompts(folder: Path, use: str) -> None:
    path = checkpoints.write("qwen3", folder)
    tokens = prompts(30, 4, 70)
    near(encode(load(path, use), tokens), encode(stocks(path, use), tokens))


@pytest.mark.usefixtures("here")
def test_weights_of_words_and_vectors_among_them(folder: Path) -> None:
    """As `(fox:1.3)` and `embedding:name` arrive. Where words have weights, stock encodes a prompt of padding along with them."""
    path = checkpoints.write("qwen3", folder)
    ours, stock = load(path, "z_image"), stocks(path, "z_image")
    for one in (ours, stock):
        one.cond_stage_model.qwen3_4b.special_tokens["pad"] = 255  # within this vocabulary
    vector = torch.randn(1, text.QWEN3.width)
    words = ((5, 1.0), (7, 1.3), (vector, 1.0), (9, 0.5), (255, 1.0))
    weighted, equal = {"qwen3_4b": [list(words)]}, plain(*(word for word, _ in words))
    near(encode(ours, equal), encode(stock, equal))
    wanted = encode(stock, weighted)
    near(encode(ours, weighted), wanted)
    assert not torch.allclose(wanted, encode(stock, equal))


def for_every_matrix(clip: Any) -> dict[str, LoRAAdapter]:
    """A LoRA of rank 2 for each matrix of each layer, by stock's names."""
    found, generator = {}, torch.Generator().manual_seed(3)
    for key, value in clip.patcher.model_state_dict().items():
        if key.endswith("proj.weight"):
            up = torch.randn(value.shape[0], 2, generator=generator) * 0.1
            down = torch.randn(2, value.shape[1], generator=generator) * value.shape[1] ** -0.5
            found[key] = LoRAAdapter(set(), (up, down, 2.0, None, None, None))
    return found


@pytest.mark.usefixtures("here")
def test_a_lora_is_in_layers_that_come_later(folder: Path) -> None:
    path = checkpoints.write("qwen3", folder)
    pair = ours, stock = load(path, "z_image"), stocks(path, "z_image")
    patches = for_every_matrix(stock)
    for clip in pair:
        clip.add_patches(patches, 0.7)
    near(encode(ours), encode(stock), 2 * ALLOWED["fast"])
    for clip in pair:
        clip.clip_layer(-1)
    near(encode(ours), encode(stock), 2 * ALLOWED["fast"])


@pytest.mark.deep("z_image*")
@pytest.mark.every_other
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("use", USES)
def test_gguf_files(tmp_path: Path, folder: Path, use: str, kind: str) -> None:
    """Beside stock's computation of the same packed numbers."""
    file = checkpoints.write("qwen3", folder)
    tensors = load_file(file)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, text.QWEN3.layers)
    theirs = {name: str(names.get_name(name, try_suffixes=(".weight",))) for name in tensors}
    path = packed_file(tmp_path / "x.gguf", tensors, kind, theirs, architecture="qwen3")
    clip_type, options, count = USES[use]

    def clip(policy: fusion.KernelPolicy) -> Any:
        return load_streamed_text_encoder(str(path), [], policy=policy, kind=clip_type, options=options(file))

    ours, stock = clip(fusion.KernelPolicy()), clip(fusion.KernelPolicy.of("off"))
    near(encode(ours), encode(stock), ALLOWED["fast"])
    assert brought(ours.patcher.stream) == {f"model.layers.{i}" for i in range(count)}


# -------------------------------------------------------------------------------------------------------------- files


def test_which_files_are_qwen3s(folder: Path, tmp_path: Path) -> None:
    for kind, known in (("qwen3", True), ("gemma2", False), ("t5xxl", False), ("clip_l", False)):
        with Checkpoint.open(checkpoints.write(kind, folder)) as source:
            assert (family_of(source.files[0]) is QWEN3) == known
    tensors = load_file(checkpoints.write("qwen3", folder))
    few = {name: tensor for name, tensor in tensors.items() if ".layers.0." in name}
    norm = few["model.layers.0.post_attention_layernorm.weight"]
    for name, more in {
        "Gemma 3's": {"model.layers.0.pre_feedforward_layernorm.weight": norm.clone()},
        "with biases": {"model.layers.0.self_attn.q_proj.bias": norm.clone()},
        "Qwen3-VL's": {"visual.merger.norm.weight": norm.clone()},
        "of a width that stock does not build": {
            "model.layers.0.post_attention_layernorm.weight": torch.ones(5120, dtype=torch.float16)
        },
    }.items():
        save_file({**few, **more}, path := tmp_path / "x.safetensors")
        assert family_of(read_header(path)) is not QWEN3, name
    save_file(few, path)
    assert family_of(read_header(path)) is QWEN3


def test_a_file_that_is_not_whole_is_told_from_its_header(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoints.write("qwen3", folder))
    name = "model.layers.3.mlp.down_proj.weight"
    save_file({key: one for key, one in tensors.items() if key != name}, path := tmp_path / "x.safetensors")
    with pytest.raises(WrongFile, match=rf"lacks 1 of the model's weights: {name}"):
        fusion.inspect_file(str(path), Role.TEXT)
    save_file({**tensors, name: tensors[name].t().contiguous()}, path)
    with pytest.raises(WrongFile, match=rf"{name} has the shape \[32, 2560\], the model needs \[2560, 32\]"):
        fusion.inspect_file(str(path), Role.TEXT)
    whole = {**tensors}
    for i in range(4):  # of the 4B's feed-forward, of which there are 36
        for part in ("gate", "up"):
            whole[f"model.layers.{i}.mlp.{part}_proj.weight"] = torch.zeros(9728, 2560, dtype=torch.float8_e4m3fn)
        whole[f"model.layers.{i}.mlp.down_proj.weight"] = torch.zeros(2560, 9728, dtype=torch.float8_e4m3fn)
    save_file(whole, path)
    with pytest.raises(WrongFile, match=r"lacks 352 of the model's weights: model\.layers\.10\.input_layernorm"):
        fusion.inspect_file(str(path), Role.TEXT)


@pytest.mark.parametrize("budget", [0.0, -1.0])
def test_a_file_without_the_words_matrix_encodes(tmp_path: Path, budget: float) -> None:
    """As one for Flux.2 klein 9B may be: an 8B has a matrix of its own for words, which no encoding needs."""
    size = replace(text.QWEN3, width=4096, layers=4, vocabulary=64)
    source = torch.Generator().manual_seed(1)
    tensors = {
        name: (torch.randn(spec.shape, generator=source) * spec.std + spec.mean).half()
        for name, spec in text.llama(size).items()
    }
    save_file(tensors, path := tmp_path / "x.safetensors")
    options = {
        "qwen3_8b_model_config": qwen3_options(size)["qwen3_4b_model_config"],
        "qwen3_8b_class": partial(comfy.text_encoders.flux.Qwen3_8BModel, layer=[0, 1, 2]),
    }
    tokens = {"qwen3_8b": [[(token, 1.0) for token in (5, 7, 9)]]}
    wanted = comfy.sd.load_clip([str(path)], clip_type=T.FLUX2, model_options=options).encode_from_tokens(tokens)
    clip = fusion.load_text_encoder(str(path), [], vram_budget=budget, kind="flux2", options=options)
    assert torch.equal(clip.encode_from_tokens(tokens), wanted)
    if budget:
        with pytest.raises(WrongFile, match=r"x\.safetensors lacks the matrix that words come from"):
            clip.generate(tokens, max_length=2, seed=1)
        path = tmp_path / "y.safetensors"  # the first is mapped, and Windows writes no such file anew
        save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
        whole = fusion.load_text_encoder(str(path), [], vram_budget=budget, kind="flux2", options=options)
        assert len(whole.generate(tokens, max_length=2, seed=1)) == 2


def test_it_is_told_in_the_wrong_loader(folder: Path) -> None:
    with pytest.raises(WrongFile, match="is a Qwen3 text encoder: choose it in the FuseStream Text Encoder Loader"):
        fusion.inspect_file(str(checkpoints.write("qwen3", folder)), Role.DIFFUSION)
    LEDGER.clear()

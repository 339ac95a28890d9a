"""Stock ComfyUI loads the tiny UMT5 as Wan's text encoder, tokenizer included, and reads prompts with it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.text_encoders.wan
import pytest
import torch

from fusestream import checkpoints

STORAGES = list(checkpoints.umt5.STORAGES)
PROMPT = "a red fox runs through the snow"
SHORT = 32  # the standard length of 512 takes sixteen times as long

# How far the encoding may be from that of the fp32 file, relative to its size. Plain fp8 is that bad because `wo`, with
# values around 0.004, falls among fp8's subnormal numbers: this is what the scales are for.
TOLERANCE = {"fp16": 0.01, "bf16": 0.05, "fp32": 0.001, "fp8_e4m3fn": 0.8}
SCALED_TOLERANCE = 0.35


pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("umt5")


@pytest.fixture(scope="module")
def exact(folder: Path) -> Any:
    return load(checkpoints.write("umt5", folder, "fp32"))


@pytest.fixture(scope="module")
def expected(exact: Any) -> torch.Tensor:
    return encode(exact, PROMPT, SHORT)


def load(path: Path) -> Any:
    options = checkpoints.umt5.model_options(path)
    return comfy.sd.load_clip([str(path)], clip_type=comfy.sd.CLIPType.WAN, model_options=options)


def encode(clip: Any, text: str, length: int) -> torch.Tensor:
    """The encoding [1, length, width], padded to `length` tokens by stock."""
    tokens = clip.tokenize(text, tokenizer_options={"umt5xxl_min_length": length})
    encoding: torch.Tensor = clip.encode_from_tokens(tokens)
    return encoding


def token_ids(clip: Any, text: str) -> list[int]:
    return [token for token, _ in clip.tokenize(text)["umt5xxl"][0]]


@pytest.mark.parametrize("storage", STORAGES)
def test_loads_whole_and_encodes(
    folder: Path, expected: torch.Tensor, caplog: pytest.LogCaptureFixture, storage: str
) -> None:
    caplog.set_level(logging.DEBUG)
    clip = load(checkpoints.write("umt5", folder, storage))
    assert isinstance(clip.cond_stage_model, comfy.text_encoders.wan.WanT5Model)
    # The tokenizer is no weight of the network, so stock always lists it; that it was used, the next test shows.
    complaints = [line for line in caplog.messages if "missing" in line.lower() or "unexpected" in line]
    assert complaints == ["clip unexpected: ['spiece_model']"]
    caplog.set_level(logging.INFO)

    encoding = encode(clip, PROMPT, SHORT)
    assert encoding.shape == (1, SHORT, checkpoints.umt5.WIDTH)
    assert encoding.isfinite().all()
    distance = (encoding - expected).norm() / expected.norm()
    assert distance <= TOLERANCE.get(storage, SCALED_TOLERANCE)


def test_pads_to_512_and_keeps_the_padding_out(exact: Any, expected: torch.Tensor) -> None:
    words = sum(token != 0 for token in token_ids(exact, PROMPT))
    encoding = exact.encode_from_tokens(exact.tokenize(PROMPT))
    assert encoding.shape == (1, 512, checkpoints.umt5.WIDTH)
    assert (encoding[0, words:] == 0).all()
    assert torch.allclose(encoding[0, :words], expected[0, :words], atol=1e-3)


def test_reads_its_sizes_from_the_file(folder: Path) -> None:
    size = checkpoints.umt5.Umt5Size()
    assert checkpoints.umt5.model_config(checkpoints.write("umt5", folder, "fp8_scaled")) == {
        "d_model": size.width,
        "num_heads": size.heads,
        "d_kv": size.head_width,
        "d_ff": size.ffn,
        "num_layers": size.layers,
        "vocab_size": size.vocabulary,
    }


def test_tokenizer_is_the_one_inside(exact: Any) -> None:
    tokenizer = getattr(exact.tokenizer, exact.tokenizer.clip).tokenizer
    vocabulary = tokenizer.get_vocab()
    assert (vocabulary["<pad>"], vocabulary["</s>"], vocabulary["<unk>"]) == (0, 1, 2)
    assert len(vocabulary) <= checkpoints.umt5.Umt5Size().vocabulary
    ids = token_ids(exact, "snow, Ärger, 雪")
    text = ids[: ids.index(1)]
    assert 2 not in text  # bytes stand in for what the small vocabulary lacks
    assert ids[len(text) + 1 :] == [0] * (512 - len(text) - 1)
    assert tokenizer.decode(text) == "snow, Ärger, 雪"


def test_depends_on_every_word_and_its_place(exact: Any) -> None:
    ids = [token for token in token_ids(exact, PROMPT) if token]
    before = run(exact, ids)
    other_word, other_order = [*ids[:-2], 300, 1], [ids[1], ids[0], *ids[2:]]
    for changed in (other_word, other_order):
        moved = (run(exact, changed) - before).norm(dim=-1) / before.norm(dim=-1)
        assert (moved > 0.02).all()  # attention carries the change to every token


def run(clip: Any, ids: list[int]) -> torch.Tensor:
    """The encoder on these tokens alone, without padding."""
    tokens = torch.tensor([ids], device=clip.cond_stage_model.umt5xxl.transformer.shared.weight.device)
    states: torch.Tensor = clip.cond_stage_model.umt5xxl.transformer(tokens, torch.ones_like(tokens))[0]
    return states


def test_every_block_and_every_role_matters(exact: Any) -> None:
    net = exact.cond_stage_model.umt5xxl.transformer
    ids = [token for token in token_ids(exact, PROMPT) if token]
    before = run(exact, ids)
    groups: dict[str, list[torch.Tensor]] = {}
    for name, parameter in net.named_parameters():
        place, _, role = name.removeprefix("encoder.block.").partition(".")
        for group in (place, role) if name.startswith("encoder.block.") else (name,):
            groups.setdefault(group, []).append(parameter)
    assert len(groups) == 24 + 10 + 2
    for group, parameters in groups.items():
        kept = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.mul_(1.5)
        moved = (run(exact, ids) - before).norm() / before.norm()
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.copy_(old)
        assert moved > 0.01, group

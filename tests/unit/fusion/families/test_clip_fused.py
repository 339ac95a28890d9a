"""What CLIP's text encoders have of their own, over our ops with the references on the CPU, beside stock's FP32. What all encoders
keep to the suite tells (`tests/contract/test_text_layers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comfy.model_patcher
import pytest
import torch
from text_models import ALLOWED, CLIP_WIDTH, KINDS, close

from fusestream.checkpoints import text
from fusestream.fusion.families import family_of
from fusestream.fusion.families.clip import CLIP
from fusestream.fusion.identify.checkpoint_info import header_of

build, fused = KINDS["clip_l"].build, KINDS["clip_l"].fused


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


def prompts(*lengths: int) -> list[list[int]]:
    return [KINDS["clip_l"].tokens(words, seed=words) for words in lengths]


@pytest.mark.parametrize("layer", [-1, -2, -4, 0, 3, None, "all"])
def test_every_clip_skip(layer: Any) -> None:
    model = build()
    if layer == "all":
        model.layer = "all"
    else:
        model.set_clip_options({"layer": layer})
    wanted = model(prompts(5))
    got = fused(model)(prompts(5))
    for ours, theirs in zip(got, wanted, strict=True):
        close(ours, theirs, ALLOWED["precise"])


def test_weights_in_prompts_and_textual_inversion() -> None:
    model = build()
    learnt = torch.randn(CLIP_WIDTH, generator=torch.Generator().manual_seed(9))
    chunks = [[(token, 1.0) for token in chunk] for chunk in prompts(75, 20)]
    chunks[0][3] = (chunks[0][3][0], 1.4)
    chunks[1][2] = (learnt, 0.7)
    wanted = model.encode_token_weights(chunks)
    got = fused(model).encode_token_weights(chunks)
    assert wanted[0].shape == (1, 2 * 77, CLIP_WIDTH)
    for ours, theirs in zip(got, wanted, strict=True):
        close(ours, theirs, 2 * ALLOWED["precise"])


def test_a_lora_counts() -> None:
    model = build()
    patcher = comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
    before = model(prompts(9))[0]
    generator = torch.Generator().manual_seed(2)
    keys = [
        "transformer.text_model.encoder.layers.1.self_attn.q_proj.weight",
        "transformer.text_model.encoder.layers.2.mlp.fc1.weight",
        "transformer.text_model.encoder.layers.2.layer_norm1.weight",
    ]
    state = model.state_dict()
    patches = {key: ("diff", (0.1 * torch.randn(state[key].shape, generator=generator),)) for key in keys}
    assert set(patcher.add_patches(patches)) == set(keys)
    patcher.patch_model()
    wanted = model(prompts(9))[0]
    assert (wanted - before).norm() > 0.01 * before.norm()
    close(fused(model)(prompts(9))[0], wanted, ALLOWED["precise"])
    patcher.unpatch_model()
    close(model(prompts(9))[0], before, ALLOWED["precise"])


def test_what_is_recognised() -> None:
    names = dict.fromkeys(text.clip(layers=1), torch.empty(0, device="meta"))
    assert family_of(header_of(names)) is CLIP
    vision = "vision_model.embeddings.class_embedding"
    assert family_of(header_of({**names, vision: torch.empty(0)})) is CLIP
    assert family_of(header_of({vision: torch.empty(0)})) is None
    assert family_of(header_of({f"clip.{name}": tensor for name, tensor in names.items()})) is None

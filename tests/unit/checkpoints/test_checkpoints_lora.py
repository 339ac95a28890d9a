"""Stock ComfyUI uses every key of every LoRA file, and changes exactly the weights that the file is
for.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.sd
import comfy.utils
import pytest
import torch
from scenes import distance

from fusestream import checkpoints

WAN_LORAS = [kind for kind, base in checkpoints.LORA_BASES.items() if base != "umt5" and kind != "lora_modulation"]
TEXT_LORAS = [kind for kind, base in checkpoints.LORA_BASES.items() if base == "umt5"]
CASES = [(kind, "fp16") for kind in WAN_LORAS] + [("lora_ab", "bf16"), ("lora_ab", "fp32")]

# What stock says when a key or a patch comes to nothing; some of it at level INFO only.
COMPLAINTS = ("not loaded", "NOT LOADED", "ERROR", "MISMATCH", "Failed", "not recognized")

# Prefixes that other models know and Wan does not.
FOREIGN_PREFIXES = ("transformer.", "base_model.model.", "unet.", "model.diffusion_model.", "")


pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Any]:
    kinds = {checkpoints.LORA_BASES[kind] for kind in WAN_LORAS}
    return {kind: comfy.sd.load_diffusion_model(str(checkpoints.write(kind, folder, "fp32"))) for kind in kinds}


@pytest.fixture(scope="module")
def plain(models: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the models make without any LoRA."""
    return {kind: sample(model) for kind, model in models.items()}


@pytest.fixture(scope="module")
def clip(folder: Path) -> Any:
    path = checkpoints.write("umt5", folder, "fp32")
    options = checkpoints.model_options(path)
    return comfy.sd.load_clip([str(path)], clip_type=comfy.sd.CLIPType.WAN, model_options=options)


def read(folder: Path, kind: str, storage: str = "fp16") -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = comfy.utils.load_torch_file(str(checkpoints.write(kind, folder, storage)))
    return tensors


def targets(kind: str) -> set[str]:
    """The weights that a file is for, by their names in stock's model."""
    if kind == "lora_i2v":
        names = {f"{module}.weight" for module in checkpoints.lora.image_modules()}
    elif kind == "lora_conv":
        names = {"patch_embedding.weight"}
    elif kind == "lora_set_weight":
        names = {f"blocks.0.self_attn.{part}" for part in ("norm_k.weight", "v.weight", "v.bias")}
    elif kind == "lora_diff":
        names = {f"blocks.0.self_attn.{part}" for part in ("q.weight", "q.bias", "norm_q.weight")}
        names |= {f"blocks.{index}.norm3.{part}" for index in (0, 1) for part in ("weight", "bias")}
        names |= {"head.head.bias", "patch_embedding.weight"}
    else:
        names = {f"{module}.weight" for module in checkpoints.lora.modules()}
    return {f"diffusion_model.{name}" for name in names}


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if any(word in line for word in COMPLAINTS)]


def changed_by(patcher: Any) -> set[str]:
    """The names of the tensors that loading this patched model changes."""
    comfy.model_management.unload_all_models()  # clones share their weights: take out what the last one put in
    before = {name: tensor.clone() for name, tensor in patcher.model.state_dict().items()}
    comfy.model_management.load_models_gpu([patcher], force_full_load=True)
    after = patcher.model.state_dict()
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name].to(tensor.device))}


def sample(model: Any) -> torch.Tensor:
    """One step without guidance, from seed 1, for words of seed 0."""
    source = torch.Generator().manual_seed(0)
    words = [[torch.randn(1, 20, checkpoints.T5_WIDTH, generator=source), {}]]
    latent = torch.zeros(1, 16, 2, 8, 8)
    noise = comfy.sample.prepare_noise(latent, 1)
    return comfy.sample.sample(model, noise, 1, 1.0, "euler", "simple", words, words, latent, disable_pbar=True, seed=1)


@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_every_key_is_used_and_every_target_changes(
    folder: Path,
    models: dict[str, Any],
    plain: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    storage: str,
) -> None:
    caplog.set_level(logging.INFO)
    base = checkpoints.LORA_BASES[kind]
    patched, _ = comfy.sd.load_lora_for_models(models[base], None, read(folder, kind, storage), 1.0, 0.0)
    assert set(patched.patches) == targets(kind)
    assert changed_by(patched) == targets(kind)
    assert 0.02 < distance(sample(patched), plain[base]) < 1.5
    assert complaints(caplog) == []


def test_stock_takes_modulations_and_forgets_them(
    folder: Path, models: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its patcher passes over the parameters of a module that has modules inside."""
    caplog.set_level(logging.INFO)
    patched, _ = comfy.sd.load_lora_for_models(models["wan_t2v"], None, read(folder, "lora_modulation"), 1.0, 0.0)
    names = {f"diffusion_model.{module}.modulation" for module in ("head", *(f"blocks.{index}" for index in range(4)))}
    assert set(patched.patches) == names
    assert changed_by(patched) == set()
    assert complaints(caplog) == []


@pytest.mark.parametrize("kind", TEXT_LORAS)
def test_text_encoder_takes_both_spellings(
    folder: Path, clip: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.INFO)
    _, patched = comfy.sd.load_lora_for_models(None, clip, read(folder, kind), 0.0, 1.0)
    modules = checkpoints.lora.text_shapes(checkpoints.text.UMT5)
    names = {f"umt5xxl.transformer.{module}.weight" for module in modules}
    assert set(patched.patcher.patches) == names
    assert changed_by(patched.patcher) == names
    assert complaints(caplog) == []


@pytest.mark.parametrize("prefix", FOREIGN_PREFIXES)
def test_stock_leaves_out_foreign_prefixes(
    folder: Path, models: dict[str, Any], caplog: pytest.LogCaptureFixture, prefix: str
) -> None:
    tensors = {prefix + name.removeprefix("diffusion_model."): t for name, t in read(folder, "lora_ab").items()}
    patched, _ = comfy.sd.load_lora_for_models(models["wan_t2v"], None, tensors, 1.0, 0.0)
    assert not patched.patches
    assert sum(line.startswith("lora key not loaded: ") for line in caplog.messages) == len(tensors)

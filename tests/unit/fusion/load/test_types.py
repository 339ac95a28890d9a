"""In which type a diffusion model computes: where kernels are, one that they serve, if stock knows the model to be sound in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.memory_management
import comfy.model_management
import comfy.sd
import comfy.utils
import pytest
import torch
from safetensors.torch import load_file, save_file

from fusestream import checkpoints
from fusestream.checkpoints.storage import Scaled
from fusestream.fusion.families import FAMILIES
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model, types_of
from fusestream.kernels_cuda import KernelPolicy

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")
BY_NAME = {family.name: family for family in FAMILIES}
CARD, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def card_with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock asks these what a card can do."""
    for name in ("should_use_bf16", "should_use_fp16"):
        monkeypatch.setattr(comfy.model_management, name, lambda *_, **__: True)


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch, types: Any) -> Any:
    monkeypatch.setattr("fusestream.fusion.load.diffusion.types_of", lambda *_: types)
    return load_streamed_diffusion_model(str(path))


@pytest.mark.parametrize("storage", ["fp16", "bf16", "fp8_e4m3fn"])
@pytest.mark.usefixtures("card_with_bf16")
def test_flux_computes_in_fp16_where_stock_would_in_bf16(
    families_folder: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.write("flux2", families_folder, storage)
    stocks = comfy.sd.load_diffusion_model(str(path)).model.get_dtype_inference()
    model = loaded(path, monkeypatch, types_of(BY_NAME["Flux"], KernelPolicy.of("auto"), CARD))
    assert model.model.get_dtype_inference() is torch.float16
    told = model.stream.residency.ledger.summary()["notes"]
    if stocks is torch.float16:  # fp16 files
        assert "computes in" not in told
    else:
        assert stocks is torch.bfloat16 and told["computes in"].startswith("float16,")
        assert "bfloat16" in told["computes in"]
    assert loaded(path, monkeypatch, None).model.get_dtype_inference() is stocks


@pytest.mark.usefixtures("card_with_bf16")
def test_z_image_that_stock_does_not_trust_in_fp16_computes_in_fp32(
    families_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.write("z_image", families_folder, "bf16")
    model = loaded(path, monkeypatch, types_of(BY_NAME["Z-Image"], KernelPolicy.of("auto"), CARD))
    known = model.model.model_config.supported_inference_dtypes
    wanted = torch.float16 if torch.float16 in known else torch.float32
    assert model.model.get_dtype_inference() is wanted
    assert "bfloat16" in model.stream.residency.ledger.summary()["notes"]["computes in"]


@pytest.mark.usefixtures("card_with_bf16")
def test_qwen_image_computes_in_fp32_unless_stock_multiplies_the_file_as_it_is(
    families_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled fp8, which cards from RTX 40 on multiply: its blocks are stock's, and bf16 is enough for them."""
    path, types = scaled_fp8(families_folder), types_of(BY_NAME["Qwen-Image"], KernelPolicy.of("auto"), CARD)
    with checkpoints.narrow.opened(comfy):
        for multiplies, wanted in ((False, torch.float32), (True, torch.bfloat16)):
            monkeypatch.setattr(comfy.model_management, "supports_fp8_compute", lambda *_, is_so=multiplies: is_so)
            model = loaded(path, monkeypatch, types)
            assert model.model.get_dtype_inference() is wanted
            told = model.stream.residency.ledger.summary()["notes"]
            assert ("computes in" in told) == (not multiplies)


def scaled_fp8(folder: Path) -> Path:
    """A Qwen-Image whose blocks' products are of scaled fp8."""
    entry, numbers = checkpoints.KINDS["qwen_image"], load_file(checkpoints.write("qwen_image", folder, "fp32"))
    chosen = {name.removesuffix(".weight") for name in numbers if "blocks." in name and numbers[name].ndim == 2}
    stored = Scaled(chosen=chosen.__contains__, rest=torch.float32).store(entry.table, numbers)
    path = folder / "qwen_image scaled.safetensors"
    save_file({name: tensor.clone() for name, tensor in stored.tensors.items()}, path)
    return path


@pytest.mark.usefixtures("card_with_bf16")
def test_a_type_that_the_user_asked_for_is_kept(families_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy.cli_args import args

    path = checkpoints.write("flux2", families_folder, "bf16")
    monkeypatch.setattr(args, "bf16_unet", True)
    model = loaded(path, monkeypatch, types_of(BY_NAME["Flux"], KernelPolicy.of("auto"), CARD))
    assert model.model.get_dtype_inference() is torch.bfloat16


def test_stock_chooses_where_no_kernel_will_run() -> None:
    flux = BY_NAME["Flux"]
    assert types_of(flux, KernelPolicy.of("off"), CARD) is None
    assert types_of(flux, KernelPolicy.of("auto"), CPU) is None
    assert types_of(flux, KernelPolicy.of("auto"), CARD) == (torch.float16,)


@pytest.mark.parametrize("is_paged", [False, True], ids=["kept in VRAM", "paged by comfy-aimdo"])
def test_buffers_have_the_type_that_the_network_made_them_with(
    is_paged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MiniMax H3 looks the timestep up in FP32, whatever its file has; stock sees to it where it pages, too."""
    path = tmp_path / "all in halves.safetensors"
    tensors = comfy.utils.load_torch_file(str(checkpoints.write("minimax_h3_pruned", tmp_path)))
    save_file({name: tensor.half() for name, tensor in tensors.items()}, path)
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", is_paged)
    net = load_streamed_diffusion_model(str(path)).model.diffusion_model
    assert net.adaln_t_table.dtype is torch.float32

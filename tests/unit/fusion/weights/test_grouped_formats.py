"""Files in newer ComfyUIs' formats of four and six bits, with a scale for each group: computed as by stock, merged and saved."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import comfy.quant_ops
import comfy.sd
import comfy.utils
import pytest
import torch
from comfy_extras import nodes_model_merging
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_models import saved
from scenes import Scene, Studio, sample

from fusestream import checkpoints, fusion
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.files import quant_metadata
from fusestream.fusion.files.completeness import say_leftovers
from fusestream.fusion.fused.block import Parts
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.kernels_cuda import LEDGER
from fusestream.memory import Checkpoint

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

KIND = "wan_t2v"
FORMATS = ("asym_w4a8_int8", "six bits as asym_w4a8_int8", "w6a8_int8", "awq_w4a16")
PACKED = 256  # columns: of Wan's small matrices those that groups and turns of 256 fit
PARTS = ("weight_s_rel", "weight_s_channel", "weight_codebook", "weight_correction", "weight_zero", "weight_zeros")


def layout_of(kind: str) -> str:
    """Of stock's format; skips where this ComfyUI, or its comfy-kitchen, has none."""
    name = kind.rpartition(" ")[2]
    known = comfy.quant_ops.QUANT_ALGOS.get(name)
    if known is None:
        pytest.skip(f"this ComfyUI has no {name}")
    layout: str = known["comfy_tensor_layout"]
    if kind not in ("asym_w4a8_int8", "awq_w4a16"):
        made = comfy.quant_ops.get_layout_class(layout).quantize
        if "bits" not in inspect.signature(made).parameters:
            pytest.skip("this comfy-kitchen has no weights of six bits")
    return layout


def quantised(kind: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a file has of one matrix, by what its name ends with."""
    layout = layout_of(kind)
    if kind == "awq_w4a16":
        rows, columns = weight.shape
        groups = weight.float().view(rows, columns // 64, 64)
        low, high = groups.amin(-1), groups.amax(-1)
        scale = (high - low).clamp_min(1e-6) / 15
        codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).view(rows, columns).to(torch.uint8)
        data = (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(torch.int8)
        zeros = low + 8 * scale
        found = {"": data, "_scale": scale.t().half(), "_zeros": zeros.t().half()}
    else:
        options = {} if kind == "asym_w4a8_int8" else {"bits": 6}
        made = comfy.quant_ops.QuantizedTensor.from_float(weight.float(), layout, **options)
        found = made.state_dict("")
    return {f"weight{end}": tensor.contiguous() for end, tensor in found.items()}


def file_of(kind: str, studio: Studio, folder: Path, seed: int = 0) -> Path:
    """Wan with those matrices of its blocks so that fit."""
    source = checkpoints.write(KIND, studio.folder, "fp16", seed)
    tensors = load_file(source)
    name = kind.rpartition(" ")[2]
    note = {"format": name, "group_size": 64 if name == "awq_w4a16" else 16, "convrot_groupsize": 256}
    for key in [key for key in tensors if key.startswith("blocks.") and key.endswith(".weight")]:
        weight = tensors[key]
        if weight.ndim == 2 and weight.shape[1] == PACKED:
            layer = key.removesuffix("weight")
            del tensors[key]
            tensors |= {layer + end: tensor for end, tensor in quantised(kind, weight).items()}
            tensors[f"{layer}comfy_quant"] = torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)
    path = folder / f"{kind.replace(' ', '_')}_{seed}.safetensors"
    with safe_open(source, "pt") as opened:
        save_file(tensors, path, opened.metadata())
    return path


def streamed(path: Path) -> Any:
    model = load_streamed_diffusion_model(str(path))
    model.stream.residency.ceiling = model.stream.residency.least
    return model


def with_lora(model: Any, studio: Studio) -> Any:
    file = comfy.utils.load_torch_file(str(checkpoints.write("lora_ab", studio.folder)))
    return comfy.sd.load_lora_for_models(model, None, file, 0.8, 0.0)[0]


def numbers_of(model: Any, path: Path, folder: Path) -> Path:
    """A file of the numbers that the model's weights are."""
    tensors = {}
    for name in model.stream.keys:
        weight: Any = model.stream.in_file.weight(name)
        held = weight.dequantize() if hasattr(weight, "_qdata") else weight
        tensors[name.removeprefix("diffusion_model.")] = held.float().contiguous()
    with safe_open(path, "pt") as opened:
        rest = {name: opened.get_tensor(name) for name in opened.keys() if name not in tensors}  # noqa: SIM118
        ends = ("comfy_quant", "weight_scale", *PARTS)
        kept = {name: tensor for name, tensor in rest.items() if not name.endswith(ends)}
        save_file({**tensors, **kept}, folder / "numbers.safetensors", opened.metadata())
    return folder / "numbers.safetensors"


@pytest.mark.parametrize("kind", FORMATS)
def test_the_latents_are_stocks(
    kind: str, studio: Studio, scenes: dict[str, Scene], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Streamed, and all in memory, where nobody is told that the scales are left over."""
    path = file_of(kind, studio, tmp_path)
    ours, stock = streamed(path), comfy.sd.load_diffusion_model(str(path))
    wanted = sample(stock, scenes[KIND])
    assert torch.equal(sample(ours, scenes[KIND]), wanted)
    assert len(ours.stream.residency.pager.plan.streamed) > ours.stream.residency.pager.plan.slots, (
        "otherwise nothing was streamed"
    )
    held = ours.stream.blocks[0].paged[0].stand_in
    assert type(held) is not torch.nn.Parameter or comfy.quant_ops.QuantizedTensor in type(held.data).__mro__
    assert torch.equal(sample(fusion.load_diffusion_model(str(path), vram_budget=0.0), scenes[KIND]), wanted)
    assert not [line for line in caplog.messages if "no place" in line]


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_step_aside_and_say_why(kind: str, studio: Studio, tmp_path: Path) -> None:
    """Where the card multiplies them as they are."""
    model = streamed(file_of(kind, studio, tmp_path))
    LEDGER.clear()
    block = model.model.diffusion_model.blocks[0]
    for module in block.modules():
        if getattr(module, "layout_type", None) is not None:
            module._full_precision_mm = False
    assert Parts(block).is_stocks
    assert Parts(block).obstacle(block, torch.zeros(1)) == (
        "this card multiplies the file's quantised weights as they are"
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_with_a_lora(kind: str, studio: Studio, scenes: dict[str, Scene], tmp_path: Path) -> None:
    """Also where nobody can quantise the sum anew, which stock would try: it is added to each product's numbers."""
    path = file_of(kind, studio, tmp_path)
    ours, plain = streamed(path), sample(streamed(path), scenes[KIND])
    got = sample(with_lora(ours, studio), scenes[KIND])
    reference = numbers_of(streamed(path), path, tmp_path) if kind == "awq_w4a16" else path
    wanted = sample(with_lora(comfy.sd.load_diffusion_model(str(reference)), studio), scenes[KIND])
    assert (got - wanted).norm() <= 0.05 * (wanted - plain).norm()


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "with a LoRA"])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_saved_is_what_stock_saves(
    kind: str, lora: bool, studio: Studio, scenes: dict[str, Scene], tmp_path: Path, output: Path
) -> None:
    if lora and kind == "awq_w4a16":
        pytest.skip("nobody can quantise it anew")
    path = file_of(kind, studio, tmp_path)
    models = {"ours": streamed(path), "stock": comfy.sd.load_diffusion_model(str(path))}
    found = {name: saved(with_lora(model, studio) if lora else model, output, name) for name, model in models.items()}
    assert found["ours"].keys() == found["stock"].keys()
    for name, tensor in found["ours"].items():
        assert tensor.dtype is found["stock"][name].dtype and torch.equal(tensor, found["stock"][name]), name


@pytest.mark.parametrize("kind", FORMATS)
def test_merged_as_numbers(kind: str, studio: Studio, scenes: dict[str, Scene], tmp_path: Path) -> None:
    """Which stock makes of a file of the same numbers."""
    quantised_file = file_of(kind, studio, tmp_path, 1)
    model = streamed(quantised_file)
    plain = numbers_of(model, quantised_file, tmp_path)
    first = checkpoints.write(KIND, studio.folder, "fp32")
    merge = nodes_model_merging.ModelMergeSimple().merge
    got = sample(merge(streamed(first), model, 0.4)[0], scenes[KIND])
    wanted = sample(merge(*(comfy.sd.load_diffusion_model(str(path)) for path in (first, plain)), 0.4)[0], scenes[KIND])
    assert (got - wanted).norm() <= 1e-3 * wanted.norm()


# ----------------------------------------------------------------------------------------------------- what files say of it


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's table has these formats, in its words."""
    for name in ("asym_w4a8_int8", "w6a8_int8"):
        entry = {"storage_t": torch.int8, "parameters": {"weight_scale"}, "comfy_tensor_layout": "AsymW4A8Int8Layout"}
        monkeypatch.setitem(comfy.quant_ops.QUANT_ALGOS, name, entry)


@pytest.mark.parametrize("kind", ["asym_w4a8_int8", "w6a8_int8"])
def test_a_file_is_asked_for_the_scales_that_its_format_has(known: None, kind: str, tmp_path: Path) -> None:
    """Which stock's table calls otherwise."""
    note = torch.tensor(list(json.dumps({"format": kind}).encode()), dtype=torch.uint8)
    tensors = {
        "a.weight": torch.zeros(4, 8, dtype=torch.int8), "a.comfy_quant": note,
        "a.weight_s_rel": torch.zeros(4, 1), "a.weight_s_channel": torch.zeros(4),
    }  # fmt: skip
    for lacking in (None, "a.weight_s_rel", "a.weight_s_channel"):
        path = tmp_path / f"{lacking}.safetensors"
        save_file({name: tensor for name, tensor in tensors.items() if name != lacking}, path)
        with Checkpoint.open(path) as source:
            if lacking is None:
                quant_metadata.check_quantised(source)
            else:
                with pytest.raises(WrongFile, match=f"lacks {lacking}"):
                    quant_metadata.check_quantised(source)


def test_their_scales_are_no_leftovers(caplog: pytest.LogCaptureFixture) -> None:
    say_leftovers("a file", [f"blocks.0.ffn.0.{part}" for part in PARTS], ["blocks.0.ffn.0.weight"])
    assert not caplog.messages

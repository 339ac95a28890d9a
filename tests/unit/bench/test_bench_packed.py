"""Packed files of the bench: what is drawn is what the `gguf` package and stock read, at the size that weights have; the pack
beside which ours stand; Windows' limits."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.sd
import comfy.utils
import gguf
import pytest
import torch
from plain_device import PlainDevice

from fusestream import checkpoints
from fusestream.bench.end_to_end import (
    blocks,
    bounds,
    gguf_pack,
    packing,
    results,
    row_types,
    rows,
    storages,
    weights,
    windows,
)
from fusestream.bench.report import by_default, groups
from fusestream.checkpoints.quantise import t5
from fusestream.memory import CudaError, read_header

MIB = 2**20
OF_BLOCKS: tuple[row_types.Model, ...] = (
    "wan14", "klein4", "z_image", "qwen_image", "ltx23", "minimax_h3", "krea2", "anima", "hunyuan_video_15",
)  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_drawn_blocks_are_numbers_of_the_spread_that_was_asked_for(kind: str) -> None:
    drawn = blocks.draw(kind, 1 << 18, 0.02, "cpu", torch.Generator().manual_seed(3))
    numbers = gguf.quants.dequantize(drawn.numpy(), gguf.GGMLQuantizationType[kind])
    assert numbers.size == 1 << 18
    assert numbers.std() == pytest.approx(0.02, rel=0.03) and abs(numbers.mean()) < 4e-4


@pytest.mark.every_other
@pytest.mark.parametrize("storage", storages.GGUF)
@pytest.mark.parametrize("model", ["wan14", "t5", "qwen3", "klein4", "z_image", "sdxl"])
def test_a_gguf_file_is_what_the_table_says(tmp_path: Path, model: row_types.Model, storage: str) -> None:
    table, path = weights.tiny_table(model), tmp_path / "x.gguf"
    weights.write_table(path, table, storage, "cpu")
    reader, header = gguf.GGUFReader(str(path)), read_header(path)
    known = {tensor.name: tensor for tensor in reader.tensors}
    rename = t5.renaming(table)
    assert model != "t5" or rename("shared.weight") == "token_embd.weight"
    for stocks, spec in table.items():
        tensor = known.pop(rename(stocks))
        assert header.extents[rename(stocks)].shape == spec.shape
        if len(spec.shape) == 2 and tensor.data.size > 30_000:
            numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert numbers.std() == pytest.approx(spec.std, rel=0.1), stocks
    assert not known


@pytest.mark.parametrize("model", ["qwen3", "vl2", "vl4"])
def test_the_words_of_a_language_model_are_packed(model: str) -> None:
    for storage, kind in (("q8_0", "Q8_0"), ("q4_k_m", "Q6_K")):
        kinds = {tensor.entry.name: tensor.entry.kind for tensor in packing.packed(weights.table(model), storage)}
        assert [of for name, of in kinds.items() if "embed_tokens" in name] == [kind]


def test_the_mix_is_that_of_published_files() -> None:
    kinds = {tensor.entry.name: tensor.entry.kind for tensor in packing.packed(weights.table("wan14"), "q4_k_m")}
    block = {name.removeprefix("blocks.7."): kind for name, kind in kinds.items() if name.startswith("blocks.7.")}
    assert block["self_attn.v.weight"] == block["cross_attn.v.weight"] == block["ffn.2.weight"] == "Q6_K"
    assert block["self_attn.q.weight"] == block["ffn.0.weight"] == "Q4_K"
    assert block["modulation"] == block["self_attn.q.bias"] == "F32"
    assert kinds["time_projection.1.weight"] == kinds["patch_embedding.weight"] == "F16"
    assert packing.packed_kind("model.layers.7.mlp.down_proj.weight", 2560, "q4_k_m", 36) == "Q4_K"
    assert packing.packed_kind("blocks.0.ffn.2.weight", 640, "q4_k_m") == "Q8_0"
    assert packing.packed_kind("blocks.0.ffn.2.weight", 24, "q8_0") == "F16"


def test_of_pictures_models_the_converter_says_what_is_packed() -> None:
    """city96's: shared modulations too, of Z-Image no refiners; a U-Net's convolutions, in rows of 256."""

    def kinds(model: row_types.Model, storage: str = "q4_k_m") -> dict[str, str]:
        return {tensor.entry.name: tensor.entry.kind for tensor in packing.packed(weights.table(model), storage)}

    klein, z_image, sdxl = kinds("klein4"), kinds("z_image"), kinds("sdxl")
    assert klein["double_blocks.0.img_attn.qkv.weight"] == z_image["layers.3.attention.qkv.weight"] == "Q5_K"
    assert klein["single_blocks.7.linear1.weight"] == klein["single_stream_modulation.lin.weight"] == "Q4_K"
    assert klein["img_in.weight"] == klein["final_layer.linear.weight"] == "F16"
    assert z_image["layers.3.feed_forward.w2.weight"] == "Q6_K" and z_image["layers.3.feed_forward.w1.weight"] == "Q4_K"
    assert {kind for name, kind in z_image.items() if "refiner" in name} == {"F32", "F16"}
    block = "input_blocks.4.1.transformer_blocks.1."
    assert sdxl[f"{block}attn2.to_v.weight"] == sdxl[f"{block}ff.net.2.weight"] == "Q6_K"
    assert sdxl[f"{block}attn1.to_q.weight"] == sdxl["input_blocks.1.0.in_layers.2.weight"] == "Q4_K"
    assert sdxl["input_blocks.0.0.weight"] == sdxl["out.2.weight"] == sdxl["label_emb.0.0.weight"] == "F16"
    values = packing.gguf_values(weights.table("sdxl"), "q8_0")
    assert values["comfy.gguf.orig_shape.input_blocks.1.0.in_layers.2.weight"] == (320, 320, 3, 3)
    assert "comfy.gguf.orig_shape.label_emb.0.0.weight" not in values, "its rows are whole"
    words = {model: packing.architecture(weights.table(model)) for model in ("wan13", "klein4", "z_image", "sdxl")}
    assert words == {"wan13": "wan", "klein4": "flux", "z_image": "lumina2", "sdxl": "sdxl"}
    assert packing.architecture(weights.table("qwen3")) == "qwen3"


@pytest.mark.parametrize(
    ("model", "storage", "gb"),
    [
        ("klein4", "fp8_scaled", 4.1),  # as flux-2-klein-4b-fp8.safetensors
        ("z_image", "int8_convrot", 6.2),  # as z_image_turbo_int8_convrot.safetensors
        ("wan14", "fp8_scaled", 14.3),  # as wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors
    ],
)
def test_files_of_pictures_models_have_the_size_of_published_ones(
    model: row_types.Model, storage: str, gb: float
) -> None:
    tensors = packing.safetensors(weights.table(model), storage)
    assert sum(tensor.entry.nbytes for tensor in tensors) / 1e9 == pytest.approx(gb, rel=0.02)


@pytest.mark.parametrize("model", OF_BLOCKS)
def test_only_matrices_of_stocks_linears_are_in_bytes(model: row_types.Model) -> None:
    """A table's rows tell of what module they are; stock's network has the modules."""
    kind = checkpoints.KINDS[weights.TINY[model]]
    halves = {name: torch.empty(spec.shape, dtype=torch.float16, device="meta") for name, spec in kind.table.items()}
    with checkpoints.narrow.opened(comfy):
        config = comfy.model_detection.model_config_from_unet(halves, "", metadata=dict(kind.metadata))
        stocks = config.process_unet_state_dict(dict(halves))  # under the names that stock has for them
        net = config.get_model(stocks, "", device="meta").diffusion_model
    modules = [name for name, module in net.named_modules() if isinstance(module, torch.nn.Linear)]
    linears = {id(stocks[f"{name}.weight"]) for name in modules if f"{name}.weight" in stocks}
    for storage in ("int8_convrot", "fp8_scaled", "nvfp4"):
        names = [tensor.entry.name for tensor in packing.safetensors(kind.table, storage)]
        quantised = [name.removesuffix(".comfy_quant") for name in names if name.endswith(".comfy_quant")]
        wrong = [name for name in quantised if id(halves.get(f"{name}.weight")) not in linears]
        assert len(quantised) > 3 and not wrong


@pytest.mark.parametrize(
    ("model", "finer", "gb"),
    [
        ("qwen3", [*range(4), *range(6, 31, 3), *range(31, 36)], 2.5),  # as Qwen3-4B-Q4_K_M.gguf
        ("vl2", [*range(3), 5, 8, 11, 14, 17, 20, 23, *range(24, 28)], None),
        ("t5", [*range(3), 5, 8, 11, 14, 17, 20, *range(21, 24)], 3.66),  # as umt5-xxl-encoder-Q4_K_M.gguf
        ("wan14", [], 9.65),  # as Wan2.2-T2V-A14B-HighNoise-Q4_K_M.gguf
    ],
)
def test_a_language_models_mix_is_llama_cpps(model: row_types.Model, finer: list[int], gb: float | None) -> None:
    """By hand from its rule, and by the sizes of published files."""
    tensors = packing.packed(weights.table(model), "q4_k_m")
    kinds = {tensor.entry.name: tensor.entry.kind for tensor in tensors}
    for part in ("attn_v", "ffn_down") if model == "t5" else ("self_attn.v_proj", "mlp.down_proj"):
        found = {name: kind for name, kind in kinds.items() if name.endswith(f".{part}.weight")}
        assert [i for i, kind in enumerate(found.values()) if kind == "Q6_K"] == finer
        assert set(found.values()) <= {"Q4_K", "Q6_K"}
    others = [kind for name, kind in kinds.items() if "q_proj" in name or "gate_proj" in name or ".attn_q." in name]
    assert set(others) <= {"Q4_K"}
    if gb is not None:
        assert sum(tensor.entry.nbytes for tensor in tensors) / 1e9 == pytest.approx(gb, rel=0.005)


@pytest.mark.parametrize(("model", "work"), [("t5", "text"), ("qwen3", "text"), ("vl2", "write"), ("vl4", "write")])
def test_a_language_models_bytes_are_reckoned_as_its_mix_has_them(model: row_types.Model, work: row_types.Work) -> None:
    read = [t.entry for t in packing.packed(weights.table(model), "q4_k_m") if t.entry.kind in ("Q4_K", "Q6_K")]
    read = [entry for entry in read if "visual" not in entry.name and (work == "write" or "embd" not in entry.name)]
    read = [entry for entry in read if work == "write" or "embed_tokens" not in entry.name]
    row = row_types.Row(model, work, storage="q4_k_m")
    first = bounds.bound(row, bounds.Rates(1e15, 1e15, 1.0), first=True)["bus"]
    assert sum(entry.nbytes for entry in read) == pytest.approx(first, rel=0.002)
    assert storages.stored(model, "q8_0") == storages.STORED["q8_0"]


@pytest.mark.parametrize("storage", storages.STORED)
def test_the_bus_is_reckoned_with_the_bytes_that_blocks_have(storage: str) -> None:
    table = weights.table("wan14")
    tensors = packing.packed(table, storage) if storage in storages.GGUF else packing.safetensors(table, storage)
    held = sum(t.entry.nbytes for t in tensors if t.entry.name.startswith("blocks.") and len(t.entry.shape) == 2)
    row = row_types.sampling("wan14", 480, 480, 17, 3, storage=storage)
    assert held == pytest.approx(bounds.cost_of(row).weights * storages.STORED[storage], rel=0.01)


def test_what_a_text_needs_is_not_brought_at_every_step() -> None:
    """14B's 40 pairs of 5120 x 5120, less the room for what they make of two texts; of a model that fits nothing is brought."""
    rates, row = bounds.Rates(1e15, 1e15, 1.0), row_types.sampling("wan14", 480, 480, 17, 3)
    held = bounds.bound(row, rates, first=True)["bus"]
    spared = held - bounds.LIMIT_GIB * 2**30 - bounds.bound(row, rates)["bus"]
    assert spared == pytest.approx(40 * 2 * 2 * 5120**2 - 2 * 512 * 5120 * 2 * 81, rel=1e-3)
    assert bounds.bound(row_types.sampling("wan13", 480, 480, 17, 3), rates)["bus"] == 0


def test_the_bus_of_windows_is_a_slow_one() -> None:
    row = next(row for row in rows.all_rows() if row.name == "14B 480x480x17, as on Windows")
    plain = row_types.sampling("wan14", 480, 480, 17, 3)
    quick, slow = (bounds.bound(row, bounds.Rates(1e15, 1e15, rate))["bus"] for rate in (48e9, 6e9))
    assert quick == pytest.approx(4 * bounds.bound(plain, bounds.Rates(1e15, 1e15, 48e9))["bus"])
    assert slow == pytest.approx(2 * quick), "one that is slower yet stays as slow"


def test_an_int8_file_is_stocks(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    weights.write_table(path, weights.tiny_table("wan14"), "int8_convrot", "cpu")
    read = comfy.utils.load_torch_file(str(path))
    layer = "blocks.1.self_attn.q"
    assert read[f"{layer}.weight"].dtype == torch.int8 and read[f"{layer}.weight_scale"].shape == (256, 1)
    note = json.loads(bytes(read[f"{layer}.comfy_quant"].tolist()))
    assert note == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
    assert "convrot" not in json.loads(bytes(read["blocks.1.ffn.2.comfy_quant"].tolist())), "640 is no whole group"
    numbers = read[f"{layer}.weight"].float() * read[f"{layer}.weight_scale"]
    assert numbers.std() == pytest.approx(1 / 16, rel=0.05)


@pytest.mark.parametrize("model", ["wan14", "klein4", "z_image", "qwen_image", "krea2"])
def test_a_scaled_fp8_file_is_stocks(tmp_path: Path, model: row_types.Model) -> None:
    path, table = tmp_path / "x.safetensors", weights.tiny_table(model)
    weights.write_table(path, table, "fp8_scaled", "cpu")
    read = comfy.utils.load_torch_file(str(path))
    layers = [name.removesuffix(".comfy_quant") for name in read if name.endswith(".comfy_quant")]
    assert len(layers) > 10
    for layer in layers:
        weight, scale = read[f"{layer}.weight"], read[f"{layer}.weight_scale"]
        assert json.loads(bytes(read[f"{layer}.comfy_quant"].tolist())) == {"format": "float8_e4m3fn"}
        assert weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == ()
        numbers = weight.float() * scale
        assert torch.isfinite(numbers).all()
        assert numbers.std() == pytest.approx(table[f"{layer}.weight"].std, rel=0.1), layer
    left = {name for name in table if name.removesuffix(".weight") not in layers}
    assert {read[name].dtype for name in left} == {torch.float16}


def test_a_file_of_four_bits_is_stocks(tmp_path: Path) -> None:
    """Read as stock's own layout reads it: the spread is the table's, and towers stay wide."""
    path, kind = tmp_path / "x.safetensors", checkpoints.KINDS["minimax_h3_te"]
    weights.write_table(path, kind.table, "nvfp4", "cpu")
    read = comfy.utils.load_torch_file(str(path))
    layers = [name.removesuffix(".comfy_quant") for name in read if name.endswith(".comfy_quant")]
    assert len(layers) == 7 * kind.size.language.layers
    assert read["visual.blocks.0.mlp.linear_fc1.weight"].dtype == torch.float16
    layer = "model.layers.3.mlp.gate_proj"
    assert json.loads(bytes(read[f"{layer}.comfy_quant"].tolist())) == {"format": "nvfp4"}
    fours = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    packed = read[f"{layer}.weight"].int()
    nibbles = torch.stack([packed >> 4, packed & 15], -1).flatten(-2)
    numbers = fours[nibbles & 7] * (1 - 2 * (nibbles >> 3)) * read[f"{layer}.weight_scale_2"]
    assert read[f"{layer}.weight_scale"].float().unique().tolist() == [1.0]
    assert numbers.shape == kind.table[f"{layer}.weight"].shape
    assert numbers.std() == pytest.approx(kind.table[f"{layer}.weight"].std, rel=0.05)


# ------------------------------------------------------------------------------------------------------------------ rows


def test_by_default_every_model_has_a_row_for_each_file_or_a_reason_against_it() -> None:
    """Stock as it is installed, ours as a new loader does it; rows that other groups have are theirs."""
    known = {row.name: row for row in rows.all_rows()}
    for model in rows.BY_DEFAULT:
        for storage in rows.KINDS_OF_FILES:
            row = rows.by_default(model, storage)
            if row is None:
                assert rows.WITHOUT[model, storage]
                continue
            assert known[row.name] == row and row.storage == storage and row.is_promised
            assert row.ours == row_types.OURS and row.ours.precision == "auto"
            assert row.stock == (rows.BESIDE_PACK if storage in storages.GGUF else row_types.STOCK)
    own = [row for row in rows.all_rows() if row.group == "default"]
    assert {row.asked for row in own} == {1.0} and {row.storage for row in own} == {*rows.KINDS_OF_FILES}
    assert rows.by_default("wan14", "q4_k_m") in rows.packed() and rows.by_default("sdxl", "fp16") in rows.pictures()
    assert rows.by_default("sdxl", "int8_convrot") is None
    precise = next(row for row in rows.packed() if row.note == "int8_convrot, precise")
    assert precise.ours is not None and precise.ours.precision == "precise"


def found_in(seconds: tuple[float, float], **ours: Any) -> dict[str, Any]:
    stock, own = seconds
    return {"stock": {"s": stock}, "ours": {"s": own, **ours}}


def test_the_table_of_defaults_says_where_ours_are_slower() -> None:
    found = {
        "klein 4B 1024x1024": found_in((0.1, 0.08)),
        "klein 4B 1024x1024, fp8_scaled": found_in((0.1, 0.1)),
        "klein 4B 1024x1024, int8_convrot": found_in((0.08, 0.084)),
        "klein 4B 1024x1024, Q8_0": {"stock": {"error": "out of memory"}, "ours": {"s": 0.2}},
    }
    lines = by_default.text(found).splitlines()
    assert lines[0] == "| Model | FP16 | fp8_scaled | int8_convrot | Q8_0 | Q4_K_M |"
    klein = next(line for line in lines if "klein" in line)
    assert klein == (
        "| klein 4B 1024x1024 | 0.1 s / 0.08 s, 0.80 | 0.1 s / 0.1 s, 1.00 | 0.08 s / 0.084 s, 1.05 **slower** "
        "| out of memory / 0.2 s | not measured |"
    )
    assert next(line for line in lines if line.startswith("| 14B")).count("not measured") == 5
    assert next(line for line in lines if line.startswith("| SDXL")).count(" - ") == 2
    assert "Ours are not slower in 2 of 3 rows with both times. 30 of 34 rows have yet to be measured." in lines
    assert any(line.startswith("- SDXL in fp8_scaled, int8_convrot: no such file") for line in lines)


def test_a_measurement_from_before_auto_is_of_another_row_where_the_file_is_in_8_bits() -> None:
    """Of FP16 and GGUF files `auto` computes as `precise` did, which was the default: they stay."""
    known = {row.name: row for row in rows.all_rows()}
    before, since = {"side": {"precision": "precise"}}, {"side": {"kernels": "on"}}
    for name, stays in (
        ("14B 480x480x17", True),
        ("14B 480x480x17, Q4_K_M", True),
        ("14B 480x480x17, fp8_e4m3fn", True),
        ("14B 480x480x17, int8_convrot", False),
        ("klein 4B 1024x1024, fp8_scaled", False),
        ("14B 480x480x17, int8_convrot, precise", True),
        ("14B 480x480x17, int8_convrot, turbo", False),
    ):
        assert results.is_of(known[name], {"ours": before}) is stays, name
    assert results.is_of(known["14B 480x480x17, int8_convrot"], {"ours": since})
    assert not results.is_of(known["14B 480x480x17, int8_convrot, precise"], {"ours": since})
    assert results.is_of(known["14B 480x480x17"], {"stock": {}})
    told = groups.by_name(
        {
            "models": {
                "rows": [
                    {"name": name, **found_in((1.0, 0.9), side=side)}
                    for name, side in (
                        ("14B 480x480x17", before["side"]),
                        ("14B 480x480x17, int8_convrot", before["side"]),
                        ("klein 4B 1024x1024, int8_convrot", since["side"]),
                    )
                ]
            }
        }
    )
    assert told.keys() == {"14B 480x480x17", "klein 4B 1024x1024, int8_convrot"}


def test_the_pack_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = next(row for row in rows.all_rows() if row.needs_pack)
    monkeypatch.delenv(gguf_pack.VARIABLE, raising=False)
    assert rows.quick(row).stock is None
    with pytest.raises(RuntimeError, match=f"{gguf_pack.VARIABLE} names no copy of ComfyUI-GGUF"):
        gguf_pack.load_diffusion_model("x.gguf")
    monkeypatch.setenv(gguf_pack.VARIABLE, str(tmp_path))
    assert rows.quick(row).stock == row.stock
    with pytest.raises(RuntimeError, match="names no copy"):
        gguf_pack.load_diffusion_model("x.gguf")


def test_a_packed_row_tells_its_promises_and_its_ram() -> None:
    row = next(row for row in rows.all_rows() if row.name == "14B 480x480x17, Q4_K_M")
    side = {"s": 0.4, "first s": 1.0, "peak GiB": 6.0, "finite": True}
    one = {
        "asked": 1.5, "asked s": 0.46, "asked first": None, "asked first s": 1.2, "asked held GiB": 9.31,
        "stock": {**side, "RAM held GiB": 12.0}, "ours": {**side, "RAM held GiB": 8.0}, "stock / ours": 2.0,
    }  # fmt: skip
    assert groups.promised(one) == "1.5x, < 0.46 s, first < 1.2 s, RAM < 9.31 GiB"
    assert groups.notes(row, {row.name: one}) == [f"- {row.name}, RAM held: stock 12 GiB, FuseStream 8 GiB"]


# --------------------------------------------------------------------------------------------------------------- Windows


class Sent:
    """What a bus was sent besides."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.streams: set[int | None] = set()

    def __call__(self, nbytes: int, stream: int | None) -> None:
        self.sizes.append(nbytes)
        self.streams.add(stream)


def test_a_bus_that_slept_is_measured_awake() -> None:
    """A row of 14B had one side on a bus of 23 GB/s: it was measured while another process copied."""
    rates = iter([24e9, 31e9, 55.0e9, 54e9, 55.1e9, 54.9e9, 1.0])
    assert windows.quickest(lambda: next(rates)) == 55.1e9
    assert next(rates) == 1.0, "three rounds in a row brought nothing new"


def test_a_quick_bus_is_as_full_as_a_slow_one() -> None:
    sent = Sent()
    bus = windows.Bus(4 * row_types.WINDOWS_BUS, sent)
    bus.passed(50 * MIB, 7)
    assert sent.sizes == [64 * MIB, 64 * MIB, 22 * MIB] and sent.streams == {7}
    slower = windows.Bus(row_types.WINDOWS_BUS / 2, sent)
    slower.passed(50 * MIB)
    assert len(sent.sizes) == 3, "a bus that is no quicker is left alone"


class Device(PlainDevice):
    """As a card's, it asks for many copies in one go."""

    def copy_all(self, room: int, pieces: Iterable[tuple[int, int, int]]) -> None:
        for at, source, nbytes in pieces:
            PlainDevice.copy_in(self, room + at, source, nbytes)


def test_ours_copy_at_the_rate_and_pin_no_more_than_windows_lets_them() -> None:
    sent = Sent()
    device = windows.limited(Device, windows.Bus(2 * row_types.WINDOWS_BUS, sent), windows.Pins(3 * MIB))()
    device.stream = SimpleNamespace(cuda_stream=9)
    try:
        pinned = device.pin(2 * MIB)
        with pytest.raises(CudaError, match="out of memory"):
            device.pin(2 * MIB)
        room = device.room(MIB)
        device.copy_in(room.data_ptr(), pinned.address, 1000)
        device.copy_all(room.data_ptr(), iter([(0, pinned.address, 10), (10, pinned.address, 20)]))
        device.synchronize()
        assert sent.sizes == [1000, 30] and sent.streams == {9}
        with pytest.raises(CudaError, match="not supported"):
            device.register(0, 4096)
        assert device.is_managed_capable is False
        device.unpin(pinned)
        device.unpin(device.pin(3 * MIB))
    finally:
        device.stop()


def test_stock_copies_at_the_rate_in_both_its_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    management: Any = comfy.model_management
    for name in ("cast_to_gathered", "cast_to", "MAX_PINNED_MEMORY"):
        monkeypatch.setattr(management, name, getattr(management, name))
    sent = Sent()
    windows.hold_stock(windows.Bus(2 * row_types.WINDOWS_BUS, sent))
    assert pytest.approx(0.4 * 32 * 2**30) == management.MAX_PINNED_MEMORY
    here = torch.zeros(100)
    management.cast_to(here, device=torch.device("cpu"), copy=True)
    assert sent.sizes == []
    assert management.cast_to(here, device=torch.device("meta")).device.type == "meta"
    away = torch.empty(4096, dtype=torch.uint8, device="meta")
    management.cast_to_gathered(iter([here, None]), away)
    management.cast_to_gathered([here], torch.empty(4096, dtype=torch.uint8), r2=away)
    assert sent.sizes == [400, 400, 400]


def test_the_limits_are_given_to_what_opens_pagers(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, parcels, vram = (
        importlib.import_module(f"fusestream.{name}")
        for name in ("memory.opening", "memory.side_copies", "fusion.stream.vram_pool")
    )
    for home in (opening, parcels):
        monkeypatch.setattr(home, "CudaDevice", home.CudaDevice)  # type: ignore[attr-defined]
    monkeypatch.setattr(vram, "_ram", None)
    plain = opening.CudaDevice  # type: ignore[attr-defined]
    windows.hold_ours(windows.Bus(1.0, Sent()))
    assert issubclass(opening.CudaDevice, plain) and opening.CudaDevice is parcels.CudaDevice  # type: ignore[attr-defined]
    assert opening.CudaDevice is not plain and vram._ram.total == 20 * 2**30  # type: ignore[attr-defined]

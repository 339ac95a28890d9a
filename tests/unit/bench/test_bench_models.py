"""The bench of whole models: its rows, its bounds held against stock's own modules, its results, and a try on the CPU."""

from __future__ import annotations

import copy
import json
import math
import re
from array import array
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ldm.flux.model
import comfy.ldm.lumina.model
import comfy.ldm.models.autoencoder
import comfy.ldm.modules.diffusionmodules.openaimodel
import comfy.ldm.wan.model
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_detection
import comfy.ops
import comfy.sd
import comfy.taesd.taesd
import comfy.text_encoders.llama
import comfy.text_encoders.t5
import comfy.utils
import pytest
import torch
from comfy.text_encoders import qwen3vl
from flop_counts import operations

from fusestream import checkpoints
from fusestream.bench.end_to_end import bounds, pictures, results, row_types, rows, weights
from fusestream.bench.end_to_end.bounds import Rates
from fusestream.bench.end_to_end.inputs import random_lora
from fusestream.bench.end_to_end.row_types import Row
from fusestream.bench.predicted.families import Flux1, flux1
from fusestream.bench.predicted.unets import taesd, unet
from fusestream.bench.report import chosen, groups, pages
from fusestream.checkpoints.options import qwen3_options
from fusestream.checkpoints.text import LlamaSize
from fusestream.checkpoints.weights import Table
from fusestream.kernels_cuda import OPS

ROOT = Path(__file__).resolve().parents[3]
HALF = torch.float16
FIELD = Rates(790e12, 790e12, 55e9)  # an H200's, whose bounds were reckoned before by other means


def wan(size: bounds.Sizes, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """Stock's transformer."""
    made: torch.nn.Module = comfy.ldm.wan.model.WanModel(
        model_type="t2v", text_len=512, in_dim=16, freq_dim=256, text_dim=4096, out_dim=16, dim=size.dim,
        ffn_dim=size.ffn, num_heads=size.dim // 128, num_layers=size.layers, device=device, dtype=dtype,
        operations=comfy.ops.manual_cast,
    )  # fmt: skip
    return made


def vae(size: bounds.VideoVae, device: str) -> Any:
    shape: dict[str, Any] = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
    with torch.device(device):
        if size.fold > 1:
            return comfy.ldm.wan.vae2_2.WanVAE(dim=size.encoder, dec_dim=size.decoder, z_dim=size.channels, **shape)
        return comfy.ldm.wan.vae.WanVAE(dim=size.encoder, z_dim=size.channels, **shape)


def painter(table: Table, device: str) -> torch.nn.Module:
    """Stock's transformer for a file of these names and shapes."""
    meta = {name: torch.empty(spec.shape, dtype=HALF, device="meta") for name, spec in table.items()}
    config = comfy.model_detection.model_config_from_unet(meta, "")
    other = comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel
    kinds = {
        "flux": comfy.ldm.flux.model.Flux,
        "flux2": comfy.ldm.flux.model.Flux,
        "lumina2": comfy.ldm.lumina.model.NextDiT,
    }
    kind = kinds.get(config.unet_config.get("image_model", ""), other)
    unused = ("allow_fp16",)  # which is about types
    known = {name: value for name, value in config.unet_config.items() if name not in unused}
    # A U-Net's constructor empties the lists that it is given.
    made: torch.nn.Module = kind(
        **copy.deepcopy(known), device=device, dtype=torch.float32, operations=comfy.ops.manual_cast
    )
    return made


def image_vae(size: pictures.ImageVae, device: str) -> Any:
    sizes = {
        "double_z": True, "z_channels": size.channels, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": size.width,
        "ch_mult": list(pictures.MULTIPLIERS), "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
    }  # fmt: skip
    with torch.device(device):
        if size.quantised:
            told = sizes | ({"batch_norm_latent": True} if size.folded else {})
            return comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=told, embed_dim=size.channels)
        return comfy.ldm.models.autoencoder.AutoencodingEngine(
            regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
            encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": sizes},
            decoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Decoder", "params": sizes},
        )


def t5_config() -> dict[str, Any]:
    path = Path(comfy.text_encoders.t5.__file__).parent / "umt5_config_xxl.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


# ------------------------------------------------------------------------------------------------------------- bounds


def test_bounds_are_those_of_the_field() -> None:
    """Rough sums made by hand beforehand, at one rate for all."""
    plain = {row.name: row for row in rows.table()}
    for name, seconds in {"1.3B 480x832x81": 0.72, "14B 480x832x81": 4.6, "14B 720x1280x81": 17.3}.items():
        assert bounds.bound(plain[name], FIELD)["bound"] == pytest.approx(seconds, rel=0.1), name
    few = bounds.bound(plain["14B 480x480x17"], FIELD)
    assert few["bus"] == pytest.approx(0.31, abs=0.03), "without what a text needs"
    assert few["bound"] == few["arithmetic"] == pytest.approx(0.32, abs=0.03)
    first = bounds.bound(plain["UMT5-XXL 512 tokens"], FIELD, first=True)
    assert first["bus"] == pytest.approx(0.20, abs=0.04)


def test_wan_costs_what_stock_computes() -> None:
    row = row_types.sampling("wan13", 64, 96, 5, 1)
    size = bounds.Sizes(256, 640, 2)
    net = wan(size, torch.float32, "cpu")
    x, text = torch.zeros(1, 16, *row.latent), torch.zeros(1, 512, 4096)
    counted = operations(lambda: net(x, torch.zeros(1), text))
    cost = bounds.wan_forward(size, bounds.wan_tokens(row))
    assert bounds.wan_tokens(row) == 2 * 4 * 6
    assert cost.gemm + cost.attention == pytest.approx(counted, rel=0.02)


def test_the_text_encoder_costs_what_stock_computes() -> None:
    size = bounds.Sizes(128, 320, 2)
    config = {**t5_config(), "d_model": 128, "d_ff": 320, "num_layers": 2, "num_heads": 2, "vocab_size": 512}
    net = comfy.text_encoders.t5.T5(config, torch.float32, "cpu", comfy.ops.manual_cast)
    counted = operations(lambda: net(torch.zeros(1, 512, dtype=torch.long), attention_mask=None))
    cost = bounds.umt5_forward(size)
    assert cost.gemm + cost.attention == pytest.approx(counted, rel=0.02)


def test_the_language_model_costs_what_stock_computes() -> None:
    size = replace(bounds.QWEN3, width=256, ffn=512, layers=2)
    config = qwen3_options(LlamaSize(**asdict(size)))["qwen3_4b_model_config"]
    net = comfy.text_encoders.llama.Qwen3_4B(config, torch.float32, "cpu", comfy.ops.manual_cast)
    counted = operations(lambda: net(torch.zeros(1, 512, dtype=torch.long), attention_mask=None))
    cost = bounds.qwen3_forward(size)
    assert cost.gemm + cost.attention == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("model", bounds.VIDEO_VAES)
@pytest.mark.parametrize("work", ["decode", "encode"])
def test_the_vae_costs_what_stock_computes(work: str, model: row_types.Model) -> None:
    row = Row(model, work, 64, 64, 9)  # type: ignore[arg-type]
    size = replace(bounds.VIDEO_VAES[model], encoder=8, decoder=8)
    net = vae(size, "cpu")
    if work == "decode":
        counted = operations(lambda: net.decode(torch.zeros(1, *row.latent_shape)))
        cost = bounds.vae_decode(row, size)
    else:
        counted = operations(lambda: net.encode(torch.zeros(1, 3, 9, 64, 64)))
        cost = bounds.vae_encode(row, size)
    assert cost.gemm + cost.attention == pytest.approx(counted, rel=0.06)  # few frames: zeros that stock computes with


def test_a_klein_costs_what_stock_computes() -> None:
    size = pictures.Klein(dim=512, double=2, single=3, text=96)
    table = checkpoints.pictures.flux(checkpoints.pictures.FluxSize(512, 2, 3, size.text, size.channels, shared=True))
    net = painter(table, "cpu")
    x, text = torch.zeros(1, size.channels, 16, 24), torch.zeros(1, size.tokens, size.text)
    counted = operations(lambda: net(x, torch.zeros(1), text))
    cost = pictures.klein_forward(size, 16 * 24)
    assert cost.gemm + cost.attention == pytest.approx(counted, rel=0.02)
    weights_of_blocks = sum(math.prod(spec.shape) for name, spec in table.items() if "_blocks." in name)
    assert cost.weights == pytest.approx(2 * weights_of_blocks, rel=0.01)


def test_a_flux_1_costs_what_stock_computes() -> None:
    size = Flux1(dim=256, double=1, single=2, text=96)
    table = checkpoints.pictures.flux(
        checkpoints.pictures.FluxSize(256, 1, 2, size.text, size.channels, 768, guidance=True)
    )
    net = painter(table, "cpu")
    x, text = torch.zeros(1, 16, 16, 24), torch.zeros(1, size.tokens, size.text)
    one = torch.zeros(1)
    counted = operations(lambda: net(x, one, text, y=torch.zeros(1, 768), guidance=one))
    cost = flux1(size, 16 * 24).cost
    assert cost.gemm + cost.attention == pytest.approx(counted, rel=0.02)
    weights_of_blocks = sum(math.prod(spec.shape) for name, spec in table.items() if "_blocks." in name)
    assert cost.weights == pytest.approx(2 * weights_of_blocks, rel=0.01)


def test_a_taesd_costs_what_stock_computes() -> None:
    net = comfy.taesd.taesd.TAESD(latent_channels=4)
    counted = operations(lambda: net.decode(net.encode(torch.zeros(1, 3, 64, 96))))
    assert taesd(64 * 96).cost.gemm == pytest.approx(counted, rel=0.02)


def test_a_z_image_costs_what_stock_computes() -> None:
    size = replace(pictures.Z_IMAGE, dim=384, layers=3, text=96, ffn=1024)
    table = checkpoints.pictures.z_image(checkpoints.pictures.ZImageSize(384, 3, 96))
    with checkpoints.narrow.opened(comfy):
        net = painter(table, "cpu")
    x, text = torch.zeros(1, size.channels, 32, 48), torch.zeros(1, size.tokens, size.text)
    counted = operations(lambda: net(x, torch.zeros(1), text, num_tokens=size.tokens))
    cost = pictures.z_image_forward(size, 32 * 48)
    assert cost.gemm + cost.attention == pytest.approx(counted, rel=0.02)
    blocks = ("layers.", "noise_refiner.", "context_refiner.")
    weights_of_blocks = sum(math.prod(spec.shape) for name, spec in table.items() if name.startswith(blocks))
    assert cost.weights == pytest.approx(2 * weights_of_blocks, rel=0.01)


@pytest.mark.parametrize("model", pictures.UNETS)
def test_a_unet_costs_what_stock_computes(model: str) -> None:
    size = replace(
        pictures.UNETS[model], width=64, middle=1, depth=tuple(min(d, 2) for d in pictures.UNETS[model].depth)
    )
    sizes = checkpoints.pictures.UnetSize(
        64, size.mult, size.depth, size.residuals, size.middle, size.text, size.labels, linear=size.linear
    )
    table = checkpoints.pictures.unet(sizes)
    with checkpoints.narrow.opened(comfy):
        net = painter(table, "cpu")
    x, text = torch.zeros(1, size.channels, 32, 48), torch.zeros(1, size.tokens, size.text)
    y = torch.zeros(1, size.labels) if size.labels else None
    counted = operations(lambda: net(x, torch.zeros(1), text, y))
    cost = unet(size, 32 * 48).cost
    assert cost.gemm + cost.attention == pytest.approx(counted, rel=0.02)
    parts = re.compile(r".*(in_layers|out_layers|emb_layers|skip_connection|transformer_blocks)\.")
    weights_of_blocks = sum(math.prod(spec.shape) for name, spec in table.items() if parts.match(name))
    assert cost.weights == pytest.approx(2 * weights_of_blocks, rel=0.01)


@pytest.mark.parametrize("model", pictures.IMAGE_VAES)
def test_a_vae_of_pictures_costs_what_stock_computes(model: str) -> None:
    size = replace(pictures.IMAGE_VAES[model], width=32)
    net, (channels, side) = image_vae(size, "cpu"), (size.channels, 8)
    if size.folded:
        channels, side = 4 * channels, 2 * side
    decoded = operations(lambda: net.decode(torch.zeros(1, channels, 128 // side, 64 // side)))
    encoded = operations(lambda: net.encode(torch.zeros(1, 3, 128, 64)))
    for counted, cost in (
        (decoded, pictures.decode_image(size, 128 * 64)),
        (encoded, pictures.encode_image(size, 128 * 64)),
    ):
        assert cost.gemm + cost.attention == pytest.approx(counted, rel=0.02)


def test_a_row_of_pictures_has_the_bound_of_its_own_work() -> None:
    """And nothing is promised that the card could not do."""
    every = {row.name: row for row in rows.pictures()}
    for row in every.values():
        for is_first, promised in ((False, row.seconds), (True, row.first_seconds)):
            assert not promised or bounds.bound(row, FIELD, first=is_first)["bound"] < promised, row.name
    assert bounds.bound(every["klein 4B 1024x1024"], FIELD)["bus"] == 0, "what fits is not brought again"
    assert bounds.bound(every["klein 9B 1024x1024"], FIELD)["bus"] > 0
    whole, read = bounds.cost_of(Row("qwen3", "text")), bounds.cost_of(every["Qwen3-4B 512 tokens, for klein"])
    assert read.gemm == pytest.approx(0.75 * whole.gemm), "27 of 36 layers"
    with pytest.raises(ValueError, match="bounds of its parts"):
        bounds.cost_of(every["klein 4B picture 1024x1024"])


def test_fp8_halves_the_bus_and_the_first_time_moves_all() -> None:
    row = row_types.sampling("wan14", 480, 480, 17, 3)
    first = bounds.bound(row, FIELD, first=True)["bus"]
    assert bounds.bound(replace(row, storage="fp8_e4m3fn"), FIELD, first=True)["bus"] == pytest.approx(first / 2)
    assert bounds.bound(row, FIELD)["bus"] < first
    assert bounds.bound(row_types.sampling("wan13", 480, 480, 17, 3), FIELD)["bus"] == 0  # it fits


def test_rates_are_the_best_that_a_card_was_measured_at() -> None:
    measured = json.loads((ROOT / "bench" / "results" / "nvidia-h200.json").read_text(encoding="utf-8"))
    rates = bounds.measured_rates(measured)
    assert rates is not None
    assert 500e12 < rates.gemm < 1000e12 and 400e12 < rates.attention < 1000e12 and 50e9 < rates.bus < 60e9
    assert bounds.measured_rates({"kernels": measured["kernels"]}) is None


# ------------------------------------------------------------------------------------------------------- rows, weights


def test_switches_name_ops_that_exist() -> None:
    named = {op for row in rows.all_rows() for side in (row.stock, row.ours) if side for op, _ in side.ops}
    assert named and named <= OPS.keys()


def test_every_matrix_of_the_blocks_gets_its_lora() -> None:
    class Model:  # where a stock MODEL has its transformer
        model = SimpleNamespace(diffusion_model=wan(bounds.Sizes(256, 640, 2), HALF, "meta"))

    lora = random_lora(Model, 4)
    assert len(lora) == 2 * 2 * (8 + 2)
    assert lora["diffusion_model.blocks.1.ffn.0.lora_B.weight"].shape == (640, 4)


@pytest.mark.parametrize("model", ["wan13", "wan14", "vae", "vae22", "t5", "qwen3"])
def test_weights_have_the_names_and_shapes_of_stocks_model(model: str) -> None:
    made: torch.nn.Module
    if model in bounds.VIDEO_VAES:
        made = vae(bounds.VIDEO_VAES[model], "meta")
    elif model == "qwen3":
        made = comfy.text_encoders.llama.Qwen3_4B({}, HALF, "meta", comfy.ops.manual_cast)
    elif model == "t5":
        made = comfy.text_encoders.t5.T5(t5_config(), HALF, "meta", comfy.ops.manual_cast)
    else:
        made = wan(bounds.WAN[model], HALF, "meta")
    wanted = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    assert {name: spec.shape for name, spec in weights.table(model).items()} == wanted


@pytest.mark.parametrize(("model", "gb"), [("vl2", 4.26), ("vl4", 8.88)])
def test_weights_of_qwen3_vl_have_the_names_and_shapes_of_stocks_model(model: row_types.Model, gb: float) -> None:
    """Of the 2B, the sizes alone: stock has none."""
    table = weights.table(model)
    assert sum(math.prod(spec.shape) for spec in table.values()) * 2e-9 == pytest.approx(gb, rel=0.02)
    if model == "vl4":
        made = qwen3vl._make_qwen3vl_model("qwen3vl_4b")({}, HALF, "meta", comfy.ops.manual_cast)
        told = {"model.": "model.language_model.", "visual.": "model.visual."}
        wanted = {
            told[f"{name.partition('.')[0]}."] + name.partition(".")[2]: tuple(tensor.shape)
            for name, tensor in made.state_dict().items()
        }
        assert {name: spec.shape for name, spec in table.items()} == wanted


def test_a_token_costs_its_weights_and_a_picture_its_patches() -> None:
    of_2b, of_4b = (bounds.written_token(bounds.WRITERS[name]) for name in ("vl2", "vl4"))
    assert (of_2b.weights, of_4b.weights) == pytest.approx((3.44e9, 8.04e9), rel=0.02)
    assert of_4b.gemm == pytest.approx(of_4b.weights)
    seen = bounds.seen_picture(bounds.WRITERS["vl4"], 768, 768)  # 2304 patches, 576 and 32 tokens, by hand
    assert seen.gemm == pytest.approx(2 * 2304 * 24 * 12.6e6 + 2 * 576 * 4 * 27.3e6 + 2 * 608 * 3.63e9, rel=0.02)


@pytest.mark.parametrize(
    ("model", "gb"),
    [("klein4", 7.8), ("klein9", 18.2), ("z_image", 12.3), ("sd15", 1.72), ("sdxl", 5.13)],
)
def test_weights_of_pictures_have_the_names_and_shapes_of_stocks_model(model: row_types.Model, gb: float) -> None:
    """Which stock builds by the names and shapes alone: it is of the published size, and lacks nothing."""
    table = weights.table(model)
    wanted = {name: tuple(tensor.shape) for name, tensor in painter(table, "meta").state_dict().items()}
    assert {re.sub(r"\.scale$", ".weight", name): spec.shape for name, spec in table.items()} == wanted
    assert 2e-9 * sum(math.prod(spec.shape) for spec in table.values()) == pytest.approx(gb, rel=0.01)


@pytest.mark.parametrize("model", pictures.IMAGE_VAES)
def test_weights_of_vaes_of_pictures_have_the_names_and_shapes_of_stocks(model: row_types.Model) -> None:
    held = image_vae(pictures.IMAGE_VAES[model], "meta").state_dict()
    wanted = {name: tuple(t.shape) for name, t in held.items() if not name.endswith("num_batches_tracked")}
    stocks = re.compile(r"(encoder|decoder)\.(?=(post_)?quant_conv\.)")  # it moves these two as it loads
    assert {stocks.sub("", name): spec.shape for name, spec in weights.table(model).items()} == wanted


def test_a_picture_is_promised_as_the_work_was_asked_for() -> None:
    """And where the peak is what is asked, a higher one is a miss."""
    row = next(row for row in rows.pictures() if row.name == "Flux.2 VAE decode 2048x2048")
    for peak, is_met in ((2.9, True), (3.1, False)):
        ours = run(1.0, 0.2, **{"peak GiB": peak})
        found = results.row_result(row, {"stock": [run(1.0, 0.6)], "ours": [ours]}, {}, 8.0, quick=False)
        assert found["met"] is is_met and groups.promised(found) == "2.5x, peak < 3 GiB"
    unasked = [row.name for row in rows.pictures() if not (row.asked or row.seconds)]
    assert unasked == ["SD 1.5 512x512"], "whose network alone is asked for"
    assert all(rows.quick(row).peak is None for row in rows.pictures())


def test_live_video_is_asked_for_by_frames_a_second() -> None:
    names = {row.name: row for row in rows.live()}
    assert list(names) == [
        f"SD 1.5 live 512x512 through {through}{held}"
        for through in ("TAESD", "the VAE")
        for held in ("", ", held to Turing")
    ]
    for name, row in names.items():
        of_a_step = bounds.bound(row_types.Row("sd15", "sample", 512, 512), FIELD)["bound"]
        assert row.files == (("sd15", "fp16"),) and row.prompts == 1
        assert bounds.bound(row, FIELD)["bound"] == pytest.approx(of_a_step / 2), "the network once, for one prompt"
        assert row.plain is None or row.plain in names, name
    assert names["SD 1.5 live 512x512 through TAESD"].seconds == pytest.approx(1 / 120)
    assert bounds.bound(names["SD 1.5 live 512x512 through TAESD"], FIELD)["bound"] < 1 / 120
    assert rows.quick(row).steps == 3


@pytest.mark.parametrize("storage", ["fp16", "fp8_e4m3fn"])
def test_a_written_file_is_what_the_table_says(tmp_path: Path, storage: str) -> None:
    table = weights.checkpoints.KINDS["wan_t2v"].table
    path = tmp_path / "file.safetensors"
    weights.write_table(path, table, storage, "cpu")
    read = comfy.utils.load_torch_file(str(path))
    assert {name: tuple(t.shape) for name, t in read.items()} == {name: spec.shape for name, spec in table.items()}
    for name, tensor in read.items():
        assert tensor.dtype == (torch.float8_e4m3fn if storage == "fp8_e4m3fn" and table[name].fp8 else HALF)
        if tensor.numel() > 10_000:
            assert tensor.float().std() == pytest.approx(table[name].std, rel=0.1)
    with pytest.raises(ValueError, match="not as 'int4'"):
        weights.write_table(path, table, "int4", "cpu")


# ------------------------------------------------------------------------------------------------------------ results


def run(*seconds: float, **others: Any) -> dict[str, Any]:
    return {"s": list(seconds), "load s": 1.0, "peak GiB": 6.5, "finite": True, "free GiB": 8.0, **others}


def result(**sides: list[dict[str, Any]]) -> dict[str, Any]:
    row = next(row for row in rows.table() if row.name == "1.3B 480x832x81")
    return results.row_result(row, sides, {}, 8.0, quick=False)


def test_the_first_time_is_apart_and_turns_are_joined() -> None:
    found = result(
        stock=[run(5.0, 1.5, 1.5), run(4.0, 1.7, 1.7)], ours=[run(3.0, 0.8, 0.8, **{"calls while choosing": 120})]
    )
    assert found["stock"]["s"] == 1.6 and found["stock"]["first s"] == 4.5
    assert found["ours"]["first s"] == 3.0 and found["ours"]["calls while choosing"] == 120
    assert found["stock / ours"] == 2.0 and found["met"] is True


@pytest.mark.parametrize(
    "ours", [run(3.0, 1.2), run(3.0, 0.8, finite=False), run(3.0, 0.8, **{"peak GiB": 7.2}), {"error": "out of memory"}]
)
def test_a_promise_that_was_not_kept_is_a_miss(ours: dict[str, Any]) -> None:
    found = result(stock=[run(2.0, 1.5)], ours=[ours])
    assert found["met"] is False and "MISS" in results.line(found)


def test_stock_may_run_out_of_memory() -> None:
    row = next(row for row in rows.table() if row.seconds)
    runs = {"stock": [{"error": "out of memory", "peak GiB": 7.9}], "ours": [run(22.0, 21.0)]}
    found = results.row_result(row, runs, {}, 8.0, quick=False)
    assert found["met"] is True and "OOM" in results.line(found)


def test_rows_replace_those_of_their_name_and_leave_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps({"kernels": {"rows": [1]}}))
    for seconds in (1.0, 1.23456):
        results.merge(path, {"name": "a", "s": [seconds]})
        results.merge(path, {"name": "b", "s": [2.0]})
    assert results.read(path) == {
        "kernels": {"rows": [1]},
        "models": {"rows": [{"name": "a", "s": [1.235]}, {"name": "b", "s": [2.0]}]},
    }


def test_bounds_can_be_set_when_the_rates_are_known(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    results.merge(path, result(stock=[run(2.0, 1.5)], ours=[run(2.0, 1.0)]))
    with pytest.raises(ValueError, match="no rates yet"):
        results.refresh_bounds(path)
    measured = json.loads((ROOT / "bench" / "results" / "nvidia-h200.json").read_text(encoding="utf-8"))
    path.write_text(json.dumps({**measured, "models": results.read(path)["models"]}))
    assert results.refresh_bounds(path) == 1
    (found,) = results.read(path)["models"]["rows"]
    assert found["ours"]["share of bound"] == pytest.approx(found["bounds s"]["bound"], rel=1e-3)


def test_samples_are_compared_by_their_relative_error(tmp_path: Path) -> None:
    for name, values in (("exact", [3.0, 4.0]), ("near", [3.0, 4.5]), ("short", [3.0])):
        (tmp_path / name).write_bytes(array("f", values).tobytes())
    assert results.distance(tmp_path / "near", tmp_path / "exact") == pytest.approx(0.1)
    with pytest.raises(ValueError, match="short has 1"):
        results.distance(tmp_path / "short", tmp_path / "exact")


def test_the_readmes_table_leaves_out_tries_and_shows_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is of the card where it was measured last."""
    new, old = ({"torch": "2.11", "date": date, "ComfyUI": "0.30.0"} for date in ("2026-02-02", "2026-01-01"))
    missed = {**result(stock=[run(2.0, 1.5)], ours=[run(3.0, 1.2)]), "environment": new}
    before = {**result(stock=[run(2.0, 1.7)], ours=[run(3.0, 1.6)]), "environment": old}
    attempt = {**missed, "quick": True, "name": chosen.CHOSEN_MODELS[1]}
    alone = {**result(ours=[run(3.0, 1.0)]), "name": chosen.CHOSEN_MODELS[2], "environment": new}
    cards = [
        (f"nvidia {card}", {"models": {"rows": rows}})
        for card, rows in (("a1 sxm", [before]), ("b2 pcie", [missed, attempt, alone]), ("c3", [before]))
    ]
    told = pages.models_table(cards)
    assert "| 1.3B 480x832x81 | B2 | 1.5 s | **missed** 1.2 s | 1.25x |" in told and told.count("\n| ") == 3
    assert "stock ComfyUI 0.30.0, torch 2.11 (2026-02-02)" in told
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    empty = "<!-- models:begin -->\n<!-- models:end -->\n"
    assert "Not measured yet." in pages.rendered(empty)
    measured = json.loads((ROOT / "bench" / "results" / "nvidia-h200.json").read_text(encoding="utf-8"))
    measured["models"] = {"rows": [missed]}
    (tmp_path / "nvidia-h200.json").write_text(json.dumps(measured))
    assert "| H200 | 1.5 s | **missed** 1.2 s |" in pages.rendered(empty)

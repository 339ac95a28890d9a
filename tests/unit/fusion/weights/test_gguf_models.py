"""Models out of GGUF files: what they compute is what the file of their dequantised weights computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sd
import comfy.utils
import gguf
import gguf_files
import numpy as np
import pytest
import torch
from comfy_extras import nodes_model_merging
from packed_files import KIND, packed_file, unpacked
from safetensors.torch import load_file, save_file
from scenes import Scene, sample

from bed.depth import is_thorough
from fusestream import checkpoints, fusion
from fusestream.fusion.base.errors import NotStreamable, NotWhileStreaming, WrongFile
from fusestream.fusion.base.family import Role
from fusestream.fusion.families import family_of
from fusestream.fusion.families.t5 import llama_cpp
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.report.gathering import what_it_holds
from fusestream.fusion.weights import ggml_tensor
from fusestream.fusion.weights.ggml_blocks import numbers
from fusestream.fusion.weights.ggml_tensor import held, in_rows, is_held
from fusestream.memory import Checkpoint, Extent, read_header

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

PROMPT = "a red fox (runs:1.3) through the snow"
PROMPTS = [
    [[torch.randn(1, 20, checkpoints.T5_WIDTH, generator=torch.Generator().manual_seed(seed)), {}]] for seed in (0, 1)
]
SCENE = Scene(*PROMPTS, {"samples": torch.zeros(1, 16, 2, 8, 8)})
SOME = ("Q8_0", "Q4_K")  # Wan is tried with all of them, other models with these
PACKED = [name for name, (_, elements, _) in gguf_files.TYPES.items() if elements > 1]


# --------------------------------------------------------------------------------------------------------------- names


def encoder_names(blocks: int) -> list[str]:
    """Stock's, of a UMT5."""
    return [name for name in checkpoints.text.umt5(checkpoints.text.Umt5Size(layers=blocks)) if name != "spiece_model"]


def llama_cpps(names: list[str], blocks: int) -> dict[str, str]:
    """The names that llama.cpp's converter gives, by those that transformers and stock have."""
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, blocks)
    found = {name: known.get_name(name, try_suffixes=(".weight",)) for name in names}
    assert all(found.values()), found
    return {name: str(theirs) for name, theirs in found.items()}


def test_names_are_llama_cpps(tmp_path: Path) -> None:
    """Every tensor of an encoder, there and back."""
    names = llama_cpps(encoder_names(24), 24)
    assert len(names) == 24 * 10 + 2 and names["shared.weight"] == "token_embd.weight"
    tensors = [gguf_files.Tensor(name, "F16", (4,)) for name in names.values()]
    header = read_header(gguf_files.file_of(tmp_path / "x.gguf", {}, tensors))
    family = family_of(header)
    assert family is not None and family.role is Role.TEXT and family.renames is not None
    rename = family.renames(header)
    assert rename is not None and [rename(theirs) for theirs in names.values()] == list(names)
    assert rename("spiece_model") == "spiece_model" and rename("enc.blk.0.other.weight") == "enc.blk.0.other.weight"


def test_an_encoder_without_gates(tmp_path: Path) -> None:
    tensors = [gguf_files.Tensor(f"enc.blk.0.{part}.weight", "F16", (4,)) for part in ("attn_rel_b", "ffn_up")]
    rename = llama_cpp.renaming(read_header(gguf_files.file_of(tmp_path / "x.gguf", {}, tensors)))
    assert rename("enc.blk.0.ffn_up.weight") == "encoder.block.0.layer.1.DenseReluDense.wi.weight"


# ------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", sorted(gguf_files.TYPES))
def test_numbers_are_the_packages(tmp_path: Path, kind: str) -> None:
    number, elements, size = gguf_files.TYPES[kind]
    raw = torch.randint(0, 256, (3, 2 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
    data = raw.numpy().tobytes()
    path = gguf_files.file_of(tmp_path / "x.gguf", {}, [gguf_files.Tensor("a", kind, (3, 2 * elements), data)])
    with Checkpoint.open(path) as source:
        extent = source.extents["a"]
        found = numbers(source.read(extent), extent)
    assert tuple(found.shape) == (3, 2 * elements)
    if elements > 1:
        with np.errstate(all="ignore"):  # bytes that nobody packed are any numbers
            array: Any = gguf.quants.dequantize(raw.numpy(), KIND(number))
        wanted = torch.from_numpy(array).half()
        same = torch.equal(found.view(torch.int16), wanted.view(torch.int16))
        assert same or torch.equal(found.nan_to_num(), wanted.nan_to_num())
    else:
        assert found.view(torch.uint8).numpy().tobytes() == data


# ------------------------------------------------------------------------------------------------------- text encoders


@pytest.fixture(scope="module")
def umt5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ComfyUI has it, of rows that are whole blocks."""
    folder = tmp_path_factory.mktemp("umt5")
    size = checkpoints.text.Umt5Size(width=32, layers=24)
    tensors = {
        name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(i)) * 0.1
        for i, (name, spec) in enumerate(checkpoints.text.umt5(size).items())
    }
    tensors = {name: tensor.abs() + 0.5 if tensor.ndim == 1 else tensor for name, tensor in tensors.items()}
    path = folder / "umt5.safetensors"
    save_file({**tensors, "spiece_model": checkpoints.spiece.spiece_tensor()}, path)
    return path


def encode(clip: Any) -> torch.Tensor:
    tokens = clip.tokenize(PROMPT, tokenizer_options={"umt5xxl_min_length": 24})
    encoding: torch.Tensor = clip.encode_from_tokens(tokens)
    return encoding


@pytest.mark.deep("Q4_K", "Q8_0")
@pytest.mark.parametrize("kind", PACKED if is_thorough() else SOME)
def test_a_umt5_encodes_as_its_dequantised_file(tmp_path: Path, umt5: Path, kind: str) -> None:
    """Its token embedding is packed too, and stays in the file."""
    plain = load_file(umt5)
    spiece = plain.pop("spiece_model")
    names = llama_cpps(list(plain), 24)
    path = packed_file(tmp_path / "umt5.gguf", plain, kind, names)
    back = {theirs: stocks for stocks, theirs in names.items()}
    dequantised = {back[name]: tensor for name, tensor in unpacked(path).items()}
    twin = tmp_path / "twin.safetensors"
    save_file({**dequantised, "spiece_model": spiece}, twin)
    off = fusion.KernelPolicy.of("off")
    ours = fusion.load_text_encoder(str(path), [], off, -1.0, others=(str(twin),))
    wanted = fusion.load_text_encoder(str(twin), [], off, -1.0)
    got = encode(ours)
    assert torch.equal(got, encode(wanted)) and got.std() > 0
    kinds = {weight.extent.dtype for layer in ours.patcher.stream.layers for weight in layer.weights}
    assert kind in kinds
    assert not torch.equal(got, encode(fusion.load_text_encoder(str(umt5), [], off, -1.0))), (
        "the test would see the difference"
    )


@pytest.mark.deep
def test_a_umt5_has_its_tokenizer_in_its_metadata(tmp_path: Path, umt5: Path) -> None:
    plain = load_file(umt5)
    model = plain.pop("spiece_model").numpy().tobytes()
    names = llama_cpps(list(plain), 24)
    off = fusion.KernelPolicy.of("off")
    lent = packed_file(tmp_path / "lent.gguf", plain, "Q8_0", names)
    with pytest.raises(WrongFile, match="has no tokenizer inside"):
        fusion.load_text_encoder(str(lent), [], off, -1.0)
    own = packed_file(tmp_path / "own.gguf", plain, "Q8_0", names, tokenizer=model)
    fusion.inspect_file(str(own), Role.TEXT)
    wanted = encode(fusion.load_text_encoder(str(lent), [], off, -1.0, others=(str(umt5),)))
    assert torch.equal(encode(fusion.load_text_encoder(str(own), [], off, -1.0)), wanted)


def test_stock_reads_none(umt5: Path, tmp_path: Path) -> None:
    plain = load_file(umt5)
    plain.pop("spiece_model")
    path = packed_file(tmp_path / "umt5.gguf", plain, "Q8_0", llama_cpps(list(plain), 24))
    with pytest.raises(
        WrongFile, match=r"is a GGUF file, which ComfyUI does not read by itself.*Set vram_budget to -1"
    ):
        fusion.load_text_encoder(str(path), [], vram_budget=0.0, others=(str(umt5),))
    with pytest.raises(
        WrongFile, match="is a T5 or UMT5 text encoder: choose it in the FuseStream Text Encoder Loader"
    ):
        fusion.load_diffusion_model(str(path), vram_budget=-1.0)


def test_nobody_is_told_to_have_stock_load_it(tmp_path: Path) -> None:
    """It could not. What cannot stream, and what cannot be done while weights stream, have another remedy than other files."""
    path = gguf_files.file_of(tmp_path / "x.gguf", {}, [gguf_files.Tensor("a", "Q8_0", (2, 32))])
    with pytest.raises(NotStreamable, match=r"is in no layout that can be streamed.* as a \.safetensors file\.$"):
        fusion.load_diffusion_model(str(path), vram_budget=-1.0)
    original = checkpoints.write("flux1", tmp_path, "fp16")
    model = load_streamed_diffusion_model(str(packed_file(tmp_path / "y.gguf", load_file(original), "Q8_0")))
    with pytest.raises(
        NotWhileStreaming, match=r"For that get the model as a \.safetensors file, and set vram_budget to 0"
    ):
        model.clone(force_deepcopy=True)
    with pytest.raises(NotWhileStreaming, match=r"\. Set vram_budget to 0 in its FuseStream loader for that\."):
        load_streamed_diffusion_model(str(original)).clone(force_deepcopy=True)


# ---------------------------------------------------------------------------------------------------- diffusion models


def wan(folder: Path, kind: str = "Q4_K") -> tuple[Any, Any]:
    """A tiny Wan from a packed file through the smallest window, and stock's from the file of its dequantised weights."""
    original = checkpoints.write("wan_t2v", folder, "fp16")
    metadata = dict(read_header(original).metadata)
    path, twin = folder / f"{kind}.gguf", folder / f"{kind}.safetensors"
    if not path.exists():
        packed_file(path, load_file(original), kind, metadata=metadata)
        save_file(unpacked(path), twin, metadata=metadata)
    ours = load_streamed_diffusion_model(str(path), dtype=torch.float16)
    ours.stream.residency.ceiling = ours.stream.residency.least
    return ours, comfy.sd.load_diffusion_model(str(twin), model_options={"dtype": torch.float16})


@pytest.fixture(scope="module")
def wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wan")


@pytest.mark.every_other
@pytest.mark.parametrize("kind", PACKED)
def test_a_wan_samples_as_its_dequantised_file(wan_folder: Path, kind: str) -> None:
    ours, stock = wan(wan_folder, kind)
    assert torch.equal(sample(ours, SCENE), sample(stock, SCENE))


@pytest.mark.usefixtures("whole_blocks")
def test_its_matrices_are_packed_in_the_window(wan_folder: Path) -> None:
    ours, _ = wan(wan_folder)
    sample(ours, SCENE)
    stream = ours.stream
    told = "Weights stay packed as the file has them (Q4_K, Q8_0), and are unpacked for each product."
    assert what_it_holds(stream) == told
    matrices = [one for block in stream.blocks for one in block.paged if one.stand_in.ndim == 2]
    assert matrices and all(is_held(one.stand_in) and one.stand_in.dtype is torch.float16 for one in matrices)
    layer = stream.layers[0]
    assert all(weight.nbytes == weight.extent.nbytes for weight in layer.weights if weight.is_packed)
    assert {weight.extent.dtype for weight in layer.weights if weight.is_packed} == {"Q4_K", "Q8_0"}
    halves = sum(2 * one.stand_in.numel() for one in stream.blocks[0].paged)
    assert stream.residency.ledger.peak("VRAM") <= stream.residency.least < 1.5 * halves, (
        "two blocks pass, each of a third of its halves"
    )


LORAS = [kind for kind, base in checkpoints.LORA_BASES.items() if base == "wan_t2v"]


@pytest.mark.deep
@pytest.mark.parametrize("name", LORAS if is_thorough() else LORAS[::2])
def test_a_lora_does_to_it_what_it_does_to_its_dequantised_file(wan_folder: Path, name: str) -> None:
    ours, stock = wan(wan_folder)
    plain = sample(ours, SCENE)
    file = comfy.utils.load_torch_file(str(checkpoints.write(name, wan_folder)))
    for strength in (0.8, -0.4):
        ours_with, stock_with = (
            comfy.sd.load_lora_for_models(model, None, file, strength, 0.0)[0] for model in (ours, stock)
        )
        got = sample(ours_with, SCENE)
        assert torch.equal(got, sample(stock_with, SCENE))
        assert name == "lora_modulation" or not torch.equal(got, plain)
    assert torch.equal(sample(ours, SCENE), plain)
    assert not any(one.module.weight_function for block in ours.stream.blocks for one in block.paged)


def test_other_patches_bring_no_packed_weight_anew(wan_folder: Path) -> None:
    ours, stock = wan(wan_folder)
    ours.stream.residency.ceiling = None
    file = comfy.utils.load_torch_file(str(checkpoints.write("lora_ab", wan_folder)))
    for strength in (0.8, 0.3):
        ours_with, stock_with = (
            comfy.sd.load_lora_for_models(model, None, file, strength, 0.0)[0] for model in (ours, stock)
        )
        assert torch.equal(sample(ours_with, SCENE), sample(stock_with, SCENE))
    copies = [entry.layer for entry in ours.stream.residency.ledger.entries if entry.kind == "copy"]
    assert sorted(copies) == sorted(layer.name for layer in ours.stream.layers), "each of them once"


def test_it_is_saved_as_its_dequantised_file(wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    file = comfy.utils.load_torch_file(str(checkpoints.write("lora_ab", wan_folder)))
    found = []
    for name, model in zip(("ours", "stock"), wan(wan_folder), strict=True):
        nodes_model_merging.ModelSave().save(comfy.sd.load_lora_for_models(model, None, file, 0.8, 0.0)[0], name)
        found.append(load_file(next(tmp_path.glob(f"{name}*.safetensors"))))
    got, wanted = found
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype is tensor.dtype and torch.equal(got[name], tensor), name


def test_a_merge_takes_its_numbers(wan_folder: Path) -> None:
    found = []
    for one, other in zip(wan(wan_folder, "Q4_K"), wan(wan_folder, "Q8_0"), strict=True):
        (merged,) = nodes_model_merging.ModelMergeSimple().merge(one, other, 0.3)
        found.append(sample(merged, SCENE))
    assert torch.equal(*found)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_stocks_linear_computes_with_a_packed_weight(kind: str, inference: bool) -> None:
    raw = torch.from_numpy(gguf_files.random_blocks(kind, (48, 256), 0)).reshape(-1)
    weight = ggml_tensor.held(raw, Extent("w", kind, (48, 256), 0, raw.numel()), torch.float32)
    assert torch.equal(ggml_tensor.half(weight).float(), weight.dequantize())
    with torch.inference_mode(inference):
        linear = comfy.ops.disable_weight_init.Linear(256, 48, dtype=torch.float32)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        linear.bias = torch.nn.Parameter(torch.randn(48), requires_grad=False)
        for shape in ((3, 256), (2, 5, 256), (256,)):
            x = torch.randn(shape)
            wanted = torch.nn.functional.linear(x, weight.dequantize(), linear.bias)
            assert torch.equal(linear(x), wanted)


def test_a_matrix_whose_rows_are_no_whole_blocks_multiplies(tmp_path: Path) -> None:
    """GGUF files of U-Nets: narrow matrices are packed in rows of 256, whatever their own rows are."""
    n, k = 8, 320
    stored = torch.from_numpy(gguf.quants.quantize(torch.randn(n * k // 256, 256).numpy(), KIND.Q8_0)).flatten()
    extent = Extent("a", "Q8_0", (n, k), 0, stored.numel())
    whole = held(stored, extent, torch.float16)
    number = gguf.quants.dequantize(stored.numpy(), KIND.Q8_0)
    x = torch.randn(3, k).half()
    wanted = torch.nn.functional.linear(x, torch.from_numpy(number).view(n, k).half())
    assert torch.equal(torch.nn.functional.linear(x, whole), wanted)
    assert in_rows(whole) is not None, "of 32 elements a block, 320 are whole ones"
    bytes_ = torch.randint(0, 256, (n * k // 256 * 210,), dtype=torch.uint8)
    across = held(bytes_, Extent("b", "Q6_K", (n, k), 0, bytes_.numel()), torch.float16)
    assert in_rows(across) is None
    assert torch.equal(
        torch.nn.functional.linear(x, across).isnan(), torch.nn.functional.linear(x, across.dequantize()).isnan()
    )
    assert torch.nn.functional.linear(x, across).shape == (3, n)

"""Models out of GGUF files: what they compute is what the file of their dequantised weights computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.sd
import gguf
import gguf_files
import numpy as np
import pytest
import torch
from family_scenes import inputs
from packed_files import KIND, packed_file, unpacked
from safetensors.torch import load_file, save_file
from scenes import sample

from fusestream import checkpoints, fusion
from fusestream.fusion.errors import NotStreamable, NotWhileStreaming, WrongFile
from fusestream.fusion.families import family_of
from fusestream.fusion.families.t5 import llama_cpp
from fusestream.fusion.family import Role
from fusestream.fusion.load import load_streamed_diffusion_model
from fusestream.fusion.packed import numbers
from fusestream.memory import Checkpoint, read_header

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

PROMPT = "a red fox (runs:1.3) through the snow"
PACKED = [name for name, (_, elements, _) in gguf_files.TYPES.items() if elements > 1]


# --------------------------------------------------------------------------------------------------------------- names


def encoder_names(blocks: int) -> list[str]:
    """Stock's, of a UMT5."""
    return [name for name in checkpoints.umt5.table(checkpoints.umt5.Umt5Size(layers=blocks)) if name != "spiece_model"]


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
    size = checkpoints.umt5.Umt5Size(width=32, layers=24)
    tensors = {
        name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(i)) * 0.1
        for i, (name, spec) in enumerate(checkpoints.umt5.table(size).items())
    }
    tensors = {name: tensor.abs() + 0.5 if tensor.ndim == 1 else tensor for name, tensor in tensors.items()}
    path = folder / "umt5.safetensors"
    save_file({**tensors, "spiece_model": checkpoints.spiece.spiece_tensor()}, path)
    return path


def encode(clip: Any) -> torch.Tensor:
    tokens = clip.tokenize(PROMPT, tokenizer_options={"umt5xxl_min_length": 24})
    encoding: torch.Tensor = clip.encode_from_tokens(tokens)
    return encoding


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "IQ4_NL", "Q4_K"])
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


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize(
    ("model", "kind"), [*(("flux1", kind) for kind in PACKED), ("wan_causal", "Q4_K"), ("qwen_image", "Q8_0")]
)
def test_a_diffusion_model_samples_as_its_dequantised_file(tmp_path: Path, model: str, kind: str) -> None:
    original = checkpoints.write(model, tmp_path, "fp16")
    metadata = dict(read_header(original).metadata)
    path = packed_file(tmp_path / "x.gguf", load_file(original), kind, metadata=metadata)
    save_file(unpacked(path), twin := tmp_path / "twin.safetensors", metadata=metadata)
    ours, wanted = (load_streamed_diffusion_model(str(one)) for one in (path, twin))
    assert torch.equal(sample(ours, inputs(model)), sample(wanted, inputs(model)))


@pytest.mark.usefixtures("small_ones_too")
def test_a_lora_does_to_it_what_it_does_to_its_dequantised_file(tmp_path: Path) -> None:
    plain = load_file(checkpoints.write("flux1", tmp_path, "fp16"))
    path = packed_file(tmp_path / "x.gguf", plain, "Q4_K")
    save_file(unpacked(path), twin := tmp_path / "twin.safetensors")
    ours, wanted = (load_streamed_diffusion_model(str(one)) for one in (path, twin))
    plain_latents = sample(ours, inputs("flux1"))
    lora = lora_for(wanted)
    ours, wanted = (comfy.sd.load_lora_for_models(model, None, lora, 0.8, 0.0)[0] for model in (ours, wanted))
    latents = sample(ours, inputs("flux1"))
    assert torch.equal(latents, sample(wanted, inputs("flux1"))) and not torch.equal(latents, plain_latents)


def lora_for(model: Any) -> dict[str, torch.Tensor]:
    """For every fourth matrix of a model."""
    found, generator = {}, torch.Generator().manual_seed(3)
    shapes = {key: value.shape for key, value in model.model_state_dict().items() if key.endswith(".weight")}
    for key in [key for key, shape in sorted(shapes.items()) if len(shape) == 2][::4]:
        rows, columns = shapes[key]
        name = key.removesuffix(".weight")
        found[f"{name}.lora_up.weight"] = torch.randn(rows, 2, generator=generator) * 0.1
        found[f"{name}.lora_down.weight"] = torch.randn(2, columns, generator=generator) * columns**-0.5
    return found

"""Files that `dev.py quantise` writes: what the gguf package, our loader and stock's make of them,
and what is refused.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ops
import comfy.sd
import gguf
import numpy as np
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from family_scenes import inputs
from gguf_files import Tensor, Typed, file_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save_file
from scenes import sample
from sentencepiece import SentencePieceProcessor

from bed.depth import examples
from fusestream import checkpoints, fusion
from fusestream.checkpoints.quantise import KINDS, CannotQuantise, choice, gguf_file, quantise, t5
from fusestream.checkpoints.quantise.__main__ import main
from fusestream.checkpoints.quantise.blocks import PACKERS, packed
from fusestream.checkpoints.quantise.pieces import PIECE
from fusestream.checkpoints.quantise.stock_file import rotation
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.weights.ggml_blocks import numbers
from fusestream.kernels_cuda.ops.quant.packed_blocks import unpacked
from fusestream.memory import BadFile, Checkpoint, Extent, read_header
from fusestream.memory.formats.gguf_values import Listed
from fusestream.memory.unfinished import NotWritten, UnfinishedFile
from fusestream.memory.written_gguf import GgufWriter

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[3]
TRAINED = ROOT / "checkpoints" / "trained"
TOYS, UMT5 = TRAINED / "toys_wan_t2v_fp16.safetensors", TRAINED / "toys_umt5_fp16.safetensors"
KIND = gguf.GGMLQuantizationType
GGUF = tuple(choice.GGUF_KINDS)
# Of what normal weights are off by at most, in parts of their root mean square.
BOUNDS = {"Q8_0": 0.007, "Q6_K": 0.02, "Q5_K": 0.04, "Q4_K": 0.08}


def by_gguf(rows: torch.Tensor, encoding: str) -> torch.Tensor:
    array: Any = gguf.dequantize(rows.numpy(), KIND[encoding])
    return torch.from_numpy(array)


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


# ------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("encoding", PACKERS)
def test_normal_weights_stay_within_the_bounds(encoding: str) -> None:
    weights = normal(64, 2048)
    rows = packed(weights, encoding)
    got = by_gguf(rows, encoding)
    assert torch.equal(got, unpacked(rows, encoding)), "the package and our reference read the same numbers"
    assert BOUNDS[encoding] / 2 < off(got, weights) <= BOUNDS[encoding]


def test_q8_0_is_ggmls_to_the_byte() -> None:
    weights = torch.cat(
        [normal(40, 256), torch.zeros(1, 256), torch.arange(-128, 128)[None] / 2, normal(3, 256) * 1e-6]
    )
    assert np.array_equal(packed(weights, "Q8_0").numpy(), gguf.quantize(weights.numpy(), KIND.Q8_0))


# Blocks that are not normal: what is a group of them off by at most, in parts of its largest
# number.
ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like,
    "constant": lambda x: torch.full_like(x, 0.37),
    "negative constant": lambda x: torch.full_like(x, -0.37),
    "above zero": lambda x: x.abs() + 1,
    "below zero": lambda x: -x.abs() - 1,
    "one large": lambda x: torch.where(torch.arange(x.shape[1]) == 77, 50.0, x),
    "large": lambda x: x / x.abs().amax() * 60000,
    "small": lambda x: x / x.abs().amax() * 0.001,
    "two values": lambda x: x.sign(),
    "half zeros": lambda x: x.clamp(min=0),
    "steps": lambda x: (x * 100).round(),
}
STEPS = {"Q8_0": 127, "Q6_K": 31, "Q5_K": 31, "Q4_K": 15}


@settings(max_examples=examples(120), deadline=None)
@given(encoding=st.sampled_from(list(PACKERS)), shape=st.sampled_from(list(ODD)), seed=st.integers(0, 2**31))
def test_odd_weights_keep_their_size(encoding: str, shape: str, seed: int) -> None:
    weights = ODD[shape](normal(2, 512, seed=seed))
    rows = packed(weights, encoding)
    got = by_gguf(rows, encoding)
    assert torch.equal(got, unpacked(rows, encoding)) and got.isfinite().all()
    # Scales of 6 bits are shared by a block: a step of theirs is a 63rd of the largest.
    largest = weights.unflatten(1, (-1, 256)).abs().amax(-1, keepdim=True)
    error = (got - weights).unflatten(1, (-1, 256)).abs()
    assert (error <= largest * (1.5 / STEPS[encoding] + (1 / 40 if encoding in ("Q4_K", "Q5_K") else 0))).all()


def test_groups_of_a_block_have_scales_of_their_own() -> None:
    weights = normal(32, 256) * torch.tensor([1.0, 0.1] * 4).repeat_interleave(32)
    for encoding in ("Q4_K", "Q5_K", "Q6_K"):
        got = by_gguf(packed(weights, encoding), encoding)
        fine = torch.tensor([False, True] * 4).repeat_interleave(32)
        assert off(got[:, fine], weights[:, fine]) < 2 * BOUNDS[encoding]


# --------------------------------------------------------------------------------------- GGUF files


def of(name: str, encoding: str, data: Any, shape: Any) -> torch.Tensor:
    """One tensor by the package, in torch's shape."""
    return torch.from_numpy(gguf.dequantize(data, KIND[encoding]).copy()).reshape(*reversed(shape.tolist()))


@pytest.fixture(scope="module", params=GGUF)
def toys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("toys") / "toys.gguf"
    quantise(TOYS, path, request.param)
    return request.param, path


def test_the_package_and_our_loader_read_the_same_numbers(toys: tuple[str, Path]) -> None:
    kind, path = toys
    plain, reader = load_file(TOYS), gguf.GGUFReader(path)
    assert {one.name for one in reader.tensors} == plain.keys()
    with Checkpoint.open(path) as source:
        for one in reader.tensors:
            theirs = of(one.name, one.tensor_type.name, one.data, one.shape)
            extent = source.extents[one.name]
            ours = numbers(source.read(extent), extent)
            assert extent.shape == tuple(plain[one.name].shape) and extent.dtype == one.tensor_type.name
            # Ours are halves of what is packed, as it streams.
            assert torch.equal(ours, theirs.view(extent.shape).to(ours.dtype)), one.name
            if extent.encoding.is_packed:
                assert off(ours, plain[one.name]) < 1.4 * BOUNDS[extent.dtype]
            else:
                assert torch.equal(ours.half(), plain[one.name]) and ours.dtype in (torch.float16, torch.float32)
    assert reader.fields["general.architecture"].contents() == "wan"
    assert reader.fields["general.file_type"].contents() == {"q8_0": 7, "q4_k": 14, "q4_k_m": 15, "q5_k": 16}[kind]
    assert reader.fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
    assert json.loads(reader.fields["config"].contents()) == {"transformer": {"text_dim": 64}}, "the model's settings"


def test_what_is_packed_and_what_is_not(toys: tuple[str, Path]) -> None:
    kind, path = toys
    found = {name: extent.dtype for name, extent in read_header(path).extents.items()}
    block = {name.removeprefix("blocks.3."): dtype for name, dtype in found.items() if name.startswith("blocks.3.")}
    usual = choice.GGUF_KINDS[kind]
    finest = "Q6_K" if kind == "q4_k_m" else usual
    assert block["self_attn.q.weight"] == block["cross_attn.o.weight"] == block["ffn.0.weight"] == usual
    assert block["self_attn.v.weight"] == block["cross_attn.v.weight"] == block["ffn.2.weight"] == finest
    assert block["modulation"] == "F16"
    assert {dtype for name, dtype in block.items() if "norm" in name or name.endswith("bias")} == {"F32"}
    around = {dtype for name, dtype in found.items() if not name.startswith("blocks.")}
    assert around == {"F16", "F32"} and found["head.head.weight"] == found["time_embedding.2.weight"] == "F16"


def test_five_dimensions_are_written_as_others_read_them(toys: tuple[str, Path]) -> None:
    reader = gguf.GGUFReader(toys[1])
    patch = next(one for one in reader.tensors if one.name == "patch_embedding.weight")
    assert patch.shape.tolist() == [4, 1, 16, 256]
    field = reader.fields["comfy.gguf.orig_shape.patch_embedding.weight"]
    assert field.contents() == [256, 16, 1, 2, 2]
    assert field.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]


@pytest.mark.usefixtures("as_comfyui_runs", "small_ones_too")
def test_a_model_samples_as_its_dequantised_file(tmp_path: Path) -> None:
    path = tmp_path / "flux.gguf"
    done = quantise(checkpoints.write("flux1", tmp_path), path, "q4_k_m")
    assert {"Q4_K", "Q5_K", "Q6_K", "F32"} <= done.tensors.keys() and done.bytes_after == path.stat().st_size
    twin = {}
    for one in gguf.GGUFReader(path).tensors:
        kind = torch.float32 if one.tensor_type == KIND.F32 else torch.float16
        twin[one.name] = of(one.name, one.tensor_type.name, one.data, one.shape).to(kind)
    save_file(twin, tmp_path / "twin.safetensors")
    ours, wanted = (load_streamed_diffusion_model(str(one)) for one in (path, tmp_path / "twin.safetensors"))
    assert torch.equal(sample(ours, inputs("flux1")), sample(wanted, inputs("flux1")))


def blocks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model of two blocks of these, of a family that has a word."""
    named = {f"blocks.{i}.{name}": tensor.clone() for i in range(2) for name, tensor in tensors.items()}
    return {"blocks.0.self_attn.norm_q.weight": torch.ones(8), **named}


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    widths = {"a": 256, "b": 96, "c": 40, "d": 512, "bias": 7}
    tensors = blocks({f"{name}.weight": normal(3, k) for name, k in widths.items()})
    tensors["blocks.0.a.bias"] = torch.ones(5, dtype=torch.bfloat16)
    tensors["head.weight"] = normal(5, 256).bfloat16()
    tensors["positions"] = torch.arange(4)
    save_file(tensors, source := tmp_path / "x.safetensors", {"format": "pt"})
    quantise(source, path := tmp_path / "x.gguf", "q5_k")
    header = read_header(path)
    found = {name: extent.dtype for name, extent in header.extents.items()}
    assert [found[f"blocks.1.{name}.weight"] for name in widths] == ["Q5_K", "Q8_0", "F32", "Q5_K", "F32"]
    assert (found["head.weight"], found["blocks.0.a.bias"], found["positions"]) == ("BF16", "F32", "I64")
    assert "format" not in header.metadata
    with Checkpoint.open(path) as opened:
        for name in ("head.weight", "positions", "blocks.1.c.weight"):
            extent = opened.extents[name]
            assert torch.equal(numbers(opened.read(extent), extent), tensors[name])


def test_a_prefix_goes_and_a_word_may_be_given(tmp_path: Path) -> None:
    tensors = {
        f"model.diffusion_model.{name}": one
        for name, one in blocks({f"{x}.weight": normal(4, 64) for x in "abcd"}).items()
    }
    save_file(tensors, source := tmp_path / "x.safetensors")
    quantise(source, tmp_path / "x.gguf", "q8_0")
    assert "blocks.0.a.weight" in read_header(tmp_path / "x.gguf").extents
    unknown = {f"layers.{i}.{x}.weight": normal(4, 64) for i in range(2) for x in "abcd"}
    save_file(unknown, source)
    with pytest.raises(CannotQuantise, match=r"no model whose word for GGUF files is known.*--architecture WORD"):
        quantise(source, tmp_path / "y.gguf", "q8_0")
    quantise(source, tmp_path / "y.gguf", "q8_0", architecture="mine")
    assert read_header(tmp_path / "y.gguf").metadata["general.architecture"] == "mine"


WORDS = {
    "wan_t2v": "wan", "wan_vace": "wan", "flux1": "flux", "flux2": "flux", "chroma": "flux", "hunyuan_video_15": "hyvid",
    "qwen_image": "qwen_image", "z_image": "lumina2", "ltx2": "ltxv", "ltx23": "ltxv", "sd3": "sd3", "sd15": "sd1",
    "sdxl": "sdxl", "umt5": "t5encoder", "t5xxl": "t5encoder", "qwen3": "qwen3",
}  # fmt: skip


@pytest.mark.parametrize("kind", WORDS)
def test_words_and_matrices_of_the_families(kind: str) -> None:
    """By names and shapes: most of a model's matrices, and none of its tables, norms and ways in."""
    table = checkpoints.KINDS[kind].table
    extents = {name: Extent(name, "F16", spec.shape, 0, 2) for name, spec in table.items()}
    source: Any = SimpleNamespace(extents=extents, files=[SimpleNamespace(path=kind, metadata={})])
    assert gguf_file.architecture_of(source) == WORDS[kind]
    chosen = choice.matrices(source)
    assert all(any(part.isdigit() for part in name.split(".")) for name in chosen)
    odd = ("norm", "embed", "time_", "guidance", "final_layer", "img_in", "txt_in.input", "relative")
    assert not [name for name in chosen if any(part in name.replace("embeddings_connector", "") for part in odd)]
    assert len(chosen) >= 28


# ------------------------------------------------------------------------------------ text encoders


def test_a_text_encoder_has_llama_cpps_names_and_its_tokenizer(tmp_path: Path) -> None:
    quantise(UMT5, path := tmp_path / "umt5.gguf", "q4_k_m")
    plain, header = load_file(UMT5), read_header(path)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 24)
    names = {known.get_name(name, try_suffixes=(".weight",)) for name in plain if name != "spiece_model"}
    assert header.extents.keys() == names and header.metadata["general.architecture"] == "t5encoder"
    assert header.extents["token_embd.weight"].dtype == "Q8_0", "its rows are of 64"
    assert header.extents["enc.blk.0.attn_rel_b.weight"].dtype == "F32"
    original = SentencePieceProcessor(model_proto=plain["spiece_model"].numpy().tobytes())
    tokens = header.values["tokenizer.ggml.tokens"]
    assert isinstance(tokens, Listed)
    assert list(tokens.texts) == [original.id_to_piece(i) for i in range(original.get_piece_size())]
    assert header.values["tokenizer.ggml.eos_token_id"] == original.eos_id()


@pytest.mark.usefixtures("as_comfyui_runs")
def test_a_text_encoder_encodes_nearly_as_before(tmp_path: Path) -> None:
    """Tokenizer and all, from the GGUF file alone."""
    quantise(UMT5, path := tmp_path / "umt5.gguf", "q8_0")
    policy = fusion.KernelPolicy.of("off")
    before, after = (encoded(fusion.load_text_encoder(str(one), [], policy, -1.0)) for one in (UMT5, path))
    assert before.shape == after.shape and 0 < off(after, before) < 0.05


def encoded(clip: Any) -> torch.Tensor:
    found: torch.Tensor = clip.encode_from_tokens(clip.tokenize("a red ball moves left before a blue wall"))
    return found


def test_a_broken_tokenizer_is_told(tmp_path: Path) -> None:
    tensors = load_file(UMT5)
    for broken in (
        tensors["spiece_model"][:1000],  # ends with a piece
        tensors["spiece_model"][:1003],
        torch.tensor([0x0B, 1], dtype=torch.uint8),
        tensors["spiece_model"][:0],
    ):
        save_file({**tensors, "spiece_model": broken}, source := tmp_path / "x.safetensors")
        with pytest.raises(CannotQuantise, match=r"x\.safetensors: the tokenizer in it is damaged"):
            quantise(source, tmp_path / "x.gguf", "q8_0")
        assert [one.name for one in tmp_path.iterdir()] == ["x.safetensors"]


# -------------------------------------------------------------------------------------- stock's own


@pytest.mark.usefixtures("as_comfyui_runs")
@pytest.mark.parametrize("kind", choice.STOCK_KINDS)
def test_stock_loads_what_is_written_and_would_write_the_same(tmp_path: Path, kind: str) -> None:
    done = quantise(TOYS, path := tmp_path / "toys.safetensors", kind)
    assert done.tensors == {"float16": 100, {"fp8": "float8_e4m3fn"}.get(kind, "int8"): 50}
    plain, written = load_file(TOYS), load_file(path)
    net = comfy.sd.load_diffusion_model(str(path)).model.diffusion_model
    modules = {
        name: one for name, one in net.named_modules() if isinstance(getattr(one, "weight", None), QuantizedTensor)
    }
    assert len(modules) == 50
    for name, module in modules.items():
        weight, back = plain[f"{name}.weight"].float(), module.weight.dequantize().float()
        half = torch.finfo(torch.float16).eps * weight.abs().amax()
        scale = written[f"{name}.weight_scale"]
        if kind == "int8":
            assert ((back - weight).abs() <= scale / 2 + half).all()
        elif kind == "fp8":
            assert ((back - weight).abs() <= weight.abs() / 16 + scale * 2**-9 + half).all()
        else:  # turned, no number moves by more than a row does
            rounding = scale.reshape(-1, 1) / 2 * weight.shape[1] ** 0.5
            assert ((back - weight).norm(dim=1, keepdim=True) <= rounding + half * weight.shape[1] ** 0.5).all()
            assert off(back, weight) < (0.2 if kind == "convrot_w4a4" else 0.012)
        told = {key: one for key, one in module.state_dict(prefix=f"{name}.").items() if not key.endswith(".bias")}
        assert len(told) == 3
        for key, tensor in told.items():
            assert tensor.dtype == written[key].dtype and tensor.shape == written[key].shape, key
            assert torch.equal(tensor.flatten().view(torch.uint8), written[key].flatten().view(torch.uint8)), key
    kept = plain.keys() - {f"{name}.weight" for name in modules}
    assert all(torch.equal(written[name], plain[name]) for name in kept)


@pytest.mark.usefixtures("as_comfyui_runs")
@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        ("int8", {}, 0),
        ("int8_convrot", {"per_channel": True, "convrot": True}, 1),
        ("fp8", {"scale": "recalculate"}, 0),
    ],
)
def test_numbers_are_those_of_stocks_own_quantiser(
    tmp_path: Path, kind: str, options: dict[str, Any], most: int
) -> None:
    """Turned ones are summed in another order: a number in some hundreds goes to the next step."""
    tensors = blocks({f"{x}.weight": normal(48, 512, seed=i) for i, x in enumerate("abcd")})
    save_file(tensors, source := tmp_path / "x.safetensors")
    quantise(source, path := tmp_path / "y.safetensors", kind)
    layout = "TensorCoreFP8E4M3Layout" if kind == "fp8" else "TensorWiseINT8Layout"
    written = load_file(path)
    for name in ("blocks.0.a", "blocks.1.d"):
        theirs = QuantizedTensor.from_float(tensors[f"{name}.weight"], layout, **options)
        assert torch.allclose(theirs._params.scale, written[f"{name}.weight_scale"], rtol=1e-5, atol=0)
        apart = (theirs._qdata.float() - written[f"{name}.weight"].float()).abs()
        assert apart.max() <= (most or (32 if kind == "fp8" else 1)) and apart.count_nonzero() < apart.numel() / 100


def test_groups_that_divide_the_rows(tmp_path: Path) -> None:
    widths = {"a": 512, "b": 192, "c": 48, "d": 20, "e": 30}
    save_file(
        blocks({f"{name}.weight": normal(3, k) for name, k in widths.items()}), source := tmp_path / "x.safetensors"
    )
    quantise(source, path := tmp_path / "y.safetensors", "int8_convrot")
    found = load_file(path)
    notes = [found.get(f"blocks.0.{name}.comfy_quant") for name in widths]
    groups = [note if note is None else json.loads(note.numpy().tobytes())["convrot_groupsize"] for note in notes]
    assert groups == [256, 64, 16, 4, None] == [rotation(k) for k in widths.values()]
    assert found["blocks.0.e.weight"].dtype is torch.float32


# ------------------------------------------------------------------------------------ little memory


@pytest.mark.parametrize("kind", ["q4_k_m", "int8_convrot", "fp8"])
def test_no_more_than_pieces_are_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    rows = 4 * PIECE // 512
    save_file(
        blocks({f"{x}.weight": normal(rows, 512) for x in "abcd"}) | {"x": normal(PIECE * 3)},
        source := tmp_path / "x.safetensors",
    )
    read, written, read_into, append = [], [], Checkpoint.read_into, UnfinishedFile.append
    monkeypatch.setattr(
        Checkpoint,
        "read_into",
        lambda self, extent, into, start=None: (read.append(into.nbytes), read_into(self, extent, into, start)),
    )
    monkeypatch.setattr(
        UnfinishedFile, "append", lambda self, name, piece: (written.append(piece.nbytes), append(self, name, piece))
    )
    quantise(source, tmp_path / ("y.gguf" if kind in GGUF else "y.safetensors"), kind)
    assert max(read) == PIECE * 4 and max(written) <= PIECE * 4 and sum(read) >= source.stat().st_size - 10_000


MEASURED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tools!r})
from bed import pack
pack.load()
from fusestream.checkpoints.quantise import quantise
quantise(Path(sys.argv[1]), Path(sys.argv[2]), "q8_0")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantise(Path(sys.argv[3]), Path(sys.argv[2]), "q8_0", force=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count in other units")
def test_a_large_file_takes_little_memory(tmp_path: Path) -> None:
    """256 MiB of zeros that take no room on the disk."""
    save_file(blocks({f"{x}.weight": normal(512, 512) for x in "abcd"}), small := tmp_path / "small.safetensors")
    large = tmp_path / "large.safetensors"
    header, at = {"blocks.0.self_attn.norm_q.weight": {"dtype": "F16", "shape": [8], "data_offsets": [0, 16]}}, 16
    for name in [f"blocks.{i}.{x}.weight" for i in range(2) for x in "abcd"]:
        header[name] = {"dtype": "F16", "shape": [4096, 4096], "data_offsets": [at, at + (32 << 20)]}
        at += 32 << 20
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with large.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    code = MEASURED.format(tools=str(ROOT / "tools"))
    command = [sys.executable, "-c", code, *map(str, (small, tmp_path / "out.gguf", large))]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.split()[-1])
    assert grown < 48 << 10, f"{grown >> 10} MiB"


# -------------------------------------------------------------------------------------- GGUF writer


def test_metadata_of_all_kinds(tmp_path: Path) -> None:
    values = {
        "text": "né", "none": "", "true": True, "number": 7, "half": 0.5, "bytes": b"\x00\xff", "texts": ["a", "", "é"],
        "numbers": [-1, 2], "fractions": [0.25, -1.0], "nothing": [],
    }  # fmt: skip
    tensors = {
        "a": ("F32", (3,)),
        "b": ("Q8_0", (2, 32)),
        "c": ("F16", ()),
        "d": ("I8", (2, 1, 3, 1, 2, 2)),
        "e": ("F32", (2, 0)),
    }
    data = {
        "a": torch.ones(3),
        "b": torch.arange(68, dtype=torch.uint8),
        "c": torch.tensor(2.0).half(),
        "d": torch.arange(24).to(torch.int8),
    }
    with GgufWriter(tmp_path / "x.gguf", tensors, values) as writer:
        for name in reversed(data):
            for piece in data[name].flatten().tensor_split(2):
                writer.append(name, piece)
        writer.append("e", torch.ones(2, 0))
    assert writer.nbytes == (tmp_path / "x.gguf").stat().st_size
    header, theirs = read_header(tmp_path / "x.gguf"), gguf.GGUFReader(tmp_path / "x.gguf")
    read = {
        name: list(one.texts if one.kind == 8 else one.numbers) if isinstance(one, Listed) else one
        for name, one in header.values.items()
    }
    shape = {"comfy.gguf.orig_shape.d": [2, 1, 3, 1, 2, 2]}
    assert read == {"general.alignment": 32, **values, "bytes": [0, 255], **shape}
    fields = {name: field.contents() for name, field in theirs.fields.items() if name in values and name != "nothing"}
    assert fields == {name: value for name, value in read.items() if name in fields} and len(fields) == 9
    with Checkpoint.open(tmp_path / "x.gguf") as source:
        for name, tensor in data.items():
            extent = source.extents[name]
            assert extent.shape == tensors[name][1] and extent.begin % 32 == 0
            assert torch.equal(source.read(extent), tensor.flatten().view(torch.uint8))


def test_what_gguf_cannot_hold(tmp_path: Path) -> None:
    for encoding, shape in (("BOOL", (2,)), ("Q4_K", (2, 128)), ("Q8_0", (64, 2))):
        with pytest.raises(NotWritten, match=f"GGUF cannot hold a, of type {encoding}"):
            GgufWriter(tmp_path / "x", {"a": (encoding, shape)}, {})
    for value in (-1, 2**32, [2**31]):
        with pytest.raises(NotWritten, match=r"x: GGUF cannot hold a number of its metadata, .*many"):
            GgufWriter(tmp_path / "x", {}, {"many": value})
    with (
        pytest.raises(ValueError, match="a has 8 bytes, and 12 were to be written"),
        GgufWriter(tmp_path / "x", {"a": ("F32", (2,))}, {}) as writer,
    ):
        writer.append("a", torch.ones(1))
        writer.append("a", torch.ones(2))
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------- refusals


def plain_file(folder: Path) -> Path:
    save_file(blocks({f"{x}.weight": normal(32, 256).half() for x in "abcd"}), path := folder / "plain.safetensors")
    return path


REFUSED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "fp8": (
        {"blocks.0.a.weight": torch.ones(32, 256).to(torch.float8_e4m3fn)},
        "is quantised already .*Take the model in fp16",
    ),
    "int8": ({"blocks.0.a.weight": torch.ones(32, 256, dtype=torch.int8)}, "is quantised already"),
    "note": ({"blocks.0.a.comfy_quant": torch.ones(9, dtype=torch.uint8)}, "is quantised already"),
    "marker": ({"scaled_fp8": torch.ones(2)}, "is quantised already"),
    "lora": ({"blocks.0.a.lora_up.weight": torch.ones(2, 2)}, "is a LoRA .*Quantise the model that it is for"),
    "several": (
        {"first_stage_model.decoder.x": torch.ones(2)},
        "holds several models .*Save its diffusion model by itself",
    ),
    "not a number": (
        {"blocks.0.a.weight": torch.full((32, 256), torch.nan)},
        r"blocks\.0\.a\.weight has numbers that are not finite",
    ),
    "too large": ({"blocks.0.a.weight": torch.full((32, 256), 1e6)}, "beyond fp16's range"),
}


@pytest.mark.parametrize("kind", ["q4_k", "int8_convrot", "int8"])
@pytest.mark.parametrize("what", REFUSED)
def test_files_that_are_not_to_be_quantised(tmp_path: Path, what: str, kind: str) -> None:
    tensors, message = REFUSED[what]
    plain = load(plain_file(tmp_path).read_bytes())  # mapped tensors would keep Windows from writing over their file
    save_file({**plain, **tensors}, source := tmp_path / "plain.safetensors")
    with pytest.raises(CannotQuantise, match=f"plain.safetensors: .*{message}"):
        quantise(source, tmp_path / ("y.gguf" if kind in GGUF else "y.safetensors"), kind)
    assert [one.name for one in tmp_path.iterdir()] == ["plain.safetensors"]


def test_other_refusals(tmp_path: Path) -> None:
    source = plain_file(tmp_path)
    out = tmp_path / "y.gguf"
    with pytest.raises(CannotQuantise, match=f"'q3' is no kind to quantise to; there are {', '.join(KINDS)}"):
        quantise(source, out, "q3")
    (tmp_path / "x.pt").write_bytes(source.read_bytes())
    with pytest.raises(CannotQuantise, match=r"x\.pt: is no safetensors file.*get the model as safetensors"):
        quantise(tmp_path / "x.pt", out, "q8_0")
    (tmp_path / "z.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(BadFile, match=r"z\.safetensors: is a zip or \.pt archive"):
        quantise(tmp_path / "z.safetensors", out, "q8_0")
    with pytest.raises(BadFile, match=r"n\.safetensors: cannot be read"):
        quantise(tmp_path / "n.safetensors", out, "q8_0")
    with pytest.raises(CannotQuantise, match=r"y\.gguf: int8 is written to files that end in \.safetensors or \.sft"):
        quantise(source, out, "int8")
    with pytest.raises(CannotQuantise, match=r"is the file that is read"):
        quantise(source, source, "int8", force=True)
    with pytest.raises(CannotQuantise, match="do not say their architecture"):
        quantise(source, tmp_path / "y.safetensors", "fp8", architecture="wan")
    with pytest.raises(NotWritten, match=r"y\.gguf: cannot be written \(.+\)\. Look at its disk"):
        quantise(source, tmp_path / "nowhere" / "y.gguf", "q8_0")
    save_file({"decoder.conv1.weight": torch.ones(4, 4)}, vae := tmp_path / "vae.safetensors")
    with pytest.raises(CannotQuantise, match="has no matrices in repeated blocks"):
        quantise(vae, out, "q8_0")
    save_file({**load_file(source), "mask": torch.ones(3, dtype=torch.bool)}, odd := tmp_path / "odd.safetensors")
    with pytest.raises(CannotQuantise, match="mask is of type BOOL, which a GGUF file cannot have"):
        quantise(odd, out, "q8_0")
    metadata = {"_quantization_metadata": "{}"}
    save_file(load_file(source), noted := tmp_path / "noted.safetensors", metadata)
    with pytest.raises(CannotQuantise, match="_quantization_metadata in its metadata"):
        quantise(noted, out, "q8_0")
    quantise(source, out, "q8_0")
    with pytest.raises(CannotQuantise, match=r"is a GGUF file\. Quantise the model's safetensors file"):
        quantise(out, tmp_path / "w.gguf", "q4_k")
    with pytest.raises(CannotQuantise, match=r"y\.gguf: is there already.*--force"):
        quantise(source, out, "q4_k")
    before = out.stat().st_size
    quantise(source, out, "q4_k", force=True)
    assert out.stat().st_size < before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
@pytest.mark.parametrize("kind", ["q4_k", "int8"])
def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    source, out = plain_file(tmp_path), tmp_path / ("y.gguf" if kind in GGUF else "y.safetensors")
    out.write_text("before")
    append, calls = UnfinishedFile.append, []

    def fails(self: Any, name: str, piece: torch.Tensor) -> None:
        calls.append(name)
        if len(calls) == 4:
            self._file.flush()
            self._file.close()
            self._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the writer closes it
        append(self, name, piece)

    monkeypatch.setattr(UnfinishedFile, "append", fails)
    with pytest.raises(
        NotWritten, match=rf"{out.name}: cannot be written \(No space left on device\)\. Look at its disk"
    ):
        quantise(source, out, kind, force=True)
    assert {one.name for one in tmp_path.iterdir()} == {source.name, out.name} and out.read_text() == "before"


def test_a_gguf_file_under_another_name(tmp_path: Path) -> None:
    """Its first bytes tell the format, and not its name."""
    tensors = [Tensor(f"blocks.{i}.{x}.weight", "Q8_0", (2, 32)) for i in range(2) for x in "abcd"]
    file_of(tmp_path / "x.safetensors", {"general.alignment": Typed("u32", 32)}, tensors)
    with pytest.raises(CannotQuantise, match=r"x\.safetensors: is a GGUF file"):
        quantise(tmp_path / "x.safetensors", tmp_path / "y.gguf", "q4_k")


# -------------------------------------------------------------------------------------- the command


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "checkpoints" / "quantise"), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.deep
def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = plain_file(tmp_path), tmp_path / "y.gguf"
    done = command(source, out, "--to", "q8_0")
    assert done.returncode == 0 and not done.stderr
    assert "blocks.1.d.weight [32, 256] F16 -> Q8_0" in done.stdout and "8 Q8_0" in done.stdout.splitlines()[-1]
    assert main([str(source), str(out), "--to", "q8_0"]) == 1
    assert capsys.readouterr().err.startswith(f"[fusestream] {out}: is there already")
    assert main([str(source), str(out), "--to", "q4_k", "--force", "--quiet"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert read_header(out).extents["blocks.0.a.weight"].dtype == "Q4_K"


def test_a_path_that_the_pipe_cannot_spell(tmp_path: Path) -> None:
    """Pipes of Windows have a page of 256 characters. The file is written whatever the words look like."""
    folder = tmp_path / "模型"
    folder.mkdir()
    source, out = plain_file(folder), folder / "y.gguf"
    line = [sys.executable, str(ROOT / "checkpoints" / "quantise"), str(source), str(out), "--to", "q8_0"]
    done = subprocess.run(line, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "cp1252"})
    assert done.returncode == 0 and not done.stderr
    assert rb"\u6a21\u578b" in done.stdout and out.exists()


def test_dev_py_hands_everything_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files as they are called from where the user is: the command itself runs in the repository."""
    spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
    assert spec is not None and spec.loader is not None
    dev: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(dev)
    calls: list[Any] = []
    monkeypatch.setattr(dev, "set_up", lambda options, with_browser: (None, None))
    monkeypatch.setattr(dev, "call", lambda bed, *line, env=None: calls.append(line) or 3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dev.py", "quantise", "a.safetensors", "b/c.gguf", "--to", "q8_0"])
    assert dev.main() == 3
    sys.argv += ["--force", "--architecture", "wan"]
    dev.main()
    line = ("checkpoints/quantise", str(tmp_path / "a.safetensors"), str(tmp_path / "b" / "c.gguf"), "--to", "q8_0")
    assert calls == [line, (*line, "--architecture", "wan", "--force")]


def test_an_encoder_without_gates_has_names_of_its_own() -> None:
    up = "encoder.block.3.layer.1.DenseReluDense.wi.weight"
    assert t5.renaming([up])(up) == "enc.blk.3.ffn_up.weight"
    gated = up.replace("wi.", "wi_1.")
    assert t5.renaming([gated.replace("wi_1", "wi_0"), gated])(gated) == "enc.blk.3.ffn_up.weight"

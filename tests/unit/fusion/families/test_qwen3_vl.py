"""Qwen3-VL over our ops, with the references on the CPU: what it makes of words and pictures beside stock's FP32, streamed or
not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.ldm.modules.attention
import comfy.ops
import comfy.sd
import pytest
import torch
from comfy.text_encoders.joyimage import Qwen3VL8B_JoyImage
from comfy.weight_adapter.lora import LoRAAdapter
from packed_files import packed_file
from safetensors.torch import load_file, save_file

from bed.depth import is_thorough
from fusestream import checkpoints, fusion
from fusestream.checkpoints import text
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.base.family import Role
from fusestream.fusion.families import family_of
from fusestream.fusion.families.qwen3_vl import QWEN3_VL, layout, sizes
from fusestream.fusion.text import layer, stack
from fusestream.fusion.text.encoder import block as encoder_block
from fusestream.fusion.text.vision import patches, qwen3_vl, towers
from fusestream.kernels_cuda import LEDGER
from fusestream.memory import Checkpoint, Extent, WeightFile, read_header

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

NAME = "qwen3vl_8b"  # what stock takes every width but the 4B's for
ALLOWED = {"precise": 1e-3, "fast": 3e-3}
OFF = fusion.KernelPolicy.of("off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3_vl")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is loaded is fused for the CPU too."""
    for module in (stack, towers):
        monkeypatch.setattr(module, "fuse", _on_cpu(module.fuse))
    LEDGER.clear()
    yield
    assert not [one for one in LEDGER.refusals if one.op == "text encoder"], "nothing is handed back unnoticed"


def _on_cpu(fuse: Any) -> Any:
    return lambda model, policy, **_: fuse(model, policy, on_cpu=True)


def picture(height: int = 64, width: int = 96, seed: int = 0) -> dict[str, Any]:
    drawn = torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(seed))
    return {"type": "image", "data": drawn, "original_type": "image"}


def said(*parts: Any) -> dict[str, Any]:
    return {NAME: [[(part, 1.0) for part in parts]]}


PROMPTS = {
    "words": said(5, 7, 9, 200, 7),
    "picture": said(5, picture(), 9, 11),
    "pictures": said(picture(64, 64), 5, 9, picture(96, 32, 1), 7, picture(33, 70, 2), 3),
}


def load(path: Path, budget: float = -1.0, **policy: Any) -> Any:
    return fusion.load_text_encoder(str(path), [], fusion.KernelPolicy.of(**policy), budget)


def stocks(path: Path) -> Any:
    return comfy.sd.load_clip(
        [str(path)], clip_type=comfy.sd.CLIPType.QWEN_IMAGE, model_options=dict(sizes.options(read_header(path)))
    )


def encode(clip: Any, prompt: str) -> torch.Tensor:
    encoding: torch.Tensor = clip.encode_from_tokens(PROMPTS[prompt])
    return encoding


def near(got: torch.Tensor, wanted: torch.Tensor, allowed: float) -> None:
    assert got.shape == wanted.shape and 0 < (got - wanted).norm() <= allowed * wanted.norm()


@pytest.mark.every_other
@pytest.mark.parametrize("precision", ALLOWED)
@pytest.mark.parametrize("storage", list(checkpoints.KINDS["qwen3_vl"].storages)[:: 1 if is_thorough() else 2])
def test_it_encodes_as_stocks(folder: Path, storage: str, precision: str) -> None:
    path = checkpoints.write("qwen3_vl", folder, storage)
    ours, stock = load(path, precision=precision), stocks(path)
    for prompt in PROMPTS:
        near(encode(ours, prompt), encode(stock, prompt), ALLOWED[precision])
    assert ours.patcher.stream.arrivals.family == "Qwen3-VL"


def test_long_prompts_and_large_pictures_pass_in_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.write("qwen3_vl", folder)
    monkeypatch.setattr(layer, "CHUNK", 8)
    monkeypatch.setattr(patches, "CHUNK", 12)
    for precision, allowed in ALLOWED.items():
        near(encode(load(path, precision=precision), "pictures"), encode(stocks(path), "pictures"), allowed)


def test_a_picture_becomes_patches_where_the_tower_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that stock makes of it on the CPU. How many there are stays with the host."""
    network = load(checkpoints.write("qwen3_vl", folder)).cond_stage_model.qwen3vl_8b.transformer
    given: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(qwen3_vl.FusedTower, "forward", lambda _, x, grid: given.append((x, grid)) or (x, [x]))
    cpu, other = torch.device("cpu"), torch.device("meta")
    for shape in ((64, 96), (70, 130), (20, 24)):
        given.clear()
        one = picture(*shape)
        found, wanted = network.preprocess_embed(one, cpu), qwen3_vl.stock.Qwen3VL.preprocess_embed(network, one, cpu)
        (x, grid), (stocks_x, stocks_grid) = given
        assert torch.equal(x, stocks_x) and torch.equal(grid, stocks_grid) and x.dtype is stocks_x.dtype
        assert torch.equal(found[0], wanted[0]) and found[1].keys() == wanted[1].keys()
    makes = patches.process_qwen2vl_images

    def on_the_device(images: torch.Tensor, **options: Any) -> Any:
        assert images.device == other
        rows, grid = makes(one["data"], **options)
        return rows.to(other), grid

    monkeypatch.setattr(patches, "process_qwen2vl_images", on_the_device)
    seen, more = network.preprocess_embed(one, other)
    assert seen.device == other and more["grid"].device == cpu and given[-1][1].device == cpu
    assert network.preprocess_embed({"type": "sound"}, cpu) == (None, None), "what is no picture is stock's"


def test_a_class_of_stocks_that_cuts_in_its_own_way_keeps_it() -> None:
    """JoyImage has pictures of 65536 pixels and more, resized by another rule."""
    network = torch.nn.Module()
    network.visual = qwen3_vl.stock.Qwen3VLVisionModel(
        {**qwen3_vl.stock.QWEN3VL_VISION_COMMON, "hidden_size": 64, "intermediate_size": 64, "depth": 1,
         "num_position_embeddings": 16, "deepstack_visual_indexes": [], "out_hidden_size": 8},
        dtype=torch.float16, ops=comfy.ops.manual_cast,
    )  # fmt: skip
    network.__class__ = Qwen3VL8B_JoyImage
    assert towers.fuse(network, fusion.KernelPolicy(), on_cpu=True) == 1
    given: list[list[int]] = []
    network.visual.forward = lambda x, grid: given.append(grid.tolist()) or (x, [])
    network.preprocess_embed(picture(64, 96), torch.device("cpu"))
    assert given == [[[1, 14, 20]]], "of 209 x 314, not of 64 x 96"


@pytest.mark.parametrize("op", QWEN3_VL.ops[:: 1 if is_thorough() else 3])
def test_each_op_can_be_switched_off(folder: Path, op: str) -> None:
    path = checkpoints.write("qwen3_vl", folder, "bf16")
    near(encode(load(path, **{op: "off"}), "picture"), encode(stocks(path), "picture"), 3e-3)


def test_heads_of_72_pass_as_96(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the 8B has them."""
    config = {"hidden_size": 16 * 72, "num_position_embeddings": 16, "intermediate_size": 64, "depth": 1}
    model = qwen3_vl.stock.Qwen3VLVisionModel(
        {
            **qwen3_vl.stock.QWEN3VL_VISION_COMMON, **config, "deepstack_visual_indexes": [], "out_hidden_size": 8,
        },
        dtype=torch.float16, ops=comfy.ops.manual_cast,
    ).requires_grad_(False)  # fmt: skip
    model.merger = torch.nn.Identity()
    block = model.blocks[0]
    for weight in block.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5)
    x = torch.randn(24, 16 * 72)
    angle = torch.rand(24, 36)
    cos, sin = angle.cos().repeat(1, 2)[:, None], angle.sin()[:, None]
    ends = torch.tensor([0, 16, 24])
    wanted = block(x, ends, (cos, sin, -sin), comfy.ldm.modules.attention.attention_pytorch)
    heads: list[int] = []
    attention = encoder_block.attention
    monkeypatch.setattr(
        encoder_block, "attention", lambda q, *rest, **more: heads.append(q.shape[-1]) or attention(q, *rest, **more)
    )
    towers.fuse(model, fusion.KernelPolicy())
    wide = encoder_block.Wide(fusion.KernelPolicy())
    got = block(x[None].clone(), encoder_block.Call(wide, cos=angle.cos(), sin=angle.sin(), groups=(16, 8)))
    near(got[0], wanted, ALLOWED["precise"])
    assert heads == [96, 96]


def lora_for(clip: Any) -> dict[str, LoRAAdapter]:
    """Of rank 2 for every matrix of the blocks, by stock's names."""
    found, generator = {}, torch.Generator().manual_seed(3)
    for key, value in clip.patcher.model_state_dict().items():
        if ("blocks" in key or "layers" in key) and key.endswith(".weight") and value.ndim == 2:
            up = torch.randn(value.shape[0], 2, generator=generator) * 0.1
            down = torch.randn(2, value.shape[1], generator=generator) * value.shape[1] ** -0.5
            found[key] = LoRAAdapter(set(), (up, down, 2.0, None, None, None))
    return found


@pytest.mark.parametrize("storage", ["fp16", "fp8_scaled"])
def test_loras(folder: Path, storage: str) -> None:
    path = checkpoints.write("qwen3_vl", folder, storage)
    ours, stock = load(path), stocks(path)
    before, patches = encode(stock, "picture"), lora_for(stock)
    for clip in (ours, stock):
        assert len(clip.add_patches(patches, 0.7)) == len(patches)
    wanted = encode(stock, "picture")
    near(encode(ours, "picture"), wanted, ALLOWED["fast"])
    assert (wanted - before).norm() > 0.05 * before.norm()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_gguf_files_with_stocks_names(folder: Path, tmp_path: Path, kind: str) -> None:
    tensors = load_file(checkpoints.write("qwen3_vl", folder))
    path = packed_file(tmp_path / "x.gguf", tensors, kind)
    ours, stock = load(path), fusion.load_text_encoder(str(path), [], OFF, -1.0)
    near(encode(ours, "picture"), encode(stock, "picture"), ALLOWED["fast"])


def test_which_files_are_qwen3_vls(folder: Path) -> None:
    for kind, known in (("qwen3_vl", True), ("qwen3", False), ("clip_l", False)):
        with Checkpoint.open(checkpoints.write(kind, folder)) as source:
            assert (family_of(source.files[0]) is QWEN3_VL) == known


def test_a_file_that_is_not_whole_is_told_from_its_header(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoints.write("qwen3_vl", folder))
    for name in ("model.visual.blocks.2.attn.qkv.bias", "model.language_model.layers.3.mlp.down_proj.weight"):
        save_file({key: one for key, one in tensors.items() if key != name}, path := tmp_path / "x.safetensors")
        with pytest.raises(WrongFile, match=rf"lacks 1 of the model's weights: {name}"):
            fusion.inspect_file(str(path), Role.TEXT)
    with pytest.raises(WrongFile, match=r"is a Qwen3-VL text encoder: choose it in the FuseStream Text Encoder Loader"):
        fusion.inspect_file(str(checkpoints.write("qwen3_vl", folder)), Role.DIFFUSION)


def test_the_2b_is_stocks_class_with_its_sizes() -> None:
    """Published: the 4B's vision tower before a language model of its own."""
    published = text.Qwen3VLSize(
        language=replace(text.QWEN3_VL.language, width=2048, ffn=6144, heads=16, key_heads=8, layers=28, vocabulary=151936),
        vision=1024, ffn=4096, blocks=24, told=3, places=2304,
    )  # fmt: skip
    shapes = {name: spec.shape for name, spec in text.qwen3_vl(published).items()}
    extents = {name: Extent(name, "F16", shape, 0, 0) for name, shape in shapes.items()}
    header = WeightFile(Path("x"), 0, extents, {})
    assert family_of(header) is QWEN3_VL and set(QWEN3_VL.expects(header).tensors) <= shapes.keys()  # type: ignore[misc]
    assert QWEN3_VL.kind is not None and QWEN3_VL.kind(header) == "QWEN_IMAGE"
    sized = layout.sizes(header)
    with torch.device("meta"):
        model = sizes.Sized({}, torch.float16, "meta", comfy.ops.manual_cast, sizes=sized)
    rename = {"model.language_model.": "model.", "model.visual.": "visual."}
    named = {
        next((n + name[len(o) :] for o, n in rename.items() if name.startswith(o)), name): s
        for name, s in shapes.items()
    }
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == named
    four = qwen3_vl.stock.QWEN3VL_VISION["qwen3vl_4b"]
    assert {name: sizes.vision_config(sized)[name] for name in four} == four

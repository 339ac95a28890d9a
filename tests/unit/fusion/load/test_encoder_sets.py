"""Text encoders in files of their own as one CLIP: which files are one, what is refused and by which name, and what a CLIP of
them is to other nodes. Their encodings are compared in `contract/test_encoders.py`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import comfy.ldm.hunyuan3d.vae
import comfy.sd
import comfy.sdxl_clip
import comfy.utils
import pytest
import torch
from comfy_extras import nodes_model_merging
from files_in_use import tensors_of, write_over
from packed_files import packed_file, unpacked
from safetensors.torch import load_file, save, save_file

import nodes
from fusestream import checkpoints, fusion
from fusestream.checkpoints import narrow, spellings
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.base.family import Role
from fusestream.fusion.base.hooks import HEAD
from fusestream.fusion.families.clip import encoder as clip_encoder
from fusestream.fusion.identify import encoder_sets
from fusestream.fusion.identify.checkpoint_info import CheckpointInfo
from fusestream.fusion.load.missing import encoder_from, require_whole
from fusestream.fusion.load.text import load_streamed_text_encoder
from fusestream.fusion.text import stack
from fusestream.memory import BadFile, FileChanged, read_header
from fusestream.memory.open_file import OpenFile

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "tokenizers")

FOX = "a red (fox:1.2) runs through the snow"
SHORT = {"t5xxl_min_length": 24}
OFF = fusion.KernelPolicy.of("off")
BUDGETS = pytest.mark.parametrize("budget", [0.0, -1.0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sets")


def written(folder: Path, *kinds: str) -> list[Path]:
    return [checkpoints.write(kind, folder) for kind in kinds]


def loaded(paths: list[Path], kind: str = "flux", budget: float = -1.0, sizes: list[Path] | None = None) -> Any:
    """A CLIP of these files. sizes: files to take the encoders' sizes from, where they cannot be asked."""
    first, *further = map(str, paths)
    options = checkpoints.model_options(*(paths if sizes is None else sizes))
    return fusion.load_text_encoder(first, [], OFF, budget, kind, options=options, further=further)


def encode(clip: Any) -> list[torch.Tensor]:
    tokens = clip.tokenize(FOX, tokenizer_options=SHORT)
    found: list[torch.Tensor] = list(clip.encode_from_tokens(tokens, return_pooled=True))
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------------------------------------------------- types


def test_every_type_of_stocks_loader_for_two_files_has_its_files() -> None:
    """Where ComfyUI gets a type, it needs an entry here."""
    single, dual = (one.INPUT_TYPES()["required"]["type"][0] for one in (nodes.CLIPLoader, nodes.DualCLIPLoader))
    assert {kind for types in encoder_sets.SETS.values() for kind in types} == set(dual)
    assert set(encoder_sets.NEVER_ALONE) == set(dual) - set(single)


@BUDGETS
@pytest.mark.parametrize(
    ("kinds", "type_", "told"),
    [
        (
            ("clip_l", "t5xxl"),
            "auto",
            r"clip_l\S+ \(CLIP-L\) and \S+t5xxl\S+ \(T5-XXL\) .* choose a type \(flux for Flux.1, sd3",
        ),
        (("clip_l", "clip_g"), "auto", r"choose a type \(sdxl for SDXL, sd3 for SD 3\)"),
        (("clip_l", "clip_g"), "flux", r"type flux takes CLIP-L with T5-XXL. For these choose sdxl for SDXL, sd3"),
        (("clip_l", "t5xxl"), "wan", r"type wan is of a single file. For these choose flux for Flux.1"),
        (
            ("t5xxl", "gemma2"),
            "flux",
            r"makes no text encoder of .*T5-XXL\) and \S+gemma2\S+ \(GEMMA_2_2B\) together. It knows CLIP-L",
        ),
        (("clip_l",), "flux", r"clip_l\S+: type flux takes CLIP-L with T5-XXL. Choose the other files as well"),
    ],
)
def test_files_that_are_no_set_of_the_type_are_refused(
    folder: Path, kinds: tuple[str, ...], type_: str, told: str, budget: float
) -> None:
    paths = written(folder, *kinds)
    with pytest.raises(WrongFile, match=told):
        loaded(paths, type_, budget, written(folder, "clip_l"))
    if len(kinds) > 1:
        with pytest.raises(WrongFile, match=told):
            fusion.inspect_text_encoders([str(path) for path in paths], type_, ())


@BUDGETS
def test_a_file_that_is_given_twice_is_refused(folder: Path, budget: float) -> None:
    path = written(folder, "clip_l")[0]
    again = path.parent / ".." / path.parent.name / path.name
    with pytest.raises(WrongFile, match=r"clip_l\S+ is given twice"):
        loaded([path, again], budget=budget)
    copy = folder / "copy.safetensors"
    shutil.copy(path, copy)
    with pytest.raises(WrongFile, match=r"makes no text encoder of \S+ \(CLIP-L\) and \S+copy.safetensors \(CLIP-L\)"):
        loaded([path, copy], budget=budget)


# --------------------------------------------------------------------------------------------------------------- faults


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def without(*names: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        save_file({name: tensor for name, tensor in tensors_of(path).items() if name not in names}, path)

    return change


def narrower(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = tensors_of(path)
        save_file({**tensors, name: tensors[name][:-1].contiguous()}, path)

    return change


T5_END = "encoder.final_layer_norm.weight"  # whose type is the encoder's
T5_LAST, CLIP_LAST = "encoder.block.23.layer.1.layer_norm.weight", "text_model.final_layer_norm.weight"


@BUDGETS
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("t5xxl", cut, "is cut short"),
        ("clip_l", cut, "is cut short"),
        ("t5xxl", without(T5_LAST), rf"lacks 1 of the model's weights: {T5_LAST}"),
        ("clip_l", without(CLIP_LAST), rf"lacks 1 of the model's weights: \S*{CLIP_LAST}"),
        ("t5xxl", narrower(T5_LAST), rf"does not fit together: {T5_LAST} has the shape \[15\], the model needs \[16\]"),
        ("clip_l", narrower(CLIP_LAST), rf"does not fit together: {CLIP_LAST} has the shape \[63\], the model needs \[64\]"),
        ("wan_vae", None, "is a Wan VAE: choose it in the FuseStream VAE Loader"),
        ("wan_t2v", None, "is a Wan diffusion model: choose it in the FuseStream Diffusion Model Loader"),
        ("lora_text", None, "is a LoRA"),
    ],
)  # fmt: skip
def test_a_fault_is_said_of_the_file_that_has_it(
    folder: Path, tmp_path: Path, kind: str, change: Callable[[Path], None] | None, told: str, at: int, budget: float
) -> None:
    other = "clip_l" if kind != "clip_l" else "t5xxl"
    sound, source = written(folder, other, kind)
    bad = tmp_path / "bad.safetensors"
    shutil.copy(source, bad)
    if change is not None:
        change(bad)
    paths = [bad, sound] if at == 0 else [sound, bad]
    with pytest.raises((WrongFile, BadFile), match=rf"^\S*bad\.safetensors:? {told}"):
        loaded(paths, budget=budget, sizes=written(folder, "clip_l", "t5xxl"))


@BUDGETS
@pytest.mark.parametrize(
    ("kind", "told"), [("wan", "Wan reads another encoder: choose UMT5-XXL"), ("auto", "For Wan choose UMT5-XXL")]
)
def test_t5_in_a_graph_of_wan_is_named(folder: Path, kind: str, told: str, budget: float) -> None:
    """Its vocabulary is another one: it would be called damaged."""
    (t5,) = written(folder, "t5xxl")
    with pytest.raises(WrongFile, match=rf"{t5.name} .*{told}"):
        fusion.load_text_encoder(str(t5), [], OFF, budget, kind)


def test_a_weight_that_only_the_larger_of_two_alike_has_is_missed() -> None:
    """CLIP-L's layers have the names of CLIP-G's first twelve."""
    model = comfy.sdxl_clip.SDXLClipModel(device="meta")
    small, large = model.clip_l.transformer, model.clip_g.transformer
    of_small, of_large = set(small.state_dict()), set(large.state_dict())
    assert of_small < of_large
    lost = "text_model.encoder.layers.20.mlp.fc1.bias"
    for names, net in ((of_small, small), (of_large, large), (of_large - {lost}, large)):
        assert encoder_from(model, names) is net
    with pytest.raises(WrongFile, match=f"clip_g lacks 1 of the model's weights: {lost}"):
        require_whole("clip_g", of_large - {lost}, encoder_from(model, of_large - {lost}))


# ------------------------------------------------------------------------------------------------------- other formats


@pytest.mark.parametrize("kind", ["t5xxl", "clip_g", "qwen25_vl"])
def test_a_file_that_only_stock_reads_is_asked_for_its_type_as_any_other(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    """It has no header, so its tensors are looked at when they are in memory. Nothing says that it is for Wan."""
    (path,) = written(folder, kind)
    old = tmp_path / "model.bin"
    torch.save(load_file(path), old)
    with pytest.raises(WrongFile, match=r"model\.bin serves several models, .* choose a type"):
        fusion.load_text_encoder(str(old), [], OFF)


def test_a_file_that_only_stock_reads_is_loaded_with_the_others(folder: Path, tmp_path: Path) -> None:
    clip, t5 = written(folder, "clip_l", "t5xxl")
    old = tmp_path / "clip_l.pt"
    torch.save(load_file(clip), old)
    for budget in (0.0, -1.0):
        found = loaded([old, t5], budget=budget, sizes=[clip, t5])
        assert not hasattr(found.patcher, "stream")
        assert same(encode(found), encode(loaded([clip, t5])))
    with pytest.raises(WrongFile, match=r"only \.safetensors and \.gguf files can be streamed"):
        loaded([old, t5], budget=1.0, sizes=[clip, t5])


@BUDGETS
def test_a_whole_clip_is_taken_for_its_text_encoder(
    folder: Path, tmp_path: Path, budget: float, caplog: pytest.LogCaptureFixture
) -> None:
    """As CLIP's authors publish it, with the vision tower: stock's loaders take it for its half of Flux.1 or SDXL."""
    clip, seen = written(folder, "clip_l", "clip_vision")
    whole = tmp_path / "clip-vit-large-patch14.safetensors"
    save_file({**load_file(seen), **load_file(clip), "logit_scale": torch.ones(())}, whole)
    found = loaded([whole], "stable_diffusion", budget, sizes=[clip])
    assert not caplog.records
    assert same(encode(found), encode(loaded([clip], "stable_diffusion", budget)))
    fusion.inspect_file(str(whole), Role.TEXT)
    with pytest.raises(WrongFile, match="Load CLIP Vision"):
        fusion.inspect_file(str(seen), Role.TEXT)


@BUDGETS
@pytest.mark.parametrize("sees", [False, True])
def test_an_encoder_in_openclips_spelling_is_known_as_stock_knows_it(
    folder: Path, tmp_path: Path, budget: float, sees: bool
) -> None:
    """OpenCLIP's own file has the vision tower, too."""
    (clip,) = written(folder, "clip_g")
    path = tmp_path / "open_clip.safetensors"
    tower = {"visual.class_embedding": torch.ones(8)} if sees else {}
    save_file({**spellings.open_clip(load_file(clip)), **tower}, path)
    with pytest.raises(WrongFile, match="serves several models"):
        loaded([path], "auto", budget, sizes=[clip])
    found = loaded([path], "stable_diffusion", budget, sizes=[clip])
    assert same(encode(found), encode(loaded([clip], "stable_diffusion", budget)))


def test_hunyuan3ds_vae_whose_blocks_have_openclips_names_is_no_text_encoder() -> None:
    with torch.device("meta"):
        net = comfy.ldm.hunyuan3d.vae.ShapeVAE()
    assert "transformer.resblocks.0.ln_1.weight" in net.state_dict()
    CheckpointInfo.of_tensors(net.state_dict()).require_role(Role.VAE)


def test_a_gguf_file_streams_beside_another(tmp_path: Path) -> None:
    size = checkpoints.text.Umt5Size(width=32, vocabulary=32128)
    plain = {
        name: torch.randn(spec.shape, generator=torch.Generator().manual_seed(i)) * 0.1
        for i, (name, spec) in enumerate(checkpoints.text.t5xxl(size).items())
    }
    plain = {name: tensor.abs() + 0.5 if tensor.ndim == 1 else tensor for name, tensor in plain.items()}
    packed, twin = (
        packed_file(tmp_path / "t5.gguf", plain, "Q8_0", kinds={T5_END: "F32"}),
        tmp_path / "twin.safetensors",
    )
    save_file(unpacked(packed), twin)
    clip = checkpoints.write("clip_l", tmp_path)
    found = loaded([clip, packed], sizes=[clip, twin])
    assert same(encode(found), encode(loaded([clip, twin])))
    kinds = {
        (weight.extent.part, weight.extent.dtype) for layer in found.patcher.stream.layers for weight in layer.weights
    }
    assert (1, "Q8_0") in kinds
    with pytest.raises(WrongFile, match=r"t5\.gguf is a GGUF file, which ComfyUI does not read by itself"):
        loaded([clip, packed], budget=0.0, sizes=[clip, twin])


# ---------------------------------------------------------------------------------------------------------------- LTX-2


@pytest.fixture(scope="module")
def ltx(folder: Path) -> list[Path]:
    """Gemma 3, and the projection in the checkpoint of the diffusion model."""
    gemma, projection, model = written(folder, "gemma3", "ltx23_text_projection", "ltx23")
    whole = {f"model.diffusion_model.{name}": tensor for name, tensor in load_file(model).items()}
    note = {"model.diffusion_model.transformer_blocks.0.attn1.to_q.comfy_quant": torch.zeros(9, dtype=torch.uint8)}
    path = folder / "ltx23_whole.safetensors"
    save_file({**whole, **load_file(projection), **note}, path)
    return [gemma, path]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Path, int]]:
    """The files and places where bytes were read."""
    found: set[tuple[Path, int]] = set()
    stock = OpenFile.read_into

    def noted(self: OpenFile, target: memoryview, begin: int) -> None:
        found.update((self.path, at) for at in range(begin, begin + len(target), 64))
        stock(self, target, begin)

    monkeypatch.setattr(OpenFile, "read_into", noted)
    monkeypatch.setattr(OpenFile, "view", None)
    return found


@BUDGETS
def test_of_a_checkpoint_the_projection_alone_is_read(
    ltx: list[Path], folder: Path, read: set[tuple[Path, int]], monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    gemma, whole = ltx
    stocks = comfy.utils.load_torch_file
    monkeypatch.setattr(
        comfy.utils, "load_torch_file", lambda path, **how: stocks(path, **how) if path == str(gemma) else 1 / 0
    )
    with narrow.opened(comfy):
        clip = loaded([gemma, whole], "auto", budget, sizes=[gemma])
        plain = loaded([gemma, written(folder, "ltx23_text_projection")[0]], "ltxv", sizes=[gemma])
    for one in (clip, plain):
        one.tokenizer.gemma3_12b.min_length = 24
    tokens = clip.tokenize(FOX)
    assert torch.equal(clip.encode_from_tokens(tokens), plain.encode_from_tokens(tokens))
    ours = {
        name: one for name, one in read_header(whole).extents.items() if name.startswith("text_embedding_projection.")
    }
    places = {at for path, at in read if path == whole}
    assert places and all(any(one.begin <= at < one.end for one in ours.values()) for at in places)


@BUDGETS
def test_the_order_of_the_files_does_not_matter(ltx: list[Path], budget: float) -> None:
    with narrow.opened(comfy):
        one, other = (loaded(paths, "auto", budget, sizes=ltx[:1]) for paths in (ltx, ltx[::-1]))
    for clip in (one, other):
        clip.tokenizer.gemma3_12b.min_length = 24
    tokens = one.tokenize(FOX)
    assert torch.equal(one.encode_from_tokens(tokens), other.encode_from_tokens(tokens))


@BUDGETS
def test_a_projection_lacks_nothing_and_is_not_alone(ltx: list[Path], tmp_path: Path, budget: float) -> None:
    bad = tmp_path / "bad.safetensors"
    shutil.copy(ltx[1], bad)
    without("text_embedding_projection.video_aggregate_embed.bias")(bad)
    with (
        narrow.opened(comfy),
        pytest.raises(WrongFile, match=r"^\S*bad\.safetensors lacks .*video_aggregate_embed\.bias"),
    ):
        loaded([ltx[0], bad], "ltxv", budget, sizes=ltx[:1])
    alone = checkpoints.write("ltx23_text_projection", tmp_path)
    with pytest.raises(WrongFile, match=r"has LTX's projection, and no text encoder: choose it as the second file"):
        fusion.load_text_encoder(str(alone), [], OFF, budget)
    with pytest.raises(WrongFile, match="makes no text encoder of"):
        loaded([checkpoints.write("clip_l", tmp_path), alone], "auto", budget, sizes=[])


# -------------------------------------------------------------------------------------------------- blocks of several


@pytest.mark.parametrize("kinds", [("clip_l", "llama3"), ("llama3", "clip_l")])
def test_what_no_encoding_calls_is_told_within_its_file(
    folder: Path, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HunyuanVideo reads Llama's third last layer; the two behind it come once they are called."""
    for module in (stack, clip_encoder):
        monkeypatch.setattr(module, "fuse", partial(module.fuse, on_cpu=True))
    paths = written(folder, *kinds)
    first, *further = map(str, paths)
    options = checkpoints.model_options(*paths)
    clip = load_streamed_text_encoder(first, [], kind="hunyuan_video", further=further, options=options)
    stream = clip.patcher.stream
    names = [block.name for block in stream.blocks]
    idle = [name for i, name in enumerate(names) if i not in stream.order.paged and not name.endswith("embed_tokens")]
    count = sum(name.startswith("llama.transformer.model.layers.") for name in names)
    assert count > 2 and sum(name.startswith("clip_l.") for name in names) == 4
    assert idle == [f"llama.transformer.model.layers.{i}" for i in (count - 2, count - 1)]


def test_one_of_several_writes(folder: Path, ltx: list[Path]) -> None:
    given = {"do_sample": False, "max_length": 5}
    said = []
    with narrow.opened(comfy):
        for budget in (-1.0, 0.0):
            clip = loaded(ltx, "ltxv", budget, sizes=ltx[:1])
            clip.tokenizer.gemma3_12b.min_length = 24
            said.append(clip.generate(clip.tokenize("a fox"), **given))
            if budget:
                assert [network for network, _ in heads_of(clip)] == [clip.cond_stage_model.gemma3_12b.transformer]
    assert said[0] == said[1] and len(said[0]) > 0


def heads_of(clip: Any) -> list[tuple[Any, int]]:
    return [(module, module.__dict__[HEAD][1]) for module in clip.cond_stage_model.modules() if HEAD in module.__dict__]


# --------------------------------------------------------------------------------------------------- what others do


@BUDGETS
def test_it_is_loaded_again_from_all_its_files(folder: Path, budget: float) -> None:
    paths = written(folder, "clip_l", "t5xxl")
    clip = loaded(paths, budget=budget)
    function, given = clip.patcher.cached_patcher_init
    assert given[0] == str(paths[0])
    again = function(*given, disable_dynamic=True)
    one, other = (found.model.state_dict() for found in (again, clip.patcher))
    assert one.keys() == other.keys() and type(again.model).__name__ == type(clip.patcher.model).__name__
    names = [name for name in one if not one[name].is_meta]
    assert names and all(torch.equal(one[name], other[name]) for name in names)


def test_stocks_node_saves_each_encoder(folder: Path, output: Path) -> None:
    paths = written(folder, "clip_l", "t5xxl")
    found = []
    for name, clip in (("ours", loaded(paths)), ("stocks", loaded(paths, budget=0.0))):
        nodes_model_merging.CLIPSave().save(clip, name)
        found.append({path.name.removeprefix(name): load_file(path) for path in output.glob(f"{name}*.safetensors")})
    ours, stocks = found
    assert len(ours) == 2 and ours.keys() == stocks.keys()
    for file, tensors in stocks.items():
        assert ours[file].keys() == tensors.keys()
        assert all(torch.equal(ours[file][name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("at", [0, 1])
def test_a_file_that_changes_is_told_by_its_name(folder: Path, tmp_path: Path, at: int) -> None:
    paths = [Path(shutil.copy(path, tmp_path / path.name)) for path in written(folder, "clip_l", "t5xxl")]
    first, *further = map(str, paths)
    clip = load_streamed_text_encoder(
        first, [], kind="flux", further=further, options=checkpoints.model_options(*paths)
    )
    residency = clip.patcher.stream.residency
    residency.ceiling = residency.least
    wanted = encode(clip)
    os.utime(paths[at])
    assert same(encode(clip), wanted), "it is the same to the byte"
    write_over(paths[at], save({name: tensor + 1 for name, tensor in tensors_of(paths[at]).items()}))
    with pytest.raises(FileChanged, match=paths[at].name):
        encode(clip)


def test_a_file_closes_with_the_encoder(folder: Path) -> None:
    clip = loaded(written(folder, "clip_l", "t5xxl"))
    source = clip.patcher.stream.residency.source
    clip.patcher.stream.close()
    for member in source.members:
        with pytest.raises(ValueError, match="is closed"):
            member.check()

"""Files that are sound as files and do not hold the whole of a model: named, with what lacks, before anything is loaded."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import comfy.text_encoders.ace
import comfy.text_encoders.aura_t5
import comfy.text_encoders.cosmos
import comfy.text_encoders.genmo
import comfy.text_encoders.hunyuan_image
import comfy.text_encoders.hydit
import comfy.text_encoders.sa_t5
import comfy.text_encoders.wan
import pytest
import torch
from safetensors.torch import load_file, save_file

from fusestream import checkpoints, fusion
from fusestream.checkpoints import pictures, vaes, wan
from fusestream.fusion.base import notices
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.base.family import Role
from fusestream.fusion.families import family_of
from fusestream.fusion.files import quant_metadata
from fusestream.fusion.files.completeness import refuse_gaps, require
from fusestream.fusion.identify.checkpoint_info import CheckpointInfo, header_of
from fusestream.memory import Extent, WeightFile, read_header

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")

_numbers = itertools.count()
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], None]
ROLES = {"diffusion_models": Role.DIFFUSION, "text_encoders": Role.TEXT, "vae": Role.VAE}
BLOCK = "encoder.block"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("incomplete")


def without(*starts: str) -> Change:
    """A file that lacks all tensors whose names begin so."""

    def change(tensors: Tensors) -> None:
        gone = [name for name in tensors if name.startswith(starts)]
        assert gone
        for name in gone:
            del tensors[name]

    return change


def misshapen(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=tensors[name].dtype)})


def written(
    folder: Path, kind: str, change: Change, storage: str = "fp16", metadata: Mapping[str, str] | None = None
) -> str:
    """A tiny file, changed."""
    source = checkpoints.write(kind, folder, storage)
    tensors = load_file(source)
    change(tensors)
    path = folder / f"{kind}-changed-{next(_numbers)}.safetensors"  # the last one may still be mapped
    save_file(tensors, path, metadata=dict(read_header(source).metadata) | dict(metadata or {}))
    return str(path)


def loaders(kind: str) -> list[Callable[[str], Any]]:
    """Whoever opens a file of this kind: the nodes before they queue a graph, stock's way, streaming."""
    role = ROLES[checkpoints.KINDS[kind].folder]
    looks: list[Callable[[str], Any]] = [lambda path: fusion.inspect_file(path, role)]
    if role is Role.VAE:
        return [*looks, fusion.load_vae]
    if role is Role.TEXT:
        return [
            *looks,
            *(lambda path, gib=gib: fusion.load_text_encoder(path, [], vram_budget=gib) for gib in (0.0, 0.5)),
        ]
    return [*looks, *(lambda path, gib=gib: fusion.load_diffusion_model(path, vram_budget=gib) for gib in (0.0, 0.5))]


def refusals(folder: Path, kind: str, change: Change, **given: Any) -> set[str]:
    """What each of them says to such a file; its name goes without saying further on."""
    path = written(folder, kind, change, **given)
    found = set()
    for load in loaders(kind):
        with pytest.raises(WrongFile) as caught:
            load(path)
        assert str(caught.value).startswith(path)
        found.add(str(caught.value).removeprefix(path))
    return found


# What lacks, and what is said of it.
LACKING = {
    "a block": ("wan_t2v", without("blocks.1."), " lacks blocks.1: its numbers go on to blocks.3."),
    "the first block": ("wan_t2v", without("blocks.0."), " lacks blocks.0: its numbers go on to blocks.3."),
    "two blocks": ("wan_t2v", without("blocks.1.", "blocks.2."), " lacks blocks.1 to 2: its numbers go on to blocks.3."),
    "a part of the last block": ("wan_t2v", without("blocks.3.ffn"), " lacks 4 of the model's weights: blocks.3."),
    "the head": ("wan_t2v", without("head.head.weight"), " lacks 1 of the model's weights: head.head.weight."),
    "the head's modulation": ("wan_t2v", without("head.modulation"), " lacks 1 of the model's weights: head.modulation."),
    "the patches' embedding": ("wan_t2v", without("patch_embedding.weight"), ": patch_embedding.weight."),
    "the first VACE block": ("wan_vace", without("vace_blocks.0."), " lacks 31 of the model's weights: vace_blocks.0."),
    "all VACE blocks": ("wan_vace", without("vace_blocks."), " lacks 31 of the model's weights: vace_blocks.0."),
    "VACE's embedding": ("wan_vace", without("vace_patch_embedding."), ": vace_patch_embedding.bias, vace_patch_embedding.weight."),
    "a picture's embedding": ("wan_i2v", without("img_emb."), " lacks 8 of the model's weights: img_emb.proj.0.bias"),
    "a picture's keys": ("wan_i2v", without("blocks.2.cross_attn.k_img"), ": blocks.2.cross_attn.k_img.bias"),
    "a VAE's head": ("wan_vae", without("decoder.head.2.weight"), ": decoder.head.2.weight."),
    "a VAE's landmark": ("wan_vae", without("decoder.head.0.gamma"), ": decoder.head.0.gamma."),
    "a VAE's first layer": ("wan_vae", without("encoder.conv1"), ": encoder.conv1.bias, encoder.conv1.weight."),
    "a VAE's layer": ("wan22_vae", without("decoder.upsamples.2.upsamples.1."), " lacks 6 of the model's weights: decoder."),
    "a VAE's stage": ("wan22_vae", without("decoder.upsamples.0."), " lacks 22 of the model's weights: decoder."),
    "an encoder's block": ("umt5", without(f"{BLOCK}.7."), f" lacks {BLOCK}.7: its numbers go on to {BLOCK}.23."),
    "an encoder's first block": ("umt5", without(f"{BLOCK}.0."), f" lacks {BLOCK}.0: its numbers go on to {BLOCK}.23."),
    "an encoder's last block": ("umt5", without(f"{BLOCK}.23."), f" lacks 10 of the model's weights: {BLOCK}.23."),
    "an encoder's bias": ("umt5", without(f"{BLOCK}.1.layer.0.SelfAttention.rel"), f": {BLOCK}.1.layer.0.SelfAttention.relative"),
    "an encoder's table": ("umt5", without("shared."), ": shared.weight."),
    "an encoder's last norm": ("umt5", without("encoder.final"), ": encoder.final_layer_norm.weight."),
    "a T5's block": ("t5xxl", without(f"{BLOCK}.3."), f" lacks {BLOCK}.3: its numbers go on to {BLOCK}.23."),
    "a block of what no family knows": ("sd3", without("joint_blocks.1."), " lacks joint_blocks.1: its numbers go on to"),
    "a Flux's block": ("flux1", without("double_blocks.1."), " lacks double_blocks.1: its numbers go on to"),
    "a part of a Flux's block": ("flux2", without("single_blocks.2.linear2"), ": single_blocks.2.linear2.weight."),
    "a Chroma's norm": ("chroma", without("double_blocks.0.img_attn.norm.key_norm"), "_blocks.0.img_attn.norm.key_norm.scale."),
    "a Flux's way in": ("flux2", without("txt_in."), " lacks 1 of the model's weights: txt_in.weight."),
    "a part of a Z-Image's block": ("z_image", without("layers.3.feed_forward.w2"), ": layers.3.feed_forward.w2.weight."),
    "a Z-Image's bias": ("z_image", without("layers.1.adaLN_modulation.0.bias"), ": layers.1.adaLN_modulation.0.bias."),
    "a language model's": ("qwen3", without("model.layers.2."), " lacks model.layers.2: its numbers go on to"),
    "what stock asks for its size": ("sd3", without("x_embedder.proj.weight"), " lacks x_embedder.proj.weight, without"),
}  # fmt: skip


@pytest.mark.parametrize("what", LACKING)
def test_what_lacks_is_named_before_loading(folder: Path, what: str) -> None:
    kind, change, words = LACKING[what]
    if what == "what stock asks for its size":  # which shows as stock looks
        path = written(folder, kind, change)
        for load in loaders(kind)[1:]:
            with pytest.raises(WrongFile) as caught:
                load(path)
            assert f"{path}{words}" in str(caught.value)
        return
    (told,) = refusals(folder, kind, change)
    assert words in told and told.endswith("Download it again.")


def test_the_header_alone_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it costs nothing that the model is large."""
    path = written(folder, "wan_t2v", without("blocks.1."))
    monkeypatch.setattr("comfy.utils.load_torch_file", pytest.fail)
    monkeypatch.setattr("fusestream.memory.Checkpoint.read_into", pytest.fail)
    for load in loaders("wan_t2v"):
        with pytest.raises(WrongFile, match=r"lacks blocks\.1"):
            load(path)


def header(table: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> WeightFile:
    extents = {name: Extent(name, "F16", spec.shape, 0, 0) for name, spec in table.items()}
    return WeightFile(Path("model.safetensors"), 0, extents, metadata or {})


PUBLISHED = {
    "1.3B": wan.WanSize(1536, 8960, 30, 4096),
    "1.3B VACE": wan.WanSize(1536, 8960, 30, 4096, vace_layers=15),
    "14B I2V": wan.WanSize(5120, 13824, 40, 4096, 36, image=True),
    "14B VACE": wan.WanSize(5120, 13824, 40, 4096, vace_layers=8),
    "5B": wan.WanSize(3072, 14336, 30, 4096, 48, 48),
}


PICTURES = {
    "klein 4B": pictures.flux(pictures.FluxSize(3072, 5, 20, 7680, 128, shared=True)),
    "klein 9B": pictures.flux(pictures.FluxSize(4096, 8, 24, 12288, 128, shared=True)),
    "Flux.1": pictures.flux(pictures.FluxSize(3072, 19, 38, 4096, pooled=768, guidance=True)),
    "Z-Image": pictures.z_image(pictures.ZImageSize(3840, 30, 2560)),
}


def info_of(found: WeightFile) -> CheckpointInfo:
    return CheckpointInfo(found, family_of(found))


@pytest.mark.parametrize("name", [*PUBLISHED, *PICTURES])
def test_published_sizes_are_whole_and_beyond_doubt(name: str) -> None:
    found = header(wan.table(PUBLISHED[name]) if name in PUBLISHED else PICTURES[name])
    family = family_of(found)
    assert family is not None and family.expects is not None
    expected = family.expects(found)
    require(found, expected)
    assert not expected.doubts and not expected.faults


@pytest.mark.parametrize("kind", [name for name, one in checkpoints.KINDS.items() if one.folder in ROLES])
def test_tiny_files_of_all_families_are_whole(kind: str) -> None:
    entry = checkpoints.KINDS[kind]
    found = header(entry.table, entry.metadata)
    info_of(found).require_whole(ROLES[entry.folder])


@pytest.mark.parametrize(
    "kind", ["wan_t2v", "wan_i2v", "wan_vace", "wan22_5b", "umt5", "t5xxl", "wan_vae", "wan22_vae"]
)
def test_nothing_in_these_can_lack_unnoticed(kind: str) -> None:
    entry = checkpoints.KINDS[kind]
    found = header(entry.table, entry.metadata)
    family = family_of(found)
    assert family is not None and family.expects is not None
    assert family.expects(found).tensors.keys() == entry.table.keys()


def test_the_real_wan22_vae_is_whole() -> None:
    found = header(vaes.wan22_vae(vaes.WAN22_PUBLISHED))
    info_of(found).require_whole(Role.VAE)


ENCODERS = {
    "umt5-xxl": comfy.text_encoders.wan.WanT5Model,
    "umt5-base": comfy.text_encoders.ace.AceT5Model,
    "t5-xxl": comfy.text_encoders.genmo.MochiT5XXL,
    "t5-11b": comfy.text_encoders.cosmos.CosmosT5XXL,
    "t5-base": comfy.text_encoders.sa_t5.SAT5Model,
    "pile-t5-xl": comfy.text_encoders.aura_t5.AuraT5Model,
    "mt5-xl": comfy.text_encoders.hydit.MT5XLModel,
    "byt5-small": comfy.text_encoders.hunyuan_image.ByT5SmallModel,
}


@pytest.mark.parametrize("name", ENCODERS)
def test_every_t5_that_stock_builds_is_whole_and_beyond_doubt(name: str) -> None:
    with torch.device("meta"):
        made = ENCODERS[name](device="meta", dtype=torch.float16).state_dict()
    found = header_of({key.rpartition("transformer.")[2]: tensor for key, tensor in made.items()}, "x")
    family = family_of(found)
    assert family is not None and family.expects is not None
    expected = family.expects(found)
    require(found, expected)
    refuse_gaps("x", found.extents)
    assert not expected.doubts


# ---------------------------------------------------------------------------------------------- what no number can tell


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(notices, "_listeners", [said.append])
    monkeypatch.setattr(notices, "_said", set())
    return said


@pytest.mark.parametrize(
    ("name", "gone", "words"),
    [
        ("14B VACE", "vace_blocks.7.", "has 40 blocks and 7 vace_blocks, which do not go together"),
        ("1.3B VACE", "vace_blocks.14.", "has 30 blocks and 14 vace_blocks, which do not go together"),
        ("14B VACE", "blocks.39.", "has 39 blocks and 8 vace_blocks, which do not go together"),
    ],
)
def test_a_side_branch_that_is_too_short_is_an_error(name: str, gone: str, words: str) -> None:
    table = {key: spec for key, spec in wan.table(PUBLISHED[name]).items() if not key.startswith(gone)}
    found = header(table)
    with pytest.raises(WrongFile, match=words):
        info_of(found).require_whole(Role.DIFFUSION)


@pytest.mark.parametrize(
    ("name", "gone", "words"),
    [
        ("1.3B", ("blocks.29.",), "has 29 blocks; the published Wan models of its width, 1536, have 30"),
        ("14B I2V", ("blocks.39.",), "has 39 blocks; the published Wan models of its width, 5120, have 40"),
        (
            "14B VACE",
            tuple(f"vace_blocks.{i}." for i in (5, 6, 7)),
            "has 5 vace_blocks; the published models of 40 blocks have 8",
        ),
        ("klein 4B", ("single_blocks.19.",), "has 19 single_blocks; the published model of its width has 20"),
        ("klein 9B", ("double_blocks.7.",), "has 7 double_blocks; the published model of its width has 8"),
        ("Z-Image", ("layers.29.",), "has 29 layers; the published model of its width has 30"),
    ],
)
def test_a_count_that_nobody_published_is_a_warning(
    name: str, gone: tuple[str, ...], words: str, warned: list[str]
) -> None:
    table = wan.table(PUBLISHED[name]) if name in PUBLISHED else PICTURES[name]
    found = header({key: spec for key, spec in table.items() if not key.startswith(gone)})
    info_of(found).require_whole(Role.DIFFUSION)
    info_of(found).say_doubts()
    assert len(warned) == 1 and f"model.safetensors {words}" in warned[0]


@pytest.mark.parametrize("gib", [0.0, 0.5])
def test_what_the_model_has_no_place_for_is_a_warning(folder: Path, gib: float, warned: list[str]) -> None:
    def change(tensors: Tensors) -> None:
        tensors.update({name: torch.zeros(3) for name in ("blocks.3.foo.weight", "something.else")})

    path = written(folder, "wan_t2v", change)
    fusion.load_diffusion_model(path, vram_budget=gib)
    assert len(warned) == 1 and warned[0].startswith(path) and "blocks.3.foo.weight" in warned[0]
    assert "something" not in warned[0]


WANS = [name for name, one in checkpoints.KINDS.items() if one.folder == "diffusion_models" and one.family == "wan"]


@pytest.mark.parametrize("kind", WANS)
def test_no_relative_of_wan_gives_cause_for_a_warning(folder: Path, kind: str, warned: list[str]) -> None:
    fusion.load_diffusion_model(str(checkpoints.write(kind, folder, "fp16")), vram_budget=0.5)
    assert warned == []


@pytest.mark.parametrize("storage", ["fp8_scaled", "fp8_comfy_quant", "fp8_metadata"])
def test_scales_are_nothing_to_warn_of(folder: Path, storage: str, warned: list[str]) -> None:
    path = str(checkpoints.write("wan_t2v", folder, storage))
    for gib in (0.0, 0.5):
        fusion.load_diffusion_model(path, vram_budget=gib)
    assert warned == []


def test_a_whole_checkpoint_gives_no_cause_for_a_warning(folder: Path, warned: list[str]) -> None:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"model.diffusion_model.{name}"] = tensors.pop(name)
        vae = load_file(checkpoints.write("wan_vae", folder))
        tensors.update({f"first_stage_model.{name}": tensor for name, tensor in vae.items()})

    path = written(folder, "wan_t2v", change)
    for load in loaders("wan_t2v"):
        load(path)
    assert warned == []


# ------------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize(
    ("kind", "name", "shape", "words"),
    [
        ("wan_t2v", "blocks.1.ffn.0.weight", (640, 128), "has the shape [640, 128], the model needs [640, 256]"),
        ("wan_t2v", "head.modulation", (1, 2, 128), "has the shape [1, 2, 128], the model needs [1, 2, 256]"),
        ("umt5", f"{BLOCK}.4.layer.1.DenseReluDense.wo.weight", (16, 64), "has the shape [16, 64], the model needs [16, 10240]"),
        ("umt5", "encoder.final_layer_norm.weight", (8,), "has the shape [8], the model needs [16]"),
        ("qwen3", "model.layers.1.mlp.up_proj.weight", (3, 4), "has the shape [3, 4], the model needs [32, 2560]"),
    ],
)  # fmt: skip
def test_a_shape_that_does_not_fit_is_named_before_loading(
    folder: Path, kind: str, name: str, shape: tuple[int, ...], words: str
) -> None:
    (told,) = refusals(folder, kind, misshapen(name, *shape))
    assert f"{name} {words}" in told


@pytest.mark.parametrize(
    ("kind", "name", "shape", "words"),
    [
        ("flux1", "double_blocks.1.img_mlp.0.weight", (3, 4), "has the shape [3, 4], the model needs ["),
        ("gemma2", "model.layers.1.mlp.up_proj.weight", (3, 4), "has the shape [3, 4], the model needs ["),
        ("wan_vae", "decoder.head.2.bias", (4,), "has the shape [4], the model needs [3]"),
        ("sd_vae", "decoder.conv_in.bias", (4,), "has the shape [4], the model needs ["),
    ],
)
def test_a_shape_that_only_stock_can_judge_is_named(
    folder: Path, kind: str, name: str, shape: tuple[int, ...], words: str
) -> None:
    path = written(folder, kind, misshapen(name, *shape))
    role = ROLES[checkpoints.KINDS[kind].folder]
    options = {"kind": "lumina2", "options": checkpoints.model_options(Path(path))} if role is Role.TEXT else {}
    for gib in (0.0, 0.5):
        with pytest.raises(WrongFile) as caught:
            if role is Role.VAE:
                fusion.load_vae(path)
            elif role is Role.TEXT:
                fusion.load_text_encoder(path, [], vram_budget=gib, **options)
            else:
                fusion.load_diffusion_model(path, vram_budget=gib)
        assert str(caught.value).startswith(path) and f"{name} {words}" in str(caught.value)


@pytest.mark.parametrize("gib", [0.0, 0.5])
def test_a_quantised_layer_of_another_shape_is_named(folder: Path, gib: float) -> None:
    """Stock's operations for quantised models take any."""
    name = "model.layers.1.self_attn.o_proj.weight"
    path = written(folder, "gemma2", misshapen(name, 16, 16), storage="fp8_scaled")
    options = checkpoints.model_options(Path(path))
    with pytest.raises(WrongFile, match=rf"{name} has the shape \[16, 16\], the model needs ") as caught:
        fusion.load_text_encoder(path, [], vram_budget=gib, kind="lumina2", options=options)
    assert str(caught.value).startswith(path)


# -------------------------------------------------------------------------------------------------------------- notes


def note(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


NOTES = {
    "no JSON": ("{not json", "is not sound JSON"),
    "no table": ("[]", "is not sound JSON"),
    "another format": ('{"format": "int3_magic"}', "is quantised as 'int3_magic', which this ComfyUI does not know"),
    "a deep one": ("[" * 50_000, "is not sound JSON"),
    "no format": ("{}", "is quantised as {}, which this ComfyUI does not know"),
    "a format that is none": ('{"format": ["nvfp4"]}', "which this ComfyUI does not know"),
}


@pytest.mark.parametrize("what", NOTES)
def test_a_broken_note_on_a_layer_is_named(folder: Path, what: str) -> None:
    text, words = NOTES[what]
    layer = "blocks.1.ffn.0"
    for kind, place in (("wan_t2v", layer), ("umt5", f"{BLOCK}.1.layer.0.SelfAttention.q")):
        name = f"{place}.comfy_quant"
        (told,) = refusals(
            folder, kind, lambda tensors, name=name: tensors.update({name: note(text)}), storage="fp8_comfy_quant"
        )
        assert words in told and place in told


@pytest.mark.parametrize("what", [*NOTES, "no layers"])
def test_broken_metadata_on_quantisation_is_named(folder: Path, what: str) -> None:
    text, words = NOTES.get(what, ('{"format_version": "1.0"}', "lists no layers"))
    if what not in ("no JSON", "no table", "a deep one", "no layers"):
        text = f'{{"layers": {{"blocks.1.ffn.0": {text}}}}}'
    metadata = {"_quantization_metadata": text}
    (told,) = refusals(folder, "wan_t2v", lambda tensors: None, storage="fp8_metadata", metadata=metadata)
    assert words in told


@pytest.mark.parametrize("text", ["{not json", "[]", "[" * 50_000, "{}", '{"layers": []}'])
def test_broken_metadata_is_named_before_its_layers_are_renamed(text: str) -> None:
    with pytest.raises(WrongFile, match=r"^a\.safetensors: its _quantization_metadata "):
        quant_metadata.renamed({"_quantization_metadata": text}, str.upper, "a.safetensors")
    sound = {"_quantization_metadata": '{"layers": {"a.b": {"format": "c"}}}', "other": "d"}
    found = quant_metadata.renamed(sound, str.upper, "a.safetensors")
    assert json.loads(found.pop("_quantization_metadata")) == {"layers": {"A.B": {"format": "c"}}} and found == {
        "other": "d"
    }


def test_a_scale_that_lacks_is_named(folder: Path) -> None:
    name = "blocks.1.ffn.0.weight_scale"
    (told,) = refusals(folder, "wan_t2v", without(name), storage="fp8_comfy_quant")
    assert f" lacks {name}, the scale of a quantised weight" in told


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{not json", "are not sound JSON"),
        ("[]", "are no table of settings"),
        ('{"transformer": 5}', "are no table of settings"),
    ],
)
def test_broken_settings_are_named(folder: Path, config: str, words: str) -> None:
    for kind in ("wan_t2v", "ltx2"):
        (told,) = refusals(folder, kind, lambda tensors: None, metadata={"config": config})
        assert f"the settings in its metadata ('config') {words}" in told


def test_settings_that_stock_does_not_read_may_be_anything(folder: Path) -> None:
    path = written(folder, "flux1", lambda tensors: None, metadata={"config": "made on a Monday"})
    for load in loaders("flux1"):
        load(path)


@pytest.mark.parametrize("gib", [0.0, 0.5])
def test_settings_that_do_not_fit_name_the_file(folder: Path, gib: float) -> None:
    config = json.dumps({"transformer": {"text_dim": checkpoints.T5_WIDTH, "no_such": 1}})
    path = written(folder, "wan_t2v", lambda tensors: None, metadata={"config": config})
    with pytest.raises(WrongFile, match=r"ComfyUI cannot build a model from it .*no_such.* metadata") as caught:
        fusion.load_diffusion_model(path, vram_budget=gib)
    assert str(caught.value).startswith(path)


# ---------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("kind", ["umt5", "gemma2"])
@pytest.mark.parametrize("gib", [0.0, 0.5])
def test_a_damaged_tokenizer_is_named(folder: Path, kind: str, gib: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    for damaged in (torch.full((999,), 255, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)):
        path = written(folder, kind, lambda tensors, found=damaged: tensors.update(spiece_model=found))
        with pytest.raises(WrongFile, match="the tokenizer in it is damaged") as caught:
            fusion.load_text_encoder(path, [], vram_budget=gib, kind="auto" if kind == "umt5" else "lumina2")
        assert str(caught.value).startswith(path)

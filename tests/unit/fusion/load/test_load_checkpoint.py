"""One file to MODEL, CLIP and VAE: what stock's Load Checkpoint makes of it, streamed; and what it says where a part is missing."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import family_scenes
import folder_paths
import pytest
import torch
from in_halves import HALF
from safetensors.torch import load_file, save_file
from scenes import Scene, distance, sample
from unet_models import handed_back

from fusestream import checkpoints, fusion
from fusestream.checkpoints import whole
from fusestream.fusion import KernelPolicy
from fusestream.fusion.base.family import Role
from fusestream.fusion.families.clip import encoder as clip
from fusestream.fusion.load.checkpoint import Beside, beside_the_model, load_checkpoint
from fusestream.fusion.weights import fp32_residual
from fusestream.kernels_cuda import LEDGER
from fusestream.memory import BadFile
from fusestream.nodes import files
from fusestream.nodes.graph import queued
from fusestream.nodes.graph.prompt import Kind
from fusestream.nodes.loaders import CheckpointLoader

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")
OFF = KernelPolicy.of("off")
TEXTS = "a fox in the snow", "(a fox:1.3) in [deep] snow, " * 30
BUDGETS = {"streamed": -1.0, "stock's": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("checkpoints")
    yield path
    gc.collect()  # models that nobody has any more: Windows frees no name of a mapped file
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


def scene(kind: str) -> Scene:
    """For the U-Net in a checkpoint of this kind."""
    base = family_scenes.inputs("sdxl" if kind == "sdxl" else "sd15")
    width = whole.CHECKPOINTS[kind].size.context
    for prompt in (base.positive, base.negative):
        prompt[0][0] = prompt[0][0].repeat(1, 1, width // prompt[0][0].shape[-1])
    return base


def encoded(encoder: Any, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, pooled = encoder.encode_from_tokens(encoder.tokenize(text), return_pooled=True)
    return tokens, pooled


def loaded(path: Path, policy: KernelPolicy = OFF, budget: float = -1.0) -> Any:
    return load_checkpoint(str(path), [], policy, budget)


def stocks(path: Path) -> tuple[Any, Any, Any]:
    model, text_encoder, vae, _ = comfy.sd.load_checkpoint_guess_config(str(path), embedding_directory=[])
    return model, text_encoder, vae


@pytest.mark.every_other
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("kind", whole.CHECKPOINTS)
def test_with_kernels_off_every_part_is_stocks_to_the_bit(folder: Path, kind: str, budget: float) -> None:
    path = whole.write(kind, folder)
    model, text_encoder, vae = stocks(path)
    ours = loaded(path, budget=budget)
    for text in TEXTS:
        assert all(map(torch.equal, encoded(text_encoder, text), encoded(ours.clip, text)))
    picture = torch.rand(1, 64, 64, 3)
    latents = vae.encode(picture)
    assert torch.equal(ours.vae.encode(picture), latents) and torch.equal(ours.vae.decode(latents), vae.decode(latents))
    assert torch.equal(sample(ours.model, scene(kind)), sample(model, scene(kind)))
    theirs = model.model
    assert type(ours.model.model).__qualname__ == type(theirs).__qualname__
    assert ours.model.model.model_type is theirs.model_type


def test_fused_it_samples_as_near_as_fp16_is(folder: Path) -> None:
    """Both computing in fp16, which stock does on a card and not on the CPU."""
    path = whole.write("sd15", folder)
    found = {}
    for name, policy, dtype in (("ours", KernelPolicy(), HALF), ("theirs", OFF, HALF), ("exact", OFF, torch.float32)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comfy.model_management, "unet_manual_cast", lambda *_, dtype=dtype: dtype)
            model = loaded(path, policy).model
        found[name] = sample(model, scene("sd15"))
    assert not handed_back() and not torch.equal(found["ours"], found["theirs"])
    assert distance(found["ours"], found["exact"]) <= max(1.1 * distance(found["theirs"], found["exact"]), 1e-3)


@pytest.mark.every_other
@pytest.mark.parametrize("kind", whole.CHECKPOINTS)
def test_just_its_tensors_pass_to_each_part(folder: Path, kind: str) -> None:
    """q, k and v of OpenCLIP, which a file has as one matrix, too: rows of it, that lie as one again when they have passed."""
    path = whole.write(kind, folder)
    ours = loaded(path)
    prefixes = tuple(text.prefix for text in whole.CHECKPOINTS[kind].texts)
    for patcher, prefix in ((ours.model, (whole.MODEL,)), (ours.clip.patcher, prefixes)):
        extents = [weight.extent for layer in patcher.stream.layers for weight in layer.weights]
        assert extents and all(extent.name.startswith(prefix) for extent in extents)
        assert len({(extent.begin, extent.end) for extent in extents}) == len(extents)
    assert len(ours.clip.patcher.stream.blocks) == whole.LAYERS * len(prefixes)
    assert not LEDGER.messages or not any("loaded as stock does" in said for said in LEDGER.messages)


@pytest.mark.every_other
@pytest.mark.parametrize("kind", whole.CHECKPOINTS)
def test_its_text_encoders_are_fused(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the references, streamed; q, k and v as one product, as they lie side by side."""
    path = whole.write(kind, folder)
    theirs, ours = stocks(path)[1], loaded(path, KernelPolicy()).clip
    for text in TEXTS:  # on the CPU it is stock's
        assert all(map(torch.equal, encoded(theirs, text), encoded(ours, text)))
    assert clip.fuse(ours.cond_stage_model, KernelPolicy(), on_cpu=True)
    joined: list[bool] = []
    packed = fp32_residual.packed
    monkeypatch.setattr(
        fp32_residual, "packed", lambda parts: joined.append(packed(parts) is not None) or packed(parts)
    )
    for text in TEXTS:
        for one, other in zip(encoded(ours, text), encoded(theirs, text), strict=True):
            assert 0 < (one - other).norm() <= 1e-3 * other.norm()
    assert joined and all(joined)


@pytest.mark.every_other
@pytest.mark.parametrize("marks", [("v_pred",), ("v_pred", "ztsnr"), ()], ids=str)
def test_what_it_predicts_is_told_as_stock_tells_it(folder: Path, marks: tuple[str, ...]) -> None:
    path = whole.write("sdxl", folder, marks=marks)
    theirs, ours = stocks(path)[0].model, loaded(path).model.model
    assert ours.model_type is theirs.model_type and (ours.model_type.name == "V_PREDICTION") == bool(marks)
    assert torch.equal(ours.model_sampling.sigmas, theirs.model_sampling.sigmas)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_what_a_file_does_not_have_is_handed_out_as_stock_does(folder: Path, budget: float) -> None:
    for parts, beside in (
        (("model", "vae"), Beside(text=False, vae=True)),
        (("model", "clip"), Beside(text=True, vae=False)),
    ):
        path = whole.write("sd15", folder, parts=parts)
        assert beside_the_model(str(path)) == beside
        ours = loaded(path, budget=budget)
        assert (ours.clip is not None) == beside.text
        if beside.vae:
            ours.vae.throw_exception_if_invalid()
        else:
            with pytest.raises(RuntimeError, match="your checkpoint does not contain a valid VAE"):
                ours.vae.throw_exception_if_invalid()


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_a_diffusion_model_by_itself_is_taken_as_stock_takes_it(folder: Path, budget: float) -> None:
    path = checkpoints.write("sd15", folder)
    ours = loaded(path, budget=budget)
    assert ours.clip is None and beside_the_model(str(path)) == Beside(text=False, vae=False)
    assert torch.equal(sample(ours.model, scene("sd15")), sample(stocks(path)[0], scene("sd15")))


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize(
    "lacking",
    [
        "model.diffusion_model.output_blocks.0.0.in_layers.2.weight",
        "first_stage_model.decoder.mid.block_1.norm1.weight",
        "cond_stage_model.transformer.text_model.encoder.layers.2.mlp.fc1.bias",
    ],
)
def test_a_missing_weight_is_named(folder: Path, tmp_path: Path, budget: float, lacking: str) -> None:
    tensors = load_file(whole.write("sd15", folder))
    del tensors[lacking]
    path = tmp_path / "lacking.safetensors"
    save_file(tensors, path)
    with pytest.raises(fusion.WrongFile, match="lacks 1 of the model's weights") as caught:
        loaded(path, budget=budget)
    assert str(path) in str(caught.value)


def test_a_file_for_torch_alone_is_loaded_as_stock_does(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.ckpt"
    tensors = load_file(whole.write("sd15", folder))
    torch.save({"state_dict": tensors}, path)
    ours, (_, text_encoder, vae) = loaded(path), stocks(path)
    assert not hasattr(ours.model.model, "fusestream") and beside_the_model(str(path)) is None
    assert all(map(torch.equal, encoded(text_encoder, TEXTS[0]), encoded(ours.clip, TEXTS[0])))
    latents = torch.randn(1, 4, 8, 8)
    assert torch.equal(ours.vae.decode(latents), vae.decode(latents))
    assert any("only .safetensors and .gguf files can be streamed" in said for said in LEDGER.messages)
    with pytest.raises(fusion.WrongFile, match="vram_budget to 0"):
        loaded(path, budget=1.0)


def test_another_copy_for_another_card_is_the_same(folder: Path) -> None:
    path = whole.write("sd15", folder)
    for budget in BUDGETS.values():
        ours = loaded(path, budget=budget)
        for patcher in (ours.clip.patcher, ours.vae.patcher):
            make, given = patcher.cached_patcher_init
            again, known = make(*given, disable_dynamic=True).model, patcher.model
            assert type(again) is type(known) and again.state_dict().keys() == known.state_dict().keys()


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("kind", "place"), [("t5xxl", Role.TEXT.loader), ("sd_vae", Role.VAE.loader), ("lora_ab", "Load LoRA")]
)
def test_another_file_is_told_where_it_belongs(folder: Path, kind: str, place: str) -> None:
    path = str(checkpoints.write(kind, folder))
    with pytest.raises(fusion.WrongFile, match=place):
        fusion.inspect_file(path, Role.CHECKPOINT)
    for budget in BUDGETS.values():
        with pytest.raises(fusion.WrongFile, match=place):
            load_checkpoint(path, [], OFF, budget)


def test_other_loaders_send_a_checkpoint_here(folder: Path) -> None:
    path = str(whole.write("sd15", folder))
    for role in (Role.TEXT, Role.VAE):
        with pytest.raises(fusion.WrongFile, match="choose it in the FuseStream Checkpoint Loader"):
            fusion.inspect_file(path, role)
    fusion.inspect_file(path, Role.DIFFUSION)
    with pytest.raises(fusion.WrongFile, match="choose it in the FuseStream Diffusion Model Loader"):
        fusion.inspect_file(str(checkpoints.write("sd15", folder)), Role.VAE)


def test_a_cut_file_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(whole.write("sd15", folder).read_bytes()[:-1])
    for budget in BUDGETS.values():
        with pytest.raises(BadFile, match="is cut short"):
            loaded(path, budget=budget)


KINDS = {
    CheckpointLoader.GET_SCHEMA().node_id: Kind(("MODEL", "CLIP", "VAE"), is_plain=False),
    "CLIPTextEncode": Kind(("CONDITIONING",)),
    "VAEDecode": Kind(("IMAGE",)),
    "KSampler": Kind(("LATENT",)),
    "SaveImage": Kind((), is_end=True),
}


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (("model", "vae"), f"has no text encoder inside: connect one from the {Role.TEXT.loader}"),
        (("model", "clip"), f"has no VAE inside: connect one from the {Role.VAE.loader}"),
        (whole.PARTS, None),
    ],
)
def test_a_part_that_is_connected_and_missing_is_told_before_it_is_queued(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...], told: str | None
) -> None:
    path = whole.write("sd15", folder, parts=parts)
    known = {"checkpoints": ([str(path.parent)], folder_paths.supported_pt_extensions)}
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", {**folder_paths.folder_names_and_paths, **known})
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    monkeypatch.setattr(queued, "kind_of", KINDS.get)
    link: Callable[[str, int], list[Any]] = lambda node, place: [node, place]  # noqa: E731
    loader = {"class_type": "FuseStreamCheckpointLoader", "inputs": {"ckpt_name": path.name}}
    prompt = {
        "1": loader,
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": link("1", 1)}},
        "3": {"class_type": "KSampler", "inputs": {"model": link("1", 0), "positive": link("2", 0)}},
        "4": {"class_type": "VAEDecode", "inputs": {"samples": link("3", 0), "vae": link("1", 2)}},
        "5": {"class_type": "SaveImage", "inputs": {"images": link("4", 0)}},
    }
    queued.note({"prompt": prompt})
    answer = asked(path.name)
    assert answer is True if told is None else told in str(answer)
    queued.note({"prompt": {"1": loader}})
    assert asked(path.name) is True


def asked(name: str) -> bool | str:
    import asyncio

    from comfy_api.latest import io

    node: Any = CheckpointLoader.PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden.unique_id: "1"}})
    answer: bool | str = asyncio.run(node.validate_inputs(ckpt_name=name))
    return answer


def test_its_list_is_of_checkpoints_alone() -> None:
    assert Role.CHECKPOINT.folder == "checkpoints" and Role.CHECKPOINT not in files.GGUF_FOLDERS

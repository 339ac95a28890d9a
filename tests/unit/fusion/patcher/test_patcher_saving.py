"""Streamed models saved, merged, hooked by stock's nodes: what stock makes of models that are all in memory, weight by weight."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import comfy.hooks
import comfy.model_management as mm
import comfy.sd
import comfy.utils
import int8_files
import pytest
import torch
from comfy_extras import nodes_lora_extract, nodes_model_merging, nodes_train
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_models import saved
from scenes import Scene, Studio, sample

from bed.depth import is_thorough
from fusestream import checkpoints, fusion
from fusestream.fusion.base.errors import NotWhileStreaming
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.load.text import load_streamed_text_encoder
from fusestream.fusion.stream.file_weights import FileWeights

KIND = "wan_t2v"
LORAS = (("lora_ab", 0.8), ("lora_lokr", -0.5))
STORAGES = checkpoints.KINDS["wan_t2v"].storages if is_thorough() else ("fp16", "fp8_scaled")
MERGES = [(storage, which) for storage in ("fp32", "fp16") for which in ("both", "first", "second")]

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "whole_blocks", "output")


def streamed(folder: Path, storage: str = "fp32", seed: int = 0, kind: str = KIND) -> Any:
    model = load_streamed_diffusion_model(str(checkpoints.write(kind, folder, storage, seed)))
    model.stream.residency.ceiling = model.stream.residency.least
    return model


def whole(folder: Path, storage: str = "fp32", seed: int = 0, kind: str = KIND) -> Any:
    return comfy.sd.load_diffusion_model(str(checkpoints.write(kind, folder, storage, seed)))


def with_loras(model: Any, folder: Path, *loras: tuple[str, float]) -> Any:
    for kind, strength in loras:
        file = comfy.utils.load_torch_file(str(checkpoints.write(kind, folder)))
        model, _ = comfy.sd.load_lora_for_models(model, None, file, strength, 0.0)
    return model


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scalars = got[name].numel() == tensor.numel() == 1  # a scale, as one number or as one in a row
        assert got[name].dtype == tensor.dtype and (got[name].shape == tensor.shape or scalars), name
        assert torch.equal(got[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


# -------------------------------------------------------------------------------------------------------------- saving


@pytest.mark.every_other
@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_saved_is_what_stock_saves(studio: Studio, output: Path, storage: str) -> None:
    folder = studio.folder
    for loras in ((), LORAS):
        ours, stock = (with_loras(load(folder, storage), folder, *loras) for load in (streamed, whole))
        got, wanted = (
            saved(model, output, f"{name}{len(loras)}") for name, model in (("ours", ours), ("stock", stock))
        )
        if storage == "fp8_e4m3fn":  # stock rounds to it what the file has in wider types
            got = {name: tensor.to(wanted[name].dtype) for name, tensor in got.items()}
        assert_same(got, wanted)


@pytest.mark.every_other
@pytest.mark.parametrize("kind", ["rows", "convrot"])
def test_weights_of_whole_numbers_are_saved(studio: Studio, output: Path, tmp_path_factory: Any, kind: str) -> None:
    """Of which torch makes no parameter that could have a gradient."""
    source = checkpoints.write(KIND, studio.folder, "fp16")
    path, _ = int8_files.write(source, tmp_path_factory.mktemp("int8"), kind)
    for loras in ((), LORAS[:1]):
        models = {"ours": load_streamed_diffusion_model(str(path)), "stock": comfy.sd.load_diffusion_model(str(path))}
        made = {
            name: saved(with_loras(model, studio.folder, *loras), output, f"{name}{len(loras)}")
            for name, model in models.items()
        }
        assert_same(made["ours"], made["stock"])


def test_few_weights_are_in_memory_while_a_model_is_saved(
    studio: Studio, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0
    asked = FileWeights.weight

    def counted(self: FileWeights, *args: Any) -> torch.Tensor:
        nonlocal most
        found = asked(self, *args)
        alive.append(weakref.ref(found.untyped_storage()))
        most = max(most, sum(one() is not None for one in alive))
        return found

    monkeypatch.setattr(FileWeights, "weight", counted)
    model = with_loras(streamed(studio.folder), studio.folder, *LORAS)
    saved(model, output, "model")
    assert len(alive) == len(model.stream.keys) and 0 < most <= 3
    assert model.stream.residency.held == 0


@pytest.mark.deep
def test_a_save_that_is_interrupted_leaves_nothing(
    studio: Studio, output: Path, monkeypatch: pytest.MonkeyPatch, scenes: dict[str, Scene]
) -> None:
    model = with_loras(streamed(studio.folder), studio.folder, *LORAS)
    expected = sample(model, scenes[KIND])
    count = 0

    def interrupted(*_: Any, **__: Any) -> None:
        nonlocal count
        count += 1
        if count == 30:
            raise mm.InterruptProcessingException

    with monkeypatch.context() as patch:
        patch.setattr(mm, "throw_exception_if_processing_interrupted", interrupted)
        with pytest.raises(mm.InterruptProcessingException):
            nodes_model_merging.ModelSave().save(model, "model")
    assert count == 30 and not list(output.iterdir())
    assert torch.equal(sample(model, scenes[KIND]), expected)


def test_what_was_saved_streams(studio: Studio, output: Path, scenes: dict[str, Scene]) -> None:
    model = with_loras(streamed(studio.folder), studio.folder, ("lora_ab", 0.8))
    expected = sample(model, scenes[KIND])
    tensors = saved(model, output, "model")
    with safe_open(checkpoints.write(KIND, studio.folder, "fp32"), "pt") as source:
        save_file(tensors, output / "again.safetensors", source.metadata())  # with the tiny model's widths
    assert torch.equal(sample(load_streamed_diffusion_model(str(output / "again.safetensors")), scenes[KIND]), expected)


def test_stock_still_saves_what_is_not_ours(studio: Studio, output: Path) -> None:
    streamed(studio.folder)
    comfy.utils.save_torch_file({"a": torch.ones(3)}, str(output / "a.safetensors"), metadata={"b": "c"})
    assert torch.equal(load_file(output / "a.safetensors")["a"], torch.ones(3))


def test_a_text_encoder_is_saved(studio: Studio, output: Path) -> None:
    path = checkpoints.write("umt5", studio.folder, "fp16")
    stock = comfy.sd.load_clip(
        [str(path)], clip_type=comfy.sd.CLIPType.WAN, model_options=checkpoints.model_options(path)
    )
    found = {}
    for name, clip in (("ours", load_streamed_text_encoder(str(path), [])), ("stock", stock)):
        file = comfy.utils.load_torch_file(str(checkpoints.write("lora_text", studio.folder)))
        nodes_model_merging.CLIPSave().save(comfy.sd.load_lora_for_models(None, clip, file, 0.0, 0.7)[1], name)
        made = [load_file(one) for one in sorted(output.glob(f"{name}*"))]
        found[name] = {f"{i} {key}": tensor for i, file in enumerate(made) for key, tensor in file.items()}
    assert_same(found["ours"], found["stock"])


def test_a_lora_is_extracted(studio: Studio, output: Path) -> None:
    """Extract and Save LoRA of the difference between two models."""
    found = []
    for load in (streamed, whole):
        difference = nodes_model_merging.ModelSubtract().merge(load(studio.folder), load(studio.folder, seed=1), 1.0)[0]
        made = nodes_lora_extract.calc_lora_model(
            difference,
            4,
            "diffusion_model.",
            "diffusion_model.",
            {},
            nodes_lora_extract.LORAType.FULL_DIFF,
            bias_diff=True,
        )
        found.append(made)
    assert len(found[1]) > 50
    assert_same(*found)


# ------------------------------------------------------------------------------------------------------------- merging


@pytest.mark.every_other
@pytest.mark.parametrize(("storage", "which"), MERGES if is_thorough() else MERGES[2::2])
def test_a_merge_of_streamed_models(studio: Studio, scenes: dict[str, Scene], storage: str, which: str) -> None:
    folder = studio.folder

    def merged(first: Any, second: Any) -> torch.Tensor:
        one = with_loras(first(folder, storage), folder, ("lora_ab", 0.8))
        two = with_loras(second(folder, storage, seed=1), folder, ("lora_lokr", 0.5))
        model = nodes_model_merging.ModelMergeSimple().merge(one, two, 0.4)[0]
        del one, two
        gc.collect()
        return sample(model, scenes[KIND])

    loaders = {"both": (streamed, streamed), "first": (streamed, whole), "second": (whole, streamed)}[which]
    assert torch.equal(merged(*loaders), merged(whole, whole))


def test_a_quantised_model_is_merged_as_its_numbers(studio: Studio, scenes: dict[str, Scene], tmp_path: Path) -> None:
    """Which stock cannot: it takes the scales for weights. Stock's merge of the same numbers, not quantised, is the answer."""
    quantised = checkpoints.write(KIND, studio.folder, "fp8_scaled", 1)
    plain = tmp_path / "numbers.safetensors"
    with safe_open(quantised, "pt") as file:
        save_file(numbers_of(load_file(quantised)), plain, file.metadata())
    second = load_streamed_diffusion_model(str(quantised))
    got = nodes_model_merging.ModelMergeSimple().merge(streamed(studio.folder), second, 0.4)[0]
    wanted = nodes_model_merging.ModelMergeSimple().merge(
        whole(studio.folder), comfy.sd.load_diffusion_model(str(plain)), 0.4
    )[0]
    assert torch.equal(sample(got, scenes[KIND]), sample(wanted, scenes[KIND]))


def numbers_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a file of scaled fp8 means, in fp32."""
    found = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name.removesuffix("weight") + "scale_weight", tensors.get(f"{name}_scale"))
        if name.endswith(
            (".scale_weight", ".weight_scale", ".comfy_quant", "scaled_fp8", ".scale_input", ".input_scale")
        ):
            continue
        found[name] = tensor.float() if scale is None or name.endswith("bias") else tensor.float() * scale
    return found


def test_a_merge_is_saved(studio: Studio, output: Path) -> None:
    found = []
    for name, load in (("ours", streamed), ("stock", whole)):
        model = nodes_model_merging.ModelMergeSimple().merge(load(studio.folder), load(studio.folder, seed=1), 0.3)[0]
        found.append(saved(with_loras(model, studio.folder, ("lora_ab", 1.0)), output, name))
    assert_same(*found)


def test_text_encoders_merge(studio: Studio) -> None:
    """Token embedding and all: its rows are merged as they are read."""
    paths = [checkpoints.write("umt5", studio.folder, "fp16", seed) for seed in (0, 1)]
    found = []
    for load in (
        stock_clip,
        lambda path: load_streamed_text_encoder(str(path), [], policy=fusion.KernelPolicy.of("off")),
    ):
        one, two = (load(path) for path in paths)
        file = comfy.utils.load_torch_file(str(checkpoints.write("lora_text", studio.folder)))
        two = comfy.sd.load_lora_for_models(None, two, file, 0.0, 0.7)[1]
        clip = nodes_model_merging.CLIPMergeSimple().merge(one, two, 0.4)[0]
        del one, two
        gc.collect()
        found.append(clip.encode_from_tokens(clip.tokenize("a red fox", tokenizer_options={"umt5xxl_min_length": 24})))
    assert torch.equal(*found)


def stock_clip(path: Path) -> Any:
    return comfy.sd.load_clip(
        [str(path)], clip_type=comfy.sd.CLIPType.WAN, model_options=checkpoints.model_options(path)
    )


# --------------------------------------------------------------------------------------------------------------- hooks


def hooked(scene: Scene, folder: Path, keyframes: bool, *sides: str) -> Scene:
    """The scene with a LoRA by a hook on these of its prompts."""
    file = comfy.utils.load_torch_file(str(checkpoints.write("lora_ab", folder)))
    hooks = comfy.hooks.create_hook_lora(lora=file, strength_model=0.9, strength_clip=0.0)
    if keyframes:
        frames = comfy.hooks.HookKeyframeGroup()
        frames.add(comfy.hooks.HookKeyframe(strength=0.3, start_percent=0.0))
        frames.add(comfy.hooks.HookKeyframe(strength=1.0, start_percent=0.4))
        hooks.set_keyframes_on_hooks(frames)
    return scene._replace(
        **{side: comfy.hooks.set_hooks_for_conditioning(getattr(scene, side), hooks) for side in sides}
    )


@pytest.mark.every_other
@pytest.mark.parametrize(
    ("storage", "window", "keyframes"), [("fp32", "least", True), ("fp16", "least", False), ("fp16", "all", True)]
)
def test_a_lora_by_a_hook_changes_within_a_step(
    studio: Studio, scenes: dict[str, Scene], storage: str, window: str, keyframes: bool
) -> None:
    """The prompt has it, the other prompt has not; a plain LoRA lies under both."""
    scene = hooked(scenes[KIND], studio.folder, keyframes, "positive")
    ours, stock = (
        with_loras(load(studio.folder, storage), studio.folder, ("lora_lokr", 0.5)) for load in (streamed, whole)
    )
    if window == "all":
        ours.stream.residency.ceiling = None
    plain = sample(ours, scenes[KIND])
    wanted = sample(stock, scene)
    for _ in range(2):
        assert torch.equal(sample(ours, scene), wanted)
        assert torch.equal(sample(ours, scenes[KIND]), plain) and not torch.equal(plain, wanted)


def test_a_hook_on_quantised_weights(studio: Studio, scenes: dict[str, Scene]) -> None:
    """Which stock cannot. On both prompts it is a plain LoRA."""
    scene = hooked(scenes[KIND], studio.folder, False, "positive", "negative")
    plain = with_loras(streamed(studio.folder, "fp8_scaled"), studio.folder, ("lora_ab", 0.9))
    wanted = sample(plain, scenes[KIND])
    assert torch.equal(sample(streamed(studio.folder, "fp8_scaled"), scene), wanted)


def test_a_models_weights_by_a_hook(studio: Studio, scenes: dict[str, Scene]) -> None:
    """Create Hook Model as LoRA."""
    weights = comfy.hooks.get_patch_weights_from_model(whole(studio.folder, seed=1))
    found = []
    for load in (streamed, whole):
        hooks = comfy.hooks.create_hook_model_as_lora(weights, None, strength_model=0.6, strength_clip=0.0)
        scene = scenes[KIND]
        scene = scene._replace(positive=comfy.hooks.set_hooks_for_conditioning(scene.positive, hooks))
        found.append(sample(with_loras(load(studio.folder), studio.folder, ("lora_lokr", 0.5)), scene))
    assert torch.equal(*found)


# ------------------------------------------------------------------------------------------------------------ training


def training(model: Any, *, bypass: bool) -> Any:
    words = [[torch.randn(1, 20, checkpoints.T5_WIDTH), {}]]
    settings: dict[str, Any] = {
        "model": model, "latents": {"samples": torch.randn(1, 16, 1, 8, 8)}, "positive": words, "batch_size": 1, "steps": 1,
        "grad_accumulation_steps": 1, "learning_rate": 1e-3, "rank": 2, "optimizer": "AdamW", "loss_function": "MSE", "seed": 0,
        "training_dtype": "fp32", "lora_dtype": "fp32", "quantized_backward": False, "algorithm": "LoRA",
        "gradient_checkpointing": False, "checkpoint_depth": 1, "offloading": False, "existing_lora": "[None]",
        "bucket_mode": False, "bypass_mode": bypass,
    }  # fmt: skip
    several = ("latents", "positive")
    given = {key: [value] if key not in several else value for key, value in settings.items()}
    given["latents"] = [settings["latents"]]
    given["positive"] = [words]
    return nodes_train.TrainLoraNode.execute(**given)


@pytest.mark.parametrize("bypass", [False, True])
def test_training_says_what_it_needs_and_works_there(studio: Studio, bypass: bool) -> None:
    with pytest.raises(NotWhileStreaming, match=r"Training needs all of a model's weights.*Set vram_budget to 0"):
        training(streamed(studio.folder), bypass=bypass)
    path = str(checkpoints.write(KIND, studio.folder, "fp32"))
    lora, losses, steps = training(fusion.load_diffusion_model(path), bypass=bypass).result
    assert steps == 1 and len(losses["loss"]) == 1 and any("blocks.3" in name for name in lora)


def test_gradients_through_what_streams_are_refused(studio: Studio) -> None:
    """By whatever way somebody came to train."""
    model = streamed(studio.folder)
    mm.load_models_gpu([model])
    block = model.model.diffusion_model.blocks[1]
    with torch.inference_mode(False), torch.enable_grad(), pytest.raises(NotWhileStreaming, match="way back"):
        block(torch.zeros(1, 4, 256, requires_grad=True))

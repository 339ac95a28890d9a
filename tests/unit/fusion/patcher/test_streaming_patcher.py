"""A streamed model samples what stock's does, bit for bit, in every kind and storage, and takes other nodes' patches."""

from __future__ import annotations

import copy
import gc
import shutil
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.memory_management
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.sd
import pytest
import torch
from as_stored import as_stored
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras.nodes_model_advanced import ModelSamplingSD3
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scenes import Scene, Studio, distance, sample

from fusestream import checkpoints, fusion
from fusestream.fusion import WrongFile
from fusestream.fusion.base.errors import NotStreamable, NotWhileStreaming
from fusestream.fusion.families.wan import order as wan_order
from fusestream.fusion.fused import attention
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.patcher.streaming_patcher import StreamingModelPatcher
from fusestream.fusion.report.gathering import gather
from fusestream.kernels_cuda import LEDGER
from fusestream.memory import FileChanged

GIB = 2**30
# Each kind, and each storage, with some of the others.


pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "whole_blocks")


@pytest.fixture(scope="module")
def path(studio: Studio) -> str:
    return str(checkpoints.write("wan_t2v", studio.folder, "fp32"))


@pytest.fixture(scope="module")
def expected(path: str, scenes: dict[str, Scene]) -> torch.Tensor:
    """What stock makes of the fp32 T2V."""
    return sample(comfy.sd.load_diffusion_model(path), scenes["wan_t2v"])


def least(path: str, **options: Any) -> Any:
    """The model streamed through the smallest window there is."""
    model = load_streamed_diffusion_model(path, **options)
    model.stream.residency.ceiling = model.stream.residency.least
    return model


@pytest.mark.every_other
@pytest.mark.parametrize("held", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("storage", ["fp32", "fp8_e4m3fn"])
def test_weights_may_be_held_in_another_type(studio: Studio, scenes: dict[str, Scene], storage: str, held: Any) -> None:
    """Stock then casts at every use, as on a card that computes in fp16 what is stored in fp8."""
    path = str(checkpoints.write("wan_t2v", studio.folder, storage))
    ours, stock = least(path, dtype=held), comfy.sd.load_diffusion_model(path, model_options={"dtype": held})
    assert ours.model.manual_cast_dtype == stock.model.manual_cast_dtype is not None
    assert torch.equal(sample(ours, scenes["wan_t2v"]), sample(stock, scenes["wan_t2v"]))


@pytest.mark.parametrize("kind", ["wan_t2v", "wan_vace"])
def test_what_an_fp8_file_has_in_fp16_is_not_rounded(
    studio: Studio, scenes: dict[str, Scene], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock makes fp8 of norms, biases and modulations too, where it holds the model in fp8: always, or what is too large
    for the card otherwise."""
    monkeypatch.setattr(comfy.model_management, "supports_fp8_compute", lambda *_: True)
    path = str(checkpoints.write(kind, studio.folder, "fp8_e4m3fn"))
    ours, stock = least(path), comfy.sd.load_diffusion_model(path)
    with as_stored():
        kept = comfy.sd.load_diffusion_model(path)
    exact = comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float32})
    assert ours.model.get_dtype() is stock.model.get_dtype() is torch.float8_e4m3fn
    latents, rounded, wanted, truth = (sample(model, scenes[kind]) for model in (ours, stock, kept, exact))
    assert torch.equal(latents, wanted)
    assert 2 * distance(latents, truth) < distance(rounded, truth)
    tensors = dict(ours.model.diffusion_model.named_parameters())
    assert tensors["blocks.0.self_attn.q.weight"].dtype is torch.float8_e4m3fn
    assert {
        tensors[f"blocks.0.{name}"].dtype for name in ("modulation", "self_attn.q.bias", "self_attn.norm_q.weight")
    } == {torch.float16}


@pytest.mark.parametrize("storage", ["fp32", "fp16", "fp8_e4m3fn", "fp8_comfy_quant"])
def test_it_loads_where_stock_pages_weights_itself(
    studio: Studio, scenes: dict[str, Scene], storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its dynamic memory stock's operations make their weights as they load them, in the file's own type."""
    path = str(checkpoints.write("wan_t2v", studio.folder, storage))
    wanted = sample(comfy.sd.load_diffusion_model(path), scenes["wan_t2v"])
    with monkeypatch.context() as patch:
        patch.setattr(comfy.memory_management, "aimdo_enabled", True)
        ours = least(path)
    assert torch.equal(sample(ours, scenes["wan_t2v"]), wanted)


@pytest.mark.parametrize("kind", ["wan_t2v", "wan_vace"])
def test_the_file_is_not_in_memory(studio: Studio, kind: str) -> None:
    ours = load_streamed_diffusion_model(str(checkpoints.write(kind, studio.folder, "fp8_scaled")))
    tensors = dict(ours.model.named_parameters())
    assert all(getattr(tensors[key], "_qdata", tensors[key]).is_meta for key in ours.stream.keys)
    matrices = [key for key, tensor in tensors.items() if "blocks." in key and tensor.ndim == 2]
    assert matrices and ours.stream.keys >= set(matrices)
    assert ours.stream.residency.held == 0 and ours.loaded_size() == 0


def test_the_loader_streams_when_it_is_asked_to(path: str) -> None:
    policy = fusion.KernelPolicy.of("off")
    assert not isinstance(fusion.load_diffusion_model(path, policy), StreamingModelPatcher)
    for budget, ceiling in ((0.5, GIB // 2), (-1.0, None)):
        model = fusion.load_diffusion_model(path, policy, budget)
        assert isinstance(model, StreamingModelPatcher) and model.stream.residency.ceiling == ceiling
        assert model.model_options["transformer_options"][attention.HOOK].policy is policy


def test_automatic_loads_as_stock_what_cannot_stream_and_says_so(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that stock knows and whose blocks are in none of the lists that stream."""
    monkeypatch.setattr(wan_order, "in_order", lambda _net: [])
    LEDGER.clear()
    model = fusion.load_diffusion_model(path, vram_budget=-1.0)
    assert not isinstance(model, StreamingModelPatcher)
    assert any("is a model without transformer blocks" in message for message in LEDGER.messages)
    with pytest.raises(NotStreamable):
        fusion.load_diffusion_model(path, vram_budget=0.5)


def test_blocks_stream_in_the_order_in_which_they_run(studio: Studio, scenes: dict[str, Scene]) -> None:
    ours = least(str(checkpoints.write("wan_vace", studio.folder, "fp32")))
    sample(ours, scenes["wan_vace"])
    names = [layer.name for layer in ours.stream.layers]
    assert names == ["blocks.0", "vace_blocks.0", "blocks.1", "blocks.2", "vace_blocks.1", "blocks.3"]
    uses = [entry.layer for entry in ours.stream.residency.ledger.entries if entry.kind == "use"]
    assert uses == names * (len(uses) // len(names)) and len(uses) >= 2 * len(names)


def test_q_k_and_v_lie_side_by_side(path: str) -> None:
    ours = load_streamed_diffusion_model(path)
    names = [weight.name for weight in ours.stream.layers[0].weights]
    assert names[:3] == ["self_attn.q.weight", "self_attn.k.weight", "self_attn.v.weight"]


def test_an_object_patch_is_not_lost(path: str, scenes: dict[str, Scene], expected: torch.Tensor) -> None:
    """ModelSamplingSD3's shift."""
    stock, ours = comfy.sd.load_diffusion_model(path), least(path)
    shifted = [ModelSamplingSD3().patch(model, 2.0)[0] for model in (stock, ours)]
    wanted = sample(shifted[0], scenes["wan_t2v"])
    assert not torch.equal(wanted, expected)
    for _ in range(2):  # the second time it is loaded already
        assert torch.equal(sample(shifted[1], scenes["wan_t2v"]), wanted)
        assert torch.equal(sample(ours, scenes["wan_t2v"]), expected)


def test_injections_are_in_when_stocks_are(path: str, scenes: dict[str, Scene]) -> None:
    """Extra modules of other packs: in while it runs, out while weights are loaded, the same number of times."""

    def watched(model: Any) -> tuple[Any, list[str]]:
        model, seen = model.clone(), []
        injection = comfy.patcher_extension.PatcherInjection(
            inject=lambda patcher: seen.append("in"), eject=lambda patcher: seen.append("out")
        )
        model.set_injections("test", [injection])
        return model, seen

    found = []
    for model, seen in (watched(comfy.sd.load_diffusion_model(path)), watched(least(path))):
        for _ in range(2):
            sample(model, scenes["wan_t2v"])
            assert model.is_injected and seen[-1] == "in"
        comfy.model_management.unload_all_models()
        assert not model.is_injected and seen[-1] == "out"
        found.append(seen)
    assert found[0] == found[1] and found[0].count("in") == found[0].count("out")


def test_other_nodes_patches_work_inside(path: str, scenes: dict[str, Scene]) -> None:
    """Block replacement, with and without the block itself, attention patches, a forward of one's own, wrappers."""

    def halved(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        return {"img": extra["original_block"](args)["img"] * 0.5}

    def skipped(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        return {"img": args["img"]}

    def patched(model: Any) -> Any:
        model = model.clone()
        model.set_model_patch_replace(halved, "dit", "double_block", 1)
        model.set_model_patch_replace(skipped, "dit", "double_block", 2)
        model.set_model_attn1_patch(lambda args: args["x"] * 0.9)
        forward = model.get_model_object("diffusion_model.blocks.3.forward")
        model.add_object_patch("diffusion_model.blocks.3.forward", lambda x, **more: forward(x, **more) * 1.1)
        model.add_wrapper(
            comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL,
            lambda executor, *args, **more: executor(*args, **more) * 1.2,
        )
        return model

    ours = patched(least(path))
    wanted = sample(patched(comfy.sd.load_diffusion_model(path)), scenes["wan_t2v"])
    assert torch.equal(sample(ours, scenes["wan_t2v"]), wanted)


def test_a_compute_type_and_a_weight_wrapper_come_and_go(
    path: str, scenes: dict[str, Scene], expected: torch.Tensor
) -> None:
    def changed(model: Any) -> Any:
        model = model.clone()
        model.set_model_compute_dtype(torch.bfloat16)
        model.add_weight_wrapper("diffusion_model.blocks.0.ffn.0.weight", lambda weight: weight * 1.5)
        return model

    ours, stock = least(path), comfy.sd.load_diffusion_model(path)
    wanted = sample(changed(stock), scenes["wan_t2v"])
    assert not torch.equal(wanted, expected)
    assert torch.equal(sample(changed(ours), scenes["wan_t2v"]), wanted)
    assert torch.equal(sample(ours, scenes["wan_t2v"]), expected)


def test_clones_share_one_stream(path: str, scenes: dict[str, Scene], expected: torch.Tensor) -> None:
    ours = least(path)
    clone = ours.clone()
    assert type(clone) is type(ours) and clone.stream is ours.stream and clone.is_clone(ours)
    assert torch.equal(sample(clone, scenes["wan_t2v"]), expected)
    pager = ours.stream.residency.pager
    del clone
    gc.collect()  # which detaches it
    assert ours.stream.residency.pager is pager and ours.stream.residency.held > 0
    assert torch.equal(sample(ours, scenes["wan_t2v"]), expected) and ours.stream.residency.pager is pager


def test_another_gpu_makes_its_own(path: str, scenes: dict[str, Scene], expected: torch.Tensor) -> None:
    ours = load_streamed_diffusion_model(path, 1.0)
    factory, arguments = ours.cached_patcher_init
    again = factory(*arguments, disable_dynamic=True)
    assert again.model is not ours.model and again.stream.residency.ceiling == GIB
    deep = ours.deepclone_multigpu(new_load_device=torch.device("cpu"))
    assert deep.stream is not ours.stream
    assert torch.equal(sample(deep, scenes["wan_t2v"]), expected)


def test_what_needs_all_weights_is_refused(path: str) -> None:
    ours = load_streamed_diffusion_model(path)
    key = "diffusion_model.blocks.0.ffn.0.weight"
    with pytest.raises(NotWhileStreaming, match=f"{key} streams"):
        ours.patch_weight_to_device(key)
    with pytest.raises(NotWhileStreaming, match="cannot be copied"):
        copy.deepcopy(ours.model)
    comfy.model_management.unload_all_models()


@pytest.mark.deep
@pytest.mark.parametrize("keys", [["diffusion_model"], [f"diffusion_model.blocks.{i}" for i in range(4)]])
def test_torch_compile_goes_around_it(
    path: str, scenes: dict[str, Scene], expected: torch.Tensor, keys: list[str]
) -> None:
    """Dynamo traces the model and leaves the pager alone; a backend that compiles nothing gives the same numbers."""
    ours = least(path)
    compiled = ours.clone()
    set_torch_compile_wrapper(compiled, backend="eager", keys=keys)
    assert torch.equal(sample(compiled, scenes["wan_t2v"]), expected)
    assert torch.equal(sample(ours, scenes["wan_t2v"]), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("flag", "held"), [("fp8_e4m3fn_unet", torch.float8_e4m3fn), ("fp8_e5m2_unet", torch.float8_e5m2)]
)
def test_weights_are_held_in_fp8_where_comfyui_is_told_to(
    studio: Studio, scenes: dict[str, Scene], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, flag: str, held: Any
) -> None:
    """The matrices of the blocks, and no more: the numbers of a file in which these were rounded."""
    path = checkpoints.write("wan_t2v", studio.folder, "fp16")
    tensors = load_file(path)
    matrices = {name for name, tensor in tensors.items() if name.startswith("blocks.") and tensor.ndim == 2}
    with safe_open(path, "pt") as file:
        rounded = {name: tensor.to(held).half() if name in matrices else tensor for name, tensor in tensors.items()}
        save_file(rounded, tmp_path / "rounded.safetensors", file.metadata())
    expected = sample(comfy.sd.load_diffusion_model(str(tmp_path / "rounded.safetensors")), scenes["wan_t2v"])
    with monkeypatch.context() as patch:
        patch.setattr(comfy.cli_args.args, flag, True)
        ours = least(str(path))
    types = {weight.extent.name: weight.device_dtype for layer in ours.stream.layers for weight in layer.weights}
    assert {name for name, dtype in types.items() if dtype is held} == matrices
    assert torch.equal(sample(ours, scenes["wan_t2v"]), expected)
    assert f"has as F16 are held as {str(held).removeprefix('torch.')}" in gather(ours).state


def test_other_files_are_told_apart(studio: Studio, path: str, tmp_path: Any) -> None:
    torch.save({}, tmp_path / "model.pth")
    with pytest.raises(NotStreamable, match=r"model\.pth: only \.safetensors .* Set vram_budget to 0"):
        load_streamed_diffusion_model(str(tmp_path / "model.pth"))
    with pytest.raises(WrongFile, match="Text Encoder Loader"):
        load_streamed_diffusion_model(str(checkpoints.write("umt5", studio.folder)))
    save_file({"what.weight": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(NotStreamable, match="is in no layout that can be streamed"):
        load_streamed_diffusion_model(str(tmp_path / "other.safetensors"))


@pytest.mark.parametrize("name", ["blocks.1.ffn.2.weight", "blocks.1.modulation", "head.head.bias"])
@pytest.mark.parametrize("storage", ["fp32", "fp8_scaled_blocks"])
def test_a_missing_weight_is_named(studio: Studio, tmp_path: Any, storage: str, name: str) -> None:
    source = checkpoints.write("wan_t2v", studio.folder, storage)
    weights = load_file(source)
    del weights[name]
    save_file(weights, tmp_path / "lacking.safetensors", dict(checkpoints.KINDS["wan_t2v"].metadata))
    with pytest.raises(WrongFile, match=rf"lacking\.safetensors lacks 1 of the model's weights: {name}"):
        load_streamed_diffusion_model(str(tmp_path / "lacking.safetensors"))


def test_a_whole_checkpoint_streams_too(
    path: str, tmp_path: Any, scenes: dict[str, Scene], expected: torch.Tensor
) -> None:
    weights = {f"model.diffusion_model.{name}": weight for name, weight in load_file(path).items()}
    save_file(weights, tmp_path / "whole.safetensors", dict(checkpoints.KINDS["wan_t2v"].metadata))
    assert torch.equal(sample(least(str(tmp_path / "whole.safetensors")), scenes["wan_t2v"]), expected)


def test_what_lives_as_long_as_the_process_says_nothing_at_its_end(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's module is emptied by then, and Python prints what its patchers' ends raise."""
    ours = least(path)
    with monkeypatch.context() as patch:
        patch.setattr(comfy.model_patcher, "CallbacksMP", None)
        ours.__del__(lambda: True)
        with pytest.raises(AttributeError, match="ON_DETACH"):
            ours.__del__()


def test_a_loaded_model_whose_file_is_another_one_leaves_nothing_loaded(
    path: str, scenes: dict[str, Scene], tmp_path: Path
) -> None:
    """ComfyUI has taken it from its list by then, and would not ask for the rest of its memory."""
    file = Path(shutil.copy(path, tmp_path))
    ours = load_streamed_diffusion_model(str(file))
    sample(ours, scenes["wan_t2v"])
    assert ours.loaded_size() > 0
    tensors = load_file(file)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file)
    with pytest.raises(FileChanged, match="holds another model"):
        sample(ours, scenes["wan_t2v"])
    assert ours.loaded_size() == 0

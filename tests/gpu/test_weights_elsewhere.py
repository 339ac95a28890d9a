"""A streamed model's weights where somebody else wants them: saved, merged, changed by hooks, and of a file that was touched."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.models import OFF, load, sample, stock, with_loras
from gpu.support import error, until_chosen

from fusestream import checkpoints
from fusestream.kernels_cuda import KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

LORAS = (("lora_ab", 0.8), ("lora_lokr", -0.5))
BACKENDS = ("slots", "managed")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("elsewhere")
    with torch.inference_mode():
        sample(stock(checkpoints.write("wan_t2v", folder)))
        yield folder


@pytest.mark.parametrize("storage", ["fp16", "bf16", "fp8_scaled"])
def test_what_is_saved_is_what_stock_saves(folder: Path, tmp_path: Path, storage: str) -> None:
    """With stock's weights patched one by one, as it saves what it has not loaded."""
    import comfy.sd
    from safetensors.torch import load_file

    path = checkpoints.write("wan_t2v", folder, storage)
    ours = with_loras(load(path, KernelPolicy()), folder, *LORAS)
    sample(ours)
    comfy.sd.save_checkpoint(str(tmp_path / "ours.safetensors"), ours)
    theirs = with_loras(stock(path), folder, *LORAS)
    saved = load_file(tmp_path / "ours.safetensors")
    assert len(saved) > 90
    for key in ours.stream.keys:
        wanted = theirs.patch_weight_to_device(key, device_to=theirs.load_device, return_weight=True)
        wanted = getattr(wanted, "_qdata", wanted).cpu()
        assert torch.equal(saved[f"model.{key}"].view(torch.uint8), wanted.view(torch.uint8)), key


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("second", ["streamed", "whole"])
def test_merges_are_stocks(folder: Path, backend: str, second: str) -> None:
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    paths = [checkpoints.write("wan_t2v", folder, "fp16", seed) for seed in (0, 1)]
    two = load(paths[1], backend=backend) if second == "streamed" else stock(paths[1])
    got = sample(ModelMergeSimple().merge(load(paths[0], backend=backend), two, 0.4)[0])
    assert torch.equal(got, sample(ModelMergeSimple().merge(stock(paths[0]), stock(paths[1]), 0.4)[0]))


def hooking(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on prompts are sampled with a LoRA by a hook, the others without."""
    import comfy.hooks
    import comfy.sample
    import comfy.utils

    hooks = comfy.hooks.create_hook_lora(
        comfy.utils.load_torch_file(str(checkpoints.write("lora_ab", folder))), 0.9, 0.0
    )
    plain = comfy.sample.sample

    def sample_hooked(*given: Any, **named: Any) -> Any:
        words = comfy.hooks.set_hooks_for_conditioning(given[6], hooks)
        return plain(*given[:6], words, *given[7:], **named)

    monkeypatch.setattr(comfy.sample, "sample", sample_hooked)


@pytest.mark.parametrize("window", ["least", "all"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_change_weights_within_a_step(folder: Path, backend: str, window: str, monkeypatch: Any) -> None:
    """On the one prompt, not on the other, over a plain LoRA; and gone when the run is over."""
    path = checkpoints.write("wan_t2v", folder, "fp16")

    ours, theirs = load(path, backend=backend), stock(path)
    if window == "all":
        ours.stream.residency.ceiling = None
    ours, theirs = (with_loras(model, folder, ("lora_lokr", 0.5)) for model in (ours, theirs))
    plain = sample(ours)
    with monkeypatch.context() as patch:
        hooking(patch, folder)
        assert torch.equal(sample(ours), sample(theirs))
    assert torch.equal(sample(ours), plain)


def test_hooks_over_our_kernels(folder: Path, monkeypatch: Any) -> None:
    """In one pass with the LoRA below them: as near to fp32 as stock's fp16."""
    path = checkpoints.write("wan_t2v", folder, "fp32")
    models = [
        with_loras(load(path, policy, dtype=dtype), folder, ("lora_kohya", 0.5))
        for policy, dtype in ((KernelPolicy(), torch.float16), (OFF, torch.float16), (OFF, torch.float32))
    ]

    plain = until_chosen(lambda: sample(models[0]))
    with monkeypatch.context() as patch:
        hooking(patch, folder)
        ours, theirs, exact = (until_chosen(partial(sample, model)) for model in models)
    print(f"hooks: error {error(ours, exact):.3g}, stock's {error(theirs, exact):.3g}")
    assert error(ours, exact) <= 1.2 * error(theirs, exact) < error(plain, exact)
    assert torch.equal(sample(models[0]), plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_was_touched_streams_on(folder: Path, tmp_path: Path, backend: str) -> None:
    from fusestream.memory import FileChanged

    path = tmp_path / "model.safetensors"
    content = checkpoints.write("wan_t2v", folder).read_bytes()
    path.write_bytes(content)
    model = load(path, KernelPolicy(), backend)
    want = sample(model)
    stamp = path.stat().st_mtime_ns
    for later in (1, 2):
        path.write_bytes(content)
        os.utime(path, ns=(0, stamp + later * 10**9))
        assert torch.equal(sample(model), want)
    changed = bytearray(content)
    changed[model.stream.residency.source.extents["head.modulation"].end - 1] ^= 1
    path.write_bytes(changed)
    os.utime(path, ns=(0, stamp + 3 * 10**9))
    with pytest.raises(FileChanged, match="another model"):
        sample(model)
    path.write_bytes(content)
    assert torch.equal(sample(model), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_held_in_fp8_where_that_is_asked_for(
    folder: Path, tmp_path: Path, backend: str, monkeypatch: Any
) -> None:
    """The same numbers as of a file whose matrices were rounded to fp8."""
    import comfy.cli_args
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = checkpoints.write("wan_t2v", folder, "fp16")
    rounded = {
        name: tensor.to(torch.float8_e4m3fn).half() if name.startswith("blocks.") and tensor.ndim == 2 else tensor
        for name, tensor in load_file(path).items()
    }
    with safe_open(path, "pt") as file:
        save_file(rounded, tmp_path / "rounded.safetensors", file.metadata())
    with monkeypatch.context() as patch:
        patch.setattr(comfy.cli_args.args, "fp8_e4m3fn_unet", True)
        model = load(path, backend=backend)
    as_it_is, twin = load(path), load(tmp_path / "rounded.safetensors")
    assert model.stream.layers[0].nbytes < 0.6 * as_it_is.stream.layers[0].nbytes
    assert torch.equal(sample(model), sample(twin))

"""A U-Net's convolutions have their weights laid out for the kernels when they arrive, and nothing else is any different for it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import comfy.ldm.modules.diffusionmodules.openaimodel as stock
import comfy.lora
import comfy.model_management as mm
import comfy.ops
import comfy.sd
import comfy.utils
import family_scenes
import pytest
import torch
from in_halves import HALF, OFF, load
from packed_files import packed_file
from plain_backends import BACKENDS, Backends, plain_backends
from safetensors.torch import load_file
from scenes import distance, sample
from torch import Tensor, nn
from unet_models import handed_back, lora_for

from bed.depth import is_thorough
from fusestream import checkpoints
from fusestream.fusion import KernelPolicy
from fusestream.fusion.families.unet import net, pictures
from fusestream.fusion.fused import attention
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.patcher import saving
from fusestream.fusion.vae import memory_limits
from fusestream.fusion.weights import channels_last, lora
from fusestream.fusion.weights.channels_last import LaidOut, lay_out
from fusestream.kernels_cuda import LEDGER
from fusestream.memory import HostBackend

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")
KINDS = ("sd15", "sdxl")
LAST = torch.channels_last


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("laid out")


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backends]:
    """As on a card: what does not stream is laid out, too."""
    monkeypatch.setattr(channels_last, "serves", lambda _device: True)
    with plain_backends() as found:
        yield found


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The convolutions whose weights are copied for a product."""
    found: list[Any] = []

    @contextlib.contextmanager
    def weights(module: Any, policy: KernelPolicy, x: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        with memory_limits.weights(module, policy, x) as (weight, bias):
            if weight.data_ptr() != module.weight.data_ptr():
                found.append(module)
            yield weight, bias

    monkeypatch.setattr(pictures, "weights", weights)
    return found


def on_card(backends: Backends, path: Path, *side: Any, kind: str = "pinned") -> Any:
    model = load(path, *side)
    backends.become(model, kind)
    return model


def laid_out_in(model: Any) -> set[str]:
    return {weight.name for layer in model.stream.layers for weight in layer.weights if weight.channels_last}


def convolutions(model: Any) -> dict[str, Any]:
    """By their names in the model: those with taps."""
    return {
        name: one
        for name, one in model.model.named_modules()
        if isinstance(one, nn.Conv2d) and one.kernel_size != (1, 1)
    }


# -------------------------------------------------------------------------------------------------------------- passing


@pytest.mark.deep("sdxl*")
@pytest.mark.parametrize("route", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied_for_a_call_and_the_latents_are_the_same(
    folder: Path, backends: Backends, copied: list[Any], kind: str, route: str
) -> None:
    path, scene = checkpoints.write(kind, folder), family_scenes.inputs(kind)
    on_cpu, model = load(path), on_card(backends, path, kind=route)
    want = sample(on_cpu, scene)
    assert copied and all(isinstance(one, LaidOut) for one in copied), "on the CPU they come as the file has them"
    copied.clear()
    for _ in range(2):
        assert torch.equal(sample(model, scene), want)
    assert not copied and not handed_back() and {"in_layers.2.weight", "out_layers.3.weight"} <= laid_out_in(model)
    assert model.stream.residency.ledger.peak("VRAM") <= model.stream.residency.ceiling
    mm.unload_all_models()
    assert torch.equal(sample(model, scene), want) and not copied


@pytest.mark.every_other
@pytest.mark.parametrize("kind", KINDS)
def test_where_all_of_it_stays_it_stays_laid_out(
    folder: Path, backends: Backends, copied: list[Any], kind: str
) -> None:
    path, scene = checkpoints.write(kind, folder), family_scenes.inputs(kind)
    model = on_card(backends, path)
    model.stream.residency.ceiling = None
    want = sample(model, scene)
    assert not model.stream.residency.pager.plan.streamed and torch.equal(sample(model, scene), want) and not copied
    addresses = []
    for _ in range(2):
        with model.stream.standing_still() as stands:
            assert stands and all(one.weight.is_contiguous(memory_format=LAST) for one in convolutions(model).values())
            addresses.append([one.weight.data_ptr() for one in convolutions(model).values()])
        assert torch.equal(sample(model, scene), want)
    assert addresses[0] == addresses[1], "what is captured finds them where they were"
    before = model.stream.residency.held
    model.partially_unload(torch.device("cpu"), before // 2)
    assert model.stream.residency.held < before and torch.equal(sample(model, scene), want) and not copied


@pytest.mark.deep("bf16")
@pytest.mark.every_other
@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp8_e4m3fn"])
def test_of_whatever_type_the_file_has(folder: Path, backends: Backends, storage: str) -> None:
    path, scene = checkpoints.write("sdxl", folder, storage), family_scenes.inputs("sdxl")
    model = on_card(backends, path)
    assert torch.equal(sample(model, scene), sample(load(path), scene)) and laid_out_in(model)


@pytest.mark.deep
def test_fp8_becomes_halves_as_it_lies(folder: Path, backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    path, scene = str(checkpoints.write("sd15", folder)), family_scenes.inputs("sd15")
    turned: list[Any] = []
    contiguous = Tensor.contiguous

    def counted(t: Tensor, **how: Any) -> Tensor:
        if t.dtype is HALF and t.shape[2:].numel() == 9 and not t.is_contiguous(**how):
            turned.append(how)
        return contiguous(t, **how)

    monkeypatch.setattr(Tensor, "contiguous", counted)
    monkeypatch.setattr(mm, "unet_manual_cast", lambda *_: HALF)
    on_cpu, model = (load_streamed_diffusion_model(path, dtype=torch.float8_e4m3fn) for _ in range(2))
    backends.become(model, "pinned")
    want = sample(on_cpu, scene)
    assert len(turned) > 10 and not turned.clear()
    assert torch.equal(sample(model, scene), want) and not turned and not handed_back() and laid_out_in(model)


@pytest.mark.deep
def test_a_packed_files_convolutions(folder: Path, backends: Backends) -> None:
    packed = packed_file(folder / "sd15.gguf", load_file(checkpoints.write("sd15", folder)), "Q8_0")
    model, scene = on_card(backends, packed), family_scenes.inputs("sd15")
    assert torch.equal(sample(model, scene), sample(load(packed), scene)) and laid_out_in(model)


def test_an_interrupt(folder: Path, backends: Backends, copied: list[Any]) -> None:
    path, scene = checkpoints.write("sd15", folder), family_scenes.inputs("sd15")
    model = on_card(backends, path, kind="registered")
    want = sample(model, scene)
    mm.interrupt_current_processing()
    with pytest.raises(mm.InterruptProcessingException):
        sample(model, scene)
    assert torch.equal(sample(model, scene), want) and not copied


# -------------------------------------------------------------------------------------------------------------- patches

Tensors = dict[str, Tensor]


def patches_of(n: int, c: int, noise: Callable[..., Tensor]) -> Sequence[Tensors]:
    """What LoRA files bring for a convolution [n, c, 3, 3], a kind each."""
    pair = {"lora_up.weight": noise(n, 2, 1, 1), "lora_down.weight": noise(2, c, 3, 3)}
    low = {f"hada_w{i}_{side}": noise(*shape) for i in (1, 2) for side, shape in (("a", (n, 2)), ("b", (2, 9 * c)))}
    low_core = {f"hada_w{i}_{side}": noise(2, size) for i in (1, 2) for side, size in (("a", n), ("b", c))}
    products = {"a1.weight": noise(c, 2), "a2.weight": noise(2, c), "b1.weight": noise(n, 2)}
    return (
        pair,
        {**pair, "lora_down.weight": noise(2, c, 1, 1), "lora_mid.weight": noise(2, 2, 3, 3)},
        {**pair, "dora_scale": noise(n, 1, 1, 1).abs() + 1},
        {**pair, "dora_scale": noise(1, c, 1, 1).abs() + 1},
        low,
        {**low_core, "hada_t1": noise(2, 2, 3, 3), "hada_t2": noise(2, 2, 3, 3)},
        {"lokr_w1": noise(4, 4), "lokr_w2": noise(n // 4, c // 4, 3, 3)},
        {**products, "b2.weight": noise(2, 9 * c)},
        {"oft_blocks": noise(n // 8, 8, 8)},
        {"oft_blocks": noise(2, n // 8, 8, 8), "alpha": torch.tensor(0.5)},
        {"diff": noise(n, c, 3, 3), "diff_b": noise(n)},
        {"set_weight": noise(n, c, 3, 3)},
    )


def every_kind_for(model: Any) -> Tensors:
    """One kind for each convolution with taps, of blocks and of what does not stream, in turns."""
    generator = torch.Generator().manual_seed(4)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    found: Tensors = {}
    wide = {name: one.weight.shape for name, one in convolutions(model).items() if min(one.weight.shape[:2]) >= 64}
    for i, (name, (n, c, *_)) in enumerate(wide.items()):
        kinds = patches_of(n, c, noise)
        found |= {f"{name}.{part}": tensor for part, tensor in kinds[i % len(kinds)].items()}
    assert len(wide) > len(kinds)
    return found


def patched(model: Any, file: Tensors, strength: float = 0.8) -> Any:
    found, _ = comfy.sd.load_lora_for_models(model, None, file, strength, 0.0)
    assert len(found.patches) >= len({name.rpartition(".")[0].removesuffix(".lora_up") for name in file}) // 2 > 10
    return found


WAYS = list(itertools.product((HALF, torch.float8_e4m3fn), ("in the weight", "in the product"), ("pinned", "managed")))


@pytest.mark.deep("held1*", "held2-in the weight*", "held3*")
@pytest.mark.every_other
@pytest.mark.parametrize(("held", "where", "route"), WAYS if is_thorough() else [WAYS[1], WAYS[2], WAYS[4], WAYS[7]])
def test_all_that_lora_files_bring(
    folder: Path, backends: Backends, route: str, where: str, held: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each convolution and for each product the same bits, and the same as before when it is gone."""
    if where == "in the product":
        monkeypatch.setattr(lora, "serves", lambda _device: True)
    monkeypatch.setattr(mm, "unet_manual_cast", lambda *_: HALF)
    path, scene = str(checkpoints.write("sd15", folder)), family_scenes.inputs("sd15")
    on_cpu, model = (load_streamed_diffusion_model(path, dtype=held) for _ in range(2))
    backends.become(model, route)
    if held is not HALF:  # what is written and what is added on the way is rounded otherwise
        model.stream.residency.ceiling = None
        monkeypatch.setattr(HostBackend, "is_writable", route != "managed")
    file = every_kind_for(on_cpu)
    with monkeypatch.context() as patch:
        patch.setattr(channels_last, "serves", lambda _device: False)
        plain, want = sample(on_cpu, scene), sample(patched(on_cpu, file), scene)
    assert distance(want, plain) > 0.01
    changed, as_in_file, stocks = patched(model, file), [], comfy.lora.calculate_weight

    def noted(patches: Any, weight: Tensor, *others: Any, **more: Any) -> Any:
        as_in_file.append(weight.is_contiguous())
        return stocks(patches, weight, *others, **more)

    monkeypatch.setattr(comfy.lora, "calculate_weight", noted)
    for one, result in ((changed, want), (model, plain), (changed, want)):
        assert torch.equal(sample(one, scene), result)
    assert not handed_back() and laid_out_in(model) and len(as_in_file) > 20 and all(as_in_file)


def test_each_kind_does_something(folder: Path, backends: Backends) -> None:
    """And a weight that is asked for is what the model on the CPU tells, as the file has it."""
    path = checkpoints.write("sd15", folder)
    on_cpu, model = load(path), on_card(backends, path)
    file, own = every_kind_for(on_cpu), load_file(path)
    ours, theirs = patched(model, file), patched(on_cpu, file)
    sample(model, family_scenes.inputs("sd15"))
    for name in convolutions(model):
        key = f"{name}.weight"
        if key not in ours.patches:
            continue
        found = [one.patch_weight_to_device(key, torch.device("cpu"), return_weight=True) for one in (ours, theirs)]
        assert torch.equal(*found) and (found[0].is_contiguous() or key not in model.stream.keys)
        assert distance(found[0].float(), own[key.removeprefix("diffusion_model.")].float()) > 1e-5, key


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS if is_thorough() else KINDS[:1])
def test_a_lora_by_a_hook(folder: Path, backends: Backends, kind: str) -> None:
    path, scene = checkpoints.write(kind, folder), family_scenes.inputs(kind)
    on_cpu, model = load(path), on_card(backends, path)
    hooks = comfy.hooks.create_hook_lora(lora=lora_for(on_cpu), strength_model=0.9, strength_clip=0.0)
    given = scene._replace(positive=comfy.hooks.set_hooks_for_conditioning(scene.positive, hooks))
    want = sample(on_cpu, given)
    assert distance(want, sample(on_cpu, scene)) > 0.01
    for _ in range(2):
        assert torch.equal(sample(model, given), want)


# ---------------------------------------------------------------------------------------------------------------- stock's


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS if is_thorough() else KINDS[:1])
def test_off_is_stocks_model_whatever_lies_how(
    folder: Path, backends: Backends, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched off by a node behind the loader, and in the loader, which then has nothing laid out."""
    path, scene = checkpoints.write(kind, folder), family_scenes.inputs(kind)
    monkeypatch.setattr(mm, "unet_manual_cast", lambda *_: HALF)
    stocks = sample(comfy.sd.load_diffusion_model(str(path), model_options={"dtype": HALF}), scene)
    model = on_card(backends, path)
    sample(model, scene)
    off = model.clone()
    attention.install(off, OFF)
    seen: list[bool] = []
    convolve = nn.Conv2d._conv_forward

    def noted(conv: Any, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        seen.append(weight.is_contiguous())
        return convolve(conv, x, weight, bias)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", noted)
    assert torch.equal(sample(off, scene), stocks) and len(seen) > 20 and all(seen)
    for one in model.model.modules():
        assert not isinstance(one, LaidOut) or one.weight.is_meta or not one.weight.is_contiguous(), "and back"
    without = on_card(backends, path, OFF)
    assert torch.equal(sample(without, scene), stocks) and not laid_out_in(without)
    assert not [one for one in without.model.modules() if isinstance(one, LaidOut)]


def test_a_part_that_another_node_has_changed_is_stocks(folder: Path, backends: Backends) -> None:
    """As nodes for seamless pictures do it: they find the weight as stock has it."""
    path, scene = checkpoints.write("sd15", folder), family_scenes.inputs("sd15")

    def around(conv: Any, x: Tensor, weight: Tensor, bias: Any) -> Tensor:
        assert weight.is_contiguous()
        padded = nn.functional.pad(x, (1, 1, 1, 1), mode="circular")
        return nn.functional.conv2d(padded, weight.view(weight.shape), bias)

    found = []
    for model in (load(path), on_card(backends, path)):
        block = model.model.diffusion_model.input_blocks[1][0]
        block.in_layers[2]._conv_forward = around.__get__(block.in_layers[2])
        found.append(sample(model, scene))
    assert torch.equal(*found) and handed_back() == {"another node has replaced in_layers.2"}


def test_functions_of_other_nodes_are_given_weights_as_the_file_has_them(folder: Path, backends: Backends) -> None:
    path, scene, seen = checkpoints.write("sd15", folder), family_scenes.inputs("sd15"), []

    def halved(weight: Tensor) -> Tensor:
        seen.append(weight.is_contiguous())
        return weight * 0.5

    found = []
    for model in (load(path), on_card(backends, path)):
        changed = model.clone()
        for key in ("middle_block.0.in_layers.2.weight", "output_blocks.0.1.conv.weight"):
            changed.add_weight_wrapper(f"diffusion_model.{key}", halved)
        found.append(sample(changed, scene))
    assert torch.equal(*found) and seen and all(seen)


# ---------------------------------------------------------------------------------------------------------------- the rest


def test_what_does_not_stream_lies_as_in_the_file_while_it_is_not_loaded(folder: Path, backends: Backends) -> None:
    path, scene = checkpoints.write("sd15", folder), family_scenes.inputs("sd15")
    model = on_card(backends, path)
    resting = {
        name: one
        for name, one in convolutions(model).items()
        if f"{name}.weight" not in model.stream.keys and isinstance(one, LaidOut)
    }
    assert any("conv" in name for name in resting) and len(resting) > 2
    want = {name: one.weight.clone() for name, one in resting.items()}
    changed = patched(model, lora_for(model))
    for one, lies_last in ((model, True), (None, False), (changed, True), (model, True), (None, False)):
        mm.unload_all_models() if one is None else sample(one, scene)
        for name, conv in resting.items():
            assert conv.weight.is_contiguous(memory_format=LAST) == lies_last, name
            assert conv.weight.is_contiguous() != lies_last
            assert torch.equal(conv.weight, want[name]) or one is changed


def test_a_saved_model_is_the_files(folder: Path, backends: Backends, tmp_path: Path) -> None:
    path, scene = checkpoints.write("sd15", folder), family_scenes.inputs("sd15")
    model = on_card(backends, path)
    sample(model, scene)
    saving.attach()
    comfy.utils.save_torch_file(model.model_state_dict_for_saving(), str(tmp_path / "saved.safetensors"))
    want = load_file(path)
    saved = {name.removeprefix("diffusion_model."): t for name, t in load_file(tmp_path / "saved.safetensors").items()}
    assert all(torch.equal(saved[name], tensor.to(saved[name].dtype)) for name, tensor in want.items())


@pytest.mark.parametrize("kind", [stock.ResBlock, stock.Downsample])
def test_which_convolutions_are_laid_out(kind: Any) -> None:
    def marked(dtype: torch.dtype, policy: KernelPolicy, **options: Any) -> list[bool]:
        sizes = (32, 16, 0, 64) if kind is stock.ResBlock else (8, True)
        part = kind(*sizes, dtype=dtype, operations=comfy.ops.manual_cast, **options)
        net.fuse(nn.ModuleList([part]), policy)
        return [isinstance(one, LaidOut) for one in part.modules() if isinstance(one, nn.Conv2d)]

    taps = [True, True, False] if kind is stock.ResBlock else [True]
    none = [False] * len(taps)
    assert marked(HALF, KernelPolicy()) == marked(HALF, KernelPolicy.of(group_norm_silu="off")) == taps
    assert marked(torch.float8_e5m2, KernelPolicy.of("on")) == taps
    assert marked(torch.bfloat16, KernelPolicy()) == marked(torch.float32, KernelPolicy()) == none
    assert marked(HALF, OFF) == marked(HALF, KernelPolicy.of(conv="off")) == none
    if kind is stock.ResBlock:
        assert marked(HALF, KernelPolicy(), up=True) == none, "a part that is stock's for good"


def test_a_convolution_that_fails_has_its_weight_back() -> None:
    conv = comfy.ops.manual_cast.Conv2d(8, 8, 3, bias=False, dtype=HALF)
    conv.weight = nn.Parameter(torch.randn(8, 8, 3, 3, dtype=HALF).contiguous(memory_format=LAST))
    held = conv.weight
    lay_out(conv)
    x = torch.randn(1, 8, 5, 5, dtype=HALF)
    assert torch.equal(conv(x), nn.functional.conv2d(x, held.contiguous())) and conv.weight is held
    with pytest.raises(RuntimeError):
        conv(torch.randn(1, 7, 5, 5, dtype=HALF))
    assert conv.weight is held

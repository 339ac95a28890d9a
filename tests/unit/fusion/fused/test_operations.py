"""Models that no family knows multiply a file's integers through our ops, under the policy of each call, and else are stock's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.ops
import family_scenes
import in_halves
import int8_files
import pytest
import torch
from scenes import distance, sample
from torch import nn

from fusestream import checkpoints
from fusestream.fusion.base.hooks import RUNNING
from fusestream.fusion.base.policy import put_on
from fusestream.fusion.fused import operations, quality
from fusestream.fusion.fused.quality import AsStored
from fusestream.fusion.report.gathering import gather
from fusestream.fusion.stream import vram_pool
from fusestream.kernels_cuda import LEDGER, KernelPolicy
from fusestream.kernels_cuda.ops.matmul.mlp import CHUNK_BYTES
from fusestream.kernels_cuda.registry import Op

AUTO, PRECISE, TURBO, OFF = (
    KernelPolicy.of(mode, precision=precision)
    for mode, precision in (("auto", "auto"), ("auto", "precise"), ("auto", "turbo"), ("off", "precise"))
)
STRANGERS = ("krea2", "hunyuan_video_15", "sd3")
BF16 = torch.bfloat16
INT8 = {"linear_int8"}

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strangers")


def files(kind: str, folder: Path, storage: str = "convrot") -> tuple[Path, Path]:
    """A tiny model of this kind with matrices of integers, and the same in halves."""
    return int8_files.write(checkpoints.write(kind, folder, "fp16"), folder, storage)


def latents(kind: str, path: Path, policy: KernelPolicy, dtype: torch.dtype) -> Any:
    with checkpoints.narrow.opened(comfy):
        model = in_halves.load(path, policy, dtype)
    found = sample(model, family_scenes.inputs(kind))
    return found.tensors[0] if hasattr(found, "tensors") else found


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", STRANGERS)
def test_integers_are_multiplied_by_our_ops_as_near_as_stock_does(kind: str, dtype: torch.dtype, folder: Path) -> None:
    of_int8, of_halves = files(kind, folder)
    exact = latents(kind, of_halves, OFF, torch.float32)
    theirs = latents(kind, of_int8, OFF, dtype)
    with in_halves.modes() as asked:
        ours = latents(kind, of_int8, AUTO, dtype)
    assert asked["linear_int8"] == {"auto"}
    assert not torch.equal(ours, theirs)
    assert distance(ours, exact) <= 1.25 * distance(theirs, exact)


def test_hidden_values_may_take_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    for free, wanted in ((3 * 2**30, 3 * 2**29), (2**20, CHUNK_BYTES), (0, CHUNK_BYTES)):
        monkeypatch.setattr(vram_pool, "free", lambda _, free=free: free)
        assert operations.room_for_hidden(card) == wanted
    assert operations.room_for_hidden(torch.device("cpu")) == CHUNK_BYTES


def test_numbers_of_4_bits(folder: Path) -> None:
    of_int4, of_halves = files("krea2", folder, "convrot_w4a4")
    exact, theirs = (latents("krea2", *side, torch.float32) for side in ((of_halves, OFF), (of_int4, OFF)))
    with in_halves.modes() as asked:
        ours = latents("krea2", of_int4, AUTO, BF16)
    assert asked["linear_int4"] == {"auto"} and distance(ours, exact) <= 1.25 * distance(theirs, exact)


@pytest.mark.parametrize("policy", [OFF, PRECISE], ids=["off", "precise"])
def test_where_the_policy_wants_no_integers_all_of_it_is_stocks(policy: KernelPolicy, folder: Path) -> None:
    of_int8, _ = files("krea2", folder)
    with in_halves.modes() as asked:
        found = latents("krea2", of_int8, policy, BF16)
    assert not asked.keys() & INT8
    assert torch.equal(found, latents("krea2", of_int8, OFF, BF16))


def test_each_call_is_under_its_own_policy(folder: Path) -> None:
    """A clone has another one; and outside of a call there is none."""
    of_int8, _ = files("krea2", folder)
    scene = family_scenes.inputs("krea2")
    with checkpoints.narrow.opened(comfy):
        ours, stocks = in_halves.load(of_int8, AUTO, BF16), in_halves.load(of_int8, OFF, BF16)
    off = ours.clone()
    put_on(off, OFF)
    plain = sample(stocks, scene)
    assert torch.equal(sample(off, scene), plain)
    assert not torch.equal(sample(ours, scene), plain)
    assert torch.equal(sample(off, scene), plain)
    assert ours.model.diffusion_model.__dict__[RUNNING].policy is None


def test_an_interrupt_leaves_no_policy_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_int8, _ = files("krea2", folder)
    with checkpoints.narrow.opened(comfy):
        model = in_halves.load(of_int8, AUTO, BF16)

    def interrupted(*_: Any) -> None:
        raise comfy.model_management.InterruptProcessingException

    with monkeypatch.context() as patch, pytest.raises(comfy.model_management.InterruptProcessingException):
        patch.setattr(Op, "run", interrupted)
        sample(model, family_scenes.inputs("krea2"))
    assert model.model.diffusion_model.__dict__[RUNNING].policy is None


# ------------------------------------------------------------------------------------------------------- one operation


class Alone(nn.Module):
    """A network of one of stock's Linears, with a weight as a file has it."""

    def __init__(self, **asked: Any) -> None:
        super().__init__()
        kind = comfy.ops.mixed_precision_ops(compute_dtype=BF16).Linear
        self.one: Any = kind(256, 64, bias=True, device="cpu", dtype=BF16)
        weight = int8_files.quantised(torch.randn(64, 256).to(BF16), int8_files.KINDS["convrot"])
        self.one.weight = nn.Parameter(weight, requires_grad=False)
        self.one.bias = nn.Parameter(torch.randn(64).to(BF16), requires_grad=False)
        self.one.layout_type, self.one.quant_format = int8_files.LAYOUT, "int8_tensorwise"
        for name, value in asked.items():
            setattr(self.one, name, value)
        self.fused = operations.fuse(self)

    def running(self, policy: KernelPolicy | None, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """What comes of it under this policy, and whether it was ours."""
        self.__dict__[RUNNING].policy = policy
        with in_halves.modes() as asked, torch.no_grad():
            return self.one(x), bool(asked.keys() & INT8)


X = torch.randn(2, 5, 256).to(BF16)


def test_a_product_has_its_bias_shape_and_type() -> None:
    net = Alone()
    for x in (X, X[0], X[0, 0], X[:, ::2], X.half()):
        found, is_ours = net.running(AUTO, x)
        wanted, _ = net.running(None, x)
        assert is_ours and found.shape == wanted.shape and found.dtype is wanted.dtype is x.dtype
        assert distance(found, wanted) < 0.02
    assert net.running(AUTO, X[:0])[0].shape == (0, 5, 64)


@pytest.mark.parametrize(
    "asked",
    [
        {"weight_function": [lambda weight: weight]},
        {"bias_function": [lambda bias: bias]},
        {"_full_precision_mm": True},
        {"comfy_force_cast_weights": True},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_others_ask_of_an_operation_is_stocks(asked: dict[str, Any]) -> None:
    net = Alone(**asked)
    (found, is_ours), (wanted, _) = net.running(AUTO, X), net.running(None, X)
    assert not is_ours and torch.equal(found, wanted)


def test_inputs_of_other_types_and_with_gradients_are_stocks() -> None:
    net = Alone()
    assert not net.running(AUTO, X.float())[1]
    net.__dict__[RUNNING].policy = AUTO
    with torch.enable_grad(), in_halves.modes() as asked:
        net.one(X.clone().requires_grad_())
    assert not asked


def test_an_operation_that_scales_its_input_is_left_alone() -> None:
    assert Alone().fused == 1
    assert Alone(pre_quant_scale=torch.ones(256)).fused == 0
    assert Alone(input_scale=torch.ones(1)).fused == 0


def test_another_nodes_forward_goes_before() -> None:
    net = Alone()
    net.one.forward = lambda x: x * 2
    assert torch.equal(net.running(AUTO, X)[0], X * 2)


# ------------------------------------------------------------------------------------------------------- what is told


@pytest.mark.parametrize(("kind", "meaning"), [("convrot", AsStored.INT8), ("convrot_w4a4", AsStored.INT4)])
def test_auto_says_that_integers_are_multiplied(kind: str, meaning: AsStored, folder: Path) -> None:
    of_integers, of_halves = files("krea2", folder, kind)
    with checkpoints.narrow.opened(comfy):
        assert quality.resolved(in_halves.load(of_integers, AUTO, BF16)) is meaning
        assert quality.resolved(in_halves.load(of_halves, AUTO, BF16)) is AsStored.STOCK


def test_the_report_tells_the_share_of_products_that_were_ours(folder: Path) -> None:
    of_int8, _ = files("sd3", folder)
    scene = family_scenes.inputs("sd3")
    with checkpoints.narrow.opened(comfy):
        ours, exact = (in_halves.load(of_int8, policy, BF16) for policy in (AUTO, PRECISE))
    for model in (ours, exact):
        sample(model, scene)
    found = re.search(r"(\d+)% of the multiplications of its products were FuseStream's", gather(ours).state)
    assert found and 80 < int(found[1]) < 100
    assert "ComfyUI multiplied the rest: " in gather(ours).state and operations.NO_INTEGERS in gather(ours).state
    told = gather(exact).state
    assert "0% of the multiplications" in told and operations.NO_KERNEL in told and operations.NO_INTEGERS in told


# ------------------------------------------------------------------------------------------------------- without BF16


@pytest.fixture
def without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an RTX 20, where stock computes a model without FP16 in FP32."""
    monkeypatch.setattr(operations, "narrows", lambda x: x.dtype is torch.float32)


@pytest.mark.parametrize("kind", STRANGERS)
def test_fp32_networks_multiply_halves_nearer_than_bf16_is(kind: str, folder: Path, without_bf16: None) -> None:
    path = checkpoints.write(kind, folder, "bf16")
    exact, in_bf16 = (latents(kind, path, OFF, dtype) for dtype in (torch.float32, BF16))
    with in_halves.modes() as asked:
        ours = latents(kind, path, AUTO, torch.float32)
    assert asked["linear"] == {"auto"} and not torch.equal(ours, exact)
    assert distance(ours, exact) < 0.25 * distance(in_bf16, exact)


@pytest.mark.parametrize("kind", ["krea2", "minimax_h3"])
def test_fp32_networks_multiply_a_files_integers(kind: str, folder: Path, without_bf16: None) -> None:
    of_int8, of_halves = files(kind, folder)
    exact, theirs = latents(kind, of_halves, OFF, torch.float32), latents(kind, of_int8, OFF, torch.float32)
    with in_halves.modes() as asked:
        ours = latents(kind, of_int8, AUTO, torch.float32)
    assert asked["linear_int8"] == {"auto"} and distance(ours, exact) <= 1.25 * distance(theirs, exact)


def test_fp32_networks_without_kernels_are_stocks(folder: Path, without_bf16: None) -> None:
    path = checkpoints.write("krea2", folder, "bf16")
    found = latents("krea2", path, KernelPolicy.of(linear="off"), torch.float32)
    assert torch.equal(found, latents("krea2", path, OFF, torch.float32))


def test_patches_of_integers_are_multiplied_too(folder: Path) -> None:
    """They are rounded into the file's integers as they arrive, as stock does; ours multiply the sum."""
    of_int8, of_halves = files("krea2", folder)
    scene, key = family_scenes.inputs("krea2"), "diffusion_model.blocks.0.attn.wq.weight"

    def painted(path: Path, policy: KernelPolicy, dtype: torch.dtype, size: float) -> torch.Tensor:
        with checkpoints.narrow.opened(comfy):
            model = in_halves.load(path, policy, dtype)
        shape = model.model.state_dict()[key].shape
        change = size * torch.randn(shape, generator=torch.Generator().manual_seed(5))
        assert model.add_patches({key: ("diff", (change,))}, 1.0) == [key]
        return sample(model, scene)

    exact, without = (painted(of_halves, OFF, torch.float32, size) for size in (0.3, 0.0))
    theirs = painted(of_int8, OFF, BF16, 0.3)
    with in_halves.modes() as asked:
        ours = painted(of_int8, AUTO, BF16, 0.3)
    assert asked["linear_int8"] == {"auto"}
    assert distance(ours, exact) <= 1.25 * distance(theirs, exact) < 0.5 * distance(without, exact)

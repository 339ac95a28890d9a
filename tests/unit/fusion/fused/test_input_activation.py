"""What MiniMax H3 hands to ComfyUI's `linear_input_act`: an activation, and an INT8 product behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sd
import family_scenes
import in_halves
import int8_files
import pytest
import torch
from scenes import distance, sample
from torch import Tensor

from fusestream import checkpoints
from fusestream.fusion.base.hooks import RUNNING
from fusestream.fusion.fused import input_activation, operations
from fusestream.fusion.identify import checkpoint_info
from fusestream.kernels_cuda import KernelPolicy

KIND = "minimax_h3"
AUTO, OFF = KernelPolicy.of("auto", precision="auto"), KernelPolicy.of("off")
BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture(autouse=True)
def of_no_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model of an activation and a product that nobody knows: no other network of ComfyUI's calls it."""
    monkeypatch.setattr(checkpoint_info, "family_of", lambda _header: None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("minimax")
    return int8_files.write(checkpoints.write(KIND, folder, "fp16"), folder, "convrot")


def painted(path: Path, policy: KernelPolicy, dtype: torch.dtype = BF16) -> tuple[Tensor, Any]:
    model = in_halves.load(path, policy, dtype)
    return sample(model, family_scenes.inputs(KIND)).tensors[0], model.model.diffusion_model.__dict__[RUNNING]


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_the_activation_is_a_pass_and_the_product_ours(files: tuple[Path, Path], dtype: torch.dtype) -> None:
    of_int8, of_halves = files
    exact, theirs = painted(of_halves, OFF, torch.float32)[0], painted(of_int8, OFF, dtype)[0]
    with in_halves.modes() as asked:
        ours, running = painted(of_int8, AUTO, dtype)
    assert asked["silu_mul"] == {"auto"} and asked["linear_int8"] == {"auto"}
    assert running.ours > 9 * running.stocks
    assert distance(ours, exact) <= 1.25 * distance(theirs, exact)


def test_what_kitchen_does_in_one_pass_stays_its_and_is_counted_so(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_activation, "folded_by_kitchen", lambda *_: True)
    with in_halves.modes() as asked:
        _, running = painted(files[0], AUTO)
    size = checkpoints.video.MINIMAX[KIND]
    of_all = 4 * size.dim * size.heads * size.head + 3 * size.dim * size.ffn
    assert "silu_mul" not in asked and "linear_int8" in asked
    assert running.stocks / (running.ours + running.stocks) == pytest.approx(size.dim * size.ffn / of_all, rel=0.2)


def test_kernels_off_is_stock(files: tuple[Path, Path]) -> None:
    of_int8, _ = files
    stocks = sample(comfy.sd.load_diffusion_model(str(of_int8)), family_scenes.inputs(KIND)).tensors[0]
    model = in_halves.load(of_int8, OFF, None)
    assert torch.equal(sample(model, family_scenes.inputs(KIND)).tensors[0], stocks)


def test_other_linears_and_activations_are_stocks() -> None:
    input_activation.attach()
    linear = int8_files.linear_of_file(int8_files.KINDS["rows"], 64, 64)
    x = torch.randn(2, 5, 128).half()
    wanted = linear(comfy.ops.INPUT_ACT_EAGER["swiglu"](x))
    assert distance(comfy.ops.linear_input_act(linear, x, "swiglu").float(), wanted.float()) < 0.02
    with pytest.raises(KeyError):
        comfy.ops.linear_input_act(int8_files.linear_of_numbers(64, 64), x, "of tomorrow")


def test_attaching_twice_is_once() -> None:
    input_activation.attach()
    once = comfy.ops.linear_input_act
    input_activation.attach()
    assert comfy.ops.linear_input_act is once


CONVROT = int8_files.KINDS["convrot"]


@pytest.mark.parametrize(
    ("kind", "k", "is_new_card", "served", "folded"),
    [
        (CONVROT, 256, True, {"cuda"}, True),
        (CONVROT, 256, True, set(), False),
        (CONVROT, 256, False, {"cuda"}, False),
        (CONVROT, 64, True, {"cuda"}, False),  # turned in smaller groups
        (int8_files.KINDS["rows"], 256, True, {"cuda"}, False),  # not turned
    ],
)
def test_when_kitchen_folds(
    kind: Any, k: int, is_new_card: bool, served: set[str], folded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rules know neither the activation nor the group: what it folds its code says."""
    linear = int8_files.linear_of_file(kind, 64, k)
    asked: list[Any] = []

    def validate(name: str, function: str, given: Any) -> Any:
        asked.append((function, given["convrot"], given["convrot_groupsize"]))
        return type("Answer", (), {"success": name in served})

    monkeypatch.setattr(input_activation, "runs_folded", lambda _: is_new_card)
    monkeypatch.setattr(comfy.quant_ops.ck.registry, "validate_backend_for_call", validate)
    assert input_activation.folded_by_kitchen(linear, torch.zeros(1, 2 * k).half()) is folded
    assert set(asked) <= {("int8_linear", True, 256)}
    assert not input_activation.folded_by_kitchen(linear, torch.zeros(1, 2 * k))


@pytest.mark.parametrize("storage", ["convrot", "convrot_w4a4"])
def test_each_product_is_counted_once_and_for_its_reason(storage: str, tmp_path: Path) -> None:
    """*Exact* multiplies no integers; for W4A4 ComfyUI's function calls the Linear, which counts itself."""
    path, _ = int8_files.write(checkpoints.write(KIND, tmp_path, "fp16"), tmp_path, storage)
    ours, exact = painted(path, AUTO)[1], painted(path, KernelPolicy.of("auto", precision="precise"))[1]
    assert exact.ours == 0 and exact.stocks == ours.ours + ours.stocks
    assert input_activation.FOLDED not in exact.left and exact.left[operations.NO_KERNEL] > exact.stocks / 2


def test_a_function_with_other_arguments_stays_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_tomorrow(linear: Any, x: Any, input_act: Any, prologue: Any = None) -> Any:
        return linear, x, input_act, prologue

    monkeypatch.setattr(comfy.ops, "linear_input_act", of_tomorrow)
    input_activation.attach()
    assert comfy.ops.linear_input_act is of_tomorrow

"""A Z-Image whose blocks compute through our ops samples what stock's does, as near as fp16 is; and says when it does not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import comfy.ldm.lumina.model as stock
import comfy.model_management
import comfy.ops
import family_scenes
import pytest
import torch
from in_halves import HALF, OFF, load
from scenes import distance, sample

from fusestream import checkpoints
from fusestream.fusion import KernelPolicy
from fusestream.fusion.families.z_image import block as z_image
from fusestream.fusion.fused import attention
from fusestream.kernels_cuda import LEDGER

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("z_image")


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


def painted(path: Path, policy: KernelPolicy | None = None, dtype: torch.dtype = HALF) -> Any:
    """Streamed through the smallest window, computed in `dtype`, which stock chooses by the card. policy None: auto."""
    return sample(load(path, policy, dtype), family_scenes.inputs("z_image"))


def handed_back() -> set[str]:
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op == "z-image block"}


def test_a_stream_in_fp32_has_products_in_fp16(folder: Path) -> None:
    """Nearer than all in fp16."""
    path = checkpoints.write("z_image", folder)
    wide, theirs, exact = (painted(path, *given) for given in ((None, torch.float32), (OFF,), (OFF, torch.float32)))
    assert not handed_back() and 0 < distance(wide, exact) <= distance(theirs, exact)


class Case:
    """A block with its weights, for a batch of two: as Z-Image has them, or grouped keys and more as Lumina 2."""

    def __init__(self, dtype: torch.dtype = HALF, *, modulation: bool = True, lumina: bool = False) -> None:
        dim, heads = 256, 2
        settings = {"operations": comfy.ops.disable_weight_init, "device": "cpu", "dtype": dtype}
        self.module: Any = stock.JointTransformerBlock(
            0, dim, heads, 1 if lumina else heads, 64, 8 / 3, 1e-5, True, modulation,
            z_image_modulation=not lumina, operation_settings=settings,
        )  # fmt: skip
        for parameter in self.module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
            parameter.data.copy_(torch.randn(parameter.shape) * scale + (0 if parameter.ndim == 2 else 0.5))
        self.stock = copy.deepcopy(self.module)
        z_image.fuse(torch.nn.ModuleList([self.module]))
        self.x = torch.randn(2, 60, dim, dtype=dtype)
        angle = torch.randn(1, 60, 1, dim // heads // 2)
        self.freqs = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), -1).unflatten(-1, (2, 2))
        self.adaln = torch.randn(2, 256, dtype=dtype) if modulation else None

    @staticmethod
    def options(policy: KernelPolicy | None = None, **others: Any) -> dict[str, Any]:
        model: Any = type("Model", (), {"model_options": {"transformer_options": dict(others)}})
        attention.install(model, policy or KernelPolicy())
        found: dict[str, Any] = model.model_options["transformer_options"]
        return found

    def run(self, module: Any, options: dict[str, Any], mask: Any = None, zero: Any = None) -> torch.Tensor:
        found: torch.Tensor = module(self.x, mask, self.freqs, self.adaln, zero, transformer_options=options)
        return found

    def error(self, options: dict[str, Any], *more: Any) -> float:
        return distance(self.run(self.module, options, *more).double(), self.run(self.stock, {}, *more).double())


@pytest.mark.parametrize("lumina", [False, True], ids=["z-image", "lumina"])
@pytest.mark.parametrize("modulation", [True, False], ids=["modulated", "gains alone"])
def test_a_block(lumina: bool, modulation: bool) -> None:
    case = Case(modulation=modulation, lumina=lumina)
    before = case.x.clone()
    assert 0 < case.error(case.options()) < 3e-3 and not handed_back()
    assert torch.equal(case.x, before), "patches between the blocks still want it"


def test_small_gains_beside_an_fp32_stream_keep_their_digits() -> None:
    case: Any = Case(torch.float32)
    case.x, case.adaln = case.x[:1], case.adaln[:1]
    gains = torch.linspace(0.002, 0.02, 256)
    for module in (case.module, case.stock):
        for norm in (module.attention_norm1, module.ffn_norm1):
            norm.weight.data.copy_(gains)
    assert case.error(case.options()) < 6e-4 and not handed_back()


def test_masks_and_segments_at_timestep_zero() -> None:
    case = Case()
    seen = torch.rand(60, 60) < 0.6
    assert case.error(case.options(), seen | torch.eye(60, dtype=torch.bool)) < 3e-3
    case.adaln = torch.randn(4, 256, dtype=HALF)
    assert case.error(case.options(), None, [(40, 60)]) < 3e-3
    assert case.error(case.options(), None, [(10, 20), (30, 45)]) < 3e-3 and not handed_back()


def test_an_override_of_another_node_computes_the_attention() -> None:
    case, calls = Case(lumina=True), []

    def override(_stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(([t.shape for t in args[:3]], args[3], kwargs["skip_reshape"]))
        return args[2].transpose(1, 2).flatten(2)

    ours = case.run(case.module, case.options() | {attention.HOOK: override})
    assert distance(ours.double(), case.run(case.stock, {attention.HOOK: override}).double()) < 3e-3
    assert calls[0] == calls[1] and len(calls) == 2 and not handed_back()


def test_what_overflows_is_the_largest_number() -> None:
    """Within the feed-forward, and what comes out of either product: a norm follows, and what is added is small again."""
    case = Case()
    for part in ("attention.out", "feed_forward.w1", "feed_forward.w2"):
        case.module.get_submodule(part).weight.data[:4] = 60000
    assert bool(case.run(case.module, case.options()).isfinite().all()) and not handed_back()


def test_a_block_with_replaced_parts_is_stocks() -> None:
    case = Case()
    case.module.feed_forward.w3.forward = case.module.feed_forward.w3.forward
    assert case.error(case.options()) == 0 and handed_back() == {"another node has replaced feed_forward.w3"}


def test_bf16_is_stocks() -> None:
    case = Case(torch.bfloat16)
    assert case.error(case.options()) == 0
    assert handed_back() == {"the model computes in bfloat16, the kernels in float16"}

"""A MiniMax H3 whose blocks compute through our ops samples what stock's does, as near as fp16 is; and says when it does not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import comfy.ldm.minimax.model as stock
import comfy.ops
import family_scenes
import pytest
import torch
from in_halves import HALF, OFF, load
from scenes import distance, sample

from fusestream import checkpoints
from fusestream.fusion import KernelPolicy
from fusestream.fusion.families.minimax_h3 import block as minimax_h3
from fusestream.fusion.fused import attention
from fusestream.kernels_cuda import LEDGER, KernelRefused

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")
SINGLE = torch.float32
BOTH = pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=["fp16", "fp32 stream"])
# (first, last, row): a prompt with a picture in it, sound and video, at two timesteps.
SEGMENTS = [(0, 8, 1), (8, 12, 0), (12, 12, 2), (12, 20, 5), (20, 30, 0), (30, 60, 0)]


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


def handed_back() -> set[str]:
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op == "minimax-h3 block"}


@pytest.mark.parametrize("kind", checkpoints.video.MINIMAX)
def test_a_stream_in_fp32_has_products_in_fp16(tmp_path: Path, kind: str) -> None:
    """Nearer than all in fp16."""
    path, scene = checkpoints.write(kind, tmp_path), family_scenes.inputs(kind)
    sides = ((None, SINGLE), (OFF,), (OFF, SINGLE))
    ours, theirs, exact = (family_scenes.parts(sample(load(path, *given), scene)) for given in sides)
    assert not handed_back()
    for mine, halves, wide in zip(ours, theirs, exact, strict=True):
        assert 0 < distance(mine, wide) <= distance(halves, wide)


def test_stock_is_told_what_a_step_takes(tmp_path: Path) -> None:
    """Stock asks for video and sound in one."""
    model = load(checkpoints.write("minimax_h3", tmp_path), None, SINGLE)
    sample(model, family_scenes.inputs("minimax_h3"))
    assert model.model.fusestream_reckoning.is_ours


class Case:
    """A block with its weights, and what goes into it."""

    def __init__(self, dtype: torch.dtype = HALF, *, pruned: bool = False, weights: torch.dtype = HALF) -> None:
        dim, heads, size, time = 256, 2, 128, 64
        kind: dict[str, Any] = {"apply_silu": False, "adaln_dtype": SINGLE} if pruned else {}
        settings: dict[str, Any] = {"operations": comfy.ops.manual_cast, "device": "cpu", "dtype": weights}
        self.module: Any = stock.DiTBlock(dim, heads, size, 384, time, 1e-5, 1e-5, **kind, **settings)
        self.module.requires_grad_(False)  # or kitchen refuses to turn in place
        for parameter in self.module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
            parameter.data.copy_(torch.randn(parameter.shape) * scale + (0 if parameter.ndim == 2 else 0.5))
        self.stock = copy.deepcopy(self.module)
        minimax_h3.fuse(torch.nn.ModuleList([self.module]))
        self.x = torch.randn(60, dim, dtype=dtype)
        self.t_emb = torch.randn(2, time, dtype=SINGLE if pruned else dtype)
        self.freqs: Any = stock.rope_rotation_table(torch.randn(60, 48).repeat(1, 2), dtype)
        self.segments = SEGMENTS

    @staticmethod
    def options(policy: KernelPolicy | None = None, **others: Any) -> dict[str, Any]:
        model: Any = type("Model", (), {"model_options": {"transformer_options": dict(others)}})
        attention.install(model, policy or KernelPolicy())
        found: dict[str, Any] = model.model_options["transformer_options"]
        return found

    def run(self, module: Any, options: dict[str, Any]) -> torch.Tensor:
        """What is added to x, which a block writes to."""
        x = self.x.clone()
        found = module(x, self.t_emb, self.segments, self.freqs, transformer_options=options)
        return found.double() - self.x.double()

    def error(self, options: dict[str, Any] | None = None) -> float:
        ours = self.run(self.module, self.options() if options is None else options)
        return distance(ours, self.run(self.stock, {}))


@BOTH
@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
def test_a_block(dtype: torch.dtype, pruned: bool) -> None:
    assert 0 < Case(dtype, pruned=pruned).error() < 3e-3 and not handed_back()


@BOTH
def test_without_rope(dtype: torch.dtype) -> None:
    case = Case(dtype)
    case.freqs = None
    assert 0 < case.error() < 3e-3 and not handed_back()


def test_a_stream_far_beyond_fp16() -> None:
    case = Case(SINGLE)
    case.x[:, ::37] *= 1e6
    assert 0 < case.error() < 3e-3 and not handed_back()


def test_hidden_values_beyond_fp16() -> None:
    """Of a feed-forward: a million is held, and comes back as what is added."""
    case = Case(SINGLE)
    for module in (case.module, case.stock):
        module.mlp.fc1.weight.data[:8] *= 300
        module.mlp.fc1.weight.data[384:392] *= 300
        module.mlp.fc2.weight.data[:, :8] *= 1e-3
    seen = []
    case.stock.mlp.fc1.register_forward_hook(lambda _module, _given, made: seen.append(made))
    assert 0 < case.error() < 3e-3 and not handed_back()
    gate, up = seen[0].chunk(2, -1)
    assert float((torch.nn.functional.silu(gate) * up).abs().max()) > 65504


def test_an_override_of_another_node_computes_the_attention() -> None:
    case, calls = Case(), []

    def override(_stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(([t.shape for t in args[:3]], args[3], kwargs["skip_reshape"], kwargs["mask"]))
        return args[2].transpose(1, 2).flatten(2)

    ours = case.run(case.module, case.options() | {attention.HOOK: override})
    assert distance(ours, case.run(case.stock, {attention.HOOK: override})) < 3e-3
    assert calls[0] == calls[1] and len(calls) == 2 and not handed_back()


@pytest.mark.parametrize("part", ["mlp.fc2", "attn.out_proj", "adaln_proj"])
def test_a_block_with_replaced_parts_is_stocks(part: str) -> None:
    case = Case()
    replaced = case.module.get_submodule(part)
    replaced.forward = replaced.forward
    assert case.error() == 0 and handed_back() == {f"another node has replaced {part}"}


def test_tokens_without_modulation_are_stocks() -> None:
    case = Case()
    case.segments = SEGMENTS[:-1]
    assert case.error() == 0 and handed_back() == {"modulation is given for some of the tokens only"}
    with pytest.raises(KernelRefused, match="some of the tokens"):
        case.run(case.module, case.options(KernelPolicy.of("on")))


def test_bf16_is_stocks() -> None:
    case = Case(torch.bfloat16, weights=torch.bfloat16)
    assert case.error() == 0
    assert handed_back() == {"the model computes in bfloat16, the kernels in float16"}

"""A Wan whose blocks compute through our ops samples what stock's does, as near as fp16 is; and says when it does not."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import comfy
import comfy.ldm.wan.model
import comfy.model_management
import comfy.ops
import pytest
import torch
from wan_in_halves import distance, handed_back

from fusestream.fusion import KernelPolicy
from fusestream.fusion.base.hooks import BLOCK_PARTS
from fusestream.fusion.families.wan import block as wan
from fusestream.fusion.fused import attention
from fusestream.fusion.weights.operands import operands, packed
from fusestream.kernels_cuda import LEDGER, KernelRefused

OFF = KernelPolicy.of("off")


pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


# --------------------------------------------------------------------------------------------------- one block, alone


class Case:
    """A block with its weights, and an input for it."""

    def __init__(self, cross: str = "t2v_cross_attn", vace: int | None = None, dim: int = 256, frames: int = 0) -> None:
        ops: Any = comfy.ops.disable_weight_init
        settings = {"operations": ops, "device": "cpu", "dtype": torch.float16}
        model = comfy.ldm.wan.model
        args: Any = (cross, dim, 2 * dim, 2, (-1, -1), True, True)
        self.module: Any = (
            model.WanAttentionBlock(*args, operation_settings=settings)
            if vace is None
            else model.VaceWanAttentionBlock(*args, block_id=vace, operation_settings=settings)
        )
        for parameter in self.module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
            parameter.data.copy_(torch.randn(parameter.shape) * scale + (0 if parameter.ndim == 2 else 0.5))
        self.stock = copy.deepcopy(self.module)
        self.x = torch.randn(2, dim, 60, dtype=torch.float16).transpose(1, 2)  # strided, as stock hands it in
        self.e = torch.randn(2, *([frames] if frames else []), 6, dim, dtype=torch.float16) * 0.3
        angle = torch.randn(1, 60, 1, dim // 4)
        self.freqs = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), -1).unflatten(-1, (2, 2))
        self.context = torch.randn(2, 40, dim, dtype=torch.float16)
        wan.fuse(self.module)

    def options(self, policy: KernelPolicy | None = None, **others: Any) -> dict[str, Any]:
        model: Any = type("Model", (), {"model_options": {"transformer_options": dict(others)}})
        attention.install(model, policy or KernelPolicy())
        found: dict[str, Any] = model.model_options["transformer_options"]
        return found

    def run(self, module: Any, options: dict[str, Any], *first: torch.Tensor) -> Any:
        inputs = {"e": self.e, "freqs": self.freqs, "context": self.context, "context_img_len": 9}
        return module(*(first or (self.x,)), **inputs, transformer_options=options)

    def error(self, options: dict[str, Any]) -> float:
        return distance(self.run(self.module, options), self.run(self.stock, {}))


@pytest.mark.parametrize("cross", ["t2v_cross_attn", "i2v_cross_attn"])
@pytest.mark.parametrize("frames", [0, 1, 4, 7, 60], ids=lambda n: f"{n} frames")
def test_a_block(cross: str, frames: int) -> None:
    """Modulation for all tokens, for each frame (not dividing them either), for each token."""
    case = Case(cross, frames=frames)
    before = case.x.clone()
    assert case.error(case.options()) < 3e-3
    assert torch.equal(case.x, before), "VACE and others still want it"


@pytest.mark.parametrize("number", [0, 1])
def test_a_block_of_the_side_branch(number: int) -> None:
    case = Case(vace=number)
    other = torch.randn_like(case.x)
    ours, theirs = (case.run(m, case.options(), other, case.x) for m in (case.module, case.stock))
    assert not handed_back() and all(distance(a, b) < 3e-3 for a, b in zip(ours, theirs, strict=True))


def test_what_a_patch_keeps_stays_as_it_was() -> None:
    case, kept = Case(), list[tuple[torch.Tensor, torch.Tensor]]()

    def patch(args: dict[str, Any]) -> torch.Tensor:
        kept.append((args["x"], args["x"].clone()))
        x: torch.Tensor = args["x"]
        return x

    assert case.error(case.options(patches={"attn1_patch": [patch], "attn2_patch": [patch]})) < 3e-3
    assert len(kept) == 2 and all(torch.equal(x, before) for x, before in kept)


def test_patches_of_the_attentions_see_what_they_would() -> None:
    case = Case()
    seen: list[dict[str, Any]] = []

    def patch(args: dict[str, Any]) -> torch.Tensor:
        seen.append({name: t.clone() for name, t in args.items() if isinstance(t, torch.Tensor)})
        return args["x"] * 2

    patches = {"attn1_patch": [patch], "attn2_patch": [patch]}
    ours = case.run(case.module, case.options(patches=patches))
    theirs = case.run(case.stock, {"patches": patches})
    assert not handed_back() and distance(ours, theirs) < 3e-3
    for mine, stocks in zip(seen[:2], seen[2:], strict=True):
        assert mine.keys() == stocks.keys()
        assert all(distance(mine[name], stocks[name].reshape(mine[name].shape)) < 3e-3 for name in mine)


def test_an_override_of_another_node_computes_the_attention() -> None:
    case, calls = Case(), []

    def override(stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs.get("heads", args[3] if len(args) > 3 else None))
        return torch.zeros_like(args[0])

    options = case.options() | {attention.HOOK: override}
    ours = case.run(case.module, options)
    assert distance(ours, case.run(case.stock, {attention.HOOK: override})) < 3e-3
    assert len(calls) == 4 and not handed_back()


def test_what_another_nodes_attention_keeps_stays_as_it_was() -> None:
    """It may answer with the same at the next step."""
    case, kept = Case("i2v_cross_attn"), list[tuple[torch.Tensor, torch.Tensor]]()

    def override(stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = stock(*args, **kwargs)
        kept.append((made, made.clone()))
        return made

    ours = case.run(case.module, case.options() | {attention.HOOK: override})
    assert distance(ours, case.run(case.stock, {})) < 3e-3
    assert len(kept) == 3 and all(torch.equal(made, before) for made, before in kept)


@pytest.mark.parametrize("part", ["self_attn", "cross_attn", "ffn.0", "self_attn.q"])
def test_a_block_with_replaced_parts_is_stocks(part: str) -> None:
    case = Case()
    module = case.module.get_submodule(part)
    module.forward = module.forward
    assert case.error(case.options()) == 0 and handed_back() == {f"another node has replaced {part}"}
    with pytest.raises(KernelRefused, match=f"'on'.*replaced {part}.*'auto'"):
        case.run(case.module, case.options(KernelPolicy.of("on")))


@pytest.mark.deep
def test_torch_compile_takes_a_fused_block() -> None:
    case = Case()
    options = case.options()
    want = case.run(case.module, options)
    torch.compiler.reset()
    compiled = torch.compile(case.module, backend="eager", dynamic=False)
    assert distance(case.run(compiled, options), want) < 3e-3 and not handed_back()


def test_a_block_that_does_not_compute_in_fp16_is_stocks() -> None:
    case = Case()
    for name in ("module", "stock", "x", "e", "context"):
        setattr(case, name, getattr(case, name).float())
    assert case.error(case.options()) == 0
    assert handed_back() == {"the model computes in float32, the kernels in float16"}


def test_without_our_loader_a_block_is_stocks() -> None:
    case = Case()
    assert case.error({}) == 0 and case.error(case.options(OFF)) == 0 and not handed_back()


def test_weights_elsewhere_are_stocks_business() -> None:
    case = Case()
    case.module.ffn[0].weight = torch.nn.Parameter(torch.empty(512, 256, device="meta", dtype=torch.float16), False)
    assert "the weights are on the META" in str(case.module.__dict__[BLOCK_PARTS].obstacle(case.module, case.x))


# ------------------------------------------------------------------------------------------------------------ weights


def test_weights_that_lie_together_are_one_matrix() -> None:
    room = torch.randn(96, 32, dtype=torch.float16)
    layers = [comfy.ops.disable_weight_init.Linear(32, 32, bias=False, dtype=torch.float16) for _ in range(3)]
    for i, layer in enumerate(layers):
        layer.weight = torch.nn.Parameter(room[32 * i : 32 * i + 32], requires_grad=False)
    x = torch.randn(1, 32, dtype=torch.float16)
    with operands(x, KernelPolicy(), *layers) as parts:
        one = packed(parts)
        assert one is not None and one.weight is not None and one.bias is None
        assert torch.equal(one.weight, room) and one.weight.data_ptr() == room.data_ptr()
        assert packed(parts) is one, "looked for once"
        assert packed(parts[::-1]) is None and packed([parts[0], parts[2]]) is None
    first = weakref.ref(layers[0].weight)
    layers[1].weight = torch.nn.Parameter(layers[1].weight.clone(), requires_grad=False)
    with operands(x, KernelPolicy(), *layers) as parts:
        assert packed(parts) is None
    del parts, one, layer, layers
    assert first() is None, "what is kept of a weight does not keep it"


def test_a_weight_is_taken_with_all_that_stock_does_to_it() -> None:
    layer: Any = comfy.ops.manual_cast.Linear(8, 8, dtype=torch.bfloat16)
    layer.weight.data.copy_(torch.eye(8)), layer.bias.data.zero_()
    layer.weight_function, layer.bias_function = [lambda w: w * 3], [lambda b: b + 1]
    with operands(torch.zeros(1, 8, dtype=torch.float16), KernelPolicy(), layer) as [own]:
        assert own.weight is not None and own.weight.dtype is torch.float16
        assert torch.equal(own.weight, 3 * torch.eye(8, dtype=torch.float16)) and bool((own.bias == 1).all())

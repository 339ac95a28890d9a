"""A Qwen-Image whose blocks compute through our ops samples what stock's does, as near as fp16 is; and says when it does not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ldm.qwen_image.model as stock
import comfy.ops
import family_scenes
import pytest
import torch
from in_halves import HALF, OFF, as_near, load
from scenes import Scene, distance, sample

from fusestream import checkpoints
from fusestream.checkpoints import narrow
from fusestream.fusion import KernelPolicy
from fusestream.fusion.families import family_of
from fusestream.fusion.families.qwen_image import block as qwen_image
from fusestream.fusion.families.qwen_image.need import need
from fusestream.fusion.fused import attention
from fusestream.kernels_cuda import LEDGER, KernelRefused
from fusestream.memory import Extent, WeightFile

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")
SINGLE = torch.float32
BOTH = pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=["fp16", "fp32 stream"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen_image")


@pytest.fixture(autouse=True)
def a_clean_ledger() -> Iterator[None]:
    import comfy

    LEDGER.clear()
    with narrow.opened(comfy):
        yield


def handed_back() -> set[str]:
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op == "qwen-image block"}


# -------------------------------------------------------------------------------------------------------- whole models


def test_a_stream_in_fp32_has_products_in_fp16(folder: Path) -> None:
    """Nearer than all in fp16."""
    path, scene = checkpoints.write("qwen_image", folder), family_scenes.inputs("qwen_image")
    sides = ((None, SINGLE), (OFF,), (OFF, SINGLE))
    wide, theirs, exact = (sample(load(path, *given), scene) for given in sides)
    assert not handed_back() and 0 < distance(wide, exact) <= distance(theirs, exact)


@pytest.mark.parametrize("method", ["index_timestep_zero", "negative_index"])
def test_references_by_other_methods(folder: Path, method: str) -> None:
    """Those at timestep zero, as in Edit 2511, have shift, scale and gate of their own."""
    path, scene = checkpoints.write("qwen_image", folder), family_scenes.inputs("qwen_image")
    sides = [[[words, {**extras, "reference_latents_method": method}]] for ((words, extras),) in scene[:2]]
    given = Scene(*sides, scene.latent)
    fused, theirs, exact = (sample(load(path, *each), given) for each in ((), (OFF,), (OFF, SINGLE)))
    assert not handed_back() and as_near(fused, theirs, exact)
    assert not torch.equal(exact, sample(load(path, OFF, SINGLE), scene))


# ------------------------------------------------------------------------------------------------------ files


def header(*more: str, prompt: int = 3584, without: tuple[str, ...] = (), prefix: str = "") -> WeightFile:
    """Names and shapes of a file of two blocks, without those that begin so."""
    size = checkpoints.pictures.QwenImageSize(3072, 2, prompt)
    shapes = {prefix + name: spec.shape for name, spec in checkpoints.pictures.qwen_image(size).items()}
    shapes |= dict.fromkeys(more, (8, 8))
    kept = {name: shape for name, shape in shapes.items() if not name.startswith(without)} if without else shapes
    return WeightFile(Path("x"), 0, {name: Extent(name, "F16", shape, 0, 0) for name, shape in kept.items()}, {})


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_is_known_and_short_ones_are_told(prefix: str) -> None:
    family = family_of(header(prefix=prefix))
    assert family is not None and family.name == "Qwen-Image" and family.expects is not None
    expected = family.expects(header(prefix=prefix))
    assert f"{prefix}transformer_blocks.1.attn.to_add_out.weight" in expected.tensors
    [doubt] = expected.doubts
    assert doubt.startswith("has 2 transformer_blocks; the published model of its width has 60")


def test_relatives_are_not_taken() -> None:
    """Mage-Flow has the same blocks in another network; ControlNets have blocks beside theirs; a LoRA has none."""
    assert family_of(header(prompt=2560)) is None
    assert family_of(header("controlnet_blocks.0.weight", "controlnet_x_embedder.weight")) is None
    assert family_of(header("control_img_in.weight")) is None
    extents = {
        name: Extent(name, "F16", (4, 4), 0, 0)
        for name in (
            "transformer_blocks.0.attn.add_q_proj.lora_A.weight",
            "transformer_blocks.0.img_mod.1.lora_B.weight",
        )
    }
    assert family_of(WeightFile(Path("x"), 0, extents, {})) is None


def test_what_a_step_needs() -> None:
    """At 1024x1024: its streams, the picture's normed one and a chunk of its hidden values. Of another size than published
    ones: test_counts_at_published_sizes.py."""
    up, down = (
        SimpleNamespace(weight=torch.empty(*shape, dtype=HALF, device="meta")) for shape in ((9216, 3072), (3072, 9216))
    )
    mlp = SimpleNamespace(net=(SimpleNamespace(proj=up), None, down))
    net = SimpleNamespace(inner_dim=3072, patch_size=2, transformer_blocks=[SimpleNamespace(img_mlp=mlp)])
    x, normed, hidden = (64 * 64 + 512) * 3072, 64 * 64 * 3072 * 2, 64 * 64 * 9216 * 2
    assert need(net, (1, 16, 1, 128, 128), SINGLE) == pytest.approx(1.05 * (8 * x + normed + hidden))
    assert need(net, (2, 16, 1, 128, 128), HALF) == pytest.approx(1.05 * 2 * (4 * x + normed + hidden))
    assert need(net, (1, 16, 1, 128, 128), torch.bfloat16) is None
    assert need(net, (1, 16, 128, 128), SINGLE) is None


# --------------------------------------------------------------------------------------------------- blocks, alone


class Case:
    """A block with its weights, and inputs of a batch of two, 11 tokens of text and 45 of picture."""

    TEXT, PICTURE = 11, 45

    def __init__(self, dtype: torch.dtype = HALF) -> None:
        dim, ops = 256, comfy.ops.manual_cast
        weights = torch.bfloat16 if dtype is torch.bfloat16 else HALF
        self.module: Any = stock.QwenImageTransformerBlock(dim, 2, 128, dtype=weights, device="cpu", operations=ops)
        for parameter in self.module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
            parameter.data.copy_(torch.randn(parameter.shape) * scale + (0 if parameter.ndim == 2 else 0.5))
        self.stock = copy.deepcopy(self.module)
        qwen_image.fuse(torch.nn.ModuleList([self.module]))
        self.text, self.picture = (torch.randn(2, n, dim, dtype=dtype) for n in (self.TEXT, self.PICTURE))
        angle = torch.randn(2, 1, self.TEXT + self.PICTURE, 64)
        pe = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), -1).unflatten(-1, (2, 2))
        self.pe: Any = pe.to(dtype)
        self.temb = torch.randn(2, dim, dtype=dtype)

    @staticmethod
    def options(policy: KernelPolicy | None = None, **others: Any) -> dict[str, Any]:
        model: Any = type("Model", (), {"model_options": {"transformer_options": dict(others)}})
        attention.install(model, policy or KernelPolicy())
        found: dict[str, Any] = model.model_options["transformer_options"]
        return found

    def run(self, module: Any, options: dict[str, Any], mask: Any = None, zero: Any = None) -> Any:
        """The streams of text and picture."""
        return module(self.picture, self.text, mask, self.temb, self.pe, zero, transformer_options=options)

    def error(self, options: dict[str, Any], mask: Any = None, zero: Any = None) -> float:
        """Against stock's in fp32, of the weights that there are."""
        exact = copy.copy(self)
        exact.text, exact.picture, exact.temb, exact.pe = (
            t.float() for t in (self.text, self.picture, self.temb, self.pe)
        )
        plain = {name: value for name, value in options.items() if not name.startswith(("fusestream", attention.HOOK))}
        wide = None if mask is None else mask.float()
        pairs = zip(self.run(self.module, options, mask, zero), exact.run(self.stock, plain, wide, zero), strict=True)
        return max(distance(one.double(), other.double()) for one, other in pairs)


@BOTH
def test_a_block(dtype: torch.dtype) -> None:
    case = Case(dtype)
    before = case.text.clone(), case.picture.clone()
    assert 0 < case.error(case.options()) < 3e-3 and not handed_back()
    text, picture = case.run(case.module, case.options())
    assert text.dtype is picture.dtype is dtype
    assert torch.equal(case.text, before[0]) and torch.equal(case.picture, before[1]), "patches between still want them"
    assert text.shape == case.text.shape and picture.shape == case.picture.shape, "the text comes first, as in stock"


@BOTH
def test_masks_and_references_at_timestep_zero(dtype: torch.dtype) -> None:
    case = Case(dtype)
    mask = torch.zeros(2, Case.TEXT, dtype=dtype)
    mask[0, -4:] = mask[1, -1:] = -torch.finfo(dtype).max
    plain = case.run(case.module, case.options())
    assert case.error(case.options(), mask) < 3e-3
    assert distance(case.run(case.module, case.options(), mask)[1].double(), plain[1].double()) > 1e-3
    assert case.error(case.options(), mask[1:]) < 3e-3, "one for all prompts"
    case.temb = torch.randn(4, 256, dtype=dtype)
    assert case.error(case.options(), None, 30) < 3e-3
    assert case.error(case.options(), mask, Case.PICTURE) < 3e-3, "no tokens are references"
    assert not handed_back()


def test_a_stream_beyond_fp16_stays_as_it_is() -> None:
    """Channels of 400,000 pass through, and are added to: what stock computes in fp32."""
    case = Case(SINGLE)
    case.text[:, :, 3], case.picture[:, 5, 7] = 4e5, -4e5
    for out in (case.module.txt_mlp.net[2], case.module.attn.to_out[0]):
        out.bias.data[9] = 60000.0  # times a gate of some size: larger than fp16 has
    case.stock.load_state_dict(case.module.state_dict())
    case.temb *= 8
    text, picture = case.run(case.module, case.options())
    assert text.abs().max() > 65504 and picture.abs().max() > 65504
    assert case.error(case.options()) < 3e-3 and not handed_back()
    theirs = case.run(case.stock, {})
    for ours, their in zip((text, picture), theirs, strict=True):
        usual = their.abs().amax((0, 1)) < 1e3  # channels that no large number hides
        assert distance(ours[..., usual].double(), their[..., usual].double()) < 2e-2


@BOTH
def test_what_overflows_between_products_is_the_largest_number(dtype: torch.dtype) -> None:
    """Hidden values as well, where the stream is fp32: what comes of such is no stream of fp16."""
    case = Case(dtype)
    hidden = ("txt_mlp.net.0.proj",) if dtype is SINGLE else ()
    for part in ("img_mod.1", "attn.to_v", "attn.to_out.0", "img_mlp.net.2", *hidden):
        case.module.get_submodule(part).weight.data[:4] = 60000
    found = case.run(case.module, case.options())
    assert all(bool(one.isfinite().all()) for one in found) and not handed_back()


@BOTH
def test_patches_of_the_attention_see_what_they_would(dtype: torch.dtype) -> None:
    case = Case(dtype)
    seen: list[Any] = []

    def before(q: Any, k: Any, v: Any, pe: Any, attn_mask: Any, extra_options: Any) -> dict[str, Any]:
        seen.append((q.clone(), k.clone(), v.clone(), attn_mask, extra_options["img_slice"], extra_options["mine"]))
        return {"q": q * 1.5, "k": k, "v": v.flip(2), "pe": pe.flip(2)}

    options = case.options(patches={"attn1_patch": [before, before]}, mine=7)
    assert case.error(options) < 3e-3 and not handed_back() and len(seen) == 4
    for mine, theirs in zip(seen[:2], seen[2:], strict=True):
        assert mine[3:] == theirs[3:] == (None, [Case.TEXT, Case.TEXT + Case.PICTURE], 7)
        for one, other in zip(mine[:3], theirs[:3], strict=True):
            assert one.shape == other.shape and distance(one.double(), other.double()) < 3e-3


def test_an_override_of_another_node_computes_the_attention() -> None:
    case, calls = Case(), []

    def override(_stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((args[0].shape, args[3], kwargs["skip_reshape"]))
        return args[2].transpose(1, 2).flatten(2)

    options = case.options() | {attention.HOOK: override}
    pairs = zip(case.run(case.module, options), case.run(case.stock, {attention.HOOK: override}), strict=True)
    assert max(distance(one.double(), other.double()) for one, other in pairs) < 3e-3
    assert calls[0] == calls[1] and len(calls) == 2 and not handed_back()


def test_a_block_with_replaced_parts_is_stocks() -> None:
    case = Case()
    case.module.attn.to_k.forward = case.module.attn.to_k.forward
    ours, theirs = case.run(case.module, case.options()), case.run(case.stock, {})
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert handed_back() == {"another node has replaced attn.to_k"}
    with pytest.raises(KernelRefused, match=r"another node has replaced attn\.to_k"):
        case.run(case.module, case.options(KernelPolicy.of("on")))


def test_parts_of_another_kind_are_stocks() -> None:
    class Gated(stock.FeedForward):
        """Another pack's."""

    for part, kind, reason in (
        ("img_mlp", Gated, "feed-forward"),
        ("attn", type("A", (stock.Attention,), {}), "attention"),
    ):
        module: Any = stock.QwenImageTransformerBlock(256, 2, 128, dtype=HALF, operations=comfy.ops.manual_cast)
        getattr(module, part).__class__ = kind
        assert qwen_image.obstacle(module) == f"its {reason} is of a kind without fused kernels"


def test_what_is_given_in_another_way_is_stocks() -> None:
    case = Case()
    case.temb = torch.randn(1, 256, dtype=HALF)
    assert case.error(case.options()) < 3e-3 and not handed_back(), "one modulation for all prompts"
    assert case.run(case.module, case.options(), None, None)[0].shape == case.text.shape
    case.text = case.text.float()
    assert all(one.shape[0] == 2 for one in case.run(case.module, case.options()))
    assert handed_back() == {"the prompt's tokens are of another type than the picture's"}


def test_bf16_is_stocks() -> None:
    case = Case(torch.bfloat16)
    ours, theirs = case.run(case.module, case.options()), case.run(case.stock, {})
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert handed_back() == {"the model computes in bfloat16, the kernels in float16"}

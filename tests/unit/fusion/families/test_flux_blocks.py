"""A Flux whose blocks compute through our ops samples what stock's does, as near as fp16 is; and says when it does not."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ldm.flux.layers as stock
import comfy.model_management
import comfy.ops
import comfy.sd
import family_scenes
import pytest
import torch
from in_halves import HALF, OFF, as_near, load
from scenes import Scene, distance, sample

from bed.depth import is_thorough
from fusestream import checkpoints
from fusestream.fusion import KernelPolicy
from fusestream.fusion.families.flux2 import fused as flux
from fusestream.fusion.families.flux2 import joint
from fusestream.fusion.families.flux2.need import need
from fusestream.fusion.fused import attention
from fusestream.fusion.weights import lora
from fusestream.kernels_cuda import LEDGER, KernelRefused

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flux")


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


def handed_back() -> set[str]:
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op == "flux block"}


# -------------------------------------------------------------------------------------------------------- whole models


METHODS = ("index_timestep_zero", *(("index", "offset", "uxo") if is_thorough() else ()))


@pytest.mark.deep
@pytest.mark.parametrize("method", METHODS)
def test_references_by_every_method(folder: Path, method: str) -> None:
    """Those at timestep zero have shift, scale and gate of their own."""
    path, scene = checkpoints.write("flux2", folder), family_scenes.inputs("flux2")
    sides = [[[words, {**extras, "reference_latents_method": method}]] for ((words, extras),) in scene[:2]]
    given = Scene(*sides, scene.latent)
    fused, theirs, exact = (sample(load(path, *each), given) for each in ((), (OFF,), (OFF, torch.float32)))
    assert not handed_back() and as_near(fused, theirs, exact)
    assert method == "index" or not torch.equal(exact, sample(load(path, OFF, torch.float32), scene))


def lora_for(net: Any) -> dict[str, torch.Tensor]:
    """For matrices of double and single blocks, whole ones and, as trainers of diffusers write them, for q, k and v apart."""
    found, generator = {}, torch.Generator().manual_seed(3)

    def pair(name: str, rows: int, columns: int, down: str, up: str) -> None:
        found[f"{name}.{up}"] = torch.randn(rows, 2, generator=generator) * 0.1
        found[f"{name}.{down}"] = torch.randn(2, columns, generator=generator) * columns**-0.5

    for name in ("double_blocks.0.img_attn.proj", "double_blocks.1.txt_mlp.0", "single_blocks.1.linear2"):
        rows, columns = net.get_submodule(name).weight.shape
        pair(f"diffusion_model.{name}", rows, columns, "lora_A.weight", "lora_B.weight")
    dim = net.hidden_size
    for part in ("to_q", "to_v", "add_k_proj"):
        pair(f"transformer.transformer_blocks.0.attn.{part}", dim, dim, "lora_A.weight", "lora_B.weight")
    pair("transformer.single_transformer_blocks.0.attn.to_k", dim, dim, "lora_A.weight", "lora_B.weight")
    mlp = net.single_blocks[0].mlp_hidden_dim_first
    pair("transformer.single_transformer_blocks.0.proj_mlp", mlp, dim, "lora_A.weight", "lora_B.weight")
    return found


@pytest.mark.every_other
@pytest.mark.parametrize("where", ["in the weight", "in the product"])
def test_loras(folder: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones, and those of a part of a packed matrix: added by stock's functions, or in one pass as on a card."""
    if where == "in the product":
        monkeypatch.setattr(lora, "serves", lambda _device: True)
    path, scene = checkpoints.write("flux1", folder, "fp16"), family_scenes.inputs("flux1")

    def patched(*given: Any) -> Any:
        model = load(path, *given)
        file = lora_for(model.model.diffusion_model)
        found, _ = comfy.sd.load_lora_for_models(model, None, file, 0.8, 0.0)
        assert len(found.patches) >= 5
        return sample(found, scene)

    fused, theirs, exact = (patched(*given) for given in ((), (OFF,), (OFF, torch.float32)))
    assert not handed_back() and as_near(fused, theirs, exact)
    assert distance(exact, sample(load(path, OFF, torch.float32), scene)) > 0.01


@pytest.mark.deep("fast", "turbo")
@pytest.mark.parametrize("precision", ["fast", "turbo"])
def test_other_tiers(folder: Path, precision: Any) -> None:
    """On the CPU `fast` is precise. `turbo` rounds what a prompt's two times 512 tokens are multiplied with, and them."""
    path, scene = checkpoints.write("flux2", folder), family_scenes.inputs("flux2")
    off = distance(sample(load(path, KernelPolicy.of("auto", precision=precision)), scene), sample(load(path), scene))
    assert not handed_back() and (off == 0 if precision == "fast" else 1e-3 < off < 0.05)


def test_what_a_step_needs() -> None:
    """klein 9B at 2048x2048: nine tensors of the size of x, and a chunk."""
    net = SimpleNamespace(
        params=SimpleNamespace(), hidden_size=4096, patch_size=1, single_blocks=[SimpleNamespace(mlp_hidden_dim=12288)]
    )
    x = (128 * 128 + 512) * 4096 * 2
    assert need(net, (1, 128, 128, 128), HALF) == pytest.approx(1.05 * (9 * x + 2**28))
    assert need(net, (2, 128, 128, 128), HALF) == pytest.approx(1.05 * (18 * x + 2**28))
    assert need(net, (1, 128, 128, 128), torch.bfloat16) is None
    net.params.yak_mlp = True
    assert need(net, (1, 128, 128, 128), HALF) is None


# --------------------------------------------------------------------------------------------------- blocks, alone


class Case:
    """A double and a single block with their weights, and inputs of a batch of two, 11 tokens of text and 45 of picture."""

    TEXT, PICTURE = 11, 45

    def __init__(self, kind: str = "flux2", dim: int = 256, **others: Any) -> None:
        ops: Any = comfy.ops.disable_weight_init
        shared = kind == "flux2"
        args = {
            "mlp_ratio": 3.0 if shared else 4.0,
            "modulation": not shared,
            "mlp_silu_act": shared,
            "operations": ops,
        }
        args |= {"dtype": HALF, **others}
        self.double: Any = stock.DoubleStreamBlock(dim, 2, **args, qkv_bias=not shared, proj_bias=not shared)
        self.single: Any = stock.SingleStreamBlock(dim, 2, **args, bias=not shared)
        for module in (self.double, self.single):
            for parameter in module.parameters():
                scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
                parameter.data.copy_(torch.randn(parameter.shape) * scale + (0 if parameter.ndim == 2 else 0.5))
        self.stock_double, self.stock_single = copy.deepcopy((self.double, self.single))
        flux.fuse(torch.nn.ModuleList([self.double, self.single]))
        self.txt, self.img = (torch.randn(2, n, dim, dtype=HALF) for n in (self.TEXT, self.PICTURE))
        angle = torch.randn(2, 1, self.TEXT + self.PICTURE, 64)
        self.pe = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), -1).unflatten(-1, (2, 2))
        self.vec: Any = torch.randn(2, dim, dtype=HALF)
        self.mods = self.vec
        self.mod = self.vec
        if shared:
            self.mods = tuple((self.modulation(dim), self.modulation(dim)) for _ in range(2))
            self.mod = self.modulation(dim)

    @staticmethod
    def modulation(dim: int, rows: int = 1) -> Any:
        """As one Linear makes them: views of what lies side by side."""
        return stock.ModulationOut(*(torch.randn(2, rows, 3 * dim, dtype=HALF) * 0.5).chunk(3, -1))

    def options(self, policy: KernelPolicy | None = None, **others: Any) -> dict[str, Any]:
        model: Any = type("Model", (), {"model_options": {"transformer_options": dict(others)}})
        attention.install(model, policy or KernelPolicy())
        found: dict[str, Any] = model.model_options["transformer_options"]
        return found

    def run(
        self, is_ours: bool, options: dict[str, Any], mask: Any = None, double: Any = None, single: Any = None
    ) -> Any:
        """The streams after the double block, and the one after the single block. double, single: more arguments."""
        blocks = (self.double, self.single) if is_ours else (self.stock_double, self.stock_single)
        img, txt = blocks[0](
            img=self.img.clone(), txt=self.txt.clone(), vec=self.mods, pe=self.pe, attn_mask=mask,
            transformer_options=options, **(double or {}),
        )  # fmt: skip
        x = torch.cat((self.txt, self.img), 1)
        out = blocks[1](x, vec=self.mod, pe=self.pe, attn_mask=mask, transformer_options=options, **(single or {}))
        return img, txt, out

    def error(self, options: dict[str, Any], *args: Any) -> float:
        theirs = {name: value for name, value in options.items() if not name.startswith(("fusestream", attention.HOOK))}
        pairs = zip(self.run(True, options, *args), self.run(False, theirs, *args), strict=True)
        return max(distance(one.double(), other.double()) for one, other in pairs)


KIND = pytest.mark.parametrize("kind", ["flux2", "flux1"])


@KIND
def test_a_block(kind: str) -> None:
    case = Case(kind)
    assert 0 < case.error(case.options()) < 3e-3 and not handed_back()


@KIND
def test_the_streams_are_added_to_where_they_lie_as_in_stock(kind: str) -> None:
    case = Case(kind)
    img, txt, x = case.img, case.txt, torch.cat((case.txt, case.img), 1)
    found = case.double(img=img, txt=txt, vec=case.mods, pe=case.pe, transformer_options=case.options())
    assert found[0] is img and found[1] is txt
    assert case.single(x, vec=case.mod, pe=case.pe, transformer_options=case.options()) is x


@KIND
def test_masks(kind: str) -> None:
    case = Case(kind)
    tokens = Case.TEXT + Case.PICTURE
    seen = torch.rand(tokens, tokens) < 0.6
    added = torch.randn(2, 1, tokens, tokens, dtype=HALF)
    for mask in (seen | torch.eye(tokens, dtype=torch.bool), added):
        assert case.error(case.options(), mask) < 3e-3
    assert not handed_back()


@KIND
def test_patches_of_the_attention_see_what_they_would(kind: str) -> None:
    case = Case(kind)
    seen: list[Any] = []

    def before(q: Any, k: Any, v: Any, pe: Any, attn_mask: Any, extra_options: Any) -> dict[str, Any]:
        seen.append((q.clone(), k.clone(), v.clone(), extra_options.get("img_slice"), extra_options["mine"]))
        return {"q": q * 1.5, "k": k, "v": v.flip(2), "pe": pe.flip(2)}

    def behind(attended: Any, extra_options: Any) -> Any:
        seen.append((attended.clone(), extra_options.get("img_slice"), extra_options["mine"]))
        return attended * 2

    patches = {"attn1_patch": [before], "attn1_output_patch": [behind]}
    assert case.error(case.options(patches=patches, mine=7)) < 3e-3 and not handed_back()
    ours, stocks = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(ours) == 4
    for mine, theirs in zip(ours, stocks, strict=True):
        assert mine[-2:] == theirs[-2:]
        for one, other in zip(mine[:-2], theirs[:-2], strict=True):
            assert one.shape == other.shape and distance(one.double(), other.double()) < 3e-3


@KIND
def test_an_override_of_another_node_computes_the_attention(kind: str) -> None:
    case, calls = Case(kind), []

    def override(_stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((args[0].shape, args[3], kwargs["skip_reshape"]))
        return args[2].transpose(1, 2).flatten(2)

    options = case.options() | {attention.HOOK: override}
    pairs = zip(case.run(True, options), case.run(False, {attention.HOOK: override}), strict=True)
    assert max(distance(one.double(), other.double()) for one, other in pairs) < 3e-3
    assert not handed_back() and calls[:2] == calls[2:] and len(calls) == 4


def two_rows(case: Case) -> None:
    """Modulation of two rows: the second is for tokens at timestep zero."""
    case.mods = tuple((case.modulation(256, rows), case.modulation(256, rows)) for rows in (2, 1))
    case.mod = case.modulation(256, 2)


def test_modulation_by_segments() -> None:
    case = Case()
    two_rows(case)
    double = {"modulation_dims_img": [(0, 30, 0), (30, Case.PICTURE, 1)]}
    single = {"modulation_dims": [(0, 41, 0), (41, Case.TEXT + Case.PICTURE, 1)]}
    assert case.error(case.options(), None, double, single) < 3e-3 and not handed_back()


def test_modulation_that_leaves_tokens_out_is_stocks() -> None:
    case = Case()
    two_rows(case)
    double = {"modulation_dims_img": [(0, 20, 0), (30, Case.PICTURE, 1)]}
    single = {"modulation_dims": [(0, 40, 0), (41, Case.TEXT + Case.PICTURE, 1)]}
    assert case.error(case.options(), None, double, single) == 0
    assert handed_back() == {"modulation is given for some of the tokens only"}
    with pytest.raises(KernelRefused, match=r"'on'.*some of the tokens.*'auto'"):
        case.run(True, case.options(KernelPolicy.of("on")), None, double, single)


def test_modulation_for_each_token() -> None:
    case = Case()
    rows = (Case.PICTURE, Case.TEXT)
    case.mods = tuple((case.modulation(256, n), case.modulation(256, n)) for n in rows)
    case.mod = case.modulation(256, sum(rows))
    assert case.error(case.options()) < 3e-3 and not handed_back()


@KIND
def test_what_overflows_is_the_largest_number(kind: str) -> None:
    """Stock makes the same of it, where it has not made a NaN before: the outliers are of both signs, in every stream."""
    case = Case(kind)
    for block, matrices in ((case.double, ("img_mlp.2", "txt_mlp.2", "img_attn.proj", "txt_attn.proj")),
                            (case.single, ("linear2",))):  # fmt: skip
        for name in matrices:
            weight = block.get_submodule(name).weight
            weight.data[3], weight.data[5] = 60000, -60000
    img, txt, x = case.run(True, case.options())
    assert not handed_back()
    for stream in (img, txt, x):
        assert bool(stream.isfinite().all()) and float(stream.abs().max()) == 65504


def test_a_gated_product_that_overflows_saturates() -> None:
    """silu(gate) * up is the one product of two: neither overflows, both together do."""
    case = Case()
    hidden = case.single.mlp_hidden_dim
    case.single.linear1.weight.data[-2 * hidden :] *= 400
    case.double.img_mlp[0].weight.data *= 400
    assert all(bool(stream.isfinite().all()) for stream in case.run(True, case.options())) and not handed_back()


@pytest.mark.parametrize("part", ["img_attn.qkv", "txt_mlp.0", "img_norm2", "img_attn.norm"])
def test_a_block_with_replaced_parts_is_stocks(part: str) -> None:
    case = Case()
    module = case.double.get_submodule(part)
    module.forward = module.forward
    img, txt, _ = case.run(True, case.options())
    theirs = case.run(False, {})
    assert torch.equal(img, theirs[0]) and torch.equal(txt, theirs[1])
    assert handed_back() == {f"another node has replaced {part}"}


def test_feed_forwards_of_another_kind_are_stocks() -> None:
    case = Case("flux1", yak_mlp=True)
    assert case.error(case.options()) == 0
    assert handed_back() == {"its feed-forward is of a kind without fused kernels"}


def test_a_gated_feed_forward_with_a_bias_is_stocks() -> None:
    case = Case("flux1", mlp_silu_act=True)
    assert 0 < case.error(case.options()) < 3e-3, "the double block's has none, and is ours"
    assert handed_back() == {"its gated feed-forward has a bias"}


def test_without_our_loader_a_block_is_stocks() -> None:
    case = Case()
    assert case.error({}) == 0 and case.error(case.options(OFF)) == 0 and not handed_back()


@pytest.mark.deep
def test_torch_compile_takes_a_fused_block() -> None:
    case = Case()
    options = case.options()
    want = case.run(True, options)
    torch.compiler.reset()
    case.double, case.single = (
        torch.compile(one, backend="eager", dynamic=False) for one in (case.double, case.single)
    )
    for one, other in zip(case.run(True, options), want, strict=True):
        assert distance(one.double(), other.double()) < 3e-3
    assert not handed_back()


def test_the_norms_epsilon_is_the_one_torch_takes() -> None:
    """Stock's norms of q and k say none. It shows where a head is next to nothing."""
    norm = stock.QKNorm(128, dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    norm.query_norm.weight.data.fill_(1)
    x = torch.full((1, 128), 1e-4)
    given = joint.EPS if norm.query_norm.eps is None else norm.query_norm.eps
    torch.testing.assert_close(norm.query_norm(x), x / (x.square().mean(-1, keepdim=True) + given).sqrt())

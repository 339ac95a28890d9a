"""Attention that was trained sparse: by itself, and in files of stock's Wan, beside float64 by the papers' definitions."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import comfy.sample
import comfy.sd
import in_halves
import pytest
import tiny_wan
import torch
import trained_sparse_oracle as oracle
from safetensors.torch import load_file, save_file
from scenes import distance

from fusestream import checkpoints
from fusestream.fusion import report
from fusestream.fusion.base import notices
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.base.trained_sparse import TrainedSparse
from fusestream.fusion.families.wan.need import need
from fusestream.fusion.fused.attention import HOOK
from fusestream.fusion.load.diffusion import load_diffusion_model, load_streamed_diffusion_model
from fusestream.fusion.sparse.model import sparse_of
from fusestream.fusion.sparse.sla import Sla, add_linear_
from fusestream.fusion.sparse.tally import Tally
from fusestream.fusion.sparse.trained import How
from fusestream.fusion.sparse.vsa import Vsa
from fusestream.kernels_cuda import KernelPolicy
from fusestream.nodes.kernels import ModelKernels
from fusestream.nodes.sparse import SparseAttentionNode

pytestmark = [pytest.mark.usefixtures("as_comfyui_runs"), pytest.mark.usefixtures("one_thread")]

LATENT = (1, 16, 5, 14, 18)  # 5 x 7 x 9 tokens: five blocks of keys; twelve cubes, which are cut off on each side
LAYERS = checkpoints.wan.SPARSE["wan_sla"].layers
KINDS = {"wan_sla": "SLA", "wan_vsa": "VSA"}
STEPS = 2
SHARE = 0.45


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


def how(share: float, grid: Any = None) -> tuple[How, Tally]:
    tally = Tally()
    return How(None, share, grid, KernelPolicy(), tally.visited), tally


def drawn(
    tokens: int, *more: int, heads: int = 3, d: int = 64, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Queries, keys and values. Keys have much in common, as trained ones do."""
    source = torch.Generator().manual_seed(tokens)
    q, k, v, *others = (
        torch.randn(2, tokens, heads, d, generator=source, dtype=torch.float64) for _ in range(3 + len(more))
    )
    return [t.to(dtype) for t in (q, k + 3 * q.mean((0, 1)), v, *others)]


# ------------------------------------------------------------------------------------------------------------ the methods


def project(weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return lambda x: torch.nn.functional.linear(x, weight.to(x.dtype), bias.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("tokens", [1, 130, 470, 512])
def test_sla_is_what_the_paper_says(tokens: int, dtype: torch.dtype) -> None:
    """One token; three blocks, of which a share is less than one; a short last block; whole ones."""
    q, k, v = drawn(tokens, dtype=dtype)
    weight, bias = torch.randn(64, 64, dtype=torch.float64) / 8, torch.randn(64, dtype=torch.float64)
    asked, tally = how(0.3)
    got = Sla(project(weight, bias)).attend(q, k, v, asked)
    want = oracle.sla(q, k, v, weight=weight, bias=bias, share=0.3)
    assert got.dtype is dtype and distance(got, want) < (1e-9 if dtype is torch.float64 else 2e-3)
    count = -(-tokens // 64)
    assert tally.read().visited in (None, pytest.approx(max(1, int(0.3 * count)) / count))


def test_blocks_are_told_apart_by_keys_that_have_much_in_common() -> None:
    """In FP16, of which what all keys share takes most of the digits."""
    q, k, v = drawn(1024, heads=1)
    q, k, v = (t.half() for t in (q, k + 100 * q[:1, :1], v))
    got = Sla(torch.zeros_like).attend(q, k, v, how(0.2)[0])
    want = oracle.sla(q, k, v, weight=torch.zeros(64, 64), bias=torch.zeros(64), share=0.2)
    assert distance(got, want) < 0.02


def test_the_linear_part_takes_many_tokens_of_the_same_feature() -> None:
    """Sums that FP16 does not hold, in several pieces."""
    q, k, v = drawn(9000, heads=1)
    k, v = torch.zeros_like(k), 60 * v.abs()
    k[..., 3] = 40.0
    got = torch.ones_like(q, dtype=torch.float16)
    add_linear_(got, q.half(), k.half(), v.half(), lambda x: x)
    assert got.isfinite().all() and distance(got, 1 + v.mean(1, keepdim=True).expand_as(v)) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("grid", [(4, 8, 8), (5, 7, 9), (1, 2, 3)])
def test_vsa_is_what_the_paper_says(grid: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Cubes that are whole, that are cut off on each side, and one that is most of all padding."""
    q, k, v, gate = drawn(math.prod(grid), 1, dtype=dtype)
    asked, tally = how(0.3, grid)
    got = Vsa(gate.flatten(2)).attend(q, k, v, asked)
    assert got.dtype is dtype
    assert distance(got, oracle.vsa(q, k, v, gate, grid=grid, share=0.3)) < (1e-9 if dtype is torch.float64 else 2e-3)
    count = len(oracle.cubes(grid))
    assert tally.read().visited == pytest.approx(math.ceil(0.3 * count) / count)


def test_vsa_needs_a_grid() -> None:
    assert "frames, lines and columns" in (Vsa(torch.zeros(1, 1, 64)).obstacle(None) or "")


# ---------------------------------------------------------------------------------------------------------------- in files


def sample(model: Any) -> torch.Tensor:
    return tiny_wan.sample(model, LATENT, STEPS, guidance=1.0)


def tallied(model: Any) -> Any:
    found = sparse_of(model.model_options["transformer_options"])
    assert found is not None
    return found.tally.read()


def of_share(model: Any, share: float = SHARE) -> Any:
    return SparseAttentionNode.execute(model, share=share).result[0]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(kind: str, folder: Path) -> Path:
    return checkpoints.write(kind, folder)


@pytest.fixture(scope="module")
def exact(path: Path) -> torch.Tensor:
    """Stock's, with its attentions by the definitions."""
    model = comfy.sd.load_diffusion_model(str(path))
    oracle.teach(model.model.diffusion_model, load_file(path), SHARE)
    return sample(model)


@pytest.fixture(scope="module")
def dense(path: Path) -> torch.Tensor:
    return sample(comfy.sd.load_diffusion_model(str(path)))


def test_a_streamed_model_computes_as_it_was_trained(
    path: Path, kind: str, exact: torch.Tensor, dense: torch.Tensor
) -> None:
    """In stock's blocks, whose type is FP32, and in ours, in halves. Far from what stock makes of the file."""
    wide, halves = load_streamed_diffusion_model(str(path)), in_halves.load(path)
    wide.stream.residency.ceiling = wide.stream.residency.least
    far = distance(dense, exact)
    for model, error in ((wide, 1e-4), (halves, 1e-2)):
        asked = of_share(model)
        assert distance(sample(asked), exact) < min(error, far / 10)
        found = tallied(asked)
        assert found.sparse == STEPS * LAYERS and found.dense == ()
    shown = report.gather(asked)
    assert shown.sparsity.asked == f"{KINDS[kind]}, as asked for, {SHARE:.0%} of the key blocks"
    assert any("trained sparse" in line and KINDS[kind] in line for line in report.as_text(shown).splitlines())


def test_the_extra_tensors_stream_with_their_block(path: Path, kind: str) -> None:
    model = load_streamed_diffusion_model(str(path))
    extra = {"wan_sla": "self_attn.attn_op.local_attn.proj_l", "wan_vsa": "to_gate_compress"}[kind]
    for i, block in enumerate(model.stream.blocks):
        keys = {one.key for one in block.paged}
        assert {f"diffusion_model.blocks.{i}.{extra}.{name}" for name in ("weight", "bias")} <= keys
    trained = sparse_of(model.model_options["transformer_options"]).settings
    assert trained == TrainedSparse(KINDS[kind], {"wan_sla": 0.1, "wan_vsa": 0.2}[kind])


@pytest.mark.every_other
def test_a_step_is_expected_to_take_more_memory(path: Path, kind: str, folder: Path) -> None:
    """By the gate and the cubes of a quarter of the heads, or by features in pieces."""
    shape = (1, 16, 21, 60, 104)
    own, plain = (
        need(load_streamed_diffusion_model(str(file)).model.diffusion_model, shape, torch.float16)
        for file in (path, checkpoints.write("wan_t2v", folder))
    )
    assert own is not None and plain is not None
    unit = 21 * 30 * 52 * 256 * 2
    assert own - plain == pytest.approx(1.05 * {"wan_sla": 4 * 64 * 2**20, "wan_vsa": 4 * unit}[kind])


@pytest.mark.every_other
def test_scaled_fp8_weights_compute_as_trained_too(
    folder: Path, kind: str, exact: torch.Tensor, dense: torch.Tensor
) -> None:
    """Far nearer to the model in FP16 than dense attention is."""
    model = of_share(in_halves.load(checkpoints.write(kind, folder, "fp8_scaled_blocks")))
    assert distance(sample(model), exact) < distance(dense, exact) / 2 and tallied(model).sparse == STEPS * LAYERS


@pytest.mark.deep("wan_vsa")
def test_a_lora_reaches_the_extra_tensors(path: Path, kind: str) -> None:
    key = {"wan_sla": "blocks.0.self_attn.attn_op.local_attn.proj_l", "wan_vsa": "blocks.0.to_gate_compress"}[kind]
    weights = load_file(path)
    size = weights[f"{key}.weight"].shape[0]
    source = torch.Generator().manual_seed(3)
    up, down = torch.randn(size, 4, generator=source), torch.randn(4, size, generator=source) / size
    model = load_streamed_diffusion_model(str(path))
    before = sample(model)
    import comfy.lora
    import comfy.lora_convert

    names = comfy.lora.model_lora_keys_unet(model.model, {})
    lora = {f"diffusion_model.{key}.lora_up.weight": up, f"diffusion_model.{key}.lora_down.weight": down}
    changed = model.clone()
    assert changed.add_patches(comfy.lora.load_lora(lora, names), 1.0)
    weights[f"{key}.weight"] = (weights[f"{key}.weight"].float() + up @ down).half()
    other = path.with_name(f"{kind}_merged.safetensors")
    save_file(weights, other, _metadata(path))
    got = sample(changed)
    assert distance(got, sample(load_streamed_diffusion_model(str(other)))) < 1e-3 < distance(got, before)


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
    return found


def test_kernels_off_is_stocks_to_the_last_bit(path: Path, dense: torch.Tensor) -> None:
    model = load_streamed_diffusion_model(str(path))
    (off,) = ModelKernels.execute(model, kernels="off").result
    assert torch.equal(sample(off), dense) and tallied(off).sparse == 0


@pytest.mark.every_other
def test_another_nodes_attention_is_obeyed_and_said(
    path: Path, dense: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_streamed_diffusion_model(str(path)).clone()
    calls = []

    def theirs(stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        out: torch.Tensor = stock(*args, **kwargs)
        return out

    model.model_options["transformer_options"][HOOK] = theirs
    notices._said.clear()
    with caplog.at_level(logging.WARNING, "fusestream"):
        assert torch.equal(sample(model), dense) and calls
    assert "another node has replaced the model's attention" in caplog.text


@pytest.mark.every_other
def test_other_nodes_settings_do_not_make_it_dense(path: Path) -> None:
    model = load_streamed_diffusion_model(str(path))
    (radial,) = SparseAttentionNode.execute(model, method="radial", dense_steps=1.0, least_tokens=9999).result
    assert torch.equal(sample(radial), sample(model)) and tallied(radial).dense == ()


def test_a_file_that_lost_a_part_is_refused(path: Path, kind: str) -> None:
    tensors = load_file(path)
    lost = {
        "wan_sla": "blocks.2.self_attn.attn_op.local_attn.proj_l.bias",
        "wan_vsa": "blocks.2.to_gate_compress.bias",
    }[kind]
    del tensors[lost]
    other = path.with_name(f"{kind}_lost.safetensors")
    save_file(tensors, other, _metadata(path))
    with pytest.raises(WrongFile, match=lost):
        load_streamed_diffusion_model(str(other))


@pytest.mark.deep("wan_sla-wan_diffusers", "wan_vsa-wan_flat")
@pytest.mark.parametrize("spelling", [checkpoints.spellings.wan_diffusers, checkpoints.spellings.wan_flat])
def test_files_as_they_are_published(path: Path, kind: str, spelling: Any) -> None:
    """Under diffusers' names, or with a Linear of patches: the same numbers."""
    other = path.with_name(f"{kind}_{spelling.__name__}.safetensors")
    spelled = spelling(load_file(path))
    assert spelled.keys() != load_file(path).keys() or spelled["patch_embedding.weight"].ndim == 2
    save_file(spelled, other, _metadata(path))
    model = load_streamed_diffusion_model(str(other))
    assert torch.equal(sample(model), sample(load_streamed_diffusion_model(str(path))))
    assert tallied(model).sparse == STEPS * LAYERS


def test_loaded_by_stock_it_is_said_to_be_dense(
    path: Path, dense: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    notices._said.clear()
    with caplog.at_level(logging.WARNING, "fusestream"):
        model = load_diffusion_model(str(path))
    assert "was trained with sparse attention" in caplog.text and "vram_budget" in caplog.text
    assert torch.equal(sample(model), dense)

"""A real Wan of stock's classes with sparse attention: streamed or loaded by stock, with guidance, and beside other nodes.

The references compute in place of the kernels, which take tensors of a card.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.sample
import comfy.sd
import comfy.utils
import pytest
import tiny_wan
import torch
from comfy_extras.nodes_context_windows import WanContextWindowsManualNode
from comfy_extras.nodes_easycache import EasyCacheNode
from scenes import distance

from fusestream import checkpoints, fusion
from fusestream.fusion import report
from fusestream.fusion.base.policy import policy_of
from fusestream.fusion.fused.attention import HOOK, AttentionOverride
from fusestream.fusion.patcher import call_log
from fusestream.fusion.report.data import Report, Sparsity
from fusestream.fusion.sparse import attention as sparse_attention
from fusestream.fusion.sparse.attention import SparseAttention
from fusestream.fusion.sparse.model import sparse_of
from fusestream.fusion.sparse.settings import Settings
from fusestream.nodes.kernels import ModelKernels
from fusestream.nodes.sparse import SparseAttentionNode

pytestmark = [pytest.mark.usefixtures("as_comfyui_runs"), pytest.mark.usefixtures("one_thread")]

LATENT = (1, 16, 7, 16, 16)  # 448 tokens: seven blocks of keys
LAYERS = checkpoints.wan.SIZES["wan_t2v"].layers
STEPS = 4
NOW: dict[str, Any] = {"share": 0.3, "dense_steps": 0.0, "dense_layers": 0, "least_tokens": 256}


@pytest.fixture(autouse=True)
def served_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "wrong_tensor", lambda *_: None)
    monkeypatch.setattr(sparse_attention, "forced", lambda policy: policy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sparse")


@pytest.fixture(scope="module")
def stocks(folder: Path) -> Any:
    return tiny_wan.by_stock(folder)


@pytest.fixture(scope="module")
def streamed(folder: Path) -> Any:
    return tiny_wan.streamed(folder)


def sparse(model: Any, **changed: Any) -> Any:
    return SparseAttentionNode.execute(model, **{**NOW, **changed}).result[0]


def sample(model: Any, guidance: float = 3.0, latent: tuple[int, ...] = LATENT, steps: int = STEPS) -> torch.Tensor:
    return tiny_wan.sample(model, latent, steps, guidance)


def override_of(model: Any) -> SparseAttention:
    found = sparse_of(model.model_options["transformer_options"])
    assert found is not None
    return found


def counted(model: Any) -> tuple[int, dict[str, int]]:
    """How many attentions were sparse, and why others were not."""
    found = override_of(model).tally.read()
    return found.sparse, dict(found.dense)


@pytest.fixture(scope="module")
def dense(stocks: Any) -> torch.Tensor:
    return sample(stocks)


# -------------------------------------------------------------------------------------------------------------- the node


def test_the_node_takes_what_settings_are() -> None:
    inputs = {item.id: item for item in SparseAttentionNode.GET_SCHEMA().inputs}
    assert {name: item.default for name, item in inputs.items() if name != "model"} == vars(Settings())
    assert list(inputs)[1:] == list(vars(Settings()))
    for edge in ("min", "max"):
        numbers = {name: getattr(item, edge) for name, item in inputs.items() if hasattr(item, edge)}
        Settings(**numbers)
    for method in inputs["method"].options:
        Settings(method)


@pytest.mark.deep
def test_what_goes_in_stays_dense(stocks: Any, dense: torch.Tensor) -> None:
    before = dict(stocks.model_options["transformer_options"])
    changed = sample(sparse(stocks))
    assert stocks.model_options["transformer_options"] == before and not stocks.wrappers
    assert not torch.equal(changed, dense) and torch.equal(sample(stocks), dense)


def test_wrong_settings_end_the_run(stocks: Any) -> None:
    with pytest.raises(ValueError, match="FuseStream Sparse Attention: share is 2"):
        sparse(stocks, share=2)


# ----------------------------------------------------------------------------------------------------------- the latents


@pytest.mark.every_other
@pytest.mark.parametrize(
    "all_of_it", [{"share": 1.0}, {"dense_steps": 1.0}, {"dense_layers": LAYERS}, {"least_tokens": 449}]
)
def test_all_dense_is_dense_to_the_last_bit(stocks: Any, dense: torch.Tensor, all_of_it: Any) -> None:
    model = sparse(stocks, **all_of_it)
    assert torch.equal(sample(model), dense) and counted(model)[0] == 0


def test_a_model_of_stocks_loader(stocks: Any, dense: torch.Tensor) -> None:
    """With guidance: two rows of a batch, each with blocks of its own. More blocks are nearer to dense."""
    models = [sparse(stocks, share=share) for share in (0.15, 0.3, 0.8)]
    far = [distance(sample(model), dense) for model in models]
    assert far == sorted(far, reverse=True) and 0 < far[2] < far[1] < 0.1, far
    sparse_ones, others = counted(models[0])
    assert others == {} and sparse_ones in (STEPS * LAYERS, 2 * STEPS * LAYERS)  # cond and uncond together, or in turns


def test_a_streamed_model_of_ours(streamed: Any) -> None:
    dense, model = sample(streamed), sparse(streamed)
    far = distance(sample(model), dense)
    assert 0 < far < 0.1 and counted(model)[0] >= STEPS * LAYERS
    assert torch.equal(sample(streamed), dense)
    held = override_of(model).held
    assert held is streamed.model_options["transformer_options"][HOOK] and isinstance(held, AttentionOverride)


def test_first_steps_and_layers(stocks: Any) -> None:
    model = sparse(stocks, dense_steps=0.5, dense_layers=1)
    sample(model, guidance=1.0)
    early, late = STEPS // 2, STEPS - STEPS // 2
    assert counted(model) == (
        late * (LAYERS - 1),
        {"one of the first layers": STEPS, "one of the first steps": early * (LAYERS - 1)},
    )


def test_radial_on_a_video_of_several_frames(stocks: Any) -> None:
    latent = (1, 16, 6, 32, 40)  # six frames of 320 tokens
    model = sparse(stocks, method="radial")
    far = distance(sample(model, 1.0, latent, 1), sample(stocks, 1.0, latent, 1))
    assert 0 < far < 0.1 and counted(model) == (LAYERS, {})


def test_tokens_that_are_more_than_the_grid_have_no_tiles(stocks: Any, folder: Path) -> None:
    """A reference picture stands before the video. Top-k takes them as they come, radial stays dense."""
    net = comfy.sd.load_diffusion_model(str(checkpoints.write("wan_fun_control", folder)))
    models = [sparse(net, method=method) for method in ("top-k", "radial")]
    generator = torch.Generator().manual_seed(0)
    picture = torch.randn(1, 16, 1, 16, 16, generator=generator)
    words = [[torch.randn(1, 20, checkpoints.T5_WIDTH, generator=generator), {"reference_latents": [picture]}]]
    empty = torch.zeros(LATENT)
    for model in models:
        noise = comfy.sample.prepare_noise(empty, 1)
        run = ("euler", "simple", words, words, empty)
        comfy.sample.sample(model, noise, 1, 1.0, *run, disable_pbar=True, seed=1)
    assert counted(models[0]) == (LAYERS, {})
    [(reason, count)] = counted(models[1])[1].items()
    assert "does not say how its tokens lie" in reason and count == LAYERS


# -------------------------------------------------------------------------------------------------- beside other nodes


@pytest.mark.deep
@pytest.mark.parametrize("first", [False, True])
def test_a_lora_before_or_behind(stocks: Any, folder: Path, first: bool) -> None:
    file = comfy.utils.load_torch_file(str(checkpoints.write("lora_kohya", folder)))

    def with_lora(model: Any) -> Any:
        return comfy.sd.load_lora_for_models(model, None, file, 0.8, 0.0)[0]

    model = sparse(with_lora(stocks)) if first else with_lora(sparse(stocks))
    far = distance(sample(model), sample(with_lora(stocks)))
    assert 0 < far < 0.1 and counted(model)[0] >= STEPS * LAYERS
    assert distance(sample(model), sample(sparse(stocks))) > 1e-3


@pytest.mark.deep
@pytest.mark.parametrize("first", [False, True])
def test_easycache_before_or_behind(stocks: Any, first: bool) -> None:
    """What it skips is neither sparse nor dense."""

    def cached(model: Any) -> Any:
        return EasyCacheNode.execute(model, 5.0, 0.0, 1.0, False).result[0]

    model = sparse(cached(stocks)) if first else cached(sparse(stocks))
    sample(model, guidance=1.0, steps=8)
    count, others = counted(model)
    assert others == {} and 0 < count < 8 * LAYERS and count % LAYERS == 0


@pytest.mark.deep
def test_context_windows(stocks: Any) -> None:
    """Windows of four latent frames over eleven: 256 tokens each."""

    def windowed(model: Any) -> Any:
        return WanContextWindowsManualNode.execute(model, 13, 4, "standard_static", 1, False, "pyramid", False).result[
            0
        ]

    latent = (1, 16, 11, 16, 16)
    model = windowed(sparse(stocks))
    far = distance(sample(model, 1.0, latent, 2), sample(windowed(stocks), 1.0, latent, 2))
    assert 0 < far < 0.1
    assert counted(model)[1] == {} and counted(model)[0] > 2 * 2 * LAYERS


def test_the_kernels_node_behind_it(streamed: Any) -> None:
    model = sparse(streamed)
    changed = ModelKernels.execute(model, "auto", "fast").result[0]
    options = changed.model_options["transformer_options"]
    policy = fusion.KernelPolicy.of("auto", precision="fast")
    outer = override_of(changed)
    assert policy_of(options) == policy and outer.settings == override_of(model).settings
    assert isinstance(outer.held, AttentionOverride) and outer.held.policy == policy
    assert override_of(model).held.policy == fusion.KernelPolicy(), "the one before stays as it is"
    sample(changed, 1.0, steps=1)
    assert counted(changed) == (LAYERS, {}) and counted(model) == (0, {})


def test_attention_that_is_switched_off_behind_it_is_stocks(streamed: Any) -> None:
    off = [ModelKernels.execute(model, "auto", attention="off").result[0] for model in (sparse(streamed), streamed)]
    assert torch.equal(*(sample(model, 1.0) for model in off))
    assert counted(off[0]) == (0, {"attention is switched off for this model": STEPS * LAYERS})


def test_an_override_of_another_node_stays_inside(stocks: Any) -> None:
    calls = []

    def theirs(stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args[0].shape[1])
        return stock(*args, **kwargs)

    model = stocks.clone()
    model.model_options["transformer_options"][HOOK] = theirs
    changed = sparse(model)
    sample(changed, 1.0, steps=1)
    assert len(calls) == LAYERS, "the text's alone"
    kernels = ModelKernels.execute(changed, "auto").result[0]
    assert override_of(kernels).held is theirs


def test_a_second_node_takes_the_place_of_the_first(streamed: Any) -> None:
    model = sparse(sparse(streamed, share=0.2), share=0.8)
    held = override_of(model).held
    assert isinstance(held, AttentionOverride) and override_of(model).settings.share == 0.8
    sample(model, 1.0, steps=1)
    assert counted(model) == (LAYERS, {})


def test_two_branches_count_for_themselves(stocks: Any) -> None:
    one, other = sparse(stocks), sparse(stocks, share=0.8)
    sample(one, 1.0, steps=1)
    assert counted(one) == (LAYERS, {}) and counted(other) == (0, {})


# ----------------------------------------------------------------------------------------------------------- the report


def test_the_report_tells(stocks: Any) -> None:
    model = sparse(stocks, dense_layers=1)
    sample(model, 1.0)
    found = report.gather(model)
    assert found.sparsity is not None and not found.gaps
    assert (found.sparsity.attentions, found.sparsity.all) == (STEPS * (LAYERS - 1), STEPS * LAYERS)
    assert found.sparsity.dense == (("one of the first layers", STEPS),) and 0.3 < found.sparsity.visited < 1
    assert found.sparsity.seconds > 0 and found.sparsity.dense_seconds > 0
    text = report.as_text(found)
    assert "Sparse attention\n  top-k, 30% of the key blocks: 12 of 16 self-attentions were sparse and visited " in text
    assert "\n  dense: one of the first layers: 4 attentions\n" in text
    assert json.loads(report.as_json(found))["sparsity"]["attentions"] == 12
    assert report.gather(stocks).sparsity is None and "Sparse attention\n" not in report.as_text(report.gather(stocks))
    assert report.draw(found).height > report.draw(report.gather(stocks)).height


def test_a_smaller_bound_visits_more_and_is_nearer_to_dense(stocks: Any) -> None:
    """From the node's input to the report."""
    dense, far, visited = sample(stocks, 1.0, steps=1), [], []
    for left_out in (0.6, 0.1):
        model = sparse(stocks, method="bounded", left_out=left_out)
        far.append(float((sample(model, 1.0, steps=1) - dense).norm()))
        found = report.gather(model)
        assert found.sparsity is not None and found.sparsity.asked.startswith(f"bounded, at most {left_out:.0%} of")
        visited.append(found.sparsity.visited)
    assert visited[0] < visited[1] <= 1 and far[0] > far[1]


def test_the_report_of_what_has_not_run(stocks: Any) -> None:
    found = report.gather(sparse(stocks, method="radial"))
    assert found.sparsity == Sparsity("radial")
    assert "  radial: 0 of 0 self-attentions were sparse\n" in report.as_text(found)


def test_reports_compare_what_is_visited() -> None:
    reports = [
        Report("a", "b", sparsity=Sparsity("top-k", 3, visited, seconds, 0.2))
        for visited, seconds in ((0.5, 0.1), (0.25, 0.05))
    ]
    text = report.compare_text(*reports)
    assert "a sparse attention: A 100.0 ms, B 50.0 ms (B / A 0.50)\n" in text
    assert "key blocks it visits: A 50.0%, B 25.0% (B / A 0.50)\n" in text
    assert "sparse" not in report.compare_text(Report("a", "b"), Report("a", "b"))


def test_passes_of_a_sparse_and_a_dense_branch_are_told_apart(streamed: Any) -> None:
    one = sparse(streamed)
    sample(one, 1.0, steps=3)
    sample(streamed, 1.0, steps=2)
    assert call_log.branch_of(one) != call_log.branch_of(streamed)
    calls = call_log.branches(streamed)[-5:]
    assert [len(call_log.passes_under(5, calls, call_log.branch_of(model))) for model in (one, streamed)] == [3, 2]

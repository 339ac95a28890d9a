"""A tiny Wan with sparse attention on the card: kernels beside references, streamed and loaded by stock. Needs a ComfyUI."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.models import load, stock
from gpu.support import error

from fusestream import checkpoints
from fusestream.kernels_cuda import LEDGER, KernelPolicy

pytestmark = [
    pytest.mark.usefixtures("as_comfyui_runs"),
    pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI"),
]

VIDEO = (1, 16, 9, 26, 30)  # 1755 tokens: 27 blocks of keys and 27 tokens, in tiles that are cut off on each side
FRAMES_APART = (1, 16, 7, 32, 40)  # seven frames of 320 tokens, of which radial does not visit all
STEPS = 4
LAYERS = checkpoints.wan.SIZES["wan_t2v"].layers
NOW: dict[str, Any] = {"share": 0.5, "dense_steps": 0.0, "dense_layers": 0, "least_tokens": 256}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("wan_t2v", tmp_path_factory.mktemp("sparse"))


def sparse(model: Any, **changed: Any) -> Any:
    from fusestream.fusion.sparse import model as of_model
    from fusestream.fusion.sparse.settings import Settings

    return of_model.sparse(model, Settings(**{**NOW, **changed}))


def sample(model: Any, latent: tuple[int, ...] = VIDEO) -> torch.Tensor:
    """Some Euler steps with guidance from seed 1, for words of seed 0."""
    import comfy.sample

    source = torch.Generator().manual_seed(0)
    words, others = ([[torch.randn(1, 20, checkpoints.T5_WIDTH, generator=source), {}]] for _ in range(2))
    empty = torch.zeros(latent)
    run = ("euler", "simple", words, others, empty)
    noise = comfy.sample.prepare_noise(empty, 1)
    out: torch.Tensor = comfy.sample.sample(model, noise, STEPS, 3.0, *run, disable_pbar=True, seed=1)
    return out


def tallied(model: Any) -> Any:
    from fusestream.fusion.sparse.model import sparse_of

    found = sparse_of(model.model_options["transformer_options"])
    assert found is not None
    return found.tally.read()


def by_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch computes what the kernels would: the same blocks, the same means."""
    from fusestream.fusion.sparse import attention

    monkeypatch.setattr(attention, "forced", lambda _: KernelPolicy.of("off"))


@pytest.mark.parametrize("loaded", ["by stock", None, "sm_75"])
@pytest.mark.parametrize(
    ("latent", "settings"),
    [
        (VIDEO, {}),
        (VIDEO, {"share": 0.2}),
        (VIDEO, {"method": "bounded", "left_out": 0.3}),
        (FRAMES_APART, {"method": "radial"}),
    ],
)
def test_the_latents_are_those_of_the_references(
    path: Path, loaded: Any, latent: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model without a policy of its own, and of a streamed one under the card's code and under Turing's."""
    LEDGER.clear()
    stocks = loaded == "by stock"
    model = stock(path, dtype=torch.float16) if stocks else load(path, KernelPolicy.of("auto", isa=loaded))
    dense, changed = sample(model, latent), sparse(model, **settings)
    got = sample(changed, latent)
    found = tallied(changed)
    assert found.dense == () and found.sparse >= STEPS * LAYERS and found.seconds["sparse"] > 0
    assert not [refusal for refusal in LEDGER.refusals if refusal.op == "sparse attention"]
    by_references(monkeypatch)
    again = sparse(model, **settings)
    want = sample(again, latent)
    assert tallied(again).visited == pytest.approx(found.visited, abs=0.01) and found.visited < 0.9
    print(
        f"{loaded or 'native'} {settings}: {found.visited:.1%} visited, {error(got, dense):.4f} from dense, "
        f"{error(got, want):.5f} from the references, {found.seconds['sparse'] * 1e6:.0f} us each"
    )
    assert error(got, dense) > 0
    # A block whose score is as good as another's may be chosen in its place: then the difference is a part of what is left out.
    assert error(got, want) < max(5e-3, 0.3 * error(want, dense))


@pytest.mark.parametrize("precision", ["precise", "fast", "turbo"])
def test_each_tier_serves_it(path: Path, isa: Any, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(path, KernelPolicy.of("auto", precision=precision, isa=isa))
    changed = sparse(model)
    got, dense = sample(changed), sample(model)
    assert tallied(changed).dense == () and 0 < error(got, dense) < 0.1
    by_references(monkeypatch)
    assert error(got, sample(sparse(model))) < {"precise": 0.02, "fast": 0.02, "turbo": 0.04}[precision]


def test_all_visited_is_dense_to_the_last_bit(path: Path) -> None:
    model = load(path, KernelPolicy.of("on"))
    sample(model)
    dense = sample(model)
    for settings in ({"share": 1.0}, {"dense_steps": 1.0}, {"dense_layers": LAYERS}, {"least_tokens": 1756}):
        changed = sparse(model, **settings)
        assert torch.equal(sample(changed), dense) and tallied(changed).sparse == 0, settings


def test_first_steps_and_layers_stay_dense(path: Path) -> None:
    changed = sparse(load(path, KernelPolicy.of("auto")), dense_steps=0.5, dense_layers=1)
    sample(changed)
    found = tallied(changed)
    calls = found.sparse // (STEPS // 2 * (LAYERS - 1))  # one for both prompts, or one for each
    assert calls in (1, 2)
    assert dict(found.dense) == {
        "one of the first layers": calls * STEPS,
        "one of the first steps": calls * STEPS // 2 * (LAYERS - 1),
    }
    assert found.seconds["dense"] > 0


def test_what_computes_in_bf16_stays_dense_and_says_so(path: Path) -> None:
    LEDGER.clear()
    model = stock(path, dtype=torch.bfloat16)
    changed = sparse(model)
    reason = "the model computes in bfloat16, the kernels in float16"
    assert error(sample(changed), sample(model)) < 1e-3
    found = tallied(changed)
    assert found.sparse == 0 and set(dict(found.dense)) == {reason}
    assert reason in {refusal.reason for refusal in LEDGER.refusals if refusal.op == "sparse attention"}


@pytest.mark.parametrize(("latent", "method"), [(VIDEO, "top-k"), (VIDEO, "bounded"), (FRAMES_APART, "radial")])
def test_in_8_bits_bf16_is_sparse_too(
    path: Path, isa: Any, latent: Any, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in BF16 with a policy whose attention is in 8 bits."""
    from fusestream.fusion.fused.attention import install

    LEDGER.clear()
    model = stock(path, dtype=torch.bfloat16)
    install(model, KernelPolicy.of("auto", precision="turbo", isa=isa))
    changed = sparse(model, method=method, left_out=0.3)
    got, dense = sample(changed, latent), sample(model, latent)
    found = tallied(changed)
    assert found.dense == () and found.sparse >= STEPS * LAYERS and found.visited < 0.95
    assert not [refusal for refusal in LEDGER.refusals if refusal.op == "sparse attention"]
    by_references(monkeypatch)
    want = sample(sparse(model, method=method, left_out=0.3), latent)
    print(f"{isa or 'native'} {method}: {error(got, dense):.4f} from dense, {error(got, want):.4f} from the references")
    assert error(got, want) < max(0.06, 0.5 * error(want, dense))


def test_the_report_reads_what_the_card_counted(path: Path) -> None:
    from fusestream.fusion import report

    changed = sparse(load(path, KernelPolicy.of("auto")), dense_layers=1)
    sample(changed)
    found = report.gather(changed)
    assert found.sparsity is not None and not found.gaps
    assert 0.5 <= found.sparsity.visited < 0.9 and found.sparsity.seconds > 0 and found.sparsity.dense_seconds > 0

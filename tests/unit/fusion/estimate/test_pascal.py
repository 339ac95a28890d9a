"""A machine with a GTX 1080 Ti, as it is simulated here: the card is told, and the CPU computes.

What a user who changes nothing gets there: bytes where the file has halves, and is told so; the
estimate, the plan's words and the report go by it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fusestream import checkpoints, fusion
from fusestream.fusion import report
from fusestream.fusion.base import card_rates, policy
from fusestream.fusion.base.card_rates import Card, Source, rates_of
from fusestream.fusion.base.policy import network_policy, places_in, policy_on
from fusestream.fusion.estimate import plan, words
from fusestream.fusion.estimate.plan import estimate
from fusestream.fusion.fused.quality import policy_words
from fusestream.kernels_cuda import LEDGER, KernelPolicy

GTX_1080_TI = Card("NVIDIA GeForce GTX 1080 Ti", (6, 1), 28, 1.582e9, 484e9, has_tensor_cores=False)
VIDEO = (1, 16, 21, 60, 104)  # latents of 480x832x81


@pytest.fixture
def on_pascal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "capability", lambda _device: GTX_1080_TI.capability)
    monkeypatch.setattr(plan, "card_of", lambda _device: GTX_1080_TI)
    LEDGER.clear()


@pytest.mark.parametrize(
    ("capability", "precision"),
    [((6, 1), "turbo"), ((6, 2), "turbo"), ((7, 5), "auto"), ((9, 0), "auto"), (None, "auto")],
)
def test_auto_computes_in_bytes_where_halves_are_slow(
    capability: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "capability", lambda _device: capability)
    LEDGER.clear()
    asked = KernelPolicy.of("auto", precision="auto", attention="off")
    assert fusion.policy_for_card(asked) == KernelPolicy.of("auto", precision=precision, attention="off")
    assert bool(LEDGER.messages) is (precision == "turbo")
    for chosen in ("precise", "fast", "turbo"):
        assert fusion.policy_for_card(KernelPolicy.of("auto", precision=chosen)).precision == chosen
    assert fusion.policy_for_card(KernelPolicy.of("off", precision="auto")).precision == "auto", (
        "nothing of ours computes"
    )


@pytest.mark.usefixtures("on_pascal", "small_ones_too")
@pytest.mark.parametrize("kind", ["wan_t2v", "flux2"])
def test_a_model_is_loaded_estimated_and_reported(kind: str, tmp_path: Path) -> None:
    path = str(checkpoints.write(kind, tmp_path))
    auto = fusion.policy_for_card(KernelPolicy.of("auto", precision="auto"))
    (said,) = LEDGER.messages
    assert "1/64" in said and "'auto' computes as 'Fastest'" in said and "'Exact' leaves" in said
    model = fusion.load_diffusion_model(path, auto, -1.0)
    assert policy_on(model).precision == "turbo"
    assert policy_words(auto, model) == "kernels auto, turbo"
    latent = VIDEO if kind == "wan_t2v" else (1, 128, 64, 64)
    found = estimate(model, latent, 20, 2)
    assert found.source is Source.PREDICTED and found.seconds is not None and found.fit is not None
    assert "predicted" in words.time(found) and "not measured" in words.time(found)
    exact = fusion.load_diffusion_model(path, KernelPolicy.of("auto", precision="precise"), -1.0)
    slower = estimate(exact, latent, 20, 2)
    assert slower.seconds is not None and slower.seconds > found.seconds
    assert report.gather(model).policy == "kernels auto, turbo"


@pytest.mark.usefixtures("on_pascal", "small_ones_too", "one_thread")
def test_a_language_model_is_loaded_and_writes(tmp_path: Path) -> None:
    auto = fusion.policy_for_card(KernelPolicy.of("auto", precision="auto"))
    clip = fusion.load_text_encoder(str(checkpoints.write("qwen3_vl", tmp_path)), [], auto, -1.0)
    places = list(places_in(clip.cond_stage_model))
    assert places and network_policy(clip.cond_stage_model.get_submodule(places[0].rpartition(".")[0])) == auto
    with torch.inference_mode():
        tokens = clip.tokenize("one toy")
        assert len(clip.generate(tokens, do_sample=False, max_length=3)) > 0


def test_its_rates_are_of_bytes_and_of_torch() -> None:
    found = {who: rates_of(GTX_1080_TI, who, 1536) for who in (card_rates.STOCK, "precise", "fast", "turbo")}
    rates = {who: one[0] for who, one in found.items() if one is not None}
    assert rates.keys() == found.keys() and all(one[2] is Source.PREDICTED for one in found.values() if one)
    stock, precise, fast, turbo = rates.values()
    assert stock == precise == fast, "products and attention are torch's, in FP32"
    peak = GTX_1080_TI.multiprocessors * GTX_1080_TI.clock * 256
    assert stock.gemm < peak and stock.attention < peak
    assert peak < turbo.attention < turbo.gemm < 4 * peak
    assert rates_of(Card("Tesla P40", (6, 1), 30, 1.531e9, 346e9), "turbo", 1536) is not None

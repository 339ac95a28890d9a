"""On a card a family's code is held against ComfyUI's with that card's kernels: what is as known passes, what is not is seen."""

from __future__ import annotations

import time
from typing import Any

import comfy.ldm.flux.layers as flux
import comfy.ldm.lumina.model as lumina
import comfy.ldm.wan.model as wan
import pytest
import torch
from comfy.ldm.modules import attention
from stock_mutations import mutated

from fusestream.fusion.base.specimen import Specimen
from fusestream.fusion.compatibility import verdicts
from fusestream.fusion.compatibility.trial import difference
from fusestream.fusion.families import FAMILIES

DEVICE = torch.device("cuda", 0)

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")

SPECIMENS = {
    specimen.name: specimen for family in FAMILIES if family.specimens is not None for specimen in family.specimens()
}


@pytest.fixture
def of_class(isa: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's own code, or Turing's on it."""
    if isa is not None:
        monkeypatch.setenv("FUSESTREAM_FORCE_CLASS", isa)


def judged(specimen: Specimen) -> str | None:
    found = (difference(specimen, DEVICE, getattr(torch, dtype)) for dtype in specimen.dtypes)
    return next((why for why in found if why is not None), None)


@pytest.mark.parametrize("name", SPECIMENS)
def test_this_comfyui_is_as_known(of_class: None, name: str) -> None:
    assert judged(SPECIMENS[name]) is None


@pytest.mark.parametrize(
    ("name", "owner", "method", "old", "new"),
    [
        ("Wan block", wan.WanSelfAttention, "forward", "return apply_rope1(k, freqs)", "return k"),
        ("Flux.1 double block", flux.DoubleStreamBlock, "forward", "self.txt_norm2(txt)", "txt"),
        ("Z-Image block", lumina.FeedForward, "forward", "self.w1(x), self.w3(x)", "self.w3(x), self.w1(x)"),
        ("U-Net of SDXL's kind", attention.GEGLU, "forward", "x * F.gelu(gate)", "x * F.silu(gate)"),
    ],
)
def test_a_change_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: Any, method: str, old: str, new: str
) -> None:
    mutated(monkeypatch, owner, method, old, new)
    reason = judged(SPECIMENS[name])
    assert reason is not None and "result differs" in reason


@pytest.mark.timed
def test_a_verdict_that_is_kept_takes_milliseconds() -> None:
    """All families together: this is before every load."""

    def all_verdicts() -> float:
        began = time.perf_counter()
        for specimen in SPECIMENS.values():
            for dtype in specimen.dtypes:
                assert verdicts.verdict(specimen, DEVICE, getattr(torch, dtype)).difference is None
        return time.perf_counter() - began

    first, later = all_verdicts(), min(all_verdicts() for _ in range(5))
    print(f"trials {first:.2f} s, kept verdicts {later * 1e3:.1f} ms, of {len(SPECIMENS)} specimens")
    assert later < 0.2 and first < 30

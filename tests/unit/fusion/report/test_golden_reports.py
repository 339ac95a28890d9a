"""Reports of three runs beside those that are kept: what a user is told may change only on purpose.

Kept is what does not depend on the machine or the hour: which blocks stream, what stays, which pools, routes and kernels there are,
what was refused and why. Numbers that are measured stand there as "measured". After a deliberate change call
`python3 dev.py test tests/unit/fusion/report/test_golden_reports.py --update-reports` and read the difference.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import comfy.model_management
import pytest
from family_scenes import inputs
from in_halves import HALF
from scenes import sample

from fusestream import checkpoints, fusion
from fusestream.fusion import KernelPolicy, report
from fusestream.kernels_cuda import LEDGER, OPS

KEPT = Path(__file__).resolve().parents[3] / "fixtures" / "golden-reports.json"
# Kind, storage, and GiB of VRAM for its blocks: some stay and the rest passes.
RUNS = {
    "Flux.2, FP16, streamed": ("flux2", "fp16", 0.03),
    "SD 3.5, FP8, streamed, by ComfyUI's code": ("sd3", "fp8_e4m3fn", 0.03),
    "SD 1.5, FP16, in ComfyUI's memory": ("sd15", "fp16", 0.0),
}
MEASURED = (
    "device", "memories", "timeline", "what_if", "routes", "advice", "spare", "sampling", "peak", "used", "limit", "predicted",
    "rate", "predicted_pass", "overlap", "pass_seconds", "stall_seconds", "stall_share", "use", "copy", "stall", "times",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")


def told(kind: str, storage: str, budget: float, folder: Path) -> Any:
    """What the report says of a sampling in FP16, as on a card, without what is measured."""
    LEDGER.clear()
    for op in OPS.values():
        op.forget()
    path = checkpoints.write(kind, folder, storage)
    model = fusion.load_diffusion_model(str(path), KernelPolicy(), budget)
    sample(model, inputs(kind))
    prefix = json.dumps(f"{folder}{os.sep}")[1:-1]  # as it stands in JSON, where \ is written twice
    return masked(json.loads(report.as_json(report.gather(model)).replace(prefix, "folder/")))


def masked(value: Any, name: str = "") -> Any:
    if name in MEASURED or isinstance(value, float):
        return "measured"
    if isinstance(value, dict):
        return {key: masked(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [masked(one) for one in value]
    if isinstance(value, str):
        return re.sub(r"\d+(\.\d+)? (us|ms|s|GiB|MiB|KiB|GB/s|%)(?!\w)", r"measured \2", value)
    return value


@pytest.mark.deep("Flux.2*")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_told_as_before(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comfy.model_management, "unet_manual_cast", lambda *_, **__: HALF)
    found = told(*RUNS[name], tmp_path)
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    if request.config.getoption("--update-reports"):
        kept[name] = found
        KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert found == kept[name]

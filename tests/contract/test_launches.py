"""Golden launches: what every op launches, on each class of card and in each way to be chosen.

The fixture has a line for each way: kernels and grids in words, and a digest of all parameters,
with pointers by what they point into; and the text of every reason and error. After a deliberate
change call `python3 dev.py test tests/contract/test_launches.py --update-launches` and read the
difference. LAUNCHES_IN_FULL=FILE appends the parameters themselves to a file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from contract.launches import launches, names_of, of_device, report
from contract.op_contract import Contract, Draw, samples
from contract.op_samples import CONTRACTS

from fusestream.kernels_cuda import OPS
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.registry import CudaCandidate

KEPT = Path(__file__).resolve().parents[1] / "fixtures" / "golden-launches.json"


@pytest.mark.parametrize("name", OPS)
def test_an_op_launches_as_before(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    in_full: list[str] = []
    found = report(name, monkeypatch, in_full)
    if path := os.environ.get("LAUNCHES_IN_FULL"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(in_full)
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    if request.config.getoption("--update-launches"):
        kept[name] = found
        KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert found == kept[name]


@pytest.mark.parametrize(("name", "contract"), CONTRACTS.items(), ids=CONTRACTS)
def test_of_nothing_no_grid_is_empty(name: str, contract: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of its sizes is 0."""
    of_device(monkeypatch)
    draw = Draw(0)
    contract.draw(draw)
    for sample in (one for i in range(draw.sizes) for one in samples(name, contract, 4, empty=i)):
        call = Call(name, sample.tensors, sample.options)
        ours = sample.op.candidates[0]
        assert isinstance(ours, CudaCandidate)
        if next(ours.obstacles(call), None) is None:
            launches(ours, call, names_of(sample.op), None, (9, 0))


def test_no_op_is_kept_that_is_gone() -> None:
    assert json.loads(KEPT.read_text(encoding="utf-8")).keys() == OPS.keys()

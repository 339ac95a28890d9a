"""The driver compiles all PTX of each class: minutes, so it is apart from the tests that want the card alone."""

from __future__ import annotations

import pytest

from fusestream.kernels_cuda.launcher import card


@pytest.mark.parametrize("isa", ["sm_75", "sm_80"])
def test_portable_code_loads(isa):
    forced = card(0, isa)
    forced.preload()
    assert {forced.isa_class(unit) for unit in forced.code.units} == {isa}

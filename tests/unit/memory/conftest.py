"""What several tests of files share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(params=["preadv", "handles"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to read at a position: the system's, and the one for systems that lack it."""
    if request.param == "handles":
        monkeypatch.delattr(os, "preadv", raising=False)
    elif not hasattr(os, "preadv"):
        pytest.skip("no preadv here")
    return str(request.param)

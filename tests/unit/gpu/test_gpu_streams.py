"""Torch's current stream: its object is made once for each number that it has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fusestream.gpu import capture, streams


def test_a_stream_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at, made = [0], list[int]()

    def current_stream(index: int) -> SimpleNamespace:
        made.append(at[0])
        return SimpleNamespace(cuda_stream=at[0], index=index)

    monkeypatch.setattr(streams, "raw_stream", lambda _: at[0])
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    known = streams.Streams(1)
    for number in (0, 7, 7, 0, 9):
        at[0] = number
        assert known.current.cuda_stream == number and known.current.index == 1
    assert made == [0, 7, 9]


def test_nothing_is_captured_before_torch_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not capture.capturing()
    begun[0] = True
    assert capture.capturing()

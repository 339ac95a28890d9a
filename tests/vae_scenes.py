"""What the tests of VAEs have in common."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.utils
import pytest
import torch
from live_memory import LiveBytes


def interrupted(monkeypatch: pytest.MonkeyPatch, net: Any, way: str, given: torch.Tensor, **pieces: int) -> None:
    """The user stops `net` at the twelfth look at them, before its last piece: all that it had made goes."""
    management = comfy.model_management
    polls: list[Any] = []
    progress: list[tuple[int, int]] = []

    def poll() -> None:
        polls.append(progress[-1:])
        if len(polls) == 12:
            management.interrupt_current_processing()
        throw()

    throw = management.throw_exception_if_processing_interrupted
    monkeypatch.setattr(management, "throw_exception_if_processing_interrupted", poll)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda at, of, *_, **__: progress.append((at, of)))
    out = torch.empty(net.decode_output_shape(given.shape)) if way == "decode" else None
    options = {"output_buffer": out} if way == "decode" else {"device": torch.device("cpu")}
    known = [given, *net.parameters()] + ([] if out is None else [out])
    with LiveBytes(*known) as live:
        with pytest.raises(management.InterruptProcessingException):
            getattr(net, way)(given, **pieces, **options)
        assert live.most > live.now == 0
    assert progress and all(at < of for at, of in progress)
    monkeypatch.undo()

"""Runs slow first runs beside the work, so that the work does not wait for them.

cuDNN is loaded and its attention compiled at their first use in a process: a second and more in
which the host launches nothing. A choice has other candidates to go on with, so the first run
happens on a thread of its own, once for each kind of code, and the candidate takes its first turn
when it is done. torch releases Python's lock meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..call import Begun

_begun: dict[Hashable, threading.Event] = {}
_lock = threading.Lock()


def begin(kind: Hashable, device: torch.device, work: Callable[[], object]) -> Begun:
    """Do this work once in this process for this kind, on another thread and another stream of the
    device. Returns a function that tells whether it is done."""
    with _lock:
        done = _begun.get(kind)
        if done is None:
            done = _begun[kind] = threading.Event()
            threading.Thread(target=_run, args=(device, work, done), name=f"fusestream begins {kind}").start()
    return done.is_set


def _run(device: torch.device, work: Callable[[], object], done: threading.Event) -> None:
    try:
        cuda: Any = torch.cuda
        with cuda.device(device), cuda.stream(cuda.Stream(device)), torch.no_grad():
            work()
            cuda.current_stream(device).synchronize()
    except RuntimeError:
        # the candidate fails at its first turn too; another then serves the call and the report
        # says why
        pass
    finally:
        done.set()

"""What a first run would keep the work waiting for, begun beside it.

cuDNN is loaded and its attention compiled at their first use in a process: a second and more in which the host launches nothing.
Whoever chooses among candidates has others to go on with, so that is done on a thread of its own, once for each kind of code, and
the candidate takes its first turn when it is done. torch lets go of Python's lock meanwhile.
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
    """Do this work once in this process for this kind, on another thread and another stream of the device. Returns what tells
    whether it is done."""
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
        pass  # the candidate meets it at its first turn, where another one serves the call and the report says why
    finally:
        done.set()

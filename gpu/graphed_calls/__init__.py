"""Calls that are captured as CUDA graphs and replayed, so that short work does not wait for the
host.

owner.py       what a model or network tells of itself   attempt.py  one capture: watched, recorded
call_state.py  how far the calls of one key are          calls.py    when calls are captured, replayed, dropped

A graph holds addresses. So calls are captured only while their owner, a streamed model or a network
by itself, is settled, and graphs are given back as soon as anything of the owner moves or changes.
A call's tensors are copied into the graph's own. Results are copied too, so that callers may keep
them.

Calls with one key are the same work. A key has the shapes, strides and types of all tensors, every
other argument, torch's settings, and whatever the caller adds. For each key

    the first call   runs as ever: kernels are chosen, memory is found
    the second       is timed, on a device that has nothing else to do. If the device is busy for
                     longer than the host, nothing is gained: the key is never captured
    the third        is watched and recorded, unless it changes what it is given or keeps something;
                     the graph is replayed once, and compared with what was computed
    all others       are replayed

A call in which a kernel was still being chosen counts as the first, because a graph must hold
chosen kernels only. A call that cannot be captured runs as ever, and the owner is told the reason.

Some calls also read and write memory that is not an argument, at addresses that stay for a while,
such as keys and values of a text. The caller names that memory. With other memory a call is
captured anew at once, because it is known to pay. The caller gives the memory up with `let_go`, so
that no graph outlives it.

After a move, too, calls are captured anew at once. But graphs may be dropped before any replay: a
LoRA may change from call to call, or many sizes may come in turns. From the second such graph in a
row on, a number of calls in a row must first find everything in its place. The number doubles each
time.
"""

from .calls import GraphedCalls
from .owner import NotCaptured, Owner, Settled

__all__ = ["GraphedCalls", "NotCaptured", "Owner", "Settled"]

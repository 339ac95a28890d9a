"""Calls that are captured as CUDA graphs and replayed: short work without the host.

owner.py    what a model or a network says of itself     attempt.py  one capture: watched, recorded
calls.py    when calls are captured, replayed, dropped

A graph holds addresses. So calls are captured only while their owner, a model that streams or a
network by itself, is settled, and graphs are given back as soon as anything of the owner moves or
changes. A call's tensors are copied into tensors of the graph's own. Results are copied too, so
that callers may keep them.

Calls with one key are the same work. A key has shapes, strides and types of all tensors, every
other argument, how torch is set, and whatever the caller adds. Of each key

    the first call   runs as ever: kernels are chosen, memory is found
    the second       is timed, on a device that has nothing else to do. If the device is busy for
                     longer than the host, nothing is gained: the key is never captured
    the third        is watched and recorded, unless it changes what it is given or keeps something;
                     the graph is replayed once, and compared with what was computed
    all others       are replayed

A call in which a kernel was still being chosen counts as the first, because a graph must hold
chosen kernels only. A call that cannot be captured runs as ever, and the owner is told the reason.

Some calls read and write memory besides their arguments, at addresses that stay for a while: keys
and values of a text. The caller names such memory. With other memory a call is captured anew at
once, because it is known to pay. The caller gives the memory up with `let_go`, so that no graph
outlives it.

After a move, too, calls are captured anew at once. But graphs may go before they are replayed even
once: a LoRA may change from call to call, or many sizes may come in turns. From the second such
graph in a row on, some calls in a row must find everything in its place first: twice as many each
time.
"""

from .calls import GraphedCalls
from .owner import NotCaptured, Owner, Settled

__all__ = ["GraphedCalls", "NotCaptured", "Owner", "Settled"]

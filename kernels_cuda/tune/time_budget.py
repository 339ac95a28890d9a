"""Limits the cost of choosing: a grant once, and a share of the work that is done meanwhile.

A turn of a slower candidate costs its additional time over the best one. The foreseeable cost is
paid in advance, and corrected when the time is known. A candidate that cannot pay waits until the
work has earned it.
"""

from __future__ import annotations

import threading

GRANT = 0.05  # seconds
# For turns that follow short calls. A U-Net's step takes half or a tenth of the time once all its
# kernels are chosen and it is replayed as a graph, so some twenty steps before that would cost
# seconds.
EXTRA = 0.2
SHARE = 0.03  # of the work at which candidates are compared


class Purse:
    """Seconds that may be spent. Shared by all choices, so that a long op's share serves a short
    one too."""

    def __init__(self, grant: float = GRANT) -> None:
        self._lock = threading.Lock()
        self._grant = grant
        self._balance = grant

    @property
    def balance(self) -> float:
        return self._balance

    def begin(self) -> None:
        """Begin another choice. Unspent earnings above the grant are dropped, because they were for
        earlier work."""
        with self._lock:
            self._balance = min(self._balance, self._grant)

    def earn(self, work: float) -> None:
        """Add the share of `work` seconds of work."""
        with self._lock:
            self._balance += SHARE * work

    def pay(self, seconds: float) -> bool:
        """Take the seconds if there are enough; whether there were."""
        with self._lock:
            if seconds > 0 and seconds > self._balance:
                return False
            self._balance -= seconds
            return True

    def settle(self, paid: float, cost: float) -> None:
        """Correct an advance payment to its real cost. Debts are possible."""
        with self._lock:
            self._balance += paid - cost

"""What choosing may cost: a grant once, and a share of the work that is done meanwhile.

A turn of a candidate that is slower than the best one costs what it takes longer. That is paid in advance, as far as it can be
foreseen, and put right when its time is known; whoever cannot pay waits until the work has earned it.
"""

from __future__ import annotations

import threading

GRANT = 0.05  # seconds
# For turns that follow short calls. A step of a U-Net takes half or a tenth of the time once all its kernels are chosen and it is
# replayed as a graph: some twenty steps that are not captured yet would cost seconds.
EXTRA = 0.2
SHARE = 0.03  # of the work that candidates are compared on


class Purse:
    """Seconds that may be spent. Shared by all that is being chosen, so a long op's share serves a short one too."""

    def __init__(self, grant: float = GRANT) -> None:
        self._lock = threading.Lock()
        self._grant = grant
        self._balance = grant

    @property
    def balance(self) -> float:
        return self._balance

    def begin(self) -> None:
        """Something more is to be chosen. What earlier work has earned and not spent was for that work."""
        with self._lock:
            self._balance = min(self._balance, self._grant)

    def earn(self, work: float) -> None:
        """So many seconds of work were done."""
        with self._lock:
            self._balance += SHARE * work

    def pay(self, seconds: float) -> bool:
        """Whether there is as much; then it is taken."""
        with self._lock:
            if seconds > 0 and seconds > self._balance:
                return False
            self._balance -= seconds
            return True

    def settle(self, paid: float, cost: float) -> None:
        """What was paid in advance turned out to cost so much. Debts are possible."""
        with self._lock:
            self._balance += paid - cost

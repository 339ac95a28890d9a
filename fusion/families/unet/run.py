"""The options of one call of the network, for parts that stock does not pass them to.

Stock passes `transformer_options` only to transformers. Convolutions and residual blocks get a
picture, and the latter the time's embedding; they find their policy here. All parts of a network
share one `Run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ....kernels_cuda import KernelPolicy
from ...base.hooks import UNET_RUN
from ...fused.block import FusedBlock, HandBack

OUTSIDE = "another node calls the network's parts by itself"


class Run:
    """The calls of one network. loader: the policy that it was loaded under."""

    def __init__(self, loader: KernelPolicy) -> None:
        self.loader = loader
        self.options: Mapping[str, Any] | None = None  # None: the network is not running
        self._emb: tuple[Tensor, Tensor] | None = None

    @contextlib.contextmanager
    def under(self, options: Mapping[str, Any]) -> Iterator[None]:
        """While active, the network runs with these transformer_options."""
        before = self.options, self._emb
        self.options, self._emb = options, None
        try:
            yield
        finally:
            self.options, self._emb = before

    def activated(self, emb: Tensor) -> Tensor:
        """SiLU of the time's embedding, shared by all residual blocks of a call."""
        if self._emb is None or self._emb[0] is not emb:
            self._emb = emb, functional.silu(emb)
        return self._emb[1]


class Part(FusedBlock):
    """Mixed into the class of a part that gets no options."""

    fusestream_hand_back = HandBack("u-net block")

    def policy_here(self, x: Tensor) -> KernelPolicy | None:
        """Like `policy_for`, with the options of the running call."""
        module: Any = self
        run: Run = module.__dict__[UNET_RUN]
        if run.options is not None:
            return self.policy_for(x, run.options)
        if not run.loader.is_off:
            self.fusestream_hand_back(OUTSIDE, x, forced=run.loader.default == "on")
        return None


def run_of(module: nn.Module) -> Run:
    found: Run = module.__dict__[UNET_RUN]
    return found

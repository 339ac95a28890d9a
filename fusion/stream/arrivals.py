"""A block's weights on arrival: patched at the first use after they came, and held by the block's
modules.

Plain LoRA on fp16 weights is written into the memory that the pager brought them to, so it costs
one pass an arrival. On weights that each product converts anyway (fp8, INT8, ggml) it is added to
the converted copy. `PatchRoute` says which, and depends on the device, on whether the layer
streams, and on who computes the block.
"""

from __future__ import annotations

from collections.abc import Collection

from ...memory import Along, Pager, Weights
from ..weights import lora
from .lora_factors import PatchRoute
from .patched_weights import Made
from .residency import Residency

UNPATCHED = PatchRoute(one_pass=False)


class Arrivals:
    """The arrivals of one stream's weights, in whichever segmentation it has."""

    def __init__(self, residency: Residency) -> None:
        self.family: str | None = None  # whose kernels compute the blocks; None: ComfyUI does
        self._residency = residency
        residency.along = self.along

    def hold(self, pager: Pager, i: int, weights: Weights) -> None:
        """Let block i's modules hold the pager's weights, with its patches."""
        self._hold(i, self._made(pager, i, weights))

    def hold_lent(self, i: int, weights: Weights) -> None:
        """The same with weights that were read for this one use."""
        now = self._residency.segmentation
        self._hold(i, now.patching.made(i, weights, self._route(i), self._residency.device, in_place=True))

    def _hold(self, i: int, made: Made) -> None:
        now = self._residency.segmentation
        now.blocks[i].hold(made.parameters)
        if made.adds:
            now.patching.add_on_the_way(i, self._route(i))

    def _made(self, pager: Pager, i: int, weights: Weights) -> Made:
        now, device = self._residency.segmentation, self._residency.device
        if i not in now.patching:
            return now.patching.made(i, weights, UNPATCHED, device, in_place=False)
        if not pager.is_writable:
            return now.patching.made(i, weights, self._route(i), device, in_place=False)
        arrival = pager.arrival(now.order.place[i])
        if arrival.made is None:
            arrival.made = now.patching.made(i, weights, self._route(i), device, in_place=True)
        made: Made = arrival.made
        return made

    def along(self, layer: int) -> Along | None:
        """The tensors of patches that travel with the copy of a layer."""
        now = self._residency.segmentation
        i = now.order.paged[layer]
        found: Along | None = now.patching.along(i, self._route(i))
        return found

    def ask_ahead(self, pager: Pager, i: int, skip: Collection[int]) -> None:
        """Block i is in use: what the next patched block needs for its patches starts to travel.
        skip: blocks that do not come in this pass."""
        now = self._residency.segmentation
        paged, at = now.order.paged, now.order.place[i]
        for layer in (*range(at + 1, len(paged)), *range(at)):
            j = paged[layer]
            if j in now.patching and j not in skip:
                made: Made | None = pager.made(layer)
                if made is None or made.adds:
                    now.patching.ask(j, self._route(j))
                    return

    def renew(self, changed: Collection[int]) -> None:
        """These blocks have other patches. Weights that patches were written into come anew; the
        others still hold what the file does."""
        pager, place = self._residency.pager, self._residency.segmentation.order.place
        if pager is None or not pager.is_writable:
            return
        layers = [place[i] for i in sorted(changed) if i in place]
        pager.renew([layer for layer in layers if (made := pager.made(layer)) is not None and made.wrote])
        for layer in layers:
            pager.forget_made(layer)

    def unpatched(self, pager: Pager) -> str | None:
        """Why products read more than the weights in the pager, in words a user understands; None:
        they do not."""
        now = self._residency.segmentation
        for i in now.order.paged:
            made: Made | None = pager.made(now.order.place[i])
            if i in now.patching and (made is None or made.adds):
                return "its LoRAs are being added" if made is None else "LoRAs are added to each product of its weights"
        return None

    def _route(self, i: int) -> PatchRoute:
        """How block i's patches are applied."""
        now, pager = self._residency.segmentation, self._residency.pager
        one_pass = now.patching.one_pass and lora.serves(self._residency.device)
        layer, is_ours = now.order.place.get(i), self.family is not None
        if layer is None:
            return PatchRoute(one_pass, streams=False, is_ours=is_ours)
        assert pager is not None, "patches are applied to weights that are loaded"
        streams = layer not in pager.plan.resident or not pager.is_writable
        return PatchRoute(one_pass, streams, is_ours)

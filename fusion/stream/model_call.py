"""One call of a streamed model, as what we put around it reads it.

Stock hands a wrapper the rest of the chain, and the arguments as its caller wrote them: by place or
by name. Here they have names. Three are around each call, put there when a model is loaded
(`load/diffusion.py`), the outermost first, so that the others see one try at a time:

    patcher/vram_retry.py   measures the VRAM that a step needs, and tries again after an error
    patcher/call_log.py     notes the settings under which a finished call ran
    stream/progress.py      moves the sampler's bar while the weights come for the first time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.patcher_extension
import torch

from ..base.hooks import STREAM
from .block_stream import BlockStream

# Of stock's `BaseModel.apply_model`, in their places.
PLACES = ("x", "t", "c_concat", "c_crossattn", "control", "transformer_options")


@dataclass(frozen=True)
class ModelCall:
    """executor: the rest of the chain. args, kwargs: what it is called with."""

    executor: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        """What the model makes of it. May be called again."""
        return self.executor(*self.args, **self.kwargs)

    @property
    def model(self) -> Any:
        """Stock's BaseModel, which all clones of a MODEL share."""
        return self.executor.class_obj

    @property
    def stream(self) -> BlockStream:
        """The model's."""
        found: BlockStream = getattr(self.model, STREAM)
        return found

    @property
    def x(self) -> torch.Tensor:
        """The latent, [batch, channels, frames, height, width]."""
        found: torch.Tensor = self._argument("x")
        return found

    @property
    def options(self) -> Mapping[str, Any]:
        """The `transformer_options`: of the MODEL that is sampled with, and of the sampler."""
        found: Mapping[str, Any] = self._argument("transformer_options") or {}
        return found

    def set_option(self, key: str, value: Any) -> None:
        """For all that look at the options further in; they are gone with the call. A call without
        options stays without."""
        options: dict[str, Any] | None = self._argument("transformer_options")
        if options is not None:
            options[key] = value

    def _argument(self, name: str) -> Any:
        place = PLACES.index(name)
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)


def wrap(patcher: Any, key: str, wrapper: Any) -> None:
    """Put a wrapper, inside of those that are there, around each call of a MODEL and of its clones."""
    patcher.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, key, wrapper)

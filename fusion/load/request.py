"""The file to load and its settings: one value that goes from the node to the patcher, which keeps
it for loading again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.model_management
import torch

from ...kernels_cuda import STANDARD, KernelPolicy
from ..base import other_cards, vram_budget
from ..base.family import Role
from ..identify.clip_types import AUTO

FREE = vram_budget.AUTO  # as a budget: all free VRAM


@dataclass(frozen=True)
class LoadRequest:
    """A file, the part of a model that is made of it, and the user's settings.

    path               the file; of a model in several files, the first
    role               the part that is made of it
    policy             for the kernels, as the user chose it
    vram_budget        GiB of VRAM through which the blocks' weights stream; 0: stock's own memory
                       management; -1: all free VRAM, and as with 0 for a file that cannot be
                       streamed
    is_checkpoint      whether stock takes the part out of a whole checkpoint
    dtype              diffusion model: type to hold the weights in; None: as stock chooses
    embedding_folders  text encoder: searched for `embedding:name`
    kind               text encoder: stock's type in lower case, or `auto` if the file tells
    options            text encoder: stock's model_options, in addition to those that the file tells
    others             text encoder: the user's other ones, which lend it a tokenizer if its file
                       has none
    further            text encoder: files beside the first that make one model with it
    disable_dynamic    whether stock is to load it without its dynamic memory
    """

    path: str
    role: Role
    policy: KernelPolicy = STANDARD
    vram_budget: float = 0.0
    is_checkpoint: bool = False
    dtype: torch.dtype | None = None
    embedding_folders: Sequence[str] = ()
    kind: str = AUTO
    options: Mapping[str, Any] = field(default_factory=dict)
    others: Sequence[str] = ()
    further: Sequence[str] = ()
    disable_dynamic: bool = False

    def __post_init__(self) -> None:
        vram_budget.refuse_odd(self.vram_budget)

    @property
    def paths(self) -> tuple[str, ...]:
        """All its files, the first one first."""
        return self.path, *self.further

    @property
    def device(self) -> torch.device:
        """The device that stock computes this part on."""
        management = comfy.model_management
        by_role = {Role.TEXT: management.text_encoder_device, Role.VAE: management.vae_device}
        found: torch.device = by_role.get(self.role, management.get_torch_device)()
        return found

    @property
    def kernels(self) -> KernelPolicy:
        """The policy as it holds on that device."""
        return other_cards.policy_for(self.device, self.policy)

    @property
    def budget_bytes(self) -> int | None:
        """Bytes of VRAM for the blocks' weights; None: what is free."""
        return None if self.vram_budget == FREE else int(self.vram_budget * 2**30)

    def part(self, role: Role) -> LoadRequest:
        """The request for a part of the whole checkpoint at this path."""
        return replace(self, role=role, is_checkpoint=True)


Load = Callable[[LoadRequest], Any]


def keep(patcher: Any, request: LoadRequest, load: Load) -> None:
    """Let a patcher keep its request, so that stock can load it again: for another card, or without
    its dynamic memory.

    load: makes a MODEL, a CLIP or a VAE
    """
    patcher.cached_patcher_init = (again, (request.path, request, load))


def again(path: str, request: LoadRequest, load: Load, disable_dynamic: bool = False, **_others: Any) -> Any:
    """Stock's function for `cached_patcher_init`. Returns a patcher. path: the first argument,
    because reports name a model by it."""
    found = load(replace(request, path=path, disable_dynamic=disable_dynamic))
    return getattr(found, "patcher", found)

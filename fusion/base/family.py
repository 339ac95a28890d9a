"""The seam: what a family of models is to the rest of the house.

A model that no family knows loads and streams all the same, and stock computes it. A family adds kernels to that, and what it knows
about its files; nothing else asks for a model by name. Everything here is cheap to import: whoever lists nodes reads it, so what
needs torch's kernels or ComfyUI's classes is imported in the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ...kernels_cuda import KernelPolicy
    from ...memory import WeightFile
    from .cost import Cost
    from .specimen import Specimen


class Role(Enum):
    """What a model is in a graph, and which node loads it: both as they stand in a message."""

    DIFFUSION = "diffusion model", "FuseStream Diffusion Model Loader"
    TEXT = "text encoder", "FuseStream Text Encoder Loader"
    VAE = "VAE", "FuseStream VAE Loader"
    CHECKPOINT = "checkpoint", "FuseStream Checkpoint Loader"

    @property
    def words(self) -> str:
        return self.value[0]

    @property
    def loader(self) -> str:
        return self.value[1]

    @property
    def told_by(self) -> Role:
        """The role of the part that tells what a file is: a checkpoint is looked at as its diffusion model."""
        return Role.DIFFUSION if self is Role.CHECKPOINT else self


Rename = Callable[[str], str]
Shape = tuple[int | None, ...]  # None: a size that differs from model to model


@dataclass(frozen=True)
class Expected:
    """What a family expects in a file that is one of its own.

    tensors   that no sound file lacks, by name, with their shapes; None: whatever shape
    faults    what is wrong with it besides, in words that go on after the file's name
    doubts    what no published model has, in such words: a warning
    """

    tensors: Mapping[str, Shape | None]
    faults: Sequence[str] = ()
    doubts: Sequence[str] = ()


@dataclass(frozen=True)
class Family:
    """
    name        in messages, ledger and report: "Wan" makes "a Wan diffusion model"
    covers      which models, and what is fused of them: for a user, in the table of supported models
    recognises  whether a file is of this family, by names, shapes and metadata
    fuse        let stock's modules compute through our ops, in place; returns how many blocks do. It gets the network of a
                diffusion model, the model of a text encoder, stock's object of a VAE
    ops         what the Kernels nodes can switch of it
    types       of a diffusion model, the types in which its blocks can be ours, by torch's names
    blocks      of a network, by name, in the order in which they run; None: found by themselves
    cost        of a diffusion model, what a forward of one prompt costs, of (network, shape of the latent); None: not counted
    need        bytes that a step's activations take, of (network, shape of the latent, its type), or None where
                stock's reckoning is to hold; None: always stock's
    in_pieces   of a diffusion model, whether its blocks compute what lies between two products in smaller pieces where
                `patcher/vram_estimate.py` asks for it. Its need has `CHUNK_BYTES` of that
    options     of a text encoder, stock's model_options as the file tells them
    kind        of a text encoder's file, the name of stock's CLIPType that it is for, where the file tells
    expects     what must be in a file, told from its header; None: that shows when stock has built the model
    renames     of a file in a layout that stock does not know: from its names to stock's; it returns None for other files
    spelling    of a VAE's file in another layout that stock knows too: what stock calls its tensors, of their names
    borrows     what stock wants and a file lacks, out of others that the user has, by name. It gets the file's header and the
                paths of the others, and raises `WrongFile` where none has it
    vaes        of a diffusion model, the published VAE by the channels of the latents that it goes with
    reads       of a diffusion model, how wide its network takes a prompt's tokens, and the published text encoder that makes them
                so where it is known, with its type in our loader where it has one; None: nobody can tell
    idle        of a text encoder that is fused, how many of its last blocks no encoding calls on a device, as the model is asked by
                default. They stream from their first call on
    specimens   what of stock's networks its code stands for, held against stock's before anything is fused
                (`compatibility/`); None: nothing of stock's is replaced
    aside       why ComfyUI computes all of it here, in a sentence; None: it does not
    doubts      of a diffusion model, what of the prompts it will not use, or lacks: of (stock's model, its patches' keys, the
                prompts as stock's dictionaries), in a sentence that goes on after the file's name; None: nothing
    """

    name: str
    role: Role
    covers: str
    recognises: Callable[[WeightFile], bool]
    fuse: Callable[[Any, KernelPolicy], int]
    ops: tuple[str, ...]
    types: tuple[str, ...] = ("float16",)
    blocks: Callable[[Any], Sequence[tuple[str, Any]]] | None = None
    need: Callable[[Any, Sequence[int], torch.dtype], float | None] | None = None
    in_pieces: bool = False
    cost: Callable[[Any, Sequence[int]], Cost | None] | None = None
    options: Callable[[WeightFile], Mapping[str, Any]] | None = None
    kind: Callable[[WeightFile], str | None] | None = None
    expects: Callable[[WeightFile], Expected] | None = None
    renames: Callable[[WeightFile], Rename | None] | None = None
    spelling: Callable[[Collection[str]], Collection[str]] | None = None
    borrows: Callable[[WeightFile, Sequence[str]], Mapping[str, torch.Tensor]] | None = None
    vaes: Mapping[int, str] | None = None
    reads: Callable[[Any], tuple[int, str | None] | None] | None = None
    idle: Callable[[Any, torch.device], int] | None = None
    doubts: Callable[[Any, Container[str], Sequence[Mapping[str, Any]]], str | None] | None = None
    specimens: Callable[[], Iterable[Specimen]] | None = None
    aside: str | None = None

    @property
    def words(self) -> str:
        """As it stands in a message: a Wan diffusion model."""
        return f"{self.name} {self.role.words}"

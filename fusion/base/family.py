"""The seam between a family of models and the rest of the house.

A model without a family loads and streams, too, and stock computes it. A family adds kernels and
knowledge of its files; no other code asks for a model by name. Everything here is cheap to import,
because it is read when nodes are listed. What needs torch's kernels or ComfyUI's classes is in
other modules of the family, and `Late` names its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ...kernels_cuda import KernelPolicy
    from ...memory import WeightFile
    from .cost import Cost
    from .specimen import Specimen
    from .trained_sparse import TrainedSparse


class Role(Enum):
    """The part that a model has in a graph, the node that loads it, in the words of messages, and
    the folder in models/ that the node offers."""

    DIFFUSION = "diffusion model", "FuseStream Diffusion Model Loader", "diffusion_models"
    TEXT = "text encoder", "FuseStream Text Encoder Loader", "text_encoders"
    VAE = "VAE", "FuseStream VAE Loader", "vae"
    CHECKPOINT = "checkpoint", "FuseStream Checkpoint Loader", "checkpoints"

    @property
    def words(self) -> str:
        return self.value[0]

    @property
    def loader(self) -> str:
        return self.value[1]

    @property
    def folder(self) -> str:
        return self.value[2]

    @property
    def told_by(self) -> Role:
        """The role that identifies a file: a checkpoint is identified by its diffusion model."""
        return Role.DIFFUSION if self is Role.CHECKPOINT else self


@dataclass(frozen=True)
class Late:
    """A function of one of a package's modules, which is imported when the function is called.

    A type checker does not see which function it is:
    tests/unit/fusion/families/test_late_functions.py holds it against the type of the field.

    package  `__package__` of who names it
    name     module and function: "block:fuse" is `fuse` of the package's `block`
    """

    package: str
    name: str

    @property
    def function(self) -> Callable[..., Any]:
        module, _, name = self.name.partition(":")
        found: Callable[..., Any] = getattr(import_module(f".{module}", self.package), name)
        return found

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


Rename = Callable[[str], str]
Shape = tuple[int | None, ...]  # None: a size that differs from model to model


@dataclass(frozen=True)
class Expected:
    """The expectations of a family for its files.

    tensors   in every sound file, by name, with their shapes; None: any shape
    faults    other faults of the file, in words that follow the file's name
    doubts    differences from all published models, in such words, for a warning
    """

    tensors: Mapping[str, Shape | None]
    faults: Sequence[str] = ()
    doubts: Sequence[str] = ()


@dataclass(frozen=True)
class Family:
    """One family of models. Functions are described by their results.

    name        in messages, ledger and report: "Wan" makes "a Wan diffusion model"
    covers      models, and what is fused of them, for the users' table of supported models
    recognises  whether a file is of this family, by names, shapes and metadata
    fuse        lets stock's modules compute through our ops, in place; the number of blocks that
                do. It gets the network of a diffusion model, the model of a text encoder, or
                stock's object of a VAE
    ops         the ops that the Kernels nodes can switch for it
    types       diffusion model: types in which its blocks can be ours, by torch's names
    as_stock_chooses  diffusion model: whether it computes in the type that stock prefers, and where
                that is none of `types`, as a model without a family; else in one of `types`
    blocks      of a network, by name, in the order in which they run; None: found automatically
    learned     diffusion model: the sparse attention that a file's model was trained with, from the
                names of its tensors and its width; None: it was trained dense
    grow        diffusion model: gives blocks of a network the modules for what they have learned
                of it, from the network and the names, before it is filled; how many do
    cost        diffusion model: cost of a forward of one prompt, from (network, shape of the
                latent); None: not counted
    need        bytes that a step's activations take, from (network, shape of the latent, its type,
                bytes of hidden values at a time), or None if stock's estimate holds; None: always
                stock's
    in_pieces   diffusion model: whether its blocks compute hidden values in smaller pieces when
                `patcher/vram_estimate.py` asks for it
    options     text encoder: stock's model_options as the file tells them
    kind        text encoder: name of the CLIPType that the file is for, if the file tells
    expects     the required contents of a file, from its header; None: faults show when stock
                builds the model
    renames     from the file's names to stock's, for a layout that stock does not know; None for
                other files
    reshapes    diffusion model: the shapes that stock wants of tensors that a file has in other
                ones, with the same numbers in the same order, by name; after `renames`
    spelling    VAE: stock's names for the tensors of a file in another layout that stock knows,
                from the file's names
    borrows     tensors, by name, that stock needs and a file lacks, from the user's other files. It
                gets the file's header and the paths of the others, and raises `WrongFile` if none
                has them
    vaes        diffusion model: the published VAE, by the channels of its latents
    reads       diffusion model: width of a prompt's tokens in its network, and the published text
                encoder for it if known, with its type in our loader if it has one; None: not known
    idle        fused text encoder: number of its last blocks that no encoding calls on a device
                with the model's default taps. They stream from their first call on
    specimens   the parts of stock's networks that its code replaces, compared with stock's before
                anything is fused (`compatibility/`); None: it replaces nothing
    aside       why ComfyUI computes all of it here, in a sentence; None: it does not
    doubts      diffusion model: inputs of the prompts that it will not use, or lacks, from (stock's
                model, its patches' keys, the prompts as stock's dictionaries), in a sentence that
                follows the file's name; None: there are none
    """

    name: str
    role: Role
    covers: str
    recognises: Callable[[WeightFile], bool]
    fuse: Callable[[Any, KernelPolicy], int]
    ops: tuple[str, ...]
    types: tuple[str, ...] = ("float16",)
    as_stock_chooses: bool = False
    blocks: Callable[[Any], Sequence[tuple[str, Any]]] | None = None
    need: Callable[[Any, Sequence[int], torch.dtype, int], float | None] | None = None
    in_pieces: bool = False
    learned: Callable[[Collection[str], int], TrainedSparse | None] | None = None
    grow: Callable[[Any, Collection[str]], int] | None = None
    cost: Callable[[Any, Sequence[int]], Cost | None] | None = None
    options: Callable[[WeightFile], Mapping[str, Any]] | None = None
    kind: Callable[[WeightFile], str | None] | None = None
    expects: Callable[[WeightFile], Expected] | None = None
    renames: Callable[[WeightFile], Rename | None] | None = None
    reshapes: Callable[[WeightFile], Mapping[str, tuple[int, ...]]] | None = None
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
        """The words of messages: Wan diffusion model."""
        return f"{self.name} {self.role.words}"

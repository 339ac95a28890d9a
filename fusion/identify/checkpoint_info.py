"""A look at a file's header before anything is loaded: whether it is the right kind, whole, and has
sound metadata.

Choosing the VAE in the text encoder loader is an easy slip. Stock answers it minutes and gigabytes
later with a message about shapes. Here it costs one header read, and the message names the right
node. The loaders look at every file (`look_at`), and the nodes do before a graph is queued
(`inspect_file`). Families are asked first, then stock's own detection, with unread tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import comfy.model_detection
import comfy.sd
import comfy.utils
import torch

from ...memory import Checkpoint, Extent, WeightFile
from ...memory.file import open_regular
from ..base import file_formats
from ..base.errors import WrongFile
from ..base.family import Expected, Family, Rename, Role
from ..base.notices import warn
from ..families import family_of
from ..files import completeness, llama_cpp, quant_metadata, sentencepiece
from ..files.checkpoint_parts import CheckpointParts
from ..weights.meta_tensor import tensors_of

# The parts of a patch, in the spellings of LoRA, LoHa, LoKr, GLoRA, OFT, BOFT and plain
# differences.
LORA_PART = re.compile(
    r"[._]lora(_linear_layer)?[._](A|B|up|down)\b|\.(lokr_w[12]|hada_w[12]_[ab]|[ab][12]\.weight$|oft_blocks|diff(_b)?$|set_weight$)"
)
# Tensors that only ComfyUI's VAEs have, in the spellings of their origins.
VAE_PARTS = (
    "decoder.conv_in.weight", "decoder.conv_in.conv.weight", "decoder.conv1.weight", "decoder.up_blocks.0.resnets.0.norm1.weight",
    "first_stage_model.decoder.conv_in.weight", "decoder.layers.0.weight", "taesd_decoder.1.weight",
    "decoder.transformer_blocks.0.scale1", "pre_block.attn.zero_k_bias",
)  # fmt: skip
# A text encoder in OpenCLIP's spelling: by the first tensor stock knows it, which Hunyuan3D's VAE has, too.
OPEN_CLIP = {"transformer.resblocks.0.ln_1.weight", "token_embedding.weight"}
# What LTX-2 makes of Gemma 3's layers, in a file of its own.
TEXT_PROJECTION = "text_embedding_projection."
# The folders in models/ of the loaders' files, also under stock's older names.
KNOWN_FOLDERS = {*(role.folder for role in Role), "unet", "clip"}
# Prefixes of text encoders and VAE in whole checkpoints.
BESIDE_THE_MODEL = ("cond_stage_model.", "conditioner.embedders.", "text_encoders.", "first_stage_model.", "vae.")


@dataclass(frozen=True)
class CheckpointInfo:
    """The contents of a file, told by its header. Each property is computed once, when it is first
    asked for.

    header   names, shapes and metadata; after `look_at` under stock's names
    family   the family that knows the file, or None
    source   the file, while it is open; None: it has no header, and stock has read it
    read     the tensors by name that stock has read in that case
    """

    header: WeightFile
    family: Family | None
    source: Checkpoint | None = None
    read: Mapping[str, torch.Tensor] | None = None

    @classmethod
    def of(cls, source: Checkpoint) -> CheckpointInfo:
        """The contents of an open file, with its own names."""
        return cls(source.files[0], family_of(source.files[0]), source)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor], path: str = "") -> CheckpointInfo:
        """The contents of tensors that stock has read."""
        header = header_of(tensors, path)
        return cls(header, family_of(header), read=tensors)

    @property
    def path(self) -> str:
        return str(self.header.path)

    @property
    def opened(self) -> Checkpoint:
        """The open file."""
        assert self.source is not None, "stock has read it"
        return self.source

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name, as stock's detection asks for them: unread stand-ins."""
        if self.read is not None:
            return self.read
        return tensors_of(self.opened, text=False)

    @cached_property
    def stocks_kind(self) -> tuple[str, Mapping[str, Any]] | None:
        """The prefix of a diffusion model's tensors, and the settings that stock's detection finds;
        None: it finds none."""
        prefix = comfy.model_detection.unet_prefix_from_state_dict(self.tensors)
        # Stock's detection assumes a sound file, and fails in many ways if it is not.
        with contextlib.suppress(Exception):
            for one in (prefix, ""):
                found = comfy.model_detection.detect_unet_config(self.tensors, one)
                if found is not None:
                    return one, found
        return None

    @cached_property
    def stocks_encoder(self) -> Any:
        """The TEModel that stock's detection finds, behind its conversion of OpenCLIP's spelling; None: it
        finds none. Raises whatever stock does for a file that is not sound."""
        tensors = self.tensors
        if tensors.keys() >= OPEN_CLIP:
            tensors = comfy.utils.clip_text_transformers_convert(dict(tensors), "", "")
        return comfy.sd.detect_te_model(tensors)

    @cached_property
    def stocks_role(self) -> Role | None:
        """The role that stock's detection finds, for a file that no family knows. A whole
        checkpoint counts as a diffusion model."""
        with contextlib.suppress(Exception):  # as above
            if self.stocks_encoder is not None:
                return Role.TEXT
        if self.tensors and all(name.startswith(TEXT_PROJECTION) for name in self.tensors):
            return Role.TEXT
        if self.stocks_kind is not None:
            return Role.DIFFUSION
        return Role.VAE if any(name in self.tensors for name in VAE_PARTS) else None

    @cached_property
    def parts(self) -> CheckpointParts:
        """The parts of a whole checkpoint, as stock divides it."""
        tensors = self.tensors if self.source is None else tensors_of(self.source)
        return CheckpointParts(self.path, tensors, self.header.metadata)

    @cached_property
    def expected(self) -> Expected | None:
        """The tensors that the family expects in the file; None: it has no expectation."""
        expects = None if self.family is None else self.family.expects
        return None if expects is None else expects(self.header)

    @property
    def rename(self) -> Rename | None:
        """The renaming from the file's names to stock's, if the family knows a layout that stock
        does not; else None."""
        return None if self.family is None or self.family.renames is None else self.family.renames(self.header)

    def borrowed(self, others: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """The tensors that a text encoder's file lacks and another file of the user's has."""
        return {} if self.family is None or self.family.borrows is None else self.family.borrows(self.header, others)

    # --------------------------------------------------------------------------------------------------------- checks

    def require_role(self, wanted: Role) -> None:
        """Raise `WrongFile` if the file plainly belongs in another loader. An unknown kind passes,
        because stock may know it."""
        if self.family is not None:
            found, words = self.family.role, self.family.words
        elif (place := elsewhere(self.header.extents)) is not None:
            raise WrongFile(f"{self.path} is {place[0]}: {move(self.path, place[1])}{place[2]}.")
        elif self.stocks_role is None:
            return
        else:
            found, words = self.stocks_role, self.stocks_role.words
        if found is not wanted.told_by:
            right = self._loaded_as(found)
            raise WrongFile(
                f"{self.path} is a {words}: {move(self.path, right.folder)}choose it in the {right.loader}."
            )

    def _loaded_as(self, role: Role) -> Role:
        """The role whose loader takes a file of this role. For a whole checkpoint it is the one
        that takes all parts, because its text encoder or VAE may have been wanted."""
        is_whole = any(name.startswith(BESIDE_THE_MODEL) for name in self.header.extents)
        return Role.CHECKPOINT if role is Role.DIFFUSION and is_whole else role

    def require_whole(self, role: Role) -> None:
        """Raise `WrongFile` if a part of the model is missing."""
        # Not the VAE's, whose parts are in sequences: some numbers have no tensor.
        if role is not Role.VAE:
            completeness.refuse_gaps(self.path, _of_the_model(self.header.extents, role))
        if self.expected is not None:
            completeness.require(self.header, self.expected)

    def require_settings(self) -> None:
        """Raise `WrongFile` if stock would read a diffusion model's settings, and cannot. Those of
        other models may be anything."""
        fault = quant_metadata.fault_of_settings(self.header.metadata)
        if fault is None or self.stocks_kind is None:
            return
        try:
            metadata = dict(self.header.metadata)
            comfy.model_detection.detect_unet_config(self.tensors, self.stocks_kind[0], metadata=metadata)
        except Exception as error:
            raise WrongFile(
                f"{self.path}: the settings in its metadata ({quant_metadata.SETTINGS!r}) {fault}. The file is damaged; "
                "download it again."
            ) from error

    def require_tokenizer(self) -> None:
        """Raise `WrongFile` if a text encoder's file carries a broken tokenizer."""
        name = sentencepiece.TENSOR
        if name in self.header.extents:
            model = self.source.read(self.source.extents[name]) if self.source is not None else self.tensors[name]
            sentencepiece.refuse_broken(self.path, model)

    def say_doubts(self) -> None:
        """Warn if the file differs from all published models. That is no error, because a model may
        be shortened on purpose."""
        for doubt in () if self.expected is None else self.expected.doubts:
            warn(f"{self.path} {doubt}")


def _of_the_model(names: Iterable[str], role: Role) -> Iterable[str]:
    """The names without those of a whole checkpoint's other parts."""
    if role is not Role.DIFFUSION:
        return names
    prefix = comfy.model_detection.unet_prefix_from_state_dict(dict.fromkeys(names))
    inner = [name for name in names if name.startswith(prefix)]
    return inner or names


def header_of(tensors: Mapping[str, Any], path: str = "") -> WeightFile:
    """A header of tensors that stock has read from a file without one: as much of it as families
    look at."""
    extents = {
        name: Extent(name, "", tuple(tensor.shape), 0, 0)
        for name, tensor in tensors.items()
        if hasattr(tensor, "shape")
    }
    return WeightFile(Path(path), 0, extents, {})


def move(path: str, folder: str) -> str:
    """What to do with a file before another loader offers it: nothing, if it is in this folder of
    models/, or in no other one's."""
    is_there = folder in Path(path).parts or not KNOWN_FOLDERS.intersection(Path(path).parts)
    return "" if is_there else f"move it to models/{folder}, and "


def elsewhere(names: Iterable[str]) -> tuple[str, str, str] | None:
    """The kind of a file that belongs in a stock node, its folder in models/, and that node; None:
    not such a file."""
    names = set(names)
    if any(LORA_PART.search(name) for name in names):
        return "a LoRA", "loras", "choose it in a stock Load LoRA node, after the loader"
    if not names >= OPEN_CLIP and any(
        name.endswith("vision_model.embeddings.class_embedding") or name == "visual.class_embedding" for name in names
    ):
        return "a CLIP vision model", "clip_vision", "choose it in the stock Load CLIP Vision node"
    return None


# -------------------------------------------------------------------------------------------------------------- looking


def inspect_file(path: str, role: Role, others: Sequence[str] = ()) -> None:
    """Raise `WrongFile` or `BadFile` if a header tells that the loader of this role will not load
    the file.

    others: for a text encoder, the user's other ones, which lend it a tokenizer if its file has
    none.
    """
    if not file_formats.has_header(path):
        open_regular(Path(path)).close()
        return
    with Checkpoint.open(path) as source:
        look_at(source, role).borrowed(others)


def look_at(source: Checkpoint, role: Role) -> CheckpointInfo:
    """The contents of an open file, whose tensors get stock's names. Raises `WrongFile` if the file
    is not for this role, or not whole."""
    translated = llama_cpp.renaming(source.files[0])
    if translated is not None:
        use_stocks_names(source, translated)
    info = CheckpointInfo.of(source)
    info.require_role(role)
    role = role.told_by
    if info.rename is not None:
        use_stocks_names(source, info.rename)
        info = CheckpointInfo(source.files[0], info.family, source)
    if role is not Role.VAE:
        quant_metadata.check_quantised(source)
    if role is Role.DIFFUSION:
        info.require_settings()
    info.require_whole(role)
    return info


def renamed(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], path: str
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, str]]:
    """A file's tensors and metadata, as stock has read them, under stock's names."""
    rename = CheckpointInfo.of_tensors(tensors, path).rename
    if rename is None:
        return tensors, metadata
    return {rename(name): tensor for name, tensor in tensors.items()}, quant_metadata.renamed(metadata, rename, path)


def use_stocks_names(source: Checkpoint, rename: Rename) -> None:
    """Rename the checkpoint's tensors; their places in the file stay."""
    header = source.files[0]
    extents = MappingProxyType({rename(name): extent for name, extent in source.extents.items()})
    source.extents = extents
    source.files = (
        dataclasses.replace(
            header, extents=extents, metadata=quant_metadata.renamed(header.metadata, rename, header.path)
        ),
        *source.files[1:],
    )

"""A stock CLIP whose T5 encoder's weights stay in the file: those of its blocks stream, and the token embedding's rows are
read as they are asked for.

It is built the way `comfy.sd.load_clip` builds one for Wan: the same detection, conversions, types and tokenizer. The
difference is in what the tensors are: stand-ins on the meta device, except for norms and scales.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.text_encoders.sd3_clip
import comfy.text_encoders.wan
import comfy.utils
import torch
from torch import Tensor

from ..memory import Checkpoint, Extent, Layer
from ..memory.layer import DTYPES
from . import progress
from .blocks import Block, Paged, blocks_of_t5, is_paged_of_t5, is_quantised
from .mixing import mix
from .skeleton import META, NotStreamable, in_model_dtypes, read, require_streamable
from .stream import NotWhileStreaming, Stream

ROOT = "umt5xxl.transformer."  # of the encoder's names in the text encoder model
EMBEDDING = "shared.weight"
LOADER = "FuseStream Text Encoder Loader"


@dataclass(frozen=True)
class ClipSkeleton:
    """clip: a stock CLIP. blocks and layers are the same things, to the model and to the pager; left: what stays in the
    file."""

    clip: Any
    blocks: tuple[Block, ...]
    layers: tuple[Layer, ...]
    left: tuple[Paged, ...]

    @property
    def net(self) -> Any:
        return self.clip.cond_stage_model.umt5xxl.transformer


def build_clip(source: Checkpoint, embedding_folders: Sequence[str], options: Mapping[str, Any]) -> ClipSkeleton:
    """The text encoder in `source`. options: stock's model_options."""
    header = source.files[0]
    tensors, homes = read(source, lambda name: is_paged_of_t5(name) or name == EMBEDDING)
    tensors, _ = comfy.utils.convert_old_quants(tensors, model_prefix="", metadata=dict(header.metadata))
    extents = {name: homes[id(tensor)][0] for name, tensor in tensors.items() if id(tensor) in homes}
    tokenizer = tensors.pop("spiece_model", None)
    target = SimpleNamespace(
        params={},
        clip=comfy.text_encoders.wan.te(**comfy.text_encoders.sd3_clip.t5_xxl_detect(tensors)),
        tokenizer=comfy.text_encoders.wan.WanT5Tokenizer,
    )
    clip: Any = comfy.sd.CLIP(
        target,
        embedding_directory=embedding_folders,
        tokenizer_data={"spiece_model": tokenizer},
        model_options={
            **options,
            "load_device": comfy.model_management.get_torch_device(),  # what the budget is of
            "initial_device": META,
        },
        disable_dynamic=True,
    )
    net = clip.cond_stage_model.umt5xxl.transformer
    for module in net.modules():
        if hasattr(module, "factory_kwargs"):  # operations that make their weights as they load them
            module.factory_kwargs["device"] = None
    _, unexpected = net.load_state_dict(in_model_dtypes(net, tensors), strict=False, assign=True)
    if unexpected:
        logging.debug("clip unexpected: %s", unexpected)  # in stock's words
    net.requires_grad_(False)
    if is_quantised(net.shared.weight):
        raise NotStreamable(
            f"{header.path}: its token embedding is quantised, of which no rows can be read. Set vram_budget to 0 to load it "
            "as stock does."
        )
    blocks = blocks_of_t5(net, ROOT)
    left = (Paged(EMBEDDING, ROOT + EMBEDDING, net.shared, "weight", net.shared.weight),)
    in_file = {one.key.removeprefix(ROOT) for block in blocks for one in block.paged} | {EMBEDDING}
    require_streamable(net, in_file, extents, header)
    mix(net.shared, FileEmbedding, fusestream_source=source, fusestream_extent=extents[EMBEDDING])
    return ClipSkeleton(clip, blocks, tuple(block.layer(extents) for block in blocks), left)


class FileEmbedding:
    """What the class of a token embedding is mixed with whose table stays in the file."""

    weight: Tensor
    fusestream_source: Checkpoint
    fusestream_extent: Extent

    def forward(self, ids: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Stock's Embedding: ids [...] -> [..., width] where the ids are."""
        rows = rows_of(self.fusestream_source, self.fusestream_extent, ids)
        return rows.to(self.weight.dtype).to(ids.device).to(out_dtype or self.weight.dtype)


class Checked:
    """What the class of a streamed T5 is mixed with. Its blocks move the bar, whoever computes them. An encoding that was
    computed with a file that changed does not leave; encoding has no end of its own that a patcher hears of."""

    fusestream_checks: Stream

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stock's."""
        with progress.over_blocks(self.fusestream_checks):
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        self.fusestream_checks.check()
        return out


def rows_of(source: Checkpoint, extent: Extent, ids: Tensor) -> Tensor:
    """Rows of a table in a file, as stored, on the CPU: ids [...] -> [..., width]. Each is read once."""
    if ids.is_meta:
        raise NotWhileStreaming(
            "The text encoder is asked to encode before it was told where. Encode through CLIP.encode_from_tokens, as CLIP "
            "Text Encode does, or set vram_budget to 0 in its FuseStream loader."
        )
    width = extent.shape[1]
    kind = DTYPES[extent.dtype]
    wanted, at = torch.unique(ids.cpu(), return_inverse=True)
    if wanted.numel() and not 0 <= int(wanted[0]) <= int(wanted[-1]) < extent.shape[0]:
        raise IndexError(f"token {int(wanted[-1])} is not one of the text encoder's {extent.shape[0]}")
    size = width * kind.itemsize
    bytes_ = torch.empty(wanted.numel() * size, dtype=torch.uint8)
    if wanted.numel():
        array: Any = bytes_.numpy()
        buffer = memoryview(array)
        for row, token in enumerate(wanted.tolist()):
            source.read_into(extent, buffer[row * size : (row + 1) * size], start=token * size)
    return bytes_.view(kind).view(-1, width)[at]

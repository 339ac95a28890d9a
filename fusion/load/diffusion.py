"""A file becomes a stock MODEL: one loader for all families.

Loading goes through ComfyUI's own functions, so every file that stock loads is loaded here. Two
checks are added: before the load, whether this is the right kind of file
(`identify/checkpoint_info.py`); after it, whether every weight of the model came from the file
(`missing.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import comfy.model_management
import comfy.sd
import torch

from ...kernels_cuda import STANDARD, KernelPolicy
from ...kernels_cuda.ops.views.checks import word
from ...memory import Checkpoint
from ..base.family import Family, Role
from ..base.notices import warn
from ..base.policy import all_off
from ..base.trained_sparse import TrainedSparse
from ..compatibility import families as compatibility
from ..compatibility.variants import leave_unknown
from ..files.completeness import naming
from ..fused import attention, feed_forward, operations
from ..fused.block import multiplied_by_stock
from ..graphs import diffusion
from ..identify.checkpoint_info import look_at
from ..patcher import call_log, cards, conditions, prepared_prompts, vram_retry
from ..patcher.streaming_patcher import StreamingModelPatcher
from ..patcher.vram_estimate import Reckoning
from ..sampling import checks, step_timer
from ..sampling.measured import describe
from ..sparse.model import install_trained
from ..stream import progress
from ..stream.block_stream import BlockStream
from ..stream.blocks import lay_out_layers
from ..weights.fp32_products import narrows_on
from . import build
from .common import let_stream, looked_at, open_to_stream, prepare, streamed_or_stock
from .missing import require_whole
from .request import FREE, LoadRequest, keep

# The prefix by which stock takes a diffusion model out of a whole checkpoint.
CHECKPOINT_PREFIX = "model.diffusion_model."


def load_diffusion_model(path: str, policy: KernelPolicy = STANDARD, vram_budget: float = 0.0) -> Any:
    """Load the diffusion model at `path` as a stock MODEL (a `ModelPatcher`) with our attention.

    vram_budget: GiB through which the blocks' weights stream; 0: stock's own memory management; -1:
    all free VRAM, and as with 0 for a file that cannot be streamed.
    """
    return load(LoadRequest(path, Role.DIFFUSION, policy, vram_budget))


def load_streamed_diffusion_model(
    path: str, vram_budget: float | None = None, policy: KernelPolicy = STANDARD, dtype: torch.dtype | None = None
) -> StreamingModelPatcher:
    """Load the diffusion model at `path` as a MODEL whose blocks stream from the file.

    vram_budget: GiB of VRAM for the blocks' weights; None: all free VRAM, less what stock expects
    the activations to need.
    dtype: type to hold the weights in; None: as stock chooses.
    """
    budget = FREE if vram_budget is None else vram_budget
    return streamed(LoadRequest(path, Role.DIFFUSION, policy, budget, dtype=dtype))


def load(request: LoadRequest) -> Any:
    """The requested MODEL."""
    return streamed_or_stock(request, streamed, stocks)


def stocks(request: LoadRequest) -> Any:
    """A MODEL in stock's own memory management."""
    path, policy = request.path, request.kernels
    with looked_at(path, partial(look_at, role=request.role)) as info:
        family = None if info is None else info.family
        bare = dict.fromkeys(() if info is None else info.header.extents, torch.empty(0, device="meta"))
    prepare(request)
    with naming(path):
        if request.is_checkpoint:
            model: Any = comfy.sd.load_checkpoint_guess_config(path, output_vae=False, output_clip=False)[0]
        else:
            model = comfy.sd.load_diffusion_model(path)
    # Stock gives some of the tensors other names than the file. That needs no numbers.
    names = None if family is None else model.model.model_config.process_unet_state_dict(bare).keys()
    net = model.model.diffusion_model
    require_whole(path, names, net, CHECKPOINT_PREFIX)
    if family is not None and family.learned is not None:
        _say_dense(path, family.learned([name.removeprefix(CHECKPOINT_PREFIX) for name in names or ()], net.dim))
    attention.install(model, policy)
    checks.attach(model, path, family)
    return model


def _say_dense(path: str, trained: TrainedSparse | None) -> None:
    """Warn of a file whose attention was trained sparse, which stock does not know."""
    if trained is not None:
        warn(
            f"{path} was trained with sparse attention ({trained.method}). ComfyUI has no place for a part of it, and computes "
            "dense attention without that. Set vram_budget to -1: FuseStream then computes as it was trained."
        )


def streamed(request: LoadRequest) -> StreamingModelPatcher:
    """A MODEL whose blocks stream from the file."""
    source = open_to_stream(request.path)
    prepare(request)
    model = streamed_from(source, request)
    keep(model, request, streamed)
    return model


def streamed_from(source: Checkpoint, request: LoadRequest) -> StreamingModelPatcher:
    """A MODEL whose blocks stream from an open file, which is closed on failure, or else with the
    model."""
    policy, device = request.kernels, request.device
    try:
        info = look_at(source, Role.DIFFUSION)
        info.say_doubts()
        family = compatibility.checked(info.family, device, policy)
        types = None if family is None else types_of(family, policy, device)
        parts = build.diffusion_model(source, request, family, types)
        if _is_wide_for_nothing(parts):
            parts = build.diffusion_model(source, request, family)
        net = parts.model.diffusion_model
        dtype = parts.model.get_dtype_inference()
        fused, is_cut = 0, False
        if family is not None and serves_type(family, dtype):
            fused, is_cut = family.fuse(net, policy), family.in_pieces
        if family is not None and fused:
            leave_unknown(family, net)
            if narrows_on(device, dtype):
                # What is beside the blocks, and a block that is handed back, would be stock's FP32.
                operations.fuse(net, is_beside=True)
        else:
            operations.fuse(net)
            is_cut = feed_forward.fuse(net) > 0
        layers = lay_out_layers(parts.blocks, parts.layers)
        is_ours = fused > 0 and not policy.is_off and dtype is torch.float16
        stream = BlockStream(source, parts.blocks, layers, device, request.budget_bytes, keeps_texts=is_ours)
    except BaseException:
        source.close()
        raise
    if parts.stocks_type is not None:
        stream.residency.ledger.note(
            "computes in",
            f"{word(dtype)}, as the kernels do; ComfyUI would in {word(parts.stocks_type)}",
        )
    let_stream(parts.model, stream, request.path, family, fused)
    diffusion.attach(net, stream)
    model = StreamingModelPatcher(parts.model, device, comfy.model_management.unet_offload_device())
    conditions.attach(model.model)
    prepared_prompts.attach(model.model, stream)
    # Around each call of the model, the outermost first: see stream/model_call.py.
    vram_retry.attach(model, Reckoning(None if family is None else family.need, in_pieces=is_cut))
    call_log.attach(model)
    progress.attach(model)
    cards.attach(model)
    operations.attach(model)
    attention.install(model, policy)
    if parts.learned is not None and fused:
        install_trained(model, parts.learned)
        stream.residency.ledger.note("attention", f"trained sparse: {parts.learned.words()}")
    checks.attach(model, request.path, family)
    step_timer.attach(model, describe)
    return model


def _is_wide_for_nothing(parts: build.Skeleton) -> bool:
    """Whether a model would compute in fp32 for the sake of our kernels, which will not run: stock
    multiplies most of its blocks' weights as they are stored (scaled fp8 from RTX 40 on), and so
    computes the blocks, too."""
    if parts.stocks_type is None or parts.model.get_dtype_inference() is not torch.float32:
        return False
    matrices = {paged.module for block in parts.blocks for paged in block.paged if paged.stand_in.ndim > 1}
    return 2 * sum(map(multiplied_by_stock, matrices)) > len(matrices)


def types_of(family: Family, policy: KernelPolicy, device: torch.device) -> tuple[torch.dtype, ...] | None:
    """The types in which a diffusion model should compute on a device so that its blocks are ours;
    None: as stock chooses.

    On cards that have bf16 stock prefers it for some families that can compute in fp16.
    """
    if device.type != "cuda" or all_off(policy, family.ops) or family.aside is not None or family.as_stock_chooses:
        return None
    return tuple(getattr(torch, name) for name in family.types)


def serves_type(family: Family, dtype: torch.dtype) -> bool:
    """Whether the family's blocks are fused in a model that computes in this type."""
    return not family.as_stock_chooses or word(dtype) in family.types

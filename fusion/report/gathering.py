"""Gathers a report from a MODEL. Nothing here may raise, because a report is wanted most when
something is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_management
import torch

from ...kernels_cuda import LEDGER
from ...kernels_cuda.ops.views.checks import word
from ...memory import Ledger, Plan, Rates, least_budget, make_plan, most_budget, simulate
from ...memory.host.ram import measure_ram
from ..base import other_cards
from ..base.format import counted
from ..base.hooks import STREAM
from ..base.policy import policy_on
from ..fused import operations
from ..fused.quality import policy_words, rates_of_policy
from ..patcher.call_log import branch_of, branches, passes_under
from ..sampling import kernel_choices
from ..sampling.step_timer import pace_of
from ..sparse.model import sparse_of
from ..step_cache.model import step_cache_of
from ..stream import vram_pool
from ..stream.block_stream import BlockStream
from ..stream.residency import GRAPHS, TEXTS
from ..weights import saturation
from .advice import faster, spare
from .data import GIB, Foretold, KernelRow, LayerRow, Memory, RefusalRow, Report, Sampling, Sparsity, WhatIf
from .live import live_of
from .passes import cut, last_pass, typical

NO_MODEL = "No model is connected: only kernels and memory are reported."
WHOLE = (
    "ComfyUI's own memory management has its weights: nothing streams through FuseStream. Set vram_budget in the FuseStream "
    "Diffusion Model Loader to stream them."
)


def gather(model: Any = None) -> Report:
    """The report on a stock MODEL, streamed or not; without one, on what all models share."""
    gaps: list[str] = []
    stream = stream_of(model)
    report = Report("no model", NO_MODEL) if model is None else Report("model", state_of_whole())
    for part in (title, policy, sparsity, foretold, sampling, live, memories, kernels):
        with noting(gaps, part.__name__):
            report = replace(report, **part(model))
    choosing = kernel_choices.words(getattr(model, "model", None))
    if stream is not None:
        report = replace(report, streams=True, state=state_of(stream))
        with noting(gaps, "streaming"):
            report = replace(report, **streaming(stream, model))
        with noting(gaps, "what it computed"):
            net = model.model.diffusion_model
            told = operations.words(net), saturation.words(net)
            report = replace(report, state=" ".join(filter(None, (report.state, *told))))
    report = replace(report, state=" ".join(filter(None, (report.state, choosing))))
    with noting(gaps, "advice"):
        report = replace(report, advice=tuple(faster(report)), spare=tuple(spare(report)))
    return replace(report, gaps=tuple(gaps))


@contextmanager
def noting(gaps: list[str], what: str) -> Iterator[None]:
    """Turn an error in this block into a line of the report."""
    try:
        yield
    except Exception as error:
        gaps.append(f"{what}: {type(error).__name__}: {error or 'no further words'}")


def stream_of(model: Any) -> BlockStream | None:
    found = getattr(getattr(model, "model", None), STREAM, None)
    return found if isinstance(found, BlockStream) else None


def state_of_whole() -> str:
    """The state of a model that does not stream, in words."""
    reason = other_cards.lacks(comfy.model_management.get_torch_device())
    return (
        WHOLE if reason is None else f"ComfyUI's own memory management has its weights: {reason}. {other_cards.SERVED}"
    )


def state_of(stream: BlockStream) -> str:
    captured = "" if stream.residency.graphs is None else stream.residency.graphs.words()
    said = where_it_is(stream), stream.residency.texts.words(), what_it_holds(stream), who_computes(stream), captured
    return " ".join(filter(None, said))


def where_it_is(stream: BlockStream) -> str:
    if stream.residency.pager is None:
        return "Its blocks stream, and are unloaded now: what stays and what passes through is not known any more."
    plan = stream.residency.pager.plan
    if not plan.streamed and not plan.rare:
        return "Its blocks stream, and all of them fit: each came once and stayed."
    parts = " in parts" if stream.residency.is_in_parts else ""
    return (
        f"Its blocks stream{parts}: {counted(len(plan.resident), 'stays', 'stay')} in VRAM, "
        f"{counted(len(plan.streamed), 'passes', 'pass')} through a window with room for {plan.slots}."
    )


def what_it_holds(stream: BlockStream) -> str:
    """Words on weights that are held otherwise than in the file, or are computed in another form
    than they are held."""
    converted: Counter[tuple[str, str]] = Counter()
    packed: Counter[str] = Counter()
    for weight in (weight for layer in stream.layers for weight in layer.weights):
        if weight.is_converted:
            converted[weight.extent.dtype, word(weight.device_dtype)] += weight.nbytes
        elif weight.is_packed:
            packed[weight.extent.dtype] += weight.nbytes
    if packed.total() > converted.total():
        kinds = ", ".join(name for name, _ in packed.most_common())
        return f"Weights stay packed as the file has them ({kinds}), and are unpacked for each product."
    if not converted:
        return ""
    (stored, held), _ = converted.most_common(1)[0]
    why = ": the CPU computes in it, whatever the quality" if stream.device.type == "cpu" else ""
    return f"Weights that the file has as {stored} are held as {held}, converted as they arrive{why}."


def who_computes(stream: BlockStream) -> str:
    return "" if stream.arrivals.family else "It streams; there are no fused blocks for this family: ComfyUI's run."


def title(model: Any) -> dict[str, Any]:
    """The model's class, its file if known, and its device."""
    if model is None:
        return {"device": str(comfy.model_management.get_torch_device())}
    name = type(getattr(model, "model", model)).__name__
    source = getattr(model, "cached_patcher_init", None)
    if source and source[1] and isinstance(source[1][0], str):
        name = f"{Path(source[1][0]).name} ({name})"
    device = torch.device(model.load_device)
    shown = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return {"title": name, "device": shown}


def sampling(model: Any) -> dict[str, Any]:
    """The last sampling of a streamed MODEL, if there was one."""
    pace = pace_of(model)
    if pace is None or pace.last is None:
        return {}
    last = pace.last
    return {"sampling": Sampling(last.steps, last.seconds, last.spent, last.first, pixels_of(model, last.shape))}


def pixels_of(model: Any, shape: Sequence[int]) -> tuple[int, int, int]:
    """Frames, height and width that a latent stands for, 0 frames: it is a picture. Zeros: it is
    sound."""
    wanted = model.model.latent_format
    if len(shape) < 4:
        return 0, 0, 0
    height, width = (int(side * wanted.spacial_downscale_ratio) for side in shape[-2:])
    frames = (shape[2] - 1) * wanted.temporal_downscale_ratio + 1 if len(shape) == 5 else 0
    return int(frames), height, width


def policy(model: Any) -> dict[str, Any]:
    """The policy in the words of the nodes."""
    if model is None:
        return {}
    found = policy_on(model)
    if found is None:
        return {"policy": "none: stock's kernels"}
    return {"policy": policy_words(found, model), "tier": "" if found.is_off else rates_of_policy(model, found)}


def sparsity(model: Any) -> dict[str, Any]:
    """Figures of a MODEL that went through the Sparse Attention node."""
    found = None if model is None else sparse_of(model.model_options.get("transformer_options", {}))
    if found is None:
        return {}
    tallied, asked = found.tally.read(), found.settings.words()
    times = (tallied.seconds.get("sparse"), tallied.seconds.get("dense"))
    return {"sparsity": Sparsity(asked, tallied.sparse, tallied.visited, *times, tallied.dense)}


def foretold(model: Any) -> dict[str, Any]:
    """What the Step Cache of a MODEL did."""
    found = None if model is None else step_cache_of(model)
    if found is None:
        return {}
    asked = found.settings.words()
    return {"foretold": Foretold(asked) if found.last is None else Foretold(asked, found.last.words())}


def live(model: Any) -> dict[str, Any]:
    """Figures of a MODEL that a Live Video node has used."""
    return {"live": live_of(model)}


def memories(model: Any) -> dict[str, Any]:
    """The card and the RAM, and FuseStream's part of them."""
    device = comfy.model_management.get_torch_device() if model is None else torch.device(model.load_device)
    found = []
    stream = stream_of(model)
    if stream is not None:
        limit = stream.residency.wanted if stream.residency.ceiling is None else stream.residency.ceiling
        held, kept = stream.residency.held - stream.residency.texts.nbytes, stream.residency.texts.nbytes
        found.append(
            Memory("VRAM for blocks", held, max(limit, stream.residency.held), stream.residency.ledger.peak("VRAM"))
        )
        if stream.residency.ledger.peak(TEXTS):
            found.append(
                Memory("VRAM for texts", kept, max(limit, stream.residency.held), stream.residency.ledger.peak(TEXTS))
            )
        if stream.residency.ledger.peak(GRAPHS):
            found.append(
                Memory(
                    "VRAM for graphs",
                    stream.residency.beside,
                    max(limit, stream.residency.beside),
                    stream.residency.ledger.peak(GRAPHS),
                )
            )
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found.append(Memory("VRAM, whole card", total - free, total, None))
        found.append(
            Memory("VRAM by torch", torch.cuda.memory_reserved(device), total, torch.cuda.max_memory_reserved(device))
        )
    budget = vram_pool._ram
    if budget is not None:
        peak = None
        if stream is not None:
            peak = sum(stream.residency.ledger.peak(f"{what} RAM") for what in ("pinned", "registered", "managed"))
            # `taken` covers all models, and pages that are still to be registered
            peak = max(peak, budget.taken)
        found.append(Memory("RAM pinned by FuseStream", budget.taken, budget.total, peak))
    ram = measure_ram()
    found.append(Memory("RAM", ram.total - ram.available, ram.total, None))
    return {"memories": tuple(found)}


def kernels(_model: Any) -> dict[str, Any]:
    """Process-wide choices and refusals, because tuning choices are keyed by shape, not by
    model."""
    rows = []
    for choice in LEDGER.choices:
        ranked = sorted(choice.seconds.items(), key=lambda item: item[1])
        times = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in ranked)
        rows.append(
            KernelRow(choice.op, choice.shape, choice.winner, f"{choice.why}: {times}" if times else choice.why)
        )
    refused = [RefusalRow(r.op, r.candidate, r.reason, r.served_by, r.times) for r in LEDGER.refusals]
    return {"kernels": tuple(rows), "refusals": tuple(refused), "messages": tuple(LEDGER.messages)}


def streaming(stream: BlockStream, model: Any) -> dict[str, Any]:
    """Figures from the pager's ledger. Passes are those of this MODEL's branch, if two branches
    share the stream."""
    ledger = stream.residency.ledger
    # rare layers do not mark a pass
    order = {layer.name: i for i, layer in enumerate(stream.layers) if not layer.rare}
    entries = ledger.entries
    passes = cut(entries, order)
    ran = passes_under(len(passes), branches(model), branch_of(model))
    usual = typical(entries, passes, ran)
    plan = stream.residency.pager.plan if stream.residency.pager is not None else None
    compute = tuple(usual.get(("use", layer.name), 0.0) for layer in stream.layers)
    rates = Rates(usual_rate(stream, plan, usual), compute)
    predicted = simulate(plan, rates) if plan is not None and rates.bus and ran else None
    layers = tuple(
        LayerRow(
            layer.name,
            layer.nbytes,
            layer.stored_bytes,
            plan is not None and i in plan.resident,
            use=compute[i],
            copy=usual.get(("copy", layer.name), 0.0),
            stall=usual.get(("stall", layer.name), 0.0),
            predicted=predicted.stalls[i] if predicted else None,
            rare=layer.rare,
        )
        for i, layer in enumerate(stream.layers)
    )
    summary = ledger.summary()
    return {
        "passes": len(ran),
        "slots": plan.slots if plan else 0,
        "window": plan.window_bytes if plan else 0,
        "budget": stream.residency.wanted if stream.residency.ceiling is None else stream.residency.ceiling,
        "layers": layers,
        "timeline": last_pass(entries, order, passes, ran),
        "routes": tuple(sorted(summary["bytes by route"].items(), key=lambda item: -item[1])),
        "rate": ledger.rate(),
        "overlap": ledger.overlap(),
        "predicted_pass": predicted.steady if predicted else None,
        "what_if": what_if(plan, rates) if plan is not None and predicted else (),
        "notes": tuple(summary["notes"].items()),
    }


def usual_rate(stream: BlockStream, plan: Plan | None, usual: dict[tuple[str, str], float]) -> float:
    """Bytes per second of copies in a typical pass, in bytes as the plan counts them. That leaves
    out the first pass, which finds nothing in the page cache. If no typical pass copied anything,
    the rate of all copies."""
    if plan is not None:
        copies = [(plan.sizes[i], usual.get(("copy", stream.layers[i].name), 0.0)) for i in plan.streamed]
        seconds = sum(taken for _, taken in copies)
        if seconds > 0:
            return sum(nbytes for nbytes, taken in copies if taken > 0) / seconds
    return stream.residency.ledger.rate()


def what_if(plan: Plan, rates: Rates) -> tuple[WhatIf, ...]:
    """Predictions for other budgets: the least, the present one, some between and beyond, and the
    whole model."""
    least, now, whole = least_budget(plan.sizes, plan.rare), plan.footprint, sum(plan.sizes)
    if plan.rare:
        whole = most_budget(plan.sizes, plan.rare)
    wanted = {
        least,
        now,
        (now + whole) // 2,
        *(now + step * GIB for step in (-1, 0.5, 1, 2, 4) if least < now + step * GIB < whole),
        whole,
    }
    found = []
    for nbytes in sorted(int(one) for one in wanted):
        made = plan if nbytes == now else make_plan(plan.sizes, nbytes + 512 * len(plan.sizes), rates, plan.rare)
        found.append(WhatIf(nbytes, simulate(made, rates).steady))
    return tuple(found)


def trace_of(model: Any) -> str | None:
    """The Chrome trace of a streamed model; None if there is none."""
    stream = stream_of(model)
    if stream is None:
        return None
    ledger: Ledger = stream.residency.ledger
    return ledger.chrome_trace()

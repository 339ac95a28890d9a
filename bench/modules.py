"""Measure the modules and networks made of them: torch eager, torch.compile and ours, on the same inputs.

    python bench rows modules               all rows, within 150 s of an H200; each is in bench/results/<gpu>.json at once
    python bench rows modules --only style  the rows whose label contains this; merged into the same file
    python bench rows modules --autotune    also torch.compile's own choice of kernels: minutes more
    python bench rows modules --quick       small ones, on the CPU too: that it runs; nothing is written

FP16 throughout. Operations are timed on the device alone (graph replays, cold cache), networks as they are called, nodes
from RAM to RAM; medians. Ours is `auto`, once it has chosen, and is timed first and last: its better half counts, because
of a peer's ways the fastest counts. COMFYUI_PATH is needed for networks and nodes.

Modules and networks have a process in which ComfyUI does not page VRAM, because paging takes the place of CUDA's
functions and torch.compile has graphs of its own. Nodes have a process as ComfyUI starts.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels_cuda import LEDGER
from ..kernels_cuda.modules.graphs import captures_of
from . import kernels, module_nodes
from .end_to_end.results import card_file
from .end_to_end.start import start_comfyui
from .measure import device_seconds, eager_seconds, sets_for
from .module_cases import BEST, Case, cases

GIB = 2**30
SECTION = "modules"
COMPILE = "torch.compile"
# How torch.compile is called: what it does by itself, with CUDA graphs where the host is timed, and all that it has.
USUAL: dict[str, dict[str, Any]] = {"default": {}}
GRAPHS = {"reduce-overhead": {"mode": "reduce-overhead"}}
TRYING_ALL = {"max-autotune": {"mode": "max-autotune-no-cudagraphs"}}
A_TRY: dict[str, dict[str, Any]] = {"eager": {"backend": "eager"}}  # on the CPU, with no compiler
NODES = ("ESRGAN x4 512 x 512, through the nodes", "style network 2160 x 3840, through the node, 3 GiB free")
PARTS = ("networks", "nodes")  # each in a process of its own
HERE = Path(__file__).resolve().parent
EQUAL = 0.02  # what is promised never to be slower may be by so much: two runs of one kernel differ by that
CAPTURED = 5  # calls of a network whose kernels are chosen, after which it is captured, or not to be
NAMES = {torch.channels_last: "channels-last", torch.contiguous_format: "channels-first"}


def measured(case: Case, device: str, dtype: torch.dtype, modes: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of each way, GiB at the peak, errors against FP32."""
    theirs, ours = sides(case, device, dtype)
    example = inputs(case, device, dtype)
    result: dict[str, Any] = {"op": SECTION, "label": case.label, "asked": dict(case.asked)}
    result["errors"] = errors(theirs, ours, example)
    # The order of sums differs, and the modules round less often than torch's layers.
    result["right"] = result["errors"]["ours"] <= 2 * result["errors"]["eager"] + 1e-3
    sets = [example]
    timed: Callable[..., float] = once
    if device == "cuda":
        size = sum(t.numel() * t.element_size() for t in example)
        sets += [inputs(case, device, dtype) for _ in range(0 if case.is_network else sets_for(2 * size) - 1)]
        timed = eager_seconds if case.is_network else device_seconds
        LEDGER.clear()
        chosen(ours, example)
        result["auto"] = ", ".join(dict.fromkeys(f"{choice.op}: {choice.winner}" for choice in LEDGER.choices))
        result["ours GiB"], result["eager GiB"] = peak(ours, example), peak(theirs, example)
    first = timed(ours, sets)
    result |= eager(case, theirs, sets, timed)
    for name, way in {**case.peers(theirs), **case.parts(theirs)}.items():
        result |= attempted(name, way, sets, timed)
    if case.compiled:
        result |= compiled(theirs, sets, timed, modes)
    else:
        result[f"{COMPILE} failed"] = "not tried: it takes minutes, and nothing is promised beside it"
    last = timed(ours, sets)
    if case.is_network:
        result["ours is"] = as_called(ours)
    result |= {"ours ms": min(first, last) * 1e3, "spread": abs(first - last) / min(first, last)}
    result["others"] = sorted(case.peers(theirs))
    return result


def sides(case: Case, device: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """torch's and ours, with the same weights."""
    torch.manual_seed(0)
    theirs = case.theirs().eval().requires_grad_(False).to(device, dtype)
    theirs = formatted(theirs, case.formats[0]) if case.is_network else theirs
    return theirs, case.ours(theirs).eval().requires_grad_(False).to(device, dtype)


def as_called(ours: nn.Module) -> str:
    """How a network's calls came to the card."""
    return "CUDA graph" if any(captures.replayed for captures in captures_of(ours)) else "launch after launch"


def chosen(ours: nn.Module, example: list[Tensor]) -> None:
    """Its kernels, and whether its calls are captured."""
    kernels.choose(ours, tuple(example))
    for _ in range(CAPTURED):
        ours(*example)


def once(run: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> float:
    """Seconds of one call: a try."""
    begun = time.perf_counter()
    run(*sets[0])
    return time.perf_counter() - begun


def eager(case: Case, theirs: nn.Module, sets: list[list[Tensor]], timed: Callable[..., float]) -> dict[str, Any]:
    """In the faster of the formats."""
    found = {}
    for format in case.formats:
        net = formatted(copy.deepcopy(theirs), format) if case.is_network else theirs
        laid_out = [[formatted(t, format) for t in one] for one in sets]
        found[NAMES[format] if len(case.formats) > 1 else ""] = timed(net, laid_out) * 1e3
    best = min(found, key=lambda name: found[name])
    return {"eager ms": found[best]} | ({"eager is": best} if best else {})


def compiled(
    theirs: nn.Module, sets: list[list[Tensor]], timed: Callable[..., float], modes: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    """The fastest of its modes, and how long it took to compile; or why it does not run here."""
    result: dict[str, Any] = {}
    best = float("inf")
    for mode, options in modes.items():
        torch._dynamo.reset()
        begun = time.perf_counter()
        try:
            net = torch.compile(theirs, dynamic=False, **options)
            net(*sets[0])
            taken = time.perf_counter() - begun
            found = timed(net, sets) * 1e3
        except Exception as error:  # theirs, of whatever kind: a machine without a compiler, first of all
            result[f"{COMPILE} failed"] = f"{mode}: {type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]
            continue
        if found < best:
            best = found
            result |= {f"{COMPILE} ms": found, f"{COMPILE} is": mode, f"{COMPILE} took s": taken}
    if f"{COMPILE} ms" in result:
        result.pop(f"{COMPILE} failed", None)
    return result


def attempted(
    name: str, way: Callable[..., Any], sets: list[list[Tensor]], timed: Callable[..., float]
) -> dict[str, Any]:
    try:
        return {f"{name} ms": timed(way, sets) * 1e3}
    except RuntimeError as error:  # a backend of attention that does not serve this device or shape
        return {f"{name} failed": str(error).splitlines()[0][:200]}


def errors(theirs: nn.Module, ours: Callable[..., Any], example: list[Tensor]) -> dict[str, float]:
    """||result - exact|| / ||exact||, where exact is torch's in FP32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        exact = copy.deepcopy(theirs).float()(*(t.float() for t in example))
    finally:
        torch.backends.cudnn.allow_tf32 = before
    return {
        name: float((run(*example).float() - exact).norm() / exact.norm())
        for name, run in (("ours", ours), ("eager", theirs))
    }


def inputs(case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
    return [formatted(torch.randn(shape, device=device, dtype=dtype), case.formats[0]) for shape in case.shapes]


def formatted(x: Any, format: torch.memory_format) -> Any:
    """A picture or a network in a format; what has no pixels stays as it is."""
    if isinstance(x, Tensor):
        return x.contiguous(memory_format=format) if x.ndim == 4 else x
    return x.to(memory_format=format)


def peak(run: Callable[..., Any], example: list[Tensor]) -> float:
    """GiB of one call beyond what lay there before, by torch's count; weights and inputs are added."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(*example)
    own = list(run.parameters()) if isinstance(run, nn.Module) else []
    held = sum(t.numel() * t.element_size() for t in (*own, *example))
    # What is replayed asks torch for nothing.
    held += sum(captures.nbytes for captures in captures_of(run)) if isinstance(run, nn.Module) else 0
    return (torch.cuda.max_memory_allocated() - before + held) / GIB


# ------------------------------------------------------------------------------------------------------- what came out


def judged(result: dict[str, Any]) -> dict[str, Any]:
    """The result with its ratios over ours, and whether promises hold: None where one is not known, or there is none."""
    if "ours ms" not in result:
        return result
    others = ("eager", COMPILE, *result.get("others", ()))
    known = {name: result[f"{name} ms"] for name in others if f"{name} ms" in result}
    if known:
        best = min(known, key=lambda name: known[name])
        result |= {BEST: best, f"{BEST} ms": known[best]}
    result |= {
        f"{k[:-3]} / ours": result[k] / result["ours ms"] for k in list(result) if k[-3:] == " ms" and k != "ours ms"
    }
    checks: list[bool | None] = [held(result, name) for name in result["asked"]]
    checks += [result.get("right", True)]
    result["met"] = None if not result["asked"] else False if False in checks else None if None in checks else True
    return result


def held(result: Mapping[str, Any], name: str) -> bool | None:
    """Whether one promise holds. None: it was not measured here."""
    wanted = result["asked"][name]
    if name == "GiB":
        return None if "ours GiB" not in result else bool(result["ours GiB"] <= wanted)
    ratio = result.get(f"{name} / ours")
    return None if ratio is None else bool(ratio >= (wanted - EQUAL if wanted == 1 else wanted))


def line(result: Mapping[str, Any]) -> str:
    """One row for people."""
    head = f"{result['label'][:58]:58}"
    text = f"{head} {result['ours ms']:9.3f} ms"
    text += f" ({result['ours is']})" if "ours is" in result else ""
    for name in ("eager", COMPILE, BEST, "stock"):
        if f"{name} / ours" in result:
            way = result.get(BEST) if name == BEST else result.get(f"{name} is")
            told = f"{name} ({way})" if way else name
            text += f"  {told} {result[f'{name} / ours']:.2f}x"
    text += f"  {result['ours GiB']:.2f} GiB" if "ours GiB" in result else ""
    if result["asked"]:
        asked = ", ".join(f"{name} {wanted:g}" for name, wanted in result["asked"].items())
        text += f"  asked {asked}: {'MISS' if result['met'] is False else 'holds' if result['met'] else 'not measured'}"
    failed = [f"{key.removesuffix(' failed')}: {value}" for key, value in result.items() if key.endswith(" failed")]
    return (
        text + "".join(f"\n    {one}" for one in failed) + ("" if result.get("right", True) else "\n    WRONG RESULT")
    )


def tried(result: Mapping[str, Any]) -> str:
    """One row of a try, whose times say nothing."""
    told = "as torch's" if result["right"] else "NOT AS TORCH'S"
    return f"{result['label']}: {told}, error {result['errors']['ours']:.1e}"


# ---------------------------------------------------------------------------------------------------------------- a run


def rows_of(options: argparse.Namespace, device: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """The measurement of each row that is wanted, by label. A row that leaves the card small for a while comes last."""
    dtype = torch.float16 if device == "cuda" else torch.float32

    def measure(case: Case) -> Callable[[], dict[str, Any]]:
        modes = USUAL | (GRAPHS if case.is_network else {}) | (TRYING_ALL if options.autotune else {})
        return lambda: measured(case, device, dtype, A_TRY if device == "cpu" else modes)

    found = {case.label: measure(case) for case in cases(options.quick)} if options.part != "nodes" else {}
    if os.environ.get("COMFYUI_PATH") and options.part != "networks":
        side, large = (16, (40, 36)) if options.quick else (512, (2160, 3840))
        on_card, small = device == "cuda", options.quick
        found[NODES[0]] = lambda: module_nodes.upscaled(side, small, on_card)
        found[NODES[1]] = lambda: module_nodes.styled(large, small, on_card)
    return {
        label: run for label, run in found.items() if not options.only or any(word in label for word in options.only)
    }


def command_line() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="dev.py bench rows modules"
    )
    cli.add_argument("--only", action="append", help="rows whose label contains this; may be repeated")
    cli.add_argument("--autotune", action="store_true", help="torch.compile in max-autotune as well: minutes more")
    cli.add_argument("--quick", action="store_true", help="small ones, on the CPU where there is no GPU")
    cli.add_argument("--part", choices=PARTS, help="the rows of one process")
    cli.add_argument("--results", type=Path, help="the file to merge into; bench/results/<gpu>.json by default")
    return cli


def main(arguments: Sequence[str] = ()) -> int:
    options = command_line().parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        print("no NVIDIA GPU on this machine")
        return 1
    if device == "cuda" and not options.quick and options.part is None:
        command = [sys.executable, str(HERE), "rows", SECTION, *arguments]
        codes = [subprocess.call([*command, "--part", part]) for part in PARTS]
        return int(any(codes))
    rows = rows_of(options, device)
    if rows and os.environ.get("COMFYUI_PATH"):
        own = [] if options.part == "nodes" else ["--disable-dynamic-vram"]
        start_comfyui(["--cpu"] if device == "cpu" else own)
    right = True
    with torch.inference_mode():
        for label, measure in rows.items():
            result = judged(measure() | {"label": label})
            right = right and result.get("right", True)
            print(tried(result) if options.quick else line(result), flush=True)
            if not options.quick:
                kernels.save(options.results or card_file(torch.cuda.get_device_name()), SECTION, [result], {})
                torch.cuda.empty_cache()
    return int(not right)

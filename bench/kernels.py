"""Measure every op against stock, torch.compile, other libraries and the copy bandwidth of the same run.

    python bench rows                       all rows; writes bench/results/<gpu>.json
    python bench rows --only norm_modulate  the rows whose op or label contains this; merged into the same file
    python bench rows --compile none        without torch.compile (it needs a host compiler and minutes)
    python bench rows --compile pages       torch.compile for the rows that bench/results.md shows
    python bench rows --isa sm_75           Turing's code, compiled by the driver; a section of its own
    python bench rows --sweep               every tactic of our kernels at every row; nothing is written
    python bench rows modules|pager|host    the modules; streaming; the host's time for a block

Columns: microseconds of ours, GB/s over the bytes of a perfect kernel, that as a share of a copy of the same footprint
in the same run, how many times stock and torch.compile take, the choice of `auto`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import math
import pkgutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels_cuda import LEDGER, OPS, KernelPolicy, KernelRefused
from ..kernels_cuda.build.matrix import source_hash
from ..kernels_cuda.call import Call
from ..kernels_cuda.policy import Mode
from ..kernels_cuda.tune import autotune
from ..kernels_cuda.tune.time_budget import Purse
from . import rows as row_files
from . import sources
from .end_to_end.results import ask_card, card_file, read, rounded, write
from .kitchen import NAME as KITCHEN
from .measure import copy_bandwidth, device_seconds, eager_seconds, host_seconds, sets_for, sum_bytes
from .report.chosen import CHOSEN
from .row import Row, Tensors

# RTX 2060 Super: 448 GB/s. The share of it our kernels reach on the measured card is assumed there too.
TURING_BANDWIDTH = 448e9
# FLOP/s of nothing but mma m16n8k8 (Turing's) and m16n8k16, measured on the card.
TENSOR_CEILING = {"NVIDIA H200": {"sm_75": 480e12, "sm_80": 645e12}}


def all_rows(only: list[str] | None) -> list[Row]:
    found: list[Row] = []
    for module in pkgutil.iter_modules(row_files.__path__):
        found += importlib.import_module(f"{row_files.__name__}.{module.name}").ROWS
    return [row for row in found if only is None or any(word in row.op or word in row.label for word in only)]


def moved_bytes(row: Row, tensors: Tensors) -> int:
    outputs = row.stock(*tensors, *row.options)
    outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
    return row.moved(tensors, outputs) if row.moved else sum_bytes(*tensors, *outputs)


def measure_row(row: Row, isa: Any, compile_stock: bool) -> dict[str, Any]:
    example = row.inputs()
    size = moved_bytes(row, example)
    inputs = [example, *(row.inputs() for _ in range(sets_for(size) - 1))]
    result: dict[str, Any] = {
        "op": row.op,
        "label": row.label,
        "bytes": size,
        "shapes": [None if t is None else [*t.shape, str(t.dtype)[6:]] for t in example],
    }
    stock = device_seconds(lambda *t: row.stock(*t, *row.options), inputs)
    result |= {"stock is": row.against, "stock us": stock * 1e6}
    try:
        ours = device_seconds(prepared(row, example, policy("on", row, isa)), inputs)
    except KernelRefused as error:
        return {**result, "refused": str(error)}
    result |= {"ours us": ours * 1e6, "stock / ours": stock / ours}
    if row.flops is not None:
        result |= matrix_figures(row, isa, ours, stock)
        result |= peer_figures(row, isa, inputs, ours)
        result |= rival_figures(row, inputs, ours)
    else:
        result |= memory_figures(size, ours)
    if compile_stock and row.flops is None:
        run, arguments = row.stock, row.options
        torch._dynamo.reset()  # or the ninth row meets the recompilation limit, and is eager in disguise
        compiled = torch.compile(lambda *t: run(*t, *arguments), dynamic=False)
        try:
            seconds = device_seconds(compiled, inputs)
            result |= {"torch.compile us": seconds * 1e6, "torch.compile / ours": seconds / ours}
        except AssertionError as error:  # inductor's own check: it cannot compile views of one packed buffer in place
            result["torch.compile failed"] = str(error).splitlines()[0]
    if row.exact is not None:
        able = {name: run for name, run in row.rivals().items() if f"{name} us" in result}
        result["errors"] = errors(row, example, prepared(row, example, policy("on", row, isa)), able)
    LEDGER.clear()
    chosen = prepared(row, example, policy("auto", row, isa))
    choose(chosen, example)
    winners = dict.fromkeys(choice.winner for choice in LEDGER.choices)
    result["auto"] = ", ".join(winners) or ("stock" if row.ours is None else "forced on")
    if row.flops is not None:
        seconds = timer(result["auto"])(chosen, inputs)
        result |= {"auto us": seconds * 1e6, "stock / auto": stock / seconds}
    return result


def prepared(row: Row, example: Tensors, policy: KernelPolicy) -> Callable[..., Any]:
    """The callable of a row under a policy: a bound op, or the row's own chain of ops."""
    return row.ours(policy) if row.ours else OPS[row.op].bind(example, row.options, policy)


def policy(mode: Mode, row: Row, isa: Any) -> KernelPolicy:
    return KernelPolicy.of(mode, isa=isa, precision=row.precision)


def choose(run: Callable[..., Any], example: Tensors) -> None:
    """Until `auto` has chosen, with all the means there are: it chooses at the calls."""
    tuner = autotune.tuner()
    tuner.purse = Purse(math.inf)
    before = None
    while before != tuner.undecided:
        before = tuner.undecided
        run(*example)
        torch.cuda.synchronize()


def memory_figures(size: int, ours: float) -> dict[str, Any]:
    """The bound is a copy of the same footprint in the same run."""
    copy = copy_bandwidth(size)
    return {
        "copy GB/s": copy / 1e9,
        "bound us": size / copy * 1e6,
        "GB/s": size / ours / 1e9,
        "share of copy": size / ours / copy,
        "predicted us on RTX 2060 Super": copy * ours / TURING_BANDWIDTH * 1e6,
    }


def matrix_figures(row: Row, isa: Any, ours: float, stock: float) -> dict[str, Any]:
    """The bound is what the tensor instruction of the class reaches on this card with nothing else to do."""
    assert row.flops is not None
    ceiling = TENSOR_CEILING.get(torch.cuda.get_device_name(), {}).get(isa or "sm_80")
    result = {"TFLOP/s": row.flops / ours / 1e12, "stock TFLOP/s": row.flops / stock / 1e12}
    if ceiling is not None and not row.in_bytes:
        result |= {"bound us": row.flops / ceiling * 1e6, "share of ceiling": row.flops / ours / ceiling}
    return result


def peer_figures(row: Row, isa: Any, inputs: list[Tensors], ours: float) -> dict[str, Any]:
    """Torch's other candidates at the same inputs, each on its own."""
    if not row.peers:
        return {}
    call = Call(row.op, inputs[0], row.options, policy("on", row, isa))
    able = [c for c in OPS[row.op].candidates if not c.ours and c.name != "stock" and c.refuse(call) is None]
    seconds = {c.name: timer(c.name)(c.prepare(call), inputs) for c in able}
    return {f"{name} us": s * 1e6 for name, s in seconds.items()} | {
        f"{name} / ours": s / ours for name, s in seconds.items()
    }


def timer(served: str) -> Callable[..., float]:
    """How to time what computes: comfy-kitchen's products ask cuBLAS for memory, which no graph that is being captured allows."""
    return eager_seconds if KITCHEN in served else device_seconds


def rival_figures(row: Row, inputs: list[Tensors], ours: float) -> dict[str, Any]:
    """Other libraries at the same inputs. One that fails says so, and the row goes on."""
    found: dict[str, Any] = {}
    for name, run in row.rivals().items():
        found |= rival_figure(name, lambda *t, run=run: run(*t, *row.options), inputs, ours)
    return found


def rival_figure(name: str, run: Callable[..., Any], inputs: list[Tensors], ours: float) -> dict[str, Any]:
    try:
        seconds = eager_seconds(run, inputs)
    except Exception as error:  # theirs, of whatever kind
        return {f"{name} failed": f"{type(error).__name__}: {error}"[:200]}
    return {f"{name} us": seconds * 1e6, f"{name} / ours": seconds / ours}


def errors(
    row: Row, example: Tensors, ours: Callable[..., Any], rivals: dict[str, Callable[..., Any]]
) -> dict[str, float]:
    """||result - exact|| / ||exact|| of ours, of stock and of other libraries, over the part that was computed exactly."""
    assert row.exact is not None
    exact = row.exact(*example, *row.options)

    def error(result: Tensor) -> float:
        return float((result[row.sampled].double() - exact).norm() / exact.norm())

    found = {"ours": error(ours(*example))}
    others = {"stock": row.stock, **rivals}
    return found | {name: error(run(*example, *row.options)) for name, run in others.items()}


def sweep_row(row: Row, isa: Any) -> None:
    """Every way our kernels can cut the work: for choosing the rule that `on` follows, and the order in which `auto` tries them."""
    example = row.inputs()
    size = moved_bytes(row, example)
    inputs = [example, *(row.inputs() for _ in range(sets_for(size) - 1))]
    call = Call(row.op, example, row.options, policy("on", row, isa))
    copy = copy_bandwidth(size)
    found = [
        (device_seconds(way.prepare(call), inputs), way.name)
        for candidate in OPS[row.op].candidates
        if candidate.ours and candidate.refuse(call) is None
        for way in candidate.tactics(call)
    ]
    print(f"{row.op} {row.label}")
    for seconds, name in sorted(found):
        print(f"    {seconds * 1e6:8.1f} us {size / seconds / copy:6.1%} of copy  {name}", flush=True)


def host_cost() -> dict[str, float]:
    """Host microseconds of one launch of the smallest real work: public op, and bound."""
    x, *row = (torch.randn(1, n, 64, device="cuda").half() for n in (8, 1, 1))
    tensors, options, policy = (x, *row, None, None), (1e-6, "layer", None), KernelPolicy.of("on")
    from ..kernels_cuda import norm_modulate  # noqa: PLC0415

    bound = OPS["norm_modulate"].bind(tensors, options, policy)
    return {
        "public op us": host_seconds(lambda: norm_modulate(x, *row, eps=1e-6, policy=policy)) * 1e6,
        "bound us": host_seconds(lambda: bound(*tensors)) * 1e6,
        "torch add us": host_seconds(lambda: x + x) * 1e6,
        "torch empty us": host_seconds(lambda: torch.empty_like(x)) * 1e6,
    }


def environment() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "driver": ask_card("driver_version"),
        "python": sys.version.split()[0],
        "kernels": source_hash(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def save(
    path: Path, section: str, results: list[dict[str, Any]], host: dict[str, float], left: int | None = None
) -> None:
    """Merge by op and label into the card's file; other sections stay. left: rows that were asked for and not reached; None: others
    were asked for than all."""
    data = read(path)
    before = data.get(section, {})
    old = {(r["op"], r["label"]): r for r in before.get("rows", [])}
    here = {**environment(), "sources": sources.of_folders(sources.KERNELS)}
    merged = {**old, **{(r["op"], r["label"]): {**r, "environment": here} for r in results}}
    left = before.get("left", 0) if left is None else left
    data[section] = {"host": host, **({"left": left} if left else {}), "rows": [rounded(r) for r in merged.values()]}
    write(path, data)


def compiles(row: Row, which: str) -> bool:
    """Whether torch.compile is timed too."""
    return which == "all" or (which == "pages" and any(f"{row.op}|{row.label}".startswith(one) for one in CHOSEN))


def line(result: dict[str, Any]) -> str:
    head = f"{result['op'][:28]:28} {result['label'][:46]:46}"
    if "refused" in result:
        return f"{head} {result['refused']}"
    if "TFLOP/s" in result:
        ratios = {
            k.removesuffix(" / ours").removeprefix("torch "): v for k, v in result.items() if k.endswith(" / ours")
        }
        peers = " ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
        auto = f"auto {result['stock / auto']:.2f}x {result['auto']}"
        return f"{head} {result['ours us']:8.1f} {result['TFLOP/s']:6.1f} TFLOP/s: {peers} {auto}"
    compiled = f"{result['torch.compile / ours']:5.2f}x" if "torch.compile / ours" in result else "     -"
    return (
        f"{head} {result['ours us']:8.1f} {result['GB/s']:6.0f} {result['share of copy']:6.1%} "
        f"{result['stock / ours']:5.2f}x {compiled} {result['auto']}"
    )


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="dev.py bench rows"
    )
    cli.add_argument("--only", action="append", help="rows whose op or label contains this; may be repeated")
    cli.add_argument("--isa", choices=["sm_75", "sm_80"], help="force an instruction class")
    cli.add_argument("--sweep", action="store_true", help="time every tactic of our kernels; nothing is written")
    cli.add_argument(
        "--compile", choices=["all", "pages", "none"], default="all", help="rows torch.compile is timed at"
    )
    cli.add_argument("--results", type=Path, help="the file to merge into; bench/results/<gpu>.json by default")
    options = cli.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no NVIDIA GPU on this machine")
        return 1
    results = []
    if options.sweep:
        for row in (row for row in all_rows(options.only) if row.op in OPS):
            sweep_row(row, options.isa)
            torch.cuda.empty_cache()
        return 0
    path = options.results or card_file(torch.cuda.get_device_name())
    section = f"kernels {options.isa}" if options.isa else "kernels"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asked = all_rows(options.only)
    with torch.inference_mode():
        host = host_cost()
        try:
            for row in asked:
                torch.manual_seed(0)
                results.append(measure_row(row, options.isa, compiles(row, options.compile)))
                print(line(results[-1]), flush=True)
                torch.cuda.empty_cache()
        finally:
            save(path, section, results, host, None if options.only else len(asked) - len(results))
    print(f"\n{'op':28} {'row':46} {'us':>8} {'GB/s':>6} {'copy':>6} {'stock':>6} {'compil':>6} auto")
    for result in results:
        print(line(result))
    print("host: " + ", ".join(f"{name} {value:.2f}" for name, value in host.items()))
    print(f"written to {path}")
    return 0

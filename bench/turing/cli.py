"""Predict what a kernel's main loop reaches on a GeForce GTX 10 or RTX 20 to 50, from its machine code for sm_61 to sm_120.

    python bench report turing KERNEL.cubin                 every kernel of the file, a line each
    python bench report turing KERNEL.cubin NAME --shared-bytes N  one kernel: counts, bounds, both ways to accumulate
    python bench report turing --torch libtorch_cuda.so | X.whl    torch's attention on the cards that --card names
    python bench report turing --attention build/kernels    all of our attention, for the cards of 8 GB
    python bench report turing --pascal build/kernels       our products and attention in bytes, for GTX 10
    python bench report turing --kitchen comfy_kitchen-X.whl       comfy-kitchen's INT8 attention and products

--torch, --attention, --pascal and --kitchen keep what they predict in bench/results; README's tables are written from it.
--trips N: an inner loop with tensor work runs N times per iteration (ADDRESS=N for one of them). --skip OPCODE[:COUNT]:
a branch over code with that many of these is taken. README.md lists what the model assumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...kernels_cuda.binary import elf
from . import disassemble, kernels, machine, sass, tables
from .cards import CARDS, DEFAULTS, runs
from .flow import Rules
from .kernels import Kernel
from .model import Count, Launch, Prediction, as_json, count, predict, trace

_FOLDER = Path(__file__).resolve().parents[1] / "results"
RESULTS = _FOLDER / "turing-model.json"
NEWER_RESULTS = _FOLDER / "ampere-ada-model.json"
BLACKWELL_RESULTS = _FOLDER / "blackwell-model.json"
PASCAL_RESULTS = _FOLDER / "pascal-model.json"
MODES = ("f32", "f16")


def modes_of(counted: Count) -> list[str | None]:
    """The code as it is, then as if it summed in the other type, or in either if it sums in both. Bytes have one way."""
    if counted.opcodes.get(machine.IMMA) or counted.accumulate == "s32":
        return [None]
    return [None, *(mode for mode in MODES if counted.accumulate not in (None, mode))]


def predicted(
    steps: list[sass.Instruction],
    counted: Count,
    launch: Launch,
    cards: Sequence[machine.Card],
    from_dram: bool | None = None,
) -> list[Prediction]:
    """On each card, in each way to sum; Turing's cards also as if IMMA were half as fast as their sheets say, Pascal's also at
    best."""
    is_doubted = counted.opcodes.get(machine.IMMA)
    doubted = [machine.at_half_byte_rate(card) for card in cards if is_doubted and runs(card, 75)]
    doubted += [machine.at_best(card) for card in cards if runs(card, 61)]
    return [predict(steps, launch, card, mode, from_dram) for card in (*cards, *doubted) for mode in modes_of(counted)]


def read_rules(trips: list[str], skip: list[str]) -> Rules:
    default, single = 1, {}
    for item in trips:
        address, _, number = item.rpartition("=")
        if address:
            single[int(address, 16)] = int(number)
        else:
            default = int(number)
    return Rules(single, default, tuple(skip))


def describe(name: str, counted: Count, predictions: list[Prediction]) -> str:
    """The table of one kernel."""
    pipes = ", ".join(f"{pipe} {cycles:.0f}" for pipe, cycles in counted.pipes.items())
    opcodes = ", ".join(f"{opcode} {number}" for opcode, number in list(counted.opcodes.items())[:14])
    lines = [
        name,
        f"  a warp, one iteration: {counted.instructions} instructions: {opcodes}",
        f"  cycles of its pipes: {pipes}; {counted.shared_bytes} B shared, {counted.global_bytes} B global",
    ]
    for p in predictions:
        sums = f", {p.accumulate} sums{'' if p.as_compiled else ' instead'}" if p.accumulate else ""
        share = f", {p.share:.0%} of their peak" if p.accumulate else ""
        speed = speed_of(p).strip()
        lines.append(
            f"  {p.card}{sums}: {speed}{share}; {p.blocks} x {p.warps} warps, {p.cycles:.0f} cycles; {p.verdict}"
        )
    return "\n".join(lines)


def speed_of(p: Prediction) -> str:
    return f"{p.tflops:6.1f} TFLOP/s" if p.accumulate else f"{p.bytes_per_second / 1e9:6.0f} GB/s"


def sensitivity(path: list[sass.Instruction], launch: Launch, card: machine.Card) -> str:
    """The prediction with each guess halved and doubled."""
    lines = []
    default = card.architecture.guesses
    for field in dataclasses.fields(default):
        value = getattr(default, field.name)
        guesses = [dataclasses.replace(default, **{field.name: value * factor}) for factor in (0.5, 2)]
        low, high = (predict(path, launch, card, guesses=guess) for guess in guesses)
        told = [f"{p.share:.1%}" if p.accumulate else speed_of(p).strip() for p in (low, high)]
        lines.append(f"    {field.name:16} {value:4} halved {told[0]:>8}   doubled {told[1]:>8}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------- what is kept


def results_of(card: machine.Card) -> Path:
    """The file that predictions for this card are kept in."""
    if runs(card, 61):
        return PASCAL_RESULTS
    if runs(card, 120):
        return BLACKWELL_RESULTS
    return RESULTS if runs(card, 75) else NEWER_RESULTS


def stored(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def by_variant() -> dict[str, dict[str, Any]]:
    """The kept predictions, by the variant of the code."""
    newer = stored(NEWER_RESULTS)
    return {
        "sm_61": stored(PASCAL_RESULTS),
        "sm_75": stored(RESULTS),
        **dict.fromkeys(("sm_80", "sm_86", "sm_89"), newer),
        "sm_120": stored(BLACKWELL_RESULTS),
    }


def save(label: str, counted: Count, launch: Launch, predictions: list[Prediction], path: Path) -> None:
    data = stored(path)
    found = [as_json(prediction) for prediction in predictions]
    data[label] = {"launch": dataclasses.asdict(launch), "count": as_json(counted), "predictions": found}
    path.write_text(json.dumps(dict(sorted(data.items())), indent=1) + "\n", encoding="utf-8")


def keep(kernel: Kernel, label: str, cubins: Iterable[bytes], cards: Sequence[machine.Card]) -> None:
    """Find a known kernel among cubins, predict one tile of it on these cards, and keep that under this label."""
    found = ((data, name, own) for data in cubins for name, own in sorted(elf.read(data).kernels.items()))
    data, name, own = next(one for one in found if kernel.names(one[1]))
    steps = kernels.path_of(sass.parse(disassemble.disassemble(data, name))[name], kernel)
    counted = count(steps, cards[0])  # of tensor cores alone
    useful = None if counted.flops else kernel.flops
    launch = Launch(kernel.threads, own.registers, own.shared + kernel.shared, useful)
    predictions = predicted(steps, counted, launch, cards, from_dram=False)
    save(label, counted, launch, predictions, results_of(cards[0]))
    told = ", ".join(f"{p.card} {p.tflops:.1f}" for p in predictions if p.as_compiled)
    print(f"{label}: T/s on {told}", flush=True)


def run_torch(path: Path, cards: Sequence[machine.Card]) -> None:
    """torch's attention: the memory-efficient one on Turing, the flash one on what came after."""
    for kernel in kernels.TORCH:
        served = [card for card in cards if kernels.torch_serves(kernel, card)]
        if served:
            cubins = disassemble.cubins_with(path, kernel.pattern, kernel.variant)
            keep(kernel, f"torch {torch_version(path)} {kernel.label}", cubins, served)


def torch_version(path: Path) -> str:
    """From the wheel, or from the folder that the library lies in."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            text = wheel.read("torch/version.py").decode()
    else:
        text = (path.resolve().parents[1] / "version.py").read_text(encoding="utf-8")
    found = re.search(r"__version__ = '([^']+)'", text)
    return found[1] if found else "unknown"


def run_attention(folder: Path) -> None:
    """Every tier of our attention, as it was compiled into this folder."""
    for variant, names in kernels.VARIANTS.items():
        for one in kernels.OURS:
            data = (folder / variant / kernels.our_unit(one[1])).read_bytes()
            cut = elf.ints(data, f"{kernels.our_label(*one).replace(' ', '_')}_cut")
            kernel = kernels.our_attention(variant, *one, cut)
            keep(kernel, kernel.label, [data], [CARDS[name] for name in names])


def run_pascal(folder: Path) -> None:
    """Our products of bytes and attention in bytes on cards without tensor cores, as compiled into this folder."""
    cards = [CARDS[name] for name in kernels.PASCAL_CARDS]
    data = (folder / "sm_61" / "linear_int8.cubin").read_bytes()
    for rows, columns in kernels.PASCAL_PRODUCTS:
        product = kernels.pascal_product(rows, columns, elf.ints(data, f"linear_int8_{rows}x{columns}_cut"))
        keep(product, product.label, [data], cards)
    data = (folder / "sm_61" / kernels.our_unit("turbo_int8")).read_bytes()
    for head, listed in kernels.PASCAL_ATTENTION:
        label = kernels.our_label(head, "turbo_int8", listed).replace(" ", "_")
        attention = kernels.pascal_attention(head, listed, elf.ints(data, f"{label}_cut"))
        keep(attention, attention.label, [data], cards)


def run_kitchen(path: Path) -> None:
    """comfy-kitchen's attention and products, from its wheel."""
    for variant, known in kernels.KITCHEN.items():
        cubins = disassemble.cubins_with(path, "", variant)
        for kernel in known:
            label = kernels.stored_label(variant, kernel.label)
            keep(kernel, label, cubins, [CARDS[kernels.KITCHEN_CARDS[variant]]])


# ------------------------------------------------------------------------------------------------------ any other kernel


def cards_for(capability: int, names: list[str], what: str) -> list[machine.Card]:
    """The cards that were asked for, or the usual one for this machine code."""
    if capability not in DEFAULTS:
        known = ", ".join(f"sm_{number}" for number in DEFAULTS)
        raise SystemExit(f"{what} is for sm_{capability}; the model knows {known}")
    cards = [CARDS[name] for name in names or [DEFAULTS[capability]]]
    for card in cards:
        if not runs(card, capability):
            raise SystemExit(f"{what} is for sm_{capability}, which a {card.name} does not run")
    return cards


def run_cubin(options: argparse.Namespace) -> None:
    data = options.cubin.read_bytes()
    facts, codes = elf.read(data), sass.parse(disassemble.disassemble(data))
    cards = cards_for(facts.arch, options.card or [], str(options.cubin))
    names = [name for name in facts.kernels if options.kernel is None or options.kernel in name]
    if options.kernel in facts.kernels:
        names = [options.kernel]
    if not names:
        raise SystemExit(f"no kernel {options.kernel}; there are {', '.join(facts.kernels)}")
    rules = read_rules(options.trips, options.skip)
    for name in names:
        kernel = facts.kernels[name]
        shared = kernel.shared + options.shared_bytes
        registers = kernel.registers or options.registers
        if not registers:
            raise SystemExit(f"{name} was made by an older compiler, which notes registers elsewhere: --registers N")
        launch = Launch(options.threads or kernel.threads, registers, shared, options.useful_flops)
        try:
            steps = trace(codes[name], rules, options.loop)
        except ValueError as error:
            print(f"{name}\n  {error}")
            continue
        counted = count(steps, cards[0])
        predictions = predicted(steps, counted, launch, cards, options.dram)
        if options.kernel is None:
            best = predictions[0]
            print(f"{name:40} {registers:4} registers {best.blocks:2} blocks {speed_of(best)}  {best.verdict}")
            continue
        print(describe(name, counted, predictions))
        if options.sensitivity:
            print(sensitivity(steps, launch, cards[0]))
        if options.save:
            save(options.save, counted, launch, predictions, results_of(cards[0]))


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = cli.add_argument
    add("cubin", type=Path, nargs="?", help="a cubin for sm_61, sm_75, sm_80, sm_86, sm_89 or sm_120")
    add("kernel", nargs="?", help="the kernel, or a part of its name")
    add("--torch", type=Path, help="libtorch_cuda.so or a torch wheel, instead of a cubin")
    add("--attention", type=Path, metavar="DIR", help="what `python kernels_cuda/build` compiled")
    add("--pascal", type=Path, metavar="DIR", help="the same folder: products and attention in bytes, on GTX 10")
    add("--kitchen", type=Path, metavar="WHEEL", help="comfy-kitchen's wheel, or its extension module")
    add("--threads", type=int, help="of a block; default: the launch bound")
    add("--registers", type=int, default=0, help="of a thread, if the cubin does not say")
    add("--shared-bytes", type=int, default=0, help="dynamic shared memory of a block")
    add("--trips", action="append", default=[], metavar="N | ADDRESS=N")
    add("--skip", action="append", default=[], metavar="OPCODE[:COUNT]")
    add("--loop", type=lambda text: int(text, 16), metavar="ADDRESS", help="the main loop's first address")
    add("--useful-flops", type=float, help="of a block and iteration, if not all tensor work is of use")
    add("--dram", action=argparse.BooleanOptionalAction, help="global loads come from DRAM, not from L2")
    add("--card", action="append", choices=CARDS, help="default: an 8 GB card that runs the code; may be repeated")
    add("--sensitivity", action="store_true", help="halve and double every guess")
    add("--save", metavar="LABEL", help="keep it in bench/results, in the file of the card's generation")
    options = cli.parse_args(arguments)
    try:
        if options.torch:
            run_torch(options.torch, [CARDS[name] for name in options.card or ["2060s"]])
        elif options.attention:
            run_attention(options.attention)
        elif options.pascal:
            run_pascal(options.pascal)
        elif options.kitchen:
            run_kitchen(options.kitchen)
        elif options.cubin:
            run_cubin(options)
        else:
            cli.error("give a cubin, --torch, --attention, --pascal or --kitchen")
    except disassemble.ToolMissing as missing:
        sys.exit(str(missing))
    tables.PAGE.write_text(tables.rendered(tables.PAGE.read_text(encoding="utf-8"), by_variant()), encoding="utf-8")
    return 0

"""Predict what a kernel's main loop reaches on a GeForce RTX 20 to 50, from its machine code for sm_75 to sm_120.

    python bench turing KERNEL.cubin                        every kernel of the file, a line each
    python bench turing KERNEL.cubin NAME --shared-bytes N  one kernel: counts, bounds, both ways to accumulate
    python bench turing --torch libtorch_cuda.so | X.whl    torch's memory-efficient attention on Turing; with --card of
                                                            RTX 30 or 40 its flash attention there
    python bench turing --attention build/kernels           all of our attention, for the cards of 8 GB; kept in bench/results
    python bench turing --kitchen comfy_kitchen-X.whl       comfy-kitchen's INT8 attention and its INT8 and INT4 products, kept too

--trips N: an inner loop with tensor work runs N times per iteration (ADDRESS=N for one of them); --skip OPCODE[:COUNT]:
a branch over code with that many of these is taken. README.md lists what the model assumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from ...kernels_cuda.binary import elf
from . import (
    disassemble,
    kitchen_kernels,
    kitchen_table,
    machine,
    our_attention,
    sass,
    torch_flash,
    torch_kernels,
    validation,
)
from .cards import CARDS, DEFAULTS, runs
from .flow import Rules
from .model import Count, Launch, Prediction, as_json, count, predict, trace

_FOLDER = Path(__file__).resolve().parents[1] / "results"
RESULTS = _FOLDER / "turing-model.json"
NEWER_RESULTS = _FOLDER / "ampere-ada-model.json"
BLACKWELL_RESULTS = _FOLDER / "blackwell-model.json"
MODES = ("f32", "f16")


def modes_of(counted: Count) -> list[str | None]:
    """The code as it is, then as if it summed in the other type (or, if it sums in both, in either). Of code that multiplies
    bytes there is no other."""
    if counted.opcodes.get(machine.IMMA):
        return [None]
    return [None, *(mode for mode in MODES if counted.accumulate not in (None, mode))]


def predicted(
    steps: list[sass.Instruction],
    counted: Count,
    launch: Launch,
    cards: list[machine.Card],
    from_dram: bool | None = None,
) -> list[Prediction]:
    """On each card, in each way to sum; Turing's cards also as they would be if IMMA were half as fast as their sheets say."""
    doubted = [
        machine.at_half_byte_rate(card) for card in cards if counted.opcodes.get(machine.IMMA) and runs(card, 75)
    ]
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


def results_of(card: machine.Card) -> Path:
    """Where predictions for this card are kept."""
    if runs(card, 120):
        return BLACKWELL_RESULTS
    return RESULTS if runs(card, 75) else NEWER_RESULTS


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
        if p.accumulate:
            lines.append(
                f"  {p.card}, {p.accumulate} sums{'' if p.as_compiled else ' instead'}: {p.tflops:.1f} TFLOP/s, "
                f"{p.share:.0%} of their peak; {p.blocks} x {p.warps} warps, {p.cycles:.0f} cycles; {p.verdict}"
            )
        else:
            speed = p.bytes_per_second / 1e9
            lines.append(
                f"  {p.card}: {speed:.0f} GB/s; {p.blocks} x {p.warps} warps, {p.cycles:.0f} cycles; {p.verdict}"
            )
    return "\n".join(lines)


def sensitivity(path: list[sass.Instruction], launch: Launch, card: machine.Card) -> str:
    """What the prediction becomes when each guess is half or twice as large."""
    lines = []
    default = card.architecture.guesses
    for field in dataclasses.fields(default):
        value = getattr(default, field.name)
        found = []
        for factor in (0.5, 2):
            guesses = dataclasses.replace(default, **{field.name: value * factor})
            found.append(predict(path, launch, card, guesses=guesses))
        low, high = (f"{p.share:.1%}" if p.accumulate else f"{p.bytes_per_second / 1e9:.0f} GB/s" for p in found)
        lines.append(f"    {field.name:16} {value:4} halved {low:>8}   doubled {high:>8}")
    return "\n".join(lines)


def entry(counted: Count, launch: Launch, predictions: list[Prediction]) -> dict[str, Any]:
    return {
        "launch": dataclasses.asdict(launch),
        "count": as_json(counted),
        "predictions": [as_json(prediction) for prediction in predictions],
    }


def stored(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def save(label: str, found: dict[str, Any], path: Path) -> None:
    data = stored(path)
    data[label] = found
    path.write_text(json.dumps(dict(sorted(data.items())), indent=1) + "\n", encoding="utf-8")


def compare(prediction: Prediction, path: Path) -> str:
    """Against the stored prediction for torch's kernel of head size 128, on the same card."""
    for label, found in stored(path).items():
        if label.startswith("torch") and ("32x128" in label or "head 128" in label):
            for p in found["predictions"]:
                if p["card"] == prediction.card and p["as_compiled"]:
                    theirs = p["tflops"]
                    return f"  {prediction.tflops / theirs:.2f}x the {theirs:.1f} TFLOP/s of {label}, which sums in f32"
    return ""


def run_torch(path: Path, cards: list[machine.Card], vary: bool) -> None:
    """torch's attention: the memory-efficient one on Turing, the flash one on what came after."""
    label = torch_kernels.version(path)
    for memory in torch_kernels.KERNELS:
        served = [card for card in cards if runs(card, 75)]
        name = f"torch {label} {memory.symbol}"
        run_torch_kernel(path, name, memory.symbol, "sm_75", memory, memory.rules, served, vary)
    for flash in torch_flash.KERNELS:
        served = [card for card in cards if torch_flash.serves(flash, card)]
        variant = f"sm_{flash.capability}"
        run_torch_kernel(path, f"torch {label} {flash.label}", flash.symbol, variant, flash, Rules(), served, vary)


def run_torch_kernel(
    path: Path,
    label: str,
    symbol: str,
    variant: str,
    known: torch_kernels.TorchKernel | torch_flash.FlashKernel,
    rules: Rules,
    cards: list[machine.Card],
    vary: bool,
) -> None:
    if not cards:
        return
    code = disassemble.cubins_with(path, symbol, variant)[0]
    name = next(name for name in elf.read(code).kernels if symbol in name)
    facts = elf.read(code).kernels[name]
    steps = trace(sass.parse(disassemble.disassemble(code))[name], rules)
    launch = Launch(known.threads, facts.registers, known.shared, known.flops)
    counted = count(steps, cards[0])
    if counted.flops * known.threads // machine.LANES != known.flops:
        raise SystemExit(f"{symbol}: {counted.flops} FLOP per warp; the walk missed part of the tile")
    predictions = predicted(steps, counted, launch, cards)
    print(describe(label, counted, predictions))
    if vary:
        print(sensitivity(steps, launch, cards[0]))
    save(label, entry(counted, launch, predictions), results_of(cards[0]))


def run_attention(folder: Path) -> None:
    """Every tier of our attention, as it was compiled into this folder."""
    for variant, (names, _) in our_attention.VARIANTS.items():
        data = (folder / variant / our_attention.UNIT).read_bytes()
        facts, codes = elf.read(data), sass.parse(disassemble.disassemble(data))
        cards = [CARDS[name] for name in names]
        for kernel in our_attention.KERNELS:
            own = facts.kernels[kernel.symbol]
            rows, threads, shared = elf.ints(data, f"{kernel.symbol}_cut")
            steps = trace(codes[kernel.symbol], our_attention.rules(variant))
            launch = Launch(threads, own.registers, own.shared + shared)
            counted = count(steps, cards[0])
            if counted.flops * threads // machine.LANES != kernel.flops(rows):
                raise SystemExit(
                    f"{variant} {kernel.symbol}: {counted.flops} FLOP per warp; the walk is not that of one tile"
                )
            predictions = predicted(steps, counted, launch, cards)
            save(kernel.label, entry(counted, launch, predictions), results_of(cards[0]))
            told = ", ".join(f"{p.card} {p.tflops:.1f}" for p in predictions if p.as_compiled)
            print(f"{variant} {kernel.label}: TFLOP/s on {told}", flush=True)
    write_page()


def write_page() -> None:
    """README's tables, from what is kept."""
    page = our_attention.PAGE.read_text(encoding="utf-8")
    our_attention.PAGE.write_text(rendered(page), encoding="utf-8")


def rendered(page: str) -> str:
    return kitchen_table.rendered(our_attention.rendered(page, by_variant()), by_code())


def by_code() -> dict[str, dict[str, Any]]:
    """What is kept, by which of comfy-kitchen's code a card runs."""
    return {code: stored(results_of(CARDS[card])) for code, card in kitchen_kernels.CARDS.items()}


def run_kitchen(path: Path) -> None:
    """comfy-kitchen's attention and products, from its wheel."""
    for variant, kernels in kitchen_kernels.KERNELS.items():
        card = CARDS[kitchen_kernels.CARDS[variant]]
        cubins = [(data, elf.read(data).kernels) for data in disassemble.cubins_with(path, "", variant)]
        for kernel in kernels:
            data, name, own = next(
                (data, name, facts)
                for data, found in cubins
                for name, facts in sorted(found.items())
                if kernel.names(name)
            )
            steps = kitchen_kernels.path_of(sass.parse(disassemble.disassemble(data, name))[name], kernel)
            launch = Launch(kernel.threads, own.registers, own.shared + kernel.shared)
            counted = count(steps, card)
            predictions = predicted(steps, counted, launch, [card])
            label = kitchen_kernels.stored_label(variant, kernel.label)
            save(label, entry(counted, launch, predictions), results_of(card))
            print(f"{label}: T/s on {', '.join(f'{p.card} {p.tflops:.1f}' for p in predictions)}", flush=True)
    write_page()


def by_variant() -> dict[str, dict[str, Any]]:
    """What is kept, by what was compiled for."""
    return {"sm_75": stored(RESULTS), "sm_86": stored(NEWER_RESULTS), "sm_120": stored(BLACKWELL_RESULTS)}


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
            speed = f"{best.tflops:6.1f} TFLOP/s" if best.accumulate else f"{best.bytes_per_second / 1e9:6.0f} GB/s"
            print(f"{name:40} {registers:4} registers {best.blocks:2} blocks {speed}  {best.verdict}")
            continue
        print(describe(name, counted, predictions))
        if counted.accumulate:
            print(compare(predictions[0], results_of(cards[0])))
        if options.sensitivity:
            print(sensitivity(steps, launch, cards[0]))
        if options.save:
            save(options.save, entry(counted, launch, predictions), results_of(cards[0]))


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("cubin", type=Path, nargs="?", help="a cubin for sm_75, sm_80, sm_86, sm_89 or sm_120")
    cli.add_argument("kernel", nargs="?", help="the kernel, or a part of its name")
    cli.add_argument("--torch", type=Path, help="libtorch_cuda.so or a torch wheel, instead of a cubin")
    cli.add_argument(
        "--validate", action="store_true", help="what was published for RTX 30 and 40, and what is predicted"
    )
    cli.add_argument("--attention", type=Path, metavar="DIR", help="what `python kernels_cuda/build` compiled")
    cli.add_argument("--kitchen", type=Path, metavar="WHEEL", help="comfy-kitchen's wheel, or its extension module")
    cli.add_argument("--threads", type=int, help="of a block; default: the launch bound")
    cli.add_argument("--registers", type=int, default=0, help="of a thread, if the cubin does not say")
    cli.add_argument("--shared-bytes", type=int, default=0, help="dynamic shared memory of a block")
    cli.add_argument("--trips", action="append", default=[], metavar="N | ADDRESS=N")
    cli.add_argument("--skip", action="append", default=[], metavar="OPCODE[:COUNT]")
    cli.add_argument("--loop", type=lambda text: int(text, 16), metavar="ADDRESS", help="the main loop's first address")
    cli.add_argument("--useful-flops", type=float, help="of a block and iteration, if not all tensor work is of use")
    cli.add_argument("--dram", action=argparse.BooleanOptionalAction, help="global loads come from DRAM, not from L2")
    cli.add_argument(
        "--card", action="append", choices=CARDS, help="default: an 8 GB card that runs the code; may be repeated"
    )
    cli.add_argument("--sensitivity", action="store_true", help="halve and double every guess")
    cli.add_argument(
        "--save", metavar="LABEL", help=f"keep it in bench/results, in {RESULTS.name} or that of the card's generation"
    )
    options = cli.parse_args(arguments)
    if options.validate:
        print(validation.table(stored(NEWER_RESULTS)))
    elif options.torch:
        run_torch(options.torch, [CARDS[name] for name in options.card or ["2060s"]], options.sensitivity)
    elif options.attention:
        run_attention(options.attention)
    elif options.kitchen:
        run_kitchen(options.kitchen)
    elif options.cubin:
        run_cubin(options)
    else:
        cli.error("give a cubin, --torch, --attention, --kitchen or --validate")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except disassemble.ToolMissing as missing:
        sys.exit(str(missing))

"""Predict what a kernel's main loop reaches on an RTX 2060 Super, from its sm_75 machine code.

    python bench turing KERNEL.cubin                        every kernel of the file, a line each
    python bench turing KERNEL.cubin NAME --shared-bytes N  one kernel: counts, bounds, both ways to accumulate
    python bench turing --torch libtorch_cuda.so | X.whl    torch's memory-efficient attention

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

from ...kernels_cuda import elf
from . import disassemble, machine, sass, torch_kernels
from .flow import Rules
from .model import Count, Launch, Prediction, as_json, count, predict, trace

RESULTS = Path(__file__).resolve().parents[1] / "results" / "turing-model.json"
MODES = ("f32", "f16")


def modes_of(counted: Count) -> list[str | None]:
    """The code as it is, then as if it summed in the other type (or, if it sums in both, in either)."""
    return [None, *(mode for mode in MODES if counted.accumulate not in (None, mode))]


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
    for field in dataclasses.fields(machine.Guesses):
        value = getattr(machine.DEFAULT, field.name)
        found = []
        for factor in (0.5, 2):
            guesses = dataclasses.replace(machine.DEFAULT, **{field.name: value * factor})
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


def save(label: str, found: dict[str, Any]) -> None:
    data = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    data[label] = found
    RESULTS.write_text(json.dumps(dict(sorted(data.items())), indent=1) + "\n", encoding="utf-8")


def compare(prediction: Prediction) -> str:
    """Against the stored prediction for torch's kernel of head size 128, on the same card."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for label, found in stored.items():
        if label.startswith("torch") and "32x128" in label:
            theirs = next(p for p in found["predictions"] if p["card"] == prediction.card and p["as_compiled"])[
                "tflops"
            ]
            return f"  {prediction.tflops / theirs:.2f}x the {theirs:.1f} TFLOP/s of {label}, which sums in f32"
    return ""


def run_torch(path: Path, cards: list[machine.Card], vary: bool) -> None:
    label = torch_kernels.version(path)
    for known in torch_kernels.KERNELS:
        code = disassemble.cubins_with(path, known.symbol)[0]
        name = next(name for name in elf.read(code).kernels if known.symbol in name)
        facts = elf.read(code).kernels[name]
        steps = trace(sass.parse(disassemble.disassemble(code))[name], known.rules)
        launch = Launch(known.threads, facts.registers, known.shared, known.flops)
        counted = count(steps, cards[0])
        if counted.flops * known.threads // machine.LANES != known.flops:
            raise SystemExit(f"{known.symbol}: {counted.flops} FLOP per warp; the walk missed part of the tile")
        predictions = [predict(steps, launch, card, mode) for card in cards for mode in modes_of(counted)]
        print(describe(f"torch {label} {known.symbol}", counted, predictions))
        if vary:
            print(sensitivity(steps, launch, cards[0]))
        save(f"torch {label} {known.symbol}", entry(counted, launch, predictions))


def run_cubin(options: argparse.Namespace, cards: list[machine.Card]) -> None:
    data = options.cubin.read_bytes()
    facts, codes = elf.read(data), sass.parse(disassemble.disassemble(data))
    if facts.arch != 75:
        raise SystemExit(f"{options.cubin} is for sm_{facts.arch}; the model knows sm_75")
    names = [name for name in facts.kernels if options.kernel is None or options.kernel in name]
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
        modes = modes_of(counted)
        predictions = [predict(steps, launch, card, mode, options.dram) for card in cards for mode in modes]
        if options.kernel is None:
            best = predictions[0]
            speed = f"{best.tflops:6.1f} TFLOP/s" if best.accumulate else f"{best.bytes_per_second / 1e9:6.0f} GB/s"
            print(f"{name:40} {registers:4} registers {best.blocks:2} blocks {speed}  {best.verdict}")
            continue
        print(describe(name, counted, predictions))
        if counted.accumulate:
            print(compare(predictions[0]))
        if options.sensitivity:
            print(sensitivity(steps, launch, cards[0]))
        if options.save:
            save(options.save, entry(counted, launch, predictions))


def main(arguments: list[str] | None = None) -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("cubin", type=Path, nargs="?", help="an sm_75 cubin")
    cli.add_argument("kernel", nargs="?", help="the kernel, or a part of its name")
    cli.add_argument("--torch", type=Path, help="libtorch_cuda.so or a torch wheel, instead of a cubin")
    cli.add_argument("--threads", type=int, help="of a block; default: the launch bound")
    cli.add_argument("--registers", type=int, default=0, help="of a thread, if the cubin does not say")
    cli.add_argument("--shared-bytes", type=int, default=0, help="dynamic shared memory of a block")
    cli.add_argument("--trips", action="append", default=[], metavar="N | ADDRESS=N")
    cli.add_argument("--skip", action="append", default=[], metavar="OPCODE[:COUNT]")
    cli.add_argument("--loop", type=lambda text: int(text, 16), metavar="ADDRESS", help="the main loop's first address")
    cli.add_argument("--useful-flops", type=float, help="of a block and iteration, if not all tensor work is of use")
    cli.add_argument("--dram", action=argparse.BooleanOptionalAction, help="global loads come from DRAM, not from L2")
    cli.add_argument("--card", action="append", choices=machine.CARDS, help="default: 2060s; may be repeated")
    cli.add_argument("--sensitivity", action="store_true", help="halve and double every guess")
    cli.add_argument("--save", metavar="LABEL", help=f"keep the result in bench/results/{RESULTS.name}")
    options = cli.parse_args(arguments)
    cards = [machine.CARDS[name] for name in options.card or ["2060s"]]
    if options.torch:
        run_torch(options.torch, cards, options.sensitivity)
    elif options.cubin:
        run_cubin(options, cards)
    else:
        cli.error("give a cubin or --torch")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except disassemble.ToolMissing as missing:
        sys.exit(str(missing))

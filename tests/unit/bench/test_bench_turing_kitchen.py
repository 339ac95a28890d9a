"""comfy-kitchen's kernels: what INT4 costs, which kernels are read and how, which of them a shape gets, and what a step takes with
them. No wheel is needed: counts and predictions are kept."""

from __future__ import annotations

import pytest
from listings import listing, loop_of

from fusestream.bench.card_rates import CARDS, Card
from fusestream.bench.predicted import kitchen, works
from fusestream.bench.predicted.load import Linear
from fusestream.bench.turing import cli, machine
from fusestream.bench.turing.cards import CARDS as READ
from fusestream.bench.turing.dependence import tensor_results_read
from fusestream.bench.turing.flow import loop_around, split
from fusestream.bench.turing.kernels import stored_label
from fusestream.bench.turing.model import Launch, predict

SUPER, TI = READ["2060s"], READ["3060ti"]
EIGHT, FOUR = "IMMA.8816.S8.S8 R0, R2.ROW, R4.COL, R0", "IMMA.8832.S4.S4 R0, R2.ROW, R4.COL, R0"


def card(name: str) -> Card:
    return next(one for one in CARDS if one.name == name)


# -------------------------------------------------------------------------------------------------------------------- INT4


@pytest.mark.parametrize(
    ("text", "where", "multiply_adds", "cycles"),
    [
        (FOUR, SUPER, 8 * 8 * 32, 4),
        ("IMMA.16864.S4.S4 R0, R4.ROW, R8.COL, R0", TI, 16 * 8 * 64, 16),
        ("IMMA.16832.S8.S8 R0, R4.ROW, R8.COL, R0", TI, 16 * 8 * 32, 16),
    ],
)
def test_four_bits_take_as_long_as_eight_and_do_twice_as_much(
    text: str, where: machine.Card, multiply_adds: int, cycles: float
) -> None:
    instruction = listing(text)[0]
    assert machine.multiply_adds(instruction) == multiply_adds
    assert machine.cost(instruction, where) == cycles


def test_a_loop_of_four_bits_reaches_twice_the_peak_of_eight() -> None:
    launch = Launch(256, 255, 0)
    found = {
        text: predict(loop_of(*[text.replace("R0", f"R{8 + 2 * n}") for n in range(8)]), launch, SUPER)
        for text in (EIGHT, FOUR)
    }
    assert found[FOUR].tflops == pytest.approx(2 * found[EIGHT].tflops)
    assert SUPER.peak("s4") == 2 * SUPER.peak("s32") == 4 * SUPER.peak("f16")
    slow = machine.at_half_byte_rate(SUPER)
    assert machine.cost(listing(FOUR)[0], slow) == 8 and slow.peak("s4") == SUPER.peak("s32")


def test_shapes_that_no_card_has_are_refused() -> None:
    with pytest.raises(ValueError, match="8832"):
        machine.multiply_adds(listing("IMMA.8816.S4.S4 R0, R2.ROW, R4.COL, R0")[0])


def test_the_result_of_four_bits_is_waited_for_where_the_hardware_watches() -> None:
    path = listing("IMMA.16864.S4.S4 R8, R0.ROW, R4.COL, R8", "IADD3 R20, R11, R1, RZ")
    assert tensor_results_read(path)[1] == (0,)


# ---------------------------------------------------------------------------------------------------------- which are read

TWO_HEADS = ("@P0 BRA `(.second)", "first:", EIGHT, "@P1 BRA `(.out)", "second:", FOUR, "BRA `(.first)", "out:", "EXIT")


def test_a_loop_that_is_entered_at_two_places_is_found_from_either() -> None:
    code = listing(*TWO_HEADS)
    blocks = split(code)
    around = [loop_around(blocks, at) for at in range(len(blocks))]
    assert [sorted(loop.blocks) if loop else None for loop in around] == [None, [1, 2], [1, 2], None]


def test_what_was_read_reaches_what_it_did() -> None:
    kept = cli.by_variant()

    def reached(code: str, label: str) -> float:
        return float(kept[code][stored_label(code, label)]["predictions"][0]["tflops"])

    attention = [reached(code, "attention 128 128x128") for code in ("sm_75", "sm_80", "sm_89")]
    assert attention == pytest.approx([61.9, 92.1, 89.0], abs=0.05)
    assert reached("sm_75", "product INT8 128x256x64") == pytest.approx(96.4, abs=0.05)


# ----------------------------------------------------------------------------------------------------- which a shape gets


@pytest.mark.parametrize(
    ("code", "bits", "shape", "label"),
    [
        ("sm_75", 8, (32760, 5120, 13824), "product INT8 128x256x64"),
        ("sm_75", 8, (32760, 5120, 5120), None),
        ("sm_75", 8, (32760, 13824, 5120), None),
        ("sm_75", 8, (100, 5120, 5120), "product INT8 64x128x64"),
        ("sm_75", 4, (32760, 5120, 5120), "product INT4 128x256x128"),
        ("sm_75", 4, (256, 5120, 5120), "product INT4 64x64x128"),
        ("sm_80", 8, (4096, 3072, 9216), "product INT8 128x256x64"),
        ("sm_89", 8, (32760, 5120, 5120), "product INT8 128x256x64, stream K"),
        ("sm_120", 8, (512, 5120, 5120), "product INT8 128x128x64, stream K"),
        ("sm_120", 8, (512, 1536, 1536), "product INT8 64x128x64"),
        ("sm_80", 4, (32760, 5120, 5120), "product INT4 128x256x128"),
    ],
)
def test_a_shape_gets_the_product_that_its_launcher_takes(
    code: str, bits: int, shape: tuple[int, int, int], label: str | None
) -> None:
    rows, into, out = shape
    assert kitchen.way(code, bits, Linear(rows, into, out)) == label  # type: ignore[arg-type]


def test_every_shape_of_every_work_has_a_prediction() -> None:
    for one in CARDS:
        for work in works.works():
            for linear in work.load.linears:
                for bits in (8, 4) if one.code != "sm_120" else (8,):
                    assert kitchen.speed(one, kitchen.way(one.code, bits, linear)) > one.half


def test_shapes_are_nearly_all_of_what_is_multiplied() -> None:
    for work in works.works():
        if work.kind in ("video", "picture"):
            by_shape = sum(linear.operations for linear in work.load.linears)
            assert 0.998 < by_shape / work.load.products <= 1, work.name


def test_speeds_go_with_the_peak_and_are_slower_in_doubt() -> None:
    label = "product INT8 128x256x64"
    small, large = card("RTX 2060"), card("RTX 2080")
    assert kitchen.speed(large, label) / kitchen.speed(small, label) == pytest.approx(large.half / small.half)
    assert kitchen.speed(card("RTX 2060 Super"), label) == pytest.approx(96.4e12, rel=0.005)
    assert kitchen.speed(card("RTX 2060 Super"), label, slow=True) == pytest.approx(55.5e12, rel=0.005)
    assert kitchen.speed(card("RTX 2060 Super"), None) == pytest.approx(104.2e12, rel=0.005), "cuBLAS'"

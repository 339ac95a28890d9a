"""In which order blocks are paged: as they really run, and of those that do not run none."""

from __future__ import annotations

from fusestream.fusion.stream.block_order import MOST_CORRECTIONS, Order


def ran(order: Order, *blocks: int) -> tuple[int, ...] | None:
    """A pass in which these ran; what it asks for is taken over."""
    order.begin()
    assert order.is_running
    for block in blocks:
        order.runs(block)
    wanted = order.end()
    assert not order.is_running
    if wanted is not None:
        order.become(wanted)
    return wanted


def test_at_first_it_is_the_order_of_building_without_the_spare_ones() -> None:
    order = Order(5, spare=2)
    assert order.paged == (0, 1, 2) and order.place == {0: 0, 1: 1, 2: 2}
    assert Order(3).paged == (0, 1, 2) and not Order(3).is_running


def test_the_first_pass_corrects_it_and_drops_what_did_not_run() -> None:
    order = Order(4)
    assert ran(order, 2, 0, 3) == (2, 0, 3)
    assert order.place == {2: 0, 0: 1, 3: 2}
    assert ran(order, 2, 0, 3) is None


def test_a_first_pass_as_expected_asks_for_nothing() -> None:
    order = Order(3)
    assert ran(order, 0, 1, 2) is None
    assert ran(order, 0, 2) is None, "who skips a block now and then runs in order all the same"
    assert order.paged == (0, 1, 2), "and keeps it, as it has run before"


def test_a_later_pass_puts_those_that_did_not_run_behind() -> None:
    order = Order(4)
    ran(order, 0, 1, 2, 3)
    assert ran(order, 3, 1) == (3, 1, 0, 2)


def test_a_model_whose_passes_differ_is_corrected_a_few_times_only() -> None:
    order = Order(3)
    ran(order, 0, 1, 2)
    passes = [(2, 1, 0), (0, 1, 2)] * 4
    asked = [ran(order, *blocks) is not None for blocks in passes]
    assert asked == [True] * MOST_CORRECTIONS + [False] * (len(passes) - MOST_CORRECTIONS)


def test_passes_in_order_cost_no_correction() -> None:
    order = Order(3)
    ran(order, 0, 1, 2)
    for _ in range(10):
        assert ran(order, 0, 1, 2) is None
    assert ran(order, 2, 1, 0) == (2, 1, 0)


def test_a_pass_without_blocks_says_nothing() -> None:
    """As one that was interrupted at once: the next one is the first that shows what runs."""
    order = Order(3)
    assert ran(order) is None and order.end() is None
    order.runs(2)  # outside of any pass
    assert ran(order, 0, 2) == (0, 2), "the first that ran: 1 is not paged"


def test_idle_blocks_come_together_when_one_of_them_is_called() -> None:
    order = Order(8, spare=1, idle=range(4, 7))
    assert order.paged == (0, 1, 2, 3)
    assert ran(order, 0, 1, 2, 3) is None, "it ran as expected"
    order.begin()
    for block in range(4):
        order.runs(block)
    assert order.with_block(4) == tuple(range(7)), "without the spare one"
    assert order.with_block(5) == (0, 1, 2, 3, 5, 6), "those before it may have been passed over"
    order.become(order.with_block(4))
    assert order.with_block(7) == (0, 1, 2, 3, 7, 4, 5, 6)


def test_a_block_that_comes_unexpected_is_paged_behind_the_one_before_it() -> None:
    order = Order(5, spare=2)
    assert order.with_block(3) == (3, 0, 1, 2), "before all, where none has run"
    order.begin()
    assert order.with_block(4) == (4, 0, 1, 2)
    order.runs(0)
    order.runs(1)
    assert order.with_block(4) == (0, 1, 4, 2)
    order.become(order.with_block(4))
    order.runs(4)
    assert order.with_block(3) == (0, 1, 4, 3, 2)
    order.runs(2)
    assert order.end() is None, "the pass ran as it is paged now"


def test_blocks_are_new_until_a_pass_has_shown_what_runs() -> None:
    order = Order(4)
    assert order.are_new((2, 3)) and order.are_new(())
    order.begin()
    order.runs(0)
    order.runs(2)
    assert order.are_new((1, 3)) and not order.are_new((2, 3))
    order.end()
    assert not order.are_new((1, 3))

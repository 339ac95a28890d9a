"""The plan: never over budget, never without the next layer's slot, as good as a search over all plans can find."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bed.depth import examples
from fusestream.memory import OverBudget, Plan, Rates, least_budget, make_plan, most_budget, simulate
from fusestream.memory.plan import LEAST_SLOTS, MOST_SLOTS, aligned, spread

MIB = 2**20
BLOCK = 700 * MIB

layers = st.lists(st.integers(0, 40).map(lambda n: n * 300), min_size=1, max_size=24)
seconds = st.floats(0, 0.1, allow_nan=False)


def replay(plan: Plan, passes: int) -> int:
    """Walk the ring as a pager would; the most bytes ever held. Fails if a layer is used that is not there."""
    held: dict[int, int] = {i: aligned(plan.sizes[i]) for i in plan.resident}
    ring: list[int | None] = [None] * plan.slots
    order = [(number, i) for number in range(passes) for i in plan.streamed]
    most = plan.resident_bytes
    for turn, (_, i) in enumerate(order):
        slot = turn % plan.slots
        before = ring[slot]
        if before is not None:
            del held[before]
        assert i not in held, "a streamed layer comes once"
        assert aligned(plan.sizes[i]) <= plan.slot_bytes, "a layer must fit its slot"
        ring[slot] = i
        held[i] = plan.slot_bytes
        most = max(most, sum(held.values()))
    return most


@given(layers, st.integers(0, 500_000), st.booleans(), st.data())
@settings(max_examples=examples(400), deadline=None)
def test_the_budget_holds_at_every_instant(sizes, budget, known, data):
    rates = Rates(1e6, tuple(data.draw(seconds) for _ in sizes)) if known else None
    try:
        plan = make_plan(sizes, budget, rates)
    except OverBudget:
        rooms = [aligned(size) for size in sizes]
        needs = [LEAST_SLOTS * slot + sum(room for room in rooms if room > slot) for slot in rooms if slot]
        assert sum(rooms) > budget and all(need > budget for need in needs)
        return
    assert plan.footprint <= budget
    assert plan.slots >= LEAST_SLOTS or not plan.streamed
    assert replay(plan, 3) <= budget
    assert set(plan.streamed) | plan.resident == set(range(len(sizes)))


@given(layers, st.integers(0, 500_000), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_the_prediction_stays_within_what_is_possible(sizes, budget, data):
    rates = Rates(data.draw(st.sampled_from([1e4, 1e6, 1e8])), tuple(data.draw(seconds) for _ in sizes))
    try:
        plan = make_plan(sizes, budget, rates)
    except OverBudget:
        return
    found = simulate(plan, rates)
    compute, copy = sum(rates.compute), plan.bytes_per_pass / rates.bus
    assert max(compute, copy) * (1 - 1e-9) <= found.steady + 1e-12
    assert found.steady <= (compute + copy) * (1 + 1e-9) + 1e-12
    assert found.first <= compute + sum(sizes) / rates.bus + 1e-9
    assert found.steady == pytest.approx(compute + sum(found.stalls), rel=1e-6, abs=1e-9)
    assert 0 <= found.bus_share <= 1


@given(st.lists(st.integers(1, 6).map(lambda n: n * 512), min_size=2, max_size=9), st.integers(0, 20_000))
@settings(max_examples=examples(200), deadline=None)
def test_no_plan_copies_much_less(sizes, budget):
    """Against every subset: the bytes copied are within one layer of the least possible."""
    try:
        plan = make_plan(sizes, budget)
    except OverBudget:
        return
    best = sum(sizes)
    for count in range(len(sizes) + 1):
        for kept in itertools.combinations(range(len(sizes)), count):
            streamed = [sizes[i] for i in range(len(sizes)) if i not in kept]
            window = LEAST_SLOTS * max(streamed, default=0)
            if sum(sizes[i] for i in kept) + window <= budget:
                best = min(best, sum(streamed))
    assert plan.bytes_per_pass <= best + max(sizes)


def test_equal_layers_are_kept_as_many_as_fit_and_evenly():
    """Forty blocks of 14B in 7 GiB: two slots and eight residents, five blocks apart."""
    plan = make_plan([BLOCK] * 40, 7 * 1024 * MIB)
    assert (plan.slots, len(plan.resident)) == (2, 8)
    assert plan.footprint == 10 * BLOCK and plan.bytes_per_pass == 32 * BLOCK
    places = sorted(plan.resident)
    gaps = [(b - a) % 40 for a, b in zip(places, [*places[1:], places[0]], strict=True)]
    assert gaps == [5] * 8


def test_what_fits_stays():
    plan = make_plan([10, 20, 30], 3 * 512)
    assert plan.resident == {0, 1, 2} and not plan.streamed and plan.window_bytes == 0
    assert simulate(plan, Rates(100, (0.1, 0.1, 0.1))).steady == pytest.approx(0.3)
    assert make_plan([], 0).footprint == 0


def test_with_compute_to_hide_behind_nothing_stalls():
    rates = Rates(50e9, (0.02,) * 40)  # a block arrives in 15 ms
    plan = make_plan([BLOCK] * 40, 3 * 1024 * MIB, rates)
    found = simulate(plan, rates)
    assert found.steady == pytest.approx(0.8) and not any(found.stalls[1:])


def test_with_too_little_compute_the_bus_is_always_busy():
    rates = Rates(50e9, (0.001,) * 40)
    plan = make_plan([BLOCK] * 40, 3 * 1024 * MIB, rates)
    found = simulate(plan, rates)
    assert found.bus_share > 0.99
    assert found.steady == pytest.approx(plan.bytes_per_pass / rates.bus, rel=0.01)


def test_one_odd_layer_does_not_set_the_size_of_every_slot():
    """A large embedding among small blocks: it stays, and the slots are small."""
    plan = make_plan([3000 * MIB, *[BLOCK] * 20], 6 * 1024 * MIB)
    assert 0 in plan.resident and plan.slot_bytes == BLOCK


def test_uneven_compute_is_worth_a_deeper_ring():
    """Every fourth layer computes long: a third slot lets the bus work ahead meanwhile."""
    sizes, compute = [100 * MIB] * 24, tuple(0.012 if i % 4 == 0 else 0.0001 for i in range(24))
    rates = Rates(50e9, compute)
    plan = make_plan(sizes, 700 * MIB, rates)
    shallow = min(
        (simulate(p, rates).steady for p in [make_plan(sizes, 700 * MIB)] if p.slots == LEAST_SLOTS), default=None
    )
    assert plan.slots > LEAST_SLOTS
    assert shallow is None or simulate(plan, rates).steady < shallow


def test_too_little_says_what_to_do():
    with pytest.raises(
        OverBudget, match=r"at least 1\.37 GiB of VRAM .* the budget is 1\.00 GiB\. Raise the VRAM budget"
    ):
        make_plan([BLOCK] * 40, 1024 * MIB)


@given(st.lists(st.integers(0, 5000), max_size=8))
def test_the_least_budget_is_just_enough(sizes):
    least = least_budget(sizes)
    assert make_plan(sizes, least).footprint <= least
    if least:
        with pytest.raises(OverBudget):
            make_plan(sizes, least - 1)


def test_rates_belong_to_the_layers():
    with pytest.raises(ValueError, match="2 compute times for 3 layers"):
        simulate(make_plan([1, 2, 3], 4096), Rates(1.0, (0.0, 0.0)))


def test_what_fits_needs_no_window():
    plan = make_plan([1000] * 5, 5 * 1024)
    assert (plan.slots, plan.slot_bytes, plan.footprint) == (0, 0, 5 * 1024)
    assert make_plan([1000] * 5, 5 * 1024 - 1).slots == LEAST_SLOTS


@pytest.mark.parametrize(
    ("resident", "compute", "first", "steady", "stalls", "bus_share"),
    [
        # A copy takes a second. The third waits for the slot of the first, which is done after 3.
        (set(), (2.0, 2.0, 2.0), 7.0, 6.0, (0.0, 0.0, 0.0), 0.5),
        (set(), (0.5, 0.5, 0.5), 3.5, 3.0, (0.5, 0.5, 0.5), 1.0),
        ({1}, (0.5, 0.5, 0.5), 3.5, 2.0, (0.5, 0.0, 0.0), 1.0),  # the resident comes once, and hides half of the next
        ({0, 1, 2}, (2.0, 2.0, 2.0), 7.0, 6.0, (0.0, 0.0, 0.0), 0.0),
        (set(), (4.0, 0.0, 0.0), 6.0, 6.0, (1.0, 0.0, 1.0), 0.5),  # while one computes the bus has one slot to fill
        (set(), (0.0, 0.0, 0.0), 3.0, 3.0, (1.0, 1.0, 1.0), 1.0),
    ],
)
def test_a_prediction_reckoned_by_hand(resident, compute, first, steady, stalls, bus_share):
    found = simulate(Plan((100, 100, 100), frozenset(resident), 2, 512), Rates(100.0, compute))
    assert (found.first, found.steady, found.bus_share) == pytest.approx((first, steady, bus_share))
    assert found.stalls == pytest.approx(stalls)


def test_nothing_takes_no_time():
    found = simulate(make_plan([0, 0], 0), Rates(100.0, (0.0, 0.0)))
    assert (found.first, found.steady, found.stalls, found.bus_share) == (0.0, 0.0, (0.0, 0.0), 0.0)


@pytest.mark.parametrize("count", [2, 3, 7, 12, 24, 40])
def test_equal_layers_are_spread_as_evenly_as_they_can_be(count):
    """However many are kept: the runs between them differ by one layer at most."""
    for kept, over in itertools.product(range(1, count + 1), (0, 999)):
        chosen = sorted(spread([1000] * count, set(), 1000 * kept + over))
        assert len(chosen) == kept
        gaps = [(b - a - 1) % count for a, b in zip(chosen, [*chosen[1:], chosen[0]], strict=True)]
        assert max(gaps) - min(gaps) <= 1, chosen


@given(st.lists(st.sampled_from([1, 2, 3, 5, 10]), max_size=9), st.integers(0, 20), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_no_layer_that_would_fit_is_left_out(rooms, left, data):
    fixed = data.draw(st.sets(st.sampled_from(range(len(rooms))))) if rooms else set()
    chosen = spread(rooms, fixed, left)
    over = left - sum(rooms[i] for i in chosen)
    assert over >= 0 and not chosen & fixed
    assert all(rooms[i] > over for i in range(len(rooms)) if i not in chosen | fixed)


def test_what_the_even_share_leaves_over_goes_where_the_longest_run_is():
    """Around the cycle, and whatever is kept there already counts."""
    assert spread([1, 1, 3, 3, 1, 10], set(), 2) == {1, 4}, "0 fits too, next to 1"
    assert spread([2, 2, 10, 1, 5, 10, 2, 10, 5], {6}, 3) == {0, 3}, "1 fits too, two steps from 3"


def test_a_ring_is_as_deep_as_it_pays_and_no_deeper():
    """Every sixth layer computes for as long as five take to come: with five slots to fill meanwhile the bus never waits."""
    sizes, rates = [100 * MIB] * 12, Rates(100.0 * MIB, (5.0, *[0.01] * 5) * 2)
    deep = make_plan(sizes, 600 * MIB, rates)
    assert (deep.slots, deep.resident) == (MOST_SLOTS, frozenset())
    assert simulate(deep, rates).steady == pytest.approx(12.0) and simulate(deep, rates).bus_share == pytest.approx(1.0)
    assert simulate(make_plan(sizes, 600 * MIB), rates).steady > 15.0
    even = Rates(100.0 * MIB, (5.0,) * 12)
    assert make_plan(sizes, 600 * MIB, even).slots == LEAST_SLOTS, "what is hidden anyway needs no slots"
    assert make_plan(sizes, 600 * MIB).slots == LEAST_SLOTS, "nor does what nobody has measured"
    longer = Rates(100.0 * MIB, (12.0, *[0.01] * 7) * 2)
    assert make_plan([100 * MIB] * 16, 800 * MIB, longer).slots == MOST_SLOTS, "eight would hide more: there is an end"


def test_what_stays_is_there_at_once_in_every_later_pass():
    plan = make_plan([10, 20, 30], 3 * 512)
    found = simulate(plan, Rates(1000.0, (0.001,) * 3))
    assert (found.first, found.steady) == pytest.approx((0.061, 0.003)) and not any(found.stalls)


@given(layers, st.integers(0, 500_000), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_rare_layers_find_slots_and_never_stay(sizes, budget, data):
    rare = frozenset(data.draw(st.sets(st.integers(0, len(sizes) - 1))))
    least = least_budget(sizes, rare)
    if budget < least:
        with pytest.raises(OverBudget):
            make_plan(sizes, budget, rare=rare)
        return
    plan = make_plan(sizes, budget, rare=rare)
    largest = max((aligned(sizes[i]) for i in rare), default=0)
    assert plan.footprint <= budget and plan.slot_bytes >= largest and not rare & {*plan.resident, *plan.streamed}
    assert {*plan.resident, *plan.streamed} == set(range(len(sizes))) - rare
    assert plan.slots >= LEAST_SLOTS or not (plan.streamed or largest)
    if budget >= most_budget(sizes, rare):
        assert not plan.streamed
    assert make_plan(sizes, least, rare=rare).footprint <= least


def test_without_rare_layers_more_of_the_others_stay():
    """A quarter of each block is rare: in the budget of four blocks five of six stay less a slot, instead of two."""
    sizes, whole = (300, 100) * 6, (400,) * 6
    budget = 4 * 512 * 400 // 100
    rooms = [512 * size // 100 for size in sizes]
    plan = make_plan(rooms, budget, rare=frozenset(range(1, 12, 2)))
    assert plan.bytes_per_pass < 0.75 * make_plan([512 * size // 100 for size in whole], budget).bytes_per_pass
    assert simulate(plan, Rates(1e9, (0.0,) * 12)).steady == pytest.approx(plan.bytes_per_pass / 1e9)

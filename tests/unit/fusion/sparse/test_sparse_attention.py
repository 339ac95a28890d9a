"""The sparse override alone: what it serves and how, what it hands on and why, and what it counts.

Kernels take tensors of a card. Here the references compute, and the override is told that they do.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch
from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

from fusestream.fusion.base.hooks import POLICY, SPARSE_CALL
from fusestream.fusion.fused import attention as hook
from fusestream.fusion.sparse import attention as sparse_attention
from fusestream.fusion.sparse.attention import PIECES, SparseAttention
from fusestream.fusion.sparse.order import tile_order
from fusestream.fusion.sparse.radial import radial
from fusestream.fusion.sparse.schedule import CallSoFar
from fusestream.fusion.sparse.settings import Settings
from fusestream.fusion.sparse.tally import MOST_TIMES, Moment, Tally
from fusestream.kernels_cuda import LEDGER, KernelPolicy, KernelRefused, attention, choose_blocks
from fusestream.kernels_cuda.ops.attention.attention_operands import heads_in

GRID = (6, 8, 9)
TOKENS = math.prod(GRID)  # 432: seven blocks of keys, the last one short
HEADS, D = 3, 64
NOW: dict[str, Any] = {"share": 0.4, "dense_steps": 0.0, "dense_layers": 0, "least_tokens": 256}


class Held:
    """Another override: notes how it was called, and computes as stock does."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any]] = []

    def __call__(self, stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append((stock, args, kwargs))
        out: torch.Tensor = attention_pytorch(*args, **{k: v for k, v in kwargs.items() if k != "transformer_options"})
        return out


@pytest.fixture
def served_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention, "wrong_tensor", lambda *_: None)
    monkeypatch.setattr(sparse_attention, "forced", lambda policy: policy)


def qkv(tokens: int = TOKENS, heads: int = HEADS, key_heads: int = HEADS, d: int = D) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [torch.randn(2, tokens, count * d, generator=generator) for count in (heads, key_heads, key_heads)]


def apart(t: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    return t.unflatten(2, (heads, -1))


def sparse(**changed: Any) -> tuple[SparseAttention, Held]:
    held = Held()
    return SparseAttention(Settings(**{**NOW, **changed}), held), held


def reasons(override: SparseAttention) -> dict[str, int]:
    return dict(override.tally.read().dense)


# ------------------------------------------------------------------------------------------------------- what it serves


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, share: float, order: Any = None, **options: Any) -> Any:
    """[batch, tokens, heads, d] of the same."""
    ordered = (q, k, v) if order is None else tuple(t[:, order] for t in (q, k, v))
    blocks, tail = choose_blocks(*ordered, most=round(share * -(-q.shape[1] // 64)))
    out = attention(*ordered, blocks=blocks, tail=tail, **options)
    return out if order is None else torch.empty_like(out).index_copy_(1, order, out)


@pytest.mark.usefixtures("served_here")
@pytest.mark.parametrize("grid", [GRID, None])
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_top_k_in_both_of_stocks_layouts(grid: Any, skip_reshape: bool, skip_output_reshape: bool) -> None:
    """In tiles where the grid is known, in the order of the tokens where it is not; and back."""
    q, k, v = qkv()
    want = by_hand(*(apart(t) for t in (q, k, v)), 0.4, None if grid is None else tile_order(GRID, q.device))
    given = [apart(t).transpose(1, 2) for t in (q, k, v)] if skip_reshape else [q, k, v]
    override, held = sparse()
    options = {} if grid is None else {"grid_sizes": torch.Size(grid)}
    got = override(
        attention_pytorch,
        *given,
        HEADS,
        skip_reshape=skip_reshape,
        skip_output_reshape=skip_output_reshape,
        transformer_options=options,
    )
    torch.testing.assert_close(got, want.transpose(1, 2) if skip_output_reshape else want.flatten(2))
    assert not held.calls and override.tally.read().sparse == 1


@pytest.mark.usefixtures("served_here")
def test_grouped_heads_go_with_their_keys() -> None:
    q, k, v = qkv(heads=6, key_heads=3)
    override, _ = sparse()
    got = override(attention_pytorch, q, k, v, 6, enable_gqa=True, scale=0.2, transformer_options={"grid_sizes": GRID})
    want = by_hand(apart(q, 6), apart(k), apart(v), 0.4, tile_order(GRID, q.device), scale=0.2)
    torch.testing.assert_close(got, want.flatten(2))


@pytest.mark.parametrize(("heads", "key_heads"), [(12, 12), (40, 40), (3, 3), (1, 1), (24, 4), (6, 3), (10, 5)])
def test_pieces_are_all_heads_once(heads: int, key_heads: int) -> None:
    found = list(heads_in(PIECES, heads, key_heads))
    assert len(found) <= 4 and all(keys.stop - keys.start <= -(-key_heads // 4) for _, keys in found)
    assert [h for some, _ in found for h in range(heads)[some]] == list(range(heads))
    for some, keys in found:
        assert {h * key_heads // heads for h in range(heads)[some]} == set(range(key_heads)[keys])


@pytest.mark.usefixtures("served_here")
def test_radial_by_its_list() -> None:
    grid = (6, 16, 20)
    q, k, v = qkv(math.prod(grid))
    override, held = sparse(method="radial", share=0.1)
    got = override(attention_pytorch, q, k, v, HEADS, transformer_options={"grid_sizes": grid})
    blocks = radial(grid, q.device).blocks
    torch.testing.assert_close(got, attention(apart(q), apart(k), apart(v), blocks=blocks).flatten(2))
    assert not held.calls and override.tally.read().visited == pytest.approx(radial(grid, q.device).visited)


@pytest.mark.usefixtures("served_here")
@pytest.mark.parametrize("grid", [GRID, None])
def test_bounded_by_its_weight(grid: Any) -> None:
    """Of the scale that the call has."""
    q, k, v = qkv()
    order = None if grid is None else tile_order(GRID, q.device)
    override, held = sparse(method="bounded", share=0.05, left_out=0.4)
    options = {} if grid is None else {"grid_sizes": grid}
    got = override(attention_pytorch, q, k, v, HEADS, scale=0.3, transformer_options=options)
    ordered = tuple(apart(t) if order is None else apart(t)[:, order] for t in (q, k, v))
    blocks, tail = choose_blocks(*ordered, most=0, left=0.4, scale=0.3)
    want = attention(*ordered, scale=0.3, blocks=blocks, tail=tail)
    want = want if order is None else torch.empty_like(want).index_copy_(1, order, want)
    torch.testing.assert_close(got, want.flatten(2))
    assert not held.calls
    assert override.tally.read().visited == pytest.approx(float(blocks.counts.float().mean()) / 7)


@pytest.mark.usefixtures("served_here")
def test_a_larger_share_is_nearer_to_dense() -> None:
    q, k, v = qkv()
    dense = attention_pytorch(q, k, v, HEADS)
    far = []
    for share in (0.1, 0.5, 0.85):
        override, _ = sparse(share=share)
        got = override(attention_pytorch, q, k, v, HEADS, transformer_options={"grid_sizes": GRID})
        far.append(float((got - dense).norm() / dense.norm()))
    assert far == sorted(far, reverse=True) and 0 < far[-1] < far[0] / 1.2


# ------------------------------------------------------------------------------------------------------ what it does not


def test_what_it_does_not_serve_goes_on_as_it_came() -> None:
    """To the override that was there; the same objects, in the same places."""
    q, k, v = qkv()
    short, text = q[:, :128], q[:, :77]
    options = {"grid_sizes": GRID}
    override, held = sparse()
    for args, kwargs in (
        ((short, short, short, HEADS), {"transformer_options": options}),
        ((q, text, text, HEADS), {"transformer_options": options, "skip_output_reshape": True}),
        ((q, k, v, HEADS, None, torch.float32), {"scale": 0.1, "transformer_options": options}),
    ):
        held.calls.clear()
        override(attention_pytorch, *args, **kwargs)
        [(stock, given, named)] = held.calls
        assert stock is attention_pytorch and named == kwargs and named["transformer_options"] is options
        assert len(given) == len(args) and all(a is b for a, b in zip(given, args, strict=True))
    assert reasons(override) == {"shorter than 256 tokens": 1, "tensor is on the CPU": 1}


def test_without_another_override_stock_serves() -> None:
    q, k, v = qkv()
    got = SparseAttention(Settings(**NOW))(attention_pytorch, q, k, v, HEADS, transformer_options={})
    assert torch.equal(got, attention_pytorch(q, k, v, HEADS))


@pytest.mark.usefixtures("served_here")
@pytest.mark.parametrize(
    ("settings", "options", "others", "reason"),
    [
        ({}, {}, {"mask": torch.ones(TOKENS, TOKENS, dtype=torch.bool)}, "the model passes a mask"),
        ({}, {}, {"sinks": 1}, "the model passes sinks, which this version does not know"),
        ({}, {POLICY: KernelPolicy.of("auto", attention="off")}, {}, "attention is switched off for this model"),
        ({"method": "radial"}, {}, {}, sparse_attention.NO_GRID),
        ({"method": "radial"}, {"grid_sizes": (6, 8, 8)}, {}, sparse_attention.NO_GRID),
        ({"method": "radial"}, {"grid_sizes": (2, 8, 27)}, {}, "all blocks would be visited"),
        ({"share": 1.0}, {}, {}, "all blocks would be visited"),
        ({"share": 0.95}, {}, {}, "all blocks would be visited"),
        ({"method": "bounded", "left_out": 0.0}, {}, {}, "all blocks would be visited"),
        ({"least_tokens": TOKENS + 1}, {}, {}, f"shorter than {TOKENS + 1} tokens"),
    ],
)
def test_every_reason_to_stay_dense_is_told(settings: Any, options: Any, others: Any, reason: str) -> None:
    class Stock:
        def __call__(self, *args: Any, **_: Any) -> torch.Tensor:
            return args[0]

    q, k, v = qkv()
    override = SparseAttention(Settings(**{**NOW, **settings}))
    assert override(Stock(), q, k, v, HEADS, transformer_options=options, **others) is q
    assert reasons(override) == {reason: 1} and override.tally.read().sparse == 0


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU: for the reasons that are given there only."""

    is_cuda = True


def test_what_the_kernels_do_not_take_is_in_the_ledger() -> None:
    def told(t: torch.Tensor, heads: int) -> tuple[list[str], dict[str, int]]:
        LEDGER.clear()
        override = SparseAttention(Settings(**NOW))
        gpu = t.as_subclass(OnGpu)
        override(lambda *args, **_: args[0], gpu, gpu, gpu, heads, transformer_options={})
        return [f"{r.op}: {r.reason}: {r.served_by}" for r in LEDGER.refusals], reasons(override)

    bf16 = "the model computes in bfloat16, the kernels in float16"
    assert told(qkv()[0].bfloat16(), HEADS) == ([f"sparse attention: {bf16}: dense attention"], {bf16: 1})
    for heads, size in ((2, 72), (1, 256)):
        width = f"heads have {size} elements, the kernels serve 64, 96, 128"
        half = torch.zeros(1, 300, heads * size, dtype=torch.float16)
        assert told(half, heads) == ([f"sparse attention: {width}: dense attention"], {width: 1})


@pytest.mark.parametrize("method", ["top-k", "radial", "bounded"])
@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, HEADS), (torch.float16, HEADS), (torch.float16, 1)])
def test_in_8_bits_it_takes_what_dense_attention_takes(
    dtype: torch.dtype, heads: int, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BF16 and heads of 256 too."""
    grid, size = (6, 16, 20), 256 if heads == 1 else D
    monkeypatch.setattr(sparse_attention, "forced", lambda policy: policy)
    q, k, v = (t.to(dtype).as_subclass(OnGpu) for t in qkv(math.prod(grid), heads, heads, size))
    override, held = sparse(method=method, share=0.3)
    options = {"grid_sizes": grid, POLICY: KernelPolicy.of("off", precision="turbo", attention="auto")}
    got = override(attention_pytorch, q, k, v, heads, transformer_options=options)
    dense = attention_pytorch(q.float(), k.float(), v.float(), heads)
    assert not held.calls and override.tally.read().sparse == 1 and got.dtype is dtype
    assert 0 < float((got.float() - dense).norm() / dense.norm()) < 1


@pytest.mark.usefixtures("served_here")
def test_what_a_kernel_refuses_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise KernelRefused("no code for this card")

    monkeypatch.setattr(sparse_attention, "choose_blocks", refuses)
    q, k, v = qkv()
    override, held = sparse()
    got = override(attention_pytorch, q, k, v, HEADS, transformer_options={"grid_sizes": GRID})
    assert torch.equal(got, attention_pytorch(q, k, v, HEADS)) and len(held.calls) == 1
    assert reasons(override) == {"no code for this card": 1} and override.tally.read().sparse == 0


def test_the_policy_is_the_calls_and_kernels_are_not_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's attention with a list takes a mask of every query and key."""
    seen = []

    def chosen(*_: Any, policy: KernelPolicy, **__: Any) -> Any:
        seen.append(policy)
        raise KernelRefused("seen")

    monkeypatch.setattr(sparse_attention, "wrong_tensor", lambda *_: None)
    monkeypatch.setattr(sparse_attention, "choose_blocks", chosen)
    q, k, v = qkv()
    policy = KernelPolicy.of("auto", precision="fast", isa="sm_75")
    for options in ({POLICY: policy}, {}):
        sparse()[0](attention_pytorch, q, k, v, HEADS, transformer_options=options)
    assert seen == [KernelPolicy.of("on", precision="fast", isa="sm_75"), KernelPolicy.of("on")]


# ------------------------------------------------------------------------------------------------------ steps and layers


@pytest.mark.every_other
@pytest.mark.usefixtures("served_here")
@pytest.mark.parametrize(("share", "dense"), [(0.25, 5), (0.0, 0), (0.3, 6), (0.31, 7), (0.01, 1), (1.0, 20)])
@pytest.mark.parametrize("upwards", [False, True])
def test_the_first_steps_stay_dense(share: float, dense: int, upwards: bool) -> None:
    levels = torch.linspace(1, 0, 21).pow(1.7)
    levels = levels.flip(0) if upwards else levels
    q, k, v = qkv()
    override, held = sparse(dense_steps=share)
    for step, level in enumerate(levels[:-1]):
        held.calls.clear()
        options = {"sigmas": level.repeat(2), "sample_sigmas": levels, SPARSE_CALL: CallSoFar()}
        override(attention_pytorch, q, k, v, HEADS, transformer_options=options)
        assert bool(held.calls) == (step < dense), step
    assert reasons(override) == ({"one of the first steps": dense} if dense else {})


@pytest.mark.usefixtures("served_here")
def test_a_call_between_two_steps_belongs_to_the_nearer() -> None:
    levels = torch.tensor([1.0, 0.8, 0.4, 0.0])
    q, k, v = qkv()
    override, _ = sparse(dense_steps=0.5)  # the first two
    for level in (0.9, 0.61, 0.59, 0.2):
        options = {"sigmas": torch.tensor([level]), "sample_sigmas": levels, SPARSE_CALL: CallSoFar()}
        override(attention_pytorch, q, k, v, HEADS, transformer_options=options)
    assert reasons(override) == {"one of the first steps": 2}


@pytest.mark.usefixtures("served_here")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sigmas": torch.ones(1)},
        {"sample_sigmas": torch.ones(3)},
        {"sigmas": torch.ones(1), "sample_sigmas": torch.ones(1)},
    ],
)
def test_without_noise_levels_there_are_no_first_steps(options: dict[str, Any]) -> None:
    q, k, v = qkv()
    override, held = sparse(dense_steps=1.0)
    override(attention_pytorch, q, k, v, HEADS, transformer_options=options)
    assert not held.calls


def test_the_device_is_asked_for_the_step_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call, asked = CallSoFar(), []
    levels = torch.tensor([1.0, 0.5, 0.0])
    monkeypatch.setattr(torch.Tensor, "argmin", lambda t: asked.append(t) or torch.tensor(0))
    for _ in range(3):
        assert call.is_early({"sigmas": levels[:1], "sample_sigmas": levels}, 0.5)
    assert len(asked) == 1
    assert not CallSoFar().is_early({"sigmas": levels[:1], "sample_sigmas": levels}, 0.0)
    assert len(asked) == 1, "where no step is to be dense it is not asked"


@pytest.mark.usefixtures("served_here")
def test_the_first_layers_of_each_call_stay_dense() -> None:
    """What is short, or of the text, is no layer."""
    q, k, v = qkv()
    override, held = sparse(dense_layers=2)
    for _ in range(2):
        options = {"grid_sizes": GRID, SPARSE_CALL: CallSoFar()}
        served = []
        for _ in range(4):
            held.calls.clear()
            override(attention_pytorch, q, k, v, HEADS, transformer_options=options)
            served.append(not held.calls)
            override(attention_pytorch, q[:, :64], k[:, :64], v[:, :64], HEADS, transformer_options=options)
            override(attention_pytorch, q, k[:, :77], v[:, :77], HEADS, transformer_options=options)
        assert served == [False, False, True, True]
    assert reasons(override) == {"shorter than 256 tokens": 8, "one of the first layers": 4}


@pytest.mark.usefixtures("served_here")
def test_who_does_not_begin_a_call_may_number_the_blocks() -> None:
    q, k, v = qkv()
    override, held = sparse(dense_layers=1)
    served = []
    for options in ({"block_index": 0}, {"block_index": 1}, {}):  # the last one's layer is unknown
        held.calls.clear()
        override(attention_pytorch, q, k, v, HEADS, transformer_options=options)
        served.append(not held.calls)
    assert served == [False, True, True]


# ----------------------------------------------------------------------------------------------------------- the tally


@pytest.mark.usefixtures("served_here")
def test_what_was_visited_is_counted() -> None:
    q, k, v = qkv()
    override, _ = sparse(share=0.3)
    for _ in range(3):
        override(attention_pytorch, q, k, v, HEADS, transformer_options={"grid_sizes": GRID})
    order = tile_order(GRID, q.device)
    blocks, _ = choose_blocks(*(apart(t)[:, order] for t in (q, k, v)), most=2)
    found = override.tally.read()
    assert found.sparse == 3 and found.dense == () and set(found.seconds) == {"sparse"}
    assert found.visited == pytest.approx(float(blocks.counts.float().mean()) / 7) and 2 / 7 < found.visited < 1


def test_a_tally_of_nothing() -> None:
    found = Tally().read()
    assert (found.sparse, found.visited, found.seconds, found.dense) == (0, None, {}, ())


def test_times_are_the_latest_and_what_fails_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    tally, at = Tally(), iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(at)))
    for _ in range(MOST_TIMES + 3):
        with tally.timed("dense", torch.device("cpu")):
            pass
    with pytest.raises(RuntimeError), tally.timed("sparse", torch.device("cpu")):
        raise RuntimeError
    assert tally.read().seconds == {"dense": 1.0} and len(tally._times["dense"]) == MOST_TIMES
    assert Moment(torch.device("cpu")).until(Moment(torch.device("cpu"))) == 1.0


def test_reasons_are_told_most_first() -> None:
    tally = Tally()
    for why, count in Counter(a=1, b=3, c=2).items():
        for _ in range(count):
            tally.dense(why)
    assert tally.read().dense == (("b", 3), ("c", 2), ("a", 1))


# --------------------------------------------------------------------------------------------------- beside other things


@pytest.mark.usefixtures("served_here")
def test_in_a_compiled_model_it_is_asked_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would keep what the first call found, the step and the layer: stock's node has it not look at the
    transformer_options again."""
    override, held = sparse(dense_steps=0.5)
    q, k, v = qkv()
    levels = torch.tensor([1.0, 0.5, 0.0])

    def block(q: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        return override(attention_pytorch, q * 2, k, v, HEADS, transformer_options=transformer_options) + 1

    traced, choice = [], SparseAttention._choice

    def watched(self: SparseAttention, call: Any) -> str | None:
        traced.append(torch.compiler.is_compiling())
        return choice(self, call)

    monkeypatch.setattr(SparseAttention, "_choice", watched)
    compiled = torch.compile(block, backend="eager", options={"guard_filter_fn": skip_torch_compile_dict})
    for level, dense in ((1.0, True), (0.5, False), (1.0, True), (0.5, False)):
        held.calls.clear()
        options = {"sigmas": torch.tensor([level]), "sample_sigmas": levels, "grid_sizes": GRID}
        got = compiled(q, {**options, SPARSE_CALL: CallSoFar()})
        assert bool(held.calls) is dense
        torch.testing.assert_close(got, block(q, {**options, SPARSE_CALL: CallSoFar()}))
    assert traced == [False] * 8


@pytest.mark.usefixtures("served_here")
def test_videos_of_several_sizes_do_not_mix() -> None:
    """As context windows have them, whose last one may be shorter."""
    override, _ = sparse()
    for grid in (GRID, (5, 8, 9), GRID, (8, 9, 6), (4, 9, 9)):
        q, k, v = qkv(math.prod(grid))
        got = override(attention_pytorch, q, k, v, HEADS, transformer_options={"grid_sizes": grid})
        share = round(0.4 * -(-math.prod(grid) // 64)) / -(-math.prod(grid) // 64)
        want = by_hand(apart(q), apart(k), apart(v), share, tile_order(grid, q.device))
        torch.testing.assert_close(got, want.flatten(2))


def test_ours_below_it_serves_the_rest_under_its_policy() -> None:
    """FuseStream's own override says why it hands back, as without the node."""
    LEDGER.clear()
    q = qkv()[0].bfloat16().as_subclass(OnGpu)
    held = hook.AttentionOverride(KernelPolicy.of("on"))
    with pytest.raises(KernelRefused, match="the model computes in bfloat16"):
        SparseAttention(Settings(**NOW), held)(attention_pytorch, q, q, q, HEADS, transformer_options={})

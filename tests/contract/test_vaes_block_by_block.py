"""What a VAE whose decoder is a chain of blocks over tiles keeps to: stock's pixels, one block's weights at a time, and nothing
left behind."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import comfy.model_management
import pytest
import torch
from any_vaes import AnyVae, interrupt_at, minimax_h3

from fusestream.fusion.vae.block_by_block import install
from fusestream.fusion.vae.block_by_block.blocks import chain_in
from fusestream.fusion.vae.block_by_block.weights import BlocksAhead
from fusestream.fusion.vae.resident_patcher import give_back, hold
from fusestream.kernels_cuda import LEDGER

KIND = AnyVae("MiniMax H3", minimax_h3, 24, 16, 4)
ENOUGH = 1 << 33


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def stock() -> Any:
    with torch.inference_mode():
        return KIND.net()


@pytest.fixture
def net(stock: Any) -> Any:
    made = copy.deepcopy(stock)
    install.fuse(made)
    return made


def left_as_it_was(net: Any) -> bool:
    return not any("forward" in module.__dict__ for module in net.modules())


@pytest.mark.parametrize(
    "shape",
    [(1, 24, 7, 17, 3), (2, 24, 1, 3, 18), (1, 24, 12, 2, 2)],
    ids=["tiles, clips", "a batch of pictures", "clips"],
)
@pytest.mark.parametrize("room", [ENOUGH, 1 << 22, 0], ids=["all tiles", "some tiles", "tile by tile"])
def test_pixels_are_stocks(net: Any, stock: Any, shape: tuple[int, ...], room: int) -> None:
    """To the bit where a block computes one tile at a time; products of several add up in another order."""
    z = torch.randn(shape)
    LEDGER.clear()
    found, expected = net.decode(z.clone(), room=room), stock.decode(z.clone())
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if room == 0 else 1e-5 * expected.abs().max().item())
    assert left_as_it_was(net) and not LEDGER.messages


@pytest.mark.parametrize("frames", [1, 2, 7, 8, 12])
def test_pixels_are_written_where_they_are_wanted(net: Any, stock: Any, frames: int) -> None:
    """Into memory of another type, of the shape that is said beforehand."""
    z = torch.randn(1, 24, frames, 3, 2)
    expected = stock.decode(z.clone())
    assert net.comfy_has_chunked_io and net.decode_output_shape(z.shape) == tuple(expected.shape)
    out = torch.full(expected.shape, torch.nan, dtype=torch.float64)
    assert net.decode(z.clone(), output_buffer=out) is out
    torch.testing.assert_close(out.float(), expected.float(), rtol=0, atol=1e-5)


def test_what_is_free_may_be_too_little_after_all(net: Any, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may take it meanwhile: the decoding begins again with the room that the limit leaves."""
    rooms, within = list[int](), net._by_blocks

    def running_out(stocks: Any, z: torch.Tensor, room: int, out: Any) -> torch.Tensor:
        rooms.append(room)
        if len(rooms) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made: torch.Tensor = within(stocks, z, room, out)
        return made

    monkeypatch.setattr(install, "free_for", lambda *_: ENOUGH)
    monkeypatch.setattr(net, "_by_blocks", running_out)
    z = torch.randn(1, 24, 2, 3, 2)
    LEDGER.clear()
    torch.testing.assert_close(net.decode(z.clone()), stock.decode(z.clone()), rtol=0, atol=1e-5)
    assert rooms == [ENOUGH, install.room_for(net)]
    assert any("again with less of the card" in str(line) for line in LEDGER.messages)


def test_tiles_pass_a_block_together(net: Any) -> None:
    """As many as a part of the room is enough for; without room, one."""
    z, sizes = torch.randn(1, 24, 7, 17, 17), list[int]()
    net.decoder.transformer_blocks[1].attn.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    net.decode(z, room=0)
    assert sizes == [1, 1, 1, 1]
    sizes.clear()
    net.decode(z, room=ENOUGH)
    assert sizes == [4]


def test_a_block_comes_once_for_all_tiles(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again for each group of tiles that there is room for."""
    z, came = torch.randn(1, 24, 7, 17, 3), list[int]()
    within = BlocksAhead.on_card

    @contextlib.contextmanager
    def coming(weights: BlocksAhead, number: int) -> Iterator[None]:
        came.append(number)
        with within(weights, number):
            yield

    monkeypatch.setattr(BlocksAhead, "on_card", coming)
    net.decode(z, room=ENOUGH)
    assert came == [0, 1, 2, 3]
    came.clear()
    net.decode(z, room=0)
    assert len(came) > 4 and came == [0, 1, 2, 3] * (len(came) // 4)


def test_a_block_gives_its_place_to_the_next(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card, which here is the CPU with weights of another type: those of one block are there, and none afterwards. The next
    one's come meanwhile, once."""
    net = copy.deepcopy(stock)
    install.fuse(net)
    name, blocks = install._chain(net)
    weights = [block.attn.to_out.weight for block in blocks]
    for block in blocks:
        for module in block.modules():
            for own in dict(module.named_parameters(recurse=False)):
                setattr(module, f"{own}_comfy_model_dtype", torch.float64)
    device = torch.device("meta")  # away, as a card is
    brought, within = list[int](), BlocksAhead._ask
    monkeypatch.setattr(
        BlocksAhead, "_ask", lambda weights, number: (brought.append(number), within(weights, number))[1]
    )
    with contextlib.closing(BlocksAhead(net, name, len(blocks), device)) as ahead:
        for number in (0, 1, 3, 0):
            with ahead.on_card(number):
                there = [block.attn.to_out.weight.dtype is torch.float64 for block in blocks]
                assert there == [each == number for each in range(len(blocks))]
            assert [block.attn.to_out.weight for block in blocks] == weights
    assert (brought.count(0), brought.count(3)) == (2, 1) and 1 in brought, "what came ahead comes no second time"


def test_an_encoding_has_its_weights_behind_a_decoding(net: Any, stock: Any) -> None:
    """A decoding lets the encoder's go. What the card is to the file's tensors, fp32 is here to fp64."""
    comfy.model_management.archive_model_dtypes(net)
    net.double()
    hold(net, torch.device("cpu"), install.others_of(net))
    z, pixels = torch.randn(1, 24, 2, 3, 2), torch.rand(1, 3, 5, 48, 32) * 2 - 1
    net.decode(z, room=ENOUGH)
    assert {each.dtype for each in net.encoder.parameters()} == {torch.float64}
    for device in (None, pixels.device):
        assert torch.equal(net.encode(pixels.clone(), device), stock.encode(pixels.clone()))
    give_back(net)


def test_an_interrupt_on_the_way_leaves_nothing(net: Any, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.randn(1, 24, 7, 3, 3)
    interrupt_at(3, monkeypatch)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        net.decode(z.clone(), room=ENOUGH)
    monkeypatch.undo()
    assert left_as_it_was(net)
    assert torch.equal(net.decode(z.clone(), room=ENOUGH), stock.decode(z.clone()))


def test_blocks_that_are_no_chain_are_stocks(stock: Any) -> None:
    """Another node that joins a block's result with an earlier one, for example."""
    net, changed = copy.deepcopy(stock), copy.deepcopy(stock)
    for each in (net, changed):
        blocks = each.decoder.transformer_blocks
        blocks[2].register_forward_pre_hook(lambda _block, args: (args[0] * 0.5, *args[1:]))
    install.fuse(net)
    z = torch.randn(1, 24, 2, 2, 2)
    expected = changed.decode(z.clone())
    assert torch.equal(net.decode(z.clone(), room=ENOUGH), expected)
    assert torch.equal(net.decode(z.clone(), torch.empty_like(expected), ENOUGH), expected)
    assert any("no chain" in str(line) for line in LEDGER.messages)


def test_new_memory_is_touched_once_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusestream.fusion.vae import transfer

    touched = list[int]()
    monkeypatch.setattr(transfer, "touch", lambda part: touched.append(part.numel()))
    for out, parts in ((torch.empty(3, 5), [8, 7]), (torch.empty(5, 3).T, []), (torch.empty(0), [])):
        touched.clear()
        pages = transfer.FreshPages(out, 2)
        for _ in range(4):
            pages.touch_next()
        assert touched == parts


def test_only_a_chain_of_blocks_is_taken(stock: Any) -> None:
    assert chain_in(stock.decoder) is not None
    assert chain_in(stock.encoder) is None, "its levels are not called"

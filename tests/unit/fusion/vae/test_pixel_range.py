"""Pixels finished where they are made, and begun in one pass: what the nodes get stays what stock gives."""

from __future__ import annotations

from types import SimpleNamespace

import comfy
import comfy.sd
import comfy.utils
import pytest
import torch
from torch import Tensor, nn

from fusestream import checkpoints, fusion
from fusestream.checkpoints import narrow
from fusestream.fusion.load.other_policy import vae_under
from fusestream.fusion.vae import pixel_range
from fusestream.fusion.vae.transfer import Outbox
from fusestream.kernels_cuda import KernelPolicy

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


def stocks_output(image):
    return image.add_(1.0).div_(2.0).clamp_(0.0, 1.0)


def made(process_output=stocks_output, process_input=lambda image: image * 2.0 - 1.0):
    """A VAE object as far as pixels pass through it."""

    class Vae(SimpleNamespace):
        __hash__ = object.__hash__

    return Vae(
        process_output=process_output,
        process_input=process_input,
        first_stage_model=nn.Identity(),
        vae_dtype=torch.float16,
    )


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A VAE by our loader and by stock."""
    path = str(checkpoints.write("flux_vae", tmp_path_factory.mktemp("vae"), "fp32"))
    with narrow.opened(comfy):
        yield fusion.load_vae(path, KernelPolicy()), comfy.sd.VAE(sd=comfy.utils.load_torch_file(path))


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (2, 3, 5, 9, 7)])
def test_what_is_begun_has_stocks_bits(shape):
    """Also where channels lie last, as the host has pixels."""
    pixels = torch.rand(shape).movedim(1, -1).contiguous().movedim(-1, 1)
    got = pixel_range.begin(pixels, torch.float16)
    assert torch.equal(got, (pixels * 2.0 - 1.0).half()) and got.stride() == pixels.stride()


def test_what_is_yet_to_be_begun_is_a_tensor_to_everybody():
    pixels = torch.rand(2, 5, 9, 7, 3).movedim(-1, 1)
    vae = made()
    vae.first_stage_model.fusestream_takes_unbegun = True
    pixel_range.install(vae)
    got = vae.process_input(pixels).to(vae.vae_dtype)
    stocks = (pixels * 2.0 - 1.0).half()
    given = pixel_range.taken(got)
    assert given.pixels is pixels and given.begins is torch.float16, "nobody has touched them"
    assert (got.dtype, got.shape, got.stride(), got.device) == (
        stocks.dtype,
        stocks.shape,
        stocks.stride(),
        stocks.device,
    )
    for use in (
        lambda x: x[1:, :, :2],
        lambda x: x * 2,
        lambda x: x.to(torch.float32),
        lambda x: torch.cat((x, x)),
        Tensor.clone,
    ):
        found = use(got)
        assert torch.equal(found, use(stocks)) and type(found) is Tensor
    part = pixels[:1, :, 1:3]
    assert torch.equal(given.piece(part), stocks[:1, :, 1:3]) and pixel_range.taken(stocks).piece(part) is part
    assert torch.equal(vae.process_input(pixels.half()), pixels.half() * 2.0 - 1.0), "of another type as stock does it"


def test_only_stocks_usual_way_is_replaced():
    vae = made(lambda image: image, lambda image: image)
    before = vae.process_output, vae.process_input
    pixel_range.install(vae)
    assert (vae.process_output, vae.process_input) == before
    assert pixel_range.finishing_of(vae.first_stage_model, torch.empty(1)) is None


def test_pixels_are_finished_once():
    vae = made()
    pixel_range.install(vae)
    finisher = pixel_range.finishing_of(vae.first_stage_model, out := torch.empty(1, 3, 4, 4))
    assert finisher is vae.process_output
    box, raw = Outbox(out, finishes=True), torch.randn(1, 3, 4, 4)
    box.put((slice(None), slice(None), slice(0, 3)), raw[:, :, :3])
    box.put((slice(None), slice(None), slice(3, 4)), raw[:, :, 3:])
    box.flush()
    finisher.done(out)
    want = stocks_output(raw.clone())
    assert torch.equal(vae.process_output(out), want) and torch.equal(out, want)
    assert torch.equal(vae.process_output(out.clone()), stocks_output(want.clone())), "others are not"
    assert torch.equal(vae.process_output(out), stocks_output(want.clone())), "nor are they the second time"


def test_what_was_finished_before_is_forgotten_when_the_next_begins():
    """Pixels that nobody handed in, and others in their place."""
    vae = made()
    pixel_range.install(vae)
    out = torch.zeros(1, 3, 4, 4)
    vae.process_output.done(out)
    assert pixel_range.finishing_of(vae.first_stage_model, None) is None
    assert torch.equal(vae.process_output(out), torch.full_like(out, 0.5))


def test_what_another_node_does_with_pixels_is_done_to_those_of_the_network(loaded):
    mine, stock = loaded
    z = torch.randn(1, 16, 4, 6)
    usual = stock.decode(z)
    torch.testing.assert_close(mine.decode(z), usual, atol=2e-4, rtol=1e-3)
    standing, theirs = mine.process_output, stock.process_output
    mine.process_output = stock.process_output = lambda image: image.mul_(0.25)
    try:
        got, want = mine.decode(z), stock.decode(z)
    finally:
        mine.process_output, stock.process_output = standing, theirs
    assert float(want.min()) < 0 and not torch.equal(want, usual)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("replaced", ["the copy's", "the original's"])
def test_what_another_node_does_with_the_pixels_of_a_copy_is_done_to_them(loaded, replaced):
    """As of the copy under another policy: both decode by the same network."""
    mine, stock = loaded
    copied = vae_under(mine, KernelPolicy.of("off"))
    changed, other = (copied, mine) if replaced == "the copy's" else (mine, copied)
    z = torch.randn(1, 16, 4, 6)
    usual, standing = stock.decode(z), changed.process_output
    changed.process_output = lambda image: image.mul_(0.25)
    try:
        got = changed.decode(z)
        torch.testing.assert_close(other.decode(z), usual, atol=2e-4, rtol=1e-3)
    finally:
        changed.process_output = standing
    assert float(got.min()) < 0
    torch.testing.assert_close(stocks_output(4 * got.movedim(-1, 1)).movedim(1, -1), usual, atol=8e-4, rtol=1e-3)

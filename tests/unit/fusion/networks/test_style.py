"""Style networks: what their files hold, the published networks' own mathematics, pictures in bands, a batch in another look."""

from __future__ import annotations

import comfy.memory_management
import comfy.model_management as management
import pytest
import torch
from safetensors.torch import save_file
from taped import NBYTES, TapingRecorder
from torch import nn
from torch.nn import functional

from fusestream.checkpoints import style as made
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.networks import giving_back
from fusestream.fusion.networks.style import apply as applying
from fusestream.fusion.networks.style import load as loading
from fusestream.fusion.networks.style.apply import Settings, apply
from fusestream.fusion.networks.style.bands import Rows, in_parts, reflected
from fusestream.fusion.networks.style.load import load
from fusestream.kernels_cuda import LEDGER, KernelPolicy
from fusestream.kernels_cuda.modules import fallback
from fusestream.kernels_cuda.modules.graphs import captures_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _as_comfyui_runs():
    LEDGER.clear()
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("style")
    save_file(made.transformer(), path / "net.safetensors")
    save_file(made.decoder(), path / "decoder.safetensors")
    torch.save(made.vgg(), path / "vgg.pth")
    return path


@pytest.fixture(scope="module")
def transformer(folder):
    return load(str(folder / "net.safetensors"))


@pytest.fixture(scope="module")
def adain(folder):
    return load(str(folder / "decoder.safetensors"), str(folder / "vgg.pth"))


def pictures(count=1, height=33, width=46, seed=3):
    """Smooth, as pictures are."""
    small = torch.rand(count, 3, 6, 8, generator=torch.Generator().manual_seed(seed))
    return functional.interpolate(small, (height, width), mode="bicubic").clamp(0, 1).movedim(1, -1)


# ------------------------------------------------------------ the networks: the other one is written out in checkpoints/style.py


def huang(content, style, encoder, decoder, strength=1.0):
    """AdaIN as its authors' files are used."""

    def features(x):
        x = functional.conv2d(x, encoder["0.weight"], encoder["0.bias"])
        for number in (2, 5, 9, 12, 16, 19, 22, 25, 29):
            x = made.convolved(x, encoder, str(number)).relu()
            x = functional.max_pool2d(x, 2, ceil_mode=True) if number in (5, 12, 25) else x
        return x

    def moments(x):
        return x.flatten(2).mean(2)[..., None, None], (x.flatten(2).var(2) + 1e-5).sqrt()[..., None, None]

    x, (mean, spread) = features(content), moments(features(style))
    own_mean, own_spread = moments(x)
    x = strength * ((x - own_mean) / own_spread * spread + mean) + (1 - strength) * x
    for number in (1, 5, 8, 11, 14, 18, 21, 25):
        x = made.convolved(x, decoder, str(number)).relu()
        x = functional.interpolate(x, scale_factor=2) if number in (1, 14, 21) else x
    return made.convolved(x, decoder, "28")


def image(picture):
    return picture.movedim(-1, 1)


def near(got, want, most=2e-4):
    assert got.shape == want.shape and got.dtype is torch.float32
    torch.testing.assert_close(got, want, atol=most, rtol=1e-3)


def wanted_of(picture):
    """What the transformer net of these tests makes of one."""
    out = made.transformed(image(picture) * 255, made.transformer()) / 255
    return out[:, :, : picture.shape[1], : picture.shape[2]].movedim(1, -1)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (33, 46), (40, 31)])
def test_a_transformer_net_is_the_published_one(transformer, height, width):
    picture = pictures(1, height, width)
    want = wanted_of(picture)
    assert want.std() > 0.05  # it does something
    near(apply(transformer, picture, None, Settings()), want.clamp(0, 1))


@pytest.mark.parametrize(("height", "width"), [(16, 16), (33, 46), (64, 40)])
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_an_adain_net_is_the_published_one(adain, height, width, strength):
    picture, look = pictures(1, height, width), pictures(1, 24, 38, seed=9)
    want = huang(image(picture), image(look), made.vgg(), made.decoder(), strength)[:, :, :height, :width].movedim(
        1, -1
    )
    near(apply(adain, picture, look, Settings(strength=strength)), want.clamp(0, 1))


def test_of_several_looks_it_is_the_mean(adain):
    net, looks = adain.net, pictures(2, 24, 24, seed=5)
    each = [net.look([image(one)]) for one in looks.split(1)]
    both = net.look([image(one) for one in looks.split(1)])
    for place in (0, 1):
        torch.testing.assert_close(both[place], (each[0][place] + each[1][place]) / 2)


def test_our_layers_are_in_the_places_of_torchs(transformer, adain):
    assert not transformer.table.left and not adain.table.left
    replaced = {line.name: line.of for line in transformer.table.replaced}
    assert replaced["in1"] == ("InstanceNorm2d", "ReLU") and replaced["res1.in2"] == ("InstanceNorm2d",)
    assert replaced["deconv1.upsample"] == ("Upsample", "ReflectionPad2d", "Conv2d")
    assert set(transformer.net.state_dict()) == set(made.transformer())


# ---------------------------------------------------------------------------------------------------------------- bands


@pytest.mark.parametrize(("height", "width"), [(64, 24), (97, 18), (130, 33)])
@pytest.mark.parametrize("rows", [32, 48])
def test_bands_of_a_transformer_net_are_the_whole_picture(transformer, height, width, rows):
    picture = pictures(1, height, width)
    near(apply(transformer, picture, None, Settings(rows=rows)), apply(transformer, picture, None, Settings()))


@pytest.mark.parametrize(("height", "width"), [(136, 24), (201, 18)])
def test_bands_of_an_adain_net_are_the_whole_picture(adain, height, width):
    picture, look = pictures(1, height, width), pictures(1, 24, 24, seed=5)
    near(apply(adain, picture, look, Settings(rows=32)), apply(adain, picture, look, Settings()))


def test_too_small_a_halo_would_be_seen(adain):
    """That the halo of the test before matters."""
    x = image(pictures(1, 136, 24))
    whole = adain.net.encoder(x)
    torch.testing.assert_close(in_parts(x, adain.net.encoder, 32, 32, 8, 1), whole, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(in_parts(x, adain.net.encoder, 32, 8, 8, 1), whole, atol=1e-3)


def test_rows_are_reflected_and_joined():
    assert [reflected(row, 4) for row in range(-2, 6)] == [2, 1, 0, 1, 2, 3, 2, 1]
    x = torch.randn(1, 3, 7, 5)
    assert torch.equal(Rows.of(x).all(3), x)


def test_whole_pictures_go_in_bands_where_memory_is_short(transformer, monkeypatch):
    picture, real, tried = pictures(1, 130, 40), transformer.net.in_bands, []
    want = apply(transformer, picture, None, Settings())

    def bands(x, rows):
        tried.append(rows)
        if len(tried) == 1:
            raise torch.OutOfMemoryError
        return real(x, rows)

    monkeypatch.setattr(management, "get_free_memory", lambda *_: transformer.net.bytes_of(130, 40, 4))
    monkeypatch.setattr(applying, "LEAST_ROWS", 16)
    monkeypatch.setitem(transformer.net.__dict__, "in_bands", bands)
    near(apply(transformer, picture, None, Settings()), want)
    assert tried == [48, 24]

    def never(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setitem(transformer.net.__dict__, "in_bands", never)
    with pytest.raises(
        torch.OutOfMemoryError, match="too little memory for a picture of 40x130, even 16 rows at a time"
    ):
        apply(transformer, picture, None, Settings())


# -------------------------------------------------------------------------------------------------------------- batches


def test_strength_and_colours(transformer):
    picture = pictures()
    want = wanted_of(picture)
    assert torch.equal(apply(transformer, picture, None, Settings(strength=0)), picture)
    near(apply(transformer, picture, None, Settings(strength=0.25)), (0.75 * picture + 0.25 * want).clamp(0, 1))
    kept = apply(transformer, picture, None, Settings(keep_colours=True))
    lightness = torch.tensor([0.299, 0.587, 0.114])
    near(kept, (picture + ((want - picture) @ lightness)[..., None]).clamp(0, 1))


def test_a_batch_is_each_of_its_pictures_and_has_three_channels(transformer):
    batch = torch.cat([pictures(3), torch.ones(3, 33, 46, 1)], -1)
    got = apply(transformer, batch, None, Settings())
    assert got.shape == (3, 33, 46, 3)
    for place in range(3):
        near(got[place : place + 1], apply(transformer, batch[place : place + 1], None, Settings()))


@pytest.fixture
def taped(monkeypatch):
    """As on a card of ours, where the CPU computes the ops' references and a recorder tapes them."""
    recorder = TapingRecorder()
    monkeypatch.setattr(management, "should_use_fp16", lambda *_: True)
    monkeypatch.setattr(fallback, "DEVICES", ("cuda", "cpu"))

    def of(model):
        for captures in captures_of(model.net):
            captures._recorder = recorder
        return model

    return of, recorder


def test_frames_of_one_size_are_captured_and_what_was_is_given_back(folder, taped):
    of, recorder = taped
    net, film = of(load(str(folder / "net.safetensors"))), pictures(6)
    plain = apply(load(str(folder / "net.safetensors")), film, None, Settings())
    assert torch.equal(apply(net, film, None, Settings()), plain)
    (captures,) = captures_of(net.net)
    assert (captures.captured, captures.replayed) == (1, 3) and captures.nbytes > NBYTES
    near(apply(net, film, None, Settings(rows=32)), plain, 0.02)
    assert not recorder.tapes, "bands are for where memory is short"
    apply(net, film, None, Settings())
    # What stock does where it wants room, and where it unloads a model.
    assert net.patcher.partially_unload(None, NBYTES // 2) > NBYTES and not recorder.tapes
    apply(net, film, None, Settings())
    clone = net.patcher.clone()
    assert len(recorder.tapes) == 1
    clone.detach()
    assert not recorder.tapes and captures.nbytes == 0
    assert torch.equal(apply(net, film, None, Settings()), plain)


def test_both_parts_of_an_adain_net_are_captured(folder, taped):
    of, recorder = taped
    net = of(load(str(folder / "decoder.safetensors"), str(folder / "vgg.pth")))
    film, look = pictures(6, 32, 48), pictures(1, 24, 38, seed=9)
    plain = apply(load(str(folder / "decoder.safetensors"), str(folder / "vgg.pth")), film, look, Settings())
    assert torch.equal(apply(net, film, look, Settings()), plain)
    assert [captures.replayed for captures in captures_of(net.net)] == [3, 3] and len(recorder.tapes) == 2
    assert type(net.net.encoder).__name__ == "FusedSequential"
    near(apply(net, film, look, Settings(rows=16)), plain, 0.02)
    assert not recorder.tapes


def test_where_stock_pages_vram_nothing_is_kept_from_node_to_node(folder, taped, monkeypatch):
    of, recorder = taped
    net = of(load(str(folder / "net.safetensors")))
    assert apply(net, pictures(4), None, Settings()).shape[0] == 4 and len(recorder.tapes) == 1
    giving_back.after_prompt()
    assert len(recorder.tapes) == 1
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    giving_back.after_prompt()
    assert not recorder.tapes
    apply(net, pictures(6), None, Settings())
    assert not recorder.tapes and captures_of(net.net)[0].replayed > 1


def test_what_does_not_move_keeps_a_share_of_the_picture_before(transformer):
    first, second = pictures(2).split(1)
    film = torch.cat([first, first.lerp(second, 0.02), second])
    plain, quiet = (apply(transformer, film, None, Settings(smooth=smooth)) for smooth in (0, 0.5))
    assert torch.equal(plain[0], quiet[0])
    moved = (film[1:] - film[:-1]).abs().amax(-1, keepdim=True).div(applying.MOVED).clamp(0, 1)
    before = quiet[0]
    for place in (1, 2):
        share = 0.5 * (1 - moved[place - 1])
        near(quiet[place], plain[place] * (1 - share) + before * share, 1e-4)
        before = quiet[place]
    assert (quiet[1] - quiet[0]).abs().mean() < 0.7 * (plain[1] - plain[0]).abs().mean()


def test_what_cannot_be_is_told(transformer, adain):
    look = pictures(1, 24, 24)
    for arguments, words in (
        ((transformer, pictures(1, 15, 40), None), "image: 1 pictures of 40x15, expected at least one of 16x16"),
        ((transformer, pictures(), look), "net.safetensors has one look of its own: disconnect style_image"),
        ((adain, pictures(), None), "decoder.safetensors takes the look from a picture: connect one to style_image"),
        ((adain, pictures(), look[:, :8]), "style_image: 1 pictures of 24x8"),
    ):
        with pytest.raises(ValueError, match=words):
            apply(*arguments, Settings())


@pytest.mark.parametrize("rows", [None, 32])
def test_an_interrupt_ends_it(transformer, rows):
    management.interrupt_current_processing(True)
    with pytest.raises(management.InterruptProcessingException):
        apply(transformer, pictures(1, 66, 20), None, Settings(rows=rows))
    assert not management.processing_interrupted()


def test_the_bar_goes_with_the_pictures(transformer, monkeypatch):
    seen = []
    monkeypatch.setattr("comfy.utils.PROGRESS_BAR_HOOK", lambda now, total, *_, **__: seen.append((now, total)))
    apply(transformer, pictures(2), None, Settings())
    assert seen == [(1, 2), (2, 2)]


# ---------------------------------------------------------------------------------------------------------------- files


def saved(folder, weights, name="a.pth"):
    torch.save(weights, folder / name)
    return str(folder / name)


def strays(weights):
    return weights | {f"in{n}.running_{kind}": torch.zeros(4) for n in (1, 2) for kind in ("mean", "var")}


WRAPPED = {
    "strays": strays,
    "module": lambda weights: {f"module.{name}": t for name, t in weights.items()},
    "state_dict": lambda weights: {"state_dict": weights, "epoch": 3},
    "all of it": lambda weights: {"model": {f"module.{name}": t for name, t in strays(weights).items()}},
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_files_as_people_save_them(tmp_path, kind):
    model = load(saved(tmp_path, WRAPPED[kind](made.transformer())))
    picture = pictures()
    near(apply(model, picture, None, Settings()), wanted_of(picture).clamp(0, 1))


def test_other_sizes_are_read_from_the_shapes(tmp_path):
    model = load(saved(tmp_path, made.transformer((8, 4, 12, 5, 7), blocks=0)), policy=KernelPolicy.of("off"))
    assert model.net.sizes.widths == (8, 4, 12, 5, 7) and model.net.sizes.blocks == 0 and model.policy.is_off


class Net(nn.Module):
    """What weights alone cannot be read from."""


def without(weights, *names):
    return {name: t for name, t in weights.items() if name not in names}


def changed(**others):
    return made.transformer() | {name.replace("__", "."): t for name, t in others.items()}


WRONG = {
    "cannot be read as weights alone": Net(),
    "holds no state dict": {"epoch": 3},
    "is no style network that FuseStream knows": {"layers.0.weight": torch.zeros(3)},
    "looks like a transformer net, but lacks in3.weight": without(made.transformer(), "in3.weight"),
    "has extra, which is no part of it": changed(extra=torch.zeros(1)),
    "lacks conv3.conv2d.weight": without(made.transformer(), "conv3.conv2d.weight"),
    r"in2.weight is \[9\], expected \[6\]": changed(in2__weight=torch.zeros(9)),
    r"residual blocks \[2\], expected them from 1 on": without(made.transformer(), "res1.conv1.conv2d.weight"),
    r"conv2.conv2d.weight is \[6, 5, 3, 3\], expected 4 channels": changed(
        conv2__conv2d__weight=torch.zeros(6, 5, 3, 3)
    ),
    "has conv2.conv2d.weight of shape": changed(conv2__conv2d__weight=torch.zeros(6)),
    "is an AdaIN decoder: choose the VGG": made.decoder(),
    "is the VGG that goes with an AdaIN decoder": made.vgg(),
}


@pytest.mark.parametrize("words", WRONG)
def test_other_files_are_refused_by_name(tmp_path, words):
    path = saved(tmp_path, WRONG[words])
    with pytest.raises(WrongFile, match=words) as told:
        load(path)
    assert path in str(told.value)


def test_encoders_that_do_not_go_with_a_decoder(tmp_path, folder):
    decoder = str(folder / "decoder.safetensors")
    with pytest.raises(WrongFile, match="is no VGG of an AdaIN network"):
        load(decoder, str(folder / "net.safetensors"))
    wider = saved(tmp_path, made.vgg((3, 4, 4, 6, 6, 8, 8, 8, 8, 16)))
    with pytest.raises(WrongFile, match=r"1.weight is \[8, 12, 3, 3\], expected \[8, 16, 3, 3\]"):
        load(decoder, wider)
    part = saved(tmp_path, without(made.vgg(), "12.bias"), "b.pth")
    with pytest.raises(WrongFile, match=r"an AdaIN network of 10 convolutions, but lacks 12\.bias"):
        load(decoder, part)


def test_nothing_of_a_file_is_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return exec, ("raise SystemExit",)

    with pytest.raises(WrongFile, match="runs code when it is opened"):
        load(saved(tmp_path, {"conv1": Bomb()}))


def test_in_halves_on_a_card_that_has_them(folder, monkeypatch):
    monkeypatch.setattr(management, "should_use_fp16", lambda *_: True)
    model = load(str(folder / "net.safetensors"))
    assert model.dtype is torch.float16 and loading.EXAMPLE.endswith("fp16.safetensors")
    picture = pictures()
    near(apply(model, picture, None, Settings()), wanted_of(picture).clamp(0, 1), 0.02)
    near(apply(model, pictures(1, 66, 40), None, Settings(rows=32)), wanted_of(pictures(1, 66, 40)).clamp(0, 1), 0.02)

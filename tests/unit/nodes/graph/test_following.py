"""A graph is read as it will run: behind switches, primitives and what stock works out, and not beyond what is known."""

from __future__ import annotations

import math
import time
import zlib
from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from comfy_extras import nodes_ace, nodes_flux, nodes_logic, nodes_math, nodes_post_processing, nodes_resolution
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from bed.templates.clip import write_clip
from fusestream.nodes.graph.links import Graph
from fusestream.nodes.graph.prompt import Kind, Output, Unknown
from fusestream.nodes.graph.samplings import Sampling, samplings
from fusestream.nodes.graph.sizes import SOUNDS
from fusestream.nodes.graph.values import DEEP, TEXTS
from nodes import ImageScale, ImageScaleBy

JS = Path(__file__).resolve().parents[4] / "nodes" / "web" / "js" / "open_graph.js"
CODE = {
    "ComfyNotNode": nodes_logic.NotNode,
    "ComfyAndNode": nodes_logic.AndNode,
    "ComfyMathExpression": nodes_math.MathExpressionNode,
    "ResolutionSelector": nodes_resolution.ResolutionSelector,
    "ImageScaleToTotalPixels": nodes_post_processing.ImageScaleToTotalPixels,
    "ResizeImageMaskNode": nodes_post_processing.ResizeImageMaskNode,
    "ImageScale": ImageScale,
    "ImageScaleBy": ImageScaleBy,
    "FluxKontextImageScale": nodes_flux.FluxKontextImageScale,
}
OUTPUTS = {
    "Loader": ("MODEL",),
    "Lora": ("MODEL",),
    "Vae": ("VAE",),
    "KSampler": ("LATENT",),
    "ARVideoI2V": ("MODEL", "LATENT"),
    "EmptyLatentImage": ("LATENT",),
    "EmptyAceStep1.5LatentAudio": ("LATENT",),
    "VAEEncode": ("LATENT",),
    "VAEDecode": ("IMAGE",),
    "LoadImage": ("IMAGE", "MASK"),
    "LoadVideo": ("VIDEO",),
    "GetVideoComponents": ("IMAGE", "AUDIO", "FLOAT"),
    "Canny": ("IMAGE",),
    "ImagePadForOutpaint": ("IMAGE", "MASK"),
    "Measure": ("BOOLEAN",),
}
KINDS = {
    **{name: Kind(outputs) for name, outputs in OUTPUTS.items()},
    **{name: Kind(("IMAGE",), code=code) for name, code in CODE.items()},
    "Save": Kind((), is_end=True),
}


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """Links are written `name="sampler.0"`, and `a__b` is the input a.b."""

    def meant(value: Any) -> Any:
        name, dot, place = str(value).rpartition(".")
        return [name, int(place)] if isinstance(value, str) and dot and place.isdecimal() else value

    named = {name.replace("__", "."): meant(value) for name, value in inputs.items()}
    return {"class_type": class_type, "inputs": named}


def switch(by: Any, **more: Any) -> dict[str, Any]:
    return node("ComfySwitchNode", switch=by, **{"on_false": "loader.0", "on_true": "lora.0", **more})


def sampler(model: str = "switch.0", latent: str = "empty.0", steps: Any = 20) -> dict[str, Any]:
    return node("KSampler", model=model, latent_image=latent, steps=steps, cfg=5.0)


def graph(**others: Any) -> Graph:
    """A LoRA that a switch puts before the sampler; nodes given take the place of these, or come to them."""
    prompt = {
        "loader": node("Loader"),
        "lora": node("Lora", model="loader.0"),
        "switch": switch(True),
        "empty": node("EmptyLatentImage", width=832, height=480),
        "sampler": sampler(),
        "vae": node("Vae"),
        "decode": node("VAEDecode", samples="sampler.0", vae="vae.0"),
        "save": node("Save", images="decode.0"),
        **others,
    }
    return Graph(prompt, KINDS.get)


def one(**others: Any) -> Sampling:
    (only,) = samplings(graph(**others), "loader")
    assert isinstance(only, Sampling), (only.key, only.node)
    return only


def reason(**others: Any) -> tuple[str, str, Any]:
    (only,) = samplings(graph(**others), "loader")
    assert isinstance(only, Unknown)
    return only.key, only.node, only.values.get("what")


TRUE, FALSE = node("PrimitiveBoolean", value=True), node("PrimitiveBoolean", value=False)


@pytest.mark.parametrize(
    ("by", "nodes", "is_through_lora"),
    [
        (True, {}, True),
        (False, {}, False),
        ("a.0", {"a": TRUE}, True),
        ("b.0", {"a": TRUE, "b": node("ComfyNotNode", value="a.0")}, False),
        ("c.0", {"a": TRUE, "b": FALSE, "c": node("ComfyAndNode", values__value0="a.0", values__value1="b.0")}, False),
        ("m.2", {"m": node("ComfyMathExpression", expression="a > 3", values__a=4)}, True),
        ("s.0", {"a": FALSE, "s": switch("a.0", on_false=True, on_true=False)}, True),
    ],
)
def test_a_switch_passes_on_what_it_will(by: Any, nodes: dict[str, Any], is_through_lora: bool) -> None:
    assert one(switch=switch(by), **nodes).between == (("lora",) if is_through_lora else ())
    assert list(graph(switch=switch(by), **nodes).vaes("loader")) == ["vae"]


def test_a_switch_that_is_decided_as_it_runs_is_named() -> None:
    measured = {"measure": node("Measure"), "switch": switch("measure.0")}
    found = list(samplings(graph(**measured), "loader"))
    assert [(told.key, told.node, told.values) for told in found if isinstance(told, Unknown)] == [
        ("computed", "measure", {"what": "switch"})
    ] * len(found)
    assert list(graph(**measured).vaes("loader")) == []


def test_a_soft_switch_takes_what_is_there() -> None:
    soft = node("ComfySoftSwitchNode", switch=True, on_false="loader.0")
    assert one(switch=soft).between == ()
    soft["inputs"]["on_true"] = ["lora", 0]
    assert one(switch=soft).between == ("lora",)


def test_what_a_switch_leaves_out_is_not_sampled() -> None:
    """Two samplers, of which a switch before the end takes one; and the loader of the other model."""
    two = {
        "other": node("Loader"),
        "second": sampler("other.0"),
        "switch": node("ComfySwitchNode", switch=True, on_false="sampler.0", on_true="second.0"),
        "sampler": sampler("loader.0"),
        "decode": node("VAEDecode", samples="switch.0", vae="vae.0"),
    }
    assert [told.sampler for told in samplings(graph(**two), "other")] == ["second"]
    assert list(samplings(graph(**two), "loader")) != [], "who is left out is told of as long as he is alone"
    assert list(graph(**two).vaes("other")) == ["vae"] and list(graph(**two).vaes("loader")) == []


def test_numbers_come_through_what_stock_works_out() -> None:
    selector = node("ResolutionSelector", aspect_ratio="16:9 (Widescreen)", megapixels=1.0, multiple=16)
    size = node("EmptyLatentImage", width="selector.0", height="selector.1")
    few = switch("fast.0", on_false=20, on_true=4)
    told = one(selector=selector, empty=size, fast=TRUE, few=few, sampler=sampler(steps="few.0"))
    assert told.pixels == (0, 768, 1360) and told.steps == 4
    wrong = node("ComfyMathExpression", expression="a / 0", values__a=1)
    assert reason(wrong=wrong, sampler=sampler(steps="wrong.1")) == ("computed", "wrong", "steps")


@pytest.mark.parametrize(
    ("formula", "steps"),
    [
        ("a ** 2", 16),
        ("pow(a, 2) + 1", 17),
        ("4000000 ** 4000000", None),  # half a minute of stock's own code
        ("2 ** a", None),
        ("(a ** 60) ** 60", None),
        ("pow(pow(4000000, 4000), 4000)", None),
        ("a" + " + 1" * 1000, None),
        ("(" * 500, None),
        ("", None),
        (7, None),
    ],
)
def test_a_formula_that_may_take_long_is_left_to_the_run(formula: Any, steps: int | None) -> None:
    start = time.monotonic()
    given = {
        "formula": node("ComfyMathExpression", expression=formula, values__a=4),
        "sampler": sampler(steps="formula.1"),
    }
    if steps is None:
        assert reason(**given) == ("computed", "formula", "steps")
    else:
        assert one(**given).steps == steps
    assert time.monotonic() - start < 5


def test_a_switch_that_a_decoded_size_decides_is_named() -> None:
    """Also where a number on its way is none, or where the size is known in the end: the graph was read by then."""
    measured = {
        "switch": switch("size.0"),
        "size": node("GetImageSize", image="pad.0"),
        "pad": node("ImagePadForOutpaint", image="first.0", left=math.inf, top=0, right=0, bottom=0),
        "first": node("VAEDecode", samples="other.0"),
        "other": sampler("loader.0"),
    }
    for left, named in ((math.inf, ("noValue", "pad")), (8, ("computed", "switch"))):
        measured["pad"]["inputs"]["left"] = left
        found = list(samplings(graph(**measured), "loader"))
        assert [(told.key, told.node) for told in found if isinstance(told, Unknown)] == [named]
        assert [told.sampler for told in found if isinstance(told, Sampling)] == ["other"]


def test_a_circle_and_a_long_way_are_no_value() -> None:
    again = node("PrimitiveInt", value="again.0")
    assert reason(again=again, sampler=sampler(steps="again.0")) == ("computed", "again", "steps")
    row = {f"n{i}": node("PrimitiveInt", value=f"n{i + 1}.0") for i in range(2 * DEEP)}
    assert reason(**row, sampler=sampler(steps="n0.0"))[0] == "computed"


def test_a_node_that_gives_the_model_on_with_a_latent_does_not_sample() -> None:
    begin = node("ARVideoI2V", model="lora.0", width=832, height=480, length=81)
    told = one(begin=begin, sampler=sampler("begin.0", "begin.1"))
    assert told.between == ("lora", "begin") and told.pixels == (81, 480, 832)


# ------------------------------------------------------------------------------------------------------------- pictures


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path))
    Image.new("RGB", (1200, 800)).save(tmp_path / "wide.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (1200, 800)).save(tmp_path / "turned.jpg", exif=turned)
    (tmp_path / "none.png").write_text("<html>404</html>", encoding="utf-8")
    return tmp_path


def encoded(scale: dict[str, Any] | None = None, image: str = "wide.png") -> dict[str, Any]:
    """A picture that is scaled and encoded."""
    return {
        "load": node("LoadImage", image=image),
        "scale": scale or node("Canny", image="load.0"),
        "encode": node("VAEEncode", pixels="scale.0"),
        "sampler": sampler(latent="encode.0"),
    }


@pytest.mark.parametrize(
    ("scale", "size"),
    [
        (None, (800, 1200)),
        (node("ImageScale", image="load.0", upscale_method="lanczos", width=600, height=0, crop="disabled"), (400, 600)),
        (node("ImageScaleBy", image="load.0", upscale_method="lanczos", scale_by=0.5), (400, 600)),
        (node("ResizeImageMaskNode", input="load.0", resize_type="scale longer dimension",
              resize_type__longer_size=600, scale_method="lanczos"), (400, 600)),
        (node("FluxKontextImageScale", image="load.0"), (832, 1248)),
        (node("ImagePadForOutpaint", image="load.0", left=8, top=16, right=24, bottom=32, feathering=9), (848, 1232)),
    ],
)  # fmt: skip
def test_the_size_of_a_picture_is_followed(pictures: Path, scale: dict[str, Any] | None, size: tuple[int, int]) -> None:
    assert one(**encoded(scale)).pixels == (0, *size)


def test_it_is_the_size_that_stock_scales_to(pictures: Path) -> None:
    scale = node("ImageScaleToTotalPixels", image="load.0", upscale_method="area", megapixels=0.1, resolution_steps=1)
    real = nodes_post_processing.ImageScaleToTotalPixels.execute(torch.zeros(1, 800, 1200, 3), "area", 0.1, 1).args[0]
    assert one(**encoded(scale)).pixels == (0, *real.shape[1:3])


def test_a_picture_stands_as_it_is_loaded(pictures: Path) -> None:
    assert one(**encoded(image="turned.jpg")).pixels == (0, 1200, 800)
    for name, key in (("gone.png", "noFile"), ("../secret.png", "noFile"), ("none.png", "computed"), (7, "noValue")):
        assert reason(**encoded(image=name))[:2] == (key, "load"), name


def test_the_size_of_a_picture_is_told_without_its_pixels(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are a bomb: a small file that claims to be large."""
    monkeypatch.setattr(PngImageFile, "load", lambda _self: pytest.fail("unpacked"))
    assert one(**encoded()).pixels == (0, 800, 1200)
    small = (pictures / "wide.png").read_bytes()
    for side, is_told in ((9000, True), (65500, False)):
        header = b"IHDR" + 2 * side.to_bytes(4, "big") + small[24:29]
        (pictures / "bomb.png").write_bytes(small[:12] + header + zlib.crc32(header).to_bytes(4, "big") + small[33:])
        if is_told:
            assert one(**encoded(image="bomb.png")).pixels == (0, side, side)
        else:
            assert reason(**encoded(image="bomb.png"))[:2] == ("computed", "load")


def test_frames_of_a_video_are_counted(pictures: Path) -> None:
    write_clip(pictures / "clip.mp4", side=64, frames=5)
    film = {"load": node("LoadVideo", file="clip.mp4"), "parts": node("GetVideoComponents", video="load.0")}
    found = graph(**film, size=node("GetImageSize", image="parts.0")).values
    assert [found.output(Output("size", place)) for place in range(3)] == [64, 64, 5]
    assert one(**encoded(node("Canny", image="parts.0")) | film).pixels == (5, 64, 64)


def test_what_was_sampled_is_decoded_and_sampled_again() -> None:
    twice = {
        "again": node("VAEEncode", pixels="larger.0"),
        "larger": node("ImageScaleBy", image="first.0", upscale_method="area", scale_by=1.5),
        "first": node("VAEDecode", samples="sampler.0"),
        "second": sampler("loader.0", "again.0"),
        "decode": node("VAEDecode", samples="second.0", vae="vae.0"),
    }
    found = {told.sampler: told for told in samplings(graph(**twice), "loader")}
    assert isinstance(found["second"], Sampling) and found["second"].pixels == (0, 720, 1248)
    in_circle = node("VAEDecode", samples="second.0")
    far = {told.sampler: told for told in samplings(graph(**twice | {"first": in_circle}), "loader")}
    assert isinstance(far["second"], Unknown)


def test_sound_has_stocks_shape() -> None:
    for name, code in (
        ("EmptyAceStepLatentAudio", nodes_ace.EmptyAceStepLatentAudio),
        ("EmptyAceStep1.5LatentAudio", nodes_ace.EmptyAceStep15LatentAudio),
    ):
        stocks = code.execute(seconds=12.3, batch_size=2).args[0]["samples"]
        assert (2, *SOUNDS[name](12.3)) == stocks.shape
    sound = node("EmptyAceStep1.5LatentAudio", seconds=12.0, batch_size=2)
    told = one(empty=sound)
    assert (told.batch, *told.sound) == (2, 64, 300)


def test_the_page_tells_the_texts_that_count() -> None:
    told = JS.read_text(encoding="utf-8").partition("const COMPUTES = [")[2].partition("]")[0]
    assert [name.strip('" \n') for name in told.split(",") if name.strip()] == list(TEXTS)

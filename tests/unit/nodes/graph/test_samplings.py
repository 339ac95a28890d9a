"""What a loader's model is sampled with, read from a graph: found where it stands in the graph, and named where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from fusestream.nodes.graph.links import Graph
from fusestream.nodes.graph.prompt import Kind, Unknown
from fusestream.nodes.graph.samplings import Sampling, samplings

KINDS = {
    "Loader": Kind(("MODEL",), is_plain=False),
    "Lora": Kind(("MODEL",), is_plain=False),
    "Merge": Kind(("MODEL",)),
    "Reroute": Kind(("*",), is_plain=False),
    "EmptyLatentImage": Kind(("LATENT",)),
    "WanImageToVideo": Kind(("CONDITIONING", "CONDITIONING", "LATENT")),
    "WanVaceToVideo": Kind(("CONDITIONING", "CONDITIONING", "LATENT", "INT")),
    "VAEEncode": Kind(("LATENT",)),
    "SetLatentNoiseMask": Kind(("LATENT",)),
    "LatentUpscale": Kind(("LATENT",)),
    "KSampler": Kind(("LATENT",)),
    "KSamplerAdvanced": Kind(("LATENT",)),
    "SamplerCustomAdvanced": Kind(("LATENT", "LATENT")),
    "TheirSampler": Kind(("LATENT",), is_plain=False),
    "BasicGuider": Kind(("GUIDER",)),
    "CFGGuider": Kind(("GUIDER",)),
    "DualCFGGuider": Kind(("GUIDER",)),
    "TheirGuider": Kind(("GUIDER",)),
    "BasicScheduler": Kind(("SIGMAS",)),
    "ManualSigmas": Kind(("SIGMAS",)),
    "SplitSigmas": Kind(("SIGMAS", "SIGMAS")),
    "PrimitiveInt": Kind(("INT",)),
    "GetImageSize": Kind(("INT", "INT", "INT")),
    "Text": Kind(("CONDITIONING",)),
    "Live": Kind(("IMAGE", "VIDEO"), is_plain=False),
    "Plan": Kind(("STRING", "IMAGE"), is_plain=False),
}
VIDEO = {"width": 832, "height": 480, "length": 81, "batch_size": 1}


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """Links are written `name="sampler.0"`."""

    def meant(value: Any) -> Any:
        name, dot, place = str(value).rpartition(".")
        return [name, int(place)] if isinstance(value, str) and dot and place.isdecimal() else value

    return {"class_type": class_type, "inputs": {name: meant(value) for name, value in inputs.items()}}


def found(**others: Any) -> list[Sampling | Unknown]:
    """Text to video; nodes given take the place of these, or None away."""
    prompt = {
        "loader": node("Loader"),
        "lora": node("Lora", model="loader.0"),
        "empty": node("EmptyLatentImage", **VIDEO),
        "sampler": node("KSampler", model="lora.0", latent_image="empty.0", steps=20, cfg=5.0, denoise=1.0),
        **others,
    }
    graph = Graph({name: one for name, one in prompt.items() if one is not None}, KINDS.get)
    return list(samplings(graph, "loader"))


def one(**others: Any) -> Sampling:
    (only,) = found(**others)
    assert isinstance(only, Sampling), (only.key, only.node)  # type: ignore[union-attr]
    return only


def reason(**others: Any) -> tuple[str, str]:
    (only,) = found(**others)
    assert isinstance(only, Unknown)
    return only.key, only.node


def test_of_one_sampler() -> None:
    assert one() == Sampling("sampler", ("lora",), (81, 480, 832), 1, 0, 20, 2)
    through = one(again=node("Reroute", value="lora.0"), sampler=node(
        "KSampler", model="again.0", latent_image="empty.0", steps=20, cfg=1.0))  # fmt: skip
    assert through.between == ("lora", "again") and through.prompts == 1


def test_nothing_takes_it() -> None:
    assert found(lora=None, sampler=None) == []
    assert found(lora=None, sampler=None, plan=node("Plan", model="loader.0")) == [], "who only looks does not sample"


@pytest.mark.parametrize(
    ("steps", "first", "last", "computed"), [(20, 0, 10000, 20), (4, 0, 2, 2), (4, 2, 10000, 2), (20, 5, 12, 7)]
)
def test_some_of_the_steps(steps: int, first: int, last: int, computed: int) -> None:
    inputs = {"steps": steps, "start_at_step": first, "end_at_step": last, "cfg": 3.5}
    assert one(sampler=node("KSamplerAdvanced", model="lora.0", latent_image="empty.0", **inputs)).steps == computed


def test_a_second_sampler_goes_on_with_the_latents_of_the_first() -> None:
    second = node("KSampler", model="loader.0", latent_image="sampler.0", steps=8, cfg=1.0)
    near, far = found(second=second)
    assert isinstance(near, Sampling) and isinstance(far, Sampling)
    assert (near.sampler, near.steps, far.sampler, far.steps) == ("second", 8, "sampler", 20)
    assert near.pixels == far.pixels


CUSTOM = {
    "guider": node("CFGGuider", model="lora.0", cfg=4.0),
    "sigmas": node("BasicScheduler", model="lora.0", steps=30, denoise=1.0),
    "sampler": node("SamplerCustomAdvanced", guider="guider.0", sigmas="sigmas.0", latent_image="empty.0"),
}


def test_of_a_guider_and_sigmas() -> None:
    assert one(**CUSTOM) == Sampling("sampler", ("lora", "guider"), (81, 480, 832), 1, 0, 30, 2)
    assert one(**CUSTOM | {"guider": node("BasicGuider", model="lora.0")}).prompts == 1
    split = node("SplitSigmas", sigmas="sigmas.0", step=12)
    for place, steps in ((0, 12), (1, 18)):
        sampler = node("SamplerCustomAdvanced", guider="guider.0", sigmas=f"split.{place}", latent_image="empty.0")
        assert one(**CUSTOM | {"split": split, "sampler": sampler}).steps == steps
    for between, negative, prompts in ((5.0, 2.0, 3), (5.0, 1.0, 2), (1.0, 1.0, 1)):
        three = node("DualCFGGuider", model="lora.0", cfg_conds=between, cfg_cond2_negative=negative)
        assert one(**CUSTOM | {"guider": three}).prompts == prompts
    assert reason(**CUSTOM | {"guider": node("TheirGuider", model="lora.0")}) == ("guidanceOf", "guider")
    assert reason(**CUSTOM | {"sigmas": node("ManualSigmas", sigmas="1, 0.5")}) == ("stepsOf", "sigmas")


def test_numbers_of_their_own_nodes() -> None:
    side = node("PrimitiveInt", value=1024)
    size = node("EmptyLatentImage", width="side.0", height="side.0", batch_size=2)
    picture = one(side=side, empty=size)
    assert picture.pixels == (0, 1024, 1024) and picture.batch == 2
    measured = node("GetImageSize")
    (only,) = found(side=measured, empty=size)
    assert isinstance(only, Unknown)
    assert (only.key, only.node, only.values, only.sampler) == ("computed", "side", {"what": "width"}, "sampler")


def test_latents_that_are_made_on_the_way() -> None:
    masked = node("SetLatentNoiseMask", samples="empty.0")
    sampler = {"model": "lora.0", "steps": 20, "cfg": 5.0}
    assert one(masked=masked, sampler=node("KSampler", latent_image="masked.0", **sampler)).pixels == (81, 480, 832)
    larger = node("LatentUpscale", samples="empty.0", width=1280, height=720)
    assert one(larger=larger, sampler=node("KSampler", latent_image="larger.0", **sampler)).pixels == (0, 720, 1280)
    encoded = node("VAEEncode")
    assert reason(empty=encoded) == ("sizeOf", "empty")
    assert reason(sampler=node("KSampler", **sampler)) == ("noLatent", "sampler")
    video = node("WanImageToVideo", **VIDEO)
    assert one(empty=video, sampler=node("KSampler", latent_image="empty.2", **sampler)).more == 0
    vace = node("WanVaceToVideo", reference_image="picture.0", **VIDEO)
    assert one(picture=node("Live"), empty=vace, sampler=node("KSampler", latent_image="empty.2", **sampler)).more == 1


def test_what_is_not_plain_is_named() -> None:
    assert reason(sampler=node("TheirSampler", model="lora.0", latent_image="empty.0", steps=4, cfg=1.0)) == (
        "samplesItself", "sampler",
    )  # fmt: skip
    assert reason(text=node("Text"), sampler=node("Live", model="lora.0", positive="text.0")) == (
        "samplesItself",
        "sampler",
    )
    assert reason(other=node("Loader"), sampler=None, lora=node("Merge", model1="loader.0", model2="other.0")) == (
        "twoModels", "lora",
    )  # fmt: skip
    assert reason(sampler=node("KSampler", model="lora.0", latent_image="empty.0", steps=0, cfg=1.0)) == (
        "noSteps", "sampler",
    )  # fmt: skip
    for odd in (None, True, "20", [], {}):
        key, _ = reason(sampler=node("KSampler", model="lora.0", latent_image="empty.0", steps=odd, cfg=1.0))
        assert key == "noValue"


def test_a_circle_is_no_way() -> None:
    again = node("KSampler", model="lora.0", latent_image="sampler.0", steps=1, cfg=1.0)
    assert reason(sampler=again) == ("sizeOf", "sampler")
    found(lora=node("Lora", model="lora.0"), sampler=None)

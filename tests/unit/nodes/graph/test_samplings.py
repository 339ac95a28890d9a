"""What a loader's model is sampled with, read from a graph: found where it stands in the graph, and named where it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fusestream.nodes.graph import as_sampler as module
from fusestream.nodes.graph import queued
from fusestream.nodes.graph.as_sampler import AsSampler, as_sampler
from fusestream.nodes.graph.links import Graph
from fusestream.nodes.graph.prompt import Kind, Unknown
from fusestream.nodes.graph.samplings import Sampling, samplings
from fusestream.nodes.reports import Plan

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


# ----------------------------------------------------------------------------------------------------- beside a sampler

ENDS = {"Plan": Kind(("STRING", "IMAGE"), is_end=True, is_plain=False), "Save": Kind((), is_end=True)}


def planned(**others: Any) -> dict[str, Any]:
    """Text to video with a plan beside its sampler; nodes given take the place of these, or None away."""
    found = {
        "loader": node("Loader"),
        "lora": node("Lora", model="loader.0"),
        "empty": node("EmptyLatentImage", **VIDEO),
        "sampler": node("KSampler", model="lora.0", latent_image="empty.0", steps=30, cfg=1.0),
        "save": node("Save", latent="sampler.0"),
        "plan": node("Plan", model="lora.0", latent="empty.0", steps=0, guidance=0.0),
        **others,
    }
    return {name: one for name, one in found.items() if one is not None}


def beside(**others: Any) -> AsSampler:
    return as_sampler(Graph(planned(**others), {**KINDS, **ENDS}.get), "plan")


def test_a_plan_has_the_numbers_of_the_one_sampler_beside_it() -> None:
    assert beside() == AsSampler(30, 1)
    assert beside(plan=node("Plan", model="loader.0")) == AsSampler(30, 1), "nodes that change it lie between"
    assert beside(save=None) == AsSampler(30, 1), "what is not saved yet"
    assert beside(**CUSTOM) == AsSampler(30, 2)
    spare = node("KSampler", model="lora.0", latent_image="empty.0", steps=8, cfg=5.0)
    assert beside(spare=spare) == AsSampler(30, 1), "one that does not run"


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"sampler": None, "save": None}, module.NO_SAMPLER),
        ({"plan": node("Plan")}, module.NO_SAMPLER),
        ({"two": node("KSampler", model="loader.0", latent_image="sampler.0", steps=4, cfg=1.0),
          "save": node("Save", latent="two.0"), "plan": node("Plan", model="loader.0")}, module.SEVERAL),
        ({"sampler": node("TheirSampler", model="lora.0", latent_image="empty.0", steps=4)}, module.OF_ITS_OWN),
    ],
)  # fmt: skip
def test_where_nothing_is_known_the_reason_is(others: dict[str, Any], why: str) -> None:
    assert beside(**others) == AsSampler(None, None, why)


def test_a_number_that_is_worked_out_leaves_the_other() -> None:
    sampler = node("KSampler", model="lora.0", latent_image="empty.0", steps="size.0", cfg=4.0)
    assert beside(size=node("GetImageSize"), sampler=sampler) == AsSampler(None, 2, module.AS_IT_RUNS)


@pytest.mark.parametrize(
    ("steps", "guidance", "others", "asked", "assumed"),
    [
        (0, 0.0, {}, (30, 1), ""),
        (12, 0.0, {}, (12, 1), ""),
        (0, 3.5, {}, (30, 2), ""),
        (20, 5.0, {}, (20, 2), ""),
        (0, 1.0, {"sampler": None}, (20, 1), "Assumed: 20 steps, because no sampler takes this MODEL. Set them on this node."),
        (0, 0.0, {"sampler": None}, (20, 2), "Assumed: 20 steps and a guidance of 5.0, because no sampler takes this MODEL. "
                                             "Set them on this node."),
    ],
)  # fmt: skip
def test_what_the_user_sets_counts_and_else_the_sampler(
    monkeypatch: pytest.MonkeyPatch, steps: int, guidance: float, others: dict[str, Any], asked: Any, assumed: str
) -> None:
    monkeypatch.setattr(queued, "kind_of", {**KINDS, **ENDS}.get)
    monkeypatch.setattr(Plan, "hidden", SimpleNamespace(prompt=planned(**others), unique_id="plan"))
    told = Plan.asked(Plan.Inputs(None, None, steps, guidance))
    assert told == (*asked, assumed)

"""Which VAEs a model's latents meet, read from a graph: found where the way is plain, and not a word where it is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bed.paths import ROOT
from bed.templates.signatures import signature
from fusestream.nodes.graph.links import Graph
from fusestream.nodes.graph.prompt import Kind

KINDS = {
    "Model": Kind(("MODEL",), is_plain=False),
    "Vae": Kind(("VAE",), is_plain=False),
    "TwoInOne": Kind(("MODEL", "CLIP", "VAE")),
    "Lora": Kind(("MODEL",)),
    "Kernels": Kind(("VAE",), is_plain=False),
    "Empty": Kind(("LATENT",)),
    "Image": Kind(("IMAGE", "MASK")),
    "Encode": Kind(("LATENT",)),
    "ImageToVideo": Kind(("CONDITIONING", "CONDITIONING", "LATENT")),
    "Sampler": Kind(("LATENT",)),
    "Guider": Kind(("GUIDER",)),
    "GuidedSampler": Kind(("LATENT", "LATENT")),
    "Upscale": Kind(("LATENT",)),
    "Decode": Kind(("IMAGE",)),
    "Save": Kind((), is_end=True),
    "SaveLatent": Kind(("LATENT",), is_end=True),
    "Blend": Kind(("LATENT",)),
    "Train": Kind(("MODEL",)),
    "Live": Kind(("IMAGE", "VIDEO")),
    "TheirLive": Kind(("IMAGE",), is_plain=False),
    "Device": Kind(("VAE",)),
    "Number": Kind(("INT",)),
    "Reroute": Kind(("*",), is_plain=False),
    "Switch": Kind(("*",)),
    "TheirUpscale": Kind(("LATENT",), is_plain=False),
    "TheirSampler": Kind(("MODEL", "LATENT", "VAE"), is_plain=False),
    "TheirVae": Kind(("VAE",), is_plain=False),
}


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    """Links are written `name="77:8.0"`, of node 77:8 its output 0."""

    def meant(value: Any) -> Any:
        name, dot, place = str(value).rpartition(".")
        return [name, int(place)] if dot and place.isdecimal() else value

    return {"class_type": class_type, "inputs": {name: meant(value) for name, value in inputs.items()}}


def plain(**others: Any) -> dict[str, Any]:
    """Text to video; nodes given take the place of these, or None away."""
    prompt = {
        "model": node("Model", model_name="x.safetensors"),
        "vae": node("Vae", vae_name="y.safetensors"),
        "empty": node("Empty", width=64),
        "sampler": node("Sampler", model="model.0", latent_image="empty.0", seed=1),
        "decode": node("Decode", samples="sampler.0", vae="vae.0"),
        "save": node("Save", images="decode.0"),
        **others,
    }
    return {name: one for name, one in prompt.items() if one is not None}


def met(prompt: dict[str, Any], loader: str = "model", ends: set[str] | None = None) -> list[str]:
    return list(Graph(prompt, KINDS.get, ends).vaes(loader))


def test_the_decoder_of_what_is_sampled() -> None:
    assert met(plain()) == ["vae"]


def test_the_vae_of_what_is_sampled_and_decoded_in_one_node() -> None:
    for kind, found in (("Live", ["vae"]), ("TheirLive", [])):
        live = node(kind, model="model.0", vae="vae.0")
        assert met(plain(live=live, save=node("Save", images="live.0"), sampler=None, empty=None, decode=None)) == found


def test_through_loras_a_guider_an_upscaler_a_reroute_and_a_subgraph() -> None:
    prompt = {
        "1": node("Model"),
        "2": node("Vae"),
        "3": node("Kernels", vae="2.0"),
        "77:1": node("Lora", model="1.0"),
        "77:2": node("Reroute", anything="77:1.0"),
        "77:8": node("Guider", model="77:2.0"),
        "77:9": node("GuidedSampler", guider="77:8.0", latent_image="4.0"),
        "4": node("Empty"),
        "5": node("Upscale", samples="77:9.1"),
        "6": node("Reroute", anything="5.0"),
        "7": node("Reroute", anything="3.0"),
        "8": node("Decode", samples="6.0", vae="7.0"),
        "9": node("Save", images="8.0"),
    }
    assert met(prompt, "1") == ["2"]


def test_who_encoded_what_a_sampler_begins_with() -> None:
    prompt = plain(
        image=node("Image"),
        encode=node("Encode", pixels="image.0", vae="other.0"),
        other=node("Vae"),
        larger=node("Upscale", samples="encode.0"),
        sampler=node("Sampler", model="model.0", latent_image="larger.0"),
    )
    assert sorted(met(prompt)) == ["other", "vae"]


def test_of_an_empty_latent_only_the_size_counts() -> None:
    """A VAE that is there for an image that is not."""
    begun = {"sampler": node("Sampler", model="model.0", positive="begin.0", latent_image="begin.2")}
    without = plain(**begun, other=node("Vae"), begin=node("ImageToVideo", vae="other.0"))
    assert met(without) == ["vae"]
    image = {"image": node("Image"), "begin": node("ImageToVideo", vae="other.0", start_image="image.0")}
    assert sorted(met({**without, **image})) == ["other", "vae"]


def test_each_model_of_two_meets_its_own() -> None:
    second = {
        "model2": node("Model"),
        "vae2": node("Vae"),
        "sampler2": node("Sampler", model="model2.0", latent_image="empty.0"),
        "decode2": node("Decode", samples="sampler2.0", vae="vae2.0"),
        "save2": node("Save", images="decode2.0"),
    }
    assert met(plain(**second)) == ["vae"]
    assert met(plain(**second), "model2") == ["vae2"]


def test_latents_that_go_on_to_another_models_sampler_are_that_ones() -> None:
    second = {
        "model2": node("Model"),
        "sampler2": node("Sampler", model="model2.0", latent_image="sampler.0"),
        "decode": node("Decode", samples="sampler2.0", vae="vae.0"),
    }
    assert met(plain(**second)) == []
    assert met(plain(**second), "model2") == ["vae"]


UNCLEAR = {
    "a switch between two VAEs": {
        "vae2": node("Vae"),
        "either": node("Switch", on_true="vae.0", on_false="vae2.0"),
        "decode": node("Decode", samples="sampler.0", vae="either.0"),
    },
    "a switch between two models": {
        "model2": node("Model"),
        "either": node("Switch", on_true="model.0", on_false="model2.0"),
        "sampler": node("Sampler", model="either.0", latent_image="empty.0"),
    },
    "a switch between two latents": {
        "either": node("Switch", on_true="sampler.0", on_false="empty.0"),
        "decode": node("Decode", samples="either.0", vae="vae.0"),
    },
    "a switch that another node sets": {
        "number": node("Number"),
        "either": node("Switch", on_true="sampler.0", switch="number.0"),
        "decode": node("Decode", samples="either.0", vae="vae.0"),
    },
    "two models in one node": {
        "model2": node("Model"),
        "merged": node("Lora", model1="model.0", model2="model2.0"),
        "sampler": node("Sampler", model="merged.0", latent_image="empty.0"),
    },
    "two models that sample as one, on what another VAE encoded": {
        "model2": node("Model"),
        "sampler": node("Sampler", high="model.0", low="model2.0", latent_image="encode.0"),
        "image": node("Image"),
        "encode": node("Encode", pixels="image.0", vae="vae.0"),
        "decode": None,
        "save": node("SaveLatent", samples="sampler.0"),
    },
    "what another model sampled first": {
        "model2": node("Model"),
        "sampler2": node("Sampler", model="model2.0", latent_image="encode.0"),
        "image": node("Image"),
        "encode": node("Encode", pixels="image.0", vae="vae.0"),
        "sampler": node("Sampler", model="model.0", latent_image="sampler2.0"),
        "decode": None,
        "save": node("SaveLatent", samples="sampler.0"),
    },
    "latents made of two": {
        "encode": node("Encode", vae="vae.0"),
        "blend": node("Blend", samples1="sampler.0", samples2="encode.0"),
        "decode": node("Decode", samples="blend.0", vae="vae.0"),
    },
    "a model made of latents": {
        "trained": node("Train", latents="sampler.0"),
        "sampler2": node("Sampler", model="trained.0", latent_image="empty.0"),
        "decode": node("Decode", samples="sampler2.0", vae="vae.0"),
    },
    "latents made of latents by another pack": {
        "other": node("TheirUpscale", samples="sampler.0"),
        "decode": node("Decode", samples="other.0", vae="vae.0"),
    },
    "a VAE made of a VAE by another pack": {
        "image": node("Image"),
        "other": node("TheirVae", vae="vae.0", image="image.0"),
        "decode": node("Decode", samples="sampler.0", vae="other.0"),
    },
    "a VAE that came through a sampler of another pack": {
        "sampler": node("TheirSampler", model="model.0", latent="empty.0", vae="vae.0"),
        "decode": node("Decode", samples="sampler.1", vae="sampler.2"),
    },
    "two VAEs in one node": {
        "vae2": node("Vae"),
        "decode": node("Decode", samples="sampler.0", vae="vae.0", audio_vae="vae2.0"),
    },
    "a node that nobody knows": {"decode": node("Unheard", samples="sampler.0", vae="vae.0")}
    | {
        "save": node("Save", images="other.0"),
        "other": node("Image"),
    },
    "a decoder that nothing is made of": {"save": node("Save", images="image.0"), "image": node("Image")},
    "nothing to decode": {"decode": None, "save": node("SaveLatent", samples="sampler.0"), "vae": None},
    "a link to nowhere": {"decode": node("Decode", samples="sampler.0", vae="gone.0")},
    "an output that is not there": {"decode": node("Decode", samples="sampler.7", vae="vae.0")},
    "an output of a VAE that is not there": {"decode": node("Decode", samples="sampler.0", vae="vae.7")},
    "an output before the first": {
        "decode": {"class_type": "Decode", "inputs": {"samples": ["sampler", 0], "vae": ["vae", -1]}}
    },
    "a ring": {
        "one": node("Reroute", anything="two.0"),
        "two": node("Reroute", anything="one.0"),
        "decode": node("Decode", samples="sampler.0", vae="one.0"),
    },
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_nothing_is_said_of(case: str) -> None:
    assert met(plain(**UNCLEAR[case])) == []


def test_only_what_is_to_run_counts() -> None:
    """The front end may run some of the nodes that save alone."""
    prompt = plain(latents=node("SaveLatent", samples="sampler.0"))
    assert met(prompt) == ["vae"] and met(prompt, ends={"save"}) == ["vae"]
    assert met(prompt, ends={"latents"}) == []


def test_a_vae_that_stock_moves_is_the_same() -> None:
    moved = {"number": node("Number"), "moved": node("Device", vae="vae.0", device="number.0")}
    assert met(plain(**moved, decode=node("Decode", samples="sampler.0", vae="moved.0"))) == ["vae"]


def test_a_sampler_of_another_pack_is_a_sampler() -> None:
    theirs = node("TheirSampler", model="model.0", latent="empty.0")
    assert met(plain(sampler=theirs, decode=node("Decode", samples="sampler.1", vae="vae.0"))) == ["vae"]


def test_a_whole_checkpoints_own_vae_is_found() -> None:
    prompt = plain(
        whole=node("TwoInOne", ckpt_name="x"), decode=node("Decode", samples="sampler.0", vae="whole.2"), vae=None
    )
    assert met(prompt) == ["whole"]


# Of those in which a diffusion model samples.
EXAMPLES = [
    path
    for path in sorted((ROOT / "workflows" / "api").glob("*.json"))
    if "FuseStreamVAELoader" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_model_of_the_examples_meets_its_vae(path: Any) -> None:
    prompt = json.loads(path.read_text(encoding="utf-8"))
    types = {one["class_type"] for one in prompt.values()}
    kinds = {
        name: Kind(tuple(type for _, type in signature(name).outputs), is_end=name.startswith("Save")) for name in types
    }
    graph = Graph(prompt, kinds.get)
    whole = "FuseStreamCheckpointLoader"
    (vae,) = (name for name, one in prompt.items() if one["class_type"] in ("FuseStreamVAELoader", whole))
    models = [name for name, one in prompt.items() if one["class_type"] in ("FuseStreamDiffusionModelLoader", whole)]
    found = {vae for model in models for vae in graph.vaes(model)}
    assert found == {vae}

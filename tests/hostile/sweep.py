"""Every node of ComfyUI's that takes a MODEL and gives one, and how to put it into a graph.

What a node asks for is read from the server's own list. A link gets what the example has or a stock node makes from nothing; a
widget its default. What none of them can give stands in `NOT_TRIED`, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bed.client import Workflow

Info = Mapping[str, Any]  # one node, as `/object_info` describes it
Link = list[Any]  # a node's name, and which of its outputs
Links = Mapping[str, Link]  # by type

MODEL = "MODEL"
TRIED = "tried"  # what the node is called in the graph
# What a link of each type is taken from, beside the model: a node that needs nothing but what the example has.
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "VAE": ("VAELoader", {"vae_name": "wan_vae_fp16.safetensors"}),
    "IMAGE": ("EmptyImage", {"width": 64, "height": 64, "batch_size": 1, "color": 0x808080}),
    "LATENT_OPERATION": ("LatentOperationTonemapReinhard", {"multiplier": 1.0}),
}
# In place of a default: sizes of the tiny example, and numbers with which a merge is not just its first model.
WIDGETS: dict[str, Any] = {"width": 64, "height": 64, "length": 5, "lora_name": "lora_ab_fp16.safetensors"}
MERGED = 0.5

NEEDS_A_PATCH = "needs a model patch, which there are for other models only"
NOT_TRIED = {
    "AnimaLLLiteApply": NEEDS_A_PATCH,
    "QwenImageDiffsynthControlnet": NEEDS_A_PATCH,
    "SUPIRApply": NEEDS_A_PATCH,
    "USOStyleReference": NEEDS_A_PATCH,
    "WanInfiniteTalkToVideo": "needs a model patch and encoded speech",
    "WanUni3CControlnetApply": NEEDS_A_PATCH,
    "ZImageFunControlnet": NEEDS_A_PATCH,
    "HypernetworkLoader": "needs a hypernetwork, which there are for U-Nets only",
    "LTXVReferenceAudio": "needs a sound and a VAE for sounds",
    "LoraModelLoader": "needs a LoRA that was trained or read in the same graph",
    "TorchCompileModel": "compiles for minutes; tests/unit/fusion/patcher/test_streaming_patcher.py has it",
}
# Where nodes come from that change weights, or where they are.
TOUCHES_WEIGHTS = ("lora", "multigpu", "compute", "WAN2_1", "Merge")
ONE_OF_MANY = "nodes_model_merging_model_specific"  # all the same but for the names of the layers


class Lacking(Exception):
    """Nothing can be connected to this input."""


def found(nodes: Mapping[str, Info]) -> dict[str, Info]:
    """Those that take a MODEL and give one. Not our own."""
    return {
        name: info
        for name, info in sorted(nodes.items())
        if MODEL in info["output"]
        and not info["python_module"].startswith("custom_nodes")
        and any(type_ == MODEL for _, type_, _ in _inputs(info))
    }


def touches_weights(name: str, info: Info) -> bool:
    """Whether it patches, merges or moves them."""
    if info["python_module"].endswith(ONE_OF_MANY):
        return name.endswith("WAN2_1")
    return any(word.lower() in name.lower() for word in TOUCHES_WEIGHTS)


def insert(workflow: Workflow, name: str, info: Info, links: Links, models: Sequence[Link]) -> None:
    """Put the node before whatever takes the first of these models. links: what others there are, by type."""
    takers = [
        (node["inputs"], key)
        for node in workflow.values()
        for key, value in node["inputs"].items()
        if value == models[0]
    ]
    add(workflow, name, info, links, models)
    for inputs, key in takers:
        inputs[key] = [TRIED, list(info["output"]).index(MODEL)]


def add(workflow: Workflow, name: str, info: Info, links: Links, models: Sequence[Link]) -> None:
    """The node, with all that it asks for; nothing is connected to it."""
    left = list(models)
    inputs: dict[str, Any] = {}
    for key, type_, options in _inputs(info):
        if type_ == MODEL:
            inputs[key] = left.pop(0)
        elif isinstance(type_, str) and type_ in links:
            inputs[key] = links[type_]
        elif isinstance(type_, str) and type_ in SOURCES:
            class_type, values = SOURCES[type_]
            workflow[type_] = {"class_type": class_type, "inputs": dict(values)}
            inputs[key] = [type_, 0]
        else:
            inputs[key] = _widget(name, key, type_, options)
    workflow[TRIED] = {"class_type": name, "inputs": inputs}


def _inputs(info: Info) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """The required ones: name, type and options."""
    for key, (type_, *rest) in info["input"].get("required", {}).items():
        yield key, type_, rest[0] if rest else {}


def _widget(name: str, key: str, type_: Any, options: Mapping[str, Any]) -> Any:
    if key in WIDGETS:
        return WIDGETS[key]
    if name.startswith("ModelMerge") and type_ == "FLOAT":
        return MERGED
    if "default" in options:
        return options["default"]
    choices = type_ if isinstance(type_, list) else options.get("options", ())
    if not choices:
        raise Lacking(f"{name}.{key}: {type_}")
    return choices[0]

"""Inputs of a run, and how its model is prepared: prompts, LoRAs, cold files, several cards, timed calls."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from ...fusion.families.wan.cost import TEXT_TOKENS
from . import pictures
from .row_types import Model
from .without_family import NETWORKS

POOLED = 1280  # width of what goes with an SDXL prompt's tokens


def split(model: Any, cards: int, *, pretended: bool) -> Any:
    """The model on so many cards, as stock's node makes it. pretended: they are the CPU, by names that torch tells apart."""
    management: Any = importlib.import_module("comfy.model_management")
    node = importlib.import_module("comfy_extras.nodes_multigpu").MultiGPUCFGSplitNode
    found = management.get_all_torch_devices
    if pretended:
        import torch  # noqa: PLC0415

        names = [torch.device("cpu"), *(torch.device("cpu", i) for i in range(cards - 1))]
        management.get_all_torch_devices = lambda exclude_current=False: names[exclude_current:]
    try:
        model = node.execute(model, cards).result[0]
    finally:
        management.get_all_torch_devices = found
    others = len(model.get_additional_models_with_key("multigpu"))
    if others != cards - 1:
        raise RuntimeError(f"of {cards} cards stock found {1 + others}")
    return model


def prompt_shape(model: Model, net: Any) -> tuple[int, int]:
    """Tokens of a made-up prompt, and their width."""
    if model in WIDTHS:
        return NETWORKS[model].words, WIDTHS[model](net)
    if model in pictures.KLEIN:
        return pictures.KLEIN[model].tokens, net.txt_in.in_features
    if model == "z_image":
        return pictures.Z_IMAGE.tokens, net.cap_embedder[1].in_features
    if model in pictures.UNETS:
        of_text = next(one for name, one in net.named_modules() if name.endswith("attn2.to_k"))
        return pictures.UNETS[model].tokens, of_text.in_features
    return TEXT_TOKENS, net.text_embedding[0].in_features


# Of Qwen-Image and of models that no family computes: width of the prompt.
WIDTHS: dict[Model, Callable[[Any], int]] = {
    "qwen_image": lambda net: net.txt_in.in_features,
    "hunyuan_video_15": lambda net: net.txt_in.input_embedder.in_features,
    "ltx23": lambda net: net.inner_dim + net.audio_inner_dim,
    "minimax_h3": lambda net: net.condition_proj.in_features,
    "krea2": lambda net: net.txtdim * net.txtlayers,
    "anima": lambda net: net.blocks[0].cross_attn.k_proj.in_features,
}


def beside_prompt(model: Model, tokens: int, generator: Any) -> dict[str, Any]:
    """What stock's text encoders, or nodes, hand over with a prompt."""
    import torch  # noqa: PLC0415

    if model == "ltx23":
        return {"unprocessed_ltxav_embeds": True, "frame_rate": 25}
    if model == "hunyuan_video_15":
        return {"pooled_output": None}
    if model == "anima":
        return {"t5xxl_ids": torch.arange(1, tokens + 1), "t5xxl_weights": torch.ones(tokens)}
    if model == "sdxl":
        return {"pooled_output": torch.randn(1, POOLED, generator=generator)}
    return {}


def qwen3_tokens(number: int) -> dict[str, Any]:
    """A prompt of ids that every vocabulary has."""
    return {"qwen3_4b": [[((3 * i + number) % 200, 1.0) for i in range(TEXT_TOKENS)]]}


def time_forwards(model: Any, clock: Callable[[], float]) -> list[float]:
    """Seconds of each call of stock's model from now on. Nothing is put on the network itself: a hook would keep it from being
    captured."""
    seconds: list[float] = []
    apply = model.apply_model

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        out = apply(*args, **kwargs)
        seconds.append(clock() - start)
        return out

    model.apply_model = timed
    return seconds


def random_lora(model: Any, rank: int) -> dict[str, Any]:
    """A LoRA on every matrix of the blocks, in fp16, under the names that trainers use."""
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(2)
    lora: dict[str, Any] = {}
    for name, weight in model.model.diffusion_model.state_dict().items():
        if name.startswith("blocks.") and name.endswith(".weight") and len(weight.shape) == 2:
            key, (out, into) = f"diffusion_model.{name.removesuffix('.weight')}", weight.shape
            lora[f"{key}.lora_A.weight"] = torch.randn(rank, into, generator=generator).mul_(into**-0.5).half()
            lora[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=generator).mul_(0.1 * rank**-0.5).half()
    return lora


def as_wide_as_published(prompt: Any) -> Any:
    """What a tiny CLIP-G pools is as wide as its tokens: a U-Net of SDXL reads 1280 numbers."""
    return [
        [tokens, {**more, "pooled_output": more["pooled_output"].repeat(1, POOLED // more["pooled_output"].shape[1])}]
        for tokens, more in prompt
    ]


def drop_from_cache(path: str) -> None:
    """The next read is the disk's. What lies in RAM alone, a tmpfs, stays."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # pages that wait to be written are kept
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)

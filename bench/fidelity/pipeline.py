"""Prompts, noise and the three networks: what a workflow would do, many videos at a time.

ComfyUI is imported when it is needed: somebody starts it first (`bench.end_to_end.start`).
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...checkpoints import KINDS, container, model_options, toys, trained, wan
from ...checkpoints.quantise import quantise
from ...fusion.base.vram_budget import AUTO
from .. import kitchen
from .variants import QUANTISED, Computing, Sparse, Variant

if TYPE_CHECKING:
    from ...kernels_cuda import KernelPolicy
    from ...kernels_cuda.policy import Mode

STEPS = 20
SAMPLER, SCHEDULER = "euler", "simple"
SHIFT = 5.0
GUIDANCE = 2.5
TOGETHER = 20  # videos in a batch
LEAST_TOKENS = 2048  # of a video whose attention may be sparse
CHANNELS = 16
LATENT = (5, 16, 16)  # 17 frames of 128x128


@dataclass(frozen=True)
class Work:
    """The videos of every variant: each scene from each of so many seeds."""

    scenes: tuple[toys.Scene, ...]
    seeds: int = 1
    steps: int = STEPS
    latent: tuple[int, int, int] = LATENT

    @property
    def videos(self) -> list[int]:
        """Which scene each video shows."""
        return [place for _ in range(self.seeds) for place in range(len(self.scenes))]

    @property
    def is_long(self) -> bool:
        """Whether a card is busy with one of them: it gets them one by one, as a user's does."""
        frames, height, width = self.latent
        return frames * (height // 2) * (width // 2) > LEAST_TOKENS

    def noise(self) -> torch.Tensor:
        """Of each video its own, whatever the others are."""
        shape = (CHANNELS, *self.latent)
        made = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(len(self.videos))]
        return torch.stack(made)


@dataclass(frozen=True)
class Files:
    """Where the networks are; the diffusion model by how it is stored."""

    models: Mapping[str, Path]
    text: Path
    vae: Path


@dataclass(frozen=True)
class Words:
    """Features of each scene's caption [scenes, 512, width], and of no words [1, 512, width]."""

    captions: torch.Tensor
    nothing: torch.Tensor


def trained_files(folder: Path, storages: tuple[str, ...]) -> Files:
    """The trained networks, and their diffusion model stored in other ways, written into a folder."""
    return stored(files_in(trained.FOLDER), folder, storages)


def stored(files: Files, folder: Path, storages: tuple[str, ...]) -> Files:
    """The same, and their diffusion model stored in these ways too, written into a folder."""
    model = files.models["fp16"]
    tensors = {name: tensor.float() for name, tensor in read(model).items()}
    size = size_of(model)
    found = {"fp16": model}
    for storage in storages:
        if storage in QUANTISED:
            found[storage] = folder / f"{storage}{QUANTISED[storage]}"
            quantise(model, found[storage], storage, force=True)
            continue
        other = KINDS["wan_t2v"].storages[storage].store(wan.table(size), tensors)
        found[storage] = folder / f"{storage}.safetensors"
        container.save(found[storage], other.tensors, {**wan.metadata(size), **other.metadata})
    return replace(files, models=found)


def files_in(folder: Path) -> Files:
    """The files of a training."""
    model, text, vae = trained.files(folder)
    for path in (model, text, vae):
        if not path.is_file():
            raise SystemExit(f"{path} is not there: `python -m checkpoints.train` writes it")
    return Files({"fp16": model}, text, vae)


def read(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file  # noqa: PLC0415

    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


def size_of(path: Path) -> wan.WanSize:
    """The sizes of a text-to-video Wan, from its shapes."""
    shape = container.shapes(path)
    layers = sum(name.endswith("self_attn.q.weight") for name in shape)
    dim, text = shape["text_embedding.0.weight"]
    return wan.WanSize(dim=dim, ffn=shape["blocks.0.ffn.0.weight"][0], layers=layers, text=text)


@contextmanager
def exactly() -> Iterator[None]:
    """FP32 is FP32: products do not drop to TF32."""
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = False
        yield
    finally:
        for place, allowed in zip(places, before, strict=True):
            place.allow_tf32 = allowed


def forget() -> None:
    """Nothing of one variant stays for the next."""
    import comfy.model_management  # noqa: PLC0415

    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()


# ----------------------------------------------------------------------------------------------------------- the networks


def policy_of(computing: Computing, **ops: Mode) -> KernelPolicy:
    from ...kernels_cuda import KernelPolicy  # noqa: PLC0415

    modes: dict[str, Mode] = {**dict.fromkeys(computing.off, "off"), **ops}
    return KernelPolicy.of(computing.kernels, precision=computing.precision, isa=computing.isa, **modes)


def on_card() -> bool:
    import comfy.model_management  # noqa: PLC0415

    return bool(comfy.model_management.get_torch_device().type == "cuda")


def text_encoder(path: Path, computing: Computing) -> Any:
    if computing.stock is None:
        from ...fusion import load_text_encoder  # noqa: PLC0415

        return load_text_encoder(str(path), [], policy_of(computing), AUTO)
    import comfy.sd  # noqa: PLC0415

    options: dict[str, Any] = {**model_options(path), "dtype": getattr(torch, computing.stock)}
    return comfy.sd.load_clip([str(path)], clip_type=comfy.sd.CLIPType.WAN, model_options=options)


def diffusion_model(files: Files, variant: Variant) -> Any:
    """With Wan's shift. Of a file in another storage stock chooses the type by itself."""
    path, computing = str(files.models[variant.storage]), variant.computing
    if computing.stock is None:
        from ...fusion import load_diffusion_model  # noqa: PLC0415

        model = load_diffusion_model(path, policy_of(computing), AUTO)
    else:
        import comfy.sd  # noqa: PLC0415

        held = {"dtype": getattr(torch, computing.stock)} if variant.storage == "fp16" else {}
        model = comfy.sd.load_diffusion_model(path, model_options=held)
    model = with_shift(model)
    if variant.kitchen:
        model = with_kitchen(model)
    return with_stock_cache(model, "EasyCacheNode") if variant.easy_cache else model


def with_shift(model: Any) -> Any:
    """As stock's node ModelSamplingSD3, whose module would import all of ComfyUI's nodes."""
    sampling = type(model.get_model_object("model_sampling"))(model.model.model_config)
    sampling.set_parameters(shift=SHIFT, multiplier=1000)
    clone = model.clone()
    clone.add_object_patch("model_sampling", sampling)
    return clone


def with_stock_cache(model: Any, name: str, **changed: Any) -> Any:
    """A cache of steps as stock's node of this name comes, but for inputs that are given."""
    node = getattr(importlib.import_module("comfy_extras.nodes_easycache"), name)
    inputs = {one.id: one.default for one in node.define_schema().inputs if one.id != "model"}
    return node.execute(model, **{**inputs, **changed}).args[0]


def with_kitchen(model: Any) -> Any:
    """Attention without masks by comfy-kitchen in 8 bits, through stock's own hook."""
    from ...fusion.fused.attention import HOOK, StockCall  # noqa: PLC0415

    run = kitchen.int8_attention()[kitchen.INT8]

    def override(stock: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        call = StockCall(*args, **kwargs)
        return stock(*args, **kwargs) if call.mask is not None else call.answer(run(*call.operands()))

    clone = model.clone()
    clone.model_options.setdefault("transformer_options", {})[HOOK] = override
    return clone


def with_sparse(model: Any, sparse: Sparse | None, **how: Any) -> Any:
    """As FuseStream's node does it, in videos of a few thousand tokens too. how: settings instead of the node's own."""
    if sparse is None:
        return model
    from ...fusion.sparse import model as sparse_model  # noqa: PLC0415
    from ...fusion.sparse.settings import Settings  # noqa: PLC0415

    settings = Settings(sparse.method, sparse.share, least_tokens=LEAST_TOKENS, left_out=sparse.left_out, **how)
    return sparse_model.sparse(model, settings)


def as_draft(model: Any) -> Any:
    """With what the loaders' quality Draft puts around a model, in videos of a few thousand tokens too."""
    from ...fusion.load.draft_quality import SPARSE, STEP_CACHE  # noqa: PLC0415
    from ...fusion.sparse.model import sparse  # noqa: PLC0415
    from ...fusion.step_cache.model import step_cached  # noqa: PLC0415

    return step_cached(sparse(model, replace(SPARSE, least_tokens=LEAST_TOKENS)), STEP_CACHE)


def vae(path: Path, computing: Computing) -> Any:
    if computing.stock is None:
        from ...fusion import load_vae  # noqa: PLC0415

        # The trained VAE's attention has heads of 48, for which there is no kernel.
        ops: dict[str, Mode] = {"attention": "auto"} if computing.kernels == "on" else {}
        return load_vae(str(path), policy_of(computing, **ops))
    import comfy.sd  # noqa: PLC0415
    import comfy.utils  # noqa: PLC0415

    # Convolutions in FP16 take a CPU minutes; ComfyUI's own choice there is FP32.
    dtype = getattr(torch, computing.stock) if on_card() else None
    return comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(path)), dtype=dtype)


# ------------------------------------------------------------------------------------------------------------ what they do


def words(clip: Any, scenes: tuple[toys.Scene, ...]) -> Words:
    def encoded(text: str) -> torch.Tensor:
        features: torch.Tensor = clip.encode_from_tokens_scheduled(clip.tokenize(text), show_pbar=False)[0][0]
        return features.float().cpu()

    return Words(torch.cat([encoded(toys.caption(scene)) for scene in scenes]), encoded(""))


def sampled(model: Any, work: Work, said: Words, together: int, only_first: bool = False) -> torch.Tensor:
    """Latents [videos, ...], after all steps or after the first."""
    return torch.cat([latents for latents, _ in _batch_by_batch(model, work, said, together, only_first)])


def timed(model: Any, work: Work, said: Words, together: int) -> tuple[torch.Tensor, float | None]:
    """Latents [videos, ...] after all steps, and the median of the seconds for each video. Of the first batch, in which weights are
    loaded and kernels chosen, only where there is no other: None."""
    made, seconds = zip(*_batch_by_batch(model, work, said, together), strict=True)
    return torch.cat(made), statistics.median(seconds[1:]) if len(seconds) > 1 else None


def _batch_by_batch(
    model: Any, work: Work, said: Words, together: int, only_first: bool = False
) -> Iterator[tuple[torch.Tensor, float]]:
    """The latents of a batch, and seconds for each of them."""
    import comfy.sample  # noqa: PLC0415

    noises, shown = work.noise(), work.videos
    for batch in _batches(len(shown), together):
        noise, begun = noises[batch], time.perf_counter()
        positive, negative = [[said.captions[shown[batch]], {}]], [[said.nothing, {}]]
        latents = comfy.sample.sample(
            model, noise, work.steps, GUIDANCE, SAMPLER, SCHEDULER, positive, negative, torch.zeros_like(noise),
            last_step=1 if only_first else None, disable_pbar=True, seed=0,
        )  # fmt: skip
        found = latents.float().cpu()  # which waits for the card
        yield found, (time.perf_counter() - begun) / len(found)


def first_call(model: Any, work: Work, said: Words, together: int) -> torch.Tensor:
    """The model's output in the first step, with the words and without: [videos, 2, ...]."""
    seen: list[torch.Tensor] = []

    def look(told: dict[str, Any]) -> Any:
        x, sigma = told["input"], told["sigma"].reshape(-1, 1, 1, 1, 1)
        branches = [(x - told[name]) / sigma for name in ("cond_denoised", "uncond_denoised")]
        seen.append(torch.stack(branches, 1).float().cpu())
        return told["denoised"]

    watched = model.clone()
    watched.set_model_sampler_post_cfg_function(look)
    sampled(watched, work, said, together, only_first=True)
    return torch.cat(seen)


def decoded(network: Any, latents: torch.Tensor) -> torch.Tensor:
    """Films fp32 [videos, T, H, W, 3] in 0 to 1."""
    return torch.cat([network.decode(latents[batch]).float().cpu() for batch in _batches(len(latents), TOGETHER)])


def _batches(count: int, together: int) -> list[slice]:
    return [slice(begin, begin + together) for begin in range(0, count, together)]

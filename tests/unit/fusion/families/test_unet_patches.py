"""What other nodes do to a U-Net counts when its parts compute through our ops: patches, ControlNets, guidance, other samplings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.cldm.cldm
import comfy.controlnet
import comfy.hooks
import comfy.ops
import comfy.patcher_extension
import family_scenes
import pytest
import torch
from comfy_extras import (
    nodes_freelunch,
    nodes_hypertile,
    nodes_model_advanced,
    nodes_model_downscale,
    nodes_pag,
    nodes_sag,
)
from in_halves import HALF, OFF, SIDES, as_near, load, sides_of, stocks
from scenes import Scene, distance, sample
from unet_models import handed_back, lora_for

from bed.depth import is_thorough
from fusestream import checkpoints
from fusestream.fusion.fused import attention
from fusestream.kernels_cuda import LEDGER

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too", "stocks_go")
LARGER = 16
KINDS = ("sd15", "sdxl") if is_thorough() else ("sd15",)
Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unet")


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


@pytest.fixture(scope="module")
def plain_of(folder: Path) -> Callable[..., torch.Tensor]:
    """The latents of a kind without any change, by stock in fp32."""

    @functools.cache
    def plain(kind: str, side: int = family_scenes.SIDE) -> torch.Tensor:
        scene = family_scenes.inputs(kind)._replace(latent={"samples": torch.zeros(1, 4, side, side)})
        return sample(stocks(checkpoints.write(kind, folder), OFF, torch.float32), scene)

    return plain


def under(change: Change, path: Path, scene: Scene) -> tuple[torch.Tensor, ...]:
    """The latents of the changed model: ours, stock's in fp16, stock's in fp32. What is random in a node is the same for each."""
    found = []
    for model in sides_of(path):
        torch.manual_seed(3)
        found.append(sample(change(model), scene))
    return tuple(found)


# --------------------------------------------------------------------------------------------------------- stock's nodes


def v_prediction(model: Any) -> Any:
    return nodes_model_advanced.ModelSamplingDiscrete().patch(model, "v_prediction", False)[0]


def lcm(model: Any) -> Any:
    return nodes_model_advanced.ModelSamplingDiscrete().patch(model, "lcm", True)[0]


NODES: dict[str, Change] = {
    "FreeU": lambda m: nodes_freelunch.FreeU.execute(m, 1.3, 1.4, 0.9, 0.2).result[0],
    "FreeU V2": lambda m: nodes_freelunch.FreeU_V2.execute(m, 1.3, 1.4, 0.9, 0.2).result[0],
    "HyperTile": lambda m: nodes_hypertile.HyperTile.execute(m, 64, 2, 1, False)[0],
    "Deep Shrink": lambda m: nodes_model_downscale.PatchModelAddDownscale.execute(
        m, 1, 2.0, 0.0, 1.0, True, "bicubic", "bicubic"
    ).result[0],
    "PAG": lambda m: nodes_pag.PerturbedAttentionGuidance.execute(m, 3.0).result[0],
    "SAG": lambda m: nodes_sag.SelfAttentionGuidance.execute(m, 0.5, 2.0).result[0],
    "v prediction": v_prediction,
    "LCM": lcm,
}


@pytest.mark.deep("SAG", "FreeU*", "HyperTile", "Deep Shrink", "LCM", "PAG")
@pytest.mark.every_other
@pytest.mark.parametrize("node", NODES)
def test_nodes_of_stock(folder: Path, node: str, plain_of: Callable[..., torch.Tensor]) -> None:
    latent = {"samples": torch.zeros(1, 4, LARGER, LARGER)}
    path, scene = checkpoints.write("sd15", folder), family_scenes.inputs("sd15")._replace(latent=latent)
    fused, theirs, exact = under(NODES[node], path, scene)
    assert not handed_back() and as_near(fused, theirs, exact)
    assert distance(exact, plain_of("sd15", LARGER)) > 1e-3, "the node does something"


# -------------------------------------------------------------------------------------------------------------- patches


def of_attention(name: str, more: str = "") -> Callable[[Any, Any], Any]:
    return lambda model, function: getattr(model, f"set_model_{name}{more}")(function)


def halved(n: torch.Tensor, *_: Any) -> torch.Tensor:
    return n * 0.5


def rolled(n: torch.Tensor, context: Any, value: Any, extra: dict[str, Any]) -> Any:
    """As IP-Adapter and its like change what is attended to: another tensor for values than for keys."""
    assert extra["n_heads"] * extra["dim_head"] == n.shape[-1] and "block" in extra and "patches" not in extra
    return n * 0.9, context, value.roll(1, -1)


def with_more(n: torch.Tensor, context: Any, value: Any, _extra: Any) -> Any:
    """More to attend to, of which keys and values are made alike."""
    longer = torch.cat([context, context.roll(1, -1)], 1)
    return n, longer, longer


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
    """In an attention's place, strictly of tensors of its own."""
    heads = extra["n_heads"]
    assert all(t.is_contiguous() for t in (q, k, v))
    q, k, v = (t.view(t.shape[0], -1, heads, extra["dim_head"]).transpose(1, 2) for t in (q, k, v))
    out = torch.softmax(q.float() @ k.float().transpose(-1, -2) * 0.1, -1).to(v.dtype) @ v
    return out.transpose(1, 2).flatten(2)


def patched_with(name: str, function: Any, *place: Any) -> Change:
    def change(model: Any) -> Any:
        model = model.clone()
        getattr(model, f"set_model_{name}")(function, *place)
        return model

    return change


def after_middle(model: Any) -> Any:
    model = model.clone()
    model.set_model_patch(lambda told: {"h": told["h"] * 0.5}, "middle_block_after_patch")
    return model


def by_a_wrapper(model: Any) -> Any:
    """Around the network's forward."""
    model = model.clone()

    def wrapper(executor: Any, x: torch.Tensor, *more: Any, **others: Any) -> torch.Tensor:
        out: torch.Tensor = executor(x * 0.9, *more, **others)
        return out * 1.1

    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "test", wrapper)
    return model


def with_fewer_queries(model: Any) -> Any:
    """As ToMe merges tokens for an attention and spreads what it gives. Which ones ToMe merges, a last bit may decide."""
    model = model.clone()
    model.set_model_attn1_patch(lambda n, context, value, _: ((n[:, ::2] + n[:, 1::2]) * 0.5, context, value))
    model.set_model_attn1_output_patch(lambda n, _: n.repeat_interleave(2, 1))
    return model


PATCHES: dict[str, Change] = {
    "attn1 fewer": with_fewer_queries,
    "attn1 values": patched_with("attn1_patch", rolled),
    "attn2 values": patched_with("attn2_patch", rolled),
    "attn1 more": patched_with("attn1_patch", with_more),
    "attn2 more": patched_with("attn2_patch", with_more),
    "attn1 replaced, a block": patched_with("attn1_replace", plain, "input", 1),
    "attn1 replaced, one of its own": patched_with("attn1_replace", plain, "middle", 0, 0),
    "attn2 replaced, a block": patched_with("attn2_replace", plain, "output", 5),
    "attn2 replaced, one of its own": patched_with("attn2_replace", plain, "middle", 0, 0),
    "attn1 output": patched_with("attn1_output_patch", halved),
    "attn2 output": patched_with("attn2_output_patch", halved),
    "middle of a block": lambda m: (c := m.clone(), c.set_model_patch(halved, "middle_patch"))[0],
    "input block": patched_with("input_block_patch", halved),
    "input block, after skip": patched_with("input_block_patch_after_skip", halved),
    "output block": patched_with("output_block_patch", lambda h, hsp, _: (h * 0.9, hsp.contiguous() * 0.5)),
    "middle block": after_middle,
    "embedding": patched_with("emb_patch", halved),
    "network": by_a_wrapper,
}


@pytest.mark.deep(
    "sd15-attn2 more",
    "sd15-attn2 values",
    "sd15-attn1 fewer",
    "sd15-input block",
    "sd15-attn1 replaced, a block",
    "sd15-attn2 replaced, one of its own",
)
@pytest.mark.every_other
@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_patches(folder: Path, kind: str, patch: str, plain_of: Callable[..., torch.Tensor]) -> None:
    path, scene = checkpoints.write(kind, folder), family_scenes.inputs(kind)
    fused, theirs, exact = under(PATCHES[patch], path, scene)
    assert not handed_back() and as_near(fused, theirs, exact)
    if not (kind == "sdxl" and patch in ("attn1 replaced, a block", "attn2 replaced, a block")):  # there is none
        assert distance(exact, plain_of(kind)) > 1e-4, "the patch does something"


def test_patches_see_what_stock_hands_them(folder: Path) -> None:
    """Tensors, and what stands beside them."""
    path, scene = checkpoints.write("sdxl", folder), family_scenes.inputs("sdxl")
    seen: list[list[Any]] = []

    def noted(name: str, out: Any) -> Any:
        def patch(*given: Any) -> Any:
            extra = given[-1]
            names = sorted(name for name in extra if not name.startswith("fusestream") and name != attention.HOOK)
            shapes = [None if t is None else tuple(t.shape) for t in given[:-1]]
            same = [one is other for one in given[:-1] for other in given[:-1]]
            seen[-1].append(
                (name, shapes, same, names, extra["block"], extra["block_index"], extra["activations_shape"])
            )
            return out(*given[:-1])

        return patch

    def change(model: Any) -> Any:
        seen.append([])
        model = model.clone()
        for name in ("attn1", "attn2"):
            getattr(model, f"set_model_{name}_patch")(noted(name, lambda *three: three))
            getattr(model, f"set_model_{name}_output_patch")(noted(f"{name} out", lambda n: n))
        model.set_model_patch(noted("middle", lambda n: n), "middle_patch")
        return model

    under(change, path, scene)
    assert seen[0] == seen[1] and len(seen[0]) > 20


def test_an_override_of_another_node_computes_the_attention(folder: Path) -> None:
    """In stock's form: [batch, tokens, heads * d]."""
    path, scene = checkpoints.write("sd15", folder), family_scenes.inputs("sd15")
    calls: list[list[Any]] = []

    def override(_stock: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls[-1].append(([t.shape for t in args[:3]], args[3:], sorted(kwargs)))
        q, _, v = args[:3]
        return q * v.mean(1, keepdim=True)

    def change(model: Any) -> Any:
        calls.append([])
        model = model.clone()
        model.model_options["transformer_options"][attention.HOOK] = override
        return model

    fused, theirs, exact = under(change, path, scene)
    assert as_near(fused, theirs, exact) and not handed_back()
    assert calls[0] == calls[1] and len(calls[0]) > 10


def test_a_part_that_another_node_computes(folder: Path) -> None:
    """`forward_timestep_embed_patch`: by class, which ours still have."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock

    path, scene = checkpoints.write("sd15", folder), family_scenes.inputs("sd15")

    def handler(layer: Any, x: torch.Tensor, emb: torch.Tensor, *_: Any) -> torch.Tensor:
        out: torch.Tensor = layer(x, emb)
        return out * 0.9

    def change(model: Any) -> Any:
        model = model.clone()
        model.set_model_patch((ResBlock, handler), "forward_timestep_embed_patch")
        return model

    fused, theirs, exact = under(change, path, scene)
    assert as_near(fused, theirs, exact) and not handed_back()


# ---------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.deep("sdxl")
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_a_lora_by_a_hook_of_one_prompt(folder: Path, kind: str, plain_of: Callable[..., torch.Tensor]) -> None:
    """It comes and goes within a step: nothing that was made of the weights outlives it."""
    path, scene = checkpoints.write(kind, folder), family_scenes.inputs(kind)
    file = lora_for(load(path))
    hooks = comfy.hooks.create_hook_lora(lora=file, strength_model=0.9, strength_clip=0.0)
    given = scene._replace(positive=comfy.hooks.set_hooks_for_conditioning(scene.positive, hooks))
    fused, theirs, exact = under(lambda model: model, path, given)
    assert not handed_back() and as_near(fused, theirs, exact)
    assert distance(exact, plain_of(kind)) > 0.01


# ----------------------------------------------------------------------------------------------------------- ControlNet


def controlled(scene: Scene, kind: str, dtype: torch.dtype) -> Scene:
    """Both prompts with a ControlNet of random weights in them."""
    size = checkpoints.pictures.UNETS[kind]
    depth = [each for each in size.depth for _ in range(size.residuals)]
    net = comfy.cldm.cldm.ControlNet(
        32, 4, size.width, 3, [size.residuals] * len(size.mult), channel_mult=size.mult, use_spatial_transformer=True,
        num_heads=-1 if size.linear else 8, num_head_channels=64 if size.linear else -1, transformer_depth=depth,
        transformer_depth_middle=size.middle, context_dim=size.context, use_linear_in_transformer=size.linear, legacy=False,
        adm_in_channels=size.labels or None, num_classes="sequential" if size.labels else None, dtype=dtype,
        operations=comfy.ops.manual_cast,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    for parameter in net.parameters():
        scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
        numbers = torch.randn(parameter.shape, generator=generator) * scale
        parameter.data.copy_(numbers + (0 if parameter.ndim > 1 else 0.5))
    control = comfy.controlnet.ControlNet(net, load_device=torch.device("cpu"), manual_cast_dtype=dtype)
    hint = torch.rand(1, 3, 64, 64, generator=generator)
    control.set_cond_hint(hint, 0.5, (0.0, 1.0))
    sides = [
        [[words, extras | {"control": control, "control_apply_to_uncond": False}]] for ((words, extras),) in scene[:2]
    ]
    return Scene(*sides, scene.latent)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_a_controlnet(folder: Path, kind: str, plain_of: Callable[..., torch.Tensor]) -> None:
    """Added by stock where it lies between the blocks: channels-first onto channels-last."""
    path, scene = checkpoints.write(kind, folder), family_scenes.inputs(kind)
    found = [sample(load(path, *side), controlled(scene, kind, torch.float32 if side[1:] else HALF)) for side in SIDES]
    fused, theirs, exact = found
    assert not handed_back() and as_near(fused, theirs, exact)
    assert distance(exact, plain_of(kind)) > 1e-3, "it does something"

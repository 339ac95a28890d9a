"""Stock's U-Nets at SD 1.5's and SDXL's widths, with random weights, over our kernels: their parts, and whole ones. Needs a
ComfyUI."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu.support import compared, in_turns, ratio, until_chosen

from fusestream.fusion.base.hooks import UNET_RUN
from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")

EMB = 1280
SD15: dict[str, Any] = {
    "num_res_blocks": [2, 2, 2, 2],
    "channel_mult": [1, 2, 4, 4],
    "num_heads": 8,
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [1] * 9 + [0] * 3,
    "context_dim": 768,
}
SDXL: dict[str, Any] = {
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 2, 4],
    "num_head_channels": 64,
    "use_linear_in_transformer": True,
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_middle": 10,
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "context_dim": 2048,
    "adm_in_channels": 2816,
    "num_classes": "sequential",
}


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


def drawn(module: torch.nn.Module) -> Any:
    """With weights such that what goes through is about as large as what came in."""
    generator = torch.Generator(device="cuda").manual_seed(3)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            small = 0.5 if name.endswith(("out_layers.3.weight", "to_out.0.weight", "net.2.weight")) else 1.0
            parameter.normal_(0, small * parameter[0].numel() ** -0.5, generator=generator)
        else:
            parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.1, generator=generator)
    return module


def made(kind: Any, *args: Any, **options: Any) -> Any:
    import comfy.ops

    return drawn(kind(*args, **options, dtype=torch.float16, device="cuda", operations=comfy.ops.manual_cast))


def fused(module: Any, policy: KernelPolicy) -> Any:
    from fusestream.fusion.families.unet import net

    net.fuse(torch.nn.ModuleList([module]), policy)
    return module


def options_of(policy: KernelPolicy | None) -> dict[str, Any]:
    from fusestream.fusion.fused import attention

    options: dict[str, Any] = {}
    if policy is not None:
        attention.install(type("Model", (), {"model_options": {"transformer_options": options}}), policy)
    return options


def parts() -> dict[str, Callable[[], tuple[Any, Callable[..., torch.Tensor]]]]:
    """A part, and how it is called: of (part, what turns tensors into the type to compute in, options)."""
    import comfy.ldm.modules.attention as attentions
    import comfy.ldm.modules.diffusionmodules.openaimodel as blocks

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=torch.Generator(device="cuda").manual_seed(len(shape)))

    def picture(channels: int, side: int = 32) -> torch.Tensor:
        return noise(2, channels, side, side - 6).contiguous(memory_format=torch.channels_last)

    def residual(into: int, out: int) -> Any:
        x, emb = picture(into), noise(2, EMB)
        return lambda: (
            made(blocks.ResBlock, into, EMB, 0, out),
            lambda part, cast, _: part(cast(x), cast(emb)),
        )

    def transformer(width: int, heads: int, depth: int, linear: bool, text: int) -> Any:
        x, context = picture(width), noise(2, 77, text)
        options = {"depth": depth, "context_dim": text, "use_linear": linear}
        return lambda: (
            made(attentions.SpatialTransformer, width, heads, width // heads, **options),
            lambda part, cast, told: part(cast(x), cast(context), told),
        )

    def resampled(kind: Any, side: int) -> Any:
        x = picture(320, side)
        return lambda: (made(kind, 320, True), lambda part, cast, _: part(cast(x)))

    return {
        "residual 320 to 640": residual(320, 640),
        "residual 1280": residual(1280, 1280),
        "residual 1920 to 640": residual(1920, 640),
        "transformer 320, heads of 40": transformer(320, 8, 1, False, 768),
        "transformer 1280, heads of 160": transformer(1280, 8, 1, False, 768),
        "transformer 640, heads of 64": transformer(640, 10, 2, True, 2048),
        "smaller": resampled(blocks.Downsample, 32),
        "larger": resampled(blocks.Upsample, 16),
        "larger, folded": resampled(blocks.Upsample, 48),
    }


NAMES = (
    "residual 320 to 640",
    "residual 1280",
    "residual 1920 to 640",
    "transformer 320, heads of 40",
    "transformer 1280, heads of 160",
    "transformer 640, heads of 64",
    "smaller",
    "larger",
    "larger, folded",
)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("precision", ["precise", "fast"])
@pytest.mark.parametrize("name", NAMES)
def test_as_near_as_fp16_gets(isa, name, precision):

    part, call = parts()[name]()
    exact, theirs = call(part, torch.Tensor.float, {}), call(part, torch.Tensor.half, {})
    policy = KernelPolicy.of("on", isa=isa, precision=precision)
    part = fused(part, policy)
    for op in OPS.values():
        op.forget()  # or nothing is chosen, and nothing noted
    LEDGER.clear()
    options = options_of(policy)
    run = part.__dict__.get(UNET_RUN)
    if run is None:
        found = call(part, torch.Tensor.half, options)
    else:
        with run.under(options):
            found = call(part, torch.Tensor.half, options)
    ours, stock = error(found, exact), error(theirs, exact)
    print(f"{isa or 'native'} {precision} {name}: error {ours:.3g}, stock fp16 {stock:.3g}")
    of_kernels = {choice.winner.split()[0] for choice in LEDGER.choices if choice.op != "attention"}
    assert found.dtype is torch.float16 and of_kernels == {"cuda"}
    assert not [refusal for refusal in LEDGER.refusals if "block" in refusal.op]
    assert not [r for r in LEDGER.refusals if r.candidate == "cuda" and r.op != "attention"]
    # Sums of taps are rounded to fp16, as the taps themselves are.
    most = 1.9 if precision == "fast" else 1.3 if "folded" in name else 1.1
    assert ours <= stock * most


def whole(config: dict[str, Any]) -> Any:
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    settings = {"num_heads": -1, "num_head_channels": -1, **config}
    return drawn(
        UNetModel(
            image_size=32,
            in_channels=4,
            out_channels=4,
            model_channels=320,
            use_spatial_transformer=True,
            legacy=False,
            dtype=torch.float16,
            device="cuda",
            operations=comfy.ops.manual_cast,
            **copied(settings),
        )
    )


def copied(settings: dict[str, Any]) -> dict[str, Any]:
    """Stock's constructor empties the lists."""
    return {name: list(value) if isinstance(value, list) else value for name, value in settings.items()}


def given(config: dict[str, Any], side: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(5)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.float16)

    found = {"x": noise(2, 4, side, side), "context": noise(2, 77, config["context_dim"])}
    found["timesteps"] = torch.tensor([500.0, 500.0], device="cuda")
    return found | ({"y": noise(2, config["adm_in_channels"])} if "adm_in_channels" in config else {})


@pytest.mark.timed
@pytest.mark.parametrize(("config", "side"), [(SD15, 64), (SDXL, 128)], ids=["sd15", "sdxl"])
def test_a_whole_one_is_as_near_as_fp16_gets_and_faster_than_stocks(config, side):
    """Milliseconds of the card for a call of two rows, its weights on the card: as a graph, which is how such a call runs."""
    from fusestream.fusion.families.unet import net as unet

    model, arguments = whole(config), given(config, side)
    theirs = model(**arguments, transformer_options={})
    wide = {name: t.float() for name, t in arguments.items()}
    exact = model(**wide, transformer_options={})
    unet.fuse(model, KernelPolicy())
    LEDGER.clear()

    def call(policy: KernelPolicy | None) -> torch.Tensor:
        found: torch.Tensor = model(**arguments, transformer_options={} if policy is None else options_of(policy))
        return found

    for policy in (None, KernelPolicy(), KernelPolicy.of("on")):
        assert error(call(policy), exact) <= 1.1 * error(theirs, exact), policy
        assert not [refusal for refusal in LEDGER.refusals if "block" in refusal.op]
    found = in_turns(
        on_card=True,
        stock=lambda: call(None),
        on=lambda: call(KernelPolicy.of("on")),
        auto=lambda: call(KernelPolicy.of("auto")),
    )
    print(f"ms: {compared(found, 1)}")
    assert ratio(found) < 1


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_a_streamed_one_samples_what_stocks_does(kind, tmp_path):
    """A tiny file through the smallest window."""
    import comfy
    import comfy.sample
    import family_scenes
    from gpu.models import OFF, load
    from scenes import sample

    from fusestream import checkpoints

    path, scene = checkpoints.write(kind, tmp_path), family_scenes.inputs(kind)
    with checkpoints.narrow.opened(comfy):
        models = load(path, KernelPolicy()), load(path, OFF), load(path, OFF, dtype=torch.float32)
    ours, theirs, exact = (sample(model, scene) for model in models)
    assert not torch.equal(ours, theirs)
    print(f"{kind}: error {error(ours, exact):.3g}, stock's {error(theirs, exact):.3g}")
    # Of so small a network each is one draw of its roundings; the whole ones above are held to 1.1.
    assert error(ours, exact) <= max(1.3 * error(theirs, exact), 2e-3)


@pytest.mark.parametrize("backend", ["slots", "managed"])
@pytest.mark.parametrize("window", ["least", "all"])
def test_weights_that_were_laid_out_are_copied_for_no_call(backend, window, tmp_path, monkeypatch):
    """The latents are those of weights that are laid out at each use, bit for bit; and with all kernels off those of a model of
    which nothing is laid out."""
    import comfy
    import family_scenes
    from gpu.models import OFF, load
    from scenes import sample

    from fusestream import checkpoints
    from fusestream.fusion.families.unet import pictures
    from fusestream.fusion.fused import attention
    from fusestream.fusion.vae import memory_limits
    from fusestream.fusion.weights import channels_last

    copied, own = [], memory_limits.weights

    @contextlib.contextmanager
    def weights(module, policy, x):
        with own(module, policy, x) as (weight, bias):
            copied.append(weight.data_ptr() != module.weight.data_ptr())
            yield weight, bias

    monkeypatch.setattr(pictures, "weights", weights)
    path, scene, on = checkpoints.write("sd15", tmp_path), family_scenes.inputs("sd15"), KernelPolicy.of("on")

    def streamed(policy: KernelPolicy) -> Any:
        model = load(path, policy, backend)
        if window == "all":
            model.stream.residency.ceiling = None
        return model

    with checkpoints.narrow.opened(comfy):
        with monkeypatch.context() as patch:
            patch.setattr(channels_last, "mix", lambda *_: None)
            model = streamed(on)
            before = until_chosen(lambda: sample(model, scene))
        assert any(copied)
        copied.clear()
        model = streamed(on)
        for _ in range(2):
            assert torch.equal(sample(model, scene), before)
        assert copied and not any(copied)
        off = model.clone()
        attention.install(off, OFF)
        assert torch.equal(sample(off, scene), sample(streamed(OFF), scene))

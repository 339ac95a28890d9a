"""A U-Net whose parts compute through our ops samples what stock's does, as near as fp16 is; and says when it does not."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ldm.modules.attention as stock_attention
import comfy.ldm.modules.diffusionmodules.openaimodel as stock
import comfy.model_management
import comfy.ops
import comfy.sd
import family_scenes
import pytest
import torch
from in_halves import HALF, OFF, SIDES, as_near, load, modes, sides_of
from scenes import Scene, distance, sample
from unet_models import handed_back

from bed.depth import is_thorough
from fusestream import checkpoints
from fusestream.fusion import KernelPolicy
from fusestream.fusion.base.hooks import UNET_RUN
from fusestream.fusion.families import family_of
from fusestream.fusion.families.unet import UNET, net, pictures, transformer
from fusestream.fusion.fused import attention
from fusestream.kernels_cuda import LEDGER, OPS, KernelRefused
from fusestream.memory import Extent, WeightFile

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too", "stocks_go")
KINDS = ("sd15", "sd15_wide", "sdxl")
SMALL = ("sd15", "sdxl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unet")


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


# -------------------------------------------------------------------------------------------------------------- files


def named(*names: str) -> Any:
    return family_of(WeightFile(Path("x"), 0, {name: Extent(name, "F16", (320,), 0, 0) for name in names}, {}))


def test_other_spellings_and_relatives() -> None:
    parts = "time_embed.0.weight", "output_blocks.3.0.in_layers.0.weight"
    assert named(*(f"model.diffusion_model.{name}" for name in parts)) is UNET
    assert named("time_embedding.linear_1.weight", "up_blocks.1.resnets.0.norm1.weight") is UNET
    assert named("time_embed.0.weight", "input_blocks.1.0.in_layers.0.weight", "zero_convs.0.0.weight") is None
    assert named(*parts, "output_blocks.3.0.time_stack.in_layers.0.weight") is None
    assert named("decoder.up_blocks.0.resnets.0.norm1.weight", "time_embed.0.weight") is None


# -------------------------------------------------------------------------------------------------------- whole models


@pytest.mark.every_other
@pytest.mark.deep("9x7*", "10x12-sdxl")
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("size", [(9, 7), (10, 12), (5, 8)], ids=lambda size: "x".join(map(str, size)))
def test_two_rows_prompts_of_different_lengths_odd_sizes(folder: Path, kind: str, size: tuple[int, int]) -> None:
    """Pictures with an odd side come back to it on the way up, and stock repeats the shorter prompt up to the longer one's
    length."""
    path, scene = checkpoints.write(kind, folder), family_scenes.inputs(kind)
    (words, extras), longer = scene.negative[0], torch.cat([scene.negative[0][0], scene.positive[0][0]], 1)
    assert longer.shape[1] == 2 * words.shape[1]
    given = Scene(scene.positive, [[longer, extras]], {"samples": torch.zeros(2, 4, *size)})
    fused, theirs, exact = (sample(model, given) for model in sides_of(path))
    assert fused.shape == (2, 4, *size) and not handed_back() and as_near(fused, theirs, exact)


@pytest.mark.deep
@pytest.mark.parametrize("kind", SMALL)
def test_each_kernel_can_be_switched_off(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "FOLDED_FROM", 0)
    # As large pictures have it: a feed-forward in pieces, which writes each where it belongs.
    halves = lambda _, tokens, __: [(slice(None), slice(0, tokens // 2)), (slice(None), slice(tokens // 2, tokens))]  # noqa: E731
    monkeypatch.setattr(transformer, "parts_of", halves)
    path, scene = checkpoints.write(kind, folder), family_scenes.inputs(kind)
    fused = sample(load(path), scene)
    for op in ("conv", "gelu_mul", "group_norm_silu", "linear", "linear_", "norm_modulate", "upsample_conv2d"):
        with modes() as asked:
            without = sample(load(path, KernelPolicy.of(**{op: "off"})), scene)
        assert op in UNET.ops and op in OPS and distance(without, fused) < 0.01, op
        assert asked.pop(op) == {"off"} and set().union(*asked.values()) == {"auto"}, op
    all_off = KernelPolicy.of("off", **dict.fromkeys(UNET.ops, "off"))
    assert torch.equal(sample(load(path, all_off), scene), sample(load(path, OFF), scene)) and not handed_back()


@pytest.mark.parametrize("kind", SMALL)
def test_pictures_are_turned_once_on_the_way_in_and_once_on_the_way_out(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned: list[torch.Size] = []
    channels_last = pictures.channels_last

    def counted(x: torch.Tensor) -> torch.Tensor:
        if x.stride(1) != 1:
            turned.append(x.shape)
        return channels_last(x)

    for module in (pictures, transformer):
        monkeypatch.setattr(module, "channels_last", counted)
    model, passes = load(checkpoints.write(kind, folder)), 2
    assert sample(model, family_scenes.inputs(kind)).is_contiguous()
    assert [shape[1] for shape in turned] == [4] * passes, "the latents, and no picture between the parts"


@pytest.mark.deep
def test_no_kernel_refuses_what_the_parts_hand_it(
    folder: Path, refused_by_kernels: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "FOLDED_FROM", 0)
    for kind in KINDS:
        model, scene = load(checkpoints.write(kind, folder)), family_scenes.inputs(kind)
        for size in ((9, 10), (8, 12)):
            sample(model, scene._replace(latent={"samples": torch.zeros(2, 4, *size)}))
    assert not refused_by_kernels and not handed_back()


def test_an_interrupt_ends_it_and_nothing_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, scene = load(checkpoints.write("sd15", folder)), family_scenes.inputs("sd15")
    want, calls, normed = sample(model, scene), [], pictures.normed

    def counted(*given: Any, **more: Any) -> torch.Tensor:
        calls.append(given)
        if len(calls) == 9:
            comfy.model_management.interrupt_current_processing()
        return normed(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(pictures, "normed", counted)
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            sample(model, scene)
    assert len(calls) < 12 and model.model.diffusion_model.__dict__[UNET_RUN].options is None
    assert torch.equal(sample(model, scene), want)


def test_the_width_of_its_prompts(folder: Path) -> None:
    for kind in KINDS:
        width, _ = UNET.reads(load(checkpoints.write(kind, folder)).model.diffusion_model)  # type: ignore[misc]
        assert width == checkpoints.pictures.UNETS[kind].context


# ------------------------------------------------------------------------------------------------------- parts, alone


def options_of(policy: KernelPolicy | None = None, **others: Any) -> dict[str, Any]:
    model: Any = SimpleNamespace(model_options={"transformer_options": dict(others)})
    attention.install(model, policy or KernelPolicy())
    found: dict[str, Any] = model.model_options["transformer_options"]
    return found


class Case:
    """One part with its weights, and stock's of the same."""

    def __init__(self, module: Any) -> None:
        for parameter in module.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.data.copy_(torch.randn(parameter.shape) * scale + (0 if parameter.ndim > 1 else 0.5))
        self.stock = copy.deepcopy(module)
        self.module = module
        net.fuse(torch.nn.ModuleList([module]), KernelPolicy())

    def run(self, *given: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Ours and stock's."""
        told = [given, copy.deepcopy(given)]
        run = self.module.__dict__.get(UNET_RUN)
        if run is None:
            return self.module(*told[0], **more), self.stock(*told[1], **more)
        with run.under(options_of()):
            return self.module(*told[0], **more), self.stock(*told[1], **more)

    def error(self, *given: Any, **more: Any) -> float:
        ours, theirs = self.run(*given, **more)
        assert ours.shape == theirs.shape and ours.dtype is theirs.dtype
        return distance(ours.double(), theirs.double())


def made(kind: Any, *args: Any, **options: Any) -> Any:
    ops: Any = comfy.ops.disable_weight_init
    return kind(*args, **{"dtype": HALF, "device": "cpu", "operations": ops, **options})


@pytest.mark.parametrize("widens", [False, True])
@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
def test_a_residual_block(widens: bool, last: bool) -> None:
    case = Case(made(stock.ResBlock, 64, 128, 0, 96 if widens else 64))
    x = torch.randn(2, 64, 7, 6, dtype=HALF).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    before, emb = x.clone(), torch.randn(2, 128, dtype=HALF)
    assert 0 < case.error(x, emb) < 3e-3 and not handed_back()
    assert torch.equal(x, before), "on the way up it is read again"
    assert case.run(x, emb)[0].is_contiguous(memory_format=torch.channels_last)


def test_the_times_embedding_is_added_by_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a pass of its own, and no larger than it is; its SiLU is one for all blocks of a call."""
    case, calls, conv2d = Case(made(stock.ResBlock, 64, 128, 0)), [], pictures.conv2d

    def noted(*given: Any, **more: Any) -> torch.Tensor:
        calls.append(more["residual"])
        return conv2d(*given, **more)

    monkeypatch.setattr(pictures, "conv2d", noted)
    emb = torch.randn(2, 128, dtype=HALF)
    with (run := case.module.__dict__[UNET_RUN]).under(options_of()):
        case.module(torch.randn(2, 64, 7, 6, dtype=HALF), emb)
        assert run.activated(emb) is run.activated(emb) is not run.activated(emb.clone())
    assert [residual.stride()[1:] for residual in calls] == [(1, 0, 0), (1, 6 * 64, 64)]


@pytest.mark.parametrize(
    "case",
    [
        made(stock.ResBlock, 64, 128, 0, use_scale_shift_norm=True),
        made(stock.ResBlock, 64, 128, 0, up=True),
        made(stock.ResBlock, 64, 128, 0, down=True),
    ],
    ids=["scale and shift", "up", "down"],
)
def test_residual_blocks_of_another_kind_are_stocks(case: Any) -> None:
    assert Case(case).error(torch.randn(1, 64, 8, 6, dtype=HALF), torch.randn(1, 128, dtype=HALF)) == 0
    assert "it is a residual block of a kind without fused kernels" in handed_back()


def test_convolutions_of_another_kind_are_stocks() -> None:
    case = Case(made(stock.ResBlock, 64, 128, 0, dims=3))
    assert case.error(torch.randn(1, 64, 3, 8, 6, dtype=HALF), torch.randn(1, 128, dtype=HALF)) == 0
    assert handed_back() == {"its convolutions are of a kind without fused kernels"}
    LEDGER.clear()
    for kind in (stock.Downsample, stock.Upsample):
        assert Case(made(kind, 64, False)).error(torch.randn(1, 64, 8, 6, dtype=HALF)) == 0
    assert handed_back() == {"it has no convolution"}


@pytest.mark.parametrize("size", [(8, 6), (7, 5), (1, 3)], ids=str)
def test_smaller_and_larger(size: tuple[int, int]) -> None:
    x = torch.randn(2, 64, *size, dtype=HALF)
    assert Case(made(stock.Downsample, 64, True)).error(x) < 3e-3
    up = Case(made(stock.Upsample, 64, True))
    for sides in [(2 * size[0], 2 * size[1]), (2 * size[0] - 1, 2 * size[1]), (2 * size[0] - 1, 2 * size[1] - 1)]:
        assert up.error(x, output_shape=torch.Size((2, 9, *sides))) < 3e-3, sides
    assert up.error(x) < 3e-3 and not handed_back()


@pytest.mark.parametrize("sides", [(64, 64), (63, 64)], ids=str)
def test_a_large_picture_is_never_stored_enlarged(sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a side is odd."""
    calls, conv = [], pictures.upsample_conv2d
    monkeypatch.setattr(pictures, "upsample_conv2d", lambda *given, **more: calls.append(1) or conv(*given, **more))
    case = Case(made(stock.Upsample, 32, True))
    assert case.error(torch.randn(1, 32, 32, 32, dtype=HALF), output_shape=torch.Size((1, 9, *sides))) < 3e-3
    assert len(calls) == (sides == (64, 64))


@pytest.mark.parametrize("linear", [False, True], ids=["sd15", "sdxl"])
@pytest.mark.parametrize("alone", [False, True], ids=["with a prompt", "without"])
def test_a_transformer(linear: bool, alone: bool) -> None:
    options = {"depth": 2, "use_linear": linear}
    case = Case(made(stock_attention.SpatialTransformer, 64, 4, 16, context_dim=64, **options))
    x = torch.randn(2, 64, 7, 6, dtype=HALF).to(memory_format=torch.channels_last)
    before, context = x.clone(), None if alone else torch.randn(2, 11, 64, dtype=HALF)
    told = options_of()
    assert 0 < case.error(x, context, told) < 3e-3 and not handed_back() and torch.equal(x, before)
    assert told["activations_shape"] == [2, 64, 7, 6] and told["block_index"] == 1
    if context is not None:
        assert 0 < case.error(x, [context, context + 1], options_of()) < 3e-3, "one for each block"
    assert case.run(x, context, options_of())[0].is_contiguous(memory_format=torch.channels_last)


def test_a_first_attention_to_the_prompt() -> None:
    case = Case(made(stock_attention.BasicTransformerBlock, 64, 4, 16, context_dim=48, disable_self_attn=True))
    x, context = torch.randn(2, 42, 64, dtype=HALF), torch.randn(2, 11, 48, dtype=HALF)
    assert 0 < case.error(x, context, options_of()) < 3e-3 and not handed_back()


def test_feed_forwards_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(made(stock_attention.BasicTransformerBlock, 32, 2, 16, context_dim=48))
    x, context = torch.randn(1, 1600, 32, dtype=HALF), torch.randn(1, 11, 48, dtype=HALF)
    places, product = [], transformer.product

    def noted(*given: Any, **more: Any) -> torch.Tensor:
        places.append(more.get("out"))
        return product(*given, **more)

    monkeypatch.setattr(transformer, "product", noted)
    whole = case.run(x, context, options_of())[0]
    assert not any(place is not None for place in places), "where a whole result goes is left to the product"
    monkeypatch.setattr(transformer, "CHUNK_BYTES", 1)
    calls, gelu_mul = [], transformer.gelu_mul
    monkeypatch.setattr(transformer, "gelu_mul", lambda *given, **more: calls.append(1) or gelu_mul(*given, **more))
    assert torch.equal(case.run(x, context, options_of())[0], whole) and len(calls) == 3
    assert sum(place is not None for place in places) == 3


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (made(stock_attention.BasicTransformerBlock, 64, 4, 16, context_dim=48, ff_in=True), "it is a block over time"),
        (
            made(stock_attention.BasicTransformerBlock, 64, 4, 16, context_dim=48, gated_ff=False),
            "its feed-forward is of a kind without fused kernels",
        ),
        (
            made(stock_attention.BasicTransformerBlock, 64, 4, 16, disable_temporal_crossattention=True),
            "its attention is of a kind without fused kernels",
        ),
    ],
    ids=["over time", "not gated", "one attention"],
)
def test_transformer_blocks_of_another_kind_are_stocks(module: Any, reason: str) -> None:
    context = torch.randn(2, 11, 48, dtype=HALF)
    assert Case(module).error(torch.randn(2, 42, 64, dtype=HALF), context, options_of()) == 0
    assert handed_back() == {reason}


@pytest.mark.parametrize(
    ("part", "attribute"), [("in_layers.2", "forward"), ("out_layers.3", "_conv_forward"), ("emb_layers.1", "forward")]
)
def test_a_residual_block_with_replaced_parts_is_stocks(part: str, attribute: str) -> None:
    """`_conv_forward` is where nodes for seamless pictures pad."""
    case = Case(made(stock.ResBlock, 64, 128, 0))
    module = case.module.get_submodule(part)
    setattr(module, attribute, getattr(module, attribute))
    assert case.error(torch.randn(1, 64, 8, 6, dtype=HALF), torch.randn(1, 128, dtype=HALF)) == 0
    assert handed_back() == {f"another node has replaced {part}"}


@pytest.mark.parametrize(
    ("attribute", "value"), [("padding_mode", "circular"), ("dilation", (2, 2)), ("stride", (2, 2))]
)
def test_a_part_that_another_node_lets_convolve_otherwise_is_stocks(attribute: str, value: Any) -> None:
    """Nodes for seamless pictures write the first into a loaded network, and take it back behind a sampling; those for
    pictures larger than a network was trained for write the others."""
    case, x = Case(made(stock.Downsample, 64, True)), torch.randn(1, 64, 8, 6, dtype=HALF)
    own, before = case.run(x)
    convs = case.module.op, case.stock.op
    for conv in convs:
        setattr(conv, attribute, value if getattr(conv, attribute) != value else (1, 1))
    assert case.error(x) == 0 and handed_back() == {"another node has replaced op"}
    assert case.run(x)[1].shape != before.shape or not torch.equal(case.run(x)[1], before), "it does something"
    fresh = made(stock.Downsample, 64, True).op
    for conv in convs:
        setattr(conv, attribute, getattr(fresh, attribute))
    assert torch.equal(case.run(x)[0], own)


def test_a_part_whose_norm_another_node_has_written_into_its_class_is_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As AnimateDiff does it while it samples: a norm is over all frames of a batch."""
    case = Case(made(stock.ResBlock, 64, 128, 0))
    given = torch.randn(3, 64, 8, 6, dtype=HALF), torch.randn(3, 128, dtype=HALF)
    own, plain = case.run(*given)

    def over_frames(norm: Any, x: torch.Tensor) -> torch.Tensor:
        together = x.movedim(0, 1)[None]
        normed = torch.nn.functional.group_norm(together, norm.num_groups, norm.weight, norm.bias, norm.eps)
        return normed[0].movedim(1, 0)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(torch.nn.GroupNorm, "forward", over_frames)
        assert case.error(*given) == 0 and distance(case.run(*given)[1], plain) > 0.01
    assert handed_back() == {"another node has replaced GroupNorm.forward of all models"}
    assert torch.equal(case.run(*given)[0], own)


@pytest.mark.deep
def test_a_first_convolution_that_another_node_pads_is_stocks(folder: Path) -> None:
    """As nodes for seamless pictures do it; all else is ours."""

    def around(conv: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (1, 1, 1, 1), mode="circular")
        return torch.nn.functional.conv2d(padded, weight, bias)

    path, scene = checkpoints.write("sd15", folder), family_scenes.inputs("sd15")
    found = []
    for side in SIDES:
        model = load(path, *side)
        first = model.model.diffusion_model.input_blocks[0][0]
        first._conv_forward = around.__get__(first)
        found.append(sample(model, scene))
    assert as_near(*found) and handed_back() == {"another node has replaced how it convolves"}
    assert distance(found[2], sample(load(path, OFF, torch.float32), scene)) > 1e-3, "it does something"


def test_a_transformer_and_its_blocks_are_asked_apart() -> None:
    case = Case(made(stock_attention.SpatialTransformer, 64, 4, 16, context_dim=48))
    inner = case.module.transformer_blocks[0].ff.net[2]
    inner.forward = inner.forward
    x, context = torch.randn(2, 64, 7, 6, dtype=HALF), torch.randn(2, 11, 48, dtype=HALF)
    assert 0 < case.error(x, context, options_of()) < 3e-3, "the ends are ours"
    assert handed_back() == {"another node has replaced ff.net.2"}
    LEDGER.clear()
    case.module.proj_in = case.module.proj_in.requires_grad_(False)
    case.module.transformer_blocks[0] = copy.deepcopy(case.stock.transformer_blocks[0])
    assert case.error(x, context, options_of()) == 0
    assert handed_back() == {"another node has replaced 0 of transformer_blocks"}


def test_a_part_that_another_node_calls_by_itself_is_stocks() -> None:
    case = Case(made(stock.ResBlock, 64, 128, 0))
    given = torch.randn(1, 64, 8, 6, dtype=HALF), torch.randn(1, 128, dtype=HALF)
    assert torch.equal(case.module(*given), case.stock(*given))
    assert handed_back() == {"another node calls the network's parts by itself"}
    run = case.module.__dict__[UNET_RUN]
    run.loader = KernelPolicy.of("on")
    with pytest.raises(KernelRefused, match="by itself"):
        case.module(*given)
    LEDGER.clear()
    run.loader = OFF
    assert torch.equal(case.module(*given), case.stock(*given)) and not handed_back()


def test_where_kernels_are_on_heads_that_none_serves_are_torchs() -> None:
    """And no attention that another node has put in."""
    forced = KernelPolicy.of("on", precision="fast")
    options = options_of(forced)
    assert transformer.for_torchs_heads(options, 64) is options
    told = transformer.for_torchs_heads(options, 40)
    assert told[attention.HOOK].policy == KernelPolicy.of("on", precision="fast", attention="auto")
    assert options[attention.HOOK].policy == forced and told.keys() == options.keys()
    for other in (options_of(), options_of(OFF), options | {attention.HOOK: print}, {}):
        assert transformer.for_torchs_heads(other, 40) is other


def test_without_our_loader_a_transformer_is_stocks() -> None:
    case = Case(made(stock_attention.SpatialTransformer, 64, 4, 16, context_dim=48))
    x, context = torch.randn(2, 64, 7, 6, dtype=HALF), torch.randn(2, 11, 48, dtype=HALF)
    assert case.error(x, context, {}) == 0 and case.error(x, context, options_of(OFF)) == 0 and not handed_back()


@pytest.mark.skipif(not is_thorough(), reason="half a minute")
def test_torch_compile_takes_a_fused_network(folder: Path) -> None:
    model = load(checkpoints.write("sd15", folder))
    scene = family_scenes.inputs("sd15")
    want = sample(model, scene)
    torch.compiler.reset()
    inner = model.model.diffusion_model
    compiled = torch.compile(inner, backend="eager", dynamic=False)
    model.model.diffusion_model = compiled
    assert distance(sample(model, scene), want) < 3e-3 and not handed_back()

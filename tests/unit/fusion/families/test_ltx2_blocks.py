"""An LTX-2 block that computes through our ops gives what stock's does, as near as fp16 is; and says when it does not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import comfy.ldm.lightricks.av_model as stock
import comfy.ldm.lightricks.model as layers
import comfy.ops
import family_scenes
import pytest
import torch
from in_halves import HALF, OFF, load
from scenes import distance, sample
from torch import Tensor

from fusestream import checkpoints
from fusestream.fusion import KernelPolicy
from fusestream.fusion.base.hooks import RUNNING
from fusestream.fusion.families.ltx2 import LTX_2
from fusestream.fusion.families.ltx2 import block as ltx2
from fusestream.fusion.families.ltx2.need import need
from fusestream.fusion.fused import attention, operations
from fusestream.fusion.load import diffusion
from fusestream.fusion.load.diffusion import types_of
from fusestream.kernels_cuda import LEDGER

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread", "small_ones_too")

SINGLE = torch.float32
HEADS, SIZE, SOUND_SIZE = 8, 32, 16
DIM, SOUND = HEADS * SIZE, HEADS * SOUND_SIZE
FRAMES, PIXELS, STEPS, TEXT = 3, 8, 6, 9
TOKENS = FRAMES * PIXELS
NEAR = 3e-3


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


def handed_back() -> set[str]:
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op == "ltx-2 block"}


class Case:
    """A block of either version with its weights, for a batch of two, and what goes into it."""

    def __init__(self, dtype: torch.dtype = SINGLE, *, newer: bool = True, steps: int = 1, sound: int = STEPS) -> None:
        settings = {"operations": comfy.ops.manual_cast, "device": "cpu", "dtype": HALF}
        self.module: Any = stock.BasicAVTransformerBlock(
            DIM, SOUND, HEADS, HEADS, SIZE, SOUND_SIZE, v_context_dim=DIM, a_context_dim=SOUND,
            apply_gated_attention=newer, cross_attention_adaln=newer, **settings,
        )  # fmt: skip
        for name, parameter in self.module.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
            parameter.data.copy_(torch.randn(parameter.shape) * scale + ("norm" in name))
        self.stock = copy.deepcopy(self.module)
        ltx2.fuse(torch.nn.ModuleList([self.module]))
        self.dtype = dtype
        self.streams = self.drawn(2, TOKENS, DIM), self.drawn(2, sound, SOUND)
        rows = 9 if newer else 6
        self.given: dict[str, Any] = {
            "v_context": self.drawn(2, TEXT, DIM),
            "a_context": self.drawn(2, TEXT, SOUND),
            "v_timestep": self.timestep(steps, rows * DIM),
            "a_timestep": self.drawn(2, 1, rows * SOUND),
            "v_pe": self.turns(TOKENS, SIZE),
            "a_pe": self.turns(sound, SOUND_SIZE),
            "v_cross_pe": self.turns(TOKENS, SOUND_SIZE),
            "a_cross_pe": self.turns(sound, SOUND_SIZE),
            "v_cross_scale_shift_timestep": self.timestep(steps, 4 * DIM),
            "a_cross_scale_shift_timestep": self.drawn(2, 1, 4 * SOUND),
            "v_cross_gate_timestep": self.timestep(steps, DIM),
            "a_cross_gate_timestep": self.drawn(2, 1, SOUND),
            "v_prompt_timestep": self.drawn(2, 1, 2 * DIM) if newer else None,
            "a_prompt_timestep": self.drawn(2, 1, 2 * SOUND) if newer else None,
        }

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)

    def timestep(self, steps: int, width: int) -> Any:
        """Of the clip, of frames, or of tokens, as stock has it."""
        per_frame = steps == FRAMES
        return stock.CompressedTimestep(self.drawn(2, steps, width), PIXELS if per_frame else None, per_frame=per_frame)

    def turns(self, tokens: int, size: int) -> Any:
        return layers.freqs_cis_matrix(torch.randn(1, tokens, HEADS * size // 2) * 3, 0, True, HEADS, self.dtype)

    @staticmethod
    def options(policy: KernelPolicy | None = None, **others: Any) -> dict[str, Any]:
        model: Any = type("Model", (), {"model_options": {"transformer_options": dict(others)}})
        attention.install(model, policy or KernelPolicy())
        found: dict[str, Any] = model.model_options["transformer_options"]
        return found

    def run(self, module: Any, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Of copies, because streams are written."""
        video, sound = module(tuple(one.clone() for one in self.streams), transformer_options=options, **self.given)
        return video, sound

    def errors(self, **options: Any) -> list[float]:
        """Of the changes of both streams."""
        ours, theirs = self.run(self.module, self.options(**options)), self.run(self.stock, options)
        found = []
        for before, one, other in zip(self.streams, ours, theirs, strict=True):
            if torch.equal(other, before):
                assert torch.equal(one, other)
            else:
                found.append(distance((one - before).double(), (other - before).double()))
        return found


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=["fp16", "fp32 stream"])
@pytest.mark.parametrize("newer", [True, False], ids=["2.3", "2.0"])
@pytest.mark.parametrize("steps", [1, FRAMES, TOKENS], ids=["clip", "frames", "tokens"])
def test_a_block(dtype: torch.dtype, newer: bool, steps: int) -> None:
    errors = Case(dtype, newer=newer, steps=steps).errors()
    assert len(errors) == 2 and 0 < max(errors) < (NEAR if dtype is SINGLE else 2 * NEAR) and not handed_back()


def test_frames_are_not_repeated_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    case, seen = Case(steps=FRAMES), set()
    plain = ltx2.modulation

    def noted(*given: Any) -> Any:
        found = plain(*given)
        seen.update(one.shape[1] for one in found)
        return found

    monkeypatch.setattr(ltx2, "modulation", noted)
    assert max(case.errors()) < NEAR and seen == {1, FRAMES}


@pytest.mark.parametrize(
    "options",
    [{"run_vx": False}, {"run_ax": False}, {"a2v_cross_attn": False}, {"v2a_cross_attn": False}],
    ids=lambda found: next(iter(found)),
)
def test_switches_of_a_call(options: dict[str, Any]) -> None:
    case = Case()
    errors = case.errors(**options)
    assert len(errors) == (1 if "run" in next(iter(options)) else 2) and max(errors) < NEAR and not handed_back()


def test_a_video_without_sound() -> None:
    case = Case(sound=0)
    assert len(case.errors()) == 1 and max(case.errors()) < NEAR
    assert case.run(case.module, case.options())[1].shape == (2, 0, SOUND) and not handed_back()


def test_masks() -> None:
    """Of the text, whose lowest number fp16 does not have; and of a video with guides."""
    case = Case(newer=False)
    plain = case.run(case.module, case.options())[0]
    case.given["attention_mask"] = torch.zeros(2, 1, 1, TEXT)
    case.given["attention_mask"][0, ..., -4:] = torch.finfo(SINGLE).min
    case.given["self_attention_mask"] = layers.GuideAttentionMask(
        TOKENS, PIXELS, PIXELS, torch.rand(1, PIXELS).clamp(0.1, 0.9)
    )
    assert max(case.errors()) < NEAR and not handed_back()
    assert distance(case.run(case.module, case.options())[0].double(), plain.double()) > 10 * NEAR


def test_an_override_of_another_node_computes_the_attention() -> None:
    case, calls = Case(), []
    kept: list[tuple[Tensor, Tensor]] = []

    def override(_stock: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(([tuple(t.shape) for t in args[:3]], args[3], kwargs.get("mask") is None))
        made = args[2].mean(1, keepdim=True).expand_as(args[0]).contiguous()
        kept.append((made, made.clone()))
        return made

    ours = case.run(case.module, case.options() | {attention.HOOK: override})
    theirs = case.run(case.stock, {attention.HOOK: override})
    assert all(distance(one.double(), other.double()) < NEAR for one, other in zip(ours, theirs, strict=True))
    assert len(calls) == 12 and calls[:6] == calls[6:] and not handed_back()
    assert all(torch.equal(made, before) for made, before in kept), "it may answer with the same again"


def test_a_stream_in_fp32_holds_what_fp16_does_not() -> None:
    case = Case()
    for stream in case.streams:
        stream[:, :, 3] = 3e5
        stream[:, 2] *= 1e3
    found = case.run(case.module, case.options())
    assert all(float(one.max()) > 2e5 and bool(one.isfinite().all()) for one in found)
    assert max(case.errors()) < NEAR and not handed_back()


def test_hidden_values_that_overflow_are_the_largest_number() -> None:
    case = Case()
    case.module.ff.net[0].proj.weight.data[:4] = 60000
    assert bool(case.run(case.module, case.options())[0].isfinite().all()) and not handed_back()


@pytest.mark.parametrize("steps", [1, FRAMES, TOKENS], ids=["clip", "frames", "tokens"])
def test_no_kernel_refuses_an_fp32_stream(steps: int, refused_by_kernels: list[tuple[str, str]]) -> None:
    """By types, sizes and strides, which can be asked without a card."""
    case = Case(steps=steps)
    case.run(case.module, case.options())
    assert not [one for one in refused_by_kernels if one[0] != "attention"] and not handed_back()


def test_streams_are_written_where_they_lie() -> None:
    case = Case()
    given = tuple(one.clone() for one in case.streams)
    found = case.module(given, transformer_options=case.options(), **case.given)
    assert [one.data_ptr() for one in found] == [one.data_ptr() for one in given]


def test_a_block_with_replaced_parts_is_stocks() -> None:
    case = Case()
    case.module.attn2.forward = case.module.attn2.forward
    assert max(case.errors()) == 0 and handed_back() == {"another node has replaced attn2"}


def test_bf16_is_stocks() -> None:
    case = Case(torch.bfloat16)
    assert max(case.errors()) == 0
    assert handed_back() == {"the model computes in bfloat16, the kernels in float16"}


# ------------------------------------------------------------------------------------------------------- whole networks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ltx2")


def test_a_stream_in_fp32_has_products_in_fp16(folder: Path) -> None:
    """Nearer than all in fp16."""
    path, scene = checkpoints.write("ltx23", folder), family_scenes.inputs("ltx23")
    wide, theirs, exact = (
        family_scenes.parts(sample(load(path, *given), scene))[0] for given in ((None, SINGLE), (OFF,), (OFF, SINGLE))
    )
    assert not handed_back() and 0 < distance(wide, exact) <= distance(theirs, exact)


def test_where_stock_has_bf16_it_computes_as_a_model_without_a_family(folder: Path) -> None:
    model = load(checkpoints.write("ltx23", folder), None, torch.bfloat16)
    assert RUNNING in model.model.diffusion_model.__dict__ and not model.stream.arrivals.family
    assert types_of(LTX_2, KernelPolicy(), torch.device("cuda", 0)) is None


def test_without_bf16_a_block_that_is_handed_back_multiplies_halves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does what is beside the blocks; the report tells no share of these products."""
    monkeypatch.setattr(diffusion, "narrows_on", lambda _device, dtype: dtype is SINGLE)
    monkeypatch.setattr(operations, "narrows", lambda x: x.dtype is SINGLE)
    model = load(checkpoints.write("ltx23", folder), None, SINGLE)
    net, scene = model.model.diffusion_model, family_scenes.inputs("ltx23")
    running = net.__dict__[RUNNING]
    sample(model, scene)
    beside = running.ours
    assert beside > 0 and not operations.words(net) and not handed_back()
    changed = net.transformer_blocks[1].attn2
    changed.forward = changed.forward
    sample(model, scene)
    assert handed_back() == {"another node has replaced attn2"} and running.ours > 2 * beside


def test_a_latent_with_its_sound_needs_as_much_in_one_piece(folder: Path) -> None:
    net = load(checkpoints.write("ltx23", folder)).model.diffusion_model
    packed = need(net, (1, 1, 128 * (6144 + 126)), SINGLE)
    assert packed is not None and packed == pytest.approx(need(net, (1, 128, 16, 16, 24), SINGLE), rel=0.05)
    assert need(net, (1, 128, 16, 16, 24), torch.bfloat16) is None

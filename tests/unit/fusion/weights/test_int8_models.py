"""A Wan out of a file of 8-bit numbers: what it computes as halves, and under `turbo` as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.ldm.wan.model
import comfy.model_management
import comfy.ops
import comfy.sd
import comfy.utils
import in_halves
import int8_files
import pytest
import torch
from scenes import Scene, Studio, sample
from torch.nn import functional
from wan_in_halves import distance, handed_back

from fusestream import checkpoints
from fusestream.fusion import KernelPolicy
from fusestream.fusion.families.wan import block as wan
from fusestream.fusion.fused import attention
from fusestream.fusion.weights import integer_weights
from fusestream.fusion.weights.lora import Added, Pair
from fusestream.fusion.weights.storage import ConvRotInt4, Int8
from fusestream.kernels_cuda import LEDGER, rows_to_int8
from fusestream.kernels_cuda.registry import Op

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")
HALF = torch.float16


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


def load(path: Path, default: Any = "auto", **policy: Any) -> Any:
    return in_halves.load(path, KernelPolicy.of(default, **policy))


def unturned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's rows are taken for such as were not turned."""
    for one in (Int8, ConvRotInt4):
        monkeypatch.setattr(one, "integers", lambda storage, turned=one.integers: turned(storage)._replace(rotation=0))


# --------------------------------------------------------------------------------------------------------- whole models


@pytest.fixture(scope="module")
def scenes(scenes: dict[str, Scene]) -> dict[str, Scene]:
    """With as many tokens of text as stock fills a prompt up to: a step's two prompts are rows enough for a sum with a LoRA to be
    rounded."""

    def filled(side: Any) -> list[Any]:
        return [[functional.pad(words, (0, 0, 0, 512 - words.shape[1])), more] for words, more in side]

    return {
        kind: scene._replace(positive=filled(scene.positive), negative=filled(scene.negative))
        for kind, scene in scenes.items()
    }


def files(studio: Studio, kind: str) -> tuple[Path, Path]:
    return int8_files.write(checkpoints.write("wan_t2v", studio.folder, "fp16"), studio.folder, kind)


@pytest.mark.every_other
@pytest.mark.parametrize("op", ["linear", "linear_int8"])
def test_products_in_8_bits_can_be_switched_off(studio: Studio, scenes: dict[str, Scene], op: str) -> None:
    """`linear` too: whoever wants that as stock computes it did not ask for 8 bits."""
    of_int8, _ = files(studio, "convrot")
    found, wanted = (
        sample(load(of_int8, precision=precision, **{op: "off"}), scenes["wan_t2v"])
        for precision in ("turbo", "precise")
    )
    assert torch.equal(found, wanted)


# ---------------------------------------------------------------------------------------------------- one block, alone


class Case:
    """A block whose weights stock has loaded from a file, and the same of halves; inputs of a batch of two."""

    def __init__(self, kind: str = "convrot", dim: int = 256) -> None:
        quantising = comfy.ops.mixed_precision_ops({}, HALF)
        blocks = [self.block(operations, dim) for operations in (quantising, comfy.ops.disable_weight_init)]
        stored, halves = {}, {}
        for name, parameter in blocks[1].state_dict().items():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2
            value = (torch.randn(parameter.shape) * scale + (0 if parameter.ndim == 2 else 0.5)).half()
            stored[name] = halves[name] = value
            if name.endswith(".weight") and value.ndim == 2:
                one = int8_files.quantised(value, int8_files.KINDS[kind])
                stored |= int8_files.state_dict(one, name.removesuffix(".weight"))
                halves[name] = int8_files.numbers(one)
        self.of_int8, self.of_halves = blocks
        for block, tensors in zip(blocks, (stored, halves), strict=True):
            block.load_state_dict(tensors)
            wan.fuse(block)
        self.x, self.context = torch.randn(2, 60, dim).half(), torch.randn(2, 40, dim).half()
        self.e = torch.randn(2, 6, dim).half() * 0.3
        angle = torch.randn(1, 60, 1, dim // 4)
        self.freqs = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos()), -1).unflatten(-1, (2, 2))

    @staticmethod
    def block(operations: Any, dim: int) -> Any:
        settings = {"operations": operations, "device": "cpu", "dtype": HALF}
        return comfy.ldm.wan.model.WanAttentionBlock(
            "t2v_cross_attn", dim, 2 * dim, 2, (-1, -1), True, True, operation_settings=settings
        )

    def run(self, block: Any, precision: Any = "precise", rows: slice = slice(None)) -> torch.Tensor:
        model: Any = type("Model", (), {"model_options": {"transformer_options": {}}})
        attention.install(model, KernelPolicy.of(precision=precision))
        given = {"e": self.e[rows], "freqs": self.freqs, "context": self.context[rows], "context_img_len": None}
        options = model.model_options["transformer_options"]
        out: torch.Tensor = block(self.x[rows], **given, transformer_options=options)
        return out


@pytest.mark.parametrize("kind", int8_files.KINDS)
def test_a_block_that_stock_has_loaded(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    case = Case(kind)
    precise, turbo = (case.run(case.of_int8, precision) for precision in ("precise", "turbo"))
    assert torch.equal(precise, case.run(case.of_halves)) and not handed_back()
    # A number of x is off by step / sqrt(12), step = largest / 127, and the largest of some hundred is about three times their
    # norm's share: 0.7 % for each product, and of 4 bits 127 / 7 times that. No way through the block has more than four, one
    # behind the other.
    bits = int8_files.KINDS[kind].bits
    coarse = 1 if bits == 8 else 127 / 7
    assert 0.002 * coarse < distance(turbo, precise) < 4 * 0.007 * coarse
    if int8_files.KINDS[kind].rotation:
        unturned(monkeypatch)
        assert distance(case.run(case.of_int8, "turbo"), precise) > 0.3


@pytest.mark.parametrize("kind", int8_files.KINDS)
def test_norms_write_what_products_of_integers_read(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of a block's three. The text has no norm before its keys and values."""
    case, ran, run = Case(kind), [], Op.run
    monkeypatch.setattr(Op, "run", lambda op, *given: ran.append((op.name, given[0][0].dtype)) or run(op, *given))
    case.run(case.of_int8, "turbo")
    bits, names = int8_files.KINDS[kind].bits, [name for name, _ in ran]
    assert names.count(f"norm_to_int{bits}") == 3 and "norm_modulate" not in names
    assert names.count(f"rows_to_int{bits}") == 1
    products = [dtype for name, dtype in ran if name.removesuffix("_") == f"linear_int{bits}"]
    # q, k, v; q, k, v; into the feed-forward. Both o and the way out round what no norm has written.
    assert products.count(torch.int8) == 7 and products.count(HALF) == 3
    ran.clear()
    case.run(case.of_int8, "precise")
    assert [name for name, _ in ran].count("norm_modulate") == 3


@pytest.mark.parametrize("precision", ["precise", "turbo"])
def test_each_of_a_batch_is_computed_as_it_would_be_alone(precision: Any) -> None:
    case = Case()
    both = case.run(case.of_int8, precision)
    alone = [case.run(case.of_int8, precision, slice(at, at + 1)) for at in range(2)]
    assert distance(torch.cat(alone), both) < 2e-3, "torch's own sums differ with the batch"


def test_turbo_leaves_the_weights_of_halves_alone_where_x_is_short() -> None:
    case = Case()
    assert torch.equal(case.run(case.of_halves, "turbo"), case.run(case.of_halves))


def test_a_lora_on_8_bits_is_one_on_their_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `turbo` the sum is rounded again where x is long enough, with what `rows_to_int8` gives each row."""
    case = Case()
    before = case.run(case.of_int8)
    for block in (case.of_int8, case.of_halves):
        block.self_attn.q.weight_function = block.ffn[2].weight_function = []
        torch.manual_seed(3)
        for module in (block.self_attn.q, block.ffn[2]):
            n, k = module.weight.shape
            module.weight_function = [Added([Pair(torch.randn(n, 4).half(), torch.randn(4, k).half(), 0.02)])]
    precise = case.run(case.of_int8)
    assert torch.equal(precise, case.run(case.of_halves)) and distance(precise, before) > 0.05
    short = case.run(case.of_int8, "turbo")
    rounded: list[int] = []
    monkeypatch.setattr(integer_weights, "multiplies_integers", lambda *_, **__: True)
    monkeypatch.setattr(
        integer_weights, "rows_to_int8", lambda x, **how: rounded.append(how["rotation"]) or rows_to_int8(x, **how)
    )
    long = case.run(case.of_int8, "turbo")
    assert rounded == [256, 256] and not torch.equal(short, long)
    assert all(0.002 < distance(one, precise) < 4 * 0.007 for one in (short, long))


@pytest.mark.deep
def test_torch_compile_takes_a_block_of_8_bits() -> None:
    case = Case()
    want = case.run(case.of_int8, "turbo")
    torch.compiler.reset()
    compiled = torch.compile(case.of_int8, backend="eager", dynamic=False)
    assert distance(case.run(compiled, "turbo"), want) < 3e-3 and not handed_back()

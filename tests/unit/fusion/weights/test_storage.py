"""One contract over every storage of a weight: what each class of `storage.py` answers, held against ComfyUI's own `dequantize`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import comfy.quant_ops
import gguf
import int8_files
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from torch import Tensor, nn

from fusestream.fusion.weights import storage
from fusestream.fusion.weights.ggml_tensor import held
from fusestream.fusion.weights.storage import Storage, storage_of
from fusestream.kernels_cuda import OPS, KernelPolicy, few_rows, int8_to_half
from fusestream.kernels_cuda.call import Call
from fusestream.kernels_cuda.ops.quant import to_half
from fusestream.kernels_cuda.ops.quant.rotation import turned
from fusestream.memory import Extent

N, K = 24, 512
POLICY = KernelPolicy.of("auto")


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


def numbers() -> Tensor:
    return torch.randn(N, K) * 0.1


def ggml(kind: str) -> Any:
    raw = gguf.quants.quantize(numbers().numpy(), gguf.GGMLQuantizationType[kind])
    stored = torch.from_numpy(raw).flatten()
    return held(stored, Extent("w", kind, (N, K), 0, stored.numel()), torch.float32)


def scaled_fp8(layout: str) -> Any:
    return QuantizedTensor.from_float(numbers(), layout, scale="recalculate")


class OfAnotherLayout:
    """A weight of a layout that only other tools, a GPU or a newer ComfyUI can make: its numbers are given."""

    def __init__(self, layout: str, params: Any = None, given: Tensor | None = None) -> None:
        self._layout_cls, self._qdata = layout, any_bytes(N, K // 2)
        self._params, self.dtype = params, torch.float16
        self._numbers = numbers().half() if given is None else given

    def dequantize(self) -> Tensor:
        return self._numbers


def any_bytes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def calibrated(layout: str, **params: Tensor) -> Any:
    """4-bit codes in the layout's own parameters, with scales for groups of 64."""
    kind = comfy.quant_ops.get_layout_class(layout)
    of = {"scale": torch.rand(K // 64, N) * 0.02, "orig_dtype": torch.float32, "orig_shape": (N, K)}
    return QuantizedTensor(any_bytes(N, K // 2), layout, kind.Params(**of, **params))


def awq() -> Any:
    return calibrated("TensorCoreAWQW4A16Layout", zeros=torch.randn(K // 64, N) * 0.1)


def svdquant() -> Any:
    """What is added is small here, so that a sum of two numbers in fp16 is as near as one."""
    narrow = {"proj_down": torch.randn(K, 8) * 0.01, "proj_up": torch.randn(N, 8) * 0.01}
    return calibrated("TensorCoreSVDQuantW4A4Layout", smooth_factor=torch.rand(K) + 0.5, **narrow)


SAMPLES: dict[str, Callable[[], Any]] = {
    "fp16": lambda: nn.Parameter(numbers().half(), requires_grad=False),
    "bf16": lambda: nn.Parameter(numbers().bfloat16(), requires_grad=False),
    "fp32": lambda: nn.Parameter(numbers(), requires_grad=False),
    "fp8": lambda: nn.Parameter(numbers().to(torch.float8_e4m3fn), requires_grad=False),
    "fp8 scaled": lambda: scaled_fp8("TensorCoreFP8E4M3Layout"),
    "fp8 e5m2 scaled": lambda: scaled_fp8("TensorCoreFP8E5M2Layout"),
    **{
        f"int8 {name}": lambda kind=kind: int8_files.quantised(numbers(), kind)
        for name, kind in int8_files.KINDS.items()
    },
    "awq": awq,
    "svdquant": svdquant,
    "Q8_0": lambda: ggml("Q8_0"),
    "Q4_0": lambda: ggml("Q4_0"),
}
UNREAD = ("fp32", "int8 convrot", "int8 convrot_w4a4", "awq", "svdquant")  # by the op of a few rows
KINDS = pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES)


def wide(weight: Any) -> Tensor:
    found: Tensor = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    return found.double()


def near(found: Tensor, wanted: Tensor) -> bool:
    """Equal but for one rounding to fp16, and the product with a scale in fp32."""
    return torch.allclose(found.double(), wanted, rtol=2**-10, atol=2**-20)


def test_every_class_has_a_sample() -> None:
    covered = {type(storage_of(make())) for make in SAMPLES.values()}
    classes = {one for one in vars(storage).values() if isinstance(one, type) and issubclass(one, Storage)}
    of_tests_below = {Storage, storage.Quantised, storage.Integers, storage.Calibrated, storage.GroupedCodes}
    assert classes - covered == of_tests_below


@KINDS
def test_the_matrix_is_what_comfyui_makes_of_it(make: Callable[[], Any]) -> None:
    weight = make()
    found = storage_of(weight)
    matrix = found.matrix(POLICY)
    assert matrix.dtype is torch.float16 and matrix.shape == (N, K) and near(matrix, wide(weight))
    assert found.wide(POLICY).dtype is torch.float32 and near(found.wide(POLICY), wide(weight))


@pytest.mark.parametrize("name", SAMPLES)
def test_few_rows_reads_the_same_numbers(name: str) -> None:
    weight, x = SAMPLES[name](), torch.randn(2, K).half()
    stored = storage_of(weight).few_rows()
    assert (stored is None) == (name in UNREAD), "the op reads none of these"
    if stored is not None:
        assert stored.numbers.untyped_storage().data_ptr() == storage_of(weight).data.untyped_storage().data_ptr()
        found = few_rows(x, stored.numbers, stored.encoding, scale=stored.scale, out_dtype=torch.float32, policy=POLICY)
        rounding = 2**-11 * x.double().abs() @ wide(weight).abs().t()  # of each weight to fp16, at most
        assert ((found.double() - x.double() @ wide(weight).t()).abs() <= rounding + 1e-5).all()


@KINDS
def test_rows_of_integers_are_handed_out_by_files_of_such_alone(make: Callable[[], Any]) -> None:
    weight = make()
    found = storage_of(weight).integers()
    assert (found is not None) == isinstance(storage_of(weight), storage.Integers)
    if found is not None:
        assert found.numbers.data_ptr() == weight._qdata.data_ptr() and found.scales.numel() in (1, N)


@KINDS
def test_rows_of_a_table(make: Callable[[], Any]) -> None:
    weight, ids = make(), torch.tensor([3, 0, N - 1, 3])
    rows = storage_of(weight).rows(ids)
    assert rows is None or near(rows, wide(weight)[ids])
    assert storage_of(weight).has_rows or rows is None


@KINDS
def test_other_bytes_of_the_same_storage(make: Callable[[], Any]) -> None:
    """What a pager brings, and what a patch writes."""
    weight, other = make(), make()
    same = storage_of(weight).holding(storage_of(weight).data.clone())
    assert type(storage_of(same)) is type(storage_of(weight)) and torch.equal(wide(same), wide(weight))
    if storage_of(weight).is_writable:
        at = storage_of(weight).data.data_ptr()
        written = storage_of(weight).write(other)
        assert storage_of(written).data.data_ptr() == at and torch.equal(wide(written), wide(other))


@KINDS
def test_bytes_are_those_of_the_data(make: Callable[[], Any]) -> None:
    weight = make()
    assert storage_of(weight).nbytes == storage.stored(weight).nbytes > 0
    assert storage.is_quantised(weight) == isinstance(storage_of(weight), storage.Quantised)


@KINDS
def test_comfyui_gets_what_it_knows(make: Callable[[], Any]) -> None:
    """A layout of our own becomes numbers; all others stay the tensors that they are."""
    weight = make()
    found = storage_of(weight).for_comfyui()
    assert (found is weight) != storage_of(weight).is_own_layout
    assert near(found.dequantize() if isinstance(found, QuantizedTensor) else found, wide(weight))


def test_numbers_beyond_fp16_saturate() -> None:
    weight = nn.Parameter(torch.tensor([[1e6, -1e6, 65504.0, 1.0]]), requires_grad=False)
    assert storage_of(weight).matrix(POLICY).tolist() == [[65504.0, -65504.0, 65504.0, 1.0]]


def test_fp8_with_a_scale_for_each_row_is_read_by_comfyui(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = scaled_fp8("TensorCoreFP8E4M3Layout")
    object.__setattr__(weight._params, "scale", torch.full((N,), 2.0))
    monkeypatch.setattr(type(weight), "dequantize", lambda _: torch.full((N, K), 5.0))
    found = storage_of(weight)
    assert found.few_rows() is None and torch.equal(found.matrix(POLICY), torch.full((N, K), 5.0).half())


TURNED = SimpleNamespace(transposed=True, act_unsigned=False)  # what our ops do not read
SHIFTED = SimpleNamespace(transposed=False, act_unsigned=True)


@pytest.mark.parametrize(
    ("layout", "params"),
    [
        ("TensorCoreAWQW4A16Layout", TURNED),
        ("TensorCoreSVDQuantW4A4Layout", TURNED),
        ("TensorCoreSVDQuantW4A4Layout", SHIFTED),
        ("TensorCoreNVFP4Layout", None),
    ],
)
def test_layouts_that_only_comfyui_reads(monkeypatch: pytest.MonkeyPatch, layout: str, params: Any) -> None:
    monkeypatch.setattr(storage, "QuantizedTensor", OfAnotherLayout)
    weight = OfAnotherLayout(layout, params)
    found = storage_of(weight)
    assert torch.equal(found.matrix(POLICY), weight.dequantize()) and found.data is weight._qdata
    assert found.integers() is None and found.few_rows() is None and found.rows(torch.tensor([0])) is None
    made_beforehand = layout != "TensorCoreNVFP4Layout"
    assert found.is_writable != made_beforehand and not found.has_rows
    assert found.is_converted_for_products(by_us=True, full_precision=False) == made_beforehand


def grouped(correction: Tensor | None = None) -> Any:
    """A weight of W4A8, which this ComfyUI may not know: codes of a book, scales of groups of 16, rows turned by 64."""
    book, scales, of_rows = torch.randn(16).sort().values, torch.rand(N, K // 16) * 100, torch.rand(N) * 0.01
    params = SimpleNamespace(
        scale=scales.to(torch.float8_e4m3fn), s_channel=of_rows, codebook=book, correction=correction, group_size=16,
        convrot_groupsize=64, transposed=False,
    )  # fmt: skip
    weight = OfAnotherLayout(storage.GROUPED_LAYOUT, params)
    counted = torch.stack((weight._qdata & 15, weight._qdata >> 4 & 15), -1).flatten(1).long()
    wide = book[counted] * params.scale.float().repeat_interleave(16, 1)
    weight._numbers = turned(wide.round().clamp(-127, 127) * of_rows[:, None], 64) / 8
    return weight


def test_grouped_codes_are_rows_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "QuantizedTensor", OfAnotherLayout)
    weight = grouped()
    found = storage_of(weight)
    rows = found.multiplied()
    assert rows is not None and rows.bits == 8 and rows.shape == (N, K) and rows.rotation == 64 and found.is_of_integers
    assert near(int8_to_half(rows.numbers, rows.scales, rotation=64), weight.dequantize().double())
    assert near(found.matrix(POLICY), weight.dequantize().double()) and found.few_rows() is None
    assert near(found.wide(POLICY), weight.dequantize().double())


def test_grouped_codes_of_stocks_own_library() -> None:
    """Where the installed comfy-kitchen has the layout: weights that it rounds itself, of 4 and 6 bits."""
    try:
        comfy.quant_ops.get_layout_class(storage.GROUPED_LAYOUT)
    except KeyError:
        pytest.skip("this comfy-kitchen has no weights with scales for groups")
    for bits, group in ((4, 16), (4, 64), (6, 16)):
        asked = {"bits": bits, "group_size": group, "convrot_groupsize": 64}
        weight = QuantizedTensor.from_float(numbers(), storage.GROUPED_LAYOUT, **asked)
        assert storage_of(weight).is_of_integers and near(storage_of(weight).matrix(POLICY), wide(weight))


def test_groups_with_an_offset_are_comfyuis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "QuantizedTensor", OfAnotherLayout)
    weight = grouped(correction=torch.zeros(K // 16, N))
    found = storage_of(weight)
    assert found.integers() is None and not found.is_of_integers
    assert torch.equal(found.matrix(POLICY), weight.dequantize().half())


def test_tiles_of_svdquant_are_put_in_order() -> None:
    rows, columns, rank = 256, 192, 8
    kind = comfy.quant_ops.get_layout_class("TensorCoreSVDQuantW4A4Layout")
    codes, scales, up = any_bytes(2, 3, 32, 128), torch.rand(2, 3, 128) * 0.02, torch.randn(2, rank, 128) * 0.1
    params = {"orig_dtype": torch.float32, "orig_shape": (rows, columns), "proj_down": torch.randn(columns, rank) * 0.1}
    made = kind.Params(scale=scales, proj_up=up, smooth_factor=torch.ones(columns), **params)
    weight = QuantizedTensor(codes, "TensorCoreSVDQuantW4A4Layout", made)
    found = storage_of(weight).matrix(POLICY)
    torch.testing.assert_close(found.double(), wide(weight), rtol=2**-9, atol=2**-10)  # a wrong row is off by 0.1


@pytest.mark.parametrize(
    ("make", "never", "by_us", "full_precision"),
    [
        (SAMPLES["fp16"], False, False, False),
        (SAMPLES["fp8"], True, True, True),
        (SAMPLES["fp8 scaled"], False, False, True),  # from RTX 40 on ComfyUI multiplies it as it is
        (SAMPLES["int8 rows"], False, True, True),
        (SAMPLES["Q8_0"], True, True, True),
    ],
    ids=["fp16", "fp8", "fp8 scaled", "int8", "ggml"],
)
def test_where_a_lora_is_added_on_the_way(
    make: Callable[[], Any], never: bool, by_us: bool, full_precision: bool
) -> None:
    found = storage_of(make())
    asked = [(False, False), (True, False), (False, True)]
    answers = [found.is_converted_for_products(by_us=ours, full_precision=full) for ours, full in asked]
    assert answers == [never, by_us, full_precision]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scale_of_fp8_may_have_any_type(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI takes it as the file has it; our kernels take fp32 alone."""
    given = scaled_fp8("TensorCoreFP8E4M3Layout")
    params = dataclasses.replace(given._params, scale=torch.tensor(0.25, dtype=dtype))
    weight = QuantizedTensor(given._qdata, given._layout_cls, params)
    seen: list[str | None] = []

    def asked(x: Tensor, scale: Tensor, *, policy: KernelPolicy) -> Tensor:
        seen.append(next(to_half.obstacles(Call("to_half", (x, scale), (), policy)), None))
        return OPS["to_half"].reference(x, scale)

    monkeypatch.setattr(storage, "to_half", asked)
    assert torch.equal(storage_of(weight).matrix(POLICY), (given._qdata.float() * 0.25).half())
    assert seen == [None]

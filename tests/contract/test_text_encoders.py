"""Each text encoder that ComfyUI knows: it streams, with kernels off to the bit as stock reads, and with kernels as near.

What a family computes `test_encoders.py` tests in every storage, with LoRAs, and in every room. Here are all classes.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.utils
import comfyui_version
import contract.text_encoders as of
import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS
from contract.encoder_page import PAGE, EncoderPage
from contract.family_cases import far, same
from contract.test_encoders import for_the_cpu  # noqa: F401 - a fixture
from contract.text_encoders import CASES, FILES, WITHOUT, Case

from fusestream import fusion
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.load import text
from fusestream.fusion.weights.storage import is_quantised
from fusestream.kernels_cuda import LEDGER, KernelPolicy

OFF, AUTO = KernelPolicy.of("off"), KernelPolicy.of(precision="precise")

# Used most, and every kind of layers: these in each run.
FIRST = (
    "CLIP_L stable_diffusion", "CLIP_G sd3", "T5_XXL hidream", "UMT5_XXL wan", "T5_XL stable_diffusion", "T5_GEMMA stable_audio",
    "GEMMA_3_12B ltxv", "GEMMA_4_E4B stable_diffusion", "GPT_OSS_20B lens", "QWEN25_7B qwen_image", "QWEN3_4B flux2",
    "QWEN3VL_4B krea2", "QWEN35_08B qwen_image", "MINISTRAL_3_3B flux2",
)  # fmt: skip
# One of each kind of layers, in every format that stock knows: almost all of each matrix is in blocks of 16 by 64.
IN_FORMATS = (
    "T5_XXL_OLD", "LLAMA3_8", "GEMMA_2_2B", "GEMMA_3_12B", "GEMMA_4_E4B", "GPT_OSS_20B", "QWEN25_7B",
    "QWEN3_4B", "QWEN3VL_2B", "QWEN35_08B", "MINISTRAL_3_3B",
)  # fmt: skip
NEAR = 2e-3
FORMATS = (*sorted(QUANT_ALGOS), "nvfp4_awq")
LONG = ("GEMMA_3_12B ltxv", "GEMMA_4_E4B stable_diffusion")
SHIPPED = ("GEMMA_3_12B ltxv", "nvfp4_awq")


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None, one_tokenizer_of_each: None) -> Iterator[None]:
    LEDGER.clear()
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("text-encoders")
    yield found
    gc.collect()
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> Iterator[EncoderPage]:
    update: bool = request.config.getoption("--update-classes")
    found = EncoderPage(update=update)
    yield found
    if update:
        found.write(of.STOCKS, WITHOUT)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, for_the_cpu: None) -> list[tuple[str, int]]:  # noqa: F811
    """What is loaded from now on is fused for the CPU too: the families, and how many blocks each has taken."""
    found: list[tuple[str, int]] = []
    checked = text.compatibility.checked

    def noted(family: Any, *rest: Any) -> Any:
        known = checked(family, *rest)

        def fuse(model: Any, policy: KernelPolicy) -> int:
            found.append((known.name, known.fuse(model, policy)))
            return found[-1][1]

        return replace(known, fuse=fuse)

    monkeypatch.setattr(text.compatibility, "checked", noted)
    return found


def ours(case: Case, path: Path, policy: KernelPolicy, budget: float = -1.0) -> Any:
    clip = fusion.load_text_encoder(str(path), [], policy, budget, kind=case.type, options=of.options(case, path))
    assert hasattr(clip.patcher, "stream") == bool(budget), LEDGER.messages
    if budget:
        residency = clip.patcher.stream.residency
        residency.ceiling = residency.least
    return clip


def each(names: Any = CASES) -> list[Any]:
    return [pytest.param(CASES[one], marks=() if one in FIRST else pytest.mark.deep, id=one) for one in names]


@pytest.mark.skipif(comfyui_version.__version__ != "0.30.0", reason="the table is of ComfyUI 0.30.0")
class TestNoneIsForgotten:
    def test_every_encoder_has_a_file(self) -> None:
        members = {case.of.te for case in CASES.values()}
        assert not members & WITHOUT.keys()
        assert members | WITHOUT.keys() == of.KNOWN
        assert set(FIRST) <= CASES.keys() and set(IN_FORMATS) <= FILES.keys()

    def test_every_class_that_stock_builds_of_one_file_has_a_case(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of each encoder, by each type that its loader asks for."""
        for te in of.KNOWN - WITHOUT.keys():
            monkeypatch.setattr(comfy.sd, "detect_te_model", lambda _, te=te: comfy.sd.TEModel[te])
            cases = [case for case in CASES.values() if case.of.te == te]
            known = {of.built_by(case.clip_type, spiece="spiece_model" in case.of.words) for case in cases}
            every = {of.built_by(kind, spiece=spiece) for kind in comfy.sd.CLIPType for spiece in (False, True)}
            assert every <= known, te


def test_the_page_has_every_case(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-classes"):
        pytest.skip("it is written at the end")
    page, words = EncoderPage(update=False), PAGE.read_text(encoding="utf-8")
    assert page.rows.keys() == CASES.keys()
    assert all(f"- {name}: {reason}." in words for name, reason in {**of.STOCKS, **WITHOUT}.items())
    assert {name.split()[0] for name, cells in page.rows.items() if cells[-1] != "-"} == set(IN_FORMATS)


@pytest.mark.parametrize("storage", ["fp16", pytest.param("bf16", marks=pytest.mark.deep)])
@pytest.mark.parametrize("case", each())
def test_with_kernels_off_it_is_stocks_to_the_bit(case: Case, storage: str, folder: Path) -> None:
    with of.opened(case):
        path = of.write(case, folder, storage)
        assert comfy.sd.detect_te_model(comfy.utils.load_torch_file(str(path))).name == case.of.te
        exact = of.read(of.stocks(case, path), case)
        assert all(one.isfinite().all() for one in exact) and exact[0].std() > 0.01
        for budget in (-1.0, 0.0):
            assert same(of.read(ours(case, path, OFF, budget), case), exact)


@pytest.mark.parametrize("case", each())
def test_with_kernels_it_is_as_near_as_its_blocks_that_are_ours(
    case: Case, folder: Path, page: EncoderPage, fused: list[tuple[str, int]]
) -> None:
    with of.opened(case):
        path = of.write(case, folder)
        stock = of.stocks(case, path)
        exact, blocks = of.read(stock, case), of.blocks(stock.cond_stage_model)
        clip = ours(case, path, AUTO)
        found = of.read(clip, case)
    family, count = fused[0] if fused else ("", 0)
    refusals = [one for one in LEDGER.refusals if one.op == "text encoder"]
    if count and case.writes:  # our writing does not ask stock's network for its logits
        assert not refusals and same(found, exact[-1:])
    elif count:
        assert not refusals
        assert 0 < far(found, exact) <= NEAR
    else:
        assert same(found, exact)
    formats = "all" if case.file in IN_FORMATS else "-"
    kind = type(stock.cond_stage_model).__name__.rstrip("_")
    page.found(case.file, case.type, case.serves, kind, family if count else "ComfyUI", f"{count} of {blocks}", formats)


def test_klein_reads_qwen3_vl_under_the_names_of_its_authors(folder: Path) -> None:
    """Stock takes it for a Qwen3 there, whose layers have other names, and would compute with what its memory held before."""
    theirs, renamed = CASES["QWEN3VL_4B krea2"]._replace(type="flux2"), CASES["QWEN3VL_4B_LAYERS flux2"]
    with of.opened(theirs):
        exact = of.read(of.stocks(renamed, of.write(renamed, folder)), renamed)
        for budget in (-1.0, 0.0):
            assert same(of.read(ours(theirs, of.write(theirs, folder), OFF, budget), theirs), exact)


@pytest.mark.parametrize("budget", [-1.0, 0.0], ids=["streamed", "stock's"])
@pytest.mark.parametrize("te", WITHOUT)
def test_one_file_of_two_is_told_where_it_belongs(te: str, budget: float, folder: Path) -> None:
    """Of which stock would build another encoder, without weights, or say that a tokenizer is invalid."""
    with pytest.raises(WrongFile, match=r"reads prompts beside .* alone: choose that file as well"):
        fusion.load_text_encoder(str(of.write_alone(te, folder)), [], OFF, budget)


def kinds_of_files() -> list[Any]:
    """Each kind of layers in each format; usually in one, and of Gemma's many layers in what LTX-2's templates ship."""
    names = [next(name for name, case in CASES.items() if case.file == file) for file in IN_FORMATS]
    turns = [
        (name, kind, i % len(FORMATS) == n and name not in LONG)
        for i, name in enumerate(names)
        for n, kind in enumerate(FORMATS)
    ]
    return [
        pytest.param(
            CASES[name], kind, marks=() if turn or (name, kind) == SHIPPED else pytest.mark.deep, id=f"{name} {kind}"
        )
        for name, kind, turn in turns
    ]


@pytest.mark.parametrize(("case", "kind"), kinds_of_files())
def test_each_of_stocks_formats_streams_packed_and_reads_as_stock(
    case: Case, kind: str, folder: Path, fused: list[tuple[str, int]]
) -> None:
    with of.opened(case):
        file = of.in_format(case, of.write(case, folder), folder, kind)
        exact = of.read(of.stocks(case, file), case)
        for budget in (-1.0, 0.0):
            clip = ours(case, file, OFF, budget)
            assert same(of.read(clip, case), exact)
            assert sum(map(is_quantised, clip.cond_stage_model.parameters())) > 3
        clip = ours(case, file, AUTO)
        found = of.read(clip, case)
        if fused:
            assert 0 < far(found, exact) <= NEAR
        else:
            assert same(found, exact)
    file.unlink()


@pytest.mark.parametrize("kind", ["nvfp4_awq", "int8_tensorwise_awq"])
def test_text_is_written_with_scales_of_inputs(kind: str, folder: Path, fused: list[tuple[str, int]]) -> None:
    """A token's products read INT8 as it is stored, but where its inputs have scales."""
    case, written = CASES["QWEN3VL_2B qwen_image"], []
    with of.opened(case):
        file = of.in_format(case, of.write(case, folder), folder, kind)
        for clip in (of.stocks(case, file), ours(case, file, AUTO)):
            tokens = clip.tokenize(of.FOX)
            options = {"do_sample": True, "top_k": 1, "temperature": 1.0, "repetition_penalty": 1.3, "seed": 0}
            written.append(clip.generate(tokens, max_length=6, presence_penalty=20.0, **options))
    assert fused[0][1] and written[0] == written[1] and len(set(written[0])) > 3

"""Each model class that ComfyUI knows: it streams, with kernels off to the bit as stock computes, and with kernels as near.

That is so of classes that no family of ours computes as well: almost all multiplications of their Linears are our ops' where the
file has integers, and where a card has no BF16; and q and k turn by our op where comfy-kitchen would take eager torch.
"""

from __future__ import annotations

import functools
import gc
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import comfy.sd
import comfy.supported_models
import comfyui_version
import contract.model_classes as of
import in_halves
import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS
from contract.class_page import PAGE, ClassPage
from contract.model_classes import CASES, WITHOUT
from scenes import distance
from torch import Tensor

from fusestream.fusion.base.hooks import RUNNING
from fusestream.fusion.fused import kitchen_rope, operations
from fusestream.fusion.fused.kitchen_calls import FUNCTIONS
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.weights.storage import is_quantised
from fusestream.kernels_cuda import LEDGER, KernelPolicy

AUTO, OFF = KernelPolicy.of("auto", precision="auto"), KernelPolicy.of("off")
TURNING = KernelPolicy.of("off", rms_rope_="auto")
SINGLE, BF16 = torch.float32, torch.bfloat16

# Used most: these in each run, every second of the others.
FIRST = (
    "QwenImage", "LTXAV", "MiniMaxH3", "HunyuanVideo", "HunyuanVideo15", "HiDream", "ACEStep15", "Omnigen2", "GenmoMochi",
    "Kandinsky5", "CosmosT2IPredict2", "Anima", "SD3", "AuraFlow", "StableAudio", "Hunyuan3Dv2", "ErnieImage", "Krea2",
)  # fmt: skip
PREFIXED = ("HunyuanVideo", "HunyuanImage21", "Hunyuan3Dv2")
STRANGERS = tuple(name for name, case in CASES.items() if not case.family)


class Found(NamedTuple):
    """What a model made of noise; the share of its products that was ours, None: they are a family's; and which family's."""

    latents: Tensor
    share: float | None
    family: str | None


class Shelf:
    """The files, and what of their models several tests ask for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exact = functools.cache(self._exact)

    def _exact(self, name: str) -> Tensor:
        """Of the class as ComfyUI knows it, by stock's own loading, in fp32."""
        with of.opened(name):
            model = comfy.sd.load_diffusion_model(str(of.write(name, self.folder)))
            assert type(model.model.model_config).__name__ == name
            return of.once(model, name)

    def ours(self, name: str, file: Path, policy: KernelPolicy, dtype: torch.dtype) -> Found:
        with of.opened(name):
            model = in_halves.load(file, policy, dtype)
            latents = of.once(model, name)
        running = model.model.diffusion_model.__dict__.get(RUNNING)
        share = running and running.ours / max(running.ours + running.stocks, 1)
        return Found(latents, share, model.stream.arrivals.family)

    def file(self, name: str) -> Path:
        with of.opened(name):
            return of.write(name, self.folder)


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None) -> Iterator[None]:
    LEDGER.clear()
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    folder = tmp_path_factory.mktemp("classes")
    yield Shelf(folder)
    gc.collect()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def page(request: pytest.FixtureRequest) -> Iterator[ClassPage]:
    update: bool = request.config.getoption("--update-classes")
    found = ClassPage(update=update)
    yield found
    if update:
        found.write(WITHOUT)


def cases(names: Sequence[str], promise: str) -> list[Any]:
    """What our families compute `test_families` tests as well."""

    def is_each_time(name: str) -> bool:
        if name in FIRST:
            return True
        return promise not in ("integers", "halves", "turning") and (not CASES[name].family or bool(CASES[name].kind))

    return [pytest.param(name, marks=[] if is_each_time(name) else pytest.mark.every_other, id=name) for name in names]


@pytest.mark.skipif(comfyui_version.__version__ != "0.30.0", reason="the table is of ComfyUI 0.30.0")
def test_no_class_is_forgotten() -> None:
    assert not CASES.keys() & WITHOUT.keys()
    assert CASES.keys() | WITHOUT.keys() == {kind.__name__ for kind in comfy.supported_models.models}
    assert set(FIRST) <= CASES.keys()


def test_the_page_has_every_class(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-classes"):
        pytest.skip("it is written at the end")
    page, text = ClassPage(update=False), PAGE.read_text(encoding="utf-8")
    assert page.families.keys() == CASES.keys()
    assert {name for name, head in page.found if head == "Without BF16"} == set(STRANGERS)
    assert {name for name, head in page.found if head == "INT8 file"} == {
        name for name in STRANGERS if not CASES[name].alone
    }
    assert all(f"- {name}: {reason}." in text for name, reason in WITHOUT.items())


@pytest.mark.parametrize("name", cases(tuple(CASES), "to the bit"))
def test_with_kernels_off_it_is_stocks_to_the_bit(name: str, shelf: Shelf, page: ClassPage) -> None:
    exact, (found, share, family) = shelf.exact(name), shelf.ours(name, shelf.file(name), OFF, SINGLE)
    assert exact.isfinite().all() and exact.std() > 0.01
    assert torch.equal(found, exact)
    assert (share is None) == CASES[name].family
    page.computed_by(name, family if CASES[name].family else None)


# Not tried in four bits: stock reads a width off a matrix that is packed; or the blocks of so small a model are less than a quarter
# of it then, so that it does not stream.
NOT_IN_4_BITS = {"StableAudio3", "SV3D_u", "SV3D_p", "SVD_img2vid", "HunyuanDiT1", "ErnieImage"}
IN_4_BITS = ("nvfp4", "nvfp4_awq", "convrot_w4a4")


def kinds_of_files() -> list[Any]:
    """Each class in each format that stock knows; in a usual run in one of them."""
    formats = sorted((*QUANT_ALGOS, "nvfp4_awq"))
    turns = [(name, kind, i % len(formats) == n) for i, name in enumerate(STRANGERS) for n, kind in enumerate(formats)]
    return [
        pytest.param(name, kind, marks=[] if is_its_turn else pytest.mark.deep, id=f"{name} {kind}")
        for name, kind, is_its_turn in turns
        if not (CASES[name].alone or (kind in IN_4_BITS and name in NOT_IN_4_BITS))
    ]


@pytest.mark.every_other
@pytest.mark.parametrize(("name", "kind"), kinds_of_files())
def test_each_of_stocks_formats_streams_as_stock_computes_it(name: str, kind: str, shelf: Shelf) -> None:
    """Packed as the file has it, and with kernels off to the bit."""
    with of.opened(name):
        file = of.in_format(name, shelf.file(name), shelf.folder, kind)
        stock = comfy.sd.load_diffusion_model(str(file))
        theirs = of.once(stock, name)
        streamed = load_streamed_diffusion_model(str(file), None, OFF)
        assert torch.equal(of.once(streamed, name), theirs)
        held = streamed.model.diffusion_model.parameters()
        assert sum(map(is_quantised, held)) > 3
    file.unlink()


@pytest.mark.parametrize("name", cases([name for name in PREFIXED if name in CASES], "without a prefix"))
def test_names_need_no_prefix(name: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """As stock names the tensors of its own network."""
    exact = shelf.exact(name)
    monkeypatch.setitem(CASES, name, CASES[name]._replace(prefix=""))
    assert torch.equal(shelf.ours(name, shelf.file(name), OFF, SINGLE).latents, exact)


@pytest.mark.parametrize("name", cases([name for name in STRANGERS if not CASES[name].alone], "integers"))
def test_a_files_integers_are_multiplied_by_our_ops(name: str, shelf: Shelf, page: ClassPage) -> None:
    of_int8, of_halves = of.in_integers(name, shelf.file(name), shelf.folder)
    exact = shelf.ours(name, of_halves, OFF, SINGLE).latents
    theirs = shelf.ours(name, of_int8, OFF, BF16).latents
    ours, share, _ = shelf.ours(name, of_int8, AUTO, BF16)
    assert share is not None and share >= 0.9
    error = distance(ours, exact) / distance(theirs, exact)
    assert error <= 1.5
    page.measured(name, "INT8 file", share, error)


@pytest.mark.parametrize("name", cases(STRANGERS[::-1], "halves"))
def test_without_bf16_products_in_halves_are_nearer_than_bf16_is(
    name: str, shelf: Shelf, page: ClassPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an RTX 20, where stock computes a model without FP16 in FP32."""
    exact, file = shelf.exact(name), shelf.file(name)
    theirs = shelf.ours(name, file, OFF, BF16).latents
    monkeypatch.setattr(operations, "narrows", lambda x: x.dtype is SINGLE)
    ours, share, _ = shelf.ours(name, file, AUTO, SINGLE)
    assert share is not None and share >= 0.9
    error = distance(ours, exact) / distance(theirs, exact)
    assert not torch.equal(ours, exact) and error <= 0.5
    page.measured(name, "Without BF16", share, error)


# Classes whose networks turn nothing by comfy-kitchen.
WITHOUT_KITCHEN = {
    "SD3", "GenmoMochi", "CosmosT2V", "CosmosI2V", "HiDreamO1", "ACEStep", "ACEStep15", "AuraFlow", "PixArtAlpha", "PixArtSigma",
    "StableAudio", "StableAudio3", "HunyuanDiT", "HunyuanDiT1", "Hunyuan3Dv2", "Hunyuan3Dv2mini", "Hunyuan3Dv2_1",
    "CogVideoX_T2V", "CogVideoX_I2V", "CogVideoX_Inpaint", "SV3D_u", "SV3D_p", "SVD_img2vid",
}  # fmt: skip


@pytest.mark.parametrize("name", cases(STRANGERS, "turning"))
def test_q_and_k_turn_by_our_op(name: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card, where torch's CUDA is older than 13: nothing is left to kitchen's eager torch."""
    registry = pytest.importorskip("comfy_kitchen").registry
    exact, file, found = shelf.exact(name), shelf.file(name), registry.get_implementation
    theirs = shelf.ours(name, file, OFF, BF16).latents
    left: set[str] = set()

    def noted(function: str, *args: Any, **kwargs: Any) -> Any:
        chosen = found(function, *args, **kwargs)
        # In a call: LTX-2 turns prompts before it.
        is_asked = function in FUNCTIONS and kitchen_rope._now.policy is not None
        if is_asked and getattr(chosen, "func", None) is not kitchen_rope._turned:
            left.add(function)
        return chosen

    monkeypatch.setattr(kitchen_rope, "runs_on", lambda *_: True)
    monkeypatch.setattr(registry, "get_implementation", noted)
    with in_halves.modes() as asked:
        ours = shelf.ours(name, file, TURNING, BF16).latents
    assert not left
    assert ("rms_rope_" in asked) == (name not in WITHOUT_KITCHEN)
    if name in WITHOUT_KITCHEN:
        assert torch.equal(ours, theirs)
    assert distance(ours, exact) <= 1.15 * distance(theirs, exact)

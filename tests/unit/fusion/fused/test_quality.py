"""The quality `auto`: it computes as the file is stored, says what that comes to, and leaves old workflows as they were."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import comfy.model_management
import in_halves
import int8_files
import pytest
import torch
from packed_files import packed_file
from safetensors.torch import load_file
from scenes import Scene, Studio, sample
from wan_in_halves import distance, handed_back

from fusestream import checkpoints, fusion
from fusestream.checkpoints.quantise import quantise
from fusestream.fusion.base.format import DRAFT, QUALITIES
from fusestream.fusion.estimate.plan import _faster_tiers, estimate
from fusestream.fusion.families.t5.encoder import FusedStack
from fusestream.fusion.fused import quality
from fusestream.fusion.fused.quality import AsStored
from fusestream.fusion.report.advice import faster_qualities
from fusestream.fusion.report.gathering import gather
from fusestream.fusion.weights import integer_weights
from fusestream.fusion.weights.integer_weights import IntegerWeights, integer_operands
from fusestream.fusion.weights.lora import Added, Pair
from fusestream.kernels_cuda import LEDGER, KernelPolicy
from fusestream.memory.formats import read_header
from fusestream.nodes import declare
from fusestream.nodes.loaders import CheckpointLoader, DiffusionModelLoader, TextEncoderLoader, VAELoader

ROOT = Path(__file__).resolve().parents[4]
JS = ROOT / "nodes" / "web" / "js"
OLD = ROOT / "tests" / "fixtures" / "templates-0.1" / "api"
AUTO, PRECISE = KernelPolicy.of(precision="auto"), KernelPolicy.of()
pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture(autouse=True)
def a_clean_ledger() -> None:
    LEDGER.clear()


def file_of(studio: Studio, storage: str) -> Path:
    """A tiny Wan, stored so."""
    if storage == "int8":
        return int8_files.write(checkpoints.write("wan_t2v", studio.folder, "fp16"), studio.folder, "convrot")[0]
    if storage == "gguf":
        original = checkpoints.write("wan_t2v", studio.folder, "fp16")
        metadata = dict(read_header(original).metadata)
        return packed_file(studio.folder / "auto.gguf", load_file(original), "Q8_0", metadata=metadata)
    return checkpoints.write("wan_t2v", studio.folder, storage)


# ------------------------------------------------------------------------------------------------------- what it computes


@pytest.mark.every_other
@pytest.mark.parametrize("storage", ["fp16", "bf16", "fp8_e4m3fn", "fp8_comfy_quant", "gguf"])
def test_a_file_of_anything_but_int8_is_computed_as_exact_is(
    studio: Studio, scenes: dict[str, Scene], storage: str
) -> None:
    path = file_of(studio, storage)
    auto, exact = (sample(in_halves.load(path, policy), scenes["wan_t2v"]) for policy in (AUTO, PRECISE))
    assert torch.equal(auto, exact)


def test_an_int8_file_is_multiplied_in_int8_with_an_error_like_stocks(studio: Studio, scenes: dict[str, Scene]) -> None:
    path, scene = file_of(studio, "int8"), scenes["wan_t2v"]
    exact, auto, theirs = (
        sample(in_halves.load(path, policy), scene) for policy in (PRECISE, AUTO, KernelPolicy.of("off"))
    )
    assert not handed_back()
    assert 0.005 < distance(auto, exact) < 1.25 * distance(theirs, exact) < 0.03


class Weighed:
    """One of stock's Linears with a weight of 8 bits, as a file has it."""

    def __init__(self, n: int = 64, k: int = 256, **asked: Any) -> None:
        self.weight = int8_files.quantised(torch.randn(n, k).half(), int8_files.KINDS["convrot"])
        self._parameters = {"weight": self.weight, "bias": None}
        self.weight_function: list[Any] = []
        self.bias_function: list[Any] = []
        for name, value in asked.items():
            setattr(self, name, value)


def taken(module: Any, rows: int, policy: KernelPolicy) -> bool:
    """Whether the product is one of bytes."""
    with integer_operands(torch.randn(rows, module.weight.shape[1]).half(), policy, module) as [own]:
        return isinstance(own, IntegerWeights)


def test_layers_that_ask_for_full_precision_get_it() -> None:
    """As stock does with `full_precision_matrix_mult` in a file. Fastest is a permission beyond the file's."""
    asks = Weighed(_full_precision_mm=True)
    assert [taken(asks, 8, KernelPolicy.of(precision=one)) for one in ("auto", "precise", "turbo")] == [
        False, False, True,
    ]  # fmt: skip
    assert taken(Weighed(_full_precision_mm=False), 8, AUTO)


def test_what_a_lora_changes_of_an_int8_file_is_rounded_anew_where_rows_are_enough() -> None:
    changed = Weighed()
    changed.weight_function = [Added([Pair(torch.randn(64, 4).half(), torch.randn(4, 256).half(), 0.1)])]
    assert [taken(changed, rows, AUTO) for rows in (8, 1024)] == [False, True]


def test_what_another_nodes_function_changes_is_multiplied_as_halves_as_stock_does() -> None:
    changed = Weighed()
    changed.weight_function = [lambda weight: weight + 0.1]
    assert not taken(changed, 1024, AUTO) and taken(changed, 1024, KernelPolicy.of(precision="turbo"))


def test_halves_stay_halves_however_many_rows() -> None:
    halves: Any = Weighed()
    halves.weight = halves._parameters["weight"] = torch.nn.Parameter(torch.randn(64, 256).half(), requires_grad=False)
    assert not taken(halves, 4096, AUTO) and taken(halves, 4096, KernelPolicy.of(precision="turbo"))


# ------------------------------------------------------------------------------------------------------- what it is told as


SAID = {
    "fp16": AsStored.FP16,
    "bf16": AsStored.MADE_FP16,
    "fp8_e4m3fn": AsStored.FP8_AS_FP16,
    "int8": AsStored.INT8,
    "gguf": AsStored.PACKED,
}


@pytest.mark.parametrize("storage", SAID)
def test_it_is_told_as_what_it_comes_to(studio: Studio, storage: str) -> None:
    model = in_halves.load(file_of(studio, storage), AUTO)
    found = SAID[storage]
    assert quality.resolved(model) is found
    assert gather(model).policy == f"kernels auto, auto: {found.words}"
    told = estimate(model, (1, 16, 3, 16, 16), 4, 1)
    assert told.auto is found and found.words in told.kernels


def test_another_quality_comes_to_nothing_else(studio: Studio) -> None:
    model = in_halves.load(file_of(studio, "int8"), KernelPolicy.of(precision="turbo"))
    assert quality.resolved(model) is None and gather(model).policy == "kernels auto, turbo"


def test_switched_off_products_are_told(studio: Studio) -> None:
    model = in_halves.load(file_of(studio, "int8"), KernelPolicy.of(precision="auto", linear_int8="off"))
    assert quality.resolved(model) is AsStored.INT8_AS_FP16


def test_a_card_that_multiplies_halves_as_fast_keeps_halves(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_halves.load(file_of(studio, "int8"), AUTO)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert not integer_weights.multiplies_bytes(AUTO, "cuda:0")
    monkeypatch.setattr(model, "load_device", torch.device("cuda:0"))
    assert quality.resolved(model) is AsStored.INT8_AS_FP16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert quality.resolved(model) is AsStored.INT8


def test_a_file_whose_layers_all_ask_for_full_precision_is_told_so(studio: Studio) -> None:
    model = in_halves.load(file_of(studio, "int8"), AUTO)
    for block in model.stream.blocks:
        for paged in block.paged:
            paged.module._full_precision_mm = True
    assert quality.resolved(model) is AsStored.INT8_ASKS_FP16 and AsStored.INT8_ASKS_FP16.rates == "precise"


@pytest.mark.parametrize(("full", "told"), [(True, AsStored.MADE_FP16), (False, AsStored.STOCK)])
def test_codes_in_bytes_are_no_integers(studio: Studio, full: bool, told: AsStored) -> None:
    """AWQ's 4-bit codes lie in a file as 8-bit numbers do."""
    model = in_halves.load(file_of(studio, "int8"), AUTO)
    for block in model.stream.blocks:
        for paged in block.paged:
            if getattr(paged.module, "layout_type", None) is not None:
                paged.module.layout_type, paged.module._full_precision_mm = "TensorCoreAWQW4A16Layout", full
    assert quality.resolved(model) is told


@pytest.mark.parametrize(
    ("tier", "told"), [("precise", "'Balanced'"), ("stored", "'Fastest'"), ("fast", None), ("stock", None)]
)
def test_the_report_advises_no_quality_that_unpacks_bytes(tier: str, told: str | None) -> None:
    said = list(faster_qualities(tier))
    assert [f"quality {told} in the loader" in one for one in said] == ([True] if told else [])
    assert tier != "stored" or "Balanced" not in said[0]


def test_fp8_that_the_card_multiplies_is_stocks(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(studio, "fp8_comfy_quant")
    assert quality.resolved(in_halves.load(path, AUTO)) is AsStored.FP8_AS_FP16
    monkeypatch.setattr(comfy.model_management, "supports_fp8_compute", lambda *_: True)
    assert quality.resolved(in_halves.load(path, AUTO)) is AsStored.FP8


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("budget", [0.0, -1.0])
def test_where_stock_multiplies_it_is_said(studio: Studio, budget: float) -> None:
    """Weights in ComfyUI's own memory management, and a family without kernels."""
    kind = "wan_t2v" if budget == 0 else "sd3"
    path = str(checkpoints.write(kind, studio.folder, "fp16"))
    model = fusion.load_diffusion_model(path, AUTO, budget)
    assert quality.resolved(model) is AsStored.STOCK


def test_the_estimate_offers_auto_to_an_int8_file_that_is_unpacked() -> None:
    case: Any = type("Case", (), {"has_int8": True})
    assert _faster_tiers(case, "precise") == ("stored", "fast", "turbo")
    assert _faster_tiers(case, "stored") == ("turbo",) and _faster_tiers(case, "turbo") == ()
    case.has_int8 = False
    assert _faster_tiers(case, "precise") == ("fast", "turbo") and _faster_tiers(case, "stock") == ()


# -------------------------------------------------------------------------------------------------------- words, one place


def test_every_loader_begins_with_auto() -> None:
    for node in (DiffusionModelLoader, CheckpointLoader, TextEncoderLoader, VAELoader):
        # Values of older workflows have places, so what came later is behind it.
        last = [one for one in node.define_schema().inputs if not one.id.endswith("_file")][-1]
        options = [
            *QUALITIES,
            *([DRAFT] if node in (DiffusionModelLoader, CheckpointLoader) else []),
            declare.BY_PRECISION,
        ]
        assert (last.id, last.default, last.options) == ("quality", "auto", options)
        assert all(word in last.tooltip for word in options)


def test_the_page_has_the_words_of_the_loaders() -> None:
    listed = re.search(r"const QUALITIES = (\[.*?\])", (JS / "defaults.js").read_text(encoding="utf-8"))
    assert listed and json.loads(listed[1]) == list(QUALITIES)
    english = dict(
        re.findall(r'^    auto_(\w+): "(.+)",$', (JS / "words.js").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert english == {one.name: one.words for one in AsStored}


# ----------------------------------------------------------------------------------------------------------- old workflows


@pytest.mark.parametrize("path", sorted(OLD.glob("*.json")), ids=lambda path: path.stem)
def test_workflows_of_the_last_release_compute_as_they_did(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loader of a template of 0.1, executed with the values that it was saved with: its policy is the one of then."""
    nodes = {
        one.GET_SCHEMA().node_id: one for one in (DiffusionModelLoader, CheckpointLoader, TextEncoderLoader, VAELoader)
    }
    before = {"Exact": "precise", "Balanced": "fast", "Fastest": "turbo"}
    made: list[KernelPolicy] = []

    class Loaded(Exception):
        pass

    def load(*given: Any, **_: Any) -> Any:
        made.extend(one for one in given if isinstance(one, KernelPolicy))
        raise Loaded

    for name in ("load_diffusion_model", "load_text_encoder", "load_vae", "load_vae_in_parts", "load_checkpoint"):
        monkeypatch.setattr(fusion, name, load, raising=False)
    monkeypatch.setattr("folder_paths.get_full_path_or_raise", lambda _kind, name: name)
    monkeypatch.setattr("folder_paths.get_full_path", lambda _kind, name: name)
    found = 0
    for node in json.loads(path.read_text(encoding="utf-8")).values():
        kind = nodes.get(node["class_type"])
        if kind is None:
            continue
        inputs = node["inputs"]
        with pytest.raises(Loaded):
            kind.execute(**inputs)
        told = before.get(inputs.get("quality", ""), inputs.get("precision", "precise"))
        assert made[found] == KernelPolicy.of(inputs.get("kernels", "auto"), precision=told)
        found += 1
    assert found == len(made) and (found or path.stem == "style_transfer")


# -------------------------------------------------------------------------------------------------------------- text encoders


@pytest.mark.deep
def test_a_text_encoder_of_an_int8_file_is_exact_as_it_is_with_stock(studio: Studio) -> None:
    """Stock builds every quantised text encoder to multiply in full precision, so `auto` rounds no more than Exact."""
    of_int8 = text_file(studio)
    encoded = {}
    for precision in ("auto", "precise", "fast"):
        clip = fusion.load_text_encoder(str(of_int8), [], KernelPolicy.of(precision=precision), -1.0)
        encoder = clip.cond_stage_model.umt5xxl.transformer.encoder
        layers = [one for one in encoder.modules() if getattr(one, "layout_type", None) == int8_files.LAYOUT]
        assert layers and all(one._full_precision_mm for one in layers)
        assert isinstance(encoder, FusedStack)
        encoder.fusestream_on_cpu = True
        encoded[precision] = clip.encode_from_tokens(clip.tokenize("a red fox"))
    assert torch.equal(encoded["auto"], encoded["precise"])
    assert not torch.equal(encoded["auto"], encoded["fast"])


def text_file(studio: Studio) -> Path:
    """A tiny UMT5 with the matrices of its blocks in 8 bits."""
    target = studio.folder / "umt5 int8.safetensors"
    quantise(checkpoints.write("umt5", studio.folder, "fp16"), target, "int8_convrot", force=True)
    return target

"""ComfyUI's blocks are not what they were: what a newer one might have is seen before anything of ours computes in its place."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import threading
from pathlib import Path
from typing import Any

import comfy
import comfy.ldm.flux.layers as flux
import comfy.ldm.flux.math
import comfy.ldm.lumina.model as lumina
import comfy.ldm.wan.model as wan
import comfy.ops
import comfy.utils
import family_scenes
import in_halves
import pytest
import torch
from comfy.ldm.modules import attention
from comfy.ldm.modules.diffusionmodules import openaimodel
from scenes import sample
from stock_mutations import mutated
from torch.nn.attention import SDPBackend

from fusestream import checkpoints
from fusestream.fusion import KernelPolicy, doctor
from fusestream.fusion.base import needed_comfyui
from fusestream.fusion.base.family import Role
from fusestream.fusion.base.specimen import Specimen
from fusestream.fusion.compatibility import aside, families, trial, variants, verdicts
from fusestream.fusion.compatibility.trial import difference
from fusestream.fusion.families import FAMILIES
from fusestream.kernels_cuda import LEDGER, KernelRefused

CPU = torch.device("cpu")
SETTINGS = {"operations": comfy.ops.manual_cast, "device": "cpu", "dtype": torch.float16}
DIFFUSION = {family.name: family for family in FAMILIES if family.role is Role.DIFFUSION}

pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """No verdict is kept, and nothing has stepped aside."""
    monkeypatch.setenv("FUSESTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("comfyui_version.__version__", "0.98.0")  # that nobody has tried
    LEDGER.clear()
    aside.forget()
    yield
    aside.forget()


EVERY = {specimen.name: specimen for family in FAMILIES if family.specimens for specimen in family.specimens()}


def judged(name: str) -> str | None:
    specimen = EVERY[name]
    found = (difference(specimen, CPU, getattr(torch, dtype)) for dtype in specimen.dtypes)
    return next((why for why in found if why is not None), None)


FOUR = ("Wan block", "Flux.2 double block", "Z-Image block", "VACE block")
GATE = ("x = torch.addcmul(x, y, repeat_e(e[2], x))", "x = torch.addcmul(x, y, repeat_e(e[2], x).sigmoid())")

# ------------------------------------------------------------------------------------------ what a user has of it


def test_a_changed_block_is_computed_by_comfyui(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It streams, its latents are those of ComfyUI's changed code, and log, ledger and doctor say so, once."""
    path = checkpoints.write("z_image", tmp_path, "fp16")
    with checkpoints.narrow.opened(comfy):
        scene = family_scenes.inputs("z_image")
        before = sample(in_halves.load(path), scene)
        mutated(
            monkeypatch,
            lumina.JointTransformerBlock,
            "forward",
            "gate_mlp.unsqueeze(1).tanh()",
            "gate_mlp.unsqueeze(1)",
        )
        with caplog.at_level(logging.WARNING):
            models = [in_halves.load(path) for _ in range(2)]
        stocks = sample(in_halves.load(path, in_halves.OFF), scene)
        assert all(torch.equal(sample(model, scene), stocks) for model in models)
    assert not torch.equal(stocks, before)
    said = [record.getMessage() for record in caplog.records if "ComfyUI changed this" in record.getMessage()]
    assert len(said) == 1 and "Z-Image diffusion model" in said[0] and "until the pack is updated" in said[0]
    assert any(
        one.op == "Z-Image diffusion model" and "ComfyUI's is another by now" in one.reason for one in LEDGER.refusals
    )
    assert said[0] in doctor.as_text(doctor.examine(measure=False)).replace("! ", "")
    assert models[0].stream.arrivals.family is None


def test_a_comfyui_that_was_tried_is_told_from_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is hardly ComfyUI that has changed: another pack may have changed its code."""
    monkeypatch.setattr("comfyui_version.__version__", needed_comfyui.RUN_WITH[0])
    mutated(monkeypatch, wan.WanAttentionBlock, "forward", *GATE)
    found = families.checked(DIFFUSION["Wan"], CPU, KernelPolicy())
    assert "do not agree here" in str(found.aside) and "Another pack" in str(found.aside)


def test_a_switch_that_no_specimen_has_on_is_comfyuis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A newer ComfyUI's constructor has a keyword, off, and a new model turns it on: specimens agree, and that model is stock's."""
    path = checkpoints.write("z_image", tmp_path, "fp16")
    kind = lumina.JointTransformerBlock
    mutated(monkeypatch, kind, "__init__", "self.dim = dim\n", "self.dim = dim; self.sharper = dim != 128\n")
    mutated(
        monkeypatch,
        kind,
        "forward",
        "if self.modulation:",
        "x = x * 1.5 if self.sharper else x\n    if self.modulation:",
    )
    with checkpoints.narrow.opened(comfy):
        scene = family_scenes.inputs("z_image")
        ours, stocks = (sample(in_halves.load(path, *side), scene) for side in ((), (in_halves.OFF,)))
    assert torch.equal(ours, stocks)
    assert any("sharper=True, which FuseStream does not know" in one.reason for one in LEDGER.refusals)


def test_a_child_that_no_specimen_has_is_comfyuis() -> None:
    block = wan.WanAttentionBlock("t2v_cross_attn", 128, 192, 2, cross_attn_norm=True, operation_settings=SETTINGS)
    known = variants.Known(DIFFUSION["Wan"])
    assert known.difference(block) is None
    block.cross_attn.adapter = torch.nn.Linear(2, 2)
    assert "adapter, which FuseStream does not know" in str(known.difference(block))


def test_a_class_of_another_name_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family steps aside, for now: an error may have other causes, and is not kept."""
    monkeypatch.delattr(flux, "SiLUActivation")
    found = families.checked(DIFFUSION["Flux"], CPU, KernelPolicy())
    assert "SiLUActivation" in str(found.aside) and "for now" in str(found.aside)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), OSError("no"), torch.OutOfMemoryError("full")]
)
def test_what_went_wrong_once_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception) -> None:
    specimen, computed = EVERY["Wan block"], trial._computed

    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr(trial, "_computed", failing)
    assert isinstance(verdicts.verdict(specimen, CPU, torch.float16).difference, aside.Raised)
    assert not (tmp_path / "cache" / verdicts.FILE).exists()
    monkeypatch.setattr(trial, "_computed", computed)
    assert verdicts.verdict(specimen, CPU, torch.float16).difference is None


def test_another_packs_changes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around a method, in the place of a function of a module, and of a method of a class in it, which the file does not tell."""
    specimen = EVERY["Wan block"]
    keys = [verdicts.key_of(specimen, CPU, torch.float16)]
    stocks = wan.WanAttentionBlock.forward

    @functools.wraps(stocks)
    def around(*args: Any, **kwargs: Any) -> Any:
        return 1.5 * stocks(*args, **kwargs)

    monkeypatch.setattr(wan.WanAttentionBlock, "forward", around)
    keys.append(verdicts.key_of(specimen, CPU, torch.float16))
    assert judged(specimen.name) is not None
    monkeypatch.setattr(wan.WanAttentionBlock, "forward", stocks)
    monkeypatch.setattr(wan, "apply_rope1", lambda x, _freqs: x)
    keys.append(verdicts.key_of(specimen, CPU, torch.float16))
    assert judged(specimen.name) is not None
    assert wan.Head not in (*specimen.source, *specimen.replaces.values()), "it is one that only its module tells of"
    monkeypatch.setattr(wan.Head, "forward", around)
    keys.append(verdicts.key_of(specimen, CPU, torch.float16))
    assert len(set(keys)) == 4


def test_what_a_call_wrote_into_a_default_is_no_change() -> None:
    """Stock's U-Net writes into the dictionary that it is given by default, if another node gives it none."""
    specimen, default = EVERY["U-Net of SD 1.5's kind"], inspect.signature(openaimodel.UNetModel.forward)
    written: dict[str, Any] = default.parameters["transformer_options"].default
    key, before = verdicts.key_of(specimen, CPU, torch.float16), dict(written)
    written["original_shape"] = [1, 4, 32, 48]
    try:
        assert judged(specimen.name) is None and verdicts.key_of(specimen, CPU, torch.float16) == key
    finally:
        written.clear()
        written.update(before)


def test_whatever_attention_and_types_torch_and_comfyui_have_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in few bits is the user's choice, and no change of a block; and who computes in a context of torch's is not judged
    by it."""

    def rough(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, *others: Any, **named: Any
    ) -> torch.Tensor:
        return 1.1 * attention.attention_pytorch(q, k, v, heads, *others, **named)

    for module in (wan, comfy.ldm.flux.math):
        monkeypatch.setattr(module, "optimized_attention", attention.wrap_attn(rough))
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert judged("Flux.2 single block") is None and judged("U-Net of SD 1.5's kind") is None


def test_trials_in_two_threads_leave_everything_as_it_was() -> None:
    hook, told = comfy.utils.PROGRESS_BAR_HOOK, list[str]()
    before = [list(handler.filters) for handler in logging.root.handlers]
    threads = [threading.Thread(target=lambda name=name: told.append(str(judged(name)))) for name in FOUR]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == ["None"] * 4 and comfy.utils.PROGRESS_BAR_HOOK is hook
    assert [list(handler.filters) for handler in logging.root.handlers] == before


def test_no_program_is_built_for_a_trials_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN builds one for each new shape, for seconds."""
    every = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
    monkeypatch.setattr(comfy.ops, "SDPA_BACKEND_PRIORITY", listed := list(every), raising=False)
    seen: list[tuple[bool, list[SDPBackend]]] = []
    known = attention.attention_pytorch

    def noted(*args: Any, **named: Any) -> torch.Tensor:
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), list(listed)))
        return known(*args, **named)

    monkeypatch.setattr(attention, "attention_pytorch", noted)
    assert judged("Wan block") is None
    assert seen and set(map(str, seen)) == {str((False, [every[0], every[2]]))}
    assert torch.backends.cuda.cudnn_sdp_enabled() and listed == every


def test_who_insists_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutated(monkeypatch, wan.WanAttentionBlock, "forward", *GATE)
    with pytest.raises(KernelRefused, match=r"result differs.*Choose 'auto', or update FuseStream"):
        families.checked(DIFFUSION["Wan"], CPU, KernelPolicy("on"))
    found = families.checked(DIFFUSION["Wan"], CPU, KernelPolicy())
    assert found.aside is not None and found.types == () and found.need is None
    assert families.checked(DIFFUSION["Wan"], CPU, KernelPolicy("off")).aside is None, "nothing of ours would compute"


def test_a_verdict_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For as long as the code is what it was; another ComfyUI, another pack or changed code is another trial."""
    trials: list[str] = []

    def counted(specimen: Specimen, *_: Any) -> str | None:
        trials.append(specimen.name)
        return "it is changed" if len(trials) == 1 else None

    monkeypatch.setattr(verdicts, "difference", counted)
    specimen = EVERY["Wan block"]

    def ask() -> str | None:
        monkeypatch.setattr(verdicts, "_files", {})  # as in another process
        return verdicts.verdict(specimen, CPU, torch.float16).difference

    assert [ask(), ask()] == ["it is changed"] * 2 and len(trials) == 1
    kept = json.loads((tmp_path / "cache" / verdicts.FILE).read_text())["verdicts"]
    assert list(kept.values()) == ["it is changed"]
    monkeypatch.setattr("comfyui_version.__version__", "0.99.0")
    assert ask() is None and len(trials) == 2
    mutated(monkeypatch, wan.WanSelfAttention, "forward", "return apply_rope1(k, freqs)", "return k")
    ask()
    assert len(trials) == 3
    file = tmp_path / "cache" / verdicts.FILE
    broken = json.loads(file.read_text())
    broken["verdicts"] = {key: ["a list"] for key in broken["verdicts"]}
    file.write_text(json.dumps(broken))
    assert ask() is None and ask() is None and len(trials) == 4, "what is no verdict is tried anew, and kept"


def test_other_peoples_random_numbers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    assert judged("U-Net of SD 1.5's kind") is None and torch.equal(torch.rand(3), wanted)


def test_what_a_layer_names_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ComfyUI has it from 0.32 on, built onto this one where it is older: the function that a layer names is called in our
    block where it is called in stock's, and a block of ours that did not hand it on would be seen."""
    specimen = EVERY["Flux.2 double block"]
    if not hasattr(attention, "ComfyAttention"):
        _with_named_attention(monkeypatch)
    assert judged(specimen.name) is None
    monkeypatch.setattr("fusestream.fusion.families.flux2.double.told", lambda _module: {})
    assert judged(specimen.name) is not None


def _with_named_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(torch.nn.Module):
        function: Any = None

    built = flux.DoubleStreamBlock.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self.comfy_attention = Named()

    stock = attention.optimized_attention

    def preferring(*args: Any, preferred_attention: Any = None, **kwargs: Any) -> torch.Tensor:
        options = kwargs.get("transformer_options") or {}
        if "optimized_attention_override" not in options and getattr(preferred_attention, "function", None) is not None:
            return preferred_attention.function(*args, **kwargs)
        return stock(*args, **kwargs)

    monkeypatch.setattr(flux.DoubleStreamBlock, "__init__", init)
    monkeypatch.setattr(comfy.ldm.flux.math, "optimized_attention", preferring)
    monkeypatch.setattr("fusestream.fusion.families.flux2.joint.optimized_attention", preferring)
    told = "preferred_attention=preferred_attention"
    for old, new in (
        ("={})", "={}, preferred_attention=None)"),
        ("=transformer_options)", f"=transformer_options, {told})"),
    ):
        mutated(monkeypatch, comfy.ldm.flux.math, "attention", old, new)
    for kind in (flux.DoubleStreamBlock, flux.SingleStreamBlock):
        mutated(
            monkeypatch,
            kind,
            "forward",
            "mask=attn_mask, transformer_options=transformer_options",
            "mask=attn_mask, transformer_options=transformer_options, preferred_attention=self.comfy_attention",
        )
    monkeypatch.setattr(flux, "attention", comfy.ldm.flux.math.attention)
    monkeypatch.setattr("fusestream.fusion.families.flux2.joint.stock_attention", comfy.ldm.flux.math.attention)

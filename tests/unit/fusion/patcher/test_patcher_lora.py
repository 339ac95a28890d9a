"""LoRAs on streamed weights: stock's latents bit for bit, and only what changes comes anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.sd
import comfy.utils
import pytest
import torch
from safetensors.torch import save_file
from scenes import distance

from bed.depth import is_thorough
from fusestream import checkpoints
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.load.other_policy import model_under
from fusestream.fusion.weights import lora
from fusestream.kernels_cuda import KernelPolicy

OFTEN = ("lora_ab", "lora_lokr", "lora_dora", "lora_diff")  # kinds that residents are tried with too
LORAS = [kind for kind, base in checkpoints.LORA_BASES.items() if base != "umt5"]


pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


def load(folder: Path, storage: str, kind: str = "wan_t2v", window: str = "least", **options: Any) -> tuple[Any, Any]:
    """The same model from stock and streamed, through the smallest window or with everything resident."""
    path = str(checkpoints.write(kind, folder, storage))
    ours, stock = (
        load_streamed_diffusion_model(path, **options),
        comfy.sd.load_diffusion_model(path, model_options=options),
    )
    ours.stream.residency.ceiling = {"least": ours.stream.residency.least, "all": None}[window]
    return ours, stock


def with_loras(model: Any, folder: Path, *loras: tuple[str, float]) -> Any:
    for kind, strength in loras:
        file = comfy.utils.load_torch_file(str(checkpoints.write(kind, folder)))
        model, _ = comfy.sd.load_lora_for_models(model, None, file, strength, 0.0)
    return model


def sample(model: Any) -> torch.Tensor:
    """One step without guidance, from seed 1, for words of seed 0; pictures where the model takes them."""
    source = torch.Generator().manual_seed(0)
    words = [[torch.randn(1, 20, checkpoints.T5_WIDTH, generator=source), {}]]
    latent = torch.zeros(1, 16, 2, 8, 8)
    noise = comfy.sample.prepare_noise(latent, 1)
    return comfy.sample.sample(model, noise, 2, 1.0, "euler", "simple", words, words, latent, disable_pbar=True, seed=1)


@pytest.mark.every_other
@pytest.mark.parametrize(
    ("kind", "window"),
    [
        (kind, window)
        for kind in LORAS
        for window in (("least", "all") if is_thorough() or kind in OFTEN else ("least",))
    ],
)
def test_the_latents_are_stocks(folder: Path, kind: str, window: str) -> None:
    ours, stock = load(folder, "fp32", checkpoints.LORA_BASES[kind], window)
    plain = sample(ours)
    got = sample(with_loras(ours, folder, (kind, 0.8)))
    assert torch.equal(got, sample(with_loras(stock, folder, (kind, 0.8))))
    if kind != "lora_modulation":  # which stock takes and never applies
        assert distance(got, plain) > 0.005
    assert torch.equal(sample(ours), plain)


@pytest.mark.deep("fp8_scaled-all", "fp32-all", "fp8_scaled-least")
@pytest.mark.parametrize("window", ["least", "all"])
@pytest.mark.parametrize("storage", ["fp32", "fp8_scaled"])
def test_loras_are_stacked_weighed_anew_and_taken_away(folder: Path, storage: str, window: str) -> None:
    ours, stock = load(folder, storage, window=window)
    for loras in (
        (("lora_ab", 1.0), ("lora_lokr", 0.5), ("lora_dora", -0.3)),
        (("lora_ab", 0.2), ("lora_lokr", 0.5), ("lora_dora", -0.3)),
        (("lora_dora", -0.3), ("lora_ab", 0.2)),
        (),
        (("lora_diff", 1.0),),
    ):
        want = sample(with_loras(stock, folder, *loras))
        for _ in range(2):
            assert torch.equal(sample(with_loras(ours, folder, *loras)), want), loras


def copies(model: Any) -> dict[str, int]:
    """How often each block was copied."""
    entries = model.stream.residency.ledger.entries
    return {
        layer.name: sum(e.kind == "copy" and e.layer == layer.name for e in entries) for layer in model.stream.layers
    }


def test_residents_come_anew_only_when_their_patches_change(folder: Path) -> None:
    ours, _ = load(folder, "fp32", window="all")
    sample(ours)
    assert set(copies(ours).values()) == {1}
    patched = with_loras(ours, folder, ("lora_diff", 1.0))  # of blocks 0 and 1
    sample(patched)
    sample(patched)
    assert set(copies(ours).values()) == {1}, "nobody had written to them"
    sample(patched.clone())  # the same patches
    assert sum(copies(ours).values()) == 4
    more = with_loras(patched, folder, ("lora_set_weight", 1.0))  # of block 0
    sample(more)
    assert copies(ours) == {"blocks.0": 2, "blocks.1": 1, "blocks.2": 1, "blocks.3": 1}
    sample(ours)
    assert copies(ours) == {"blocks.0": 3, "blocks.1": 2, "blocks.2": 1, "blocks.3": 1}


@pytest.mark.deep
def test_where_rooms_cannot_be_written_patched_weights_have_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Managed memory: what was written there would stay in the model."""
    from fusestream.memory import HostBackend

    monkeypatch.setattr(HostBackend, "is_writable", False)
    for storage in ("fp32", "fp8_scaled"):
        ours, stock = load(folder, storage, window="all")
        for loras in ((("lora_ab", 1.0),), (("lora_ab", 0.3), ("lora_diff", 1.0)), ()):
            assert torch.equal(sample(with_loras(ours, folder, *loras)), sample(with_loras(stock, folder, *loras)))
        assert set(copies(ours).values()) == {1}


def test_a_failing_patch_leaves_nothing_half_patched(folder: Path) -> None:
    ours, stock = load(folder, "fp32", window="all")
    plain = sample(ours)
    failures = 2

    class Broken(Exception):
        pass

    def fail_at_first(weight: torch.Tensor) -> torch.Tensor:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise Broken
        return weight

    def patched(model: Any) -> Any:
        model = model.clone()
        first, last = ("diffusion_model.blocks.0.self_attn.q.weight", "diffusion_model.blocks.0.ffn.2.weight")
        model.add_patches({first: ("diff", (torch.ones(256, 256),))}, 0.01)
        model.add_patches({(last, None, fail_at_first): ("diff", (torch.ones(256, 640),))}, 0.01)
        return model

    broken = patched(ours)
    for _ in range(2):
        with pytest.raises(Broken):
            sample(broken)
    assert not any(place.users for place in ours.stream.residency.pager._places.values())
    assert torch.equal(sample(broken), sample(patched(stock)))
    assert torch.equal(sample(ours), plain)


def test_a_patch_that_changes_a_shape_is_refused(folder: Path) -> None:
    ours, _ = load(folder, "fp32")
    wider = ours.clone()
    key = "diffusion_model.blocks.0.self_attn.q.weight"
    wider.add_patches({key: ("diff", (torch.ones(256, 300), {"pad_weight": True}))}, 1.0)
    with pytest.raises(ValueError, match=rf"changes the shape of {key} from \[256, 256\] to \[256, 300\]"):
        sample(wider)


def test_a_merge_into_a_streamed_model(folder: Path) -> None:
    """ModelMergeSimple with the streamed one first: patches with weights of the other."""
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    ours, stock = load(folder, "fp32")
    other = comfy.sd.load_diffusion_model(str(checkpoints.write("wan_t2v", folder, "fp32", seed=1)))
    got, wanted = (sample(ModelMergeSimple().merge(model, other, 0.6)[0]) for model in (ours, stock))
    assert torch.equal(got, wanted) and not torch.equal(got, sample(ours))


def test_a_lora_for_nothing_in_the_blocks(folder: Path, tmp_path: Path) -> None:
    ours, stock = load(folder, "fp32", window="all")
    save_file({"diffusion_model.head.head.diff": torch.ones(64, 256)}, tmp_path / "head.safetensors")
    file = comfy.utils.load_torch_file(str(tmp_path / "head.safetensors"))
    got, wanted = (sample(comfy.sd.load_lora_for_models(model, None, file, 1.0, 0.0)[0]) for model in (ours, stock))
    assert torch.equal(got, wanted) and not torch.equal(got, sample(ours))
    assert set(copies(ours).values()) == {1}


@pytest.mark.usefixtures("in_one_pass")
def test_plain_lora_in_one_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is stock's bit for bit."""
    ours, stock = load(folder, "fp16", dtype=torch.float16)
    added, passes = lora.added, []
    monkeypatch.setattr(lora, "added", lambda *a, **k: passes.append(1) or added(*a, **k))
    plain = sample(ours)
    for kind in ("lora_ab", "lora_fun", "lora_dora", "lora_lokr", "lora_diff"):
        passes.clear()
        got, wanted = (sample(with_loras(model, folder, (kind, 0.8))) for model in (ours, stock))
        if kind in checkpoints.lora.SPELLINGS:
            assert passes and distance(got, wanted) < 0.02 * distance(plain, wanted), kind
        else:
            assert torch.equal(got, wanted) and not passes, kind
    assert torch.equal(sample(ours), plain)


@pytest.mark.usefixtures("in_one_pass")
def test_with_kernels_off_the_sums_are_stocks(folder: Path) -> None:
    """Two branches of a graph, over the same blocks."""
    ours, stock = (
        with_loras(model, folder, ("lora_ab", 0.8), ("lora_kohya", -0.4))
        for model in load(folder, "fp16", window="all", dtype=torch.float16)
    )
    off, wanted = model_under(ours, KernelPolicy.of("off")), sample(stock)
    mine = sample(ours)
    assert 0 < distance(mine, wanted) < 1e-3
    for _ in range(2):
        assert torch.equal(sample(off), wanted)
        assert torch.equal(sample(ours), mine)
    assert torch.equal(sample(model_under(ours, KernelPolicy.of("auto", linear="off"))), wanted)


@pytest.mark.deep
@pytest.mark.usefixtures("in_one_pass")
@pytest.mark.parametrize("window", ["least", "all"])
@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_scaled"])
def test_fp8_weights_have_patches_added_on_the_way(folder: Path, storage: str, window: str) -> None:
    """To what a product makes of them: plain LoRA whether they stay or stream, other kinds where they stream. Nothing of that is
    rounded to fp8 again, as it is in stock."""
    options = {"dtype": torch.float8_e4m3fn} if storage == "fp8_e4m3fn" else {}
    ours, stock = load(folder, storage, window=window, **options)
    modules = [paged.module for block in ours.stream.blocks for paged in block.paged]
    assert storage != "fp8_scaled" or all(m._full_precision_mm for m in modules if m.weight.ndim == 2)
    exact = load(folder, storage, dtype=torch.float32)[1] if storage == "fp8_e4m3fn" else None
    for loras in ((("lora_ab", 1.0),), (("lora_ab", 0.3), ("lora_kohya", -1.0)), (("lora_dora", 1.0),), ()):
        got, stocks = (sample(with_loras(model, folder, *loras)) for model in (ours, stock))
        if not loras or (window == "all" and loras[0][0] == "lora_dora"):
            assert torch.equal(got, stocks), loras
            continue
        assert 0 < distance(got, stocks) < 0.08, loras
        if exact is not None:
            wanted = sample(with_loras(exact, folder, *loras))
            assert distance(got, wanted) < distance(stocks, wanted), loras
    assert not any(module.weight_function for module in modules)

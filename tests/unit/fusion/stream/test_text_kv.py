"""What blocks make of a text is kept between steps: the weights that make it do not come again, and all is the same to the bit."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.sample
import comfy.sd
import comfy.utils
import int8_files
import pytest
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from in_halves import load
from packed_files import packed_file
from plain_backends import BACKENDS, plain_backends
from safetensors.torch import load_file
from torch import Tensor
from wan_in_halves import handed_back

from fusestream import checkpoints
from fusestream.fusion import KernelPolicy, report
from fusestream.fusion.estimate import fit
from fusestream.fusion.families.wan import block as wan
from fusestream.fusion.stream import segments, text_kv, vram_pool
from fusestream.fusion.stream.text_kv import TextKV, room_for
from fusestream.kernels_cuda import LEDGER
from fusestream.memory import read_header

CPU = torch.device("cpu")
OURS, OFF = KernelPolicy(), KernelPolicy.of("off")
WORDS = 20  # of a text here, and in what a model expects of them
STEPS = 4

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny models have texts that are larger than what they save, unless these are short."""
    monkeypatch.setattr(wan, "TEXT_TOKENS", WORDS)
    monkeypatch.setattr(wan, "PICTURE_TOKENS", WORDS)
    LEDGER.clear()
    yield
    mm.unload_all_models()
    gc.collect()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


def text(seed: int, count: int = WORDS) -> Any:
    source = torch.Generator().manual_seed(seed)
    return [[torch.randn(1, count, checkpoints.T5_WIDTH, generator=source), {}]]


def sample(
    model: Any, one: int = 0, other: int = 1, cfg: float = 1.0, steps: int = STEPS, callback: Any = None, apart: int = 0
) -> Tensor:
    """With guidance 1 each step is one call, of the first text alone. apart: words that the other has less, so that stock computes
    them one after the other."""
    latent = torch.zeros(1, model.model.latent_format.latent_channels, 2, 8, 8)
    run = ("euler", "simple", text(one), text(other, WORDS - apart), latent)
    noise = comfy.sample.prepare_noise(latent, 1)
    out: Tensor = comfy.sample.sample(model, noise, steps, cfg, *run, disable_pbar=True, seed=1, callback=callback)
    return out


def plain(folder: Path, kind: str = "wan_t2v", storage: str = "fp16", policy: KernelPolicy = OURS) -> Any:
    """A model that keeps nothing."""
    model = load(checkpoints.write(kind, folder, storage), policy)
    model.stream.residency.segmentations = model.stream.residency.plain
    return model


def keeping(folder: Path, kind: str = "wan_t2v", storage: str = "fp16", policy: KernelPolicy = OURS) -> Any:
    """One with just the room in which blocks pass and texts are kept."""
    return roomy(load(checkpoints.write(kind, folder, storage), policy))


def roomy(model: Any) -> Any:
    twin = model.stream.residency.segmentations[-1]
    assert twin.base is not None
    model.stream.residency.ceiling = twin.bounds(CPU)[0] + twin.text_bytes
    return model


def with_lora(model: Any, folder: Path, kind: str = "lora_ab", strength: float = 0.8) -> Any:
    file = comfy.utils.load_torch_file(str(checkpoints.write(kind, folder)))
    return comfy.sd.load_lora_for_models(model, None, file, strength, 0.0)[0]


def copied(model: Any, calls: int = 1) -> tuple[int, int]:
    """How often layers came since the last time, of texts and others; a call's share."""
    names = {layer.name for layer in model.stream.layers if layer.rare}
    entries = [entry.layer for entry in model.stream.residency.ledger.entries if entry.kind == "copy"]
    before = getattr(model, "copied_before", 0)
    model.copied_before = len(entries)
    of_texts = sum(name in names for name in entries[before:])
    return of_texts, (len(entries) - before - of_texts) // calls


# ------------------------------------------------------------------------------------------------------------ the bytes


@pytest.mark.parametrize("kind", ["wan_t2v", "wan_i2v", "wan_vace"])
def test_the_same_to_the_bit_with_fewer_bytes(folder: Path, kind: str) -> None:
    ours, theirs = keeping(folder, kind), plain(folder, kind)
    theirs.stream.residency.ceiling = ours.stream.residency.ceiling
    want = sample(theirs)
    was = theirs.stream.residency.pager.plan.bytes_per_pass
    assert torch.equal(sample(ours), want) and handed_back() == set()
    stream = ours.stream
    rare = [layer for layer in stream.layers if layer.rare]
    assert stream.residency.segmentation.base is not None and len(rare) == len(stream.residency.segmentations[0].blocks)
    passing, own = stream.residency.pager.plan.bytes_per_pass, sum(layer.nbytes for layer in rare)
    assert own > 0.1 * was and passing < was - 0.8 * own
    ahead = len(stream.residency.pager._ring)
    assert len(rare) <= copied(ours)[0] <= len(rare) + ahead, "once, and the last one's next"
    assert stream.residency.texts.came == 1 and stream.residency.texts.spared == STEPS - 1
    assert torch.equal(sample(ours), want)
    assert copied(ours)[0] == 0, "nor for another sampling of the same text"


def stored(folder: Path, storage: str) -> Path:
    """A file of Wan, in one of its own storages, in 8 bits or in blocks."""
    if storage in checkpoints.KINDS["wan_t2v"].storages:
        return checkpoints.write("wan_t2v", folder, storage)
    halves = checkpoints.write("wan_t2v", folder, "fp16")
    if storage == "int8":
        return int8_files.write(halves, folder, "convrot")[0]
    return packed_file(
        folder / f"{storage}.gguf", load_file(halves), storage, metadata=dict(read_header(halves).metadata)
    )


@pytest.mark.deep("fp8_e4m3fn-*", "fp32-*", "Q6_K-*", "int8-precise")
@pytest.mark.parametrize(
    ("storage", "precision"),
    [
        *((storage, OURS.precision) for storage in ("fp8_scaled", "fp8_e4m3fn", "bf16", "fp32", "Q8_0", "Q6_K")),
        *(("int8", precision) for precision in ("precise", "turbo")),
    ],
)
def test_of_every_storage(folder: Path, storage: str, precision: str) -> None:
    """With a LoRA too. Under turbo x is rounded to 8 bits, once for the keys and the values."""
    path, policy = stored(folder, storage), KernelPolicy.of("auto", precision=precision)
    ours, theirs = roomy(load(path, policy)), load(path, policy)
    theirs.stream.residency.segmentations = theirs.stream.residency.plain
    want = sample(with_lora(theirs, folder), cfg=3.0)
    assert want.isfinite().all() and torch.equal(sample(with_lora(ours, folder), cfg=3.0), want)
    assert ours.stream.residency.texts.spared == STEPS - 1


@pytest.mark.deep
@pytest.mark.parametrize("keys", [["diffusion_model"], [f"diffusion_model.blocks.{i}" for i in range(4)]])
def test_torch_compile_goes_around_it(folder: Path, keys: list[str]) -> None:
    ours, want = keeping(folder), sample(plain(folder))
    compiled = ours.clone()
    set_torch_compile_wrapper(compiled, backend="eager", keys=keys)
    assert torch.equal(sample(compiled), want) and ours.stream.residency.texts.spared == STEPS - 1
    assert torch.equal(sample(ours), want)
    torch._dynamo.reset()


def test_another_nodes_attention_may_write_to_what_it_is_given(folder: Path) -> None:
    def writing(stock: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = stock(q, k, v, *args, **kwargs)
        k.zero_()
        v.zero_()
        return out

    def written_to(model: Any) -> Any:
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = writing
        return model

    ours, want = keeping(folder), sample(written_to(plain(folder)))
    assert torch.equal(sample(written_to(ours)), want) and ours.stream.residency.texts.spared == STEPS - 1


def test_whole_blocks_too(folder: Path) -> None:
    ours = keeping(folder)
    stream = ours.stream
    stream.residency.segmentations = (
        stream.residency.segmentations[0],
        next(one for one in stream.residency.segmentations if one.base is stream.residency.segmentations[0]),
    )
    stream.residency._measure()
    stream.residency.ceiling = stream.residency.narrow
    assert torch.equal(sample(ours), sample(plain(folder)))
    assert (
        not stream.residency.is_in_parts
        and stream.residency.segmentation.base is not None
        and stream.residency.texts.spared == STEPS - 1
    )


def test_it_holds_what_it_may_and_gives_all_back(folder: Path) -> None:
    ours = keeping(folder)
    stream = ours.stream
    sample(ours)
    budget = vram_pool.pool_of(CPU).budget
    assert (
        stream.residency.texts.nbytes
        == stream.residency.segmentation.text_bytes
        == stream.residency.ledger.held("VRAM of texts")
    )
    assert (
        stream.residency.held
        == budget.taken
        == stream.residency.pager.held_bytes + stream.residency.texts.nbytes
        <= stream.residency.ceiling
    )
    assert ours.loaded_size() == stream.residency.held + ours._rest_size()
    mm.unload_all_models()
    assert (
        stream.residency.held
        == budget.taken
        == stream.residency.texts.nbytes
        == stream.residency.ledger.held("VRAM of texts")
        == 0
    )
    assert not stream.residency.texts.known


def test_it_is_told(folder: Path) -> None:
    ours = keeping(folder)
    sample(ours)
    told = report.gather(ours)
    assert f"{STEPS - 1} of {STEPS} calls did without the weights that make them" in told.state and not told.gaps
    assert told.passes == STEPS and told.streamed_bytes == sum(
        layer.stored_bytes
        for i, layer in enumerate(ours.stream.layers)
        if i in ours.stream.residency.pager.plan.streamed
    )
    assert "VRAM for texts" in {memory.name for memory in told.memories}


def test_the_estimate_reckons_so(folder: Path) -> None:
    ours = keeping(folder)
    shape = [1, ours.model.latent_format.latent_channels, 2, 8, 8]
    found = fit.fit_of(ours, shape, 1)
    sample(ours)
    assert found.kept == ours.stream.residency.texts.nbytes and found.held == ours.stream.residency.pager.plan.footprint
    assert found.passes == len(ours.stream.residency.pager.plan.streamed)


# ------------------------------------------------------------------------------------------------------------- when not


def test_it_is_the_budget_that_decides(folder: Path) -> None:
    model = keeping(folder)
    stream = model.stream
    for budget in range(
        stream.residency.narrow,
        stream.residency.most + (1 << 20),
        (stream.residency.most - stream.residency.narrow) // 20,
    ):
        found = segments.chosen(stream.residency.segmentations, CPU, budget)
        best = segments.chosen(stream.residency.plain, CPU, budget)
        twin = next(one for one in stream.residency.segmentations if one.base is best)
        less, most = twin.passing(CPU, budget), best.passing(CPU, budget)
        assert most is not None
        assert found is (twin if less is not None and less < (1 - segments.WORTH_IT) * most else best)
    assert segments.chosen(stream.residency.segmentations, CPU, stream.residency.narrow).base is None
    assert segments.chosen(stream.residency.segmentations, CPU, stream.residency.most).base is None


def test_where_all_stays_nothing_is_kept(folder: Path) -> None:
    ours = keeping(folder)
    ours.stream.residency.ceiling = None
    want = sample(plain(folder))
    assert torch.equal(sample(ours), want)
    assert (
        ours.stream.residency.segmentation.base is None
        and ours.stream.settled().generation is not None
        and not ours.stream.residency.texts.nbytes
    )


def test_where_all_may_stay_later_it_does(folder: Path) -> None:
    ours = keeping(folder)
    want = sample(ours)
    ours.stream.residency.ceiling = None
    vram_pool.pool_of(CPU)._measure()
    assert torch.equal(sample(ours), want)
    assert ours.stream.residency.segmentation.base is None and not ours.stream.residency.pager.plan.streamed


@pytest.mark.parametrize("policy", [OFF, OURS], ids=["off", "in fp32"])
def test_where_stock_computes_nothing_is(folder: Path, policy: KernelPolicy) -> None:
    dtype = torch.float16 if policy is OFF else torch.float32
    model = load(checkpoints.write("wan_t2v", folder, "fp16"), policy, dtype)
    assert all(one.base is None for one in model.stream.residency.segmentations)


def test_no_room_and_all_is_computed_at_each_call(folder: Path) -> None:
    """As where a step runs out of VRAM. After a while it is paged as ever."""
    ours, want = keeping(folder), sample(plain(folder), steps=12)
    stream, kept = ours.stream, []
    room = stream.residency.segmentations[-1].text_bytes

    def short(i: int, *_: Any) -> None:
        if i == 0:
            kept.append((stream.residency.texts.nbytes, stream.residency.keep_window()))
        kept.append(stream.residency.texts.nbytes)

    assert torch.equal(sample(ours, steps=12, callback=short), want)
    assert kept[0] == (room, room) and not any(kept[1:])
    assert stream.residency.segmentation.base is None and all(
        one.base is None for one in stream.residency.segmentations
    ), "for nothing is gained"
    assert torch.equal(sample(ours, steps=12), want)
    assert "came for 8 calls in a row" in stream.residency.ledger.summary()["notes"]["texts"]


def test_room_that_was_given_back_is_there_for_the_next_sampling(folder: Path) -> None:
    ours, want = keeping(folder), sample(plain(folder))
    stream, kept = ours.stream, []

    def short(i: int, *_: Any) -> None:
        if i == 1:
            stream.residency.keep_window()
        kept.append(stream.residency.texts.nbytes)

    assert torch.equal(sample(ours, callback=short), want) and [bool(nbytes) for nbytes in kept] == [True] + 3 * [False]
    assert torch.equal(sample(ours), want) and stream.residency.texts.nbytes == stream.residency.segmentation.text_bytes
    assert stream.residency.held == vram_pool.pool_of(CPU).budget.taken <= stream.residency.ceiling


# ------------------------------------------------------------------------------------------------- the backends for GPUs


@pytest.mark.deep("registered-fp8*", "pinned-fp16*")
@pytest.mark.every_other
@pytest.mark.parametrize("storage", ["fp16", "fp8_e4m3fn"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_over_the_backends_for_gpus(folder: Path, backend: str, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models this small leave nothing to gain in steps of 2 MiB: they are told to. With LoRAs and without, interrupted, unloaded,
    and with less memory in between, so that in the end some are paged as ever."""
    monkeypatch.setattr(segments, "WORTH_IT", -9.0)
    theirs = plain(folder, storage=storage)
    bare, lora = sample(theirs), sample(with_lora(theirs, folder))
    with plain_backends() as backends:
        ours = load(checkpoints.write("wan_t2v", folder, storage))
        backends.become(ours, backend)
        stream = ours.stream
        twin = next(one for one in stream.residency.segmentations if one.base is stream.residency.segmentations[0])
        stream.residency.segmentations = (stream.residency.segmentations[0], twin)
        stream.residency._measure()
        stream.residency.ceiling = max(stream.residency.narrow, twin.bounds(CPU)[0] + twin.text_bytes)
        for want, model in ((bare, ours), (lora, with_lora(ours, folder)), (bare, ours)):
            assert torch.equal(sample(model), want)
            assert (
                stream.residency.segmentation is twin
                and stream.residency.ledger.peak("VRAM") + twin.text_bytes <= stream.residency.ceiling
            )
        assert (stream.residency.texts.came, stream.residency.texts.spared) == (3, 3 * STEPS - 3)
        with pytest.raises(mm.InterruptProcessingException):
            sample(ours, 2, callback=lambda *_: mm.interrupt_current_processing())
        assert torch.equal(sample(ours, callback=lambda *_: stream.residency.keep_window()), bare)
        assert torch.equal(sample(ours, callback=lambda *_: mm.unload_all_models()), bare)
        assert stream.residency.held == 0 and torch.equal(sample(with_lora(ours, folder)), lora)


# ----------------------------------------------------------------------------------------------------- which text it is


def test_two_texts_take_turns(folder: Path) -> None:
    ours, theirs = keeping(folder), plain(folder)
    want, others = sample(theirs, cfg=3.0, apart=1), sample(theirs, 2, cfg=3.0, apart=1)
    assert torch.equal(sample(ours, cfg=3.0, apart=1), want)
    assert len(ours.stream.residency.texts.known) == 2 and (
        ours.stream.residency.texts.came,
        ours.stream.residency.texts.spared,
    ) == (
        2,
        2 * STEPS - 2,
    )
    assert torch.equal(sample(ours, 2, cfg=3.0, apart=1), others), "another prompt, and the same to keep away from"
    assert len(ours.stream.residency.texts.known) == 2 and ours.stream.residency.texts.came == 3


def test_both_in_one_batch(folder: Path) -> None:
    ours, want = keeping(folder), sample(plain(folder), cfg=3.0)
    assert torch.equal(sample(ours, cfg=3.0), want)
    assert len(ours.stream.residency.texts.known) == 1 and (
        ours.stream.residency.texts.came,
        ours.stream.residency.texts.spared,
    ) == (1, STEPS - 1)


@pytest.mark.deep
def test_more_texts_than_there_is_room_for(folder: Path) -> None:
    """Those that came first stay, and nothing is mixed up."""
    ours, theirs = keeping(folder), plain(folder)
    want = [sample(theirs, seed) for seed in range(4)]
    for _ in range(2):
        for seed in range(4):
            assert torch.equal(sample(ours, seed), want[seed])
    assert len(ours.stream.residency.texts.known) == 2
    assert torch.equal(sample(ours, 3), want[3]) and ours.stream.residency.texts.came == 8


def call_of(model: Any) -> Any:
    """The network, called as the sampler does, with texts [batch, words, width] of one's own."""
    latent = torch.randn(
        1, model.model.latent_format.latent_channels, 2, 8, 8, generator=torch.Generator().manual_seed(2)
    )

    def call(words: Tensor, options: dict[str, Any]) -> Tensor:
        with torch.inference_mode():
            x = latent.expand(len(words), -1, -1, -1, -1)
            out: Tensor = model.model.apply_model(
                x, torch.full((len(words),), 0.5), c_crossattn=words, transformer_options=options
            )
        return out

    return call


def test_it_is_the_numbers_that_decide(folder: Path) -> None:
    """A tensor that was written to, one of the same numbers elsewhere, another one at the same place."""
    found = []
    for model in (keeping(folder), plain(folder)):
        mm.load_models_gpu([model])
        call, came, latents = call_of(model), [], []
        words = text(0)[0][0].clone()
        for change in (None, "copied", "written", None):
            if change == "copied":
                words = words.clone()
            elif change == "written":
                words[0, 3, 5] += 1
            with model.stream.one_pass():
                latents.append(call(words, dict(model.model_options["transformer_options"])))
            came.append(model.stream.residency.texts.came)
        found.append((latents, came))
    (ours, came), (theirs, _) = found
    assert all(map(torch.equal, ours, theirs)) and not torch.equal(ours[1], ours[2])
    assert came == [1, 1, 2, 2]


def test_a_node_in_a_blocks_place_may_change_the_text(folder: Path) -> None:
    """In its place, from block to block."""

    def changing(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        args["txt"].mul_(1.5)
        out: dict[str, Any] = extra["original_block"](args)
        return out

    def changed(model: Any) -> Any:
        model = model.clone()
        model.set_model_patch_replace(changing, "dit", "double_block", 2)
        return model

    ours, theirs = keeping(folder), plain(folder)
    want = sample(changed(theirs))
    assert torch.equal(sample(changed(ours)), want) and not torch.equal(want, sample(theirs))
    assert torch.equal(sample(ours), sample(theirs))


# --------------------------------------------------------------------------------------------------------- what changes


@pytest.mark.deep("lora_lokr-fp8*", "lora_diff-fp8*")
@pytest.mark.every_other
@pytest.mark.parametrize("storage", ["fp16", "fp8_scaled"])
@pytest.mark.parametrize("kind", ["lora_ab", "lora_diff", "lora_lokr"])
def test_loras_come_and_go(folder: Path, kind: str, storage: str) -> None:
    ours, theirs = keeping(folder, storage=storage), plain(folder, storage=storage)
    bare, want = sample(theirs), sample(with_lora(theirs, folder, kind))
    assert not torch.equal(bare, want)
    for make, latent in ((None, bare), (kind, want), (None, bare)):
        assert torch.equal(sample(ours if make is None else with_lora(ours, folder, make)), latent)
    assert ours.stream.residency.segmentation.base is not None
    assert ours.stream.residency.texts.came == (1 if kind == "lora_diff" else 3), "that changes none of these weights"


def test_another_lora_between_two_steps(folder: Path) -> None:
    latents = []
    for model in (keeping(folder), plain(folder)):

        def patch(i: int, *_: Any, model: Any = model) -> None:
            if i == 1:
                patched = with_lora(model, folder)
                model.stream.set_patches(patched.patches, uuid=patched.patches_uuid)

        latents.append(sample(model, callback=patch))
    assert torch.equal(*latents)


def test_another_policy_is_another_text(folder: Path) -> None:
    ours = keeping(folder)
    want = sample(ours)
    turbo = ours.clone()
    options = turbo.model_options["transformer_options"]
    options["fusestream_policy"] = KernelPolicy.of(
        "auto", precision="fast" if OURS.precision == "precise" else "precise"
    )
    sample(turbo)
    assert ours.stream.residency.texts.came == 2
    assert torch.equal(sample(ours), want)


def test_a_weight_that_another_node_wraps_is_never_kept(folder: Path) -> None:
    count = []

    def wrapped(model: Any) -> Any:
        model = model.clone()
        model.add_weight_wrapper("diffusion_model.blocks.1.cross_attn.k.weight", lambda w: count.append(1) or w * 1.5)
        return model

    ours, theirs = keeping(folder), plain(folder)
    want = sample(wrapped(theirs))
    count.clear()
    assert torch.equal(sample(wrapped(ours)), want) and len(count) == STEPS, "it is asked at each step"


@pytest.mark.every_other
@pytest.mark.parametrize("part", ["cross_attn", "cross_attn.k", "norm2"])
def test_a_block_that_is_handed_back_finds_its_weights(folder: Path, part: str) -> None:
    """By stock's own forward, or by another node's in its place, which looks at weights itself."""

    def replaced(model: Any) -> Any:
        model = model.clone()
        module = model.model.diffusion_model.blocks[1].get_submodule(part)
        forward = type(module).forward

        def own(*args: Any, **kwargs: Any) -> Any:
            assert part != "cross_attn" or not (module.k.weight.is_meta or module.v.weight.is_meta)
            return forward(module, *args, **kwargs)

        model.add_object_patch(f"diffusion_model.blocks.1.{part}.forward", own)
        return model

    ours, theirs = keeping(folder), plain(folder)
    want = sample(replaced(theirs), steps=12)
    assert torch.equal(sample(replaced(ours), steps=12), want)
    assert ours.stream.residency.segmentation.base is None, "since its weights came at each step"


def test_a_block_that_another_node_took_over_is_whole(folder: Path) -> None:
    ours, seen = keeping(folder), []
    want = sample(ours)
    block = ours.model.diffusion_model.blocks[2]
    forward = type(block).forward

    def own(*args: Any, **kwargs: Any) -> Any:
        seen.append(block.cross_attn.k.weight.is_meta or block.ffn[0].weight.is_meta)
        return forward(block, *args, **kwargs)

    ours.stream.residency.ceiling = ours.stream.residency.most - 1
    vram_pool.pool_of(CPU)._measure()
    model = ours.clone()
    model.add_object_patch("diffusion_model.blocks.2.forward", own)
    assert torch.equal(sample(model), want) and seen and not any(seen)
    assert len(ours.stream.residency.segmentations) == 1


# -------------------------------------------------------------------------------------------------- in the middle of it


class Inside:
    """Does something in the middle of one block of one step."""

    def __init__(self, deed: Any, call: int) -> None:
        self.deed, self.left = deed, call

    def __call__(self, args: dict[str, Any]) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.deed()
        x: Tensor = args["x"]
        return x


@pytest.mark.every_other
@pytest.mark.parametrize("call", [1, 3, 4, 6])
@pytest.mark.parametrize(
    "deed", [mm.interrupt_current_processing, mm.unload_all_models], ids=["interrupted", "unloaded"]
)
def test_within_the_first_step_or_the_second(folder: Path, deed: Any, call: int) -> None:
    ours, want = keeping(folder), sample(plain(folder))
    stream = ours.stream
    model = ours.clone()
    model.set_model_attn2_patch(Inside(deed, call))
    if deed is mm.unload_all_models:
        assert torch.equal(sample(model), want)
    else:
        with pytest.raises(mm.InterruptProcessingException):
            sample(model)
    assert not stream.residency.in_use and not stream._entered
    assert all(tensor.is_meta for name, tensor in ours.model.named_parameters() if name in stream.keys)
    assert torch.equal(sample(ours), want)
    assert stream.residency.segmentation.base is not None and stream.residency.held <= stream.residency.ceiling
    mm.unload_all_models()
    assert vram_pool.pool_of(CPU).budget.taken == 0


def test_an_interrupt_within_the_product(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not made is not kept, and weights that were held are not held any more."""
    ours, want = keeping(folder), sample(plain(folder))
    products, left = wan.products, [6]

    def broken(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return products(*args, **kwargs)

    monkeypatch.setattr(wan, "products", broken)
    with pytest.raises(KeyboardInterrupt):
        sample(ours)
    assert not ours.stream.residency.in_use and not ours.stream._entered
    assert torch.equal(sample(ours), want)


# ------------------------------------------------------------------------------------------------------------- the room


def opened(nbytes: int, blocks: int = 2) -> TextKV:
    found = TextKV()
    found.open(torch.zeros(nbytes, dtype=torch.uint8), blocks)
    return found


def kept(found: TextKV, context: Tensor, key: str = "", call: object = None) -> Sequence[Tensor] | None:
    """As a block does: what is there, or None where it had to be made."""
    known = found.of(context, key, call)
    assert known is not None
    if 0 in known.made:
        return known.made[0]
    both = torch.cat((context, context + 1), -1)
    found.keep(known, 0, both.chunk(2, -1))
    return None


def test_what_lies_together_stays_so() -> None:
    found, context = opened(room_for(4000, 2)), torch.randn(2, 5, 100)
    assert kept(found, context) is None
    one, other = kept(found, context.clone()) or ()
    assert torch.equal(one, context) and torch.equal(other, context + 1)
    assert one.stride() == (1000, 200, 1) and other.data_ptr() == one.data_ptr() + 400


def test_texts_differ_by_numbers_shape_and_key() -> None:
    found, context = opened(8 * room_for(4000, 2)), torch.randn(2, 5, 100)
    for other, key in ((context, "a"), (context, "b"), (context + 1, "a"), (context.view(1, 10, 100), "a")):
        assert kept(found, other, key) is None
        assert kept(found, other, key) is not None
    nothing = context.clone()
    nothing[0, 0, 0] = torch.nan
    assert kept(found, nothing) is None and kept(found, nothing) is None, "nothing is the same as that"


def test_within_a_call_the_tensor_alone_is_looked_at() -> None:
    found, context, call = opened(2 * room_for(4000, 2)), torch.randn(2, 5, 100), object()
    assert kept(found, context, call=call) is None
    context += 1
    assert kept(found, context, call=call) is not None
    assert kept(found, context, call=object()) is None


def test_none_yields_within_a_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_kv, "STALE", 6)
    found = opened(2 * room_for(4000, 2))
    first, second, third = (torch.randn(2, 5, 100) for _ in range(3))
    for _ in range(2):
        answers = [kept(found, context) is not None for context in (first, second, third)]
    assert answers == [True, True, False]
    found.sampling_ended()
    assert kept(found, second) is not None
    assert kept(found, third) is None and kept(found, third) is not None, "the one used longest ago has gone"
    assert kept(found, second) is not None and kept(found, first) is None
    for _ in range(7):
        assert kept(found, third) is not None
    assert kept(found, first) is None and kept(found, first) is not None, "nobody had asked for the second in a while"


def test_what_is_too_large_is_not_kept() -> None:
    found, context = opened(4 * 4000), torch.randn(2, 5, 100)
    for _ in range(2):
        assert kept(found, context) is None
    assert not found.known

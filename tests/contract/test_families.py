"""What every family of diffusion models keeps to, in every storage, with patches and in every room.

With kernels off the latents are stock's bit for bit, whatever streams. With kernels they are as near to what stock computes in
fp32 as stock's in fp16 are, and every block is ours.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import comfy.nested_tensor
import contract.family_cases as of
import pytest
import torch
from contract.family_cases import FUSED, KINDS, SINGLE, SOME, Case, Shelf, far, latents, ours, patched, same
from in_halves import HALF, OFF, modes
from scenes import Scene

from bed.depth import is_thorough
from fusestream import checkpoints
from fusestream.checkpoints import narrow
from fusestream.fusion.families import family_of
from fusestream.fusion.fused import attention
from fusestream.fusion.weights import lora
from fusestream.kernels_cuda import LEDGER, OPS, KernelPolicy, KernelRefused
from fusestream.memory import Checkpoint

FEW = pytest.mark.parametrize("kind", FUSED if is_thorough() else SOME)


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None, one_tokenizer_of_each: None) -> Iterator[None]:
    import comfy

    LEDGER.clear()
    with torch.inference_mode(), narrow.opened(comfy):
        yield


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    with torch.inference_mode():
        yield Shelf(tmp_path_factory.mktemp("families"))
    gc.collect()


def as_near(fused: Any, theirs: Any, exact: Any) -> bool:
    """Computed by us, and hardly farther from stock's in fp32 than stock's in fp16, whose error differs by a quarter from CPU
    to CPU."""
    return not same(fused, theirs) and far(fused, exact) <= max(1.3 * far(theirs, exact), 2e-3)


# ------------------------------------------------------------------------------------------------------------- latents


@pytest.mark.parametrize("case", of.cases(), ids=str)
def test_latents_are_stocks_and_with_kernels_as_near_as_fp16_is(
    shelf: Shelf, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, scene = shelf.files(case.kind, case.storage), shelf.scene(case.kind)

    def made(model: Any) -> list[torch.Tensor]:
        return latents(patched(model, case.patch), scene)

    theirs = made(of.stocks(files.stocks))
    if case.patch == "patches in one pass":
        monkeypatch.setattr(lora, "serves", lambda _device: True)
    off = ours(files.ours, OFF, room=case.room)
    assert same(made(off), theirs), "with kernels off to the bit"
    if case.room != "stock's":
        streams_within(off.stream, case.room)
    model = ours(files.ours, room=case.room)
    no_kernels = any("streams; no fused blocks for this family" in line for line in LEDGER.messages)
    assert no_kernels == (case.kind not in FUSED and case.room != "stock's")
    fused = made(model)
    if case.kind not in FUSED or case.room == "stock's":  # where the attention alone is ours
        assert same(fused, theirs) or case.patch == "patches in one pass"
        return
    assert not of.handed_back() and as_near(fused, theirs, made(of.stocks(files.numbers, SINGLE)))
    if case.patch == "no patch":
        assert same(made(model), fused), "the second time in the order that the first has shown"
    if case.storage in of.QUANTISED and case.patch == "no patch" and FUSED[case.kind] not in of.PARTLY:
        assert same(fused, made(ours(files.numbers))), "to the bit the file of its numbers"


def streams_within(stream: Any, room: str) -> None:
    residency = stream.residency
    plan = residency.pager.plan
    assert room == "all" or residency.ledger.peak("VRAM") <= residency.ceiling
    if room == "least" and residency.ceiling < residency.whole:
        assert len(plan.streamed) > plan.slots, "otherwise nothing was streamed"
    assert all(paged.stand_in.is_meta or room != "least" for block in stream.blocks for paged in block.paged)


@FEW
def test_a_batch_of_two(shelf: Shelf, kind: str) -> None:
    path, scene = shelf.files(kind, "fp16").ours, shelf.scene(kind)
    samples = scene.latent["samples"]
    if kind in checkpoints.video.MINIMAX:
        pytest.skip("ComfyUI has one video at a time of it")
    two = Scene(scene.positive, scene.negative, {"samples": twice(samples)})
    fused, theirs, exact = (latents(model, two) for model in (ours(path), of.stocks(path), of.stocks(path, SINGLE)))
    assert len(fused[0]) == 2 and not of.handed_back() and as_near(fused, theirs, exact)


def twice(samples: Any) -> Any:
    """A batch of two: of a video, or of one and its sound."""
    if samples.is_nested:
        return comfy.nested_tensor.NestedTensor([twice(one) for one in samples.unbind()])
    return samples.repeat(2, *(1 for _ in samples.shape[1:]))


@FEW
def test_patches_come_and_go(shelf: Shelf, kind: str) -> None:
    """Nothing that was made of weights outlives them."""
    model, scene = ours(shelf.files(kind, "fp16").ours), shelf.scene(kind)
    plain, with_patches = latents(model, scene), patched(model, "patches")
    changed = latents(with_patches, scene)
    assert far(changed, plain) > 0.01
    assert same(latents(model, scene), plain) and same(latents(with_patches, scene), changed)


@pytest.mark.every_other
@FEW
@pytest.mark.parametrize("storage", [f"int8 {kind}" for kind in ("rows", "convrot", "convrot_w4a4")])
def test_int8_files_are_exact_and_under_turbo_no_worse_than_stocks(shelf: Shelf, kind: str, storage: str) -> None:
    """To the bit the file of its halves; multiplied in 8 bits, as far from it as stock's products of the file are, but for
    chance."""
    if not of.is_stored(kind, storage):
        pytest.skip("stock does not read it")
    files, scene = shelf.files(kind, storage), shelf.scene(kind)
    precise, fast, turbo = (
        latents(ours(files.ours, KernelPolicy.of(precision=tier)), scene) for tier in ("precise", "fast", "turbo")
    )
    assert same(fast, precise)
    assert FUSED[kind] in of.PARTLY or same(precise, latents(ours(files.numbers), scene))
    assert not of.handed_back() and far(turbo, precise) > 1e-3
    assert far(turbo, precise) < 1.25 * far(latents(of.stocks(files.ours), scene), precise)


# ------------------------------------------------------------------------------------------------- files and policies


@pytest.mark.parametrize("kind", FUSED)
def test_a_file_is_known_by_its_family_alone(shelf: Shelf, kind: str) -> None:
    with Checkpoint.open(shelf.files(kind, "fp16").ours) as source:
        found = family_of(source.files[0])
    assert found is not None and found.name == FUSED[kind]


@pytest.mark.parametrize("kind", KINDS[None])
def test_a_file_of_no_family_is_of_none(shelf: Shelf, kind: str) -> None:
    """But two relatives of Wan, whose blocks are of another kind, and whose files are looked at as Wan's."""
    with Checkpoint.open(shelf.files(kind, "fp16").ours) as source:
        found = family_of(source.files[0])
    assert (None if found is None else found.name) == ("Wan" if kind.startswith("wan") else None)


@FEW
def test_each_op_can_be_switched_off(shelf: Shelf, kind: str) -> None:
    path, scene = shelf.files(kind, "fp16").ours, shelf.scene(kind)
    with Checkpoint.open(path) as source:
        family = family_of(source.files[0])
    assert family is not None
    with modes() as asked:
        fused = latents(ours(path), scene)
    assert set(asked) & set(family.ops) and all(found == {"auto"} for found in asked.values())
    for op in sorted(set(asked) & set(family.ops)):
        with modes() as without:
            near = latents(ours(path, KernelPolicy.of(**{op: "off"})), scene)
        assert op in OPS and far(near, fused) < 0.01, op
        assert without.pop(op) == {"off"} and set().union(*without.values()) == {"auto"}, op
    all_off = KernelPolicy.of("off", **dict.fromkeys(family.ops, "off"))
    assert same(latents(ours(path, all_off), scene), latents(ours(path, OFF), scene)) and not of.handed_back()


@FEW
@pytest.mark.parametrize("dtype", [torch.bfloat16, SINGLE], ids=["bf16", "fp32"])
def test_what_does_not_compute_in_a_familys_types_is_stocks(shelf: Shelf, kind: str, dtype: torch.dtype) -> None:
    path, scene, word = shelf.files(kind, "fp16").ours, shelf.scene(kind), str(dtype).removeprefix("torch.")
    with Checkpoint.open(path) as source:
        family = family_of(source.files[0])
    found, stocks = latents(ours(path, dtype=dtype), scene), latents(ours(path, OFF, dtype), scene)
    if family is not None and word in family.types:
        assert not of.handed_back() and not same(found, stocks)
        return
    if family is not None and family.as_stock_chooses:  # it computes as a model without a family
        assert not of.handed_back() and same(found, stocks)
        return
    assert of.handed_back() == {f"the model computes in {word}, the kernels in float16"} and same(found, stocks)
    with pytest.raises(KernelRefused, match=rf"'on'.*{word}.*'auto'"):
        latents(ours(path, KernelPolicy.of("on"), dtype), scene)


@FEW
def test_two_clones_keep_their_own_policies(shelf: Shelf, kind: str) -> None:
    """As two branches of a graph have them that come from one loader: the weights are shared, the policy is not."""
    model, scene = ours(shelf.files(kind, "fp16").ours), shelf.scene(kind)
    off = model.clone()
    attention.install(off, OFF)
    first, second = latents(model, scene), latents(off, scene)
    assert off.model is model.model and not same(first, second)
    assert same(latents(model, scene), first) and same(latents(off, scene), second)


@FEW
def test_no_kernel_refuses_what_the_blocks_hand_it(
    shelf: Shelf, kind: str, refused_by_kernels: list[tuple[str, str]]
) -> None:
    """By types, sizes and strides, which can be asked without a card."""
    for storage in ("fp16", "fp8 scaled"):
        if of.is_stored(kind, storage):
            latents(ours(shelf.files(kind, storage).ours, dtype=HALF), shelf.scene(kind))
    assert not [one for one in refused_by_kernels if one[0] != "attention"]

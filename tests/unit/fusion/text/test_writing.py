"""Text that our layers write: the tokens that stock writes with the same files, greedy or drawn by the same seed."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import int8_files
import pytest
import torch
from comfy.weight_adapter.lora import LoRAAdapter
from packed_files import packed_file
from safetensors.torch import load_file

from bed.depth import is_thorough
from fusestream import checkpoints, fusion
from fusestream.fusion.base import notices
from fusestream.fusion.base.errors import WrongFile
from fusestream.fusion.families.qwen3_vl import sizes
from fusestream.fusion.stream import vram_pool
from fusestream.fusion.stream.no_head import NoHead
from fusestream.fusion.text import (
    cache,
    layer,
    room,
    stack,
    token_rate,
    writing,
)
from fusestream.fusion.text.vision import patches, towers
from fusestream.fusion.weights import fp32_residual
from fusestream.kernels_cuda import LEDGER, KernelPolicy, KernelRefused
from fusestream.memory import read_header

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

GREEDY = {"do_sample": False, "max_length": 12}
DRAWN = {"do_sample": True, "max_length": 12, "seed": 7, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
OFF = KernelPolicy.of("off")
VL = "qwen3vl_8b"  # what stock takes every width but the 4B's for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("writing")


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded is fused for the CPU too."""
    for module in (stack, towers):
        monkeypatch.setattr(module, "fuse", partial(module.fuse, on_cpu=True))
    LEDGER.clear()


def picture(height: int = 64, width: int = 96, seed: int = 0) -> dict[str, Any]:
    drawn = torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(seed))
    return {"type": "image", "data": drawn, "original_type": "image"}


def said(*parts: Any, name: str = VL) -> dict[str, Any]:
    return {name: [[(part, 1.0) for part in parts]]}


PROMPTS = {
    "words": said(5, 7, 9, 200, 7),
    "picture": said(5, picture(), 9, 11),
    "pictures": said(picture(64, 64), 5, 9, picture(96, 32, 1), 7),
}


def load(path: Path, budget: float = -1.0, **policy: Any) -> Any:
    return fusion.load_text_encoder(str(path), [], KernelPolicy.of(**policy), budget)


def stocks(path: Path) -> Any:
    options = dict(sizes.options(read_header(path)))
    return comfy.sd.load_clip([str(path)], clip_type=comfy.sd.CLIPType.QWEN_IMAGE, model_options=options)


def write(clip: Any, prompt: str = "picture", **options: Any) -> list[int]:
    tokens: list[int] = clip.generate(PROMPTS[prompt], **{**GREEDY, **options})
    return tokens


def ours_wrote() -> bool:
    return not [one for one in LEDGER.refusals if one.op == "text encoder"]


# ---------------------------------------------------------------------------------------------------------- the tokens


@pytest.mark.every_other
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("how", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_tokens_are_stocks(folder: Path, prompt: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.write("qwen3_vl", folder)
    wanted = write(stocks(path), prompt, **how)
    ours = load(path)
    ran = count_of(monkeypatch, writing.Text, "next")
    assert write(ours, prompt, **how) == wanted and len(wanted) == len(ran) == 12
    assert write(ours, prompt, **how) == wanted, "and the same again"
    assert ours_wrote()


def count_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    calls: list[Any] = []
    before = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **more: calls.append(given) or before(*given, **more))
    return calls


@pytest.mark.every_other
@pytest.mark.parametrize(
    "how",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 1.1, "presence_penalty": 0.7, "top_k": 0},
        {"presence_penalty": 0.5, "temperature": 1.0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.0},
        {"top_k": 1000, "min_p": 0.3},
    ],
    ids=str,
)
def test_every_way_to_choose(folder: Path, how: dict[str, Any], writers: tuple[Any, Any]) -> None:
    ours, stock = writers
    for seed in (3, 2**64 - 1):
        asked = {**DRAWN, **how, "seed": seed}
        assert write(ours, "words", **asked) == write(stock, "words", **asked)
    assert ours_wrote()


@pytest.fixture(scope="module")
def writers(folder: Path) -> tuple[Any, Any]:
    """(ours, stock's), of one file."""
    path = checkpoints.write("qwen3_vl", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "fuse", partial(stack.fuse, on_cpu=True))
        return load(path), stocks(path)


@pytest.mark.every_other
@pytest.mark.parametrize("budget", [0.0, -1.0])
@pytest.mark.parametrize("storage", list(checkpoints.KINDS["qwen3_vl"].storages)[:: 1 if is_thorough() else 2])
def test_every_storage(folder: Path, storage: str, budget: float) -> None:
    path = checkpoints.write("qwen3_vl", folder, storage)
    if budget == 0.0 and storage != "fp16" and not is_thorough():
        pytest.skip("the same products as where it streams")
    assert write(load(path, budget), "pictures") == write(stocks(path), "pictures")
    assert ours_wrote()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"] if is_thorough() else ["Q4_K"])
def test_packed_files(folder: Path, tmp_path: Path, kind: str) -> None:
    """Beside stock's computation of the same packed numbers."""
    path = packed_file(tmp_path / "x.gguf", load_file(checkpoints.write("qwen3_vl", folder)), kind)
    ours, stock = load(path), load(path, default="off")
    assert write(ours) == write(stock) and ours_wrote()


@pytest.mark.every_other
@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_the_words_of_a_packed_file_stay_packed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The table that words are multiplied with takes what it takes in the file, and gives each token's row where it lies; with a
    LoRA the file is asked for rows. Q6_K is what files of the mix have it in."""
    path = packed_file(tmp_path / "x.gguf", load_file(checkpoints.write("qwen3_vl", folder)), kind)
    asked = count_of(monkeypatch, writing.Text, "_embedded")
    ours, stock = load(path), load(path, default="off")
    before = write(stock)
    assert write(ours) == before and not asked
    stream = ours.patcher.stream
    [table] = [layer for layer in stream.layers if layer.name.endswith("embed_tokens")]
    assert table.nbytes == -(-table.stored_bytes // 256) * 256
    [key] = [key for key in stock.patcher.model_state_dict() if key.endswith("embed_tokens.weight")]
    rows, width = stream.in_file.weight(key).shape
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn(rows, 2, generator=generator), torch.randn(2, width, generator=generator)
    for clip in (ours, stock):
        clip.add_patches({key: LoRAAdapter(set(), (up, down * 0.1, 2.0, None, None, None))}, 0.7)
    assert write(ours) == write(stock) != before and asked and ours_wrote()


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_matrices_that_a_packed_file_has_in_halves_stay_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its norms are in fp32, which stock takes for the type of all. As fp32 the table of words would be made half for each word."""
    tensors = load_file(checkpoints.write("qwen3_vl", folder))
    [table] = [name for name in tensors if name.endswith("embed_tokens.weight")]
    [norm] = [name for name in tensors if name.endswith("layers.0.post_attention_layernorm.weight")]
    mergers = [name for name in tensors if ".deepstack_merger_list." in name and name.endswith("fc1.weight")]
    kinds = {norm: "F32", table: kind, **dict.fromkeys(mergers, kind)}
    path = packed_file(tmp_path / "x.gguf", tensors, "Q8_0", kinds=kinds)
    asked = count_of(monkeypatch, writing.Text, "_embedded")
    ours, stock = load(path), load(path, default="off")
    assert stock.cond_stage_model.dtypes == {torch.float32}
    assert write(ours, "picture") == write(stock, "picture") and ours_wrote() and not asked
    layers = {one.name: one for one in ours.patcher.stream.layers}
    assert sum(name.rpartition(".")[0].endswith("deepstack_merger_list") for name in layers) == len(mergers)
    for name, one in layers.items():
        if name.endswith("embed_tokens") or "deepstack_merger_list" in name:
            matrices = [weight for weight in one.weights if len(weight.extent.shape) == 2]
            assert {weight.device_dtype for weight in matrices if not weight.is_packed} == {
                torch.float16 if kind == "F16" else torch.bfloat16
            }


def test_through_the_smallest_window(folder: Path) -> None:
    path = checkpoints.write("qwen3_vl", folder)
    clip = load(path)
    stream = clip.patcher.stream
    stream.residency.ceiling = stream.residency.least
    assert write(clip) == write(stocks(path))
    assert stream.residency.ledger.peak("VRAM") <= stream.residency.least


def test_the_words_matrix_joins_what_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for when the first text is written, with the weights of all layers there. Where nothing more is free then, some
    of it streams, until the text is long: then the vision tower, which has seen, makes room."""
    path, following = checkpoints.write("qwen3_vl", folder), writing.Text.next
    monkeypatch.setattr(writing, "LONG", 4)
    for free in (2**40, 0):
        clip, streamed = load(path), list[tuple[int, bool]]()
        monkeypatch.setattr(vram_pool, "free", lambda _device, free=free: free)

        def counting(self: Any, sampler: Any, stream: Any = clip.patcher.stream, found: Any = streamed) -> int:
            token = following(self, sampler)
            found.append(
                (len(stream.residency.pager.plan.streamed), any(at.name.startswith("visual") for at in stream.layers))
            )
            return token

        monkeypatch.setattr(writing.Text, "next", counting)
        write(clip)
        before, after = streamed[:4], streamed[4:]
        assert after == [(0, bool(free))] * 8 and all(seen for _, seen in before)
        assert all((count > 0) == (not free) for count, _ in before)


def test_a_long_text_takes_what_its_prompt_gave_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights had to leave it room, which is free when the model is paged anew for the text."""
    clip, following = load(checkpoints.write("qwen3_vl", folder)), writing.Text.next
    stream, free, asked = clip.patcher.stream, [0], list[tuple[int, float]]()
    monkeypatch.setattr(writing, "LONG", 4)
    monkeypatch.setattr(vram_pool, "free", lambda _device: free[0])

    def next_(self: Any, sampler: Any) -> int:
        if self._written == 4:
            free[0] = 12345
            load_ = stream.residency.load
            monkeypatch.setattr(
                stream.residency,
                "load",
                lambda device, n, grains, held=stream.residency.held: (
                    asked.append((held, n)),
                    load_(device, n, grains),
                ),
            )
        return following(self, sampler)

    monkeypatch.setattr(writing.Text, "next", next_)
    tokens = write(clip)
    assert [n - held for held, n in asked] == [12345] and asked[0][0] > 0
    monkeypatch.undo()
    assert tokens == write(stocks(checkpoints.write("qwen3_vl", folder)))


def test_precision_fast_and_loras(folder: Path) -> None:
    path = checkpoints.write("qwen3_vl", folder)
    ours, stock = load(path, precision="fast"), stocks(path)
    assert write(ours) == write(stock)
    found, generator = {}, torch.Generator().manual_seed(3)
    for key, value in stock.patcher.model_state_dict().items():
        if key.endswith("proj.weight") and value.ndim == 2:
            up = torch.randn(value.shape[0], 2, generator=generator) * 0.1
            down = torch.randn(2, value.shape[1], generator=generator) * value.shape[1] ** -0.5
            found[key] = LoRAAdapter(set(), (up, down, 2.0, None, None, None))
    before = write(stock)
    for clip in (ours, stock):
        clip.add_patches(found, 0.7)
    assert write(ours) == write(stock) != before and ours_wrote()


@pytest.mark.parametrize("op", [*writing.OPS, "rms_rope_", "norm_modulate"][:: 1 if is_thorough() else 2])
def test_each_op_can_be_switched_off(folder: Path, op: str, writers: tuple[Any, Any]) -> None:
    path = checkpoints.write("qwen3_vl", folder)
    assert write(load(path, **{op: "off"})) == write(writers[1]) and ours_wrote()


# ----------------------------------------------------------------------------------------------------------- its memory


def test_room_for_keys_grows(folder: Path, monkeypatch: pytest.MonkeyPatch, writers: tuple[Any, Any]) -> None:
    """And what was kept stays."""
    for name, value in (("AT_FIRST", 1), ("STEP", 4)):
        monkeypatch.setattr(cache, name, value)
    grown = count_of(monkeypatch, cache.Cache, "grow")
    ours, stock = writers
    assert write(ours, max_length=30) == write(stock, max_length=30) and 2 <= len(grown) < 8


def test_long_prompts_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch, writers: tuple[Any, Any]) -> None:
    monkeypatch.setattr(layer, "CHUNK", 5)
    monkeypatch.setattr(patches, "CHUNK", 12)
    asked: list[int] = []
    attention = layer.attention
    monkeypatch.setattr(
        layer, "attention", lambda q, *rest, **more: asked.append(q.shape[1]) or attention(q, *rest, **more)
    )
    assert write(writers[0], "pictures") == write(writers[1], "pictures")
    assert max(asked) == 5


def test_what_is_kept_is_little(writers: tuple[Any, Any]) -> None:
    """However much might be written."""
    model = writers[0].cond_stage_model.qwen3vl_8b.transformer.model
    kept = cache.Cache(model, 300, 300 + 32768, torch.device("cpu"))
    assert kept.places == 1536 and kept.nbytes(1536) == 4 * 1536 * 128 * 4
    assert kept.of(3).k.shape == (1, 1536, 1, 128) and kept.of(3).values.shape == (1, 1, 1536, 1, 128)
    while kept.places < 33000:
        kept.grow()
    assert kept.places == 33280


# ----------------------------------------------------------------------------------------------------- what users notice


def test_comfyui_is_asked_to_keep_room_for_keys(
    folder: Path, monkeypatch: pytest.MonkeyPatch, writers: tuple[Any, Any]
) -> None:
    """Beside what it keeps free for whatever computes, and with each use: of the prompt at hand, pictures in it too."""
    ours, stock = writers
    model = ours.cond_stage_model
    card = torch.device("cuda", 0)
    always = int(0.8 * 2**30)
    kept = {
        count: model.memory_estimation_function({VL: [[(5, 1.0)] * count]}, device=card) - always for count in (7, 5000)
    }
    of_stack = ours.cond_stage_model.qwen3vl_8b.transformer.model
    read = room.READ * of_stack.config.intermediate_size  # of each token, of so many at a time
    assert kept[7] == pytest.approx(cache.kept_bytes(of_stack, 1280) + 7 * read, abs=1)
    assert kept[5000] == pytest.approx(cache.kept_bytes(of_stack, 6144) + fp32_residual.CHUNK_ROWS * read, abs=1)
    ffn, width = ours.cond_stage_model.qwen3vl_8b.transformer.visual.blocks[0].mlp.linear_fc1.weight.shape
    for side, count in ((256, 4 * 84), (2048, 4 * 5350)):
        tokens = count // 4
        found = model.memory_estimation_function(said(picture(side, side)), device=card) - always
        seen = room.SEEN * ffn * min(count, patches.CHUNK) + room.STREAM * width * count
        kept_and_read = (
            cache.kept_bytes(of_stack, cache.rounded(tokens + 1024)) + min(tokens, fp32_residual.CHUNK_ROWS) * read
        )
        assert found == pytest.approx(kept_and_read + seen, abs=1)
    seen = said(picture(2048, 2048))
    assert model.memory_estimation_function(seen, device=torch.device("cpu")) == 0
    asked: list[float] = []
    monkeypatch.setattr(
        comfy.model_management, "load_models_gpu", lambda _, memory_required: asked.append(memory_required)
    )
    monkeypatch.setattr(ours.patcher, "load_device", card)
    ours.load_model({VL: [[(5, 1.0)] * 7]})
    assert asked == [pytest.approx(always + kept[7])]
    assert not hasattr(stock.cond_stage_model, "memory_estimation_function")


def test_each_token_moves_the_bar_and_can_be_the_last(
    writers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = count_of(monkeypatch, comfy.utils.ProgressBar, "update")
    write(writers[0], "words", max_length=5)
    assert [bar.total for bar, _ in moved] == [5] * 5
    stops: list[Any] = []
    check = comfy.model_management.throw_exception_if_processing_interrupted

    def interrupted(*_: Any) -> None:
        if len(stops) == 3:
            raise comfy.model_management.InterruptProcessingException
        check()

    monkeypatch.setattr(writing.Text, "next", _noted(writing.Text.next, stops))
    monkeypatch.setattr(comfy.model_management, "throw_exception_if_processing_interrupted", interrupted)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        write(writers[0], "words", max_length=9)
    assert len(stops) == 3
    monkeypatch.undo()
    for module in (stack, towers):
        monkeypatch.setattr(module, "fuse", partial(module.fuse, on_cpu=True))
    assert write(writers[0], "words") == write(writers[1], "words"), "and nothing stays of it"


def _noted(function: Any, calls: list[Any]) -> Any:
    def called(*given: Any) -> Any:
        found = function(*given)
        calls.append(found)
        return found

    return called


def test_a_token_that_ends_the_text(writers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = write(writers[1], "words", max_length=30)
    end = wanted[4]
    for clip in writers:
        monkeypatch.setattr(
            clip.cond_stage_model.qwen3vl_8b.transformer.model.config, "stop_tokens", [end], raising=False
        )
        assert write(clip, "words", max_length=30) == wanted[: wanted.index(end) + 1]


# What the host asks of the device: numbers, or how many there are.
ASKING = ("item", "tolist", "cpu", "numpy", "nonzero", "__int__", "__float__", "__bool__", "__index__")


@pytest.mark.parametrize("how", [GREEDY, {**DRAWN, "repetition_penalty": 1.2}], ids=["greedy", "drawn"])
def test_the_host_asks_once_for_a_token(folder: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the operations as a card has them: references may ask."""
    clip = load(checkpoints.write("qwen3_vl", folder), 0.0, decode_attention="off", rms_rope_keep="off")
    counted: list[int] = []
    following = writing.Text.next

    def counting(self: Any, sampler: Any) -> int:
        with pytest.MonkeyPatch.context() as patch:
            asked = [one for name in ASKING if (one := count_of(patch, torch.Tensor, name)) is not None]
            found = following(self, sampler)
        counted.append(sum(map(len, asked)))
        return found

    monkeypatch.setattr(writing.Text, "next", counting)
    write(clip, "words", **how)
    assert set(counted[1:]) == {1}


# ------------------------------------------------------------------------------------------------------ what stock writes


def test_what_is_handed_back(writers: tuple[Any, Any]) -> None:
    comfy.model_management.load_models_gpu([clip.patcher for clip in writers])
    ours, stock = (clip.cond_stage_model.qwen3vl_8b.transformer for clip in writers)
    options = {"do_sample": False, "max_length": 3, "temperature": 1.0, "seed": 0}
    x = torch.randn(2, 5, 256)  # given as a copy: from 0.33 on stock writes into it
    assert ours.generate(x.clone(), **options) == stock.generate(x.clone(), **options)
    wanted = stock.generate(x[:1].clone(), **options, execution_dtype=torch.float32)
    assert ours.generate(x[:1].clone(), **options, execution_dtype=torch.float32) == wanted
    policy = ours.model.fusestream_policy
    ours.model.fusestream_policy = KernelPolicy.of("on")
    with pytest.raises(KernelRefused, match=r"'on' for this text encoder.*several texts are written at once"):
        ours.generate(x.clone(), **options)
    ours.model.fusestream_policy = policy


@pytest.mark.parametrize("use", ["flux2", "lumina2"])
def test_qwen3_alone_writes_too(folder: Path, use: str) -> None:
    path = checkpoints.write("qwen3", folder)
    options = checkpoints.model_options(path)
    if use == "flux2":
        options["qwen3_4b_class"] = partial(comfy.text_encoders.flux.Qwen3_4BModel, layer=[0, 1, 2])
    ours = fusion.load_text_encoder(str(path), [], KernelPolicy(), -1.0, kind=use, options=options)
    stock = comfy.sd.load_clip([str(path)], clip_type=getattr(comfy.sd.CLIPType, use.upper()), model_options=options)
    prompt = said(5, 7, 9, 11, name="qwen3_4b")
    for how in (GREEDY, DRAWN):
        assert ours.generate(prompt, **how) == stock.generate(prompt, **how)
    assert ours_wrote()


def test_its_pace_is_told_beside_what_a_token_reads(writers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[token_rate.Pace] = []
    monkeypatch.setattr(token_rate, "tell", told.append)
    write(writers[0], "words", max_length=6)
    [found] = told
    model = writers[0].cond_stage_model.qwen3vl_8b.transformer.model
    read = sum(weight.numel() for weight in model.layers.parameters()) + model.embed_tokens.weight.numel()
    kept = 4 * 128 * 4 * (10 - 6 // 2)  # the last token has no keys yet
    assert found.tokens == 6 and found.nbytes == 2 * read + kept and found.memory is None
    assert found.first > 0 and found.rate == 5 / found.seconds


def test_its_pace_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert token_rate.Pace(1, 0.5, 0.0, 10**9).words() == "1 token, the first after 0.50 s"
    of_card = token_rate.Pace(101, 0.5, 4.0, 4 * 10**9, 448e9)
    assert of_card.words() == (
        "101 tokens, the first after 0.50 s, then 25.0 a second: 4.00 GB a token, 100 GB/s; the card's memory has 448 GB/s, "
        "112 tokens a second at most"
    )
    heard: list[str] = []
    monkeypatch.setattr(notices, "_writers", [heard.append, lambda words: 1 / 0])
    token_rate.tell(of_card)
    assert heard == [of_card.words()], "who cannot show it is not worth a run"
    with token_rate.untold():
        token_rate.tell(of_card)
    assert len(heard) == 1


@pytest.mark.parametrize("kind", list(int8_files.KINDS)[1:])
def test_int8_files(folder: Path, tmp_path: Path, kind: str) -> None:
    """Rows that were turned become fp16 first."""
    path, _ = int8_files.write(checkpoints.write("qwen3_vl", folder), tmp_path, kind)
    ours, stock = load(path), load(path, default="off")
    assert write(ours, "words") == write(stock, "words") and ours_wrote()


def test_a_file_without_the_words_matrix(writers: tuple[Any, Any]) -> None:
    """Of an 8B, as files for encoding alone are published."""
    parts = writers[0].cond_stage_model.qwen3vl_8b.transformer.model._modules
    parts["lm_head"] = NoHead(Path("x.safetensors"))
    try:
        with pytest.raises(WrongFile, match=r"x\.safetensors lacks the matrix that words come from"):
            write(writers[0], "words")
    finally:
        del parts["lm_head"]


# ---------------------------------------------------------------------------------------------- what a text needs of them


def copies(clip: Any) -> Counter[str]:
    return Counter(entry.layer for entry in clip.patcher.stream.residency.ledger.entries if entry.kind == "copy")


def test_a_text_by_words_alone_brings_no_vision_tower_and_all_else_stays(folder: Path) -> None:
    """From the first token on: what is in its place can be captured."""
    clip = load(checkpoints.write("qwen3_vl", folder))
    stream = clip.patcher.stream
    write(clip, "words")
    assert not [name for name in copies(clip) if name.startswith("visual")]
    assert stream.settled().generation is not None and "model.embed_tokens" in {layer.name for layer in stream.layers}
    before = copies(clip)
    write(clip, "words")
    assert copies(clip) == before, "nothing comes again"


def test_a_vision_tower_that_was_used_stays_with_the_rest(folder: Path) -> None:
    clip = load(checkpoints.write("qwen3_vl", folder))
    stream = clip.patcher.stream
    write(clip, "picture")
    assert stream.settled().generation is not None
    before, wanted = copies(clip), write(clip, "words")
    assert write(clip, "picture") and write(clip, "words") == wanted and copies(clip) == before
    assert stream.residency.held == stream.residency.most


def test_a_vision_tower_goes_while_a_long_text_does_not_fit_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would take room from it, and be brought with each token for nobody."""
    path = checkpoints.write("qwen3_vl", folder)
    wanted, clip = write(load(path), "picture"), load(path)
    monkeypatch.setattr(writing, "LONG", 2)
    clip.patcher.stream.residency.ceiling = clip.patcher.stream.residency.least
    for texts in (1, 2):
        assert write(clip, "picture") == wanted
        # Each of the picture's layers came for the picture, and perhaps ahead of it and of two tokens.
        vision = [count for name, count in copies(clip).items() if name.startswith("visual")]
        assert max(vision) <= 5 * texts < len(wanted) * texts


def test_for_a_short_text_nothing_comes_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caption of a few words about each of many pictures."""
    clip, made = load(checkpoints.write("qwen3_vl", folder)), list[int]()
    stream = clip.patcher.stream
    stream.residency.ceiling = (stream.residency.least + stream.residency.most) // 2
    write(clip, "picture"), write(clip, "picture")
    reorder = stream._reorder
    monkeypatch.setattr(stream, "_reorder", lambda order: (made.append(len(order)), reorder(order)))
    for _ in range(3):
        write(clip, "picture")
    assert not made and stream.residency.pager.plan.streamed

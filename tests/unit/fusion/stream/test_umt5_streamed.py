"""A text encoder that streams encodes what stock's does, bit for bit, and is a CLIP to other nodes."""

from __future__ import annotations

import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import comfy.hooks
import comfy.model_management as mm
import comfy.sd
import comfy.utils
import pytest
import torch
from live_memory import no_collector
from plain_device import PlainDevice
from safetensors.torch import load_file, save_file

from fusestream import checkpoints, fusion
from fusestream.fusion.base.errors import NotStreamable, NotWhileStreaming, WrongFile, WrongInput
from fusestream.fusion.families.t5 import encoder as t5
from fusestream.fusion.load.text import load_streamed_text_encoder
from fusestream.fusion.patcher.streaming_patcher import StreamingModelPatcher
from fusestream.fusion.stream import residency, segments
from fusestream.memory import FileChanged, Pager, RamBudget, bounds
from fusestream.memory.backends.slots import SlotsBackend
from fusestream.memory.host.host import Host

GIB = 2**30
PROMPT = "a red fox (runs:1.3) through the snow"
LORA = "lora_text"


pytestmark = pytest.mark.usefixtures("as_comfyui_runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("umt5")


@pytest.fixture(scope="module")
def path(folder: Path) -> str:
    return str(checkpoints.write("umt5", folder, "fp16"))


@pytest.fixture(scope="module")
def stock(path: str) -> Any:
    return load_stock(path)


def load_stock(path: str, folders: list[str] | None = None) -> Any:
    options = checkpoints.model_options(Path(path))
    return comfy.sd.load_clip([path], folders, clip_type=comfy.sd.CLIPType.WAN, model_options=options)


def least(path: str, folders: list[str] | None = None, policy: Any = None) -> Any:
    """The encoder streamed through the smallest window there is."""
    clip = load_streamed_text_encoder(path, folders or [], policy=policy or fusion.KernelPolicy.of("off"))
    clip.patcher.stream.residency.ceiling = clip.patcher.stream.residency.least
    return clip


def encode(clip: Any, text: str = PROMPT) -> torch.Tensor:
    tokens = clip.tokenize(text, tokenizer_options={"umt5xxl_min_length": 24})
    encoding: torch.Tensor = clip.encode_from_tokens(tokens)
    return encoding


@pytest.mark.deep
@pytest.mark.parametrize("precision", ["precise", "fast"])
def test_streamed_and_fused_is_fused(path: str, stock: Any, precision: str) -> None:
    """Over the references. q, k and v lie side by side, and are one product; which the CPU's may round otherwise."""
    policy = fusion.KernelPolicy.of(precision=precision)
    clips = [least(path, policy=policy), load_stock(path)]
    for clip in clips:
        t5.fuse(clip.cond_stage_model, policy, on_cpu=True)
    streamed, whole = (encode(clip) for clip in clips)
    assert torch.allclose(streamed, whole, atol=2e-5 * float(whole.abs().max()))
    assert torch.equal(streamed, encode(clips[0])), "and the same again"
    wanted = encode(stock)
    assert 0 < (streamed - wanted).norm() <= 2e-3 * wanted.norm()


def test_the_loader_streams_when_it_is_asked_to(path: str) -> None:
    policy = fusion.KernelPolicy.of("auto", precision="fast")
    assert not isinstance(fusion.load_text_encoder(path, [], policy).patcher, StreamingModelPatcher)
    for budget, ceiling in ((0.5, GIB // 2), (-1.0, None)):
        clip = fusion.load_text_encoder(path, [], policy, budget)
        assert isinstance(clip, comfy.sd.CLIP) and isinstance(clip.patcher, StreamingModelPatcher)
        assert clip.patcher.stream.residency.ceiling == ceiling and clip.patcher.is_clip
        assert clip.cond_stage_model.umt5xxl.transformer.encoder.fusestream_policy is policy
        assert clip.patcher.hook_mode == comfy.hooks.EnumHookMode.MinVram
    factory, arguments = clip.patcher.cached_patcher_init
    again = factory(*arguments, disable_dynamic=True)
    assert isinstance(again, StreamingModelPatcher) and again.model is not clip.patcher.model
    assert torch.equal(encode(clip), encode(fusion.load_text_encoder(path, [])))


def test_what_stock_would_move_does_not_stream(path: str, tmp_path: Path) -> None:
    """It casts no FP64, and so takes a text encoder of that to the CPU while it builds it."""
    wide = str(tmp_path / "umt5_fp64.safetensors")
    save_file({name: t.double() if t.is_floating_point() else t for name, t in load_file(path).items()}, wide)
    assert torch.equal(encode(fusion.load_text_encoder(wide, [], vram_budget=-1.0)), encode(load_stock(wide)))
    with pytest.raises(NotStreamable, match=r"umt5_fp64.safetensors: ComfyUI knows no cast .* vram_budget to 0"):
        fusion.load_text_encoder(wide, [], vram_budget=0.5)


def test_patches_of_the_token_embedding(path: str, stock: Any) -> None:
    """Of the rows that are read."""
    for patch in ((torch.randn(512, 16),), ("diff", (torch.randn(512, 16),)), ("set", (torch.randn(512, 16),))):
        pair = [clip.clone() for clip in (least(path), stock)]
        for clip in pair:
            clip.add_patches({"umt5xxl.transformer.shared.weight": patch}, 0.3, 0.9)
        assert torch.equal(*(encode(clip) for clip in pair)) and not torch.equal(encode(pair[0]), encode(stock))


def test_what_cannot_be_done_by_rows_is_refused(path: str) -> None:
    clip = least(path).clone()
    clip.add_patches({("umt5xxl.transformer.shared.weight", (0, 0, 4)): (torch.ones(4, 16),)})
    with pytest.raises(NotWhileStreaming, match=r"token embedding stays in the file.*vram_budget to 0"):
        encode(clip)


def test_clones_share_the_weights(path: str, stock: Any) -> None:
    clip = least(path)
    clone = clip.clone()
    assert clone.patcher.stream is clip.patcher.stream and clone.patcher.is_clip
    assert torch.equal(encode(clone), encode(stock))
    mm.unload_all_models()
    assert clip.patcher.stream.residency.held == 0 and clip.patcher.loaded_size() == 0
    assert torch.equal(encode(clip), encode(stock))


def test_a_dropped_encoder_goes_without_a_garbage_collection(path: str) -> None:
    clip = least(path, policy=fusion.KernelPolicy.of("auto"))
    encode(clip)
    mm.unload_all_models()
    stream, net = clip.patcher.stream, weakref.ref(clip.cond_stage_model.umt5xxl.transformer)
    with no_collector():
        del clip
        assert net() is None and not stream.blocks, "and the stream has ended"


def test_what_is_about_to_run_keeps_its_window(path: str, stock: Any) -> None:
    """Stock may ask a loaded model to hold less when it is used again; less than the window would come back at once."""
    clip = load_streamed_text_encoder(path, [], policy=fusion.KernelPolicy.of("off"))
    assert torch.equal(encode(clip), encode(stock))
    stream, device = clip.patcher.stream, clip.patcher.load_device
    pager, whole = stream.residency.pager, stream.residency.held
    assert clip.patcher.partially_load(device, -whole // 2) == 0
    assert stream.residency.least <= stream.residency.held < whole
    assert clip.patcher.partially_load(device, -(10**12)) == 0
    assert stream.residency.pager is pager and stream.residency.held == stream.residency.least
    assert torch.equal(encode(clip), encode(stock))


def test_what_needs_all_weights_says_so(path: str) -> None:
    clip = least(path)
    clip.cond_stage_model.reset_clip_options()
    with pytest.raises(NotWhileStreaming, match="before it was told where"):
        clip.cond_stage_model.encode_token_weights(clip.tokenize("a fox"))


@pytest.mark.deep
def test_a_lora_by_a_hook(folder: Path, path: str, stock: Any) -> None:
    """Create Hook LoRA, and Set CLIP Hooks with its schedule."""
    file = comfy.utils.load_torch_file(str(checkpoints.write(LORA, folder)))
    found = []
    for clip in (least(path).clone(), stock.clone()):
        hooks = comfy.hooks.create_hook_lora(file, 0.0, 0.7)
        hooks.set_keyframes_on_hooks(None)
        clip.apply_hooks_to_conds = hooks
        clip.patcher.forced_hooks = hooks.clone()
        clip.use_clip_schedule = True
        clip.patcher.register_all_hook_patches(hooks, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Clip))
        ((hooked, _),) = clip.encode_from_tokens_scheduled(clip.tokenize(PROMPT))
        clip.patcher.forced_hooks = None
        found.append(hooked)
    assert torch.equal(*found)


def test_embeddings_by_name(folder: Path, path: str) -> None:
    place = folder / "embeddings"
    place.mkdir(exist_ok=True)
    save_file({"umt5xxl": torch.randn(2, 8)}, place / "style.safetensors")
    text = "a fox embedding:style in the snow"
    pair = [load(path, [str(place)]) for load in (least, load_stock)]
    for clip in pair:  # stock takes embeddings of UMT5-XXL's width only
        tokenizer = getattr(clip.tokenizer, clip.tokenizer.clip)
        tokenizer.embedding_size = 8
    got, wanted = (encode(clip, text) for clip in pair)
    assert torch.equal(got, wanted)
    assert not torch.equal(got, encode(pair[0], "a fox in the snow"))


def test_each_row_of_the_embedding_is_read_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = least(path)
    source, read = clip.patcher.stream.residency.source, []
    read_rows = source.read_rows
    monkeypatch.setattr(
        source,
        "read_rows",
        lambda extent, buffer, size, rows: read.append((size, rows)) or read_rows(extent, buffer, size, rows),
    )
    shared = clip.cond_stage_model.umt5xxl.transformer.shared
    ids = torch.tensor([[5, 511, 5, 0]])
    rows = shared(ids, out_dtype=torch.float32)
    assert read == [(2 * checkpoints.T5_WIDTH, [0, 5, 511])]
    assert torch.equal(rows, load_file(path)["shared.weight"].float()[ids])
    assert shared(ids[:, :0], out_dtype=torch.float32).shape == (1, 0, checkpoints.T5_WIDTH)
    with pytest.raises(IndexError, match="token 512 is not one of the text encoder's 512"):
        shared(ids + 1)


def test_a_budget_too_small_names_this_loader(path: str) -> None:
    with pytest.raises(WrongInput, match="Raise vram_budget in the FuseStream Text Encoder Loader"):
        load_streamed_text_encoder(path, [], 1 / 2**14)


def test_files_that_cannot_stream_are_refused(folder: Path, tmp_path: Path, path: str) -> None:
    with pytest.raises(NotStreamable, match=r"only \.safetensors and \.gguf files can be streamed"):
        load_streamed_text_encoder(str(folder / "umt5.pt"), [])
    weights = load_file(path)
    del weights["encoder.block.7.layer.1.DenseReluDense.wo.weight"]
    save_file(weights, tmp_path / "lacking.safetensors")
    with pytest.raises(WrongFile, match=r"lacks 1 of the model's weights.*encoder\.block\.7\.layer\.1"):
        load_streamed_text_encoder(str(tmp_path / "lacking.safetensors"), [])


def test_an_encoding_of_a_file_that_changed_does_not_leave(tmp_path: Path, path: str) -> None:
    own = tmp_path / "own.safetensors"
    shutil.copy(path, own)
    clip = least(str(own))
    expected = encode(clip)
    clip.patcher.stream.watcher = lambda layer: os.utime(own, (1, 1)) if layer == 3 else None
    with pytest.raises(FileChanged):
        encode(clip)
    clip.patcher.stream.watcher = None
    assert torch.equal(encode(clip), expected), "it is the same file to the byte"


def test_another_encoder_under_the_name_is_refused(tmp_path: Path, path: str) -> None:
    """Its tokenizer is another one: what was read before is not mixed with what is read now."""
    own = tmp_path / "own.safetensors"
    shutil.copy(path, own)
    clip = least(str(own))
    encode(clip)
    content = bytearray(own.read_bytes())
    content[clip.patcher.stream.residency.source.extents["spiece_model"].end - 1] ^= 1
    own.write_bytes(content)
    os.utime(own, (1, 1))
    with pytest.raises(FileChanged, match="another model"):
        encode(clip)


def test_an_interrupt_leaves_the_encoder_whole(path: str, stock: Any) -> None:
    clip = least(path)
    mm.interrupt_current_processing()
    with pytest.raises(mm.InterruptProcessingException):
        encode(clip)
    assert torch.equal(encode(clip), encode(stock))


@pytest.mark.deep
def test_over_the_slots_of_a_gpu(folder: Path, stock: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of plain memory that checks what a GPU would silently get wrong; q, k and v arrive side by side."""
    devices: list[PlainDevice] = []

    def open_pager(source: Any, layers: Any, vram: Any, budget: int, *_: Any, ledger: Any, **__: Any) -> Pager:
        devices.append(device := PlainDevice())
        host = Host(device, source, layers, RamBudget(64 << 20), ledger, "registered")
        return Pager(layers, budget, vram, SlotsBackend(device, layers, host, ledger), ledger)

    monkeypatch.setattr(residency, "open_pager", open_pager)
    monkeypatch.setattr(segments, "bounds", lambda layers, device: bounds(layers, "cuda"))
    clip = least(path)
    file = comfy.utils.load_torch_file(str(checkpoints.write(LORA, folder)))
    for one in (clip, comfy.sd.load_lora_for_models(None, clip, file, 0.0, 0.5)[1], clip):
        like = stock if one is clip else comfy.sd.load_lora_for_models(None, stock, file, 0.0, 0.5)[1]
        assert torch.equal(encode(one), encode(like))
    mm.unload_all_models()
    for device in devices:
        device.stop()


def test_a_quantised_token_embedding_is_refused(folder: Path, tmp_path: Path) -> None:
    weights = load_file(checkpoints.write("umt5", folder, "fp8_comfy_quant"))
    note = next(value for name, value in weights.items() if name.endswith(".comfy_quant"))
    weights["shared.weight"] = weights["shared.weight"].to(torch.float8_e4m3fn)
    weights |= {"shared.comfy_quant": note.clone(), "shared.weight_scale": torch.ones(())}
    save_file(weights, tmp_path / "quantised.safetensors")
    with pytest.raises(NotStreamable, match="its token embedding is quantised"):
        load_streamed_text_encoder(str(tmp_path / "quantised.safetensors"), [])


def test_its_names_are_those_of_the_model(path: str) -> None:
    clip = least(path)
    assert clip.patcher.stream.keys <= clip.cond_stage_model.state_dict().keys()
    first = clip.patcher.stream.blocks[0]
    assert first.name == "encoder.block.0"
    assert all(paged.key == f"umt5xxl.transformer.{first.name}.{paged.name}" for paged in first.paged)

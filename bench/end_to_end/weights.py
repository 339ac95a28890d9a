"""Random weights of the real shapes, for speed and memory: names and shapes are those of the published files.

They are drawn on the card and written by several threads while the next piece is drawn. What was just written lies in the page
cache, as a user's file does on its second use. Packed numbers are drawn packed: blocks.py.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

import torch

from ... import checkpoints
from ...checkpoints import pictures, spiece, text, vaes, video, wan
from ...checkpoints.weights import Spec, Table
from ...memory import ENCODINGS
from . import blocks, containers
from .bounds import QWEN3, READERS, UMT5, VIDEO_VAES, VISION, WAN
from .bounds import WRITERS as WRITERS_OF_TEXT
from .packing import PLAIN, TYPES, Tensor, as_is, gguf_values, packed, safetensors
from .pictures import IMAGE_VAES, KLEIN, UNETS, Z_IMAGE
from .row_types import TINY, Model
from .storages import GGUF, file_name
from .without_family import TABLE_COLUMNS, TABLE_ROWS

WRITERS = 8
PIECE = 64 << 20  # bytes
VOCABULARY = 256384
GEMMA = "model.layers.0.post_feedforward_layernorm.weight"  # which has its tokenizer in its file, as a UMT5 has
# Of Qwen-Image and of models that no family computes; `without_family.py` has the same sizes as costs.
LTX23 = video.LtxSize(heads=32, layers=48, caption=3840, connector_layers=8, gated=True)
WITHOUT_FAMILY: dict[Model, Callable[[], Table]] = {
    "qwen_image": lambda: pictures.qwen_image(pictures.QwenImageSize(3072, 60, 3584)),
    "hunyuan_video_15": lambda: video.hunyuan_video(video.HunyuanVideoSize(2048, 54, 3584)),
    "ltx23": lambda: video.ltx(LTX23),
    "minimax_h3": lambda: video.minimax(
        video.MiniMaxSize(dim=5376, heads=56, ffn=14336, layers=50, text=5120, steps=TABLE_ROWS, time=TABLE_COLUMNS)
    ),
    "krea2": lambda: pictures.krea(pictures.KreaSize(6144, 28, 2560, 12)),
    "anima": lambda: pictures.anima(pictures.AnimaSize(2048, 28, 1024, 256, 6)),
}
METADATA: dict[Model, dict[str, str]] = {
    "ltx23": video.ltx_metadata(LTX23),
    "ltx_vae": vaes.ltx_video_vae_metadata(vaes.LTX_VIDEO_PUBLISHED),
}
# As large as SigLIP's: the vision towers of two encoders.
TOWER: dict[str, int] = {"vision": 1152, "ffn": 4304, "blocks": 27}


def _reader(model: Model, **others: bool) -> text.LlamaSize:
    return text.LlamaSize(**asdict(READERS[model]), **others)


# Text encoders and VAEs that are around them.
AROUND: dict[Model, Callable[[], Table]] = {
    "wan14_low": lambda: table("wan14"),
    "krea2_te": lambda: table("vl4"),
    "clip_l": lambda: text.clip(768, 3072, 12),
    "clip_g": lambda: text.clip(1280, 5120, 32),
    "qwen25_vl": lambda: text.qwen25_vl(
        text.Qwen25VLSize(
            _reader("qwen25_vl", qk_norm=False, biased=True, own_words=True), vision=1280, ffn=3420, blocks=32
        )
    ),
    "gemma3": lambda: text.gemma3(text.Gemma3Size(_reader("gemma3", gemma=True), **TOWER, side=64)),
    "ltx_projection": lambda: video.ltx_text_projection(LTX23, _reader("gemma3", gemma=True)),
    "h3_te": lambda: text.minimax_h3_te(text.Qwen3VLSize(_reader("h3_te", final_norm=False), **TOWER, places=2304)),
    "ltx_vae": lambda: vaes.ltx_video_vae(vaes.LTX_VIDEO_PUBLISHED),
    "h3_vae": lambda: vaes.minimax_video(vaes.MINIMAX_VIDEO_PUBLISHED),
    "hunyuan15_vae": lambda: vaes.hunyuan_vae(vaes.HUNYUAN_VAE_PUBLISHED),
}
# Of which there is no kind of small files, or one that reads another text: a table, and the metadata.
TINY_TABLES: dict[Model, tuple[Table, dict[str, str]]] = {
    "ltx_vae": (vaes.ltx_video_vae(vaes.LTX_VIDEO), vaes.ltx_video_vae_metadata(vaes.LTX_VIDEO)),
    "hunyuan15_vae": (vaes.hunyuan_vae(vaes.HUNYUAN_VAE), {}),
    "sdxl": (pictures.unet(replace(pictures.UNETS["sdxl"], context=2 * text.CLIP_WIDTH)), {}),
}


def table(model: Model) -> Table:
    """Every tensor of the published file."""
    if model in AROUND:
        return AROUND[model]()
    if model in WAN:
        size = WAN[model]
        return wan.table(wan.WanSize(dim=size.dim, ffn=size.ffn, layers=size.layers, text=4096))
    if model == "t5":
        heads = UMT5.dim // 64
        return text.umt5(text.Umt5Size(UMT5.dim, heads, 64, UMT5.ffn, UMT5.layers, VOCABULARY))
    if model == "qwen3":
        return text.llama(text.LlamaSize(**asdict(QWEN3)))
    if model in WRITERS_OF_TEXT:
        language = text.LlamaSize(**asdict(WRITERS_OF_TEXT[model]))
        return text.qwen3_vl(text.Qwen3VLSize(language, VISION.dim, VISION.ffn, VISION.layers, places=2304))
    if model in KLEIN:
        klein = KLEIN[model]
        return pictures.flux(
            pictures.FluxSize(klein.dim, klein.double, klein.single, klein.text, klein.channels, shared=True)
        )
    if model == "z_image":
        return pictures.z_image(pictures.ZImageSize(Z_IMAGE.dim, Z_IMAGE.layers, Z_IMAGE.text))
    if model in WITHOUT_FAMILY:
        return WITHOUT_FAMILY[model]()
    if model in UNETS:
        net = UNETS[model]
        return pictures.unet(
            pictures.UnetSize(
                net.width, net.mult, net.depth, net.residuals, net.middle, net.text, net.labels, linear=net.linear
            )
        )
    if model in IMAGE_VAES:
        vae = IMAGE_VAES[model]
        return vaes.kl_vae(vaes.KlSize(vae.channels, vae.quantised, vae.folded, vae.width))
    of_videos = VIDEO_VAES[model]
    written = vaes.wan22_vae if of_videos.fold > 1 else vaes.wan21_vae
    return written(vaes.VaeSize(of_videos.encoder, of_videos.decoder))


def tiny_table(model: Model) -> Table:
    """The stand-in of a packed file where there is no card: in rows of whole blocks, and of a Wan with the text's
    published width, so that nothing has to tell it."""
    if model == "t5":
        return text.umt5(text.Umt5Size(width=32))
    if model == "qwen3":
        return text.llama(text.QWEN3)
    if model in WRITERS_OF_TEXT:
        return text.qwen3_vl(text.QWEN3_VL)
    if model in WAN:
        return wan.table(wan.WanSize(text=4096))
    return checkpoints.KINDS[TINY[model]].table


def small_vae(name: str, generator: torch.Generator, *, tiny: bool) -> dict[str, torch.Tensor]:
    """Weights of TAESD, or of Stable Diffusion's VAE, for the latents of SD 1.5: too small to be worth a file. tiny: of a narrow
    VAE; TAESD is as it is."""
    if name == "taesd":
        from comfy.taesd.taesd import TAESD  # noqa: PLC0415 - where files are written there is no ComfyUI

        shapes = {key: value.shape for key, value in TAESD(latent_channels=4).state_dict().items()}
    else:
        size = vaes.KL_VAES["sd_vae"] if tiny else replace(vaes.KL_VAES["sd_vae"], width=128)
        shapes = {key: torch.Size(spec.shape) for key, spec in vaes.kl_vae(size).items()}
    return {key: _vae_tensor(key, shape, generator) for key, shape in shapes.items()}


def _vae_tensor(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Such that what goes through is about as large as what came in."""
    if len(shape) > 1:
        return torch.randn(shape, generator=generator).mul_(math.prod(shape[1:]) ** -0.5)
    if "norm" in name and name.endswith("weight"):
        return torch.ones(shape)
    return torch.full(shape, 1.0 if name == "vae_scale" else 0.0)


def path_of(folder: Path, model: str, storage: str) -> Path:
    return folder / file_name(model, storage)


def write(model: Model, folder: Path, storage: str, device: str) -> dict[str, object]:
    """Make sure the file is there. Returns its path, size and how long it took."""
    path = path_of(folder, model, storage)
    start = time.perf_counter()
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_table(path, table(model), storage, device, METADATA.get(model, {}))
    return {"path": str(path), "bytes": path.stat().st_size, "seconds": time.perf_counter() - start}


def write_tiny(model: Model, folder: Path, storage: str) -> dict[str, object]:
    """The tiny checkpoint that stands in for it where there is no card. What ours alone differs in, fp8, is left out."""
    start = time.perf_counter()
    path = path_of(folder, model, storage)
    if model in TINY_TABLES:
        rows, told = TINY_TABLES[model]
        write_table(path, rows, storage, "cpu", told)
    elif storage in PLAIN:
        path = checkpoints.write(TINY[model], folder)
    elif storage in GGUF:
        write_table(path, tiny_table(model), storage, "cpu")
    else:
        kind = checkpoints.KINDS[TINY[model]]
        write_table(path, kind.table, storage, "cpu", kind.metadata)
    return {"path": str(path), "bytes": path.stat().st_size, "seconds": time.perf_counter() - start}


def write_table(
    path: Path, rows: Table, storage: str, device: str, metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Draw and write every tensor of the table. The file gets its name when it is whole."""
    if storage in GGUF:
        tensors = packed(rows, storage)
        laid = containers.gguf(path, [tensor.entry for tensor in tensors], gguf_values(rows, storage))
    else:
        tensors = safetensors(rows, storage)
        if "shared.weight" in rows:
            tensors.append(as_is("spiece_model", spiece.spiece_tensor()))
        elif GEMMA in rows:
            tensors.append(as_is("spiece_model", spiece.spiece_tensor(**spiece.GEMMA)))
        laid = containers.safetensors([tensor.entry for tensor in tensors], metadata)
    partial = path.with_suffix(".partial")
    handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        _pwrite(handle, memoryview(laid.header), 0)
        _stream(handle, _pieces(tensors, laid.begins, device), device)
    finally:
        os.close(handle)
    partial.replace(path)


def _pieces(tensors: Sequence[Tensor], begins: Sequence[int], device: str) -> Iterator[tuple[int, torch.Tensor]]:
    """Every tensor's bytes, no more than PIECE at a time, and where they go: uint8, on the device."""
    generator = torch.Generator(device).manual_seed(0)
    for (entry, spec, data), begin in zip(tensors, begins, strict=True):
        at, left = begin, math.prod(entry.shape)
        encoding = ENCODINGS[entry.kind]
        most = PIECE // encoding.nbytes * encoding.elements
        if data is not None:
            yield at, data.to(device)
            continue
        while left:
            count = min(left, most)
            piece = _drawn(entry.kind, count, spec, device, generator)
            yield at, piece
            at, left = at + piece.numel(), left - count


def _drawn(kind: str, count: int, spec: Spec, device: str, generator: torch.Generator) -> torch.Tensor:
    if kind not in TYPES:
        return blocks.draw(kind, count, spec.std, device, generator)
    drawn = torch.randn(count, dtype=torch.float32, device=device, generator=generator)
    return drawn.mul_(spec.std).add_(spec.mean).to(TYPES[kind]).view(torch.uint8)


def _stream(handle: int, pieces: Iterator[tuple[int, torch.Tensor]], device: str) -> None:
    """Write the pieces, each where it goes."""
    pinned = device != "cpu"
    rooms = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=pinned) for _ in range(WRITERS)] if pinned else []
    busy: list[Future[None] | None] = [None] * WRITERS
    with ThreadPoolExecutor(WRITERS) as pool:
        for number, (at, piece) in enumerate(pieces):
            slot = number % WRITERS
            earlier = busy[slot]
            if earlier is not None:
                earlier.result()
            room = rooms[slot][: piece.numel()].copy_(piece) if pinned else piece
            busy[slot] = pool.submit(_pwrite, handle, room.numpy().data, at)
        for one in busy:
            if one is not None:
                one.result()


def _pwrite(handle: int, data: memoryview, at: int) -> None:
    while data:  # the system writes at most 2 GB at a time
        done = os.pwrite(handle, data, at)
        data, at = data[done:], at + done

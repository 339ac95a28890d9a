"""The diffusion models that the suite of families loads: kinds, files in every storage, patches, and rooms for their weights.

`cases` pairs them: each two values of two axes meet in some case, and with --thorough each kind has each storage.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import comfy.sd
import family_scenes
import int8_files
import pytest
import torch
from files_in_use import tensors_of
from in_halves import HALF, computing_in, load
from packed_files import packed_file, unpacked
from safetensors.torch import load_file, save_file
from scenes import Scene, Studio, distance, sample
from torch import Tensor

from bed.depth import is_thorough
from fusestream import checkpoints
from fusestream.checkpoints.storage import Scaled
from fusestream.fusion.load.diffusion import load_diffusion_model
from fusestream.kernels_cuda import LEDGER, STANDARD, KernelPolicy
from fusestream.memory import read_header

SINGLE = torch.float32

# The kinds by the name of the family whose code computes them; None: stock's code does. What costs a CPU seconds for a
# picture of one token, because stock fills its prompt up, comes last.
KINDS: dict[str | None, tuple[str, ...]] = {
    "Wan": (
        "wan_t2v", "wan_i2v", "wan_vace", "wan22_5b", "wan_s2v", "wan_flf2v",
        "wan22_i2v", "wan_fun_control", "wan22_fun_control", "wan_animate",
    ),
    "Flux": ("flux1", "chroma", "flux2"),
    "Z-Image": ("z_image",),
    "Qwen-Image": ("qwen_image",),
    "LTX-2": ("ltx23", "ltx2"),
    "MiniMax H3": tuple(checkpoints.video.MINIMAX),
    "Stable Diffusion U-Net": ("sd15", "sdxl", "sd15_wide"),
    None: (
        "sd3", "wan_causal", "hunyuan_video_15", "wan_humo",
    ),
}  # fmt: skip
# Families that leave a product of their blocks to stock, which rounds quantised weights, or what it multiplies with them.
PARTLY: tuple[str, ...] = ()
SLOW = ("flux2", "sd15_wide", "wan_animate", "ltx2", *checkpoints.video.MINIMAX)
FUSED = {kind: family for family, kinds in KINDS.items() if family for kind in kinds}
SOME = tuple(kinds[0] for family, kinds in KINDS.items() if family)  # a kind of each family

STORAGES = ("fp16", "bf16", "fp32", "fp8_e4m3fn", "fp8 scaled", *(f"int8 {kind}" for kind in int8_files.KINDS))
PACKED = ("Q8_0", "Q4_0")
# Weights of these are not rounded by a patch: their numbers are the file's, and the patch is added to them.
QUANTISED = (*(storage for storage in STORAGES if storage.startswith(("fp8 ", "int8"))), *PACKED)
# None; added by stock's functions; plain LoRA in one pass, as on a card.
PATCHES = ("no patch", "patches", "patches in one pass")
# The narrowest window; a window of half of the blocks; all blocks paged once; stock's own memory management.
ROOMS = ("least", "half", "all", "stock's")


class Case(NamedTuple):
    kind: str
    storage: str
    patch: str = "no patch"
    room: str = "least"

    def __str__(self) -> str:
        return ", ".join(self)


def possible(storage: str, patch: str, room: str) -> bool:
    """GGUF files load through our stream alone, and so do patches in one pass."""
    return room != "stock's" or (storage not in PACKED and patch != "patches in one pass")


def cases() -> list[Case]:
    """Each pair of family, storage, patch and room; and the other ways in which files of Wan have fp8."""
    found, turns = [], {family: itertools.cycle(quick(kinds)) for family, kinds in KINDS.items()}
    storages, rooms = (*STORAGES, *PACKED), ROOMS
    if not is_thorough():  # the others of these are like one that stays
        storages = tuple(one for one in storages if one not in ("bf16", "int8 rows", "Q4_0"))
        rooms = tuple(one for one in rooms if one != "half")
    axes: tuple[Sequence[Any], ...] = (tuple(KINDS), storages, PATCHES, rooms)
    for family, storage, patch, room in pairwise(axes, lambda one: possible(*one[1:])):
        found.append(Case(next(turns[family]), storage, patch, room))
    if is_thorough():
        have = {(case.kind, case.storage) for case in found}
        every = itertools.product(itertools.chain(*KINDS.values()), storages)
        found += [Case(kind, storage) for kind, storage in every if (kind, storage) not in have]
    wans = [storage for storage in checkpoints.KINDS["wan_t2v"].storages if storage not in STORAGES]
    rooms = ("least", "all") if is_thorough() else ("least",)
    found += [Case("wan_t2v", *rest) for rest in itertools.product(wans, PATCHES[:2], rooms)]
    return [case for case in found if is_stored(case.kind, case.storage) and is_patched(case)]


def quick(kinds: Sequence[str]) -> Sequence[str]:
    return kinds if is_thorough() else [kind for kind in kinds if kind not in SLOW] or kinds[:1]


def is_stored(kind: str, storage: str) -> bool:
    """Whether stock reads such a file: it takes encoders of sound and faces of these widths in plain numbers alone."""
    return kind not in ("wan_animate", "wan_humo") or storage not in QUANTISED or storage in PACKED


def is_patched(case: Case) -> bool:
    """Whether stock rounds such a file's patched weights: not to 4 bits those that the tiny U-Net has narrower than their
    groups."""
    return case.kind != "sdxl" or case.storage != "int8 convrot_w4a4" or case.patch == "no patch"


def pairwise(axes: Sequence[Sequence[Any]], allowed: Any) -> list[tuple[Any, ...]]:
    """Combinations of the axes' values in which each pair of values that is allowed together occurs: the greedy ones, so that
    later combinations have what earlier ones left."""
    every = [one for one in itertools.product(*axes) if allowed(one)]

    def pairs(one: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(one), 2))

    left, found = set[Any]().union(*map(pairs, every)), []
    while left:
        best = max(every, key=lambda one: len(pairs(one) & left))
        found.append(best)
        left -= pairs(best)
    return found


# ---------------------------------------------------------------------------------------------------------------- files


class Files(NamedTuple):
    """A file, the file that stock reads instead of it, and one of the numbers that its weights are."""

    ours: Path
    stocks: Path
    numbers: Path


class Shelf:
    """Files of all kinds in a folder, each written once, and scenes for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def studio(self) -> Studio:
        return Studio(self.folder)

    @functools.cache  # noqa: B019 - the shelf lives as long as its file of tests
    def scene(self, kind: str) -> Scene:
        return self.studio.scene(kind) if kind in checkpoints.wan.SIZES else family_scenes.inputs(kind)

    @functools.cache  # noqa: B019
    def files(self, kind: str, storage: str) -> Files:
        if storage in checkpoints.KINDS[kind].storages:
            path = checkpoints.write(kind, self.folder, storage)
            return Files(path, path, path if storage in STORAGES else _numbers(path))
        halves = checkpoints.write(kind, self.folder, "fp16")
        if storage.startswith("int8"):
            path, numbers = int8_files.write(halves, self.folder, storage.removeprefix("int8 "))
            assert "I8" in {extent.dtype for extent in read_header(path).extents.values()}, (
                "name the blocks in int8_files.py"
            )
            return Files(path, path, _of_linears_in_halves(numbers))
        if storage == "fp8 scaled":
            return self._scaled(kind)
        metadata = dict(read_header(halves).metadata)
        path = packed_file(self.folder / f"{kind}_{storage}.gguf", load_file(halves), storage, metadata=metadata)
        numbers = path.with_suffix(".safetensors")
        save_file(unpacked(path), numbers, metadata)
        return Files(path, numbers, numbers)

    def _scaled(self, kind: str) -> Files:
        """Matrices of blocks in fp8 with a scale each, as new files have them."""
        entry, numbers = checkpoints.KINDS[kind], load_file(checkpoints.write(kind, self.folder, "fp32"))
        chosen = {
            name.removesuffix(".weight") for name, tensor in numbers.items() if int8_files.is_a_blocks(name, tensor)
        }
        stored = Scaled(chosen=chosen.__contains__, rest=torch.float32).store(entry.table, numbers)
        path = self.folder / f"{kind}_scaled.safetensors"
        save_file({name: tensor.clone() for name, tensor in stored.tensors.items()}, path, dict(entry.metadata))
        return Files(path, path, _numbers(path))


def _numbers(path: Path) -> Path:
    """The file of the numbers that scaled fp8 weights are."""
    tensors, header = load_file(path), read_header(path)
    scales = {name: scale for name, scale in tensors.items() if name.endswith((".scale_weight", ".weight_scale"))}
    for name, scale in scales.items():
        weight = f"{name.rpartition('.')[0]}.weight"
        tensors[weight] = tensors[weight].float() * scale
    notes = ("scaled_fp8", *scales)
    kept = {
        name: tensor for name, tensor in tensors.items() if not name.endswith((".scale_input", ".comfy_quant", *notes))
    }
    found = path.with_stem(f"{path.stem}_numbers")
    save_file(kept, found, {key: text for key, text in header.metadata.items() if key != "_quantization_metadata"})
    return _of_linears_in_halves(found)


def _of_linears_in_halves(path: Path) -> Path:
    """The file again, with every Linear's numbers as halves have them: of a quantised file stock keeps each Linear in the type
    that it computes in, also those beside the blocks that a model declares as fp32 (`comfy.ops.mixed_precision_ops`)."""
    tensors, metadata = tensors_of(path), dict(read_header(path).metadata)
    layers = {name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.ndim == 2}
    for name, tensor in tensors.items():
        if name.endswith((".weight", ".bias")) and name.rpartition(".")[0] in layers:
            tensors[name] = tensor.half().to(tensor.dtype)
    save_file(tensors, path, metadata)
    return path


# --------------------------------------------------------------------------------------------------------------- models


def ours(path: Path, policy: KernelPolicy = STANDARD, dtype: torch.dtype = HALF, room: str = "least") -> Any:
    if room == "stock's":
        with pytest.MonkeyPatch.context() as patch:
            computing_in(patch, dtype)
            patch.setattr(comfy.sd, "load_diffusion_model", functools.partial(_stocks, dtype=dtype))
            return load_diffusion_model(str(path), policy, 0.0)
    model = load(path, policy, dtype)
    residency = model.stream.residency
    residency.ceiling = {"least": residency.least, "half": (residency.least + residency.whole) // 2, "all": None}[room]
    return model


_load = comfy.sd.load_diffusion_model


def _stocks(path: str, dtype: torch.dtype) -> Any:
    return _load(path, model_options={"dtype": dtype})


def stocks(path: Path, dtype: torch.dtype = HALF) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        computing_in(patch, dtype)
        return _stocks(str(path), dtype)


def patched(model: Any, patch: str) -> Any:
    """With LoRAs for every sixth matrix or convolution, one of Kronecker's, and a difference of a norm."""
    if patch == "no patch":
        return model
    file = lora_for({key: value.shape for key, value in model.model_state_dict().items() if key.endswith(".weight")})
    found, _ = comfy.sd.load_lora_for_models(model, None, file, 0.8, 0.0)
    assert len(found.patches) == len({name.partition(".lo")[0].removesuffix(".diff") for name in file}) > 4
    return found


def lora_for(shapes: dict[str, Any]) -> dict[str, Tensor]:
    found, generator = {}, torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    wide = [key for key, shape in sorted(shapes.items()) if len(shape) > 1 and key.startswith("diffusion_model.")]
    for key in wide[::6]:
        name, (rows, columns, *taps) = key.removesuffix(".weight"), shapes[key]
        down = normal(2, columns, *taps)
        found[f"{name}.lora_up.weight"] = normal(rows, 2, *(1 for _ in taps)) * 0.1
        found[f"{name}.lora_down.weight"] = down * down[0].numel() ** -0.5
    fits = (key for key in wide[1::6] if len(shapes[key]) == 2 and not any(size % 4 for size in shapes[key]))
    if (key := next(fits, None)) is not None:
        name, (rows, columns) = key.removesuffix(".weight"), shapes[key]
        found[f"{name}.lokr_w1"] = normal(4, 4) * 0.3
        found[f"{name}.lokr_w2"] = normal(rows // 4, columns // 4) * columns**-0.5
    norm = next((key for key, shape in sorted(shapes.items()) if len(shape) == 1 and "diffusion_model" in key), None)
    if norm is not None:
        found[f"{norm.removesuffix('.weight')}.diff"] = normal(*shapes[norm]) * 0.1
    return found


# -------------------------------------------------------------------------------------------------------------- latents


def latents(model: Any, scene: Scene) -> list[Tensor]:
    """A tensor, or one of a video and one of its sound."""
    return family_scenes.parts(sample(model, scene))


def same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(some, others, strict=True))


def far(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest relative distance of two parts."""
    return max(distance(one.double(), other.double()) for one, other in zip(some, others, strict=True))


def handed_back() -> set[str]:
    """Why blocks of a fused family were stock's."""
    return {refusal.reason for refusal in LEDGER.refusals if refusal.op.endswith(" block")}

"""A user's own checkpoints in place of random weights: which file of a folder is which of the bench's models.

Files are told by their tensors, not by their names; of several that would do, the one with a published name is taken, then the
first by name. No tensor is read, and no file is written or removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .bounds import WAN
from .rows import TITLES, Model, Row

PUBLISHED: dict[Model, tuple[str, ...]] = {
    "wan13": ("wan2.1_t2v_1.3B",),
    "wan14": ("wan2.1_t2v_14B",),
    "t5": ("umt5_xxl",),
    "vae": ("wan_2.1_vae",),
    # none of these is looked for
    **dict.fromkeys(
        ("qwen3", "klein4", "klein9", "z_image", "qwen_image", "sd15", "sdxl", "flux2_vae", "flux_vae", "vl2", "vl4"),
        (),
    ),
}
STORAGES = {"F16": "fp16", "BF16": "bf16", "F32": "fp32", "F8_E4M3": "fp8_e4m3fn"}
UMT5_TABLE = (256384, 4096)
WAN_MODEL, T5_ENCODER, WAN_VAE = "Wan diffusion model", "T5 or UMT5 text encoder", "Wan VAE"  # as families are told
LATENT_CHANNELS = 16
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Found:
    """A checkpoint that some rows can use."""

    path: Path
    model: Model
    storage: str

    @property
    def published(self) -> bool:
        return any(self.path.name.startswith(name) for name in PUBLISHED[self.model])


def find(folder: Path, say: Callable[[str], None]) -> list[Found]:
    """Every file under the folder that is one of the bench's models. What is not is said, with the reason."""
    from ...fusion.families import family_of  # noqa: PLC0415 - imports torch, which a bench without --real does not need
    from ...memory import BadFile, read_header  # noqa: PLC0415

    if not folder.is_dir():
        raise NotADirectoryError(f"--real {folder} is no folder")
    found = []
    for path in sorted(folder.rglob("*.safetensors")):
        try:
            header = read_header(path)
        except (BadFile, OSError) as error:
            say(f"not used: {error}")
            continue
        shapes = {name: extent.shape for name, extent in header.extents.items()}
        family = family_of(header)
        model = None if family is None else model_of(family.words, shapes)
        sizes: Counter[str] = Counter()
        for extent in header.extents.values():
            sizes[extent.dtype] += extent.nbytes
        storage = STORAGES.get(sizes.most_common(1)[0][0]) if sizes else None
        if model is None or storage is None:
            kind = "what it is" if family is None else f"a {family.words} of this sort"
            say(f"not used: {path.name}: the bench has no rows for {kind}")
            continue
        found.append(Found(path, model, storage))
    return sorted(found, key=lambda one: (not one.published, one.path.name))


def model_of(kind: str, shapes: Shapes) -> Model | None:
    """Which of the models it is whose rows the bench has: text to video, and the sizes that its bounds know."""

    def shape(name: str) -> tuple[int, ...]:
        return shapes.get(name) or shapes.get(f"model.diffusion_model.{name}") or ()

    if kind == WAN_MODEL and shape("patch_embedding.weight")[1:2] == (
        LATENT_CHANNELS,
    ):  # more: a picture is needed too
        wide = shape("blocks.0.self_attn.q.weight")[:1]
        special = any("vace" in name or "img_emb" in name for name in shapes)
        models: Iterable[Model] = ("wan13", "wan14")
        return next((model for model in models if wide == (WAN[model].dim,) and not special), None)
    if kind == T5_ENCODER and shape("shared.weight") == UMT5_TABLE:
        return "t5"
    if kind == WAN_VAE and shape("conv2.weight")[:1] == (LATENT_CHANNELS,):
        return "vae"
    return None


def chosen(found: Sequence[Found], model: Model, storage: str) -> Found | None:
    """The file for a row. A row of fp16 says nothing about storage in its name: any will do, fp16 first."""
    own = [one for one in found if one.model == model]
    exact = [one for one in own if one.storage == storage]
    return next(iter([*exact, *(own if storage == "fp16" else [])]), None)


def rows_with_files(
    rows: Sequence[Row], found: Sequence[Found], say: Callable[[str], None]
) -> tuple[list[Row], dict[tuple[Model, str], Path]]:
    """The rows all of whose models are there, and the models' paths. A row is never half real: the others are left out."""
    paths = {file: one.path for row in rows for file in row.files if (one := chosen(found, *file))}
    missing = dict.fromkeys(file for row in rows for file in row.files if file not in paths)
    for model, storage in missing:
        count = sum((model, storage) in row.files for row in rows)
        say(f"no {TITLES[model]} in {storage}: {count} rows are left out")
    return [row for row in rows if all(file in paths for file in row.files)], paths

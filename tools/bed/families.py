"""The tables of supported models in README, in docs/models.md and on the nodes' help pages: `python3 dev.py docs`.

What is fused is told by the families. What streams besides, and is held to it by tests, is told by the tiny true files in
`checkpoints` that no family knows; docs/models.md has both, and README their names. `covers.py` says it for the help pages in other
languages.
"""

from __future__ import annotations

import re
from pathlib import Path

from . import pack
from .covers import COVERS, HEADS
from .paths import ROOT

pack.load()

from fusestream import checkpoints  # noqa: E402 - the line above makes it importable
from fusestream.fusion.base.family import Role  # noqa: E402
from fusestream.fusion.families import FAMILIES, family_of  # noqa: E402
from fusestream.memory import Extent, WeightFile  # noqa: E402

BLOCK = re.compile(r"(<!-- families:begin -->\n).*?(<!-- families:end -->)", re.DOTALL)
README = ROOT / "README.md"
MODELS = ROOT / "docs" / "models.md"
HELP = ROOT / "nodes" / "web" / "docs"
LOADERS = {
    "FuseStreamDiffusionModelLoader": (Role.DIFFUSION,),
    "FuseStreamTextEncoderLoader": (Role.TEXT,),
    "FuseStreamVAELoader": (Role.VAE,),
}
PAGES = {
    README: tuple(Role),
    MODELS: tuple(Role),
    **{HELP / f"{node}.md": roles for node, roles in LOADERS.items()},
    **{HELP / node / f"{language}.md": roles for node, roles in LOADERS.items() for language in HEADS},
}

FOLDERS = {"diffusion_models": Role.DIFFUSION, "text_encoders": Role.TEXT, "vae": Role.VAE}
# What the published models are called of which there is a tiny file; one that is not here goes by its file's name.
CALLED = {
    "ltx2": "LTX-2",
    "ltx23": "LTX-2.3",
    "flux1": "Flux.1",
    "flux2": "Flux.2",
    "chroma": "Chroma",
    "z_image": "Z-Image",
    "qwen_image": "Qwen-Image",
    "krea2": "Krea 2",
    "anima": "Anima",
    "hunyuan_video_15": "HunyuanVideo 1.5",
    "minimax_h3": "MiniMax H3",
    "minimax_h3_pruned": "MiniMax H3",
    "sd3": "Stable Diffusion 3.5",
    "sd15": "Stable Diffusion 1.5",
    "sd15_wide": "Stable Diffusion 1.5",
    "sdxl": "SDXL",
    "qwen3": "Qwen3 4B",
    "gemma2": "Gemma 2 2B",
    "gemma3_4b": "Gemma 3 4B",
    "gemma3": "Gemma 3 12B",
    "qwen25": "Qwen2.5 3B",
    "qwen25_vl": "Qwen2.5-VL 7B",
    "llama3": "Llama 3.1 8B",
    "mistral3": "Mistral Small 3 24B",
    "ministral3": "Ministral 3 3B",
    "minimax_h3_te": "MiniMax H3's Qwen3-VL 32B",
    "clip_l": "CLIP-L",
    "sd_vae": "Stable Diffusion's",
    "flux_vae": "Flux'",
    "flux2_vae": "Flux.2's",
}
BESIDE = ("ltx23_text_projection",)  # no models, but what goes with one
SMALL = "small files"  # of random weights and true names, on the CPU
# By name and role: what ran on a card beside stock, in the bench or, where it is told by its blocks, in `tests/gpu`.
ON_A_CARD = {
    ("Wan", Role.DIFFUSION): "text to video on an H200",
    ("T5 or UMT5", Role.TEXT): "UMT5-XXL on an H200",
    ("Wan", Role.VAE): "Wan 2.1's on an H200",
    ("Flux", Role.DIFFUSION): "klein 4B on an H200",
    ("Z-Image", Role.DIFFUSION): "Z-Image on an H200",
    ("Qwen3", Role.TEXT): "the 4B on an H200",
    ("Stable Diffusion or Flux", Role.VAE): "Flux.2's on an H200",
}
UNKNOWN_ON_A_CARD = {Role.DIFFUSION: "their published sizes, but SD 3.5's, on an H100"}
STREAMS = {Role.DIFFUSION: "yes", Role.TEXT: "yes", Role.VAE: "no, it is small"}
# What is fused of a file that no family knows: attention has a hook of stock's.
UNKNOWN = {
    Role.DIFFUSION: "products of INT8 and W4A4 files; attention in fp16; all products without BF16; RoPE before CUDA 13",
    Role.TEXT: "no",
    Role.VAE: "no",
}


MOST_NAMED = 2  # README's table is no wider than a screen


def in_short() -> str:
    """README's table: the names of what is fused, and some of what streams besides."""
    lines = ["| | Fused | Streams, not fused |", "| --- | --- | --- |"]
    for role, streams in STREAMS.items():
        fused = ", ".join(family.name for family in FAMILIES if family.role is role)
        named = ", ".join(called(role)[:MOST_NAMED])
        others = " and ".join(filter(None, (named, "every other"))) if streams == "yes" else "none: a VAE is small"
        lines.append(f"| {role.words[:1].upper()}{role.words[1:]}s | {fused} | {others} |")
    return "\n".join(lines)


def everything() -> str:
    """The table of docs/models.md: what streams, what is fused, what was tested."""
    lines = ["| Model | Streams | Fused | Tested |", "| --- | --- | --- | --- |"]
    for role, streams in STREAMS.items():
        for family in FAMILIES:
            if family.role is role:
                on_a_card = ON_A_CARD.get((family.name, role))
                tested = f"{on_a_card}; {SMALL}" if on_a_card else SMALL
                lines.append(f"| {family.words} | {streams} | {family.covers} | {tested} |")
        if names := ", ".join(called(role)):
            tested = "; ".join(filter(None, (UNKNOWN_ON_A_CARD.get(role), SMALL)))
            lines.append(f"| {names} ({role.words}s) | {streams} | {UNKNOWN[role]} | {tested} |")
    lines.append(
        "| every other that ComfyUI loads from one `.safetensors` file, or GGUF files of it | as above | as above | no |"
    )
    return "\n".join(lines)


def called(role: Role) -> list[str]:
    """What people call the models of this role that no family knows, and of which there are tiny files."""
    return list(dict.fromkeys(CALLED.get(kind, kind) for kind in stocks(role)))


def stocks(role: Role) -> list[str]:
    """The kinds of tiny files of this role that no family knows."""
    found = []
    for name, kind in checkpoints.KINDS.items():
        if FOLDERS.get(kind.folder) is role and name not in BESIDE:
            extents = {key: Extent(key, "F16", spec.shape, 0, 0) for key, spec in kind.table.items()}
            if family_of(WeightFile(Path(name), 0, extents, kind.metadata)) is None:
                found.append(name)
    return found


def table(roles: tuple[Role, ...], language: str = "en") -> str:
    """A help page's: a row for each family of these roles. One that nobody has translated yet is in English."""
    family_head, covers_head = HEADS.get(language, ("Family", "Computed by FuseStream"))
    rows = [
        f"| {family.name} | {COVERS.get(family.covers, {}).get(language, family.covers)} |"
        for role in roles
        for family in FAMILIES
        if family.role is role
    ]
    return "\n".join([f"| {family_head} | {covers_head} |", "| --- | --- |", *rows])


def rendered(page: Path) -> str:
    """The page with its table."""
    text = page.read_text(encoding="utf-8")
    whole = {README: in_short, MODELS: everything}.get(page)
    shown = whole() if whole else table(PAGES[page], page.stem)
    return BLOCK.sub(lambda found: f"{found[1]}\n{shown}\n\n{found[2]}", text)


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()

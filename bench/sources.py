"""Which sources a measurement rests on, as a hash: a row that was measured with others is stale.

Standard library only, and nothing of the package: tests/gpu/run.py, whose record goes by the same hashes, reads this file by its
path.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = (".py", ".cu", ".cuh")
KERNELS, PAGER = ("gpu", "kernels_cuda"), ("gpu", "memory")
MODELS = ("gpu", "kernels_cuda", "memory", "fusion")
FAMILIES = "fusion/families"
NETWORKS = "fusion/networks"  # no diffusion models: those know nothing of them
# The family of each of the bench's models: of the others' sources it knows nothing. Some models have none.
FAMILY = {
    "wan13": "wan", "wan14": "wan", "vae": "wan", "vae22": "wan", "t5": "t5", "qwen3": "language_models", "klein4": "flux2",
    "klein9": "flux2",
    "z_image": "z_image", "sd15": "unet", "sdxl": "unet",
    "flux2_vae": "image_vae", "flux_vae": "image_vae", "sdxl_vae": "image_vae",
    "vl2": "qwen3_vl", "vl4": "qwen3_vl",
    "wan14_low": "wan", "qwen25_vl": "language_models", "gemma3": "language_models",
    "clip_l": "clip", "clip_g": "clip", "krea2_te": "qwen3_vl", "h3_te": "qwen3_vl", "qwen_image": "qwen_image", "ltx23": "ltx2",
    **dict.fromkeys(("ltx_projection", "ltx_vae", "h3_vae", "hunyuan15_vae"), ""),
    **dict.fromkeys(("hunyuan_video_15", "minimax_h3", "krea2", "anima"), ""),
}  # fmt: skip
ALSO = {"live": {"image_vae"}}  # by the work: TAESD's or the VAE's, which is no model of the row's


# A literal, whose slashes begin no comment; or a comment.
CUDA = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def digest(folder: str, root: Path = ROOT, without: Sequence[str] = ()) -> str | None:
    """Of a folder's code, not of its prose or its build products; None where there is none. without: folders below `root`."""
    files = sorted(path for path in (root / folder).rglob("*") if path.suffix in CODE)
    names = {path.relative_to(root).as_posix(): path for path in files}
    kept = {name: path for name, path in names.items() if not name.startswith(tuple(f"{one}/" for one in without))}
    if not kept:
        return None
    found = hashlib.sha256()
    for name, path in kept.items():
        found.update(name.encode() + b"\0" + code_of(path).encode() + b"\0")
    return found.hexdigest()[:16]


def code_of(path: Path) -> str:
    """The code of a file: its text without comments, docstrings, empty lines and spaces at a line's end. A measurement does not
    grow old because somebody explains the code."""
    stat = path.stat()
    return _code(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4096)
def _code(path: Path, _changed_ns: int, _size: int) -> str:
    text, is_python = path.read_text(encoding="utf-8"), path.suffix == ".py"
    kept = _without_prose(text) if is_python else CUDA.sub(lambda found: "" if found[0][0] == "/" else found[0], text)
    return "\n".join(line.rstrip() for line in kept.splitlines() if line.strip())


def _without_prose(text: str) -> str:
    """Python without its comments and docstrings. Nothing else moves, so that every version of Python finds the same."""
    lines = text.splitlines(keepends=True)
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column] + "\n"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            assert first.end_lineno is not None
            for row in range(first.lineno - 1, first.end_lineno):
                lines[row] = "\n"
    return "".join(lines)


def of_folders(folders: Iterable[str], root: Path = ROOT, without: Sequence[str] = ()) -> str:
    """All of them in one."""
    found = ((folder, digest(folder, root, without)) for folder in folders)
    return hashlib.sha256(repr([pair for pair in found if pair[1]]).encode()).hexdigest()[:16]


def of_models(models: Iterable[str], work: str = "", root: Path = ROOT) -> str:
    """The sources that a row of whole models rests on: everything but the families and networks that it has nothing of."""
    own = {FAMILY[model] for model in models} | ALSO.get(work, set())
    others = [path.name for path in sorted((root / FAMILIES).iterdir()) if path.is_dir() and path.name not in own]
    return of_folders(MODELS, root, [NETWORKS, *(f"{FAMILIES}/{name}" for name in others)])

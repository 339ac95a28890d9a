"""The package itself: the same bytes every time, whole files only, and no ComfyUI needed to write
them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import torch

from fusestream import checkpoints
from fusestream.checkpoints import container, storage

write = inspect.unwrap(checkpoints.write)  # not a copy of what another test has drawn
PACKAGE = Path(checkpoints.__file__).parent
FILES = [
    *((kind, "fp16") for kind in checkpoints.KINDS),
    *((kind, name) for kind in ("wan_t2v", "umt5") for name in checkpoints.KINDS[kind].storages if name != "fp16"),
]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "storage"), FILES)
def test_same_bytes_twice_and_readable(tmp_path: Path, kind: str, storage: str) -> None:
    path = write(kind, tmp_path / "one", storage)
    assert digest(path) == digest(write(kind, tmp_path / "two", storage))
    assert [entry.name for entry in path.parent.iterdir()] == [f"{kind}_{storage}.safetensors"]
    with safetensors.safe_open(str(path), "pt") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == container.shapes(path)  # noqa: SIM118
        assert all(file.get_tensor(name).float().isfinite().all() for name in file.keys())  # noqa: SIM118
        assert set(file.metadata() or {}) <= {"config", "_quantization_metadata"}


@pytest.mark.deep
def test_same_bytes_in_another_process(tmp_path: Path) -> None:
    chosen = [("umt5", "fp8_scaled"), ("wan_t2v", "fp8_metadata"), ("lora_kohya", "fp16")]
    code = "import sys, checkpoints; [checkpoints.write(a, sys.argv[1], b) for a, b in " + repr(chosen) + "]"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], env=environment, check=True)
    for kind, name in chosen:
        here = write(kind, tmp_path / "here", name)
        assert digest(here) == digest(tmp_path / "there" / here.name)


def test_seed_makes_another_file_and_storage_the_same_weights(tmp_path: Path) -> None:
    name = "blocks.0.ffn.0.weight"
    tensors = []
    for seed, kept in ((0, "fp32"), (1, "fp32"), (0, "bf16")):
        with safetensors.safe_open(str(write("wan_t2v", tmp_path, kept, seed)), "pt") as file:
            tensors.append(file.get_tensor(name))
    assert not torch.equal(tensors[0], tensors[1])
    assert torch.equal(tensors[0].bfloat16(), tensors[2])
    assert abs(tensors[0].std().item() * 16 - 1) < 0.02  # unit gain: one over the square root of 256


def test_kinds_of_a_family_share_their_weights(tmp_path: Path) -> None:
    """So a VACE without its side branch, or an I2V's text half, is the T2V."""
    files = [safetensors.safe_open(str(write(kind, tmp_path)), "pt") for kind in ("wan_t2v", "wan_vace")]
    for name in checkpoints.KINDS["wan_t2v"].table:
        assert torch.equal(files[0].get_tensor(name), files[1].get_tensor(name)), name


def test_keeps_a_file_that_is_there(tmp_path: Path) -> None:
    path = write("lora_ab", tmp_path)
    path.write_bytes(b"mine")
    assert write("lora_ab", tmp_path).read_bytes() == b"mine"


def test_leaves_nothing_behind_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="full"):
        write("lora_ab", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint kind 'wan_t3v'; there are wan_t2v, "):
        write("wan_t3v", tmp_path)
    with pytest.raises(ValueError, match="wan_vae is not stored as 'fp8_scaled', only as fp16, bf16, fp32, fp8_e4m3fn"):
        write("wan_vae", tmp_path, "fp8_scaled")


def test_quantising_keeps_the_largest_value_and_a_sixteenth_of_each(tmp_path: Path) -> None:
    weight = torch.linspace(-3.0, 5.0, 1001)
    data, scale = storage.quantise(weight)
    back = data.float() * scale
    assert back.max() == weight.max()
    assert ((back - weight).abs() <= weight.abs() / 16 + scale * 2**-10).all()  # half a step of three mantissa bits


def test_imports_no_comfyui() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                assert not any(name.split(".")[0].startswith(("comfy", "nodes")) for name in names), path.name

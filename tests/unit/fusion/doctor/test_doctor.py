"""The doctor: every probe answers, none raises, and nothing personal is in the report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusestream.fusion import doctor
from fusestream.fusion.doctor import bus, card, cli, comfyui, families, findings, fit, machine, model_file
from fusestream.memory import rates
from fusestream.nodes.doctor import Doctor, largest_model

ROOT = Path(__file__).resolve().parents[4]
COMFYUI = Path(os.environ["COMFYUI_PATH"])


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus, "LAYER_BYTES", 1 << 16)


def test_every_probe_answers() -> None:
    found = doctor.examine(COMFYUI)
    assert [one.title for one in found][:4] == ["Pack", "System", "RAM", "torch"]
    failed = [one for one in found if any("could not be found out" in line for line in one.lines)]
    assert {one.title for one in failed} <= {"Driver"}, failed  # without a card there is no driver to ask
    text = doctor.as_text(found)
    assert "ComfyUI 0.30" in text and "layers arrived as they are in the file" in text and "What to do" in text


def test_no_probe_can_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything below the probes broken at once."""

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is on fire in /home/somebody/secret")

    for name in ("cuda", "version", "backends"):
        monkeypatch.setattr(torch, name, property(broken))
    for module, name in (
        (machine, "measure_ram"),
        (card.archive, "read_manifest"),
        (card, "driver"),
        (bus, "write_layers"),
    ):
        monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr(Path, "read_text", broken)
    monkeypatch.setattr(Path, "iterdir", broken)
    monkeypatch.setattr(card.shutil, "which", broken)
    found = doctor.examine(COMFYUI, [COMFYUI])
    assert sum("could not be found out" in line for one in found for line in one.lines) >= 8
    assert "somebody" not in doctor.as_text(found)


def test_what_was_found_before_a_failure_is_kept() -> None:
    def probe() -> Any:
        yield "first"
        raise ValueError

    found = findings.ask("title", probe)
    assert found.lines == ("first", "! could not be found out: ValueError: no further words")
    assert findings.ask("title", list).lines == ("nothing to tell",)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("in /home/ann/ComfyUI", "in ~/ComfyUI"),
        ("in /home/annabel/x", "in /home/~/x"),
        ("C:\\Users\\Ann\\AppData and c:/users/ann/AppData", "~\\AppData and ~/AppData"),
        ("at /mnt/c/Users/ann/models", "at /mnt/c/Users/~/models"),
        ("on /data/ann/models", "on /data/~/models"),
        ("annotations are kept: bananas", "annotations are kept: bananas"),
    ],
)
def test_nobody_is_named(text: str, clean: str) -> None:
    home = "C:\\Users\\Ann" if "\\" in text else "/home/ann"
    assert findings.redacted(text, home, "ann") == clean


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (
            "[Errno 2] No such file: '/data/my films/of ann/w.safetensors'",
            "[Errno 2] No such file: '.../w.safetensors'",
        ),
        ("cannot read /srv/secret/w.safetensors (cut)", "cannot read .../w.safetensors (cut)"),
        ("D:\\films\\secret: full", "...: full"),
        ('in "\\\\nas\\my share\\x.json"', 'in ".../x.json"'),
        ("at /mnt/secret", "at ..."),
        ("12.1 GB/s, stock / ours, and/or, c:/", "12.1 GB/s, stock / ours, and/or, c:/"),
    ],
)
def test_no_folder_is_named(text: str, clean: str) -> None:
    assert findings.without_folders(text) == clean
    assert clean in doctor.as_text([findings.Finding("Disk", (text,), 0.0)])


def test_where_the_pack_lies_is_not_told() -> None:
    (line,) = machine.pack()
    assert line.startswith("FuseStream 0.") and not any(part in line for part in ROOT.parts if len(part) > 1)


@pytest.mark.parametrize(
    ("name", "capability", "words"),
    [
        ("NVIDIA GeForce RTX 2060 SUPER", (7, 5), "code for sm_75, instruction class sm_75, with tensor cores"),
        ("NVIDIA GeForce GTX 1660 Ti", (7, 5), "no tensor cores"),
        ("NVIDIA GeForce GTX 980", (5, 2), "has no code here"),
        ("NVIDIA TITAN V", (7, 0), "6.1 (GTX 10), 7.5 (RTX 20) and newer have"),
        ("NVIDIA GeForce GTX 1080", (6, 1), "quality auto computes in bytes, as 'Fastest'"),
        ("NVIDIA GeForce RTX 3060 Ti", (8, 6), "code for sm_80, instruction class sm_80"),
        ("NVIDIA H200", (9, 0), "code for sm_90, instruction class sm_80"),
        ("something newer", (13, 0), "code for compute_80"),
    ],
)
def test_the_class_of_a_card(name: str, capability: tuple[int, int], words: str) -> None:
    text = card.card_class(name, capability)
    assert words in text
    assert text.startswith(findings.ADVICE) == ("16" in name or "has no code" in text)


def test_the_families_are_told() -> None:
    lines = list(families.known())
    (wan,) = (line for line in lines if line.startswith("Wan diffusion model: "))
    assert {"attention", "linear", "linear_int8", "norm_modulate"} <= set(wan.partition(": ")[2].split(", "))
    assert "ComfyUI computes it" in lines[-1] and not any(line.startswith(findings.ADVICE) for line in lines)


def test_a_family_that_does_not_import_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fusestream.fusion.families", None)
    assert "could not be found out: ModuleNotFoundError" in findings.ask("Families", families.known).lines[0]


def test_the_archive_of_the_tree_is_told() -> None:
    lines = list(card.prebuilt())
    assert re.search(r"built from [0-9a-f]{16}", lines[0]) and "sm_75" in lines[1]


def test_a_damaged_layer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus.torch, "equal", lambda *_: False)
    assert "!! 4 of 4 layers arrived damaged" in list(bus.pager())


def test_rates_of_the_doctors_file_are_forgotten() -> None:
    rates._known[0, True] = rates.BusRates(1.0)
    try:
        with rates.unremembered():
            assert not rates._known
            rates._known[0, False] = rates.BusRates(2.0)
        assert rates._known == {(0, True): rates.BusRates(1.0)}
    finally:
        rates._known.clear()


@pytest.mark.parametrize("forgets", [True, False])
def test_the_disk_is_measured_by_a_model_where_there_is_one(
    tmp_path: Path, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that cannot be asked to forget what it has read reads past its cache."""
    if forgets and not bus.CAN_FORGET:
        pytest.skip("this system cannot be asked to forget what it has read")
    monkeypatch.setattr(bus, "CAN_FORGET", forgets)
    model = tmp_path / "model.safetensors"
    model.write_bytes(os.urandom((1 << 20) + 1))
    assert "disk of the model files" in next(iter(bus.disk(model)))
    assert "temporary folder" in next(iter(bus.disk(None)))
    assert "FileNotFoundError" in findings.ask("Disk", lambda: bus.disk(tmp_path / "gone")).lines[0]


def test_known_packs_are_named_and_others_are_not(tmp_path: Path) -> None:
    for name in ("ComfyUI-MultiGPU", "ComfyUI_WanVideoWrapper", "my-secret-pack", "comfyui-teacache.disabled", ".git"):
        (tmp_path / name).mkdir()
    text = "\n".join(comfyui.other_packs([tmp_path]))
    assert text.startswith("3 packs") and "MultiGPU" in text and "WanVideoWrapper" in text
    assert "secret" not in text and "teacache" not in text
    (tmp_path / "alone" / "one").mkdir(parents=True)
    assert next(iter(comfyui.other_packs([tmp_path / "alone"]))) == "1 pack installed"
    for name in ("a", "b"):
        (tmp_path / name / "nodes" / "web" / "docs").mkdir(parents=True)
        (tmp_path / name / "nodes" / "web" / "docs" / "FuseStreamDoctor.md").touch()
    assert "installed 2 times" in "\n".join(comfyui.other_packs([tmp_path]))


def test_switches_that_matter_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.cli_args
    import comfy.model_management

    monkeypatch.setattr(comfy.cli_args.args, "use_sage_attention", True)
    monkeypatch.setattr(comfy.cli_args.args, "output_directory", "/data/private")
    text = "\n".join(comfyui.switches())
    assert "--use-sage-attention=True" in text and "! --use-sage-attention" in text and "private" not in text
    assert any("device cpu" in line for line in comfyui.memory_management())


def test_features_of_a_newer_comfyui_that_are_not_used_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(fit.fit(COMFYUI))
    newer = SimpleNamespace(QUANT_ALGOS={"awq_w4a16": {}})
    monkeypatch.setitem(sys.modules, "comfy.quant_ops", newer)  # type: ignore[arg-type]
    (told,) = set(fit.fit(COMFYUI)) - set(before)
    assert told.startswith("not used by FuseStream: 4-bit products"), "a fact, and no advice"


def test_an_old_comfyui_is_told(tmp_path: Path) -> None:
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.3.75"\n')
    assert any("Update ComfyUI" in line for line in comfyui.version(tmp_path))
    assert not any("Update ComfyUI" in line for line in comfyui.version(COMFYUI))


def test_the_node_hands_out_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import folder_paths

    for size in (10, 1000):
        (tmp_path / f"{size}.safetensors").write_bytes(b"x" * size)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", ([str(tmp_path)], {".safetensors"}))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    assert largest_model() == tmp_path / "1000.safetensors"
    clone: Any = Doctor.PREPARE_CLASS_CLONE(None)
    out = clone.execute(measure=False)
    assert out.args[0].startswith("FuseStream doctor") and out.ui.as_dict()["text"] == (out.args[0],)
    assert Doctor.fingerprint_inputs() != Doctor.fingerprint_inputs()


def test_the_command_line_needs_no_comfyui() -> None:
    env = {name: value for name, value in os.environ.items() if name != "COMFYUI_PATH"}
    command = [sys.executable, str(ROOT / "fusion" / "doctor" / "cli.py"), "--quick"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "no ComfyUI here" in done.stdout and "Pager" not in done.stdout


def test_a_pack_may_lie_at_the_top_of_a_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, found in ((Path(tmp_path.anchor), None), (tmp_path / "custom_nodes" / "pack", tmp_path)):
        monkeypatch.setattr(cli, "__file__", str(folder / "fusion" / "doctor" / "cli.py"))
        assert cli.found_comfyui(None) == (found, [found / "custom_nodes"] if found else [])


def test_the_types_of_a_model_file_are_told(tmp_path: Path) -> None:
    from gguf_files import Tensor, file_of

    shape = (1 << 14, 1 << 10)
    path = file_of(tmp_path / "mine.gguf", {}, [Tensor("a", "Q4_K", shape), Tensor("b", "F16", shape)])
    (line,) = model_file.stored(path)
    assert line == "GGUF: F16 0.03 GiB, Q4_K 0.01 GiB", "and no name"
    path.write_bytes(path.read_bytes()[:-40])
    (line,) = model_file.stored(path)
    assert line.startswith(findings.ADVICE) and "is cut short" in line
    assert list(model_file.stored(None)) == ["no model file was found"]
    assert "only ComfyUI reads" in next(iter(model_file.stored(tmp_path / "x.pth")))

"""The verdict: what stops FuseStream, what costs something, and that neither a link nor a name of the pack's folder does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusestream.fusion import doctor
from fusestream.fusion.doctor import Colour, Finding, card, comfyui, machine
from fusestream.fusion.doctor.findings import ADVICE, STOPS
from fusestream.kernels_cuda import CodeUnavailable

ROOT = Path(__file__).resolve().parents[4]
SOUND = Finding("System", ("Linux, 8 CPU threads",), 0.1)
SLOW = Finding("Disk", ("0.2 GB/s", "! models are on a slow disk\nof the second line"), 0.1)
SMALL = Finding("RAM", ("! less than 16 GB of RAM",), 0.1)
WITHOUT_CARD = Finding("torch", ("torch 2.9", "!! this torch cannot use an NVIDIA card"), 0.1)


@pytest.mark.parametrize(
    ("found", "colour", "sentence"),
    [
        ([SOUND], Colour.GREEN, "FuseStream works here, and there is nothing to do."),
        ([SOUND, SLOW], Colour.AMBER, "but 1 thing costs speed"),
        ([SLOW, SMALL], Colour.AMBER, "but 2 things cost speed"),
        ([SLOW, WITHOUT_CARD, SMALL], Colour.RED, "FuseStream cannot work here: this torch cannot use an NVIDIA card."),
        ([WITHOUT_CARD, WITHOUT_CARD], Colour.RED, "an NVIDIA card (1 more thing below)."),
    ],
)
def test_the_worst_finding_decides(found: list[Finding], colour: Colour, sentence: str) -> None:
    told = doctor.verdict(found)
    assert told.colour is colour and sentence in told.sentence
    first, second, *_ = doctor.as_text(found).splitlines()
    assert (first, second) == (f"FuseStream doctor: {colour.value}", told.sentence)


def test_behind_the_verdict_comes_what_to_do_and_then_all_of_it() -> None:
    head, _, details = doctor.as_text([SLOW, WITHOUT_CARD, SOUND]).partition("\nDetails\n")
    assert head.partition("What to do\n")[2].splitlines() == [
        "  torch: this torch cannot use an NVIDIA card",
        "  Disk: models are on a slow disk",
    ]
    assert "\nDisk\n  0.2 GB/s\n  ! models are on a slow disk\n  of the second line\n" in details
    assert "\nSystem\n  Linux" in details and "System" not in head
    assert "What to do\n  nothing\n" in doctor.as_text([SOUND])


def a_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """A card of this compute capability, as torch tells of it."""
    seen = SimpleNamespace(name="NVIDIA GeForce", major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: seen)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**33, 2**33))


def test_a_card_that_no_kernel_serves_is_amber_and_kernels_that_do_not_load_are_red(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a_card(monkeypatch, (5, 2))
    old = [doctor.ask(title, probe) for title, probe in (("Cards", card.cards), ("Kernels", card.kernels))]
    told = doctor.verdict(old)
    assert told.colour is Colour.AMBER and "1 thing" in told.sentence, "it is said once"
    a_card(monkeypatch, (8, 6))

    def refuse(_index: int) -> None:
        raise CodeUnavailable("the archive is gone")

    monkeypatch.setattr(card.launcher, "card", refuse)
    found = doctor.ask("Kernels", card.kernels)
    assert found.lines == ("!! cuda:0: no kernel can be loaded: the archive is gone",)
    assert doctor.verdict([found]).colour is Colour.RED


def test_a_torch_without_cuda_and_an_old_comfyui_are_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.3.75"\n')
    for found in (doctor.ask("torch", machine.versions), doctor.ask("ComfyUI", lambda: comfyui.version(tmp_path))):
        assert doctor.verdict([found]).colour is Colour.RED, found


def test_a_linked_or_renamed_folder_is_no_fault(tmp_path: Path) -> None:
    assert next(iter(machine.pack())).endswith("in a folder of its own")
    link = tmp_path / "my-gguf-multigpu-pack"
    try:
        link.symlink_to(ROOT, target_is_directory=True)
    except OSError:
        pytest.skip("no links here")
    assert next(iter(machine.pack([tmp_path]))).endswith("linked into ComfyUI's custom_nodes")
    assert list(comfyui.other_packs([tmp_path])) == ["1 pack installed"]
    assert next(iter(machine.pack([ROOT.parent]))).endswith("in ComfyUI's custom_nodes")
    for line in (*machine.pack([tmp_path]), *comfyui.other_packs([tmp_path])):
        assert not line.startswith((ADVICE, STOPS))

"""The example workflow on the trained small model, through the server and the video file: it shows what it was asked for.

And the demo of it: what it prints and leaves.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bed import demo, tiny, toybox
from bed.client import Client
from bed.outcome import done, frames_of
from bed.server import Server
from fusestream.checkpoints import toys


@pytest.fixture(scope="module")
def small_model(files: list[Path]) -> Iterator[None]:
    """In the server's folders, beside the tiny ones."""
    copies = [
        Path(shutil.copy(source, files[0].parents[1] / folder))
        for source, (_, folder) in zip(toybox.files(), tiny.LOADERS.values(), strict=True)
    ]
    yield
    for copy in copies:
        copy.unlink()


@pytest.mark.deep
@pytest.mark.usefixtures("small_model")
@pytest.mark.parametrize(
    ("prompt", "seed", "expected"),
    [
        (toybox.PROMPT, None, {"red": ("ball", "left"), "blue": ("box", None)}),
        ("A green triangle moves up, black background", 3, {"green": ("triangle", "up")}),
    ],
)
def test_the_video_shows_what_was_asked(
    client: Client, prompt: str, seed: int | None, expected: dict[str, tuple[str, str | None]]
) -> None:
    frames = frames_of(client, done(client, toybox.workflow(prompt, seed)))
    assert frames.shape == (17, 128, 128, 3)
    seen, background = toys.look(toybox.film_of(frames), len(expected))
    assert {toy.colour: (toy.shape, toy.direction) for toy in seen} == expected
    assert background in prompt


@pytest.mark.usefixtures("small_model")
def test_the_demo_says_what_it_does_in_a_few_lines_and_ends_with_the_paths(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On the tests' server, which stands for the one that the demo starts."""
    out = tmp_path / "out"
    folders = ["--comfyui", os.environ["COMFYUI_PATH"], "--base", str(tmp_path / "base"), "--output", str(out)]
    monkeypatch.setattr(demo, "Server", lambda *_: contextlib.nullcontext(server))
    monkeypatch.setattr(sys, "argv", ["demo", *folders, "--prompt", "a blue box moves up\non a gray background"])
    demo.main()
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert lines == [
        "starting ComfyUI",
        'making the video: 17 frames of 128x128, "a blue box moves up on a gray background"',
        "looking at it: seen a blue box that moves up before a gray background",
        f"video: {out / 'demo.mp4'}",
        f"sheet: {out / 'demo-contact-sheet.png'}",
    ]
    assert "%" not in printed.out + printed.err
    assert all(Path(line.partition(": ")[2]).is_file() for line in lines[-2:])
    report = (out / "demo-report.txt").read_text(encoding="utf-8")
    assert "s    KSampler\n" in report and "seen:  a blue box that moves up before a gray background\n" in report

"""The example workflow on the trained small model, through the server and the video file: it shows what it was asked for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bed import tiny, toybox
from bed.client import Client
from bed.outcome import done, frames_of
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

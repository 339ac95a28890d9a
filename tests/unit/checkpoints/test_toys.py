"""The toy world: captions say what scenes are, films show it, and the judge sees it, and sees where
it is not so.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import sentencepiece
import torch

from fusestream.checkpoints import toys
from fusestream.checkpoints.toys import scene as scenes
from fusestream.checkpoints.toys import words

SQUARE = toys.Frame(128, 128, 17)


def film_of(scene: toys.Scene, rng: Random, frame: toys.Frame = SQUARE) -> torch.Tensor:
    return toys.film([toys.stage(scene, rng, frame.aspect)], frame)[0]


def test_captions_are_whole_words_to_the_tokenizer() -> None:
    pieces = sentencepiece.SentencePieceProcessor(model_proto=toys.tokenizer(), add_eos=True)
    rng = Random(1)
    longest = 0
    for _ in range(600):
        text = toys.caption(toys.draw_scene(rng, held_back=True), rng)
        assert toys.tokens(text) == pieces.encode(text) == pieces.encode(text.upper()), text
        longest = max(longest, len(toys.tokens(text)))
    assert 20 < longest < words.LONGEST, "one place is kept for what stands behind a prompt"
    assert words.size() == len({*range(words.size())}) and pieces.pad_id() == words.PAD and pieces.eos_id() == words.END
    with pytest.raises(KeyError):
        toys.tokens("a red dragon")


def test_every_word_is_used() -> None:
    rng, unused = Random(2), set(words.WORDS) - {"in", "front", "of", "the"}
    for _ in range(800):
        unused -= set(toys.caption(toys.draw_scene(rng), rng).replace(",", "").split())
    assert not unused


def test_what_is_held_back_is_never_drawn() -> None:
    rng = Random(3)
    drawn = [toys.draw_scene(rng) for _ in range(3000)]
    assert not any(scene.held_back for scene in drawn)
    assert any(toys.draw_scene(rng, held_back=True).held_back for _ in range(300))
    held = toys.held_back_scenes()
    assert len(set(held)) == 60 and all(scene.held_back for scene in held)
    # Each colour, shape and direction of them is known from others.
    for part in ("colour", "shape", "direction"):
        assert {getattr(scene.toys[0], part) for scene in held} <= {getattr(scene.toys[0], part) for scene in drawn}


@pytest.mark.every_other
@pytest.mark.parametrize(
    "frame", [SQUARE, toys.Frame(64, 64, 9), toys.Frame(168, 96, 21), toys.Frame(96, 168, 5)], ids=str
)
def test_the_judge_sees_what_the_scene_says(frame: toys.Frame) -> None:
    rng = Random(4)
    for _ in range(24):
        scene = toys.draw_scene(rng, held_back=True)
        film = film_of(scene, rng, frame)
        assert film.shape == (frame.frames, frame.height, frame.width, 3) and film.abs().max() <= 1
        assert toys.judge(film, scene) == toys.Verdict(True, True, True, True), scene


def test_the_judge_sees_what_is_wrong() -> None:
    toy = toys.Toy("red", "box", "left")
    scene = toys.Scene((toy,), "white")
    right = film_of(scene, Random(5))
    wrong = {
        "direction": [right.flip(0), right.flip(2), right[:1].expand_as(right)],
        "shape": [
            film_of(replace(scene, toys=(replace(toy, shape=shape),)), Random(5)) for shape in ("ball", "triangle")
        ],
        "background": [film_of(replace(scene, background=ground), Random(5)) for ground in scenes.BACKGROUNDS[1:]],
    }
    for part, films in wrong.items():
        for film in films:
            assert toys.judge(film, scene) == replace(toys.Verdict(True, True, True, True), **{part: False})
    nothing = toys.Verdict(False, False, False, True)
    assert toys.judge(right.flip(-1), scene) == nothing, "blue"
    assert toys.judge(right.mean(-1, keepdim=True).expand_as(right), scene) == replace(nothing, background=False)
    assert toys.judge(torch.full_like(right, 0.9), scene) == nothing
    assert not toys.judge(torch.full_like(right, float("nan")), scene).moves_right


def test_two_toys_are_told_apart_by_their_colours() -> None:
    both = (toys.Toy("green", "ball", "up"), toys.Toy("orange", "triangle", None))
    scene = toys.Scene(both, "black", toys.Relation.WHILE)
    film = film_of(scene, Random(6))
    seen, background = toys.look(film, 2)
    assert {one.colour: (one.shape, one.direction) for one in seen} == {
        "green": ("ball", "up"),
        "orange": ("triangle", None),
    }
    assert background == "black"
    exchanged = replace(scene, toys=(replace(both[0], colour="orange"), replace(both[1], colour="green")))
    verdict = toys.judge(film, exchanged)
    assert verdict.colour and not verdict.shape and not verdict.direction


def test_a_toy_in_front_hides_the_other() -> None:
    both = (toys.Toy("red", "ball", "left"), toys.Toy("blue", "box", None))
    halfway = {}
    for relation in (toys.Relation.BEHIND, toys.Relation.BEFORE):
        film = film_of(toys.Scene(both, "white", relation), Random(7))
        middle = (film[8] + 1) / 2
        halfway[relation] = float((middle[..., 0] > 0.7).logical_and(middle[..., 2] < 0.4).sum())
    assert halfway[toys.Relation.BEHIND] < halfway[toys.Relation.BEFORE] / 2


def test_a_pan_moves_all_that_is_seen() -> None:
    scene = toys.Scene((toys.Toy("purple", "box", None),), "checkered", pan="right")
    shot = toys.stage(scene, Random(8))
    assert shot.ground.drift == shot.toys[0].travel and shot.ground.drift[0] < -0.1
    drift = (-0.25, 0.0)  # 32 pixels
    shot = replace(shot, toys=(replace(shot.toys[0], travel=drift),), ground=replace(shot.ground, drift=drift))
    film = toys.film([shot], SQUARE)[0]
    torch.testing.assert_close(film[-1, :, :-32], film[0, :, 32:], rtol=0, atol=0.02)
    assert (film[-1] - film[0]).abs().mean() > 0.1
    assert toys.look(film, 1)[0][0].direction == "left"


def test_a_film_is_the_same_for_a_seed_and_any_size() -> None:
    scene = toys.draw_scene(Random(9))
    one, again = (film_of(scene, Random(10)) for _ in range(2))
    assert torch.equal(one, again)
    large = film_of(scene, Random(10), toys.Frame(256, 256, 17))
    shrunk = torch.nn.functional.avg_pool2d(large.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
    assert (shrunk - one).abs().mean() < 0.01

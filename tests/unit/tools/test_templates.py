"""The example workflows are what their script makes, and their links lead where they say."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.resources import files

import pytest
from PIL import Image

from bed import toybox
from bed.templates import EXAMPLES, STEMS, SWAPPED, TITLES, Example
from bed.templates.__main__ import INDEX, INPUTS, LARGEST, NOTES, SUBGRAPHS, WORKFLOWS, texts
from bed.templates.card import frames_of
from bed.templates.files import FILES
from bed.templates.frames import ASKED
from bed.templates.graph import Column, Graph
from bed.templates.listed import CARD, REACH, TOLD
from bed.templates.note import WORDS, words
from bed.templates.prediction import KLEIN, LARGE, SMALL, Z_IMAGE, flops, flops_of_picture
from bed.templates.said import LANGUAGES, SENTENCES, NotSaid, translated
from fusestream.checkpoints import toys

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


def test_the_files_are_what_the_script_makes() -> None:
    wanted = texts() | {
        one.path: one.path.read_text(encoding="utf-8") for one in SWAPPED
    }  # which have a test of their own
    files = [*WORKFLOWS.rglob("*.json"), *SUBGRAPHS.rglob("*"), *NOTES.rglob("*"), INDEX]
    found = {path: path.read_text(encoding="utf-8") for path in files}
    assert found.keys() == wanted.keys()
    changed = [path.name for path in wanted if found[path] != wanted[path]]
    assert not changed, "call `python3 dev.py workflows` and commit what it writes"
    assert {path.stem for path in WORKFLOWS.glob("*.jpg")} == set(STEMS.values())


@pytest.mark.parametrize("name", [name for name, asked in ASKED.items() if not asked.twice])
def test_a_picture_shows_what_its_prompt_says(name: str) -> None:
    """As the judge of the toy world sees its three frames."""
    with Image.open(WORKFLOWS / f"{STEMS[name]}.jpg") as picture:
        frames = frames_of(picture)
    asked = ASKED[name]
    verdict = toys.judge(toybox.film_of(frames), asked.scene)
    assert verdict == toys.Verdict(colour=True, shape=True, direction=True, background=True), asked.prompt


def test_a_card_tells_its_template_from_all_others() -> None:
    """By the letters of a title that are always seen."""
    assert Counter(title[:TOLD] for title in TITLES.values()).most_common(1)[0][1] == 1


def test_names_of_files_order_and_find_them_by_themselves() -> None:
    """On every file system the first comes first; what ComfyUI's search must find begins within its reach."""
    first = STEMS[EXAMPLES[0].name]
    assert min(STEMS.values()) == min(STEMS.values(), key=str.casefold) == first
    far = {}
    for one in (*EXAMPLES, *SWAPPED):
        words = (CARD, one.listed.storage)
        for text in (one.listed.stem, one.listed.description):
            far |= {(text, word): place for word in words if (place := text.index(word)) > REACH}
    assert not far
    assert not [stem for stem in STEMS.values() if re.search(r"[(/\\:*?\"<>|#%]", stem)]


def test_the_index_is_in_the_words_of_comfyuis_own() -> None:
    """A name that ComfyUI's own has not would be one that nothing reads."""
    (category,) = json.loads(INDEX.read_text(encoding="utf-8"))
    (stocks,) = files("comfyui_workflow_templates_json").glob("templates/index.json")  # type: ignore[attr-defined]
    known = [template for one in json.loads(stocks.read_text(encoding="utf-8")) for template in one["templates"]]
    names = {name for template in known for name in template}
    tags = {tag for template in known for tag in template.get("tags", ())}
    for template in category["templates"]:
        assert set(template) <= names and set(template["tags"]) <= tags
        assert (WORKFLOWS / f"{template['name']}.json").is_file()
        assert (WORKFLOWS / f"{template['name']}.{template['mediaSubtype']}").is_file()
    assert [template["title"] for template in category["templates"]] == list(TITLES.values())


def test_all_that_a_template_loads_comes_along() -> None:
    loads = {
        node.values[name]
        for one in EXAMPLES
        for node in one.graph().nodes
        for name in ("image", "file")
        if node.type in ("LoadImage", "LoadVideo") and name in node.values
    }
    assert loads == {path.name for path in INPUTS.iterdir()}
    assert sum(path.stat().st_size for path in INPUTS.iterdir()) < 200_000  # all users download them


def test_pictures_are_small() -> None:
    """All users download them."""
    assert all(path.stat().st_size <= LARGEST for path in WORKFLOWS.glob("*.jpg"))


@each_example
def test_every_link_is_told_by_both_its_ends(example: Example) -> None:
    ui = example.graph().ui()
    nodes = {node["id"]: node for node in ui["nodes"]}
    for id_, source, slot, target, socket, kind in ui["links"]:
        assert id_ in nodes[source]["outputs"][slot]["links"]
        assert nodes[target]["inputs"][socket]["link"] == id_
        assert nodes[source]["outputs"][slot]["type"] == kind
        assert nodes[target]["inputs"][socket]["type"] in (kind, "*")  # one that takes anything


@each_example
def test_the_note_names_every_file(example: Example) -> None:
    """And no file is asked for that the note does not name."""
    graph = example.graph()
    (note,) = (node.values["text"] for node in graph.nodes if node.type == "MarkdownNote")
    asked = {
        value
        for node in graph.nodes
        for value in node.values.values()
        if isinstance(value, str) and value.endswith((".safetensors", ".gguf"))
    }
    assert asked == {file.name for file in graph.files()}
    for file in graph.files():
        assert f"**[{file.name}]({file.url})** ({file.gigabytes:g} GB) into *{file.folder}*\n" in note
    said = "were not measured yet on any card" if example.is_live else "Predicted, not measured"
    assert (said if example.samples else "Not measured yet.") in note


def test_notes_are_short() -> None:
    """Ours, beside the links to files. ComfyUI's own notes in its templates are as it wrote them."""
    ours = {one.name: str(node.values["text"]) for one in EXAMPLES for node in one.graph().nodes if "Note" in node.type}
    long = {name: words(text) for name, text in {**ours, **{one.name: one.note() for one in SWAPPED}}.items()}
    assert {name: count for name, count in long.items() if count > WORDS} == {}


def test_words_of_a_note_are_counted_without_its_files() -> None:
    assert words("# A title\n\n- **[a.gguf](https://x/a.gguf)** (1 GB) into *vae*\n\nPress **R** - then *Run*.\n") == 6


@pytest.mark.parametrize("language", LANGUAGES)
@each_example
def test_its_note_says_the_same_in_other_languages(example: Example, language: str) -> None:
    """The same figures, and in bold what is in bold, in as many lines; nothing of the English sentences is left over."""
    (english,) = (node.values["text"] for node in example.graph().nodes if node.type == "MarkdownNote")
    note = translated(english, language)
    assert Counter(re.findall(r"\d+(?:\.\d+)?", note)) == Counter(re.findall(r"\d+(?:\.\d+)?", english))
    assert note.count("\n") == english.count("\n") and note.count("**") == english.count("**")
    for file in example.graph().files():
        assert f"**[{file.name}]({file.url})**（{file.gigabytes:g} GB）" in note


def test_a_note_with_a_sentence_that_nobody_translated_is_refused() -> None:
    with pytest.raises(NotSaid, match=r"no sentence for 'Take care\.'"):
        translated("# Z-Image Turbo\n\nNot measured yet. Take care.", "zh")


def test_every_translated_sentence_is_in_a_note() -> None:
    notes = "\n".join(
        [
            *(node.values["text"] for one in EXAMPLES for node in one.graph().nodes if node.type == "MarkdownNote"),
            *(one.note() for one in SWAPPED),
        ]
    )
    for sentence in SENTENCES:
        words = ".+?".join(re.escape(piece) for piece in re.split(r"{\w+}", sentence["en"]))
        assert re.search(words, notes), sentence["en"]


def test_the_first_three_have_an_app_mode_that_asks_for_the_prompt() -> None:
    for example in EXAMPLES:
        ui = example.graph().ui()
        nodes = {str(node["id"]): node for node in ui["nodes"]}
        app = ui["extra"].get("linearData", {"inputs": [], "outputs": []})
        asked = [(nodes[id_].get("title"), widget) for id_, widget in app["inputs"]]
        assert (("What to show", "text") in asked) is (example in EXAMPLES[:3])
        told = {node.get("title"): one["label"] for node in nodes.values() for one in node["inputs"] if "label" in one}
        assert told == {title: title for title, widget in asked if widget in ("text", "value")}
        saving = ["SaveImage" if example.is_picture else "SaveVideo"] if asked else []
        assert [nodes[id_]["type"] for id_ in app["outputs"]] == saving


def test_an_app_mode_that_asks_for_what_is_not_there_is_refused() -> None:
    graph = Graph("x", asks=(("Which net", "steps"),))
    graph.add(Column(0, 100), "FuseStreamVAELoader", "Which net", vae_name="a.safetensors")
    with pytest.raises(ValueError, match=r"app mode of x: no such widget on \['Which net'\]"):
        graph.ui()


def test_every_published_file_is_used() -> None:
    assert {file for example in EXAMPLES for file in example.graph().files()} == set(FILES)


def test_a_graph_that_lacks_an_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"VAEDecode in x: unknown \['image'\], missing \['samples', 'vae'\]"):
        Graph("x").add(Column(0, 100), "VAEDecode", image=1)


def test_work_of_a_step_is_that_of_the_model() -> None:
    """By hand, for 21x30x52 tokens: 2 * 1.42e9 * 32760 in products without the embeddings; 4 n^2 d per layer in attention."""
    products, attention = flops(SMALL, 832, 480, 81)
    assert products == pytest.approx(30 * 32760 * 2 * (6 * 1536**2 + 2 * 1536 * 8960), rel=0.02)
    assert attention == pytest.approx(30 * 4 * 32760**2 * 1536, rel=0.02)
    assert flops(LARGE, 832, 480, 33)[0] == pytest.approx(2 * 14040 * 12.0e9, rel=0.05)


def test_work_of_a_step_is_that_of_a_model_of_pictures() -> None:
    """By the parameters of the published files' blocks, 3.1e9 and 5.7e9: each multiplies every token once. And 4 n^2 d."""
    products, attention = flops_of_picture(KLEIN, 1024, 1024)
    assert products == pytest.approx(2 * (4096 + 512) * 3.07e9, rel=0.02)
    assert attention == pytest.approx(25 * 4 * 4608**2 * 3072)
    assert flops_of_picture(Z_IMAGE, 1024, 1024)[0] == pytest.approx(2 * (4096 + 512) * 5.66e9, rel=0.02)
    beside = flops_of_picture(KLEIN, 1024, 1024, references=1)
    assert beside[0] == pytest.approx(products * (2 * 4096 + 512) / 4608)
    assert beside[1] == pytest.approx(attention * ((2 * 4096 + 512) / 4608) ** 2)

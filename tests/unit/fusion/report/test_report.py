"""The report: gathered from a real streamed run on the CPU, from models that do not stream, and from made-up figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import comfy.patcher_extension
import comfy.sample
import comfy.sd
import comfy.utils
import folder_paths
import numpy as np
import pytest
import torch
from PIL import Image

from fusestream import checkpoints, fusion
from fusestream.fusion import report
from fusestream.fusion.base.format import counted
from fusestream.fusion.estimate.telling import with_changes
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.patcher import call_log
from fusestream.fusion.report import canvas, gathering, passes
from fusestream.fusion.report.advice import faster, spare
from fusestream.fusion.report.data import (
    KernelRow,
    LayerRow,
    Memory,
    NodeTime,
    RefusalRow,
    Report,
    Sampling,
    Stretch,
    WhatIf,
    duration,
    size,
)
from fusestream.memory.ledger import Entry
from fusestream.nodes.kernels import ModelKernels
from fusestream.nodes.reports import Compare, ReportNode

GIB = 2**30


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.write("wan_t2v", tmp_path_factory.mktemp("models")))


def sample(model: Any, steps: int = 2) -> torch.Tensor:
    width = model.model.diffusion_model.text_embedding[0].in_features
    prompt = [[torch.randn(1, 8, width), {}]]
    latent = torch.zeros(1, 16, 1, 8, 8)
    noise = comfy.sample.prepare_noise(latent, 1)
    out: torch.Tensor = comfy.sample.sample(
        model, noise, steps, 1.0, "euler", "simple", prompt, prompt, latent, disable_pbar=True, seed=1
    )
    return out


@pytest.fixture(scope="module")
def streamed(path: str) -> Any:
    """Two of its four blocks fit beside each other; sampled with."""
    model = load_streamed_diffusion_model(path, 0.008)
    sample(model, 3)
    return model


@pytest.fixture
def made_up() -> Report:
    """As of 14B on an 8 GB card."""
    layers = tuple(
        LayerRow(f"blocks.{i}", 700 << 20, 700 << 20, i % 5 == 0, 0.5, 0.06, 0.0 if i % 5 == 0 else 0.05, 0.04)
        for i in range(40)
    )
    timeline = tuple(
        stretch
        for i in range(40)
        for stretch in (
            Stretch("copy", i, i * 0.55, i * 0.55 + 0.06, 700 << 20),
            Stretch("stall", i, i * 0.55, i * 0.55 + 0.05),
            Stretch("use", i, i * 0.55 + 0.05, (i + 1) * 0.55),
        )
    )
    return Report(
        "wan2.1_t2v_14B_fp16.safetensors (WAN21)",
        "Its blocks stream: 8 stay in VRAM, 32 pass through 2 slots.",
        "NVIDIA GeForce RTX 2060 SUPER",
        "kernels auto, precise",
        tier="precise",
        streams=True,
        passes=12,
        slots=2,
        window=1400 << 20,
        budget=7 * GIB,
        layers=layers,
        timeline=timeline,
        memories=(Memory("VRAM for blocks", 6 * GIB, 7 * GIB, 7 * GIB), Memory("RAM", 20 * GIB, 32 * GIB)),
        routes=(("registered", 300 * GIB),),
        rate=11.6e9,
        overlap=0.93,
        predicted_pass=21.6,
        what_if=(WhatIf(2 * GIB, 22.5), WhatIf(7 * GIB, 21.6), WhatIf(12 * GIB, 20.0)),
        notes=(("backend", "slots: asked for"),),
        kernels=(KernelRow("attention", "1x40x32760", "cuda precise", "cuda precise 9 us, stock 20 us"),),
        refusals=(RefusalRow("attention", "torch cudnn", "needs Ampere", "cuda precise", 3),),
    )


# ------------------------------------------------------------------------------------------------------------- gathered


def test_of_a_streamed_run(streamed: Any) -> None:
    found = report.gather(streamed)
    assert found.gaps == ()
    assert found.sampling is not None and found.sampling.steps == 3
    assert found.sampling.spent >= 2 * found.sampling.seconds > 0
    assert found.sampling.pixels == (1, 64, 64) and found.sampling.first > 0
    assert report.as_text(found).splitlines()[1].startswith("64x64, 1 frame: 3 steps sampled in ")
    assert found.streams and found.passes == 3 and next(layer.name for layer in found.layers) == "blocks.0.self_attn"
    plan = streamed.stream.residency.pager.plan
    assert [layer.resident for layer in found.layers] == [i in plan.resident for i in range(len(found.layers))]
    assert all(layer.use > 0 for layer in found.layers) and found.pass_seconds > 0
    assert {stretch.kind for stretch in found.timeline} >= {"use", "copy"}
    assert {s.layer for s in found.timeline if s.kind == "use"} == set(range(len(found.layers)))
    assert min(s.start for s in found.timeline) >= 0
    assert dict(found.routes)["file"] > 0 and found.rate > 0 and found.predicted_pass
    assert next(pool.name for pool in found.memories) == "VRAM for blocks" and found.memories[0].used > 0
    assert any(one.nbytes == plan.footprint for one in found.what_if) and len(found.what_if) >= 3
    assert found.device == "CPU" and "kernels auto" in found.policy
    text = report.as_text(found)
    for words in ("wan_t2v", "How it computed", "predicted at these rates", "from file", "backend: host", "blocks."):
        assert words in text, text
    again = json.loads(report.as_json(found))
    assert again["sums"]["pass_seconds"] == found.pass_seconds and len(again["layers"]) == len(found.layers)


def test_of_an_unloaded_stream(path: str) -> None:
    model = load_streamed_diffusion_model(path, 0.008)
    found = report.gather(model)
    assert found.passes == 0 and "unloaded" in found.state and "Nothing has run yet" in found.advice[0]
    assert found.gaps == () and report.draw(found).width == canvas.WIDTH
    sample(model, 1)
    model.detach()
    found = report.gather(model)
    assert found.passes == 1 and found.predicted_pass is None and found.gaps == ()
    assert report.draw(found, "light").height > 500


def test_of_a_model_that_does_not_stream_and_of_none(path: str) -> None:
    whole = report.gather(fusion.load_diffusion_model(path))
    assert not whole.streams and "Set vram_budget" in whole.state and "wan_t2v" in whole.title and whole.gaps == ()
    none = report.gather()
    assert "No model is connected" in none.state and none.memories and none.gaps == ()
    for found in (whole, none):
        assert report.draw(found).height > 100 and report.as_text(found)


def test_nothing_can_raise(monkeypatch: pytest.MonkeyPatch, streamed: Any) -> None:
    """Each part broken, and things that are no models at all."""

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is on fire")

    for name in ("policy_on", "measure_ram", "cut", "faster"):
        monkeypatch.setattr(gathering, name, broken)
    found = report.gather(streamed)
    assert [gap.split(":")[0] for gap in found.gaps] == ["policy", "memories", "streaming", "advice"]
    assert "the disk is on fire" in report.as_text(found)
    report.draw(found)
    for odd in (object(), SimpleNamespace(model=None), 3):
        assert report.gather(odd).gaps


@pytest.mark.usefixtures("whole_blocks")
def test_branches_of_one_stream_have_their_own_passes(path: str) -> None:
    """Whenever the reports are made."""
    model = load_streamed_diffusion_model(path, 0.008)
    (other,) = ModelKernels.execute(model, kernels="off").result
    (unused,) = ModelKernels.execute(model, kernels="auto", norms="off").result
    sample(model, 3)
    sample(other, 5)
    sample(model, 1)
    found = [report.gather(one) for one in (model, other, unused)]
    assert [one.passes for one in found] == [4, 5, 0] and not any(one.gaps for one in found)
    assert found[2].timeline == () and "Nothing has run yet" in found[2].advice[0]
    entries, order = (
        model.stream.residency.ledger.entries,
        {layer.name: i for i, layer in enumerate(model.stream.layers)},
    )
    whole = passes.cut(entries, order)
    assert len(whole) == 9

    def is_use(entry: Any, layer: str, low: float, high: float) -> bool:
        return entry.kind == "use" and entry.layer == layer and low <= entry.start < high

    for one, numbers in zip(found, ([0, 1, 2, 8], [3, 4, 5, 6, 7]), strict=False):
        between = [whole[number] for number in numbers[1:]]
        for layer in one.layers:  # a typical one of its own passes, which a busy machine does not make alike
            used = [sum(e.end - e.start for e in entries if is_use(e, layer.name, *times)) for times in between]
            assert min(used) <= layer.use * 1.0001 and layer.use <= max(used) * 1.0001
        assert {s.layer for s in one.timeline if s.kind == "use"} == set(order.values())


def test_branches_with_other_loras_have_their_own_passes(path: str) -> None:
    """Under the same kernels. What changes nothing of the weights makes no other branch."""
    model = load_streamed_diffusion_model(path, 0.008)
    strong, weak = (with_lora(model, path, strength) for strength in (1.0, 0.5))
    (on_the_way,) = ModelKernels.execute(strong.clone(), kernels="auto").result
    for one, steps in ((model, 1), (strong, 2), (weak, 3), (model, 4), (on_the_way, 5)):
        sample(one, steps)
    found = [report.gather(one) for one in (model, strong, weak, on_the_way)]
    assert [one.passes for one in found] == [5, 7, 3, 7] and not any(one.gaps for one in found)


def test_a_branch_that_was_unloaded_in_its_middle_stays_one(path: str) -> None:
    model = with_lora(load_streamed_diffusion_model(path, 0.008), path, 1.0)
    ran: list[bool] = []

    def unload_before_the_second_step(executor: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(True)
        if len(ran) == 2:
            model.detach()
        return executor(*args, **kwargs)

    model.add_wrapper(comfy.patcher_extension.WrappersMP.APPLY_MODEL, unload_before_the_second_step)
    sample(model, 3)
    assert len(ran) == 3 and report.gather(model).passes == 3


def with_lora(model: Any, path: str, strength: float) -> Any:
    """A clone with it, as Load LoRA makes one."""
    kind = next(kind for kind, base in checkpoints.LORA_BASES.items() if base == "wan_t2v")
    file = comfy.utils.load_torch_file(str(checkpoints.write(kind, Path(path).parent)))
    return comfy.sd.load_lora_for_models(model, None, file, strength, 0.0)[0]


def test_calls_and_passes_are_matched_from_their_end() -> None:
    of, lora = fusion.KernelPolicy.of, uuid4()
    a, b, c = call_log.Branch(of("auto"), lora), call_log.Branch(of("off"), lora), call_log.Branch(of("auto"), uuid4())
    assert call_log.passes_under(3, (), a) == [0, 1, 2], "nobody noted them"
    assert call_log.passes_under(4, (a, b, a, a), a) == [0, 2, 3] and call_log.passes_under(4, (a, b, a, a), b) == [1]
    assert call_log.passes_under(2, (a, b, a, b), a) == [0], "the ledger forgets what is old"
    assert call_log.passes_under(4, (a, b), a) == [2], "calls are forgotten too"
    assert call_log.passes_under(3, (a, c, a), c) == [1], "another LoRA"
    assert call_log.passes_under(4, (c, a, c, b), call_log.Branch(a.policy, uuid4())) == [0, 2], (
        "a report before the LoRAs"
    )
    assert call_log.passes_under(2, (a, a), call_log.Branch(None, lora)) == []


# ------------------------------------------------------------------------------------------------------------- passes


def uses(*layers: str) -> list[Entry]:
    return [Entry("use", layer, float(i), i + 0.5) for i, layer in enumerate(layers)]


def test_passes_are_cut_where_the_order_starts_anew() -> None:
    order = {"a": 0, "b": 1, "c": 2}
    entries = uses("b", "c", "a", "b", "c", "a", "b", "c", "a")
    assert passes.cut(entries, order) == [(2.0, 4.5), (5.0, 7.5)]
    assert passes.cut(uses("a", "b", "b", "c", "a", "b", "b", "c"), order) == [(0.0, 3.5), (4.0, 7.5)], (
        "b for two things"
    )
    assert len(passes.cut(uses("a", "a", "a"), {"a": 0})) == 3
    assert passes.cut([], order) == [] and passes.last_pass([], order, []) == () and passes.typical([], []) == {}
    copies = [Entry("copy", "c", 4.8, 5.2, 10), Entry("stall", "a", 4.6, 5.0), Entry("copy", "a", 1.0, 1.5, 10)]
    last = passes.last_pass([*entries, *copies], order, passes.cut(entries, order))
    assert [(s.kind, s.layer) for s in last if s.kind != "use"] == [("copy", 2), ("stall", 0)]
    assert min(s.start for s in last) == 0.0 and max(s.end for s in last) == pytest.approx(2.9)


def test_the_first_pass_is_left_out_of_what_is_usual() -> None:
    order = {"a": 0, "b": 1}
    entries = uses("a", "b", "a", "b", "a", "b")
    slow = [Entry("stall", "a", -9.0, 0.0), Entry("stall", "a", 1.6, 1.8), Entry("stall", "a", 3.6, 4.0)]
    usual = passes.typical([*entries, *slow], passes.cut(entries, order))
    assert usual["use", "a"] == 0.5 and usual["stall", "a"] == pytest.approx(0.3)


# --------------------------------------------------------------------------------------------------------- what to change


def test_waiting_asks_for_vram(made_up: Report) -> None:
    first, *_ = told = list(faster(made_up))
    assert "raise vram_budget to 12.00" in first and "7% of a pass" in first and "instead of 21.60 s" in first
    assert told[-1].startswith("Longer or larger videos") and not list(spare(made_up))
    disk = list(faster(replace(made_up, rate=2e9, what_if=())))
    assert "more VRAM would not help" in disk[0] and "2.0 GB/s, which is a disk's rate" in disk[1]


def test_no_waiting_offers_vram_back(made_up: Report) -> None:
    idle = tuple(replace(layer, stall=0.0) for layer in made_up.layers)
    calm = replace(made_up, layers=idle, what_if=(WhatIf(2 * GIB, 21.7), WhatIf(7 * GIB, 21.6)))
    assert not list(faster(calm))
    (less,) = spare(calm)
    assert "2.00 GiB" in less and "lower vram_budget" in less


@pytest.mark.parametrize(("n", "words"), [(12, "0.0 KiB"), (5 << 20, "5.0 MiB"), (3 * GIB, "3.00 GiB")])
def test_sizes(n: int, words: str) -> None:
    assert size(n) == words


def test_durations() -> None:
    assert [duration(s) for s in (2.5, 0.0123, 4e-6)] == ["2.50 s", "12.3 ms", "4 us"]


# ---------------------------------------------------------------------------------------------------- where the time went


def test_the_first_lines_say_where_the_time_went(made_up: Report) -> None:
    nodes = (
        NodeTime("KSampler", 24.2),
        NodeTime("VAE Decode", 9.1),
        NodeTime("Encode", 3.0, 2),
        NodeTime("A", 0.04),
        NodeTime("B", 0.03),
    )
    found = replace(made_up, sampling=Sampling(30, 0.8, 24.0, 3.2, (81, 480, 832)), nodes=nodes)
    head = report.as_text(found).splitlines()[1:4]
    assert head == [
        "832x480, 81 frames: 30 steps sampled in 24 s, 0.8 s a step, of which 7% was waiting for weights.",
        "The first step took 3.2 s: it brings the weights, and may compare kernels.",
        "The nodes that have run took 36 s: KSampler 24 s, VAE Decode 9.1 s, Encode 3 s (2 nodes), 2 others 0.07 s.",
    ]
    steady = replace(found, sampling=Sampling(30, 0.8, 24.0, 0.9), nodes=())
    assert report.as_text(steady).splitlines()[1].startswith("30 steps sampled in 24 s, ")
    assert "The first step" not in report.as_text(steady) and "The nodes" not in report.as_text(steady)


def test_details_come_after_what_to_do_and_the_long_lists_last(made_up: Report) -> None:
    """Of kernels that were not used each reason is told once."""
    other = (
        RefusalRow("linear", "marlin", "needs Ampere", "cuda", 7),
        RefusalRow("norm", "cuda", "odd size", "stock", 1),
    )
    found = replace(made_up, advice=("Do this.",), spare=("Or that.",), refusals=(*made_up.refusals, *other))
    text = report.as_text(found)
    titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert titles[2:5] == ["To go faster", "To do with less", "How it computed"]
    assert titles[-1] == "Kernels that were not used, by reason"
    assert text.splitlines()[-2:] == [
        "  needs Ampere: torch cudnn (attention), marlin (linear)",
        "  odd size: cuda (norm)",
    ]


@pytest.mark.parametrize(("device", "is_told"), [("NVIDIA GeForce RTX 2060 SUPER", True), ("NVIDIA L4", False)])
def test_a_run_is_told_what_would_have_been_faster(streamed: Any, made_up: Report, device: str, is_told: bool) -> None:
    """Fewer steps by a LoRA; of qualities, whose times nobody knows here, that a GeForce adds faster in FP16."""
    model = streamed.clone()
    sample(model, 6)
    found = with_changes(replace(made_up, device=device, advice=("Wait less.",)), model)
    assert found.gaps == () and found.advice[-1] == "Wait less."
    assert any(one.startswith("a LoRA for 4 steps, with guidance 1: ") for one in found.advice)
    assert any("quality 'Balanced'" in one for one in found.advice) == is_told
    assert with_changes(made_up, None) == made_up


# ------------------------------------------------------------------------------------------------------------ the picture


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_picture_shows_what_there_is(made_up: Report, theme: Any) -> None:
    picture = report.draw(made_up, theme)
    colours = canvas.THEMES[theme]
    assert picture.mode == "RGB" and picture.width == canvas.WIDTH and 900 < picture.height < 1600
    for kind in ("use", "copy", "stall", "resident", "panel"):
        assert area(picture, getattr(colours, kind)) > 200, kind
    calm = report.draw(replace(made_up, timeline=tuple(s for s in made_up.timeline if s.kind != "stall")), theme)
    assert area(calm, colours.stall) < area(picture, colours.stall)


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_letters_can_be_read(theme: Any) -> None:
    """WCAG: 4.5 for letters, 3 for shapes, against what is behind them."""
    colours = canvas.THEMES[theme]
    for behind in (colours.ground, colours.panel):
        assert contrast(colours.ink, behind) >= 7 and contrast(colours.faint, behind) >= 4.5
        for kind in ("use", "copy", "stall", "resident"):
            assert contrast(getattr(colours, kind), behind) >= 3, kind


@pytest.mark.parametrize("count", [1, 3, 400])
def test_any_number_of_blocks(made_up: Report, count: int) -> None:
    rows = tuple(replace(made_up.layers[0], name=f"blocks.{i}") for i in range(count))
    report.draw(replace(made_up, layers=rows, title="a long name " * 30))


def area(picture: Image.Image, colour: str) -> int:
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return int((np.asarray(picture) == wanted).all(-1).sum())


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    low, high = sorted((light(one), light(other)))
    return high / low


# -------------------------------------------------------------------------------------------------------------- side by side


def test_two_reports_side_by_side(made_up: Report) -> None:
    other = replace(
        made_up,
        title="B",
        kernels=(replace(made_up.kernels[0], winner="stock"), KernelRow("linear", "8x8", "cublas", "faster")),
        refusals=(*made_up.refusals, RefusalRow("linear", "cuda", "odd size", "cublas", 1)),
    )
    text = report.compare_text(made_up, other)
    for words in ("A cuda precise, B stock", "linear 8x8: B cublas, not in A", "only in B: linear: cuda", "B / A"):
        assert words in text, text
    none = report.gather()
    assert "No passes to compare" in report.compare_text(none, none)
    pair = report.draw_pair(made_up, none)
    assert pair.width == 2 * canvas.WIDTH and pair.height == report.draw(made_up).height


# ---------------------------------------------------------------------------------------------------------------- the nodes


def test_the_node_shows_hands_on_and_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, streamed: Any) -> None:
    for get in ("output", "temp"):
        monkeypatch.setattr(folder_paths, f"get_{get}_directory", lambda get=get: str(tmp_path / get))
    latent = {"samples": torch.zeros(1)}
    output = run(ReportNode, latent, streamed, write_json=True, write_trace=True)
    assert output.result[0] is latent and isinstance(output.result[1], Report)
    (picture,) = output.ui["images"]
    assert Image.open(tmp_path / "temp" / picture["subfolder"] / picture["filename"]).width == canvas.WIDTH
    assert output.ui["text"] == (output.result[2],) and "written: " in output.result[2]
    names = sorted(path.name for path in (tmp_path / "output" / "fusestream").iterdir())
    assert names == ["report_00001_.json", "report_00001_.trace.json"]
    found, trace = (json.loads((tmp_path / "output" / "fusestream" / name).read_text()) for name in names)
    assert found["streams"] and {event["ph"] for event in trace["traceEvents"]} >= {"X", "M"}
    again = run(ReportNode, latent, None, write_json=True, write_trace=True)
    assert "No trace was written" in again.result[2] and "report_00002_.json" in again.result[2]
    both = run(Compare, output.result[1], again.result[1], theme="light")
    assert "B / A" in both.result[0] and both.ui["images"]


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("report\0", "a letter that no file name can have"),
        ("a\nb/report", "a letter that no file name can have"),
        ("fusestream/" + "x" * 300, "too long"),
        ("é" * 150, "too long"),
        ("x/" * 600, "too long"),
    ],
)
def test_a_name_that_no_file_can_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, streamed: Any, prefix: str, words: str
) -> None:
    """It is told before the queue. From another node it comes too late for that: the report is made without files."""
    assert words in str(ReportNode.validate_inputs(prefix))
    for get in ("output", "temp"):
        monkeypatch.setattr(folder_paths, f"get_{get}_directory", lambda get=get: str(tmp_path / get))
    output = run(ReportNode, "after", None, write_json=True, filename_prefix=prefix)
    assert output.result[0] == "after" and "\nNo file was written: " in output.result[2]
    assert words in output.result[2] and str(tmp_path) not in output.result[2]


def test_a_folder_that_takes_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for get in ("output", "temp"):
        monkeypatch.setattr(folder_paths, f"get_{get}_directory", lambda get=get: str(tmp_path / get))
    (tmp_path / "output").write_text("a file")
    output = run(ReportNode, "after", None, write_json=True)
    assert output.result[0] == "after" and "No file was written: " in output.result[2]
    assert str(tmp_path) not in output.result[2]
    assert ReportNode.validate_inputs("fusestream/report") is True and ReportNode.validate_inputs(None) is True


def test_counts_in_words() -> None:
    assert [counted(n, "pass", "passes") for n in (0, 1, 2)] == ["0 passes", "1 pass", "2 passes"]
    one = Report(title="t", device="d", state="s", streams=True, passes=1, layers=(LayerRow("b", 1, 1, True),), slots=1)
    text = report.as_text(one)
    assert "a pass through 1 block: " in text and "; 1 pass seen" in text and " with room for 1;" in text


def run(node: Any, *values: Any, **widgets: Any) -> Any:
    """As the server calls it: on a clone of the class that knows its hidden inputs."""
    clone = node.PREPARE_CLASS_CLONE(None)
    return clone.execute(*values, **widgets)

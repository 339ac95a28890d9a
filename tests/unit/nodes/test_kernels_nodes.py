"""The Kernels nodes: another policy downstream, the same weights, and nothing changed upstream."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fusestream import checkpoints, fusion
from fusestream.bench import prediction
from fusestream.bench.predicted import told
from fusestream.fusion.base.policy import policy_of
from fusestream.fusion.families.t5 import encoder as t5
from fusestream.fusion.families.wan import block as wan
from fusestream.fusion.families.wan.vae import layers as wan_vae_layers
from fusestream.fusion.fused import attention
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.load.other_policy import NotOurs
from fusestream.fusion.weights import integer_weights, products, storage
from fusestream.kernels_cuda import OPS, KernelRefused
from fusestream.kernels_cuda.ops.matmul import matrices
from fusestream.kernels_cuda.policy import PRECISIONS
from fusestream.nodes import declare, gains
from fusestream.nodes.kernels import (
    MODEL_SWITCHES,
    SAME,
    TEXT_SWITCHES,
    VAE_SWITCHES,
    ModelKernels,
    TextEncoderKernels,
    VAEKernels,
    policy_from,
)
from fusestream.nodes.loaders import CheckpointLoader, DiffusionModelLoader, TextEncoderLoader, VAELoader

ROOT = Path(__file__).resolve().parents[3]
HELP, LOADER_PAGE = ROOT / "nodes" / "web" / "docs", "FuseStreamDiffusionModelLoader.md"
AUTO, OFF = fusion.KernelPolicy.of("auto"), fusion.KernelPolicy.of("off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def out_of(output: Any) -> Any:
    return output.result[0]


# ---------------------------------------------------------------------------------------------------------- the policy


@pytest.mark.parametrize("switches", [MODEL_SWITCHES, TEXT_SWITCHES, VAE_SWITCHES])
def test_switches_become_a_policy(switches: Any) -> None:
    names = [op for switch in switches for op in switch.ops]
    assert len(names) == len(set(names)) and set(names) <= OPS.keys()
    assert policy_from("auto", "precise", switches, {}) == AUTO
    assert policy_from("on", "fast", switches, {s.id: SAME for s in switches}) == fusion.KernelPolicy.of(
        "on", precision="fast"
    )
    for switch in switches:
        policy = policy_from("auto", "precise", switches, {switch.id: "off"})
        assert {op for op in names if policy.mode(op) == "off"} == set(switch.ops)
        policy = policy_from("off", "precise", switches, {switch.id: "on"})
        assert {op for op in names if policy.mode(op) == "on"} == set(switch.ops)


def test_all_off_one_by_one_is_stock() -> None:
    assert policy_from("auto", "precise", MODEL_SWITCHES, {s.id: "off" for s in MODEL_SWITCHES}) == OFF


def test_off_is_asked_of_all_kernels_or_of_some() -> None:
    of = fusion.KernelPolicy.of
    assert fusion.all_off(OFF) and fusion.all_off(of("off", conv="off")) and not fusion.all_off(AUTO)
    assert not fusion.all_off(of("off", conv="on")) and fusion.all_off(of("off", conv="on"), t5.OPS)
    every = dict.fromkeys(t5.OPS, "off")
    assert fusion.all_off(of("auto", **every), t5.OPS) and not fusion.all_off(of("auto", **every))
    assert not fusion.all_off(of("auto", **{**every, "linear": "auto"}), t5.OPS)


def test_every_op_that_a_wan_block_and_a_text_encoder_call_has_a_switch() -> None:
    assert set(t5.OPS) | {"to_half"} <= {op for switch in TEXT_SWITCHES for op in switch.ops}
    model = {op for switch in MODEL_SWITCHES for op in switch.ops}
    for module in (wan, products, matrices, integer_weights, storage):
        assert {name for name in OPS if getattr(module, name, None) is not None and name != "attention"} <= model
    vae = {op for switch in VAE_SWITCHES for op in switch.ops}
    assert {name for name in OPS if getattr(wan_vae_layers, name, None) is not None and name != "attention"} <= vae


@pytest.mark.parametrize("gain", gains.ALL, ids=lambda gain: f"{gain.op} {gain.label}")
def test_gains_in_tooltips_are_measured(gain: gains.Gain) -> None:
    results = json.loads((ROOT / "bench" / "results" / "nvidia-h200.json").read_text(encoding="utf-8"))
    (row,) = [row for row in results["kernels"]["rows"] if (row["op"], row["label"]) == (gain.op, gain.label)]
    assert gain.times == pytest.approx(row[gain.column], rel=0.1), "measured anew? Write the figure into nodes/gains.py"


@pytest.mark.parametrize("page", [*sorted(HELP.glob("FuseStreamDiffusionModelLoader/*.md")), HELP / LOADER_PAGE])
def test_what_a_quality_gains_is_predicted(page: Path) -> None:
    found = {(one.card.name, one.work.name): one.told for one in told.predictions(prediction.load())}
    quoted = re.findall(r"(RTX \d+ ?\w*) (\d\.\d) (?:and|と|和) (\d\.\d)", page.read_text(encoding="utf-8"))
    assert len(quoted) == 3
    for card, *gained in quoted:
        seconds = found[card, "Wan 14B 480x832x81"]
        times = [seconds["precise"].seconds / seconds[who].seconds for who in ("fast", "turbo")]
        assert [float(one) for one in gained] == pytest.approx(times, abs=0.06), (
            "predicted anew? Write it into the page"
        )


def test_a_quality_is_a_precision_and_none_leaves_it_to_that() -> None:
    qualities = ("by precision", "auto", "Exact", "Balanced", "Fastest", "Draft")
    told = [declare.precision_of(quality, "fast") for quality in qualities]
    assert told == ["fast", "auto", "precise", "fast", "turbo", "turbo"]
    for node in (DiffusionModelLoader, CheckpointLoader, TextEncoderLoader, VAELoader):
        advanced = {one.id for one in node.define_schema().inputs if one.advanced}
        assert advanced - {"third_file", "fourth_file"} == {"kernels", "precision"}


def test_a_kernels_node_shows_the_choice_of_all_first() -> None:
    for node in (ModelKernels, TextEncoderKernels, VAEKernels):
        advanced = {one.id for one in node.define_schema().inputs if one.advanced}
        assert advanced == {switch.id for switch in node.SWITCHES} and advanced


def test_every_node_offers_every_tier() -> None:
    """What a workflow stored keeps its meaning: values stay, and what it has none of is precise."""
    for node in (DiffusionModelLoader, TextEncoderLoader, VAELoader, ModelKernels, TextEncoderKernels, VAEKernels):
        found = next(one for one in node.define_schema().inputs if one.id == "precision")
        assert found.options == ["precise", "fast", "turbo", *(["auto"] if found.default == "auto" else [])]
        assert set(PRECISIONS) == {*found.options, "auto"}
        assert all(word in found.tooltip for word in found.options if word != "precise"), node


# ------------------------------------------------------------------------------------------------------ the MODEL's


@pytest.mark.parametrize("streamed", [False, True])
def test_two_branches_of_one_model(folder: Path, streamed: bool) -> None:
    path = str(checkpoints.write("wan_t2v", folder))
    load = load_streamed_diffusion_model if streamed else fusion.load_diffusion_model
    model = load(path, policy=AUTO)
    branch = out_of(ModelKernels.execute(model, "auto", rope="off"))
    again = out_of(ModelKernels.execute(branch, "off"))
    assert type(branch) is type(model) and branch.model is model.model and branch is not model
    policies = [policy_of(one.model_options["transformer_options"]) for one in (model, branch, again)]
    assert policies == [AUTO, fusion.KernelPolicy.of("auto", rms_rope_="off"), OFF]
    hooks = [one.model_options["transformer_options"][attention.HOOK].policy for one in (model, branch, again)]
    assert hooks == policies


def test_an_override_of_another_node_stays(folder: Path) -> None:
    model = fusion.load_diffusion_model(str(checkpoints.write("wan_t2v", folder)))
    theirs: Any = lambda stock, *a, **k: stock(*a, **k)  # noqa: E731
    model.model_options["transformer_options"][attention.HOOK] = theirs
    options = out_of(ModelKernels.execute(model, "off")).model_options["transformer_options"]
    assert options[attention.HOOK] is theirs and policy_of(options) == OFF


# ------------------------------------------------------------------------------------------------------- the CLIP's


@pytest.mark.parametrize(("loaded", "budget"), [("auto", 0.0), ("off", -1.0)])
def test_two_branches_of_one_text_encoder(folder: Path, loaded: Any, budget: float) -> None:
    """In turns: the policy is of the one that ComfyUI has loaded last."""
    clip = fusion.load_text_encoder(str(checkpoints.write("umt5", folder)), [], fusion.KernelPolicy.of(loaded), budget)
    branch = out_of(TextEncoderKernels.execute(clip, "auto", "fast", attention="off"))
    both: Any = dict.fromkeys(("attention", "decode_attention"), "off")
    asked, of_loader = fusion.KernelPolicy.of("auto", precision="fast", **both), fusion.KernelPolicy.of(loaded)
    assert branch.cond_stage_model is clip.cond_stage_model
    stack = clip.cond_stage_model.umt5xxl.transformer.encoder
    for one, policy in ((branch, asked), (clip, of_loader), (branch, asked), (branch, asked), (clip, of_loader)):
        one.load_model()
        assert stack.fusestream_policy == policy


def test_a_kernel_that_is_on_reaches_the_text_encoder(folder: Path) -> None:
    clip = fusion.load_text_encoder(str(checkpoints.write("umt5", folder)), [])
    branch = out_of(TextEncoderKernels.execute(clip, "on"))
    with pytest.raises(KernelRefused, match="kernels is 'on' for this text encoder"):
        branch.encode_from_tokens(clip.tokenize("a fox"))  # before anything is computed
    stack = clip.cond_stage_model.umt5xxl.transformer.encoder
    x = torch.randn(1, 4, stack.block[0].layer[0].SelfAttention.q.in_features)
    off = out_of(TextEncoderKernels.execute(clip, "off"))
    found = []
    for one in (clip, off):
        one.load_model()
        found.append(stack(x.clone(), attention_mask=torch.ones(1, 4))[0])
    assert torch.equal(*found) and found[0].std() > 0


def test_a_clip_without_t5_is_refused() -> None:
    class Clip:
        cond_stage_model = torch.nn.Linear(1, 1)

    with pytest.raises(NotOurs, match="no T5 or UMT5"):
        TextEncoderKernels.execute(Clip())


# -------------------------------------------------------------------------------------------------------- the VAE's


def test_two_branches_of_one_vae(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(checkpoints.write("wan_vae", folder))
    seen: set[Any] = set()
    conv3d = wan_vae_layers.conv3d
    monkeypatch.setattr(
        wan_vae_layers, "conv3d", lambda *a, policy, **k: seen.add(policy) or conv3d(*a, policy=policy, **k)
    )
    vae = fusion.load_vae(path, AUTO)
    branch = out_of(VAEKernels.execute(vae, "off"))
    third = out_of(VAEKernels.execute(branch, "auto", norms="off"))
    assert branch is not vae and branch.first_stage_model is vae.first_stage_model
    latents = torch.randn(1, vae.latent_channels, 1, 2, 2)
    frames = {}
    without_norms = fusion.KernelPolicy.of("auto", channel_rms_silu="off", group_moments="off", group_norm_silu="off")
    for one, policy in ((branch, OFF), (vae, AUTO), (third, without_norms)):
        seen.clear()
        frames[policy] = one.decode(latents.clone())
        assert seen == {policy}
    assert torch.allclose(frames[OFF], frames[AUTO], atol=1e-2)


def test_a_vae_that_is_stocks_is_refused(folder: Path) -> None:
    vae = fusion.load_vae(str(checkpoints.write("wan_vae", folder)), OFF)
    with pytest.raises(NotOurs, match=r"computes as ComfyUI's.*FuseStream VAE Loader"):
        VAEKernels.execute(vae, "auto")

"""The specimens of text encoders and VAEs: ComfyUI as it is passes, and one that computes something else does not."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import comfy.clip_model as clip
import comfy.ldm.modules.diffusionmodules.model as image_parts
import comfy.ldm.wan.vae as wan21
import comfy.ldm.wan.vae2_2 as wan22
import comfy.sd1_clip as encoders
import comfy.text_encoders.qwen35 as eyes
import pytest
import torch
from comfy.ldm.models import autoencoder
from comfy.taesd import taesd
from comfy.text_encoders import llama, qwen3vl, t5
from stock_mutations import mutated

from fusestream.fusion.base.family import Family
from fusestream.fusion.base.specimen import Specimen
from fusestream.fusion.compatibility.signatures import same_parameters
from fusestream.fusion.compatibility.trial import difference
from fusestream.fusion.families.clip import CLIP
from fusestream.fusion.families.image_vae import IMAGE_VAE, TINY_VAE
from fusestream.fusion.families.qwen3 import QWEN3
from fusestream.fusion.families.qwen3_vl import QWEN3_VL
from fusestream.fusion.families.t5 import T5
from fusestream.fusion.families.wan import WAN_VAE

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = (CLIP, T5, QWEN3, QWEN3_VL, IMAGE_VAE, TINY_VAE, WAN_VAE)
CPU = torch.device("cpu")


def of(family: Family) -> list[Specimen]:
    assert family.specimens is not None
    return list(family.specimens())


SPECIMENS = {specimen.name: specimen for family in FAMILIES for specimen in of(family)}


class Mutation(NamedTuple):
    """What is changed of stock's code, and what is said of it."""

    owner: type | ModuleType
    name: str
    old: str
    new: str
    said: str = "its result differs by"


OF_CLIP = (
    Mutation(clip.CLIPLayer, "forward", "self.self_attn(self", "0.5 * self.self_attn(self"),
    Mutation(clip.CLIPLayer, "forward", "x += self.mlp(self.layer_norm2(x))", "x += self.mlp(self.layer_norm1(x))"),
    Mutation(clip.CLIPMLP, "forward", "x = self.activation(x)", "pass"),
    Mutation(clip.CLIPAttention, "forward", "self.heads, mask)", "self.heads, None)"),
    Mutation(clip.CLIPEncoder, "forward", "intermediate = x.clone()", "intermediate = -x"),
    Mutation(
        clip.CLIPEncoder, "forward", "intermediate_output=None", "intermediate_output=None, gain=1.0",
        "CLIPEncoder.forward takes gain",
    ),
    Mutation(
        clip.CLIPEncoder, "forward", "intermediate_output=None", "intermediate_output='all'",
        "CLIPEncoder.forward has another default for intermediate_output: 'all'",
    ),
)  # fmt: skip
OF_T5 = (
    Mutation(t5.T5Block, "forward", "x = self.layer[-1](x)", "x = 0.5 * self.layer[-1](x)"),
    Mutation(t5.T5LayerFF, "forward", "x += forwarded_states", "x -= forwarded_states"),
    Mutation(t5.T5Attention, "forward", " * ((k.shape[-1] / self.num_heads) ** 0.5)", ""),
    Mutation(
        t5.T5Attention, "compute_bias", "memory_position - context_position", "context_position - memory_position"
    ),
    Mutation(t5.T5LayerNorm, "forward", "variance + self.variance_epsilon", "variance + 1e-3"),
    Mutation(t5.T5Stack, "forward", "x = self.final_layer_norm(x)", "pass"),
    Mutation(t5.T5Stack, "forward", "embeds_info=[]", "embeds_info=[], gain=2.0", "T5Stack.forward takes gain"),
    Mutation(
        t5.T5Stack, "forward", "final_layer_norm_intermediate=True", "final_layer_norm_intermediate=False",
        "T5Stack.forward has another default for final_layer_norm_intermediate: False",
    ),
)  # fmt: skip
OF_LANGUAGE = (
    Mutation(llama.TransformerBlock, "forward", "x = self.mlp(x)", "x = 0.5 * self.mlp(x)"),
    Mutation(llama.Attention, "forward", "xq = self.q_norm(xq)", "pass"),
    Mutation(llama.MLP, "forward", "self.activation(self.gate_proj(x))", "self.gate_proj(x)"),
    Mutation(llama, "apply_rope", "q_split :], nsin", "q_split :], sin"),
    Mutation(
        llama.TransformerBlock, "forward", "optimized_attention=None,", "optimized_attention=None, gate=1.0,",
        "TransformerBlock.forward takes gate",
    ),
    Mutation(
        encoders.SDClipModel, "forward", "forward(self, tokens)", "forward(self, tokens, gain=1.0)",
        "SDClipModel.forward takes gain",
    ),
    Mutation(
        llama.BaseGenerate, "generate", "repetition_penalty=1.0", "repetition_penalty=1.1",
        "BaseGenerate.generate has another default for repetition_penalty: 1.1",
    ),
    Mutation(
        llama.BaseGenerate, "generate", "temperature=1.0, top_k=50", "top_k=50, temperature=1.0",
        "BaseGenerate.generate takes temperature in another place",
    ),
    Mutation(llama.BaseGenerate, "sample_token", "len(token_history) > 0", "len(token_history) > 99"),
    Mutation(llama.BaseQwen3, "logits", "x[:, -1:]", "-x[:, -1:]"),
)  # fmt: skip
OF_EYES = (
    Mutation(eyes.Qwen35VisionBlock, "forward", "return x + self.mlp", "return x - self.mlp"),
    Mutation(eyes.Qwen35VisionMLP, "forward", ', approximate="tanh"', ".abs()"),
    Mutation(eyes.Qwen35VisionAttention, "forward", "optimized_attention(q, k,", "optimized_attention(2 * q, k,"),
    Mutation(qwen3vl.Qwen3VLDeepstackMerger, "forward", "F.gelu(self.linear_fc1(x))", "self.linear_fc1(x)"),
    Mutation(eyes.Qwen35VisionPatchMerger, "forward", "F.gelu(self.linear_fc1(x))", "self.linear_fc1(x)"),
    Mutation(qwen3vl.Qwen3VL, "preprocess_embed", "image_mean=[0.5, 0.5, 0.5]", "image_mean=[0.4, 0.5, 0.5]"),
    Mutation(llama.Llama2_, "forward", "= x[visual_pos_masks] + deepstack", "= x[visual_pos_masks] - deepstack"),
    Mutation(
        eyes.Qwen35VisionBlock, "forward", "optimized_attention=None)", "optimized_attention=None, gate=1.0)",
        "Qwen35VisionBlock.forward takes gate",
    ),
)  # fmt: skip
OF_IMAGES = (
    Mutation(image_parts.ResnetBlock, "forward", "return x+h", "return x-h"),
    Mutation(image_parts.ResnetBlock, "forward", "h = self.swish(h)\n", "\n"),
    Mutation(image_parts.AttnBlock, "forward", "return x+h_", "return x+2*h_"),
    Mutation(image_parts.Downsample, "forward", "pad = (0, 1, 0, 1)", "pad = (1, 0, 1, 0)"),
    Mutation(image_parts, "interpolate_up", '"nearest"', '"bilinear"'),
    Mutation(image_parts.Decoder, "forward", "nonlinearity(h1)", "h1"),
    Mutation(image_parts.Encoder, "forward", "nonlinearity(h)", "h"),
    Mutation(image_parts.Encoder, "forward", "(self, x)", "(self, x, gain=1.0)", "Encoder.forward takes gain"),
)  # fmt: skip
OF_SMALL_IMAGES = (
    Mutation(taesd.Block, "forward", "self.fuse(self.conv(x) + self.skip(x))", "self.conv(x) + self.skip(x)"),
    Mutation(taesd.TAESD, "decode", "sub(0.5).mul(2)", "mul(2)"),
    Mutation(taesd.TAESD, "encode", "x * 0.5 + 0.5", "x"),
    Mutation(taesd.TAESD, "decode", "x: torch.Tensor)", "x: torch.Tensor, sharp: bool = True)", "TAESD.decode takes sharp"),
)  # fmt: skip
OF_WAN = (
    Mutation(wan21.RMS_norm, "forward", "* self.scale *", "*"),
    Mutation(wan21.AttentionBlock, "forward", "return x + identity", "return x - identity"),
    Mutation(wan21.CausalConv3d, "forward", "[padding, cache_x, x]", "[padding, x, cache_x]"),
)
OF_WAN21 = (
    Mutation(wan21.ResidualBlock, "forward", "return x + self.shortcut(old_x)", "return x"),
    Mutation(wan21.Resample, "forward", "(x[:, 0, :, :, :, :], x[:, 1,", "(x[:, 1, :, :, :, :], x[:, 0,"),
    Mutation(wan21.WanVAE, "decode", "self, z)", "self, z, tiled=False)", "WanVAE.decode takes tiled"),
)
OF_WAN22 = (
    Mutation(wan22.ResidualBlock, "forward", "return x + self.shortcut(old_x)", "return x"),
    Mutation(wan22.DupUp3D, "forward", "0, 1, 5, 2, 6, 3, 7, 4", "0, 1, 5, 2, 6, 4, 7, 3"),
    Mutation(wan22.Resample, "forward", "(x[:, 0, :, :, :, :], x[:, 1,", "(x[:, 1, :, :, :, :], x[:, 0,"),
    Mutation(wan22.WanVAE, "decode", "self, z)", "self, z, tiled=False)", "WanVAE.decode takes tiled"),
)
BEHIND_FIRST = Mutation(
    autoencoder.AutoencodingEngineLegacy, "decode", "self.post_quant_conv(z)", "2 * self.post_quant_conv(z)"
)
OF_DECODE = Mutation(
    autoencoder.AutoencodingEngine, "decode", "z: torch.Tensor, **", "z: torch.Tensor, tiled: bool = False, **",
    "AutoencodingEngine.decode takes tiled",
)  # fmt: skip

MUTATIONS = {
    "CLIP-L encoder": OF_CLIP,
    "CLIP-G encoder": OF_CLIP,
    "T5 encoder": (*OF_T5, Mutation(t5.T5DenseGatedActDense, "forward", "self.act(self.wi_0(x))", "self.wi_0(x)")),
    "UMT5 encoder": (*OF_T5, Mutation(encoders.SDClipModel, "forward", "if self.zero_out_masked:", "if False:")),
    "T5 encoder without gates": (*OF_T5, Mutation(t5.T5DenseActDense, "forward", "self.act(self.wi(x))", "self.wi(x)")),
    "Qwen3 encoder": (*OF_LANGUAGE, Mutation(llama.BaseGenerate, "generate", "manual_seed(seed)", "manual_seed(0)")),
    "Qwen3-VL encoder": (*OF_LANGUAGE, *OF_EYES),
    "VAE of Stable Diffusion": OF_IMAGES,
    "VAE of Flux": (*OF_IMAGES, OF_DECODE),
    "VAE of Flux.2": OF_IMAGES,
    "TAESD": OF_SMALL_IMAGES,
    "TAESD of Flux.2": (*OF_SMALL_IMAGES, Mutation(taesd.Block, "forward", "x = x + self.pool(x)", "x = x - self.pool(x)")),
    "Wan 2.1 VAE": (*OF_WAN, *OF_WAN21),
    "Wan 2.2 VAE": (*OF_WAN, *OF_WAN22),
}  # fmt: skip


def judged(specimen: Specimen) -> list[str | None]:
    return [difference(specimen, CPU, getattr(torch, dtype)) for dtype in specimen.dtypes]


@pytest.mark.parametrize("name", SPECIMENS)
def test_this_comfyui_computes_what_ours_stands_for(name: str) -> None:
    assert judged(SPECIMENS[name]) == [None] * len(SPECIMENS[name].dtypes)


@pytest.mark.every_other
@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        pytest.param(name, mutation, id=f"{name}: {mutation.owner.__name__}.{mutation.name}, {mutation.new}")
        for name, mutations in MUTATIONS.items()
        for mutation in mutations
    ],
)
def test_another_comfyui_is_told(name: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    *change, said = mutation
    mutated(monkeypatch, *change)
    [found] = judged(SPECIMENS[name])
    assert found is not None and said in found


def test_each_specimen_is_tried_in_another_comfyui() -> None:
    assert MUTATIONS.keys() == SPECIMENS.keys() and all(len(each) >= 3 for each in MUTATIONS.values())


def test_what_ours_drops_is_told() -> None:
    """A name with an underscore takes what nobody looks at; the place of what stock takes by number is not known."""

    def stock(self: object, z: object, tiled: bool = False) -> None: ...
    def drops(self: object, z: object, **_options: object) -> None: ...
    def passes_on(self: object, z: object, **options: object) -> None: ...
    def anything(self: object, *args: object, **kwargs: object) -> None: ...

    assert [word.rsplit(".", 1)[1] for word in same_parameters(drops, stock)] == ["stock takes tiled"]
    assert not list(same_parameters(passes_on, stock)) and not list(same_parameters(drops, anything))

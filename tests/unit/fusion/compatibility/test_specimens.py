"""The specimens of every family: ComfyUI as it is passes, and one that computes something else does not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import comfy.clip_model as clip
import comfy.ldm.flux.layers as flux
import comfy.ldm.lumina.model as lumina
import comfy.ldm.modules.diffusionmodules.model as image_parts
import comfy.ldm.wan.model as wan
import comfy.ldm.wan.vae as wan21
import comfy.ldm.wan.vae2_2 as wan22
import comfy.memory_management
import comfy.sd1_clip as encoders
import comfy.text_encoders.qwen35 as vision
import comfy.text_encoders.qwen_vl as qwen2_vision
import pytest
import torch
from comfy.ldm.models import autoencoder
from comfy.ldm.modules import attention
from comfy.ldm.modules.diffusionmodules import openaimodel
from comfy.taesd import taesd
from comfy.text_encoders import llama, qwen3vl, t5
from stock_mutations import mutated

from bed import comfyui
from bed.depth import is_thorough
from fusestream.fusion.base import needed_comfyui
from fusestream.fusion.base.family import Role
from fusestream.fusion.base.specimen import Specimen
from fusestream.fusion.compatibility import verdicts
from fusestream.fusion.compatibility.signatures import same_parameters
from fusestream.fusion.compatibility.trial import difference
from fusestream.fusion.families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread", "as_comfyui_runs")

CPU = torch.device("cpu")
FAMILY_OF = {specimen.name: family for family in FAMILIES if family.specimens for specimen in family.specimens()}
SPECIMENS = {specimen.name: specimen for family in FAMILIES if family.specimens for specimen in family.specimens()}


class Change(NamedTuple):
    """What a newer ComfyUI might have instead of a text of its code, and what is said of it."""

    owner: type | ModuleType
    old: str
    new: str
    said: str = "its result differs by"
    function: str = "forward"


# By specimens. Where several have it in common each change is made for one of them, with --thorough for all.
CHANGES: dict[str, tuple[Change, ...]] = {
    "Wan block": (
        Change(wan.WanSelfAttention, '"q": q, "k": k', '"q": k, "k": q', "patch it"),
        Change(wan.WanAttentionBlock, '"attn2_patch" in patches', '"attn2_patch" not in patches', "patch"),
        Change(
            wan.WanAttentionBlock,
            "x = torch.addcmul(x, y, repeat_e(e[2], x))",
            "x = torch.addcmul(x, y, repeat_e(e[2], x).sigmoid())",
        ),
        Change(wan.WanAttentionBlock, "transformer_options={},", "gate=None, transformer_options={},", "gate"),
        Change(wan.WanAttentionBlock, "context_img_len=257", "context_img_len=729", "context_img_len"),
        Change(wan.WanAttentionBlock, "self.cross_attn(self.norm3(x)", "self.cross_attn(x"),
        Change(wan.WanAttentionBlock, 'get("patches", {})', 'get("patches_2", {})', "patches_2"),
        Change(wan.WanSelfAttention, "heads=self.num_heads,", "heads=self.num_heads, scale=0.1,"),
        Change(wan.WanSelfAttention, "return apply_rope1(k, freqs)", "return k"),
        Change(wan.WanT2VCrossAttention, "self.norm_k(self.k(context))", "self.k(context)"),
    ),
    "Flux.1 double block": (
        Change(flux.DoubleStreamBlock, "mask=attn_mask, transformer", "mask=None, transformer"),
        Change(flux.DoubleStreamBlock, '"img_slice"] = [txt.shape[1],', '"img_slice"] = [0,', "patch it"),
        Change(flux.DoubleStreamBlock, "self.txt_norm2(txt)", "txt"),
        Change(flux.QKNorm, "self.key_norm(k)", "k"),
    ),
    "Flux.2 single block": (
        Change(
            flux.SingleStreamBlock, "attn = p(attn, extra_options)", "attn = p(attn * 2, extra_options)", "patch it"
        ),
        Change(flux.SiLUActivation, "x1, x2 = x.chunk", "x2, x1 = x.chunk"),
    ),
    "U-Net of SD 1.5's kind": (
        Change(attention.BasicTransformerBlock, "x = p(x, extra_options)", "x = p(n, extra_options)", "patch it"),
        Change(openaimodel.ResBlock, "h = h + emb_out", "h = h * (1 + emb_out)", function="_forward"),
        Change(openaimodel.ResBlock, "self, x, emb)", "self, x, emb, scale=1)", "scale"),
        Change(openaimodel.Upsample, 'mode="nearest"', 'mode="bilinear"'),
        Change(openaimodel.Downsample, "self.op(x)", "self.op(x).tanh()"),
        Change(openaimodel.UNetModel, "control=None,", "control=None, guidance=None,", "another place"),
    ),
    "U-Net of SDXL's kind": (
        Change(attention.BasicTransformerBlock, "value_attn2 = context_attn2", "value_attn2 = n", "multiplied"),
        Change(attention.SpatialTransformer, "return x + x_in", "return x"),
        Change(attention.BasicTransformerBlock, "n = self.norm2(x)", "n = x"),
        Change(attention.BasicTransformerBlock, "context=None,", "context=None, pooled=None,", "pooled"),
        Change(attention.GEGLU, "x * F.gelu(gate)", "x * F.silu(gate)"),
        Change(
            attention.CrossAttention,
            "attn_precision=self.attn_precision,",
            "attn_precision=self.attn_precision, low_precision_attention=False,",
            "low_precision_attention",
        ),
    ),
    "Wan block that sees a picture": (
        Change(
            wan.WanI2VCrossAttention,
            "img_x = optimized_attention(q, k_img, v_img, ",
            "img_x = optimized_attention(q, k_img, v_img, precise=True, ",
            "precise",
        ),
        Change(wan.WanI2VCrossAttention, "x = x + img_x", "x = x - img_x"),
    ),
    "VACE block": (
        Change(wan.VaceWanAttentionBlock, "self.before_proj(c) + x", "self.before_proj(c + x)"),
        Change(wan.VaceWanAttentionBlock, "return c_skip, c", "return c, c_skip"),
    ),
    "Flux.2 double block": (
        Change(flux, "tensor * m_mult", "tensor * m_mult.tanh()", function="apply_mod"),
        Change(flux.DoubleStreamBlock, "attn_mask=None,", "attn_mask=None, ref=None,", "ref"),
        Change(flux.DoubleStreamBlock, "torch.cat((txt_v, img_v)", "torch.cat((img_v, txt_v)", "gives|differs"),
    ),
    "Flux.1 single block": (
        Change(flux.SingleStreamBlock, "mlp = self.mlp_act(mlp)\n    output", "output"),
        Change(
            flux.SingleStreamBlock, 'get("patches", {})', 'get("patches", {}), transformer_options.get("tau")', "tau"
        ),
    ),
    "Z-Image block": (
        Change(lumina.JointTransformerBlock, "gate_mlp.unsqueeze(1).tanh()", "gate_mlp.unsqueeze(1)"),
        Change(
            lumina.JointTransformerBlock, "timestep_zero_index=None,", "timestep_zero_index=0,", "timestep_zero_index"
        ),
        Change(lumina.FeedForward, "self.w1(x), self.w3(x)", "self.w3(x), self.w1(x)"),
    ),
    "Z-Image block with references": (Change(lumina, "scale = (1 +", "scale = (2 +", function="modulate"),),
    "Lumina block": (Change(lumina.JointAttention, "xq, xk, xv = ", "xq, xv, xk = "),),
    "Z-Image block of the prompt": (
        Change(lumina.JointTransformerBlock, "x = x + self.attention_norm2(", "x = x + 0.5 * self.attention_norm2("),
    ),
    "CLIP-L encoder, CLIP-G encoder": (
        Change(clip.CLIPLayer, "self.self_attn(self", "0.5 * self.self_attn(self"),
        Change(clip.CLIPLayer, "x += self.mlp(self.layer_norm2(x))", "x += self.mlp(self.layer_norm1(x))"),
        Change(clip.CLIPMLP, "x = self.activation(x)", "pass"),
        Change(clip.CLIPAttention, "self.heads, mask)", "self.heads, None)"),
        Change(clip.CLIPEncoder, "intermediate = x.clone()", "intermediate = -x"),
        Change(clip.CLIPEncoder, "intermediate_output=None", "intermediate_output=None, gain=1.0", "takes gain"),
        Change(
            clip.CLIPEncoder,
            "intermediate_output=None",
            "intermediate_output='all'",
            "has another default for intermediate_output: 'all'",
        ),
    ),
    "T5 encoder, UMT5 encoder, T5 encoder without gates": (
        Change(t5.T5Block, "x = self.layer[-1](x)", "x = 0.5 * self.layer[-1](x)"),
        Change(t5.T5LayerFF, "x += forwarded_states", "x -= forwarded_states"),
        Change(t5.T5Attention, " * ((k.shape[-1] / self.num_heads) ** 0.5)", ""),
        Change(
            t5.T5Attention,
            "memory_position - context_position",
            "context_position - memory_position",
            function="compute_bias",
        ),
        Change(t5.T5LayerNorm, "variance + self.variance_epsilon", "variance + 1e-3"),
        Change(t5.T5Stack, "x = self.final_layer_norm(x)", "pass"),
        Change(t5.T5Stack, "embeds_info=[]", "embeds_info=[], gain=2.0", "takes gain"),
        Change(
            t5.T5Stack,
            "final_layer_norm_intermediate=True",
            "final_layer_norm_intermediate=False",
            "has another default for final_layer_norm_intermediate: False",
        ),
    ),
    "Qwen3 encoder, Qwen3-VL encoder": (
        Change(llama.TransformerBlock, "x = self.mlp(x)", "x = 0.5 * self.mlp(x)"),
        Change(llama.Attention, "xq = self.q_norm(xq)", "pass"),
        Change(llama.MLP, "self.activation(self.gate_proj(x))", "self.gate_proj(x)"),
        Change(llama, "q_split :], nsin", "q_split :], sin", function="apply_rope"),
        Change(
            llama.TransformerBlock, "optimized_attention=None,", "optimized_attention=None, gate=1.0,", "takes gate"
        ),
        Change(encoders.SDClipModel, "forward(self, tokens)", "forward(self, tokens, gain=1.0)", "takes gain"),
        Change(
            llama.BaseGenerate,
            "repetition_penalty=1.0",
            "repetition_penalty=1.1",
            "has another default for repetition_penalty: 1.1",
            function="generate",
        ),
        Change(
            llama.BaseGenerate,
            "temperature=1.0, top_k=50",
            "top_k=50, temperature=1.0",
            "takes temperature in another place",
            function="generate",
        ),
        Change(llama.BaseGenerate, "len(token_history) > 0", "len(token_history) > 99", function="sample_token"),
        Change(llama.BaseQwen3, "x[:, -1:]", "-x[:, -1:]", function="logits"),
    ),
    "Qwen3-VL encoder": (
        Change(vision.Qwen35VisionBlock, "return x + self.mlp", "return x - self.mlp"),
        Change(vision.Qwen35VisionMLP, ', approximate="tanh"', ".abs()"),
        Change(vision.Qwen35VisionAttention, "optimized_attention(q, k,", "optimized_attention(2 * q, k,"),
        Change(qwen3vl.Qwen3VLDeepstackMerger, "F.gelu(self.linear_fc1(x))", "self.linear_fc1(x)"),
        Change(vision.Qwen35VisionPatchMerger, "F.gelu(self.linear_fc1(x))", "self.linear_fc1(x)"),
        Change(
            qwen3vl.Qwen3VL, "image_mean=[0.5, 0.5, 0.5]", "image_mean=[0.4, 0.5, 0.5]", function="preprocess_embed"
        ),
        Change(llama.Llama2_, "= x[visual_pos_masks] + deepstack", "= x[visual_pos_masks] - deepstack"),
        Change(
            vision.Qwen35VisionBlock, "optimized_attention=None)", "optimized_attention=None, gate=1.0)", "takes gate"
        ),
    ),
    "Qwen2.5-VL vision tower": (
        Change(qwen2_vision.VisionBlock, "hidden_states = residual + hidden_states", "hidden_states = residual"),
        Change(qwen2_vision.VisionMLP, "self.act_fn(self.gate_proj(hidden_state))", "self.gate_proj(hidden_state)"),
        Change(qwen2_vision.VisionAttention, "optimized_attention(q, k,", "optimized_attention(2 * q, k,"),
        Change(qwen2_vision.PatchMerger, "self.ln_q(x)", "x"),
        Change(qwen2_vision.VisionPatchEmbed, "return hidden_states", "return 2 * hidden_states"),
        Change(qwen2_vision.Qwen2VLVisionTransformer, "if i in self.fullatt", "if i not in self.fullatt"),
        Change(qwen2_vision.Qwen2VLVisionTransformer, "hidden_states[reverse_indices, :]", "hidden_states"),
        Change(
            qwen2_vision.Qwen2VLVisionTransformer,
            "self.window_size // self.spatial_merge_size",
            "self.window_size // 2 // self.spatial_merge_size",
            function="get_window_index",
        ),
        Change(
            qwen2_vision.Qwen2VLVisionTransformer,
            "image_grid_thw: Optional[torch.Tensor] = None,",
            "image_grid_thw: Optional[torch.Tensor] = None, early=False,",
            "takes early",
        ),
        Change(llama.Qwen25_7BVLI, 'embed["data"]', 'embed["data"].flip(1)', function="preprocess_embed"),
    ),
    "SigLIP": (
        Change(clip.CLIPLayer, "self.self_attn(self", "0.5 * self.self_attn(self"),
        Change(clip.CLIPEncoder, "intermediate = x.clone()", "intermediate = -x"),
        Change(clip.CLIPVision, "self.encoder(x, mask=None,", "self.encoder(x, mask=torch.ones(9, 9).log(),"),
        Change(clip.CLIPLayer, "mask=None, optimized", "mask=None, gate=1.0, optimized", "takes gate|another place"),
    ),
    "VAE of Stable Diffusion, VAE of Flux, VAE of Flux.2": (
        Change(image_parts.ResnetBlock, "return x+h", "return x-h"),
        Change(image_parts.ResnetBlock, "h = self.swish(h)\n", "\n"),
        Change(image_parts.AttnBlock, "return x+h_", "return x+2*h_"),
        Change(image_parts.Downsample, "pad = (0, 1, 0, 1)", "pad = (1, 0, 1, 0)"),
        Change(image_parts, '"nearest"', '"bilinear"', function="interpolate_up"),
        Change(image_parts.Decoder, "nonlinearity(h1)", "h1"),
        Change(image_parts.Encoder, "nonlinearity(h)", "h"),
        Change(image_parts.Encoder, "(self, x)", "(self, x, gain=1.0)", "takes gain"),
    ),
    "TAESD, TAESD of Flux.2": (
        Change(taesd.Block, "self.fuse(self.conv(x) + self.skip(x))", "self.conv(x) + self.skip(x)"),
        Change(taesd.TAESD, "sub(0.5).mul(2)", "mul(2)", function="decode"),
        Change(taesd.TAESD, "x * 0.5 + 0.5", "x", function="encode"),
        Change(
            taesd.TAESD, "x: torch.Tensor)", "x: torch.Tensor, sharp: bool = True)", "takes sharp", function="decode"
        ),
    ),
    "Wan 2.1 VAE, Wan 2.2 VAE": (
        Change(wan21.RMS_norm, "* self.scale *", "*"),
        Change(wan21.AttentionBlock, "return x + identity", "return x - identity"),
        Change(wan21.CausalConv3d, "[padding, cache_x, x]", "[padding, x, cache_x]"),
    ),
    "Wan 2.1 VAE": (
        Change(wan21.ResidualBlock, "return x + self.shortcut(old_x)", "return x"),
        Change(wan21.Resample, "(x[:, 0, :, :, :, :], x[:, 1,", "(x[:, 1, :, :, :, :], x[:, 0,"),
        Change(wan21.WanVAE, "self, z)", "self, z, tiled=False)", "takes tiled", function="decode"),
    ),
    "Wan 2.2 VAE": (
        Change(wan22.ResidualBlock, "return x + self.shortcut(old_x)", "return x"),
        Change(wan22.DupUp3D, "0, 1, 5, 2, 6, 3, 7, 4", "0, 1, 5, 2, 6, 4, 7, 3"),
        Change(wan22.Resample, "(x[:, 0, :, :, :, :], x[:, 1,", "(x[:, 1, :, :, :, :], x[:, 0,"),
        Change(wan22.WanVAE, "self, z)", "self, z, tiled=False)", "takes tiled", function="decode"),
    ),
    "T5 encoder": (Change(t5.T5DenseGatedActDense, "self.act(self.wi_0(x))", "self.wi_0(x)"),),
    "UMT5 encoder": (Change(encoders.SDClipModel, "if self.zero_out_masked:", "if False:"),),
    "T5 encoder without gates": (Change(t5.T5DenseActDense, "self.act(self.wi(x))", "self.wi(x)"),),
    "Qwen3 encoder": (Change(llama.BaseGenerate, "manual_seed(seed)", "manual_seed(0)", function="generate"),),
    "Qwen2.5 encoder, Llama 3 encoder, Ministral 3 encoder": (
        Change(llama.TransformerBlock, "x = self.mlp(x)", "x = 0.5 * self.mlp(x)"),
        Change(llama.Attention, "optimized_attention(xq,", "optimized_attention(xq * 1.1,"),
    ),
    "Qwen2.5 encoder": (
        Change(llama.Attention, "xv = self.v_proj(hidden_states)", "xv = self.v_proj(hidden_states).tanh()"),
    ),
    "Gemma 2 encoder, Gemma 3 encoder": (
        Change(llama.TransformerBlockGemma2, "x = self.post_attention_layernorm(x)", "pass"),
        Change(llama.TransformerBlockGemma2, "x = self.post_feedforward_layernorm(x)", "pass"),
        Change(llama.RMSNorm, "w = w + 1.0", "w = w + 0.9"),
    ),
    "Gemma 3 encoder": (
        Change(llama.TransformerBlockGemma2, "freqs_cis = freqs_cis[1]", "freqs_cis = freqs_cis[0]"),
        Change(llama.TransformerBlockGemma2, "diagonal=-self.sliding_attention", "diagonal=1 - self.sliding_attention"),
    ),
    "VAE of Flux": (
        Change(
            autoencoder.AutoencodingEngine,
            "z: torch.Tensor, **",
            "z: torch.Tensor, tiled: bool = False, **",
            "takes tiled",
            function="decode",
        ),
    ),
    "TAESD of Flux.2": (Change(taesd.Block, "x = x + self.pool(x)", "x = x - self.pool(x)"),),
}


def tried() -> Iterator[tuple[str, Change]]:
    for key, changes in CHANGES.items():
        names = key.split(", ")
        for i, change in enumerate(changes):
            yield from ((name, change) for name in (names if is_thorough() else [names[i % len(names)]]))


def judged(specimen: Specimen) -> str | None:
    found = (difference(specimen, CPU, getattr(torch, dtype)) for dtype in specimen.dtypes)
    return next((why for why in found if why is not None), None)


@pytest.mark.parametrize("name", SPECIMENS)
def test_this_comfyui_is_as_known(name: str) -> None:
    assert judged(SPECIMENS[name]) is None


@pytest.mark.parametrize("name", SPECIMENS)
def test_and_where_it_pages_vram(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is started on a card: operations have no weights until a file brings them."""
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    assert judged(SPECIMENS[name]) is None
    assert comfy.memory_management.aimdo_enabled


@pytest.mark.parametrize(
    ("name", "change"), [pytest.param(*one, id=f"{one[0]}: {one[1].owner.__name__}, {one[1].new}") for one in tried()]
)
def test_another_comfyui_is_told(name: str, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    specimen, (owner, old, new, said, function) = SPECIMENS[name], change
    before = verdicts.key_of(specimen, CPU, torch.float16)
    if needed_comfyui.version() != comfyui.VERSION and old not in inspect.getsource(getattr(owner, function)):
        pytest.skip(f"ComfyUI {needed_comfyui.version()} says this otherwise")
    mutated(monkeypatch, owner, function, old, new)
    reason = judged(specimen)
    assert reason is not None and any(part in reason for part in said.split("|")), reason
    family = FAMILY_OF.get(name)
    is_block = (
        family is not None and family.role is Role.DIFFUSION and isinstance(owner, type)
    )  # of a module its file tells
    assert not is_block or verdicts.key_of(specimen, CPU, torch.float16) != before, "or an old verdict would hold"


def test_each_specimen_of_encoders_and_vaes_is_tried_in_another_comfyui() -> None:
    """Blocks of diffusion models have some in common."""
    others = {name for name, family in FAMILY_OF.items() if family.role is not Role.DIFFUSION}
    assert others <= {name for names in CHANGES for name in names.split(", ")} <= SPECIMENS.keys()


def test_what_ours_drops_is_told() -> None:
    """A name with an underscore takes what nobody looks at; the place of what stock takes by number is not known."""

    def stock(self: object, z: object, tiled: bool = False) -> None: ...
    def drops(self: object, z: object, **_options: object) -> None: ...
    def passes_on(self: object, z: object, **options: object) -> None: ...
    def anything(self: object, *args: object, **kwargs: object) -> None: ...

    assert [word.rsplit(".", 1)[1] for word in same_parameters(drops, stock)] == ["stock takes tiled"]
    assert not list(same_parameters(passes_on, stock)) and not list(same_parameters(drops, anything))

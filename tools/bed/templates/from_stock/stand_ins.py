"""Which checkpoint stands in, in a test, for each file that these templates name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .swap import Json, nodes


@dataclass(frozen=True)
class StandIn:
    """A kind of `checkpoints`, as it is stored; of one that is packed, what `quantise` makes of that."""

    kind: str
    storage: str = "bf16"
    packed: str = ""


INT8 = "int8_convrot"
LORA = StandIn("lora_ab")
STAND_INS: Mapping[str, StandIn] = {
    "minimax_h3_fl2va_pruned_int8_convrot.safetensors": StandIn("minimax_h3_pruned", packed=INT8),
    # Published in 4 bits, which `quantise` does not write.
    "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors": StandIn("minimax_h3_te", "fp8_comfy_quant"),
    "minimax_h3_video_vae_fp16.safetensors": StandIn("minimax_video_vae", "fp16"),
    "minimax_h3_audio_vae_fp32.safetensors": StandIn("minimax_audio_vae", "fp32"),
    "qwen_image_2512_fp8_e4m3fn.safetensors": StandIn("qwen_image", "fp8_e4m3fn"),
    "qwen_image_edit_2511_int8_convrot.safetensors": StandIn("qwen_image", packed=INT8),
    "qwen_2.5_vl_7b_fp8_scaled.safetensors": StandIn("qwen25_vl", "fp8_scaled"),
    "qwen_image_vae.safetensors": StandIn("wan_vae"),
    "krea2_turbo_int8_convrot.safetensors": StandIn("krea2", packed=INT8),
    "qwen3vl_4b_fp8_scaled.safetensors": StandIn("krea2_te", "fp8_comfy_quant"),
    "ltx-2.3-22b-dev-fp8.safetensors": StandIn("ltx23_checkpoint", "fp8_e4m3fn"),
    "ltx-2.3-spatial-upscaler-x2-1.1.safetensors": StandIn("ltx23_upsampler"),
    "gemma_3_12B_it_fp4_mixed.safetensors": StandIn("gemma3", "fp8_comfy_quant"),
    "z_image_turbo_int8_convrot.safetensors": StandIn("z_image", packed=INT8),
    "qwen_3_4b_fp8_mixed.safetensors": StandIn("qwen3", "fp8_comfy_quant"),
    "ae.safetensors": StandIn("flux_vae"),
    "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors": StandIn("wan_t2v", "fp8_scaled"),
    "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors": StandIn("wan_t2v", "fp8_scaled"),
    "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors": StandIn("wan22_i2v", "fp8_scaled"),
    "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors": StandIn("wan22_i2v", "fp8_scaled"),
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": StandIn("umt5", "fp8_scaled"),
    "wan_2.1_vae.safetensors": StandIn("wan_vae", "fp16"),
}


def named(workflow: Json) -> Iterator[tuple[str, str]]:
    """Folder below `models` and name of every file of a workflow."""
    found = (model for node in nodes(workflow) for model in node["properties"].get("models", ()))
    yield from dict.fromkeys((model["directory"], model["name"]) for model in found)

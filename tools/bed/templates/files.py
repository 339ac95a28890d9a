"""The weight files as they are published, and which checkpoint stands in for each in a test."""

from __future__ import annotations

from dataclasses import dataclass

WAN21 = "Comfy-Org/Wan_2.1_ComfyUI_repackaged"
WAN22 = "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
Z_IMAGE_RELEASE = "Comfy-Org/z_image_turbo"


@dataclass(frozen=True)
class File:
    """One weight file. `folder` is the one below ComfyUI's `models`; `tiny` and `storage` name its stand-in, of which a GGUF
    file is made as `packed` says. `inside`: the folder of the release, `.` for its root."""

    name: str
    gigabytes: float
    folder: str
    release: str
    tiny: str
    storage: str = "fp16"
    inside: str = ""
    published: str = ""
    packed: str = ""

    @property
    def url(self) -> str:
        """Where it can be downloaded. Some are published by a name that tells nothing; they go by another here."""
        inside = self.inside or f"split_files/{self.folder}"
        path = self.published or f"{inside}/{self.name}"
        return f"https://huggingface.co/{self.release}/resolve/main/{path}".replace("/./", "/")


def _model(name: str, gigabytes: float, release: str, tiny: str, storage: str) -> File:
    return File(name, gigabytes, "diffusion_models", release, tiny, storage)


def _gguf(name: str, gigabytes: float, folder: str, release: str, tiny: str, packed: str, inside: str = ".") -> File:
    return File(name, gigabytes, folder, release, tiny, "fp16", inside, packed=packed)


T2V_SMALL = _model("wan2.1_t2v_1.3B_fp16.safetensors", 2.8, WAN21, "wan_t2v", "fp16")
T2V = _model("wan2.1_t2v_14B_fp8_scaled.safetensors", 14.3, WAN21, "wan_t2v", "fp8_scaled")
I2V = _model("wan2.1_i2v_480p_14B_fp8_scaled.safetensors", 16.4, WAN21, "wan_i2v", "fp8_scaled")
FLF2V = _model("wan2.1_flf2v_720p_14B_fp8_e4m3fn.safetensors", 16.4, WAN21, "wan_flf2v", "fp8_e4m3fn")
VACE = _model("wan2.1_vace_1.3B_fp16.safetensors", 4.3, WAN21, "wan_vace", "fp16")
HIGH = _model("wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", 14.3, WAN22, "wan_t2v", "fp8_scaled")
LOW = _model("wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors", 14.3, WAN22, "wan_t2v", "fp8_scaled")
I2V_HIGH = _model("wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors", 14.3, WAN22, "wan22_i2v", "fp8_scaled")
I2V_LOW = _model("wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors", 14.3, WAN22, "wan22_i2v", "fp8_scaled")
TI2V = _model("wan2.2_ti2v_5B_fp16.safetensors", 10.0, WAN22, "wan22_5b", "fp16")

T2V_GGUF = _gguf(
    "wan2.1-t2v-14b-Q4_K_M.gguf", 10.1, "diffusion_models", "city96/Wan2.1-T2V-14B-gguf", "wan_t2v", "q4_k_m"
)
I2V_HIGH_GGUF, I2V_LOW_GGUF = (
    _gguf(
        f"Wan2.2-I2V-A14B-{noise}-Q4_K_M.gguf",
        9.65,
        "diffusion_models",
        "QuantStack/Wan2.2-I2V-A14B-GGUF",
        "wan22_i2v",
        "q4_k_m",
        inside=noise,
    )
    for noise in ("HighNoise", "LowNoise")
)
UMT5_GGUF = _gguf("umt5-xxl-encoder-Q5_K_M.gguf", 4.15, "text_encoders", "city96/umt5-xxl-encoder-gguf", "umt5", "q5_k")

UMT5 = File("umt5_xxl_fp8_e4m3fn_scaled.safetensors", 6.7, "text_encoders", WAN21, "umt5", "fp8_scaled")
VAE21 = File("wan_2.1_vae.safetensors", 0.25, "vae", WAN21, "wan_vae")
VAE22 = File("wan2.2_vae.safetensors", 1.4, "vae", WAN22, "wan22_vae")
VISION = File("clip_vision_h.safetensors", 1.3, "clip_vision", WAN21, "clip_vision")
FOUR_STEPS = File(
    "lightx2v_T2V_14B_cfg_step_distill_v2_lora_rank64_bf16.safetensors",
    0.6,
    "loras",
    "Kijai/WanVideo_comfy",
    "lora_ab",
    "bf16",
    inside="Lightx2v",
)

FOUR_STEPS_HIGH, FOUR_STEPS_LOW = (
    File(f"wan2.2_i2v_lightx2v_4steps_lora_v1_{noise}_noise.safetensors", 1.23, "loras", WAN22, "lora_ab", "bf16")
    for noise in ("high", "low")
)

QWEN3_VL = File(
    "qwen3_vl_2b_instruct.safetensors",
    4.3,
    "text_encoders",
    "Qwen/Qwen3-VL-2B-Instruct",
    "qwen3_vl",
    "bf16",
    published="model.safetensors",
)

KLEIN = _model("flux-2-klein-4b.safetensors", 7.8, "Comfy-Org/flux2-klein", "flux2", "bf16")
Z_IMAGE = _model("z_image_turbo_bf16.safetensors", 12.3, Z_IMAGE_RELEASE, "z_image", "bf16")
QWEN3 = File("qwen_3_4b.safetensors", 8.0, "text_encoders", Z_IMAGE_RELEASE, "qwen3", "bf16")
FLUX2_VAE = File("flux2-vae.safetensors", 0.34, "vae", "Comfy-Org/flux2-dev", "flux2_vae")
FLUX_VAE = File("ae.safetensors", 0.34, "vae", Z_IMAGE_RELEASE, "flux_vae")

# A whole checkpoint: model, text encoder and VAE.
SD_TURBO = File("sd_turbo.safetensors", 5.2, "checkpoints", "stabilityai/sd-turbo", "sd21", inside=".")

FILES = (
    *(T2V_SMALL, T2V, I2V, FLF2V, VACE, HIGH, LOW, TI2V, UMT5, VAE21, VAE22, VISION, FOUR_STEPS),
    *(I2V_HIGH, I2V_LOW, FOUR_STEPS_HIGH, FOUR_STEPS_LOW),
    *(T2V_GGUF, I2V_HIGH_GGUF, I2V_LOW_GGUF, UMT5_GGUF),
    *(KLEIN, Z_IMAGE, QWEN3, QWEN3_VL, FLUX2_VAE, FLUX_VAE, SD_TURBO),
)

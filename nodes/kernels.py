"""The Kernels nodes: MODEL, CLIP or VAE in, the same out, under another choice of kernels.

The input is not changed, and both share their weights, so one loader may feed branches with and
without a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from comfy_api.latest import io

from ..fusion.base.family import Role
from ..fusion.families import FAMILIES
from . import declare, gains
from .declare import About, Node, linked, widget
from .gains import MEASURED_ON

if TYPE_CHECKING:
    from ..fusion import KernelPolicy, Mode, Precision

SAME = "as above"  # a switch that follows the first one
SWITCHED = f"The advanced inputs switch kinds of kernels one by one; {SAME} follows kernels."


@dataclass(frozen=True)
class Switch:
    """Ops that a user switches together. tells: a description with their gain."""

    id: str
    ops: tuple[str, ...]
    tells: str

    def input(self) -> Any:
        return widget(self.tells, default=SAME, options=[SAME, "auto", "on", "off"], is_advanced=True)


PRODUCTS = (
    "linear",
    "linear_",
    "linear_pair",
    "linear_pair_",
    "silu_mul",
    "silu_mul_",
    "gelu",
    "gelu_mul",
    "few_rows",
    "linear_int4",
    "linear_int4_",
    "linear_int4_pair",
    "linear_int4_pair_",
    "linear_int8",
    "linear_int8_",
    "linear_int8_pair",
    "linear_int8_pair_",
    "rows_to_int4",
    "rows_to_int8",
    "join_sums",
)
CONVERSIONS = ("to_half", "int8_to_half", "codes_to_half", "codes_to_int8")


def of_families(role: Role, *switches: Switch) -> tuple[Switch, ...]:
    """These switches, reduced to the ops of the role's families; those without ops are left out."""
    had = {op for family in FAMILIES if family.role is role for op in family.ops}
    found = (replace(switch, ops=tuple(op for op in switch.ops if op in had)) for switch in switches)
    return tuple(switch for switch in found if switch.ops)


MODEL_SWITCHES = of_families(
    Role.DIFFUSION,
    Switch(
        "attention",
        ("attention",),
        f"Attention, most of the work of a long video. {MEASURED_ON}: FuseStream's {gains.ATTENTION} of stock's speed; "
        "auto took cuDNN.",
    ),
    Switch(
        "matrix_products",
        PRODUCTS,
        f"Matrix products, with GELU, gates and residuals. {MEASURED_ON}: auto {gains.PRODUCTS} of stock's speed, on "
        f"{gains.PRODUCTS_ON}.",
    ),
    Switch(
        "norms",
        ("norm_modulate", "norm_to_int4", "norm_to_int8", "gated_residual", "gated_residual_", "group_norm_silu"),
        "LayerNorm and modulation in one pass, GroupNorm and SiLU in another. "
        f"{MEASURED_ON}: LayerNorm {gains.NORMS} of stock's speed.",
    ),
    Switch(
        "rope",
        ("rms_rope_",),
        f"RMSNorm and RoPE of q and k, in place. {MEASURED_ON}: {gains.ROPE} of stock's speed.",
    ),
    Switch(
        "conversions",
        CONVERSIONS,
        f"Weights stored as fp8, INT8, bf16 or fp32 become FP16. {MEASURED_ON}: {gains.FP8} of stock's speed for scaled fp8.",
    ),
    Switch(
        "convolutions",
        ("conv", "upsample_conv2d"),
        "Convolutions of U-Nets, with what is added to them, and upsampling with the one behind it. Not measured by themselves.",
    ),
)
TEXT_SWITCHES = of_families(
    Role.TEXT,
    Switch(
        "attention",
        ("attention", "decode_attention"),
        f"Attention with its relative bias made inside. {MEASURED_ON}: {gains.TEXT_ATTENTION} of the speed of stock's.",
    ),
    Switch(
        "matrix_products",
        PRODUCTS,
        f"FP16 matrix products that keep FP32 sums. {MEASURED_ON}: auto took cuBLAS; on is {gains.TEXT_PRODUCTS_ON} of its "
        "speed there.",
    ),
    Switch(
        "norms",
        ("norm_modulate", "norm_to_int4", "norm_to_int8", "rms_parts"),
        "RMSNorm of the FP32 stream, written as FP16. Not measured by itself yet.",
    ),
    Switch(
        "conversions",
        CONVERSIONS,
        f"Weights stored as fp8, INT8, bf16 or fp32 become FP16. {MEASURED_ON}: {gains.TO_HALF} of stock's speed for scaled fp8.",
    ),
    Switch(
        "rope",
        ("rms_rope_", "rms_rope_keep", "rms_rope_sums"),
        f"RMSNorm of each head and RoPE, of Qwen3. {MEASURED_ON}, precision fast: {gains.TEXT_ROPE} of stock's speed.",
    ),
)
VAE_SWITCHES = of_families(
    Role.VAE,
    Switch(
        "convolutions",
        ("conv",),
        f"Convolutions that read past frames where they are. {MEASURED_ON}: up to {gains.CONV} of stock's speed; auto "
        "takes the faster.",
    ),
    Switch(
        "upsampling",
        ("upsample_conv2d",),
        f"Upsampling and convolution in one. {MEASURED_ON}: up to {gains.UPSAMPLE} of stock's speed.",
    ),
    Switch(
        "norms",
        ("channel_rms_silu", "group_moments", "group_norm_silu"),
        f"Norm and SiLU in one pass. {MEASURED_ON}: {gains.VAE_NORMS} of stock's speed for Wan's.",
    ),
    Switch(
        "attention", ("attention",), f"Attention within a frame. {MEASURED_ON}: {gains.VAE_ATTENTION} of stock's speed."
    ),
    Switch("matrix_products", ("linear",), "The matrix products around that attention. Not measured by themselves."),
)


def policy_from(
    kernels: Mode, precision: Precision, switches: tuple[Switch, ...], chosen: dict[str, str]
) -> KernelPolicy:
    """The policy of a node's widgets. All off means stock's own computation."""
    from .. import fusion  # noqa: PLC0415 - the server starts without it

    ops: dict[str, Any] = {
        op: kernels if (mode := chosen.get(switch.id, SAME)) == SAME else mode
        for switch in switches
        for op in switch.ops
    }
    others = {op: mode for op, mode in ops.items() if mode != kernels}
    policy = fusion.KernelPolicy.of(kernels, precision=precision, **others)
    if fusion.all_off(policy, ops):
        return fusion.KernelPolicy.of("off", precision=precision)
    return fusion.policy_for_card(policy)


PRECISION = (
    "In place of the loader's quality. auto: as the file is stored. precise is Exact, fast Balanced, turbo Fastest."
)


def inputs(name: str, taken: Any, switches: tuple[Switch, ...], off: str) -> type:
    """A dataclass: the input of this name, the two choices for all kernels, and the switches.

    off: the meaning of this choice for the node, in words.
    """
    kernels = declare.kernels(
        f"In place of the loader's. auto: FuseStream's or torch's, the faster one. on: FuseStream's, or an error. off: {off}."
    )
    precision = declare.precision(PRECISION, has_auto=True)
    own = ((switch.id, str, switch.input()) for switch in switches)
    return make_dataclass(
        "Inputs", [(name, Any, taken), ("kernels", str, kernels), ("precision", str, precision), *own], frozen=True
    )


class KernelsNode(Node):
    """The base of the three nodes."""

    SWITCHES: ClassVar[tuple[Switch, ...]]

    @classmethod
    def policy(cls, inputs: Any) -> KernelPolicy:
        return policy_from(inputs.kernels, inputs.precision, cls.SWITCHES, vars(inputs))


class ModelKernels(KernelsNode):
    """The Kernels node of a diffusion model."""

    about = About(
        "Kernels",
        declare.ADVANCED,
        "Switches a diffusion model's kernels, from here on. The model that goes in stays as it is, and both share "
        "their weights: two branches of one graph can compare on and off. " + SWITCHED,
        aliases=["kernel toggles", "attention switch", "a/b"],
        outputs=[io.Model.Output(tooltip="The same model under these switches, for a sampler.")],
    )

    SWITCHES = MODEL_SWITCHES
    Inputs = inputs(
        "model",
        linked(io.Model, "From the FuseStream Diffusion Model Loader, LoRAs included."),
        MODEL_SWITCHES,
        "ComfyUI's",
    )

    @classmethod
    def run(cls, inputs: Any) -> io.NodeOutput:
        from ..fusion.load import other_policy  # noqa: PLC0415

        return io.NodeOutput(other_policy.model_under(inputs.model, cls.policy(inputs)))


class TextEncoderKernels(KernelsNode):
    """The Kernels node of a text encoder."""

    about = About(
        "Text Encoder Kernels",
        declare.ADVANCED,
        f"Switches a {declare.fused(Role.TEXT)} text encoder's kernels, from here on. The one that goes in stays as it "
        f"is, and both share their weights. {SWITCHED}",
        aliases=["kernel toggles", "clip kernels", "umt5", "qwen3"],
        outputs=[io.Clip.Output(tooltip="The same text encoder under these switches, for CLIP Text Encode.")],
    )

    SWITCHES = TEXT_SWITCHES
    Inputs = inputs(
        "clip",
        linked(io.Clip, "A text encoder, from our loader or from stock's Load CLIP."),
        TEXT_SWITCHES,
        "ComfyUI's",
    )

    @classmethod
    def run(cls, inputs: Any) -> io.NodeOutput:
        from ..fusion.load import other_policy  # noqa: PLC0415

        return io.NodeOutput(other_policy.text_encoder_under(inputs.clip, cls.policy(inputs)))


class VAEKernels(KernelsNode):
    """The Kernels node of a VAE."""

    about = About(
        "VAE Kernels",
        declare.ADVANCED,
        f"Switches a {declare.fused(Role.VAE)} VAE's kernels, from here on. The one that goes in stays as it is, and both "
        f"share their weights. {SWITCHED}",
        aliases=["kernel toggles", "vae kernels"],
        outputs=[io.Vae.Output(tooltip="The same VAE under these switches, for VAE Decode and VAE Encode.")],
    )

    SWITCHES = VAE_SWITCHES
    Inputs = inputs(
        "vae",
        linked(io.Vae, "From the FuseStream VAE Loader, with kernels on or auto there."),
        VAE_SWITCHES,
        "torch's",
    )

    @classmethod
    def run(cls, inputs: Any) -> io.NodeOutput:
        from ..fusion.load import other_policy  # noqa: PLC0415

        return io.NodeOutput(other_policy.vae_under(inputs.vae, cls.policy(inputs)))

"""The feed-forwards of each model class that no family of ours computes: which are found, that they are row-wise, and that a model
paints the same where they are computed a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.sd
import comfyui_version
import contract.model_classes as of
import in_halves
import pytest
import torch
from contract.model_classes import CASES
from torch import nn

from fusestream.fusion.base.hooks import PIECES
from fusestream.fusion.fused import feed_forward
from fusestream.fusion.fused.row_wise import products_in
from fusestream.kernels_cuda import KernelPolicy
from fusestream.kernels_cuda.ops.matmul import mlp

AUTO = KernelPolicy.of("auto", precision="auto")
ROWS = 4  # of a piece
STRANGERS = tuple(name for name, case in CASES.items() if not case.family)

# Names within blocks, without numbers.
TWO_STREAMS = ("double_blocks.img_mlp", "double_blocks.txt_mlp")
OF_PAIRS = ("transformer_blocks.img_mlp", "transformer_blocks.txt_mlp")
HUNYUAN = (*TWO_STREAMS, "txt_in.individual_token_refiner.blocks.mlp")
COSMOS_1 = ("blocks.block0.blocks.block", "blocks.block1.blocks.block")
REFINERS = ("noise_refiner.feed_forward", "ref_image_refiner.feed_forward", "context_refiner.feed_forward")
PIXELS = ("patch_blocks.mlp_x", "patch_blocks.mlp_y", "pixel_blocks.mlp")
UNET = tuple(
    f"{side}.{name}"
    for side in ("input_blocks", "middle_block", "output_blocks")
    for name in ("transformer_blocks.ff", "time_stack.ff_in", "time_stack.ff", "time_pos_embed")
)
FOUND: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("MageFlow", "Lens"), OF_PAIRS),
    **dict.fromkeys(("JoyImage", "Hunyuan3Dv2", "Hunyuan3Dv2mini"), TWO_STREAMS),
    **dict.fromkeys((name for name in STRANGERS if name.startswith(("HunyuanVideo", "HunyuanImage"))), HUNYUAN),
    **dict.fromkeys(("CosmosT2V", "CosmosI2V"), COSMOS_1),
    **dict.fromkeys(("PixelDiTT2I", "PiD"), PIXELS),
    **dict.fromkeys(("WAN21_CausalAR_T2V", "WAN21_HuMo"), ("blocks.ffn",)),
    **dict.fromkeys(("CosmosT2IPredict2", "CosmosI2VPredict2", "PixArtAlpha", "PixArtSigma"), ("blocks.mlp",)),
    **dict.fromkeys(("HunyuanDiT", "HunyuanDiT1", "Hunyuan3Dv2_1"), ("blocks.mlp",)),
    **dict.fromkeys(("StableAudio", "StableAudio3"), ("transformer.layers.ff",)),
    **dict.fromkeys(("SV3D_u", "SV3D_p", "SVD_img2vid"), UNET),
    "LTXV": ("transformer_blocks.ff",),
    "SD3": ("joint_blocks.context_block.mlp", "joint_blocks.x_block.mlp"),
    "GenmoMochi": ("blocks.mlp_x", "blocks.mlp_y"),
    "Anima": ("blocks.mlp", "llm_adapter.blocks.mlp"),
    "HiDream": (
        "double_stream_blocks.block.ff_t",
        *(
            f"{one}_stream_blocks.block.ff_i.{kind}"
            for one in ("double", "single")
            for kind in ("shared_experts", "experts")
        ),
    ),
    "HiDreamO1": ("visual.blocks.mlp", "language_model.layers.mlp"),
    "ACEStep15": (
        "decoder.layers.mlp",
        "encoder.lyric_encoder.layers.mlp",
        "encoder.timbre_encoder.layers.mlp",
        "tokenizer.attention_pooler.layers.mlp",
        "detokenizer.layers.mlp",
    ),
    "Omnigen2": (*REFINERS, "layers.feed_forward"),
    "Boogu": (
        *REFINERS,
        "double_stream_layers.img_feed_forward",
        "double_stream_layers.instruct_feed_forward",
        "single_stream_layers.feed_forward",
    ),
    "AuraFlow": ("double_layers.mlpC", "double_layers.mlpX", "single_layers.mlp"),
    "TripoSplat": ("noise_refiner.mlp", "context_refiner.mlp", "blocks.mlp"),
    "SeedVR2": ("blocks.mlp.vid", "blocks.mlp.txt", "blocks.mlp.all"),
    "Ideogram4": ("layers.feed_forward",),
    "Krea2": ("blocks.mlp", "txtfusion.layerwise_blocks.mlp", "txtfusion.refiner_blocks.mlp"),
    "ErnieImage": ("layers.mlp",),
}
# Classes of which none is found, and why.
ITSELF = "it cuts more than 8192 tokens itself, and so its code asks for their number"
IN_THE_BLOCK = "its block multiplies by the two Linears itself: no module has them alone"
NONE = {
    **dict.fromkeys(("Kandinsky5", "Kandinsky5Image"), ITSELF),
    **dict.fromkeys((name for name in STRANGERS if name.startswith("CogVideoX")), IN_THE_BLOCK),
    "ACEStep": "its feed-forwards are convolutions over time",
}


@pytest.fixture(autouse=True)
def as_comfyui_runs(one_thread: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


def inside(net: nn.Module) -> dict[str, list[nn.Module]]:
    """The feed-forwards in a network's blocks, by their names without numbers."""
    names, found = {module: name for name, module in net.named_modules()}, dict[str, list[nn.Module]]()
    for module, _ in feed_forward.feed_forwards(net):
        if of.IN_A_BLOCK.search(f"{names[module]}."):
            short = ".".join(part for part in names[module].split(".") if not part.isdigit())
            found.setdefault(short, []).append(module)
    return found


def sees_one_row(module: Any) -> bool:
    """Whether another number in one row of x changes that row of the output, and no other."""
    width = next(products_in(module)).in_features
    x = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[1, 3] += 1
    is_other = (module(x) != module(changed)).any(-1)
    return bool(is_other[1, 3]) and int(is_other.sum()) == 1


@pytest.mark.skipif(comfyui_version.__version__ != "0.30.0", reason="the table is of ComfyUI 0.30.0")
def test_no_class_is_forgotten() -> None:
    assert not FOUND.keys() & NONE.keys() and FOUND.keys() | NONE.keys() == set(STRANGERS)


@pytest.mark.parametrize("name", STRANGERS)
def test_those_in_its_blocks_are_found_and_are_row_wise(name: str, tmp_path: Path) -> None:
    with of.opened(name):
        model = comfy.sd.load_diffusion_model(str(of.write(name, tmp_path)))
    found = inside(model.model.diffusion_model)
    assert found.keys() == set(FOUND.get(name, ()))
    assert all(map(sees_one_row, (modules[0] for modules in found.values())))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.every_other) for name in FOUND])
def test_in_pieces_a_model_paints_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within rounding: of other numbers of rows the CPU sums in another order."""
    monkeypatch.setattr(mlp, "CHUNK_ROWS", ROWS)
    with of.opened(name):
        model = in_halves.load(of.write(name, tmp_path), AUTO, torch.float32)
        whole = of.once(model, name)
        most: list[int] = []
        compute = feed_forward.Cutting.pieces

        def noted(self: Any, x: torch.Tensor) -> Any:
            made = compute(self, x)
            most.extend(x[piece].shape[:-1].numel() for piece in made)
            return made

        monkeypatch.setattr(feed_forward.Cutting, "pieces", noted)
        model.model_options["transformer_options"][PIECES] = 1
        cut = of.once(model, name)
    assert len(most) > 1 and max(most) <= ROWS
    torch.testing.assert_close(cut, whole, rtol=2e-3, atol=2e-3)

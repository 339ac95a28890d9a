"""Networks that enter their blocks by other methods than a call: whichever it is, the block's weights are there."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.ldm.wan.model as stock
import comfy.sd
import comfy.utils
import node_helpers
import pytest
import torch
from safetensors.torch import load_file, save_file
from scenes import SIDE, Scene, Studio, sample

from fusestream import checkpoints
from fusestream.fusion.base import subclassing
from fusestream.fusion.base.errors import NotWhileStreaming
from fusestream.fusion.load.diffusion import load_streamed_diffusion_model
from fusestream.fusion.stream.block_hooks import leads

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


# ------------------------------------------------------------------------------------------------- Wan-Animate-2's ways


class WanAnimate2SelfAttention(stock.WanSelfAttention):  # type: ignore[misc]
    def kv(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm_k(self.k(x)), self.v(x)

    def forward_gen(self, x: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        keys, values = (torch.cat(both, 1) for both in zip(self.kv(x), kv, strict=True))
        return self.o(stock.optimized_attention(self.norm_q(self.q(x)), keys, values, heads=self.num_heads))  # type: ignore[no-any-return]


class WanAnimate2Block(stock.WanAttentionBlock):  # type: ignore[misc]
    """Entered by the methods that stock's newer block of this name has, which share what they do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sizes = self.dim, self.num_heads, self.window_size, self.qk_norm, self.eps
        self.self_attn = WanAnimate2SelfAttention(*sizes, operation_settings=kwargs["operation_settings"])

    def kv_from_input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.self_attn.kv(self.norm1(x))  # type: ignore[no-any-return]

    def forward_pose(self, x: torch.Tensor, e: torch.Tensor, freqs: torch.Tensor, context: torch.Tensor) -> Any:
        """By the block's own call, and another of these methods."""
        return self(x, e, freqs, context), *self.kv_from_input(x)

    def forward_gen(self, x: torch.Tensor, context: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> Any:
        x = x + self.self_attn.forward_gen(self.norm1(x), kv)
        x = x + self.cross_attn(self.norm3(x), context)
        return x + self.ffn(self.norm2(x))


class WanAnimate2Model(stock.WanModel):  # type: ignore[misc]
    """Two branches in one pass; in the next, the first one's blocks run before all of the other's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, wan_attn_block_class=WanAnimate2Block, **kwargs)
        self.runs = 0

    def forward_orig(self, x: Any, t: Any, context: Any, freqs: Any = None, **_others: Any) -> torch.Tensor:
        x = self.patch_embedding(x.float()).to(x.dtype)
        grid = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        e = self.time_embedding(stock.sinusoidal_embedding_1d(self.freq_dim, t.flatten()).to(dtype=x.dtype))
        e = e.reshape(t.shape[0], -1, e.shape[-1])
        steps = self.time_projection(e).unflatten(2, (6, self.dim))
        context = self.text_embedding(context)
        self.runs += 1
        pose, kept = x, []
        if self.runs % 2 == 0:
            for block in self.blocks:
                kept.append(block.kv_from_input(pose))
                pose = block.forward_pose(pose, steps, freqs, context)[0]
        for i, block in enumerate(self.blocks):
            if kept:
                kv = kept[i]
            else:
                pose, *kv = block.forward_pose(pose, steps, freqs, context)
            x = block.forward_gen(x, context, kv)
        return self.unpatchify(self.head(x, e), grid)  # type: ignore[no-any-return]


@pytest.fixture
def as_animate2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of Wan 2.1 are taken for it."""
    monkeypatch.setattr(stock, "WanModel", WanAnimate2Model)


def streamed(path: Path, ceiling: Callable[[Any], int] = lambda stream: stream.residency.least) -> Any:
    model = load_streamed_diffusion_model(str(path))
    model.stream.residency.ceiling = ceiling(model.stream)
    return model


def with_lora(model: Any, folder: Path) -> Any:
    file = comfy.utils.load_torch_file(str(checkpoints.write("lora_ab", folder)))
    return comfy.sd.load_lora_for_models(model, None, file, 0.8, 0.0)[0]


@pytest.mark.every_other
@pytest.mark.parametrize("storage", ["fp16", "fp8_scaled"])
def test_the_latents_are_stocks(as_animate2: None, studio: Studio, scenes: dict[str, Scene], storage: str) -> None:
    """With a LoRA too, which is added to each product of fp8 weights, by whatever method of the block that is."""
    path = checkpoints.write("wan_t2v", studio.folder, storage)
    ours, theirs = streamed(path), comfy.sd.load_diffusion_model(str(path))
    assert isinstance(ours.model.diffusion_model, WanAnimate2Model)
    assert torch.equal(sample(ours, scenes["wan_t2v"]), sample(theirs, scenes["wan_t2v"]))
    assert len(ours.stream.residency.pager.plan.streamed) > ours.stream.residency.pager.plan.slots, (
        "otherwise nothing was streamed"
    )
    ours, theirs = with_lora(ours, studio.folder), with_lora(theirs, studio.folder)
    wanted = sample(theirs, scenes["wan_t2v"])
    got = sample(ours, scenes["wan_t2v"])
    assert torch.equal(got, wanted) or storage == "fp8_scaled"  # whose sums are not rounded to fp8 again
    assert (got - wanted).norm() < 0.05 * wanted.norm()


def test_a_block_that_is_entered_from_within_came_once(
    as_animate2: None, studio: Studio, scenes: dict[str, Scene]
) -> None:
    ours = streamed(checkpoints.write("wan_t2v", studio.folder, "fp16"))
    sample(ours, scenes["wan_t2v"])
    uses: list[int] = []
    ours.stream.watcher = uses.append
    ours.model.diffusion_model.runs = 0
    sample(ours, scenes["wan_t2v"], cfg=1.0)
    layers = range(len(ours.stream.layers))
    first = [layer for layer in layers for _ in ("forward_pose", "forward_gen")]
    second = [layer for layer in layers for _ in ("kv_from_input", "forward_pose")]
    assert uses == [*first, *second, *layers]


def test_blocks_hold_nothing_behind_a_method_that_fails(
    as_animate2: None, studio: Studio, scenes: dict[str, Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = streamed(checkpoints.write("wan_t2v", studio.folder, "fp16"))
    wanted = sample(ours, scenes["wan_t2v"])

    class Interrupted(BaseException):
        pass

    def interrupts(*_: Any) -> Any:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(WanAnimate2SelfAttention, "forward_gen", interrupts)
        with pytest.raises(Interrupted):
            sample(ours, scenes["wan_t2v"])
    assert all(held.is_meta for block in ours.stream.blocks for held in block.held())
    ours.model.diffusion_model.runs = 0
    assert torch.equal(sample(ours, scenes["wan_t2v"]), wanted)


def test_gradients_are_refused_by_whatever_method(as_animate2: None, studio: Studio) -> None:
    ours = streamed(checkpoints.write("wan_t2v", studio.folder, "fp16"))
    with torch.inference_mode(False), torch.enable_grad(), pytest.raises(NotWhileStreaming, match="Training"):
        ours.model.diffusion_model.blocks[0].kv_from_input(torch.zeros(1, 4, 256, requires_grad=True))


# -------------------------------------------------------------------------------------------------- blocks in their parts


def adds_a_method(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    """Stock's own block, which a family takes apart, has one more way in from now on: as if no model of it had been loaded yet."""
    subclassing._mixed.cache_clear()
    monkeypatch.setattr(stock.WanAttentionBlock, "keys", method, raising=False)


def test_a_block_that_is_paged_in_parts_comes_whole(
    studio: Studio, scenes: dict[str, Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a method may look for weights in any of its parts, past the modules that they are called by."""
    adds_a_method(monkeypatch, lambda self, x: self.self_attn.k(x) + self.cross_attn.k(x))
    path = checkpoints.write("wan_t2v", studio.folder, "fp16")
    ours = streamed(path, lambda stream: stream.residency.whole)
    wanted = sample(ours, scenes["wan_t2v"])
    assert ours.stream.residency.is_in_parts
    x = torch.randn(1, 4, 256)
    weights = {name: tensor.float() for name, tensor in load_file(path).items()}
    got = ours.model.diffusion_model.blocks[1].keys(x)
    names = [f"blocks.1.{part}.k" for part in ("self_attn", "cross_attn")]
    products = [torch.nn.functional.linear(x, weights[f"{n}.weight"], weights[f"{n}.bias"]) for n in names]
    assert torch.equal(got, products[0] + products[1])
    assert not ours.stream.residency.is_in_parts
    assert torch.equal(sample(ours, scenes["wan_t2v"]), wanted)


# ------------------------------------------------------------------------------------------------ what a method is given


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._hidden(x)

    def named(self, name: str) -> str:
        return name

    def listed(self, tensors: list[torch.Tensor]) -> int:
        return len(tensors)

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Asked:
    """In the place of a stream."""

    def __init__(self, *, is_in_parts: bool = False) -> None:
        self.residency = SimpleNamespace(is_in_parts=is_in_parts)
        self.entered: list[int] = []
        self.path = Path()

    def taken_over(self, _block: Any, number: None) -> int:
        assert number is None
        return 5

    def is_in_use(self, _i: int) -> bool:
        return False

    def enter(self, i: int) -> None:
        self.entered.append(i)

    def leave(self, i: int, before: None) -> None:
        pass


def test_a_question_about_a_block_brings_nothing() -> None:
    asked: Any = Asked()
    block = Block()
    leads(block, asked, 3)
    assert block.named("a name") == "a name" and block.listed([]) == 0
    assert not asked.entered
    x = torch.ones(2)
    assert block.listed([x]) == 1 and block._hidden(x=x) is x
    assert asked.entered == [3, 3]
    assert block.listed.__name__ == "listed" and block.state_dict() == {} and asked.entered == [3, 3]


def test_a_block_in_parts_comes_whole_but_from_within_its_own_call() -> None:
    asked: Any = Asked(is_in_parts=True)
    block = Block()
    leads(block, asked, None)
    x = torch.ones(2)
    assert block(x) is x and not asked.entered
    assert block._hidden(x) is x and asked.entered == [5]


# --------------------------------------------------------------------------------------------------- stock's own network


def test_stocks_own_wan_animate_2(studio: Studio, scenes: dict[str, Scene], tmp_path: Path) -> None:
    """Where this ComfyUI has it: as a file of Wan's that calls itself so."""
    try:
        network = importlib.import_module("comfy.ldm.wan.model_animate2").WanAnimate2Model
    except ImportError:
        pytest.skip("this ComfyUI has no Wan-Animate-2")
    path, source = tmp_path / "animate2.safetensors", checkpoints.write("wan_i2v", studio.folder, "fp16")
    size = checkpoints.wan.SIZES["wan_i2v"]
    config = {"transformer": {"text_dim": size.text, "model_type": "animate2"}}
    save_file(load_file(source), path, {"config": json.dumps(config)})
    ours, theirs = streamed(path), comfy.sd.load_diffusion_model(str(path))
    assert isinstance(ours.model.diffusion_model, network)
    pose = {"pose_video_latent": torch.randn(1, 16, 1, SIDE // 8, SIDE // 8)}
    positive, negative, latent = scenes["wan_i2v"]
    scene = Scene(*(node_helpers.conditioning_set_values(side, pose) for side in (positive, negative)), latent)
    got, wanted = (sample(model, scene) for model in (ours, theirs))
    assert torch.equal(got, wanted)

"""What T5 encoders have of their own, over our ops with the references on the CPU, beside stock's FP32. What all encoders keep to
the suite tells (`tests/contract/test_text_layers.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comfy.text_encoders.hunyuan_image import ByT5SmallModel
from text_models import ALLOWED, PRECISIONS, UMT5, close, t5
from text_models import T5_FFN as FFN
from text_models import T5_LAYERS as LAYERS
from text_models import T5_WIDTH as WIDTH

from fusestream.fusion.base.hooks import STREAMED
from fusestream.fusion.families.t5 import encoder
from fusestream.fusion.text.common import gather
from fusestream.fusion.text.encoder import block, described
from fusestream.fusion.weights import operands
from fusestream.kernels_cuda import KernelPolicy

tokens, both = UMT5.tokens, UMT5.both


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_the_first_form_of_the_feed_forward() -> None:
    for precision in PRECISIONS:
        got, wanted = both(t5("t5", gated=False), [tokens(20)], precision)
        close(got[0], wanted[0], ALLOWED[precision])


def test_byt5_is_a_t5() -> None:
    """HunyuanImage reads quoted words with it: stock's class and sizes, in two layers of twelve."""
    options = {"model_name": "byt5", "byt5_model_config": {"num_layers": 2}}
    model = ByT5SmallModel(dtype=torch.float16, model_options=options).requires_grad_(False)
    draw = torch.Generator().manual_seed(3)
    for name, weight in model.transformer.named_parameters():
        is_table = "shared" in name or "relative" in name
        weight.normal_(1 if "norm" in name else 0, 1 if is_table else 0.1, generator=draw)
        if weight.ndim == 2 and not is_table:
            weight.data *= 10 * weight.shape[1] ** -0.5 * (0.125 if name.endswith(".q.weight") else 1)
    model.set_clip_options({"execution_device": torch.device("cpu")})
    prompt = [[87, 104, 123, 119, 35, 37, 1]]
    wanted = model(prompt)[0]
    assert encoder.fuse(model, KernelPolicy(), on_cpu=True) == 2
    close(model(prompt)[0], wanted, ALLOWED["precise"])


def test_without_masks_and_without_zeroing() -> None:
    """As stock's other T5 models ask for it: every token counts, or masked ones do not count but come out."""
    for options in ({"enable_attention_masks": False, "zero_out_masked": False}, {"zero_out_masked": False}):
        got, wanted = both(t5(**options), [tokens(20), tokens(70)])
        assert (wanted[0] != 0).all()
        close(got[0], wanted[0], ALLOWED["precise"])


def test_nothing_to_see() -> None:
    """Padding alone: zeros where masked tokens are zeroed; elsewhere stock's average over all."""
    for zeroed in (True, False):
        got, wanted = both(t5(zero_out_masked=zeroed), [[0] * 80])
        assert torch.equal(got[0], wanted[0]) and (wanted[0] == 0).all() == zeroed


def test_a_middle_layers_output() -> None:
    for norm in (True, False):
        for layer in (1, -2):
            model = t5(layer="hidden", layer_idx=layer, layer_norm_hidden_state=norm)
            got, wanted = both(model, [tokens(30)])
            close(got[0], wanted[0], ALLOWED["precise"])


def test_masked_tokens_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    attend = block.attend
    monkeypatch.setattr(block, "attend", lambda layer, x, *rest: seen.append(x.shape[1]) or attend(layer, x, *rest))
    both(t5(), [tokens(70, 300), tokens(10, 300)])
    assert set(seen) == {128} and len(seen) == LAYERS


def test_weights_that_are_elsewhere_are_stocks() -> None:
    """Neither streamed nor on the card: ComfyUI brings them. `on` takes them from it."""
    model = t5()
    stack = model.transformer.encoder
    x, mask = torch.zeros(1, 8, WIDTH), torch.ones(1, 8)

    def reason(mode: Any) -> str | None:
        return described.obstacle(stack.block, x, KernelPolicy.of(mode), on_cpu=True, attention_mask=mask)

    assert reason("auto") is None
    stack.block[2].layer[1].to("meta")
    assert "give its loader a vram_budget" in str(reason("auto")) and reason("on") is None
    stack.block[2].__dict__[STREAMED] = None
    assert reason("auto") is None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_brought_through_one_buffer(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock brings offloaded weights through a few buffers, which the next weight may get while one is still wanted."""
    buffer = torch.empty(WIDTH * FFN, dtype=torch.float16)

    @contextlib.contextmanager
    def brought(module: Any, _device: torch.device) -> Iterator[operands.Weights]:
        weight = module.weight
        yield operands.Weights(buffer[: weight.numel()].view(weight.shape).copy_(weight), None)

    model = t5()
    want = model([tokens(30)])[0]
    monkeypatch.setattr(operands, "_lie_as_wanted", lambda *_: False)
    monkeypatch.setattr(operands, "is_here", lambda *_: False)
    monkeypatch.setattr(operands, "_brought", brought)
    encoder.fuse(model, KernelPolicy.of(precision=precision), on_cpu=True)
    close(model([tokens(30)])[0], want, ALLOWED[precision])


def test_the_embedding_is_gathered_as_stock_does() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model = t5(dtype=dtype)
        ids = torch.tensor([tokens(30)])
        wanted = model.transformer.shared(ids, out_dtype=torch.float32)
        assert torch.equal(gather(model.transformer.shared.weight, ids, torch.float32), wanted)

"""The networks that are trained are stock's: the same tensors give the same results, to rounding."""

from __future__ import annotations

import comfy.ldm.wan.model
import comfy.ldm.wan.vae
import comfy.ops
import comfy.text_encoders.t5
import pytest
import torch

from fusestream.checkpoints import wan
from fusestream.checkpoints.text import Umt5Size
from fusestream.checkpoints.toys import words
from fusestream.checkpoints.train import text, transformer, vae
from fusestream.checkpoints.train.tensors import Tensors

TEXT = Umt5Size(width=32, heads=2, head_width=16, ffn=48, layers=3, vocabulary=words.size())
FLOAT = torch.float32


def shaken(weights: Tensors) -> Tensors:
    """No gain of one and no bias of zero: those would hide what is forgotten."""
    return {name: tensor + 0.1 * torch.rand_like(tensor) for name, tensor in weights.items()}


def same(ours: torch.Tensor, stock: torch.Tensor) -> None:
    torch.testing.assert_close(ours, stock, rtol=1e-3, atol=2e-4 * float(stock.abs().max()))


@pytest.mark.deep
@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("frames", [1, 5, 17])
def test_vae(width: int, frames: int) -> None:
    weights = shaken(vae.new(width, seed=1, device="cpu"))
    stock = comfy.ldm.wan.vae.WanVAE(dim=width, z_dim=16, temperal_downsample=[False, True, True])
    stock.load_state_dict(weights)
    film = torch.rand(2, frames, 32, 48, 3) * 2 - 1
    ours = vae.Vae(weights)
    with torch.no_grad():
        mean, _ = ours.encode(film)
        z = stock.encode(film.permute(0, 4, 1, 2, 3))
        same(mean.permute(0, 4, 1, 2, 3), z)
        same(ours.decode(mean).permute(0, 4, 1, 2, 3), stock.decode(z))


def ids(*captions: str) -> torch.Tensor:
    rows = [words.tokens(caption) for caption in captions]
    return torch.tensor([row + [words.PAD] * (words.LONGEST - len(row)) for row in rows])


CAPTIONS = (
    "a red ball rolls to the left behind a blue box on a striped background",
    "a green triangle stands still, white background",
    "",
)


def test_text_encoder() -> None:
    weights = shaken(text.new(TEXT, seed=2, device="cpu"))
    config = {
        "d_model": TEXT.width, "num_heads": TEXT.heads, "d_kv": TEXT.head_width, "d_ff": TEXT.ffn, "num_layers": TEXT.layers,
        "vocab_size": TEXT.vocabulary, "dense_act_fn": "gelu_pytorch_tanh", "is_gated_act": True, "model_type": "umt5",
    }  # fmt: skip
    stock = comfy.text_encoders.t5.T5(config, FLOAT, "cpu", comfy.ops.disable_weight_init)
    stock.load_state_dict(weights)
    given = ids(*CAPTIONS)
    there = text.alive(given)
    assert there.sum(1).tolist() == [len(words.tokens(caption)) for caption in CAPTIONS]
    with torch.no_grad():
        ours = text.encode(weights, given, FLOAT)
        theirs = stock(given, there.long(), dtype=FLOAT)[0] * there[..., None]
    same(ours, theirs)


def test_transformer() -> None:
    """On three lengths of prompt, which stock pads to 512 with zeros."""
    size = wan.WanSize(dim=256, ffn=512, layers=2, text=32)
    weights = shaken(transformer.new(size, seed=3, device="cpu"))
    stock = comfy.ldm.wan.model.WanModel(
        model_type="t2v", dim=256, num_heads=2, ffn_dim=512, num_layers=2, text_dim=32,
        operations=comfy.ops.disable_weight_init, device="cpu", dtype=FLOAT,
    )  # fmt: skip
    stock.load_state_dict(weights)
    given = ids(*CAPTIONS)
    there = text.alive(given)
    features = torch.randn(len(CAPTIONS), words.LONGEST, 32) * there[..., None]
    padded = torch.zeros(len(CAPTIONS), transformer.PROMPT, 32)
    padded[:, : words.LONGEST] = features
    z, time = torch.randn(len(CAPTIONS), 3, 6, 10, 16), torch.tensor([0.05, 0.5, 1.0])
    ours = transformer.Transformer(weights)
    with torch.no_grad():
        got = ours(z, time, ours.context(features, there), *transformer.rotations(3, 3, 5, "cpu"))
        expected = stock(z.permute(0, 4, 1, 2, 3), time * 1000, padded)
    same(got.permute(0, 4, 1, 2, 3), expected)

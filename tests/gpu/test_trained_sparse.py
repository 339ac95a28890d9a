"""Tiny Wans that were trained with sparse attention, on the card: kernels beside float64 by the papers' definitions. Needs a
ComfyUI."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import trained_sparse_oracle as oracle
from gpu.models import load, stock
from gpu.support import error
from safetensors.torch import load_file

from fusestream import checkpoints
from fusestream.kernels_cuda import LEDGER, KernelPolicy

pytestmark = [
    pytest.mark.usefixtures("as_comfyui_runs"),
    pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI"),
]

VIDEO = (1, 16, 9, 26, 30)  # 9 x 13 x 15 tokens: 28 blocks of keys, 48 cubes that are cut off on each side
WHOLE = (1, 16, 8, 24, 32)  # 24 blocks of keys, and as many cubes
STEPS = 2
LAYERS = checkpoints.wan.SPARSE["wan_sla"].layers
SHARE = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


def of_share(model: Any) -> Any:
    from fusestream.fusion.sparse import model as of_model
    from fusestream.fusion.sparse.settings import Settings

    return of_model.sparse(model, Settings(share=SHARE))


def sample(model: Any, latent: tuple[int, ...]) -> torch.Tensor:
    import comfy.sample

    source = torch.Generator().manual_seed(0)
    words = [[torch.randn(1, 20, checkpoints.T5_WIDTH, generator=source), {}]]
    empty = torch.zeros(latent)
    noise = comfy.sample.prepare_noise(empty, 1)
    run = ("euler", "simple", words, words, empty)
    out: torch.Tensor = comfy.sample.sample(model, noise, STEPS, 1.0, *run, disable_pbar=True, seed=1)
    return out


def tallied(model: Any) -> Any:
    from fusestream.fusion.sparse.model import sparse_of

    found = sparse_of(model.model_options["transformer_options"])
    assert found is not None
    return found.tally.read()


@pytest.mark.parametrize("latent", [VIDEO, WHOLE])
@pytest.mark.parametrize("kind", ["wan_sla", "wan_vsa"])
def test_a_model_computes_as_it_was_trained(folder: Path, kind: str, latent: tuple[int, ...], isa: Any) -> None:
    LEDGER.clear()
    path = checkpoints.write(kind, folder)
    taught = stock(path, dtype=torch.float32)
    dense = sample(taught, latent)
    oracle.teach(taught.model.diffusion_model, load_file(path), SHARE)
    want = sample(taught, latent)
    far = error(dense, want)
    for precision, allowed in (("precise", 0.1), ("fast", 0.1), ("turbo", 0.4)):
        changed = of_share(load(path, KernelPolicy.of("auto", precision=precision, isa=isa)))
        got = sample(changed, latent)
        found = tallied(changed)
        print(f"{kind} {isa or 'native'} {precision}: {error(got, want):.5f} from the definitions, dense {far:.4f}")
        assert found.sparse == STEPS * LAYERS and found.dense == () and found.seconds["sparse"] > 0
        # A block whose score is as good as another's may be chosen in its place.
        assert error(got, want) < max(5e-3, allowed * far)
    assert not [refusal for refusal in LEDGER.refusals if refusal.op == "trained sparse attention"]


def test_many_blocks_and_keys_with_much_in_common(isa: Any) -> None:
    """The methods by themselves, with heads of 128."""
    from fusestream.fusion.sparse.sla import Sla
    from fusestream.fusion.sparse.trained import How
    from fusestream.fusion.sparse.vsa import Vsa

    grid = (9, 26, 31)
    source = torch.Generator().manual_seed(5)
    q, k, v, gate = (torch.randn(1, math.prod(grid), 2, 128, generator=source).to("cuda") for _ in range(4))
    k = k + 2 * torch.randn(128, generator=source).to("cuda")
    halves = [t.half() for t in (q, k, v, gate)]
    policy = KernelPolicy.of("on", isa=isa)
    how = How(None, 0.1, grid, policy, lambda *_: None)
    weight, bias = torch.randn(128, 128, generator=source) / 11, torch.randn(128, generator=source)
    linear = (weight.to("cuda", torch.float16), bias.to("cuda", torch.float16))
    got = Sla(lambda x: torch.nn.functional.linear(x, *linear)).attend(*halves[:3], how)
    on_host = [t.cpu() for t in halves]
    want = oracle.sla(*on_host[:3], weight=weight.half(), bias=bias.half(), share=0.1)
    assert error(got.cpu(), want) < 1e-2  # means are rounded before blocks are chosen: some rows choose another
    got = Vsa(halves[3].flatten(2)).attend(*halves[:3], how)
    want = oracle.vsa(*on_host, grid=grid, share=0.1)
    assert error(got.cpu(), want) < 5e-3

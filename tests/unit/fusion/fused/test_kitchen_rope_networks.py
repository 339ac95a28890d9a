"""Real networks whose q and k comfy-kitchen turns: by our op in their calls, and in no one else's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.sd
import contract.model_classes as of
import in_halves
import pytest
import torch
from scenes import distance
from torch import Tensor

from fusestream.fusion.base.hooks import KITCHEN_BACKEND
from fusestream.fusion.base.policy import put_on
from fusestream.fusion.fused import kitchen_rope
from fusestream.kernels_cuda import KernelPolicy

kitchen = pytest.importorskip("comfy_kitchen")

OFF, TURNING = KernelPolicy.of("off"), KernelPolicy.of("off", rms_rope_="auto")
WITHOUT = KernelPolicy.of("auto", rms_rope_="off")
HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32
# Which functions their networks call.
CALLED = {
    "MageFlow": {"apply_rope1"},
    "Krea2": {"apply_rope"},
    "JoyImage": {"rms_rope"},
    "ErnieImage": {"rms_rope_split_half"},
}
NAMES = tuple(name for name in CALLED if name in of.CASES)

pytestmark = pytest.mark.usefixtures("one_thread")


class Served:
    """Functions that our backend computed, with their threads."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.threads: set[int] = set()

    def note(self, name: str) -> None:
        self.names.add(name)
        self.threads.add(threading.get_ident())


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Our op serves tensors on the CPU, too, by its reference."""
    with kitchen_rope.turning(TURNING):  # the backend is there from the first call on
        backend = kitchen.registry._backends[KITCHEN_BACKEND]
    found = Served()
    for name, run in vars(backend).items():

        def noted(run: Any = run, name: str = name, **given: Any) -> Any:
            found.note(name)
            return run(**given)

        monkeypatch.setattr(backend, name, noted)
    monkeypatch.setattr(kitchen_rope, "runs_on", lambda *_: True)
    with torch.inference_mode():
        yield found
    assert is_free()


def is_free() -> bool:
    """Whether this thread has kitchen's own choice of backends."""
    return getattr(kitchen.registry._thread_local, "backend_override", None) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("turning")


def model(name: str, folder: Path, policy: KernelPolicy, dtype: torch.dtype) -> Any:
    with of.opened(name):
        return in_halves.load(of.write(name, folder), policy, dtype)


def latents(name: str, folder: Path, policy: KernelPolicy, dtype: torch.dtype) -> Tensor:
    return of.once(model(name, folder, policy, dtype), name)


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_turns_by_our_op_as_near_as_kitchen_does(
    name: str, dtype: torch.dtype, folder: Path, served: Served
) -> None:
    exact, theirs = (latents(name, folder, OFF, one) for one in (SINGLE, dtype))
    assert not served.names
    ours = latents(name, folder, TURNING, dtype)
    assert served.names == CALLED[name] and is_free()
    assert ours.isfinite().all() and distance(ours, exact) <= 1.15 * distance(theirs, exact)


@pytest.mark.parametrize("name", NAMES)
def test_without_the_op_it_is_stocks_to_the_bit(
    name: str, folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    off, without = (latents(name, folder, policy, BF16) for policy in (OFF, WITHOUT))
    assert not served.names and torch.equal(off, without)
    with of.opened(name), monkeypatch.context() as patch:
        in_halves.computing_in(patch, BF16)
        stock = comfy.sd.load_diffusion_model(str(of.write(name, folder)), model_options={"dtype": BF16})
    assert torch.equal(of.once(stock, name), off) and not served.names


def test_each_call_is_under_its_own_policy(folder: Path, served: Served) -> None:
    ours = model("ErnieImage", folder, TURNING, BF16)
    off = ours.clone()
    put_on(off, OFF)
    plain = of.once(off, "ErnieImage")
    assert not served.names
    turned = of.once(ours, "ErnieImage")
    assert served.names and not torch.equal(turned, plain)
    assert torch.equal(of.once(off, "ErnieImage"), plain)


def test_a_call_that_raises_leaves_no_choice_behind(
    folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = model("MageFlow", folder, TURNING, BF16)

    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("broken")

    with monkeypatch.context() as patch, pytest.raises(KeyError, match="broken"):
        patch.setattr(kitchen_rope, "rms_rope_", broken)
        of.once(ours, "MageFlow")
    assert is_free() and served.names
    served.names.clear()
    latents("MageFlow", folder, OFF, BF16)
    assert not served.names


def test_a_stock_model_in_another_thread_is_not_touched(
    folder: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its network is called while one of ours is in the middle of its own call."""
    with of.opened("MageFlow"):
        stock = comfy.sd.load_diffusion_model(str(of.write("MageFlow", folder)), model_options={"dtype": BF16})
    ours, turn = model("MageFlow", folder, TURNING, BF16), kitchen_rope.rms_rope_
    x, prompt = of.noise(1, 1, 128, 4, 4), of.noise(2, 1, 12, stock.model.diffusion_model.txt_in.in_features)
    found: list[Tensor] = []

    def paint() -> None:
        with torch.inference_mode():
            found.append(stock.model.apply_model(x, torch.tensor([0.5]), c_crossattn=prompt))

    def interrupted(*given: Any, **named: Any) -> None:
        if len(found) == 1:
            thread = threading.Thread(target=paint)
            thread.start()
            thread.join()
        turn(*given, **named)

    paint()
    monkeypatch.setattr(kitchen_rope, "rms_rope_", interrupted)
    of.once(ours, "MageFlow")
    assert torch.equal(*found)
    assert served.threads == {threading.get_ident()}

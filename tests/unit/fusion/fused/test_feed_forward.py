"""Feed-forwards of models that no family knows compute a piece of their rows at a time, under the call's option, and else whole."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy
import comfy.ops
import family_scenes
import in_halves
import int8_files
import pytest
import torch
from scenes import distance, sample
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusestream import checkpoints
from fusestream.fusion.base.hooks import IN_PIECES, PIECES, RUNNING
from fusestream.fusion.fused import feed_forward, operations
from fusestream.fusion.fused.row_wise import products_in
from fusestream.fusion.weights.storage import product_bits
from fusestream.kernels_cuda import KernelPolicy
from fusestream.kernels_cuda.ops.matmul import mlp

AUTO, OFF = KernelPolicy.of("auto", precision="auto"), KernelPolicy.of("off")
STRANGERS = ("hunyuan_video_15", "sd3")
ROWS = 4  # of a piece, in these tests
OPS: Any = comfy.ops.manual_cast

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces may be of few rows."""
    monkeypatch.setattr(mlp, "CHUNK_ROWS", ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fed")


@functools.cache
def load(path: Path, dtype: torch.dtype, policy: KernelPolicy = AUTO) -> Any:
    with checkpoints.narrow.opened(comfy):
        return in_halves.load(path, policy, dtype)


@pytest.fixture(scope="module", autouse=True)
def models_go() -> Iterator[None]:
    yield
    load.cache_clear()


def latents(model: Any, kind: str, pieces: int | None = None) -> Tensor:
    """Of both prompts in a batch. pieces: the bytes that the call's option asks for."""
    model = model.clone()
    if pieces is not None:
        model.model_options["transformer_options"][PIECES] = pieces
    found = family_scenes.parts(sample(model, family_scenes.inputs(kind)))
    return torch.cat([part.flatten() for part in found])


class Largest(TorchDispatchMode):
    """The most elements of a tensor that is made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def calls(net: nn.Module, patch: pytest.MonkeyPatch) -> Counter[int]:
    """How often feed-forwards are computed within calls of a network from now on, by the number of rows. What a model makes of a
    prompt before is none."""
    found: Counter[int] = Counter()
    pieces = feed_forward.Cutting.pieces

    def noted(self: Any, x: Tensor) -> Any:
        made = pieces(self, x)
        if net.__dict__[RUNNING].policy is not None:
            found.update([x[piece].shape[:-1].numel() for piece in made] or [x.shape[:-1].numel()])
        return made

    patch.setattr(feed_forward.Cutting, "pieces", noted)
    return found


# ------------------------------------------------------------------------------------------------------- whole networks


@pytest.mark.parametrize("kind", STRANGERS)
def test_pieces_leave_the_result(kind: str, folder: Path, few_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(checkpoints.write(kind, folder, "fp32"), torch.float32)
    rows = calls(model.model.diffusion_model, monkeypatch)
    whole = latents(model, kind)
    assert max(rows) > 2 * ROWS
    rows.clear()
    torch.testing.assert_close(latents(model, kind, 1), whole, rtol=1e-3, atol=1e-4)
    assert max(rows) == ROWS


@pytest.mark.parametrize("kind", STRANGERS)
def test_of_a_files_integers_pieces_leave_every_bit(
    kind: str, folder: Path, few_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has a scale of its own, and sums of integers are exact."""
    of_int8, _ = int8_files.write(checkpoints.write(kind, folder, "fp16"), folder, "convrot")
    model = load(of_int8, torch.bfloat16)
    running: operations.Running = model.model.diffusion_model.__dict__[RUNNING]
    compute, rows, of_integers = (
        feed_forward.InPieces.forward,
        calls(model.model.diffusion_model, monkeypatch),
        set[int](),
    )

    def twice(self: Any, x: Tensor) -> Any:
        cut, pieces, running.pieces = compute(self, x), running.pieces, 2**40
        whole, running.pieces = compute(self, x), pieces
        if running.policy is not None and all(product_bits(part) == 8 for part in products_in(self)):
            assert torch.equal(cut, whole)
            of_integers.add(id(self))
        return cut

    monkeypatch.setattr(feed_forward.InPieces, "forward", twice)
    latents(model, kind, 1)
    assert rows[ROWS] > 0 and len(of_integers) >= len(model.stream.blocks) / 2


def test_weights_cross_the_bus_once_whatever_the_pieces(folder: Path, few_rows: None) -> None:
    """By the pager's account, of a model of which every block streams."""
    path = checkpoints.write("krea2", folder, "fp16")
    found = []
    for pieces in (None, 1):
        with checkpoints.narrow.opened(comfy):
            model = in_halves.load(path, AUTO, torch.bfloat16)
        latents(model, "krea2", pieces)
        summary = model.stream.residency.ledger.summary()
        found.append((summary["counts"]["copy"], summary["counts"]["use"], summary["bytes by route"]))
    assert found[0] == found[1] and found[0][0] > len(model.stream.blocks)


def test_with_kernels_off_nothing_is_cut(folder: Path, few_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints.write("krea2", folder, "fp16")
    model = load(path, torch.bfloat16, OFF)
    rows = calls(model.model.diffusion_model, monkeypatch)
    assert torch.equal(latents(model, "krea2", 1), latents(model, "krea2")) and min(rows) > ROWS


def test_a_lora_on_its_weights_works_in_pieces(folder: Path, few_rows: None) -> None:
    path = checkpoints.write("krea2", folder, "fp32")
    model = load(path, torch.float32)
    key = "diffusion_model.blocks.0.mlp.down.weight"
    changed = model.clone()
    changed.add_patches({key: ("diff", (torch.randn(model.model.state_dict()[key].shape) * 0.3,))})
    plain, whole, cut = latents(model, "krea2"), latents(changed, "krea2"), latents(changed, "krea2", 1)
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-4)
    assert distance(cut, plain) > 1e-3


# ----------------------------------------------------------------------------------------------------- one feed-forward


class Net(nn.Module):
    """A network with one feed-forward, in a call with this policy."""

    def __init__(self, policy: KernelPolicy | None = AUTO) -> None:
        super().__init__()
        self.ff: Any = nn.Sequential(OPS.Linear(16, 64), nn.GELU(), OPS.Linear(64, 16))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.2)
        operations.fuse(self)
        assert feed_forward.fuse(self) == 1
        self.running: operations.Running = self.__dict__[RUNNING]
        self.running.policy, self.running.pieces = policy, 1
        self.eval()

    def rows(self, patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
        """The shapes that the first product sees from now on."""
        seen: list[tuple[int, ...]] = []
        forward = operations.Multiplying.forward

        def noted(module: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            if module is self.ff[0]:
                seen.append(tuple(x.shape))
            return forward(module, x, *args, **kwargs)

        patch.setattr(operations.Multiplying, "forward", noted)
        return seen

    def whole(self, x: Tensor) -> Tensor:
        policy, self.running.policy = self.running.policy, None
        found: Tensor = self.ff(x)
        self.running.policy = policy
        return found


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(21, 16),
        torch.randn(1, 21, 16),
        torch.randn(3, 21, 16),
        torch.randn(21, 3, 16),
        torch.randn(2, 3, 5, 16),
        torch.randn(2, 3, 2, 7, 16),
        torch.randn(9, 3, 16).transpose(0, 1),
        torch.randn(2, 16, 3, 7).permute(0, 2, 3, 1),
        torch.randn(1, 21, 32)[..., ::2],
        torch.randn(1, 1, 16).expand(2, 9, 16),
    ],
    ids=lambda x: f"{tuple(x.shape)} {tuple(x.stride())}",
)
def test_rows_of_any_shape(x: Tensor, few_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    wanted = net.whole(x)
    seen = net.rows(monkeypatch)
    found = net.ff(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert found.is_contiguous() and len(seen) > 1
    assert all(len(shape) == x.ndim and torch.Size(shape[:-1]).numel() <= ROWS for shape in seen)


def test_a_piece_takes_what_it_may(few_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hidden values: a product's sums and what the activation makes of them."""
    net = Net()
    seen = net.rows(monkeypatch)
    for dtype, rows in ((torch.float32, 8), (torch.bfloat16, 16)):
        net.running.pieces = 8 * 2 * 64 * 4
        net.to(dtype).ff(torch.randn(1, 64, 16, dtype=dtype))
        assert set(seen) == {(1, rows, 16)}
        seen.clear()
    net.running.pieces *= 4
    net.ff(torch.randn(1, 64, 16, dtype=torch.bfloat16))
    assert seen == [(1, 64, 16)], "all at once, as they fit"


def test_hidden_values_are_never_there_as_a_whole(few_rows: None) -> None:
    x, largest = torch.randn(1, 40, 16), []
    for net in (Net(None), Net()):
        with Largest() as made:
            net.ff(x)
        largest.append(made.elements)
    assert largest == [40 * 64, 40 * 16]


def test_all_at_once_where_it_must_be(few_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, net = torch.randn(1, 40, 16), Net()
    seen = net.rows(monkeypatch)

    def is_whole() -> bool:
        seen.clear()
        net.ff(x)
        return seen == [(1, 40, 16)]

    assert not is_whole()
    for policy in (None, OFF):
        net.running.policy = policy
        assert is_whole()
    net.running.policy = AUTO
    with torch.inference_mode(mode=False), torch.enable_grad():
        assert is_whole()
    assert not is_whole()


def test_a_compiled_graph_has_no_pieces(few_rows: None) -> None:
    x, net = torch.randn(1, 40, 16), Net()
    shapes: list[torch.Size] = []

    def noted(graph: Any, _: Any) -> Any:
        shapes.extend(node.meta["example_value"].shape for node in graph.graph.nodes if "linear" in str(node.target))
        return graph

    found = torch.compile(net.ff, backend=noted, fullgraph=True)(x)
    assert torch.equal(found, net.whole(x)) and shapes == [(1, 40, 64), (1, 40, 16)]


def test_hooks_of_other_nodes_see_one_call(few_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the module itself, which computes in pieces within; and on a part of it, which then sees all rows."""
    x, net = torch.randn(1, 40, 16), Net()
    wanted, seen, told = net.whole(x), net.rows(monkeypatch), list[tuple[int, ...]]()
    for part, is_cut in ((net.ff, True), (net.ff[0], False), (net.ff[1], False)):
        seen.clear()
        hook = part.register_forward_hook(lambda _module, args, _out: told.append(tuple(args[0].shape[:-1])))
        torch.testing.assert_close(net.ff(x), wanted)
        hook.remove()
        assert told.pop() == (1, 40) and not told and (len(seen) > 1) is is_cut


def test_what_another_node_puts_into_it_sees_all_rows(few_rows: None) -> None:
    """It may not be row-wise."""
    x, net = torch.randn(1, 40, 16), Net()
    net.ff[1].forward = lambda x: x - x.mean(dim=1, keepdim=True)
    assert torch.equal(net.ff(x), net.whole(x))
    del net.ff[1].forward
    net.ff[1] = nn.Softmax(dim=1)
    assert torch.equal(net.ff(x), net.whole(x))


def test_other_arguments_run_whole(few_rows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(nn.Module):
        """As Qwen-Image's, which takes whatever comes and looks at one tensor."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = OPS.Linear(16, 64), OPS.Linear(64, 16)

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            made: Tensor = self.other(torch.relu(self.one(x))) * scale
            return made

    net = Net()
    net.ff = Told()
    operations.fuse(net)
    assert feed_forward.fuse(net) == 1
    net.__dict__[RUNNING].policy, net.__dict__[RUNNING].pieces = AUTO, 1
    with Largest() as whole:
        net.ff(torch.randn(1, 40, 16), 2.0)
    with Largest() as cut:
        net.ff(torch.randn(1, 40, 16))
    assert (whole.elements, cut.elements) == (40 * 64, 40 * 16)


# --------------------------------------------------------------------------------------------------------- what is found


def found_in(**parts: Any) -> list[str]:
    net = nn.Module()
    for name, part in parts.items():
        net.add_module(name, part.eval())
    operations.fuse(net)
    feed_forward.fuse(net)
    return [name for name, module in net.named_modules() if IN_PIECES in module.__dict__]


def test_the_outermost_module_is_cut() -> None:
    inner = nn.Sequential(OPS.Linear(8, 32), nn.GELU(), OPS.Linear(32, 8))
    assert found_in(ff=nn.Sequential(OPS.LayerNorm(8), inner)) == ["ff"]
    assert found_in(ff=nn.Sequential(nn.Sequential(inner, nn.Softmax(dim=1)), nn.SiLU())) == ["ff.0.0"]


def test_what_is_no_feed_forward() -> None:
    assert not found_in(
        modulation=nn.Sequential(nn.SiLU(), OPS.Linear(8, 48)),
        narrow=nn.Sequential(nn.SiLU(), OPS.Linear(8, 4), OPS.Linear(4, 48)),
        embedder=nn.Sequential(OPS.Linear(8, 32), nn.SiLU(), OPS.Linear(32, 32)),
        product=OPS.Linear(8, 32),
        many=nn.Sequential(*(OPS.Linear(8, 8) for _ in range(4)), OPS.Linear(8, 32), OPS.Linear(32, 8)),
    )


def test_a_network_as_a_whole_is_never_cut() -> None:
    net = nn.Sequential(OPS.Linear(8, 32), nn.GELU(), OPS.Linear(32, 8))
    operations.fuse(net)
    assert feed_forward.fuse(net) == 0


def test_products_that_scale_by_the_largest_of_all_rows_are_not_cut() -> None:
    """Of nvfp4, unless the file has the scale: a piece would be rounded otherwise than the whole."""
    made: Any = comfy.ops.manual_cast.Linear
    net = nn.ModuleDict({"ff": nn.Sequential(made(16, 64), nn.GELU(), made(64, 16))})
    product: Any = net["ff"][0]
    assert len(list(feed_forward.feed_forwards(net))) == 1
    product.layout_type = "TensorCoreNVFP4Layout"
    assert not list(feed_forward.feed_forwards(net))
    product.input_scale = torch.ones(())
    assert len(list(feed_forward.feed_forwards(net))) == 1

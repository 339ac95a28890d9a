"""Peers beside stock and ours in the same run: stock with the switches that its users turn on for speed.

torch.compile   the model through ComfyUI's own node TorchCompileModel, backend inductor. Its first step has the compilation, with
                nothing compiled before: caches are empty.
SageAttention   stock started with --use-sage-attention, which takes the package `sageattention` where Python finds it. 1.0.6 is the
                last one that is Python alone (Triton), under BSD 3-Clause; newer ones are built with a CUDA toolkit. It is no
                dependency of anything here. Triton 3.3 and newer compile it for sm_80 and up, not for sm_75.

tiles           stock's node VAE Decode (Tiled), which people put in place of VAE Decode where that runs out of memory.

Stock hides it when either is not at work: where SageAttention raises, torch's attention serves the call, and what cannot be traced
runs as it is. So calls and graphs are counted, and a side whose figure would be plain stock's has the reason instead.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from importlib import metadata
from typing import Any

from .row_types import SAGE, Side

PACKAGE, TESTED = "sageattention", "1.0.6"
CACHES = {
    "torch.compile": "TORCHINDUCTOR_CACHE_DIR",
    "SageAttention": "TRITON_CACHE_DIR",
}  # Triton's lies within the former
MESSAGE = 120  # letters of it


class Unavailable(RuntimeError):
    """A peer cannot run here; the message says why."""


def name_of(side: Side) -> str | None:
    """Which one the side is; None: plain stock, or ours."""
    if side.compiled:
        return "torch.compile"
    return "SageAttention" if SAGE in side.comfy else None


def obstacle(side: Side, *, on_cpu: bool) -> str | None:
    """Why it cannot run here; None where it can. Without ComfyUI, which would end the process."""
    name = name_of(side)
    if name == "SageAttention":
        if on_cpu:
            return "SageAttention runs on NVIDIA cards alone"
        if importlib.util.find_spec(PACKAGE) is None:
            return f"SageAttention is not installed: pip install --no-deps {PACKAGE}=={TESTED}"
    if name is not None and not on_cpu and importlib.util.find_spec("triton") is None:
        return f"{name} needs Triton, which is not installed"
    return None


def require(side: Side, *, on_cpu: bool) -> None:
    reason = obstacle(side, on_cpu=on_cpu)
    if reason is not None:
        raise Unavailable(reason)


def caches(side: Side) -> list[str]:
    """Variables that name where it keeps what it compiled."""
    name = name_of(side)
    return [] if name is None else [CACHES[name]]


class Peer:
    """One of them, from before its model is loaded; what it did is counted."""

    def __init__(self, side: Side, *, on_cpu: bool) -> None:
        require(side, on_cpu=on_cpu)
        self.name, self.on_cpu = name_of(side), on_cpu
        self.served = 0
        self.refused: Counter[str] = Counter()
        if self.name == "torch.compile":
            self._graphs().clear()
        elif self.name == "SageAttention":
            self._count_calls()

    def _count_calls(self) -> None:
        attention: Any = importlib.import_module("comfy.ldm.modules.attention")
        plain = attention.sageattn

        def counted(*args: Any, **kwargs: Any) -> Any:
            try:
                out = plain(*args, **kwargs)
            except Exception as error:  # stock catches it, and lets torch's attention serve the call
                self.refused[f"{type(error).__name__}: {error}".partition("\n")[0][:MESSAGE]] += 1
                raise
            self.served += 1
            return out

        attention.sageattn = counted

    @staticmethod
    def _graphs() -> Any:
        """Torch's counters of what was compiled in this process."""
        return importlib.import_module("torch._dynamo.utils").counters

    def model(self, model: Any) -> Any:
        """The model as its node leaves it."""
        if self.name != "torch.compile":
            return model
        node = importlib.import_module("comfy_extras.nodes_torch_compile").TorchCompileModel
        backend = "eager" if self.on_cpu else "inductor"  # where nothing is measured: traced, and that is all
        return node.execute(model, backend).result[0]

    def told(self) -> dict[str, Any]:
        """With what it ran, and how often it served."""
        if self.name == "torch.compile":
            counters = self._graphs()
            graphs, breaks = counters["stats"]["unique_graphs"], Counter(counters["graph_break"])
            reasons = {" ".join(reason.split())[:MESSAGE]: count for reason, count in breaks.most_common(2)}
            told = {"versions": versions("torch", "triton"), "graphs": graphs, "graph breaks": breaks.total()}
            return told | {"break reasons": reasons}
        if self.name == "SageAttention":
            refused = dict(self.refused.most_common(3))
            return {"versions": versions(PACKAGE, "triton"), "calls": self.served, "refused": refused}
        return {}

    def failure(self) -> str | None:
        """Why what was timed is not its own; None where it is."""
        if self.name == "torch.compile" and not self.told()["graphs"]:
            return "torch.compile compiled no graph of this model"
        if self.name == "SageAttention" and self.refused:
            reason, _ = self.refused.most_common(1)[0]
            calls = self.refused.total()
            return f"SageAttention refused {calls} of {calls + self.served} calls, which torch served: {reason}"
        if self.name == "SageAttention" and not self.served:
            return "SageAttention was asked for no call of this model"
        return None


def decode_in_tiles(vae: Any, latent: Any) -> Any:
    """By stock's node VAE Decode (Tiled), with what it has by default: tiles of so many pixels, and of so many frames."""
    node = importlib.import_module("nodes").VAEDecodeTiled
    given = {name: told[1]["default"] for name, told in node.INPUT_TYPES()["required"].items() if told[0] == "INT"}
    return node().decode(vae, {"samples": latent}, **given)[0]


def versions(*packages: str) -> str:
    return ", ".join(f"{package} {version(package)}" for package in packages)


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # it lies there without its notes
        return "?"

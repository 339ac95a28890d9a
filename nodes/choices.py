"""The inputs that several nodes have in common: one type, one set of values, a tooltip of each node's own."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

AUTO = -1.0  # of a budget: what is free


def kernels(tooltip: str) -> Any:
    return io.Combo.Input("kernels", options=["auto", "on", "off"], default="auto", optional=True, tooltip=tooltip)


def precision(tooltip: str) -> Any:
    return io.Combo.Input("precision", options=["precise", "fast"], default="precise", optional=True, tooltip=tooltip)


def vram_budget(tooltip: str) -> Any:
    """GiB; 0 and AUTO have meanings of their own. The front end rounds to the step, and shows as many digits as it has."""
    return io.Float.Input("vram_budget", default=AUTO, min=-1.0, max=1024.0, step=0.05, optional=True, tooltip=tooltip)

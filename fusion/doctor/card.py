"""Driver, cards, and the prebuilt kernels that they can load."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import torch

from ...gpu import driver
from ...kernels_cuda import (
    CodeUnavailable,
    KernelPolicy,
    gelu,
    launcher,
)
from ...kernels_cuda.binary import arch, archive
from ...kernels_cuda.build import matrix
from ..base.format import IN_BYTES, counted, quality
from .findings import ADVICE, STOPS

GIB = 2**30
OLDEST_DRIVER = 525
# Cards of compute capability 7.5 without tensor cores, by the names that ComfyUI knows them by.
NO_TENSOR_CORES = (
    "1660",
    "1650",
    "1630",
    "T500",
    "T550",
    "T600",
    "MX550",
    "MX450",
    "CMP 30HX",
    "T2000",
    "T1000",
    "T1200",
)


def graphics_driver() -> Iterator[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield f"{ADVICE}nvidia-smi is not there: no NVIDIA driver is installed, or it is not on the path"
    else:
        command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)  # Windows would open a console
        said = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20, creationflags=flags)
        version = said.stdout.strip().splitlines()[0] if said.stdout.strip() else said.stderr.strip()
        yield f"NVIDIA driver {version}"
        if version.split(".")[0].isdigit() and int(version.split(".")[0]) < OLDEST_DRIVER:
            yield f"{STOPS}the prebuilt kernels need driver {OLDEST_DRIVER} or newer. Update it."
    yield f"CUDA of the driver: {driver().version}"


def cards() -> Iterator[str]:
    if not torch.cuda.is_available():
        yield "torch finds no NVIDIA card"
        return
    if torch.version.hip:
        yield "none of NVIDIA's"
        return
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield f"cuda:{index} {seen.name}, {total / GIB:.1f} GiB of VRAM, {free / GIB:.1f} free"
        yield card_class(seen.name, (seen.major, seen.minor))


def card_class(name: str, capability: tuple[int, int]) -> str:
    """The code that serves a card, in words."""
    number = f"compute capability {capability[0]}.{capability[1]}"
    too_old = arch.too_old(capability)
    if too_old is not None:
        return f"{ADVICE}{too_old}: no kernel serves it, ComfyUI's own operations run"
    best = next(variant for variant in arch.preference(capability) if variant in arch.VARIANTS)
    text = f"{number}: code for {best}, instruction class {arch.isa_class(best)}"
    if not arch.has_tensor_cores(capability):
        return f"{text}, without tensor cores: quality auto computes in bytes, as '{quality(IN_BYTES)}'; FP16 and FP32 are torch's"
    if capability == arch.OLDEST_WITH_TENSOR_CORES and any(word in name for word in NO_TENSOR_CORES):
        return (
            f"{ADVICE}{text}, but this series (GTX 16 and its kin) has no tensor cores, and ComfyUI computes in FP32 on it: "
            "the FP16 kernels are not asked; streaming works"
        )
    return f"{text}, with tensor cores"


def prebuilt() -> Iterator[str]:
    """Whether the archive was built from the sources beside it."""
    path, current = archive.PREBUILT, matrix.source_hash()
    manifest = archive.read_manifest(path)
    yield f"{path.name}: built from {manifest.source_hash} with {manifest.compiler}"
    counts = ", ".join(f"{variant} {len(units)}" for variant, units in manifest.variants.items())
    yield f"units by variant: {counts}"
    if manifest.source_hash != current:
        yield f"{ADVICE}it is stale: the sources are {current}. Install the pack anew."


def kernels() -> Iterator[str]:
    """Load every unit on every card, and let one kernel compute."""
    if not torch.cuda.is_available() or torch.version.hip:
        yield "not tried: torch finds no NVIDIA card, the reference implementations serve"
        return
    for index in range(torch.cuda.device_count()):
        if arch.too_old(torch.cuda.get_device_capability(index)) is not None:
            yield f"cuda:{index}: not tried, no kernel serves this card"
            continue
        try:
            card = launcher.card(index)
        except CodeUnavailable as error:
            yield f"{STOPS}cuda:{index}: no kernel can be loaded: {error}"
            continue
        loaded, failed = [], []
        for unit, source in card.code.units.items():
            try:
                card.kernel(unit, next(iter(source.kernels)))
                loaded.append((unit, source.variant, len(source.kernels)))
            except Exception as error:  # noqa: PERF203 - the next unit may load
                failed.append(f"{ADVICE}{unit} ({source.variant}) does not load: {error}")
        variants = ", ".join(sorted({variant for _, variant, _ in loaded}))
        count = sum(kernels for _, _, kernels in loaded)
        share = f"{len(loaded)} of {counted(len(card.code.units), 'unit')} ({counted(count, 'kernel')})"
        yield f"cuda:{index}: {share} loaded as {variants}; {card.code.origin}"
        yield f"  {', '.join(unit for unit, _, _ in loaded)}"
        yield from failed
        yield one_computes(index) if loaded else f"{STOPS}cuda:{index}: no kernel loads, ComfyUI's own operations run"


def one_computes(index: int) -> str:
    """Compare one kernel's result with torch's."""
    x = torch.linspace(-6, 6, 4096, device=f"cuda:{index}").half()
    ours = gelu(x, policy=KernelPolicy.of("on")).float()
    error = float((ours - torch.nn.functional.gelu(x.float())).abs().max())
    if error < 1e-2:
        return f"a kernel's result is right (error {error:.1e})"
    return f"{STOPS}a kernel's result is wrong by {error:.1e}: please report this"

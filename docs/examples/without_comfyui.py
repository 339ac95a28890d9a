"""A network of torch's over FuseStream's kernels, without ComfyUI: `python without_comfyui.py`, with the wheel installed.

The wheel is written by `python3 dev.py wheel`. Without an NVIDIA card torch computes, and the example says so.
"""

from __future__ import annotations

import time

import torch
from torch import nn

import fusestream

SIDE, CHANNELS, TIMES = 256, 64, 20


def network() -> nn.Sequential:
    """Of pictures [batch, 3, height, width]: convolutions with norms, as a small filter has them."""
    layers: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 3, padding=1)]
    for _ in range(4):
        layers += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.GroupNorm(8, CHANNELS), nn.SiLU()]
    return nn.Sequential(*layers, nn.Conv2d(CHANNELS, 3, 3, padding=1))


def milliseconds(net: nn.Module, x: torch.Tensor) -> float:
    """Of one call, when those that choose kernels are over."""
    for _ in range(TIMES):
        net(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(TIMES):
        net(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / TIMES * 1e3


if __name__ == "__main__":
    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    net = network().eval().to(device, dtype, memory_format=torch.channels_last)
    x = torch.rand(1, 3, SIDE, SIDE, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    with torch.inference_mode():
        torchs, before = net(x), milliseconds(net, x)
        print(fusestream.fuse(net))
        ours, after = net(x), milliseconds(net, x)
    print(f"torch {before:.2f} ms, fused {after:.2f} ms, largest difference {(ours - torchs).abs().max():.1e}")
    print(*{refusal.reason for refusal in fusestream.LEDGER.refusals}, sep="\n")

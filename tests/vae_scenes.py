"""The VAEs that are fused, as tests ask them: stock's modules, small or of their real sizes, and what the user may do meanwhile."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import comfy
import comfy.ldm.models.autoencoder
import comfy.ldm.wan.vae as wan21
import comfy.ldm.wan.vae2_2 as wan22
import comfy.model_management
import comfy.sd
import comfy.taesd.taesd
import comfy.utils
import pytest
import torch
from live_memory import LiveBytes
from safetensors.torch import save_file

from fusestream import checkpoints
from fusestream.checkpoints import narrow
from fusestream.fusion.families.image_vae import IMAGE_VAE, TINY_VAE, fused, tiny
from fusestream.fusion.families.wan import WAN_VAE
from fusestream.fusion.families.wan.vae import fused as wan_vae
from fusestream.kernels_cuda import KernelPolicy

OFF = KernelPolicy.of("off")


@dataclass(frozen=True)
class Kind:
    """A VAE that is published.

    family    what serves it; module: its `fuse` and `memory_used`
    channels  of the latents; ratio: pixels of one of them, along either side
    budgets   options of its `decode` and `encode`, for more and more bands
    full      stock's module at its real size, where tests want it
    """

    name: str
    family: Any
    module: Any
    channels: int
    ratio: int
    budgets: tuple[dict[str, int], ...]
    full: Callable[[], Any] | None = None

    @property
    def frames(self) -> bool:
        """Whether it is for videos."""
        return self.family is WAN_VAE

    def given(self, way: str, height: int, width: int, batch: int = 1, frames: int = 3) -> torch.Tensor:
        """What a decoding, or an encoding, of a latent of this size is given; frames: of the latent, where there are some."""
        side = 1 if way == "decode" else self.ratio
        length = (frames if way == "decode" else 4 * frames - 3,) if self.frames else ()
        return torch.randn(batch, self.channels if way == "decode" else 3, *length, side * height, side * width)

    def fused(self, net: Any, policy: KernelPolicy = OFF) -> Any:
        """A copy that computes through our ops; on the CPU `off` is stock's computation, else the references."""
        net = copy.deepcopy(net)
        self.module.fuse(net, policy)
        return net


def flux() -> Any:
    sizes = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128}
    sizes |= {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    model = "comfy.ldm.modules.diffusionmodules.model"
    return comfy.ldm.models.autoencoder.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{model}.Encoder", "params": sizes},
        decoder_config={"target": f"{model}.Decoder", "params": sizes},
    )


def taesd(channels: int) -> Any:
    return comfy.taesd.taesd.TAESD(latent_channels=channels).requires_grad_(False)


def wan(version: Any, **widths: int) -> Any:
    return version.WanVAE(dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True], **widths)


ROOMS = tuple({"room": kib << 10} for kib in (1 << 30, 1000, 250, 1))
SMALLER = tuple({"room": kib << 10} for kib in (1 << 30, 8000, 1))
BANDS = tuple({"bands": count} for count in (1, 2, 3))
KINDS = {
    kind.name: kind
    for kind in (
        Kind("sd_vae", IMAGE_VAE, fused, 4, 8, ROOMS),
        Kind("flux_vae", IMAGE_VAE, fused, 16, 8, ROOMS, flux),
        Kind("flux2_vae", IMAGE_VAE, fused, 128, 16, ROOMS),
        Kind("taesd", TINY_VAE, tiny, 4, 8, SMALLER, partial(taesd, 4)),
        Kind("taef1", TINY_VAE, tiny, 16, 8, SMALLER),
        Kind("taef2", TINY_VAE, tiny, 128, 16, SMALLER, partial(taesd, 128)),
        Kind("wan_vae", WAN_VAE, wan_vae, 16, 8, BANDS, partial(wan, wan21, dim=96, z_dim=16)),
        Kind("wan22_vae", WAN_VAE, wan_vae, 48, 16, BANDS, partial(wan, wan22, dim=160, z_dim=48)),
    )
}


class Files:
    """A small file of each kind, and what stock makes of it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._paths, self._nets = folder, dict[str, Path](), dict[str, Any]()

    def path(self, kind: str) -> Path:
        if kind not in self._paths and KINDS[kind].family is TINY_VAE:
            self._paths[kind] = self._folder / f"{kind}.safetensors"
            save_file(
                {name: each.contiguous() for name, each in self.net(kind).state_dict().items()}, self._paths[kind]
            )
        elif kind not in self._paths:
            self._paths[kind] = checkpoints.write(kind, self._folder, "fp32")
        return self._paths[kind]

    @contextlib.contextmanager
    def opened(self, kind: str) -> Iterator[str]:
        """While a small file of this kind can be loaded: stock has some of the published sizes built in."""
        path = self.path(kind)
        with contextlib.ExitStack() as stack:
            if kind == "wan22_vae":
                stack.enter_context(checkpoints.narrow.wan22_widths(wan22, path))
            elif KINDS[kind].family is IMAGE_VAE:
                stack.enter_context(narrow.opened(comfy))
            yield str(path)

    def stocks(self, kind: str) -> Any:
        """Stock's VAE."""
        with self.opened(kind) as path:
            weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
            return comfy.sd.VAE(sd=weights, metadata=metadata)

    def net(self, kind: str) -> Any:
        """Its module in fp32, which nobody changes."""
        if kind not in self._nets:
            is_tiny = KINDS[kind].family is TINY_VAE
            self._nets[kind] = drawn(KINDS[kind]) if is_tiny else self.stocks(kind).first_stage_model.float()
        return self._nets[kind]


def drawn(kind: Kind) -> Any:
    """A TAESD in fp32, with weights that keep the size of what passes through."""
    torch.manual_seed(0)
    net = taesd(kind.channels)
    for name, parameter in net.named_parameters():
        if parameter.ndim == 4:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        elif ".pool.1." in name or "vae_" in name:
            parameter.normal_(1, 0.1)
        else:
            parameter.normal_(std=0.1)
    return net


def interrupted(monkeypatch: pytest.MonkeyPatch, net: Any, way: str, given: torch.Tensor, **pieces: int) -> None:
    """The user stops `net` at the twelfth look at them, before its last piece: all that it had made goes."""
    management = comfy.model_management
    polls: list[Any] = []
    progress: list[tuple[int, int]] = []

    def poll() -> None:
        polls.append(progress[-1:])
        if len(polls) == 12:
            management.interrupt_current_processing()
        throw()

    throw = management.throw_exception_if_processing_interrupted
    monkeypatch.setattr(management, "throw_exception_if_processing_interrupted", poll)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda at, of, *_, **__: progress.append((at, of)))
    out = torch.empty(net.decode_output_shape(given.shape)) if way == "decode" else None
    options = {"output_buffer": out} if way == "decode" else {"device": torch.device("cpu")}
    known = [given, *net.parameters(), *net.buffers()] + ([] if out is None else [out])
    with LiveBytes(*known) as live:
        with pytest.raises(management.InterruptProcessingException):
            getattr(net, way)(given, **pieces, **options)
        assert live.most > live.now == 0
    assert progress and all(at < of for at, of in progress)
    monkeypatch.undo()

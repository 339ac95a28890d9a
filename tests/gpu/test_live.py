"""Live video on the card: frame by frame what stock's nodes make, stages on streams as in order, blended in one launch, in memory
that does not grow. Needs a ComfyUI."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.support import until_chosen

from fusestream import checkpoints
from fusestream.kernels_cuda import KernelPolicy

pytestmark = pytest.mark.skipif(not os.environ.get("COMFYUI_PATH"), reason="COMFYUI_PATH names no ComfyUI")
SIDE = 128
NEAR = 4e-3  # of 1: a few roundings of fp16 on the way through network and VAE


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Any, Any, Any, Any]]]:
    """By whose they are: MODEL, two CONDITIONINGs and VAE. TAESD's weights are drawn."""
    import comfy
    import comfy.sd
    import comfy.taesd.taesd
    import comfy.utils

    from fusestream import fusion

    folder: Path = tmp_path_factory.mktemp("live")
    with torch.inference_mode(), checkpoints.narrow.opened(comfy):
        net, vae = (str(checkpoints.write(kind, folder)) for kind in ("sd15", "sd_vae"))
        generator = torch.Generator().manual_seed(0)
        words, others = (
            [[torch.randn(1, 12, checkpoints.pictures.UNETS["sd15"].context, generator=generator), {}]]
            for _ in range(2)
        )
        tiny = {}
        for name, value in comfy.taesd.taesd.TAESD(latent_channels=4).state_dict().items():
            if value.ndim > 1:
                tiny[name] = torch.randn(value.shape, generator=generator) * value[0].numel() ** -0.5
            else:  # nobody has set the biases
                tiny[name] = torch.full_like(value, 1.0 if name == "vae_scale" else 0.0)
        stocks = comfy.sd.load_diffusion_model(net)
        ours = fusion.load_diffusion_model(net, KernelPolicy.of("auto", diffusion_step="on"))  # ours, or an error
        yield {
            "stock's": (stocks, words, others, comfy.sd.VAE(sd=comfy.utils.load_torch_file(vae))),
            "ours": (ours, words, others, fusion.load_vae(vae)),
            "ours through TAESD": (ours, words, others, fusion.load_vae_in_parts("taesd", tiny)),
        }


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


def clip(count: int) -> torch.Tensor:
    """Frames in which a part moves and all else stays."""
    frames = torch.rand(SIDE, SIDE, 3).repeat(count, 1, 1, 1)
    for i in range(count):
        frames[i, : SIDE // 4, : SIDE // 4] = i / count
    return frames


def live(own: tuple[Any, Any, Any, Any], frames: Any, **told: Any) -> torch.Tensor:
    from fusestream.fusion.live import engine
    from fusestream.fusion.live.settings import Settings

    made: list[torch.Tensor] = []
    engine.run(*own, frames, Settings(seed=5, **told), made.append)
    return torch.stack(made)


def by_stock(
    own: tuple[Any, Any, Any, Any], frames: torch.Tensor, steps: int, cfg: float, sampler: str
) -> torch.Tensor:
    """What VAE Encode, KSampler and VAE Decode do with each frame."""
    import comfy.sample

    model, words, others, vae = own
    made = []
    for frame in frames:
        latent = vae.encode(frame[None])
        noise = comfy.sample.prepare_noise(latent, 5)
        run = (steps, cfg, sampler, "simple", words, others, latent)
        latent = comfy.sample.sample(model, noise, *run, denoise=0.5, disable_pbar=True, seed=5)
        made.append(vae.decode(latent)[0])
    return torch.stack(made).float()


def alike(got: torch.Tensor, want: torch.Tensor) -> None:
    """But for roundings: a frame of which something was read too early, or that is another's, is nowhere near."""
    assert got.shape == want.shape
    apart = (got - want).abs().flatten(1)
    print(f"apart: {apart.mean(1).max():.2g} on average over a frame, {apart.max():.2g} at most")
    assert apart.mean(1).max() < NEAR / 2 and apart.max() < 10 * NEAR


@pytest.mark.parametrize("whose", ["stock's", "ours", "ours through TAESD"])
@pytest.mark.parametrize(("steps", "cfg", "sampler"), [(1, 1.0, "euler"), (2, 3.0, "euler"), (3, 1.0, "lcm")])
def test_each_frame_is_what_stocks_nodes_make(parts, whose, steps, cfg, sampler):
    frames = clip(5)
    by_stock(parts[whose], frames[:1], steps, cfg, sampler)  # the first of a process is not quite like all others
    want = by_stock(parts[whose], frames, steps, cfg, sampler)
    for batch in (1, 2):
        got = live(parts[whose], frames, steps=steps, cfg=cfg, sampler=sampler, batch=batch)
        assert want.std() > 0.01
        alike(got, want)


@pytest.mark.parametrize("whose", ["stock's", "ours through TAESD"])
def test_stages_on_streams_make_what_stages_in_order_make(parts, whose, monkeypatch):
    """Many short frames, so that whatever is not waited for is read too early."""
    from fusestream.fusion.live import engine, lanes

    class Waits(lanes.InOrder):
        def take(self, handed: lanes.Handed) -> torch.Tensor:
            torch.cuda.synchronize()  # the copy to the host is on its way
            return handed.value

    frames, told = clip(60), {"blend": 0.6, "skip": 0.0}
    until_chosen(lambda: live(parts[whose], frames[:4], **told))
    overlapped = live(parts[whose], frames, **told)
    monkeypatch.setattr(engine, "lanes_for", lambda _device: lanes.contextlib.nullcontext(Waits()))
    alike(overlapped, live(parts[whose], frames, **told))


@pytest.mark.timed
def test_encoding_and_decoding_are_replayed(parts, monkeypatch):
    """As graphs, on their streams beside the network's, they make what they make launch after launch. Timed: with another process
    on the card a call takes the card longer than the host, and is not captured."""
    from fusestream.fusion.live import engine
    from fusestream.fusion.live.settings import Settings

    own, frames = parts["ours through TAESD"], clip(30)
    until_chosen(lambda: live(own, frames[:4]))
    made: list[torch.Tensor] = []
    tally = engine.run(*own, frames, Settings(seed=5), made.append)
    assert tally.replayed >= 2 * (len(frames) - 6)
    monkeypatch.setenv("FUSESTREAM_GRAPHS", "0")
    alike(torch.stack(made), live(own, frames))


def test_the_kernel_blends(parts):
    """Guidance, step and blend in one launch: none of its calls is refused."""
    own, frames = parts["ours"], clip(4)
    blended, plain = live(own, frames, cfg=3.0, blend=0.9), live(own, frames, cfg=3.0)
    quiet = slice(SIDE // 2, None)
    moves = [(made[1:, quiet, quiet] - made[:-1, quiet, quiet]).abs().mean() for made in (blended, plain)]
    assert moves[0] < 0.7 * moves[1]
    torch.testing.assert_close(blended[0], plain[0], atol=NEAR, rtol=0)


@pytest.mark.parametrize("whose", ["stock's", "ours through TAESD"])
def test_memory_does_not_grow(parts, whose):
    """From the 50th frame on the card holds no more, and what the host has got it may keep or let go of."""
    from fusestream.fusion.live import engine
    from fusestream.fusion.live.settings import Settings

    held = []
    frame = torch.rand(SIDE, SIDE, 3)

    def deliver(_made: torch.Tensor) -> None:
        held.append(torch.cuda.memory_reserved())

    engine.run(*parts[whose], (frame for _ in range(400)), Settings(blend=0.5), deliver)
    assert len(held) == 400 and max(held[50:]) <= max(held[:50])


@pytest.mark.timed
def test_ten_thousand_frames_are_as_the_first_thousand(parts, record_property):
    """Nothing of the card, of RAM or of a frame's time grows with the frames that went by. What a thousand took goes into the
    record."""
    from fusestream.fusion.live import engine
    from fusestream.fusion.live.settings import Settings

    frames, told, before = itertools.cycle(clip(50)), [], time.perf_counter()
    count = 0

    def deliver(_made: torch.Tensor) -> None:
        nonlocal count, before
        count += 1
        if count % 1000 == 0:
            now, free_and_all = time.perf_counter(), torch.cuda.mem_get_info()
            held = {"card": free_and_all[1] - free_and_all[0], "RAM": resident_bytes()}
            told.append({"ms a frame": round(now - before, 3), **{k: round(v / 2**20, 1) for k, v in held.items()}})
            print(count, told[-1], flush=True)
            before = now

    run = Settings(blend=0.5)
    engine.run(*parts["ours through TAESD"], itertools.islice(frames, 10_000), run, deliver)
    record_property("each thousand frames, memory in MiB", told)
    settled, last = told[1], told[2:]  # in the first thousand kernels are chosen
    assert count == 10_000
    assert all(one["card"] <= settled["card"] + 2 for one in last)
    assert last[-1]["RAM"] <= settled["RAM"] + 16
    # The host has other work at times, and a thousand frames took half as long again; what grows would show in all.
    assert min(one["ms a frame"] for one in last[-3:]) <= 1.15 * settled["ms a frame"]


def resident_bytes() -> int:
    """Of RAM, of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_stages_are_told_in_their_order(parts):
    from fusestream.fusion.live import engine
    from fusestream.fusion.live.settings import Settings

    tally = engine.run(*parts["ours"], clip(12), Settings(), lambda _: None)
    by_group: dict[int, dict[str, Any]] = {}
    for ran in tally.ran:
        by_group.setdefault(ran.group, {})[ran.stage] = ran
    assert len(by_group) == 12
    for stages in by_group.values():
        encode, steps, decode = (stages[name] for name in ("encode", "steps", "decode"))
        assert 0 <= encode.start <= encode.end <= steps.end and steps.start >= encode.start
        assert steps.end <= decode.end and all(one.end >= one.start for one in stages.values())
        assert decode.end - steps.end >= -1e-4


def test_an_interrupt_leaves_nothing_behind(parts):
    import comfy.model_management as management

    from fusestream.fusion.live import engine
    from fusestream.fusion.live.settings import Settings

    def stops() -> Iterator[torch.Tensor]:
        for i, frame in enumerate(clip(50)):
            if i == 20:
                management.interrupt_current_processing()
            yield frame

    own = parts["ours through TAESD"]
    want = live(own, clip(1))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made: list[None] = []
    with pytest.raises(management.InterruptProcessingException):
        engine.run(*own, stops(), Settings(), lambda _: made.append(None))
    torch.cuda.synchronize()
    assert 15 <= len(made) <= 20 and torch.cuda.memory_allocated() <= before + (8 << 20)
    assert live(own, clip(1)).shape == want.shape

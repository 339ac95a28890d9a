"""The latents of the bench's models: their channels, and what pixels, frames and seconds of sound they stand for. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Pace:
    """`first` frames are `least` latent frames, and each `step` frames more are `per` more."""

    step: int = 4
    per: int = 1
    first: int = 1
    least: int = 1

    def frames(self, frames: int) -> int:
        return (frames - self.first) // self.step * self.per + self.least


@dataclass(frozen=True)
class Sound:
    """The latent of the sound beside a video: [*before, moments, *behind]."""

    before: tuple[int, ...]
    behind: tuple[int, ...]
    a_second: int
    frames_a_second: int

    def shape(self, frames: int) -> tuple[int, ...]:
        return *self.before, round(frames / self.frames_a_second * self.a_second), *self.behind


@dataclass(frozen=True)
class Latent:
    """Channels of a latent pixel, and pixels of a side that it stands for. is_of_videos: a picture is a video of one frame."""

    channels: int
    side: int
    is_of_videos: bool = False
    pace: Pace = Pace()
    sound: Sound | None = None


PICTURES = {
    "klein4": Latent(128, 16),
    "klein9": Latent(128, 16),
    "z_image": Latent(16, 8),
    "qwen_image": Latent(16, 8, is_of_videos=True),
    "krea2": Latent(16, 8),
    "anima": Latent(16, 8, is_of_videos=True),
    "sd15": Latent(4, 8),
    "sdxl": Latent(4, 8),
    "flux2_vae": Latent(128, 16),
    "flux_vae": Latent(16, 8),
    "sdxl_vae": Latent(4, 8),
}
VIDEO = Latent(16, 8)  # of all others
LTX = Latent(128, 32, pace=Pace(step=8))
MINIMAX = Latent(24, 16, pace=Pace(step=17, per=5, first=5, least=2))
VIDEOS = {
    "vae22": Latent(48, 16),
    "ltx_vae": LTX,
    "h3_vae": MINIMAX,
    "hunyuan15_vae": Latent(32, 16),
    "hunyuan_video_15": Latent(32, 16),
    "ltx23": replace(LTX, sound=Sound((8,), (16,), a_second=25, frames_a_second=25)),
    "minimax_h3": replace(MINIMAX, sound=Sound((32, 2), (), a_second=40, frames_a_second=24)),
}

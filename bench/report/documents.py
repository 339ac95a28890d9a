"""The five documents that this project grew from: what each promises, and what is so here.

Every figure is looked up in the cards' results; those that are typed are of the lab and of predictions, which are said to be so.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..end_to_end.bounds import WAN, Rates, measured_rates, wan_forward
from .claims import IN_PART, MISSED, OTHERWISE, PREDICTED, UNTRIED, Claim, at_least, verdict
from .figures import UNKNOWN, Figures

LARGE, MIDDLE, SMALL = "14B 720x1280x81", "14B 480x832x81", "1.3B 480x832x81"
PICTURE = "SD 1.5 512x512"
MOST_OF_A_PICTURE, FRAMES_A_SECOND, BANDWIDTH, SECONDS_OF_KLEIN = 1.3, 25, 0.85, 14  # what documents promise
KLEIN = "klein 4B picture 1024x1024"
LIVE = "SD 1.5 live 512x512 through TAESD"
WAN13, WAN14 = "Wan 1.3B 480x832x81", "Wan 14B 480x832x81"


def _per_frame(f: Figures) -> str:
    """Wan's step divided among its frames, beside a step of SD 1.5 for one picture; both ours, with guidance."""
    frames = int(SMALL.rsplit("x", 1)[1])
    video, still = f.models(SMALL, PICTURE)
    wan = video.get("ours", {}).get("s")
    picture, stocks = (still.get(who, {}).get("s") for who in ("ours", "stock"))
    if not wan or not picture or not stocks:
        return UNKNOWN
    frame = wan / frames
    return (
        f"{frame / picture:.2f} times: a frame of {SMALL} takes {1e3 * frame:.3g} ms a step and a picture of "
        f"{PICTURE} {1e3 * picture:.3g}, both ours, so {_times(frame, 4)} and {_times(picture, 4)} in 4 steps, {_times(frame, 30)} "
        f"and {_times(picture, 30)} in 30. Against ComfyUI's SD 1.5 it is {frame / stocks:.2f} times. The work is not the same: a "
        "frame of Wan has half as many pixels again, and attends to all others"
    )


def _is_near_a_picture(f: Figures) -> str:
    video, still = f.models(SMALL, PICTURE)
    wan, picture = (row.get("ours", {}).get("s") for row in (video, still))
    return verdict(wan / int(SMALL.rsplit("x", 1)[1]) / picture < MOST_OF_A_PICTURE if wan and picture else None)


def _times(seconds: float, steps: int) -> str:
    return f"{seconds * steps:.2g} s"


def _picture(f: Figures) -> str:
    """From a prompt to its pixels."""
    ours, stock = f.seconds(KLEIN), f.seconds(KLEIN, "stock")
    return (
        f"{ours:.2g} s from the prompt to the pixels, ComfyUI {stock:.2g} s (8 GiB free)" if ours and stock else UNKNOWN
    )


def _writing(f: Figures) -> str:
    """By the token."""
    large, small = f.models("Qwen3-VL 4B write a token", "Qwen3-VL 2B write a token")
    ours, stock, alone = (
        large.get("ours", {}).get("s"),
        large.get("stock", {}).get("s"),
        small.get("ours", {}).get("s"),
    )
    if not ours or not stock or not alone:
        return UNKNOWN
    return f"2B writes {1 / alone:.0f} tokens a second; 4B {1 / ours:.0f}, ComfyUI's {1 / stock:.0f}, with 8 GiB free"


def _frames(f: Figures) -> str:
    """A second, of live video."""
    ours, stock = f.seconds(LIVE), f.seconds(LIVE, "stock")
    if not ours:
        return UNKNOWN
    beside = f", where ComfyUI's nodes make {1 / stock:.0f}" if stock else ""
    return f"{1 / ours:.0f} frames a second ({LIVE}, one step{beside})"


def _fits(f: Figures) -> str:
    row = f.model(LARGE)
    if "s" not in row.get("ours", {}):
        return UNKNOWN
    stock = row.get("stock", {})
    beside = f"stock: {stock['error']}" if "error" in stock else f"stock {stock['s']:.3g} s"
    return f"Yes: {LARGE} in {row['ours']['s']:.3g} s a step with {row['free GiB']:g} GiB free ({beside})"


def _peak_rows(f: Figures) -> Sequence[Mapping[str, Any]] | None:
    """The rows in which the budget was left to us, on a card made small."""

    def automatic(results: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
        all_rows = results.get("models", {}).get("rows", [])
        measured = (row for row in all_rows if "quick" not in row and "peak GiB" in row.get("ours", {}))
        return [row for row in measured if _is_automatic(row["ours"].get("side", {}))] or None

    found: Sequence[Mapping[str, Any]] | None = f.first(automatic)
    return found


def _is_below_7_gb(f: Figures) -> str:
    rows = _peak_rows(f)
    return verdict(None if rows is None else max(row["ours"]["peak GiB"] for row in rows) * 2**30 < 7e9)


def _peaks(f: Figures) -> str:
    rows = _peak_rows(f)
    if rows is None:
        return UNKNOWN

    def most(some: Sequence[Mapping[str, Any]]) -> str:
        row = max(some, key=lambda row: row["ours"]["peak GiB"])
        return f"{row['ours']['peak GiB']:.2f} GiB at most ({row['name']})"

    promised = [row for row in rows if row["group"] == "table"]
    told = [most(promised) + " in the rows that are promised something"] if promised else []
    told += [most(rows) + f" in all {len(rows)}"] if len(rows) > len(promised) else []
    return f"With 8 GiB free, by the driver's count: {', '.join(told)}"


def _is_automatic(side: Mapping[str, Any]) -> bool:
    return bool(side.get("vram_budget", -1.0) < 0 and side.get("ballast", True))


def _is_fast(*names: str) -> Callable[[Figures], str]:
    """Whether whole models are at least as fast as stock."""

    def found(f: Figures) -> str:
        ratios = [f.model(name).get("stock / ours") for name in names]
        return verdict(*(None if ratio is None else ratio >= 1 for ratio in ratios))

    return found


def _is_live(f: Figures) -> str:
    seconds = f.seconds(LIVE)
    return verdict(1 / seconds >= FRAMES_A_SECOND if seconds else None)


def _is_at_bandwidth(f: Figures) -> str:
    row = f.row("kernels", op="norm_modulate", label=WAN14)
    return verdict(row["share of copy"] >= BANDWIDTH if row else None)


def _has_run(f: Figures) -> str:
    return verdict(None if f.seconds(LARGE) is None else True)


def _picture_is_fast(f: Figures) -> str:
    seconds = f.seconds(KLEIN)
    return verdict(seconds < SECONDS_OF_KLEIN if seconds else None)


def _step(f: Figures) -> str:
    row = f.row("kernels", op="diffusion_step", label="Wan 720x1280x81")
    if not row:
        return UNKNOWN
    times = f"{row['ours us']:.0f} us instead of {row['stock us']:.0f}"
    return f"{f.kernel('diffusion_step', 'Wan 720x1280x81')} for the step itself ({times})"


def _bandwidth(f: Figures) -> str:
    row = f.row("kernels", op="norm_modulate", label=WAN14)
    if not row:
        return UNKNOWN
    return f"{row['share of copy']:.0%} of a copy's for norm with modulation; `bench/results.md` lists the others"


def _managed(f: Figures) -> str:
    slots = f.pager("pinned host to device")
    rate = re.search(r"[\d.]+ GB/s", f.row("pager", label="managed, 8 layers: (b) warm pass").get("note", ""))
    evict = f.pager("managed, 8 layers: (d) eviction")
    if slots is None or rate is None or evict is None:
        return UNKNOWN
    return (
        f"Works, and is slower: {rate[0]} against {slots:.0f} into slots; eviction by an advise flip takes {evict:.2g} ms for half "
        "a GiB. Windows cannot do it. It stays as a backend; slots are the usual choice, and the only one of a model that fits: "
        "over managed memory no call can be captured"
    )


def _hidden(f: Figures) -> str:
    rates: Rates | None = f.first(measured_rates)
    if rates is None:
        return UNKNOWN

    def hides(tokens: int) -> bool:
        cost = wan_forward(WAN["wan14"], tokens)
        return 2 * (cost.gemm / rates.gemm + cost.attention / rates.attention) >= cost.weights / rates.bus

    tokens = bisect_left(range(100_000), True, key=hides)
    return (
        f"Where computing a layer takes longer than copying it: 14B from {tokens / 1000:.1f} thousand tokens on, by the bounds, "
        "if both prompts are one batch. Below that the bus is the bound, and what stays on the card counts: "
        "`bench/results.md` has the plot"
    )


DOCUMENTS: Mapping[str, Sequence[Claim]] = {
    "A plan for an RTX 2060 Super: Wan 2.1 in FP16, weights by managed memory": (
        Claim("Wan, T5-XXL and the VAE in 8 GB of VRAM", _fits, _has_run),
        Claim("Below 7 GB at most", _peaks, _is_below_7_gb),
        Claim(
            "Match or beat stock by fusion while weights stream",
            lambda f: (
                f"{f.faster(MIDDLE)} for {MIDDLE}, {f.faster(SMALL)} for {SMALL}, "
                f"{f.faster(f'{SMALL}, held to Turing')} held to what Turing has"
            ),
            _is_fast(MIDDLE, SMALL, f"{SMALL}, held to Turing"),
        ),
        Claim(
            "Below 1.3 times SD 1.5's time per frame, on an RTX 2060 Super",
            lambda f: f"{_per_frame(f)}. No Turing card was at hand: README has what is predicted for one",
            _is_near_a_picture,
        ),
        Claim("Managed memory (`cudaMallocManaged`) as the way to stream", _managed, OTHERWISE),
        Claim("A window of two layers hides the bus", _hidden, IN_PART),
        Claim(
            "Evict by prefetching to the host",
            "Weights never change: nothing needs to be copied back, and a slot is simply used again",
            OTHERWISE,
        ),
        Claim(
            "FP16 alone, sums included",
            "FP16, but for INT8 files, which are multiplied as they are stored; sums are FP32 unless **precision** is *fast* or "
            "*turbo*, since an H200 gains nothing by FP16 sums and GeForce cards are predicted to; *turbo* multiplies queries by "
            "keys in 8 bits",
            OTHERWISE,
        ),
        Claim(
            "One kernel for QKV, RoPE, attention and projection",
            lambda f: (
                "Not worth it: attention and the products have different best shapes, and each is limited by arithmetic alone. "
                "Norm, RoPE, gate and residual are fused to their neighbours: RMSNorm with RoPE "
                f"{f.kernel('rms_rope_', WAN13)}, norm with modulation {f.kernel('norm_modulate', WAN13)}"
            ),
            OTHERWISE,
        ),
        Claim(
            "Norm in the epilogue or prologue of a product",
            "Tried in the lab (H200): 0.52 to 0.65x of a pass and cuBLAS' product in FP16; in bytes 1.05 to 1.11x at most, by a "
            "bound",
            OTHERWISE,
        ),
        Claim(
            "Convolution with asymmetric padding and SiLU in one",
            lambda f: (
                f"Causal 3x3x3 without padding or concatenation: {f.kernel('conv', '3x3x3, 96 to 96', 'auto')} stock at 96 "
                "channels; norm and SiLU stay one pass of their own, because each element is loaded 3.8 times by the convolution. "
                f"The whole VAE: {f.faster('VAE decode 480x832x81')} at 480p, {f.faster('VAE decode 720x1280x81')} at 720p"
            ),
            at_least(1, "conv", "3x3x3, 96 to 96"),
        ),
        Claim(
            "Upsampling and convolution in one",
            lambda f: f"{f.kernel('upsample_conv2d', '192 to 96', 'auto')} stock (192 to 96 channels)",
            at_least(1, "upsample_conv2d", "192 to 96"),
        ),
        Claim(
            "Strided convolution with its padding",
            lambda f: f"{f.kernel('conv', '3x3 stride 2, 96', 'auto')} stock",
            at_least(1, "conv", "3x3 stride 2, 96"),
        ),
    ),
    "A guide to video in real time": (
        Claim(
            "Convolution, norm and SiLU in one: 15 to 25 %",
            lambda f: (
                f"{f.kernel('conv', '3x3x3, 96 to 96', 'auto')} for a convolution of Wan's VAE, "
                f"{f.kernel('group_norm_silu', 'image VAE 1024: 1x128x1024x1024 channels-last')} for group norm with SiLU, "
                "two passes"
            ),
            at_least(1.15, "conv", "3x3x3, 96 to 96"),
        ),
        Claim("30 to 50 % faster attention, 40 % less memory (RTX 30/40)", "No such card was at hand", UNTRIED),
        Claim(
            "A fused sampler step, 20 to 30 % of the loop",
            lambda f: f"{_step(f)}, which is nothing beside a step of seconds",
            MISSED,
        ),
        Claim(
            "Video in real time: 25 to 50 frames a second",
            lambda f: (
                "Promised of a model of 880 million parameters and latents of 64x64, which is Stable Diffusion 1.5's size: "
                f"FuseStream Live Video, {_frames(f)}"
            ),
            _is_live,
        ),
        Claim("85 % of the memory's bandwidth", _bandwidth, _is_at_bandwidth),
    ),
    "Notes on flux2.c's CUDA code": (
        Claim(
            "Flux.2 klein 4B with its text encoder, 1024x1024 in 4 steps: about 14 s on an RTX PRO 6000",
            _picture,
            _picture_is_fast,
        ),
        Claim(
            "BF16 weights converted once and kept",
            "Converted as they arrive: keeping them would take the VRAM that is missing",
            OTHERWISE,
        ),
    ),
    "StyleForge's inventory of kernels": (
        Claim(
            "Attention 8x to 20x PyTorch",
            lambda f: (
                "Promised against attention written out in full. Against torch's own kernels: "
                f"{f.kernel('attention', f'{WAN13}, self', 'auto')} by choosing the best of them and ours, "
                f"{f.kernel('attention', 'Wan VAE 480x832', 'auto')} for the VAE's heads of 384"
            ),
            at_least(8, "attention", f"{WAN13}, self", "Wan VAE 480x832"),
        ),
        Claim(
            "Feed-forward 4x to 5x",
            lambda f: (
                f"{f.kernel('linear', f'{WAN14}, ffn in', 'auto')} (14B) and "
                f"{f.kernel('linear', f'{WAN13}, ffn in', 'auto')} (1.3B) of cuBLAS, which is near the card's limit"
            ),
            at_least(4, "linear", f"{WAN14}, ffn in", f"{WAN13}, ffn in"),
        ),
        Claim(
            "Attention output projection 2x to 3x",
            lambda f: (
                f"{f.kernel('linear', f'{WAN14}, o with gate and residual', 'auto')} with gate and residual folded in: the product "
                "itself is cuBLAS's on this card"
            ),
            at_least(2, "linear", f"{WAN14}, o with gate and residual"),
        ),
        Claim(
            "Instance norm 3x to 5x",
            lambda f: (
                f"{f.kernel('instance_norm', 'style net 1080p: 1x32x1080x1920 channels-first')}, where stock's kernels do badly"
            ),
            at_least(3, "instance_norm", "style net 1080p: 1x32x1080x1920 channels-first", who="ours"),
        ),
    ),
    "Optimisations of Qwen3-VL 2B for compute capability 6.1": (
        Claim(
            "Attention 2x to 5x, matrices 3x to 8x a CPU's, memory operations 2x to 3x",
            lambda f: (
                f"{_writing(f)}. A row of a product with weights of Q4_K as they lie: "
                f"{f.kernel('few_rows', '1 times 13824x5120, Q4_K')} stock, which unpacks them first. No CPU was the other side"
            ),
            IN_PART,
        ),
        Claim(
            "CUDA graphs save half the launch time",
            "Short calls of a model that stays on the card are replayed; beside blocks of milliseconds launches cost nothing",
            IN_PART,
        ),
        Claim(
            "Sparse attention, top-k selection",
            "A node makes attention visit some of the blocks, with means in place of the others. Off unless it is there: models "
            "were trained without, and the video changes",
            IN_PART,
        ),
        Claim(
            "Code for compute capability 6.1",
            "Products and attention in bytes, by dp4a, and all passes over memory: predicted 16 to 21 s a step of 1.3B 480x832x81 "
            "on a GTX 1080 Ti, where FP32 takes 77 to 94 s (**its attention guessed**; [below](#pascal-in-bytes)). "
            "No such card was tried",
            PREDICTED,
        ),
    ),
}

"""One side of one row: a model is loaded and does the work, and what was found is told."""

from __future__ import annotations

import importlib
import inspect
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from . import bounds, peers, writing
from .inputs import (
    as_wide_as_published,
    beside_prompt,
    drop_from_cache,
    prompt_shape,
    qwen3_tokens,
    random_lora,
    split,
    time_forwards,
)
from .row_types import JOINED, Model, Row, Side

SAMPLED = 32768  # values of the result that are kept to compare accuracy by
PROMPT = "a cat walks on the grass, take {}"
# As long as people write prompts for models of today; and about 512 tokens, for an encoder alone.
SCENE = "Take {}: " + 12 * "a cat walks on the grass, "
LONG = "Take {}: " + 68 * "a cat walks on the grass, "
GUIDANCE = 6.0
LIVE_STRENGTH = 0.5
# Stock's types of text encoders, where a row names none.
KINDS = {
    **{"t5": "wan", "qwen3": "lumina2", "vl2": "qwen_image", "vl4": "qwen_image"},
    **{"qwen25_vl": "qwen_image", "gemma3": "ltxv", "h3_te": "minimax"},
}


def stocks_type(kind: str) -> Any:
    """As its loaders choose it: of SDXL's encoders there is no type."""
    import comfy.sd  # noqa: PLC0415

    return getattr(comfy.sd.CLIPType, kind.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION)


def row_of(job: dict[str, Any]) -> Row:
    """The row of a job, without its sides: the job has the one that is meant."""
    return Row(**{**job["row"], "stock": None, "ours": None, "peers": ()})


def side_of(job: dict[str, Any]) -> Side:
    """The side of a job."""
    side = dict(job["side"])
    side["ops"] = tuple((op, mode) for op, mode in side["ops"])
    return Side(**side)


class Run:
    """The work of one side."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.row = job, row_of(job)
        self.side = side = side_of(job)
        self.paths: dict[str, str] = {}  # by model; they come with the word to begin
        self.ours = job["who"] == "ours"
        self.cuda = not job["quick"]
        self.peer = peers.Peer(side, on_cpu=job["quick"])
        self.model: Any = None
        if self.ours:
            self.fusion = importlib.import_module("fusestream.fusion")
            forced = {} if job["quick"] else {"isa": side.isa, **dict(side.ops)}  # the CPU has no kernel to force
            self.policy = self.fusion.KernelPolicy.of(side.kernels, precision=side.precision, **forced)
            if not side.families:
                leave_families()
            if side.ram_budget is not None:
                vram: Any = importlib.import_module("fusestream.fusion.stream.vram_pool")
                vram._ram = vram.CountedRam(int(side.ram_budget * 2**30))
        self.ram_before = ram_gib("VmRSS")

    def hold(self) -> dict[str, Any]:
        """To what its side says of the machine, when its turn has come: until then the bus is busy with others' copies."""
        if not (self.side.windows and self.cuda):
            return {}
        from . import gguf_pack, windows  # noqa: PLC0415

        bus = windows.own_bus()
        hold = windows.hold_ours if self.ours else windows.hold_stock
        hold(bus, self.row.ram or windows.RAM_GIB)
        if self.side.pack:
            gguf_pack.watch_copies(bus.passed)
        return {"bus before GB/s": bus.rate / 1e9}

    def __call__(self) -> dict[str, Any]:
        if self.row.is_cold:
            for path in self.paths.values() if self.row.ram is not None else [self.paths[self.row.model]]:
                drop_from_cache(path)
        works = {
            "sample": self.sample, "call": self.call, "text": self.text, "decode": self.decode, "encode": self.encode,
            "video": self.whole, "picture": self.whole, "live": self.live, "write": self.write, "see": self.see,
        }  # fmt: skip
        return works[self.row.work]()

    def clock(self) -> float:
        import torch  # noqa: PLC0415

        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _load(self, load: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
        """Also hands over the options that this loader knows."""
        known = inspect.signature(load).parameters
        start = self.clock()
        made = load(*arguments, **{name: value for name, value in options.items() if name in known})
        return made, self.clock() - start

    def _budget(self) -> dict[str, Any]:
        return {"policy": self.policy, "vram_budget": self.side.vram_budget}

    # ------------------------------------------------------------------------------------------------------ sampling

    def sample(self) -> dict[str, Any]:
        model, loading = self.diffusion_model()
        forwards = time_forwards(model.model, time.perf_counter)  # stock does both prompts of guidance in one or in two
        out, seconds = self.sampled(model, *self.made_up_prompts(model))
        found = {"forwards a step": len(forwards) / self.row.steps, "computes in": str(model.model.get_dtype())[6:]}
        return {"load s": loading, "s": seconds, **found, **self.judged(out)}

    def call(self) -> dict[str, Any]:
        """Seconds of each call of the network alone, without what the sampler does around it."""
        model, loading = self.diffusion_model()
        seconds = time_forwards(model.model, self.clock)
        out, _ = self.sampled(model, *self.made_up_prompts(model))
        return {"load s": loading, "s": seconds, "computes in": str(model.model.get_dtype())[6:], **self.judged(out)}

    def diffusion_model(self, which: Model | None = None) -> tuple[Any, float]:
        """which: another one than the row's own."""
        import comfy.sd  # noqa: PLC0415

        path = self.paths[which or self.row.model]
        if self.ours:
            model, loading = self._load(self.fusion.load_diffusion_model, path, **self._budget())
            if self.side.backend != "auto":
                model.stream.residency.pager_options = {"backend": self.side.backend, "guard": True}
        elif self.side.pack:
            from . import gguf_pack  # noqa: PLC0415

            model, loading = self._load(gguf_pack.load_diffusion_model, path)
        else:
            model, loading = self._load(comfy.sd.load_diffusion_model, path)
        if self.row.lora:
            lora = random_lora(model, self.row.lora)
            model = comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)[0]
            if len(model.patches) != len(lora) // 2:
                raise RuntimeError(f"of {len(lora) // 2} parts of the LoRA {len(model.patches)} were taken")
        if self.side.compiled:
            model, more = self._load(self.peer.model, model)
            loading += more
        if self.side.cards > 1:
            model = split(model, self.side.cards, pretended=not self.cuda)
        self.model = model
        return model, loading

    def made_up_prompts(self, model: Any) -> tuple[Any, Any]:
        import torch  # noqa: PLC0415

        generator = torch.Generator().manual_seed(1)
        tokens, width = prompt_shape(self.row.model, model.model.diffusion_model)

        def prompt() -> Any:
            words = torch.randn(1, tokens, width, generator=generator)
            return [[words, beside_prompt(self.row.model, tokens, generator)]]

        return prompt(), prompt()

    def sampled(self, model: Any, positive: Any, negative: Any, second: Any = None) -> tuple[Any, list[float]]:
        """The latent, and seconds of each step; the first has what is loaded only then. second: the model of the later half, as
        in stock's KSampler (Advanced)."""
        import comfy.sample  # noqa: PLC0415

        noise = comfy.sample.fix_empty_latent_channels(model, self.noise()) if self.row.is_whole else self.noise()
        guidance = 1.0 if self.row.prompts == 1 else GUIDANCE
        ticks = [self.clock()]

        def tick(*_: Any) -> None:
            ticks.append(self.clock())

        run = (self.row.steps, guidance, "euler", "simple", positive, negative)
        others: dict[str, Any] = {"seed": 0, "disable_pbar": True, "callback": tick}
        if second is None:
            out = comfy.sample.sample(model, noise, *run, noise * 0, **others)
        else:
            half = self.row.steps // 2
            out = comfy.sample.sample(model, noise, *run, noise * 0, last_step=half, **others)
            out = comfy.sample.sample(second, noise * 0, *run, out, disable_noise=True, start_step=half, **others)
        return out, [after - before for before, after in itertools.pairwise(ticks)]

    def noise(self) -> Any:
        """For the latent, and for that of the sound if there is one."""
        import comfy.nested_tensor  # noqa: PLC0415
        import torch  # noqa: PLC0415

        generator = torch.Generator().manual_seed(0)
        picture = torch.randn(1, *self.row.latent_shape, generator=generator)
        if self.row.sound_shape is None:
            return picture
        sound = torch.randn(1, *self.row.sound_shape, generator=generator)
        return comfy.nested_tensor.NestedTensor([picture, sound])

    # --------------------------------------------------------------------------------------------- text, frames, both

    def text(self) -> dict[str, Any]:
        clip, loading = self.text_encoder(self.row.model)

        def encode(number: int) -> Any:
            if self.row.model == "qwen3":  # whose prompts are as long as they are
                tokens = qwen3_tokens(number)
            else:
                words = LONG if self.row.model in bounds.READERS else PROMPT
                tokens = clip.tokenize(words.format(number))
            return clip.encode_from_tokens_scheduled(tokens)[0][0]

        return {"load s": loading, **self.repeated(encode)}

    def write(self) -> dict[str, Any]:
        """Seconds of each token; of the first with the prompt. What is compared are the logits of the first."""
        clip, loading = self.text_encoder(self.row.model)
        with writing.watched(clip, time.perf_counter) as seen:
            ticks = [self.clock()]
            clip.generate(writing.prompt(clip), do_sample=False, max_length=self.row.steps, seed=0)
        ticks += seen.ticks
        seconds = [after - before for before, after in itertools.pairwise(ticks)]
        return {"load s": loading, "s": seconds, **self.judged(seen.logits)}

    def see(self) -> dict[str, Any]:
        """A picture, and the first word about it."""
        clip, loading = self.text_encoder(self.row.model)
        size = self.row.height, self.row.width
        prompts = [writing.prompt(clip, writing.picture(*size, number)) for number in range(self.row.steps)]
        with writing.watched(clip, self.clock) as seen:

            def look(number: int) -> Any:
                clip.generate(prompts[number], do_sample=False, max_length=1, seed=0)
                return seen.logits

            return {"load s": loading, **self.repeated(look)}

    def text_encoder(self, model: Model, kind: str = "") -> tuple[Any, float]:
        """kind: stock's type of it, where that is not the first of its model's."""
        import comfy.sd  # noqa: PLC0415

        paths, options = self.encoder_paths(model), self.tiny_text(model)
        kind = self.row.kind or kind or KINDS[model]
        if self.ours:
            more = {} if model == "t5" else {"kind": kind, "options": options, "further": paths[1:]}
            clip, loading = self._load(self.fusion.load_text_encoder, paths[0], [], **self._budget(), **more)
        else:
            clip, loading = self._load(comfy.sd.load_clip, paths, clip_type=stocks_type(kind), model_options=options)
        self.model = clip.patcher
        return clip, loading

    def encoder_paths(self, model: Model) -> list[str]:
        """Of a text encoder's file, and of those that make one with it."""
        return [self.paths[one] for one in (model, *(other for other, _ in JOINED.get(model, ())))]

    def whole(self) -> dict[str, Any]:
        """Prompts to frames or to a picture, as a workflow does it, and again with others: the first time everything is loaded,
        and kernels are chosen. The parts are apart, of the first and of the last."""
        around = self.row.around
        begun = self.clock()
        clip, loading = self.text_encoder(around.encoder[0], around.kind)
        model, more = self.diffusion_model()
        second = None
        if around.second is not None:
            second, late = self.diffusion_model(around.second)
            more += late
        vae, most = self.vae(around.decoder)
        found: dict[str, Any] = {"load s": loading + more + most, "s": []}
        parts = []
        for take in range(around.takes):
            positive, negative = self.prompts(clip, take)
            ticks = [begun, self.clock()]
            latent, found["steps s"] = self.sampled(model, positive, negative, second)
            ticks.append(self.clock())
            frames = vae.decode(latent.unbind()[0] if latent.is_nested else latent)  # sounds stay latents
            ticks.append(self.clock())
            found["s"].append(ticks[-1] - begun)
            lengths = (after - before for before, after in itertools.pairwise(ticks))
            last = "picture" if self.row.is_picture else "frames"
            parts.append(dict(zip(("text", "sampling", last), lengths, strict=True)))
            if take == 0:
                found |= self.judged(frames)
            del latent, frames
            begun = self.clock()
        self.model = model  # of the three the one to be asked
        return found | {"parts s": [parts[0], parts[-1]]}

    def prompts(self, clip: Any, take: int) -> tuple[Any, Any]:
        """The positive and the negative prompt. Many a model was distilled to none of the latter."""
        import torch  # noqa: PLC0415

        words = PROMPT if self.row.around.short else SCENE

        def encoded(number: int) -> Any:
            found = clip.encode_from_tokens_scheduled(clip.tokenize(words.format(number)))
            return as_wide_as_published(found) if self.job["quick"] and self.row.model == "sdxl" else found

        if self.row.around.guided:
            return encoded(2 * take), encoded(2 * take + 1)
        positive = encoded(take)
        return positive, [[torch.zeros_like(states), dict(more)] for states, more in positive]

    def tiny_text(self, model: Model) -> dict[str, Any]:
        """Stock has the sizes of the published encoder built in: a tiny one needs them told."""
        if not self.job["quick"]:
            return {}
        from ... import checkpoints  # noqa: PLC0415

        options: dict[str, Any]
        if model in bounds.WRITERS:
            return writing.sizes_of(self.paths[model])
        if model == "qwen3":
            options = dict(checkpoints.options.qwen3_options(checkpoints.text.QWEN3))
            if self.row.kind == "flux2":  # which reads layers that the tiny one does not have
                reading: Any = importlib.import_module("comfy.text_encoders.flux").Qwen3_4BModel
                options["qwen3_4b_class"] = partial(reading, layer=[0, 1, 2])
        else:  # ours tell a packed one by its tensors
            paths = [Path(path) for path in self.encoder_paths(model)]
            options = {} if paths[0].suffix == ".gguf" or model == "krea2_te" else checkpoints.model_options(*paths)
        return options

    def vae(self, model: Model) -> tuple[Any, float]:
        with self._widths(model):
            if self.ours:
                vae, loading = self._load(self.fusion.load_vae, self.paths[model], **self._budget())
            else:
                vae, loading = self._load(lambda: self._stocks_vae(model))
        self.model = vae.patcher
        return vae, loading

    def _stocks_vae(self, model: Model) -> Any:
        import comfy.sd  # noqa: PLC0415
        import comfy.utils  # noqa: PLC0415

        tensors, metadata = comfy.utils.load_torch_file(self.paths[model], return_metadata=True)
        return comfy.sd.VAE(sd=tensors, metadata=metadata)

    def _widths(self, model: Model) -> AbstractContextManager[None]:
        """Stock has those of the published Wan 2.2 VAE built in: a tiny one needs them told."""
        if not self.job["quick"] or model != "vae22":
            return nullcontext()
        from ... import checkpoints  # noqa: PLC0415

        stock = importlib.import_module("comfy.ldm.wan.vae2_2")
        return checkpoints.narrow.wan22_widths(stock, Path(self.paths[model]))

    def decode(self) -> dict[str, Any]:
        import torch  # noqa: PLC0415

        vae, loading = self.vae(self.row.model)
        latent = torch.randn(1, *self.row.latent_shape, generator=torch.Generator().manual_seed(0))
        decode = partial(peers.decode_in_tiles, vae) if self.side.tiled else vae.decode
        return {"load s": loading, "computes in": str(vae.vae_dtype)[6:], **self.repeated(lambda _: decode(latent))}

    def encode(self) -> dict[str, Any]:
        import torch  # noqa: PLC0415

        vae, loading = self.vae(self.row.model)
        shape = (max(1, self.row.frames), self.row.height, self.row.width, 3)
        pixels = torch.rand(shape, generator=torch.Generator().manual_seed(0))
        return {"load s": loading, "computes in": str(vae.vae_dtype)[6:], **self.repeated(lambda _: vae.encode(pixels))}

    def repeated(self, run: Callable[[int], Any]) -> dict[str, Any]:
        """The work, `steps` times; the result of the first is kept to be compared."""
        seconds, first = [], None
        for number in range(self.row.steps):
            start = self.clock()
            out = run(number)
            seconds.append(self.clock() - start)
            first = out if first is None else first
        return {"s": seconds, **self.judged(first)}

    # ----------------------------------------------------------------------------------------------------- live video

    def live(self) -> dict[str, Any]:
        """Frames one by one, a step of the model each: seconds from one new frame to the next."""
        import torch  # noqa: PLC0415

        model, loading = self.diffusion_model()
        size = (self.row.steps, self.row.height, self.row.width, 3)
        frames = torch.rand(size, generator=torch.Generator().manual_seed(0))
        made: list[Any] = []
        ticks = [self.clock()]

        def deliver(frame: Any) -> None:
            made.append(frame if not made else None)  # the first is judged, the others go
            ticks.append(time.perf_counter())

        vae = self.drawn_vae()
        prompts = self.made_up_prompts(model)
        (self.live_by_ours if self.ours else self.live_by_stock)(model, prompts, vae, frames, deliver)
        seconds = [after - before for before, after in itertools.pairwise(ticks)]
        return {
            "load s": loading,
            "s": seconds,
            "frames a second": 1 / sorted(seconds)[len(seconds) // 2],
            **self.judged(made[0]),
        }

    def live_by_ours(
        self, model: Any, prompts: tuple[Any, Any], vae: Any, frames: Any, deliver: Callable[[Any], None]
    ) -> None:
        live: Any = importlib.import_module("fusestream.fusion.live.engine")
        settings = importlib.import_module("fusestream.fusion.live.settings").Settings(steps=1, strength=LIVE_STRENGTH)
        live.run(model, *prompts, vae, frames, settings, deliver)

    def live_by_stock(
        self, model: Any, prompts: tuple[Any, Any], vae: Any, frames: Any, deliver: Callable[[Any], None]
    ) -> None:
        """VAE Encode, KSampler and VAE Decode with each frame."""
        import comfy.sample  # noqa: PLC0415

        for frame in frames:
            latent = vae.encode(frame[None])
            noise = comfy.sample.prepare_noise(latent, 0)
            latent = comfy.sample.sample(
                model,
                noise,
                1,
                1.0,
                "euler",
                "simple",
                *prompts,
                latent,
                denoise=LIVE_STRENGTH,
                disable_pbar=True,
                seed=0,
            )
            deliver(vae.decode(latent)[0])

    def drawn_vae(self) -> Any:
        """Of Stable Diffusion's latents, with random weights."""
        import comfy.sd  # noqa: PLC0415
        import torch  # noqa: PLC0415

        from . import weights  # noqa: PLC0415

        name = "taesd" if self.row.through == "TAESD" else "sd_vae"
        drawn = weights.small_vae(name, torch.Generator().manual_seed(0), tiny=self.job["quick"])
        if self.ours:
            return self.fusion.load_vae_in_parts(name, drawn, policy=self.policy)
        return comfy.sd.VAE(sd=drawn)

    # ------------------------------------------------------------------------------------------------------- findings

    def judged(self, out: Any) -> dict[str, Any]:
        """Whether the result is finite, and where some of its values were put. Of a video with sound the video."""
        import torch  # noqa: PLC0415

        out = out.unbind()[0] if out.is_nested else out
        flat = out.detach().float().flatten()
        kept = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].cpu().contiguous()
        if self.job.get("sample_to"):
            Path(self.job["sample_to"]).write_bytes(kept.numpy().tobytes())
        spread = float(kept.std()) if kept.numel() > 1 else 0.0
        return {"finite": bool(torch.isfinite(flat).all()), "spread": spread, "shape": list(out.shape)}

    def told(self) -> dict[str, Any]:
        """A side's account of itself. Ours: kernels that served, the pager's backend, its stalls and peaks. A peer: how often it
        served, and its version."""
        if not self.ours:
            return {"peer": told} if (told := self.peer.told()) else {}
        ledger = importlib.import_module("fusestream.kernels_cuda").LEDGER
        tuner = importlib.import_module("fusestream.kernels_cuda.tune.autotune").tuner()
        result: dict[str, Any] = {
            "calls while choosing": tuner.undecided,
            "served": sorted({f"{choice.op}: {choice.winner}" for choice in ledger.choices}),
            "refused": sorted({f"{one.op}: {one.candidate}: {one.reason}"[:160] for one in ledger.refusals})[:12],
        }
        stream = getattr(self.model, "stream", None)
        if stream is not None:
            told = stream.residency.ledger.summary()
            result["pager"] = {
                **{name: str(note)[:200] for name, note in told["notes"].items()},
                "seconds": {name: float(f"{s:.4g}") for name, s in told["seconds"].items()},
                "GB by route": {name: round(n / 1e9, 3) for name, n in told["bytes by route"].items()},
                "peak GiB": {name: round(n / 2**30, 3) for name, n in told["peak bytes"].items()},
            }
        return result


def leave_families() -> None:
    """From here on loaders take every model for one that no family computes."""
    families: Any = importlib.import_module("fusestream.fusion.compatibility.families")
    why = "the bench asks what a model takes without its family"
    families.checked = lambda family, *_: None if family is None else families.unfused(family, why)


def ram_gib(field: str) -> float | None:
    """Of this process, file pages among them: VmRSS now, VmHWM at most. None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) / 2**20 for line in lines if line.startswith(field))

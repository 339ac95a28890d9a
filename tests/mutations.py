"""What `mutate.py` goes by: which tests watch over which module, and which mutations no test can catch, and why.

The tests of a module are those that ought to catch what is wrong with it, the quick ones first: a mutation is caught by the
first of them that fails.
"""

from __future__ import annotations

from pathlib import Path

from mutate import Mutation, Survivor

ROOT = Path(__file__).resolve().parents[1]

_BACKENDS = ("test_memory_host", "test_backends")
_FILES = ("test_weight_file", "test_checkpoint", "test_header_fuzz")
_GGUF = ("test_gguf", "test_gguf_fuzz")
# Not here: memory/device.py, which is the driver's calls alone; tests/gpu watches over it.
_WATCHED_BY: dict[str, tuple[str, ...]] = {
    "memory/backends/backend.py": ("test_pager", "test_side_copies", "test_backends"),
    "memory/budget.py": ("test_memory_host", "test_pager"),
    "memory/checkpoint.py": _FILES,
    "memory/backends/copying.py": ("test_backends",),
    "memory/backends/cuda_managed.py": ("test_memory_driver",),
    "memory/host/direct.py": _BACKENDS,
    "memory/driver_calls.py": ("test_memory_driver",),
    "memory/encoding.py": (*_FILES, *_GGUF),
    "memory/file.py": _FILES,
    "memory/formats/__init__.py": (*_FILES, *_GGUF),
    "memory/formats/gguf.py": _GGUF,
    "memory/formats/gguf_split.py": (*_GGUF, "test_files"),
    "memory/formats/gguf_values.py": _GGUF,
    "memory/formats/safetensors.py": _FILES,
    "memory/host/kept_pages.py": ("test_backends",),
    "memory/host/host.py": _BACKENDS,
    "memory/layer.py": ("test_memory_host", "test_pager", "test_packed_weights"),
    "memory/ledger.py": ("test_pager", "test_backends", "test_report"),
    "memory/backends/managed.py": ("test_backends",),
    "memory/open_file.py": _FILES,
    "memory/opening.py": ("test_memory_host", "test_memory_opening"),
    "memory/host/page_cache.py": ("test_memory_host",),
    "memory/pager.py": ("test_pager", "test_left_open", "test_backends"),
    "memory/side_copies.py": ("test_side_copies", "test_lora"),
    "memory/plan.py": ("test_plan", "test_memory_host", "test_pager"),
    "memory/driver_priority.py": ("test_memory_opening",),
    "memory/host/ram.py": _BACKENDS,
    "memory/rates.py": ("test_memory_rates",),
    "memory/host/registered.py": _BACKENDS,
    "memory/host/ring.py": _BACKENDS,
    "memory/runs.py": _BACKENDS,
    "memory/backends/slots.py": ("test_backends",),
    "memory/strict_json.py": _FILES,
    "memory/timeline.py": _BACKENDS,
    "memory/unfinished.py": ("test_weight_writer",),
    "memory/written.py": ("test_weight_writer",),
    "memory/written_gguf.py": ("test_quantise",),
    "kernels_cuda/tune/autotune.py": ("test_kernels_autotune", "test_kernels_registry"),
    "kernels_cuda/tune/warm_up.py": ("test_kernels_autotune",),
    "kernels_cuda/tune/selection.py": ("test_kernels_registry", "test_kernels_autotune"),
    "kernels_cuda/tune/nearest_shape.py": ("test_kernels_autotune",),
    "kernels_cuda/tune/time_budget.py": ("test_kernels_rounds",),
    "kernels_cuda/plans.py": ("test_kernels_plans",),
    "kernels_cuda/registry.py": ("test_kernels_registry",),
    "kernels_cuda/tune/event_timer.py": ("test_kernels_autotune",),
    "kernels_cuda/tune/rounds.py": ("test_kernels_rounds", "test_kernels_registry"),
    "kernels_cuda/kept_entries.py": ("test_kernels_winners", "test_kernels_autotune"),
    "fusion/files/llama_cpp.py": ("test_gguf_language_models",),
    "fusion/weights/operands.py": ("test_operands",),
    "fusion/weights/storage.py": ("test_storage",),
    "fusion/base/file_formats.py": ("test_other_cards", "test_gguf_models", "test_files"),
    "fusion/sparse/attention.py": ("test_sparse_attention", "test_sparse_model"),
    "fusion/sparse/model.py": ("test_sparse_model",),
    "fusion/sparse/order.py": ("test_sparse_lists",),
    "fusion/sparse/radial.py": ("test_sparse_lists",),
    "fusion/sparse/schedule.py": ("test_sparse_attention", "test_sparse_model"),
    "fusion/sparse/settings.py": ("test_sparse_lists",),
    "fusion/sparse/tally.py": ("test_sparse_attention",),
    "fusion/stream/blocks.py": ("test_stream_blocks", "test_model_call", "test_umt5_streamed"),
    "fusion/patcher/call_log.py": ("test_report", "test_model_call", "test_sparse_model"),
    "fusion/patcher/conditions.py": ("test_conditions",),
    "fusion/stream/text_encoding.py": ("test_umt5_streamed",),
    "fusion/stream/embedding.py": ("test_umt5_streamed",),
    "fusion/stream/lora_factors.py": ("test_lora",),
    "fusion/stream/segments.py": ("test_segments_small_budgets", "test_text_kv"),
    "fusion/weights/channels_last.py": ("test_unet_channels_last",),
    "fusion/weights/lora.py": ("test_lora", "test_operands"),
    "fusion/stream/model_call.py": ("test_model_call",),
    "fusion/stream/no_vision.py": ("test_gguf_language_models",),
    "fusion/stream/block_order.py": ("test_block_order",),
    "fusion/weights/patches.py": ("test_stream_blocks", "test_streaming_patcher"),
    "fusion/stream/patched_weights.py": ("test_lora", "test_streaming_patcher"),
    "fusion/patcher/streaming_patcher.py": ("test_patcher_memory", "test_streaming_patcher"),
    "fusion/stream/progress.py": ("test_progress",),
    "fusion/weights/lazy_weight.py": ("test_patcher_saving",),
    "fusion/patcher/saving.py": ("test_patcher_saving",),
    "fusion/load/build.py": ("test_umt5_streamed", "test_streaming_patcher"),
    "fusion/load/filling.py": ("test_umt5_streamed", "test_streaming_patcher"),
    "fusion/load/missing.py": ("test_loaders", "test_incomplete_files", "test_umt5_streamed"),
    "fusion/weights/meta_tensor.py": ("test_umt5_streamed", "test_streaming_patcher"),
    "fusion/stream/text_kv.py": ("test_text_kv",),
    "fusion/patcher/vram_estimate.py": ("test_vram_retry", "test_segments_small_budgets"),
    "fusion/patcher/vram_retry.py": ("test_vram_retry", "test_segments_small_budgets"),
    "fusion/stream/block_stream.py": ("test_model_call", "test_patcher_memory", "test_streaming_patcher"),
    "fusion/stream/vram_pool.py": ("test_vram_pool", "test_vram_retry", "test_patcher_memory"),
}
# An op's file, and the ops whose contract and launches show what is wrong with it.
_OPS: dict[str, tuple[str, ...]] = {
    "attention/attention.py": ("attention",),
    "attention/attention_operands.py": ("attention",),
    "attention/linear_attention.py": ("linear_attention",),
    "conv/bordered_conv.py": ("bordered_conv", "bordered_upsample_conv"),
    "conv/conv.py": ("conv",),
    "matmul/few_rows.py": ("few_rows",),
    "matmul/linear.py": ("linear", "linear_", "linear_pair"),
    "matmul/linear_int8.py": ("linear_int8", "linear_int8_"),
    "norm/channel_rms_silu.py": ("channel_rms_silu",),
    "norm/group_norm.py": ("group_norm_silu", "group_moments", "instance_norm"),
    "norm/rms_rope.py": ("rms_rope_",),
    "quant/packed_blocks.py": ("dequantise",),
    "quant/to_half.py": ("to_half", "to_half_into"),
    "views/planes.py": ("channel_rms_silu", "group_norm_silu"),
    "views/tiles.py": ("silu", "silu_mul_"),
}
_PLACES = {path.stem: path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "unit").rglob("test_*.py")}
TESTS = {module: tuple(_PLACES[test] for test in tests) for module, tests in _WATCHED_BY.items()}
TESTS |= {
    f"kernels_cuda/ops/{module}": (
        *(f"tests/contract/test_launches.py::test_an_op_launches_as_before[{name}]" for name in names),
        *(_PLACES[f"test_kernels_{subject}"] for subject in ("half_range", "norms", "views", "conv", "attention")),
        "tests/contract/test_ops.py",
    )
    for module, names in _OPS.items()
}

# What needs an NVIDIA GPU to run at all, or its driver: tests/gpu watches over it.
ON_A_GPU = {
    "memory/side_copies.py": ("open_parcels",),
}


def is_watched(mutation: Mutation) -> bool:
    return mutation.scope not in ON_A_GPU.get(mutation.module, ())


SURVIVORS: tuple[Survivor, ...] = (
    Survivor(
        "memory/plan.py",
        "_made",
        "break",
        "continue",
        "with more slots still less is left: nothing more is found, only later",
    ),
    Survivor(
        "memory/plan.py",
        "_made",
        "fixed = {i for i, room in enumerate(rooms) if room > slot or room == 0}",
        "fixed = {i for i, room in enumerate(rooms) if room > slot or room == (-1)}",
        "a layer without bytes costs nothing, so that `spread` keeps it anyway",
    ),
    Survivor(
        "memory/plan.py",
        "_made",
        "fixed = {i for i, room in enumerate(rooms) if room > slot or room == 0}",
        "fixed = {i for i, room in enumerate(rooms) if room > slot or room == 1}",
        "no room is 1, and a layer without bytes costs nothing: `spread` keeps it anyway",
    ),
    Survivor(
        "memory/plan.py",
        "_cost",
        "steady = simulate(plan, rates).steady if rates is not None else 0.0",
        "steady = simulate(plan, rates).steady if rates is not None else 1.0",
        "without rates the same number stands in every cost",
    ),
    Survivor(
        "memory/plan.py",
        "spread.share",
        "if owed >= rooms[i] * (1 - 1e-9):",
        "if owed > rooms[i] * (1 - 1e-9):",
        "the share is found by bisection, which ends beside such a number, never on it",
    ),
    Survivor(
        "memory/plan.py",
        "spread.share",
        "if owed >= rooms[i] * (1 - 1e-9):",
        "if owed >= rooms[i] // (1 - 1e-9):",
        "without the tolerance the bisection finds a share that is larger by 1e-9 and keeps the same layers",
    ),
    Survivor(
        "memory/plan.py",
        "spread",
        "most = _bisect(lambda part: total(part) > left, 0.0, 1.0)",
        "most = _bisect(lambda part: total(part) > left, 0.0, 2.0)",
        "from 1 on every layer is kept: no share between 1 and 2 differs",
    ),
    Survivor(
        "memory/plan.py",
        "_bisect",
        "for _ in range(50):",
        "for _ in range(49):",
        "one halving less of fifty: the interval is still smaller than a byte of the largest model",
    ),
    Survivor(
        "memory/plan.py",
        "_bisect",
        "for _ in range(50):",
        "for _ in range(51):",
        "one halving more of fifty changes no layer's choice",
    ),
    Survivor(
        "memory/plan.py",
        "simulate",
        "ends, stalls, busy = [0.0], [0.0] * count, 0.0",
        "ends, stalls, busy = [1.0], [0.0] * count, 0.0",
        "the first end is that of no pass, and is read where there was no pass only",
    ),
    Survivor(
        "memory/plan.py",
        "simulate",
        "ends, stalls, busy = [0.0], [0.0] * count, 0.0",
        "ends, stalls, busy = [0.0], [1.0] * count, 0.0",
        "every pass writes every stall",
    ),
    Survivor(
        "memory/plan.py",
        "simulate",
        "ends, stalls, busy = [0.0], [0.0] * count, 0.0",
        "ends, stalls, busy = [0.0], [0.0] * count, 1.0",
        "every pass begins with 0",
    ),
    Survivor(
        "memory/plan.py",
        "simulate",
        "there, busy = bus_free, busy + size / rates.bus",
        "there, busy = bus_free, busy - size / rates.bus",
        "how busy the bus was is told of the last pass alone, and this is the first",
    ),
    Survivor(
        "memory/plan.py",
        "simulate",
        "there, busy = bus_free, busy + size / rates.bus",
        "there, busy = bus_free, busy + size * rates.bus",
        "how busy the bus was is told of the last pass alone, and this is the first",
    ),
    Survivor(
        "memory/plan.py",
        "simulate",
        "return Prediction(ends[1], steady, tuple(stalls), min(share, 1.0) if math.isfinite(share) else 0.0)",
        "return Prediction(ends[1], steady, tuple(stalls), min(share, 2.0) if math.isfinite(share) else 0.0)",
        "the bus is busy for at most the pass, but for rounding, of which no test can be sure",
    ),
    Survivor(
        "memory/plan.py",
        "simulate",
        "return Prediction(ends[1], steady, tuple(stalls), min(share, 1.0) if math.isfinite(share) else 0.0)",
        "return Prediction(ends[1], steady, tuple(stalls), min(share, 1.0) if math.isfinite(share) else 1.0)",
        "for times that are infinite alone, which nobody measures",
    ),
    Survivor(
        "memory/plan.py",
        "simulate",
        "def simulate(plan: Plan, rates: Rates, passes: int = 4) -> Prediction:",
        "def simulate(plan: Plan, rates: Rates, passes: int = 3) -> Prediction:",
        "a window is in step after its second pass; the fourth is for safety",
    ),
    Survivor(
        "memory/plan.py",
        "simulate",
        "def simulate(plan: Plan, rates: Rates, passes: int = 4) -> Prediction:",
        "def simulate(plan: Plan, rates: Rates, passes: int = 5) -> Prediction:",
        "a window is in step after its second pass: a fifth is like the fourth",
    ),
    Survivor(
        "memory/pager.py",
        "Pager._look_ahead",
        "self._fetch(j, needed=False)",
        "self._fetch(j, needed=True)",
        "a resident has a place of its own, and asks nobody for a slot",
    ),
    Survivor(
        "memory/pager.py",
        "Pager._slot_for",
        "return latest if needed or self._steps(here, latest.layer) > self._steps(here, i) else None",
        "return latest if needed or self._steps(here, latest.layer) >= self._steps(here, i) else None",
        "only layer i is as many steps away as layer i, and it is not in the window",
    ),
    Survivor(
        "memory/formats/safetensors.py",
        "header_of",
        "if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):",
        "if size < 7 or length > min(size - 8, MAX_HEADER_BYTES):",
        "of seven bytes any length is more than the -1 that are left",
    ),
    Survivor(
        "memory/formats/safetensors.py",
        "_check_cover",
        'fault = "overlaps" if extent.begin < at else "leaves a hole after"',
        'fault = "overlaps" if extent.begin <= at else "leaves a hole after"',
        "the line above has found that they differ",
    ),
    Survivor(
        "kernels_cuda/kept_entries.py",
        "_replace",
        "time.sleep(0.05)",
        "time.sleep(1.05)",
        "how long Windows is given between two tries",
    ),
    Survivor(
        "kernels_cuda/kept_entries.py",
        "_replace",
        "for attempt in range(20):",
        "for attempt in range(21):",
        "the 20th try ends it",
    ),
    Survivor(
        "memory/host/ring.py",
        "Piece",
        "address: int = 0",
        "address: int = (-1)",
        "it is written before the piece is ready, and read after it",
    ),
    Survivor(
        "memory/host/ring.py",
        "Piece",
        "address: int = 0",
        "address: int = 1",
        "it is written before the piece is ready, and read after it",
    ),
    Survivor(
        "memory/host/host.py",
        "Host.__init__",
        "self._ring = PinnedRing(device, RingSize.within(share), reads, min(READERS, os.cpu_count() or 1))",
        "self._ring = PinnedRing(device, RingSize.within(share), reads, max(READERS, os.cpu_count() or 1))",
        "how many threads read is a matter of speed alone",
    ),
    Survivor(
        "fusion/stream/blocks.py",
        "weights_of",
        "for attribute, parameter in operation.named_parameters(recurse=False):",
        "for attribute, parameter in operation.named_parameters(recurse=True):",
        "stock's operations hold no other modules, and those would not be called weight or bias",
    ),
    Survivor(
        "memory/rates.py",
        "_registered",
        "span = spans_of([Run(run.file, run.begin, nbytes, 0)])[0]",
        "span = spans_of([Run(run.file, run.begin, nbytes, 0)])[(-1)]",
        "one run has one span",
    ),
    Survivor(
        "memory/backends/cuda_managed.py",
        "Holder.__init__",
        '"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,',
        '"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 4, "strides": None,',
        "torch reads where the memory lies and how, and no version",
    ),
    Survivor(
        "memory/backends/cuda_managed.py",
        "Holder.__init__",
        '"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,',
        '"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2, "strides": None,',
        "torch reads where the memory lies and how, and no version",
    ),
    Survivor(
        "memory/file.py",
        "",
        "_brief.maxlevel = 2",
        "_brief.maxlevel = 3",
        "how deep a message shows a nested value: either is short",
    ),
    Survivor(
        "kernels_cuda/kept_entries.py",
        "_at_once",
        'return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))',
        'return os.open(path, flags | getattr(os, "O_NONBLOCK", (-1)))',
        "the number stands for systems without O_NONBLOCK, and so without FIFOs",
    ),
    Survivor(
        "fusion/weights/operands.py",
        "operands.__exit__",
        "self._held.close()",
        "pass",
        "nobody holds what was brought after the block, so that CPython ends it then too",
    ),
)

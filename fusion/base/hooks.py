"""All names that the pack hangs on objects of ComfyUI's, so that who looks why another node meets it badly can begin here.

Attributes stand in an object's own `__dict__` or in that of a class that its own was mixed with (`subclassing.py`), keys among the
wrappers of a model or its `transformer_options`. Each line says who sets it and who reads it; what has no `cleared` goes with the
object. No other file spells one of them, but for typed attributes of the mixed classes (`fusestream_...`, at the end).
"""

from __future__ import annotations

# A model, stock's BaseModel. Set when it is loaded, for as long as it lives.
STREAM = "fusestream"  # its stream: set by patcher/streaming_patcher.py; read by the report and the nodes
RECKONING = "fusestream_reckoning"  # how its VRAM is divided: set by patcher/vram_estimate.py; read by estimate/
REST = "fusestream_rest"  # the places of what does not stream: set and read by patcher/streaming_patcher.py
CALLS = "fusestream_calls"  # what was called under which policy: set by patcher/call_log.py; read by the report
PACE = "fusestream_pace"  # how fast it samples: set by sampling/step_timer.py; read by the report and the estimate
UNDECIDED = "fusestream_undecided"  # kernels that were chosen meanwhile: sampling/kernel_choices.py
LAST_LIVE = "fusestream_last_live"  # the tally of its last live run: set by live/engine.py; read by the report
HELD = "_fusestream_held"  # its tensors that lie on the card: vae/resident_patcher.py; cleared as they are given back

# Keys among the wrappers of a model's patcher, and of what is loaded beside it.
STEP = "fusestream"  # around each call of the model: patcher/vram_retry.py
CARDS_WRAPPER = "fusestream_cards"  # around a sampling on several cards: patcher/cards.py
CALLS_WRAPPER = "fusestream_calls"  # around each call: patcher/call_log.py
PROGRESS = "fusestream_progress"  # around each call, for the bar of the first pass: stream/progress.py
NAMED_ATTENTION = "fusestream_named_attention"  # around each call: fused/named_attention.py
SPARSE = "fusestream_sparse"  # around each call: sparse/schedule.py; set by the node
BEFORE_SAMPLING = "fusestream_before_sampling"  # around a sampling: sampling/checks.py
PACE_WRAPPER = "fusestream_pace"  # around a sampling and its steps: sampling/step_timer.py
LIVE_VAE = "fusestream_live"  # a VAE among the additional models of a live run: live/engine.py

# Keys among the `transformer_options` of one call. They go with it.
PIECES = "fusestream_pieces"  # bytes between two products, at a time: set by patcher/vram_retry.py; read by families/ and sparse/
SPARSE_CALL = "fusestream_sparse_call"  # how far a sparse call is: set and read by sparse/

# A block, or a part of one.
STREAMED = "_fusestream"  # its stream, and its number (None: not paged by itself): stream/block_hooks.py
STREAMED_TEXT = "_fusestream_text"  # the number of the block that makes what is kept of texts: stream/block_hooks.py
ENTERED = "_fusestream_called"  # whether a call of what is not paged by itself is under way: stream/block_hooks.py
BLOCK_PARTS = "fusestream_parts"  # its `Parts`, and whether stock computes it: fused/block.py; read by compatibility/
POLICY = "fusestream_policy"  # the kernel policy, where no call brings one: set when it is fused; also among transformer_options
IN_PARTS = "fusestream_in_parts"  # how it is taken apart: a property of FusedBlock; read by stream/segments.py
OF_TEXT = "fusestream_of_text"  # what of it texts alone need: a property of FusedBlock; read by stream/segments.py
SATURATION = "fusestream_saturation"  # how much was too large for FP16: weights/saturation.py; read by the report
PACKED = "_fusestream_packed"  # of the first of several layers, their weights as one: weights/operands.py
UNET_RUN = "fusestream_run"  # of a U-Net's part, the call that it is in: families/unet/run.py; cleared behind it

# A network.
NETWORK_GRAPHS = "fusestream_graphs"  # its captured calls: graphs/diffusion.py
NETWORK_PARTS = "fusestream_network_parts"  # graphs/diffusion.py
NETWORK_METHODS = "fusestream_methods"  # its methods by then, which another node may change: graphs/diffusion.py
ENCODES = "fusestream_encodes"  # of a text encoder's model, its stream: stream/text_encoding.py
HEAD = "fusestream_head"  # of a network that writes, its stream and the block that its words come from: stream/text_encoding.py
READS_LAST = "fusestream_reads_last"  # of a language model, whether its last output is read: text/stack.py

# A VAE, or its network.
FINISHING = "fusestream_finishing"  # what finishes its pixels on the card: vae/pixel_range.py
TAKES_PIXELS = "fusestream_takes_unbegun"  # its encoder changes pixels itself: read by vae/pixel_range.py
LEFT_OVER = "_fusestream_left"  # what the last passage left of its room: vae/memory_limits.py
ROOM = "fusestream_room"  # how much room it computes in: a method of the mixed class; read by live/pictures.py

# Elsewhere.
SAVES = "fusestream"  # on ComfyUI's `save_torch_file`, the one that ours stands around: patcher/saving.py
SPECIMEN_KIND = "fusestream_specimen"  # in stock's table of encoders, for a moment: families/qwen3_vl/specimens.py

# Typed attributes of classes that stock's are mixed with.
ATTRIBUTES = {
    "fusestream_policy": "the kernel policy (POLICY)",
    "fusestream_reckoning": "RECKONING",
    "fusestream_reads_last": "READS_LAST",
    "fusestream_room": "ROOM",
    "fusestream_takes_unbegun": "TAKES_PIXELS",
    "fusestream_in_parts": "IN_PARTS",
    "fusestream_of_text": "OF_TEXT",
    "fusestream_hand_back": "what says why a call of a fused block is stock's: FusedBlock",
    "fusestream_types": "types of the stream that a fused block serves: FusedBlock",
    "fusestream_trims": "whether masked tokens are zeroed by the caller: fused text encoders",
    "fusestream_on_cpu": "whether it computes there too, over the references: fused text encoders",
    "fusestream_limit": "bytes that a fused VAE may take",
    "fusestream_source": "the file of a table that stays there: stream/embedding.py",
    "fusestream_extent": "where in the file that table is: stream/embedding.py",
    "fusestream_patches": "patches of that table's rows: set by stream/patched_weights.py",
}

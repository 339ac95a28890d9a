"""All names that the pack sets on ComfyUI's objects. Begin here if another node conflicts with it.

Attributes are in an object's own `__dict__`, or in that of a class that was mixed into its own
(`subclassing.py`); keys are among the wrappers of a model or its `transformer_options`. Each line
says who sets a name and who reads it. A name lasts as long as its object, unless the line says when
it is cleared. No other file spells these names, except typed attributes of the mixed classes
(`fusestream_...`, at the end).
"""

from __future__ import annotations

# Attributes of a model, stock's BaseModel. Set when it is loaded.
STREAM = "fusestream"  # its stream: set by patcher/streaming_patcher.py; read by many
RECKONING = "fusestream_reckoning"  # how its VRAM is divided: patcher/vram_estimate.py
REST = "fusestream_rest"  # places of what does not stream: patcher/streaming_patcher.py
CALLS = "fusestream_calls"  # each call's policy: set by patcher/call_log.py; read by the report
PACE = "fusestream_pace"  # its speed: sampling/step_timer.py; read by the report and estimate/
UNDECIDED = "fusestream_undecided"  # calls before a choice of kernels: sampling/kernel_choices.py
LAST_LIVE = "fusestream_last_live"  # tally of its last live run: live/engine.py; read by the report
HELD = "_fusestream_held"  # tensors on the card: vae/resident_patcher.py; cleared when given back

# Keys among the wrappers of a model's patcher, and of additional models.
STEP = "fusestream"  # around each call of the model: patcher/vram_retry.py
CARDS_WRAPPER = "fusestream_cards"  # around a sampling on several cards: patcher/cards.py
CALLS_WRAPPER = "fusestream_calls"  # around each call: patcher/call_log.py
PROGRESS = "fusestream_progress"  # around each call, for the first pass' bar: stream/progress.py
NAMED_ATTENTION = "fusestream_named_attention"  # around each call: fused/named_attention.py
RUNNING_WRAPPER = "fusestream_running"  # around each call: fused/operations.py
SPARSE = "fusestream_sparse"  # around each call: sparse/schedule.py; set by the node
STEP_CACHE = "fusestream_step_cache"  # around a sampling and its steps: step_cache/; set by the node
BEFORE_SAMPLING = "fusestream_before_sampling"  # around a sampling: sampling/checks.py
PACE_WRAPPER = "fusestream_pace"  # around a sampling and its steps: sampling/step_timer.py
LIVE_VAE = "fusestream_live"  # a VAE among a live run's additional models: live/engine.py

# Keys among the `transformer_options` of one call, which last as long as the call.
PIECES = "fusestream_pieces"  # size of pieces: set by patcher/vram_retry.py; read by families/, fused/
SPARSE_CALL = "fusestream_sparse_call"  # progress of a sparse call: set and read by sparse/
LEARNED = "fusestream_learned"  # of one attention, beyond q, k and v: set by families/; read by sparse/

# Attributes of a block, or of a part of one.
STREAMED = "_fusestream"  # its stream, and its number or None if not paged: stream/block_hooks.py
STREAMED_TEXT = "_fusestream_text"  # number of the block that texts need: stream/block_hooks.py
ENTERED = "_fusestream_called"  # whether an unpaged one is being called: stream/block_hooks.py
BLOCK_PARTS = "fusestream_parts"  # its `Parts`: fused/block.py; read by compatibility/, wan/
POLICY = "fusestream_policy"  # kernel policy; also among transformer_options: base/policy.py
IN_PARTS = "fusestream_in_parts"  # its parts: a property of FusedBlock; read by stream/segments.py
OF_TEXT = "fusestream_of_text"  # its text part: property of FusedBlock; read by stream/segments.py
SATURATION = "fusestream_saturation"  # too large for FP16: weights/saturation.py; for the report
PACKED = "_fusestream_packed"  # several weights as one, on the first: weights/operands.py
IN_PIECES = "fusestream_in_pieces"  # how a feed-forward's rows are cut: fused/feed_forward.py
RUNNING = "fusestream_running"  # the call it is in; on networks too: fused/operations.py
LAYER_KIND = "fusestream_layer_kind"  # a language model's layer: text/stack.py; read by text/
LEARNED_GATE = "fusestream_learned_gate"  # on a self-attention, its block's Linear: families/wan
UNET_RUN = "fusestream_run"  # a part's call: families/unet/run.py; cleared after it

# Attributes of a network.
NETWORK_GRAPHS = "fusestream_graphs"  # its captured calls: graphs/diffusion.py
NETWORK_PARTS = "fusestream_network_parts"  # its parts when it was loaded: graphs/diffusion.py
NETWORK_METHODS = "fusestream_methods"  # its methods when it was loaded: graphs/diffusion.py
PREPARED = "fusestream_prepared"  # prompts that it prepared: patcher/prepared_prompts.py
ENCODES = "fusestream_encodes"  # a text encoder's stream: stream/text_encoding.py
HEAD = "fusestream_head"  # its stream, and the output matrix' block: stream/text_encoding.py
READS_LAST = "fusestream_reads_last"  # whether its last output is read: text/stack.py

# Attributes of a VAE, or of its network.
FINISHING = "fusestream_finishing"  # converts its pixels: vae/pixel_range.py
TAKES_PIXELS = "fusestream_takes_unbegun"  # its encoder does so: read by vae/pixel_range.py
LEFT_OVER = "_fusestream_left"  # torch's memory after the last picture: vae/memory_limits.py
STAYS = "_fusestream_stays"  # both halves stay on the card: vae/resident_patcher.py; cleared behind live video
ROOM = "fusestream_room"  # a method, its bytes to compute in: read by live/pictures.py

# Elsewhere.
SAVES = "fusestream"  # stock's `save_torch_file`, on ours around it: patcher/saving.py
FITS = "fusestream"  # stock's `load_lora`, on ours around it: load/lora_fit.py
INPUT_ACTIVATION = "fusestream"  # stock's `linear_input_act`, on ours: fused/input_activation.py
KITCHEN_BACKEND = "fusestream"  # in comfy-kitchen's registry, for good: fused/kitchen_rope.py
SPECIMEN_KIND = "fusestream_specimen"  # in stock's table: families/qwen3_vl/specimens.py; temporary

# Typed attributes of classes that are mixed into stock's.
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
    "fusestream_keeps_padding": "whether the caller reads what it pads a prompt with: language models",
    "fusestream_scale": "what rows of a token table are multiplied by: text/common.py",
    "fusestream_on_cpu": "whether it computes there too, over the references: fused text encoders",
    "fusestream_limit": "bytes that a fused VAE may take",
    "fusestream_plans": "plans of a VAE in bands: vae/banded/install.py",
    "fusestream_source": "the file of a weight that stays there: stream/embedding.py, file_linear.py",
    "fusestream_extent": "where in the file that weight is: stream/embedding.py, file_linear.py",
    "fusestream_prepared": "PREPARED",
    "fusestream_patches": "patches of that weight's rows: set by stream/patched_weights.py",
    "fusestream_bias_patches": "patches of the bias beside it: set by stream/patched_weights.py",
}

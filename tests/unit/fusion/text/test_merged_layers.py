"""Language models whose queries, keys and values, or a feed-forward's two matrices, are one: left to stock, and it is said."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.sd1_clip
import pytest
import torch
from comfy.text_encoders import llama
from safetensors.torch import save_file

from fusestream import fusion
from fusestream.fusion.families import family_of
from fusestream.fusion.families.language_models import QWEN3
from fusestream.fusion.identify.checkpoint_info import header_of
from fusestream.fusion.load.text import load_streamed_text_encoder
from fusestream.fusion.text import layer_kind, stack
from fusestream.kernels_cuda import LEDGER

pytestmark = pytest.mark.usefixtures("as_comfyui_runs", "one_thread")

SIZES = {
    "vocab_size": 50, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
FLAGS = {"qkv": "merged_qkv", "mlp": "merged_mlp"}


class MergedAttention(llama.Attention):  # type: ignore[misc]
    """As newer ComfyUIs build it where the file has it so."""

    def __init__(self, config: Any, device: Any = None, dtype: Any = None, ops: Any = None, **others: Any) -> None:
        super().__init__(config, device=device, dtype=dtype, ops=ops, **others)
        if getattr(config, "merged_qkv", False) and hasattr(self, "q_proj"):
            parts = [getattr(self, f"{part}_proj") for part in "qkv"]
            del self.q_proj, self.k_proj, self.v_proj
            self.rows = [part.out_features for part in parts]
            self.qkv_proj = ops.Linear(config.hidden_size, sum(self.rows), bias=False, device=device, dtype=dtype)

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        if hasattr(self, "rows"):
            found = self.qkv_proj(hidden_states).split(self.rows, -1)
            for name, part in zip("qkv", found, strict=True):
                self.__dict__[f"{name}_proj"] = lambda _x, part=part: part
        return super().forward(hidden_states, **options)


class MergedMLP(llama.MLP):  # type: ignore[misc]
    def __init__(self, config: Any, device: Any = None, dtype: Any = None, ops: Any = None, **others: Any) -> None:
        super().__init__(config, device=device, dtype=dtype, ops=ops, **others)
        if getattr(config, "merged_mlp", False) and hasattr(self, "gate_proj"):
            rows = 2 * self.gate_proj.out_features
            del self.gate_proj, self.up_proj
            self.gate_up_proj = ops.Linear(config.hidden_size, rows, bias=False, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "gate_up_proj"):
            return super().forward(x)  # type: ignore[no-any-return]
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.activation(gate) * up)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's layers can be merged: its own are where it has that."""
    LEDGER.clear()
    if "merged_qkv" not in vars(llama.Qwen3_4BConfig()):
        monkeypatch.setattr(llama, "Attention", MergedAttention)
        monkeypatch.setattr(llama, "MLP", MergedMLP)
        init = llama.Qwen3_4BConfig.__init__

        def with_flags(self: Any, merged_qkv: bool = False, merged_mlp: bool = False, **others: Any) -> None:
            init(self, **others)
            self.merged_qkv, self.merged_mlp = merged_qkv, merged_mlp

        monkeypatch.setattr(llama.Qwen3_4BConfig, "__init__", with_flags)


def build(**flags: bool) -> Any:
    model = comfy.sd1_clip.SDClipModel(
        textmodel_json_config={**SIZES, **flags}, dtype=torch.float16, special_tokens={"pad": 49},
        model_class=llama.Qwen3_4B, layer_norm_hidden_state=False, enable_attention_masks=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.transformer.named_parameters():
        fresh = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.1 * fresh if "norm" in name else fresh * weight.shape[1] ** -0.5)
    model.set_clip_options({"execution_device": torch.device("cpu")})
    return model


@pytest.mark.parametrize("which", FLAGS)
def test_they_are_left_to_stock_with_a_reason(which: str) -> None:
    model = build(**{FLAGS[which]: True})
    prompt = [[3, 14, 15, 9, 2, 6]]
    wanted = model(prompt)[0]
    assert stack.fuse(model, fusion.KernelPolicy(), on_cpu=True) == 0
    assert torch.equal(model(prompt)[0], wanted)
    reasons = {refusal.reason for refusal in LEDGER.refusals}
    assert reasons == {layer_kind.MERGED[FLAGS[which]]}
    assert stack.idle(model, torch.device("cpu")) == 0


def test_others_are_ours_as_before() -> None:
    model = build()
    prompt = [[3, 14, 15, 9, 2, 6]]
    wanted = model(prompt)[0]
    assert stack.fuse(model, fusion.KernelPolicy(), on_cpu=True) == SIZES["num_hidden_layers"]
    got = model(prompt)[0]
    assert not any(refusal.op == "text encoder" for refusal in LEDGER.refusals)
    assert 0 < (got - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.parametrize("which", [*FLAGS, "neither", "music"])
def test_a_file_of_them_is_not_taken_for_one_that_lacks_matrices(which: str) -> None:
    """Which it would be said to be damaged for."""
    made = build(**({FLAGS[which]: True} if which in FLAGS else {})).transformer.state_dict()
    tensors = {name: tensor.new_empty(tensor.shape) for name, tensor in made.items()}
    wide = tensors["model.layers.0.post_attention_layernorm.weight"]
    tensors["model.layers.0.post_attention_layernorm.weight"] = wide.new_empty(1024)  # of a published one
    if which == "music":
        tensors["model.audio_decoder.projection.weight"] = wide
    assert (family_of(header_of(tensors)) is QWEN3) == (which == "neither")


# ------------------------------------------------------------------------------------------------------- MiniMax Music 3's


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "apart"])
def test_minimax_musics_own_encoder_streams_as_stocks_computes(
    merged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where this ComfyUI has it: of few channels, as its file would be of many."""
    try:
        music = importlib.import_module("comfy.text_encoders.minimax_music")
    except ImportError:
        pytest.skip("this ComfyUI has no MiniMax Music 3")
    small = {
        "hidden_size": 64, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "decoder_num_heads": 2, "decoder_intermediate_size": 96,
    }  # fmt: skip
    for name, size in small.items():
        monkeypatch.setitem(music.MODEL_CONFIG, name, size)
    flags = dict.fromkeys(music.detect_merged_config({}), merged)
    with torch.inference_mode():
        net = music.MiniMaxMusic3TEModel(projection_config=flags)
    drawn = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(one.shape, generator=drawn).to(torch.bfloat16) * 0.1 + ("norm" in name)
        for name, one in net.state_dict().items()
        if not name.startswith(("model.embed_tokens_", "model.lm_head."))
    }
    tensors["tokenizer_json"] = torch.tensor(list(words_of(music.SPECIAL_TOKEN_IDS).encode()), dtype=torch.uint8)
    path = tmp_path / "music.safetensors"
    save_file(tensors, path)
    ours = load_streamed_text_encoder(str(path), [], kind="minimax")
    ours.patcher.stream.residency.ceiling = ours.patcher.stream.residency.least
    theirs = comfy.sd.load_clip([str(path)], clip_type=comfy.sd.CLIPType.MINIMAX)
    found = [
        clip.encode_from_tokens(clip.tokenize("a song", lyrics="a fox", seed=1, max_audio_frames=2))
        for clip in (ours, theirs)
    ]
    assert torch.equal(*found) and found[0].shape[1] > 0 and not found[0].isnan().any()


def words_of(special: dict[str, int]) -> str:
    """A tokenizer of a few words, as the file has one."""
    added = [
        {
            "id": i,
            "content": word,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for word, i in special.items()
    ]
    words = {word: i for i, word in enumerate(("<unk>", "a", "fox", "song", "caption", "lyrics"))}
    model = {"type": "WordLevel", "vocab": {**words, **special}, "unk_token": "<unk>"}
    told = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    return json.dumps(
        {**told, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": model}
    )

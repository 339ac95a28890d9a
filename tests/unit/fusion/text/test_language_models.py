"""What language models have of their own as encoders, over our ops with the references on the CPU, beside stock's FP32. What all
encoders keep to the suite tells (`tests/contract/test_text_layers.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.sd1_clip
import comfy.utils
import pytest
import torch
from comfy.text_encoders import llama
from text_models import ALLOWED, DECODERS, QWEN3, Kind, close, of_decoder
from text_models import QWEN_HEADS as HEADS
from text_models import QWEN_KEY_HEADS as KEY_HEADS
from text_models import QWEN_LAYERS as LAYERS
from text_models import QWEN_PAD as PAD
from text_models import QWEN_WIDTH as WIDTH

from fusestream import checkpoints
from fusestream.fusion.base.hooks import READS_LAST, STREAMED
from fusestream.fusion.text import cache
from fusestream.fusion.text import layer as layer_file
from fusestream.fusion.text import prompt as prompt_file
from fusestream.fusion.text import stack as qwen3
from fusestream.fusion.text.prompt import prompt_of
from fusestream.fusion.weights.fp32_residual import Wide
from fusestream.kernels_cuda import LEDGER, KernelPolicy, KernelRefused
from fusestream.kernels_cuda.registry import Op

build, tokens, both = QWEN3.build, QWEN3.tokens, QWEN3.both
# How stock's models ask for it.
KLEIN = {"layer": [1, 2, 4]}
Z_IMAGE = {"layer": "hidden", "layer_idx": -2}
OVIS = {"layer": "last", "zero_out_masked": True}
ANIMA = {"layer": "last"}
USES = {"klein": KLEIN, "z_image": Z_IMAGE, "ovis": OVIS, "anima": ANIMA, "all": {"layer": "all"}}


@pytest.fixture(autouse=True)
def as_comfyui_runs() -> Iterator[None]:
    with torch.inference_mode():
        yield


def run_layers(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the layers that compute from now on."""
    found: list[int] = []
    attend, layers = layer_file.attend, list(model.transformer.model.layers)

    def seen(layer: Any, *rest: Any) -> None:
        found.extend(i for i, one in enumerate(layers) if one is layer)
        attend(layer, *rest)

    monkeypatch.setattr(layer_file, "attend", seen)
    return found


@pytest.mark.parametrize("use", [*USES, "without masks"])
@pytest.mark.parametrize("lengths", [[1], [40, 1], [20, 70]], ids=str)
def test_each_use_encodes_as_stocks(use: str, lengths: list[int]) -> None:
    """All tokens, also what comes out for the padding, which models look at. Except where stock zeroes it."""
    options = USES.get(use, {"enable_attention_masks": False})
    got, wanted = both(build(**options), [tokens(words, seed=i) for i, words in enumerate(lengths)])
    close(got[0], wanted[0], ALLOWED["precise"])
    if use in USES:
        assert torch.equal(got[2]["attention_mask"], wanted[2]["attention_mask"])


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    "layer", [[0], [0, 3], [4, 2, 2], [LAYERS], [1, LAYERS, 99], 0, 3, -1, -2, 1 - LAYERS, "all", "last"], ids=str
)
def test_whatever_is_tapped(layer: Any, norm: bool) -> None:
    options = {"layer": "hidden", "layer_idx": layer} if isinstance(layer, int) else {"layer": layer}
    got, wanted = both(build(**options, layer_norm_hidden_state=norm), [tokens(30)])
    if layer == [0]:
        assert torch.equal(got[0], wanted[0]), "what goes in"
    else:
        close(got[0], wanted[0], ALLOWED["precise"])


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (KLEIN, 4),
        (Z_IMAGE, LAYERS - 1),
        (OVIS, LAYERS),
        ({"layer": [0]}, 0),
        ({"layer": [LAYERS]}, LAYERS),
        ({"layer": "all"}, LAYERS),
    ],
    ids=str,
)
def test_layers_that_nothing_reads_are_not_computed(options: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(**options)
    device = torch.device("cpu")
    assert qwen3.idle(model, device) == 0, "stock runs all"
    qwen3.fuse(model)
    assert qwen3.idle(model, device) == 0 and qwen3.idle(model, torch.device("cuda")) == LAYERS - count
    qwen3.fuse(model, on_cpu=True)
    assert qwen3.idle(model, device) == LAYERS - count
    ran = run_layers(model, monkeypatch)
    model([tokens(9)])
    assert ran == list(range(count))


def test_another_last_layer_is_computed_up_to_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLIP Set Last Layer: within the network, and beyond it, where stock takes the last output."""
    model, twin = build(**Z_IMAGE), build(**Z_IMAGE)
    qwen3.fuse(model, on_cpu=True)
    ran = run_layers(model, monkeypatch)
    for layer, count in ((-1, LAYERS), (-4, 2), (-LAYERS - 3, LAYERS), (None, LAYERS - 1)):
        for one in (model, twin):
            one.reset_clip_options()
            one.set_clip_options({"execution_device": torch.device("cpu")})
            if layer is not None:
                one.set_clip_options({"layer": layer})
        ran.clear()
        close(model([tokens(9)])[0], twin([tokens(9)])[0], ALLOWED["precise"])
        assert ran == list(range(count)), layer


def test_who_reads_otherwise_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an encoder with a reading of its own nobody knows what it reads; nor of who calls the network itself."""
    model, twin = build(**Z_IMAGE), build(**Z_IMAGE)

    class Other(type(model)):  # type: ignore[misc]
        def forward(self, prompts: Any) -> Any:
            return super().forward(prompts)

    model.__class__ = Other
    qwen3.fuse(model, on_cpu=True)
    ran = run_layers(model, monkeypatch)
    model([tokens(9)])
    assert ran == list(range(LAYERS)) and qwen3.idle(model, torch.device("cuda")) == 0
    x = torch.randn(1, 7, WIDTH)
    for taps in (-2, [1, 2], None):
        got, wanted = (one.transformer(None, None, embeds=x, intermediate_output=taps) for one in (model, twin))
        close(got[0], wanted[0], ALLOWED["precise"])
        assert (got[1] is None) == (taps is None)
    model = build(**Z_IMAGE)
    qwen3.fuse(model, on_cpu=True)
    model([tokens(9)])
    assert model.transformer(None, None, embeds=x, intermediate_output=-2)[0] is not None, "told for that call alone"


def test_what_nobody_reads_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than wrong."""
    model, found = build(**KLEIN), []
    qwen3.fuse(model, on_cpu=True)
    encode = qwen3.encode
    monkeypatch.setattr(qwen3, "encode", lambda *given: found.append(encode(*given)) or found[-1])
    model([tokens(9)])
    assert found[0][0] is None and found[0][1].shape == (1, 3, 96, WIDTH)


@pytest.mark.parametrize(("options", "computed"), [(OVIS, 128), (KLEIN, 300)], ids=str)
def test_masked_tokens_are_computed_where_they_are_read(
    options: Any, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    attend = layer_file.attend
    monkeypatch.setattr(
        layer_file, "attend", lambda layer, x, *rest: seen.append(x.shape[1]) or attend(layer, x, *rest)
    )
    got, wanted = both(build(**options), [tokens(70, 300), tokens(10, 300)])
    assert set(seen) == {computed}
    close(got[0], wanted[0], ALLOWED["precise"])


def test_no_mask_of_all_pairs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding behind is a length, whatever the batch."""
    asked: list[Any] = []
    attention = layer_file.attention

    def noted(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        asked.append((mask, options["causal"], options["key_lengths"], q.shape[2], k.shape[2]))
        return attention(q, k, v, mask, **options)

    monkeypatch.setattr(layer_file, "attention", noted)
    both(build(), [tokens(70), tokens(10)])
    assert len(asked) == 2 * LAYERS, "of v there are two parts"
    for mask, causal, lengths, heads, key_heads in asked:
        assert mask is None and causal and lengths.tolist() == [70, 10] and (heads, key_heads) == (HEADS, KEY_HEADS)


def test_both_parts_of_one_prompts_values_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As two prompts of the same length: what comes out is what two calls make."""
    lengths: list[Any] = []
    attention = layer_file.attention

    def noted(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        lengths.append((q.shape[0], options["key_lengths"].tolist()))
        return attention(q, k, v, mask, **options)

    monkeypatch.setattr(layer_file, "attention", noted)
    model = build()
    alone, wanted = both(model, [tokens(70)])
    assert lengths == [(2, [70, 70])] * LAYERS
    close(alone[0], wanted[0], ALLOWED["precise"])
    beside = model([tokens(70), tokens(10)])
    assert torch.allclose(beside[0][:1], alone[0], rtol=0, atol=1e-5 * float(alone[0].abs().max()))


@pytest.mark.parametrize(("precision", "apart", "together"), [("precise", 15, 12), ("fast", 10, 8)])
def test_a_layer_is_few_calls(precision: str, apart: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts take the time that the host takes: of the ops, with weights that lie apart, and together as they stream."""
    ran: list[str] = []
    run = Op.run
    monkeypatch.setattr(Op, "run", lambda own, *given: ran.append(own.name) or run(own, *given))
    model = build(**KLEIN)
    both(model, [tokens(30)], precision)
    assert len(ran) == apart * 4, ran[:apart]
    for layer in model.transformer.model.layers:
        attend, mlp = layer.self_attn, layer.mlp
        for group in ((attend.q_proj, attend.k_proj, attend.v_proj), (mlp.gate_proj, mlp.up_proj)):
            room = torch.cat([module.weight for module in group])
            for module, weight in zip(group, room.split([len(module.weight) for module in group]), strict=True):
                module.weight = torch.nn.Parameter(weight, requires_grad=False)
    ran.clear()
    model([tokens(30)])
    assert len(ran) == together * 4, ran[:together]


@pytest.mark.parametrize("use", ["klein", "ovis"])
@pytest.mark.parametrize("kind", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize("before", [2, 70], ids=str)
def test_padding_before_a_prompt(kind: Kind, before: int, use: str) -> None:
    """Of tokens that see none stock makes the mean of all that it masks alike; where they are zeroed they are not computed."""
    prompts = [
        [PAD] * before + tokens(20, 40),
        [PAD] * (before + 20) + tokens(20, 20),
        tokens(before + 20, before + 40),
    ]
    got, wanted = kind.both(kind.build(**USES[use]), prompts)
    close(got[0], wanted[0], 2 * ALLOWED["precise"])


@pytest.mark.parametrize("use", ["klein", "ovis"])
def test_padding_alone(use: str) -> None:
    got, wanted = both(build(**USES[use]), [[PAD] * 30])
    assert torch.equal(got[0] == 0, wanted[0] == 0)
    if use == "klein":
        close(got[0], wanted[0], ALLOWED["precise"])


def test_padding_that_sees_no_token_of_the_prompt_is_stocks() -> None:
    """Behind a prompt, in layers that see the last 24 tokens."""
    model = DECODERS["gemma3"].build()
    wanted = [model([tokens(20, length)])[0] for length in (43, 44)]
    qwen3.fuse(model, on_cpu=True)
    got = [model([tokens(20, length)])[0] for length in (43, 44)]
    assert [torch.equal(*pair) for pair in zip(got, wanted, strict=True)] == [False, True]


def test_padding_before_a_long_prompt_is_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks would have to see tokens of later ones."""
    monkeypatch.setattr(prompt_file, "CHUNK", 64)
    forced = build()
    qwen3.fuse(forced, KernelPolicy.of("on"), on_cpu=True)
    with pytest.raises(
        KernelRefused, match=r"'on' for this text encoder.*more than 64 tokens begins with padding.*'auto'"
    ):
        forced([[PAD, *tokens(70, 80)]])


NETWORKS = (
    llama.Qwen3_06B, llama.Qwen3_06B_ACE15, llama.Qwen3_4B_ACE15_lm, llama.Qwen3_8B, llama.Ovis25_2B, llama.Qwen25_3B,
    llama.Llama2, llama.Mistral3Small24B, llama.Ministral3_3B, llama.Gemma2_2B, llama.Gemma3_4B,
)  # fmt: skip


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
def test_all_that_stock_builds_of_these_layers(network: Any) -> None:
    """At other numbers of heads, too."""
    small = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    model = comfy.sd1_clip.SDClipModel(
        textmodel_json_config=small, dtype=torch.float16, special_tokens={"pad": PAD}, model_class=network
    )
    adds_one = model.transformer.model.config.rms_norm_add
    for name, weight in model.transformer.named_parameters():
        weight.normal_(1 if "norm" in name and not adds_one else 0, 0.1)
    model.set_clip_options({"execution_device": torch.device("cpu")})
    got, wanted = QWEN3.both(model, [tokens(9)])
    close(got[0], wanted[0], 2 * ALLOWED["precise"])


def test_stacks_of_other_layers_are_left_alone() -> None:
    """Qwen3.5 has a stack of stock's class, with layers of its own."""
    model = build()
    model.transformer.model.layers[1] = torch.nn.Identity()
    assert qwen3.fuse(model, on_cpu=True) == 0
    model = build()
    model.transformer.model.config.mlp_activation = "swish"
    LEDGER.clear()
    assert qwen3.fuse(model, on_cpu=True) == 0
    assert {one.reason for one in LEDGER.refusals} == {"its layers are of a kind that is not known here"}


def test_text_is_written_beside_encoding() -> None:
    """And what was encoded before and after is what it was. Widths that no kernel of few rows takes become fp16 first."""
    model, twin = build(), build()
    qwen3.fuse(model, on_cpu=True)
    encoded = model([tokens(9)])[0]
    options = {"do_sample": False, "max_length": 5, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
    prompt = [[(token, 1.0) for token in tokens(9, 9)]]
    texts = [one.generate(prompt, repetition_penalty=1.0, seed=0, **options) for one in (model, twin)]
    assert texts[0] == texts[1] and len(texts[0]) == 5
    assert torch.equal(model([tokens(9)])[0], encoded)


@pytest.mark.usefixtures("one_tokenizer_of_each")
def test_ltx2s_padding_is_neither_computed_nor_asked_room_for(
    families_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1024 tokens the encoding is cut to those of the prompt; whatever is computed of the others, nobody sees it."""
    paths = [checkpoints.write(name, families_folder) for name in ("gemma3", "ltx23_text_projection")]
    with checkpoints.narrow.opened(comfy):
        options = checkpoints.model_options(*paths)
        clip = comfy.sd.load_clip(
            [str(path) for path in paths], clip_type=comfy.sd.CLIPType.LTXV, model_options=options
        )
    model, prompt = clip.cond_stage_model, clip.tokenize("a red fox runs through the snow")
    count, card = sum(token != 0 for token, _ in prompt["gemma3_12b"][0]), torch.device("cuda", 0)
    assert len(prompt["gemma3_12b"][0]) == 1024 and count < 64
    prompt["gemma3_12b"][0] = prompt["gemma3_12b"][0][-200:]  # for stock to be quick
    wanted, asked = clip.encode_from_tokens(prompt), model.memory_estimation_function(prompt, device=card)
    qwen3.fuse(model, on_cpu=True)
    seen: list[int] = []
    attend = layer_file.attend
    monkeypatch.setattr(
        layer_file, "attend", lambda layer, x, *rest: seen.append(x.shape[1]) or attend(layer, x, *rest)
    )
    got = clip.encode_from_tokens(prompt)
    assert set(seen) == {64} and got.shape == wanted.shape == (1, count, wanted.shape[2])
    assert 0 < (got - wanted).norm() <= 2e-3 * wanted.norm()
    assert model.memory_estimation_function(prompt, device=card) < 2**30 < asked


@pytest.mark.usefixtures("one_tokenizer_of_each")
@pytest.mark.parametrize(
    ("files", "kind", "key"),
    [(["gemma3"], "LTXV", None), (["clip_l", "llama3"], "HUNYUAN_VIDEO", "llama")],
    ids=["prompts of one encoder without its name", "an embedding of a picture"],
)
def test_room_is_asked_for_every_form_of_prompt(
    families_folder: Path, files: list[str], kind: str, key: str | None
) -> None:
    """Gemma 3 12B by itself has a tokenizer that names no encoder. HunyuanVideo's prompts of pictures have embeddings
    [tokens, width]."""
    paths = [checkpoints.write(name, families_folder) for name in files]
    with checkpoints.narrow.opened(comfy):
        options = checkpoints.model_options(*paths)
        clip_type = getattr(comfy.sd.CLIPType, kind)
        clip = comfy.sd.load_clip([str(path) for path in paths], clip_type=clip_type, model_options=options)
    model, card, words = clip.cond_stage_model, torch.device("cuda", 0), [(5, 1.0)] * 145
    qwen3.fuse(model, on_cpu=True)
    if key is None:
        assert isinstance(clip.tokenize("a fox"), list)
        prompts: Any = [words[:1]], [words]
    else:
        picture = {"type": "embedding", "data": torch.zeros(144, 64), "original_type": "image", "image_interleave": 2}
        prompts = {key: [words[:1]]}, {key: [[(5, 1.0), (picture, 1.0)]]}, {key: [words]}
    least, *asked = (model.memory_estimation_function(prompt, device=card) for prompt in prompts)
    assert least < min(asked) == max(asked)


WRITERS = {
    "qwen3": DECODERS["qwen3"],
    "ministral3": of_decoder(llama.Ministral3_3B),
    "gemma2": DECODERS["gemma2"],
    "gemma3": DECODERS["gemma3"],
}


@pytest.mark.parametrize("kind", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("words", [3, 30], ids=["short", "beyond its window"])
def test_every_kind_writes_what_stock_writes(kind: Kind, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest that is not there yet, and so long that Gemma 3's layers do not see the first tokens any more."""
    model = kind.build(torch.float32)
    kind.embedding(model).weight.mul_(0.1)  # as large as it is, it would write the last token over and over
    twin = copy.deepcopy(model)
    kind.fused(model)
    monkeypatch.setattr(type(model.transformer.model.config), "stop_tokens", [])
    options = {"do_sample": True, "max_length": 12, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0}
    prompt = [[(token, 1.0) for token in tokens(words, words)]]
    monkeypatch.setattr(cache, "AT_FIRST", 4)
    monkeypatch.setattr(cache, "STEP", 4)
    LEDGER.clear()
    texts = [
        one.generate(prompt, repetition_penalty=1.3, presence_penalty=20, seed=0, **options) for one in (model, twin)
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 12 and len(set(texts[0])) > 3
    assert not [one for one in LEDGER.refusals if one.op == "text encoder"]


def test_biases_of_written_tokens() -> None:
    """Stock has no network with biases that writes and is small; so the layers are asked."""
    kind = DECODERS["qwen25"]
    model = kind.build(torch.float32)
    kind.fused(model)
    stack, x = model.transformer.model, torch.randn(1, 9, WIDTH)
    policy = Wide(KernelPolicy())
    prompt = prompt_of(stack, x, None, None, {})
    assert isinstance(prompt, layer_file.Prompt)
    kept = cache.Cache(stack, 9, 20, x.device)
    wanted = x.clone()
    for layer in stack.layers:
        wanted, _ = layer(x=wanted, attention_mask=prompt)
    read, last = x[:, :8].clone(), x[:, 8:].clone()
    short = prompt_of(stack, read, None, None, {})
    token = layer_file.Next(
        policy, tuple((c[0, 0], s[0, 0]) for c, s in prompt.tables), torch.tensor([8], dtype=torch.int32)
    )
    for i, layer in enumerate(stack.layers):
        read, _ = layer(x=read, attention_mask=short, past_key_value=kept.of(i))
        last, _ = layer(x=last, attention_mask=token, past_key_value=kept.of(i))
    close(last, wanted[:, 8:], ALLOWED["precise"])


def test_positions_in_three_dimensions_that_lie_one_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen2.5-VL has them: the first pairs of a head turn by time, the next by height, the last by width."""
    model = DECODERS["qwen25"].build()
    monkeypatch.setattr(type(model.transformer.model.config), "rope_dims", [16, 24, 24])
    twin = copy.deepcopy(model)
    qwen3.fuse(model, on_cpu=True)
    x, places = torch.randn(1, 6, WIDTH), torch.stack([torch.arange(6), torch.arange(6) * 2, torch.arange(6, 0, -1)])
    got, wanted = (one.transformer.model(None, embeds=x.clone(), position_ids=places)[0] for one in (model, twin))
    close(got, wanted, ALLOWED["precise"])
    plain = twin.transformer.model(None, embeds=x.clone())[0]
    assert (plain - wanted).norm() > 5 * ALLOWED["precise"] * wanted.norm()


def test_what_only_stock_knows_is_handed_back() -> None:
    model, twin = build(), build()
    qwen3.fuse(model, on_cpu=True)
    x = torch.randn(1, 6, WIDTH)
    for given in (
        {"position_ids": torch.arange(3, 6)[None]},
        {"attention_mask": torch.ones(1, 6, 6)},
    ):
        if "position_ids" in given:  # of other tokens than there are: stock's to refuse
            with pytest.raises(RuntimeError):
                model.transformer(None, embeds=x.clone(), **given)
            continue
        got, wanted = (one.transformer(None, embeds=x.clone(), **given)[0] for one in (model, twin))
        assert torch.equal(got, wanted)
    ids = torch.tensor([tokens(6, 6)])
    got, wanted = (one.transformer(ids, dtype=torch.float32)[0] for one in (model, twin))
    assert torch.equal(got, wanted)


def test_positions_and_what_pictures_add() -> None:
    """As Qwen3-VL's network asks of the stack."""
    model, twin = build(), build()
    qwen3.fuse(model, on_cpu=True)
    x = torch.randn(1, 6, WIDTH)
    marks = torch.tensor([[False, True, True, False, True, False]])
    given = {
        "position_ids": torch.arange(3, 9)[None],
        "visual_pos_masks": marks,
        "deepstack_embeds": [torch.randn(3, WIDTH), torch.randn(3, WIDTH)],
    }
    got, wanted = (one.transformer(None, embeds=x.clone(), **given)[0] for one in (model, twin))
    close(got, wanted, ALLOWED["precise"])
    assert not torch.allclose(wanted, twin.transformer(None, embeds=x.clone())[0], atol=0.1)


def test_weights_that_are_elsewhere_are_stocks() -> None:
    """Neither streamed nor on the card: ComfyUI brings them. `on` takes them from it. Of layers that do not run nobody asks."""
    model = build(**KLEIN)
    qwen3.fuse(model, on_cpu=True)
    stack = model.transformer.model
    stack.__dict__[READS_LAST] = False
    x, mask = torch.zeros(1, 8, WIDTH), torch.ones(1, 8)

    def found(mode: Any = "auto") -> Any:
        stack.__dict__["fusestream_policy"] = KernelPolicy.of(mode)
        return prompt_of(stack, x, mask, [1, 2, 4], {})

    stack.layers[4].mlp.to("meta")
    assert isinstance(found(), qwen3.Prompt)
    stack.layers[2].mlp.to("meta")
    assert "give its loader a vram_budget" in found() and isinstance(found("on"), qwen3.Prompt)
    stack.layers[2].__dict__[STREAMED] = None
    assert isinstance(found(), qwen3.Prompt)


@pytest.mark.parametrize(("at", "ours"), [(0, True), (LAYERS - 1, False)])
def test_who_listens_to_a_layer_hears_it(at: int, ours: bool) -> None:
    """Of one that we would not call stock computes it."""
    model, heard = build(**KLEIN), []
    model.transformer.model.layers[at].register_forward_hook(lambda *_: heard.append(1))
    got, wanted = both(model, [tokens(30)])
    assert len(heard) == 2 and torch.equal(got[0], wanted[0]) != ours

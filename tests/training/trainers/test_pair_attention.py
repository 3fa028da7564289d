"""Layout of preference pairs: shared prompts where verified, otherwise a fallback with its reason."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.tiny import sizes
from tests.training.pairs import Setting, build_config, make_pairs, with_preference
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BloomConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
)

from recipes_lib.errors import ConfigError
from recipes_lib.models.attention import kernels
from recipes_lib.models.attention.varlen import register_varlen
from recipes_lib.models.heads.score_head import add_score_head
from recipes_lib.training.trainers import pair_trainer
from recipes_lib.training.trainers.pair_trainer import (
    PairAttention,
    build_pair_collator,
    choose_pair_attention,
    verify_pair_attention,
)

SMALL = sizes(32, 1, 2, vocab_size=512, intermediate_size=32, num_key_value_heads=2)
LLAMA = LlamaConfig(**SMALL)
WINDOWED = MistralConfig(**SMALL, sliding_window=32)
RECURRENT = MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=1)
WITHOUT_POSITIONS = BloomConfig(vocab_size=512, hidden_size=32, n_layer=1, n_head=2)


def configure(tmp_path, shared_prompt=None, kernel=None):
    config = build_config(tmp_path / "model", tmp_path / "run", with_preference(Setting(), shared_prompt=shared_prompt))
    return replace(
        config, model=replace(config.model, attn_implementation=kernel), provenance={"shared_prompt": "dpo.yaml:7"}
    )


def choose(tmp_path, model_config, *, max_length=64, shared_prompt=None, kernel=None):
    args = SimpleNamespace(bf16=False, fp16=False, mixed_precision="no", device=torch.device("cpu"))
    return choose_pair_attention(configure(tmp_path, shared_prompt, kernel), model_config, args, max_length=max_length)


@pytest.mark.parametrize(
    ("model_config", "keys", "expected"),
    [
        (LLAMA, {}, PairAttention("sdpa", "shared")),
        (LLAMA, {"shared_prompt": True}, PairAttention("sdpa", "shared")),
        (LLAMA, {"shared_prompt": False}, PairAttention("sdpa", "separate")),
        (LLAMA, {"kernel": "eager"}, PairAttention("eager", "shared")),
        (LLAMA, {"kernel": "varlen"}, PairAttention("varlen", "shared_flat")),
        (WINDOWED, {"kernel": "varlen"}, PairAttention("varlen", "shared_flat")),
        (WINDOWED, {"max_length": 32}, PairAttention("sdpa", "shared")),
    ],
)
def test_layout_by_model_kernel_and_key(tmp_path, model_config, keys, expected):
    assert choose(tmp_path, model_config, **keys) == expected


def test_sliding_window_shorter_than_pairs_prevents_sharing(tmp_path):
    chosen = choose(tmp_path, WINDOWED, max_length=33)
    assert (chosen.layout, chosen.packing) == ("separate", True)
    assert "sees 32 tokens in some layers, and max_length is 33" in chosen.reason


@pytest.mark.parametrize("model_config", [RECURRENT, WITHOUT_POSITIONS], ids=["recurrent", "without positions"])
@pytest.mark.parametrize("shared_prompt", [None, False])
def test_model_without_document_isolation_is_not_packed(tmp_path, model_config, shared_prompt):
    chosen = choose(tmp_path, model_config, shared_prompt=shared_prompt)
    assert (chosen.layout, chosen.packing) == ("separate", False)
    assert model_config.model_type in chosen.reason


@pytest.mark.parametrize("model_config", [RECURRENT, WITHOUT_POSITIONS, WINDOWED], ids=lambda c: c.model_type)
def test_unsupported_shared_prompt_is_refused_at_its_line(tmp_path, model_config):
    with pytest.raises(ConfigError) as refusal:
        choose(tmp_path, model_config, max_length=64, shared_prompt=True)
    assert len(refusal.value.problems) == 1
    message = str(refusal.value)
    assert message.startswith("dpo.yaml:7: prompts cannot be shared: a ")
    assert message.endswith("\n    delete the line, or write false")


def test_unknown_kernel_is_refused(tmp_path):
    for shared_prompt in (None, True, False):
        with pytest.raises(ConfigError, match="nonsense is not a known kernel"):
            choose(tmp_path, LLAMA, shared_prompt=shared_prompt, kernel="nonsense")


def test_flash_attention_uses_flat_layout(tmp_path, monkeypatch):
    monkeypatch.setitem(kernels.FLASH_IS_INSTALLED, "flash_attention_2", lambda: True)
    monkeypatch.setattr(kernels, "_refusal", lambda *_: None)
    chosen = choose(tmp_path, LLAMA, kernel="flash_attention_2")
    assert (chosen.implementation, chosen.layout) == ("flash_attention_2", "flat")
    assert "takes no mask" in chosen.reason


@pytest.fixture
def model(tiny_model_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="sdpa").train()


SHARED = PairAttention("sdpa", "shared")


def ignore_attention_masks(monkeypatch):
    """Replace attention by one that ignores masks, as a model with its own implementation may."""
    original = torch.nn.functional.scaled_dot_product_attention

    def leak(query, key, value, attn_mask=None, is_causal=False, **kwargs):
        return original(query, key, value, is_causal=query.shape[2] > 1, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", leak)


def test_verified_layout_is_kept(tmp_path, model):
    for attention in (SHARED, PairAttention("sdpa", "separate"), PairAttention("sdpa", "separate", packing=False)):
        assert verify_pair_attention(configure(tmp_path), attention, model) == attention
    assert model.training


def test_leak_between_documents_falls_back_to_unpacked_rows(tmp_path, model, monkeypatch):
    ignore_attention_masks(monkeypatch)
    verified = verify_pair_attention(configure(tmp_path), SHARED, model)
    # Packed documents are not isolated either.
    assert (verified.layout, verified.packing) == ("separate", False)
    assert "an answer does not keep its hidden states beside another" in verified.reason
    with pytest.raises(ConfigError, match=r"dpo.yaml:7: prompts cannot be shared: an answer does not keep"):
        verify_pair_attention(configure(tmp_path, shared_prompt=True), SHARED, model)
    unpacked = verify_pair_attention(configure(tmp_path), PairAttention("sdpa", "separate"), model)
    assert not unpacked.packing
    assert "a document does not keep its logits" in unpacked.reason


def test_leak_between_answers_falls_back_to_packed_documents(tmp_path, model, monkeypatch):
    monkeypatch.setattr(pair_trainer, "prove_shared_prompt", lambda model: "answers see each other")
    verified = verify_pair_attention(configure(tmp_path), SHARED, model)
    assert verified == PairAttention("sdpa", "separate", packing=True, reason="answers see each other")


def test_leak_in_shared_flat_layout_falls_back_to_flat(tmp_path, monkeypatch, tiny_model_dir):
    register_varlen()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="varlen")
    chosen = PairAttention("varlen", "shared_flat")
    assert verify_pair_attention(configure(tmp_path), chosen, model) == chosen
    monkeypatch.setattr(pair_trainer, "prove_shared_prompt", lambda model: "answers see each other")
    verified = verify_pair_attention(configure(tmp_path), chosen, model)
    assert verified == PairAttention("varlen", "flat", packing=True, reason="answers see each other")


def test_leak_in_flat_layout_is_refused(tmp_path, model, monkeypatch):
    ignore_attention_masks(monkeypatch)
    with pytest.raises(ConfigError) as refusal:
        verify_pair_attention(configure(tmp_path), PairAttention("sdpa", "flat"), model)
    # The remedy does not name `packing`, which is no key of preference recipes.
    assert re.fullmatch(
        r"attn_implementation: a document does not keep its logits beside another: one moves by \S+\n"
        r" +use sdpa or eager",
        str(refusal.value),
    )


@pytest.mark.parametrize(("kernel", "layout"), [("sdpa", "separate"), ("eager", "separate"), ("varlen", "flat")])
def test_reward_model_packs_answers_without_shared_prompts(tmp_path, kernel, layout):
    register_varlen()
    model = AutoModelForSequenceClassification.from_config(
        LlamaConfig(**SMALL, num_labels=1), attn_implementation=kernel
    )
    add_score_head(model)
    chosen = choose(tmp_path, LLAMA, shared_prompt=False, kernel=kernel)
    assert chosen == PairAttention(kernel, layout, packing=True, reason="")
    assert verify_pair_attention(configure(tmp_path, shared_prompt=False), chosen, model) == chosen


def test_layout_is_chosen_again_for_other_model(tmp_path):
    other = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=32, n_layer=1, n_head=2))
    assert verify_pair_attention(configure(tmp_path), SHARED, other, max_length=64) == SHARED
    windowed = AutoModelForCausalLM.from_config(WINDOWED)
    verified = verify_pair_attention(configure(tmp_path), SHARED, windowed, max_length=64)
    assert verified.layout == "separate"
    assert "sees 32 tokens" in verified.reason


@pytest.mark.parametrize(("layout", "packing"), [("shared", True), ("separate", True), ("separate", False)])
def test_collator_follows_chosen_layout(tiny_model_dir, layout, packing):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    collate = build_pair_collator(tokenizer, PairAttention("sdpa", layout, packing=packing))
    batch = collate(list(make_pairs(16)))
    assert ("pair_ids" in batch) == (layout == "shared")
    num_documents = 16 if layout == "shared" else 32
    assert (len(batch["input_ids"]) == num_documents) == (not packing)
    assert set(batch["input_ids"][~batch["token_mask"]].tolist()) <= {tokenizer.pad_token_id}

"""``RewardModel.score`` against transformers' own forward pass on unpadded chats."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ModernBertConfig, PreTrainedTokenizerFast

from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import ConfigError, DataError, DivergedError
from recipes_lib.models.heads import scoring
from recipes_lib.models.heads.score_head import (
    add_score_head,
    load_reward_model,
    set_pad_token,
    verify_reward_checkpoint,
)
from recipes_lib.models.heads.scoring import (
    RewardModel,
    compute_reward_statistics,
    encode_answers,
    store_reward_statistics,
)

WORDS = ["the", "baker", "opens", "a", "shop", "near", "rivers", "and", "weighs", "flour", "while", "snow"]


def make_chat(index: int) -> list[dict[str, str]]:
    words = random.Random(index).choices(WORDS, k=2 + 7 * index % 40)
    half = len(words) // 2
    return [
        {"role": "user", "content": " ".join(words[:half]) + "?"},
        {"role": "assistant", "content": " ".join(words[half:]) + "."},
    ]


CHATS = [make_chat(index) for index in range(24)]


@pytest.fixture
def reward_model(tiny_model_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> RewardModel:
    """A random reward model whose scores are far apart."""
    model = load_reward_model(ModelConfig(model_name_or_path=str(tiny_model_dir)), "sdpa", seed=0)
    torch.manual_seed(0)
    for parameter in model.model.parameters():
        nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else nn.init.uniform_(parameter, 0.5, 1.5)
    set_pad_token(model, tiny_tokenizer, [])
    add_score_head(model)
    return RewardModel(model, copy.deepcopy(tiny_tokenizer))


def score_with_transformers(reward_model: RewardModel, chat: Any) -> float:
    """Score by transformers' own forward pass over the unpadded chat up to its end-of-turn token."""
    text = reward_model.tokenizer.apply_chat_template(chat, tokenize=False)
    assert text.endswith("<|im_end|>\n")
    ids = reward_model.tokenizer(text[:-1], return_tensors="pt", add_special_tokens=False)["input_ids"]
    return reward_model.model.eval()(input_ids=ids).logits.item()


def test_scores_equal_transformers_in_input_order(reward_model: RewardModel) -> None:
    expected = [score_with_transformers(reward_model, chat) for chat in CHATS]
    assert len({round(score, 3) for score in expected}) == len(expected)
    assert reward_model.score(CHATS) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 100, 333])
def test_scores_are_independent_of_batch_size(num_tokens, reward_model, monkeypatch) -> None:
    expected = reward_model.score(CHATS)
    monkeypatch.setattr(scoring, "MAX_BATCH_TOKENS", num_tokens)
    assert reward_model.score(CHATS) == pytest.approx(expected, abs=1e-5)
    assert reward_model.score(CHATS[::-1]) == pytest.approx(expected[::-1], abs=1e-5)
    alone = [score for chat in CHATS[:8] for score in reward_model.score([chat])]
    assert alone == pytest.approx(expected[:8], abs=1e-5)


def test_scores_are_independent_of_padding_side(reward_model: RewardModel) -> None:
    expected = reward_model.score(CHATS)
    reward_model.tokenizer.padding_side = "left"
    reward_model.tokenizer.pad_token = "<|im_end|>"
    assert reward_model.score(CHATS) == pytest.approx(expected, abs=1e-5)


def test_scoring_batches_are_full_with_little_padding(reward_model, monkeypatch) -> None:
    monkeypatch.setattr(scoring, "MAX_BATCH_TOKENS", 400)
    shapes: list[tuple[int, int]] = []
    reward_model.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    reward_model.score(CHATS)
    num_tokens = sum(map(len, encode_answers(reward_model.tokenizer, CHATS)))
    assert all(rows * width <= 400 for rows, width in shapes)
    assert sum(rows for rows, _ in shapes) == len(CHATS)
    assert sum(rows * width for rows, width in shapes) < 1.2 * num_tokens
    assert len(shapes) <= math.ceil(num_tokens / 400) + 2


def test_scoring_keeps_modes_gradients_and_rng_state(reward_model: RewardModel) -> None:
    model = reward_model.model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    seen: list[tuple[bool, bool]] = []
    model.model.layers[1].register_forward_hook(
        lambda module, *_: seen.append((module.training, torch.is_grad_enabled()))
    )
    state = torch.get_rng_state()
    reward_model.score(CHATS[:2])
    assert set(seen) == {(False, False)}
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_answer_beyond_context_length_is_error_or_nan(reward_model: RewardModel) -> None:
    rows = [[5] * 512, [5] * 513, [6], [5] * 600]
    with pytest.raises(DataError) as caught:
        reward_model.compute_raw_scores(rows)
    assert [(problem.where, problem.found) for problem in caught.value.problems] == [
        ("answer 1", "513 tokens are more than the 512 positions of the reward model"),
        ("answer 3", "600 tokens are more than the 512 positions of the reward model"),
    ]
    assert "response_length" in caught.value.problems[0].remedy
    scores = reward_model.compute_raw_scores(rows, overlong="nan")
    assert [math.isnan(score) for score in scores] == [False, True, False, True]
    assert [scores[0], scores[2]] == pytest.approx(reward_model.compute_raw_scores([rows[0], rows[2]]), abs=1e-6)
    long = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "word " * 600}]
    with pytest.raises(DataError, match="answer 1: "):
        reward_model.score([CHATS[0], long])
    with pytest.raises(DataError, match=r"mine\.jsonl:7: "):
        reward_model.score([CHATS[0], long], where=["mine.jsonl:6", "mine.jsonl:7"])
    assert math.isnan(reward_model.score([CHATS[0], long], overlong="nan")[1])


def test_answer_without_tokens_is_an_error(reward_model: RewardModel) -> None:
    """Such as a word-level tokenizer without an unknown token returns."""
    with pytest.raises(DataError, match="answer 1: the reward model's tokenizer returns no tokens for it"):
        reward_model.compute_raw_scores([[1, 2], []])


def test_empty_list_has_no_scores(reward_model: RewardModel) -> None:
    assert reward_model.score([]) == []


def test_plain_text_is_scored_at_eos(reward_model: RewardModel) -> None:
    ids = reward_model.tokenizer("the baker opens<|endoftext|>", return_tensors="pt")["input_ids"]
    expected = reward_model.model.eval()(input_ids=ids).logits.item()
    assert reward_model.score([("the baker", " opens")]) == pytest.approx([expected], abs=1e-5)


def test_scores_are_standardised_by_stored_statistics(reward_model: RewardModel) -> None:
    raw = reward_model.score(CHATS)
    found = compute_reward_statistics(raw)
    mean = sum(raw) / len(raw)
    assert found == pytest.approx((mean, math.sqrt(sum((score - mean) ** 2 for score in raw) / len(raw))))
    store_reward_statistics(reward_model.model, found)
    scores = reward_model.score(CHATS)
    assert sum(scores) / len(scores) == pytest.approx(0, abs=1e-9)
    assert sum(score**2 for score in scores) / len(scores) == pytest.approx(1)
    # Raw scores are those of the head, also when the model has statistics.
    assert reward_model.compute_raw_scores(encode_answers(reward_model.tokenizer, CHATS)) == raw


@pytest.mark.parametrize("scores", [[1.0, math.nan], [math.inf, 1.0]])
def test_scores_that_are_not_finite_have_no_statistics(scores: list[float]) -> None:
    with pytest.raises(DivergedError, match="not finite"):
        compute_reward_statistics(scores)


@pytest.mark.parametrize("values", [(None, 1.0), (0.0, 0.0), ("a", 1.0), (math.nan, 1.0), (0.0, None)])
def test_invalid_statistics_in_config_are_refused(reward_model: RewardModel, values: Any) -> None:
    reward_model.model.config.reward_mean, reward_model.model.config.reward_std = values
    with pytest.raises(ConfigError, match="has reward_mean"):
        reward_model.score(CHATS)


def save(reward_model: RewardModel, folder: Path) -> Path:
    reward_model.model.save_pretrained(folder)
    reward_model.tokenizer.save_pretrained(folder)
    return folder


def test_saved_reward_model_has_equal_scores_and_statistics(reward_model: RewardModel, tmp_path: Path) -> None:
    store_reward_statistics(reward_model.model, compute_reward_statistics(reward_model.score(CHATS)))
    loaded = RewardModel.load(save(reward_model, tmp_path))
    assert loaded.score(CHATS) == reward_model.score(CHATS)
    assert not loaded.model.training
    assert (loaded.model.config.reward_mean, loaded.model.config.reward_std) == (
        reward_model.model.config.reward_mean,
        reward_model.model.config.reward_std,
    )


def test_causal_lm_is_refused_as_reward_model(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks score\.weight"):
        RewardModel.load(tiny_model_dir)


def test_encoder_is_refused_as_reward_model(tmp_path: Path) -> None:
    """Before weights are read, by the check of a run and by the run: its score is not that of the last token."""
    ModernBertConfig(num_labels=1).save_pretrained(tmp_path)
    found = "modernbert models are not causal language models"
    with pytest.raises(ConfigError, match=found):
        RewardModel.load(tmp_path)
    with pytest.raises(ConfigError, match=found):
        verify_reward_checkpoint(ModelConfig(model_name_or_path=str(tmp_path)), needs_head=True)

"""Teachers whose vocabulary is permuted or padded relative to the student's: remapped exactly, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.models.adapter_models import SHAPE
from tests.tiny import CORPUS, build_tokenizer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes_lib.errors import ConfigError
from recipes_lib.models.heads.loss_head import add_loss_head, verify_loss_head
from recipes_lib.models.vocabulary import VocabularyMap, _read_rules, adopt_vocabulary, map_vocabulary


def rebuild(tokenizer: PreTrainedTokenizerFast, change: Any) -> PreTrainedTokenizerFast:
    """The tokenizer with a changed definition."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    change(state)
    changed = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=changed, eos_token="<|endoftext|>", pad_token="<|pad|>")


def permute(tokenizer: PreTrainedTokenizerFast, order: torch.Tensor) -> PreTrainedTokenizerFast:
    """The tokenizer whose token number ``i`` has the id ``order[i]``."""

    def change(state: Any) -> None:
        vocabulary = state["model"]["vocab"]
        state["model"]["vocab"] = {token: int(order[token_id]) for token, token_id in vocabulary.items()}
        for token in state["added_tokens"]:
            token["id"] = int(order[token["id"]])
        state["added_tokens"].sort(key=lambda token: token["id"])

    return rebuild(tokenizer, change)


def make_model(vocab_size: int, *, is_tied: bool = False) -> Any:
    # The padding token may be in a row that is removed.
    config = LlamaConfig(**SHAPE | {"vocab_size": vocab_size}, tie_word_embeddings=is_tied, pad_token_id=vocab_size - 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval().requires_grad_(False)


@torch.no_grad()
def compute_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("is_permuted", "num_padding"), [(False, 0), (False, 9), (True, 0), (True, 9)])
def test_adopted_vocabulary_keeps_probability_of_every_token(is_permuted, num_padding, is_tied) -> None:
    student = build_tokenizer()
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1)) if is_permuted else torch.arange(512)
    teacher_tokenizer, teacher = permute(student, order), make_model(512 + num_padding, is_tied=is_tied)
    text = CORPUS[1]
    own, other = (tokenizer(text, add_special_tokens=False)["input_ids"] for tokenizer in (student, teacher_tokenizer))
    assert (own == other) is not is_permuted
    expected = compute_logits(teacher, other)[:, order]

    vocabulary = map_vocabulary(student, teacher_tokenizer, "teacher")
    assert vocabulary.is_identity is not is_permuted
    adopt_vocabulary(teacher, vocabulary, "teacher")
    got = compute_logits(teacher, own)
    assert got.shape == expected.shape == (len(own), 512)
    torch.testing.assert_close(got, expected)
    assert teacher.config.vocab_size == 512
    assert (teacher.lm_head.weight is teacher.model.embed_tokens.weight) is is_tied
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    add_loss_head(teacher)
    verify_loss_head(teacher)


def test_adopted_vocabulary_is_that_of_the_models_own_loss() -> None:
    config = Gemma3TextConfig(**SHAPE | {"vocab_size": 520})
    teacher: Any = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    adopt_vocabulary(teacher, VocabularyMap(range(512)), "teacher")
    add_loss_head(teacher)
    verify_loss_head(teacher)


def test_tokens_unknown_to_student_are_removed() -> None:
    student, teacher_tokenizer = build_tokenizer(), build_tokenizer()
    teacher_tokenizer.add_tokens(["<think>"])
    vocabulary = map_vocabulary(student, teacher_tokenizer, "teacher")
    assert list(vocabulary) == list(range(512))
    with pytest.raises(ConfigError, match="the teacher has no token '<think>'\n"):
        map_vocabulary(teacher_tokenizer, student, "teacher")
    teacher_tokenizer.add_tokens(["<tool>"])
    with pytest.raises(ConfigError, match="'<think>', '<tool>' and lacks 2 of the student's 514 in all"):
        map_vocabulary(teacher_tokenizer, student, "teacher")


def test_rules_of_each_tokenizer_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Seconds each, for a vocabulary of 100,000 tokens.
    read_rules = Mock(side_effect=_read_rules)
    monkeypatch.setattr("recipes_lib.models.vocabulary._read_rules", read_rules)
    student, teacher = build_tokenizer(), build_tokenizer()
    map_vocabulary(student, teacher, "teacher")
    assert [call.args for call in read_rules.call_args_list] == [(student,), (teacher,)]


def drop_a_merge(state: Any) -> None:
    del state["model"]["merges"][-1]


def split_digits(state: Any) -> None:
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [state["pre_tokenizer"], {"type": "Digits"}]}
    state["pre_tokenizer"]["pretokenizers"][1]["individual_digits"] = True


def lower(state: Any) -> None:
    state["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("change", "words"), [(drop_a_merge, "merges"), (split_digits, "pre_tokenizer"), (lower, "normalizer")]
)
def test_different_tokenization_rules_are_refused(change: Any, words: str) -> None:
    student = build_tokenizer()
    with pytest.raises(ConfigError, match=words) as caught:
        map_vocabulary(student, rebuild(student, change), "the key")
    (problem,) = caught.value.problems
    assert problem.where == "the key"
    assert "sft" in problem.remedy
    assert "GOLD" in problem.remedy


@pytest.mark.parametrize("num_rows", [500, 511])
def test_model_with_fewer_rows_than_tokens_is_refused(num_rows: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_rows} embeddings, and its tokenizer gives ids up to 511"):
        adopt_vocabulary(make_model(num_rows), VocabularyMap(range(512)), "teacher")


def test_changed_logits_after_remapping_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip_permutation(module: Any, ids: torch.Tensor) -> None:
        module.weight = torch.nn.Parameter(module.weight[: len(ids)], requires_grad=False)

    monkeypatch.setattr("recipes_lib.models.vocabulary._take_rows", skip_permutation)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1)).tolist()
    with pytest.raises(ConfigError, match="logits of the teacher change"):
        adopt_vocabulary(make_model(512), VocabularyMap(order), "teacher")


def test_identical_tokenizers_map_to_identity(tiny_tokenizer_dir: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_tokenizer_dir)
    model = make_model(512)
    before = model.lm_head.weight
    adopt_vocabulary(model, map_vocabulary(tokenizer, tokenizer, "teacher"), "teacher")
    assert model.lm_head.weight is before

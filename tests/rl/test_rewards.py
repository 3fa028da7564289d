"""Rewards: the call interface of TRL's GRPO, weighted sums, errors of user functions, and reward models."""

from __future__ import annotations

import code
import copy
import functools
import re
import sys
from decimal import Decimal

import numpy as np
import pytest
import torch
from tests.rl import keys_task
from tests.rl.reward_models import read_the_end
from transformers import AutoTokenizer, BloomConfig, LlamaConfig, LlamaForSequenceClassification

from recipes_lib.config.schema import RewardsConfig
from recipes_lib.data.prompts import PromptRow
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.models.heads.scoring import RewardModel, RewardStatistics, store_reward_statistics
from recipes_lib.rl.rewards import (
    MAX_MODEL_SCORE,
    Rewards,
    load_reward_functions,
    load_rewards,
    verify_arguments,
    verify_positions,
)
from recipes_lib.stopping import StopPendingError

CHATS = [PromptRow(f"row {n}", [1], [{"role": "user", "content": f"{n}?"}], {"solution": str(n)}) for n in range(3)]
ENDED = [True] * 3
TEXTS = [PromptRow("here", [1], f"{n}: ", {}) for n in range(3)]


def exact(*, prompts, completions, solution, **_):
    """Reward function in the style of TRL: chats are lists of messages, other columns are passed by name."""
    assert prompts[0][0]["role"] == "user"
    return [float(c[0]["content"] == s) for c, s in zip(completions, solution, strict=True)]


def length(*, completion_ids, **_):
    return [len(ids) if ids else None for ids in completion_ids]


reward_model = length
"""With the name that the reward model has among the rewards."""


def whole(*, prompts, completions, **_):
    return [len(prompt + completion) for prompt, completion in zip(prompts, completions, strict=True)]


def test_score_is_weighted_sum():
    rewards = Rewards({"exact": exact, "length": length}, None, [2.0, -0.5])
    scores = rewards.score(CHATS, ["0", "x", "2"], [[5], [5, 6], []], ENDED)
    assert scores.parts == {"exact": [1.0, 0.0, 1.0], "length": [1.0, 2.0, None]}
    assert scores.total == [1.5, -1.0, 2.0]
    assert Rewards({"whole": whole}, None, [1.0]).score(TEXTS, ["a", "", "abc"], [[1]] * 3, ENDED).total == [4, 3, 6]


def test_answer_is_unscored_if_all_weighted_rewards_are_none():
    ids = [[5], [5, 6], []]
    assert Rewards({"length": length}, None, [2.0]).score(CHATS, ["a"] * 3, ids, ENDED).total == [2.0, 4.0, None]
    # A reward of weight 0 does not change the total.
    measured = Rewards({"length": length, "exact": exact}, None, [2.0, 0.0]).score(CHATS, ["0"] * 3, ids, ENDED)
    assert measured.total == [2.0, 4.0, None]
    assert measured.parts["exact"] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda **_: 1 / 0, rf"3 answers to row 0, row 1, row 2: .*division by zero \({re.escape(__file__)}:\d+\)"),
        (lambda **_: [1.0], "for 3 answers"),
        (lambda **_: [1.0, float("nan"), 1.0], "nan"),
        (lambda **_: [1.0, "good", 1.0], "'good'"),
        (lambda **_: [1.0, 1e16, 1.0], r"1e\+16 for the answer 'b' to row 1\s+return finite numbers up to 1e\+15"),
        (lambda **_: sys.exit(0), r"failed on 3 answers .*SystemExit: 0"),
        (lambda **_: 3.0, "3.0 for 3 answers"),
        (lambda **_: None, "None for 3 answers"),
        (lambda **_: torch.tensor([1.0, torch.nan, 1.0]), "nan"),
        (lambda **_: np.ones((3, 1)), r"\[1.0\]"),
        (lambda **_: [Decimal("NaN")] * 3, "nan"),
        (lambda **_: (score for score in [1.0]), r"\[1.0\] for 3 answers"),
        (lambda **_: "abc", "'a' for the answer 'a'"),
        (lambda *, nowhere, **_: nowhere, "prompts, completions, completion_ids.*reward_timeout"),
        (lambda *, completions, **_: completions[0].strip(), r"strip.*\s+.*Each completion is a list of one message"),
    ],
)
def test_invalid_result_error_names_function_and_value(function, words):
    with pytest.raises(ConfigError, match=words) as caught:
        Rewards({"mine": function}, None, [1.0]).score(CHATS, ["a", "b", "c"], [[1]] * 3, ENDED)
    assert "mine" in str(caught.value)


@pytest.mark.parametrize("error", [ConfigError(Problem("base_url", "had no answer", "start it")), StopPendingError()])
def test_error_or_stop_of_a_judge_is_raised_as_it_is(error):
    def judge(**_):
        raise error

    with pytest.raises(type(error), match=f"^{error}$"):
        Rewards({"mine": judge}, None, [1.0]).score(CHATS, ["a", "b", "c"], [[1]] * 3, ENDED)


@pytest.mark.parametrize(
    "convert",
    [
        np.array,
        torch.tensor,
        tuple,
        iter,
        lambda scores: [torch.tensor(float(score)) for score in scores],
        lambda scores: map(Decimal, scores),
    ],
    ids=["array", "tensor", "tuple", "iterator", "tensors", "decimals"],
)
def test_arrays_tensors_iterators_and_decimals_are_accepted_as_scores(convert):
    rewards = Rewards({"array": lambda *, completions, **_: convert([len(text) for text in completions])}, None, [1.0])
    assert rewards.score(TEXTS, ["a", "", "abc"], [[1]] * 3, ENDED).total == [1, 0, 3]


def test_dataset_columns_do_not_replace_reserved_arguments():
    columns = {"prompts": "their", "completions": "their own", "completion_ids": [7]}
    prompts = [PromptRow("here", [1], f"{n}: ", columns) for n in range(3)]
    assert Rewards({"whole": whole}, None, [1.0]).score(prompts, ["a", "", "abc"], [[1]] * 3, ENDED).total == [4, 3, 6]
    assert Rewards({"length": length}, None, [1.0]).score(prompts, ["a"] * 3, [[1, 2]] * 3, ENDED).total == [2, 2, 2]


def test_function_may_change_its_arguments():
    """Answers to one prompt share its row, which the next function, the reward model and later iterations read."""

    def extend(*, prompts, completions, completion_ids, solution, **_):
        for chat, answer, ids, accepted in zip(prompts, completions, completion_ids, solution, strict=True):
            chat += answer
            ids.clear()
            accepted.append(answer[0]["content"])
        return [len(chat) + len(accepted) for chat, accepted in zip(prompts, solution, strict=True)]

    row = PromptRow("here", [1], [{"role": "user", "content": "?"}], {"solution": ["0"]})
    rewards = Rewards({"extend": extend, "again": extend, "length": length}, None, [1.0] * 3)
    assert rewards.score([row] * 3, ["a", "b", "c"], [[1]] * 3, ENDED).parts == {
        **dict.fromkeys(("extend", "again"), [4.0] * 3),
        "length": [1.0] * 3,
    }


def test_functions_are_named_and_all_failed_imports_are_reported():
    paths = [f"{__name__}:exact", "json:loads", "pickle:loads", f"{__name__}:reward_model"]
    assert list(load_reward_functions(paths)) == ["exact", "loads", *paths[2:]]
    with pytest.raises(ConfigError) as caught:
        load_reward_functions([f"{__name__}:CHATS", "json:absent", "nowhere.at.all:f", "json:loads"])
    assert len(caught.value.problems) == 3
    # An import can also fail by the module's own code.
    assert all(problem.remedy.startswith("correct it, run from its folder") for problem in caught.value.problems)


def test_defaults_of_torch_are_restored_after_import_and_call(tmp_path, monkeypatch):
    """A function sets them for a model of its own; the updates would fail, or compute in another dtype."""
    change = "torch.set_grad_enabled(False), torch.set_default_dtype(torch.float64), torch.set_default_device('meta')"
    source = (
        f"import torch\n{change}\ndef score(completions, **_):\n    {change}\n    return [1.0] * len(completions)\n"
    )
    (tmp_path / "changing_rewards.py").write_text(source)
    monkeypatch.chdir(tmp_path)

    def read():
        return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device().type

    states = [read()]
    functions = load_reward_functions(["changing_rewards:score"])
    states.append(read())
    Rewards(functions, None, [1.0]).score(TEXTS, ["a", "b", "c"], [[1]] * 3, ENDED)
    states.append(read())
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    assert states == [(True, torch.float32, "cpu")] * 3


def test_functions_that_cannot_be_called_are_reported():
    functions = {"exact": exact, "bare": lambda completions: completions, "builtin": max}
    give_solution = functools.wraps(exact)(lambda **given: exact(solution=[], **given))
    verify_arguments(functions | {"bare": whole, "decorated": give_solution}, ["solution"])
    verify_arguments({"decorated": give_solution}, ["answer"])
    with pytest.raises(ConfigError) as caught:
        verify_arguments(functions, ["answer"])
    assert [problem.found for problem in caught.value.problems] == [
        "exact cannot be called: missing a required argument: 'solution'",
        "bare cannot be called: got an unexpected keyword argument 'answer'",
    ]
    assert "lists: answer, prompts, completions, completion_ids;" in caught.value.problems[0].remedy


@pytest.mark.parametrize("path", ["rewards_of_mine:always", "rewards_of_mine.py:always"])
def test_function_is_imported_from_working_directory(tmp_path, monkeypatch, path):
    (tmp_path / "rewards_of_mine.py").write_text(
        "def always(**columns):\n    return [1.0] * len(columns['completions'])\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    functions = load_reward_functions([path])
    assert Rewards(functions, None, [1.0]).score(TEXTS, ["a"] * 3, [[1]] * 3, ENDED).total == [1, 1, 1]


def test_missing_attribute_error_names_file_of_shadowing_module():
    """A ``code.py`` in the working directory is shadowed by the standard library's."""
    with pytest.raises(ConfigError, match=rf"module 'code' \({re.escape(code.__file__)}\) has no attribute 'always'"):
        load_reward_functions(["code:always"])


@pytest.fixture(scope="module")
def reward_model_dir(tiny_tokenizer_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    config.num_labels, config.pad_token_id = 1, 1
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(folder)
    return folder


def test_reward_model_uses_its_own_template_and_tokenizer(reward_model_dir):
    config = RewardsConfig(
        reward_funcs=[f"{__name__}:length"], reward_model_name_or_path=str(reward_model_dir), reward_weights=[0.0, 3.0]
    )
    rewards = load_rewards(config, "cpu")
    own = RewardModel.load(reward_model_dir)
    texts = ["Four.", "Five.", "No"]
    expected = own.score([[*p.content, {"role": "assistant", "content": t}] for p, t in zip(CHATS, texts, strict=True)])
    assert rewards.score(CHATS, texts, [[1]] * 3, ENDED).total == pytest.approx([3 * score for score in expected])
    plain = own.score([(prompt.content, text) for prompt, text in zip(TEXTS, texts, strict=True)])
    assert rewards.score(TEXTS, texts, [[1]] * 3, ENDED).parts["reward_model"] == pytest.approx(plain)


def test_score_of_reward_model_is_clipped_in_standard_deviations_only(reward_model_dir):
    rewards = load_rewards(RewardsConfig(reward_model_name_or_path=str(reward_model_dir)), "cpu")
    assert rewards.model is not None
    with torch.no_grad():
        rewards.model.model.score.weight.mul_(1e4)
    raw = rewards.score(CHATS, ["Four.", "Five.", "No"], [[1]] * 3, ENDED).total
    assert len({*raw}) == 3
    assert min(map(abs, raw)) > MAX_MODEL_SCORE
    store_reward_statistics(rewards.model.model, RewardStatistics(mean=0.0, std=1.0))
    scores = rewards.score(CHATS, ["Four.", "Five.", "No"], [[1]] * 3, ENDED).total
    assert {abs(score) for score in scores} == {MAX_MODEL_SCORE}


def test_truncated_answer_is_scored_without_end_token(reward_model_dir):
    rewards = load_rewards(RewardsConfig(reward_model_name_or_path=str(reward_model_dir)), "cpu")
    assert rewards.model is not None
    read_the_end(rewards.model, ["<|im_end|>", "<|endoftext|>"])
    finished = [True, False, True]
    for prompts in (CHATS, TEXTS):
        first, second, third = rewards.score(prompts, ["Four.", "Fi", "No"], [[1]] * 3, finished).total
        # Padding can change the order of summation, over at most 64 products.
        assert first == pytest.approx(third, rel=64 * torch.finfo(torch.float32).eps)
        assert (first > 1, second) == (True, 0)


def test_answer_too_long_for_reward_model_error_names_prompt(reward_model_dir):
    rewards = load_rewards(RewardsConfig(reward_model_name_or_path=str(reward_model_dir)), "cpu")
    assert rewards.model is not None
    rewards.model.model.config.max_position_embeddings = 40
    prompts = [PromptRow(f"prompts.jsonl:{line}", [1], "Why? ", {}) for line in (4, 9, 17)]
    with pytest.raises(DataError, match=r"prompts\.jsonl:9: \d+ tokens are more than the 40 positions") as caught:
        rewards.score(prompts, ["No", "word " * 60, "No"], [[1]] * 3, ENDED)
    assert len(caught.value.problems) == 1


def test_too_few_positions_raise_with_same_vocabulary_and_warn_otherwise(tiny_tokenizer):
    few, any_number = LlamaConfig(max_position_embeddings=100), BloomConfig()
    for config, length in ((few, 100), (any_number, 10**6)):
        assert verify_positions(config, tiny_tokenizer, tiny_tokenizer, length) == ""
    with pytest.raises(ConfigError, match="has 100 positions, and the longest prompt with its answer 101 tokens"):
        verify_positions(few, tiny_tokenizer, copy.deepcopy(tiny_tokenizer), 101)
    # With another tokenizer the number of tokens is unknown.
    assert verify_positions(few, keys_task.build_tokenizer(), tiny_tokenizer, 101).startswith(
        "warning: the reward model"
    )

"""RLOO and GRPO learn what PPO learns, from the same prompts and rewards, and do not from rewards that say nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.data.templates.tokenizers import build_metaspace
from tests.rl import arithmetic_task, keys_task
from tests.rows import read_events

from recipes_lib.data.prompts import PromptRow
from recipes_lib.rl.grpo import build_score
from recipes_lib.rl.rewards import Rewards, Scores

WORDS = keys_task.build_tokenizer()
PROMPTS = [PromptRow("here", [12], "w12", {"wanted": f"k{n}"}) for n in range(3)]
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "neighbours.py"


def right(*, completions, wanted, **_):
    return [float(text.split()[0] == word) for text, word in zip(completions, wanted, strict=True)]


def short(*, completion_ids, **_):
    return [-len(ids) for ids in completion_ids]


def test_an_answer_is_worth_its_weighted_rewards_less_the_penalty_and_the_figures_are_ppos():
    logged = {}
    score = build_score(
        Rewards({"right": right, "short": short}, None, [2.0, 0.5]), WORDS, stop_ids=[9, 8], penalty=1.5
    )
    worth = score(PROMPTS, [[2, 9], [5], [4, 6, 8]], logged.__setitem__)
    assert worth == [2.0 - 1.0, -0.5 - 1.5, 2.0 - 1.5]
    assert logged == {
        "objective/score": pytest.approx((1.0 - 0.5 + 0.5) / 3),
        "objective/score/right": pytest.approx(2 / 3),
        "objective/score/short": pytest.approx(-2.0),
        "objective/finish_rate": pytest.approx(2 / 3),
        "objective/length": 2.0,
    }


def some(*, completion_ids, **_):
    """Says nothing of answers of an odd number of tokens."""
    return [None if len(ids) % 2 else float(sum(ids)) / len(ids) for ids in completion_ids]


def test_an_answer_of_which_no_reward_says_anything_has_no_worth_and_no_penalty():
    logged = {}
    ids = [[5, 9], [5], [5, 6, 7, 8]]
    score = build_score(Rewards({"some": some}, None, [2.0]), WORDS, stop_ids=[9], penalty=1.5)
    assert score(PROMPTS, ids, logged.__setitem__) == [14.0, None, 13.0 - 1.5]
    assert (logged["objective/score"], logged["objective/finish_rate"]) == (13.5, pytest.approx(1 / 3))
    logged.clear()
    assert score(PROMPTS[:1], [[5]], logged.__setitem__) == [None]
    assert "objective/score" not in logged


def test_rewards_are_given_the_texts_as_they_go_on_and_which_of_them_ended():
    tokenizer, told = build_metaspace(None), {}

    def keep(prompts, texts, ids, finished):
        told.update(texts=texts, finished=finished)
        return Scores([1.0] * 3, {"model": [1.0] * 3})

    ids = tokenizer("The capital of France is Paris").input_ids
    asked = [PromptRow("here", ids[:3], tokenizer.decode(ids[:3], skip_special_tokens=True), {})] * 2
    asked += [PromptRow("here", ids[:3], [{"role": "user", "content": "The"}], {})]
    score = build_score(SimpleNamespace(score=keep), tokenizer, stop_ids=[tokenizer.eos_token_id], penalty=0.0)
    score(asked, [ids[3:], [*ids[3:], tokenizer.eos_token_id], ids[3:]], lambda *_: None)
    assert [prompt.content + text for prompt, text in zip(asked[:2], told["texts"], strict=False)] == [
        "The capital of France is Paris"
    ] * 2
    # A turn of a chat begins for itself.
    assert told["texts"][0] == " " + told["texts"][2]
    assert told["finished"] == [False, True, False]


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
def test_answers_that_no_reward_scores_teach_what_they_teach_where_trl_is_told_so(
    policy_dir, prompts_file, tmp_path, monkeypatch, stage
):
    """The same run, and one in which TRL is given what the function returned, with nothing of ours in between."""

    def build_plain(rewards, *_):
        function = rewards.functions["some"]
        return lambda prompts, ids, log: function(completion_ids=ids)

    found = []
    for name in ("ours", "plain"):
        folder = tmp_path / name
        keys = {"max_steps": 4, "missing_eos_penalty": 0, "reward_funcs": "[tests.rl.test_groups:some]"}
        keys_task.train_groups(stage, keys_task.build_group_flags(policy_dir, folder, prompts_file, **keys))
        figures = ("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std")
        found.append([[event.get(figure) for figure in figures] for event in read_events(folder)])
        monkeypatch.setattr("recipes_lib.rl.grpo.build_score", build_plain)
    assert len(found[0]) == 4
    assert found[0] == found[1]


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
@pytest.mark.parametrize(("given", "penalty"), [(1.5, 1.5), ("null", 0.0)])
def test_what_a_policy_learns_from_is_less_the_penalty_of_the_run(
    policy_dir, prompts_file, tmp_path, stage, given, penalty
):
    keys = {"max_steps": 1, "num_iterations": 1, "steps_per_generation": 1, "missing_eos_penalty": given, "beta": 0}
    keys_task.train_groups(stage, keys_task.build_group_flags(policy_dir, tmp_path, prompts_file, **keys))
    (event,) = read_events(tmp_path)
    missing = 1 - event["objective/finish_rate"]
    assert 0 < missing < 1
    assert event["reward"] == pytest.approx(event["objective/score"] - penalty * missing, abs=1e-5)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Problems, and a policy that half knows the answers."""
    folder = tmp_path_factory.mktemp("arithmetic")
    rows = arithmetic_task.write_problems(folder, 0)
    return folder, arithmetic_task.write_policy(folder / "policy", rows, 0)


@pytest.fixture
def run(task, tmp_path):
    """Share of right answers to held-out problems before and after."""
    folder, policy = task

    def train(stage, **keys):
        flags = arithmetic_task.build_group_flags(policy, tmp_path / stage, folder, **{"max_steps": 160, **keys})
        keys_task.train_groups(stage, flags)
        first, last = read_events(tmp_path / stage, "eval")
        return first["eval_reward"], last["eval_reward"]

    return train


@pytest.mark.parametrize("stage", ["rloo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_the_verifiable_reward_rises(run, stage):
    before, after = run(stage)
    assert after > before + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rloo", "grpo"])
def test_it_does_not_rise_when_the_reward_is_told_of_others(run, stage):
    before, after = run(stage, reward_funcs="[tests.rl.arithmetic_task:score_shuffled]")
    assert after < before + 0.1


@pytest.mark.slow
def test_the_comparison_gives_every_stage_as_many_answers_and_steps(task, tmp_path):
    folder, policy = task
    output = tmp_path / "neighbours.json"
    command = [sys.executable, str(BENCHMARK), "--policy", str(policy), "--prompts", str(folder / "train.jsonl")]
    command += ["--held_out", str(folder / "held_out.jsonl"), "--reward", "recipes_lib.rl.verifiers:final_number"]
    command += ["--answers", "256", "--response_length", "8", "--learning_rate", "1e-3", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = json.loads(output.read_text())["measurements"]
    assert set(runs) == {"ppo", "rloo", "grpo"}
    figures = [{key: run[key] for key in ("num_answers", "num_steps", "before")} for (run,) in runs.values()]
    assert figures == [{"num_answers": 256, "num_steps": 16, "before": figures[0]["before"]}] * 3

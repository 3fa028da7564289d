"""`recipes sample-pairs`: what it writes is decided by policy, prompts, rewards and sampling, and by nothing else."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.rl import keys_task
from tests.rows import read_rows
from transformers import LlamaForCausalLM

from recipes_lib.commands import sampling
from recipes_lib.errors import ConfigError


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return keys_task.write_policy(tmp_path_factory.mktemp("policy"), 0, num_steps=100)


@pytest.fixture
def run(policy, tmp_path):
    prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 24, seed=5)

    def call(name="pairs.jsonl", num_answers=4, **keys):
        given = {"learning_rate": 1e-3, "per_device_eval_batch_size": 16, "policy": policy, **keys}
        flags = keys_task.build_flags(given.pop("policy"), tmp_path / "out", prompts, **given)
        sampling.main_pairs([f"--output={tmp_path / name}", f"--num_answers={num_answers}", *flags])
        return read_rows(tmp_path / name)

    return call


def share(prompt, answer):
    words = answer.split()
    return words.count(prompt.split()[-2]) / max(len(words), 1)


def test_the_chosen_answer_is_worth_more_by_the_reward(run, capsys):
    rows = run()
    assert len(rows) > 12
    for row in rows:
        assert row["score_chosen"] == pytest.approx(share(row["prompt"], row["chosen"]))
        assert row["score_rejected"] == pytest.approx(share(row["prompt"], row["rejected"]))
        assert row["score_chosen"] > row["score_rejected"]
    told = capsys.readouterr().out
    assert f"24 prompts, {len(rows)} pairs" in told


def test_the_same_command_changes_nothing_and_batches_decide_nothing(run):
    rows = run()
    assert run() == rows
    assert run("others.jsonl", per_device_eval_batch_size=64) == rows


@pytest.mark.parametrize(
    "keys",
    [
        {"seed": 1},
        {"temperature": 0.5},
        {"num_answers": 3},
        {"response_length": 6},
        {"reward_funcs": "[tests.rl.keys_task:score_second_key]"},
    ],
)
def test_a_file_of_other_pairs_is_refused(run, keys):
    run()
    with pytest.raises(ConfigError, match="of another policy"):
        run(**keys)


def test_other_weights_are_another_policy(run, policy, tmp_path):
    run()
    other = tmp_path / "other"
    shutil.copytree(policy, other)
    assert run(policy=other)
    model = LlamaForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1e-3
    model.save_pretrained(other)
    with pytest.raises(ConfigError, match="of another policy"):
        run(policy=other)


def test_one_answer_makes_no_pair(run):
    with pytest.raises(ConfigError, match="a pair takes two answers"):
        run(num_answers=1)

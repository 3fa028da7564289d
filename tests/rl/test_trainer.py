"""PolicyTrainer: metrics, events, critic warm-up, guards, and bit-identical resumption after stops and crashes."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tests.rl import keys_task
from tests.rows import read_events, read_rows

from recipes_lib.config.loader import load_config
from recipes_lib.errors import ConfigError, DivergedError, PreemptedError, Problem
from recipes_lib.inspection.recipe_checks import PPOInspection
from recipes_lib.models import generation as sampling
from recipes_lib.report.page import build_report
from recipes_lib.rl import collect, update
from recipes_lib.rl import monitor as samples_module
from recipes_lib.rl import trainer as trainer_module
from recipes_lib.rl.rewards import Rewards
from recipes_lib.rl.trainer import PolicyTrainer
from recipes_lib.rl.update import Updater
from recipes_lib.stopping import STOP
from recipes_lib.training.checkpoints.manifest import list_checkpoints
from recipes_lib.training.layouts.launch_environment import plan_launch

# 8 answers per step, 2 steps per epoch, 2 epochs per iteration: 12 steps are 3 iterations.
SHORT = {
    "max_steps": 12,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "linear",
    "kl_target_per_sequence": 0.5,
    "kl_horizon": 100,
    "save_strategy": "steps",
    "save_steps": 4,
    "save_total_limit": 10,
    "num_sample_prompts": 2,
    "eval_steps": 8,
    "reward_funcs": "[tests.rl.keys_task:score_first_key, tests.rl.test_trainer:score_by_chance]",
}
CLOCKS = ("time/", "_per_s", "seconds", "memory")


def score_by_chance(*, completions, **_):
    """Reward from numpy's global generator, as user functions may have."""
    return np.random.random(len(completions)).tolist()  # noqa: NPY002


def assert_equal_events(one, other):
    """Compare events without durations and memory."""
    for first, second in zip(one, other, strict=True):
        assert {k: v for k, v in first.items() if not any(part in k for part in CLOCKS)} == {
            k: v for k, v in second.items() if not any(part in k for part in CLOCKS)
        }


def test_epoch_strategies_save_and_evaluate_after_each_epoch_of_prompts(policy_dir, tmp_path):
    """8 of 20 prompts per iteration: iterations 3 and 5 end an epoch."""
    prompts = keys_task.write_prompts(tmp_path / "prompts.jsonl", 20, seed=5)
    held_out = keys_task.write_prompts(tmp_path / "held_out.jsonl", 3, seed=6)
    keys = {"save_strategy": "epoch", "eval_strategy": "epoch", "num_train_epochs": 2, "num_sample_prompts": 2}
    keys["dataset_test_split"] = held_out
    batch = {"per_device_train_batch_size": 8, "num_mini_batches": 1, "num_ppo_epochs": 1}
    keys_task.train(keys_task.build_flags(policy_dir, tmp_path / "run", prompts, **keys, **batch))
    assert sorted(step for step, _ in list_checkpoints(tmp_path / "run")) == [3, 5]
    # Step 0 by `eval_on_start`.
    samples, prompts = read_rows(tmp_path / "run" / "samples.jsonl"), [row["prompt"] for row in read_rows(held_out)]
    assert [(row["step"], row["prompt"]) for row in samples] == list(itertools.product([0, 3, 5], prompts[:2]))


@pytest.fixture(scope="module")
def straight(policy_dir, prompts_file, tmp_path_factory):
    """Output of an uninterrupted run: three iterations of four steps, samples after the second and third."""
    folder = tmp_path_factory.mktemp("straight")
    keys_task.train(keys_task.build_flags(policy_dir, folder, prompts_file, **SHORT))
    return folder


def assert_same_run(expected, run):
    """Compare weights, optimizer states, KL coefficients, events and samples of two runs of ``SHORT``, bit by bit."""
    for learner in ("policy", "critic"):
        weights = [load_file(folder / "checkpoint-12" / f"{learner}.safetensors") for folder in (expected, run)]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
        states = [
            torch.load(folder / "checkpoint-12" / f"{learner}_optimizer.pt", weights_only=True)
            for folder in (expected, run)
        ]
        assert torch.equal(*(state["state"][0]["exp_avg"] for state in states))
    for kind in ("train", "eval"):
        assert_equal_events(read_events(expected, kind), read_events(run, kind))
    assert (expected / "samples.jsonl").read_text() == (run / "samples.jsonl").read_text()
    counts = [json.loads((folder / "checkpoint-12" / "ppo_state.json").read_text()) for folder in (expected, run)]
    assert counts[0]["kl_coef"] == counts[1]["kl_coef"] != 0.02


@pytest.mark.parametrize("keys", [{}, {"use_peft": True}], ids=["separate_models", "adapters"])
def test_crashed_run_resumes_bit_identically(straight, policy_dir, prompts_file, tmp_path, keys, monkeypatch):
    if keys:
        straight = tmp_path / "straight"
        keys_task.train(keys_task.build_flags(policy_dir, straight, prompts_file, **SHORT, **keys))

    def crash_in_third(self, iteration, run=PolicyTrainer._run_iteration):
        if iteration == 2:
            raise KeyboardInterrupt
        return run(self, iteration)

    flags = keys_task.build_flags(policy_dir, tmp_path / "crashed", prompts_file, **SHORT, **keys)
    with monkeypatch.context() as patch:
        patch.setattr(PolicyTrainer, "_run_iteration", crash_in_third)
        with pytest.raises(KeyboardInterrupt):
            keys_task.train(flags)
    # The state of global generators must not matter.
    torch.rand(3)
    np.random.random(3)  # noqa: NPY002
    keys_task.train(flags)
    assert_same_run(straight, tmp_path / "crashed")
    first, last = (load_file(straight / f"checkpoint-{step}" / "policy.safetensors") for step in (4, 12))
    assert any(not torch.equal(first[key], last[key]) for key in first)


def stop_at_call(monkeypatch, owner, name, call):
    """Send a stop request before one call of a function, counted from 1."""
    function, calls = getattr(owner, name), []

    def stopping(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            STOP.request("SIGTERM")
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, stopping)


def test_checkpoint_size_matches_plan_of_check(straight, policy_dir, prompts_file, tmp_path):
    flags = keys_task.build_flags(policy_dir, tmp_path, prompts_file, **SHORT)
    inspection = PPOInspection(load_config("ppo", flags), plan_launch(None, 1), Console(quiet=True))
    inspection.check_model(lambda line: None)
    inspection.check_adapter(lambda line: None)
    written = sum(path.stat().st_size for path in (straight / "checkpoint-12").iterdir())
    assert inspection.count_saved()[0] == pytest.approx(written, rel=0.1)


STOPS = {
    # Phase: owner and name of a function, call at which to stop, step of the checkpoint. Sampling, scoring and forward
    # passes are abandoned; updates are finished.
    "sampling": (sampling.GenerateBackend, "generate", 3, 4),
    "scoring": (Rewards, "score", 3, 4),
    "log-probabilities": (collect, "Sequences", 4, 4),
    "policy update": (Updater, "_compute_policy_loss", 6, 8),
    "critic update": (Updater, "_compute_value_loss", 6, 8),
    "evaluation": (samples_module, "Sample", 3, 8),
    "saving": (trainer_module, "stage_state", 2, 8),
    "last save": (trainer_module, "stage_state", 3, 12),
}


ABANDONED = {"sampling": (2, 2), "log-probabilities": (3, 3)}
"""Numbers of scored rollouts and of log-probability passes when a stop request ends the second iteration at once.

Samples and the first iteration are scored; the first iteration has one pass each of policy and reference.
"""


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(phase, marks=[pytest.mark.slow] * (phase in ("scoring", "critic update", "saving")))
        for phase in STOPS
    ],
)
def test_stop_request_saves_last_iteration_and_resumes_bit_identically(
    straight, policy_dir, prompts_file, tmp_path, monkeypatch, phase
):
    owner, name, call, step = STOPS[phase]
    flags = keys_task.build_flags(policy_dir, tmp_path, prompts_file, **SHORT | {"save_steps": 8})
    calls, score, compute_logps = [], Rewards.score, collect.compute_response_logps
    with monkeypatch.context() as patch:
        patch.setattr(Rewards, "score", lambda *given: (calls.append("score"), score(*given))[1])
        patch.setattr(
            collect,
            "compute_response_logps",
            lambda *given, **more: (calls.append(""), compute_logps(*given, **more))[1],
        )
        stop_at_call(patch, owner, name, call)
        with pytest.raises(PreemptedError, match=f"SIGTERM: stopped after step {step}; checkpoint-{step} is complete"):
            keys_task.train(flags)
    num_scored = calls.count("score")
    assert (num_scored, len(calls) - num_scored) == ABANDONED.get(phase, (num_scored, len(calls) - num_scored))
    assert list_checkpoints(tmp_path)[0][0] == step
    STOP.reset()
    keys_task.train(flags)
    assert_same_run(straight, tmp_path)


def test_stop_request_before_first_update_saves_nothing(policy_dir, prompts_file, tmp_path, monkeypatch):
    stop_at_call(monkeypatch, Rewards, "score", 1)
    with pytest.raises(PreemptedError, match="stopped after step 0; there was nothing to save yet"):
        keys_task.train(keys_task.build_flags(policy_dir, tmp_path, prompts_file, **SHORT))
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("call", [4, 5], ids=["evaluation", "training"])
def test_failed_reward_costs_no_finished_iteration(straight, policy_dir, prompts_file, tmp_path, monkeypatch, call):
    flags = keys_task.build_flags(policy_dir, tmp_path, prompts_file, **SHORT | {"save_steps": 12})
    calls, score = [], Rewards.score

    def fail(self, *given):
        calls.append(given)
        if len(calls) == call:
            raise ConfigError(Problem("reward_funcs", "its server is down", "start it"))
        return score(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Rewards, "score", fail)
        with pytest.raises(ConfigError, match="its server is down"):
            keys_task.train(flags)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [8]
    keys_task.train(flags)
    assert_same_run(straight, tmp_path)


def test_critic_warmup_leaves_policy_unchanged(policy_dir, prompts_file, tmp_path):
    flags = keys_task.build_flags(policy_dir, tmp_path, prompts_file, **SHORT, critic_warmup_iterations=2)
    keys_task.train(flags)
    policy, critic = (
        [load_file(tmp_path / f"checkpoint-{step}" / f"{name}.safetensors") for step in (4, 8, 12)]
        for name in ("policy", "critic")
    )
    given = load_file(policy_dir / "model.safetensors")
    for key in given:
        assert all(torch.equal(weights[key], given[key]) for weights in policy[:2])
    assert any(not torch.equal(policy[1][key], policy[2][key]) for key in given)
    for one, other in itertools.pairwise(critic):
        assert any(not torch.equal(one[key], other[key]) for key in one)
    events = read_events(tmp_path)
    # The KL divergence is 0 meanwhile, and must not change the coefficient; the policy's schedule starts after it.
    assert [event["objective/kl_coef"] for event in events] == [0.02] * 3
    assert events[0]["loss"] is None
    assert "policy/num_updates" not in events[1]
    assert events[2]["policy/num_updates"] == 4
    assert events[2]["policy/lr"] == pytest.approx(1e-3 / 4)


def score_none(*, completions, **_):
    return [None] * len(completions)


def test_unscored_answers_change_no_weights(policy_dir, prompts_file, tmp_path, capsys):
    functions = "[tests.rl.test_trainer:score_none]"
    # At one and at two rollouts in a row there is a warning, at three there is none.
    flags = keys_task.build_flags(policy_dir, tmp_path, prompts_file, **SHORT | {"reward_funcs": functions})
    models = keys_task.train(flags)
    given = load_file(policy_dir / "model.safetensors")
    trained = dict(models.policy.named_parameters())
    assert all(torch.equal(trained[name], weight) for name, weight in given.items() if name in trained)
    assert not models.critic.score.weight.any()
    for event in read_events(tmp_path):
        assert not any(name.startswith(("objective/score", "policy/", "value/")) for name in event)
        assert (event["loss"], event["num_target_tokens"]) == (None, 0)
    assert not any("eval_reward" in event for event in read_events(tmp_path, "eval"))
    samples = read_rows(tmp_path / "samples.jsonl")
    assert {sample["reward"] for sample in samples} == {None}
    lines = capsys.readouterr().err.splitlines()
    assert not any("16 bits" in line for line in lines)
    warnings = [line for line in lines if "such rewards give no signal" in line]
    assert ["none of the 16 answers has a reward" in line for line in warnings] == [True, True]


def score_constant(*, completions, **_):
    return [0.1] * len(completions)


def test_constant_rewards_warn_and_end_the_run_also_after_resume(policy_dir, prompts_file, tmp_path, capsys):
    keys = {**SHORT, "reward_funcs": "[tests.rl.test_trainer:score_constant]", "missing_eos_penalty": 0}
    flags = keys_task.build_flags(policy_dir, tmp_path, prompts_file, **keys, max_zero_std_rollouts=2)
    with pytest.raises(
        DivergedError, match=r"step 5 was .*: the rewards of 2 rollouts in a row had no signal; in this"
    ):
        keys_task.train(flags)
    assert "warning: step 1: all 16 answers have the same reward, 0.1; such rewards give" in capsys.readouterr().err
    assert [step for step, _ in list_checkpoints(tmp_path)] == [4]
    with pytest.raises(DivergedError, match=r"step 5 was .*: the rewards of 2 rollouts in a row"):
        keys_task.train(flags)
    keys_task.train(keys_task.build_flags(policy_dir, tmp_path, prompts_file, **keys, max_zero_std_rollouts="null"))
    assert [event["step"] for event in read_events(tmp_path)] == [4, 8, 12]


def test_missing_eos_penalty_gives_signal_to_constant_rewards(policy_dir, prompts_file, tmp_path, capsys):
    keys = {**SHORT, "reward_funcs": "[tests.rl.test_trainer:score_constant]", "max_zero_std_rollouts": 1}
    keys["dtype"] = "bfloat16"  # As in other recipes, the run tells that small updates of such weights are lost.
    del keys["kl_target_per_sequence"], keys["kl_horizon"]
    keys_task.train(keys_task.build_flags(policy_dir, tmp_path, prompts_file, **keys | {"max_steps": 4, "kl_coef": 0}))
    (event,) = read_events(tmp_path)
    assert event["policy/num_updates"] == 4
    # Without a reference model there is no KL divergence to log.
    assert [name for name in event if name.startswith("objective/kl")] == ["objective/kl_coef"]
    lines = capsys.readouterr().err.splitlines()
    assert all(
        any(line.startswith(f"{name}: warning: trained weights have 16 bits") for line in lines)
        for name in ("policy", "critic")
    )


def test_entropy_is_computed_only_when_logged(policy_dir, prompts_file, tmp_path, monkeypatch):
    requested, compute = [], update.compute_response_logps
    monkeypatch.setattr(
        update,
        "compute_response_logps",
        lambda *given, **more: (requested.append(more["with_entropy"]), compute(*given, **more))[1],
    )
    keys_task.train(keys_task.build_flags(policy_dir, tmp_path, prompts_file, **SHORT, logging_steps=12))
    assert requested == [True] * 4 + [False] * 4 + [True] * 4
    assert [(event["step"], "policy/entropy" in event) for event in read_events(tmp_path)] == [(4, True), (12, True)]


def test_logged_metrics_are_complete_consistent_and_drawn(straight):
    train, evaluations = read_events(straight), read_events(straight, "eval")
    assert [event["step"] for event in train] == [4, 8, 12]
    assert [event["num_answers"] for event in train] == [16, 32, 48]
    assert [event["step"] for event in evaluations] == [0, 8, 12]
    expected = {
        **{"objective": "score score_std reward_total kl_seq kl_token kl_coef finish_rate length unique_4_grams"},
        **{"policy": "loss approx_kl clipfrac clipfrac_low clipfrac_high ratio_max entropy grad_norm lr num_updates"},
        **{"value": "loss clipfrac explained_var mean return_mean grad_norm lr"},
        **{"rollout": "tokens_per_s engine_mismatch_kl is_weight_mean is_weight_max"},
        **{"time": "generate score old_ref_value update_policy update_critic"},
    }
    names = {f"{group}/{name}" for group, names in expected.items() for name in names.split()}
    assert names <= train[0].keys()
    assert "Clip fraction" in build_report(straight).read_text(encoding="utf-8")
    charts = {path.stem for path in (straight / "report").iterdir()}
    assert charts >= {"score", "kl", "entropy", "clip_fraction", "finish_rate", "length", "explained_variance"}
    first = train[0]
    assert first["objective/kl_seq"] == pytest.approx(0, abs=1e-6)
    assert first["objective/score"] == pytest.approx(
        first["objective/score/score_first_key"] + first["objective/score/score_by_chance"]
    )
    assert train[-1]["objective/kl_seq"] != 0
    for event in train:
        assert 0 < event["objective/finish_rate"] < 1
        costs = 1.0 - event["objective/finish_rate"] + event["objective/kl_coef"] * event["objective/kl_seq"]
        assert event["objective/reward_total"] == pytest.approx(event["objective/score"] - costs, abs=1e-5)
    samples = read_rows(straight / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0, 0, 8, 8, 12, 12]
    assert samples[0]["prompt"] == samples[2]["prompt"]
    assert samples[0].keys() >= {"completion", "reward", "stopped", "num_tokens"}

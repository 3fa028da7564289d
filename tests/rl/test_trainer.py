"""The loop: what an iteration learns from, what it reports, and that a stopped run goes on as if it had not been."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.rl import keys_task
from tests.rl.test_rollout import build_rollout

from recipes_lib.config.schema import PPOConfig
from recipes_lib.errors import ConfigError
from recipes_lib.rl.trainer import PPOTrainer, check_launch, compute_targets

# Eight answers a step, two steps an epoch, two epochs: three iterations are twelve steps.
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
    """A reward that draws from numpy's global generator, as users' do."""
    return np.random.random(len(completions)).tolist()  # noqa: NPY002


def compare(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert {k: v for k, v in mine.items() if not any(part in k for part in CLOCKS)} == {
            k: v for k, v in theirs.items() if not any(part in k for part in CLOCKS)
        }


@pytest.mark.parametrize("keys", [{}, {"use_peft": True}], ids=["own models", "adapters"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(policy_dir, prompts_file, tmp_path, keys, monkeypatch):
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    keys_task.train(keys_task.build_flags(policy_dir, straight, prompts_file, **SHORT, **keys))

    def die_in_the_third(self, iteration, run=PPOTrainer._run_iteration):
        if iteration == 2:
            raise KeyboardInterrupt
        return run(self, iteration)

    flags = keys_task.build_flags(policy_dir, stopped, prompts_file, **SHORT, **keys)
    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "_run_iteration", die_in_the_third)
        with pytest.raises(KeyboardInterrupt):
            keys_task.train(flags)
    # Something else happens to the process's random numbers meanwhile.
    torch.rand(3)
    np.random.random(3)  # noqa: NPY002
    keys_task.train(flags)

    for name in ("policy", "critic"):
        weights = [load_file(folder / "checkpoint-12" / f"{name}.safetensors") for folder in (straight, stopped)]
        first = load_file(straight / "checkpoint-4" / f"{name}.safetensors")
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
        assert any(not torch.equal(weights[0][key], first[key]) for key in first)
        states = [
            torch.load(folder / "checkpoint-12" / f"{name}_optimizer.pt", weights_only=True)
            for folder in (straight, stopped)
        ]
        moments = [state["optimizer"]["state"][0]["exp_avg"] for state in states]
        assert torch.equal(*moments)
    for kind in ("train", "eval"):
        compare(keys_task.read_metrics(straight, kind), keys_task.read_metrics(stopped, kind))
    samples = [(folder / "samples.jsonl").read_text() for folder in (straight, stopped)]
    assert samples[0] == samples[1]
    counts = [json.loads((folder / "checkpoint-12" / "ppo_state.json").read_text()) for folder in (straight, stopped)]
    assert counts[0]["kl_coef"] == counts[1]["kl_coef"] != 0.02


def test_it_reports_what_is_promised(policy_dir, prompts_file, tmp_path):
    keys_task.train(keys_task.build_flags(policy_dir, tmp_path, prompts_file, **SHORT))
    train, evaluations = keys_task.read_metrics(tmp_path), keys_task.read_metrics(tmp_path, "eval")
    assert [event["step"] for event in train] == [4, 8, 12]
    assert [event["num_answers"] for event in train] == [16, 32, 48]
    assert [event["step"] for event in evaluations] == [0, 8, 12]
    expected = {
        **{"objective": "score score_std reward_total kl_seq kl_token kl_coef finish_rate length unique_4_grams"},
        **{"policy": "loss approx_kl clipfrac_low clipfrac_high ratio_max entropy grad_norm lr num_updates"},
        **{"value": "loss clipfrac explained_var mean return_mean grad_norm lr"},
        **{"rollout": "tokens_per_s pad_fraction engine_mismatch_kl is_weight_mean is_weight_max"},
        **{"time": "generate score old_ref_value update_policy update_critic"},
    }
    names = {f"{group}/{name}" for group, names in expected.items() for name in names.split()}
    assert names <= train[0].keys()
    first = train[0]
    assert first["objective/kl_seq"] == pytest.approx(0, abs=1e-6)
    assert first["objective/score"] == pytest.approx(
        first["objective/score/score_first_key"] + first["objective/score/score_by_chance"]
    )
    assert train[-1]["objective/kl_seq"] != 0
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0, 0, 8, 8, 12, 12]
    assert samples[0]["prompt"] == samples[2]["prompt"]
    assert samples[0].keys() >= {"completion", "reward", "stopped", "num_tokens"}


def test_an_iterations_targets_are_those_of_their_definition():
    """Whitened advantages, returns that are not; penalty and KL in their sum."""
    rollout, config = build_rollout([(3, 4), (2, 1), (2, 3)]), PPOConfig(gamma=0.9, lam=0.8)
    targets = compute_targets(rollout, config, 0.5, 0.1)
    kl = ((rollout.logps - rollout.ref_logps) * rollout.mask).double().numpy()
    scores = rollout.scores.double().numpy() - 0.5 * (~rollout.finished).numpy()
    np.testing.assert_allclose(targets.total, scores - 0.1 * kl.sum(1), atol=1e-6)
    advantages = np.zeros(kl.shape)
    for row, length in enumerate([4, 1, 3]):
        rewards, values = -0.1 * kl[row, :length], np.append(rollout.values[row, :length].double().numpy(), 0)
        rewards[-1] += scores[row]
        deltas = rewards + 0.9 * values[1:] - values[:-1]
        for t in range(length):
            advantages[row, t] = sum(0.72 ** (k - t) * deltas[k] for k in range(t, length))
    mask = rollout.mask.numpy()
    np.testing.assert_allclose(targets.returns, (advantages + rollout.values.numpy()) * mask, atol=1e-6)
    kept = advantages[mask]
    np.testing.assert_allclose(targets.advantages[rollout.mask], (kept - kept.mean()) / kept.std(), atol=1e-5)
    whitened = compute_targets(rollout, PPOConfig(gamma=0.9, lam=0.8, whiten_rewards=True), 0.5, 0.1)
    assert not torch.allclose(whitened.returns, targets.returns)
    assert torch.equal(whitened.total, targets.total)


def test_a_launch_that_shards_weights_is_refused():
    check_launch("")
    with pytest.raises(ConfigError, match="FSDP"):
        check_launch("FSDP")

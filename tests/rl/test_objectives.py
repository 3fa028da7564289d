"""Advantages, returns, policy and value losses with gradients, compared by hand, with numpy and with TRL's trainers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from tests.rl.test_rollout import build_rollout
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes_lib.config.schema import PPOConfig
from recipes_lib.config.table import load_table
from recipes_lib.rl.methods import compute_targets
from recipes_lib.rl.objectives import (
    PolicyObjective,
    adapt_kl_coef,
    compute_advantages,
    compute_group_advantages,
    compute_importance_weights,
    compute_leave_one_out_advantages,
    compute_normaliser,
    compute_policy_loss,
    compute_rewards,
    compute_value_loss,
    estimate_kl,
    penalise_missing_end,
    whiten,
)


def tensor(*rows: list[float] | tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def mask(*rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def policy_loss(ratio: float, advantage: float) -> tuple[float, float]:
    logps = tensor([np.log(ratio)]).requires_grad_()
    old, advantages = tensor([0.0]), tensor([advantage])
    loss, _ = compute_policy_loss(logps, old, advantages, mask((1,)), PolicyObjective(), normaliser=1)
    loss.backward()
    assert logps.grad is not None
    return loss.item(), logps.grad.item() / ratio


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 1.0, -1.2, 0.0),
        (0.5, 1.0, -0.5, -1.0),
        (1.5, -1.0, 1.5, 1.0),
        (0.5, -1.0, 0.8, 0.0),
        (1.0, 2.0, -2.0, -2.0),
        (5.0, -1.0, 5.0, 1.0),
    ],
)
def test_clipped_loss_and_slope_match_values_computed_by_hand(ratio, advantage, loss, slope):
    assert policy_loss(ratio, advantage) == pytest.approx((loss, slope))


def test_policy_metrics_are_sums_over_tokens():
    logps = tensor([np.log(1.5), np.log(0.5), np.log(1.1), np.log(9.0)])
    advantages, is_token = tensor([1.0, -1.0, 1.0, 1.0]), mask((1, 1, 1, 0))
    _, got = compute_policy_loss(logps, torch.zeros_like(logps), advantages, is_token, PolicyObjective(), normaliser=3)
    assert [int(got[name]) for name in ("clipfrac_high", "clipfrac_low", "clipfrac")] == [1, 1, 2]
    ratios = np.array([1.5, 0.5, 1.1])
    assert got["approx_kl"].item() == pytest.approx((ratios - 1 - np.log(ratios)).sum())
    assert got["ratio_max"].item() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [4 / 3, 2.0, 0.25]),
        ({"clip_max": 4.0, "clip_min": 0.5}, [4 / 3, 3.0, 0.5]),
        ({"clip_max": None}, [4 / 3, 3.0, 0.25]),
        ({"mode": "token_mask", "clip_min": 0.5}, [4 / 3, 0.0, 0.0]),
        # The ratio of the whole answer is 1.
        ({"mode": "sequence_truncate"}, [1.0, 1.0, 1.0]),
        ({"mode": "sequence_truncate", "clip_max": 0.5}, [0.5, 0.5, 0.5]),
        ({"mode": "sequence_mask"}, [1.0, 1.0, 1.0]),
        ({"mode": "sequence_mask", "clip_max": 0.5}, [0.0, 0.0, 0.0]),
        ({"correction": False}, [1.0, 1.0, 1.0]),
    ],
)
def test_importance_weights_are_bounded_and_detached(keys, expected):
    objective = PolicyObjective(**{f"vllm_importance_sampling_{name}": value for name, value in keys.items()})
    logps = tensor([*np.log([4 / 3, 3.0, 0.25]), 5.0], [9.0] * 4).requires_grad_()
    weights = compute_importance_weights(logps, torch.zeros_like(logps), mask((1, 1, 1, 0), (1, 1, 1, 1)), objective)
    # The other answer of the batch does not change them.
    torch.testing.assert_close(weights[:1], tensor([*expected, 0.0]), rtol=0, atol=1e-9)
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("value", "old", "target", "loss"), [(1.0, 0.5, 0.9, 0.02), (0.6, 0.5, 0.9, 0.045), (0.2, 0.5, 0.4, 0.02)]
)
def test_clipped_value_loss_matches_values_computed_by_hand(value, old, target, loss):
    loss_, got = compute_value_loss(
        tensor([value]), tensor([old]), tensor([target]), mask((1,)), cliprange=0.2, num_tokens=1
    )
    assert loss_.item() == pytest.approx(loss)
    assert got["clipfrac"] == (value == 1.0)
    free, _ = compute_value_loss(
        tensor([value]), tensor([old]), tensor([target]), mask((1,)), cliprange=None, num_tokens=1
    )
    assert free.item() == pytest.approx(0.5 * (value - target) ** 2)


def test_loss_is_token_mean_independent_of_micro_batches():
    """Rows (4) and (1, 1, 1): the mean over tokens is 1.75, over rows 2.5."""
    advantages, is_token = tensor([-4.0, 9.0, 9.0], [-1.0, -1.0, -1.0]), mask((1, 0, 0), (1, 1, 1))
    zeros = torch.zeros_like(advantages)

    def loss(rows: slice) -> float:
        part, _ = compute_policy_loss(
            zeros[rows], zeros[rows], advantages[rows], is_token[rows], PolicyObjective(), normaliser=4
        )
        return part.item()

    assert loss(slice(0, 2)) == 1.75
    assert loss(slice(0, 1)) + loss(slice(1, 2)) == 1.75


@pytest.fixture(scope="module")
def upstream(policy_dir, tmp_path_factory):
    """TRL's GRPO and RLOO trainers, on a CPU in float32."""

    def build(trainer, arguments):
        args = arguments(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            report_to=[],
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=MAX_LENGTH,
        )
        return trainer(
            model=AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32),
            args=args,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=AutoTokenizer.from_pretrained(policy_dir),
        )

    return {"grpo": build(trl.GRPOTrainer, trl.GRPOConfig), "rloo": build(trl.RLOOTrainer, trl.RLOOConfig)}


def test_objective_has_names_and_defaults_of_grpo_keys():
    theirs = {name: key.default for name, key in load_table("grpo").keys.items()}
    assert all(theirs[field.name] == field.default for field in dataclasses.fields(PolicyObjective))


MAX_LENGTH, PROMPT = 9, 3
CLIPPED = ("grpo", "dr_grpo", "bnpo", "dapo", "luspo")
OPTIONS = [
    {},
    {"epsilon_high": 0.4},
    {"delta": 1.3},
    {"delta": 1.1},
    {"beta": 0.3},
    {"beta": 0.3, "use_bias_correction_kl": False},
    {"off_policy_mask_threshold": 0.02},
    {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02, "beta": 0.3},
]
CASES = [
    *({"loss_type": loss_type, **options} for loss_type in CLIPPED for options in OPTIONS),
    *({"loss_type": "cispo", "epsilon_high": 1.1} | more for more in ({}, {"beta": 0.3})),
    *({"loss_type": "sapo"} | more for more in ({}, {"sapo_temperature_pos": 2.0, "beta": 0.3})),
    *({"loss_type": "vespo"} | more for more in ({}, {"vespo_k_neg": 1.0, "vespo_lambda_pos": 2.0, "beta": 0.3})),
    {"loss_type": "dapo", "vllm_importance_sampling_mode": "sequence_truncate"},
]


def build_batch(trainer, seed=0):
    """Answers of four lengths, log-probabilities close to the policy's, advantages of both signs."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 20, (4, PROMPT + MAX_LENGTH), generator=random)
    is_token = torch.arange(MAX_LENGTH)[None] < torch.tensor([9, 1, 4, 6])[:, None]
    attention = torch.cat([torch.ones(4, PROMPT, dtype=torch.bool), is_token], dim=1)
    with torch.no_grad():
        now = read_logps(trainer.model, ids, attention)
    old, ref = (now + scale * torch.randn(now.shape, generator=random) for scale in (0.3, 0.5))
    # One token with a ratio of exactly 1.
    old[3, 0] = now[3, 0]
    return ids, is_token, attention, old, ref, torch.tensor([1.2, -0.7, -1.5, 0.4])


def read_logps(model, ids, attention):
    logits = model(input_ids=ids, attention_mask=attention.long(), use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(2, ids[:, PROMPT:, None]).squeeze(2)


def differentiate(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def assert_matches_trl(trainer, inputs, objective, normaliser, **options):
    """Compare loss and gradients with those of a TRL trainer."""
    ids, is_token, attention, old, ref, advantages = build_batch(trainer)
    trainer.model.train()
    batch = {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": attention[:, :PROMPT].long(),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": is_token.long(),
        "advantages": advantages,
        "ref_per_token_logps": ref,
        **inputs,
    }
    expected = trainer._compute_loss(trainer.model, batch)
    expected_gradient = differentiate(trainer.model, expected)
    logps = read_logps(trainer.model, ids, attention)
    loss, _ = compute_policy_loss(
        logps, old, advantages[:, None], is_token, objective, normaliser=normaliser, ref_logps=ref, **options
    )
    gradient = differentiate(trainer.model, loss)
    assert expected_gradient.abs().max() > 1e-3
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_objective_matches_trl_grpo(upstream, monkeypatch, options, is_weighted):
    trainer, objective = upstream["grpo"], PolicyObjective(**options)
    for name in ("loss_type", "beta", "importance_sampling_level", "off_policy_mask_threshold"):
        monkeypatch.setattr(trainer, name, getattr(objective, name))
    monkeypatch.setattr(trainer, "epsilon_low", objective.epsilon)
    monkeypatch.setattr(trainer, "epsilon_high", objective.epsilon_high or objective.epsilon)
    for field in dataclasses.fields(objective):
        monkeypatch.setattr(trainer.args, field.name, getattr(objective, field.name))
    # TRL has engine log-probabilities only with vLLM.
    monkeypatch.setattr(trainer, "use_vllm", is_weighted)
    monkeypatch.setattr(trainer, "current_gradient_accumulation_steps", 1, raising=False)
    monkeypatch.setattr(trainer.args, "steps_per_generation", 2)
    _, is_token, _, old, _, advantages = build_batch(trainer)
    num_generation_tokens = 50
    # Of the two negative advantages, the engine probability is above the policy's for one, and below for the other.
    engine = old + torch.where(advantages == advantages.min(), 1.0, -1.0)[:, None]
    engine += torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    gap = torch.where(is_token, old - engine, 0.0)
    if objective.vllm_importance_sampling_mode == "sequence_truncate":
        gap = gap.sum(dim=1, keepdim=True)
    # As in TRL: (B, T) with 1 at padding, or (B, 1).
    ratio = gap.exp().clamp(max=2.0)
    inputs = {
        "old_per_token_logps": old,
        "num_items_in_batch": torch.tensor(float(num_generation_tokens)),
        **({"importance_sampling_ratio": ratio, "sampling_per_token_logps": engine} if is_weighted else {}),
    }
    counts = {"num_answers": 4, "num_tokens": int(is_token.sum()), "mean_tokens": num_generation_tokens / 2}
    normaliser = compute_normaliser(objective.loss_type, **counts, max_length=MAX_LENGTH)
    weighting = {"engine_logps": engine} if is_weighted else {}
    assert_matches_trl(trainer, inputs, objective, normaliser, **weighting)


@pytest.mark.parametrize("options", [{"epsilon": 0.2}, {"epsilon": 0.02, "epsilon_high": 0.5}])
def test_answer_level_ratio_matches_trl_rloo(upstream, monkeypatch, options):
    trainer = upstream["rloo"]
    objective = PolicyObjective("grpo", "answer", **options)
    monkeypatch.setattr(trainer, "epsilon_low", objective.epsilon)
    monkeypatch.setattr(trainer, "epsilon_high", objective.epsilon_high or objective.epsilon)
    _, is_token, _, old, _, _ = build_batch(trainer)
    assert_matches_trl(trainer, {"old_logps": (old * is_token).sum(1)}, objective, 4)


def test_kl_ref_metric_is_sum_of_k3(upstream):
    trainer, objective = upstream["grpo"], PolicyObjective(beta=0.1, use_bias_correction_kl=False)
    ids, is_token, attention, old, ref, advantages = build_batch(trainer)
    logps = read_logps(trainer.model, ids, attention).detach()
    _, got = compute_policy_loss(logps, old, advantages[:, None], is_token, objective, normaliser=1, ref_logps=ref)
    k3 = ((ref - logps).exp() - (ref - logps) - 1)[is_token]
    assert got["kl_ref"].item() == pytest.approx(k3.sum().item(), rel=1e-4)


REWARDS, VALUES, ALL = tensor([0.0, 0.0, 1.0]), tensor([0.5, 0.6, 0.7]), mask((1, 1, 1))


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages", "returns"),
    [
        (1.0, 0.95, (0.46575, 0.385, 0.3), (0.96575, 0.985, 1.0)),
        (1.0, 1.0, (0.5, 0.4, 0.3), (1.0, 1.0, 1.0)),
        (1.0, 0.0, (0.1, 0.1, 0.3), (0.6, 0.7, 1.0)),
        (0.9, 0.8, (0.21712, 0.246, 0.3), (0.71712, 0.846, 1.0)),
    ],
)
def test_gae_matches_values_computed_by_hand(gamma, lam, advantages, returns):
    got = compute_advantages(REWARDS, VALUES, ALL, gamma=gamma, lam=lam)
    torch.testing.assert_close(got[0], tensor(advantages), rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1], tensor(returns), rtol=0, atol=1e-12)


def test_score_is_added_at_last_token():
    rewards = compute_rewards(tensor([2.0, 3.0])[0], tensor([0.0] * 3, [0.0] * 3), mask((1, 1, 0), (1, 1, 1)), 0.1)
    assert rewards.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 3.0]]


def test_gae_skips_padding_and_masked_gaps():
    expected, _ = compute_advantages(REWARDS, VALUES, ALL, gamma=0.9, lam=0.8)
    padded, returns = compute_advantages(
        tensor([0.0, 0.0, 1.0, 9.0, 9.0]), tensor([0.5, 0.6, 0.7, 5.0, 5.0]), mask((1, 1, 1, 0, 0)), gamma=0.9, lam=0.8
    )
    assert torch.equal(padded[:, :3], expected)
    assert not padded[:, 3:].any()
    assert not returns[:, 3:].any()
    gap, _ = compute_advantages(
        tensor([0.0, 0.0, 9.0, 1.0]), tensor([0.5, 0.6, 5.0, 0.7]), mask((1, 1, 0, 1)), gamma=0.9, lam=0.8
    )
    assert torch.equal(gap[:, [0, 1, 3]], expected)


def test_rewards_sum_to_score_minus_kl_penalty():
    random = np.random.default_rng(1)
    kl, scores = random.normal(size=(3, 5)), random.normal(size=3)
    lengths = np.array([5, 1, 3])
    is_token = np.arange(5)[None] < lengths[:, None]
    rewards = compute_rewards(torch.from_numpy(scores), torch.from_numpy(kl), torch.from_numpy(is_token), 0.3)
    np.testing.assert_allclose(rewards.sum(1).numpy(), scores - 0.3 * (kl * is_token).sum(1), atol=1e-12)
    assert not rewards[~torch.from_numpy(is_token)].any()


def test_whiten_uses_biased_variance_and_ignores_padding():
    white = whiten(tensor([1.0, 2.0, 3.0, 100.0]), mask((1, 1, 1, 0)))
    torch.testing.assert_close(white, tensor([-1.2247449, 0.0, 1.2247449, 0.0]), rtol=0, atol=1e-7)
    rows = whiten(tensor([1.0, 2.0], [3.0, 100.0]), mask((1, 1), (1, 0)))
    torch.testing.assert_close(rows, tensor([-1.2247449, 0.0], [1.2247449, 0.0]), rtol=0, atol=1e-7)
    kept = whiten(tensor([1.0, 2.0, 3.0]), ALL, shift_mean=False)
    torch.testing.assert_close(kept, tensor([0.7752551, 2.0, 3.2247449]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0]])
def test_whiten_maps_constant_values_to_zero(values):
    assert not whiten(tensor(values), torch.ones(1, len(values), dtype=torch.bool)).any()


@pytest.mark.parametrize(("kl", "expected"), [(12.0, 0.150768), (6.0, 0.15), (3.0, 0.149232), (6.6, 0.150384)])
def test_kl_coef_adapts_to_target_with_clipped_error(kl, expected):
    adaptive, fixed = (PPOConfig(kl_target_per_sequence=target, kl_horizon=10_000) for target in (6.0, None))
    assert adapt_kl_coef(0.15, kl, 256, adaptive) == pytest.approx(expected, abs=1e-9)
    assert adapt_kl_coef(0.15, kl, 256, fixed) == 0.15


@pytest.mark.parametrize(("kl", "expected"), [(0.0, 0.12), (60.0, 0.18)])
def test_kl_coef_stays_positive_with_more_answers_than_horizon(kl, expected):
    """With 8 times the horizon and without the bound, the first would be -0.09."""
    config = PPOConfig(kl_target_per_sequence=6.0, kl_horizon=128)
    assert adapt_kl_coef(0.15, kl, 1024, config) == pytest.approx(expected)


P, Q = tensor([0.5, 0.3, 0.2])[0], tensor([0.2, 0.5, 0.3])[0]


def test_only_k1_as_reward_has_the_gradient_of_kl():
    """As a reward, an estimator's gradient is sum_a p(a) grad log p(a) k(a); only k1's is that of KL(p || q)."""
    k1 = estimate_kl(P.log(), Q.log())
    torch.testing.assert_close(k1, tensor([0.916291, -0.510826, -0.405465])[0], rtol=0, atol=1e-6)
    assert (P * k1).sum().item() == pytest.approx(0.223805, abs=1e-6)

    logits = P.log().requires_grad_()
    p = logits.softmax(0)
    (p * (p / Q).log()).sum().backward()
    expected = torch.tensor([0.346243, -0.220389, -0.125854], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-6)

    def gradient_as_reward(k: torch.Tensor) -> torch.Tensor:
        logits = P.log().requires_grad_()
        (P * logits.log_softmax(0) * k).sum().backward()
        assert logits.grad is not None
        return logits.grad

    k2, k3 = k1**2 / 2, Q / P - 1 + k1
    torch.testing.assert_close(gradient_as_reward(k1), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient_as_reward(k3), expected + Q - P, rtol=0, atol=1e-6)
    wrong = torch.tensor([0.077158, -0.040502, -0.036656], dtype=torch.float64)
    torch.testing.assert_close(gradient_as_reward(k2), wrong, rtol=0, atol=1e-6)


def test_missing_end_penalty_applies_to_truncated_answers():
    assert penalise_missing_end(tensor([1.0, 1.0])[0], mask((1, 0))[0], 0.75).tolist() == [1.0, 0.25]


GROUP, NUM_ANSWERS = 4, 16
# Groups without any reward, with a single reward, with equal rewards, and with a missing reward.
KNOWN = [None] * 4 + [None, None, 0.5, None] + [2.0] * 4 + [1.0, None, -3.0, 0.25]


def compute_by_trl(monkeypatch, policy_dir, tmp_path, trainer, arguments, **keys):
    """Return the advantages that TRL's trainer computes from ``KNOWN``."""
    taken = []
    module = f"trl.trainer.{'grpo' if trainer is trl.GRPOTrainer else 'rloo'}_trainer"
    monkeypatch.setattr(f"{module}.shuffle_sequence_dict", lambda batch: batch)
    compute = trainer._compute_loss

    def record(self, model, inputs):
        taken.append(inputs["advantages"])
        return compute(self, model, inputs)

    monkeypatch.setattr(trainer, "_compute_loss", record)
    args = arguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        num_generations=GROUP,
        per_device_train_batch_size=NUM_ANSWERS,
        max_completion_length=2,
        max_steps=1,
        **{"beta": 0.0, **keys},
    )
    trainer(
        model=AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32),
        args=args,
        reward_funcs=lambda completions, **_: KNOWN,
        train_dataset=Dataset.from_dict({"prompt": ["w1", "w2", "w3", "w4"]}),
        processing_class=AutoTokenizer.from_pretrained(policy_dir),
    ).train()
    return torch.cat(taken)


def known_rewards():
    return torch.tensor([np.nan if reward is None else reward for reward in KNOWN])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_match_trl_grpo(monkeypatch, policy_dir, tmp_path, scale):
    expected = compute_by_trl(monkeypatch, policy_dir, tmp_path, trl.GRPOTrainer, trl.GRPOConfig, scale_rewards=scale)
    got = compute_group_advantages(known_rewards(), GROUP, scale=scale)
    assert got.abs().max() > 0.5
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_no_advantage_whatever_their_size(scale):
    """Their mean is rounded: divided by a deviation of rounding errors, it would be an advantage near 1."""
    flat = torch.full((3, 12), 12345.6)
    flat[1], flat[2, 5] = 0.7, torch.nan
    got = compute_group_advantages(torch.cat([flat, torch.arange(12.0)[None]]).flatten(), 12, scale=scale)
    assert got[:36].abs().max() == 0
    assert got[36:].abs().max() > 1e-4


def test_normalised_advantages_of_equal_rewards_are_zero():
    flat = torch.tensor([1000.1] * 8 + [733.3] * 8)
    assert compute_leave_one_out_advantages(flat, 8, normalize=True).abs().max() == 0


@pytest.mark.parametrize("normalize", [False, True])
def test_leave_one_out_advantages_match_trl_rloo(monkeypatch, policy_dir, tmp_path, normalize):
    keys = {"normalize_advantages": normalize}
    expected = compute_by_trl(monkeypatch, policy_dir, tmp_path, trl.RLOOTrainer, trl.RLOOConfig, **keys)
    got = compute_leave_one_out_advantages(known_rewards(), GROUP, normalize=normalize)
    assert got.abs().max() > 0.5
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_ppo_targets_match_definition_in_numpy():
    """Advantages are whitened, returns are not; the total has penalty and KL."""
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
    np.testing.assert_allclose(targets.rollout.returns, (advantages + rollout.values.numpy()) * mask, atol=1e-6)
    kept = advantages[mask]
    np.testing.assert_allclose(targets.rollout.advantages[rollout.mask], (kept - kept.mean()) / kept.std(), atol=1e-5)


def test_whiten_rewards_keeps_mean_of_rewards():
    """Rewards are scaled around their mean, which is part of the objective."""
    rollout = build_rollout([(3, 4), (2, 1), (2, 3)])
    plain, whitened = (
        compute_targets(rollout, PPOConfig(gamma=1.0, lam=1.0, whiten_rewards=whiten), 0.5, 0.1)
        for whiten in (False, True)
    )
    # With gamma = lam = 1, the difference of consecutive returns is the reward of a token.
    after = torch.nn.functional.pad(plain.rollout.returns, (0, 1))[:, 1:]
    rewards = (plain.rollout.returns - after)[rollout.mask].double().numpy()
    white = (rewards - rewards.mean()) / rewards.std() + rewards.mean()
    expected = np.zeros(rollout.mask.shape)
    expected[rollout.mask.numpy()] = white
    # A return is the sum of rewards from its token to the end.
    expected = expected[:, ::-1].cumsum(1)[:, ::-1] * rollout.mask.numpy()
    assert abs(rewards.mean()) > 0.1
    np.testing.assert_allclose(whitened.rollout.returns, expected, atol=1e-5)
    assert torch.equal(whitened.total, plain.total)


@pytest.mark.parametrize("whiten_rewards", [False, True])
def test_unscored_answers_do_not_change_targets_of_others(whiten_rewards):
    rollout, config = build_rollout([(3, 4), (2, 5), (2, 3), (4, 2)]), PPOConfig(whiten_rewards=whiten_rewards)
    scored = torch.tensor([True, False, True, True])
    among = compute_targets(dataclasses.replace(rollout, scored=scored), config, 0.5, 0.1)
    alone = compute_targets(rollout.take([0, 2, 3]), config, 0.5, 0.1)
    torch.testing.assert_close(among.rollout.advantages[scored, :4], alone.rollout.advantages)
    torch.testing.assert_close(among.rollout.returns[scored, :4], alone.rollout.returns)
    torch.testing.assert_close(among.total[scored], alone.total)
    assert not among.rollout.advantages[~scored].any()

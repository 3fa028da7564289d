"""Updater: independence of micro-batches, step counts, early stopping by KL, and guards before updates."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.rl import keys_task
from tests.rl.test_rollout import build_rollout
from transformers import Trainer, TrainingArguments

from recipes_lib.config.loader import load_config
from recipes_lib.config.table import load_table
from recipes_lib.errors import DivergedError
from recipes_lib.rl import update
from recipes_lib.rl.methods import PPOMethod
from recipes_lib.rl.objectives import PolicyObjective, compute_policy_loss
from recipes_lib.rl.rollout import Sequences, compute_response_logps, compute_response_values
from recipes_lib.rl.update import Learner, UpdateGuard, Updater
from recipes_lib.training.monitoring.progress import TrainingProgress

CPU = torch.device("cpu")
LENGTHS = [(3, 5), (7, 1), (1, 4), (4, 2), (2, 8), (3, 3), (5, 6), (2, 1)]
ONE_STEP = {"num_ppo_epochs": 1, "num_mini_batches": 1, "target_kl": "null"}


@pytest.fixture
def build(policy_dir, prompts_file, tmp_path):
    """Build an updater, and a rollout with log-probabilities and values of its models."""

    def build_updater(ppo, batch_size=8, **keys):
        keys = {"max_steps": 8, "per_device_train_batch_size": 8 // ppo["num_mini_batches"], "seed": 0, **ppo, **keys}
        config = load_config("ppo", keys_task.build_flags(policy_dir, tmp_path, prompts_file, **keys))
        _, args, _, models = keys_task.load(config)
        args.per_device_train_batch_size = batch_size
        method = PPOMethod(config, 8, 1)
        options = {"learning_rate": 1e-3, "args": args, "schedule": method.schedule}
        trunk = models.policy if models.is_shared else models.critic
        learners = {
            "policy": Learner("policy", models.policy, models.policy_parameters(), **options),
            "critic": Learner("critic", trunk, models.critic_parameters(), **options),
        }
        guard, progress = UpdateGuard(tmp_path, lambda number: number), TrainingProgress()
        updater = Updater(models, learners, method, config, args, contextlib.nullcontext, guard, progress)
        rollout = build_rollout(LENGTHS)
        rollout = dataclasses.replace(rollout, response_ids=rollout.response_ids % keys_task.VOCABULARY)
        for prompt in rollout.prompts:
            prompt.input_ids[:] = [index % keys_task.VOCABULARY for index in prompt.input_ids]
        with torch.no_grad():
            with models.using("policy") as model:
                logps, _ = compute_response_logps(model, Sequences(rollout, CPU), temperature=1.0)
            with models.using("critic") as model:
                values = compute_response_values(model, Sequences(rollout, CPU))
        return updater, dataclasses.replace(rollout, logps=logps, engine_logps=logps, values=values)

    return build_updater


def capture_gradients(monkeypatch):
    """Replace optimizer steps: gradients are stored in the returned mapping by learner, without an update."""
    gradients = {}

    def capture(learner, check):
        gradients[learner.name] = [p.grad.clone() for p in learner.parameters.values()]
        learner.discard()
        return 0.0

    monkeypatch.setattr(Learner, "step", capture)
    return gradients


@contextlib.contextmanager
def raising_before_update(learner, words):
    """Expect the end of a run whose weights are as before."""
    before = [p.clone() for p in learner.parameters.values()]
    with pytest.raises(DivergedError, match=words):
        yield
    assert all(torch.equal(one, p) for one, p in zip(before, learner.parameters.values(), strict=True))


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_importance_weight_uses_sampling_policy_not_current_policy(build, monkeypatch, factor):
    """An engine that agrees with the sampling policy gives weight 1, however far the current policy has moved."""
    monkeypatch.setattr(update, "verify_first_minibatch", lambda *_: None)
    updater, rollout = build(ONE_STEP)
    capture_gradients(monkeypatch)
    now, old, mask = rollout.logps, rollout.logps - 0.1 * rollout.mask, rollout.loss_mask
    engine = old - math.log(factor) * mask
    (figures,) = updater.update_policy(dataclasses.replace(rollout, logps=old, engine_logps=engine), 0)
    unweighted, _ = compute_policy_loss(
        now,
        old,
        rollout.advantages,
        mask,
        PolicyObjective(epsilon=updater.config.ppo.cliprange),
        normaliser=rollout.num_targets,
    )
    assert figures["loss"] == pytest.approx(factor * unweighted.item(), rel=1e-4, abs=1e-6)
    # k3 per token for a log-ratio of 0.1.
    assert figures["approx_kl"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-3)


@pytest.mark.parametrize(("dtype", "is_rounding"), [("float32", False), ("bfloat16", True)])
def test_first_ratio_may_differ_from_one_by_rounding_of_weights(build, dtype, is_rounding):
    """Products of bfloat16 weights are in bfloat16, also without autocast."""
    updater, rollout = build(ONE_STEP, dtype=dtype, bf16="false")
    moved = dataclasses.replace(rollout, logps=rollout.logps + 0.02 * rollout.mask)
    with contextlib.nullcontext() if is_rounding else pytest.raises(DivergedError, match="before the first update"):
        updater.update_policy(moved, 0)


@pytest.mark.parametrize("keys", [{}, {"use_peft": True}])
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_micro_batch_size_does_not_change_gradients(build, monkeypatch, batch_size, keys):
    found = []
    for size in (8, batch_size):
        updater, rollout = build(ONE_STEP, batch_size=size, **keys)
        gradients = capture_gradients(monkeypatch)
        figures = [updater.update_policy(rollout, 0)[0], updater.update_critic(rollout, 0)[0]]
        found.append((gradients, figures))
    for name in ("policy", "critic"):
        for one, other in zip(found[0][0][name], found[1][0][name], strict=True):
            # Summed in another order; entries near 0 are sums of terms up to about 1.
            torch.testing.assert_close(one, other, rtol=1e-4, atol=8 * torch.finfo(torch.float32).eps)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_unscored_answers_change_neither_gradients_nor_metrics(build, monkeypatch):
    kept, found = [0, 2, 3, 6], []
    for with_others in (True, False):
        updater, rollout = build(ONE_STEP, batch_size=3)
        scored = torch.tensor([row in kept for row in range(8)])
        rollout = dataclasses.replace(rollout, scored=scored) if with_others else rollout.take(kept)
        gradients = capture_gradients(monkeypatch)
        found.append((gradients, [updater.update_policy(rollout, 0)[0], updater.update_critic(rollout, 0)[0]]))
    for name in ("policy", "critic"):
        for among, alone in zip(found[0][0][name], found[1][0][name], strict=True):
            torch.testing.assert_close(among, alone, rtol=1e-4, atol=1e-6)
    for among, alone in zip(found[0][1], found[1][1], strict=True):
        assert among == pytest.approx(alone, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.filterwarnings("error:Detected call")
def test_minibatch_of_unscored_answers_is_a_step_without_update(build, number):
    updater, rollout = build({"num_ppo_epochs": 1, "num_mini_batches": 4, "target_kl": "null"})
    unscored = [*updater._minibatches(8, 0)][number]
    some = dataclasses.replace(rollout, scored=torch.tensor([row not in unscored for row in range(8)]))
    assert [len(updater.update_policy(some, 0)), len(updater.update_critic(some, 0))] == [3, 3]
    for learner in updater.learners.values():
        assert {int(state["step"]) for state in learner.optimizer.state.values()} == {3}
        assert learner.scheduler.last_epoch == 4


def test_first_ratio_is_exactly_one_in_batches_of_same_shape(build, monkeypatch):
    monkeypatch.setattr(update.Updater, "_share", lambda _, batch: iter([batch]))
    monkeypatch.setattr(update.Updater, "_minibatches", lambda *_: iter([range(8)]))
    updater, rollout = build(ONE_STEP)
    (figures,) = updater.update_policy(rollout, 0)
    assert (figures["ratio_max"], figures["approx_kl"]) == (1.0, 0.0)
    assert figures["clipfrac_low"] == figures["clipfrac_high"] == 0


def test_every_minibatch_of_every_epoch_updates_both_learners(build):
    ppo = {"num_ppo_epochs": 2, "num_mini_batches": 4, "target_kl": "null"}
    updater, rollout = build(ppo)
    steps = updater.update_policy(rollout, 0), updater.update_critic(rollout, 0)
    assert [len(one) for one in steps] == [8, 8]
    for learner in updater.learners.values():
        assert {int(state["step"]) for state in learner.optimizer.state.values()} == {8}
        assert learner.scheduler.last_epoch == 8
    assert steps[0][0]["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert steps[0][-1]["ratio_max"] > 1.001


@pytest.mark.parametrize("name", ["policy", "critic"])
@pytest.mark.parametrize(("num_steps", "warmup", "num_updates"), [(30, 1, 10), (6, 1, 2), (30, 15, 10)])
def test_updates_that_change_nothing_end_the_run(build, name, num_steps, warmup, num_updates):
    updater, rollout = build(ONE_STEP, max_steps=num_steps, warmup_steps=warmup, lr_scheduler_type="linear")
    learner = updater.learners[name]
    learner.optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.zero_grad())
    update_learner = getattr(updater, f"update_{name}")
    flat = dataclasses.replace(rollout, advantages=rollout.advantages * 0, returns=rollout.values)
    last = warmup + 2 + num_updates
    for iteration in range(last):
        # The updates of the warm-up may be rounded to 0, and in the next three steps there is no gradient.
        update_learner(flat if warmup <= iteration < warmup + 3 else rollout, iteration)
    with pytest.raises(DivergedError, match=f"{num_updates} updates of the {name} changed none of"):
        update_learner(rollout, last)


@pytest.mark.parametrize("kind", load_table("grpo").keys["lr_scheduler_type"].schema["enum"])
def test_learning_rates_are_those_of_transformers_trainer(kind, tmp_path):
    options = {"warmup_stable_decay": {"num_decay_steps": 4}} | {
        name: {"min_lr": 1e-4} for name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
    }
    schedule = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options.get(kind), "warmup_steps": 3}
    args = TrainingArguments(tmp_path, learning_rate=1e-3, max_steps=12, report_to="none", **schedule)
    model = torch.nn.Linear(2, 2)
    theirs = Trainer(model, args)
    theirs.create_optimizer_and_scheduler(args.max_steps)
    steps = SimpleNamespace(num_steps=12, num_idle_steps=0, num_warmup_steps=0 if kind == "constant" else 3)
    ours = Learner("policy", model, dict(model.named_parameters()), learning_rate=1e-3, args=args, schedule=steps)
    for _ in range(args.max_steps):
        assert ours.learning_rate == theirs.lr_scheduler.get_last_lr()[0]
        for scheduler in (ours.scheduler, theirs.lr_scheduler):
            scheduler.optimizer.step()
            scheduler.step()


def test_weight_decay_excludes_vectors(build):
    updater, _ = build(ONE_STEP, weight_decay=0.1)
    for learner in updater.learners.values():
        decays = {id(p): group["weight_decay"] for group in learner.optimizer.param_groups for p in group["params"]}
        expected = {name: 0.1 if p.ndim > 1 else 0.0 for name, p in learner.parameters.items()}
        assert {name: decays[id(p)] for name, p in learner.parameters.items()} == expected
        assert {*expected.values()} == {0.0, 0.1}


def test_minibatches_are_a_new_permutation_in_every_epoch(build):
    ppo = {"num_ppo_epochs": 2, "num_mini_batches": 4}
    updater, _ = build(ppo)
    batches = list(updater._minibatches(8, 0))
    epochs = [[row for batch in batches[start : start + 4] for row in batch] for start in (0, 4)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 2
    assert epochs[0] != epochs[1]
    assert list(updater._minibatches(8, 0)) == batches
    assert list(updater._minibatches(8, 1)) != batches


def test_minibatch_is_partitioned_over_processes(build):
    updater, rollout = build(ONE_STEP, batch_size=3)
    places = [SimpleNamespace(process_index=rank, world_size=2, per_device_train_batch_size=3) for rank in (0, 1)]
    shares = [list(dataclasses.replace(updater, args=args)._share(rollout)) for args in places]
    assert [[len(part) for part in share] for share in shares] == [[3, 1], [3, 1]]
    assigned = [id(prompt) for share in shares for part in share for prompt in part.prompts]
    assert sorted(assigned) == sorted(id(prompt) for prompt in rollout.prompts)


def test_target_kl_ends_policy_updates_and_keeps_schedule(build):
    ppo = {"num_ppo_epochs": 4, "num_mini_batches": 2, "target_kl": 1e-6}
    updater, rollout = build(ppo)
    steps = updater.update_policy(rollout, 0)
    assert 1 < len(steps) < 8
    assert "grad_norm" not in steps[-1]
    assert all(step["approx_kl"] <= 1.5e-6 for step in steps[:-1])
    assert steps[-1]["approx_kl"] > 1.5e-6
    assert {int(state["step"]) for state in updater.learners["policy"].optimizer.state.values()} == {len(steps) - 1}
    # The schedule also counts the skipped steps.
    assert updater.learners["policy"].scheduler.last_epoch == 8
    assert len(updater.update_critic(rollout, 0)) == 8


@pytest.mark.parametrize(("multiple", "num_updates"), [(1.4, 2), (1.6, 1)])
def test_target_kl_threshold_is_one_and_a_half_times_target(build, multiple, num_updates):
    """The KL divergence of the second minibatch is ``multiple`` times the target."""
    ppo = {"num_ppo_epochs": 1, "num_mini_batches": 2, "target_kl": "null"}
    updater, rollout = build(ppo)
    _, second = updater.update_policy(rollout, 0)
    updater, rollout = build(ppo | {"target_kl": second["approx_kl"] / multiple})
    assert sum("grad_norm" in step for step in updater.update_policy(rollout, 0)) == num_updates


def test_other_policy_than_sampled_raises_before_update(build):
    updater, rollout = build(ONE_STEP)
    wrong = dataclasses.replace(rollout, logps=rollout.logps - 0.1 * rollout.mask)
    with raising_before_update(updater.learners["policy"], "before the first update"):
        updater.update_policy(wrong, 0)


@pytest.mark.parametrize("max_norm", [0.1, 0.0])
def test_gradients_are_clipped_to_max_grad_norm_unless_it_is_0(build, max_norm):
    updater, rollout = build(ONE_STEP, max_grad_norm=max_norm)
    learner, norms = updater.learners["critic"], []
    learner.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.nn.utils.get_total_norm([p.grad for p in learner.parameters.values()]))
    )
    (step,) = updater.update_critic(rollout, 0)
    assert step["grad_norm"] > 0.1
    assert float(norms[0]) == pytest.approx(max_norm or step["grad_norm"], rel=1e-3)


def test_non_finite_gradient_raises_before_update(build, tmp_path):
    updater, rollout = build(ONE_STEP)
    assert rollout.returns is not None
    critic = updater.learners["critic"]
    next(iter(critic.parameters.values())).register_hook(lambda grad: grad * float("nan"))
    with raising_before_update(critic, "step 3 was stopped before its update of the critic: on rank 0 the grad"):
        updater.update_critic(rollout, 2)
    facts = json.loads((tmp_path / "diverged" / "step-3" / "rank-0.json").read_text())
    # Checked before clipping, which would make all gradients non-finite.
    assert len(facts["non_finite_gradients"]) == 1
    assert sorted(facts["row_ids"][0]) == list(range(8))


def test_non_finite_loss_raises_with_dump_of_its_answers(build, tmp_path):
    updater, rollout = build(ONE_STEP, batch_size=2)
    advantages = rollout.advantages.clone()
    advantages[3, 0] = float("inf")
    words = r"before its update of the policy: the loss of micro-batch \d of rank 0 is "
    with raising_before_update(updater.learners["policy"], words):
        updater.update_policy(dataclasses.replace(rollout, advantages=advantages), 0)
    folder = tmp_path / "diverged" / "step-1"
    facts = json.loads((folder / "rank-0.json").read_text())
    (bad,) = facts["bad_micro_batches"]
    assert 3 in facts["row_ids"][bad]
    tensors = load_file(folder / "rank-0.safetensors")
    at = facts["row_ids"][bad].index(3)
    prompt, length = rollout.prompts[3].input_ids, int(rollout.lengths[3])
    read = tensors[f"micro_batch_{bad + 1}.input_ids"][at, : len(prompt) + length].tolist()
    assert read == [*prompt, *rollout.response_ids[3, :length].tolist()]
    assert torch.isinf(tensors[f"micro_batch_{bad + 1}.advantages"][at, 0])

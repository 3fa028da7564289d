"""PPO updates: shuffled minibatches, gradient accumulation, non-finite guard, on any number of ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, distributed, nn
from transformers import Trainer, TrainingArguments, get_scheduler

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import DivergedError
from recipes_lib.models.adapters.roles import Role
from recipes_lib.planning.schedule import verify_schedule
from recipes_lib.quantities import pluralize
from recipes_lib.rl.methods import Method
from recipes_lib.rl.models import ActorCritic
from recipes_lib.rl.monitor import Figures, verify_first_minibatch
from recipes_lib.rl.objectives import RATIO_MAX, Terms, compute_normaliser, compute_policy_loss, compute_value_loss
from recipes_lib.rl.rollout import Rollout, Sequences, compute_response_logps, compute_response_values, send
from recipes_lib.rl.rollout_schedule import RolloutSchedule, Stream
from recipes_lib.training.checkpoints.model_layout import choose_learner_layout
from recipes_lib.training.collectives import get_world_size, is_any, sum_tensor
from recipes_lib.training.guards.start_checks import MAX_STEPS, UNCHANGED_REMEDY, list_changed, sample_weights
from recipes_lib.training.guards.step_facts import StepInputs, dump_and_raise
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.layouts.fsdp import clip_gradients, compute_total_norm
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.optim.optimizers import get_decay_names, group_by_decay
from recipes_lib.training.trainers.arguments import get_rounding_dtype

_SPOKEN: Final = {
    "scores": "rewards",
    "engine_logps": "log-probabilities of generation",
    "logps": "log-probabilities of the policy",
    "ref_logps": "log-probabilities of the reference",
    "values": "values of the critic",
}


@dataclass(frozen=True, slots=True)
class UpdateGuard:
    """Stops all processes together on non-finite values, and writes a dump of the batch.

    Attributes:
        output_dir: Output directory of the run.
        find_prompt: Maps the number of an answer to the position of its prompt in the training set.

    Source: ``recipes_lib.training.guards.step_facts``, the guard of all recipes; ``tests/rl/test_guard.py``.
    """

    output_dir: Path
    find_prompt: Callable[[int], int]

    def check_rollout(self, rollout: Rollout, *, step: int) -> None:
        """Check all values of an iteration before its updates; every process must call, with the same rollout.

        Args:
            rollout: Answers of all processes, before advantages are computed.
            step: Number of the first optimizer step of the iteration, from 1.

        Raises:
            DivergedError: A value of an answer is not finite.
        """
        bad = {name: _find_bad_rows(getattr(rollout, name), rollout.mask) for name in _SPOKEN}
        name = next((name for name, rows in bad.items() if rows.any()), None)
        if name is None:
            return
        # Every rank has the same rollout, so all of them decide alike without a collective operation.
        rows = torch.stack(list(bad.values())).any(dim=0).nonzero().flatten().tolist()
        why = f"the {_SPOKEN[name]} of {int(bad[name].sum())} of {len(rollout)} answers are not finite"
        inputs = StepInputs(*self._describe([rollout.take(rows)]))
        dump_and_raise({}, inputs, output_dir=self.output_dir, step=step, facts={}, why=why)

    def check_step(
        self, learner: Learner, parts: Sequence[Rollout], losses: list[Tensor], *, step: int, loss: float, norm: float
    ) -> None:
        """Check an optimizer step after the reduction of its gradients, before they are clipped.

        Args:
            learner: Policy or critic, with its gradients.
            parts: Micro-batches of this process.
            losses: Loss of each of these micro-batches.
            step: Number of the step, from 1.
            loss: Loss over all processes.
            norm: Gradient norm over all processes.

        Raises:
            DivergedError: Loss or norm are not finite.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return
        inputs, name = StepInputs(*self._describe(parts), losses=losses), learner.name
        facts = {"learner": name, "loss": loss, "grad_norm": norm, "learning_rate": learner.learning_rate}
        dump_and_raise(learner.parameters, inputs, step=step, output_dir=self.output_dir, facts=facts, learner=name)

    def _describe(self, parts: Sequence[Rollout]) -> tuple[list[dict[str, Tensor]], list[list[int]]]:
        """Return all tensors of each micro-batch, its input ids among them, and the positions of its prompts."""
        cpu = torch.device("cpu")
        batches = [{"input_ids": Sequences(part, cpu).inputs["input_ids"], **dict(part.tensors())} for part in parts]
        return batches, [[self.find_prompt(number) for number in part.numbers.tolist()] for part in parts]


def _find_bad_rows(values: Tensor, mask: Tensor) -> Tensor:
    """Return the rows with a non-finite value, ``bool (B,)``; values outside the mask are ignored."""
    bad = ~torch.isfinite(values)
    return bad if bad.dim() == 1 else (bad & mask).any(dim=1)


EARLY_STOP_FACTOR: Final = 1.5
"""Multiple of ``target_kl`` above which the updates of an iteration end, as in Spinning Up."""


class Learner:
    """Parameters with their optimizer, schedule and gradient norm.

    Attributes:
        name: ``policy`` or ``critic``.
        parameters: Trained parameters by name.
        optimizer: transformers' optimizer for ``optim``.
        scheduler: Learning-rate schedule of the optimizer.
        layout: Layout of parameters, gradients and optimizer states over the processes.
    """

    def __init__(
        self,
        name: Role,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        learning_rate: float,
        args: TrainingArguments,
        schedule: RolloutSchedule,
    ) -> None:
        """Build the optimizer.

        Args:
            name: ``policy`` or ``critic``, for errors and dumps.
            model: Model of the parameters, from which follow those with weight decay.
            parameters: Trained parameters by name.
            learning_rate: Peak learning rate.
            args: Optimizer, weight decay, schedule and largest gradient norm.
            schedule: Steps of the run and of its warm-up.

        Raises:
            ConfigError: As ``verify_schedule``.
        """
        self.name = name
        self.parameters = parameters
        self.layout = choose_learner_layout(model)
        # Until an update has changed one: of 16-bit weights, all small updates are rounded to 0.
        self._initial = sample_weights(parameters)
        self._num_updates, self._num_warmup_steps = 0, schedule.num_warmup_steps
        self._max_norm = args.max_grad_norm
        groups = group_by_decay(parameters, set(get_decay_names(model, decay_embeddings=True)), args.weight_decay)
        schedule_options: Any = args.lr_scheduler_kwargs
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        self.optimizer: Any = kind(groups, **{**options, "lr": learning_rate})
        self._num_steps = num_steps = schedule.num_steps - (schedule.num_idle_steps if name == "policy" else 0)
        self.scheduler: Any = get_scheduler(
            args.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=schedule.num_warmup_steps,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=schedule_options,
        )
        verify_schedule(self.scheduler, num_steps)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.scheduler.get_last_lr()[0])

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's loss; ``step`` sums them over all processes."""
        # FSDP2 reduces gradients here, and divides them by the world size, which this factor cancels.
        (loss * get_world_size() if self.layout.is_shared else loss).backward()  # type: ignore[no-untyped-call]

    def step(self, check: Callable[..., None]) -> float:
        """Update with the gradients of all processes, and return their norm before clipping.

        Args:
            check: Called with the ``norm`` before the update; raises to prevent it.

        Raises:
            DivergedError: As ``_verify_changed``.
        """
        parameters = list(self.parameters.values())
        if get_world_size() > 1 and not self.layout.is_shared:
            _sum_gradients(parameters)
        total = compute_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norm = float(total)
        # Before clipping: a non-finite norm would make all gradients non-finite, and the dump could not name the cause.
        check(norm=norm)
        clip_gradients(parameters, self._max_norm or math.inf, total)
        self.optimizer.step()
        if self._initial and norm and self.scheduler.last_epoch >= self._num_warmup_steps:
            self._verify_changed()
        self.discard()
        return norm

    def _verify_changed(self) -> None:
        """Verify that the first updates with a gradient after the warm-up change a weight; every process must call.

        Raises:
            DivergedError: ``MAX_STEPS`` of them, or all of the run, have changed no sampled element on any process.
        """
        self._num_updates += 1
        if is_any(bool(list_changed(self._initial, self.parameters))):
            self._initial = {}
        elif self._num_updates == MAX_STEPS or self.scheduler.last_epoch + 1 == self._num_steps:
            made = f"{pluralize(self._num_updates, 'update')} of the {self.name} changed"
            raise DivergedError(f"{made} none of {len(self._initial)} trained tensors: {UNCHANGED_REMEDY}")

    def discard(self) -> None:
        """Clear the gradients, and advance the schedule, so that a skipped step also counts."""
        self.optimizer.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            # torch warns if the schedule advances before the first optimizer step, as a skipped first step does.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()


@dataclass(frozen=True, slots=True)
class Updater:
    """Makes the optimizer steps of an iteration.

    Every process has all answers, and computes its share of a minibatch in micro-batches of similar length. Gradients
    are summed over processes, and the normaliser is that of the whole step. Therefore world size, micro-batches and
    lengths do not change the result. Answers without a score contribute neither to gradients nor to metrics; a
    minibatch of only such answers is a step without an update.

    Attributes:
        models: Policy and critic.
        learners: Learners by name: ``policy`` and, if there is one, ``critic``.
        method: Schedule, policy objective and ``target_kl``.
        config: Clip range of the critic, ``response_length`` and temperature.
        args: Micro-batch size, rank and world size, device, precision, and the seed of the minibatches.
        precision: Builds the autocast context of forward passes.
        guard: Checks every step before its update.
        progress: Progress display of the terminal.
    """

    models: ActorCritic
    learners: Mapping[str, Learner]
    method: Method
    config: RecipeConfig
    args: TrainingArguments
    precision: Callable[[], Any]
    guard: UpdateGuard
    progress: TrainingProgress

    def update_policy(self, rollout: Rollout, iteration: int, *, with_entropy: bool = True) -> list[Figures]:
        """Update the policy, and return the metrics of each step.

        The step that exceeds ``target_kl`` has metrics but no update, and the later ones are skipped.

        Args:
            rollout: Answers of the iteration, of all processes, with advantages.
            iteration: Number of the iteration, from 0.
            with_entropy: Whether to compute the entropy, which takes memory for another chunk of logits.

        Raises:
            DivergedError: As ``UpdateGuard.check_step`` and ``verify_first_minibatch``.
        """
        compute = partial(self._compute_policy_loss, rollout, with_entropy)
        return self._update(self.learners["policy"], rollout, iteration, compute)

    def update_critic(self, rollout: Rollout, iteration: int) -> list[Figures]:
        """Update the critic, if there is one, and return the metrics of each step.

        Raises:
            DivergedError: As ``UpdateGuard.check_step``.
        """
        if "critic" not in self.learners:
            return []
        return self._update(self.learners["critic"], rollout, iteration, self._compute_value_loss)

    def _update(
        self,
        learner: Learner,
        rollout: Rollout,
        iteration: int,
        compute: Callable[[Any, Rollout, Rollout], tuple[Tensor, Terms]],
    ) -> list[Figures]:
        """Make the steps of an iteration.

        Args:
            learner: Policy or critic.
            rollout: Answers of the iteration.
            iteration: Number of the iteration, from 0.
            compute: Returns loss and metrics of a part, given the model, the minibatch and the part.
        """
        steps: list[Figures] = []
        is_over = False
        self.models.set_training(training=True)
        first, last = (self.method.schedule.count_steps(done) for done in (iteration, iteration + 1))
        minibatches = self._minibatches(len(rollout), iteration)
        drawn = self.progress.track(minibatches, f"updating the {learner.name}", last - first)
        with self.models.using(learner.name) as model:
            # The last iteration may end before its last minibatch.
            for step, rows in zip(range(first + 1, last + 1), drawn, strict=False):
                WATCHDOG.enter("a step")
                batch = rollout.take(rows)
                if is_over or not batch.num_targets:
                    # All ranks have the same rollout, so all of them skip the step; the schedule keeps its length.
                    learner.discard()
                    continue
                parts, terms = list(self._share(batch)), []
                for part in parts:
                    WATCHDOG.beat()
                    loss, sums = compute(model, batch, part)
                    learner.backward(loss)
                    terms.append({"loss": loss.detach(), **sums})
                figures = {**_reduce(terms, batch.num_targets), "lr": learner.learning_rate}
                # Only the policy's metrics have it. The guard below reports a non-finite loss, with a dump.
                kl = figures.get("approx_kl") if math.isfinite(figures["loss"]) else None
                if kl is not None and not steps:
                    verify_first_minibatch(kl, get_rounding_dtype(self.models.policy, self.args))
                target = self.method.target_kl
                # The metric is reduced over all processes, so that all of them decide alike.
                is_over = kl is not None and target is not None and kl > EARLY_STOP_FACTOR * target
                if is_over:
                    learner.discard()
                else:
                    losses = [each["loss"] for each in terms]
                    check = partial(self.guard.check_step, learner, parts, losses, step=step, loss=figures["loss"])
                    figures["grad_norm"] = learner.step(check)
                steps.append(figures)
                WATCHDOG.finish_step()
        return steps

    def _compute_policy_loss(
        self, rollout: Rollout, with_entropy: bool, policy: Any, batch: Rollout, part: Rollout
    ) -> tuple[Tensor, Terms]:
        assert part.advantages is not None
        objective, sampling = self.method.objective, self.config.rewards
        normaliser = compute_normaliser(
            objective.loss_type,
            num_answers=len(batch),
            num_tokens=batch.num_targets,
            mean_tokens=rollout.num_targets * (len(batch) / len(rollout)),
            max_length=sampling.response_length,
        )
        tensors = (part.logps, part.advantages, part.loss_mask, part.engine_logps, part.ref_logps)
        old, advantages, mask, engine, ref = (send(tensor, self.args.device) for tensor in tensors)
        with self.precision():
            logps, entropy = compute_response_logps(
                policy, Sequences(part, self.args.device), temperature=sampling.temperature, with_entropy=with_entropy
            )
        loss, terms = compute_policy_loss(
            logps, old, advantages, mask, objective, normaliser=normaliser, engine_logps=engine, ref_logps=ref
        )
        if entropy is not None:
            terms["entropy"] = torch.where(mask, entropy, 0.0).sum()
        return loss, terms

    def _compute_value_loss(self, critic: Any, batch: Rollout, part: Rollout) -> tuple[Tensor, Terms]:
        assert part.returns is not None
        with self.precision():
            values = compute_response_values(critic, Sequences(part, self.args.device))
        targets = (send(tensor, self.args.device) for tensor in (part.values, part.returns, part.loss_mask))
        cliprange = self.config.ppo.cliprange_value
        return compute_value_loss(values, *targets, cliprange=cliprange, num_tokens=batch.num_targets)

    def _minibatches(self, num_answers: int, iteration: int) -> Iterator[Sequence[int]]:
        schedule = self.method.schedule
        # A function of the iteration, not of a running generator, so that a resumed run has the same minibatches.
        seeds = [[self.args.seed, Stream.MINIBATCH, iteration, epoch] for epoch in range(schedule.update_epochs)]
        order = np.concatenate([np.random.default_rng(seed).permutation(num_answers) for seed in seeds]).tolist()
        for start in range(0, len(order), schedule.answers_per_step):
            yield order[start : start + schedule.answers_per_step]

    def _share(self, batch: Rollout) -> Iterator[Rollout]:
        """Yield this process's micro-batches."""
        # Round-robin over answers sorted by length: little padding in a micro-batch, and equal work on every rank.
        by_length = [row for rows in batch.cut(1) for row in rows]
        own, size = by_length[self.args.process_index :: self.args.world_size], self.args.per_device_train_batch_size
        for start in range(0, len(own), size):
            yield batch.take(own[start : start + size])


def _reduce(parts: Sequence[Terms], num_tokens: int) -> Figures:
    """Return the metrics of a step over its micro-batches and all processes; every process must call.

    Sums over tokens are divided by ``num_tokens``; the loss is normalised already.
    """
    names = [name for name in parts[0] if name != RATIO_MAX]
    # One collective for all sums.
    sums = sum_tensor(torch.stack([torch.as_tensor(sum(part[name].float() for part in parts)) for name in names]))
    values = [*sums.unbind()]
    if RATIO_MAX in parts[0]:
        names.append(RATIO_MAX)
        values.append(torch.stack([part[RATIO_MAX] for part in parts]).max())
        if get_world_size() > 1:
            distributed.all_reduce(values[-1], op=distributed.ReduceOp.MAX)
    # One copy to the host, because each synchronises with the device.
    figures = dict(zip(names, torch.stack(values).tolist(), strict=True))
    return {name: value if name in ("loss", RATIO_MAX) else value / num_tokens for name, value in figures.items()}


def _sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            # Every rank must enter each all-reduce, also if its micro-batches gave this parameter no gradient.
            parameter.grad = torch.zeros_like(parameter)
    # All are started before the first is waited for, so that transfers overlap.
    for handle in [distributed.all_reduce(parameter.grad, async_op=True) for parameter in parameters]:
        handle.wait()

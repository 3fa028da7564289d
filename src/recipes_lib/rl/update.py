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
from recipes_lib.rl.methods import Method
from recipes_lib.rl.models import ActorCritic
from recipes_lib.rl.monitor import Figures, verify_first_minibatch
from recipes_lib.rl.policy_loss import (
    RATIO_MAX,
    Terms,
    compute_normaliser,
    compute_policy_loss,
    compute_value_loss,
)
from recipes_lib.rl.rollout import Rollout, compute_response_logps, compute_response_values, lay_out, send
from recipes_lib.rl.rollout_schedule import RolloutSchedule, Stream
from recipes_lib.training.checkpoints.model_layout import choose_learner_layout
from recipes_lib.training.collectives import get_world_size, sum_tensor
from recipes_lib.training.guards.step_facts import StepInputs, stop_before_update
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.layouts.fsdp import clip_gradients, compute_total_norm
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.optim.optimizers import get_decay_names
from recipes_lib.training.trainers.arguments import get_compute_dtype

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
        output_dir: Of the run.
        find_prompt: Gives the place of an answer's prompt among the prompts of the run, by the answer's number.

    Source: ``recipes_lib.training.guards.step_facts``, by which every recipe stops; ``tests/rl/test_guard.py``.
    """

    output_dir: Path
    find_prompt: Callable[[int], int]

    def judge_answers(self, rollout: Rollout, *, step: int) -> None:
        """Check all values of an iteration before the updates; every process has the same answers, and must call.

        Args:
            rollout: All answers, before any target was worked out.
            step: The first one of the iteration, from 1.

        Raises:
            DivergedError: Something of an answer is not finite.
        """
        bad = {name: _find_bad_rows(getattr(rollout, name), rollout.mask) for name in _SPOKEN}
        name = next((name for name, rows in bad.items() if rows.any()), None)
        if name is None:
            return
        # Every rank has the same rollout, so all of them decide alike without a collective operation.
        rows = torch.stack(list(bad.values())).any(dim=0).nonzero().flatten().tolist()
        why = f"the {_SPOKEN[name]} of {int(bad[name].sum())} of {len(rollout)} answers are not finite"
        inputs = StepInputs(*self._describe([rollout.take(rows)]))
        stop_before_update({}, inputs, output_dir=self.output_dir, step=step, facts={}, why=why)

    def judge(
        self,
        learner: Learner,
        parts: Sequence[Rollout],
        losses: Sequence[Tensor],
        *,
        step: int,
        loss: float,
        norm: float,
    ) -> None:
        """Check a step after the reduction of its gradients, before they are clipped.

        Args:
            learner: Whose step it is, with the gradients.
            parts: This process's micro-batches.
            losses: Its share of each.
            step: Number of the step, from 1.
            loss: Of all processes.
            norm: Of the gradients.

        Raises:
            DivergedError: Loss or norm are not finite.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            return
        batches, row_ids = self._describe(parts)
        inputs = StepInputs(batches, row_ids, losses=list(losses))
        name = learner.name
        facts = {"learner": name, "loss": loss, "grad_norm": norm, "learning_rate": learner.learning_rate}
        stop_before_update(
            learner.parameters, inputs, step=step, output_dir=self.output_dir, facts=facts, why="", learner=name
        )

    def _describe(self, parts: Sequence[Rollout]) -> tuple[list[dict[str, Tensor]], list[list[int]]]:
        """Return all values of each part's answers, their tokens, and the positions of their prompts."""
        cpu = torch.device("cpu")
        batches = [{"input_ids": lay_out(part, cpu).inputs["input_ids"], **dict(part.tensors())} for part in parts]
        return batches, [[self.find_prompt(number) for number in part.numbers.tolist()] for part in parts]


def _find_bad_rows(values: Tensor, mask: Tensor) -> Tensor:
    """Rows with a non-finite value, ``bool (B,)``; values after the end of an answer are ignored."""
    bad = ~torch.isfinite(values)
    return bad if bad.dim() == 1 else (bad & mask).any(dim=1)


EARLY_STOP_FACTOR: Final = 1.5
"""Multiple of ``target_kl`` at which the updates of an iteration end."""


class Learner:
    """Parameters with their optimizer, schedule and gradient norm.

    Attributes:
        name: ``policy`` or ``critic``.
        parameters: By name.
        optimizer: Of upstream, by ``optim``.
        scheduler: Its learning rate, step by step.
        layout: What each process holds of the parameters, of their gradients and of the optimizer's states.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        learning_rate: float,
        args: TrainingArguments,
        schedule: RolloutSchedule,
        num_idle: int = 0,
    ) -> None:
        """Build the optimizer.

        Args:
            name: For errors.
            model: Says which parameters decay.
            parameters: What is trained of it.
            learning_rate: At the peak.
            args: Optimizer, decay, schedule and gradient norm.
            schedule: Length of the run.
            num_idle: Steps of the run before its first one.
        """
        self.name = name
        self.parameters = parameters
        self.layout = choose_learner_layout(model)
        self._max_norm = args.max_grad_norm
        decaying = set(get_decay_names(model, decay_embeddings=True))
        groups = [
            {"params": [p for n, p in parameters.items() if (n in decaying) is decays], "weight_decay": decay}
            for decays, decay in ((True, args.weight_decay), (False, 0.0))
        ]
        schedule_options: Any = args.lr_scheduler_kwargs
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        self.optimizer: Any = kind(groups, **{**options, "lr": learning_rate})
        self.scheduler: Any = get_scheduler(
            args.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=schedule.num_warmup_steps,
            num_training_steps=schedule.num_steps - num_idle,
            scheduler_specific_kwargs=schedule_options,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.scheduler.get_last_lr()[0])

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this process's share of a step's loss; ``step`` uses the sum over all processes."""
        # FSDP2 reduces gradients here, and averages over the number of processes.
        (loss * get_world_size() if self.layout.is_shared else loss).backward()  # type: ignore[no-untyped-call]

    def step(self, judge: Callable[..., None]) -> float:
        """Update with the gradients of all processes, and return their norm before clipping.

        Args:
            judge: Given the ``norm``, raises where no update may be made; the parameters are then as they were.
        """
        parameters = list(self.parameters.values())
        if not self.layout.is_shared:
            _sum_gradients(parameters)
        total = compute_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norm = float(total)
        # The check is between norm and clipping, because clipping by a non-finite norm makes all gradients non-finite.
        judge(norm=norm)
        clip_gradients(parameters, self._max_norm or math.inf, total)
        self.optimizer.step()
        self.discard()
        return norm

    def discard(self) -> None:
        """Clear the gradients, and advance the schedule."""
        self.optimizer.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            # A step without an update advances the schedule on purpose; torch warns if the first one is such a step.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()


@dataclass(frozen=True, slots=True)
class Updater:
    """Makes the updates of an iteration.

    Every process has all answers, and takes its share of a minibatch in batches of similar length. Gradients are summed
    before a step, and the normaliser is the number of tokens of the whole step. Therefore world size, micro-batches and
    lengths do not change the result. Answers without a score are computed but count nowhere; a minibatch with only such
    answers is a step without an update.

    Attributes:
        models: Policy and critic.
        learners: ``policy`` and, if there is one, ``critic``.
        method: Which answers form a step, the objective of the policy, and the KL at which updates end.
        config: Clip range of the critic, longest answer, and temperature.
        args: Answers of a forward and backward pass, rank and world size, device and precision of the models, and the
            seed, which decides with the iteration which answers form a minibatch.
        precision: Gives the context in which products are computed.
        guard: Judges every step.
        progress: What the terminal shows.
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
        """Update the policy and return the figures of each step; the last has no update if ``target_kl`` was exceeded.

        Args:
            rollout: All answers of the iteration.
            iteration: Counted from 0.
            with_entropy: Whether the entropy is among the figures, which takes a chunk of logits besides.

        Raises:
            DivergedError: As ``UpdateGuard.judge`` and ``verify_first_minibatch``.
        """
        with self.models.as_policy() as policy:

            def compute(batch: Rollout, part: Rollout) -> tuple[Tensor, Terms]:
                normaliser = compute_normaliser(
                    self.method.objective.loss_type,
                    num_answers=len(batch),
                    num_tokens=batch.num_targets,
                    mean_tokens=rollout.num_targets * (len(batch) / len(rollout)),
                    max_length=self.config.rewards.response_length,
                )
                return self._compute_policy_loss(policy, part, normaliser, with_entropy)

            return self._update(self.learners["policy"], rollout, iteration, compute)

    def update_critic(self, rollout: Rollout, iteration: int) -> list[Figures]:
        """Update the critic, if there is one, and return the figures of each step.

        Raises:
            DivergedError: As ``UpdateGuard.judge``.
        """
        if "critic" not in self.learners:
            return []
        with self.models.as_critic() as critic:

            def compute(batch: Rollout, part: Rollout) -> tuple[Tensor, Terms]:
                return self._compute_value_loss(critic, part, batch.num_targets)

            return self._update(self.learners["critic"], rollout, iteration, compute)

    def _update(
        self,
        learner: Learner,
        rollout: Rollout,
        iteration: int,
        compute: Callable[[Rollout, Rollout], tuple[Tensor, Terms]],
    ) -> list[Figures]:
        """Make the steps of an iteration; ``compute`` gives the loss of a part of a minibatch, given both."""
        steps: list[Figures] = []
        is_over = False
        self.models.set_training(training=True)
        for step, rows in self._steps(len(rollout), iteration, f"updating the {learner.name}"):
            batch = rollout.take(rows)
            if is_over or not batch.num_targets:
                learner.discard()
                continue
            parts = list(self._share(batch))
            terms = [self._learn(learner, partial(compute, batch, part)) for part in parts]
            figures = {**_reduce(terms, batch.num_targets), "lr": learner.learning_rate}
            # Of the policy alone. A loss that is not finite is left to the judge, who writes a dump of the batch.
            kl = figures.get("approx_kl") if math.isfinite(figures["loss"]) else None
            if kl is not None and not steps:
                verify_first_minibatch(kl, get_compute_dtype(self.args))
            target = self.method.target_kl
            # Reduced over all processes, so that all of them stop together or none.
            is_over = kl is not None and target is not None and kl > EARLY_STOP_FACTOR * target
            if is_over:
                learner.discard()
            else:
                losses = [each["loss"] for each in terms]
                judge = partial(self.guard.judge, learner, parts, losses, step=step, loss=figures["loss"])
                figures["grad_norm"] = learner.step(judge)
            steps.append(figures)
            WATCHDOG.finish_step()
        return steps

    def _learn(self, learner: Learner, compute: Callable[[], tuple[Tensor, Terms]]) -> Terms:
        """Add the gradients of a part of a step, and return its loss and figures."""
        WATCHDOG.beat()
        loss, terms = compute()
        learner.backward(loss)
        return {"loss": loss.detach(), **terms}

    def _compute_policy_loss(
        self, policy: Any, part: Rollout, normaliser: float, with_entropy: bool
    ) -> tuple[Tensor, Terms]:
        assert part.advantages is not None
        mask, old, engine, advantages, ref = (
            send(tensor, self.args.device)
            for tensor in (part.loss_mask, part.logps, part.engine_logps, part.advantages, part.ref_logps)
        )
        with self.precision():
            sequences, temperature = lay_out(part, self.args.device), self.config.rewards.temperature
            logps, entropy = compute_response_logps(
                policy, sequences, temperature=temperature, with_entropy=with_entropy
            )
        objective = self.method.objective
        loss, terms = compute_policy_loss(
            logps, old, advantages, mask, objective, normaliser=normaliser, engine_logps=engine, ref_logps=ref
        )
        if entropy is not None:
            terms["entropy"] = torch.where(mask, entropy, 0.0).sum()
        return loss, terms

    def _compute_value_loss(self, critic: Any, part: Rollout, num_tokens: int) -> tuple[Tensor, Terms]:
        assert part.returns is not None
        with self.precision():
            values = compute_response_values(critic, lay_out(part, self.args.device))
        learnt = (part.values, part.returns, part.loss_mask)
        before, returns, mask = (send(tensor, self.args.device) for tensor in learnt)
        cliprange = self.config.ppo.cliprange_value
        return compute_value_loss(values, before, returns, mask, cliprange=cliprange, num_tokens=num_tokens)

    def _steps(self, num_answers: int, iteration: int, what: str) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield the number of each optimizer step of the run, from 1, and its answers, equal on every process."""
        schedule = self.method.schedule
        first, last = schedule.count_steps(iteration), schedule.count_steps(iteration + 1)
        drawn = self.progress.track(self._minibatches(num_answers, iteration), what, last - first)
        for step, rows in zip(range(first + 1, last + 1), drawn, strict=False):
            WATCHDOG.enter("a step")
            yield step, rows

    def _minibatches(self, num_answers: int, iteration: int) -> Iterator[Sequence[int]]:
        schedule = self.method.schedule
        # Not from a running generator: a resumed run has the same minibatches.
        seeds = [[self.args.seed, Stream.MINIBATCH, iteration, epoch] for epoch in range(schedule.passes)]
        order = np.concatenate([np.random.default_rng(seed).permutation(num_answers) for seed in seeds]).tolist()
        for start in range(0, len(order), schedule.answers_per_step):
            yield order[start : start + schedule.answers_per_step]

    def _share(self, batch: Rollout) -> Iterator[Rollout]:
        """Yield this process's micro-batches: answers sorted by length, assigned round-robin to processes."""
        # Round-robin over lengths: little padding in a micro-batch, and the same work on every rank.
        by_length = [row for rows in batch.cut(1) for row in rows]
        mine, size = by_length[self.args.process_index :: self.args.world_size], self.args.per_device_train_batch_size
        for start in range(0, len(mine), size):
            yield batch.take(mine[start : start + size])


def _reduce(parts: Sequence[Terms], num_tokens: int) -> Figures:
    """Return the figures of a step over its parts and all processes; every process must call, with the same names.

    Sums over tokens become means; a loss is a mean already.
    """
    names = [name for name in parts[0] if name != RATIO_MAX]
    # One collective for all sums; in float32, counts too.
    sums = sum_tensor(torch.stack([torch.as_tensor(sum(part[name].float() for part in parts)) for name in names]))
    values = [*sums.unbind()]
    if RATIO_MAX in parts[0]:
        names.append(RATIO_MAX)
        values.append(torch.stack([part[RATIO_MAX] for part in parts]).max())
        if get_world_size() > 1:
            distributed.all_reduce(values[-1], op=distributed.ReduceOp.MAX)
    # One copy for all of them: each copy synchronises host and device.
    figures = dict(zip(names, torch.stack(values).tolist(), strict=True))
    return {name: value if name in ("loss", RATIO_MAX) else value / num_tokens for name, value in figures.items()}


def _sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    if get_world_size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            # Every rank must take part in each all-reduce, also with a share that did not reach this parameter.
            parameter.grad = torch.zeros_like(parameter)
    # All are started before the first is awaited, so that transfers overlap.
    for handle in [distributed.all_reduce(parameter.grad, async_op=True) for parameter in parameters]:
        handle.wait()

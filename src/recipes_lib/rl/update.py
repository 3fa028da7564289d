"""PPO updates: shuffled minibatches, gradient accumulation, non-finite guard, on any number of ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, distributed, nn
from transformers import Trainer, TrainingArguments, get_scheduler

from recipes_lib.rl.models import ActorCritic
from recipes_lib.rl.monitor import Figures, verify_first_minibatch
from recipes_lib.rl.policy_loss import (
    PolicyObjective,
    compute_normaliser,
    compute_policy_loss,
    compute_value_loss,
)
from recipes_lib.rl.rollout import Rollout, compute_response_logps, compute_response_values, lay_out, send
from recipes_lib.rl.rollout_schedule import RolloutSchedule, Stream
from recipes_lib.training.checkpoints.model_layout import choose_learner_layout
from recipes_lib.training.collectives import get_world_size
from recipes_lib.training.guards.step_facts import StepInputs, stop_before_update
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.layouts.fsdp import clip_gradients, compute_total_norm
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.optim.optimizers import get_decay_names

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


@dataclass
class Sums:
    """Figures of optimizer steps over all processes: sums over tokens, and maxima."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)

    def add(self, sums: Mapping[str, Tensor], largest: Mapping[str, Tensor] | None = None) -> None:
        """Add the figures of a part of a step."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value.detach().float()
        for name, value in (largest or {}).items():
            self.largest[name] = torch.maximum(self.largest.get(name, value), value).detach().float()

    def read(self) -> Figures:
        """Return the figures over all processes; every process must call."""
        if get_world_size() > 1:
            for values, operation in ((self.sums, distributed.ReduceOp.SUM), (self.largest, distributed.ReduceOp.MAX)):
                if values:
                    # One collective for all sums, one for all maxima: every rank has the same names in the same order.
                    joined = torch.stack(list(values.values()))
                    distributed.all_reduce(joined, op=operation)
                    values.update(zip(values, joined, strict=True))
        figures = {**self.sums, **self.largest}
        # One copy for all of them: each copy synchronises host and device.
        return dict(zip(figures, torch.stack(list(figures.values())).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Updater:
    """Makes the updates of an iteration.

    Every process has all answers, and takes its share of a minibatch in batches of similar length. Gradients are summed
    before a step, and the normaliser is the number of tokens of the whole step. Therefore world size, micro-batches and
    lengths do not change the result. Answers without a score are computed but count nowhere; a minibatch with only such
    answers is a step without an update.

    Attributes:
        models: Policy and critic.
        policy: The policy's learner.
        critic: The critic's; ``None`` without one.
        schedule: Which answers form a step.
        objective: Of the policy.
        cliprange_value: As for ``compute_value_loss``.
        target_kl: At 1.5 times this KL a token from the policy that answered, the updates of an iteration end.
        max_length: Longest answer that the run allows.
        temperature: Of the log-probabilities.
        args: Answers of a forward and backward pass, rank and world size, the device of the models, and the seed, which
            decides with the iteration which answers form a minibatch.
        precision: Gives the context in which products are computed.
        dtype: Of those products.
        guard: Judges every step.
        progress: What the terminal shows.
    """

    models: ActorCritic
    policy: Learner
    critic: Learner | None
    schedule: RolloutSchedule
    objective: PolicyObjective
    cliprange_value: float | None
    target_kl: float | None
    max_length: int
    temperature: float
    args: TrainingArguments
    precision: Callable[[], Any]
    dtype: torch.dtype
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
        steps: list[Figures] = []
        is_over = False
        self.models.set_training(training=True)
        with self.models.as_policy() as policy:
            for step, rows in self._steps(len(rollout), iteration, "updating the policy"):
                batch = rollout.take(rows)
                if is_over or not batch.num_targets:
                    self.policy.discard()
                    continue
                sums, parts = Sums(), list(self._share(batch))
                normaliser = self._compute_normaliser(rollout, batch)
                losses = [self._learn_policy(policy, part, normaliser, sums, with_entropy) for part in parts]
                figures = {**_per_token(sums.read(), batch.num_targets), "lr": self.policy.learning_rate}
                # A loss that is not finite is left to the judge, who writes a dump of the batch.
                is_finite = math.isfinite(figures["loss"])
                if not steps and is_finite:
                    verify_first_minibatch(figures, self.dtype)
                target = self.target_kl
                # Reduced over all processes, so that all of them stop together or none.
                if is_finite and target is not None and figures["approx_kl"] > EARLY_STOP_FACTOR * target:
                    is_over = True
                    self.policy.discard()
                else:
                    judge = partial(self.guard.judge, self.policy, parts, losses, step=step, loss=figures["loss"])
                    figures["grad_norm"] = self.policy.step(judge)
                steps.append(figures)
                WATCHDOG.finish_step()
        return steps

    def update_critic(self, rollout: Rollout, iteration: int) -> list[Figures]:
        """Update the critic and return the figures of each step.

        Raises:
            DivergedError: As ``UpdateGuard.judge``.
        """
        steps: list[Figures] = []
        if self.critic is None:
            return steps
        self.models.set_training(training=True)
        with self.models.as_critic() as critic:
            for step, rows in self._steps(len(rollout), iteration, "updating the critic"):
                batch = rollout.take(rows)
                if not batch.num_targets:
                    self.critic.discard()
                    continue
                sums, parts = Sums(), list(self._share(batch))
                losses = [self._learn_critic(critic, part, batch.num_targets, sums) for part in parts]
                figures = {**_per_token(sums.read(), batch.num_targets), "lr": self.critic.learning_rate}
                judge = partial(self.guard.judge, self.critic, parts, losses, step=step, loss=figures["loss"])
                steps.append({**figures, "grad_norm": self.critic.step(judge)})
                WATCHDOG.finish_step()
        return steps

    def _compute_normaliser(self, rollout: Rollout, batch: Rollout) -> float:
        """Divisor of the losses of a step."""
        kind, share_of_all = self.objective.loss_type, len(batch) / len(rollout)
        # As in TRL: every step of a generation has the same divisor.
        of_generation = kind in ("dapo", "cispo", "vespo")
        num_tokens = rollout.num_targets * share_of_all if of_generation else batch.num_targets
        return compute_normaliser(kind, num_answers=len(batch), num_tokens=num_tokens, max_length=self.max_length)

    def _learn_policy(self, policy: Any, part: Rollout, normaliser: float, sums: Sums, with_entropy: bool) -> Tensor:
        WATCHDOG.beat()
        assert part.advantages is not None
        mask, old, engine, advantages, ref = (
            send(tensor, self.args.device)
            for tensor in (part.loss_mask, part.logps, part.engine_logps, part.advantages, part.ref_logps)
        )
        with self.precision():
            sequences = lay_out(part, self.args.device)
            logps, entropy = compute_response_logps(
                policy, sequences, temperature=self.temperature, with_entropy=with_entropy
            )
        result = compute_policy_loss(
            logps,
            old,
            advantages,
            mask,
            self.objective,
            normaliser=normaliser,
            engine_logps=engine,
            ref_logps=ref,
        )
        self.policy.backward(result.loss)
        sums.add(
            {
                "loss": result.loss,
                "approx_kl": result.kl_sum,
                "clipfrac_low": result.num_low,
                "clipfrac_high": result.num_high,
                **({} if entropy is None else {"entropy": torch.where(mask, entropy, 0.0).sum()}),
                **({"kl_ref": result.ref_kl_sum} if self.objective.beta else {}),
            },
            {"ratio_max": 1 + result.max_ratio_shift},
        )
        return result.loss.detach()

    def _learn_critic(self, critic: Any, part: Rollout, num_tokens: int, sums: Sums) -> Tensor:
        WATCHDOG.beat()
        assert part.returns is not None
        assert self.critic is not None
        with self.precision():
            values = compute_response_values(critic, lay_out(part, self.args.device))
        learnt = (part.values, part.returns, part.loss_mask)
        before, returns, mask = (send(tensor, self.args.device) for tensor in learnt)
        result = compute_value_loss(
            values,
            before,
            returns,
            mask,
            cliprange=self.cliprange_value,
            num_tokens=num_tokens,
        )
        self.critic.backward(result.loss)
        sums.add({"loss": result.loss, "clipfrac": result.num_clipped})
        return result.loss.detach()

    def _steps(self, num_answers: int, iteration: int, what: str) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield the number of each optimizer step of the run, from 1, and its answers, equal on every process."""
        first, last = self.schedule.count_steps(iteration), self.schedule.count_steps(iteration + 1)
        drawn = self.progress.track(self._minibatches(num_answers, iteration), what, last - first)
        for step, rows in zip(range(first + 1, last + 1), drawn, strict=False):
            WATCHDOG.enter("a step")
            yield step, rows

    def _minibatches(self, num_answers: int, iteration: int) -> Iterator[Sequence[int]]:
        # Not from a running generator: a resumed run has the same minibatches.
        seeds = [[self.args.seed, Stream.MINIBATCH, iteration, epoch] for epoch in range(self.schedule.passes)]
        order = np.concatenate([np.random.default_rng(seed).permutation(num_answers) for seed in seeds]).tolist()
        size = self.schedule.answers_per_step
        for start in range(0, len(order), size):
            yield order[start : start + size]

    def _share(self, batch: Rollout) -> Iterator[Rollout]:
        """Yield this process's micro-batches: answers sorted by length, assigned round-robin to processes."""
        # Round-robin over lengths: little padding in a micro-batch, and the same work on every rank.
        by_length = [row for rows in batch.cut(1) for row in rows]
        mine, size = by_length[self.args.process_index :: self.args.world_size], self.args.per_device_train_batch_size
        for start in range(0, len(mine), size):
            yield batch.take(mine[start : start + size])


def _per_token(figures: Figures, num_tokens: int) -> Figures:
    """Convert sums over tokens to means; losses are already means, and maxima are unchanged."""
    whole = ("loss", "ratio_max")
    return {name: value if name in whole else value / num_tokens for name, value in figures.items()}


def _sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    if get_world_size() == 1:
        return
    handles = []
    for parameter in parameters:
        if parameter.grad is None:
            # Every rank must take part in each all-reduce, also with a share that did not reach this parameter.
            parameter.grad = torch.zeros_like(parameter)
        # All are started before the first is awaited, so that transfers overlap.
        handles.append(distributed.all_reduce(parameter.grad, async_op=True))
    for handle in handles:
        handle.wait()

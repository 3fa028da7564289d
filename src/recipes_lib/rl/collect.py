"""Rollout collection: sampling, scoring, and log-probabilities of policy, reference and critic."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Final

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.prompts import PromptRow
from recipes_lib.models.adapters.roles import Role
from recipes_lib.models.generation import Generated, Sampling, mask_answers, read_continuation, sample_answers
from recipes_lib.rl.engines.engine import build_generator
from recipes_lib.rl.models import ActorCritic, beat_between, gathered_weights
from recipes_lib.rl.rewards import Rewards, verify_positions
from recipes_lib.rl.rollout import Rollout, Sequences, compute_response_logps, compute_response_values
from recipes_lib.rl.rollout_schedule import Stream
from recipes_lib.training.guards.preemption import agreeing_on_stop, raise_if_stop_pending
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.monitoring.progress import TrainingProgress
from recipes_lib.training.trainers.arguments import build_autocast

OFF_POLICY_SHARE: Final = "rollout/off_policy_share"
"""Share of an iteration's answers that were sampled with weights before the last update."""


class Collector:
    """Collects answers on one process: sampling, scoring, log-probabilities and values.

    Attributes:
        models: Policy, critic and reference.
        generator: Generation engine.
        rewards: Reward functions and reward model.
        tokenizer: The policy's tokenizer.
        args: Batch size of forward passes, device, and the seed, which with the number of an answer determines its
            random numbers.
        precision: Builds the autocast context of forward passes.
    """

    def __init__(
        self,
        config: RecipeConfig,
        args: TrainingArguments,
        models: ActorCritic,
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        progress: TrainingProgress,
        max_length: int,
    ) -> None:
        """Build the engine.

        Args:
            config: Engine, ``response_length`` and temperature.
            args: Batch size, seed, device and precision.
            models: Policy, critic and reference.
            rewards: Reward functions and reward model.
            tokenizer: The policy's tokenizer.
            progress: Progress display of the terminal.
            max_length: Tokens of the longest prompt with its longest answer.

        Raises:
            ConfigError: As ``build_generator`` and ``verify_positions``.
        """
        self.models, self.rewards, self.tokenizer = models, rewards, tokenizer
        self.args, self._progress = args, progress
        own = rewards.model
        if own and (warning := verify_positions(own.model.config, own.tokenizer, tokenizer, max_length)):
            progress.say(warning)
        # FSDP2 gathers weights in the compute dtype.
        self.precision: Callable[[], Any] = nullcontext if models.is_sharded else build_autocast(args)
        self._sampling = Sampling(
            stop_ids=models.stop_ids,
            pad_id=tokenizer.pad_token_id or 0,
            response_length=config.rewards.response_length,
            temperature=config.rewards.temperature,
            beat=raise_if_stop_pending,
        )
        self.generator = build_generator(config, args, self._sampling, precision=self.precision, max_length=max_length)
        self._pool = ThreadPoolExecutor(max_workers=1) if config.engine.max_staleness else None
        self._request: Future[Generated] | None = None

    def collect(
        self,
        prompts: Sequence[PromptRow],
        numbers: Sequence[int],
        *,
        following: tuple[Sequence[PromptRow], Sequence[int]] | None = None,
    ) -> tuple[Rollout, dict[str, float]]:
        """Sample answers to prompts, score them, and compute the log-probabilities and values that the updates need.

        Args:
            prompts: Prompts, at least one.
            numbers: Number of each answer in the run.
            following: Prompts and numbers of the next call, whose answers are requested with ``max_staleness`` before
                the updates; ``None`` if there is none.

        Returns:
            The answers, and the seconds of weight transfer, sampling, scoring, and log-probabilities with values.

        Raises:
            ConfigError: As ``Rewards.score``, or the engine failed.
            StopPendingError: This process has a stop request, and models are replicated.
            PreemptedError: Any process has a stop request, and models are sharded or sampling is asynchronous.
        """
        self.models.set_training(training=False)
        ends = [time.perf_counter()]
        # Before new weights are loaded, which would replace those that the server is sampling with.
        early = self._take()
        self._load()
        ends.append(time.perf_counter())
        rollout = self._sample(list(prompts), numbers, early)
        if self._pool is not None and following is not None:
            # Starts here and runs during scoring and the updates, one iteration behind the weights.
            self._request = self._pool.submit(self._generate, None, *following)
        ends.append(time.perf_counter())
        rollout = self._score(rollout, numbers[0])
        ends.append(time.perf_counter())
        rollout = self._compute_logps_and_values(rollout)
        ends.append(time.perf_counter())
        phases = zip(("sync", "generate", "score", "old_ref_value"), pairwise(ends), strict=True)
        figures = {f"time/{name}": end - begin for name, (begin, end) in phases}
        return rollout, figures if self._pool is None else {**figures, OFF_POLICY_SHARE: float(early is not None)}

    def close(self) -> None:
        """Stop asynchronous sampling, without waiting for unfinished answers."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def settle(self) -> None:
        """Wait until no process samples early answers, before an evaluation replaces the engine's weights; collective.

        An error of the answers is raised where they are taken.
        """
        if self._request is not None:
            self._request.exception()
        # One server may answer all processes.
        PartialState().wait_for_everyone()

    def answer(self, prompts: Sequence[PromptRow], numbers: Sequence[int]) -> Rollout:
        """Sample and score answers, without log-probabilities and values; every process must call.

        Args:
            prompts: Prompts, at least one.
            numbers: As for ``collect``; calls with equal numbers use equal random numbers.

        Raises:
            ConfigError: As ``collect``.
            StopPendingError: As ``collect``.
            PreemptedError: As ``collect``.
        """
        self.models.set_training(training=False)
        self._load()
        return self._score(self._sample(list(prompts), numbers), numbers[0])

    def _take(self) -> Generated | None:
        """Wait for the answers that were requested early, and return them; ``None`` without a request. Collective."""
        request, self._request = self._request, None
        if request is None:
            return None
        with agreeing_on_stop():
            return request.result()

    def _load(self) -> None:
        # Begins with the transfer of the weights, so that a stall of it is ended as early as one of sampling.
        WATCHDOG.enter("sampling answers")
        with self.models.using("policy") as policy:
            self.generator.load(policy)
        # All ranks may use one server, which has the new weights only once the main process has sent them.
        PartialState().wait_for_everyone()

    def _generate(self, policy: Any, prompts: Sequence[PromptRow], numbers: Sequence[int], *track: Any) -> Generated:
        seeds = [(self.args.seed, Stream.ANSWER, number) for number in numbers]
        ids = [prompt.input_ids for prompt in prompts]
        return sample_answers(self.generator, policy, ids, seeds, self._sampling, *track)

    def _sample(self, prompts: list[PromptRow], numbers: Sequence[int], early: Generated | None = None) -> Rollout:
        with self.models.using("policy") as policy, gathered_weights(policy, is_needed=self.generator.uses_policy):
            answers = early or self._generate(policy, prompts, numbers, self._progress.track)
        ids, logps = answers.response_ids, answers.engine_logps
        mask, finished = mask_answers(ids, self._sampling.stop_ids)
        # Placeholders until answers are scored, (B,), and read by the models, (B, T).
        zeros = torch.zeros(len(prompts))
        rollout = Rollout(
            prompts=prompts,
            numbers=torch.tensor(numbers),
            response_ids=torch.where(mask, ids, 0),
            mask=mask,
            finished=finished,
            scored=zeros.bool(),
            scores=zeros,
            rewards=zeros[:, None],
            engine_logps=torch.where(mask, logps, 0.0),
            **dict.fromkeys(("logps", "ref_logps", "values"), torch.zeros_like(logps)),
        )
        # Truncated to the longest answer.
        return rollout.take(range(len(prompts)))

    def _score(self, rollout: Rollout, number: int) -> Rollout:
        WATCHDOG.enter("scoring answers (`reward_timeout` limits a call)")
        # Reward functions that draw from global generators must give the same values in a resumed run. Seeded here, and
        # not at the start, because a library may also draw numbers when it is loaded at its first use.
        set_seed((self.args.seed + 7919 * number) % 2**32)
        answers, texts = rollout.list_ids(), self.read(rollout)
        scorer = None if self.rewards.model is None else self.rewards.model.model
        # Gathered on every process, because each scores other answers, in a different number of batches.
        with gathered_weights(scorer if self.models.reward is None else self.models.policy):
            scores = self.rewards.score(rollout.prompts, texts, answers, rollout.finished.tolist())
        known: dict[str, Any] = {
            # All processes gather them: without the columns, of which tests of programs can have megabytes a row.
            "prompts": [dataclasses.replace(prompt, columns={}) for prompt in rollout.prompts],
            "scored": torch.tensor([total is not None for total in scores.total]),
            "scores": torch.tensor([0.0 if total is None else total for total in scores.total]),
            "rewards": torch.tensor([[math.nan if s is None else s for s in part] for part in scores.parts.values()]).T,
        }
        return dataclasses.replace(rollout, **known)

    def read(self, answers: Rollout) -> list[str]:
        """Decode answers without special tokens; those to plain prompts as their continuation."""

        def decode(prompt: PromptRow, answer: list[int]) -> str:
            if isinstance(prompt.content, str):
                return read_continuation(self.tokenizer, prompt.input_ids, answer)
            return str(self.tokenizer.decode(answer, skip_special_tokens=True))

        return list(map(decode, answers.prompts, answers.list_ids()))

    def _compute_logps_and_values(self, rollout: Rollout) -> Rollout:
        WATCHDOG.enter("computing log-probabilities")

        def compute_logps(model: Any, sequences: Sequences) -> Tensor:
            return compute_response_logps(model, sequences, temperature=self._sampling.temperature)[0]

        old = self._map(rollout, "policy", compute_logps)
        ref = self._map(rollout, "reference", compute_logps) if self.models.has_reference else old
        has_critic = self.models.critic is not None
        values = self._map(rollout, "critic", compute_response_values) if has_critic else torch.zeros_like(old)
        return dataclasses.replace(rollout, logps=old, ref_logps=ref, values=values)

    def _map(self, rollout: Rollout, name: Role, compute: Callable[[Any, Sequences], Tensor]) -> Tensor:
        """Apply a model to all answers without gradients; return ``float32 (B, T)`` on the CPU."""
        order, parts, width = list[int](), list[Tensor](), rollout.mask.shape[1]
        with self.models.using(name) as model, torch.no_grad(), self.precision():
            for rows in rollout.cut(self.args.per_device_eval_batch_size):
                beat_between(self.models.policy)
                # (rows, length of their longest answer); beyond it the result is 0. It stays on the device, so that the
                # next batch is laid out during the computation.
                part = compute(model, Sequences(rollout.take(rows), self.args.device)).float()
                parts.append(functional.pad(part, (0, width - part.shape[1])))
                order += rows
        result = torch.empty(rollout.mask.shape)
        result[order] = torch.cat(parts).cpu()
        return result

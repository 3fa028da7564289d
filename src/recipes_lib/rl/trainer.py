"""The loop of PPO: answers, advantages, updates of policy and critic, again and again."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import IntervalStrategy, PreTrainedTokenizerBase, Trainer, TrainingArguments

from recipes_lib.config.schema import PPOConfig, RecipeConfig
from recipes_lib.data.prompts import PromptData
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.rl.collect import Collector
from recipes_lib.rl.engines import build_generator, verify_engine
from recipes_lib.rl.generation import Sampling
from recipes_lib.rl.models import ActorCritic
from recipes_lib.rl.monitor import (
    average_steps,
    describe_rollout,
    describe_values,
    verify_first_rollout,
)
from recipes_lib.rl.ppo_math import (
    KLController,
    compute_advantages,
    compute_rewards,
    estimate_kl,
    penalise_missing_end,
    whiten,
)
from recipes_lib.rl.rewards import Rewards
from recipes_lib.rl.rollout import Rollout, share
from recipes_lib.rl.schedule import PPOSchedule, choose_prompts, compute_schedule
from recipes_lib.rl.state import PPOState, load_state, save_state
from recipes_lib.rl.update import Learner, Updater
from recipes_lib.training.arguments import get_compute_dtype
from recipes_lib.training.checkpoints import rotate
from recipes_lib.training.hooks.samples import SAMPLES_FILE, Sample
from recipes_lib.training.metrics import METRICS_FILE, MetricsWriter, read_peak_memory
from recipes_lib.training.progress import TrainingProgress, build_progress
from recipes_lib.training.resumption import BATCH_KEYS
from recipes_lib.training.watchdog import WATCHDOG


@dataclass(frozen=True, slots=True)
class Targets:
    """What an iteration learns from.

    Attributes:
        advantages: Whitened, ``(B, T)``.
        returns: What the critic should have said, ``(B, T)``.
        total: Sum of each answer's rewards, ``(B,)``.
    """

    advantages: Tensor
    returns: Tensor
    total: Tensor


def compute_targets(rollout: Rollout, config: PPOConfig, penalty: float, kl_coef: float) -> Targets:
    """Work out advantages and returns of all answers of an iteration.

    Args:
        rollout: All answers, of all processes.
        config: Discounts, and whether rewards are whitened.
        penalty: Taken off the score of an answer that ran into the limit.
        kl_coef: Price of a nat of KL.
    """
    mask = rollout.mask
    scores = penalise_missing_end(rollout.scores, rollout.finished, penalty)
    rewards = compute_rewards(scores, estimate_kl(rollout.logps, rollout.ref_logps), mask, kl_coef)
    total = rewards.sum(dim=1)
    if config.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    advantages, returns = compute_advantages(rewards, rollout.values, mask, gamma=config.gamma, lam=config.lam)
    return Targets(whiten(advantages, mask), returns, total)


class PPOTrainer:
    """Trains a policy and its critic.

    Which prompts an iteration takes, which answers they get and which of them form a minibatch follow from ``seed`` and
    the iteration, never from the number of processes or what was drawn before; so that a run that was stopped goes on
    as if it had not been.

    Attributes:
        schedule: Length of the run.
        state: Where it stands.
        progress: What the terminal shows.
    """

    def __init__(
        self,
        config: RecipeConfig,
        args: TrainingArguments,
        models: ActorCritic,
        rewards: Rewards,
        prompts: PromptData,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Build optimizers, generator and log.

        Args:
            config: The run.
            args: From ``build_training_arguments``; the process group exists.
            models: Loaded, on this process's device.
            rewards: What answers are worth.
            prompts: What is asked.
            tokenizer: Of the policy.
        """
        self._config, self._args, self._models = config, args, models
        self._rewards, self._prompts, self._tokenizer = rewards, prompts, tokenizer
        self._rank, self._world_size = int(args.process_index), int(args.world_size)
        self._dtype = get_compute_dtype(args)
        self.schedule: PPOSchedule = compute_schedule(len(prompts.train), config.ppo, config.training, self._world_size)
        self.state = PPOState(kl_coef=config.ppo.kl_coef)
        self._first_iteration = 0
        self.progress: TrainingProgress = build_progress(is_main=self._rank == 0)
        self._output_dir = Path(str(args.output_dir))
        self._metrics = MetricsWriter(self._output_dir / METRICS_FILE, is_main=self._rank == 0)
        self._samples = MetricsWriter(self._output_dir / SAMPLES_FILE, is_main=self._rank == 0)
        build = functools.partial(Learner, args=args, schedule=self.schedule)
        policy = build("policy", models.policy, models.policy_parameters(), learning_rate=args.learning_rate)
        trunk = models.policy if models.is_shared else models.critic
        critic_rate = config.rewards.critic_learning_rate
        critic = build("critic", trunk, models.critic_parameters(), learning_rate=critic_rate)
        self._learners = {"policy": policy, "critic": critic}
        self._collector = self._build_collector()
        self._updater = Updater(
            models=models,
            policy=policy,
            critic=critic,
            config=config.ppo,
            temperature=config.rewards.temperature,
            batch_size=args.per_device_train_batch_size,
            rank=self._rank,
            world_size=self._world_size,
            seed=args.seed,
            precision=self._precision,
            dtype=self._dtype,
            device=args.device,
        )

    def _build_collector(self) -> Collector:
        config = self._config.rewards
        pad_id = self._tokenizer.pad_token_id
        sampling = Sampling(
            stop_ids=self._models.stop_ids,
            pad_id=0 if pad_id is None else pad_id,
            response_length=config.response_length,
            temperature=config.temperature,
            beat=WATCHDOG.beat,
        )
        generator = build_generator(
            self._config.engine,
            sampling,
            batch_size=self._args.per_device_eval_batch_size,
            precision=self._precision,
            dtype=self._dtype,
            device=self._args.device,
            is_main=self._rank == 0,
        )
        return Collector(
            models=self._models,
            generator=generator,
            rewards=self._rewards,
            tokenizer=self._tokenizer,
            response_length=config.response_length,
            temperature=config.temperature,
            batch_size=self._args.per_device_eval_batch_size,
            seed=self._args.seed,
            device=self._args.device,
            precision=self._precision,
            progress=self.progress,
        )

    def train(self, resume_from: Path | None) -> None:
        """Train to the end, from the beginning or from a checkpoint; every process must call.

        Raises:
            ConfigError: A reward failed.
            DivergedError: A gradient is not finite, or policy and reference are not the same before the first update.
        """
        if resume_from is not None:
            self.state = load_state(resume_from, self._learners)
        self._first_iteration = self.state.iteration
        self._metrics.rewind(self.state.step)
        # Those of the checkpoint's own step were answered before it was saved.
        self._samples.rewind(self.state.step)
        schedule, args = self.schedule, self._args
        self.progress.start(schedule.num_steps, self.state.step)
        try:
            if resume_from is None and args.eval_on_start:
                self._answer_samples()
            for iteration in range(self.state.iteration, schedule.num_iterations):
                figures = self._run_iteration(iteration)
                self.progress.advance(self.state.step)
                if iteration == 0 or schedule.is_due(args.logging_steps, iteration):
                    self._log("train", figures)
                if args.eval_strategy != "no" and schedule.is_due(args.eval_steps or 1, iteration):
                    self._answer_samples()
                if args.save_strategy != "no" and schedule.is_due(args.save_steps, iteration):
                    self._save()
        finally:
            self.progress.stop()

    def _run_iteration(self, iteration: int) -> dict[str, Any]:
        began, state, schedule = time.perf_counter(), self.state, self.schedule
        rollout, seconds = self._collect(iteration)
        if iteration == 0:
            self.progress.say(verify_first_rollout(rollout, self._dtype))
        if iteration == self._first_iteration:
            self.progress.say(verify_engine(rollout, self._collector.generator, self._dtype))
        price = state.kl_coef
        targets = compute_targets(rollout, self._config.ppo, self._config.rewards.missing_eos_penalty or 0.0, price)
        rollout = dataclasses.replace(rollout, advantages=targets.advantages, returns=targets.returns)
        figures = describe_rollout(rollout, self._reward_names(), targets.total) | describe_values(rollout)

        updating = time.perf_counter()
        policy_steps = self._updater.update_policy(rollout, iteration)
        updated = time.perf_counter()
        critic_steps = self._updater.update_critic(rollout, iteration)
        ended = time.perf_counter()

        controller = self._control_kl(figures["objective/kl_seq"], len(rollout))
        num_tokens = rollout.num_tokens + sum(len(prompt.input_ids) for prompt in rollout.prompts)
        self.state = PPOState(
            iteration=iteration + 1,
            step=(iteration + 1) * schedule.steps_per_iteration,
            num_answers=state.num_answers + len(rollout),
            kl_coef=controller,
            num_tokens=state.num_tokens + num_tokens,
            num_target_tokens=state.num_target_tokens + rollout.num_tokens,
            seconds=state.seconds + ended - began,
        )
        policy = average_steps("policy", policy_steps)
        return {
            "loss": policy["policy/loss"],
            "learning_rate": policy["policy/lr"],
            "grad_norm": policy.get("policy/grad_norm"),
            **figures,
            "objective/kl_coef": price,
            **policy,
            **average_steps("value", critic_steps),
            "rollout/tokens_per_s": rollout.num_tokens / max(seconds["time/generate"], 1e-9),
            **seconds,
            "time/update_policy": updated - updating,
            "time/update_critic": ended - updated,
            "tokens_per_second": num_tokens / (ended - began),
            "target_tokens_per_second": rollout.num_tokens / (ended - began),
        }

    def _collect(self, iteration: int) -> tuple[Rollout, dict[str, float]]:
        """The answers of all processes; which one sampled an answer changes nothing of it."""
        count, num_prompts = self.schedule.answers_per_iteration, len(self._prompts.train)
        first = iteration * count
        chosen = choose_prompts(num_prompts, first, count, self._args.seed)
        mine = range(self._rank, count, self._world_size)
        rollout, seconds = self._collector.collect(
            [self._prompts.train[chosen[row]] for row in mine], [first + row for row in mine]
        )
        return share(rollout, self._world_size), seconds

    def _control_kl(self, kl_per_sequence: float, num_answers: int) -> float:
        config = self._config.ppo
        controller = KLController(
            self.state.kl_coef, target_per_sequence=config.kl_target_per_sequence, horizon=config.kl_horizon
        )
        controller.update(kl_per_sequence, num_answers)
        return controller.kl_coef

    def _log(self, kind: str, figures: dict[str, Any]) -> None:
        state = self.state
        event = {
            "kind": kind,
            "step": state.step,
            "iteration": state.iteration,
            "epoch": state.num_answers / len(self._prompts.train),
            **figures,
            "num_answers": state.num_answers,
            "num_tokens": state.num_tokens,
            "num_target_tokens": state.num_target_tokens,
            "memory_bytes": read_peak_memory(),
            "seconds": state.seconds,
        }
        self._metrics.write(event)
        self.progress.show(event)

    def _answer_samples(self) -> None:
        """Answer a few fixed prompts, held-out ones where there are any, and write what the answers are worth.

        Always at the same random numbers, so that what changes is the policy.
        """
        rows = list(self._prompts.eval or self._prompts.train)[: self._config.evaluation.num_sample_prompts]
        if not rows or self._rank != 0:
            return
        answers, texts = self._collector.answer(rows, range(len(rows)))
        for at, (row, text) in enumerate(zip(rows, texts, strict=True)):
            sample = Sample(
                prompt=str(self._tokenizer.decode(row.input_ids)),
                completion=text,
                reference=None,
                stopped=bool(answers.finished[at]),
                num_tokens=int(answers.lengths[at]),
            )
            self._samples.write({"step": self.state.step, **asdict(sample), "reward": float(answers.scores[at])})
        figures = {
            "eval_reward": float(answers.scores.mean()),
            "eval_stop_rate": float(answers.finished.float().mean()),
            "eval_mean_sample_tokens": float(answers.lengths.float().mean()),
        }
        self._log("eval", figures)

    def _save(self) -> None:
        if self._rank == 0:
            batch = {key: getattr(self._args, key) for key in BATCH_KEYS}
            save_state(self._output_dir, self.state, self._learners, world_size=self._world_size, **batch)
            kept = self._config.checkpoints.save_keep_steps
            rotate(self._output_dir, self._args.save_total_limit, (), kept)
        if self._world_size > 1:
            distributed.barrier()

    def _precision(self) -> Any:
        device = self._args.device.type
        is_half = self._dtype == torch.bfloat16
        return torch.autocast(device, torch.bfloat16) if is_half else contextlib.nullcontext()

    def _reward_names(self) -> Sequence[str]:
        return [*self._rewards.functions, *(["reward_model"] if self._rewards.model is not None else [])]


def check_launch(engine: str) -> None:
    """Refuse a launch that shards weights, which this stage does not do.

    Raises:
        ConfigError: FSDP or DeepSpeed was asked for.
    """
    if engine:
        found = f"the launch file asks for {engine}, and PPO's weights are not sharded here"
        remedy = "use accelerate_configs/ddp.yaml, with an adapter (`use_peft: true`) where memory is short"
        raise ConfigError(Problem("launch", found, remedy))


def build_exporter(models: ActorCritic, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase) -> Trainer:
    """What ``export_model`` takes: upstream's trainer around the finished policy, which saves and uploads it."""
    exporting = copy.copy(args)
    # Upstream asks for held-out data where there is something to evaluate.
    exporting.eval_strategy = IntervalStrategy.NO
    return Trainer(model=models.drop_critic(), args=exporting, processing_class=tokenizer)

"""Training loop of PPO, RLOO and GRPO: rollouts, advantages, updates of policy and critic."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from accelerate import PartialState
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.data.prompts import PromptData, PromptRow
from recipes_lib.errors import PreemptedError, UserError
from recipes_lib.rl.collect import Collector
from recipes_lib.rl.engines.engine import EngineGuard
from recipes_lib.rl.methods import GroupMethod, Method, PPOMethod
from recipes_lib.rl.models import ActorCritic
from recipes_lib.rl.monitor import AnswerWatch, Figures, describe_rollout, describe_samples, verify_first_rollout
from recipes_lib.rl.objectives import adapt_kl_coef, find_flat_groups
from recipes_lib.rl.rewards import RewardGuard, Rewards
from recipes_lib.rl.rollout import Rollout, join, share
from recipes_lib.rl.rollout_schedule import choose_prompts
from recipes_lib.rl.state import RLState, load_state, stage_state
from recipes_lib.rl.update import Learner, UpdateGuard, Updater
from recipes_lib.stopping import STOP
from recipes_lib.training.checkpoints.manifest import STAGING
from recipes_lib.training.checkpoints.model_layout import save_description
from recipes_lib.training.checkpoints.saver import CheckpointSaver, Staged, count_bytes
from recipes_lib.training.evaluation.samples import SAMPLES_FILE
from recipes_lib.training.guards.preemption import agreeing_on_stop, close_preempted, stop_if_agreed
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.monitoring.callbacks import Trackers
from recipes_lib.training.monitoring.metrics import METRICS_FILE, MetricsWriter, read_peak_memory
from recipes_lib.training.monitoring.progress import TrainingProgress, build_progress
from recipes_lib.training.optim.optimizers import report_optimizer
from recipes_lib.training.trainers.arguments import get_rounding_dtype

_COUNTS: Final = ("iteration", "num_answers", "num_tokens", "num_target_tokens", "seconds")


class RunLog:
    """Log files, trackers and progress display of a run; only the main process writes.

    Attributes:
        progress: Progress display of the terminal.
        samples: Writer of ``samples.jsonl``.
        trackers: Trackers of the run.
    """

    def __init__(
        self, args: TrainingArguments, model: Any, tokenizer: PreTrainedTokenizerBase, *, num_answers: int
    ) -> None:
        """Open the log files without writing.

        Args:
            args: Output directory and trackers.
            model: Policy, whose configuration the trackers record.
            tokenizer: The policy's tokenizer.
            num_answers: Answers per epoch of prompts.
        """
        output_dir, is_main = Path(str(args.output_dir)), args.process_index == 0
        self.progress: TrainingProgress = build_progress(is_main=is_main)
        self._metrics = MetricsWriter(output_dir / METRICS_FILE, is_main=is_main)
        self.samples = MetricsWriter(output_dir / SAMPLES_FILE, is_main=is_main)
        self.trackers = Trackers(args, model, tokenizer, self.progress.say)
        self._num_answers = num_answers

    def begin(self, state: RLState, num_steps: int) -> None:
        """Resume from the state of a run of ``num_steps`` steps, and drop later records.

        Samples of an interrupted evaluation are dropped too, because it runs again.
        """
        for writer in (self._metrics, self.samples):
            writer.rewind(state.step, is_evaluated=state.evaluated_step == state.step)
        self.progress.start(num_steps, state.step)
        self.trackers.begin(num_steps, state.step)

    def write(self, kind: str, state: RLState, figures: Mapping[str, Any]) -> None:
        """Write metrics of ``kind`` ``train`` or ``eval`` for a state."""
        counts = {name: getattr(state, name) for name in _COUNTS}
        counts |= {"epoch": state.num_answers / self._num_answers, **figures, "memory_bytes": read_peak_memory()}
        event = {"kind": kind, "step": state.step, **counts}
        self._metrics.write(event)
        self.progress.show(event)
        self.trackers.log(state.step, counts)


class PolicyTrainer:
    """Trains a policy, and its critic if the method has one.

    Prompts, answers and minibatches are functions of ``seed`` and the iteration, independent of the number of processes
    and of earlier random draws. Therefore a stopped run resumes with the same results.

    Attributes:
        method: Schedule, advantages and objective of PPO, RLOO or GRPO.
        state: Progress of the run after its last finished iteration.
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
            config: Configuration of the run.
            args: Arguments from ``build_training_arguments``, which initialises the process group.
            models: Models, loaded and placed.
            rewards: Reward functions and reward model.
            prompts: Prompts of training and evaluation.
            tokenizer: The policy's tokenizer.

        Raises:
            ConfigError: As ``PPOMethod`` and ``GroupMethod``.
        """
        self._config, self._args, self._models = config, args, models
        self._rewards, self._prompts, self._tokenizer = rewards, prompts, tokenizer
        self._rank, self._world_size = int(args.process_index), int(args.world_size)
        self._dtype = get_rounding_dtype(models.policy, args)
        method = PPOMethod if config.recipe == "ppo" else GroupMethod
        self.method: Method = method(config, len(prompts.train), self._world_size)
        self.schedule = self.method.schedule
        # Positions in the training set of the prompts of a range of answers.
        self._choose = functools.partial(choose_prompts, len(prompts.train), seed=args.seed, group=self.schedule.group)
        self.state = RLState(kl_coef=config.ppo.kl_coef)
        self._log = RunLog(args, models.policy, tokenizer, num_answers=len(prompts.train) * self.schedule.group)
        progress, say = self._log.progress, self._log.progress.say
        self._saved_step = 0
        self._output_dir = Path(str(args.output_dir))
        self._saver = CheckpointSaver(args, say, engine="FSDP" if models.is_sharded else "")
        self._guard = UpdateGuard(self._output_dir, lambda number: self._choose(number, 1)[0])
        self._watch = AnswerWatch(say)
        self._reward_guard = RewardGuard(config.rewards.max_zero_std_rollouts, say)
        self._learners = self._build_learners()
        for name, learner in self._learners.items():
            for line in report_optimizer(learner.optimizer, models.policy, args):
                say(f"{name}: {line}")
        self._collector = Collector(config, args, models, rewards, tokenizer, progress, prompts.max_length)
        self._engine_guard = EngineGuard(self._collector.generator, self.method.objective, self._dtype, say)
        self._sample_prompts = (prompts.eval or prompts.train)[: config.evaluation.num_sample_prompts]
        precision = self._collector.precision
        self._updater = Updater(models, self._learners, self.method, config, args, precision, self._guard, progress)

    def _build_learners(self) -> dict[str, Learner]:
        """Build the learner of the policy and, if there is one, of the critic."""
        models, rate = self._models, self._args.learning_rate
        build = functools.partial(Learner, args=self._args, schedule=self.schedule)
        learners = {"policy": build("policy", models.policy, models.policy_parameters(), learning_rate=rate)}
        if models.critic is not None:
            trunk, rate = models.policy if models.is_shared else models.critic, self._config.critic.critic_learning_rate
            learners["critic"] = build("critic", trunk, models.critic_parameters(), learning_rate=rate)
        return learners

    def train(self, resume_from: Path | None) -> None:
        """Train to the end, from the start or from a checkpoint; every process must call.

        Raises:
            ConfigError: A reward function or an engine failed, or the disk is too small for the checkpoints.
            DivergedError: As ``UpdateGuard``, ``RewardGuard`` and ``EngineGuard``; or policy and reference differ
                before the first update.
            PreemptedError: Any process has a stop request; a checkpoint of the last finished iteration is complete.
        """
        with STOP.deferred(), WATCHDOG.watching(self._output_dir, is_main=self._rank == 0):
            try:
                self._begin(resume_from)
                for iteration in range(self.state.iteration, self.schedule.num_iterations):
                    # Weights have not changed since the last iteration: a stop here or during sampling loses no update.
                    stop_if_agreed()
                    self._saver.raise_failure()
                    self._run_iteration(iteration)
                self._finish_saving()
                # A rank that received a signal during the last save must not leave the others in a collective.
                stop_if_agreed()
            except PreemptedError as request:
                self._save_last()
                raise close_preempted(request, step=self.state.step, saved_step=self._saved_step) from None
            finally:
                self._collector.close()
                self._saver.settle()
                self._log.progress.stop()
        self._log.trackers.end()

    def _begin(self, resume_from: Path | None) -> None:
        """Resume from a checkpoint, and run its evaluation if that was interrupted; or start the run."""
        if resume_from is not None:
            self.state = load_state(resume_from, self._learners)
            self._saved_step = self.state.step
        self._reward_guard.state |= self.state.rewards
        self._watch.state |= self.state.watch
        last, args = self.state.iteration - 1, self._args
        is_due = args.eval_on_start
        if last >= 0:
            is_due = self.schedule.is_strategy_due(args.eval_strategy, args.eval_steps or 1, last)
        self._log.begin(self.state, self.schedule.num_steps)
        if is_due and self.state.evaluated_step != self.state.step:
            self._evaluate()

    def _run_iteration(self, iteration: int) -> None:
        """Train one iteration, and run the evaluation, logging and saving that are due after it."""
        args = self._args
        figures = self._learn(iteration)
        self._log.progress.advance(self.state.step)
        WATCHDOG.enter("the work between two steps")
        if iteration == 0 and args.save_strategy != SaveStrategy.NO:
            self._dry_run()
        if self._logs(iteration):
            self._log.write("train", self.state, figures)
            self._watch.check(figures, self.state.step)
            self.state.watch = self._watch.state
        if self.schedule.is_strategy_due(args.eval_strategy, args.eval_steps or 1, iteration):
            self._evaluate()
        if self.schedule.is_strategy_due(args.save_strategy, args.save_steps, iteration):
            self._save()

    def _logs(self, iteration: int) -> bool:
        """Whether metrics are written after an iteration; always after the first."""
        return iteration == 0 or self.schedule.is_due(self._args.logging_steps, iteration)

    def _learn(self, iteration: int) -> dict[str, Any]:
        """Collect answers, update policy and critic, and return all metrics."""
        began, state, schedule = time.perf_counter(), self.state, self.schedule
        rollout, sampling, num_answers, num_tokens = self._collect()
        if iteration == 0 and self._models.has_reference:
            self._log.progress.say(verify_first_rollout(rollout, self._dtype))
        self._engine_guard.check(rollout, step=state.step + 1)
        kl_coef = state.kl_coef
        estimate = self.method.estimate(rollout, kl_coef)
        # Before the updates: a rollout without signal must not change the weights.
        self._reward_guard.check(estimate.rewards, step=state.step + 1)
        figures = describe_rollout(rollout, self._rewards.names, estimate.total, self.method.objective)
        rollout = estimate.rollout

        updating = time.perf_counter()
        is_warm = state.step >= schedule.num_idle_steps
        # The entropy needs memory for another chunk of logits, so it is computed only where it is logged.
        with_entropy = self._logs(iteration)
        policy_steps = self._updater.update_policy(rollout, iteration, with_entropy=with_entropy) if is_warm else []
        updated = time.perf_counter()
        critic_steps = self._updater.update_critic(rollout, iteration)
        ended = time.perf_counter()

        # During critic warm-up the policy equals the reference, so its KL divergence must not change the coefficient.
        kl, ppo = figures["objective/kl_seq"], self._config.ppo
        next_kl_coef = adapt_kl_coef(kl_coef, kl, len(rollout), ppo) if is_warm else kl_coef
        if not self._models.has_reference:
            # The policy itself stands in for the reference, so that they would always be 0.
            figures = {name: value for name, value in figures.items() if not name.startswith("objective/kl_")}
        self.state = dataclasses.replace(
            state,
            iteration=iteration + 1,
            step=schedule.count_steps(iteration + 1),
            num_answers=state.num_answers + num_answers,
            kl_coef=next_kl_coef,
            num_tokens=state.num_tokens + num_tokens,
            num_target_tokens=state.num_target_tokens + rollout.num_targets,
            seconds=state.seconds + ended - began,
            rewards=dict(self._reward_guard.state),
        )
        updates = self.method.describe(estimate, policy_steps, critic_steps)
        return {
            "loss": updates.get("policy/loss"),
            "learning_rate": updates.get("policy/lr"),
            "grad_norm": updates.get("policy/grad_norm"),
            **figures,
            **({} if self._models.critic is None else {"objective/kl_coef": kl_coef}),
            **updates,
            **sampling,
            "time/update_policy": updated - updating,
            "time/update_critic": ended - updated,
            "tokens_per_second": num_tokens / (ended - began),
            "target_tokens_per_second": rollout.num_targets / (ended - began),
        }

    def _collect(self) -> tuple[Rollout, Figures, int, int]:
        """Return the answers of an iteration, metrics of sampling, and the numbers of sampled answers and tokens.

        With dynamic sampling (``max_num_gen_batches`` above 1), batches are sampled until there are enough groups with
        different rewards, or the maximum number of batches is reached; then flat groups fill the rest.
        """
        count, group = self.schedule.answers_per_iteration, self.schedule.group
        limit = self._config.rewards.max_num_gen_batches
        batches: list[Rollout] = []
        is_flat: list[bool] = []
        seconds: Figures = {}
        while len(batches) < limit and (missing := count - group * is_flat.count(False)) > 0:
            first = self.state.num_answers + sum(map(len, batches))
            batch, durations = self._sample(first, missing)
            batches.append(batch)
            seconds = {name: value + seconds.get(name, 0.0) for name, value in durations.items()}
            if limit > 1:
                is_flat += find_flat_groups(self.method.estimate(batch, self.state.kl_coef).rewards).tolist()
        rollout = join(batches)
        num_answers = len(rollout)
        num_tokens = rollout.num_tokens + sum(len(prompt.input_ids) for prompt in rollout.prompts)
        figures: Figures = {"rollout/tokens_per_s": rollout.num_tokens / max(seconds["time/generate"], 1e-9), **seconds}
        if limit > 1:
            num_dropped = len(is_flat) - count // group
            figures |= {"rollout/num_gen_batches": len(batches), "rollout/num_groups_left_out": num_dropped}
            # Groups that are not flat first (False sorts before True), then in the order of sampling again.
            chosen = sorted(sorted(range(len(is_flat)), key=is_flat.__getitem__)[: count // group])
            rollout = rollout.take([number * group + place for number in chosen for place in range(group)])
        return rollout, figures, num_answers, num_tokens

    def _sample(self, first: int, count: int) -> tuple[Rollout, dict[str, float]]:
        """Return the answers of all processes to the next prompts, which do not depend on the sampling process."""
        prompts, numbers = self._choose_prompts(first, count)
        is_last = self.state.iteration + 1 == self.schedule.num_iterations
        following = None if is_last else self._choose_prompts(first + count, count)
        # A rank that leaves by a stop request waits at the end for the others, until they have their answers.
        with self._saving_on_failure(), agreeing_on_stop():
            own, seconds = self._collector.collect(prompts, numbers, following=following)
        rollout = share(own, count)
        # Here, because dynamic sampling may drop non-finite answers later.
        self._guard.check_rollout(rollout, step=self.state.step + 1)
        return rollout, seconds

    def _choose_prompts(self, first: int, count: int) -> tuple[list[PromptRow], list[int]]:
        """Return prompts and numbers of this process's share of the ``count`` answers from number ``first``."""
        chosen, own = self._choose(first, count), self._choose_own(count)
        # Answers of one group share their prompt, which is read from the disk once.
        prompts = {at: self._prompts.train[at] for at in {chosen[row] for row in own}}
        return [prompts[chosen[row]] for row in own], [first + row for row in own]

    def _choose_own(self, count: int) -> list[int]:
        """Return which of ``count`` answers this process samples; equally many on each, the last may be repeated."""
        rounds = math.ceil(count / self._world_size)
        return [min(row, count - 1) for row in range(self._rank, rounds * self._world_size, self._world_size)]

    def _evaluate(self) -> None:
        """Answer the sample prompts; an evaluation that a stop request interrupts runs again on resume."""
        WATCHDOG.enter("an evaluation")
        self._collector.settle()
        prompts, step = self._sample_prompts, self.state.step
        if prompts:
            own = self._choose_own(len(prompts))
            with self._saving_on_failure(), agreeing_on_stop():
                # The same random numbers in each evaluation, so that only the policy changes.
                answers = self._collector.answer([prompts[row] for row in own], own)
            answers = share(answers, len(prompts))
            texts = self._collector.read(answers)
            samples, figures = describe_samples(answers, texts, self._tokenizer, self._rewards.names)
            for sample in samples:
                self._log.samples.write({"step": step, **sample})
            self._log.write("eval", self.state, figures)
        self.state.evaluated_step = step

    @contextmanager
    def _saving_on_failure(self) -> Iterator[None]:
        """Save the last finished iteration if a reward or an engine fails, as when its server is down."""
        try:
            yield
        except UserError:
            # A save is collective, and other processes have not failed.
            if self._world_size == 1:
                self._save_last()
            raise

    def _save(self) -> None:
        self._saver.save(self._stage())
        self._saved_step = self.state.step

    def _stage(self, folder: str = STAGING, *, compares: bool = False) -> Staged:
        staged = stage_state(self._saver, self.state, self._learners, folder, compares=compares)
        # Resuming does not need them: for `recipes export`, as an earlier policy may be the better one.
        if self._saver.is_main:
            save_description(staged.folder, self._models.policy, self._tokenizer)
        return staged

    def _dry_run(self) -> None:
        self._saver.dry_run(
            functools.partial(self._stage, compares=True),
            lambda: count_bytes(*((each.parameters, each.optimizer.state_dict()) for each in self._learners.values())),
            num_steps=self.schedule.num_steps,
            num_epochs=self.schedule.num_epochs,
            model_bytes=count_bytes(self._learners["policy"].parameters),
        )

    def _save_last(self) -> None:
        """Save the last finished iteration if it is not saved yet; every process must call."""
        if self.state.step > self._saved_step and self._args.save_strategy != SaveStrategy.NO:
            self._save()
        self._finish_saving()

    def _finish_saving(self) -> None:
        """Wait on all ranks until the last checkpoint is complete: launchers end all ranks when the first one exits."""
        self._saver.finish()
        PartialState().wait_for_everyone()

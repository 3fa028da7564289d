"""Checkpoints of PPO, RLOO and GRPO: state saved after an iteration and restored on resume; the final models."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import IntervalStrategy, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.errors import DataError, Problem
from recipes_lib.files import fsync, inherit_read_permission, read_record, remove_unfinished_weights
from recipes_lib.models.adapters.roles import drop_scorers
from recipes_lib.models.heads.scoring import RewardStatistics, store_reward_statistics
from recipes_lib.rl.models import ActorCritic
from recipes_lib.rl.update import Learner
from recipes_lib.training.checkpoints.checkpointing import CheckpointingTrainer
from recipes_lib.training.checkpoints.manifest import STAGING
from recipes_lib.training.checkpoints.model_layout import load_trained
from recipes_lib.training.checkpoints.saver import CheckpointSaver, Staged, Task, compare_state, write_state
from recipes_lib.training.checkpoints.sharded import Trained, gather_trained_state

_STATE: Final = "ppo_state.json"


@dataclass(slots=True)
class RLState:
    """Progress of a run; all random numbers are functions of it and the seed.

    Attributes:
        iteration: Finished iterations.
        step: Finished optimizer steps.
        num_answers: Sampled answers; the number of the next answer, and so its prompt, follows from it.
        kl_coef: KL coefficient: reward subtracted for each nat of KL divergence from the reference.
        num_tokens: Tokens of prompts and answers.
        num_target_tokens: Tokens of scored answers, which contribute to the loss.
        seconds: Training time.
        rewards: ``RewardGuard.state``.
        evaluated_step: Step of the last finished evaluation, ``step`` if it was after this iteration; -1 before the
            first.
        watch: ``AnswerWatch.state``.
    """

    iteration: int = 0
    step: int = 0
    num_answers: int = 0
    kl_coef: float = 0.0
    num_tokens: int = 0
    num_target_tokens: int = 0
    seconds: float = 0.0
    rewards: dict[str, Any] = field(default_factory=dict)
    evaluated_step: int = -1
    watch: dict[str, Any] = field(default_factory=dict)


def stage_state(
    saver: CheckpointSaver,
    state: RLState,
    learners: Mapping[str, Learner],
    folder: str = STAGING,
    *,
    compares: bool = False,
) -> Staged:
    """Write a checkpoint: weights, optimizer and schedule of each learner, and the counts; every process must call.

    Of sharded learners, every process writes its own shards.

    Args:
        saver: Saver of the run's checkpoints.
        state: Progress after an iteration.
        learners: Learners by name, replicated or sharded.
        folder: Name of the staging folder.
        compares: Whether verification also compares the files with the learners, bit by bit.

    Returns:
        The staged files, with the tasks that write and verify them.
    """
    staged, parts = saver.open(state.step, folder), learners.values()
    if saver.is_main or any(learner.layout.is_shared for learner in parts):
        held = [(dict(learner.parameters), dict(learner.optimizer.state)) for learner in parts]
        saver.decide_to_copy(held)
    tasks: list[Task] = []
    for name, learner in learners.items():
        tasks += learner.layout.save_trained(staged / name, Trained(learner.parameters, learner.optimizer), saver)
    if saver.is_main:
        staged.mkdir(parents=True, exist_ok=True)
        (staged / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        for name, learner in learners.items():
            write_state(learner.scheduler.state_dict(), staged / f"{name}_scheduler.pt")

    def verify() -> None:
        for name, learner in learners.items():
            shapes = {key: parameter.shape for key, parameter in learner.parameters.items()}
            learner.layout.verify_trained(staged / name, shapes)
            if compares:
                learner.layout.compare_trained(staged / name, Trained(learner.parameters, learner.optimizer))
            if compares and saver.is_main:
                compare_state(staged / f"{name}_scheduler.pt")

    return Staged(staged, state.step, tasks, verify)


def load_state(folder: Path, learners: Mapping[str, Learner]) -> RLState:
    """Restore the learners from a checkpoint, and return the progress of the run; every process must call.

    World size and sharding may differ from those of the checkpoint.

    Raises:
        DataError: Its weights have other names or shapes than the learners', or its progress is unreadable.
    """
    for name, learner in learners.items():
        load_trained(folder / name, Trained(learner.parameters, learner.optimizer))
        schedule = torch.load(folder / f"{name}_scheduler.pt", map_location="cpu", weights_only=True)
        learner.scheduler.load_state_dict(schedule)
    try:
        return RLState(**read_record(folder / _STATE))
    except TypeError as error:
        found = "has other fields than this version writes"
        raise DataError(Problem(str(folder / _STATE), found, "delete the checkpoint")) from error


CRITIC_FOLDER: Final = "critic"
"""Folder of the saved critic, under ``output_dir``."""


def build_exporter(
    models: ActorCritic, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> CheckpointingTrainer:
    """Build the trainer for ``export_model`` around the final policy, which gathers and saves sharded weights."""
    exporting = copy.copy(args)
    # transformers requires an evaluation dataset if evaluation is configured.
    exporting.eval_strategy = IntervalStrategy.NO
    if models.is_shared:
        # The critic's and reward model's adapters are not exported.
        drop_scorers(models.policy)
    return CheckpointingTrainer(model=models.policy, args=exporting, processing_class=tokenizer)


def save_critic(critic: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, *, is_main: bool = True) -> None:
    """Save a critic with full weights and its tokenizer; every process must call.

    The folder is a ``...ForSequenceClassification`` with one label. Its head has no bias: the critic's bias is stored
    as the statistics of a reward model, so that (score - ``reward_mean``) / ``reward_std`` is the value. A sharded
    critic is gathered tensor by tensor, on the host of the main process only.

    Args:
        critic: A separate critic from ``load_actor_critic``, not an adapter.
        tokenizer: The policy's tokenizer.
        folder: Destination folder.
        is_main: Whether this process writes.

    Source: ``tests/rl/test_export.py``, which reads it as OpenRLHF and verl do.
    """
    weights = gather_trained_state(critic)
    if not is_main:
        return
    remove_unfinished_weights(folder)
    bias = float(weights.pop("score.bias", 0.0))
    store_reward_statistics(critic, RewardStatistics(mean=-bias, std=1.0))
    critic.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        inherit_read_permission(file)
        fsync(file)

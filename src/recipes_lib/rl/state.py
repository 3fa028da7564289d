"""Checkpoints of PPO, RLOO and GRPO: state saved after an iteration and restored on resume; the final models."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import IntervalStrategy, PreTrainedTokenizerBase, TrainingArguments

from recipes_lib.errors import DataError, Problem
from recipes_lib.files import read_record
from recipes_lib.models.heads.scoring import RewardStatistics, store_reward_statistics
from recipes_lib.models.saved_weights import verify_weights
from recipes_lib.rl.models import ActorCritic
from recipes_lib.rl.update import Learner
from recipes_lib.training.checkpoints.checkpointing import CheckpointingTrainer
from recipes_lib.training.checkpoints.manifest import STAGING
from recipes_lib.training.checkpoints.saver import (
    CheckpointSaver,
    Staged,
    Task,
    compare_state,
    compare_weights,
    write_state,
)
from recipes_lib.training.checkpoints.sharded import (
    MODEL_SHARDS,
    compare_own_shards,
    copy_model_shards,
    copy_optimizer_shards,
    gather_trained_state,
    load_model_shards,
    load_optimizer_shards,
    read_trained_state,
    verify_shards,
)

_STATE: Final = "ppo_state.json"


@dataclass(slots=True)
class PPOState:
    """Where a run stands; every random choice follows from it and the seed.

    Attributes:
        iteration: Iterations that are done.
        step: Optimizer steps that they took.
        num_answers: Answers that were sampled: prompts resume from there.
        kl_coef: KL coefficient: reward subtracted for each nat of KL.
        num_tokens: Tokens of prompts and answers so far.
        num_target_tokens: Tokens of answers so far.
        seconds: Training time so far.
        rewards: From ``RewardGuard.export``.
        evaluated_step: After which prompts were answered last as an evaluation; -1: after none.
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


def stage_state(
    saver: CheckpointSaver, state: PPOState, learners: Mapping[str, Learner], folder: str = STAGING
) -> Staged:
    """Put a checkpoint together: weights, optimizer and schedule of each learner, and the counts; every process must.

    Where learners are sharded, every process writes the shards that it holds.

    Args:
        saver: Saves it.
        state: After an iteration.
        learners: By name; all processes hold the same, or a share of each.
        folder: What it is put together in.
    """
    staged = saver.open(state.step, folder)
    # Of what is not sharded the main process alone writes.
    own = {name: learner for name, learner in learners.items() if learner.is_sharded or saver.is_main}
    is_shared = any(learner.is_sharded for learner in learners.values())
    trained = {
        name: read_trained_state(learner.model) if learner.is_sharded else dict(learner.parameters)
        for name, learner in own.items()
    }
    shapes = {name: {key: value.shape for key, value in part.items()} for name, part in trained.items()}
    if own:
        states = [dict(learner.optimizer.state) for learner in own.values()]
        saver.decide_to_copy(lambda: (trained, states), is_shared=is_shared)
    tasks: list[Task] = []
    for name, learner in own.items():
        if learner.is_sharded:
            named = dict(learner.model.named_parameters())
            tasks.append(copy_model_shards(staged / name, learner.model, saver))
            tasks.append(copy_optimizer_shards(staged / name, named, learner.optimizer, saver))
        else:
            copies = saver.take({"weights": trained[name], "states": learner.optimizer.state_dict()})
            tasks.append(partial(_write_weights, copies["weights"], staged / f"{name}.safetensors"))
            tasks.append(partial(write_state, copies["states"], staged / f"{name}_optimizer.pt"))
    if saver.is_main:
        staged.mkdir(parents=True, exist_ok=True)
        (staged / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        for name, learner in learners.items():
            write_state(learner.scheduler.state_dict(), staged / f"{name}_scheduler.pt")

    def verify() -> None:
        for name, learner in own.items():
            if learner.is_sharded:
                verify_shards(staged / name, shapes[name])
            else:
                verify_weights(staged, shapes[name], f"{name}.safetensors")

    return Staged(staged, state.step, tasks, verify, is_shared=is_shared)


def compare_own_shards_with_live(folder: Path, learners: Mapping[str, Learner]) -> None:
    """Hold the shards that this process wrote against what they were made from, to the bit.

    Raises:
        BrokenSaveError: A tensor differs.
    """
    for name, learner in learners.items():
        if learner.is_sharded:
            named = dict(learner.model.named_parameters())
            compare_own_shards(folder / name, learner.model, named, learner.optimizer)


def compare_state_with_live(folder: Path, learners: Mapping[str, Learner]) -> None:
    """Hold what the main process wrote of a checkpoint against what it was made from, to the bit.

    Raises:
        BrokenSaveError: A tensor differs, or a state cannot be read without running code.
    """
    for name, learner in learners.items():
        if not learner.is_sharded:
            compare_weights(folder / f"{name}.safetensors", learner.parameters)
            compare_state(folder / f"{name}_optimizer.pt", learner.optimizer.state_dict())
        compare_state(folder / f"{name}_scheduler.pt")


def load_state(folder: Path, learners: Mapping[str, Learner]) -> PPOState:
    """Bring the learners to where a checkpoint left them, and return the counts; every process must call.

    Shards go into any number of processes, sharded or not.

    Raises:
        DataError: It holds other weights than those that are trained.
    """
    for name, learner in learners.items():
        if (folder / name / MODEL_SHARDS).is_dir():
            load_model_shards(folder / name, learner.model)
            load_optimizer_shards(folder / name, dict(learner.model.named_parameters()), learner.optimizer)
        else:
            _load_whole(folder, name, learner)
        learner.scheduler.load_state_dict(_read(folder / f"{name}_scheduler.pt"))
    try:
        return PPOState(**read_record(folder / _STATE))
    except TypeError as error:
        raise DataError(Problem(str(folder / _STATE), "is not as it was written", "delete the checkpoint")) from error


def _load_whole(folder: Path, name: str, learner: Learner) -> None:
    """Read what one process wrote of a learner.

    Raises:
        DataError: As ``load_state``.
    """
    weights = load_file(folder / f"{name}.safetensors")
    if weights.keys() != learner.parameters.keys():
        found = f"it does not hold the weights that the {name} trains"
        raise DataError(Problem(str(folder), found, "delete it, or train what it was saved from"))
    with torch.no_grad():
        for key, parameter in learner.parameters.items():
            parameter.copy_(weights[key])
    learner.optimizer.load_state_dict(_read(folder / f"{name}_optimizer.pt"))


def _read(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _write_weights(weights: Mapping[str, torch.Tensor], file: Path) -> None:
    save_file({name: value.detach().contiguous() for name, value in weights.items()}, file)


CRITIC_FOLDER: Final = "critic"
"""Under ``output_dir``."""


def build_exporter(
    models: ActorCritic, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase
) -> CheckpointingTrainer:
    """What ``export_model`` takes: a trainer around the finished policy, which gathers it if need be and saves it."""
    exporting = copy.copy(args)
    # Upstream asks for held-out data where there is something to evaluate.
    exporting.eval_strategy = IntervalStrategy.NO
    return CheckpointingTrainer(model=models.drop_critic(), args=exporting, processing_class=tokenizer)


def save_critic(critic: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, *, is_main: bool = True) -> None:
    """Save a critic with all of its weights and its tokenizer; every process must call.

    The folder is of a ``...ForSequenceClassification`` with one label. Such a head has no bias: the critic's is kept as
    the statistics of a reward model, whose score less ``reward_mean`` over ``reward_std`` is the value. Where it is
    sharded it is gathered tensor by tensor, on the host of the main process alone.

    Args:
        critic: From ``load_actor_critic``, not an adapter.
        tokenizer: Of the policy.
        folder: Where it goes.
        is_main: Whether this process writes.

    Source: ``tests/rl/test_export.py``, which reads it as OpenRLHF and verl do.
    """
    weights = gather_trained_state(critic)
    if not is_main:
        return
    bias = float(weights.pop("score.bias", 0.0))
    store_reward_statistics(critic, RewardStatistics(mean=-bias, std=1.0))
    critic.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)

"""Rewards: weighted sum of user functions and a reward model, and the guard against rewards without signal."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from recipes_lib.config.schema import RewardsConfig
from recipes_lib.data.prompts import PromptRow
from recipes_lib.errors import ConfigError, DivergedError, Problem, UserError, list_first, reported_at
from recipes_lib.models.heads.scoring import TOO_LONG, Answer, RewardModel, read_positions, read_reward_statistics
from recipes_lib.quantities import pluralize
from recipes_lib.rl.objectives import ROUNDING, find_flat_groups
from recipes_lib.rl.reward_worker import IsolatedFunction, call, describe_error, find_function
from recipes_lib.stopping import StopPendingError

MAX_MODEL_SCORE: Final = 10.0
"""Bound of a reward model's normalised score in standard deviations: scores beyond it are out of distribution."""
MAX_REWARD: Final = 1e15
"""Bound of a function's rewards: sums of their squares over all tokens of a rollout must fit in float32."""
MODEL: Final = "reward_model"
"""Name of the reward model among the rewards."""

_ARGUMENTS: Final = ("prompts", "completions", "completion_ids")
_ISOLATION: Final = "With `reward_timeout`, single answers on which it fails have no reward"
RewardFunction = Callable[..., Sequence[float | None]]


class Scores(NamedTuple):
    """Scores of answers: the weighted sum, and each reward by name; a number or ``None`` per answer.

    ``None`` rewards are excluded from the sum. If all rewards of non-zero weight are ``None``, the answer has no score
    and is excluded from the loss, unlike an answer with a score of 0.
    """

    total: list[float | None]
    parts: dict[str, list[float | None]]


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of a run.

    Attributes:
        functions: User functions by name. Each is called with keyword arguments, all lists: ``prompts``,
            ``completions``, ``completion_ids``, and every other column of the dataset, ``None`` in rows without it. The
            completion of a chat is a list of one message. It returns a number or ``None`` per answer.
        model: Reward model; ``None`` without one.
        weights: Weight of each function, then of the model.

    Source: the interface of ``reward_funcs`` in ``trl.GRPOTrainer``, including ``None`` results.
    """

    functions: Mapping[str, RewardFunction]
    model: RewardModel | None
    weights: Sequence[float]

    @property
    def names(self) -> list[str]:
        """Names of the rewards, in order."""
        return [*self.functions, *([] if self.model is None else [MODEL])]

    def score(
        self, prompts: Sequence[PromptRow], texts: Sequence[str], ids: Sequence[list[int]], finished: Sequence[bool]
    ) -> Scores:
        """Score answers.

        Args:
            prompts: Prompt of each answer.
            texts: Answers without special tokens.
            ids: Tokens of each answer, including its stop token.
            finished: False for truncated answers, after which the reward model reads no end-of-turn token.

        Raises:
            ConfigError: A function failed, or returned anything but one finite number or ``None`` per answer.
            DataError: As ``RewardModel.score``.
        """
        parts: dict[str, list[float | None]] = {
            name: _call(name, function, prompts, texts, ids) for name, function in self.functions.items()
        }
        if self.model is not None:
            pairs = zip((prompt.content for prompt in prompts), texts, strict=True)
            answers: list[Answer] = [
                (prompt, text) if isinstance(prompt, str) else [*prompt, {"role": "assistant", "content": text}]
                for prompt, text in pairs
            ]
            scores = self.model.score(answers, finished=finished, where=[prompt.where for prompt in prompts])
            # Raw scores, as of most models on the Hub, have a scale of their own.
            bound = MAX_MODEL_SCORE if read_reward_statistics(self.model.model) else math.inf
            parts[MODEL] = [min(max(score, -bound), bound) for score in scores]
        return Scores([self._add(column) for column in zip(*parts.values(), strict=True)], parts)

    def _add(self, column: Sequence[float | None]) -> float | None:
        """Return the weighted sum of an answer's rewards; ``None`` if all those of non-zero weight are ``None``."""
        known = [(weight, score) for weight, score in zip(self.weights, column, strict=True) if score is not None]
        return sum(weight * score for weight, score in known) if any(weight for weight, _ in known) else None


def load_rewards(
    config: RewardsConfig,
    device: str,
    shared: RewardModel | None = None,
    place: Callable[[Any], Any] | None = None,
    functions: Mapping[str, RewardFunction] | None = None,
) -> Rewards:
    """Load the reward functions and the reward model of a run.

    Args:
        config: Reward functions, reward model and weights.
        device: Device of a separate reward model.
        shared: Reward model that shares the policy's base model, loaded already; ``None`` without one.
        place: As for ``RewardModel.load``.
        functions: Reward functions, loaded already; ``None`` to load them.

    Raises:
        ConfigError: Functions cannot be imported (all of them are listed), or the reward model cannot be loaded.
    """
    if functions is None:
        functions = load_reward_functions(config.reward_funcs or [], config.reward_timeout)
    model = shared
    if model is None and config.reward_model_name_or_path is not None:
        name, revision = config.reward_model_name_or_path, config.reward_model_revision
        with reported_at("reward_model_name_or_path"):
            model = RewardModel.load(name, revision=revision, device=device, place=place)
    return Rewards(functions, model, config.reward_weights or [1.0] * (len(functions) + (model is not None)))


def load_reward_functions(paths: Sequence[str], seconds: float | None = None) -> dict[str, RewardFunction]:
    """Import reward functions as ``find_function`` does; keys are their names, or paths if another reward has the name.

    Args:
        paths: Import paths of the functions.
        seconds: Time limit of a call, for which each function runs in a separate process; ``None`` to call the function
            in this process, without a limit.

    Raises:
        ConfigError: Functions cannot be imported; with the reason of each.
    """
    functions: dict[str, RewardFunction] = {}
    problems = []
    for path in paths:
        name = path.partition(":")[2].partition("(")[0]
        try:
            with _restored_defaults():
                function: RewardFunction = find_function(path)
            if seconds is not None:
                function = IsolatedFunction(path, seconds, function)
            functions[path if name in {MODEL, *functions} else name] = function
        except (Exception, SystemExit) as error:  # Importing runs the user's code, which may raise anything.
            found = f"{path} cannot be imported: {type(error).__name__}: {error}"
            remedy = "correct it, run from its folder, install it, or put its folder on PYTHONPATH"
            problems.append(Problem("reward_funcs", found, remedy))
    if problems:
        raise ConfigError(*problems)
    return functions


def verify_arguments(functions: Mapping[str, RewardFunction], columns: Collection[str]) -> None:
    """Verify that reward functions take the arguments of their calls: ``prompts`` and so on, and all columns.

    Args:
        functions: User functions by name.
        columns: Columns of the dataset that are passed to them.

    Raises:
        ConfigError: A function lacks a parameter, or requires another one; all such functions are listed.
    """
    given, problems = dict.fromkeys((*columns, *_ARGUMENTS)), []
    for name, function in functions.items():
        try:
            # A decorator may itself give arguments that the wrapped function requires.
            inspect.signature(function, follow_wrapped=False).bind(**given)
        except TypeError as error:
            problems.append(Problem("reward_funcs", f"{name} cannot be called: {error}", _explain_call(given)))
        except ValueError:  # A function that is written in C may have no signature.
            continue
    if problems:
        raise ConfigError(*problems)


def _explain_call(given: Iterable[str]) -> str:
    return f"it gets keyword arguments, all lists: {', '.join(given)}; `**_` takes those that it does not read"


def verify_positions(
    config: PreTrainedConfig, own: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, max_length: int
) -> str:
    """Compare the positions of a reward model with the longest text that it may score; return a warning, or ``""``.

    Args:
        config: Configuration of the reward model.
        own: Tokenizer of the reward model.
        policy: Tokenizer of the policy.
        max_length: Tokens of the longest prompt with its longest answer, by the policy's tokenizer.

    Raises:
        ConfigError: The longest answer does not fit, and both tokenizers have the same vocabulary.
    """
    positions = read_positions(config)
    if max_length <= positions:
        return ""
    found = (
        f"the reward model has {positions:,} positions, and the longest prompt with its answer {max_length:,} tokens"
    )
    if own.get_vocab() == policy.get_vocab():
        raise ConfigError(Problem("reward_model_name_or_path", found, TOO_LONG))
    return f"warning: {found} of the policy; an answer too long for the reward model ends the run: {TOO_LONG}"


@contextmanager
def _restored_defaults() -> Iterator[None]:
    """Restore torch's gradient mode, default dtype and device, which the user's code may set for its own model."""
    dtype = torch.get_default_dtype()
    with torch.enable_grad():  # Its end restores the mode, whatever was set inside.
        yield
    # Not after an error, which ends the run.
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)


def _call(
    name: str, function: RewardFunction, prompts: Sequence[PromptRow], texts: Sequence[str], ids: Sequence[list[int]]
) -> list[float | None]:
    # ``load_prompt_data`` gives all prompts of a run one form and the same columns, so the first one represents all.
    is_chat = not isinstance(prompts[0].content, str)
    # Each answer has copies of its own: functions may change them, such as by ``prompt += completion``.
    given: dict[str, list[Any]] = {
        **{column: [copy.deepcopy(prompt.columns[column]) for prompt in prompts] for column in prompts[0].columns},
        # Last, so that a column of one of these names does not replace them.
        "prompts": [copy.deepcopy(prompt.content) for prompt in prompts],
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if is_chat else list(texts),
        "completion_ids": [list(each) for each in ids],
    }
    try:
        with _restored_defaults():
            scores = call(function, given)
    except (UserError, StopPendingError):  # Of a judge, which names its endpoint, or leaves its requests.
        raise
    except (Exception, SystemExit) as error:  # The function is the user's, and may raise anything.
        places = list_first(dict.fromkeys(prompt.where for prompt in prompts))
        is_limited = isinstance(function, IsolatedFunction)
        # Of the worker's error, the message is the description.
        reason = str(error) if is_limited else describe_error(function, error)
        found = f"{name} failed on {pluralize(len(texts), 'answer')} to {places}: {reason}"
        hint = "A call may need a larger `reward_timeout`" if is_limited else _ISOLATION
        form = "a list of one message" if is_chat else "a text"
        remedy = f"{_explain_call(given)}. Each completion is {form}. {hint}"
        raise ConfigError(Problem("reward_funcs", found, remedy)) from error
    if not isinstance(scores, Sequence) or len(scores) != len(texts):
        found = f"{name} returned {scores!r:.80} for {pluralize(len(texts), 'answer')}"
        raise ConfigError(Problem("reward_funcs", found, "return a list of one number for each"))
    for index, score in enumerate(scores):
        if score is not None and not (isinstance(score, Real) and abs(score) <= MAX_REWARD):  # type: ignore[operator]
            found = f"{name} returned {score!r:.80} for the answer {texts[index]!r:.80} to {prompts[index].where}"
            remedy = f"return finite numbers up to {MAX_REWARD:g}, or None to skip an answer"
            raise ConfigError(Problem("reward_funcs", found, remedy))
    return [None if score is None else float(score) for score in scores]


_REMEDY: Final = (
    "Look at the answers (samples.jsonl), the columns that the rewards read, and response_length; take prompts that "
    "are neither always nor never solved, a higher temperature, or a reward that grades"
)


class RewardGuard:
    """Checks the rewards of every rollout before the updates, with the same result on all processes.

    If all rewards of a group are equal, there is no signal: in RLOO and GRPO every advantage is 0; in PPO whitening
    amplifies the critic's errors. The first rollout of only such groups gives a warning, as do 2, 4, 8, ... in a row.
    After ``limit`` in a row the run ends, unless every answer has the highest reward of the run: then the task counts
    as solved.

    Attributes:
        state: State as JSON values, for checkpoints.

    Source: ``tests/rl/test_reward_guard.py``.
    """

    def __init__(self, limit: int | None, say: Callable[[str], None]) -> None:
        """Start without a rollout.

        Args:
            limit: Number of rollouts without signal in a row at which the run ends; ``None`` for no limit.
            say: Prints a line for the user.
        """
        self._limit, self._say = limit, say
        self.state: dict[str, Any] = {"num_in_a_row": 0, "best": None}

    def check(self, rewards: Tensor, *, step: int) -> None:
        """Check a rollout.

        Args:
            rewards: Rewards of all processes, ``(groups, answers)``; NaN for answers without a score.
            step: Number of the next optimizer step, from 1.

        Raises:
            DivergedError: The last ``limit`` rollouts had no signal.
        """
        known, best = rewards[~rewards.isnan()], self.state["best"]
        if not bool(find_flat_groups(rewards).all()):
            highest = float(known.max())
            self.state = {"num_in_a_row": 0, "best": highest if best is None else max(best, highest)}
            return
        self.state["num_in_a_row"] = num = self.state["num_in_a_row"] + 1
        found = _describe(rewards, known)
        is_solved = best is not None and len(known) > 0 and float(known.min()) >= best - ROUNDING * abs(best)
        if self._limit is not None and num >= self._limit and not is_solved:
            raise DivergedError(
                f"step {step} was stopped before its update: the rewards of {num} rollouts in a row had no signal; in "
                f"this one {found}. {_REMEDY}. To continue regardless, raise max_zero_std_rollouts or set it to null"
            )
        # Powers of two have one bit set.
        if num.bit_count() == 1:
            remedy = "The task seems to be solved: end the run here" if is_solved else _REMEDY
            row = f", for {num} rollouts in a row" if num > 1 else ""
            self._say(f"warning: step {step}: {found}{row}; such rewards give no signal. {remedy}")


def _describe(rewards: Tensor, known: Tensor) -> str:
    """Return a clause that describes the equal rewards of a rollout."""
    if not len(known):
        return f"none of the {rewards.numel():,} answers has a reward that counts in the loss"
    if bool(known.max() - known.min() <= ROUNDING * known.abs().max()):
        return f"all {len(known):,} answers have the same reward, {float(known[0]):.4g}"
    return f"all answers to a prompt have the same reward, for each of {len(rewards):,} prompts"

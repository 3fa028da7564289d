"""Scoring of answers with a reward model in its own chat template, for evaluation and RL."""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from jinja2 import Environment, Template
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices

from recipes_lib.config.schema import ModelConfig, TokensConfig
from recipes_lib.config.tokenization import TEMPLATE_DATE, find_end_tokens, find_prefix, normalise_message
from recipes_lib.errors import ConfigError, DataError, DivergedError, Problem
from recipes_lib.files import read_record
from recipes_lib.models.adapters.lora import load_adapter
from recipes_lib.models.adapters.roles import add_reward
from recipes_lib.models.adapters.saved import find_base
from recipes_lib.models.attention.kernels import choose_kernel
from recipes_lib.models.heads.score_head import add_score_head, load_reward_model
from recipes_lib.models.inference import evaluating, find_device
from recipes_lib.models.loading import load_model_config, load_tokenizer

Message = Mapping[str, Any]
"""Chat message: ``role``, ``content`` and other keys of the template."""

Answer = Sequence[Message] | tuple[str, str]
"""Chat that ends with an assistant message, or a pair of plain prompt and answer."""

SCALE_FILE: Final = "reward_scale.json"
"""File with the statistics of a reward model saved as an adapter, whose folder has no config.json."""
Overlong = Literal["error", "nan"]
"""Result for an input longer than the positions of the model: a ``DataError``, or the score NaN."""
TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
MAX_BATCH_TOKENS = 4096
"""Maximum tokens of a batch, including padding; a longer input is a batch by itself. Without gradients, they need less
memory than the training batches that are planned, as those of the report after training must."""
TOO_LONG: Final = (
    "shorten prompt or answer (in a run: `response_length`, or `max_length` with `overlong: drop`), or take a reward "
    "model with more positions"
)
"""Remedy for answers longer than the positions of the reward model."""


class RewardStatistics(NamedTuple):
    """Mean and standard deviation of the raw scores of reference answers."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class RewardModel:
    """Reward model with its tokenizer.

    A score depends neither on other answers of the batch nor on the tokenizer's ``padding_side`` or padding token. With
    sharded weights, scoring is a collective: every process must score the same answers.

    Attributes:
        model: Model with a score head (``add_score_head``), with or without a PEFT wrapper; or an ``AdapterScorer``.
        tokenizer: Tokenizer of the reward model with its chat template, which may differ from the policy's.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        revision: str | None = None,
        device: str = "cpu",
        place: Callable[[Any], Any] | None = None,
    ) -> RewardModel:
        """Load a saved reward model in evaluation mode and in its saved dtype; an adapter with its base.

        Args:
            name: Folder or Hub id.
            revision: Commit, tag or branch of a Hub model.
            device: Device of the model.
            place: Function that moves the model to its devices, such as by sharding it. Default: ``model.to(device)``.

        Raises:
            ConfigError: It cannot be loaded, its checkpoint has no head, or it is an adapter without statistics.
        """
        saved, config, adapter = find_saved(str(name), revision)
        kernel = choose_kernel(load_model_config(config)[0], device=torch.device(device))
        # For an adapter the base is loaded with any head, which load_adapter replaces by the adapter's.
        model: Any = load_reward_model(config, kernel.implementation, seed=None if adapter is None else 0)
        add_score_head(model)
        if adapter is not None:
            model = load_adapter(model, str(adapter), task_type="SEQ_CLS")
            store_reward_statistics(model, read_adapter_statistics(adapter))
        model = model.to(device) if place is None else place(model.requires_grad_(False))
        return cls(model.eval(), load_tokenizer(saved, TokensConfig()))

    @classmethod
    def share(cls, trunk: Any, folder: Path) -> RewardModel:
        """Load a reward model that was saved as an adapter as a further adapter of a model with the same base.

        Scores equal those of ``load``, with the reward model's tokenizer and template.

        Args:
            trunk: PEFT model with a loss head.
            folder: Folder of the adapter from ``find_shareable``.

        Raises:
            ConfigError: As ``attach_scorer``, or the adapter has no statistics.
        """
        scale = read_adapter_statistics(folder)
        scorer = add_reward(trunk, folder)
        store_reward_statistics(scorer, scale)
        saved = ModelConfig(model_name_or_path=str(folder), dtype="auto")
        return cls(scorer, load_tokenizer(saved, TokensConfig()))

    def score(
        self,
        answers: Sequence[Answer],
        *,
        finished: Sequence[bool] | None = None,
        where: Sequence[str] = (),
        overlong: Overlong = "error",
    ) -> list[float]:
        """Return the rewards of answers, in order; normalised if the model has statistics.

        Args:
            answers: Chats or pairs of prompt and answer.
            finished: False where an answer was truncated before its end token. Default: none was.
            where: Location of each answer in error messages. Default: its index.
            overlong: Result for answers longer than the positions of the model.

        Raises:
            ConfigError: As ``encode_answers``.
            DataError: As ``encode_answers`` and ``compute_raw_scores``.
        """
        rows = encode_answers(self.tokenizer, answers, finished=finished, where=where)
        raw = self.compute_raw_scores(rows, where=where, overlong=overlong)
        mean, std = read_reward_statistics(self.model) or (0.0, 1.0)
        return [(score - mean) / std for score in raw]

    def compute_raw_scores(
        self, rows: Sequence[TokenIds], *, where: Sequence[str] = (), overlong: Overlong = "error"
    ) -> list[float]:
        """Return the unnormalised head output at the last token of each row, in the order of ``rows``.

        Args:
            rows: Token ids of each prompt with its answer, at least one, from ``encode_answers`` or prepared pairs.
            where: Location of each row in error messages. Default: its index.
            overlong: Result for rows longer than the positions of the model.

        Raises:
            DataError: Rows are empty, or longer than the positions with ``overlong="error"``; one problem per row.
        """
        if empty := [index for index, row in enumerate(rows) if not len(row)]:
            found = "the reward model's tokenizer returns no tokens for it"
            remedy = "check that the tokenizer is the one that the reward model was trained with"
            raise DataError(*(Problem(name_answer(at, where), found, remedy) for at in empty))
        limit = read_positions(self.model.config)
        too_long = [index for index, row in enumerate(rows) if len(row) > limit]
        if too_long and overlong == "error":
            found = "{} tokens are more than the {} positions of the reward model"
            raise DataError(
                *(Problem(name_answer(at, where), found.format(len(rows[at]), limit), TOO_LONG) for at in too_long)
            )
        scores = [math.nan] * len(rows)
        fitting = [index for index, row in enumerate(rows) if len(row) <= limit]
        with evaluating(self.model):
            for batch in _cut(sorted(fitting, key=lambda index: len(rows[index])), rows):
                for index, score in zip(batch, self._run([rows[at] for at in batch]), strict=True):
                    scores[index] = score
        return scores

    def _run(self, rows: Sequence[TokenIds]) -> list[float]:
        lengths = torch.tensor([len(row) for row in rows])
        # Right padding needs no mask under causal attention, and any token can pad.
        input_ids = pad_sequence([torch.as_tensor(np.asarray(row, np.int64)) for row in rows], batch_first=True)
        width, device = input_ids.shape[1], find_device(self.model)
        output = self.model(
            input_ids=input_ids.to(device),
            position_ids=torch.arange(width, device=device).expand(len(rows), -1),
            # Indices into the flattened (rows * width) positions.
            last_positions=(torch.arange(len(rows)) * width + lengths - 1).to(device),
        )
        scores: list[float] = output.scores.tolist()
        return scores


def find_saved(name: str, revision: str | None) -> tuple[ModelConfig, ModelConfig, Path | None]:
    """Find a saved reward model by its folder or Hub id, and the revision of a Hub model.

    Returns:
        The reward model by its name, with the tokenizer; the model with configuration and weights: the same, or the
        base of an adapter; and the folder of the adapter, ``None`` for a full model.

    Raises:
        ConfigError: As ``find_base``.
    """
    named = ModelConfig(model_name_or_path=name, model_revision=revision, dtype="auto")
    return named, *find_base(named)


def read_positions(config: PreTrainedConfig) -> float:
    """Return the maximum number of tokens of a row; infinite if the configuration has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


def compute_reward_statistics(raw_scores: Sequence[float]) -> RewardStatistics:
    """Return mean and standard deviation of the scores of reference answers.

    Args:
        raw_scores: Results of ``compute_raw_scores``, at least two, for answers that resemble those of the policy
            before PPO, such as the answers of fine-tuning.

    Raises:
        DivergedError: A score is not finite.
        DataError: All answers have the same score.

    Source: Ziegler et al. 2019 (mean 0 and variance 1 over the reference's answers);
        ``tests/models/heads/test_scoring.py``.
    """
    if not all(map(math.isfinite, raw_scores)):
        raise DivergedError("scores of reference answers are not finite: take an earlier checkpoint")
    std = statistics.pstdev(raw_scores)
    if std == 0:
        found = f"all {len(raw_scores)} reference answers have the score {raw_scores[0]:.6g}"
        raise DataError(Problem("reward statistics", found, "give different answers; or the model has learnt nothing"))
    return RewardStatistics(statistics.fmean(raw_scores), std)


def store_reward_statistics(model: Any, computed: RewardStatistics) -> None:
    """Write the statistics to the model's configuration, from which ``score`` reads them, also after saving."""
    model.config.reward_mean, model.config.reward_std = computed
    # Keys that OpenRLHF reads.
    model.config.mean, model.config.std = computed


def read_reward_statistics(model: Any) -> RewardStatistics | None:
    """Return the statistics of ``store_reward_statistics``; ``None`` without them.

    Raises:
        ConfigError: They are not finite numbers with a positive standard deviation.
    """
    mean, std = (getattr(model.config, name, None) for name in ("reward_mean", "reward_std"))
    if mean is None and std is None:
        return None
    try:
        return _verify_statistics(mean, std)
    except (ValueError, TypeError) as error:
        found = f"config.json of the reward model has reward_mean {mean!r} and reward_std {std!r}"
        remedy = "correct them in a copy of the model, or remove both for raw scores"
        raise ConfigError(Problem("reward_model_name_or_path", found, remedy)) from error


def _verify_statistics(mean: Any, std: Any) -> RewardStatistics:
    if not (math.isfinite(mean) and 0 < std < math.inf):
        raise ValueError(f"mean {mean}, std {std}")
    return RewardStatistics(mean, std)


def read_adapter_statistics(adapter: Path) -> RewardStatistics:
    """Return the statistics in the folder of a saved adapter.

    Raises:
        ConfigError: The file is missing or invalid.
    """
    try:
        return _verify_statistics(**read_record(adapter / SCALE_FILE))
    except (DataError, ValueError, TypeError) as error:
        found = f"{adapter} has no valid {SCALE_FILE}, which is needed to normalise its scores"
        remedy = "name the output directory of a finished run of recipes/reward.py"
        raise ConfigError(Problem("model_name_or_path", found, remedy)) from error


def encode_answers(
    tokenizer: PreTrainedTokenizerBase,
    answers: Sequence[Answer],
    *,
    finished: Sequence[bool] | None = None,
    where: Sequence[str] = (),
) -> list[list[int]]:
    """Return the token ids of each prompt with its answer and one end token.

    Chats are rendered by the tokenizer's template and end as in training: at the end of the last ``{% generation %}``
    block if the template has any, otherwise at the special token that closes the last turn. ``eos_token`` ends a turn
    without one, and plain answers. An existing end token is not repeated.

    Args:
        tokenizer: Tokenizer of the reward model.
        answers: Chats or pairs of prompt and answer.
        finished: False where an answer was truncated: it then gets no end token, as in the pairs of
            ``UnfinishedAnswers``. Default: none was.
        where: Location of each answer in error messages. Default: its index.

    Raises:
        ConfigError: An answer is a chat, and the tokenizer has no chat template.
        DataError: The template raises for an answer, or a chat does not end with an assistant message; one problem per
            answer.

    Source: equality with what training reads in ``tests/models/heads/test_reward_tokens.py``.
    """
    if tokenizer.chat_template is None and not all(_is_plain(answer) for answer in answers):
        remedy = "score (prompt, answer) texts, or save the tokenizer with the template that it was trained with"
        raise ConfigError(Problem("chat_template_path", "the reward model's tokenizer has no chat template", remedy))
    problems: list[Problem] = []
    texts: list[str] = []
    ended = [True] * len(answers) if finished is None else finished
    for index, (answer, has_ended) in enumerate(zip(answers, ended, strict=True)):
        try:
            texts.append("".join(answer) if _is_plain(answer) else _render(tokenizer, answer, finished=has_ended))
        except Exception as error:  # Template code runs on user data: any error concerns this answer.
            remedy = "write what the chat template of the reward model accepts"
            problems.append(Problem(name_answer(index, where), f"cannot be rendered: {error}", remedy))
    if problems:
        raise DataError(*problems)
    # Rendered text has its special tokens already.
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    begin = find_prefix(*(tokenizer("a", add_special_tokens=adds)["input_ids"] for adds in (False, True)))
    ends = find_end_tokens(tokenizer)
    for answer, ids, has_ended in zip(answers, encoded, ended, strict=True):
        if _is_plain(answer) and ids[: len(begin)] != begin:
            ids[:0] = begin
        if not has_ended:
            continue
        if _is_plain(answer):
            ids.append(tokenizer.eos_token_id)
        # Only end tokens are merged: a text may legitimately end with the same token twice.
        while len(ids) > 1 and ids[-1] == ids[-2] and ids[-1] in ends:
            ids.pop()
    return encoded


def name_answer(index: int, where: Sequence[str] = ()) -> str:
    """Return the location of an answer in error messages: from ``where``, or its index."""
    return where[index] if where else f"answer {index}"


def _is_plain(answer: Answer) -> TypeGuard[tuple[str, str]]:
    return isinstance(answer[0], str)


def _render(tokenizer: PreTrainedTokenizerBase, answer: Answer, *, finished: bool) -> str:
    """Render a chat as text up to and including its end token, or without it if the answer was truncated.

    Raises:
        ValueError: The last message is not the assistant's.
    """
    chat = [normalise_message(message) for message in answer if not isinstance(message, str)]
    if chat[-1]["role"] != "assistant":
        raise ValueError(f"the last message has the role {chat[-1]['role']!r}, and only assistant messages are scored")
    template = _compile(tokenizer.get_chat_template())
    render: Callable[..., tuple[str, list[tuple[int, int]]]] = _render_with_assistant_indices
    # Without tools, documents and generation prompt; `marked` are the character spans of generation blocks.
    text, marked = render(template, chat, None, None, False, **tokenizer.special_tokens_map)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    if marked:  # The template marks the end of the answer itself.
        text = text[: marked[-1][1]]
    elif text.rstrip().endswith(tuple(special)):
        text = text.rstrip()
    else:
        text += str(tokenizer.eos_token)
    if finished:
        return text
    # The template added an end-of-turn token and perhaps an end-of-text token, with line breaks around them.
    end = f"(?:{'|'.join(map(re.escape, special))})"
    return re.sub(rf"{end}(?:\s*{end})*\s*\Z", "", text)


@functools.cache
def _compile(source: str) -> Template:
    """Compile the template as ``apply_chat_template`` does, with a fixed clock."""
    environment: Environment = _compile_jinja_template(source).environment
    return environment.from_string(source, globals={"strftime_now": TEMPLATE_DATE.strftime})


def _cut(by_length: Sequence[int], rows: Sequence[TokenIds]) -> Iterator[list[int]]:
    """Yield batches of rows of similar length."""
    batch: list[int] = []
    for index in by_length:
        # Rows are sorted by length, so that this one determines the width of the batch.
        if batch and (len(batch) + 1) * len(rows[index]) > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch

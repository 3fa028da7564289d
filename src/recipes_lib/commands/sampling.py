"""Append-only files of generated rows that resume: `recipes sample-pairs` and `recipes distill-write`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from recipes_lib.config.loader import load_for_command
from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.evaluation.endpoint import join_reasoning, split_reasoning
from recipes_lib.files import read_record, replace_record, try_lock
from recipes_lib.training.layouts.launch_environment import Launch, read_launch

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from recipes_lib.data.prompts import PromptData, PromptRow
    from recipes_lib.evaluation.answering import LocalModel
    from recipes_lib.evaluation.endpoint import Reply
    from recipes_lib.evaluation.judges import Grade, Judgment
    from recipes_lib.rl.collect import Collector


@dataclass(slots=True, kw_only=True)
class Counts:
    """Running counts of a file of rows.

    Attributes:
        num_bytes: File size at the time of the other counts.
    """

    num_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class TokenCounts(Counts):
    """Running counts of a file that a model writes.

    Attributes:
        num_prompt_tokens: Read by the model.
        num_tokens: Written by it.
    """

    num_prompt_tokens: int = 0
    num_tokens: int = 0

    def add_tokens(self, replies: Iterable[Reply | Grade | Judgment]) -> None:
        """Count the tokens of replies."""
        for reply in replies:
            self.num_prompt_tokens += reply.num_prompt_tokens
            self.num_tokens += reply.num_tokens


Counted = TypeVar("Counted", bound=Counts)


class RowFile(Generic[Counted]):
    """JSON Lines file of generated rows, with its progress record ``NAME.record.json``.

    After a kill it holds complete batches, and the next process resumes after them.

    Attributes:
        counts: Progress of the file.
    """

    def __init__(
        self, path: Path, key: str, counts: Counted, *, what: str, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Open a new or an incomplete file.

        Args:
            path: Of the rows.
            key: Of everything that decides them.
            counts: Of no row.
            what: Says of rows with another key what they are of, behind ``holds``.
            facts: JSON values for the record.

        Raises:
            ConfigError: There is a file that was not written so, or of other rows.
            DataError: Its record cannot be read, or counts more than the file has.
        """
        self._path, self._key, self._facts = path, key, dict(facts or {})
        self._record = path.with_name(f"{path.name}.record.json")
        self.counts = counts
        if self._record.exists():
            fields = {"key": str, **{name: type(value) | int for name, value in asdict(counts).items()}}
            record = read_record(self._record, fields, remedy=f"delete it and {path} to begin anew")
            if record["key"] == key:
                self.counts = replace(counts, **{name: record[name] for name in asdict(counts)})
                size = path.stat().st_size if path.exists() else 0
                if size < self.counts.num_bytes:  # Appending would fill the gap with zero bytes.
                    found = f"has {size:,} bytes, and {self._record.name} counts {self.counts.num_bytes:,}"
                    raise DataError(Problem(str(path), found, "restore it, or delete both to begin anew"))
            elif record["num_bytes"]:  # Without any row, nothing is lost.
                raise ConfigError(
                    Problem(str(path), f"holds {what}", "name another output, or delete it and its record")
                )
        elif path.exists() and path.stat().st_size:
            raise ConfigError(Problem(str(path), "exists, and was not written by this command", "name another output"))

    def write(self, batches: Iterator[Sequence[Mapping[str, Any]]]) -> None:
        """Append batches of rows; each is flushed before it is counted in the record.

        Raises:
            ConfigError: Another process writes the file.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            if try_lock(file) is False:
                raise ConfigError(Problem(str(self._path), "is being written by another process", "wait until it ends"))
            # Before any row: without it, a process killed in its first batch would leave a file of unknown origin.
            self._write_record()
            # What a killed process wrote and did not count is written again.
            file.truncate(self.counts.num_bytes)
            for rows in batches:
                # Rows reach the disk before the record counts them: a kill in between leaves rows that are cut off and
                # redone.
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                self.counts.num_bytes += file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
                self._write_record()

    def _write_record(self) -> None:
        replace_record(self._record, {"key": self._key, **self._facts, **asdict(self.counts)})


class Answered(NamedTuple):
    """An answer: its text without special tokens, its reward, and whether a pair may use it.

    A pair needs a known reward, a text that a row may hold, and a stop token.
    """

    text: str
    score: float
    usable: bool


@dataclass(slots=True, kw_only=True)
class PairCounts(Counts):
    """Progress of a set of pairs.

    Attributes:
        num_prompts: Prompts with answers.
        num_pairs: Prompts that yielded a pair.
        num_alike: Prompts whose answers have equal rewards or texts.
        num_unfinished: Prompts with fewer than two usable answers.
        score_sum: Sum of all known rewards.
        num_answers: Answers with a known reward.
    """

    num_prompts: int = 0
    num_pairs: int = 0
    num_alike: int = 0
    num_unfinished: int = 0
    score_sum: float = 0.0
    num_answers: int = 0

    def describe(self) -> str:
        """Return the counts in a line."""
        mean = self.score_sum / max(self.num_answers, 1)
        return (
            f"{self.num_prompts:,} prompts, {self.num_pairs:,} pairs; {self.num_alike:,} have answers worth the same, "
            f"{self.num_unfinished:,} fewer than two that end, are scored and are text; mean score {mean:.4g}"
        )


def choose_pair(answers: Sequence[Answered]) -> tuple[Answered, Answered] | None:
    """Return the best and the worst usable answer; ``None`` if their rewards or texts are equal.

    Those that ran into the limit do not take part: as rows they would end where nobody ended them. Of answers that are
    worth the same the first counts.
    """
    usable = [answer for answer in answers if answer.usable]
    if len(usable) < 2:
        return None
    best, worst = (choose(usable, key=lambda answer: answer.score) for choose in (max, min))
    return (best, worst) if best.score > worst.score and best.text != worst.text else None


def sample_pairs(
    collector: Collector, prompts: Sequence[PromptRow], num_answers: int, counts: PairCounts
) -> Iterator[list[dict[str, Any]]]:
    """Yield rows of the ``preference`` layout, batch by batch, and update the counts.

    Args:
        collector: Answers and scores.
        prompts: All of them; those that are counted already are left out. Which answers a prompt gets depends on its
            place among them and the seed.
        num_answers: To each prompt, at least two.
        counts: Of what is done; a batch is counted when it is yielded.
    """
    from recipes_lib.data.sources.messages import is_answer

    # All answers to a prompt are in one batch, so that a batch ends in whole pairs.
    size = max(1, collector.batch_size // num_answers)
    for start in range(counts.num_prompts, len(prompts), size):
        batch = prompts[start : start + size]
        asked = [prompt for prompt in batch for _ in range(num_answers)]
        first = start * num_answers
        answers, texts = collector.answer(asked, range(first, first + len(asked)))
        known = zip(texts, answers.scores.tolist(), (answers.finished & answers.scored).tolist(), strict=True)
        # What no row may hold, such as an empty answer or a NUL, and what has no reward is excluded.
        answered = [Answered(text, score, usable and is_answer(text)) for text, score, usable in known]
        rows = []
        for at, prompt in enumerate(batch):
            of_prompt = answered[at * num_answers : (at + 1) * num_answers]
            pair = choose_pair(of_prompt)
            counts.num_unfinished += sum(answer.usable for answer in of_prompt) < 2
            counts.num_alike += pair is None and sum(answer.usable for answer in of_prompt) > 1
            if pair is not None:
                rows.append(_build_row(prompt, *pair))
        counts.num_prompts += len(batch)
        counts.num_pairs += len(rows)
        counts.num_answers += int(answers.scored.sum())
        counts.score_sum += sum(answer.score for answer in answered)
        yield rows


def _build_row(prompt: PromptRow, best: Answered, worst: Answered) -> dict[str, Any]:
    def lay_out(text: str) -> Any:
        return text if isinstance(prompt.content, str) else [{"role": "assistant", "content": text}]

    return {
        "prompt": prompt.content,
        "chosen": lay_out(best.text),
        "rejected": lay_out(worst.text),
        "score_chosen": best.score,
        "score_rejected": worst.score,
    }


def main_pairs(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A flag or the configuration is wrong, or the file is of other pairs.
        DataError: The prompts cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="recipes sample-pairs",
        description="Let a policy answer prompts several times, and keep the best and the worst of each.",
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, required=True, help="file of the pairs, JSON Lines")
    parser.add_argument("--num_answers", type=int, default=4, help="answers to each prompt (default: 4)")
    parser.add_argument("--config", metavar="F", help="a recipe of PPO; further --key value flags override it")
    options, overrides = parser.parse_known_args(argv)
    if options.num_answers < 2:
        raise ConfigError(Problem("--num_answers", f"a pair takes two answers, not {options.num_answers}"))
    config = load_for_command("ppo", overrides, options.config)
    sys.stdout.write(f"{options.output}: {write_pairs(config, options.output, options.num_answers)}\n")


def write_pairs(config: RecipeConfig, output: Path, num_answers: int) -> str:
    """Write or complete a file of preference pairs sampled from a policy; return a summary line.

    Args:
        config: A recipe of PPO: its model is the policy; prompts, rewards and sampling are as there.
        output: The file.
        num_answers: To each prompt.

    Raises:
        ConfigError: As ``load_policy``, ``load_rewards`` and ``RowFile``.
        DataError: As ``load_prompt_data``.
    """
    from transformers.utils.logging import disable_progress_bar

    from recipes_lib.data.store import compute_key
    from recipes_lib.models.generation import set_stop_tokens
    from recipes_lib.rl.engines.engine import build_collector, hold_policy
    from recipes_lib.rl.rewards import load_rewards
    from recipes_lib.training.monitoring.progress import build_progress
    from recipes_lib.training.trainers.trained_model import load_policy

    disable_progress_bar()  # type: ignore[no-untyped-call]
    launch, tokenizer, prompts, args, attention = _prepare(config)
    rewards = load_rewards(config.rewards, device=str(args.device))
    policy = load_policy(config, attention, args, launch)
    stop_ids = set_stop_tokens(policy, tokenizer, prompts.terminators)
    models = hold_policy(policy.to(args.device), stop_ids)
    progress = build_progress(is_main=True)
    collector = build_collector(config, args, models, rewards, tokenizer, progress, lambda: None, prompts.max_length)
    facts = {"prompts": prompts.record["fingerprint"], "num_answers": num_answers, "stop_ids": stop_ids}
    tokens = [prompt.input_ids for prompt in prompts.train]
    # Of the tokens too: another template makes other prompts of the same rows.
    key = compute_key({**facts, "tokens": tokens, **describe_sampling(config, collector)})
    file = RowFile(output, key, PairCounts(), what="pairs of another policy, other prompts, rewards or settings")
    file.write(sample_pairs(collector, prompts.train, num_answers, file.counts))
    return file.counts.describe()


def _prepare(config: RecipeConfig) -> tuple[Launch, Any, PromptData, TrainingArguments, str]:
    """What answers are sampled with: the launch, tokenizer, prompts, arguments and the implementation of attention."""
    from recipes_lib.data.prompts import load_prompt_data
    from recipes_lib.models.attention.kernels import choose_attention
    from recipes_lib.models.loading import load_model_config, load_tokenizer
    from recipes_lib.training.trainers.arguments import build_training_arguments

    launch = read_launch()
    tokenizer = load_tokenizer(config.model, config.tokens)
    prompts = load_prompt_data(config, tokenizer)
    args = build_training_arguments(config, launch, has_eval=False)
    attention = choose_attention(config.model, load_model_config(config.model)[0], args, packing=False)
    return launch, tokenizer, prompts, args, attention.implementation


def describe_sampling(config: RecipeConfig, collector: Collector) -> dict[str, Any]:
    """Return the settings that determine answers and rewards besides the prompts, as JSON values."""
    from recipes_lib.models.heads.scoring import read_reward_statistics
    from recipes_lib.training.trainers.arguments import resolve_precision
    from recipes_lib.training.trainers.reference import hash_weights

    rewards = collector.rewards
    model = None
    if rewards.model is not None:
        model = [hash_weights(rewards.model.model), read_reward_statistics(rewards.model.model)]
    return {
        "policy": hash_weights(collector.models.policy),
        "reward_model": model,
        "functions": {name: _read_source(function) for name, function in rewards.functions.items()},
        "weights": list(rewards.weights),
        "response_length": config.rewards.response_length,
        "temperature": config.rewards.temperature,
        "seed": collector.seed,
        "precision": resolve_precision(config),
    }


def _read_source(function: Any) -> str:
    """Return the source file of a function; its name if there is none."""
    try:
        # The whole module: a reward calls helpers beside it.
        return inspect.getsource(inspect.getmodule(function) or function)
    except (OSError, TypeError):
        return repr(function)


@dataclass(slots=True, kw_only=True)
class AnswerCounts(Counts):
    """Progress of a set of answers.

    Attributes:
        num_prompts: Prompts with answers.
        num_rows: Prompts whose answer is kept.
        num_unfinished: Answers that ran into the limit.
        num_empty: Answers that no row may hold: empty, or with a NUL or half a surrogate pair.
        num_reasoned: Kept answers that began with reasoning.
    """

    num_prompts: int = 0
    num_rows: int = 0
    num_unfinished: int = 0
    num_empty: int = 0
    num_reasoned: int = 0

    def describe(self) -> str:
        """Return the counts in a line."""
        return (
            f"{self.num_rows:,} answers to {self.num_prompts:,} prompts, {self.num_reasoned:,} with reasoning; "
            f"left out: {self.num_unfinished:,} that ran into the limit, {self.num_empty:,} that are no text"
        )


def main_answers(argv: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A flag or the configuration is wrong, or the file is of other answers.
        DataError: The prompts cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="recipes distill-write",
        description="Let a teacher answer prompts, and keep its answers as rows to fine-tune a student on.",
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, required=True, help="file of the rows, JSON Lines")
    told = "handling of <think> ... </think> (default: keep)"
    parser.add_argument("--reasoning", choices=("keep", "drop"), default="keep", help=told)
    parser.add_argument("--config", metavar="F", help="a recipe of distillation; further --key value flags override it")
    options, overrides = parser.parse_known_args(argv)
    config = load_for_command("distill", overrides, options.config)
    sys.stdout.write(f"{options.output}: {write_answers(config, options.output, reasoning=options.reasoning)}\n")


def write_answers(config: RecipeConfig, output: Path, *, reasoning: str) -> str:
    """Write or complete a file of answers sampled from a teacher; return a summary line.

    Args:
        config: A recipe of distillation: its teacher answers, in its own template, the prompts of its dataset.
        output: The file.
        reasoning: ``keep`` or ``drop``.

    Raises:
        ConfigError: The teacher cannot be loaded; there is a mixture; as ``RowFile``.
        DataError: As ``load_prompt_data``.
    """
    from recipes_lib.data.store import compute_key
    from recipes_lib.distillation.teacher_store import identify_teacher
    from recipes_lib.evaluation.answering import LocalModel
    from recipes_lib.models.generation import GenerateBackend, Sampling, set_stop_tokens
    from recipes_lib.models.loading import load_causal_lm
    from recipes_lib.training.trainers.arguments import build_autocast

    if config.data.dataset_mixture:
        where = config.provenance.get("dataset_mixture", "dataset_mixture")
        raise ConfigError(Problem(where, "prompts come from one dataset", "join the files, and write `dataset_name`"))
    config = take_teacher(config)
    _, tokenizer, prompts, args, attention = _prepare(config)
    teacher: Any = load_causal_lm(config.model, attention)
    teacher.to(args.device)
    stop_ids = set_stop_tokens(teacher, tokenizer, prompts.terminators)
    length, temperature = config.rewards.response_length, config.distillation.sampling_temperature
    sampling, size = Sampling(stop_ids, 0, length, temperature), args.per_device_eval_batch_size
    backend = GenerateBackend(sampling, batch_size=size, precision=build_autocast(args))
    model = LocalModel(backend, teacher, tokenizer, sampling, size, args.seed, math.inf, {})
    facts = {
        "teacher": {"name": config.model.model_name_or_path, **identify_teacher(config)},
        "dataset": {"name": config.data.dataset_name, "fingerprint": prompts.record["fingerprint"]},
        "response_length": length,
        "temperature": temperature,
        "seed": args.seed,
        "reasoning": reasoning,
    }
    asked = [prompt.input_ids for prompt in prompts.train]
    key = compute_key({**facts, "stop_ids": stop_ids, "prompts": asked})
    what = "answers of another teacher, to other prompts, or otherwise sampled"
    file = RowFile(output, key, AnswerCounts(), what=what, facts=facts)
    file.write(answer(model, prompts.train, file.counts, reasoning=reasoning))
    return file.counts.describe()


def take_teacher(config: RecipeConfig) -> RecipeConfig:
    """Return the configuration with the teacher as its model, with the teacher's tokenizer and template."""
    from recipes_lib.models.loading import choose_teacher

    tokens = dataclasses.replace(config.tokens, chat_template_path=None, eos_token=None, pad_token=None)
    return dataclasses.replace(config, model=choose_teacher(config), tokens=tokens)


def answer(
    model: LocalModel, prompts: Sequence[PromptRow], counts: AnswerCounts, *, reasoning: str
) -> Iterator[list[dict[str, Any]]]:
    """Yield rows, batch by batch, and update the counts.

    Which answer a prompt gets depends on its place among them and the seed. Those that are counted already are left
    out; a batch is counted when it is yielded.

    Args:
        model: The teacher.
        prompts: All of them.
        counts: Of what is done.
        reasoning: ``keep`` or ``drop``.
    """
    from recipes_lib.data.sources.messages import is_answer

    for start in range(counts.num_prompts, len(prompts), model.batch_size):
        batch = prompts[start : start + model.batch_size]
        written = model.write([prompt.input_ids for prompt in batch], range(start, start + len(batch)))
        rows = []
        for prompt, answer in zip(batch, written, strict=True):
            thought, said = split_reasoning(answer.text)
            counts.num_unfinished += not answer.has_ended
            text = join_reasoning(thought if reasoning == "keep" else None, said)
            is_kept = answer.has_ended and bool(said.strip()) and is_answer(text)
            counts.num_empty += answer.has_ended and not is_kept
            if is_kept:
                rows.append(lay_out(prompt, text))
                counts.num_reasoned += thought is not None
        counts.num_prompts += len(batch)
        counts.num_rows += len(rows)
        yield rows


def lay_out(prompt: PromptRow, text: str) -> dict[str, Any]:
    """Return a fine-tuning row: a chat, or prompt and completion."""
    if isinstance(prompt.content, str):
        return {"prompt": prompt.content, "completion": text}
    tools = {"tools": prompt.columns["tools"]} if prompt.columns.get("tools") else {}
    return {"messages": [*prompt.content, {"role": "assistant", "content": text.strip()}], **tools}

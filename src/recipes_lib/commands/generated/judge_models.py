"""``recipes eval compare A B --judge J --prompts FILE``: win rates of models by the verdicts of a judge.

As in ``recipes eval compare`` without a judge, the first model is the baseline, comparisons are paired by question, and
each has a confidence interval. Answers are sampled here or read from files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes_lib.commands.generated.answerers import load_answerer, load_judge, verify_judge
from recipes_lib.commands.sampling import RowFile, TokenCounts
from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import ConfigError, DataError, Problem
from recipes_lib.evaluation.judge_questions import Question, ask_questions, load_answers, load_questions
from recipes_lib.evaluation.judges import Judge, WinRate, compute_win_rate, split_place
from recipes_lib.files import read_lines, replace_record
from recipes_lib.processes import verify_one_process
from recipes_lib.training.monitoring.progress import TrainingProgress, build_progress

RECORD: Final = "judge.json"


@dataclass(slots=True, kw_only=True)
class AnsweredCounts(TokenCounts):
    """Progress of a file of answers or verdicts; tokens are only counted for verdicts.

    Attributes:
        num_questions: Questions with a row in the file.
    """

    num_questions: int = 0


def main(argv: Sequence[str]) -> None:
    """Run the command, or resume an interrupted comparison.

    Raises:
        ConfigError: A flag is wrong, a model or the judge cannot be loaded, or the folder holds another comparison.
        DataError: Questions or answers cannot be read, or the judge gave no verdict on a model.
    """
    options = CommandParser("eval compare --judge").parse_args(argv)
    others = options.models[1:]
    if not others or len({*others}) < len(others):
        found = "a model is named twice" if others else "there is one model"
        raise ConfigError(Problem("recipes eval compare", found, "name two or more, each once"))
    verify_one_process("recipes eval compare")
    verify_judge(options, "pairwise")
    questions = load_questions(options.prompts, options.limit)
    for name in options.models:
        _verify_source(name, questions)
    progress = build_progress(is_main=True)
    try:
        answers = [_find_answers(at, name, questions, options, progress) for at, name in enumerate(options.models)]
        # After the answers: a local reward model would compete with the models for GPU memory.
        judge = load_judge(options, "pairwise")
        size = max(8, options.num_concurrent)
        compared = [
            _judge(judge, questions, answers[0], other, options.output_dir / f"verdicts-{at}.jsonl", size, progress)
            for at, other in enumerate(answers[1:], 1)
        ]
    finally:
        progress.stop()
    record = {
        "base": options.models[0],
        "judge": judge.describe(),
        "prompts": str(options.prompts),
        "compared": {
            name: {"tokens": tokens, "rates": {category: rate._asdict() for category, rate in rates.items()}}
            for name, (rates, tokens) in zip(options.models[1:], compared, strict=True)
        },
    }
    replace_record(options.output_dir / RECORD, record)
    for name, (rates, tokens) in zip(options.models[1:], compared, strict=True):
        sys.stdout.write("".join(f"{line}\n" for line in format_rates(options.models[0], name, rates, tokens)))
    sys.stdout.write(f"every answer and verdict: {options.output_dir}\n")
    silent = [at for at, (rates, _) in enumerate(compared, 1) if not rates["all"].num_questions]
    if silent:
        found = f"the judge gave no verdict on {', '.join(options.models[at] for at in silent)}"
        remedy = f"read verdicts-{silent[0]}.jsonl; then change --judge_prompt or --judge_tokens, and --output_dir"
        raise DataError(Problem(str(options.output_dir), found, remedy))


def _is_file(name: str) -> bool:
    """Return whether a model is given as a file of its answers."""
    return Path(name).is_file() or name.endswith((".json", ".jsonl"))


def _verify_source(name: str, questions: Sequence[Question]) -> None:
    """Raise for a model or file that cannot be read, before another model is asked for hours; loads no weights.

    Raises:
        ConfigError: The configuration of the model cannot be loaded.
        DataError: As ``load_answers``.
    """
    if _is_file(name):
        load_answers(Path(name), questions)
    elif split_place(name) is None:
        from recipes_lib.models.adapters.saved import find_base
        from recipes_lib.models.loading import load_model_config

        load_model_config(find_base(ModelConfig(model_name_or_path=name))[0])


def _find_answers(
    at: int, name: str, questions: Sequence[Question], options: argparse.Namespace, progress: TrainingProgress
) -> list[list[str]]:
    """Return the answers of a model to each question, read from its file or sampled, and warn of incomplete ones."""
    num_cut, path = 0, Path(name)
    if not _is_file(name):
        path = _sample_answers(at, name, questions, options, progress)
        num_cut = sum(bool(row and row.get("num_cut")) for row in read_lines(path))
    answers = load_answers(path, questions)
    num_empty = sum(not all(text.strip() for text in turns) for turns in answers)
    for number, what in ((num_cut, "truncated by --max_new_tokens"), (num_empty, "empty")):
        if number:
            progress.say(f"warning: {name}: {number:,} of {len(questions):,} questions have an answer that is {what}")
    return answers


def _sample_answers(
    at: int, name: str, questions: Sequence[Question], options: argparse.Namespace, progress: TrainingProgress
) -> Path:
    """Write the answers of a model to the questions that its file lacks; return the path of the file."""
    named = ModelConfig(model_name_or_path=name, dtype=options.dtype)
    engine = load_answerer(options, split_place(name), named)
    facts = {"model": engine.describe()}
    path: Path = options.output_dir / f"answers-{at}.jsonl"
    settings = {"questions": [question._asdict() for question in questions]}
    what = "answers of another model, to other questions, or with other sampling parameters"
    file = RowFile(path, settings, AnsweredCounts(), what=what, facts=facts)

    def answer(start: int, part: Sequence[Question]) -> Iterator[dict[str, Any]]:
        answers = ask_questions(engine, part, range(start, start + len(part)))
        for question, said, num_cut in zip(part, *answers, strict=True):
            yield {"question_id": question.id, "model": name, "answers": said, "num_cut": num_cut}

    # The most that a kill loses; large enough for all concurrent requests.
    size = max(options.batch_size, options.num_concurrent)
    file.write(_take_in_parts(questions, file.counts, size, answer, progress, f"answers of {name}"))
    return path


def _take_in_parts(
    questions: Sequence[Question],
    counts: AnsweredCounts,
    size: int,
    make: Callable[[int, Sequence[Question]], Iterator[dict[str, Any]]],
    progress: TrainingProgress,
    label: str,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of the questions without one, part by part, and update the counts before each."""
    starts = range(counts.num_questions, len(questions), size)
    for start in progress.track(starts, label, len(starts)):
        rows = list(make(start, questions[start : start + size]))
        counts.num_questions += len(rows)
        yield rows


def _judge(
    judge: Judge,
    questions: Sequence[Question],
    base: Sequence[Sequence[str]],
    other: Sequence[Sequence[str]],
    path: Path,
    size: int,
    progress: TrainingProgress,
) -> tuple[dict[str, WinRate], dict[str, int]]:
    """Judge the answers to the questions without a verdict; return win rates by category, and tokens of the judge."""
    facts = {"judge": judge.describe()}
    settings = {"questions": [question._asdict() for question in questions], "answers": [base, other]}
    what = "verdicts of another judge, or on other answers"
    file = RowFile(path, settings, AnsweredCounts(), what=what, facts=facts)

    def ask(start: int, part: Sequence[Question]) -> Iterator[dict[str, Any]]:
        own = slice(start, start + len(part))
        found = judge.compare(part, base[own], other[own], range(own.start, own.stop))
        file.counts.add_tokens(found)
        for question, judgment, one, two in zip(part, found, base[own], other[own], strict=True):
            yield {
                "question_id": question.id,
                "category": question.category,
                "turns": question.turns,
                "base": one,
                "other": two,
                **judgment._asdict(),
            }

    file.write(_take_in_parts(questions, file.counts, size, ask, progress, path.stem))
    # From the file, which includes verdicts of earlier launches.
    rows = [row for row in read_lines(path) if row is not None]
    if missing := [row for row in rows if row["winner"] is None]:
        # The reason may be a refused request, a truncated text or an answer too long for a reward model.
        reason = f"{missing[0]['question_id']} first: {json.dumps(missing[0]['details'], ensure_ascii=False)[:200]}"
        progress.say(f"warning: {path.name}: {len(missing):,} of {len(rows):,} questions have no verdict, {reason}")
    tokens = {name: getattr(file.counts, name) for name in ("num_prompt_tokens", "num_tokens")}
    return compute_rates(rows), tokens


def compute_rates(rows: Sequence[Mapping[str, Any]]) -> dict[str, WinRate]:
    """Return win rates: ``all`` over all rows, and one per category if there are several.

    Args:
        rows: Rows of a file of verdicts.
    """
    groups: dict[str, list[Any]] = {"all": []}
    for row in rows:
        for name in {"all", row["category"] or "all"}:  # A set, because a category may be called "all".
            groups.setdefault(name, []).append((row["winner"], row["orders"]))
    rates = {name: compute_win_rate(found) for name, found in groups.items()}
    return rates if len(rates) > 2 else {"all": rates["all"]}


def format_rates(base: str, other: str, rates: Mapping[str, WinRate], tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield a table of win rates and the tokens of the judge, line by line."""
    yield f"{other} against {base}"
    heads = f"{'wins':>6}{'ties':>6}{'losses':>8}{'no verdict':>12}{'agree':>7}"
    yield f"{'category':20}{'win rate':>9}  {'95 % interval':18}{heads}"
    for category, rate in rates.items():
        figures = "no verdict" if rate.win_rate is None else f"{rate.win_rate:9.3f}  {rate.low:.3f} .. {rate.high:.3f}"
        agreement = "" if rate.position_agreement is None else f"{rate.position_agreement:.0%}"
        counts = f"{rate.num_wins:6}{rate.num_ties:6}{rate.num_losses:8}{rate.num_unparsable:12}{agreement:>7}"
        yield f"{category:20}{figures:29}{counts}"
    if tokens["num_prompt_tokens"]:
        yield f"judge: {tokens['num_prompt_tokens']:,} tokens read, {tokens['num_tokens']:,} written"

"""``recipes synthesize``: training rows written by a model, filtered, graded and selected, with their provenance.

Replies and grades are appended to files as they come; filters and selection are computed from these files, so that
changing them costs nothing, and a killed command resumes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recipes_lib.commands.generated.answerers import load_answerer, load_judge, verify_judge
from recipes_lib.commands.generated.candidates import (
    ROWS,
    Answer,
    Candidate,
    complete_values,
    filter_replies,
    find_failure,
    keep_graded,
    read_compared,
    read_row_file,
    write_rows,
)
from recipes_lib.commands.generated.generation_methods import Method, SourceRow, load_method, read_source, take_reply
from recipes_lib.commands.generated.row_filters import build_checks, choose_rows
from recipes_lib.commands.sampling import RowFile, TokenCounts
from recipes_lib.config.loader import end_after_help
from recipes_lib.config.schema import ModelConfig
from recipes_lib.config.synthesis_keys import SynthesisConfig, parse_synthesis_command
from recipes_lib.errors import EXIT_DONE, ConfigError, DataError, Problem
from recipes_lib.evaluation.endpoint import Answerer, Chat, Reply
from recipes_lib.evaluation.judge_questions import Question
from recipes_lib.evaluation.judges import Judge
from recipes_lib.files import replace_record
from recipes_lib.processes import verify_one_process

if TYPE_CHECKING:
    from recipes_lib.models.generation import Generator, Sampling
    from recipes_lib.training.monitoring.progress import TrainingProgress

RECORD: Final = "synthesis.json"
_REPLIES: Final = "replies.jsonl"
_GRADES: Final = "grades.jsonl"


@dataclass(slots=True, kw_only=True)
class ReplyCounts(TokenCounts):
    """Progress of the replies.

    Attributes:
        num_candidates: Rows that were written, before filters.
    """

    num_candidates: int = 0


@dataclass(slots=True, kw_only=True)
class GradeCounts(TokenCounts):
    """Progress of the grades.

    Attributes:
        num_grades: Answers that were graded, or tried to be.
    """

    num_grades: int = 0


def main(argv: Sequence[str]) -> None:
    """Run the command, or resume it.

    Raises:
        ConfigError: The configuration or a method is wrong, a model cannot be had, an endpoint fails, or the folder
            holds other rows.
        DataError: The source cannot be read, or no row is left.
    """
    config = end_after_help(parse_synthesis_command(argv))
    verify_one_process("recipes synthesize")
    from recipes_lib.report.html_pages import write_synthesis_report
    from recipes_lib.training.monitoring.progress import build_progress

    progress = build_progress(is_main=True)
    try:
        record, samples = synthesize(config, progress)
    finally:
        progress.stop()
    folder = Path(config.output_dir)
    report = write_synthesis_report(folder, record, samples)
    sys.stdout.write("".join(f"{line}\n" for line in describe(record)))
    sys.stdout.write(f"{folder / ROWS}\nsamples: {report}\n")


def check(argv: Sequence[str]) -> int:
    """``recipes check`` of a synthesis: load the method, read the source, build a row's first prompt.

    Raises:
        ConfigError: As ``main``.
        DataError: As ``main``.
    """
    config = end_after_help(parse_synthesis_command(argv))
    method = load_method(config)
    rows, _ = read_source(method)
    build_checks(config)
    verify_judge(config, "grade")
    chat = method.build_chat(method.steps[0], method.draw(rows, 0))
    sys.stdout.write(f"{len(rows):,} {method.fields['reads']}; first prompt:\n\n{chat[-1]['content']}\n\n")
    sys.stdout.write("ready to synthesize\n")
    return EXIT_DONE


def synthesize(config: SynthesisConfig, progress: TrainingProgress) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the rows, or those that are missing; return what ``synthesis.json`` holds, and samples by kind.

    Raises:
        ConfigError: As ``main``.
        DataError: As ``main``.
    """
    from recipes_lib.data.store import compute_key

    method, folder = load_method(config), Path(config.output_dir)
    rows, fingerprint = read_source(method)
    checks = build_checks(config)
    verify_judge(config, "grade")
    total = config.num_candidates or len(rows)
    writer = load_writer(config)
    facts = {"writer": writer.describe(), "source": {"name": config.dataset_name, "fingerprint": fingerprint}}
    settings = {name: getattr(config, name) for name in ("seed", "num_seeds", "num_answers", "dataset_columns")}
    key = compute_key({**facts, **settings, "method": dict(method.fields)})
    what = "replies of another model, to another method or source, or otherwise sampled"
    # 1. Replies, which cost money: appended, and never asked for twice.
    replies = RowFile(folder / _REPLIES, key, ReplyCounts(), what=what, facts=facts)
    limits = Limits(config, replies.counts)
    replies.write(_write_replies(method, writer, rows, total, limits, progress))
    del writer  # Its memory is free for a judge.
    removed: Counter[str] = Counter()
    samples: dict[str, list[Any]] = {}
    # 2. Filters, 3. grades, 4. selection: computed anew from the files, so that changed thresholds apply.
    candidates = list(filter_replies(method, rows, checks, folder / _REPLIES, removed, samples))
    judge_record: dict[str, Any] | None = None
    if config.judge is not None:
        judge = load_judge(config, "grade")
        counts = _grade(judge, method, candidates, folder / _GRADES, progress)
        judge_record = {"judge": judge.describe(), **dataclasses.asdict(counts)}
    candidates = [one for one in candidates if keep_graded(config, one, removed)]
    if config.max_rows is not None and len(candidates) > config.max_rows:
        texts = [read_compared(method, one) for one in candidates]
        grades = [[answer.grade for answer in one.answers if answer.grade is not None] for one in candidates]
        scores = [max(given, default=one.agreement) for given, one in zip(grades, candidates, strict=True)]
        # Selection comes last: it compares rows by their grades.
        chosen = choose_rows(texts, scores, config.max_rows, config.diversity)
        removed["not among the best"] = len(candidates) - len(chosen)
        candidates = [candidates[at] for at in chosen]
    num_rows, num_pairs = write_rows(method, candidates, folder, samples)
    record = {
        "config": config.list_values(),
        **facts,
        "num_asked": total,
        "num_candidates": replies.counts.num_candidates,
        "removed": dict(removed.most_common()),
        "num_rows": num_rows,
        "num_pairs": num_pairs,
        "num_prompt_tokens": replies.counts.num_prompt_tokens,
        "num_tokens": replies.counts.num_tokens,
        "cost": limits.compute_cost(replies.counts.num_prompt_tokens, replies.counts.num_tokens),
        "judge": judge_record,
    }
    replace_record(folder / RECORD, record)
    if not num_rows:
        told = ", ".join(f"{reason} {count:,}" for reason, count in removed.most_common())
        raise DataError(Problem(str(folder), f"no row is left; removed: {told}", f"read {_REPLIES}, and relax filters"))
    return record, samples


def load_writer(config: SynthesisConfig) -> Answerer:
    """Build the model that writes.

    Raises:
        ConfigError: It cannot be had.
    """
    place = None if config.base_url is None else (config.base_url, config.model_name_or_path)
    named = ModelConfig(
        model_name_or_path=config.model_name_or_path,
        model_revision=config.model_revision,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    return load_answerer(config, place, named, partial(_start_vllm, config) if config.engine == "vllm" else None)


def _start_vllm(config: SynthesisConfig, sampling: Sampling, length: int) -> Generator:
    """Start vLLM with the weights of the checkpoint, as colocated with RL, where it gets the policy's."""
    from recipes_lib.config.loader import load_for_command
    from recipes_lib.rl.engines.vllm_colocated import start
    from recipes_lib.training.layouts.launch_environment import read_launch
    from recipes_lib.training.trainers.arguments import build_training_arguments

    given = {
        "model_name_or_path": config.model_name_or_path,
        "model_revision": config.model_revision or "null",
        "trust_remote_code": config.trust_remote_code,
        "dataset_name": config.dataset_name,
        "output_dir": config.output_dir,
        "use_cpu": config.use_cpu,
        "seed": config.seed,
    }
    recipe = load_for_command("sft", [f"--{name}={value}" for name, value in given.items()])
    share = config.vllm_gpu_memory_utilization
    recipe = dataclasses.replace(recipe, engine=dataclasses.replace(recipe.engine, vllm_gpu_memory_utilization=share))
    return start(recipe, build_training_arguments(recipe, read_launch(), has_eval=False), sampling, length)


class SpentError(Exception):
    """The next requests could exceed a limit."""


@dataclass
class Limits:
    """Limits of the writer's tokens and cost, of all launches together.

    Attributes:
        config: The limits and prices.
        counts: What was spent.
    """

    config: SynthesisConfig
    counts: ReplyCounts

    def compute_cost(self, num_prompt_tokens: int, num_tokens: int) -> float:
        """Return the cost of tokens, in the currency of the prices."""
        return (num_prompt_tokens * self.config.input_price + num_tokens * self.config.output_price) / 1e6

    def verify_room(self, chats: Sequence[Chat]) -> None:
        """Raise if answers to these chats could exceed a limit: each may be as long as allowed.

        Raises:
            SpentError: They could.
        """
        # A token has a byte or more; templates add a few to each message.
        bound = sum(len(str(message["content"]).encode()) + 16 for chat in chats for message in chat)
        read = self.counts.num_prompt_tokens + bound
        written = self.counts.num_tokens + len(chats) * self.config.max_new_tokens
        most, cap = self.config.max_total_tokens, self.config.max_cost
        if (most is not None and read + written > most) or (cap is not None and self.compute_cost(read, written) > cap):
            raise SpentError

    def add(self, replies: Sequence[Reply]) -> None:
        """Count replies.

        Raises:
            ConfigError: There is a limit, and the endpoint does not tell its tokens.
        """
        is_limited = self.config.max_total_tokens is not None or self.config.max_cost is not None
        if is_limited and any(reply.text and not reply.num_tokens for reply in replies):
            found = "the endpoint does not tell how many tokens it used, which a limit needs"
            raise ConfigError(Problem("base_url", found, "remove max_cost and max_total_tokens"))
        self.counts.add_tokens(replies)


def _write_replies(
    method: Method, writer: Answerer, rows: Sequence[SourceRow], total: int, limits: Limits, progress: TrainingProgress
) -> Iterator[list[dict[str, Any]]]:
    """Yield what the writer replies for each row, batch by batch; stop where a limit is reached."""
    counts, size = limits.counts, method.config.batch_size
    starts = range(counts.num_candidates, total, size)
    for start in progress.track(starts, f"write {method.config.method}", len(starts)):
        try:
            written = _write_batch(method, writer, rows, range(start, min(start + size, total)), limits)
        except SpentError:
            yield []  # What earlier steps of the batch cost is recorded.
            return
        counts.num_candidates += len(written)
        yield written


def _write_batch(
    method: Method, writer: Answerer, rows: Sequence[SourceRow], numbers: range, limits: Limits
) -> list[dict[str, Any]]:
    drafts: list[dict[str, Any]] = [
        {"number": number, "steps": {}, "failed": None, "answers": []} for number in numbers
    ]
    values = {number: method.draw(rows, number) for number in numbers}
    for at, step in enumerate(method.steps):
        is_last = at == len(method.steps) - 1
        num_answers = method.config.num_answers if is_last else 1
        alive = [draft for draft in drafts if draft["failed"] is None]
        if not alive:
            break
        chats = [method.build_chat(step, values[draft["number"]]) for draft in alive for _ in range(num_answers)]
        # Before the request: what is asked for is paid for.
        limits.verify_room(chats)
        seeds = [
            # A number for each answer to each step of each row, whatever batch it falls into.
            (draft["number"] * len(method.steps) + at) * method.config.num_answers + answer
            for draft in alive
            for answer in range(num_answers)
        ]
        replies = writer.answer(chats, seeds)
        limits.add(replies)
        for place, draft in enumerate(alive):
            own = replies[place * num_answers : (place + 1) * num_answers]
            if is_last:
                draft["answers"] = [dataclasses.asdict(reply) for reply in own]
            else:
                draft["failed"] = find_failure(step, own[0].text, error=own[0].error, is_finished=own[0].is_finished)
                draft["steps"][step["name"]] = own[0].text
                values[draft["number"]][step["name"]] = take_reply(step, own[0].text)
    return drafts


def _grade(
    judge: Judge, method: Method, candidates: Sequence[Candidate], path: Path, progress: TrainingProgress
) -> GradeCounts:
    """Set the grades of all answers; those that are in the file are not asked for again."""
    from recipes_lib.data.store import compute_key

    facts = {"judge": judge.describe()}
    file = RowFile(path, compute_key(facts), GradeCounts(), what="grades of another judge", facts=facts)
    known = {}
    if file.counts.num_bytes:
        known = {row["key"]: row["grade"] for row in read_row_file(path, file.counts.num_bytes)}
    asked: dict[str, tuple[Question, str]] = {}
    keys: list[tuple[Answer, str]] = []
    for candidate in candidates:
        for answer in candidate.answers:
            values = complete_values(method, candidate, answer.text)
            question, said = method.build_question(method.build_row(values), values)
            # Without its id, so that the same answer to the same question is graded once.
            key = compute_key({"question": question._asdict() | {"id": ""}, "answer": said})
            keys.append((answer, key))
            if key not in known:
                asked[key] = (question, said)

    def grade() -> Iterator[list[dict[str, Any]]]:
        waiting, size = list(asked.items()), 16
        starts = range(0, len(waiting), size)
        for start in progress.track(starts, "grade", len(starts)):
            batch = waiting[start : start + size]
            # The number of a grade is that of its answer, so that its seed does not depend on the others.
            numbers = [int(name[:7], 16) for name, _ in batch]
            questions, answers = zip(*(one for _, one in batch), strict=True)
            grades = judge.grade(questions, [[answer] for answer in answers], numbers)
            file.counts.num_grades += len(grades)
            file.counts.add_tokens(grades)
            known.update({name: one.value for (name, _), one in zip(batch, grades, strict=True)})
            yield [
                {"key": name, "grade": one.value, "text": one.text}
                for (name, _), one in zip(batch, grades, strict=True)
            ]

    file.write(grade())
    for answer, key in keys:
        answer.grade = known[key]
    return file.counts


def describe(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was written, removed and spent, in lines."""
    yield f"{record['num_rows']:,} rows and {record['num_pairs']:,} pairs of {record['num_candidates']:,} candidates"
    if record["num_candidates"] < record["num_asked"]:
        yield (
            f"stopped at a limit: {record['num_asked'] - record['num_candidates']:,} candidates are missing; the same "
            "command with a higher max_cost or max_total_tokens writes them"
        )
    if record["removed"]:
        yield "removed: " + ", ".join(f"{reason} {count:,}" for reason, count in record["removed"].items())
    cost = f", cost {record['cost']:.4g}" if record["cost"] else ""
    yield f"writer: {record['num_prompt_tokens']:,} tokens read, {record['num_tokens']:,} written{cost}"
    if record["judge"] is not None and record["judge"]["num_prompt_tokens"]:
        judge = record["judge"]
        yield f"judge: {judge['num_prompt_tokens']:,} tokens read, {judge['num_tokens']:,} written"

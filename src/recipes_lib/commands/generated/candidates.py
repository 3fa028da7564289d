"""Candidates of ``recipes synthesize``: replies that pass the filters, and the rows and pairs made of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from recipes_lib.commands.generated.generation_methods import Method, SourceRow, take_reply
from recipes_lib.commands.generated.row_filters import Check, NearDuplicates, find_agreeing
from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.data.sources.messages import is_answer
from recipes_lib.errors import DataError, Problem
from recipes_lib.evaluation.endpoint import join_reasoning, split_reasoning
from recipes_lib.files import parse_record, replacing

ROWS: Final = "rows.jsonl"
PAIRS: Final = "pairs.jsonl"
_NUM_SHOWN: Final = 20
"""Rows of each kind that the report shows."""


@dataclass
class Answer:
    """A text of the last step that passed the filters.

    Attributes:
        text: Without reasoning.
        place: Its number among all answers.
        thought: The reasoning before it; ``None`` without.
        agrees: Whether it has the most common result.
        grade: ``None`` where the judge gave none.
    """

    text: str
    place: int
    thought: str | None = None
    agrees: bool = True
    grade: float | None = None

    def rank(self) -> tuple[bool, float]:
        """Return what decides between two answers: first agreement, then the grade."""
        return self.agrees, -math.inf if self.grade is None else self.grade


@dataclass
class Candidate:
    """A row that passed the filters: what it was made of, and its answers that passed.

    Attributes:
        values: Of the method's templates, without the last step.
        answers: In order.
        agreement: Share of the most common result; ``None`` if not asked for.
    """

    values: Mapping[str, Any]
    answers: list[Answer]
    agreement: float | None = None

    def find_extremes(self) -> tuple[Answer, Answer]:
        """Return the best and the worst answer; the first of equal ones."""
        # Answers without a grade take part only where no answer has one.
        known = [answer for answer in self.answers if answer.grade is not None] or self.answers
        return max(known, key=Answer.rank), min(known, key=Answer.rank)


def find_failure(step: Mapping[str, Any], text: str, *, error: str | None, is_finished: bool) -> str | None:
    """Why a reply cannot be used."""
    if error is not None:
        return "refused by the engine"
    if not is_finished:
        return "unfinished"
    if not split_reasoning(text)[1].strip():
        return "empty"
    if not is_answer(text):
        return "a NUL or half a surrogate pair"
    return None if take_reply(step, text) is not None else f"no {step['name']} in the reply"


def read_row_file(path: Path, num_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file that this command wrote, one in memory at a time.

    Raises:
        DataError: A line is broken.
    """
    read = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            read += len(line)
            if num_bytes is not None and read > num_bytes:
                return
            row = parse_record(line.decode(errors="replace"))
            if row is None:
                raise DataError(Problem(f"{path}:{number}", "is not a JSON object", f"delete {path} and its record"))
            yield row


def filter_replies(
    method: Method,
    rows: Sequence[SourceRow],
    checks: Sequence[Check],
    path: Path,
    removed: Counter[str],
    samples: dict[str, list[Any]],
) -> Iterator[Candidate]:
    """Yield the rows that pass all filters but those of grades, and count the others by reason.

    Args:
        method: That made the replies; how many of them count, since an earlier launch may have asked for more.
        rows: Of the source.
        checks: Of single answers.
        path: Of the replies.
        removed: Gets the counts.
        samples: Gets the first replies of each reason.
    """
    threshold = method.config.near_duplicates_threshold
    seen = None if threshold is None else NearDuplicates(threshold)
    if seen is not None and method.fields["compare_with_source"]:
        for row in rows:
            seen.add(row.text)
    for reply in islice(read_row_file(path), method.config.num_candidates or len(rows)):
        found = _take(method, rows, checks, reply)
        if isinstance(found, Candidate) and seen is not None and seen.add(read_compared(method, found)):
            found = "near duplicate"
        if isinstance(found, Candidate):
            yield found
            continue
        removed[found] += 1
        if len(shown := samples.setdefault(found, [])) < _NUM_SHOWN:
            shown.append(
                {**reply["steps"], "answers": [answer["text"] or answer["error"] for answer in reply["answers"]]}
            )


def read_compared(method: Method, candidate: Candidate) -> str:
    """Return the text by which a candidate is compared with others."""
    return method.read_compared(complete_values(method, candidate, candidate.answers[0].text))


def complete_values(method: Method, candidate: Candidate, text: str) -> dict[str, Any]:
    """Values of a candidate with the text of one of its answers."""
    return {**candidate.values, method.steps[-1]["name"]: text}


def _take(
    method: Method, rows: Sequence[SourceRow], checks: Sequence[Check], reply: Mapping[str, Any]
) -> Candidate | str:
    """Return the candidate in a reply, or why there is none."""
    if reply["failed"] is not None:
        return str(reply["failed"])
    # Drawn again instead of stored: seed and number decide them.
    values = method.draw(rows, reply["number"]) | {"number": reply["number"]}
    values |= {step["name"]: take_reply(step, reply["steps"][step["name"]]) for step in method.steps[:-1]}
    candidate, reasons = Candidate(values, []), list[str]()
    for place, given in enumerate(reply["answers"]):
        last = method.steps[-1]
        reason = find_failure(last, given["text"], error=given["error"], is_finished=given["is_finished"])
        text = "" if reason is not None else str(take_reply(last, given["text"]))
        if reason := reason or _find_fault(text, checks):
            reasons.append(reason)
        else:
            candidate.answers.append(Answer(text, place, split_reasoning(given["text"])[0]))
    if not candidate.answers:
        return reasons[0]
    # What the model has asked is checked too, but for its length.
    if method.fields["compare_with_source"] and (reason := _find_fault(read_compared(method, candidate), checks[1:])):
        return reason
    if method.config.min_agreement is not None:
        agreeing = find_agreeing([answer.text for answer in candidate.answers])
        # Of all answers that were asked for: those that were removed do not agree.
        candidate.agreement = len(agreeing) / method.config.num_answers
        if candidate.agreement < method.config.min_agreement:
            return "no agreement"
        for at, answer in enumerate(candidate.answers):
            answer.agrees = at in agreeing
    return candidate


def _find_fault(text: str, checks: Sequence[Check]) -> str | None:
    return next(filter(None, (check(text) for check in checks)), None)


def keep_graded(config: SynthesisConfig, candidate: Candidate, removed: Counter[str]) -> bool:
    """Whether the best answer of a row has a grade, and a good one."""
    if config.judge is None:
        return True
    best = candidate.find_extremes()[0].grade
    if best is None:
        removed["no grade"] += 1
    elif config.min_score is not None and best < config.min_score:
        removed["low grade"] += 1
    else:
        return True
    return False


def write_rows(
    method: Method, candidates: Sequence[Candidate], folder: Path, samples: dict[str, list[Any]]
) -> tuple[int, int]:
    """Write ``rows.jsonl`` and ``pairs.jsonl``, and return how many rows each has."""
    is_ranked = method.config.judge is not None or method.config.min_agreement is not None
    rows, pairs = list[dict[str, Any]](), list[dict[str, Any]]()
    for candidate in candidates:
        best, worst = candidate.find_extremes()
        for answer in [best] if is_ranked else candidate.answers:
            rows.append({**_build_row(method, candidate, answer), **_describe(method, candidate, answer)})
        if is_ranked and best.rank() != worst.rank():
            pairs += _build_pair(method, candidate, best, worst)
    samples["kept"] = rows[:_NUM_SHOWN]
    for name, written in ((ROWS, rows), (PAIRS, pairs)):
        if written or name == ROWS:
            with replacing(folder / name) as partial, partial.open("w", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in written)
        else:
            # Pairs of an earlier launch, with other filters, would pass for those of this one.
            (folder / name).unlink(missing_ok=True)
    return len(rows), len(pairs)


def _build_row(method: Method, candidate: Candidate, answer: Answer) -> dict[str, Any]:
    thought = answer.thought if method.config.reasoning == "keep" else None
    return method.build_row(complete_values(method, candidate, join_reasoning(thought, answer.text)))


def _describe(method: Method, candidate: Candidate, answer: Answer) -> dict[str, Any]:
    """Provenance of a row, as its column ``synthesis``."""
    values = candidate.values
    return {
        "synthesis": {
            "method": method.path.stem,
            "model": method.config.model_name_or_path,
            "number": values["number"],
            "answer": answer.place,
            "source": values["source"],
            **{name: values[name] for name in method.fields["choices"] or ()},
            "grade": answer.grade,
            "agreement": candidate.agreement,
        }
    }


def _build_pair(method: Method, candidate: Candidate, best: Answer, worst: Answer) -> Iterator[dict[str, Any]]:
    """Yield the preference row of the best and the worst answer, if the method writes answers to prompts."""
    chosen, rejected = (_build_row(method, candidate, answer) for answer in (best, worst))
    provenance = _describe(method, candidate, best)
    if isinstance(chosen.get("messages"), list):
        sides = {"chosen": chosen["messages"][-1:], "rejected": rejected["messages"][-1:]}
        yield {"prompt": chosen["messages"][:-1], **sides, **provenance}
    elif "completion" in chosen:
        sides = {"chosen": chosen["completion"], "rejected": rejected["completion"]}
        yield {"prompt": chosen["prompt"], **sides, **provenance}

"""Candidates of ``recipes synthesize``: replies that pass the filters, and the rows and pairs built from them."""

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
from recipes_lib.files import atomic_file, read_lines

ROWS: Final = "rows.jsonl"
PAIRS: Final = "pairs.jsonl"
_NUM_SHOWN: Final = 20
"""Rows in the report, per reason of removal."""


@dataclass
class Answer:
    """A reply of the last step that passed the filters.

    Attributes:
        text: Text without reasoning.
        place: Index among all answers to the prompt, including removed ones.
        thought: Reasoning before the text; ``None`` if there is none.
        agrees: Whether it has the most common result.
        grade: Grade of the judge; ``None`` without one.
    """

    text: str
    place: int
    thought: str | None = None
    agrees: bool = True
    grade: float | None = None

    def rank(self) -> tuple[bool, float]:
        """Return the sort key of answers: agreement first, then the grade."""
        return self.agrees, -math.inf if self.grade is None else self.grade


@dataclass
class Candidate:
    """A generated row with the answers that passed the filters.

    Attributes:
        values: Values of the method's templates, without the last step.
        answers: Answers in order.
        agreement: Share of answers with the most common result; ``None`` without ``min_agreement``.
    """

    values: Mapping[str, Any]
    answers: list[Answer]
    agreement: float | None = None

    def find_extremes(self) -> tuple[Answer, Answer]:
        """Return the best and the worst answer; of equal ones the first."""
        # Answers without a grade are ignored, unless no answer has one.
        known = [answer for answer in self.answers if answer.grade is not None] or self.answers
        return max(known, key=Answer.rank), min(known, key=Answer.rank)


def find_failure(step: Mapping[str, Any], text: str, *, error: str | None, is_finished: bool) -> str | None:
    """Return the reason why a reply of a step is unusable; ``None`` if it is usable."""
    if error is not None:
        return "refused by the engine"
    if not is_finished:
        return "unfinished"
    if not split_reasoning(text)[1].strip():
        return "empty"
    if not is_answer(text):
        return "a NUL or half a surrogate pair"
    return None if take_reply(step, text) is not None else f"no {step['name']} in the reply"


def read_row_file(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of this command, line by line.

    Raises:
        DataError: A line is not a JSON object.
    """
    for number, row in enumerate(read_lines(path), 1):
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
    """Yield the candidates that pass all filters except those on grades, and count the others by reason.

    Args:
        method: Method and configuration; ``num_candidates`` may be lower than in an earlier launch.
        rows: Source rows.
        checks: Filters of single answers; the first one checks lengths.
        path: File of the replies.
        removed: Counts by reason, updated in place.
        samples: First removed replies by reason, updated in place.
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
    """Return the text by which a candidate is compared with others, rendered with its first answer."""
    return method.read_compared(complete_values(method, candidate, candidate.answers[0].text))


def complete_values(method: Method, candidate: Candidate, text: str) -> dict[str, Any]:
    """Return the template values of a candidate with the text of one of its answers."""
    return {**candidate.values, method.steps[-1]["name"]: text}


def _take(
    method: Method, rows: Sequence[SourceRow], checks: Sequence[Check], reply: Mapping[str, Any]
) -> Candidate | str:
    """Return the candidate in a reply, or the reason of its removal."""
    if reply["failed"] is not None:
        return str(reply["failed"])
    # Drawn again instead of stored, since seed and number determine them.
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
    # A generated prompt is checked, too, except for its length: `checks[0]`.
    if method.fields["compare_with_source"] and (reason := _find_fault(read_compared(method, candidate), checks[1:])):
        return reason
    if method.config.min_agreement is not None:
        agreeing = find_agreeing([answer.text for answer in candidate.answers])
        # Relative to all requested answers: removed ones count as disagreeing.
        candidate.agreement = len(agreeing) / method.config.num_answers
        if candidate.agreement < method.config.min_agreement:
            return "no agreement"
        for at, answer in enumerate(candidate.answers):
            answer.agrees = at in agreeing
    return candidate


def _find_fault(text: str, checks: Sequence[Check]) -> str | None:
    return next(filter(None, (check(text) for check in checks)), None)


def keep_graded(config: SynthesisConfig, candidate: Candidate, removed: Counter[str]) -> bool:
    """Return whether the best answer of a candidate has a sufficient grade; else count it in ``removed``."""
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
    """Write ``rows.jsonl`` and ``pairs.jsonl``; return the number of rows of each."""
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
            with atomic_file(folder / name) as partial, partial.open("w", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in written)
        else:
            # Pairs of an earlier launch with other filters must not remain.
            (folder / name).unlink(missing_ok=True)
    return len(rows), len(pairs)


def _build_row(method: Method, candidate: Candidate, answer: Answer) -> dict[str, Any]:
    thought = answer.thought if method.config.reasoning == "keep" else None
    return method.build_row(complete_values(method, candidate, join_reasoning(thought, answer.text)))


def _describe(method: Method, candidate: Candidate, answer: Answer) -> dict[str, Any]:
    """Return the provenance of a row, its column ``synthesis``."""
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
    """Yield the preference row of the best and the worst answer; nothing for methods that write plain text."""
    chosen, rejected = (_build_row(method, candidate, answer) for answer in (best, worst))
    provenance = _describe(method, candidate, best)
    if isinstance(chosen.get("messages"), list):
        sides = {"chosen": chosen["messages"][-1:], "rejected": rejected["messages"][-1:]}
        yield {"prompt": chosen["messages"][:-1], **sides, **provenance}
    elif "completion" in chosen:
        sides = {"chosen": chosen["completion"], "rejected": rejected["completion"]}
        yield {"prompt": chosen["prompt"], **sides, **provenance}

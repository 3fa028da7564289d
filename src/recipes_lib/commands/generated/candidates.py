"""Candidates of ``recipes synthesize``: replies that pass the filters, and the rows and pairs made of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
class Candidate:
    """A row that passed the filters: what it was made of, and its answers that passed.

    Attributes:
        values: Of the method's templates, without the last step.
        answers: Texts of the last step, in order.
        thoughts: The reasoning before each; ``None`` without.
        places: Their numbers among all answers.
        agrees: Whether each has the most common result.
        agreement: Share of the most common result; ``None`` if not asked for.
        grades: Of each answer; ``None`` where the judge gave none.
    """

    values: Mapping[str, Any]
    answers: list[str]
    thoughts: list[str | None]
    places: list[int]
    agrees: list[bool]
    agreement: float | None = None
    grades: list[float | None] = field(default_factory=list)

    def find_extremes(self) -> tuple[int, int]:
        """Return the best and the worst answer: first by agreement, then by grade; the first of equal ones."""
        ranks = [
            (one, -float("inf") if grade is None else grade)
            for one, grade in zip(self.agrees, self.grades, strict=True)
        ]
        # Answers without a grade take part only where no answer has one.
        known = [at for at, grade in enumerate(self.grades) if grade is not None] or list(range(len(ranks)))
        return max(known, key=lambda at: ranks[at]), min(known, key=lambda at: ranks[at])

    def rank(self, at: int) -> tuple[bool, float | None]:
        """Return what decides between two answers."""
        return self.agrees[at], self.grades[at]


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
    config: SynthesisConfig,
    method: Method,
    rows: Sequence[SourceRow],
    checks: Sequence[Check],
    path: Path,
    removed: Counter[str],
    samples: dict[str, list[Any]],
) -> Iterator[Candidate]:
    """Yield the rows that pass all filters but those of grades, and count the others by reason.

    Args:
        config: Thresholds, and how many replies count: an earlier launch may have asked for more.
        method: That made the replies.
        rows: Of the source.
        checks: Of single answers.
        path: Of the replies.
        removed: Gets the counts.
        samples: Gets the first replies of each reason.
    """
    threshold = config.near_duplicates_threshold
    seen = None if threshold is None else NearDuplicates(threshold)
    if seen is not None and method.fields["compare_with_source"]:
        for row in rows:
            seen.add(row.text)
    for reply in islice(read_row_file(path), config.num_candidates or len(rows)):
        found = _take(config, method, rows, checks, reply)
        if isinstance(found, Candidate) and seen is not None and seen.add(_read_compared(method, found)):
            found = "near duplicate"
        if isinstance(found, Candidate):
            yield found
            continue
        removed[found] += 1
        if len(shown := samples.setdefault(found, [])) < _NUM_SHOWN:
            shown.append(
                {**reply["steps"], "answers": [answer["text"] or answer["error"] for answer in reply["answers"]]}
            )


def _read_compared(method: Method, candidate: Candidate) -> str:
    return method.read_compared(complete_values(method, candidate, 0))


def complete_values(method: Method, candidate: Candidate, at: int, *, with_reasoning: bool = False) -> dict[str, Any]:
    """Values of a candidate with one of its answers, and perhaps the reasoning before it."""
    thought = candidate.thoughts[at] if with_reasoning else None
    return {**candidate.values, method.steps[-1]["name"]: join_reasoning(thought, candidate.answers[at])}


def _take(
    config: SynthesisConfig,
    method: Method,
    rows: Sequence[SourceRow],
    checks: Sequence[Check],
    reply: Mapping[str, Any],
) -> Candidate | str:
    """Return the candidate in a reply, or why there is none."""
    if reply["failed"] is not None:
        return str(reply["failed"])
    # Drawn again instead of stored: seed and number decide them.
    values = method.draw(config, rows, reply["number"]) | {"number": reply["number"]}
    values |= {step["name"]: take_reply(step, reply["steps"][step["name"]]) for step in method.steps[:-1]}
    reasons: list[str | None] = []
    texts: list[str] = []
    for answer in reply["answers"]:
        last = method.steps[-1]
        reason = find_failure(last, answer["text"], error=answer["error"], is_finished=answer["is_finished"])
        texts.append("" if reason is not None else str(take_reply(last, answer["text"])))
        reasons.append(reason or next(filter(None, (one(texts[-1]) for one in checks)), None))
    places = [at for at, reason in enumerate(reasons) if reason is None]
    if not places:
        return str(reasons[0])
    thoughts = [split_reasoning(reply["answers"][at]["text"])[0] for at in places]
    candidate = Candidate(values, [texts[at] for at in places], thoughts, places, [True] * len(places))
    if method.fields["compare_with_source"]:
        # What the model has asked is checked too, but for its length.
        asked = _read_compared(method, candidate)
        if reason := next(filter(None, (one(asked) for one in checks[1:])), None):
            return reason
    if config.min_agreement is not None:
        agreeing = find_agreeing(candidate.answers)
        # Of all answers that were asked for: those that were removed do not agree.
        candidate.agreement = len(agreeing) / config.num_answers
        if candidate.agreement < config.min_agreement:
            return "no agreement"
        candidate.agrees = [at in agreeing for at in range(len(places))]
    candidate.grades = [None] * len(places)
    return candidate


def keep_graded(config: SynthesisConfig, candidate: Candidate, removed: Counter[str]) -> bool:
    """Whether the best answer of a row has a grade, and a good one."""
    if config.judge is None:
        return True
    best = candidate.grades[candidate.find_extremes()[0]]
    if best is None:
        removed["no grade"] += 1
    elif config.min_score is not None and best < config.min_score:
        removed["low grade"] += 1
    else:
        return True
    return False


def write_rows(
    config: SynthesisConfig,
    method: Method,
    candidates: Sequence[Candidate],
    folder: Path,
    samples: dict[str, list[Any]],
) -> tuple[int, int]:
    """Write ``rows.jsonl`` and ``pairs.jsonl``, and return how many rows each has."""
    is_ranked = config.judge is not None or config.min_agreement is not None
    rows, pairs = list[dict[str, Any]](), list[dict[str, Any]]()
    for candidate in candidates:
        best, worst = candidate.find_extremes()
        for at in [best] if is_ranked else range(len(candidate.answers)):
            rows.append({**_build_row(config, method, candidate, at), **_describe(config, method, candidate, at)})
        if is_ranked and candidate.rank(best) != candidate.rank(worst):
            pairs += _build_pair(config, method, candidate, best, worst)
    samples["kept"] = rows[:_NUM_SHOWN]
    for name, written in ((ROWS, rows), (PAIRS, pairs)):
        if written or name == ROWS:
            with replacing(folder / name) as partial, partial.open("w", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in written)
        else:
            # Pairs of an earlier launch, with other filters, would pass for those of this one.
            (folder / name).unlink(missing_ok=True)
    return len(rows), len(pairs)


def _build_row(config: SynthesisConfig, method: Method, candidate: Candidate, at: int) -> dict[str, Any]:
    return method.build_row(complete_values(method, candidate, at, with_reasoning=config.reasoning == "keep"))


def _describe(config: SynthesisConfig, method: Method, candidate: Candidate, at: int) -> dict[str, Any]:
    """Provenance of a row, as its column ``synthesis``."""
    values = candidate.values
    return {
        "synthesis": {
            "method": method.path.stem,
            "model": config.model_name_or_path,
            "number": values["number"],
            "answer": candidate.places[at],
            "source": values["source"],
            **{name: values[name] for name in method.fields["choices"] or ()},
            "grade": candidate.grades[at],
            "agreement": candidate.agreement,
        }
    }


def _build_pair(
    config: SynthesisConfig, method: Method, candidate: Candidate, best: int, worst: int
) -> Iterator[dict[str, Any]]:
    """Yield the preference row of the best and the worst answer, if the method writes answers to prompts."""
    chosen, rejected = (_build_row(config, method, candidate, at) for at in (best, worst))
    provenance = _describe(config, method, candidate, best)
    if isinstance(chosen.get("messages"), list):
        sides = {"chosen": chosen["messages"][-1:], "rejected": rejected["messages"][-1:]}
        yield {"prompt": chosen["messages"][:-1], **sides, **provenance}
    elif "completion" in chosen:
        sides = {"chosen": chosen["completion"], "rejected": rejected["completion"]}
        yield {"prompt": chosen["prompt"], **sides, **provenance}

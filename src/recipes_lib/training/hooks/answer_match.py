"""A metric that comes with the library, and the pattern for one of your own: is the answer the reference?"""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal

import datasets
import evaluate

from recipes_lib.data.final_numbers import read_final_number

_WORD = re.compile(r"\w+")


class AnswerMatch(evaluate.Metric):  # type: ignore[misc]
    """``exact_match`` of the final answer, and ``token_f1`` of all words, each a mean over samples in 0 to 1.

    The final answer is the number of ``read_final_number`` where the reference ends in one; else what follows ``####``,
    or the whole text. Letter case, punctuation and spacing do not count.

    Source: token F1 as in SQuAD (Rajpurkar et al. 2016); ``tests/training/hooks/test_answer_match.py``.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Exact match of the final answer and F1 of the words.",
            citation="",
            inputs_description="Strings.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        pairs = list(zip(predictions, references, strict=True))
        matches = [
            _find_answer(prediction, reference) == _find_answer(reference, reference) for prediction, reference in pairs
        ]
        return {
            "exact_match": sum(matches) / len(pairs),
            "token_f1": sum(_compute_f1(prediction, reference) for prediction, reference in pairs) / len(pairs),
        }


def _find_answer(text: str, reference: str) -> Decimal | list[str]:
    """Return the final answer in ``text``, normalised; ``reference`` says which kind of answer is looked for."""
    number = read_final_number(text) if re.search(r"\d\W*$", reference) else None
    return _WORD.findall(text.rpartition("####")[2].casefold()) if number is None else number


def _compute_f1(prediction: str, reference: str) -> float:
    predicted, expected = (Counter(_WORD.findall(text.casefold())) for text in (prediction, reference))
    if not predicted or not expected:
        return float(predicted == expected)
    return 2 * (predicted & expected).total() / (predicted.total() + expected.total())

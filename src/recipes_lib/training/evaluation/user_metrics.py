"""User-defined metrics of samples: ``evaluate.Metric`` classes by import path."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from typing import Final

import datasets
import evaluate
from evaluate import Metric

from recipes_lib.config.rules import METRICS
from recipes_lib.config.values import split_import_path
from recipes_lib.data.final_numbers import read_final_number
from recipes_lib.errors import ConfigError, Problem, UserError

_KEY = "metrics"

RESERVED: Final = frozenset([*METRICS["text"], *METRICS["samples"]])
"""Metrics of every evaluation, which a user's metric would replace."""

_WORD = re.compile(r"\w+")


def load_metrics(paths: Sequence[str]) -> list[Metric]:
    """Build every metric of a recipe's ``metrics`` key.

    Raises:
        ConfigError: Metrics that cannot be imported or built, each with the reason.
    """
    loaded = [_load(path) for path in paths]
    if problems := [problem for problem in loaded if isinstance(problem, Problem)]:
        raise ConfigError(*problems)
    return [metric for metric in loaded if isinstance(metric, Metric)]


def _load(path: str) -> Metric | Problem:
    """Build the metric at an import path such as ``my_package.scores:WordOverlap``, or return why it cannot be built.

    ``package.module:Class(name=value, ...)`` passes literals to the constructor.
    """
    try:
        module_name, class_name, arguments = split_import_path(path)
        module = importlib.import_module(module_name)
    except Exception as error:
        found = f"importing {path!r} failed: {type(error).__name__}: {error}"
        return Problem(_KEY, found, "correct it, install it, or put its folder on PYTHONPATH")
    found_class = getattr(module, class_name, None)
    if not (isinstance(found_class, type) and issubclass(found_class, Metric)):
        found = f"{class_name!r} in {module_name!r} is {'missing' if found_class is None else 'not an evaluate.Metric'}"
        return Problem(_KEY, found, "name a subclass of evaluate.Metric")
    try:
        # In memory, because processes on one machine would lock the same cache file.
        return found_class(keep_in_memory=True, **(arguments or {}))
    except Exception as error:
        found = f"{path} cannot be built: {type(error).__name__}: {error}"
        return Problem(_KEY, found, "its constructor must accept keep_in_memory=True and the given arguments")


def compute_metrics(metrics: Sequence[Metric], scored: Sequence[tuple[str, str, str]]) -> dict[str, float]:
    """Return the values of all metrics on samples; empty without samples.

    Args:
        metrics: Metrics, called with ``predictions``, ``references`` and, if they have that feature, ``prompts``.
        scored: Prompt, prediction and reference of each sample.

    Raises:
        ConfigError: A metric raised, its result is not a mapping of names to numbers, or one of the names is taken.
    """
    values: dict[str, float] = {}
    if not scored:
        return values
    prompts, predictions, references = map(list, zip(*scored, strict=True))
    for metric in metrics:
        name = type(metric).__name__
        extra = {"prompts": prompts} if "prompts" in (getattr(metric, "features", None) or ()) else {}
        try:
            result = metric.compute(predictions=predictions, references=references, **extra)
        except UserError:
            raise
        except Exception as error:
            found = f"{name} failed on {len(scored)} samples: {type(error).__name__}: {error}"
            raise ConfigError(Problem(_KEY, found, "fix it; its arguments are lists of strings")) from error
        if not isinstance(result, dict) or not all(isinstance(value, Real) for value in result.values()):
            raise ConfigError(Problem(_KEY, f"{name} returned {result!r}", "return a dict of names to numbers"))
        if taken := sorted(result.keys() & (values.keys() | RESERVED)):
            found = f"{name} returned `{taken[0]}`, which is a metric already"
            raise ConfigError(Problem(_KEY, found, "let it return another name, or remove one of the two"))
        values |= {key: float(value) for key, value in result.items()}
    return values


def describe_metric(description: str, *names: str) -> evaluate.MetricInfo:
    """Return the ``MetricInfo`` of a metric whose features are strings of these names."""
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return evaluate.MetricInfo(description=description, citation="", inputs_description="Strings.", features=features)


class AnswerMatch(evaluate.Metric):  # type: ignore[misc]
    """Metrics ``exact_match`` of the final answer and ``token_f1`` of all words, means over samples from 0 to 1.

    The final answer is the number of ``read_final_number`` if the reference ends with a number outside an expression;
    else the text after ``####``, or the whole text. Letter case, punctuation and spacing are ignored.

    Source: token F1 as in SQuAD (Rajpurkar et al. 2016); ``tests/training/evaluation/test_user_metrics.py``.
    """

    def _info(self) -> evaluate.MetricInfo:
        return describe_metric("Exact match of the final answer and F1 of the words.", "predictions", "references")

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
    """Return the normalised final answer in ``text``: a number if ``reference`` ends with one, else words."""
    is_number = re.search(r"\d\W*$", reference) and read_final_number(reference, is_reference=True) is not None
    number = read_final_number(text) if is_number else None
    return _WORD.findall(text.rpartition("####")[2].casefold()) if number is None else number


def _compute_f1(prediction: str, reference: str) -> float:
    predicted, expected = (Counter(_WORD.findall(text.casefold())) for text in (prediction, reference))
    if not predicted or not expected:
        return float(predicted == expected)
    return 2 * (predicted & expected).total() / (predicted.total() + expected.total())

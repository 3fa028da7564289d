"""User metrics on samples: ``evaluate.Metric`` classes by import path, offline."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real

import datasets
import evaluate
from evaluate import Metric

from recipes_lib.config.values import read_constants
from recipes_lib.data.final_numbers import read_final_number
from recipes_lib.errors import ConfigError, Problem, UserError

_KEY = "metrics"
_MOVED = {"recipes_lib.training.hooks.answer_match": __name__}
"""Old module -> new one, for the paths in configurations of the versions before."""

_WORD = re.compile(r"\w+")


def load_metrics(paths: Sequence[str]) -> list[Metric]:
    """Load every metric of a recipe's ``metrics`` key.

    Raises:
        ConfigError: All paths that cannot be loaded, with the reason of each.
    """
    loaded = [_load(path) for path in paths]
    if problems := [problem for problem in loaded if isinstance(problem, Problem)]:
        raise ConfigError(*problems)
    return [metric for metric in loaded if isinstance(metric, Metric)]


def _load(path: str) -> Metric | Problem:
    """Build the metric at an import path such as ``my_package.scores:WordOverlap``, or say why it cannot be built.

    ``package.module:Class(name=value, ...)`` passes constants.
    """
    target, opened, arguments = path.partition("(")
    module_name, _, class_name = target.partition(":")
    module_name = _MOVED.get(module_name, module_name)
    if not module_name or not class_name:
        return Problem(_KEY, f"{path!r} is no import path", "write it as package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        found = f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        return Problem(_KEY, found, "install it, or put its folder on PYTHONPATH")
    found_class = getattr(module, class_name, None)
    if not (isinstance(found_class, type) and issubclass(found_class, Metric)):
        found = f"{class_name!r} in {module_name!r} is {'missing' if found_class is None else 'no evaluate.Metric'}"
        return Problem(_KEY, found, "name a subclass of evaluate.Metric")
    try:
        # In memory: processes on one machine would share, and lock, one file.
        given = read_constants(f"f({arguments}") if opened else {}
        return found_class(keep_in_memory=True, **given)
    except Exception as error:
        found = f"{path} cannot be built: {type(error).__name__}: {error}"
        return Problem(_KEY, found, "let it be built with keyword arguments of evaluate.Metric only")


def compute_metrics(metrics: Sequence[Metric], scored: Sequence[tuple[str, str, str]]) -> dict[str, float]:
    """Return the figures of every metric on (prompt, prediction, reference); none where there are no such.

    A metric is given ``predictions`` and ``references``, and ``prompts`` if that is among its features.

    Raises:
        ConfigError: A metric raised, or its result is not a mapping of names to numbers.
    """
    figures: dict[str, float] = {}
    if not scored:
        return figures
    prompts, predictions, references = map(list, zip(*scored, strict=True))
    for metric in metrics:
        name = type(metric).__name__
        asked = {"prompts": prompts} if "prompts" in (getattr(metric, "features", None) or ()) else {}
        try:
            result = metric.compute(predictions=predictions, references=references, **asked)
        except UserError:
            raise
        except Exception as error:
            found = f"{name} failed on {len(scored)} samples: {type(error).__name__}: {error}"
            raise ConfigError(Problem(_KEY, found, "it is given lists of strings; fix it")) from error
        if not isinstance(result, dict) or not all(isinstance(value, Real) for value in result.values()):
            raise ConfigError(Problem(_KEY, f"{name} returned {result!r}", "return a dict of names to numbers"))
        figures |= {key: float(value) for key, value in result.items()}
    return figures


def describe_metric(description: str, *names: str) -> evaluate.MetricInfo:
    """Return the description of a metric of strings, each given under one of the names."""
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return evaluate.MetricInfo(description=description, citation="", inputs_description="Strings.", features=features)


class AnswerMatch(evaluate.Metric):  # type: ignore[misc]
    """``exact_match`` of the final answer, and ``token_f1`` of all words, each a mean over samples in 0 to 1.

    The final answer is the number of ``read_final_number`` where the reference ends in one; else what follows ``####``,
    or the whole text. Letter case, punctuation and spacing do not count.

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
    """Return the final answer in ``text``, normalised; ``reference`` says which kind of answer is looked for."""
    number = read_final_number(text) if re.search(r"\d\W*$", reference) else None
    return _WORD.findall(text.rpartition("####")[2].casefold()) if number is None else number


def _compute_f1(prediction: str, reference: str) -> float:
    predicted, expected = (Counter(_WORD.findall(text.casefold())) for text in (prediction, reference))
    if not predicted or not expected:
        return float(predicted == expected)
    return 2 * (predicted & expected).total() / (predicted.total() + expected.total())

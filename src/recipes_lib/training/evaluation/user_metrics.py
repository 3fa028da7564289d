"""User-defined objects by import path, and metrics of samples: ``evaluate.Metric`` classes."""

from __future__ import annotations

import json
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import wraps
from numbers import Real
from typing import Any, Final, TypeVar

import datasets
import evaluate
from evaluate import Metric
from transformers import TrainerCallback, TrainerControl

from recipes_lib.config.rules import METRICS
from recipes_lib.config.values import import_object, split_import_path
from recipes_lib.data.final_numbers import read_final_number
from recipes_lib.errors import ConfigError, Problem, UserError

_KEY = "metrics"
_T = TypeVar("_T")

RESERVED: Final = frozenset([*METRICS["text"], *METRICS["samples"]])
"""Metrics of every evaluation, which a user's metric would replace."""

_WORD = re.compile(r"\w+")


def load_metrics(paths: Sequence[str]) -> list[Metric]:
    """Build every metric of a recipe's ``metrics`` key, as ``load_objects``."""
    # In memory, because processes on one machine would lock the same cache file.
    return load_objects(_KEY, paths, Metric, keep_in_memory=True)


def load_callbacks(paths: Sequence[str]) -> list[TrainerCallback]:
    """Build the callbacks of a recipe, as ``load_objects``; what their events raise is a ``ConfigError``."""
    callbacks = load_objects("callbacks", paths, TrainerCallback)
    for callback in callbacks:
        for event in dir(callback):
            if event.startswith("on_"):
                setattr(callback, event, _explaining(getattr(callback, event)))
    return callbacks


def _explaining(handler: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = handler(*args, **kwargs)
            json.dumps(kwargs.get("logs"))  # What it has added is written to ``metrics.jsonl``.
            if not isinstance(result, TrainerControl | None):
                raise TypeError(f"it returned {result!r}; return the control, or nothing")
            return result
        except UserError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{handler.__qualname__} failed: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            raise ConfigError(Problem("callbacks", found, "fix it, or remove it; the same command resumes")) from error

    return call


def load_objects(key: str, paths: Sequence[str], kind: type[_T], **given: Any) -> list[_T]:
    """Build an object of each class of a key's import paths, such as ``my_package.scores:WordOverlap``.

    ``package.module:Class(name=value, ...)`` passes literals to the constructor.

    Args:
        key: Key of the configuration.
        paths: Its value.
        kind: Class of which all must be subclasses.
        **given: Arguments of every constructor.

    Raises:
        ConfigError: Classes that cannot be imported or built, each with the reason.
    """
    loaded = [_load(key, path, kind, given) for path in paths]
    if problems := [problem for problem in loaded if isinstance(problem, Problem)]:
        raise ConfigError(*problems)
    return [one for one in loaded if isinstance(one, kind)]


def _load(key: str, path: str, kind: type[_T], given: Mapping[str, Any]) -> _T | Problem:
    try:
        module_name, class_name, arguments = split_import_path(path)
        found_class = import_object(module_name, class_name)
    except Exception as error:
        found = f"importing {path!r} failed: {type(error).__name__}: {error}"
        return Problem(key, found, "correct it, install it, or put its folder on PYTHONPATH")
    name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    if not (isinstance(found_class, type) and issubclass(found_class, kind)):
        return Problem(key, f"{class_name!r} in {module_name!r} is no {name}", f"name a subclass of {name}")
    try:
        return found_class(**given, **(arguments or {}))
    except Exception as error:
        found = f"{path} cannot be built: {type(error).__name__}: {error}"
        accepted = "".join(f"{argument}={value} and " for argument, value in given.items())
        return Problem(key, found, f"its constructor must accept {accepted}the given arguments")


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

"""The user's own metrics on samples: ``evaluate.Metric`` classes by import path, without a network."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from numbers import Real

from evaluate import Metric

from recipes_lib.errors import ConfigError, Problem

_KEY = "metrics"


def load_metrics(paths: Sequence[str]) -> list[Metric]:
    """Load every metric of a recipe's ``metrics`` key.

    Raises:
        ConfigError: All paths that cannot be loaded, with the reason of each.
    """
    metrics: list[Metric] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            metrics.append(load_metric(path))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*problems)
    return metrics


def load_metric(path: str) -> Metric:
    """Build the metric at an import path such as ``my_package.scores:WordOverlap``.

    Raises:
        ConfigError: The path is not ``module:Class``, cannot be imported, names no ``evaluate.Metric`` class, or the
            class cannot be built without arguments.
    """
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ConfigError(Problem(_KEY, f"{path!r} is no import path", "write it as package.module:Class"))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        found = f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        raise ConfigError(Problem(_KEY, found, "install it, or put its folder on PYTHONPATH")) from error
    found_class = getattr(module, class_name, None)
    if not (isinstance(found_class, type) and issubclass(found_class, Metric)):
        found = f"{class_name!r} in {module_name!r} is {'missing' if found_class is None else 'no evaluate.Metric'}"
        raise ConfigError(Problem(_KEY, found, "name a subclass of evaluate.Metric"))
    try:
        # In memory: processes on one machine would share, and lock, one file.
        return found_class(keep_in_memory=True)
    except Exception as error:
        found = f"{path} cannot be built: {type(error).__name__}: {error}"
        raise ConfigError(
            Problem(_KEY, found, "let it be built with keyword arguments of evaluate.Metric only")
        ) from error


def compute_metrics(metrics: Sequence[Metric], scored: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Return the figures of every metric on pairs of (prediction, reference); none where there is no pair.

    Raises:
        ConfigError: A metric raised, or its result is not a mapping of names to numbers.
    """
    figures: dict[str, float] = {}
    if not scored:
        return figures
    predictions, references = zip(*scored, strict=True)
    for metric in metrics:
        name = type(metric).__name__
        try:
            result = metric.compute(predictions=list(predictions), references=list(references))
        except Exception as error:
            found = f"{name} failed on {len(scored)} samples: {type(error).__name__}: {error}"
            raise ConfigError(Problem(_KEY, found, "it is given lists of strings; mend it")) from error
        if not isinstance(result, dict) or not all(isinstance(value, Real) for value in result.values()):
            raise ConfigError(Problem(_KEY, f"{name} returned {result!r}", "return a dict of names to numbers"))
        figures |= {key: float(value) for key, value in result.items()}
    return figures

"""Metrics of the user's own: loaded by import path, offline, and every mistake is one clear error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recipes_lib.errors import ConfigError
from recipes_lib.training.evaluation.user_metrics import AnswerMatch, compute_metrics, load_metrics

SHIPPED = "recipes_lib.training.evaluation.user_metrics:AnswerMatch"
MODULE = """
import datasets
import evaluate


class Lengths(evaluate.Metric):
    result = {"mean_length": 2.5}

    def _info(self):
        string = datasets.Value("string")
        return evaluate.MetricInfo(
            description="", citation="", features=datasets.Features({"predictions": string, "references": string})
        )

    def _compute(self, predictions, references):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Listed(Lengths):
    result = {"all": [1, 2]}


class Nothing(Lengths):
    result = None


class Failing(Lengths):
    result = ValueError("no words")


class Demanding(Lengths):
    def __init__(self, language):
        pass


class Plain:
    pass
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_scores.py").write_text(MODULE)
    (tmp_path / "broken_scores.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_scores", "broken_scores"):
        sys.modules.pop(name, None)
    return "own_scores"


def test_a_class_of_the_users_own_is_computed_on_the_samples(own_module: str) -> None:
    metrics = load_metrics([SHIPPED, f"{own_module}:Lengths"])

    figures = compute_metrics(metrics, [("q", "42", "42"), ("q", "no", "yes")])

    assert figures == {"exact_match": 0.5, "token_f1": 0.5, "mean_length": 2.5}
    assert compute_metrics(metrics, [("q", "yes", "yes")])["exact_match"] == 1.0


def test_without_references_nothing_is_computed(own_module: str) -> None:
    assert compute_metrics(load_metrics([f"{own_module}:Failing"]), []) == {}


@pytest.mark.parametrize(
    ("path", "found", "remedy"),
    [
        ("own_scores", "not an import path", "package.module:Class"),
        ("own_scores:", "not an import path", "package.module:Class"),
        ("not_a_module:Thing", "No module named 'not_a_module'", "PYTHONPATH"),
        ("broken_scores:Thing", "a_package_that_is_not_there", "install"),
        ("own_scores:Absent", "missing", "subclass of evaluate.Metric"),
        ("own_scores:Plain", "not an evaluate.Metric", "subclass of evaluate.Metric"),
        ("own_scores:Demanding", "cannot be built", "constructor must accept"),
    ],
)
def test_a_bad_path_is_an_error_with_the_fix(own_module: str, path: str, found: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_metrics([path])

    (problem,) = caught.value.problems
    assert problem.where == "metrics"
    assert found in problem.found
    assert remedy in problem.remedy


def test_all_bad_paths_are_reported_at_once(own_module: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_metrics(["nowhere:X", SHIPPED, f"{own_module}:Plain"])

    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("name", "found"), [("Listed", "[1, 2]"), ("Nothing", "None"), ("Failing", "ValueError: no words")]
)
def test_a_metric_that_gives_no_numbers_is_an_error(own_module: str, name: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compute_metrics(load_metrics([f"{own_module}:{name}"]), [("q", "a", "b")])

    assert found in str(caught.value)
    assert name in str(caught.value)


def score(prediction: str, reference: str) -> dict[str, float]:
    metric = AnswerMatch(keep_in_memory=True)
    scores: dict[str, float] = metric.compute(predictions=[prediction], references=[reference])
    return scores


@pytest.mark.parametrize(
    ("prediction", "reference", "matches"),
    [
        ("She pays 3 + 4 = 7.\n#### 7", "#### 7", True),
        ("#### 1,250", "It is so.\n#### 1250", True),
        ("#### 12", "#### 1", False),
        ("so the answer is 72 apples", "#### 72", True),
        ("-3", "3", False),
        ("2.5", "the result is 2.5.", True),
        (".50", "0.5", True),
        (".5", "5", False),
        ("\u22125", "5", False),
        ("the capital is Paris", "Paris", False),
        (" PARIS! ", "paris", True),
        ("", "Paris", False),
        ("Rule 1: be kind", "Rule 2: be kind", False),
    ],
)
def test_the_final_answer_must_be_the_reference(prediction: str, reference: str, matches: bool) -> None:
    assert score(prediction, reference)["exact_match"] == float(matches)


def test_token_f1_is_the_harmonic_mean_of_precision_and_recall() -> None:
    # Three of four words right, three of six found: 2 * 0.75 * 0.5 / 1.25.
    assert score("a b c x", "a b c d e f")["token_f1"] == pytest.approx(0.6)
    assert score("a a a", "a")["token_f1"] == pytest.approx(0.5)
    assert score("", "")["token_f1"] == 1.0
    assert score("", "a")["token_f1"] == 0.0


def test_scores_are_means_over_samples() -> None:
    scores = AnswerMatch(keep_in_memory=True).compute(predictions=["1", "2", "3", "5"], references=["1", "2", "3", "4"])

    assert scores == {"exact_match": 0.75, "token_f1": 0.75}

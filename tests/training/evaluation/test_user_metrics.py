"""User metrics by import path, their errors, and the shipped ``AnswerMatch``."""

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


class Losses(Lengths):
    result = {"loss": 1.0}


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
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_scores.py").write_text(MODULE)
    (tmp_path / "broken_scores.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("user_scores", "broken_scores"):
        sys.modules.pop(name, None)
    return "user_scores"


def test_user_metric_is_computed(user_module: str) -> None:
    metrics = load_metrics([SHIPPED, f"{user_module}:Lengths"])

    figures = compute_metrics(metrics, [("q", "42", "42"), ("q", "no", "yes")])

    assert figures == {"exact_match": 0.5, "token_f1": 0.5, "mean_length": 2.5}
    assert compute_metrics(metrics, [("q", "yes", "yes")])["exact_match"] == 1.0


def test_no_metric_without_references(user_module: str) -> None:
    assert compute_metrics(load_metrics([f"{user_module}:Failing"]), []) == {}


@pytest.mark.parametrize(
    ("names", "taken"), [(["Lengths", "Lengths"], "mean_length"), (["Losses"], "loss")], ids=["twice", "reserved"]
)
def test_metric_of_taken_name_is_rejected(user_module: str, names: list[str], taken: str) -> None:
    metrics = load_metrics([SHIPPED, *(f"{user_module}:{name}" for name in names)])
    with pytest.raises(ConfigError, match=f"{names[-1]} returned `{taken}`, which is a metric already"):
        compute_metrics(metrics, [("q", "a", "b")])


@pytest.mark.parametrize(
    ("path", "found", "remedy"),
    [
        ("user_scores:Plain(1)", "write name=value between the parentheses", "correct it"),
        ("user_scores:Plain(", "SyntaxError", "correct it"),
        ("not_a_module:Thing", "No module named 'not_a_module'", "PYTHONPATH"),
        ("broken_scores:Thing", "a_package_that_is_not_there", "install"),
        ("user_scores:Absent", "has no attribute 'Absent'", "correct it"),
        ("user_scores:Plain", "no evaluate.Metric", "subclass of evaluate.Metric"),
        ("user_scores:Demanding", "cannot be built", "constructor must accept"),
    ],
)
def test_invalid_import_path_is_rejected(user_module: str, path: str, found: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_metrics([path])

    (problem,) = caught.value.problems
    assert problem.where == "metrics"
    assert found in problem.found
    assert remedy in problem.remedy


def test_all_invalid_import_paths_are_reported(user_module: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_metrics(["nowhere:X", SHIPPED, f"{user_module}:Plain"])

    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("name", "found"), [("Listed", "[1, 2]"), ("Nothing", "None"), ("Failing", "ValueError: no words")]
)
def test_metric_without_numbers_is_rejected(user_module: str, name: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compute_metrics(load_metrics([f"{user_module}:{name}"]), [("q", "a", "b")])

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
        ("1/4", "3/4", False),
        ("3/4", "#### 3/4", True),
    ],
)
def test_exact_match(prediction: str, reference: str, matches: bool) -> None:
    assert score(prediction, reference)["exact_match"] == float(matches)


def test_token_f1_is_harmonic_mean_of_precision_and_recall() -> None:
    # Precision 3/4, recall 3/6: 2 * 0.75 * 0.5 / 1.25.
    assert score("a b c x", "a b c d e f")["token_f1"] == pytest.approx(0.6)
    assert score("a a a", "a")["token_f1"] == pytest.approx(0.5)
    assert score("", "")["token_f1"] == 1.0
    assert score("", "a")["token_f1"] == 0.0


def test_answer_match_is_mean_over_samples() -> None:
    scores = AnswerMatch(keep_in_memory=True).compute(predictions=["1", "2", "3", "5"], references=["1", "2", "3", "4"])

    assert scores == {"exact_match": 0.75, "token_f1": 0.75}

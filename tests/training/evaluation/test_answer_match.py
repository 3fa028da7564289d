"""The shipped metric: the final answer, and the overlap of words."""

from __future__ import annotations

import pytest

from recipes_lib.training.evaluation.user_metrics import AnswerMatch


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

"""Verifiable rewards: which answers are right, however they are written."""

import pytest

from recipes_lib.rl.verifiers import exact_match, final_number

GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"


@pytest.mark.parametrize(
    ("text", "is_right"),
    [("48 + 24 = <<48+24=72>>72\n#### 72", True), ("It is $72.00", True), ("#### -72", False), ("", False)],
)
def test_the_number_that_an_answer_ends_on_decides(text, is_right):
    assert final_number(completions=[text], answer=[GOLD], question=["?"]) == [float(is_right)]
    chat = [{"role": "assistant", "content": text}]
    assert final_number(completions=[chat], answer=[GOLD]) == [float(is_right)]


@pytest.mark.parametrize(
    ("given", "wanted", "is_right"),
    [(".5", "#### 0.5", 1.0), (".5", "#### 5", 0.0), ("\u22125", "#### 5", 0.0), ("\u22125", "#### -5", 1.0)],
)
def test_a_number_counts_by_its_value(given, wanted, is_right):
    assert final_number(completions=[given], answer=[wanted]) == [is_right]


def test_of_rows_without_a_number_or_an_answer_nothing_is_said():
    given = {"completions": ["1,234 in all", "1234.0", "5", "5"], "answer": ["#### 1234", "#### 1,234", "none", None]}
    assert final_number(**given) == [1.0, 1.0, None, None]


def test_an_exact_match_is_one_but_for_blanks_at_its_ends():
    chats = [[{"role": "assistant", "content": text}] for text in (" It is.\n", "It  is.", "it is.")]
    assert exact_match(completions=chats, solution=["It is."] * 3) == [1.0, 0.0, 0.0]
    assert exact_match(completions=["a", "b", "c"], solution=["a ", "a", None]) == [1.0, 0.0, None]

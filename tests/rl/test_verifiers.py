"""Verifiable rewards: exact match, final numbers, programs with tests."""

import math
from decimal import Decimal

import pytest

from recipes_lib.rl import verifiers
from recipes_lib.rl.verifiers import exact_match, final_number, python_tests, read_program

GOLD = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72"


@pytest.mark.parametrize(
    ("text", "is_right"),
    [("48 + 24 = <<48+24=72>>72\n#### 72", True), ("It is $72.00", True), ("#### -72", False), ("", False)],
)
def test_final_number_compares_last_number_of_texts_and_chats(text, is_right):
    assert final_number(completions=[text], answer=[GOLD], question=["?"]) == [float(is_right)]
    chat = [{"role": "assistant", "content": text}]
    assert final_number(completions=[chat], answer=[GOLD]) == [float(is_right)]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [(".5", "#### 0.5", 1.0), (".5", "#### 5", 0.0), ("\u22125", "#### 5", 0.0), ("\u22125", "#### -5", 1.0)],
)
def test_final_number_compares_values_of_written_forms(completion, answer, reward):
    assert final_number(completions=[completion], answer=[answer]) == [reward]


@pytest.mark.parametrize("wanted", [72, 72.0, Decimal("72.0")])
def test_columns_of_numbers_are_accepted(wanted):
    assert final_number(completions=["72", "It is 7"], answer=[wanted] * 2) == [1.0, 0.0]
    assert exact_match(completions=[f" {wanted}"], solution=[wanted]) == [1.0]
    assert final_number(completions=["100000000000000000000", "20"], answer=[1e20] * 2) == [1.0, 0.0]


def test_exact_match_accepts_whole_number_of_float_column_without_fraction():
    assert exact_match(completions=["7", "7.0", "70"], solution=[7.0] * 3) == [1.0, 1.0, 0.0]
    assert exact_match(completions=["7", "0.5"], solution=["7.0", 0.5]) == [0.0, 1.0]


def test_any_answer_of_a_list_is_accepted():
    names = ["NYC", "New York", ""]
    assert exact_match(completions=["New York", "York", ""], solution=[names] * 3) == [1.0, 0.0, 0.0]
    assert exact_match(completions=["7", "8"], solution=[[7.0, "7.0"], [7]]) == [1.0, 0.0]
    assert final_number(completions=["It is 8", "9"], answer=[["7", 8.0, None]] * 2) == [1.0, 0.0]
    assert exact_match(completions=["a", "a"], solution=[[], [""]]) == [None, None]
    assert final_number(completions=["1", "1"], answer=[[], ["none"]]) == [None, None]


def test_blank_columns_give_none():
    assert exact_match(completions=["", "a", "NaN"], solution=["", " \n", math.nan]) == [None] * 3
    assert python_tests(completions=["a = 1"] * 4, tests=["", " \n", [], [""]]) == [None] * 4


@pytest.mark.parametrize("wanted", [True, {"value": "7"}, [["7"]]])
def test_right_answer_that_is_no_text_or_number_is_refused(wanted):
    for score, column in ((exact_match, "solution"), (final_number, "answer")):
        with pytest.raises(TypeError, match="a right answer is a text or a number, not"):
            score(completions=["7"], **{column: [wanted]})


@pytest.mark.parametrize(
    "tests",
    [
        # Inputs and outputs of a competition.
        '{"inputs": ["1"], "outputs": ["2"]}',
        ["[1, 2]"],
        "true",
        # Functions that nothing calls: those of HumanEval, pytest and unittest.
        "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1) == 2",
        ["import math", "def test_double():\n    assert double(1) == 2"],
        "import unittest\nclass Test(unittest.TestCase):\n    def test(self):\n        self.assertEqual(double(1), 2)",
        "# Nothing.",
    ],
)
def test_tests_that_check_nothing_are_refused(tests):
    """Every program that runs would pass them."""
    with pytest.raises(TypeError, match="tests have no assertion or call that is executed"):
        python_tests(completions=["a = 1"], tests=[tests])


@pytest.mark.parametrize(
    "call", ["check(double)", "for _ in range(2):\n    check(double)", "if double:\n    check(double)"]
)
def test_tests_of_functions_are_run(call):
    tests = f"def check(candidate):\n    assert candidate(1) == 2\n{call}"
    assert python_tests(completions=[RIGHT, "double = abs"], tests=[tests] * 2) == [1.0, 0.0]
    assert python_tests(completions=[RIGHT], tests=["assert ("]) == [0.0]


def test_final_number_is_none_for_rows_without_number():
    columns = {"completions": ["1,234 in all", "1234.0", "5", "5"], "answer": ["#### 1234", "#### 1,234", "none", None]}
    assert final_number(**columns) == [1.0, 1.0, None, None]
    assert final_number(completions=["1/4", "3/4"], answer=["3/4", ["3/4", "0.75"]]) == [None, 0.0]


RIGHT = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(2) == 4", "assert double(0) == 0"]


def test_python_tests_rewards_only_programs_that_pass(tmp_path, monkeypatch):
    """Wrong programs hang, exhaust memory, exit early, write files or start processes."""
    monkeypatch.setattr(verifiers, "SECONDS_TO_RUN", 2.0)
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    wrong = [
        "def double(x):\n    return x",
        "while True: pass",
        "x = 'a' * (1 << 34)\n" + RIGHT,
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        f"open({str(kept)!r}, 'w').close()\n" + RIGHT,
        "import subprocess\nsubprocess.run(['true'])\n" + RIGHT,
        "",
    ]
    answers = [RIGHT, f"So:\n```python\n{RIGHT}```\nDone.", *wrong, RIGHT]
    tests = [TESTS, "\n".join(TESTS), *[TESTS] * len(wrong), None]
    assert python_tests(completions=answers, tests=tests) == [1.0, 1.0, *[0.0] * len(wrong), None]
    assert kept.read_text() == "kept"


def test_read_program_returns_last_fenced_block():
    assert read_program("```\na = 1\n```\nbetter:\n```py\na = 2\n```") == "a = 2\n"
    assert read_program("a = 3") == "a = 3"
    # Blocks of other languages count as blocks; text between two blocks is no program.
    assert read_program("```json\n{}\n```\nHence:\n```python\na = 4\n```") == "a = 4\n"
    assert read_program("```python3\na = 5\n```\nDone.") == "a = 5\n"


def test_exact_match_ignores_surrounding_white_space():
    chats = [[{"role": "assistant", "content": text}] for text in (" It is.\n", "It  is.", "it is.")]
    assert exact_match(completions=chats, solution=["It is."] * 3) == [1.0, 0.0, 0.0]
    assert exact_match(completions=["a", "b", "c"], solution=["a ", "a", None]) == [1.0, 0.0, None]


def test_reasoning_is_no_answer() -> None:
    """Else an answer that is cut before it is given would be rewarded."""
    cut, whole = "<think>Maybe 72\n```\nf = 72\n```", "<think>Maybe 7</think>\n72"
    assert final_number(completions=[cut, whole, "7</think>72"], answer=["72"] * 3) == [0.0, 1.0, 1.0]
    assert exact_match(completions=[cut, whole], solution=["72"] * 2) == [0.0, 1.0]
    programs = [cut, "<think>Hm</think>\n```\nf = 72\n```"]
    assert python_tests(completions=programs, tests=["assert f == 72"] * 2) == [0.0, 1.0]

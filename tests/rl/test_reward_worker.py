"""A reward function that hangs, raises or kills its process costs the answer, and the run nothing."""

from __future__ import annotations

import os

import pytest
from tests.rl.test_rewards import TEXTS

from recipes_lib.errors import ConfigError
from recipes_lib.rl import reward_worker
from recipes_lib.rl.reward_worker import IsolatedFunction, call, find_function
from recipes_lib.rl.rewards import Rewards, load_reward_functions
from recipes_lib.training.guards.watchdog import WATCHDOG

FAULTY = "tests.rl.faulty_rewards"


@pytest.fixture
def isolated():
    return IsolatedFunction(f"{FAULTY}:length", 0.5)


def test_answers_are_scored_in_one_process_that_is_not_this_one():
    function = IsolatedFunction(f"{FAULTY}:process", 60)
    first, second = (function(completions=["a", "b"]) for _ in range(2))
    assert first == second
    assert os.getpid() not in first


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hang", "it took more than 0.5 s"),
        ("raise", "ValueError: no number"),
        ("kill", "its process ended with -9"),
        ("unspeakable", "Error: "),
    ],
)
def test_the_answer_on_which_it_fails_alone_is_not_scored(isolated, capfd, fault, words):
    assert isolated(completions=["a", fault, "abc"]) == [1, None, 3]
    told = capfd.readouterr().err
    assert told.count("gave 1 of 3 answers no score") == 1
    assert words in told
    assert isolated(completions=["ab"]) == [2]


def test_answers_after_a_failure_are_scored_side_by_side_and_each_tells_of_progress(monkeypatch, tmp_path):
    """Each of two answers waits until the other is being scored."""
    beats = []
    os.mkfifo(pipe := tmp_path / "pipe")
    monkeypatch.setattr(reward_worker, "_NUM_WORKERS", 2)
    monkeypatch.setattr(WATCHDOG, "beat", lambda: beats.append(1))
    assert IsolatedFunction(f"{FAULTY}:meet", 60)(completions=["r", "w"], pipe=[str(pipe)] * 2) == [1, 1]
    assert len(beats) == 2


def test_answers_that_hang_cost_no_more_than_so_many_limits(monkeypatch, capfd):
    monkeypatch.setattr(reward_worker, "_NUM_WORKERS", 1)
    monkeypatch.setattr(reward_worker, "MAX_LIMITS", 1)
    found = IsolatedFunction(f"{FAULTY}:length", 0.5)(completions=["a", "hang", "hang", "b"])
    assert found == [1, None, None, None]
    assert "gave 3 of 4 answers no score" in capfd.readouterr().err


def test_a_function_that_fails_on_all_answers_ends_the_run(isolated):
    rewards = Rewards({"length": isolated}, None, [1.0])
    with pytest.raises(ConfigError, match="length failed on 2 answers: RuntimeError: ValueError: no number"):
        rewards.score(TEXTS[:2], ["raise", "raise"], [[1], [1]], [True, True])


def test_one_that_cannot_be_imported_there_says_why():
    with pytest.raises(RuntimeError, match="has no attribute 'absent'"):
        IsolatedFunction(f"{FAULTY}:absent", 60)(completions=["a", "b"])


def test_one_that_is_async_is_waited_for_here_and_there():
    function = find_function(f"{FAULTY}:slowly")
    assert call(function, {"completions": ["a", "ab"]}) == [1, 2]
    assert IsolatedFunction(f"{FAULTY}:slowly", 60)(completions=["a", "ab"]) == [1, 2]


def test_with_a_limit_every_function_is_isolated():
    (function,) = load_reward_functions([f"{FAULTY}:length"], 5.0).values()
    assert isinstance(function, IsolatedFunction)

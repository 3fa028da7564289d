"""Reward functions in a worker process: faults cost single answers, not the run; imports and TRL's functions."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import select

import pytest
from tests.rl.test_rewards import TEXTS

from recipes_lib.errors import ConfigError
from recipes_lib.rl import reward_worker
from recipes_lib.rl.reward_worker import IsolatedFunction, call, find_function
from recipes_lib.rl.rewards import Rewards, load_reward_functions, verify_arguments
from recipes_lib.stopping import STOP, StopPendingError
from recipes_lib.training.guards.watchdog import WATCHDOG

FAULTY = "tests.rl.faulty_rewards"


@pytest.fixture
def isolated():
    return IsolatedFunction(f"{FAULTY}:length", 60)


def test_answers_are_scored_in_one_separate_process():
    function = IsolatedFunction(f"{FAULTY}:report_pid", 60)
    first, second = (function(completions=["a", "b"]) for _ in range(2))
    assert first == second
    assert os.getpid() not in first


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hang", "it took more than 0.5 s"),
        ("raise", "ValueError: no number"),
        ("exit", "SystemExit: 0"),
        ("kill", "its process ended with -9"),
        ("unpicklable", "Error: "),
    ],
)
def test_faulty_answer_is_unscored_and_others_are_scored(capfd, fault, words):
    isolated = IsolatedFunction(f"{FAULTY}:length", 0.5 if fault == "hang" else 60)
    assert isolated(completions=["a", fault, "abc"]) == [1, None, 3]
    printed = capfd.readouterr().err
    assert printed.count("gave 1 of 3 answers no score") == 1
    assert words in printed
    assert isolated(completions=["ab"]) == [2]


def test_random_numbers_follow_those_of_the_run():
    """So that a resumed run gives the same rewards."""
    function = IsolatedFunction(f"{FAULTY}:draw", 60)
    drawn = []
    for seed in (0, 1, 1, 2):  # The first call imports the libraries.
        random.seed(seed)
        drawn.append(function(completions=["a", "b", "c"]))
    assert drawn[1] == drawn[2]
    assert not set(drawn[2]) & set(drawn[3])


def test_worker_has_a_process_group_of_its_own():
    """Ctrl-C in the terminal reaches the group of the run only."""
    (worker,) = IsolatedFunction(f"{FAULTY}:report_group", 60)(completions=["a"])
    assert worker != os.getpgrp()


def test_processes_that_a_lost_function_started_are_killed(tmp_path):
    """They would run on, one for each hanging answer."""
    os.mkfifo(pipe := tmp_path / "pipe")
    # Opened without a writer; once there was one, it is readable when no process has it open for writing any more.
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert IsolatedFunction(f"{FAULTY}:start_program", 60)(completions=["a"], pipe=[str(pipe)]) == [None]
    assert select.select([reader], [], [], 60)[0]
    os.close(reader)


def test_failed_process_start_is_reported(isolated, monkeypatch, capfd):
    def fail(*_, **__):
        raise OSError("no memory")

    monkeypatch.setattr(reward_worker.subprocess, "Popen", fail)
    assert isolated(completions=["a"]) == [None]
    assert "its process did not start: no memory" in capfd.readouterr().err


def test_answers_after_failure_are_scored_concurrently_with_heartbeats(monkeypatch, tmp_path):
    # Each call blocks until the other one has opened its end of the pipe.
    beats = []
    os.mkfifo(pipe := tmp_path / "pipe")
    monkeypatch.setattr(reward_worker, "_NUM_WORKERS", 2)
    monkeypatch.setattr(WATCHDOG, "beat", lambda: beats.append(1))
    assert IsolatedFunction(f"{FAULTY}:rendezvous", 60)(completions=["r", "w"], pipe=[str(pipe)] * 2) == [1, 1]
    assert len(beats) == 2


def test_total_time_of_hanging_answers_is_limited(monkeypatch, capfd):
    monkeypatch.setattr(reward_worker, "_NUM_WORKERS", 1)
    monkeypatch.setattr(reward_worker, "MAX_LIMITS", 1)
    found = IsolatedFunction(f"{FAULTY}:length", 0.5)(completions=["a", "hang", "hang", "b"])
    assert found == [1, None, None, None]
    assert "gave 3 of 4 answers no score" in capfd.readouterr().err


def test_failure_on_all_answers_raises(isolated):
    rewards = Rewards({"length": isolated}, None, [1.0])
    words = r"length failed on 2 answers to here: ValueError: no number \(.*faulty_rewards\.py:\d+\)"
    with pytest.raises(ConfigError, match=rf"{words}\n.* larger `reward_timeout`"):
        rewards.score(TEXTS[:2], ["raise", "raise"], [[1], [1]], [True, True])


@pytest.mark.parametrize("stop", [{"is_deferred": True, "reason": "SIGTERM"}, {"_is_closed": True}])
def test_stop_request_or_end_does_not_wait_for_the_function(stop, isolated, monkeypatch):
    """``recipes sample-pairs`` is interrupted without training, and its end waits for the threads of the calls."""
    for name, value in stop.items():
        monkeypatch.setattr(STOP, name, value)
    with pytest.raises(StopPendingError):
        isolated(completions=["hang"])


def test_error_of_a_judge_is_raised_as_it_is(isolated):
    rewards = Rewards({"length": isolated}, None, [1.0])
    with pytest.raises(ConfigError, match=r"^base_url: had no answer\n    start it$"):
        rewards.score(TEXTS[:2], ["a", "refuse"], [[1], [1]], [True, True])


def test_failed_import_in_worker_reports_reason():
    with pytest.raises(RuntimeError, match="has no attribute 'absent'"):
        IsolatedFunction(f"{FAULTY}:absent", 60)(completions=["a", "b"])


def test_files_of_working_directory_shadow_no_module_of_the_worker(tmp_path, monkeypatch):
    """As in the run itself, whose script is elsewhere."""
    (tmp_path / "asyncio.py").write_text("raise ImportError('of the working directory')")
    (tmp_path / "mine.py").write_text("def always(*, completions, **_):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    assert IsolatedFunction("mine:always", 60)(completions=["a", "b"]) == [1, 1]


def test_async_function_is_awaited_in_process_and_worker():
    function = find_function(f"{FAULTY}:score_async")
    assert call(function, {"completions": ["a", "ab"]}) == [1, 2]
    assert IsolatedFunction(f"{FAULTY}:score_async", 60)(completions=["a", "ab"]) == [1, 2]


class Length:
    """A result with ``__await__`` that is no coroutine, as of some clients."""

    def __init__(self, texts):
        self.texts = texts

    def __await__(self):
        return asyncio.sleep(0, [len(text) for text in self.texts]).__await__()


def test_awaitable_results_need_not_be_coroutines():
    assert call(lambda completions: Length(completions), {"completions": ["a", "ab"]}) == [1, 2]


def test_async_function_is_awaited_in_a_notebook():
    """Its cells run in an event loop."""

    async def run_cell():
        return call(find_function(f"{FAULTY}:score_async"), {"completions": ["a", "ab"]})

    assert asyncio.run(run_cell()) == [1, 2]


def test_calls_of_an_async_function_share_an_event_loop():
    """Connections that a client keeps for the next call would belong to a closed loop."""
    loops = []

    async def score(**_):
        loops.append(asyncio.get_running_loop())
        return [1.0]

    assert [call(score, {}) for _ in range(2)] == [[1.0], [1.0]]
    assert loops[0] is loops[1]


ANSWERS = ["<think>\nSum.\n</think>\n" + r"$\boxed{\frac{1}{3}}$", r"$\boxed{\frac{1}{2}}$"]


@pytest.mark.parametrize(
    ("seconds", "form"), [(None, str), (60, lambda text: [{"role": "assistant", "content": text}])]
)
def test_trl_reward_functions_score_texts_and_chats(form, seconds):
    paths = [
        "trl.rewards:think_format_reward",
        "trl.rewards:get_soft_overlong_punishment(max_completion_len=8, soft_punish_cache=4)",
    ]
    functions = load_reward_functions(paths, seconds)
    assert list(functions) == ["think_format_reward", "get_soft_overlong_punishment"]
    columns = {
        "completions": [form(text) for text in ANSWERS],
        "completion_ids": [[1] * 6, [1] * 9],
        "prompts": ["a", "b"],
        "function": ["f", "g"],  # A column of the dataset.
    }
    assert [list(function(**columns)) for function in functions.values()] == [[1.0, 0.0], [-0.5, -1.0]]


def test_accuracy_reward_compares_mathematical_values():
    pytest.importorskip("math_verify")
    function = find_function("trl.rewards:accuracy_reward")
    assert function(completions=ANSWERS, solution=[r"$\frac{2}{6}$"] * 2) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="missing a required argument: 'solution'"):
        verify_arguments({"accuracy_reward": function}, ["answer"])


def test_missing_math_verify_error_names_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"accuracy_reward cannot be imported: .* pip install 'recipes-lib\[math\]'"):
        load_reward_functions(["trl.rewards:accuracy_reward"])


@pytest.mark.parametrize("arguments", ["(4)", "(**{})", "(size=len('a'))", "(size=1", "(size=1)(b=2)"])
def test_factory_accepts_only_constants_by_name(arguments):
    with pytest.raises((ValueError, SyntaxError)):
        find_function(f"{FAULTY}:length{arguments}")


def test_time_limit_isolates_functions():
    (function,) = load_reward_functions([f"{FAULTY}:length"], 5.0).values()
    assert isinstance(function, IsolatedFunction)
    verify_arguments({"length": function, "builtin": IsolatedFunction("builtins:max", 5.0, max)}, [])
    functions = load_reward_functions([f"{FAULTY}:rendezvous"], 5.0)
    with pytest.raises(ConfigError, match="missing a required argument: 'pipe'"):
        verify_arguments(functions, [])

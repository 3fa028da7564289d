"""`recipes eval compare A B --judge J --prompts FILE`: as a user has it, interrupted and with every bad input."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tests import tiny
from tests.evaluation.chat_endpoint import ChatEndpoint
from tests.forked import Launch
from tests.rl.reward_models import write_reward_model
from tests.rows import read_rows, write_rows

from recipes_lib.cli import main as run_recipes
from recipes_lib.commands.generated.judge_models import compute_rates
from recipes_lib.models.generation import GenerateBackend

NUM_QUESTIONS = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Questions of two categories and two files of answers, below a path with a space."""
    place = tmp_path / "a folder"
    place.mkdir()
    numbers = range(NUM_QUESTIONS)
    write_rows(
        place / "q.jsonl",
        [{"question_id": n, "category": "maths" if n % 2 else "words", "turns": [f"Question {n}?"]} for n in numbers],
    )
    write_rows(place / "a.jsonl", [{"question_id": n, "answer": "x" * 5} for n in numbers])
    # Better in words, worse in maths.
    write_rows(place / "b.jsonl", [{"question_id": n, "answer": "x" * (3 if n % 2 else 9)} for n in numbers])
    return place


def prefer_longer(body: dict[str, Any]) -> str:
    text = body["messages"][-1]["content"]
    one, two = (text.partition(f"[Answer of assistant {name}]\n")[2].partition("\n[End of")[0] for name in "AB")
    return f"Longer.\n[[{'A' if len(one) > len(two) else 'B' if len(two) > len(one) else 'C'}]]"


def compare(folder: Path, *flags: Any, models: tuple[Any, ...] = ("a.jsonl", "b.jsonl")) -> int:
    names = [str(folder / name) if str(name).endswith(".jsonl") else str(name) for name in models]
    given = ["--prompts", folder / "q.jsonl", "--output_dir", folder / "out", *flags]
    return run_recipes(["eval", "compare", *names, *map(str, given)])


def read_rates(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "out" / "judge.json").read_text())
    (found,) = record["compared"].values()
    return found


def test_win_rates_are_told_by_category_with_what_the_judge_cost(folder: Path, capsys) -> None:
    server = ChatEndpoint(prefer_longer)
    assert compare(folder, "--judge", f"{server.url}#j") == 0
    found = read_rates(folder)
    rates = {name: (rate["win_rate"], rate["num_wins"], rate["num_losses"]) for name, rate in found["rates"].items()}
    assert rates == {"all": (0.5, 10, 10), "words": (1.0, 10, 0), "maths": (0.0, 0, 10)}
    assert found["rates"]["all"]["position_agreement"] == 1.0
    assert found["rates"]["words"]["low"] > 0.5
    assert len(server.asked) == 2 * NUM_QUESTIONS
    assert found["tokens"]["num_tokens"] == 2 * 2 * NUM_QUESTIONS
    printed = capsys.readouterr().out
    assert f"{found['tokens']['num_prompt_tokens']:,} tokens read, 80 written" in printed
    assert "words" in printed
    row = read_rows(folder / "out" / "verdicts-1.jsonl")[0]
    assert {name: row[name] for name in ("question_id", "category", "base", "other", "winner", "orders")} == {
        "question_id": "0", "category": "words", "base": ["xxxxx"], "other": ["x" * 9], "winner": "other",
        "orders": ["other", "other"],
    }  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_an_interrupted_command_resumes_to_the_same_bytes(folder: Path, number: signal.Signals) -> None:
    """While the judge is asked for the thirteenth pair; ctrl-C tells one line and no traceback."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        pytest.skip("started in the background, where a shell has ctrl-C ignored")
    launches: list[Launch] = []

    def interrupt(body: dict[str, Any]) -> str:
        if len(server.asked) == 25 and launches:
            launches[0].send_signal(number)
        return prefer_longer(body)

    server = ChatEndpoint(interrupt)
    flags = ["--judge", f"{server.url}#j", "--prompts", folder / "q.jsonl", "--num_concurrent", 1]
    words = ["eval", "compare", folder / "a.jsonl", folder / "b.jsonl", *flags]
    assert run_recipes([*map(str, words), "--output_dir", str(folder / "whole")]) == 0
    server.asked.clear()
    launches.append(Launch("recipes_lib.cli", *words, "--output_dir", folder / "out"))
    told = launches[0].finish()
    # A process that a signal ended has its number as the exit code, of ctrl-C too where a library caught it first.
    assert told.returncode in ((-number,) if number == signal.SIGKILL else (130, -number)), told.stderr
    if number == signal.SIGINT:
        assert told.stderr.splitlines()[-1] == "interrupted"
        assert "Traceback" not in told.stderr
    assert 0 < (num_done := len(read_rows(folder / "out" / "verdicts-1.jsonl"))) < NUM_QUESTIONS
    num_asked = len(server.asked)
    assert run_recipes([*map(str, words), "--output_dir", str(folder / "out")]) == 0
    assert len(server.asked) - num_asked == 2 * (NUM_QUESTIONS - num_done), "the rest alone"
    for name in ("verdicts-1.jsonl", "judge.json"):
        assert (folder / "out" / name).read_bytes() == (folder / "whole" / name).read_bytes()
    another = ChatEndpoint(prefer_longer)
    assert compare(folder, "--judge", f"{another.url}#another") == 2
    assert not another.asked, "verdicts of two judges are never mixed"


def test_local_models_answer_and_a_reward_model_judges(folder: Path, tiny_model_dir: Path, monkeypatch) -> None:
    other = tiny.save_model(folder / "other model", tiny.build_tokenizer(), seed=1)
    judge = write_reward_model(folder / "reward", tiny_model_dir)
    flags = ["--judge", judge, "--use_cpu", "--max_new_tokens", 8, "--limit", 9, "--batch_size", 4]
    models = (tiny_model_dir, other, tiny_model_dir)
    assert compare(folder, *flags, models=models) == 0
    record = json.loads((folder / "out" / "judge.json").read_text())
    one, same = (record["compared"][str(name)]["rates"]["all"] for name in (other, tiny_model_dir))
    assert one["num_wins"] + one["num_ties"] + one["num_losses"] == 9
    assert (same["num_ties"], same["win_rate"], same["position_agreement"]) == (9, 0.5, None)
    first = [(folder / "out" / f"answers-{at}.jsonl").read_bytes() for at in range(3)]
    assert b'"answers"' in first[0]
    # Everything is there: nothing is sampled again.
    monkeypatch.setattr(GenerateBackend, "generate", None)
    assert compare(folder, *flags, models=models) == 0
    assert [(folder / "out" / f"answers-{at}.jsonl").read_bytes() for at in range(3)] == first


def test_an_endpoint_can_be_compared_with_a_file(folder: Path) -> None:
    server = ChatEndpoint(lambda body: "x" * 7 if body["model"] == "m" else prefer_longer(body))
    flags = ["--judge", f"{server.url}#j", "--judge_request", '{"reasoning_effort": "low"}']
    assert compare(folder, *flags, models=("a.jsonl", f"{server.url}#m")) == 0
    assert read_rates(folder)["rates"]["all"]["win_rate"] == 1.0
    asked = {body["model"]: body for body in server.asked}
    assert (asked["j"].get("reasoning_effort"), asked["m"].get("reasoning_effort")) == ("low", None)


@pytest.mark.parametrize(
    ("other", "flags", "found"),
    [
        ("", (), "name two or more"),
        ("absent.jsonl", (), "missing or empty"),
        ("b.jsonl", ("--judge", "http://h/v1"), "http://h/v1#NAME"),
        ("b.jsonl", ("--judge", "no/such-reward-model-here"), "no/such-reward-model-here"),
        *(("b.jsonl", (f"--{flag}", 0), "is 0") for flag in ("limit", "judge_tokens", "num_concurrent", "timeout")),
    ],
)
def test_bad_input_is_one_clear_error(folder: Path, capsys, other: str, flags: Any, found: str) -> None:
    models = ("a.jsonl", other) if other else ("a.jsonl",)
    assert compare(folder, "--judge", "http://h/v1#j", *flags, models=models) == 2
    assert found in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x", "[1]", "3"])
def test_fields_of_requests_are_a_json_object(folder: Path, capsys, text: str) -> None:
    with pytest.raises(SystemExit):
        compare(folder, "--judge", "http://localhost/v1#j", "--request", text)
    assert f"argument --request: {text!r} is not a JSON object" in capsys.readouterr().err


def test_a_judge_without_a_verdict_is_an_error_and_its_texts_are_kept(folder: Path, capsys) -> None:
    server = ChatEndpoint(lambda body: "Both are fine.")
    assert compare(folder, "--judge", f"{server.url}#j", "--limit", 3) == 2
    told = capsys.readouterr().err
    assert f"the judge gave no verdict on {folder / 'b.jsonl'}" in told
    assert "verdicts-1.jsonl" in told
    assert read_rates(folder)["rates"]["all"]["num_unparsable"] == 3
    assert read_rows(folder / "out" / "verdicts-1.jsonl")[0]["details"] == ["Both are fine."] * 2


@pytest.mark.parametrize(
    ("categories", "counts"),
    [
        (["other", "other", "more"], {"all": 3, "other": 2, "more": 1}),
        (["all", "all", "more", "other"], {"all": 4, "more": 1, "other": 1}),
        ([None, None], {"all": 2}),
    ],
)
def test_each_category_has_a_line_where_there_are_several(categories: list[Any], counts: dict[str, int]) -> None:
    rows = [{"winner": "tie", "orders": ["tie", "tie"], "category": category} for category in categories]
    assert {name: rate.num_questions for name, rate in compute_rates(rows).items()} == counts

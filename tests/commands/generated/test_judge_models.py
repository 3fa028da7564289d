"""`recipes eval compare --judge`: win rates, resumption after signals, and invalid input."""

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

from recipes_lib.commands.generated.judge_models import compute_rates
from recipes_lib.evaluation.endpoint import Endpoint
from recipes_lib.models.generation import GenerateBackend
from recipes_lib.training.monitoring.progress import PlainProgress

NUM_QUESTIONS = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Questions of two categories and two answer files, in a path with a space; longer answers win."""
    place = tmp_path / "a folder"
    place.mkdir()
    numbers = range(NUM_QUESTIONS)
    write_rows(
        place / "q.jsonl",
        [{"question_id": n, "category": "maths" if n % 2 else "words", "turns": [f"Question {n}?"]} for n in numbers],
    )
    write_rows(place / "a.jsonl", [{"question_id": n, "answer": "x" * 5} for n in numbers])
    # Longer in category words, shorter in maths.
    write_rows(place / "b.jsonl", [{"question_id": n, "answer": "x" * (3 if n % 2 else 9)} for n in numbers])
    return place


def prefer_longer(body: dict[str, Any]) -> str:
    text = body["messages"][-1]["content"]
    one, two = (text.partition(f"[Answer of assistant {name}]\n")[2].partition("\n[End of")[0] for name in "AB")
    return f"Longer.\n[[{'A' if len(one) > len(two) else 'B' if len(two) > len(one) else 'C'}]]"


@pytest.fixture
def compare(recipes, folder: Path):
    """Compare answers, and return the output of the command."""

    def compare(*flags: Any, models: tuple[Any, ...] = ("a.jsonl", "b.jsonl"), code: int = 0) -> str:
        names = [folder / name if str(name).endswith(".jsonl") else name for name in models]
        places = ["--prompts", folder / "q.jsonl", "--output_dir", folder / "out"]
        return recipes("eval", "compare", *names, *places, *flags, code=code)

    return compare


def read_rates(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "out" / "judge.json").read_text())
    (rates,) = record["compared"].values()
    return rates


def test_win_rates_by_category_and_token_counts(folder: Path, compare) -> None:
    server = ChatEndpoint(prefer_longer)
    printed = compare("--judge", f"{server.url}#j")
    record = read_rates(folder)
    rates = {name: (rate["win_rate"], rate["num_wins"], rate["num_losses"]) for name, rate in record["rates"].items()}
    assert rates == {"all": (0.5, 10, 10), "words": (1.0, 10, 0), "maths": (0.0, 0, 10)}
    assert record["rates"]["all"]["position_agreement"] == 1.0
    assert record["rates"]["words"]["low"] > 0.5
    assert len(server.asked) == 2 * NUM_QUESTIONS
    assert record["tokens"]["num_tokens"] == 2 * 2 * NUM_QUESTIONS
    assert f"{record['tokens']['num_prompt_tokens']:,} tokens read, 80 written" in printed
    assert "words" in printed
    row = read_rows(folder / "out" / "verdicts-1.jsonl")[0]
    assert {name: row[name] for name in ("question_id", "category", "base", "other", "winner", "orders")} == {
        "question_id": "0", "category": "words", "base": ["xxxxx"], "other": ["x" * 9], "winner": "other",
        "orders": ["other", "other"],
    }  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_interrupted_command_resumes_to_same_bytes(recipes, compare, folder: Path, number: signal.Signals) -> None:
    """The signal arrives at the request for the thirteenth pair; Ctrl-C prints one line and no traceback."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        pytest.skip("SIGINT is ignored: started in the background by a shell")
    launches: list[Launch] = []

    def interrupt(body: dict[str, Any]) -> str:
        if len(server.asked) == 25 and launches:
            launches[0].send_signal(number)
        return prefer_longer(body)

    server = ChatEndpoint(interrupt)
    flags = ["--judge", f"{server.url}#j", "--prompts", folder / "q.jsonl", "--num_concurrent", 1]
    words = ["eval", "compare", folder / "a.jsonl", folder / "b.jsonl", *flags]
    recipes(*words, "--output_dir", folder / "whole")
    server.asked.clear()
    launches.append(Launch("recipes_lib.cli", *words, "--output_dir", folder / "out"))
    process = launches[0].finish()
    # A library may handle SIGINT before us: then the process ends by the signal instead of with code 130.
    assert process.returncode in ((-number,) if number == signal.SIGKILL else (130, -number)), process.stderr
    if number == signal.SIGINT:
        assert process.stderr.splitlines()[-1] == "interrupted"
        assert "Traceback" not in process.stderr
    assert 0 < (num_done := len(read_rows(folder / "out" / "verdicts-1.jsonl"))) < NUM_QUESTIONS
    num_asked = len(server.asked)
    recipes(*words, "--output_dir", folder / "out")
    assert len(server.asked) - num_asked == 2 * (NUM_QUESTIONS - num_done), "only the remaining pairs"
    for name in ("verdicts-1.jsonl", "judge.json"):
        assert (folder / "out" / name).read_bytes() == (folder / "whole" / name).read_bytes()
    another = ChatEndpoint(prefer_longer)
    compare("--judge", f"{another.url}#another", code=2)
    assert not another.asked, "another judge is rejected before any request"


def test_local_models_and_reward_model_judge(folder: Path, compare, tiny_model_dir: Path, monkeypatch) -> None:
    other = tiny.save_model(folder / "other model", tiny.build_tokenizer(), seed=1)
    judge = write_reward_model(folder / "reward", tiny_model_dir)
    flags = ["--judge", judge, "--use_cpu", "--max_new_tokens", 8, "--limit", 9, "--batch_size", 4]
    models = (tiny_model_dir, other, tiny_model_dir)
    compare(*flags, models=models)
    record = json.loads((folder / "out" / "judge.json").read_text())
    one, same = (record["compared"][str(name)]["rates"]["all"] for name in (other, tiny_model_dir))
    assert one["num_wins"] + one["num_ties"] + one["num_losses"] == 9
    assert (same["num_ties"], same["win_rate"], same["position_agreement"]) == (9, 0.5, None)
    first = [(folder / "out" / f"answers-{at}.jsonl").read_bytes() for at in range(3)]
    assert b'"answers"' in first[0]
    # All answers are on disk: generation would raise.
    monkeypatch.setattr(GenerateBackend, "generate", None)
    compare(*flags, models=models)
    assert [(folder / "out" / f"answers-{at}.jsonl").read_bytes() for at in range(3)] == first


def test_endpoint_is_compared_with_answer_file(folder: Path, compare) -> None:
    server = ChatEndpoint(lambda body: "x" * 7 if body["model"] == "m" else prefer_longer(body))
    flags = ["--judge", f"{server.url}#j", "--judge_request", '{"reasoning_effort": "low"}']
    compare(*flags, models=("a.jsonl", f"{server.url}#m"))
    assert read_rates(folder)["rates"]["all"]["win_rate"] == 1.0
    requests = {body["model"]: body for body in server.asked}
    assert (requests["j"].get("reasoning_effort"), requests["m"].get("reasoning_effort")) == ("low", None)


def test_judge_may_be_sent_all_requests_at_a_time(folder: Path, compare, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    answer = Endpoint.answer
    monkeypatch.setattr(Endpoint, "answer", lambda own, *given: asked.append(len(given[0])) or answer(own, *given))
    compare("--judge", f"{ChatEndpoint(prefer_longer).url}#j", "--num_concurrent", NUM_QUESTIONS)
    assert asked == [2 * NUM_QUESTIONS]


def test_truncated_and_empty_answers_are_reported_in_every_launch(folder, compare, monkeypatch) -> None:
    """A model whose reasoning reaches the length limit has an empty answer, which would silently lose."""
    said: list[str] = []
    monkeypatch.setattr(PlainProgress, "say", lambda _, line: said.append(line))
    server = ChatEndpoint(lambda body: "<think>\nLet me" if body["model"] == "m" else prefer_longer(body))
    server.finish = "length"
    (folder / "a.jsonl").write_text((folder / "a.jsonl").read_text().replace("xxxxx", " ", 2))
    flags = ("--judge", f"{server.url}#j", "--limit", 12)
    for _ in range(2):
        compare(*flags, models=("a.jsonl", f"{server.url}#m"))
    lines = [
        f"warning: {folder / 'a.jsonl'}: 2 of 12 questions have an answer that is empty",
        f"warning: {server.url}#m: 12 of 12 questions have an answer that is truncated by --max_new_tokens",
        f"warning: {server.url}#m: 12 of 12 questions have an answer that is empty",
    ]
    assert said == lines * 2


@pytest.mark.parametrize(
    ("other", "flags", "message"),
    [
        ("", (), "name two or more"),
        ("b.jsonl b.jsonl", (), "a model is named twice"),
        # Found before the endpoint, where none listens, is asked.
        ("http://h/v1#m absent.jsonl", (), "missing or empty"),
        ("http://h/v1#m ./no", (), "./no"),
        ("b.jsonl", ("--judge", "http://h/v1"), "http://h/v1#NAME"),
        ("b.jsonl", ("--judge", "no/such-reward-model-here"), "no/such-reward-model-here"),
        *(("b.jsonl", (f"--{flag}", 0), "is 0") for flag in ("limit", "judge_tokens", "num_concurrent", "timeout")),
        *(("b.jsonl", (f"--{flag}", -1), "is -1") for flag in ("temperature", "seed")),
        *(("b.jsonl", ("--request", text), f"request: {text!r} is not a JSON object") for text in ("x", "[1]", "3")),
    ],
)
def test_invalid_input_is_rejected(compare, other: str, flags: Any, message: str) -> None:
    models = ("a.jsonl", *other.split())
    assert message in compare("--judge", "http://h/v1#j", *flags, models=models, code=2)


def test_judge_without_verdicts_is_an_error(folder: Path, compare) -> None:
    server = ChatEndpoint(lambda body: "Both are fine.")
    error = compare("--judge", f"{server.url}#j", "--limit", 3, code=2)
    assert f"the judge gave no verdict on {folder / 'b.jsonl'}" in error
    assert 'verdicts-1.jsonl: 3 of 3 questions have no verdict, 0 first: ["Both are fine.", ' in error
    assert read_rates(folder)["rates"]["all"]["num_unparsable"] == 3
    assert read_rows(folder / "out" / "verdicts-1.jsonl")[0]["details"] == ["Both are fine."] * 2


@pytest.mark.parametrize(
    ("categories", "counts"),
    [
        (["other", "other", "more"], {"all": 3, "other": 2, "more": 1}),
        (["all", "all", "more", "other"], {"all": 4, "more": 1, "other": 1}),
        ([None, None], {"all": 2}),
        ([None, "a", "b"], {"all": 3, "a": 1, "b": 1}),
    ],
)
def test_rates_of_each_category(categories: list[Any], counts: dict[str, int]) -> None:
    rows = [{"winner": "tie", "orders": ["tie", "tie"], "category": category} for category in categories]
    assert {name: rate.num_questions for name, rate in compute_rates(rows).items()} == counts

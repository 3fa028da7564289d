"""Pairwise and grading judges: parsing, order, win rate, prompt files, and use as reward functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.evaluation.chat_endpoint import ChatEndpoint
from tests.rl.reward_models import write_reward_model

from recipes_lib.errors import ConfigError
from recipes_lib.evaluation.endpoint import Endpoint
from recipes_lib.evaluation.intervals import compute_interval
from recipes_lib.evaluation.judge_questions import Question
from recipes_lib.evaluation.judges import (
    PROMPTS,
    PromptedJudge,
    combine_orders,
    compute_win_rate,
    judge_grade,
    judge_preference,
    load_prompt_file,
    load_reward_judge,
    parse_grade,
    parse_verdict,
    render_prompt,
)
from recipes_lib.rl.rewards import load_reward_functions

FIELDS = {"user": str, "scale": list}
QUESTION = Question("q", "c", [], ["How?"])
VERDICTS = load_prompt_file(PROMPTS / "pairwise.yaml", {"system": str, "user": str, "verdicts": dict})["verdicts"]


def split(body: dict[str, Any]) -> tuple[str, str]:
    """Return the answers of assistants A and B in the shipped pairwise prompt."""
    text = body["messages"][-1]["content"]
    return tuple(text.partition(f"[Answer of assistant {name}]\n")[2].partition("\n[End of")[0] for name in "AB")  # type: ignore[return-value]


def prefer(better: Callable[[str], Any]) -> Callable[[dict[str, Any]], str]:
    def answer(body: dict[str, Any]) -> str:
        first, second = map(better, split(body))
        return "Because.\n[[C]]" if first == second else "Because.\n[[A]]" if first > second else "Because.\n[[B]]"

    return answer


def compare(answer: Callable[[dict[str, Any]], Any], *pairs: tuple[str, str]) -> list[Any]:
    judge = PromptedJudge(Endpoint(ChatEndpoint(answer).url, "judge"))
    base, other = ([[text] for text in texts] for texts in zip(*pairs, strict=True))
    return judge.compare([QUESTION] * len(pairs), base, other, range(len(pairs)))


def test_length_preference_is_consistent_in_both_orders() -> None:
    found = compare(prefer(len), ("aa", "a"), ("a", "aa"), ("a", "b"))
    assert [(one.winner, one.orders) for one in found] == [
        ("base", ["base", "base"]), ("other", ["other", "other"]), ("tie", ["tie", "tie"]),
    ]  # fmt: skip
    assert all(one.num_prompt_tokens > 100 and one.num_tokens == 4 for one in found)


def test_position_bias_gives_ties_and_no_agreement() -> None:
    found = compare(lambda body: "[[A]]", ("a", "b"), ("c", "d"))
    assert [(one.winner, one.orders) for one in found] == [("tie", ["base", "other"])] * 2
    rate = compute_win_rate([(one.winner, one.orders) for one in found])
    assert (rate.win_rate, rate.position_agreement, rate.num_ties) == (0.5, 0.0, 2)


def test_missing_verdict_is_unparsable_not_a_tie() -> None:
    texts = iter(["I like A.", "[[A]]"] + ["[[A]] or rather [[B]]"] * 2 + ["[[B]]"] * 2)
    server = ChatEndpoint(lambda body: next(texts))
    judge = PromptedJudge(Endpoint(server.url, "judge", num_concurrent=1))
    found = judge.compare([QUESTION] * 3, [["a"]] * 3, [["b"]] * 3, range(3))
    assert [one.winner for one in found] == [None, None, "tie"]
    rate = compute_win_rate([(one.winner, one.orders) for one in found])
    assert (rate.num_questions, rate.num_unparsable, rate.win_rate) == (1, 2, 0.5)


def test_refused_judge_request_is_unparsable_with_reason() -> None:
    found = compare(lambda body: (400, {}, "filtered") if split(body)[0] == "a" else "[[A]]", ("a", "b"))
    assert found[0].winner is None
    assert found[0].details == ["error: 400 filtered", "[[A]]"]
    judge = PromptedJudge(Endpoint(ChatEndpoint(lambda body: (400, {}, "filtered")).url, "judge"))
    assert judge.grade([QUESTION], [["a"]], [0])[0][:2] == (None, "error: 400 filtered")


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("[[A]]", "first"), ("x [[B]] y", "second"), ("[[C]]", "tie"), ("[[A>>B]] so [[A>B]]", "first"),
        ("[[A=B]]", "tie"), ("[[B>>A]]", "second"), ("", None), ("A", None), ("[A]", None), ("[[a]]", None),
        ("[[A]] [[B]]", None), ("[[A]] [[C]]", None), ("[[A>>B", None),
        ("<think>First [[A]]?</think> [[B]]", "second"), ("[[A]]?</think>none", None),
    ],
)  # fmt: skip
def test_parse_verdict(text: str, verdict: str | None) -> None:
    assert parse_verdict(text, VERDICTS) == verdict


@pytest.mark.parametrize(
    ("text", "grade"),
    [("[[7]]", 7), ("[[7]] so [[7.0]]", 7), ("[[ 2.5 ]]", 2.5), ("7", None), ("[[7]] [[8]]", None), ("[[11]]", None)],
)
def test_parse_grade(text: str, grade: float | None) -> None:
    assert parse_grade(text, 1, 10) == grade


@pytest.mark.parametrize(
    ("orders", "winner"),
    [
        (["base", "base"], "base"), (["other", "other"], "other"), (["tie", "tie"], "tie"), (["base", "other"], "tie"),
        (["base", "tie"], "tie"), (["base", None], None), ([None, None], None), (["tie", None], None),
    ],
)  # fmt: skip
def test_combine_orders(orders: list[Any], winner: str | None) -> None:
    assert combine_orders(orders) == winner


def test_win_rate_counts_ties_as_half() -> None:
    winners = ["other"] * 30 + ["tie"] * 10 + ["base"] * 20 + [None] * 5
    rate = compute_win_rate([(winner, [winner, winner]) for winner in winners])
    assert rate.win_rate == pytest.approx(35 / 60)
    low, high = compute_interval(np.array([1.0] * 30 + [0.0] * 10 + [-1.0] * 20))
    assert (rate.low, rate.high) == pytest.approx(((1 + low) / 2, (1 + high) / 2))
    assert rate[:5] == (60, 30, 10, 20, 5)
    empty = compute_win_rate([(None, [None, None])])
    assert (empty.win_rate, empty.low, empty.num_unparsable) == (None, None, 1)


def test_judge_prompt_keeps_answers_as_text_in_order() -> None:
    """Answers of both turns reach the judge verbatim."""
    question = Question("q", None, [{"role": "system", "content": "S"}], ["One", "Two"], ["R1", "R2"])
    server = ChatEndpoint(lambda body: "[[A]]")
    judge = PromptedJudge(Endpoint(server.url, "judge", num_concurrent=1))
    judge.compare([question], [["{{ second }}", "b2"]], [["o1", "o2"]], [0])
    first, second = (body["messages"][-1]["content"] for body in server.asked)
    parts = ("S", "One", "R1", "{{ second }}", "o1", "Two", "R2", "b2", "o2")
    assert [first.index(part) for part in parts] == sorted(first.index(part) for part in parts)
    assert second.index("o1") < second.index("{{ second }}")
    assert server.asked[0]["messages"][0]["role"] == "system"
    assert server.asked[0]["temperature"] == 0
    judge.grade([question._replace(references=["", "R2"])], [["b1", "b2"]], [0])
    before, _, after = server.asked[-1]["messages"][-1]["content"].partition("Two")
    assert ("[Reference answer]" in before, "[Reference answer]\nR2" in after) == (False, True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("user: x", "no verdicts"),
        ("user: x\nverdicts: {'[[A]]': left}", "no verdicts"),
        ("user: x\nverdicts: {'': first}", "no verdicts"),
        ("user: x\nverdicts: {A: [first]}", "no verdicts"),
        ("verdicts: {'[[A]]': first}", "has no prompt"),
        ("user: '{{ third }}'\nverdicts: {'[[A]]': first}", "its template fails"),
    ],
)
def test_invalid_judge_prompt_is_refused(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    judge = PromptedJudge(Endpoint("http://127.0.0.1:9/v1", "judge"), pairwise=tmp_path / "mine.yaml")
    with pytest.raises(ConfigError, match=found):
        judge.compare([QUESTION], [["a"]], [["b"]], [0])


@pytest.mark.parametrize("scale", ["[5, 5]", "[10, 1]", "[1]", "[a, b]", "[.nan, 1]"])
def test_invalid_grade_scale_is_refused(tmp_path: Path, scale: str) -> None:
    (tmp_path / "mine.yaml").write_text(f"user: x\nscale: {scale}")
    with pytest.raises(ConfigError, match="no scale"):
        judge_grade(base_url="http://127.0.0.1:9/v1", model="j", prompt=str(tmp_path / "mine.yaml"))


def test_judge_grade_is_a_reward_function() -> None:
    server = ChatEndpoint(lambda body: f"[[{'10' if 'right' in body['messages'][-1]['content'] else '1'}]]")
    path = f"recipes_lib.evaluation.judges:judge_grade(base_url='{server.url}', model='j')"
    (reward,) = load_reward_functions([path]).values()
    chats = [[{"role": "user", "content": "How?"}]] * 3
    answers = [[{"role": "assistant", "content": text}] for text in ("right", "no", "right")]
    assert reward(prompts=chats, completions=answers, completion_ids=[[1]] * 3) == [1.0, 0.0, 1.0]
    assert reward(prompts=["How?"], completions=["so"], completion_ids=[[1]], reference=["right"]) == [1.0]
    server.answer = lambda body: "no grade"
    assert judge_grade(base_url=server.url, model="j")(prompts=["a"], completions=["b"]) == [None]


def test_reasoning_of_answers_is_not_judged(tiny_model_dir: Path, tmp_path: Path) -> None:
    server = ChatEndpoint(lambda body: f"[[{'A' if 'wise' in split(body)[0] else 'B'}]]")
    judge_preference(base_url=server.url, model="j", baseline="old")(
        prompts=["q"], completions=["<think>secret</think>wise"], old=["secret</think>no"]
    )
    judge_grade(base_url=server.url, model="j")(prompts=["q"], completions=["<think>secret, cut"])
    shown = [body["messages"][-1]["content"] for body in server.asked]
    assert ["secret" in text for text in shown] == [False] * 3
    assert ["wise" in text for text in shown] == [True, True, False]
    judge = load_reward_judge(str(write_reward_model(tmp_path, tiny_model_dir)), device="cpu")
    plain, reasoned = judge.grade([QUESTION] * 2, [["Paris."], ["<think>secret</think>Paris."]], [0, 1])
    assert plain.value == pytest.approx(reasoned.value)


def test_judge_preference_is_a_reward_function() -> None:
    server = ChatEndpoint(prefer(len))
    path = f"recipes_lib.evaluation.judges:judge_preference(base_url='{server.url}', model='j', baseline='old')"
    (reward,) = load_reward_functions([path]).values()
    columns = {"prompts": ["q"] * 4, "completion_ids": [[1]] * 4, "old": ["aa", "aa", "aa", None]}
    assert reward(completions=["a", "bb", "ccc", "d"], **columns) == [0.0, 0.5, 1.0, None]
    with pytest.raises(KeyError, match="baseline"):
        judge_preference(base_url=server.url, model="j")(prompts=["q"], completions=["a"])
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        judge_preference(base_url=server.url, model="j", prompt="none.yaml")
    (isolated,) = load_reward_functions([path], seconds=60).values()
    assert isolated(completions=["a", "bb", "ccc", "d"], **columns) == [0.0, 0.5, 1.0, None]


def test_reward_model_judge_compares_rewards(tiny_model_dir: Path, tmp_path: Path) -> None:
    judge = load_reward_judge(str(write_reward_model(tmp_path, tiny_model_dir)), device="cpu")
    questions = [QUESTION] * 3
    base, other = [["Paris."], ["a b"], ["same"]], [["The capital"], ["seven days"], ["same"]]
    found = judge.compare(questions, base, other, range(3))
    grades = [[grade.value for grade in judge.grade(questions, answers, range(3))] for answers in (base, other)]
    for judgment, one, two in zip(found, *grades, strict=True):
        assert judgment.winner == ("tie" if one == two else "base" if one > two else "other")
        assert judgment.details == [one, two]
    assert found[2].winner == "tie"
    assert compute_win_rate([(one.winner, one.orders) for one in found]).position_agreement is None
    # What has no room has no verdict.
    short, long = ["a"], ["word " * 600]
    assert [one.winner for one in judge.compare([QUESTION] * 2, [short, long], [long, short], [0, 1])] == [None, None]


def test_reward_model_without_chat_template_scores_single_turns(tiny_model_dir: Path, tmp_path: Path) -> None:
    judge = load_reward_judge(str(write_reward_model(tmp_path, tiny_model_dir)), device="cpu")
    as_chat = judge.grade([QUESTION], [["a b"]], [0])[0].value
    judge.model.tokenizer.chat_template = None
    as_text = judge.grade([QUESTION], [["a b"]], [0])[0].value
    assert as_text == pytest.approx(judge.model.score([("How?", "a b")])[0])
    assert as_text != pytest.approx(as_chat)
    with pytest.raises(ConfigError, match="has no chat template"):
        judge.grade([QUESTION._replace(turns=["How?", "Why?"])], [["a b", "a"]], [0])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("user: [", "while parsing a flow node, expected the node content"),
        ("- a", "not a mapping"),
        ("", "not a mapping"),
        ("user: 2026-13-45", "is not plain YAML"),
        ("user: x\nusr: y", "unknown field `usr`"),
        ("user: 3", "`user` is a int"),
    ],
)
def test_invalid_prompt_file_is_refused(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "a prompt.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=found) as caught:
        load_prompt_file(path, FIELDS)
    assert caught.value.problems[0].where.startswith(str(path))


def test_missing_prompt_fields_are_none(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("user: é")
    assert load_prompt_file(tmp_path / "p.yaml", FIELDS) == {"user": "é", "scale": None}
    with pytest.raises(ConfigError, match="there is no such file"):
        load_prompt_file(tmp_path / "absent.yaml", FIELDS)


def test_prompt_values_are_not_rendered_as_templates() -> None:
    assert render_prompt("say {{ it }}", "w", {"it": "{{ 7 * 7 }} {% raise %}"}) == "say {{ 7 * 7 }} {% raise %}"
    for template in (
        "{{ absent }}",
        "{{ it",
        "{{ it + 1 }}",
        "{{ 1 / 0 }}",
        "{{ it.__class__.__mro__[1].__subclasses__() }}",
    ):
        with pytest.raises(ConfigError, match="its template fails"):
            render_prompt(template, "w", {"it": "x"})

"""Methods of `recipes synthesize`: shipped files, validation of custom files, and seeded draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.rows import write_rows

from recipes_lib.commands.generated.generation_methods import METHODS, SourceRow, load_method, read_source, take_reply
from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.errors import ConfigError, DataError
from recipes_lib.evaluation.judge_questions import Question

SHIPPED = sorted(path.stem for path in METHODS.glob("*.yaml"))
SYSTEM = {"role": "system", "content": "Be kind."}
PROMPTS = [
    SourceRow(f"f:{n}", f"Question {n}?", Question(str(n), None, [SYSTEM], [f"Question {n}?"])) for n in range(5)
]
DOCUMENTS = [SourceRow(f"f:{n}", f"Document {n} {{{{ 7 * 7 }}}}") for n in range(5)]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_method_renders_prompts_and_rows(name: str) -> None:
    method = load_method(SynthesisConfig(method=name))
    rows = DOCUMENTS if method.fields["reads"] == "documents" else PROMPTS
    for number in range(12):
        values = method.draw(rows, number)
        for step in method.steps:
            chat = method.build_chat(step, values)
            assert chat[-1]["role"] == "user"
            assert "{{" not in chat[-1]["content"].replace("{{ 7 * 7 }}", "")
            values[step["name"]] = f"reply to {step['name']}"
        row = method.build_row(values)
        question, answer = method.build_question(row, values)
        assert answer == f"reply to {method.steps[-1]['name']}"
        assert question.turns[0]
        assert method.read_compared(values)
        if "messages" in row:
            roles = [message["role"] for message in row["messages"]]
            assert roles in (["user", "assistant"], ["system", "user", "assistant"])


def test_system_prompt_of_method_replaces_that_of_row() -> None:
    method = load_method(SynthesisConfig(method="explanation"))
    values = method.draw(PROMPTS, 0)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    values["context"] = [SYSTEM, *turns]
    (system, *others) = method.build_chat(method.steps[0], values)
    assert system["content"] == values["instruction"] != SYSTEM["content"]
    assert others == [*turns, {"role": "user", "content": "Question 0?"}]
    messages = method.build_row({**values, "answer": "So."})["messages"]
    assert messages == [system, *others, {"role": "assistant", "content": "So."}]
    kept = load_method(SynthesisConfig())
    values = kept.draw(PROMPTS, 0)
    assert kept.build_row({**values, "answer": "So."})["messages"][0] == SYSTEM
    assert kept.build_chat(kept.steps[0], values)[0] == SYSTEM
    alone = kept.build_chat({"name": "a", "prompt": "{{ prompt }}"}, values)
    assert alone == [{"role": "user", "content": "Question 0?"}], "without `context`"
    labelled = kept._replace(fields={**kept.fields, "row": {"label": 1, "text": "{{ prompt }}"}})
    assert labelled.build_row(values) == {"label": 1, "text": "Question 0?"}


def test_draws_depend_only_on_seed_and_number() -> None:
    def draw(**keys: Any) -> list[dict[str, Any]]:
        method = load_method(SynthesisConfig(method="instructions", **keys))
        return [method.draw(PROMPTS, number) for number in range(30)]

    drawn = draw()
    assert drawn == draw() != draw(seed=1)
    assert {len({seed["where"] for seed in one["seeds"]}) for one in drawn} == {3}, "without replacement"
    kinds = load_method(SynthesisConfig(method="instructions")).fields["choices"]["kind"]
    assert {one["kind"] for one in drawn} == set(kinds)
    assert len(draw(num_seeds=9)[0]["seeds"]) == 5
    of_prompts = load_method(SynthesisConfig())
    assert [of_prompts.draw(PROMPTS, number)["source"] for number in (1, 6)] == [["f:1"], ["f:1"]]


@pytest.mark.parametrize(
    ("pattern", "text", "taken"),
    [
        (None, " a \n", "a"),
        (None, " ", None),
        ("(?s)<p>(.*?)</p>", "x <p>\na\nb</p> <p>c</p>", "a\nb"),
        ("(?s)<p>(.*?)</p>", "<p>a", None),
        ("(?s)<p>(.*?)</p>", "<p> </p>", None),
        ("(?s)<p>(.*?)</p>|none", "none", None),
    ],
)
def test_take_reply_returns_group_of_pattern(pattern: str | None, text: str, taken: str | None) -> None:
    assert take_reply({"name": "s", "prompt": "p", "pattern": pattern}, text) == taken


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reads": "books"}, "reads: books"),
        ({"reads": None}, "`reads` is missing"),
        ({"steps": []}, "`steps` is missing"),
        ({"steps": [{"name": "a"}]}, "a step is"),
        ({"steps": [{"name": "a", "prompt": "b", "patern": "c"}]}, "unknown field `patern`"),
        ({"steps": [{"name": "a", "prompt": "b", "pattern": "("}]}, "the pattern of `a`"),
        ({"steps": [{"name": "a", "prompt": "b", "pattern": "x"}]}, "does not have exactly one group"),
        ({"choices": {"kind": []}}, "choice `kind` has no values"),
        ({"row": {"messages": [{"role": "assistant", "content": "{{ a }}"}]}}, "`row: messages` lacks a question"),
        ({"rows": {}}, "unknown field `rows`"),
    ],
)
def test_invalid_method_file_is_rejected(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    fields = yaml.safe_load((METHODS / "instructions.yaml").read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**fields, **change}))
    with pytest.raises(ConfigError, match=message):
        load_method(SynthesisConfig(method=str(path)))


def test_unknown_method_lists_shipped_methods() -> None:
    with pytest.raises(ConfigError, match="answers, evolution, explanation, instructions, textbook"):
        load_method(SynthesisConfig(method="evolutions"))


def test_source_columns_depend_on_method(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    write_rows(path, [{"prompt": f"p{n}", "text": f"t{n}"} for n in range(4)])

    def read(method: str, **keys: Any) -> list[str]:
        rows, _ = read_source(load_method(SynthesisConfig(method=method, dataset_name=str(path), **keys)))
        return [row.text for row in rows]

    for method, texts in (
        ("answers", ["p0", "p1"]),
        ("instructions", ["p0", "p1", "p2", "p3"]),
        ("textbook", ["t0", "t1"]),
    ):
        assert read(method, num_candidates=2) == texts
    half = {"prompt": "p\ud83d", "text": "t\ud83d"}
    write_rows(path, [{"prompt": "p"}, {"text": "t"}, {"turns": ["a", "b"]}, half], ensure_ascii=True)
    path.write_text(f"{path.read_text()}broken\n")
    broken = [
        "the text holds half a surrogate pair, \\ud83d, at position 1",
        "invalid JSON at column 1: Expecting value",
    ]
    for method, message in (
        ("answers", ["has no question", "has several turns", *broken]),
        ("textbook", [f"has no `text`; so in 2 places, next {path}:3", *broken]),
    ):
        with pytest.raises(DataError) as caught:
            read(method)
        assert [problem.found for problem in caught.value.problems] == message
    write_rows(path, [{"prompt": "p", "tools": [{"name": "add"}]}])
    with pytest.raises(DataError, match="has `tools`, which the writer is not shown"):
        read("answers")
    assert read("answers", dataset_columns={"tools": None}) == ["p"]


def test_repeated_prompts_that_would_all_be_removed_are_refused(tmp_path: Path) -> None:
    """After their answers were paid for; several answers to a prompt are `num_answers`."""
    write_rows(tmp_path / "s.jsonl", [{"prompt": "p", "text": "t"}])

    def read(method: str, **keys: Any) -> int:
        rows, _ = read_source(
            load_method(
                SynthesisConfig(method=method, dataset_name=str(tmp_path / "s.jsonl"), num_candidates=2, **keys)
            )
        )
        return len(rows)

    for method in ("answers", "explanation"):
        with pytest.raises(ConfigError, match="num_candidates: repeats the prompts of the source, 1;"):
            read(method)
        assert read(method, near_duplicates_threshold=None) == 1
    assert [read(method) for method in ("evolution", "textbook", "instructions")] == [1, 1, 1]

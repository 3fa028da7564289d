"""Layouts of public datasets (columns and keys, own texts): the prepared rows train on the expected answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.recipes.preferences import ROOT, write_config
from tests.rows import write_rows

from recipes_lib.config.loader import load_config
from recipes_lib.data.packed.prepared_set import prepare
from recipes_lib.data.pairs.preference_sets import prepare_pairs
from recipes_lib.models import loading

ASKED, GOOD, BAD = "What is {n} plus {n}?", "It is {twice}.", "It is not {twice}, or is it?"
TURN, TEXT = "<|im_end|>", "<|endoftext|>"
DIALOGUE = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: What is {n} plus {n}?\n\nAssistant:"
USER = {"role": "user", "content": ASKED}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds two numbers."}}
TOOLS_TEMPLATE = {"chat_template_path": str(ROOT / "recipes/configs/chat_templates/chatml_tools.jinja")}


def say(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


# Name -> (row, trained answers, further keys).
LAYOUTS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "question and answer": ({"question": ASKED, "answer": GOOD}, [GOOD + TURN], {}),
    "other names, texts": (
        {"query": ASKED, "reply": GOOD},
        [GOOD + TEXT],
        {"dataset_columns": {"prompt": "query", "completion": "reply"}},
    ),
    "ignored label": (
        {"prompt": ASKED, "completion": GOOD, "label": False},
        [GOOD + TEXT],
        {"dataset_columns": {"label": None}},
    ),
    "tool calls without content": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "{twice}"},
                say(GOOD),
            ],
            "tools": [ADD],
        },
        ['<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>' + TURN, GOOD + TURN],
        TOOLS_TEMPLATE,
    ),
    "hh-rlhf": ({"chosen": f"{DIALOGUE} {GOOD}", "rejected": f"{DIALOGUE} {BAD}"}, [f" {GOOD}{TEXT}"], {}),
    "texts with common prefix": (
        {"chosen": f"{ASKED}\nYes: {GOOD}", "rejected": f"{ASKED}\nNo: {BAD}"},
        [f"Yes: {GOOD}{TEXT}"],
        {},
    ),
    "chats with common prefix": ({"chosen": [USER, say(GOOD)], "rejected": [USER, say(BAD)]}, [GOOD + TURN], {}),
    "pairs with other names": (
        {"query": ASKED, "good": GOOD, "bad": BAD},
        [GOOD + TURN],
        {"dataset_columns": {"question": "query", "chosen": "good", "rejected": "bad"}},
    ),
}
RUNS = [
    (recipe, layout)
    for layout, (row, _, keys) in LAYOUTS.items()
    for recipe in ("sft", "dpo")
    if recipe == "sft" or "rejected" in {*row, *keys.get("dataset_columns", ())}
]


def fill(value: Any, number: int) -> Any:
    if isinstance(value, str):
        return value.replace("{n}", str(number)).replace("{twice}", str(2 * number))
    if isinstance(value, dict):
        return {key: fill(item, number) for key, item in value.items()}
    return [fill(item, number) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("recipe", "layout"), RUNS, ids=[f"{layout} in {recipe}" for recipe, layout in RUNS])
def test_public_dataset_layout_is_prepared_with_its_answers(tmp_path, tiny_model_dir, tiny_tokenizer, recipe, layout):
    row, answers, keys = LAYOUTS[layout]
    data = write_rows(tmp_path / "rows.jsonl", [fill(row, number) for number in range(4)])
    config = write_config(tmp_path, tiny_model_dir, data, max_length=512, **keys)
    loaded = load_config(recipe, ["--config", str(config)])
    expected = [fill(answer, number) for number in range(4) for answer in answers]

    def load_tokenizer():
        return loading.load_tokenizer(loaded.model, loaded.tokens)

    if recipe == "dpo":
        pairs = prepare_pairs(loaded, load_tokenizer).train
        trained = [tiny_tokenizer.decode(pair["chosen_ids"]) for pair in pairs]
        rejected = [tiny_tokenizer.decode(pair["rejected_ids"]) for pair in pairs]
        end = TURN if answers[0].endswith(TURN) else TEXT
        assert all(text.endswith(fill(BAD, number) + end) for number, text in enumerate(rejected))
    else:
        trained = []
        for pack in prepare(loaded, load_tokenizer).train:
            targets = np.flatnonzero(pack["loss_mask"])
            runs = np.split(targets, np.flatnonzero(np.diff(targets) > 1) + 1)
            trained += [tiny_tokenizer.decode(pack["input_ids"][run]) for run in runs]
    assert sorted(trained) == sorted(expected)

"""Loading of prepared pairs for a run, and the examples that monitoring reads."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from recipes_lib.config.schema import EvaluationConfig
from recipes_lib.data.pairs.preference_sets import load_pair_data
from recipes_lib.data.sources.rows import Remark
from recipes_lib.training.evaluation.samples import build_prompts


def make_rows(num_rows: int, start: int = 0) -> list[dict[str, Any]]:
    """Return rows with two pairs per prompt."""
    return [
        {"prompt": f"Question {number // 2}:", "chosen": f" yes {number}", "rejected": " no" * (1 + number % 3)}
        for number in range(start, start + num_rows)
    ]


@pytest.fixture
def config(build_config, write_rows):
    held_out = write_rows("held_out.jsonl", make_rows(6, start=100))
    train = write_rows("train.jsonl", make_rows(20))
    return build_config(dataset_name=str(train), dataset_test_split=str(held_out))


def test_load_pair_data_returns_pairs_and_audit(config, tiny_tokenizer):
    data = load_pair_data(config, tiny_tokenizer)
    assert (len(data.train), len(data.eval), list(data.held_out)) == (20, 6, ["held-out set"])
    assert data.audit.num_pairs == 20
    assert data.audit.terminators == [tiny_tokenizer.eos_token_id]
    lengths = sorted(len(r["prompt_ids"]) + max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in data.train)
    assert lengths[9] <= data.typical_length <= lengths[10]
    assert data.max_length == 64
    # Strings in place of chats.
    assert all(finding.severity == "ok" or Remark.PLAIN_TEXT.found in finding.found for finding in data.findings)
    assert json.loads(json.dumps(data.record)) == data.record
    assert data.record["train"]["num_prompts"] == 10


def test_iterate_examples_yields_held_out_prompts_once(config, tiny_tokenizer):
    data = load_pair_data(config, tiny_tokenizer)
    examples = list(data.iterate_examples())
    assert len(examples) == 3
    prompts = build_prompts(EvaluationConfig(num_sample_prompts=2), iter(examples), tiny_tokenizer, math.inf, print)
    assert [(prompt.text, prompt.reference) for prompt in prompts] == [
        ("Question 50:", " yes 100"),
        ("Question 51:", " yes 102"),
    ]
    for ids, is_target in examples:
        assert (ids.dtype, is_target.dtype, ids.shape) == (np.dtype(np.uint32), np.dtype(np.bool_), is_target.shape)


def test_iterate_examples_is_empty_without_held_out_rows(build_config, write_rows, tiny_tokenizer):
    data = load_pair_data(build_config(dataset_name=str(write_rows(rows=make_rows(4)))), tiny_tokenizer)
    assert (data.eval, data.held_out, list(data.iterate_examples())) == (None, {}, [])

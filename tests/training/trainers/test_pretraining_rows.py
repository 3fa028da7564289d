"""Rows of a pretraining run, from tokens on disk and the planned batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.training.pretraining import build_config, write_documents
from transformers import AutoTokenizer

from recipes_lib.data.tokens.token_data import prepare_tokens
from recipes_lib.errors import ConfigError
from recipes_lib.training.trainers.pretraining_rows import build_rows


@pytest.fixture
def build(tmp_path, tiny_tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)

    def build_run(world_size=1, **keys):
        config = build_config(tmp_path, tiny_tokenizer_dir, **keys)
        return build_rows(config, prepare_tokens(config, lambda: tokenizer), world_size)

    return build_run


def read(rows):
    return [row["input_ids"].tolist() for row in (rows.train[at] for at in range(len(rows.train)))]


def test_row_order_is_independent_of_world_size_and_accumulation(build) -> None:
    batches = [(1, 8, 1), (1, 2, 4), (2, 1, 4), (4, 2, 1)]
    runs = [
        build(world, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)
        for world, size, accumulation in batches
    ]
    assert len({json.dumps(read(rows)) for rows in runs}) == 1


def test_epoch_reads_every_window_once(build, tmp_path, tiny_tokenizer_dir) -> None:
    keys = {"num_train_epochs": 1, "max_steps": None, "per_device_train_batch_size": 1}
    rows = build(**keys)
    (source,) = prepare_tokens(build_config(tmp_path, tiny_tokenizer_dir, **keys), pytest.fail).train
    windows = [source.read(start, start + 32).tolist() for start in range(0, source.num_tokens - 31, 32)]
    assert read(rows) != windows
    assert sorted(read(rows)) == sorted(windows)
    assert rows.epochs == {"documents": 1.0}
    assert rows.warnings == []


def test_repeated_source_is_warned_of(build) -> None:
    (warning,) = build(num_train_epochs=5, max_steps=None).warnings
    assert warning.startswith("documents is read 5.")


def test_held_out_documents_give_examples_and_typical_length(build, tmp_path) -> None:
    write_documents(tmp_path / "documents.jsonl", 60)
    rows = build(test_split_size=0.2)
    examples = list(rows.iterate_examples())
    held_out = rows.held_out["documents"]
    assert (
        0 < sum(len(ids) for ids, _ in examples) <= sum(len(held_out[at]["input_ids"]) for at in range(len(held_out)))
    )
    assert all(mask.all() for _, mask in examples)
    assert all(len(ids) <= 32 for ids, _ in examples)
    assert 1 < rows.typical_length <= 32
    assert build(test_split_size=0.2, cross_document_attention=True).typical_length == 32
    assert json.loads(json.dumps(rows.record)) == rows.record


def test_source_names_are_shortened_if_unique(build, tmp_path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_documents(tmp_path / folder / "same.jsonl", 20)
    write_documents(tmp_path / "other.jsonl", 20)
    names = [str(tmp_path / name) for name in ("a/same.jsonl", "b/same.jsonl", "other.jsonl")]
    mixture = [{"name": name, "weight": 1} for name in names]
    rows = build(dataset_name=None, dataset_mixture=mixture)
    assert list(rows.epochs) == [names[0], names[1], "other"]
    drawn = np.bincount([rows.train[at]["source"] for at in range(len(rows.train))])
    assert drawn.max() - drawn.min() <= 1


def test_held_out_set_with_name_of_source_is_refused(build, tmp_path) -> None:
    sets = {"documents": {"name": str(write_documents(tmp_path / "more.jsonl", 20))}}
    with pytest.raises(ConfigError, match="`eval_datasets` has a set 'documents', which is also the name of rows"):
        build(test_split_size=0.2, eval_datasets=sets, allow_eval_overlap=True)

"""Conversion of the dataset keys of other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from recipes_lib.config.migration.legacy_files import convert_datasets
from recipes_lib.config.migration.migrate import migrate


@pytest.mark.parametrize(
    ("legacy", "new"),
    [
        (
            {"dataset_mixer": {"a/b": 1.0}, "dataset_splits": ["train_sft", "test_sft"], "dataset_configs": ["en"]},
            {
                "dataset_name": "a/b",
                "dataset_config": "en",
                "dataset_train_split": "train_sft",
                "dataset_test_split": "test_sft",
            },
        ),
        (
            {"dataset_mixer": {"a/b": 0.5, "c/d": 1.0}},
            {"dataset_mixture": [{"name": "a/b", "repeat": 0.5}, {"name": "c/d", "repeat": 1.0}]},
        ),
        ({"dataset_mixer_list": ["a/b", 1.0]}, {"dataset_name": "a/b"}),
        (
            {"datasets": [{"path": "a/b", "name": "en", "split": "train"}, {"path": "c/d"}]},
            {"dataset_mixture": [{"name": "a/b", "config": "en", "split": "train"}, {"name": "c/d"}]},
        ),
        (
            {"datasets": [{"path": "a/b", "fraction": 0.75}, {"path": "c/d", "fraction": 0.25, "split": "train"}]},
            {"dataset_mixture": [{"name": "a/b", "weight": 0.75}, {"name": "c/d", "weight": 0.25, "split": "train"}]},
        ),
        ({"datasets": [{"path": "a/b", "fraction": 0.3, "name": None}]}, {"dataset_name": "a/b"}),
        (
            {
                "datasets": [
                    {"path": "a/b", "type": "chat_template", "field_messages": "conversations", "split": "train[:1%]"}
                    | {"message_property_mappings": {"role": "from", "content": "value"}}
                ]
            },
            {"dataset_name": "a/b", "dataset_train_split": "train[:1%]"},
        ),
        ({"datasets": [{"path": "a/b", "type": "completion"}]}, {"dataset_name": "a/b", "dataset_format": "text"}),
        (
            {"datasets": [{"path": "a/b", "field_messages": "dialogue", "field_chosen": "chosen"}, {"path": "c/d"}]},
            {"dataset_mixture": [{"name": "a/b", "columns": {"conversations": "dialogue"}}, {"name": "c/d"}]},
        ),
        (
            {"datasets": [{"path": "a/b", "type": "completion"}, {"path": "c/d", "type": "chat_template"}]},
            {"dataset_mixture": [{"name": "a/b", "format": "text"}, {"name": "c/d"}]},
        ),
        (
            {
                "dataset_mixture": {
                    "datasets": [{"id": "a/b", "columns": ["messages"], "weight": 1.0}],
                    "test_split_size": 0.1,
                    "seed": 0,
                }
            },
            {"dataset_name": "a/b", "test_split_size": 0.1},
        ),
    ],
)
def test_legacy_dataset_keys_are_converted(legacy: dict, new: dict) -> None:
    assert convert_datasets(legacy)[0] == new


def test_mixture_without_held_out_split_has_remark() -> None:
    _, remark = convert_datasets({"dataset_mixer": {"a/b": 0.5, "c/d": 1.0}})
    assert "held-out split" in remark
    assert convert_datasets({"dataset_mixer": {"a/b": 1.0}})[1] == ""


@pytest.mark.parametrize(("kind", "has_remark"), [("alpaca", True), ("alpaca:chat", True), ("chat_template", False)])
def test_prompt_of_axolotl_has_remark(kind: str, has_remark: bool) -> None:
    _, remark = convert_datasets({"datasets": [{"path": "a/b", "type": kind}]})
    assert ("turns of the chat template" in remark) is has_remark


@pytest.mark.parametrize("mixer", [{"a/b": 9500}, {"a/b": 2.5, "c/d": 1.0}, ["a/b", 10, "c/d", 1.0], {"a/b": "1000"}])
def test_numbers_of_rows_are_not_passes(mixer: object) -> None:
    """In open-instruct, a number above 1 beside a set counts rows: as ``repeat``, it would be thousands of epochs."""
    new, remark = convert_datasets({"dataset_mixer": mixer})
    assert new is None
    assert "counts rows" in remark


@pytest.mark.parametrize(
    "legacy",
    [
        {"datasets": [{"path": "json", "data_files": "x.json"}]},
        {"datasets": "a/b"},
        {"datasets": [{"path": "a/b", "drop_system_message": True}]},
        {"dataset_mixture": {"seed": 1}},
        {"dataset_mixer": ["a/b"]},
        {"dataset_mixer": {}},
        {"dataset_mixer": {"a/b": 1.0}, "dataset_splits": ["train_a", "train_b"]},
    ],
)
def test_ambiguous_dataset_keys_need_review(legacy: dict) -> None:
    assert convert_datasets(legacy)[0] is None


DATASET_INFO = {
    "mine": {"file_name": "mine.json"},
    "asked": {"hf_hub_url": "a/b", "subset": "en", "split": "test", "columns": {"prompt": "q", "query": "c"}},
    "chats": {"hf_hub_url": "c/d", "formatting": "sharegpt", "columns": {"messages": "dialogue", "system": "persona"}},
    "part": {"file_name": "mine.json", "num_samples": 10},
}
ASKED = {"name": "a/b", "config": "en", "split": "test", "columns": {"instruction": "q", "input": "c"}}


@pytest.mark.parametrize(
    ("names", "new"),
    [
        ("mine", {"dataset_name": "DATA/mine.json"}),
        ("asked, mine", {"dataset_mixture": [ASKED, {"name": "DATA/mine.json"}]}),
        ("chats", {"dataset_name": "c/d", "dataset_columns": {"conversations": "dialogue", "system": "persona"}}),
        ("e/f", {"dataset_name": "e/f"}),
        ("part", None),
        ("mine,gone", None),
    ],
)
def test_dataset_names_of_llama_factory_are_looked_up(tmp_path: Path, write, names: str, new) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(DATASET_INFO))
    (tmp_path / "mine.json").write_text("[]")
    old = f"model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ndataset: {names}\n"
    migration = migrate(write(f"{old}dataset_dir: {tmp_path}\noutput_dir: o\n"))
    assert migration.is_ready == (new is not None)
    loaded = json.loads(json.dumps(yaml.safe_load(migration.text)).replace(str(tmp_path), "DATA"))
    assert loaded == {"model_name_or_path": "a/b", "output_dir": "o", **(new or {})}
    assert any(change.by_hand and "`dataset" in change.what for change in migration.changes)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pretraining_dataset: c/d", {"dataset_name": "c/d"}),
        (
            "pretraining_dataset: [{path: c/d, name: en, text_column: body}]",
            {"dataset_name": "c/d", "dataset_config": "en", "dataset_columns": {"text": "body"}},
        ),
    ],
)
def test_pretraining_data_of_axolotl_are_streamed(write, old: str, new) -> None:
    migration = migrate(write(f"base_model: a/b\n{old}\nmax_steps: 9\nsequence_len: 64\noutput_dir: o\nbf16: auto"))
    assert (migration.recipe, migration.is_ready) == ("pretrain", True)
    fixed = {"model_name_or_path": "a/b", "max_steps": 9, "max_length": 64, "output_dir": "o"}
    assert yaml.safe_load(migration.text) == {**fixed, **new, "dataset_streaming": True}


def test_unknown_pretraining_data_of_axolotl_become_a_comment(write) -> None:
    text = "base_model: a/b\npretraining_dataset: [{path: c/d, skip: 5}]\nmax_steps: 9\noutput_dir: o\n"
    migration = migrate(write(text))
    assert not migration.is_ready
    assert "\n# pretraining_dataset: [{path: c/d, skip: 5}]\n" in migration.text
    assert "dataset_streaming" not in migration.text

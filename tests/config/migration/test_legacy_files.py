"""Conversion of the dataset keys of other programs."""

from __future__ import annotations

import pytest

from recipes_lib.config.migration.legacy_files import convert_datasets


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


@pytest.mark.parametrize(
    "legacy",
    [
        {"datasets": [{"path": "json", "data_files": "x.json"}]},
        {"datasets": "a/b"},
        {"dataset_mixture": {"seed": 1}},
        {"dataset_mixer": ["a/b"]},
        {"dataset_mixer": {}},
        {"dataset_mixer": {"a/b": 1.0}, "dataset_splits": ["train_a", "train_b"]},
    ],
)
def test_ambiguous_dataset_keys_need_review(legacy: dict) -> None:
    assert convert_datasets(legacy)[0] is None

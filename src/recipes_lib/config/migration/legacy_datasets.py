"""Datasets as TRL and alignment-handbook spell them, in the keys of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

LEGACY_KEYS: Final = ("dataset_mixture", "datasets", "dataset_mixer", "dataset_mixer_list")
COMPANIONS: Final = ("dataset_splits", "dataset_configs")
"""Keys that only say more about ``dataset_mixer``."""

_READ = {"id", "path", "name", "config", "split", "columns", "weight", "fraction"}


def convert_datasets(values: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return the keys that say what the legacy ones said, and what to look at afterwards.

    Args:
        values: The legacy keys of the file, ``LEGACY_KEYS`` and ``COMPANIONS``, as plain values.

    Returns:
        New keys (``None`` when they cannot be made out) and a remark, empty when nothing changed its meaning.
    """
    key = next(key for key in LEGACY_KEYS if key in values)
    legacy = values[key]
    if key.startswith("dataset_mixer"):
        return _convert_mixer(legacy, values.get("dataset_splits"), values.get("dataset_configs"))
    extra = {}
    if isinstance(legacy, Mapping):
        extra = {"test_split_size": legacy["test_split_size"]} if legacy.get("test_split_size") else {}
        legacy = legacy.get("datasets")
    if not isinstance(legacy, Sequence) or not all(
        isinstance(item, Mapping) and item.keys() <= _READ for item in legacy
    ):
        return None, ""
    return _join([_convert_entry(item) for item in legacy], extra)


def _convert_entry(item: Mapping[str, Any]) -> dict[str, Any]:
    name = item.get("id") or item.get("path") or item.get("name")
    # Beside `path`, TRL's `name` is the configuration.
    config = item.get("config") or (item.get("name") if "path" in item else None)
    entry = {
        "name": name,
        "config": config,
        "split": item.get("split"),
        # Theirs is a fraction of the dataset's own rows.
        "repeat": item.get("weight", item.get("fraction")),
    }
    return {key: value for key, value in entry.items() if value is not None}


def _convert_mixer(mixer: Any, splits: Any, configs: Any) -> tuple[dict[str, Any] | None, str]:
    pairs = list(mixer.items()) if isinstance(mixer, Mapping) else None
    if isinstance(mixer, list) and len(mixer) % 2 == 0:
        pairs = list(zip(mixer[::2], mixer[1::2], strict=True))
    if not pairs:
        return None, ""
    train = [split for split in splits or [] if not str(split).startswith("test")]
    test = [split for split in splits or [] if str(split).startswith("test")]
    if len(train) > 1 or len(test) > 1 or (configs and len(configs) != len(pairs)):
        return None, ""
    entries = [{"name": name, "repeat": fraction} for name, fraction in pairs]
    for entry, config in zip(entries, configs or [], strict=False):
        entry["config"] = config
    for entry in entries:
        entry |= {"split": train[0]} if train else {}
    return _join(entries, {"dataset_test_split": test[0]} if test and len(entries) == 1 else {})


def _join(entries: list[dict[str, Any]], extra: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    if len(entries) == 1 and entries[0].get("repeat", 1) == 1:
        spelling = {"name": "dataset_name", "config": "dataset_config", "split": "dataset_train_split"}
        return {spelling[key]: value for key, value in entries[0].items() if key in spelling} | extra, ""
    if all(entry.get("repeat", 1) == 1 for entry in entries):
        for entry in entries:
            entry.pop("repeat", None)
    remark = "" if extra else "name a held-out split with `dataset_test_split` or `test_split_size`"
    return {"dataset_mixture": entries} | extra, remark

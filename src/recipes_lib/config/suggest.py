"""What to say about a key that is not one: retired, misplaced, nested, secret, or the nearest known key."""

from __future__ import annotations

import difflib

import yaml

from recipes_lib.config.document import Entry
from recipes_lib.config.renames import read_known
from recipes_lib.config.secrets import is_secret_key, refuse_secret_key
from recipes_lib.config.synonyms import SYNONYMS
from recipes_lib.config.table import KeyTable
from recipes_lib.errors import Problem

_SECTION_WORDS = {
    "data",
    "dataset",
    "model",
    "training",
    "train",
    "tokens",
    "evaluation",
    "eval",
    "lora",
    "peft",
    "sft",
    "pretrain",
}


def explain_unknown(entry: Entry, table: KeyTable, taken: set[str]) -> Problem:
    """Return what is wrong with a key outside the table.

    Args:
        entry: The key with its value.
        table: The keys of the stage.
        taken: Every key that the user wrote, so that a successor is not offered twice.
    """
    key = entry.key
    if is_secret_key(key):
        return refuse_secret_key(entry.where, key[:60])
    known = read_known(table.stage)
    if key in known:
        retired = known[key]
        remedy = f"delete the line: `{retired.new}` is set as well" if retired.new in taken else retired.remedy
        return Problem(entry.where, f"`{key}` {retired.found}", remedy)
    nested = _nested_keys(entry.node, table)
    if nested or (isinstance(entry.node, yaml.MappingNode) and key in _SECTION_WORDS):
        names = ", ".join(nested[:3] + ["..."] * (len(nested) > 3)) or "its keys"
        return Problem(entry.where, f"`{key}` is not a key; keys are flat", f"move {names} to the left margin")
    return Problem(entry.where, f"unknown key `{key[:60]}`", _suggest(key, table, entry.flag))


def _nested_keys(node: yaml.Node, table: KeyTable) -> list[str]:
    if not isinstance(node, yaml.MappingNode):
        return []
    names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    return [name for name in names if name in table.keys or name in read_known(table.stage)]


def _suggest(key: str, table: KeyTable, flag: bool) -> str:
    positive = key.removeprefix("no_")
    if positive in table.keys and table.keys[positive].accepts("boolean"):
        return f"write `--{positive} false`" if flag else f"write `{positive}: false`"
    plain = key.lower().replace("-", "_")
    known = read_known(table.stage)
    synonym = SYNONYMS.get(plain, "")
    if synonym in known:
        return f"it is `{synonym}` elsewhere, which {known[synonym].found}; {known[synonym].remedy}"
    # A retired spelling leads to its successor; one without is no suggestion.
    names = {name: name for name in table.keys} | {
        name: retired.new for name, retired in known.items() if retired.new in table.keys
    }
    near = [synonym] if synonym in table.keys else difflib.get_close_matches(plain, names, n=1, cutoff=0.7)
    return f"did you mean `{names[near[0]]}`?" if near else "see `--help` or docs/configs.md for the keys"

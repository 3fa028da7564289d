"""``--help`` and ``--print-config``, from the key table alone; every effective key of a recipe."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Any

from recipes_lib.config.schema import SECTIONS, RecipeConfig
from recipes_lib.config.table import Key, KeyTable, describe, load_table

_WIDTH = 100


def format_help(table: KeyTable) -> str:
    """Return the help of a stage: usage, then every key by group, with its value, default and meaning."""
    lines = [
        f"usage: recipes/{table.stage}.py --config FILE [--key value ...]",
        "",
        "  --config FILE    a flat YAML file of the keys below; flags override it",
        "  --print-config   print every effective value and where it comes from, and exit",
        "  --help           print this, and exit",
    ]
    for group, about in table.groups.items():
        lines += ["", f"{group}: {about}" if about else group]
        for key in table.keys.values():
            if key.group == group:
                lines += _format_help_entry(key, key.name in table.required)
    return "\n".join(lines)


def format_config(config: RecipeConfig, table: KeyTable) -> str:
    """Return every effective value as YAML that loads again, each with where it comes from as a comment.

    A key that another one leaves without effect is a comment.
    """
    values = _list_sections(config) | dict(config.training)
    lines = []
    for group in table.groups:
        lines += ["", f"# {group}"]
        for key in table.keys.values():
            if key.group == group:
                lines.append(_format_value(key, values, config.provenance[key.name]))
    return "\n".join(lines).strip()


def flatten_config(config: RecipeConfig) -> dict[str, Any]:
    """Return every effective key of a recipe, sections and upstream keys together, as in the YAML file."""
    keys = load_table(config.stage).keys
    flat = {name: value for name, value in _list_sections(config).items() if name in keys} | dict(config.training)
    return {name: flat[name] for name in sorted(flat)}


def _list_sections(config: RecipeConfig) -> dict[str, Any]:
    return {name: value for section in SECTIONS for name, value in dataclasses.asdict(getattr(config, section)).items()}


def _format_value(key: Key, values: dict[str, object], provenance: str) -> str:
    if provenance.startswith("derived") and key.name not in values:
        return f"# {key.name}: {provenance}"
    ours = " (ours)" if provenance == "default" and key.reason else ""
    # JSON is YAML, and unlike YAML it never reads a text as something else.
    line = f"{key.name}: {json.dumps(values.get(key.name, key.default), ensure_ascii=False)}"
    return f"{line:<60}  # {provenance}{ours}"


def _format_help_entry(key: Key, required: bool) -> list[str]:
    default = "required" if required else f"default {json.dumps(key.default, ensure_ascii=False)}"
    text = f"{key.help} ({describe(key.schema)}; {default})"
    return [f"  --{key.name}", *textwrap.wrap(text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)]

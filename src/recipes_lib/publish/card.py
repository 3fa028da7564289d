"""The model card: what the model is, what it scored, and every key it was made with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_CHAT = (
    'chat = pipeline("text-generation", model="path/to/this/folder")',
    'print(chat([{"role": "user", "content": "..."}])[0]["generated_text"][-1]["content"])',
)
_CONTINUE = (
    'write = pipeline("text-generation", model="path/to/this/folder")',
    'print(write("Once upon a time")[0]["generated_text"])',
)


def write_card(folder: Path, record: Mapping[str, Any], figures: Mapping[str, float]) -> None:
    """Write ``README.md``, the model card, from the record of the run and its last evaluation.

    Args:
        folder: Folder of the model.
        record: What ``run.json`` holds.
        figures: The last evaluation's figures by name.
    """
    config = record["config"]
    base = config["model_name_or_path"]
    start = f"a {config['model_config']['model_type']} model from random weights" if base is None else Path(base).name
    dataset = config["dataset_name"] or ", ".join(part["name"] for part in config["dataset_mixture"])
    # The Hub refuses a path as metadata.
    front = ["---", "library_name: transformers", "tags:", "- recipes-lib", f"- {record['stage']}"]
    front += [f"base_model: {base}"] if base and not Path(base).exists() else []
    front += [f"datasets:\n- {dataset}"] if config["dataset_name"] and not Path(dataset).exists() else []
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        *front,
        "---",
        "",
        f"# {Path(config['output_dir']).name}",
        "",
        f"{start[0].upper() + start[1:]} after {record['stage']} on {Path(dataset).name}, trained with recipes-lib.",
        "",
        "```python",
        "from transformers import pipeline",
        "",
        *(_CONTINUE if record["stage"] == "pretrain" else _CHAT),
        "```",
        "",
        "## Evaluation",
        "",
        *_table(("figure", "value"), ((name, _number(value)) for name, value in figures.items())),
        "",
        "## How it was made",
        "",
        *_table(("fact", "value"), (("git commit", record.get("git_commit")), ("versions", versions))),
        "",
        "```yaml",
        *(f"{name}: {json.dumps(_portable(value))}" for name, value in config.items() if value is not None),
        "```",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _portable(value: Any) -> Any:
    """Keep the last name of an absolute path: the rest only tells about the machine it was made on."""
    if isinstance(value, list):
        return [_portable(item) for item in value]
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _table(header: tuple[str, str], rows: Iterable[tuple[str, Any]]) -> list[str]:
    return [f"| {header[0]} | {header[1]} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) and value != int(value) else str(value)

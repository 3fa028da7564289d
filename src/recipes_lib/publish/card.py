"""The model card: what the model is, what it scored, and every key it was made with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
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
_IMPORTS = ("from transformers import pipeline",)
_ADAPTER_IMPORTS = (
    "from peft import PeftModel",
    "from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline",
)


def write_card(folder: Path, record: Mapping[str, Any], figures: Mapping[str, float]) -> None:
    """Write ``README.md``, the model card, from the record of the run and its last evaluation.

    Args:
        folder: Folder of the model.
        record: What ``run.json`` holds.
        figures: The last evaluation's figures by name.
    """
    config = record["config"]
    base, adapter = config["model_name_or_path"], _read_adapter(folder)
    start = f"a {config['model_config']['model_type']} model from random weights" if base is None else Path(base).name
    dataset = config["dataset_name"] or ", ".join(part["name"] for part in config["dataset_mixture"])
    front = _front("transformers" if adapter is None else "peft", record["stage"], base, is_adapter=adapter is not None)
    front += [f"datasets:\n- {dataset}"] if config["dataset_name"] and not Path(dataset).exists() else []
    facts = [("git commit", record.get("git_commit")), ("versions", _tell_versions(record))]
    if adapter is not None:
        facts = [("base", start), ("commit of the base", adapter["revision"]), *facts]
    what = f"{start[0].upper() + start[1:]}" if adapter is None else f"An adapter for {start},"
    lines = [
        *front,
        "---",
        "",
        f"# {Path(config['output_dir']).name}",
        "",
        f"{what} after {record['stage']} on {Path(dataset).name}, trained with recipes-lib.",
        "",
        "```python",
        *_tell_usage(record["stage"], start, adapter),
        "```",
        "",
        "## Evaluation",
        "",
        *_table(("figure", "value"), ((name, _number(value)) for name, value in figures.items())),
        "",
        "## How it was made",
        "",
        *_table(("fact", "value"), facts),
        "",
        "```yaml",
        *(f"{name}: {json.dumps(_portable(value))}" for name, value in config.items() if value is not None),
        "```",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def write_merge_card(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the card of a model that an adapter was merged into.

    Args:
        folder: Folder of the model.
        record: What ``merge.json`` holds.
    """
    base, adapter = Path(record["base"]).name, Path(record["adapter"]).name
    figures = {name: value for name, value in record.items() if isinstance(value, float)}
    facts = {name: value for name, value in record.items() if name not in {*figures, "versions"}}
    lines = [
        *_front("transformers", "merged", record["base"], is_adapter=False),
        "---",
        "",
        f"# {folder.name}",
        "",
        f"{base} with the adapter {adapter} merged into its weights by recipes-lib.",
        "",
        "```python",
        *_IMPORTS,
        "",
        *_CHAT,
        "```",
        "",
        "## How near it is to its adapter",
        "",
        *_table(("figure", "value"), ((name, f"{value:.3g}") for name, value in figures.items())),
        "",
        "## How it was made",
        "",
        *_table(("fact", "value"), ((name, _portable(value)) for name, value in facts.items())),
        f"| versions | {_tell_versions(record)} |",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _front(library: str, stage: str, base: str | None, *, is_adapter: bool) -> list[str]:
    """Metadata of the Hub, which refuses a path in it."""
    lines = ["---", f"library_name: {library}", "tags:", "- recipes-lib", f"- {stage}"]
    if base and not Path(base).exists():
        lines += [f"base_model: {base}", *(["base_model_relation: adapter"] if is_adapter else [])]
    return lines


def _read_adapter(folder: Path) -> dict[str, Any] | None:
    """PEFT's settings, where the folder holds an adapter."""
    path = folder / "adapter_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _tell_usage(stage: str, base: str, adapter: Mapping[str, Any] | None) -> Iterator[str]:
    if adapter is None:
        yield from (*_IMPORTS, "", *(_CONTINUE if stage == "pretrain" else _CHAT))
        return
    name = base if Path(str(adapter["base_model_name_or_path"])).exists() else adapter["base_model_name_or_path"]
    revision = f', revision="{adapter["revision"]}"' if adapter["revision"] else ""
    yield from (*_ADAPTER_IMPORTS, "", 'folder = "path/to/this/folder"')
    yield f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{name}"{revision}), folder)'
    yield "model.generation_config = GenerationConfig.from_pretrained(folder)"
    yield 'chat = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))'
    yield _CHAT[1]


def _tell_versions(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items())


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

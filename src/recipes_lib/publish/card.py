"""The model card: what the model is, what it scored, and every key it was made with."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from recipes_lib.errors import escape_controls
from recipes_lib.files import read_record
from recipes_lib.publish.card_facts import (
    describe_data,
    describe_effort,
    list_curve,
    list_limits,
    read_events,
    trace_lineage,
)

CHART: Final = "report/loss.png"
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
        folder: Folder of the model; its ``metrics.jsonl`` and ``report/`` are told of where they are there.
        record: What ``run.json`` holds.
        figures: The last evaluation's figures by name.
    """
    config, events = record["config"], read_events(folder)
    base, adapter = config.get("model_name_or_path"), _read_adapter(folder)
    kind = (config.get("model_config") or {}).get("model_type", "language")
    start = f"a {kind} model from random weights" if base is None else Path(base).name
    mixture = config.get("dataset_mixture") or ()
    dataset = config.get("dataset_name") or ", ".join(str(part.get("name")) for part in mixture)
    front = _front("transformers" if adapter is None else "peft", record["stage"], base, is_adapter=adapter is not None)
    front += (
        [f"datasets:\n- {json.dumps(dataset)}"] if config.get("dataset_name") and not Path(dataset).exists() else []
    )
    facts = [("git commit", record.get("git_commit")), ("versions", _tell_versions(record))]
    if adapter is not None:
        facts = [("base", start), ("commit of the base", adapter.get("revision")), *facts]
    what = f"{start[0].upper() + start[1:]}" if adapter is None else f"An adapter for {start},"
    lines = [
        *front,
        "---",
        "",
        f"# {_escape(Path(config.get('output_dir', folder)).name)}",
        "",
        _escape(f"{what} after {record['stage']} on {Path(dataset).name}, trained with recipes-lib."),
        "",
        "```python",
        *_tell_usage(record["stage"], start, adapter),
        "```",
        "",
        "## Evaluation",
        "",
        *_table(("figure", "value"), ((name, _number(value)) for name, value in figures.items())),
        "",
        *_draw(folder, events),
        "## Known limits",
        "",
        *(f"- {_escape(limit)}" for limit in list_limits(record, figures)),
        "",
        "## How it was made",
        "",
        *_table(("stage", "began with", "data"), trace_lineage(record)),
        "",
        *_table(("split", "size", "fingerprint"), describe_data(record)),
        "",
        *_table(("fact", "value"), [*describe_effort(record, events), *facts]),
        "",
        "`recipes reproduce` with the name of this repository restores the configuration and the versions.",
        "",
        "```yaml",
        *(f"{name}: {json.dumps(make_portable(value))}" for name, value in config.items() if value is not None),
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
        f"# {_escape(folder.name)}",
        "",
        _escape(f"{base} with the adapter {adapter} merged into its weights by recipes-lib."),
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
        *_table(("fact", "value"), [*make_portable(facts).items(), ("versions", _tell_versions(record))]),
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _front(library: str, stage: str, base: str | None, *, is_adapter: bool) -> list[str]:
    """Metadata of the Hub, which refuses a path in it."""
    lines = ["---", f"library_name: {library}", "tags:", "- recipes-lib", f"- {stage}"]
    if base and not Path(base).exists():
        lines += [f"base_model: {json.dumps(base)}", *(["base_model_relation: adapter"] if is_adapter else [])]
    return lines


def _read_adapter(folder: Path) -> dict[str, Any] | None:
    """PEFT's settings, where the folder holds an adapter."""
    path = folder / "adapter_config.json"
    return read_record(path, {"base_model_name_or_path": str | None}) if path.exists() else None


def _tell_usage(stage: str, base: str, adapter: Mapping[str, Any] | None) -> Iterator[str]:
    if adapter is None:
        yield from (*_IMPORTS, "", *(_CONTINUE if stage == "pretrain" else _CHAT))
        return
    name = base if Path(str(adapter["base_model_name_or_path"])).exists() else adapter["base_model_name_or_path"]
    revision = f", revision={json.dumps(adapter['revision'])}" if adapter.get("revision") else ""
    yield from (*_ADAPTER_IMPORTS, "", 'folder = "path/to/this/folder"')
    load = f"AutoModelForCausalLM.from_pretrained({json.dumps(name)}{revision})"
    yield f"model = PeftModel.from_pretrained({load}, folder)"
    yield "model.generation_config = GenerationConfig.from_pretrained(folder)"
    yield 'chat = pipeline("text-generation", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))'
    yield _CHAT[1]


def _tell_versions(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in (record.get("versions") or {}).items())


def make_portable(value: Any) -> Any:
    """Keep the last name of every absolute path in a record: the rest only tells about the machine it was made on."""
    if isinstance(value, list):
        return [make_portable(item) for item in value]
    if isinstance(value, dict):
        return {key: make_portable(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    flag, equals, path = value.rpartition("=")  # ``--output_dir=/a/b``
    return f"{flag}{equals}{Path(path).name}" if Path(path).is_absolute() else value


def _draw(folder: Path, events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The curve of the loss: as drawn for the report where that is there, and in numbers."""
    rows = list_curve(events)
    if not rows:
        return
    yield from ("## Training", "")
    if (folder / CHART).is_file():
        yield from (f"![loss]({CHART})", "")
    yield from (*_table(("step", "loss", "held-out loss"), rows), "")


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(_escape(cell) for cell in row)} |" for row in rows]
    return [f"| {' | '.join(header)} |", "|---" * len(header) + "|", *lines] if lines else []


def _escape(text: object) -> str:
    """One line of text in which nothing is markup: names and paths are the user's, and a card is a page of the Hub."""
    return re.sub(r"([\\`|\[\]<>])", r"\\\1", escape_controls(text))


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) and value != int(value) else str(value)

"""The model card: lineage, data, metrics, limits and every key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index
from jinja2 import Environment

from recipes_lib.config.paths import looks_local
from recipes_lib.config.settings import is_local
from recipes_lib.errors import DataError, escape_controls
from recipes_lib.files import read_lines, read_record, replace_record, replace_text
from recipes_lib.report.run_files import list_scores, read_run

Record = Mapping[str, Any]
Row = tuple[str, ...]

_MANIFEST: Final = "corpus.json"
_MAX_REASONS: Final = 5
CHART: Final = "report/loss.png"
MAX_CURVE_ROWS: Final = 10
_MAX_GENERATIONS: Final = 8
_COUNTS: Final = {"num_rows": "rows", "num_tokens": "tokens", "num_target_tokens": "of them trained on"}


def write_card(folder: Path, record: Mapping[str, Any], figures: Mapping[str, float]) -> None:
    """Write ``README.md``, the model card; arguments as of ``build_card``."""
    (folder / "README.md").write_text(build_card(folder, record, figures), encoding="utf-8")


def add_scores(folder: Path, evaluation: Record) -> None:
    """Add benchmark scores to the record and the card of a model that a recipe made; of any other do nothing.

    Args:
        folder: Of the model.
        evaluation: What ``eval.json`` holds.
    """
    if not (folder / "run.json").is_file():
        return
    run = read_run(folder)
    record = {**run.facts, "scores": {**(run.facts.get("scores") or {}), **_list_scored(evaluation)}}
    replace_record(folder / "run.json", record)
    replace_text(folder / "README.md", build_card(folder, record, run.find_figures()))


def _list_scored(evaluation: Record) -> dict[str, dict[str, Any]]:
    """Groups and tasks, and of each that belongs to a larger group its name."""
    groups = {name: set(found["tasks"]) for name, found in evaluation["groups"].items()}
    entries = {}
    for name, found in {**evaluation["groups"], **evaluation["tasks"]}.items():
        entry = {key: found.get(key) for key in ("scores", "num_questions", "num_fewshot", "version", "dataset")}
        # Proper supersets of a group, and every group of a task.
        larger = [group for group, members in groups.items() if members > groups.get(name, {name}) or name in members]
        group = max(larger, key=lambda name: len(groups[name]), default=None)
        entries[name] = entry | {"limit": evaluation["settings"]["limit"], "group": group}
    return entries


def build_card(folder: Path, record: Mapping[str, Any], figures: Mapping[str, float]) -> str:
    """Return the model card, from the record of the run and the evaluation of its result.

    Args:
        folder: Folder of the model; its ``metrics.jsonl`` and ``report/`` are told of where they are there.
        record: What ``run.json`` holds.
        figures: The evaluation's figures by name.
    """
    config, events = record["config"], read_events(folder)
    base, adapter = config.get("model_name_or_path"), _read_adapter(folder)
    kind = (config.get("model_config") or {}).get("model_type", "language")
    start = f"a {kind} model from random weights" if base is None else Path(base).name
    datasets = [str(part["name"]) for part in _list_parts(config)]
    facts = [("git commit", record.get("git_commit")), ("versions", _tell_versions(record))]
    what = start[0].upper() + start[1:]
    if adapter is not None:
        facts = [("base", start), ("commit of the base", adapter.get("revision")), *facts]
        what = f"An adapter for {start},"
        if _is_place(adapter["base_model_name_or_path"]):
            adapter["base_model_name_or_path"] = start
    told = ", ".join(Path(name).name for name in datasets)
    return _render(
        name=Path(config.get("output_dir", folder)).name,
        about=f"{what} after {record['stage']} on {told or 'unnamed data'}, trained with recipes-lib.",
        recipe=record["stage"],
        base=base,
        datasets=datasets,
        adapter=adapter,
        figures=[(name, _number(value)) for name, value in figures.items()],
        scores=[
            (one.task, one.metric, f"{one.value:.4f}", "" if one.stderr is None else f"{one.stderr:.4f}", one.about)
            for one in list_scores(record)
        ],
        model_index=format_model_index(Path(config.get("output_dir", folder)).name, record),
        curve=list_curve(events),
        chart=CHART,
        has_chart=(folder / CHART).is_file(),
        limits=list_limits(record, figures),
        lineage=trace_lineage(record),
        data=list(describe_data(record)),
        corpus=list(describe_corpus(config)),
        facts=[*describe_effort(record, events), *facts],
        config={name: make_portable(value) for name, value in config.items() if value is not None},
    )


def write_merge_card(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the card of a model that an adapter was merged into.

    Args:
        folder: Folder of the model.
        record: What ``merge.json`` holds.
    """
    base, adapter = Path(record["base"]).name, Path(record["adapter"]).name
    figures = {name: value for name, value in record.items() if isinstance(value, float)}
    facts = {name: value for name, value in record.items() if name not in {*figures, "versions"}}
    text = _render(
        name=folder.name,
        about=f"{base} with the adapter {adapter} merged into its weights by recipes-lib.",
        recipe="merged",
        base=record["base"],
        figures=[(name, f"{value:.3g}") for name, value in figures.items()],
        facts=[*make_portable(facts).items(), ("versions", _tell_versions(record))],
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _render(*, base: str | None, datasets: Sequence[str] = (), **values: Any) -> str:
    # Markdown, not HTML: what comes from the user passes through ``plain`` instead.
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"json": json.dumps, "plain": _escape}
    # The Hub refuses a path in the metadata.
    on_hub = {
        "base": None if _is_place(base) else base,
        "datasets": [name for name in dict.fromkeys(datasets) if not _is_place(name)],
    }
    template = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(values | on_hub)


def format_model_index(name: str, record: Record) -> str:
    """Return the YAML by which the Hub shows benchmark scores beside a model; nothing where there are none.

    Scores of the first questions alone are left out: the Hub would show them as those of the benchmark.
    """
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=score.dataset,
            dataset_name=score.task,
            dataset_config=score.task,  # Tasks of one dataset would be one result under the first one's name.
            metric_type=score.metric.partition(",")[0],
            metric_name=score.metric,
            metric_value=score.value,
            metric_args=None if score.stderr is None else {"stderr": score.stderr},
        )
        for score in list_scores(record)
        if score.is_whole
    ]
    if not results:
        return ""
    return yaml.safe_dump({"model-index": eval_results_to_model_index(name, results)}, sort_keys=False).strip()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` by step; nothing where there is none, and no line that is cut off."""
    events = [event for event in read_lines(folder / "metrics.jsonl") if event and isinstance(event.get("step"), int)]
    return sorted(events, key=lambda event: int(event["step"]))


def trace_lineage(record: Record) -> list[Row]:
    """Return the recipes that led to a model, the first one first, as far as their records are on this machine."""
    rows: list[Row] = []
    # The limit also ends a lineage that leads to itself, as where a run was repeated over its own start.
    while len(rows) < _MAX_GENERATIONS:
        config = record["config"]
        start, commit = config.get("model_name_or_path"), record.get("model_commit") or config.get("model_revision")
        told = "random weights" if start is None else _name_place(str(start))
        rows.append((record["stage"], f"{told} at {commit}" if commit else told, name_data(config)))
        try:
            record = read_record(Path(str(start)) / "run.json", {"stage": str, "config": dict})
        except DataError:
            break  # The first of them, or none that a recipe left.
    return rows[::-1]


def name_data(config: Record) -> str:
    """Return the datasets of a run with their revisions, and their weights in a mixture; of files the last name."""
    return ", ".join(map(_name_part, _list_parts(config)))


def _list_parts(config: Record) -> list[Record]:
    """Return the entries of the mixture, or the only dataset as one; nothing of those without a name."""
    alone = {"name": config.get("dataset_name"), "revision": config.get("dataset_revision")}
    return [part for part in config.get("dataset_mixture") or [alone] if part.get("name")]


def describe_data(record: Record) -> Iterator[Row]:
    """Yield how much there was of each split, and the fingerprint of its sources."""
    data: Record = record.get("data") or {}
    sources = data.get("inputs", {}).get("sources", {}) if isinstance(data.get("inputs"), Mapping) else {}
    for split, counts in data.items():
        if isinstance(counts, Mapping) and counts.keys() & _COUNTS.keys():
            told = [f"{counts[name]:,} {word}" for name, word in _COUNTS.items() if isinstance(counts.get(name), int)]
            yield split, ", ".join(told), str(sources.get(split, ""))[:16]


def describe_corpus(config: Record) -> Iterator[Row]:
    """Yield how the corpora of a run were made, as far as their manifests are on this machine."""
    # An entry of a mixture is the folder of a source: `corpus/data/web`.
    places = [Path(str(part["name"])) for part in _list_parts(config)]
    folders = [folder for place in places for folder in (place, place.parent.parent) if (folder / _MANIFEST).is_file()]
    for folder in dict.fromkeys(folders):
        try:
            manifest = read_record(folder / _MANIFEST, {"documents": int, "steps": dict, "sources": list})
            yield from _describe_manifest(folder.name, manifest)
        except (DataError, KeyError, TypeError, AttributeError):
            yield folder.name, "its manifest cannot be read"


def _describe_manifest(name: str, manifest: Record) -> Iterator[Row]:
    read = next(iter(manifest["steps"].values()))["documents_in"]
    yield name, f"{manifest['documents']:,} of {read:,} documents"
    for source in manifest["sources"]:
        place = _name_place(str(source["name"]))
        told = f"{place}, {source['documents']:,} documents, licence {source['license'] or 'not stated'}"
        yield f"source {source['label']}", told
    for step, tally in manifest["steps"].items():
        if tally["removed"]:
            reasons = sorted(tally["removed"].items(), key=lambda item: -item[1])[:_MAX_REASONS]
            told = ", ".join(f"{reason} {count:,}" for reason, count in reasons)
            yield f"removed by {step}", f"{sum(tally['removed'].values()):,}: {told}"
    if masked := manifest["steps"].get("pii", {}).get("found"):
        yield "personal data found", ", ".join(f"{kind} {count:,}" for kind, count in masked.items())
    if benchmarks := (manifest.get("config") or {}).get("benchmarks"):
        yield "decontaminated against", ", ".join(Path(str(benchmark["name"])).name for benchmark in benchmarks)


def describe_effort(record: Record, events: Sequence[Record]) -> Iterator[Row]:
    """Yield the step of the best weights, device, time, cost, tokens, FLOPs, and an upper bound of energy."""
    last = next((event for event in reversed(events) if event.get("kind") == "train"), {})
    best = next((event for event in reversed(events) if event.get("kind") == "best"), None)
    if best is not None:
        yield "weights", f"of step {best.get('best_step')} of {best['step']}, the best by {best.get('metric')}"
    hardware, num_devices = record.get("hardware", {}), record.get("num_processes", 1)
    if hardware.get("device"):
        yield "device", f"{num_devices} x {hardware['device']}"
    hours = last.get("seconds", 0) / 3600
    if hours:
        yield "training time", f"{hours:.2f} h, {hours * num_devices:.2f} device hours"
    price = record["config"].get("device_hour_price")
    if hours and price:
        yield "cost", f"{hours * num_devices * price:,.2f}, at {price:g} for a device hour"
    for name, word in (("num_tokens", "tokens"), ("num_target_tokens", "tokens trained on")):
        if last.get(name):
            yield word, f"{last[name]:,}"
    if last.get("num_flops"):
        yield "operations", f"{last['num_flops']:.3g} FLOP"
    if last.get("memory_bytes"):
        yield "peak memory", f"{last['memory_bytes'] / 1e9:.1f} GB on the main process"
    # With torch, without which `recipes publish --help` answers.
    from recipes_lib.planning.devices import find_device

    device = find_device(str(hardware.get("device", "")))
    if hours and device and device.watts:
        energy = hours * num_devices * device.watts / 1000
        yield "energy", f"at most {energy:.2f} kWh: {device.watts} W a board, without the machine around it"


def list_curve(events: Sequence[Record]) -> list[Row]:
    """Return step, loss and held-out loss at up to ``MAX_CURVE_ROWS`` steps, the first and the last among them."""
    steps: dict[int, dict[str, Any]] = {}
    for event in events:
        # A step has an event of training and one of evaluation.
        steps.setdefault(event["step"], {}).update({key: event[key] for key in ("loss", "eval_loss") if key in event})
    known = [(step, figures) for step, figures in steps.items() if figures]
    places = min(MAX_CURVE_ROWS, len(known))
    chosen = sorted({round(place * (len(known) - 1) / max(places - 1, 1)) for place in range(places)})
    return [
        (str(step), *(_show(figures.get(name)) for name in ("loss", "eval_loss")))
        for step, figures in (known[at] for at in chosen)
    ]


def list_limits(record: Record, figures: Record) -> Iterator[str]:
    """Yield limitations of the metrics, and incidents of the run."""
    if record["stage"] == "pretrain":
        yield "It continues text. Nobody has taught it to answer, to refuse, or to stop where an answer ends."
    yield "Nothing was measured here of its bias, its safety, or the truth of what it says."
    if not figures:
        yield "Nothing was held out: no figure says how it does on what it has not seen."
    for finding in (record.get("data") or {}).get("findings", ()):
        if finding.get("severity") != "ok":
            yield f"Data: {finding['found']}."
    if record.get("rollbacks"):
        yield f"Loss spikes were rolled back {len(record['rollbacks'])} times, skipping their rows."
    for gate in record.get("failed_gates") or ():
        yield f"A gate of its report failed: {gate}."
    config = record["config"]
    name = config.get("dataset_name")
    if name and not config.get("dataset_revision") and not _is_place(name):
        yield f"No revision of {name} was named: its rows may be others now."
    if (record.get("git_commit") or "-dirty").endswith("-dirty"):
        yield "The code that made it is no commit."


def _is_place(name: str | None) -> bool:
    """Return whether a name is a path, on this machine or on that of the run; a Hub id is none."""
    # A card is also written elsewhere, or after the files are gone; only a bare relative path passes for a Hub id then.
    return name is not None and (is_local(name) or looks_local(name))


def _name_place(name: str) -> str:
    """Of a file or folder the last name."""
    return Path(name).name if _is_place(name) else name


def _name_part(part: Record) -> str:
    name, revision = str(part["name"]), part.get("revision")
    amounts = [f" ({key} {part[key]:g})" for key in ("weight", "repeat") if part.get(key) is not None]
    return _name_place(name) + (f" at {revision}" if revision else "") + "".join(amounts)


def _show(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


def _read_adapter(folder: Path) -> dict[str, Any] | None:
    """PEFT's settings, where the folder holds an adapter."""
    path = folder / "adapter_config.json"
    return read_record(path, {"base_model_name_or_path": str | None}) if path.exists() else None


def _tell_versions(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in (record.get("versions") or {}).items())


def make_portable(value: Any) -> Any:
    """Shorten absolute paths in a record to their last part: the rest is specific to the machine."""
    if isinstance(value, list):
        return [make_portable(item) for item in value]
    if isinstance(value, dict):
        return {key: make_portable(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    flag, equals, path = value.rpartition("=")  # ``--output_dir=/a/b``
    return f"{flag}{equals}{Path(path).name}" if Path(path).is_absolute() else value


def _escape(text: object) -> str:
    """One line of text in which nothing is markup: names and paths are the user's, and a card is a page of the Hub."""
    return re.sub(r"([\\`|\[\]<>])", r"\\\1", escape_controls(text))


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) and value != int(value) else str(value)

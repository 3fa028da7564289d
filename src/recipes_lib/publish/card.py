"""Model card: lineage, data, metrics, limitations, and the complete configuration."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, Template

from recipes_lib.config.paths import is_local, looks_local
from recipes_lib.errors import DataError, Problem, escape_controls
from recipes_lib.files import read_lines, read_record, replace_record, replace_text
from recipes_lib.quantities import pluralize
from recipes_lib.report.run_files import Record, Score, list_scores, read_run

Row = tuple[str, ...]

ADAPTER_CONFIG: Final = "adapter_config.json"
_MANIFEST: Final = "corpus.json"
_CHAT_TEMPLATE: Final = "chat_template.jinja"
_MAX_REASONS: Final = 5
CHART: Final = "report/loss.png"
MAX_CURVE_ROWS: Final = 10
LOSSES: Final = {"loss": "loss", "eval_loss": "held-out loss"}
REWARDS: Final = {"objective/score": "reward", "eval_reward": "reward of samples"}
DISTILLED: Final = {"distillation/nll": "loss on labels", "eval_loss": "held-out loss"}
"""Metrics of a card's curve, with their headings: the surrogate loss of RL is about 0 whatever the policy learns, and
that of distillation mixes divergence and cross-entropy."""
_MAX_GENERATIONS: Final = 8
_COUNTS: Final = {
    "num_rows": "rows",
    "num_pairs": "pairs",
    "num_prompts": "prompts",
    "num_documents": "documents",
    "num_tokens": "tokens",
    "num_target_tokens": "of them trained on",
}

_QUOTED_PATH: Final = re.compile(r"""(?P<quote>["'])(?P<path>/[^"']+)""")
"""Absolute path in the arguments of a function, such as ``module:factory(prompt='/a/b.yaml')``."""


def write_card(folder: Path, record: Mapping[str, Any], figures: Mapping[str, float]) -> None:
    """Write the model card ``README.md``; arguments as for ``build_card``."""
    # Atomically: ``finish_run`` takes any card that is not empty for a complete one.
    replace_text(folder / "README.md", build_card(folder, record, figures))


def add_scores(folder: Path, evaluation: Record) -> None:
    """Add benchmark scores to ``run.json``, report and card of a recipe's model; do nothing for other models.

    Args:
        folder: Folder of the model.
        evaluation: Content of ``eval.json``.

    Raises:
        DataError: The record is invalid (``build_card``); nothing is written.
    """
    if not (folder / "run.json").is_file():
        return
    run = read_run(folder)
    before = run.facts.get("scores")
    scores = {**(before if isinstance(before, dict) else {}), **_list_scored(evaluation)}
    record = {**run.facts, "scores": scores}
    card = build_card(folder, record, run.find_figures())
    replace_record(folder / "run.json", record)
    replace_text(folder / "README.md", card)
    # Imported here, because it imports matplotlib, which `recipes publish --help` does not need.
    from recipes_lib.report.page import build_report

    build_report(folder)


def _list_scored(evaluation: Record) -> dict[str, dict[str, Any]]:
    """Return the record of each group and task, with the name of the largest group that contains it."""
    groups = {name: set(found["tasks"]) for name, found in evaluation["groups"].items()}
    entries = {}
    for name, found in {**evaluation["groups"], **evaluation["tasks"]}.items():
        entry = {key: found.get(key) for key in ("scores", "num_questions", "num_fewshot", "version", "dataset")}
        # For a group: the proper supersets of its tasks. For a task: all groups that contain it.
        larger = [group for group, members in groups.items() if members > groups.get(name, {name}) or name in members]
        group = max(larger, key=lambda name: len(groups[name]), default=None)
        entries[name] = entry | {"limit": evaluation["settings"]["limit"], "group": group}
    return entries


def build_card(folder: Path, record: Mapping[str, Any], figures: Mapping[str, float]) -> str:
    """Return the Markdown text of the model card.

    Args:
        folder: Folder of the model, with ``metrics.jsonl`` and ``report/`` if available.
        record: Content of ``run.json``.
        figures: Metrics of the last evaluation by name.

    Raises:
        DataError: A value in the record or in ``metrics.jsonl`` has another type than a recipe writes.
    """
    try:
        return _build_card(folder, record, figures)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The record of an untrusted model may hold anything.
        found = f"no card can be built from its run.json and metrics.jsonl: {type(error).__name__}: {error}"
        raise DataError(Problem(str(folder), found, "restore both as the run wrote them")) from error


def _build_card(folder: Path, record: Mapping[str, Any], figures: Mapping[str, float]) -> str:
    config, events = record["config"], read_events(folder)
    base, adapter = config.get("model_name_or_path"), read_portable_adapter(folder, record)
    kind = (config.get("model_config") or {}).get("model_type", "language")
    start = f"A {kind} model from random weights" if base is None else _find_name(base)
    name = _find_name(config.get("output_dir", folder))
    datasets = [str(part["name"]) for part in _list_parts(config)]
    facts = [("git commit", record.get("git_commit")), ("versions", _format_versions(record))]
    if teacher := config.get("teacher_model_name_or_path"):
        revision = config.get("teacher_model_revision")
        facts = [("teacher", _shorten(teacher)), ("commit of the teacher", revision), *facts]
    subject = start
    if adapter is not None:
        facts = [("base", start), ("commit of the base", adapter.get("revision")), *facts]
        subject = f"An adapter for {start},"
    data_names = ", ".join(Path(name).name for name in datasets)
    logged = {name for event in events for name in event}
    columns = next((one for one in (REWARDS, DISTILLED) if next(iter(one)) in logged), LOSSES)
    return _render(
        name=name,
        about=f"{subject} after {record['stage']} on {data_names or 'unnamed data'}, trained with recipes-lib.",
        recipe=record["stage"],
        is_chat=record["stage"] != "pretrain" and (folder / _CHAT_TEMPLATE).is_file(),
        system_prompt=config.get("system_prompt"),
        # The record of a run that has ended has the commit of a Hub model; a folder has none, whatever its path.
        base=base if record.get("model_commit", base) else None,
        datasets=datasets,
        adapter=adapter,
        figures=[(name, _show(value)) for name, value in figures.items()],
        scores=list(list_scores(record)),
        curve=list_curve(events, columns),
        columns=["step", *columns.values()],
        chart=CHART,
        has_chart=columns is not REWARDS and (folder / CHART).is_file(),
        limits=list_limits(record, figures),
        lineage=trace_lineage(record),
        data=list(describe_data(record)),
        corpus=list(describe_corpus(config)),
        facts=[*describe_effort(record, events), *((name, value) for name, value in facts if value is not None)],
        config=make_portable({name: value for name, value in config.items() if value is not None}),
    )


def _find_name(path: str | Path) -> str:
    """Return the last part of a path, also for ``.``, which has none."""
    return Path(path).name or Path(path).resolve().name


def write_merge_card(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """Write the card of a merged model.

    Args:
        folder: Folder of the model.
        name: Name of the model.
        record: Content of ``merge.json``.
    """
    base, adapter = _find_name(record["base"]), _find_name(record["adapter"])
    figures = {name: value for name, value in record.items() if isinstance(value, float)}
    known = {name: value for name, value in record.items() if value is not None}
    facts = {name: value for name, value in known.items() if name not in {*figures, "versions"}}
    text = _render(
        name=name,
        about=f"{base} with the adapter {adapter} merged into its weights by recipes-lib.",
        recipe="merged",
        is_chat=(folder / _CHAT_TEMPLATE).is_file(),
        base=record["base"],
        figures=[(name, f"{value:.3g}") for name, value in figures.items()],
        facts=[*make_portable(facts).items(), ("versions", _format_versions(record))],
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _render(*, scores: Sequence[Score] = (), **values: Any) -> str:
    rows = [
        (one.task, one.metric, f"{one.value:.4f}", "" if one.stderr is None else f"{one.stderr:.4f}", one.about)
        for one in scores
    ]
    return _load_template().render(values, scores=rows, metadata=_format_metadata(values, scores))


@functools.cache
def _load_template() -> Template:
    # No autoescape, which is for HTML: untrusted text passes through the filters ``plain`` or ``json``.
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"json": json.dumps, "plain": _escape}
    return environment.from_string(Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8"))


def _format_metadata(values: Record, scores: Sequence[Score]) -> str:
    """Return the metadata of a card as YAML, with the ``model-index`` from which the Hub shows benchmark scores.

    Scores on a subset of the questions are omitted, because the Hub would show them as those of the whole benchmark.
    """
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=score.dataset,
            dataset_name=score.task,
            dataset_config=score.task,  # Without it, tasks of one dataset are merged under the first one's name.
            metric_type=score.metric.partition(",")[0],
            metric_name=score.metric,
            metric_value=score.value,
            metric_args=None if score.stderr is None else {"stderr": score.stderr},
        )
        for score in scores
        if score.is_whole
    ]
    # The Hub rejects metadata with paths instead of repository ids.
    base = None if _is_path(values["base"]) else values["base"]
    datasets = [name for name in dict.fromkeys(values.get("datasets", ())) if not _is_path(name)]
    metadata = ModelCardData(
        # The Hub guesses it from `config.json`, which an adapter does not have.
        pipeline_tag=None if values["recipe"] == "reward" else "text-generation",
        library_name="peft" if values.get("adapter") else "transformers",
        tags=["recipes-lib", values["recipe"]],
        base_model=base,
        base_model_relation="adapter" if base and values.get("adapter") else None,
        datasets=datasets or None,
        model_name=values["name"] if results else None,
        eval_results=results or None,
    )
    return str(metadata.to_yaml())


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of ``metrics.jsonl`` by step, without truncated lines; empty without the file."""
    known = (event for event in read_lines(folder / "metrics.jsonl") if event and isinstance(event.get("step"), int))
    # Interned: otherwise each of a million events has its own names.
    events = [{sys.intern(name): value for name, value in event.items()} for event in known]
    return sorted(events, key=lambda event: int(event["step"]))


def trace_lineage(record: Record) -> list[Row]:
    """Return recipe, start and data of each training stage of a model, the first stage first.

    Earlier stages are found through ``run.json`` of the start model, as far as it is on this machine.
    """
    rows: list[Row] = []
    # Ended by random weights, a model that no recipe has trained, or an invalid record, for records are untrusted; the
    # limit ends a cycle, as of a run that was repeated over its own start model.
    with suppress(DataError, AttributeError, LookupError, TypeError, ValueError):
        while len(rows) < _MAX_GENERATIONS:
            config = record["config"]
            start, commit = config.get("model_name_or_path"), record.get("model_commit") or config.get("model_revision")
            name = "random weights" if start is None else _shorten(str(start))
            data = ", ".join(map(_name_part, _list_parts(config)))
            rows.append((record["stage"], f"{name} at {commit}" if commit else name, data))
            record = read_record(Path(str(start)) / "run.json", {"stage": str, "config": dict})
    return rows[::-1]


def _list_parts(config: Record) -> list[Record]:
    """Return the named entries of ``dataset_mixture``, or ``dataset_name`` as the only entry."""
    single = {"name": config.get("dataset_name"), "revision": config.get("dataset_revision")}
    return [part for part in config.get("dataset_mixture") or [single] if part.get("name")]


def describe_data(record: Record) -> Iterator[Row]:
    """Yield name, size and fingerprint of the source of each split."""
    data: Record = record.get("data") or {}
    sources = data.get("inputs", {}).get("sources", {}) if isinstance(data.get("inputs"), Mapping) else {}
    splits = [("train", data.get("train"), sources.get("train")), ("eval", data.get("eval"), sources.get("test"))]
    if "num_prompts" in data:  # PPO, RLOO and GRPO record their counts without splits.
        held_out = {"num_prompts": data.get("num_eval_prompts")}
        splits = [("train", data, data.get("fingerprint")), ("eval", held_out, None)]
    if isinstance(data.get("sources"), list):  # Pretraining records the counts of each source.
        held_out_sets = [part for part in (data.get("held_out"), *(data.get("eval_datasets") or {}).values()) if part]
        sides = [(side, side, part) for side in ("train", "eval") for part in data["sources"]]
        sides += [("eval", "train", part) for part in held_out_sets]
        named = ((f"{split} {_shorten(part['name'])}", side, part) for split, side, part in sides)
        splits = [(name, part.get(side), part.get("fingerprint")) for name, side, part in named]
    for split, counts, fingerprint in splits:
        found = counts if isinstance(counts, Mapping) else {}
        known = {word: found[name] for name, word in _COUNTS.items() if isinstance(found.get(name), int)}
        if any(known.values()):
            yield split, ", ".join(f"{count:,} {word}" for word, count in known.items()), str(fingerprint or "")[:16]


def describe_corpus(config: Record) -> Iterator[Row]:
    """Yield facts from the manifests of a run's corpora, as far as they are on this machine."""
    # The manifest is in the dataset's folder, or above a source's folder such as `corpus/data/web`.
    paths = [Path(str(part["name"])) for part in _list_parts(config)]
    folders = [folder for path in paths for folder in (path, path.parent.parent) if (folder / _MANIFEST).is_file()]
    for folder in dict.fromkeys(folders):
        try:
            manifest = read_record(folder / _MANIFEST, {"documents": int, "steps": dict, "sources": list})
            yield from _describe_manifest(folder.name, manifest)
        except (DataError, KeyError, TypeError, AttributeError):
            yield folder.name, "its manifest cannot be read"


def _describe_manifest(name: str, manifest: Record) -> Iterator[Row]:
    read = next(iter(manifest["steps"].values()), dict[str, int]())["documents_in"]
    yield name, f"{manifest['documents']:,} of {read:,} documents"
    for source in manifest["sources"]:
        size, licence = f"{source['documents']:,} documents", f"licence {source['license'] or 'not stated'}"
        yield f"source {source['label']}", f"{_shorten(str(source['name']))}, {size}, {licence}"
    for step, tally in manifest["steps"].items():
        if tally["removed"]:
            reasons = sorted(tally["removed"].items(), key=lambda item: -item[1])[:_MAX_REASONS]
            listed = ", ".join(f"{reason} {count:,}" for reason, count in reasons)
            yield f"removed by {step}", f"{sum(tally['removed'].values()):,}: {listed}"
    if masked := manifest["steps"].get("pii", {}).get("found"):
        yield "personal data found", ", ".join(f"{kind} {count:,}" for kind, count in masked.items())
    if benchmarks := (manifest.get("config") or {}).get("benchmarks"):
        yield "decontaminated against", ", ".join(Path(str(benchmark["name"])).name for benchmark in benchmarks)


def describe_effort(record: Record, events: Sequence[Record]) -> Iterator[Row]:
    """Yield the step of the weights, device, training time, cost, tokens, FLOPs, and energy or its upper bound."""
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
    yield from _describe_energy(last, str(hardware.get("device", "")), num_devices)


def _describe_energy(last: Record, name: str, num_devices: int) -> Iterator[Row]:
    """Yield the energy of a run as measured, or else its upper bound by the rated power of a known device."""
    # Imported here, because it imports torch, which `recipes publish --help` does not need.
    from recipes_lib.planning.devices import find_device

    device, seconds = find_device(name), last.get("seconds", 0)
    if joules := last.get("energy_joules"):
        kwh = joules * num_devices / 3.6e6
        yield "energy", f"{kwh:.2f} kWh, measured on the main process's device, without the machine around it"
    elif seconds and device and device.watts:
        kwh = seconds * num_devices * device.watts / 3.6e6
        yield "energy", f"at most {kwh:.2f} kWh: {device.watts} W a board, without the machine around it"


def list_curve(events: Sequence[Record], names: Collection[str]) -> list[Row]:
    """Return step and metrics of up to ``MAX_CURVE_ROWS`` evenly spaced steps, including first and last."""
    steps: dict[int, dict[str, Any]] = {}
    for event in events:
        # A step may have a training and an evaluation event.
        steps.setdefault(event["step"], {}).update({name: event[name] for name in names if name in event})
    known = [(step, figures) for step, figures in steps.items() if figures]
    num_rows = min(MAX_CURVE_ROWS, len(known))
    chosen = sorted({round(row * (len(known) - 1) / max(num_rows - 1, 1)) for row in range(num_rows)})
    return [
        (str(step), *(_show(figures.get(name)) for name in names)) for step, figures in (known[at] for at in chosen)
    ]


def list_limits(record: Record, figures: Record) -> Iterator[str]:
    """Yield limitations of model and metrics, and incidents of the run, one sentence each."""
    if record["stage"] == "pretrain":
        yield "It continues text. It was not trained to answer, to refuse, or to stop at the end of an answer."
    but = ", but for the benchmarks above" if any(list_scores(record)) else ""
    yield f"Its bias, its safety and the truth of its answers were not measured{but}."
    start = "" if record["config"].get("model_name_or_path") is None else "the model it began with and of "
    yield f"This card states no licence: those of {start}its data apply."
    # RL without held-out prompts measures the rewards of samples on those of the training.
    if not figures or (record.get("data") or {}).get("num_eval_prompts") == 0:
        yield "It was not evaluated on held-out data."
    yield from _limit_tasks(record["config"])
    for finding in (record.get("data") or {}).get("findings", ()):
        if finding.get("severity") != "ok":
            yield f"Data: {finding['found']}."
    if record.get("rollbacks"):
        yield f"Loss spikes were rolled back {pluralize(len(record['rollbacks']), 'time')}, skipping their rows."
    for gate in record.get("failed_gates") or ():
        yield f"A gate of its report failed: {gate}."
    for part in _list_parts(record["config"]):
        if not part.get("revision") and not _is_path(part["name"]):
            yield f"The revision of {part['name']} was not pinned: its rows may have changed since."
    if (record.get("git_commit") or "-dirty").endswith("-dirty"):
        yield "The code that trained it is not a recorded git commit."


def _limit_tasks(config: Record) -> Iterator[str]:
    if tasks := ", ".join(config.get("eval_tasks") or ()):
        asked = f"the first {config.get('eval_tasks_limit')} questions of each task, without chat template"
        yield f"The figures of {tasks} were measured in training, on {asked}."


def _is_path(name: str | None) -> bool:
    """Return whether a name is a path on this machine or on that of the run, and not a Hub id."""
    # ``looks_local``: the card may be written on another machine, or after the files were deleted. A relative path of
    # one folder in another is then taken for a Hub id, and one of more folders cannot be.
    return name is not None and (is_local(name) or looks_local(name) or name.count("/") > 1)


def _shorten(name: str) -> str:
    """Return the last component of a path; a Hub id unchanged."""
    return Path(name).name if _is_path(name) else name


def _name_part(part: Record) -> str:
    """Return the name of a dataset with revision and mixture weight; of a path, its last component."""
    name, revision = str(part["name"]), part.get("revision")
    amounts = [f" ({key} {part[key]:g})" for key in ("weight", "repeat") if part.get(key) is not None]
    return _shorten(name) + (f" at {revision}" if revision else "") + "".join(amounts)


def _show(value: Any) -> str:
    is_decimal = isinstance(value, float) and math.isfinite(value) and value != int(value)
    # Four decimals would show a small divergence as 0.
    decimals = ".4f" if is_decimal and abs(value) >= 0.001 else ".3g"
    return f"{value:{decimals}}" if is_decimal else "" if value is None else str(value)


def read_portable_adapter(folder: Path, record: Record) -> dict[str, Any] | None:
    """Return the content of ``adapter_config.json``, with the base's name instead of its path.

    Args:
        folder: Folder of the adapter; the result is ``None`` if it has none.
        record: Content of ``run.json``; empty if there is none.
    """
    path = folder / ADAPTER_CONFIG
    settings = read_record(path, {"base_model_name_or_path": str | None}) if path.exists() else None
    base = settings and settings["base_model_name_or_path"]
    # On another machine, a relative path such as `runs/sft` would be somebody else's repository.
    if settings and base and (_is_path(base) or not record.get("model_commit", base)):
        settings["base_model_name_or_path"] = _find_name(base)
    return settings


def _format_versions(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in (record.get("versions") or {}).items())


def make_portable(value: Any) -> Any:
    """Return a JSON value in which absolute paths, which expose the machine, are replaced by their last component."""
    if isinstance(value, list):
        return [make_portable(item) for item in value]
    if isinstance(value, dict):
        # A prompt may begin like a path: `/no_think ...`.
        prompts = ("sample_prompts", "system_prompt")
        return {key: item if key in prompts else make_portable(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    value = _QUOTED_PATH.sub(lambda found: found["quote"] + Path(found["path"]).name, value)
    flag, equals, path = value.rpartition("=")  # ``--output_dir=/a/b``
    return f"{flag}{equals}{Path(path).name}" if Path(path).is_absolute() else value


def _escape(text: object) -> str:
    """Return text as one line without Markdown or HTML markup; names and paths may be untrusted."""
    return re.sub(r"([\\`|\[\]<>])", r"\\\1", escape_controls(text))

"""Runs a pipeline: what is done stays done, what has changed is done again with all that depends on it."""

from __future__ import annotations

import hashlib
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from recipes_lib.errors import EXIT_DIVERGED, EXIT_DONE, ConfigError, DataError, Problem
from recipes_lib.files import read_lines, read_record, replace_record
from recipes_lib.pipelines.pipeline import Pipeline, Stage, holds

STATE: Final = "pipeline.json"


def run_pipeline(
    pipeline: Pipeline, chosen: Sequence[Stage], say: Callable[[str], object], *, cwd: Path | None = None
) -> int:
    """Run stages in order and return the exit code of the first one that fails, or ``EXIT_DIVERGED`` of a gate.

    A stage that was done by the same command, configuration and inputs is left out. One that was done otherwise is done
    again, its output moved aside; one that was stopped is started again, and resumes by itself.

    Args:
        pipeline: All stages.
        chosen: Those to run.
        say: Tells what happens.
        cwd: Working directory of the stages, and where the pipeline's paths begin.

    Raises:
        ConfigError: A stage that is needed is neither chosen nor done, or an output in the way cannot be moved aside.
    """
    root = cwd or Path()
    state_path = root / pipeline.output_dir / STATE
    state_path.parent.mkdir(parents=True, exist_ok=True)
    done = _read_state(state_path)
    prints = fingerprint(pipeline, root)
    names = {stage.name for stage in chosen}
    for number, stage in enumerate(chosen, 1):
        missing = [
            need for need in stage.needs if need not in names and not _is_done(need, pipeline, done, prints, root)
        ]
        if missing:
            remedy = f"run it too: --from {missing[0]}, or without --only"
            raise ConfigError(Problem(stage.name, f"needs {missing[0]}, which is not done", remedy))
        if _is_done(stage.name, pipeline, done, prints, root):
            say(f"{number} of {len(chosen)}, {stage.name}: done before")
        else:
            say(f"{number} of {len(chosen)}, {stage.name}: {stage.about or shlex.join(stage.words)}")
            _move_aside(stage, done.get(stage.name), prints[stage.name], root, say)
            entry: dict[str, Any] = {
                "fingerprint": prints[stage.name],
                "status": "running",
                "output": str(stage.output),
            }
            done[stage.name] = entry
            replace_record(state_path, {"stages": done})
            began = time.time()
            code = run_child(stage.words, pipeline.environment, root)
            seconds = round(entry.get("seconds", 0) + time.time() - began, 1)
            entry |= {"status": "failed" if code else "done", "code": code, "seconds": seconds}
            replace_record(state_path, {"stages": done})
            if code != EXIT_DONE:
                say(f"{stage.name} ended with exit code {code}; the same command resumes here")
                return code
        if broken := list(find_broken_gates(stage, root)):
            for gate in broken:
                say(f"{stage.name}: {gate}")
            return EXIT_DIVERGED
    return EXIT_DONE


def fingerprint(pipeline: Pipeline, root: Path) -> dict[str, str]:
    """Return of each stage a hash of its command, of the files that the user wrote for it, and of what it needs."""
    prints: dict[str, str] = {}
    for stage in pipeline.stages:
        texts = [
            (str(file), (root / file).read_text("utf-8") if (root / file).is_file() else "") for file in stage.files
        ]
        # Another Python, or the recipes in another folder, is no other run.
        words = [Path(word).name if at < 2 else word for at, word in enumerate(stage.words)]
        told = [words, texts, [prints[need] for need in stage.needs], dict(pipeline.environment)]
        prints[stage.name] = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    return prints


def _read_state(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    stages: dict[str, Any] = read_record(path, {"stages": dict}, remedy="delete it: stages that are done end at once")[
        "stages"
    ]
    return stages


def _is_done(name: str, pipeline: Pipeline, done: Mapping[str, Any], prints: Mapping[str, str], root: Path) -> bool:
    stage = next(stage for stage in pipeline.stages if stage.name == name)
    entry = done.get(name) or {}
    is_same = entry.get("status") == "done" and entry.get("fingerprint") == prints[name]
    if not is_same or not (root / stage.output).exists():
        return False
    record = root / stage.output / "run.json"
    try:
        return not record.is_file() or read_record(record).get("status") == "done"
    except DataError:
        return False


def _move_aside(
    stage: Stage, entry: Mapping[str, Any] | None, wanted: str, root: Path, say: Callable[[str], object]
) -> None:
    """Make room where another command has written; what the same one has begun is resumed."""
    place = root / stage.output
    if entry is None or entry.get("fingerprint") == wanted or not place.exists():
        return
    number = 1
    while (aside := place.with_name(f"{place.name}.replaced-{number}")).exists():
        number += 1
    try:
        place.rename(aside)
    except OSError as error:
        found = f"was written by another configuration and cannot be moved aside: {error.strerror}"
        raise ConfigError(Problem(str(place), found, "move it away")) from error
    say(f"{stage.name}: changed since; what it was is now {aside}")


def run_child(words: Sequence[str], environment: Mapping[str, str], cwd: Path) -> int:
    """Run a command and return its exit code; a request to stop reaches it, and it is waited for.

    Raises:
        KeyboardInterrupt: There was one, when the command has ended.
    """
    sys.stdout.flush()
    variables = ["env", *(f"{name}={value}" for name, value in environment.items())] if environment else []
    process = subprocess.Popen([*variables, *words], cwd=cwd)
    # A terminal sends ctrl-C to all of its processes; SIGTERM comes to this one alone.
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    is_interrupted = False
    try:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                is_interrupted = True
    finally:
        signal.signal(signal.SIGTERM, before)
    if is_interrupted:
        raise KeyboardInterrupt
    return code if code >= 0 else 128 - code


def find_broken_gates(stage: Stage, root: Path) -> Iterator[str]:
    """Yield what ``require`` asks of a stage's output and is not so."""
    for name, wanted in stage.require.items():
        value = read_figure(root / stage.output, name)
        if value is None:
            yield f"require: there is no figure {name!r} in {stage.output}"
        elif not holds(wanted, value):
            yield f"require: {name} is {value:.4g}, and has to be {wanted}"


def read_figure(output: Path, name: str) -> float | None:
    """Return the last value of a figure: of ``metrics.jsonl``, ``run.json`` or an evaluation; ``None`` where it is not.

    Args:
        output: Folder of a run, or of ``recipes eval``.
        name: ``eval_loss``, ``loss`` or, of a benchmark or a group of them,
            ``gsm8k.exact_match``; keys within ``run.json`` by dots.
    """
    for event in reversed(list(read_lines(output / "metrics.jsonl"))):
        if event and isinstance(event.get(name), int | float):
            return float(event[name])
    for file in ("run.json", "reward_report.json", "eval.json", "eval/eval.json"):
        try:
            record: Any = read_record(output / file)
        except DataError:
            continue
        task, _, metric = name.partition(".")
        found = {**(record.get("tasks") or {}), **(record.get("groups") or {})} if file.endswith("eval.json") else {}
        scores = found.get(task, {}).get("scores", {})
        if metric in scores:
            return float(scores[metric]["value"])
        for part in name.split("."):
            record = record.get(part) if isinstance(record, Mapping) else None
        if isinstance(record, int | float):
            return float(record)
    return None

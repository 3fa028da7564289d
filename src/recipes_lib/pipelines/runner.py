"""Execution of pipelines: finished stages are skipped; changed ones run again with their dependents."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import yaml

from recipes_lib.config.command_flags import holds
from recipes_lib.config.paths import expand_home, find_shipped, is_local
from recipes_lib.config.values import read_yaml
from recipes_lib.data.sources.local_files import compute_digest
from recipes_lib.errors import (
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_PREEMPTED,
    ConfigError,
    PreemptedError,
    Problem,
    suggest,
)
from recipes_lib.files import (
    explain_write_errors,
    find_record,
    flatten_numbers,
    name_record,
    parse_number,
    read_lines,
    read_record,
    replace_record,
    try_lock,
)
from recipes_lib.pipelines.children import Children
from recipes_lib.pipelines.pipeline import Pipeline, Stage

STATE_FILE: Final = "pipeline.json"
_DATA_KEYS: Final = (
    *("dataset_name", "dataset_mixture", "dataset_test_split", "eval_datasets", "replay_dataset"),
    *("sources", "benchmarks", "toxic_words"),
    *("chat_template_path", "include_path", "eval_tasks_include_path", "method", "judge_prompt", "refusals_path"),
)
"""Keys of recipes whose values name datasets, or small files of text; not models, which are large."""
_LOGS: Final = ("checkpoint-*", "report", "report.html", "index.html", "_lock", "*.replaced-*", "*.partial")
"""Patterns of files that may change or be deleted after the stage: they are not verified."""
_REFUSE_OUTPUT: Final = ("export", "merge", "student", "tokenizer")
"""Commands that refuse an output that exists, or a part of it, instead of resuming."""
_SCORE: Final = re.compile(r"(?:tasks|groups)\.(.+)\.scores\.(.+)\.value")
"""Score of a benchmark in ``eval.json``."""
_RECORDS: Final = (".json", ".html", ".md", ".png")
"""Suffixes of files that an evaluation or publishing rewrites: their size is not verified."""


def run_pipeline(
    pipeline: Pipeline,
    chosen: Sequence[Stage],
    say: Callable[[str], object],
    *,
    on_change: Callable[[], object] = lambda: None,
    launcher: Sequence[str] = (),
    slots: Sequence[Mapping[str, str]] = ({},),
) -> int:
    """Run stages in order; return the exit code of the first that fails, or ``EXIT_DIVERGED`` if a gate fails.

    A stage that is done with the same command, configuration and inputs is skipped. If any of these has changed, its
    old output is renamed and the stage runs again. A stage that was stopped, or whose output lacks a file, is started
    again and resumes; an output that its command refuses to overwrite is renamed too. After a failure no other stage is
    started, and those that run are waited for.

    Args:
        pipeline: The pipeline.
        chosen: Stages to run, in order.
        say: Prints a progress message.
        on_change: Called after each update of ``pipeline.json``.
        launcher: Words before the command of a stage that has a launch file, such as ``srun``.
        slots: Environment variables of each stage that may run at the same time, such as those that select its GPU. A
            stage with a launch file runs alone, without them.

    Raises:
        ConfigError: A needed stage is neither chosen nor done; an old output cannot be renamed; a program does not
            exist; or another process runs this pipeline, or the same single stage.
        KeyboardInterrupt: Ctrl-C was pressed, and a stage has failed; raised when all have ended.
        PreemptedError: There was a stop signal or Ctrl-C, and the stages that ran have finished successfully.
    """
    with _holding(pipeline.output_dir, chosen[0].name if len(chosen) == 1 else "") as locks:
        progress = _Progress(pipeline, on_change)
        for stage in chosen:
            if (code := progress.find_obstacle(stage, {one.name for one in chosen}, say)) != EXIT_DONE:
                return code
        execution = _Execution(progress, chosen, say, launcher, slots, locks)
        try:
            while execution.start_next() or execution.finish_next():
                pass
        finally:  # After an error: the other stages continue.
            while execution.finish_next():
                pass
    if execution.children.is_stopped and execution.code == EXIT_DONE:
        raise PreemptedError("stop signal received: the pipeline stops here; the same command resumes it")
    if execution.children.is_interrupted:
        raise KeyboardInterrupt
    return execution.code


class _Execution:
    """Stages that wait, and those that run at the same time.

    Attributes:
        code: Exit code of the first stage that has failed, ``EXIT_DIVERGED`` of a gate.
    """

    def __init__(
        self,
        progress: _Progress,
        chosen: Sequence[Stage],
        say: Callable[[str], object],
        launcher: Sequence[str],
        slots: Sequence[Mapping[str, str]],
        locks: Sequence[int],
    ) -> None:
        self.progress, self.chosen, self.say, self.launcher = progress, chosen, say, launcher
        self.waiting, self.free, self.code = list(chosen), list(slots), EXIT_DONE
        self.running: dict[str, tuple[Stage, dict[str, Any], float, Mapping[str, str]]] = {}
        self.children = Children(locks, is_labelled=len(slots) > 1)

    def start_next(self) -> bool:
        """Start the next stage that can run, or skip it if it is done; return whether there is one."""
        stage = next(filter(self._can_start, self.waiting), None)
        if stage is None or self.code != EXIT_DONE:
            return False
        is_done = self.progress.is_done(stage)  # Reads all of its data.
        if self.children.is_stopped:
            return False
        self.waiting.remove(stage)
        title = f"{self.chosen.index(stage) + 1} of {len(self.chosen)}, {stage.name}"
        if is_done:
            self.say(f"{title}: already done")
            self._check_gates(stage)
            return True
        self.say(f"{title}: {stage.about or shlex.join(stage.words)}")
        entry, slot = self.progress.begin(stage, self.say), self.free.pop()
        words = [*self.launcher, *stage.words] if stage.launch else stage.words
        self.running[stage.name] = stage, entry, time.monotonic(), slot
        try:
            variables = self.progress.pipeline.environment
            self.children.start(stage.name, words, variables if stage.launch else {**variables, **slot})
        except BaseException:
            self._record_end(stage.name, None)
            raise
        return True

    def _can_start(self, stage: Stage) -> bool:
        unfinished = {*(one.name for one in self.waiting), *self.running}
        # Several processes take all GPUs, and the port at which they meet.
        is_alone = any(running.launch for running, *_ in self.running.values()) or (stage.launch and self.running)
        return bool(self.free) and not is_alone and unfinished.isdisjoint(stage.needs)

    def finish_next(self) -> bool:
        """Wait for the end of a stage and record it; return whether one was running."""
        if not self.running:
            return False
        name, code = self.children.wait()
        stage = self._record_end(name, code)
        if code is None:
            self.code = self.code or EXIT_PREEMPTED
        elif code != EXIT_DONE:
            self.say(f"{name} ended with exit code {code}; the same command resumes here")
            self.code = self.code or code
        elif not self.children.is_stopped:
            self._check_gates(stage)
        return True

    def _record_end(self, name: str, code: int | None) -> Stage:
        stage, entry, began, slot = self.running.pop(name)
        self.free.append(slot)
        self.progress.end(stage, entry, code, time.monotonic() - began)
        return stage

    def _check_gates(self, stage: Stage) -> None:
        # Also of a stage that was skipped: its gates may have been changed since.
        if broken := list(find_broken_gates(stage)):
            self.say("\n".join(f"{stage.name}: {gate}" for gate in broken))
            self.code = self.code or EXIT_DIVERGED


@contextmanager
def _holding(folder: Path, only: str) -> Iterator[list[int]]:
    """Lock a folder against other ``recipes run`` processes; with ``only``, against those that may run this stage.

    Yields:
        Descriptors of the locks. Stages inherit them, so that one that survives a killed ``recipes run`` holds them on.

    Raises:
        ConfigError: Another process holds the lock, or the folder cannot be written.
    """
    with ExitStack() as files:
        with explain_write_errors(folder, "name another --output_dir"):
            folder.mkdir(parents=True, exist_ok=True)
            # A whole pipeline takes an exclusive lock. Jobs of single stages share it, so that they can run at the same
            # time, and each takes an exclusive lock on its stage.
            names = [f"{STATE_FILE}.lock", *([f"{STATE_FILE}.{only}.lock"] if only else [])]
            opened = [files.enter_context((folder / name).open("a", encoding="utf-8")) for name in names]
        for file in opened:
            # `None` where the file system has no locks: two processes are the user's responsibility there.
            if try_lock(file, is_shared=bool(only) and file is opened[0]) is False:
                remedy = f"wait until it ends, or stop it (`fuser {shlex.quote(file.name)}` prints its process id)"
                found = "another `recipes run`, or a stage that one has left behind, is running this pipeline"
                raise ConfigError(Problem(str(folder), found, remedy))
        yield [file.fileno() for file in opened]


def find_done(pipeline: Pipeline) -> set[str]:
    """Return the names of the stages that are done with the current configuration."""
    progress = _Progress(pipeline, lambda: None)
    return {stage.name for stage in pipeline.stages if progress.is_done(stage)}


class _Progress:
    """Progress record of the stages, ``pipeline.json``."""

    def __init__(self, pipeline: Pipeline, on_change: Callable[[], object]) -> None:
        self.pipeline, self.on_change = pipeline, on_change
        self.path = pipeline.output_dir / STATE_FILE
        self.entries = read_state(self.path)
        self.prints: dict[str, str] = {}
        self.stages = {stage.name: stage for stage in pipeline.stages}
        self.about = [
            {
                "name": stage.name,
                "recipe": stage.recipe or stage.command,
                "about": stage.about or " ".join(f"{key}={value}" for key, value in stage.swept.items()),
                "output": self._name_output(stage),
            }
            for stage in pipeline.stages
        ]
        """Description of each stage for the overview; outputs are relative to the folder of ``pipeline.json``."""

    def _name_output(self, stage: Stage) -> str:
        return os.path.relpath(stage.output, self.path.parent)

    def compute_fingerprint(self, stage: Stage) -> str:
        """Return the hash of a stage: its command, environment, configuration, launch file, local data, and its needs.

        Paths of the project, of the pipeline file and of outputs are not hashed. Files are read at the first call, just
        before the stage runs, because a program may download its data.
        """
        if stage.name not in self.prints:
            # A file in another encoding is an error of the stage that reads it, not of the hash.
            texts = [file.read_text("utf-8", errors="replace") if file.is_file() else "" for file in stage.files]
            # Includes the hashes of the needed stages, so that a change invalidates all stages after it.
            needs = [self.compute_fingerprint(self.stages[need]) for need in stage.needs]
            hashed: list[Any] = [list(stage.identity), texts, needs, dict(self.pipeline.environment)]
            outputs = [one.output.resolve() for one in self.pipeline.stages]
            hashed += [data] if (data := list(_digest_data(stage, outputs))) else []
            self.prints[stage.name] = hashlib.sha256(json.dumps(hashed).encode()).hexdigest()[:16]
        return self.prints[stage.name]

    def is_done(self, stage: Stage) -> bool:
        """Return whether a stage is done with the same command and inputs, and its output is complete."""
        entry, output = self.entries.get(stage.name) or {}, stage.output
        if entry.get("status") != "done" or entry.get("fingerprint") != self.compute_fingerprint(stage):
            return False
        # Later commands may have restarted a run in it.
        is_unfinished = (output / "run.json").is_file() and find_record(output / "run.json").get("status") != "done"
        return not is_unfinished and find_missing_file(output, entry.get("files", {})) is None

    def find_obstacle(self, stage: Stage, chosen: Collection[str], say: Callable[[str], object]) -> int:
        """Return ``EXIT_DIVERGED`` if a gate of a needed stage fails.

        Raises:
            ConfigError: A needed stage is neither chosen nor done.
        """
        for need in (self.stages[name] for name in stage.needs if name not in chosen):
            if not self.is_done(need):
                remedy = f"run it too: --from {need.name}, or without --only"
                raise ConfigError(Problem(stage.name, f"needs {need.name}, which is not done", remedy))
            if broken := list(find_broken_gates(need)):
                say("\n".join(f"{stage.name} needs {need.name}: {gate}" for gate in broken))
                return EXIT_DIVERGED
        return EXIT_DONE

    def begin(self, stage: Stage, say: Callable[[str], object]) -> dict[str, Any]:
        """Record that a stage runs, and rename an output that it cannot resume; return its entry."""
        before = self.entries.get(stage.name) or {}
        is_same = before.get("fingerprint") == self.compute_fingerprint(stage)
        place = self._name_output(stage)
        missing = find_missing_file(stage.output, before.get("files", {}))
        if is_same and before.get("status") == "done" and missing:
            say(f"{stage.name}: {missing}")
        # Not after a failure: what is there may be the user's, which the command has refused.
        is_kept = is_same and not (stage.command in _REFUSE_OUTPUT and before.get("status") in ("done", "running"))
        # Another `output` is not that of the earlier configuration, and may hold the user's own files.
        if before and not is_kept and before.get("output", place) == place:
            _move_aside(stage.output, stage.name, say)
        spent = (parse_number(before.get("seconds")) or 0.0) if is_same else 0.0
        entry = {"fingerprint": self.compute_fingerprint(stage), "output": place, "seconds": spent}
        # Before the start: after a kill, the record shows that the output is of this command and can be resumed.
        self._write(stage, entry | {"status": "running"})
        return entry

    def end(self, stage: Stage, entry: Mapping[str, Any], code: int | None, seconds: float) -> None:
        """Record that a stage has ended.

        Args:
            stage: The stage.
            entry: Result of ``begin``.
            code: Its exit code; ``None`` if it was not started, or was stopped by Ctrl-C.
            seconds: Its duration.
        """
        status = "stopped" if code in (None, EXIT_PREEMPTED) else "failed" if code else "done"
        files = {} if code != EXIT_DONE else {"files": _list_files(stage.output)}
        seconds = round(entry["seconds"] + seconds, 1)
        self._write(stage, {**entry, "seconds": seconds, "status": status, **files, "code": code})

    def _write(self, stage: Stage, entry: Mapping[str, Any]) -> None:
        # Cluster jobs run other stages at the same time: read, update and replace under one lock.
        with self.path.with_name(f"{STATE_FILE}.writing").open("a", encoding="utf-8") as file:
            try_lock(file, waits=True)
            self.entries = read_state(self.path) | {stage.name: entry}
            replace_record(self.path, {"pipeline": self.about, "stages": self.entries})
            self.on_change()


def _digest_data(stage: Stage, outputs: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield name and SHA-256 of each local data file of a stage; those in outputs of stages are covered by `needs`."""
    given: dict[str, Any] = {}
    # An invalid value is an error of the stage.
    with suppress(ConfigError):
        if stage.argv[:1] == ["--config"] and isinstance(read := read_yaml(find_shipped(Path(stage.argv[1]))), dict):
            given |= read
    for flag, text in zip(stage.argv[::2], stage.argv[1::2], strict=True):
        with suppress(yaml.YAMLError, ValueError):
            given[flag.removeprefix("--")] = yaml.safe_load(text)
    named = [expand_home(text) for key in _DATA_KEYS for text in _find_texts(given.get(key))]
    for place in map(Path, filter(is_local, named)):
        for file in [place] if place.is_file() else sorted(place.rglob("[!.]*")):
            if file.is_file() and not any(file.resolve().is_relative_to(output) for output in outputs):
                # Of another user, or just deleted. The failure of a disk would look like changed data: it is raised.
                with suppress(PermissionError, FileNotFoundError):
                    yield str(file.relative_to(place)), compute_digest(file).hex()


def _find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _find_texts(part)
    elif isinstance(value, str):
        yield value


def read_state(path: Path) -> dict[str, Any]:
    """Return the entries of ``pipeline.json`` by stage; empty if the file does not exist.

    Raises:
        DataError: The file is damaged.
    """
    if not path.is_file():
        return {}
    remedy = "delete it: finished stages run again, and recipes that are done end at once"
    stages = read_record(path, {"stages": dict}, remedy=remedy)["stages"]
    return {name: entry for name, entry in stages.items() if isinstance(entry, dict)}


def find_missing_file(output: Path, files: Any) -> str | None:
    """Return which file of an output is missing or has another size; ``None`` if the output is complete.

    Args:
        output: File or folder.
        files: ``files`` of an entry of ``pipeline.json``: name -> size in bytes, ``None`` where it may change; ``None``
            if the stage ended without an output.
    """
    if files is None:
        return None
    if not output.exists():
        return f"{output} is missing"
    for name, size in files.items() if isinstance(files, dict) else ():
        file = output / name
        if not file.is_file():
            return f"{file} is missing"
        if size is not None and file.stat().st_size != size:
            return f"{file} has {file.stat().st_size:,} bytes instead of {size}"
    return None


def _list_files(output: Path) -> dict[str, int | None] | None:
    """Return the files of an output: name -> size in bytes, ``None`` if it may change; ``None`` without an output."""
    if not output.exists():
        return None
    files: dict[str, int | None] = {}
    for file in [output] if output.is_file() else sorted(output.rglob("*")):
        name = file.relative_to(output)
        if file.is_file() and not any(fnmatch(part, sign) for part in name.parts for sign in _LOGS):
            files[str(name)] = None if file.suffix in _RECORDS else file.stat().st_size
    return files


def _move_aside(place: Path, name: str, say: Callable[[str], object]) -> None:
    """Rename an output that its stage cannot resume to ``NAME.replaced-N``."""
    if not place.exists():
        return
    number = 1
    while (aside := place.with_name(f"{place.name}.replaced-{number}")).exists():
        number += 1
    with explain_write_errors(place, "move it away", "is to be written again and cannot be renamed"):
        # First: after a kill in between, rows without a record are renamed, but a record without rows is refused.
        if name_record(place).exists():
            name_record(place).rename(name_record(aside))
        place.rename(aside)
    say(f"{name}: runs again; its old output is now {aside}")


def find_broken_gates(stage: Stage) -> Iterator[str]:
    """Yield the requirements that a stage's output does not meet."""
    figures = list_figures(stage.output)
    for name, wanted in stage.require.items():
        value = figures.get(name)
        if value is None:
            hint = suggest(name, figures, f"its metrics are {', '.join(sorted(figures)) or 'none'}", "{}", cutoff=0.4)
            yield f"require: there is no metric {name!r} in {stage.output}; {hint}"
        elif not holds(wanted, value):
            yield f"require: {name} is {value:.4g}, and must be {wanted}"


def list_figures(output: Path) -> dict[str, float]:
    """Return the metrics of an output by name, from evaluations, ``run.json`` and ``metrics.jsonl``.

    Names are ``eval_loss`` or ``loss`` for metrics, the last value of each, of evaluations that of the output's model;
    ``arc_easy.acc`` for scores of a benchmark or group, with the filter if there is one (``gsm8k.exact_match,
    strict-match``); dotted keys for nested values. NaN is included.

    Args:
        output: Folder of a run or of ``recipes eval``.
    """
    figures: dict[str, float] = {}
    for file in ("eval/eval.json", "eval.json", "reward_report.json", "run.json"):
        figures |= dict(flatten_numbers(find_record(output / file)))
    for name, value in list(figures.items()):
        if score := _SCORE.fullmatch(name):
            figures[f"{score[1]}.{score[2]}"] = value
    evaluations: dict[float | None, dict[str, float]] = {}
    for event in read_lines(output / "metrics.jsonl"):
        # In order, so that the last value of each metric remains; a broken line is `None`.
        figures |= (found := dict(flatten_numbers(event or {})))
        if held_out := {name: number for name, number in found.items() if name.startswith("eval_")}:
            evaluations[found.get("step")] = held_out
        # The last event of `load_best_model_at_end`: the model of the output is that of an earlier step.
        figures |= evaluations.get(found.get("best_step"), {})
    return figures

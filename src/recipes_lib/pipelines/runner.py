"""Runs a pipeline: finished stages are skipped; changed ones run again with their dependents."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from recipes_lib.errors import (
    EXIT_BUG,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_PREEMPTED,
    STATUSES,
    ConfigError,
    DataError,
    Problem,
    suggest,
)
from recipes_lib.files import parse_number, read_lines, read_record, replace_record, try_lock, writing
from recipes_lib.pipelines.pipeline import Pipeline, Stage, holds

STATE: Final = "pipeline.json"
_LOGS: Final = ("checkpoint-*", "report", "report.html", "index.html", "_lock", "*.replaced-*", "*.partial")
"""Files of an output that may change: they are not verified."""
_RECORDS: Final = (".json", ".html", ".md", ".png")
"""Suffixes of files that are rewritten later, by an evaluation or by publishing."""


def run_pipeline(
    pipeline: Pipeline,
    chosen: Sequence[Stage],
    say: Callable[[str], object],
    *,
    cwd: Path | None = None,
    on_change: Callable[[], object] = lambda: None,
    launcher: Sequence[str] = (),
) -> int:
    """Run stages in order and return the exit code of the first one that fails, or ``EXIT_DIVERGED`` of a gate.

    A stage that was done by the same command, configuration and inputs is left out. One that was done otherwise is done
    again, its output moved aside; one that was stopped, or whose output lacks a file, is started again, and resumes by
    itself.

    Args:
        pipeline: All stages.
        chosen: Those to run.
        say: Tells what happens.
        cwd: Working directory of the stages, and where the pipeline's paths begin.
        on_change: Called whenever ``pipeline.json`` says something else.
        launcher: Words before the command of a stage that has a launch file.

    Raises:
        ConfigError: A stage that is needed is neither chosen nor done, an output in the way cannot be moved aside, a
            program is not there, or another process runs this pipeline, or of a single stage, runs it.
    """
    root = cwd or Path()
    with _holding(root / pipeline.output_dir, chosen[0].name if len(chosen) == 1 else ""):
        progress = _Progress(pipeline, root, on_change, launcher)
        for number, stage in enumerate(chosen, 1):
            if (code := progress.find_obstacle(stage, {one.name for one in chosen}, say)) != EXIT_DONE:
                return code
            told = f"{number} of {len(chosen)}, {stage.name}"
            if progress.is_done(stage):
                say(f"{told}: done before")
            else:
                say(f"{told}: {stage.about or shlex.join(stage.words)}")
                if (code := progress.make(stage, say)) != EXIT_DONE:
                    say(f"{stage.name} ended with exit code {code}; the same command resumes here")
                    return code
            if broken := list(find_broken_gates(stage, root)):
                for gate in broken:
                    say(f"{stage.name}: {gate}")
                return EXIT_DIVERGED
    return EXIT_DONE


@contextmanager
def _holding(folder: Path, only: str) -> Iterator[None]:
    """Lock a folder against other ``recipes run`` processes; with ``only``, against those that may run this stage.

    Raises:
        ConfigError: One is in it, or the folder cannot be written.
    """
    with ExitStack() as files:
        with writing(folder, "name another"):
            folder.mkdir(parents=True, exist_ok=True)
            # A whole pipeline takes the lock alone; jobs of single stages share it, and each takes that of its stage.
            names = [f"{STATE}.lock", *([f"{STATE}.{only}.lock"] if only else [])]
            opened = [files.enter_context((folder / name).open("a", encoding="utf-8")) for name in names]
        for file in opened:
            if try_lock(file, is_shared=bool(only) and file is opened[0]) is False:
                remedy = f"wait until it has ended, or stop it (`fuser {file.name}` names it)"
                raise ConfigError(Problem(str(folder), "another `recipes run` works here", remedy))
        yield


def find_done(pipeline: Pipeline) -> set[str]:
    """Return the names of the stages that need not be run again."""
    progress = _Progress(pipeline, Path(), lambda: None)
    return {stage.name for stage in pipeline.stages if progress.is_done(stage)}


class _Progress:
    """Progress record of the stages, ``pipeline.json``."""

    def __init__(
        self, pipeline: Pipeline, root: Path, on_change: Callable[[], object], launcher: Sequence[str] = ()
    ) -> None:
        self.pipeline, self.root, self.on_change, self.launcher = pipeline, root, on_change, launcher
        self.path = root / pipeline.output_dir / STATE
        self.entries = read_state(self.path)
        self.prints = fingerprint(pipeline, root)
        self.stages = {stage.name: stage for stage in pipeline.stages}
        folder = self.path.parent
        self.about = [
            {
                "name": stage.name,
                "recipe": stage.recipe or stage.command,
                "about": stage.about or " ".join(f"{key}={value}" for key, value in stage.swept.items()),
                "output": os.path.relpath(root / stage.output, folder),
            }
            for stage in pipeline.stages
        ]
        """Of every stage, for an overview; outputs as seen from the folder of ``pipeline.json``."""

    def is_done(self, stage: Stage) -> bool:
        """Return whether a stage was done with the same command and inputs, and its output is complete."""
        entry = self.entries.get(stage.name) or {}
        if entry.get("status") != "done" or entry.get("fingerprint") != self.prints[stage.name]:
            return False
        return find_missing_file(self.root / stage.output, entry.get("files")) is None and not _is_unfinished(
            self.root / stage.output
        )

    def find_obstacle(self, stage: Stage, chosen: Collection[str], say: Callable[[str], object]) -> int:
        """Return ``EXIT_DIVERGED`` if a gate of a needed stage fails.

        Raises:
            ConfigError: A stage that is needed is neither chosen nor done.
        """
        for need in (self.stages[name] for name in stage.needs if name not in chosen):
            if not self.is_done(need):
                remedy = f"run it too: --from {need.name}, or without --only"
                raise ConfigError(Problem(stage.name, f"needs {need.name}, which is not done", remedy))
            if broken := list(find_broken_gates(need, self.root)):
                say("\n".join(f"{stage.name} needs {need.name}: {gate}" for gate in broken))
                return EXIT_DIVERGED
        return EXIT_DONE

    def make(self, stage: Stage, say: Callable[[str], object]) -> int:
        """Run a stage and return its exit code."""
        before = self.entries.get(stage.name) or {}
        is_same = before.get("fingerprint") == self.prints[stage.name]
        if before and not is_same:
            _move_aside(self.root / stage.output, stage.name, say)
        missing = find_missing_file(self.root / stage.output, before.get("files"))
        if is_same and before.get("status") == "done" and missing:
            say(f"{stage.name}: {missing}")
        spent = float(before.get("seconds") or 0) if is_same else 0.0
        entry: dict[str, Any] = {"fingerprint": self.prints[stage.name]}
        began = time.time()
        # Before it starts: after a kill it is known that the output is of this command, and may be resumed.
        self._write(stage, entry | {"status": "running", "seconds": spent})
        code: int | None = None
        try:
            words = [*self.launcher, *stage.words] if stage.launch else stage.words
            code = run_child(words, self.pipeline.environment, self.root)
            # Launchers of several processes return 1 however the run ended; its record says how.
            if code == EXIT_BUG and stage.launch:
                code = _read_end(self.root / stage.output, began)
        finally:
            entry["seconds"] = round(spent + time.time() - began, 1)
            if code == EXIT_DONE:
                entry |= {"status": "done", "files": _list_files(self.root / stage.output)}
            else:
                entry["status"] = "stopped" if code in (None, EXIT_PREEMPTED) else "failed"
            self._write(stage, entry | {"code": code})
        return code

    def _write(self, stage: Stage, entry: Mapping[str, Any]) -> None:
        # Jobs of a cluster run other stages at the same time.
        with self.path.with_name(f"{STATE}.writing").open("a", encoding="utf-8") as file:
            try_lock(file, waits=True)
            self.entries = read_state(self.path) | {stage.name: entry}
            replace_record(self.path, {"pipeline": self.about, "stages": self.entries})
            self.on_change()


def fingerprint(pipeline: Pipeline, root: Path) -> dict[str, str]:
    """Return of each stage a hash of its command, of the files that the user wrote for it, and of what it needs.

    Where the project, the pipeline and its outputs lie is not in it.
    """
    prints: dict[str, str] = {}
    for stage in pipeline.stages:
        texts = [(root / file).read_text("utf-8") if (root / file).is_file() else "" for file in stage.files]
        # With the hashes of what it needs: a change runs through to every stage below.
        told = [list(stage.identity), texts, [prints[need] for need in stage.needs], dict(pipeline.environment)]
        prints[stage.name] = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    return prints


def read_state(path: Path) -> dict[str, Any]:
    """Read ``pipeline.json``; empty if there is none.

    Raises:
        DataError: It is not as it was written.
    """
    if not path.is_file():
        return {}
    remedy = "delete it: stages that are done end at once"
    stages: dict[str, Any] = read_record(path, {"stages": dict}, remedy=remedy)["stages"]
    for name, entry in stages.items():
        if not isinstance(entry, dict):
            raise DataError(Problem(f"{path}: {name}", "is not an object", remedy))
    return stages


def find_missing_file(output: Path, files: Any) -> str | None:
    """Return which file of an output is missing; ``None`` if it is complete.

    Args:
        output: File or folder.
        files: Name -> size in bytes, ``null`` where it may change; as ``pipeline.json`` has them.
    """
    if not output.exists():
        return f"{output} is gone"
    for name, size in files.items() if isinstance(files, dict) else ():
        file = output / name
        if not file.is_file():
            return f"{file} is gone"
        if size is not None and file.stat().st_size != size:
            return f"{file} has {file.stat().st_size:,} bytes, and had {size:,}"
    return None


def _list_files(output: Path) -> dict[str, int | None]:
    """Return the files of an output: name -> size, ``None`` for those that are rewritten afterwards."""
    files: dict[str, int | None] = {}
    for file in [output] if output.is_file() else sorted(output.rglob("*")):
        name = file.relative_to(output)
        if file.is_file() and not any(fnmatch(part, sign) for part in name.parts for sign in _LOGS):
            files[str(name)] = None if file.suffix in _RECORDS else file.stat().st_size
    return files


def _read_end(output: Path, began: float) -> int:
    """Return the exit code for the status that a run has recorded since; ``EXIT_BUG`` if it has recorded none."""
    record = output / "run.json"
    try:
        status = read_record(record).get("status") if record.stat().st_mtime >= began else None
    except (OSError, DataError):
        return EXIT_BUG
    return next((code for code, name in STATUSES.items() if name == status), EXIT_BUG)


def _is_unfinished(output: Path) -> bool:
    record = output / "run.json"
    try:
        return record.is_file() and read_record(record).get("status") != "done"
    except DataError:
        return True


def _move_aside(place: Path, name: str, say: Callable[[str], object]) -> None:
    """Move the output of another command aside; that of the same command is resumed."""
    if not place.exists():
        return
    number = 1
    while (aside := place.with_name(f"{place.name}.replaced-{number}")).exists():
        number += 1
    with writing(place, "move it away", "was written by another configuration and cannot be moved aside"):
        place.rename(aside)
    say(f"{name}: changed since; what it was is now {aside}")


def find_program(words: Sequence[str], cwd: Path) -> str | None:
    """Return why a command cannot be started; ``None`` if its program exists."""
    program = words[0] if words else ""
    found = shutil.which(str(cwd / program) if "/" in program else program)
    return None if found else f"there is no program {program!r}"


def run_child(words: Sequence[str], environment: Mapping[str, str], cwd: Path) -> int:
    """Run a command and return its exit code; a request to stop reaches it, and it is waited for.

    Raises:
        KeyboardInterrupt: There was one, when the command has ended.
        ConfigError: Its program is not there.
    """
    if missing := find_program(words, cwd):
        raise ConfigError(Problem(shlex.join(words), missing, "install it, or write its path"))
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
            # The terminal has sent it to the stage as well, which may have a checkpoint to save.
            except KeyboardInterrupt:
                is_interrupted = True
    finally:
        signal.signal(signal.SIGTERM, before)
    if is_interrupted:
        raise KeyboardInterrupt
    # As a shell reports a process that a signal has ended.
    return code if code >= 0 else 128 - code


def find_broken_gates(stage: Stage, root: Path) -> Iterator[str]:
    """Yield the requirements that a stage's output does not meet."""
    figures = list_figures(root / stage.output)
    for name, wanted in stage.require.items():
        value = figures.get(name)
        if value is None:
            hint = suggest(name, figures, f"there are {', '.join(sorted(figures)) or 'none'}", "{}", cutoff=0.4)
            yield f"require: there is no figure {name!r} in {stage.output}; {hint}"
        elif not holds(wanted, value):
            yield f"require: {name} is {value:.4g}, and has to be {wanted}"


def list_figures(output: Path) -> dict[str, float]:
    """Return every figure of an output: ``metrics.jsonl``, whose last value counts, ``run.json`` or an evaluation.

    Their names are ``eval_loss``, ``loss`` or, of a benchmark or a group of them, ``gsm8k.exact_match``; keys within
    ``run.json`` by dots. NaN is a figure too, and meets no requirement.

    Args:
        output: Folder of a run, or of ``recipes eval``.
    """
    figures: dict[str, float] = {}
    for file in ("eval/eval.json", "eval.json", "reward_report.json", "run.json"):
        try:
            record = read_record(output / file)
        except DataError:
            continue
        figures |= dict(_flatten(record))
        parts = [record.get(name) for name in ("tasks", "groups")] if file.endswith("eval.json") else []
        for task, found in (pair for part in parts if isinstance(part, dict) for pair in part.items()):
            scores = found.get("scores") if isinstance(found, dict) else None
            figures |= {
                f"{task}.{metric}": number
                for metric, score in (scores.items() if isinstance(scores, dict) else ())
                if isinstance(score, dict) and (number := parse_number(score.get("value"))) is not None
            }
    for event in read_lines(output / "metrics.jsonl"):
        # The last value of each figure wins.
        figures |= dict(_flatten(event or {}))
    return figures


def _flatten(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif (number := parse_number(value)) is not None:
            yield f"{prefix}{name}", number

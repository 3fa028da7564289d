"""``recipes run``: a pipeline from one YAML file, such as pretraining, fine-tuning, preferences and evaluation."""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes_lib.cli import COMMANDS
from recipes_lib.config.corpus import parse_corpus_command
from recipes_lib.config.evaluation import parse_eval_command
from recipes_lib.config.loader import load_config
from recipes_lib.errors import EXIT_DONE, ConfigError, Problem, UserError
from recipes_lib.pipelines.pipeline import Pipeline, Stage, load_pipeline
from recipes_lib.pipelines.runner import STATE, find_program, list_figures, read_state, run_pipeline
from recipes_lib.report.overview import format_rows, write_overview
from recipes_lib.report.run_files import format_duration
from recipes_lib.shipped import find_launch_file

_SHOWN = ("eval_loss", "eval_rewards/accuracies", "eval_reward", "loss")
"""Of a stage the table shows the first of these that it has."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code of a stage that fails.

    Raises:
        ConfigError: The pipeline is wrong, or a stage of it.
    """
    parser = argparse.ArgumentParser(prog="recipes run", description=__doc__, allow_abbrev=False)
    parser.add_argument("pipeline", type=Path, help="YAML file (docs/pipelines.md)")
    parser.add_argument("--output_dir", help="instead of the file's")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="the first stage to run")
    parser.add_argument("--until", dest="last", metavar="STAGE", help="the last stage to run")
    parser.add_argument("--only", metavar="STAGE", help="this stage alone")
    parser.add_argument("--check", action="store_true", help="`recipes check` of every stage, and run none")
    parser.add_argument("--keys", action="store_true", help="with --check: look at no model and no data")
    parser.add_argument("--list", action="store_true", help="show the commands, and run none")
    options = parser.parse_args(list(argv))
    pipeline = load_pipeline(options.pipeline, options.output_dir)
    chosen = choose_stages(pipeline, options.first or options.only, options.last or options.only)
    if problems := list(_find_unknown_commands(pipeline)):
        raise ConfigError(*problems)
    if options.list:
        sys.stdout.write("".join(f"{stage.name}: {shlex.join(stage.words)}\n" for stage in chosen))
        return EXIT_DONE
    if options.check:
        check_stages(options.pipeline, pipeline, [] if options.keys else [stage.name for stage in chosen])
        sys.stdout.write(f"{len(pipeline.stages)} stages, ready to run\n")
        return EXIT_DONE
    code = run_pipeline(
        pipeline,
        chosen,
        lambda line: sys.stdout.write(f"\n{line}\n"),
        on_change=lambda: write_overview(pipeline.output_dir),
    )
    sys.stdout.write("\n" + "".join(f"{line}\n" for line in describe(pipeline)))
    return code


def _find_unknown_commands(pipeline: Pipeline) -> Iterator[Problem]:
    for stage in pipeline.stages:
        if stage.command and stage.command not in COMMANDS:
            near = difflib.get_close_matches(stage.command, COMMANDS, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
            yield Problem(f"{stage.name}: command", f"there is no `recipes {stage.command}`", remedy)


def choose_stages(pipeline: Pipeline, first: str | None, last: str | None) -> list[Stage]:
    """Return the stages from one to another, both included; ``None``: from the first, to the last.

    Raises:
        ConfigError: There is no such stage.
    """
    names = [stage.name for stage in pipeline.stages]
    for name in (first, last):
        if name is not None and name not in names:
            raise ConfigError(
                Problem("recipes run", f"there is no stage {name!r}", f"the stages are {', '.join(names)}")
            )
    begin, end = (0 if first is None else names.index(first)), (len(names) if last is None else names.index(last) + 1)
    return list(pipeline.stages[begin:end])


def check_stages(path: Path, pipeline: Pipeline, looked_at: Sequence[str]) -> None:
    """Check every stage: its keys and its launch file as if what the stages before it write were there.

    Of those whose inputs are there already, ``recipes check`` looks at model and data too, and prints what it finds.

    Args:
        path: The pipeline's file.
        pipeline: As it will run.
        looked_at: Names of the stages at which ``recipes check`` may look.

    Raises:
        ConfigError: Of all stages together.
    """
    problems: list[Problem] = []
    outputs = {stage.name: stage.output for stage in pipeline.stages}
    state = read_state(pipeline.output_dir / STATE)
    with tempfile.TemporaryDirectory() as folder:
        # The same pipeline with its outputs in a folder of their own, where each of them is put.
        for real, stage in zip(pipeline.stages, load_pipeline(path, folder).stages, strict=True):
            is_done = (state.get(real.name) or {}).get("status") == "done"
            is_there = all(outputs[need].exists() for need in real.needs)
            if real.recipe and real.name in looked_at and is_there and not is_done:
                sys.stdout.write(f"\n{real.name}: recipes check\n")
                problems += _collect(real.name, lambda real=real: _look_at(real))  # type: ignore[misc]
            elif stage.recipe:
                problems += _collect(real.name, lambda stage=stage: _load(stage))  # type: ignore[misc]
            elif folder not in stage.words[0] and (missing := find_program(stage.words, Path())):
                problems.append(Problem(f"{stage.name}: run", missing, "install it, or write its path"))
            if stage.output.suffix:
                stage.output.parent.mkdir(parents=True, exist_ok=True)
                stage.output.touch()
            else:
                stage.output.mkdir(parents=True, exist_ok=True)
    if problems:
        raise ConfigError(*problems)


def _collect(name: str, check: Callable[[], object]) -> list[Problem]:
    try:
        check()
    except UserError as error:
        return [Problem(f"{name}: {problem.where}", problem.found, problem.remedy) for problem in error.problems]
    return []


def _look_at(stage: Stage) -> None:
    """Run ``recipes check`` of a stage.

    Raises:
        ConfigError: It found problems, which it has printed.
    """
    from recipes_lib.commands.check import main as check

    hardware = ["--hardware", stage.launch] if stage.launch else []
    if check(["--stage", stage.recipe, *hardware, *stage.argv]) != EXIT_DONE:
        raise ConfigError(Problem("recipes check", "found the problems above", "mend them"))


def _load(stage: Stage) -> None:
    commands = {"corpus": parse_corpus_command, "eval": parse_eval_command}
    if stage.recipe in commands:
        commands[stage.recipe](stage.argv)
        return
    config = load_config(stage.recipe, stage.argv)
    if stage.launch:
        from recipes_lib.training.layouts.compatibility import verify_combination
        from recipes_lib.training.layouts.launch_files import plan_launch

        file = find_launch_file(stage.launch)
        verify_combination(config, plan_launch(file), str(file))


def describe(pipeline: Pipeline) -> list[str]:
    """Return a table of the stages: status, time, a figure, swept keys, and where the output is."""
    state = read_state(pipeline.output_dir / STATE)
    rows: list[tuple[str, ...]] = [("stage", "status", "time", "figure", "keys", "output")]
    rows += [_describe_stage(stage, state.get(stage.name) or {}) for stage in pipeline.stages]
    return [*format_rows(rows), f"overview: {pipeline.output_dir / 'index.html'}"]


def _describe_stage(stage: Stage, entry: Mapping[str, Any]) -> tuple[str, ...]:
    figures = list_figures(stage.output)
    shown = next((f"{name} {figures[name]:.4g}" for name in (*stage.require, *_SHOWN) if name in figures), "")
    seconds, swept = entry.get("seconds"), " ".join(f"{key}={value}" for key, value in stage.swept.items())
    time = "" if seconds is None else format_duration(float(seconds))
    return stage.name, str(entry.get("status", "not run")), time, shown, swept, str(stage.output)

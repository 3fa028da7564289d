"""``recipes run``: run the stages of a pipeline file, such as pretraining, fine-tuning, DPO and evaluation."""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes_lib.cli import COMMANDS
from recipes_lib.commands.pipeline.pipeline_checks import check_stages, plan_stages
from recipes_lib.errors import EXIT_DONE, ConfigError, Problem
from recipes_lib.pipelines.pipeline import Pipeline, Stage, load_pipeline
from recipes_lib.pipelines.runner import STATE, list_figures, read_state, run_pipeline
from recipes_lib.report.overview import format_rows, write_overview
from recipes_lib.report.run_files import format_duration

_SHOWN = ("eval_loss", "eval_rewards/accuracies", "eval_reward", "loss")
"""Metrics of the table, in order of preference: a stage shows the first that it has."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code of a stage that fails.

    Raises:
        ConfigError: The pipeline is wrong, or a stage of it.
    """
    parser = argparse.ArgumentParser(prog="recipes run", description=__doc__, allow_abbrev=False)
    parser.add_argument("pipeline", type=Path, help="YAML file (docs/pipelines.md)")
    parser.add_argument("--output_dir", help="instead of the file's")
    parser.add_argument("--from", dest="first", metavar="STAGE", help="first stage to run")
    parser.add_argument("--until", dest="last", metavar="STAGE", help="last stage to run")
    parser.add_argument("--only", metavar="STAGE", help="run this stage only")
    parser.add_argument("--check", action="store_true", help="run `recipes check` for every stage, without running it")
    parser.add_argument("--keys", action="store_true", help="with --check: only check keys, not models and data")
    parser.add_argument(
        "--plan", action="store_true", help="estimate memory, hours and cost of every stage, without running it"
    )
    parser.add_argument("--gpu", default="H100", help="of --plan (default: %(default)s)")
    told = "of --plan: processes of stages with a launch file (default: the file's)"
    parser.add_argument("--num_processes", type=int, help=told)
    parser.add_argument("--device_hour_price", type=float, metavar="P", help="of --plan: price of a GPU for an hour")
    parser.add_argument("--list", action="store_true", help="print the commands, without running them")
    options = parser.parse_args(list(argv))
    pipeline = load_pipeline(options.pipeline, options.output_dir)
    chosen = choose_stages(pipeline, options.first or options.only, options.last or options.only)
    if problems := list(_find_unknown_commands(pipeline)):
        raise ConfigError(*problems)
    if options.list:
        sys.stdout.write("".join(f"{stage.name}: {shlex.join(stage.words)}\n" for stage in chosen))
        return EXIT_DONE
    if options.plan:
        lines = plan_stages(options.pipeline, options.gpu, options.num_processes, options.device_hour_price)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
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
    """Return the stages between two names, inclusive; ``None``: the first, the last.

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

"""``recipes run``: a pipeline from one YAML file, such as pretraining, fine-tuning, preferences and evaluation."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from recipes_lib.config.corpus import parse_corpus_command
from recipes_lib.config.evaluation import parse_eval_command
from recipes_lib.config.loader import load_config
from recipes_lib.errors import EXIT_DONE, ConfigError, Problem
from recipes_lib.pipelines.pipeline import Pipeline, Stage, load_pipeline
from recipes_lib.pipelines.runner import STATE, read_figure, run_pipeline

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
    parser.add_argument(
        "--check", action="store_true", help="hold the keys of every stage against its recipe, and run none"
    )
    parser.add_argument("--list", action="store_true", help="show the commands, and run none")
    options = parser.parse_args(list(argv))
    pipeline = load_pipeline(options.pipeline, options.output_dir)
    chosen = choose_stages(pipeline, options.first or options.only, options.last or options.only)
    if options.list:
        sys.stdout.write("".join(f"{stage.name}: {shlex.join(stage.words)}\n" for stage in chosen))
        return EXIT_DONE
    if options.check:
        check_stages(options.pipeline, options.output_dir)
        sys.stdout.write(f"{len(pipeline.stages)} stages, ready to run\n")
        return EXIT_DONE
    code = run_pipeline(pipeline, chosen, lambda line: sys.stdout.write(f"\n{line}\n"))
    sys.stdout.write("\n" + "".join(f"{line}\n" for line in describe(pipeline)))
    return code


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


def check_stages(path: Path, output_dir: str | None) -> None:
    """Load the configuration of every recipe, as if what the stages before it write were there.

    Raises:
        ConfigError: Of all stages together.
    """
    problems: list[Problem] = []
    with tempfile.TemporaryDirectory() as folder:
        # The same pipeline with its outputs in a folder of their own, where each of them is put.
        for stage in load_pipeline(path, folder).stages:
            if stage.recipe:
                try:
                    _load(stage)
                except ConfigError as error:
                    problems += [
                        Problem(f"{stage.name}: {problem.where}", problem.found, problem.remedy)
                        for problem in error.problems
                    ]
            if stage.output.suffix:
                stage.output.parent.mkdir(parents=True, exist_ok=True)
                stage.output.touch()
            else:
                stage.output.mkdir(parents=True, exist_ok=True)
    if problems:
        raise ConfigError(*problems)


def _load(stage: Stage) -> None:
    commands = {"corpus": parse_corpus_command, "eval": parse_eval_command}
    if stage.recipe in commands:
        commands[stage.recipe](stage.argv)
    else:
        load_config(stage.recipe, stage.argv)


def describe(pipeline: Pipeline) -> list[str]:
    """Return a table of the stages: figure, and where the output is."""
    lines = []
    for stage in pipeline.stages:
        figures = ((name, read_figure(stage.output, name)) for name in (*stage.require, *_SHOWN))
        shown = next((f"{name} {value:.4g}" for name, value in figures if value is not None), "")
        told = shown if stage.output.exists() else "not there yet"
        lines.append(f"{stage.name:20} {told:28} {stage.output}")
    return [*lines, f"state: {pipeline.output_dir / STATE}"]

"""``recipes run``: run the stages of a pipeline file, such as pretraining, SFT and evaluation; and ``recipes demo``."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from recipes_lib.cli import COMMANDS, spell_flags
from recipes_lib.commands.job import CLUSTERS, submit_stages
from recipes_lib.config.command_flags import FLAGS, CommandParser, add_flags
from recipes_lib.config.corpus_keys import CorpusConfig
from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.loader import load_config
from recipes_lib.config.paths import RECIPES, find_launch_file, find_shipped
from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.config.table import RECIPE_NAMES
from recipes_lib.errors import EXIT_DONE, ConfigError, MissingPath, Problem, UserError, suggest, verify_extra
from recipes_lib.files import parse_number
from recipes_lib.pipelines.children import find_program
from recipes_lib.pipelines.pipeline import Pipeline, Stage, load_pipeline
from recipes_lib.pipelines.runner import STATE_FILE, list_figures, read_state, run_pipeline
from recipes_lib.processes import count_cores
from recipes_lib.quantities import format_duration, pluralize
from recipes_lib.report.overview import find_stage_status, format_rows, write_overview
from recipes_lib.training.layouts.compatibility import verify_combination
from recipes_lib.training.layouts.launch_environment import plan_launch, read_environment

_SHOWN = ("eval_loss", "eval_rewards/accuracies", "eval_reward", "loss")
"""Metrics of the table, in order of preference: a stage shows the first that it has."""
_EXTRAS = {"corpus": ("datatrove", "ftfy", "trafilatura", "warcio"), "eval": ("lm_eval",)}
"""Recipe -> packages of the extra of its name."""
_OF_EXECUTORS = {**FLAGS["machines"], **FLAGS["clouds"], "gpu": {}}
"""Flags that describe the machines of an executor."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code of the first stage that fails.

    Raises:
        ConfigError: The pipeline file, one of its stages or a flag is invalid, or an extra is not installed.
    """
    parser = _build_parser()
    options = parser.parse_args(list(argv))
    pipeline = load_pipeline(options.pipeline, options.output_dir)
    # Not `or`: an empty name, of an unset shell variable, would select all stages.
    ends = (options.only if name is None else name for name in (getattr(options, "from"), options.until))
    chosen = choose_stages(pipeline, *ends)
    if problems := list(_find_unknown_commands(pipeline)):
        raise ConfigError(*problems)
    places = {
        flag: given.get("dest", flag) for flag, given in _OF_EXECUTORS.items() if flag != "gpu" or not options.plan
    }
    unused = [flag for flag, at in places.items() if getattr(options, at) != parser.get_default(at)]
    if unused and options.executor == "local":
        found = "has no effect on stages that run here"
        raise ConfigError(Problem(f"--{unused[0]}", found, "add --executor, or remove it"))
    if options.list:
        sys.stdout.write("".join(f"{stage.name}: {shlex.join(stage.words)}\n" for stage in chosen))
        return EXIT_DONE
    if options.plan:
        lines = plan_stages(options.pipeline, options.gpu or "H100", options.num_processes, options.device_hour_price)
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        return EXIT_DONE
    if options.check:
        check_stages(options.pipeline, pipeline, [] if options.keys else [stage.name for stage in chosen])
        sys.stdout.write(f"{pluralize(len(pipeline.stages), 'stage')}, ready to run\n")
        return EXIT_DONE
    if options.executor != "local":
        if options.jobs > 1:
            found = f"has no effect on stages that {options.executor} starts"
            raise ConfigError(Problem("--jobs", found, "remove it"))
        check_stages(options.pipeline, pipeline, [])
        submit_stages(options, pipeline, chosen)
        return EXIT_DONE
    # Evaluations run last, after days.
    for recipe in sorted(_EXTRAS.keys() & {stage.recipe for stage in chosen}):
        verify_extra(str(options.pipeline), recipe, *_EXTRAS[recipe])
    check_stages(options.pipeline, pipeline, [], [stage.name for stage in chosen])
    code = run_pipeline(
        pipeline,
        chosen,
        lambda line: sys.stdout.write(f"\n{line}\n"),
        on_change=lambda: write_overview(pipeline.output_dir),
        launcher=options.launcher,
        slots=find_slots(options.jobs, read_environment()),
    )
    sys.stdout.write("\n" + "".join(f"{line}\n" for line in describe(pipeline)))
    return code


def demo(argv: Sequence[str]) -> int:
    """Run ``recipes demo``; return the exit code of the first stage that fails.

    Raises:
        ConfigError: As ``run_demo``, or the extra ``corpus`` or ``eval`` is not installed.
        DataError: As ``run_demo``.
    """
    options = CommandParser("demo").parse_args(argv)
    # Its evaluations run last, after minutes.
    verify_extra("recipes demo", ",".join(_EXTRAS), *chain.from_iterable(_EXTRAS.values()))
    from recipes_lib.demo.walkthrough import run_demo  # Imports torch, which `--help` does not need.

    file = find_shipped(RECIPES / "pipelines" / "demo.yaml").resolve()
    return run_demo(file, options.output_dir, num_jobs=min(2, count_cores()))


def find_slots(num_jobs: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the environment variables of each of the stages that may run at the same time: its GPU, if there are any.

    Raises:
        ConfigError: There are fewer GPUs than stages.
    """
    if num_jobs == 1:
        return [{}]
    from recipes_lib.hardware import count_accelerators

    num_gpus = count_accelerators()
    if 0 < num_gpus < num_jobs:
        found = f"{num_jobs} stages at the same time, where torch finds {pluralize(num_gpus, 'GPU')}"
        raise ConfigError(Problem("--jobs", found, f"write at most {num_gpus}"))
    names = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = names if len(names) >= num_gpus and names[0] else list(map(str, range(num_gpus)))
    return [{"CUDA_VISIBLE_DEVICES": names[job]} if num_gpus else {} for job in range(num_jobs)]


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser("run")
    parser.add_argument("pipeline", type=find_pipeline, help="YAML file (docs/pipelines.md), or name of a shipped one")
    text = "where stages run: here, as SLURM jobs in order, or in one job of a cloud (default: %(default)s)"
    executors = ("local", *(name for name, cluster in CLUSTERS.items() if cluster.submit))
    parser.add_argument("--executor", default="local", choices=executors, help=text)
    machines = parser.add_argument_group("other executors; with slurm, for stages with a launch file")
    add_flags(machines, FLAGS["machines"])
    add_flags(parser.add_argument_group("--executor kubernetes and skypilot"), FLAGS["clouds"])
    return parser


def find_pipeline(text: str) -> Path:
    """Return the path of a pipeline file, given by its path or as the name of a shipped one, such as ``zephyr``.

    Raises:
        ConfigError: There is no such file or name, or it is ``demo``, whose data ``recipes demo`` has to write first.
    """
    folder = RECIPES / "pipelines"
    names = sorted({file.stem for file in find_shipped(folder).glob("*.yaml")} - {"demo"})
    # A folder may have the name of a shipped pipeline: `recipes demo` writes `demo`.
    if find_shipped(Path(text)).is_file():
        return Path(text)
    if text in names:
        # Relative, as in the container image, where a submitted job looks for it.
        return folder / f"{text}.yaml"
    remedy = suggest(text, names, f"write the path of a YAML file, or one of {', '.join(names)}", "`recipes run {}`")
    remedy = "`recipes demo` writes its data and runs it" if text == "demo" else remedy
    remedy = f"`recipes launch {text}` starts a recipe" if text in RECIPE_NAMES else remedy
    raise ConfigError(Problem(text, "is a folder" if Path(text).is_dir() else "there is no such pipeline", remedy))


def _find_unknown_commands(pipeline: Pipeline) -> Iterator[Problem]:
    for stage in pipeline.stages:
        if stage.command and stage.command not in COMMANDS:
            remedy = suggest(stage.command, COMMANDS, f"the commands are {', '.join(COMMANDS)}", "{}")
            yield Problem(f"{stage.name}: command", f"there is no `recipes {stage.command}`", remedy)


def choose_stages(pipeline: Pipeline, first: str | None, last: str | None) -> list[Stage]:
    """Return the stages from ``first`` to ``last``, inclusive; ``None`` is the first or the last of all.

    The name of a sweep or a loop stands for all of its stages.

    Raises:
        ConfigError: There is no such stage, or ``first`` comes after ``last``.
    """
    names = [stage.name for stage in pipeline.stages]
    members = {**pipeline.entries, **{name: [name] for name in names}}
    for name in (first, last):
        if name is not None and name not in members:
            remedy = suggest(name, members, f"the stages are {', '.join(names)}", "{}")
            raise ConfigError(Problem("recipes run", f"there is no stage {name!r}", remedy))
    begin = 0 if first is None else names.index(members[first][0])
    end = len(names) if last is None else names.index(members[last][-1]) + 1
    if begin >= end:
        raise ConfigError(Problem("recipes run", f"{first} comes after {last}", "swap --from and --until"))
    return list(pipeline.stages[begin:end])


def describe(pipeline: Pipeline) -> list[str]:
    """Return a table of the stages, line by line: status, time, a metric, sweep keys and output."""
    state = read_state(pipeline.output_dir / STATE_FILE)
    rows: list[tuple[str, ...]] = [("stage", "status", "time", "figure", "keys", "output")]
    rows += [_describe_stage(pipeline.output_dir, stage, state.get(stage.name) or {}) for stage in pipeline.stages]
    return [*format_rows(rows), f"overview: {pipeline.output_dir / 'index.html'}"]


def _describe_stage(folder: Path, stage: Stage, entry: Mapping[str, Any]) -> tuple[str, ...]:
    figures = list_figures(stage.output)
    shown = next((f"{name} {figures[name]:.4g}" for name in (*stage.require, *_SHOWN) if name in figures), "")
    seconds = parse_number(entry.get("seconds"))
    swept = " ".join(f"{key}={value}" for key, value in stage.swept.items())
    time = "" if seconds is None else format_duration(seconds)
    return stage.name, find_stage_status(folder, stage.name, entry), time, shown, swept, str(stage.output)


def check_stages(
    path: Path, pipeline: Pipeline, inspected: Sequence[str], started: Sequence[str] | None = None
) -> None:
    """Check keys, launch file and flags of every stage, with placeholders for the outputs of earlier stages.

    A configuration that an earlier stage will write is not checked.

    For stages whose inputs exist, ``recipes check`` also inspects model and data, and prints its findings.

    Args:
        path: The pipeline file.
        pipeline: The pipeline as it will run.
        inspected: Names of the stages that ``recipes check`` may inspect.
        started: Names of the stages that start here now. Of these, unfinished ones are checked, except for missing
            files, which programs of earlier stages may write; ``None`` to check all stages.

    Raises:
        ConfigError: Problems of all stages.
    """
    problems: list[Problem] = []
    # Before placeholders are created, also at outputs outside of ``output_dir``.
    existing = {stage.name for stage in pipeline.stages if stage.output.exists()}
    state = read_state(pipeline.output_dir / STATE_FILE)
    with _using_placeholders(path) as (placeholder, put_output):
        for real, stage in zip(pipeline.stages, placeholder.stages, strict=True):
            is_done = (state.get(real.name) or {}).get("status") == "done"
            with _naming_problems(real.name, problems):
                if started is not None and (is_done or real.name not in started):
                    pass
                elif real.recipe and real.name in inspected and existing.issuperset(real.needs) and not is_done:
                    sys.stdout.write(f"\n{real.name}: recipes check\n")
                    _inspect(real)
                elif stage.recipe and stage.has_given_config:
                    _load(stage)
                elif stage.command in FLAGS:
                    _parse_flags(stage)
                # A program below the outputs is built by an earlier stage.
                elif str(placeholder.output_dir) not in stage.words[0] and (missing := find_program(stage.words)):
                    raise ConfigError(MissingPath("run", missing, "install it, or write its path"))
            # After its own check, so that a stage cannot read its own output. Another run may just write one outside of
            # `output_dir`: its lock is not held yet.
            if started is None or stage.output.is_relative_to(placeholder.output_dir):
                put_output(stage)
    if started is not None:
        problems = [problem for problem in problems if not isinstance(problem, MissingPath)]
    if problems:
        raise ConfigError(*problems)


@contextmanager
def _using_placeholders(path: Path) -> Iterator[tuple[Pipeline, Callable[[Stage], bool]]]:
    """Yield the pipeline with its outputs in a temporary folder, and the function that creates the output of a stage.

    The function returns ``False`` for an existing output, which is outside of ``output_dir`` and is not changed; what
    it creates there is deleted at the end.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def put_output(stage: Stage) -> bool:
            if stage.output.exists():
                return False
            # An output with a suffix is a file, except that of a recipe: a stage may be called `sft-v1.5`.
            is_file = bool(stage.output.suffix) and not stage.recipe
            created = next(place for place in (*reversed(stage.output.parents), stage.output) if not place.exists())
            stack.callback(created.unlink if is_file and created == stage.output else partial(shutil.rmtree, created))
            (stage.output.parent if is_file else stage.output).mkdir(parents=True, exist_ok=True)
            if is_file:
                stage.output.touch()
            return True

        yield load_pipeline(path, folder), put_output


@contextmanager
def _naming_problems(name: str, problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a ``UserError`` in the block to ``problems``, each prefixed by the name of its stage."""
    try:
        yield
    except UserError as error:
        problems += [replace(one, where=f"{name}: {one.where}") for one in error.problems]


def _inspect(stage: Stage) -> None:
    """Run ``recipes check`` for a stage.

    Raises:
        ConfigError: ``recipes check`` has found and printed problems.
    """
    from recipes_lib.commands.check import main as check

    hardware = ["--hardware", stage.launch] if stage.launch else []
    if check(["--recipe", stage.recipe, *hardware, *stage.argv]) != EXIT_DONE:
        raise ConfigError(Problem("recipes check", "found the problems above", "fix them"))


def _load(stage: Stage) -> None:
    commands = {"corpus": CorpusConfig.parse, "eval": EvalConfig.parse, "synthesize": SynthesisConfig.parse}
    if stage.recipe in commands:
        commands[stage.recipe](stage.argv)
        return
    config = load_config(stage.recipe, stage.argv)
    if stage.launch:
        file = find_launch_file(stage.launch)
        verify_combination(config, plan_launch(file), str(file))


def _parse_flags(stage: Stage) -> None:
    """Parse the flags of a command; keys of a recipe, and flags that ``flags.yaml`` does not have, are not verified.

    Raises:
        ConfigError: A flag is misspelt, invalid or missing.
    """
    given = stage.words[stage.words.index(stage.command) + 1 :]
    try:
        CommandParser(stage.command).parse_known_args(spell_flags(given))
    except SystemExit as ended:  # argparse has printed the reason.
        if ended.code:
            remedy = f"`recipes {stage.command} --help` lists its flags"
            raise ConfigError(Problem(f"recipes {stage.command}", "refuses its flags, as above", remedy)) from ended


def plan_stages(path: Path, gpu: str, num_processes: int | None, price: float | None) -> list[str]:
    """Return a table of memory, hours and cost of every stage, and their sum, line by line.

    A model that a stage will write is assumed to have the shape of the model that the stage starts from. Hours are
    estimated for training whose length does not depend on its data (``max_steps``, ``max_tokens``); not for commands,
    corpora and evaluations, and not for stages whose configuration or model a command will write (``merge`` and
    ``export`` keep the shape).

    Args:
        path: The pipeline file.
        gpu: Name of the GPU.
        num_processes: Processes of stages whose launch file is for several; ``None``: the number in the launch file.
        price: Price of a GPU hour; ``None`` to omit costs.

    Raises:
        ConfigError: The configuration of a stage is invalid, a model's configuration cannot be loaded, or the peak of
            the GPU is unknown.
    """
    from recipes_lib.commands.planning.plan import StagePlan, plan_stage

    rows, plans, problems = [("stage", "GPUs", "GB each", "hours", "cost")], dict[str, StagePlan](), list[Problem]()
    created = list[Path]()
    with _using_placeholders(path) as (placeholder, put_output):
        outputs = {stage.name: stage.output for stage in placeholder.stages}
        for stage in placeholder.stages:
            if is_placeholder := put_output(stage):
                created.append(stage.output)
            plans[stage.name] = StagePlan(0)
            models = {word for flag, word in pairwise(stage.argv) if flag.endswith("model_name_or_path")}
            shapes = [file for need in stage.needs if (file := outputs[need] / "config.json").is_file()]
            # Also outputs of stages whose own plan has failed.
            unplanned = {str(output) for output in created if not (output / "config.json").is_file()}
            if is_placeholder and stage.command in ("export", "merge") and shapes:
                shutil.copy(shapes[0], stage.output)
            elif stage.recipe in RECIPE_NAMES and stage.has_given_config and not models & unplanned:
                with _naming_problems(stage.name, problems):
                    # The placeholder of its output has a model of this shape, for the plans of later stages.
                    shape, config = stage.output if is_placeholder else None, load_config(stage.recipe, stage.argv)
                    plans[stage.name] = plan_stage(config, stage.launch, gpu, num_processes, shape)
    if problems:
        raise ConfigError(*problems)
    for name, plan in plans.items():
        memory = "" if plan.memory is None else f"{plan.memory / 1e9:.1f}"
        cost = "" if price is None or plan.hours is None else f"{plan.hours * plan.num_gpus * price:,.2f}"
        hours = "" if plan.hours is None else f"{plan.hours:.2f}"
        rows.append((name, str(plan.num_gpus or ""), memory, hours, cost))
    unknown = [name for name, plan in plans.items() if plan.hours is None]
    if len(unknown) < len(plans):
        total = sum(plan.hours or 0 for plan in plans.values())
        spent = sum((plan.hours or 0) * plan.num_gpus for plan in plans.values())
        rows.append(("in all", "", "", f"{total:.2f}", "" if price is None else f"{spent * price:,.2f}"))
    remedy = "set max_steps and max_length, or plan one stage alone by `recipes plan --num_rows`"
    note = [f"without the time of {', '.join(unknown)}: {remedy}"] if unknown else []
    if large := [name for name, plan in plans.items() if not plan.fits]:
        note += [f"does not fit {gpu}: {', '.join(large)}: `recipes plan --gpus` searches for what does"]
    return [*format_rows(rows), f"planned for {gpu} with published efficiencies, not measured", *note]

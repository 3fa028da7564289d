"""``recipes distill-chain``: distil through teacher assistants, each the next teacher, and compare with none."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recipes_lib.config.loader import load_for_command
from recipes_lib.config.schema import SECTIONS, RecipeConfig, read_training
from recipes_lib.config.table import load_table
from recipes_lib.errors import EXIT_DONE, ConfigError, Problem
from recipes_lib.files import read_lines, read_record

RESULT_FILE: Final = "chain.json"
FORWARD: Final = 1 / 3
"""FLOPs of a teacher's forward pass over those of a training step: a backward pass costs two forward passes."""
_COLUMNS: Final = ("run", "teacher", "tokens", "FLOP", "loss", "bits/byte")


@dataclass(frozen=True, slots=True)
class ChainRun:
    """One training run of the chain, or a baseline.

    Attributes:
        name: Folder name under ``output_dir``.
        recipe: ``distill`` or ``sft``.
        model: Initial model.
        teacher: ``None`` to train on labels only.
        factor: Multiplies the number of steps of the configuration.
    """

    name: str
    recipe: str
    model: str
    teacher: str | None = None
    factor: float = 1.0


def main(argv: Sequence[str]) -> int:
    """Run every unfinished training, and print a comparison; return the exit code of one that fails.

    Raises:
        ConfigError: A flag or the configuration is wrong, or there is nothing to compare by.
    """
    parser = argparse.ArgumentParser(prog="recipes distill-chain", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", metavar="F", help="a recipe of distillation with `assistant_model_names_or_paths`")
    parser.add_argument("--compare", action="store_true", help="train without assistants, and without a teacher, too")
    told = "launcher of the recipes, such as 'accelerate launch --config_file F' (default: this Python)"
    parser.add_argument("--launcher", default=shlex.quote(sys.executable), help=told)
    options, overrides = parser.parse_known_args(argv)
    config = load_for_command("distill", overrides, options.config)
    verify_chain(config, is_compared=options.compare)

    def start(run: ChainRun) -> int:
        path = write_run(config, run)
        command = [*shlex.split(options.launcher), str(Path("recipes") / f"{run.recipe}.py"), "--config", str(path)]
        sys.stdout.write(f"\n{run.name}: {shlex.join(command)}\n")
        sys.stdout.flush()
        return subprocess.run(command, check=False).returncode

    return go_through(config, start, is_compared=options.compare)


def verify_chain(config: RecipeConfig, *, is_compared: bool) -> None:
    """Raise if the configuration does not describe a chain.

    Raises:
        ConfigError: There is no assistant, no held-out text to compare by, or no recipe here to run.
    """
    where = str(config.path or "command line")
    problems = []
    if not config.distillation.assistant_model_names_or_paths:
        remedy = "write `assistant_model_names_or_paths: [...]`, the largest first, or run recipes/distill.py"
        problems.append(Problem(where, "there is no assistant between teacher and student", remedy))
    if is_compared and config.data.dataset_test_split is None and config.data.test_split_size is None:
        problems.append(Problem(where, "nothing is held out to compare by", "write `dataset_test_split`"))
    if not (Path("recipes") / "distill.py").is_file():
        problems.append(Problem("recipes/distill.py", "is not here", "start from the project's folder"))
    if problems:
        raise ConfigError(*problems)


def go_through(config: RecipeConfig, start: Callable[[ChainRun], int], *, is_compared: bool) -> int:
    """Run the trainings one after the other; a finished one returns at once.

    Args:
        config: Of the chain.
        start: Makes a run and returns its exit code.
        is_compared: Whether to make those besides the chain.
    """
    output_dir = Path(str(config.training["output_dir"]))
    hops = list_hops(config, output_dir)
    for run in hops:
        if code := start(run):
            return code
    runs = list(hops)
    if is_compared:
        own, teacher = hops[-1].model, str(hops[0].teacher)
        direct, labels = ChainRun("direct", "distill", own, teacher), ChainRun("labels", "sft", own)
        for run in (direct, labels):
            if code := start(run):
                return code
        spent = sum(measure(hop, output_dir)["flops"] for hop in hops)
        for run in (direct, labels):
            factor = spent / measure(run, output_dir)["flops"]
            longer = dataclasses.replace(run, name=f"{run.name}_at_equal_compute", factor=factor)
            if code := start(longer):
                return code
            runs += [run, longer]
    results = [measure(run, output_dir) for run in runs]
    (output_dir / RESULT_FILE).write_text(json.dumps(results, indent=1), encoding="utf-8")
    sys.stdout.write(f"\n{format_results(results)}\n{output_dir / RESULT_FILE}\n")
    return EXIT_DONE


def list_hops(config: RecipeConfig, output_dir: Path) -> list[ChainRun]:
    """Return the runs of the chain: each student is the teacher of the next."""
    students = [*(config.distillation.assistant_model_names_or_paths or []), str(config.model.model_name_or_path)]
    teacher, hops = str(config.distillation.teacher_model_name_or_path), []
    for number, student in enumerate(students, start=1):
        hops.append(ChainRun(f"hop_{number}", "distill", student, teacher))
        teacher = str(output_dir / hops[-1].name)
    return hops


def write_run(config: RecipeConfig, run: ChainRun) -> Path:
    """Write the configuration of a run beside its folder, and return the path."""
    output_dir = Path(str(config.training["output_dir"]))
    values: dict[str, Any] = {
        name: value for section in SECTIONS for name, value in dataclasses.asdict(getattr(config, section)).items()
    }
    values |= config.training
    changed = {
        "model_name_or_path": run.model,
        "teacher_model_name_or_path": run.teacher,
        "assistant_model_names_or_paths": None,
        "output_dir": str(output_dir / run.name),
        **_lengthen(config.training, run.factor),
    }
    if run.model != config.model.model_name_or_path:
        changed["model_revision"] = None
    if run.teacher != config.distillation.teacher_model_name_or_path:
        changed["teacher_model_revision"] = None
    table = load_table(run.recipe).keys
    lines = [
        f"{name}: {json.dumps(value, default=str)}\n"
        for name, value in (values | changed).items()
        # What follows from other keys follows again.
        if name in table and value != table[name].default and not config.provenance[name].startswith("derived")
    ]
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / f"{run.name}.yaml"
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _lengthen(training: Mapping[str, Any], factor: float) -> dict[str, Any]:
    if factor == 1.0:
        return {}
    if read_training(training, "max_steps") > 0:
        return {"max_steps": max(1, round(training["max_steps"] * factor))}
    return {"num_train_epochs": read_training(training, "num_train_epochs") * factor}


def measure(run: ChainRun, output_dir: Path) -> dict[str, Any]:
    """Return tokens, FLOPs of student and teacher, and held-out metrics of a finished run."""
    folder = output_dir / run.name
    events = [event for event in read_lines(folder / "metrics.jsonl") if event]
    train = [event for event in events if event["kind"] == "train"][-1]
    evaluated: dict[str, Any] = next((event for event in reversed(events) if "eval_loss" in event), {})
    flops = float(train["num_flops"])
    if run.teacher is not None:
        length = read_record(folder / "run.json", {"data": dict})["data"]["train"]["length_p50"]
        flops += FORWARD * count_flops(run.teacher, length, train["num_tokens"], train["num_target_tokens"])
    return {
        "run": run.name,
        "model": run.model,
        "teacher": run.teacher,
        "num_tokens": train["num_tokens"],
        "flops": flops,
        "eval_loss": evaluated.get("eval_loss"),
        "eval_bits_per_byte": evaluated.get("eval_bits_per_byte"),
    }


def count_flops(model: str, length: int, num_tokens: int, num_targets: int) -> float:
    """Return the FLOPs of training a model on a number of tokens."""
    from recipes_lib.config.schema import ModelConfig
    from recipes_lib.models.loading import load_model_config
    from recipes_lib.planning.compute import compute_flops_per_token

    model_config, _ = load_model_config(ModelConfig(model_name_or_path=model))
    return compute_flops_per_token(model_config, length).total(num_tokens, num_targets)


def format_results(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the runs as a Markdown table."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for result in results:
        figures = [result["eval_loss"], result["eval_bits_per_byte"]]
        cells = [
            result["run"],
            Path(result["teacher"]).name if result["teacher"] else "none",
            f"{result['num_tokens']:,}",
            f"{result['flops']:.3g}",
            *("" if figure is None else f"{figure:.4f}" for figure in figures),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)

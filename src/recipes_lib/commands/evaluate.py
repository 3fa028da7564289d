"""``recipes eval``: benchmark scores with standard errors; ``recipes eval compare``: paired comparison of models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from recipes_lib.config.command_flags import CommandParser
from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.errors import EXIT_DONE, ConfigError, Problem, UserError, translate_exit_code, verify_extra
from recipes_lib.files import LOCK_FILE, find_record, is_locked, link_or_copy, read_record, replace_record
from recipes_lib.quantities import pluralize

_SECONDS: Final = 10
"""Polling interval of ``eval watch``."""
_QUIET_SECONDS: Final = 1800
"""Age of the last metrics of a run that ``eval watch`` takes for killed, if its lock has never been seen from here."""
_ASKED: Final = "watch.json"
"""Configuration of the results beside it, by which ``eval watch`` recognises its own."""
_WITHOUT_EFFECT: Final = (
    "model_name_or_path",
    "output_dir",
    "batch_size",
    "max_batch_size",
    "num_concurrent",
    "use_cpu",
)
"""Keys without effect on scores, and those that ``eval watch`` sets."""
_STATES: Final = (".pt", ".pth", ".bin")
"""Suffixes of optimizer and generator states, which an evaluation does not need; weights are never pickles."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code, with ``watch`` that of an evaluation that fails.

    Raises:
        ConfigError: The configuration is invalid, or the extra ``eval`` is not installed.
        DataError: The model's logits are not finite, or a folder to compare holds no evaluation.
    """
    if argv and argv[0] == "compare":
        compare(argv[1:])
        return EXIT_DONE
    if argv and argv[0] == "watch":
        return watch(argv[1:])
    config = _parse(argv)
    from recipes_lib.evaluation.harness import evaluate_model
    from recipes_lib.publish.card import add_scores
    from recipes_lib.report.html_pages import write_eval_report

    # `None` on all ranks but the first, which writes the results.
    if (record := evaluate_model(config)) is None:
        return EXIT_DONE
    report = write_eval_report(config.folder)
    sys.stdout.writelines(f"{line}\n" for line in describe(record))
    sys.stdout.write(f"every question and answer: {report}\n")
    try:
        add_scores(Path(config.model_name_or_path), record)
    except (OSError, UserError) as error:  # The model of another user may be read-only, or its record invalid.
        sys.stderr.write(f"warning: card and report of the model lack these scores: {error}\n")
    return EXIT_DONE


def check(argv: Sequence[str]) -> int:
    """``recipes check`` for an evaluation: load tasks and their data, and the configuration of the model.

    Raises:
        ConfigError: As ``main``.
    """
    config = _parse(argv)
    from recipes_lib.evaluation.harness import describe_model
    from recipes_lib.evaluation.suites import load_tasks

    for name, task in load_tasks(config)["tasks"].items():
        examples = pluralize(task.get_config("num_fewshot"), "example")
        sys.stdout.write(f"{name}: {pluralize(len(task.eval_docs), 'question')}, {examples}\n")
    sys.stdout.write(f"model: {json.dumps(describe_model(config))}\n\nready to evaluate\n")
    return EXIT_DONE


def watch(argv: Sequence[str]) -> int:
    """``recipes eval watch``: evaluate every checkpoint of a run while it trains elsewhere, until it ends.

    Weights are hard-linked, or exported if transformers does not load them (shards, RL), so that the run may delete the
    checkpoint meanwhile. Results are written to ``eval/checkpoint-N`` in the folder of the run; checkpoints with
    results are skipped.

    Raises:
        ConfigError: The folder holds no run, a flag is invalid, or there are results of other tasks or settings.
    """
    options, given = CommandParser("eval watch").parse_known_args(argv)
    from recipes_lib.training.checkpoints.manifest import is_complete, list_checkpoints
    from recipes_lib.training.run import RUN_FILE

    if not (options.run / RUN_FILE).is_file():
        remedy = "name the output_dir of a run that has started"
        raise ConfigError(Problem(str(options.run), f"there is no {RUN_FILE}", remedy))
    config = EvalConfig.parse([f"--model_name_or_path={options.run}", *given])
    asked = {key: value for key, value in config.list_values().items() if key not in _WITHOUT_EFFECT}
    sees_lock = False
    while True:
        # Asked before the checkpoints are listed: a run that ends in between has written its last one.
        is_held = is_locked(options.run / LOCK_FILE, of_process=True)
        # Locks of this run are visible here if one was seen: without it, the run has ended, be it by SIGKILL.
        sees_lock = sees_lock or is_held is True
        is_alive = is_held is not False or (not sees_lock and _writes_metrics(options.run))
        is_running = is_alive and read_record(options.run / RUN_FILE).get("status") == "running"
        for _, checkpoint in reversed(list_checkpoints(options.run)):
            folder = (options.output_dir or options.run / "eval") / checkpoint.name
            if (folder / "eval.json").is_file():
                _refuse_others(folder, asked)
                continue
            if not is_complete(checkpoint):
                continue
            sys.stdout.write(f"{checkpoint.name}\n")
            sys.stdout.flush()
            if code := _evaluate_checkpoint(checkpoint, folder, given):
                code = translate_exit_code(code)  # Such as 137 after SIGKILL by the OOM killer.
                sys.stderr.write(f"{checkpoint.name}: its evaluation ended with exit code {code}\n")
                return code
            if (folder / "eval.json").is_file():
                replace_record(folder / _ASKED, asked)
        if not is_running:
            return EXIT_DONE
        time.sleep(_SECONDS)


def _refuse_others(folder: Path, asked: Mapping[str, Any]) -> None:
    """Raise if ``eval watch`` was asked for other tasks or settings when it evaluated into a folder.

    Raises:
        ConfigError: It was; names the keys.
    """
    # Results of `recipes eval` name their settings, but not what its tasks were asked for by.
    before = find_record(folder / _ASKED) or find_record(folder / "eval.json").get("settings") or {}
    if keys := [key for key, value in asked.items() if before.get(key, value) != value]:
        found = f"holds results with another value of {', '.join(keys)}"
        raise ConfigError(Problem(str(folder), found, "name another folder for these: --output_dir DIR"))


def _writes_metrics(run: Path) -> bool:
    """Return whether a run without a lock still writes metrics.

    It was killed, or is on another machine and a file system with locks local to a machine, as Lustre or NFS can be.
    """
    metrics = run / "metrics.jsonl"
    # A time far in the future, as of a wrong clock, is not recent either.
    return metrics.exists() and abs(time.time() - metrics.stat().st_mtime) < _QUIET_SECONDS


def _evaluate_checkpoint(checkpoint: Path, folder: Path, flags: Sequence[str]) -> int:
    """Run ``recipes eval`` in a subprocess, on a link or an export of a checkpoint's weights; return its exit code."""
    from recipes_lib.models.model_files import is_model
    from recipes_lib.training.checkpoints.manifest import is_complete

    recipes, model, code = [sys.executable, "-P", "-m", "recipes_lib.cli"], folder / "model", EXIT_DONE
    shutil.rmtree(model, ignore_errors=True)
    try:
        if is_model(checkpoint):
            model.mkdir(parents=True)
            for file in checkpoint.iterdir():
                if file.is_file() and file.suffix not in _STATES:
                    link_or_copy(file, model / file.name)
            is_whole = is_complete(checkpoint)
        else:
            code = subprocess.run([*recipes, "export", checkpoint, model], check=False).returncode
            is_whole = not code or is_complete(checkpoint)
        # The run may have deleted the checkpoint file by file meanwhile; a finished export has been verified.
        if not is_whole:
            raise FileNotFoundError
        command = [*recipes, "eval", str(model), *flags, "--output_dir", str(folder)]
        return code or subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        sys.stdout.write(f"{checkpoint.name}: skipped, the run has deleted it\n")
        return EXIT_DONE
    finally:
        shutil.rmtree(model, ignore_errors=True)


def compare(argv: Sequence[str]) -> None:
    """``recipes eval compare``: score differences of models on the same questions, with confidence intervals.

    With ``--judge``, win rates of their answers instead (``generated/judge_models.py``).

    Raises:
        ConfigError: A flag is wrong, or the extra ``eval`` is not installed.
        DataError: A folder holds no evaluation.
    """
    if any(argument.partition("=")[0] == "--judge" for argument in argv):
        from recipes_lib.commands.generated.judge_models import main as judge_models

        judge_models(argv)
        return
    options = CommandParser("eval compare").parse_args(argv)
    if len(options.folders) < 2:
        raise ConfigError(Problem("recipes eval compare", "there is one folder", "name two or more"))
    verify_extra("recipes eval", "eval", "lm_eval")
    from recipes_lib.evaluation.score_comparison import compare_folders, format_rows

    # Without --output_dir, the evaluation of a model is in its folder.
    folders = [folder / "eval" if (folder / "eval" / "eval.json").is_file() else folder for folder in options.folders]
    rows = compare_folders(folders)
    sys.stdout.write("".join(f"{line}\n" for line in format_rows(rows)))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        replace_record(options.output, [row.describe() for row in rows])


def _parse(argv: Sequence[str]) -> EvalConfig:
    """Parse the configuration; accepts the model as a positional argument.

    Raises:
        ConfigError: It is invalid, or the extra ``eval`` is not installed.
    """
    given = list(argv)
    if given and not given[0].startswith("-") and not given[0].endswith((".yaml", ".yml")):
        given[0] = f"--model_name_or_path={given[0]}"
    config = EvalConfig.parse(given)
    verify_extra("recipes eval", "eval", "lm_eval")
    return config


def describe(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per score of groups and tasks, and warnings about answers that distort it."""
    for name, found in [*record["groups"].items(), *record["tasks"].items()]:
        for metric, score in found["scores"].items():
            error = "" if score["stderr"] is None else f" ± {1.96 * score['stderr']:.4f}"
            yield f"{name}: {metric} {score['value']:.4f}{error}, {found['num_questions']:,} questions"
        causes = {
            "num_cut": "did not fit and were truncated at the start",
            "num_empty": "have an empty answer",
            "num_reasoning": "have an answer whose reasoning (`<think>`), which `max_gen_toks` may have cut, was "
            "scored with it; a chat endpoint whose server removes the reasoning scores the answer alone",
        }
        for key, cause in causes.items():
            if found.get(key):
                yield f"warning: {name}: {found[key]:,} of {found['num_questions']:,} questions {cause}"

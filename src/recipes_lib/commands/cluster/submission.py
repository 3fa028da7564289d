"""``recipes run --executor slurm``: one batch job per stage, which starts when the stages that it needs have succeeded.

A job runs ``recipes run --only STAGE``, so that caching, gates and resuming are those of a local run.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from recipes_lib.commands.job import CPUS_PER_GPU, HOURS, SRUN, find_wrong_requests, write_job
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.files import read_record, replace_record
from recipes_lib.pipelines.pipeline import Pipeline, Stage
from recipes_lib.pipelines.runner import find_done

JOBS: Final = "jobs"
"""Folder of the batch scripts and their output, in the pipeline's ``output_dir``."""
RECORD: Final = "jobs.json"
"""In this folder: stage -> id of its last job."""


def submit_stages(options: argparse.Namespace, pipeline: Pipeline, chosen: Sequence[Stage]) -> None:
    """Submit the stages that are neither done nor queued, and print the job of each.

    Args:
        options: Flags of ``recipes run``: the pipeline's file, the executor, and those of ``add_machine_flags``.
        pipeline: All stages.
        chosen: Those to run, in order.

    Raises:
        ConfigError: Another executor, no SLURM, wrong flags, a stage that is needed and neither done nor submitted, or
            SLURM refuses a job.
    """
    if options.executor != "slurm":
        found = f"there is no executor {options.executor!r} for pipelines"
        remedy = "use local or slurm; for other clusters, write one job per recipe with `recipes job --to ...`"
        raise ConfigError(Problem("--executor", found, remedy))
    if problems := list(find_wrong_requests(options)):
        raise ConfigError(*problems)
    folder = pipeline.output_dir / JOBS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RECORD
    jobs: dict[str, str] = read_record(path, {"jobs": dict})["jobs"] if path.is_file() else {}
    done, queued = find_done(pipeline), _list_queued()
    live = {name: job for name, job in jobs.items() if job in queued}
    for stage in chosen:
        if stage.name in done or stage.name in live:
            told = f"queued before as job {live[stage.name]}" if stage.name in live else "done before"
        else:
            live[stage.name] = _submit(options, pipeline, stage, _find_needed_jobs(stage, done, live))
            # Written at once: a second command does not submit it again.
            jobs[stage.name] = live[stage.name]
            replace_record(path, {"jobs": jobs})
            told = f"submitted as job {live[stage.name]}"
        sys.stdout.write(f"{stage.name}: {told}\n")
    sys.stdout.write(f"scripts and output: {folder}\n")


def _find_needed_jobs(stage: Stage, done: set[str], live: Mapping[str, str]) -> list[str]:
    """Return the jobs that must succeed before a stage can start."""
    if missing := [need for need in stage.needs if need not in done and need not in live]:
        remedy = f"submit it too: --from {missing[0]}, or without --only"
        raise ConfigError(Problem(stage.name, f"needs {missing[0]}, which is neither done nor queued", remedy))
    return [live[need] for need in stage.needs if need in live]


def _submit(options: argparse.Namespace, pipeline: Pipeline, stage: Stage, needed: Sequence[str]) -> str:
    """Write the batch script of a stage, submit it, and return the id of its job."""
    folder = pipeline.output_dir / JOBS
    script = folder / f"{stage.name}.sh"
    script.write_text(write_job("slurm", _describe(options, pipeline, stage)), encoding="utf-8")
    words = ["sbatch", "--parsable", f"--output={folder / f'{stage.name}-%j.out'}", "--kill-on-invalid-dep=yes"]
    words += [f"--dependency=afterok:{':'.join(needed)}"] if needed else []
    told = _ask([*words, str(script)])
    if not (found := re.fullmatch(r"(\d+)(;\S*)?", told.strip())):
        raise ConfigError(Problem(shlex.join(words), f"answered {told[:200]!r}, not the id of a job", "see `squeue`"))
    return found[1]


def _describe(options: argparse.Namespace, pipeline: Pipeline, stage: Stage) -> dict[str, Any]:
    """Return the variables of the batch script of a stage: as ``describe_job``, of ``recipes run --only``."""
    is_launched = bool(stage.launch)
    num_nodes, gpus_per_node = (options.num_nodes, options.gpus_per_node) if is_launched else (1, 1)
    command = [sys.executable, "-m", "recipes_lib.cli", "run", str(options.pipeline), "--only", stage.name]
    command += ["--output_dir", str(pipeline.output_dir)]
    command += ["--launcher", shlex.join(SRUN)] if num_nodes > 1 else []
    return {
        "name": re.sub("[^A-Za-z0-9_.-]+", "-", f"{options.pipeline.stem}-{stage.name}"),
        "num_nodes": num_nodes,
        "gpus_per_node": gpus_per_node,
        "gpu": None,
        "hours": options.hours or HOURS,
        "cpus_per_gpu": options.cpus_per_gpu or (CPUS_PER_GPU if num_nodes * gpus_per_node == 1 else None),
        "secrets": options.secrets,
        # Where a run reads a request to stop, and leaves its record; other stages have no such folder.
        "output_dir": str(stage.output if stage.recipe else pipeline.output_dir / JOBS / stage.name),
        "starter": [],
        "command": command,
    }


def _list_queued() -> set[str]:
    """Return the ids of this user's jobs that wait or run."""
    return set(_ask(["squeue", "--me", "--noheader", "--format=%A"]).split())


def _ask(words: Sequence[str]) -> str:
    """Return what a command of SLURM prints.

    Raises:
        ConfigError: It is not there, or it failed.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        remedy = "run it on a login node of the cluster"
        raise ConfigError(Problem("--executor slurm", f"there is no {words[0]} here", remedy)) from error
    if done.returncode:
        found = f"failed: {done.stderr.strip()[:300] or f'exit code {done.returncode}'}"
        raise ConfigError(Problem(shlex.join(words), found, "correct it, and run the same command again"))
    return done.stdout

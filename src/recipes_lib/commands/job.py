"""``recipes job``: scripts and manifests that start a run on a cluster; pipeline stages as batch jobs.

A SLURM job of a stage runs ``recipes run --only STAGE``, so that caching, gates and resuming are the same as in a local
run. On SkyPilot and Kubernetes, which have no dependencies between jobs, one job runs all stages on one machine.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from posixpath import normpath
from typing import Any, Final, NamedTuple

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from recipes_lib import errors
from recipes_lib.commands.launch import PORT, find_recipe_name
from recipes_lib.config.command_flags import FLAGS, CommandParser, add_flags, find_problems
from recipes_lib.config.loader import load_config
from recipes_lib.config.paths import find_launch_file
from recipes_lib.config.table import RECIPE_NAMES, read_lists
from recipes_lib.errors import EXIT_DIVERGED, EXIT_PREEMPTED, EXIT_STALLED, EXIT_USER, STATUSES, ConfigError, Problem
from recipes_lib.files import read_record, replace_record
from recipes_lib.pipelines.pipeline import Pipeline, Stage
from recipes_lib.pipelines.runner import find_done
from recipes_lib.training.layouts.compatibility import verify_combination
from recipes_lib.training.layouts.launch_environment import plan_launch

JOBS: Final = "jobs"
"""Folder of the batch scripts and their output, in the ``output_dir`` of the pipeline."""
RECORD: Final = "jobs.json"
"""File in this folder: stage -> id of its last job."""
DATA: Final = "/data"
"""Mount point of the volume; the working directory of the image."""
CPUS_PER_GPU: Final = 8
"""CPUs requested per GPU of a shared machine (``flags.yaml``); most machines have more per GPU."""
HOURS: Final = 24
"""Default time limit of a job (``flags.yaml``)."""
SRUN: Final = ("srun", "--kill-on-bad-exit=1", "--ntasks-per-node=1", "--cpu-bind=none")
"""Command that starts one launcher on every node of a SLURM job. Without ``--cpu-bind=none`` the launcher and all of
its processes would share the cores of one task."""
_TEMPLATES: Final = Path(__file__).with_name("job_templates")
_CONSTANTS: Final = {
    "data": DATA,
    "port": PORT,
    "retries": 3,
    # Patterns for grep in `run.json`: the exit code of a launcher does not distinguish these ends.
    "resumable": f'"status": "({STATUSES[EXIT_PREEMPTED]}|{STATUSES[EXIT_STALLED]})"',
    "final": f'"status": "({STATUSES[EXIT_USER]}|{STATUSES[EXIT_DIVERGED]})"',
    **{name.lower(): code for name, code in vars(errors).items() if name.startswith("EXIT_")},
}
"""Constants of the templates, exit codes included; ``retries``: restarts after a failure of unknown cause."""


class Cluster(NamedTuple):
    """A cluster type.

    Attributes:
        template: File in ``job_templates/``.
        needed: Required flags.
        unsupported: Flags that have no effect there.
        submit: Command that submits the job of a pipeline.
        bucket: Part of the address of every bucket, for clusters that mount nothing else writable.
    """

    template: str
    needed: Sequence[str]
    unsupported: Sequence[str]
    submit: Sequence[str] = ()
    bucket: str = ""


CLUSTERS: Final = {name: Cluster(**row) for name, row in read_lists(_TEMPLATES / "clusters.yaml").items()}


def main(argv: Sequence[str]) -> None:
    """Run the command: write the file to standard output.

    Raises:
        ConfigError: The configuration or the launch file is invalid, or they are incompatible; a flag is wrong,
            missing or not supported for the cluster; or ``output_dir`` would be lost with the machine.
    """
    parser = CommandParser("job")
    parser.add_argument("--to", required=True, choices=CLUSTERS, help="type of the cluster")
    add_flags(parser, FLAGS["machines"] | FLAGS["clouds"])
    options, overrides = parser.parse_known_args(argv)
    sys.stdout.write(write_job(options.to, describe_job(options, overrides)))


def describe_job(options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the template variables of a run.

    Args:
        options: Flags of ``recipes job``.
        overrides: Keys of the configuration.

    Returns:
        The flags, and in addition or instead: ``name`` (lower case, digits and hyphens); ``command``, ``recipes
        launch`` with its flags, equal on every node; ``starter``, the words before it on SLURM; ``output_dir``, the
        folder of the run's record; ``cpus_per_gpu``, ``None`` to request whole machines.

    Raises:
        ConfigError: As ``main``.
    """
    recipe = find_recipe_name(options.recipe, options.config)
    place = ["--output_dir", options.output_dir] if options.output_dir else []
    if not {"--print-config", "--print_config"}.isdisjoint(overrides):
        raise ConfigError(Problem("recipes job", "that flag belongs to the recipe", "remove it"))
    config = load_config(recipe, ["--config", options.config, *place, *overrides])
    errors.raise_problems(_find_problems(options, options.to, [options.config]), "recipes job", ConfigError)
    output_dir = str(config.training["output_dir"])
    if options.to != "slurm":
        output_dir = _place_on_volume(Path(output_dir))
    name = options.name or _derive_name(Path(output_dir).name)
    # Names of JobSets, and of the clusters of SkyPilot, begin with a letter.
    if not re.fullmatch("[a-z]([a-z0-9-]{0,40}[a-z0-9])?", name):
        found = f"{name!r} is not a valid job name"
        remedy = "write --name with up to 42 lower-case letters, digits and hyphens, a letter first"
        raise ConfigError(Problem("--name", found, remedy))
    num_processes = options.num_nodes * options.gpus_per_node
    hardware = options.hardware or ("ddp" if num_processes > 1 else "single_gpu")
    file = find_launch_file(hardware)
    # The launch on the cluster would refuse it, after its wait in the queue.
    verify_combination(config, plan_launch(file, num_processes), str(file))
    command = ["recipes", "launch", "--recipe", recipe, "--config", options.config, "--hardware", hardware]
    command += ["--num_processes", str(num_processes), *overrides, "--output_dir", output_dir]
    cpus_per_gpu = options.cpus_per_gpu or (CPUS_PER_GPU if num_processes == 1 else None)
    derived = {"name": name, "command": command, "output_dir": output_dir, "cpus_per_gpu": cpus_per_gpu}
    return vars(options) | derived | {"starter": list(SRUN)}


def _place_on_volume(output_dir: Path, outputs: Sequence[Path] = ()) -> str:
    """Return an output directory, relative ones below ``DATA``: elsewhere, it would be lost with the machine.

    Raises:
        ConfigError: It or one of the ``outputs`` is elsewhere.
    """
    place = Path(normpath(DATA / output_dir))
    if lost := [one for one in (place, *outputs) if not one.is_relative_to(DATA)]:
        found = "is not on the volume, and would be lost with the machine"
        remedy = f"write a relative output_dir or one below {DATA}, and outputs of stages as ${{output_dir}}/..."
        raise ConfigError(*(Problem(str(one), found, remedy) for one in lost))
    return str(place)


def _derive_name(text: str) -> str:
    name = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    return f"run-{name}" if name[:1].isdigit() else name


def write_job(to: str, job: Mapping[str, Any]) -> str:
    """Return the file that starts a run on a cluster, rendered from its template in ``job_templates/``.

    Args:
        to: One of ``CLUSTERS``.
        job: Template variables, from ``describe_job``.
    """
    # No autoescaping, which is for HTML: the templates quote shell words and write YAML values as JSON strings.
    templates = Environment(
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {"quote": shlex.quote, "join_words": shlex.join}
    values = {**job, "hours": job["hours"] or HOURS, **_CONSTANTS}
    run = templates.get_template("run.sh").render(values)
    text = templates.get_template(CLUSTERS[to].template).render(values, run=run)
    if not CLUSTERS[to].template.endswith(".yaml"):
        return f"{text}\n"
    # Parsed and dumped again: a value that breaks the YAML fails here instead of on the cluster.
    return yaml.safe_dump(yaml.safe_load(text), sort_keys=False, width=1000)


def _find_problems(options: argparse.Namespace, to: str, files: Sequence[str]) -> Iterator[Problem]:
    """Yield invalid, missing and unsupported flags of a job that reads configurations or a pipeline file."""
    yield from _find_wrong_values(options, files)
    for flag in CLUSTERS[to].needed:
        if getattr(options, flag) is None:
            yield Problem(f"--{flag}", f"is required for {to}", f"write --{flag} ... (docs/cloud.md)")
    for flag in CLUSTERS[to].unsupported:
        if getattr(options, flag) is not None:
            yield Problem(f"--{flag}", f"is not supported for {to}", "remove it")
    if options.volume and CLUSTERS[to].bucket not in options.volume:
        found = f"{options.volume} is not a bucket, and nothing else is mounted writable"
        yield Problem("--volume", found, "write s3://NAME, or for HF Jobs hf://buckets/OWNER/NAME")
    if to == "skypilot" and not options.image and not Path("constraints.txt").is_file():
        remedy = "run this in a clone, whose folder is uploaded and installed, or name an image"
        yield Problem("--image", "is required outside of a clone", remedy)
    if to == "hf-jobs" and options.num_nodes > 1:
        yield Problem("--num_nodes", "a job of HF Jobs is one machine", "choose a flavor with more GPUs")


def _find_wrong_values(options: argparse.Namespace, files: Sequence[str]) -> Iterator[Problem]:
    yield from find_problems(FLAGS["machines"], options)
    for name in options.secrets:
        if not re.fullmatch("[A-Z_][A-Z0-9_]*", name):
            # Not quoted: it may be the secret itself.
            found = "is not the name of an environment variable"
            yield Problem("--secret", found, "write its name, never its value")
    for flag in ("gpu", "image", "volume"):
        value = getattr(options, flag)
        if value is not None and not re.fullmatch(r"[\w./:@-]+", value, re.ASCII):
            found = f"{value!r} has other characters than names of clusters"
            yield Problem(f"--{flag}", found, "use letters, digits and . _ / : @ -")
    outside = [file for file in files if not file.startswith(("recipes/", f"{DATA}/"))]
    for file in outside if options.image else ():
        yield Problem(file, "is not in the image", f"put it on the volume and write its path there, {DATA}/...")


def submit_stages(options: argparse.Namespace, pipeline: Pipeline, chosen: Sequence[Stage]) -> None:
    """Submit the stages that are neither done nor queued, and print the job of each.

    Args:
        options: Flags of ``recipes run``: the pipeline file, the executor, and ``machines`` of ``flags.yaml``.
        pipeline: The pipeline.
        chosen: Stages to submit, in order.

    Raises:
        ConfigError: A flag is wrong, a needed stage is neither done nor submitted, the cluster's command does not
            exist, or it refuses a job.
    """
    # Absolute ones begin with the folder of the pipeline file (`${here}`), which is another one in the image.
    given = [stage.argv[1] for stage in chosen if stage.argv[:1] == ["--config"] and stage.has_given_config]
    files = [str(options.pipeline), *(file for file in given if not Path(file).is_absolute())]
    errors.raise_problems(_find_problems(options, options.executor, files), "--executor", ConfigError)
    folder = pipeline.output_dir / JOBS
    if options.executor != "slurm":
        _submit_whole(options, pipeline, chosen)
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RECORD
    jobs: dict[str, str] = read_record(path, {"jobs": dict})["jobs"] if path.is_file() else {}
    # The user's pending and running jobs. Before the records: a job that ends in between has recorded its stage.
    queued = _run_command(["squeue", "--me", "--noheader", "--format=%A"]).split()
    live = {name: job for name, job in jobs.items() if job in queued}
    done, submitted = find_done(pipeline), set[str]()
    for stage in chosen:
        # A queued job whose dependency has failed never starts; SLURM cancels it later.
        if stage.name in done or (stage.name in live and submitted.isdisjoint(stage.needs)):
            status = f"already queued as job {live[stage.name]}" if stage.name in live else "already done"
        else:
            live[stage.name] = _submit(options, pipeline, stage, _find_needed_jobs(stage, done, live))
            submitted.add(stage.name)
            # After every job: if a later one is refused, the next command does not submit this one again.
            jobs[stage.name] = live[stage.name]
            replace_record(path, {"jobs": jobs})
            status = f"submitted as job {live[stage.name]}"
        sys.stdout.write(f"{stage.name}: {status}\n")
    sys.stdout.write(f"scripts and output: {folder}\n")


def _submit_whole(options: argparse.Namespace, pipeline: Pipeline, chosen: Sequence[Stage]) -> None:
    """Submit one job that runs the chosen stages in order on one machine; after a restart it skips finished stages.

    Raises:
        ConfigError: Several machines are asked for, an output is not on the volume, or the cluster refuses the job.
    """
    if options.num_nodes > 1:
        remedy = "remove it, or write a job for each recipe with `recipes job`"
        raise ConfigError(Problem("--num_nodes", f"a pipeline on {options.executor} runs on one machine", remedy))
    outputs = [stage.output for stage in chosen if not stage.output.is_relative_to(pipeline.output_dir)]
    output_dir = _place_on_volume(pipeline.output_dir, outputs)
    command = ["recipes", "run", str(options.pipeline), "--output_dir", output_dir]
    command += ["--from", chosen[0].name, "--until", chosen[-1].name]
    # A stem without ASCII letters and digits leaves an empty name.
    name = _derive_name(options.pipeline.stem[:42]) or "pipeline"
    job = vars(options) | {"name": name, "command": command, "output_dir": None}
    script = pipeline.output_dir / JOBS / f"{options.executor}.yaml"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(write_job(options.executor, job), encoding="utf-8")
    # SkyPilot takes secrets as flags; a Kubernetes manifest refers to a stored secret.
    passed = options.secrets if options.executor == "skypilot" else []
    secrets = [word for name in passed for word in ("--secret", name)]
    output = _run_command([*CLUSTERS[options.executor].submit, *secrets, str(script)])
    sys.stdout.write(f"{output.rstrip()}\n{len(chosen)} stages submitted as one job: {script}\n")


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
    # In `--output`, %j is the id of the job, and %% a percent sign.
    output = f"{folder / stage.name}".replace("%", "%%")
    words = [*CLUSTERS["slurm"].submit, f"--output={output}-%j.out", "--kill-on-invalid-dep=yes"]
    words += [f"--dependency=afterok:{':'.join(needed)}"] if needed else []
    printed = _run_command([*words, str(script)])
    # `sbatch --parsable` prints "ID" or "ID;CLUSTER".
    if not (found := re.fullmatch(r"(\d+)(;\S*)?", printed.strip())):
        raise ConfigError(Problem(shlex.join(words), f"printed {printed[:200]!r} instead of a job id", "see `squeue`"))
    return found[1]


def _describe(options: argparse.Namespace, pipeline: Pipeline, stage: Stage) -> dict[str, Any]:
    """Return the template variables of the batch script of a stage, as ``describe_job`` for ``recipes run --only``."""
    num_nodes, gpus_per_node = (options.num_nodes, options.gpus_per_node) if stage.launch else (1, 1)
    command = [sys.executable, "-P", "-m", "recipes_lib.cli", "run", str(options.pipeline), "--only", stage.name]
    command += ["--output_dir", str(pipeline.output_dir)]
    command += ["--launcher", shlex.join(SRUN)] if num_nodes > 1 else []
    return vars(options) | {
        "name": re.sub("[^A-Za-z0-9_.-]+", "-", f"{options.pipeline.stem}-{stage.name}"),
        "num_nodes": num_nodes,
        "gpus_per_node": gpus_per_node,
        "gpu": None,
        "cpus_per_gpu": options.cpus_per_gpu or (CPUS_PER_GPU if num_nodes * gpus_per_node == 1 else None),
        # The script writes STOP there, which a run reads, and reads `run.json`; other stages have neither.
        "output_dir": str(stage.output) if stage.recipe in RECIPE_NAMES else None,
        "starter": [],
        "command": command,
    }


def _run_command(words: Sequence[str]) -> str:
    """Return the standard output of a command of the cluster.

    Raises:
        ConfigError: The command does not exist, or fails.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        remedy = "install it, or run this on a machine that has it, such as a login node"
        raise ConfigError(Problem("--executor", f"there is no {words[0]} here", remedy)) from error
    if done.returncode:
        found = f"failed: {done.stderr.strip()[:300] or f'exit code {done.returncode}'}"
        raise ConfigError(Problem(shlex.join(words), found, "correct it, and run the same command again"))
    return done.stdout

"""``recipes job``: the file that starts a run, by SLURM, Kubernetes, SkyPilot or HF Jobs, from one description."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from recipes_lib.commands.launch import PORT
from recipes_lib.config.loader import parse_command, split_stage
from recipes_lib.errors import EXIT_BUG, EXIT_DONE, EXIT_PREEMPTED, EXIT_USER, ConfigError, Problem
from recipes_lib.training.layouts.launch_files import find_launch_file, read_launch_file

DATA: Final = "/data"
"""Where the volume is mounted; the image's own working directory."""
CPUS_PER_GPU: Final = 8
"""Where one GPU of a machine is asked for: most have more, whatever its kind."""
HOURS: Final = 24
RESTARTS: Final = 20
"""Of a JobSet, whose machines may be taken back."""
RETRIES: Final = 3
"""After an end of no known reason."""
_GOES_ON: Final = r'"status": "(preempted|stalled)"'
_IS_FINAL: Final = r'"status": "(refused|diverged)"'


@dataclass(frozen=True, slots=True)
class Job:
    """A run on a cluster.

    Attributes:
        name: Of the job: lower case, digits and hyphens.
        command: ``recipes launch`` and its flags, the same on every node.
        output_dir: Where the run leaves its record.
        num_nodes: Machines.
        gpus_per_node: Of each.
        cpus_per_gpu: Of machines that are shared with other jobs; ``None``: machines are asked for whole.
        gpu: Kind of GPU, as the cluster names it; on HF Jobs the flavor.
        image: Container image.
        volume: Storage that outlives the machines.
        secrets: Names of environment variables, whose values the cluster keeps.
        hours: After which it is stopped.
    """

    name: str
    command: Sequence[str]
    output_dir: str
    num_nodes: int
    gpus_per_node: int
    cpus_per_gpu: int | None
    gpu: str | None
    image: str | None
    volume: str | None
    secrets: Sequence[str]
    hours: int


def main(argv: Sequence[str]) -> None:
    """Write the file on standard output.

    Raises:
        ConfigError: The configuration or the launch file does not load, or the description lacks what the cluster
            needs.
    """
    parser = argparse.ArgumentParser(prog="recipes job", description=__doc__, allow_abbrev=False)
    parser.add_argument("--to", required=True, choices=WRITERS, help="which cluster")
    parser.add_argument("--stage", help="recipe to run (default: what the file's name begins with, or sft)")
    parser.add_argument(
        "--config", metavar="F", required=True, help="the recipe; further --key value flags override it"
    )
    parser.add_argument("--hardware", help="file of accelerate_configs/ (default: single_gpu, or ddp on several GPUs)")
    parser.add_argument("--num_nodes", type=int, default=1, help="machines (default: 1)")
    parser.add_argument("--gpus_per_node", type=int, default=1, help="GPUs of each (default: 1)")
    parser.add_argument(
        "--cpus_per_gpu",
        type=int,
        help=f"share machines (default: whole ones, but for one GPU, with {CPUS_PER_GPU}); SLURM",
    )
    parser.add_argument(
        "--gpu", help="kind of GPU as the cluster names it, such as H100; on HF Jobs the flavor, a100x8"
    )
    parser.add_argument("--image", help="container image")
    parser.add_argument("--volume", help="what outlives the machines: a claim, a bucket; mounted at /data")
    parser.add_argument(
        "--secret", action="append", default=[], help="name of a variable whose value the cluster keeps"
    )
    parser.add_argument("--hours", type=int, help=f"after which the job is stopped (default: {HOURS})")
    parser.add_argument("--name", help="of the job (default: that of output_dir)")
    options, overrides = parser.parse_known_args(argv)
    job = describe_job(options, overrides)
    sys.stdout.write(WRITERS[options.to](job))


def describe_job(options: argparse.Namespace, overrides: Sequence[str]) -> Job:
    """Return the description that the flags give.

    Raises:
        ConfigError: As ``main``.
    """
    stage, _ = split_stage(["--config", options.config, *(["--stage", options.stage] if options.stage else [])])
    config = parse_command(stage, ["--config", options.config, *overrides])
    if isinstance(config, str):
        raise ConfigError(Problem("recipes job", "that flag belongs to the recipe", "leave it away"))
    if problems := list(_find_problems(options)):
        raise ConfigError(*problems)
    output_dir = str(config.training["output_dir"])
    if options.to != "slurm" and not Path(output_dir).is_absolute():
        output_dir = f"{DATA}/{output_dir}"
    name = options.name or re.sub("[^a-z0-9]+", "-", Path(output_dir).name.lower()).strip("-")
    if not re.fullmatch("[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", name):
        found = f"{name!r} is no name for every cluster"
        remedy = "write --name with up to 42 lower-case letters, digits and hyphens"
        raise ConfigError(Problem("--name", found, remedy))
    num_processes = options.num_nodes * options.gpus_per_node
    if options.hardware:
        read_launch_file(find_launch_file(options.hardware))
    hardware = options.hardware or ("ddp" if num_processes > 1 else "single_gpu")
    command = ["recipes", "launch", "--stage", stage, "--config", options.config, "--hardware", hardware]
    command += ["--num_processes", str(num_processes), *_leave_out(overrides, "output_dir"), "--output_dir", output_dir]
    return Job(
        name=name,
        command=command,
        output_dir=output_dir,
        num_nodes=options.num_nodes,
        gpus_per_node=options.gpus_per_node,
        cpus_per_gpu=options.cpus_per_gpu or (CPUS_PER_GPU if num_processes == 1 else None),
        gpu=options.gpu,
        image=options.image,
        volume=options.volume,
        secrets=tuple(options.secret),
        hours=options.hours or HOURS,
    )


def write_slurm(job: Job) -> str:
    """Return a batch script that goes on by itself until the run is done (docs/preemption.md)."""
    head = {
        "job-name": job.name,
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": f"{job.gpu}:{job.gpus_per_node}" if job.gpu else job.gpus_per_node,
        "time": f"{job.hours}:00:00",
        "signal": "B:USR1@300",
        "open-mode": "append",
    }
    # Without a word a task has one core, and the memory of one.
    head |= {"mem": 0} if job.cpus_per_gpu is None else {"cpus-per-gpu": job.cpus_per_gpu}
    flags = ["#SBATCH --requeue", *(["#SBATCH --exclusive"] if job.cpus_per_gpu is None else [])]
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in head.items()), *flags]
    lines += [f"# Start it in the project's folder, with the environment active: sbatch {job.name}.sh", "set -u"]
    lines += [f': "${{{name}:?set it before sbatch, which hands it on}}"' for name in job.secrets]
    lines += [f"output_dir={shlex.quote(job.output_dir)}", "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300", ""]
    lines += ['mkdir -p "$output_dir"', 'rm -f "$output_dir/STOP"', "began=$(mktemp)"]
    lines += ["""trap 'touch "$output_dir/STOP"' USR1 TERM""", ""]
    lines += [f"srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpu-bind=none {shlex.join(job.command)} &", "job=$!"]
    return "\n".join([*lines, *_WAIT_AND_REQUEUE, ""])


def write_kubernetes(job: Job) -> str:
    """Return a JobSet of one indexed job, a pod for each node; a run that was stopped is started again.

    Source: ``jobset.x-k8s.io/v1alpha2``; its schema's required fields in ``tests/commands/test_job.py``.
    """
    container = {
        "name": "train",
        "image": job.image,
        "command": ["bash", "-c", _write_shell(job)],
        "workingDir": "/app",
        "env": [*_tell_pod(job), *(_take_secret(job, name) for name in job.secrets)],
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": job.gpus_per_node}},
        "volumeMounts": [{"name": "data", "mountPath": DATA}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 300,
        "containers": [container],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": job.volume}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if job.gpu:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": job.gpu}
    wrong = {"containerName": "train", "operator": "In", "values": [EXIT_USER]}
    indexed = {
        "parallelism": job.num_nodes,
        "completions": job.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "activeDeadlineSeconds": job.hours * 3600,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": wrong}]},
        "template": {"spec": pod},
    }
    reasons = ["PodFailurePolicy", "DeadlineExceeded"]
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": reasons}
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": RESTARTS, "rules": [final]},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": indexed}}],
        },
    }
    return _dump(document)


def write_skypilot(job: Job) -> str:
    """Return a task for ``sky jobs launch``, which goes on elsewhere where its machines are taken back.

    Source: SkyPilot's ``sky/utils/schemas.py``; ``tests/commands/test_job.py``.
    """
    recovery = {"max_restarts_on_errors": RETRIES, "recover_on_exit_codes": [EXIT_PREEMPTED]}
    resources: dict[str, Any] = {
        "accelerators": f"{job.gpu}:{job.gpus_per_node}",
        "use_spot": True,
        "job_recovery": recovery,
    }
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    several = [
        'export PET_NNODES="$SKYPILOT_NUM_NODES" PET_NODE_RANK="$SKYPILOT_NODE_RANK"',
        'export PET_MASTER_ADDR="$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"',
    ]
    document: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.num_nodes,
        "resources": resources,
        "secrets": dict.fromkeys(job.secrets),
        "file_mounts": {DATA: {"source": job.volume, "mode": "MOUNT"}},
    }
    # Without an image the project's folder travels, and becomes the environment there.
    document |= {} if job.image else {"workdir": ".", "setup": "make install"}
    begin = "cd /app" if job.image else ". .venv/bin/activate"
    document["run"] = "\n".join([begin, *(several if job.num_nodes > 1 else []), _write_shell(job)])
    return _dump({key: value for key, value in document.items() if value != {}})


def write_hf_jobs(job: Job) -> str:
    """Return the command of ``hf jobs run`` as a script; the machine is one.

    Source: ``huggingface_hub``'s own command line, which reads it in ``tests/commands/test_job.py``.
    """
    command = ["hf", "jobs", "run", "--flavor", str(job.gpu), "--timeout", f"{job.hours}h", "--name", job.name]
    command += ["--attempts", str(RETRIES), "--volume", f"{job.volume}:{DATA}", "--detach"]
    for name in job.secrets:
        command += ["--secrets", name]
    shell = f"cd /app\n{_write_shell(job)}"
    return f"#!/bin/bash\n{shlex.join([*command, str(job.image), 'bash', '-c', shell])}\n"


WRITERS: Final[Mapping[str, Callable[[Job], str]]] = {
    "slurm": write_slurm,
    "kubernetes": write_kubernetes,
    "skypilot": write_skypilot,
    "hf-jobs": write_hf_jobs,
}
"""Cluster -> what writes its file."""

_NEEDS: Final = {
    "slurm": (),
    "kubernetes": ("image", "volume"),
    "skypilot": ("gpu", "volume"),
    "hf-jobs": ("gpu", "image", "volume"),
}
_KNOWS_NOT: Final = {
    "slurm": ("image", "volume"),
    "kubernetes": ("cpus_per_gpu",),
    "skypilot": ("cpus_per_gpu", "hours"),
    "hf-jobs": ("cpus_per_gpu",),
}
_WAIT_AND_REQUEUE: Final = (
    "# A signal ends `wait`, not what it waits for.",
    'wait "$job"',
    'while kill -0 "$job" 2>/dev/null; do wait "$job"; done',
    "",
    "# Whatever srun reports: what the run has said of its own end since then decides.",
    f"""if [ "$output_dir/run.json" -nt "$began" ] && grep -qE '{_GOES_ON}' "$output_dir/run.json"; then""",
    '    scontrol requeue "$SLURM_JOB_ID"',
    "fi",
)


def _write_shell(job: Job) -> str:
    """Run the command, and end by an exit code that the run's own record decides: launchers report 1 for every end."""
    record = shlex.quote(f"{job.output_dir}/run.json")
    return "\n".join(
        [
            "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300",
            f"began=$(mktemp); {shlex.join(job.command)} && exit {EXIT_DONE}",
            f"[ {record} -nt $began ] || exit {EXIT_BUG}",
            f"if grep -qE '{_GOES_ON}' {record}; then exit {EXIT_PREEMPTED}; fi",
            f"if grep -qE '{_IS_FINAL}' {record}; then exit {EXIT_USER}; fi",
            f"exit {EXIT_BUG}",
        ]
    )


def _tell_pod(job: Job) -> Iterator[dict[str, Any]]:
    """What ``recipes launch`` reads of a pod's place; nothing for a pod that is alone."""
    if job.num_nodes == 1:
        return
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    yield {"name": "PET_NNODES", "value": str(job.num_nodes)}
    yield {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}}
    yield {"name": "PET_MASTER_ADDR", "value": f"{job.name}-node-0-0.{job.name}"}
    yield {"name": "PET_MASTER_PORT", "value": str(PORT)}


def _take_secret(job: Job, name: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": name}}}


def _dump(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(document), sort_keys=False, width=1000)


def _leave_out(overrides: Sequence[str], key: str) -> list[str]:
    """The flags without ``key``, which is set already."""
    kept: list[str] = []
    words = iter(overrides)
    for word in words:
        name, equals, _ = word.partition("=")
        # Flags of a recipe take dashes as well.
        if name.replace("-", "_") != f"__{key}":
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def _find_problems(options: argparse.Namespace) -> Iterator[Problem]:
    for flag in ("num_nodes", "gpus_per_node", "cpus_per_gpu", "hours"):
        if getattr(options, flag) is not None and getattr(options, flag) < 1:
            yield Problem(f"--{flag}", f"is {getattr(options, flag)}", "write 1 or more")
    for flag in _NEEDS[options.to]:
        if getattr(options, flag) is None:
            yield Problem(f"--{flag}", f"{options.to} needs it", f"write --{flag} ... (docs/cloud.md)")
    for flag in _KNOWS_NOT[options.to]:
        if getattr(options, flag) is not None:
            yield Problem(f"--{flag}", f"{options.to} has no use for it here", "leave it away")
    if options.to == "hf-jobs" and options.num_nodes > 1:
        yield Problem("--num_nodes", "a job of HF Jobs is one machine", "choose a flavor with more GPUs")
    yield from _find_wrong_names(options)


def _find_wrong_names(options: argparse.Namespace) -> Iterator[Problem]:
    for flag in ("gpu", "image", "volume"):
        value = getattr(options, flag)
        if value is not None and not re.fullmatch(r"[\w./:@-]+", value, re.ASCII):
            found = f"{value!r} is not a name that a cluster gives"
            yield Problem(f"--{flag}", found, "use letters, digits and . _ / : @ -")
    for name in options.secret:
        if not re.fullmatch("[A-Z_][A-Z0-9_]*", name):
            yield Problem(
                "--secret", "it is not the name of an environment variable", "write its name, never its value"
            )
    if options.image and not options.config.startswith(("recipes/", f"{DATA}/")):
        found = f"{options.config} is not in the image"
        yield Problem("--config", found, f"put it on the volume and write its path there, {DATA}/...")

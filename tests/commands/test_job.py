"""``recipes job``: batch scripts and manifests, against schemas, stub programs and `recipes launch`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import metadata
from typing import Any

import pytest
import yaml
from tests.forked import ROOT

from recipes_lib.cli import main
from recipes_lib.commands import launch as launching
from recipes_lib.commands.launch import find_machines

CONFIG = "recipes/configs/llama3-8b/sft.yaml"
TWO = ("--hardware", "fsdp2", "--num_nodes", "2", "--gpus_per_node", "8")
CLOUD = ("--image", "me/recipes:cuda", "--volume", "hf://buckets/me/runs", "--gpu", "H100", "--secret", "HF_TOKEN")
OUT = "/data/runs/llama3-8b-sft"
PLACE = ["--num_processes", "16", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip"]


@pytest.fixture
def write(monkeypatch, capsys):
    """Write the job file for a cluster; return it, or the errors for ``code=2``."""
    monkeypatch.chdir(ROOT)

    def write(to: str, *flags: str, code: int = 0) -> str:
        config = () if "--config" in flags else ("--config", CONFIG)
        assert main(["job", "--to", to, *config, *flags]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return write


def read_launch_flags(command: list[str]) -> list[str]:
    assert command[:2] == ["recipes", "launch"]
    return command[2:]


def compose(flags: list[str], environment: dict[str, str], monkeypatch, capsys) -> list[str]:
    """Return the accelerate command of `recipes launch` on a node."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("recipes_lib.hardware.count_accelerators", lambda: 8)
    assert launching.main([*flags, "--dry_run"]) == 0
    return shlex.split(capsys.readouterr().err.splitlines()[1])


def find_shell_launch(shell: str) -> list[str]:
    line = next(line for line in shell.splitlines() if "recipes launch" in line)
    return shlex.split(line[line.index("recipes") :].removesuffix(" &"))


SRUN = """#!/bin/bash
printf '%s\\n' "$@"
"""


@pytest.mark.parametrize(
    ("to", "given", "place"),
    [("slurm", "runs/a", "runs/a"), ("skypilot", "runs/a", "/data/runs/a"), ("skypilot", "/data/a", "/data/a")],
)
@pytest.mark.parametrize("recipe", ["sft", "lora"])
def test_job_launches_its_recipe_into_its_output_directory(write, to, given, place, recipe):
    named = [] if recipe == "sft" else ["--recipe", recipe]
    job = write(to, *(CLOUD if to != "slurm" else ()), *named, "--output_dir", given)
    flags = find_shell_launch(job)
    assert flags[flags.index("--recipe") + 1] == recipe
    assert flags[flags.index("--output_dir") + 1] == place


@pytest.mark.parametrize("given", ["/other/a", "../a"])
def test_output_directory_that_would_be_lost_with_the_machine_is_rejected(write, given):
    assert "a: is not on the volume, and would be lost" in write("skypilot", *CLOUD, "--output_dir", given, code=2)


def test_flag_of_the_recipe_alone_is_rejected(write):
    assert "that flag belongs to the recipe" in write("slurm", "--print-config", code=2)


def test_batch_script_launches_per_node(write, install, tmp_path, monkeypatch, capsys):
    script = write(
        "slurm", *TWO, "--output_dir", str(tmp_path / "a run"), "--secret", "HF_TOKEN", "--learning_rate", "2e-5"
    )
    (tmp_path / "job.sh").write_text(script)
    install({"srun": SRUN})
    environment = os.environ | {"SLURM_JOB_ID": "77", "HF_TOKEN": "x"}
    started = subprocess.check_output(["bash", tmp_path / "job.sh"], env=environment, text=True).splitlines()
    assert started[:3] == ["--kill-on-bad-exit=1", "--ntasks-per-node=1", "--cpu-bind=none"]
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    step |= {"SLURM_STEP_NODELIST": "gpu-[3-4]", "SLURM_NODEID": "1"}
    composed = compose(read_launch_flags(started[3:]), step, monkeypatch, capsys)
    assert composed[7:15] == [*PLACE, "gpu-3"]
    assert composed[-4:] == ["--learning_rate", "2e-5", "--output_dir", str(tmp_path / "a run")]


ALL_OF_A_NODE = {"--exclusive", "--mem=0"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (TWO, ALL_OF_A_NODE),
        (("--gpus_per_node", "8"), ALL_OF_A_NODE),
        (("--num_nodes", "2"), ALL_OF_A_NODE),
        ((), {"--cpus-per-gpu=8"}),
        (("--gpus_per_node", "4", "--cpus_per_gpu", "12"), {"--cpus-per-gpu=12"}),
    ],
)
def test_batch_script_requests_cores_and_memory(write, flags, expected):
    """For whole nodes or per GPU; the default of SLURM is one core."""
    for script in (write("slurm", *flags), (ROOT / "docs" / "slurm_requeue.sh").read_text()):
        requested = set(re.findall("^#SBATCH (--(?:exclusive|mem|cpus).*)", script, re.MULTILINE))
        assert requested == expected
        expected = ALL_OF_A_NODE  # Of the documented script.


def test_derived_name_begins_with_letter(write):
    """Names of JobSets are labels of RFC 1035."""
    document = yaml.safe_load(write("kubernetes", *CLOUD, "--output_dir", "runs/7B_sft"))
    assert document["metadata"]["name"] == "run-7b-sft"


def test_batch_script_without_secret_does_not_start(write, tmp_path):
    (tmp_path / "job.sh").write_text(write("slurm", "--secret", "HF_TOKEN", "--output_dir", str(tmp_path / "out")))
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    done = subprocess.run(["bash", tmp_path / "job.sh"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "HF_TOKEN: set it" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags", [["--output_dir", "runs/a"], ["--output-dir", "runs/a"], ["--output-dir=runs/a"], ["--output_dir=runs/a"]]
)
def test_output_dir_is_written_once_for_each_spelling(flags, write):
    command = find_shell_launch(write("hf-jobs", *CLOUD, *flags).replace("'", ""))
    assert [word for word in command if "runs/a" in word or word.startswith("--output")] == [
        "--output_dir",
        "/data/runs/a",
    ]


def test_requeue_code_matches_documented_script(write):
    documented = (ROOT / "docs" / "slurm_requeue.sh").read_text()
    script = write("slurm", *TWO)
    heads = re.findall("^#SBATCH --(?:signal|requeue|open-mode).*", documented, re.MULTILINE)
    assert set(heads) <= set(script.splitlines())
    prepare = documented[documented.index("mkdir ") : documented.index("# One launcher")]
    assert prepare in script
    begin = "# A signal interrupts"
    assert script[script.index(begin) :] == documented[documented.index(begin) :]


_JOB = "spec.replicatedJobs.template.spec"
_POD = f"{_JOB}.template.spec"
_CONTAINER = f"{_POD}.containers"
JOBSET: dict[str, Any] = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"},
    "kind": {"JobSet"},
    "metadata.name": str,
    "spec.network.enableDNSHostnames": bool,
    "spec.network.publishNotReadyAddresses": bool,
    "spec.failurePolicy.maxRestarts": int,
    "spec.failurePolicy.rules.name": str,
    "spec.failurePolicy.rules.action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
    "spec.failurePolicy.rules.onJobFailureReasons": {
        *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy")
    },
    "spec.replicatedJobs.name": str,
    "spec.replicatedJobs.replicas": int,
    **dict.fromkeys((f"{_JOB}.{key}" for key in ("parallelism", "completions", "backoffLimit")), int),
    f"{_JOB}.activeDeadlineSeconds": int,
    f"{_JOB}.completionMode": {"Indexed", "NonIndexed"},
    f"{_JOB}.podFailurePolicy.rules.action": {"FailIndex", "FailJob", "Ignore", "Count"},
    f"{_JOB}.podFailurePolicy.rules.onExitCodes.containerName": str,
    f"{_JOB}.podFailurePolicy.rules.onExitCodes.operator": {"In", "NotIn"},
    f"{_JOB}.podFailurePolicy.rules.onExitCodes.values": int,
    f"{_POD}.restartPolicy": {"Never"},  # A pod failure policy allows no other.
    f"{_POD}.terminationGracePeriodSeconds": int,
    f"{_POD}.securityContext.fsGroup": int,
    f"{_POD}.securityContext.fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    f"{_POD}.nodeSelector": dict,
    f"{_POD}.volumes": dict,
    **dict.fromkeys((f"{_CONTAINER}.{key}" for key in ("name", "image", "command", "workingDir")), str),
    f"{_CONTAINER}.env": dict,
    f"{_CONTAINER}.ports.containerPort": int,
    f"{_CONTAINER}.resources.limits": dict,
    f"{_CONTAINER}.volumeMounts.name": str,
    f"{_CONTAINER}.volumeMounts.mountPath": str,
}
"""Fields of `kubectl explain` and their types or values: jobset v1alpha2, batch v1, core v1."""
SKY: dict[str, Any] = {
    **dict.fromkeys(("name", "workdir", "setup", "run"), str),
    "num_nodes": int,
    "resources.accelerators": str,
    "resources.use_spot": bool,
    "resources.job_recovery.max_restarts_on_errors": int,
    "resources.job_recovery.recover_on_exit_codes": int,
    "resources.image_id": str,
    "secrets": dict,
    "file_mounts./data.source": str,
    "file_mounts./data.mode": {"MOUNT", "COPY", "MOUNT_CACHED"},
}


def find_faults(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """Return a message for each unknown key and each value of another type; items of a list share one schema."""
    if isinstance(value, list):
        return [fault for item in value for fault in find_faults(item, schema, where)]
    kind = schema.get(where, dict)
    if isinstance(value, dict) and where not in schema:
        return [fault for key in value for fault in find_faults(value[key], schema, f"{where}.{key}".strip("."))]
    is_right = value in kind if isinstance(kind, set) else isinstance(value, kind)
    return [] if is_right else [f"{where}: {value!r} is no {kind}"]


def test_jobset_is_valid_and_sets_machine_rank(write, monkeypatch, capsys):
    document = yaml.safe_load(write("kubernetes", *TWO, *CLOUD))
    assert find_faults(document, JOBSET) == []
    assert len(find_faults({"apiVersion": "v1", "specs": {"a": 1}}, JOBSET)) == 2
    (replicated,) = document["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 2
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]
    assert f"USER {pod['securityContext']['fsGroup']}\n" in (ROOT / "Dockerfile").read_text()
    environment = {entry["name"]: entry for entry in container["env"]}
    assert environment.pop("HF_TOKEN")["valueFrom"]["secretKeyRef"] == {"name": "llama3-8b-sft", "key": "HF_TOKEN"}
    # The cluster sets the value of this field reference.
    assert "job-completion-index" in environment["PET_NODE_RANK"].pop("valueFrom")["fieldRef"]["fieldPath"]
    environment["PET_NODE_RANK"]["value"] = "1"
    place = {name: entry["value"] for name, entry in environment.items()}
    machines = find_machines(place)
    # The first pod's name under `enableDNSHostnames`: jobset-job-0-0.jobset.
    name = document["metadata"]["name"]
    assert machines.main_process_ip == f"{name}-{replicated['name']}-0-0.{name}"
    assert (machines.num_machines, machines.machine_rank) == (2, 1)
    flags = read_launch_flags(find_shell_launch(expand(container["command"][2], {})))
    composed = compose(flags, place, monkeypatch, capsys)
    assert composed[7:14] == PLACE
    assert composed[-2:] == ["--output_dir", OUT]


def read_container(write, *flags: str) -> dict[str, Any]:
    """Return the container of a manifest as Kubernetes starts it, with an environment variable ``HF_TOKEN``."""
    document = yaml.safe_load(write("kubernetes", "--image", "i", "--volume", "v", *flags))
    container = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    return container | {"command": [expand(word, {"HF_TOKEN": "secret"}) for word in container["command"]]}


def expand(text: str, environment: dict[str, str]) -> str:
    """Expand the references in a word of a container's command. Source: ``expansion.Expand`` of Kubernetes 1.34."""

    def resolve(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environment.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", resolve, text)


@pytest.mark.parametrize("text", ["it's 5 $, $$ and $HOME", '$(HF_TOKEN) `id` "x"', "two\nlines \\ #"])
def test_argument_of_any_characters_reaches_the_container(text, write):
    shell = read_container(write, "--run_name", text)["command"][2]
    words = shlex.split(shell[shell.index("recipes launch") : shell.index(" &\njob=")])
    assert words[words.index("--run_name") + 1] == text


def test_single_pod_has_no_rank_variables(write):
    container = read_container(write)
    assert container["env"] == []
    assert "single_gpu" in container["command"][2]


@pytest.mark.parametrize(
    ("status", "launched", "code"),
    [
        *[("preempted", 1, 75), ("stalled", 1, 75), ("refused", 1, 2), ("diverged", 1, 2), ("failed", 1, 1)],
        # Ended before the run has a record, as for a dataset that is not on the volume, or a signal while it is loaded.
        *[(None, 1, 1), (None, 2, 2), (None, 75, 75)],
    ],
)
def test_container_exit_code_follows_run_status(status, launched, code, write, install, tmp_path):
    shell = read_container(write)["command"][2]
    record = tmp_path / "run.json"
    record.write_text('{"status": "preempted"}')
    os.utime(record, (1, 1))
    # The clock of the file server may be behind.
    write_status = f"""echo '{{"status": "{status}"}}' > {record}; touch -d @9 {record}; """ if status else ""
    install({"recipes": f"#!/bin/bash\n{write_status}exit {launched}\n"})
    command = ["bash", "-c", shell.replace(OUT, str(tmp_path))]
    assert subprocess.run(command, timeout=30, check=False).returncode == code


def test_sigterm_to_container_reaches_run(write, install, tmp_path):
    """Kubernetes signals the first process of a container only, and bash passes nothing on by itself."""
    shell = read_container(write)["command"][2].replace(OUT, str(tmp_path))
    save = f"""echo '{{"status": "preempted"}}' > {tmp_path}/run.json; exit 1"""
    install({"recipes": f"#!/bin/bash\ntrap {shlex.quote(save)} TERM\necho ready\nfor ((;;)); do sleep 0.05; done\n"})
    with subprocess.Popen(["bash", "-c", shell], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        job.terminate()
        assert job.wait(timeout=30) == 75


@pytest.mark.parametrize("image", [True, False])
def test_skypilot_task_is_valid_and_sets_machine_rank(image, write, monkeypatch, capsys):
    document = yaml.safe_load(write("skypilot", *(CLOUD if image else CLOUD[2:]), *TWO))
    assert find_faults(document, SKY) == []
    assert document["resources"]["accelerators"] == "H100:8"
    assert document["secrets"] == {"HF_TOKEN": None}
    # The only mode of a bucket with all write operations: metrics are appended, checkpoints renamed.
    assert document["file_mounts"] == {"/data": {"source": "hf://buckets/me/runs", "mode": "MOUNT_CACHED"}}
    assert ("workdir" in document) is not image
    extras = re.findall(r"\[(.*)\]", document.get("setup", ""))
    assert set(",".join(extras).split(",")) - {""} <= set(metadata("recipes-lib").get_all("Provides-Extra") or ())
    shell = f"{document['run'][document['run'].index('export') :]}".split("before=")[0] + "env"
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    stdout = subprocess.run(
        ["bash", "-c", shell], env={**os.environ, **sky}, capture_output=True, text=True, check=True
    ).stdout
    place = dict(line.split("=", 1) for line in stdout.splitlines() if line.startswith("PET_"))
    composed = compose(read_launch_flags(find_shell_launch(document["run"])), place, monkeypatch, capsys)
    assert composed[7:15] == [*PLACE, "10.0.0.1"]


def test_hf_job_is_accepted_by_hf_cli(write):
    pytest.importorskip("huggingface_hub", minversion="2.4", reason="`hf jobs run` of 1.31 has no --dry-run")
    volume = "hf://buckets/me/runs"
    script = write(
        "hf-jobs", "--gpus_per_node", "8", *CLOUD[:2], "--volume", volume, "--gpu", "a100x8", "--secret", "HF_TOKEN"
    )
    program, *arguments = shlex.split(script.split("\n", 1)[1])
    assert program == "hf"
    # The first run counts as an attempt.
    assert arguments[arguments.index("--attempts") + 1] == "4"
    code = "from huggingface_hub.cli.hf import main; main()"
    place = arguments.index("run") + 1
    command = [sys.executable, "-c", code, *arguments[:place], "--dry-run", *arguments[place:]]
    done = subprocess.run(command, env=os.environ | {"HF_TOKEN": "x"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for word in ("a100x8", "24h", "me/recipes:cuda", "HF_TOKEN=***", f"{volume}:/data", "not submitted"):
        assert word in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("to", "flags", "message"),
    [
        ("kubernetes", [], "--image: is required for kubernetes"),
        ("slurm", ["--image", "x"], "not supported for"),
        ("hf-jobs", [*CLOUD, "--num_nodes", "2"], "one machine"),
        ("hf-jobs", [*CLOUD, "--volume", "hf://me/model"], "--volume: hf://me/model is not a bucket"),
        ("skypilot", [*CLOUD, "--volume", "runs"], "write s3://NAME"),
        ("skypilot", ["--volume", "v"], "--gpu: is required for skypilot"),
        ("slurm", ["--num_nodes", "0"], "write a finite number >= 1"),
        ("kubernetes", [*CLOUD, "--hours", "0"], "write a finite number >= 1"),
        ("skypilot", [*CLOUD, "--hours", "9"], "not supported for"),
        ("slurm", ["--cpus_per_gpu", "0"], "write a finite number >= 1"),
        ("kubernetes", [*CLOUD, "--cpus_per_gpu", "8"], "not supported for"),
        ("slurm", ["--secret", "hf_abc=1"], "its name, never its value"),
        ("slurm", ["--name", "My Job"], "is not a valid job name"),
        ("slurm", ["--name", "7b"], "'7b' is not a valid job name"),
        ("slurm", ["--gpu", "a\n#SBATCH --wrap=id"], r"--gpu: 'a\n#SBATCH --wrap=id' has other characters"),
        ("kubernetes", [*CLOUD, "--image", "me/x; id"], "--image: 'me/x; id' has other characters"),
        ("hf-jobs", [*CLOUD, "--volume", "$(id)"], "--volume: '$(id)' has other characters"),
        ("slurm", ["--output_dir", "runs/漢"], "--name: '' is not a valid job name"),
        ("slurm", ["--output_dir", "runs/" + "x" * 99], "is not a valid job name"),
        ("slurm", ["--config", "recipes/configs/gpt2-124m/eval.yaml"], "is for eval, which does not train"),
        ("slurm", ["--learning_rat", "1"], "learning_rate"),
        ("kubernetes", [*CLOUD, "--config", str(ROOT / CONFIG)], "not in the image"),
        ("slurm", ["--hardware", "nonsense"], "there is no launch file accelerate_configs/nonsense.yaml"),
        (
            "slurm",
            ["--recipe", "lora", "--hardware", "fsdp2_tp", "--gpus_per_node", "8"],
            "parallelism does not support adapters",
        ),
        ("slurm", ["--hardware", "single_gpu", "--gpus_per_node", "2"], "is for one process, not for 2"),
    ],
)
def test_unsupported_flags_are_rejected(to, flags, message, write):
    assert message in write(to, *flags, code=2)

"""Pipelines on clusters, with stubs: ``sbatch`` runs a script at once if the jobs that it depends on succeeded."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SBATCH = """#!/bin/bash
id=$(( $(cat "$SLURM/last") + 1 )); echo $id > "$SLURM/last"
echo "$*" >> "$SLURM/calls"
for word in "$@"; do case $word in --dependency=afterok:*) needs=${word#*:} ;; esac; done
for need in ${needs//:/ }; do
    [ "$(cat "$SLURM/$need")" = 0 ] || { echo cancelled > "$SLURM/$id"; echo $id; exit 0; }
done
if [ -e "$SLURM/holds" ]; then echo $id >> "$SLURM/queued"; else
    SLURM_JOB_ID=$id SLURM_JOB_NUM_NODES=1 bash "${@: -1}" > "$SLURM/$id.log" 2>&1; echo $? > "$SLURM/$id"
fi
echo "$id;cluster"
"""
SQUEUE = '#!/bin/bash\n[ -z "$SQUEUE_FAILS" ] || { echo "Unable to contact" >&2; exit 1; }\ncat "$SLURM/queued"\n'
PIPELINE = """
stages:
  one: {run: "mkdir ${output_dir}/one"}
  two: {run: "mkdir ${output_dir}/two"}
  three: {run: [cp, -r, "${one.output}", "${output_dir}/three"], needs: [two]}
"""


class Cluster:
    """Stub programs of a cluster, and the calls that they have recorded."""

    def __init__(self, folder: Path, recipes: Callable[..., str]) -> None:
        self.folder, self.pipeline, self.output_dir = folder, folder / "p.yaml", folder / "an output"
        self.recipes = recipes

    def run(self, *flags: str, code: int = 0) -> str:
        words = ["run", self.pipeline, "--output_dir", self.output_dir, "--executor", "slurm"]
        return self.recipes(*words, *flags, code=code)

    def read_calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []


@pytest.fixture
def cluster(install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipes: Callable[..., str]) -> Cluster:
    cluster = Cluster(tmp_path, recipes)
    install({"sbatch": SBATCH, "squeue": SQUEUE})
    (tmp_path / "last").write_text("0")
    (tmp_path / "queued").touch()
    monkeypatch.setenv("SLURM", str(tmp_path))
    cluster.pipeline.write_text(PIPELINE)
    return cluster


def test_stages_are_jobs_with_dependencies(cluster: Cluster) -> None:
    assert "three: submitted as job 3" in cluster.run()
    one, two, three = cluster.read_calls()
    assert "--dependency" not in one + two
    assert "--dependency=afterok:1:2 " in three
    assert {name: (cluster.folder / name).read_text() for name in "123"} == dict.fromkeys("123", "0\n")
    assert (cluster.output_dir / "three").is_dir()
    assert "three: already done" in cluster.run()
    assert len(cluster.read_calls()) == 3


# The parent of a stage is `recipes run`, and the parent of that the batch shell, which SLURM signals.
STOPPED = "kill -USR1 $(cut -d ' ' -f 4 /proc/$PPID/stat); exec sleep 60"


@pytest.mark.parametrize(
    ("program", "code"),
    # As after scancel, the fourth.
    [(STOPPED, 0), ("exit 75", 0), ("exit 4", 0), (STOPPED.replace("USR1", "TERM"), 75), ("exit 1", 1)],
)
def test_stage_that_does_not_train_is_requeued_if_it_was_stopped(cluster, install, program, code) -> None:
    install({"scontrol": '#!/bin/bash\necho "scontrol $*" >> "$SLURM/calls"\n'})
    cluster.pipeline.write_text(json.dumps({"stages": {"one": {"run": ["bash", "-c", program]}}}))
    cluster.run()
    assert cluster.read_calls()[1:] == ([] if code else ["scontrol requeue 1"])
    assert (cluster.folder / "1").read_text() == f"{code}\n"
    assert "unbound" not in (cluster.folder / "1.log").read_text()


def test_percent_sign_in_path_of_output_is_escaped(cluster: Cluster) -> None:
    """`sbatch` replaces patterns such as %j in its `--output`."""
    cluster.output_dir = cluster.folder / "100%u"
    cluster.run("--until", "one")
    assert f"--output={cluster.folder}/100%%u/jobs/one-%j.out " in cluster.read_calls()[0]


def test_failed_stage_and_dependents_are_resubmitted(cluster: Cluster) -> None:
    (cluster.output_dir / "two").mkdir(parents=True)
    cluster.run()
    assert (cluster.folder / "2").read_text() != "0\n"
    assert (cluster.folder / "3").read_text() == "cancelled\n"
    assert not (cluster.output_dir / "three").exists()
    (cluster.output_dir / "two").rmdir()
    cluster.run()
    assert "--dependency=afterok:4 " in cluster.read_calls()[-1]
    assert (cluster.output_dir / "three").is_dir()


def test_queued_stage_is_not_resubmitted(cluster: Cluster) -> None:
    (cluster.folder / "holds").touch()
    cluster.run("--until", "two")
    (cluster.folder / "1").write_text("0")
    (cluster.folder / "2").write_text("0")
    assert "one: already queued as job 1" in cluster.run()
    assert len(cluster.read_calls()) == 3
    assert "--dependency=afterok:1:2 " in cluster.read_calls()[-1]


def test_queued_stage_whose_need_has_failed_is_resubmitted(cluster: Cluster) -> None:
    """SLURM cancels its job, but not at once."""
    (cluster.folder / "holds").touch()
    for job in ("1", "2"):
        (cluster.folder / job).write_text("0")
    cluster.run()
    (cluster.folder / "queued").write_text("2\n3\n")
    (cluster.folder / "4").write_text("0")
    printed = cluster.run()
    assert "one: submitted as job 4" in printed
    assert "two: already queued as job 2" in printed
    assert "three: submitted as job 5" in printed
    assert "--dependency=afterok:4:2 " in cluster.read_calls()[-1]


def test_stage_that_ends_while_jobs_are_listed_is_not_resubmitted(cluster: Cluster, install) -> None:
    cluster.run("--until", "one")
    record = cluster.output_dir / "pipeline.json"
    record.rename(cluster.folder / "recorded")
    install({"squeue": f"#!/bin/bash\nmv {shlex.quote(str(cluster.folder / 'recorded'))} {shlex.quote(str(record))}\n"})
    assert "one: already done" in cluster.run("--until", "one")


def test_launched_stage_requests_its_machines(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "model").mkdir()
    keys = {"model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path / "chats.jsonl")}
    stages = {"sft": {"recipe": "sft", "launch": "fsdp2", "set": keys}, "rest": {"run": "true", "needs": ["sft"]}}
    cluster.pipeline.write_text(json.dumps({"stages": stages}))
    (cluster.folder / "holds").touch()
    (cluster.folder / "1").write_text("0")
    cluster.run("--num_nodes", "2", "--gpus_per_node", "8", "--hours", "4", "--secret", "HF_TOKEN")
    script = (cluster.output_dir / "jobs" / "sft.sh").read_text()
    directives = [f"#SBATCH --{flag}\n" for flag in ("nodes=2", "gpus-per-node=8", "time=4:00:00")]
    launcher = "--launcher 'srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpu-bind=none'"
    assert all(words in script for words in (*directives, "HF_TOKEN:?", "--only sft", launcher)), script
    rest = (cluster.output_dir / "jobs" / "rest.sh").read_text()
    assert "#SBATCH --gpus-per-node=1\n" in rest
    assert "srun --kill" not in rest


def test_errors_are_reported_before_submission(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(message: str, *flags: str) -> None:
        assert message in cluster.run(*flags, code=2)
        assert cluster.read_calls() == []

    fails("--volume: is required for skypilot", "--executor", "skypilot", "--gpu", "H100")
    fails("--image: is not supported for slurm", "--image", "me/recipes")
    one_machine = ("--executor", "skypilot", "--gpu", "H100", "--volume", "s3://runs", "--num_nodes", "2")
    fails("a pipeline on skypilot runs on one machine", *one_machine)
    monkeypatch.chdir(cluster.folder)
    fails("--image: is required outside of a clone", *one_machine[:-2], "--output_dir", "runs")
    (cluster.folder / "constraints.txt").touch()
    fails("there is no sky here", *one_machine[:-2], "--output_dir", "runs")
    fails("--hours: is 0", "--hours", "0")
    fails("needs one, which is neither done nor queued", "--only", "three")
    monkeypatch.setenv("SQUEUE_FAILS", "1")
    fails("Unable to contact")
    monkeypatch.delenv("SQUEUE_FAILS")
    (cluster.folder / "programs" / "squeue").unlink()
    fails("there is no squeue here")


def test_rejected_job_is_an_error_and_earlier_jobs_are_recorded(cluster: Cluster, install) -> None:
    refusal = 'case "$*" in *two.sh) echo "Invalid account" >&2; exit 1;; esac\n'
    install({"sbatch": SBATCH.replace("\n", f"\n{refusal}", 1)})
    assert "Invalid account" in cluster.run(code=2)
    assert json.loads((cluster.output_dir / "jobs" / "jobs.json").read_text())["jobs"] == {"one": "1"}
    install({"sbatch": "#!/bin/bash\necho queued\n"})
    assert "printed 'queued\\n' instead of a job id" in cluster.run(code=2)


def test_single_stages_run_concurrently_but_not_whole_pipelines(cluster: Cluster) -> None:
    """Each stage opens one end of a named pipe, which blocks until the other end is open."""
    pipe = cluster.folder / "pipe"
    os.mkfifo(pipe)
    stages = {
        "writer": {"run": ["bash", "-c", f"echo hello > {pipe}; mkdir '${{output_dir}}/writer'"]},
        "reader": {"run": ["bash", "-c", f"cat {pipe}; mkdir '${{output_dir}}/reader'"]},
    }
    cluster.pipeline.write_text(json.dumps({"stages": stages}))
    command = [sys.executable, "-m", "recipes_lib.cli", "run", str(cluster.pipeline)]
    command += ["--output_dir", str(cluster.output_dir)]
    first = subprocess.Popen([*command, "--only", "writer"], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    while "1 of 1, writer" not in first.stdout.readline():
        assert first.poll() is None
    whole = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert whole.returncode == 2
    assert "is running this pipeline" in whole.stderr
    second = subprocess.run([*command, "--only", "reader"], check=False, timeout=60)
    assert (first.wait(timeout=60), second.returncode) == (0, 0)
    record = json.loads((cluster.output_dir / "pipeline.json").read_text())["stages"]
    assert [record[name]["status"] for name in stages] == ["done", "done"]


CLOUD = """#!/usr/bin/env python
import os, subprocess, sys, yaml
open(os.environ["SLURM"] + "/calls", "a").write(" ".join(sys.argv[1:-1]) + "\\n")
job = yaml.safe_load(open(sys.argv[-1]))
if "spec" in job:
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    # Kubernetes expands $$ to $.
    words = [word.replace("$$", "$") for word in pod["containers"][0]["command"]]
else:
    words = ["bash", "-c", job["run"]]
print("ended with", subprocess.run([word.replace("cd /app", ":") for word in words]).returncode)
"""


@pytest.fixture
def cloud(cluster: Cluster, install, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A stub of ``kubectl`` and ``sky`` that runs the job at once, and prints its exit code."""
    install(dict.fromkeys(("kubectl", "sky"), CLOUD))
    (cluster.folder / "recipes" / "pipelines").mkdir(parents=True)
    monkeypatch.chdir(cluster.folder)
    # Mounted here: the stub runs the job on this machine.
    monkeypatch.setattr("recipes_lib.commands.job.DATA", str(cluster.folder))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    # Names of clusters allow ASCII letters only: none of these remain.
    cluster.pipeline = Path("recipes/pipelines/流水线.yaml")
    cluster.pipeline.write_text(PIPELINE)
    return cluster


CLOUD_FLAGS = ("--image", "me/recipes", "--volume", "hf://buckets/me/runs", "--gpu", "H100", "--secret", "HF_TOKEN")


@pytest.mark.parametrize(
    ("executor", "submit"), [("kubernetes", "create -f"), ("skypilot", "jobs launch --yes -d --secret HF_TOKEN")]
)
def test_cloud_job_runs_all_stages(cloud: Cluster, executor: str, submit: str) -> None:
    output = cloud.run("--executor", executor, *CLOUD_FLAGS)
    assert cloud.read_calls() == [submit]
    assert "ended with 0" in output
    assert f"3 stages submitted as one job: {cloud.output_dir}/jobs/{executor}.yaml" in output
    assert (cloud.output_dir / "three").is_dir()
    assert "name: pipeline\n" in (cloud.output_dir / f"jobs/{executor}.yaml").read_text()


@pytest.mark.parametrize(
    ("output_dir", "output", "lost"),
    [("/other/a", "${output_dir}/b", "/other/a"), ("../a", "${output_dir}/b", "/a"), ("runs/a", "runs/b", "runs/b")],
)
def test_output_beside_the_volume_is_refused(output_dir, output, lost, cloud: Cluster, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("recipes_lib.commands.job.DATA", "/data")
    monkeypatch.chdir(tmp_path)
    cloud.output_dir = Path(output_dir)
    cloud.pipeline.write_text(f"stages: {{one: {{run: 'true', output: '{output}'}}}}")
    printed = cloud.run("--executor", "kubernetes", *CLOUD_FLAGS, code=2)
    assert f"{lost}: is not on the volume, and would be lost" in printed
    assert cloud.read_calls() == []


def test_configuration_outside_of_the_image_is_refused(cloud: Cluster, install) -> None:
    keys = "model_name_or_path: me/model\ntasks: [core]\n"
    for file in ("mine.yaml", "recipes/mine.yaml"):
        Path(file).write_text(keys)
    stage = "stages: {{scores: {{recipe: eval, config: '{}'}}}}"
    cloud.pipeline.write_text(stage.format("mine.yaml"))
    assert "mine.yaml: is not in the image" in cloud.run("--executor", "kubernetes", *CLOUD_FLAGS, code=2)
    assert cloud.read_calls() == []
    install({"kubectl": "#!/bin/sh\n"})
    for inside in ("recipes/mine.yaml", "${here}/../mine.yaml"):
        cloud.pipeline.write_text(stage.format(inside))
        cloud.run("--executor", "kubernetes", *CLOUD_FLAGS)


def test_exit_code_of_cloud_job_tells_failed_stage_from_failed_gate(cloud: Cluster) -> None:
    """The cluster restarts a job that ends with 1, and none that ends with 2."""
    cloud.pipeline.write_text(PIPELINE.replace(", needs", ", require: {eval_loss: '< 3'}, needs"))
    flags = ("--executor", "kubernetes", *CLOUD_FLAGS)
    (cloud.output_dir / "one").mkdir(parents=True)
    assert "ended with 1" in cloud.run(*flags)
    (cloud.output_dir / "one").rmdir()
    assert "ended with 2" in cloud.run(*flags)

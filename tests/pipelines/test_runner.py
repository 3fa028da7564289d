"""Execution of pipelines: skipped and changed stages, gates, signals, locks and damaged outputs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tests.forked import Launch

from recipes_lib.config.command_flags import holds
from recipes_lib.errors import EXIT_PREEMPTED, ConfigError, DataError, PreemptedError
from recipes_lib.files import name_record, try_lock
from recipes_lib.pipelines import runner
from recipes_lib.pipelines.pipeline import Pipeline, load_pipeline
from recipes_lib.pipelines.runner import (
    find_broken_gates,
    find_done,
    list_figures,
    read_state,
    run_pipeline,
)

# Appends its arguments to a log, and writes the metrics of a run. A shell starts faster than Python.
WORK = """\
out=$1 name=$(basename "$1"); shift
echo $name $* >> "$LOG"
mkdir -p "$out"
echo '{"kind": "eval", "step": 1, "eval_loss": 2.5}' >> "$out/metrics.jsonl"
eval exit \\${FAIL_$name:-0}
"""


class Project:
    """A pipeline of three stages in a folder with a space; each runs a script that logs its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "work.sh").write_text(WORK)
        (folder / "b.yaml").write_text("one")
        self.messages: list[str] = []
        self.gate = "< 3"

    def load(self) -> Pipeline:
        def run(name: str, *words: str) -> list[str]:
            return ["sh", str(self.folder / "work.sh"), str(self.folder / "out" / name), *words]

        document = {
            "environment": {"LOG": str(self.folder / "log")},
            "stages": {
                "a": {"run": run("a")},
                "b": {
                    "run": run("b", "${a.output}"),
                    "needs": ["a"],
                    "config": str(self.folder / "b.yaml"),
                    "require": {"eval_loss": self.gate},
                },
                "c": {"run": run("c"), "needs": ["b"]},
            },
        }
        (self.folder / "p.yaml").write_text(json.dumps(document))
        return load_pipeline(self.folder / "p.yaml", str(self.folder / "out"))

    def go(self, *names: str) -> int:
        pipeline = self.load()
        chosen = [stage for stage in pipeline.stages if not names or stage.name in names]
        return run_pipeline(pipeline, chosen, self.messages.append)

    def read_status(self) -> dict[str, str]:
        stages = json.loads((self.folder / "out" / "pipeline.json").read_text())["stages"]
        return {name: entry["status"] for name, entry in stages.items()}

    @property
    def log(self) -> list[str]:
        return [line.split()[0] for line in (self.folder / "log").read_text().splitlines()]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    folder = tmp_path / "a folder"
    folder.mkdir()
    return Project(folder)


@pytest.mark.parametrize("changed", ["b.yaml", "one.jsonl", "rows/train/two.jsonl", "template.jinja"])
def test_finished_stages_are_skipped_and_changed_ones_rerun_with_dependents(project: Project, changed: str) -> None:
    (project.folder / "rows" / "train").mkdir(parents=True)
    for name in ("one.jsonl", "rows/train/two.jsonl", "template.jinja"):
        (project.folder / name).write_text("{}")
    mixture = [str(project.folder / "one.jsonl"), {"name": str(project.folder / "rows")}]
    keys = {"dataset_mixture": mixture, "chat_template_path": str(project.folder / "template.jinja")}
    (project.folder / "b.yaml").write_text(json.dumps(keys))
    assert project.go() == project.go() == 0
    assert project.log == ["a", "b", "c"]
    assert project.messages[-3:] == [f"{n} of 3, {name}: already done" for n, name in enumerate("abc", 1)]
    with (project.folder / changed).open("a") as file:
        file.write("\n")
    assert project.go() == 0
    assert project.log == ["a", "b", "c", "b", "c"]
    assert (project.folder / "out" / "b.replaced-1" / "metrics.jsonl").exists()
    assert len((project.folder / "out" / "b" / "metrics.jsonl").read_text().splitlines()) == 1


def test_failing_disk_is_no_change_of_data(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the output of a finished stage would be renamed, and computed again."""

    def fail(file: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))

    (project.folder / "rows.jsonl").write_text("{}")
    (project.folder / "b.yaml").write_text(json.dumps({"dataset_name": str(project.folder / "rows.jsonl")}))
    assert project.go() == 0
    with monkeypatch.context() as patched:
        patched.setattr(runner, "compute_digest", fail)
        with pytest.raises(OSError, match=r"Input/output error.*rows\.jsonl"):
            project.go()
    assert project.go() == 0
    assert project.log == ["a", "b", "c"]


def test_changed_output_leaves_files_at_its_place(tmp_path: Path) -> None:
    """What is there was not written by the earlier configuration of the stage."""
    own = tmp_path / "own.txt"
    own.write_text("mine")
    for entry in ({"run": "true"}, {"run": "true", "output": str(own)}):
        (tmp_path / "p.yaml").write_text(json.dumps({"stages": {"a": entry}}))
        pipeline = load_pipeline(tmp_path / "p.yaml", str(tmp_path / "out"))
        assert run_pipeline(pipeline, pipeline.stages, lambda _: None) == 0
    assert own.read_text() == "mine"
    assert not list(tmp_path.glob("*.replaced-*"))


def test_changed_file_of_rows_is_renamed_with_its_record(tmp_path: Path) -> None:
    """`recipes score` and `sample-pairs` refuse a record of other settings, or without its rows."""
    output = tmp_path / "out" / "rows.jsonl"
    for text in ("one", "two"):
        # `set -C`: an existing file is not overwritten.
        program = ["sh", "-c", f"set -eC; echo {text} > $0; echo > $0.record.json", str(output)]
        entry = {"run": program, "output": str(output)}
        (tmp_path / "p.yaml").write_text(json.dumps({"stages": {"a": entry}}))
        pipeline = load_pipeline(tmp_path / "p.yaml", str(tmp_path / "out"))
        assert run_pipeline(pipeline, pipeline.stages, lambda _: None) == 0
    assert output.read_text() == "two\n"
    aside = output.with_name("rows.jsonl.replaced-1")
    assert aside.read_text() == "one\n"
    assert name_record(aside).exists()


def test_failing_stage_ends_pipeline_and_resumes(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_b", "75")
    assert project.go() == 75
    assert project.log == ["a", "b"]
    assert project.messages[-1] == "b ended with exit code 75; the same command resumes here"
    monkeypatch.delenv("FAIL_b")
    assert project.go() == 0
    assert project.log == ["a", "b", "b", "c"]
    # The command is unchanged, so that its output is kept for resuming.
    assert not list((project.folder / "out").glob("*.replaced-*"))


@pytest.mark.parametrize(("code", "state"), [(75, "stopped"), (4, "failed"), (3, "failed"), (1, "failed")])
def test_exit_code_of_stage_is_returned_and_recorded(project: Project, code: int, state: str) -> None:
    pipeline = project.load()
    stage = replace(pipeline.stages[0], words=("bash", "-c", f"exit {code}"))
    assert run_pipeline(replace(pipeline, stages=(stage,)), [stage], project.messages.append) == code
    assert read_state(project.folder / "out" / "pipeline.json")["a"]["status"] == state


def test_failed_gate_stops_dependents_on_every_run(project: Project) -> None:
    project.gate = "< 2"
    assert project.go() == 3
    assert project.log == ["a", "b"]
    assert project.messages[-1] == "b: require: eval_loss is 2.5, and must be < 2"
    assert project.go() == project.go("c") == 3
    assert project.log == ["a", "b"]
    assert project.messages[-1] == "c needs b: require: eval_loss is 2.5, and must be < 2"
    project.gate = "<= 2.5"
    assert project.go() == 0
    assert project.log == ["a", "b", "c"]


def test_unknown_metric_of_gate_suggests_nearest_name(project: Project) -> None:
    pipeline = project.load()
    project.go("a", "b")
    stage = replace(pipeline.stages[1], require={"eval_los": "< 3"})
    assert list(find_broken_gates(stage)) == [
        f"require: there is no metric 'eval_los' in {stage.output}; did you mean eval_loss?"
    ]


def test_stage_with_unfinished_needs_is_rejected(project: Project) -> None:
    with pytest.raises(ConfigError, match="b: needs a, which is not done"):
        project.go("b")
    project.go("a")
    assert project.go("b") == 0


def test_missing_or_unfinished_output_is_rerun(project: Project) -> None:
    project.go()
    (project.folder / "out" / "a").rename(project.folder / "elsewhere")
    assert project.go() == 0
    assert project.log == ["a", "b", "c", "a"]
    (project.folder / "out" / "c" / "run.json").write_text('{"status": "running"}')
    assert project.go() == 0
    assert project.log[-1] == "c"


def test_stage_without_output_is_not_rerun(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("stages: {a: {run: 'true'}}")
    pipeline, messages = load_pipeline(tmp_path / "p.yaml", str(tmp_path / "out")), list[str]()
    assert run_pipeline(pipeline, pipeline.stages, messages.append) == 0
    assert run_pipeline(pipeline, pipeline.stages, messages.append) == 0
    assert messages == ["1 of 1, a: true", "1 of 1, a: already done"]


def test_output_with_missing_or_truncated_file_is_rerun(project: Project) -> None:
    (project.folder / "work.sh").write_text(
        WORK.replace("eval exit", 'printf weights > "$out/model.safetensors"; eval exit')
    )
    project.go()
    out = project.folder / "out" / "c"
    for name in ("report.html", "checkpoint-3"):
        (out / name).mkdir()
        (out / name).rmdir()
    project.go()
    assert project.log == ["a", "b", "c"]
    (out / "model.safetensors").unlink()
    assert project.go() == 0
    assert project.log == ["a", "b", "c", "c"]
    assert project.messages[-1] == f"c: {out}/model.safetensors is missing"
    (out / "model.safetensors").write_text("weigh")
    project.go()
    assert project.messages[-1] == f"c: {out}/model.safetensors has 5 bytes instead of 7"
    assert project.log == ["a", "b", "c", "c", "c"]


@pytest.mark.parametrize(("status", "is_renamed"), [("done", True), ("running", True), ("failed", False)])
def test_output_of_command_that_cannot_resume_is_renamed(status, is_renamed, tmp_path, monkeypatch) -> None:
    """``running``: `recipes run` was killed, and the command ended later; a failed one has refused what was there."""
    (tmp_path / "p.yaml").write_text("stages: {a: {command: merge, set: {adapter: x}}}")
    pipeline = load_pipeline(tmp_path / "p.yaml", str(tmp_path / "out"))
    output = tmp_path / "out" / "a"

    def merge(*_: object) -> None:
        output.mkdir(parents=True)
        (output / "model.safetensors").write_text("weights")

    monkeypatch.setattr(runner.Children, "start", merge)
    monkeypatch.setattr(runner.Children, "wait", lambda _: ("a", 0))
    run_pipeline(pipeline, pipeline.stages, lambda _: None)
    record = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    record["stages"]["a"]["status"] = status
    (tmp_path / "out" / "pipeline.json").write_text(json.dumps(record))
    (output / "model.safetensors").write_text("weigh")
    with nullcontext() if is_renamed else pytest.raises(FileExistsError):
        assert run_pipeline(pipeline, pipeline.stages, lambda _: None) == 0
    assert (tmp_path / "out" / "a.replaced-1").exists() == is_renamed


def test_changed_launch_file_reruns_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launch = tmp_path / "accelerate_configs" / "mine.yaml"
    launch.parent.mkdir()
    launch.write_text("distributed_type: MULTI_GPU\n")
    (tmp_path / "p.yaml").write_text("stages: {sft: {recipe: sft, launch: mine}}")
    pipeline = load_pipeline(tmp_path / "p.yaml", "out")
    # Without `recipes launch`, which would start a run.
    pipeline = replace(pipeline, stages=[replace(pipeline.stages[0], words=["true"])])
    assert run_pipeline(pipeline, pipeline.stages, lambda _: None) == 0
    assert find_done(pipeline) == {"sft"}
    launch.write_text("distributed_type: FSDP\n")
    assert find_done(pipeline) == set()


def test_concurrent_run_is_rejected(project: Project) -> None:
    out = project.folder / "out"
    out.mkdir()
    with (out / "pipeline.json.lock").open("a") as file:
        assert try_lock(file)
        with pytest.raises(ConfigError, match="is running this pipeline"):
            project.go()
    assert project.go() == 0


def test_job_of_one_stage_excludes_that_stage_and_longer_runs(project: Project) -> None:
    assert project.go() == 0
    out = project.folder / "out"
    with (out / "pipeline.json.lock").open("a") as all_stages, (out / "pipeline.json.a.lock").open("a") as own:
        assert try_lock(all_stages, is_shared=True)
        assert try_lock(own, is_shared=True)
        assert project.go("c") == 0
        for names in ((), ("a",), ("b", "c")):
            with pytest.raises(ConfigError, match="is running this pipeline"):
                project.go(*names)


def test_seconds_accumulate_and_damaged_record_is_rejected(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project.folder / "out" / "pipeline.json"
    monkeypatch.setenv("FAIL_a", "1")
    assert project.go() == 1
    state = json.loads(path.read_text())
    # Rounded, an attempt may take 0 s.
    assert state["stages"]["a"]["seconds"] >= 0
    state["stages"]["a"]["seconds"] = 1000
    path.write_text(json.dumps(state))
    monkeypatch.delenv("FAIL_a")
    assert project.go() == 0
    assert json.loads(path.read_text())["stages"]["a"]["seconds"] >= 1000
    path.write_text("{")
    with pytest.raises(DataError, match="delete it"):
        project.go()


@pytest.mark.parametrize("environment", ["", "environment: {A: b}"])
def test_missing_program_is_rejected(tmp_path: Path, environment: str) -> None:
    (tmp_path / "p.yaml").write_text(f"stages: {{a: {{run: no-such-program x}}}}\n{environment}")
    pipeline = load_pipeline(tmp_path / "p.yaml", str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="no-such-program x: there is no program 'no-such-program'"):
        run_pipeline(pipeline, pipeline.stages, lambda _: None)
    assert json.loads((tmp_path / "out" / "pipeline.json").read_text())["stages"]["a"]["status"] == "stopped"


@pytest.mark.parametrize("name", ["TERM", "USR1", "HUP"])
def test_stop_signal_is_forwarded_to_stage_and_pipeline_resumes(project: Project, name: str) -> None:
    (project.folder / "work.sh").write_text(f"trap 'exit 75' TERM; kill -{name} $PPID; while :; do sleep 0.01; done")
    # The tests may run under nohup, which the pipeline would obey.
    previous = signal.signal(number := signal.Signals[f"SIG{name}"], signal.SIG_DFL)
    try:
        assert project.go() == 75
    finally:
        signal.signal(number, previous)
    assert project.read_status() == {"a": "stopped"}
    (project.folder / "work.sh").write_text(WORK)
    assert project.go() == 0
    assert project.log == ["a", "b", "c"]


def test_sigterm_stops_pipeline_after_stage_that_ignores_it(project: Project) -> None:
    (project.folder / "work.sh").write_text(f"trap '' TERM; kill -TERM $PPID\n{WORK}")
    with pytest.raises(PreemptedError):
        project.go()
    assert project.read_status() == {"a": "done"}
    (project.folder / "work.sh").write_text(WORK)
    assert project.go() == 0
    assert project.log == ["a", "b", "c"]


@pytest.mark.parametrize(("code", "error", "status"), [(0, PreemptedError, "done"), (75, KeyboardInterrupt, "stopped")])
def test_ctrl_c_ends_pipeline_after_the_stage_that_runs(project, code, error, status, monkeypatch) -> None:
    wait = runner.Children.wait

    def interrupt(children: runner.Children) -> tuple[str, int | None]:
        os.kill(os.getpid(), signal.SIGINT)
        return wait(children)

    monkeypatch.setattr(runner.Children, "wait", interrupt)
    (project.folder / "work.sh").write_text(f"exit {code}")
    with pytest.raises(error):
        project.go()
    assert project.read_status() == {"a": status}


def load_scripts(folder: Path, **scripts: str) -> Pipeline:
    """Return a pipeline of shell scripts without dependencies, but for ``c``, which needs ``a`` and ``b``."""
    entries = {name: {"run": ["sh", "-c", script]} for name, script in scripts.items()}
    stages = {name: entry | ({"needs": ["a", "b"]} if name == "c" else {}) for name, entry in entries.items()}
    (folder / "p.yaml").write_text(json.dumps({"stages": stages}))
    return load_pipeline(folder / "p.yaml", str(folder / "out"))


TWO = ({"SLOT": "0"}, {"SLOT": "1"})


def test_independent_stages_run_at_the_same_time_in_their_slots(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")  # Opened by neither before the other one runs.
    write, read = f"echo a$SLOT > {fifo}", f"read other < {fifo}; echo $other b$SLOT > {tmp_path}/log"
    pipeline = load_scripts(tmp_path, a=write, b=read, c=f"cat {tmp_path}/log")
    assert run_pipeline(pipeline, pipeline.stages, lambda _: None, slots=TWO) == 0
    assert sorted((tmp_path / "log").read_text().split()) in (["a0", "b1"], ["a1", "b0"])
    assert find_done(pipeline) == {"a", "b", "c"}


def test_stages_continue_after_the_failure_of_another_and_none_is_started(tmp_path: Path) -> None:
    waits = f"until grep -q failed {tmp_path}/out/pipeline.json; do sleep 0.01; done"
    pipeline = load_scripts(tmp_path, a="exit 3", b=f"{waits}; exit 4", d="true")
    assert run_pipeline(pipeline, pipeline.stages, lambda _: None, slots=TWO) == 3
    entries = read_state(tmp_path / "out" / "pipeline.json")
    assert {name: entry["code"] for name, entry in entries.items()} == {"a": 3, "b": 4}


def test_stage_continues_when_another_cannot_be_started(tmp_path: Path) -> None:
    pipeline = load_scripts(tmp_path, a="true", b="true")
    stages = [pipeline.stages[0], replace(pipeline.stages[1], words=["no-such-program"])]
    with pytest.raises(ConfigError, match="there is no program"):
        run_pipeline(pipeline, stages, lambda _: None, slots=TWO)
    entries = read_state(tmp_path / "out" / "pipeline.json")
    assert {name: entry["status"] for name, entry in entries.items()} == {"a": "done", "b": "stopped"}


def test_sigterm_reaches_all_stages_that_run(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    ends = "trap 'exit 75' TERM"
    pipeline = load_scripts(
        tmp_path,
        a=f"{ends}; echo > {fifo}; while :; do sleep 0.01; done",
        b=f"{ends}; read _ < {fifo}; kill -TERM {os.getpid()}; while :; do sleep 0.01; done",
    )
    assert run_pipeline(pipeline, pipeline.stages, lambda _: None, slots=TWO) == EXIT_PREEMPTED
    assert {entry["status"] for entry in read_state(tmp_path / "out" / "pipeline.json").values()} == {"stopped"}


def test_stage_with_launch_file_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, log, running = load_scripts(tmp_path, a="", b="", c="", d=""), list[str](), list[str]()

    def start(_: object, name: str, words: list[str], environment: dict[str, str]) -> None:
        running.append(name)
        log.append(f"{'+'.join(running)} {environment.get('SLOT', '-')}")

    monkeypatch.setattr(runner.Children, "start", start)
    monkeypatch.setattr(runner.Children, "wait", lambda _: (running.pop(0), 0))
    a, b, *others = pipeline.stages
    assert run_pipeline(pipeline, [a, replace(b, launch="ddp"), *others], lambda _: None, slots=TWO) == 0
    assert log == ["a 1", "a+d 0", "b -", "c 0"]


def test_hangup_is_ignored_under_nohup(project: Project) -> None:
    (project.folder / "work.sh").write_text(f"kill -HUP $PPID\n{WORK}")
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert project.go() == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_killed_pipeline_resumes(project: Project) -> None:
    (project.folder / "work.sh").write_text("kill -KILL $PPID")
    project.load()
    words = ["run", project.folder / "p.yaml", "--output_dir", project.folder / "out"]
    assert Launch("recipes_lib.cli", *words).finish().returncode == -signal.SIGKILL
    assert project.read_status() == {"a": "running"}
    (project.folder / "work.sh").write_text(WORK)
    assert project.go() == 0
    assert project.log == ["a", "b", "c"]


def test_stage_that_survives_killed_pipeline_is_not_started_again(project: Project) -> None:
    (waits := project.folder / "waits").mkdir()
    kill = f"mkdir '{waits}/begun' || exit 0; exec > /dev/null 2>&1; kill -KILL $PPID"
    (project.folder / "work.sh").write_text(f"{kill}; while [ -e '{waits}' ]; do sleep 0.01; done")
    project.load()
    words = ["run", project.folder / "p.yaml", "--output_dir", project.folder / "out"]
    try:
        assert Launch("recipes_lib.cli", *words).finish().returncode == -signal.SIGKILL
        with pytest.raises(ConfigError, match="is running this pipeline"):
            project.go()
    finally:
        shutil.rmtree(waits)


def test_files_written_by_an_earlier_stage_are_no_change(tmp_path: Path) -> None:
    """Its output, which the records of every run change, and what a program has downloaded to another place."""
    written = tmp_path / "out" / "write"
    (tmp_path / "work.sh").write_text(
        f"mkdir -p $2; echo $1 >> $0.log; echo 1 > $0.jsonl; echo $1 > {written}/last.json\n"
        f"echo 'dataset_mixture: [{tmp_path}/work.sh.jsonl, {written}]' > {written}/x.yaml"
    )
    stages = {
        "write": {"run": ["sh", f"{tmp_path}/work.sh", "write", "${output_dir}/write"]},
        "use": {"run": ["sh", f"{tmp_path}/work.sh", "use", "${output_dir}/use"], "config": "${write.output}/x.yaml"},
    }
    (tmp_path / "p.yaml").write_text(json.dumps({"stages": stages}))
    for _ in range(2):
        pipeline = load_pipeline(tmp_path / "p.yaml", str(tmp_path / "out"))
        assert run_pipeline(pipeline, pipeline.stages, lambda _: None) == 0
    assert (tmp_path / "work.sh.log").read_text().split() == ["write", "use"]


def test_config_in_other_encoding_does_not_stop_earlier_stages(project: Project) -> None:
    (project.folder / "b.yaml").write_bytes("# gr\xfc\xdfe".encode("latin-1"))
    assert project.go("a") == 0
    assert project.log == ["a"]


def test_list_figures_reads_records_and_metrics(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "run.json").write_text('{"status": "done", "memory": {"peak": 7}}')
    (tmp_path / "eval" / "eval.json").write_text('{"tasks": {"gsm8k": {"scores": {"exact_match": {"value": 0.4}}}}}')
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 3, "acc": 0.9}\n{"step": 2, "eval_loss": 0.5}\n{"step": 2, "loss": 2, "is_best": true}\n'
        '{"step": 3, "eval_loss": 1, "acc": "nan"}\n'
    )
    figures = list_figures(tmp_path)
    assert not holds("> 0.5", figures.pop("acc"))
    expected = {"step": 3, "loss": 2, "eval_loss": 1, "memory.peak": 7, "gsm8k.exact_match": 0.4}
    assert figures == expected | {"tasks.gsm8k.scores.exact_match.value": 0.4}
    # The output's model is that of step 2.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "best", "step": 3, "best_step": 2, "metric": "eval_loss"}\n')
    assert list_figures(tmp_path)["eval_loss"] == 0.5

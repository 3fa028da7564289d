"""Stages that are done stay done; what changed is done again with what depends on it; gates, kills and requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from recipes_lib.errors import ConfigError, DataError
from recipes_lib.files import try_lock
from recipes_lib.pipelines.pipeline import Pipeline, holds, load_pipeline
from recipes_lib.pipelines.runner import find_broken_gates, fingerprint, list_figures, read_state, run_pipeline

# Appends its arguments to a log, and writes the output of a run.
WORK = """
import json, os, sys
out, *rest = sys.argv[1:]
open(os.environ["LOG"], "a").write(" ".join([os.path.basename(out), *rest]) + "\\n")
if "--config" in rest:
    rest += [open(rest[rest.index("--config") + 1]).read()]
os.makedirs(out, exist_ok=True)
open(out + "/metrics.jsonl", "a").write(json.dumps({"kind": "eval", "step": 1, "eval_loss": 2.5}) + "\\n")
sys.exit(int(os.environ.get("FAIL_" + os.path.basename(out), 0)))
"""


class Bench:
    """A pipeline of three stages in a folder with a space, each run by a script that leaves a trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "work.py").write_text(WORK)
        (folder / "b.yaml").write_text("one")
        self.said: list[str] = []
        self.gate = "< 3"

    def load(self, **environment: str) -> Pipeline:
        def run(name: str, *words: str) -> list[str]:
            return [sys.executable, str(self.folder / "work.py"), str(self.folder / "out" / name), *words]

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
        os.environ.update(environment)
        return load_pipeline(self.folder / "p.yaml", str(self.folder / "out"))

    def go(self, *names: str) -> int:
        pipeline = self.load()
        chosen = [stage for stage in pipeline.stages if not names or stage.name in names]
        return run_pipeline(pipeline, chosen, self.said.append)

    @property
    def log(self) -> list[str]:
        return [line.split()[0] for line in (self.folder / "log").read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    folder = tmp_path / "a folder"
    folder.mkdir()
    return Bench(folder)


def test_done_stages_stay_done_and_what_changed_is_done_again_with_what_depends_on_it(bench: Bench) -> None:
    assert bench.go() == bench.go() == 0
    assert bench.log == ["a", "b", "c"]
    assert bench.said[-3:] == [f"{n} of 3, {name}: already done" for n, name in enumerate("abc", 1)]
    (bench.folder / "b.yaml").write_text("two")
    assert bench.go() == 0
    assert bench.log == ["a", "b", "c", "b", "c"]
    assert (bench.folder / "out" / "b.replaced-1" / "metrics.jsonl").exists()
    assert len((bench.folder / "out" / "b" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_failing_stage_ends_it_with_its_code_and_resumes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL_b", "75")
    assert bench.go() == 75
    assert bench.log == ["a", "b"]
    monkeypatch.delenv("FAIL_b")
    assert bench.go() == 0
    assert bench.log == ["a", "b", "b", "c"]
    # It was the same command, whose output is its to resume.
    assert not list((bench.folder / "out").glob("*.replaced-*"))


@pytest.mark.parametrize(
    ("status", "launch", "code", "state"),
    [
        ("preempted", "fsdp2", 75, "stopped"),
        ("stalled", "fsdp2", 4, "failed"),
        ("diverged", "fsdp2", 3, "failed"),
        ("refused", "fsdp2", 2, "failed"),
        ("failed", "fsdp2", 1, "failed"),
        ("preempted", "", 1, "failed"),
    ],
)
def test_the_record_of_a_launched_run_decides_the_code_where_the_launcher_says_1(
    bench: Bench, status: str, launch: str, code: int, state: str
) -> None:
    record = bench.folder / "out" / "a" / "run.json"
    write = f"mkdir -p '{record.parent}'; echo '{{\"status\": \"{status}\"}}' > '{record}'; exit 1"
    pipeline = bench.load()
    stage = replace(pipeline.stages[0], launch=launch, words=("bash", "-c", write))
    pipeline = replace(pipeline, stages=(stage,))
    assert run_pipeline(pipeline, [stage], bench.said.append) == code
    assert read_state(bench.folder / "out" / "pipeline.json")["a"]["status"] == state
    # A record from before says nothing of this attempt.
    os.utime(record, (1, 1))
    stage = replace(stage, words=("false",))
    assert run_pipeline(replace(pipeline, stages=(stage,)), [stage], bench.said.append) == 1


def test_a_gate_stops_what_depends_on_it_every_time(bench: Bench) -> None:
    bench.gate = "< 2"
    assert bench.go() == 3
    assert bench.log == ["a", "b"]
    assert bench.said[-1] == "b: require: eval_loss is 2.5, and must be < 2"
    assert bench.go() == bench.go("c") == 3
    assert bench.log == ["a", "b"]
    assert bench.said[-1] == "c needs b: require: eval_loss is 2.5, and must be < 2"
    bench.gate = "<= 2.5"
    assert bench.go() == 0
    assert bench.log == ["a", "b", "c"]


def test_a_figure_that_is_not_there_is_told_with_one_that_is(bench: Bench) -> None:
    pipeline = bench.load()
    bench.go("a", "b")
    stage = replace(pipeline.stages[1], require={"eval_los": "< 3"})
    assert list(find_broken_gates(stage, Path())) == [
        f"require: there is no metric 'eval_los' in {stage.output}; did you mean eval_loss?"
    ]


def test_a_stage_whose_needs_are_not_done_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="b: needs a, which is not done"):
        bench.go("b")
    bench.go("a")
    assert bench.go("b") == 0


def test_an_output_that_is_gone_is_made_again(bench: Bench) -> None:
    bench.go()
    (bench.folder / "out" / "a").rename(bench.folder / "elsewhere")
    assert bench.go() == 0
    assert bench.log == ["a", "b", "c", "a"]
    (bench.folder / "out" / "c" / "run.json").write_text('{"status": "running"}')
    assert bench.go() == 0
    assert bench.log[-1] == "c"


def test_an_output_that_lacks_a_file_is_made_again_and_what_may_go_may_go(bench: Bench) -> None:
    (bench.folder / "work.py").write_text(
        WORK.replace("sys.exit", "open(out + '/model.safetensors', 'w').write('weights')\nsys.exit")
    )
    bench.go()
    out = bench.folder / "out" / "c"
    for name in ("report.html", "checkpoint-3"):
        (out / name).mkdir()
        (out / name).rmdir()
    bench.go()
    assert bench.log == ["a", "b", "c"]
    (out / "model.safetensors").unlink()
    assert bench.go() == 0
    assert bench.log == ["a", "b", "c", "c"]
    assert bench.said[-1] == f"c: {out}/model.safetensors is missing"
    (out / "model.safetensors").write_text("weigh")
    bench.go()
    assert bench.said[-1] == f"c: {out}/model.safetensors has 5 bytes instead of 7"
    assert bench.log == ["a", "b", "c", "c", "c"]


def test_the_launch_file_is_part_of_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launch = tmp_path / "accelerate_configs" / "mine.yaml"
    launch.parent.mkdir()
    launch.write_text("distributed_type: MULTI_GPU\n")
    path = tmp_path / "p.yaml"
    path.write_text("stages: {sft: {recipe: sft, launch: mine}}")
    before = fingerprint(load_pipeline(path), Path())
    launch.write_text("distributed_type: FSDP\n")
    assert fingerprint(load_pipeline(path), Path()) != before


def test_two_at_once_are_refused(bench: Bench) -> None:
    out = bench.folder / "out"
    out.mkdir()
    with (out / "pipeline.json.lock").open("a") as file:
        assert try_lock(file)
        with pytest.raises(ConfigError, match="another `recipes run` is running this pipeline"):
            bench.go()
    assert bench.go() == 0


def test_the_time_of_every_attempt_counts_and_a_broken_record_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bench.folder / "out" / "pipeline.json"
    monkeypatch.setenv("FAIL_a", "1")
    assert bench.go() == 1
    state = json.loads(path.read_text())
    # Rounded, an attempt may have taken none.
    assert state["stages"]["a"]["seconds"] >= 0
    state["stages"]["a"]["seconds"] = 1000
    path.write_text(json.dumps(state))
    monkeypatch.delenv("FAIL_a")
    assert bench.go() == 0
    assert json.loads(path.read_text())["stages"]["a"]["seconds"] >= 1000
    path.write_text("{")
    with pytest.raises(DataError, match="delete it"):
        bench.go()


@pytest.mark.parametrize("environment", ["", "environment: {A: b}"])
def test_a_program_that_is_not_there_is_told(tmp_path: Path, environment: str) -> None:
    (tmp_path / "p.yaml").write_text(f"stages: {{a: {{run: no-such-program x}}}}\n{environment}")
    pipeline = load_pipeline(tmp_path / "p.yaml", str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="no-such-program x: there is no program 'no-such-program'"):
        run_pipeline(pipeline, pipeline.stages, lambda _: None)
    assert json.loads((tmp_path / "out" / "pipeline.json").read_text())["stages"]["a"]["status"] == "stopped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_pipeline_goes_on(bench: Bench, number: signal.Signals) -> None:
    """SIGTERM reaches the stage, whose exit code is the pipeline's; after SIGKILL the same command starts it again."""
    waiting = bench.folder / "waiting"
    (bench.folder / "work.py").write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        f"open({str(waiting)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    bench.load()
    words = ["-m", "recipes_lib.cli", "run", bench.folder / "p.yaml", "--output_dir", bench.folder / "out"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    while not waiting.exists() or not waiting.read_text():
        time.sleep(0.01)
    process.send_signal(number)
    code = process.wait(timeout=60)
    if number is signal.SIGKILL:
        os.kill(int(waiting.read_text()), signal.SIGKILL)
    else:
        assert code == 75
    state = json.loads((bench.folder / "out" / "pipeline.json").read_text())["stages"]["a"]["status"]
    assert state == ("running" if number is signal.SIGKILL else "stopped")
    (bench.folder / "work.py").write_text(WORK)
    assert bench.go() == 0
    assert bench.log == ["a", "b", "c"]


def test_sigterm_ends_the_pipeline_after_a_stage_that_finishes_nevertheless(bench: Bench) -> None:
    waiting = bench.folder / "waiting"
    trap = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    wait = f"import time\nopen({str(waiting)!r}, 'w').write(out)\ntime.sleep(2)\nsys.exit"
    (bench.folder / "work.py").write_text(trap + WORK.replace("sys.exit", wait))
    bench.load()
    words = ["-m", "recipes_lib.cli", "run", bench.folder / "p.yaml", "--output_dir", bench.folder / "out"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    while not waiting.exists() or not waiting.read_text():
        time.sleep(0.01)
    process.terminate()
    assert process.wait(timeout=60) == 75
    state = json.loads((bench.folder / "out" / "pipeline.json").read_text())["stages"]
    assert [(name, entry["status"]) for name, entry in state.items()] == [("a", "done")]
    (bench.folder / "work.py").write_text(WORK)
    assert bench.go() == 0
    assert bench.log == ["a", "b", "c"]


def test_a_configuration_in_another_encoding_is_an_error_of_its_stage(bench: Bench) -> None:
    (bench.folder / "b.yaml").write_bytes("# gr\xfc\xdfe".encode("latin-1"))
    assert bench.go("a") == 0
    assert bench.log == ["a"]


def test_figures_are_found_where_runs_leave_them(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "run.json").write_text('{"status": "done", "memory": {"peak": 7}}')
    (tmp_path / "eval" / "eval.json").write_text('{"tasks": {"gsm8k": {"scores": {"exact_match": {"value": 0.4}}}}}')
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 3, "acc": 0.9}\n{"step": 2, "loss": 2, "is_best": true}\n'
        '{"step": 3, "eval_loss": 1, "acc": "nan"}\n'
    )
    figures = list_figures(tmp_path)
    assert not holds("> 0.5", figures.pop("acc"))
    wanted = {"step": 3, "loss": 2, "eval_loss": 1, "memory.peak": 7, "gsm8k.exact_match": 0.4}
    assert figures == wanted | {"tasks.gsm8k.scores.exact_match.value": 0.4}

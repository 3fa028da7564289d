"""Start and end of a run: ``run.json``, resume, changed keys, lock, and errors of the file system."""

import dataclasses
import errno
import json
import os
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.training.configurations import build_recipe

from recipes_lib.config.schema import DataConfig, ModelConfig, RecipeConfig, TokensConfig
from recipes_lib.errors import ConfigError, DivergedError, LostPeerError, PreemptedError
from recipes_lib.models.saved_weights import verify_weights
from recipes_lib.processes import explain_lost_connection
from recipes_lib.training import run as run_module
from recipes_lib.training.checkpoints.manifest import write_complete
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.run import RECORDED, Run, start_run


@pytest.fixture(autouse=True)
def rendezvous(monkeypatch):
    """Set the rendezvous variables of a launcher, which runs of two processes need."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


ONE = Launch(rank=0, local_rank=0, world_size=1, engine="")


def make_config(output_dir: Path, *, tokens=None, **training) -> RecipeConfig:
    return build_recipe(
        {"output_dir": str(output_dir), "learning_rate": 1e-5} | training,
        data=DataConfig(dataset_name="chats.jsonl"),
        tokens=tokens or TokensConfig(),
        model=ModelConfig(model_name_or_path="model"),
        provenance={"learning_rate": "--learning_rate"},
    )


TWO = Launch(rank=0, local_rank=0, world_size=2, engine="")
BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def write_checkpoint(output_dir: Path, step: int, **facts) -> Path:
    checkpoint = output_dir / f"checkpoint-{step}"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    write_complete(checkpoint, **{"step": step, "world_size": 1, "data_size": 1} | facts)
    return checkpoint


def test_new_run_records_config_versions_and_hardware(tmp_path):
    run = start_run(make_config(tmp_path / "a path with spaces"), ONE)
    record = json.loads((run.output_dir / "run.json").read_text())
    assert record["status"] == "running"
    assert record["config"]["learning_rate"] == 1e-5
    assert record["provenance"] == {"learning_rate": "--learning_rate"}
    assert {"python", "torch", "transformers", "trl", "recipes-lib"} <= record["versions"].keys()
    assert record["hardware"]["device"]
    assert record["planned"] is None, "there is no GPU"
    assert (run.resume_from, run.finished) == (None, False)


def test_auto_checkpointing_is_resolved_logged_and_recorded(tmp_path, capsys):
    config = make_config(tmp_path, activation_checkpointing="auto")
    for _ in range(2):  # The second start resumes: the configuration is unchanged.
        run = start_run(config, ONE)
        record = json.loads((tmp_path / "run.json").read_text())
        assert record["config"]["activation_checkpointing"] == "auto"
        assert record["activation_checkpointing"] == "none (there is no GPU)"
        assert "activation checkpointing: none (there is no GPU)" in capsys.readouterr().err
        assert run.config.training["activation_checkpointing"] is False
        write_checkpoint(tmp_path, 5) if not run.resume_from else None
    assert run.resume_from


def test_record_has_planned_and_measured_cost(tmp_path, monkeypatch):
    """Measured are median step time and peak memory of training events, without evaluations, and the last loss."""
    planned = {"memory_bytes": 3, "step_seconds": 0.5}
    monkeypatch.setattr("recipes_lib.training.run.plan_run", lambda config, launch, name: planned)
    run = start_run(make_config(tmp_path), ONE)
    with run.recording_its_end():
        logged = [(2, 40.0, 5), (4, 41.0, 7), (6, 42.2, 6), (8, 43.6, 6)]
        events = [{"kind": "train", "step": step, "seconds": at, "memory_bytes": size} for step, at, size in logged]
        events.append({"kind": "eval", "step": 8, "seconds": 90.0, "memory_bytes": 9, "eval_loss": 2.5})
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["planned"] == planned
    assert record["measured"] == {"memory_bytes": 7, "step_seconds": pytest.approx(0.6), "eval_loss": 2.5}


def test_damaged_checkpoint_is_reported_and_skipped(tmp_path, capsys):
    config = make_config(tmp_path)
    start_run(config, ONE)
    good = write_checkpoint(tmp_path, 5)
    (write_checkpoint(tmp_path, 10) / "model.safetensors").write_bytes(b"weighty")
    capsys.readouterr()
    assert start_run(config, ONE).choose_checkpoint() == good
    logged = capsys.readouterr().err
    damaged, resumed = logged.splitlines()
    assert "checkpoint-10 is damaged: model.safetensors does not match its SHA-256" in damaged
    assert resumed == "resumed from checkpoint-5"
    assert json.loads((tmp_path / "run.json").read_text())["resumed_from"] == "checkpoint-5"
    assert start_run(config, ONE).choose_checkpoint() == good


def test_only_main_process_removes_leftovers_of_killed_save(tmp_path):
    left = tmp_path / "_saving" / "checkpoint-5"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"wei")
    start_run(make_config(tmp_path), Launch(rank=1, local_rank=1, world_size=2, engine=""))
    assert left.exists()
    start_run(make_config(tmp_path), ONE)
    assert not left.parent.exists()


def test_global_batch_size_is_kept_on_other_world_size(tmp_path, capsys):
    config = make_config(tmp_path, **BATCH)
    assert start_run(config, ONE).config == config
    write_checkpoint(tmp_path, 5, **BATCH)
    for _ in range(2):
        capsys.readouterr()
        assert start_run(config, TWO).config.training["gradient_accumulation_steps"] == 2
        assert "2 processes instead of 1: gradient_accumulation_steps is 2" in capsys.readouterr().err
        record = json.loads((tmp_path / "run.json").read_text())
        # The record has the key as written, and the global batch size.
        assert record["config"]["gradient_accumulation_steps"] == 4
        assert record["rows_per_step"] == 8
    # Keys of the same global batch for two processes are the same run, which then resumes on one.
    rewritten = make_config(tmp_path, **BATCH | {"gradient_accumulation_steps": 2})
    assert start_run(rewritten, TWO).config == rewritten
    assert start_run(rewritten, ONE).config.training["gradient_accumulation_steps"] == 4


def test_generation_rewritten_for_other_world_size_is_the_same_run(tmp_path):
    keys, halved = BATCH | {"steps_per_generation": 8}, BATCH | {"gradient_accumulation_steps": 2}
    start_run(make_config(tmp_path, **keys), ONE)
    write_checkpoint(tmp_path, 5, **keys)
    rewritten = make_config(tmp_path, **halved, steps_per_generation=4)
    assert start_run(rewritten, TWO).config == rewritten
    with pytest.raises(ConfigError, match="steps_per_generation was 4"):
        start_run(make_config(tmp_path, **halved, steps_per_generation=8), TWO)


def test_late_rank_computes_same_accumulation(tmp_path):
    config = make_config(tmp_path, **BATCH)
    start_run(config, ONE)
    write_checkpoint(tmp_path, 5, **BATCH)
    late = Launch(rank=1, local_rank=1, world_size=2, engine="")
    early = start_run(config, late).config
    assert start_run(config, TWO).config == early == start_run(config, late).config


@pytest.mark.parametrize(
    "keys", [{"per_device_train_batch_size": 4}, {"gradient_accumulation_steps": 2}], ids=["larger", "smaller"]
)
def test_changed_global_batch_size_is_refused(tmp_path, keys):
    start_run(make_config(tmp_path, **BATCH), ONE)
    write_checkpoint(tmp_path, 5, **BATCH)
    with pytest.raises(ConfigError, match=f"{next(iter(keys))} was"):
        start_run(make_config(tmp_path, **BATCH | keys), ONE)
    same = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert start_run(make_config(tmp_path, **same), ONE).resume_from


def test_indivisible_global_batch_is_refused_before_any_write(tmp_path):
    config = make_config(tmp_path, **BATCH)
    start_run(config, ONE)
    write_checkpoint(tmp_path, 5, **BATCH)
    before = (tmp_path / "run.json").read_text()
    with pytest.raises(ConfigError, match="start 1, 2 or 4 processes"):
        start_run(config, Launch(rank=0, local_rank=0, world_size=3, engine=""))
    assert (tmp_path / "run.json").read_text() == before


def finish(config: RecipeConfig) -> Path:
    """Write a finished run with a model of one tensor."""
    run = start_run(config, ONE)
    with run.recording_its_end():
        save_file({"weight": torch.ones(3)}, run.output_dir / "model.safetensors")
        for name in ("config.json", "tokenizer.json"):
            (run.output_dir / name).write_text("{}")
    return run.output_dir


def test_finished_run_is_not_modified(tmp_path, capsys):
    output_dir = finish(make_config(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in output_dir.iterdir()}
    capsys.readouterr()
    assert start_run(make_config(tmp_path), ONE).finished
    assert {path: path.stat().st_mtime_ns for path in output_dir.iterdir()} == before
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", None, "model.safetensors is missing"),
        ("model.safetensors", b"cut", "model.safetensors cannot be opened"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
    ],
)
@pytest.mark.parametrize("launch", [ONE, Launch(rank=1, local_rank=1, world_size=2, engine="")], ids=["main", "other"])
def test_missing_model_of_finished_run_is_rewritten_from_checkpoint(tmp_path, launch, name, content, words, capsys):
    config = make_config(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2 // launch.world_size)
    finish(make_config(tmp_path, **BATCH))
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"the run is done, {words}.*no checkpoint"):
        start_run(config, launch)
    checkpoint = write_checkpoint(tmp_path, 5, **BATCH)
    run = start_run(config, launch)
    assert (run.finished, run.resume_from) == (False, checkpoint)
    assert (f"{words}" in capsys.readouterr().err) == launch.is_main


@pytest.mark.parametrize("ended", ["with a checkpoint", "done"])
def test_output_dir_of_other_config_is_refused_with_changed_keys(tmp_path, ended):
    first = start_run(make_config(tmp_path), ONE)
    if ended == "done":
        with first.recording_its_end():
            pass
    else:
        write_checkpoint(tmp_path, 5)
    # `project` may change, and its name begins that of another key. An unset seed is 0 for rows, whatever its default.
    changed = {"learning_rate": 2e-5, "projection_learning_rate": 0.01, "seed": 42}
    other = make_config(tmp_path, tokens=TokensConfig(max_length=64, packing=False), **changed)
    with pytest.raises(ConfigError) as caught:
        start_run(other, ONE)
    names = [problem.found.split()[0] for problem in caught.value.problems]
    assert names == ["learning_rate", "max_length", "packing", "projection_learning_rate", "seed"]
    assert "1e-05" in str(caught.value)


def test_keys_may_change_before_first_checkpoint(tmp_path):
    start_run(make_config(tmp_path), ONE)
    assert start_run(make_config(tmp_path, learning_rate=2e-5), ONE).resume_from is None


def test_key_missing_in_older_record_has_its_default(tmp_path):
    start_run(make_config(tmp_path), ONE)
    write_checkpoint(tmp_path, 5)
    path = tmp_path / "run.json"
    record = json.loads(path.read_text())
    del record["config"]["broken_rows"]
    path.write_text(json.dumps(record))
    config = make_config(tmp_path)
    with pytest.raises(ConfigError, match="broken_rows was 'error' in the run"):
        start_run(dataclasses.replace(config, tokens=dataclasses.replace(config.tokens, broken_rows="drop")), ONE)
    assert start_run(config, ONE).resume_from is not None


RESUMED = (
    {"logging_steps": 7, "save_total_limit": 1, "report_to": "none"},
    {"project": "other", "hub_strategy": "end"},
    {"metrics": ["scores:Overlap"], "debug": "underflow_overflow"},
    {"eval_strategy": "steps", "eval_steps": 50, "per_device_eval_batch_size": 1, "ddp_timeout": 7200},
    {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True},
    *({"activation_checkpointing": value} for value in (True, "auto")),
)


@pytest.mark.parametrize("now", RESUMED)
def test_keys_that_do_not_affect_weights_may_change_on_resume(tmp_path, now):
    start_run(make_config(tmp_path, activation_checkpointing=False), ONE)
    write_checkpoint(tmp_path, 5)
    assert start_run(make_config(tmp_path, **now), ONE).resume_from


def test_evaluations_may_not_change_if_learning_rates_follow_them(tmp_path):
    start_run(make_config(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_steps=10), ONE)
    write_checkpoint(tmp_path, 5)
    with pytest.raises(ConfigError, match="eval_steps was 10 in the run"):
        start_run(make_config(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_steps=50), ONE)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DivergedError("nan"), "diverged"),
        (ConfigError(), "refused"),
        (KeyboardInterrupt(), "interrupted"),
        (ZeroDivisionError(), "failed"),
        (PreemptedError("SIGTERM: stopped after step 3"), "preempted"),
        (LostPeerError("process 1 ended"), "refused"),
    ],
)
def test_final_status_is_recorded_and_error_reraised(tmp_path, monkeypatch, error, status):
    monkeypatch.setattr(run_module, "read_failure_code", lambda: 2)  # Of another rank.
    run = start_run(make_config(tmp_path), ONE)
    with pytest.raises(type(error)), run.recording_its_end():
        raise error
    assert json.loads((tmp_path / "run.json").read_text())["status"] == status
    assert not start_run(make_config(tmp_path), ONE).finished
    resumed = json.loads((tmp_path / "run.json").read_text())
    assert [resumed[name] for name in ("status", "finished", "error")] == ["running", None, None]


DATA = {
    "packed": lambda digest: {"key": digest * 2, "inputs": {"sources": {"train": digest, "test": "b"}}},
    "tokens": lambda digest: {"sources": [{"name": "web", "fingerprint": digest}], "num_rows": 3},
    "prompts": lambda digest: {"num_prompts": 3, "fingerprint": digest},
}


@pytest.mark.parametrize("kind", DATA)
def test_resumed_run_must_have_the_same_rows(tmp_path, kind):
    data, config = DATA[kind], make_config(tmp_path, save_steps=5)
    start_run(config, ONE).record(data=data("a"))
    # Before the first checkpoint, data may change.
    start_run(config, ONE).record(data=data("c"))
    write_checkpoint(tmp_path, 5)
    start_run(config, ONE).record(data={**data("c"), "num_rows": 4})
    before = json.loads((tmp_path / "run.json").read_text())
    run, found = start_run(make_config(tmp_path, save_steps=7), ONE), "run.json: the rows of the dataset are not those"
    with pytest.raises(ConfigError, match=found), run.recording_its_end():
        run.record(data=data("d"))
    refused = json.loads((tmp_path / "run.json").read_text())
    assert refused == before | {name: refused[name] for name in ("status", "finished", "error")}
    assert start_run(config, ONE).facts["data"] == {**data("c"), "num_rows": 4}


@pytest.mark.parametrize("data", [None, 3, {}, {"sources": [{}, 3]}, {"inputs": 3}, {"inputs": {"sources": 3}}])
def test_run_whose_record_has_no_fingerprint_resumes(tmp_path, data):
    start_run(make_config(tmp_path), ONE).record(data=data)
    write_checkpoint(tmp_path, 5)
    start_run(make_config(tmp_path), ONE).record(data=DATA["packed"]("c"))


WEIGHTS = {
    "Hub": ("model", "model_name_or_path", "sft"),
    "model": ("model", "model_name_or_path", "sft"),
    "teacher": ("distillation", "teacher_model_name_or_path", "distill"),
    "adapter": ("adapter", "adapter_name_or_path", "dpo"),
    "penalty": ("forgetting", "ewc_reference", "sft"),
    "tokenizer": ("model", "tokenizer_name_or_path", "pretrain"),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_resumed_run_must_have_the_same_weights_at_any_path(tmp_path, monkeypatch, kind):
    base = tmp_path / "base"
    base.mkdir()
    (base / "interrupted_download.safetensors").touch()
    if kind == "Hub":
        monkeypatch.setattr(run_module, "find_model_folder", lambda *_: base)
    section, key, recipe = WEIGHTS[kind]

    def write(value: float) -> None:
        weights = torch.zeros(1000, 1000)
        weights[500:] = value  # A model of which only a part was trained.
        save_file({"weight": weights}, base / "model.safetensors")
        (base / "tokenizer.json").write_text(str(value))

    def choose(folder: Path = base) -> dict:
        config = make_config(tmp_path)
        part = dataclasses.replace(getattr(config, section), **{key: "owner/name" if kind == "Hub" else str(folder)})
        run = start_run(dataclasses.replace(config, recipe=recipe, **{section: part}), ONE)
        run.choose_checkpoint()
        return run.facts

    write(1.0)
    choose()
    # Before the first checkpoint, the model may change.
    write(2.0)
    choose()
    write_checkpoint(tmp_path, 5)
    choose()
    if kind != "Hub":
        base = base.rename(tmp_path / "moved")
        assert choose(base)["resumed_from"] == "checkpoint-5"
        with pytest.raises(ConfigError, match="in the run of this directory and is now"):
            choose(tmp_path / "missing")
    write(3.0)
    named = "`model_name_or_path`" if kind in ("Hub", "model") else "the (tokenizer|reward model, critic)"
    with pytest.raises(ConfigError, match=f"the (weights|files) of {named}.* are not those that this run began"):
        choose(base)
    write(2.0)
    assert choose(base)["resumed_from"] == "checkpoint-5"


def test_output_dir_is_locked_until_process_exits(tmp_path):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(writer)
        try:
            start_run(make_config(tmp_path), ONE)
            (tmp_path / "started").touch()
            os.read(reader, 1)
        finally:
            os._exit(0)
    os.close(reader)
    while not (tmp_path / "started").exists():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    (tmp_path / "_saving").mkdir()
    with pytest.raises(ConfigError, match="another process runs in it"):
        start_run(make_config(tmp_path), ONE)
    # The second start has not removed files that the first process may be writing.
    assert (tmp_path / "_saving").is_dir()
    os.close(writer)
    os.waitpid(pid, 0)
    start_run(make_config(tmp_path), ONE)


def test_moved_output_dir_resumes(tmp_path):
    start_run(make_config(tmp_path / "here"), ONE)
    write_checkpoint(tmp_path / "here", 5)
    (tmp_path / "here").rename(tmp_path / "there")
    assert start_run(make_config(tmp_path / "there"), ONE).resume_from == tmp_path / "there" / "checkpoint-5"


def test_output_dir_that_cannot_be_created_or_written_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match=r"cannot be written: File exists\n    .* mount the disk"):
        start_run(make_config(tmp_path / "link"), ONE)
    (tmp_path / "_lock").mkdir()  # File modes do not restrict root.
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        start_run(make_config(tmp_path), ONE)


@pytest.mark.parametrize(
    "use", [lambda folder: (folder / "metrics.jsonl").write_text(""), lambda f: verify_weights(f, {})]
)
def test_output_dir_renamed_during_run_is_reported(tmp_path, use):
    there, away = tmp_path / "there", tmp_path / "away"
    run = start_run(make_config(there), ONE)
    checkpoint = write_checkpoint(there, 5)
    there.rename(away)
    with pytest.raises(ConfigError, match="is missing: it was renamed"), run.recording_its_end():
        use(there)
    assert not there.exists()
    away.rename(there)
    assert start_run(make_config(there), ONE).resume_from == checkpoint


def test_checkpoint_with_pickled_objects_is_refused(tmp_path):
    config = make_config(tmp_path)
    facts = start_run(config, ONE).facts
    checkpoint = write_checkpoint(tmp_path, 5, run={key: facts[key] for key in RECORDED})
    (checkpoint / "optimizer.pt").write_bytes(pickle.dumps(Path("an object")))
    run = start_run(config, ONE)
    refused = pytest.raises(ConfigError, match="checkpoint-5: was not loaded: a file in it contains")
    with refused as caught, run.recording_its_end():
        torch.load(run.resume_from / "optimizer.pt", weights_only=True)
    assert "delete the checkpoint" in caught.value.problems[0].remedy
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "refused"


def test_truncated_record_without_checkpoint_is_replaced(tmp_path):
    (tmp_path / "run.json").write_text('{"status": "run')
    assert start_run(make_config(tmp_path), ONE).resume_from is None


DAMAGES = {
    "missing": None,
    "empty": "",
    "torn": '{"stage": "sf',
    "foreign": '{"name": "x"}',
    "a list": "[]",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("what", DAMAGES)
def test_lost_record_is_restored_from_newest_checkpoint(tmp_path, what):
    config = make_config(tmp_path)
    before = start_run(config, ONE).facts
    checkpoint = write_checkpoint(tmp_path, 5, run={key: before[key] for key in RECORDED})
    (tmp_path / "run.json").unlink()
    if DAMAGES[what] is not None:
        (tmp_path / "run.json").write_text(DAMAGES[what])
    again = start_run(config, ONE)
    assert again.resume_from == checkpoint
    record = json.loads((tmp_path / "run.json").read_text())
    assert {key: record[key] for key in RECORDED} == {key: before[key] for key in RECORDED}
    (tmp_path / "run.json").unlink()
    with pytest.raises(ConfigError, match="learning_rate was 1e-05 in the run of this directory"):
        start_run(make_config(tmp_path, learning_rate=1.0), ONE)


def test_lost_record_without_copy_in_checkpoint_is_refused(tmp_path):
    """Checkpoints of older versions have no copy."""
    start_run(make_config(tmp_path), ONE)
    write_checkpoint(tmp_path, 5)
    (tmp_path / "run.json").write_text("")
    with pytest.raises(ConfigError, match=r"run\.json: has unexpected fields: `stage` is missing") as caught:
        start_run(make_config(tmp_path), ONE)
    assert caught.value.problems[0].remedy == "restore the file, or choose another output_dir"


@pytest.mark.parametrize("content", ['{"name": "my project"}', None])
def test_unrelated_run_json_is_not_overwritten(tmp_path, content):
    path = tmp_path / "run.json"
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(ConfigError, match=r"run\.json"):
        start_run(make_config(tmp_path), ONE)
    assert content is None or path.read_text() == content


def test_record_deleted_during_run_is_rewritten_in_full(tmp_path):
    run = start_run(make_config(tmp_path), ONE)
    (tmp_path / "run.json").unlink()
    with run.recording_its_end():
        pass
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "done"
    assert record["config"]["learning_rate"] == 1e-5


def test_errors_of_summary_do_not_replace_final_status(tmp_path):
    config = make_config(tmp_path / "out")
    config = dataclasses.replace(config, model=ModelConfig(model_name_or_path=str(tmp_path / "deleted model")))
    run = start_run(config, ONE)
    (tmp_path / "out" / "rollbacks.json").write_text("{")
    with pytest.raises(ZeroDivisionError), run.recording_its_end():
        raise ZeroDivisionError("the reason")
    assert json.loads((tmp_path / "out" / "run.json").read_text())["error"] == "ZeroDivisionError: the reason"
    with run.recording_its_end():
        pass
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "done"


@pytest.mark.parametrize(("name", "kind"), [("out/gone/a.pt", ConfigError), ("a.pt", FileNotFoundError)])
def test_missing_file_of_run_is_user_error_and_other_is_bug(tmp_path, name, kind):
    run = start_run(make_config(tmp_path / "out"), ONE)
    with pytest.raises(kind, match=Path(name).name), run.recording_its_end():
        (tmp_path / name).read_bytes()


def test_lost_connection_is_reported_as_lost_peer(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    # There is no launcher to wait for.
    monkeypatch.setattr("recipes_lib.training.run.explain_lost_connection", partial(explain_lost_connection, seconds=0))
    run = start_run(make_config(tmp_path), TWO)
    with pytest.raises(LostPeerError, match="another process ended"), run.recording_its_end():
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:429")
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"


def test_full_disk_at_end_does_not_hide_error_of_run(tmp_path, monkeypatch):
    run = start_run(make_config(tmp_path), ONE)

    def refuse(self, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(DivergedError), run.recording_its_end():
        raise DivergedError("nan")
    with pytest.raises(OSError, match=r"run\.json"):
        run.record(status="done")


def test_full_disk_is_recorded_in_reserved_space(tmp_path, monkeypatch):
    run = start_run(make_config(tmp_path), ONE)
    write = Path.write_text

    def write_where_there_is_room(path: Path, *text: str, **options: str) -> None:
        if not path.exists() or path.stat().st_size:  # A new file needs an inode.
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, *text, **options)

    monkeypatch.setattr(Path, "write_text", write_where_there_is_room)
    # torch and safetensors do not name the file, and `prepared_dir` may be on another disk.
    with pytest.raises(ConfigError, match=f"{tmp_path}: the disk is full"), run.recording_its_end():
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "refused"
    assert "the disk is full" in record["error"]


def test_full_disk_at_final_record_is_status_refused(tmp_path, monkeypatch):
    run, record = start_run(make_config(tmp_path), ONE), Run.record

    def fail_once(self, **facts):
        if facts.get("status") == "done":
            raise OSError(errno.ENOSPC, "No space left on device")
        record(self, **facts)

    monkeypatch.setattr(Run, "record", fail_once)
    with pytest.raises(ConfigError, match="the disk is full"), run.recording_its_end():
        pass
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "refused"


def test_stalled_run_is_recorded(tmp_path):
    with start_run(make_config(tmp_path), ONE).recording_its_end():
        WATCHDOG.on_stall("rank 0: no progress")
        record = json.loads((tmp_path / "run.json").read_text())
    assert (record["status"], record["error"]) == ("stalled", "rank 0: no progress")

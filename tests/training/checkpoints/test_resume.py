"""Resume with another world size or engine: batch, seeds, and agreement of all ranks on one checkpoint."""

import dataclasses
import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.training.configurations import build_recipe
from tests.training.test_run import ONE, make_config

from recipes_lib.config.schema import DataConfig, ModelConfig, ScheduleConfig
from recipes_lib.errors import ConfigError
from recipes_lib.training import run as run_module
from recipes_lib.training.checkpoints import manifest
from recipes_lib.training.checkpoints import resume as resumption
from recipes_lib.training.checkpoints.manifest import find_last_complete, write_complete
from recipes_lib.training.checkpoints.resume import (
    agree_on_checkpoint,
    count_rows_per_step,
    keep_batch,
    seed_process,
    verify_checkpoint_fits,
)
from recipes_lib.training.layouts.launch_environment import Launch
from recipes_lib.training.run import Run, start_run


def launch(world_size, engine=""):
    return Launch(rank=0, local_rank=0, world_size=world_size, engine=engine)


def config(per_device, accumulation, **sections):
    batch = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulation}
    return build_recipe(batch, provenance={"per_device_train_batch_size": "a.yaml:3"}, **sections)


def record(world_size, per_device, accumulation, engine=""):
    batch = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulation}
    return {"world_size": world_size, "data_size": world_size, "engine": engine, **batch}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("sft", r"max_steps was \S+ in .* is now 9\n    choose"),
        ("lora", r"^\S+run\.json: is of the recipe sft, not lora\n"),
    ],
)
def test_run_of_other_recipe_or_length_is_one_error(tmp_path, recipe, message):
    start_run(make_config(tmp_path), ONE)
    (tmp_path / "checkpoint-5").mkdir()
    write_complete(tmp_path / "checkpoint-5", step=5, data_size=1)
    now = dataclasses.replace(make_config(tmp_path, max_steps=9), recipe=recipe)
    with pytest.raises(ConfigError, match=message) as caught:
        start_run(now, ONE)
    assert len(caught.value.problems) == 1


def test_rows_per_step_uses_upstream_defaults():
    assert count_rows_per_step({}, 3) == 24


@pytest.mark.parametrize(
    ("before", "written", "now", "accumulation"),
    [
        ((1, 2, 4), (2, 4), 2, 2),
        ((2, 2, 2), (2, 2), 1, 4),
        ((2, 2, 2), (2, 4), 2, 2),  # The configuration of the first start.
        ((8, 1, 1), (1, 1), 1, 8),
        ((3, 2, 4), (2, 4), 6, 2),
        ((2, 2, 2), (4, 2), 1, 2),  # Changed by the user to the same product.
        ((2, 4, 4), (8, 4), 4, 1),
    ],
)
def test_keep_batch_adapts_gradient_accumulation(before, written, now, accumulation):
    lines: list[str] = []
    kept = keep_batch(config(*written), launch(now), record(*before), lines.append)
    assert kept.training["gradient_accumulation_steps"] == accumulation
    assert kept.training["per_device_train_batch_size"] == written[0]
    rows = before[0] * before[1] * before[2]
    assert count_rows_per_step(kept.training, now) == rows
    assert len(lines) == (accumulation != written[1])
    if lines:
        assert f"gradient_accumulation_steps is {accumulation}, so that a step still takes {rows} rows" in lines[0]


def test_keep_batch_counts_the_data_parallel_ranks_of_the_checkpoint():
    kept = keep_batch(config(2, 2), launch(1), record(4, 2, 2) | {"data_size": 2}, [].append)
    assert kept.training["gradient_accumulation_steps"] == 4
    # Manifests of earlier versions, or of others.
    kept = keep_batch(config(2, 2), launch(1), record(4, 2, 2) | {"data_size": None}, [].append)
    assert kept.training["gradient_accumulation_steps"] == 8


@pytest.mark.parametrize(
    ("before", "written", "now", "steps"),
    [
        ((1, 4, 4, 8), (4, 4, 8), 2, 4),
        ((2, 4, 2, 4), (4, 4, 8), 2, 4),  # The configuration of the first start.
        ((2, 4, 2, 4), (4, 4, 8), 1, 8),
        ((1, 4, 4, 8), (8, 2, 8), 1, 4),  # The batch changed by the user, at the same world size.
        ((1, 4, 4, 8), (4, 4, 8), 1, 8),
    ],
)
def test_keep_batch_adapts_steps_per_generation(before, written, now, steps):
    *batch, written_steps = written
    recipe = config(*batch)
    recipe.training["steps_per_generation"] = written_steps
    lines: list[str] = []
    kept = keep_batch(recipe, launch(now), record(*before[:3]) | {"steps_per_generation": before[3]}, lines.append)
    assert kept.training["steps_per_generation"] == steps
    assert batch[0] * steps * now == before[0] * before[1] * before[3]
    assert count_rows_per_step(kept.training, now) == before[0] * before[1] * before[2]
    assert ("steps_per_generation" in "".join(lines)) == (steps != written_steps)


@pytest.mark.parametrize(
    ("now", "before", "steps", "remedy"),
    [
        (3, (1, 2, 4), None, "start 1, 2 or 4 processes"),
        (4, (1, 2, 6), None, "start 1, 2, 3 or 6 processes, or write per_device_train_batch_size and "),
        (4, (1, 2, 6), None, "whose product is 3 (the former 1 or 3)"),
        # 8 rows and 12 answers: a number of processes must divide both.
        (4, (1, 2, 4), 6, "8 rows and samples 12 answers at a time, which 4 processes with 2"),
        (4, (1, 2, 4), 6, "start 1 or 2 processes, or write "),
        (4, (1, 2, 4), 6, "whose product is 2 (the former 1)"),
    ],
)
def test_indivisible_batch_lists_possible_world_sizes(now, before, steps, remedy):
    recipe = config(2, 4)
    if steps is not None:
        recipe.training["steps_per_generation"] = steps
    with pytest.raises(ConfigError) as caught:
        keep_batch(recipe, launch(now), record(*before) | {"steps_per_generation": steps}, [].append)
    assert remedy in str(caught.value)
    assert str(caught.value).startswith("a.yaml:3: a step of this run takes")


@pytest.mark.parametrize("key", ["batch_ramp_tokens", "dataloader_drop_last"])
def test_keys_of_micro_batches_reject_other_ones(key):
    def build(*batch):
        recipe = config(*batch, schedule=ScheduleConfig(batch_ramp_tokens=1000 if key == "batch_ramp_tokens" else None))
        return recipe.with_training({"dataloader_drop_last": key == "dataloader_drop_last"})

    with pytest.raises(ConfigError, match=f"{key} .* 4 per step at the checkpoint and 2 now"):
        keep_batch(build(2, 4), launch(2), record(1, 2, 4), [].append)
    unchanged = build(1, 4)
    assert keep_batch(unchanged, launch(2), record(1, 2, 4), [].append) is unchanged


@pytest.mark.parametrize("now", ["", "FSDP"])
@pytest.mark.parametrize("before", ["", "FSDP"])
def test_replicated_and_fsdp_fit_each_other_at_any_world_size(before, now):
    verify_checkpoint_fits(record(4, 1, 1, before), "checkpoint-3", launch(3, now))


@pytest.mark.parametrize(("before", "now"), [("", "DEEPSPEED"), ("DEEPSPEED", "FSDP"), ("FSDP", "DEEPSPEED")])
def test_deepspeed_and_other_engines_do_not_fit(before, now):
    with pytest.raises(ConfigError, match=r"was written under[\s\S]*recipes export .*checkpoint-3 FOLDER"):
        verify_checkpoint_fits(record(2, 1, 1, before), "checkpoint-3", launch(2, now))


def test_deepspeed_needs_same_world_size():
    split = record(4, 1, 1, "DEEPSPEED")
    verify_checkpoint_fits(split, "checkpoint-3", launch(4, "DEEPSPEED"))
    with pytest.raises(ConfigError, match=r"split over 4 processes and this launch has 2[\s\S]*recipes export"):
        verify_checkpoint_fits(split, "checkpoint-3", launch(2, "DEEPSPEED"))


@pytest.mark.parametrize("stage", [2, 3])
def test_zero3_and_other_stages_do_not_fit(stage):
    """DeepSpeed would fail on an assertion without words."""
    name = f"global_step2/{'zero_pp_rank_1_' if stage == 3 else ''}mp_rank_00_model_states.pt"
    optimizer = "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    split = {**record(2, 1, 1, "DEEPSPEED"), "files": {name: {}, optimizer: {}}}
    now = launch(2, "DEEPSPEED")
    same, other = (
        dataclasses.replace(now, layout=dataclasses.replace(now.layout, zero_stage=number))
        for number in (stage, 5 - stage)
    )
    verify_checkpoint_fits(split, "checkpoint-3", same)
    with pytest.raises(
        ConfigError, match=f"was written under ZeRO-.* and this launch is ZeRO-{5 - stage}\n.*recipes export"
    ):
        verify_checkpoint_fits(split, "checkpoint-3", other)


def draw():
    # The legacy global generator of numpy, which is the one that upstream saves.
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def test_seed_process_depends_on_seed_step_and_rank():
    draws = {}
    for key in [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (0, 1, 0)]:
        seed_process(*key)
        values = draw()
        assert draws.setdefault(key, values) == values
    assert len(set(draws.values())) == 4


def write_checkpoint(output_dir, step):
    checkpoint = output_dir / f"checkpoint-{step}"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    write_complete(checkpoint, step=step)
    return checkpoint


def agree(resume_from, lines):
    return agree_on_checkpoint(resume_from, launch(1), {}, lines.append)


def test_agree_on_checkpoint_renames_damaged_ones(tmp_path):
    first, good, bad, unfinished = (write_checkpoint(tmp_path, step) for step in (8, 9, 10, 11))
    (bad / "model.safetensors").write_bytes(b"weighty")
    (unfinished / "COMPLETE.json").unlink()
    lines = []
    assert agree(bad, lines) == good
    assert lines == [
        "checkpoint-11 is damaged: it has no readable COMPLETE.json; it is kept as damaged-checkpoint-11",
        "checkpoint-10 is damaged: model.safetensors does not match its SHA-256; it is kept as damaged-checkpoint-10",
    ]
    names = ["checkpoint-8", "checkpoint-9", "damaged-checkpoint-10", "damaged-checkpoint-11"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert agree(good, lines) == good
    for checkpoint in (first, good):
        (checkpoint / "model.safetensors").write_bytes(b"")
    assert agree(good, lines) is None
    assert agree(None, lines) is None
    assert len(lines) == 4


@pytest.mark.parametrize("name", ["COMPLETE.json", "model.safetensors"])
def test_unreadable_checkpoint_is_neither_damaged_nor_ignored(tmp_path, monkeypatch, name):
    """As after a run of another user, or on a network mount with a fault: the next run would begin at step 0."""
    newest, opened = write_checkpoint(tmp_path, 9), os.open

    def refuse(path, *args, **kwargs):
        if str(path) == str(newest / name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(manifest, "hash_file", lambda path: refuse(path, os.O_RDONLY))
    found = f"{name}: cannot be read: Permission denied\n"
    with pytest.raises(ConfigError, match=found):
        agree(find_last_complete(tmp_path), [])
    assert newest.is_dir()


def test_checkpoint_on_a_failing_disk_is_not_ignored(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write_checkpoint(tmp_path, 9)
    monkeypatch.setattr(os, "read", fail)
    monkeypatch.setattr("recipes_lib.files._open_regular", fail)
    with pytest.raises(ConfigError, match=r"COMPLETE\.json: cannot be read: Input/output error"):
        find_last_complete(tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("COMPLETE.json", "it has no readable COMPLETE.json"),
        ("model.safetensors", "model.safetensors has 0 bytes instead of 7"),
    ],
)
def test_only_checkpoint_that_is_incomplete_is_ignored_with_the_reason(name, reason, tmp_path, capsys):
    (write_checkpoint(tmp_path, 500) / name).write_text("")
    assert Run(config(1, 1), tmp_path, launch(1), None, finished=False).choose_checkpoint() is None
    assert f"checkpoint-500 is ignored: {reason}" in capsys.readouterr().err
    assert (tmp_path / "checkpoint-500").is_dir()


@pytest.fixture
def simulate_rank_1(monkeypatch):
    """Simulate rank 1 of 2, with the values that rank 0 broadcasts; return what this rank gathers."""

    def simulate(checkpoint, plan, source=None):
        gathered = []

        def gather(own):
            gathered.append(own)
            return [(None, None), own]

        seen = checkpoint and resumption._see(source or checkpoint)
        monkeypatch.setattr(resumption, "broadcast_object", lambda _: (checkpoint, plan, seen))
        monkeypatch.setattr(resumption, "gather_objects", gather)
        return gathered

    return simulate


SECOND = Launch(rank=1, local_rank=1, world_size=2, engine="")


@pytest.mark.parametrize("other", [None, "shorter", "of another run"])
def test_checkpoint_that_a_rank_does_not_see_as_rank_0_does_is_rejected(tmp_path, simulate_rank_1, other):
    """Otherwise replicas would resume from different states, or rank 0 take its checkpoint for damaged."""
    for name in ("0", *(["1"] if other else [])):
        (tmp_path / name).mkdir()
        checkpoint = write_checkpoint(tmp_path / name, 3)
    if other == "shorter":
        (checkpoint / "model.safetensors").write_bytes(b"w")
    elif other:
        write_complete(checkpoint, step=3, run={"started": "earlier"})
    # Before the plan is compared, which depends on the checkpoint.
    gathered = simulate_rank_1(tmp_path / "1" / "checkpoint-3", {"seed": 1}, tmp_path / "0" / "checkpoint-3")
    with pytest.raises(
        ConfigError, match=r"process 1: on .* does not see .*checkpoint-3.*\n.*storage that all machines share"
    ):
        agree_on_checkpoint(None, SECOND, {}, print)
    assert [damage for _, damage in gathered] == [None]


@pytest.mark.parametrize("is_link", [True, False])
def test_checkpoint_that_is_no_folder_is_rejected(tmp_path, is_link):
    older, newest = write_checkpoint(tmp_path, 3), tmp_path / "checkpoint-6"
    newest.symlink_to(tmp_path / "unmounted") if is_link else newest.touch()
    with pytest.raises(ConfigError, match=r"checkpoint-6: is neither a folder nor a link to one\n"):
        agree_on_checkpoint(older, ONE, {}, print)


def test_checkpoint_copied_from_another_run_is_rejected(tmp_path):
    started = start_run(make_config(tmp_path), ONE).facts["started"]
    checkpoint = write_checkpoint(tmp_path, 3)
    write_complete(checkpoint, step=3, run={"started": "2026-01-01T00:00:00+00:00"})
    with pytest.raises(ConfigError) as caught:
        start_run(make_config(tmp_path), ONE)
    found = f"is of a run that began at '2026-01-01T00:00:00+00:00', and run.json of one that began at '{started}'"
    assert [(problem.where, problem.found) for problem in caught.value.problems] == [(str(checkpoint), found)]


def test_other_plan_than_rank_0_is_rejected(tmp_path, simulate_rank_1):
    simulate_rank_1(write_checkpoint(tmp_path, 3), {"learning_rate": 1e-4, "max_steps": 9, "seed": 1})
    found = "process 1: on .*: learning_rate is 0.5 and 0.0001 on the main process, seed is None and 1 on the main"
    with pytest.raises(ConfigError, match=found):
        agree_on_checkpoint(None, SECOND, {"learning_rate": 0.5, "max_steps": 9}, print)


@pytest.mark.parametrize(
    "other", [{"learning_rate": 0.5}, {"gradient_accumulation_steps": 4}, {"save_steps": 7}, {"torch": "9.9"}]
)
def test_run_compares_keys_and_versions_of_all_ranks(tmp_path, simulate_rank_1, monkeypatch, other):
    plans = []
    monkeypatch.setattr(resumption, "agree_on_checkpoint", lambda resume_from, launch, plan, say: plans.append(plan))
    for number, changed in enumerate(({}, other)):
        versions = {"python": f"3.11.{number}", "torch": changed.get("torch", "2.13")}
        monkeypatch.setattr(run_module, "read_versions", lambda versions=versions: versions)
        keys = {"output_dir": str(tmp_path / str(number)), **changed}
        Run(build_recipe(keys), tmp_path, SECOND, None, finished=False).choose_checkpoint()
    (name,) = other
    differing = {key for key in plans[0].keys() | plans[1].keys() if plans[0].get(key) != plans[1].get(key)}
    assert differing - {"torch"} == {"the version of torch" if name == "torch" else name}


@pytest.mark.parametrize(
    ("what", "file"),
    [
        ("the rows of the dataset", None),
        ("the weights of `model_name_or_path`", "model/model.safetensors"),
        ("the weights of the reward model, critic, reference, teacher", "teacher/model.safetensors"),
        ("the weights of the reward model, critic, reference, teacher", "critic/model.safetensors"),
        ("the files of the tokenizer", "model/chat_template.jinja"),
        ("this library", "library/training/run.py"),
    ],
)
def test_run_compares_contents_of_all_ranks(tmp_path, monkeypatch, what, file):
    """Machines with their own copies of a file would otherwise train on different ones without an error."""
    plans = []
    monkeypatch.setattr(resumption, "agree_on_checkpoint", lambda resume_from, launch, plan, say: plans.append(plan))
    monkeypatch.setattr(run_module, "__file__", str(tmp_path / "library/training/run.py"))
    (tmp_path / "model").mkdir()
    model = ModelConfig(model_name_or_path=str(tmp_path / "model"))
    keys = {f"{name}_model_name_or_path": str(tmp_path / name) for name in ("teacher", "critic")}
    keys["output_dir"] = str(tmp_path / "out")
    for content in ("a", "b"):
        if file:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(content)
        run = Run(build_recipe(keys, model=model), tmp_path, SECOND, None, finished=False)
        run.record(data={"inputs": {"sources": {"train": "a" if file else content}}})
        run.choose_checkpoint()
    (differing,) = (key for key in plans[0] if plans[0][key] != plans[1][key])
    assert differing.startswith(f"the SHA-256 of {what}")
    assert not (tmp_path / "run.json").exists(), "only the main process writes run.json"


@pytest.mark.parametrize(
    "build", [lambda name: {"dataset_name": name}, lambda name: {"dataset_mixture": [{"name": name}]}]
)
def test_run_resumes_with_the_same_rows_at_another_path_only(tmp_path, monkeypatch, build):
    monkeypatch.chdir(tmp_path)

    def start(name: str) -> Run:
        data, model = DataConfig(**build(name)), ModelConfig(model_name_or_path="model")
        return start_run(build_recipe({"output_dir": "out"}, data=data, model=model), ONE)

    def rows(digest: str) -> dict:
        return {"inputs": {"sources": {"train": digest}}}

    Path("away.jsonl").touch()
    start("away.jsonl").record(data=rows("a"))
    (checkpoint := tmp_path / "out" / "checkpoint-5").mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"w")
    write_complete(checkpoint, step=5, world_size=1, data_size=1)
    moved = Path("away.jsonl").rename("here.jsonl")
    start(str(moved)).record(data=rows("a"))
    with pytest.raises(ConfigError, match="the rows of the dataset are not those"):
        start(str(moved)).record(data=rows("b"))
    with pytest.raises(ConfigError, match=" and is now "):
        start("away.jsonl")
    # Of a finished run, nothing would compare the rows.
    start(str(moved)).record(status="done")
    moved.rename("away.jsonl")
    with pytest.raises(ConfigError, match=" and is now "):
        start("away.jsonl")

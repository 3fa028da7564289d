"""``CheckpointingTrainer``: asynchronous saving, dry run, retention, best model and untrusted checkpoints."""

import json
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.trajectories import assert_equal_weights, make_packs, make_trainer, weights_of
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM, TrainerCallback, TrainerState

from recipes_lib.commands.weights import export_checkpoint
from recipes_lib.config.schema import CheckpointConfig, GuardsConfig
from recipes_lib.errors import explain_refusal
from recipes_lib.models.saved_weights import BrokenSaveError
from recipes_lib.training.checkpoints import checkpointing, saver
from recipes_lib.training.checkpoints.manifest import find_damage, read_complete, write_complete
from recipes_lib.training.checkpoints.model_layout import ModelLayout, ReplicatedLayout
from recipes_lib.training.checkpoints.saver import HostCopy, count_bytes
from recipes_lib.training.checkpoints.sharded import Trained

SAVES = {"save_strategy": "steps", "save_steps": 2}


class CallAtStep(TrainerCallback):
    """Calls a function at the end of a step."""

    def __init__(self, step, function):
        self._step, self._function = step, function

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._function()


def train(model_dir, output_dir, *, resume_from=None, callback=None, **training):
    """Train on packed rows; return the trainer, the logged steps and the messages."""
    trainer, recorder = make_trainer(model_dir, output_dir, make_packs(), **SAVES | {"max_steps": 4} | training)
    if callback is not None:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume_from)
    return trainer, recorder.steps, recorder.lines


def read_files(checkpoint):
    # Both contain times and paths.
    names = sorted(path.name for path in checkpoint.iterdir() if path.name not in ("COMPLETE.json", "README.md"))
    return {name: (checkpoint / name).read_bytes() for name in names}


def refuse_copies(monkeypatch):
    monkeypatch.setattr(
        HostCopy, "explain_refusal", lambda *_, **__: "a copy takes 2.0 GB and 1.0 GB of memory are free"
    )


def test_asynchronous_save_equals_synchronous_save(tiny_model_dir, tmp_path, monkeypatch):
    release, write = threading.Event(), saver.write_in_background

    def write_late(job):
        is_dry_run = not (tmp_path / "asynchronous" / "_saving").exists()
        return write(job if is_dry_run else lambda: (release.wait(60), job()))

    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_in_background", write_late)
        keys = {"save_steps": 2, "max_steps": 3}
        # Nothing of step 2 is written before step 3 has changed every weight.
        callback = CallAtStep(3, release.set)
        asynchronous, _, lines = train(tiny_model_dir, tmp_path / "asynchronous", callback=callback, **keys)
    assert not any("waits" in line for line in lines)
    refuse_copies(monkeypatch)
    synchronous, _, lines = train(tiny_model_dir, tmp_path / "synchronous", **keys)
    # Logged once for dry run and save.
    assert [line.partition(": a copy")[0] for line in lines if "waits" in line] == [
        "training waits while a checkpoint is written"
    ]

    one, other = (read_files(tmp_path / name / "checkpoint-2") for name in ("asynchronous", "synchronous"))
    assert one == other
    assert_equal_weights(weights_of(asynchronous), weights_of(synchronous))
    # Upstream's file names, without its pickled arguments.
    states = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert states | {"config.json", "tokenizer.json"} <= one.keys()
    assert "training_args.bin" not in one


def test_trainer_state_has_the_log_which_upstream_would_write_slowly(tiny_model_dir, tmp_path, monkeypatch):
    lengths, save = [], TrainerState.save_to_json

    def record(state, path):
        lengths.append(len(state.log_history))
        save(state, path)

    monkeypatch.setattr(TrainerState, "save_to_json", record)
    trainer, _, _ = train(tiny_model_dir, tmp_path, max_steps=3, logging_steps=1)
    assert set(lengths) == {0}
    stored = TrainerState.load_from_json(str(tmp_path / "checkpoint-3" / "trainer_state.json"))
    assert [event["step"] for event in stored.log_history] == [1, 2, 3]
    assert vars(stored) | {"log_history": []} == vars(trainer.state) | {"log_history": []}


def test_dry_run_changes_neither_training_nor_disk(tiny_model_dir, tmp_path):
    steps = {}
    for name, strategy in (("without", "no"), ("with", "steps")):
        trainer, steps[name], lines = train(
            tiny_model_dir, tmp_path / name, save_strategy=strategy, save_steps=9, max_steps=4
        )
        reports = [line for line in lines if line.startswith("checkpoints: ")]
        assert len(reports) == (strategy == "steps")
        assert not list((tmp_path / name).glob("_*"))
        steps[name, "weights"] = weights_of(trainer)
        steps[name, "random"] = torch.random.get_rng_state()
    assert steps["with"] == steps["without"]
    assert_equal_weights(steps["with", "weights"], steps["without", "weights"])
    assert torch.equal(steps["with", "random"], steps["without", "random"])
    assert "opened again in" in reports[0]


def test_dry_run_counts_epochs_that_max_steps_allow(tiny_model_dir, tmp_path):
    keys = {"save_strategy": "epoch", "per_device_train_batch_size": 8, "max_steps": 5}
    _, _, lines = train(tiny_model_dir, tmp_path, **keys)
    # Two steps of 8 of 16 rows are an epoch; an incomplete one is saved too.
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3
    assert "up to 3 of them" in next(line for line in lines if line.startswith("checkpoints: "))


def test_dry_run_and_host_copy_wait_for_optimizer_states(tiny_model_dir, tmp_path, monkeypatch):
    """``checkpoint-0``, of rollbacks, has none, and fp16 skips the first update."""
    copies, dry_runs = [], []
    monkeypatch.setattr(HostCopy, "explain_refusal", lambda _, *states, **__: copies.append(count_bytes(*states)))
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), **SAVES | {"max_steps": 4})
    trainer.guard._keys = GuardsConfig(max_rollbacks=1)
    skips = property(lambda _: trainer.state.global_step < 2)
    monkeypatch.setattr(type(trainer.accelerator), "optimizer_step_was_skipped", skips)
    trainer.optimizer = SkippingAdamW(trainer.model.parameters())
    dry_run = trainer._dry_run
    trainer._dry_run = lambda model: (dry_runs.append(trainer.state.global_step), dry_run(model))
    trainer.train()
    assert (tmp_path / "checkpoint-0").is_dir()
    assert dry_runs == [2]
    assert copies == [count_bytes(list(trainer.model.parameters()), dict(trainer.optimizer.state))]


def test_optimizer_without_states_is_copied_too(tiny_model_dir, tmp_path, monkeypatch):
    """Plain SGD never has states."""
    copies = []
    monkeypatch.setattr(HostCopy, "explain_refusal", lambda _, *states, **__: copies.append(count_bytes(*states)))
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), **SAVES | {"optim": "sgd"})
    trainer.train()
    assert not trainer.optimizer.state
    assert copies == [count_bytes(list(trainer.model.parameters()))]


class SkippingAdamW(torch.optim.AdamW):
    """AdamW that skips its first update, as under fp16."""

    has_skipped = False

    def step(self, closure=None):
        if not self.has_skipped:
            self.has_skipped = True
            return None
        return super().step(closure)


def corrupt_saved_weights(monkeypatch, change):
    """Apply ``change`` to the state dict before it is written."""
    write = ReplicatedLayout._write_model

    def write_changed(layout, folder, model, state):
        state = {name: tensor.clone() for name, tensor in state.items()}
        change(state)
        write(layout, folder, model, state)

    monkeypatch.setattr(ReplicatedLayout, "_write_model", write_changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["model.norm.weight"].fill_(float("nan")), "model.norm.weight is not finite"),
        (lambda state: state["model.norm.weight"].mul_(1 + 2**-23), "norm.weight differ from the weights in memory"),
    ],
    ids=["nan", "flipped bit"],
)
def test_dry_run_rejects_corrupt_weights(tiny_model_dir, tmp_path, monkeypatch, change, message):
    corrupt_saved_weights(monkeypatch, change)
    with pytest.raises(BrokenSaveError, match=message):
        train(tiny_model_dir, tmp_path, save_steps=4)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def trained(tiny_model_dir, tmp_path_factory):
    """A trainer after two steps, and its checkpoint; treat both as read-only."""
    output_dir = tmp_path_factory.mktemp("trained")
    trainer, _, _ = train(tiny_model_dir, output_dir, max_steps=2)
    return trainer, output_dir / "checkpoint-2"


@pytest.fixture
def saved(trained, tmp_path):
    """The trainer of ``trained``, and a copy of its checkpoint."""
    trainer, checkpoint = trained
    return trainer, shutil.copytree(checkpoint, tmp_path / "checkpoint-2")


def test_compare_detects_flipped_bit_in_optimizer_state(saved):
    trainer, checkpoint = saved
    bits = next(iter(trainer.optimizer.state.values()))["exp_avg_sq"].view(torch.int32)
    trainer.layout.compare(checkpoint, trainer.model, Trained({}, trainer.optimizer))
    bits[0] ^= 1
    with pytest.raises(BrokenSaveError, match=r"optimizer\.pt: a state differs"):
        trainer.layout.compare(checkpoint, trainer.model, Trained({}, trainer.optimizer))
    bits[0] ^= 1


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_compare_rejects_truncated_state_file(saved, name):
    trainer, checkpoint = saved
    (checkpoint / name).write_bytes((checkpoint / name).read_bytes()[:100])
    with pytest.raises(BrokenSaveError, match=f"{name} cannot be read back"):
        trainer.layout.compare(checkpoint, trainer.model, Trained({}, trainer.optimizer))


def test_verification_of_engine_layout_allows_missing_safetensors(saved):
    trainer, checkpoint = saved
    verify, verify_replicated = (layout.build_verification(trainer.model) for layout in (ModelLayout(), trainer.layout))
    weights = checkpoint / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(weights).items() if "norm" not in name}, weights)
    with pytest.raises(BrokenSaveError, match=r"model\.norm\.weight is missing"):
        verify(checkpoint)
    weights.unlink()
    verify(checkpoint)
    with pytest.raises(BrokenSaveError, match=r"checkpoint-\d: model\.safetensors is missing$"):
        verify_replicated(checkpoint)


def test_later_save_rejects_missing_tensor(tiny_model_dir, tmp_path, monkeypatch):
    broken = CallAtStep(3, lambda: corrupt_saved_weights(monkeypatch, lambda state: state.pop("model.norm.weight")))
    with pytest.raises(BrokenSaveError, match=r"model\.norm\.weight is missing"):
        train(tiny_model_dir, tmp_path, callback=broken)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_dry_run_rejects_optimizer_state_that_needs_unpickling(tiny_model_dir, tmp_path, monkeypatch):
    saved = torch.save
    monkeypatch.setattr(
        checkpointing.torch, "save", lambda state, file: saved({"state": state, "x": threading.Barrier}, file)
    )
    with pytest.raises(BrokenSaveError, match=r"optimizer\.pt cannot be read back"):
        train(tiny_model_dir, tmp_path)


FULL = Path("/dev/full")
"""Device on which every write raises ENOSPC."""


@pytest.mark.skipif(not FULL.exists(), reason="the operating system has no /dev/full")
@pytest.mark.parametrize("copies", [True, False])
def test_full_disk_raises_and_keeps_last_checkpoint(tiny_model_dir, tmp_path, monkeypatch, copies):
    if not copies:
        refuse_copies(monkeypatch)
    write = ReplicatedLayout._write_model

    def write_with_full_disk(layout, folder, model, state):
        if folder.name == "checkpoint-4":
            (folder / "optimizer.pt").symlink_to(FULL)
        write(layout, folder, model, state)

    monkeypatch.setattr(ReplicatedLayout, "_write_model", write_with_full_disk)
    with pytest.raises(OSError, match="No space left") as caught:
        train(tiny_model_dir, tmp_path, max_steps=100)
    assert "the disk is full" in str(explain_refusal(caught.value))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert find_damage(tmp_path / "checkpoint-2") is None


def test_pending_checkpoint_is_finished_on_interrupt(tiny_model_dir, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny_model_dir, tmp_path, callback=CallAtStep(3, interrupt))
    assert find_damage(tmp_path / "checkpoint-2") is None
    assert not list(tmp_path.glob("_*"))


def test_manifest_records_run_and_batch(tiny_model_dir, tmp_path):
    record = {"versions": {"torch": "2"}}
    run = {"stage": "sft", "config": {"seed": 1}}
    (tmp_path / "run.json").write_text(json.dumps({**record, **run, "status": "running"}))
    train(tiny_model_dir, tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=3)
    manifest = dict(read_complete(tmp_path / "checkpoint-2"))
    assert manifest.pop("files")
    assert manifest == record | {
        "step": 2,
        "world_size": 1,
        "data_size": 1,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "engine": "",
        "run": run,
    }


def make_evaluated_trainer(model_dir, output_dir, losses, **keys):
    """Build a trainer with ``load_best_model_at_end`` whose evaluations return ``losses``."""
    remaining = iter(losses)
    defaults = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    return make_trainer(
        model_dir,
        output_dir,
        make_packs(),
        hooks=[lambda model, step: {"loss": next(remaining)}],
        **SAVES | defaults | {"metric_for_best_model": "loss", "max_steps": len(losses)} | keys,
    )


def test_retention_keeps_newest_best_and_every_nth(tiny_model_dir, tmp_path):
    keys = {"save_steps": 1, "save_total_limit": 1, "checkpoints": CheckpointConfig(save_keep_steps=4)}
    trainer, _ = make_evaluated_trainer(tiny_model_dir, tmp_path, [5.0, 1.0, 4.0, 3.0, 3.0, 3.0], **keys)
    best = {}
    trainer.add_callback(CallAtStep(2, lambda: best.update(weights_of(trainer))))
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (2, 4, 6)]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    stored = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert stored["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")
    assert_equal_weights(weights_of(trainer), best)


@pytest.mark.parametrize(("losses", "best"), [([5.0, 4.0, 3.0, 1.0, 2.0, 2.5], 6), ([5.0, 1.0, 3.0, 4.0, 4.0, 4.0], 3)])
def test_best_model_is_chosen_among_saved_steps(tiny_model_dir, tmp_path, losses, best):
    """Evaluations between two saves are ignored: the weights of these steps are not saved."""
    trainer, _ = make_evaluated_trainer(tiny_model_dir, tmp_path, losses, save_steps=3, save_total_limit=1)
    weights = {}
    for step in (3, 6):
        trainer.add_callback(CallAtStep(step, lambda step=step: weights.update({step: weights_of(trainer)})))
    trainer.train()
    assert_equal_weights(weights_of(trainer), weights[best])
    state = trainer.state
    assert (state.best_global_step, state.best_metric) == (best, losses[best - 1])
    assert state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")


def test_files_inherit_read_permission_of_folder(tiny_model_dir, tmp_path):
    before = os.umask(0o027)
    try:
        trainer, _, _ = train(tiny_model_dir, tmp_path / "run", max_steps=2)
        trainer.save_model(str(tmp_path / "final"))
    finally:
        os.umask(before)
    for folder in (tmp_path / "run" / "checkpoint-2", tmp_path / "final"):
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o640}


def flip_bit(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("fault", ["folder deleted", "bit flipped"])
def test_missing_or_damaged_best_checkpoint_exports_last_weights(tiny_model_dir, tmp_path, fault):
    trainer, recorder = make_evaluated_trainer(tiny_model_dir, tmp_path, [1.0, 5.0], eval_steps=2, max_steps=4)
    last, best = {}, tmp_path / "checkpoint-2"
    file = best / "model.safetensors"
    damage = {"folder deleted": lambda: shutil.rmtree(best), "bit flipped": lambda: flip_bit(file)}[fault]
    # On a slow disk, the checkpoint of step 2 is still being written.
    trainer.add_callback(CallAtStep(4, lambda: (trainer.finish_saving(), damage(), last.update(weights_of(trainer)))))
    trainer.train()
    assert_equal_weights(weights_of(trainer), last)
    assert trainer.state.best_model_checkpoint is None
    assert any(line.startswith("the best weights, checkpoint-2, cannot be loaded: ") for line in recorder.lines)


def test_moved_run_that_is_resumed_at_its_last_step_exports_best_weights(tiny_model_dir, tmp_path):
    trainer, _ = make_evaluated_trainer(tiny_model_dir, tmp_path / "run", [1.0, 5.0], eval_steps=2, max_steps=4)
    trainer.train()
    # As after a kill in the export; upstream forgets the best checkpoint, whose stored path no longer exists.
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    resumed, _ = make_evaluated_trainer(tiny_model_dir, moved, [], eval_steps=2, max_steps=4)
    resumed.train(resume_from_checkpoint=str(moved / "checkpoint-4"))
    assert_equal_weights(weights_of(resumed), weights_of(trainer))
    assert resumed.state.best_model_checkpoint == str(moved / "checkpoint-2")


def test_fractional_save_steps_are_aligned_with_eval_steps(tiny_model_dir, tmp_path):
    # Upstream rounds up: 0.25 of ten steps is 3, and 0.5 is 5, which is not a multiple of 3.
    keys = {"eval_steps": 0.25, "save_steps": 0.5, "max_steps": 10, "save_total_limit": 1}
    trainer, _ = make_evaluated_trainer(tiny_model_dir, tmp_path, [5.0, 1.0, 4.0, 4.0], **keys)
    trainer.train()
    assert (trainer.state.eval_steps, trainer.state.save_steps) == (3, 6)
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (6, 1.0)


@pytest.mark.parametrize("layout", [ReplicatedLayout, ModelLayout])
def test_resume_and_export_restore_mixture_of_experts(layout, tiny_model_dir, tmp_path, monkeypatch):
    # Upstream saves under the published names, by which its resuming finds no experts and only warns.
    monkeypatch.setattr(checkpointing, "choose_layout", lambda _: layout())
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {"num_hidden_layers": 1, "num_local_experts": 2}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(vocab_size=512, num_attention_heads=2, num_key_value_heads=2, **sizes))
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "model")
    uninterrupted, steps, _ = train(tmp_path / "model", tmp_path / "uninterrupted")
    checkpoint = tmp_path / "uninterrupted" / "checkpoint-2"
    resumed, later_steps, _ = train(tmp_path / "model", tmp_path / "resumed", resume_from=str(checkpoint))
    assert later_steps == steps[2:]
    assert_equal_weights(weights_of(resumed), weights_of(uninterrupted))
    export_checkpoint(checkpoint, tmp_path / "exported")
    saved = load_file(checkpoint / "model.safetensors")
    for folder in (checkpoint, tmp_path / "exported"):
        loaded = MixtralForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    published = [load_file(tmp_path / name / "model.safetensors").keys() for name in ("model", "exported")]
    assert published[0] == published[1] != saved.keys()


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker):
        self._marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self._marker),)


def test_resume_does_not_unpickle_code(trained, tiny_model_dir, tmp_path):
    marker = tmp_path / "executed"
    for name, form in [("optimizer.pt", "zip"), ("scheduler.pt", "bare"), ("rng_state.pth", "bare")]:
        checkpoint = shutil.copytree(trained[1], tmp_path / f"{form} {name}" / "checkpoint-2")
        if form == "zip":
            torch.save(Payload(marker), checkpoint / name)
        else:
            (checkpoint / name).write_bytes(pickle.dumps(Payload(marker)))
        (checkpoint / "training_args.bin").write_bytes(pickle.dumps(Payload(marker)))
        write_complete(checkpoint, step=2, world_size=1)  # With valid hashes.
        with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights"):
            train(tiny_model_dir, tmp_path / f"again {form} {name}", resume_from=str(checkpoint))
        assert not marker.exists(), (name, form)
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists()


def test_resumed_run_logs_and_saves_at_its_own_steps(trained, tiny_model_dir, tmp_path):
    keys = {"save_steps": 1, "logging_steps": 2, "max_steps": 4}
    _, steps, _ = train(tiny_model_dir, tmp_path, resume_from=str(trained[1]), **keys)
    assert (tmp_path / "checkpoint-3").is_dir()
    assert len(steps) == 1


def test_loss_scale_of_fp16_is_no_obstacle_in_another_precision(trained, tiny_model_dir, tmp_path):
    checkpoint = shutil.copytree(trained[1], tmp_path / "checkpoint-2")
    torch.save(torch.amp.GradScaler("cpu").state_dict(), checkpoint / "scaler.pt")
    trainer, steps, _ = train(tiny_model_dir, tmp_path, resume_from=str(checkpoint), max_steps=3)
    assert (trainer.state.global_step, len(steps)) == (3, 1)


def test_missing_rng_state_is_derived_from_seed(saved):
    trainer, checkpoint = saved
    (checkpoint / "rng_state.pth").unlink()
    draws = []
    for attempt in range(2):
        torch.manual_seed(attempt)
        trainer._load_rng_state(str(checkpoint))
        draws.append(torch.rand(3))
    assert torch.equal(*draws)

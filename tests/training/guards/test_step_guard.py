"""``StepGuard``: rollbacks, against runs without the skipped rows, and stops before a non-finite update."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.rows import read_events
from tests.training import pretraining
from tests.training.pairs import make_pair_trainer, make_pairs
from tests.training.spiking import SpikeOnce, make_guarded, make_spiking_packs, train_on_rows
from tests.training.trajectories import assert_equal_weights, make_packs, make_trainer, weights_of

from recipes_lib.config.schema import GuardsConfig
from recipes_lib.data.tokens.dataset import RowOrder
from recipes_lib.errors import DivergedError
from recipes_lib.training.checkpoints.manifest import find_last_complete, is_complete, supersede
from recipes_lib.training.guards import step_guard
from recipes_lib.training.guards.replay_check import read_rollbacks, write_rollbacks
from recipes_lib.training.guards.step_facts import MAX_SKIPPED
from recipes_lib.training.guards.step_guard import Spike, SpikeMonitor, StepGuard

TWO_ROLLBACKS = GuardsConfig(max_rollbacks=2)


@pytest.mark.parametrize(
    ("keys", "num_rows"),
    [
        pytest.param({"gradient_accumulation_steps": 2}, 180, id="accumulation, mid-epoch"),
        # An epoch is 28 steps, the last of one row.
        pytest.param({}, 55, id="across the end of an epoch"),
    ],
)
def test_rollback_equals_run_without_skipped_rows(tiny_model_dir, tmp_path, keys, num_rows):
    per_step = 2 * keys.get("gradient_accumulation_steps", 1)
    packs = make_spiking_packs(num_rows, range(26 * per_step, 27 * per_step))
    keys = keys | {"max_steps": 31}
    trainer, recorder = make_guarded(tiny_model_dir, tmp_path / "run", packs, guards=TWO_ROLLBACKS, **keys)
    trainer.train()
    (rollback,) = read_rollbacks(tmp_path / "run")
    assert (rollback.step, rollback.steps, rollback.back_to) == (27, (26, 29), 25)
    (event,) = read_events(tmp_path / "run", "rollback")
    assert event["step"] == 27

    # The rows of steps 26 to 29, of which the last may be in the second epoch.
    steps_per_epoch = -(-num_rows // per_step)
    first = 25 * per_step
    stop = 29 * per_step if steps_per_epoch >= 29 else num_rows + (29 - steps_per_epoch) * per_step
    rows = [row % num_rows for row in range(3 * num_rows) if not first <= row < stop]
    epochs = [rows[:num_rows], rows[num_rows : 2 * num_rows]]
    train = train_one_epoch if steps_per_epoch > 31 else train_two_epochs
    reference, other = train(tiny_model_dir, tmp_path / "other", packs, epochs, steps_per_epoch, keys)
    assert recorder.steps[-3:] == other.steps[-3:]
    assert_equal_weights(weights_of(trainer), weights_of(reference))


def train_one_epoch(model_dir, output_dir, packs, epochs, steps_per_epoch, keys):
    return train_on_rows(model_dir, output_dir, packs, epochs[0], **keys)


def train_two_epochs(model_dir, output_dir, packs, epochs, steps_per_epoch, keys):
    """Train two epochs of different rows: stop after the first, and resume on the rows of the second."""
    halfway = {"save_steps": steps_per_epoch, "save_total_limit": None}
    train_on_rows(model_dir, output_dir, packs, epochs[0], **keys | halfway)
    reference, recorder = make_guarded(
        model_dir, output_dir, packs.select(epochs[1]), guards=GuardsConfig(), **keys | halfway
    )
    reference.train(resume_from_checkpoint=str(output_dir / f"checkpoint-{steps_per_epoch}"))
    return reference, recorder


class Killed(BaseException):
    """Simulated kill, which no handler of the library catches."""


def make_spiking_trainer(model_dir, output_dir, *, spike_step=5, save_steps=1):
    """Build a trainer of eight steps with a simulated spike, until it has rolled back."""
    keys = {"save_steps": save_steps, "save_total_limit": 3, "max_steps": 8}
    trainer, _ = make_guarded(model_dir, output_dir, make_spiking_packs(40), guards=TWO_ROLLBACKS, **keys)
    trainer.guard._monitor.find_spike = SpikeOnce(trainer, spike_step)
    return trainer


@pytest.fixture(scope="module")
def uninterrupted(tiny_model_dir, tmp_path_factory):
    """Trainer of a run with a rollback that was not killed."""
    trainer = make_spiking_trainer(tiny_model_dir, tmp_path_factory.mktemp("uninterrupted"))
    trainer.train()
    return trainer


@pytest.mark.parametrize("moment", ["after renaming", "after recording", "three steps later"])
def test_kill_during_rollback_resumes_bit_identically(tiny_model_dir, tmp_path, monkeypatch, uninterrupted, moment):
    killed = make_spiking_trainer(tiny_model_dir, tmp_path / "killed")

    def die(*_):
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "after renaming":
            patch.setattr(step_guard, "write_rollbacks", die)
        elif moment == "after recording":
            patch.setattr(StepGuard, "_go_back", die_after_writing)
        else:
            check_step = killed.guard.check_step
            patch.setattr(
                killed.guard,
                "check_step",
                lambda norm: die() if killed.guard.rollbacks and killed.state.global_step == 6 else check_step(norm),
            )
        with pytest.raises(Killed):
            killed.train()

    checkpoint = find_last_complete(tmp_path / "killed")
    assert checkpoint.name == ("checkpoint-6" if moment == "three steps later" else "checkpoint-3")
    again = make_spiking_trainer(tiny_model_dir, tmp_path / "killed")
    again.train(resume_from_checkpoint=str(checkpoint))
    assert read_rollbacks(tmp_path / "killed") == read_rollbacks(Path(uninterrupted.args.output_dir))
    assert len(read_events(tmp_path / "killed", "rollback")) == 1
    assert_equal_weights(weights_of(again), weights_of(uninterrupted))


def die_after_writing(guard, rollback):
    supersede(guard._output_dir, after_step=rollback.back_to)
    write_rollbacks(guard._output_dir, [rollback])
    raise Killed


def test_spike_after_last_rollback_stops_run(tiny_model_dir, tmp_path):
    packs = make_spiking_packs(120, [*range(52, 54), *range(66, 68)])
    trainer, _ = make_guarded(tiny_model_dir, tmp_path, packs, guards=GuardsConfig(max_rollbacks=1))
    with pytest.raises(DivergedError, match=r"step 30 was stopped before its update: .* after 1 rollback\b"):
        trainer.train()
    assert json.loads((tmp_path / "diverged" / "step-30" / "rank-0.json").read_text())["row_ids"] == [[66, 67]]
    assert find_last_complete(tmp_path).name == "checkpoint-25"


def test_spike_without_rollbacks_is_only_logged(tiny_model_dir, tmp_path, monkeypatch):
    packs, steps = make_spiking_packs(100, range(52, 54)), []
    for name, save_strategy in (("one", "no"), ("other", "steps"), ("without detection", "no")):
        keys = {"save_strategy": save_strategy, "save_steps": 25, "max_steps": 28}
        trainer, recorder = make_guarded(tiny_model_dir, tmp_path / name, packs, guards=GuardsConfig(), **keys)
        if name == "without detection":
            monkeypatch.setattr(SpikeMonitor, "find_spike", lambda *_: None)
        # Those of an earlier run in the folder are not of this one.
        (tmp_path / name).mkdir(exist_ok=True)
        write_rollbacks(tmp_path / name, [])
        trainer.train()
        assert not (tmp_path / name / "rollbacks.json").exists()
        steps.append(recorder.steps)
        if name != "without detection":
            assert [event["step"] for event in read_events(tmp_path / name, "spike")] == [27]
        assert not (tmp_path / name / "checkpoint-0").exists()
    assert steps[0] == steps[1] == steps[2]


def test_spike_before_first_checkpoint_rolls_back_to_step_0(tiny_model_dir, tmp_path):
    trainer = make_spiking_trainer(tiny_model_dir, tmp_path / "run", spike_step=4, save_steps=100)
    trainer.train()
    assert read_rollbacks(tmp_path / "run")[0].back_to == 0
    rows = [row for row in range(40) if not 4 <= row < 12]  # Without those of steps 3 to 6.
    reference, _ = train_on_rows(tiny_model_dir, tmp_path / "other", make_spiking_packs(40), rows, max_steps=8)
    assert_equal_weights(weights_of(trainer), weights_of(reference))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_non_finite_loss_stops_before_update(tiny_model_dir, tmp_path, monkeypatch, accumulation):
    keys = {"max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(24), save_strategy="steps", save_steps=1, **keys)
    compute_loss, calls = trainer.compute_loss, []
    bad_call = 2 * accumulation

    def compute(model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # In training mode only: start checks also compute losses, in evaluation mode.
        calls.extend([None] * model.training)
        return loss + float("nan") if len(calls) == bad_call else loss

    monkeypatch.setattr(trainer, "compute_loss", compute)
    with pytest.raises(DivergedError, match=f"step 2 .* the loss of micro-batch {accumulation} of rank 0 is nan"):
        trainer.train()
    assert is_complete(tmp_path / "checkpoint-1")
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    now = weights_of(trainer)
    assert all(torch.equal(saved[name], now[name]) for name in saved)

    folder = tmp_path / "diverged" / "step-2"
    facts = json.loads((folder / "rank-0.json").read_text())
    assert facts["bad_micro_batches"] == [accumulation - 1]
    assert len(facts["losses"]) == len(facts["row_ids"]) == accumulation
    assert facts["losses"][-1] == "nan"
    assert facts["non_finite_gradients"] == {}
    assert facts["learning_rate"] > 0
    tensors = load_file(folder / "rank-0.safetensors")
    # ``row_ids`` identify the rows of the dumped batch.
    for at, row_ids in enumerate(facts["row_ids"], start=1):
        rows = dict.fromkeys(row_ids)
        batch = trainer.data_collator([make_packs(24)[row] for row in rows])
        assert torch.equal(tensors[f"micro_batch_{at}.input_ids"], batch["input_ids"])
        assert torch.equal(tensors[f"micro_batch_{at}.labels"], batch["labels"])


def test_failed_dump_does_not_hide_divergence(tiny_model_dir, tmp_path, monkeypatch):
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs())
    trainer.model.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))

    def refuse(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("recipes_lib.training.guards.step_facts.save_file", refuse)
    with pytest.raises(DivergedError, match=r"norm\.weight is not finite.*could not be written to .*No space left"):
        trainer.train()


def test_non_finite_gradient_is_named(tiny_model_dir, tmp_path):
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs())
    weight = trainer.model.model.layers[1].self_attn.o_proj.weight
    weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(
        DivergedError, match=r"the gradient of model\.layers\.1\.self_attn\.o_proj\.weight is not finite"
    ):
        trainer.train()
    facts = json.loads((tmp_path / "diverged" / "step-1" / "rank-0.json").read_text())
    assert list(facts["non_finite_gradients"]) == ["model.layers.1.self_attn.o_proj.weight"]
    # Gradients are unclipped: clipping by a non-finite norm would make all of them non-finite.
    assert all(0 < norm < 1e6 for norm in facts["largest_gradient_norms"].values())


@pytest.mark.parametrize(("num_skipped", "ends"), [(MAX_SKIPPED - 1, False), (MAX_SKIPPED, True)])
def test_fp16_overflows_are_skipped_up_to_limit(tiny_model_dir, tmp_path, num_skipped, ends):
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs())
    trainer.create_optimizer_and_scheduler(4)
    trainer.args.fp16 = True
    trainer.guard.inputs.losses.append(torch.tensor(1.0))
    for _ in range(num_skipped - 1):
        trainer.guard.check_step(torch.tensor(float("inf")))
    if ends:
        with pytest.raises(DivergedError, match="skipped 24 updates in a row"):
            trainer.guard.check_step(torch.tensor(float("nan")))
    else:
        trainer.guard.check_step(torch.tensor(float("inf")))
        trainer.guard.check_step(torch.tensor(1.0))
        trainer.guard.check_step(torch.tensor(float("inf")))


def test_fp16_non_finite_loss_stops_at_once(tiny_model_dir, tmp_path):
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs())
    trainer.create_optimizer_and_scheduler(4)
    trainer.args.fp16 = True
    trainer.guard.inputs.losses.append(torch.tensor(float("inf")))
    with pytest.raises(DivergedError, match="the loss of micro-batch 1 of rank 0 is inf"):
        trainer.guard.check_step(torch.tensor(float("inf")))


def test_gradient_that_is_not_finite_on_another_rank_alone_stops_all(tiny_model_dir, tmp_path, monkeypatch):
    """As of a faulty GPU under DDP, after the reduction; the ranks would make different collective calls."""
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs())
    trainer.create_optimizer_and_scheduler(4)
    trainer.guard.inputs.losses.append(torch.tensor(1.0))
    other = torch.tensor([1.0, float("nan")])
    monkeypatch.setattr(trainer.accelerator, "reduce", lambda own, reduction: (own + other) / 2)
    with pytest.raises(DivergedError, match="step 1 was stopped before its update"):
        trainer.guard.check_step(torch.tensor(1.0))


def test_rollback_skips_preference_pairs(tiny_model_dir, tmp_path):
    keys = {"per_device_train_batch_size": 4, "max_steps": 7, "train_sampling_strategy": "sequential"}
    keys |= {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1}
    pairs = make_pairs(48)
    trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / "run", pairs, **keys)
    trainer.guard._keys = TWO_ROLLBACKS
    trainer.guard._monitor.find_spike = SpikeOnce(trainer, 4)
    trainer.train()
    assert read_rollbacks(tmp_path / "run")[0].steps == (3, 6)
    remaining = pairs.select([row for row in range(48) if not 8 <= row < 24])
    reference, other = make_pair_trainer(tiny_model_dir, tmp_path / "other", remaining, **keys)
    reference.train()
    assert recorder.steps[-5:] == other.steps[-5:]
    # The sums of loss terms of the skipped step are dropped too.
    assert recorder.logs[-2]["rewards/margins"] == other.logs[-2]["rewards/margins"]
    assert_equal_weights(weights_of(trainer), weights_of(reference))


def test_rollback_skips_pretraining_rows(tiny_tokenizer_dir, tmp_path, monkeypatch):
    keys = {"max_steps": 10, "gradient_accumulation_steps": 2}
    find_spike, calls = SpikeMonitor.find_spike, []

    def find_once(monitor, loss, grad_norm, kind):
        calls.append(loss)
        find_spike(monitor, loss, grad_norm, kind)
        return Spike("loss", loss, 0.0, 0.0) if len(calls) == 7 else None

    monkeypatch.setattr(SpikeMonitor, "find_spike", find_once)
    rollback_keys = {"save_strategy": "steps", "save_steps": 5, "max_rollbacks": 1}
    config = pretraining.build_config(tmp_path, tiny_tokenizer_dir, **keys, **rollback_keys)
    pretraining.run_recipe(config, monkeypatch)
    (rollback,) = read_rollbacks(tmp_path / "out")
    assert (rollback.back_to, rollback.steps, rollback.skipped) == (5, (6, 9), (20, 36))
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["status"] == "done"
    assert record["rollbacks"][0]["step"] == 7

    # Reference: the same run on the remaining rows.
    remaining, locate = np.delete(np.arange(1000), range(20, 36)), RowOrder.locate
    monkeypatch.setattr(RowOrder, "locate", lambda order, rows: locate(order, remaining[rows]))
    other = pretraining.build_config(tmp_path, tiny_tokenizer_dir, **keys, output_dir=tmp_path / "other")
    pretraining.run_recipe(other, monkeypatch)
    steps, expected = (read_events(tmp_path / name) for name in ("out", "other"))
    assert [step["loss"] for step in steps] == [step["loss"] for step in expected]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "other"))
    assert_equal_weights(one, two)

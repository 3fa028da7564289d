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
from tests.training.spiking import PlantedSpikes, make_guarded, make_spiking_packs, train_on_rows
from tests.training.trajectories import assert_equal_weights, make_packs, make_trainer, weights_of

from recipes_lib.config.schema import GuardsConfig
from recipes_lib.data.tokens.dataset import RowOrder
from recipes_lib.errors import DivergedError
from recipes_lib.training.checkpoints.manifest import find_last_complete, is_complete, supersede
from recipes_lib.training.guards import step_guard
from recipes_lib.training.guards.step_facts import MAX_SKIPPED
from recipes_lib.training.guards.step_guard import SpikeMonitor, StepGuard, read_rollbacks, write_rollbacks

TWO_ROLLBACKS = GuardsConfig(max_rollbacks=2)


def test_rollback_equals_run_without_skipped_rows(tiny_model_dir, tmp_path):
    """With a spike of the loss of a real batch, of two micro-batches."""
    packs, keys = make_spiking_packs(180, range(104, 108)), {"gradient_accumulation_steps": 2}
    trainer, recorder = make_guarded(tiny_model_dir, tmp_path / "run", packs, guards=TWO_ROLLBACKS, **keys)
    trainer.train()
    (rollback,) = read_rollbacks(tmp_path / "run")
    assert (rollback.step, rollback.steps, rollback.back_to) == (27, (26, 29), 25)
    (event,) = read_events(tmp_path / "run", "rollback")
    assert event["step"] == 27
    rows = [row for row in range(180) if not 100 <= row < 116]
    reference, other = train_on_rows(tiny_model_dir, tmp_path / "other", packs, rows, **keys)
    assert recorder.steps[-3:] == other.steps[-3:]
    assert_equal_weights(weights_of(trainer), weights_of(reference))


def test_rollback_across_the_end_of_an_epoch_skips_rows_of_both(tiny_model_dir, tmp_path):
    """An epoch is 7 steps, the last of one row; those of steps 5 to 8 are skipped, of which one is in the second."""
    packs = make_spiking_packs(13)
    trainer = make_spiking_trainer(
        tiny_model_dir, tmp_path / "run", packs=packs, spike_step=6, save_steps=2, max_steps=10
    )
    trainer.train()
    assert [(made.back_to, made.steps) for made in read_rollbacks(tmp_path / "run")] == [(4, (5, 8))]
    # Two epochs of other rows: stopped after the first, and resumed on the rows of the second.
    epochs = [*range(8), 2, 3, 4, 5, 6], [*range(7, 13), *range(7)]
    keys = {"max_steps": 10, "save_steps": 7}
    train_on_rows(tiny_model_dir, tmp_path / "other", packs, epochs[0], **keys)
    reference, _ = make_guarded(
        tiny_model_dir, tmp_path / "other", packs.select(epochs[1]), guards=GuardsConfig(), **keys
    )
    reference.train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-7"))
    assert_equal_weights(weights_of(trainer), weights_of(reference))


class Killed(BaseException):
    """Simulated kill, which no handler of the library catches."""


def make_spiking_trainer(
    model_dir, output_dir, *, packs=None, spike_step=5, save_steps=1, max_steps=8, guards=TWO_ROLLBACKS, later_step=0
):
    """Build a trainer of a few steps with a simulated spike, and another one after the rollback."""
    keys = {"save_steps": save_steps, "save_total_limit": 3, "max_steps": max_steps}
    trainer, _ = make_guarded(model_dir, output_dir, packs or make_spiking_packs(40), guards=guards, **keys)
    trainer.guard._monitor.find_spike = PlantedSpikes(trainer, spike_step, later_step)
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
    one = GuardsConfig(max_rollbacks=1)
    trainer = make_spiking_trainer(tiny_model_dir, tmp_path, guards=one, save_steps=3, later_step=7)
    with pytest.raises(DivergedError, match=r"step 7 was stopped before its update: .* after 1 rollback\b"):
        trainer.train()
    # Two rows a step, without the eight that were skipped.
    assert json.loads((tmp_path / "diverged" / "step-7" / "rank-0.json").read_text())["row_ids"] == [[20, 21]]
    assert find_last_complete(tmp_path).name == "checkpoint-6"


def test_spike_without_rollbacks_is_only_logged(tiny_model_dir, tmp_path):
    steps, keys = [], {"guards": GuardsConfig(), "max_steps": 4}
    for name, spike_step, save_steps in (("one", 3, 4), ("other", 3, 2), ("none", 0, 4)):
        trainer = make_spiking_trainer(
            tiny_model_dir, tmp_path / name, spike_step=spike_step, save_steps=save_steps, **keys
        )
        # Those of an earlier run in the folder are not of this one.
        write_rollbacks(tmp_path / name, [])
        trainer.train()
        assert not (tmp_path / name / "rollbacks.json").exists()
        assert not (tmp_path / name / "checkpoint-0").exists()
        steps.append([event["loss"] for event in trainer.state.log_history if "loss" in event])
        if spike_step:
            assert [event["step"] for event in read_events(tmp_path / name, "spike")] == [3]
    assert steps[0] == steps[1] == steps[2]
    assert len(steps[0]) == 4


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


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_non_finite_gradient_stops_before_update_and_is_named(tiny_model_dir, tmp_path, max_grad_norm):
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), max_grad_norm=max_grad_norm)
    before = weights_of(trainer)
    weight = trainer.model.model.layers[1].self_attn.o_proj.weight
    weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(
        DivergedError, match=r"the gradient of model\.layers\.1\.self_attn\.o_proj\.weight is not finite"
    ):
        trainer.train()
    assert_equal_weights(weights_of(trainer), before)
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
    trainer.guard._monitor.find_spike = PlantedSpikes(trainer, 4)
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
    keys = {"max_steps": 6, "gradient_accumulation_steps": 2}
    find_spike, calls = SpikeMonitor.find_spike, []

    def find_once(monitor, loss, grad_norm, kind):
        calls.append(loss)
        find_spike(monitor, loss, grad_norm, kind)
        return f"loss {loss}" if len(calls) == 4 else None

    monkeypatch.setattr(SpikeMonitor, "find_spike", find_once)
    rollback_keys = {"save_strategy": "steps", "save_steps": 2, "max_rollbacks": 1}
    config = pretraining.build_config(tmp_path, tiny_tokenizer_dir, **keys, **rollback_keys)
    pretraining.run_recipe(config, monkeypatch)
    (rollback,) = read_rollbacks(tmp_path / "out")
    assert (rollback.back_to, rollback.steps, rollback.skipped) == (2, (3, 6), (8, 24))
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["status"] == "done"
    assert record["rollbacks"][0]["step"] == 4

    # Reference: the same run on the remaining rows.
    remaining, locate = np.delete(np.arange(1000), range(8, 24)), RowOrder.locate
    monkeypatch.setattr(RowOrder, "locate", lambda order, rows: locate(order, remaining[rows]))
    other = pretraining.build_config(tmp_path, tiny_tokenizer_dir, **keys, output_dir=tmp_path / "other")
    pretraining.run_recipe(other, monkeypatch)
    steps, expected = (read_events(tmp_path / name) for name in ("out", "other"))
    assert [step["loss"] for step in steps] == [step["loss"] for step in expected]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "other"))
    assert_equal_weights(one, two)

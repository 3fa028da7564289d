"""Spikes are undone as if their rows had never been there; what is not finite ends the run before the update."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.training.spiking import make_guarded, make_spiking_packs, read_events, train_on_rows
from tests.training.trajectories import assert_equal_weights, make_packs, make_trainer, weights_of

from recipes_lib.config.schema import GuardsConfig
from recipes_lib.errors import DivergedError
from recipes_lib.training.guards import MAX_SKIPPED
from recipes_lib.training.rollback import read_rollbacks

TWO = GuardsConfig(max_rollbacks=2)


@pytest.mark.parametrize(
    ("keys", "num_rows"),
    [
        pytest.param({}, 100, id="mid-epoch"),
        pytest.param({"gradient_accumulation_steps": 2}, 180, id="accumulated"),
        # An epoch is 28 steps, the last of which takes one row.
        pytest.param({}, 55, id="across the end of an epoch"),
    ],
)
def test_after_a_spike_the_run_is_one_that_never_saw_those_rows(tiny_model_dir, tmp_path, keys, num_rows):
    per_step = 2 * keys.get("gradient_accumulation_steps", 1)
    packs = make_spiking_packs(num_rows, range(26 * per_step, 27 * per_step))
    trainer, recorder = make_guarded(tiny_model_dir, tmp_path / "run", packs, guards=TWO, **keys)
    trainer.train()
    (rollback,) = read_rollbacks(tmp_path / "run").made
    assert (rollback.step, rollback.steps, rollback.back_to) == (27, (26, 29), 25)
    (event,) = read_events(tmp_path / "run", "rollback")
    assert event["step"] == 27

    # The rows of steps 26 to 29; the last of them may be in the second pass.
    steps_per_epoch = -(-num_rows // per_step)
    first = 25 * per_step
    stop = 29 * per_step if steps_per_epoch >= 29 else num_rows + (29 - steps_per_epoch) * per_step
    natural = [row % num_rows for row in range(3 * num_rows) if not first <= row < stop]
    epochs = [natural[:num_rows], natural[num_rows : 2 * num_rows]]
    train = train_one_epoch if steps_per_epoch > 36 else train_two_epochs
    reference, other = train(tiny_model_dir, tmp_path / "other", packs, epochs, steps_per_epoch, keys)
    num_after = 36 - rollback.back_to
    assert len(other.steps) >= 8
    assert recorder.steps[-num_after:] == other.steps[-num_after:] or recorder.steps[-8:] == other.steps[-8:]
    assert_equal_weights(weights_of(trainer), weights_of(reference))


def train_one_epoch(model_dir, output_dir, packs, epochs, steps_per_epoch, keys):
    return train_on_rows(model_dir, output_dir, packs, epochs[0], **keys)


def train_two_epochs(model_dir, output_dir, packs, epochs, steps_per_epoch, keys):
    """A run whose second epoch has other rows than the first: stopped at its end, and resumed over the others."""
    halfway = {"save_steps": steps_per_epoch, "save_total_limit": None}
    train_on_rows(model_dir, output_dir, packs, epochs[0], **keys | halfway)
    reference, recorder = make_guarded(
        model_dir, output_dir, packs.select(epochs[1]), guards=GuardsConfig(), **keys | halfway
    )
    reference.train(resume_from_checkpoint=str(output_dir / f"checkpoint-{steps_per_epoch}"))
    return reference, recorder

"""A checkpoint is held against what it was made from, file by file and bit by bit."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.trajectories import make_packs, make_trainer

from recipes_lib.models.saved_weights import BrokenSaveError, read_published_shapes, read_shapes
from recipes_lib.planning.disk import DiskPlan
from recipes_lib.training.checkpoints.saver import (
    compare_with_live,
    count_bytes,
    describe_dry_run,
    read_expected,
    verify_saved,
)


@pytest.fixture
def saved(tiny_model_dir, tmp_path):
    keys = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), **keys)
    trainer.train()
    return trainer, tmp_path / "checkpoint-2"


def test_a_checkpoint_is_what_is_trained(saved):
    trainer, checkpoint = saved
    compare_with_live(checkpoint, trainer.model, trainer.optimizer)
    verify_saved(checkpoint, read_expected(trainer.model, is_replicated=True), is_replicated=True)


def test_one_bit_of_a_weight_is_seen(saved):
    trainer, checkpoint = saved
    with torch.no_grad():
        trainer.model.model.norm.weight.view(torch.int32)[3] ^= 1
    with pytest.raises(BrokenSaveError, match=r"model\.norm\.weight differ"):
        compare_with_live(checkpoint, trainer.model, trainer.optimizer)


def test_one_bit_of_an_optimizer_state_is_seen(saved):
    trainer, checkpoint = saved
    state = next(iter(trainer.optimizer.state.values()))
    state["exp_avg_sq"].view(torch.int32)[0] ^= 1
    with pytest.raises(BrokenSaveError, match=r"optimizer\.pt: a state differs"):
        compare_with_live(checkpoint, trainer.model, trainer.optimizer)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_torn_state_is_seen(saved, name):
    trainer, checkpoint = saved
    (checkpoint / name).write_bytes((checkpoint / name).read_bytes()[:100])
    with pytest.raises(BrokenSaveError, match=f"{name} cannot be read back"):
        compare_with_live(checkpoint, trainer.model, trainer.optimizer)


def test_sharded_weights_may_be_in_another_form_and_are_looked_at_where_they_are_not(saved):
    trainer, checkpoint = saved
    expected = read_expected(trainer.model, is_replicated=False)
    assert expected == read_published_shapes(trainer.model) == read_shapes(trainer.model)
    weights = checkpoint / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(weights).items() if "norm" not in name}, weights)
    with pytest.raises(BrokenSaveError, match=r"model\.norm\.weight is missing"):
        verify_saved(checkpoint, expected, is_replicated=False)
    weights.unlink()
    verify_saved(checkpoint, expected, is_replicated=False)
    with pytest.raises(BrokenSaveError, match="cannot be opened again"):
        verify_saved(checkpoint, expected, is_replicated=True)


def test_what_is_shared_is_counted_once():
    tensor = torch.zeros(4)
    assert count_bytes({"a": [tensor, tensor]}, [torch.zeros(2, dtype=torch.int8), tensor]) == 18


def test_the_figures_are_told_in_one_line():
    plan = DiskPlan(checkpoint_bytes=1, num_checkpoints=3, total_bytes=26 * 10**9, free_bytes=2 * 10**12)
    assert describe_dry_run(8_100_000_000, 12.34, plan) == (
        "checkpoints: 8.1GB each, written and opened again in 12.3 s; up to 3 of them and the model take 26GB of 2TB "
        "free"
    )

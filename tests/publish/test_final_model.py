"""A broken model is never called done."""

import json

import pytest
import torch
from tests.training.trajectories import make_packs, make_trainer

from recipes_lib.models.saved_weights import BrokenSaveError
from recipes_lib.publish.final_model import UNVERIFIED, export_model


@pytest.fixture
def trained(tiny_model_dir, tmp_path):
    trainer, _ = make_trainer(tiny_model_dir, tmp_path, make_packs(), max_steps=1)
    (tmp_path / "run.json").write_text(json.dumps({"stage": "sft", "config": {}}))
    return trainer, tmp_path


def test_a_model_that_cannot_be_used_never_takes_its_place(trained):
    trainer, folder = trained
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = float("nan")
    with pytest.raises(BrokenSaveError, match=r"model\.norm\.weight is not finite"):
        export_model(trainer, folder)
    assert (folder / UNVERIFIED / "model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()

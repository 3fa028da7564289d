"""Fine-tuning of a vision-language model on text: the vision tower is frozen, and all weights are saved."""

import pytest
import torch
from tests.models.vision_models import OUTSIDE, build_gemma3
from tests.training.adapter_runs import make_adapter_trainer
from tests.training.trajectories import make_packs, make_trainer

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.models.structure import freeze_outside_text

NUM_STEPS = {"max_steps": 3}


@pytest.fixture
def model_dir(tmp_path, tiny_tokenizer):
    folder = tmp_path / "gemma3"
    build_gemma3().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def test_full_fine_tuning_freezes_vision_tower_and_saves_all_weights(model_dir, tmp_path):
    trainer, recorder = make_trainer(model_dir, tmp_path / "run", make_packs(), **NUM_STEPS)
    freeze_outside_text(trainer.model)  # as by ``load_causal_lm``
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    after = trainer.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if not name.startswith(OUTSIDE)}
    (line,) = [line for line in recorder.lines if line.startswith("frozen:")]
    assert "model.vision_tower." in line
    trainer.save_model(str(tmp_path / "saved"))
    saved = type(trainer.model).from_pretrained(tmp_path / "saved").state_dict()
    assert saved.keys() == after.keys()
    assert all(torch.equal(saved[name], after[name]) for name in after)


def test_adapter_on_vision_model_passes_start_checks(model_dir, tmp_path):
    adapter = AdapterConfig(use_peft=True, lora_r=4)
    trainer, _, lines = make_adapter_trainer(model_dir, tmp_path / "run", make_packs(), adapter, **NUM_STEPS)
    trainer.train()
    assert "gradients: all 28 trained tensors have one" in lines

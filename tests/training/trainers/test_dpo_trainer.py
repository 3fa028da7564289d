"""Preference training: what the first step must be, what the reference may be, and what is left of it in memory."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from tests.training.pairs import (
    Setting,
    make_pair_trainer,
    make_pairs,
    perturb_model,
    train_adapter,
    train_pairs,
    with_preference,
)
from tests.training.trajectories import assert_equal_weights, weights_of
from transformers import AutoTokenizer, PreTrainedModel, TrainerCallback

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import DivergedError
from recipes_lib.training.guards.start_checks import StartChecks
from recipes_lib.training.trainers.reference import ReferenceLogps

FRESH = Setting(adapter=AdapterConfig(use_peft=True, lora_r=4))
STARTS = ["full", "fresh adapter", "saved adapter", "merged"]


@pytest.fixture(scope="module")
def saved_adapter(tiny_model_dir, tmp_path_factory):
    return train_adapter(tiny_model_dir, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def start(tiny_model_dir, saved_adapter, tmp_path_factory):
    """What a run may begin from, by name: the folder of the model, and the setting."""
    merged = tmp_path_factory.mktemp("merged")
    AutoPeftModelForCausalLM.from_pretrained(saved_adapter).merge_and_unload().save_pretrained(merged)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(merged)
    going_on = Setting(adapter=AdapterConfig(use_peft=True, adapter_name_or_path=str(saved_adapter)))
    return {
        "full": (tiny_model_dir, Setting()),
        "fresh adapter": (tiny_model_dir, FRESH),
        "saved adapter": (tiny_model_dir, going_on),
        "merged": (merged, Setting()),
    }


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("name", STARTS)
def test_before_the_first_update_the_policy_is_its_own_reference(start, tmp_path, name, is_stored):
    model_dir, setting = start[name]
    options = {"precompute_ref_log_probs": is_stored, "per_device_train_batch_size": 8, "max_steps": 1}
    trainer, recorder = make_pair_trainer(model_dir, tmp_path / "run", make_pairs(), setting=setting, **options)
    trainer.train()
    first = recorder.logs[0]
    assert abs(first["loss"] - math.log(2)) < 1e-6
    assert abs(first["rewards/margins"]) < 1e-5
    assert first["grad_norm"] > 0.01
    assert [line for line in recorder.lines if line.startswith("step 0: loss 0.693147")]
    assert trainer.objective.reference is None or not is_stored


@pytest.mark.parametrize("is_stored", [True, False])
def test_the_invariant_holds_in_bfloat16_and_through_checkpointing(start, tmp_path, is_stored):
    options = {"bf16": True, "activation_checkpointing": True, "precompute_ref_log_probs": is_stored, "max_steps": 2}
    for name in ("full", "fresh adapter"):
        model_dir, setting = start[name]
        trainer, recorder = make_pair_trainer(model_dir, tmp_path / name, make_pairs(), setting=setting, **options)
        trainer.train()
        assert abs(recorder.steps[0]["loss"] - math.log(2)) < 5e-3
        assert all(step["grad_norm"] > 0.01 for step in recorder.steps)


def test_a_reference_of_other_weights_that_passes_for_its_own_stops_the_run(tiny_model_dir, tmp_path):
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs())
    with torch.no_grad():
        trainer.objective.reference.lm_head.weight.mul_(1.01)
    before = weights_of(trainer)
    with pytest.raises(DivergedError, match="Policy and reference differ"):
        trainer.train()
    assert_equal_weights(weights_of(trainer), before)


def test_stored_numbers_of_another_model_stop_the_run(tiny_model_dir, tmp_path, monkeypatch):
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(), precompute_ref_log_probs=True)
    compute = ReferenceLogps.compute

    def compute_wrongly(self, *args, **kwargs):
        compute(self, *args, **kwargs)
        self.rows["train"].logps[:, 1] -= 0.05

    monkeypatch.setattr(ReferenceLogps, "compute", compute_wrongly)
    before = weights_of(trainer)
    with pytest.raises(DivergedError, match="Policy and reference differ"):
        trainer.train()
    assert_equal_weights(weights_of(trainer), before)


@pytest.mark.parametrize("is_stored", [True, False])
def test_dropout_that_is_still_on_stops_the_run(tiny_model_dir, tmp_path, is_stored):
    options = {"precompute_ref_log_probs": is_stored}
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(), **options)
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(DivergedError, match="or dropout is on"):
        trainer.train()


def test_what_is_not_a_number_stops_the_run_before_the_first_gradient(tiny_model_dir, tmp_path):
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs())
    trainer.remove_callback(StartChecks)  # They would be the first to see it.
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = float("nan")
    with pytest.raises(DivergedError, match="Policy and reference differ"):
        trainer.train()


def test_dropout_that_was_asked_for_and_a_reference_of_its_own_are_no_fault(tiny_model_dir, tmp_path):
    trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / "0", make_pairs(), disable_dropout=False)
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    trainer.train()
    assert len(recorder.steps) == 4
    other = perturb_model(tiny_model_dir, tmp_path / "other")
    setting = with_preference(ref_model_name_or_path=str(other))
    for is_stored in (True, False):
        options = {"setting": setting, "precompute_ref_log_probs": is_stored}
        steps = train_pairs(tiny_model_dir, tmp_path / str(is_stored), make_pairs(), **options)
        assert len(steps) == 4
        assert abs(steps[0]["loss"] - math.log(2)) > 1e-3


@pytest.mark.parametrize("name", STARTS)
def test_every_kind_of_reference_gives_the_same_losses(start, tmp_path, name):
    model_dir, setting = start[name]
    pairs = make_pairs()
    own = with_preference(setting, ref_model_name_or_path=str(start["merged" if name == "saved adapter" else name][0]))
    kinds = {
        "stored": (setting, True),
        "live": (setting, False),
        "named, stored": (own, True),
        "named, live": (own, False),
    }
    trajectories = {
        kind: train_pairs(model_dir, tmp_path / kind, pairs, setting=chosen, precompute_ref_log_probs=is_stored)
        for kind, (chosen, is_stored) in kinds.items()
    }
    expected = trajectories.pop("stored")
    assert len({step["loss"] for step in expected}) == 4
    for kind, trajectory in trajectories.items():
        for step, (wanted, got) in enumerate(zip(expected, trajectory, strict=True), 1):
            assert got == pytest.approx(wanted, rel=2e-5), f"{kind}, step {step}"


def test_adapters_off_and_a_frozen_copy_are_the_same_reference(tiny_model_dir, tmp_path):
    trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / "off", make_pairs(), setting=FRESH)
    assert trainer.objective.reference is None
    trainer.train()
    full, _ = make_pair_trainer(tiny_model_dir, tmp_path / "copy", make_pairs())
    copied, second_recorder = make_pair_trainer(tiny_model_dir, tmp_path / "copied", make_pairs(), setting=FRESH)
    copied.objective.reference = full.objective.reference
    copied.train()
    assert second_recorder.steps == recorder.steps


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_taken_out_of_the_weights_is_held_against_a_copy(tiny_model_dir, tmp_path, init):
    setting = replace(FRESH, adapter=replace(FRESH.adapter, init_lora_weights=init))
    trajectories = [
        train_pairs(
            tiny_model_dir, tmp_path / str(is_stored), make_pairs(), setting=setting, precompute_ref_log_probs=is_stored
        )
        for is_stored in (True, False)
    ]
    for expected, got in zip(*trajectories, strict=True):
        assert got == pytest.approx(expected, rel=2e-5)


class Census(TrainerCallback):
    """Counts the models and the bytes of weights in memory at every step."""

    def __init__(self):
        gc.collect()
        self.before = {id(thing) for thing in gc.get_objects()}
        self.models, self.num_bytes = [], []

    def on_step_begin(self, args, state, control, **kwargs):
        things = [thing for thing in gc.get_objects() if id(thing) not in self.before]
        self.models.append(sum(isinstance(thing, PreTrainedModel) and hasattr(thing, "lm_head") for thing in things))
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in things
            if isinstance(tensor, torch.nn.Parameter)
        }
        self.num_bytes.append(sum(storages.values()))


@pytest.mark.parametrize("name", ["full", "fresh adapter", "saved adapter"])
@pytest.mark.parametrize("is_named", [False, True])
def test_while_training_with_stored_numbers_no_reference_is_in_memory(start, tmp_path, name, is_named):
    model_dir, setting = start[name]
    if is_named:
        setting = with_preference(setting, ref_model_name_or_path=str(start["merged"][0]))
    census = Census()
    options = {"setting": setting, "callbacks": [census], "precompute_ref_log_probs": True, "max_steps": 2}
    trainer, _ = make_pair_trainer(model_dir, tmp_path / "run", make_pairs(), **options)
    assert (trainer.objective.reference is not None) == is_named  # The policy's own start needs no copy.
    trainer.train()
    size = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
    assert census.models == [1, 1]
    assert census.num_bytes == [size, size]


def test_a_live_reference_is_seen_by_the_census(tiny_model_dir, tmp_path):
    census = Census()
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(), callbacks=[census], max_steps=1)
    trainer.train()
    size = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
    assert (census.models, census.num_bytes) == ([2], [2 * size])


def test_it_is_shown_that_the_adapter_learns_and_nothing_else(tiny_model_dir, tmp_path):
    trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(), setting=FRESH)
    trainer.train()
    told = [line for line in recorder.lines if line.startswith("adapter: ")]
    assert any("changes no logit" in line for line in told)
    assert any("all 28 trained tensors have a gradient" in line for line in told)
    assert any("frozen tensors stand still" in line for line in told)
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "lost", make_pairs(), setting=FRESH)
    weight = next(p for name, p in trainer.model.named_parameters() if "lora_B" in name)
    weight.register_hook(torch.zeros_like)
    with pytest.raises(DivergedError, match="1 of 28 trained tensors would learn nothing"):
        trainer.train()


def test_workers_that_fetch_the_pairs_bring_the_numbers_of_the_reference(tiny_model_dir, tmp_path):
    options = {"precompute_ref_log_probs": True, "max_steps": 3}
    trajectories = [
        train_pairs(tiny_model_dir, tmp_path / str(count), make_pairs(), dataloader_num_workers=count, **options)
        for count in (0, 2)
    ]
    assert trajectories[0] == trajectories[1]


def test_the_b_matrices_of_an_adapter_have_a_rate_of_their_own(tiny_model_dir, tmp_path):
    setting = replace(FRESH, adapter=replace(FRESH.adapter, loraplus_lr_ratio=8.0))
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(), setting=setting)
    optimizer = trainer.create_optimizer()
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {".lora_B." in name: rate for name, rate in rates.items()} == {True: 8e-3, False: 1e-3}


def test_it_is_told_once_that_chosen_answers_become_unlikely(tiny_model_dir, tmp_path):
    trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs())
    for step, shift in enumerate([-0.3, -0.6, -0.2, -0.9], 1):
        trainer.state.global_step = step
        logs = {"loss": 0.5, "logps/chosen_shift": shift}
        trainer.callback_handler.on_log(trainer.args, trainer.state, trainer.control, logs)
    assert len(recorder.lines) == 1
    assert recorder.lines[0].startswith("step 2: chosen answers have lost 0.60 nats a token")


def test_losses_without_a_reference_compute_none(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(ReferenceLogps, "compute", lambda *_, **__: pytest.fail("computed"))
    for names in (["simpo"], ["orpo"], ["sft"], ["simpo", "sft"]):
        for is_stored in (True, False):
            options = {"loss_type": names, "precompute_ref_log_probs": is_stored, "max_steps": 2}
            folder = tmp_path / f"{names} {is_stored}"
            trainer, recorder = make_pair_trainer(tiny_model_dir, folder, make_pairs(), **options)
            trainer.train()
            assert trainer.stored is None
            assert trainer.objective.reference is None
            assert len(recorder.steps) == 2
            assert not (folder / "reference").exists()
            assert "logps/chosen_shift" not in recorder.logs[0]


def test_accelerate_does_not_keep_the_reference(tiny_model_dir, tmp_path):
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs())
    assert isinstance(trainer.objective.reference, PreTrainedModel)
    assert trainer.accelerator._models == []

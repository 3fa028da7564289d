"""``verify_steps``: checksums, and the recomputation of a step, which detects faults and has no side effects."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.training.spiking import WrongProduct, make_guarded, make_spiking_packs
from tests.training.trajectories import assert_equal_weights, weights_of

from recipes_lib.config.schema import GuardsConfig
from recipes_lib.errors import DivergedError
from recipes_lib.training.guards.replay_check import compute_checksums, find_differences

CHECKED = GuardsConfig(verify_steps=2)
KEYS = {"max_steps": 5, "save_strategy": "no", "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_flipped_bit_changes_checksum(dtype):
    tensor = torch.randn(7, 5, dtype=torch.float64).to(dtype)
    before = compute_checksums({"w": tensor})
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    for bit in range(8 * tensor.element_size()):
        flipped = tensor.clone()
        # As unsigned integers of numpy: setting the highest bit of signed ones overflows.
        view = flipped.view(words).numpy().view(f"u{tensor.element_size()}")
        view[3, 2] ^= np.array(1, view.dtype) << np.array(bit, view.dtype)
        assert compute_checksums({"w": flipped}) != before
    assert compute_checksums({"w": tensor.t()}) == before
    assert compute_checksums({}) == {}


def test_find_differences_names_deviating_rank():
    usual = {"a": 1, "b": 2}
    assert find_differences([usual] * 3) == {}
    assert find_differences([{"a": 1, "b": 3}, usual, usual]) == {0: ["b"]}
    assert find_differences([usual, {"a": 0, "b": 3}]) == {1: ["a", "b"]}


def scale_losses(trainer):
    """Scale losses and unscale gradients, as the loss scaler of fp16 does on a GPU."""

    def unscale(*_):
        for parameter in trainer.model.parameters():
            parameter.grad.div_(1024)

    trainer.accelerator.scaler = SimpleNamespace(
        scale=lambda loss: loss * 1024, step=lambda optimizer, *_: optimizer.step(), update=lambda: None
    )
    trainer.accelerator.unscale_gradients = unscale


@pytest.mark.parametrize("is_scaled", [False, True])
def test_replay_does_not_change_training(tiny_model_dir, tmp_path, is_scaled):
    runs = []
    for guards in (GuardsConfig(), CHECKED):
        trainer, recorder = make_guarded(tiny_model_dir, tmp_path, make_spiking_packs(20), guards=guards, **KEYS)
        for layer in trainer.model.model.layers:
            layer.self_attn.attention_dropout = 0.2
        if is_scaled:
            scale_losses(trainer)
        trainer.train()
        trainer.observer.counter.synchronise()
        runs.append((weights_of(trainer), recorder.steps, trainer.observer.counter.totals))
    assert_equal_weights(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]


def test_wrong_product_is_detected_before_update(tiny_model_dir, tmp_path):
    trainer, recorder = make_guarded(tiny_model_dir, tmp_path, make_spiking_packs(20), guards=CHECKED, **KEYS)
    compute = trainer.training_step

    def break_at_step_two(*args):
        if trainer.state.global_step == 1 and not layer._forward_hooks:
            layer.register_forward_hook(WrongProduct())
        return compute(*args)

    layer = trainer.model.model.layers[0].mlp.down_proj
    trainer.training_step = break_at_step_two
    with pytest.raises(DivergedError, match=r"step 2 was computed twice .* differs in the loss of micro-batch 2"):
        trainer.train()
    assert len(recorder.steps) == 1


def test_wrong_gradient_with_correct_loss_is_detected(tiny_model_dir, tmp_path):
    trainer, _ = make_guarded(tiny_model_dir, tmp_path, make_spiking_packs(20), guards=CHECKED, **KEYS)
    calls = []

    def disturb(gradient):
        calls.extend([None] * (trainer.state.global_step == 1))
        return gradient * (1 + 2**-20) if len(calls) == 1 else gradient

    trainer.model.model.layers[1].mlp.up_proj.weight.register_hook(disturb)
    with pytest.raises(DivergedError, match=r"rank 0 differs in model\.layers\.1\.mlp\.up_proj\.weight\. "):
        trainer.train()


def test_nondeterministic_device_compares_weights_only(tiny_model_dir, tmp_path, monkeypatch):
    trainer, recorder = make_guarded(tiny_model_dir, tmp_path, make_spiking_packs(20), guards=CHECKED, **KEYS)
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda"))
    for step in (2, 4):
        trainer.guard._replay.begin(step)
        trainer.guard._replay.compare(trainer.guard.inputs)
    (line,) = [line for line in recorder.lines if line.startswith("verify_steps")]
    assert "full_determinism: true" in line

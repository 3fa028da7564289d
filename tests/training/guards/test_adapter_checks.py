"""Start checks of adapters: valid runs pass, and faulty gradients, bases and optimizers stop the run."""

import functools

import pytest
import torch
from tests.models.adapter_models import build_deep_model, build_model
from tests.training.adapter_runs import make_adapter_trainer
from tests.training.trajectories import make_packs
from transformers import TrainerState, TrainingArguments

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import DivergedError
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.training.guards.start_checks import (
    AdapterChecks,
    StartChecks,
    sample_weights,
    verify_frozen,
    verify_no_effect,
)


@pytest.fixture
def make_run(tiny_model_dir, tmp_path):
    def make(folder="run", adapter=None, **keys):
        config = AdapterConfig(use_peft=True, **{"lora_r": 4, **(adapter or {})})
        return make_adapter_trainer(tiny_model_dir, tmp_path / folder, make_packs(), config, **keys)

    return make


def find_b(model, layer=0):
    return model.get_base_model().model.layers[layer].mlp.up_proj.lora_B.default.weight


@pytest.mark.parametrize(
    ("init", "keys"),
    [
        ("default", {"warmup_steps": 2}),
        ("default", {"activation_checkpointing": True, "activation_checkpointing_kwargs": "{save_matmuls: true}"}),
        ("orthogonal", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
        ("pissa", {"bf16": True}),
        ("olora", {}),
    ],
    ids=["warmup", "selective", "accumulation", "pissa in bf16", "olora"],
)
def test_valid_run_passes_and_logs_each_check_once(make_run, init, keys):
    trainer, recorder, lines = make_run(adapter={"init_lora_weights": init}, max_steps=5, **keys)
    trainer.train()
    assert len(recorder.steps) == 5
    expected = {"adapter: all 21 frozen tensors are unchanged", "gradients: all 28 trained tensors have one"}
    if init not in ("pissa", "olora"):
        expected.add("adapter: it changes no logit before it is trained")
    assert sorted(line for line in lines if line.startswith(("adapter: ", "gradients: "))) == sorted(expected)


def test_activation_checkpointing_does_not_change_losses(make_run):
    runs = []
    for is_on, use_reentrant in ((False, "false"), (True, "false"), (True, "true")):
        keys = {"activation_checkpointing_kwargs": f"{{use_reentrant: {use_reentrant}}}"} if is_on else {}
        trainer, recorder, lines = make_run(f"{is_on} {use_reentrant}", activation_checkpointing=is_on, **keys)
        trainer.train()
        assert "gradients: all 28 trained tensors have one" in lines
        runs.append(recorder.steps)
    for steps in runs[1:]:
        for expected, step in zip(runs[0], steps, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)


def test_lost_gradients_stop_run_at_first_step(make_run, monkeypatch):
    trainer, _, _ = make_run(activation_checkpointing=True)
    layer = trainer.model.get_base_model().model.layers[1]
    monkeypatch.setattr(layer, "forward", functools.partial(_detach_input, layer.forward))
    with pytest.raises(DivergedError, match=r"up to step 1, 7 of 28 trained tensors have learnt nothing.*no gradient"):
        trainer.train()


def _detach_input(forward, hidden, *args, **kwargs):
    return forward(hidden.detach(), *args, **kwargs)


@pytest.mark.parametrize(("factor", "fault"), [(0.0, "zero"), (float("nan"), "not finite")])
def test_invalid_gradient_is_named(make_run, factor, fault, monkeypatch):
    trainer, _, _ = make_run(max_grad_norm=0)
    # Otherwise the step guard would stop a non-finite gradient first.
    monkeypatch.setattr(trainer, "_get_grad_norm", lambda *args, **kwargs: 1.0)
    find_b(trainer.model).register_hook(lambda gradient: gradient * factor)
    with pytest.raises(DivergedError, match=rf"step 1, 1 of 28 .*layers\.0\.mlp\.up_proj\.lora_B.*{fault}"):
        trainer.train()


def test_step_that_fp16_skips_is_not_checked(make_run):
    """Clipping by an infinite norm makes gradients zero, and NaN where they overflowed."""
    trainer, _, _ = make_run()
    model = trainer.model
    trainer.state.max_steps = trainer.args.max_steps
    checks = StartChecks(trainer, has_adapter=True)
    checks.on_epoch_begin(trainer.args, trainer.state, trainer.control, model=model)
    trainer.args.fp16 = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for value in (0.0, 1.0):
        for parameter in trained:
            parameter.grad = torch.full_like(parameter, value)
        if value == 0.0:
            find_b(model).grad[0, 0] = float("nan")
        checks.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control, model=model, optimizer=optimizer)
    # The gradients of A are checked once B is not zero any more.
    assert {name.split(".lora_")[1][0] for name in checks._faults} == {"A"}


def test_lora_a_is_checked_once_b_is_not_zero(make_run):
    trainer, recorder, _ = make_run(warmup_steps=2, max_steps=6)
    a = trainer.model.get_base_model().model.layers[1].self_attn.q_proj.lora_A.default.weight
    a.register_hook(torch.zeros_like)
    with pytest.raises(DivergedError, match=r"up to step 3, 1 of 28 .*layers\.1\.self_attn\.q_proj\.lora_A"):
        trainer.train()
    assert len(recorder.steps) == 2


def test_changed_frozen_tensor_stops_run_after_first_step(make_run):
    trainer, _, _ = make_run()
    norm = trainer.model.get_base_model().model.layers[1].input_layernorm.weight
    step = type(trainer).create_optimizer

    def create(model=None):
        optimizer = step(trainer, model)
        optimizer.register_step_post_hook(lambda *args: norm.data.add_(1e-4))
        return optimizer

    trainer.create_optimizer = create
    with pytest.raises(DivergedError, match=r"1 of 21 frozen tensors have changed: .*layers\.1\.input_layernorm"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_step_with_zero_learning_rate_may_change_nothing(make_run):
    trainer, recorder, _ = make_run(max_steps=2, warmup_steps=0.03)
    trainer.train()
    assert [step["learning_rate"] > 0 for step in recorder.steps] == [False, True]


def test_tensor_missing_from_optimizer_stops_run_at_first_step(make_run):
    trainer, _, _ = make_run()
    omitted = find_b(trainer.model, 1)
    build = type(trainer).create_optimizer

    def create(model=None):
        optimizer = build(trainer, model)
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter is not omitted]
        return optimizer

    trainer.create_optimizer = create
    with pytest.raises(DivergedError, match=r"does not update 1 of 28 trained tensors: .*layers\.1\.mlp\.up_proj"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_modules_to_save_pass_with_sparse_embedding_updates(make_run):
    trainer, _, lines = make_run(adapter={"lora_modules_to_save": ["embed_tokens", "norm"]}, max_steps=3)
    trainer.train()
    assert "gradients: all 34 trained tensors have one" in lines


@pytest.mark.parametrize("keys", [{}, {"use_dora": True}, {"init_lora_weights": "orthogonal"}])
def test_new_adapter_with_effect_is_detected(keys, tmp_path):
    config = AdapterConfig(use_peft=True, **keys)
    model, lines = add_adapter(build_model("llama"), config, seed=0), []
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    checks = AdapterChecks(config, say=lines.append)
    checks.on_train_begin(args, TrainerState(), None, model=model)
    assert lines == ["adapter: it changes no logit before it is trained"]
    find_b(model).data += 0.01
    with pytest.raises(DivergedError, match="changes logits by"):
        checks.on_train_begin(args, TrainerState(), None, model=model)


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"use_dora": True}, torch.bfloat16),
        ({"use_dora": True}, torch.float16),
        ({"init_lora_weights": "pissa"}, torch.bfloat16),
    ],
)
def test_rounding_of_a_deep_model_is_no_effect(keys, dtype):
    """DoRA divides by a norm, and PiSSA, which ``add_adapter`` verifies, rounds the base weights."""
    model = add_adapter(build_deep_model(dtype), AdapterConfig(use_peft=True, lora_r=4, **keys), seed=0)
    if "use_dora" in keys:
        verify_no_effect(model)
        for layer in range(32):
            find_b(model, layer).data += 0.05
        with pytest.raises(DivergedError, match="changes logits by"):
            verify_no_effect(model)


def test_saved_adapter_with_effect_can_be_trained(make_run, tmp_path):
    first, _, _ = make_run("first")
    first.train()
    first.save_model(str(tmp_path / "adapter"))
    second, recorder, lines = make_run("second", adapter={"adapter_name_or_path": str(tmp_path / "adapter")})
    second.train()
    assert len(recorder.steps) == 4
    assert "adapter: it changes no logit before it is trained" not in lines


def test_resumed_run_is_checked_and_bit_identical(make_run, tmp_path):
    for init in ("default", "pissa"):
        keys = {"adapter": {"init_lora_weights": init, "lora_dropout": 0.1}, "save_strategy": "steps", "save_steps": 2}
        uninterrupted, recorder, _ = make_run(f"uninterrupted {init}", **keys)
        uninterrupted.train()
        resumed, second, lines = make_run(f"resumed {init}", **keys)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"uninterrupted {init}" / "checkpoint-2"))
        assert second.steps == recorder.steps[2:]
        pairs = zip(uninterrupted.model.parameters(), resumed.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        assert len([line for line in lines if line.startswith(("adapter: ", "gradients: "))]) == 2


def test_frozen_sample_is_small_and_detects_update():
    model = build_model("llama").requires_grad_(False)
    model.lm_head.weight.data = torch.randn(5000, 16)
    model.lm_head.weight.data[0] = float("nan")  # Bytes of 4-bit codes may read as NaN.
    samples = sample_weights(dict(model.named_parameters()))
    assert max(sample.nbytes for sample in samples.values()) == 4 * 1024
    verify_frozen(samples, model)
    model.lm_head.weight.data += 1e-6
    with pytest.raises(DivergedError, match="1 of 21 frozen"):
        verify_frozen(samples, model)

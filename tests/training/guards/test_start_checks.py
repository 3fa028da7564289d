"""Start checks: gradient accumulation, gradients of all trained tensors, initial loss."""

import math
import re

import pytest
import torch
from tests.training.pairs import make_pair_trainer, make_pairs
from tests.training.trajectories import make_packs, make_trainer, weights_of
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from recipes_lib.config.schema import ModelConfig, QuantizationConfig
from recipes_lib.errors import DivergedError
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.loading import load_causal_lm
from recipes_lib.models.parallel.tensor_parallel import build_distribution, distribute
from recipes_lib.models.quantization import build_quantization_config
from recipes_lib.training.guards.start_checks import (
    StartChecks,
    report_untrained,
    verify_accumulation,
    verify_initial_loss,
    verify_updated,
)

VOCAB_SIZE = 4096


def make_ready(model_dir, output_dir, **keys):
    trainer, _ = make_trainer(model_dir, output_dir, make_packs(), **keys)
    trainer.state.max_steps = trainer.args.max_steps
    return trainer


def test_accumulation_check_passes_without_side_effects(tiny_model_dir, tmp_path):
    trainer = make_ready(tiny_model_dir, tmp_path)
    trainer.model.eval()
    before, state = weights_of(trainer), torch.get_rng_state()
    assert verify_accumulation(trainer).startswith("accumulation: two rows have the loss 6.")
    # Without side effects.
    assert all(torch.equal(before[name], value) for name, value in weights_of(trainer).items())
    assert torch.equal(torch.get_rng_state(), state)
    trainer.observer.counter.synchronise()
    assert set(trainer.observer.counter.totals) == {0}
    assert trainer.guard.inputs.losses == []
    assert not trainer.model.training


def test_rows_of_a_batch_may_change_rounding_of_8_bit_products(tiny_model_dir, tmp_path):
    """Columns with outliers in any row, as large models have them, are multiplied in 16 bits."""
    trainer = make_ready(tiny_model_dir, tmp_path / "run")
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "norm" in name:
                parameter[:4] = 5
            else:
                parameter *= 10
    trainer.model.save_pretrained(tmp_path / "outliers")
    options = build_quantization_config(QuantizationConfig(load_in_8bit=True), torch.float32, "")
    trainer.model = load_causal_lm(ModelConfig(model_name_or_path=str(tmp_path / "outliers")), "sdpa", options)
    trainer.model_wrapped = trainer.model
    add_loss_head(trainer.model)
    assert verify_accumulation(trainer).startswith("accumulation: two rows have the loss")


def test_accumulation_check_reads_first_rows_of_stream(tiny_model_dir, tmp_path):
    trainer = make_ready(tiny_model_dir, tmp_path)
    expected = verify_accumulation(trainer)
    trainer.train_dataset = make_packs().to_iterable_dataset().with_format("numpy")
    assert verify_accumulation(trainer) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda loss, trainer, _: loss / trainer.current_gradient_accumulation_steps,
        lambda loss, trainer, ratio: loss * ratio / trainer.current_gradient_accumulation_steps,
        lambda loss, _, ratio: loss * ratio,
    ],
    ids=["divided twice", "mean of means", "not divided"],
)
@pytest.mark.parametrize("bf16", [False, True])
def test_loss_that_depends_on_accumulation_is_rejected(tiny_model_dir, tmp_path, change, bf16):
    """Also in bf16 and for random weights, whose rows have nearly the same loss."""
    trainer = make_ready(tiny_model_dir, tmp_path, bf16=bf16)
    compute = trainer.compute_loss

    def broken(model, inputs, num_items_in_batch=None, **options):
        own = trainer.count_terms(inputs)
        loss = compute(model, inputs, num_items_in_batch=num_items_in_batch, **options)
        return change(loss, trainer, num_items_in_batch / own)

    trainer.compute_loss = broken
    with pytest.raises(DivergedError, match=r"as two micro-batches and .* as one|mean over micro-batches"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("losses", [["sigmoid"], ["sigmoid", "sft"]])
def test_preference_training_passes_start_checks(tiny_model_dir, tmp_path, losses):
    trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(), loss_type=losses)
    trainer.train()
    kinds = [line.split(":")[0] for line in recorder.lines]
    assert kinds.count("accumulation") == 1
    assert kinds.count("gradients") == 1
    assert kinds.count("step 0") == 1
    assert kinds.index("accumulation") < kinds.index("step 0")


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_loss_across_rows_resumes_without_accumulation_check(tiny_model_dir, tmp_path, loss):
    keys = {"loss_type": [loss], "learning_rate": 1e-2, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(), **keys)[0].train()
    trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(), **keys)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert trainer.state.global_step == 4
    assert any(line.startswith("accumulation: not checked") for line in recorder.lines)


def run_checks(trainer, num_steps, *, has_no_gradient=lambda name, step: False, num_overflows=0, has_adapter=False):
    """Run ``StartChecks`` for some steps without the gradients of ``has_no_gradient``; return its messages.

    In the first ``num_overflows`` steps gradients are NaN.
    """
    lines = []
    checks = StartChecks(trainer, has_adapter=has_adapter)
    trainer.observer.progress.say = lines.append
    model = trainer.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks.on_epoch_begin(trainer.args, trainer.state, trainer.control, model=model)
    for step in range(1, num_steps + 1):
        for name, parameter in model.named_parameters():
            value = float("nan") if step <= num_overflows else 1.0
            parameter.grad = None if has_no_gradient(name, step) else torch.full_like(parameter, value)
        checks.on_pre_optimizer_step(trainer.args, trainer.state, trainer.control, model=model, optimizer=optimizer)
    return lines[1:]


def test_gradient_check_passes_once_all_tensors_were_seen(tiny_model_dir, tmp_path):
    trainer = make_ready(tiny_model_dir, tmp_path, max_steps=12)
    assert run_checks(trainer, 3) == ["gradients: all 21 trained tensors have one"]
    lines = run_checks(trainer, 9, has_no_gradient=lambda name, step: "lm_head" in name and step < 9)
    assert lines == ["gradients: all 21 trained tensors have one"]


def test_tied_weights_are_counted_once_after_evaluation_of_sharded_model(tiny_model_dir, tmp_path):
    trainer = make_ready(tiny_model_dir, tmp_path, max_steps=12)
    sizes = {"vocab_size": 68, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads, tie_word_embeddings=True))
    # This process, and three that are not there.
    distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        model = distribute(whole, build_distribution({"tp": 2, "dp_shard": 2}, torch.float32))
        with torch.no_grad():
            model(input_ids=torch.arange(6)[None])
        checks = StartChecks(trainer, has_adapter=False)
        checks.on_epoch_begin(trainer.args, trainer.state, trainer.control, model=model)
    finally:
        distributed.destroy_process_group()
    assert checks._num_trained == len(dict(whole.named_parameters()))


def test_gradients_of_adapter_are_required_at_once_except_of_vectors(tiny_model_dir, tmp_path):
    trainer = make_ready(tiny_model_dir, tmp_path, max_steps=12)
    keys = {"has_adapter": True, "has_no_gradient": lambda name, step: name.endswith("norm.weight")}
    assert run_checks(trainer, 9, **keys) == []
    (line,) = run_checks(trainer, 12, **keys)
    assert line.startswith("gradients: 5 of 21 trained tensors had none")
    with pytest.raises(DivergedError, match=r"1 of 21 .* lm_head"):
        run_checks(trainer, 1, has_adapter=True, has_no_gradient=lambda name, step: "lm_head" in name)


def test_steps_that_fp16_skips_do_not_count(tiny_model_dir, tmp_path):
    trainer = make_ready(tiny_model_dir, tmp_path)
    with pytest.raises(DivergedError, match="not finite"):
        run_checks(trainer, 12, num_overflows=11)
    trainer.args.fp16 = True
    assert run_checks(trainer, 12, num_overflows=11) == ["gradients: all 21 trained tensors have one"]


@pytest.mark.parametrize(("num_steps", "step"), [(12, 10), (3, 3)])
def test_lost_gradient_stops_run(tiny_model_dir, tmp_path, num_steps, step):
    trainer = make_ready(tiny_model_dir, tmp_path, max_steps=num_steps)
    trainer.model.model.layers[0].register_forward_hook(lambda module, inputs, output: output.detach())
    with pytest.raises(DivergedError, match=rf"up to step {step}, \d+ of 21 .* \(it has no gradient\)"):
        trainer.train()
    assert trainer.state.global_step == step - 1


def stop_optimizer(trainer):
    """Let the optimizer count its steps only, in the groups that it is given."""
    create = trainer.create_optimizer

    def create_idle(*args):
        optimizer = create(*args)
        optimizer.step = lambda closure=None: None
        return optimizer

    trainer.create_optimizer = create_idle


@pytest.mark.parametrize(
    ("change", "keys", "step"),
    [
        (stop_optimizer, {"max_steps": 30}, 10),
        (stop_optimizer, {"max_steps": 30, "warmup_steps": 8}, 18),
        (stop_optimizer, {"max_steps": 3}, 3),
        (stop_optimizer, {"max_steps": 1, "warmup_steps": 0.03}, 1),
        (lambda trainer: trainer.model.bfloat16(), {"max_steps": 3, "learning_rate": 1e-20}, 3),
    ],
)
def test_training_that_changes_nothing_ends(tiny_model_dir, tmp_path, change, keys, step):
    trainer = make_ready(tiny_model_dir, tmp_path, **keys)
    change(trainer)
    with pytest.raises(DivergedError, match=f"{step} steps have changed none of 21 trained tensors"):
        trainer.train()
    assert trainer.state.global_step == step


@pytest.mark.parametrize(
    "keys",
    [
        {"max_steps": 1, "warmup_steps": 0.03},
        {"max_steps": 12, "warmup_steps": 11},
        {"max_steps": 3, "learning_rate": 1e-7, "lr_scheduler_type": "constant"},
        {"max_steps": 2, "learning_rate": 1e-7, "optim": "sgd", "weight_decay": 0.0},
        {"max_steps": 3, "optim": "adafactor", "gradient_accumulation_steps": 4},
        {"max_steps": 3, "max_grad_norm": 1e-6, "optim": "lion_32bit"},
        {"max_steps": 3, "bf16": True, "lr_scheduler_type": "cosine_with_restarts", "neftune_noise_alpha": 5.0},
        {"max_steps": 3, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.0, "power": 9.0}},
    ],
    ids=str,
)
def test_low_learning_rates_change_something(tiny_model_dir, tmp_path, keys):
    trainer = make_ready(tiny_model_dir, tmp_path, **keys)
    trainer.train()
    assert trainer.state.global_step == keys["max_steps"]


def test_resumed_run_may_end_without_a_change(tiny_model_dir, tmp_path):
    """Of bfloat16 weights, at the end of the schedule."""
    keys = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    make_ready(tiny_model_dir, tmp_path, **keys).train()
    trainer = make_ready(tiny_model_dir, tmp_path, **keys)
    stop_optimizer(trainer)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step == 4


def test_experts_routers_and_vectors_may_have_no_gradient():
    names = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 3, 3),
        "model.layers.0.mlp.experts.7.down_proj.weight": torch.ones(3, 3),
        "model.layers.0.mlp.gate.weight": torch.ones(3, 3),
        "score.bias": torch.ones(1),
    }
    parameters = {name: torch.nn.Parameter(value) for name, value in names.items()}
    faults = dict.fromkeys(parameters, "its gradient is zero")
    assert "4 of 9 trained tensors" in report_untrained(faults, parameters, 9, 10)
    # The gate of a gated MLP is not a router.
    parameters["model.layers.0.mlp.gate_proj.weight"] = torch.nn.Parameter(torch.ones(3, 3))
    message = re.escape("1 of 9 trained tensors have learnt nothing: model.layers.0.mlp.gate_proj")
    with pytest.raises(DivergedError, match=message):
        report_untrained(dict.fromkeys(parameters, "its gradient is zero"), parameters, 9, 10)


def build_random_model(model_type, hidden_size, *, seed=0, **keys):
    torch.manual_seed(seed)
    # The initial loss does not depend on ``intermediate_size``, whose defaults of up to 24,576 are slow.
    sizes = {"hidden_size": hidden_size, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(model_type, **sizes | ids | keys)
    return AutoModelForCausalLM.from_config(config)


def draw_batch(*, zipf=1.3):
    """Return a batch of ids with the Zipf distribution of text: a quarter are the most frequent id."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.arange(1, VOCAB_SIZE + 1).double() ** -zipf
    ids = torch.multinomial(weights, 8 * 64, replacement=True, generator=generator).view(8, 64)
    return {"input_ids": ids, "labels": ids}


def compute_mean_loss(model, batch):
    with torch.no_grad():
        return float(model(**batch).loss)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize(
    ("model_type", "hidden_size", "keys"),
    [
        ("llama", 64, {"tie_word_embeddings": True}),
        ("llama", 512, {"tie_word_embeddings": True}),
        ("llama", 512, {"intermediate_size": 64}),
        ("gpt2", 256, {}),
        ("qwen2", 256, {"num_key_value_heads": 4}),
    ],
)
def test_initial_loss_is_near_ln_of_vocabulary(model_type, hidden_size, keys, seed):
    model, batch = build_random_model(model_type, hidden_size, seed=seed, **keys), draw_batch()
    loss = compute_mean_loss(model, batch)
    assert f"near ln(4,096) = {math.log(VOCAB_SIZE):.4f}" in verify_initial_loss(model, loss, [batch])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize(
    ("model_type", "keys"),
    [("gemma", {"head_dim": 128}), ("granite", {"tie_word_embeddings": True, "embedding_multiplier": 60.0})],
)
def test_initial_loss_of_scaled_embeddings_is_accepted(model_type, keys, seed):
    """Such models predict the input token, which uniformly random ids do not repeat: the loss is above ln V."""
    model = build_random_model(model_type, 768, seed=seed, num_key_value_heads=4, **keys)
    ids = torch.randint(0, VOCAB_SIZE, (8, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    loss = compute_mean_loss(model, batch)
    assert loss > math.log(VOCAB_SIZE) + 0.5
    assert "near ln(4,096)" in verify_initial_loss(model, loss, [batch])
    with pytest.raises(DivergedError, match="before the first update the loss is"):
        verify_initial_loss(model, 3 * loss, [batch])


def test_logit_variance_equals_formula():
    model, batch = build_random_model("llama", 512), draw_batch()
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
    assert float(logits.var()) == pytest.approx(0.02**2 * 512, rel=0.05)
    assert compute_mean_loss(model, batch) == pytest.approx(math.log(VOCAB_SIZE) + 0.02**2 * 512 / 2, abs=0.1)


@pytest.mark.parametrize("factor", [0.5, 2.0, 1 / 8, float("nan")])
def test_scaled_initial_loss_is_rejected(factor):
    model, batch = build_random_model("llama", 64), draw_batch()
    with pytest.raises(DivergedError, match="before the first update the loss is"):
        verify_initial_loss(model, factor * compute_mean_loss(model, batch), [batch])


def test_wide_initialisation_is_rejected():
    model, batch = build_random_model("llama", 64), draw_batch()
    model.lm_head.weight.data *= 20
    with pytest.raises(DivergedError, match="or the initialisation is scaled"):
        verify_initial_loss(model, compute_mean_loss(model, batch), [batch])


def test_bound_of_wide_scaled_embeddings_is_finite():
    model = build_random_model("gemma", 768, num_key_value_heads=4, head_dim=128)
    model.config.initializer_range = 2.0  # Logit of the input token 1536: exp overflows.
    assert "near ln(4,096)" in verify_initial_loss(model, math.log(VOCAB_SIZE), [draw_batch()])


def test_optimizer_of_other_tensors_is_rejected():
    """As if the optimizer had been built of other tensors: gradients exist, and nothing is updated."""
    model = torch.nn.Linear(2, 2)
    verify_updated(model, torch.optim.SGD(model.parameters(), lr=0.1))
    partial = torch.optim.SGD([model.weight, torch.nn.Parameter(model.bias.detach().clone())], lr=0.1)
    with pytest.raises(DivergedError, match=r"does not update 1 of 2 trained tensors: bias"):
        verify_updated(model, partial)

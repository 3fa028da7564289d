"""Preference training: first loss, kinds of reference model, their memory, and the objective."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from tests.models.adapter_models import build_deep_model
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
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback

from recipes_lib.config.schema import AdapterConfig, PreferenceConfig
from recipes_lib.data.pairs.collator import PairCollator
from recipes_lib.errors import DivergedError
from recipes_lib.losses.preference import PREFERENCE_LOSSES, PreferenceOptions
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.training.guards.start_checks import StartChecks
from recipes_lib.training.trainers.dpo_trainer import PreferenceObjective, build_objective, verify_first_scores
from recipes_lib.training.trainers.pair_batches import PairScores, compute_answer_logps, compute_rounding
from recipes_lib.training.trainers.reference import ReferenceLogps

FRESH = Setting(adapter=AdapterConfig(use_peft=True, lora_r=4))
STARTS = ["full", "fresh adapter", "saved adapter"]


@pytest.fixture(scope="module", autouse=True)
def frozen_objects():
    """Hide the objects of earlier tests from ``Census``: searching millions of them at every step takes seconds."""
    gc.collect()
    gc.freeze()  # For good: `gc.unfreeze` would also return the imported modules, which `tests/conftest.py` has frozen.


@pytest.fixture(scope="module")
def saved_adapter(tiny_model_dir, tmp_path_factory):
    return train_adapter(tiny_model_dir, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def start(tiny_model_dir, saved_adapter, tmp_path_factory):
    """Initial weights of a run by name: model folder and setting."""
    merged = tmp_path_factory.mktemp("merged")
    AutoPeftModelForCausalLM.from_pretrained(saved_adapter).merge_and_unload().save_pretrained(merged)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(merged)
    continued = Setting(adapter=AdapterConfig(use_peft=True, adapter_name_or_path=str(saved_adapter)))
    return {
        "full": (tiny_model_dir, Setting()),
        "fresh adapter": (tiny_model_dir, FRESH),
        "saved adapter": (tiny_model_dir, continued),
        "merged": (merged, Setting()),  # the reference of a run from the saved adapter
    }


class Census(TrainerCallback):
    """Counts the models and the bytes of weights in memory at every step."""

    def __init__(self):
        gc.collect()
        # Referenced, because a new object may reuse the ``id`` of a freed one.
        self.before = self.list_weights()
        self.models, self.num_bytes = [], []

    @staticmethod
    def list_weights():
        # ``isinstance`` of a parameter runs Python code, which takes most of a second over all objects.
        return [item for item in gc.get_objects() if issubclass(type(item), PreTrainedModel | torch.nn.Parameter)]

    def on_step_begin(self, args, state, control, **kwargs):
        known = {id(item) for item in self.before}
        new = [item for item in self.list_weights() if id(item) not in known]
        self.models.append(sum(isinstance(item, PreTrainedModel) and hasattr(item, "lm_head") for item in new))
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in new
            if isinstance(tensor, torch.nn.Parameter)
        }
        self.num_bytes.append(sum(storages.values()))

    def on_train_end(self, args, state, control, **kwargs):
        self.before.clear()


KINDS = {"stored": (True, False), "live": (False, False), "named, stored": (True, True), "named, live": (False, True)}
"""Kinds of reference: whether its log-probabilities are stored, and whether ``ref_model_name_or_path`` names it."""


@pytest.fixture(scope="module", params=STARTS)
def runs(request, start, tmp_path_factory):
    """Four steps from one start with each kind of reference, all of the same weights."""
    model_dir, setting = start[request.param]
    reference = start["merged" if request.param == "saved adapter" else request.param][0]
    named = with_preference(setting, ref_model_name_or_path=str(reference))
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for kind, (is_stored, is_named) in KINDS.items():
        census = Census()
        options = {"setting": named if is_named else setting, "callbacks": [census]}
        options["precompute_ref_log_probs"] = is_stored
        trainer, recorder = make_pair_trainer(model_dir, folder / kind, make_pairs(), **options)
        has_reference = trainer.objective.reference is not None
        trainer.train()
        size = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
        found[kind] = SimpleNamespace(recorder=recorder, census=census, size=size, has_reference=has_reference)
    return found


@pytest.mark.parametrize("kind", ["stored", "live"])
def test_first_loss_is_ln2_for_every_start(runs, kind):
    recorder = runs[kind].recorder
    first = recorder.logs[0]
    assert abs(first["loss"] - math.log(2)) < 1e-6
    assert abs(first["rewards/margins"]) < 1e-5
    assert first["grad_norm"] > 0.01
    assert [line for line in recorder.lines if line.startswith("step 0: loss 0.693147")]


def test_losses_are_equal_for_every_kind_of_reference(runs):
    trajectories = {kind: run.recorder.steps for kind, run in runs.items()}
    expected = trajectories.pop("stored")
    assert len({step["loss"] for step in expected}) == 4
    for kind, trajectory in trajectories.items():
        for step, (wanted, got) in enumerate(zip(expected, trajectory, strict=True), 1):
            assert got == pytest.approx(wanted, rel=2e-5), f"{kind}, step {step}"


@pytest.mark.parametrize(("kind", "has_reference"), [("stored", False), ("named, stored", True)])
def test_stored_reference_is_released_before_training(runs, kind, has_reference):
    run = runs[kind]
    assert run.has_reference == has_reference  # The policy at its start needs no copy.
    assert run.census.models == [1] * 4
    assert run.census.num_bytes == [run.size] * 4


def test_census_counts_live_reference(runs):
    census = runs["named, live"].census
    assert census.models == [2] * 4
    assert min(census.num_bytes) > runs["named, live"].size


@pytest.mark.parametrize(("name", "is_stored"), [("full", True), ("fresh adapter", False)])
def test_first_loss_is_ln2_in_bfloat16_with_activation_checkpointing(start, tmp_path, name, is_stored):
    model_dir, setting = start[name]
    options = {"bf16": True, "activation_checkpointing": True, "precompute_ref_log_probs": is_stored, "max_steps": 2}
    steps = train_pairs(model_dir, tmp_path / "run", make_pairs(), setting=setting, **options)
    assert abs(steps[0]["loss"] - math.log(2)) < 5e-3
    assert all(step["grad_norm"] > 0.01 for step in steps)


def compile_by_rounding_kernels(trainer, monkeypatch):
    """Layers that lose the precision of their outputs when compiled, as those of other kernels do."""

    def round_outputs(graph, _inputs):
        return lambda *inputs: [output.bfloat16().float() for output in graph(*inputs)]

    trainer.args.compilation = {"backend": round_outputs}


def replace_by_rounding_kernels(trainer, monkeypatch):
    """As a stand-in for Liger, which is for GPUs."""

    def round_outputs(model, _config):
        for layer in model.get_decoder().layers:
            layer.register_forward_hook(lambda _layer, _inputs, output: output.bfloat16().float())

    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", round_outputs)
    monkeypatch.setattr("recipes_lib.training.optim.compilation.apply_liger_kernel", round_outputs)
    trainer.args.use_liger_kernel = True


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (compile_by_rounding_kernels, "stored"),
        (compile_by_rounding_kernels, "named, live"),
        (replace_by_rounding_kernels, "live"),
        (replace_by_rounding_kernels, "named, stored"),
    ],
)
def test_reference_computes_by_the_kernels_of_the_policy(start, tmp_path, monkeypatch, change, kind):
    torch._dynamo.reset()
    (model_dir, setting), (is_stored, is_named) = start["full"], KINDS[kind]
    if is_named:
        setting = with_preference(setting, ref_model_name_or_path=str(model_dir))
    options = {"setting": setting, "precompute_ref_log_probs": is_stored, "max_steps": 1}
    trainer, recorder = make_pair_trainer(model_dir, tmp_path / "run", make_pairs(), **options)
    trainer._has_first_scores = False  # A reference that is named is not known to be the policy.
    change(trainer, monkeypatch)
    trainer.train()
    assert recorder.logs[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)


@pytest.fixture(scope="module")
def deep_model_dir(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep")
    build_deep_model(torch.bfloat16, num_layers=80, vocab_size=512).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("has_dropout", [False, True])
def test_rounding_of_a_deep_policy_is_no_difference_from_its_reference(
    deep_model_dir, tmp_path, monkeypatch, has_dropout
):
    """The reference is scored in other batches, whose shapes have other kernels."""
    setting = replace(FRESH, dtype="bfloat16")
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 5, "max_steps": 1}
    options = {"setting": setting, "precompute_ref_log_probs": True, **sizes}
    trainer, recorder = make_pair_trainer(deep_model_dir, tmp_path / "run", make_pairs(6), **options)
    if has_dropout:
        enable_dropout(trainer, monkeypatch)
        with pytest.raises(DivergedError, match="Policy and reference differ, or dropout or router noise is on"):
            trainer.train()
    else:
        trainer.train()
        assert [line for line in recorder.lines if "policy and reference agree" in line]


def test_rounding_is_measured_before_the_activations_of_the_first_step(start, tmp_path):
    """Beside them, the peak of memory would be above that of later steps."""
    model_dir, setting = start["full"]
    trainer, _ = make_pair_trainer(model_dir, tmp_path / "run", make_pairs(), setting=setting, max_steps=1)
    trainer.remove_callback(StartChecks)  # Its passes precede the step.
    has_graph = []
    trainer.model.model.register_forward_hook(lambda *_: has_graph.append(torch.is_grad_enabled()))
    trainer.train()
    assert has_graph == [False, False, True]


def scale_reference(trainer, monkeypatch):
    trainer.objective.reference.lm_head.weight.data.mul_(1.01)


def shift_stored_logps(trainer, monkeypatch):
    compute = ReferenceLogps.compute

    def compute_shifted(self, *args, **kwargs):
        compute(self, *args, **kwargs)
        self.rows["train"].logps[:, 1] -= 0.05

    monkeypatch.setattr(ReferenceLogps, "compute", compute_shifted)


def enable_dropout(trainer, monkeypatch):
    for layer in trainer.model.get_decoder().layers:
        layer.self_attn.attention_dropout = 0.1


def set_nan_in_policy(trainer, monkeypatch):
    trainer.remove_callback(StartChecks)  # They would raise first.
    trainer.model.model.norm.weight.data[3] = float("nan")


@pytest.mark.parametrize(
    ("inject", "is_stored"),
    [
        (scale_reference, False),
        (shift_stored_logps, True),
        (enable_dropout, False),
        (enable_dropout, True),
        (set_nan_in_policy, False),
    ],
)
def test_policy_that_differs_from_reference_stops_before_update(
    tiny_model_dir, tmp_path, monkeypatch, inject, is_stored
):
    options = {"precompute_ref_log_probs": is_stored}
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(), **options)
    inject(trainer, monkeypatch)
    before = {name: weight.nan_to_num() for name, weight in weights_of(trainer).items()}
    with pytest.raises(DivergedError, match="Policy and reference differ, or dropout or router noise is on"):
        trainer.train()
    assert_equal_weights({name: weight.nan_to_num() for name, weight in weights_of(trainer).items()}, before)


def test_first_loss_is_unchecked_with_dropout_or_named_reference(tiny_model_dir, tmp_path):
    trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / "0", make_pairs(), disable_dropout=False)
    enable_dropout(trainer, None)
    trainer.train()
    assert len(recorder.steps) == 4
    other = perturb_model(tiny_model_dir, tmp_path / "other")
    setting = with_preference(ref_model_name_or_path=str(other))
    for is_stored in (True, False):
        options = {"setting": setting, "precompute_ref_log_probs": is_stored}
        steps = train_pairs(tiny_model_dir, tmp_path / str(is_stored), make_pairs(), **options)
        assert len(steps) == 4
        assert abs(steps[0]["loss"] - math.log(2)) > 1e-3


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_pissa_and_olora_use_copy_of_base_as_reference(tiny_model_dir, tmp_path, init):
    setting = replace(FRESH, adapter=replace(FRESH.adapter, init_lora_weights=init))
    trajectories = [
        train_pairs(
            tiny_model_dir, tmp_path / str(is_stored), make_pairs(), setting=setting, precompute_ref_log_probs=is_stored
        )
        for is_stored in (True, False)
    ]
    for expected, got in zip(*trajectories, strict=True):
        assert got == pytest.approx(expected, rel=2e-5)


def test_dataloader_workers_return_stored_reference_logps(tiny_model_dir, tmp_path):
    options = {"precompute_ref_log_probs": True, "max_steps": 3}
    trajectories = [
        train_pairs(tiny_model_dir, tmp_path / str(count), make_pairs(), dataloader_num_workers=count, **options)
        for count in (0, 2)
    ]
    assert trajectories[0] == trajectories[1]


@pytest.mark.parametrize("has_other_reference", [False, True])
def test_drop_of_chosen_logps_below_the_start_is_logged_once(tiny_model_dir, tmp_path, has_other_reference):
    setting = with_preference(ref_model_name_or_path=str(tiny_model_dir)) if has_other_reference else None
    trainer, recorder = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs(), setting=setting)
    for step, shift in enumerate([-0.3, -0.6, -0.2, -0.9], 1):
        trainer.state.global_step = step
        logs = {"loss": 0.5, "logps/chosen_shift": shift}
        trainer.callback_handler.on_log(trainer.args, trainer.state, trainer.control, logs)
    lines = [line for line in recorder.lines if not line.startswith("attention: ")]
    assert len(lines) == (not has_other_reference)
    for line in lines:
        assert line.startswith("step 2: the log-probability of chosen answers has dropped by 0.60 nats per token")


def test_reference_free_losses_compute_no_reference(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(ReferenceLogps, "compute", lambda *_, **__: pytest.fail("computed"))
    for names, is_stored in ((["orpo"], True), (["simpo", "sft"], False)):
        options = {"loss_type": names, "precompute_ref_log_probs": is_stored, "max_steps": 2}
        folder = tmp_path / names[0]
        trainer, recorder = make_pair_trainer(tiny_model_dir, folder, make_pairs(), **options)
        trainer.train()
        assert trainer.stored is None
        assert trainer.objective.reference is None
        assert len(recorder.steps) == 2
        assert not (folder / "reference").exists()
        assert "logps/chosen_shift" not in recorder.logs[0]


def test_accelerate_does_not_register_reference(tiny_model_dir, tmp_path):
    trainer, _ = make_pair_trainer(tiny_model_dir, tmp_path / "run", make_pairs())
    assert isinstance(trainer.objective.reference, PreTrainedModel)
    assert trainer.accelerator._models == []


NUM_PAIRS = 5
LN2 = math.log(2)


def build_args(**keys):
    """Return the arguments of the losses, with upstream's defaults."""
    defaults = {
        "loss_type": ["sigmoid"],
        "loss_weights": None,
        "beta": 0.1,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "discopop_tau": 0.05,
        "ld_alpha": None,
        "use_weighting": False,
    }
    return SimpleNamespace(**defaults | keys)


def load(model_dir, seed=None):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    add_loss_head(model)
    return model


@pytest.fixture(scope="module")
def batch():
    return PairCollator(pad_token_id=1)(list(make_pairs(NUM_PAIRS, seed=4)))


@pytest.fixture(scope="module")
def policy(tiny_model_dir):
    return load(tiny_model_dir, seed=1)


@pytest.fixture(scope="module")
def reference(tiny_model_dir):
    return load(tiny_model_dir)


@pytest.fixture(scope="module")
def margins(policy, reference, batch):
    """Difference of log-ratios between chosen and rejected answers, in nats."""
    with torch.no_grad():
        (chosen, rejected), (ref_chosen, ref_rejected) = (
            compute_answer_logps(model, batch, ld_alpha=None) for model in (policy, reference)
        )
    return chosen - ref_chosen - rejected + ref_rejected


def test_sigmoid_loss_equals_formula_of_dpo(policy, reference, batch, margins):
    objective = build_objective(build_args(beta=0.3), PreferenceConfig())
    objective.reference = reference
    scores = objective.score(policy, batch)
    torch.testing.assert_close(scores.losses, -torch.nn.functional.logsigmoid(0.3 * margins))
    torch.testing.assert_close(scores.figures["rewards/margins"], 0.3 * margins)
    assert scores.losses.requires_grad
    assert not any(figure.requires_grad for figure in scores.figures.values())
    lengths = batch["num_completion_tokens"]
    assert int(scores.num_targets) == int(lengths[0::2].sum())
    shift = scores.figures["logps/chosen_shift"] * lengths[0::2] * 0.3
    torch.testing.assert_close(shift, scores.figures["rewards/chosen"], rtol=1e-4, atol=1e-5)


def test_num_correct_counts_greedy_tokens_of_chosen_answers(policy):
    pairs = []
    for number in range(3):
        ids = torch.arange(10 + number, 20 + number)[None]
        for _ in range(7):
            with torch.no_grad():
                ids = torch.cat([ids, policy(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
        prompt, greedy = ids[0, :10].numpy(), ids[0, 10:].numpy()
        missed = greedy.copy()
        missed[1] = (missed[1] + 1) % 500
        pairs.append({"prompt_ids": prompt, "chosen_ids": greedy[:2], "rejected_ids": greedy})
        pairs.append({"prompt_ids": prompt, "chosen_ids": missed[:2], "rejected_ids": greedy})
    objective = build_objective(build_args(loss_type=["simpo"]), PreferenceConfig())
    scores = objective.score(policy, PairCollator(pad_token_id=1)(pairs))
    assert (int(scores.num_targets), int(scores.num_correct)) == (12, 9)


def test_gradients_reach_policy_only(policy, reference, batch):
    objective = build_objective(build_args(), PreferenceConfig())
    objective.reference = reference
    policy.zero_grad()
    objective.score(policy, batch).losses.sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in policy.parameters())
    assert all(parameter.grad is None for parameter in reference.parameters())
    policy.zero_grad()


def test_stored_logps_take_precedence_over_reference_model(policy, batch, margins, reference):
    with torch.no_grad():
        chosen, rejected = compute_answer_logps(reference, batch, ld_alpha=None)
    objective = build_objective(build_args(), PreferenceConfig())
    objective.reference = policy  # Its margins are 0.
    stored = {**batch, "ref_chosen_logp": chosen, "ref_rejected_logp": rejected}
    figures = objective.score(policy, stored).figures
    torch.testing.assert_close(figures["rewards/margins"], 0.1 * margins)


def test_reference_is_policy_with_adapter_disabled(tiny_model_dir, batch, reference):
    adapted = add_adapter(AutoModelForCausalLM.from_pretrained(tiny_model_dir), AdapterConfig(use_peft=True), seed=0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    add_loss_head(adapted)
    adapted.train()
    objective = build_objective(build_args(), PreferenceConfig())
    off = objective.score(adapted, batch)
    assert adapted.training
    assert off.figures["rewards/margins"].abs().min() > 1e-4
    objective.reference = reference
    copied = objective.score(adapted, batch)
    assert torch.equal(off.losses, copied.losses)
    off.losses.sum().backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name)


def test_losses_are_weighted_and_sft_is_normalised_by_step(policy, reference, batch):
    def score(names, weights=None, mean=None, **keys):
        objective = build_objective(build_args(loss_type=names, loss_weights=weights, **keys), PreferenceConfig())
        objective.reference = reference
        return objective.score(policy, batch, mean).losses

    sigmoid, sft = score(["sigmoid"]), score(["sft"])
    torch.testing.assert_close(score(["sigmoid", "sft"], [0.25, 2.0]), 0.25 * sigmoid + 2 * sft)
    torch.testing.assert_close(score(["sigmoid", "sft"]), sigmoid + sft)
    mean = batch["num_completion_tokens"][0::2].float().mean()
    torch.testing.assert_close(score(["sft"], mean=2 * mean), sft / 2)
    # LD-DPO discounts the tokens beyond the shorter answer; the SFT loss is over all tokens.
    torch.testing.assert_close(score(["sft"], ld_alpha=0.3), sft)
    assert not torch.equal(score(["sigmoid"], ld_alpha=0.3), sigmoid)


def test_use_weighting_weights_each_pair(policy, reference, batch):
    def score(**keys):
        objective = build_objective(build_args(**keys), PreferenceConfig())
        objective.reference = reference
        return objective.score(policy, batch).losses

    ratio = (score(use_weighting=True) / score()).detach()
    assert ((ratio > 0) & (ratio < 5)).all()
    assert ratio.unique().numel() == NUM_PAIRS


@pytest.mark.parametrize("is_own", [True, False])
def test_held_out_scores_are_independent_of_batch_size(policy, is_own):
    pairs = list(make_pairs(7, seed=9))
    own, first, second = (
        {"num_pairs": len(some), "num_chosen_tokens": sum(len(pair["chosen_ids"]) for pair in some)}
        for some in (pairs, pairs[:3], pairs[3:])
    )
    record = {"eval": own, "eval_datasets": {"a": first}} if is_own else {"eval_datasets": {"a": first, "b": second}}
    args, collate = build_args(loss_type=["sft"]), PairCollator(pad_token_id=1)
    whole = build_objective(args, PreferenceConfig()).score(policy, collate(pairs)).losses
    objective = build_objective(args, PreferenceConfig(), record)
    parts = [objective.score(policy, collate(some)).losses for some in (pairs[:2], pairs[2:6], pairs[6:])]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_keys_reach_preference_options():
    keys = {"beta": 2.5, "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7, "discopop_tau": 0.1}
    config = PreferenceConfig(simpo_gamma=0.9, label_smoothing=0.2)
    args = build_args(loss_type=["sigmoid", "robust"], ld_alpha=0.4, loss_weights=[1.0, 3.0], **keys)
    objective = build_objective(args, config)
    assert objective.options == PreferenceOptions(**keys, simpo_gamma=0.9, label_smoothing=0.2)
    assert (objective.names, objective.weights, objective.ld_alpha) == (["sigmoid", "robust"], [1.0, 3.0], 0.4)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_needs_reference_by_loss(name):
    objective = build_objective(build_args(loss_type=[name]), PreferenceConfig())
    assert objective.needs_reference == (name not in ("simpo", "orpo", "sft"))
    both = build_objective(build_args(loss_type=[name, "sigmoid"]), PreferenceConfig())
    assert both.needs_reference


def verify(rewards, lengths, *, losses=None, beta=0.1, dtype=torch.float32, **keys):
    objective = build_objective(build_args(beta=beta, **keys), PreferenceConfig())
    chosen, rejected = (torch.tensor([row[which] for row in rewards]) for which in (0, 1))
    figures = {"rewards/chosen": beta * chosen, "rewards/rejected": beta * rejected}
    losses = torch.full((len(rewards),), LN2) if losses is None else torch.tensor(losses)
    batch = {"num_completion_tokens": torch.tensor(lengths).flatten()}
    allowed = compute_rounding(torch.tensor(lengths).T, dtype)
    return verify_first_scores(objective, PairScores(losses=losses, figures=figures), batch, allowed)


def test_first_scores_accept_rounding_error():
    assert verify([(0.0, 0.0)], [(10, 12)]).startswith("step 0: loss 0.693147, largest log-ratio 0.0e+00 nats")
    assert "1.0e-04 nats" in verify([(0.0, 0.0), (-1e-4, 0.0)], [(10, 12), (20, 5)])
    # The tolerance of a long answer in bfloat16 also applies to the loss.
    half = {"dtype": torch.bfloat16, "beta": 0.1}
    verify([(1.5, -0.5)], [(1024, 300)], losses=[-math.log(1 / (1 + math.exp(-0.2)))], **half)


@pytest.mark.parametrize(
    ("rewards", "lengths", "options"),
    [
        ([(0.0, 0.0), (0.01, 0.0)], [(10, 12), (20, 5)], {}),
        ([(0.0, -0.01)], [(20, 20)], {"loss_type": ["ipo"]}),
        ([(0.0, 5.0)], [(1024, 300)], {"dtype": torch.bfloat16}),
        ([(0.5, 0.0)], [(10, 10)], {"dtype": torch.bfloat16}),
        ([(float("nan"), 0.0)], [(10, 10)], {}),
        ([(0.0, 0.0)], [(10, 10)], {"losses": [float("nan")]}),
        ([(0.0, 0.0)], [(10, 10)], {"losses": [LN2 + 2e-4]}),
        ([(0.01, 0.01)], [(10, 10)], {"beta": 1e-4}),
    ],
)
def test_first_scores_beyond_rounding_stop_the_run(rewards, lengths, options):
    with pytest.raises(DivergedError, match=r"before the first update .* Policy and reference differ"):
        verify(rewards, lengths, **options)


def test_error_of_first_scores_names_worst_answer():
    with pytest.raises(DivergedError, match=r"an answer of 33 tokens has a log-probability that is off by -2 from"):
        verify([(0.1, 0.0), (0.0, -2.0)], [(10, 12), (7, 33)])


def test_first_loss_is_verified_for_plain_sigmoid_only():
    for keys in ({"loss_type": ["hinge"]}, {"loss_weights": [2.0]}, {"use_weighting": True}):
        verify([(0.0, 0.0)], [(10, 12)], losses=[1.0], **keys)
    assert isinstance(build_objective(build_args(), PreferenceConfig()), PreferenceObjective)

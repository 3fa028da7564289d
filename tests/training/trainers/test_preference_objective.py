"""The objective: which numbers it hands to the losses, where the reference comes from, what the first step must be."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tests.training.pairs import make_pairs
from transformers import AutoModelForCausalLM

from recipes_lib.config.recipes import PREFERENCE_LOSSES
from recipes_lib.config.schema import AdapterConfig, PreferenceConfig
from recipes_lib.data.pairs.collator import PairCollator
from recipes_lib.errors import ConfigError, DivergedError
from recipes_lib.losses.preference import PreferenceOptions
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.training.trainers.dpo_trainer import PreferenceObjective, build_objective, verify_first_scores
from recipes_lib.training.trainers.pair_batches import PairScores, compute_answer_logps

NUM_PAIRS = 5
LN2 = math.log(2)


def build_args(**keys):
    """Upstream's keys of the losses, with upstream's defaults."""
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
    """By how much the policy prefers the chosen answers more than the reference does, nats."""
    with torch.no_grad():
        (chosen, rejected), (ref_chosen, ref_rejected) = (
            compute_answer_logps(model, batch, ld_alpha=None) for model in (policy, reference)
        )
    return chosen - ref_chosen - rejected + ref_rejected


def test_the_loss_of_each_pair_is_that_of_the_paper(policy, reference, batch, margins):
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


def test_tokens_of_chosen_answers_are_counted_as_foreseen(policy):
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


def test_only_the_policy_learns(policy, reference, batch):
    objective = build_objective(build_args(), PreferenceConfig())
    objective.reference = reference
    policy.zero_grad()
    objective.score(policy, batch).losses.sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in policy.parameters())
    assert all(parameter.grad is None for parameter in reference.parameters())
    policy.zero_grad()


def test_what_stands_in_the_batch_comes_before_a_model(policy, batch, margins, reference):
    with torch.no_grad():
        chosen, rejected = compute_answer_logps(reference, batch, ld_alpha=None)
    objective = build_objective(build_args(), PreferenceConfig())
    objective.reference = policy  # would give margins of 0
    stored = {**batch, "ref_chosen_logp": chosen, "ref_rejected_logp": rejected}
    figures = objective.score(policy, stored).figures
    torch.testing.assert_close(figures["rewards/margins"], 0.1 * margins)


def test_without_either_it_is_the_policy_with_its_adapter_off(tiny_model_dir, batch, reference):
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


def test_losses_are_added_by_their_weights_and_sft_knows_the_whole_step(policy, reference, batch):
    def score(names, weights=None, mean=None, **keys):
        objective = build_objective(build_args(loss_type=names, loss_weights=weights, **keys), PreferenceConfig())
        objective.reference = reference
        return objective.score(policy, batch, mean).losses

    sigmoid, sft = score(["sigmoid"]), score(["sft"])
    torch.testing.assert_close(score(["sigmoid", "sft"], [0.25, 2.0]), 0.25 * sigmoid + 2 * sft)
    torch.testing.assert_close(score(["sigmoid", "sft"]), sigmoid + sft)
    mean = batch["num_completion_tokens"][0::2].float().mean()
    torch.testing.assert_close(score(["sft"], mean=2 * mean), sft / 2)
    # LD-DPO discounts what an answer is longer by; the likelihood of the chosen one is of all of it.
    torch.testing.assert_close(score(["sft"], ld_alpha=0.3), sft)
    assert not torch.equal(score(["sigmoid"], ld_alpha=0.3), sigmoid)


def test_pairs_are_weighted_by_how_likely_the_policy_gives_them(policy, reference, batch):
    def score(**keys):
        objective = build_objective(build_args(**keys), PreferenceConfig())
        objective.reference = reference
        return objective.score(policy, batch).losses

    ratio = (score(use_weighting=True) / score()).detach()
    assert ((ratio > 0) & (ratio < 5)).all()
    assert ratio.unique().numel() == NUM_PAIRS


def test_held_out_pairs_are_scored_as_if_all_were_one_batch(policy):
    pairs = list(make_pairs(7, seed=9))
    num_tokens = sum(len(pair["chosen_ids"]) for pair in pairs)
    held_out = {"num_pairs": 7, "num_chosen_tokens": num_tokens}
    objective = build_objective(build_args(loss_type=["sft"]), PreferenceConfig(), held_out)
    collate = PairCollator(pad_token_id=1)
    whole = objective.score(policy, collate(pairs)).losses
    parts = [objective.score_held_out(policy, collate(some)).losses for some in (pairs[:2], pairs[2:6], pairs[6:])]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_our_keys_reach_the_losses():
    keys = {"beta": 2.5, "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7, "discopop_tau": 0.1}
    config = PreferenceConfig(simpo_gamma=0.9, label_smoothing=0.2)
    args = build_args(loss_type=["sigmoid", "robust"], ld_alpha=0.4, loss_weights=[1.0, 3.0], **keys)
    objective = build_objective(args, config)
    assert objective.options == PreferenceOptions(**keys, simpo_gamma=0.9, label_smoothing=0.2)
    assert (objective.names, objective.weights, objective.ld_alpha) == (["sigmoid", "robust"], [1.0, 3.0], 0.4)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"loss_type": ["aot"], "use_weighting": True}, "use_weighting weighs pairs"),
        ({"loss_type": ["nca_pair"], "f_divergence_type": "js_divergence"}, "js_divergence is defined for"),
    ],
)
def test_options_that_a_loss_would_ignore_are_refused(keys, found):
    with pytest.raises(ConfigError, match=found):
        build_objective(build_args(**keys), PreferenceConfig())


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_a_loss_needs_a_reference_unless_its_paper_has_none(name):
    config = PreferenceConfig(label_smoothing=0.1 if name in ("exo_pair", "robust", "aot", "aot_unpaired") else 0.0)
    objective = build_objective(build_args(loss_type=[name]), config)
    assert objective.needs_reference == (name not in ("simpo", "orpo", "sft"))
    both = build_objective(build_args(loss_type=[name, "sigmoid"]), config)
    assert both.needs_reference


def verify(rewards, lengths, *, losses=None, beta=0.1, dtype=torch.float32, **keys):
    objective = build_objective(build_args(beta=beta, **keys), PreferenceConfig())
    chosen, rejected = (torch.tensor([row[which] for row in rewards]) for which in (0, 1))
    figures = {"rewards/chosen": beta * chosen, "rewards/rejected": beta * rejected}
    losses = torch.full((len(rewards),), LN2) if losses is None else torch.tensor(losses)
    batch = {"num_completion_tokens": torch.tensor(lengths).flatten()}
    return verify_first_scores(objective, PairScores(losses=losses, figures=figures), batch, dtype)


def test_the_first_scores_are_0_but_for_rounding():
    assert verify([(0.0, 0.0)], [(10, 12)]).startswith("step 0: loss 0.693147, largest log-ratio 0.0e+00 nats")
    assert "1.0e-04 nats" in verify([(0.0, 0.0), (-1e-4, 0.0)], [(10, 12), (20, 5)])
    # A long answer in half precision; the loss moves with it.
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
def test_other_first_scores_stop_the_run(rewards, lengths, options):
    with pytest.raises(DivergedError, match=r"before the first update .* Policy and reference differ"):
        verify(rewards, lengths, **options)


def test_the_answer_that_is_off_is_named():
    with pytest.raises(DivergedError, match=r"an answer of 33 tokens has a log-probability that is off by -2 from"):
        verify([(0.1, 0.0), (0.0, -2.0)], [(10, 12), (7, 33)])


def test_only_the_plain_loss_has_a_known_first_value():
    for keys in ({"loss_type": ["hinge"]}, {"loss_weights": [2.0]}, {"use_weighting": True}):
        verify([(0.0, 0.0)], [(10, 12)], losses=[1.0], **keys)
    assert isinstance(build_objective(build_args(), PreferenceConfig()), PreferenceObjective)

"""Every preference loss against TRL's trainers on one tiny model: values, gradients and metrics."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from recipes_lib.losses.preference import (
    PREFERENCE_LOSSES,
    PreferenceBatch,
    PreferenceOptions,
    compute_preference_losses,
    compute_preference_metrics,
    compute_wpo_weights,
    sum_logps,
)
from recipes_lib.models.heads.loss_head import add_loss_head

NUM_PAIRS = 4
TRL_LOSSES = [name for name in PREFERENCE_LOSSES if name not in ("simpo", "orpo")]
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
WITH_DIVERGENCE = ["sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"]
SMOOTHING = {"exo_pair": 0.02, "robust": 0.1, "aot": 0.2, "aot_unpaired": 0.2}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def trainer(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> DPOTrainer:
    """TRL's trainer with a policy that differs from its reference."""
    rows = datasets.Dataset.from_dict({"prompt": ["Say"], "chosen": [" yes"], "rejected": [" no"]})
    args = DPOConfig(
        str(tmp_path_factory.mktemp("trl")),
        bf16=False,
        use_cpu=True,
        activation_checkpointing=False,
        report_to="none",
        use_weighting=True,
    )
    trainer = DPOTrainer(
        str(tiny_model_dir),
        args=args,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(tiny_model_dir),
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return trainer


@pytest.fixture(scope="module")
def policy(trainer: DPOTrainer, tiny_model_dir: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.load_state_dict(trainer.model.state_dict())
    add_loss_head(model)
    return model


@pytest.fixture(scope="module")
def reference(tiny_model_dir: Path) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    add_loss_head(model)
    return model


@pytest.fixture(scope="module")
def rows() -> dict[str, Tensor]:
    """Pairs with a longer chosen, a longer rejected or equal answers, and one prompt of a single token."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(3, 4, 7), (5, 6, 2), (1, 1, 5), (4, 3, 3)]
    examples = [
        {
            key: torch.randint(4, 512, (length,), generator=generator).tolist()
            for key, length in zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, strict=True)
        }
        for row in lengths
    ]
    return dict(DataCollatorForPreference(pad_token_id=1)(examples))


def run_trl(trainer: DPOTrainer, rows: dict[str, Tensor], names: list[str], **settings: Any) -> Tensor:
    defaults = {"beta": 0.3, "label_smoothing": 0.0, "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5}
    defaults |= {"ld_alpha": None, "use_weighting": False, "loss_weights": [1.0] * len(names)}
    for name, value in (defaults | settings | {"loss_types": names}).items():
        setattr(trainer, name, value)
    trainer._metrics["train"].clear()
    trainer.model.train()
    return trainer._compute_loss(trainer.model, dict(rows), False)


def run_ours(
    policy: nn.Module,
    reference: nn.Module,
    rows: dict[str, Tensor],
    names: list[str],
    *,
    ld_alpha: float | None = None,
    use_weighting: bool = False,
    loss_weights: list[float] | None = None,
    **settings: Any,
) -> tuple[Tensor, PreferenceBatch]:
    sequence_ids, columns = rows["completion_mask"][:, 1:].nonzero(as_tuple=True)
    inputs = {
        "input_ids": rows["input_ids"],
        "predictors": sequence_ids * rows["input_ids"].shape[1] + columns,
        "targets": rows["input_ids"][sequence_ids, columns + 1],
    }
    scored = policy(**inputs, token_logps=True, with_statistics=True)
    with torch.no_grad():
        ref_logps = reference(**inputs, token_logps=True).logps
    place = (sequence_ids, 2 * NUM_PAIRS)
    chosen, rejected = sum_logps(scored.logps, *place, ld_alpha=ld_alpha).chunk(2)
    ref_chosen, ref_rejected = sum_logps(ref_logps, *place, ld_alpha=ld_alpha).chunk(2)
    batch = PreferenceBatch(
        chosen,
        rejected,
        *rows["completion_mask"].sum(dim=1).chunk(2),
        ref_chosen,
        ref_rejected,
        chosen_nll=-sum_logps(scored.logps, *place)[:NUM_PAIRS],
        weights=compute_wpo_weights(scored.logps, scored.log_sum_sq_probs, *place) if use_weighting else None,
    )
    options = PreferenceOptions(**{"beta": 0.3} | settings)
    losses = compute_preference_losses(names, loss_weights or [1.0] * len(names), batch, options)
    assert losses.shape == (NUM_PAIRS,)
    return losses.sum() / NUM_PAIRS, batch


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


CASES: list[tuple[list[str], dict[str, Any]]] = [
    *(([name], {"label_smoothing": SMOOTHING.get(name, 0.0)}) for name in TRL_LOSSES),
    # Per token, per sequence and of the NLL: ld_alpha is applied before the losses.
    *(([name], {"ld_alpha": 0.4}) for name in ("sigmoid", "ipo", "sft")),
    # The divergence is applied before the losses too: each loss with one, sigmoid with all.
    *((["sigmoid"], {"f_divergence_type": divergence}) for divergence in DIVERGENCES),
    *(
        ([name], {"label_smoothing": SMOOTHING.get(name, 0.0), "f_divergence_type": divergence})
        for name, divergence in zip(WITH_DIVERGENCE, itertools.cycle(DIVERGENCES), strict=False)
    ),
    *((["sigmoid"], {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": c}) for c in (0.0, 1.0, 1.7)),
    # With weights, TRL fails on sft and hinge, and refuses aot.
    *(([name], {"use_weighting": True}) for name in ("sigmoid", "ipo", "sppo_hard")),
    (["sigmoid", "bco_pair", "sft"], {"loss_weights": [0.8, 0.2, 1.5]}),
    (["sigmoid", "nca_pair"], {"loss_weights": [0.8, 0.2], "use_weighting": True, "ld_alpha": 0.0, "beta": 0.05}),
]


@pytest.mark.parametrize(("names", "settings"), CASES, ids=lambda value: str(value).replace("'", ""))
def test_preference_losses_and_gradients_equal_trl(names, settings, trainer, policy, reference, rows) -> None:
    theirs = run_trl(trainer, rows, names, **settings)
    expected = gradients_of(theirs, trainer.model)
    ours, _ = run_ours(policy, reference, rows, names, **settings)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    gradients = gradients_of(ours, policy)
    assert gradients.keys() == expected.keys()
    assert any(gradient.abs().max() > 1e-4 for gradient in expected.values())
    torch.testing.assert_close(gradients, expected, **CLOSE)


@pytest.mark.parametrize("ld_alpha", [None, 0.4])
def test_preference_metrics_equal_trl(ld_alpha, trainer, policy, reference, rows) -> None:
    run_trl(trainer, rows, ["sigmoid"], ld_alpha=ld_alpha)
    _, batch = run_ours(policy, reference, rows, ["sigmoid"], ld_alpha=ld_alpha)
    metrics = compute_preference_metrics(batch, beta=0.3)
    shared = metrics.keys() & trainer._metrics["train"].keys()
    assert len(shared) == 6
    for name in shared:
        assert metrics[name].mean().item() == pytest.approx(trainer._metrics["train"][name][0], rel=1e-5), name


def test_simpo_and_orpo_equal_trl(policy: nn.Module, reference: nn.Module, rows: dict[str, Tensor]) -> None:
    simpo, batch = run_ours(policy, reference, rows, ["simpo"], beta=2.0, simpo_gamma=0.7)
    orpo, _ = run_ours(policy, reference, rows, ["orpo"], beta=0.3)
    means = (batch.chosen_logps / batch.num_chosen_tokens, batch.rejected_logps / batch.num_rejected_tokens)
    settings = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "alpha": 0.0, "label_smoothing": 0.0}
    stand_in = SimpleNamespace(accelerator=SimpleNamespace(device="cpu"), **settings)
    torch.testing.assert_close(simpo, CPOTrainer.cpo_loss(stand_in, *means)[0].mean(), **CLOSE)
    stand_in.beta = 0.3
    weighted_log_odds = ORPOTrainer.odds_ratio_loss(stand_in, *means)[0]
    torch.testing.assert_close(orpo, (-means[0] - weighted_log_odds).mean(), **CLOSE)


def test_every_loss_of_trl_is_implemented(trainer: DPOTrainer, rows: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="Unknown loss type") as refusal:
        run_trl(trainer, rows, ["nothing"])
    assert re.findall(r"'(\w+)'", str(refusal.value)) == TRL_LOSSES

"""Load-balancing loss of mixture-of-experts models against transformers' own, in every recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import sizes
from tests.training.pairs import Setting, make_pair_trainer, make_pairs, make_reward_trainer
from tests.training.spiking import make_guarded
from tests.training.students import make_distiller
from tests.training.trajectories import make_packs, make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

from recipes_lib.config.schema import GuardsConfig
from recipes_lib.data.packed.collators import PackedCollator
from recipes_lib.data.pairs.collator import PairCollator
from recipes_lib.models.heads.loss_head import add_loss_head

PAD = 1
LENGTHS = ((31, 4, 6), (9, 3), (5,))
"""Tokens of the rows of each micro-batch: more than half of the first is padding."""


@pytest.fixture(scope="module")
def experts_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mixtral of four experts with confident routers, so that their gradients are large."""
    config = MixtralConfig(
        **sizes(32, 2, 4, vocab_size=512, intermediate_size=48, num_key_value_heads=2, num_local_experts=4),
        **{"output_router_logits": True, "router_aux_loss_coef": 0.5, "pad_token_id": PAD, "eos_token_id": 0},
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5 if "gate.weight" in name else 0.2) if parameter.ndim > 1 else None
    folder = tmp_path_factory.mktemp("experts")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder)
    return folder


def compute_expected(folder: Path, micro_batches: list[list[Any]], head: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean over tokens of transformers' own loss of padded micro-batches, and its gradients by name."""
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    total, num_tokens = torch.zeros(()), sum(len(row) for rows in micro_batches for row in rows)
    for rows in filter(None, micro_batches):
        longest = max(map(len, rows))
        ids = torch.tensor([[*map(int, row), *[PAD] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        aux_loss = model(input_ids=ids, attention_mask=mask).aux_loss
        total = total + aux_loss * sum(map(len, rows)) / num_tokens
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return float(total.detach()), {name: gradient for name, gradient in gradients.items() if head not in name}


def compute_share(trainer: Any, batches: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return what a coefficient of 1 adds to loss and gradients of one step of the trainer."""
    found = []
    trainer.state.max_steps = 1
    for coefficient in (1.0, 0.0):
        trainer.router_aux_loss_coef = coefficient
        given, num_terms = trainer.get_batch_samples(iter([dict(batch) for batch in batches]), len(batches), "cpu")
        trainer.current_gradient_accumulation_steps = len(batches)
        trainer.model.zero_grad()
        loss = sum(float(trainer.training_step(trainer.model, batch, num_terms)) for batch in given)
        named = trainer.model.named_parameters()
        found.append((loss, {name: parameter.grad for name, parameter in named if parameter.grad is not None}))
    (loss, gradients), (plain, without) = found
    nothing = torch.zeros(())
    return loss - plain, {name: gradient - without.get(name, nothing) for name, gradient in gradients.items()}


def make_rows() -> list[list[dict[str, Any]]]:
    draw = np.random.default_rng(0)
    return [
        [
            {
                "input_ids": draw.integers(4, 512, size=length).astype(np.uint32),
                "loss_mask": np.ones(length, np.bool_),
                "seq_lengths": np.array([length]),
                "row_ids": np.array([0]),
            }
            for length in lengths
        ]
        for lengths in LENGTHS
    ]


def assert_equal(got: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-4)
    routers = [name for name in expected[1] if name.endswith("gate.weight")]
    assert len(routers) == 2
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()) + 1e-6)


@pytest.mark.parametrize("recipe", ["sft", "distill"])
@pytest.mark.parametrize("placeholders", [0, 2])
def test_aux_loss_of_token_recipes_equals_transformers(experts_dir, tmp_path, recipe, placeholders) -> None:
    """Micro-batches are weighted by tokens; empty ones, as while the batch size grows, have no weight."""
    rows = make_rows()
    packs = make_packs(4)
    if recipe == "sft":
        trainer, _ = make_trainer(experts_dir, tmp_path / "run", packs)
    else:
        trainer, _, _ = make_distiller(experts_dir, experts_dir, tmp_path / "run", packs)
        trainer._is_first_step = False
    empty = {name: values[:0] for name, values in rows[0][0].items()}
    batches = [PackedCollator(pad_token_id=PAD)(part) for part in [*rows, *[[empty]] * placeholders]]
    expected = compute_expected(experts_dir, [[row["input_ids"] for row in part] for part in rows], "lm_head")
    assert_equal(compute_share(trainer, batches), expected)


def test_recomputed_step_has_equal_aux_loss(experts_dir, tmp_path) -> None:
    """In the recomputation too, a micro-batch is weighted by the tokens of the whole step."""
    keys = {"max_steps": 2, "save_strategy": "no", "gradient_accumulation_steps": 2}
    trainer, _ = make_guarded(experts_dir, tmp_path, make_packs(8), guards=GuardsConfig(verify_steps=1), **keys)
    trainer.router_aux_loss_coef = 0.5
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize("recipe", ["dpo", "reward"])
def test_aux_loss_of_pair_recipes_equals_transformers(experts_dir, tmp_path, recipe) -> None:
    pairs = make_pairs(5)
    if recipe == "dpo":
        trainer: Any = make_pair_trainer(experts_dir, tmp_path / "run", pairs, setting=Setting(layout="separate"))[0]
    else:
        trainer = make_reward_trainer(experts_dir, tmp_path, pairs, layout="separate")[0]
    parts = [[pairs[at] for at in numbers] for numbers in ((0, 1), (2, 3), (4,))]
    batches = [PairCollator(pad_token_id=PAD, layout="separate")(part) for part in parts]
    assert not all(batch["token_mask"].all() for batch in batches)
    documents = [
        [[*pair["prompt_ids"], *pair[f"{answer}_ids"]] for pair in part for answer in ("chosen", "rejected")]
        for part in parts
    ]
    # A masked repetition, as at the end of an epoch, adds nothing.
    batches.append(trainer.mask_batch(batches[0]))
    assert_equal(compute_share(trainer, batches), compute_expected(experts_dir, documents, "lm_head"))


@pytest.mark.parametrize("layout", ["shared", "separate"])
def test_aux_loss_of_pairs_ignores_padding(experts_dir, layout) -> None:
    """No upstream model has shared prompts, so the reference is a row without padding."""
    model = AutoModelForCausalLM.from_pretrained(experts_dir).eval()
    add_loss_head(model)
    pairs = make_pairs(1)
    batch = PairCollator(pad_token_id=PAD, layout=layout, packing=False)([pairs[0]])
    names = ("input_ids", "position_ids", "token_mask")
    places = {"states_at": batch["last_positions"][:1]}
    mask = batch["token_mask"]
    own = model(**{name: batch[name] for name in names}, **places).aux_loss
    padded = {
        name: torch.nn.functional.pad(batch[name], (0, 40), value=PAD if name == "input_ids" else 0) for name in names
    }
    assert int(padded["token_mask"].sum()) == int(mask.sum())
    torch.testing.assert_close(model(**padded, **places).aux_loss, own, rtol=1e-5, atol=1e-6)
    del padded["token_mask"]
    assert abs(model(**padded, **places).aux_loss - own) > 1e-3, "padding would have counted"

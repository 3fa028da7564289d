"""Log-probabilities of a batch of pairs, compared with transformers on one sequence at a time."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import send_to_device
from tests.training.pairs import make_pairs
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from recipes_lib.models.attention.varlen import register_varlen
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.training.trainers.pair_batches import (
    PairScores,
    compute_answer_logps,
    compute_rounding,
    count_pairs,
    read_inputs,
    split_sequences,
)
from recipes_lib.training.trainers.pair_trainer import PairAttention, build_pair_collator

NUM_PAIRS = 6


@pytest.fixture(scope="module")
def pairs():
    return make_pairs(NUM_PAIRS, seed=2)


def collate(pairs, layout="shared", *, packing=True):
    return build_pair_collator(SimpleNamespace(pad_token_id=1), PairAttention("", layout, packing=packing))(list(pairs))


def load(model_dir, implementation):
    register_varlen()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # less uniform distributions
    return model


@pytest.fixture(scope="module")
def expected_logps(tiny_model_dir, pairs):
    """Log-probabilities of the tokens of chosen and rejected answers, by transformers on single sequences."""
    model = load(tiny_model_dir, "eager")
    tokens = []
    for pair in pairs:
        for name in ("chosen_ids", "rejected_ids"):
            prompt, answer = (torch.from_numpy(pair[key].astype("int64")) for key in ("prompt_ids", name))
            with torch.no_grad():
                logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0]
            predicted = log_softmax(logits[len(prompt) - 1 : -1].double(), dim=-1)
            tokens.append(predicted.gather(1, answer[:, None])[:, 0])
    return tokens[0::2], tokens[1::2]


@pytest.mark.parametrize("ld_alpha", [None, 0.0, 0.3])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("implementation", "layout"), [*product(["sdpa", "eager"], ["shared", "separate"]), ("varlen", "shared_flat")]
)
def test_answer_logps_equal_transformers(
    tiny_model_dir, pairs, expected_logps, implementation, layout, packing, ld_alpha
):
    model = load(tiny_model_dir, implementation)
    add_loss_head(model)
    batch = collate(pairs, layout, packing=packing)
    with torch.no_grad():
        logps = compute_answer_logps(model, batch, ld_alpha=ld_alpha)
    expected = torch.zeros(2, NUM_PAIRS, dtype=torch.float64)
    for number, answers in enumerate(zip(*expected_logps, strict=True)):
        shorter = min(map(len, answers))
        for which, tokens in enumerate(answers):
            factor = 1 if ld_alpha is None else ld_alpha
            expected[which, number] = tokens[:shorter].sum() + factor * tokens[shorter:].sum()
    torch.testing.assert_close(logps.double(), expected, rtol=1e-5, atol=1e-4)


def test_model_inputs_by_layout(tiny_model_dir, pairs):
    model = load(tiny_model_dir, "sdpa")
    shared = read_inputs(model, collate(pairs, "shared"))
    assert shared.keys() == {"input_ids", "position_ids", "token_mask", "attention_mask"}
    assert shared["attention_mask"].dtype == torch.bool
    assert shared["attention_mask"].shape == (*shared["input_ids"].shape[:1], 1, *2 * shared["input_ids"].shape[1:])
    separate = read_inputs(model, collate(pairs, "separate"))
    assert separate.keys() == {"input_ids", "position_ids", "token_mask"}
    flat = read_inputs(model, collate(pairs, "flat"))
    bounds = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert flat.keys() == {"input_ids", "position_ids", "token_mask", *bounds}
    parts = read_inputs(model, collate(pairs, "shared_flat"))
    assert parts.keys() == {"input_ids", "position_ids", "token_mask", "shared_prompt_index", *bounds}


@pytest.mark.parametrize("layout", ["shared", "shared_flat", "separate", "flat"])
def test_inputs_are_built_without_reading_from_device(tiny_model_dir, pairs, layout):
    """The host would wait for the device; from the meta device nothing can be read."""
    model = load(tiny_model_dir, "sdpa").to("meta")
    inputs = read_inputs(model, send_to_device(collate(pairs, layout), torch.device("meta")))
    assert {value.device.type for value in inputs.values() if isinstance(value, torch.Tensor)} == {"meta"}


def test_chosen_answers_precede_rejected_ones(pairs):
    ids, num_chosen, num_rejected = split_sequences(collate(pairs), torch.device("cpu"))
    assert num_chosen.tolist() == [len(pair["chosen_ids"]) for pair in pairs]
    assert num_rejected.tolist() == [len(pair["rejected_ids"]) for pair in pairs]
    assert torch.bincount(ids).tolist() == [*num_chosen.tolist(), *num_rejected.tolist()]
    expected = [[pair] * num_chosen[pair] + [NUM_PAIRS + pair] * num_rejected[pair] for pair in range(NUM_PAIRS)]
    assert ids.tolist() == [number for numbers in expected for number in numbers]


def test_sums_and_counts_are_over_pairs():
    losses = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    scores = PairScores(losses=losses, figures={"margin": torch.tensor([0.5, 0.25, 8.0])})
    assert scores.sums() == {"loss": 7.0, "margin": 8.75}
    assert not any(value.requires_grad for value in scores.sums().values())
    batch = {"num_completion_tokens": torch.ones(6)}
    assert count_pairs(batch) == 3
    assert count_pairs({**batch, "num_counted_pairs": 0}) == 0


def test_rounding_bound_grows_with_length_and_lower_precision():
    lengths = torch.tensor([1, 100, 10_000])
    full, half, bfloat = (compute_rounding(lengths, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    assert (full < half).all()
    assert (half < bfloat).all()
    for allowed in (full, half, bfloat):
        assert (allowed[:-1] < allowed[1:]).all()
        assert (allowed / lengths).diff().max() < 0
    assert full[1] < 1e-3

"""Rollout tensors: positions of predictions and values, independence of padding and batch, slicing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.simulated_device import pin_memory
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from recipes_lib.data.prompts import PromptRow
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.models.heads.score_head import add_score_head
from recipes_lib.rl.rollout import Rollout, Sequences, compute_response_logps, compute_response_values, send, share

CPU = torch.device("cpu")
VOCABULARY = 40


def build_rollout(lengths: list[tuple[int, int]], seed: int = 0) -> Rollout:
    """Build a rollout of random values, from the lengths of prompts and answers."""
    random = np.random.default_rng(seed)
    prompts = [PromptRow("here", random.integers(1, VOCABULARY, p).tolist(), "", {}) for p, _ in lengths]
    width = max(t for _, t in lengths)
    mask = torch.arange(width)[None] < torch.tensor([t for _, t in lengths])[:, None]
    ids = torch.from_numpy(random.integers(1, VOCABULARY, (len(lengths), width)))
    by_token = [torch.from_numpy(random.normal(size=mask.shape)).float() * mask for _ in range(6)]
    by_row = torch.from_numpy(random.normal(size=len(lengths))).float()
    numbers = torch.arange(len(lengths))
    scored = torch.ones(len(lengths), dtype=torch.bool)
    return Rollout(prompts, numbers, ids * mask, mask, by_row > 0, scored, by_row, by_row[:, None], *by_token)


LENGTHS = [(3, 5), (7, 1), (1, 4), (4, 2)]


def test_model_input_can_be_pinned(monkeypatch):
    """Tensors for a GPU are copied from pinned memory, in which no two elements may share an address."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or pin_memory(tensor))
    sequences = Sequences(build_rollout(LENGTHS), torch.device("meta"))
    assert len(pinned) == len(sequences.inputs) + 3
    assert {tensor.shape for tensor in sequences.inputs.values()} == {(4, 8)}
    others = (sequences.predictors, sequences.targets, sequences.places)
    assert all(tensor.is_meta for tensor in (*sequences.inputs.values(), *others))


def test_copies_to_mps_are_awaited(monkeypatch):
    copies = []
    monkeypatch.setattr(torch.Tensor, "to", lambda *given, **options: copies.append((given[1:], options)))
    send(torch.ones(2), torch.device("mps"))
    assert copies == [((torch.device("mps"),), {})]


def test_token_is_predicted_and_valued_at_previous_position():
    rollout = build_rollout(LENGTHS)
    sequences = Sequences(rollout, CPU)

    # A critic whose value is the position.
    def return_positions(*, last_positions, position_ids, **_):
        return SimpleNamespace(scores=position_ids.flatten()[last_positions].float())

    values = compute_response_values(return_positions, sequences)
    for row, (num_prompt, num_answer) in enumerate(LENGTHS):
        assert values[row, :num_answer].tolist() == [num_prompt - 1 + t for t in range(num_answer)]
        assert not values[row, num_answer:].any()

    # A policy whose log-probability is 0 at the true next token.
    def predict_next(*, input_ids, predictors, targets, **_):
        following = input_ids.roll(-1, dims=1).flatten()[predictors]
        return SimpleNamespace(logps=torch.where(following == targets, 0.0, -1.0), entropy=None)

    logps, _ = compute_response_logps(predict_next, sequences, temperature=1.0)
    assert not logps.any()


def build_policy(kind: str):
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    elif kind == "gemma2":
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "attn_implementation": "eager"}
        # Low enough to change the logits of this model.
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, final_logit_softcapping=0.5))
    else:
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
        model = LlamaForCausalLM(config)
    return model.eval()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_and_entropy_match_unbatched_forward_pass(kind, temperature):
    rollout, policy = build_rollout(LENGTHS), build_policy(kind)
    with torch.no_grad():
        expected = torch.zeros(rollout.mask.shape)
        entropies = torch.zeros(rollout.mask.shape)
        for row, (num_prompt, num_answer) in enumerate(LENGTHS):
            answer = rollout.response_ids[row, :num_answer]
            ids = torch.cat([torch.tensor(rollout.prompts[row].input_ids), answer])[None]
            log_probs = (policy(input_ids=ids).logits[0] / temperature).log_softmax(-1)[num_prompt - 1 : -1]
            expected[row, :num_answer] = log_probs.gather(1, answer[:, None]).squeeze(1)
            entropies[row, :num_answer] = -(log_probs.exp() * log_probs).sum(1)
        add_loss_head(policy)
        logps, entropy = compute_response_logps(
            policy, Sequences(rollout, CPU), temperature=temperature, with_entropy=True
        )
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, entropies, rtol=0, atol=1e-5)


def test_values_match_unbatched_forward_pass():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    config.num_labels = 1
    critic = LlamaForSequenceClassification(config).eval()
    add_score_head(critic)
    rollout = build_rollout(LENGTHS)
    with torch.no_grad():
        together = compute_response_values(critic, Sequences(rollout, CPU))
        for row, (_, num_answer) in enumerate(LENGTHS):
            alone = compute_response_values(critic, Sequences(rollout.take([row]), CPU))
            torch.testing.assert_close(together[row, :num_answer], alone[0], rtol=0, atol=1e-5)


def test_take_selects_rows_and_truncates_width():
    rollout = dataclasses.replace(build_rollout(LENGTHS), advantages=torch.arange(20.0).reshape(4, 5), returns=None)
    part = rollout.take([3, 1])
    assert part.response_ids.tolist() == rollout.response_ids[[3, 1], :2].tolist()
    assert part.advantages is not None
    assert part.advantages.tolist() == [[15.0, 16.0], [5.0, 6.0]]
    assert part.returns is None
    assert part.scores.tolist() == rollout.scores[[3, 1]].tolist()
    assert part.num_tokens == 3


def test_share_takes_answers_of_the_processes_in_turn(monkeypatch):
    """Two processes have two of three answers each, of other lengths; the last one repeats an answer."""
    whole = build_rollout(LENGTHS)
    parts = [whole.take([0, 2]), whole.take([1, 3])]

    def gather(value):
        (name,) = [field.name for field in dataclasses.fields(Rollout) if getattr(parts[0], field.name) is value]
        return [getattr(part, name) for part in parts]

    monkeypatch.setattr("recipes_lib.rl.rollout.gather_objects", gather)
    shared = share(parts[0], 3)
    for name, tensor in whole.take([0, 1, 2]).tensors():
        assert torch.equal(getattr(shared, name), tensor), name
    assert [prompt.input_ids for prompt in shared.prompts] == [prompt.input_ids for prompt in whole.prompts[:3]]


def test_loss_mask_has_tokens_of_scored_answers():
    rollout = dataclasses.replace(build_rollout(LENGTHS), scored=torch.tensor([True, False, True, False]))
    assert rollout.loss_mask.sum(dim=1).tolist() == [5, 0, 4, 0]
    assert (rollout.num_targets, rollout.num_tokens) == (9, 12)


def test_cut_yields_each_row_once_sorted_by_length():
    rollout = build_rollout([(2, n) for n in (1, 9, 2, 8, 3, 7, 4)])
    parts = list(rollout.cut(3))
    assert parts == [[1, 3, 5], [6, 4, 2], [0]]

"""Sampling: exact distribution, independence of the batch, and log-probabilities of the training graph."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from tests.rl import keys_task
from tests.rl.test_rollout import CPU, VOCABULARY, build_policy, build_rollout
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    MixtralConfig,
    MixtralForCausalLM,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from recipes_lib.models import generation as sampling
from recipes_lib.models.generation import (
    GenerateBackend,
    Generated,
    SampleByUniforms,
    Sampling,
    join_answers,
    mask_answers,
    read_continuation,
    sample_answers,
)
from recipes_lib.models.heads.loss_head import add_loss_head
from recipes_lib.rl.rollout import Sequences, compute_response_logps

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
STOPS = [3, 4, 5, 6, 7]
NARROW = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def build_sampling(temperature: float = 1.0, **options) -> Sampling:
    given = {"stop_ids": STOPS, "pad_id": 0, "response_length": 9, "temperature": temperature}
    return Sampling(**given | options)


def build_backend(temperature: float = 1.0, **options) -> GenerateBackend:
    return GenerateBackend(build_sampling(temperature, **options), batch_size=4, precision=contextlib.nullcontext)


def measure_gap(policy, prompts: list[list[int]], generated: Generated, temperature: float, precision=None) -> float:
    """Largest difference, in nats, of an engine's log-probabilities from those of the policy's training graph."""
    mask, finished = mask_answers(generated.response_ids, STOPS)
    empty = build_rollout([(len(prompt), 1) for prompt in prompts])
    for row, prompt in zip(empty.prompts, prompts, strict=True):
        row.input_ids[:] = prompt
    nothing = torch.zeros(mask.shape)
    given = {"response_ids": generated.response_ids * mask, "mask": mask, "finished": finished}
    by_token = dict.fromkeys(("engine_logps", "logps", "ref_logps", "values"), nothing)
    rollout = dataclasses.replace(empty, **given, **by_token)
    add_loss_head(policy.get_base_model() if hasattr(policy, "get_base_model") else policy)
    with torch.no_grad(), precision or contextlib.nullcontext():
        logps, _ = compute_response_logps(policy, Sequences(rollout, CPU), temperature=temperature)
    return float((generated.engine_logps * mask - logps).abs().max())


def draw(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).random((count, 9)))


def test_samples_follow_distribution_of_model():
    """Inverse transform sampling at ``count`` evenly spaced uniforms is exact to ``1 / count``."""
    logits, count = torch.tensor([[0.0, 2.0, -1.0, -torch.inf, 1.0]]), 10_000
    sampler = SampleByUniforms((torch.arange(count, dtype=torch.float64)[:, None] + 0.5) / count, build_sampling(0.7))
    chosen = sampler(torch.zeros(count, 1), logits.expand(count, -1)).argmax(dim=1)
    probabilities = (logits[0] / 0.7).softmax(0)
    shares = torch.bincount(chosen, minlength=5) / count
    torch.testing.assert_close(shares, probabilities, rtol=0, atol=1.01 / count)
    torch.testing.assert_close(sampler.read_logps()[:, 0], probabilities.log()[chosen])


def test_logps_are_stored_in_one_tensor():
    """One small tensor per token would fragment the heap between the freed logits."""
    sampler = SampleByUniforms(torch.rand(3, 9, dtype=torch.float64), build_sampling())
    kept = []
    for _ in range(4):
        sampler(torch.zeros(3, 1), torch.zeros(3, 5))
        kept.append(sampler.read_logps())
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} == {kept[0].untyped_storage().data_ptr()}
    assert [tuple(tensor.shape) for tensor in kept] == [(3, length) for length in range(1, 5)]


def test_token_of_zero_probability_is_never_sampled():
    ends = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    logits = torch.tensor([[-torch.inf, 1.0, 1.0, -torch.inf]]).expand(2, -1)
    assert SampleByUniforms(ends, build_sampling())(torch.zeros(2, 1), logits).argmax(dim=1).tolist() == [1, 2]


class RefuseFloatSums(TorchFunctionMode):
    """Raises for cumulative sums of floats, as torch does on CUDA if deterministic algorithms are required."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if "cumsum" in getattr(func, "__name__", "") and args[0].is_floating_point():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return func(*args, **(kwargs or {}))


def test_sampling_takes_no_sum_that_full_determinism_refuses():
    policy = build_policy("llama")
    with RefuseFloatSums():
        answers = build_backend().generate(policy, PROMPTS, draw(4))
    assert len(answers.response_ids) == len(PROMPTS)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_dropping_finished_rows_keeps_completions(kind, monkeypatch):
    """Against a single call with transformers' cache, which models without a preallocated cache use."""
    policy, prompts, uniforms = build_policy(kind), PROMPTS * 4, draw(16)
    calls = []

    def count(*args, input_ids, generate=policy.generate, **options):
        calls.append(len(input_ids))
        return generate(*args, input_ids=input_ids, **options)

    policy.generate = count
    found = build_backend().generate(policy, prompts, uniforms)
    assert len(calls) > 2
    assert calls == sorted(calls, reverse=True)
    assert calls[0] == 16 > 2 * calls[-1]
    monkeypatch.setattr(sampling, "build_cache", lambda *_: None)
    calls.clear()
    expected = build_backend().generate(policy, prompts, uniforms)
    assert calls == [16]
    mask, _ = mask_answers(expected.response_ids, STOPS)
    assert torch.equal(found.response_ids * mask, expected.response_ids * mask)
    assert torch.equal(mask, mask_answers(found.response_ids, STOPS)[0])
    torch.testing.assert_close(found.engine_logps * mask, expected.engine_logps * mask, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logps_equal_training_graph(kind, temperature):
    policy = build_policy(kind)
    generated = build_backend(temperature).generate(policy, PROMPTS, draw(4))
    assert measure_gap(policy, PROMPTS, generated, temperature) < 1e-5


@pytest.mark.parametrize(
    "config",
    [
        RwkvConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2),
        RecurrentGemmaConfig(**NARROW, num_hidden_layers=3, lru_width=32, attention_window_size=32),
        DeepseekV4Config(
            **{**NARROW, "num_hidden_layers": 2, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8},
            **{"n_routed_experts": 4, "moe_intermediate_size": 16, "index_head_dim": 16, "index_n_heads": 2},
            compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
            layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
            sliding_window=8,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_prompts_of_models_that_read_padding_are_answered_alone(config):
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(config).eval()
    for parameter in policy.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    prompts = [[*prompt, 10] for prompt in PROMPTS]
    generated = build_backend().generate(policy, prompts, draw(4))
    assert measure_gap(policy, prompts, generated, 1.0) < 1e-4


def test_experts_whose_router_logits_are_returned_continue_padded_prompts():
    """transformers fails: its load-balancing loss has a mask of all tokens and the router logits of one step."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    policy = MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, **heads)
    ).eval()
    add_loss_head(policy)
    generated = build_backend().generate(policy, PROMPTS, draw(4))
    assert measure_gap(policy, PROMPTS, generated, 1.0) < 1e-5


def test_tokens_outside_top_k_and_top_p_are_never_sampled():
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]]).expand(100, -1)
    uniforms = torch.from_numpy(np.random.default_rng(3).random((100, 1)))
    sampler = SampleByUniforms(uniforms, build_sampling(num_tokens=3))
    chosen = sampler(torch.zeros(100, 1), logits).argmax(dim=1)
    assert set(chosen.tolist()) == {0, 1, 2}
    expected = logits[0, :3].log_softmax(0)[chosen]
    torch.testing.assert_close(sampler.read_logps()[:, 0], expected)


def test_stop_token_in_prompt_does_not_end_completion():
    answer = build_backend().generate(
        build_policy("llama"), [[4, 5, 4]], torch.full((1, 9), 0.999, dtype=torch.float64)
    )
    assert answer.response_ids.shape == (1, 9)
    assert answer.response_ids.max() < VOCABULARY


def test_progress_callback_is_called_per_token():
    calls = []
    answers = build_backend(beat=lambda: calls.append(1)).generate(build_policy("llama"), PROMPTS, draw(4))
    assert len(calls) == answers.response_ids.shape[1]


@pytest.mark.parametrize(
    ("kind", "batch_size"), [("llama", 1), ("llama", 3), ("llama", 4), ("llama", None), ("gpt2", 4)]
)
def test_answers_follow_their_seeds_in_order_of_prompts_for_any_batch_size(kind, batch_size):
    policy, backend, shown = build_policy(kind), build_backend(), []
    backend.batch_size = batch_size

    def track(batches, label, count):
        shown.append((label, count))
        return batches

    seeds = [(7, number) for number in range(4)]
    answers = sample_answers(backend, policy, PROMPTS, seeds, build_sampling(), track)
    assert shown == [("sampling answers", -(-4 // (batch_size or 4)))]
    mask, finished = mask_answers(answers.response_ids, STOPS)
    for prompt, seed, ids, logps, is_answer in zip(
        PROMPTS, seeds, answers.response_ids, answers.engine_logps, mask, strict=True
    ):
        uniforms = torch.from_numpy(np.random.default_rng(seed).random((1, 9)))
        alone = backend.generate(policy, [prompt], uniforms)
        # Alone, an answer has no padding up to the longest one of the batch.
        assert alone.response_ids.tolist() == [ids[is_answer].tolist()]
        torch.testing.assert_close(logps[is_answer], alone.engine_logps[0])
    assert len(set(mask.sum(1).tolist())) > 1
    assert finished.any()
    assert len(sample_answers(backend, policy, [], [], build_sampling()).response_ids) == 0


def test_engine_completions_are_batched_and_short_one_is_refused():
    joined = join_answers([([9, 3], [-0.5, -0.25]), (list(range(8, 17)), [-1.0] * 9)], build_sampling())
    assert joined.response_ids.tolist() == [[9, 3, 0, 0, 0, 0, 0, 0, 0], list(range(8, 17))]
    assert joined.engine_logps[0].tolist() == [-0.5, -0.25, *[0.0] * 7]
    with pytest.raises(RuntimeError, match="after 2 of 9 tokens without a stop token"):
        join_answers([([9, 8], [-0.5, -0.25])], build_sampling())


def test_completion_ends_at_first_stop_token():
    ids = torch.tensor([[5, 6, 1, 0, 0], [5, 2, 1, 5, 1], [1, 0, 0, 0, 0], [5, 6, 7, 8, 0]])
    mask, finished = mask_answers(ids, {1, 2})
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert finished.tolist() == [True, True, True, False]


def test_whitespace_between_prompt_and_completion_is_kept(tiny_tokenizer):
    words = keys_task.build_tokenizer()
    for tokenizer, prompt, answer in (
        (words, words("w1 k1 k0").input_ids, words("k1 k1 <eos>").input_ids),
        (tiny_tokenizer, tiny_tokenizer("Two and two").input_ids, tiny_tokenizer(" is four.").input_ids),
    ):
        start = tokenizer.decode(prompt)
        whole = start + read_continuation(tokenizer, prompt, answer)
        assert tokenizer(whole).input_ids == [*prompt, *(one for one in answer if one not in tokenizer.all_special_ids)]

"""Continuous batching by transformers, compared with the training graph."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.models.test_generation import PROMPTS, STOPS, build_sampling, draw, measure_gap
from tests.rl.test_rollout import build_policy
from transformers.generation.continuous_batching import ContinuousBatchingManager

from recipes_lib.config.schema import AdapterConfig
from recipes_lib.errors import ConfigError
from recipes_lib.models.adapters.lora import add_adapter
from recipes_lib.models.attention.varlen import register_varlen
from recipes_lib.models.generation import mask_answers
from recipes_lib.rl.engines import engine as continuous_batching
from recipes_lib.rl.engines.engine import ContinuousBatchingBackend

# By default the cache takes most of the memory.
SMALL = {"num_blocks": 64, "page_size": 16, "max_batch_tokens": 64}


def build_engine(dtype=torch.float32, temperature=1.0, **options) -> ContinuousBatchingBackend:
    return ContinuousBatchingBackend(build_sampling(temperature, **options), dtype=dtype, options=SMALL)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_match_training_graph(temperature):
    policy = build_policy("llama")
    beats = []
    engine = build_engine(temperature=temperature, beat=lambda: beats.append(1))
    engine.load(policy)
    answers = engine.generate(policy, PROMPTS * 5, draw(20))
    mask, _ = mask_answers(answers.response_ids, STOPS)
    assert len(set(mask.sum(1).tolist())) > 2
    assert measure_gap(policy, PROMPTS * 5, answers, temperature) < 1e-5
    assert beats
    assert not policy.training


def test_samples_follow_distribution_of_policy():
    policy, engine, count = build_policy("llama"), build_engine(response_length=1), 4000
    engine.load(policy)
    chosen = engine.generate(policy, [PROMPTS[0]] * count, draw(1)).response_ids[:, 0]
    with torch.no_grad():
        expected = policy(input_ids=torch.tensor(PROMPTS[:1])).logits[0, -1].softmax(0)
    shares = torch.bincount(chosen, minlength=len(expected)) / count
    # Within five standard deviations of each share.
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_active_adapter_and_current_weights_are_used():
    policy = add_adapter(build_policy("llama"), AdapterConfig(use_peft=True), seed=0)
    engine = build_engine()
    for factor in (0.0, 0.5):
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(std=factor or 1e-9, generator=torch.Generator().manual_seed(0))
        engine.load(policy)
        answers = engine.generate(policy, PROMPTS, draw(4))
        assert measure_gap(policy, PROMPTS, answers, 1.0) < 1e-5


def test_float32_policy_samples_by_bfloat16_copy_and_is_unchanged():
    policy, engine = build_policy("llama"), build_engine(torch.bfloat16)
    half = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    for _ in range(2):
        engine.load(policy)
        assert (policy.dtype, engine._model.dtype) == (torch.float32, torch.bfloat16)
        answers = engine.generate(policy, PROMPTS, draw(4))
        assert 1e-6 < measure_gap(policy, PROMPTS, answers, 1.0, half()) < 0.05
        assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.25)
        before = {name: value.clone() for name, value in policy.state_dict().items()}
    rotary = [value for name, value in engine._model.named_buffers() if "inv_freq" in name]
    assert rotary
    assert all(value.dtype == torch.float32 for value in rotary)


def test_engine_failure_raises(monkeypatch):
    policy, engine = build_policy("llama"), build_engine()
    engine.load(policy)

    def fail(*_, **__):
        raise ValueError("the kernel is gone")

    policy.model.layers[0].self_attn.forward = fail
    with pytest.raises(ConfigError, match="failed after 0 of 4 answers: the kernel is gone"):
        engine.generate(policy, PROMPTS, draw(4))
    # As if the thread had ended without a word.
    monkeypatch.setattr(ContinuousBatchingManager, "get_result", lambda *_, **__: None)
    monkeypatch.setattr(ContinuousBatchingManager, "is_running", lambda _: False)
    with pytest.raises(ConfigError, match="its thread ended"):
        engine.generate(policy, PROMPTS, draw(4))


@pytest.mark.parametrize(
    ("attention", "blocks", "reason"), [("sdpa", 10**12, "more than available memory"), ("varlen", 64, "varlen is not")]
)
def test_engine_that_cannot_start_raises(attention, blocks, reason):
    register_varlen()
    policy = build_policy("llama")
    policy.set_attn_implementation(attention)
    options = SMALL | {"num_blocks": blocks}
    engine = ContinuousBatchingBackend(build_sampling(), dtype=torch.float32, options=options)
    engine.load(policy)
    with pytest.raises(ConfigError, match=f"sampling cannot start: .*{reason}"):
        engine.generate(policy, PROMPTS, draw(4))


def test_interrupt_does_not_wait_for_answers(monkeypatch):
    monkeypatch.setattr(continuous_batching, "_SECONDS_TO_WAIT", 0.0)

    def leave():
        raise KeyboardInterrupt

    # Stop token 99 is not in the vocabulary.
    policy, engine = build_policy("llama"), build_engine(beat=leave, response_length=200, stop_ids=[99])
    engine.load(policy)
    steps = []
    policy.model.register_forward_hook(lambda *_: steps.append(1))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(policy, PROMPTS, draw(4))
    assert len(steps) < 200


@pytest.mark.parametrize("options", [{"pages": 3}, {"seed": 3}, {"return_logprobs": False}])
def test_unknown_or_reserved_options_raise(options):
    with pytest.raises(ConfigError, match=next(iter(options))) as refused:
        ContinuousBatchingBackend(build_sampling(), dtype=torch.float32, options=options)
    assert refused.value.problems[0].where == "transformers_continuous_batching_config"


def read_options(engine, policy, prompts):
    """Return the options with which sampling would start."""
    given = []

    def leave(*, continuous_batching_config, **_):
        given.append(continuous_batching_config)
        raise KeyboardInterrupt

    policy.continuous_batching_context_manager = leave
    engine.load(policy)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(policy, prompts, draw(len(prompts)))
    return given[0]


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (4, {}, 4),
        (4, {"page_size": 8}, 8),
        (400, {}, 64),
        (4, {"num_blocks": 9}, 9),
        (4, {"max_memory_percent": 0.1}, None),
    ],
)
def test_cache_on_a_cpu_has_the_blocks_of_the_answers(count, options, expected):
    engine = ContinuousBatchingBackend(build_sampling(response_length=8), dtype=torch.float32, options=options)
    assert read_options(engine, build_policy("llama"), [[5] * 3] * count).num_blocks == expected


def test_answers_by_the_default_cache_on_a_cpu_match_training_graph():
    policy = build_policy("llama")
    engine = ContinuousBatchingBackend(build_sampling(), dtype=torch.float32, options={"max_batch_tokens": 64})
    engine.load(policy)
    answers = engine.generate(policy, PROMPTS, draw(4))
    assert measure_gap(policy, PROMPTS, answers, 1.0) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "has_kernels", "more", "expected"),
    [
        (torch.float32, False, {}, False),
        (torch.bfloat16, False, {}, True),
        (torch.bfloat16, True, {}, False),
        (torch.bfloat16, True, {"auto_switch_to_flash": True}, True),
    ],
)
def test_flash_attention_is_used_in_half_precision_and_not_downloaded(monkeypatch, dtype, has_kernels, more, expected):
    monkeypatch.setattr(continuous_batching, "is_kernels_available", lambda: has_kernels)
    engine = ContinuousBatchingBackend(build_sampling(), dtype=dtype, options=SMALL | more)
    assert read_options(engine, build_policy("llama").to(dtype), PROMPTS).auto_switch_to_flash == expected

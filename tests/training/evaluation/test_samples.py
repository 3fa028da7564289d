"""Samples of held-out prompts: batched greedy generation, prompts, and ``samples.jsonl``."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.rows import read_rows
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, RwkvConfig, RwkvForCausalLM

from recipes_lib.config.schema import EvaluationConfig
from recipes_lib.errors import ConfigError
from recipes_lib.training.evaluation.samples import GenerateSamples, Prompt, build_prompts, generate_samples
from recipes_lib.training.evaluation.user_metrics import AnswerMatch
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.monitoring.metrics import MetricsWriter

TEXTS = ["the baker", "How many days are in a week, and how many in a year?", "snow"]


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()


@pytest.fixture
def prompts(tiny_tokenizer: PreTrainedTokenizerFast) -> list[Prompt]:
    return [Prompt(tiny_tokenizer.encode(text), text, f"answer {text}") for text in TEXTS]


def decode_greedily(model: Any, ids: list[int], num_tokens: int) -> list[int]:
    """Reference: greedy decoding without cache and padding."""
    generated: list[int] = []
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = model(input_ids=torch.tensor([ids + generated]), use_cache=False).logits
            generated.append(int(logits[0, -1].argmax()))
    return generated


@pytest.mark.parametrize("kind", ["llama", "rwkv"])
def test_batched_generation_equals_greedy_decoding_of_each_prompt(kind, model, prompts, tiny_tokenizer) -> None:
    if kind == "rwkv":  # Padding changes its answers.
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "num_hidden_layers": 2}
        model = RwkvForCausalLM(RwkvConfig(vocab_size=len(tiny_tokenizer), **shape)).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    model.generation_config.update(do_sample=True, temperature=0.6, repetition_penalty=1.7, eos_token_id=None)
    samples = generate_samples(model, tiny_tokenizer, prompts, max_new_tokens=9)

    for sample, prompt in zip(samples, prompts, strict=True):
        expected = decode_greedily(model, prompt.input_ids, 9)
        assert sample.completion == tiny_tokenizer.decode(expected, skip_special_tokens=True)
        assert (sample.prompt, sample.reference) == (prompt.text, prompt.reference)
        assert (sample.stopped, sample.num_tokens) == (False, 9)


def test_prompt_without_tokens_is_rejected(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None
    assert tokenizer.encode("") == []
    with pytest.raises(ConfigError, match="sample_prompts: '' has no tokens"):
        build_prompts(EvaluationConfig(sample_prompts=["", "snow"]), [], tokenizer, 64, lambda _: None)


def test_sample_prompt_has_system_prompt(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    config = EvaluationConfig(sample_prompts=["snow"])
    (prompt,) = build_prompts(config, [], tiny_tokenizer, 512, lambda _: None, "Be brief.")
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "snow"}]
    assert prompt.input_ids == tiny_tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert prompt.text == "snow"


def test_any_eos_token_ends_a_completion(model, prompts, tiny_tokenizer) -> None:
    prompt = prompts[0]
    free = decode_greedily(model, prompt.input_ids, 6)
    stop = free[3]
    model.generation_config.eos_token_id = [tiny_tokenizer.eos_token_id, stop]

    (sample,) = generate_samples(model, tiny_tokenizer, [prompt], max_new_tokens=6)

    assert sample.stopped
    assert sample.num_tokens == free.index(stop) + 1
    assert sample.completion == tiny_tokenizer.decode(free[: free.index(stop)], skip_special_tokens=True)


def test_tokenizer_eos_is_used_if_model_has_none(model, prompts, tiny_tokenizer) -> None:
    first = decode_greedily(model, prompts[0].input_ids, 1)[0]
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    model.generation_config.eos_token_id = None

    (sample,) = generate_samples(model, tokenizer, prompts[:1], max_new_tokens=5)

    assert (sample.stopped, sample.num_tokens) == (True, 1)


def test_early_stop_excludes_padding(model, prompts, tiny_tokenizer) -> None:
    first = decode_greedily(model, prompts[0].input_ids, 1)[0]
    model.generation_config.eos_token_id = first

    samples = generate_samples(model, tiny_tokenizer, prompts, max_new_tokens=5)

    assert (samples[0].stopped, samples[0].num_tokens, samples[0].completion) == (True, 1, "")
    assert any(sample.num_tokens == 5 for sample in samples)


def test_completion_may_use_last_position(model: Any, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model.generation_config.eos_token_id = None
    prompts = [Prompt([5] * 500, "long", None), Prompt([6], "short", None)]

    samples = generate_samples(model, tiny_tokenizer, prompts, max_new_tokens=12)

    assert [sample.stopped or sample.num_tokens == 12 for sample in samples] == [True, True]


def test_hook_writes_samples_and_returns_rates(model, prompts, tiny_tokenizer, tmp_path) -> None:
    model.train()
    writer = MetricsWriter(tmp_path / "samples.jsonl")
    hook = GenerateSamples(
        prompts, tiny_tokenizer, writer, max_new_tokens=4, metrics=[AnswerMatch(keep_in_memory=True)]
    )
    state = torch.get_rng_state()

    first, second = hook(nn.DataParallel(model), 0), hook(model, 5)

    records = read_rows(tmp_path / "samples.jsonl")
    assert [record["step"] for record in records] == [0, 0, 0, 5, 5, 5]
    assert records[0].keys() == {"step", "prompt", "completion", "reference", "stopped", "num_tokens"}
    assert [record["completion"] for record in records[:3]] == [record["completion"] for record in records[3:]]
    assert first == second
    assert first["stop_rate"] == sum(record["stopped"] for record in records[:3]) / 3
    assert first["mean_sample_tokens"] == sum(record["num_tokens"] for record in records[:3]) / 3
    assert first["exact_match"] == 0.0
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_metrics_are_computed_in_a_silent_phase_of_the_watchdog(model, prompts, tiny_tokenizer, tmp_path) -> None:
    phases = []

    class SlowMetric(AnswerMatch):
        def _compute(self, **columns: Any) -> dict[str, float]:
            phases.append(WATCHDOG.phase)
            return {}

    writer = MetricsWriter(tmp_path / "samples.jsonl")
    WATCHDOG.enter("an evaluation")
    GenerateSamples(prompts, tiny_tokenizer, writer, 2, [SlowMetric(keep_in_memory=True)])(model, 0)
    assert [*phases, WATCHDOG.phase] == ["computing metrics", "an evaluation"]


def test_repeated_steps_replace_their_samples(model, prompts, tiny_tokenizer, tmp_path) -> None:
    writer = MetricsWriter(tmp_path / "samples.jsonl")
    for step in (0, 1, 2):
        writer.write({"step": step, "prompt": "before the kill"})

    hook = GenerateSamples(prompts, tiny_tokenizer, writer, max_new_tokens=2)
    for step in (1, 3, 2):  # After step 3, a spike rolls the run back.
        hook(model, step)

    steps = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert steps == [0, *[1] * len(prompts), *[2] * len(prompts)]


def build(config, examples, tokenizer, positions=math.inf, say=pytest.fail):
    """Build prompts for a model with ``positions`` positions; a message fails the test."""
    return build_prompts(config, examples, tokenizer, positions, say)


def encode_example(tokenizer, *pieces):
    """Return token ids and loss mask of a document from ``(text, is_target)`` pieces."""
    encoded = [(tokenizer.encode(text, add_special_tokens=False), target) for text, target in pieces]
    ids = [token for tokens, _ in encoded for token in tokens]
    mask = [target for tokens, target in encoded for _ in tokens]
    return np.array(ids, np.uint32), np.array(mask, np.bool_)


def test_prompt_ends_before_first_target(tiny_tokenizer):
    first = [("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n", False), ("Uno.<|im_end|>", True)]
    second = [("<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n", False), ("Dos.<|im_end|>", True)]
    third = [("Three? ", False), ("Tres.<|im_end|>", True)]
    examples = (encode_example(tiny_tokenizer, *pieces) for pieces in (first, second, third))
    prompts = build(EvaluationConfig(num_sample_prompts=2), examples, tiny_tokenizer)
    assert [prompt.reference for prompt in prompts] == ["Uno.", "Dos."]
    assert prompts[0].text == first[0][0]
    assert prompts[0].input_ids == tiny_tokenizer.encode(first[0][0], add_special_tokens=False)


def test_multi_turn_chat_is_cut_at_first_answer(tiny_tokenizer):
    turns = [("Hi. ", False), ("Hello.<|im_end|>", True), ("And you? ", False), ("Fine.<|im_end|>", True)]
    (prompt,) = build(EvaluationConfig(), [encode_example(tiny_tokenizer, *turns)], tiny_tokenizer)
    assert (prompt.text, prompt.reference) == ("Hi. ", "Hello.")


def test_plain_text_prompt_is_its_beginning(tiny_tokenizer):
    text = "The quick brown fox jumps over the lazy dog. " * 10
    (prompt,) = build(EvaluationConfig(), [encode_example(tiny_tokenizer, (text, True))], tiny_tokenizer)
    assert len(prompt.input_ids) == 32
    assert prompt.text + prompt.reference == text


def test_sample_prompt_is_rendered_as_user_turn(tiny_tokenizer):
    config = EvaluationConfig(sample_prompts=["What is\nthis?"])
    (prompt,) = build(config, [], tiny_tokenizer)
    rendered = "<|im_start|>user\nWhat is\nthis?<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer.decode(prompt.input_ids) == rendered
    assert (prompt.text, prompt.reference) == ("What is\nthis?", None)


def test_build_prompts_reads_only_needed_examples(tiny_tokenizer):
    def examples():
        yield encode_example(tiny_tokenizer, ("a b c", False), ("d", True))
        raise AssertionError("read a second example")

    assert build(EvaluationConfig(num_sample_prompts=0), examples(), tiny_tokenizer) == []
    assert len(build(EvaluationConfig(num_sample_prompts=1), examples(), tiny_tokenizer)) == 1
    assert build(EvaluationConfig(), [], tiny_tokenizer) == []


def test_prompt_has_at_least_one_token(tiny_tokenizer):
    example = encode_example(tiny_tokenizer, ("Yes, indeed, and more of it.", True))
    assert example[1][0]
    assert build(EvaluationConfig(), [example], tiny_tokenizer)[0].input_ids


def test_too_long_held_out_prompts_are_skipped_and_counted(tiny_tokenizer):
    lengths = [30, 12, 29, 13, 12]
    examples = [(np.full(40, 7, np.uint32), np.arange(40) >= length) for length in lengths]
    config, messages = EvaluationConfig(num_sample_prompts=2, sample_max_new_tokens=20), []
    prompts = build(config, examples, tiny_tokenizer, 32, messages.append)
    assert [len(prompt.input_ids) for prompt in prompts] == [12, 12]
    (line,) = messages
    assert "3 held-out prompts leave no room for sample_max_new_tokens 20 in the 32 positions" in line
    assert len(build(config, examples, tiny_tokenizer, 50)) == 2
    assert build(config, examples, tiny_tokenizer, 31, messages.append) == []


def test_too_long_sample_prompts_are_all_reported(tiny_tokenizer):
    config = EvaluationConfig(sample_prompts=["Why? " * 30, "Why?", "How? " * 30], sample_max_new_tokens=40)
    with pytest.raises(ConfigError, match="more than the 64 positions") as caught:
        build(config, [], tiny_tokenizer, 64)
    assert [problem.where for problem in caught.value.problems] == ["sample_prompts"] * 2
    longest = max(len(prompt.input_ids) for prompt in build(config, [], tiny_tokenizer, 1000))
    assert len(build(config, [], tiny_tokenizer, longest + 40)) == 3

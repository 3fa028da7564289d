"""Samples continue exactly what precedes an answer in training."""

import math

import numpy as np
import pytest

from recipes_lib.config.schema import EvaluationConfig
from recipes_lib.errors import ConfigError
from recipes_lib.training.evaluation.samples import build_prompts


def build(config, examples, tokenizer, positions=math.inf, say=pytest.fail):
    """By a model of any length, unless said otherwise; nothing is told."""
    return build_prompts(config, examples, tokenizer, positions, say)


def example_of(tokenizer, *pieces):
    """Ids and targets of a document of ``(text, is target)`` pieces."""
    encoded = [(tokenizer.encode(text, add_special_tokens=False), target) for text, target in pieces]
    ids = [token for tokens, _ in encoded for token in tokens]
    mask = [target for tokens, target in encoded for _ in tokens]
    return np.array(ids, np.uint32), np.array(mask, np.bool_)


def test_prompts_are_cut_before_the_first_target(tiny_tokenizer):
    first = [("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n", False), ("Uno.<|im_end|>", True)]
    second = [("<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n", False), ("Dos.<|im_end|>", True)]
    third = [("Three? ", False), ("Tres.<|im_end|>", True)]
    examples = (example_of(tiny_tokenizer, *pieces) for pieces in (first, second, third))
    prompts = build(EvaluationConfig(num_sample_prompts=2), examples, tiny_tokenizer)
    assert [prompt.reference for prompt in prompts] == ["Uno.", "Dos."]
    assert prompts[0].text == first[0][0]
    assert prompts[0].input_ids == tiny_tokenizer.encode(first[0][0], add_special_tokens=False)


def test_of_a_chat_with_several_turns_only_the_first_answer_is_asked_for(tiny_tokenizer):
    turns = [("Hi. ", False), ("Hello.<|im_end|>", True), ("And you? ", False), ("Fine.<|im_end|>", True)]
    (prompt,) = build(EvaluationConfig(), [example_of(tiny_tokenizer, *turns)], tiny_tokenizer)
    assert (prompt.text, prompt.reference) == ("Hi. ", "Hello.")


def test_plain_text_is_continued_from_its_beginning(tiny_tokenizer):
    text = "The quick brown fox jumps over the lazy dog. " * 10
    (prompt,) = build(EvaluationConfig(), [example_of(tiny_tokenizer, (text, True))], tiny_tokenizer)
    assert len(prompt.input_ids) == 32
    assert prompt.text + prompt.reference == text


def test_prompts_of_the_users_own_are_rendered_as_a_user_turn(tiny_tokenizer):
    config = EvaluationConfig(sample_prompts=["What is\nthis?"])
    (prompt,) = build(config, [], tiny_tokenizer)
    rendered = "<|im_start|>user\nWhat is\nthis?<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer.decode(prompt.input_ids) == rendered
    assert (prompt.text, prompt.reference) == ("What is\nthis?", None)


def test_no_more_examples_are_read_than_asked_for(tiny_tokenizer):
    def examples():
        yield example_of(tiny_tokenizer, ("a b c", False), ("d", True))
        raise AssertionError("read on")

    assert build(EvaluationConfig(num_sample_prompts=0), examples(), tiny_tokenizer) == []
    assert len(build(EvaluationConfig(num_sample_prompts=1), examples(), tiny_tokenizer)) == 1
    assert build(EvaluationConfig(), [], tiny_tokenizer) == []


def test_the_first_token_of_a_document_is_never_the_beginning_of_an_answer(tiny_tokenizer):
    example = example_of(tiny_tokenizer, ("Yes, indeed, and more of it.", True))
    assert example[1][0]
    assert build(EvaluationConfig(), [example], tiny_tokenizer)[0].input_ids


def test_held_out_prompts_that_leave_no_room_for_an_answer_are_passed_over_and_counted(tiny_tokenizer):
    lengths = [30, 12, 29, 13, 12]
    examples = [(np.full(40, 7, np.uint32), np.arange(40) >= length) for length in lengths]
    config, told = EvaluationConfig(num_sample_prompts=2, sample_max_new_tokens=20), []
    prompts = build(config, examples, tiny_tokenizer, 32, told.append)
    assert [len(prompt.input_ids) for prompt in prompts] == [12, 12]
    (line,) = told
    assert "3 held-out prompts leave no room for sample_max_new_tokens 20 in the 32 positions" in line
    assert len(build(config, examples, tiny_tokenizer, 50)) == 2
    assert build(config, examples, tiny_tokenizer, 31, told.append) == []


def test_prompts_of_the_users_own_that_leave_no_room_are_refused_all_at_once(tiny_tokenizer):
    config = EvaluationConfig(sample_prompts=["Why? " * 30, "Why?", "How? " * 30], sample_max_new_tokens=40)
    with pytest.raises(ConfigError, match="more than the 64 positions") as caught:
        build(config, [], tiny_tokenizer, 64)
    assert [problem.where for problem in caught.value.problems] == ["sample_prompts"] * 2
    assert len(build(config, [], tiny_tokenizer, 1000)) == 3

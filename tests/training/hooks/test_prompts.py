"""Samples continue exactly what precedes an answer in training."""

import numpy as np

from recipes_lib.config.schema import EvaluationConfig
from recipes_lib.training.hooks.prompts import build_prompts


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
    prompts = build_prompts(EvaluationConfig(num_sample_prompts=2), examples, tiny_tokenizer)
    assert [prompt.reference for prompt in prompts] == ["Uno.", "Dos."]
    assert prompts[0].text == first[0][0]
    assert prompts[0].input_ids == tiny_tokenizer.encode(first[0][0], add_special_tokens=False)


def test_of_a_chat_with_several_turns_only_the_first_answer_is_asked_for(tiny_tokenizer):
    turns = [("Hi. ", False), ("Hello.<|im_end|>", True), ("And you? ", False), ("Fine.<|im_end|>", True)]
    (prompt,) = build_prompts(EvaluationConfig(), [example_of(tiny_tokenizer, *turns)], tiny_tokenizer)
    assert (prompt.text, prompt.reference) == ("Hi. ", "Hello.")


def test_plain_text_is_continued_from_its_beginning(tiny_tokenizer):
    text = "The quick brown fox jumps over the lazy dog. " * 10
    (prompt,) = build_prompts(EvaluationConfig(), [example_of(tiny_tokenizer, (text, True))], tiny_tokenizer)
    assert len(prompt.input_ids) == 32
    assert prompt.text + prompt.reference == text


def test_prompts_of_the_users_own_are_rendered_as_a_user_turn(tiny_tokenizer):
    config = EvaluationConfig(sample_prompts=["What is\nthis?"])
    (prompt,) = build_prompts(config, [], tiny_tokenizer)
    rendered = "<|im_start|>user\nWhat is\nthis?<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer.decode(prompt.input_ids) == rendered
    assert (prompt.text, prompt.reference) == ("What is\nthis?", None)


def test_no_more_examples_are_read_than_asked_for(tiny_tokenizer):
    def examples():
        yield example_of(tiny_tokenizer, ("a b c", False), ("d", True))
        raise AssertionError("read on")

    assert build_prompts(EvaluationConfig(num_sample_prompts=0), examples(), tiny_tokenizer) == []
    assert len(build_prompts(EvaluationConfig(num_sample_prompts=1), examples(), tiny_tokenizer)) == 1
    assert build_prompts(EvaluationConfig(), [], tiny_tokenizer) == []


def test_the_first_token_of_a_document_is_never_the_beginning_of_an_answer(tiny_tokenizer):
    example = example_of(tiny_tokenizer, ("Yes, indeed, and more of it.", True))
    assert example[1][0]
    assert build_prompts(EvaluationConfig(), [example], tiny_tokenizer)[0].input_ids

"""Samples continue exactly what precedes an answer in training."""

import numpy as np
import pytest
from datasets import Dataset

from recipes_lib.config.schema import EvaluationConfig
from recipes_lib.training.hooks.prompts import build_prompts


def pack_of(tokenizer, *documents):
    """Pack ``(row id, [(text, is target), ...])`` documents into one row."""
    ids, mask, lengths, row_ids = [], [], [], []
    for row_id, pieces in documents:
        encoded = [(tokenizer.encode(text, add_special_tokens=False), target) for text, target in pieces]
        ids += [token for tokens, _ in encoded for token in tokens]
        mask += [target for tokens, target in encoded for _ in tokens]
        lengths.append(sum(len(tokens) for tokens, _ in encoded))
        row_ids.append(row_id)
    return {"input_ids": ids, "loss_mask": mask, "seq_lengths": lengths, "row_ids": row_ids}


def dataset_of(*packs):
    return Dataset.from_list(list(packs)).with_format("numpy")


def test_prompts_are_cut_before_the_first_target_in_the_order_of_the_rows(tiny_tokenizer):
    first = (0, [("<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n", False), ("Uno.<|im_end|>", True)])
    second = (1, [("<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n", False), ("Dos.<|im_end|>", True)])
    third = (2, [("Three? ", False), ("Tres.<|im_end|>", True)])
    packs = dataset_of(pack_of(tiny_tokenizer, third, first), pack_of(tiny_tokenizer, second))
    prompts = build_prompts(EvaluationConfig(num_sample_prompts=2), packs, tiny_tokenizer)
    assert [prompt.reference for prompt in prompts] == ["Uno.", "Dos."]
    assert prompts[0].text == first[1][0][0]
    assert prompts[0].input_ids == tiny_tokenizer.encode(first[1][0][0], add_special_tokens=False)


def test_of_a_chat_with_several_turns_only_the_first_answer_is_asked_for(tiny_tokenizer):
    turns = [("Hi. ", False), ("Hello.<|im_end|>", True), ("And you? ", False), ("Fine.<|im_end|>", True)]
    prompts = build_prompts(EvaluationConfig(), dataset_of(pack_of(tiny_tokenizer, (0, turns))), tiny_tokenizer)
    assert (prompts[0].text, prompts[0].reference) == ("Hi. ", "Hello.")


def test_plain_text_is_continued_from_its_beginning(tiny_tokenizer):
    text = "The quick brown fox jumps over the lazy dog. " * 10
    prompts = build_prompts(
        EvaluationConfig(), dataset_of(pack_of(tiny_tokenizer, (0, [(text, True)]))), tiny_tokenizer
    )
    assert len(prompts[0].input_ids) == 32
    assert prompts[0].text + prompts[0].reference == text


def test_prompts_of_the_users_own_are_rendered_as_a_user_turn(tiny_tokenizer):
    config = EvaluationConfig(sample_prompts=["What is\nthis?"])
    prompt = build_prompts(config, None, tiny_tokenizer)[0]
    rendered = "<|im_start|>user\nWhat is\nthis?<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_tokenizer.decode(prompt.input_ids) == rendered
    assert (prompt.text, prompt.reference) == ("What is\nthis?", None)


@pytest.mark.parametrize("eval_dataset", [True, False])
def test_no_prompts_are_made_when_none_are_asked_for_or_there_is_nothing_held_out(tiny_tokenizer, eval_dataset):
    packs = dataset_of(pack_of(tiny_tokenizer, (0, [("a b c", False), ("d", True)]))) if eval_dataset else None
    assert build_prompts(EvaluationConfig(num_sample_prompts=0 if eval_dataset else 4), packs, tiny_tokenizer) == []


def test_the_first_token_of_a_document_is_never_the_beginning_of_an_answer(tiny_tokenizer):
    packs = dataset_of(pack_of(tiny_tokenizer, (0, [("Yes, indeed, and more of it.", True)])))
    assert packs[0]["loss_mask"][0] == np.True_
    assert build_prompts(EvaluationConfig(), packs, tiny_tokenizer)[0].input_ids

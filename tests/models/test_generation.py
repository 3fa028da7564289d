"""A model stops where training taught it to."""

import pytest
from transformers import AutoModelForCausalLM

from recipes_lib.models.generation import build_plain_generation, pad_left, set_stop_tokens


@pytest.mark.parametrize("configured", [None, 0, [0, 7]])
def test_the_trained_terminator_joins_the_stop_tokens_the_model_had(tiny_model_dir, tiny_tokenizer, configured):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.generation_config.eos_token_id = configured
    terminator = tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")
    stops = set_stop_tokens(model, tiny_tokenizer, [terminator])
    assert stops == model.generation_config.eos_token_id
    expected = {tiny_tokenizer.eos_token_id, terminator} | ({7} if isinstance(configured, list) else set())
    assert set(stops) == expected
    assert model.generation_config.pad_token_id == tiny_tokenizer.pad_token_id


def test_the_stop_tokens_survive_saving(tiny_model_dir, tiny_tokenizer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    stops = set_stop_tokens(model, tiny_tokenizer, [3])
    model.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == stops


def test_a_plain_generation_is_the_likeliest_token_whatever_the_model_comes_with(tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    input_ids, attention_mask = pad_left([[5, 6, 7], [8]], 1)
    assert input_ids.tolist() == [[5, 6, 7], [1, 1, 8]]
    assert attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    given = {"input_ids": input_ids, "attention_mask": attention_mask}
    plain = model.generate(**given, generation_config=build_plain_generation([], 1, 4))
    assert plain.shape == (2, 7)
    assert plain[0, 3] == model(input_ids=input_ids[:1]).logits[0, -1].argmax()
    vars(model.generation_config).update(do_sample=True, temperature=9.0, repetition_penalty=3.0)
    assert model.generate(**given, generation_config=build_plain_generation([], 1, 4)).tolist() == plain.tolist()
    stopped = model.generate(
        **given, generation_config=build_plain_generation([int(plain[0, 3]), int(plain[1, 3])], 1, 4)
    )
    assert stopped.shape == (2, 4)

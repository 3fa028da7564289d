"""A model stops where training taught it to."""

import pytest
from transformers import AutoModelForCausalLM

from recipes_lib.models.generation import set_stop_tokens


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

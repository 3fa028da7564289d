"""Stop tokens and generation settings that are saved with a trained model."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from recipes_lib.errors import ConfigError
from recipes_lib.models.generation import build_plain_generation, pad_left, read_stop_ids, set_stop_tokens


@pytest.mark.parametrize("configured", [None, 0, [0, 7]])
def test_trained_end_token_is_added_to_stop_tokens(tiny_model_dir, tiny_tokenizer, configured):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.generation_config.eos_token_id = configured
    terminator = tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")
    stops = set_stop_tokens(model, tiny_tokenizer, [terminator])
    assert stops == model.generation_config.eos_token_id
    expected = {tiny_tokenizer.eos_token_id, terminator} | ({7} if isinstance(configured, list) else set())
    assert set(stops) == expected
    assert model.generation_config.pad_token_id == tiny_tokenizer.pad_token_id


def load_with_generation_config(settings, tiny_model_dir, folder):
    """Load the model with ``settings`` as its ``generation_config.json``."""
    shutil.copytree(tiny_model_dir, folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("settings", [{"temperature": 0.9, "top_p": 0.6}, {"top_k": 5, "do_sample": False}])
def test_sampling_settings_without_do_sample_are_saved(tiny_model_dir, tiny_tokenizer, settings, tmp_path):
    model = load_with_generation_config(settings, tiny_model_dir, tmp_path / "hub")
    stops = set_stop_tokens(model, tiny_tokenizer, [3])
    model.save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").generation_config
    expected = settings | {"do_sample": True, "eos_token_id": stops}
    assert {name: getattr(saved, name) for name in expected} == expected


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.9}, {"num_beams": 2, "max_length": 9}])
def test_valid_generation_config_changes_only_eos_and_pad(tiny_model_dir, tiny_tokenizer, settings, tmp_path):
    model = load_with_generation_config(settings, tiny_model_dir, tmp_path / "hub")
    before = model.generation_config.to_dict()
    stops = set_stop_tokens(model, tiny_tokenizer, [3])
    changes = {"eos_token_id": stops, "pad_token_id": tiny_tokenizer.pad_token_id}
    assert model.generation_config.to_dict() == before | changes


def test_unsavable_generation_config_is_refused_before_training(tiny_model_dir, tiny_tokenizer, tmp_path):
    model = load_with_generation_config({"length_penalty": 2.0}, tiny_model_dir, tmp_path / "hub")
    with pytest.raises(ConfigError, match=r"`length_penalty` is set to `2\.0`") as caught:
        set_stop_tokens(model, tiny_tokenizer, [3])
    assert caught.value.problems[0].where == "model_name_or_path"


def test_plain_generation_is_greedy_for_any_generation_config(tiny_model_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    input_ids, attention_mask = pad_left([[5, 6, 7], [8]], 1)
    assert input_ids.tolist() == [[5, 6, 7], [1, 1, 8]]
    assert attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    # An empty prompt, as of a tokenizer without a start token, is padding alone.
    empty_ids, _ = pad_left([[], [8]], 1)
    assert (empty_ids.tolist(), empty_ids.dtype) == ([[1], [8]], torch.int64)
    prompts = {"input_ids": input_ids, "attention_mask": attention_mask}
    plain = model.generate(**prompts, generation_config=build_plain_generation([], 1, 4))
    assert plain.shape == (2, 7)
    assert plain[0, 3] == model(input_ids=input_ids[:1]).logits[0, -1].argmax()
    settings = {"temperature": 9.0, "repetition_penalty": 3.0, "num_return_sequences": 2}
    settings |= {"suppress_tokens": plain.flatten().tolist(), "bad_words_ids": [[int(plain[1, 3])]]}
    settings |= {"stop_strings": ["e"], "return_dict_in_generate": True, "min_new_tokens": 3, "max_time": 1e-9}
    for name, value in settings.items():
        model.generation_config = GenerationConfig(do_sample=True, **{name: value})
        assert model.generate(**prompts, generation_config=build_plain_generation([], 1, 4)).tolist() == plain.tolist()
    model.generation_config = GenerationConfig(min_new_tokens=3)
    stopped = model.generate(
        **prompts, generation_config=build_plain_generation([int(plain[0, 3]), int(plain[1, 3])], 1, 4)
    )
    assert stopped.shape == (2, 4)


@pytest.mark.parametrize("configured", ["2", ["2"], -1, [], None, [-1, 2, 2, None]])
def test_invalid_stop_token_ids_are_dropped(tiny_model_dir, tiny_tokenizer, configured):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.generation_config.eos_token_id = configured
    expected = {7, tiny_tokenizer.eos_token_id} | ({2} if isinstance(configured, list) and 2 in configured else set())
    assert set_stop_tokens(model, tiny_tokenizer, [7]) == sorted(expected)
    assert read_stop_ids(GenerationConfig(eos_token_id=[2, 0])) == [0, 2]

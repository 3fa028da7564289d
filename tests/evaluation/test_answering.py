"""Answers of local models against `generate`; independence of batches."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from recipes_lib.config.schema import ModelConfig
from recipes_lib.errors import ConfigError, DataError
from recipes_lib.evaluation import answering
from recipes_lib.evaluation.answering import LocalModel, encode_chat, load_local_model
from recipes_lib.evaluation.endpoint import split_reasoning

CHATS = [[{"role": "user", "content": text}] for text in ("What is the capital of France?", "Write", "How many days?")]


def load(folder: Path, **options: Any) -> LocalModel:
    given = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "batch_size": 2, "use_cpu": True, **options}
    return load_local_model(ModelConfig(model_name_or_path=str(folder), dtype="auto"), **given)


def test_answers_depend_on_seed_and_index_not_on_batch(tiny_model_dir: Path) -> None:
    replies = load(tiny_model_dir).answer(CHATS, [5, 6, 7])
    assert load(tiny_model_dir, batch_size=8).answer(CHATS, [5, 6, 7]) == replies
    assert load(tiny_model_dir).answer(CHATS[2:], [7]) == replies[2:]
    assert load(tiny_model_dir).answer(CHATS, [8, 9, 10]) != replies
    assert load(tiny_model_dir, seed=4).answer(CHATS, [5, 6, 7]) != replies
    assert all(0 < reply.num_tokens <= 12 and reply.num_prompt_tokens > 4 for reply in replies)


def test_zero_temperature_matches_greedy_generate(tiny_model_dir: Path) -> None:
    """Reference: transformers' ``generate`` on the rendered prompt."""
    model, tokenizer = (kind.from_pretrained(tiny_model_dir) for kind in (AutoModelForCausalLM, AutoTokenizer))
    engine = load(tiny_model_dir, temperature=0.0)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in engine.sampling.stop_ids
    for chat, reply in zip(CHATS, engine.answer(CHATS, [0, 1, 2]), strict=True):
        prompt = f"<|im_start|>user\n{chat[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        stops, length = engine.sampling.stop_ids, ids.shape[1]
        whole = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=stops, pad_token_id=1)
        made = whole[0, length:]
        assert reply.text == tokenizer.decode(made, skip_special_tokens=True).strip()
        assert (reply.num_prompt_tokens, reply.is_finished) == (length, bool(made[-1] in stops))


def test_overlong_chat_is_an_error_of_its_row(tiny_model_dir: Path) -> None:
    engine = load(tiny_model_dir)
    long = [{"role": "user", "content": "bread " * 600}]
    found = engine.answer([CHATS[0], long, CHATS[2]], [5, 6, 7])
    assert found[1].error is not None
    assert "leave no room for 12" in found[1].error
    # The last position is used.
    tight = dataclasses.replace(engine, positions=found[0].num_prompt_tokens + 12)
    assert tight.answer(CHATS[:1], [5]) == found[:1]
    assert [found[0], found[2]] == [engine.answer(CHATS, [5, 6, 7])[at] for at in (0, 2)]


def test_cut_reasoning_that_the_template_opens_is_no_answer(tiny_model_dir: Path) -> None:
    model = load(tiny_model_dir)
    (plain,) = model.answer([CHATS[0]], [0])
    model.tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    (reply,) = model.answer([CHATS[0]], [0])
    assert split_reasoning(plain.text) == (None, plain.text)
    assert not reply.is_finished
    assert split_reasoning(reply.text)[1] == ""


def test_base_model_continues_single_turn_only(tiny_model_dir: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = None
    # Writes two tokens before a text, and an end of text after it, which would end the prompt.
    eos, pad = tokenizer.eos_token, tokenizer.pad_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{eos} {pad} $A {eos}", special_tokens=[(eos, tokenizer.eos_token_id), (pad, tokenizer.pad_token_id)]
    )
    AutoModelForCausalLM.from_pretrained(tiny_model_dir).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    engine = load(tmp_path)
    assert engine.answer(CHATS[:1], [0])[0].num_prompt_tokens == len(tokenizer(CHATS[0][0]["content"]).input_ids) - 1
    with pytest.raises(ConfigError, match="no chat template"):
        engine.answer([[{"role": "system", "content": "x"}, *CHATS[0]]], [0])


def test_special_tokens_of_a_chat_are_those_of_its_template(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    start = (str(tokenizer.eos_token), tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(f"{start[0]} $A", special_tokens=[start])
    assert tokenizer("a").input_ids[0] == start[1]
    assert encode_chat(tokenizer, CHATS[0]) == encode_chat(tiny_tokenizer, CHATS[0])


def test_description_follows_weights(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path)
    one, other = (load(folder).describe()["weights"] for folder in (tiny_model_dir, tmp_path))
    assert one[0].keys() == other[0].keys() == {"model.safetensors"}
    assert one != other


def test_model_with_nan_weights_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.model.norm.weight.data[0] = torch.nan
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="its logits are not finite"):
        load(tmp_path)


def test_every_engine_stops_at_tokens_of_generation_config(tiny_model_dir: Path, tmp_path: Path) -> None:
    """A model may end its turns with one of several tokens, which neither template nor tokenizer name."""
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    started = load(folder, start=lambda sampling, _: SimpleNamespace(name="engine"))
    assert {5, 7} < set(started.sampling.stop_ids)
    assert started.sampling.stop_ids == load(folder).sampling.stop_ids


@pytest.mark.parametrize(("longest", "reserved"), [(600, 512), (100, 100)])
def test_engine_reserves_memory_for_positions_of_the_model_or_fewer(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, longest: int, reserved: int
) -> None:
    monkeypatch.setattr(answering, "MAX_ENGINE_LENGTH", longest)
    lengths: list[int] = []
    assert load(tiny_model_dir, start=lambda _, length: lengths.append(length)).positions == reserved
    assert lengths == [reserved]


def test_chat_that_template_refuses_is_an_error_of_its_row(tiny_model_dir: Path) -> None:
    engine = load(tiny_model_dir)
    engine.tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    refused = [{"role": "system", "content": "Be brief."}, *CHATS[0]]
    first, second = engine.answer([refused, CHATS[0]], [0, 1])
    assert first.error == "the chat template fails: no system message"
    assert second == engine.answer([CHATS[0]], [1])[0]


def test_adapter_answers_like_its_merged_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    adapted: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, factor in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(factor)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    for folder in ("adapter", "merged"):
        AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / folder)
    found, reference = (
        load(tmp_path / name, temperature=0.0).answer(CHATS, [0, 1, 2]) for name in ("adapter", "merged")
    )
    assert found == reference != load(tiny_model_dir, temperature=0.0).answer(CHATS, [0, 1, 2])
    with pytest.raises(ConfigError, match="this engine does not support adapters"):
        load(tmp_path / "adapter", start=lambda *_: None)

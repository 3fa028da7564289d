"""Packs, pairs, tokens and prompts are prepared once: second calls, processes, threads and ranks find the set."""

from __future__ import annotations

import dataclasses
import json
import threading
from functools import partial
from pathlib import Path

import pytest
from tests.forked import run_python
from tests.rows import read_files

from recipes_lib.commands import prepare as command
from recipes_lib.data import store
from recipes_lib.data.packed import encoding
from recipes_lib.data.packed.prepared_set import prepare
from recipes_lib.data.pairs.preference_sets import prepare_pairs
from recipes_lib.data.prompts import prepare_prompts
from recipes_lib.data.tokens.token_data import prepare_tokens
from recipes_lib.errors import DataError

PREPARES = {"sft": prepare, "dpo": prepare_pairs, "pretrain": prepare_tokens, "grpo": prepare_prompts}


@pytest.fixture
def build_of(build_config, write_rows, make_chats):
    """Return a function that builds configurations of a recipe, with held-out rows."""
    rows = {
        "sft": make_chats(40),
        "dpo": [{"prompt": f"{n} =", "chosen": f" {n}", "rejected": f" {-n}"} for n in range(1, 41)],
        "pretrain": [{"text": f"Text {number} of the baker"} for number in range(40)],
        "grpo": make_chats(40),
    }

    def build(recipe, **options):
        keys = {"test_split_size": 0.2, "max_length": 64, "seed": 3, "response_length": 8, **options}
        return build_config(recipe=recipe, dataset_name=str(write_rows(f"{recipe}.jsonl", rows[recipe])), **keys)

    return build


@pytest.fixture(params=PREPARES)
def build(request, build_of):
    """Build configurations of each recipe."""
    return partial(build_of, request.param)


def make(config, load, local_rank=0):
    return PREPARES[config.recipe](config, load, local_rank=local_rank)


def test_second_call_does_not_tokenise(build, load_tokenizer, tokenized):
    first = make(build(), load_tokenizer)
    before = sum(tokenized)
    second = make(build(), load_tokenizer)
    assert (load_tokenizer.calls, sum(tokenized)) == (1, before)
    assert (first.is_new, second.is_new) == (True, False)
    assert dataclasses.replace(second, is_new=True) == first


def test_prepare_command_reports_new_and_existing_set(build, load_tokenizer, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "_load_tokenizer", lambda _: load_tokenizer())
    config = build()
    keys = {
        "recipe": config.recipe,
        "tokenizer_name_or_path": config.model.model_name_or_path,
        "dataset_name": config.data.dataset_name,
        "test_split_size": 0.2,
        "max_length": 64,
        "output_dir": tmp_path / "out",
        "prepared_dir": tmp_path / "prepared",
    }
    start = {"model_config": "{model_type: llama}"} if config.recipe == "pretrain" else {"model_name_or_path": "none"}
    start |= {"reward_funcs": "[a.b:c]", "response_length": 8} if config.recipe == "grpo" else {}
    argv = [f"--{name}={value}" for name, value in (keys | start).items()]
    outputs = []
    for _ in range(2):
        command.prepare(argv)
        outputs.append(capsys.readouterr().out)
    found = {"sft": "packs", "dpo": "prompts", "pretrain": "held out of", "grpo": "left out, too long"}
    assert found[config.recipe] in outputs[0]
    assert outputs[0].split("prepared in")[0] == outputs[1].split("nothing to do: already prepared")[0] != outputs[0]
    assert load_tokenizer.calls == 1


def test_existing_sets_are_found_without_heavy_imports(build_of, load_tokenizer):
    configs = [build_of(recipe) for recipe in PREPARES]
    for config in configs:
        make(config, load_tokenizer)
    program = """
import importlib, json, sys
from recipes_lib.config.schema import SECTIONS, RecipeConfig
for module, function, values in json.loads(sys.argv[1]):
    module = importlib.import_module(module)
    sections = {name: section(**values[name]) for name, section in SECTIONS.items()}
    config = RecipeConfig(recipe=values["recipe"], path=None, training=values["training"], **sections)
    prepared = getattr(module, function)(config, None)
    assert not prepared.is_new
    module.render_summary(prepared)
print(json.dumps(sorted(sys.modules)))
"""
    functions = [(PREPARES[config.recipe], dataclasses.asdict(config)) for config in configs]
    found = run_python(program, json.dumps([(each.__module__, each.__name__, values) for each, values in functions]))
    assert not {"torch", "transformers", "datasets", "tokenizers", "pyarrow"} & set(json.loads(found))


def test_prepared_set_bytes_are_independent_of_location_and_workers(build, load_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "ROWS_PER_CHUNK", 3)
    roots = {1: tmp_path / "one", 3: tmp_path / "three"}
    for number, root in roots.items():
        make(build(prepared_dir=str(root), dataset_num_proc=number), load_tokenizer)
    one, three = map(read_files, roots.values())
    assert one == three
    assert [Path(name).name for name in one].count("COMPLETE.json") == 1


def test_concurrent_caller_waits_for_first(build, load_tokenizer, tiny_tokenizer):
    config, results = build(), []
    entered, release = threading.Event(), threading.Event()

    def load_slowly():
        entered.set()
        release.wait()
        return tiny_tokenizer

    first = threading.Thread(target=lambda: results.append(make(config, load_slowly)))
    second = threading.Thread(target=lambda: results.append(make(config, load_tokenizer)))
    first.start()
    entered.wait()
    second.start()
    release.set()
    first.join()
    second.join()
    assert sorted(result.is_new for result in results) == [False, True]
    assert load_tokenizer.calls == 0


def test_other_ranks_wait_for_first_rank(build, load_tokenizer, monkeypatch):
    monkeypatch.setattr(store, "_POLL_SECONDS", 0.001)
    config, results = build(), []
    other = threading.Thread(target=lambda: results.append(make(config, None, local_rank=1)))
    other.start()
    first = make(config, load_tokenizer)
    other.join()
    assert [dataclasses.replace(result, is_new=True) for result in results] == [first]
    assert not results[0].is_new


def test_other_ranks_time_out_without_first_rank(build, monkeypatch):
    monkeypatch.setattr(store, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(store, "_SECONDS_TO_START", 0.01)
    with pytest.raises(DataError, match="first process of this node"):
        make(build(), None, local_rank=3)

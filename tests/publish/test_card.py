"""Model cards: valid metadata, escaped names, and no paths of the machine."""

import ast
import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from recipes_lib.errors import DataError
from recipes_lib.files import spell_numbers
from recipes_lib.publish.card import build_card, write_card
from recipes_lib.report.run_files import read_run


def record(**config):
    defaults = {
        "model_name_or_path": "meta-llama/Llama-3.1-8B",
        "dataset_name": "HuggingFaceH4/ultrachat_200k",
        "dataset_mixture": None,
        "output_dir": "outputs/llama3-8b-sft",
        "learning_rate": 1e-05,
    }
    return {"stage": "sft", "config": defaults | config, "versions": {"torch": "2.13.0"}, "git_commit": "abc"}


def test_card_lists_base_data_metrics_and_keys(tmp_path):
    write_card(tmp_path, record(), {"eval_loss": 1.23456, "eval_kl": 0.0000123, "eval_num_target_tokens": 1000.0})
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == "meta-llama/Llama-3.1-8B"
    assert card.data.datasets == ["HuggingFaceH4/ultrachat_200k"]
    assert card.data.library_name == "transformers"
    assert (card.data.pipeline_tag, card.data.model_name) == ("text-generation", None)
    assert "| eval_loss | 1.2346 |\n| eval_kl | 1.23e-05 |" in card.text
    assert "| eval_num_target_tokens | 1000.0 |" in card.text
    assert "learning_rate: 1e-05" in card.text


def test_card_is_written_atomically(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", lambda self, *_, **__: self.write_bytes(b"---\n") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_card(tmp_path, record(), {})
    assert not (tmp_path / "README.md").exists()


def test_sample_prompts_are_not_shortened_like_paths(tmp_path):
    prompts = ["/no_think What is 1 / 2?", "Solve x=/2"]
    functions = ["judges:grade(model='a/b', prompt='/data/p.yaml', rate=2)"]
    facts = {
        "sample_prompts": prompts,
        "system_prompt": "/no_think",
        "chat_template_path": "/data/a.jinja",
        "reward_funcs": functions,
    }
    card = build_card(tmp_path, record(**facts), {})
    assert f"sample_prompts: {json.dumps(prompts)}" in card
    assert 'system_prompt: "/no_think"' in card
    assert "judges:grade(model='a/b', prompt='p.yaml', rate=2)" in card
    assert 'chat_template_path: "a.jinja"' in card


def test_names_are_escaped(tmp_path):
    hostile = "x\n# Evil <script>alert(1)</script> | [a](b) `c`"
    names = dict.fromkeys(("output_dir", "dataset_name", "model_name_or_path", "```\n# Evil"), hostile)
    write_card(tmp_path, record(**names), {hostile: 1.5})
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == hostile
    assert card.data.datasets == [hostile]
    prose = card.text.partition("```yaml")[0]
    assert "\n# Evil" not in card.text
    assert re.search(r"(?<!\\)(<script|\[a\]|`c)", prose) is None
    assert r"| x\\n# Evil \<script\>alert(1)\</script\> \| \[a\](b) \`c\` | 1.5000 |" in prose


def test_local_paths_are_not_hub_ids(tmp_path):
    model, data = tmp_path / "secret-folder" / "base", tmp_path / "secret-folder" / "chats.jsonl"
    model.mkdir(parents=True)
    data.write_text("")
    write_card(tmp_path, record(model_name_or_path=str(model), dataset_name=str(data)), {})
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model is None
    assert card.data.datasets is None
    assert "secret-folder" not in (tmp_path / "README.md").read_text()
    assert 'dataset_name: "chats.jsonl"' in card.text


@pytest.mark.parametrize(("commit", "base"), [("c" * 40, "runs/sft"), (None, None)])
def test_base_without_commit_is_not_a_hub_id(tmp_path, commit, base):
    write_card(tmp_path, record(model_name_or_path="runs/sft") | {"model_commit": commit}, {})
    assert ModelCard.load(tmp_path / "README.md").data.base_model == base


@pytest.mark.parametrize("name", ["/gone/models/x", "../x", "C:\\models\\x", "runs/sft/final"])
def test_paths_of_other_machines_are_not_hub_ids(tmp_path, name):
    write_card(tmp_path, record(model_name_or_path=name, dataset_name="/gone/rows.jsonl"), {})
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model, card.data.datasets) == (None, None)
    assert "gone" not in card.text
    assert "was not pinned" not in card.text


def test_current_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    write_card(Path(), record(model_name_or_path=".", output_dir="."), {})
    text = Path("README.md").read_text()
    assert "\n# mine\n" in text
    assert "\nmine after sft on ultrachat_200k" in text


def test_card_of_reward_model_loads_score_head(tmp_path):
    """A text-generation pipeline would initialise an output projection at random."""
    write_card(tmp_path, record() | {"stage": "reward"}, {})
    used = ModelCard.load(tmp_path / "README.md").text.split("```")[1]
    assert "RewardModel.load(" in used
    assert "text-generation" not in used


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_card_shows_system_prompt_of_training(tmp_path, stage):
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    for keys in ({}, {"system_prompt": '/no_think "Be brief."'}):
        used = build_card(tmp_path, record(**keys) | {"stage": stage}, {}).split("```")[1].removeprefix("python")
        texts = {node.value for node in ast.walk(ast.parse(used)) if isinstance(node, ast.Constant)}
        assert texts & {"system", *keys.values()} == ({"system", *keys.values()} if keys else set())


@pytest.mark.parametrize(("stage", "has_template", "is_chat"), [("sft", 1, 1), ("sft", 0, 0), ("pretrain", 1, 0)])
def test_model_without_chat_template_is_shown_a_text(tmp_path, stage, has_template, is_chat):
    if has_template:
        (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    for adapter in (None, {"base_model_name_or_path": "owner/base"}):
        if adapter:
            (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
        used = build_card(tmp_path, record() | {"stage": stage}, {}).split("```")[1].removeprefix("python")
        names = {node.id for node in ast.walk(ast.parse(used)) if isinstance(node, ast.Name)}
        assert names & {"chat", "write"} == {"chat" if is_chat else "write"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_metrics_are_shown(tmp_path, value):
    """As of a metric of the user without a value, and of the perplexity of an untrained model."""
    event = {"kind": "eval", "step": 1, "eval_loss": 2.5, "eval_mine": value, "eval_num_pairs": 3}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(spell_numbers(event)))
    write_card(tmp_path, record(), read_run(tmp_path).find_figures())
    rows = f"| eval_loss | 2.5000 |\n| eval_mine | {value} |\n| eval_num_pairs | 3 |"
    assert rows in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_name_or_path": "gpt2"}, "\ngpt2 after sft on"),
        ({"teacher_model_name_or_path": "/a/big"}, "| teacher | big |\n| git commit |"),
        ({"teacher_model_name_or_path": "a/big", "teacher_model_revision": "v1"}, "\n| commit of the teacher | v1 |"),
    ],
)
def test_models_of_a_run_are_named(tmp_path, keys, words):
    assert words in build_card(tmp_path, record(**keys), {})


def test_mixture_lists_parts(tmp_path):
    parts = [{"name": "a/first", "weight": 1}, {"name": "b/second", "weight": 2}]
    write_card(tmp_path, record(dataset_name=None, dataset_mixture=parts), {})
    card = ModelCard.load(tmp_path / "README.md")
    assert "after sft on first, second, trained" in card.text
    assert card.data.datasets == ["a/first", "b/second"]


def test_pretrained_model_has_no_base(tmp_path):
    parts = [{"name": str(tmp_path / "secret-folder" / "wiki.jsonl"), "weight": 1}]
    config = {"model_name_or_path": None, "model_config": {"model_type": "llama"}, "dataset_name": None}
    written = record(**config, dataset_mixture=parts) | {"stage": "pretrain"}
    write_card(tmp_path, written, {})
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model is None
    assert "A llama model from random weights after pretrain" in card.text
    assert "Once upon a time" in card.text
    assert "secret-folder" not in card.text.split("## How it was made")[1]


def test_optional_fields_of_record_may_be_missing(tmp_path):
    """A missing field must not prevent the card at the end of training."""
    whole = record() | {"data": {"train": {"num_rows": 5}}, "hardware": {"device": "cpu"}, "num_processes": 1}
    for name in (*whole.keys() - {"stage", "config"}, *whole["config"]):
        kept = {key: value for key, value in whole.items() if key != name}
        kept["config"] = {key: value for key, value in whole["config"].items() if key != name}
        write_card(tmp_path, kept, {})
    write_card(tmp_path, {"stage": "sft", "config": {}}, {})
    ModelCard.load(tmp_path / "README.md")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"stage": "sft"}', '{"stage": "sft", "config": []}', "[" * 100_000),
        '{"stage": "sft", "config": {"dataset_mixture": "a"}}',
        '{"stage": "sft", "config": {"dataset_mixture": [{"name": 1, "weight": "x"}]}}',
    ],
)
def test_base_with_invalid_record_is_named(tmp_path, text):
    base = tmp_path / "base"
    base.mkdir()
    (base / "run.json").write_text(text)
    write_card(tmp_path, record(model_name_or_path=str(base)), {})
    assert "| sft | base |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    "changed",
    [
        {"hardware": []},
        {"data": 3},
        {"git_commit": 7},
        {"failed_gates": 1},
        {"num_processes": "2", "hardware": {"a": 1}},
    ],
)
def test_invalid_record_is_an_error_that_names_folder(tmp_path, changed):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "seconds": "long"}\n')
    with pytest.raises(DataError, match=rf"{tmp_path.name}: no card can be built from its run\.json and metrics"):
        write_card(tmp_path, record() | changed, {})

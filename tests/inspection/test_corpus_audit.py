"""The audit of a run's sources, and the command that it names."""

import importlib.util
import json
import shlex

from tests.corpus.texts import make_text, write_rows

from recipes_lib.commands.clean import main as clean
from recipes_lib.config.loader import load_config
from recipes_lib.inspection.sections import say_corpus


def build_config(folder, name, stage="pretrain"):
    path = folder / f"{stage}.yaml"
    if stage == "pretrain":
        path.write_text(
            f"dataset_name: {name}\noutput_dir: out\nmax_length: 8\nmax_tokens: 100\ntokenizer_name_or_path: gpt2\n"
            "model_config: {model_type: gpt2}\n"
        )
    else:
        path.write_text(f"dataset_name: {name}\noutput_dir: out\nmodel_name_or_path: gpt2\n")
    return load_config(stage, ["--config", str(path)])


def test_the_command_that_is_named_cleans_what_was_found(tmp_path, capsys):
    import random

    texts = [make_text(random.Random(at), 50) for at in range(20)]
    path = write_rows(tmp_path / "a.jsonl", [*texts, *texts[:3]])
    said = []
    say_corpus(build_config(tmp_path, path), "text", said.append)
    assert f"warning: {path}: 3 of 23 documents (13.0%) repeat an earlier one" in said
    command = shlex.split(said[-1])
    assert command[:2] == ["recipes", "clean"]
    clean(command[2:])
    assert "20 of 23 documents" in capsys.readouterr().out
    again = []
    say_corpus(build_config(tmp_path, f"{path}-clean"), "text", again.append)
    assert not any("warning" in line for line in again)


def test_chats_are_looked_at_too(tmp_path):
    chat = {"messages": [{"role": "user", "content": "I am a@b.co"}, {"role": "assistant", "content": "Hello."}]}
    (tmp_path / "c.jsonl").write_text(json.dumps(chat) + "\n")
    said = []
    say_corpus(build_config(tmp_path, tmp_path / "c.jsonl", "sft"), "chat", said.append)
    assert any("email 1" in line for line in said)
    assert '"kind": "chat"' in said[-1]


def test_without_the_extra_one_line_names_it(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", ["x"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = []
    say_corpus(build_config(tmp_path, path), "text", said.append)
    assert said == ["not looked at: pip install 'recipes-lib[corpus]'"]

"""The audit of a run's text sources, and the ``recipes clean`` command that it suggests."""

import importlib.util
import json
import random
import shlex
from dataclasses import replace

from tests.corpus.texts import make_text, write_rows

from recipes_lib.commands.clean import main as clean
from recipes_lib.config.loader import load_config
from recipes_lib.corpus import text_audit
from recipes_lib.inspection.sections import report_corpus


def build_config(folder, name, recipe="pretrain"):
    path = folder / f"{recipe}.yaml"
    if recipe == "pretrain":
        path.write_text(
            f"dataset_name: {name}\noutput_dir: out\nmax_length: 8\nmax_tokens: 100\ntokenizer_name_or_path: gpt2\n"
            "model_config: {model_type: gpt2}\n"
        )
    else:
        path.write_text(f"dataset_name: {name}\noutput_dir: out\nmodel_name_or_path: gpt2\n")
    return load_config(recipe, ["--config", str(path)])


def test_suggested_clean_command_fixes_findings(tmp_path, capsys):
    texts = [make_text(random.Random(at), 50) for at in range(20)]
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    path = write_rows(folder / "a.jsonl", [*texts, *texts[:3]])
    lines = []
    report_corpus(build_config(tmp_path, path), "text", lines.append)
    assert f"warning: {path}: 3 of 23 documents (13.0%) repeat an earlier one" in lines
    command = shlex.split(lines[-1])
    assert command[:2] == ["recipes", "clean"]
    clean(command[2:])
    assert "20 of 23 documents" in capsys.readouterr().out
    again = []
    report_corpus(build_config(tmp_path, f"{path}-clean"), "text", again.append)
    assert not any("warning" in line for line in again)


def test_chats_are_audited(tmp_path):
    chat = {"messages": [{"role": "user", "content": "I am a@b.co"}, {"role": "assistant", "content": "Hello."}]}
    (tmp_path / "c.jsonl").write_text(json.dumps(chat) + "\n")
    lines = []
    report_corpus(build_config(tmp_path, tmp_path / "c.jsonl", "sft"), "chat", lines.append)
    assert any("email 1" in line for line in lines)
    assert '"kind": "chat"' in lines[-1]


def test_sample_covers_end_of_large_source(tmp_path, monkeypatch):
    monkeypatch.setattr(text_audit, "MAX_DOCUMENTS", 200)
    random_ = random.Random(0)
    texts = [make_text(random_, 100) for _ in range(300)]
    path = write_rows(tmp_path / "a.jsonl", [*texts, *([f"{texts[0]} a@b.co"] * 300), ""])
    lines = []
    report_corpus(build_config(tmp_path, path), "text", lines.append)
    (personal,) = [line for line in lines if "personal data" in line]
    assert 0.3 < float(personal.partition("(")[2].partition("%")[0]) / 100 < 0.7


def test_held_out_files_and_evaluations_are_checked_for_overlap(tmp_path):
    texts = [make_text(random.Random(at), 50) for at in range(30)]
    train = write_rows(tmp_path / "train.jsonl", texts)
    held_out = write_rows(tmp_path / "held.jsonl", [f"{texts[3]} and more"])
    (tmp_path / "exam.jsonl").write_text(json.dumps({"q": " ".join(texts[5].split()[10:30])}) + "\n")
    (tmp_path / "exam.yaml").write_text(
        f"task: exam\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/exam.jsonl}}}}\n"
        "output_type: generate_until\ntest_split: test\ndoc_to_text: '{{q}}'\ndoc_to_target: a\n"
    )
    (tmp_path / "eval.yaml").write_text(f"tasks: [exam]\ninclude_path: [{tmp_path}]\n")
    config = build_config(tmp_path, train)
    config = replace(config, data=replace(config.data, dataset_test_split=str(held_out)))
    lines = []
    report_corpus(config, "text", lines.append)
    assert f"warning: {train}: 1 of 30 documents (3.3%) share words with {held_out}" in lines
    assert f"warning: {train}: 1 of 30 documents (3.3%) share words with exam" in lines
    assert f"--benchmarks_of '[\"{tmp_path}/eval.yaml\"]'" in lines[-1]


def test_missing_extra_is_named(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", ["x"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lines = []
    report_corpus(build_config(tmp_path, path), "text", lines.append)
    assert lines == ["not looked at: pip install 'recipes-lib[corpus]'"]


def test_dataset_columns_apply_to_sample_and_held_out_file(tmp_path):
    texts = [make_text(random.Random(at), 50) for at in range(20)]
    for name, rows in (("a.jsonl", [*texts, texts[0]]), ("held_out.jsonl", texts[:2])):
        (tmp_path / name).write_text("".join(json.dumps({"body": text}) + "\n" for text in rows))
    config = build_config(tmp_path, tmp_path / "a.jsonl")
    keys = {
        "dataset_name": None,
        "dataset_mixture": [{"name": str(tmp_path / "a.jsonl")}],
        "dataset_columns": {"text": "body"},
        "dataset_test_split": str(tmp_path / "held_out.jsonl"),
    }
    lines = []
    report_corpus(replace(config, data=replace(config.data, **keys)), "text", lines.append)
    assert any("1 of 21 documents (4.8%) repeat an earlier one" in line for line in lines)
    assert any("held_out.jsonl" in line for line in lines)
    assert not any("not looked at" in line for line in lines)
    assert '"columns": {"text": "body"}' in lines[-1]


def test_end_of_text_inside_a_document_is_reported(run_check):
    """As in TinyStories' text files, which are one document for pretraining."""
    texts = [{"text": make_text(random.Random(at), 20)} for at in range(8)]
    joined = {"text": "<|endoftext|>".join(row["text"] for row in texts[:2])}
    options = {"max_length": 16, "max_steps": 2, "per_device_train_batch_size": 1}
    for rows, is_joined in (([*texts, joined], True), (texts, False)):
        _, output = run_check("pretrain", rows, **options)
        assert ("1 of 9 documents (11.1%) have the end of a document" in output) == is_joined

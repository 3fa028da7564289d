"""Files that are published: model, card and record, code and optimizer state, and the search for secrets."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from tests.publish.runs import finish, make_run, save_checkpoint
from tests.tiny import build_tokenizer
from transformers import AutoTokenizer

from recipes_lib.errors import DataError
from recipes_lib.publish.selection import MODEL, Contents, collect_files, find_contents, find_secret, list_published
from recipes_lib.training.checkpoints.manifest import read_complete, write_complete

SECRET = "hf_" + "k" * 34


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_all_saved_model_and_tokenizer_files_are_published(tiny_model_dir, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "rag": "{{ messages }}"}
    tokenizer.save_pretrained(folder)
    saved = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert "additional_chat_templates/rag.jinja" in saved
    assert set(list_published(folder)) == saved
    assert AutoTokenizer.from_pretrained(folder).chat_template.keys() == {"default", "rag"}


@pytest.mark.parametrize(
    "path",
    [
        *("tokenizer_corpus/rows.jsonl", "tokenizer_corpus/.env", "tokenizer.d/tokenizer.json", "data/config.json"),
        *("private.model/rows.jsonl", "additional_chat_templates/rows.jsonl", "additional_chat_templates/a/b.jinja"),
        *(
            "additional_chat_templates/.private.jinja",
            ".env",
            ".private.model",
            "report/rows.jsonl",
            "report/.loss.png",
        ),
        *("tokenizer_corpus.jsonl", "vocab.csv", "clean_data.py", "modeling_private.py", "config.json.bak"),
        *("samples.jsonl", "checkpoint-10/model.safetensors", "_publishing/model/config.json"),
    ],
)
def test_unrelated_files_are_not_published(run, path):
    before = list_published(finish(run))
    (run / path).parent.mkdir(parents=True, exist_ok=True)
    (run / path).write_text("private")
    assert list_published(run) == before


def test_checkpoint_is_published_with_the_sentencepiece_model_of_its_tokenizer(tmp_path):
    """llama.cpp needs it for Gemma, and transformers does not save it."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "tokenizer.model").write_bytes(b"pieces")
    run = make_run(tmp_path / "run", model_name_or_path=str(tmp_path / "base"))
    save_checkpoint(run, 10)
    contents = find_contents(run, {"hub_strategy": "every_save"})["checkpoint-10"]
    assert collect_files(contents, run)["tokenizer.model"] == tmp_path / "base" / "tokenizer.model"


def test_code_named_in_auto_map_is_published(run):
    finish(run)
    config = {"auto_map": {"AutoConfig": "configuration_own.Config", "AutoModel": "other/repo--private.Model"}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokens.Slow", None]}}))
    texts = {"configuration_own.py": "from .layers import Layer", "layers.py": "from .gone import nothing"}
    for name, text in {**texts, "tokens.py": "import re", "private.py": "", "re.py": ""}.items():
        (run / name).write_text(text)
    assert {path for path in list_published(run) if path.endswith(".py")} == {*texts, "tokens.py"}


def test_broken_link_is_rejected(run):
    (finish(run) / "tokenizer.json").unlink()
    (run / "tokenizer.json").symlink_to("nowhere.json")
    with pytest.raises(DataError, match=r"tokenizer\.json: it is a link to a file that does not exist"):
        list_published(run)


@pytest.mark.parametrize("path", ["tokenizer.json", "additional_chat_templates/rag.jinja"])
def test_link_out_of_folder_is_rejected(run, tmp_path, path):
    """Neither a link to a file nor a link to its folder."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / Path(path).name).write_text("private")
    place = finish(run) / path
    if place.parent == run:
        place.unlink()
        place.symlink_to(outside / place.name)
    else:
        place.parent.symlink_to(outside)
    with pytest.raises(DataError, match=rf"{place.name}: it is a link to a file outside of the folder, .*outside"):
        list_published(run)


def read_files(folder):
    """Return the files of a folder, alternately as paths and as bytes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path if number % 2 else path.read_bytes()
        for number, path in enumerate(paths)
    }


@pytest.mark.parametrize("path", ["README.md", "run.json", "config.json", "state/deep/notes.txt"])
@pytest.mark.parametrize("place", [0, 9000, 300_000])
def test_secret_is_found_in_any_file_and_position(tmp_path, path, place):
    (tmp_path / "state" / "deep").mkdir(parents=True)
    for name in ("README.md", "config.json"):
        (tmp_path / name).write_text("hf_hub is no secret")
    assert find_secret(read_files(tmp_path)) is None
    (tmp_path / path).write_text("word " * (place // 5) + SECRET)
    assert find_secret(read_files(tmp_path)) == path


def test_binary_files_are_not_searched_for_secrets(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\0" + SECRET.encode())
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    assert find_secret(read_files(tmp_path)) is None


def test_secret_in_record_and_card_names_record(tmp_path):
    for name in ("README.md", "run.json"):
        (tmp_path / name).write_text(SECRET)
    assert find_secret(read_files(tmp_path)) == "run.json"


MODEL_FILES = {"model.safetensors", "config.json", "tokenizer.json"}
DESCRIPTION = {"README.md", "run.json"}
STATES = {"optimizer.pt", "trainer_state.json", "COMPLETE.json", "README.md", "samples.jsonl"}


def test_checkpoint_publishes_model_card_and_record(run):
    save_checkpoint(run, 10)
    contents = find_contents(run, {"hub_strategy": "every_save"})["checkpoint-10"]
    files = collect_files(contents, run)
    assert set(files) == MODEL_FILES | DESCRIPTION
    assert b"| eval_loss | 3.0 |" in files["README.md"]
    # Card and record are generated, and have no hash in the manifest.
    assert {path for path, file in files.items() if contents.find_hash(path, file)} == MODEL_FILES


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_published_files_of_adapter_checkpoint_match_its_manifest(run, strategy):
    checkpoint = save_checkpoint(run, 10)
    (checkpoint / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/models/base", "r": 8}))
    write_complete(checkpoint, step=10)
    contents = find_contents(run, {"hub_strategy": strategy})["checkpoint-10"]
    files = collect_files(contents, run)
    hashes = {path: contents.find_hash(path, file) for path, file in files.items()}
    kept = "last-checkpoint/adapter_config.json" if strategy == "checkpoint" else "config.json"
    assert hashes[kept] is not None
    for path, file in files.items():
        content = file if isinstance(file, bytes) else file.read_bytes()
        assert hashes[path] in (None, hashlib.sha256(content).hexdigest()), path


@pytest.mark.parametrize(
    ("base", "commit", "published"),
    [("/models/base", None, "base"), ("runs/base", None, "base"), ("owner/base", "c" * 40, "owner/base"), (None,) * 3],
)
def test_adapter_is_published_with_name_of_its_base_and_no_path(run, base, commit, published):
    """The repository ``runs/base`` may be a stranger's."""
    (finish(run) / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 8}))
    (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"model_commit": commit}))
    files = collect_files(Contents(name=MODEL, source=run), run)
    settings = files["adapter_config.json"]
    text = settings.decode() if isinstance(settings, bytes) else settings.read_text()
    assert json.loads(text) == {"base_model_name_or_path": published, "r": 8}
    assert b"runs/base" not in files["README.md"]


def test_hub_strategy_checkpoint_publishes_optimizer_state(run):
    checkpoint = save_checkpoint(run, 10)
    (checkpoint / ".env").write_text("added after the manifest was written")
    contents = find_contents(run, {"hub_strategy": "checkpoint"})["checkpoint-10"]
    files = collect_files(contents, run)
    assert set(files) == MODEL_FILES | DESCRIPTION | {f"last-checkpoint/{name}" for name in MODEL_FILES | STATES}
    sha256 = read_complete(checkpoint)["files"]["README.md"]["sha256"]
    path = "last-checkpoint/README.md"
    assert contents.find_hash(path, files[path]) == sha256


def test_published_record_has_no_machine_paths(run):
    before = (run / "run.json").read_text()
    files = collect_files(Contents(name=MODEL, source=finish(run)), run)
    record = files["run.json"].decode()
    assert "secret" not in record + files["README.md"].decode()
    assert str(run.parent) not in record
    assert "error" not in json.loads(record)
    assert json.loads(record)["command"] == ["sft.py", "--config", "sft.yaml", "--output_dir=run"]
    assert json.loads((run / "run.json").read_text()) == json.loads(before) | {"status": "done"}


def test_unreadable_run_json_is_not_that_of_a_merged_model(run):
    """Whose status, repository and checkpoints would be lost: a model that a guard has stopped would be published."""
    (finish(run) / "run.json").write_text("{")
    with pytest.raises(DataError, match=r"run\.json: is not JSON"):
        find_contents(run, {})


@pytest.mark.parametrize("facts", [{"job": 7}, {"stage": "sft"}, {"stage": "sft", "config": "sft.yaml"}])
def test_foreign_run_json_is_rejected(run, facts):
    finish(run)
    (run / "run.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"run\.json: has unexpected fields: `(stage|config)`"):
        find_contents(run, {})

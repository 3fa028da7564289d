"""What of a folder leaves the machine: what a model is loaded by and what is told of it, and no secret."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.publish.runs import finish, make_run, save_checkpoint
from tests.tiny import build_tokenizer
from transformers import AutoTokenizer

from recipes_lib.errors import DataError
from recipes_lib.publish.selection import MODEL, Contents, collect_files, find_contents, find_secret, list_published
from recipes_lib.training.checkpoints.manifest import read_complete

SECRET = "hf_" + "k" * 34


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_whatever_upstream_saves_of_model_and_tokenizer_is_published(tiny_model_dir, tmp_path):
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
def test_what_no_model_needs_stays_here(run, path):
    before = list_published(finish(run))
    (run / path).parent.mkdir(parents=True, exist_ok=True)
    (run / path).write_text("private")
    assert list_published(run) == before


def test_code_is_published_where_the_model_is_loaded_by_it(run):
    finish(run)
    config = {"auto_map": {"AutoConfig": "configuration_own.Config", "AutoModel": "other/repo--private.Model"}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokens.Slow", None]}}))
    texts = {"configuration_own.py": "from .layers import Layer", "layers.py": "from .gone import nothing"}
    for name, text in {**texts, "tokens.py": "import re", "private.py": "", "re.py": ""}.items():
        (run / name).write_text(text)
    assert {path for path in list_published(run) if path.endswith(".py")} == {*texts, "tokens.py"}


def test_a_link_that_leads_nowhere_is_told(run):
    (finish(run) / "tokenizer.json").unlink()
    (run / "tokenizer.json").symlink_to("nowhere.json")
    with pytest.raises(DataError, match=r"tokenizer\.json: it is a link to a file that does not exist"):
        list_published(run)


@pytest.mark.parametrize("path", ["tokenizer.json", "additional_chat_templates/rag.jinja"])
def test_a_link_out_of_the_folder_is_not_followed(run, tmp_path, path):
    """Neither that of a file nor that of the folder that it lies in."""
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
    """Some as files on disk, some as text in memory."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path if number % 2 else path.read_bytes()
        for number, path in enumerate(paths)
    }


@pytest.mark.parametrize("path", ["README.md", "run.json", "config.json", "state/deep/notes.txt"])
@pytest.mark.parametrize("place", [0, 9000, 300_000])
def test_a_secret_is_found_wherever_it_stands(tmp_path, path, place):
    (tmp_path / "state" / "deep").mkdir(parents=True)
    for name in ("README.md", "config.json"):
        (tmp_path / name).write_text("hf_hub is no secret")
    assert find_secret(read_files(tmp_path)) is None
    (tmp_path / path).write_text("word " * (place // 5) + SECRET)
    assert find_secret(read_files(tmp_path)) == path


def test_bytes_that_are_no_text_hold_none(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\0" + SECRET.encode())
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    assert find_secret(read_files(tmp_path)) is None


def test_of_a_record_and_the_card_that_is_made_of_it_the_record_is_named(tmp_path):
    for name in ("README.md", "run.json"):
        (tmp_path / name).write_text(SECRET)
    assert find_secret(read_files(tmp_path)) == "run.json"


LOADED = {"model.safetensors", "config.json", "tokenizer.json"}
TOLD = {"README.md", "run.json"}
STATES = {"optimizer.pt", "trainer_state.json", "COMPLETE.json", "README.md", "samples.jsonl"}


def test_of_a_checkpoint_the_model_its_card_and_its_record_are_published(run):
    save_checkpoint(run, 10)
    contents = find_contents(run, {"hub_strategy": "every_save"})["checkpoint-10"]
    files = collect_files(contents, run)
    assert set(files) == LOADED | TOLD
    assert b"| eval_loss | 3.0 |" in files["README.md"]
    # Cards and records are written anew.
    assert {path for path in files if contents.find_hash(path)} == LOADED


def test_optimizer_states_only_where_the_whole_checkpoint_was_asked_for(run):
    checkpoint = save_checkpoint(run, 10)
    (checkpoint / ".env").write_text("what somebody put there after it was sealed")
    contents = find_contents(run, {"hub_strategy": "checkpoint"})["checkpoint-10"]
    files = collect_files(contents, run)
    assert set(files) == LOADED | TOLD | {f"last-checkpoint/{name}" for name in LOADED | STATES}
    seal = read_complete(checkpoint)["files"]["README.md"]["sha256"]
    assert contents.find_hash("last-checkpoint/README.md") == seal


def test_nothing_tells_about_the_machine_and_the_run_keeps_its_own_record(run):
    before = (run / "run.json").read_text()
    files = collect_files(Contents(name=MODEL, source=finish(run)), run)
    told = files["run.json"].decode()
    assert "secret" not in told + files["README.md"].decode()
    assert str(run.parent) not in told
    assert "error" not in json.loads(told)
    assert json.loads(told)["command"] == ["sft.py", "--config", "sft.yaml", "--output_dir=run"]
    assert json.loads((run / "run.json").read_text()) == json.loads(before) | {"status": "done"}


@pytest.mark.parametrize("facts", [{"job": 7}, {"stage": "sft"}, {"stage": "sft", "config": "sft.yaml"}])
def test_a_run_json_of_another_program_is_named(run, facts):
    finish(run)
    (run / "run.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"run\.json: has unexpected fields: `(stage|config)`"):
        find_contents(run, {})

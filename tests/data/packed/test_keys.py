"""Keys of prepared sets: changed by every option that determines the content, and by nothing else."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import shutil
from pathlib import Path

import pytest
from tests.publish.hub_server import Fault

from recipes_lib.config.schema import ChatConfig, DataConfig, TokensConfig
from recipes_lib.data.packed import encoding
from recipes_lib.data.packed.encoding import collect_inputs, find_tokenizer_folder, read_chat_template
from recipes_lib.data.store import compute_key
from recipes_lib.errors import ConfigError

SOURCES = {"train": "0" * 64}

OTHER_VALUES = {
    "dataset_config": "other",
    "dataset_train_split": "other",
    "dataset_test_split": "test",
    "test_split_size": 0.1,
    "dataset_mixture": [{"name": "a", "weight": 2.0}],
    "dataset_format": "messages",
    "dataset_columns": {"text": "content"},
    "dataset_streaming": True,
    "allow_eval_overlap": True,
    "loss_on": "last_assistant",
    "max_length": 128,
    "overlong": "truncate",
    "max_truncated_fraction": 0.5,
    "packing": False,
    "broken_rows": "drop",
    "max_broken_fraction": 0.5,
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "system_prompt": "Be brief.",
}
NOT_IN_KEY = {
    *("dataset_name", "dataset_revision", "chat_template_path", "eval_datasets", "prepared_dir"),
    "dataset_num_proc",
}


def key_of(config, sources=SOURCES) -> str:
    return compute_key(collect_inputs(config, sources))


def test_key_table_covers_every_option():
    options = {
        field.name for section in (DataConfig, TokensConfig, ChatConfig) for field in dataclasses.fields(section)
    }
    assert options == OTHER_VALUES.keys() | NOT_IN_KEY


@pytest.mark.parametrize("option", [*OTHER_VALUES, "trust_remote_code"])
def test_content_option_changes_key(build_config, option):
    assert key_of(build_config(**{option: OTHER_VALUES.get(option, True)})) != key_of(build_config())


@pytest.mark.parametrize("sources", [{"train": "1" * 64}, {"train": "0" * 64, "test": "0" * 64}])
def test_other_rows_change_key(build_config, sources):
    assert key_of(build_config(), sources) != key_of(build_config())


@pytest.mark.parametrize("option", ["dataset_name", "prepared_dir", "dtype", "attn_implementation"])
def test_locations_and_unrelated_options_keep_key(build_config, option):
    assert key_of(build_config(**{option: "other"})) == key_of(build_config())


def test_template_file_is_keyed_by_content(build_config, tmp_path):
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(text)
    without = key_of(build_config())
    a, b, c = (key_of(build_config(chat_template_path=str(tmp_path / name))) for name in "abc")
    assert a == b
    assert len({without, a, c}) == 3


@pytest.fixture
def tokenizer_dir(tiny_tokenizer_dir, tmp_path) -> Path:
    return shutil.copytree(tiny_tokenizer_dir, tmp_path / "tokenizer")


@pytest.mark.parametrize("own", [True, False])
def test_tokenizer_file_change_changes_key(build_config, tokenizer_dir, own):
    options = {"tokenizer_name_or_path" if own else "model_name_or_path": str(tokenizer_dir)}
    for name in ("added_tokens.json", "tekken.json"):  # transformers reads Mistral's `tekken.json` too.
        (tokenizer_dir / name).write_text("{}")
    before = key_of(build_config(**options))
    files = sorted(path for path in tokenizer_dir.iterdir() if path.is_file())
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content + b" ")
        assert key_of(build_config(**options)) != before, path.name
        path.write_bytes(content)
    assert key_of(build_config(**options)) == before


def test_unrelated_files_keep_key(build_config, tokenizer_dir):
    before = key_of(build_config(model_name_or_path=str(tokenizer_dir)))
    (tokenizer_dir / "model.safetensors").write_bytes(b"weights")
    (tokenizer_dir / "README.md").write_text("card")
    assert key_of(build_config(model_name_or_path=str(tokenizer_dir))) == before


def test_moved_tokenizer_keeps_key(build_config, tokenizer_dir):
    assert key_of(build_config(model_name_or_path=str(tokenizer_dir))) == key_of(build_config())


@pytest.mark.parametrize("package", ["jinja2", "tokenizers", "transformers"])
def test_package_version_changes_key(build_config, monkeypatch, package):
    before = key_of(build_config())
    versions = {name: importlib.metadata.version(name) for name in ("jinja2", "tokenizers", "transformers")}
    monkeypatch.setattr(encoding, "version", lambda name: "0" if name == package else versions[name])
    assert key_of(build_config()) != before


def test_code_change_changes_key(build_config, monkeypatch, tmp_path):
    package, ignored = Path(encoding.__file__).parents[2], shutil.ignore_patterns("__pycache__")
    room, _ = (shutil.copytree(package / name, tmp_path / name, ignore=ignored) for name in ("data", "config"))
    before = key_of(build_config())
    monkeypatch.setattr(encoding, "__file__", str(room / "packed" / "encoding.py"))
    assert key_of(build_config()) == before
    of_data = ("chat/encoder", "chat/templates", "sources/formats", "packed/packing", "sources/splits")
    for module in (*of_data, "../config/tokenization"):
        source = (room / f"{module}.py").read_text()
        (room / f"{module}.py").write_text(source + "#")
        assert key_of(build_config()) != before, module
        (room / f"{module}.py").write_text(source)


def test_folder_without_tokenizer_is_data_error(build_config, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"model_name_or_path: .*no tokenizer files"):
        find_tokenizer_folder(build_config(model_name_or_path=str(tmp_path / "empty")))


@pytest.mark.parametrize("option", ["model_name_or_path", "tokenizer_name_or_path"])
@pytest.mark.parametrize("name", ["nobody/nothing", "./no/such/folder", "bad name!"])
def test_missing_tokenizer_is_located_error(build_config, option, name):
    config = dataclasses.replace(build_config(**{option: name}), provenance={option: "sft.yaml:7"})
    with pytest.raises(ConfigError, match=r"sft.yaml:7") as raised:
        find_tokenizer_folder(config)
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(cut="before"), "the connection to the Hub failed .ReadError.\n    run the same command again"),
        (Fault(429), "the Hub answers 429\n    too many requests"),
    ],
    ids=["reset", "too many requests"],
)
def test_failed_download_of_tokenizer_has_its_reason(build_config, hub, pauses, monkeypatch, tmp_path, fault, words):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.sabotage = lambda kind: fault
    with pytest.raises(ConfigError, match=words):
        find_tokenizer_folder(build_config(model_name_or_path="me/mine"))


def test_byte_order_mark_is_no_part_of_the_template(build_config, tmp_path):
    (tmp_path / "template.jinja").write_text("{{ messages }}\n", encoding="utf-8-sig")
    config = build_config(chat_template_path=str(tmp_path / "template.jinja"))
    assert read_chat_template(config) == "{{ messages }}\n"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_unreadable_template_is_error(build_config, tmp_path, content):
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"chat_template_path: .*cannot be read"):
        read_chat_template(build_config(chat_template_path=str(path)))

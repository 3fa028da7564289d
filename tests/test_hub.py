"""Unreachable Hub: errors without retries; a reachable Hub keeps the retries of huggingface_hub."""

from __future__ import annotations

import socket
import threading

import datasets
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http
from tests.forked import find_free_port
from tests.publish.hub_server import Fault, Refusal, open_hub
from tests.tiny import build_tokenizer
from transformers import AutoModelForCausalLM

from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.config.schema import ModelConfig, TokensConfig
from recipes_lib.data.sources.hub_datasets import load_hub
from recipes_lib.environment import go_offline_unless_reachable
from recipes_lib.errors import UserError
from recipes_lib.evaluation.engines import _load_complete
from recipes_lib.evaluation.suites import load_tasks
from recipes_lib.models.adapters.saved import find_base
from recipes_lib.models.loading import explained, load_causal_lm, load_model_config, load_tokenizer

MODEL = ModelConfig(model_name_or_path="nobody/nothing")


@pytest.fixture
def unreachable(monkeypatch):
    """Set the Hub's address to an unused port; a retry fails the test."""
    address = f"http://127.0.0.1:{find_free_port()}"
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        value = getattr(constants, name).replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_http.time, "sleep", lambda _: pytest.fail("retries"))


@pytest.mark.parametrize(
    "load",
    [
        lambda _: load_tokenizer(MODEL, TokensConfig()),
        lambda _: load_model_config(MODEL),
        lambda _: load_hub("nobody/rows", None, None, "train", False),
        lambda folder: load_tasks(EvalConfig(tasks=["own"], include_path=[str(folder)])),
    ],
    ids=["tokenizer", "configuration", "data", "benchmark"],
)
@pytest.mark.usefixtures("unreachable")
def test_unreachable_hub_is_reported_and_fails_without_retries(load, tmp_path, capsys, monkeypatch):
    (tmp_path / "own.yaml").write_text("task: own\ndataset_path: nobody/rows\noutput_type: generate_until\n")
    with pytest.raises(UserError, match=r"nobody/(nothing|rows)|tasks: own") as caught:
        load(tmp_path)
    (problem,) = caught.value.problems
    assert problem.remedy
    assert constants.HF_HUB_OFFLINE
    assert datasets.config.HF_HUB_OFFLINE, "a copy of the constant"
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{constants.ENDPOINT} does not answer (ConnectError): only cached models and data can be used"]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    go_offline_unless_reachable("owner/name")
    assert constants.HF_HUB_OFFLINE
    assert not capsys.readouterr().err, "another rank repeats the line"


@pytest.fixture
def hub(unreachable, monkeypatch, tmp_path):
    """Set the Hub's address to a server that has the tiny tokenizer, and the cache to an empty folder."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_http.time, "sleep", lambda _: None)
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    with open_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        files = {file.name: file.read_bytes() for file in (tmp_path / "tokenizer").iterdir()}
        server.add(str(MODEL.model_name_or_path), private=False, files=files)
        yield server


@pytest.mark.parametrize("fault", [Fault(stalls=True), Fault(cut="before")], ids=["stalls", "resets"])
def test_broken_connection_to_hub_ends_with_its_reason(hub, fault, monkeypatch):
    monkeypatch.setattr("recipes_lib.environment.SECONDS_OF_SILENCE", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0)
    hub.sabotage = lambda kind: fault
    with pytest.raises(UserError, match="nobody/nothing: the connection to the Hub failed") as caught:
        load_tokenizer(MODEL, TokensConfig())
    assert "run the same command again" in caught.value.problems[0].remedy


@pytest.mark.parametrize(
    ("load", "status", "code", "found"),
    [
        (lambda: load_tokenizer(MODEL, TokensConfig()), 403, "GatedRepo", "nobody/nothing is gated"),
        (lambda: load_model_config(MODEL), 404, "RepoNotFound", "nobody/nothing is no folder, and not on the Hub"),
        (lambda: load_model_config(MODEL), 404, "RevisionNotFound", "nobody/nothing has no such revision"),
    ],
)
def test_refusal_of_hub_is_no_broken_connection(hub, load, status, code, found):
    hub.sabotage = lambda kind: Refusal(status, code).answer
    with pytest.raises(UserError, match=found):
        load()


@pytest.mark.parametrize(
    "refused", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model"]
)
def test_refused_file_of_tokenizer_is_not_a_missing_one(hub, refused, monkeypatch):
    send = hub._file

    def refuse(path, body):
        if path["path"] == refused:
            raise Refusal(429)
        return send(path, body)

    monkeypatch.setattr(hub, "_file", refuse)
    with pytest.raises(UserError, match="nobody/nothing: the Hub answers 429"):
        load_tokenizer(MODEL, TokensConfig())
    monkeypatch.setattr(hub, "_file", send)
    assert load_tokenizer(MODEL, TokensConfig()).chat_template


@pytest.fixture
def model(hub, tiny_model_dir):
    """Add the tiny model to the server; returns its files."""
    files = {file.name: file.read_bytes() for file in tiny_model_dir.iterdir()}
    hub.add(str(MODEL.model_name_or_path), private=False, files=files)
    return hub.repositories[str(MODEL.model_name_or_path)].branches["main"][-1].files


def load_for_evaluation():
    with explained("model_name_or_path", str(MODEL.model_name_or_path)):
        _load_complete(AutoModelForCausalLM, str(MODEL.model_name_or_path))


@pytest.mark.parametrize("load", [lambda: load_causal_lm(MODEL, "sdpa"), load_for_evaluation])
def test_refused_weights_are_not_missing_ones(hub, model, load, monkeypatch):
    send = hub._file

    def refuse(path, body):
        if path["path"] == "model.safetensors":
            raise Refusal(429)
        return send(path, body)

    monkeypatch.setattr(hub, "_file", refuse)
    with pytest.raises(UserError, match="nobody/nothing: the Hub answers 429"):
        load()


def test_refused_configuration_of_adapter_is_not_a_missing_one(hub, model):
    model["adapter_config.json"] = b'{"peft_type": "LORA", "base_model_name_or_path": "org/base"}'
    hub.sabotage = lambda kind: Refusal(429).answer
    with pytest.raises(UserError, match="nobody/nothing: the Hub answers 429"):
        find_base(MODEL)


def test_no_service_is_asked_to_convert_pickled_weights(hub, model):
    """Its weights would be of a pull request, not of the commit that is recorded."""
    model["pytorch_model.bin"] = model.pop("model.safetensors")
    with pytest.raises(UserError, match="nobody/nothing has no whole safetensors weights"):
        load_causal_lm(MODEL, "sdpa")
    assert set(hub.requests) == {"file"}


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_file_of_cache_is_named(hub, model, name, tmp_path):
    load_tokenizer(MODEL, TokensConfig())
    load_model_config(MODEL)
    (file,) = (tmp_path / "cache").glob(f"*/snapshots/*/{name}")
    file.write_bytes(model[name][:-9])
    with pytest.raises(UserError, match=str(file)):
        [load_tokenizer(MODEL, TokensConfig()), load_model_config(MODEL)]


def test_offline_mode_is_unchanged_for_paths_and_reachable_hub(unreachable, tmp_path, monkeypatch):
    go_offline_unless_reachable(str(tmp_path))
    assert not constants.HF_HUB_OFFLINE
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("recipes_lib.environment.SECONDS_TO_ANSWER", 60.0)
        answering = threading.Thread(target=answer_once, args=(server,))
        answering.start()
        go_offline_unless_reachable("owner/name")
        answering.join()
    assert not constants.HF_HUB_OFFLINE


def answer_once(server):
    connection, _ = server.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

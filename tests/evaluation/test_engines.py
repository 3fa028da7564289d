"""Models and endpoints that answer lm-eval: equality, failures, resume, adapters."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.models import api_models
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tenacity import wait_none
from tests.evaluation.chat_endpoint import ChatEndpoint
from tests.evaluation.test_harness import add_tokens, change_config
from tests.forked import ROOT, Launch, run_script
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from recipes_lib.cli import main as run_recipes
from recipes_lib.config.evaluation import EvalConfig
from recipes_lib.errors import ConfigError
from recipes_lib.evaluation import engines
from recipes_lib.evaluation.engines import CachedModel, CheckedModel
from recipes_lib.evaluation.harness import RECORD, SAMPLES, describe_model, evaluate_model, read_samples

FIGURES = ("scores", "num_questions", "num_cut", "num_empty", "prompts_hash")


BROKEN = {
    "garbage": (200, "<html>"),
    "empty": (200, '{"error": "no credit"}'),
    "none": (200, '{"choices": []}'),
    "error": (404, "no such model"),
    "context": (400, "too\n\x1blong"),
    "key": (401, "wrong key: k-123"),
    "busy": (503, "null"),
}


class ServedModel:
    """Tiny model behind a loopback endpoint with selectable failures."""

    def __init__(self, model: Path) -> None:
        self.network, self.tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
        self.broken, self.num_asked, self.num_busy = "", 0, 0
        self.server = ChatEndpoint(self.reply)
        self.flags = ["--base_url", f"{self.server.url}/completions", "--tokenizer_name_or_path", str(model)]
        self.chat_flags = ["--base_url", f"{self.server.url}/chat/completions"]
        self.interrupt: Callable[[], object] = lambda: None

    def reply(self, asked: dict[str, Any]) -> tuple[int, dict[str, str], str]:
        kind = {"Content-Type": "application/json"}
        if self.num_busy:
            self.num_busy -= 1
            return 429, {"Retry-After": "17"}, ""
        if self.broken == "lost":
            raise ConnectionError
        if self.broken == "cut":
            return 200, {**kind, "Content-Length": "99"}, '{"choices": ['
        if self.broken in BROKEN:
            status, text = BROKEN[self.broken]
            return status, kind, text
        reply = self.answer(asked)
        for choice in reply["choices"]:
            if self.broken in ("nan", "no echo"):
                known = choice["logprobs"]["token_logprobs"]
                choice["logprobs"]["token_logprobs"] = [math.nan] * len(known) if self.broken == "nan" else known[-1:]
        return 200, kind, json.dumps(reply)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.num_asked += 1
        self.interrupt()
        if "messages" in asked:
            text = asked["messages"][-1]["content"].split()[1].strip(",")
            parts = [{"type": "thinking", "thinking": []}, {"type": "text", "text": text}]
            return {"choices": [{"index": 0, "message": {"content": parts if self.num_asked % 2 else text}}]}
        return {"choices": [self._complete(at, tokens, asked) for at, tokens in enumerate(asked["prompt"])]}

    def _complete(self, at: int, tokens: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor([tokens])
        if not asked.get("echo"):
            made = self.network.generate(ids, max_new_tokens=asked["max_tokens"], do_sample=False)[0, len(tokens) :]
            text = self.tokenizer.decode(made, skip_special_tokens=True)
            for stop in asked["stop"]:
                text = text.partition(stop)[0]
            return {"index": at, "text": text}
        logps = self.network(ids).logits[0, :-1].log_softmax(-1)
        # As in vLLM and OpenAI: None for the first token, and one extra for the generated token.
        own = [None, *logps.gather(1, ids[0, 1:, None])[:, 0].tolist(), 0.0]
        best = [None, *({"best": value} for value in logps.max(-1).values.tolist()), {"best": 0.0}]
        return {"index": at, "logprobs": {"token_logprobs": own, "top_logprobs": best}}


@pytest.fixture
def served(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedModel]:
    monkeypatch.setattr(api_models, "wait_exponential", lambda **_: wait_none())
    served = ServedModel(model)
    yield served
    served.server.shutdown()


def run_eval(
    place: str | Path, tasks: Path, output: Path, *flags: object, names: str = "local_choice,local_written"
) -> int:
    keys = ["--tasks", names, "--include_path", str(tasks), "--use_cpu", "--output_dir", str(output)]
    return run_recipes(["eval", str(place), *keys, *map(str, flags)])


def read(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return record


@pytest.mark.parametrize("form", ["$A", "BOS $A", "BOS $A EOS"])
def test_endpoint_scores_match_local_model(served, model, tasks, tmp_path, monkeypatch, form: str) -> None:
    add_tokens(model, form)
    names = "local_choice,local_written,local_rolling"
    assert run_eval(model, tasks, tmp_path / "own", names=names) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "key\r\n")
    assert run_eval("name", tasks, tmp_path / "served", *served.flags, names=names) == 0
    assert set(served.server.keys) == {"Bearer key"}
    own, theirs = read(tmp_path / "own")["tasks"], read(tmp_path / "served")["tasks"]
    assert own.keys() == theirs.keys()
    for name, task in own.items():
        assert [task[figure] for figure in FIGURES[1:]] == [theirs[name][figure] for figure in FIGURES[1:]]
        for metric, score in task["scores"].items():
            assert theirs[name]["scores"][metric]["value"] == pytest.approx(score["value"], rel=1e-6), name
    for one, other in zip(read_samples(tmp_path / "own"), read_samples(tmp_path / "served"), strict=True):
        for mine, its in zip(one["answers"], other["answers"], strict=True):
            first, second = (value[0] if isinstance(value, list) else value for value in (mine, its))
            assert first == pytest.approx(second, abs=1e-4)


def test_code_of_a_tokenizer_runs_if_it_is_trusted(served, model, tasks, tmp_path, capsys) -> None:
    place = shutil.copytree(model, tmp_path / "tokenizer")
    (place / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): ..."
    )
    settings = json.loads((place / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    flags = [*served.flags[:2], "--tokenizer_name_or_path", place, "--limit", 1]
    assert run_eval("name", tasks, tmp_path / "out", *flags, names="local_written") == 2
    assert "has its own code" in capsys.readouterr().err
    assert run_eval("name", tasks, tmp_path / "out", *flags, "--trust_remote_code", names="local_written") == 0


def test_repeats_of_a_prompt_have_seeds_of_their_own(served, tasks, tmp_path) -> None:
    """With one seed, a server would sample the same answer each time, and a majority vote would be that of one."""
    task = json.loads((tasks / "written.yaml").read_text()) | {"task": "repeated", "repeats": 3}
    task["generation_kwargs"] |= {"do_sample": True, "temperature": 1.0}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "repeated.yaml").write_text(json.dumps(task))
    flags = [*served.flags, "--seed", 5, "--limit", 2]
    assert run_eval("name", tmp_path / "tasks", tmp_path / "out", *flags, names="repeated") == 0
    seeds: dict[str, list[int]] = {}
    for body in served.server.asked:
        seeds.setdefault(str(body["prompt"]), []).append(body["seed"])
    assert [sorted(found) for found in seeds.values()] == [[5, 6, 7]] * 2


def test_endpoint_counts_truncated_questions(served: ServedModel, model: Path, tasks: Path, tmp_path: Path) -> None:
    change_config(model, max_position_embeddings=16)
    assert run_eval("name", tasks, tmp_path / "served", *served.flags) == 0
    for task in read(tmp_path / "served")["tasks"].values():
        assert task["num_cut"] > 0
    flags = [*served.flags, "--gen_kwargs", '{"max_gen_toks": 16}']
    assert run_eval("name", tasks, tmp_path / "other", *flags, names="local_written") == 2


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("error", "404 no such model.*check that it serves this model"),
        ("context", "400 too .*long.*check that"),
        ("key", r"401 wrong key: \*\*\*.*put a valid key into"),
        ("busy", "503 .*run the same command to resume"),
        ("garbage", "gave no usable answer: the response is not JSON: '<html>'"),
        ("empty", "gave no usable answer: .*no credit"),
        ("none", r"gave no usable answer: .*{\"choices\": \[\]}"),
        ("nan", "its logits are not finite"),
        ("no echo", r"log-probabilities of \[1\] tokens instead of \[\d+\].*of the prompt \(echo\)"),
        ("gone", "gave no usable answer.*run the same command to resume"),
        ("lost", "gave no usable answer: ServerDisconnectedError.*run the same command to resume"),
        ("cut", "gave no usable answer: ClientPayloadError.*run the same command to resume"),
    ],
)
def test_endpoint_failure_is_one_error(served, tasks, tmp_path, broken, message, capsys, monkeypatch) -> None:
    served.broken = broken
    monkeypatch.setenv("OPENAI_API_KEY", "k-123")
    if broken == "gone":
        served.server.shutdown()
        served.server.server_close()
    # One at a time, lm-eval asks by requests, and several by aiohttp, whose exceptions differ.
    flags = [*served.flags, "--limit", 2, "--num_concurrent", 1 if broken in ("error", "gone") else 8]
    for _ in range(2 if broken == "nan" else 1):  # A wrong answer must not be cached.
        assert run_eval("name", tasks, tmp_path / "served", *flags, names="local_choice") == 2
        error = capsys.readouterr().err
        assert re.search(message, error.replace("\n", " "))
        assert "Traceback" not in error
        assert "\x1blong" not in error
        assert error.count("error: ") <= 1
    served.broken = ""
    if broken != "gone":
        assert run_eval("name", tasks, tmp_path / "served", *flags, names="local_choice") == 0


def test_chat_endpoint_receives_messages(served, tasks, tmp_path, capsys) -> None:
    flags = served.chat_flags
    assert run_eval("name", tasks, tmp_path, *flags, names="local_written") == 2
    assert "write apply_chat_template: true" in capsys.readouterr().err
    assert run_eval("name", tasks, tmp_path, *flags, "--apply_chat_template") == 2
    assert "local_choice need log-probabilities" in capsys.readouterr().err
    assert run_eval("name", tasks, tmp_path, *flags, "--apply_chat_template", names="local_written") == 0
    assert read(tmp_path)["tasks"]["local_written"]["scores"]["exact_match"]["value"] == 1
    assert "Say sun, please" in next(read_samples(tmp_path))["prompt"]
    served.broken = "empty"  # A reply without choices must not count as an empty answer.
    assert run_eval("name", tasks, tmp_path, *flags, "--apply_chat_template", names="local_written") == 2
    assert 'the reply holds no answer: {"error": "no credit"}' in capsys.readouterr().err


@pytest.mark.parametrize("keys", [{"base_url": "http://localhost:1/v1/chat/completions"}, {"engine": "vllm"}])
def test_several_processes_do_not_repeat_every_question(keys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes were started, and each would ask every question"):
        engines.build_engine(EvalConfig(model_name_or_path="name", **keys), {})


@pytest.mark.parametrize("concurrent", [1, 8])
def test_harness_respects_retry_after_and_warns_once(served, tasks, tmp_path, monkeypatch, capsys, concurrent) -> None:
    waits: list[tuple[str | None, float]] = []
    monkeypatch.setattr(engines, "read_wait", lambda *asked: waits.append(asked) or 0)
    monkeypatch.setattr(engines, "_NEXT_WARNING", deque([0.0], maxlen=1))
    served.num_busy = 3
    flags = [*served.flags, "--num_concurrent", concurrent]
    assert run_eval("name", tasks, tmp_path, *flags, names="local_written") == 0
    assert waits == [("17", 0.0)] * 3
    warning = "warning: a request to the endpoint failed, and is repeated (6 attempts of at most 300 s): 429"
    assert capsys.readouterr().err.count(warning) == 1


def test_interrupted_evaluation_resumes_to_same_answers(served: ServedModel, tasks: Path, tmp_path: Path) -> None:
    """Each signal arrives during the fifth request of its process."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        pytest.skip("started in the background, where a shell has ctrl-C ignored")
    flags: list[object] = [*served.flags, "--num_concurrent", 1]
    assert run_eval("name", tasks, tmp_path / "whole", *flags, names="local_written") == 0
    num_requests, served.num_asked = served.num_asked, 0
    keys = ["--tasks", "local_written", "--include_path", tasks, "--use_cpu", "--output_dir", tmp_path / "out"]
    for number, codes, at in ((signal.SIGKILL, (-signal.SIGKILL,), 4), (signal.SIGINT, (130, -signal.SIGINT), 7)):
        launch = Launch("recipes_lib.cli", "eval", "name", *keys, *flags)
        served.interrupt = lambda launch=launch, number=number, at=at: (
            launch.send_signal(number) if served.num_asked == at else None
        )
        result = launch.finish()
        assert result.returncode in codes, result.stderr
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.stderr
    served.interrupt = lambda: None
    assert run_eval("name", tasks, tmp_path / "out", *flags, names="local_written") == 0
    assert (tmp_path / "out" / SAMPLES).read_bytes() == (tmp_path / "whole" / SAMPLES).read_bytes()
    # A process repeats no more than the request during which the one before it ended.
    assert served.num_asked <= num_requests + 2


def test_missing_package_error_names_install_command(model, tasks, tmp_path, monkeypatch, capsys) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "tenacity" else found(name, *a))
    flags = ["--base_url", "http://127.0.0.1:9/v1/completions", "--tokenizer_name_or_path", model]
    assert run_eval("name", tasks, tmp_path, *flags) == 2
    assert "tenacity not installed" in (error := capsys.readouterr().err)
    assert "pip install 'recipes-lib[eval]'" in error


def test_resume_reuses_answers_of_every_rank(model, tasks, tmp_path, monkeypatch) -> None:
    """Two interrupted ranks are resumed by one process, which repeats no answered request."""
    calls: list[int] = []
    asked = CheckedModel._loglikelihood_tokens

    def answer_then_interrupt(self: CheckedModel, requests: Any, **keys: Any) -> Any:
        calls.append(len(requests))
        found = asked(self, requests, **keys)
        if len(calls) < 3:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(CheckedModel, "_loglikelihood_tokens", answer_then_interrupt)
    keys: dict[str, Any] = {"tasks": ["local_choice"], "include_path": [str(tasks)], "limit": 4, "num_fewshot": 0}
    config = EvalConfig(model_name_or_path=str(model), **keys)
    (model / "eval" / ".requests").mkdir(parents=True)
    monkeypatch.setattr(CheckedModel, "barrier", lambda _: None)
    for rank in range(2):
        init = CheckedModel.__init__

        def init_as_rank(self: CheckedModel, init: Any = init, rank: int = rank, **options: Any) -> None:
            init(self, **options)
            self._rank, self._world_size = rank, 2

        with monkeypatch.context() as patched:
            patched.setattr(CheckedModel, "__init__", init_as_rank)
            # As on a GPU, where lm-eval searches the batch size.
            patched.setattr(engines, "_CPU_BATCH", "auto")
            patched.setattr(engines, "read_world_size", lambda: 2)
            patched.setattr(engines, "PartialState", lambda **_: None)
            with pytest.raises(ConfigError, match="1 questions are divided among 2 processes"):
                evaluate_model(replace(config, limit=1))
            with pytest.raises(KeyboardInterrupt):
                evaluate_model(config)
    key = next((model / "eval" / ".requests").iterdir()).name.rpartition("-")[0]
    (model / "eval" / ".requests" / f"{key}-2.jsonl").touch()  # A rank that was killed before its first answer.
    record = evaluate_model(config)
    assert record is not None
    assert record["tasks"]["local_choice"]["num_questions"] == 4
    assert calls == [8, 8]


@pytest.mark.parametrize("num_kept", [0, 9])
def test_answers_before_a_damage_and_after_it_are_read(num_kept: int, tmp_path: Path) -> None:
    """As after a power failure, or a kill within a line."""
    file = tmp_path / "key-0.jsonl"
    model = SimpleNamespace(barrier=lambda: None, set_cache_hook=lambda _: None)
    whole = CachedModel(model, file)
    for number in range(40):
        whole.dbdict[str(number)] = "answer" * 10
    whole.close()
    content = file.read_bytes()
    rest = len(content) * num_kept // 40
    file.write_bytes(content[:rest] + b"\xff" * (len(content) - rest))
    cached = CachedModel(model, file, [file])
    assert len(cached.dbdict) == num_kept
    cached.dbdict["new"] = [-1.5, True]
    cached.close()
    again = CachedModel(model, tmp_path / "key-1.jsonl", sorted(tmp_path.glob("key-*")))
    assert again.dbdict["new"] == [-1.5, True]
    assert len(again.dbdict) == num_kept + 1
    again.close()


def test_batch_size_is_searched_with_rows_of_the_longest_request(model, tasks, tmp_path, monkeypatch) -> None:
    """Not with rows of all positions, of which a GPU may hold one or none."""
    change_config(model, max_position_embeddings=1024)
    monkeypatch.setattr(engines, "_CPU_BATCH", "auto")
    widths, compute = [], CheckedModel._model_call

    def record(self: CheckedModel, inputs: torch.Tensor, **keys: Any) -> Any:
        widths.append(inputs.shape[1])
        return compute(self, inputs, **keys)

    monkeypatch.setattr(CheckedModel, "_model_call", record)
    for task in ("local_written", "local_rolling"):
        assert run_eval(model, tasks, tmp_path / task, "--num_fewshot", 0, "--limit", 2, names=task) == 0
        assert 8 < max(widths) < 64, task


def test_fingerprint_of_hub_tokenizer_is_its_commit(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--tokenizer"
    (repository / "refs").mkdir(parents=True)
    config = EvalConfig(model_name_or_path=str(model), model_revision="v1", tokenizer_name_or_path="owner/tokenizer")
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(model, repository / "snapshots" / commit)
        (repository / "refs" / "main").write_text(commit)
        assert describe_model(config)["tokenizer_fingerprint"] == commit
        # A folder: lm-eval would load the tokenizer at the revision of the model.
        assert engines._list_options(config, {})["tokenizer"] == str(repository / "snapshots" / commit)


@pytest.mark.parametrize("way", ["adapter", "base", "tokenizer"])
def test_fingerprint_includes_adapter_base_and_tokenizer(model: Path, tmp_path: Path, way: str) -> None:
    folder = save_adapter(model, tmp_path / "adapter")
    shutil.copy(model / "config.json", folder)  # As axolotl does.
    config = EvalConfig(model_name_or_path=str(folder), tokenizer_name_or_path=str(model))
    before = describe_model(config)
    (model / "README.md").write_text("a card decides nothing")
    assert describe_model(config) == before
    if way == "adapter":
        path = folder / "adapter_model.safetensors"
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
    elif way == "base":
        base = AutoModelForCausalLM.from_pretrained(model)
        base.model.norm.weight.data[0] += 1
        base.save_pretrained(model)
    else:
        path = model / "tokenizer.json"
        path.write_text(path.read_text() + " ")
    assert describe_model(config) != before


@pytest.mark.multiprocess
def test_two_processes_divide_the_questions(model: Path, tasks: Path, tmp_path: Path) -> None:
    change_config(model, max_position_embeddings=16)
    names = "local_choice,local_written,local_rolling"
    assert run_eval(model, tasks, tmp_path / "one", "--num_fewshot", 0, "--limit", 7, names=names) == 0
    keys = ["--tasks", names, "--include_path", tasks, "--use_cpu", "--num_fewshot", 0, "--limit", 7]
    result = run_script(
        ROOT / "recipes" / "eval.py",
        *["--model_name_or_path", model, *keys, "--output_dir", tmp_path / "two"],
        num_processes=2,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("every question and answer") == 1
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert any(task["num_cut"] for task in one["tasks"].values())
    for name, task in one["tasks"].items():
        for figure in FIGURES[1:]:
            assert task[figure] == two["tasks"][name][figure], (name, figure)
        for metric, score in task["scores"].items():
            assert two["tasks"][name]["scores"][metric]["value"] == pytest.approx(score["value"], rel=1e-5)
    assert not (tmp_path / "two" / ".requests").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:999]), "cannot be loaded: SafetensorError"),
        (lambda path: path.write_bytes(b""), "header too small"),
        (lambda path: path.unlink(), "no whole safetensors weights"),
        (lambda path: drop_weight(path), "lacks 1 weights, such as model.norm.weight"),
        (lambda path: pickle_weights(path), "no whole safetensors weights, and pickled ones could run code"),
    ],
    ids=["torn", "empty", "absent", "a weight is absent", "pickled"],
)
def test_incomplete_model_is_refused(model, tasks, tmp_path, damage, message) -> None:
    damage(model / "model.safetensors")
    refuse(model, tasks, tmp_path, message)


def refuse(place: Path, tasks: Path, output: Path, message: str) -> None:
    keys: dict[str, Any] = {"include_path": [str(tasks)], "use_cpu": True, "output_dir": str(output / "out")}
    with pytest.raises(ConfigError, match=message) as caught:
        evaluate_model(EvalConfig(model_name_or_path=str(place), tasks=["local_choice"], **keys))
    assert caught.value.problems[0].where == "model_name_or_path"


def save_adapter(model: Path, folder: Path, **settings: Any) -> Path:
    network = AutoModelForCausalLM.from_pretrained(model)
    peft = get_peft_model(network, LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM"))
    peft.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(model), **settings})
    )
    return folder


@pytest.mark.parametrize(
    ("settings", "weights", "message"),
    [
        ({}, b"", "header too small"),
        ({}, None, "has no adapter_model.safetensors"),
        ({}, {}, "and its adapter_config.json disagree about"),
        ({"target_modules": ["q_proj", "v_proj"]}, "kept", "and its adapter_config.json disagree about"),
        ({"r": 4}, "kept", "does not fit the model: size mismatch for .*lora_B"),
        ({"base_model_name_or_path": "/not here"}, "kept", "/not here"),
        ({"base_model_name_or_path": None}, "kept", "is an adapter that names no base model"),
        ({"init_lora_weights": "pissa"}, "kept", "belongs to base weights changed by pissa"),
    ],
    ids=["torn", "absent", "empty", "a layer is absent", "rank", "base", "no base", "pissa"],
)
def test_incomplete_adapter_is_refused(model, tasks, tmp_path, settings, weights, message) -> None:
    folder = save_adapter(model, tmp_path / "adapter", **settings)
    path = folder / "adapter_model.safetensors"
    if weights is None:
        path.unlink()
    elif isinstance(weights, bytes):
        path.write_bytes(weights)
    elif not weights:
        save_file({}, path)
    refuse(folder, tasks, tmp_path, message)


def test_adapter_with_trained_tied_embeddings_keeps_its_padded_vocabulary(model: Path, tmp_path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(model, tie_word_embeddings=True)
    network.resize_token_embeddings(network.config.vocab_size + 64)
    network.save_pretrained(model)
    network.name_or_path = str(model)
    copied = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    adapted = get_peft_model(network, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **copied)).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 10)
    adapted.save_pretrained(tmp_path / "adapter")
    config = EvalConfig(model_name_or_path=str(tmp_path / "adapter"), use_cpu=True)
    engine = engines.build_engine(config, describe_model(config))
    ids = torch.arange(1, 20)[None]
    torch.testing.assert_close(engine.model(ids).logits, adapted(ids).logits)


def test_other_models_are_not_changed_while_one_is_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, tie_weights, network = HFLM.__init__, PreTrainedModel.tie_weights, AutoModelForCausalLM.from_pretrained(model)

    def check_and_load(self: HFLM, **options: Any) -> None:
        assert PreTrainedModel.tie_weights is tie_weights
        load(self, **options)

    monkeypatch.setattr(HFLM, "__init__", check_and_load)
    for pretrained in (network, str(model)):
        CheckedModel(pretrained=pretrained, tokenizer=str(model), batch_size=1, device="cpu")
    assert "tie_weights" not in vars(network)


@pytest.mark.parametrize(
    ("settings", "expected"), [({"r": 4}, 16), ({"r": 64}, 64), ({"rank_pattern": {"q_proj": 33}}, 64)]
)
def test_vllm_has_room_for_the_rank_of_an_adapter(model, tmp_path, monkeypatch, settings, expected) -> None:
    folder = save_adapter(model, tmp_path / "adapter", **settings)
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(engines, "get_model", lambda _: lambda **options: SimpleNamespace(options=options))
    config = EvalConfig(model_name_or_path=str(folder), engine="vllm", seed=7)
    options = engines.build_engine(config, describe_model(config)).options
    assert (options["pretrained"], options["lora_local_path"]) == (str(model), str(folder))
    assert options["max_lora_rank"] == expected
    assert options["seed"] == 7


def test_adapter_answers_end_at_its_own_stop_tokens(model, tmp_path, monkeypatch) -> None:
    config = EvalConfig(model_name_or_path=str(save_adapter(model, tmp_path / "adapter")), use_cpu=True)

    def generate() -> list[int]:
        network = engines.build_engine(config, describe_model(config)).model
        return list(network.generate(torch.tensor([[5, 6]]), max_new_tokens=8, do_sample=False)[0, 2:].tolist())

    free = generate()
    stop = next(token for token in free if token != free[0])
    GenerationConfig(eos_token_id=stop).save_pretrained(tmp_path / "adapter")
    assert generate() == free[: free.index(stop) + 1]
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(engines, "get_model", lambda _: lambda **options: SimpleNamespace(options=options))
    options = engines.build_engine(replace(config, engine="vllm"), describe_model(config)).options
    assert options["generation_config"] == str(tmp_path / "adapter")


def test_hub_adapter_is_loaded_at_its_revision(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_adapter(model, tmp_path / "snapshot", revision="b" * 40)
    monkeypatch.setattr(engines, "find_adapter", lambda name, revision: folder if revision == "mine" else None)
    monkeypatch.setattr(engines, "CheckedModel", lambda **options: SimpleNamespace(world_size=1, options=options))
    config = EvalConfig(model_name_or_path="me/adapter", model_revision="mine", use_cpu=True)
    engine = engines.build_engine(config, {"base": str(model), "base_revision": "b" * 40})
    assert engine.options["pretrained"] == str(model)
    assert engine.options["revision"] == "b" * 40
    assert engine.options["peft"] == str(folder)
    assert engine.options["tokenizer"] == str(model), "PEFT has saved none"
    (folder / "tokenizer_config.json").write_text("{}")
    engine = engines.build_engine(config, {"base": str(model)})
    assert engine.options["tokenizer"] == str(folder)


def drop_weight(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def pickle_weights(path: Path) -> None:
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()

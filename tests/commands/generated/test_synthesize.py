"""`recipes synthesize` with an endpoint and a local model: methods, resumption, cost limits and training data."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.evaluation.chat_endpoint import ChatEndpoint
from tests.forked import Launch
from tests.rl.reward_models import write_reward_model
from tests.rows import read_rows, write_rows
from transformers import GenerationConfig

from recipes_lib.commands.generated.synthesize import Limits, ReplyCounts, SpentError
from recipes_lib.config.loader import load_config
from recipes_lib.config.synthesis_keys import SynthesisConfig
from recipes_lib.data.packed.training_data import load_training_data
from recipes_lib.models.generation import GenerateBackend
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.rl.engines import vllm


def write(body: dict[str, Any]) -> str:
    """Stand-in for a model that writes instructions, rewrites prompts, answers, and grades answers by length."""
    text, seed = body["messages"][-1]["content"], body["seed"]
    if "[End of the answer]" in text:
        answer = text.partition("[Answer]\n")[2].partition("\n[End")[0]
        return f"Words.\n[[{min(10, 1 + len(answer.split()))}]]"
    if "<instruction>" in text:
        topic = re.findall(r"\d+", str(seed))[0]
        return f"<instruction>Tell topic{topic} about river{seed % 97} and stone{seed % 89}.</instruction>"
    if "Rewrite the given prompt" in text:
        return f"<prompt>{text.rpartition('Given prompt:')[2].strip()} Give reason{seed} too.</prompt>"
    return " ".join(["It", "is", "so"] * (1 + seed % 3)) + "."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "a folder"
    place.mkdir()
    write_rows(place / "seeds.jsonl", [{"prompt": f"Explain thing{n} to child{n} é"} for n in range(8)])
    write_rows(place / "texts.jsonl", [{"text": f"A document about subject{n}."} for n in range(3)])
    return place


@pytest.fixture(scope="module")
def writer(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with an eighth of its tokens as stop tokens, so that answers end after a few tokens."""
    folder = shutil.copytree(tiny_model_dir, tmp_path_factory.mktemp("writer") / "model")
    GenerationConfig(eos_token_id=list(range(64)), pad_token_id=1).save_pretrained(folder)
    return folder


def list_words(folder: Path, server: ChatEndpoint | None = None, out: str = "out", **keys: Any) -> list[str]:
    flags = {"dataset_name": folder / "seeds.jsonl", "output_dir": folder / out, "max_new_tokens": 32}
    if server is not None:
        flags |= {"model_name_or_path": "m", "base_url": server.url}
    return ["synthesize", *(f"--{name}={value}" for name, value in (flags | keys).items())]


@pytest.fixture
def synthesize(recipes, folder: Path):
    """Run the command, and return its output."""
    return lambda *arguments, code=0, **keys: recipes(*list_words(folder, *arguments, **keys), code=code)


def read(folder: Path, name: str, out: str = "out") -> Any:
    path = folder / out / name
    return json.loads(path.read_text()) if name.endswith(".json") else read_rows(path)


@pytest.mark.parametrize(
    ("method", "source", "first"),
    [
        ("instructions", "seeds", "Tell topic"),
        ("evolution", "seeds", "Explain thing"),
        ("explanation", "seeds", "You are"),
        ("answers", "seeds", "Explain thing"),
        ("textbook", "texts", "It is so"),
    ],
)
def test_each_method_writes_rows_with_provenance(synthesize, folder: Path, method, source, first) -> None:
    server = ChatEndpoint(write)
    keys = {"method": method, "dataset_name": folder / f"{source}.jsonl", "near_duplicates_threshold": 0.95}
    assert "rows and 0 pairs of 6 candidates" in synthesize(server, num_candidates=6, **keys)
    rows, record = read(folder, "rows.jsonl"), read(folder, "synthesis.json")
    assert len(rows) == record["num_rows"] == 6 - sum(record["removed"].values())
    assert rows
    for row in rows:
        assert row.get("text", row.get("messages", [{}])[0].get("content")).startswith(first)
        assert row["synthesis"]["method"] == method
        assert all(f"{source}.jsonl:" in place for place in row["synthesis"]["source"])
    assert record["num_tokens"] == sum(len(write(body).split()) for body in server.asked)
    page = (folder / "out" / "report.html").read_text()
    assert first in page
    num_asked = len(server.asked)
    synthesize(server, num_candidates=6, **keys)
    assert len(server.asked) == num_asked, "the same command sends no requests"


def test_killed_command_resumes_to_same_bytes(synthesize, recipes, folder: Path) -> None:
    """SIGKILL arrives in the second batch of replies, and again during grading."""
    keys = {"method": "instructions", "num_candidates": 12, "batch_size": 4, "num_answers": 2, "num_concurrent": 1}
    whole = ChatEndpoint(write)
    synthesize(whole, "whole", judge=f"{whole.url}#j", **keys)
    victims: list[Launch] = []

    def kill(body: dict[str, Any]) -> str:
        if len(server.asked) in (17, 61) and victims:
            victims.pop().send_signal(signal.SIGKILL)
        return write(body)

    server = ChatEndpoint(kill)
    words = list_words(folder, server, judge=f"{server.url}#j", **keys)
    for kind in ("replies", "grades"):
        victims.append(victim := Launch("recipes_lib.cli", *words))
        assert victim.finish().returncode == -signal.SIGKILL
        assert (folder / "out" / f"{kind}.jsonl").exists()
        assert not (folder / "out" / "rows.jsonl").exists()
    recipes(*words)
    for name in ("rows.jsonl", "pairs.jsonl"):
        assert (folder / "out" / name).read_bytes() == (folder / "whole" / name).read_bytes()
    lines = [(folder / place / "grades.jsonl").read_text().splitlines() for place in ("out", "whole")]
    assert lines[0] == lines[1]
    # Requests of the two killed batches are repeated.
    assert len(server.asked) > len(whole.asked)


def test_changed_filters_reuse_replies_and_grades(synthesize, folder: Path) -> None:
    server = ChatEndpoint(write)
    keys = {"method": "answers", "num_answers": 2, "judge": f"{server.url}#j"}
    synthesize(server, min_words=6, **keys)
    num_asked, num_rows = len(server.asked), len(read(folder, "rows.jsonl"))
    synthesize(server, min_words=6, min_score=10, **keys)
    assert len(server.asked) == num_asked
    assert 0 < len(read(folder, "rows.jsonl")) < num_rows
    grades = len(read(folder, "grades.jsonl"))
    synthesize(server, **keys)
    assert len(server.asked) - num_asked == len(read(folder, "grades.jsonl")) - grades > 0
    # Replies with other sampling parameters are rejected.
    synthesize(server, temperature=0.1, **keys, code=2)
    synthesize(server, num_answers=2, judge=f"{server.url}#another", code=2)


def test_rows_and_pairs_are_valid_training_data(synthesize, recipes, folder: Path, tiny_model_dir: Path) -> None:
    server = ChatEndpoint(write)
    synthesize(server, num_answers=4, judge=f"{server.url}#j")
    rows, pairs = read(folder, "rows.jsonl"), read(folder, "pairs.jsonl")
    assert len(rows) == 8
    assert pairs
    assert all(len(pair["chosen"][0]["content"]) > len(pair["rejected"][0]["content"]) for pair in pairs)
    flags = [
        f"--model_name_or_path={tiny_model_dir}", f"--output_dir={folder / 'run'}", "--bf16=false", "--use_cpu=true",
        f"--prepared_dir={folder / 'prepared'}", "--max_length=256",
    ]  # fmt: skip
    config = load_config("sft", [*flags, f"--dataset_name={folder / 'out' / 'rows.jsonl'}", "--packing=false"])
    data = load_training_data(config, load_tokenizer(config.model, config.tokens))
    assert len(data.train) == 8
    recipes("check", "--recipe", "dpo", *flags, f"--dataset_name={folder / 'out' / 'pairs.jsonl'}")


def test_cost_limit_is_not_exceeded_and_higher_limit_resumes(synthesize, folder: Path) -> None:
    server = ChatEndpoint(write)
    keys = {"method": "instructions", "num_candidates": 20, "batch_size": 2, "input_price": 10, "output_price": 20}
    assert "stopped at a limit" in synthesize(server, max_cost=0.012, **keys)
    first = read(folder, "synthesis.json")
    assert 0 < first["num_candidates"] < 20
    assert first["cost"] == (first["num_prompt_tokens"] * 10 + first["num_tokens"] * 20) / 1e6 <= 0.012
    synthesize(server, max_cost=0.012, **keys)
    again = read(folder, "synthesis.json")
    assert again["num_candidates"] == first["num_candidates"]
    assert again["cost"] <= 0.012
    synthesize(server, **keys)
    synthesize(ChatEndpoint(write), "whole", **keys)
    assert [row["messages"] for row in read(folder, "rows.jsonl")] == [
        row["messages"] for row in read(folder, "rows.jsonl", "whole")
    ]
    server.has_usage = False
    error = synthesize(server, "other", max_total_tokens=10**6, **keys, code=2)
    assert "does not report token counts" in error


@pytest.mark.parametrize("num_answered", [3, 6])
def test_replies_before_a_failure_count_towards_the_limit(synthesize, folder: Path, num_answered: int) -> None:
    """The endpoint fails in the first or in the second step of the only batch."""
    answered: list[str] = []

    def write_some(body: dict[str, Any]) -> Any:
        if len(answered) == num_answered:
            return 403, {}, "no credit"
        answered.append(write(body))
        return answered[-1]

    server = ChatEndpoint(write_some)
    keys = {"method": "instructions", "num_candidates": 4, "batch_size": 4, "num_concurrent": 1}
    synthesize(server, **keys, code=2)
    record = read(folder, "replies.jsonl.record.json")
    assert (record["num_candidates"], record["num_tokens"]) == (0, sum(len(text.split()) for text in answered))
    num_asked = len(server.asked)
    synthesize(server, max_total_tokens=record["num_tokens"] + record["num_prompt_tokens"], **keys, code=2)
    assert len(server.asked) == num_asked, "the limit is reached"


def test_limits_bound_cost_of_requests() -> None:
    config = SynthesisConfig(max_total_tokens=100, max_new_tokens=20)
    limits = Limits(config, ReplyCounts(num_prompt_tokens=10, num_tokens=10))
    chat = [{"role": "user", "content": "x" * 44}]
    limits.verify_room([chat])
    with pytest.raises(SpentError):
        limits.verify_room([[{"role": "user", "content": "x" * 45}]])
    with pytest.raises(SpentError):
        limits.verify_room([[{"role": "user", "content": "é" * 23}]])
    dear = dataclasses.replace(config, max_total_tokens=None, max_cost=0.1, output_price=5000.0)
    Limits(dear, ReplyCounts()).verify_room([chat])
    with pytest.raises(SpentError):
        Limits(dear, ReplyCounts(num_tokens=1)).verify_room([chat])


def test_local_model_and_reward_model_judge(synthesize, folder, tiny_model_dir, writer, monkeypatch) -> None:
    judge = write_reward_model(folder / "reward", tiny_model_dir)
    keys = {
        "model_name_or_path": writer, "use_cpu": True, "num_answers": 6, "judge": judge, "batch_size": 3,
        "temperature": 1.5, "max_rows": 3, "max_new_tokens": 16,
    }  # fmt: skip
    synthesize(**keys)
    rows, pairs = read(folder, "rows.jsonl"), read(folder, "pairs.jsonl")
    assert 0 < len(rows) <= 3
    assert 0 < len(pairs) <= 3
    assert all(pair["chosen"] != pair["rejected"] for pair in pairs)
    generate, left = GenerateBackend.generate, iter(range(7))

    def die(*arguments: Any) -> Any:
        if next(left, None) is None:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return generate(*arguments)

    monkeypatch.setattr(GenerateBackend, "generate", die)
    synthesize(out="killed", **keys, code=130)
    assert 0 < len(read(folder, "replies.jsonl", "killed")) < 8
    synthesize(out="killed", **keys)
    for name in ("replies.jsonl", "rows.jsonl"):
        assert (folder / "killed" / name).read_bytes() == (folder / "out" / name).read_bytes()


def test_vllm_engine_loads_checkpoint(synthesize, folder: Path, tiny_model_dir: Path, monkeypatch) -> None:
    """A stand-in for the RL engine, which receives no policy here and generates as ``GenerateBackend`` does."""
    started: list[Any] = []

    class Engine(GenerateBackend):
        name = "vLLM"

        def generate(self, policy: Any, prompts: Any, uniforms: Any) -> Any:
            assert policy is None
            return super().generate(started[0].model, prompts, uniforms)

    def start(config: Any, args: Any, sampling: Any, max_length: int) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(config.model.model_name_or_path)
        started.append(SimpleNamespace(config=config, model=model, length=max_length))
        return Engine(sampling, batch_size=4, precision=lambda: __import__("contextlib").nullcontext())

    monkeypatch.setattr(vllm, "start", start)
    keys = {"model_name_or_path": tiny_model_dir, "use_cpu": True, "num_answers": 4, "temperature": 1.5}
    synthesize(engine="vllm", **keys)
    assert started[0].config.engine.vllm_gpu_memory_utilization == 0.9
    assert started[0].length == 512
    synthesize(out="plain", **keys)
    texts = [[row["messages"] for row in read(folder, "rows.jsonl", out)] for out in ("out", "plain")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "nothing"}, "there is no method 'nothing'"),
        ({"method": "textbook"}, "has no `text`"),
        ({"min_words": 500}, r"no row is left; removed: too short 8; the first: \x1b[31mIt is so"),
        ({"max_total_tokens": 50}, "max_cost or max_total_tokens has no room for the first batch, of 16 rows"),
        ({"dataset_columns": "{prompt: question}"}, "there is no column `question`"),
        ({"judge": "http://127.0.0.1:9/v1"}, "NAME"),
        ({"judge": "owner/no-such-reward-model"}, "owner/no-such-reward-model"),
        ({"judge": "http://127.0.0.1:9/v1#j", "judge_prompt": "README.md"}, "README.md"),
    ],
)
def test_invalid_input_is_rejected(synthesize, keys: dict[str, Any], message: str) -> None:
    server = ChatEndpoint(lambda body: f"\x1b[31m{write(body)}")
    assert message in synthesize(server, **keys, code=2)
    assert bool(server.asked) == ("min_words" in keys), "other errors are found before any request"


@pytest.mark.parametrize("name", ["rows.jsonl", "pairs.jsonl"])
def test_rows_of_another_origin_are_kept(synthesize, folder: Path, name: str) -> None:
    (folder / "out").mkdir()
    write_rows(folder / "out" / name, [{"prompt": "a"}])
    server = ChatEndpoint(write)
    assert f"{name}: exists, and was not written by this command" in synthesize(server, code=2)
    assert read(folder, name) == [{"prompt": "a"}]
    assert not server.asked


def test_check_shows_first_prompt_without_requests(folder: Path, recipes) -> None:
    flags = ["--model_name_or_path=m/m", f"--dataset_name={folder / 'seeds.jsonl'}", f"--output_dir={folder / 'out'}"]
    printed = recipes("check", "--recipe", "synthesize", "--method=evolution", *flags)
    assert "8 prompts" in printed
    assert "Explain thing0 to child0 é" in printed
    assert not (folder / "out").exists()
    refused = recipes("check", "--recipe", "synthesize", "--method=evolution", *flags, "--base_url=host:80", code=2)
    assert "'host:80' is no address of an endpoint" in refused

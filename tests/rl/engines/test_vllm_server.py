"""vLLM server backend with a stub server: weight transfer, log-probabilities, errors, asynchronous sampling."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from tests.models.test_generation import PROMPTS, STOPS, build_sampling, draw, measure_gap
from tests.rl import keys_task
from tests.rl.test_rollout import CPU, build_policy
from tests.rl.vllm_fake import load_other
from tests.rl.vllm_stub import serving
from tests.rows import read_events
from trl.generation import vllm_client
from urllib3.util.retry import Retry

from recipes_lib.config.schema import EngineConfig
from recipes_lib.errors import ConfigError
from recipes_lib.rl.collect import Collector
from recipes_lib.rl.engines.vllm import connect
from recipes_lib.rl.update import Updater
from recipes_lib.stopping import STOP, StopPendingError

SHORT = {"tokens": ["token_id:9"], "token_logprobs": [0.0], "top_logprobs": [None]}


@pytest.fixture
def stub(monkeypatch):
    """Stub server with other weights than the policy's."""
    other = build_policy("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1)
    with serving(other, monkeypatch) as server:
        yield server


def connect_to(url, temperature=1.0, is_main=True, **options):
    engine = EngineConfig(use_vllm=True, vllm_mode="server", vllm_server_timeout=0.0, vllm_server_base_url=url)
    args = SimpleNamespace(device=CPU, process_index=0 if is_main else 1)
    return connect(SimpleNamespace(engine=engine), args, build_sampling(temperature, **options))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_samples_with_sent_weights_and_their_logps(stub, temperature):
    policy, beats = build_policy("llama"), []
    engine = connect_to(stub.url, temperature, beat=lambda: beats.append(1))
    engine.load(policy)
    prompts = [*PROMPTS, *PROMPTS[::-1]]
    answers = engine.generate(policy, prompts, draw(8))
    assert measure_gap(policy, prompts, answers, temperature) < 1e-5
    assert len(beats) == 8
    paths = [path for path, _ in stub.requests]
    assert paths[:4] == ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    body = next(body for path, body in stub.requests if path == "/v1/completions")
    assert (body["temperature"], body["max_tokens"], body["stop_token_ids"]) == (temperature, 9, STOPS)


def test_answers_keep_order_of_prompts_over_several_requests(stub, monkeypatch):
    monkeypatch.setattr("recipes_lib.rl.engines.vllm.REQUESTS", 3)
    policy, engine = build_policy("llama"), connect_to(stub.url)
    engine.load(policy)
    prompts = [[*prompt, 20 + at] for at, prompt in enumerate(PROMPTS * 2)]
    assert measure_gap(policy, prompts, engine.generate(policy, prompts, draw(8)), 1.0) < 1e-5
    assert [len(body["prompt"]) for path, body in stub.requests if path == "/v1/completions"].count(3) == 2


def test_only_main_process_sends_weights(stub):
    engine = connect_to(stub.url, is_main=False)
    engine.load(build_policy("llama"))
    assert not stub.requests
    assert not hasattr(stub, "is_open")


def test_weights_are_complete_before_they_are_read_on_other_streams(stub, monkeypatch):
    calls = []

    def iterate(policy):
        for name, weight in policy.named_parameters():
            calls.append("compute")
            yield name, weight.detach()

    def receive(iterator, trainer_args):
        calls.extend("read" for _ in iterator)

    policy, engine = build_policy("llama"), connect_to(stub.url)
    monkeypatch.setattr("recipes_lib.rl.engines.vllm.iterate_policy", iterate)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(vllm_client.NCCLWeightTransferEngine, "trainer_send_weights", receive)
    engine.load(policy)
    names = len(list(policy.parameters()))
    # The first pass collects names and shapes.
    assert calls[names:] == ["synchronize", *["compute", "synchronize", "read", "synchronize"] * names]


def test_server_failure_error_says_how_to_resume(stub, monkeypatch):
    # TRL's client retries failed requests for a minute.
    monkeypatch.setattr(Retry, "sleep", lambda *_: None)
    policy, engine = build_policy("llama"), connect_to(stub.url)
    engine.load(policy)
    stub.complete = None
    with pytest.raises(ConfigError, match="use_vllm: vLLM failed at sampling answers") as caught:
        engine.generate(policy, PROMPTS, draw(4))
    assert "run the same command to resume" in caught.value.problems[0].remedy


def test_unreachable_or_misconfigured_server_raises(stub, monkeypatch):
    stub.settings["model_config"]["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(ConfigError, match="before the temperature"):
        connect_to(stub.url)
    stub.settings["model_config"]["logprobs_mode"] = "processed_logprobs"
    monkeypatch.undo()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)
    with pytest.raises(ConfigError, match="can't be reached") as refused:
        connect_to("http://127.0.0.1:9")
    assert "vllm serve" in refused.value.problems[0].remedy


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/server_info"])
def test_server_without_required_endpoint_error_has_status(stub, path):
    stub.statuses[path] = 404
    with pytest.raises(ConfigError, match="vllm_server_base_url: http://127") as refused:
        connect_to(stub.url)
    assert "404" in str(refused.value) or "VLLM_SERVER_DEV_MODE" in str(refused.value)


def test_server_of_unsupported_version_raises(stub):
    del stub.settings["model_config"]["logprobs_mode"]
    with pytest.raises(ConfigError, match=r"another form than expected \(KeyError: 'logprobs_mode'\)"):
        connect_to(stub.url)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"token_ids": None}, "another form than expected"),
        ({"logprobs": None}, "another form than expected"),
        ({"token_ids": [9], "logprobs": SHORT}, "after 1 of 9 tokens"),
    ],
)
def test_malformed_or_truncated_answers_raise(stub, monkeypatch, broken, words):
    policy, engine = build_policy("llama"), connect_to(stub.url)
    engine.load(policy)
    answer = stub._answer
    monkeypatch.setattr(stub, "_answer", lambda prompt, body: answer(prompt, body) | broken)
    with pytest.raises(ConfigError, match="use_vllm: vLLM failed at sampling answers") as caught:
        engine.generate(policy, PROMPTS, draw(4))
    assert words in caught.value.problems[0].found


def test_stop_request_does_not_wait_for_answers(stub, monkeypatch):
    """The server answers the first request, and blocks the others until this process has left, which ends at once."""
    has_left, complete = threading.Event(), stub.complete
    count = iter(range(len(PROMPTS)))

    def answer(body):
        if next(count):
            monkeypatch.setattr(STOP, "reason", "SIGTERM")
            assert has_left.wait(60)
        return complete(body)

    engine, known = connect_to(stub.url), set(threading.enumerate())
    engine.load(build_policy("llama"))
    monkeypatch.setattr(stub, "complete", answer)
    monkeypatch.setattr(STOP, "is_deferred", True)
    with pytest.raises(StopPendingError):
        engine.generate(None, PROMPTS, draw(4))
    assert not has_left.is_set()
    assert all(thread.daemon for thread in set(threading.enumerate()) - known)
    has_left.set()


def test_next_answers_are_sampled_during_updates(policy_dir, prompts_file, tmp_path, monkeypatch):
    """Updates wait until the server has the next request; weights are sent only while the server is idle."""
    requested, num_pending, update = threading.Event(), [0], Updater.update_policy

    def learn(self, rollout, iteration, **given):
        # In the first iteration, `requested` is set by its own answers.
        assert iteration != 1 or requested.wait(60), "no request was sent during the update"
        return update(self, rollout, iteration, **given)

    def settle(self, waiting=Collector.settle):
        waiting(self)
        settled.append(num_pending[0])

    settled: list[int] = []
    monkeypatch.setattr(Updater, "update_policy", learn)
    monkeypatch.setattr(Collector, "settle", settle)
    with serving(load_other(str(policy_dir)), monkeypatch) as stub:
        complete, receive = stub.complete, stub.receive

        def answer(body):
            num_pending[0] += 1
            requested.set()
            answers = complete(body)
            num_pending[0] -= 1
            return answers

        def take(*given, **named):
            assert not num_pending[0], "weights were sent during sampling"
            requested.clear()
            receive(*given, **named)

        monkeypatch.setattr(stub, "complete", answer)
        monkeypatch.setattr("trl.generation.vllm_client.NCCLWeightTransferEngine.trainer_send_weights", take)
        keys = {"max_steps": 12, "per_device_train_batch_size": 8, "num_sample_prompts": 2, "eval_steps": 4}
        keys |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": stub.url, "max_staleness": 1}
        keys_task.train(keys_task.build_flags(policy_dir, tmp_path, prompts_file, logging_steps=1, **keys))
    events = read_events(tmp_path)
    assert settled == [0] * len(read_events(tmp_path, "eval"))
    assert [event["rollout/off_policy_share"] for event in events] == [0, 1, 1]
    gaps = [abs(event["rollout/is_weight_max"] - 1) for event in events]
    assert gaps[0] < 1e-4 < 1e-3 < min(gaps[1:])
    assert all(event["policy/num_updates"] == 4 for event in events)

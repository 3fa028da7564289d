"""Collector: sampled answers are independent of the batch, truncated at stop tokens, and scored as text."""

from __future__ import annotations

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tests.rl import keys_task
from tests.rl.reward_models import read_the_end
from transformers import LlamaConfig, LlamaForSequenceClassification

from recipes_lib.config.loader import load_config
from recipes_lib.data.prompts import load_prompt_data
from recipes_lib.errors import ConfigError, PreemptedError, Problem
from recipes_lib.models.heads.score_head import add_score_head
from recipes_lib.models.heads.scoring import RewardModel
from recipes_lib.rl.collect import Collector
from recipes_lib.rl.rewards import Rewards
from recipes_lib.rl.rollout import Sequences, compute_response_logps
from recipes_lib.stopping import STOP
from recipes_lib.training.guards.preemption import raise_if_stop_pending
from recipes_lib.training.guards.watchdog import END_AFTER_SECONDS, SHOW_AFTER_SECONDS, WATCHDOG
from recipes_lib.training.monitoring.progress import TrainingProgress

SEEN: list[str] = []


def score(*, prompts, completions, completion_ids, **_):
    SEEN[:] = completions
    return [float(len(ids)) for ids in completion_ids]


@pytest.fixture(scope="module", params=[False, True], ids=["own models", "adapters"])
def collector_and_prompts(request, policy_dir, prompts_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("collect")
    flags = keys_task.build_flags(policy_dir, folder, prompts_file, use_peft=request.param)
    config, args, tokenizer, models = keys_task.load(load_config("ppo", flags))
    prompts = load_prompt_data(config, tokenizer)
    rewards = Rewards({"score": score}, None, [1.0])
    collector = Collector(config, args, models, rewards, tokenizer, TrainingProgress(), prompts.max_length)
    return collector, prompts.train


def replace(collector, **parts):
    other = copy.copy(collector)
    vars(other).update(parts)
    return other


def test_answer_depends_on_its_number_but_not_on_its_batch(collector_and_prompts):
    collector, prompts = collector_and_prompts
    whole, _ = collector.collect(prompts[:12], range(12))
    generator, args = copy.copy(collector.generator), copy.copy(collector.args)
    generator.batch_size = args.per_device_eval_batch_size = 5
    in_parts, _ = replace(collector, args=args, generator=generator).collect(prompts[:12], range(12))
    assert torch.equal(whole.response_ids, in_parts.response_ids)
    odd, _ = collector.collect(prompts[1:12:2], range(1, 12, 2))
    expected = whole.take(range(1, 12, 2))
    assert torch.equal(odd.response_ids, expected.response_ids)
    for name in ("logps", "ref_logps", "values", "engine_logps"):
        torch.testing.assert_close(getattr(odd, name), getattr(expected, name), rtol=0, atol=1e-5)
    other, _ = collector.collect(prompts[:12], range(100, 112))
    assert not torch.equal(other.response_ids, whole.response_ids)


def test_scored_answers_have_no_columns(collector_and_prompts):
    """All processes gather the answers of all, and the tests of a program can have megabytes."""
    collector, prompts = collector_and_prompts
    seen = []
    rewards = Rewards({"score": lambda *, tests, **_: seen.extend(tests) or [0.0] * len(tests)}, None, [1.0])
    given = [dataclasses.replace(prompt, columns={"tests": prompt.where}) for prompt in prompts[:2]]
    rollout, _ = replace(collector, rewards=rewards).collect(given, range(2))
    assert seen == [prompt.where for prompt in given]
    assert [prompt.columns for prompt in rollout.prompts] == [{}, {}]
    assert [prompt.input_ids for prompt in rollout.prompts] == [prompt.input_ids for prompt in given]


def test_results_of_each_model_are_copied_to_host_once(collector_and_prompts, monkeypatch):
    """A copy per batch would leave a GPU idle while the next batch is laid out."""
    collector, prompts = collector_and_prompts
    args, copied, to_host = copy.copy(collector.args), [], torch.Tensor.cpu
    args.per_device_eval_batch_size = 5
    rollout, _ = collector.collect(prompts[:12], range(12))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copied.append(tensor.shape) or to_host(tensor))
    again = replace(collector, args=args)._compute_logps_and_values(rollout)
    assert copied == [rollout.mask.shape] * 3
    for name in ("logps", "ref_logps", "values"):
        torch.testing.assert_close(getattr(again, name), getattr(rollout, name), rtol=0, atol=1e-5)


def test_answers_end_at_first_stop_token_or_length_limit(collector_and_prompts):
    collector, prompts = collector_and_prompts
    rollout, _ = collector.collect(prompts[:32], range(32))
    lengths = rollout.lengths.tolist()
    assert len(set(lengths)) > 2
    for ids, length, finished in zip(rollout.response_ids.tolist(), lengths, rollout.finished.tolist(), strict=True):
        assert (keys_task.EOS in ids[:length]) == finished
        assert keys_task.EOS not in ids[: length - 1]
        assert not any(ids[length:])
        assert finished or length == 8


def test_reward_functions_get_text_without_and_ids_with_stop_token(collector_and_prompts):
    collector, prompts = collector_and_prompts
    rollout = collector.answer(prompts[:8], range(8))
    texts = collector.read(rollout)
    assert rollout.scores.tolist() == rollout.lengths.tolist()
    assert texts == SEEN
    for prompt, text, ids, mask in zip(prompts[:8], texts, rollout.response_ids, rollout.mask, strict=True):
        words = [keys_task.WORDS[index] for index in ids[mask].tolist()]
        assert text.split() == [word for word in words if not word.startswith("<")]
        # As a continuation of the prompt: the decoder drops the space before a first word.
        assert (prompt.content + text).split() == prompt.content.split() + text.split()


def test_answer_is_unscored_if_all_weighted_rewards_are_none(collector_and_prompts):
    collector, prompts = collector_and_prompts

    def score_odd_rows(*, completion_ids, **_):
        return [float(at) if at % 2 else None for at in range(len(completion_ids))]

    rewards = Rewards({"odd": score_odd_rows, "length": score}, None, [1.0, 0.0])
    rollout = replace(collector, rewards=rewards).answer(prompts[:4], range(4))
    assert rollout.scored.tolist() == [False, True, False, True]
    assert rollout.scores.tolist() == [0, 1, 0, 3]
    assert rollout.rewards[:, 0].isnan().tolist() == [True, False, True, False]
    assert rollout.rewards[:, 1].tolist() == rollout.lengths.tolist()


def test_reward_model_reads_end_token_of_finished_answers_only(collector_and_prompts):
    collector, prompts = collector_and_prompts
    sizes = {"vocab_size": keys_task.VOCABULARY, "hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    model = LlamaForSequenceClassification(config).eval()
    add_score_head(model)
    reward_model = RewardModel(model, collector.tokenizer)
    read_the_end(reward_model, ["<eos>"])
    rollout = replace(collector, rewards=Rewards({}, reward_model, [1.0])).answer(prompts[:32], range(32))
    assert 0 < rollout.finished.sum() < 32
    assert ((rollout.scores > 1) == rollout.finished).all()


def test_policy_reference_and_engine_agree_before_updates(collector_and_prompts):
    collector, prompts = collector_and_prompts
    rollout, seconds = collector.collect(prompts[:16], range(16))
    assert torch.equal(rollout.logps, rollout.ref_logps)
    torch.testing.assert_close(rollout.engine_logps, rollout.logps, rtol=0, atol=1e-5)
    assert not rollout.values.any()
    assert seconds.keys() == {"time/sync", "time/generate", "time/score", "time/old_ref_value"}
    with torch.no_grad(), collector.models.using("policy") as policy:
        again, _ = compute_response_logps(policy, Sequences(rollout, torch.device("cpu")), temperature=1.0)
    torch.testing.assert_close(again, rollout.logps, rtol=0, atol=1e-5)


class RecordingEngine:
    """Engine that samples by ``generate`` and records its calls."""

    follows_seed, batch_size = True, None

    def __init__(self, generator):
        self.generator, self.calls = generator, []
        self.uses_policy = generator.uses_policy

    def load(self, policy):
        self.calls.append("load")

    def generate(self, policy, prompts, uniforms):
        # In training mode, layers with activation checkpointing ignore the cache.
        assert not policy.training
        self.calls.append(len(prompts))
        return self.generator.generate(policy, prompts, uniforms)


def test_engine_without_batch_size_loads_weights_and_gets_all_prompts(collector_and_prompts):
    collector, prompts = collector_and_prompts
    engine = RecordingEngine(collector.generator)
    watched = replace(collector, generator=engine)
    collector.models.set_training(training=True)
    rollout, _ = watched.collect(prompts[:12], range(12))
    collector.models.set_training(training=True)
    watched.answer(prompts[:3], range(3))
    assert engine.calls == ["load", 12, "load", 3]
    expected, _ = collector.collect(prompts[:12], range(12))
    assert torch.equal(rollout.response_ids, expected.response_ids)


def test_stall_of_a_weight_transfer_is_ended_as_early_as_one_of_sampling(collector_and_prompts):
    collector, prompts = collector_and_prompts
    engine, limits = RecordingEngine(collector.generator), []
    engine.load = lambda _: limits.append(WATCHDOG.limits())
    for _ in range(2):
        WATCHDOG.enter("the work between two steps")
        replace(collector, generator=engine).collect(prompts[:2], range(2))
    assert limits == [(SHOW_AFTER_SECONDS, END_AFTER_SECONDS)] * 2


def test_engine_is_idle_on_all_processes_once_settled(collector_and_prompts, monkeypatch):
    collector, _ = collector_and_prompts
    calls = []
    request = SimpleNamespace(exception=lambda: calls.append("sampled"))
    monkeypatch.setattr("accelerate.PartialState.wait_for_everyone", lambda _: calls.append("all ranks"))
    replace(collector, _request=request).settle()
    assert calls == ["sampled", "all ranks"]


@pytest.fixture
def ahead(collector_and_prompts):
    """Collector that has requested answers from ``generate`` early, by a function that replaces the engine's."""
    collector, prompts = collector_and_prompts
    with ThreadPoolExecutor(max_workers=1) as pool:

        def request(generate):
            return replace(collector, _pool=pool, _request=pool.submit(generate))

        yield request, prompts


def test_early_answers_are_used_once(ahead, collector_and_prompts):
    request, prompts = ahead
    collector, _ = collector_and_prompts
    early = collector._generate(collector.models.policy, prompts[:4], range(100, 104))
    requested = request(lambda: early)
    rollouts = [requested.collect(prompts[:4], range(4)) for _ in range(2)]
    assert [figures["rollout/off_policy_share"] for _, figures in rollouts] == [1.0, 0.0]
    width = min(rollouts[0][0].response_ids.shape[1], early.response_ids.shape[1])
    mask = rollouts[0][0].mask[:, :width]
    assert torch.equal(rollouts[0][0].response_ids[:, :width][mask], early.response_ids[:, :width][mask])
    expected, _ = collector.collect(prompts[:4], range(4))
    assert torch.equal(rollouts[1][0].response_ids, expected.response_ids)


def test_error_of_early_answers_is_raised_where_they_are_taken(ahead):
    def fail():
        raise ConfigError(Problem("use_vllm", "it ended", "restart it"))

    request, prompts = ahead
    requested = request(fail)
    # An evaluation in between only waits.
    requested.settle()
    requested.answer(prompts[:2], range(2))
    with pytest.raises(ConfigError, match="it ended"):
        requested.collect(prompts[:4], range(4))


def test_stop_request_during_early_sampling_raises_preempted(ahead):
    request, prompts = ahead
    with STOP.deferred():
        STOP.request("SIGTERM")
        with pytest.raises(PreemptedError):
            request(raise_if_stop_pending).collect(prompts[:4], range(4))
        STOP.reset()

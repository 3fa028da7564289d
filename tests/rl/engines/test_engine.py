"""Choice of the engine, and EngineGuard's comparison of log-probabilities."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from tests.models.test_generation import build_sampling
from tests.rl import keys_task
from tests.rl.test_rollout import CPU, build_rollout
from tests.rows import read_events

from recipes_lib.config.schema import EngineConfig
from recipes_lib.errors import ConfigError, DivergedError
from recipes_lib.models.generation import GenerateBackend
from recipes_lib.rl.engines import vllm
from recipes_lib.rl.engines.engine import ContinuousBatchingBackend, EngineGuard, build_generator
from recipes_lib.rl.objectives import PolicyObjective

ARGS = SimpleNamespace(
    per_device_eval_batch_size=4, device=CPU, process_index=0, bf16=False, fp16=False, mixed_precision="no"
)
EXACT, OTHER = SimpleNamespace(name="exact", follows_seed=True), SimpleNamespace(name="other", follows_seed=False)


def build(**keys):
    config = SimpleNamespace(engine=EngineConfig(**keys))
    return build_generator(config, ARGS, build_sampling(), precision=contextlib.nullcontext, max_length=32)


def test_engine_keys_select_engine(monkeypatch):
    assert isinstance(build(), GenerateBackend)
    assert isinstance(build(use_transformers_continuous_batching=True), ContinuousBatchingBackend)
    for mode in ("colocate", "server"):
        with pytest.raises(ConfigError, match="vLLM is not installed"):
            build(use_vllm=True, vllm_mode=mode)
    monkeypatch.setattr(vllm, "start", lambda config, args, sampling, max_length: max_length)
    assert build(use_vllm=True) == 32


def check_gaps(*gaps, engine=EXACT, dtype=torch.float32, **keys):
    """Return the lines printed in iterations whose engine log-probabilities are too high by ``gaps``."""
    rollout, lines = build_rollout([(3, 5), (2, 2)]), []
    guard = EngineGuard(engine, PolicyObjective(**keys), dtype, lines.append)
    for step, gap in enumerate(gaps, 1):
        guard.check(dataclasses.replace(rollout, engine_logps=rollout.logps + gap), step=step)
    return lines


def test_first_iteration_reports_gap_to_training_graph():
    assert check_gaps(0.0) == ["exact and the policy differ by 0.0e+00 nats per token"]
    # Values outside the mask do not count.
    assert "0.0e+00" in check_gaps(9.0 * ~build_rollout([(3, 5), (2, 2)]).mask)[0]
    assert "corrected" not in check_gaps(0.01, dtype=torch.bfloat16)[0]
    assert "depend on more than the seed" in check_gaps(0.0, engine=OTHER)[0]


def test_gap_is_checked_in_every_iteration_and_warns_once():
    assert check_gaps(0.0, 0.0005, 0.01, 0.0, 0.02)[1:] == [
        "warning: step 3: exact and the policy differ by 1.0e-02 nats per token, above the rounding tolerance of "
        "0.001: corrected by importance weights"
    ]
    assert len(check_gaps(0.01, 0.01)) == 1
    for wrong in (1.5, float("nan")):
        with pytest.raises(DivergedError, match=r"before step 3 .* does not have the policy's weights"):
            check_gaps(0.0, 0.0, wrong, dtype=torch.bfloat16)


@pytest.mark.parametrize(("corrects", "words"), [(True, "0.001: corrected by"), (False, "0.001: not corrected by")])
def test_large_gap_reports_whether_it_is_corrected(corrects, words):
    assert words in check_gaps(0.01, vllm_importance_sampling_correction=corrects)[0]


def test_run_with_continuous_batching_has_no_engine_gap(policy_dir, prompts_file, tmp_path):
    keys = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": "{num_blocks: 64, page_size: 16, max_batch_tokens: 128}",
        "max_steps": 4,
        "per_device_train_batch_size": 8,
    }
    keys_task.train(keys_task.build_flags(policy_dir, tmp_path, prompts_file, **keys))
    (event,) = read_events(tmp_path)
    assert abs(event["rollout/engine_mismatch_kl"]) < 1e-5
    assert event["rollout/is_weight_max"] == pytest.approx(1, abs=1e-4)
    assert event["policy/num_updates"] == 4
    assert event["time/sync"] >= 0


def test_rounding_of_half_precision_weights_is_no_engine_gap(policy_dir, prompts_file, tmp_path, monkeypatch, capsys):
    generate = GenerateBackend.generate

    def generate_with_gap(self, *given):
        answers = generate(self, *given)
        return dataclasses.replace(answers, engine_logps=answers.engine_logps + 0.02)

    monkeypatch.setattr(GenerateBackend, "generate", generate_with_gap)
    keys = {"dtype": "bfloat16", "bf16": "false", "max_steps": 4, "per_device_train_batch_size": 8}
    keys_task.train(keys_task.build_flags(policy_dir, tmp_path, prompts_file, **keys))
    printed = capsys.readouterr().err
    assert "generate and the policy differ by 2.0e-02 nats per token" in printed
    assert "rounding tolerance" not in printed

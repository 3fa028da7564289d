"""GRPO with a real vLLM engine: ``python -m tests.rl.real_vllm OUTPUT NAME FAILING_STEP [KEY=VALUE ...]``.

Writes the largest difference between the log-probabilities of engine and training graph in each iteration to
``NAME.gaps``. Engine step ``FAILING_STEP``, from 1, raises; 0 for none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.distributed import sharding
from tests.rl import keys_task

from recipes_lib.rl import trainer
from recipes_lib.training.layouts.launch_environment import read_launch


def write_inputs(folder: Path) -> None:
    """Write prompts, and a policy with the head dimension of 32 that vLLM's CPU kernels require."""
    config = keys_task.LlamaConfig
    wide = {"num_attention_heads": 2, "num_key_value_heads": 2}
    with mock.patch.object(keys_task, "LlamaConfig", lambda **keys: config(**keys | wide)):
        keys_task.write_policy(folder / "policy", seed=0, num_steps=50)
    keys_task.write_prompts(folder / "prompts.jsonl", 64, seed=1)


def main() -> None:
    """Run the recipe in this process, and exit with its code."""
    folder, name, failing = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    output = folder / name
    more = dict(argument.split("=", 1) for argument in sys.argv[4:])
    keys: dict[str, Any] = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.1, "num_sample_prompts": 2}
    keys |= {"save_strategy": "steps", "save_steps": 4, "max_steps": 20, "logging_steps": 1, "eval_steps": 8, **more}
    flags = keys_task.build_group_flags(folder / "policy", output, folder / "prompts.jsonl", **keys)
    describe, launch = trainer.describe_rollout, read_launch()
    torch.set_num_threads(1)
    if launch.engine:
        sharding.take_cpus_for_gpus()

    def record(rollout: Any, *given: Any) -> Any:
        gap = float((rollout.logps - rollout.engine_logps)[rollout.mask].abs().max())
        if launch.is_main:
            with (folder / f"{name}.gaps").open("a") as file:
                file.write(f"{gap}\n")
        return describe(rollout, *given)

    with mock.patch.object(trainer, "describe_rollout", record):
        if failing:
            from vllm.v1.engine.llm_engine import LLMEngine

            step, calls = LLMEngine.step, []

            def fail(engine: Any) -> Any:
                calls.append(1)
                if len(calls) == failing:
                    raise RuntimeError("EngineCore encountered an issue.")
                return step(engine)

            LLMEngine.step = fail
        code = sharding.run_recipe("grpo", dict(flag.removeprefix("--").split("=", 1) for flag in flags))
    sys.exit(code)


if __name__ == "__main__":
    main()

"""Counts kernels, host syncs and copies of an optimizer step: ``OUTPUT JSON_JOBS``; the jobs run in turn."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from tests import simulated_device
from tests.distributed import sharding
from tests.simulated_device import WORK

UPSTREAM = "upstream"
"""Job of transformers' own trainer, with the model and the number and length of rows of ``pretrain``."""


def main() -> None:
    """Run the jobs on the simulated device; write mean counts per step, without the first two and the last."""
    output, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    simulated_device.install()
    from torch.nn import functional
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from recipes_lib.models.attention import varlen

    steps: list[list[Counter[str]]] = []
    kinds = ("kernels", "waits", "copies")
    register_optimizer_step_post_hook(lambda *_: steps.append([getattr(WORK, kind).copy() for kind in kinds]))
    work: dict[str, Any] = {}
    for name, job in jobs.items():
        steps.clear()
        with fused(varlen, "attend_documents"), fused(functional, "scaled_dot_product_attention"):
            if job["stage"] == UPSTREAM:
                train_upstream(job["keys"], output / name)
            else:
                assert sharding.run_recipe(job["stage"], {**job["keys"], "output_dir": output / name}) == 0, name
        # The first steps contain checks that run once, and the last one is logged. PPO's single iteration trains the
        # policy, then the critic.
        parts = {name: steps[:-1]}
        if job["stage"] == "ppo":
            parts = {f"policy of {name}": steps[:4], f"critic of {name}": steps[4:]}
        for part, totals in parts.items():
            num_steps = len(totals) - 2
            work[part] = {
                kind: {line: count / num_steps for line, count in (last - second).items()}
                for kind, second, last in zip(kinds, totals[1], totals[-1], strict=True)
            }
    (output / "work.json").write_text(json.dumps(work, indent=1))


def fused(module: Any, name: str) -> Any:
    """Count a function of three tensors as one kernel forward and one backward, as its fused kernel on a GPU."""
    import torch

    original = getattr(module, name)

    @contextlib.contextmanager
    def uncounted() -> Iterator[None]:
        before, WORK.is_counting = WORK.is_counting, False
        try:
            yield
        finally:
            WORK.is_counting = before
            WORK.kernels[name] += before

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, options: dict[str, Any], rest: tuple[Any, ...], *states: Any) -> Any:
            with uncounted(), torch.enable_grad():
                ctx.inputs = [state.detach().requires_grad_() for state in states]
                ctx.output = original(*ctx.inputs, *rest, **options)
                return ctx.output.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            with uncounted():
                return None, None, *torch.autograd.grad(ctx.output, ctx.inputs, gradient)

    return mock.patch.object(module, name, lambda *args, **options: Kernel.apply(options, args[3:], *args[:3]))


def train_upstream(keys: Mapping[str, Any], output: Path) -> None:
    """Train the model of ``keys`` with transformers' trainer, without its filter of NaN losses, which synchronises."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    shape = json.loads(keys["model_config"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), vocab_size=512, **shape))
    size, length = int(keys["per_device_train_batch_size"]), int(keys["max_length"])
    tokens = torch.arange(length) % 512
    rows = [{"input_ids": tokens, "labels": tokens} for _ in range(size)] * int(keys["gradient_accumulation_steps"])
    args = TrainingArguments(
        output_dir=str(output),
        max_steps=int(keys["max_steps"]),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=int(keys["gradient_accumulation_steps"]),
        optim=keys["optim"],
        weight_decay=0.1,
        logging_nan_inf_filter=False,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model=model, args=args, train_dataset=rows).train()  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

"""What an optimizer step asks of the device: ``OUTPUT JSON_JOBS``, one recipe after the other in this process."""

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
"""Recipe that is transformers' own trainer on rows of the length, number and model of ``pretrain``."""


def main() -> None:
    """Run the jobs on the simulated device; write down what each step but the first two has asked of it."""
    output, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    simulated_device.install()
    from torch.nn import functional
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from recipes_lib.models.attention import varlen

    steps: list[list[Counter[str]]] = []
    kinds = ("kernels", "waits", "copies")
    register_optimizer_step_post_hook(lambda *_: steps.append([getattr(WORK, kind).copy() for kind in kinds]))
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        steps.clear()
        with fused(varlen, "attend_documents"), fused(functional, "scaled_dot_product_attention"):
            if job["stage"] == UPSTREAM:
                train_upstream(job["keys"], output / name)
            else:
                assert sharding.run_recipe(job["stage"], {**job["keys"], "output_dir": output / name}) == 0, name
        # The first steps hold checks that are made once. Of PPO's one iteration the critic's steps follow the policy's.
        learners = {name: steps}
        if job["stage"] == "ppo":
            learners = {f"{who} of {name}": part for who, part in (("policy", steps[:4]), ("critic", steps[4:]))}
        for learner, made in learners.items():
            num_steps = len(made) - 2
            found[learner] = {
                kind: {what: count / num_steps for what, count in (after - before).items()}
                for kind, before, after in zip(kinds, made[1], made[-1], strict=True)
            }
    (output / "work.json").write_text(json.dumps(found, indent=1))


def fused(module: Any, name: str) -> Any:
    """Count a function of three tensors, which the CPU has none for, as the one kernel each way that a GPU has."""
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
                ctx.given = [state.detach().requires_grad_() for state in states]
                ctx.output = original(*ctx.given, *rest, **options)
                return ctx.output.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            with uncounted():
                return None, None, *torch.autograd.grad(ctx.output, ctx.given, gradient)

    return mock.patch.object(module, name, lambda *args, **options: Kernel.apply(options, args[3:], *args[:3]))


def train_upstream(keys: Mapping[str, Any], output: Path) -> None:
    """Train the model of ``keys`` by transformers' trainer, without its replacement of losses that are no number."""
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

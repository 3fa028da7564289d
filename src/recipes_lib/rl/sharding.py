"""Which launches PPO takes, and what one that shards its models asks of everything that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from accelerate import Accelerator
from transformers import TrainingArguments

from recipes_lib.config.schema import RecipeConfig
from recipes_lib.errors import ConfigError, Problem
from recipes_lib.training.launch import Launch, verify_engine
from recipes_lib.training.preemption import leave_if_asked, stop_if_agreed
from recipes_lib.training.sharded_models import gathered, is_sharded, settle_precision, shard


def refuse_engine(engine: str, *, taken: str = "") -> None:
    """Refuse a launch that shards weights by what a stage does not take.

    Args:
        engine: Of the launch.
        taken: The engine that the stage takes; none unless it is named.

    Raises:
        ConfigError: ``engine`` is another one.
    """
    if engine in ("", taken):
        return
    found = f"the launch file asks for {engine}, and this stage samples answers from weights that it does not split"
    remedy = "use accelerate_configs/ddp.yaml, with an adapter (`use_peft: true`) where memory is short"
    if taken:
        found = f"the launch file asks for {engine}, which trains one model, and PPO trains two and reads two more"
        remedy = "use accelerate_configs/fsdp2.yaml, which shards all four; or ddp.yaml, where they fit"
    raise ConfigError(Problem("launch", found, remedy))


def check_launch(config: RecipeConfig, engine: str) -> None:
    """Refuse a launch of PPO that shards weights by anything but FSDP2, or what FSDP2 cannot shard here.

    Args:
        config: The run.
        engine: ``FSDP``, ``DEEPSPEED`` or empty, as the launch names it.

    Raises:
        ConfigError: As ``refuse_engine``; or models under FSDP would share a trunk, or their weights would be handed to
            an engine of their own.
    """
    refuse_engine(engine, taken="FSDP")
    if engine != "FSDP":
        return
    problems = []
    if config.adapter.use_peft:
        found = "policy, critic and reference would be one trunk, which FSDP2 gathers and reduces for one of them alone"
        remedy = "use accelerate_configs/ddp.yaml with the adapters, or train all weights"
        problems.append(Problem(config.provenance.get("use_peft", "use_peft"), found, remedy))
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(config.engine, name):
            found = "this engine takes over whole weights, and under FSDP2 no process has them"
            remedy = "delete the line: `generate` samples from the shards; or use accelerate_configs/ddp.yaml"
            problems.append(Problem(config.provenance.get(name, name), found, remedy))
    if problems:
        raise ConfigError(*problems)


def choose_placement(args: TrainingArguments, launch: Launch) -> Callable[[Any], Any]:
    """Return what brings a loaded model to where it computes: whole on this process's device, or sharded over all.

    Under FSDP every process must bring the same models in the same order.

    Args:
        args: Device and precision.
        launch: How this process was launched.

    Raises:
        ConfigError: FSDP was launched and accelerate is running without it, or runs its first version.
    """
    if not launch.engine:
        return lambda model: model.to(args.device)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    verify_engine(launch, accelerator.distributed_type)
    if not accelerator.is_fsdp2:
        remedy = "write `fsdp_version: 2`, as accelerate_configs/fsdp2.yaml has it"
        raise ConfigError(Problem("launch", "the launch file asks for the first version of FSDP", remedy))
    settle_precision(accelerator)
    return partial(shard, accelerator)


@contextmanager
def held_whole(model: Any) -> Iterator[None]:
    """Have all weights of a model on every process meanwhile, so that nobody within waits for another; all must enter.

    Whoever leaves by a ``LeftError`` calls ``stop_if_agreed`` next, and meets there those who came to the end.

    Args:
        model: Sharded; with any other there is nothing to do.

    Raises:
        PreemptedError: At the end, on all processes: one was asked to stop.
    """
    if not is_sharded(model):
        yield
        return
    with gathered(model):
        yield
    stop_if_agreed()


def beat_between(model: Any) -> None:
    """Tell of progress between forward passes, and leave if asked to: alone, or together where all take part in them.

    Raises:
        LeftError: This process was asked, and the model is its own.
        PreemptedError: One was asked, and the model is sharded.
    """
    if is_sharded(model):
        stop_if_agreed()
    else:
        leave_if_asked()

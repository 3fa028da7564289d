"""What a launch that shards the models of PPO asks of everything that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from accelerate import Accelerator
from transformers import TrainingArguments

from recipes_lib.training.launch import Launch, verify_engine
from recipes_lib.training.preemption import leave_if_asked, stop_if_agreed
from recipes_lib.training.sharded_models import gathered, is_sharded, settle_precision, shard


def choose_placement(args: TrainingArguments, launch: Launch) -> Callable[[Any], Any]:
    """Return what brings a loaded model to where it computes: whole on this process's device, or sharded over all.

    Under FSDP every process must bring the same models in the same order.

    Args:
        args: Device and precision.
        launch: How this process was launched.

    Raises:
        ConfigError: FSDP was launched and accelerate is running without it.
    """
    if not launch.engine:
        return lambda model: model.to(args.device)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    verify_engine(launch, accelerator.distributed_type)
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

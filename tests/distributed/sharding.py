"""Recipes, one after the other in one launch, on processes whose CPUs stand in for GPUs where models are sharded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tests import simulated_device
from tests.forked import ROOT, run_forked

from recipes_lib.errors import EXIT_DIVERGED, EXIT_DONE, EXIT_PREEMPTED
from recipes_lib.training.layouts.launch_environment import read_launch

Job = Mapping[str, Any]
"""``stage``; ``keys`` of the configuration; and, where they are wanted, ``fault``, ``copy_of`` and ``step``, and
``variables`` of the environment.

A run that is asked to stop goes on by the same command.
"""

SPIKE_STEP = 3
LEFT_OUT = (8, 40)
"""Rows of steps 2 to 5, of eight each, which a rollback from step 3 skips."""


def take_cpus_for_gpus() -> None:
    """Have accelerate shard on CPUs; left alone it would make DDP of FSDP there, in silence."""
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed compiles by ninja, which lies beside Python where no environment is active.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    # What is offloaded is pinned, for a device that there is none of.
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    original = PartialState.__init__

    def initialise(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        original(self, cpu=False, **kwargs)
        self.backend = "gloo"  # By which accelerate knows how tensors are gathered.

    PartialState.__init__ = initialise
    backend = f"cpu:gloo,{simulated_device.NAME}:gloo" if simulated_device.is_chosen() else "gloo"
    PartialState._prepare_backend = lambda *_: (backend, DistributedType.MULTI_GPU)


def run_jobs(
    jobs: Mapping[str, Job],
    output_dir: Path,
    file: str | None = None,
    *options: str,
    num_processes: int = 2,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run recipes in processes of their own and return the exit code of each.

    Args:
        jobs: By their name, which is also their folder's under ``output_dir``.
        output_dir: Where they go.
        file: The users' launch file that says how; ``None`` is one process, without a launcher.
        options: Of the launcher, after those of the file.
        num_processes: Told by the launch file.
        variables: Of the environment besides: ``SIMULATED`` has them compute on a device that is not the CPU.
    """
    arguments, given = prepare_jobs(jobs, output_dir), f"--num_processes={num_processes}"
    if file is None:
        told = run_forked(*arguments, variables=variables, num_processes=None)
    else:
        # Not for the processes that it starts.
        from tests.test_accelerate_configs import read_environment

        of_file = read_environment(ROOT / "accelerate_configs" / f"{file}.yaml", given, *options)
        told = run_forked(*arguments, variables={**of_file, **(variables or {})}, num_processes=num_processes)
    return read_end(output_dir, told)


def prepare_jobs(jobs: Mapping[str, Job], output_dir: Path) -> list[str]:
    """Return the module that runs them and its arguments."""
    output_dir.mkdir(parents=True, exist_ok=True)
    return ["tests.distributed.sharding", str(output_dir), json.dumps(jobs, default=str)]


def read_end(output_dir: Path, told: str) -> dict[str, Any]:
    """Return the exit codes of jobs, and what their processes told."""
    codes: dict[str, Any] = json.loads((output_dir / "codes.json").read_text())
    return {"codes": codes, "told": told}


def cut(source: Path, target: Path, step: int) -> None:
    """Copy a finished run as if it had been killed after a step."""
    shutil.copytree(source / f"checkpoint-{step}", target / f"checkpoint-{step}")
    record = json.loads((source / "run.json").read_text())
    record["config"]["output_dir"] = str(target)
    (target / "run.json").write_text(json.dumps(record | {"status": "running"}))


def run_recipe(recipe: str, keys: Mapping[str, Any]) -> int:
    """Run a recipe to its end in this process, without charts and a measured peak, and return its exit code."""
    sys.argv = [str(ROOT / "recipes" / f"{recipe}.py"), *(f"--{name}={value}" for name, value in keys.items())]

    def leave(code: int) -> None:
        raise SystemExit(code)

    try:
        # By which one process of several leaves without waiting for the others.
        with (
            mock.patch("os._exit", leave),
            mock.patch("sys.path", [str(ROOT / "recipes"), *sys.path]),  # As of a script: one recipe is another's main.
            mock.patch("recipes_lib.publish.final_model.build_report"),
            mock.patch("recipes_lib.training.evaluation.build.measure_matmul_flops", return_value=1e9),
        ):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("a recipe ends by its exit code")


@contextlib.contextmanager
def break_something(fault: str | None) -> Iterator[None]:
    """Break what ``fault`` says while it lasts."""
    from torch.nn.parallel import DistributedDataParallel

    from recipes_lib.data.tokens.dataset import RowOrder
    from recipes_lib.models.generation import GenerateBackend
    from recipes_lib.training.guards.step_guard import Spike, SpikeMonitor
    from recipes_lib.training.layouts.pipeline_schedule import Pipeline, PipelineTrainer
    from recipes_lib.training.trainers import recipe_trainer
    from recipes_lib.training.trainers.next_token_trainer import SFTTrainer
    from recipes_lib.training.trainers.recipe_trainer import RunSampler

    compute, run, order = SFTTrainer.compute_loss, DistributedDataParallel.forward, RunSampler.__iter__
    run_step, locate, judged = PipelineTrainer._run_step, RowOrder.locate, []

    def spoil(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        return loss + float("nan") if self.state.global_step == 1 and self.args.process_index else loss

    def average_means(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        # Without the number of all, it is divided by the number of its own.
        num_means = self.current_gradient_accumulation_steps * self.accelerator.num_processes
        return compute(self, model, inputs) / num_means

    def forget(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.require_backward_grad_sync = False
        return run(self, *args, **kwargs)

    def shift(self: Any) -> Iterator[int]:
        rows = list(order(self))
        return iter(rows[1:] + rows[:1] if is_last_process() else rows)

    def spoil_first_stage(self: Any) -> Any:
        shares = run_step(self)
        if self.state.global_step == 1 and self.pipeline.part.is_first:
            self.model.get_input_embeddings().weight.grad[0, 0] = float("nan")
        return shares

    def judge_a_spike(self: Any, loss: float, *_: Any) -> Spike | None:
        judged.append(loss)
        return Spike("loss", loss, 0.0, 0.0) if len(judged) == SPIKE_STEP else None

    def leave_out(self: Any, rows: Any) -> Any:
        return locate(self, np.delete(np.arange(1000), range(*LEFT_OUT))[rows])

    patches: dict[str, tuple[Any, str, Any]] = {
        # On the last process alone.
        "nan loss": (SFTTrainer, "compute_loss", spoil),
        "asked in an evaluation": (GenerateBackend, "generate", _ask_in(GenerateBackend.generate, call=5)),
        "asked while sampling": (GenerateBackend, "generate", _ask_in(GenerateBackend.generate, call=7)),
        "mean of means": (SFTTrainer, "compute_loss", average_means),
        "forgotten sync": (DistributedDataParallel, "forward", forget),
        "shifted shard": (RunSampler, "__iter__", shift),
        "nan in the first stage": (PipelineTrainer, "_run_step", spoil_first_stage),
        "no sums over stages": (Pipeline, "reduce_gradients", lambda _: None),
        "spike": (SpikeMonitor, "find_spike", judge_a_spike),
        "never saw it": (RowOrder, "locate", leave_out),
        "told reads": (hashlib, "file_digest", _tell(hashlib.file_digest)),
        # As accelerate would have it.
        "narrow sums": (recipe_trainer, "set_precision", lambda *_: None),
    }
    with contextlib.nullcontext() if fault is None else mock.patch.object(*patches[fault]):
        yield


@contextlib.contextmanager
def written_by_one() -> Iterator[None]:
    """Fail where another process than the first saves a model: it would be late now and then, and find no folder."""
    from peft import PeftModel
    from transformers import PreTrainedModel

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a process that is not the first saves a model")

    with contextlib.ExitStack() as patches:
        if int(os.environ.get("RANK", "0")):
            for kind in (PreTrainedModel, PeftModel):
                patches.enter_context(mock.patch.object(kind, "save_pretrained", fail))
        yield


def is_last_process() -> bool:
    """Whether this is the last process of the launch."""
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def _ask_in(generate: Callable[..., Any], call: int) -> Callable[..., Any]:
    """Sample answers, and ask the last process to stop in one of its calls, counted from 1."""
    calls: list[int] = []

    def asking(*args: Any, **kwargs: Any) -> Any:
        from recipes_lib.stopping import STOP

        calls.append(1)
        if len(calls) == call and is_last_process():
            STOP.request("SIGTERM")
        return generate(*args, **kwargs)

    return asking


def _tell(digest: Callable[..., Any]) -> Callable[..., Any]:
    """Hash a file, and print which process did."""

    def telling(file: Any, *args: Any) -> Any:
        sys.stdout.write(f"process {os.environ['RANK']} hashes {file.name}\n")
        sys.stdout.flush()
        return digest(file, *args)

    return telling


def main() -> None:
    """Run the jobs in this process, one of several: ``OUTPUT JSON_JOBS``."""
    output_dir, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    rank, is_alone = int(os.environ.get("RANK", "0")), "WORLD_SIZE" not in os.environ
    if simulated_device.is_chosen():
        simulated_device.install()
    if read_launch().engine or (simulated_device.is_chosen() and not is_alone):
        take_cpus_for_gpus()
    from torch import distributed

    codes: dict[str, Any] = {}
    for name, job in jobs.items():
        if "copy_of" in job and rank == 0:
            cut(Path(job["copy_of"]), output_dir / name, job["step"])
        if distributed.is_initialized():
            distributed.barrier()
        with break_something(job.get("fault")), written_by_one(), mock.patch.dict(os.environ, job.get("variables", {})):
            codes[name] = run_recipe(job["stage"], {**job["keys"], "output_dir": output_dir / name})
        if codes[name] == EXIT_PREEMPTED:
            from recipes_lib.stopping import STOP

            STOP.reason, STOP._is_closed = None, False
            codes[name] = [EXIT_PREEMPTED, run_recipe(job["stage"], {**job["keys"], "output_dir": output_dir / name})]
            continue
        if codes[name] != EXIT_DONE and not (codes[name] == EXIT_DIVERGED and "fault" in job):
            # The others may be waiting for this process; all of them diverge together where they were made to.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[name])
    if rank == 0:
        (output_dir / "codes.json").write_text(json.dumps(codes))
    if not is_alone:
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

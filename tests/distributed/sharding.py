"""Runs recipes one after the other in one launch of gloo processes, with FSDP2 and DeepSpeed on CPUs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import runpy
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tests import simulated_device
from tests.forked import ROOT, run_forked

from recipes_lib.errors import EXIT_BUG, EXIT_DIVERGED, EXIT_DONE, EXIT_PREEMPTED
from recipes_lib.stopping import STOP
from recipes_lib.training.layouts.launch_environment import read_launch

Job = Mapping[str, Any]
"""``stage`` (the recipe) and ``keys`` of its configuration. Optional: ``fault`` (see ``inject``), ``copy_of`` and
``step`` (resume from a checkpoint of another run), ``variables`` (environment).

A preempted run is resumed by the same command.
"""

SPIKE_STEP = 3
SKIPPED_ROWS = (8, 40)
"""Rows of steps 2 to 5, of eight each, which a rollback from step 3 skips."""


def take_cpus_for_gpus() -> None:
    """Let accelerate shard on CPUs, where it would silently replace FSDP by DDP."""
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed's CPU Adam is compiled with ninja, which is beside Python if the environment is not activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if read_launch().engine == "DEEPSPEED":
        import deepspeed

        # No shared-memory collectives, which replace those of gloo and take minutes to compile.
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    import torch
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    # Offloaded tensors are pinned, which needs a GPU.
    torch.Tensor.pin_memory = simulated_device.pin_memory
    original = PartialState.__init__

    def initialise(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        original(self, cpu=False, **kwargs)
        self.backend = "gloo"  # accelerate gathers tensors according to the backend.

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
    """Run recipes in one launch, and return their exit ``codes`` and the ``output`` of all processes.

    Args:
        jobs: Name -> job; the output directory of a job is ``output_dir / name``.
        output_dir: Parent of the output directories.
        file: Name of a launch file in ``accelerate_configs/``; ``None``: no launcher, and without ``variables`` this
            process, whose output is not returned.
        options: Options of ``accelerate launch``, which override the file.
        num_processes: World size.
        variables: Further environment variables, such as ``SIMULATED``.
    """
    if file is None and variables is None:
        return {"codes": run_in_turn(jobs, output_dir), "output": ""}
    arguments, size = prepare_jobs(jobs, output_dir), f"--num_processes={num_processes}"
    if file is None:
        output = run_forked(*arguments, variables=variables, num_processes=None)
    else:
        # Imports pytest, which the started processes do not need.
        from tests.test_accelerate_configs import read_environment

        of_file = read_environment(ROOT / "accelerate_configs" / f"{file}.yaml", size, *options)
        output = run_forked(*arguments, variables={**of_file, **(variables or {})}, num_processes=num_processes)
    return read_end(output_dir, output)


def prepare_jobs(jobs: Mapping[str, Job], output_dir: Path) -> list[str]:
    """Return the module that runs the jobs, and its arguments."""
    output_dir.mkdir(parents=True, exist_ok=True)
    return ["tests.distributed.sharding", str(output_dir), json.dumps(jobs, default=str)]


def read_end(output_dir: Path, output: str) -> dict[str, Any]:
    """Return the exit codes of the jobs, and the output of their processes."""
    codes: dict[str, Any] = json.loads((output_dir / "codes.json").read_text())
    return {"codes": codes, "output": output}


def cut(source: Path, target: Path, step: int) -> None:
    """Copy a finished run as if it had been killed after this step."""
    shutil.copytree(source / f"checkpoint-{step}", target / f"checkpoint-{step}")
    record = json.loads((source / "run.json").read_text())
    record["config"]["output_dir"] = str(target)
    (target / "run.json").write_text(json.dumps(record | {"status": "running"}))


def build_job(stage: str, flags: Iterable[str]) -> Job:
    """Return the job of a recipe with these flags, without its output directory."""
    keys = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    return {"stage": stage, "keys": {name: value for name, value in keys.items() if name != "output_dir"}}


def run_recipe(recipe: str, keys: Mapping[str, Any]) -> int:
    """Run a recipe in this process, without report and FLOPs measurement, and return its exit code."""
    sys.argv = [str(ROOT / "recipes" / f"{recipe}.py"), *(f"--{name}={value}" for name, value in keys.items())]

    def leave(code: int) -> None:
        raise SystemExit(code)

    STOP.reset()
    try:
        # A failed rank exits by ``os._exit``.
        with (
            mock.patch("os._exit", leave),
            # Signal handlers belong to the process, which the tests may share.
            mock.patch("recipes_lib.stopping.StopRequest.install"),
            mock.patch("sys.path", [str(ROOT / "recipes"), *sys.path]),  # As for a script: recipes import each other.
            mock.patch("recipes_lib.publish.final_model.build_report"),
            mock.patch("recipes_lib.training.evaluation.build.measure_matmul_flops", return_value=1e9),
        ):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("a recipe must exit")


@contextlib.contextmanager
def inject(fault: str | None) -> Iterator[None]:
    """Inject a fault, a key of ``patches``, during the block."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    from recipes_lib.data.tokens.dataset import RowOrder
    from recipes_lib.models.generation import GenerateBackend
    from recipes_lib.training.guards.step_guard import SpikeMonitor
    from recipes_lib.training.layouts.pipeline_schedule import Pipeline, PipelineTrainer
    from recipes_lib.training.trainers import recipe_trainer
    from recipes_lib.training.trainers.next_token_trainer import SFTTrainer
    from recipes_lib.training.trainers.recipe_trainer import RunSampler

    compute, run, order = SFTTrainer.compute_loss, DistributedDataParallel.forward, RunSampler.__iter__
    run_step, locate, losses = PipelineTrainer._run_step, RowOrder.locate, []

    def spoil(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        return loss + float("nan") if self.state.global_step == 1 and self.args.process_index else loss

    def average_means(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        # Without the global number of targets, the loss is the mean of the micro-batch.
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

    def report_spike(self: Any, loss: float, *_: Any) -> str | None:
        losses.append(loss)
        return f"loss {loss}" if len(losses) == SPIKE_STEP else None

    def skip_rows(self: Any, rows: Any) -> Any:
        return locate(self, np.delete(np.arange(1000), range(*SKIPPED_ROWS))[rows])

    patches: dict[str, tuple[Any, str, Any]] = {
        # On the last rank only.
        "nan loss": (SFTTrainer, "compute_loss", spoil),
        "preempted in evaluation": (GenerateBackend, "generate", _preempt_in(GenerateBackend.generate, call=5)),
        "preempted while sampling": (GenerateBackend, "generate", _preempt_in(GenerateBackend.generate, call=7)),
        "mean of means": (SFTTrainer, "compute_loss", average_means),
        "forgotten sync": (DistributedDataParallel, "forward", forget),
        "shifted shard": (RunSampler, "__iter__", shift),
        "nan in the first stage": (PipelineTrainer, "_run_step", spoil_first_stage),
        "no sums over stages": (Pipeline, "reduce_gradients", lambda _: None),
        "spike": (SpikeMonitor, "find_spike", report_spike),
        "without skipped rows": (RowOrder, "locate", skip_rows),
        # A rank that defers the reduction holds all gradients of the model.
        "reduced at once": (FSDPModule, "set_requires_gradient_sync", mock.Mock(side_effect=AssertionError)),
        "logged hashes": (hashlib, "file_digest", _log_hashes(hashlib.file_digest)),
        # The mixed precision policy of accelerate.
        "narrow sums": (recipe_trainer, "set_precision", lambda *_: None),
    }
    with contextlib.nullcontext() if fault is None else mock.patch.object(*patches[fault]):
        yield


@contextlib.contextmanager
def saving_on_rank_0_only() -> Iterator[None]:
    """Raise if another rank saves a model, which would be a race for the folder."""
    from peft import PeftModel
    from transformers import PreTrainedModel

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a rank other than 0 saves a model")

    with contextlib.ExitStack() as patches:
        if int(os.environ.get("RANK", "0")):
            for kind in (PreTrainedModel, PeftModel):
                patches.enter_context(mock.patch.object(kind, "save_pretrained", fail))
        yield


def is_last_process() -> bool:
    """Return whether this is the last rank of the launch."""
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def _preempt_in(generate: Callable[..., Any], call: int) -> Callable[..., Any]:
    """Return ``generate`` that requests a stop on the last rank in the given call, counted from 1."""
    calls: list[int] = []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        from recipes_lib.stopping import STOP

        calls.append(1)
        if len(calls) == call and is_last_process():
            STOP.request("SIGTERM")
        return generate(*args, **kwargs)

    return stopping


def _log_hashes(digest: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``digest`` that prints the rank and the file."""

    def logging(file: Any, *args: Any) -> Any:
        sys.stdout.write(f"process {os.environ['RANK']} hashes {file.name}\n")
        sys.stdout.flush()
        return digest(file, *args)

    return logging


def run_in_turn(jobs: Mapping[str, Job], output_dir: Path) -> dict[str, Any]:
    """Run the jobs in this process, one rank of several or the only one, and return their exit codes."""
    from torch import distributed

    rank, codes = int(os.environ.get("RANK", "0")), {}
    for name, job in jobs.items():
        if "copy_of" in job and rank == 0:
            cut(Path(job["copy_of"]), output_dir / name, job["step"])
        if distributed.is_initialized():
            distributed.barrier()
        with inject(job.get("fault")), saving_on_rank_0_only(), mock.patch.dict(os.environ, job.get("variables", {})):
            codes[name] = run_recipe(job["stage"], {**job["keys"], "output_dir": output_dir / name})
        if codes[name] == EXIT_PREEMPTED:
            codes[name] = [EXIT_PREEMPTED, run_recipe(job["stage"], {**job["keys"], "output_dir": output_dir / name})]
            continue
        # An injected divergence ends all ranks alike.
        assert codes[name] == EXIT_DONE or (codes[name] == EXIT_DIVERGED and "fault" in job), name
    return codes


def main() -> None:
    """Run the jobs in this process, one rank of several: ``OUTPUT JSON_JOBS``."""
    output_dir, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    is_alone = "WORLD_SIZE" not in os.environ
    if simulated_device.is_chosen():
        simulated_device.install()
        if not read_launch().layout.offloads_weights:  # For them accelerate adds collectives of CPU tensors to NCCL's.
            simulated_device.forbid_host_collectives()
    if read_launch().engine or (simulated_device.is_chosen() and not is_alone):
        take_cpus_for_gpus()
    try:
        codes = run_in_turn(jobs, output_dir)
    except AssertionError:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_BUG)  # At once: other ranks may wait for this one.
    if os.environ.get("RANK", "0") == "0":
        (output_dir / "codes.json").write_text(json.dumps(codes))
    if not is_alone:
        from torch import distributed

        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""A run: output directory, ``run.json``, resume, and final status."""

from __future__ import annotations

import fnmatch
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TextIO

import torch
from torch._C import _error_if_any_worker_fails

from recipes_lib.config.paths import is_local
from recipes_lib.config.recipes import read_harmless
from recipes_lib.config.schema import RecipeConfig, flatten_config
from recipes_lib.config.table import load_table
from recipes_lib.data.packed.encoding import TOKENIZER_FILES, hash_files
from recipes_lib.data.store import compute_key
from recipes_lib.environment import read_git_commit, read_versions
from recipes_lib.errors import (
    EXIT_BUG,
    EXIT_STALLED,
    STATUSES,
    ConfigError,
    DataError,
    DivergedError,
    LostPeerError,
    Problem,
    UserError,
    explain_refusal,
)
from recipes_lib.files import (
    LOCK_FILE,
    explain_write_errors,
    find_record,
    is_inside,
    read_lines,
    replace_record,
    try_lock,
    verify_fields,
)
from recipes_lib.hardware import INSTALL_CUDA, find_gpu_obstacle, supports_bf16
from recipes_lib.models.loading import find_commit, find_model_folder, hide_progress_bars
from recipes_lib.models.model_files import find_missing, list_model_files
from recipes_lib.models.saved_weights import sample_weights
from recipes_lib.processes import await_failure, explain_lost_connection, has_other_machines, read_failure_code
from recipes_lib.stopping import SECONDS_TO_UNWIND, STOP, leave
from recipes_lib.training.checkpoints import manifest, resume
from recipes_lib.training.collectives import broadcast_object, is_true_on_main
from recipes_lib.training.guards.step_guard import read_rollbacks
from recipes_lib.training.guards.watchdog import WATCHDOG
from recipes_lib.training.layouts.compatibility import verify_combination
from recipes_lib.training.layouts.launch_environment import (
    Launch,
    read_environment,
    verify_accelerator,
    verify_expected,
    verify_rendezvous,
)
from recipes_lib.training.layouts.memory_layout import choose_checkpointing, plan_run
from recipes_lib.training.monitoring.callbacks import verify_trackers
from recipes_lib.training.monitoring.metrics import METRICS_FILE, measure_run
from recipes_lib.training.monitoring.progress import build_progress
from recipes_lib.training.optim.optimizers import verify_optimizer
from recipes_lib.training.trainers.arguments import resolve_precision

RUN_FILE = "run.json"
RECORDED: Final = {"stage": str, "config": dict, "rows_per_step": int | None, "started": str | None}
"""Fields of ``run.json`` by which a run is resumed; each checkpoint holds them too."""

_INPUTS: Final = {
    "data": "the rows of the dataset",
    "weights": "the weights of `model_name_or_path`",
    "other_weights": "the weights of the reward model, critic, reference, teacher, initial adapter or `ewc_reference`",
    "tokenizer": "the files of the tokenizer",
}
"""Fields of ``run.json`` that describe the inputs of a run, which must stay the same."""
_OTHERS: Final = (
    *("reward_model_name_or_path", "ref_model_name_or_path", "teacher_model_name_or_path", "ewc_reference"),
    *("critic_model_name_or_path", "adapter_name_or_path"),  # DPO's reference is the policy at its start.
)
"""Keys of further models; folders only, since the cache of the Hub has a commit."""
_UNSET: Final = {"bf16", "fp16", "torch_compile", "use_liger_kernel", "seed"}
"""Keys whose value, if they are unset, is not their default: the hardware or the launch file decides, and rows are
split and ordered by the seed 0 (``read_seed``)."""
_OF_MACHINE: Final = ("output_dir", "prepared_dir", "activation_checkpointing", "activation_checkpointing_kwargs")
"""Keys that may differ between ranks: mounted paths, and what each chooses by the memory of its GPU."""

_CLAIMS: Final[list[TextIO]] = []
"""Lock files stay open while this process lives: closing a file unlocks it."""
_SECONDS_TO_END: Final = 1.0
"""Time in which the end of a child process is known, after a connection to it was closed."""
_RESERVED_BYTES: Final = 2**17
"""Size of the lock file: room for ``run.json`` to say that the disk was full."""


@dataclass(frozen=True, slots=True)
class Run:
    """A started run.

    Attributes:
        config: The configuration, with gradient accumulation adjusted to the world size, and
            ``activation_checkpointing: auto`` resolved.
        output_dir: Directory of all files of the run.
        launch: Launch state of this process.
        resume_from: Complete checkpoint to resume from unless it is damaged; ``None``: begin at step 0.
        finished: Whether the run is already done and its model complete.
        facts: Contents of ``run.json``; kept in memory, so that a damaged or deleted file is written again in full.
        before: Contents before this start, until it resumes; empty for a new run.
        superseded: Checkpoints that this start renamed to extend the run; renamed back if it is refused.
    """

    config: RecipeConfig
    output_dir: Path
    launch: Launch
    resume_from: Path | None
    finished: bool
    facts: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    superseded: list[Path] = field(default_factory=list)

    def choose_checkpoint(self) -> Path | None:
        """Verify and return the checkpoint to resume from; ``None``: begin at step 0. All ranks must call.

        Raises:
            ConfigError: As ``agree_on_checkpoint``.
        """
        say = build_progress(is_main=self.launch.is_main).say
        # With another `save_steps`, for example, a rank would wait for the others in a save that they do not make.
        plan = {name: value for name, value in flatten_config(self.config).items() if name not in _OF_MACHINE}
        # Without the patch version of Python, which may differ between machines.
        plan |= {f"the version of {name}": version for name, version in read_versions().items() if name != "python"}
        model, inputs = self.config.model, self._identify_models()
        # Machines may have their own copies of data, models and code.
        facts = self.facts | inputs
        for name, what in _INPUTS.items():
            plan[f"the SHA-256 of {what}"] = compute_key({name: resume.list_fingerprints(facts.get(name))})
        if (commit := find_commit(str(model.model_name_or_path), model.model_revision)) is not None:
            # Caches of the Hub may have different files of a commit, such as weights in two formats.
            plan[f"the SHA-256 of {_INPUTS['weights']}"] = commit
        plan["the SHA-256 of this library"] = compute_key(hash_files(Path(__file__).parents[1], ("**/*.py",)))
        if self.config.read("save_strategy") != "no":
            resume.verify_shared(self.output_dir, self.launch, say)
        checkpoint = resume.agree_on_checkpoint(self.resume_from, self.launch, plan, say)
        if checkpoint is not None:
            say(f"resumed from {checkpoint.name}")
        elif ignored := manifest.list_checkpoints(self.output_dir):
            newest = ignored[0][1]
            say(f"{newest.name} is ignored: {manifest.find_wrong_size(newest)}; training starts at step 0")
        self.record(resumed_from=checkpoint and checkpoint.name, **broadcast_object(inputs))
        self.before.clear()
        return checkpoint

    def _identify_models(self) -> dict[str, Any]:
        """Return the fingerprints of the model, frozen models and tokenizer of this machine, as in ``_INPUTS``."""
        model, flat = self.config.model, flatten_config(self.config)
        own = find_model_folder(str(model.model_name_or_path), model.model_revision)
        # Empty for a tokenizer of the Hub.
        files = hash_files(Path(model.tokenizer_name_or_path or str(model.model_name_or_path)), TOKENIZER_FILES)
        return {
            "weights": sample_weights(own),
            "other_weights": sample_weights(*(Path(flat[key]) for key in _OTHERS if flat.get(key))),
            "tokenizer": {"fingerprint": files} if files else None,
        }

    def record(self, **facts: Any) -> None:
        """Add facts to ``run.json``; only the main process writes.

        Raises:
            ConfigError: The run resumes, and the facts have other inputs (``_INPUTS``) than those it began with.
        """
        for name, what in _INPUTS.items() if self.resume_from else ():
            before, now = (resume.list_fingerprints(record.get(name)) for record in (self.facts, facts))
            if name in facts and before and before != now:
                found = f"{what} are not those that this run began with"
                remedy = f"restore them, or choose another output_dir; to accept them, delete `{name}` from this file"
                raise ConfigError(Problem(str(self.output_dir / RUN_FILE), found, remedy))
        self.facts.update(facts)
        if self.launch.is_main:
            replace_record(self.output_dir / RUN_FILE, self.facts)

    @contextmanager
    def recording_its_end(self) -> Iterator[None]:
        """Context that records its final status: one of ``STATUSES``, ``interrupted``, ``failed`` or ``done``.

        After the end of another rank of this machine, it is the status of that rank.

        Raises:
            LostPeerError: A connection was lost because another process has ended.
            ConfigError: The system refused an operation (a full disk, for example), or files of the run are missing.
        """
        WATCHDOG.on_stall = lambda reason: self._record_end(STATUSES[EXIT_STALLED], reason)
        if has_other_machines():
            threading.Thread(target=self._end_with_other_machines, name="other machines", daemon=True).start()
        try:
            yield
            files = list_model_files(self.output_dir)
            self.record(status="done", finished=_now(), model_files=files, **self._summarise())
        except BaseException as error:
            STOP.close()
            cause = self._explain(error)
            default = "interrupted" if isinstance(cause, KeyboardInterrupt) else "failed"
            is_lost = isinstance(cause, LostPeerError)
            status = STATUSES.get(read_failure_code() if is_lost else getattr(cause, "exit_code", EXIT_BUG), default)
            self._record_end(status, f"{type(cause).__name__}: {cause}")
            raise cause from (error.__cause__ if cause is error else error)

    def _end_with_other_machines(self) -> None:
        """Exit after a process of another machine has failed, unless this run trains or ends.

        In training, lost connections are found. Before, this process would wait for it to connect until a timeout.
        """
        failure = await_failure(timedelta(weeks=52))
        time.sleep(SECONDS_TO_UNWIND)
        if failure is not None and not STOP.is_deferred and self.facts.get("status") == "running":
            code, words = failure
            self._record_end(STATUSES.get(code, "failed"), words)
            leave(EXIT_BUG, f"rank {self.launch.rank} exits: {words}")

    def _explain(self, error: BaseException) -> BaseException:
        """Return a user error in place of ``error`` if its cause is known, else ``error``."""
        # The kernel closes the connections of a killed data loader worker before it reports the worker's end.
        if isinstance(error, ConnectionError | EOFError):
            try:
                time.sleep(_SECONDS_TO_END)
                _error_if_any_worker_fails()
            except RuntimeError as failure:
                error = failure
        if (lost := explain_lost_connection(error)) is not None:
            return LostPeerError(lost)
        if not isinstance(error, Exception) or isinstance(error, UserError | DivergedError):
            return error
        if not self.output_dir.is_dir():  # Of any kind: of an operation, or of the verification of what was written.
            found = "is missing: it was renamed or deleted, or its disk was unmounted"
            return ConfigError(Problem(str(self.output_dir), found, "restore it and run the same command"))
        if isinstance(error, FileNotFoundError) and Path(str(error.filename)).is_relative_to(self.output_dir):
            found = "is missing: it was renamed or deleted while the run used it"
            remedy = "run the same command: it resumes from the newest complete checkpoint"
            return ConfigError(Problem(str(error.filename), found, remedy))
        # torch's ``weights_only`` found objects other than tensors. Compared by name, to import no pickle here.
        if type(error).__name__ == "UnpicklingError":
            found = f"was not loaded: a file in it contains objects other than tensors ({str(error).splitlines()[0]})"
            remedy = "delete the checkpoint: the same command resumes from the one before it"
            return ConfigError(Problem(str(self.resume_from or self.output_dir), found, remedy))
        refusal = explain_refusal(error, self.output_dir)
        return ConfigError(refusal) if refusal else error

    def _summarise(self) -> dict[str, Any]:
        """Summary of ``metrics.jsonl``, rollbacks, and the model's commit, which is known once it was downloaded."""
        model = self.config.model
        path = self.output_dir / METRICS_FILE
        # Both read the file line by line: a run of a million steps has gigabytes of events.
        last_events = {event.get("kind"): event for event in read_lines(path) if event}
        summary: dict[str, Any] = {
            "stopped_early": last_events.get("stop"),
            "best_model": last_events.get("best"),
            "measured": measure_run(filter(None, read_lines(path))) if self.facts.get("planned") else None,
        }
        # Files that were changed or moved meanwhile must not replace the final status of the run by an error.
        with suppress(DataError):
            summary["rollbacks"] = [asdict(rollback) for rollback in read_rollbacks(self.output_dir)]
        # A deleted local folder is looked up as a Hub id, which is invalid (``HFValidationError``, a ``ValueError``).
        with suppress(ValueError):
            summary["model_commit"] = find_commit(str(model.model_name_or_path), model.model_revision)
        return summary

    def _record_end(self, status: str, reason: str) -> None:
        """Record why the run ended, in reserved space if the disk is full; failures here are not raised."""
        facts = {"status": status, "finished": _now(), "error": reason}
        if self.before:  # As with other rows or weights: the record must describe the checkpoints, not this start.
            self.facts.clear()
            facts = {**self.before, **({} if self.before.get("status") == "done" else facts)}
            for path in self.superseded:
                path.rename(path.with_name(path.name.removeprefix("superseded-")))
        try:
            self.record(**facts, **({} if self.before else self._summarise()))
        except OSError:
            # Without the summary, in the space that truncating the lock file releases, and in its inode.
            with suppress(OSError):
                for file in _CLAIMS:
                    file.truncate(0)
                if self.launch.is_main:
                    (self.output_dir / LOCK_FILE).replace(self.output_dir / f"{RUN_FILE}.partial")
                self.record(**facts)


def start_run(config: RecipeConfig, launch: Launch) -> Run:
    """Open the output directory, verify its configuration, and find the checkpoint to resume from.

    On another world size, the run resumes with its global batch size. There is no process group yet:
    ``Run.choose_checkpoint`` later verifies the checkpoint on all ranks.

    Raises:
        ConfigError: As ``verify_rendezvous``, ``verify_expected`` and ``verify_accelerator``: the launch is incomplete,
            differs from the requested one, or needs GPUs that this machine lacks.
        ConfigError: A tracker or the optimizer is not installed, or recipe and launch file are incompatible.
        ConfigError: The directory cannot be written, or another process runs in it.
        ConfigError: It contains a run with other keys that affect the result, without a checkpoint that both runs would
            have written; the error names the keys.
        ConfigError: The run is done, its model is missing or damaged, and no checkpoint is left to write it from.
        ConfigError: The world size cannot load the checkpoint, or cannot divide its global batch.
    """
    if max(launch.world_size, torch.cuda.device_count()) > 1:
        sys.stderr.write(f"{describe_process(launch, uses_cpu=bool(config.training.get('use_cpu')))}\n")
    verify_rendezvous(launch)
    verify_expected(launch)
    verify_trackers(config)
    verify_combination(config, launch)
    effective = flatten_config(config)
    config = _choose_device(config, launch)
    verify_optimizer(config)
    # They would interrupt the progress line.
    hide_progress_bars()
    # Absolute, because a reward function or callback may change the working directory.
    output_dir = Path(config.training["output_dir"]).absolute()
    _open(output_dir, launch)
    config = config.with_training({"output_dir": str(output_dir)})
    resume_from = manifest.find_last_complete(output_dir)
    previous, now = _fill_in(_read_previous(output_dir, resume_from), effective, config.recipe)
    is_done = previous.get("status") == "done"
    differing = _find_differences(previous, now, launch) if resume_from or is_done else []
    say = build_progress(is_main=launch.is_main).say
    finished = is_done and not differing and _has_model(output_dir, previous, resume_from, say)
    if has_other_machines():
        # With a disk of its own, a machine does not see that the run is done, and would wait for the main process.
        finished = is_true_on_main(finished)
    if resume_from and not finished and not set(differing) & set(manifest.BATCH_KEYS):
        config = _resume_batch(config, launch, resume_from, say)
    if differing:
        # After ``_resume_batch``, both schedules are computed with the same global batch size.
        resume_from = resume.find_common_checkpoint(config, previous["config"], differing, launch.data_size)
        if resume_from is None:
            raise ConfigError(*_explain_differences(config, previous, now, differing))
    config, checkpointing = (config, "") if finished else choose_checkpointing(config, launch)
    if checkpointing:
        say(f"activation checkpointing: {checkpointing}")
    before = dict(previous) if resume_from else {}
    run = Run(config, output_dir, launch, resume_from, finished=finished, facts=previous, before=before)
    if not run.finished:
        hardware = describe_hardware(config)
        planned = plan_run(config, launch, hardware["device"]) if launch.is_main else None
        if differing and resume_from and launch.is_main:
            # Later checkpoints were trained with other learning rates; the extended run writes its own.
            run.superseded.extend(manifest.supersede(output_dir, after_step=int(resume_from.name.rpartition("-")[2])))
        run.record(
            stage=config.recipe,
            status="running",
            started=previous.get("started", _now()),
            # Those of an earlier start, if this one resumes it.
            finished=None,
            error=None,
            resumed_from=resume_from and resume_from.name,
            command=[Path(sys.argv[0]).name, *sys.argv[1:]],
            config=effective,
            provenance=dict(config.provenance),
            versions=read_versions(),
            git_commit=read_git_commit(),
            hardware=hardware,
            activation_checkpointing=checkpointing or None,
            planned=planned,
            num_processes=launch.world_size,
            pipeline_stages=launch.layout.pipeline_stages,
            rows_per_step=resume.count_rows_per_step(config.training, launch.data_size),
        )
    return run


def _has_model(
    output_dir: Path, record: Mapping[str, Any], resume_from: Path | None, say: Callable[[str], None]
) -> bool:
    """Return whether the model of a finished run is complete; if not, log from which checkpoint it is rewritten.

    Raises:
        ConfigError: No checkpoint is left to write it from. Training again without asking could be expensive.
    """
    names = record.get("model_files")
    missing = find_missing(output_dir, filter(is_inside, names) if isinstance(names, list) else ())
    if missing is None:
        return True
    if resume_from is None:
        found = f"the run is done, {missing}, and there is no checkpoint to write the model from"
        remedy = f"restore it, or delete {output_dir / RUN_FILE} to train the model again"
        raise ConfigError(Problem(str(output_dir), found, remedy))
    say(f"the run is done, but {missing}: the model is written again from {resume_from.name}")
    return False


def _open(output_dir: Path, launch: Launch) -> None:
    """Create the output directory; the main process locks it until it ends, and cleans it.

    The lock is without effect on file systems without locks.

    Raises:
        ConfigError: The directory cannot be written, or another process has the lock.
    """
    with explain_write_errors(output_dir, "choose another output_dir; if it is a link, mount the disk of its target"):
        output_dir.mkdir(parents=True, exist_ok=True)
        if not launch.is_main:
            return
        # NFS grants exclusive locks on writable files only. Mode "a" leaves the file of a finished run unchanged.
        file = (output_dir / LOCK_FILE).open("a", encoding="utf-8")
    # A lock of this process only: forked data loader workers, which may outlive it, do not inherit it.
    is_ours = try_lock(file, of_process=True)
    if is_ours is False:
        remedy = f"wait until it has ended, stop it (`fuser {file.name}` names it), or choose another output_dir"
        raise ConfigError(Problem(str(output_dir), "another process runs in it", remedy))
    if is_ours:
        with suppress(OSError, AttributeError):  # A full disk fails a later write; macOS has no ``posix_fallocate``.
            if os.fstat(file.fileno()).st_size < _RESERVED_BYTES:
                os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)
        _CLAIMS.append(file)
    manifest.clear_leftovers(output_dir)


def release_output_dirs() -> None:
    """Unlock the output directories of this process, which are locked until it ends otherwise."""
    while _CLAIMS:
        _CLAIMS.pop().close()


def _choose_device(config: RecipeConfig, launch: Launch) -> RecipeConfig:
    """Return the configuration with ``use_cpu`` of the launch file.

    Warns if the run uses the CPU of a machine with a GPU that torch cannot use, or with a launch file for GPUs, or bf16
    on a GPU without it; raises as ``verify_accelerator``.
    """
    if launch.layout.uses_cpu:
        # accelerate reads the launch file; transformers, and our choices for GPUs, the recipe.
        config = config.with_training({"use_cpu": True})
    on_cpus = config.training.get("use_cpu")
    num_gpus = 0 if on_cpus else torch.cuda.device_count()
    verify_accelerator(launch, is_available=torch.accelerator.is_available(), num_gpus=num_gpus)
    if num_gpus and launch.rank == 0 and resolve_precision(config, launch.precision)["bf16"] and not supports_bf16():
        remedy = "write `mixed_precision: fp16` (or `no`) in the launch file"
        sys.stderr.write(f"warning: this GPU has no hardware for bf16 and emulates it slowly: {remedy}\n")
    if on_cpus or launch.rank > 0:
        return config
    if obstacle := find_gpu_obstacle(read_environment()):
        sys.stderr.write(f"warning: training on the CPU, for torch cannot use the GPU: {obstacle}; {INSTALL_CUDA}\n")
    elif launch.precision in ("bf16", "fp16") and not torch.accelerator.is_available():
        remedy = "in a container, start it with `docker run --gpus all`; for a CPU, take accelerate_configs/cpu.yaml"
        sys.stderr.write(f"warning: the launch file asks for {launch.precision}, and there is no GPU: {remedy}\n")
    return config


def describe_hardware(config: RecipeConfig) -> dict[str, Any]:
    """Return the devices of this process for ``run.json``."""
    hardware: dict[str, Any] = {"platform": platform.platform(), "cpu_threads": torch.get_num_threads()}
    if torch.cuda.is_available() and not config.training.get("use_cpu"):
        hardware["device"] = torch.cuda.get_device_name()
        hardware["num_devices"] = torch.cuda.device_count()
    else:
        hardware["device"] = torch.cpu.get_capabilities().get("cpu_name", platform.processor())
    return hardware


def describe_process(launch: Launch, *, uses_cpu: bool = False) -> str:
    """Return rank, host and device of this process; every process logs it before loading."""
    # NVML also counts GPUs that torch cannot use.
    is_on_gpu = torch.cuda.is_available() and not (uses_cpu or launch.layout.uses_cpu)
    rank, num_gpus = launch.local_rank, torch.cuda.device_count() if is_on_gpu else 0
    name = f"cuda:{rank} ({torch.cuda.get_device_name(rank)})" if rank < num_gpus else "cpu"
    text = f"process {launch.rank} of {launch.world_size}: {socket.gethostname()}, {name}"
    if launch.world_size == 1 and num_gpus > 1:
        text += f", one of {num_gpus} GPUs; the others are idle (`recipes launch` uses all)"
    if launch.part is not None:
        return f"{text}, pipeline stage {launch.part.stage} of {launch.part.num_stages}"
    return f"{text}, {launch.engine}" if launch.engine else text


def _find_differences(previous: Mapping[str, Any], now: Mapping[str, Any], launch: Launch) -> list[str]:
    """Return the keys that affect the result and have changed."""
    before = previous.get("config", {})
    plain_now = json.loads(json.dumps(now, default=str))
    # Under these schedules, the learning rates are those of the evaluations.
    follows = plain_now.get("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy")
    names = before.keys() | plain_now.keys()
    harmless = {name for pattern in read_harmless() for name in fnmatch.filter(names, pattern)}
    names -= {name for name in harmless if not (follows and name.startswith("eval_"))}
    names -= resume.list_kept_batch_keys(previous, now, launch.data_size)
    if previous.get("status") != "done":
        # Of moved inputs, ``Run.record`` compares the contents; token sets of pretraining record no held-out split.
        data: Any = previous.get("data")
        split = ("dataset_test_split",) if isinstance(data, dict) and "inputs" in data else ()
        places = {
            "data": ("dataset_name", "dataset_mixture", *split),
            "weights": ("model_name_or_path",),
            "other_weights": _OTHERS,
            "tokenizer": ("tokenizer_name_or_path",),
        }
        moved = (name for kind, keys in places.items() if resume.list_fingerprints(previous.get(kind)) for name in keys)
        names -= {name for name in moved if _is_place(before.get(name), plain_now.get(name))}
    return sorted(name for name in names if before.get(name) != plain_now.get(name))


def _is_place(before: Any, now: Any) -> bool:
    """Return whether two values of a key differ in nothing but paths, and those of ``now`` exist."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(map(_is_place, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return {**before, "name": ""} == {**now, "name": ""} and is_local(now["name"])
    return isinstance(before, str) and is_local(now)


def _resume_batch(config: RecipeConfig, launch: Launch, checkpoint: Path, say: Callable[[str], None]) -> RecipeConfig:
    record = manifest.read_complete(checkpoint)
    assert record is not None, "find_last_complete has just read it"
    resume.verify_checkpoint_fits(record, str(checkpoint), launch)
    return resume.keep_batch(config, launch, record, say)


def _explain_differences(
    config: RecipeConfig, previous: Mapping[str, Any], now: Mapping[str, Any], differing: Sequence[str]
) -> list[Problem]:
    where, before = str(Path(config.training["output_dir"]) / RUN_FILE), previous["config"]
    if previous["stage"] != config.recipe:  # Most keys differ.
        found = f"is of the recipe {previous['stage']}, not {config.recipe}"
        return [Problem(where, found, "choose another output_dir")]
    remedy = "choose another output_dir, or run the command it was started with"
    if config.recipe == "pretrain" and set(differing) <= resume.EXTENDABLE:
        remedy = "no checkpoint is left from before the learning rates, or the rows of a stream, differ; " + remedy
    return [
        Problem(
            where, f"{name} was {before.get(name)!r} in the run of this directory and is now {now.get(name)!r}", remedy
        )
        for name in differing
    ]


def _read_previous(output_dir: Path, resume_from: Path | None) -> dict[str, Any]:
    """Return the record of the run in a directory, from ``run.json`` or else from its newest checkpoint.

    Empty, so that a new run begins, for a directory without checkpoints whose record is missing or truncated.

    Raises:
        ConfigError: Neither ``run.json`` nor the newest checkpoint has a valid record, or they are of different runs.
        ConfigError: There is no checkpoint, and ``run.json`` was not written by a recipe.
    """
    path = output_dir / RUN_FILE
    found = find_record(path)
    remedy = "restore the file, or choose another output_dir"
    record = ((resume_from and manifest.read_complete(resume_from)) or {}).get("run") or {}
    try:
        verify_fields(found, RECORDED, str(path), remedy=remedy)
    except DataError as error:
        problems = error.problems
    else:
        # Checkpoints of older versions have no copy of the record.
        if (started := found.get("started")) != record.get("started", started):
            text = f"is of a run that began at {record['started']!r}, and {RUN_FILE} of one that began at {started!r}"
            raise ConfigError(Problem(str(resume_from), text, "move it to another folder, and run the same command"))
        return found
    with suppress(DataError):
        verify_fields(record, RECORDED, str(resume_from))
        return dict(record)
    if resume_from is not None or found or (path.exists() and not path.is_file()):
        raise ConfigError(*problems)
    return {}


def _fill_in(record: dict[str, Any], now: dict[str, Any], recipe: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add defaults of keys that one of two configurations lacks, but not of ``_UNSET``."""
    if record.get("stage") != recipe:
        return record, now
    config, keys = record["config"], load_table(recipe).keys
    defaults = {name: keys[name].default for name in (config.keys() | now.keys()) & (keys.keys() - _UNSET)}
    return {**record, "config": {**defaults, **config}}, {**defaults, **now}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

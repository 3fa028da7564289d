"""Environment of the checks of ``recipes prove``: device, inputs of random text, and runs of recipes on them."""

from __future__ import annotations

import json
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from recipes_lib.config.paths import find_recipe
from recipes_lib.config.table import read_lists
from recipes_lib.environment import read_git_commit, read_versions
from recipes_lib.files import replace_text
from recipes_lib.models.vocabulary import CHATML_TEMPLATE, CHATML_TOKENS, train_tokenizer
from recipes_lib.training.layouts.launch_environment import read_environment
from recipes_lib.training.monitoring.metrics import METRICS_FILE

Event = Mapping[str, Any]
Figures = Mapping[str, Any]
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")
Launcher = Callable[[Sequence[str], Mapping[str, str], Path], int]
"""Runs Python with arguments, environment variables and a file for its output; returns the exit code."""
RUNS: Final = read_lists(Path(__file__).with_name("runs.yaml"))
"""Keys of the runs of checks, by recipe and by kind."""
_SMALL_MODEL: Final = json.dumps({"model_type": "llama", **RUNS["models"]["small"]})
_QUIET: Final = {"eval_strategy": "no", "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-3, "seed": 3}
_WORDS: Final = ("river", "stone", "light", "paper", "window", "garden", "engine", "letter", "number")
_TAIL: Final = 12


class WrongResultError(Exception):
    """A check failed: a result is wrong, or a process failed."""


_LIMIT_SECONDS: Final = 600
"""Time limit of a process: one that hangs must not use up the time of a rented machine."""
_GRACE_SECONDS: Final = 45
"""Time between SIGTERM and SIGKILL, above the 30 s after which torchrun kills its workers (torch 2.13,
``PContext.close``)."""
_RUNNING: Final[set[subprocess.Popen[bytes]]] = set()
"""Processes of ``launch`` that have not ended."""


def launch(arguments: Sequence[str], variables: Mapping[str, str], output: Path, limit: float = _LIMIT_SECONDS) -> int:
    """Run Python in a separate process, so that a CUDA error does not end this one.

    Args:
        arguments: Arguments of Python.
        variables: Environment variables, in addition to those of this process.
        output: File for standard output and standard error.
        limit: Time limit in seconds.

    Returns:
        The exit code.

    Raises:
        WrongResultError: The process exceeded the limit, and was terminated.
    """
    environment = {**read_environment(), **variables}
    with (
        output.open("w", encoding="utf-8") as stream,
        # With the lock of the folder, which `recipes prove` makes inheritable; other files are not.
        subprocess.Popen(
            [sys.executable, *arguments], stdout=stream, stderr=stream, env=environment, close_fds=False
        ) as process,
    ):
        _RUNNING.add(process)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            raise WrongResultError(f"the process did not end within {limit:g} s: {output}") from None
        finally:
            # SIGTERM first, also after one of this process: a launcher that is killed leaves its workers on the GPUs.
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
            process.kill()
            _RUNNING.remove(process)


@dataclass(frozen=True, slots=True)
class Bench:
    """Environment of the checks.

    Attributes:
        folder: Folder of inputs, runs and logs.
        device: Device that is checked; the CPU if there is no GPU.
        is_small: Whether sizes and steps are small, so that a check takes seconds.
        launch: Function that starts a process.
        num_gpus: Number of GPUs that are checked, the first ones of the machine.
        passed: Figures of passed checks by name, with which later ones compare theirs.
    """

    folder: Path
    device: torch.device
    is_small: bool
    launch: Launcher = field(default=launch)
    num_gpus: int = 0
    passed: dict[str, Figures] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a run."""
        return 3 if self.is_small else 20

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of matrix products: ``bfloat16`` on a GPU."""
        return torch.bfloat16 if self.is_cuda else torch.float32

    def choose_shape(self, size: str) -> dict[str, Any]:
        """Return the shape of a model by its size: that of the tiny one in small sizes."""
        return dict(RUNS["models"]["small" if self.is_small else size])

    def describe(self) -> str:
        """Return the conditions of the results: device, sizes of the checks, versions of packages, and the commit."""
        versions = ", ".join(f"{name} {version}" for name, version in read_versions().items())
        sizes = "small" if self.is_small else "full"
        # With the commit, so that results of earlier code do not pass for those of this one.
        return f"{name_device()}, {sizes} sizes, {versions}, commit {read_git_commit() or 'unknown'}"

    def set_up(self, recipe: str, **keys: Any) -> dict[str, Any]:
        """Return the configuration of a short run without data and model; ``keys`` take precedence."""
        batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": self.num_steps}
        of_model = {"model_config": _SMALL_MODEL} if recipe == "pretrain" else {}
        # The reward recipe generates no samples, and refuses the key.
        quiet = _QUIET if recipe == "reward" else {**_QUIET, "num_sample_prompts": 0}
        return {**quiet, **batch, **RUNS["keys"][recipe], **of_model, **keys}

    def measure_seconds(self, compute: Callable[[], Any], repeats: int = 10) -> float:
        """Return the median time of a call in seconds, with device synchronisation."""
        times = []
        # Three calls of warm-up, in which kernels are loaded and tuned, and memory is allocated.
        for _ in range(3 + repeats):
            began = time.perf_counter()
            compute()
            if self.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[3:])

    def run(
        self,
        recipe: str,
        name: str,
        *,
        on_device: bool = True,
        resumes: bool = False,
        by: Sequence[str] = (),
        **keys: Any,
    ) -> Path:
        """Run a recipe, and return its output directory; the log is next to it, with the suffix ``.log``.

        Args:
            recipe: Name of the recipe.
            name: Name of the run and of its output directory.
            on_device: Whether to run on the device, or on the CPU as the reference.
            resumes: Whether to resume from a checkpoint in the output directory.
            by: Arguments of Python before the recipe, such as a launcher.
            **keys: Keys of the configuration, except those of data and model.

        Raises:
            WrongResultError: The run failed.
        """
        output = self.folder / "runs" / name
        # Without this the run would resume from checkpoints of an earlier `recipes prove`.
        if not resumes:
            shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True, exist_ok=True)
        uses_cpu = not (on_device and self.is_cuda)
        # Threads of a CPU cost more than they save with models of this size.
        variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if uses_cpu else {}
        flags = {**self.name_inputs(recipe), "output_dir": output, "use_cpu": str(uses_cpu).lower(), **keys}
        arguments = [*by, str(find_recipe(recipe)), *(f"--{key}={value}" for key, value in flags.items())]
        log = output.with_suffix(".log")
        if code := self.start(arguments, variables, log):
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:])
            raise WrongResultError(f"{recipe}.py ended with {code}; {log}:\n{tail}")
        return output

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        """Run Python like ``launch``, offline, without GPU memory that this process has cached."""
        if self.is_cuda:
            # After a CUDA error in an earlier check, every call of this process raises it again.
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
        return self.launch(arguments, {"HF_HUB_OFFLINE": "1", **variables}, log)

    def map_runs(self, run: Callable[[_Job], _Result], jobs: Iterable[_Job]) -> list[_Result]:
        """Call a function that starts a small run for each job: all at once beside a GPU, otherwise one after another.

        Most of the time of a small run is that of its imports.
        """
        # Before the threads, each of which would write them.
        self.write_inputs()
        with ThreadPoolExecutor(None if self.is_cuda else 1) as pool:
            try:
                return list(pool.map(run, jobs))
            except BaseException:  # A signal, which the threads would only see when their processes have ended.
                for process in tuple(_RUNNING):
                    process.terminate()
                raise

    def train(self, recipe: str, name: str, **options: Any) -> list[Event]:
        """Run a recipe like ``run``, and return the training records of ``metrics.jsonl``."""
        lines = (self.run(recipe, name, **options) / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == "train"]

    def write_inputs(self) -> Path:
        """Write models, a byte-level tokenizer and rows of random words, equal in each call; return their folder."""
        folder = self.folder / "inputs"
        # Written last, by an atomic rename: if it exists, so do all others.
        if (folder / "documents.jsonl").exists():
            return folder
        # Without training texts, the vocabulary is the special tokens and the 256 bytes.
        tokenizer = train_tokenizer([], vocab_size=320, special_tokens=CHATML_TOKENS, chat_template=CHATML_TEMPLATE)
        for name, seed in (("model", 0), ("teacher", 1)):
            set_seed(seed)
            ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            LlamaForCausalLM(LlamaConfig(**RUNS["models"]["small"], **ids)).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        draw = random.Random(0)

        def speak() -> str:
            return " ".join(draw.choices(_WORDS, k=draw.randint(2, 6)))

        def answer(text: str) -> list[dict[str, str]]:
            return [{"role": "assistant", "content": text}]

        questions = [[{"role": "user", "content": speak()}] for _ in range(256)]
        rows: dict[str, list[Any]] = {
            "chats": [{"messages": question + answer(speak())} for question in questions],
            "pairs": [{"prompt": q, "chosen": answer(speak()), "rejected": answer(speak())} for q in questions],
            "prompts": [{"prompt": question[0]["content"]} for question in questions],
            "documents": [{"text": ". ".join(speak() for _ in range(60))} for _ in range(2048)],
        }
        for name, lines in rows.items():
            replace_text(folder / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        return folder

    def name_inputs(self, recipe: str) -> dict[str, Any]:
        """Return the keys of a recipe's model and data, and write these if they do not exist."""
        inputs = self.write_inputs()
        data = RUNS["data"].get(recipe, "chats")
        named: dict[str, Any] = {"dataset_name": inputs / f"{data}.jsonl"}
        if data != "prompts":
            named["prepared_dir"] = self.folder / "prepared"
        if recipe == "pretrain":
            return {**named, "tokenizer_name_or_path": inputs / "model"}
        teacher = {"teacher_model_name_or_path": inputs / "teacher"} if recipe == "distill" else {}
        return {**named, "model_name_or_path": inputs / "model", **teacher}


def score_letters(*, completions: Sequence[str], **_: Any) -> list[float]:
    """Return the share of lower-case letters of each answer: a reward that varies for policies with random weights."""
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]


def name_device() -> str:
    """Return the name of the GPU, or of the processor without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()

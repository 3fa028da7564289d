"""Exit codes, and the exceptions that end a command with them. Imports the standard library only."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_DIVERGED = 3
EXIT_STALLED = 4
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130
"""What a shell reports for a command ended by Ctrl-C (128 + SIGINT)."""
STATUSES: Final = {
    EXIT_USER: "refused",
    EXIT_DIVERGED: "diverged",
    EXIT_STALLED: "stalled",
    EXIT_PREEMPTED: "preempted",
}
"""Exit code of a run -> status in ``run.json``: ``torchrun`` itself exits with 1 whatever its processes returned."""


def translate_exit_code(code: int) -> int:
    """Return the exit code of a child process as shells report it: 128 plus the number of the signal that ended it."""
    return code if code >= 0 else 128 - code


_FILE_ERRORS: Final = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), ("not permitted", "check its owner, mode and mount options")
    ),
    **dict.fromkeys(
        (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR), ("not a valid file path", "correct the path")
    ),
    # Of a file whose folder exists, it is a bug.
    errno.ENOENT: ("its folder is missing", "it was deleted, renamed or unmounted: run the same command again"),
    errno.EEXIST: ("a file of this name is in the way", "name another path, or move the file"),
    **dict.fromkeys(
        (errno.EBUSY, errno.ENOTEMPTY, errno.EXDEV),
        ("another process uses it, or it is a mount point", "end that process or unmount it, and run the same command"),
    ),
    **dict.fromkeys(
        (errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT),
        ("its network file system is no longer connected", "mount it again and run the same command"),
    ),
}
"""``errno`` of an ``OSError`` with a file name -> what is wrong, and the remedy."""
_RESUMES: Final = "run the same command: training, corpora and generated rows resume"
_SMALLER: Final = (
    "lower per_device_train_batch_size and raise gradient_accumulation_steps by as much (same result), set "
    "activation_checkpointing: true, or lower max_length; in sampling and evaluation, lower per_device_eval_batch_size"
)
# By text: the exceptions of torch (C++) and safetensors (Rust), and those that a data loader passes on from its
# workers, have no errno. In this order, because an error of shared memory may also contain the system's reason.
_PHRASES: Final[Mapping[str, tuple[str | None, str, str]]] = {
    "Too many open files|items of ancdata": (
        None,
        "the limit of this process is reached",
        "raise the limit: `ulimit -n 65536`",
    ),
    r"shared memory(\(shm\)| object| segment)|out of shared memory": (
        "/dev/shm",
        "the shared memory of this machine or container is full or not writable",
        "enlarge it (`docker run --shm-size 16g`, or `--ipc host`), or write dataloader_num_workers: 0",
    ),
    "DebugUnderflowOverflow: inf/nan detected": (
        "debug",
        "a layer has infinite values or NaN",
        "the lines above have the values of the last layers",
    ),
    r"DataLoader worker \(pid": (
        "dataloader_num_workers",
        "a process that loads data has ended",
        "its reason is shown above; without one it was killed, usually for a lack of host memory: lower "
        f"dataloader_num_workers and {_RESUMES}",
    ),
    "surrogates not allowed": (
        None,
        "is not valid UTF-8, or the locale is not",
        "rename the file or folder, correct the text, or set PYTHONUTF8=1",
    ),
    "File too large": (
        None,
        "a file would exceed the size limit of this process or file system",
        "raise the limit (`ulimit -f unlimited`), or choose an output_dir on a file system without one",
    ),
    # Of the system, torch, C++, numpy and SQLite.
    "No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing file|clear: iostream error"
    r"|\d+ requested and \d+ written|database or disk is full": (
        None,
        "the disk is full",
        f"free space or inodes (`df -h`, `df -i`) and {_RESUMES}; `recipes check` shows what training will write",
    ),
    "Input/output error|Remote I/O error|disk I/O error|Stale file handle|Structure needs cleaning|Host is down": (
        None,
        "its disk or network file system fails",
        f"check the mount and the kernel's messages (`dmesg`), then {_RESUMES}",
    ),
    "No locks available": (
        "file locks",
        "the file system of a cache or an output does not support them",
        "set HF_HOME or the output to a folder on another file system, or mount this one with locks",
    ),
    # Of the dynamic linker, and of oneDNN.
    "failed to map segment from shared object|could not create a primitive$": (
        "host memory",
        "a library cannot get the memory that it needs",
        "raise the limit (`ulimit -v unlimited`, or that of the job), or take a machine with more memory",
    ),
    "can't start new thread|ThreadPoolBuildError": (
        "threads",
        "no more threads can be started",
        "raise the limit on processes and threads (`ulimit -u`, or that of the container) and run the same command, or "
        "lower dataloader_num_workers",
    ),
    "EADDRINUSE": (
        "MASTER_PORT",
        "another process uses the port",
        "set MASTER_PORT to a free port, the same for every process",
    ),
    # Of gloo and NCCL.
    "Unable to find address for|Bootstrap : no .*interface found": (
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME",
        "there is no such network interface",
        "unset it, or name one of `ip addr` of this machine",
    ),
    "uncorrectable (ECC|NVLink) error": (
        "GPU",
        "the hardware is faulty",
        f"reset the GPU or take another machine, and {_RESUMES}",
    ),
    # Of CUDA, cuBLAS, Triton and NCCL, which allocate beside torch's cache; its own error has a class.
    "CUDA (driver )?error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|Triton Error \[CUDA\]: out of memory|Failed to CUDA calloc|Cuda failure.*out of memory": (
        "device memory",
        "torch and other processes leave none to a library",
        f"end other processes on the GPU (`nvidia-smi`), or {_SMALLER}",
    ),
    "not have a deterministic implementation|operation is not deterministic because it uses CuBLAS": (
        "full_determinism",
        "torch has an operation that is not deterministic on this device",
        "set CUBLAS_WORKSPACE_CONFIG=:4096:8 if it uses CuBLAS; otherwise write full_determinism: false",
    ),
    "no kernel image is available": (
        "GPU",
        "torch, or another package with kernels, was not built for it",
        "install a build for its compute capability: older GPUs need torch for an older CUDA (PIP_EXTRA_INDEX_URL)",
    ),
    "CUDA-capable device.*busy or unavailable": (
        "GPU",
        "another process has it to itself, or it is faulty",
        f"end that process (`nvidia-smi`), or name other GPUs in CUDA_VISIBLE_DEVICES, and {_RESUMES}",
    ),
    # `recipes launch` enables them. Virtual GPUs (vGPU) and Jetson lack CUDA's virtual memory management.
    "CUDA driver error: operation not supported": (
        "GPU",
        "it does not support expandable segments",
        "set PYTORCH_ALLOC_CONF=expandable_segments:False, and run the same command",
    ),
    "index out of range in self": (
        "token ids",
        "an index exceeds its table, as the id of a token for which the model has no embedding",
        "`recipes check` names such tokens: leave them out of the data, or resize the model's embeddings",
    ),
}
"""Pattern of a message -> its location (``None``: the file), what is wrong, and the remedy."""


def escape_controls(text: object) -> str:
    """Return untrusted text as one printable line: control characters and line breaks are escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: where it is, what was found, and how to fix it.

    Attributes:
        where: Location: ``file:line``, ``file row N`` or a flag.
        found: What is wrong, in one clause.
        remedy: What to do, in one clause; empty if ``found`` implies it.
        size: Severity, to select the worst of similar problems; 0 if they are not comparable.
    """

    where: str
    found: str
    remedy: str = ""
    size: float = field(default=0, kw_only=True)

    def __str__(self) -> str:
        return f"{self.where}: {self.found}" + (f"\n    {self.remedy}" if self.remedy else "")


class MissingPath(Problem):
    """A path that does not exist, which an earlier stage of a pipeline may yet write."""


_NUMBER: Final = re.compile(r"(?<!\w)\d+(?:[.,]\d+)*")
"""A number that is not part of a name, such as that of a key."""
_LAST_NUMBER: Final = re.compile(r"\d+$")
_NUM_NEXT: Final = 3
"""Number of locations listed after the first one."""


def list_first(names: Iterable[str]) -> str:
    """Return the first three names, and the number of the others: ``a, b, c and 4 more``."""
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def suggest(name: object, known: Iterable[str], otherwise: str, shown: str = "`{}`", *, cutoff: float = 0.6) -> str:
    """Return the remedy for an unknown name: ``did you mean ...?`` with the nearest known name, or ``otherwise``.

    Args:
        name: The unknown name.
        known: The valid names.
        otherwise: The remedy if no valid name is similar.
        shown: Format of the suggested name, which replaces ``{}``.
        cutoff: Minimum similarity, from 0 to 1.
    """
    import difflib  # Needed for errors only.

    known = list(known)
    # A name that was cut off, such as `adamw`, rather than one with as many equal letters, such as `grokadamw`.
    longer = [candidate for candidate in known if candidate.startswith(f"{name}_")]
    near = longer or difflib.get_close_matches(str(name), known, n=1, cutoff=cutoff)
    return f"did you mean {shown.replace('{}', near[0])}?" if near else otherwise


def merge_alike(problems: Iterable[Problem], num_rows: int | None = None) -> list[Problem]:
    """Merge similar problems of many rows or lines into one: the first, with count, share, and the worst.

    Two problems are similar if they differ only in numbers, and their locations only in the last number.

    Args:
        problems: Problems of single rows, ordered by row; repeated problems of the same kind and row count once.
        num_rows: Number of rows read; ``None`` for problems of lines in a configuration.
    """
    kinds: dict[tuple[str, str, str], dict[str, Problem]] = {}
    for problem in problems:
        kind = _LAST_NUMBER.sub("", problem.where), _NUMBER.sub("", problem.found), problem.remedy
        kinds.setdefault(kind, {}).setdefault(problem.where, problem)
    return [_merge(list(alike.values()), num_rows) for alike in kinds.values()]


def _merge(alike: Sequence[Problem], num_rows: int | None) -> Problem:
    first, *others = alike
    if not others:
        return first
    places = ", ".join(problem.where for problem in others[:_NUM_NEXT]) + (", ..." if len(others) > _NUM_NEXT else "")
    share = f" of {num_rows:,} rows ({len(alike) / num_rows:.1%})" if num_rows else " places"
    found = f"{first.found}; so in {len(alike):,}{share}, next {places}"
    worst = max(alike, key=lambda problem: problem.size)
    if worst.size > first.size:
        found += f"; the worst is {worst.where}: {worst.found}"
    return replace(first, found=found)


class UserError(Exception):
    """Invalid configuration, data or environment; exit code 2. ``problems`` lists everything that was found."""

    exit_code = EXIT_USER

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems: Sequence[Problem] = problems

    def __reduce__(self) -> tuple[type[UserError], tuple[Problem, ...]]:
        # The default passes the message to ``__init__``, when a worker process sends the error to its parent.
        return type(self), tuple(self.problems)


class ConfigError(UserError):
    """Invalid configuration file, flag, or combination of keys."""


class DataError(UserError):
    """Invalid data: a missing file, a malformed row, an example without a valid loss mask."""


class ReadFailedError(DataError):
    """A disk or network failed while data were read; the data themselves may be valid."""


MAX_PROBLEMS: Final = 20
"""Maximum number of problems listed; the others are counted."""


def raise_problems(problems: Iterable[Problem], name: str, kind: type[UserError] = DataError) -> None:
    """Raise one error for all problems; do nothing if there are none.

    Args:
        problems: Problems; similar ones are merged, the first ``MAX_PROBLEMS`` listed, the others counted.
        name: Location of the remark that counts the others, such as the dataset.
        kind: Class of the error.

    Raises:
        UserError: ``problems`` is not empty; of the class ``kind``.
    """
    listed = merge_alike(problems)
    if num_more := len(listed[MAX_PROBLEMS:]):
        listed[MAX_PROBLEMS:] = [Problem(name, f"more problems: {num_more:,}", "fix these first, then run again")]
    if listed:
        raise kind(*listed)


def verify_extra(where: str, extra: str, *modules: str) -> None:
    """Raise if packages of an extra are not installed; does not import them.

    Args:
        where: Location of the problem: the key or flag that needs them.
        extra: Name of the extra of recipes-lib.
        modules: Top-level modules of the packages.

    Raises:
        ConfigError: At least one module is not installed.
    """
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        found = f"{' and '.join(missing)} not installed"
        raise ConfigError(Problem(where, found, f"pip install 'recipes-lib[{extra}]'"))


@contextmanager
def collect_problems(problems: list[Problem]) -> Iterator[None]:
    """Catch a ``DataError`` of the block and append its problems to ``problems``, to raise them all together later."""
    try:
        yield
    except DataError as error:
        problems += error.problems


@contextmanager
def reported_at(where: str) -> Iterator[None]:
    """Raise a ``ConfigError`` of the block with other places of its problems: those of the key that names the model."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(*(replace(problem, where=where) for problem in error.problems)) from error


class DivergedError(Exception):
    """A guard stopped training before a bad update reached the weights; exit code 3."""

    exit_code = EXIT_DIVERGED


class _LeaveError(SystemExit):
    """Exit with a message. Not an ``Exception``, so that ``except Exception`` in a library does not swallow it."""

    exit_code: int

    def __init__(self, message: str) -> None:
        super().__init__(self.exit_code)
        self.message = message

    def __str__(self) -> str:
        return self.message


class PreemptedError(_LeaveError):
    """The run was preempted; exit code 75. The same command resumes it."""

    exit_code = EXIT_PREEMPTED


class LostPeerError(_LeaveError):
    """Another rank has ended, and this one cannot continue; exit code 1."""

    exit_code = EXIT_BUG


def read_last_line(error: Exception) -> str:
    """Return the last line of an error's message: PyTorch and transformers write the reason there."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes, the original cause last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def explain_refusal(error: BaseException, written: Path | None = None) -> Problem | None:
    """Return the exhausted resource, missing permission or faulty device behind ``error``; ``None`` for other errors.

    Recognises full or failing disks, quotas, full shared memory, killed data loader workers, out of memory (device
    and host), faulty, busy and unsupported GPUs, limits on threads and on the size and number of files, invalid
    paths, files without read or write permission, a used rendezvous port, operations that are not deterministic, and
    token ids without an embedding.

    Args:
        error: The error.
        written: Folder to name if the error has no file; ``None``: ``output``.
    """
    # Libraries wrap system errors in their own: take the first known one along the chain, from the outermost.
    for cause in iterate_causes(error):
        # A problem has one line.
        lines = str(cause).splitlines() or [""]
        # A semaphore of Python is a file in /dev/shm; its errors name no file.
        frames = traceback.extract_tb(cause.__traceback__)
        if any(frame.filename.endswith("multiprocessing/synchronize.py") for frame in frames):
            lines[0] = f"shared memory object: {lines[0]}"
        # ``object``: the text that cannot be encoded.
        code, name = getattr(cause, "errno", None), getattr(cause, "filename", getattr(cause, "object", None))
        for pattern, (place, found, remedy) in _PHRASES.items():
            if line := next(filter(re.compile(pattern).search, lines), None):
                # The error of a copy names its source first, which may be on another disk.
                target = getattr(cause, "filename2", None) or name or written or "output"
                return Problem(place or str(target)[:120], f"{found}: {line}", remedy)
        # A cause may be a file that a library has looked for in vain, before another error.
        is_unforeseen = code == errno.ENOENT and (cause is not error or Path(str(name)).parent.is_dir())
        if code in _FILE_ERRORS and name is not None and not is_unforeseen:
            found, remedy = _FILE_ERRORS[code]
            return Problem(str(name)[:120], f"{found}: {os.strerror(code)}", remedy)
        is_host = isinstance(cause, MemoryError) or code == errno.ENOMEM
        # torch's error of a device, by name: this module must not import torch.
        if is_host or type(cause).__name__ == "OutOfMemoryError":
            remedy = "lower dataloader_num_workers, or run fewer processes on this machine" if is_host else _SMALLER
            return Problem(f"{'host' if is_host else 'device'} memory", lines[0] or "an allocation failed", remedy)
    return None

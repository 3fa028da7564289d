"""Error messages: location, finding and remedy; merging of similar problems; exhausted system resources."""

import errno
import multiprocessing
import os
import re
import sqlite3
import threading
from pathlib import Path

import pytest

from recipes_lib.errors import (
    ConfigError,
    DataError,
    DivergedError,
    LostPeerError,
    PreemptedError,
    Problem,
    UserError,
    collect_problems,
    escape_controls,
    explain_refusal,
    list_first,
    merge_alike,
    raise_problems,
    suggest,
    translate_exit_code,
)


def test_problem_text_is_location_finding_and_remedy():
    problem = Problem("sft.yaml:3", "`learning_rat` is no key", "did you mean `learning_rate`?")
    assert str(problem) == "sft.yaml:3: `learning_rat` is no key\n    did you mean `learning_rate`?"
    assert str(Problem("--seed", "is missing")) == "--seed: is missing"


@pytest.mark.parametrize(("code", "by_shells"), [(0, 0), (75, 75), (-9, 137), (-15, 143)])
def test_signal_is_translated_to_exit_code_of_shells(code, by_shells):
    assert translate_exit_code(code) == by_shells


def test_error_message_lists_every_problem():
    first, second = Problem("a", "one"), Problem("b", "two")
    assert str(ConfigError(first, second)) == "a: one\nb: two"
    assert DataError(first, second).problems == (first, second)


def test_exit_codes():
    assert UserError().exit_code == ConfigError().exit_code == DataError().exit_code == 2
    assert DivergedError("nan").exit_code == 3
    # `code`: what Python exits with if nothing catches it.
    for error, code in ((PreemptedError("stopped"), 75), (LostPeerError("stopped"), 1)):
        assert (error.code, error.exit_code, str(error)) == (code, code, "stopped")


def test_names_beyond_three_are_counted_and_control_characters_escaped() -> None:
    assert [list_first("abc"), list_first("abcde")] == ["a, b, c", "a, b, c and 2 more"]
    assert escape_controls("ä\n\x1b[2J") == "ä\\n\\x1b[2J"


def long_row(line: int, tokens: int, file: str = "a.jsonl") -> Problem:
    return Problem(f"{file}:{line}", f"{tokens:,} tokens, max_length is 512", "cut it", size=tokens)


def test_merge_alike_counts_similar_problems_and_names_worst():
    lengths = {3: 600, 7: 12_000, 12: 513, 40: 9_000, 77: 700}
    (merged,) = merge_alike([long_row(*row) for row in lengths.items()], 200)
    assert merged == Problem(
        "a.jsonl:3",
        "600 tokens, max_length is 512; so in 5 of 200 rows (2.5%), next a.jsonl:7, a.jsonl:12, a.jsonl:40, ...; "
        "the worst is a.jsonl:7: 12,000 tokens, max_length is 512",
        "cut it",
        size=600,
    )


def test_merge_alike_keeps_different_problems_separate():
    apart = [
        long_row(3, 600),
        long_row(3, 600, file="b.jsonl"),
        Problem("a.jsonl:4", "unknown role 'x'", "cut it"),
        Problem("a.jsonl:5", "unknown role 'y'", "cut it"),
        Problem("a.jsonl:6", "600 tokens, max_length is 512", "split it"),
        Problem("a.jsonl:7", "no beta1", "cut it"),
        Problem("a.jsonl:8", "no beta2", "cut it"),
    ]
    assert merge_alike(apart, 9) == apart
    assert merge_alike([apart[0]] * 3, 9) == apart[:1], "repeated problems of one row count once"


def test_collect_problems_catches_data_errors_only() -> None:
    problems: list[Problem] = []
    for where in ("first", "second"):
        with collect_problems(problems):
            raise DataError(Problem(where, "broken"))
    assert [problem.where for problem in problems] == ["first", "second"]
    with pytest.raises(ConfigError), collect_problems(problems):
        raise ConfigError(Problem("a key", "unknown"))
    assert len(problems) == 2


def test_problems_beyond_limit_are_counted():
    raise_problems([], "nothing")
    with pytest.raises(DataError) as caught:
        raise_problems(
            [Problem(f"{letter}:{line}", "broken") for letter in "abcdefghijklmnopqrst" for line in (1, 2)], "data"
        )
    assert len(caught.value.problems) == 20
    assert str(caught.value.problems[0]) == "a:1: broken; so in 2 places, next a:2"
    with pytest.raises(DataError) as caught:
        raise_problems([Problem(letter, "broken") for letter in "abcdefghijklmnopqrstuvwxyz"], "data")
    assert len(caught.value.problems) == 21
    assert str(caught.value.problems[-1]).startswith("data: more problems: 6")


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error, which is recognised by name."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "out/metrics.jsonl"), "out/metrics.jsonl: the disk is full"),
        (OSError(errno.ENOSPC, "No space left on device", "from/a", None, "to/a"), "to/a: the disk is full"),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "the disk is full"),
        (RuntimeError("[enforce fail] . PytorchStreamWriter failed writing file data/0: file write failed"), "full"),
        (OSError("1708 requested and 508 written"), "output: the disk is full: 1708 requested"),
        (sqlite3.OperationalError("database or disk is full"), "output: the disk is full: database"),
        (sqlite3.OperationalError("disk I/O error"), "output: its disk or network file system fails"),
        (OSError(errno.EFBIG, "File too large", "out/a.pt"), "out/a.pt: a file would exceed the size limit"),
        (RuntimeError("Error while serializing: I/O error: File too large (os error 27)"), "ulimit -f"),
        (PermissionError(errno.EACCES, "Permission denied", "out/run.json"), "out/run.json: not permitted"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300), f"{'a' * 120}: not a valid file path: File"),
        (UnicodeEncodeError("utf-8", "a/\udcff", 2, 3, "surrogates not allowed"), "a/\udcff: is not valid UTF-8"),
        # In a locale without UTF-8, every accent of a path.
        (UnicodeEncodeError("utf-8", "\udcc3\udcbc", 0, 2, "surrogates not allowed"), "PYTHONUTF8=1"),
        (OSError(errno.ENOTDIR, "Not a directory", "run.yaml/out"), "run.yaml/out: not a valid file path: Not a dir"),
        (OSError(errno.EMFILE, "Too many open files", "rows.jsonl"), "rows.jsonl: the limit of this process is"),
        (OSError(errno.EROFS, "Read-only file system", "out/_lock"), "out/_lock: not permitted: Read-only"),
        (FileExistsError(errno.EEXIST, "File exists", "runs/mine"), "runs/mine: a file of this name is in the way"),
        (OSError(errno.EBUSY, "Device or resource busy", "out/_saving"), "out/_saving: another process uses it, or"),
        (OSError(errno.ENOTEMPTY, "Directory not empty", "out/checkpoint-9"), "out/checkpoint-9: another process uses"),
        (OSError(errno.ESTALE, "Stale file handle", "a.jsonl"), "a.jsonl: its disk or network file system fails: [Er"),
        *(
            (OSError(code, reason, "out/a.pt"), f"out/a.pt: its disk or network file system fails: [Errno {code}]")
            for code, reason in ((117, "Structure needs cleaning"), (121, "Remote I/O error"), (112, "Host is down"))
        ),
        (RuntimeError("I/O error: Input/output error (os error 5)"), "output: its disk or network file system"),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected", "/mnt/s3/out"), "/mnt/s3/out: its network"),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out", "out/_saving"), "out/_saving: its network file"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "dataloader_num_workers: a process"),
        (
            RuntimeError(
                "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers "
                "are out of shared memory. Please try to raise your shared memory limit."
            ),
            "/dev/shm: the shared memory of this machine or container is full",
        ),
        (
            RuntimeError(
                "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
                "RuntimeError: unable to allocate shared memory(shm) for file </torch_7>: No space left on device (28)"
            ),
            "/dev/shm: the shared memory of this machine or container is full or not writable: RuntimeError: unable",
        ),
        (RuntimeError("unable to open shared memory object </torch_7>: Too many open files (24)"), "output: the limit"),
        (OSError("Caught OSError in DataLoader worker process 1.\nOSError: No space left on device"), "disk is full"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors"), "GPU: the hardware is"),
        *(
            (RuntimeError(text), "device memory: torch and other processes leave none to a library")
            for text in (
                "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'",
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
                "Triton Error [CUDA]: out of memory",
                "NCCL error\nncclUnhandledCudaError: Call failed.\nFailed to CUDA calloc async 4 bytes",
                "Last error:\nCuda failure 2 'out of memory'",
            )
        ),
        *(
            (RuntimeError(text), "full_determinism: torch has an operation that is not deterministic on this device")
            for text in (
                "cumsum_cuda_kernel does not have a deterministic implementation, but you set",
                "Deterministic behavior was enabled, but this operation is not deterministic because it uses CuBLAS",
            )
        ),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "GPU: torch, or anot"),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), "GPU: another process has it"),
        (RuntimeError("CUDA driver error: operation not supported"), "PYTORCH_ALLOC_CONF=expandable_segments:False"),
        (IndexError("index out of range in self"), "token ids: an index exceeds its table"),
        (ValueError("DebugUnderflowOverflow: inf/nan detected, aborting"), "debug: a layer has infinite values or NaN"),
        (RuntimeError("can't start new thread"), "threads: no more threads can be started"),
        (RuntimeError("not initialized: ThreadPoolBuildError { kind: IOError }"), "threads: no more threads can be"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "host memory: a library cannot"),
        (RuntimeError("could not create a primitive"), "host memory: a library cannot get the memory"),
        (OSError(errno.ENOLCK, "No locks available"), "file locks: the file system of a cache"),
        (RuntimeError("[enforce fail] ifa != nullptr. Unable to find address for: eth9"), "IFNAME: there"),
        (RuntimeError("NCCL error\nBootstrap : no socket interface found"), "NCCL_SOCKET_IFNAME: there is no such"),
        (RuntimeError("failed to listen. port: 29500, name: EADDRINUSE"), "MASTER_PORT: another process uses the port"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), "lower per_device_eval_batch_size"),
        (MemoryError(), "host memory: an allocation failed"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host memory: [Errno 12] Cannot allocate memory"),
    ],
)
def test_explain_refusal_recognises_system_errors(error, words):
    wrapped = ValueError("while saving")
    wrapped.__cause__ = error
    for raised in (error, wrapped):
        problem = explain_refusal(raised)
        assert problem is not None
        assert words in str(problem)
        assert problem.remedy
        named = explain_refusal(raised, Path("mine"))
        assert str(named) == re.sub("^output: ", "mine: ", str(problem))


def test_explain_refusal_recognises_deleted_folder(tmp_path):
    missing = FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path / "deleted" / "rows.jsonl"))
    assert f"{missing.filename}: its folder is missing: No such file" in str(explain_refusal(missing))
    other = KeyError("x")
    other.__context__ = missing  # Looked for in vain, and then another error.
    assert explain_refusal(other) is None


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(errno.ENOENT, "No such file", "a"), OSError("odd"), PermissionError("ours"), KeyError("x")],
)
def test_explain_refusal_ignores_other_errors(error):
    assert explain_refusal(error) is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_explain_refusal_recognises_shared_memory_that_holds_no_semaphore(code, monkeypatch):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("_multiprocessing.SemLock", fail)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        multiprocessing.get_context("fork").Lock()
    assert str(explain_refusal(caught.value)).startswith("/dev/shm: the shared memory of this machine or container is")


def test_explain_refusal_recognises_thread_limit_of_python():
    """Raised by Python itself: no machine can allocate a stack of 2**62 bytes."""
    before = threading.stack_size()
    try:
        threading.stack_size(2**62)
        with pytest.raises(RuntimeError) as caught:
            threading.Thread(target=print).start()
    finally:
        threading.stack_size(before)
    assert "threads" in str(explain_refusal(caught.value))


@pytest.mark.parametrize(
    ("name", "shown", "remedy"),
    [
        ("traim", "`{}`", "did you mean `train`?"),
        ("traim", "{}", "did you mean train?"),
        ("tra", "{}", "did you mean tra_in?"),
        ("nothing like it", "`{}`", "write one of train, test"),
    ],
)
def test_suggest_returns_nearest_name_or_fallback(name: str, shown: str, remedy: str) -> None:
    assert suggest(name, ["train", "test", "tra_in"], "write one of train, test", shown) == remedy

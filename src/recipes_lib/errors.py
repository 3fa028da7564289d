"""Exit codes and the exceptions that carry them. Imports the standard library only."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER = 2
EXIT_DIVERGED = 3
EXIT_STALLED = 4
EXIT_PREEMPTED = 75
STATUSES: Final = {
    EXIT_USER: "refused",
    EXIT_DIVERGED: "diverged",
    EXIT_STALLED: "stalled",
    EXIT_PREEMPTED: "preempted",
}
"""Exit code of a run -> status in its ``run.json``, where launchers report 1 however it ended."""

# torch and safetensors write in C++ and Rust, whose errors carry no errno.
_DISK_IS_FULL: Final = (
    "No space left on device",
    "Disk quota exceeded",
    "PytorchStreamWriter failed writing file",
    "basic_ios::clear: iostream error",
)
_OF_FILES: Final = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), ("not permitted", "check its owner, its mode and how it is mounted")
    ),
    **dict.fromkeys(
        (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR), ("no file can be there", "correct the path")
    ),
    errno.EMFILE: ("this process may open no more files", "raise the limit: `ulimit -n 65536`"),
}
"""Error number of a file that is named -> what is wrong, and the remedy."""


def escape_controls(text: object) -> str:
    """Return untrusted text as one printable line, without control characters and line breaks."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: where it is, what was found, and how to fix it.

    Attributes:
        where: ``file:line``, ``file row N`` or a flag, as the user would look it up.
        found: What is wrong, in one clause.
        remedy: What to do, in one clause; empty when ``found`` says it all.
        size: Severity, to find the worst of many; 0 if they cannot be compared.
    """

    where: str
    found: str
    remedy: str = ""
    size: float = field(default=0, kw_only=True)

    def __str__(self) -> str:
        return f"{self.where}: {self.found}" + (f"\n    {self.remedy}" if self.remedy else "")


_NUMBER: Final = re.compile(r"\d+(?:[.,]\d+)*")
_LAST_NUMBER: Final = re.compile(r"\d+$")
_NUM_NEXT: Final = 3
"""Locations listed in addition to the first and the worst."""


def list_first(names: Iterable[str]) -> str:
    """Return the first three names, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def suggest(name: object, known: Iterable[str], otherwise: str, shown: str = "`{}`", *, cutoff: float = 0.6) -> str:
    """Return the remedy of an unknown name: the nearest known one, as a question, or what to do without any.

    Args:
        name: As the user wrote it.
        known: Names that there are.
        otherwise: The remedy where none of them is near.
        shown: How the nearest one is written.
        cutoff: Least similarity, from 0 to 1.
    """
    import difflib  # Only an error needs it.

    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f"did you mean {shown.replace('{}', near[0])}?" if near else otherwise


def merge_alike(problems: Sequence[Problem], num_rows: int) -> list[Problem]:
    """Merge the same problem in many rows of a source into one: the first, with count, share, and the worst.

    Problems are the same when they differ in numbers alone, and their places in the number at the end.

    Args:
        problems: Of single rows, in the order of the rows; of one row and kind the first counts.
        num_rows: Rows that were read.
    """
    kinds: dict[tuple[str, str, str], dict[str, Problem]] = {}
    for problem in problems:
        kind = _LAST_NUMBER.sub("", problem.where), _NUMBER.sub("", problem.found), problem.remedy
        kinds.setdefault(kind, {}).setdefault(problem.where, problem)
    return [_merge(list(alike.values()), num_rows) for alike in kinds.values()]


def _merge(alike: Sequence[Problem], num_rows: int) -> Problem:
    first, *others = alike
    if not others:
        return first
    places = ", ".join(problem.where for problem in others[:_NUM_NEXT]) + (", ..." if len(others) > _NUM_NEXT else "")
    found = f"{first.found}; so in {len(alike):,} of {num_rows:,} rows ({len(alike) / num_rows:.1%}), next {places}"
    worst = max(alike, key=lambda problem: problem.size)
    if worst.size > first.size:
        found += f"; the worst is {worst.where}: {worst.found}"
    return replace(first, found=found)


class UserError(Exception):
    """Wrong configuration, data or environment; exit code 2. Carries every problem found."""

    exit_code = EXIT_USER

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems: Sequence[Problem] = problems


class ConfigError(UserError):
    """Wrong configuration file, flag, or combination of them."""


class DataError(UserError):
    """Wrong data: a missing file, a broken row, an example that cannot be masked."""


MAX_PROBLEMS: Final = 20
"""Problems that are listed; the rest are counted."""


def raise_problems(problems: Sequence[Problem], name: str) -> None:
    """Raise all problems of the data as one error, the first ones in full; do nothing when there are none.

    Raises:
        DataError: There are problems.
    """
    if len(problems) > MAX_PROBLEMS:
        rest = Problem(name, f"{len(problems) - MAX_PROBLEMS:,} more problems", "fix these first, then run again")
        raise DataError(*problems[:MAX_PROBLEMS], rest)
    if problems:
        raise DataError(*problems)


def verify_extra(where: str, extra: str, *modules: str) -> None:
    """Raise for packages of an extra that are not installed, without importing them.

    Raises:
        ConfigError: Some are not.
    """
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        found = f"{' and '.join(missing)} not installed"
        raise ConfigError(Problem(where, found, f"pip install 'recipes-lib[{extra}]'"))


@contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a ``DataError`` in the block to ``problems`` and continue behind it: all are told at once."""
    try:
        yield
    except DataError as error:
        problems += error.problems


class DivergedError(Exception):
    """A guard stopped training before a bad update reached the weights; exit code 3."""

    exit_code = EXIT_DIVERGED


class _LeaveError(SystemExit):
    """Ends the process with a message. Not an ``Exception``, so that ``except Exception`` does not catch it."""

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


def explain_refusal(error: BaseException) -> Problem | None:
    """Return the resource limit or permission that made the system raise ``error``; ``None`` for other errors.

    Disk, device memory, threads, the size and number of files, paths, and files that may not be written or read.
    """
    # Libraries wrap what the system said in errors of their own: the first that is known, from the outside in, is told.
    chain: BaseException | None = error
    while chain is not None:
        # A message may have several lines, of which a problem shows the first.
        words = str(chain).splitlines()[0] if str(chain) else ""
        code = chain.errno if isinstance(chain, OSError) else None
        where = str(getattr(chain, "filename", None) or "output_dir")
        if code == errno.EFBIG or "File too large" in words:
            remedy = "raise the limit (`ulimit -f unlimited`), or choose an output_dir on a file system without one"
            return Problem(where, f"a file would be larger than this process or file system may write: {words}", remedy)
        if code in (errno.ENOSPC, errno.EDQUOT) or any(phrase in words for phrase in _DISK_IS_FULL):
            remedy = (
                "free some space and run the same command: it resumes from the newest complete checkpoint; "
                "`recipes check` shows what a run will write"
            )
            return Problem(where, f"the disk is full: {words}", remedy)
        if code in _OF_FILES and getattr(chain, "filename", None) is not None:
            found, remedy = _OF_FILES[code]
            return Problem(where[:120], f"{found}: {os.strerror(code)}", remedy)
        if "can't start new thread" in words:
            remedy = (
                "raise the limit on processes and threads (`ulimit -u`, or that of the container) and run the same "
                "command, or lower dataloader_num_workers"
            )
            return Problem("threads", f"this process may have no more: {words}", remedy)
        # By name, because torch is not imported to tell a wrong key.
        if type(chain).__name__ == "OutOfMemoryError":
            remedy = (
                "lower per_device_train_batch_size and raise gradient_accumulation_steps by as much (the result is "
                "the same), set activation_checkpointing: true, or lower max_length"
            )
            return Problem("device memory", words, remedy)
        chain = chain.__cause__ or chain.__context__
    return None
